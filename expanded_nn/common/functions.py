"""Torch's functions and attributes of tensors by name, as a `TorchFunctionMode` is told of their calls."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def functions(*names: str) -> list[Any]:
    """Functions of torch by their names, wherever they stand."""
    places = (torch, Tensor, F)
    return [function for name in names for place in places if (function := getattr(place, name, None)) is not None]


def attributes(*names: str) -> list[Any]:
    """What looks up attributes of tensors."""
    return [getattr(Tensor, name).__get__ for name in names]


SIZES = {*attributes("shape"), *functions("size", "__len__", "numel", "nelement")}
