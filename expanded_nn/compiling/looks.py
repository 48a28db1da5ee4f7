"""A look at values: a key for what they are at the moment, and a note of all that was looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import IOBase
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, cast
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expanded_nn._errors import shown
from expanded_nn.common.arrays import has_numbers, key_of_numbers
from expanded_nn.common.containers import has_dict
from expanded_nn.common.generators import is_generator
from expanded_nn.common.outside import CACHED, NAMESPACES
from expanded_nn.common.traced import HasGraphs, OnlyEager
from expanded_nn.compiling.arguments import Arguments
from expanded_nn.compiling.caches import results_of
from expanded_nn.compiling.names import (
    PLAIN,
    Names,
    Referred,
    constants,
    finds_attributes,
    is_the_users,
    is_written_by_users,
    names_in_library,
    set_by_users,
)
from expanded_nn.compiling.seen import Seen, in_a_tuple, is_kind_of_dict, plain_items
from expanded_nn.compiling.state import State, shows_others, slots_of
from expanded_nn.factored import FactoredTensor
from expanded_nn.recording.recorder import Recorder, modules_in, recorder_of

MOST_ITEMS = 10_000  # of a list or a dict; what is within the items of a longer one does not count
MOST_NUMBERS = 100_000  # of an array; a step with a larger one runs eagerly
MOST_PARTS = 10_000  # lists, dicts and objects; a step with more runs eagerly
MOST_IN_VAIN = 16  # looks in a row that give no key, after which few calls are looked at
MOST_DEPTH = 100  # of objects within objects; what is deeper counts by its identity
_NUMBERS = {bool, int, float, complex}
_BY_TEXT = complex, range  # of which different ones are equal
_SETTINGS = {*PLAIN, dict, list, *NAMESPACES}  # what counts also where a library has it
_OF_PYDANTIC = "__pydantic_private__", "__pydantic_extra__"  # where its objects have some of their attributes
_BASES = in_a_tuple(attrgetter, "__mro__")  # which may be set
_WHOLE = Tensor | nn.Module | HasGraphs  # what counts by its identity, whatever it holds


def by_identity(value: Any) -> Hashable:
    """A key that is equal for the same object only. It holds the object, so that no other one gets its id."""
    cls: Any = type(value)
    return value if cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__ else Identity(value)


class Identity:
    """A key for an object whose class defines its own equality; equal for the same object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Look:
    """A look at values and into them.

    Numbers and strings count by their values; tensors, modules and functions by their identity. Lists, dicts, arrays of
    numbers and other objects are looked into. Of an object, those attributes count that the functions name. Of a dict,
    those items that they name, or all if they compute keys or name none of its keys. Of lists and sets, all items.

    Args:
        values: The values.
        names: What the step's functions refer to.
        seen: Where all that counts is noted.
        changing: The places that do not count, as in `StepValues`.
        owners: Objects of which only what is in them counts, as the step itself.
        members: Classes, each with the names of the members that count.

    Attributes:
        key: Equal for the same objects with equal numbers in them.
        items: What counts in each list, dict and object, by the id of that and the key or name there. Items that are
            themselves lists, dicts or objects count by their identity.
        numbers: The id of each list, dict and object that was looked into -> how many came before it.
        unseen: Why there is no key that says whether all is the same, as the end of a sentence; `None` if there is.
        code: The functions that are referred to, and the user's classes whose objects were looked into.
        members: The modules, parameters, generators of random numbers and schedulers of learning rates that are
            referred to.
        seen: As given.
    """

    def __init__(
        self,
        values: Iterable[Any],
        names: Names,
        seen: Seen,
        changing: Collection[Any] = (),
        owners: Any = (),
        members: Iterable[tuple[type, list[str]]] = (),
    ) -> None:
        self.items: dict[tuple[int, Any], tuple[Any, Hashable]] = {}
        self.numbers: dict[int, int] = {}
        self.unseen: str | None = None
        self.code: dict[FunctionType | type, None] = {}
        self.members: list[Any] = []
        self._names, self._changing, self.seen, self._depth = names, changing, seen, 0
        of_owners = tuple(self._of_object(owner) for owner in owners)
        of_classes = []
        for cls, own in members:
            of_classes.append((cls, cls.__mro__, self._of_places(cls, vars(cls), own)))
            self.seen.note_places(_BASES, cls)
        self.key: Hashable = (*map(self._key, values), *of_owners, *of_classes)

    def checked(self) -> Hashable:
        """The key; raises `OnlyEager` if that does not say whether all is the same."""
        if self.unseen is not None:
            raise OnlyEager(self.unseen)
        return self.key

    def _key(self, value: Any) -> Hashable:
        cls: Any = type(value)
        if cls in PLAIN or is_number(value):
            return key_of_plain(value)
        if isinstance(value, FunctionType):
            self.code[value] = None
            return by_identity(value), self._of_attributes(value)
        if isinstance(value, nn.Module):
            self.members.append(value)
            self.code.update({kind: None for kind in map(type, value.modules()) if is_the_users(kind)})
        elif isinstance(value, nn.Parameter):
            self.members.append(value)
            return by_identity(value), self._of_parameter(value), of_tensor(value, self.seen)
        elif isinstance(value, Tensor) and not isinstance(value, FactoredTensor):  # whose shape is its own for good
            of_attributes = self._of_attributes(value) if type(value) is Tensor else ()
            return by_identity(value), of_attributes, of_tensor(value, self.seen)
        if isinstance(value, _WHOLE) or self._depth >= MOST_DEPTH:
            return by_identity(value)
        if len(self.numbers) >= MOST_PARTS:
            self.unseen = (
                f"it refers to more than {MOST_PARTS} lists, dicts and objects, in which a change would not be seen "
                "(give the step what it takes from them)"
            )
            return by_identity(value)
        if isinstance(value, staticmethod | classmethod):
            return by_identity(value), self._key(value.__func__)
        if isinstance(value, MethodType):
            return cls, self._key(value.__self__), self._key(value.__func__)
        if isinstance(value, BuiltinMethodType) and _is_looked_into(value.__self__):
            return cls, value.__name__, self._key(value.__self__)
        if isinstance(value, ReferenceType):
            return cls, self._key(value())
        if isinstance(value, ContextVar):
            self.seen.note_places(lambda variable: (variable.get(None),), value)
            return by_identity(value), self._key(value.get(None))
        if is_generator(value.__self__ if cls is BuiltinFunctionType else value):
            self.members.append(getattr(value, "__self__", value))
            return by_identity(value)
        if id(value) in self.numbers:
            return cls, self.numbers[id(value)]
        self.numbers[id(value)] = len(self.numbers)
        self._depth += 1
        key = self._of_contents(value)
        self._depth -= 1
        return key

    def _of_contents(self, value: Any) -> Hashable:
        """The key of an object, with what counts in it."""
        cls: Any = type(value)
        has_attributes = has_dict(value) or slots_of(cls) or is_the_users(cls)
        of_object = self._of_object(value) if has_attributes else ()
        if isinstance(value, partial):
            of_keywords = self._of_places(value.keywords, value.keywords, list(value.keywords))
            return cls, self._key(value.func), self._key(value.args), of_keywords
        if isinstance(value, CACHED):
            self.seen.note_fact(lambda: [*map(id, results_of(value))])
            return by_identity(value), tuple(map(self._key, results_of(value))), of_object
        if isinstance(value, list | tuple | set | frozenset | deque):
            return cls, self._of_items(value), of_object
        if isinstance(value, dict | MappingProxyType):
            return by_identity(value), self._of_dict(value), of_object
        if shows_others(value):
            self.unseen = (
                f"it refers to a {cls.__name__}, in which a change would not be seen (refer to the dict, or put what "
                "counts into a list)"
            )
            return by_identity(value)
        if has_numbers(value):
            return self._of_array(value)
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            self.unseen = (
                f"it refers to an iterator, a {cls.__name__}, which gives something else at each call (take the next "
                "item before the step, and give it to the step)"
            )
        if isinstance(value, LRScheduler):
            self.members.append(value)
        return cls, by_identity(value), of_object

    def _of_attributes(self, value: Any) -> Hashable:
        """The key of the attributes of a function or a tensor that count."""
        named = [name for name in [*vars(value)] if name in self._names.words or name == "registry"]  # singledispatch's
        return self._of_places(value, vars(value), named)

    def _of_parameter(self, value: nn.Parameter) -> Hashable:
        """The key of the attributes of a parameter that count; not the rows of a recorder, which change each time."""
        note_own_rows(value, self.seen)
        named = [name for name in own_attributes(value) if name in self._names.words]
        return self._of_places(value, None, named)

    def _of_items(self, value: Collection[Any]) -> Hashable:
        if (id(value), None) in self._changing:
            return by_identity(value)
        held = [*iter(value)]  # another thread may change it meanwhile; and a tuple's own `__len__` may raise
        self.seen.note_items(held if isinstance(value, tuple) else value)
        items = tuple(map(_outside, held))  # of a set in its order, which may count
        self.items[id(value), None] = value, items
        return items if len(held) > MOST_ITEMS else tuple(map(self._key, held))

    def _of_dict(self, value: Mapping[Any, Any]) -> Hashable:
        words, held = self._names.words, [*value]  # another thread may change it meanwhile
        named = [key for key in held if isinstance(key, str) and key in words]
        if (id(value), None) in self._changing:
            return self._of_places(value, value, named)
        keys = tuple(map(_outside, held))
        self.items[id(value), None] = value, keys
        if len(value) > MOST_ITEMS:
            self.seen.note_items(value.values())
            items = tuple(map(_outside, value.values()))
            return keys, items, self._of_places(value, value, named)
        if named and not self._names.any_item:
            named += [key for key in held if not isinstance(key, str)]
        else:
            named = held
        of_keys = tuple(self._key(key) for key in held if is_the_users(type(key)))
        return keys, of_keys, self._of_places(value, value, named)

    def _of_object(self, value: Any) -> Hashable:
        """The key of what counts among the attributes."""
        if isinstance(value, ModuleType | type) and not is_the_users(value):
            return self._of_library(value)
        names, cls = self._names, cast(Any, type(value))
        if isinstance(value, LRScheduler) and not names.words.isdisjoint({"get_last_lr", "get_lr"}):
            names = names.joined(Names(frozenset({"_last_lr"})))
        elif isinstance(value, Optimizer):
            of_parameters = [state for state in value.state.values() if isinstance(state, dict)]
            looks_into = any(not names.words.isdisjoint(state) for state in of_parameters)  # or it has another `state`
            names = Names(names.words if looks_into else names.words - {"state"})
        elif isinstance(value, Distribution | Transform):
            names = names.joined(Names(frozenset(_parameters_of(value))))
        elif finds_attributes(cls):
            names = names.joined(names_in_library(cls))
        classes = (*value.__mro__, *cls.__mro__) if isinstance(value, type) else cls.__mro__
        self.code.update(dict.fromkeys(list(filter(is_the_users, classes[:-1]))[:1]))
        keys: list[Hashable] = []
        if not isinstance(value, type) and has_dict(value):
            attributes = vars(value)
            self.seen.holders.append(value)
            of_any_name = constants(attributes) if isinstance(value, ModuleType) else attributes
            any_names = {*of_any_name} if names.any_attribute else ()
            counted = [
                name for name in [*attributes] if name in names.words or name in any_names or name == "__wrapped__"
            ]
            keys.append(self._of_places(value, attributes, counted))
        slots = [name for name in slots_of(cls) if name in names.words or name in _OF_PYDANTIC]
        if slots:
            self.seen.note_fact(lambda: [hasattr(value, name) for name in slots])
        filled = [name for name in slots if hasattr(value, name)]
        keys.append(self._of_places(value, None, filled))
        return tuple(keys)

    def _of_library(self, value: ModuleType | type) -> Hashable:
        """The key of the functions and constants that the names find in a library, as users may replace them."""
        mapping = vars(value)
        named = sorted(name for name in self._names.words if name in mapping)
        self.seen.sized.append(mapping)
        if not named:
            return ()
        self.seen.note_places(in_a_tuple(itemgetter, *named), mapping)
        return tuple((name, self._of_member(mapping[name])) for name in named)

    def _of_member(self, value: Any) -> Hashable:
        is_own = isinstance(value, ModuleType | type) or is_written_by_users(value)
        return self._key(value) if is_own or type(value) in _SETTINGS else by_identity(value)

    def _of_places(self, value: Any, mapping: Any, places: list[Any]) -> Hashable:
        """The key of what is in some places: items of `mapping`, or attributes of `value` if that is `None`."""
        if mapping is not None and isinstance(value, type):
            self.seen.note_fact(lambda: [name for name in mapping if name != "__slotnames__"])  # a copy sets that
        elif mapping is not None:
            self.seen.note_items(mapping)
        counted = [place for place in places if (id(value), place) not in self._changing]
        if not counted:
            return ()
        source, getter = (value, attrgetter) if mapping is None else (mapping, itemgetter)
        get = plain_items(counted) if is_kind_of_dict(mapping) else in_a_tuple(getter, *counted)
        self.seen.note_places(get, source)
        for place, item in zip(counted, get(source), strict=False):
            self.items[id(value), place] = value, _outside(item)
        return tuple((place, self._key(item)) for place, item in zip(counted, get(source), strict=False))

    def _of_array(self, value: Any) -> Hashable:
        size = value.size if hasattr(value, "size") else len(value) if hasattr(value, "__len__") else 1
        if size > MOST_NUMBERS:
            self.unseen = (
                f"it refers to an array of {size} numbers, in which a change would not be seen (make it a tensor, or "
                "give the step what it takes from it)"
            )
            return by_identity(value)
        numbers = key_of_numbers(value)
        self.seen.note_fact(partial(key_of_numbers, value))
        self.items[id(value), None] = value, numbers
        return type(value), size, numbers


