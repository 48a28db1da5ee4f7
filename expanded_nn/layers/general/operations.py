"""The operations of autograd's graph: whose the numbers of a result are, given whose those of its inputs are.

The table at the end names the operations that have a rule, by their nodes in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.recording.graph import saved_dims, saved_number, turned_dims

Result = TypeVar("Result")
Samples = Tensor | None  # of a tensor: an index of its shape, of size 1 where it is constant; `None` of what has none
NOBODY = -1  # in such an index: what is of no sample


class Unknown(Exception):
    """The samples cannot be told: an operation has no rule, or brings numbers of several samples together."""


class Memo:
    """Remembers what functions of samples have given: layers that are alike ask the same again.

    Tensors count by their identity. It is kept for the next forward, which asks the same unless values lead it
    elsewhere. So nothing of it may be changed in place.
    """

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.known: dict[Any, list[Tensor]] = {}  # by their shapes, the last ones first
        self.numel = 0

    def begin(self) -> None:
        """Forgets all, if that is too much to be kept for another forward."""
        if self.numel > cost.KEPT_SAMPLES:
            self.__init__()  # type: ignore[misc]

    def of(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)`, which is computed once."""
        key = function, args  # a tensor is hashed by its identity
        if key not in self.found:
            self.found[key] = function(*args)
            self.numel += sum(x.numel() for x in args if isinstance(x, Tensor)) + 16
        return cast(Result, self.found[key])

    def same(self, samples: Samples) -> Samples:
        """The tensor with the same numbers as these samples that was asked about before, if there is one."""
        if samples is None:
            return None
        known = self.known.setdefault(samples.shape, [])
        before = next((other for other in known if samples is other or torch.equal(samples, other)), None)
        if before is None:
            self.known[samples.shape] = [samples, *known[:3]]
            self.numel += samples.numel()
        return samples if before is None else before


