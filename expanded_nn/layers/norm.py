"""Normalization: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm1d/2d/3d` and, in eval mode, `BatchNorm1d/2d/3d`.

Two families. Norms over the last dimensions have parameters for each element and share them over all positions: an
autograd Function, with torch's fused kernel forward. Norms over channels have parameters for each channel: a batch
of B samples with C channels is *one* sample with `B * C` channels, so that torch's own kernels, their backward and
double backward give each sample's own parameters their gradient, at the cost of the plain layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import in_memory_order
from expanded_nn.common.modes import is_batched, unseen
from expanded_nn.common.shared import as_no_view, is_constant, is_shared, shared, shared_or_none, with_dims
from expanded_nn.core import cost
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.outside import refuse_other_channels, refuse_other_shapes
from expanded_nn.modules.registry import expands
from expanded_nn.recording.expand import saved_tensors

aten = torch.ops.aten

# Norms over the last dimensions


def _rows(
    terms: Tensor,  # (B, *, *normalized_shape)
    parameter_dims: int,
    dtype: torch.dtype,
) -> Tensor:  # (B, *normalized_shape)
    """The sum over the positions."""
    positions = list(range(1, terms.dim() - parameter_dims))
    return terms.sum(positions, dtype=dtype) if positions else terms.to(dtype)


def _times(x: Tensor, g: Tensor) -> Tensor:
    """`x * g` in the memory of `x`, fresh memory being slow; a vmapped `g` has more values than fit there."""
    return x * g if is_batched(g) else x.mul_(g)


def _widest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to add up in: at least float32, as in torch's kernels."""
    return reduce(torch.promote_types, dtypes, torch.float32)


def standardized(x: Tensor, dims: int, eps: float, *, centered: bool) -> tuple[Tensor, Tensor]:
    """`x` with mean square 1 over its last `dims` dimensions, and the factor that made it so."""
    last = list(range(-dims, 0))
    if centered:
        x = x - x.mean(last, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(last, keepdim=True) + eps)
    return x * rstd, rstd


def _input_grad(
    g: Tensor,  # of the standardized input
    xhat: Tensor,
    rstd: Tensor,
    dims: int,
    *,
    centered: bool,
) -> Tensor:
    """The vector-Jacobian product of `standardized`."""
    last = list(range(-dims, 0))
    inner = g - xhat * (g * xhat).mean(last, keepdim=True)
    if centered:
        inner = inner - g.mean(last, keepdim=True)
    return inner * rstd


class _OfPositions(torch.autograd.Function):
    """A layer norm or, where not centered, an RMS norm, whose weight all samples share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        normalized_shape: Sequence[int],
        eps: float | None,
        centered: bool,
    ) -> Tensor:
        y: Tensor
        mean = rstd = None
        ctx.eps = torch.finfo(_widest(x.dtype)).eps if eps is None else eps
        w, b, dims = shared(weight), shared_or_none(bias), len(normalized_shape)
        if centered:
            y, mean, rstd = in_memory_order(
                lambda x: torch.native_layer_norm(x, normalized_shape, w, b, ctx.eps), x, feature_dims=dims
            )
        else:
            y = in_memory_order(lambda x: F.rms_norm(x, list(normalized_shape), w, eps), x, feature_dims=dims)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.centered, ctx.bias_dtype = centered, None if bias is None else bias.dtype
        return as_no_view(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = saved_tensors(ctx)
        grad_x = grad_weight = grad_bias = None
        dims = weight.dim() - 1
        dtype = _widest(x.dtype, weight.dtype, g.dtype)
        if ctx.centered and not torch.is_grad_enabled():
            if ctx.needs_input_grad[0]:
                same_weight = shared(weight).to(torch.promote_types(weight.dtype, g.dtype))

                def backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
                    statistics = mean.contiguous(), rstd.contiguous()  # as torch takes them to be
                    shape, wanted = same_weight.shape, (True, False, False)
                    grads = aten.native_layer_norm_backward(g, x, shape, *statistics, same_weight, None, wanted)
                    return cast(Tensor, grads[0])

                grad_x = in_memory_order(backward, g, x.to(g.dtype), mean, rstd, feature_dims=dims).to(x.dtype)
            terms = _times((x.to(dtype) - mean).mul_(rstd), g) if ctx.needs_input_grad[1] else g
        else:  # not by torch's own backward: the derivative of that of its layer norm is wrong
            xhat, rstd = standardized(x.to(dtype), dims, ctx.eps, centered=ctx.centered)
            if ctx.needs_input_grad[0]:
                gw = g.to(dtype) * with_dims(weight, g.dim() - 1)
                grad_x = _input_grad(gw, xhat, rstd, dims, centered=ctx.centered).to(x.dtype)
            terms = g * xhat
        if ctx.needs_input_grad[1]:
            grad_weight = _rows(terms, dims, weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _rows(g, dims, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def layer_norm(
    x: Tensor,  # (B, *, *normalized_shape)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,  # (B, *normalized_shape)
    bias: Tensor | None = None,  # (B, *normalized_shape)
    eps: float = 1e-5,
) -> Tensor:  # (B, *, *normalized_shape)
    """Normalizes each position over its last dimensions, then applies each sample's own weight and bias.

    Args:
        x: `(B, *, *normalized_shape)`.
        normalized_shape: The sizes of the dimensions to normalize over.
        weight: `(B, *normalized_shape)`, or `None`; expanded over the batch (stride 0) it runs as one `F.layer_norm`.
        bias: `(B, *normalized_shape)`, or `None`.
        eps: Added to the variance.

    Returns:
        `(B, *, *normalized_shape)`.
    """
    if is_constant(weight, bias):
        return F.layer_norm(x, list(normalized_shape), shared_or_none(weight), shared_or_none(bias), eps)
    if weight is not None and is_shared(weight, bias):
        return _OfPositions.apply(x, weight, bias, normalized_shape, eps, True)  # type: ignore[no-untyped-call,no-any-return]
    refuse_other_shapes("layer_norm", x, normalized_shape, weight=weight, bias=bias)
    y = F.layer_norm(x, list(normalized_shape), eps=eps)
    y = y if weight is None else y * with_dims(weight, x.dim() - 1)
    return y if bias is None else y + with_dims(bias, x.dim() - 1)


def rms_norm(
    x: Tensor,  # (B, *, *normalized_shape)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,  # (B, *normalized_shape)
    eps: float | None = None,
) -> Tensor:  # (B, *, *normalized_shape)
    """Divides each position by its root mean square over the last dimensions, then applies each sample's own weight.

    Args:
        x: `(B, *, *normalized_shape)`.
        normalized_shape: The sizes of the dimensions to normalize over.
        weight: `(B, *normalized_shape)`, or `None`; expanded over the batch (stride 0) it runs as one `F.rms_norm`.
        eps: Added to the mean square; `None` means the machine epsilon of the dtype that it is computed in.

    Returns:
        `(B, *, *normalized_shape)`.
    """
    if weight is None or is_constant(weight):
        return F.rms_norm(x, list(normalized_shape), shared_or_none(weight), eps)
    if is_shared(weight):
        return _OfPositions.apply(x, weight, None, normalized_shape, eps, False)  # type: ignore[no-untyped-call,no-any-return]
    refuse_other_shapes("rms_norm", x, normalized_shape, weight=weight)
    return F.rms_norm(x, list(normalized_shape), eps=eps) * with_dims(weight, x.dim() - 1)


class _OverLastDimensions(Expanded):
    normalized_shape: tuple[int, ...]
    positionwise: ClassVar[bool] = True

    @property
    def feature_dims(self) -> int:  # type: ignore[override]
        return len(self.normalized_shape)

    @property
    def batched_dims(self) -> int:  # type: ignore[override]
        return len(self.normalized_shape) + 1

    @property
    def ranks(self) -> dict[str, int]:  # type: ignore[override]
        return {"weight": len(self.normalized_shape), "bias": len(self.normalized_shape)}


@expands(nn.LayerNorm)
class LayerNorm(_OverLastDimensions, nn.LayerNorm):
    """`torch.nn.LayerNorm` with per-sample gradients; input `(B, *, *normalized_shape)`."""

    def expanded_forward(self, input: Tensor) -> Tensor:
        def op(x: Tensor) -> Tensor:
            return layer_norm(x, self.normalized_shape, self.expanded("weight"), self.expanded("bias"), self.eps)

        return self.by_sample(op, self.feature_dims, input=input)


@expands(nn.RMSNorm)
class RMSNorm(_OverLastDimensions, nn.RMSNorm):
    """`torch.nn.RMSNorm` with per-sample gradients; input `(B, *, *normalized_shape)`."""

    def expanded_forward(self, x: Tensor) -> Tensor:
        def op(x: Tensor) -> Tensor:
            return rms_norm(x, self.normalized_shape, self.expanded("weight"), self.eps)

        return self.by_sample(op, self.feature_dims, x=x)


# Norms over channels


def _beside_positions(
    parameter: Tensor,  # (B, C)
    x: Tensor,  # (B, C, *)
) -> Tensor:  # (B, C, 1, …)
    return parameter.reshape(*parameter.shape, *(1,) * (x.dim() - 2))


def _channels_fit(x: Tensor, *by_channel: Tensor | None) -> bool:
    """Whether all have as many channels as `x`, `(B, C, *)`, has."""
    return x.dim() > 1 and all(numbers is None or numbers.shape[-1] == x.shape[1] for numbers in by_channel)


def affine(
    x: Tensor,  # (B, C, *)
    weight: Tensor | None,  # (B, C)
    bias: Tensor | None,  # (B, C)
) -> Tensor:  # (B, C, *)
    """Applies weight and bias by plain operations, which work without samples, too."""
    y = x if weight is None else x * _beside_positions(weight, x)
    return y if bias is None else y + _beside_positions(bias, x)


def _as_one_sample(
    norm: Callable[..., Tensor],  # of (1, B * C, *), weight and bias (B * C,)
    x: Tensor,  # (B, C, *)
    weight: Tensor | None,  # (B, C)
    bias: Tensor | None,  # (B, C)
) -> Tensor:  # (B, C, *)
    """The norm of the batch as one sample, of whose channels each has its own weight and bias."""
    if x.shape[0] == 0:
        return affine(x, weight, bias)
    # contiguous, as torch's kernels crash or err on some other memory formats, and on one channel of stride 0
    one_sample = x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:]).contiguous()
    parameters = (None if parameter is None else parameter.reshape(-1).contiguous() for parameter in (weight, bias))
    return as_no_view(norm(one_sample, *parameters).view(x.shape))


def group_norm(
    x: Tensor,  # (B, C, *)
    num_groups: int,
    weight: Tensor | None = None,  # (B, C)
    bias: Tensor | None = None,  # (B, C)
    eps: float = 1e-5,
) -> Tensor:  # (B, C, *)
    """Normalizes each sample over groups of its channels, then applies each sample's own weight and bias.

    Args:
        x: `(B, C, *)`.
        num_groups: The number of groups that the channels are divided into.
        weight: `(B, C)`, or `None`.
        bias: `(B, C)`, or `None`.
        eps: Added to the variance.

    Returns:
        `(B, C, *)`.
    """
    refuse_other_channels("group_norm", x, weight, bias)
    if not _channels_fit(x, weight, bias) or x.shape[1] % num_groups:
        return F.group_norm(x, num_groups, shared_or_none(weight), shared_or_none(bias), eps)  # raises

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int = num_groups) -> Tensor:
        # not F.group_norm, which refuses groups of one value where it sees a single sample
        return torch.group_norm(x, groups, weight, bias, eps, torch.backends.cudnn.enabled)

    if is_constant(weight, bias):
        return norm(x, shared_or_none(weight), shared_or_none(bias))
    if cost.is_symbol(x.shape[0]):
        return affine(norm(x, None, None), weight, bias)
    return _as_one_sample(partial(norm, groups=x.shape[0] * num_groups), x, weight, bias)


def instance_norm(
    x: Tensor,  # (B, C, *)
    running_mean: Tensor | None = None,  # (C,)
    running_var: Tensor | None = None,  # (C,)
    weight: Tensor | None = None,  # (B, C)
    bias: Tensor | None = None,  # (B, C)
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # (B, C, *)
    """Normalizes each channel of each sample, then applies each sample's own weight and bias.

    Args:
        x: `(B, C, *)`.
        running_mean: `(C,)`, or `None`; with `use_input_stats` updated in place, as by `F.instance_norm`.
        running_var: `(C,)`, or `None`, likewise.
        weight: `(B, C)`, or `None`.
        bias: `(B, C)`, or `None`.
        use_input_stats: Whether to normalize by each sample's own statistics, not the running ones.
        momentum: The weight of the new value in the running statistics.
        eps: Added to the variance.

    Returns:
        `(B, C, *)`.
    """
    refuse_other_channels("instance_norm", x, weight, bias)
    statistics = (running_mean, running_var)
    cannot_be = prod(x.shape[2:]) == 1 if use_input_stats else any(running is None for running in statistics)
    if cannot_be or not _channels_fit(x, weight, bias, *statistics):
        parameters = shared_or_none(weight), shared_or_none(bias)
        return F.instance_norm(x, *statistics, *parameters, use_input_stats, momentum, eps)  # raises
    if not use_input_stats:
        return batch_norm(x, *statistics, weight, bias, eps=eps)
    if x.shape[0] and any(running is not None for running in statistics):
        F.instance_norm(x.detach(), *statistics, momentum=momentum)  # it alone updates them
    return group_norm(x, x.shape[1], weight, bias, eps)


def _mixing(who: str) -> PerSampleError:
    return complaint(
        who,
        "it normalizes by the statistics of the batch, which mix the samples, so that no gradient is one sample's own",
        "statistics that do not depend on the other samples",
        "Use GroupNorm in its place (GroupNorm(1, C) or GroupNorm(32, C)), as Opacus' ModuleValidator.fix(model) does "
        "before convert; or running statistics: .eval() with track_running_stats=True.",
    )


def batch_norm(
    x: Tensor,  # (B, C, *)
    running_mean: Tensor | None,  # (C,)
    running_var: Tensor | None,  # (C,)
    weight: Tensor | None = None,  # (B, C)
    bias: Tensor | None = None,  # (B, C)
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # (B, C, *)
    """Normalizes each channel by running statistics, then applies each sample's own weight and bias.

    Args:
        x: `(B, C, *)`.
        running_mean: `(C,)`.
        running_var: `(C,)`.
        weight: `(B, C)`, or `None`.
        bias: `(B, C)`, or `None`.
        training: Must be `False`.
        momentum: Without effect; as in `F.batch_norm`.
        eps: Added to the variance.

    Returns:
        `(B, C, *)`.

    Raises:
        PerSampleError: If `training`, where the statistics of the batch mix the samples.
    """
    if training:
        raise _mixing("batch_norm")
    refuse_other_channels("batch_norm", x, weight, bias)
    if running_mean is None or running_var is None or not _channels_fit(x, running_mean, running_var, weight, bias):
        parameters = shared_or_none(weight), shared_or_none(bias)
        return F.batch_norm(x, running_mean, running_var, *parameters, False, momentum, eps)  # raises
    dtypes = {tensor.dtype for tensor in (x, running_mean, running_var, weight, bias) if tensor is not None}
    if x.dim() > 3 and x.stride(1) == 1 != x.shape[1] and len(dtypes) == 1:
        return _by_channel(x, running_mean, torch.rsqrt(running_var + eps), weight, bias)
    mean, var = running_mean.repeat(x.shape[0]), running_var.repeat(x.shape[0])

    def norm(channels: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return with_contiguous_gradient(F.batch_norm(channels, mean, var, weight, bias, False, momentum, eps))

    return _as_one_sample(norm, x, weight, bias)


def with_contiguous_gradient(y: Tensor) -> Tensor:
    """Corrects a norm of one sample in eval mode: torch's derivative is wrong where a gradient arrives permuted."""
    if y.requires_grad:
        with unseen():  # a trace takes a hook for the user's, which may do anything
            y.register_hook(Tensor.contiguous)
    return y


def _by_channel(
    x: Tensor,  # (B, C, *)
    mean: Tensor,  # (C,)
    rstd: Tensor,  # (C,)
    weight: Tensor | None,  # (B, C)
    bias: Tensor | None,  # (B, C)
) -> Tensor:  # (B, C, *)
    """The norm in plain operations, which leave channels that stand last where they are."""
    scale = _beside_positions(rstd.expand(x.shape[:2]) if weight is None else rstd * weight, x)
    xhat = x - _beside_positions(mean[None], x)
    return xhat * scale if bias is None else torch.addcmul(_beside_positions(bias, x), xhat, scale)


@expands(nn.GroupNorm)
class GroupNorm(Expanded, nn.GroupNorm):
    """`torch.nn.GroupNorm` with per-sample gradients; input `(B, num_channels, *)`."""

    ranks: ClassVar[dict[str, int]] = {"weight": 1, "bias": 1}
    fixed_layout: ClassVar[bool] = True

    def expanded_forward(self, input: Tensor) -> Tensor:
        def op(x: Tensor) -> Tensor:
            result = group_norm(x, self.num_groups, self.expanded("weight"), self.expanded("bias"), self.eps)
            channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
            if channels_last is None or x.is_contiguous() or not x.is_contiguous(memory_format=channels_last):
                return result
            return result.contiguous(memory_format=channels_last)

        return self.by_sample(op, 1, input=input)


