"""Torch's functions and attributes of tensors by name, as a `TorchFunctionMode` is told of their calls."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def functions(*names: str) -> list[Any]:
    """Functions of torch by their names, wherever they stand."""
    places = (torch, Tensor, F)
    return [function for name in names for place in places if (function := getattr(place, name, None)) is not None]


@lru_cache(maxsize=2**12)
def is_in_place(function: Any) -> bool:
    """Whether a function of torch's changes its first argument in place."""
    name = getattr(function, "__name__", "")
    return name in _OPERATORS_IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def attributes(*names: str) -> list[Any]:
    """The functions that look up these attributes of tensors."""
    return [getattr(Tensor, name).__get__ for name in names]


_OPERATORS_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__"}
SIZES = {*attributes("shape"), *functions("size", "__len__", "numel", "nelement")}
# what changes other arguments in place than its first, and does not say so by their versions: observers of quantization
CHANGED: dict[Any, slice] = {torch.fused_moving_avg_obs_fake_quant: slice(3, 7)}
# what has no batching rule of its own, and what does the same
WITHOUT_RULE: dict[Any, Any] = {torch.moveaxis: torch.movedim, Tensor.moveaxis: Tensor.movedim}
