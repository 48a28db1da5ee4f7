"""Operations that put a sample in another one's place, between layers whose rows are those of the samples.

A model may sort its sequences by length, run a layer, and go back: every result is right, but row i of that layer's
parameters is another sample's than row i of the others. So a sample would be in two rows that are clipped apart.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from expanded_nn._batch import batch_dim
from expanded_nn._errors import LIBRARIES, PerSampleError, complaint
from expanded_nn._traced import assume, is_traced, wait_for_values
from expanded_nn.recording.expand import comes_from_rows
from expanded_nn.recording.owner import Settings

_PLAIN = (Tensor, FakeTensor)


class Recording(Protocol):
    """A recorder, as far as it is needed here."""

    forward: Any
    general_rule: Any
    settings: Settings

    def name_of(self, member: nn.Module | Tensor) -> str: ...


class Move(NamedTuple):
    """What an operation does with a tensor's places.

    Attributes:
        rows: The tensor whose rows are taken, or written elsewhere.
        whole: The tensor in which places are chosen.
        dims: The dimensions in which they are.
        index: Which places: a tensor, an index of several dimensions, or `None` where the operation itself says it.
    """

    rows: Any
    whole: Any
    dims: Sequence[int]
    index: Any = None


class Order(TorchFunctionMode):
    """Raises where a forward gives samples that have gone through a layer another order.

    Attributes:
        recorder: The recorder of the model.
        found: Whether there was an operation that may do so for other values.
    """

    def __init__(self, recorder: Recording) -> None:
        super().__init__()
        self.recorder = recorder
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        move_of = _MOVES.get(func)
        if move_of is not None:
            try:
                move = move_of(*args, **kwargs)
            except (TypeError, ValueError):  # torch says what is wrong with the call
                move = None
            if move is not None:
                self._look(move, func)
        return func(*args, **kwargs)

    def _look(self, move: Move, func: Any) -> None:
        recorder = self.recorder
        forward = recorder.forward
        if forward is None or recorder.general_rule is not None:  # there each sample is alone
            return
        rows, whole = move.rows, move.whole
        if type(rows) not in _PLAIN or type(whole) not in _PLAIN or rows.grad_fn is None or rows.is_meta:
            return
        batch, dims = forward.own_pass.batch, whole.dim()
        dim = batch_dim(dims, batch_first=recorder.settings.batch_first)
        if batch < 2 or dims <= dim or whole.shape[dim] != batch or dim not in [each % dims for each in move.dims]:
            return
        index = _index_of(move.index, dim, dims) if isinstance(move.index, tuple) else move.index
        if index is NotImplemented or _is_called_by_libraries():
            return
        if index is not None:
            index = index.movedim(dim, 0) if index.dim() == dims else index
            if index.dim() == 0 or index.shape[0] != batch or not comes_from_rows(rows):
                return
            own = torch.arange(batch, device=index.device).view(-1, *[1] * (index.dim() - 1))
            stays = (index % batch == own).all()
            self.found = True
            if is_traced():
                assume(stays, "call after call samples take each other's places between its layers")
                return
            if bool(stays):
                return
        elif not comes_from_rows(rows):
            return
        wait_for_values("it puts samples in another order")
        raise self._refusal(getattr(func, "__name__", str(func)))

    def _refusal(self, operation: str) -> PerSampleError:
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((*LIBRARIES, "<"))]
        where = f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
        assert self.recorder.forward is not None
        error = complaint(
            self.recorder.name_of(self.recorder.forward.module),
            f"between two of its layers samples take each other's places ({operation}{where}), so that row i of one "
            "layer's parameters would be of another sample than row i of the other's",
            "sample i in row i of every layer's input",
            "Leave the order as it is: pack_padded_sequence(..., enforce_sorted=False) sorts by itself, and brings "
            "what comes out back in order. Or sort the batch before the model. What compares samples with each other "
            "belongs into the loss.",
        )
        error.refused_by = self  # which module is around both layers is not known: the one that was called
        return error


def pauses_order() -> AbstractContextManager[object]:
    """Takes the look at operations off, as torch's layers have no fused inference below it."""
    count = torch._C._len_torch_function_stack()
    if count and isinstance(torch._C._get_function_stack_at(count - 1), Order):
        return _pop_mode_temporarily()
    return nullcontext()


