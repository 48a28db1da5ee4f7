"""Keys for what a graph depends on: the arguments but for the sizes of tensors, the models, torch's global state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._modes import is_autocast
from expanded_nn.recording.isolation import Grads, look_at_grads
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.watch import Watch

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
OF_EVERY_MODULE = {*vars(nn.Module()), "_recorder", "_settings"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def of_arguments(value: Any, tensors: dict[int, Tensor]) -> Hashable:
    """A key for a call's arguments but for the sizes and values of tensors; adds the tensors to `tensors`, by id."""
    if isinstance(value, Tensor):
        number = list(tensors).index(id(value)) if id(value) in tensors else len(tensors)
        tensors[id(value)] = value
        layout = None if value.is_contiguous() else value.stride()
        traits = (value.dtype, value.device, value.dim(), value.requires_grad, layout)
        return number, type(value), traits, value.requires_grad and value.grad is not None
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if isinstance(value, Mapping):
        return kind, tuple((key, of_arguments(item, tensors)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(of_arguments(item, tensors) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(of_arguments(getattr(value, field.name), tensors) for field in fields(value))
    return kind, _by_identity(value)


def _by_identity(value: Any) -> Hashable:
    """A key that is equal for the same object alone, and holds it, so that its id stays its own."""
    kind: Any = type(value)
    return value if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__ else Identity(value)


class Identity:
    """An object whose class says itself what it is equal to, as equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class StepValues:
    """The values that a step refers to by names: variables of enclosing functions, globals, attributes of its object.

    Numbers and strings count by their values, anything else by its identity, whatever is within it.

    Attributes:
        owners: The attributes of the step's objects.
        cells: The variables of enclosing functions.
        globals: The global namespaces, each with a name in it.
    """

    def __init__(self, step: Any) -> None:
        self.owners: list[dict[str, Any]] = []
        self.cells: list[CellType] = []
        self.globals: list[tuple[dict[str, Any], str]] = []
        while step is not None:
            self._look(step)
            inner = step.func if isinstance(step, partial) else getattr(step, "__func__", None)
            step = inner or getattr(step, "__wrapped__", None)

    def _look(self, step: Any) -> None:
        for owner in (step, getattr(step, "__self__", None)):
            if not isinstance(owner, FunctionType | partial) and hasattr(owner, "__dict__"):
                self.owners.append(vars(owner))
        if isinstance(step, FunctionType):
            self.cells += step.__closure__ or ()
            self.globals += [(step.__globals__, name) for name in _names(step.__code__)]

    def __call__(self) -> Hashable:
        """A key for their values at this moment."""
        return tuple(map(_by_value_or_identity, self.now()))

    def now(self) -> list[Any]:
        """Their values at this moment."""
        try:
            values = [cell.cell_contents for cell in self.cells]
        except ValueError:  # one is not filled yet
            values = [_content(cell) for cell in self.cells]
        values += [namespace.get(name) for namespace, name in self.globals]
        for owner in self.owners:
            values += owner.values()
        return values


def _names(code: CodeType) -> list[str]:
    """The names in a function, and in the functions within it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _by_value_or_identity(value: Any) -> Hashable:
    return (type(value), value) if type(value) in PLAIN else _by_identity(value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def of_surroundings() -> Hashable:
    """Autocast, and the dtype of new tensors."""
    devices = ("cpu", "cuda") if is_autocast() else ()
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in devices)
    return autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def of_models(modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> Hashable:
    """A key for the state of modules: their children, attributes and hooks, and which gradients and rows they hold.

    Modules and parameters count by their ids, which are their own as long as the modules are kept; buffers and tensors
    among the attributes by their shapes and dtypes; other attributes as in `StepValues`.
    """
    key: list[Any] = [(recorder.settings, recorder.rows_stand_alone) for recorder in recorders]
    add = key.append
    for module in modules:  # at each step, so it is written for speed
        attributes = vars(module)
        add(attributes["training"])
        add(id(attributes.get("_recorder")))
        key += map(id, attributes["_modules"].values())
        key += map(_of_tensor, attributes["_buffers"].values())
        for name in attributes.keys() - OF_EVERY_MODULE:
            value = attributes[name]
            add((name, _of_tensor(value) if isinstance(value, Tensor) else _by_value_or_identity(value)))
        for name in HOOKS:
            if attributes[name]:
                key += map(_by_identity, attributes[name].values())
        for parameter in attributes["_parameters"].values():
            if parameter is None:
                add(None)
                continue
            add((id(parameter), parameter.requires_grad, parameter.shape, parameter.dtype, parameter.device))
            for hook in (parameter._backward_hooks or {}).values():
                if type(hook) is not Watch:
                    add(_by_identity(hook))
            if parameter.grad is not None:
                add("clipped" if any(recorder.is_clipped(parameter) for recorder in recorders) else "grad")
            rows = getattr(parameter, "grad_sample", None)
            if rows is not None:
                add("held" if any(recorder.leaves.holds(parameter, rows) for recorder in recorders) else "set")
    return tuple(key)


def of_gradients(recorders: Sequence[Recorder]) -> Grads:
    """What a step depends on that looks at the gradients from before the call."""
    return {key: state for recorder in recorders for key, state in look_at_grads(recorder).items()}


def _of_tensor(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
