"""The rows of a convolution's weight, held as its input and the gradient of its output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.core.geometry import (
    Geometry,
    by_group,
    convolution,
    rows_by_columns,
    rows_by_groups,
    rows_by_moving,
    weight_gradient,
    windows,
)
from expanded_nn.core.products import Products
from expanded_nn.core.terms import Outer, Term


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
        of_gradient: int = 0,
    ) -> Patches:
        term = cls((g, x), row_shape, dtype, geometry=geometry)
        term.of_gradient = of_gradient
        return term

    def dense(self, out: Tensor | None = None) -> Tensor:
        if self._is_empty:
            return self.factors[0].new_zeros(self.batch, *self.row_shape, dtype=self.dtype)
        if self.fills_memory:
            g, x = self.weighted()
            return rows_by_columns(g, x, self.row_shape, self.geometry, out)
        if self.row_shape[1] == 1:
            g, x = self.weighted()
            return rows_by_moving(g, x, self.row_shape, self.geometry)
        g, x = self.unscaled()
        return rows_by_groups(g, x, self.row_shape, self.geometry, self.coefficient)

    @property
    def _is_empty(self) -> bool:
        """Whether there are no samples, channels or entries."""
        return not self.batch * prod(self.row_shape) or not self.factors[1].numel()

    @property
    def fills_memory(self) -> bool:
        if self._is_empty:
            return False
        if cost.is_symbol(self.batch):
            return True
        numel, channels, entries = self.batch * prod(self.row_shape), self.row_shape[0], prod(self.row_shape[2:])
        return cost.rows_by_columns(numel, self.numel(), channels, entries, self.dtype, self.factors[0].device.type)

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        g, x = self.weighted(weights)
        return weight_gradient(g, x, self.row_shape, self.geometry)

    def matvec(self, vector: Tensor) -> Tensor:
        return self.matvec_by_channel(vector).sum(1)

    def matvec_by_channel(self, vector: Tensor) -> Tensor:
        """`<row[b,o], vector[o]>` for each of the first dimension's channels, `(B, out)`."""
        g, x = self.unscaled()
        y = convolution(x, vector.reshape(self.row_shape), self.geometry)
        return (y * g).flatten(2).sum(2).mul_(self.coefficient)

    def squared_norms(self, products: Products | None = None) -> Tensor:
        return super().squared_norms() if self.norms_take_rows else self.inner(self)

    def inner(self, other: Term) -> Tensor:
        if not isinstance(other, Patches) or not self._by_pairs(other):
            return super().inner(other)
        entries = prod(self.padded_size) * prod(other.padded_size)
        if cost.inner_by_entries(entries, prod(self.row_shape[2:]) * self.positions * other.positions):
            inner, numel = inner_by_entries, entries
        else:
            inner, numel = inner_by_windows, prod(self.row_shape[1:]) * max(self.positions, other.positions)
        chunks = list(self.chunks(numel))
        other_chunks = chunks if other is self else other.chunks(numel)
        return torch.cat([inner(chunk, other_chunk) for chunk, other_chunk in zip(chunks, other_chunks, strict=True)])

    def gram(self, other: Term) -> Tensor:
        if isinstance(other, Patches) and self._gram_by_pairs(other):
            other_linear = as_linear(other)
            return torch.cat([as_linear(chunk).gram(other_linear) for chunk in self.chunks()])
        return super().gram(other)

    def gram_takes_rows(self, other: Term) -> bool:
        return not (isinstance(other, Patches) and self._gram_by_pairs(other))

    @property
    def norms_take_rows(self) -> bool:
        return not self._by_pairs(self)

    @property
    def positions(self) -> int:
        return prod(self.factors[0].shape[2:])

    @property
    def padded_size(self) -> tuple[int, ...]:
        """The spatial size of the input with its padding."""
        return tuple(n + 2 * p for n, p in zip(self.factors[1].shape[2:], self.geometry.padding, strict=True))

    def _by_pairs(self, other: Patches) -> bool:
        """Whether inner products are computed from pairs of positions."""
        return self._is_alike(other) and cost.inner_by_pairs(self.positions, other.positions, *self._sizes)

    def _gram_by_pairs(self, other: Patches) -> bool:
        fits = self._is_alike(other) and self.geometry.groups == 1
        return fits and cost.gram_by_pairs(self.positions, other.positions, *self._sizes)

    def _is_alike(self, other: Patches) -> bool:
        return self.geometry.groups == other.geometry.groups and self.row_shape == other.row_shape

    @property
    def _sizes(self) -> tuple[int, int]:
        """The sizes of a group as a linear map of a window, `(out / groups, in / groups * prod(kernel))`."""
        return self.row_shape[0] // self.geometry.groups, prod(self.row_shape[1:])


def inner_by_windows(term: Patches, other: Patches) -> Tensor:
    """`<row[b], other_row[b]>`, `(B,)`, from products of windows."""
    linear = as_linear(term)
    other_linear = linear if other is term else as_linear(other)
    return linear.inner(other_linear).reshape(term.batch, term.geometry.groups).sum(1)


def inner_by_entries(term: Patches, other: Patches) -> Tensor:
    """`<row[b], other_row[b]>`, `(B,)`, without windows: products of windows are sums of products of entries."""
    (g, x), (h, z) = term.unscaled(), other.unscaled()
    (x, x_geometry), (z, z_geometry) = term.geometry.padded(x), other.geometry.padded(z)
    groups, kernel = x_geometry.groups, term.row_shape[2:]
    entries = torch.bmm(by_group(x, groups).mT, by_group(z, groups))
    entries = entries.view(-1, *x.shape[2:], *z.shape[2:])
    strides, dilations = x_geometry.stride + z_geometry.stride, x_geometry.dilation + z_geometry.dilation
    sizes = (*g.shape[2:], *h.shape[2:])
    pairs = g.new_zeros(entries.shape[0], *sizes)
    for kernel_index in product(*map(range, kernel)):
        starts = [k * dilation for k, dilation in zip(kernel_index * 2, dilations, strict=True)]
        ranges = zip(starts, sizes, strides, strict=True)
        window = [slice(start, start + (t - 1) * stride + 1, stride) for start, t, stride in ranges]
        pairs += entries[(slice(None), *window)]
    gradients = torch.bmm(by_group(g, groups).mT, by_group(h, groups))
    inner = (gradients * pairs.view(gradients.shape)).sum((1, 2)).reshape(term.batch, groups).sum(1)
    return inner.mul_(term.coefficient).mul_(other.coefficient)


def as_linear(term: Patches) -> Outer:
    """Each group of each sample as a linear map: rows `(B * groups, out / groups, in / groups * prod(kernel))`."""
    g, x = term.unscaled()
    x_windows = windows(x, g.shape[2:], term.row_shape[2:], term.geometry)
    g = by_group(g, term.geometry.groups)
    columns = x_windows.reshape(g.shape[0], prod(term.row_shape[1:]), g.shape[2])
    return Outer((g.mT, columns.mT), (g.shape[1], columns.shape[1]), term.dtype, term.coefficient)
