"""Calls whose samples come from those of an earlier call: the two are one pass, or refused.

Nothing is joined between two models, as each has rows of its own. A warning says where they have other numbers of
samples.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from expanded_nn._errors import PerSampleError, complaint, warn
from expanded_nn.common.batch import contents, data_in, tensors
from expanded_nn.recording.checkpoints import noted_passes
from expanded_nn.recording.expand import Expand
from expanded_nn.recording.graph import PARTS, operation_of, part_taken, saved_dims, saved_keys, shape_of, turned_dims
from expanded_nn.recording.living import living
from expanded_nn.recording.passes import Pass, PassStage
from expanded_nn.recording.places import Moved, chosen, moved_by
from expanded_nn.recording.settings import RecorderLike

_RESULT = "expanded_nn.result"  # a key in the metadata of a node of the graph


class _Recomputed(Exception):
    """Ends a forward that a checkpoint runs only because this file reads a saved value: it does without that value."""


# for each thread, whether it is reading what the graph has saved: for that a checkpoint may run layers again
_READING = threading.local()


def linked_pass(recorder: RecorderLike, module: nn.Module, inputs: Any, batch: int) -> Pass | None:
    """The pass that the arguments of a forward of B samples come from: that of an earlier call of the model.

    `None` if there is no such pass. Rows of two passes are clipped separately, so that a sample with rows in both could
    add more than the bound. So a call that goes on from a pass belongs to that pass, even if another pass or a backward
    has come between. If the graph goes through another of the `models`, the search goes on behind that.

    Raises:
        PerSampleError: If the samples of that pass are others in number, or have taken each other's places.
    """
    if getattr(_READING, "runs", False):
        raise _Recomputed
    args, kwargs = inputs
    if all(isinstance(x, Tensor) and x.grad_fn is None for x in (*args, *kwargs.values())):  # as in most calls
        return None
    arguments = (x for x in (*data_in(inputs), *contents(inputs)) if isinstance(x, Tensor))
    ends: list[Any] = list(dict.fromkeys(x.grad_fn for x in arguments if x.grad_fn is not None))
    if not ends:
        return None
    own_passes = set(recorder.passes.alive)
    alive = (pass_ for model in living() if model is not recorder for pass_ in model.passes.seen_by_others())
    other_passes = {pass_ for pass_ in alive if pass_.stage is PassStage.OPEN and pass_.batch != batch}
    if not own_passes and not other_passes:
        return None
    usual_dim = recorder.settings.samples_dim
    samples_dim = partial(usual_dim, module=module)
    orders = [order for x in tensors(inputs) if isinstance(x, PackedSequence) for order in _orders_of(x)]
    linked: list[Pass] = []
    moves: list[Moved] = []
    for pass_, of_sequences, moved in _passes_behind(ends, own_passes, samples_dim, usual_dim, batch):
        if pass_ in own_passes:
            if pass_.batch != batch:
                raise _other_samples(recorder, module, batch, pass_)
            linked.append(pass_)
            orders += of_sequences
            moves += [moved] if moved is not None else []
        elif pass_ in other_passes:
            _warn_of_other_samples(recorder, module, batch, pass_)
            other_passes = set()
    for moved in moves:
        if moved.places is None or not any(torch.equal(moved.places, order) for order in orders):
            _refuse(recorder, module, moved)
    return max(linked, key=lambda pass_: pass_.number, default=None)


def note_result(outputs: Iterable[Any], pass_: Pass, *, own_layout: bool) -> None:
    """Notes a forward's pass on the nodes of what it returns, for forwards that are called with it later.

    `own_layout` says that the samples stand where the module says, and not where the model does.
    """
    for value in outputs:
        is_packed = isinstance(value, PackedSequence)
        x = value.data if is_packed else value
        node: Any = x.grad_fn if isinstance(x, Tensor) else None
        if node is not None:
            node.metadata[_RESULT] = pass_, _orders_of(value) if is_packed else [], own_layout


def _orders_of(packed: PackedSequence) -> list[Tensor]:
    """How torch has sorted the sequences, and how it brings them back in order."""
    return [order for order in (packed.sorted_indices, packed.unsorted_indices) if order is not None]


def _pass_of(node: Any) -> tuple[Pass | None, list[Tensor], bool]:
    """The pass that a node of the graph belongs to, if it is that of a result, an expansion or a reentrant checkpoint.

    With it come the orders of a packed sequence, by `_orders_of`, and whether its samples may stand elsewhere than the
    model says.
    """
    if isinstance(node, Expand._backward_cls):
        return cast(Any, node).pass_, [], True
    return node.metadata.get(_RESULT) or (next(iter(noted_passes(node).values()), None), [], True)


def _passes_behind(
    ends: Iterable[Any],
    own_passes: set[Pass],
    samples_dim: Callable[[int], int],
    usual_dim: Callable[[int], int],
    batch: int,
) -> Iterator[tuple[Pass, list[Tensor], Moved | None]]:
    """The passes behind some nodes; the search ends at passes of the model itself.

    With each come the orders of its sequences, and what has moved samples between it and the end.

    Args:
        ends: The nodes.
        own_passes: The passes of the model.
        samples_dim: Where the samples stand at the ends, in so many dimensions.
        usual_dim: Where they stand in what an earlier call has returned.
        batch: B.
    """
    waiting: deque[tuple[Any, Moved | None, int | None]] = deque()
    for end in ends:
        dims = len(shape_of(end))
        waiting.append((end, None, samples_dim(dims) if dims > 1 else None))
    seen: set[Any] = set()
    while waiting:
        node, moved, dim = waiting.popleft()
        if node is None or (node, moved is None, dim) in seen:
            continue
        seen.add((node, moved is None, dim))
        pass_, orders, own_layout = _pass_of(node)
        if pass_ is not None:
            if moved is None and dim is not None and not own_layout and _is_turned(node, dim, usual_dim, batch):
                moved = Moved("transpose", None)
            yield pass_, orders, moved
            if pass_ in own_passes:
                continue
        edges, moved_here = ((), None) if moved is not None else _moves_of(node, samples_dim, batch)
        turned = None if dim is None else turned_dims(node, len(shape_of(node)))
        dim_before = dim if dim is None or turned is None else turned[dim]
        for edge, (parent, output) in enumerate(node.next_functions):
            is_alike = len(shape_of(parent, output)) == len(shape_of(node))
            waiting.append((parent, moved_here if edge in edges else moved, dim_before if is_alike else None))


def _is_turned(node: Any, dim: int, usual_dim: Callable[[int], int], batch: int) -> bool:
    """Whether another dimension of size B than that of the samples, in what a node stands for, becomes theirs."""
    shape = shape_of(node)
    usual = usual_dim(len(shape))
    return dim != usual and bool(shape[dim] == shape[usual] == batch)


def _moves_of(node: Any, samples_dim: Callable[[int], int], batch: int) -> tuple[Sequence[int], Moved | None]:
    """The numbers of a node's edges that lead to samples, and how the node moves these, if it does."""
    operation = operation_of(node)
    shape = shape_of(node) if operation in _OPERATIONS else ()
    if not len(shape):
        return (), None
    index = None
    _READING.runs = True
    try:
        if operation in ("Index", "IndexPut", "IndexPutImpl"):
            sizes = getattr(node, "_saved_self_sym_sizes", shape)
            dims, dim = len(sizes), samples_dim(len(sizes))
            index, _ = chosen(saved_keys(node), sizes, dim, batch)
            if index is NotImplemented:
                return (), None
        else:
            dims, dim = len(shape), samples_dim(len(shape))
            if shape[dim] != batch or dim not in saved_dims(node, dims):
                return (), None
            if operation in ("Cat", "Stack"):
                moved = Moved(operation.lower(), None) if _joins_elsewhere(node, dim, batch) else None
                return range(len(node.next_functions)), moved
            index = node._saved_indices if operation == "Sort" else getattr(node, "_saved_index", None)
    except (RuntimeError, _Recomputed):  # a backward has freed it, so that no other one can go this way
        return (), None
    finally:
        _READING.runs = False
    moved = moved_by(operation.lower(), index, dim, dims, batch)
    return (() if moved is None else (_OPERATIONS[operation],)), moved


