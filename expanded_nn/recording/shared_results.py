"""Results that all samples share, and operations that take one of their copies for all of them.

A layer's result for what all samples share has a copy for each sample: of positions `(1, T)` a table gives `(1, T,
dim)` in the plain model, and `(B, T, dim)` in per-sample mode. So `table(index)[0]`, which is harmless in the plain
model, would take the first sample's copy for all samples, and one row would get the gradient of all. After the forward
the graph shows it (`taken_apart`).

Of positions `(T,)` the plain model has `(T, dim)`. What `normalize(table(index))` or `q @ table(index).mT` says of its
dimensions is then said of others, and no graph shows that. So each operation on such copies is done again, with copies
that differ and with one of them alone (`Copies`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.common.batch import batch_dim, tensors
from expanded_nn.common.traced import wait_for_values
from expanded_nn.recording.callers import is_called_by_libraries
from expanded_nn.recording.expand import is_expansion
from expanded_nn.recording.graph import graph_of, operation_of, saved_dims, saved_number, shape_of, turned_dims
from expanded_nn.recording.settings import RecorderLike

# operations that take a part of a dimension, reduce it, or join what is in it
_REDUCE = {
    *("Mean", "Sum", "Amax", "Amin", "Max", "Min", "Prod", "Logsumexp", "LinalgVectorNorm", "Norm"),
    *("Std", "Var", "StdMean", "VarMean", "Median", "Kthvalue", "Mode"),
}
_SHORTEN = {"IndexSelect", "Split", "SplitWithSizes", "Slice", "Topk"}
_JOIN = {
    *("Softmax", "LogSoftmax", "Cumsum", "Cumprod", "Logcumsumexp", "Cummax", "Cummin"),
    *("Flip", "Roll", "Sort", "Gather", "Cat", "Unfold"),
}
_STAY = {  # what leaves all dimensions where they are
    *("Clone", "ToCopy", "Alias", "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Pow", "Abs", "Exp", "Log", "Sqrt"),
    *("Rsqrt", "Sin", "Cos", "Tanh", "Sigmoid", "Relu", "Gelu", "Silu", "Elu", "LeakyRelu", "Softplus", "Clamp"),
    *("NativeDropout", *_SHORTEN, *_JOIN),
}
_TAKE = {"Select", "Unbind", *_SHORTEN, *_REDUCE, *_JOIN}
_VIEW = {"View", "UnsafeView", "ReshapeAlias"}
_PRODUCT = {"Mm", "Addmm"}  # for which torch folds what is not a matrix, and unfolds it afterwards
_BATCHED = {"Bmm", "Baddbmm"}  # for which it folds all dimensions but those of matrices into the first one
_SPREAD = {"Mul", "Div", "Add", "Sub", "Rsub", "Pow", "Where", "Maximum", "Minimum"}  # align the last dimensions
_PLACE = {"Unsqueeze", "Squeeze", "Transpose", "Permute", "Stack"}
_LAYERS = "expanded_nn.layers."
# operations that draw random numbers, or change a tensor in place
_NOT_REPEATED = re.compile("dropout|^__i(?!nvert)|^__setitem__|[^_]_$")


class SharedResult(NamedTuple):
    """A result of a layer for an input that all samples share: its node in the graph, and where its samples stand."""

    layer: nn.Module
    node: Any
    dim: int  # of the samples
    rank: int  # the number of dimensions
    is_new: bool  # whether the plain result has no such dimension, not even of size 1


def taken_apart(
    results: Sequence[SharedResult], ends: Sequence[Tensor], batch: int, *, batch_first: bool
) -> tuple[nn.Module, str] | None:
    """The first layer whose result is taken apart along the samples on the way to `ends`, and by which operation.

    So it may be behind them, too, where B others follow the copies: then it is the return.
    """
    consumers: dict[Any, list[Any]] = {}
    for node in graph_of(*(end.grad_fn for end in ends)):
        for parent, _ in node.next_functions:
            consumers.setdefault(parent, []).append(node)
    # of what is computed from such results alone; those of the same layout may meet
    layouts = {result.node: (result.dim, result.rank, result.layer) for result in results}
    mixed: set[Any] = set()  # those that an argument of the model may be in; like a number it has no graph
    waiting = list(layouts)
    while waiting:
        node = waiting.pop()
        dim, rank, layer = layouts[node]
        for consumer in consumers.get(node, ()):
            if _takes_apart(consumer, dim, rank, batch):
                folded_for = _folded_for(consumer, consumers.get(consumer, ()), dim, batch)
                if folded_for is None:
                    return layer, operation_of(consumer).lower()
                if folded_for is _BATCHED:  # the samples stand first in what is folded, as before
                    continue
            others = [
                (parent, number)
                for parent, number in consumer.next_functions
                if layouts.get(parent, ())[:2] != (dim, rank) and not is_expansion(parent)
            ]
            is_of_layer, is_mixed = _is_of_layer(consumer), node in mixed
            if not is_of_layer and _meet(consumer, others, dim, rank, batch, batch_first, is_mixed):
                return layer, operation_of(consumer).lower()
            layout = _layout_after(consumer, dim, rank, batch)
            if layout is not None and all(parent is None for parent, _ in others) and consumer not in layouts:
                layouts[consumer] = *layout, layer
                waiting.append(consumer)
                if is_mixed or (others and not is_of_layer):
                    mixed.add(consumer)
    for node in (end.grad_fn for end in ends if end.grad_fn in layouts and end.grad_fn not in mixed):
        dim, _, layer = layouts[node]
        if _has_others_behind(node, dim, batch):
            return layer, "return"
    return None


def _folded_for(node: Any, consumers: Sequence[Any], dim: int, batch: int) -> set[str] | None:
    """The kind of product that torch itself folds the dimensions for, `None` if the model has taken them apart."""
    behind = {operation_of(consumer) for consumer in consumers}
    if behind & _BATCHED and dim == 0 and shape_of(node)[0] % batch == 0:
        return _BATCHED
    return _PRODUCT if behind & _PRODUCT else None


def _takes_apart(node: Any, dim: int, rank: int, batch: int) -> bool:
    """Whether an operation takes a part of the samples' dimension, reduces it, or joins what is in it."""
    operation = operation_of(node)
    if operation == "Index":
        indices = node._saved_indices
        return len(indices) > dim and indices[dim] is not None
    if operation == "Squeeze":  # not of another result of the same node, as a cell's states are
        sizes = node._saved_self_sym_sizes
        return dim in _dims(node, rank) and len(sizes) == rank and bool(sizes[dim] == batch)
    if operation in _VIEW:
        return not _keeps(node, dim, batch)
    if operation == "Gather" and not _keeps(node, dim, batch):
        return True  # an index of fewer samples takes the first ones
    if operation not in _TAKE:  # any other that names dimensions, such as a Fourier transform, takes those
        return operation not in _PLACE and dim in saved_dims(node, rank)
    if operation == "Slice":
        taken = range(*slice(saved_number(node._saved_start), saved_number(node._saved_end)).indices(batch))
        return dim in _dims(node, rank) and len(taken) < batch
    return dim in _dims(node, rank)


