"""The factored gradient: a tensor `(B, *shape)` that holds only what its rows are made of.

To autograd and to the user it *is* a tensor. What `_operations.py` enters into the table is done on the factors; any
other operation makes the rows dense, once, and they stay dense from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from expanded_nn._cell import Block, Cell, cat
from expanded_nn._errors import complaint
from expanded_nn._storage import Recycled
from expanded_nn._terms import CHUNK_NUMEL, Dense, Term, in_own_dtype

TABLE: dict[Any, Callable[..., Any]] = {}  # operator -> function on the factors; NotImplemented makes the rows dense
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


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several passes, one after the other, without copying what they are made of."""
    if any(part.requires_grad for part in parts):
        return torch.cat(list(parts))
    factored = [as_factored(part) for part in parts]
    size = sum(part.shape[0] for part in parts)
    return factored[0]._like([block for part in factored for block in part.blocks], (size, *parts[0].shape[1:]))


def parted(rows: FactoredTensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of rows that were joined, as they are now."""
    blocks = rows.blocks
    if rows.is_dense or [size for size, _ in blocks] != list(sizes):
        return list(rows.dense().split(list(sizes)))
    return [rows._like([block], (block[0], *rows.shape[1:])) for block in blocks]


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
        return rows._like(scaled_blocks(rows, factor), rows.shape)
    return rows * factor


def scaled_blocks(rows: FactoredTensor, by_row: Tensor | float) -> list[Block]:
    """The blocks of the rows times a number, or times each row's own, `(B,)`."""
    if not isinstance(by_row, Tensor):
        return rows._remade(lambda term: term.scaled(by_row))
    blocks, start = [], 0
    for size, terms in rows.blocks:
        part = by_row[start : start + size]
        blocks.append((size, tuple(term.scaled(part) for term in terms)))
        start += size
    return blocks


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
            refuse_in_place()
        rows._cell.version += 1
    args, kwargs = tree_map_only(FactoredTensor, unwrap, (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda out: wrappers.get(id(out), out), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FactoredTensor]:
    """The factored tensors that the operation changes in place."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, FactoredTensor)]


def refuse_in_place() -> None:
    """Raises, as chosen rows are no view of the others in autograd's sense."""
    raise complaint(
        "grad_sample",
        "an in-place change of rows that were chosen from a factored gradient",
        "a change of the whole gradient, or of a copy",
        "Clone the rows first.",
    )
