"""What operations do with the places in a tensor: which ones they choose, in which dimensions, and by which index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from expanded_nn.common.batch import tensors as tensors_in
from expanded_nn.common.functions import attributes, functions
from expanded_nn.common.traced import assume, is_traced, wait_for_values
from expanded_nn.recording import callers

TENSORS = (Tensor, FakeTensor)  # not what only looks like a tensor, whose use is noted


class Move(NamedTuple):
    """What an operation does with a tensor's places.

    Attributes:
        rows: The tensor whose rows are taken, or written elsewhere.
        shape: The shape of the tensor in which places are chosen.
        dims: The dimensions in which they are.
        index: Which places: a tensor, the keys of an index, or `None` where the operation itself says it.
    """

    rows: Any
    shape: Sequence[int]
    dims: Sequence[int]
    index: Any = None


class Moved(NamedTuple):
    """An operation that has put samples in another order.

    Attributes:
        operation: Its name.
        stays: A tensor that says whether each sample has stayed in its place; `None` where some certainly have not.
        places: The index that has moved them; `None` if none has.
        line: The file and the number of the user's line, as `line_of_user` says them.
        dim: Where the samples stand now, if another dimension of size B stands where theirs is expected; `None` if the
            samples themselves have taken each other's places.
    """

    operation: str
    stays: Tensor | None
    places: Tensor | None = None
    line: tuple[str, int] = ("", 0)
    dim: int | None = None

    def may_be_assumed_away(self, between: str) -> bool:
        """In a trace, whether the step may go on; it assumes that each sample has stayed in its place."""
        if is_traced() and self.stays is not None:
            assume(self.stays, f"call after call samples take each other's places between {between}")
            return True
        wait_for_values("it puts samples in another order")
        return False

    def in_words(self) -> tuple[str, str, str]:
        """What it has done, what was wanted, and the remedy, where a layer reads the result."""
        source = f"{self.operation}{callers.place(self.line)}"
        if self.dim is not None:
            return (
                f"its input, from {source}, has the samples in dimension {self.dim}, and it reads them in another",
                "the samples in that dimension",
                "Transpose the input. If it has to be as it is, say where the samples stand in what the model is "
                "called with, per_sample(batch_first=True) or per_sample(batch_first=False); or call it with another "
                "number of samples first, so that the sizes tell which they are.",
            )
        return (
            f"in its input samples have taken each other's places ({source}), so that row i of its parameters would "
            "be of another sample than row i of other layers'",
            "sample i in row i of every layer's input",
            "Leave the order as it is: pack_padded_sequence(..., enforce_sorted=False) sorts by itself, and brings "
            "what comes out back in order. Or sort the batch before the model. What compares samples with each other "
            "belongs into the loss.",
        )


def move_of(operation: Any, args: Any, kwargs: Any) -> Move | None:
    """What a call of one of torch's functions does with places; `None` if it leaves them as they are."""
    of_call = MOVES.get(operation)
    if of_call is None:
        return None
    try:
        return of_call(*args, **kwargs)
    except (AttributeError, LookupError, TypeError, ValueError):  # torch says what is wrong with the call
        return None


def dim_of_samples(x: Tensor, shape: Sequence[int], usual: int, batch: int) -> int:
    """Where the samples stand in a tensor of such a shape: where they usually do, or in the first dimension of size B.

    Folded samples, `(B * n, ...)`, stand where they usually do, unless `x` is a view that shows B rows elsewhere.
    """
    first = next((dim for dim, size in enumerate(shape) if size == batch), usual)
    if first == usual or len(shape) <= usual or shape[usual] == batch:
        return usual
    base = x._base
    is_view = base is not None and base.dim() > usual and base.shape[usual] == batch
    if base is not None and is_view and first < x.dim() and x.stride(first) == base.stride(usual):
        return first
    return first if shape[usual] % batch or (len(shape) > 2 and first == 1) else usual


