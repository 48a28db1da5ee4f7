"""The factored gradient: a tensor `(B, *shape)` that holds only the factors of its rows.

To autograd and to the user it is a tensor. The operators in the table of `rows/operations.py` work on the factors; any
other makes the rows dense, once, and they stay dense from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from expanded_nn._errors import complaint
from expanded_nn.common.functions import functions
from expanded_nn.common.modes import no_torch_function, refuse_batched
from expanded_nn.common.traced import OnlyEager
from expanded_nn.core.algebra import Kind
from expanded_nn.core.elementwise import Elementwise
from expanded_nn.core.geometry import Geometry
from expanded_nn.core.lines import Lines
from expanded_nn.core.parts import Parts
from expanded_nn.core.patches import Patches
from expanded_nn.core.terms import Dense, Differentiable, OneHot, Outer, PaddedOuter, SparseOneHot, Term
from expanded_nn.rows.cell import Block, Cell, Guarded, Slice
from expanded_nn.rows.factors import Rows, scaled_blocks
from expanded_nn.rows.operations import TABLE
from expanded_nn.rows.storage import Recycled

Gradient = Callable[..., Tensor]
PRODUCTS = set(functions("matmul", "__matmul__", "__rmatmul__", "mv", "einsum", "tensordot", "inner", "linear"))
SAVED_VERSION = 2  # of what `__reduce_ex__` hands to `rebuilt`
KINDS = Dense, Outer, PaddedOuter, Parts, OneHot, SparseOneHot, Patches, Elementwise, Lines
SAVED_KINDS = {kind.__name__: kind for kind in KINDS}


def _of_dense(name: str) -> Any:
    """A method that reads memory: that of the dense rows."""

    def method(rows: FactoredTensor, *args: Any, **kwargs: Any) -> Any:
        rows.in_memory()
        return getattr(rows.dense(), name)(*args, **kwargs)

    return method


class FactoredTensor(Rows):
    """A per-sample gradient `(B, *shape)` held as its factors.

    It behaves as a tensor in every operation. Norms of the rows, weighted sums, products with a vector, scaling,
    adding, concatenating and choosing rows work on the factors; anything else makes it dense first. Copied, pickled and
    saved it keeps its factors; `torch.load` reads them with `weights_only=True` wherever expanded_nn is imported.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(500, 400)).per_sample()
        >>> model(torch.randn(3, 500)).sum(1).mean().backward()
        >>> model.weight.grad_sample
        FactoredTensor(shape=(3, 400, 500), dtype=torch.float32, held as Outer)
        >>> model.weight.grad_sample.held_numel(), model.weight.grad_sample.numel()
        (2700, 600000)
    """

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        kinds = " + ".join(type(term).__name__ for term in self.terms()) or "zeros"
        return f"FactoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, held as {kinds})"

    numpy, __array__, tolist = map(_of_dense, ("numpy", "__array__", "tolist"))
    data_ptr, untyped_storage, storage = map(_of_dense, ("data_ptr", "untyped_storage", "storage"))
    __dlpack__, __dlpack_device__ = map(_of_dense, ("__dlpack__", "__dlpack_device__"))

    @property
    def data(self) -> Tensor:
        """The rows without their history."""
        return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Tensor) -> None:  # torch would set the memory of a tensor that has none
        raise complaint(
            "grad_sample",
            "the .data of factored rows is set anew",
            "other numbers in the same rows, or other rows",
            "Write rows.copy_(other), or parameter.grad_sample = other.",
        )

    def apply_(self, function: Callable[[Any], Any]) -> Tensor:
        """Applies a function to each number, in place."""
        return self.copy_(self.dense().clone().apply_(function))  # torch's own takes memory that is not there

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.__copy__()
        return cast(Tensor, memo[id(self)])

    def __copy__(self) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_dense:
            return self._rows().clone().__reduce_ex__(protocol)
        blocks = [(size, [_to_save(term) for term in terms]) for size, terms in self._unchanged()]
        kind = self._cell.kind
        like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        return rebuilt, (SAVED_VERSION, tuple(self.shape), tuple(kind.row_shape), like, blocks)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with no_torch_function():
            handler = TABLE.get(func)
            if handler is not None and not (torch.is_grad_enabled() and _any_requires_grad(args)):
                result = handler(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
            if func in PRODUCTS:
                args, kwargs = tree_map_only(FactoredTensor, _read_alone, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # views of these rows are no inference tensors, as they are none
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        handler = TABLE.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _dense_operation(func, args, kwargs or {})


def _read_alone(rows: FactoredTensor) -> Tensor:
    """The rows of a slice for an operation that begins with views of them, as these are views of the whole's memory."""
    is_slice = isinstance(rows._cell, Slice) and not rows.is_dense and not rows.requires_grad
    return rows._rows() if is_slice else rows


