"""Keys for the values that a function refers to by names."""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import LIBRARIES

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
MOST_ITEMS = 64  # of a list or a dict; a longer one counts by its identity
_WHOLE = Tensor | nn.Module | torch.optim.Optimizer | FunctionType  # what counts by its identity, whatever it holds
_NOT_THE_USERS = (*LIBRARIES, *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")), "<")


def by_identity(value: Any) -> Hashable:
    """A key that is equal for the same object alone, and holds it, so that its id stays its own."""
    kind: Any = type(value)
    return value if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__ else Identity(value)


class Identity:
    """An object whose class says itself what it is equal to, as equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class StepValues:
    """The values that a step refers to by names: variables of enclosing functions, globals, attributes of its object.

    The same for the user's functions and methods that it names. Numbers and strings count by their values; so do those
    in lists, and those that these functions name in a dict or an object; anything else counts by its identity.

    Attributes:
        owners: The attributes of the step's objects.
        cells: The variables of enclosing functions.
        globals: The global namespaces, each with a name in it.
        functions: The functions that were looked at.
        names: The names in them, those of attributes and keys included.
        changing: The lists, dicts and objects that the step changes itself, by their ids.
        places: Where other functions may be found by these names: what objects and modules have, by their ids.
    """

    def __init__(self, step: Any) -> None:
        self.owners: list[dict[str, Any]] = []
        self.cells: list[CellType] = []
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.functions: dict[FunctionType, None] = {}
        self.names: frozenset[str] = frozenset()
        self.changing: dict[int, Any] = {}
        self.places: dict[int, list[Mapping[str, Any]]] = {}
        while step is not None:
            self._look(step)
            inner = step.func if isinstance(step, partial) else getattr(step, "__func__", None)
            step = inner or getattr(step, "__wrapped__", None)
        known = -1
        while known < len(self.functions):  # a function may be an object's that was met before its name
            known = len(self.functions)
            for namespaces in list(self.places.values()):
                self._read_named(namespaces)

    def _look(self, step: Any) -> None:
        if isinstance(step, FunctionType):
            self._read(step)
        for owner in (step, getattr(step, "__self__", None)):
            if not isinstance(owner, FunctionType | partial) and hasattr(owner, "__dict__"):
                self.owners.append(vars(owner))
                self._follow(owner)

    def _read(self, function: FunctionType) -> None:
        if function in self.functions:
            return
        self.functions[function] = None
        self.names |= _words(function.__code__)
        names, cells = _names(function.__code__), function.__closure__ or ()
        self.cells += cells
        self.globals += [(function.__globals__, name) for name in names]
        for value in [*map(_content, cells), *map(function.__globals__.get, names)]:
            self._follow(value)

    def _follow(self, value: Any) -> None:
        """Reads the user's function that a value is; notes an object or a module, where there may be others."""
        if isinstance(value, MethodType):
            self._follow(value.__self__)
            value = value.__func__
        if isinstance(value, FunctionType):
            if not value.__code__.co_filename.startswith(_NOT_THE_USERS):
                self._read(value)
        elif isinstance(value, ModuleType):
            if _is_the_users(value):
                self.places[id(value)] = [vars(value)]
        elif not isinstance(value, nn.Module | Tensor | type):
            of_classes = [vars(base) for base in type(value).__mro__]
            self.places[id(value)] = [getattr(value, "__dict__", {}), *of_classes]

    def _read_named(self, namespaces: Iterable[Mapping[str, Any]]) -> None:
        for namespace in namespaces:
            for value in [namespace[name] for name in self.names if name in namespace]:
                if isinstance(value, FunctionType):
                    self._follow(value)

    def __call__(self) -> Hashable:
        """A key for their values at this moment."""
        return tuple(
            by_identity(value) if id(value) in self.changing else key_of(value, self.names) for value in self.now()
        )

    def now(self) -> list[Any]:
        """Their values at this moment."""
        try:
            values = [cell.cell_contents for cell in self.cells]
        except ValueError:  # one is not filled yet
            values = [_content(cell) for cell in self.cells]
        values += [namespace.get(name) for namespace, name in self.globals]
        for owner in self.owners:
            values += owner.values()
        for function in self.functions:
            values += function.__defaults__ or ()
        return values

    @contextmanager
    def noting_changes(self) -> Iterator[None]:
        """Notes what the step itself changes, such as a list of losses: from now on it counts by its identity."""
        held = [value for value in self.now() if type(value) not in PLAIN and id(value) not in self.changing]
        before = [key_of(value, self.names) for value in held]
        yield
        after = [key_of(value, self.names) for value in held]
        self.changing |= {id(v): v for v, old, new in zip(held, before, after, strict=True) if old != new}


def key_of(value: Any, names: Collection[str], depth: int = 3) -> Hashable:
    """A key for a value, and for what is named in it.

    Args:
        value: The value.
        names: The names of keys and attributes that count.
        depth: How far to look into it.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if depth == 0 or isinstance(value, _WHOLE):
        return by_identity(value)
    if kind in (list, tuple) and len(value) <= MOST_ITEMS:
        return kind, tuple(key_of(item, names, depth - 1) for item in value)
    within: Any = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if within is None or (isinstance(value, ModuleType) and not _is_the_users(value)):
        return by_identity(value)
    fewer, more = (names, within) if len(names) < len(within) else (within, names)
    found = [name for name in fewer if name in more]
    return by_identity(value), tuple((name, key_of(within[name], names, depth - 1)) for name in found)


def is_fixed(value: Any) -> bool:
    """Whether `key_of` is the same at any time for the same object, as nothing in it counts that may change."""
    if type(value) is tuple:
        return all(map(is_fixed, value))
    if isinstance(value, ModuleType):
        return not _is_the_users(value)
    is_known = type(value) in PLAIN or isinstance(value, _WHOLE)
    return is_known or not (isinstance(value, list | dict) or hasattr(value, "__dict__"))


@cache
def names_in_class(kind: Any) -> frozenset[str]:
    """The names in the methods of a class that are the user's, or of another library."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    codes = [value.__code__ for value in values if isinstance(value, FunctionType)]
    return frozenset().union(*(_words(code) for code in codes if not code.co_filename.startswith(LIBRARIES)))


@cache
def _is_the_users(module: ModuleType) -> bool:
    return not (getattr(module, "__file__", None) or "<").startswith(_NOT_THE_USERS)


def _names(code: CodeType) -> list[str]:
    """The names in a function, and in the functions within it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _words(code: CodeType) -> frozenset[str]:
    """The names in a function, and the strings, which may be keys."""
    constants = [each for each in code.co_consts if isinstance(each, str)]
    inner = [word for each in code.co_consts if isinstance(each, CodeType) for word in _words(each)]
    return frozenset((*code.co_names, *constants, *inner))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
