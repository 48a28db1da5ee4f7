"""What a step can reach in Python and may set to a tensor: looked at before a trace, and after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache, partial
from operator import is_
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from expanded_nn.common.batch import contents
from expanded_nn.common.steady import OWN_STATE
from expanded_nn.factored import FactoredTensor

MOST = 100_000  # lists, dicts and objects that are looked into
MOST_ITEMS = 1000  # of a list; the items of a longer one are not looked into
_OURS = __name__.partition(".")[0]


class State:
    """The lists, dicts and attributes that can be reached from some values, with copies of them.

    What this library keeps is left out: a trace puts it back itself.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.kept: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        left = list(roots)
        while left and len(seen) < MOST:
            value = left.pop()
            if id(value) in seen or isinstance(value, Tensor | type | ModuleType | FunctionType | str | int | float):
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                self.kept.append((value, dict(value)))
                left += [item for name, item in value.items() if name not in OWN_STATE]
            elif isinstance(value, list | tuple | deque):
                if isinstance(value, list):
                    self.kept.append((value, list(value)))
                left += value if len(value) <= MOST_ITEMS else ()
            elif isinstance(value, partial):
                left += [value.func, value.args, value.keywords]
            elif isinstance(value, MethodType):
                left.append(value.__self__)
            elif type(value).__module__.partition(".")[0] != _OURS:
                left += [vars(value)] if hasattr(value, "__dict__") else []
                if slots := slots_of(cast(Any, type(value))):
                    attributes = _Slots(value, slots)
                    self.kept.append((attributes, dict(attributes.items())))
                    left += [item for _, item in attributes.items()]

    def set_to_tensor(self) -> str | None:
        """The first attribute, item of a dict or item of a list that is a tensor of a trace now; `None` without one.

        What is appended to a list is none.
        """
        for container, before in self.kept:
            for place, _ in _changed(container, before):
                if not isinstance(container, list):
                    return repr(place)
                if place < len(before):
                    return f"item {place} of a list"
        return None

    def restore(self) -> None:
        """Puts all of them back."""
        for container, before in self.kept:
            values = container if isinstance(container, list) else [value for _, value in container.items()]
            values_before = before if isinstance(container, list) else before.values()
            if len(values) != len(values_before) or not all(map(is_, values, values_before)):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)


class _Slots:
    """The attributes of an object that has slots for them, as a dict that can be put back."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner, self.names = owner, names

    def items(self) -> Iterable[tuple[str, Any]]:
        return [(name, getattr(self.owner, name)) for name in self.names if hasattr(self.owner, name)]

    def clear(self) -> None:
        for name, _ in self.items():
            object.__delattr__(self.owner, name)

    def update(self, items: dict[str, Any]) -> None:
        for name, value in items.items():
            object.__setattr__(self.owner, name, value)


@cache
def slots_of(cls: Any) -> list[str]:
    """The attributes for which the instances of a class have slots."""
    return [name for base in cls.__mro__ for name, member in vars(base).items() if type(member) is MemberDescriptorType]


def _changed(container: Any, before: Any) -> Iterable[tuple[Any, Any]]:
    """The items that have been set to a tensor of a trace, or to what holds one, with their places."""
    if isinstance(container, list):
        places = enumerate(container)
        return ((i, v) for i, v in places if (i >= len(before) or v is not before[i]) and is_of_trace(v))
    return ((k, v) for k, v in container.items() if (k not in before or v is not before[k]) and is_of_trace(v))


def is_of_trace(value: Any) -> bool:
    """Whether a value is a tensor without values, or holds one."""
    return any(isinstance(part, FakeTensor | FactoredTensor) for part in contents(value))
