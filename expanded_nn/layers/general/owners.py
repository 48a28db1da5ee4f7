"""To which sample each number of a tensor belongs, read from the graph that it was computed by.

A forward may fold its samples, `(B, T, d)` to `(B * T, d)`, and take some positions of that, as each expert of a
mixture does. What it did stands in autograd's graph, with the indices by which it took them. So the sample of each is
known, however many there are; but not behind an operation that is not in the table of `operations.py`. Nor does the
graph say where writes into a part of a tensor go, so these are looked at.

Whole numbers, such as the index of a look-up, have no graph. Of a view of an argument their places in memory tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from expanded_nn.common.batch import FOLDED, may_have_derivatives
from expanded_nn.common.containers import tensors_of
from expanded_nn.common.functions import functions
from expanded_nn.common.modes import FunctionMode, unseen, version_of
from expanded_nn.common.traced import beside_trace
from expanded_nn.core import cost
from expanded_nn.layers.general.operations import Known
from expanded_nn.layers.general.samples import NOBODY, Memo, Samples, Unknown, compact, constant, together
from expanded_nn.layers.recurrent.steps import Steps


class _Begin(torch.autograd.Function):
    """An argument of the forward, where its graph begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Owners:
    """The samples of the tensors in one forward of a module.

    In a trace whose batch may have any size they are those of the call that is traced: the operations are the same.
    """

    def __init__(self, batch: int, memo: Memo) -> None:
        self.batch, self.memo = cost.usual_size(batch), memo
        self.has_any_size = cost.is_symbol(batch)
        memo.begin()
        # the arguments that no graph tells of, each with its version and its samples
        self.without_graph: list[tuple[Tensor, int, Tensor]] = []
        self.known = Known(self.batch, memo)
        self.anchor = torch.zeros((), requires_grad=True)

    def begin(self, arguments: Any, dims: Sequence[int | None]) -> Any:
        """The arguments, each where its graph begins; `dims` says which have the samples first, or are folded."""
        leaves, structure = tree_flatten(arguments)
        for place, dim in enumerate(dims):
            leaf = leaves[place]
            if not isinstance(leaf, Tensor):
                continue
            samples = None if dim is None else self._standing_in(leaf, dim)
            if may_have_derivatives(leaf) and (samples is not None or leaf.requires_grad):
                leaves[place] = _Begin.apply(leaf, self.anchor)  # type: ignore[no-untyped-call]
                self.note(leaves[place], samples)
            elif samples is not None:
                self.without_graph.append((leaf, version_of(leaf), samples))
        return tree_unflatten(leaves, structure)

    @beside_trace
    def _standing_in(self, x: Tensor, dim: int) -> Tensor:
        """The samples of a tensor that has them in order in a dimension, or is folded."""
        times = cost.usual_size(x.shape[0]) // self.batch if dim == FOLDED else 1
        return self.memo.of(_in_order, self.batch, times, max(dim, 0), x.dim(), x.device)

    @beside_trace
    def refuse_others_places(self, result: Any, dims: Sequence[int]) -> None:
        """Raises unless the samples stand in `dims` of the tensors that are returned, in order.

        Of a mean or a sum over the samples nothing is asked.
        """
        for x, dim in zip(tensors_of(result), dims, strict=True):
            samples = self.of(x) if dim >= FOLDED else None
            if samples is None or samples is (wanted := self._standing_in(x, dim)):
                continue
            if not bool(((samples == wanted) | (samples == NOBODY)).all()):
                raise Unknown

    def note(self, x: Tensor, samples: Samples) -> None:
        """Notes the samples of a tensor."""
        if x.grad_fn is not None:
            self.known[x.grad_fn, x.output_nr] = samples

    def note_samples_in(self, x: Tensor, dim: int) -> None:
        """Notes that a tensor has the samples in a dimension, in order."""
        self.note(x, self._standing_in(x, dim))

    def note_a_row_each(self, x: Tensor) -> None:
        """Notes that a tensor has one row for each sample, if nothing else is known of it."""
        if x.grad_fn is not None and (x.grad_fn, x.output_nr) not in self.known:
            self.note(x, self._standing_in(x, 0))

    def have_a_row_each(self, x: Tensor) -> bool:
        """Whether a tensor `(B, *)` has the samples first, in order."""
        arrangement = self.of_rows(x)
        return arrangement is not None and arrangement.length == 1

    @beside_trace
    def of(self, x: Tensor) -> Samples:
        """The samples of a tensor; `None` if it requires no gradient, so that they are not known.

        Of whole numbers they are known where these are those of an argument.

        Raises:
            Unknown: If its graph does not tell.
        """
        if x.grad_fn is None:
            if x.requires_grad:
                raise Unknown
            return None if may_have_derivatives(x) else self._of_places(x)
        return self.known[x.grad_fn, x.output_nr]

    def _of_places(self, x: Tensor) -> Samples:
        """The samples of a view of an argument that no graph tells of, by its places in memory."""
        for argument, version, samples in self.without_graph:
            if x is argument:
                return samples
            is_view = x.dtype == argument.dtype and x.untyped_storage()._cdata == argument.untyped_storage()._cdata
            if is_view and x.numel() and version_of(argument) == version:
                start: Any = x.storage_offset() - argument.storage_offset()
                places = argument.shape, argument.stride(), x.shape, x.stride()
                return self.memo.of(_of_view, samples, *map(cost.usual_shape, places), cost.usual_size(start))
        return None

    def of_rows(self, x: Tensor) -> Arrangement | None:
        """How the rows of a tensor `(n, ...)` belong to the samples; `None` if it requires no gradient."""
        samples = self.of(x)
        return None if samples is None else self.arranged(samples, x.shape[0])

    @beside_trace
    def arranged(self, samples: Tensor, count: int) -> Arrangement:
        """The same for so many rows whose samples are known.

        Raises:
            Unknown: If a row is of several samples, or of none.
        """
        arrangement = self.memo.of(_arranged, samples, cost.usual_size(count), self.batch)
        self._refuse_this_size_alone(arrangement, samples, [count])
        return arrangement

    def _refuse_this_size_alone(self, arrangement: Arrangement, samples: Tensor, sizes: Sequence[int]) -> None:
        """Raises where batches of other sizes may be arranged in another way: samples differ where sizes stay."""
        differing = (size for size, count in zip(sizes, samples.shape, strict=False) if count > 1)
        if self.has_any_size and (arrangement.length is None or not all(map(cost.is_symbol, differing))):
            raise Unknown

    @beside_trace
    def one_by_one(self, samples: Tensor, shape: Sequence[int]) -> Arrangement:
        """The same for the numbers of a tensor of such a shape, as if each were a row."""
        arrangement = self.memo.of(_one_by_one, samples, cost.usual_shape(shape), self.batch)
        self._refuse_this_size_alone(arrangement, samples, shape)
        return arrangement

    @beside_trace
    def together(self, operands: Sequence[Tensor], dims: int, along: Sequence[int] = ()) -> Samples:
        """The samples of what is computed number by number from tensors; `along` some dimensions from all numbers."""
        found = (self.of(x) for x in operands)
        return together([x if x is None else constant(x, along) for x in found], dims, self.memo)

    def of_sequences(self, data: Tensor, steps: Steps) -> tuple[Arrangement, Arrangement]:
        """How the steps of packed sequences `(N, features)` belong to the samples, and how the sequences do.

        Raises:
            Unknown: If nothing tells, or a sequence has steps of several samples.
        """
        of_steps = self.of_rows(data)
        if of_steps is None or not torch.equal(of_steps.owner, of_steps.owner[: steps.batch][steps.sequences]):
            raise Unknown
        samples = self.memo.same(of_steps.owner[: steps.batch].unsqueeze(-1))
        return of_steps, self.arranged(cast(Tensor, samples), steps.batch)

    @beside_trace
    def note_like(self, y: Tensor, samples: Tensor, dims: Sequence[int]) -> None:
        """Notes the samples of a tensor, those of another one in a view of such a shape."""
        self.note(y, samples if samples.shape == (*dims,) else self.memo.of(Tensor.reshape, samples, (*dims,)))


