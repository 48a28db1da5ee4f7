"""The algebra of rows in blocks, one behind the other: a block is a number of rows, and their terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.core.lines import matvec_by_line as by_line
from expanded_nn.core.products import Products
from expanded_nn.core.terms import Dense, OneHot, Outer, Term

Block = tuple[int, tuple[Term, ...]]


class Kind(NamedTuple):
    """What all rows of a parameter have in common."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self, *size: int) -> Tensor:
        """Zeros of the rows' dtype, on their device."""
        return torch.zeros(*size, dtype=self.dtype, device=self.device)


def dense(
    blocks: Sequence[Block],
    kind: Kind,
    out: Tensor | None = None,  # (B, *row_shape)
) -> Tensor:  # (B, *row_shape)
    """The rows themselves, in new memory, or in that of `out`, for a single block whose first term fills it."""
    return _cat([_block_rows(size, terms, kind, out) for size, terms in blocks])


def _block_rows(size: int, terms: Sequence[Term], kind: Kind, out: Tensor | None) -> Tensor:
    if not terms:
        return kind.zeros(size, *kind.row_shape)
    first, shape = terms[0], (size, *kind.row_shape)
    rows = first.dense(None if out is None else out.view(size, *first.row_shape)).reshape(shape)
    for term in terms[1:]:
        rows += term.dense().reshape(shape)
    return rows


def chunks(blocks: Sequence[Block], kind: Kind) -> Iterator[Tensor]:
    """The dense rows in groups of bounded size, `(n, *row_shape)`, none of them kept."""
    for size, terms in blocks:
        if not terms:
            yield kind.zeros(size, *kind.row_shape)
        for parts in zip(*(term.chunks() for term in terms), strict=True):
            yield _block_rows(parts[0].batch, parts, kind, None)


def squared_norms(blocks: Sequence[Block], kind: Kind, products: Products | None = None) -> Tensor:  # (B,)
    """`||row||^2` for each row; `products` are kept from the rows of parameters before these."""
    return _cat([_block_norms(size, terms, kind, products) for size, terms in blocks])


def _block_norms(size: int, terms: Sequence[Term], kind: Kind, products: Products | None) -> Tensor:
    norms = [term.squared_norms(products) for term in terms]
    norms += [2 * term.inner(earlier) for i, term in enumerate(terms) for earlier in terms[:i]]
    return reduce(torch.add, norms) if norms else kind.zeros(size)


def weighted_sum(
    blocks: Sequence[Block],
    kind: Kind,
    weights: Tensor | None = None,  # (B,)
) -> Tensor:  # row_shape
    """`sum_b weights[b] * row[b]`; the plain sum where `weights` is `None`."""
    total: Tensor | None = None
    start = 0
    for size, terms in blocks:
        block_weights = None if weights is None else weights[start : start + size]
        start += size
        for term in terms:
            if total is None:
                total = term.weighted_sum(block_weights)
            else:  # of tied embeddings each sum is as large as the weight
                total = term.add_weighted_sum(total.reshape(term.row_shape), block_weights)
    return kind.zeros(*kind.row_shape) if total is None else total.reshape(kind.row_shape)


def matvec(
    blocks: Sequence[Block],
    kind: Kind,
    vector: Tensor,  # as many numbers as a row has
) -> Tensor:  # (B,)
    """`<row, vector>` for each row."""
    return _cat([sum((term.matvec(vector) for term in terms), start=kind.zeros(size)) for size, terms in blocks])


def matvec_by_line(
    blocks: Sequence[Block],
    kind: Kind,
    matrix: Tensor,  # (lines, ...), as many numbers as a row has
) -> Tensor:  # (B, lines)
    """The product of each line of a row with the same line of a matrix, for each row."""
    products = [[by_line(term, matrix) for term in terms] for _, terms in blocks]
    return _cat([sum(of, start=kind.zeros(size, len(matrix))) for (size, _), of in zip(blocks, products, strict=True)])


def gram(blocks: Sequence[Block], other_blocks: Sequence[Block], kind: Kind) -> Tensor:  # (B, B')
    """`<row, other_row>` for each pair."""
    return of_pairs(blocks, other_blocks, lambda term, other: term.gram(other), kind)


def of_pairs(
    blocks: Sequence[Block],
    other_blocks: Sequence[Block],
    product: Callable[[Term, Term], Tensor],  # (B, *, B')
    kind: Kind,
    *shape: int,
) -> Tensor:  # (B, *shape, B')
    """A product of each pair of rows that adds up over their terms; it has numbers of such a shape."""

    def block(size: int, terms: Sequence[Term], width: int, other_terms: Sequence[Term]) -> Tensor:
        products = (product(term, other) for term in terms for other in other_terms)
        return sum(products, start=kind.zeros(size, *shape, width))

    return _cat([_cat([block(*rows, *columns) for columns in other_blocks], -1) for rows in blocks])


def joined(blocks: Sequence[Block]) -> list[Block]:
    """The blocks, with those beside each other put together whose terms are alike; few make few pairs of blocks."""
    groups: list[list[Block]] = []
    numel = 0  # in the last group
    for block in blocks:
        own = sum(term.numel() for term in block[1])
        numel += own
        if groups and numel <= cost.JOINED_BLOCKS_NUMEL and _go_together(groups[-1][0], block):
            groups[-1].append(block)
        else:
            groups.append([block])
            numel = own
    return [group[0] if len(group) == 1 else _as_one(group) for group in groups]


def _go_together(block: Block, other: Block) -> bool:
    terms, other_terms = block[1], other[1]
    return len(terms) == len(other_terms) and all(map(_is_continued, terms, other_terms))


def _is_continued(term: Term, other: Term) -> bool:
    """Whether the rows of two terms are those of one, whose factors are theirs, one behind the other."""
    shapes = [[factor.shape[1:] for factor in each.factors] for each in (term, other)]
    return _is_alike(term, other) and isinstance(term, Dense | Outer | OneHot) and shapes[0] == shapes[1]


def _as_one(group: Sequence[Block]) -> Block:
    terms = []
    for column in zip(*(terms for _, terms in group), strict=True):
        factors = [torch.cat(parts) for parts in zip(*(term.absorbed() for term in column), strict=True)]
        terms.append(column[0].remake(factors, 1.0, column[0].dtype))
    return sum(size for size, _ in group), tuple(terms)


def merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms, those of one kind added up, so that few cross terms remain; the only one of a kind stays as it is."""
    groups: list[list[Term]] = []
    for term in terms:
        group = next((group for group in groups if _is_alike(group[0], term)), None)
        if group is None:
            groups.append([term])
        else:
            group.append(term)
    return tuple(joined for group in groups for joined in _joined(group))


def _is_alike(term: Term, other: Term) -> bool:
    is_same = type(term) is type(other) and term.of_gradient == other.of_gradient
    return is_same and term.row_shape == other.row_shape and term.dtype == other.dtype


def _joined(group: list[Term]) -> list[Term]:
    first = group[0]
    if len(group) == 1:
        return group
    if isinstance(first, Dense):
        total = first.dense()
        for term in group[1:]:
            (rows,) = term.weighted()
            total += rows
        return [Dense.of(total)]
    if isinstance(first, Outer | OneHot):
        alike = all(term.coefficient == first.coefficient for term in group)
        factors = [term.unscaled() if alike else term.absorbed() for term in group]
        joined = [torch.cat(parts, 1) for parts in zip(*factors, strict=True)]
        return [first.remake(joined, first.coefficient if alike else 1.0, first.dtype)]
    return group


def _cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
