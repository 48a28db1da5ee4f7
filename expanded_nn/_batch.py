"""Who is a sample: the batch size of a call, found in its arguments."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


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


def batch_of(value: Any, *, batch_first: bool = True) -> int | None:
    """The number of samples in the first tensor of `value` that has a batch dimension, `None` without one.

    Args:
        value: Tensors in tuples, lists, dicts, dataclasses; a `PackedSequence` says its batch itself.
        batch_first: Whether samples stand first, as in `(B, T, …)`, or second, as in `(T, B, …)`.
    """
    for tensor in tensors(value):
        if isinstance(tensor, PackedSequence):
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
