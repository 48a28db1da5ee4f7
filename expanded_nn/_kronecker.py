"""Kronecker factors of the rows' second moments, and rows that are preconditioned by them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from expanded_nn._cell import Block, Cell
from expanded_nn._errors import complaint
from expanded_nn._patches import Patches, as_linear
from expanded_nn._terms import Dense, Outer, Term
from expanded_nn.factored import FactoredTensor, widened

PANEL = 256  # columns of a symmetric product made at once, and the fewest positions for which that takes less time


class KroneckerFactors(NamedTuple):
    """What the rows of a weight are made of, in the second moment: `A` of its inputs, `G` of its outputs' gradients.

    Factors of several batches, or ranks, add up: `factors + more`. They unpack: `A, G, count = factors`.

    Attributes:
        A: The sum of `a aᵀ`, `(in, in)`.
        G: The sum of `g gᵀ`, `(out, out)`.
        count: How many were added: samples times positions.
    """

    A: Tensor
    G: Tensor
    count: int  # type: ignore[assignment]  # a tuple has a method of that name

    def __add__(self, other: object) -> KroneckerFactors:
        if not isinstance(other, KroneckerFactors):
            return NotImplemented
        return KroneckerFactors(self.A + other.A, self.G + other.G, self.count + other.count)


def kronecker_factors(blocks: Sequence[Block], rows: Tensor, total: KroneckerFactors | None) -> KroneckerFactors | None:
    """The factors of the rows of one weight, added to `total` in place; `None` if some rows do not have them."""
    sides = sides_of(rows)
    if any(not _has_sides(term, sides) for _, terms in blocks for term in terms):
        return None
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if total is None:
        G, A = (torch.zeros(size, size, dtype=dtype, device=rows.device) for size in sides)
        total = KroneckerFactors(A, G, 0)
    for term in (term.to(dtype) for _, terms in blocks for term in terms):
        count = _add_patches(term, total) if isinstance(term, Patches) else _add_outer(term, total)
        total = total._replace(count=total.count + count)
    return total


def sides_of(
    rows: Tensor,  # (B, out, *rest)
) -> tuple[int, int]:
    """The sizes of a row as a matrix, `(out, in)`."""
    return prod(rows.shape[1:2]), prod(rows.shape[2:])


def _has_sides(term: Term, sides: tuple[int, int]) -> bool:
    """Whether the term is made of outer products `(out, in)`."""
    return isinstance(term, Outer | Patches) and (term.row_shape[0], prod(term.row_shape[1:])) == sides


def _add_outer(term: Term, total: KroneckerFactors) -> int:
    g, a = (_by_position(factor) for factor in term.unscaled())
    _add_product(total.A, a)
    _add_product(total.G, g, term.coefficient**2)
    return len(g)


def _by_position(
    factor: Tensor,  # (B, T, features)
) -> Tensor:  # (B * T, features)
    """In the order of memory, which is that of time in recurrent layers."""
    return (factor.transpose(0, 1) if factor.transpose(0, 1).is_contiguous() else factor).flatten(0, 1)


def _add_patches(term: Patches, total: KroneckerFactors) -> int:
    """Those of a convolution: each group is a linear map, of which `A` is the mean and `G` has a block."""
    groups = term.geometry.groups
    for part in term.chunks(prod(term.row_shape[1:]) * term.positions * groups):
        if not part.batch:
            continue
        g, columns = as_linear(part).unscaled()  # (B * groups, T, out / groups), (B * groups, T, in * kernel)
        _add_product(total.A, columns.flatten(0, 1), 1 / groups)
        for group, block in enumerate(_diagonal_blocks(total.G, groups)):
            _add_product(block, g[group::groups].flatten(0, 1), term.coefficient**2)
    return term.batch * term.positions


def _diagonal_blocks(matrix: Tensor, count: int) -> list[Tensor]:
    size = len(matrix) // count
    return [matrix[start : start + size, start : start + size] for start in range(0, len(matrix), size)]


def _add_product(
    total: Tensor,  # (features, features)
    x: Tensor,  # (N, features)
    scale: float = 1.0,
) -> None:
    """`total += scale * x.T @ x`, both symmetric; of a large one what is below the diagonal is copied."""
    features = x.shape[1]
    if features <= PANEL or len(x) < PANEL:
        total.addmm_(x.t(), x, alpha=scale)
        return
    for start in range(0, features, PANEL):
        stop = min(start + PANEL, features)
        total[start:stop, start:].addmm_(x[:, start:stop].t(), x[:, start:], alpha=scale)
        total[stop:, start:stop] = total[start:stop, stop:].t()


def preconditioned(
    name: str, rows: FactoredTensor, blocks: Sequence[Block], factors: KroneckerFactors, damping: float
) -> FactoredTensor:
    """`(G / count + damping)⁻¹ · row · (A / count + damping)⁻¹` for each row, factored where the rows are."""
    wide = widened(rows)
    left = _inverse(name, factors.G, factors.count, damping).to(device=wide.device, dtype=wide.dtype)
    right = _inverse(name, factors.A, factors.count, damping).to(device=wide.device, dtype=wide.dtype)
    changed = [
        (size, tuple(_between(term.to(wide.dtype), left, right) for term in terms if size)) for size, terms in blocks
    ]
    cell = Cell(changed, rows.shape[1:], wide.dtype, wide.device)
    return FactoredTensor(cell, rows.shape)


def _inverse(name: str, total: Tensor, count: int, damping: float) -> Tensor:
    """`(total / count + damping)⁻¹`, in float64."""
    matrix = total.double() / count
    matrix.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not lower.isfinite().all():
        raise complaint(
            "PerSampleGrads.precondition",
            f"the factors of {name!r} with damping {damping} are no positive definite matrices",
            "sums of a aᵀ and g gᵀ of finite numbers",
            "Take the factors of kronecker(), without inf or NaN, and a larger damping.",
        )
    return torch.cholesky_inverse(lower)


def _between(term: Term, left: Tensor, right: Tensor) -> Term:
    """The term of the rows `left @ row @ right`, of symmetric matrices."""
    sides = (len(left), len(right))
    if isinstance(term, Patches) and term.geometry.groups == 1 and term.positions * sum(sides) < prod(sides):
        term = as_linear(term)
    if isinstance(term, Outer) and _has_sides(term, sides):
        g, a = term.unscaled()
        return Outer((g @ left, a @ right), sides, term.dtype, term.coefficient)
    parts = [left @ part.dense().reshape(part.batch, *sides) @ right for part in term.chunks()]
    return Dense.of(torch.cat(parts))