class StepValues:
    """The values that a step refers to by names, and what counts in them.

    Attributes:
        referred: The step's functions, and what they refer to.
        changing: What the step itself changes at each call and so does not count, such as a list of losses: the list or
            dict, by its id and the key there.
        changed_last: What it has changed in the last eager call.
        looks: The last look, and the one before it in front of it.
        scheduled: The class of a scheduler of learning rates, if the step calls its `step()`.
        modules: The modules that the step refers to.
        parameters: The parameters that it refers to by names of their own.
        arguments: The arguments that the step takes.
        in_vain: How many looks in a row have given no key.
    """

    def __init__(self, step: Any) -> None:
        self.referred = Referred(step)
        self.arguments, self.in_vain = Arguments(step), 0
        self.changing: dict[tuple[int, Any], Any] = {}
        self.changed_last: dict[tuple[int, Any], Any] = {}
        self.looks: tuple[Look, ...] = ()
        self.scheduled: str | None = None
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []

    def look(self, objects: Sequence[Any] = ()) -> Look:
        """A look at these values and at objects that are arguments, as they are at the moment."""
        referred = self.referred
        for value in objects:
            referred.add(value)
        referred.read_changed()
        while True:
            values = (*referred.values(), *objects, Tensor)  # whose methods may be replaced
            look = Look(values, referred.names, Seen(), self.changing, referred.owners, referred.members())
            known = len(referred.functions), len(referred.classes)
            for value in look.code:
                referred.add(value)
            if (len(referred.functions), len(referred.classes)) == known:
                referred.note(look.seen)
                return look

    def add_modules(self, modules: Sequence[nn.Module]) -> None:
        """Adds modules that the step calls: the functions that they, their hooks and their attributes refer to."""
        known = -1
        self.referred.add_modules(modules)
        while known < len(self.referred.functions):
            known = len(self.referred.functions)
            names = self.referred.names_of({*map(type, modules)})
            for module in modules:
                values = map(vars(module).get, set_by_users(module))
                look = Look(values, names[type(module)], Seen())
                for value in look.code:
                    self.referred.add(value)

    def holders_of_rows(self) -> list[Recorder]:
        """The recorders of rows that the step may name, be they those of a model that it calls or not."""
        if "grad_sample" not in self.referred.names.words:
            return []
        of_modules = [vars(member).get("_recorder") for member in modules_in(*self.modules)]
        recorders = [*of_modules, *map(recorder_of, self.parameters)]
        return list(dict.fromkeys(filter(None, recorders)))

    def key(self, objects: Sequence[Any]) -> Hashable:
        """A key for them at this moment.

        Raises:
            OnlyEager: If there is none, as the step refers to an iterator, say.
        """
        seldom = self.in_vain >= MOST_IN_VAIN and self.in_vain & (self.in_vain - 1)
        self.in_vain += 1
        if not seldom:  # as a look may take longer than the step
            self.looks = (*self.looks[-1:], self.look(objects))
        key = self.looks[-1].checked()
        self.in_vain = 0
        return key

    def changed(self, kinds: Sequence[Any]) -> str:
        """The first thing that differs from the call before, as a part of a warning; empty if nothing does."""
        items = [look.items for look in self.looks]
        for place, (value, key) in items[-1].items() if len(items) > 1 else ():
            if items[0].get(place, (value, key))[1] != key:
                name = getattr(value, "__name__", f"a {type(value).__name__}")
                return f", as {shown(place[1])} of {name} changes" if place[1] is not None else f", as {name} changes"
        return self.arguments.changed(kinds)

    @contextmanager
    def undoing(self, objects: Sequence[Any]) -> Iterator[None]:
        """Puts what a trace has changed in variables, attributes, lists and dicts back: the step runs eagerly after it.

        Raises:
            OnlyEager: If it has set any to a tensor, which has no values.
        """
        state = State(self.referred, objects)
        try:
            yield
            name = state.set_to_tensor()
            if name is not None:
                raise OnlyEager(
                    f"it sets {name} to a tensor, which a graph does not (return the tensor and set it after the call, "
                    "change a tensor in place, or remove it at the end of the step)"
                )
        finally:
            state.restore()

    @contextmanager
    def noting_changes(self, objects: Sequence[Any]) -> Iterator[None]:
        """Notes what the step itself changes in lists and dicts meanwhile, which does not count if it always does so.

        Two kinds of changes go on to count, as a graph would not make them again: that of a number which the step reads
        from a dict, and that of a list of numbers.
        """
        before = self.look(objects)
        schedulers = [value for value in before.members if isinstance(value, LRScheduler)]
        steps_taken = [(scheduler, scheduler.last_epoch) for scheduler in schedulers]
        yield
        after = self.look(objects)
        self.modules = [member for member in after.members if isinstance(member, nn.Module)]
        self.parameters = [member for member in after.members if isinstance(member, nn.Parameter)]
        self.scheduled = next((type(taken).__name__ for taken, epoch in steps_taken if taken.last_epoch != epoch), None)
        changed_before, self.changed_last = self.changed_last, {}
        for place in before.items.keys() | after.items.keys():
            value, _ = before.items.get(place) or after.items[place]
            is_changed = place[0] in before.numbers and before.items.get(place) != after.items.get(place)
            is_of_dict = isinstance(value, dict) and place[1] in value
            if is_of_dict and type(value[place[1]]) in PLAIN and self.referred.reads_item(place[1]):
                continue
            if not is_changed or not isinstance(value, list | dict | set | deque):
                continue
            if isinstance(value, dict) or place[1] is not None or _NUMBERS.isdisjoint(map(type, value)):
                self.changed_last[place] = value
        self.changing |= {place: value for place, value in self.changed_last.items() if place in changed_before}


