"""Watches a trace: operations and readings of values that a graph cannot have, and the lines that do them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from expanded_nn._errors import LIBRARIES, NOT_THE_USERS, PerSampleError, complaint
from expanded_nn.common.functions import SIZES
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import FunctionMode, is_batched, of_all, running_backward
from expanded_nn.common.outside import hooks_on, remove_new_hooks
from expanded_nn.common.traced import OnlyEager, assume, is_traced, note_hook, note_zeroed
from expanded_nn.compiling.known import has_values, is_fake, known_values
from expanded_nn.core import cost
from expanded_nn.factored import is_hidden
from expanded_nn.recording.callers import (
    innermost,
    is_asked_by_users,
    is_called_by_libraries,
    line_of_user,
    lines_now,
    text_of,
)
from expanded_nn.recording.leaf import Leaf, Published

READ = torch.ops.aten._local_scalar_dense.default
_SHOWN = {Tensor.__repr__, Tensor.__format__, Tensor.numpy, Tensor.__array__, Tensor.tolist}
_NUMBER = {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}
_EQUAL = {torch.equal, Tensor.equal}
_CTC = {torch.ctc_loss, torch.nn.functional.ctc_loss}
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OF_GRAD = {cast(Any, Tensor.grad).__get__, cast(Any, Tensor.grad).__set__}
_OF_GRAD |= {Tensor.requires_grad_, cast(Any, Tensor.requires_grad).__set__}
_SETS_HOOKS = Tensor.register_hook, Tensor.register_post_accumulate_grad_hook
_SYMBOLS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_LIFT = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default  # of numbers in the step's code
_FROZEN_BY_PYTHON = 5_000  # objects at most: 3.12 begins with some hundreds; with torch, `gc.freeze` takes 100,000
_OF_MEMORY = {Tensor.storage_offset, Tensor.data_ptr, Tensor._is_view, cast(Any, Tensor._base).__get__}
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# torch's files with operations, the last one with those on the numbers that `item()` gives
_OPERATIONS = "functional.py", "_tensor.py", "_jit_internal.py", "overrides.py", f"torch{os.sep}__init__.py"
_SIZES_AS_NUMBERS = torch.ops.aten.size.default
_ZERO = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default


class Operations(TorchDispatchMode):
    """Looks at the operations of a trace, and gives it up where a graph would draw other random numbers.

    Attributes:
        draws: Whether random numbers are drawn.
        values: The symbols that stand for values which the step has read, by `tensor.item()`, each with the lines.
        tensors: The tensors that were made, each with the line that made it.
        changed: Tensors with values, such as a weight, that the trace may have changed in place, each with its version
            and a copy from before.
        leaves: Tensors with values that require gradients, each with its `.grad` from before.
        vmap_line: The user's line where `torch.vmap` first makes a number of a size, as most of its rules do.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.values: dict[Any, list[tuple[str, int]]] = {}
        self.tensors: list[tuple[TensorWeakRef, tuple[str, int]]] = []
        self.changed: list[tuple[Tensor, int, Tensor]] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.vmap_line: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise OnlyEager(f"it calls torch's operation {func.name()}, which takes functions")
        if func is READ:
            value = func(*args, **kwargs)
            if hasattr(value, "node"):
                self.values[value.node.expr] = lines_now()
            elif has_values(args[0]):
                raise OnlyEager(_number_of_tensor())
            return value
        if func is _SIZES_AS_NUMBERS and any(isinstance(size, torch.SymInt) for size in args[0].shape):
            self.vmap_line = self.vmap_line or text_of(line_of_user())
        if _draws(func, args, kwargs):
            self.draws = True
            if running_backward() >= 0:
                raise OnlyEager("it draws random numbers within a backward, as a checkpoint around a dropout does")
            if isinstance(kwargs.get("generator"), torch.Generator):
                raise OnlyEager("it draws random numbers from a torch.Generator of its own")
        if func in _ZERO:
            for tensor in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                note_zeroed(tensor)
        # an operation on tensors with values alone, such as `weight.mul_(0.9)`, is computed in spite of the trace
        real = [leaf for leaf in tree_leaves((args, kwargs)) if has_values(leaf)]
        for leaf in real:
            if leaf.requires_grad and leaf.is_leaf:
                self.leaves.setdefault(id(leaf), (leaf, leaf.grad))
        changes = bool(real) and func._schema.is_mutable
        if changes:
            with no_dispatch(), torch.no_grad():
                self.changed += [(tensor, tensor._version, tensor.detach().clone()) for tensor in real]
        result = func(*args, **kwargs)
        if real and func not in _LIFT:
            _forget_values(result)
        if changes:
            return result  # what stands for the tensor that was changed
        line = line_of_user()
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and not any(tensor is arg for arg in args):  # no argument changed in place
                self.tensors.append((TensorWeakRef(tensor), line))
        return result

    def put_back(self) -> set[int]:
        """Puts back the values from before the trace; returns the ids of the tensors that were changed."""
        changed = [(tensor, before) for tensor, version, before in self.changed if tensor._version != version]
        with torch.no_grad():
            for tensor, before in reversed(changed):
                tensor.detach().copy_(before)
        self.changed.clear()
        return {id(tensor) for tensor, _ in changed}

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether the trace has changed a tensor with values."""
        return any(each is tensor and each._version != version for each, version, _ in self.changed)

    def put_grads_back(self) -> set[int]:
        """Puts `.grad` back where that has no values; returns the ids of these tensors."""
        trained = [(leaf, grad) for leaf, grad in self.leaves.values() if isinstance(leaf.grad, FakeTensor)]
        for leaf, grad in trained:
            leaf.grad = grad
        self.leaves.clear()
        return {id(leaf) for leaf, _ in trained}

    def line_of_kept(self) -> str | None:
        """The line that made a tensor to which something refers still, after the trace."""
        if all(ref() is None for ref, _ in self.tensors):
            return None
        gc.collect()  # it takes long where much is in memory, and is seldom needed
        for ref, line in reversed(self.tensors):
            tensor = ref()
            # without a referrer only autograd holds it, as a checkpoint may leave it; `gc.freeze` hides referrers
            are_hidden = gc.get_freeze_count() > _FROZEN_BY_PYTHON
            if tensor is not None and (are_hidden or not all(map(_is_of_rows, gc.get_referrers(tensor)))):
                return text_of(line)
        return None

    def living(self) -> list[Tensor]:
        """The tensors that are there still."""
        return [tensor for tensor in (ref() for ref, _ in self.tensors) if tensor is not None]


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers; fused attention does with dropout alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _forget_values(result: object) -> None:
    """Takes away the values that torch knows of what a trace has computed: they may be others at the next call."""
    mode = get_innermost_proxy_mode()
    for tensor in tree_leaves(result):
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
            proxy: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
            if proxy is not None:
                proxy.constant = None


def _number_of_tensor() -> str:
    """Why there is no graph where torch makes a number of a tensor with values, as for `alpha`: it would be kept."""
    return (
        f"it takes a number from a tensor in {text_of(line_of_user())}, where torch wants a number or an index "
        "(compute with the tensor, x + alpha * y; or make the number an argument of the step)"
    )


def _is_of_rows(holder: object) -> bool:
    """Whether an object holds rows: those of a recorder that the step itself has made, by `per_sample`."""
    if isinstance(holder, dict):
        return "grad_sample" in holder or any(isinstance(key, Leaf) for key in holder)
    return isinstance(holder, Published)


class Readings(FunctionMode):
    """Refuses to print a tensor, which a graph would not do, and to read one with values, which would stay the same.

    Attributes:
        ops: The operations of the trace.
        len_lines: The user's lines that take `len` of a tensor whose size is a symbol, which makes a number of it.
        grads: The tensors with values whose `.grad` the step reads or sets, or that it freezes, each with its `.grad`
            and whether it required gradients.
        hooked: Those on which it sets hooks, each with the ids of its hooks from before.
        refused: The first error, which the step may have caught.
    """

    def __init__(self, ops: Operations) -> None:
        super().__init__()
        self.ops = ops
        self.len_lines: list[str] = []
        self.grads: dict[int, tuple[Tensor, Tensor | None, bool]] = {}
        self.hooked: dict[int, tuple[Tensor, set[int]]] = {}
        self.refused: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._result_of(func, args, kwargs)
        except Exception as error:
            is_told = isinstance(error, OnlyEager | PerSampleError) or reads_values(error)
            if self.refused is None and is_told and not is_called_by_libraries(func):
                self.refused = error
            raise

    def _result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SETS_HOOKS and is_fake(args[0]):
            note_hook()
        elif func in _SETS_HOOKS:
            self.hooked.setdefault(id(args[0]), (args[0], hooks_on(args[0])))
        if func in _NUMBER and (number := self._assumed_number(func, args[0])) is not None:
            return number
        if func in _SHOWN or (func in _NUMBER and not isinstance(args[0], FakeTensor)):
            raise reading(lines_now())
        if func in _EQUAL and any(map(has_values, args)) and not is_called_by_libraries(func):
            raise reading(lines_now())
        if func in _OF_MEMORY and is_asked_by_users():
            raise OnlyEager("it asks where a tensor lies in memory, as x.storage_offset() does")
        if func == _SET_DATA and not is_fake(args[0]):
            raise OnlyEager("it sets .data of a tensor anew (change it in place under torch.no_grad(), p.sub_(...))")
        if func in _OF_GRAD and not is_fake(args[0]):
            self.grads.setdefault(id(args[0]), (args[0], args[0].grad, args[0].requires_grad))
        if func in SIZES and args and is_hidden(args[0]) and not is_called_by_libraries(func):
            raise OnlyEager("it uses the number of per-sample gradients from before the call (clear them)")
        if func in _MAKES and args and any(map(has_values, tree_leaves(args[0]))) and not has_values(args[0]):
            raise OnlyEager(_number_of_tensor())
        if func in _CTC and any(isinstance(x, FakeTensor) for x in _lengths(*args, **(kwargs or {}))):
            raise OnlyEager(f"torch reads the lengths for the CTC loss in {text_of(line_of_user())}")
        if func is torch._is_all_true and is_traced() and is_fake(args[0]):  # how torch.distributions look at values
            holds = args[0]
            while is_batched(holds):
                holds = of_all(holds)
            assume(holds.all(), "call after call a distribution is given values that it does not allow")
            return True
        counts = func is Tensor.__len__ and args[0].dim() and isinstance(args[0].shape[0], torch.SymInt)
        if counts and not is_called_by_libraries(func):
            self.len_lines.append(text_of(line_of_user()))
        return func(*args, **(kwargs or {}))

    def _assumed_number(self, func: Any, tensor: Tensor) -> Any:
        """What is read of a tensor whose values the trace knows, as of a flag in a buffer: the graph is for this value.

        `None` if the trace does not know it; for numbers that are others at each call: of what is trained, and of what
        the step changes itself; and where torch makes a symbol of the number, so that the graph is for any.
        """
        is_symbol = func is Tensor.item and isinstance(tensor, FakeTensor) and tensor.is_floating_point()
        known = known_values(tensor) if is_traced() and not is_symbol else None
        if known is None or known[0].numel() != 1:
            return None
        values, sources = known
        with no_dispatch():
            number = func(values)
        if not isinstance(number, bool) and any(x.requires_grad or self.ops.has_changed(x) for x in sources):
            return None
        holds = tensor.ne(0).eq(number) if isinstance(number, bool) else tensor.eq(number)
        assume(
            holds.all(),
            f"call after call a tensor that is read in {text_of(line_of_user())} has another value (compute with the "
            "tensor in place of its value)",
        )
        return number

    def put_back(self, leaves: Sequence[Tensor], departed: Collection[int]) -> list[Tensor]:
        """Puts back what the trace has changed of tensors with values: `.grad`, `requires_grad`, and hooks.

        Args:
            leaves: Those that the trace itself puts back.
            departed: The ids of those that have left a model.

        Returns:
            The other ones at whose gradients the step has looked. At those that have departed the library itself looks,
            so that they count only if the step has changed something.
        """
        for leaf in leaves:
            self.grads.pop(id(leaf), None)
        others = [
            tensor
            for key, (tensor, grad, was_trainable) in self.grads.items()
            if key not in departed or tensor.grad is not grad or tensor.requires_grad != was_trainable
        ]
        for tensor, grad, was_trainable in self.grads.values():
            tensor.grad = None if isinstance(grad, FakeTensor) else grad
            tensor.requires_grad_(was_trainable)
        for tensor, before in self.hooked.values():
            remove_new_hooks(tensor, before)
        self.grads.clear()
        self.hooked.clear()
        return others


def _lengths(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any) -> Any:
    """The lengths among the arguments of the CTC loss."""
    return input_lengths, target_lengths


class Generator:
    """Torch's generator of random numbers in a trace: its state may be read, but not set."""

    def __init__(self) -> None:
        self._generator, self._thread = torch.default_generator, get_ident()

    def __getattr__(self, name: str) -> Any:
        reads = name in ("get_state", "initial_seed") and get_ident() == self._thread
        if reads and not is_called_by_libraries(getattr(torch, {"get_state": "get_rng_state"}.get(name, name))):
            raise OnlyEager("it reads the state of torch's random numbers")
        if name not in ("set_state", "manual_seed", "seed") or get_ident() != self._thread:
            return getattr(self._generator, name)
        if name != "set_state":
            raise OnlyEager("it sets the seed of torch's random numbers")
        if running_backward() < 0:
            raise OnlyEager("it sets the state of torch's random numbers, as torch.random.fork_rng does")
        return lambda state: None  # for a checkpoint, within whose backward no numbers may be drawn anyway


