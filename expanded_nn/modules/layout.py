"""Who is a sample in what a layer is called with: the rules by which all layers read their inputs.

Where the samples stand (`Expanded._samples_dim`):

| the layer has | the dimension of the samples |
|---|---|
| a fixed layout, as `(N, C, H, W)` | 0 |
| a `batch_first` of its own, as recurrent layers and attention | 0 or 1, as it says |
| neither | 0 or 1, as `per_sample(batch_first=...)` says; 0 if there is one dimension before the features |

What an input is by its size there, in a pass of B > 1 samples (`checked`):

| size | the input has |
|---|---|
| B | one row per sample; `(B, B)` with the samples second is refused, as they may as well be first |
| 1 | one row that all samples share; refused if it is a slice of a batch, holds all samples, or comes from B rows |
| 1, the samples second, and B in the first dimension, where the model has them | refused, but not a table of its own |
| any other, or no such dimension | refused |

An index may lack the dimension of the samples (`index_by_sample`):

| index | it has |
|---|---|
| B long | one row per sample; refused if its values, or where it is kept, say that it may be positions |
| 1 long, with a second dimension | one row that all samples share; refused if it holds all samples |
| a slice of a batch, `n * B` long (folded), or `B / n` long | refused, unless it has the values of positions |
| any other, a single number as well | no dimension of the samples: all share it |

In a pass of a single sample a layer that treats each position alone takes any rows: all are that sample's, and the
result has no other dimensions than the plain layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import batch_dim, is_shared_by_all, tensors
from expanded_nn.common.traced import assume, is_traced
from expanded_nn.core.cost import is_symbol
from expanded_nn.recording.expand import comes_from_rows
from expanded_nn.recording.recorder import Forward, Recorder


class Member(Protocol):
    """A module in per-sample mode, if it has a recorder."""

    _recorder: Recorder | None


class Reader(Member, Protocol):
    """A layer, as far as the reading of its inputs needs it."""

    @property
    def pass_batch_size(self) -> int: ...

    @property
    def _samples_dim(self) -> int: ...

    def _own_batch(self) -> int | None: ...


class IndexReader(Reader, Protocol):
    """A layer that looks entries up."""

    _takes_labels: bool  # whether it was given one index per sample before


def forward_of(layer: Member) -> Forward | None:
    """The forward that a layer's own is a part of."""
    return None if layer._recorder is None else layer._recorder.forward


def name_of(module: Member) -> str:
    """The module's qualified name in the model and its class, for errors."""
    return type(module).__name__ if module._recorder is None else module._recorder.name_of(cast(nn.Module, module))


def hint_of_layout(module: Any) -> str:
    """What may be wrong where a layer within a module has the samples second, and the model has them first."""
    layers = (name for name, layer in module.named_modules() if getattr(layer, "batch_first", None) is False)
    first = next(layers, None) if module.model_batch_first else None
    if first is None:
        return ""
    return (
        f"{first} has batch_first=False: if the samples stand in dimension 1, say per_sample(batch_first=False); if "
        "they stand in dimension 0, give it batch_first=True. "
    )


def refusal(module: Member, found: str, wanted: str, remedy: str) -> PerSampleError:
    """The error about an argument whose samples a module cannot tell apart; the module around it is tried then."""
    return complaint(name_of(module), found, wanted, remedy, refused_by=module)


def note_input(layer: Member, *, shared: bool) -> None:
    """Notes in the forward whether an input has one row that all samples share."""
    forward = forward_of(layer)
    if forward is not None:
        forward.notes.inputs_shared.append(bool(shared))  # with a symbol it is one as well


def note_shared_result(layer: Reader, result: Tensor, *, is_new: bool) -> None:
    """Notes in the forward a result for what all samples share; they stand first in it, whatever the model says."""
    forward = forward_of(layer)
    if forward is not None and layer.pass_batch_size > 1:
        forward.note_shared(cast(nn.Module, layer), result, 0, is_new=is_new)


