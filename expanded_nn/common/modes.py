"""What torch does around this code (a `vmap`, autocast, a backward), which only its private functions tell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import current_thread
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.meanwhile import OfAllThreads, meanwhile

no_torch_function = torch._C.DisableTorchFunctionSubclass  # an attribute of a factored tensor costs a call without it
unseen = torch._C.DisableTorchFunction  # hides operations from modes, and from classes of tensors
_NOTHING = nullcontext()
pad_sequence = torch._C._nn.pad_sequence  # what a mode is told of where torch.nn.utils.rnn.pad_sequence is called
set_grad_enabled = torch._C._set_grad_enabled  # torch.no_grad() takes eight times as long
# Something new after each change of a dict. From Python 3.13 on torch's version misses attributes that are set: Python
# tells nobody of them who watches their dict.
_has_versions = sys.version_info < (3, 13)
dict_version: Callable[[Any], object] = (
    torch._C._dynamo.guards.dict_version if _has_versions else lambda items: object()
)
TensorGuards = torch._C._dynamo.guards.TensorGuards  # whether tensors are of the same shape, dtype and so on as before


def is_shown_elsewhere(x: Tensor) -> bool:
    """Whether the memory of a tensor is that of another one as well, such as a view, or is held by somebody."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) > 2  # its own use, and that of this question


def running_backward() -> int:
    """The number of the backward that this code runs in, -1 outside of any."""
    return torch._C._current_graph_task_id()


def is_in_engines_thread() -> bool:
    """Whether this code runs in a thread of autograd's own: it has one for each device that is no CPU."""
    return running_backward() >= 0 and current_thread().name.startswith("Dummy-")  # as Python calls those of others


def function_modes() -> list[TorchFunctionMode]:
    """The modes that hear of torch's functions now, the outermost first."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def is_autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch._C._is_any_autocast_enabled()


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype in which autocast computes on a kind of device; `None` where it is off."""
    return torch.get_autocast_dtype(device) if is_autocast() and torch.is_autocast_enabled(device) else None


def without_autocast() -> AbstractContextManager[object]:
    """Switches autocast off on all devices, so that what is computed from rows has their dtype."""
    return torch._C._DisableAutocast() if is_autocast() else _NOTHING


@contextmanager
def with_values() -> Iterator[None]:
    """Computes with values within a trace, of whose graph the new tensors are constants."""
    with torch._C._DisableTorchDispatch(), unseen():
        yield


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What switches autocast on or off for a device, as it is now, when a computation is repeated."""
    if not is_autocast():
        return partial(torch.autocast, device.type, enabled=False)
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype=dtype, enabled=enabled)


@_disable_dynamo
def not_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function as it is, also where `torch.compile` would trace it."""
    return function(*args, **kwargs)


@_disable_dynamo
def outside_of_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what makes rows outside of the graphs of `torch.compile`: `enn.compile` takes the whole step.

    Raises:
        PerSampleError: If there is no outside, as in `torch.export`.
    """
    if torch.compiler.is_compiling():
        raise complaint(
            "torch.export",
            "the model is in per-sample mode, whose rows are no part of an exported graph",
            "the plain forward",
            "Switch per_sample(False) before it, or export under torch.no_grad().",
        )
    return function(*args, **kwargs)


def checkpoint_hooks() -> Any:
    """The functions by which a checkpoint packs and unpacks what autograd saves; `None` outside of one."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # a method of torch's own, such as Tensor.half, has no module
    return hooks if hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__ else None


def saved_tensors_are_packed() -> bool:
    """Whether what autograd saves is kept in another form, as in a checkpoint, and cannot be looked at meanwhile."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_of_checkpoint(error: BaseException) -> bool:
    """Whether a checkpoint itself raised an error: to end a forward within the backward once it has what it needs."""
    return type(error).__module__ == checkpoint.__name__


@contextmanager
def uncounted() -> Iterator[None]:
    """Keeps what autograd saves meanwhile from the checkpoint around, which counts it; and the operations."""
    saving = nullcontext() if checkpoint_hooks() is None else saved_tensors_hooks(_without_history, _as_it_is)
    with saving, WithoutSelection():
        yield


class WithoutSelection:
    """Without the mode of a selective checkpoint, which counts operations and gives back results by their number.

    What runs meanwhile is computed again in the backward, whatever the checkpoint was told to keep.
    """

    def __enter__(self) -> WithoutSelection:
        self._modes: list[TorchDispatchMode] = []  # the innermost first
        while is_selective():
            self._modes.append(_pop_mode())
        self._others = [mode for mode in reversed(self._modes) if not _selects(mode)]
        for mode in self._others:
            _push_mode(mode)
        return self

    def __exit__(self, *error: object) -> None:
        for _ in self._others:
            _pop_mode()
        for mode in reversed(self._modes):
            _push_mode(mode)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is called with the mode on."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.__exit__()
            try:
                return function(*args, **kwargs)
            finally:
                self.__enter__()

        return call


def is_selective() -> bool:
    """Whether the mode of a selective checkpoint is on."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(_selects, _get_current_dispatch_mode_stack()))


