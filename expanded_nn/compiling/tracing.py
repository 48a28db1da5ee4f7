"""Tracing a step: it runs once, on tensors without values, and leaves a graph and what to do with the graph's results.

The parameters themselves take part, and not copies. What the step does to them, to the rows held and to the attributes
of modules is taken back afterwards.
"""

from __future__ import annotations

import gc
import linecache
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from operator import itemgetter
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
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from expanded_nn._errors import LIBRARIES, PerSampleError, complaint
from expanded_nn.common.functions import SIZES
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import running_backward
from expanded_nn.common.steady import RandomStates
from expanded_nn.common.traced import FirstEager, LookFirst, OnlyEager, assumptions, note_gradient, note_zeroed
from expanded_nn.compiling.packing import Remake, containers, items_of, packed
from expanded_nn.factored import FactoredTensor, is_hidden
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.recording.callers import is_called_by_libraries, line_of_user
from expanded_nn.recording.isolation import Grads, has_hidden_rows, isolated
from expanded_nn.recording.leaf import Leaf, Published
from expanded_nn.recording.passes import PassStage
from expanded_nn.recording.recorder import Recorder

_SHOWN = {Tensor.__repr__, Tensor.__format__, Tensor.numpy, Tensor.__array__, Tensor.tolist}
_NUMBER = {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SYMBOLS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_READ = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default  # of numbers in the step's code
_ZERO = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
Find = Callable[[Sequence[Tensor]], Tensor]  # gives a tensor, from the tensors among the arguments if it is one of them


@dataclass
class RecorderRows:
    """What a step leaves in one recorder.

    Attributes:
        recorder: The recorder.
        passes: For each pass the rows, by parameter.
        appends: Whether the rows from before the call stay.
        clipped: The parameters whose `.grad` clipping has set.
    """

    recorder: Recorder
    passes: list[dict[Leaf, Remake]]
    appends: bool
    clipped: set[Leaf]


@dataclass
class Outcome:
    """What to do with the results of a graph.

    Attributes:
        result: What the step returns.
        grads: The new `.grad` of parameters and arguments, where it is another tensor than before.
        filled: The new numbers of a `.grad` that was zero before.
        flags: Parameters without rows from before, and whether their `.grad` is scaled and has a foreign part; only
            where a `.grad` was there before.
        rows: The rows that recorders hold.
        shown: What the step itself has set as the `grad_sample` of parameters, such as `None`.
        trainable: Parameters and arguments that require gradients now and did not before, or the other way around.
        attributes: The new attributes and buffers of modules, and attributes of parameters: the dictionary that has it,
            the name, and the value.
        removed: The attributes that the step has removed.
        items: The new items of lists and dicts among the arguments: the place of the list or dict among the containers,
            the keys that are no more there, and the new items by their keys.
        assumed: The index of the result that says which assumptions of the graph held, and of the one that says
            whether all did.
        otherwise: What it means that an assumption did not hold.
    """

    result: Remake = lambda values: None
    grads: list[tuple[Find, Remake | None]] = field(default_factory=list)
    filled: list[tuple[Find, Remake]] = field(default_factory=list)
    flags: list[tuple[Leaf, bool, bool]] = field(default_factory=list)
    rows: list[RecorderRows] = field(default_factory=list)
    shown: list[tuple[Leaf, Remake]] = field(default_factory=list)
    trainable: list[tuple[Find, bool]] = field(default_factory=list)
    attributes: list[tuple[dict[str, Any], str, Remake]] = field(default_factory=list)
    removed: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    items: list[tuple[int, list[Any], dict[Any, Remake]]] = field(default_factory=list)
    assumed: int | None = None
    otherwise: list[str] = field(default_factory=list)


@dataclass
class Traced:
    """A traced step.

    Attributes:
        graph: The operations; the inputs are the tensors among the arguments, the gradients of `grad_inputs`, the
            constants.
        constants: The tensors that are neither arguments nor gradients: parameters, and buffers and attributes of
            modules, which may be other tensors at each call.
        examples: The inputs, without values.
        outcome: What to do with the results.
        grad_inputs: The parameters and arguments whose `.grad` is an input: there is one, and it is not known to be
            zero.
        draws: Whether it draws random numbers.
        shape_env: What the sizes are known to be.
        len_lines: The user's lines that make a number of a size that changes.
        kept_line: The user's line that made a tensor that is kept outside of the step, if there is one.
    """

    graph: fx.GraphModule
    constants: list[Find]
    examples: list[Tensor]
    outcome: Outcome
    grad_inputs: list[Find]
    draws: bool
    shape_env: Any
    len_lines: list[str]
    kept_line: str | None


class _Operations(TorchDispatchMode):
    """Looks at the operations of a trace, and gives it up where a graph would draw other random numbers.

    Attributes:
        draws: Whether random numbers are drawn.
        values: The symbols of values that the step has read, `tensor.item()`, with the line of each.
        tensors: The tensors that were made, each with the line that made it.
        changed: Tensors with values, such as a weight, that the trace may have changed in place, each with its version
            and a copy from before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.values: dict[Any, str] = {}
        self.tensors: list[tuple[TensorWeakRef, tuple[str, int]]] = []
        self.changed: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ:
            value = func(*args, **kwargs)
            if hasattr(value, "node"):
                self.values[value.node.expr] = _line_in(traceback.extract_stack())
            return value
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
            if running_backward() >= 0:
                raise OnlyEager("it draws random numbers within a backward, as a checkpoint around a dropout does")
            if isinstance(kwargs.get("generator"), torch.Generator):
                raise OnlyEager("it draws random numbers from a torch.Generator of its own")
        if func in _ZERO:
            for tensor in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                note_zeroed(tensor)
        # torch computes some operations of such tensors alone, as `weight.mul_(0.9)`, in spite of the trace
        real = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not _is_fake(leaf)]
        if real and func._schema.is_mutable:
            with no_dispatch(), torch.no_grad():
                self.changed += [(tensor, tensor._version, tensor.detach().clone()) for tensor in real]
        result = func(*args, **kwargs)
        if real and func not in _LIFT:
            for tensor in tree_leaves(result):
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None  # its value may be another at the next call
        line = line_of_user()
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and not any(tensor is arg for arg in args):  # no argument changed in place
                self.tensors.append((TensorWeakRef(tensor), line))
        return result

    def put_back(self) -> None:
        """Gives the tensors that have values those from before the trace."""
        with torch.no_grad():
            for tensor, version, before in reversed(self.changed):
                if tensor._version != version:
                    tensor.detach().copy_(before)
        self.changed.clear()

    def line_of_kept(self) -> str | None:
        """The line that made a tensor to which something refers still, after the trace."""
        if all(ref() is None for ref, _ in self.tensors):
            return None
        gc.collect()  # it takes long where much is in memory, and is seldom needed
        for ref, (file, number) in reversed(self.tensors):
            tensor = ref()
            # none: autograd alone, which a checkpoint may leave
            if tensor is not None and not all(map(_is_of_rows, gc.get_referrers(tensor))):
                return f"line {number} of {file}: {linecache.getline(file, number).strip()}"
        return None


def _is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, or is made of such."""
    return isinstance(tensor, FakeTensor | FactoredTensor)


def _is_of_rows(holder: object) -> bool:
    """Whether an object holds rows, for a recorder that the step itself has made by `per_sample`."""
    if isinstance(holder, dict):
        return "grad_sample" in holder or any(isinstance(key, Leaf) for key in holder)
    return isinstance(holder, Published)


class _Readings(TorchFunctionMode):
    """Refuses to print a tensor, which a graph does not, and to read one that has values: they would stay the same.

    Attributes:
        len_lines: The user's lines that take `len` of a tensor whose size is a symbol, which makes a number of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.len_lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHOWN or (func in _NUMBER and not isinstance(args[0], FakeTensor)):
            raise _reading(_line_in(traceback.extract_stack()))
        if func == _SET_DATA and not _is_fake(args[0]):
            raise OnlyEager("it sets .data of a tensor anew (change it in place under torch.no_grad(), p.sub_(...))")
        if func in SIZES and args and is_hidden(args[0]) and not is_called_by_libraries(func):
            raise OnlyEager("it uses the number of per-sample gradients from before the call (clear them)")
        counts = func is Tensor.__len__ and args[0].dim() and isinstance(args[0].shape[0], torch.SymInt)
        if counts and not is_called_by_libraries(func):
            self.len_lines.append(_line_in(traceback.extract_stack()))
        return func(*args, **(kwargs or {}))


class _Generator:
    """Torch's generator of random numbers in a trace: its state may be read, but not set."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def set_state(self, state: Tensor) -> None:
        """Gives the trace up, but for a checkpoint, within whose backward no numbers may be drawn anyway."""
        if get_ident() != self._thread:
            self._generator.set_state(state)
        elif running_backward() < 0:
            raise OnlyEager("it sets the state of torch's random numbers, as torch.random.fork_rng does")

    def manual_seed(self, seed: int) -> Any:
        """Gives the trace up: a graph would not set the seed."""
        if get_ident() == self._thread:
            raise OnlyEager("it sets the seed of torch's random numbers")
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        """Gives the trace up, too."""
        if get_ident() == self._thread:
            raise OnlyEager("it sets the seed of torch's random numbers")
        return self._generator.seed()


def _refuse_optimizer(thread: int, optimizer: Any, *_: Any) -> None:
    if get_ident() != thread:  # hooks of all optimizers are called in all threads
        return
    raise complaint(
        "enn.compile",
        f"the step calls {type(optimizer).__name__}.step()",
        "a step that ends with its gradients, as the graph would keep the learning rate of the first call",
        "Call the optimizer after the compiled step.",
    )


def trace(
    step: Callable[..., Any],
    arguments: Any,  # (args, kwargs), with the tensors in `tensors`
    tensors: Sequence[Tensor],
    varying: Collection[tuple[int, int]],  # numbers of a tensor and of a dimension of it
    modules: Sequence[nn.Module],
    recorders: Sequence[Recorder],
    *,
    thorough: bool = False,
    states: Grads | None = None,  # of the gradients before the call; the step may ask for them
    generators: Sequence[Any] = (),  # of random numbers, that the step refers to
) -> Traced:
    """Runs a step on tensors without values.

    Raises:
        LookFirst: If `states` are needed.
        OnlyEager: If a step of this kind cannot be a graph, and eagerly it is right.
        PerSampleError: If it reads values, or takes a step of an optimizer.
    """
    _refuse_processes(modules, recorders)
    symbolic = import_module("torch.fx.experimental.symbolic_shapes")  # the import takes a second
    shape_env = symbolic.ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True, static_shapes=not varying)

    def without_values(tensor: Tensor, number: int = -1) -> Tensor:
        dims = symbolic.DimDynamic
        # the strides of other tensors would be symbols, too
        free = tensor.layout is torch.strided and tensor.is_contiguous()
        kinds = [dims.DUCK if free and (number, dim) in varying else dims.STATIC for dim in range(tensor.dim())]
        context = symbolic.StatelessSymbolicContext(dynamic_sizes=kinds) if varying else None
        return mode.from_tensor(tensor, symbolic_context=context)

    parts: list[Any] = []
    remake = packed(arguments, parts)
    numbers = [next(number for number, tensor in enumerate(tensors) if tensor is part) for part in parts]
    fakes = [without_values(tensor, number) for number, tensor in enumerate(tensors)]
    leaves = list({id(p): p for module in modules for p in module.parameters(recurse=False)}.values())
    if {id(leaf) for leaf in leaves} & {id(tensor) for tensor in tensors}:
        raise OnlyEager("a parameter of a model is among its arguments")
    finds: list[Find] = [partial(_itself, leaf) for leaf in leaves]
    finds += [itemgetter(number) for number, tensor in enumerate(tensors)]
    having_grad = [find for find in finds if find(tensors).requires_grad and find(tensors).grad is not None]
    # gradients known to be zero are no inputs: the graph makes zeros, and what it adds up is copied into them
    zeros = [find for find in having_grad if states is not None and states.get(id(find(tensors)), (False,))[0]]
    if any(cast(Tensor, find(tensors).grad).layout is not torch.strided for find in zeros):
        raise OnlyEager("a sparse gradient is there already")
    grad_inputs = [find for find in having_grad if find not in zeros]
    clipped = {id(leaf) for leaf in leaves if any(recorder.is_clipped(leaf) for recorder in recorders)}
    owned = {id(leaf.parameter()) for recorder in recorders for leaf in recorder.leaves}
    grads = [without_values(cast(Tensor, find(tensors).grad).detach()) for find in grad_inputs]
    saved = [(values, dict(values)) for module in modules for values in (vars(module), module._buffers)]
    saved += [(vars(leaf), dict(vars(leaf))) for leaf in leaves]
    outcome, ops, readings = Outcome(), _Operations(), _Readings()
    new_modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()

    def body(*inputs: Tensor) -> list[Any]:
        traced = inputs[: len(fakes)]
        for find, grad in zip(grad_inputs, inputs[len(fakes) :], strict=True):
            find(traced).grad = grad
        for find in zeros:
            find(traced).grad = torch.zeros_like(find(traced).detach())
        old_grads: list[Tensor | None] = [find(traced).grad for find in finds]
        were_trainable = [find(traced).requires_grad for find in finds]
        names = [{*vars(tensor)} for tensor in traced]
        args, kwargs = remake([traced[number] for number in numbers])
        items = [(container, items_of(container)) for container in containers((args, kwargs))]
        results: list[Any] = []
        with ExitStack() as stack:
            for recorder in recorders:
                stack.enter_context(isolated(recorder, clipped, states or {}))
            conditions = stack.enter_context(assumptions(thorough=thorough, looked=states is not None))
            hidden_counts = {recorder: sum(map(has_hidden_rows, recorder.leaves)) for recorder in recorders}
            for find in having_grad:  # noted: a question whether it is zero is answered, or raises `LookFirst`
                key = id(find(tensors))
                if key in (owned if states is None else states):
                    note_gradient(cast(Tensor, find(traced).grad), None if states is None else states[key][0])
            versions = {find: cast(Tensor, find(traced).grad)._version for find in zeros}
            stack.enter_context(ops)
            note_new = partial(_note_new_module, get_ident(), {*modules}, new_modules)
            stack.enter_context(register_module_forward_pre_hook(note_new))
            with readings:
                result = step(*args, **kwargs)
            if any(
                not name.startswith("_")
                for tensor, own in zip(traced, names, strict=True)
                for name in {*vars(tensor)} - own
            ):
                raise OnlyEager("it sets an attribute of a tensor among its arguments (return what it sets)")
            outcome.result = packed(result, results)
            _refuse_missing_backward(results, recorders)
            for find, old_grad, was_trainable in zip(finds, old_grads, were_trainable, strict=True):
                if find(traced).requires_grad != was_trainable:
                    outcome.trainable.append((find, not was_trainable))
                new_grad = find(traced).grad
                if new_grad is not old_grad:
                    outcome.grads.append((find, None if new_grad is None else packed(new_grad, results)))
                elif new_grad is not None and find in versions and new_grad._version != versions[find]:
                    outcome.filled.append((find, packed(new_grad, results)))
            for recorder in recorders:
                _note_rows(recorder, outcome, results, hidden_counts[recorder])
                if states is not None and not any(map(has_hidden_rows, recorder.leaves)):
                    outcome.flags += [(leaf, leaf.is_scaled, leaf.has_foreign_part) for leaf in recorder.leaves]
            _note_attributes(saved, outcome, results)
            _note_items(items, outcome, results)
            if conditions:
                outcome.assumed, outcome.otherwise = len(results), [otherwise for _, otherwise in conditions]
                results.append(torch.stack([condition for condition, _ in conditions]))
                results.append(results[-1].all())
        return results

    tracer = make_fx(body, _allow_non_fake_inputs=True)  # "real" mode, as the inputs are without values already
    no_optimizer = register_optimizer_step_pre_hook(partial(_refuse_optimizer, get_ident()))
    no_grads = meanwhile(*leaves, grad=None)
    texts = [_texts(cls, number, readings) for cls, number in _SYMBOLS.items()]
    drawn = RandomStates([*modules, *generators])
    own_generator = meanwhile(torch.random, default_generator=_Generator(torch.default_generator))
    try:
        with own_generator, no_optimizer, no_grads, _restored(saved, leaves), ExitStack() as stack:
            contexts: list[Any] = [*texts, mode, enable_python_dispatcher()]
            for context in contexts:
                stack.enter_context(context)
            graph = tracer(*fakes, *grads)
    except (PerSampleError, FirstEager, LookFirst, OnlyEager):
        raise
    except Exception as error:
        if not _reads_values(error):  # the eager step raises it again, if it is the step's own
            raise FirstEager(f"its trace raises {type(error).__name__}: {error}") from error
        raise _reading(_line_in(traceback.extract_tb(error.__traceback__))) from error
    finally:
        ops.put_back()
        has_drawn = drawn.restore()
    if new_modules:  # and the step has not made them for itself
        raise FirstEager(_calls_new(next(iter(new_modules))))
    if has_drawn:
        raise OnlyEager("it draws random numbers of Python or NumPy, which a graph does not draw anew")
    # the gradients of arguments would look as if they were kept
    kept_line = None if any(tensor.requires_grad for tensor in (*tensors, *fakes)) else ops.line_of_kept()
    used = {node.meta["val"].node.expr for node in graph.graph.nodes if node.target is _READ and node.users}
    unused = [line for value, line in ops.values.items() if value not in used]
    if unused:  # it was printed, or kept outside of the step, where it would be the same symbol for ever
        raise _reading(unused[0])
    constants = _lifted(graph)
    _refuse_other_leaves(constants, leaves)
    examples = [*fakes, *grads, *(without_values(constant.detach()) for constant in constants)]
    attributes = {
        id(value): (values, name) for values, _ in saved for name, value in values.items() if isinstance(value, Tensor)
    }
    find_constants: list[Find] = [
        partial(_attribute, *attributes[id(constant)]) if id(constant) in attributes else partial(_itself, constant)
        for constant in constants
    ]
    return Traced(
        graph, find_constants, examples, outcome, grad_inputs, ops.draws, shape_env, readings.len_lines, kept_line
    )


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
    """Notes a module that no step has called before; puts the trace off before it calls one that could be changed."""
    if module not in called and get_ident() == thread:  # hooks of all modules are called in all threads
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if isinstance(module, PerSampleModule) or not all(
            isinstance(parameter, FakeTensor) for parameter in parameters
        ):
            raise FirstEager(_calls_new(module))
        new_modules[module] = None


