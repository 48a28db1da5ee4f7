"""Whether a weight with a batch dimension is one weight, seen B times."""

import torch
from torch import Tensor


def is_shared(*weights: Tensor | None) -> bool:
    """Whether all the weights `(B, *shape)` are the same for all samples: expanded (stride 0), or B is 0 or 1."""
    return all(weight is None or weight.shape[0] < 2 or weight.stride(0) == 0 for weight in weights)


def shared(weight: Tensor) -> Tensor:
    """The one weight `(*shape)` behind an expanded `(B, *shape)`, without its history.

    An empty batch has no weight to show: it gets zeros, which nothing is multiplied by.
    """
    return weight.detach()[0] if weight.shape[0] else weight.new_zeros(weight.shape[1:])


def shared_or_none(weight: Tensor | None) -> Tensor | None:
    """`shared`, for a weight that a layer may lack."""
    return None if weight is None else shared(weight)


def owned(output: Tensor) -> Tensor:
    """`output`, not a view in autograd's eyes: what a Function returns may then be changed in place by the next layer."""
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output  # type: ignore[no-any-return]
