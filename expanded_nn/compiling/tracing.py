"""Tracing a step: it runs once, on tensors without values, and leaves a graph and what to do with the graph's results.

The parameters themselves take part, and not copies. What the step does to them, to the rows held and to the attributes
of modules is taken back afterwards.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from expanded_nn._errors import PerSampleError, complaint, first_line, is_ours
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import set_grad_enabled
from expanded_nn.common.outside import hooks_on, put_back, remove_new_hooks
from expanded_nn.common.traced import FirstEager, LookFirst, OnlyEager, TraceError, assumptions, note_gradient
from expanded_nn.compiling.caches import clear_caches
from expanded_nn.compiling.kinds import GLOBAL_HOOKS, Call
from expanded_nn.compiling.outcome import Outcome, Saved
from expanded_nn.compiling.packing import Given, containers, items_of, packed
from expanded_nn.compiling.watched import (
    READ,
    Generator,
    Operations,
    Readings,
    einsum_paths,
    reading,
    reads_values,
    refuse_optimizer,
    texts,
)
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.recording.callers import line_of_user, text_of
from expanded_nn.recording.isolation import Grads, has_hidden_rows, isolated
from expanded_nn.recording.passes import PassStage
from expanded_nn.recording.recorder import Recorder

Place = tuple[dict[Any, Any], Any]  # a dict and a key in it


@dataclass
class Inputs:
    """What a graph takes: the tensors among the arguments, the `.grad` of some owners (see `Outcome`), and constants.

    Constants are parameters, buffers and attributes of modules, in whose places other tensors may be at each call.
    """

    leaves: list[Tensor]  # the parameters, each once, and other tensors that have gradients
    grads: list[int]  # the numbers of the owners whose `.grad` is an input: there is one that may not be zero
    constants: list[Place]  # where the constants are

    def owners(self, call: Call) -> list[Tensor]:
        """The owners of gradients."""
        return [*call.tensors, *self.leaves]

    def of(self, call: Call) -> list[Any]:
        """The inputs at a call."""
        owners = self.owners(call) if self.grads else []
        grads = [owners[number].grad for number in self.grads]
        return [*call.tensors, *grads, *[values[name] for values, name in self.constants]]


@dataclass
class Traced:
    """A traced step."""

    graph: fx.GraphModule  # its operations
    inputs: Inputs  # what they take
    examples: list[Tensor]  # the inputs, without values
    outcome: Outcome  # what to do with the results
    draws: bool  # whether it draws random numbers
    shape_env: Any  # what the sizes are known to be
    len_lines: list[str]  # the user's lines that make a number of a size that changes, by `len`
    vmap_line: str | None  # the first one where `torch.vmap` does
    line_of_kept: Callable[[], str | None]  # the user's line that made a tensor which is kept outside of the step


def trace(
    step: Callable[..., Any],
    call: Call,
    varying: Collection[tuple[int, int]],  # numbers of a tensor and of a dimension of it
    modules: Sequence[nn.Module],
    recorders: Sequence[Recorder],
    others: list[Tensor],  # of no module that it calls, but it looks at their gradients; more are added
    *,
    thorough: bool,
    states: Grads | None,  # of the gradients before the call; the step may ask for them
    generators: Sequence[Any],  # of random numbers, that the step refers to
    referred: Sequence[nn.Module],  # that it refers to and does not call
) -> Traced:
    """Runs a step on tensors without values.

    Raises:
        LookFirst: If `states` are needed.
        OnlyEager: If a step of this kind cannot be a graph, and eagerly it is right.
        PerSampleError: If it reads values, or takes a step of an optimizer.
    """
    _refuse_processes(modules, recorders)
    sizes, tensors = _Sizes(varying), call.tensors
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    leaves = list({id(tensor): tensor for tensor in (*parameters, *others)}.values())
    if {id(leaf) for leaf in leaves} & {id(tensor) for tensor in tensors}:
        raise OnlyEager("a parameter of a model is among its arguments")
    clipped = {id(leaf) for leaf in leaves if any(recorder.is_clipped(leaf) for recorder in recorders)}
    former = FormerGrads([*tensors, *leaves], states, clipped)
    fakes = [sizes.without_values(tensor, number) for number, tensor in enumerate(tensors)]
    fakes += [sizes.without_values(grad.detach()) for grad in former.inputs.values()]
    dicts = [values for module in modules for values in (vars(module), module._buffers)]
    of_referred = (parameter for module in referred for parameter in module.parameters(recurse=False))
    dicts += map(vars, dict.fromkeys((*leaves, *of_referred)))
    saved = [(values, dict(values)) for values in dicts]
    body = _Body(step, call, leaves, recorders, former, saved, thorough)
    new_modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
    thread, drawn = get_ident(), RandomStates([*modules, *generators])
    contexts: list[Any] = [
        meanwhile(torch.random, default_generator=Generator()),
        _registered(register_optimizer_step_pre_hook, partial(refuse_optimizer, thread)),
        _registered(register_module_forward_pre_hook, partial(_note_new_module, thread, {*modules}, new_modules)),
        meanwhile(*leaves, grad=None),
        _restored(saved, leaves),
        _with_modes_left(),
        # what `torch.compile` has made is traced as it is written
        import_module("torch._dynamo").config.patch(error_on_nested_fx_trace=False),
        *texts(body.readings),
        einsum_paths(),
        sizes.mode,
        enable_python_dispatcher(),
    ]
    try:
        graph = _graph_of(body, fakes, contexts)
    finally:
        departed = (leaf for recorder in recorders for leaf in recorder.departed(recorder.leaves))
        looked_at = body.readings.put_back(leaves, {id(leaf.visible_parameter()) for leaf in departed})
        others += looked_at
        with_grads = body.ops.put_grads_back()
        changed = body.ops.put_back()
        has_drawn = drawn.restore()
        is_cached = clear_caches(body.ops.living())
    if looked_at:
        raise FirstEager("it reads or sets a .grad of what belongs to no module that it calls, or freezes it")
    if new_modules:  # and the step has not made them for itself
        raise FirstEager(_calls_new(next(iter(new_modules))))
    if is_cached:  # there is one with values after an eager call
        raise FirstEager("a function with a cache, functools.lru_cache, makes a tensor of it, call after call")
    if has_drawn:
        raise OnlyEager("it draws random numbers of Python or NumPy, which a graph does not draw anew")
    used = {node.meta["val"].node.expr for node in graph.graph.nodes if node.target is READ and node.users}
    unused = [line for value, line in body.ops.values.items() if value not in used]
    if unused:  # it was printed, or kept outside of the step, where it would be the same symbol for ever
        raise reading(unused[0])
    constants = _lifted(graph)
    if any(isinstance(constant, FakeTensor) for constant in constants):
        raise OnlyEager("it makes a tensor in a way that no trace sees, such as x.as_subclass(...) (do so before it)")
    trained = _trained(constants, leaves, with_grads | changed)
    if trained:
        others += trained
        raise FirstEager("it trains a tensor that belongs to no module that it calls")
    examples = [*fakes, *(sizes.without_values(constant.detach()) for constant in constants)]
    holders = [*modules, *referred]
    dicts += [values for module in holders for values in (vars(module), module._buffers, module._parameters)]
    inputs = Inputs(leaves, [*former.inputs], _places_of(constants, dicts))
    ops, len_lines = body.ops, body.readings.len_lines
    return Traced(
        graph, inputs, examples, body.outcome, ops.draws, sizes.env, len_lines, ops.vmap_line, ops.line_of_kept
    )


class _Sizes:
    """Makes tensors without values, whose sizes are symbols where they vary.

    Attributes:
        env: What the sizes are known to be.
        mode: The mode in which such tensors are computed.
        varying: The numbers of arguments, each with the number of a dimension of it.
    """

    def __init__(self, varying: Collection[tuple[int, int]]) -> None:
        self.symbolic = import_module("torch.fx.experimental.symbolic_shapes")  # the import takes a second
        self.env, self.varying = self.symbolic.ShapeEnv(), varying
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True, static_shapes=not varying)
        if varying:  # with symbols torch's cache of shapes takes longer than computing them: a trace 0.6 to 1 without
            self.mode.cache_enabled = False

    def without_values(self, tensor: Tensor, number: int = -1) -> Tensor:
        """A tensor like another one, which is an argument if it has a number."""
        dims = self.symbolic.DimDynamic
        # the strides of other tensors would be symbols, too
        free = tensor.layout is torch.strided and tensor.is_contiguous()
        kinds = [dims.DUCK if free and (number, dim) in self.varying else dims.STATIC for dim in range(tensor.dim())]
        context = self.symbolic.StatelessSymbolicContext(dynamic_sizes=kinds) if self.varying else None
        return self.mode.from_tensor(tensor, symbolic_context=context)


class FormerGrads:
    """The gradients that are there before a call, by the numbers of their owners.

    Attributes:
        ids: The ids of these owners.
        inputs: The gradients that the graph takes.
        zeros: Those known to be zero. They are no inputs: the graph makes zeros, and what it adds up is copied into
            them.
        states: What is known of them, if it is: see `Grads`.
        clipped: The ids of the parameters whose `.grad` clipping has set.
    """

    def __init__(self, owners: Sequence[Tensor], states: Grads | None, clipped: Collection[int]) -> None:
        present = {number: owner.grad for number, owner in enumerate(owners) if owner.requires_grad}
        grads = {number: grad for number, grad in present.items() if grad is not None}
        self.ids = {number: id(owners[number]) for number in grads}
        self.states, self.clipped = states, clipped
        known = states or {}
        if any(grad.layout is not torch.strided for grad in grads.values()):
            raise OnlyEager("its gradients are sparse")  # torch cannot add to one in a trace
        self.zeros = [number for number in grads if known.get(self.ids[number], (False,))[0]]
        self.inputs = {number: grad for number, grad in grads.items() if number not in self.zeros}

    def put(self, owners: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Gives owners in a trace their gradients."""
        for number, grad in zip(self.inputs, inputs, strict=True):
            owners[number].grad = grad
        for number in self.zeros:
            owners[number].grad = torch.zeros_like(owners[number].detach())

    def note(self, owners: Sequence[Tensor], owned: Collection[int]) -> None:
        """Notes the gradients, so that a question whether one is zero is answered, or raises `LookFirst`.

        `owned` are the ids of the parameters that have recorders.
        """
        for number, key in self.ids.items():
            if key in (owned if self.states is None else self.states):
                is_zero = None if self.states is None else self.states[key][0]
                note_gradient(cast(Tensor, owners[number].grad), is_zero)


