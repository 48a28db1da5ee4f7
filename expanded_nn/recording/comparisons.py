"""When samples are compared: at new sizes of the batch, and now and then."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from expanded_nn.common.traced import wait_for_values


@dataclass
class PastComparisons:
    """When samples were compared in forwards of one kind: in the first batch of each size, and in ever fewer others.

    Attributes:
        calls: How many forwards there were.
        sizes: Those of their batches.
        looked_at: The size of the batch, up to 2, in which one has also looked for what differs from the plain model.
    """

    calls: int = 0
    sizes: set[int | None] = field(default_factory=set)
    looked_at: int = 0

    def are_due(self, batch: int) -> bool:
        """Whether samples are compared now: at the calls 0, 1, 3, 7, …, as values may lead them where they meet."""
        return batch not in self.sizes or (self.calls & (self.calls + 1)) == 0

    def wait_for_first(self) -> None:
        """In a trace: waits for the first call, where samples are compared. The graph serves batches of any size."""
        if not self.calls:
            wait_for_values("its samples are compared first")

    def note(self, batch: int | None, looked_at: int = 0) -> None:
        """Notes a forward that has succeeded."""
        self.calls += 1
        self.sizes.add(batch)
        self.looked_at = max(self.looked_at, looked_at)


def past_comparisons(module: Any) -> PastComparisons:
    """Those of a module that is called, in training or not; it keeps them while the mode is off."""
    past: dict[bool, PastComparisons] = vars(module).setdefault("_past_comparisons", defaultdict(PastComparisons))
    return past[module.training]


def compare_next(module: Any) -> None:
    """Lets the samples be compared in the module's next forwards, as if none of such sizes had been before."""
    for past in vars(module).get("_past_comparisons", {}).values():
        past.sizes.clear()
