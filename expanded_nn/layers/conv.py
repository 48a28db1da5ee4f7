"""Convolutions: `Conv1d/2d/3d` and `ConvTranspose1d/2d/3d`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn.common.modes import is_batched, refuse_lost_graph
from expanded_nn.common.shared import cast_shared, is_constant, is_shared, shared, shared_or_none
from expanded_nn.core.geometry import Geometry, cropped, rows_at_once
from expanded_nn.core.patches import Patches
from expanded_nn.factored import from_factors
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.outside import refuse_other_shapes
from expanded_nn.modules.registry import expands
from expanded_nn.recording.expand import saved_tensors

aten = torch.ops.aten
Sizes = int | Sequence[int]
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def patch_rows(
    g: Tensor,  # (B, out, *positions)
    x: Tensor,  # (B, in, *size)
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    geometry: Geometry,
    *,
    transposed: bool = False,  # `g` is the layer's input, and `x` the gradient of its output
) -> Tensor:  # (B, *row_shape)
    """The rows of a convolution's weight, factored."""
    excess = geometry.excess(x.shape[2:], row_shape[2:], g.shape[2:])
    if any(size >= stride for size, stride in zip(excess, geometry.stride, strict=True)):
        # Only the output_padding of a dilated transposed convolution reaches so far.
        x, geometry = geometry.padded(x, cut=excess)

    if is_batched(g) or is_batched(x):
        return rows_at_once(g, x, row_shape, geometry).to(dtype)

    def of_g(grad: Tensor, g: Tensor, x: Tensor) -> Tensor:
        return apply(x, cast_shared(grad, g.dtype), None, geometry, None)

    def of_x(grad: Tensor, g: Tensor, x: Tensor) -> Tensor:
        return _input_gradient(g, x, cast_shared(grad, g.dtype), geometry, transposed=False)

    def term(g: Tensor, x: Tensor) -> Patches:
        return Patches.of(g, x, row_shape, geometry, dtype, of_gradient=int(transposed))

    return from_factors(term, (g, x), (of_g, of_x))


class _Convolution(torch.autograd.Function):
    """A convolution, or a transposed one, whose weight all samples share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        output_padding: tuple[int, ...] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry, ctx.output_padding = geometry, output_padding
        return torch_convolution(x, shared(weight), shared_or_none(bias), geometry, output_padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_tensors(ctx)
        dtype, x = x.dtype, x.to(g.dtype)
        geometry: Geometry = ctx.geometry
        transposed = ctx.output_padding is not None
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():
                grad_x = _input_gradient(g, x, cast_shared(weight, g.dtype), geometry, transposed=transposed).to(dtype)
            else:
                tensors, arguments = (g, x, shared(weight).to(g.dtype), None), geometry.arguments(ctx.output_padding)
                grad_x = aten.convolution_backward(*tensors, *arguments, (True, False, False))[0].to(dtype)
        if ctx.needs_input_grad[1]:
            factors: tuple[Tensor, Tensor] = (x, g) if transposed else (g, x)  # as `Patches` has them
            shape = tuple(weight.shape[1:])
            grad_weight = patch_rows(*factors, shape, weight.dtype, geometry, transposed=transposed)
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(tuple(range(2, g.dim())), dtype=ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def torch_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    output_padding: tuple[int, ...] | None,
    repeats: int = 1,
) -> Tensor:
    """Torch's own convolution, its groups `repeats` times; a transposed one where there is an `output_padding`."""
    dims, groups = geometry.dims, geometry.groups * repeats
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    if output_padding is None:
        return CONV[dims](x, weight, bias, stride, padding, dilation, groups)
    return CONV_TRANSPOSE[dims](x, weight, bias, stride, padding, output_padding, groups, dilation)


def _input_gradient(
    g: Tensor,
    x: Tensor,
    weight: Tensor,  # (B, *shape)
    geometry: Geometry,
    *,
    transposed: bool,
) -> Tensor:
    """The gradient of the input by the convolution of the other kind, which has derivatives with rows of its own."""
    if not transposed:
        return apply(g, weight, None, geometry, geometry.excess(x.shape[2:], weight.shape[3:], g.shape[2:]))
    return cropped(apply(g, weight, None, geometry, None), x.shape[2:])


