"""Operations that put a sample in another one's place, before a layer whose rows are those of the samples.

A model may sort its sequences by length, run a layer, and go back: every result is right, but row i of that layer's
parameters is another sample's than row i of the others. So a sample would be in two rows that are clipped apart.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from expanded_nn._batch import batch_dim, tensors
from expanded_nn._bytecode import constant_index
from expanded_nn._errors import LIBRARIES, complaint
from expanded_nn._traced import is_traced
from expanded_nn.recording.expand import comes_from_rows
from expanded_nn.recording.owner import Owner
from expanded_nn.recording.places import PLAIN, Move, Moved, all_stay, index_of, move_of


class Order(TorchFunctionMode):
    """Follows samples that take each other's places, and raises where they reach a layer.

    Attributes:
        recorder: The recorder of the model.
        may_move: Whether there was an operation whose index may do so, if with other values.
        moved: The tensors whose samples stand in another order, by their ids, and what did it.
        weights_are_outside: Whether the forward has used expanded weights outside of layers, which nobody looks at.
    """

    def __init__(self, recorder: Owner) -> None:
        super().__init__()
        self.recorder = recorder
        self.may_move = False
        self.moved: dict[int, tuple[Tensor, list[Moved]]] = {}
        self.weights_are_outside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIZES and args:
            self._look_at_size(func, *args, **kwargs)
        move = move_of(func, args, kwargs)
        moved = None if move is None else self._moved_by(move, func)
        result = func(*args, **kwargs)
        if moved is not None or self.moved:
            changed = args[:1] if func is Tensor.__setitem__ else ()
            self.follow((args, kwargs), (result, changed), *([] if moved is None else [moved]))
        return result

    def _look_at_size(self, func: Any, x: Tensor, dim: int | None = None) -> None:
        """Raises where the forward asks for a size that the samples' dimension has made another one."""
        forward = self.recorder.forward
        results = () if forward is None or self.recorder.general_rule is not None else forward.notes.shared_results
        shared = next((result for result in results if result.is_new and result.node is x.grad_fn), None)
        if shared is None or _is_called_by_libraries():
            return
        if func in (_SHAPE, Tensor.size) and dim is None:
            dim = constant_index(_calling_frame())
        if dim is None or dim >= 0 or dim % shared.rank <= shared.dim:
            raise forward.taking_apart(shared.layer, "its size")

    def follow(self, arguments: Any, results: Any, *moves: Moved) -> None:
        """Notes that the samples of results stand in another order: as those of the arguments, or after `moves`."""
        reasons = [*self._reasons(arguments), *moves]
        if reasons and self.weights_are_outside:
            self.refuse(None, reasons)
        for result in _tensors(results) if reasons else ():
            self.moved[id(result)] = result, reasons

    def has_moved(self, arguments: Any) -> bool:
        """Whether samples stand in another order in any of some tensors."""
        return bool(self._reasons(arguments))

    def look_at(self, layer: nn.Module, arguments: Any) -> None:
        """Raises if samples in another order reach a layer whose parameters get rows."""
        if self.moved and self.recorder.general_rule is None:  # there each sample is alone
            self.refuse(layer, self._reasons(arguments))

    def note_outside_use(self) -> None:
        """Notes that an expanded weight is used outside of layers."""
        self.weights_are_outside = True
        self.refuse(None, [reason for _, reasons in self.moved.values() for reason in reasons])

    def _reasons(self, arguments: Any) -> list[Moved]:
        """What has moved the samples in any of some tensors."""
        moved = [x for x in _tensors(arguments) if id(x) in self.moved] if self.moved else []
        return list({id(reason): reason for x in moved for reason in self.moved[id(x)][1]}.values())

    def _moved_by(self, move: Move, func: Any) -> Moved | None:
        """How an operation gives the samples another order, `None` if it does not.

        It is about samples if it chooses places in their dimension, in a tensor that has B of them there. An index that
        leaves sample i in place i moves nobody, but may do so at the next call, which `may_move` tells.
        """
        recorder = self.recorder
        forward = recorder.forward
        if forward is None or recorder.general_rule is not None:
            return None
        rows, shape = move.rows, move.shape
        if type(rows) not in PLAIN or rows.is_meta:
            return None
        batch, dims = forward.batch_so_far, len(shape)
        dim = batch_dim(dims, batch_first=recorder.settings.batch_first)
        if (
            batch is None
            or batch < 2
            or dims <= dim
            or shape[dim] != batch
            or dim not in [move_dim % dims for move_dim in move.dims]
        ):
            return None
        index = index_of(move.index, dim, dims) if isinstance(move.index, tuple) else move.index
        if index is NotImplemented or _is_called_by_libraries() or not self._are_samples(rows):
            return None
        stays = None
        if index is not None:
            stays = all_stay(index, dim, dims, batch)
            if stays is None:
                return None
            self.may_move = True
            if not is_traced() and bool(stays):
                return None
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((*LIBRARIES, "<"))]
        line = f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
        return Moved(getattr(func, "__name__", str(func)), stays, line=line)

    def _are_samples(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of the forward, or comes from a layer; others may have B rows by chance."""
        base, arguments = x if x._base is None else x._base, _tensors(self.recorder.forward.inputs)
        is_argument = any(argument is base or argument is x or argument._base is base for argument in arguments)
        return is_argument or id(x) in self.moved or comes_from_rows(x)

    def refuse(self, layer: nn.Module | None, reasons: Sequence[Moved]) -> None:
        """Raises for the first reason, if there is any that a trace cannot assume away."""
        moved = next((reason for reason in reasons if not reason.may_be_assumed_away("its layers")), None)
        if moved is None:
            return
        assert self.recorder.forward is not None
        error = complaint(
            self.recorder.name_of(self.recorder.forward.module if layer is None else layer),
            f"in its input samples have taken each other's places ({moved.operation}{moved.line}), so that row i of "
            "its parameters would be of another sample than row i of other layers'",
            "sample i in row i of every layer's input",
            "Leave the order as it is: pack_padded_sequence(..., enforce_sorted=False) sorts by itself, and brings "
            "what comes out back in order. Or sort the batch before the model. What compares samples with each other "
            "belongs into the loss.",
        )
        error.refused_by = self  # which module is around all of it is not known: the one that was called
        raise error


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside of a value; of packed sequences their data."""
    return (x if isinstance(x, Tensor) else x.data for x in tensors(value))


def as_one_operation(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function without a look at the operations in it, under which torch's layers have no fused inference."""
    count = torch._C._len_torch_function_stack()
    order = torch._C._get_function_stack_at(count - 1) if count else None
    if not isinstance(order, Order):
        return function(*args, **kwargs)
    with _pop_mode_temporarily():
        result = function(*args, **kwargs)
    if order.moved:
        order.follow((args, kwargs), result)
    return result


def _calling_frame() -> FrameType:
    """The frame that has called the operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return frame


def _is_called_by_libraries() -> bool:
    """Whether the operation is torch's or ours: `pack_padded_sequence`, which notes the order, or a layer."""
    return _calling_frame().f_code.co_filename.startswith(LIBRARIES)


_BETWEEN = {"_look_at_size", "_moved_by", "__torch_function__", "handle_torch_function", "__len__"}
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZES = {_SHAPE, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndim.__get__}  # type: ignore[attr-defined]