def refuse_optimizer(thread: int, optimizer: Any, *_: Any) -> None:
    """Raises for the step of an optimizer in this thread."""
    if get_ident() != thread:  # hooks of all optimizers are called in all threads
        return
    raise complaint(
        "enn.compile",
        f"the step calls {type(optimizer).__name__}.step()",
        "a step that ends with its gradients, as the graph would keep the learning rate of the first call",
        "Call the optimizer after the compiled step.",
    )


def texts(readings: Readings) -> list[AbstractContextManager[None]]:
    """Contexts in which a size that is a symbol is shown as its number."""
    return [_text(cls, number, readings) for cls, number in _SYMBOLS.items()]


def _text(cls: type, number: Callable[[Any], Any], readings: Readings) -> AbstractContextManager[None]:
    """Shows symbols of a class as numbers, where the user's code makes text of them."""
    of_symbol = cast(Any, cls).__repr__

    def text(symbol: Any, spec: str = "") -> str:
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            return str(of_symbol(symbol))
        readings.len_lines.append(text_of(line_of_user()))
        return format(number(symbol), spec)

    return meanwhile(cls, __repr__=text, __format__=text)


def einsum_paths() -> AbstractContextManager[Any]:
    """Lets `torch.einsum` of three tensors and more choose its order by the sizes of the trace, which stay symbols."""
    paths: Any = torch.backends.opt_einsum.get_opt_einsum()
    if paths is None:
        return nullcontext()

    def contract_path(equation: str, *operands: Tensor, **options: Any) -> Any:
        shapes = (tuple(map(cost.usual_size, operand.shape)) for operand in operands)
        return paths.contract_path(equation, *shapes, shapes=True, **options)

    by_hints = SimpleNamespace(contract_path=contract_path)
    return meanwhile(torch.backends.opt_einsum, get_opt_einsum=lambda: by_hints)


