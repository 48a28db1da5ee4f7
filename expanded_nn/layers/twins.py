"""The expanded twin of every module that needs one, and the modules that cannot be converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import new_class
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from expanded_nn._errors import ConversionError, is_ours
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.layers import transformers as transformers  # registers its twins
from expanded_nn.layers.general.rule import PARAMETER_LISTS, General
from expanded_nn.modules.base import Expanded, PerSampleModule, Root
from expanded_nn.modules.registry import plain_class_of, registered
from expanded_nn.modules.twin_class import twin_class
from expanded_nn.recording.watch import PARTS_OF_LAYERS

_HARMLESS = {"extra_repr", "reset_parameters", "_reset_parameters"}


def expand_modules(model: nn.Module) -> None:
    """Turns every module of `model` that needs one into its expanded twin, in place; see `raise_for` for which can."""
    for module in list(_containers(model)):
        with suppress(TypeError):  # a class that cannot be derived from: its layers begin passes of their own
            object.__setattr__(module, "__class__", twin_class(Root, type(module)))
    for module in list(_convertible(model)):
        object.__setattr__(module, "__class__", _twin_of(module))
        if isinstance(module, General):
            module.note_ranks()


def _members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the model by name, but lists of parameters, which belong to the module that holds them."""
    skipped: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in skipped:
            yield name, module
        for child in module.children():
            if isinstance(child, PARTS_OF_LAYERS):
                skipped.update(child.modules())


def _convertible(model: nn.Module) -> Iterator[nn.Module]:
    for _, module in _members(model):
        if not isinstance(module, Expanded) and (_holds_parameters(module) or _is_watched(module)):
            yield module


def _containers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules without parameters of their own whose forward may begin a pass."""
    convertible = set(_convertible(model))
    for _, module in _members(model):
        is_called = type(module).forward is not nn.Module.forward
        has_layers = any(True for _ in module.parameters())
        if is_called and has_layers and module not in convertible and not isinstance(module, PerSampleModule):
            yield module


def _holds_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, in a list too, or parametrized ones."""
    if any(parameter is not None for parameter in module._parameters.values()) or parametrize.is_parametrized(module):
        return True
    return any(True for child in _lists_of_parameters(module) for _ in child.parameters())


def _lists_of_parameters(module: nn.Module) -> Iterator[nn.Module]:
    """The lists of parameters that belong to a module, those in its lists of modules included."""
    for child in module.children():
        if isinstance(child, PARAMETER_LISTS):
            yield child
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _lists_of_parameters(child)


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has a twin that it becomes even without parameters of its own."""
    _, twin = registered(type(module)) or (None, nn.Module)
    return not isinstance(module, twin) and getattr(twin, "always_converted", False)


def _twin_of(module: nn.Module) -> type[nn.Module]:
    """The twin's class; parametrizations stay on top, where `torch.nn.utils.parametrize` looks for them."""
    module_class, kind = _own_class(module), _kind_of(module)
    twin: Any = kind if issubclass(kind, module_class) else twin_class(kind, module_class)
    return rebased(type(module), (twin,)) if parametrize.is_parametrized(module) else twin


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The user's or torch's class of a module: without its parametrizations, and not that of a `Root`."""
    module_class = parametrize.type_before_parametrizations(module)
    return plain_class_of(module_class) or module_class


def _kind_of(module: nn.Module) -> type[PerSampleModule]:
    """What the twin is beside the module's own class: the layer that is registered for it, or the general rule."""
    module_class = _own_class(module)
    found = registered(module_class)
    if found is None:
        return General
    base, kind = found
    # of containers, the children make the rows
    fits = not _overrides(module_class, base) if issubclass(kind, Expanded) else not _holds_parameters(module)
    return cast(type[PerSampleModule], kind) if fits else General


def rebased(module_class: type[nn.Module], bases: tuple[type, ...]) -> type[nn.Module]:
    """The same class with other bases."""
    namespace = {key: value for key, value in vars(module_class).items() if key not in ("__dict__", "__weakref__")}
    return new_class(module_class.__name__, bases, {}, lambda body: body.update(namespace))


def _overrides(module_class: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a user's subclass changes what `base` computes, and not only how it is made or printed."""
    user_classes = module_class.__mro__[: module_class.__mro__.index(base)]
    return any(
        callable(getattr(base, name, None)) and (name == "__call__" or not (name in _HARMLESS or name.startswith("__")))
        for user_class in user_classes
        for name in vars(user_class)
    )


_REFUSED: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.SyncBatchNorm, "it mixes samples across processes", "use GroupNorm instead"),
    (nn.DataParallel, "it splits the batch over replicas", "convert its .module, and use DistributedDataParallel"),
    (nn.parallel.DistributedDataParallel, "it is a wrapper around a model", "convert the model first, then wrap it"),
)


def raise_for(model: nn.Module) -> None:
    """Raises one error that lists all modules that cannot be converted."""
    problems = {module: problem for _, module in _members(model) if (problem := _problem(module)) is not None}
    if not problems:
        kinds = dict.fromkeys(_containers(model), Root) | {layer: _kind_of(layer) for layer in _convertible(model)}
        problems = {module: clash for module, kind in kinds.items() if (clash := _clash(module, kind)) is not None}
    if problems:
        lines = [
            f"  {name or 'the model itself'} ({type(module).__name__}): {'; '.join(problems[module])}."
            for name, module in _members(model)
            if module in problems
        ]
        raise ConversionError("These modules cannot be converted:\n" + "\n".join(lines))


def _problem(module: nn.Module) -> tuple[str, str] | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript code cannot be changed", "convert the Python module, and do not script it"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its parameters have no shape yet", "run the model once, then convert it"
    return next(((reason, remedy) for refused, reason, remedy in _REFUSED if isinstance(module, refused)), None)


def _clash(module: nn.Module, kind: type[PerSampleModule]) -> tuple[str, str] | None:
    """A name that both the user's class and its twin have given a meaning: one of the two would be lost."""
    module_class = _own_class(module)
    base, _ = registered(module_class) or (nn.Module, None)
    user_classes = module_class.__mro__[: module_class.__mro__.index(base)]
    own = set(OWN_STATE) if isinstance(module, PerSampleModule) else set()
    user_names = {*vars(module), *module._parameters, *module._modules, *module._buffers} - own
    user_names.update(name for user_class in user_classes for name in vars(user_class))
    library_classes = [base for base in kind.__mro__ if is_ours(base)]
    library_names = {name for library_class in library_classes for name in vars(library_class)}
    clashes = sorted(name for name in user_names & (library_names - set(dir(base))) if not name.startswith("__"))
    if not clashes:
        return None
    return f"it has a {clashes[0]!r} of its own, a name that converted modules use themselves", "rename it"
