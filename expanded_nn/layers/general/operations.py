"""The operations of autograd's graph: whose the numbers of a result are, given whose those of its inputs are.

The table at the end names the operations that have a rule, by their nodes in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from expanded_nn.common.traced import is_traced
from expanded_nn.core import cost
from expanded_nn.layers.general.samples import (
    NOBODY,
    Memo,
    Samples,
    Unknown,
    compact,
    constant,
    reshaped,
    together,
    with_dims,
)
from expanded_nn.recording.graph import (
    ELEMENTWISE,
    PARTS,
    operation_of,
    part_taken,
    saved_dims,
    saved_keys,
    saved_number,
    shape_of,
    turned_dims,
)
from expanded_nn.recording.places import keys_by_dim

Output = tuple[Any, int]  # a tensor, by the node that made it, and which of its outputs it is


class Operation:
    """A node of the graph, of whose outputs the samples of one are asked for. Hundreds are made in a forward."""

    __slots__ = ("batch", "inputs", "known", "memo", "node", "number")

    def __init__(self, known: Known, output: Output) -> None:
        self.known, self.batch = known, known.batch
        self.memo: Memo = known.memo
        self.node, self.number = output
        self.inputs = self.node.next_functions  # the nodes that its inputs come from, and which of their outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of that output."""
        return cost.usual_shape(shape_of(self.node, self.number))

    def shape_of(self, place: int) -> tuple[int, ...]:
        return cost.usual_shape(shape_of(*self.inputs[place]))

    def samples_of(self, place: int) -> Samples:
        return self.known[self.inputs[place]]

    def all_samples(self) -> list[Samples]:
        return [self.known[output] for output in self.inputs]

    def together(self, found: Sequence[Samples]) -> Samples:
        first = found[0]
        if first is not None and all(samples is first for samples in found):  # they have as many dimensions
            return first
        return together(found, len(self.shape), self.memo)

    def constant(self, samples: Tensor, dims: Sequence[int]) -> Tensor:
        differ = any(samples.shape[dim] > 1 for dim in dims)
        return self.memo.of(constant, samples, tuple(dims)) if differ else samples

    def saved(self, name: str) -> Any:
        found = getattr(self.node, f"_saved_{name}")
        self.refuse_values(found)
        return cost.usual_shape(found) if isinstance(found, list | tuple) else cost.usual_size(found)

    def keys(self) -> tuple[Any, ...]:
        """The keys of an index."""
        keys = saved_keys(self.node)
        self.refuse_values(*keys)
        return keys

    def refuse_values(self, *found: Any) -> None:
        """Raises in a trace where the samples depend on values, as these may be others when the graph runs."""
        if is_traced() and any(isinstance(value, Tensor) for value in found):
            raise Unknown

    def dims(self, rank: int | None = None) -> list[int]:
        """The dimensions that it names, of `rank` or as many as the first input has; all, if it names none."""
        rank = len(self.shape_of(0)) if rank is None else rank
        return saved_dims(self.node, max(1, rank)) or list(range(rank))


# Rules: the samples of what an operation gives

Rule = Callable[[Operation], Samples]


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


def _of_first(change: Callable[[Operation, Tensor], Tensor]) -> Rule:
    def rule(op: Operation) -> Samples:
        samples = op.samples_of(0)
        return None if samples is None else change(op, samples)

    return rule


def _viewed(op: Operation, samples: Tensor) -> Tensor:
    return op.memo.of(reshaped, samples, op.shape_of(0), op.shape)


def _turned(op: Operation, samples: Tensor) -> Tensor:
    dims = cast("list[int]", turned_dims(op.node, samples.dim()))
    return op.memo.of(Tensor.permute, samples, tuple(dims))


def _part(op: Operation, samples: Tensor) -> Tensor:
    """A part along one dimension; where the samples have size 1, any will do."""
    (dim,), part = op.dims(samples.dim()), part_taken(op.node, op.number)
    part = cost.usual_shape(part) if isinstance(part, tuple) else cost.usual_size(part)
    if samples.shape[dim] > 1:
        return op.memo.of(_taken, samples, dim, part)
    return op.memo.of(Tensor.squeeze, samples, dim) if isinstance(part, int) else samples


