"""What is made of buffers and numbers alone: no sample went into it, also where it has B rows by chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn.common.batch import data_in
from expanded_nn.common.functions import functions, is_in_place


class Constants:
    """The constants in a forward.

    Attributes:
        known: These tensors by their ids.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        holders = (module for module in modules if module._buffers and getattr(module, "calls_others", True))
        buffers = (buffer for module in holders for buffer in module._buffers.values())
        self.known: dict[int, Tensor] = {id(buffer): buffer for buffer in buffers if buffer is not None}

    def follow(self, func: Any, arguments: Any, results: Any) -> None:
        """Notes what an operation makes of constants alone, and forgets those that something else is written into."""
        inputs = list(data_in(arguments))
        if all(id(x) in self.known for x in inputs) and (inputs or func in MAKES):
            self.known.update({id(x): x for x in data_in(results)})
        elif inputs and (is_in_place(func) or func is torch.Tensor.__setitem__):
            for x in (inputs[0], inputs[0]._base):
                self.known.pop(id(x), None)


MAKES = {*functions("arange", "linspace", "logspace", "eye", "tensor", "meshgrid", "cartesian_prod", "tril_indices")}