class Operation:
    """A node of the graph, of whose outputs the samples of one are asked for."""

    def __init__(self, of: Callable[[Any, int], Samples], batch: int, node: Any, number: int, memo: Memo) -> None:
        self._of, self.batch, self.node, self.number, self.memo = of, batch, node, number, memo
        self.inputs = node.next_functions  # the nodes that its inputs come from, and which of their outputs these are

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of that output."""
        return _shape(self.node, self.number)

    def shape_of(self, place: int) -> tuple[int, ...]:
        return _shape(*self.inputs[place])

    def samples_of(self, place: int) -> Samples:
        node, number = self.inputs[place]
        return None if node is None else self._of(node, number)

    def all_samples(self) -> list[Samples]:
        return [self.samples_of(place) for place in range(len(self.inputs))]

    def together(self, found: Sequence[Samples]) -> Samples:
        return together(found, len(self.shape), self.memo)

    def constant(self, samples: Tensor, dims: Sequence[int]) -> Tensor:
        if all(samples.shape[dim] == 1 for dim in dims):
            return samples
        return self.memo.of(constant, samples, tuple(dims))

    def saved(self, name: str) -> Any:
        try:
            return getattr(self.node, f"_saved_{name}")
        except (AttributeError, RuntimeError):  # it has none, or it was changed since
            raise Unknown from None

    def dims(self, rank: int | None = None) -> list[int]:
        """The dimensions that it names, of `rank` or as many as the first input has; all, if it names none."""
        rank = len(self.shape_of(0)) if rank is None else rank
        return saved_dims(self.node, max(1, rank)) or list(range(rank))


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def constant(samples: Tensor, dims: Sequence[int]) -> Tensor:
    """The samples with size 1 in these dimensions, along which they have to be the same."""
    for dim in dims:
        if samples.shape[dim] > 1:
            first = samples.narrow(dim, 0, 1)
            if not bool((samples == first).all()):
                raise Unknown
            samples = first
    return samples


def together(found: Sequence[Samples], dims: int, memo: Memo) -> Samples:
    """The samples of what is computed number by number from several tensors that broadcast."""
    kept: list[Tensor] = []
    for samples in found:
        if samples is not None and not any(samples is other for other in kept):
            kept.append(samples)
    if not kept:
        return None
    total = kept[0] if kept[0].dim() == dims else memo.of(_with_dims, kept[0], dims)
    for samples in kept[1:]:
        total = memo.of(_of_both, total, samples if samples.dim() == dims else memo.of(_with_dims, samples, dims))
    return total


def _of_both(samples: Tensor, other: Tensor) -> Tensor:
    if samples is other:
        return samples
    if not bool(((samples == other) | (samples == NOBODY) | (other == NOBODY)).all()):
        raise Unknown
    if samples.shape == other.shape and torch.equal(samples, other):
        return samples
    return torch.maximum(samples, other)


def _with_dims(samples: Tensor, dims: int) -> Tensor:
    return samples if samples.dim() == dims else samples.view(*[1] * (dims - samples.dim()), *samples.shape)


def reshaped(samples: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """The samples of a tensor that is viewed in another shape; their size stays 1 where they do not differ."""
    if prod(before) == 0:
        raise Unknown
    whole: list[int] = []
    shape: list[int] = []
    for dims, sizes in _runs(before, after):
        differ = any(samples.shape[dim] > 1 for dim in dims)
        whole += [before[dim] if differ else 1 for dim in dims]
        shape += [size if differ else 1 for size in sizes]
    return samples.expand(whole).reshape(shape)


def _runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, Sequence[int]]]:
    """The shortest runs of dimensions that hold as many numbers in both shapes: dimensions of one, sizes of the other.

    From `(B, T, d)` to `(B * T, d)` they are dimensions 0 and 1 with `B * T`, and dimension 2 with `d`.
    """
    place = other_place = 0
    while place < len(before) or other_place < len(after):
        start, other_start, count, other_count = place, other_place, 1, 1
        while (start == place and other_start == other_place) or count != other_count:
            if place < len(before) and count <= other_count:
                count *= before[place]
                place += 1
            else:
                other_count *= after[other_place]
                other_place += 1
        yield range(start, place), after[other_start:other_place]


# Rules: the samples of what an operation gives


def _elementwise(op: Operation) -> Samples:
    return op.samples_of(0) if len(op.inputs) == 1 else op.together(op.all_samples())


def _along(op: Operation) -> Samples:
    """What computes with all numbers along some dimensions: they have to be of one sample."""
    samples = op.samples_of(0)
    if samples is None:
        return None
    dims = op.dims()
    samples = op.constant(samples, dims)
    if samples.dim() == len(op.shape):
        return samples
    if samples.dim() - len(set(dims)) != len(op.shape):
        raise Unknown
    left = tuple(size for dim, size in enumerate(samples.shape) if dim not in dims)
    return op.memo.of(Tensor.reshape, samples, left)


def _of_first(change: Callable[[Operation, Tensor], Tensor]) -> Callable[[Operation], Samples]:
    def rule(op: Operation) -> Samples:
        samples = op.samples_of(0)
        return None if samples is None else change(op, samples)

    return rule


def _viewed(op: Operation, samples: Tensor) -> Tensor:
    return op.memo.of(reshaped, samples, op.shape_of(0), op.shape)


def _turned(op: Operation, samples: Tensor) -> Tensor:
    dims = cast("list[int]", turned_dims(op.node, samples.dim()))
    return op.memo.of(Tensor.permute, samples, tuple(dims))


def _taken(take: Callable[[Operation, Tensor, int], Tensor], *, drops_dim: bool = False) -> Callable[..., Samples]:
    """A rule for what takes places along one dimension; where the samples have size 1, any place will do."""

    def change(op: Operation, samples: Tensor) -> Tensor:
        (dim,) = op.dims()
        if samples.shape[dim] == 1:
            return op.memo.of(Tensor.squeeze, samples, dim) if drops_dim else samples
        return take(op, samples, dim)

    return _of_first(change)


def _by_values(rule: Callable[[Operation], Samples]) -> Callable[[Operation], Samples]:
    """A rule whose samples depend on values: a new tensor each time, but mostly with the same numbers."""
    return lambda op: op.memo.same(rule(op))


def _slice(op: Operation, samples: Tensor, dim: int) -> Tensor:
    bounds = (saved_number(op.saved(name)) for name in ("start", "end", "step"))
    return op.memo.of(_sliced, samples, dim, *bounds)


def _sliced(samples: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    return samples[(*[slice(None)] * dim, slice(start, end, step))]


def _selected(op: Operation, samples: Tensor, dim: int) -> Tensor:
    place = saved_number(op.saved("index"))
    return op.memo.of(Tensor.select, samples, dim, place)


def _part(op: Operation, samples: Tensor, dim: int) -> Tensor:
    sizes = op.saved("split_size") if hasattr(op.node, "_saved_split_size") else tuple(op.saved("split_sizes"))
    return op.memo.of(torch.split, samples, sizes, dim)[op.number]


def _repeat(op: Operation, samples: Tensor) -> Tensor:
    repeats = op.saved("repeats")
    samples = op.memo.of(_with_dims, samples, len(repeats))
    times = (times if size > 1 else 1 for times, size in zip(repeats, samples.shape, strict=True))
    return op.memo.of(Tensor.repeat, samples, tuple(times))


def _whole(samples: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """The samples with the tensor's own size in these dimensions, not 1."""
    return samples.expand([shape[dim] if dim in dims else -1 for dim in range(samples.dim())])


