"""Who is a sample: the batch size of a call, found in its arguments."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from expanded_nn._traced import refuse_values


def tensors(value: Any) -> Iterator[Tensor | PackedSequence]:
    """The tensors inside tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor | PackedSequence):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def contents(value: Any, depth: int = 4) -> Iterator[Any]:
    """What is inside containers and plain objects, to some depth."""
    for leaf in tree_leaves(value):
        yield leaf
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type):
            yield from contents(list(vars(leaf).values()), depth - 1)


def batch_of(value: Any, *, batch_first: bool = True) -> int | None:
    """The number of samples in the first tensor of `value` that has a batch dimension, `None` without one.

    Args:
        value: Tensors in tuples, lists, dicts, dataclasses; a `PackedSequence` says its batch itself.
        batch_first: Whether samples stand first, as in `(B, T, …)`, or second, as in `(T, B, …)`.
    """
    for tensor in tensors(value):
        if isinstance(tensor, PackedSequence):
            refuse_values("sequences have different lengths")
            return int(tensor.batch_sizes[0]) if len(tensor.batch_sizes) else 0
        if tensor.dim() > 0:
            return tensor.shape[batch_dim(tensor.dim(), batch_first=batch_first)]
    return None


def batch_dim(dims: int, *, batch_first: bool) -> int:
    """Where the samples stand in a tensor of so many batch-like dimensions."""
    return 0 if batch_first or dims < 2 else 1


def has_derivatives(tensor: Tensor) -> bool:
    """Whether it holds real or complex numbers, and no counts, indices or truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_slice(x: Tensor, batch: int, samples: Sequence[Tensor]) -> bool:
    """Whether one row is a part of a tensor that has all samples, as in a loop over them.

    Args:
        x: A layer's input, with one row.
        batch: B.
        samples: The tensors with B rows that the model was called with.
    """
    base = x._base
    if base is None or base.dim() == 0 or 0 < base.numel() <= x.numel():
        return False
    wholes = [each for each in samples if each is base or (each._base is base and each.numel() > x.numel())]
    if base.shape[0] == 1 or (not wholes and base.dim() < x.dim()):  # one that all samples share
        return False
    return any(_leaves_out(x, whole, batch) for whole in wholes or [base])


def _leaves_out(x: Tensor, whole: Tensor, batch: int) -> bool:
    """Whether a view takes one place of B in what it is a view of: in one of its dimensions, or in several together."""
    kept = {(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1}
    left_out = [size for size, stride in zip(whole.shape, whole.stride(), strict=True) if (size, stride) not in kept]
    return batch in left_out or batch in accumulate(left_out, mul)
