"""A running backward: when it begins to deliver rows, when it is over, and whether it failed.

The only room that calls private parts of torch's engine, but for the number of the running backward (`_modes.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from expanded_nn._modes import running_backward as running_backward


def running_node() -> Any:
    """The node of the graph whose backward this code runs in."""
    return torch._C._current_autograd_node()


def in_transform() -> bool:
    """Whether a transform of `torch.func` is applied to this code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward adds to `.grad` of a leaf, and does not only hand its gradient to the caller."""
    return _is_executed(torch.autograd.graph.get_gradient_edge(parameter).node)


def accumulates_next(node: Any) -> bool:
    """The same for the leaf that is a node's only input."""
    return _is_executed(node.next_functions[0][0])


def _is_executed(node: Any) -> bool:
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # its words: it does not speak of a leaf in torch.autograd.grad
        return False
    return True


def graph_of(*ends: Any) -> Iterator[Any]:
    """The nodes of the graph that end in some, nearest first."""
    seen: set[Any] = set()
    nodes = deque(ends)
    while nodes:
        node = nodes.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(parent for parent, _ in node.next_functions)


class BackwardStage(Enum):
    """What the running backward has done with one model so far: nothing, forwards at most, or rows as well."""

    IDLE = auto()
    RECOMPUTING = auto()
    DELIVERING = auto()


def _failed(ref: weakref.ref[Backward]) -> None:
    """The engine has let go of a backward that has not ended."""
    backward = ref()
    if backward is not None:
        backward.settle()


class _Mark:
    """What the engine keeps alive while a backward runs, by the callbacks that were queued, and nothing else does."""


class Backward:
    """The backward that a model is in.

    | stage                  | what happens                                        | stage after                     |
    |------------------------|-----------------------------------------------------|---------------------------------|
    | IDLE                   | a forward inside a backward (a checkpoint)          | RECOMPUTING                     |
    | IDLE, RECOMPUTING      | rows are delivered                                  | DELIVERING; `enter` says `True` |
    | RECOMPUTING, DELIVERING| a forward inside the backward, again                | the same                        |
    | DELIVERING             | rows are delivered, again                           | DELIVERING                      |
    | RECOMPUTING, DELIVERING| another backward runs inside of this one            | the same: it is a part of it    |
    | RECOMPUTING, DELIVERING| the engine calls the callback that was queued       | IDLE; `over(delivered, False)`  |
    | RECOMPUTING, DELIVERING| the engine has let go of the callback, uncalled, or | IDLE; `over(delivered, True)`   |
    |                        | code runs outside of any backward                   |                                 |

    Backwards nest: a reentrant checkpoint runs one of its own inside the outer one, and so may a hook of the user's.
    The outermost that has met the model counts. The engine does not say whether it still runs, but it keeps its
    callbacks until it ends or fails: a mark that only ours hold on to tells. So nothing else may refer to the mark, or
    to the callback: a backward that failed would be taken for one that runs.

    Args:
        over: The method to call when it is over, with whether it delivered rows, and whether it failed.
    """

    def __init__(self, over: Callable[[bool, bool], None]) -> None:
        self.stage = BackwardStage.IDLE
        self.over = weakref.WeakMethod(over)
        self.mark: Callable[[], _Mark | None] = lambda: None
        self.resumed: list[Any] = []  # the passes that checkpoints have gone on with, the last one last

    def enter(self, *, delivers: bool) -> bool:
        """Something happens inside a backward; whether it is the first to deliver rows.

        Args:
            delivers: Whether it is rows, and not a forward.
        """
        if self.stage is not BackwardStage.IDLE and self.mark() is None:
            self._end(failed=True)
        if self.stage is BackwardStage.IDLE:
            self._begin()
        begins = delivers and self.stage is not BackwardStage.DELIVERING
        if begins:
            self.stage = BackwardStage.DELIVERING
        return begins

    def settle(self) -> None:
        """The backward, if there is one, runs no more: one that has not ended has failed."""
        if self.stage is not BackwardStage.IDLE:
            self._end(failed=True)

    def _begin(self) -> None:
        self.stage = BackwardStage.RECOMPUTING
        me, mark = weakref.ref(self), _Mark()

        def end() -> None:
            backward = me()
            if backward is not None and backward.mark() is mark:
                backward._end(failed=False)

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # queued twice, so that it runs behind the callbacks of others, which may be queued later and change gradients,
        # as DistributedDataParallel's does: `.grad` is looked at when all have
        queue(lambda: queue(end))
        self.mark = weakref.ref(mark, lambda _: _failed(me))

    def _end(self, *, failed: bool) -> None:
        delivered, over = self.stage is BackwardStage.DELIVERING, self.over()
        self.stage, self.mark, self.resumed = BackwardStage.IDLE, lambda: None, []
        if over is not None:
            over(delivered, failed)
