"""What a graph assumes while a step is traced into it (`compile.py`).

The eager code looks at values in a few places: whether all norms are finite, whether two gradients are equal. A trace
has no values. It assumes the usual answer, and the graph returns with its results whether that was right; where it was
not, the step is run eagerly instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from expanded_nn.common.modes import unseen

Function = TypeVar("Function", bound=Callable[..., Any])


class HasGraphs:
    """What has graphs of its own, as a compiled step does: what these hold is nobody else's, and not looked into."""


class OnlyEager(Exception):
    """Steps of this kind always run eagerly, as what they do depends on values."""


class FirstEager(Exception):
    """The step has to run eagerly once more before it can be traced."""


class TraceError(FirstEager):
    """The trace raises what the step itself does not, as code may that takes no symbol for a size."""


class LookFirst(Exception):
    """What the step does depends on which gradients are zero before it, and the trace was not told that."""


class _State:
    """The state of the trace that runs; there is one at most in a process."""

    def __init__(self) -> None:
        # what the trace has assumed, each with what it means that it does not hold; `None` outside of a trace
        self.assumed: list[tuple[Tensor, str]] | None = None
        # gradients from before the trace, and tensors that it has set to zero, by id: with the version, and whether
        # they are zero, `None` if nobody has looked
        self.gradients: dict[int, tuple[Tensor, int, bool | None]] = {}
        self.is_thorough = False  # whether the trace assumes less than usual, at a cost
        self.has_looked = False  # whether somebody has looked at the gradients from before the trace
        self.has_hooks = False  # whether the trace has put a hook on a tensor that it has computed


_STATE = _State()
_MET = threading.local()  # `recorders`: those that took part in this thread's step, while somebody collects them


@contextmanager
def assumptions(*, thorough: bool = False, looked: bool = False) -> Iterator[list[tuple[Tensor, str]]]:
    """Collects the conditions that are assumed meanwhile; the `thorough` ones where there are such.

    `looked` says that somebody has looked at the gradients that are there before the step.
    """
    conditions: list[tuple[Tensor, str]] = []
    _STATE.assumed, _STATE.is_thorough, _STATE.has_looked, _STATE.has_hooks = conditions, thorough, looked, False
    try:
        yield conditions
    finally:
        _STATE.assumed = None
        _STATE.gradients.clear()


def is_traced() -> bool:
    """Whether this code is traced; other threads meanwhile compute with real values."""
    if _STATE.assumed is None:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def beside_trace(method: Function) -> Function:
    """Lets a method compute in a trace what is the same at each call: it is no part of the graph."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            return method(*args, **kwargs)
        with unseen(), no_dispatch():
            return method(*args, **kwargs)

    return cast(Function, run)


def assume(condition: Tensor, otherwise: str, thorough: Callable[[], Tensor] | None = None) -> None:
    """Assumes a condition: the graph that is traced is right where it holds.

    Args:
        condition: What usually holds.
        otherwise: What it means that it does not hold, as the end of a sentence "The step runs eagerly, as ...".
        thorough: Computes a weaker condition that is enough, at a cost: for steps whose usual graph has been wrong.
    """
    assert _STATE.assumed is not None
    condition = thorough() if thorough is not None and _STATE.is_thorough else condition
    _STATE.assumed.append((condition, otherwise))


def note_gradient(grad: Tensor, is_zero: bool | None) -> None:
    """Notes whether a gradient from before the trace is zero, `None` if nobody has looked."""
    _STATE.gradients[id(grad)] = grad, grad._version, is_zero


def look_first() -> None:
    """Gives a trace up in favor of another one, after a look at the gradients that are there before the step.

    Raises:
        LookFirst: In a trace, if nobody has looked.
    """
    if is_traced() and not _STATE.has_looked:
        raise LookFirst


def note_hook() -> None:
    """Notes that the step puts a hook on a tensor that it has computed."""
    _STATE.has_hooks = True


def may_have_hooks() -> bool:
    """Whether there may be hooks on tensors that the step has computed: no graph of autograd's shows them."""
    return not is_traced() or _STATE.has_hooks


def note_zeroed(tensor: Tensor) -> None:
    """Notes that the step is just about to set a tensor to zero, in place."""
    _STATE.gradients[id(tensor)] = tensor, tensor._version + 1, True


def known_zero(grad: Tensor) -> bool | None:
    """Whether a gradient is zero, as far as a trace knows that; `None` otherwise, and outside of a trace.

    Raises:
        LookFirst: If it is as it was before the trace, and nobody has looked.
    """
    if not is_traced():
        return None
    noted_grad, version, is_zero = _STATE.gradients.get(id(grad), (None, 0, None))
    if noted_grad is not grad or version != grad._version:
        return None
    if is_zero is None:
        raise LookFirst
    return is_zero


def refuse_values(reason: str) -> None:
    """Gives a trace up for good: what comes next depends on values, and none of its outcomes is the usual one.

    Raises:
        OnlyEager: With the reason, in a trace.
    """
    if is_traced():
        raise OnlyEager(reason)


def wait_for_values(reason: str) -> None:
    """Puts a trace off to a later call: what comes next needs values, and is done in the first call only.

    Raises:
        FirstEager: With the reason, in a trace.
    """
    if is_traced():
        raise FirstEager(reason)


@contextmanager
def recorders_met() -> Iterator[dict[Any, None]]:
    """Collects the recorders that take part in a step of this thread."""
    outer: dict[Any, None] | None = getattr(_MET, "recorders", None)
    recorders: dict[Any, None] = {}
    _MET.recorders = recorders
    try:
        yield recorders
    finally:
        _MET.recorders = outer
        if outer is not None:  # of a step that has called this one
            outer.update(recorders)


def note_recorder(recorder: Any) -> None:
    """Notes that a recorder takes part in the step."""
    recorders = getattr(_MET, "recorders", None)
    if recorders is not None:
        recorders[recorder] = None
