"""Backends, which make a function of a graph: inductor, none (`"eager"`), or another that `torch.compile` knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx

from expanded_nn._errors import complaint
from expanded_nn.compiling.memory import memory_of, written_by

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]

# Random numbers are those of the eager step. Convolutions keep the layout that they have: put channels last, a step of
# a small CNN took 1.5 times the plain step's time on an AMD EPYC, and 0.9 times without that.
OPTIONS = {"fallback_random": True, "layout_optimization": False}


def backend_of(backend: str | Backend, options: dict[str, Any]) -> Backend:
    """The backend of a name; those of torch take seconds to import, so that waits for the first graph."""
    if backend == "eager":
        return lambda graph, examples: graph
    return partial(_of_torch, backend, options)


def draws_alike(backend: str | Backend, options: dict[str, Any]) -> bool:
    """Whether its graphs are sure to draw the random numbers of the eager step."""
    return backend == "eager" or (backend == "inductor" and options.get("fallback_random", True))


def _of_torch(
    backend: str | Backend, options: dict[str, Any], graph: fx.GraphModule, examples: list[Tensor]
) -> Callable[..., Any]:
    _loosen_views(graph)
    if not isinstance(backend, str):
        return backend(graph, examples)
    compiler: Any
    if backend == "inductor":
        unknown = sorted(options.keys() - import_module("torch._inductor").list_options())
        if unknown:
            problem, wanted = f"inductor has no options {unknown}", "those that torch._inductor.list_options() names"
            raise TypeError(str(complaint("enn.compile", problem, wanted, "Leave them out.")))
        compiler = partial(import_module("torch._inductor.compile_fx").compile_fx, config_patches=OPTIONS | options)
    else:
        compiler = import_module("torch._dynamo").lookup_backend(backend)
    try:
        function: Callable[..., Any] = compiler(graph, examples)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CompilerError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    return function


def _loosen_views(graph: fx.GraphModule) -> None:
    """Makes `view` a `reshape`, which copies where it must: compilers give some results other strides than eager does.

    Where the memory that is viewed is written to, a copy would not see that, so such views stay.
    """
    memory = memory_of(graph.graph)
    written = {memory[value] for value in written_by(graph.graph)}
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default and memory[node] not in written:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()


class CompilerError(Exception):
    """A compiler of torch's has failed; the text says how."""