def chosen(index: Any, shape: Sequence[int], dim: int, batch: int) -> tuple[Any, int]:
    """The samples that an index takes, in its order, and among how many places it chooses.

    It chooses among the places in the dimension `dim`, or among all places of a mask. Where each sample has several of
    these, and the index takes B in all, each place stands for its sample. In place of the samples there is
    `NotImplemented` if no tensor chooses in that dimension, or if one takes an element of each sample.
    """
    count = shape[dim]
    if isinstance(index, tuple):
        index, count = masked(index) or (index_of(index, dim, len(shape)), count)
    if isinstance(index, Tensor) and index.shape == (batch,) and count != batch and count % batch == 0:
        index = index // (count // batch)
    return index, count


def index_of(keys: tuple[Any, ...], dim: int, dims: int) -> Any:
    """The integers that an index has for a dimension; `NotImplemented` without any, or if it is by samples in order."""
    integers = {
        key_dim: key
        for key_dim, key in enumerate(keys_by_dim(keys, dims))
        if isinstance(key, Tensor) and key.dim() and key.dtype not in (torch.bool, torch.uint8)
    }
    if len(integers) > 1:  # an element for each sample, as in h[torch.arange(B), lengths - 1]
        vectors = [key for key in integers.values() if key.dim() == 1]
        if any(torch.equal(key, torch.arange(len(key), device=key.device)) for key in vectors if not is_traced()):
            return NotImplemented
    return integers.get(dim, NotImplemented)


def keys_by_dim(index: Any, dims: int) -> list[Any]:
    """What an index says of each of so many dimensions; a mask may be for several."""
    keys = keys_of(index)
    rest, by_dim = dims - sum(map(_length, keys)), list[Any]()
    for key in keys:
        by_dim += [slice(None)] * rest if key is Ellipsis else [key] * _length(key)
    return by_dim + [slice(None)] * (dims - len(by_dim))


def masked(keys: tuple[Any, ...]) -> tuple[Tensor, int] | None:
    """The places `(n,)` that a mask takes, in all its dimensions, and how many these have; `None` without a mask."""
    mask = keys[0] if keys else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() == 0 or is_traced():
        return None
    return mask.flatten().nonzero().flatten(), mask.numel()


def all_stay(index: Tensor, dim: int, dims: int, batch: int) -> Tensor | None:
    """Whether an index for a dimension of a tensor leaves each sample in its place; `None` if it is not for samples."""
    index = index.movedim(dim, 0) if index.dim() == dims else index
    if index.dim() == 0 or index.shape[0] != batch:
        return None
    places = torch.arange(batch, device=index.device).view(-1, *[1] * (index.dim() - 1))
    return (index % batch == places).all()


def moved_by(operation: str, index: Tensor | None, dim: int, dims: int, batch: int) -> Moved | None:
    """How an operation has moved samples; `None` if its index, where it has one, leaves them or is not for samples."""
    stays = None if index is None else all_stay(index, dim, dims, batch)
    if index is not None and (stays is None or (not is_traced() and bool(stays))):
        return None
    return Moved(operation, stays, index)


def is_transposed(index: Tensor, batch: int) -> bool:
    """Whether an index `(B * T,)` of the T positions of each sample puts them as `(T, B)` has them."""
    positions = torch.arange(len(index), device=index.device).view(batch, -1)
    return torch.equal(index, positions.t().flatten())


def dims_after(func: Any, dims: int, args: Any, kwargs: Any) -> list[int] | None:
    """Which of so many dimensions an operation leaves, in their new order; `None` if that is not known."""
    if next(tensors_in((args, kwargs)), None) is not None:
        return None
    sizes = range(1000, 1000 + dims)  # one for each dimension
    try:
        results: Any = tensors_in(func(torch.empty(tuple(sizes), device="meta"), *args, **kwargs))
    except (RuntimeError, TypeError, IndexError):
        return None
    result = next(results, None)
    left = [] if result is None else [size - 1000 for size in result.shape]
    return left if result is not None and len(set(left)) == len(left) and set(left) <= set(range(dims)) else None


def einsum_names(equation: Any, *operands: Any) -> list[str] | None:
    """The names that `torch.einsum` gives to the dimensions of each operand, and last of the result, if it says all."""
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return None
    before, after = equation.replace(" ", "").split("->")
    return [*before.split(","), after]


