"""How a convolution's kernel moves over its input, and the ways to the gradient of its weight for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.core import cost


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over its input: a number for each spatial dimension, and the groups of channels."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def dims(self) -> int:
        """The number of spatial dimensions."""
        return len(self.stride)

    def arguments(self, output_padding: tuple[int, ...] | None = None) -> tuple[Any, ...]:
        """What torch's operators take after the tensors; the convolution is transposed if it has an output padding."""
        transposed, added = output_padding is not None, output_padding or (0,) * self.dims
        return self.stride, self.padding, self.dilation, transposed, added, self.groups

    def excess(self, size: Sequence[int], kernel: Sequence[int], positions: Sequence[int]) -> tuple[int, ...]:
        """How many entries at the end of each padded dimension of the input no kernel position reaches."""
        numbers = zip(size, self.padding, positions, self.stride, self.dilation, kernel, strict=True)
        return tuple(n + 2 * p - (t - 1) * s - d * (k - 1) - 1 for n, p, t, s, d, k in numbers)

    def padded(self, x: Tensor, cut: Sequence[int] | None = None) -> tuple[Tensor, Geometry]:
        """`x` with its padding, less `cut` at the end of each dimension, and the geometry without padding."""
        cut = cut or (0,) * self.dims
        if not any(self.padding) and not any(cut):
            return x, self
        ends = [(padding, padding - less) for padding, less in zip(self.padding, cut, strict=True)]
        return F.pad(x, [end for pair in reversed(ends) for end in pair]), replace(self, padding=(0,) * self.dims)


def rows_by_columns(
    g: Tensor,  # (B, out, *positions)
    x: Tensor,  # (B, in, *size)
    row_shape: tuple[int, ...],
    geometry: Geometry,
    out: Tensor | None = None,  # (B, *row_shape)
) -> Tensor:
    """The rows as products of `g` with the windows of the input as columns, for a few samples at once."""
    rows = g.new_empty(g.shape[0], *row_shape) if out is None else out
    x_windows = windows(x, g.shape[2:], row_shape[2:], geometry)
    g = by_group(g, geometry.groups)
    rows_by_group = rows.view(*g.shape[:2], prod(row_shape[1:]))
    if cost.is_symbol(x_windows.shape[0]):
        columns = x_windows.reshape(g.shape[0], rows_by_group.shape[2], g.shape[2])
        return torch.bmm(g, columns.mT).view(rows.shape)
    size = cost.at_once(x_windows[0].numel(), cost.COLUMNS_NUMEL if g.device.type == "cpu" else cost.CHUNK_NUMEL)
    for start in range(0, x_windows.shape[0], size):
        chunk = slice(start * geometry.groups, (start + size) * geometry.groups)
        columns = x_windows[start : start + size].reshape(-1, rows_by_group.shape[2], g.shape[2])
        torch.bmm(g[chunk], columns.mT, out=rows_by_group[chunk])
    return rows


def rows_by_groups(g: Tensor, x: Tensor, row_shape: tuple[int, ...], geometry: Geometry, coefficient: float) -> Tensor:
    """The rows as the gradient of the weight of a convolution that has the groups of a few samples as its groups.

    The rows are copied from it, and multiplied by the coefficient meanwhile.
    """
    rows = g.new_empty(g.shape[0], *row_shape)
    size = cost.at_once(g[0].numel() + x[0].numel() + prod(row_shape), cost.GROUPED_NUMEL)
    for chunk_g, chunk_x, chunk_rows in zip(g.split(size), x.split(size), rows.split(size), strict=True):
        torch.mul(rows_at_once(chunk_g, chunk_x, row_shape, geometry), coefficient, out=chunk_rows)
    return rows


def rows_at_once(g: Tensor, x: Tensor, row_shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """`rows_by_groups`, for all samples at once."""
    batch = g.shape[0]
    joined_g, joined_x = (f.reshape(1, batch * f.shape[1], *f.shape[2:]).contiguous() for f in (g, x))
    shape = (batch * row_shape[0], *row_shape[1:])
    gradient = weight_gradient(joined_g, joined_x, shape, replace(geometry, groups=batch * geometry.groups))
    return gradient.reshape(batch, *row_shape)


def rows_by_moving(g: Tensor, x: Tensor, row_shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """The rows, where a group has one input channel, as the output of a convolution with `g` as its kernels."""
    batch, kernel = g.shape[0], row_shape[2:]
    x, g = x.flatten(0, 1)[None].contiguous(), g.flatten(0, 1)[:, None].contiguous()
    moving = Geometry(geometry.dilation, geometry.padding, geometry.stride, batch * geometry.groups)
    return cropped(convolution(x, g, moving)[0], kernel).reshape(batch, *row_shape).contiguous()


def convolution(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Torch's convolution, with one weight for all samples."""
    return torch.convolution(x, weight, None, *geometry.arguments())


def weight_gradient(g: Tensor, x: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """The gradient of a convolution's weight by torch's own fused kernel."""
    output_mask = (False, True, False)
    gradients = torch.ops.aten.convolution_backward(g, x, g.new_empty(shape), None, *geometry.arguments(), output_mask)
    return cast(Tensor, gradients[1])


def cropped(
    x: Tensor,  # (B, C, *larger)
    size: Sequence[int],
) -> Tensor:  # (B, C, *size)
    """The first entries of each spatial dimension."""
    for dim, length in enumerate(size, x.dim() - len(size)):
        x = x.narrow(dim, 0, length)
    return x


def by_group(
    g: Tensor,  # (B, out, *positions)
    groups: int,
) -> Tensor:  # (B * groups, out / groups, T)
    """Each group of channels as a sample of its own, all positions as one dimension."""
    return g.reshape(g.shape[0] * groups, g.shape[1] // groups, prod(g.shape[2:]))


def windows(
    x: Tensor,  # (B, in, *size)
    positions: Sequence[int],
    kernel: Sequence[int],
    geometry: Geometry,
) -> Tensor:  # (B, in, *kernel, *positions)
    """What each entry of the kernel sees at each position, a view of the padded input."""
    x, geometry = geometry.padded(x)
    numbers = zip(positions, kernel, geometry.stride, geometry.dilation, strict=True)
    for dim, (t, k, stride, dilation) in enumerate(numbers, 2):
        x = x.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation].narrow(dim, 0, t)
    last = range(2 + geometry.dims, 2 + 2 * geometry.dims)
    return x.permute(0, 1, *last, *range(2, 2 + geometry.dims))
