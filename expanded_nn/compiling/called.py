"""Which of the user's functions run in a step, whoever calls them: Python itself, a library, a registry."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any

Place = tuple[dict[Any, Any], Any]  # a dict and a key in it
_WRAPPERS = staticmethod, classmethod, property


class Called:
    """As a context, notes the code that runs in this thread meanwhile.

    It is what `sys.settrace` calls for each new frame; what was there before, as a debugger, is called in between.

    Attributes:
        codes: The code by its id, each with the name of the module that it is of.
    """

    def __init__(self) -> None:
        self.codes: dict[int, tuple[CodeType, str]] = {}

    def __enter__(self) -> Called:
        self._former = sys.gettrace()
        self._note = _noting(self.codes, self._former)
        sys.settrace(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.gettrace() is self._note:  # and not a debugger that has begun meanwhile
            sys.settrace(self._former)


def _noting(codes: dict[int, tuple[CodeType, str]], former: Callable[..., Any] | None) -> Callable[..., Any]:
    def note(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) not in codes:
            codes[id(code)] = code, str(frame.f_globals.get("__name__", ""))
        return None if former is None else former(frame, event, argument)

    return note


def functions_with(codes: Iterable[CodeType]) -> list[FunctionType]:
    """The functions, as far as there are any still, that have some code."""
    ids = {id(code) for code in codes}
    referrers = gc.get_referrers(*codes) if ids else []
    return [holder for holder in referrers if isinstance(holder, FunctionType) and id(holder.__code__) in ids]


def places_of(functions: list[FunctionType]) -> list[Place]:
    """The dicts that have functions as items, with their keys: those of classes, of modules, of a registry."""
    referrers = gc.get_referrers(*functions) if functions else []
    wrappers = [holder for holder in referrers if isinstance(holder, _WRAPPERS)]
    referrers += gc.get_referrers(*wrappers) if wrappers else []
    found = {*map(id, functions), *map(id, wrappers)}
    dicts = {id(holder): holder for holder in referrers if isinstance(holder, dict)}
    return [(holder, key) for holder in dicts.values() for key, value in [*holder.items()] if id(value) in found]
