"""The graphs of one kind of calls, and what has taken part in the calls of a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass, field
from threading import Thread, current_thread
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from expanded_nn.compiling.kinds import Call
from expanded_nn.compiling.names import Referred
from expanded_nn.compiling.replay import ArgumentDim, Graph
from expanded_nn.compiling.seen import Seen
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.recording.isolation import Grads
from expanded_nn.recording.recorder import Recorder, modules_in

Shapes = tuple[torch.Size, ...]
MOST_SHAPES = 10_000  # of calls whose graphs are known; later ones are looked for anew
FIRST_COMPARED = 8  # runs of graphs, before which the samples are compared again; then before twice as many, and so on


class LastCall(NamedTuple):
    """A call that the next one may be like."""

    arguments: Hashable  # the key of its arguments
    seen: Seen  # all else that it depends on
    known: Set[int]  # the ids of the lists and dicts among that
    family: Family  # of its graph
    thread: Thread

    def is_like(self, call: Call) -> bool:
        """Whether the arguments of a call are like its own, and all else that it depends on is as it was."""
        is_like = call.key == self.arguments and self.thread is current_thread()
        return is_like and self.known.isdisjoint(call.containers) and self.seen.holds()


@dataclass
class Family:
    """The graphs for calls that differ in nothing but the sizes of tensors."""

    graphs: list[Graph] = field(default_factory=list)
    by_shapes: dict[Shapes, Graph | None] = field(default_factory=dict)  # of earlier calls; `None` without a graph
    varying: set[ArgumentDim] = field(default_factory=set)  # the dimensions that had different sizes
    has_fixed_sizes: bool = False  # whether each size takes a graph of its own, as there can be none for several
    is_eager: bool = False  # whether such calls run eagerly for good
    without_graph: set[Shapes] = field(default_factory=set)  # the shapes of those that do, where others have graphs
    by_gradients: bool = False  # whether there is a family for each kind of gradients that are there before the call
    grads: Grads | None = None  # what these gradients are, if it is such a family
    is_thorough: bool = False  # whether its graphs assume less, at a cost, as an assumption of a usual one has failed
    faults: int = 0  # how many calls in a row had no graph, or one whose assumptions failed
    runs: int = 0  # of its graphs
    passed: set[Hashable] = field(default_factory=set)  # sorts of sizes that came once and got no graph for that

    @classmethod
    def of(cls, shapes: Iterable[Shapes]) -> Family:
        """One for which there were calls with arguments of some shapes, and no graph."""
        family = cls()
        for one in shapes:
            family.find(one)
        return family

    def count_run(self) -> bool:
        """Counts a run of a graph; whether it is time to compare the samples again, for which a step runs eagerly."""
        self.runs += 1
        return self.runs >= FIRST_COMPARED and self.runs & (self.runs - 1) == 0

    def comes_first(self, shapes: Shapes) -> bool:
        """Whether sizes that no graph fits are the first of their sort (0, 1, 2 or more in each dimension).

        From the second graph on there is one for nearly any size. Another pays only if such sizes come again, as
        compiling takes as long as many steps.
        """
        if not any(graph.free_dims for graph in self.graphs):
            return False
        sort = tuple(min(shapes[number][dim], 3) for number, dim in sorted(self.varying))
        is_first = sort not in self.passed
        self.passed.add(sort)
        return is_first

    def find(self, shapes: Shapes) -> Graph | None:
        """The graph for arguments of such shapes."""
        graph = self.by_shapes.get(shapes)
        if graph is None:
            graph = next((graph for graph in self.graphs if graph.sizes.fit(shapes)), None)
            if len(self.by_shapes) >= MOST_SHAPES:
                self.by_shapes = {self.first_shapes: None}
            self.by_shapes[shapes] = graph
            self.varying |= {
                (number, dim)
                for number, (shape, first_shape) in enumerate(zip(shapes, self.first_shapes, strict=True))
                for dim, (size, first) in enumerate(zip(shape, first_shape, strict=True))
                if size != first
            }
        return graph

    @property
    def first_shapes(self) -> Shapes:
        """The shapes of the first call."""
        return next(iter(self.by_shapes))

    def drop_graphs(self) -> None:
        """Lets go of the graphs."""
        self.graphs.clear()
        self.without_graph.clear()
        self.by_shapes = dict.fromkeys(self.by_shapes)


BEGUN_ANEW = object()  # what a call gives where all that was known has been let go of, and it has not run


@dataclass
class Met:
    """What has taken part in the calls of a step, by one thread."""

    modules: list[nn.Module] = field(default_factory=list)
    others: list[nn.Module] = field(default_factory=list)  # the step refers to them, and does not call them
    # parameters of such modules and other tensors that the step trains, or whose gradients it looks at
    leaves: list[torch.Tensor] = field(default_factory=list)
    noted: list[Recorder] = field(default_factory=list)  # those that have recorded rows
    has_run: bool = False  # whether there was a call
    first_count: int = 0  # how many modules and functions there were at the first kind of calls
    # the kind of a call -> the shapes of the calls that ran before any module was known
    first_shapes: dict[Hashable, list[Shapes]] = field(default_factory=dict)

    @property
    def recorders(self) -> list[Recorder]:
        """What records the rows now: `per_sample` gives modules another recorder."""
        own = (module._recorder for module in self.modules if isinstance(module, PerSampleModule))
        recorders = dict.fromkeys([*self.noted, *own])
        return [recorder for recorder in recorders if recorder is not None and not is_gone(recorder)]

    def count(self, referred: Referred) -> int:
        """How many modules and functions are held."""
        return len(self.modules) + len(referred.functions) + len(referred.hooks)

    def add(self, modules: Iterable[nn.Module], recorders: Iterable[Recorder]) -> None:
        """Adds modules with all within, and recorders."""
        self.modules = [*dict.fromkeys([*self.modules, *modules_in(*modules)])]
        self.noted = [*dict.fromkeys(recorder for recorder in (*self.noted, *recorders) if not is_gone(recorder))]

    def refer(self, modules: Iterable[nn.Module]) -> None:
        """Notes the modules that the step refers to, with all within."""
        called = set(self.modules)
        self.others = [member for member in modules_in(*modules) if member not in called]


@dataclass
class Former:
    """The modules whose graphs were let go of, as the step was called with other ones."""

    modules: WeakSet[nn.Module] = field(default_factory=WeakSet)
    in_vain: int = 0  # how many times in a row there was no graph, and no module had come back

    def begins(self, called: Iterable[nn.Module], known: Iterable[nn.Module]) -> bool:
        """Whether a call has modules that never took part, and none that comes back: those before it may be gone.

        If so, all of them are former ones now. What has no parameters, as a loss that a step makes at each call, begins
        nothing.
        """
        known = set(known)
        new = [module for module in called if module not in known and module._parameters]
        begins = bool(new) and not any(module in self.modules for module in new)
        if begins:
            self.in_vain = 0 if any(module in self.modules for module in known) else self.in_vain + 1
            self.modules |= known.union(called)
        return begins


def is_gone(recorder: Recorder) -> bool:
    """Whether a recorder's model is no more, nor any of its parameters, as those of a copy that a step makes."""
    return not recorder.living_roots() and all(leaf.parameter() is None for leaf in recorder.leaves)
