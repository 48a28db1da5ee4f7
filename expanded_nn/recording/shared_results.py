"""Results that all samples share, and of which the model takes a part.

A table of positions that is looked up by an index `(1, T)` gives `(1, T, dim)` in the plain model, and `(B, T, dim)` in
per-sample mode. So `table(index)[0]`, which is harmless in the plain model, would take the first sample's copy for all
samples, and one row would get the gradient of all. The graph shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from expanded_nn.recording.backward import graph_of

_SAME = ("CloneBackward", "ToCopyBackward", "AliasBackward", "UnsafeViewBackward")
# operations that take a part of a dimension, or reduce it
_REDUCE = (
    *("MeanBackward1", "SumBackward1", "AmaxBackward", "AminBackward", "MaxBackward0", "MinBackward0", "ProdBackward1"),
    *("LogsumexpBackward", "LinalgVectorNormBackward", "StdBackward", "VarBackward"),
)
_SHORTEN = ("IndexSelectBackward", "SplitBackward", "SplitWithSizesBackward", "SliceBackward")
_TAKE = ("SelectBackward", "UnbindBackward", *_SHORTEN, *_REDUCE)


class SharedResult(NamedTuple):
    """A result of a layer for an input that all samples share: its node in the graph, and where its samples stand."""

    layer: nn.Module
    node: Any
    dim: int  # of the samples
    rank: int  # the number of dimensions


def taken_apart(results: Sequence[SharedResult], ends: Iterable[Tensor], batch: int) -> tuple[nn.Module, str] | None:
    """The first layer whose result is taken apart along the samples on the way to `ends`, and by which operation."""
    consumers: dict[Any, list[Any]] = {}
    for end in ends:
        for node in graph_of(end.grad_fn):
            for parent, _ in node.next_functions:
                if parent is not None:
                    consumers.setdefault(parent, []).append(node)
    for result in results:
        waiting = [(result.node, result.dim, result.rank)]
        while waiting:
            node, dim, rank = waiting.pop()
            for consumer in consumers.get(node, ()):
                name = consumer.name()
                if _takes(consumer, name, dim, rank, batch):
                    return result.layer, name.rstrip("01").removesuffix("Backward").lower()
                after = _after(consumer, name, dim, rank)
                if after is not None:
                    waiting.append((consumer, *after))
    return None


def _takes(node: Any, name: str, dim: int, rank: int, batch: int) -> bool:
    if name.startswith("IndexBackward"):
        indices = node._saved_indices
        return len(indices) > dim and indices[dim] is not None
    if not name.startswith(_TAKE):
        return False
    if dim not in _dims(node, rank):
        return False
    if name.startswith("SliceBackward"):
        return len(range(*slice(_signed(node._saved_start), _signed(node._saved_end)).indices(batch))) < batch
    return True


def _dims(node: Any, rank: int) -> list[int]:
    """The dimensions that an operation is about."""
    saved = node._saved_dim
    return [_signed(number) % rank for number in ([saved] if isinstance(saved, int) else saved or [])]


def _signed(number: int) -> int:
    """A negative number, which torch saves as one without a sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _after(node: Any, name: str, dim: int, rank: int) -> tuple[int, int] | None:
    """The dimension of the samples, and the rank, after an operation that leaves the samples whole; `None` otherwise.

    It rearranges, or takes a part of another dimension.
    """
    if name.startswith((*_SAME, *_SHORTEN)):
        return dim, rank
    if name.startswith(_TAKE):
        gone = [] if getattr(node, "_saved_keepdim", False) else _dims(node, rank)
        return dim - sum(gone_dim < dim for gone_dim in gone), rank - len(gone)
    if name.startswith("UnsqueezeBackward"):
        return dim + (_signed(node._saved_dim) % (rank + 1) <= dim), rank + 1
    if name.startswith("TransposeBackward"):
        first, second = _signed(node._saved_dim0) % rank, _signed(node._saved_dim1) % rank
        return second if dim == first else first if dim == second else dim, rank
    if name.startswith("PermuteBackward"):
        return [_signed(number) % rank for number in node._saved_dims].index(dim), rank
    return None
