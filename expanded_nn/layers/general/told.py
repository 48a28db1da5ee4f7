"""What trials have told of a module of the general rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import contains
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expanded_nn.common.modes import running_backward
from expanded_nn.layers.general.called import Called
from expanded_nn.layers.general.gradients import Verdict
from expanded_nn.layers.general.left import Place
from expanded_nn.layers.general.mapped import MEAN, SUM, Mapped
from expanded_nn.layers.general.samples import Memo


class Compared(NamedTuple):
    """What a comparison of the samples' results with the plain forward of the whole batch has found."""

    alike: bool  # whether they are the same; `False` where random numbers leave nothing to compare
    dims: tuple[int, ...]  # where the samples stand in each result
    orders: tuple[tuple[int, ...], ...]  # of each result of the plain forward, its `memory_order`

    @property
    def reduces(self) -> bool:
        """Whether the forward returns a mean or a sum over the samples, which values may lead away from that."""
        return not {MEAN, SUM}.isdisjoint(self.dims)

    def fits(self, mapped: Mapped) -> bool:
        """Whether the samples may stand in the same dimensions of other results, which have as many dimensions."""
        possible, ranks = mapped.possible_dims, map(Tensor.dim, mapped.tensors)
        if len(possible) != len(self.dims) or not all(map(contains, possible, self.dims)):
            return False
        pairs = zip(self.dims, self.orders, ranks, strict=True)
        return all(len(order) == rank for dim, order, rank in pairs if dim not in (MEAN, SUM))


# what a forward on the whole batch has done with its parameters, see `Run`, and how many tensors it has returned
Way = tuple[Any, ...]


class Ways(NamedTuple):
    """In which ways a forward on the whole batch is right, for calls of a kind, as far as comparisons have told."""

    known: Mapping[Way, Compared] = {}  # those in which it was right, with what it returns then
    trials_left: int = 8  # how many more comparisons there may be
    hooks: bool = False  # whether these call the forward hooks of modules within
    is_wrong: bool = False  # whether it is right in none, so that it never runs so again

    def after(self, verdict: Verdict, way: Way | None, compared: Compared | None) -> Ways:
        """What is known after another comparison; after a wrong one the module never runs so again.

        An unclear one counts for three: where the gradients of a step are zero, those of the next will be, too.
        """
        if verdict is Verdict.WRONG:
            return Ways(trials_left=0, is_wrong=self.trials_left > 0)  # else the trials are used up
        left = self.trials_left - (3 if verdict is Verdict.UNCLEAR else 1)
        known = {**self.known, way: compared} if verdict is Verdict.RIGHT and way and compared else self.known
        return self._replace(known=known, trials_left=max(0, left))


@dataclass
class Told:
    """What trials have told of a module, by the kind of a call."""

    readings: dict[Any, list[int | None]] = field(default_factory=dict)  # where the samples stand in its arguments
    compared: dict[Any, Compared] = field(default_factory=dict)  # where they stand in its results
    with_derivatives: set[Any] = field(default_factory=set)  # the kinds of which derivatives were compared as well
    left: dict[Any, Sequence[Place]] = field(default_factory=dict)  # the attributes in which it leaves results
    together: dict[Any, Sequence[Place]] = field(default_factory=dict)  # others, of which no sample has a part
    miscounts: set[Any] = field(default_factory=set)  # the kinds of which a sample alone leaves other numbers
    ways: dict[Any, Ways] = field(default_factory=dict)  # how its forward may run on the whole batch
    needs_hooks: bool = False  # whether its forward needs what hooks of modules within it collect
    memo: Memo = field(default_factory=Memo)  # whose folded rows are
    leaves_something: bool = True  # whether the last forward has, which is undone if that was in vain
    turn: int = -1  # how many calls were counted, less 1: at every 32nd one sample is compared alone
    shared: set[tuple[int, int]] = field(default_factory=set)  # (how many arguments, place) of those once shared
    failed: set[Any] = field(default_factory=set)  # the kinds of which a comparison has failed: no way is trusted again

    def seen_shared(self, call: Called) -> list[bool]:
        """Which arguments have B rows now and had others in other calls, so that all samples share them."""
        count, seen = len(call.leaves), []
        for place, (leaf, dim) in enumerate(zip(call.leaves, call.dims, strict=True)):
            if dim is None and isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] not in (1, call.batch):
                self.shared.add((count, place))
            seen.append(dim is not None and (count, place) in self.shared)
        return seen

    def lacks_derivatives(self, call: Called) -> bool:
        """Whether derivatives are to be compared: once per kind of call, and not while a checkpoint computes again."""
        return torch.is_grad_enabled() and call.kind not in self.with_derivatives and running_backward() < 0

    def distrust(self, call: Called) -> None:
        """From now on calls of this kind go sample by sample, and each is compared."""
        self.failed.add(call.kind)
        self.compared.pop(call.kind, None)