def reads_values(error: Exception) -> bool:
    """Whether an error is that of code that reads a value of a tensor that has none."""
    names = {cls.__name__ for cls in type(error).__mro__}
    value_errors = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
    texts = ("data is not allocated yet", "trying to get value", "passed to Sym")
    return bool(names & value_errors) or any(text in str(error) for text in texts)


def is_of_package(line: tuple[str, int]) -> bool:
    """Whether a line is in an installed package, which the user does not write anew."""
    return line[0].startswith(NOT_THE_USERS)


def reading(lines: Iterable[tuple[str, int]]) -> Exception:
    """The error of a step that reads values of tensors, by its lines, the innermost first.

    Where code of a package or of torch reads them, which the user does not write anew, it is a reason to run eagerly.
    """
    lines = [*lines]
    line = innermost(lines)
    if is_of_package(line):
        return OnlyEager(f"a package reads a value of a tensor in {text_of(line)}")
    called = lines[max(0, lines.index(line) - 1)][0] if line in lines else ""  # by that line
    if called.startswith(_TORCH) and not called.endswith(_OPERATIONS):
        return OnlyEager(f"torch's own code reads a value of a tensor, called in {text_of(line)}")
    return complaint(
        "enn.compile",
        f"the step reads a value of a tensor in {text_of(line)}",
        "a step that does the same operations whatever the values are",
        "Use torch.where in place of an if or of an index by a mask, give sizes that torch would read, as in "
        "F.one_hot(y, 10), return the tensor and look at it after the step, or call the step without enn.compile.",
    )
