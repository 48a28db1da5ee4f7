"""Whose is what: the samples that the numbers of a tensor belong to, read from the graph that it was computed by.

A forward may fold its samples into rows, `(B, T, d)` to `(B * T, d)`, and take some of these, as each expert of a
mixture does. What it did stands in autograd's graph, with the indices by which it took them. So the samples of the rows
are known, whatever their number is. Where an operation is not in the table they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, cast

import torch
from torch import Tensor

from expanded_nn.recording.graph import saved_number, turned_dims

Samples = Tensor | None  # of a tensor: an index of its shape, of size 1 where it is constant; `None` of what has none
NOBODY = -1  # in such an index: what is of no sample


class Unknown(Exception):
    """An operation has no rule, or brings numbers of several samples together."""


class _Begin(torch.autograd.Function):
    """An argument of the forward, where its graph begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Owners:
    """The samples of the tensors in one forward.

    Attributes:
        batch: B.
        known: Node and number of an output -> its samples.
        arrangements: Samples, by identity, and number of rows -> how these belong to them.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.known: dict[tuple[Any, int], Samples] = {}
        self.arrangements: dict[tuple[int, int], Arrangement] = {}
        self.kept: list[Tensor] = []  # the samples in it, whose ids are its keys
        self.anchor = torch.zeros((), requires_grad=True)

    def begin(self, x: Tensor, *, by_sample: bool) -> Tensor:
        """An argument: `(B, ...)`, whose first dimension is that of the samples, or one that all of them share."""
        x = _Begin.apply(x, self.anchor)  # type: ignore[no-untyped-call]
        self.note(x, _first(torch.arange(self.batch, device=x.device), x.dim()) if by_sample else None)
        return x

    def note(self, x: Tensor, samples: Samples) -> None:
        """Notes the samples of a tensor."""
        if x.grad_fn is not None:
            self.known[x.grad_fn, x.output_nr] = samples

    def note_rows(self, x: Tensor) -> None:
        """Notes that a tensor has one row for each sample, if nothing else is known of it."""
        if x.grad_fn is not None and (x.grad_fn, x.output_nr) not in self.known:
            self.note(x, _first(torch.arange(self.batch, device=x.device), x.dim()))

    def of(self, x: Tensor) -> Samples:
        """The samples of a tensor; `None` if it requires no gradient, so that they are not known.

        Raises:
            Unknown: If its graph does not tell.
        """
        if x.grad_fn is None:
            if x.requires_grad:
                raise Unknown
            return None
        return self._of(x.grad_fn, x.output_nr)

    def of_rows(self, x: Tensor) -> Arrangement | None:
        """How the rows of a tensor `(n, ...)` belong to the samples; `None` if it requires no gradient."""
        samples = self.of(x)
        return None if samples is None else self.arranged(samples, x.shape[0])

    def arranged(self, samples: Tensor, count: int) -> Arrangement:
        """The same for so many rows whose samples are known.

        Raises:
            Unknown: If a row is of several samples, or of none.
        """
        key = id(samples), count
        if key not in self.arrangements:
            if samples.dim() == 0:
                raise Unknown
            rows = constant(samples, range(1, samples.dim()))
            owner = rows.flatten().expand(count)
            if count and int(owner.min()) == NOBODY:
                raise Unknown
            self.arrangements[key] = Arrangement(owner, self.batch, rows)
            self.kept.append(samples)
        return self.arrangements[key]

    def _of(self, node: Any, number: int) -> Samples:
        key = node, number
        if key not in self.known:
            name = node.name().rstrip("0123456789").removesuffix("Backward")
            rule = RULES.get(name)
            if rule is None:
                raise Unknown(name)
            try:
                self.known[key] = rule(Operation(self, node, number))
            except (TypeError, ValueError, IndexError, RuntimeError):  # it was called in another way than the rule's
                raise Unknown(name) from None
        return self.known[key]


class Arrangement:
    """How n rows belong to B samples.

    Attributes:
        owner: The sample of each row, `(n,)`.
        batch: B.
        samples: The same with as many dimensions as the tensor has.
        length: How many rows there are for each sample, where they are as many and stand together, in order.
    """

    def __init__(self, owner: Tensor, batch: int, samples: Tensor) -> None:
        self.owner, self.batch, self.samples = owner, batch, samples
        self._slots: tuple[Tensor, int] | None = None
        length, left = divmod(len(owner), batch)
        self.length = None if left or not torch.equal(owner, _each(batch, length, owner)) else length

    def rows_of(
        self,
        values: Tensor,  # (B, *shape)
    ) -> Tensor:  # (n, *shape)
        """Each row's own value."""
        return values.index_select(0, self.owner)

    def padded(
        self,
        x: Tensor,  # (n, ...)
    ) -> Tensor:  # (B, T, ...)
        """The rows of each sample, and zeros behind them."""
        if self.length is not None:
            return x.reshape(self.batch, self.length, *x.shape[1:])
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

    def slots(self) -> tuple[Tensor, int]:
        """Where each row stands among those of all samples, `(n,)`, and how many places there are for a sample."""
        if self._slots is None:
            is_of = self.owner[:, None] == torch.arange(self.batch, device=self.owner.device)
            counts = is_of.cumsum(0)  # (n, B)
            longest = int(counts[-1].max()) if len(counts) else 0
            place = counts.gather(1, self.owner[:, None]).squeeze(1) - 1
            self._slots = self.owner * longest + place, longest
        return self._slots


