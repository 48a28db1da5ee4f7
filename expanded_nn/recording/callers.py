"""Whose code has called an operation: the user's, or a library's."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch.utils import checkpoint

from expanded_nn._errors import LIBRARIES, MADE_BY_LIBRARIES

# between a call and those who look at it
_OF_MODES = {"__torch_function__", "_result_of", "_looked_at", "handle_torch_function"}
_OF_TORCH = {*_OF_MODES, "__len__", "__iter__", "pad_sequence"}


def calling_frame(func: Any) -> FrameType:
    """The frame that has called one of torch's functions, asked for by those who look at operations."""
    frame, looking = sys._getframe(1), sys._getframe(0).f_globals["__package__"]
    while frame.f_back is not None and (
        frame.f_globals.get("__package__") == looking or frame.f_code.co_name in _OF_TORCH
    ):
        frame = frame.f_back
    outer, code = frame, getattr(func, "__code__", None)  # of a function that torch has written in Python
    while outer.f_back is not None and code is not None and outer.f_code.co_filename.startswith(LIBRARIES):
        if outer.f_code is code:
            frame = outer.f_back
        outer = outer.f_back
    return frame


def is_called_by_libraries(func: Any) -> bool:
    """Whether an operation is torch's or ours: `pack_padded_sequence`, which notes the order, or a layer."""
    return calling_frame(func).f_code.co_filename.startswith(LIBRARIES)


def is_asked_by_users() -> bool:
    """Whether the user's code asks for what a mode hears of: there is nothing between them but other modes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name in _OF_MODES:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(LIBRARIES)


def is_in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint's first forward runs this code."""
    first_forward = checkpoint.CheckpointFunction.forward.__code__
    return any(frame.f_code is first_forward for frame, _ in walk_stack(sys._getframe(1)))


def runs_a_plain_forward_again() -> bool:
    """Within a backward, whether a forward that runs has run without gradients at first, as in a reentrant checkpoint.

    In any other checkpoint it has run with them.
    """
    reentrant = checkpoint.CheckpointFunction.backward.__code__
    for frame, _ in walk_stack(sys._getframe(1)):  # the innermost checkpoint tells
        if frame.f_code is reentrant:
            return True
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == checkpoint.__file__:
            return False
    return True


def line_of_user() -> tuple[str, int]:
    """The file and the number of the innermost line of the user's that runs; `("", 0)` if there is none."""
    return innermost(_lines(sys._getframe(1)))


def lines_now() -> list[tuple[str, int]]:
    """The files and the numbers of all lines that run, the innermost first."""
    return [*_lines(sys._getframe(1))]


def _lines(frame: FrameType) -> Iterator[tuple[str, int]]:
    return ((outer.f_code.co_filename, number) for outer, number in walk_stack(frame))


def innermost(lines: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The first of some lines, given by files and numbers, that is the user's; `("", 0)` if there is none."""
    return next(
        (line for line in lines if not line[0].startswith((*LIBRARIES, *MADE_BY_LIBRARIES, "<string>"))), ("", 0)
    )


def text_of(line: tuple[str, int]) -> str:
    """A line, given by its file and number, in words."""
    file, number = line
    return "code without a file" if not file else f"line {number} of {file}: {linecache.getline(file, number).strip()}"


def place(line: tuple[str, int]) -> str:
    """A line, given by its file and number, as a part of an error's sentence."""
    return f", line {line[1]} of {line[0]}" if line[0] else ""