def _is_called_by_libraries() -> bool:
    """Whether the operation is torch's or ours: `pack_padded_sequence`, which notes the order, or a layer."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # this mode's, and other modes'
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(LIBRARIES)


def _index_of(keys: tuple[Any, ...], dim: int, dims: int) -> Any:
    """The integers that an index has for a dimension; `NotImplemented` if it has none, or chooses there by another."""
    if len(keys) == 1 and isinstance(keys[0], list):
        keys = (torch.tensor(keys[0]),)
    lengths = [0 if key is None or isinstance(key, bool) else _length(key) for key in keys]
    places, place = [], 0
    for key, length in zip(keys, lengths, strict=True):
        places.append(place)
        place += dims - sum(lengths) if key is Ellipsis else length
    integers = [
        (place, key)
        for place, key in zip(places, keys, strict=True)
        if isinstance(key, Tensor) and key.dim() and key.dtype not in (torch.bool, torch.uint8)
    ]
    if len(integers) > 1:  # an element for each sample, as in h[torch.arange(B), lengths - 1]
        counts = [key for _, key in integers if key.dim() == 1]
        if any(torch.equal(key, torch.arange(len(key), device=key.device)) for key in counts if not is_traced()):
            return NotImplemented
    return next((key for place, key in integers if place == dim), NotImplemented)


def _length(key: Any) -> int:
    """How many dimensions a part of an index is for."""
    if key is Ellipsis:
        return 0
    return key.dim() if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) else 1


# Operations, called as torch's are


def _getitem(input: Any, key: Any) -> Move | None:
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(each, Tensor | list) for each in keys):
        return None
    return Move(input, input, range(input.dim()), keys)


def _setitem(input: Any, key: Any, value: Any) -> Move | None:
    move = _getitem(input, key)
    return None if move is None else move._replace(rows=value)


def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Move:
    return Move(values, input, range(input.dim()), tuple(slice(None) if each is None else each for each in indices))


def _chosen(input: Any, dim: Any, index: Any, **options: Any) -> Move:
    return Move(input, input, [dim], index)


def _written(input: Any, dim: Any, index: Any, source: Any = None, **options: Any) -> Move:
    return Move(options.get("src", source), input, [dim], index)


def _take_along_dim(input: Any, indices: Any, dim: Any = None) -> Move:
    return Move(input, input, [] if dim is None else [dim], indices)


def _flip(input: Any, *dims: Any, **named: Any) -> Move:
    (dims,) = (named["dims"],) if named else dims if len(dims) == 1 else (dims,)
    return Move(input, input, [dims] if isinstance(dims, int) else dims)


def _flipud(input: Any) -> Move:
    return Move(input, input, [0])


def _roll(input: Any, shifts: Any, dims: Any = ()) -> Move:
    return Move(input, input, [dims] if isinstance(dims, int) else dims)


def _sort(input: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Move:
    return Move(input, input, [dim])


def _named(move_of: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    """The functions of torch of these names, and methods of tensors."""
    functions = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return {function: move_of for function in functions if function is not None}


_MOVES: dict[Any, Callable[..., Move | None]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    **_named(_index_put, "index_put", "index_put_"),
    **_named(_chosen, "index_select", "gather"),
    **_named(_written, "index_copy", "index_copy_", "index_add", "index_add_"),
    **_named(_written, "scatter", "scatter_", "scatter_add", "scatter_add_"),
    **_named(_take_along_dim, "take_along_dim"),
    **_named(_flip, "flip"),
    **_named(_flipud, "flipud"),
    **_named(_roll, "roll"),
    **_named(_sort, "sort"),
}
