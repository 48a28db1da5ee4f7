"""What a graph assumes while a step is traced into it (`compile.py`).

The eager code looks at values in a few places: whether all norms are finite, whether two gradients are equal. A trace
has no values. It assumes the usual answer, and the graph returns with its results whether that was right; where it was
not, the step is run eagerly instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OnlyEager(Exception):
    """Steps of this kind always run eagerly, as what they do depends on values."""


class FirstEager(Exception):
    """The step has to run eagerly once more before it can be traced."""


class _State:
    """The state of the trace that runs, and of the step whose models are looked for; one of each at most in a process.

    Attributes:
        assumed: The conditions that the trace has assumed, `None` outside of a trace.
        is_thorough: Whether the trace assumes less than usual, at a cost.
        met: The recorders that have taken part in the step, `None` if they are not looked for.
    """

    def __init__(self) -> None:
        self.assumed: list[Tensor] | None = None
        self.is_thorough = False
        self.met: dict[Any, None] | None = None


_STATE = _State()


@contextmanager
def assumptions(*, thorough: bool = False) -> Iterator[list[Tensor]]:
    """Collects the conditions that are assumed meanwhile; the `thorough` ones where there are such."""
    conditions: list[Tensor] = []
    _STATE.assumed, _STATE.is_thorough = conditions, thorough
    try:
        yield conditions
    finally:
        _STATE.assumed = None


def is_traced() -> bool:
    """Whether this code is traced; other threads meanwhile compute with real values."""
    if _STATE.assumed is None:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def assume(condition: Tensor, thorough: Callable[[], Tensor] | None = None) -> None:
    """Assumes a condition: the graph that is traced is right where it holds.

    Args:
        condition: What usually holds.
        thorough: Computes a weaker condition that is enough, at a cost: for steps whose usual graph has been wrong.
    """
    assert _STATE.assumed is not None
    _STATE.assumed.append(thorough() if thorough is not None and _STATE.is_thorough else condition)


def refuse_values(reason: str) -> None:
    """Gives a trace up: what comes next depends on values, and has no usual outcome.

    Raises:
        OnlyEager: With the reason, in a trace.
    """
    if is_traced():
        raise OnlyEager(reason)


def wait_for_values(reason: str) -> None:
    """Puts a trace off: what comes next is done only once, and takes values.

    Raises:
        FirstEager: With the reason, in a trace.
    """
    if is_traced():
        raise FirstEager(reason)


@contextmanager
def recorders_met() -> Iterator[dict[Any, None]]:
    """Collects the recorders that take part in a step."""
    met: dict[Any, None] = {}
    _STATE.met = met
    try:
        yield met
    finally:
        _STATE.met = None


def note_recorder(recorder: Any) -> None:
    """Notes that a recorder takes part in the step."""
    if _STATE.met is not None:
        _STATE.met[recorder] = None
