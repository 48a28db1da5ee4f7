"""The rows of a convolution's weight, held as the gradient of its output and its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn._gemm import batched_product
from expanded_nn._terms import CHUNK_NUMEL, Outer, Term

aten = torch.ops.aten

COLUMNS_NUMEL = 1 << 18  # columns made at once: they stay in the cache
GROUPED_NUMEL = 1 << 20  # numbers in the samples of one grouped convolution, which copies them all
ROWS_PER_FACTOR = 8  # rows so many times larger than their factors are made from columns
MANY_CHANNELS, FEWER_ROWS_PER_FACTOR = 128, 2  # sooner, with so many channels


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over its input: one number a spatial dimension, and the groups of channels."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def dims(self) -> int:
        """The number of spatial dimensions."""
        return len(self.stride)

    def excess(self, size: Sequence[int], kernel: Sequence[int], positions: Sequence[int]) -> tuple[int, ...]:
        """How many entries at the end of each padded dimension of the input no kernel position reaches."""
        each = zip(size, self.padding, positions, self.stride, self.dilation, kernel, strict=True)
        return tuple(n + 2 * p - (t - 1) * s - d * (k - 1) - 1 for n, p, t, s, d, k in each)

    def padded(self, x: Tensor, cut: Sequence[int] | None = None) -> tuple[Tensor, Geometry]:
        """`x` with its padding, less `cut` at the end of each dimension, and the geometry without padding."""
        cut = cut or (0,) * self.dims
        if not any(self.padding) and not any(cut):
            return x, self
        ends = [(padding, padding - less) for padding, less in zip(self.padding, cut, strict=True)]
        return F.pad(x, [end for both in reversed(ends) for end in both]), replace(self, padding=(0,) * self.dims)


class Patches(Term):
    """The rows `(B, out, in / groups, *kernel)` of the weight of a convolution `x -> y`.

    `row[b,o,i,k] = sum_t g[b,o,t] x[b,i,stride*t+dilation*k-padding]`, where `g` is the gradient of `y`. The weight
    of a transposed convolution has such rows too: its input is their `g`, the gradient of its output their `x`.
    """

    def __init__(
        self,
        factors: Sequence[Tensor],
        row_shape: Sequence[int],
        dtype: torch.dtype,
        coefficient: float = 1.0,
        *,
        geometry: Geometry,
    ) -> None:
        super().__init__(factors, row_shape, dtype, coefficient)
        self.geometry = geometry

    @classmethod
    def of(
        cls,
        g: Tensor,  # (B, out, *positions)
        x: Tensor,  # (B, in, *size)
        row_shape: Sequence[int],
        geometry: Geometry,
        dtype: torch.dtype,
    ) -> Patches:
        return cls((g, x), row_shape, dtype, geometry=geometry)

    def remake(self, factors: Sequence[Tensor], coefficient: float, dtype: torch.dtype) -> Patches:
        return Patches(factors, self.row_shape, dtype, coefficient, geometry=self.geometry)

    def chunks(self, numel: int | None = None) -> Iterator[Patches]:
        return cast(Iterator[Patches], super().chunks(numel))

    def dense(self, out: Tensor | None = None) -> Tensor:
        g, x = self.factors
        kernel = _kernel_for(g, x, self.row_shape, self.dtype)
        if kernel is _rows_by_groups:
            g, x = self.unscaled()
            return _rows_by_groups(g, x, self.row_shape, self.geometry, self.coefficient)
        g, x = self.weighted()
        if kernel is _rows_by_columns:
            return _rows_by_columns(g, x, self.row_shape, self.geometry, out)
        return kernel(g, x, self.row_shape, self.geometry)

    @property
    def fills_memory(self) -> bool:
        g, x = self.factors
        return _kernel_for(g, x, self.row_shape, self.dtype) is _rows_by_columns

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        g, x = self.weighted(weights)
        return _weight_gradient(g, x, self.row_shape, self.geometry)

    def matvec(self, vector: Tensor) -> Tensor:
        g, x = self.unscaled()
        y = _convolution(x, vector.reshape(self.row_shape), self.geometry)
        return (y * g).flatten(1).sum(1).mul_(self.coefficient)

    def squared_norms(self) -> Tensor:
        return self.inner(self)

    def inner(self, other: Term) -> Tensor:
        if not isinstance(other, Patches) or not self._positions_are_fewer(other):
            return super().squared_norms() if other is self else super().inner(other)
        entries = prod(self.padded_size) * prod(other.padded_size)
        if entries < prod(self.row_shape[2:]) * self.positions * other.positions:
            inner, numel = _inner_by_entries, entries
        else:
            inner, numel = _inner_by_windows, prod(self.row_shape[1:]) * max(self.positions, other.positions)
        chunks = list(self.chunks(numel))
        others = chunks if other is self else other.chunks(numel)
        return torch.cat([inner(one, two) for one, two in zip(chunks, others, strict=True)])

    def gram(self, other: Term) -> Tensor:
        if isinstance(other, Patches) and self.geometry.groups == 1 and self._cost_by_position(other) < 1:
            theirs = as_linear(other)
            return torch.cat([as_linear(chunk).gram(theirs) for chunk in self.chunks()])
        return super().gram(other)

    @property
    def norms_take_rows(self) -> bool:
        return not self._positions_are_fewer(self)

    @property
    def positions(self) -> int:
        return prod(self.factors[0].shape[2:])

    @property
    def padded_size(self) -> tuple[int, ...]:
        """The spatial size of the input with its padding."""
        return tuple(n + 2 * p for n, p in zip(self.factors[1].shape[2:], self.geometry.padding, strict=True))

    def _positions_are_fewer(self, other: Patches) -> bool:
        return self._cost_by_position(other) < max(self.positions, other.positions)

    def _cost_by_position(self, other: Patches) -> float:
        """The cost of `<g h', x z'>` over all pairs of positions, where a product of dense rows costs 1."""
        groups = self.geometry.groups
        out, patch = self.row_shape[0] // groups, prod(self.row_shape[1:])
        if groups != other.geometry.groups or self.row_shape != other.row_shape or not out * patch:
            return inf
        return self.positions * other.positions * (out + patch) / (out * patch)


def _inner_by_windows(one: Patches, two: Patches) -> Tensor:
    """`<row[b], other_row[b]>`, `(B,)`, from products of windows."""
    mine = as_linear(one)
    theirs = mine if two is one else as_linear(two)
    return mine.inner(theirs).reshape(one.batch, one.geometry.groups).sum(1)


def _inner_by_entries(one: Patches, two: Patches) -> Tensor:
    """`<row[b], other_row[b]>`, `(B,)`, without windows: their products are sums of those of the inputs' entries."""
    (g, x), (h, z) = one.unscaled(), two.unscaled()
    (x, how), (z, other) = one.geometry.padded(x), two.geometry.padded(z)
    entries = torch.bmm(_by_group(x, how.groups).mT, _by_group(z, how.groups))
    entries = entries.view(-1, *x.shape[2:], *z.shape[2:])
    strides, dilations = how.stride + other.stride, how.dilation + other.dilation
    sizes = (*g.shape[2:], *h.shape[2:])
    windows = g.new_zeros(len(entries), *sizes)
    for place in product(*map(range, one.row_shape[2:])):
        starts = [k * dilation for k, dilation in zip(place * 2, dilations, strict=True)]
        moved = zip(starts, sizes, strides, strict=True)
        seen = [slice(start, start + (t - 1) * stride + 1, stride) for start, t, stride in moved]
        windows += entries[(slice(None), *seen)]
    gradients = torch.bmm(_by_group(g, how.groups).mT, _by_group(h, how.groups))
    inner = (gradients * windows.view(gradients.shape)).sum((1, 2)).reshape(one.batch, how.groups).sum(1)
    return inner.mul_(one.coefficient).mul_(two.coefficient)


def as_linear(term: Patches) -> Outer:
    """Each group of each sample as a linear map: rows `(B * groups, out / groups, in / groups * prod(kernel))`."""
    g, x = term.unscaled()
    windows = _windows(x, g.shape[2:], term.row_shape[2:], term.geometry)
    g = _by_group(g, term.geometry.groups)
    columns = windows.reshape(g.shape[0], prod(term.row_shape[1:]), g.shape[2])
    return Outer((g.mT, columns.mT), (g.shape[1], columns.shape[1]), term.dtype, term.coefficient)


def _kernel_for(g: Tensor, x: Tensor, row_shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    """What computes the rows.

    Measured on CPU cores, some 200 random shapes, float32: kernels with a group for each of a few samples cost 0.7 to
    1.6 times the batch gradient, where a loop over the samples, columns or a product for each entry of the kernel cost
    1.2 to 5 times. Exceptions: rows much larger than what they are made of, sooner where there are many channels to
    multiply each column with (columns, twice as fast); one channel a group (`g` moving over `x`, 25 times as fast for
    a depthwise 7 x 7); kernels of one entry, and dtypes other than float32 (columns, up to 100 times as fast).
    """
    if not g.shape[0] * prod(row_shape) or not x.numel():
        return _rows_of_nothing
    grouped = dtype == torch.float32 and g.device.type == "cpu" and prod(row_shape[2:]) > 1
    rows_per_factor = FEWER_ROWS_PER_FACTOR if row_shape[0] >= MANY_CHANNELS else ROWS_PER_FACTOR
    if not grouped or g.shape[0] * prod(row_shape) > rows_per_factor * (g.numel() + x.numel()):
        return _rows_by_columns
    return _rows_by_moving if row_shape[1] == 1 else _rows_by_groups


def _rows_by_columns(
    g: Tensor, x: Tensor, row_shape: tuple[int, ...], how: Geometry, out: Tensor | None = None
) -> Tensor:
    """The rows as products of `g` with the columns of a few samples at once."""
    rows = g.new_empty(g.shape[0], *row_shape) if out is None else out
    windows = _windows(x, g.shape[2:], row_shape[2:], how)
    g = _by_group(g, how.groups)
    by_group = rows.view(*g.shape[:2], prod(row_shape[1:]))
    size = max(1, (COLUMNS_NUMEL if g.device.type == "cpu" else CHUNK_NUMEL) // windows[0].numel())
    for start in range(0, len(windows), size):
        part = slice(start * how.groups, (start + size) * how.groups)
        columns = windows[start : start + size].reshape(-1, by_group.shape[2], g.shape[2])
        batched_product(g[part], columns.mT, by_group[part])
    return rows


def _rows_of_nothing(g: Tensor, x: Tensor, row_shape: tuple[int, ...], how: Geometry) -> Tensor:
    """The rows where there are no samples, channels or entries."""
    return g.new_zeros(g.shape[0], *row_shape)


def _rows_by_groups(g: Tensor, x: Tensor, row_shape: tuple[int, ...], how: Geometry, coefficient: float) -> Tensor:
    """The rows as the weight's gradient of one convolution with a group for each group of each of a few samples.

    They are copied from there, so that the coefficient costs nothing.
    """
    rows = g.new_empty(g.shape[0], *row_shape)
    size = max(1, GROUPED_NUMEL // (g[0].numel() + x[0].numel() + prod(row_shape)))
    for some_g, some_x, some_rows in zip(g.split(size), x.split(size), rows.split(size), strict=True):
        batch = len(some_g)
        some_g, some_x = (each.flatten(0, 1)[None].contiguous() for each in (some_g, some_x))
        shape = (batch * row_shape[0], *row_shape[1:])
        found = _weight_gradient(some_g, some_x, shape, replace(how, groups=batch * how.groups))
        torch.mul(found.reshape(some_rows.shape), coefficient, out=some_rows)
    return rows


def _rows_by_moving(g: Tensor, x: Tensor, row_shape: tuple[int, ...], how: Geometry) -> Tensor:
    """The rows of one channel a group as the output of a convolution whose kernels are `g`."""
    batch, kernel = len(g), row_shape[2:]
    x, g = x.flatten(0, 1)[None].contiguous(), g.flatten(0, 1)[:, None].contiguous()
    how = Geometry(how.dilation, how.padding, how.stride, batch * how.groups)
    return cropped(_convolution(x, g, how)[0], kernel).reshape(batch, *row_shape).contiguous()


def _convolution(x: Tensor, weight: Tensor, how: Geometry) -> Tensor:
    still = (0,) * how.dims
    return torch.convolution(x, weight, None, how.stride, how.padding, how.dilation, False, still, how.groups)


def _weight_gradient(g: Tensor, x: Tensor, shape: tuple[int, ...], how: Geometry) -> Tensor:
    """The gradient of a convolution's weight by torch's own fused kernel."""
    if not g.numel():
        return g.new_zeros(shape)
    weight, still = g.new_empty(shape), (0,) * how.dims
    gradients = aten.convolution_backward(
        g, x, weight, None, how.stride, how.padding, how.dilation, False, still, how.groups, (False, True, False)
    )
    return cast(Tensor, gradients[1])


def cropped(
    x: Tensor,  # (B, C, *larger)
    size: Sequence[int],
) -> Tensor:  # (B, C, *size)
    """The first entries of each spatial dimension."""
    for dim, length in enumerate(size, x.dim() - len(size)):
        x = x.narrow(dim, 0, length)
    return x


def _by_group(
    g: Tensor,  # (B, out, *positions)
    groups: int,
) -> Tensor:  # (B * groups, out / groups, T)
    return g.reshape(g.shape[0] * groups, g.shape[1] // groups, prod(g.shape[2:]))


def _windows(
    x: Tensor,  # (B, in, *size)
    positions: Sequence[int],
    kernel: Sequence[int],
    how: Geometry,
) -> Tensor:  # (B, in, *kernel, *positions)
    """What each entry of the kernel sees at each position, a view of the padded input."""
    x, how = how.padded(x)
    each = zip(positions, kernel, how.stride, how.dilation, strict=True)
    for dim, (t, k, stride, dilation) in enumerate(each, 2):
        x = x.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation].narrow(dim, 0, t)
    last = range(2 + how.dims, 2 + 2 * how.dims)
    return x.permute(0, 1, *last, *range(2, 2 + how.dims))