class Operation:
    """A node of the graph.

    Attributes:
        owners: What is known.
        node: The node.
        number: Which of its outputs is looked at.
        inputs: The nodes that its inputs come from, and which of their outputs these are.
    """

    def __init__(self, owners: Owners, node: Any, number: int) -> None:
        self.owners, self.node, self.number = owners, node, number
        self.inputs = node.next_functions

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of that output."""
        return _shape(self.node, self.number)

    def shape_of(self, place: int) -> tuple[int, ...]:
        return _shape(*self.inputs[place])

    def samples_of(self, place: int) -> Samples:
        node, number = self.inputs[place]
        return None if node is None else self.owners._of(node, number)

    def all_samples(self) -> list[Samples]:
        return [self.samples_of(place) for place in range(len(self.inputs))]

    def saved(self, name: str) -> Any:
        try:
            return getattr(self.node, f"_saved_{name}")
        except (AttributeError, RuntimeError):  # it has none, or it was changed since
            raise Unknown from None

    def dims(self, name: str = "dim", rank: int | None = None) -> list[int]:
        """Dimensions of the first input; all, if none are named."""
        rank = len(self.shape_of(0)) if rank is None else rank
        given = self.saved(name)
        given = given if isinstance(given, tuple | list) else [given]
        return [saved_number(dim) % max(1, rank) for dim in given] or list(range(rank))


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def _each(batch: int, length: int, like: Tensor) -> Tensor:
    """The samples of as many rows of each, in order."""
    return torch.arange(batch, device=like.device).repeat_interleave(length)


def _first(samples: Tensor, dims: int) -> Tensor:
    return samples.view(-1, *[1] * (dims - 1))


def constant(samples: Tensor, dims: Sequence[int]) -> Tensor:
    """The samples with size 1 in some dimensions, along which they have to be the same."""
    for dim in dims:
        if samples.shape[dim] > 1:
            first = samples.narrow(dim, 0, 1)
            if not bool((samples == first).all()):
                raise Unknown
            samples = first
    return samples


def together(found: Sequence[Samples], dims: int) -> Samples:
    """The samples of numbers of one sample each, that come together where they meet by broadcasting."""
    kept: list[Tensor] = []
    for samples in found:
        if samples is not None and not any(samples is other for other in kept):
            kept.append(samples)
    if not kept:
        return None
    total = _with_dims(kept[0], dims)
    for samples in kept[1:]:
        other = _with_dims(samples, dims)
        if not bool(((total == other) | (total == NOBODY) | (other == NOBODY)).all()):
            raise Unknown
        if total.shape != other.shape or not torch.equal(total, other):
            total = torch.maximum(total, other)
    return total


def _with_dims(samples: Tensor, dims: int) -> Tensor:
    return samples if samples.dim() == dims else samples.view(*[1] * (dims - samples.dim()), *samples.shape)


def reshaped(samples: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """The samples of a tensor of another shape; only where they differ their shape becomes a whole one."""
    if prod(before) == 0:
        raise Unknown
    ends_before, ends_after = (list(accumulate(shape, mul)) for shape in (before, after))
    cuts = sorted(set(ends_before) & set(ends_after))
    sizes: list[int] = []
    parts: list[int] = []
    start_before = start_after = 0
    for cut in cuts:
        # with all dimensions of size 1 that follow
        stop_before = max(place for place, end in enumerate(ends_before) if end == cut) + 1
        stop_after = max(place for place, end in enumerate(ends_after) if end == cut) + 1
        group = range(start_before, stop_before)
        if any(samples.shape[dim] > 1 for dim in group):
            parts += [before[dim] for dim in group]
            sizes += after[start_after:stop_after]
        else:
            parts += [1 for _ in group]
            sizes += [1] * (stop_after - start_after)
        start_before, start_after = stop_before, stop_after
    parts += [1] * (len(before) - start_before)
    sizes += [1] * (len(after) - start_after)
    return samples.expand(parts).reshape(sizes)


# Rules: the samples of what an operation gives


def _elementwise(op: Operation) -> Samples:
    return op.samples_of(0) if len(op.inputs) == 1 else together(op.all_samples(), len(op.shape))


def _along(op: Operation) -> Samples:
    """What brings together all numbers along some dimensions."""
    samples = op.samples_of(0)
    if samples is None:
        return None
    dims = op.dims()
    samples = constant(samples, dims)
    if samples.dim() == len(op.shape):
        return samples
    if samples.dim() - len(set(dims)) != len(op.shape):
        raise Unknown
    return samples.reshape([size for dim, size in enumerate(samples.shape) if dim not in dims])


def _view(op: Operation) -> Samples:
    samples = op.samples_of(0)
    return None if samples is None else reshaped(samples, op.shape_of(0), op.shape)


def _of_first(change: Callable[[Operation, Tensor], Tensor]) -> Callable[[Operation], Samples]:
    def rule(op: Operation) -> Samples:
        samples = op.samples_of(0)
        return None if samples is None else change(op, samples)

    return rule


def _turned(op: Operation, samples: Tensor) -> Tensor:
    return samples.permute(cast("list[int]", turned_dims(op.node, samples.dim())))


def _slice(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    if samples.shape[dim] == 1:
        return samples
    start, end, step = (saved_number(op.saved(name)) for name in ("start", "end", "step"))
    return samples[(*[slice(None)] * dim, slice(start, end, step))]


def _select(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples.select(dim, 0 if samples.shape[dim] == 1 else saved_number(op.saved("index")))


def _unbind(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples.select(dim, 0 if samples.shape[dim] == 1 else op.number)


def _split(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples if samples.shape[dim] == 1 else samples.split(op.saved("split_size"), dim)[op.number]


def _split_with_sizes(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples if samples.shape[dim] == 1 else samples.split(list(op.saved("split_sizes")), dim)[op.number]


def _repeat(op: Operation, samples: Tensor) -> Tensor:
    repeats = op.saved("repeats")
    samples = _with_dims(samples, len(repeats))
    return samples.repeat([times if size > 1 else 1 for times, size in zip(repeats, samples.shape, strict=True)])


def _whole(samples: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Of full size in some dimensions."""
    return samples.expand([shape[dim] if dim in dims else -1 for dim in range(samples.dim())])


