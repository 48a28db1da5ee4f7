"""Which rows are stale: the gradient that they add up to is no longer in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.rounding import OF_MULTIPLES
from expanded_nn.common.traced import look_first, refuse_values
from expanded_nn.factored import as_factored
from expanded_nn.recording.leaf import Leaf, vanishes
from expanded_nn.recording.sharded import is_shard, true_on_all_ranks


def stale(leaves: Iterable[Leaf], name_of: Callable[[Tensor], str], *, beside_held: bool = False) -> list[Leaf]:
    """The leaves whose `.grad` was cleared since it was noted, so that the rows held are no part of it.

    The first line that fits counts:

    | `.grad`                                            | rows                                                  |
    |----------------------------------------------------|-------------------------------------------------------|
    | `None`, or `grad_sample` was set by the user       | stale                                                 |
    | zero, scaled or clipped before, and `beside_held`  | refused, as it may be a sum that cancels. Held, if    |
    |                                                    | all rows are zero                                     |
    | zero, and the rows do not add up to zero           | stale                                                 |
    | zero, and the rows add up to zero, too             | held, as the rows cancel. Stale, if another `.grad`   |
    |                                                    | is a stale zero and none is held: all were cleared    |
    |                                                    | together                                              |
    | another tensor, no multiple of the sum of the rows | stale: it was set anew. Refused, if the one before it |
    |                                                    | was scaled, or if it is a part of a larger tensor and |
    |                                                    | there are several processes. A shard's is held, as    |
    |                                                    | its sum is known on all ranks together only           |
    | changed in place, no multiple of the sum           | refused: they may be a part of it or not. Held, if it |
    |                                                    | was scaled or clipped before, or lacks rows, so that  |
    |                                                    | they are refused where they are asked for             |
    | any other                                          | held: the same tensor, or a scaled copy of it         |

    Args:
        leaves: Those that have rows.
        name_of: Gives the name of a parameter, for the error.
        beside_held: Whether these are only a part of the leaves, and rows of others are known to be held.

    Raises:
        PerSampleError: If a `.grad` was changed in place so that nothing tells whether the rows are a part of it.
    """
    by_verdict: dict[_Verdict, list[Leaf]] = {verdict: [] for verdict in _Verdict}
    for leaf in leaves:
        by_verdict[_verdict(leaf, name_of, beside_held=beside_held)].append(leaf)
    stale_leaves, zeros = by_verdict[_Verdict.STALE], by_verdict[_Verdict.ZERO]
    zeros.sort(key=lambda leaf: cast(Tensor, leaf.published.rows).shape[1:].numel())  # in the same order on all ranks
    some_held = beside_held or bool(by_verdict[_Verdict.HELD])
    if not some_held and any(not _rows_cancel(leaf) for leaf in zeros):  # one that was cleared tells of all
        return stale_leaves + zeros
    return stale_leaves + [leaf for leaf in zeros if not _rows_cancel(leaf)]


class _Verdict(Enum):
    """What a `.grad` alone tells of the rows; `ZERO` is for the rows, and the other parameters, to decide."""

    STALE, ZERO, HELD = range(3)


def _verdict(leaf: Leaf, name_of: Callable[[Tensor], str], *, beside_held: bool) -> _Verdict:
    """The first line of the table that fits, up to what zeros tell of each other."""
    parameter = leaf.visible_parameter()
    if parameter is None or parameter.grad is None or leaf.was_reset():
        return _Verdict.STALE
    if vanishes(parameter.grad):
        if not beside_held or not leaf.was_scaled_or_clipped():
            return _Verdict.ZERO
        rows = leaf.published.rows
        if true_on_all_ranks(rows is None or not bool(rows.norm()), parameter):
            return _Verdict.HELD
        raise _in_doubt(
            name_of(parameter),
            "is zero, which may be a sum that cancels",
            "gradients that were all cleared together, or set to None, or left alone",
        )
    if leaf.notes.last is None or leaf.grad_is_as_noted() or is_shard(parameter):
        return _Verdict.HELD
    refuse_values("a gradient is changed between two backwards")
    if _is_multiple(parameter.grad, *_sum_of_rows(leaf)):
        leaf.notes.is_scaled = True
        return _Verdict.HELD
    if leaf.grad_is_another():
        if parameter.grad._is_view() and dist.is_available() and dist.is_initialized():
            raise _in_doubt(
                name_of(parameter),
                "is a part of a larger tensor, as where DistributedDataParallel has made its buckets anew",
                "the tensor that was in .grad",
                "Give DistributedDataParallel gradient_as_bucket_view=False, or put all backwards of a step but the "
                "last one into its no_sync().",
            )
        if not leaf.was_scaled_or_clipped():
            return _Verdict.STALE
    elif leaf.notes.has_foreign_part or leaf.was_scaled_or_clipped() or leaf.lacks_rows():
        return _Verdict.HELD
    raise _in_doubt(
        name_of(parameter),
        "is no multiple of the per-sample gradients held",
        "a .grad that was cleared, scaled or left alone before the next backward adds to it",
    )


def holds_more(leaf: Leaf) -> bool:
    """Whether `.grad` is not the sum of rows, nor that sum scaled: something was in it before, or came after them."""
    grad = leaf.grad
    if grad is None or leaf.published.rows is None or is_shard(grad) or leaf.was_reset():
        return False
    if leaf.notes.has_foreign_part:  # it may be no more than the rounding of gradients that cancelled
        if vanishes(grad):
            return False
        total, rounding = _sum_of_rows(leaf)
        return grad.shape != total.shape or bool((grad.detach().to_dense() - total).norm() > rounding)
    if leaf.was_scaled_or_clipped() or leaf.grad_is_as_noted() or leaf.notes.last is None or vanishes(grad):
        return False
    total, rounding = _sum_of_rows(leaf)
    return bool(total.norm() > rounding) and not _is_multiple(grad, total, rounding)  # rows that cancel tell nothing


_OF_CHANGES = "Clear it, optimizer.zero_grad(), or change it once all backwards of the step are done."


def _in_doubt(where: str, state: str, wanted: str, remedy: str = _OF_CHANGES) -> PerSampleError:
    return complaint(
        where,
        f"its .grad was changed since the last backward, and {state}, so that the rows may or may not be a part of it",
        wanted,
        remedy,
    )


def _sum_of_rows(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """What the rows held add up to in `.grad`, and a bound on the norm of its rounding error."""
    rows = leaf.published.rows
    assert rows is not None
    sizes = [pass_.batch for pass_ in leaf.published.passes]
    scales = [size if leaf.scales_rows else 1 for size in sizes for _ in range(size)]
    weights = torch.tensor(scales, dtype=torch.float64, device=rows.device).reciprocal()
    with torch.no_grad():
        factored, weights = as_factored(rows.detach()), weights.to(rows.dtype)
        total = factored.weighted_sum(weights)
        size = factored.sum_of_magnitudes(weights).norm()  # the rows' own norm is small where their terms cancel
    epsilon = torch.finfo(rows.dtype).eps
    return total, (size * epsilon + _rounding_of_smallest(total)) * 8 * max(1, rows.shape[0])


def _rounding_of_smallest(x: Tensor) -> float:
    """A bound on the norm of the rounding of numbers near zero, whose precision is absolute; it matters in float16."""
    known = torch.finfo(x.dtype)
    return float(known.tiny * known.eps * x.numel() ** 0.5)


def _rows_cancel(leaf: Leaf) -> bool:
    """Whether a zero `.grad` may be the sum of rows that cancel."""
    if leaf.notes.has_foreign_part or leaf.notes.is_scaled:
        return False  # rows that cancel would leave the foreign part, or what was taken by scaling: it was cleared
    grad, clipped = leaf.clipped_grad, leaf.notes.clipped
    if grad is not None and clipped is not None and not clipped.is_as_it_was(grad):
        return False  # the sum of the rows says nothing about a `.grad` that was changed after clipping had set it
    look_first()
    refuse_values("it sets a gradient to zero whose per-sample gradients are held (optimizer.zero_grad() clears both)")
    total, rounding = _sum_of_rows(leaf)
    return true_on_all_ranks(bool(total.norm() <= rounding), leaf.visible_parameter())


def _is_multiple(grad: Tensor, total: Tensor, rounding: Tensor) -> bool:
    """Whether a gradient is a sum times a number, as one that was scaled is.

    `rounding` bounds the norm of the sum's rounding error.
    """
    grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
    if grad.shape != total.shape:
        return False
    wide = torch.promote_types(torch.promote_types(grad.dtype, total.dtype), torch.float32)
    own, total = grad.to(wide), total.to(wide)  # in float16 products of small numbers are zero
    size, length = own.norm(), total.norm()
    if not bool(length > rounding):
        return bool(size <= rounding)  # both are rounding noise, of rows that cancel
    factor = torch.sum(own * total.conj()) / length.square()
    of_grad = OF_MULTIPLES.of(grad.dtype, float(size)) + 8 * _rounding_of_smallest(grad)
    return bool((own - factor * total).norm() <= rounding / length * size + of_grad)
