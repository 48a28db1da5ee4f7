"""Which sample each number of a tensor belongs to, as an index of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from expanded_nn.core import cost

Result = TypeVar("Result")
Samples = Tensor | None  # of a tensor: an index of its shape, of size 1 where it is constant; `None` of what has none
ENTRY = 64  # what an entry of a memo counts for, beside its numbers: a small tensor takes as much memory as so many
NOBODY = -1  # in such an index: what is of no sample


class Unknown(Exception):
    """An operation has no rule, or brings numbers of several samples together."""


class Memo:
    """What functions of samples have given, by these tensors themselves: layers that are alike ask the same again.

    It is kept for the next forward, which asks the same where no values lead it. So nothing of it may be changed in
    place.
    """

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.known: dict[Any, list[Tensor]] = {}  # by their shapes and devices, the last ones first
        self.numel = 0
        self.follows_writes = False  # whether forwards write into parts of tensors, which is to be looked at

    def begin(self) -> None:
        """Forgets what is too much to be kept for another forward."""
        if self.numel > cost.KEPT_SAMPLES:
            self.found, self.known, self.numel = {}, {}, 0

    def of(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)`, which is computed once; samples that were there before are the same tensor."""
        key = function, args  # a tensor is hashed by its identity
        found = self.found.get(key, NotImplemented)
        if found is NotImplemented:
            found = function(*args)
            found = self.found[key] = self.same(found) if isinstance(found, Tensor) else found
            self.numel += sum(x.numel() for x in args if isinstance(x, Tensor)) + ENTRY
        return cast(Result, found)

    def same(self, samples: Samples) -> Samples:
        """Samples that depend on values; the tensor that was there before, where it has the same numbers."""
        if samples is None:
            return None
        kind = samples.shape, samples.device
        known = self.known.setdefault(kind, [])
        before = next((other for other in known if samples is other or torch.equal(samples, other)), None)
        if before is None:
            self.known[kind] = [samples, *known[:3]]
            self.numel += samples.numel()
        return samples if before is None else before


def constant(samples: Tensor, dims: Sequence[int]) -> Tensor:
    """The samples with size 1 in these dimensions; if they are not the same along one of them, they are unknown."""
    for dim in dims:
        if samples.shape[dim] > 1:
            first = samples.narrow(dim, 0, 1)
            if not bool((samples == first).all()):
                raise Unknown
            samples = first
    return samples


def compact(samples: Tensor) -> Tensor:
    """The samples with size 1 in the dimensions along which they are constant."""
    for dim in range(samples.dim()):
        first = samples.narrow(dim, 0, 1)
        samples = first if bool((samples == first).all()) else samples
    return samples


def together(found: Sequence[Samples], dims: int, memo: Memo) -> Samples:
    """The samples of what is computed number by number from several tensors, which broadcast."""
    total: Samples = None
    for samples in found:
        if samples is None or samples is total:
            continue
        whole = samples if samples.dim() == dims else memo.of(with_dims, samples, dims)
        total = whole if total is None or total is whole else memo.of(_of_both, total, whole)
    return total


def _of_both(samples: Tensor, other: Tensor) -> Tensor:
    if not bool(((samples == other) | (samples == NOBODY) | (other == NOBODY)).all()):
        raise Unknown
    if samples.shape == other.shape and torch.equal(samples, other):
        return samples
    return torch.maximum(samples, other)


def with_dims(samples: Tensor, dims: int) -> Tensor:
    return samples if samples.dim() == dims else samples.view(*[1] * (dims - samples.dim()), *samples.shape)


def reshaped(samples: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """The samples of a tensor in another shape; along dimensions in which they do not differ their size stays 1."""
    if prod(before) == 0:
        raise Unknown
    whole: list[int] = []
    shape: list[int] = []
    for dims, sizes in _runs(before, after):
        differ = any(samples.shape[dim] > 1 for dim in dims)
        whole += [before[dim] if differ else 1 for dim in dims]
        shape += [size if differ else 1 for size in sizes]
    return samples.expand(whole).reshape(shape)


def _runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, Sequence[int]]]:
    """The shortest runs of dimensions that have equally many numbers in two shapes: dimensions, and sizes of the other.

    From `(B, T, d)` to `(B * T, d)` they are dimensions 0 and 1 with `B * T`, and dimension 2 with `d`.
    """
    place = other_place = 0
    while place < len(before) or other_place < len(after):
        start, other_start, count, other_count = place, other_place, 1, 1
        while (start == place and other_start == other_place) or count != other_count:
            if place < len(before) and count <= other_count:
                count *= before[place]
                place += 1
            else:
                other_count *= after[other_place]
                other_place += 1
        yield range(start, place), after[other_start:other_place]
