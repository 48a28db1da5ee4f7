"""Memory for dense rows, used again from step to step.

Dense rows are large, and to write to fresh pages takes several times as long as to used ones. A storage is used again
once nothing else refers to it: rows that somebody still holds never change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from expanded_nn.common.traced import is_traced
from expanded_nn.core import cost


class Recycled:
    """The memory that the dense rows of one parameter were written to."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []  # pieces of memory, as bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """An uninitialized tensor; `None` on a device whose allocator recycles memory itself, and in a trace."""
        size = prod(shape) * dtype.itemsize
        if device.type != "cpu" or size == 0 or is_traced():
            return None
        unused = [memory for memory in self.pieces if _references(memory) == _ALONE]
        own = (memory for memory in unused if not memory.is_shared())  # with another process, which may still read it
        fitting = next((memory for memory in own if cost.memory_serves(memory.numel(), size)), None)
        freed = {id(memory) for memory in unused if memory is not fitting}
        self.pieces = [memory for memory in self.pieces if id(memory) not in freed]
        if fitting is None:
            fitting = torch.empty(size, dtype=torch.uint8, device=device)
            self.pieces.append(fitting)
        return torch.empty(0, dtype=dtype, device=device).set_(fitting.untyped_storage(), 0, tuple(shape))  # type: ignore[call-overload,no-any-return]


def _references(tensor: Tensor) -> tuple[int, int]:
    """The number of references to a tensor's storage: those to its Python object, and all of them."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _references(torch.empty(1, device="cpu"))  # those to a storage that nothing else uses
