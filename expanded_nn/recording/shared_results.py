"""Results that all samples share, given once per sample, of which the model then takes a part as if they were one.

A table of positions that is looked up by an index `(1, T)` comes as `(B, T, dim)`. In the plain model it is
`(1, T, dim)`, so that `table(index)[0]` is harmless there; here it would take the first sample's copy for all of them,
and one row would get the gradient of all. The graph shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from expanded_nn.recording.backward import graph_of

_SAME = ("CloneBackward", "ToCopyBackward", "AliasBackward", "UnsafeViewBackward")
# operations that keep only some of what is in a dimension, or mix it
_TAKE = (
    *("SelectBackward", "UnbindBackward", "IndexSelectBackward", "SplitBackward", "SplitWithSizesBackward"),
    *("MeanBackward1", "SumBackward1", "AmaxBackward", "AminBackward", "MaxBackward0", "MinBackward0", "ProdBackward1"),
    *("LogsumexpBackward", "LinalgVectorNormBackward", "StdBackward", "VarBackward", "SliceBackward"),
)


class SharedResult(NamedTuple):
    """What a layer has returned for an input that all samples share.

    Attributes:
        layer: The layer.
        node: Its node in the graph.
        dim: Where the samples stand.
        rank: How many dimensions it has.
    """

    layer: nn.Module
    node: Any
    dim: int
    rank: int


def taken_apart(results: Sequence[SharedResult], ends: Iterable[Tensor], batch: int) -> tuple[nn.Module, str] | None:
    """The first layer whose result is taken apart along the samples, and the operation that does so.

    Args:
        results: What layers have returned for inputs that all samples share.
        ends: What the forward returns.
        batch: B.
    """
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
                after = _dim_after(consumer, name, dim, rank)
                if after is not None:
                    waiting.append((consumer, after, rank + name.startswith("Unsqueeze")))
    return None


def _takes(node: Any, name: str, dim: int, rank: int, batch: int) -> bool:
    if name.startswith("IndexBackward"):
        indices = node._saved_indices
        return len(indices) > dim and indices[dim] is not None
    if not name.startswith(_TAKE):
        return False
    saved = node._saved_dim
    if dim not in [_signed(number) % rank for number in ([saved] if isinstance(saved, int) else saved or [])]:
        return False
    if name.startswith("SliceBackward"):
        return len(range(*slice(_signed(node._saved_start), _signed(node._saved_end)).indices(batch))) < batch
    return True


def _signed(number: int) -> int:
    """A negative number, which torch saves as one without a sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _dim_after(node: Any, name: str, dim: int, rank: int) -> int | None:
    """Where the samples stand behind an operation that only rearranges; `None` behind any other."""
    if name.startswith(_SAME):
        return dim
    if name.startswith("UnsqueezeBackward"):
        return dim + 1 if _signed(node._saved_dim) % (rank + 1) <= dim else dim
    if name.startswith("TransposeBackward"):
        first, second = _signed(node._saved_dim0) % rank, _signed(node._saved_dim1) % rank
        return second if dim == first else first if dim == second else dim
    if name.startswith("PermuteBackward"):
        return [_signed(number) % rank for number in node._saved_dims].index(dim)
    return None
