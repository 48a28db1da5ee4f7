"""The arguments that a step takes: those that it does not read make no other kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

from expanded_nn.common.bytecode import unread_arguments
from expanded_nn.compiling.names import PLAIN


class Arguments:
    """The arguments that a step takes.

    Attributes:
        names: The names of the positional ones, as far as they are known.
        unread: The names of those that it does not read.
    """

    def __init__(self, step: Any) -> None:
        function = getattr(step, "__func__", step)  # of a method, whose object is not given
        code: Any = getattr(function, "__code__", None)
        is_known = isinstance(code, CodeType)
        self.names: tuple[str, ...] = code.co_varnames[int(function is not step) : code.co_argcount] if is_known else ()
        self.unread: frozenset[str] = unread_arguments(code) if is_known else frozenset()

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call; `None` in place of numbers and the like that the step does not read."""
        unread = self.unread
        if not unread:
            return args, kwargs
        names = (*self.names, *[""] * (len(args) - len(self.names)))
        return (
            tuple([None if name in unread and type(x) in PLAIN else x for name, x in zip(names, args, strict=False)]),
            {name: None if name in unread and type(x) in PLAIN else x for name, x in kwargs.items()},
        )

    def changed(self, kinds: Sequence[Any]) -> str:
        """The first argument that differs between the last two kinds of calls, as a part of a warning."""
        former, last = _key_of_call(kinds[-min(2, len(kinds))]), _key_of_call(kinds[-1])
        places = zip([*self.names, *range(len(self.names), len(last[0]))], last[0], former[0], strict=False)
        of_names = ((name, own, other) for (name, own), (_, other) in zip(last[1] or (), former[1] or (), strict=False))
        differing = [place for place, own, other in (*places, *of_names) if own != other]
        return f", as its argument {differing[0]} changes" if differing else ""


def _key_of_call(kind: Any) -> Any:
    """The key of a call, in that of its kind, or of what it is a kind of by its gradients."""
    while len(kind) == 2:
        kind = kind[0]
    return kind[0]
