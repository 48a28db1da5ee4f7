"""The kinds of factors that per-sample gradients are made of, and the algebra of one term.

A term stands for rows `(B, *row_shape)` and holds only what they are made of. It is linear in each of its
floating-point factors, which have no history. The number `coefficient` multiplies the rows; it is applied as late as
possible, to the smallest tensor. Changes of a factor in place are seen by `Guarded` in `rows/cell.py`, not by the term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.core.products import Products, sum_of_both

T = TypeVar("T", bound="Term")
Other = TypeVar("Other", bound="Term")


def _matrix(
    rows: Tensor,  # (B, *row_shape)
) -> Tensor:  # (B, numbers in a row)
    return rows.reshape(rows.shape[0], prod(rows.shape[1:]))


def sides(row_shape: Sequence[int]) -> tuple[int, int]:
    """The sizes of a row as a matrix, `(out, in)`; a vector is a matrix with `out = 1`."""
    return (1, prod(row_shape)) if len(row_shape) < 2 else (row_shape[0], prod(row_shape[1:]))


class Term(ABC):
    """Rows `(B, *row_shape)` of one kind.

    Args:
        factors: The one or two tensors the rows are made of, each `(B, ...)`; the first holds floating-point numbers.
        row_shape: The shape of one row.
        dtype: The rows' dtype, to which factors are cast when used.
        coefficient: A number that multiplies all rows.

    Attributes:
        shared: What all rows are made with, besides.
        of_gradient: Which factor is the output's gradient, and scaled as rows are; the second one after a
            transposition.
    """

    shared: tuple[Tensor, ...] = ()
    of_gradient = 0

    def __init__(
        self, factors: Sequence[Tensor], row_shape: Sequence[int], dtype: torch.dtype, coefficient: float = 1.0
    ) -> None:
        self.factors = tuple(map(self._held, factors))
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.coefficient = coefficient

    @staticmethod
    def _held(factor: Tensor) -> Tensor:
        """What is held of a factor: its numbers, without a history."""
        return factor.detach()

    @abstractmethod
    def dense(self, out: Tensor | None = None) -> Tensor:
        """The rows themselves, `(B, *row_shape)`, in new memory, or in that of `out`, if `fills_memory`."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        """`sum_b weights[b] * row[b]`, `(*row_shape)`; plain sum where `weights` is `None`."""

    def add_weighted_sum(self, total: Tensor, weights: Tensor | None) -> Tensor:
        """Adds `weighted_sum` to `total` in place, `(*row_shape)`."""
        return total.add_(self.weighted_sum(weights))

    @abstractmethod
    def matvec(
        self,
        vector: Tensor,  # row_shape
    ) -> Tensor:
        """`<row[b], vector>`, `(B,)`."""

    def remake(self: T, factors: Sequence[Tensor], coefficient: float, dtype: torch.dtype) -> T:
        """The same kind of term from other factors."""
        return self._with(factors=tuple(map(self._held, factors)), coefficient=coefficient, dtype=dtype)

    def _with(self: T, **attributes: Any) -> T:
        term = object.__new__(type(self))  # as copy.copy does, in a fifth of the time
        term.__dict__.update(self.__dict__, **attributes)
        return term

    def magnitudes(self) -> Term:
        """The term with all of its numbers positive; its index, if it has one, stays."""
        are_numbers = [factor.is_floating_point() or factor.is_complex() for factor in self.factors]
        pairs = zip(self.factors, are_numbers, strict=True)
        factors = [factor.abs().to(factor.dtype) if is_number else factor for factor, is_number in pairs]
        return self.remake(factors, abs(self.coefficient), self.dtype)

    def have_zero_factors(self) -> Tensor:
        """Whether a row is zero because a factor of it is, `(B,)`."""
        numbers = [factor for factor in self.factors if factor.is_floating_point() and factor.numel()]
        if not numbers:
            return torch.ones(self.batch, dtype=torch.bool, device=self.factors[0].device)
        return torch.stack([_matrix(factor).eq(0).all(1) for factor in numbers]).any(0)

    def inner(self, other: Term) -> Tensor:
        """`<row[b], other_row[b]>`, `(B,)`."""
        return torch.cat(
            [
                (_matrix(chunk.dense()) * _matrix(other_chunk.dense())).sum(1)
                for chunk, other_chunk in zip(self.chunks(), other.chunks(), strict=True)
            ]
        )

    def _meets(self, other: Term, kind: type[Other]) -> TypeGuard[Other]:
        """Whether `other` is of that kind, and its rows have the same shape; a view may have changed it."""
        return isinstance(other, kind) and other.row_shape == self.row_shape

    def squared_norms(self, products: Products | None = None) -> Tensor:
        """`||row[b]||^2`, `(B,)`; `products` are those of the terms before this one."""
        return torch.cat([_matrix(chunk.dense()).square().sum(1) for chunk in self.chunks()])

    def gram(self, other: Term) -> Tensor:
        """`<row[b], other_row[b']>`, `(B, B')`."""
        other_matrices = [_matrix(chunk.dense()).t() for chunk in other.chunks()]
        matrices = (_matrix(chunk.dense()) for chunk in self.chunks())
        grid = [[rows @ columns for columns in other_matrices] for rows in matrices]
        return grid[0][0] if len(grid) == len(other_matrices) == 1 else torch.cat([torch.cat(row, 1) for row in grid])

    def gram_takes_rows(self, other: Term) -> bool:
        """Whether `gram(other)` makes the rows of this term dense."""
        return False

    def numel(self) -> int:
        """How many numbers the term holds."""
        return sum(factor.numel() for factor in self.factors)

    @property
    def positions(self) -> int:
        """How many products of factors add up to a row."""
        return 1

    @property
    def fills_memory(self) -> bool:
        """Whether `dense` writes to the memory that it is given."""
        return False

    @property
    def norms_take_rows(self) -> bool:
        """Whether the norms are computed from dense rows."""
        return False

    @property
    def batch(self) -> int:
        """The number of rows, B."""
        return self.factors[0].shape[0]

    def scaled(self: T, factor: float | Tensor) -> T:
        """All rows times a number, or each row times its own number, `(B,)`."""
        if not isinstance(factor, Tensor):
            return self._with(coefficient=self.coefficient * factor)
        return self.remake(_weighted(self.factors, factor, self.dtype, self.of_gradient), self.coefficient, self.dtype)

    def map(self: T, choose: Callable[[Tensor], Tensor]) -> T:
        """The term of the rows that `choose` takes of any tensor `(B, ...)`."""
        return self.remake([choose(factor) for factor in self.factors], self.coefficient, self.dtype)

    def to(self: T, dtype: torch.dtype) -> T:
        """The same rows, in another dtype."""
        return self._with(dtype=dtype)

    def chunks(self: T, numel: int | None = None) -> Iterator[T]:
        """The term in groups of rows of bounded memory: a row takes `numel` numbers, or those of its dense form."""
        size = cost.at_once(prod(self.row_shape) if numel is None else numel, cost.CHUNK_NUMEL)
        if cost.is_symbol(self.batch) or size >= self.batch:
            yield self
            return
        for start in range(0, self.batch, size):
            yield self.map(lambda factor, start=start: factor[start : start + size])  # type: ignore[misc]

    def unscaled(self) -> tuple[Tensor, ...]:
        """The factors in the rows' dtype, without the coefficient."""
        return tuple(factor.to(self.dtype) if factor.is_floating_point() else factor for factor in self.factors)

    def weighted(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        """The factors in the rows' dtype; one is multiplied by the coefficient and by the rows' weights, `(B,)`."""
        if weights is None and self.coefficient == 1.0:
            return self.unscaled()
        numbers = self.coefficient if weights is None else weights.to(_wide(self.dtype)) * self.coefficient
        return _weighted(self.unscaled(), numbers, self.dtype)

    def absorbed(self) -> tuple[Tensor, ...]:
        """The factors in the rows' dtype; that of the gradient is multiplied by the coefficient."""
        return _weighted(self.unscaled(), self.coefficient, self.dtype, self.of_gradient)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply and add in, before the results become rows of `dtype`: float32 at the least."""
    return torch.promote_types(dtype, torch.float32)


def _weighted(
    factors: Sequence[Tensor], numbers: float | Tensor, dtype: torch.dtype, index: int | None = None
) -> tuple[Tensor, ...]:
    """The factors of rows times a number, or times each row's own, `(B,)`.

    One factor is multiplied: that with an index, or else the smallest. In float16 it is the first in place of that,
    the gradient: it is small enough to be multiplied by B, an input may not be.
    """
    if index is None:
        candidates = [i for i, factor in enumerate(factors) if factor.is_floating_point() or factor.is_complex()]
        index = 0 if dtype == torch.float16 else min(candidates, key=lambda i: factors[i].numel())
    factor = factors[index].to(dtype)
    if isinstance(numbers, Tensor):
        numbers = numbers.to(_wide(dtype)).reshape(-1, *[1] * (factor.dim() - 1))
    return (*factors[:index], (factor * numbers).to(dtype), *factors[index + 1 :])


class Dense(Term):
    """Rows that are held as they are."""

    @classmethod
    def of(cls, rows: Tensor) -> Dense:
        """Wraps rows `(B, *row_shape)`."""
        return cls((rows,), rows.shape[1:], rows.dtype)

    def matrix(self) -> Tensor:
        """The rows without the coefficient, `(B, numbers in a row)`."""
        (rows,) = self.unscaled()
        return _matrix(rows)

    @property
    def fills_memory(self) -> bool:
        return True

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return torch.mul(self.unscaled()[0], self.coefficient, out=out)
        (rows,) = self.weighted()
        return rows.clone() if rows is self.factors[0] else rows

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        wide = _wide(self.dtype)
        if weights is None and self.dtype != wide:
            total = self.matrix().sum(0, dtype=wide).mul_(self.coefficient).to(self.dtype)
        else:  # twice as fast as torch.sum, where rows are read from memory
            weights = self.factors[0].new_ones(self.batch) if weights is None else weights
            weights = weights.to(wide) if self.coefficient == 1.0 else weights.to(wide) * self.coefficient
            total = torch.mv(self.matrix().t(), weights.to(self.dtype))
        return total.view(self.row_shape)

    def matvec(self, vector: Tensor) -> Tensor:
        return torch.mv(self.matrix(), vector.flatten()).mul_(self.coefficient)

    def squared_norms(self, products: Products | None = None) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.matrix(), dim=1)
        return (norms if self.coefficient == 1.0 else norms.mul_(self.coefficient)).square()


class Differentiable(Dense):
    """Rows with a history, which all that is computed from them has as well."""

    @property
    def fills_memory(self) -> bool:
        return False

    @staticmethod
    def _held(factor: Tensor) -> Tensor:
        """The factor as it is."""
        return factor


def outer_products(
    g: Tensor,  # (B, T, out)
    a: Tensor,  # (B, T, in)
    out: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:  # (B, out, in)
    """`sum_t g[b,t,:] (x) a[b,t,:]`; written to `out` if that is given, times `factor`, which costs nothing there."""
    if not cost.multiplies_turned(g.shape[1], g.shape[2], a.shape[2]):
        # with `beta=0` what is in `out` is not read
        return torch.bmm(g.mT, a) if out is None else out.baddbmm_(g.mT, a, beta=0, alpha=factor)
    rows = torch.bmm(a.mT, g).mT
    return rows.contiguous() if out is None else torch.mul(rows, factor, out=out)


class Outer(Term):
    """`sum_t g[b,t,:] (x) a[b,t,:]` with `g (B, T, out)` and `a (B, T, in)`: rows `(B, out, in)`."""

    @classmethod
    def of(
        cls,
        g: Tensor,  # (B, T, out)
        a: Tensor,  # (B, T, in)
        dtype: torch.dtype,
    ) -> Outer:
        return cls((g, a), (g.shape[-1], a.shape[-1]), dtype)

    @property
    def positions(self) -> int:
        return self.factors[0].shape[1]

    @property
    def norms_take_rows(self) -> bool:
        return self.positions > 1 and not cost.inner_by_pairs(self.positions, self.positions, *self.row_shape)

    @property
    def fills_memory(self) -> bool:
        return True

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is not None and self.positions != 1:
            g, a = self.unscaled()
            return outer_products(g, a, out, self.coefficient)
        g, a = self.weighted()
        return torch.mul(g.mT, a, out=out) if self.positions == 1 else outer_products(g, a)

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        g, a = self._of_all_samples(weights)
        if a.shape[1] > 1 and cost.multiplies_turned(a.shape[0], *self.row_shape):  # torch is quick at one
            return torch.mm(a.t(), g.t()).t().contiguous()
        return torch.mm(g, a)

    def add_weighted_sum(self, total: Tensor, weights: Tensor | None) -> Tensor:
        return total.addmm_(*self._of_all_samples(weights))

    def _of_all_samples(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:  # (out, B T), (B T, in)
        """The matrices whose product is the weighted sum."""
        g, a = self.weighted(weights)
        if g.transpose(0, 1).is_contiguous():  # in the order of memory
            g, a = g.transpose(0, 1), a.transpose(0, 1)
        return g.flatten(0, 1).t(), a.flatten(0, 1)

    def matvec(self, vector: Tensor) -> Tensor:
        g, a = self.unscaled()
        y = torch.matmul(a, vector.reshape(self.row_shape).t()).to(_wide(self.dtype))
        return (y * g).sum((1, 2)).mul_(self.coefficient).to(self.dtype)

    def squared_norms(self, products: Products | None = None) -> Tensor:
        if self.norms_take_rows:
            return super().squared_norms()
        if self.positions == 1:
            return self.inner(self)
        products = Products() if products is None else products
        by_g, by_a = (products.of(factor, self.dtype) for factor in self.factors)
        return sum_of_both(by_g, by_a).mul_(self.coefficient).mul_(self.coefficient)

    def inner(self, other: Term) -> Tensor:
        if self._meets(other, Outer):
            (g, a), (h, c) = self.unscaled(), other.unscaled()
            scale = self.coefficient * other.coefficient
            if self.positions == other.positions == 1:
                return (g * h).sum((1, 2)) * (a * c).sum((1, 2)).mul_(scale)
            if cost.inner_by_pairs(self.positions, other.positions, *self.row_shape):
                return (torch.bmm(g, h.mT) * torch.bmm(a, c.mT)).sum((1, 2)).mul_(scale)
        if self._meets(other, OneHot):
            return other.inner(self)
        return super().inner(other)

    def gram(self, other: Term) -> Tensor:
        if self._meets(other, Outer) and cost.gram_by_pairs(self.positions, other.positions, *self.row_shape):
            (g, a), (h, c) = self.unscaled(), other.unscaled()
            scale = self.coefficient * other.coefficient
            if self.positions == other.positions == 1:
                return (g[:, 0] @ h[:, 0].t()).mul_(a[:, 0] @ c[:, 0].t()).mul_(scale)
            pairs = other.batch * self.positions * other.positions
            if cost.is_symbol(pairs) or cost.is_symbol(g.shape[0]):
                return _products_of_pairs(g, a, h, c).mul_(scale)
            at_once = cost.at_once(pairs, cost.CHUNK_NUMEL)
            parts = zip(g.split(at_once), a.split(at_once), strict=True)
            return torch.cat([_products_of_pairs(own_g, own_a, h, c) for own_g, own_a in parts]).mul_(scale)
        if self._meets(other, OneHot):
            return other.gram(self).t()
        return super().gram(other)

    def gram_takes_rows(self, other: Term) -> bool:
        if self._meets(other, Outer):
            return not cost.gram_by_pairs(self.positions, other.positions, *self.row_shape)
        return not self._meets(other, OneHot)

    def padded(self, ends: tuple[int, int]) -> Outer:
        """Rows `(B, ends[0] + out + ends[1], in)`, with zeros at the ends."""
        g, a = self.factors
        return self._with(factors=(F.pad(g, ends), a), row_shape=(sum(ends, g.shape[-1]), a.shape[-1]))

    def transposed(self) -> Outer:
        """Rows `(B, in, out)`."""
        g, a = self.factors
        return self._with(factors=(a, g), row_shape=self.row_shape[::-1], of_gradient=1 - self.of_gradient)


class PaddedOuter(Outer):
    """Rows of samples with unequal numbers of positions, where shorter ones are filled up with zeros.

    So its positions are not counted, and not compared with those of other rows.
    """


class OneHot(Term):
    """`sum_t e[index[b,t]] (x) v[b,t,:]` with `v (B, T, dim)`: the rows `(B, entries, dim)` of an embedding.

    Equal indices within a sample add up before any norm is taken.
    """

    @classmethod
    def of(
        cls,
        values: Tensor,  # (B, T, dim)
        index: Tensor,  # (B, T) int64
        entries: int,
        dtype: torch.dtype,
    ) -> OneHot:
        return cls((values, index), (entries, values.shape[-1]), dtype)

    @property
    def fills_memory(self) -> bool:
        return True

    def dense(self, out: Tensor | None = None) -> Tensor:
        values, index = self.weighted()
        return _added_by_index(values, index, self.row_shape[0], out)

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        values, index = self.weighted(weights)
        return _added_by_index(values.flatten(0, 1)[None], index.reshape(1, -1), self.row_shape[0])[0]

    def add_weighted_sum(self, total: Tensor, weights: Tensor | None) -> Tensor:
        values, index = self.weighted(weights)
        return total.index_add_(0, index.flatten(), values.flatten(0, 1))

    def matvec(self, vector: Tensor) -> Tensor:
        values, index = self.weighted()
        return (F.embedding(index, vector.reshape(self.row_shape)) * values).sum((1, 2))

    def squared_norms(self, products: Products | None = None) -> Tensor:
        values, index = self.weighted()
        ordered, order = index.sort(1)
        values = values.gather(1, order[..., None].expand_as(values))
        is_new = torch.cat([torch.zeros_like(ordered[:, :1]), ordered.diff(dim=1).ne(0).long()], 1)
        return _added_by_index(values, is_new.cumsum(1), index.shape[1]).square().sum((1, 2))

    def inner(self, other: Term) -> Tensor:
        if self._meets(other, OneHot):
            (values, index), (other_values, other_index) = self.weighted(), other.weighted()
            equal = index[:, :, None] == other_index[:, None, :]
            return (torch.bmm(values, other_values.transpose(1, 2)) * equal).sum((1, 2))
        if self._meets(other, Outer):
            values, index = self.weighted()
            g, a = other.weighted()  # rows (entries, dim): g (B, S, entries), a (B, S, dim)
            picked = g.gather(2, index[:, None, :].expand(-1, g.shape[1], -1))
            return (picked * torch.bmm(a, values.transpose(1, 2))).sum((1, 2))
        return super().inner(other)

    def gram(self, other: Term) -> Tensor:
        if not (self._meets(other, OneHot) or self._meets(other, Outer)) or not self.batch:
            return super().gram(other)
        values, index = self.weighted()
        other_factors = other.weighted()
        pairs = (products_of_positions(other, self, other_factors, v, i) for v, i in zip(values, index, strict=True))
        return torch.stack([products.sum((1, 2)) for products in pairs])

    def gram_takes_rows(self, other: Term) -> bool:
        return not (self._meets(other, OneHot) or self._meets(other, Outer))


class SparseOneHot(OneHot):
    """The rows of an embedding whose plain gradient is sparse."""


def _products_of_pairs(g: Tensor, a: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """`sum_ts <g[b,t], h[b',s]> <a[b,t], c[b',s]>`, `(B, B')`."""
    return (torch.einsum("bto,cso->bcts", g, h) * torch.einsum("bti,csi->bcts", a, c)).sum((2, 3))


def products_of_positions(
    term: Term,  # Outer or OneHot
    other: Term,  # so is this one
    factors: Sequence[Tensor],  # of the term's rows, each (B, T, features), an index (B, T)
    h: Tensor,  # of one row of the other, (S, features)
    c: Tensor,  # (S, features), an index (S,)
) -> Tensor:  # (B, T, S)
    """The products of all positions of the term's rows with those of one row of the other.

    Rows are `(out, in)`, those of an embedding `(entries, dim)`: an index stands for a vector of one 1.
    """
    first, second = factors
    if isinstance(term, Outer):
        if isinstance(other, Outer):
            return (first @ h.t()) * (second @ c.t())
        return (second @ h.t()) * first[:, :, c]
    if isinstance(other, Outer):
        return (first @ c.t()) * h.t()[second]
    return (first @ h.t()) * (second[:, :, None] == c)


def _added_by_index(
    values: Tensor,  # (B, T, dim)
    index: Tensor,  # (B, T) int64, below `entries`
    entries: int,
    out: Tensor | None = None,  # (B, entries, dim)
) -> Tensor:  # (B, entries, dim)
    """The values of equal index added up, within each sample, in `out`."""
    batch, dim = values.shape[0], values.shape[2]
    flat = index + entries * torch.arange(batch, device=index.device)[:, None]
    if out is not None:
        out.zero_().view(-1, dim).index_add_(0, flat.flatten(), values.flatten(0, 1))
        return out
    total = torch.ops.aten.embedding_dense_backward(values, flat, batch * entries, -1, False)
    return cast(Tensor, total.view(batch, entries, dim))