def _taken(samples: Tensor, dim: int, part: tuple[int, ...] | int) -> Tensor:
    return samples[(*[slice(None)] * dim, part if isinstance(part, int) else slice(*part))]


def _by_values(rule: Rule) -> Rule:
    """A rule whose samples depend on values: a new tensor each time, but mostly with the same numbers."""
    return lambda op: op.memo.same(rule(op))


def _repeat(op: Operation, samples: Tensor) -> Tensor:
    return op.memo.of(_repeated, samples, op.saved("repeats"))


def _repeated(samples: Tensor, repeats: tuple[int, ...]) -> Tensor:
    samples = with_dims(samples, len(repeats))
    return samples.repeat([times if size > 1 else 1 for times, size in zip(repeats, samples.shape, strict=True)])


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


def _windows(op: Operation, samples: Tensor) -> Tensor:
    (dim,), size, step = op.dims(), op.saved("size"), op.saved("step")
    return op.memo.of(_unfolded, samples, dim, size, step)


def _unfolded(samples: Tensor, dim: int, size: int, step: int) -> Tensor:
    return samples.unsqueeze(-1) if samples.shape[dim] == 1 else samples.unfold(dim, size, step)


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
    keys = op.keys()
    dims = [dim for dim, key in enumerate(keys_by_dim(keys, samples.dim())) if isinstance(key, Tensor)]
    return _whole(samples, op.shape_of(0), dims)[keys]


def _index_selected(op: Operation, samples: Tensor) -> Tensor:
    (dim,) = op.dims()
    return samples if samples.shape[dim] == 1 else samples.index_select(dim, op.saved("index"))


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
    if op.saved("accumulate"):
        raise Unknown
    if total is None:
        if put is None:
            return None
        total = put.new_full((), NOBODY)
    whole = total.expand(op.shape).clone()
    whole[op.keys()] = NOBODY if put is None else put
    return compact(whole)


def _masked_scatter(op: Operation) -> Samples:
    """Numbers are put, one after the other, into the places of a mask."""
    total, put = op.all_samples()
    if put is not None:
        mask = op.saved("mask").expand(op.shape)
        whole = put.expand(op.shape_of(1)).flatten()
        placed = put.new_full(op.shape, NOBODY).masked_scatter_(mask, whole)
        total = together([total, placed], len(op.shape), Memo())
    return None if total is None else compact(total)


def _joined(op: Operation) -> Samples:
    """Tensors one after the other along a dimension."""
    found, (dim,) = op.all_samples(), op.dims(len(op.shape))
    return _one_after_the_other(op, found, dim, lambda place: op.shape_of(place)[dim])


def _stack(op: Operation) -> Samples:
    """The same along a new dimension, of size 1 in each."""
    (dim,) = op.dims(len(op.shape))
    found = [x if x is None else op.memo.of(Tensor.unsqueeze, x, dim) for x in op.all_samples()]
    return _one_after_the_other(op, found, dim, lambda place: 1)


def _one_after_the_other(op: Operation, found: list[Samples], dim: int, size_of: Callable[[int], int]) -> Samples:
    there = [samples for samples in found if samples is not None]
    if not there:
        return None
    if len(there) < len(found):
        return _filled_up(op, cast(Tensor, op.together([op.constant(samples, [dim]) for samples in there])))
    if all(samples.shape[dim] == 1 and (samples is there[0] or torch.equal(samples, there[0])) for samples in there):
        return there[0]
    sizes = (size_of(place) if samples.shape[dim] == 1 else -1 for place, samples in enumerate(there))
    return op.memo.of(_cat, tuple(there), tuple(sizes), dim)


def _cat(parts: Sequence[Tensor], sizes: Sequence[int], dim: int) -> Tensor:
    """The samples along a dimension in which these stand one after the other; of -1 they have the tensor's own size."""
    whole = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    return torch.cat(
        [part.expand([*whole[:dim], size, *whole[dim + 1 :]]) for part, size in zip(parts, sizes, strict=True)], dim
    )


