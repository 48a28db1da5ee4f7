"""What was looked at, and what was there: to see that all of it is the same is cheaper than a key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import TensorGuards, dict_version

_FACTS = attrgetter("layout", "requires_grad", "shape", "dtype", "device")
Get = Callable[[Any], Iterable[Any]]


class Seen:
    """Places that are noted while a key is made, each with what is there.

    `holds` is stricter than a comparison of keys: objects have to be the same ones, not equal ones. It calls no method
    of the user's, and looks at no numbers in tensors. It runs at each step, so most loops are in C; of dicts it
    compares the version that Python gives them at each change, and the items only where that is another one.

    Attributes:
        holders: Objects whose classes and dicts of attributes count, which may be set anew.
        dicts: Dicts whose keys and values count, in this order.
        sized: Lists, dicts and the like whose lengths count.
        listed: Lists, sets, and views of dicts, whose items count.
        places: What gets attributes or items, each with what it gets them of.
        tensors: Tensors whose shapes, dtypes and the like count.
        ids: The ids of the lists, dicts and the like, once the look has ended.
        facts: Functions, with what they give, which is compared by `==`. `object` itself gives a new object each
            time, so that `holds` is never true.
    """

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.dicts: list[dict[Any, Any]] = []
        self.sized: list[Collection[Any]] = []
        self.listed: list[Collection[Any]] = []
        self.places: list[tuple[Get, Any]] = []
        self.tensors: list[Tensor] = []
        self.facts: list[tuple[Callable[[], Any], Any]] = []

    def note_attributes(self, owner: Any) -> None:
        """Notes the class of an object, its dict of attributes, and what is in that."""
        self.holders.append(owner)
        self.note_dict(vars(owner))

    def note_dict(self, items: dict[Any, Any]) -> None:
        """Notes the keys and the values in a dict, in this order."""
        if type(items) is dict:
            self.sized.append(items)
            self.dicts.append(items)
        else:  # whose order, as that of an `OrderedDict`, may change without a new version
            kind: Any = OrderedDict if isinstance(items, OrderedDict) else dict
            self.note_items(kind.keys(items))
            self.note_items(kind.values(items))

    def note_items(self, items: Collection[Any]) -> None:
        """Notes what is in a list, a set or a view of a dict, in this order."""
        self.sized.append(items)
        self.listed.append(items)

    def note_places(self, get: Get, owner: Any) -> None:
        """Notes what a function gets from an object."""
        self.places.append((get, owner))

    def note_fact(self, get: Callable[[], Any]) -> None:
        """Notes what a function gives: numbers, strings and the like."""
        self.facts.append((get, get()))

    def sharing(self) -> tuple[tuple[int, int], ...]:
        """Which of the tensors stand in several places: the number of each in its later ones, with that of its first.

        A graph takes each tensor from one of its places.
        """
        first: dict[int, int] = {}
        numbers = [first.setdefault(id(tensor), number) for number, tensor in enumerate(self.tensors)]
        return tuple((number, own) for number, own in enumerate(numbers) if own != number)

    def close(self) -> None:
        """Ends the look: what is in all these places now is what has to be there."""
        self.ids = {*map(id, self.sized)}
        self._empty = [items for items in self.sized if not len(items) and not hasattr(items, "__bool__")]
        self.sized = [items for items in self.sized if len(items) or hasattr(items, "__bool__")]
        self._lengths = [*map(len, self.sized)]
        self.listed = [items for items in self.listed if len(items)]
        self.dicts = [items for items in self.dicts if items]
        self._versions, self._contents = [*map(dict_version, self.dicts)], _contents(self.dicts)
        self._found = self._find()
        self.tensors = [*{id(tensor): tensor for tensor in self.tensors}.values()]
        self._strided = [tensor for tensor in self.tensors if tensor.layout is torch.strided]
        self._guards = TensorGuards(*self._strided, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        for tensor in self.tensors:
            if tensor.layout is not torch.strided:
                self.note_fact(partial(_FACTS, tensor))
        self._facts = [fact for _, fact in self.facts]

    def _find(self) -> list[Any]:
        """What counts by its identity: what is in places, items, dicts of attributes."""
        found = [*map(type, self.holders), *map(vars, self.holders), *chain.from_iterable(self.listed)]
        for get, owner in self.places:
            found += get(owner)
        return found

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            if any(self._empty) or [*map(len, self.sized)] != self._lengths:
                return False
            versions, found = [*map(dict_version, self.dicts)], self._find()
            if versions != self._versions:
                if not _are_same(_contents(self.dicts), self._contents):
                    return False
                self._versions = versions
            return (
                _are_same(found, self._found)
                and self._guards.check(*self._strided)
                and [get() for get, _ in self.facts] == self._facts
            )
        except (AttributeError, KeyError, RuntimeError):  # the last one if another thread changes it meanwhile
            return False


def in_a_tuple(getter: Callable[..., Get], *places: Any) -> Get:
    """What gets attributes or items in a tuple, the first one twice: of a single one there would be no tuple."""
    return getter(*places, places[0])


def is_kind_of_dict(mapping: Any) -> bool:
    """Whether it is a dict of another class, whose `__getitem__` may change it, as that of a `defaultdict` does."""
    return isinstance(mapping, dict) and type(mapping) is not dict


def plain_items(keys: Sequence[Any]) -> Get:
    """What gets items of a dict without a method of its class."""
    return lambda held: [dict.get(held, key) for key in keys]


def _contents(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """The keys and values of dicts."""
    return [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]


def _are_same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(found) == len(wanted) and all(map(is_, found, wanted))
