"""Attributes that have other values for a while, and warnings that are not shown."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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


class _Quiet:
    """The warning filters of the process, which all threads share: the last one that leaves puts them back."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, warnings.catch_warnings()

    def enter(self, message: str) -> None:
        with self.lock:
            if not self.inside:
                self.before = warnings.catch_warnings()
                self.before.__enter__()
            self.inside += 1
            warnings.filterwarnings("ignore", message=message)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.before.__exit__(None, None, None)


_QUIET = _Quiet()


@contextmanager
def quiet(message: str = "") -> Iterator[None]:
    """Without the warnings that begin so, or without any."""
    _QUIET.enter(message)
    try:
        yield
    finally:
        _QUIET.leave()