def _in_order(batch: int, times: int, dim: int, dims: int, device: torch.device) -> Tensor:
    """The samples of a tensor that has each of them `times` times in dimension `dim`, one after the other."""
    rows = torch.arange(batch, device=device).repeat_interleave(times)
    return rows.view(*[1] * dim, -1, *[1] * (dims - 1 - dim))


def _of_view(
    samples: Tensor,  # of a tensor with such a shape and strides
    shape: Sequence[int],
    strides: Sequence[int],
    shape_of_view: Sequence[int],
    strides_of_view: Sequence[int],
    start: int,
) -> Tensor:
    """The samples of a view that begins `start` places behind the tensor that it is of."""
    extent, samples = _extent(shape, strides), samples.expand(shape)
    if start < 0 or start + _extent(shape_of_view, strides_of_view) > extent:
        raise Unknown
    owner, places = samples.new_full((extent,), NOBODY), torch.arange(extent, device=samples.device)
    shown = places.as_strided(shape, strides)
    owner[shown] = samples
    if not torch.equal(owner[shown], samples):  # several samples share a place
        raise Unknown
    return compact(owner.as_strided(shape_of_view, strides_of_view, start))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many places in memory there are from the first number of a tensor to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _one_by_one(samples: Tensor, shape: Sequence[int], batch: int) -> Arrangement:
    return _arranged(samples.expand(shape).flatten(), prod(shape), batch)