def _is_of_layer(node: Any) -> bool:
    """Whether it is that of a layer of ours, which looks at its inputs itself."""
    return getattr(type(node), "_forward_cls", type).__module__.startswith(_LAYERS)


def _dims(node: Any, rank: int) -> list[int]:
    """The dimensions that an operation is about: all, if it names none."""
    return saved_dims(node, rank) or list(range(rank))


def _keeps(node: Any, dim: int, batch: int) -> bool:
    """Whether a result of another shape has all samples in their dimension."""
    shape = shape_of(node)
    return len(shape) > dim and shape[dim] == batch


def _has_others_behind(node: Any, dim: int, batch: int) -> bool:
    """Whether B places follow the copies: they stand where the samples do, as soon as the plain result's row is gone.

    So it is with `layer(x.unsqueeze(0)).squeeze(0)`, where they may be the samples.
    """
    return tuple(shape_of(node)[dim : dim + 2]) == (batch, batch)


def _meet(node: Any, others: Sequence[Any], dim: int, rank: int, batch: int, batch_first: bool, is_mixed: bool) -> bool:
    """Whether copies meet samples that stand in another dimension, so that there are B of both.

    So `(B,)`, copies of `(1,)`, meets `(B, 1)` in a product, and `(B, K, D)`, copies of `(1, K, D)`, `(B, D)` in a
    matrix product: the results `(B, B)` and `(B, B, K)` are not those of each sample.
    """
    operation, shape = operation_of(node), list(shape_of(node))
    here = dim + len(shape) - rank
    if batch not in shape[:here] + shape[here + 1 :]:
        return False
    known = [_shape_before_expand(*other) for other in others if other[0] is not None]
    if known or is_mixed:
        return any(batch in x and (len(x) != rank or x[dim] != batch or operation in _PRODUCT) for x in known)
    if others and operation not in _SPREAD:  # with an argument of the model, as it seems, of which no graph tells
        return True
    return bool(others or operation == "Expand") and here != batch_dim(len(shape), batch_first=batch_first)


def _shape_before_expand(node: Any, number: int) -> list[int]:
    """The shape of what a node returns, before it was expanded to meet another one's."""
    shape, behind = list(shape_of(node, number)), node
    while operation_of(behind) in _VIEW and behind.next_functions[0][0] is not None:
        behind = behind.next_functions[0][0]
    return list(behind._saved_self_sym_sizes) if operation_of(behind) == "Expand" else shape


