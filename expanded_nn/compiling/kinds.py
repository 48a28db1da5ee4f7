"""Keys for what a graph depends on: the arguments (without sizes of tensors), the models, torch's global state."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.optim import Optimizer
from torch.utils._device import DeviceContext

from expanded_nn._errors import is_ours
from expanded_nn.common.batch import contents, is_shared_by_all
from expanded_nn.common.containers import has_dict
from expanded_nn.common.modes import function_modes, is_autocast, saved_tensors_are_packed
from expanded_nn.common.outside import HOOKS_OF_TENSOR
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.common.traced import HasGraphs, OnlyEager
from expanded_nn.compiling.looks import (
    Look,
    StepValues,
    by_identity,
    is_number,
    key_of_plain,
    layout_of,
    note_own_rows,
    of_tensor,
    own_attributes,
)
from expanded_nn.compiling.names import HOOKS, PLAIN, Names, Referred, is_the_users, set_by_users
from expanded_nn.compiling.packing import WITH_COUNT, attributes_beside_items, has_items, items_of
from expanded_nn.compiling.seen import Seen, in_a_tuple
from expanded_nn.factored import FactoredTensor
from expanded_nn.projection import Projection
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.watch import Watch

_PYTHONS = {tuple, list, dict}
_MEMBERS = "_parameters", "_buffers", "_modules"
_DICTS = *_MEMBERS, *HOOKS
_TRAITS = attrgetter("dtype", "device", "ndim")
_HOOKS_OF_PARAMETER = attrgetter(*HOOKS_OF_TENSOR)
_FORWARD = in_a_tuple(attrgetter, "forward")
_GRAD_AND_HOOKS = attrgetter("grad", *HOOKS_OF_TENSOR)
_OF_RECORDER = attrgetter("settings", "store.suspended")
GLOBAL_HOOKS: list[MutableMapping[int, Any]] = [
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
]


class Call:
    """The arguments of a call.

    Attributes:
        arguments: The positional ones, and those by names.
        tensors: The tensors among them, each once; and the counts of factors, as they change from call to call.
        by_id: These, by the ids of the tensors and of the factors.
        objects: Those of other classes, which are looked into; and the user's classes of containers.
        containers: The lists, dicts and dataclasses among them, by their ids, each with how many came before it.
        key: A key for the arguments, without the sizes and values of tensors.
        shapes: The shapes of the tensors.

    Raises:
        OnlyEager: If tensors are within an object of a class that is not known, and may be others at the next call.
    """

    __slots__ = "_names", "arguments", "by_id", "containers", "key", "objects", "shapes", "tensors"

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_values: StepValues) -> None:
        self.arguments = args, kwargs
        self._names = step_values.referred.names
        args, kwargs = step_values.arguments.read(args, kwargs)
        self.by_id: dict[int, Tensor] = {}
        self.objects: list[Any] = []
        self.containers: dict[int, int] = {}
        self.key: Hashable = (
            tuple([self._of(value) for value in args]),
            tuple([(name, self._of(value)) for name, value in kwargs.items()]) if kwargs else None,
        )
        self.tensors = [*self.by_id.values()]
        self.shapes = tuple([tensor.shape for tensor in self.tensors])

    def _of(self, value: Any) -> Hashable:
        """A key for an argument, or for what is in one; notes what there is.

        The count of factors is noted as a tensor, by the id of the factors.
        """
        cls = type(value)
        if isinstance(value, Tensor):
            return _of_argument(value, self.by_id)
        if cls in PLAIN or is_number(value):
            return key_of_plain(value)
        if cls in WITH_COUNT and type(value.count) is int:
            number = self._number(value)
            self.by_id[id(value)] = torch.tensor(value.count)
            return cls, number, tuple([self._of(item) for item in value[:-1]])
        if cls not in _PYTHONS and is_the_users(cls):  # which may have attributes that count
            self.objects.append(cls)
            if isinstance(value, tuple | list) and has_dict(value) and vars(value):
                raise OnlyEager(
                    f"an argument is a {cls.__name__} with attributes of its own (give these as arguments, too, or in "
                    "a dataclass)"
                )
        if isinstance(value, tuple):
            return cls, tuple([self._of(item) for item in value])
        if isinstance(value, list):
            return cls, self._number(value), tuple([self._of(item) for item in value])
        if isinstance(value, dict) or has_items(value):
            number, of_both = self._number(value), (items_of(value), attributes_beside_items(value))
            items = [tuple([(_key_of(key), self._of(held)) for key, held in of.items()]) for of in of_both]
            return cls, number, tuple(items)
        if any(isinstance(part, Tensor) for part in self._parts(value)):
            raise OnlyEager(
                f"an argument is a {cls.__name__} that holds tensors (give these, in tuples, lists, dicts or "
                "dataclasses)"
            )
        self.objects.append(value)
        return cls, by_identity(value)

    def _parts(self, value: Any) -> Iterable[Any]:
        """What is in an object, as far as the step names its attributes; an optimizer's tensors are its models'.

        What the library has set on a module, as a recorder that holds rows, is none of the step's.
        """
        if isinstance(value, Optimizer | HasGraphs | Projection):
            return ()
        held: Any = value
        if has_dict(value) and not isinstance(value, list | tuple | dict):
            names = [name for name in [*vars(value)] if name not in OWN_STATE]
            named = [name for name in names if self._names.any_attribute or name in self._names.words]
            held = [vars(value)[name] for name in named]
        return contents(held, closed=(Optimizer, HasGraphs))

    def _number(self, container: Any) -> int:
        return self.containers.setdefault(id(container), len(self.containers))


def _key_of(key: Any) -> Hashable:
    """A key for that of a dict; `1` and `True` are equal there, and of tensors it is not known."""
    if type(key) is str:
        return key
    return by_identity(key) if isinstance(key, Tensor) else (type(key), key)


def _of_argument(tensor: Tensor, tensors: dict[int, Tensor]) -> Hashable:
    if type(tensor) is not Tensor or vars(tensor):
        _refuse_special(tensor)
    if tensor.is_nested or tensor.is_quantized:
        raise OnlyEager("an argument is a nested or a quantized tensor")
    if tensor.is_neg():
        raise OnlyEager("the numbers of an argument are negated when they are read (give it x.resolve_neg())")
    of_grad, requires_grad = None, tensor.requires_grad
    if requires_grad:
        if not tensor.is_leaf:
            raise OnlyEager(
                "an argument was computed from what requires gradients, which no graph reaches (compute it in the "
                "step, or give it detached)"
            )
        if any(_HOOKS_OF_PARAMETER(tensor)):
            raise OnlyEager("an argument has hooks, which a graph does not call (register them in the step)")
        of_grad = None if tensor.grad is None else (layout_of(tensor.grad),)
    key = id(tensor)
    number = [*tensors].index(key) if key in tensors else len(tensors)
    tensors[key] = tensor
    return number, type(tensor), _TRAITS(tensor), requires_grad, layout_of(tensor), of_grad


def _refuse_special(tensor: Tensor) -> None:
    if isinstance(tensor, FactoredTensor):
        raise OnlyEager(
            "per-sample gradients are among its arguments (let it refer to them by a name, or give them dense, as "
            "per_sample_grads(model).flatten() does)"
        )
    if is_shared_by_all(tensor):
        raise OnlyEager("an argument is shared_by_all (say so in the step: model(x, shared_by_all(texts)))")
    if own_attributes(tensor):
        names = ", ".join(sorted(own_attributes(tensor)))
        raise OnlyEager(f"an argument is a tensor with attributes of its own, {names} (give these as arguments, too)")


def of_surroundings() -> Hashable:
    """Autocast, the dtype and device of new tensors, and the hooks of all modules.

    Raises:
        OnlyEager: If a mode of torch's, or hooks on saved tensors, see or change operations, which a graph runs alone.
    """
    default_devices: list[torch.device] = []  # as this runs at each step, it asks in detail only where something is set
    modes = function_modes() if torch._C._len_torch_function_stack() else ()
    if modes:
        default_devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    if len(default_devices) < len(modes) or torch._C._len_torch_dispatch_stack() or saved_tensors_are_packed():
        raise OnlyEager("it is called within a mode of torch's, or within hooks on saved tensors")
    if torch.is_anomaly_enabled():
        raise OnlyEager("torch.autograd.set_detect_anomaly is on, which looks at the values of all gradients")
    autocast: tuple[Hashable, ...] = ()
    hooks: tuple[Hashable, ...] = ()
    if is_autocast():
        enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in enabled)
    if any(GLOBAL_HOOKS):
        of_all = [hook for registry in GLOBAL_HOOKS for hook in [*registry.values()]]
        # ours are there while another thread traces a step
        hooks = tuple(by_identity(hook) for hook in of_all if not is_ours(getattr(hook, "func", hook)))
    return autocast, (*default_devices,), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), hooks


def of_models(
    modules: Sequence[nn.Module],
    others: Sequence[nn.Module],
    leaves: Sequence[Tensor],
    recorders: Sequence[Recorder],
    referred: Referred,
    look: Look,
) -> Hashable:
    """A key for the state of modules: their children, attributes and hooks, and which gradients and rows they hold.

    Modules and parameters count by their ids, as the modules are kept; buffers and tensors among the attributes by
    their shapes and dtypes, and by which of them are one tensor. Other attributes are looked into as in `StepValues`,
    by the names in the methods of the module and in the functions of the step. What is looked at is noted in `look`.
    The step does not call `others`: their gradients and rows do not count, but for the `leaves` whose gradients it
    reads or sets. Recorders count by their number: `per_sample` makes another one, to which a graph may give its rows.
    """
    if any(isinstance(module, ScriptModule) for module in modules):
        raise OnlyEager("it calls a module of TorchScript (call that before the step, and give it what it returns)")
    others, seen = [module for module in others if not isinstance(module, ScriptModule)], look.seen
    key: list[Any] = [(recorder.settings, recorder.rows_stand_alone) for recorder in recorders]
    numbers: dict[Any, int] = {recorder: number for number, recorder in enumerate(recorders)}
    add = key.append
    for recorder in recorders:
        seen.note_places(_OF_RECORDER, recorder)
    looked_into: set[tuple[int, type]] = set()
    all_modules = [*modules, *others]
    names_of, names = referred.names_of(dict.fromkeys(map(type, all_modules))), referred.names
    for kind in names_of:
        plain_class: Any = getattr(kind, "plain_class", None) or kind
        seen.note_places(_FORWARD, plain_class)
        add(by_identity(plain_class.forward))
    for module in all_modules:
        attributes = vars(module)
        own_names = set_by_users(module)
        seen.note_attributes(module)
        for members in map(attributes.__getitem__, _DICTS):
            if isinstance(members, dict):
                seen.note_dict(members)
            else:  # of a class of the user's
                seen.note_fact(object)
        add((type(module), attributes["training"]))
        for members in map(attributes.__getitem__, _MEMBERS):
            if isinstance(members, dict):
                add(tuple(members))
        recorder_of_rows = attributes.get("_recorder")
        add(numbers.get(recorder_of_rows, id(recorder_of_rows)))
        key += map(id, attributes["_modules"].values())
        key += [id(attributes), id(attributes["_buffers"]), id(attributes["_parameters"])]  # where graphs find tensors
        key += [None if x is None else _of_kept(x, names, seen) for x in attributes["_buffers"].values()]
        for name in own_names:
            value = attributes[name]
            if isinstance(value, Tensor):
                add((name, _of_kept(value, names, seen)))
            elif type(value) in PLAIN:
                add((name, key_of_plain(value)))
                look.items[id(module), name] = module, key[-1]
            else:  # a configuration that many modules have
                by_class = id(value), type(module)
                add(name)
                add(id(value) if by_class in looked_into else Look([value], names_of[by_class[1]], seen).checked())
                looked_into.add(by_class)
        for name in HOOKS:
            if attributes[name]:
                key += map(by_identity, attributes[name].values())
        for parameter in attributes["_parameters"].values():
            add(None if parameter is None else id(parameter))
    of_modules = (parameter for module in modules for parameter in module._parameters.values())
    parameters = {id(parameter): parameter for parameter in (*of_modules, *leaves) if parameter is not None}
    of_others = [parameter for module in others for parameter in module._parameters.values() if parameter is not None]
    key += [_of_parameter(parameter, names, seen) for parameter in of_others]
    for parameter in of_others:
        note_own_rows(parameter, seen)
    key += [_of_parameter(parameter, names, seen) for parameter in parameters.values()]

    def gradients() -> list[Hashable]:
        return [_of_gradient(parameter, recorders) for parameter in parameters.values()]

    add(seen.sharing())
    states = gradients()
    are_there = any(states)
    if are_there:
        seen.note_fact(gradients)
    for parameter in parameters.values():  # that there are none is seen at less cost
        seen.note_places(_HOOKS_OF_PARAMETER if are_there else _GRAD_AND_HOOKS, parameter)
        seen.note_items(vars(parameter) if are_there else vars(parameter).values())
    return *key, *states


def _of_parameter(parameter: Tensor, names: Names, seen: Seen) -> Hashable:
    """A key for a parameter, its hooks and attributes, without its gradient and rows."""
    hooks: list[Any] = []
    for registry in _HOOKS_OF_PARAMETER(parameter):
        if registry is None:
            continue
        seen.note_items(dict.values(registry))  # which may be empty, as a hook was removed
        hooks += [by_identity(hook) for hook in registry.values() if type(hook) is not Watch]
    return _of_own_attributes(parameter, names, seen), of_tensor(parameter, seen), tuple(hooks)


def _of_kept(tensor: Tensor, names: Names, seen: Seen) -> Hashable:
    """A key for a buffer, or another tensor that is an attribute of a module, and its own attributes."""
    if isinstance(tensor, FactoredTensor):
        return of_tensor(tensor, seen)
    seen.sized.append(vars(tensor))
    return _of_own_attributes(tensor, names, seen), of_tensor(tensor, seen)


def _of_own_attributes(tensor: Tensor, names: Names, seen: Seen) -> Hashable:
    """A key for what the user has set as attributes of a tensor."""
    own = own_attributes(tensor)
    if own:
        seen.note_places(in_a_tuple(itemgetter, *own), vars(tensor))
    return tuple(
        (name, of_tensor(value, seen) if isinstance(value, Tensor) else Look([value], names, seen).checked())
        for name, value in own.items()
    )


def _of_gradient(parameter: Tensor, recorders: Sequence[Recorder]) -> Hashable:
    """How a parameter's gradient lies in memory, if there is one, whether there are rows, and who has set them."""
    grad, rows = parameter.grad, getattr(parameter, "grad_sample", None)
    if grad is None and rows is None:
        return None
    is_clipped = are_held = False
    for recorder in recorders:
        is_clipped = is_clipped or (grad is not None and recorder.is_clipped(parameter))
        are_held = are_held or (rows is not None and recorder.leaves.holds(parameter, rows))
    return grad is None or layout_of(grad), is_clipped, rows is None, are_held
