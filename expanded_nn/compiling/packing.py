"""Taking a value apart into the tensors in it, and making it again from other tensors."""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from operator import itemgetter, setitem
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from expanded_nn._errors import is_ours
from expanded_nn.common.batch import contents
from expanded_nn.common.containers import has_dict, is_record, names_in_record
from expanded_nn.common.outside import NOTHING
from expanded_nn.common.traced import OnlyEager
from expanded_nn.compiling.names import is_the_users
from expanded_nn.core.kronecker import EigenFactors, KroneckerFactors
from expanded_nn.core.terms import Term
from expanded_nn.factored import FactoredTensor
from expanded_nn.grads import PerSampleGrads
from expanded_nn.rows.cell import Cell, Guarded

MOST = 10_000  # objects that are looked into for tensors
TENSORS = "factors", "shared"  # of a term
WITH_COUNT = KroneckerFactors, EigenFactors  # their count is another one at each call
Parts = Sequence[Any]  # tensors, and symbolic sizes in a graph for changing sizes
Remake = Callable[[Parts], Any]


class Given(NamedTuple):
    """What is known of the arguments of a call.

    Attributes:
        counts: By the ids of factors, tensors that take the places of their counts.
        objects: The ids of those that are the same ones at each call, whatever they hold.
    """

    counts: Mapping[int, Tensor] = {}
    objects: frozenset[int] = frozenset()


_NOTHING_GIVEN = Given()


def packed(value: Any, parts: list[Any], given: Given = _NOTHING_GIVEN) -> Remake:
    """Appends the tensors within a value to `parts`; returns a function that makes the value from new parts.

    Tensors are looked for in tuples, lists, dicts, dataclasses, `PerSampleGrads` and `KroneckerFactors`; factored rows
    are taken apart into their factors.

    Raises:
        OnlyEager: If the shape of a parameter's rows has a symbolic size.
    """
    if isinstance(value, FactoredTensor):
        return _packed_rows(value, parts)
    if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        index = len(parts)
        parts.append(value)
        return itemgetter(index)
    if isinstance(value, PerSampleGrads):
        rows = packed(dict(value), parts)
        return lambda new_parts: PerSampleGrads(rows(new_parts))
    cls: Any = type(value)
    if isinstance(value, WITH_COUNT):
        items = [packed(item, parts) for item in value[:-1]]
        items.append(_packed_count(given.counts.get(id(value), value.count), parts))
        return lambda new_parts: cls(*(item(new_parts) for item in items))
    if isinstance(value, list | tuple):
        if not hasattr(value, "_fields") and _is_made_in_another_way(value):
            raise OnlyEager(f"it returns a {cls.__name__}, with attributes or a constructor of its own (return a list)")
        items = [packed(item, parts, given) for item in value]
        if hasattr(value, "_fields"):
            return lambda new_parts: cls(*(item(new_parts) for item in items))
        return lambda new_parts: cls(item(new_parts) for item in items)
    if has_items(value):
        return _packed_items(value, parts, given)
    if isinstance(value, Iterator):
        raise OnlyEager(
            f"it returns a {type(value).__name__}, which ends after the first call (return a list or a tuple)"
        )
    is_known = id(value) in given.objects or is_ours(cls) or isinstance(value, nn.Module)
    if not is_known and _holds_tensors(value):
        raise OnlyEager(
            f"it returns a {type(value).__name__}, or sets it on a module, that holds tensors or sizes (take these, in "
            "tuples, lists, dicts or dataclasses)"
        )
    return lambda new_parts: value


def packed_items(container: Any, items: Mapping[Any, Any], parts: list[Any]) -> dict[Any, Remake]:
    """Packs new items of a container."""
    pack = _packed_count if isinstance(container, KroneckerFactors) else packed
    return {key: pack(item, parts) for key, item in items.items()}


def _packed_count(count: Any, parts: list[Any]) -> Remake:
    """Packs a count of factors; it is a tensor in the graph, and a number again in what is remade."""
    remake = packed(count, parts)

    def remake_number(new_parts: Parts) -> Any:
        number = remake(new_parts)
        return int(number) if isinstance(number, Tensor) and not isinstance(number, FakeTensor) else number

    return remake_number


