"""Rows whose parts are outer products, each of its own: those of a weight `(E, out, in)` of several experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from expanded_nn.core.products import Products
from expanded_nn.core.terms import Outer, PaddedOuter, Term


class Parts(Term):
    """Rows `(B, E, out, in)`: part `numbers[k]` is made of the factors `2 k` and `2 k + 1`, others are zero."""

    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Outer | None]) -> Parts:
        """The rows of all parts, `None` of those that are zero; one at least is not."""
        there = [(number, part) for number, part in enumerate(parts) if part is not None]
        pairs = [part.weighted() for _, part in there]
        first = there[0][1]
        term = cls([factor for pair in pairs for factor in pair], (len(parts), *first.row_shape), first.dtype)
        return term.numbered(number for number, _ in there)

    def numbered(self, numbers: Iterable[int]) -> Parts:
        """The same factors, of the parts with these numbers."""
        return self._with(numbers=tuple(numbers))

    def outers(self) -> Iterator[tuple[int, Outer]]:
        """The numbers of the parts, and their rows `(B, out, in)`."""
        pairs = zip(self.factors[::2], self.factors[1::2], strict=True)
        for number, pair in zip(self.numbers, pairs, strict=True):
            yield number, PaddedOuter(pair, self.row_shape[1:], self.dtype, self.coefficient)

    @property
    def positions(self) -> int:
        return sum(factor.shape[1] for factor in self.factors[::2])

    @property
    def fills_memory(self) -> bool:
        return True

    def dense(self, out: Tensor | None = None) -> Tensor:
        rows = self.factors[0].new_empty(self.batch, *self.row_shape, dtype=self.dtype) if out is None else out
        for number in {*range(self.row_shape[0])} - {*self.numbers}:
            rows[:, number].zero_()
        for number, part in self.outers():
            part.dense(rows[:, number])
        return rows

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        return self.add_weighted_sum(self.factors[0].new_zeros(self.row_shape, dtype=self.dtype), weights)

    def add_weighted_sum(self, total: Tensor, weights: Tensor | None) -> Tensor:
        for number, part in self.outers():
            part.add_weighted_sum(total[number], weights)
        return total

    def matvec(self, vector: Tensor) -> Tensor:
        of_parts = vector.reshape(self.row_shape)
        return torch.stack([part.matvec(of_parts[number]) for number, part in self.outers()]).sum(0)

    def squared_norms(self, products: Products | None = None) -> Tensor:
        return torch.stack([part.squared_norms(products) for _, part in self.outers()]).sum(0)

    def have_zero_factors(self) -> Tensor:
        return torch.stack([part.have_zero_factors() for _, part in self.outers()]).all(0)

    def inner(self, other: Term) -> Tensor:
        if not self._meets(other, Parts):
            return super().inner(other)
        zeros = self.factors[0].new_zeros(self.batch, dtype=self.dtype)
        return sum((part.inner(same) for part, same in self._pairs(other)), start=zeros)

    def gram(self, other: Term) -> Tensor:
        if not self._meets(other, Parts):
            return super().gram(other)
        zeros = self.factors[0].new_zeros(self.batch, other.batch, dtype=self.dtype)
        return sum((part.gram(same) for part, same in self._pairs(other)), start=zeros)

    def _pairs(self, other: Parts) -> list[tuple[Outer, Outer]]:
        """The parts with the same number."""
        others = dict(other.outers())
        return [(part, others[number]) for number, part in self.outers() if number in others]

    def gram_takes_rows(self, other: Term) -> bool:
        return not self._meets(other, Parts)

    def scaled(self, factor: float | Tensor) -> Parts:
        if not isinstance(factor, Tensor):
            return super().scaled(factor)
        pairs = [part.weighted(factor) for _, part in self.outers()]
        return self.remake([one for pair in pairs for one in pair], 1.0, self.dtype)

    def absorbed(self) -> tuple[Tensor, ...]:
        return tuple(factor for _, part in self.outers() for factor in part.absorbed())

    def weighted(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(factor for _, part in self.outers() for factor in part.weighted(weights))