def _length(key: Any) -> int:
    """How many dimensions a key of an index is for."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    return key.dim() if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) else 1


# Operations, called as torch's are


def _getitem(input: Any, key: Any) -> Move | None:
    keys = tuple(map(as_torch_takes, keys_of(key)))
    if not any(isinstance(key, Tensor) for key in keys):
        return None
    return Move(input, input.shape, range(input.dim()), keys)


def keys_of(key: Any) -> tuple[Any, ...]:
    """The keys of an index; torch takes a list for a tuple where more than numbers are in it."""
    of_tuple = slice, EllipsisType, NoneType, Tensor
    is_tuple = isinstance(key, tuple) or (isinstance(key, list) and any(isinstance(part, of_tuple) for part in key))
    return tuple(key) if is_tuple else (key,)


def as_torch_takes(key: Any) -> Any:
    """A key of an index, be it a list, a range or an array of numpy's."""
    is_sequence = isinstance(key, Sequence) or hasattr(key, "__array__")
    return torch.tensor(key) if is_sequence and not isinstance(key, Tensor) else key


def _setitem(input: Any, key: Any, value: Any) -> Move | None:
    move = _getitem(input, key)
    return None if move is None else move._replace(rows=value)


def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Move:
    keys = tuple(slice(None) if index is None else index for index in indices)
    return Move(values, input.shape, range(input.dim()), keys)


def _flip(input: Any, *dims: Any, **named: Any) -> Move:
    (dims,) = (named["dims"],) if named else dims if len(dims) == 1 else (dims,)
    return Move(input, input.shape, [dims] if isinstance(dims, int) else dims)


def _along(*names: str, dim: Any = -1, rows: str = "input") -> Callable[..., Move]:
    """Of an operation along `dim`, or `dims`: its arguments after the input by name, its usual dimension, its rows."""

    def of_call(*args: Any, **kwargs: Any) -> Move:
        given = {**dict(zip(("input", *names), args, strict=False)), **kwargs}
        index, dims = given.get("index", given.get("indices")), given.get("dims", given.get("dim"))
        dims = dim if dims is None else dims
        return Move(given.get(rows), given["input"].shape, [dims] if isinstance(dims, int) else dims, index)

    return of_call


def _named(of_call: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    return dict.fromkeys(functions(*names), of_call)


MOVES: dict[Any, Callable[..., Move | None]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    **_named(_index_put, "index_put", "index_put_"),
    **_named(_along("dim", "index"), "index_select", "gather"),
    **_named(_along("dim", "index", "source", rows="source"), "index_copy", "index_copy_", "index_add", "index_add_"),
    **_named(_along("dim", "index", "source", rows="source"), "index_reduce", "index_reduce_"),
    **_named(_along("dim", "index", "src", rows="src"), "scatter", "scatter_", "scatter_add", "scatter_add_"),
    **_named(_along("dim", "index", "src", rows="src"), "scatter_reduce", "scatter_reduce_"),
    **_named(_along("indices", "dim", dim=()), "take_along_dim"),
    **_named(_flip, "flip"),
    **_named(_along(dim=0), "flipud", "msort"),
    **_named(_along("shifts", "dims", dim=()), "roll"),
    **_named(_along("k", "dims", dim=(0, 1)), "rot90"),
    **_named(_along("dim"), "sort"),
    **_named(_along("k", "dim"), "topk"),
    **_named(_along("sorted", "return_inverse", "return_counts", "dim", dim=0), "unique"),
}
SCATTERS = {*functions("masked_scatter", "masked_scatter_")}
# what turns dimensions
TURNS = {
    *functions("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint"),
    *attributes("T", "mT", "H", "mH"),
}
# or takes some away, so that samples that were turned may be back in their place
TURNS_BACK = {
    *TURNS,
    Tensor.__getitem__,
    *functions("select", "unbind", "mean", "sum", "amax", "amin", "max", "min", "logsumexp", "prod"),
}
