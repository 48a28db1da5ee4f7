"""Parameters of tests of which there are many of a kind: some run each time, the others are slow."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def slow(value: Any) -> Any:
    """A value with which a test is slow; a tuple has several parameters."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def some(values: Sequence[Any]) -> list[Any]:
    """The values, of which each second one runs each time."""
    return [slow(value) if number % 2 else value for number, value in enumerate(values)]


def some_of(named: Mapping[str, Any], *, every: int = 2) -> list[Any]:
    """Likewise each second one, or each third one and so on, with their names as ids."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=[pytest.mark.slow] * (number % every > 0),
        )
        for number, (name, value) in enumerate(named.items())
    ]
