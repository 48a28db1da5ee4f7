"""Passes: which forwards' rows belong together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

from expanded_nn._errors import complaint, warn

_LOCK = threading.Lock()  # a thread with a model of its own looks at the passes of the others


class PassStage(Enum):
    """How far a pass has come: no backward has reached it, one delivers its rows, or one has ended."""

    OPEN = auto()
    REACHED = auto()
    DONE = auto()


class Pass:
    """The forwards whose rows belong together.

    | stage   | what happens                                       | stage after                       |
    |---------|----------------------------------------------------|-----------------------------------|
    | OPEN    | a forward of as many samples, and it may be joined | OPEN: the forward belongs to it   |
    | OPEN    | a forward of another number of samples             | OPEN, but joined no more          |
    | OPEN    | a backward delivers rows of it                     | REACHED: joined no more           |
    | OPEN    | `torch.autograd.grad` by parameters reaches it     | OPEN                              |
    | OPEN    | a backward that did not reach it ends or fails     | OPEN                              |
    | REACHED | that backward ends or fails                        | DONE                              |
    | DONE    | a second backward on the same graph                | DONE: its rows are added          |
    | any     | a forward goes on from what one of it has returned | the same: it belongs to it        |

    A pass lives as long as it may be needed: the graph of its forwards refers to it by the nodes of the expansions,
    `Passes.last` until the next pass begins, `Store.held` while it holds rows of it.

    Attributes:
        batch: B, the number of samples.
        number: Its place among all passes of a model, in the order of their forwards.
        stage: How far it has come.
        may_get_backward: Whether a backward may still come: none has yet, or it has retained the graph.
        reached_by: The number of the first backward that has delivered rows of it; of compiled steps, the number of
            the call and of the pass in it.
        of_others: The passes that other models have in its reentrant checkpoints, by their `Passes` and B.
    """

    def __init__(self, batch: int, number: int) -> None:
        self.batch, self.number = batch, number
        self.stage = PassStage.OPEN
        self.may_get_backward = True
        self.reached_by: Any = None
        self.of_others: dict[tuple[Passes, int], Pass] = {}

    def __repr__(self) -> str:
        return f"Pass(batch={self.batch}, number={self.number}, stage={self.stage.name})"


class _NoGradForward(threading.local):
    """The outermost forward without gradients, of each thread."""

    call: tuple[Any, int | None, Any] | None = None  # its module, B and inputs


class Passes:
    """The passes of one model.

    Invariant: `last` is never DONE.

    Attributes:
        last: The pass that the next forward joins, if the pass is OPEN and both have as many samples.
        without_rows: B of the last forward, if that has chosen no pass because all its layers are frozen.
        alive: The passes that something keeps alive.
        opened: How many passes there have been.
        first: The model's first pass, unless it was made anew, as for `one_pass`.
        no_grad_forward: The outermost forward that runs without gradients.
        kept: Strong references to passes that no node of the graph refers to yet, as under a reentrant checkpoint.
    """

    def __init__(self) -> None:
        self.last: Pass | None = None
        self.without_rows: int | None = None
        self.alive: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.opened = 0
        self.first: Pass | None = None
        self.kept: set[Pass] = set()
        self.no_grad_forward = _NoGradForward()

    def joined_or_new(self, batch: int) -> Pass:
        """The pass of a forward of so many samples."""
        if self.last is None or self.last.stage is not PassStage.OPEN or self.last.batch != batch:
            self.last = self.new(batch)
            self.first = self.last if self.opened == 1 else self.first
        return self.last

    def new(self, batch: int) -> Pass:
        """A pass without forwards, which is not `last`: no forward joins it by itself."""
        pass_ = Pass(batch, self.opened)
        self.opened += 1
        with _LOCK:
            self.alive.add(pass_)
        return pass_

    def seen_by_others(self) -> list[Pass]:
        """The passes that are alive, for a model that another thread may run."""
        with _LOCK:
            return list(self.alive)

    def finished(self, batch: int) -> Pass:
        """A pass whose rows are there, as those of a compiled step: no graph of autograd refers to it."""
        pass_ = Pass(batch, self.opened)
        pass_.stage, pass_.may_get_backward = PassStage.DONE, False
        self.opened += 1
        return pass_

    def note_without_rows(self, batch: int | None) -> None:
        """Notes a forward that has chosen no pass; weights that are used after it may begin one, of its samples."""
        would_join = self.last is not None and self.last.stage is PassStage.OPEN and self.last.batch == batch
        self.without_rows = None if would_join else batch

    def look_for_broadcast(self, last: Pass) -> None:
        """Warns that a weight, expanded after the forwards of a pass, would broadcast with what others have returned.

        Raises:
            PerSampleError: If the last forward has chosen no pass, and had more samples.
        """
        of_others = [pass_.batch for pass_ in self.alive if pass_.stage is PassStage.OPEN] + [self.without_rows]
        sizes = [size for size in of_others if size is not None and size != last.batch]
        if not sizes or (last.batch > 1 and 1 not in sizes):
            return
        counts = ", ".join(sorted({*map(str, sizes)}))
        error = complaint(
            "expanded(weight)",
            f"it has {last.batch} row(s), and forwards of {counts} sample(s) have had no backward: "
            "with what these return it would broadcast, and be wrong",
            "one number of samples",
            "Use it within one_pass(model, batch_size), together with the forward that it belongs to.",
        )
        if last.batch == 1 and self.without_rows in sizes:
            raise error
        warn(str(error))

    def recomputed(self, batch: int | None, behind: Iterable[Pass]) -> list[Pass]:
        """The passes that a forward inside a backward, as a checkpoint makes it, may belong to: one, if all is well.

        The graph decides first. Where it says nothing, passes that are not done come before those that are, then the
        number of samples decides. A single candidate is returned whatever the number of samples: the layer then raises
        an error that says more.

        Args:
            batch: How many samples its arguments hold; a single one may be shared by all samples.
            behind: The passes in the graph behind the running node, if any are known.
        """
        candidates = list(behind) or list(self.alive)
        # only a second backward on a retained graph runs a forward of a pass that is done
        candidates = [pass_ for pass_ in candidates if pass_.stage is not PassStage.DONE] or candidates
        if len(candidates) > 1:
            candidates = [pass_ for pass_ in candidates if batch in (pass_.batch, 1)]
        return candidates

    def backward_is_over(self) -> None:
        """Ends a backward: the passes that it has reached are done."""
        for pass_ in self.alive:
            if pass_.stage is PassStage.REACHED:
                pass_.stage = PassStage.DONE
        self.kept = {pass_ for pass_ in self.kept if pass_.stage is not PassStage.DONE}
        if self.last is not None and self.last.stage is PassStage.DONE:
            self.last = None