def rebuilt(version: int, *saved: Any) -> FactoredTensor:
    """The rows that `__reduce_ex__` has saved; saved files refer to this function by its name."""
    if version > SAVED_VERSION:
        raise complaint(
            "torch.load",
            f"the file holds factored rows in version {version} of the format",
            f"{SAVED_VERSION} at most",
            "Update expanded_nn.",
        )
    shape, row_shape, like, blocks = saved
    guarded = [(size, tuple(Guarded.of(_from_saved(*term)) for term in terms)) for size, terms in blocks]
    return FactoredTensor(Cell(guarded, Kind(tuple(row_shape), like.dtype, like.device)), shape)


torch.serialization.add_safe_globals([rebuilt])


def _to_save(term: Term) -> tuple[Any, ...]:
    """A term as plain data; a factor that is a part of a larger storage is cloned, as a file would hold all of it."""
    if isinstance(term, Elementwise):
        return "Elementwise", list(term.shared), (), term.dtype, 1.0, _to_save(term.unchanged), 0
    shared = term.shared if isinstance(term, Lines) else ()
    own = (factor.detach() for factor in (*term.factors, *shared))
    factors = [f if f.untyped_storage().nbytes() <= f.numel() * f.itemsize else f.clone() for f in own]
    numbers = astuple(term.geometry) if isinstance(term, Patches) else term.numbers if isinstance(term, Parts) else ()
    name = "Dense" if isinstance(term, Differentiable) else type(term).__name__
    return name, factors, tuple(term.row_shape), term.dtype, term.coefficient, numbers, term.of_gradient


def _from_saved(
    name: str,
    factors: list[Tensor],
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    coefficient: float,
    numbers: Any,
    of_gradient: int = 0,  # version 1 has none
) -> Term:
    kind = SAVED_KINDS[name]
    if kind is Elementwise:
        return Elementwise.of(_from_saved(*numbers), *factors)
    if kind is Lines:
        return Lines.of(*factors).scaled(coefficient).to(dtype)
    options = {"geometry": Geometry(*numbers)} if kind is Patches else {}
    term = kind(factors, row_shape, dtype, coefficient, **options)
    term.of_gradient = of_gradient
    return term.numbered(numbers) if isinstance(term, Parts) else term


