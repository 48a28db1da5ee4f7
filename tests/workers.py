"""What other processes run: a spawned process imports this file, and with it the library."""

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import Dataset

from oracle import Call, rows_of, total_loss


def gradients_in_another_process(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """The rows of one step, as arrays."""
    torch.set_default_dtype(torch.float64)
    model.zero_grad()
    total_loss(model, Call((x,))).backward()
    return {name: rows.cpu().numpy() for name, rows in rows_of(model).items()}


class Rows(Dataset[Tensor]):
    """Item i is the row of sample i's first weight, computed in the worker."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        if i == len(self.x):
            raise IndexError
        torch.set_default_dtype(torch.float64)
        self.model.zero_grad()
        total_loss(self.model, Call((self.x[i : i + 1],))).backward()
        return next(self.model.parameters()).grad_sample[0].clone()


def spawned(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process that shares nothing with this one."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