def of_tensor(tensor: Tensor, seen: Seen) -> Hashable:
    """A key for a tensor, but for its values; factored rows count by their identity, as they hold other tensors."""
    if isinstance(tensor, FactoredTensor):
        return by_identity(tensor)
    seen.tensors.append(tensor)
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, layout_of(tensor)


def layout_of(tensor: Tensor) -> Hashable:
    """How a tensor lies in memory, and whether its numbers are negated when they are read; `None` for a usual one."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    if tensor.is_neg() or tensor.is_conj():
        return tensor.stride(), tensor.is_neg(), tensor.is_conj()
    return None if tensor.is_contiguous() else tensor.stride()


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """What the user has set as attributes of a tensor; rows that a recorder holds are none of these."""
    attributes = vars(tensor)
    if attributes.get("grad_sample") is None or recorder_of(tensor) is not None:
        return {name: value for name, value in attributes.items() if name != "grad_sample"}
    return attributes


def note_own_rows(parameter: Tensor, seen: Seen) -> None:
    """Notes which attributes a parameter has; and its rows, where no recorder sets them, but the user may."""
    attributes = vars(parameter)
    seen.sized.append(attributes)
    if "grad_sample" in attributes and recorder_of(parameter) is None:
        seen.note_places(in_a_tuple(itemgetter, "grad_sample"), attributes)


def key_of_plain(value: Any) -> Hashable:
    """A key for a number, a string or the like; 0.0 and -0.0 have two, and ranges with another end."""
    return type(value), value if value != 0 and type(value) not in _BY_TEXT else repr(value)


def is_number(value: Any) -> bool:
    """Whether a value is a number or a string of NumPy, which is not an array."""
    return type(value).__module__ == "numpy" and hasattr(value, "dtype") and not hasattr(value, "__setitem__")


def _is_looked_into(owner: object) -> bool:
    """Whether the owner of a bound method has items or numbers."""
    return isinstance(owner, list | dict | set | deque) or has_numbers(owner)


def _outside(value: Any) -> Hashable:
    """A key for a value itself, not for what is in it."""
    return key_of_plain(value) if type(value) in PLAIN else by_identity(value)


def _parameters_of(value: Distribution | Transform) -> Iterator[str]:
    """The attributes that the methods of a distribution or a transform read, without what these keep."""
    constraints: Any = type(value).arg_constraints if isinstance(value, Distribution) else vars(value)
    for name, attribute in vars(value).items():
        if (name in constraints and not name.startswith("_")) or isinstance(attribute, Distribution | Transform | list):
            yield name
