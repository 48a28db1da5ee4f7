"""Arguments in objects that torch's trees do not open, such as dataclasses: they are opened here, for the call."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.layers.general.mapped import keeping


class Opened:
    """An argument, whose leaves are also those inside of such objects."""

    def __init__(self, value: Any) -> None:
        self.value = value


def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, opened where there are such objects in them."""
    return tuple(map(_opened, args)), {name: _opened(value) for name, value in kwargs.items()}


def _opened(value: Any) -> Any:
    return Opened(value) if any(map(_holds_tensors, tree_leaves(value))) else value


def called(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of a module returns for opened arguments; it is given copies of the objects in them.

    Raises:
        PerSampleError: If it puts other tensors into one, which the caller would not see.
    """
    if not any(type(value) is Opened for value in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    args, kwargs = tuple(map(_closed, args)), {name: _closed(value) for name, value in kwargs.items()}
    before = _leaves((args, kwargs))
    result, after = forward(*args, **kwargs), _leaves((args, kwargs))
    if len(before) != len(after) or any(leaf is not other for leaf, other in zip(before, after, strict=True)):
        raise keeping(module, "an argument")
    return result


def _closed(value: Any) -> Any:
    return _rebuilt(value.value, iter(_leaves(value.value))) if type(value) is Opened else value


def _leaves(value: Any) -> list[Any]:
    """The leaves of a value, those inside of such objects included."""
    return [leaf for part in tree_leaves(value) for leaf in (_within(part) if _holds_tensors(part) else (part,))]


def _within(holder: Any) -> Iterator[Any]:
    for name in _names(holder):
        yield from _leaves(_get(holder, name))


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """A value like this one with other leaves."""
    parts, structure = tree_flatten(value)
    others = [_filled(part, leaves) if _holds_tensors(part) else next(leaves) for part in parts]
    return tree_unflatten(others, structure)


def _filled(holder: Any, leaves: Iterator[Any]) -> Any:
    other = copy.copy(holder)
    for name in _names(holder):
        value = _rebuilt(_get(holder, name), leaves)
        if _is_mapping(other):
            other[name] = value
        else:
            object.__setattr__(other, name, value)  # it may be frozen
    return other


def _holds_tensors(part: Any) -> bool:
    if isinstance(part, Tensor) or not (_is_mapping(part) or _is_dataclass(part)):
        return False
    return any(isinstance(leaf, Tensor) for leaf in _within(part))


def _is_mapping(part: Any) -> bool:
    return isinstance(part, dict | UserDict)


def _is_dataclass(part: Any) -> bool:
    return dataclasses.is_dataclass(part) and not isinstance(part, type)


def _names(holder: Any) -> list[Any]:
    return [*holder] if _is_mapping(holder) else [field.name for field in dataclasses.fields(holder)]


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if _is_mapping(holder) else getattr(holder, name)


register_pytree_node(
    Opened,
    lambda opened: (_leaves(opened.value), opened.value),
    lambda leaves, value: Opened(_rebuilt(value, iter(leaves))),
)
