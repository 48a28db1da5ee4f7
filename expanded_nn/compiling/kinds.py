"""Keys for what a graph depends on: the arguments but for the sizes of tensors, the models, torch's global state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import shown
from expanded_nn.common.batch import contents
from expanded_nn.common.modes import is_autocast
from expanded_nn.common.steady import OWN_STATE
from expanded_nn.common.traced import OnlyEager
from expanded_nn.compiling.looks import PLAIN, Look, by_identity, is_number
from expanded_nn.compiling.names import HOOKS, Names, names_in_class
from expanded_nn.factored import FactoredTensor
from expanded_nn.recording.isolation import Grads, look_at_grads
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.watch import Watch

NOT_THE_USERS = {*vars(nn.Module()), *OWN_STATE}  # the names of attributes of a module
_GLOBAL_HOOKS: list[Mapping[int, Any]] = [
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
]


def of_arguments(value: Any, tensors: dict[int, Tensor], objects: list[Any]) -> Hashable:
    """A key for a call's arguments but for the sizes and values of tensors.

    Args:
        value: The arguments.
        tensors: To which the tensors are added, by their ids.
        objects: To which objects of other classes are added.

    Raises:
        OnlyEager: If tensors are within an object of a class that is not known, and may be others at the next call.
    """
    if isinstance(value, FactoredTensor):
        raise OnlyEager(
            "per-sample gradients are among its arguments (let it refer to them by a name, or give them dense, as "
            "per_sample_grads(model).flatten() does)"
        )
    if isinstance(value, Tensor):
        number = list(tensors).index(id(value)) if id(value) in tensors else len(tensors)
        tensors[id(value)] = value
        if value.__dict__ and own_attributes(value):
            names = shown(sorted(own_attributes(value)))
            raise OnlyEager(
                f"an argument is a tensor with attributes of its own, {names} (give these as arguments, too)"
            )
        layout: Hashable = value.layout
        if layout is torch.strided:
            layout = None if value.is_contiguous() else value.stride()
        traits = (value.dtype, value.device, value.dim(), value.requires_grad, layout)
        return number, type(value), traits, value.requires_grad and value.grad is not None
    cls = type(value)
    if cls in PLAIN or is_number(value):
        return cls, value
    if isinstance(value, Mapping):
        return cls, tuple((key, of_arguments(item, tensors, objects)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return cls, tuple(of_arguments(item, tensors, objects) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return cls, tuple(of_arguments(getattr(value, field.name), tensors, objects) for field in fields(value))
    if any(isinstance(part, Tensor) for part in contents(value)):
        raise OnlyEager(
            f"an argument is a {cls.__name__} that holds tensors (give these, in tuples, lists, dicts or dataclasses)"
        )
    objects.append(value)
    return cls, by_identity(value)


def of_surroundings() -> Hashable:
    """Autocast, the dtype of new tensors, and the hooks of all modules."""
    devices = ("cpu", "cuda") if is_autocast() else ()
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in devices)
    hooks = tuple(by_identity(hook) for registry in _GLOBAL_HOOKS for hook in registry.values())
    return autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), hooks


def of_models(modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> Hashable:
    """A key for the state of modules: their children, attributes and hooks, and which gradients and rows they hold.

    Modules and parameters count by their ids, which no other object has as long as the modules are kept; buffers and
    tensors among the attributes by their shapes and dtypes; other attributes as in `StepValues`, by the names in the
    methods.
    """
    key: list[Any] = [(recorder.settings, recorder.rows_stand_alone) for recorder in recorders]
    add = key.append
    looked_into: set[tuple[int, int]] = set()
    for module in modules:  # at each step, so it is written for speed
        attributes = vars(module)
        add(attributes["training"])
        add(id(attributes.get("_recorder")))
        key += map(id, attributes["_modules"].values())
        key += map(_of_tensor, attributes["_buffers"].values())
        attribute_names = attributes.keys() - NOT_THE_USERS
        names = names_in_class(cast(Any, type(module))) if attribute_names else Names()
        for name in attribute_names:
            value = attributes[name]
            if isinstance(value, Tensor):
                add((name, _of_tensor(value)))
            elif type(value) in PLAIN:
                add((name, type(value), value))
            else:  # a configuration that many modules have
                look = id(value), id(names)
                add((name, id(value)) if look in looked_into else (name, Look([value], names).key))
                looked_into.add(look)
        for name in HOOKS:
            if attributes[name]:
                key += map(by_identity, attributes[name].values())
        for parameter in attributes["_parameters"].values():
            if parameter is None:
                add(None)
                continue
            add((id(parameter), parameter.requires_grad, parameter.shape, parameter.dtype, parameter.device))
            if not parameter.is_contiguous():
                add(parameter.stride())
            for hook in (parameter._backward_hooks or {}).values():
                if type(hook) is not Watch:
                    add(by_identity(hook))
            if parameter._post_accumulate_grad_hooks:
                key += map(by_identity, parameter._post_accumulate_grad_hooks.values())
            add(of_gradient(parameter, recorders))
            if len(parameter.__dict__) > 1:
                add(_of_attributes(own_attributes(parameter)))
    return tuple(key)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """What the user has set as attributes of a tensor."""
    return {name: value for name, value in vars(tensor).items() if name != "grad_sample"}


def _of_attributes(attributes: Mapping[str, Any]) -> Hashable:
    items = attributes.items()
    return tuple((name, _of_tensor(v) if isinstance(v, Tensor) else Look([v], Names()).key) for name, v in items)


def of_gradient(parameter: nn.Parameter, recorders: Sequence[Recorder]) -> Hashable:
    """Whether a parameter has a gradient and rows, and who has set them; `None` if it has neither."""
    grad, rows = parameter.grad, getattr(parameter, "grad_sample", None)
    if grad is None and rows is None:
        return None
    is_clipped = are_held = False
    for recorder in recorders:  # at each step, so it is written for speed
        is_clipped = is_clipped or (grad is not None and recorder.is_clipped(parameter))
        are_held = are_held or (rows is not None and recorder.leaves.holds(parameter, rows))
    return grad is None, is_clipped, rows is None, are_held


def of_gradients(recorders: Sequence[Recorder]) -> Grads:
    """What a step depends on that looks at the gradients from before the call."""
    return {key: state for recorder in recorders for key, state in look_at_grads(recorder).items()}


def _of_tensor(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    strides = None if tensor.layout is not torch.strided or tensor.is_contiguous() else tensor.stride()
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides
