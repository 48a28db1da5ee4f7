"""Copies for the samples of what all samples share, and operations that do something else with them.

A layer's result for an input without samples, as a table of positions, is `(T, dim)` in the plain model and `(B, T,
dim)` in per-sample mode. What `normalize(table(index))` or `q @ table(index).mT` says of its dimensions is then said of
others. So each operation on such copies is done again, with copies that differ and with one of them alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from expanded_nn.common.batch import tensors
from expanded_nn.common.traced import wait_for_values
from expanded_nn.recording.callers import is_called_by_libraries
from expanded_nn.recording.settings import RecorderLike

# operations that draw random numbers, or change a tensor in place
_NOT_REPEATED = re.compile("dropout|^__i(?!nvert)|^__setitem__|[^_]_$")


class Copies:
    """The copies of a forward, by their ids, and the layer that each comes from."""

    def __init__(self, recorder: RecorderLike) -> None:
        self.recorder = recorder
        self.layers: dict[int, tuple[Tensor, nn.Module]] = {}

    def note(self, layer: nn.Module, result: Tensor) -> None:
        """Notes a layer's result for what all samples share; in the plain model it has no dimension for them."""
        if self.recorder.general_rule is None:
            self.layers[id(result)] = result, layer

    def look_at(self, func: Any, args: Any, kwargs: Any, result: Any, *, are_samples: Callable[[Tensor], bool]) -> None:
        """Raises where an operation does something else with the copies than with one alone.

        `are_samples` tells of a tensor of B rows whether they are the samples'.
        """
        leaves, structure = tree_flatten((args, kwargs))
        results = _floats(result)
        copies = [leaf for leaf in leaves if id(leaf) in self.layers]
        if not copies or not results or self.recorder.general_rule is not None or is_called_by_libraries(func):
            return
        batch, layer = len(copies[0]), self.layers[id(copies[0])][1]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.layers]
        meets_samples = any(x.dim() and x.shape[0] == batch and are_samples(x) for x in others)
        name = getattr(func, "__name__", "")
        key = (func, meets_samples, *(tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves))
        gives_copies = self.recorder.escalation.gives_copies
        if key not in gives_copies and not _NOT_REPEATED.search(name):
            wait_for_values("it looks at what all samples share")
            differing = [_differing(leaf) if id(leaf) in self.layers else leaf for leaf in leaves]
            second = [x[1] if id(leaf) in self.layers else x for leaf, x in zip(leaves, differing, strict=True)]
            of_all, of_second = (_called(func, *tree_unflatten(values, structure)) for values in (differing, second))
            if not _are_alike(of_all, of_second, batch, meets_samples=meets_samples):
                raise self.recorder.forward.taking_apart(layer, "select" if name == "__getitem__" else name)
            gives_copies[key] = not meets_samples and not any(map(_is_spread, of_second, of_all))
        if gives_copies.get(key, not meets_samples):
            self.layers.update({id(x): (x, layer) for x in results if x.dim() and len(x) == batch})

    def follow(self, arguments: Any, result: Any) -> None:
        """Notes that what a layer computes from copies alone are copies."""
        inputs = list(tensors(arguments))
        layers = [self.layers[id(x)][1] for x in inputs if id(x) in self.layers]
        if layers and len(layers) == len(inputs):
            self.layers.update({id(x): (x, layers[0]) for x in _floats(result)})


def _floats(result: Any) -> list[Tensor]:
    return [x for x in tensors(result) if isinstance(x, Tensor) and x.is_floating_point()]


def _differing(copies: Tensor) -> Tensor:  # (B, ...)
    """Copies that differ from each other."""
    factors = 1 + torch.arange(len(copies), device=copies.device) / len(copies)
    return copies.detach() * factors.to(copies.dtype).view(-1, *[1] * (copies.dim() - 1))


def _called(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in tensors(func(*args, **kwargs)) if isinstance(x, Tensor)]


def _is_spread(alone: Tensor, whole: Tensor) -> bool:
    """Whether what all samples share was expanded to a row for each of them."""
    return alone.dim() > 0 and alone.shape == whole.shape


def _are_alike(of_all: list[Tensor], of_second: list[Tensor], batch: int, *, meets_samples: bool) -> bool:
    """Whether results for all copies hold, for the second sample, those of its copy alone."""
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
