"""Inner products of rows, for each position of the first row by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.core.algebra import Block, Kind, of_pairs
from expanded_nn.core.terms import OneHot, Outer, PaddedOuter, Term, products_of_positions


def numbers_of_positions(blocks: Sequence[Block]) -> set[int] | None:
    """How many positions the terms have; `None` if some have none."""
    terms = [term for _, terms in blocks for term in terms]
    if not all(isinstance(term, Outer | OneHot) and not isinstance(term, PaddedOuter) for term in terms):
        return None
    return {term.factors[0].shape[1] for term in terms}


def gram_by_position(
    blocks: Sequence[Block], other_blocks: Sequence[Block], kind: Kind, positions: int
) -> Tensor:  # (B, T, B')
    """`<row[b, t], other_row[c]>` for each position t, of which all rows have `positions`."""

    def product(term: Term, other: Term) -> Tensor:
        if not term.batch or not other.batch:
            return kind.zeros(term.batch, positions, other.batch)
        return torch.stack(list(_columns(term, other)), 2)

    return of_pairs(blocks, other_blocks, product, kind, positions)


def _columns(term: Term, other: Term) -> Iterator[Tensor]:
    """For each row of `other` its inner products with each position of the term's rows, `(B, T)`."""
    first, second = term.weighted()
    takes_rows = _takes_rows(term, other)
    for chunk in other.chunks(None if takes_rows else sum(factor[0].numel() for factor in other.factors)):
        if takes_rows:
            for row in chunk.dense().reshape(chunk.batch, *term.row_shape):
                if isinstance(term, Outer):
                    yield ((first @ row) * second).sum(2)
                else:
                    yield (F.embedding(second, row) * first).sum(2)
            continue
        for h, c in zip(*chunk.weighted(), strict=True):
            yield products_of_positions(term, chunk, (first, second), h, c).sum(2)


def _takes_rows(term: Term, other: Term) -> bool:
    """Whether a dense row of `other` is needed, or costs less than its positions."""
    if not isinstance(other, Outer | OneHot) or other.row_shape != term.row_shape:
        return True
    both_outer = isinstance(term, Outer) and isinstance(other, Outer)
    return both_outer and not cost.gram_by_pairs(1, other.positions, *term.row_shape)
