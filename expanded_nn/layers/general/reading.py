"""Where the samples stand in what a module of the general rule is called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from expanded_nn._errors import PerSampleError
from expanded_nn.common.batch import (
    FOLDED,
    Dims,
    data_in,
    is_like_a_state,
    is_shared_by_all,
    may_have_derivatives,
    readings,
    tensors,
)
from expanded_nn.common.containers import outline
from expanded_nn.common.modes import unseen
from expanded_nn.common.traced import is_traced, wait_for_values
from expanded_nn.core import cost
from expanded_nn.layers.general.called import Called, opened
from expanded_nn.modules.layout import all_in_one_row, forward_of, holds_all_samples, note_input, refusal, refuse_square
from expanded_nn.recording.expand import comes_from_rows


def read(module: Any, args: Any, kwargs: Any) -> Called:
    """A call of a module: where its samples stand is told by shapes, or by comparisons where these leave it open.

    In states, `(layers, B, hidden)`, they may stand second. In a model that has them second, they may stand first in a
    matrix, as in a mask `(B, T)` or in the last step of a sequence, `(B, features)`; or nowhere, as in a mask `(T, T)`.
    An `Alone` module may get an argument of the model that is folded, as the patches of all images are, `(B * n,
    features)`.
    """
    with unseen():  # what is asked here is no part of the forward
        call = _as_usual(module, args, kwargs)
        states, possible = _may_be_states(call), _possible(module, call)
    if any(states) or any(len(dims) > 1 for dims in possible):
        dims = _compared(module, call, states, possible)
        call = replace(call, dims=dims, kind=(*call.kind, *dims))
        call.is_surely_folded = FOLDED in dims and _are_surely_folded(module, call)
    with unseen():
        _refuse_no_samples(module, call)
    return call


def _are_surely_folded(module: Any, call: Called) -> bool:
    forward = forward_of(module)
    folded = [leaf for leaf, dim in zip(call.leaves, call.dims, strict=True) if dim == FOLDED]
    with unseen():
        arguments = [] if forward is None else list(data_in(forward.inputs))
        return all(_is_flat_view(leaf, arguments, call.batch) for leaf in folded)


def _is_flat_view(x: Tensor, arguments: Sequence[Tensor], batch: int) -> bool:
    """Whether it shows all numbers of an argument `(B, *)`, in the same order."""
    if not x.is_contiguous():
        return False
    memory = x.untyped_storage()._cdata, x.storage_offset(), x.numel(), True
    return any(
        (whole.untyped_storage()._cdata, whole.storage_offset(), whole.numel(), whole.is_contiguous()) == memory
        for whole in arguments
        if whole.layout is torch.strided and whole.dim() and whole.shape[0] == batch
    )


def _as_usual(module: Any, args: Any, kwargs: Any) -> Called:
    """The call, with the samples where they usually stand in such arguments."""
    batch = module.pass_batch_size
    is_plain = not kwargs and all(type(arg) is Tensor for arg in args)
    args, kwargs = (args, kwargs) if is_plain else opened(args, kwargs)
    leaves = list(args) if is_plain else tree_leaves((args, kwargs))
    inputs = [tensor for tensor in leaves if isinstance(tensor, Tensor) and tensor.dim()]
    sizes = (tuple(bool(n == 1) for n in x.shape) for x in inputs)
    dims = [_usual_dim(module, leaf, batch) for leaf in leaves]
    either_way = (_reads_either_way(module, leaf) for leaf in leaves)
    kind: tuple[Any, ...] = (module.training, bool(batch == 1), *sizes, *either_way, *dims)
    if kwargs or not all(isinstance(arg, Tensor) for arg in args):
        # the same tensors may be something else by another name, or beside another flag
        kind = (*kind, outline(args), *((name, outline(value)) for name, value in kwargs.items()))
    return Called(args, kwargs, batch, leaves, dims, inputs, kind)


def _usual_dim(module: Any, leaf: Any, batch: int) -> int | None:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or is_shared_by_all(leaf):
        return None
    dim: int = module._dim_of(leaf)
    # not for an index that is an argument of the model: a comparison tells where its samples stand
    if _is_matrix(module, leaf) and (may_have_derivatives(leaf) or not _is_of_samples(module, leaf)):
        refuse_square(module, leaf)
    return dim if leaf.shape[dim] == batch else None


def _compared(module: Any, call: Called, states: list[bool], possible: list[Dims]) -> list[int | None]:
    """As `call` says, or elsewhere if only that is right."""
    kind, known = (*call.kind, *states, *possible, module.goes_in_a_loop()), module._told.readings
    if kind not in known:
        if cost.is_symbol(call.batch):
            return call.dims
        wait_for_values("a module of the general rule is compared with its plain forward first")
        known[kind] = _best(module, call, states, possible)
    return known[kind]  # type: ignore[no-any-return]


def _may_be_states(call: Called) -> list[bool]:
    """Which arguments may be states with the samples second: only those behind the first that has them first."""
    first = call.dims.index(0) + 1 if 0 in call.dims else len(call.dims)
    behind = zip(call.leaves[first:], call.dims[first:], strict=True)
    return [False] * first + [call.batch > 1 and dim != 1 and is_like_a_state(x, call.batch) for x, dim in behind]


def _possible(module: Any, call: Called) -> list[Dims]:
    """Where the samples may stand in each argument: what is tried first, then where else.

    In a matrix of a model that has them second they may also stand first, or nowhere, unless the matrix is what says B.
    In an argument that may be folded, in several rows per sample. In one that all samples have shared in other calls,
    nowhere: that comes first, as both readings may agree with the plain forward.
    """
    matrices = [_is_matrix(module, leaf) and leaf.shape[0] == call.batch for leaf in call.leaves]
    if call.dims.count(None) == len(call.dims):  # a table may have B rows by chance
        pairs = zip(matrices, call.leaves, strict=True)
        matrices = [is_matrix and _is_of_samples(module, leaf) for is_matrix, leaf in pairs]
    elif 1 in call.dims:
        matrices[call.dims.index(1)] = False
    folded = [module._alone and _may_be_folded(module, leaf, call.batch) for leaf in call.leaves]
    found = zip(call.dims, matrices, folded, module._told.seen_shared(call), strict=True)
    return [
        (dim, 0, None) if is_matrix else (dim, FOLDED) if is_folded else (None, dim) if is_shared else (dim,)
        for dim, is_matrix, is_folded, is_shared in found
    ]


def _may_be_folded(module: Any, leaf: Any, batch: int) -> bool:
    """Whether it is an argument of the model that may have several rows per sample, sample after sample."""
    is_sized = isinstance(leaf, Tensor) and leaf.dim() > 0 and not is_shared_by_all(leaf)
    if not is_sized or batch < 2 or not module.model_batch_first:
        return False
    if cost.is_symbol(batch) and not cost.is_symbol(leaf.shape[0]):  # it stays as it is in batches of other sizes
        return False
    times, left = leaf.shape[0] // batch, leaf.shape[0] % batch
    forward = forward_of(module)
    return times > 1 and left == 0 and forward is not None and forward.is_argument(leaf)


def _is_matrix(module: Any, leaf: Any) -> bool:
    """Whether it is a matrix in which the samples usually stand second."""
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and module._dim_of(leaf) == 1 and not is_shared_by_all(leaf)


def _is_of_samples(module: Any, leaf: Tensor) -> bool:
    """Whether it is an argument of the model, or was computed from what layers returned."""
    forward = forward_of(module)
    return (leaf.requires_grad and comes_from_rows(leaf)) or (forward is not None and forward.is_argument(leaf))


def _reads_either_way(module: Any, leaf: Any) -> bool:
    """Whether it is such a matrix and equals its transpose: then no comparison tells where its samples stand.

    So what is found with it holds only for other matrices that equal their transposes.
    """
    if not _is_matrix(module, leaf) or is_traced() or leaf.is_meta:
        return False
    return leaf.shape[0] == leaf.shape[1] and torch.equal(leaf, leaf.mT)


def _best(module: Any, call: Called, states: list[bool], possible: list[Dims]) -> list[int | None]:
    """The first reading that is right; if none is, the one whose error tells the user most."""
    usual, others = [dims[0] for dims in possible], [dims[1:] for dims in possible]
    pairs = list(zip(states, usual, strict=True))
    where_unknown = [1 if is_state and dim is None else dim for is_state, dim in pairs]
    everywhere = [1 if is_state else dim for is_state, dim in pairs]
    # first the readings that change least: what looks like a state may be an input whose second size is B by chance
    tried = (readings(dims, others) for dims in (usual, where_unknown, everywhere))
    errors: dict[Dims, Exception] = {}
    for reading in dict.fromkeys(chain(*tried)):
        error = module._error_of(replace(call, dims=list(reading)))
        if error is None:
            return list(reading)
        errors[reading] = error
    # where only `vmap` fails, a loop over the samples comes next
    told = [reading for reading, error in errors.items() if getattr(error, "by_vmap", False)]
    refused = [reading for reading, error in errors.items() if isinstance(error, PerSampleError)]
    # last those by which the forward itself has failed
    told += sorted(refused, key=lambda reading: errors[reading].__cause__ is not None)
    return list(told[0]) if told else call.dims


def _refuse_no_samples(module: Any, call: Called) -> None:
    """Raises if no argument has one row per sample, or if the samples stand elsewhere in the first tensor."""
    is_shared = call.batch > 1 and call.dims.count(None) == len(call.dims)
    note_input(module, shared=is_shared)
    if module._learned is not None and is_shared:
        found, wanted = "no argument has one row per sample", f"{call.batch} rows"
        raise refusal(module, found, wanted, "Call it with a batch of inputs.")
    if is_shared:
        folded = next((x for x in call.inputs if holds_all_samples(module, x)), None)
        if folded is not None:
            raise all_in_one_row(module, folded, "an argument")
    _refuse_mean_of_samples(module, call)
    first = next(tensors((call.args, call.kwargs)), None)
    if isinstance(first, PackedSequence):
        raise refusal(
            module,
            "it has parameters of its own and is called with a PackedSequence, in which samples have no rows",
            "a tensor with a row for each sample",
            "Hold the parameters in a small module of their own, so that this one's layers take the sequences; or pack "
            "within the forward.",
        )
    first = next((x for x in call.inputs if not is_shared_by_all(x)), None)
    if first is not None and may_have_derivatives(first):
        dim = next(dim for leaf, dim in zip(call.leaves, call.dims, strict=True) if leaf is first)
        if dim != FOLDED:
            module.checked(first, 0, dim=module._dim_of(first) if dim is None else dim, argument="the first tensor")


def _refuse_mean_of_samples(module: Any, call: Called) -> None:
    """Raises for an argument without samples that was computed from all of them, as their mean loss.

    The parameters would get the gradient of the batch in each row.
    """
    order = None if module._recorder is None else module._recorder.order
    copies = {} if order is None else order.copies.known  # of what all samples share
    for x, dim in zip(call.leaves, call.dims, strict=True) if call.batch > 1 else ():
        if dim is not None or not isinstance(x, Tensor) or not x.requires_grad or id(x) in copies:
            continue
        if not is_shared_by_all(x) and comes_from_rows(x):
            raise refusal(
                module,
                f"an argument, {tuple(x.shape)}, was computed from {call.batch} rows, as a mean over the samples is",
                "one row per sample",
                'Give it what each sample has, as by cross_entropy(..., reduction="none"), and take the mean of what '
                "it returns.",
            )
