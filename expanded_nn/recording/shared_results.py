"""Results that all samples share, and of which the model takes a part.

A table of positions that is looked up by an index `(1, T)` gives `(1, T, dim)` in the plain model, and `(B, T, dim)` in
per-sample mode. So `table(index)[0]`, which is harmless in the plain model, would take the first sample's copy for all
samples, and one row would get the gradient of all. The graph shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from expanded_nn.recording.backward import graph_of, saved_dims, saved_number, turned_dims
from expanded_nn.recording.expand import is_expansion

_SAME = ("CloneBackward", "ToCopyBackward", "AliasBackward")
_ELEMENTWISE = tuple(
    f"{name}Backward"
    for name in (
        *("Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Pow", "Abs", "Exp", "Log", "Sqrt", "Rsqrt", "Sin", "Cos"),
        *("Tanh", "Sigmoid", "Relu", "Gelu", "Silu", "Elu", "LeakyRelu", "Softplus", "Clamp", "NativeDropout"),
    )
)
# operations that take a part of a dimension, reduce it, or join what is in it
_REDUCE = (
    *("MeanBackward", "SumBackward", "AmaxBackward", "AminBackward", "MaxBackward", "MinBackward", "ProdBackward"),
    *("LogsumexpBackward", "LinalgVectorNormBackward", "NormBackward", "StdBackward", "VarBackward"),
    *("StdMeanBackward", "VarMeanBackward", "MedianBackward", "KthvalueBackward", "ModeBackward"),
)
_SHORTEN = ("IndexSelectBackward", "SplitBackward", "SplitWithSizesBackward", "SliceBackward", "TopkBackward")
_JOIN = (
    *("SoftmaxBackward", "LogSoftmaxBackward", "CumsumBackward", "CumprodBackward", "LogcumsumexpBackward"),
    *("CummaxBackward", "CumminBackward", "FlipBackward", "RollBackward", "SortBackward", "GatherBackward"),
    *("CatBackward", "UnfoldBackward"),
)
_TAKE = ("SelectBackward", "UnbindBackward", *_SHORTEN, *_REDUCE, *_JOIN)
_VIEW = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")
_PRODUCT = ("MmBackward", "AddmmBackward")  # for which torch folds what is not a matrix, and unfolds it afterwards
_LAYERS = "expanded_nn.layers."
_PLACE = ("UnsqueezeBackward", "SqueezeBackward", "TransposeBackward", "PermuteBackward", "StackBackward")


class SharedResult(NamedTuple):
    """A result of a layer for an input that all samples share: its node in the graph, and where its samples stand."""

    layer: nn.Module
    node: Any
    dim: int  # of the samples
    rank: int  # the number of dimensions
    is_new: bool  # whether the plain result has no such dimension, not even of size 1


def taken_apart(results: Sequence[SharedResult], ends: Iterable[Tensor], batch: int) -> tuple[nn.Module, str] | None:
    """The first layer whose result is taken apart along the samples on the way to `ends`, and by which operation."""
    consumers: dict[Any, list[Any]] = {}
    layouts: dict[Any, tuple[int, int, nn.Module]] = {}  # of what is computed from such results alone
    for end in ends:
        for node in graph_of(end.grad_fn):
            for parent, _ in node.next_functions:
                if parent is not None:
                    consumers.setdefault(parent, []).append(node)
    for result in results:  # those of the same layout may meet
        layouts[result.node] = result.dim, result.rank, result.layer
    waiting = list(layouts)
    while waiting:
        node = waiting.pop()
        dim, rank, layer = layouts[node]
        for consumer in consumers.get(node, ()):
            name = consumer.name()
            is_folded = any(behind.name().startswith(_PRODUCT) for behind in consumers.get(consumer, ()))
            if _takes_apart(consumer, name, dim, rank, batch) and not is_folded:
                return layer, name.rstrip("01").removesuffix("Backward").lower()
            layout = _layout_after(consumer, name, dim, rank, batch)
            parents = [parent for parent, _ in consumer.next_functions if parent is not None]
            stays_whole = all(layouts.get(parent, ())[:2] == (dim, rank) or is_expansion(parent) for parent in parents)
            if layout is not None and stays_whole and consumer not in layouts:
                layouts[consumer] = *layout, layer
                waiting.append(consumer)
    return None


def _takes_apart(node: Any, name: str, dim: int, rank: int, batch: int) -> bool:
    """Whether an operation takes a part of the samples' dimension, reduces it, or joins what is in it."""
    if name.startswith("IndexBackward"):
        indices = node._saved_indices
        return len(indices) > dim and indices[dim] is not None
    if name.startswith(_VIEW):
        return not _keeps(node, dim, batch)
    if name.startswith("GatherBackward") and not _keeps(node, dim, batch):
        return True  # an index of fewer samples takes the first ones
    if not name.startswith(_TAKE):  # any other that names dimensions, such as a Fourier transform, takes those
        return not name.startswith(_PLACE) and dim in saved_dims(node, rank)
    if dim not in _dims(node, rank):
        return False
    if name.startswith("SliceBackward"):
        return len(range(*slice(saved_number(node._saved_start), saved_number(node._saved_end)).indices(batch))) < batch
    return True


def _dims(node: Any, rank: int) -> list[int]:
    """The dimensions that an operation is about: all, if it names none."""
    return saved_dims(node, rank) or list(range(rank))


def _keeps(node: Any, dim: int, batch: int) -> bool:
    """Whether a result of another shape has all samples in their dimension."""
    shape = node._input_metadata[0].shape
    return len(shape) > dim and shape[dim] == batch


def _layout_after(node: Any, name: str, dim: int, rank: int, batch: int) -> tuple[int, int] | None:
    """The dimension of the samples, and the rank, after an operation that leaves the samples whole; `None` otherwise.

    It rearranges, or takes a part of another dimension, or is that of a layer.
    """
    if getattr(type(node), "_forward_cls", type).__module__.startswith(_LAYERS):
        return (dim, len(node._input_metadata[0].shape)) if _keeps(node, dim, batch) else None
    if name.startswith((*_SAME, *_SHORTEN, *_JOIN, *_ELEMENTWISE)):
        return dim, rank
    if name.startswith(_VIEW):
        return dim, len(node._input_metadata[0].shape)
    if name.startswith(_TAKE):
        gone = [] if getattr(node, "_saved_keepdim", False) else _dims(node, rank)
        return dim - sum(gone_dim < dim for gone_dim in gone), rank - len(gone)
    if name.startswith("UnsqueezeBackward"):
        return dim + (saved_number(node._saved_dim) % (rank + 1) <= dim), rank + 1
    turned = turned_dims(node, rank)
    return None if turned is None else (turned.index(dim), rank)
