"""Activations with parameters: `PReLU`."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn.common.shared import as_no_view, laid_out_like, shared
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.outside import refuse_other_shapes
from expanded_nn.modules.registry import expands


def prelu(
    x: Tensor,  # (B, *) or (B, C, *)
    weight: Tensor,  # (B, 1) or (B, C)
) -> Tensor:  # as x
    """Applies each sample's own slope to the negative numbers, `max(0, x) + weight * min(0, x)`.

    Args:
        x: `(B, *)`, or `(B, C, *)` with a slope for each channel.
        weight: `(B, 1)` or `(B, C)`.

    Returns:
        A tensor of the shape of `x`.
    """
    if weight.dim() != 2 or weight.shape[0] != x.shape[0]:
        refuse_other_shapes("prelu", x, x.shape[1:2] if weight.shape[-1:] != (1,) else (1,), weight=weight)
    slopes = weight.shape[1]
    if slopes > 1 and x.shape[1:2] != (slopes,):
        return F.prelu(x, shared(weight))  # raises
    rest = x.shape[2:] if slopes > 1 else x.shape[1:]
    # the batch as one sample: each slope of each sample is that of one channel
    one_sample = x.reshape(1, x.shape[0] * slopes, prod(rest))
    return as_no_view(F.prelu(one_sample, weight.reshape(-1)).view(x.shape))


@expands(nn.PReLU)
class PReLU(Expanded, nn.PReLU):
    """`torch.nn.PReLU` with per-sample gradients; input `(B, *)`, or `(B, num_parameters, *)` with several slopes."""

    ranks: ClassVar[dict[str, int]] = {"weight": 1}

    @property
    def fixed_layout(self) -> bool:  # type: ignore[override]
        return self.num_parameters > 1  # channels stand second

    def expanded_forward(self, input: Tensor) -> Tensor:
        def op(x: Tensor) -> Tensor:
            return laid_out_like(prelu(x, self.expanded("weight")), x)

        return self.by_sample(op, int(self.fixed_layout), input=input)