def apply(
    x: Tensor,  # (B, in, *size)
    weight: Tensor,  # (B, out, in / groups, *kernel), transposed (B, in, out / groups, *kernel)
    bias: Tensor | None,  # (B, out)
    geometry: Geometry,
    output_padding: tuple[int, ...] | None,
) -> Tensor:  # (B, out, *positions)
    """Each sample's own convolution, transposed where there is an `output_padding`."""
    if is_constant(weight, bias):
        return torch_convolution(x, shared(weight), shared_or_none(bias), geometry, output_padding)
    refuse_lost_graph(x)
    if is_shared(weight, bias):
        return _Convolution.apply(x, weight, bias, geometry, output_padding)  # type: ignore[no-untyped-call,no-any-return]
    batch = x.shape[0]
    is_transposed = output_padding is not None
    channels = weight.shape[2] * geometry.groups if is_transposed else weight.shape[1]
    refuse_other_shapes(f"conv{'_transpose' * is_transposed}{geometry.dims}d", x, (channels,), bias=bias)
    y = torch_convolution(
        x.flatten(0, 1)[None].contiguous(),  # of other strides torch's gradient of grouped weights is wrong
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        geometry,
        output_padding,
        repeats=batch,
    )
    return y.reshape(batch, y.shape[1] // batch, *y.shape[2:])


def _per_dimension(value: Sizes, dims: int) -> tuple[int, ...]:
    """One number per spatial dimension."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _check_samples(name: str, x: Tensor, weight: Tensor, dims: int) -> None:
    if x.dim() != dims + 2 or weight.dim() != dims + 3 or x.shape[0] != weight.shape[0]:
        remedy = "Expand the weight over the batch: weight.expand(len(x), *weight.shape)."
        if x.dim() == dims + 3 and weight.dim() == dims + 3:
            remedy = (
                "A task of several shots is not one sample of a convolution: give each shot a row of its own, "
                "x.flatten(0, 1) with weight.repeat_interleave(x.shape[1], 0), and unflatten the result."
            )
        raise complaint(
            f"functional.{name}",
            f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}",
            f"x of {dims + 2} and weight of {dims + 3} dimensions with the same batch dimension first",
            remedy,
        )


def _padded_by_name(
    x: Tensor, padding: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """What `padding` says as numbers, with `x` padded where the two ends of a dimension differ."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    if padding != "same":
        raise ValueError(f'padding is {padding!r}; wanted numbers, "valid" or "same".')
    if any(step != 1 for step in stride):
        raise ValueError(f'padding is "same" and stride {tuple(stride)}; wanted stride 1.')
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(both % 2 for both in total):
        x = F.pad(x, [end for both in reversed(total) for end in (0, both % 2)])
    return x, tuple(both // 2 for both in total)


def moved(
    x: Tensor,
    weight: Tensor,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    output_padding: Sizes | None = None,
) -> tuple[Tensor, tuple[Geometry, tuple[int, ...] | None]]:
    """The input, padded where the two ends of a dimension differ; and how the kernel moves over it, for `apply`."""
    dims = weight.dim() - 3
    stride, dilation = _per_dimension(stride, dims), _per_dimension(dilation, dims)
    if isinstance(padding, str) and output_padding is None:
        x, padding = _padded_by_name(x, padding, weight.shape[3:], stride, dilation)
    geometry = Geometry(stride, _per_dimension(cast(Sizes, padding), dims), dilation, groups)
    return x, (geometry, None if output_padding is None else _per_dimension(output_padding, dims))


@dataclass(frozen=True)
class _ConvOp:
    """Applies each sample's own convolution, as torch's function of the same name does the one of all.

    Args:
        x: `(B, in, *size)`: of `conv2d` `(B, in, height, width)`.
        weight: `(B, out, in / groups, *kernel)`; expanded over the batch (stride 0) it runs as torch's one kernel.
        bias: `(B, out)`, or `None`.
        stride: The step of the kernel, one number or one per dimension; so are `padding` and `dilation`.
        padding: Zeros at both ends of each dimension, or `"valid"` (none), or `"same"` (as many as keep the size).
        dilation: The distance of the kernel's entries.
        groups: The number of groups of channels that do not see each other.

    Returns:
        `(B, out, *positions)`.
    """

    dims: int

    @property
    def __name__(self) -> str:
        return f"conv{self.dims}d"

    def __call__(
        self,
        x: Tensor,  # (B, in, *size)
        weight: Tensor,  # (B, out, in / groups, *kernel)
        bias: Tensor | None = None,  # (B, out)
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:  # (B, out, *positions)
        _check_samples(self.__name__, x, weight, self.dims)
        x, how = moved(x, weight, stride, padding, dilation, groups)
        return apply(x, weight, bias, *how)


@dataclass(frozen=True)
class _ConvTransposeOp:
    """Applies each sample's own transposed convolution, as torch's function of the same name does the one of all.

    Args:
        x: `(B, in, *size)`: of `conv_transpose2d` `(B, in, height, width)`.
        weight: `(B, in, out / groups, *kernel)`; expanded over the batch (stride 0) it runs as torch's one kernel.
        bias: `(B, out)`, or `None`.
        stride: The step of the kernel, one number or one per dimension; so are all others but `groups`.
        padding: What is taken off at both ends of each dimension of the output.
        output_padding: What is added at the end of each dimension of the output.
        groups: The number of groups of channels that do not see each other.
        dilation: The distance of the kernel's entries.

    Returns:
        `(B, out, *positions)`.
    """

    dims: int

    @property
    def __name__(self) -> str:
        return f"conv_transpose{self.dims}d"

    def __call__(
        self,
        x: Tensor,  # (B, in, *size)
        weight: Tensor,  # (B, in, out / groups, *kernel)
        bias: Tensor | None = None,  # (B, out)
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Tensor:  # (B, out, *positions)
        _check_samples(self.__name__, x, weight, self.dims)
        x, how = moved(x, weight, stride, padding, dilation, groups, output_padding)
        return apply(x, weight, bias, *how)


conv1d, conv2d, conv3d = map(_ConvOp, (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_ConvTransposeOp, (1, 2, 3))


class _Spatial(Expanded):
    """A layer with a kernel, whose samples stand first and whose channels stand second."""

    kernel_size: tuple[int, ...]
    fixed_layout: ClassVar[bool] = True

    @property
    def batched_dims(self) -> int:  # type: ignore[override]
        return len(self.kernel_size) + 2

    @property
    def ranks(self) -> dict[str, int]:  # type: ignore[override]
        return {"weight": len(self.kernel_size) + 2, "bias": 1}


class _ConvNd(_Spatial, nn.modules.conv._ConvNd):
    """A convolution over as many dimensions as its kernel has."""

    def expanded_forward(self, input: Tensor) -> Tensor:
        return self.by_sample(self._convolve, len(self.kernel_size) + 1, input=input)

    def _convolve(self, x: Tensor) -> Tensor:
        padding: Sizes | str = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        weight, bias = self.expanded("weight"), self.expanded("bias")
        op = _ConvOp(len(self.kernel_size))
        return op(x, weight, bias, self.stride, padding, self.dilation, self.groups)


@expands(nn.Conv1d)
class Conv1d(_ConvNd, nn.Conv1d):
    """`torch.nn.Conv1d` with per-sample gradients; input `(B, in_channels, length)`."""


@expands(nn.Conv2d)
class Conv2d(_ConvNd, nn.Conv2d):
    """`torch.nn.Conv2d` with per-sample gradients; input `(B, in_channels, height, width)`."""


@expands(nn.Conv3d)
class Conv3d(_ConvNd, nn.Conv3d):
    """`torch.nn.Conv3d` with per-sample gradients; input `(B, in_channels, depth, height, width)`."""


class _ConvTransposeNd(_Spatial, nn.modules.conv._ConvTransposeNd):
    """A transposed convolution over as many dimensions as its kernel has."""

    def expanded_forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dims, padding = len(self.kernel_size), self.padding
        assert isinstance(padding, tuple)

        def op(x: Tensor) -> Tensor:
            sizes: list[Any] = [self.stride, padding, self.kernel_size, dims, self.dilation]
            output_padding = self._output_padding(x, output_size, *sizes)
            weight, bias = self.expanded("weight"), self.expanded("bias")
            op = _ConvTransposeOp(dims)
            return op(x, weight, bias, self.stride, padding, output_padding, self.groups, self.dilation)

        return self.by_sample(op, dims + 1, input=input)


@expands(nn.ConvTranspose1d)
class ConvTranspose1d(_ConvTransposeNd, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with per-sample gradients; input `(B, in_channels, length)`."""


@expands(nn.ConvTranspose2d)
class ConvTranspose2d(_ConvTransposeNd, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with per-sample gradients; input `(B, in_channels, height, width)`."""


@expands(nn.ConvTranspose3d)
class ConvTranspose3d(_ConvTransposeNd, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with per-sample gradients; input `(B, in_channels, depth, height, width)`."""
