"""While a step is traced into a graph (`compile.py`): what the graph takes for granted.

The eager code asks now and then for a value: whether all norms are finite, whether two gradients are equal. A graph has
no values yet. It takes the usual answer for granted and returns, with its results, whether that was right; where it was
not, the step is run eagerly instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OnlyEager(Exception):
    """A step of this kind is not traced, as what it does depends on values: it runs eagerly."""


class FirstEager(Exception):
    """A step runs eagerly once more, to show what has to be known before it is traced."""


class _State:
    """Of the trace that runs, and of the step whose models are looked for; one of each at most in a process.

    Attributes:
        assumed: What the trace has taken for granted.
        met: The recorders that the step has met.
    """

    def __init__(self) -> None:
        self.assumed: list[Tensor] | None = None
        self.met: dict[Any, None] | None = None


_STATE = _State()


@contextmanager
def assumptions() -> Iterator[list[Tensor]]:
    """Collects what is assumed meanwhile: numbers that are true if it was right."""
    made: list[Tensor] = []
    _STATE.assumed = made
    try:
        yield made
    finally:
        _STATE.assumed = None


def is_traced() -> bool:
    """Whether this code is traced; other threads go on with real values meanwhile."""
    if _STATE.assumed is None:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def assume(condition: Tensor) -> None:
    """The graph that is traced is right where the condition holds."""
    assert _STATE.assumed is not None
    _STATE.assumed.append(condition)


def refuse_values(reason: str) -> None:
    """Says, while a step is traced, that what comes now depends on values, and has no usual outcome.

    Raises:
        OnlyEager: With the reason, in a trace.
    """
    if is_traced():
        raise OnlyEager(reason)


def wait_for_values(reason: str) -> None:
    """Says, while a step is traced, that something is made once that takes values.

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
    """A recorder takes part in what runs."""
    if _STATE.met is not None:
        _STATE.met[recorder] = None
