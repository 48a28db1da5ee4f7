"""The running backward: when it delivers its first rows, when it ends, and whether it failed.

No other file calls private parts of torch's engine, but `common/modes.py` for the number of the running backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch.autograd import forward_ad

from expanded_nn.common.modes import running_backward, transforms


def keeps_graph() -> bool:
    """Whether the running backward leaves its graph for another one (`retain_graph=True`)."""
    # outside of a backward torch's function crashes
    return running_backward() >= 0 and torch._C._autograd._get_current_graph_task_keep_graph()


def running_node() -> Any:
    """The autograd node whose backward calls this code."""
    return torch._C._current_autograd_node()


def in_transform() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, runs this code."""
    return transforms() > 0 or forward_ad._current_level >= 0


def accumulates(leaf_node: Any) -> bool:
    """Whether the running backward adds to the `.grad` of a leaf; `torch.autograd.grad` only returns the gradient."""
    try:
        torch._C._will_engine_execute_node(leaf_node)
    except RuntimeError:  # the engine does not answer for a leaf that torch.autograd.grad asks for
        return False
    return True


class BackwardStage(Enum):
    """What the running backward has done with one model: nothing, run forwards again, or delivered rows."""

    IDLE = auto()
    RECOMPUTING = auto()
    DELIVERING = auto()


def _failed(ref: weakref.ref[Backward]) -> None:
    """The engine has dropped its callbacks without calling them."""
    backward = ref()
    if backward is not None:
        backward.end_unfinished()


class _Mark:
    """An object that only the engine's queued callbacks keep alive: it lives as long as the backward runs."""


class Backward:
    """The backward that a model is in.

    | stage                  | what happens                                 | stage after                              |
    |------------------------|----------------------------------------------|------------------------------------------|
    | IDLE                   | a forward inside a backward (a checkpoint)   | RECOMPUTING                              |
    | IDLE, RECOMPUTING      | rows are delivered                           | DELIVERING; `enter` returns `True`       |
    | RECOMPUTING, DELIVERING| another forward inside the backward          | the same                                 |
    | DELIVERING             | more rows are delivered                      | DELIVERING                               |
    | RECOMPUTING, DELIVERING| another backward runs inside of this one     | the same: it is a part of this one       |
    | RECOMPUTING, DELIVERING| the engine calls the queued callback         | IDLE; `on_end(delivered, failed=False)`  |
    | RECOMPUTING, DELIVERING| the engine drops the callback uncalled, or   | IDLE; `on_end(delivered, failed=True)`   |
    |                        | code runs outside of any backward            |                                          |

    Backwards nest: a reentrant checkpoint runs one inside the outer one, and so may a user's hook. The outermost one
    that has met the model counts.

    The engine does not say whether a backward still runs, but it keeps its callbacks until the backward ends or fails.
    So a mark that only our callbacks hold shows it: unless the stage is IDLE, the mark is alive as long as the backward
    runs. Nothing else may refer to the mark or to the callback, or a backward that failed would seem to run on.

    Attributes:
        stage: What the backward has done so far.
        on_end: The method to call when it ends, with whether it delivered rows, and whether it failed.
        mark: Gives the mark, `None` when no backward runs.
        resumed: The pass of the forward that a checkpoint has run again last.
        computed: The node of `ExpandComputed` whose backward is running an inner one, from the weight to its
            parameters: the inner graph does not lead to the pass.
    """

    def __init__(self, on_end: Callable[[bool, bool], None]) -> None:
        self.stage = BackwardStage.IDLE
        self.on_end = weakref.WeakMethod(on_end)
        self.mark: Callable[[], _Mark | None] = lambda: None
        self.resumed: Any = None
        self.computed: Any = None

    def enter(self, *, delivers: bool) -> bool:
        """Notes that a backward delivers rows, or else runs a forward; whether these are its first rows."""
        if self.stage is BackwardStage.IDLE:
            self._begin()
        is_first_delivery = delivers and self.stage is not BackwardStage.DELIVERING
        if is_first_delivery:
            self.stage = BackwardStage.DELIVERING
        return is_first_delivery

    def end_unfinished(self) -> None:
        """Ends a backward that runs no more and has not ended: it has failed."""
        if self.stage is not BackwardStage.IDLE:
            self._end(failed=True)

    def _begin(self) -> None:
        self.stage = BackwardStage.RECOMPUTING
        ref, mark = weakref.ref(self), _Mark()

        def end() -> None:
            backward = ref()
            if backward is not None and backward.mark() is mark:
                backward._end(failed=False)

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # Queued twice, to run after callbacks that are queued later and change gradients, as those of
        # DistributedDataParallel do.
        queue(lambda: queue(end))
        self.mark = weakref.ref(mark, lambda _: _failed(ref))

    def _end(self, *, failed: bool) -> None:
        delivered, on_end = self.stage is BackwardStage.DELIVERING, self.on_end()
        self.stage, self.mark, self.resumed = BackwardStage.IDLE, lambda: None, None
        if on_end is not None:
            on_end(delivered, failed)