def checked(layer: Reader, x: Tensor, feature_dims: int, dim: int, argument: str) -> Tensor:
    """`x` with B rows in dimension `dim`, one per sample: one row that all share is expanded, others are refused."""
    batch = layer.pass_batch_size
    if x.layout is not torch.strided or x.is_nested:
        _refuse_layout(layer, x, argument)
    if x.dim() <= feature_dims:
        raise refusal(
            layer,
            f"{argument} has shape {tuple(x.shape)}, no batch dimension",
            f"{feature_dims + 1} dimensions or more, the samples in dimension {dim}",
            f"Call it with {argument}.unsqueeze({dim}) for one sample, or for one that all samples share.",
        )
    rows = x.shape[dim]
    if rows in (1, batch) and batch > 1:
        note_input(layer, shared=rows == 1)
    if rows == batch:
        _refuse_shared(layer, x, argument)
        return x
    if rows != 1:
        raise _other_rows(layer, x, dim, argument, x.dim() - feature_dims)
    if _is_slice(layer, x):
        raise _slice_refusal(layer, x, argument)
    if holds_all_samples(layer, x):
        raise all_in_one_row(layer, x, argument)
    if dim and _has_samples_first(layer, x):
        raise refusal(
            layer,
            f"{argument} of shape {tuple(x.shape)} has one row in dimension {dim}, where the layer has the samples, "
            f"and {batch} in dimension 0, where the model has them",
            "the samples in the same dimension",
            "If they stand in dimension 1, say per_sample(batch_first=False); if in dimension 0, give the layer "
            "batch_first=True. What all samples share is expanded to one row for each.",
        )
    if x.requires_grad and comes_from_rows(x):
        raise refusal(
            layer,
            f"{argument} of shape {tuple(x.shape)} has one row, but was computed from {batch} rows",
            "one row per sample",
            "A layer's output has one row per sample even where its input is shared: leave out an unsqueeze(0) "
            "after a position embedding, or put it before; do not mix or pick samples.",
        )
    return x.expand(*x.shape[:dim], batch, *x.shape[dim + 1 :])


def _refuse_shared(layer: Reader, x: Tensor, argument: str) -> None:
    """Raises for an input of B rows that was said to be shared by all samples."""
    if is_shared_by_all(x) and layer.pass_batch_size > 1:
        raise refusal(
            layer,
            f"{argument} of shape {tuple(x.shape)} is shared_by_all and has {layer.pass_batch_size} rows, as many as "
            "there are samples",
            "one row that all samples share",
            f"Call the layer with shared_by_all({argument}.unsqueeze(0)); or give it to a model that calls the layer.",
        )


def _refuse_layout(layer: Reader, x: Tensor, argument: str) -> None:
    """Raises for a sparse or nested tensor; a jagged one, which has its samples first, may be taken."""
    if x.layout is torch.jagged:
        return
    remedy = f"{argument}.to_dense()"
    if x.is_nested:
        remedy = f"torch.nested.to_padded_tensor({argument}, 0.0), with a loss that leaves the padding out, "
        remedy += "or with layout=torch.jagged"
    kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
    raise refusal(layer, f"{argument} is {kind}", "a dense one", f"Call it with {remedy}.")


