"""What forwards keep outside of their modules, as a list of losses in a global variable, and how it is put back."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial, partialmethod
from operator import is_
from threading import local
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from expanded_nn._errors import NOT_THE_USERS, is_ours
from expanded_nn.common.arrays import bytes_of, copied, has_numbers, is_counter, put_numbers
from expanded_nn.common.batch import NUMBERS
from expanded_nn.common.bytecode import codes_in, global_names
from expanded_nn.common.containers import has_dict

CACHED = type(lru_cache(len))
MOST = 10_000  # functions, objects, lists and dicts that are looked into; and items of a list or dict
LISTS = (list, deque)
FILLED_ANEW = (*LISTS, set)
_CONTAINERS = OrderedDict, dict, *FILLED_ANEW
_HOLDERS = *_CONTAINERS, tuple
NAMESPACES = Namespace, SimpleNamespace, local
_WHOLE = Tensor | nn.Module | dict | UserDict | type  # type: ignore[type-arg]
_BEHIND: dict[type, str] = {  # where others than functions have the function that they call
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    cached_property: "func",
    partial: "func",
    partialmethod: "func",
    CACHED: "__wrapped__",
}
_FUNCTIONS: Any = FunctionType, MethodType, *_BEHIND
_OF_PYTHON = {*sys.stdlib_module_names, "numpy"}
_HEAP_TYPE = 1 << 9  # Python's Py_TPFLAGS_HEAPTYPE, which all classes written in Python have
NOTHING = object()  # in place of a value that is not there
HOOKS_OF_TENSOR = "_backward_hooks", "_post_accumulate_grad_hooks"


class Outside:
    """What the user's functions that a forward may call keep outside of modules, as it is now.

    These are the methods of the modules' classes, their forward hooks, and the functions that these name; of classes,
    objects and files of the user's that they name, the methods and functions as well. What they keep is in global
    variables, in variables of enclosing functions, in attributes, in values that arguments have by default, and in
    lists, sets and dicts within these.

    Attributes:
        variables: Each by the id of its owner and its name there.
        containers: Lists, sets and dicts, each with a copy.
        tensors: Those that are found. They stay as they are: `Updates` sees what changes them.
        modules: The modules that were given, and those that are found.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self.modules: dict[nn.Module, None] = {}
        self._seen: set[int] = set()
        self._left: deque[tuple[Any, Iterable[str]]] = deque()  # each with the words of the function that refers to it
        for module in modules:
            self._look_into_module(module)
        while self._left and len(self._seen) < MOST:
            self._look(*self._left.popleft())

    @property
    def kept(self) -> set[int]:
        """The ids of the lists, sets and dicts, which the functions would not find in a copy of them."""
        return {id(container) for container, _ in self.containers}

    def put_back(self) -> None:
        """Gives all that has changed the value and the contents that it had."""
        for variable in self.variables.values():
            variable.put_back()
        for container, before in self.containers:
            put_back(container, before)

    def _look(self, value: Any, words: Iterable[str]) -> None:
        """Looks into a value; what that refers to comes later."""
        inner = _function_behind(value)
        if inner is not None:
            self._left.append((inner, words))
        if isinstance(value, partial):
            self._left += [(each, words) for each in (*value.args, *value.keywords.values())]
        elif isinstance(value, MethodType):
            self._left += [(value.__self__, words), (value.__func__, words)]
        elif isinstance(value, type):
            self._look_into_class(value)
        elif isinstance(value, ModuleType):
            if is_of_users(value):
                self._look_into(vars(value), [word for word in words if word in vars(value)], words)
        elif isinstance(value, nn.Module):
            for member in [member for member in value.modules() if member not in self.modules]:
                self._look_into_module(member)
        elif id(value) in self._seen:
            pass
        elif isinstance(value, Tensor):
            self._seen.add(id(value))
            self.tensors.append(value)
        elif isinstance(value, FunctionType):
            self._seen.add(id(value))
            if not value.__code__.co_filename.startswith(NOT_THE_USERS):
                self._look_into_function(value)
        elif isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            self.containers.append(_with_copy(value))
            if len(value) <= MOST:
                self._left += [(item, words) for item in (value.values() if isinstance(value, dict) else value)]
        elif is_counter(value):
            self._seen.add(id(value))
            self.containers.append(_with_copy(value))
        elif is_users_object(value):
            self._seen.add(id(value))
            self._left.append((vars(value), words))
            self._look_into_class(type(value))

    def _look_into_module(self, module: nn.Module) -> None:
        self.modules[module] = None
        self._left.append((type(module), ()))
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        self._left += [(hook, ()) for hook in hooks]
        for value in vars(module).values():
            functions = value if isinstance(value, list | tuple) else (value,)
            self._left += [(each, ()) for each in functions if isinstance(each, _FUNCTIONS)]

    def _look_into_function(self, function: FunctionType) -> None:
        words = {word for code in codes_in(function.__code__) for word in code.co_names}
        names = [name for name in global_names(function.__code__) if name in function.__globals__]
        self._look_into(function.__globals__, names, words)
        for cell in function.__closure__ or ():
            self._look_into(cell, ["cell_contents"], words)
        by_default = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._left += [(each, words) for each in (vars(function), *by_default)]

    def _look_into_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) in self._seen or not _is_class_of_users(base):
                continue
            self._seen.add(id(base))
            for name, member in [*vars(base).items()]:
                if isinstance(member, _FUNCTIONS):
                    self._left.append((member, ()))
                elif not name.startswith("__") and not hasattr(type(member), "__get__"):
                    self._look_into(base, [name], ())

    def _look_into(self, owner: Any, names: Iterable[str], words: Iterable[str]) -> None:
        for name in names:
            variable = Variable.of(owner, name)
            if variable.value is not NOTHING and (id(owner), name) not in self.variables:
                self.variables[id(owner), name] = variable
                self._left.append((variable.value, words))


