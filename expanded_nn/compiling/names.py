"""What the functions of a step refer to by names: variables, attributes, items of a dict."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, astuple, fields
from functools import cache, partial
from importlib.util import resolve_name
from operator import attrgetter, getitem, itemgetter, methodcaller
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expanded_nn._errors import LIBRARIES, MADE_BY_LIBRARIES, NOT_THE_USERS, is_ours
from expanded_nn.common.bytecode import (
    codes_in,
    computes_keys,
    computes_names,
    constant_keys,
    constant_words,
    global_names,
    imported_names,
    matched_attributes,
    variables_around,
)
from expanded_nn.common.containers import has_dict
from expanded_nn.common.outside import CACHED, NOTHING, Variable, is_of_users, value_in
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.compiling.called import Code, Ran
from expanded_nn.compiling.seen import Seen, plain_items

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device})
_NOT_THE_USERS = *NOT_THE_USERS, *MADE_BY_LIBRARIES

_OF_ANY_MODULE = {*vars(nn.Module()), *OWN_STATE}
_SHARED_NUMBERS = "multiprocessing.sharedctypes"  # whose properties are made by `exec`
_GETTERS: Any = attrgetter | itemgetter | methodcaller
_ENVIRONMENT = os.environ, os.getenv
_OURS = __name__.partition(".")[0]
# The packages of steps: all code in them is the user's, even if they are installed.
_OF_STEPS: set[str] = set()
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", _OURS}
_CODE = attrgetter("__defaults__", "__kwdefaults__", "__code__")
_CONTENT = attrgetter("cell_contents")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# special methods that a step does not call, or that tell it nothing
_NOT_CALLED = {"__init__", "__new__", "__del__", "__repr__", "__setattr__", "__delattr__", "__init_subclass__"}
_TAKE_ANY_ATTRIBUTE = {"vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "eval", "exec"}
_TAKE_ANY_ATTRIBUTE |= {"__getattribute__", "getmembers"}
_TAKE_ANY_ATTRIBUTE |= {"model_dump", "model_dump_json", "model_copy", "to_dict", "_get_kwargs", "deepcopy"}
_SET_ANY_ATTRIBUTE = {"setattr", "delattr", "__setattr__", "__delattr__"}
_WITHOUT_ATTRIBUTES = {"builtins", "typing", "abc"}  # the classes of these modules set none
_TAKE_ANY_ITEM = {"get", "pop", "values", "items", "keys", "copy", "update", "itemgetter", "getitem", "__getitem__"}
_TAKE_ANY_ITEM |= {"setdefault", "popitem", "repr", "dumps", "format_map", "total", "most_common", "elements"}
_TAKE_ANY_ITEM |= {"tree_leaves", "tree_flatten", "tree_iter", "tree_map", "tree_map_only", "apply_to_collection"}
_TAKE_ANY_GLOBAL = {"globals", "eval", "exec"}
_TAKE_ANY_MODULE = {"import_module", "__import__", "modules"}


class Names(NamedTuple):
    """What functions refer to."""

    words: frozenset[str] = frozenset()  # the names in them, and their strings, which may be keys
    any_item: bool = False  # whether they find items by computed keys, as `settings[key]` and `**settings` do
    any_attribute: bool = False  # whether they find attributes by computed names, as `getattr(settings, name)` does

    def joined(self, other: Names) -> Names:
        """What these functions and those refer to; the same object where those add nothing."""
        words = self.words if other.words <= self.words else self.words | other.words
        joined = Names(words, self.any_item or other.any_item, self.any_attribute or other.any_attribute)
        return self if joined == self else joined


_FINDERS: list[tuple[Any, Names]] = [
    *((found, Names(any_attribute=True)) for found in (getattr, hasattr, vars, attrgetter, asdict, astuple, fields)),
    *((found, Names(any_item=True)) for found in (itemgetter, getitem)),
]


_STATIC = staticmethod, classmethod
_HOLD_ANY = *_STATIC, property  # members of a class that may hold what is no function of Python's


class Place(NamedTuple):
    """The namespaces of an object, in which functions may be found by names."""

    namespaces: list[Mapping[str, Any]]
    read_for: Names = Names()  # the names that were looked for there already


class Referred:
    """The user's functions that a step may call, and what they refer to by names.

    They are the step itself, the functions and methods that they name, and the methods that Python calls without a
    name, such as `__getitem__`.

    Attributes:
        owners: The step's objects, and the partial functions that it is made of.
        cells: The variables of enclosing functions.
        globals: The global namespaces, each with a name in it.
        imported: The modules that the functions import themselves, by their full names.
        hooks: The hooks of modules and parameters, by their ids.
        functions: The functions, each with the code that was read, as it may be replaced.
        names: What they refer to.
        places: The namespaces in which these names may find more functions, by the id of the object that has them.
        classes: The user's classes that were met.
        ran: The code that has run, with the functions that nothing here names.
    """

    def __init__(self, step: Any) -> None:
        self.owners: list[Any] = []
        self.cells: list[CellType] = []
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.imported: list[str] = []
        self.hooks: dict[int, Any] = {}
        self.functions: dict[FunctionType, CodeType] = {}
        self.names = Names()
        self.places: dict[int, Place] = {}
        self.classes: dict[type, None] = {}
        self.ran = Ran()
        while step is not None:
            _note_package(step)
            self._look(step)
            if isinstance(step, partial):
                for value in (*step.args, *step.keywords.values()):
                    self._follow(value)
            step = step.func if isinstance(step, partial) else getattr(step, "__func__", None)
        self._read_all()

    def add(self, value: Any) -> None:
        """Adds an object that is an argument of the step, or a function or class that a look at values has met."""
        if isinstance(value, FunctionType):
            if value not in self.functions:
                self._follow(value)
                self._read_all()
        elif id(value) not in self.places:
            self._note_places(value)
            self._read_all()

    def add_called(self, codes: Iterable[Code]) -> None:
        """Adds the user's functions that have run, given by their code and its global namespace.

        Those that nothing names are what only a library's code calls, or Python itself, or what is found by a computed
        name. That others may take their places is seen where they are kept.
        """
        codes = list(codes)
        # what has run may have added to them
        self.places = {key: Place(place.namespaces) for key, place in self.places.items()}
        self.ran.note(code for code, _ in codes)
        known = {id(code) for read in self.functions.values() for code in codes_in(read)}
        unnamed = []
        for code, namespace in codes:
            module = str(namespace.get("__name__", ""))
            if id(code) not in known and (_is_users_code(code, module) or _is_of_record(code, module)):
                unnamed.append((code, namespace))
        functions, others = self.ran.add_unnamed(unnamed)
        for function in functions:
            self._read(function)
            self._follow(function)
        for code, namespace in others:
            self._read_code(code, namespace)
        self._read_all()

    def read_changed(self) -> None:
        """Reads the functions whose code was replaced, as a notebook's reloading does."""
        for function, code in list(self.functions.items()):
            if function.__code__ is not code:
                self._read(function)
                self._read_all()

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Adds modules that the step calls: their hooks, and the functions of the user's classes."""
        modules = [*modules]
        for kind in dict.fromkeys(map(type, modules)):
            own_classes = list(filter(is_the_users, kind.__mro__))
            if own_classes:
                self._note_places(kind)
            for base in own_classes:
                self._follow(_function_behind(vars(base).get("forward")))
        for module in modules:
            registries = [getattr(module, name) for name in HOOKS]
            for parameter in module._parameters.values():
                if parameter is not None:
                    registries += [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
            hooks = (hook for registry in registries for hook in registry.values())
            self.hooks |= {id(hook): hook for hook in hooks if not is_ours(type(hook))}
        self._read_all()

    def _read_all(self) -> None:
        """Reads the functions that those read so far name, until there are no more."""
        names: Names | None = None
        while names is not self.names:  # a name may be met after the object that has a function of that name
            names, added = self.names, dict[int, frozenset[str]]()
            for key, place in list(self.places.items()):
                if place.read_for is names or place.read_for.any_attribute:  # then all was read
                    continue
                if id(place.read_for) not in added:
                    added[id(place.read_for)] = names.words - place.read_for.words
                self._read_named(place.namespaces, added[id(place.read_for)], any_attribute=names.any_attribute)
                self.places[key] = place._replace(read_for=names)

    def _look(self, step: Any) -> None:
        if isinstance(step, FunctionType):
            self._read(step)
        for owner in (step, getattr(step, "__self__", None)):
            if not isinstance(owner, FunctionType | MethodType) and has_dict(owner):
                self.owners.append(owner)
                self._note_places(owner)

    def _read(self, function: FunctionType) -> None:
        if self.functions.get(function) is function.__code__:
            return
        self.functions[function] = function.__code__
        self.cells += function.__closure__ or ()
        self._read_code(function.__code__, function.__globals__)
        for value in variables_around(function):
            self._follow(value)

    def _read_code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.names = self.names.joined(_names_in(code))
        names = list(global_names(code))
        names += constants(namespace) if not _TAKE_ANY_GLOBAL.isdisjoint(names) else []
        imported = _imported_by(code, namespace)
        self.globals += [(namespace, name) for name in names]
        self.imported += imported
        for value in [*map(namespace.get, names), *map(sys.modules.get, imported)]:
            self._follow(value)

    def _follow(self, value: Any) -> None:
        """Reads a value that is a user's function; of another, notes where it may have functions."""
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, dict):
            self.names = self.names.joined(Names(any_item=True))
        if isinstance(value, _GETTERS):
            self.names = self.names.joined(_names_of_getter(value))
        if any(value is own for own in _ENVIRONMENT):
            self.names = self.names.joined(Names(frozenset({"environ"})))
        for own, names in _FINDERS:  # under whatever name
            if value is own:
                self.names = self.names.joined(names)
        if isinstance(value, MethodType):
            self._follow(value.__self__)
            value = value.__func__
        if isinstance(value, partial):
            value = value.func
        if isinstance(value, FunctionType | CACHED):
            if isinstance(value, FunctionType) and is_written_by_users(value):
                self._read(value)
            if "__wrapped__" in vars(value):  # by a decorator, such as torch.no_grad()
                self._follow(vars(value)["__wrapped__"])
        elif isinstance(value, ModuleType):
            if is_the_users(value):
                self.places[id(value)] = Place([vars(value)])
        elif isinstance(value, nn.Module):
            for kind in dict.fromkeys(map(type, value.modules())):
                self._note_places(kind)
        elif not isinstance(value, Tensor):
            self._note_places(value)

    def _note_places(self, value: Any) -> None:
        """Notes where an object or a class may have functions, and reads those that Python calls without a name."""
        if id(value) in self.places:
            return
        classes = (*(value.__mro__ if isinstance(value, type) else ()), *type(value).__mro__)
        of_classes = [vars(base) for base in classes]
        self.places[id(value)] = Place([vars(value) if has_dict(value) else {}, *of_classes])
        self.classes.update(dict.fromkeys(filter(is_the_users, classes)))
        for namespace in of_classes:
            for name in filter(_is_special, namespace):
                self._follow(_function_behind(namespace[name]))

    def _reads_environment(self) -> bool:
        return not self.names.words.isdisjoint({"environ", "getenv"})

    def members(self) -> Iterator[tuple[type, list[str]]]:
        """The user's classes, each with the names of the members that count."""
        for cls in self.classes:
            yield cls, [name for name, member in vars(cls).items() if self._counts(name, member)]

    def _counts(self, name: str, member: Any) -> bool:
        is_function = _function_behind(member) is not None
        if name.startswith("__"):
            return is_function and _is_special(name)
        is_found = self.names.any_attribute or name in self.names.words
        return is_found and (is_function or isinstance(member, _HOLD_ANY) or not hasattr(type(member), "__get__"))

    def _read_named(self, namespaces: Iterable[Mapping[str, Any]], names: Set[str], *, any_attribute: bool) -> None:
        for namespace in namespaces:
            held = list(namespace.items())
            for member in [member for name, member in held if any_attribute or name in names]:
                behind = _function_behind(member)
                self._follow(member.__func__ if behind is None and isinstance(member, _STATIC) else behind)

    def names_of(self, kinds: Iterable[type]) -> dict[type, Names]:
        """For each class of modules, the names whose attributes count: those in its methods and in the functions."""
        return {kind: names_in_class(kind).joined(self.names) for kind in kinds}

    def reads_item(self, key: Any) -> bool:
        """Whether the functions read the item of a key, and not only add to it."""
        return any(key in _keys_in(function.__code__) for function in self.functions)

    def variables(self) -> list[Variable]:
        """The variables of enclosing functions and the global ones at this moment."""
        of_cells = [Variable.of(cell, "cell_contents") for cell in self.cells]
        return of_cells + [Variable.of(namespace, name) for namespace, name in self.globals]

    def may_find(self, cls: Any) -> Callable[[str], bool]:
        """Whether what has run may find an attribute, by its name, of objects of a class.

        The name stands in a function of the user's that has run; or, where a library has made the class or a base of
        it, in any code that has run, and if a method of that has run, it may find all. What another thread has to
        itself, such as the batches that a loader keeps ready, is so left out.
        """
        words, libraries = self.names.words, [base for base in cls.__mro__ if not is_the_users(base)]
        members = [_function_behind(member) for base in libraries for member in vars(base).values()]
        by_computed_name = self.names.any_attribute or not words.isdisjoint(_SET_ANY_ATTRIBUTE)
        if (by_computed_name and is_the_users(cls)) or any(map(self.ran.has, members)):
            return lambda name: True
        if all(base.__module__ in _WITHOUT_ATTRIBUTES for base in libraries):
            return lambda name: name in words
        return lambda name: name in words or name in self.ran.names

    def reachable(self) -> list[Any]:
        """What the step can reach: the values of its names, its objects, the user's classes and functions."""
        return [*self.values(), *self.owners, *self.classes, *self.functions]

    def values(self) -> list[Any]:
        """The present values of variables, arguments of partial functions, hooks, modules and defaults."""
        values = [variable.value for variable in self.variables() if variable.value is not NOTHING]
        values += [owner for owner in self.owners if isinstance(owner, partial)]
        values += [*self.hooks.values(), *map(sys.modules.get, self.imported)]
        values += [dict.get(holder, key) for holder, key in self.ran.places]
        for function in self.functions:
            values += (function.__code__, *(function.__defaults__ or ()))
            values += (function.__kwdefaults__ or {}).values()
        if self._reads_environment():
            values.append(repr(os.environ))
        return values

    def note(self, seen: Seen) -> None:
        """Notes the places of these values."""
        seen.note_places(_contents, self.cells)
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for namespace, name in self.globals:
            names.setdefault(id(namespace), (namespace, []))[1].append(name)
        for namespace, own_names in names.values():
            seen.note_places(plain_items(own_names), namespace)
        seen.note_places(plain_items(self.imported), sys.modules)
        for holder, key in self.ran.places:
            seen.note_places(plain_items([key]), holder)
        for function in self.functions:
            seen.note_places(_CODE, function)
        for own_keywords in filter(None, [function.__kwdefaults__ for function in self.functions]):
            seen.note_items(own_keywords.values())
        if self._reads_environment():
            seen.note_fact(partial(repr, os.environ))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _NOT_CALLED


