"""Inner products of rows, position by position of the one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn._patches import Patches
from expanded_nn._terms import Dense, OneHot, Outer, Term
from expanded_nn.factored import FactoredTensor


def positions_of(terms: Sequence[Term]) -> set[int] | None:
    """How many positions the terms have; `None` if some have none."""
    if any(not isinstance(term, Outer | OneHot) for term in terms):
        return None
    return {term.factors[0].shape[1] for term in terms}


def gram_takes_rows(term: Term, other: Term) -> bool:
    """Whether `gram` of the two makes the first's rows dense."""
    if isinstance(term, Outer) and isinstance(other, Outer):
        return not term._positions_are_few(other)
    if isinstance(term, Patches) and isinstance(other, Patches):
        return term.geometry.groups > 1 or term._cost_by_position(other) >= 1
    return not isinstance(term, Dense) and not (isinstance(term, Outer | OneHot) and isinstance(other, Outer | OneHot))


def gram_by_position(term: Term, others: FactoredTensor) -> Tensor:
    """`<row[b, t], other_row[c]>` for each position t of an `Outer` or a `OneHot`, `(B, T, B')`."""
    width, size = others.shape[0], term.factors[0].shape[1]
    total = torch.zeros(term.batch, size, width, dtype=others.dtype, device=others.device)
    start = 0
    for count, theirs in others.blocks:
        for other in theirs if count else ():
            for place, column in enumerate(_columns(term, other), start):
                total[:, :, place] += column
        start += count
    return total


def _columns(term: Term, other: Term) -> Iterator[Tensor]:
    """For each row of `other` its inner products with each position of the term's rows, `(B, T)`."""
    first, second = term.weighted()
    for part in other.chunks(None if _takes_rows(term, other) else sum(f[0].numel() for f in other.factors)):
        if _takes_rows(term, other):
            for row in part.dense().reshape(part.batch, *term.row_shape):
                if isinstance(term, Outer):
                    yield ((first @ row) * second).sum(2)
                else:
                    yield (F.embedding(second, row) * first).sum(2)
            continue
        for h, c in zip(*part.weighted(), strict=True):
            yield (_left(term, part, first, second, h, c)).sum(2)


def _takes_rows(term: Term, other: Term) -> bool:
    """Whether a dense row of `other` is needed, or costs less than its positions."""
    if not isinstance(other, Outer | OneHot) or other.row_shape != term.row_shape:
        return True
    out, in_ = term.row_shape
    both = isinstance(term, Outer) and isinstance(other, Outer)
    return both and other.positions * (out + in_) >= out * in_


def _left(term: Term, other: Term, first: Tensor, second: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """The products of all positions of the term's rows with those of one row of the other, `(B, T, S)`.

    Rows are `(out, in)`, those of an embedding `(entries, dim)`: an index stands for a vector of one 1.
    """
    if isinstance(term, Outer):
        if isinstance(other, Outer):
            return (first @ h.t()) * (second @ c.t())
        return (second @ h.t()) * first[:, :, c]
    if isinstance(other, Outer):
        return (first @ c.t()) * h.t()[second]
    return (first @ h.t()) * (second[:, :, None] == c)