def _packed(op: Operation, samples: Tensor) -> Tensor:
    """The steps of sequences, one after the other: at each step those sequences that have it."""
    dim = 0 if op.saved("batch_first") else 1
    owner = _whole(op.constant(samples, [1 - dim, 2]), op.shape_of(0), [dim]).flatten()
    return torch.cat([owner[:size] for size in op.saved("result1").tolist()]).unsqueeze(-1)


def _product(op: Operation) -> Samples:
    """Of matrices: the samples are the same along the dimensions that are multiplied and added up."""
    left, right = op.all_samples()[-2:]
    left = None if left is None else op.constant(left, [left.dim() - 1])
    right = None if right is None else op.constant(right, [right.dim() - 2])
    added = [op.samples_of(0)] if len(op.inputs) > 2 else []
    return op.together([left, right, *added])


def _solved(op: Operation) -> Samples:
    """Of systems of equations: each is of one sample, as its right side is."""
    return op.together([x if x is None else op.constant(x, [x.dim() - 2, x.dim() - 1]) for x in op.all_samples()])


def _attention(op: Operation) -> Samples:
    """Of one sample's positions among each other; of all samples' in one row where a mask keeps them apart."""
    found = op.all_samples()
    if any(samples is not None and samples.dim() != 4 for samples in found):
        raise Unknown
    queries, keys, *rest = (samples if samples is None else op.constant(samples, [3]) for samples in found)
    keys = together([keys, *rest], 4, op.memo)
    if keys is None:
        return queries
    if queries is not None and queries.shape[2] > 1:
        mask = getattr(op.node, "_saved_attn_mask", None)
        mask = getattr(op.node, "_saved_attn_bias", None) if mask is None else mask
        op.refuse_values(mask)
        if mask is not None and _keeps_apart(mask, queries, keys):
            return queries
    if queries is keys:
        return op.constant(keys, [2])
    return op.together([x if x is None else op.constant(x, [2]) for x in (queries, keys)])


def _keeps_apart(mask: Tensor, queries: Tensor, keys: Tensor) -> bool:
    """Whether a mask `(..., N, M)` leaves nothing of another sample's positions to those of a sample.

    What it subtracts there has to be more than any product can be; so it has to leave something of its own to each.
    """
    keys, mask = keys.mT, mask.float()
    is_hidden = mask.amax(-1, keepdim=True) - mask >= 1e30
    return bool((is_hidden | (queries == keys) | (keys == NOBODY)).all())


def _columns(op: Operation, samples: Tensor) -> Tensor:
    """The windows `(N, C * k, windows)` of images `(N, C, H, W)`, each of one sample."""
    return op.memo.of(Tensor.squeeze, op.constant(samples, range(1, 4)), 3)


def _from_columns(op: Operation, samples: Tensor) -> Tensor:
    """Images made of such windows; of a single one, whose windows have no first dimension, all are of one sample."""
    first = samples.dim() - 2
    return op.memo.of(Tensor.unsqueeze, op.constant(samples, range(first, samples.dim())), -1)