def _function_behind(member: Any) -> Any:
    """The function behind a member of a class, as that of a property; `None` if there is none."""
    for name in ("fget", "func", "__func__"):
        with suppress(Exception):  # a `__getattr__` of the user's may raise anything
            member = getattr(member, name, member)
    if not isinstance(member, FunctionType | CACHED | _GETTERS):
        member = getattr(type(member), "__get__", None)
    return member if isinstance(member, FunctionType | CACHED | _GETTERS) else None


def is_written_by_users(value: Any) -> bool:
    """Whether a value is a function of the user's, and of no library."""
    if not isinstance(value, FunctionType):
        return False
    return _is_users_code(value.__code__, value.__module__)


def _is_users_code(code: CodeType, module: str | None) -> bool:
    if code.co_filename == "<string>":  # of `python -c` or `exec`, where it is no method that a dataclass has made
        is_made = _is_made_by_dataclass(code) or code.co_name == "__new__"
        of_module = sys.modules.get(module or "")
        return not is_made and (_is_the_users(of_module) if of_module else not (module or "").startswith("namedtuple_"))
    return not code.co_filename.startswith(_NOT_THE_USERS) or _package_of(module) in _OF_STEPS


def _is_of_record(code: CodeType, module: str) -> bool:
    """Whether it is a method that a dataclass of the user's has got, which reads the fields, as `__eq__` does."""
    is_reading = code.co_name not in ("__init__", "__setattr__", "__delattr__")
    is_made = code.co_filename == "<string>" and _is_made_by_dataclass(code)
    return is_made and is_reading and module in sys.modules and _is_the_users(sys.modules[module])


