"""Rows `(B, *shape)` as their factors, and the algebra of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce, wraps
from operator import methodcaller
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from expanded_nn._errors import complaint, shown
from expanded_nn.common.modes import version_of, without_autocast
from expanded_nn.common.traced import is_traced
from expanded_nn.core import algebra, cost, kronecker
from expanded_nn.core.algebra import Kind
from expanded_nn.core.elementwise import Elementwise
from expanded_nn.core.kronecker import KroneckerFactors
from expanded_nn.core.lines import Lines, with_scaled_lines
from expanded_nn.core.positions import gram_by_position, numbers_of_positions
from expanded_nn.core.products import Products
from expanded_nn.core.terms import Dense, SparseOneHot, Term
from expanded_nn.rows.cell import Block, Cell, Guarded
from expanded_nn.rows.storage import Recycled

R = TypeVar("R", bound="Rows")
Method = TypeVar("Method", bound=Callable[..., Any])


def _in_own_dtype(method: Method) -> Method:
    """The method without autocast."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return method(*args, **kwargs)

    return cast(Method, call)


class Rows(Tensor):
    """Rows held as their factors, with their algebra; `factored.py` adds what makes them a tensor."""

    _cell: Cell

    @staticmethod
    def __new__(cls: type[R], cell: Cell, shape: Sequence[int]) -> R:
        kind = cell.kind
        tensor: R = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=kind.dtype, device=kind.device)
        tensor._cell = cell
        return tensor

    @classmethod
    def of(cls: type[R], term: Term) -> R:
        """One term as a tensor, `(B, *term.row_shape)`."""
        kind = Kind(term.row_shape, term.dtype, term.factors[0].device)
        cell = Cell([(term.batch, (Guarded.of(term),))], kind)
        return cls(cell, (term.batch, *term.row_shape))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The groups of rows, each with its guarded terms."""
        if not self.is_dense:
            return self._cell.merge()
        # a view that is written to counts for this tensor, an alias for what is in the cell
        rows = self._cell.densify()
        return ((self.shape[0], (Guarded(Dense.of(rows), tuple((x, version_of(x)) for x in (self, rows))),)),)

    def terms(self) -> tuple[Term, ...]:
        """All terms of all blocks, for a look at their kinds and sizes: changes in place are not checked."""
        return tuple(guarded.term for _, terms in self.blocks for guarded in terms)

    def check(self) -> None:
        """Raises if a factor was changed in place."""
        self._unchanged()

    def _unchanged(self) -> list[algebra.Block]:
        """The terms of all blocks, to compute with; raises if a factor was changed in place."""
        return self._cell.unchanged()

    @property
    def is_dense(self) -> bool:
        """Whether the rows have been made dense."""
        return self._cell.is_dense

    def held_matrix(self) -> Tensor | None:
        """The rows as `(B, numbers in a row)`, if they are held as such a matrix; not to be changed."""
        blocks = self.blocks
        if len(blocks) != 1 or len(blocks[0][1]) != 1:
            return None
        guarded = blocks[0][1][0]
        if not isinstance(guarded.term, Dense) or guarded.term.coefficient != 1.0:
            return None
        guarded.check()
        return guarded.term.matrix()

    def held_numel(self) -> int:
        """How many numbers are held: those of the factors, or of the dense rows."""
        return sum(term.numel() for term in self.terms())

    def sums_faster_dense(self) -> bool:
        """Whether adding up dense rows, once they are there, costs less than the product of the factors."""
        return any(cost.sums_faster_dense(term.positions) for term in self.terms())

    def dense_for_norms(self) -> None:
        """Makes small rows dense, for later use as well, if their norms are computed from dense rows anyway."""
        terms = self.terms()
        if cost.keeps_rows_of_norms(self.numel(), self.held_numel()) and len(terms) == 1 and terms[0].norms_take_rows:
            self._rows()

    def dense(self) -> Tensor:
        """The rows as a plain tensor `(B, *shape)`; they stay dense from then on. Those of a slice may be a copy."""
        rows = self._rows()
        return self.clone() if self.requires_grad and torch.is_grad_enabled() else rows

    def _rows(self, memory: Recycled | None = None) -> Tensor:
        with torch.no_grad(), without_autocast():
            return self._cell.to_read(memory).view(self.shape)

    def in_memory(self) -> Tensor:
        """The dense rows, to be changed or viewed: those of a slice are in the memory of the whole."""
        with torch.no_grad(), without_autocast():
            return self._cell.densify().view(self.shape)

    @_in_own_dtype
    def squared_norms(self, products: Products | None = None) -> Tensor:
        """`||row||^2` for each row, `(B,)`; `products` are kept from the rows of parameters before these."""
        return algebra.squared_norms(self._unchanged(), self._cell.kind, products)

    @_in_own_dtype
    def weighted_sum(
        self,
        weights: Tensor | None = None,  # (B,)
    ) -> Tensor:
        """`sum_b weights[b] * row[b]`, `(*shape)`; the plain sum where `weights` is `None`."""
        if weights is not None:
            _refuse_other_shape("weighted_sum", weights, self.shape[:1])
        return algebra.weighted_sum(self._unchanged(), self._cell.kind, weights).reshape(self.shape[1:])

    @_in_own_dtype
    def sum_of_magnitudes(
        self,
        weights: Tensor,  # (B,)
    ) -> Tensor:
        """`weighted_sum` of the absolute values of all factors, `(*shape)`: rounding errors are small beside these."""
        blocks = [(size, tuple(term.magnitudes() for term in terms)) for size, terms in self._unchanged()]
        return algebra.weighted_sum(blocks, self._cell.kind, weights).reshape(self.shape[1:])

    def sparse_sum(self) -> Tensor | None:
        """The plain sum as a sparse COO tensor if torch's gradient is sparse; else `None`."""
        terms = self.terms()
        if not terms or not all(isinstance(term, SparseOneHot) for term in terms):
            return None
        return reduce(torch.add, [_sparse(term) for _, block in self._unchanged() for term in block])

    @_in_own_dtype
    def matvec(
        self,
        vector: Tensor,  # shape
    ) -> Tensor:
        """`<row, vector>` for each row, `(B,)`."""
        _refuse_other_shape("matvec", vector, self.shape[1:])
        return algebra.matvec(self._unchanged(), self._cell.kind, vector)

    @_in_own_dtype
    def gram(self, other: Tensor) -> Tensor:
        """`<row, other_row>` for each pair, `(B, B')`; the other rows may be dense."""
        _refuse_other_shape("gram", other, (*getattr(other, "shape", ())[:1], *self.shape[1:]))
        others = other if isinstance(other, Rows) else self.of(Dense.of(other))
        blocks, other_blocks = algebra.joined(self._unchanged()), algebra.joined(others._unchanged())
        return algebra.gram(blocks, other_blocks, self._cell.kind)

    def positions(self) -> set[int] | None:
        """How many positions the rows have; `None` if some have none."""
        return numbers_of_positions(self._unchanged())

    @_in_own_dtype
    def gram_by_position(self, other: Rows, positions: int) -> Tensor:
        """`<row[b, t], other_row[c]>` for each position t, of which the rows have `positions`; `(B, T, B')`."""
        return gram_by_position(self._unchanged(), other._unchanged(), self._cell.kind, positions)

    def has_kronecker_factors(self) -> bool:
        """Whether the rows are made of outer products alone."""
        return kronecker.has_factors(self.terms(), self.shape[1:])

    @_in_own_dtype
    def kronecker_factors(self, total: KroneckerFactors | None = None, mask: Tensor | None = None) -> KroneckerFactors:
        """The Kronecker factors of the rows, added to `total` in place; of T positions those of a `mask (B, T)`."""
        total = kronecker.factors(self._unchanged(), self._kind, total, mask, may_wait=not is_traced())
        total.count = total.count if is_traced() else int(total.count)
        return total

    @_in_own_dtype
    def between(self: R, left: Tensor, right: Tensor) -> R:
        """The rows `left @ row @ right`, with square matrices; factored where these rows are."""
        blocks = [
            (size, tuple(Guarded.of(kronecker.between(term, left, right)) for term in terms if size))
            for size, terms in self._unchanged()
        ]
        return type(self)(Cell(blocks, self._kind), self.shape)

    def times_elementwise(
        self: R,
        scale: Tensor,  # shape
    ) -> R:
        """Each row times a tensor, number by number; factored where these rows are."""
        return self._like(self._remade(lambda term: Elementwise.of(term, scale.reshape(term.row_shape))), self.shape)

    @_in_own_dtype
    def matvec_by_line(
        self,
        matrix: Tensor,  # shape
    ) -> Tensor:
        """The product of each line of a row with the same line of a matrix, `(B, lines)`."""
        return algebra.matvec_by_line(self._unchanged(), self._cell.kind, matrix)

    @_in_own_dtype
    def with_lines(
        self: R,
        scale: Tensor,  # (lines,)
        numbers: Tensor,  # (B, lines)
        matrix: Tensor,  # shape
    ) -> R:
        """`scale[o] * row[o] + numbers[b, o] * matrix[o]` for each line o of row b; factored where these rows are."""
        scaled = self._remade(lambda term: with_scaled_lines(term, scale))
        blocks = [
            (size, (*terms, Guarded.of(Lines.of(own, matrix))))
            for (size, terms), own in zip(scaled, by_block(numbers, scaled), strict=True)
        ]
        return self._like(blocks, self.shape)

    def chunks(self) -> Iterator[Tensor]:
        """The dense rows in groups of bounded size, none of them kept."""
        chunks = algebra.chunks(self._unchanged(), self._cell.kind)
        while True:
            with without_autocast():  # not around what is done with them
                rows = next(chunks, None)
            if rows is None:
                return
            yield rows.reshape(rows.shape[0], *self.shape[1:])

    @property
    def _kind(self) -> Kind:
        """The kind of the rows in the shape of this tensor."""
        return self._cell.kind._replace(row_shape=tuple(self.shape[1:]))

    def _remade(self, change: Callable[[Term], Term]) -> list[Block]:
        return [(size, tuple(guarded.derived(change) for guarded in terms)) for size, terms in self.blocks]

    def _like(self: R, blocks: Sequence[Block], shape: Sequence[int], dtype: torch.dtype | None = None) -> R:
        kind = self._cell.kind
        return type(self)(Cell(blocks, kind if dtype is None else kind._replace(dtype=dtype)), shape)


