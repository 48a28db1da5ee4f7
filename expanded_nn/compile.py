"""The whole training step as one graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from operator import attrgetter
from threading import Lock, RLock, Thread, current_thread, get_ident
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from expanded_nn._errors import PerSampleError, complaint, shown, warn
from expanded_nn.common.generators import is_generator
from expanded_nn.common.modes import running_backward
from expanded_nn.common.traced import FirstEager, HasGraphs, LookFirst, OnlyEager, TraceError, is_traced, recorders_met
from expanded_nn.compiling.backends import Backend, CompilerError, backend_of, draws_alike
from expanded_nn.compiling.called import Called, Code
from expanded_nn.compiling.comparison import run_beside
from expanded_nn.compiling.families import BEGUN_ANEW, Family, Former, LastCall, Met, Shapes, is_gone
from expanded_nn.compiling.kinds import Call, of_models, of_surroundings
from expanded_nn.compiling.looks import StepValues
from expanded_nn.compiling.replay import ArgumentDim, Graph
from expanded_nn.compiling.tracing import Traced, trace
from expanded_nn.recording.comparisons import compare_next
from expanded_nn.recording.isolation import look_at_grads

Function = TypeVar("Function", bound=Callable[..., Any])
Key = tuple[Hashable, Hashable, Hashable]  # of the arguments, of what the step names, of torch's global state

MOST_GRAPHS = 16
MOST_FAULTS = 4
SINGLE_SIZES = 4  # that have graphs of their own, after which a warning says why
MOST_KINDS = 64
NEW_KINDS = 16  # in a row, after which a warning says why nothing is compiled
NEW_MODELS = 8  # the same
_ONE_AT_A_TIME = Lock()


def compile(step: Function | None = None, *, backend: str | Backend = "inductor", **options: Any) -> Any:
    """Makes one graph of a whole training step: forward, backward, the rows and what is done with them.

    The step is written as for eager. Its first call runs eagerly and shows which models take part; the second one, of
    arguments of the same kind, runs on tensors without values, so that all its operations are known, those of the
    backward and of the algebra of the rows included. They are compiled, and the graph is what runs from then on. What
    it leaves is what the eager step leaves: `.grad`, `.grad_sample` (factored where it is factored), changed buffers
    and attributes of modules, and the value that is returned.

    There is a graph for each kind of call: the models' flags (`train`, `eval`), settings, frozen parameters and numbers
    among their attributes, the arguments' dtypes and layouts, autocast, and numbers and strings that are arguments, or
    that functions of yours refer to by names which run in the step, whoever calls them: variables, attributes, items,
    and the environment where they name it. What they find in another way, as in a file or by the time, is that of the
    trace.
    Sizes that change from call to call, as that of the batch, become symbols of one graph where the step reads them by
    `x.shape[0]`; `len(x)` is a plain number, with a graph for each. New values of parameters, by an optimizer or
    `load_state_dict`, and of buffers are seen. Lists and dicts among the arguments that the step changes are changed by
    the graph, too. What else Python does, such as printing, happens in calls that run eagerly: the first two of a kind,
    and those in place of a graph's runs number 8, 16, 32, …, in which the samples are compared again.

    At the call that makes a graph the step runs eagerly as well, and what both leave is compared. If more than rounding
    differs, as it does where the step counts its calls or does something else while it is traced, calls of this kind
    run eagerly for good, and a `PerSampleWarning` names what differs.

    Where a graph cannot be right the step runs eagerly: a `PerSampleWarning` says why if it is for good (rows of
    earlier calls that it looks at, random numbers within a backward, sparse gradients, sequences of different
    lengths). Norms that are not finite, or out of the range of squares, are noticed, and the call runs eagerly.

    Args:
        step: A function that calls `backward` itself, not the model; or nothing, for a decorator with arguments. What
            it returns has no history. Optimizers take their step outside of it.
        backend: `"inductor"`, `"eager"` (the graph's operations one by one, without a compiler), or what
            `torch.compile` takes: a name or a function of a graph and example inputs.
        options: Those of inductor, as in `torch.compile(options={...})`.

    Returns:
        A function with the same arguments.

    Raises:
        PerSampleError: At the call that is traced, if the step reads values of tensors (the line is named), takes the
            step of an optimizer or of a scheduler, or returns a tensor whose backward it has not run. Models and rows
            are then as before.
        TypeError: If `step` is a model or no function, or `options` are not inductor's, which the first graph finds.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(5, 1)).per_sample()
        >>> @enn.compile(backend="eager")
        ... def step(x, y):
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     return loss.detach(), enn.clip_grad_sample_norms_(model, max_norm=1.0)
        >>> for _ in range(3):
        ...     model.zero_grad()
        ...     loss, norms = step(torch.randn(8, 5), torch.randn(8, 1))
        >>> norms.shape, model.weight.grad.shape
        (torch.Size([8]), torch.Size([1, 5]))
    """
    if step is None:
        return functools.partial(compile, backend=backend, **options)
    if not callable(step) or isinstance(step, nn.Module | type):
        wanted = "a function of a whole training step, which calls the model and then backward"
        remedy = (
            "Write @enn.compile above def step(x, y): that computes the loss, calls loss.backward() and returns "
            "loss.detach(). For a model alone there is torch.compile, which leaves per-sample mode as it is."
        )
        raise TypeError(str(complaint("enn.compile", f"step is {shown(step)}", wanted, remedy)))
    if not isinstance(backend, str) and not callable(backend):
        raise TypeError(f'enn.compile: backend is {shown(backend)}; wanted a name, such as "inductor", or a function.')
    if options and backend != "inductor":
        problem = f"the options {sorted(options)} are given with backend={shown(backend)}"
        wanted, remedy = 'options for backend="inductor" alone', "Leave one of them out."
        raise TypeError(str(complaint("enn.compile", problem, wanted, remedy)))
    if of_torch := sorted(options.keys() & {"mode", "fullgraph", "dynamic", "options"}):
        problem, wanted = f"the options {of_torch} are given", "options of inductor"
        remedy = "Leave out what is torch.compile's; give inductor's by name: enn.compile(step, max_autotune=True)."
        raise TypeError(str(complaint("enn.compile", problem, wanted, remedy)))
    return CompiledStep(step, backend, options)


class CompiledStep:
    """A step that runs as a graph where it can; see `compile`.

    Attributes that the user sets are set on the step itself, and found there.
    """

    def __init__(self, step: Callable[..., Any], backend: str | Backend, options: dict[str, Any]) -> None:
        object.__setattr__(self, "_graphs", Graphs(step, backend, options))
        functools.update_wrapper(self, step, updated=())

    def __reduce__(self) -> Any:
        """A copy has no graphs; a function of a module or a class, which is decorated there, is the same one."""
        name = getattr(self, "__qualname__", "")
        with suppress(AttributeError):  # it is no longer there, or was made in a function
            if attrgetter(name)(sys.modules.get(self.__module__)) is self:
                return name
        return CompiledStep, (self._graphs.step, *self._graphs.given)

    def __get__(self, instance: Any, owner_class: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_graphs":  # it is not made yet
            raise AttributeError(name)
        return getattr(self._graphs.step, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") and name.endswith("__"):  # as what `functools.update_wrapper` sets
            object.__setattr__(self, name, value)
        else:
            setattr(self._graphs.step, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._graphs.step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        return self._graphs.call(args, kwargs)


class Graphs(HasGraphs):
    """The graphs of a step, and what they depend on.

    Attributes:
        step: The user's function.
        given: The name of the backend, or what makes it, and its options.
        lock: Held by the thread that calls the step: a trace changes the models for a while.
        step_values: Gives a key for the values that the step refers to by names.
        mets: What has taken part, by the thread: models of another one may be at work, so they are not looked at.
        families: The graphs, by the kind of the call.
        former: The modules that had taken part before other ones took their places.
        last: The last call, if one that is like it may run by the same graph, or eagerly, without a look at the rest.
        warnings: The warnings that were given, each of them once.
        called: The code that has run and is not looked at yet, by its id, each with its global namespace.
    """

    def __init__(self, step: Callable[..., Any], backend: str | Backend, options: dict[str, Any]) -> None:
        self.step, self.step_values = step, StepValues(step)
        self.given, self.lock = (backend, options), RLock()
        self.mets: dict[Thread, Met] = {}
        self.families: dict[Hashable, Family] = {}
        self.former = Former()
        self.last: LastCall | None = None
        self.warnings: set[str] = set()
        self.called: dict[int, Code] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the step."""
        if not torch.is_grad_enabled() or running_backward() >= 0 or torch.compiler.is_compiling() or is_traced():
            return self.step(*args, **kwargs)
        with self.lock:
            result = self._call(args, kwargs)
            return self._call(args, kwargs) if result is BEGUN_ANEW else result  # here nothing of before is held

    @property
    def met(self) -> Met:
        """What has taken part in the calls of this thread."""
        if current_thread() not in self.mets:
            living = {thread: met for thread, met in self.mets.items() if thread.is_alive()}
            if len(self.mets) - len(living) >= NEW_KINDS:
                self._warn_of_eager(
                    f"the first call of each thread does, and {NEW_KINDS} that have called it are over (call it from "
                    "threads that go on)"
                )
                self.mets = living
            self.mets[current_thread()] = Met()
        return self.mets[current_thread()]

    def _call(self, args: Any, kwargs: Any) -> Any:
        try:
            call, last = Call(args, kwargs, self.step_values), self.last
            if last is not None and last.is_like(call):
                if last.family.is_eager:
                    return self.step(*args, **kwargs)
                graph = last.family.by_shapes.get(call.shapes)
                if graph is not None:
                    return self._run(last.family, graph, call)
            key = call.key, self.step_values.key(call.objects), of_surroundings()
            met = self.met
            if not met.has_run:
                return self._run_eagerly(call, key)
            look, self.last = self.step_values.looks[-1], None
            seen = look.seen
            seen.note_fact(of_surroundings)
            of_values = met.modules, met.others, met.leaves, met.recorders, self.step_values.referred
            kind = *key, of_models(*of_values, look)
            seen.close()
            known = seen.ids | look.numbers.keys()
            if not known.isdisjoint(call.containers):
                raise OnlyEager(
                    "a list or a dict among its arguments is one that it refers to by a name as well, or that a module "
                    "has (give it a copy, or refer to it in one way)"
                )
        except OnlyEager as reason:
            self._warn_of_eager(str(reason))
            return self.step(*args, **kwargs)
        family = self.families.get(kind)
        if family is None:
            if len(self.families) >= MOST_KINDS:  # those that came once are let go of: what they hold may be a batch
                self.families = {key: one for key, one in self.families.items() if one.graphs or one.is_eager}
                if self._warn_of_kinds():
                    return BEGUN_ANEW
            if not self.families:
                met.first_count = met.count(self.step_values.referred)
            family = self.families[kind] = Family.of(met.first_shapes.pop(key, ()))
            latest = [*self.families.values()][-NEW_KINDS:]
            if len(latest) == NEW_KINDS and not any(other.graphs for other in latest) and self._warn_of_kinds():
                return BEGUN_ANEW
        if not family.by_shapes:  # the first of its kind
            family.by_shapes[call.shapes] = None
            return self._run_eagerly(call, compares=len(self.families) < NEW_KINDS)
        try:
            family, graph = self._graph(kind, family, call)
        except FirstEager:
            return self._run_eagerly(call)
        if not family.grads and (graph is not None or family.is_eager):
            self.last = LastCall(call.key, seen, known, family, current_thread())
        recorders = met.recorders
        for one in family.graphs:
            one.outcome.give_rows_to(recorders)
        return self.step(*args, **kwargs) if graph is None else self._run(family, graph, call)

    def _run(self, family: Family, graph: Graph, call: Call) -> Any:
        """Runs a graph; and the step itself if the graph's assumptions do not hold, or if the graph is new.

        If a new graph and the step differ beyond rounding, such calls run eagerly from now on.
        """
        if graph.is_compared:
            if family.count_run() and any(recorder.settings.compare for recorder in self.met.recorders):
                return self._run_eagerly(call, compares=True)
            otherwise, result = graph.run(call)
            if otherwise is None:
                family.faults = 0
                return result
            self.last = None
            args, kwargs = call.arguments
            result = self.step(*args, **kwargs)  # raises if gradients are not finite, which is no fault of the graph
        else:
            self.last = None
            of_step = self._watched, self.met.modules, self.step_values.referred
            otherwise, difference, result = run_beside(graph, call, *of_step, draws_alike=draws_alike(*self.given))
            graph.is_compared = otherwise is None
            self._add_called()
            if difference is not None:
                self._give_up(family, difference)
            elif otherwise is None:  # it changes no list or dict any more
                self.step_values.changing.clear()
        if otherwise is not None and family.is_thorough:
            self._fault(family, otherwise)
        elif otherwise is not None:
            family.is_thorough = True
            family.drop_graphs()
        return result

    def _run_eagerly(self, call: Call, key: Key | None = None, *, compares: bool = False) -> Any:
        """Runs the step eagerly, and notes which models take part.

        The key is that of a call before any was known. With `compares` the samples are compared in all forwards.
        """
        self.last = None
        modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # not those that the step makes for itself
        thread = get_ident()

        def note(module: nn.Module, _: Any) -> None:
            if get_ident() == thread:
                modules.setdefault(module)

        for module in self.met.modules if compares else ():
            compare_next(module)
        noting, (args, kwargs) = register_module_forward_pre_hook(note), call.arguments
        with noting, recorders_met() as recorders, self.step_values.noting_changes(call.objects):
            result = self._watched(*args, **kwargs)
        recorders.update(dict.fromkeys(self.step_values.holders_of_rows()))
        living = [recorder for recorder in recorders if not is_gone(recorder)]
        for recorder in living:
            modules.update(dict.fromkeys(recorder.modules()))
        is_eager = any(family.is_eager for family in self.families.values())  # which stays, once it is known
        may_begin = self.met.has_run and len(self.mets) == 1 and not is_eager
        if may_begin and self.former.begins(modules, self.met.modules):
            self._begin_anew()
            return result
        self.met.has_run = True
        self.met.add(list(modules), living)
        self.met.refer(self.step_values.modules)
        self.step_values.add_modules(self.met.modules)
        self._add_called()
        if key is not None:  # the functions of the modules are known now
            key = key[0], self.step_values.look(call.objects).key, key[2]
            self.met.first_shapes.setdefault(key, []).append(call.shapes)
        return result

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, and notes the functions that run, whoever calls them."""
        with Called() as called:
            result = self.step(*args, **kwargs)
        self.called |= called.codes
        return result

    def _add_called(self) -> None:
        """Adds the functions that have run to those whose names count."""
        self.step_values.referred.add_called(self.called.values())
        self.called.clear()

    def _graph(self, kind: Hashable, family: Family, call: Call) -> tuple[Family, Graph | None]:
        """The graph for a call, a new one if need be, `None` if there is none; and the family that it is of."""
        if family.is_eager or call.shapes in family.without_graph:
            return family, None
        if not family.by_gradients:
            graph = family.find(call.shapes)
            if graph is not None or family.comes_first(call.shapes):
                return family, graph
            try:
                return family, self._traced(family, call)
            except LookFirst:
                family.by_gradients = True
        try:
            grads = {key: state for recorder in self.met.recorders for key, state in look_at_grads(recorder).items()}
        except PerSampleError:  # the step raises as well, unless it clears the gradients first
            return family, None
        kind = kind, tuple(grads.items())
        inner = self.families.get(kind)
        if inner is None:
            inner = self.families[kind] = Family.of(family.by_shapes)
            inner.varying, inner.has_fixed_sizes, inner.grads = {*family.varying}, family.has_fixed_sizes, grads
        # no `LookFirst` this time: it knows the gradients
        return self._graph(kind, inner, call)

    def _traced(self, family: Family, call: Call) -> Graph | None:
        """A new graph, if there can be one."""
        try:
            if self._count() >= MOST_GRAPHS:
                self._drop_graphs_of_former_parameters()
            if self._count() >= MOST_GRAPHS:
                raise OnlyEager(
                    f"there are {MOST_GRAPHS} graphs already (give what changes from call to call as a tensor, and "
                    "take sizes from x.shape, not from len(x))"
                )
            with _ONE_AT_A_TIME:
                traced, graph = self._compiled(family, call)
        except OnlyEager as reason:
            self._give_up(family, str(reason), call.shapes)
            return None
        except FirstEager as reason:
            self._fault(family, str(reason))
            raise
        if traced.len_lines:
            self._warn(
                f"each size takes a graph of its own, as a size is made a number in {traced.len_lines[0]}. "
                "Write x.shape[0] in place of len(x), and make no text of it."
            )
        family.graphs.append(graph)
        reasons = [why for one in family.graphs if (why := one.sizes.why_single()) is not None]
        if len(reasons) == SINGLE_SIZES and not traced.len_lines:
            self._warn(f"{len(reasons)} sizes have taken graphs of their own, as {reasons[-1]}")
        family.by_shapes[call.shapes] = graph
        return graph

    def _count(self) -> int:
        """How many graphs there are."""
        return sum(len(family.graphs) for family in self.families.values())

    def _drop_graphs_of_former_parameters(self) -> None:
        """Lets go of those of parameters that no module has any more, as after `load_state_dict(..., assign=True)`."""
        modules = (module for met in self.mets.values() for module in met.modules)
        own = {id(parameter) for module in modules for parameter in module._parameters.values()}
        own.update(id(leaf) for met in self.mets.values() for leaf in met.leaves)
        self.families = {
            kind: family
            for kind, family in self.families.items()
            if all(id(leaf) in own for graph in family.graphs for leaf in graph.inputs.leaves)
        }

    def _compiled(self, family: Family, call: Call) -> tuple[Traced, Graph]:
        """A traced step and its graph; where there can be none for several sizes, for these sizes alone."""
        reason = None
        if family.varying and not family.has_fixed_sizes:
            try:
                return self._compiled_for(family.varying, family, call)
            except TraceError as error:
                reason = str(error)
            except CompilerError as error:
                reason = f"its compiler raises {error}"
        try:
            compiled = self._compiled_for((), family, call)
        except CompilerError as error:
            raise OnlyEager(
                f'its compiler raises {error} (backend="eager" replays the graph without a compiler)'
            ) from error
        if reason is not None:
            family.has_fixed_sizes = True
            self._warn(f"each size takes a graph of its own, as {reason}, where sizes are symbols.")
        return compiled

    def _compiled_for(self, varying: Collection[ArgumentDim], family: Family, call: Call) -> tuple[Traced, Graph]:
        """A traced step and its graph, in which some sizes are symbols."""
        values = self.step_values
        if values.scheduled is not None:
            raise complaint(
                "enn.compile",
                f"the step calls {values.scheduled}.step()",
                "a step that ends with its gradients, as the graph would leave the scheduler as it is",
                "Call the scheduler after the compiled step, and after the optimizer.",
            )
        of_step = self.step, call, varying, self.met.modules, self.met.recorders, self.met.leaves
        with values.undoing(call.objects):
            generators = [value for value in values.looks[-1].members if is_generator(value)]
            traced = trace(
                *of_step,
                thorough=family.is_thorough,
                states=family.grads,
                generators=generators,
                referred=self.met.others,
            )
            kept_line = traced.line_of_kept()
        if kept_line is None:
            return traced, Graph(traced, call.shapes, varying, backend_of(*self.given))
        lost_line = traced.line_of_kept()  # of what was not put back
        if lost_line is not None:
            raise complaint(
                "enn.compile",
                f"the step keeps a tensor, made in {lost_line}, in what cannot be put back after a trace, so that a "
                "tensor without values is left there",
                "a step that keeps tensors in variables, attributes, lists or dicts",
                "Return the tensor, keep it after the call, and make anew what it is kept in now.",
            )
        raise OnlyEager(
            f"a tensor of it is kept outside of it, which a graph does not; it was made in {kept_line} "
            "(return it from the step, and keep it after the call)"
        )

    def _fault(self, family: Family, reason: str) -> None:
        """Counts a call for which no graph could be made, or whose graph's assumptions failed."""
        family.faults += 1
        if family.faults >= MOST_FAULTS:
            self._give_up(family, reason)

    def _give_up(self, family: Family, reason: str, shapes: Shapes | None = None) -> None:
        """Runs such calls eagerly for good; only those of some shapes, if these have no graph and others have one."""
        if shapes is not None and family.graphs:
            family.without_graph.add(shapes)
            self._warn_of_eager(f"{reason} (other sizes have graphs)")
            return
        family.is_eager = True
        family.drop_graphs()
        self._warn_of_eager(reason)

    def _warn_of_kinds(self) -> bool:
        self._warn_of_eager(
            f"call after call is of another kind{self.step_values.changed([*self.families])} (make what changes an "
            "argument of the step: a tensor, or tensors in tuples, lists, dicts or dataclasses)"
        )
        if has_grown := self.met.count(self.step_values.referred) > self.met.first_count:
            self._begin_anew()  # as what is new at each call would be held for ever
        return has_grown

    def _begin_anew(self) -> None:
        """Lets go of all graphs, and of the modules that they are for."""
        if any(family.graphs for family in self.families.values()):
            self.former.in_vain = 0
        if self.former.in_vain == NEW_MODELS:
            self._warn_of_eager(
                "call after call is of new modules (make the model once, and give it other weights by load_state_dict)"
            )
        self.mets, self.families, self.step_values = {}, {}, StepValues(self.step)

    def _warn_of_eager(self, reason: str) -> None:
        """Warns, once for each reason, that the step runs eagerly."""
        self._warn(f"{getattr(self.step, '__qualname__', type(self.step).__name__)} runs eagerly, as {reason}.")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.add(text)
            warn(f"enn.compile: {text}")