@dataclass
class _Body:
    """What is traced: the step, as a function of the tensors among its arguments and of gradients from before."""

    step: Callable[..., Any]  # the user's function
    call: Call  # its arguments
    leaves: list[Tensor]  # the parameters, and other tensors that have gradients
    recorders: Sequence[Recorder]  # those of the rows
    former: FormerGrads  # the gradients from before
    saved: Saved  # the attributes of modules and parameters
    thorough: bool  # whether it assumes less than usual, at a cost
    outcome: Outcome = field(default_factory=Outcome)  # what the step leaves, as far as it has run
    ops: Operations = field(default_factory=Operations)  # what it does
    readings: Readings = field(init=False)  # what it reads of tensors

    def __post_init__(self) -> None:
        self.readings = Readings(self.ops)

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """Runs the step, notes what it leaves, and returns the tensors of that."""
        tensors, former, recorders = inputs[: len(self.call.tensors)], self.former, self.recorders
        owners: list[Tensor] = [*tensors, *self.leaves]
        former.put(owners, inputs[len(tensors) :])
        before = [(owner.grad, owner.requires_grad) for owner in owners]
        names, layouts = [{*vars(tensor)} for tensor in tensors], [*map(_layout, tensors)]
        args, kwargs = self._arguments(tensors)
        items = [(container, items_of(container)) for container in containers((args, kwargs))]
        results: list[Any] = []
        with ExitStack() as stack:
            for recorder in recorders:
                stack.enter_context(isolated(recorder, former.clipped, former.states or {}))
            conditions = stack.enter_context(assumptions(thorough=self.thorough, looked=former.states is not None))
            hidden_counts = [sum(map(has_hidden_rows, recorder.leaves)) for recorder in recorders]
            former.note(owners, {id(leaf.parameter()) for recorder in recorders for leaf in recorder.leaves})
            versions = {number: cast(Tensor, owners[number].grad)._version for number in former.zeros}
            stack.enter_context(self.ops)
            with self.readings:
                result = self.step(*args, **kwargs)
            if self.readings.refused is not None:  # the step has caught it, and has gone another way
                raise self.readings.refused
            new_names = (name for tensor, own in zip(tensors, names, strict=True) for name in {*vars(tensor)} - own)
            if not all(name.startswith("_") for name in new_names):
                raise OnlyEager("it sets an attribute of a tensor among its arguments (return what it sets)")
            if layouts != [*map(_layout, tensors)]:
                raise OnlyEager(
                    "it gives an argument other memory or another shape, as by x.data = y or x.resize_() (return what "
                    "it makes of it)"
                )
            self.outcome.result = packed(result, results)
            if any(isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_meta) for x in results):
                raise OnlyEager("it returns a sparse tensor or one without values (return the numbers in it)")
            _refuse_missing_backward(results, recorders)
            self.outcome.note_grads(owners, before, versions, results)
            for recorder, hidden_count in zip(recorders, hidden_counts, strict=True):
                self.outcome.note_rows(recorder, hidden_count, results, looked=former.states is not None)
            self.outcome.note_attributes(self.saved, results, recorders)
            self.outcome.note_items(items, results)
            self.outcome.note_assumptions(conditions, results)
        return results

    def _arguments(self, tensors: Sequence[Tensor]) -> Any:
        """The step's `(args, kwargs)`, with other tensors in place of those of the call."""
        parts: list[Any] = []
        given = Given(self.call.by_id, frozenset(map(id, self.call.objects)))
        remake = packed(self.call.arguments, parts, given)
        numbers = {id(tensor): number for number, tensor in enumerate(self.call.tensors)}
        return remake([tensors[numbers[id(part)]] for part in parts])