def _flip(op: Operation, samples: Tensor) -> Tensor:
    dims = tuple(op.dims())
    return op.memo.of(torch.flip, op.memo.of(_whole, samples, op.shape_of(0), dims), dims)


def _roll(op: Operation, samples: Tensor) -> Tensor:
    if not op.saved("dims"):
        raise Unknown
    shifts, dims = tuple(map(saved_number, op.saved("shifts"))), tuple(op.dims())
    return op.memo.of(torch.roll, op.memo.of(_whole, samples, op.shape_of(0), dims), shifts, dims)


def _filled_up(op: Operation, samples: Tensor) -> Tensor:
    """The samples of a tensor to which numbers of no sample were added: these count as those beside them."""
    if samples.numel() == 1 and op.batch > 1:
        raise Unknown
    return samples


def _pad(op: Operation, samples: Tensor) -> Tensor:
    pads = [saved_number(number) for number in op.saved("pad")]
    padded = [samples.dim() - 1 - place // 2 for place, number in enumerate(pads) if number]
    return _filled_up(op, op.constant(samples, padded))


def _index(op: Operation, samples: Tensor) -> Tensor:
    keys, dim = op.saved("indices"), 0
    dims: list[int] = []
    for key in keys:
        count = key.dim() if key is not None and key.dtype in (torch.bool, torch.uint8) else 1
        dims += [] if key is None else range(dim, dim + count)
        dim += count
    whole = _whole(samples, op.shape_of(0), dims)
    return whole[tuple(slice(None) if key is None else key for key in keys)]


def _gather(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    before = op.shape_of(0)
    if any(size != op.shape[place] for place, size in enumerate(before) if place != dim):
        raise Unknown
    return op.constant(samples, [dim])


def _index_add(op: Operation) -> Samples:
    """Rows are added to those of the same samples."""
    total, added, (dim,) = op.samples_of(0), op.samples_of(1), op.dims(len(op.shape))
    if added is None:
        return total
    sizes = [op.shape[dim] if place == dim else size for place, size in enumerate(added.shape)]
    index = op.saved("index")
    written = added.new_full(sizes, NOBODY).index_copy(dim, index, _whole(added, op.shape_of(1), [dim]))
    if not bool((written.index_select(dim, index) == added).all()):
        raise Unknown
    return together([total, written], len(op.shape), Memo())


def _scatter(op: Operation) -> Samples:
    """Numbers are put elsewhere along a dimension."""
    total, put, (dim,) = op.samples_of(0), op.samples_of(1), op.dims(len(op.shape))
    if put is not None:
        if any(size != op.shape[place] for place, size in enumerate(op.shape_of(1)) if place != dim):
            raise Unknown
        put = _filled_up(op, op.constant(put, [dim]))
    return op.together([total, put])


def _index_put(op: Operation) -> Samples:
    """Numbers are put into the places that an index names."""
    total, put = op.samples_of(0), op.samples_of(1)
    keys = tuple(slice(None) if key is None else key for key in op.saved("indices"))
    if op.saved("accumulate"):
        raise Unknown
    whole = torch.full(op.shape, NOBODY) if total is None else total.expand(op.shape).clone()
    whole[keys] = NOBODY if put is None else put
    return None if total is None and put is None else _compact(whole)


def _masked_scatter(op: Operation) -> Samples:
    """Numbers are put, one after the other, into the places of a mask."""
    total, put = op.all_samples()
    if put is not None:
        mask = op.saved("mask").expand(op.shape)
        whole = put.expand(op.shape_of(1)).flatten()
        placed = put.new_full(op.shape, NOBODY).masked_scatter_(mask, whole)
        total = together([total, placed], len(op.shape), Memo())
    return None if total is None else _compact(total)


def _compact(samples: Tensor) -> Tensor:
    """The samples with size 1 in the dimensions along which they are constant."""
    for dim in range(samples.dim()):
        first = samples.narrow(dim, 0, 1)
        samples = first if bool((samples == first).all()) else samples
    return samples


def _joined(op: Operation) -> Samples:
    """Tensors one after the other along a dimension; where they are stacked it is new, and of size 1 in each."""
    (dim,) = op.dims(len(op.shape))
    found = [(samples, op.shape_of(n)) for n, samples in enumerate(op.all_samples()) if samples is not None]
    if not found:
        return None
    if len(found[0][1]) < len(op.shape):
        unsqueeze = partial(op.memo.of, Tensor.unsqueeze)
        found = [(unsqueeze(samples, dim), (*shape[:dim], 1, *shape[dim:])) for samples, shape in found]
    first, is_whole = found[0][0], len(found) == len(op.inputs)
    if all(samples.shape[dim] == 1 for samples, _ in found):
        if not is_whole:
            return _filled_up(op, cast(Tensor, op.together([samples for samples, _ in found])))
        if all(samples is first or torch.equal(samples, first) for samples, _ in found):
            return first
    if not is_whole:
        raise Unknown
    parts = [_whole(samples, shape, [dim]) for samples, shape in found]
    sizes = [max(part.shape[place] for part in parts) for place in range(len(op.shape))]
    return torch.cat([part.expand([*sizes[:dim], part.shape[dim], *sizes[dim + 1 :]]) for part in parts], dim)


def _product(op: Operation) -> Samples:
    """Of matrices: the samples are the same along the dimensions that are multiplied and added up."""
    left, right = op.all_samples()[-2:]
    left = None if left is None else op.constant(left, [left.dim() - 1])
    right = None if right is None else op.constant(right, [right.dim() - 2])
    added = [op.samples_of(0)] if len(op.inputs) > 2 else []
    return op.together([left, right, *added])


def _attention(op: Operation) -> Samples:
    if len(op.shape) != 4:
        raise Unknown
    return op.together([None if samples is None else op.constant(samples, [2, 3]) for samples in op.all_samples()])


def _resized(op: Operation, samples: Tensor) -> Tensor:
    """Images `(N, C, ...)`: each is of one sample everywhere."""
    return op.constant(samples, range(2, samples.dim()))


def _normalized(op: Operation, samples: Tensor) -> Tensor:
    count = len(op.saved("normalized_shape"))
    return op.constant(samples, range(samples.dim() - count, samples.dim()))


NODE_RULES: dict[str, Callable[[Operation], Samples]] = {
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
            *("Softmax", "SafeSoftmax", "LogSoftmax", "Cumsum", "Logsumexp", "Topk", "Sort", "Sum", "Mean", "Max"),
            *("Min", "Amax", "Amin", "Var", "Std", "LinalgVectorNorm", "Norm"),
        ],
        _along,
    ),
    **dict.fromkeys(["View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"], _of_first(_viewed)),
    **dict.fromkeys(["Transpose", "T", "Permute"], _of_first(_turned)),
    "Expand": _of_first(lambda op, samples: op.memo.of(_with_dims, samples, len(op.shape))),
    "Slice": _taken(_slice),
    "Select": _taken(_selected, drops_dim=True),
    "Unbind": _taken(lambda op, samples, dim: op.memo.of(Tensor.select, samples, dim, op.number), drops_dim=True),
    **dict.fromkeys(["Split", "SplitWithSizes"], _taken(_part)),
    "Repeat": _of_first(_repeat),
    "Flip": _of_first(_flip),
    "Roll": _of_first(_roll),
    "ConstantPadNd": _of_first(_pad),
    "ViewAsReal": _of_first(lambda op, samples: op.memo.of(Tensor.unsqueeze, samples, -1)),
    "ViewAsComplex": _of_first(
        lambda op, samples: op.memo.of(Tensor.squeeze, op.constant(samples, [samples.dim() - 1]), -1)
    ),
    "Index": _by_values(_of_first(_index)),
    "IndexSelect": _by_values(_taken(lambda op, samples, dim: samples.index_select(dim, op.saved("index")))),
    "Gather": _of_first(_gather),
    "IndexAdd": _index_add,
    "Scatter": _scatter,
    "IndexPut": _by_values(_index_put),
    "MaskedScatter": _by_values(_masked_scatter),
    **dict.fromkeys(["Cat", "Stack"], _by_values(_joined)),
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