def _joins_elsewhere(node: Any, dim: int, batch: int) -> bool:
    """Whether `cat` or `stack` puts a part of a tensor of B samples in another place than it had there."""
    place = 0
    for parent, number in node.next_functions:
        if parent is None:  # a constant: the graph does not say how long it is
            return False
        if _place_of(parent, number, dim, batch) not in (None, place):
            return True
        place += shape_of(parent, number)[dim] if operation_of(node) == "Cat" else 1
    return False


def _place_of(node: Any, number: int, dim: int, batch: int) -> int | None:
    """Where the samples of a node's result begin in the tensor of B samples that it is a part of; `None` if in none."""
    operation = operation_of(node)
    if operation == "Unsqueeze" and node._saved_dim == dim:
        parent, number = node.next_functions[0]
        return _place_of(parent, number, dim, batch)
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    if operation not in PARTS or (sizes and (len(sizes) <= dim or sizes[dim] != batch)):
        return None
    if dim not in saved_dims(node, len(sizes) or len(shape_of(node, number)) + 1):
        return None
    part = part_taken(node, number)
    return (part if isinstance(part, int) else part[0]) % batch


# operations that may move samples, and the number of the edge that leads to these
_OPERATIONS = {
    **dict.fromkeys(("Flip", "Roll", "Sort", "Index", "IndexSelect", "Gather", "Cat", "Stack"), 0),
    **dict.fromkeys(("Scatter", "ScatterAdd", "IndexCopy", "IndexAdd", "IndexPut", "IndexPutImpl"), 1),
}


