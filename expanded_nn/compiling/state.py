"""What a step can reach in Python and may change: kept before a trace, and put back after it."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, MappingView
from contextvars import ContextVar
from functools import cache, partial
from types import BuiltinMethodType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast
from weakref import ReferenceType

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from expanded_nn.common.arrays import NUMBERS_OF_C, bytes_of, copied, has_numbers
from expanded_nn.common.batch import contents
from expanded_nn.common.containers import has_dict
from expanded_nn.common.outside import CACHED, FILLED_ANEW, LISTS, NOTHING, put_back
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.compiling.caches import results_of
from expanded_nn.compiling.names import Referred, is_the_users
from expanded_nn.core.kronecker import KroneckerFactors, SecondMoment
from expanded_nn.factored import FactoredTensor

MOST = 100_000  # lists, dicts and objects that are looked into
_OPAQUE = str, int, float, FakeTensor, FactoredTensor
MOST_IN_LIST = 10_000  # the items of a longer list are not looked into
_LEFT_ALONE = __name__.partition(".")[0], "threading"  # ours, and the locks and events that other threads use
_SUMS = KroneckerFactors, SecondMoment
WAITING = "_waiting"  # the attribute with what is to be added to them, which is memory that is used again


class State:
    """The step's variables, and the lists, dicts and attributes that can be reached, with copies of them.

    Of objects that are no modules, those attributes that the functions which have run may find. Objects of this library
    are left out, as a trace puts them back itself; but for Kronecker factors, which users keep, and for modules, which
    have attributes of the user's.

    Args:
        referred: What the step refers to by names.
        others: What else it can reach, as its arguments.

    Attributes:
        variables: The variables, each with its value.
        kept: Lists, dicts, arrays and the like, each with a copy.
        of_owners: The ids of those dicts that are the attributes of something, whose order says nothing.
    """

    def __init__(self, referred: Referred, others: Iterable[Any]) -> None:
        self.variables = referred.variables()
        self.kept: list[tuple[Any, Any]] = []
        self.of_owners: set[int] = set()
        may_find = cache(referred.may_find)
        seen: set[int] = set()
        left = deque([*referred.reachable(), *others])
        while left and len(seen) < MOST:
            value = left.popleft()  # those that are near come first
            # what a trace imports stays imported
            if id(value) in seen or value is sys.modules or isinstance(value, _OPAQUE):
                continue
            seen.add(id(value))
            cls = cast(Any, type(value))
            if isinstance(value, type):
                if is_the_users(value):
                    constants = [name for name, item in vars(value).items() if _is_constant(name, item)]
                    left += self._kept_attributes(value, constants)
                continue
            if isinstance(value, Tensor | ModuleType):
                if isinstance(value, Tensor) or is_the_users(value):
                    left += self._attributes_of(value)
            elif isinstance(value, dict):
                before = dict(value)
                self.kept.append((value, before))
                own = {*OWN_STATE, "__builtins__"} if id(value) in self.of_owners else ()
                left += [item for name, item in before.items() if name not in own]
                left += self._attributes_of(value)
            elif isinstance(value, list | tuple | deque | set | frozenset):
                items = [*iter(value)]
                if isinstance(value, FILLED_ANEW):
                    self.kept.append((value, items))
                left += items if len(items) <= MOST_IN_LIST else ()
                left += self._attributes_of(value)
            elif isinstance(value, FunctionType):
                left += self._attributes_of(value)
            elif isinstance(value, CACHED):
                left += results_of(value)
            elif isinstance(value, ContextVar):
                left += self._keep(_InContext(value))
            elif isinstance(value, partial):
                left += [value.func, value.args, value.keywords]
            elif isinstance(value, MethodType | BuiltinMethodType):
                left.append(value.__self__)
            elif isinstance(value, ReferenceType):
                left.append(value())
            elif isinstance(value, MappingProxyType):
                left += gc.get_referents(value)
            elif has_numbers(value):
                if getattr(value, "nbytes", 0) <= 8 * MOST:
                    self.kept.append((value, copied(value)))
            elif isinstance(value, nn.Module) or cls in _SUMS:
                left += [cls, *self._attributes_of(value)]
                left += self._kept_attributes(value, slots_of(cls))
            elif cls.__module__.partition(".")[0] not in _LEFT_ALONE:
                left.append(cls)
                if has_dict(value):
                    found = _Found(value, may_find(cls))
                    self.of_owners.add(id(found))
                    left += self._keep(found)
                left += self._kept_attributes(value, [*filter(may_find(cls), slots_of(cls))])

    def _attributes_of(self, owner: Any) -> list[dict[str, Any]]:
        """The dict of its attributes, if it has one."""
        attributes = [vars(owner)] if has_dict(owner) else []
        self.of_owners.update(map(id, attributes))
        return attributes

    def _keep(self, view: Any) -> Iterable[Any]:
        """Keeps what a view shows as a dict; returns the values."""
        before = dict(view.items())
        self.kept.append((view, before))
        return before.values()

    def _kept_attributes(self, owner: Any, names: list[str]) -> Iterable[Any]:
        """Keeps attributes of a class, or those for which an object has slots; returns their values."""
        attributes = _Attributes(owner, names)
        return self._keep(attributes) if attributes.items() else ()

    def set_to_tensor(self) -> str | None:
        """The first variable, attribute or item that is a tensor of a trace now, in words; `None` without one.

        What is appended to a list does not count.
        """
        for variable in self.variables:
            if variable.now() is not variable.value and is_of_trace(variable.now()):
                return variable.name
        for container, before in self.kept:
            items_before, is_list = items_in(before), isinstance(container, LISTS)
            for place, value in items_in(container).items():
                is_appended = is_list and place not in items_before
                if value is not items_before.get(place, NOTHING) and not is_appended and is_of_trace(value):
                    return f"item {place} of a list" if is_list else repr(place)
        return None

    def restore(self) -> None:
        """Puts all of them back."""
        for container, before in self.kept:
            if isinstance(container, (dict, *FILLED_ANEW)) or has_numbers(container):
                put_back(container, before)
                continue
            now = dict(container.items())
            changed = {key: value for key, value in before.items() if now.get(key, NOTHING) is not value}
            new = now.keys() - before.keys()
            if new or changed:
                container.put(new, changed)
        for variable in self.variables:
            variable.put_back()


def key_of(container: Any) -> int:
    """The id of a list, a dict or the like, or of the object whose attributes it has."""
    return id(container.owner if isinstance(container, _Found | _Attributes) else container)


def items_in(container: Any) -> dict[Any, Any]:
    """The items of a list, a dict or the like by their places; an array is one; none of a set, which has no places."""
    if isinstance(container, set):
        return {}
    if has_numbers(container):
        return {"a number of C" if isinstance(container, NUMBERS_OF_C) else "an array": bytes_of(container)}
    return dict(enumerate(container)) if isinstance(container, LISTS) else dict(container.items())


class _Found:
    """Those attributes of an object that may be found, as a dict that can be put back."""

    def __init__(self, owner: Any, may_find: Callable[[str], bool]) -> None:
        self.owner, self.may_find = owner, may_find

    def items(self) -> Iterable[tuple[str, Any]]:
        return [(name, value) for name, value in [*vars(self.owner).items()] if self.may_find(name)]

    def put(self, new: Iterable[str], changed: dict[str, Any]) -> None:
        for name in new:
            del vars(self.owner)[name]
        vars(self.owner).update(changed)


class _Attributes:
    """Attributes of a class, or of an object that has slots for them, as a dict that can be put back."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner, self.names = owner, names

    def items(self) -> Iterable[tuple[str, Any]]:
        return [(name, getattr(self.owner, name)) for name in self.names if hasattr(self.owner, name)]

    def put(self, new: Iterable[str], changed: dict[str, Any]) -> None:
        own_class: Any = type if isinstance(self.owner, type) else object
        for name in new:
            own_class.__delattr__(self.owner, name)
        for name, value in changed.items():
            own_class.__setattr__(self.owner, name, value)