def _other_rows(layer: Reader, x: Tensor, dim: int, argument: str, first_feature: int) -> PerSampleError:
    batch, rows, guess, about = layer.pass_batch_size, x.shape[dim], "", "rows"
    if dim < 2 and 1 - dim < first_feature and x.shape[1 - dim] == batch:
        about = ""
        second = "If the samples stand in dimension 1, say per_sample(batch_first=False). " if dim else ""
        owner = "the layer" if hasattr(layer, "batch_first") else "per_sample"
        guess = f"If the samples stand in dimension {1 - dim}, give {owner} batch_first={dim == 1}. "
        guess = second + guess
    elif rows < batch:
        guess = (
            "Where only some samples take this way, run it for all and choose from its result, layer(x)[chosen]. Where "
            "the first tensor has the nodes of several graphs or the members of several sets, call the model with one "
            'at a time, per_sample(batch_size=1, loss_reduction="sum"). '
        )
    forward, is_folded = forward_of(layer), batch > 0 and rows % batch == 0
    told = None if layer._recorder is None else layer._recorder.settings.batch_size
    settings, said = "batch_size=..., batch_first=...", f" B = {batch} comes from the first tensor of the call."
    if layer._own_batch() is not None:
        about = ""
        said = (
            f" B = {batch} comes from its weights, which have a batch dimension: with several rows for each of them "
            "give it weight.repeat_interleave(rows, 0)."
        )
    elif forward is not None and forward.is_one_pass:
        about, said = "", ""
        guess = f"B = {batch} comes from one_pass: if there are {rows} samples, say so there. {guess}"
    elif told is not None:
        settings, about, said = "batch_first=...", "", ""
        guess = (
            f"B = {batch} comes from per_sample(batch_size={told}): if there are {rows} samples, say so there, or "
            f"leave it to the first tensor of each call, batch_size=None. {guess}"
        )
    if is_shared_by_all(x):
        guess = f"All samples share it: call the layer with {argument}.unsqueeze({dim}), one row. {guess}"
    folding = _name_of_folding(layer) if is_folded else None
    remedy = (
        "Keep the batch in a dimension of its own (unflatten it); or send the module that folds it through the general "
        "rule, alone(ItsClass) before convert"
        if folding is None
        else f"Keep the batch in a dimension of its own: {folding} folds it, so leave that out, or flatten from "
        "dimension 1 on"
    )
    fold = f"folded batch of {batch} x {rows // batch}" if is_folded else "other rows"
    error = refusal(
        layer,
        f"{argument} has shape {tuple(x.shape)}, {rows} rows in dimension {dim} ({fold})",
        f"{batch} rows, one per sample, or 1 that all share",
        f"{guess}{remedy}; or say where the samples stand, per_sample({settings}).{said}",
    )
    error.about = about
    return error


def _name_of_folding(layer: Reader) -> str | None:
    """The only `nn.Flatten` of the model that takes the dimension of the samples, if there is one."""
    recorder = layer._recorder
    if recorder is None:
        return None
    folding = [module for module in recorder.modules() if isinstance(module, nn.Flatten) and module.start_dim == 0]
    return recorder.name_of(folding[0]) if len(folding) == 1 else None


def refuse_other_than_sequences(module: Member, argument: str, x: Tensor, dim: int) -> None:
    """Raises where `x` is no batch of sequences, or where it is not clear that its samples stand in dimension `dim`."""
    if x.is_nested or x.dim() != 3:
        remedy = "Pad it (key_padding_mask)" if x.is_nested else f"Call it with {argument}.unsqueeze({dim})"
        if x.dim() > 3:  # as of an index without a batch dimension, which an embedding has looked up for each sample
            remedy = "Give it three dimensions; send a module that makes others sample by sample, alone(ItsClass)"
        raise refusal(
            module,
            f"{argument} is a nested tensor" if x.is_nested else f"{argument} has shape {tuple(x.shape)}",
            f"a batch of sequences, {'(T, B, features)' if dim else '(B, T, features)'}",
            f"{remedy}, or switch per_sample(False).",
        )
    if dim:
        _refuse_unclear_layout(module, x)


def refuse_other_samples_of_one(layer: Reader, argument: str, x: Any) -> None:
    """Raises where the model has one sample, and a layer that has the samples second is given `(1, n, features)`."""
    forward = forward_of(layer)
    settings = None if layer._recorder is None else layer._recorder.settings
    if forward is None or settings is None or settings.says_layout or not settings.batch_first:
        return
    if forward.batch_so_far == 1 and isinstance(x, Tensor) and x.dim() == 3 and x.shape[0] == 1 < x.shape[1]:
        raise _untold_layout(layer, argument, x, "and the model has them in dimension 0, where there is one")


