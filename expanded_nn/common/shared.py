"""Weights with a batch dimension that are the same for all samples."""

from typing import Any, cast

import torch
from torch import Tensor, nn


def stand_in(weight: Any, parameter: Any) -> Any:
    """Lets a tensor pass for the parameter whose place it takes, where a forward asks `isinstance(x, nn.Parameter)`.

    A parameter itself, which is put back into its place for a while, gets no mark.
    """
    if is_parameter(parameter) and not isinstance(weight, nn.Parameter):
        weight._is_param = True  # what that asks for, of any class of tensors
        weight._stands_for = parameter
    return weight


def stood_for(x: Any) -> Any:
    """The parameter whose place a tensor takes; anything else is given back."""
    return vars(x).get("_stands_for", x) if isinstance(x, Tensor) else x


def is_parameter(x: Any) -> bool:
    """Whether it is a parameter, and nothing that stands in for one."""
    return isinstance(x, nn.Parameter) and stood_for(x) is x


def is_shared(*weights: Tensor | None) -> bool:
    """Whether an op can compute with one weight for all samples, given weights `(B, *shape)`.

    They have to be the same for all samples: expanded (stride 0), or B is 0 or 1. And they have to be real unless B is
    0, as the algebra of the factors does not conjugate.
    """
    for weight in weights:  # a generator takes as long as the questions
        if weight is not None and not (_is_the_same(weight) and not (weight.is_complex() and weight.shape[0])):
            return False
    return True


def is_constant(*weights: Tensor | None) -> bool:
    """Whether the weights are the same for all samples and require no gradients, so that torch's own op serves."""
    return not any(weight is not None and (weight.requires_grad or not _is_the_same(weight)) for weight in weights)


def _is_the_same(weight: Tensor) -> bool:
    return weight.shape[0] < 2 or weight.stride(0) == 0


def shared(weight: Tensor) -> Tensor:
    """The weight `(*shape)` behind an expanded `(B, *shape)`, without its history; zeros if B is 0."""
    return weight.detach()[0] if weight.shape[0] else weight.new_zeros(weight.shape[1:])


def shared_or_none(weight: Tensor | None) -> Tensor | None:
    """`shared`, for a weight that a layer may lack."""
    return None if weight is None else shared(weight)


def with_dims(
    value: Tensor,  # (B, *shape)
    dims: int,
) -> Tensor:  # (B, 1, …, 1, *shape)
    """A value with `dims` dimensions behind the samples."""
    missing = dims + 1 - value.dim()
    return value.reshape(value.shape[0], *[1] * missing, *value.shape[1:]) if missing else value


def as_no_view(output: Tensor) -> Tensor:
    """`output`, to autograd no view, so that the next layer may change it in place after a Function."""
    if not output._is_view():
        return output
    return cast(Tensor, torch.ops.aten._unsafe_view(output, output.shape))


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor in the order of memory, that of the largest stride first; none if there are gaps."""
    if tensor.layout is not torch.strided:
        return ()
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor with its dimensions in that order of memory; as it is if that has others."""
    if tensor.dim() != len(order) or (turned := tensor.permute(order)).is_contiguous():
        return tensor
    return turned.contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def laid_out_like(result: Tensor, x: Tensor) -> Tensor:
    """A result with its dimensions in the order of memory of `x`: `view` and random numbers follow that."""
    return result if x.is_contiguous() else as_no_view(laid_out(result, memory_order(x)))


class _Cast(torch.autograd.Function):
    """A shared weight in another dtype, still expanded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return shared(weight).to(dtype).expand_as(weight)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        return rows.to(ctx.dtype), None


def cast_shared(
    weight: Tensor,  # (B, *shape)
    dtype: torch.dtype,
) -> Tensor:
    """The weight in another dtype; one that is expanded stays so."""
    if weight.dtype == dtype or not is_shared(weight):
        return weight.to(dtype)
    return _Cast.apply(weight, dtype)  # type: ignore[no-untyped-call,no-any-return]
