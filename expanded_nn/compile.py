"""The whole training step as one graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from expanded_nn._errors import PerSampleWarning
from expanded_nn._modes import running_backward
from expanded_nn._module import PerSampleModule
from expanded_nn._traced import FirstEager, OnlyEager, recorders_met
from expanded_nn.compiling.kinds import of_arguments, of_models, of_surroundings
from expanded_nn.compiling.replay import Graph
from expanded_nn.compiling.tracing import trace
from expanded_nn.recording.recorder import Recorder

Step = TypeVar("Step", bound=Callable[..., Any])
Shapes = tuple[torch.Size, ...]

MOST_GRAPHS = 8
_ONE_AT_A_TIME = Lock()


@dataclass
class Family:
    """The graphs for calls that differ in nothing but the sizes of tensors.

    Attributes:
        graphs: The graphs.
        by_shapes: The graph for the shapes of the arguments that there have been.
        varying: The dimensions that had different sizes: the number of a tensor among the arguments, and that of the
            dimension.
        why_eager: Why there are no graphs, and are to be none.
    """

    graphs: list[Graph] = field(default_factory=list)
    by_shapes: dict[Shapes, Graph | None] = field(default_factory=dict)
    varying: set[tuple[int, int]] = field(default_factory=set)
    why_eager: str | None = None

    def find(self, shapes: Shapes) -> Graph | None:
        """The graph for arguments of such shapes."""
        graph = self.by_shapes.get(shapes)
        if graph is None:
            graph = next((each for each in self.graphs if each.fits(shapes)), None)
            for before in self.by_shapes:
                for number, (size, other) in enumerate(zip(shapes, before, strict=True)):
                    self.varying |= {
                        (number, dim) for dim, (n, m) in enumerate(zip(size, other, strict=True)) if n != m
                    }
            self.by_shapes[shapes] = graph
        return graph


class CompiledStep:
    """A step that runs as a graph where it can; see `compile`."""

    def __init__(self, step: Callable[..., Any], backend: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self.step, self.backend = step, backend
        self.modules: list[nn.Module] = []
        self.recorders: list[Recorder] = []
        self.families: dict[Hashable, Family] = {}
        self.first: dict[Hashable, list[Shapes]] = {}  # what it was run with eagerly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        if not torch.is_grad_enabled() or running_backward() >= 0 or torch.compiler.is_compiling():
            return self.step(*args, **kwargs)
        by_id: dict[int, Tensor] = {}
        key = of_arguments((args, kwargs), by_id)
        given = list(by_id.values())
        device = given[0].device.type if given else "cpu"
        kind = key, of_surroundings(device), of_models(self.modules, self.recorders)
        shapes = tuple(tensor.shape for tensor in given)
        if not self.modules:
            return self._shown(key, shapes, args, kwargs)
        family = self.families.get(kind)
        if family is None:
            family = self.families[kind] = Family(by_shapes=dict.fromkeys(self.first.get(key, ())))
        graph = family.find(shapes)
        try:
            if graph is None and family.why_eager is None:
                graph = self._traced(family, shapes, given, args, kwargs)
        except FirstEager:
            return self._shown(key, shapes, args, kwargs)
        if graph is not None:
            done, result = graph.run(given)
            if done:
                return result
        return self.step(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def _shown(self, key: Hashable, shapes: Shapes, args: Any, kwargs: Any) -> Any:
        """Runs the step eagerly, and sees which models take part."""
        self.first.setdefault(key, []).append(shapes)
        with _modules_called() as modules, recorders_met() as recorders:
            result = self.step(*args, **kwargs)
        for recorder in recorders:
            modules.update(dict.fromkeys(recorder.modules()))
        inside = dict.fromkeys(part for module in modules for part in module.modules())
        held = dict.fromkeys(part._recorder for part in inside if isinstance(part, PerSampleModule))
        self.modules = list(dict.fromkeys([*self.modules, *inside]))
        self.recorders = list(
            dict.fromkeys([*self.recorders, *recorders, *(each for each in held if each is not None)])
        )
        return result

    def _traced(self, family: Family, shapes: Shapes, given: Sequence[Tensor], args: Any, kwargs: Any) -> Graph | None:
        if len(family.graphs) >= MOST_GRAPHS:
            family.why_eager = f"there are {MOST_GRAPHS} graphs for steps that differ in the sizes of tensors alone"
        try:
            with _ONE_AT_A_TIME:
                traced = trace(self.step, (args, kwargs), given, family.varying, self.modules, self.recorders)
                graph = Graph(traced, shapes, family.varying, self.backend)
        except OnlyEager as reason:
            family.why_eager = str(reason)
            warnings.warn(f"enn.compile: the step runs eagerly, as {reason}.", PerSampleWarning, stacklevel=3)
            return None
        family.graphs.append(graph)
        family.by_shapes[shapes] = graph
        return graph


@contextmanager
def _modules_called() -> Iterator[dict[nn.Module, None]]:
    called: dict[nn.Module, None] = {}
    hook = register_module_forward_pre_hook(lambda module, _: called.setdefault(module))
    try:
        yield called
    finally:
        hook.remove()


def compile(step: Any = None, *, backend: str | Callable[..., Any] = "inductor", **options: Any) -> Any:
    if step is None:
        return functools.partial(compile, backend=backend, **options)
    return CompiledStep(step, _Backend(backend, options))


class _Backend:
    def __init__(self, backend: str | Callable[..., Any], options: dict[str, Any]) -> None:
        self.backend, self.options = backend, options

    def __call__(self, graph: Any, examples: Sequence[Tensor]) -> Callable[..., Any]:
        if self.backend == "eager":
            return cast(Callable[..., Any], graph)
        if self.backend == "inductor":
            options = {"fallback_random": True, "layout_optimization": False, **self.options}
            made = torch._TorchCompileInductorWrapper(None, options, None)
            return cast(Callable[..., Any], made(graph, list(examples)))
        find = import_module("torch._dynamo").lookup_backend
        chosen = find(self.backend) if isinstance(self.backend, str) else self.backend
        return cast(Callable[..., Any], chosen(graph, list(examples)))