class _InstanceNorm(Expanded, nn.modules.instancenorm._InstanceNorm):
    ranks: ClassVar[dict[str, int]] = {"weight": 1, "bias": 1}
    fixed_layout: ClassVar[bool] = True

    @property
    def batched_dims(self) -> int:  # type: ignore[override]
        return int(self._get_no_batch_dim()) + 1  # type: ignore[no-untyped-call]

    def expanded_forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]

        def op(x: Tensor) -> Tensor:
            if x.shape[1] != self.num_features:
                return super(Expanded, self).forward(x)  # raises
            tensors = self.running_mean, self.running_var, self.expanded("weight"), self.expanded("bias")
            options = self.training or not self.track_running_stats, self.momentum or 0.0, self.eps
            return instance_norm(x, *tensors, *options)

        return self.by_sample(op, self._get_no_batch_dim(), input=input)  # type: ignore[no-untyped-call]


@expands(nn.InstanceNorm1d)
class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` with per-sample gradients; input `(B, num_features, L)`."""


@expands(nn.InstanceNorm2d)
class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` with per-sample gradients; input `(B, num_features, H, W)`."""


@expands(nn.InstanceNorm3d)
class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` with per-sample gradients; input `(B, num_features, D, H, W)`."""


class _BatchNorm(Expanded, nn.modules.batchnorm._BatchNorm):
    ranks: ClassVar[dict[str, int]] = {"weight": 1, "bias": 1}
    fixed_layout: ClassVar[bool] = True
    always_converted: ClassVar[bool] = True

    @property
    def mixes_samples(self) -> bool:
        """Whether it normalizes by the statistics of the batch."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def forward(self, input: Tensor) -> Tensor:
        # a layer without trainable parameters mixes the samples for all others
        if self._recorder is not None and torch.is_grad_enabled() and self.mixes_samples:
            raise _mixing(self.qualified_name)
        return super().forward(input)  # type: ignore[no-any-return]

    def expanded_forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]

        def op(x: Tensor) -> Tensor:
            tensors = self.running_mean, self.running_var, self.expanded("weight"), self.expanded("bias")
            return batch_norm(x, *tensors, training=self.mixes_samples, eps=self.eps)

        return self.by_sample(op, 1, input=input)


@expands(nn.BatchNorm1d)
class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with per-sample gradients, in eval mode; input `(B, num_features[, L])`."""


@expands(nn.BatchNorm2d)
class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with per-sample gradients, in eval mode; input `(B, num_features, H, W)`."""


@expands(nn.BatchNorm3d)
class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` with per-sample gradients, in eval mode; input `(B, num_features, D, H, W)`."""