def is_users_object(value: Any) -> bool:
    """Whether it is an object with attributes, of a class that is of no library; so a mapping with items in these.

    Those of a namespace are the user's, though its class is not.

    An object with a part in C of a library's, such as a function that numba compiles, is none: its attributes have to
    fit what is in that part.
    """
    is_of_users = type(value) in NAMESPACES or _is_class_of_users(type(value))
    is_one = is_of_users and has_dict(value) and not isinstance(value, _WHOLE)
    return is_one and not any(map(_is_in_c, type(value).__mro__))


def holders_in(values: Iterable[Any], inside: Callable[[nn.Module], Iterable[Any]] | None = None) -> list[Any]:
    """The lists, tuples, sets, dicts, arrays and objects of the user's in some values, and within these, each once.

    With `inside`, also those in what that gives of the modules that are met.
    """
    found: dict[int, Any] = {}
    left = deque(value for value in values if type(value) not in NUMBERS)
    while left and len(found) < MOST:
        value = left.popleft()
        if isinstance(value, UserDict):
            value = value.data
        if id(value) in found:
            continue
        if is_counter(value):
            found[id(value)] = value
        elif isinstance(value, _HOLDERS) or is_users_object(value):
            found[id(value)] = value
            left += _items_in(value)
        elif inside is not None and isinstance(value, nn.Module):
            left += inside(value)
    return [*found.values()]


def _items_in(holder: Any) -> list[Any]:
    """What is in a container or in an object of the user's, but for numbers; nothing of what is long."""
    items = holder if isinstance(holder, _HOLDERS) else vars(holder)
    base = _base_of(items)
    if not 0 < base.__len__(items) <= MOST:
        return []
    held = base.values(items) if isinstance(items, dict) else base.__iter__(items)
    return [item for item in held if type(item) not in NUMBERS]


