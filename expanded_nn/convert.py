"""From `torch.nn` modules to expanded ones and back, in place or as a copy."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from pickle import PickleError
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from expanded_nn._errors import ConversionError, refuse_no_bool, refuse_no_model
from expanded_nn.common.bytecode import variables_around
from expanded_nn.common.own_state import HOOK_TABLES, OWN_STATE
from expanded_nn.layers.twins import expand_modules, raise_for, rebased
from expanded_nn.modules.base import PerSampleModule, Root, recorders_of, refuse_other_mode, switch
from expanded_nn.modules.registry import plain_class_of
from expanded_nn.modules.twin_class import twin_class
from expanded_nn.recording.recorder import Settings

Model = TypeVar("Model", bound=nn.Module)

_OF_TORCH = {*vars(nn.Module())}  # the attributes that each module has


def convert(model: Model, *, inplace: bool = False) -> Model:
    """Turns every layer with parameters into its expanded twin; the model's classes stay what they are.

    The twin of a class is a subclass of it: `isinstance` against the `torch.nn` class and against the user's own
    class holds. Parameters, buffers, tied weights, flags, hooks and `state_dict` keys are those of `model`.

    Args:
        model: Any module. A module with parameters of its own that no twin is registered for is served by the
            general rule: it runs sample by sample, or on the whole batch where comparisons have found that right.
        inplace: Whether to change `model` itself, with the same `Parameter` objects, so that an existing optimizer
            goes on working; a deep copy is converted otherwise.

    Returns:
        The converted model, per-sample mode off.

    Raises:
        ConversionError: If modules cannot be converted; it lists all of them, each with class, reason and remedy. Or
            if the model cannot be copied, or holds functions that refer to it.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample(True)
        >>> model(torch.randn(5, 3)).mean(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([5, 2, 3])
    """
    refuse_no_model("convert", model)
    refuse_no_bool("convert", inplace=inplace)
    raise_for(model)
    if not inplace:
        model = _copied(model)
    expand_modules(model)
    switch(model, getattr(model, "_settings", Settings()), mode=False)
    for module in model.modules():
        vars(module).pop("_recorder", None)  # new in a model whose mode is on, it is not one that was switched off
    if not isinstance(model, PerSampleModule):
        object.__setattr__(model, "__class__", twin_class(Root, type(model)))
    return model


def revert(model: Model, *, inplace: bool = False) -> Model:
    """Turns expanded layers back into the plain classes they came from, with the same weights.

    Args:
        model: A converted model, or a module of expanded layers.
        inplace: Whether to change `model` itself; a deep copy is reverted otherwise.

    Returns:
        The plain model.

    Raises:
        ConversionError: If a class was derived from an expanded one, and so has no plain one.

    Example:
        >>> import torch, expanded_nn as enn
        >>> type(enn.revert(enn.convert(torch.nn.Linear(3, 2))))
        <class 'torch.nn.modules.linear.Linear'>
    """
    refuse_no_model("revert", model)
    refuse_no_bool("revert", inplace=inplace)
    if not inplace:
        model = _copied(model)
    members = list(model.modules())
    plain_classes = {module: _plain_class(module) for module in members if isinstance(module, PerSampleModule)}
    for recorder in recorders_of(members):
        recorder.close(members)
    for module, plain in plain_classes.items():
        for attribute in (*OWN_STATE, "_takes_labels"):
            module.__dict__.pop(attribute, None)
        object.__setattr__(module, "__class__", plain)
    for parameter in model.parameters():
        parameter.__dict__.pop("grad_sample", None)
    return model


def per_sample(model: Model, mode: bool = True, **settings: Any) -> Model:
    """Switches per-sample gradients on or off for a module of the user's own that holds expanded layers.

    What is not yet converted in it is converted in place, as `convert(model, inplace=True)` does.

    Args:
        model: Any module; a `DistributedDataParallel` if the model within is converted.
        mode: Whether to switch on.
        settings: Those of `model.per_sample`, by name, as its `help` explains them.

    Returns:
        The module itself.

    Raises:
        ConversionError: If it holds modules that cannot be converted.
        TypeError: If `model` is no model, or there is no such setting; and what `model.per_sample` raises.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.per_sample(torch.nn.Linear(3, 2), loss_reduction="sum")
        >>> model(torch.randn(5, 3)).sum().backward()
        >>> torch.equal(model.bias.grad_sample.sum(0), model.bias.grad)
        True
    """
    refuse_other_mode(mode)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
    if isinstance(inner, PerSampleModule):  # converted before it was wrapped
        per_sample(inner, mode, **settings)
        return model
    if mode or not isinstance(model, PerSampleModule):
        convert(model, inplace=True)
    return model.per_sample(mode, **settings)  # type: ignore[operator,no-any-return]


def _copied(model: Model) -> Model:
    _refuse_closures(model)
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, PickleError) as error:
        computed = [
            f"{name or type(model).__name__}.{attribute}"
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        ]
        reason = str(error)
        if computed:
            reason = "hooks of torch.nn.utils (weight_norm, spectral_norm, prune) or a forward have computed "
            reason += f"{', '.join(computed)}: parametrizations of torch.nn.utils can be copied; or set them to None"
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({reason}). Convert it in place: convert(model, inplace=True)."
        ) from error


def _refuse_closures(model: nn.Module) -> None:
    """Raises if a copy would compute with the weights of the original.

    `copy.deepcopy` does not copy functions: one that an attribute or a hook holds still refers to the original.
    """
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise ConversionError(
            f"{type(model).__name__} is, or holds, what torch.compile(model) returns. Convert first, and compile then: "
            "torch.compile(convert(model)); or compile the whole step, enn.compile(step)."
        )
    ids = {id(module) for module in model.modules() if any(True for _ in module.parameters())}
    ids |= {id(parameter) for parameter in model.parameters()}
    attributes = [value for module in model.modules() for name, value in vars(module).items() if name not in _OF_TORCH]
    of_hooks = ids | {id(value) for value in attributes if isinstance(value, dict | list | set)}  # where these keep it
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            found = of_hooks if attribute in HOOK_TABLES else ids
            if attribute not in ("_parameters", "_modules", "_buffers") and _refers_to(value, found):
                raise ConversionError(
                    f"{name or type(model).__name__}.{attribute} refers to this model, its weights or its lists and "
                    "dicts, by a function or a weak reference. In a copy it would go on using the original's. Convert "
                    "the model in place, convert(model, inplace=True), or make the function a method."
                )


def _refers_to(value: Any, ids: set[int], depth: int = 3) -> bool:
    """Whether functions and weak references in a value refer to objects with these ids."""
    if isinstance(value, weakref.ref):
        # references to weights do not count: a copied RNN makes its own anew
        return isinstance(value(), nn.Module) and id(value()) in ids
    if isinstance(value, dict | list | tuple | set):
        values = value.values() if isinstance(value, dict) else value
        return depth > 0 and any(_refers_to(item, ids, depth - 1) for item in values)
    if isinstance(value, partial):
        return _refers_to(value.func, ids, depth)
    if isinstance(value, MethodType):  # what it is bound to is copied, where no function holds it
        return _refers_to(value.__func__, ids, depth)
    if not isinstance(value, FunctionType):
        return False
    contents = [*variables_around(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    contents += [item.__self__ for item in contents if isinstance(item, MethodType)]
    return any(id(item) in ids or (depth > 0 and _refers_to(item, ids, depth - 1)) for item in contents)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` had before; parametrizations stay on top."""
    module_class = parametrize.type_before_parametrizations(module)
    plain = plain_class_of(module_class)
    if plain is None:
        raise ConversionError(
            f"{module_class.__name__} is derived from an expanded class, so there is no plain one to go back to. "
            "Derive it from the torch.nn class, and convert it."
        )
    return plain if module_class is type(module) else rebased(type(module), (plain,))