def _refuse(recorder: RecorderLike, module: nn.Module, moved: Moved) -> None:
    """Raises for samples in another order, unless a trace can assume them away."""
    if moved.may_be_assumed_away("two calls of the model"):
        return
    raise complaint(
        recorder.name_of(module),
        f"since an earlier call of the model its samples have taken each other's places ({moved.operation}), "
        "so that row i of its parameters would be of another sample than row i of those called before",
        "sample i in row i of every call",
        "Leave the order as it is, or sort the batch before the first call; or detach the argument, if the earlier "
        "call is to get no gradient from it. What compares samples with each other belongs into the loss.",
    )


def _other_samples(recorder: RecorderLike, module: nn.Module, batch: int, pass_: Pass) -> PerSampleError:
    for_one = f"give the earlier call a row for each sample, x.expand({batch}, ...), if all share that one row; or "
    return complaint(
        recorder.name_of(module),
        f"it is called with {batch} samples, which are computed from the {pass_.batch} samples of an earlier "
        "call of the model",
        "the same samples in both calls",
        "Give the later call all samples, and choose from its result, layer(x)[chosen]; or, where the batch is "
        f"folded, make both calls within one_pass(model, {pass_.batch}) and unfold it; or "
        f"{for_one if pass_.batch == 1 else ''}detach the argument, if the earlier call is to get no gradient from it.",
    )


def _warn_of_other_samples(recorder: RecorderLike, module: nn.Module, batch: int, pass_: Pass) -> None:
    """Warns that the samples of another model were more or fewer, unless this model has no rows."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    warn(
        f"{recorder.name_of(module)} is called with {batch} samples, which are computed from the "
        f"{pass_.batch} samples of another model. It has {batch} rows, and the other {pass_.batch}: where one of "
        f"the {pass_.batch} is behind several of the {batch}, clipping does not bound what it adds. For rows of "
        f"the {pass_.batch}, convert one module that holds both models, and call it."
    )