def _calls_new(module: nn.Module) -> str:
    return f"it calls a {type(module).__name__} for the first time"


def _refuse_other_leaves(constants: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Raises if a tensor requires gradients that is neither an argument nor a parameter of a module that is called."""
    leaf_ids = {id(leaf) for leaf in leaves}
    for constant in constants:
        if constant.requires_grad and constant.is_leaf and id(constant) not in leaf_ids:
            if isinstance(constant.grad, FakeTensor):
                constant.grad = None
            raise complaint(
                "enn.compile",
                f"the step uses a tensor of shape {tuple(constant.shape)} that requires gradients and belongs to no "
                "module that it calls",
                "parameters of modules, and arguments",
                "Make it an argument of the step.",
            )


def _reads_values(error: Exception) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    value_errors = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
    texts = ("data is not allocated yet", "trying to get value", "passed to Sym")
    return bool(names & value_errors) or any(text in str(error) for text in texts)


def _reading(line: str) -> PerSampleError:
    return complaint(
        "enn.compile",
        f"the step reads a value of a tensor in {line}",
        "a step that does the same operations whatever the values are",
        "Use torch.where in place of an if, return the tensor and look at it after the step, or call the step "
        "without enn.compile.",
    )


def _line_in(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's code."""
    user_frames = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<string>"))]
    innermost = (user_frames or frames)[-1]
    return f"line {innermost.lineno} of {innermost.filename}: {innermost.line}"


def _attribute(values: dict[str, Any], name: str, tensors: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, values[name])


def _itself(leaf: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return leaf


@contextmanager
def _restored(saved: Sequence[tuple[dict[str, Any], dict[str, Any]]], leaves: Sequence[Tensor]) -> Iterator[None]:
    """Puts dictionaries of attributes, each given with a copy of it, back as they were, and which leaves are frozen."""
    trainable = [leaf.requires_grad for leaf in leaves]
    try:
        yield
    finally:
        for leaf, was_trainable in zip(leaves, trainable, strict=True):
            if leaf.requires_grad != was_trainable:
                leaf.requires_grad_(was_trainable)
        for values, before in saved:
            values.clear()
            values.update(before)


def _texts(cls: type, number: Callable[[Any], Any], readings: _Readings) -> AbstractContextManager[None]:
    """Makes a number of a size that is a symbol, or of what is computed from it, where the user's code shows it."""
    of_symbol = cast(Any, cls).__repr__

    def text(symbol: Any, spec: str = "") -> str:
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            return str(of_symbol(symbol))
        readings.len_lines.append(_line_in(traceback.extract_stack()))
        return format(number(symbol), spec)

    return meanwhile(cls, __repr__=text, __format__=text)


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
            "Call loss.backward() within the step, or return result.detach().",
        )


def _note_rows(recorder: Recorder, outcome: Outcome, results: list[Any], hidden_before: int) -> None:
    recorder.drop_outdated_rows()
    if recorder.rows_stand_alone:
        raise OnlyEager("it ends with the rows of torch.autograd.grad(..., create_graph=True)")
    hidden = [leaf for leaf in recorder.leaves if has_hidden_rows(leaf)]
    if hidden and (len(hidden) < len(recorder.leaves.with_rows()) or len(hidden) < hidden_before):
        raise OnlyEager(
            "it leaves some of the per-sample gradients from before the call (clear them all, model.zero_grad())"
        )
    for leaf in recorder.leaves:
        parameter = leaf.parameter()
        shown = getattr(parameter, "grad_sample", None)
        if parameter is not None and leaf.was_reset() and not is_hidden(shown):
            outcome.shown.append((leaf, packed(shown, results)))
    passes = [
        {leaf: packed(rows, results) for leaf, rows in pass_rows.items()}
        for pass_rows in recorder.store.held.values()
        if not any(map(is_hidden, pass_rows.values()))
    ]
    if hidden and not passes:
        return
    parameters = {leaf: leaf.parameter() for leaf in recorder.leaves}
    clipped = {leaf for leaf, value in parameters.items() if value is not None and recorder.is_clipped(value)}
    outcome.rows.append(RecorderRows(recorder, passes, bool(hidden), clipped))


def _note_attributes(
    saved: Sequence[tuple[dict[str, Any], dict[str, Any]]], outcome: Outcome, results: list[Any]
) -> None:
    for values, before in saved:
        for name, value in values.items():
            if name != "grad_sample" and (name not in before or value is not before[name]):
                if name == "_recorder":
                    raise OnlyEager("it switches per-sample mode off and on")
                outcome.attributes.append((values, name, packed(value, results)))
        outcome.removed += [(values, name) for name in before if name not in values]


def _note_items(items: Sequence[tuple[Any, dict[Any, Any]]], outcome: Outcome, results: list[Any]) -> None:
    """Notes what the step has done to lists, dicts and dataclasses among its arguments, given with what they held."""
    for number, (container, before) in enumerate(items):
        after = items_of(container)
        removed = [key for key in before if key not in after]
        new = {key: value for key, value in after.items() if key not in before or value is not before[key]}
        if removed or new:
            outcome.items.append((number, removed, {key: packed(value, results) for key, value in new.items()}))


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Turns the tensors that a graph has as attributes into its last inputs, and returns them."""
    constants: dict[int, tuple[Tensor, fx.Node]] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr" or not isinstance(value := getattr(graph, node.target), Tensor):
            continue
        if id(value) not in constants:
            with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before():
                placeholder = graph.graph.placeholder(f"constant_{len(constants)}")
            placeholder.meta = dict(node.meta)
            last = [placeholder]
            constants[id(value)] = value, placeholder
        node.replace_all_uses_with(constants[id(value)][1])
        graph.graph.erase_node(node)
    for values in (vars(graph), graph._parameters, graph._buffers):
        for name in [name for name, value in values.items() if isinstance(value, Tensor)]:
            del values[name]
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [value for value, _ in constants.values()]
