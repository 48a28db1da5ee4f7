"""Arguments in objects that torch's trees do not open, such as dataclasses: they are opened here, for the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from expanded_nn.common.containers import Opened, holds_tensors, leaves_of, rebuilt
from expanded_nn.layers.general.mapped import keeping


def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, opened where there are such objects in them."""
    return tuple(map(_opened, args)), {name: _opened(value) for name, value in kwargs.items()}


def _opened(value: Any) -> Any:
    return Opened(value, stays=True) if any(map(holds_tensors, tree_leaves(value))) else value


def called(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of a module returns for opened arguments; it is given copies of the objects in them.

    Raises:
        PerSampleError: If it puts other tensors into one, which the caller would not see.
    """
    if not any(type(value) is Opened for value in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    args, kwargs = tuple(map(_closed, args)), {name: _closed(value) for name, value in kwargs.items()}
    before = leaves_of((args, kwargs))
    result, after = forward(*args, **kwargs), leaves_of((args, kwargs))
    if len(before) != len(after) or any(leaf is not other for leaf, other in zip(before, after, strict=True)):
        raise keeping(module, "an argument")
    return result


def _closed(value: Any) -> Any:
    return rebuilt(value.value, iter(leaves_of(value.value))) if type(value) is Opened else value