def _selects(mode: TorchDispatchMode) -> bool:
    return any(base.__module__ == checkpoint.__name__ for base in type(mode).__mro__)


def _without_history(tensor: Tensor) -> Tensor:
    """What a hook may pack: a result whose node holds it by a hook would hold that node for ever."""
    with unseen():
        return tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; tensors of `torch.inference_mode` do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(values: Iterable[object]) -> list[int]:
    """The versions of the tensors among some values; asking is not heard of by modes."""
    with unseen():
        return [version_of(value) for value in values if isinstance(value, Tensor)]


def set_version(tensor: Tensor, version: int) -> None:
    """Makes a tensor count as changed so often, where it has the numbers that it had then."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_batched(tensor: Tensor) -> bool:
    """Whether a `vmap`, or a backward with `is_grads_batched=True`, maps over a tensor."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def has_no_values(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` stands around a tensor, whose values may not be asked for."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or is_batched(tensor)


def of_all(tensor: Tensor) -> Tensor:
    """The tensor of all samples behind that of one, in a `vmap`."""
    return torch._C._functorch.get_unwrapped(tensor)


def samples_first(tensor: Tensor) -> Tensor:
    """Likewise, with the samples in its first dimension."""
    whole = of_all(tensor)
    return whole.movedim(torch._C._functorch.maybe_get_bdim(tensor), 0)


def of_one(whole: Tensor, like: Tensor, before: int = 0) -> Tensor:
    """A tensor of all samples as a `vmap` sees it: they stand where those of another do, `before` dimensions later."""
    functorch = torch._C._functorch
    return functorch._add_batch_dim(whole, functorch.maybe_get_bdim(like) + before, functorch.maybe_get_level(like))


def outside_of_vmap() -> AbstractContextManager[object]:
    """Leaves the innermost `vmap`, for what is computed with tensors of all samples."""
    return retrieve_current_functorch_interpreter().lower()


def transforms() -> int:
    """How many transforms of `torch.func`, such as `vmap`, run this code."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level()


def is_expanded(tensor: Tensor) -> bool:
    """Whether the innermost `vmap`, and no other, maps over a tensor that is the same for all samples."""
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or transforms() > 1:
        return False
    return of_all(tensor).stride(functorch.maybe_get_bdim(tensor)) == 0


def refuse_batched(tensor: Tensor) -> None:
    """Raises if a mapped tensor is to become rows."""
    if is_batched(tensor):
        raise PerSampleError(
            "A vmapped backward (is_grads_batched=True, vectorize=True) reached a parameter in per-sample mode, so its "
            "rows would be those of several backwards at once. Switch per_sample(False) before the forward, or call "
            "backward for each gradient."
        )


def refuse_lost_graph(tensor: Tensor) -> None:
    """Raises if a vmapped backward maps over a tensor that is to go into a Function: its result would have no graph."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise PerSampleError(
            "A vmapped backward (is_grads_batched=True, vectorize=True) with create_graph=True reached a convolution "
            "in per-sample mode, where its graph would end: what is computed from its result would have no rows. Call "
            "torch.autograd.grad for each gradient, without is_grads_batched or vectorize."
        )


@contextmanager
def _without_fused_inference() -> Iterator[None]:
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


# without torch's fused attention in inference, whose results depend on the longest sample
without_fused_inference = OfAllThreads(_without_fused_inference)


@contextmanager
def _uncompiled() -> Iterator[None]:
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # nothing is compiled yet, and importing it takes seconds
        yield
        return
    # `torch.compiler.set_stance`, which refuses to be called while a compiled function runs
    with meanwhile(eval_frame, _stance=eval_frame.DynamoStance("force_eager")):
        yield


_UNCOMPILED = OfAllThreads(_uncompiled)


class FunctionMode(TorchFunctionMode):
    """A mode that hears of torch's functions; what `torch.compile` has made runs as it was written meanwhile.

    Compiled under a mode, functions are compiled anew for each one; where a forward called several of them, some gave
    wrong results (torch 2.13).
    """

    def __enter__(self) -> Any:
        _UNCOMPILED.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _UNCOMPILED.__exit__()
