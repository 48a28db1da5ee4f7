"""What a graph depends on: the arguments but for the sizes of tensors, the models, and what torch is told around."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._modes import is_autocast
from expanded_nn.recording.recorder import Recorder

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def of_arguments(value: Any, given: dict[int, Tensor]) -> Hashable:
    """A key for all of a call's arguments, but for the sizes and the numbers of the tensors, which go to `given`."""
    if isinstance(value, Tensor):
        number = list(given).index(id(value)) if id(value) in given else len(given)
        given[id(value)] = value
        layout = None if value.is_contiguous() else value.stride()
        return number, type(value), value.dtype, value.device, value.dim(), value.requires_grad, layout
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Mapping):
        return kind, tuple((key, of_arguments(each, given)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(of_arguments(each, given) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(of_arguments(getattr(value, field.name), given) for field in fields(value))
    return kind, Same(value)


class Same:
    """Any other object, which is equal to itself alone; it is held, so that its address is not another's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class OfStep:
    """What a step finds by its names: variables of the functions around it, globals, and attributes of its object.

    A number is told by its value, anything else by its identity; what is within it is not looked at.
    """

    def __init__(self, step: Any) -> None:
        while isinstance(step, partial):
            step = step.func
        self.owner = getattr(step, "__self__", None)
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None)
        self.cells = getattr(function, "__closure__", None) or ()
        self.globals: dict[str, Any] = getattr(function, "__globals__", {})
        self.names = [name for name in code.co_names if name in self.globals] if code is not None else []

    def __call__(self) -> Hashable:
        """A key for what they are now."""
        values = [_content(cell) for cell in self.cells]
        values += [self.globals.get(name) for name in self.names]
        values += [] if self.owner is None else list(getattr(self.owner, "__dict__", {}).values())
        return tuple([value if type(value) in _PLAIN else id(value) for value in values])


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def of_surroundings() -> Hashable:
    """Autocast, and the dtype of new tensors."""
    devices = ("cpu", "cuda") if is_autocast() else ()
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in devices)
    return autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def of_models(modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> Hashable:
    """A key for modules as they are now: their parts, their numbers and flags, and what gradients and rows are held.

    The modules, parameters and buffers are told by their addresses: who keeps the key keeps the modules.
    """
    key: list[Any] = [recorder.settings for recorder in recorders]
    for module in modules:
        attributes = vars(module)
        key += [value for value in attributes.values() if type(value) in _PLAIN]
        key.append(id(attributes.get("_recorder")))
        key += [len(attributes[hooks]) for hooks in _HOOKS]
        key += map(id, attributes["_modules"].values())
        key += [each if each is None else (each.shape, each.dtype) for each in attributes["_buffers"].values()]
        for parameter in attributes["_parameters"].values():
            key.append(id(parameter))
            if parameter is not None:
                key += (parameter.requires_grad, parameter.shape, parameter.dtype, parameter.device)
                key.append(len(parameter._backward_hooks or ()))
                if parameter.grad is not None:
                    key.append("clipped" if any(each.is_clipped(parameter) for each in recorders) else "grad")
                if getattr(parameter, "grad_sample", None) is not None:
                    key.append("held")
    return tuple(key)