def _layout(tensor: Tensor) -> Any:
    """What says where a tensor's numbers are."""
    layout: Any = tensor.layout, tensor.dtype, tensor.shape
    if tensor.layout is torch.strided:
        layout += tensor.stride(), tensor.storage_offset(), tensor.untyped_storage()._cdata
    return layout


def _places_of(tensors: Sequence[Tensor], dicts: Sequence[dict[str, Any]]) -> list[Place]:
    """Which of some dicts has each tensor, and under what name; a tensor in none has a dict of its own."""
    found = {id(value): (values, name) for values in dicts for name, value in values.items()}
    return [found.get(id(tensor), ({"": tensor}, "")) for tensor in tensors]


@contextmanager
def _registered(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    """Registers a hook of all modules or optimizers once the context is entered: before, it might be left there."""
    with register(hook):
        yield


def _graph_of(
    body: Callable[..., Any], inputs: Sequence[Tensor], contexts: Sequence[AbstractContextManager[Any]]
) -> fx.GraphModule:
    """The graph of a function's operations on tensors without values, within some contexts."""
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            # "real" mode, as the inputs are without values already; what it sets in context variables is dropped
            return copy_context().run(make_fx(body, _allow_non_fake_inputs=True), *inputs)
    except (FirstEager, LookFirst, OnlyEager):
        raise
    except PerSampleError as error:
        if error.refused_by is None:
            raise
        # eagerly the forward starts over, with a module around that layer sample by sample
        raise TraceError(f"its trace raises {first_line(error)}") from error
    except Exception as error:
        if not reads_values(error):  # the eager step raises it again, if it is the step's own
            raise TraceError(f"its trace raises {first_line(error)}") from error
        frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        raise reading(reversed(frames)) from error


def _refuse_processes(modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> None:
    """Raises for models that are shared by several processes."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        raise complaint(
            "enn.compile",
            "the step calls DistributedDataParallel, whose communication is not a part of the graph",
            "a step of the model in it, ddp.module",
            "Add up what clipping leaves in .grad, after the step: torch.distributed.all_reduce(parameter.grad).",
        )
    if any(recorder.leaves.sharded for recorder in recorders):
        raise complaint(
            "enn.compile",
            "the model is sharded by FSDP, whose communication is not a part of the graph",
            "a model that each process holds as a whole",
            "Call the step without enn.compile.",
        )


def _note_new_module(
    thread: int, called: Collection[nn.Module], new_modules: MutableMapping[nn.Module, None], module: nn.Module, _: Any
) -> None:
    """Notes a module that no step has called before; puts the trace off before it calls one that could be changed.

    Raises:
        OnlyEager: If the trace itself has made a module with rows, whose recorder no later call would meet again.
    """
    if module not in called and get_ident() == thread:  # hooks of all modules are called in all threads
        has_rows = isinstance(module, PerSampleModule)
        are_new = [isinstance(parameter, FakeTensor) for parameter in module.parameters(recurse=has_rows)]
        if has_rows and are_new and all(are_new):
            raise OnlyEager(
                f"it makes or copies a {type(module).__name__} itself, which it calls in "
                f"{text_of(line_of_user())} (do that before the step, and set the copy's values in it, by "
                "copied.load_state_dict(model.state_dict()))"
            )
        if has_rows or not all(are_new):
            raise FirstEager(_calls_new(module))
        new_modules[module] = None


def _calls_new(module: nn.Module) -> str:
    return f"it calls a {type(module).__name__} for the first time"


def _trained(constants: Sequence[Tensor], leaves: Sequence[Tensor], changed: Collection[int]) -> list[Tensor]:
    """The tensors with values that a backward has reached, but for `leaves`.

    `changed` are the ids of the tensors with values that the trace has changed, or has given another `.grad`.
    """
    leaf_ids = {id(leaf) for leaf in leaves}
    others = [x for x in constants if x.requires_grad and x.is_leaf and id(x) not in leaf_ids]
    return [x for x in others if id(x) in changed or id(x.grad) in changed]


@contextmanager
def _restored(saved: Saved, leaves: Sequence[Tensor]) -> Iterator[None]:
    """Puts back dicts of attributes, each given with a copy; the hooks of leaves; and which leaves are frozen.

    New hooks of all modules are removed.
    """
    trainable = [leaf.requires_grad for leaf in leaves]
    of_leaves = [(leaf, hooks_on(leaf)) for leaf in leaves]
    of_all_modules = [(of_all, {*of_all}) for of_all in GLOBAL_HOOKS]
    try:
        yield
    finally:
        for leaf, hooks in of_leaves:
            remove_new_hooks(leaf, hooks)
        for leaf, was_trainable in zip(leaves, trainable, strict=True):
            if leaf.requires_grad != was_trainable:
                leaf.requires_grad_(was_trainable)
        for of_all, keys in of_all_modules:
            new = [(key, getattr(hook, "func", hook)) for key, hook in [*of_all.items()] if key not in keys]
            for key in [key for key, function in new if not is_ours(function)]:  # as that of a step in another thread
                of_all.pop(key, None)
        for values, before in saved:
            put_back(values, before)


@contextmanager
def _with_modes_left() -> Iterator[None]:
    """Puts back what a trace has set for all of torch.

    Raises:
        OnlyEager: If it leaves such a change, which its graph does not make.
    """
    is_on, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
        if (torch.is_grad_enabled(), torch.get_default_dtype()) != (is_on, dtype):
            raise OnlyEager("it leaves gradients switched off, or another default dtype (switch them outside of it)")
    finally:
        set_grad_enabled(is_on)
        torch.set_default_dtype(dtype)


def _refuse_missing_backward(parts: Sequence[Any], recorders: Sequence[Recorder]) -> None:
    """Raises if the step returns a tensor whose backward has not run: it would run outside of the graph."""
    if not any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        return
    passes = [recorder.passes.last for recorder in recorders]
    if any(pass_ is not None and pass_.stage is PassStage.OPEN for pass_ in passes):
        raise complaint(
            "enn.compile",
            "the step returns a tensor that requires gradients, and has called no backward",
            "a step that calls backward itself",
            "Call loss.backward() within the step; where it is not to train, return result.detach().",
        )


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Turns the tensors that a graph has as attributes into its last inputs, and returns them."""
    constants: dict[int, tuple[Tensor, fx.Node]] = {}
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in list(graph.graph.nodes):
        if node.op != "get_attr" or not isinstance(value := getattr(graph, node.target), Tensor):
            continue
        if id(value) not in constants:
            with graph.graph.inserting_before(first):
                placeholder = graph.graph.placeholder(f"constant_{len(constants)}")
            placeholder.meta = dict(node.meta)
            constants[id(value)] = value, placeholder
        node.replace_all_uses_with(constants[id(value)][1])
    graph.graph.eliminate_dead_code()
    for values in (vars(graph), graph._parameters, graph._buffers):
        for name in [name for name, value in values.items() if isinstance(value, Tensor)]:
            del values[name]
    graph.recompile()
    return [value for value, _ in constants.values()]