def kept_in(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The lists, sets, dicts and arrays that values hold, and the dicts of the user's objects, each with a copy."""
    holders = (value for value in holders_in(values) if not isinstance(value, tuple))
    containers = (vars(value) if is_users_object(value) else value for value in holders)
    return list(map(_with_copy, containers))


def _with_copy(container: Any) -> tuple[Any, Any]:
    if has_numbers(container):
        return container, copied(container)
    base = _base_of(container)
    return container, dict(base.items(container)) if isinstance(container, dict) else list(base.__iter__(container))


def _base_of(container: Any) -> Any:
    """The class of Python's that a container is of: the methods of a class of the user's may do something else."""
    cls = type(container)
    return cls if cls in _HOLDERS else next((base for base in _HOLDERS if isinstance(container, base)), cls)


def is_a_users_hook(hook: Any) -> bool:
    """Whether a hook is a function or an object of the user's, so that what it keeps is found."""
    while isinstance(hook, partial):
        hook = hook.func
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if isinstance(function, FunctionType):
        return not function.__code__.co_filename.startswith(NOT_THE_USERS)
    return is_users_object(hook)


def hooks_on(tensor: Tensor) -> set[int]:
    """The ids of the hooks on a tensor."""
    return {key for name in HOOKS_OF_TENSOR for key in getattr(tensor, name) or ()}


def remove_new_hooks(tensor: Tensor, before: set[int], *, but_ours: bool = False) -> None:
    """Removes the hooks on a tensor, except those with the ids from before and, if `but_ours`, the library's own."""
    for name in HOOKS_OF_TENSOR:
        hooks = getattr(tensor, name) or {}
        for key in hooks.keys() - before:
            if not (but_ours and is_ours(type(hooks[key]))):
                del hooks[key]


def put_back(container: Any, before: Any) -> None:
    """Gives a list, set, mapping or array the contents that it had before, in their order, where they are others."""
    if has_numbers(container):
        if bytes_of(container) != bytes_of(before):
            put_numbers(container, before)
        return
    base = _base_of(container)
    if isinstance(container, FILLED_ANEW):
        if len(container) != len(before) or not all(map(is_, container, before)):
            base.clear(container)  # a class of the user's may have another
            getattr(base, "update" if base is set else "extend")(container, before)
        return
    for key in [key for key in container.keys() if key not in before]:  # noqa: SIM118
        base.__delitem__(container, key)
    changed = {key: value for key, value in before.items() if base.get(container, key, NOTHING) is not value}
    if changed:
        base.update(container, changed)
    if not all(map(is_, container.keys(), before)):
        base.clear(container)
        base.update(container, before)


def is_of_users(module: ModuleType) -> bool:
    """Whether a module is of no library, nor of Python's own."""
    is_built_in = module.__name__ in sys.builtin_module_names
    return not is_built_in and not (vars(module).get("__file__") or "").startswith(NOT_THE_USERS)


def _is_class_of_users(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is None or is_of_users(module)


def _is_in_c(cls: type) -> bool:
    """Whether a class is written in C, by another library than Python's own and NumPy."""
    is_static = not cls.__flags__ & _HEAP_TYPE
    return is_static and cls.__module__.partition(".")[0] not in _OF_PYTHON


def _function_behind(value: Any) -> Any:
    """The function that something calls which is none itself; that within a decorated one; `None` of all else."""
    if isinstance(value, FunctionType):
        return vars(value).get("__wrapped__")
    return next((getattr(value, name) for kind, name in _BEHIND.items() if isinstance(value, kind)), None)


class Variable(NamedTuple):
    """What has a value under a name: a global variable, one of an enclosing function, an attribute of a class."""

    owner: Any  # the global namespace, the cell of the function's variable, or the class
    place: str  # the name there
    value: Any  # `NOTHING` if it has none

    @classmethod
    def of(cls, owner: Any, place: str) -> Variable:
        """The variable, with the value that it has now."""
        return cls(owner, place, value_in(owner, place))

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.place if isinstance(self.owner, dict) else "a variable"

    def now(self) -> Any:
        """The value that it has now."""
        return value_in(self.owner, self.place)

    def put_back(self) -> None:
        """Gives it the value that it had, where it has another one."""
        owner, place, value = self
        if self.now() is value:
            return
        if value is NOTHING:
            owner.pop(place) if isinstance(owner, dict) else delattr(owner, place)
        elif isinstance(owner, dict):
            owner[place] = value
        else:
            setattr(owner, place, value)


def value_in(owner: Any, place: str) -> Any:
    """What a dict, a class or the variable of a function has under a name; `NOTHING` if there is none."""
    if isinstance(owner, dict):
        return owner.get(place, NOTHING)
    try:
        return owner.cell_contents if isinstance(owner, CellType) else vars(owner).get(place, NOTHING)
    except ValueError:  # the variable has no value yet
        return NOTHING
