"""Backends, which make a function of a graph: inductor, none (`"eager"`), or another that `torch.compile` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, fx

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]

# Random numbers are those of the eager step. Convolutions keep the layout that they have: put channels last, a step of
# a small CNN took 1.5 times the plain step's time on an AMD EPYC, and 0.9 times without that.
OPTIONS = {"fallback_random": True, "layout_optimization": False}


def backend_of(backend: str | Backend, options: dict[str, Any]) -> Backend:
    """The backend of a name; those of torch take seconds to import, so that waits for the first graph."""
    if backend == "eager":
        return _eager
    return partial(_of_torch, backend, options)


def _eager(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    return graph


def _of_torch(
    backend: str | Backend, options: dict[str, Any], graph: fx.GraphModule, examples: list[Tensor]
) -> Callable[..., Any]:
    chosen: Any = backend
    if backend == "inductor":
        chosen = partial(import_module("torch._inductor.compile_fx").compile_fx, config_patches=OPTIONS | options)
    elif isinstance(backend, str):
        chosen = import_module("torch._dynamo").lookup_backend(backend)
    function: Callable[..., Any] = chosen(graph, examples)
    return function