def _arranged(samples: Tensor, count: int, batch: int) -> Arrangement:
    if samples.dim() == 0:
        raise Unknown
    rows = constant(samples, range(1, samples.dim()))
    owner = rows.flatten().expand(count)
    if count and int(owner.min()) == NOBODY:
        raise Unknown
    return Arrangement(owner, batch, rows)


class Arrangement:
    """How n rows belong to B samples.

    Args:
        owner: The sample of each row, `(n,)`.
        batch: B.
        samples: The same with as many dimensions as the tensor has.
    """

    length: int | None  # rows per sample, if all have as many, which stand together and in order

    def __init__(self, owner: Tensor, batch: int, samples: Tensor) -> None:
        self.owner, self.batch, self.samples = owner, batch, samples
        self._slots: tuple[Tensor, int] | None = None
        length, left = divmod(len(owner), batch)
        in_order = torch.arange(batch, device=owner.device).repeat_interleave(length)
        self.length = None if left or not torch.equal(owner, in_order) else length

    def rows_of(
        self,
        values: Tensor,  # (B, *shape)
    ) -> Tensor:  # (n, *shape)
        """Each row's own value."""
        if self.length is None:
            return values.index_select(0, self.owner)
        return values[:, None].expand(-1, self.length, *values.shape[1:]).flatten(0, 1)

    @beside_trace
    def is_like(self, other: Arrangement) -> bool:
        """Whether as many rows belong to the same samples."""
        return torch.equal(self.owner, other.owner)

    def padded(
        self,
        x: Tensor,  # (n, ...)
    ) -> Tensor:  # (B, T, ...)
        """The rows of each sample, and zeros behind them."""
        if self.length:
            return x.reshape(-1, self.length, *x.shape[1:])  # B may be a symbol
        if self.length == 0:
            return x.reshape(self.batch, 0, *x.shape[1:])
        slots, longest = self.slots()
        rows = x.new_zeros(self.batch * longest, *x.shape[1:]).index_copy_(0, slots, x)
        return rows.view(self.batch, longest, *x.shape[1:])

    def unpadded(
        self,
        y: Tensor,  # (B, T, ...)
    ) -> Tensor:  # (n, ...)
        """The rows in their places again."""
        y = y.flatten(0, 1)
        return y if self.length is not None else y.index_select(0, self.slots()[0])

    @beside_trace
    def slots(self) -> tuple[Tensor, int]:
        """The place of each row in a padded tensor `(B * T, *)`, `(n,)`; and T."""
        if self._slots is None:
            is_of = self.owner[:, None] == torch.arange(self.batch, device=self.owner.device)
            counts = is_of.cumsum(0)  # (n, B)
            longest = int(counts[-1].max()) if len(counts) else 0
            place = counts.gather(1, self.owner[:, None]).squeeze(1) - 1
            self._slots = self.owner * longest + place, longest
        return self._slots


