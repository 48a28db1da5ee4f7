"""The operators that work on the factors of a gradient, without making its rows dense.

A function here takes the arguments of its operator, and returns `NotImplemented` where the rows have to be dense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from operator import itemgetter, methodcaller
from typing import Any, cast

import torch
from torch import Tensor

from expanded_nn.common.modes import running_backward
from expanded_nn.common.traced import is_traced
from expanded_nn.core.cost import is_symbol
from expanded_nn.core.terms import Outer, Term
from expanded_nn.rows.cell import Cell, Slice
from expanded_nn.rows.factors import R, Rows, average, scaled_blocks, widened

aten = torch.ops.aten


def _broadcasts_by_row(rows: Rows, factor: Any) -> Tensor | float | None:
    """The number, or the `(B,)` numbers, that multiply the rows, or `None` if `factor` is of another shape."""
    if not isinstance(factor, Tensor):
        return float(factor) if isinstance(factor, int | float) else None
    # result_type of the rows themselves would make them dense
    if isinstance(factor, Rows) or torch.result_type(_one(rows.dtype), factor) != rows.dtype:
        return None
    if factor.numel() == 1 and factor.dim() <= rows.dim():
        # without dimensions it may be on the CPU, as with dense rows
        number: Tensor = factor.to(rows.device) if factor.dim() == 0 else factor
        return number.reshape(1).expand(rows.shape[0])
    if factor.shape == (rows.shape[0], *[1] * (rows.dim() - 1)):
        return factor.reshape(-1)
    return None


@cache
def _one(dtype: torch.dtype) -> Tensor:
    return torch.ones(1, dtype=dtype, device="cpu")


def _times(rows: Any, factor: Any) -> Any:
    if not isinstance(rows, Rows):
        rows, factor = factor, rows
    by_row = _broadcasts_by_row(rows, factor)
    if by_row is None:
        return NotImplemented
    if rows.dtype == torch.float16 and (isinstance(by_row, Tensor) or abs(by_row) < 1):
        return NotImplemented  # a factor times a small number may vanish
    return rows._like(scaled_blocks(rows, by_row), rows.shape)


def _divided(rows: Any, divisor: Any) -> Any:
    if isinstance(divisor, Rows):
        return NotImplemented
    if not isinstance(divisor, Tensor):
        return _times(rows, 1.0 / divisor) if divisor != 0 else NotImplemented
    if not divisor.is_floating_point():
        return NotImplemented
    return _times(rows, divisor.to(torch.promote_types(rows.dtype, divisor.dtype)).reciprocal())


def _plus(rows: Any, other: Any, *, alpha: float = 1) -> Any:
    if type(other) is int and other == 0:  # as `sum` begins with
        return rows._like(rows.blocks, rows.shape)
    if not (isinstance(rows, Rows) and isinstance(other, Rows)) or (alpha != 1 and rows.dtype == torch.float16):
        return NotImplemented
    if rows.shape != other.shape or rows.dtype != other.dtype or (rows.is_dense and other.is_dense):
        return NotImplemented
    blocks, other_blocks = rows.blocks, other.blocks if alpha == 1 else scaled_blocks(other, alpha)
    if [size for size, _ in blocks] != [size for size, _ in other_blocks]:
        return NotImplemented
    pairs = zip(blocks, other_blocks, strict=True)
    blocks = tuple((size, (*terms, *other_terms)) for (size, terms), (_, other_terms) in pairs)
    return rows._like(blocks, rows.shape)


def _dims(rows: Rows, dim: Any) -> set[int]:
    if dim is None or dim == []:
        return set(range(rows.dim()))
    return {number % rows.dim() for number in ([dim] if isinstance(dim, int) else dim)}


def _over_samples(reduce: Callable[[Rows], Tensor]) -> Callable[..., Any]:
    """A reduction of the batch dimension alone."""

    def call(rows: Rows, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if _dims(rows, dim) != {0} or dtype not in (None, rows.dtype):
            return NotImplemented
        return reduce(rows).unsqueeze(0) if keepdim else reduce(rows)

    return call


def _norm(rows: Rows, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = _dims(rows, dim)
    if ord != 2 or dtype not in (None, rows.dtype) or rows.dim() < 2 or rows.is_complex():
        return NotImplemented
    if not dims >= set(range(1, rows.dim())):
        return NotImplemented
    squares = widened(rows).squared_norms()
    numbers = torch.finfo(squares.dtype)
    if numbers.bits < 64 and squares.numel() and not (is_traced() or squares.is_meta):
        smallest, largest = squares.detach().aminmax()
        if not numbers.tiny / numbers.eps < float(smallest) <= float(largest) < numbers.max:  # NaN is no number either
            squares = rows._like(rows._remade(lambda term: term.to(torch.float64)), rows.shape, torch.float64)
            squares = squares.squared_norms()
    norms = (squares.sum() if 0 in dims else squares).clamp(min=0).sqrt().to(rows.dtype)
    return norms.reshape(-1, *[1] * (rows.dim() - 1)) if keepdim else norms


def _viewed(rows: Rows, shape: Sequence[int]) -> Any:
    if rows.is_dense or not shape:
        return NotImplemented
    shape = torch.empty(rows.shape, device="meta").view(*shape).shape
    if shape[0] != rows.shape[0] or prod(shape[1:]) != prod(rows.shape[1:]):  # without samples B is 0 in many views
        return NotImplemented
    return type(rows)(rows._cell, shape)


def _aliased(rows: R) -> R:
    return type(rows)(rows._cell, rows.shape)


def _cloned(rows: Rows, *, memory_format: Any = None) -> Any:
    if rows.is_dense:
        return NotImplemented
    blocks = [(size, tuple(guarded.clone() for guarded in terms)) for size, terms in rows.blocks]
    return rows._like(blocks, rows.shape)


def _converted(rows: Rows, *, dtype: Any = None, **options: Any) -> Any:
    asks_for_more = any(value is not None for key, value in options.items() if key != "non_blocking")
    if rows.is_dense or dtype is None or asks_for_more or not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # whole numbers of the factors would not be those of the rows
    if dtype.is_complex != rows.is_complex():
        return NotImplemented  # nor would real parts; and not all that convolves real factors convolves complex ones
    if torch.finfo(dtype).bits < 32 and dtype != rows.dtype:  # it may hold the rows, and not their factors
        return NotImplemented
    return rows._like(rows._remade(lambda term: term.to(dtype)), rows.shape, dtype)


def _catenated(tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    if dim not in (0, -first.dim()) or not all(isinstance(rows, Rows) and not rows.is_dense for rows in tensors):
        return NotImplemented
    if any(rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype for rows in tensors):
        return NotImplemented
    size = sum(rows.shape[0] for rows in tensors)
    return first._like([block for rows in tensors for block in rows.blocks], (size, *first.shape[1:]))


def _chosen(rows: Rows, choose: Callable[[Tensor], Tensor]) -> Any:
    """Some of the rows, from some of each factor: `choose` takes them from any tensor `(B, ...)`."""
    if rows.is_dense:
        return NotImplemented
    blocks = rows.blocks
    if len(blocks) == 1:
        size = choose(torch.empty(rows.shape[0], 0, device=rows.device)).shape[0]
        chosen = [(size, tuple(guarded.derived(lambda term: term.map(choose)) for guarded in blocks[0][1]))]
        return rows._like(chosen, (size, *rows.shape[1:]))
    numbers = choose(torch.arange(rows.shape[0], device=rows.device))
    if is_traced() or not len(numbers):
        return NotImplemented
    ends = torch.tensor([size for size, _ in blocks], device=rows.device).cumsum(0)
    places, counts = torch.bucketize(numbers, ends, right=True).unique_consecutive(return_counts=True)
    if len(places) > len(blocks):  # to and fro between them
        return NotImplemented
    chosen = []
    for place, own in zip(places.tolist(), numbers.split(counts.tolist()), strict=True):
        size, terms = blocks[place]
        index: Any = own - (ends[place] - size)
        if bool((index.diff() == 1).all()):  # as a slice it takes no memory
            index = slice(int(index[0]), int(index[-1]) + 1)
        take = methodcaller("map", itemgetter(index))  # of each factor
        chosen.append((len(own), tuple(guarded.derived(take) for guarded in terms)))
    return rows._like(chosen, (len(numbers), *rows.shape[1:]))


def _sliced(rows: Rows, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    part = slice(start, end)
    # one with steps would be a view that has gaps
    chosen = NotImplemented if dim % rows.dim() or step != 1 else _chosen(rows, lambda factor: factor[part])
    if chosen is not NotImplemented:
        chosen._cell = Slice(chosen._cell.blocks, rows._cell, part)
    return chosen


def _split(rows: Rows, size: int, dim: int = 0) -> Any:
    if dim % rows.dim() or size < 1 or is_symbol(rows.shape[0]):
        return NotImplemented
    parts = [_sliced(rows, 0, start, start + size) for start in range(0, rows.shape[0], size)]
    return NotImplemented if not parts or any(part is NotImplemented for part in parts) else parts


def _indexed(rows: Rows, indices: Sequence[Any]) -> Any:
    if len(indices) != 1 or indices[0] is None or indices[0].dim() != 1:
        return NotImplemented
    return _chosen(rows, lambda factor: factor[indices[0]])


def _index_selected(rows: Rows, dim: int, index: Tensor) -> Any:
    return _indexed(rows, [index]) if dim % rows.dim() == 0 else NotImplemented


def _are_outer_products(rows: Rows) -> bool:
    """Whether the rows are matrices, held as outer products of vectors of their two sides."""
    if rows.dim() != 3 or rows.is_dense or rows._cell.kind.row_shape != tuple(rows.shape[1:]):
        return False
    return all(isinstance(term, Outer) for term in rows.terms())


def _of_matrices(rows: R, change: Callable[[Outer], Term], shape: Sequence[int]) -> R:
    """Rows `shape`, by a change of each term of such rows."""
    blocks = rows._remade(cast(Callable[[Term], Term], change))
    return type(rows)(Cell(blocks, rows._cell.kind._replace(row_shape=tuple(shape[1:]))), tuple(shape))


def _transposed(rows: Rows, first: int = -2, second: int = -1) -> Any:
    """Each row transposed, within a backward only: there nobody sees that the result is no alias."""
    if {first % rows.dim(), second % rows.dim()} != {1, 2} or not _are_outer_products(rows) or running_backward() < 0:
        return NotImplemented
    return _of_matrices(rows, Outer.transposed, (rows.shape[0], rows.shape[2], rows.shape[1]))


def _permuted(rows: Rows, dims: Sequence[int]) -> Any:
    return _transposed(rows, 1, 2) if [dim % rows.dim() for dim in dims] == [0, 2, 1] else NotImplemented


def _padded(rows: Rows, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """The rows of a matrix from those of some of its lines, one after the other: the gradient of a slice."""
    if dim % rows.dim() != 1 or step != 1 or not _are_outer_products(rows):
        return NotImplemented
    start, end, _ = slice(start, end).indices(sizes[1])
    return _of_matrices(rows, lambda term: term.padded((start, sizes[1] - end)), sizes)


def _times_vector(rows: Any, vector: Any) -> Any:
    if isinstance(vector, Rows) or vector.dtype != rows.dtype or rows.dim() != 2:
        return NotImplemented
    wide = widened(rows)
    return wide.matvec(vector.to(wide.dtype)).to(rows.dtype)


_WEIGHTED_SUM = re.compile(r"(\w),\1(\.\.\.|((?!\1)[a-zA-Z])+)")


def _einsum(equation: str, *operands: Any) -> Any:
    """`einsum("b,b...->...", weights, rows)`, in any letters and either order: the weighted sum of the rows."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if isinstance(operands[0], Rows):
        operands, inputs = operands[::-1], ",".join(reversed(inputs.split(",")))
    labels = _WEIGHTED_SUM.fullmatch(inputs)
    if labels is None or len(operands) != 2:
        return NotImplemented
    row, (weights, rows) = labels[2], operands
    if isinstance(weights, Rows) or weights.dim() != 1 or weights.dtype != rows.dtype:
        return NotImplemented
    fits = row == "..." or len(set(row)) == len(row) == rows.dim() - 1
    fits = fits and weights.shape[0] == rows.shape[0]
    is_in_order = output == row if arrow else row in ("...", "".join(sorted(row)))
    return widened(rows).weighted_sum(weights).to(rows.dtype) if fits and is_in_order else NotImplemented


def _assigned(rows: Any, *_: Any) -> Any:
    if isinstance(rows, Rows):
        rows.in_memory()
    return NotImplemented


TABLE: dict[Any, Callable[..., Any]] = {  # operator -> function on the factors
    aten.add.Tensor: _plus,
    aten.neg.default: lambda rows: rows._like(scaled_blocks(rows, -1.0), rows.shape),
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.sum.dim_IntList: _over_samples(Rows.weighted_sum),
    aten.mean.dim: _over_samples(average),
    aten.linalg_vector_norm.default: _norm,
    aten.mv.default: _times_vector,
    torch.einsum: _einsum,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.detach.default: _aliased,
    aten.alias.default: _aliased,
    aten.clone.default: _cloned,
    aten._to_copy.default: _converted,
    aten.cat.default: _catenated,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.slice_backward.default: _padded,
    aten.index.Tensor: _indexed,
    aten.index_select.default: _index_selected,
    Tensor.__setitem__: _assigned,
}
