"""Arrays of NumPy and of Python, and numbers of C, which a forward may change in place, as those in which it counts."""

from __future__ import annotations

import ctypes
from array import array
from copy import copy
from typing import Any

_ARRAYS: Any = bytearray | array
NUMBERS_OF_C: Any = ctypes.c_int.__mro__[-2]  # the class of all that is laid out as in C
MOST_BYTES = 100_000  # of an array that is copied before each forward that may be in vain


def has_numbers(value: Any) -> bool:
    """Whether it holds numbers that can be set, and no objects: an array of NumPy or Python, a number of C."""
    is_of_numpy = any(base.__module__ == "numpy" for base in type(value).__mro__)  # a class may be derived from NumPy's
    is_of_numpy = is_of_numpy and hasattr(value, "tobytes") and hasattr(value, "__setitem__")
    return is_of_numpy or isinstance(value, _ARRAYS | NUMBERS_OF_C)


def is_counter(value: Any) -> bool:
    """Whether it is an array that a forward may count in: a small one that shows no other object's numbers."""
    if not has_numbers(value) or isinstance(value, NUMBERS_OF_C) or getattr(value, "base", None) is not None:
        return False
    size = value.nbytes if hasattr(value, "nbytes") else len(value) * getattr(value, "itemsize", 1)
    return 0 < size <= MOST_BYTES


def bytes_of(value: Any) -> bytes:
    """The numbers in an array of NumPy or Python, or a number of C."""
    return value.tobytes() if hasattr(value, "tobytes") else bytes(value)


def key_of_numbers(value: Any) -> tuple[Any, ...]:
    """What is equal for arrays, or numbers of C, with the same numbers in the same shape and dtype."""
    return bytes_of(value), getattr(value, "shape", None), getattr(getattr(value, "dtype", None), "str", None)


def copied(value: Any) -> Any:
    """A copy of an array, or of a number of C."""
    return type(value).from_buffer_copy(value) if isinstance(value, NUMBERS_OF_C) else copy(value)


def put_numbers(owner: Any, before: Any) -> None:
    """Gives an array, or a number of C, the numbers of a copy of it."""
    if isinstance(owner, NUMBERS_OF_C):
        memoryview(owner).cast("B")[:] = bytes_of(before)
    else:
        owner[slice(None) if isinstance(owner, _ARRAYS) else ...] = before
