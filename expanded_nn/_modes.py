"""What torch is doing around this code, which it says under private names only: a `vmap`, autocast, a backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from expanded_nn._errors import PerSampleError

no_torch_function = torch._C.DisableTorchFunctionSubclass  # without it a factored tensor's attributes cost Python calls


def running_backward() -> int:
    """The number of the backward that this code runs in, -1 outside of any."""
    return torch._C._current_graph_task_id()


def is_autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch._C._is_any_autocast_enabled()


def in_own_dtype(rows: Tensor) -> AbstractContextManager[object]:
    """Without autocast: what is made of the rows has their dtype, whatever surrounds the backward."""
    return torch.autocast(rows.device.type, enabled=False) if is_autocast() else nullcontext()


def checkpoint_hooks() -> Any:
    """What packs and unpacks the tensors that autograd saves now, if that is a checkpoint's."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None and hooks[0].__module__ == checkpoint.__name__ else None


def is_of_checkpoint(error: BaseException) -> bool:
    """Whether a checkpoint itself raised an error: to end a forward within the backward once it has what it needs."""
    return type(error).__module__ == checkpoint.__name__


def as_it_is(tensor: Tensor) -> Tensor:
    """Packs and unpacks a saved tensor by doing nothing."""
    return tensor


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is one that a `vmap`, or a backward with `is_grads_batched=True`, maps over."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def refuse_batched(tensor: Tensor) -> None:
    """Raises if a mapped tensor is to become rows."""
    if is_batched(tensor):
        raise PerSampleError(
            "A vmapped backward (is_grads_batched=True, vectorize=True) reached a parameter in per-sample mode, so its "
            "rows would be those of several backwards at once. Switch per_sample(False) for it, or call backward for "
            "each gradient."
        )