def _sparse(term: Term) -> Tensor:
    """The plain sum of the rows as `torch.nn.Embedding(sparse=True)` gives it."""
    values, index = (factor.flatten(0, 1) for factor in term.weighted())
    kept = values.ne(0).any(1)  # neither padding nor the filling of short bags
    return torch.sparse_coo_tensor(index[kept][None], values[kept], term.row_shape, check_invariants=False)


def _refuse_other_shape(method: str, given: Any, shape: Sequence[int]) -> None:
    """Raises if what a method is given has another shape; in a trace, where sizes are symbols, it was looked at."""
    found = getattr(given, "shape", None)
    if found != tuple(shape) and not is_traced():
        problem = f"it is given {shown(given)}" if found is None else f"it is given the shape {tuple(found)}"
        raise complaint(f"FactoredTensor.{method}", problem, f"a tensor {tuple(shape)}", "Give it in that shape.")


def widened(rows: R) -> R:
    """The rows in float32, where they are of lower precision."""
    return _in_dtype(rows, torch.float32) if rows.dtype in (torch.float16, torch.bfloat16) else rows


def in_one_dtype(first: R, second: R) -> tuple[R, R]:
    """Rows of two parameters in the wider dtype of the two, which is float32 or wider."""
    first, second = widened(first), widened(second)
    dtype = torch.promote_types(first.dtype, second.dtype)
    return _in_dtype(first, dtype), _in_dtype(second, dtype)


def _in_dtype(rows: R, dtype: torch.dtype) -> R:
    return rows if rows.dtype == dtype else rows._like(rows._remade(lambda term: term.to(dtype)), rows.shape, dtype)


def average(rows: Rows) -> Tensor:
    """The mean row, `(*shape)`; the sum may be too large for the rows' dtype."""
    return (widened(rows).weighted_sum() / rows.shape[0]).to(rows.dtype)


def scaled_blocks(rows: Rows, by_row: Tensor | float) -> list[Block]:
    """The blocks of the rows times a number, or times each row's own, `(B,)`."""
    if not isinstance(by_row, Tensor):
        return rows._remade(methodcaller("scaled", by_row))
    return [
        (size, tuple(guarded.derived(methodcaller("scaled", own)) for guarded in terms))
        for (size, terms), own in zip(rows.blocks, by_block(by_row, rows.blocks), strict=True)
    ]


def by_block(numbers: Tensor, blocks: Sequence[Block]) -> Iterator[Tensor]:
    """Of tensors with something for each row, `(B, ...)`, what is for the rows of each block."""
    start = 0
    for size, _ in blocks:
        yield numbers[start : start + size]
        start += size