def _flip(op: Operation, samples: Tensor) -> Tensor:
    dims = op.dims("dims")
    return _whole(samples, op.shape_of(0), dims).flip(dims)


def _roll(op: Operation, samples: Tensor) -> Tensor:
    if not op.saved("dims"):
        raise Unknown
    dims = op.dims("dims")
    return torch.roll(
        _whole(samples, op.shape_of(0), dims), [saved_number(shift) for shift in op.saved("shifts")], dims
    )


def _filled_up(op: Operation, samples: Tensor) -> Tensor:
    """The samples of a tensor whose other numbers are of none: these count as those beside them."""
    if samples.numel() == 1 and op.owners.batch > 1:
        raise Unknown
    return samples


def _pad(op: Operation, samples: Tensor) -> Tensor:
    pads = [saved_number(number) for number in op.saved("pad")]
    padded = [samples.dim() - 1 - place // 2 for place, number in enumerate(pads) if number]
    return _filled_up(op, constant(samples, padded))


def _index(op: Operation, samples: Tensor) -> Tensor:
    keys, dim = op.saved("indices"), 0
    dims: list[int] = []
    for key in keys:
        count = key.dim() if key is not None and key.dtype in (torch.bool, torch.uint8) else 1
        dims += [] if key is None else range(dim, dim + count)
        dim += count
    whole = _whole(samples, op.shape_of(0), dims)
    return whole[tuple(slice(None) if key is None else key for key in keys)]


def _index_select(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples if samples.shape[dim] == 1 else samples.index_select(dim, op.saved("index"))


def _gather(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    before = op.shape_of(0)
    if any(size != op.shape[place] for place, size in enumerate(before) if place != dim):
        raise Unknown
    return constant(samples, [dim])


def _index_add(op: Operation) -> Samples:
    """Rows are added to those of the same samples."""
    total, added, (dim,) = op.samples_of(0), op.samples_of(1), op.dims("dim", len(op.shape))
    if added is None:
        return total
    sizes = [op.shape[dim] if place == dim else size for place, size in enumerate(added.shape)]
    index = op.saved("index")
    written = added.new_full(sizes, NOBODY).index_copy(dim, index, _whole(added, op.shape_of(1), [dim]))
    if not bool((written.index_select(dim, index) == added).all()):
        raise Unknown
    return together([total, written], len(op.shape))


def _scatter(op: Operation) -> Samples:
    """Numbers are put elsewhere along a dimension."""
    total, put, (dim,) = op.samples_of(0), op.samples_of(1), op.dims("dim", len(op.shape))
    if put is not None:
        if any(size != op.shape[place] for place, size in enumerate(op.shape_of(1)) if place != dim):
            raise Unknown
        put = _filled_up(op, constant(put, [dim]))
    return together([total, put], len(op.shape))


def _joined(op: Operation) -> Samples:
    found = op.all_samples()
    (dim,) = op.dims("dim", len(op.shape))
    there = [samples for samples in found if samples is not None]
    if not there:
        return None
    if all(samples.shape[dim] == 1 for samples in there):
        if len(there) < len(found):
            return _filled_up(op, cast(Tensor, together(there, len(op.shape))))
        if _are_equal(there):
            return there[0]
    return _cat(op, found, dim)


def _are_equal(there: Sequence[Tensor]) -> bool:
    return all(samples is there[0] or torch.equal(samples, there[0]) for samples in there)


def _cat(op: Operation, found: Sequence[Samples], dim: int) -> Tensor:
    parts = [_whole(samples, op.shape_of(place), [dim]) for place, samples in enumerate(found) if samples is not None]
    if len(parts) < len(found):
        raise Unknown
    sizes = [max(part.shape[place] for part in parts) for place in range(len(op.shape))]
    return torch.cat([part.expand([*sizes[:dim], part.shape[dim], *sizes[dim + 1 :]]) for part in parts], dim)


def _stack(op: Operation) -> Samples:
    found = op.all_samples()
    there = [samples for samples in found if samples is not None]
    if not there:
        return None
    if len(there) < len(found) or not _are_equal(there):
        raise Unknown
    return there[0].unsqueeze(saved_number(op.saved("dim")) % len(op.shape))


def _product(op: Operation) -> Samples:
    """Of matrices: what is multiplied is added up along the last dimension of one and the last but one of the other."""
    left, right = op.all_samples()[-2:]
    left = None if left is None else constant(left, [left.dim() - 1])
    right = None if right is None else constant(right, [right.dim() - 2])
    added = [op.samples_of(0)] if len(op.inputs) > 2 else []
    return together([left, right, *added], len(op.shape))


def _attention(op: Operation) -> Samples:
    found = [None if samples is None else constant(samples, [2, 3]) for samples in op.all_samples()]
    return together(found, len(op.shape)) if len(op.shape) == 4 else _unknown(op)


def _resized(op: Operation, samples: Tensor) -> Tensor:
    """Images `(N, C, ...)`, whose places come together."""
    return constant(samples, range(2, samples.dim()))


def _normalized(op: Operation, samples: Tensor) -> Tensor:
    count = len(op.saved("normalized_shape"))
    return constant(samples, range(samples.dim() - count, samples.dim()))


def _unknown(op: Operation) -> Samples:
    raise Unknown


RULES: dict[str, Callable[[Operation], Samples]] = {
    **dict.fromkeys(
        [
            *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Pow", "Abs"),
            *("Reciprocal", "Sin", "Cos", "Tanh", "Sigmoid", "LogSigmoid", "Relu", "Silu", "Gelu", "Softplus", "Elu"),
            *("Mish", "LeakyRelu", "Hardtanh", "Hardswish", "Hardsigmoid", "Threshold", "Clamp", "ClampMin"),
            *("ClampMax", "Erf", "Maximum", "Minimum", "Where", "MaskedFill", "Addcmul", "Lerp", "NativeDropout"),
            *("Clone", "ToCopy", "Alias", "ViewAs"),
        ],
        _elementwise,
    ),
    **dict.fromkeys(
        [
            *("Softmax", "LogSoftmax", "Cumsum", "Logsumexp", "Topk", "Sort", "Sum", "Mean", "Max", "Min", "Amax"),
            *("Amin", "Var", "Std", "LinalgVectorNorm", "Norm"),
        ],
        _along,
    ),
    **dict.fromkeys(["View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"], _view),
    **dict.fromkeys(["Transpose", "T", "Permute"], _of_first(_turned)),
    "Expand": _of_first(lambda op, samples: _with_dims(samples, len(op.shape))),
    "Slice": _of_first(_slice),
    "Select": _of_first(_select),
    "Unbind": _of_first(_unbind),
    "Split": _of_first(_split),
    "SplitWithSizes": _of_first(_split_with_sizes),
    "Repeat": _of_first(_repeat),
    "Flip": _of_first(_flip),
    "Roll": _of_first(_roll),
    "ConstantPadNd": _of_first(_pad),
    "ViewAsReal": _of_first(lambda op, samples: samples.unsqueeze(-1)),
    "ViewAsComplex": _of_first(lambda op, samples: constant(samples, [samples.dim() - 1]).squeeze(-1)),
    "Index": _of_first(_index),
    "IndexSelect": _of_first(_index_select),
    "Gather": _of_first(_gather),
    "IndexAdd": _index_add,
    "Scatter": _scatter,
    "Cat": _joined,
    "Stack": _stack,
    **dict.fromkeys(["Mm", "Bmm", "Addmm", "Baddbmm"], _product),
    **dict.fromkeys(
        [f"ScaledDotProduct{kind}Attention" for kind in ("Flash", "Efficient", "Fused")]
        + ["ScaledDotProductFlashAttentionForCpu"],
        _attention,
    ),
    **dict.fromkeys(
        [
            *("UpsampleNearest2D", "UpsampleBilinear2D", "UpsampleBicubic2D", "AvgPool2D", "MaxPool2DWithIndices"),
            "AdaptiveAvgPool2D",
        ],
        _of_first(_resized),
    ),
    "NativeLayerNorm": _of_first(_normalized),
}
