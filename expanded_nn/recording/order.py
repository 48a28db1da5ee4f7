"""Operations that put a sample in another one's place, before a layer whose rows are those of the samples.

A model may sort its sequences by length, run a layer, and go back: every result is right, but row i of that layer's
parameters is another sample's than row i of the others. So a sample would be in two rows that are clipped apart.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from expanded_nn._batch import batch_dim, tensors
from expanded_nn._bytecode import constant_index
from expanded_nn._errors import LIBRARIES, complaint
from expanded_nn._traced import assume, is_traced, wait_for_values
from expanded_nn.recording.expand import comes_from_rows
from expanded_nn.recording.owner import Owner

_PLAIN = (Tensor, FakeTensor)


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


class Moved(NamedTuple):
    """What has put samples in another order.

    Attributes:
        operation: Its name.
        place: The line of it, as a part of an error.
        stays: In a trace, the condition that each sample has stayed in its place.
        dim: Where the samples stand since another dimension of as many has taken the place of theirs; `None` if it is
            they that have taken each other's places.
    """

    operation: str
    place: str
    stays: Tensor | None
    dim: int | None = None


class Order(TorchFunctionMode):
    """Follows samples that take each other's places, and raises where they reach a layer.

    Attributes:
        recorder: The recorder of the model.
        moved: The tensors whose samples stand in another order, by their ids, and what did it.
        copies: The results for what all samples share that have a dimension for them, and what is made of those
            alone, by their ids, and the layer.
        weights_are_outside: Whether the forward has used expanded weights outside of layers, which nobody looks at.
    """

    def __init__(self, recorder: Owner) -> None:
        super().__init__()
        self.recorder = recorder
        self.moved: dict[int, tuple[Tensor, list[Moved]]] = {}
        self.weights_are_outside = False
        self.copies: dict[int, tuple[Tensor, nn.Module]] = {}

    def __enter__(self) -> Order:
        self.recorder.escalation.order = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recorder.escalation.order = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKED_AT and not self.moved and not self.copies:
            return func(*args, **kwargs)
        if func in _SIZES and args:
            self._look_at_size(func, *args, **kwargs)
        move_of = _MOVES.get(func)
        moved = None
        if move_of is not None:
            try:
                move = move_of(*args, **kwargs)
            except (TypeError, ValueError):  # torch says what is wrong with the call
                move = None
            moved = None if move is None else self._moved_by(move, func)
        result = func(*args, **kwargs)
        if self.copies:
            self._look_at_copies(func, args, kwargs, result)
        if func is torch.stack and not self.moved:
            moved = self._stacked(result, *args, **kwargs)
        if moved is None and func in _TURNS and args:
            self._turn(func, args, kwargs, result)
        elif moved is not None or self.moved:
            changed = args[:1] if func is Tensor.__setitem__ else ()
            self.follow((args, kwargs), (result, changed), *([] if moved is None else [moved]))
        return result

    def _look_at_size(self, func: Any, x: Tensor, dim: int | None = None) -> None:
        """Raises where the forward asks for a size that the samples' dimension has made another one."""
        forward = self.recorder.forward
        results = () if forward is None or self.recorder.general_rule is not None else forward.notes.shared_results
        shared = next((result for result in results if result.is_new and result.node is x.grad_fn), None)
        if shared is None or _is_called_by_libraries(func):
            return
        if func in (_SHAPE, Tensor.size) and dim is None:
            dim = constant_index(_calling_frame(func))
        if dim is None or dim >= 0 or dim % shared.rank <= shared.dim:
            raise forward.taking_apart(shared.layer, "its size")

    def note_copies(self, layer: nn.Module, result: Tensor) -> None:
        """Notes a layer's result for what all samples share; in the plain model it has no dimension for them."""
        if self.recorder.general_rule is None:
            self.copies[id(result)] = result, layer

    def _look_at_copies(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Raises where an operation does something else with the copies for the samples than with one alone.

        It is done with copies that differ, and with one of them, as the plain model has it.
        """
        forward, (leaves, structure) = self.recorder.forward, tree_flatten((args, kwargs))
        results = [each for each in _tensors(result) if each.is_floating_point()]
        copies = [leaf for leaf in leaves if id(leaf) in self.copies]
        if not copies or not results or self.recorder.general_rule is not None or _is_called_by_libraries(func):
            return
        batch, layer = len(copies[0]), self.copies[id(copies[0])][1]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.copies]
        meets_samples = any(x.dim() and x.shape[0] == batch and self._are_samples(x) for x in others)
        name = getattr(func, "__name__", "")
        key = (func, meets_samples, *(tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves))
        alike = self.recorder.escalation.alike
        if key not in alike and not _REPEATS_NOT.search(name):
            wait_for_values("it looks at what all samples share")
            differing = [_differing(leaf) if id(leaf) in self.copies else leaf for leaf in leaves]
            second = [leaf[1] if id(own) in self.copies else leaf for own, leaf in zip(leaves, differing, strict=True)]
            with torch.no_grad():
                of_all, of_second = (
                    [*_tensors(_called(func, tree_unflatten(each, structure)))] for each in (differing, second)
                )
            if not _are_alike(of_all, of_second, batch, meets_samples=meets_samples):
                raise forward.taking_apart(layer, "select" if name == "__getitem__" else name)
            alike[key] = not meets_samples and not any(map(_is_spread, of_second, of_all))
        if alike.get(key, not meets_samples):  # the results are copies as well
            self.copies.update({id(each): (each, layer) for each in results if each.dim() and len(each) == batch})

    def follow(self, given: Any, results: Any, *more: Moved) -> None:
        """Notes that what is computed from samples in another order has them in that order."""
        reasons = [*self._reasons(given), *more]
        if reasons and self.weights_are_outside:
            self.refuse(None, reasons)
        for result in _tensors(results) if reasons else ():
            self.moved[id(result)] = result, reasons

    def paused(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's result, without a look at its operations; torch's layers have no fused inference below one."""
        count = torch._C._len_torch_function_stack()
        if not count or torch._C._get_function_stack_at(count - 1) is not self:
            return function(*args, **kwargs)
        mode = _pop_mode()
        try:
            result = function(*args, **kwargs)
        finally:
            _push_mode(mode)
        if self.moved:
            self.follow((args, kwargs), result)
        layers = [self.copies[id(x)][1] for x in tensors((args, kwargs)) if id(x) in self.copies] if self.copies else []
        if layers and len(layers) == len(list(tensors((args, kwargs)))):
            self.copies.update({id(x): (x, layers[0]) for x in _tensors(result) if x.is_floating_point()})
        return result

    def has_moved(self, given: Any) -> bool:
        """Whether samples stand in another order in any of some tensors."""
        return bool(self._reasons(given))

    def look_at(self, layer: nn.Module, given: Any, *, is_plain: bool = False) -> None:
        """Raises if samples in another order reach a layer whose parameters get rows.

        A plain forward leaves no rows, but if it is that of a reentrant checkpoint, whose second one does.
        """
        if self.moved and is_plain and not _is_in_reentrant_checkpoint():
            return
        if self.moved and self.recorder.general_rule is None:  # there each sample is alone
            dim = cast(Any, layer)._samples_dim
            self.refuse(layer, [reason for reason in self._reasons(given) if reason.dim is None or reason.dim != dim])

    def note_outside_use(self) -> None:
        """Notes that an expanded weight is used outside of layers."""
        self.weights_are_outside = True
        self.refuse(None, [reason for _, reasons in self.moved.values() for reason in reasons])

    def _reasons(self, given: Any) -> list[Moved]:
        found = [self.moved[id(x)][1] for x in _tensors(given) if id(x) in self.moved] if self.moved else []
        return list({id(reason): reason for reasons in found for reason in reasons}.values())

    def _moved_by(self, move: Move, func: Any) -> Moved | None:
        """How an operation gives the samples another order, `None` if it does not.

        It is about samples if it chooses places in their dimension, in a tensor that has B of them there. An index that
        leaves sample i in place i moves nobody.
        """
        recorder = self.recorder
        forward = recorder.forward
        if forward is None or recorder.general_rule is not None:
            return None
        rows, whole = move.rows, move.whole
        if type(rows) not in _PLAIN or type(whole) not in _PLAIN or rows.is_meta:
            return None
        batch, dims = forward.batch_so_far, whole.dim()
        dim = batch_dim(dims, batch_first=recorder.settings.batch_first)
        if batch is None or batch < 2 or dims <= dim or dim not in [each % dims for each in move.dims]:
            return None
        index, count = move.index, whole.shape[dim]
        if isinstance(index, tuple):
            index, count = masked(index, count) or (index_of(index, dim, dims), count)
        if count % batch or index is NotImplemented or _is_called_by_libraries(func) or not self._are_samples(rows):
            return None
        stays = None
        if count != batch:  # positions of all samples in one dimension
            are_of_samples = whole.shape[dim] == batch or self._are_folded(rows, batch)
            if index is None or index.dim() != 1 or len(index) != batch or not are_of_samples:
                return None
            stays = all_stay(index // (count // batch), 0, 1, batch)
        elif index is not None:
            stays = all_stay(index, dim, dims, batch)
        if index is not None and (stays is None or (not is_traced() and bool(stays))):
            return None
        return Moved(getattr(func, "__name__", str(func)), _place(), stays)

    def _turn(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follows samples whose dimension another one of B takes the place of, and may give it back."""
        x, forward = args[0], self.recorder.forward
        if forward is None or self.recorder.general_rule is not None or type(x) not in _PLAIN or x.dim() < 2:
            return
        usual = batch_dim(x.dim(), batch_first=self.recorder.settings.batch_first)
        reasons, batch = self._reasons((args, kwargs)), forward.batch_so_far
        sizes = list(x.shape)
        # a single position would be taken for what all samples share
        may_turn = batch is not None and sizes[usual] == batch > 1 and (1 in sizes or sizes.count(batch) > 1)
        if not reasons and not may_turn:
            return
        dims = _dims_after(func, x, args[1:], kwargs)
        if dims is None:
            self.follow((args, kwargs), result)
            return
        now = next(iter(_tensors(result)))
        here = batch_dim(len(dims), batch_first=self.recorder.settings.batch_first)
        size = now.shape[here] if len(dims) > here else 0
        kept = []
        for reason in reasons:
            dim = dims.index(reason.dim) if reason.dim in dims else reason.dim
            if reason.dim is None or dim != here or size != batch:
                kept.append(reason._replace(dim=dim))
        is_turned = not reasons and size in (1, batch) and usual in dims and dims[here] != usual
        if is_turned and not _is_called_by_libraries(func) and self._are_samples(x):
            kept.append(Moved(func.__name__, _place(), None, dims.index(usual)))
        for each in _tensors(result) if kept else ():
            self.moved[id(each)] = each, kept
        if kept and self.weights_are_outside:
            self.refuse(None, kept)

    def _stacked(self, result: Tensor, tensors: Sequence[Tensor], dim: int = 0, **out: Any) -> Moved | None:
        """As many positions as there are samples, put where these are looked for."""
        forward, usual = self.recorder.forward, batch_dim(result.dim(), batch_first=self.recorder.settings.batch_first)
        if forward is None or self.recorder.general_rule is not None or dim % result.dim() != usual or usual > 1:
            return None
        batch, sizes = forward.batch_so_far, list(result.shape[:2])
        if (
            sizes != [batch, batch]
            or batch == 1
            or _is_called_by_libraries(torch.stack)
            or not all(map(self._are_samples, tensors))
        ):
            return None
        return Moved("stack", _place(), None, 1 - usual)

    def _are_folded(self, x: Tensor, batch: int) -> bool:
        """Whether a tensor of more than B rows may hold the positions of B samples, and not what all samples share."""
        base = x._base
        return comes_from_rows(x) or (base is not None and base.shape[0] == batch)

    def _are_samples(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of the forward, or comes from a layer; others may have B rows by chance."""
        base = x if x._base is None else x._base
        arguments = list(_tensors(self.recorder.forward.inputs))
        is_argument = any(each is base or each is x or each._base is base for each in arguments)
        # without gradients, as in a reentrant checkpoint, nothing tells where it comes from
        return is_argument or id(x) in self.moved or not torch.is_grad_enabled() or comes_from_rows(x)

    def refuse(self, layer: nn.Module | None, reasons: Sequence[Moved]) -> None:
        """Raises for the first reason, if there is any; a trace assumes that samples have stayed in their places."""
        if is_traced() and all(reason.stays is not None for reason in reasons):
            for reason in reasons:
                assume(
                    cast(Tensor, reason.stays), "call after call samples take each other's places between its layers"
                )
            return
        if not reasons:
            return
        wait_for_values("it puts samples in another order")
        operation, place, *_ = reasons[0]
        assert self.recorder.forward is not None
        error = complaint(
            self.recorder.name_of(self.recorder.forward.module if layer is None else layer),
            f"in its input samples have taken each other's places ({operation}{place}), so that row i of its "
            "parameters would be of another sample than row i of other layers'",
            "sample i in row i of every layer's input",
            "Leave the order as it is: pack_padded_sequence(..., enforce_sorted=False) sorts by itself, and brings "
            "what comes out back in order. Or sort the batch before the model. What compares samples with each other "
            "belongs into the loss.",
        )
        error.refused_by = self  # which module is around all of it is not known: the one that was called
        raise error


def _differing(copies: Tensor) -> Tensor:  # (B, ...)
    """Copies that differ from each other."""
    factors = 1 + torch.arange(len(copies), device=copies.device) / len(copies)
    return copies.detach() * factors.to(copies.dtype).view(-1, *[1] * (copies.dim() - 1))


def _is_spread(alone: Tensor, whole: Tensor) -> bool:
    """Whether what all samples share was expanded to a row for each of them."""
    return alone.dim() > 0 and alone.shape == whole.shape


def _called(func: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    return func(*args, **kwargs)


def _are_alike(of_all: list[Tensor], of_second: list[Tensor], batch: int, *, meets_samples: bool) -> bool:
    """Whether results for all copies hold, for the second sample, those of its copy alone."""
    if len(of_all) != len(of_second):
        return False
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


def _place() -> str:
    """The line of the user's that has called an operation, as a part of an error."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((*LIBRARIES, "<"))]
    return f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def _dims_after(func: Any, x: Tensor, args: Any, kwargs: Any) -> list[int] | None:
    """The dimensions of `x` that an operation leaves, in their new order; `None` if that is not known."""
    sizes = range(1000, 1000 + x.dim())  # one for each dimension
    if any(isinstance(given, Tensor) for given in tree_leaves((args, kwargs))):
        return None
    try:
        found = func(torch.empty(tuple(sizes), device="meta"), *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None
    found = next(_tensors(found), None)
    dims = [] if found is None else [size - 1000 for size in found.shape]
    return dims if found is not None and len(set(dims)) == len(dims) and set(dims) <= set(range(x.dim())) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside of a value; of packed sequences their data."""
    return (x if isinstance(x, Tensor) else x.data for x in tensors(value))


def _calling_frame(func: Any) -> FrameType:
    """The frame that has called the operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    own, code = frame, getattr(func, "__code__", None)  # of one that torch has written in Python
    while own.f_back is not None and code is not None and own.f_code.co_filename.startswith(LIBRARIES):
        if own.f_code is code:
            frame = own.f_back
        own = own.f_back
    return frame


def _is_in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint's first forward runs this code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not checkpoint.CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _is_called_by_libraries(func: Any) -> bool:
    """Whether the operation is torch's or ours: `pack_padded_sequence`, which notes the order, or a layer."""
    return _calling_frame(func).f_code.co_filename.startswith(LIBRARIES)


def index_of(keys: tuple[Any, ...], dim: int, dims: int) -> Any:
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


def masked(keys: tuple[Any, ...], count: int) -> tuple[Tensor, int] | None:
    """The places `(n,)` that a mask takes, in all its dimensions, and how many these have; `None` without a mask.

    A mask of one dimension that has only `count` places takes some of them or all, but none in another's place.
    """
    mask = keys[0] if keys else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() == 0 or is_traced():
        return None
    return mask.flatten().nonzero().flatten(), mask.numel()


def all_stay(index: Tensor, dim: int, dims: int, batch: int) -> Tensor | None:
    """Whether an index for a dimension of a tensor leaves each sample in its place; `None` if it is not for samples."""
    index = index.movedim(dim, 0) if index.dim() == dims else index
    if index.dim() == 0 or index.shape[0] != batch:
        return None
    own = torch.arange(batch, device=index.device).view(-1, *[1] * (index.dim() - 1))
    return (index % batch == own).all()


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


def _roll(input: Any, shifts: Any, dims: Any = ()) -> Move:
    return Move(input, input, [dims] if isinstance(dims, int) else dims)


def _sort(input: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Move:
    return Move(input, input, [dim])


def _unique(
    input: Any, sorted: bool = True, inverse: bool = False, counts: bool = False, dim: Any = 0, **_: Any
) -> Move:
    return Move(input, input, [0 if dim is None else dim])


def _topk(input: Any, k: int, dim: int = -1, **options: Any) -> Move:
    return Move(input, input, [dim])


def _named(move_of: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    """The functions of torch of these names, and methods of tensors."""
    functions = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return {function: move_of for function in functions if function is not None}


# what turns dimensions
_TURNS = {
    *_named(_sort, "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint"),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
}
_LOOKED_AT = {*_TURNS, torch.stack}
# or takes some away, so that samples that were turned may be back in their place
_TURNS |= {
    Tensor.__getitem__,
    *_named(_sort, "select", "unbind", "mean", "sum", "amax", "amin", "max", "min", "logsumexp", "prod"),
}
# operations that draw random numbers, or change a tensor in place
_REPEATS_NOT = re.compile("dropout|^__i(?!nvert)|^__setitem__|[^_]_$")
_BETWEEN = {
    "_look_at_size",
    "_look_at_copies",
    "_moved_by",
    "_turn",
    "_stacked",
    "__torch_function__",
    "handle_torch_function",
    "__len__",
}
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZES = {_SHAPE, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndim.__get__}  # type: ignore[attr-defined]
_MOVES: dict[Any, Callable[..., Move | None]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    **_named(_index_put, "index_put", "index_put_"),
    **_named(_chosen, "index_select", "gather"),
    **_named(_written, "index_copy", "index_copy_", "index_add", "index_add_"),
    **_named(_written, "scatter", "scatter_", "scatter_add", "scatter_add_"),
    **_named(_take_along_dim, "take_along_dim"),
    **_named(_flip, "flip"),
    **_named(partial(_flip, dims=0), "flipud"),
    **_named(_roll, "roll"),
    **_named(_sort, "sort"),
    **_named(partial(_sort, dim=0), "msort"),
    **_named(_unique, "unique"),
    **_named(_topk, "topk"),
}
_LOOKED_AT |= {*_SIZES, *_MOVES}
