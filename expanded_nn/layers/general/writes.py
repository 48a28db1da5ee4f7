"""Writes into a part of a tensor: autograd's graph does not say where they go, so they are looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import FunctionMode, unseen
from expanded_nn.layers.general.owners import Owners
from expanded_nn.layers.general.samples import Samples, constant, together


class Writes(FunctionMode):
    """Notes whose a tensor's rows are once something was written into a part of each."""

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WRITES or kwargs or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        with unseen():
            written = self._written(*args)
        result = func(*args)
        if written is not None:
            self.owners.note(*written)
        return result

    def _written(self, x: Any, *args: Any) -> tuple[Tensor, Samples] | None:
        """The tensor that a write changes, and the samples of its rows after it; `None` where they are not known."""
        key, value = args if len(args) == 2 else (None, args[0])
        if type(x) is not Tensor or type(value) not in (Tensor, int, float) or not takes_view(key):
            return None
        part = x if key is None else x[key]
        base = part._base
        if base is None or not _has_a_part_of_each_row(part, base):
            return None
        before, put = self.owners.of(base), self.owners.of(value) if isinstance(value, Tensor) else None
        if put is not None:
            if value.dim() != part.dim() or value.shape[0] != part.shape[0]:
                return None
            put = constant(put, range(1, put.dim())).reshape(-1, *[1] * (base.dim() - 1))
            if put.numel() == 1 and self.owners.batch > 1:  # what else is in the only row may be of others
                return None
        return base, self.owners.memo.same(together([before, put], base.dim(), self.owners.memo))


def takes_view(key: Any) -> bool:
    """Whether an index takes a view, by numbers and slices."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in keys)


def _has_a_part_of_each_row(part: Tensor, base: Tensor) -> bool:
    """Whether row i of a view lies in row i of the tensor that it shows, for each i."""
    if part.dim() == 0 or base.dim() == 0 or part.numel() == 0 or part.shape[0] != base.shape[0]:
        return False
    start, length = part.storage_offset() - base.storage_offset(), _length_of_row(base)
    has_rows_apart = len(base) == 1 or length <= base.stride(0) == part.stride(0)
    return has_rows_apart and start + _length_of_row(part) <= length


def _length_of_row(x: Tensor) -> int:
    """How many places in memory there are from the first number of a row to its last one."""
    return 1 + sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))


_WRITES = {Tensor.__setitem__, Tensor.copy_}
