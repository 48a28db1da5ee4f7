"""Layers on folded tensors, of which it is known to which sample each row `x[i]` belongs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.common.modes import refuse_batched
from expanded_nn.common.shared import as_no_view, cast_shared, is_constant, is_shared, shared, shared_or_none
from expanded_nn.core import algebra, cost
from expanded_nn.core.geometry import Geometry
from expanded_nn.core.parts import Parts
from expanded_nn.core.terms import Outer, PaddedOuter
from expanded_nn.factored import FactoredTensor, materialized
from expanded_nn.layers import conv
from expanded_nn.layers.general.owners import Arrangement
from expanded_nn.layers.linear import bias_rows, linear, outer_rows, positions
from expanded_nn.layers.norm import affine
from expanded_nn.recording.expand import saved_tensors


class _Linear(torch.autograd.Function):
    """A linear map of `(n, *, in)` as it stands; put in the order of samples only where the weight's rows need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, arrangement: Arrangement) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.arrangement, ctx.bias_dtype = arrangement, None if bias is None else bias.dtype
        return as_no_view(F.linear(x, shared(weight), shared_or_none(bias)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(g)
        x, weight = ctx.saved_tensors
        padded, grad_x, grad_weight, grad_bias = ctx.arrangement.padded, None, None, None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():
                transposed = cast_shared(weight, g.dtype).transpose(1, 2)
                grad_x = ctx.arrangement.unpadded(linear(padded(g), transposed)).to(x.dtype)
            else:
                grad_x = torch.matmul(g, shared(weight).to(g.dtype)).to(x.dtype)
        by_sample = padded(g) if any(ctx.needs_input_grad[1:3]) else g
        if ctx.needs_input_grad[1]:
            factors = positions(by_sample), positions(padded(x.to(g.dtype)))
            grad_weight = outer_rows(*factors, weight.dtype, keep_factors=False, kind=PaddedOuter)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_rows(by_sample, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def linear_of_rows(
    x: Tensor,  # (n, *, in)
    weight: Tensor,  # (B, out, in)
    bias: Tensor | None,  # (B, out)
    arrangement: Arrangement,
) -> Tensor:  # (n, *, out)
    """Applies to each row the linear map of its sample."""
    if is_constant(weight, bias):
        return F.linear(x, shared(weight), shared_or_none(bias))
    if arrangement.length is None and is_shared(weight, bias):
        return _Linear.apply(x, weight, bias, arrangement)  # type: ignore[no-untyped-call,no-any-return]
    return arrangement.unpadded(linear(arrangement.padded(x), weight, bias))


# The same for other layers. All take torch's function, ours, the input, the other arguments by their names, and how the
# input's rows belong to the samples.


def linear_by_name(func: Any, op: Any, x: Tensor, named: dict[str, Any], arrangement: Arrangement) -> Tensor:
    return linear_of_rows(x, named["weight"], named.get("bias"), arrangement)


def by_position(func: Any, op: Any, x: Tensor, named: dict[str, Any], arrangement: Arrangement) -> Tensor:
    """For an operation that treats each position of `(B, *, features)` alike."""
    return arrangement.unpadded(op(arrangement.padded(x), **named))


def by_channel(func: Any, op: Any, x: Tensor, named: dict[str, Any], arrangement: Arrangement) -> Tensor:
    """For a norm of images `(n, C, *)`: each image's own weight and bias come after it."""
    y: Tensor = func(x, **{**named, "weight": None, "bias": None})
    rows = (None if value is None else arrangement.rows_of(value) for value in map(named.get, ("weight", "bias")))
    return affine(y, *rows)


def _takes_whole(x: Tensor, weight: Tensor, geometry: Geometry, output_padding: tuple[int, ...] | None) -> bool:
    """Whether a convolution's kernel covers an image, so that there is a single position."""
    is_plain = geometry.groups == 1 and not any(geometry.padding) and {*geometry.dilation} == {1}
    return output_padding is None and is_plain and x.shape[2:] == weight.shape[3:]


class _Images(torch.autograd.Function):
    """A convolution of images by torch's own kernels; the rows of a sample are the gradient of its images."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        output_padding: tuple[int, ...] | None,
        arrangement: Arrangement,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.arrangement = (geometry, output_padding), arrangement
        ctx.bias_dtype = None if bias is None else bias.dtype
        return as_no_view(conv.torch_convolution(x, shared(weight), shared_or_none(bias), geometry, output_padding))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(g)
        x, weight = saved_tensors(ctx)
        geometry, output_padding = ctx.how
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        padded, grad_x, grad_weight = ctx.arrangement.padded, None, None
        if torch.is_grad_enabled():  # each image with a weight of its own
            x, weight = x.view_as(x), weight.view_as(weight)  # of which none comes from the other
            y = conv.apply(x, ctx.arrangement.rows_of(weight), None, *ctx.how)
            sources = [source for source in (x, weight) if source.requires_grad]
            found = iter(torch.autograd.grad(y, sources, g.to(y.dtype), create_graph=True))
            grad_x, grad_weight = (next(found) if source.requires_grad else None for source in (x, weight))
        else:
            kernel, arguments = shared(weight).to(g.dtype), geometry.arguments(output_padding)

            def gradients(g: Tensor, x: Tensor, mask: tuple[bool, ...]) -> Any:
                return conv.aten.convolution_backward(g, x, kernel, None, *arguments, mask)

            if needs_x:
                grad_x = gradients(g, x.to(g.dtype), (True, False, False))[0].to(x.dtype)
            if needs_weight:
                of_g, of_x = padded(g), padded(x.to(g.dtype))
                # one after the other, unless their number is a symbol
                pays = cost.is_symbol(of_g.shape[0]) or of_g.numel() + of_x.numel() < weight.numel()
                if geometry.dims < 3 and pays:
                    grad_weight = _factored_rows(of_g, of_x, weight, geometry, transposed=output_padding is not None)
                else:
                    rows = [gradients(*both, (False, True, False))[1] for both in zip(of_g, of_x, strict=True)]
                    grad_weight = torch.stack(rows).to(weight.dtype)
        grad_bias = bias_rows(padded(g.flatten(2).mT), ctx.bias_dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _factored_rows(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, *, transposed: bool) -> Tensor:
    """The weight's rows from images `(B, T, C, *)`, as of a convolution with a dimension T more, of kernel size 1."""
    wider = Geometry((1, *geometry.stride), (0, *geometry.padding), (1, *geometry.dilation), geometry.groups)
    left, right = (images.transpose(1, 2) for images in ((x, g) if transposed else (g, x)))
    rows = conv.patch_rows(left, right, (*weight.shape[1:3], 1, *weight.shape[3:]), weight.dtype, wider)
    return rows.view(weight.shape)


def images(func: Any, op: Any, x: Tensor, named: dict[str, Any], arrangement: Arrangement) -> Tensor:
    """For a convolution; it is a linear map where the kernel covers the image, as with patches."""
    weight, bias = named["weight"], named.get("bias")
    sizes = {name: value for name, value in named.items() if name not in ("weight", "bias")}
    if isinstance(op, type(conv.conv_transpose1d)):
        sizes.setdefault("output_padding", 0)
    x, how = conv.moved(x, weight, **sizes)
    if _takes_whole(x, weight, *how):
        y = linear_of_rows(x.flatten(1), weight.flatten(2), bias, arrangement)
        return y.view(*y.shape, *[1] * (x.dim() - 2))
    if is_shared(weight, bias):
        return _Images.apply(x, weight, bias, *how, arrangement)  # type: ignore[no-untyped-call,no-any-return]
    rows_of = arrangement.rows_of
    return conv.apply(x, rows_of(weight), None if bias is None else rows_of(bias), *how)


class _Parts(torch.autograd.Function):
    """The parts of a weight `(B, E, *shape)` that all samples share, one for each of E experts: `(B, *shape)`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.weight = weight.detach()
        return tuple(part.expand(weight.shape[0], *part.shape) for part in shared(weight).unbind())

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> Tensor | None:
        if all(part is None for part in parts):
            return None
        weight: Tensor = ctx.weight
        if torch.is_grad_enabled():
            zeros = torch.zeros_like(weight[:, 0])
            return torch.stack([zeros if part is None else materialized(part) for part in parts], 1)
        terms = [None if part is None else _outer(part) for part in parts]
        if all(part is None or term is not None for part, term in zip(parts, terms, strict=True)):
            return FactoredTensor.of(Parts.of(terms))
        rows = weight.new_empty(weight.shape)
        for place, part in enumerate(parts):
            _write(part, rows[:, place])
        return rows


def _outer(part: Tensor) -> Outer | None:
    """The only term of rows, if it is an outer product in their shape, and not that of a view."""
    terms = part.terms() if isinstance(part, FactoredTensor) and not part.requires_grad else ()
    is_outer = len(terms) == 1 and isinstance(terms[0], Outer) and terms[0].row_shape == tuple(part.shape[1:])
    return cast(Outer, terms[0]) if is_outer else None


def _write(part: Tensor | None, place: Tensor) -> None:
    """Writes rows, zeros if there are none, to memory of their shape."""
    if part is None:
        place.zero_()
        return
    if isinstance(part, FactoredTensor) and not part.is_dense:
        part = algebra.dense(part._unchanged(), part._kind, place)
    if part.data_ptr() != place.data_ptr():
        place.copy_(part)


def parts_of(weight: Tensor) -> tuple[Tensor, ...] | None:
    """The parts of a weight `(B, E, *shape)`, each `(B, *shape)`, whose rows are put together once."""
    if weight.dim() < 3 or not 0 < weight.shape[1] <= cost.PARTS_OF_A_WEIGHT or not is_shared(weight):
        return None
    return _Parts.apply(weight)  # type: ignore[no-untyped-call,no-any-return]
