"""Values taken apart into leaves, dataclasses and mappings that torch's trees do not open included, and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType, MappingProxyType
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

IsLeaf = Callable[[Any], bool] | None
_LEAF = tree_flatten(None)[1]
_EXAMPLES: Any = iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), reversed([]), reversed(())
_ITERATORS = {GeneratorType, map, filter, zip, enumerate, *map(type, _EXAMPLES)}


def listed(argument: Any) -> Any:
    """An argument; what a generator or an iterator gives, as a list, for a forward that may run several times."""
    return [*argument] if type(argument) in _ITERATORS else argument


def leaves_of(value: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a value, those inside of such objects included."""
    parts = tree_leaves(value, is_leaf=is_leaf)
    return [leaf for part in parts for leaf in (_within(part, is_leaf) if holds_tensors(part) else (part,))]


def rebuilt(value: Any, leaves: Iterator[Any], is_leaf: IsLeaf = None) -> Any:
    """A value like this one with other leaves."""
    parts, structure = tree_flatten(value, is_leaf=is_leaf)
    others = [_filled(part, leaves, is_leaf) if holds_tensors(part) else next(leaves) for part in parts]
    return tree_unflatten(others, structure)


class Opened:
    """A value as a node of torch's trees, which goes on in the dataclasses, and users' lists and dicts, in it.

    To torch's trees these are leaves otherwise, and stay so for everybody else. Where a tree is made again, there is
    the value with other leaves; or, if it `stays` open, a node for that. Structures are equal where the value's class
    and the names in it are.
    """

    def __init__(self, value: Any, *, stays: bool = False) -> None:
        self.value, self.stays = value, stays

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opened) or type(self.value) is not type(other.value):
            return False
        return _names(self.value) == _names(other.value)

    __hash__ = None  # type: ignore[assignment]

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """What there is in its place in a tree with other leaves."""
        value = rebuilt(self.value, iter(leaves))
        return Opened(value, stays=True) if self.stays else value


register_pytree_node(Opened, lambda node: (leaves_of(node.value), node), lambda leaves, node: node.with_leaves(leaves))


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value, and what makes it of them; dataclasses and users' lists and dicts are taken apart, too."""
    if isinstance(value, Tensor):  # as most results are
        return [value], _LEAF
    leaves, structure = tree_flatten(value)
    if not any(map(_is_holder, leaves)):
        return leaves, structure
    return tree_flatten(tree_map(lambda leaf: Opened(leaf) if _is_holder(leaf) else leaf, value))


def outline(value: Any, *, flags: bool = True) -> Any:
    """What stands where in arguments, by names and classes; of `flags`, which are no items of a dict, what they are."""
    if isinstance(value, Opened):
        value = value.value
    if isinstance(value, tuple | list):
        return tuple(outline(item, flags=flags) for item in value)
    if isinstance(value, Tensor):
        return Tensor
    if holds_tensors(value) or isinstance(value, dict):
        return tuple((name, outline(_get(value, name), flags=False)) for name in _names(value))
    return value if flags and isinstance(value, bool | str) else type(value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among the leaves of a value."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def is_packed(part: Any) -> bool:
    """Whether it is a packed sequence, which to torch's trees is a tuple."""
    return isinstance(part, PackedSequence)


def holds_tensors(part: Any) -> bool:
    """Whether a leaf of torch's trees is such an object, with tensors in it."""
    if isinstance(part, Tensor) or not _is_holder(part):
        return False
    return any(isinstance(leaf, Tensor) for leaf in _within(part))


def _within(holder: Any, is_leaf: IsLeaf = None) -> Iterator[Any]:
    for name in _names(holder):
        yield from leaves_of(_get(holder, name), is_leaf)


def _filled(holder: Any, leaves: Iterator[Any], is_leaf: IsLeaf) -> Any:
    other = copy.copy(holder)
    for name in _names(holder):
        value = rebuilt(_get(holder, name), leaves, is_leaf)
        if _has_items(other):
            other[name] = value
        else:
            object.__setattr__(other, name, value)  # it may be frozen
    return other


def _is_holder(part: Any) -> bool:
    """Whether a leaf of torch's trees is an object that can be taken apart."""
    return _has_items(part) or is_record(part)


def _has_items(part: Any) -> bool:
    return isinstance(part, dict | UserDict | list)


def has_dict(value: Any) -> bool:
    """Whether an object has a dict of attributes, not only a `__getattr__` that gives something for each name."""
    try:
        # not `object`'s: a variable of each thread, `threading.local`, has a way of its own
        return isinstance(cast(Any, type(value)).__getattribute__(value, "__dict__"), dict | MappingProxyType)
    except AttributeError:
        return False


def is_record(part: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(part) and not isinstance(part, type)


def names_in_record(record: Any) -> list[str]:
    """The names of its fields, as far as they are set, and of its other attributes."""
    fields = [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]
    return [*dict.fromkeys((*fields, *(vars(record) if has_dict(record) else ())))]


def _names(holder: Any) -> list[Any]:
    """The keys of a mapping; the places of a list; the names in a dataclass."""
    if isinstance(holder, list):
        return [*range(len(holder))]
    return [*holder] if _has_items(holder) else names_in_record(holder)


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if _has_items(holder) else getattr(holder, name)
