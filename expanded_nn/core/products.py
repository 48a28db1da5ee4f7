"""The products of a sample's positions with each other, of which norms are made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from expanded_nn.core import cost


class Products:
    """The products of all positions of a factor with each other, kept for the next term that has the same factor.

    Queries, keys and values share their input, the weights of a recurrence the gradient of its gates. A term has two
    factors, so the products of the last two are kept.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, list[Tensor]]] = []  # a factor, which keeps its memory, and its products

    def of(self, factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The products of a factor `(B, T, features)`, computed in `dtype`, as panels of a symmetric matrix.

        A panel `(B, rows, stop)` has a few rows of the matrix, of which the last is `stop - 1`, up to its diagonal.
        """
        pair = next((p for p in self._pairs if p[1][0].dtype == dtype and _is_same_view(p[0], factor)), None)
        if pair is None:
            pair = factor, _by_panels(factor.to(dtype))
        self._pairs = [*(earlier for earlier in self._pairs if earlier is not pair), pair][-2:]
        return pair[1]


def _by_panels(x: Tensor) -> list[Tensor]:
    positions = x.shape[1]
    if not cost.is_product_of_positions_by_panels(positions):
        return [torch.bmm(x, x.mT)]
    stops = range(0, positions, -(-positions // cost.PANELS_OF_POSITIONS))
    return [torch.bmm(x[:, start:stop], x[:, :stop].mT) for start, stop in pairwise([*stops, positions])]


def sum_of_both(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:  # (B,)
    """The sum of the numbers of two symmetric matrices, given by panels, times each other."""
    return reduce(torch.add, [_sum(panel * other) for panel, other in zip(first, second, strict=True)])


def _sum(
    panel: Tensor,  # (B, rows, stop)
) -> Tensor:  # (B,)
    """What stands before the square at the diagonal stands a second time above it."""
    before = panel.shape[2] - panel.shape[1]
    return panel.sum((1, 2)) + panel[:, :, :before].sum((1, 2)) if before else panel.sum((1, 2))


def _is_same_view(factor: Tensor, other: Tensor) -> bool:
    """Whether two detached tensors are the same part of the same memory."""
    return (
        factor.untyped_storage() is other.untyped_storage()
        and factor.storage_offset() == other.storage_offset()
        and factor.shape == other.shape
        and factor.stride() == other.stride()
        and factor.dtype == other.dtype
    )
