"""Memory for dense rows, used again from step to step.

Fresh pages cost several times what writing to used ones does, and dense rows are large. A storage is used again once
nothing but its keeper refers to it: rows that somebody still holds never change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from expanded_nn.core import cost


class Recycled:
    """The memory that the dense rows of one parameter were written to."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []  # of bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """An uninitialised tensor, or `None` on a device whose allocator recycles memory itself."""
        size = prod(shape) * dtype.itemsize
        if device.type != "cpu" or size == 0:
            return None
        free = [each for each in self.kept if _references(each) == _ALONE]
        fitting = next((each for each in free if cost.memory_serves(each.numel(), size)), None)
        self.kept = [each for each in self.kept if each is fitting or not any(each is other for other in free)]
        if fitting is None:
            fitting = torch.empty(size, dtype=torch.uint8)
            self.kept.append(fitting)
        return torch.empty(0, dtype=dtype).set_(fitting.untyped_storage(), 0, tuple(shape))  # type: ignore[call-overload,no-any-return]


def _references(tensor: Tensor) -> tuple[int, int]:
    """How many refer to the tensor's storage: as a Python object, and in all."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _references(torch.empty(1))
