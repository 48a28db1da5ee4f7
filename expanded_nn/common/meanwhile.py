"""Attributes that have other values for a while, and warnings that are not shown."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
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


class OfAllThreads:
    """A context that changes what all threads share: entered by the first that comes, left by the last that goes."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.context, self.lock, self.inside, self.entered = context, Lock(), 0, context()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.entered = self.context()
                self.entered.__enter__()
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.entered.__exit__(None, None, None)


_FILTERS = OfAllThreads(warnings.catch_warnings)


@contextmanager
def quiet(message: str = "") -> Iterator[None]:
    """Without the warnings that begin so, or without any."""
    with _FILTERS:
        warnings.filterwarnings("ignore", message=message)
        yield
