"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(*objects: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of some objects, and sets them back afterwards, whatever happens."""
    before = [(holder, name, getattr(holder, name)) for holder in objects for name in attributes]
    try:
        for holder, name, _ in before:
            setattr(holder, name, attributes[name])
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