def _is_made_by_dataclass(code: CodeType) -> bool:
    return "__create_fn__" in getattr(code, "co_qualname", code.co_name)


def _package_of(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _note_package(step: Any) -> None:
    """Notes the package of a step, whose code is the user's, installed or not."""
    package = _package_of(getattr(step, "__module__", None))
    if package not in _OF_STEPS | _LIBRARIES:
        _OF_STEPS.add(package)
        _is_the_users.cache_clear()


def constants(namespace: Mapping[str, Any]) -> list[str]:
    """The names of numbers, strings and the like in a namespace."""
    return [name for name, item in [*namespace.items()] if type(item) in PLAIN]


def set_by_users(module: nn.Module) -> list[str]:
    """The names of the attributes of a module that are neither torch's nor this library's."""
    return [name for name in vars(module) if name not in _OF_ANY_MODULE]


@cache
def names_in_class(cls: Any) -> Names:
    """What the methods of a class refer to, but for those of torch and of this library."""
    names = Names()
    for member in (member for base in cls.__mro__ for member in vars(base).values()):
        if isinstance(member, FunctionType) and not member.__code__.co_filename.startswith(LIBRARIES):
            names = names.joined(_names_in(member.__code__))
    return names


def is_the_users(value: ModuleType | type) -> bool:
    """Whether a module or a class is the user's, and of no library."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return module is None or _is_the_users(module)


@cache
def _is_the_users(module: ModuleType) -> bool:
    return is_of_users(module) or _package_of(module.__name__) in _OF_STEPS


def _imported_by(code: CodeType, namespace: Mapping[str, Any]) -> list[str]:
    """The modules that code imports itself, by their full names."""
    package = namespace.get("__package__") or ""
    names = imported_names(code)
    words = _names_in(code).words
    names += [] if words.isdisjoint(_TAKE_ANY_MODULE) else [word for word in words if word in sys.modules]
    return [resolve_name(name, package) for name in names if package or not name.startswith(".")]


@cache
def _names_in(code: CodeType) -> Names:
    words = {word for inner in codes_in(code) for word in (*inner.co_names, *constant_words(inner))}
    matched, by_place = matched_attributes(code)
    words |= matched
    by_key = not words.isdisjoint(_TAKE_ANY_ITEM) or computes_keys(code)
    by_name = by_place or computes_names(code) or not words.isdisjoint(_TAKE_ANY_ATTRIBUTE)
    return Names(frozenset(words), by_key, by_name)


def _names_of_getter(getter: Any) -> Names:
    """What a function of the module `operator` gets: an attribute of an attribute, items by keys, a method."""
    words = [word for word in getter.__reduce__()[1] if isinstance(word, str)]
    return Names(frozenset(part for word in words for part in (word, *word.split("."))))


@cache
def _keys_in(code: CodeType) -> frozenset[Any]:
    """The keys of items that code finds; by `get` it may be any string in it."""
    keys = frozenset(constant_keys(code))
    words = _names_in(code).words
    return keys | words if "get" in words else keys


def _contents(cells: Sequence[CellType]) -> list[Any]:
    try:
        return [*map(_CONTENT, cells)]
    except ValueError:  # one is not filled yet
        return [value_in(cell, "cell_contents") for cell in cells]


@cache
def finds_attributes(cls: Any) -> bool:
    """Whether a class has methods that find attributes or items, which it may keep under other names."""
    finds = any(hasattr(cls, name) for name in ("__getattr__", "__getitem__"))
    return finds or cls.__module__ == _SHARED_NUMBERS or cls.__getattribute__ is not object.__getattribute__


@cache
def names_in_library(cls: type) -> Names:
    """What the methods that a class has from libraries refer to."""
    names = Names()
    for base in cls.__mro__:
        names = names if is_the_users(base) else names.joined(names_in_class(base))
    return names