def _padded_by_itself(op: Operation, samples: Tensor) -> Tensor:
    """Numbers repeated behind the ends of the last dimensions, along which all are of one sample."""
    return op.constant(samples, range(samples.dim() - len(op.saved("padding")) // 2, samples.dim()))


def _strided(op: Operation, samples: Tensor) -> Tensor:
    """A view by strides, as the windows of a spectrogram: row i of it lies in row i of what has no gaps in memory."""
    before, size, stride = op.shape_of(0), op.saved("size"), op.saved("stride")
    length = prod(before[1:])
    extent = 1 + sum((count - 1) * step for count, step in zip(size[1:], stride[1:], strict=True))
    if not before or not size or size[0] != before[0] or extent > length or (size[0] > 1 and stride[0] != length):
        raise Unknown
    return op.memo.of(Tensor.reshape, op.constant(samples, range(1, len(before))), (-1, *[1] * (len(size) - 1)))


def _resized(op: Operation, samples: Tensor) -> Tensor:
    """Images `(N, C, ...)`: each is of one sample everywhere."""
    return op.constant(samples, range(2, samples.dim()))


def _normalized(op: Operation, samples: Tensor) -> Tensor:
    count = len(op.saved("normalized_shape"))
    return op.constant(samples, range(samples.dim() - count, samples.dim()))


NODE_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        [
            *("Softmax", "SafeSoftmax", "LogSoftmax", "Cumsum", "Logsumexp", "Topk", "Sort", "Sum", "Mean", "Max"),
            *("Min", "Amax", "Amin", "Var", "Std", "LinalgVectorNorm", "Norm", "Cumprod", "Cummax", "Prod", "Glu"),
            *("FftR2C", "FftC2R", "FftC2C"),
        ],
        _along,
    ),
    **dict.fromkeys(["View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"], _of_first(_viewed)),
    **dict.fromkeys(["T", "Permute", "Transpose"], _of_first(_turned)),
    "Expand": _of_first(lambda op, samples: op.memo.of(with_dims, samples, len(op.shape))),
    **dict.fromkeys(PARTS, _of_first(_part)),
    "Repeat": _of_first(_repeat),
    "Flip": _of_first(_flip),
    "Roll": _of_first(_roll),
    "ConstantPadNd": _of_first(_pad),
    "Unfold": _of_first(_windows),
    "ViewAsReal": _of_first(lambda op, samples: op.memo.of(Tensor.unsqueeze, samples, -1)),
    "ViewAsComplex": _of_first(
        lambda op, samples: op.memo.of(Tensor.squeeze, op.constant(samples, [samples.dim() - 1]), -1)
    ),
    "Index": _by_values(_of_first(_index)),
    "IndexSelect": _by_values(_of_first(_index_selected)),
    "PackPaddedSequence": _by_values(_of_first(_packed)),
    "Gather": _of_first(_gather),
    "IndexAdd": _index_add,
    "Scatter": _scatter,
    "IndexPut": _by_values(_index_put),
    "MaskedScatter": _by_values(_masked_scatter),
    "Cat": _joined,
    "Stack": _stack,
    **dict.fromkeys(["Mm", "Bmm", "Addmm", "Baddbmm"], _product),
    **dict.fromkeys(
        [
            f"ScaledDotProduct{kind}"
            for kind in (
                *("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention"),
                "FusedAttentionOverrideable",
            )
        ],
        _attention,
    ),
    **dict.fromkeys(
        [
            *("UpsampleNearest2D", "UpsampleBilinear2D", "UpsampleBicubic2D", "AvgPool2D", "MaxPool2DWithIndices"),
            "AdaptiveAvgPool2D",
        ],
        _of_first(_resized),
    ),
    **dict.fromkeys(["NativeLayerNorm", "FusedRmsNorm"], _of_first(_normalized)),  # the latter on GPUs alone
    "Im2Col": _of_first(_columns),
    "Col2Im": _of_first(_from_columns),
    "AsStrided": _of_first(_strided),
    **dict.fromkeys(
        [f"{kind}Pad{dims}D" for kind in ("Reflection", "Replication") for dims in (1, 2, 3)],
        _of_first(_padded_by_itself),
    ),
    "LinalgSolveTriangular": _solved,
}


def _rule_of_derivative(operation: str) -> Rule | None:
    """The rule for a derivative that the forward takes itself, as `"TanhBackward"`: that of the operation."""
    first, is_derivative, _ = operation.partition("Backward")
    return _elementwise if is_derivative and NODE_RULES.get(first) is _elementwise else None


class Known(dict[Output, Samples]):
    """The samples of the tensors in one forward: those that were noted, and what the graph tells where it is asked.

    Raises:
        Unknown: At a tensor of which it does not tell.
    """

    def __init__(self, batch: int, memo: Memo) -> None:
        super().__init__({(None, 0): None})  # what has no node requires no gradient
        self.batch, self.memo = batch, memo

    def __missing__(self, output: Output) -> Samples:
        node, _ = output
        operation = operation_of(node)
        rule = NODE_RULES.get(operation) or _rule_of_derivative(operation)
        if rule is None:
            self.memo.follows_writes |= node.name().endswith("CopySlices")
            raise Unknown(node.name())
        try:
            self[output] = found = rule(Operation(self, output))
        # it was called in another way than the rule's, or what it has saved was changed since
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            raise Unknown(node.name()) from None
        return found
