"""Parameters of tests of which there are many of a kind: some run each time, the others are slow."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], every: int = 2) -> list[Any]:
    """The values, of which each second one (or third, ...) runs each time."""
    return [value if number % every == 0 else slow(value) for number, value in enumerate(values)]


def some_of(named: Mapping[str, Any], every: int = 2) -> list[Any]:
    """The values with their names as ids; a tuple has several parameters."""
    values = [value if isinstance(value, tuple) else (value,) for value in named.values()]
    marks = [[] if number % every == 0 else [pytest.mark.slow] for number in range(len(named))]
    return [pytest.param(*value, id=name, marks=mark) for name, value, mark in zip(named, values, marks, strict=True)]


def slow(value: Any) -> Any:
    """A value with which a test is slow."""
    return pytest.param(value, marks=pytest.mark.slow)
