"""Which of the user's functions run in a step, whoever calls them: Python itself, a library, a registry."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any

Code = tuple[CodeType, dict[str, Any]]  # code and its global namespace
Place = tuple[dict[Any, Any], Any]  # a dict and a key in it
_WRAPPERS = staticmethod, classmethod, property


class Called:
    """As a context, notes the code that runs in this thread meanwhile.

    It is what `sys.settrace` calls for each new frame; what was there before, as a debugger, is called in between.
    Code that runs because Python collects garbage, as `gc.callbacks` and `__del__`, is not the step's and not noted.

    Attributes:
        codes: The code by its id, each with its global namespace.
    """

    def __init__(self) -> None:
        self.codes: dict[int, Code] = {}

    def __enter__(self) -> Called:
        former: Any = sys.gettrace()
        # a tracer in C, as that of coverage, takes its place again when it is called
        is_in_c = former is not None and not hasattr(former, "__code__")
        profiles = is_in_c and sys.getprofile() is None
        self._get: Callable[[], Any] = sys.getprofile if profiles else sys.gettrace
        self._set: Callable[[Any], None] = sys.setprofile if profiles else sys.settrace
        self._former = self._get()
        self._note = _noting(self.codes, self._former)
        self._thread, self._is_paused = get_ident(), False
        gc.callbacks.insert(0, self._pause)
        gc.callbacks.append(self._resume)
        self._set(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._get() is self._note:  # and not a debugger that has begun meanwhile
            self._set(self._former)
        gc.callbacks.remove(self._pause)
        gc.callbacks.remove(self._resume)

    def _pause(self, phase: str, info: Any) -> None:
        if phase == "start" and get_ident() == self._thread and self._get() is self._note:
            self._set(self._former)
            self._is_paused = True

    def _resume(self, phase: str, info: Any) -> None:
        if phase == "stop" and get_ident() == self._thread and self._is_paused:
            self._set(self._note)
            self._is_paused = False


def _noting(codes: dict[int, Code], former: Callable[..., Any] | None) -> Callable[..., Any]:
    def note(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) not in codes:
            codes[id(code)] = code, frame.f_globals
        return None if former is None else former(frame, event, argument)

    return note


class Ran:
    """The code that has run in the calls of a step.

    Attributes:
        names: The names in it, in that of libraries as well.
        unnamed: The code of functions that no name leads to, by its id.
        places: The dicts that have these functions as items, with their keys: those of classes, of modules, of a
            registry.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.unnamed: dict[int, CodeType] = {}
        self.places: list[Place] = []
        self._codes: dict[int, CodeType] = {}

    def note(self, codes: Iterable[CodeType]) -> None:
        """Notes code; not what was made by `exec`, of which there may be new one at each call."""
        for code in codes:
            if id(code) not in self._codes and not code.co_filename.startswith("<"):
                self._codes[id(code)] = code
                self.names.update(code.co_names)

    def has(self, function: Any) -> bool:
        """Whether the code of a function, if it is one, has run."""
        return isinstance(function, FunctionType) and id(function.__code__) in self._codes

    def add_unnamed(self, codes: Iterable[Code]) -> tuple[list[FunctionType], list[Code]]:
        """Adds code that no name leads to.

        Returns:
            The functions of what is new in it, as far as they exist still; and the new code of which no function is
            found, as `gc.freeze` hides those from before it.
        """
        new = {id(code): (code, namespace) for code, namespace in codes if code.co_name != "<module>"}
        new = {key: value for key, value in new.items() if key not in self.unnamed}
        self.unnamed |= {key: code for key, (code, _) in new.items()}
        referrers = gc.get_referrers(*(code for code, _ in new.values())) if new else []
        functions = [value for value in referrers if isinstance(value, FunctionType) and id(value.__code__) in new]
        self.places += _places_of(functions) if functions else []
        for function in functions:
            new.pop(id(function.__code__), None)
        return functions, [*new.values()]


def _places_of(functions: list[FunctionType]) -> list[Place]:
    """The dicts that have functions as items, with their keys."""
    referrers = gc.get_referrers(*functions)
    wrappers = [holder for holder in referrers if isinstance(holder, _WRAPPERS)]
    referrers += gc.get_referrers(*wrappers) if wrappers else []
    found = {*map(id, functions), *map(id, wrappers)}
    dicts = {id(holder): holder for holder in referrers if isinstance(holder, dict)}
    return [(holder, key) for holder in dicts.values() for key, value in [*holder.items()] if id(value) in found]
