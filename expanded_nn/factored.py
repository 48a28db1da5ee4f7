"""The factored gradient: a tensor `(B, *shape)` that holds only what its rows are made of.

To autograd and to the user it *is* a tensor. What the table at the end names is done on the factors; any other
operation makes the rows dense, once, and they stay dense from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from expanded_nn._cell import Block, Cell, cat, running_backward
from expanded_nn._errors import complaint
from expanded_nn._storage import Recycled
from expanded_nn._terms import CHUNK_NUMEL, Dense, Outer, Term, in_own_dtype

aten = torch.ops.aten
KEPT_ROWS = 4  # times as many numbers as the factors that they were made of
MANY_POSITIONS = 16  # memory traffic of one dense row costs about as much as the arithmetic of so many positions


Method = TypeVar("Method", bound=Callable[..., Tensor])


def _in_own_dtype(method: Method) -> Method:
    """The method without autocast."""

    @wraps(method)
    def call(rows: FactoredTensor, *args: Any) -> Tensor:
        with in_own_dtype(rows):
            return method(rows, *args)

    return cast(Method, call)


class FactoredTensor(Tensor):
    """A per-sample gradient `(B, *shape)` held as its factors.

    It behaves as a tensor in every operation. Norms of the rows, weighted sums, products with a vector, scaling,
    adding, concatenating and choosing rows work on the factors; anything else makes it dense first.
    """

    _cell: Cell
    _source: tuple[Cell, int] | None  # the rows this one was sliced from, and their version then

    @staticmethod
    def __new__(cls, cell: Cell, shape: Sequence[int], source: tuple[Cell, int] | None = None) -> FactoredTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=cell.dtype, device=cell.device)
        tensor._cell = cell
        tensor._source = source
        return tensor

    @classmethod
    def of(cls, term: Term, shape: Sequence[int] | None = None) -> FactoredTensor:
        """One term as a tensor, of the given shape or `(B, *term.row_shape)`."""
        cell = Cell([(term.batch, (term,))], term.row_shape, term.dtype, term.factors[0].device)
        return cls(cell, shape if shape is not None else (term.batch, *term.row_shape))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The groups of rows, each with its terms."""
        self._check_source()
        return self._cell.merge()

    def terms(self) -> tuple[Term, ...]:
        """All terms of all blocks."""
        return tuple(term for _, terms in self.blocks for term in terms)

    @property
    def is_dense(self) -> bool:
        """Whether the rows have been made dense."""
        return self._cell.dense is not None

    def held_matrix(self) -> Tensor | None:
        """The rows as `(B, numbers in a row)`, where they are held so: not to be changed."""
        blocks = self.blocks
        term = blocks[0][1][0] if len(blocks) == 1 and len(blocks[0][1]) == 1 else None
        if not isinstance(term, Dense) or term.coefficient != 1.0:
            return None
        return term.matrix()

    def held_numel(self) -> int:
        """How many numbers are held: those of the factors, or of the dense rows."""
        return sum(term.numel() for term in self.terms())

    def sums_faster_dense(self) -> bool:
        """Whether adding up dense rows, once they are there, costs less than the product of the factors."""
        return any(term.positions >= MANY_POSITIONS for term in self.terms())

    def dense_for_norms(self) -> None:
        """Makes small rows dense if their norms do so anyway: what comes after has them then."""
        terms = self.terms()
        small = self.numel() <= min(CHUNK_NUMEL, KEPT_ROWS * self.held_numel())
        if small and len(terms) == 1 and terms[0].norms_take_rows:
            self._rows()

    def dense(self) -> Tensor:
        """The rows as a plain tensor `(B, *shape)`; they stay dense from then on."""
        if self.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _ToDense.apply(self))  # type: ignore[no-untyped-call]
        return self._rows()

    def _rows(self, memory: Recycled | None = None) -> Tensor:
        self._check_source()
        with torch.no_grad(), in_own_dtype(self):
            return self._cell.densify(memory).view(self.shape)

    @_in_own_dtype
    def squared_norms(self) -> Tensor:
        """`||row||^2` for each row, `(B,)`."""
        return cat([self._block_inner(size, terms) for size, terms in self.blocks])

    def _block_inner(self, size: int, terms: tuple[Term, ...]) -> Tensor:
        total: Tensor | None = None
        for position, term in enumerate(terms):
            own = term.squared_norms()
            total = own if total is None else total + own
            for other in terms[:position]:
                total = total + 2 * term.inner(other)
        return self._cell.zeros(size) if total is None else total

    @_in_own_dtype
    def weighted_sum(
        self,
        weights: Tensor | None = None,  # (B,)
    ) -> Tensor:
        """`sum_b weights[b] * row[b]`, `(*shape)`; the plain sum where `weights` is `None`."""
        total: Tensor | None = None
        start = 0
        for size, terms in self.blocks:
            part = None if weights is None else weights[start : start + size]
            start += size
            for term in terms:
                value = term.weighted_sum(part).reshape(self.shape[1:])
                total = value if total is None else total + value
        return self._cell.zeros(*self.shape[1:]) if total is None else total

    @_in_own_dtype
    def matvec(
        self,
        vector: Tensor,  # shape
    ) -> Tensor:
        """`<row, vector>` for each row, `(B,)`."""
        return cat(
            [sum((t.matvec(vector) for t in terms), start=self._cell.zeros(size)) for size, terms in self.blocks]
        )

    @_in_own_dtype
    def gram(self, other: Tensor) -> Tensor:
        """`<row, other_row>` for each pair, `(B, B')`."""
        others = as_factored(other).blocks
        return torch.cat(
            [
                torch.cat(
                    [
                        sum((t.gram(u) for t in terms for u in theirs), start=self._cell.zeros(size, width))
                        for width, theirs in others
                    ],
                    1,
                )
                for size, terms in self.blocks
            ]
        )

    def chunks(self) -> Iterator[Tensor]:
        """The dense rows in groups of bounded size, none of them kept."""
        for size, terms in self.blocks:
            if not terms:
                yield self._cell.zeros(size, *self.shape[1:])
            for parts in zip(*(term.chunks() for term in terms), strict=True):
                rows = parts[0].dense()
                for part in parts[1:]:
                    rows += part.dense().reshape(rows.shape)
                yield (
                    rows.reshape(-1, *self.shape[1:]) if rows.numel() else rows.reshape(rows.shape[0], *self.shape[1:])
                )

    def _check_source(self) -> None:
        if self._source is not None and self._source[0].version != self._source[1]:
            raise complaint(
                "grad_sample",
                "rows that were chosen from a factored gradient are used after that was changed in place",
                "no in-place change between the two",
                "Choose the rows again, or clone them.",
            )

    def _remade(self, change: Callable[[Term], Term]) -> list[Block]:
        return [(size, tuple(change(term) for term in terms)) for size, terms in self.blocks]

    def _like(self, blocks: Sequence[Block], shape: Sequence[int], dtype: torch.dtype | None = None) -> FactoredTensor:
        cell = Cell(blocks, self._cell.row_shape, dtype or self._cell.dtype, self._cell.device)
        return FactoredTensor(cell, shape)

    # What a wrapper subclass lacks of a tensor's manners.

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        kinds = " + ".join(type(term).__name__ for term in self.terms()) or "zeros"
        return f"FactoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, held as {kinds})"

    def numpy(self, **kwargs: Any) -> Any:
        return self.dense().numpy(**kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def data_ptr(self) -> int:
        return self.dense().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.dense().untyped_storage()

    def storage(self) -> Any:
        return self.dense().storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.dense().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.dense().__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._rows().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            handler = TABLE.get(func)
            if handler is not None and not (torch.is_grad_enabled() and _any_requires_grad(args)):
                result = handler(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = TABLE.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _dense_operation(func, args, kwargs or {})


class _ToDense(torch.autograd.Function):
    """The dense rows of a factored tensor that itself has a derivative."""

    @staticmethod
    def forward(rows: FactoredTensor) -> Tensor:
        return rows._rows().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def as_factored(rows: Tensor) -> FactoredTensor:
    """A view of any rows `(B, *shape)` that has the algebra of the factored gradient."""
    return rows if isinstance(rows, FactoredTensor) else FactoredTensor.of(Dense.of(rows))


def widened(rows: FactoredTensor) -> FactoredTensor:
    """The rows in float32, where they are of lower precision."""
    if rows.dtype not in (torch.float16, torch.bfloat16):
        return rows
    return rows._like(rows._remade(lambda term: term.to(torch.float32)), rows.shape, torch.float32)


def as_real(rows: FactoredTensor) -> FactoredTensor:
    """Complex rows as rows of pairs of real numbers, `(B, *shape, 2)`; others as they are."""
    return as_factored(torch.view_as_real(rows.dense().resolve_conj())) if rows.is_complex() else rows


def average(rows: FactoredTensor) -> Tensor:
    """The mean row, `(*shape)`; the sum may be too large for the rows' dtype."""
    return (widened(rows).weighted_sum() / rows.shape[0]).to(rows.dtype)


def materialized(rows: Tensor, memory: Recycled | None = None) -> Tensor:
    """Dense rows, written to `memory` where they are made here and have no derivative."""
    if not isinstance(rows, FactoredTensor):
        return rows
    return rows.dense() if rows.requires_grad else rows._rows(memory)


def times(rows: Tensor, factor: float) -> Tensor:
    """`rows * factor` in memory of its own, without the cost of dispatch where there is no history."""
    if isinstance(rows, FactoredTensor) and not rows.is_dense and not rows.requires_grad:
        return rows._like(_scaled_blocks(rows, factor), rows.shape)
    return rows * factor


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _dense_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation, on the dense rows. Its in-place changes and views are those of the dense rows."""
    wrappers: dict[int, FactoredTensor] = {}

    def unwrap(rows: FactoredTensor) -> Tensor:
        dense = rows._rows()
        wrappers[id(dense)] = rows
        return dense

    for rows in _written(func, args, kwargs):
        if rows._source is not None:
            _refuse_in_place()
        rows._cell.version += 1
    args, kwargs = tree_map_only(FactoredTensor, unwrap, (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda out: wrappers.get(id(out), out), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FactoredTensor]:
    """The factored tensors that the operation changes in place."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, FactoredTensor)]


def _refuse_in_place() -> None:
    raise complaint(
        "grad_sample",
        "an in-place change of rows that were chosen from a factored gradient",
        "a change of the whole gradient, or of a copy",
        "Clone the rows first.",
    )


def _broadcasts_by_row(rows: FactoredTensor, factor: Any) -> Tensor | float | None:
    """The number, or the `(B,)` numbers, that multiply the rows, or `None` if `factor` is of another shape."""
    if not isinstance(factor, Tensor):
        return float(factor) if isinstance(factor, int | float) else None
    # a number of the rows' dtype in their place: asking them would make them dense
    if isinstance(factor, FactoredTensor) or torch.result_type(_one(rows.dtype), factor) != rows.dtype:
        return None
    if factor.numel() == 1 and factor.dim() <= rows.dim():
        return factor.reshape(1).expand(rows.shape[0])
    if factor.shape == (rows.shape[0], *[1] * (rows.dim() - 1)):
        return factor.reshape(-1)
    return None


@cache
def _one(dtype: torch.dtype) -> Tensor:
    return torch.ones(1, dtype=dtype, device="cpu")


def _times(rows: Any, factor: Any) -> Any:
    if not isinstance(rows, FactoredTensor):
        rows, factor = factor, rows
    by_row = _broadcasts_by_row(rows, factor)
    return NotImplemented if by_row is None else rows._like(_scaled_blocks(rows, by_row), rows.shape)


def _scaled_blocks(rows: FactoredTensor, by_row: Tensor | float) -> list[Block]:
    if not isinstance(by_row, Tensor):
        return rows._remade(lambda term: term.scaled(by_row))
    blocks, start = [], 0
    for size, terms in rows.blocks:
        part = by_row[start : start + size]
        blocks.append((size, tuple(term.scaled(part) for term in terms)))
        start += size
    return blocks


def _times_(rows: Any, factor: Any) -> Any:
    if not isinstance(rows, FactoredTensor) or rows.is_dense:
        return NotImplemented
    if rows._source is not None:
        _refuse_in_place()
    by_row = _broadcasts_by_row(rows, factor)
    if by_row is None:
        return NotImplemented
    rows._cell.replace(_scaled_blocks(rows, by_row))
    return rows


def _inverse(divisor: Any) -> Any:
    return divisor.reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor


def _divided(rows: Any, divisor: Any) -> Any:
    if not isinstance(rows, FactoredTensor) or isinstance(divisor, FactoredTensor) or not _divides(divisor):
        return NotImplemented
    return _times(rows, _inverse(divisor))


def _divided_(rows: Any, divisor: Any) -> Any:
    if isinstance(divisor, FactoredTensor) or not _divides(divisor):
        return NotImplemented
    return _times_(rows, _inverse(divisor))


def _divides(divisor: Any) -> bool:
    return divisor.is_floating_point() if isinstance(divisor, Tensor) else divisor != 0


def _negated(rows: FactoredTensor) -> Any:
    return _times(rows, -1.0)


def _added_blocks(rows: Any, other: Any, alpha: float) -> list[Block] | None:
    """The blocks of a sum of two factored tensors of one shape, or `None` where it has to be dense."""
    if not (isinstance(rows, FactoredTensor) and isinstance(other, FactoredTensor)):
        return None
    if rows.shape != other.shape or rows.dtype != other.dtype or (rows.is_dense and other.is_dense):
        return None
    ours, theirs = rows.blocks, other.blocks
    if [size for size, _ in ours] != [size for size, _ in theirs]:
        return None
    return [
        (size, (*terms, *(term if alpha == 1 else term.scaled(alpha) for term in more)))
        for (size, terms), (_, more) in zip(ours, theirs, strict=True)
    ]


def _plus(rows: Any, other: Any, *, alpha: float = 1) -> Any:
    blocks = _added_blocks(rows, other, alpha)
    return NotImplemented if blocks is None else rows._like(blocks, rows.shape)


def _plus_(rows: Any, other: Any, *, alpha: float = 1) -> Any:
    blocks = None if isinstance(rows, FactoredTensor) and rows.is_dense else _added_blocks(rows, other, alpha)
    if blocks is None:
        return NotImplemented
    if rows._source is not None:
        _refuse_in_place()
    rows._cell.replace(blocks)
    return rows


def _dims(rows: FactoredTensor, dim: Any) -> set[int]:
    if dim is None or dim == []:
        return set(range(rows.dim()))
    return {each % rows.dim() for each in ([dim] if isinstance(dim, int) else dim)}


def _total(rows: FactoredTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if _dims(rows, dim) != {0} or dtype not in (None, rows.dtype):
        return NotImplemented
    total = rows.weighted_sum()
    return total.unsqueeze(0) if keepdim else total


def _average(rows: FactoredTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if _dims(rows, dim) != {0} or dtype not in (None, rows.dtype):
        return NotImplemented
    mean = average(rows)
    return mean.unsqueeze(0) if keepdim else mean


def _norm(rows: FactoredTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = _dims(rows, dim)
    if ord != 2 or dtype not in (None, rows.dtype) or rows.dim() < 2 or rows.is_complex():
        return NotImplemented
    if dims == set(range(rows.dim())):
        total = widened(rows).squared_norms().sum().clamp(min=0).sqrt().to(rows.dtype)
        return total.reshape([1] * rows.dim()) if keepdim else total
    if dims == set(range(1, rows.dim())):
        norms = widened(rows).squared_norms().clamp(min=0).sqrt().to(rows.dtype)
        return norms.reshape(-1, *[1] * (rows.dim() - 1)) if keepdim else norms
    return NotImplemented


def _viewed(rows: FactoredTensor, shape: Sequence[int]) -> Any:
    if rows.is_dense or not shape:
        return NotImplemented
    shape = torch.empty(rows.shape, device="meta").view(*shape).shape
    if shape[0] != rows.shape[0]:
        return NotImplemented
    return FactoredTensor(rows._cell, shape, rows._source)


def _aliased(rows: FactoredTensor) -> FactoredTensor:
    return FactoredTensor(rows._cell, rows.shape, rows._source)


def _cloned(rows: FactoredTensor, *, memory_format: Any = None) -> Any:
    if rows.is_dense:
        return NotImplemented
    return rows._like(rows._remade(Term.clone), rows.shape)


def _converted(rows: FactoredTensor, *, dtype: Any = None, **others: Any) -> Any:
    if (
        rows.is_dense
        or dtype is None
        or any(value is not None for key, value in others.items() if key != "non_blocking")
    ):
        return NotImplemented
    return rows._like(rows._remade(lambda term: term.to(dtype)), rows.shape, dtype)


def _catenated(tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    if not all(isinstance(rows, FactoredTensor) and not rows.is_dense for rows in tensors) or dim not in (
        0,
        -first.dim(),
    ):
        return NotImplemented
    if any(rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype for rows in tensors):
        return NotImplemented
    size = sum(rows.shape[0] for rows in tensors)
    return first._like([block for rows in tensors for block in rows.blocks], (size, *first.shape[1:]))


def _chosen(rows: FactoredTensor, choose: Callable[[Tensor], Tensor], *, alias: bool) -> Any:
    """The rows that `choose` takes of any tensor `(B, ...)`: of each factor."""
    if rows.is_dense or len(rows.blocks) != 1:
        return NotImplemented
    ((_, terms),) = rows.blocks
    size = choose(torch.empty(rows.shape[0], 0, device=rows.device)).shape[0]
    chosen = rows._like([(size, tuple(term.map(choose) for term in terms))], (size, *rows.shape[1:]))
    if alias:
        chosen._source = rows._source or (rows._cell, rows._cell.version)
    return chosen


def _sliced(rows: FactoredTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim % rows.dim() != 0:
        return NotImplemented
    return _chosen(rows, lambda factor: factor[start:end:step], alias=True)


def _indexed(rows: FactoredTensor, indices: Sequence[Any]) -> Any:
    if len(indices) != 1 or indices[0] is None or indices[0].dim() != 1:
        return NotImplemented
    return _chosen(rows, lambda factor: factor[indices[0]], alias=False)


def _index_selected(rows: FactoredTensor, dim: int, index: Tensor) -> Any:
    if dim % rows.dim() != 0 or index.dim() != 1:
        return NotImplemented
    return _chosen(rows, lambda factor: factor[index], alias=False)


def _transposed(rows: FactoredTensor, one: int = -2, other: int = -1) -> Any:
    """Each row transposed, where autograd asks: there nobody sees that it is no alias."""
    if {one % rows.dim(), other % rows.dim()} != {1, 2} or rows.dim() != 3 or running_backward() < 0:
        return NotImplemented
    if rows.is_dense or rows._cell.row_shape != tuple(rows.shape[1:]):
        return NotImplemented
    if not all(isinstance(term, Outer) for term in rows.terms()):
        return NotImplemented
    blocks = rows._remade(lambda term: cast(Outer, term).transposed())
    cell = Cell(blocks, tuple(rows.shape[:0:-1]), rows.dtype, rows.device)
    return FactoredTensor(cell, (rows.shape[0], rows.shape[2], rows.shape[1]))


def _permuted(rows: FactoredTensor, dims: Sequence[int]) -> Any:
    return _transposed(rows, 1, 2) if [dim % rows.dim() for dim in dims] == [0, 2, 1] else NotImplemented


def _times_vector(rows: Any, vector: Any) -> Any:
    if not isinstance(rows, FactoredTensor) or isinstance(vector, FactoredTensor) or vector.dtype != rows.dtype:
        return NotImplemented
    return rows.matvec(vector)


def _einsum(equation: str, *operands: Any) -> Any:
    """`einsum("b,b...->...", weights, rows)`, in any letters and either order: the weighted sum of the rows."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if len(operands) != 2 or len(labels) != 2:
        return NotImplemented
    if isinstance(operands[0], FactoredTensor):
        operands, labels = operands[::-1], labels[::-1]
    weights, rows = operands
    row = labels[1][1:]
    if not isinstance(rows, FactoredTensor) or isinstance(weights, FactoredTensor) or weights.dim() != 1:
        return NotImplemented
    if len(labels[0]) != 1 or labels[1][:1] != labels[0] or labels[0] in row:
        return NotImplemented
    if row != "..." and (not row.isalpha() or len(set(row)) != rows.dim() - 1):
        return NotImplemented
    if output != row if arrow else row != "..." and row != "".join(sorted(row)):
        return NotImplemented
    return rows.weighted_sum(weights) if weights.dtype == rows.dtype else NotImplemented


def _assigned(rows: Any, *_: Any) -> Any:
    if isinstance(rows, FactoredTensor):
        rows._rows()
    return NotImplemented


TABLE: dict[Any, Callable[..., Any]] = {
    # operator -> function on the factors; NotImplemented makes the rows dense
    aten.add.Tensor: _plus,
    aten.add_.Tensor: _plus_,
    aten.neg.default: _negated,
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.mul_.Tensor: _times_,
    aten.mul_.Scalar: _times_,
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.div_.Tensor: _divided_,
    aten.div_.Scalar: _divided_,
    aten.sum.dim_IntList: _total,
    aten.mean.dim: _average,
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
    aten.index.Tensor: _indexed,
    aten.index_select.default: _index_selected,
    Tensor.__setitem__: _assigned,
}