class Writes(FunctionMode):
    """Notes whose a tensor's rows are once something was written into a part of each."""

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        if func is torch._pad_packed_sequence and not kwargs:
            return self._padded(*args)
        with unseen():
            written = None if kwargs else self._written(func, *args)
        result = func(*args, **(kwargs or {}))
        if written is not None:
            self.owners.note(*written)
        return result

    def _padded(self, data: Tensor, sizes: Tensor, batch_first: Any, *args: Any) -> Any:
        """Pads packed sequences, which writes the steps into a tensor one by one."""
        result = torch._pad_packed_sequence(data, sizes, batch_first, *args)
        with unseen():
            if self.owners.of(data) is not None:
                _, of_sequences = self.owners.of_sequences(data, Steps.of_packed(PackedSequence(data, sizes)))
                self.owners.note_like(result[0], of_sequences.owner, (-1, 1, 1) if batch_first else (1, -1, 1))
        return result

    def _written(self, func: Any, *args: Any) -> tuple[Tensor, Samples] | None:
        """The tensor that a write changes, and the samples of its rows after it; `None` where they are not known."""
        if func not in _WRITES and func not in _CHANGES:
            return None
        x, *_, value = args if len(args) > 1 else (*args, 0)
        key = args[1] if len(args) == 3 and func not in _CHANGES else None
        is_number = isinstance(value, int | float)  # a numpy float is a float
        if type(x) is not Tensor or not (type(value) is Tensor or is_number) or not takes_view(key):
            return None
        part = x if key is None else x[key]
        base = part._base
        if base is None or not _has_a_part_of_each_row(part, base):
            return None
        before, put = self.owners.of(base), self.owners.of(value) if isinstance(value, Tensor) else None
        if put is not None:
            if value.dim() != part.dim() or value.shape[0] != part.shape[0]:
                return None
            put = _of_each_row(put, base.dim())
            if put is not None and put.numel() == 1 and self.owners.batch > 1:  # what else is there may be of others
                return None
        return base, self.owners.memo.same(together([before, put], base.dim(), self.owners.memo))


def _of_each_row(samples: Samples, dims: int) -> Samples:
    """The samples of rows, with so many dimensions."""
    if samples is None:
        return None
    return constant(samples, range(1, samples.dim())).reshape(-1, *[1] * (dims - 1))


def takes_view(key: Any) -> bool:
    """Whether an index takes a view, by numbers and slices."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in keys)


def _has_a_part_of_each_row(part: Tensor, base: Tensor) -> bool:
    """Whether row i of a view lies in row i of the tensor that it shows, for each i."""
    if part.dim() == 0 or base.dim() == 0 or part.numel() == 0 or part.shape[0] != base.shape[0]:
        return False
    start, length = part.storage_offset() - base.storage_offset(), _extent(base.shape[1:], base.stride()[1:])
    has_rows_apart = len(base) == 1 or length <= base.stride(0) == part.stride(0)
    return has_rows_apart and start + _extent(part.shape[1:], part.stride()[1:]) <= length


_WRITES = {Tensor.__setitem__, Tensor.copy_}
_CHANGES = set(  # number by number, with one other operand at most
    functions(
        *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "neg_", "abs_", "exp_"),
        *("sqrt_", "square_", "sigmoid_", "tanh_", "relu_"),
    )
)
