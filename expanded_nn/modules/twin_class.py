"""Twin classes: a plain class with the per-sample manners of one of the library's, made once; pickled and copied."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import get_annotations
from types import new_class
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.fx import GraphModule

from expanded_nn._errors import complaint
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.modules.registry import plain_class_of

# by the ids of both classes, which a twin holds; a class made in a function goes with the last model of it
_TWINS: WeakValueDictionary[tuple[int, int], type[nn.Module]] = WeakValueDictionary()


def twin_class(kind: type[nn.Module], plain_class: type[nn.Module]) -> type[nn.Module]:
    """`plain_class` with the per-sample manners of `kind`: a class of the same name, made once."""
    key = id(kind), id(plain_class)
    twin = _TWINS.get(key)
    if twin is None:
        namespace = {
            "plain_class": plain_class,
            "__module__": plain_class.__module__,
            "__qualname__": plain_class.__qualname__,
            "__doc__": plain_class.__doc__,
            "__annotations__": get_annotations(plain_class),
        }
        if issubclass(plain_class, GraphModule):
            namespace["__deepcopy__"] = _deepcopied_graph

        def fill(body: dict[str, Any]) -> None:
            body.update(namespace)

        twin = new_class(plain_class.__name__, (kind, plain_class), {}, fill)
        if not _is_built_on_a_module(plain_class):
            metaclass = _ordering(type(twin), (plain_class, kind), twin.__mro__[1:])
            twin = new_class(plain_class.__name__, (plain_class, kind), {"metaclass": metaclass}, fill)
        _TWINS[key] = twin
    return twin


def _is_built_on_a_module(plain_class: type[nn.Module]) -> bool:
    """Whether Python lays its instances out as a module's; not where a base without attributes comes first, an `ABC`.

    An instance may only become one of a class that is laid out like its own.
    """
    base: type | None = plain_class
    while base not in (nn.Module, None):
        base = base.__base__
    return base is nn.Module


def _ordering(metaclass: type, bases: tuple[type, ...], order: tuple[type, ...]) -> type:
    """A metaclass by which a class with these bases looks methods up in another order; classes made of it do not."""

    def mro(cls: Any) -> list[type]:
        return [cls, *order] if cls.__bases__ == bases else type.mro(cls)

    return type(metaclass.__name__, (metaclass,), {"mro": mro})


def _deepcopied_graph(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of a module of torch.fx, which gives each of its modules a class of its own."""
    kind = type(module).__bases__[0]
    with as_plain_graph(module):
        copied = copy.deepcopy(module, memo)  # with what its graph refers to
    own_state = {name: module.__dict__[name] for name in OWN_STATE if name in module.__dict__}
    copied.__dict__.update(copy.deepcopy(own_state, memo))
    return _twin_of_graph(kind, copied)


@contextmanager
def as_plain_graph(module: Any) -> Iterator[None]:
    """Makes a module of torch.fx plain for a while, as it writes its code into its class where it is copied."""
    twin = type(module)
    object.__setattr__(module, "__class__", twin.plain_class)
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", twin)


def untouched(model: nn.Module) -> nn.Module:
    """A model as it was before `convert`, with the same parameters and attributes.

    The modules are copies, as another thread may run the model itself; but not those without a converted one within.
    Those of a class without a plain one keep it, and parametrized ones.
    """
    plain = {module: plain_class_of(type(module)) for module in model.modules()}
    converted = [module for module in plain if any(plain[member] for member in module.modules())]
    copies = {module: object.__new__(plain[module] or type(module)) for module in converted}
    for module, copied in copies.items():
        vars(copied).update({name: value for name, value in vars(module).items() if name not in OWN_STATE})
        vars(copied).update(_parameters={**module._parameters}, _buffers={**module._buffers})
        vars(copied)["_modules"] = {name: copies.get(child, child) for name, child in module._modules.items()}  # type: ignore[arg-type]
    return copies.get(model, model)


def unpickled_graph(kind: type[nn.Module], make: Callable[..., Any], arguments: Any) -> Any:
    """A module of torch.fx, made of its code again."""
    return _twin_of_graph(kind, make(*arguments))


def _twin_of_graph(kind: type[nn.Module], module: Any) -> Any:
    """A plain module of torch.fx, with the attributes of a twin, as one."""
    object.__setattr__(module, "__class__", twin_class(kind, type(module)))
    module._join_recorder()
    return module


_NEW_OBJECT, _NEW_OBJECT_BY_NAME = copyreg.__newobj__, copyreg.__newobj_ex__  # type: ignore[attr-defined]
_BY_COPYREG = _NEW_OBJECT, _NEW_OBJECT_BY_NAME, copyreg._reconstructor  # type: ignore[attr-defined]


def reduced_twin(kind: type[nn.Module], plain_class: type[nn.Module], reduction: Any) -> tuple[Any, ...]:
    """How a twin is copied and pickled, by what `__reduce_ex__` gives for it.

    Raises:
        PerSampleError: If its class has a way of its own that makes a model anew, as that would be a plain one.
    """
    make, arguments, *state = reduction
    if make not in _BY_COPYREG and not any(state):
        raise complaint(
            plain_class.__name__,
            f"the class has a __reduce__ of its own (by {getattr(make, '__name__', make)}), by which a copy, or "
            "what is loaded, would be a plain model",
            "a class that is copied and pickled as others are",
            "Copy or pickle the plain model, revert(model, inplace=True); convert that again, and what comes of it.",
        )
    given = arguments[1:] if make is _NEW_OBJECT else arguments[1] if make is _NEW_OBJECT_BY_NAME else ()
    by_name = arguments[2] if make is _NEW_OBJECT_BY_NAME else {}
    return (partial(new_twin, **by_name) if by_name else new_twin, (kind, plain_class, *given), *state)


def new_twin(kind: type[nn.Module], plain_class: type[nn.Module], /, *arguments: Any, **by_name: Any) -> nn.Module:
    """An empty instance of a twin class, for unpickling and copying; with what its `__new__` takes."""
    module_class = twin_class(kind, plain_class)
    return module_class.__new__(module_class, *arguments, **by_name)
