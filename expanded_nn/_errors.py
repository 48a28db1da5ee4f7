"""The errors of the library, all in one form: where, what was found, what was wanted, and what to do."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# the folders whose lines are not the user's
LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
MADE_BY_LIBRARIES = (  # the "files" of code that is made; not "<stdin>", nor a cell of IPython
    "<frozen ",
    "<attrs ",
    "<__array_function__ ",
    "<eval_with_key>",
    "<@beartype",
)


def _folders_of_packages(folders: Iterable[str]) -> list[str]:
    """The folders in which packages are installed, as by `--user` and `--target`; not that of the script that runs."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    of_the_user = {Path.cwd(), *([Path(script).resolve().parent] if script else [])}
    others = (Path(folder) for folder in folders if folder and Path(folder).resolve() not in of_the_user)
    return [f"{folder}{os.sep}" for folder in others if any(folder.glob("*.dist-info"))]


# the folders of modules and classes that are not the user's: of Python's own library and of installed packages as well
NOT_THE_USERS = (
    *LIBRARIES,
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    *_folders_of_packages(sys.path),
)


def is_ours(made: Any) -> bool:
    """Whether a class or a function is of this library."""
    return str(made.__module__).partition(".")[0] == __name__.partition(".")[0]


class PerSampleError(RuntimeError):
    """Per-sample gradients cannot be right here; the text names the place and the remedy.

    Attributes:
        refused_by: The module that cannot tell the samples apart in its arguments, where a module around it may.
        by_vmap: Whether `vmap` fails in that module.
        by_writing: Whether that is because its forward writes into a tensor that all samples share.
        by_keeping: Whether it is raised because its forward keeps a tensor of one sample in an attribute.
        about: `"rows"` where a layer has met others than one per sample; `"results"` where the samples ran alone and
            gave others than the batch; empty elsewhere, and where the samples may have been taken for others.
        is_early: Whether it is raised after the forward in place of a backward, which would raise it, too.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.BatchNorm1d(3)).per_sample()
        >>> try:
        ...     model(torch.randn(4, 3))
        ... except enn.PerSampleError as error:
        ...     print(str(error).split(",")[0])
        BatchNorm1d: it normalizes by the statistics of the batch
    """

    refused_by: Any = None
    by_vmap: bool = False
    by_writing: bool = False
    by_keeping: bool = False
    about: str = ""
    is_early: bool = False


class PerSampleWarning(UserWarning):
    """Something to look at: per-sample gradients are slow here, or may not be those that you expect.

    The text names the place and the remedy. To make it an error:
    `warnings.simplefilter("error", expanded_nn.PerSampleWarning)`, or, for the most common of its reasons,
    `per_sample(escalate=False)`.
    """


class UnknownNameError(PerSampleError, KeyError):
    """A `PerSampleGrads` has no such entry; a `KeyError`, as it is a mapping."""

    __str__ = RuntimeError.__str__  # a KeyError shows its text in quotation marks


class ConversionError(PerSampleError):
    """`convert` met modules that it cannot convert; the text lists every one of them.

    Example:
        >>> import torch, expanded_nn as enn
        >>> try:
        ...     enn.convert(torch.nn.Sequential(torch.nn.LazyLinear(4)))
        ... except enn.ConversionError as error:
        ...     print(error)
        These modules cannot be converted:
          0 (LazyLinear): its parameters have no shape yet; run the model once, then convert it.
    """


def named(path: str, module: object) -> str:
    """A module's qualified name with its class, as errors have it; the root's is the class alone."""
    kind: str = getattr(module, "shown_as", type(module).__name__)
    return f"{path} ({kind})" if path else kind


def complaint(who: str, problem: str, wanted: str, remedy: str, *, refused_by: Any = None) -> PerSampleError:
    """Builds an error in the library's form; with `refused_by` the module around that one is tried before it is raised.

    Args:
        who: The qualified name of the module or parameter.
        problem: The argument and the value found, as in `"input has shape (6, 3)"`.
        wanted: The value wanted, as in `"4 rows (the batch size)"`.
        remedy: What the user can do, as one imperative sentence.
        refused_by: The module that cannot tell the samples apart, or whatever else is to blame.
    """
    error = PerSampleError(f"{who}: {problem}; wanted {wanted}. {remedy}")
    error.refused_by = refused_by
    return error


def add_note(error: BaseException, text: str) -> None:
    """Adds a note of the library's to an error; Python 3.10 has no notes, so there it ends the text."""
    note = f"expanded_nn: {text}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])


def sentence(text: str) -> str:
    """The text of an error, which may not be ours, as a whole sentence on one line."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def first_line(error: BaseException) -> str:
    """The class of an error, and the first line of its text: torch's own may go on with a trace of C++."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def shown(value: object) -> str:
    """A wrong argument in the words of an error."""
    if value is None or isinstance(value, str | Real) or str(type(value)).startswith("<class 'numpy.bool"):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def refuse_other_kind(
    who: str, argument: str, value: object, kinds: type | tuple[type, ...], wanted: str, remedy: str
) -> None:
    """Raises a `TypeError` for an argument of another kind than wanted."""
    if not isinstance(value, kinds):
        raise TypeError(str(complaint(who, f"{argument} is {shown(value)}", wanted, remedy)))


def refuse_no_model(who: str, model: object) -> None:
    """Raises a `TypeError` for what is given in place of a model, such as its parameters."""
    remedy = "Give the model itself, not its parameters, its state_dict or its class."
    refuse_other_kind(who, "model", model, nn.Module, "a model, which is a torch.nn.Module", remedy)


def refuse_no_bool(who: str, **arguments: object) -> None:
    """Raises a `TypeError` for arguments that are neither `True` nor `False`."""
    for name, value in arguments.items():
        refuse_other_kind(who, name, value, bool, "True or False", f"Write {name}=True or {name}=False.")


def refuse_no_count(who: str, argument: str, value: Any, least: int = 0) -> None:
    """Raises a `ValueError` for what is no whole number, or less than `least`."""
    is_whole = isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)
    if not is_whole or value < least:  # no int(): a size of any number would become one number in a graph
        raise ValueError(f"{who}: {argument} is {shown(value)}; wanted a whole number, {least} or more.")


def refuse_no_positive_number(
    who: str, argument: str, value: Any, wanted: str = "a number above 0", remedy: str = ""
) -> None:
    """Raises a `ValueError` for what is no number above 0."""
    is_number = isinstance(value, Real | torch.SymFloat) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number or isinstance(value, bool) or not value > 0:
        found = shown(value)
        if isinstance(value, Tensor):
            found = f"a tensor of {value.item()}" if is_number else f"a tensor of shape {tuple(value.shape)}"
        raise ValueError(f"{who}: {argument} is {found}; wanted {wanted}.{f' {remedy}' if remedy else ''}")


def warn(text: str) -> None:
    """Gives a `PerSampleWarning` at the line of the user's code that has called this library or torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PerSampleWarning, stacklevel=level)
