"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(*objects: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of some objects, and sets them back afterwards, whatever happens.

    What an object had from its class it has from there again.
    """
    before = [
        (holder, name, getattr(holder, name), name in getattr(holder, "__dict__", ()))
        for holder in objects
        for name in attributes
    ]
    try:
        for holder, name, _, _ in before:
            setattr(holder, name, attributes[name])
        yield
    finally:
        for holder, name, value, was_own in before:
            if not was_own and name in getattr(holder, "__dict__", ()):
                delattr(holder, name)
            else:
                setattr(holder, name, value)
