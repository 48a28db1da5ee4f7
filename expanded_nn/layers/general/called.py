"""What a forward of the general rule is called with, and the parts of one sample."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from expanded_nn.common.batch import FOLDED, unfolded
from expanded_nn.common.modes import checkpoint_hooks


@dataclasses.dataclass
class Called:
    """What a forward is called with."""

    args: Any
    kwargs: Any
    batch: int
    leaves: list[Any]  # of `args` and `kwargs`
    dims: list[int | None]  # where the samples stand in each leaf, if it has any, or `FOLDED`
    inputs: list[Tensor]  # the tensors among the leaves, but for single numbers
    kind: Any  # what a trial finds holds for all calls of the same kind

    def by_sample(self, leaves: list[Any]) -> list[tuple[Any, int | None]]:
        """Leaves like those of the call, folded ones with a dimension for the samples, and where the samples stand."""
        return [unfolded(leaf, dim, self.batch) for leaf, dim in zip(leaves, self.dims, strict=True)]

    def kind_of_ways(self) -> Any:
        """The `kind` for comparisons with the forward on the whole batch.

        A checkpoint counts what is saved, even for a result that is dropped. So in it sizes that equal B by chance,
        which may lead another way, make another kind.
        """
        if checkpoint_hooks() is None:
            return self.kind
        return self.kind, *(bool(n == self.batch) for tensor in self.inputs for n in tensor.shape)


def is_cache(leaf: Any) -> bool:
    """Whether it is a cache, which models of `transformers` return for decoding: no loss reads it."""
    return "Cache" in type(leaf).__name__


def of_sample(leaf: Tensor, dim: int, sample: int, batch: int) -> Tensor:
    """The part of one sample, as a batch of one."""
    if dim != FOLDED:
        return leaf.narrow(dim, sample, 1)
    count = len(leaf) // batch
    return leaf[sample * count : (sample + 1) * count]


def once_per_sample(x: Tensor, dim: int, batch: int) -> Tensor:
    """A tensor; if it has a single row that all samples share, that row once per sample."""
    if x.dim() <= dim or dim < 0 or x.shape[dim] != 1:
        return x
    return x.expand(*x.shape[:dim], batch, *x.shape[dim + 1 :])