def _layout_after(node: Any, dim: int, rank: int, batch: int) -> tuple[int, int] | None:
    """The dimension of the samples, and the rank, after an operation that leaves the samples whole; `None` otherwise.

    It rearranges, or takes a part of another dimension, or is that of a layer.
    """
    operation = operation_of(node)
    if _is_of_layer(node):
        return (dim, len(shape_of(node))) if _keeps(node, dim, batch) else None
    if operation.removesuffix("Backward") in _STAY:  # or is the derivative of such a one
        return dim, rank
    if operation in _VIEW:
        return dim, len(shape_of(node))
    if operation in _TAKE:
        gone = [] if getattr(node, "_saved_keepdim", False) else _dims(node, rank)
        return dim - sum(gone_dim < dim for gone_dim in gone), rank - len(gone)
    if operation == "Squeeze":
        sizes = node._saved_self_sym_sizes
        if len(sizes) != rank:
            return None
        gone = [place for place in _dims(node, rank) if sizes[place] == 1]
        return dim - sum(gone_dim < dim for gone_dim in gone), rank - len(gone)
    if operation == "Expand":
        more = len(shape_of(node)) - rank
        return dim + more, rank + more
    if operation == "Unsqueeze":
        return dim + (saved_number(node._saved_dim) % (rank + 1) <= dim), rank + 1
    turned = turned_dims(node, rank)
    return None if turned is None else (turned.index(dim), rank)


class Copies:
    """The copies of a forward that have no dimension for the samples in the plain model.

    Attributes:
        recorder: The recorder of the model.
        layers: The copies by their ids, and the layer that each comes from.
    """

    def __init__(self, recorder: RecorderLike) -> None:
        self.recorder = recorder
        self.layers: dict[int, tuple[Tensor, nn.Module]] = {}

    def look_at(self, func: Any, args: Any, kwargs: Any, result: Any, *, are_samples: Callable[[Tensor], bool]) -> None:
        """Raises where an operation does something else with the copies than with one alone.

        `are_samples` tells of a tensor of B rows whether they are the samples'.
        """
        copies = [x for x in tensors((args, kwargs)) if id(x) in self.layers]
        results = _floats(result) if copies else []
        if not results or self.recorder.general_rule is not None or is_called_by_libraries(func):
            return
        batch, layer = len(copies[0]), self.layers[id(copies[0])][1]
        leaves = tree_leaves((args, kwargs))
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.layers]
        meets_samples = any(x.dim() and x.shape[0] == batch and are_samples(x) for x in others)
        name = getattr(func, "__name__", "")
        key = (func, meets_samples, *(tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves))
        known = self.recorder.escalation.gives_copies
        if key not in known and not _NOT_REPEATED.search(name):
            wait_for_values("it looks at what all samples share")
            of_all, of_second = self._repeated(func, args, kwargs)
            if not _are_alike(of_all, of_second, batch, meets_samples=meets_samples):
                raise self.recorder.forward.taking_apart(layer, "select" if name == "__getitem__" else name)
            known[key] = not meets_samples and not any(map(_is_spread, of_second, of_all))
        if known.get(key, not meets_samples):
            self.layers.update({id(x): (x, layer) for x in results if x.dim() and len(x) == batch})

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The results of an operation on copies that differ, and on the second of these alone."""
        leaves, structure = tree_flatten((args, kwargs))
        differing = [_differing(leaf) if id(leaf) in self.layers else leaf for leaf in leaves]
        second = [x[1] if id(leaf) in self.layers else x for leaf, x in zip(leaves, differing, strict=True)]
        return _called(func, *tree_unflatten(differing, structure)), _called(func, *tree_unflatten(second, structure))

    def follow(self, arguments: Any, result: Any) -> None:
        """Notes that what a layer computes from copies alone are copies."""
        inputs = list(tensors(arguments))
        layers = [self.layers[id(x)][1] for x in inputs if id(x) in self.layers]
        if layers and len(layers) == len(inputs):
            self.layers.update({id(x): (x, layers[0]) for x in _floats(result)})


def _floats(result: Any) -> list[Tensor]:
    return [x for x in tensors(result) if isinstance(x, Tensor) and x.is_floating_point()]


def _differing(copies: Tensor) -> Tensor:  # (B, ...)
    """Copies that differ from each other."""
    factors = 1 + torch.arange(len(copies), device=copies.device) / len(copies)
    return copies.detach() * factors.to(copies.dtype).view(-1, *[1] * (copies.dim() - 1))


def _called(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in tensors(func(*args, **kwargs)) if isinstance(x, Tensor)]


def _is_spread(alone: Tensor, whole: Tensor) -> bool:
    """Whether what all samples share was expanded to a row for each of them."""
    return alone.dim() > 0 and alone.shape == whole.shape


def _are_alike(of_all: list[Tensor], of_second: list[Tensor], batch: int, *, meets_samples: bool) -> bool:
    """Whether results for all copies hold, for the second sample, those of its copy alone."""
    for whole, alone in zip(of_all, of_second, strict=True):
        if meets_samples and (alone.dim() == 0 or alone.shape[0] != batch):
            continue  # a loss of all samples
        has_samples = meets_samples or _is_spread(alone, whole)
        if whole.shape != (alone.shape if has_samples else (batch, *alone.shape)):
            return False
        wanted = alone[1] if has_samples else alone
        if not torch.allclose(whole[1], wanted, rtol=1e-2 if whole.dtype.itemsize < 4 else 1e-4, equal_nan=True):
            return False
    return True
