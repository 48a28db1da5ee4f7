"""From `torch.nn` modules to expanded ones and back, in place or as a copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import new_class
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from expanded_nn._errors import ConversionError
from expanded_nn._module import Expanded, PerSampleModule, Root, twin_class
from expanded_nn._registry import EXPANDED, registered_base
from expanded_nn.layers.general import PARAMETER_LISTS, General

Model = TypeVar("Model", bound=nn.Module)

_HARMLESS = {"extra_repr", "reset_parameters", "_reset_parameters"}
_BELONGS_TO_PARENT = (*PARAMETER_LISTS, parametrize.ParametrizationList)


def convert(model: Model, *, inplace: bool = False) -> Model:
    """Turns every layer with parameters into its expanded twin; the model's classes stay what they are.

    The twin of a class is a subclass of it: `isinstance` against the `torch.nn` class and against the user's own
    class holds. Parameters, buffers, tied weights, flags, hooks and `state_dict` keys are those of `model`.

    Args:
        model: Any module. A module with parameters of its own that no twin is registered for is served by the
            general rule, a `vmap` of its forward.
        inplace: Whether to change `model` itself, with the same `Parameter` objects, so that an existing optimizer
            goes on working; a deep copy is converted otherwise.

    Returns:
        The converted model, per-sample mode off.

    Raises:
        ConversionError: If modules cannot be converted; it lists all of them, each with class, reason and remedy.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample(True)
        >>> model(torch.randn(5, 3)).mean(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([5, 2, 3])
    """
    _raise_for(model)
    if not inplace:
        model = _copied(model)
    for module in list(_convertible(model)):
        module.__class__ = _expanded_class(module)
        if isinstance(module, General):
            module.note_ranks()
    if not isinstance(model, PerSampleModule):
        model.__class__ = twin_class(Root, type(model))  # type: ignore[assignment]
    return model


def revert(model: Model, *, inplace: bool = False) -> Model:
    """Turns expanded layers back into the plain classes they came from, with the same weights.

    Args:
        model: A converted model, or a module of expanded layers.
        inplace: Whether to change `model` itself; a deep copy is reverted otherwise.

    Returns:
        The plain model.
    """
    if not inplace:
        model = _copied(model)
    for module in list(model.modules()):
        if isinstance(module, PerSampleModule):
            if module._recorder is not None:
                module._recorder.close()
            for attribute in ("_recorder", "_ranks"):
                module.__dict__.pop(attribute, None)
            module.__class__ = _plain_class(type(module))  # type: ignore[assignment]
    for parameter in model.parameters():
        parameter.__dict__.pop("grad_sample", None)
    return model


def per_sample(model: Model, mode: bool = True, **settings: Any) -> Model:
    """Switches per-sample gradients on or off for a module of the user's own that holds expanded layers.

    What is not yet converted in it is converted in place, as `convert(model, inplace=True)` does.

    Args:
        model: Any module.
        mode: Whether to switch on.
        settings: As for the method: `loss_reduction`, `batch_first`, `batch_size`, `materialize`,
            `accumulate_grad`.

    Returns:
        The module itself.
    """
    if mode or not isinstance(model, PerSampleModule):
        convert(model, inplace=True)
    return model.per_sample(mode, **settings)  # type: ignore[operator,no-any-return]


def _copied(model: Model) -> Model:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({error}). Convert it in place: convert(model, inplace=True)."
        ) from error


def _members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that stand for themselves, by name: lists of parameters belong to the module that holds them."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside:
            yield name, module
        for child in module.children():
            if isinstance(child, _BELONGS_TO_PARENT):
                inside.update(child.modules())


def _convertible(model: nn.Module) -> Iterator[nn.Module]:
    for _, module in _members(model):
        if not isinstance(module, Expanded) and (_holds_parameters(module) or _is_watched(type(module))):
            yield module


def _holds_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters itself, or in a list of them, or will have them."""
    if any(parameter is not None for parameter in module._parameters.values()) or parametrize.is_parametrized(module):
        return True
    lists = [child for child in module.children() if isinstance(child, PARAMETER_LISTS)]
    return any(True for child in lists for _ in child.parameters())


def _is_watched(module_class: type[nn.Module]) -> bool:
    base = registered_base(module_class)
    return base is not None and getattr(EXPANDED[base], "watches", False)


def _expanded_class(module: nn.Module) -> type[nn.Module]:
    """The twin's class; parametrizations stay on top, where `torch.nn.utils.parametrize` looks for them."""
    module_class = parametrize.type_before_parametrizations(module)
    twin = _twin_of(module_class)
    return twin if module_class is type(module) else _rebased(type(module), (twin,))


def _rebased(module_class: type[nn.Module], bases: tuple[type, ...]) -> type[nn.Module]:
    """The same class on other bases."""
    namespace = {key: value for key, value in vars(module_class).items() if key not in ("__dict__", "__weakref__")}
    return new_class(module_class.__name__, bases, {}, lambda made: made.update(namespace))


def _twin_of(module_class: type[nn.Module]) -> type[nn.Module]:
    if module_class in EXPANDED:
        return EXPANDED[module_class]
    base = registered_base(module_class)
    if base is None or _overrides(module_class, base):
        return twin_class(General, module_class)
    return twin_class(EXPANDED[base], module_class)  # type: ignore[arg-type]


def _overrides(module_class: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a user's subclass changes what `base` does, and not only how it is made or shown."""
    own = module_class.__mro__[: module_class.__mro__.index(base)]
    return any(
        callable(getattr(base, name, None)) and (name == "__call__" or not (name in _HARMLESS or name.startswith("__")))
        for each in own
        for name in vars(each)
    )


def _plain_class(module_class: type[nn.Module]) -> type[nn.Module]:
    plain: type[nn.Module] | None = vars(module_class).get("plain_class")
    if plain is not None:
        return plain
    plain = next((torch_class for torch_class, twin in EXPANDED.items() if twin is module_class), None)
    if plain is not None:
        return plain
    # a class made on top of an expanded one, as torch.nn.utils.parametrize makes it
    bases = tuple(_plain_class(base) if issubclass(base, PerSampleModule) else base for base in module_class.__bases__)
    return _rebased(module_class, bases)


_REFUSED: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.SyncBatchNorm, "it mixes samples across processes", "use GroupNorm instead"),
    (nn.DataParallel, "it splits the batch over replicas", "convert its .module, and use DistributedDataParallel"),
    (
        nn.parallel.DistributedDataParallel,
        "it is a wrapper around a model",
        "convert the model first, then wrap it",
    ),
)


def _raise_for(model: nn.Module) -> None:
    problems = []
    for name, module in _members(model):
        problem = _problem(module)
        if problem is not None:
            reason, remedy = problem
            problems.append(f"  {name or 'the model itself'} ({type(module).__name__}): {reason}; {remedy}.")
    if problems:
        raise ConversionError("These modules cannot be converted:\n" + "\n".join(problems))


def _problem(module: nn.Module) -> tuple[str, str] | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript code cannot be changed", "convert the Python module, and do not script it"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its parameters have no shape yet", "run the model once, then convert it"
    return next(((reason, remedy) for refused, reason, remedy in _REFUSED if isinstance(module, refused)), None)
