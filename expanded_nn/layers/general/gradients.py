"""Derivatives of a module's results, and whether those that were found in two ways are the same but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import autocast_dtype, unseen
from expanded_nn.common.rounding import OF_COARSE_GRADIENTS, OF_GRADIENTS, OF_ROWS
from expanded_nn.core import cost
from expanded_nn.factored import FactoredTensor, as_factored

Pair = tuple[Tensor, Tensor]


class Verdict(Enum):
    """Whether the forward on the whole batch gives what the samples give alone; unclear if the rows are zeros."""

    RIGHT, UNCLEAR, WRONG = range(3)


def derivatives(results: list[Any], sources: list[Tensor]) -> list[Tensor | None] | None:
    """Of a random combination of all numbers in the results; `None` if that fails."""
    ends = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    weights = random_numbers([result.shape for result in ends], ends)
    try:
        found = torch.autograd.grad(ends, sources, weights, allow_unused=True) if sources else ()
    except RuntimeError:  # the user's own backward says so where it comes to one
        return None
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in found]


def as_compared(found: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """Derivatives in the form in which their rows are compared; see `_as_seen`."""
    return None if found is None else list(map(_as_seen, found))


def _paired(wanted: list[Tensor | None], given: list[Tensor | None]) -> list[Pair | None]:
    """Pairs of derivatives; zeros in place of one that is lacking, `None` in place of a pair without numbers."""
    pairs: list[Pair | None] = []
    for expected, actual in zip(wanted, given, strict=True):
        there = next((grad for grad in (expected, actual) if grad is not None and grad.numel()), None)
        if there is None:
            pairs.append(None)
            continue
        zeros = torch.zeros_like(there)
        pairs.append((zeros if expected is None else expected, zeros if actual is None else actual))
    return pairs


def _largest(pairs: Sequence[Pair | None]) -> float:
    return max((float(grad.abs().max()) for pair in pairs if pair is not None for grad in pair), default=0.0)


def are_alike(wanted: list[Tensor | None], given: list[Tensor | None], size: float) -> bool:
    """Whether gradients are the same but for rounding, of themselves or of inputs of such a size.

    Each is measured by its own size. Where one is not finite, they count as the same, as nothing can tell.
    """
    pairs = _paired(wanted, given)
    size = max(size, _largest(pairs))
    if not size < float("inf"):
        return True
    for expected, actual in filter(None, pairs):
        dtype = _computed_in(expected)
        bound = OF_GRADIENTS if torch.finfo(dtype).eps < 1e-3 else OF_COARSE_GRADIENTS
        far = float(torch.linalg.vector_norm(expected - actual))
        own_size = max(float(torch.linalg.vector_norm(grad)) for grad in (expected, actual))
        if far > bound.of(dtype, own_size, size * expected.numel() ** 0.5):
            return False
    return True


def compared_rows(wanted: list[Tensor | None], given: list[Tensor | None], is_own: list[bool]) -> Verdict:
    """Whether rows are the same but for rounding; unclear where rows of the module's own parameters are zero."""
    pairs, verdict = _paired(wanted, given), Verdict.RIGHT
    size = _largest(pairs)
    if not size < float("inf"):
        return Verdict.UNCLEAR
    for pair, own in zip(pairs, is_own, strict=True):
        if pair is None:
            continue
        expected, actual = pair
        far, scale, dtype = float((expected - actual).abs().max()), float(expected.abs().max()), _computed_in(expected)
        if far > OF_ROWS.of(dtype, scale, size):
            return Verdict.WRONG
        if own and (far > OF_ROWS.of(dtype, scale) or scale == 0):
            verdict = Verdict.UNCLEAR
    return verdict


def _computed_in(gradient: Tensor) -> torch.dtype:
    """The dtype whose precision a gradient has: under autocast another one than its own."""
    lower = autocast_dtype(gradient.device.type) if gradient.dtype is torch.float32 else None
    return lower or gradient.dtype


def _as_seen(rows: Tensor | None) -> Tensor | None:
    """The rows; if they are very many numbers, their inner products with some directions."""
    if rows is None or cost.compares_rows(rows.numel()):
        return rows.dense() if isinstance(rows, FactoredTensor) else rows
    directions = random_numbers([rows.shape[1:]] * 4, [rows] * 4, seed=1)
    return torch.stack([as_factored(rows).matvec(direction) for direction in directions])


def random_numbers(shapes: Sequence[Sequence[int]], like: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """The same random numbers each time, also where those that the forward draws are fixed to one."""
    generator = torch.Generator().manual_seed(seed)
    with unseen():
        drawn = [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes]
    return [numbers.to(other) for numbers, other in zip(drawn, like, strict=True)]
