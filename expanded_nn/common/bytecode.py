"""What the code of the user's functions, and of the functions within these, does, as its instructions say it."""

from __future__ import annotations

from collections.abc import Iterator
from dis import Instruction, get_instructions, hasjabs, hasjrel, stack_effect
from functools import lru_cache
from itertools import pairwise
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

_NO_COMPUTED_KEY = {"LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE"}  # before the index is applied
_SPREAD = {"DICT_MERGE", "DICT_UPDATE", "CALL_FUNCTION_EX"}
_CALLS = {"PRECALL", "CALL", "CALL_FUNCTION"}
_JUMPS = {*hasjabs, *hasjrel}
_TAKE_ALL_VARIABLES = {"locals", "vars", "dir", "eval", "exec"}


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


def unread_arguments(code: CodeType) -> frozenset[str]:
    """The arguments whose values it never takes, as `batch_idx` in many a `training_step(batch, batch_idx)`."""
    if not _TAKE_ALL_VARIABLES.isdisjoint(code.co_names):
        return frozenset()
    loads = [instruction.argval for instruction in get_instructions(code) if "LOAD_FAST" in instruction.opname]
    read = {name for names in loads for name in (names if isinstance(names, tuple) else (names,))}
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(arguments) - read.union(code.co_cellvars)


def constant_words(code: CodeType) -> Iterator[str]:
    """The strings among its constants, and in tuples and sets of these."""
    waiting: list[Any] = [*code.co_consts]
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            waiting += constant


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


def computes_names(code: CodeType) -> bool:
    """Whether it finds attributes by names that are no constants: `getattr(x, name)`, not `getattr(x, "limit", 1.0)`.

    So it does, too, where it does anything else with these functions than to call them, or where that is not known.
    """
    for inner in codes_in(code):
        instructions = [*get_instructions(inner)]
        for number, instruction in enumerate(instructions):
            finds = instruction.opname.startswith("LOAD") and instruction.argval in ("getattr", "hasattr")
            if finds and not _takes_constant_name(instructions[number + 1 :]):
                return True
    return False


def _takes_constant_name(instructions: list[Instruction]) -> bool:
    """Whether a call, for which its function was just loaded, has a constant as its second argument."""
    depth, is_constant = 0, False  # how many of its arguments are on the stack
    for instruction in instructions:
        name, count = instruction.opname, instruction.arg
        if name in _CALLS and depth == count:
            return is_constant
        if name.startswith("STORE") or (is_constant and not name.startswith(("LOAD", "BUILD"))):
            return False  # it has another name from now on; or it may be computed with
        before, depth = depth, depth + (name != "PUSH_NULL") * stack_effect(instruction.opcode, count, jump=False)
        if depth < 0 or instruction.opcode in _JUMPS:
            return False
        if depth >= 2 > before:
            is_constant = name == "LOAD_CONST" and isinstance(instruction.argval, str)
    return False


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