def _holds_tensors(value: Any) -> bool:
    """Whether tensors are in a value, or what it refers to holds tensors of a trace, as a set or a function may."""
    if any(isinstance(part, Tensor) for part in contents(value, closed=(Optimizer,))):
        return True
    seen, left = {id(value)}, [value]
    while left and len(seen) < MOST:
        part = left.pop()
        if isinstance(part, FakeTensor | FactoredTensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if isinstance(part, Tensor | nn.Module | type | ModuleType | FrameType | CodeType):
            continue
        is_function = isinstance(part, FunctionType)  # it refers to all globals
        referents = [part.__closure__, part.__defaults__] if is_function else gc.get_referents(part)
        left += [referent for referent in referents if id(referent) not in seen]
        seen.update(map(id, referents))
    return False


def containers(value: Any) -> Iterator[Any]:
    """The lists, dicts and dataclasses within a value, which a step may change, in a fixed order."""
    if not has_items(value):
        return
    if not isinstance(value, tuple):
        yield value
    for item in list(items_of(value).values()):
        yield from containers(item)


def _is_made_in_another_way(value: Any) -> bool:
    """Whether a list or tuple of the user's class cannot be made from its items alone."""
    cls: Any = type(value)
    makes = cls.__new__ not in (list.__new__, tuple.__new__) or cls.__init__ not in (list.__init__, tuple.__init__)
    return is_the_users(cls) and (makes or (has_dict(value) and bool(vars(value))))


def has_items(value: Any) -> bool:
    """Whether it is a list, a tuple, a mapping, a dataclass or Kronecker factors."""
    return isinstance(value, list | tuple | Mapping | KroneckerFactors) or is_record(value)


def items_of(container: Any) -> dict[Any, Any]:
    """What a list, a tuple, a mapping, a dataclass or Kronecker factors hold, by index, key or name.

    What waits in Kronecker factors is added up.
    """
    if isinstance(container, Mapping):
        return dict(container)
    if isinstance(container, KroneckerFactors):
        return {"A": container.A, "G": container.G, "count": container.count}
    if isinstance(container, list | tuple):
        return dict(enumerate(container))
    return {name: getattr(container, name) for name in names_in_record(container)}


def attributes_beside_items(container: Any) -> dict[str, Any]:
    """The attributes of a mapping of the user's class that are none of its items; none of what is no such mapping."""
    if type(container) is dict or not isinstance(container, Mapping) or not is_the_users(type(container)):
        return {}
    items, held = dict(container), container.data if isinstance(container, UserDict) else NOTHING
    attributes = vars(container) if has_dict(container) else {}
    return {name: own for name, own in attributes.items() if own is not held and own is not items.get(name, NOTHING)}


def put_items(container: Any, removed: Sequence[Any], new: Mapping[Any, Any]) -> None:
    """Changes a list, a dict, a dataclass or the count of Kronecker factors as a step has changed it."""
    if isinstance(container, list):
        if removed:
            del container[min(removed) :]
        for index, value in new.items():
            container[index : index + 1] = [value]
    elif isinstance(container, MutableMapping):
        for key in removed:
            container.pop(key, None)
        container.update(new)
    else:  # a frozen dataclass's own methods refuse
        for name in removed:
            object.__delattr__(container, name)
        for name, value in new.items():
            object.__setattr__(container, name, value)


def _packed_items(value: Any, parts: list[Any], given: Given) -> Remake:
    """Packs what a mapping or a dataclass holds."""
    if isinstance(value, Mapping):
        _refuse_more_than_items(value)
    put = setitem if isinstance(value, Mapping) else object.__setattr__  # a frozen dataclass's own refuses
    remakes = {key: packed(item, parts, given) for key, item in items_of(value).items()}
    emptied = copy.copy(value)  # so that nothing of the trace lives on
    for key in remakes:
        put(emptied, key, None)

    def remake(new_parts: Parts) -> Any:
        result = copy.copy(emptied)
        for key, remake_item in remakes.items():
            put(result, key, remake_item(new_parts))
        return result

    return remake


def _refuse_more_than_items(mapping: Mapping[Any, Any]) -> None:
    """Gives a trace up where a copy of a mapping would not be made of new items alone."""
    kind = type(mapping).__name__
    if not isinstance(mapping, dict | UserDict):
        raise OnlyEager(f"it takes or returns a {kind}, a copy of which may share its items (take a dict)")
    if any(isinstance(part, Tensor) for part in contents([*attributes_beside_items(mapping).values()])):
        raise OnlyEager(f"it takes or returns a {kind}, with tensors in attributes (make them items)")


def _packed_rows(rows: FactoredTensor, parts: list[Any]) -> Remake:
    blocks = [
        (packed(size, parts), [_packed_term(guarded.term, parts) for guarded in terms]) for size, terms in rows.blocks
    ]
    kind, row_shape = rows._cell.kind, tuple(rows.shape[1:])
    _refuse_symbols(kind.row_shape, row_shape)

    def remake(new_parts: Parts) -> FactoredTensor:
        new_blocks = [(size(new_parts), tuple(Guarded.of(term(new_parts)) for term in terms)) for size, terms in blocks]
        return FactoredTensor(Cell(new_blocks, kind), (sum(size for size, _ in new_blocks), *row_shape))

    return remake


def _packed_term(term: Term, parts: list[Any]) -> Callable[[Parts], Term]:
    start, between, stop = accumulate((len(parts), len(term.factors), len(term.shared)))
    parts.extend([*term.factors, *term.shared])
    _refuse_symbols(*(value for name, value in vars(term).items() if isinstance(value, tuple) and name not in TENSORS))
    coefficient, bare = packed(term.coefficient, parts), copy.copy(term)
    bare.factors, bare.shared, bare.coefficient = (), (), 1.0  # so that nothing of the trace lives on

    def remake(new_parts: Parts) -> Term:
        remade = bare.remake(new_parts[start:between], coefficient(new_parts), bare.dtype)
        remade.shared = tuple(new_parts[between:stop])
        return remade

    return remake


def _refuse_symbols(*values: Any) -> None:
    if any(isinstance(size, torch.SymInt) for value in values for size in value):
        raise OnlyEager("the shapes of its parameters' gradients change with the batch")
