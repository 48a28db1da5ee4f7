"""What the code of the user's functions, and of the functions within these, does, as its instructions say it."""

from __future__ import annotations

from collections.abc import Iterator
from dis import Instruction, get_instructions
from functools import lru_cache
from itertools import pairwise
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

_NO_COMPUTED_KEY = {"LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE"}  # before the index is applied
_SPREAD = {"DICT_MERGE", "DICT_UPDATE", "CALL_FUNCTION_EX"}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _instructions(code: CodeType) -> Iterator[Instruction]:
    """Those of the functions within it, too."""
    return (instruction for inner in codes_in(code) for instruction in get_instructions(inner))


def variables_around(function: FunctionType) -> list[Any]:
    """The values of the variables of enclosing functions; those that have none yet are left out."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


@lru_cache(maxsize=2**12)  # per-sample mode may be switched often
def global_names(code: CodeType) -> dict[str, None]:
    """The global variables that it names, in this order; attributes are none, whose names stand beside them."""
    return {
        instruction.argval: None
        for instruction in _instructions(code)
        if "GLOBAL" in instruction.opname or instruction.opname.endswith("_NAME")
    }


def imported_names(code: CodeType) -> list[str]:
    """The modules that it imports; those of its own package, with a dot before them for each level."""
    instructions = [instruction for instruction in _instructions(code) if instruction.opname != "EXTENDED_ARG"]
    return [
        "." * level.argval + imported.argval
        for level, imported in zip(instructions, instructions[2:], strict=False)
        if imported.opname == "IMPORT_NAME"
    ]


def computes_keys(code: CodeType) -> bool:
    """Whether it finds items by keys that are no constants, or gives a dict as keyword arguments."""
    return any(
        (_applies_index(instruction) and previous.opname not in _NO_COMPUTED_KEY) or instruction.opname in _SPREAD
        for previous, instruction in pairwise(_instructions(code))
    )


def matched_attributes(code: CodeType) -> tuple[set[str], bool]:
    """The attributes that `match` reads by their names, as in `Point(x=0)`; and whether it reads others by places."""
    pairs = [pair for pair in pairwise(_instructions(code)) if pair[1].opname == "MATCH_CLASS"]
    return {name for names, _ in pairs for name in names.argval}, any(match.arg for _, match in pairs)


def constant_keys(code: CodeType) -> set[Any]:
    """The constants by which it finds items, but for those of `counts["calls"] += 1`, which reads only to write."""
    return {previous.argval for previous, instruction in pairwise(_instructions(code)) if _applies_index(instruction)}


def constant_index(frame: FrameType) -> int | None:
    """The index that the code applies next, or its begin, if it is a constant: -1 in `x.shape[-1]` and `[-1:]`."""
    ahead = [instruction for instruction in get_instructions(frame.f_code) if instruction.offset > frame.f_lasti][:4]
    is_slice = len(ahead) > 2 and ahead[2].opname in ("BUILD_SLICE", "BINARY_SLICE") and ahead[1].argval is None
    is_index = len(ahead) > 1 and _applies_index(ahead[1])
    index = ahead[0].argval if is_slice or is_index else None
    index = index.start if isinstance(index, slice) and index.stop is None else index
    return index if type(index) is int else None


def _applies_index(instruction: Instruction) -> bool:
    """In Python 3.14 an index is one of the binary operations."""
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.argrepr == "[]")