def shows_others(value: Any) -> bool:
    """Whether it shows what another object holds, or holds objects that its bytes do not tell."""
    is_of_objects = has_numbers(value) and getattr(getattr(value, "dtype", None), "hasobject", False)
    return isinstance(value, MappingView | memoryview) or is_of_objects


class _InContext:
    """The value of a context variable, as a dict of one item. A trace does not change it, as it has its own context."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def items(self) -> Iterable[tuple[str, Any]]:
        value = self.variable.get(NOTHING)
        return [] if value is NOTHING else [(self.variable.name, value)]


def _is_constant(name: str, member: Any) -> bool:
    """Whether a member of a class is a value, and no function or property."""
    return not name.startswith("__") and not hasattr(type(member), "__get__") and not isinstance(member, type)


@cache
def slots_of(cls: Any) -> list[str]:
    """The attributes for which the instances of a class have slots, and no property of a subclass in their place."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    attributes = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]  # classes written in C have none
    slots = [item for names in attributes for item in names.items() if type(item[1]) is MemberDescriptorType]
    return [name for name, member in slots if members[name] is member]


def is_of_trace(value: Any) -> bool:
    """Whether a value is a tensor without values, or holds one."""
    return any(isinstance(part, FakeTensor | FactoredTensor) for part in contents(value))
