"""Calls whose samples come from those of an earlier call: the two are one pass, or refused.

Between two models, each of which has rows of its own, nothing is joined, and only other numbers of samples are said.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from expanded_nn._batch import batch_dim, own_batch_first, tensors
from expanded_nn._errors import PerSampleError, complaint, warn
from expanded_nn._traced import assume, is_traced, wait_for_values
from expanded_nn.recording.checkpoints import has_own_layout, orders_of, pass_of
from expanded_nn.recording.forward import Forward
from expanded_nn.recording.order import all_stay, index_of, masked
from expanded_nn.recording.owner import Owner
from expanded_nn.recording.passes import Pass, PassStage


class _Recomputed(Exception):
    """A checkpoint runs layers again, for a value that was asked for here; it is done without."""


class _Reading(threading.local):
    """What each thread has for itself."""

    runs = False  # whether values that the graph has saved are read, for which a checkpoint may run layers again


_READING = _Reading()


class Moved(NamedTuple):
    """A node of the graph that has put samples in another order.

    Attributes:
        operation: Its name.
        places: Which ones it has given them; `None` where the operation itself says it.
        stays: Whether each sample has stayed in its place; `None` where none can have.
    """

    operation: str
    places: Tensor | None
    stays: Tensor | None


def linked_pass(owner: Owner, forward: Forward, batch: int, models: Iterable[Owner]) -> Pass | None:
    """The pass that the arguments of a forward of B samples come from: that of an earlier call of the model.

    `None` if there is no such pass. Rows of two passes stand side by side; clipped each for itself, those of one
    sample would not bound what it adds. So a call that goes on from a pass belongs to it, even where another one or a
    backward has come between. Where another model of the `models` comes between, its nodes are passed through.

    Raises:
        PerSampleError: If the samples of that pass are others in number, or have taken each other's places.
    """
    if _READING.runs:
        raise _Recomputed
    given = list(tensors(forward.inputs))
    nodes: list[Any] = [(x.data if isinstance(x, PackedSequence) else x).grad_fn for x in given]
    ends = [node for node in nodes if node is not None]
    own = set(owner.passes.living()) if ends else set()
    others = {
        pass_
        for model in (models if ends else ())
        if model is not owner
        for pass_ in model.passes.living()
        if pass_.stage is PassStage.OPEN and pass_.batch != batch
    }
    if not own and not others:
        return None
    dim = _dim_of_samples(owner, forward)
    orders = [order for x in given if isinstance(x, PackedSequence) for order in orders_of(x)]
    found: list[Pass] = []
    moves: list[Moved] = []
    usual = partial(batch_dim, batch_first=owner.settings.batch_first)
    for pass_, of_sequences, moved in _passes_behind(ends, own, dim, usual, batch):
        if pass_ in own:
            if pass_.batch != batch:
                raise _other_samples(owner, forward, batch, pass_)
            found.append(pass_)
            orders += of_sequences
            moves += [moved] if moved is not None else []
        elif pass_ in others:
            _warn_of_other_samples(owner, forward, batch, pass_)
            others = set()
    for moved in moves:
        if moved.places is None or not any(torch.equal(moved.places, order) for order in orders):
            _refuse(owner, forward, moved)
    return max(found, key=lambda pass_: pass_.number, default=None)


def _passes_behind(
    ends: Iterable[Any], own: set[Pass], dim: Callable[[int], int], usual: Callable[..., int], batch: int
) -> Iterator[tuple[Pass, list[Tensor], Moved | None]]:
    """The passes behind some nodes, up to the nearest of the model's own; and what has moved samples on the way.

    Args:
        ends: The nodes.
        own: The passes of the model.
        dim: Where the samples stand at the ends, in so many dimensions.
        usual: Where they stand in what an earlier call has returned.
        batch: B.
    """
    waiting: deque[tuple[Any, Moved | None, int | None]] = deque(
        (end, None, dim(len(shape)) if len(shape := _shape_of(end)) > 1 else None) for end in ends
    )
    seen: set[Any] = set()
    while waiting:
        node, moved, place = waiting.popleft()
        if node is None or (node, moved is None, place) in seen:
            continue
        seen.add((node, moved is None, place))
        pass_, orders = pass_of(node)
        if pass_ is not None:
            if moved is None and place is not None and not has_own_layout(node):
                shape = _shape_of(node)
                if place != usual(len(shape)) and shape[place] == shape[usual(len(shape))] == batch:
                    moved = Moved("transpose", None, None)
            yield pass_, orders, moved
            if pass_ in own:
                continue
        edge, here = (-1, None) if moved is not None else _moved_by(node, dim, batch)
        before = None if place is None else _place_before(node, place)
        for number, (parent, output) in enumerate(node.next_functions):
            is_alike = before is not None and len(_shape_of(parent, output)) == len(_shape_of(node))
            waiting.append((parent, here if moved is None and number == edge else moved, before if is_alike else None))


def _shape_of(node: Any, output: int = 0) -> Sequence[int]:
    """The shape of a tensor that a node stands for."""
    return () if node is None else cast(Sequence[int], node._input_metadata[output].shape)


def _place_before(node: Any, place: int) -> int:
    """Where a dimension was before a node that turns dimensions; others leave it where it is."""
    operation, rank = type(node).__name__, len(_shape_of(node))
    if operation == "TransposeBackward0":
        first, second = _signed(node._saved_dim0) % rank, _signed(node._saved_dim1) % rank
        return second if place == first else first if place == second else place
    if operation == "PermuteBackward0":
        return _signed(node._saved_dims[place]) % rank
    return 1 - place if operation == "TBackward0" else place


def _signed(number: int) -> int:
    """A negative number, which torch shows as one without a sign."""
    return (number + 2**63) % 2**64 - 2**63


def _moved_by(node: Any, dim: Callable[[int], int], batch: int) -> tuple[int, Moved | None]:
    """The argument of a node that holds samples, by its number, and whether the node gives them another order."""
    operation, edge = _OPERATIONS.get(type(node).__name__, ("", -1))
    shape = node._input_metadata[0].shape if operation else ()
    if not len(shape):
        return -1, None
    index = None
    _READING.runs = True
    try:
        if operation in ("Index", "IndexPut", "IndexPutImpl"):
            dims = len(getattr(node, "_saved_self_sym_sizes", shape))
            where = dim(dims)
            keys = tuple(slice(None) if key is None else key for key in node._saved_indices)
            index = _chosen(keys, getattr(node, "_saved_self_sym_sizes", shape), where, batch)
            if index is NotImplemented:
                return -1, None
        else:
            dims, where = len(shape), dim(len(shape))
            chosen = node._saved_dims if hasattr(node, "_saved_dims") else (node._saved_dim,)
            if shape[where] != batch or where not in [_signed(each) % dims for each in chosen]:
                return -1, None
            index = node._saved_indices if operation == "Sort" else getattr(node, "_saved_index", None)
    except (RuntimeError, _Recomputed):  # where a backward has freed it, none will come this way again
        return -1, None
    finally:
        _READING.runs = False
    stays = None
    if index is not None:
        stays = all_stay(index, where, dims, batch)
        if stays is None or (not is_traced() and bool(stays)):
            return -1, None
    return edge, Moved(operation, index, stays)


def _chosen(keys: tuple[Any, ...], sizes: Sequence[int], dim: int, batch: int) -> Any:
    """Which sample is where, as an index says it, be it of samples or of the positions of all of them."""
    index, count = masked(keys, sizes[dim]) or (index_of(keys, dim, len(sizes)), sizes[dim])
    if index is not NotImplemented and count != batch and count % batch == 0 and index.shape == (batch,):
        return index // (count // batch)
    return index


# nodes that may move samples: the operation, and the number of the argument that holds them
_OPERATIONS = {
    f"{operation}Backward0": (operation, edge)
    for edge, operations in enumerate(
        (
            ("Flip", "Roll", "Sort", "Index", "IndexSelect", "Gather"),
            ("Scatter", "ScatterAdd", "IndexCopy", "IndexAdd", "IndexPut", "IndexPutImpl"),
        )
    )
    for operation in operations
} | {"SortBackward1": ("Sort", 0)}  # with stable=True


def _dim_of_samples(owner: Owner, forward: Forward) -> Callable[[int], int]:
    """Where the samples stand in a tensor of so many dimensions."""
    own = own_batch_first(forward.module)
    batch_first = owner.settings.batch_first if own is None else own
    return lambda dims: batch_dim(dims, batch_first=batch_first)


def _refuse(owner: Owner, forward: Forward, moved: Moved) -> None:
    """Raises for samples in another order; a trace assumes that they have stayed in their places."""
    if is_traced() and moved.stays is not None:
        assume(moved.stays, "call after call samples take each other's places between two calls of the model")
        return
    wait_for_values("it puts samples in another order")
    raise complaint(
        owner.name_of(forward.module),
        f"since an earlier call of the model its samples have taken each other's places ({moved.operation.lower()}), "
        "so that row i of its parameters would be of another sample than row i of those called before",
        "sample i in row i of every call",
        "Leave the order as it is, or sort the batch before the first call; or detach the argument, if the earlier "
        "call is to get no gradient from it. What compares samples with each other belongs into the loss.",
    )


def _other_samples(owner: Owner, forward: Forward, batch: int, pass_: Pass) -> PerSampleError:
    return complaint(
        owner.name_of(forward.module),
        f"it is called with {batch} samples, which are computed from the {pass_.batch} samples of an earlier "
        "call of the model",
        "the same samples in both calls",
        f"Make both calls within one_pass(model, {pass_.batch}), for rows of those {pass_.batch} samples, and "
        "unfold the batch; or detach the argument, if the earlier call is to get no gradient from it.",
    )


def _warn_of_other_samples(owner: Owner, forward: Forward, batch: int, pass_: Pass) -> None:
    """Says that the samples of another model were others in number, unless this one has no rows."""
    if not any(parameter.requires_grad for parameter in forward.module.parameters()):
        return
    warn(
        f"{owner.name_of(forward.module)} is called with {batch} samples, which are computed from the "
        f"{pass_.batch} samples of another model. It has {batch} rows, and the other {pass_.batch}: where one of "
        f"the {pass_.batch} is behind several of the {batch}, clipping does not bound what it adds. For rows of "
        f"the {pass_.batch}, convert one module that holds both models, and call it."
    )