class _FromFactors(torch.autograd.Function):
    """Rows that are held as their factors; differentiable in those."""

    @staticmethod
    def forward(ctx: Any, term: Callable[..., Term], gradients: Sequence[Gradient], *factors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*factors)
        return FactoredTensor.of(term(*factors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient(grad, *ctx.saved_tensors) if needs else None for gradient, needs in needed)


def from_factors(term: Callable[..., Term], factors: Sequence[Tensor], gradients: Sequence[Gradient]) -> Tensor:
    """The rows of a weight, held as the factors that a layer's backward has.

    Args:
        term: Makes the term of the factors.
        factors: What the rows are made of, each `(B, ...)`.
        gradients: How each factor's gradient is made of that of the rows, `(B, *shape)`, and the factors: by operations
            that have derivatives themselves.
    """
    refuse_batched(factors[0])
    if torch.is_grad_enabled():
        return _FromFactors.apply(term, gradients, *factors)  # type: ignore[no-untyped-call,no-any-return]
    return FactoredTensor.of(term(*factors))


def as_factored(rows: Tensor) -> FactoredTensor:
    """A view of any rows `(B, *shape)` that has the algebra of the factored gradient."""
    return rows if isinstance(rows, FactoredTensor) else FactoredTensor.of(Dense.of(rows))


class _Hidden(Cell):
    """Rows that were held before a step is traced: it may drop them or append to them, but not look at them."""

    def merge(self) -> tuple[Block, ...]:
        raise OnlyEager(
            "it uses per-sample gradients from before the call (clear them, model.zero_grad(); or take what it needs "
            "of them before the call, as a tensor)"
        )


def hidden(rows: Tensor, size: int | None = None) -> FactoredTensor:
    """A stand-in for rows, of the same shape, that cannot be looked at; or for `size` rows of such a shape."""
    kind = Kind(tuple(rows.shape[1:]), rows.dtype, rows.device)
    return FactoredTensor(_Hidden((), kind), (rows.shape[0] if size is None else size, *kind.row_shape))


def is_hidden(rows: object) -> bool:
    """Whether rows are such a stand-in."""
    return isinstance(rows, FactoredTensor) and isinstance(rows._cell, _Hidden)


def refuse_hidden(rows: Iterable[Tensor]) -> None:
    """Gives a trace up that asks for rows from before it: it knows neither them nor how many they are.

    Raises:
        OnlyEager: If any are hidden.
    """
    for parameter_rows in rows:
        if is_hidden(parameter_rows):
            as_factored(parameter_rows).blocks  # noqa: B018 (it raises)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several passes, one after the other, without copying their factors."""
    if any(part.requires_grad for part in parts):
        return torch.cat(list(parts))
    if any(map(is_hidden, parts)):
        return hidden(parts[0], sum(part.shape[0] for part in parts))
    factored = [as_factored(part) for part in parts]
    size = sum(part.shape[0] for part in parts)
    return factored[0]._like([block for part in factored for block in part.blocks], (size, *parts[0].shape[1:]))


def as_real(rows: FactoredTensor) -> FactoredTensor:
    """Complex rows as rows of pairs of real numbers, `(B, *shape, 2)`; others as they are."""
    return as_factored(torch.view_as_real(rows.dense().resolve_conj())) if rows.is_complex() else rows


def materialized(rows: Tensor, memory: Recycled | None = None) -> Tensor:
    """Dense rows; written to `memory` if they are made here and require no gradients."""
    if not isinstance(rows, FactoredTensor):
        return rows
    return rows.dense() if rows.requires_grad else rows._rows(memory)


def times(rows: Tensor, factor: float) -> Tensor:
    """`rows * factor`, without the cost of dispatch for factored rows that require no gradients."""
    if isinstance(rows, FactoredTensor) and not rows.is_dense and not rows.requires_grad:
        return rows._like(scaled_blocks(rows, factor), rows.shape)
    return rows * factor


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _dense_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation, on the dense rows; in-place changes and views are those of the dense rows."""
    wrappers: dict[int, FactoredTensor] = {}
    shares_memory = any(argument.alias_info is not None for argument in func._schema.arguments)

    def unwrap(rows: FactoredTensor) -> Tensor:
        dense = rows.in_memory() if shares_memory else rows._rows()
        wrappers[id(dense)] = rows
        return dense

    if torch.Tag.inplace_view in func.tags:
        raise complaint(
            "grad_sample",
            f"a change of the shape of factored rows in place, by {func.overloadpacket.__name__}",
            "a tensor of another shape beside it",
            "Write rows.unsqueeze(0) in place of rows.unsqueeze_(0), or take rows.dense().",
        )
    written = _written(func, args, kwargs) if shares_memory else []
    args, kwargs = tree_map_only(FactoredTensor, unwrap, (args, kwargs))
    result = func(*args, **kwargs)
    for rows in written:  # below autograd nobody counts that
        torch.autograd.graph.increment_version(rows._cell.densify())
    return tree_map_only(Tensor, lambda out: wrappers.get(id(out), out), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FactoredTensor]:
    """The factored tensors that the operation changes in place."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [values.get(entry.name) for entry in arguments if entry.alias_info and entry.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, FactoredTensor)]
