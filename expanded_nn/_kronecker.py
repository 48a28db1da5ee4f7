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

PANEL = 256  # columns of a symmetric product made at once; what is below the diagonal of a panel is not computed twice


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


def kronecker_factors(
    blocks: Sequence[Block], sides: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> KroneckerFactors | None:
    """The factors of the rows of one weight `(out, in)`; `None` if some of the rows do not have them."""
    if any(not has_sides(term, sides) for _, terms in blocks for term in terms):
        return None
    wide = torch.promote_types(dtype, torch.float32)
    out, in_ = sides
    A, G = torch.zeros(in_, in_, dtype=wide, device=device), torch.zeros(out, out, dtype=wide, device=device)
    total = KroneckerFactors(A, G, 0)
    for _, terms in blocks:
        for term in terms:
            term = term.to(wide)
            total += _of_patches(term) if isinstance(term, Patches) else _of_outer(term)
    return total


def has_sides(term: Term, sides: tuple[int, int]) -> bool:
    """Whether the term is made of outer products `(out, in)`."""
    return isinstance(term, Outer | Patches) and (term.row_shape[0], prod(term.row_shape[1:])) == sides


def _of_outer(term: Term) -> KroneckerFactors:
    g, a = (_by_position(factor) for factor in term.unscaled())
    return KroneckerFactors(_symmetric_product(a), _symmetric_product(g).mul_(term.coefficient**2), len(g))


def _by_position(
    factor: Tensor,  # (B, T, features)
) -> Tensor:  # (B * T, features)
    """In the order of memory, which is that of time in recurrent layers."""
    return (factor.transpose(0, 1) if factor.transpose(0, 1).is_contiguous() else factor).flatten(0, 1)


def _of_patches(term: Patches) -> KroneckerFactors:
    """Those of a convolution: each group is a linear map, of which `A` is the mean and `G` has a block."""
    groups, out = term.geometry.groups, term.row_shape[0]
    g, x = term.factors
    A = g.new_zeros(prod(term.row_shape[1:]), prod(term.row_shape[1:]), dtype=term.dtype)
    G = g.new_zeros(out, out, dtype=term.dtype)
    for part in term.chunks(prod(term.row_shape[1:]) * term.positions * groups):
        if not part.batch:
            continue
        left, columns = as_linear(part).unscaled()  # (B * groups, T, out / groups), (B * groups, T, in * kernel)
        A += _symmetric_product(columns.flatten(0, 1))
        for group, block in enumerate(_diagonal_blocks(G, groups)):
            block += _symmetric_product(left[group::groups].flatten(0, 1))
    return KroneckerFactors(A / groups, G.mul_(term.coefficient**2), len(x) * term.positions)


def _diagonal_blocks(matrix: Tensor, count: int) -> list[Tensor]:
    size = len(matrix) // count
    return [matrix[start : start + size, start : start + size] for start in range(0, len(matrix), size)]


def _symmetric_product(
    x: Tensor,  # (N, features)
) -> Tensor:  # (features, features)
    """`x.T @ x`."""
    features = x.shape[1]
    if features <= PANEL:
        return x.t() @ x
    product = x.new_empty(features, features)
    for start in range(0, features, PANEL):
        stop = start + PANEL
        product[start:stop, start:] = x[:, start:stop].t() @ x[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].t()
    return product


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
    if isinstance(term, Outer) and has_sides(term, sides):
        g, a = term.unscaled()
        return Outer((g @ left, a @ right), sides, term.dtype, term.coefficient)
    parts = [left @ part.dense().reshape(part.batch, *sides) @ right for part in term.chunks()]
    return Dense.of(torch.cat(parts))