def _untold_layout(module: Member, argument: str, x: Tensor, but: str) -> PerSampleError:
    """The error where a layer has the samples second, and nobody has said that the model has them first."""
    return complaint(
        name_of(module),
        f"{argument} has shape {tuple(x.shape)}: the layer has its samples in dimension 1 (batch_first=False), {but}",
        "to know where the samples stand in what the model is called with",
        "Say it: per_sample(batch_first=False) if they stand second there, as in (T, B, ...), and "
        "per_sample(batch_first=True) if they stand first and the model itself moves them.",
    )


def _refuse_unclear_layout(module: Member, x: Tensor) -> None:
    """Raises where the samples of `(T, B, features)` may be the positions of the model's own input, as T = B.

    The module has a `batch_first=False` of its own, and the model takes the first dimension of its input for the
    samples. With T and B different that is right, or an error: so it is clear from the first such input on.
    """
    recorder, forward = module._recorder, forward_of(module)
    if (
        recorder is None
        or forward is None
        or forward.module is cast(nn.Module, module)
        or "_layout_is_clear" in vars(module)
    ):
        return
    settings, batch = recorder.settings, forward.own_pass.batch
    if not settings.batch_first or settings.says_layout or batch < 2 or x.shape[1] != batch:
        return
    if x.shape[0] != batch:
        vars(module)["_layout_is_clear"] = True
    elif any(whole.dim() > 1 and whole.shape[0] == whole.shape[1] for whole in forward.samples):
        both = f"the model has them in dimension 0, and here both have size {batch}"
        raise _untold_layout(module, "input", x, both)


def refuse_other_count(layer: Reader, count: int, found: str, remedy: str) -> None:
    """Raises where an input has another number of samples than B, as `offsets` may say and no shape."""
    if count != layer.pass_batch_size:
        raise refusal(layer, found, f"{layer.pass_batch_size}, one per sample", remedy)


def refuse_square(layer: Reader, x: Tensor) -> None:
    """Raises for `(B, B)` in a time-first model: its samples may stand first or second."""
    if tuple(x.shape) == (layer.pass_batch_size, layer.pass_batch_size) and layer.pass_batch_size > 1:
        raise refusal(
            layer,
            f"input of shape {tuple(x.shape)} in a model with batch_first=False may have its samples first or second",
            "a shape that says which",
            "Say it with another dimension: input.unsqueeze(0) where the samples stand first, and input.unsqueeze(-1) "
            "where they stand second.",
        )


# --- one row of a batch -------------------------------------------------------------------------------------------


def _is_slice(layer: Reader, x: Tensor) -> bool:
    """Whether one row is a slice of a tensor that has all samples, as in a loop over them."""
    batch, base = layer.pass_batch_size, x._base
    if batch < 2 or base is None or base.dim() == 0 or 0 < base.numel() <= x.numel():
        return False
    forward = forward_of(layer)
    samples: Sequence[Tensor] = () if forward is None else forward.samples
    wholes = [whole for whole in samples if whole is base or (whole._base is base and whole.numel() > x.numel())]
    if base.shape[0] == 1 or (not wholes and base.dim() < x.dim()):  # one that all samples share
        return False
    return any(_leaves_out(x, whole, batch) for whole in wholes or [base])


