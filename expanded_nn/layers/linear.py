"""Linear maps: `Linear` and `Bilinear`."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn.common.batch import in_memory_order
from expanded_nn.common.modes import is_batched, without_autocast
from expanded_nn.common.shared import as_no_view, cast_shared, is_constant, is_shared, shared, shared_or_none
from expanded_nn.core import cost
from expanded_nn.core.terms import Outer, outer_products
from expanded_nn.factored import from_factors
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.outside import refuse_other_shapes
from expanded_nn.modules.registry import expands
from expanded_nn.recording.expand import keeps_factors, saved_tensors


def outer_rows(
    g: Tensor,  # (B, *, out)
    a: Tensor,  # (B, *, in)
    dtype: torch.dtype,
    *,
    keep_factors: bool,
    kind: type[Outer] = Outer,
) -> Tensor:  # (B, out, in)
    """The rows of a linear map's weight, factored as terms of a kind unless they are small, or in any case."""
    g, a = positions(g), positions(a)
    small = cost.rows_are_small(g.shape[0] * g.shape[-1] * a.shape[-1]) and g.dtype == dtype and dtype.itemsize > 2
    if (small and not keep_factors) or is_batched(g):
        with without_autocast():
            return outer_products(g, a)
    return from_factors(lambda g, a: kind.of(g, a, dtype), (g, a), (_gradient_of_g, _gradient_of_a))


def _gradient_of_g(grad: Tensor, g: Tensor, a: Tensor) -> Tensor:
    return torch.bmm(a, grad.to(g.dtype).transpose(1, 2))


def _gradient_of_a(grad: Tensor, g: Tensor, a: Tensor) -> Tensor:
    return torch.bmm(g, grad.to(g.dtype))


def positions(
    x: Tensor,  # (B, *, features)
) -> Tensor:  # (B, T, features)
    """All dimensions between the batch and the features as one; sequences of a jagged tensor are filled up by zeros."""
    if x.is_nested:
        x = torch.nested.to_padded_tensor(x, 0.0)
    if x.dim() < 4:
        return x.unsqueeze(1) if x.dim() == 2 else x
    return x.reshape(x.shape[0], prod(x.shape[1:-1]), x.shape[-1])


def bias_rows(
    g: Tensor,  # (B, *, out)
    dtype: torch.dtype,
) -> Tensor:  # (B, out)
    """The rows of a linear map's bias."""
    return g.to(dtype) if g.dim() == 2 else positions(g).sum(1, dtype=dtype)


class _Linear(torch.autograd.Function):
    """A linear map whose weight all samples share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        w, b = shared(weight), shared_or_none(bias)
        return as_no_view(in_memory_order(lambda x: F.linear(x, w, b), x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_tensors(ctx)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():
                grad_x = linear(g, cast_shared(weight, g.dtype).transpose(1, 2)).to(x.dtype)
            else:
                w = shared(weight).to(g.dtype)
                grad_x = in_memory_order(lambda g: torch.matmul(g, w), g).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = outer_rows(g, x.to(g.dtype), weight.dtype, keep_factors=keeps_factors(weight))
        if ctx.needs_input_grad[2]:
            grad_bias = bias_rows(g, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def linear(
    x: Tensor,  # (B, *, in)
    weight: Tensor,  # (B, out, in)
    bias: Tensor | None = None,  # (B, out)
) -> Tensor:  # (B, *, out)
    """Applies each sample's own linear map, `y[b] = x[b] @ weight[b].T + bias[b]`.

    Args:
        x: `(B, *, in)`.
        weight: `(B, out, in)`; expanded over the batch (stride 0) it runs as one `F.linear`.
        bias: `(B, out)`, or `None`.

    Returns:
        `(B, *, out)`.
    """
    if is_constant(weight, bias):
        return F.linear(x, shared(weight), shared_or_none(bias))
    if is_shared(weight, bias) and not is_batched(x):  # in a Function a vmapped backward would have no graph
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]
    refuse_other_shapes("linear", x, (weight.shape[1], x.shape[-1]), weight=weight)
    refuse_other_shapes("linear", x, weight.shape[1:2], bias=bias)
    y = torch.bmm(positions(x), weight.transpose(1, 2))
    y = y if bias is None else y + bias[:, None, :]
    return y.reshape(*x.shape[:-1], weight.shape[1])


@expands(nn.Linear)
class Linear(Expanded, nn.Linear):
    """`torch.nn.Linear` with per-sample gradients; input `(B, *, in_features)`."""

    ranks: ClassVar[dict[str, int]] = {"weight": 2, "bias": 1}
    positionwise: ClassVar[bool] = True
    feature_dims: ClassVar[int] = 1
    returns_fresh: ClassVar[bool] = True

    def expanded_forward(self, input: Tensor) -> Tensor:
        return self.by_sample(
            lambda x: linear(x, self.expanded("weight"), self.expanded("bias")), self.feature_dims, input=input
        )


def _pairs(
    x1: Tensor,  # (B, T, in1)
    x2: Tensor,  # (B, T, in2)
) -> Tensor:  # (B, T, in1 * in2)
    """All products of a feature of `x1` with one of `x2`; a vmapped backward has no rule for einsum and flatten."""
    return (x1[..., :, None] * x2[..., None, :]).reshape(*x1.shape[:2], x1.shape[2] * x2.shape[2])


def bilinear(
    input1: Tensor,  # (B, *, in1)
    input2: Tensor,  # (B, *, in2)
    weight: Tensor,  # (B, out, in1, in2)
    bias: Tensor | None = None,  # (B, out)
) -> Tensor:  # (B, *, out)
    """Applies each sample's own bilinear map, `y[b,o] = input1[b] @ weight[b,o] @ input2[b] + bias[b,o]`.

    Args:
        input1: `(B, *, in1)`.
        input2: `(B, *, in2)`.
        weight: `(B, out, in1, in2)`; expanded over the batch (stride 0) it runs as one `F.linear` of the products.
        bias: `(B, out)`, or `None`.

    Returns:
        `(B, *, out)`.
    """
    if is_constant(weight, bias):
        return F.bilinear(input1, input2, shared(weight), shared_or_none(bias))
    if input1.shape[:-1] != input2.shape[:-1] or (input1.shape[-1], input2.shape[-1]) != weight.shape[2:]:
        return F.bilinear(input1, input2, shared(weight), shared_or_none(bias))  # raises
    dtype = reduce(torch.promote_types, (x.dtype for x in (input1, input2, weight)))  # as torch under autocast
    with without_autocast():
        pairs = _pairs(positions(input1).to(dtype), positions(input2).to(dtype))
        matrix, bias = cast_shared(weight, dtype).flatten(2), None if bias is None else cast_shared(bias, dtype)
        return as_no_view(linear(pairs, matrix, bias).reshape(*input1.shape[:-1], weight.shape[1]))


@expands(nn.Bilinear)
class Bilinear(Expanded, nn.Bilinear):
    """`torch.nn.Bilinear` with per-sample gradients; inputs `(B, *, in1_features)` and `(B, *, in2_features)`."""

    ranks: ClassVar[dict[str, int]] = {"weight": 3, "bias": 1}
    positionwise: ClassVar[bool] = True
    feature_dims: ClassVar[int] = 1
    returns_fresh: ClassVar[bool] = True

    def expanded_forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        def op(x1: Tensor, x2: Tensor) -> Tensor:
            return bilinear(x1, x2, self.expanded("weight"), self.expanded("bias"))

        return self.by_sample(op, self.feature_dims, input1=input1, input2=input2)
