"""Passes: which forwards' rows belong together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from enum import Enum, auto


class PassStage(Enum):
    """How far a pass has come: no backward has met it, one is delivering its rows, or one has ended."""

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

    The graph of its forwards keeps a pass alive, by the nodes of the expansions. So does `Passes.current` until the
    next pass begins, and `Store.held` while it holds rows of it.

    Attributes:
        batch: B, the number of samples.
        number: Its place among all passes of a model, in the order of their forwards.
        stage: How far it has come.
    """

    def __init__(self, batch: int, number: int) -> None:
        self.batch, self.number = batch, number
        self.stage = PassStage.OPEN

    def __repr__(self) -> str:
        return f"Pass(batch={self.batch}, number={self.number}, stage={self.stage.name})"


class Passes:
    """The passes of one model.

    Attributes:
        current: The pass that the next forward of as many samples joins, if any.
        alive: All passes that something keeps alive, and references to some that nothing does any more.
        opened: How many there have been.
        no_grad_forward: For each thread, the module, the batch and the inputs of the outermost forward under `no_grad`.
        kept: Passes that are kept alive here, as their reentrant checkpoint has left no node to note them on.
    """

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.alive: list[weakref.ref[Pass]] = []
        self.opened = 0
        self.kept: list[Pass] = []
        self.no_grad_forward = threading.local()

    def joined_or_new(self, batch: int) -> Pass:
        """The pass of a forward of so many samples."""
        if self.current is None or self.current.stage is not PassStage.OPEN or self.current.batch != batch:
            self.current = self.new(batch)
        return self.current

    def new(self, batch: int) -> Pass:
        """A pass that no forward is in yet, and that none joins by itself."""
        opened = Pass(batch, self.opened)
        self.opened += 1
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.alive.append(weakref.ref(opened))
        return opened

    def recomputed(self, batch: int | None, behind: Iterable[Pass]) -> list[Pass]:
        """The passes that a forward inside a backward, as a checkpoint makes it, may belong to: one, if all is well.

        What the graph says comes first. Where it says nothing, passes that a backward has not done with come before
        those that are done, and then the number of samples decides. A single candidate is returned whatever the
        number of samples: the layer itself complains of that, in better words.

        Args:
            batch: How many samples its arguments hold; a single one may be shared by all samples.
            behind: The passes that are known to be in the graph behind the running node, if any are.
        """
        candidates = list(behind) or [found for ref in self.alive if (found := ref()) is not None]
        # passes that are done are meant by a second backward on a retained graph only
        candidates = [each for each in candidates if each.stage is not PassStage.DONE] or candidates
        if len(candidates) > 1:
            candidates = [each for each in candidates if batch in (each.batch, 1)]
        return candidates

    def backward_is_over(self) -> None:
        """The passes that it has reached are done."""
        for ref in self.alive:
            reached = ref()
            if reached is not None and reached.stage is PassStage.REACHED:
                reached.stage = PassStage.DONE
        self.kept = [each for each in self.kept if each.stage is not PassStage.DONE]
        if self.current is not None and self.current.stage is PassStage.DONE:
            self.current = None