def _leaves_out(x: Tensor, whole: Tensor, batch: int) -> bool:
    """Whether a view takes one of B places in its base: along one dimension of size B, or along several together."""
    kept = {(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1}
    left_out = [size for size, stride in zip(whole.shape, whole.stride(), strict=True) if (size, stride) not in kept]
    return batch in left_out or batch in accumulate(left_out, mul)


def _slice_refusal(layer: Reader, x: Tensor, argument: str) -> PerSampleError:
    base = () if x._base is None else tuple(x._base.shape)
    return refusal(
        layer,
        f"{argument} of shape {tuple(x.shape)} is a slice of a tensor of shape {base}",
        f"all {layer.pass_batch_size} samples at once",
        "Call the layer on the whole batch; for a loop over the samples, switch per_sample(False). Expand a slice "
        "that all samples share to B rows.",
    )


# --- all samples in one row ---------------------------------------------------------------------------------------


def holds_all_samples(layer: Reader, x: Tensor) -> bool:
    """Whether one row has the numbers of all samples, one after the other, as `x.reshape(1, B * T, features)`.

    Before the first layer there is no graph that tells. But such a row is a view of B rows that are no buffer of the
    model, or it has the same values as an argument with B rows.
    """
    batch, forward, base = layer.pass_batch_size, forward_of(layer), x._base
    if is_traced() or batch < 2 or forward is None or x.numel() == 0 or x.is_meta:
        return False
    batch_first = forward.recorder.settings.batch_first
    shared: list[Any] = [argument for argument in tensors(forward.inputs) if is_shared_by_all(argument)]
    wholes = [whole for argument in shared for whole in (argument, argument._base)]
    if is_shared_by_all(x) or any(base is whole for whole in wholes if whole is not None):
        return False

    def has_rows(whole: Tensor) -> bool:
        dim = batch_dim(whole.dim(), batch_first=batch_first)
        # labels (B,) have as many numbers as one row of B features by chance
        return whole is not x and whole.dim() > 1 and whole.numel() == x.numel() and whole.shape[dim] == batch

    if base is not None and has_rows(base) and not base.requires_grad and not _is_buffer(layer, base):
        return True
    same_size = [whole for whole in forward.samples if has_rows(whole) and whole.dtype == x.dtype]
    return any(whole._base is base is not None or _have_same_values(whole, x) for whole in same_size)


def _has_samples_first(layer: Reader, x: Tensor) -> bool:
    """Whether an input of a layer that has the samples second may have them first, as the model, and is no table."""
    forward = forward_of(layer)
    if is_traced() or forward is None or forward.order is None or not forward.recorder.settings.batch_first:
        return False
    is_of_model = id(x) in forward.order.constants.known or (x.requires_grad and not forward.is_argument(x))
    return x.shape[0] == layer.pass_batch_size and not is_shared_by_all(x) and not is_of_model


def _have_same_values(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, in any order."""
    sides = (torch.view_as_real(side) if side.is_complex() else side for side in (x.detach(), other.detach()))
    numbers, other_numbers = (side.flatten().sort().values for side in sides)
    return torch.equal(numbers, other_numbers)


def all_in_one_row(layer: Reader, x: Tensor, argument: str) -> PerSampleError:
    """The error about one row that has the numbers of all samples."""
    return refusal(
        layer,
        f"{argument} of shape {tuple(x.shape)} has one row, but the numbers of all {layer.pass_batch_size} samples",
        "one row per sample",
        "Keep the batch in a dimension of its own; or expand to one row per sample what all of them share.",
    )


# --- an index, which may lack the dimension of the samples --------------------------------------------------------


def index_by_sample(layer: IndexReader, index: Tensor) -> tuple[Tensor, int]:
    """The index as `(B, *)`, and the dimension in which the samples stand in what is looked up.

    Raises:
        PerSampleError: If nothing tells what the samples are.
    """
    batch = layer.pass_batch_size
    dim = layer._samples_dim if index.dim() > 1 else 0
    rows = index.shape[dim] if index.dim() else None
    if batch > 1 and (index.shape == (1,) or (rows == batch and _may_be_positions(layer, index))):
        raise refusal(
            layer,
            f"input has shape {tuple(index.shape)} and may be positions that all {batch} samples share, or one row "
            "per sample",
            "an index that can be read in one way only",
            f"Call it with index.unsqueeze({layer._samples_dim}) for positions, or with index.unsqueeze(1) and "
            "squeeze(1) after it for samples.",
        )
    if rows == batch:
        _refuse_shared(layer, index, "input")
        note_input(layer, shared=False)
        return index.transpose(0, dim), dim
    if _is_slice(layer, index) and not (index.dim() == 1 and _are_positions(index, usually=True)):
        raise _slice_refusal(layer, index, "input")
    if rows == 1 and index.dim() > 1:
        if holds_all_samples(layer, index) and not _are_positions(index.flatten(), usually=True):
            raise all_in_one_row(layer, index, "input")
        note_input(layer, shared=batch > 1)
        return index.transpose(0, dim).expand(batch, *[-1] * (index.dim() - 1)), dim
    if batch > 1:
        _refuse_other_batch(layer, index, dim)
    note_input(layer, shared=batch > 1)
    forward = forward_of(layer)
    if forward is not None:
        forward.notes.broadcast.append(cast(nn.Module, layer))
    return index.expand(batch, *index.shape), layer._samples_dim if index.dim() else 0


_LARGE = 4  # smaller matrices have equal diagonals by chance


def _may_be_positions(layer: IndexReader, index: Tensor) -> bool:
    """Whether B indices may be positions that all samples share, and not one index per sample.

    An argument of the model is taken for samples, unless it counts from 0. A layer that was given one index per sample
    before takes one per sample from then on, whatever their values are.
    """
    forward = forward_of(layer)
    is_argument = forward is not None and forward.is_argument(index)
    is_small = index.dim() > 1 and not is_symbol(index.shape[0]) and index.shape[0] < _LARGE
    if is_argument and is_small:  # words are so by chance
        return False
    if _are_positions(index, usually=False):
        if index.dim() != 1 or forward is None or not (is_argument or forward.is_shifted_argument(index)):
            return True
        return not layer._takes_labels and bool(index[0] == 0)
    if index.dim() != 1 or (is_traced() and layer._takes_labels):
        return False
    if not is_argument and _is_buffer(layer, index):
        return True
    layer.__dict__["_takes_labels"] = True
    return False


def _is_buffer(layer: Reader, index: Tensor) -> bool:
    """Whether an index is a buffer of the model, or a view of one."""
    modules: Any = () if layer._recorder is None else layer._recorder.modules()
    memory = index.untyped_storage()._cdata
    buffers = (buffer for module in modules for buffer in module._buffers.values() if buffer is not None)
    return any(buffer.untyped_storage()._cdata == memory for buffer in buffers)


def _refuse_other_batch(layer: Reader, index: Tensor, dim: int) -> None:
    """Raises for an index that looks like a folded batch, or an even part of a batch, unless it is like positions."""
    batch = layer.pass_batch_size
    sizes = [size for size in index.shape[: dim + 1] if size > 1 and (size % batch == 0 or batch % size == 0)]
    if sizes and not _are_positions(index, usually=True):
        kind = f"folded batch of {batch} x {sizes[0] // batch}" if sizes[0] > batch else f"part of {batch}"
        raise refusal(
            layer,
            f"input has shape {tuple(index.shape)}, {sizes[0]} rows ({kind})",
            f"{batch} rows, one per sample, or an index without a batch dimension that all share",
            f"Keep the batch in a dimension of its own (unflatten it); call it with index.unsqueeze({dim}) if all "
            "samples share the index.",
        )


def _are_positions(index: Tensor, *, usually: bool) -> bool:
    """Whether an index is like `arange` or a matrix of relative positions; a trace assumes what is `usually` so."""
    if index.dim() == 1:
        condition = (index.diff() == 1).all()
    elif index.dim() != 2 or index.shape[0] != index.shape[1]:
        return False
    else:
        condition = (index[1:, 1:] == index[:-1, :-1]).all() & (index != index[0, 0]).any()
        if len(index) < _LARGE:
            condition &= (index[0].diff().abs() == 1).all() & (index[:, 0].diff().abs() == 1).all()
    if is_traced():
        assume(condition == usually, "call after call its indices are of another kind than at the call that was traced")
        return usually
    return bool(condition)
