"""The errors of the library, all in one form: where, what was found, what was wanted, and what to do."""

from typing import Any


class PerSampleError(RuntimeError):
    """Per-sample gradients cannot be right here; the text names the place and the remedy.

    Attributes:
        refused_by: The module that cannot tell the samples apart in its arguments, where a module around it may.
        by_vmap: Whether `vmap` fails in that module.
        is_early: Whether it is raised after the forward in place of a backward, which would raise it, too.
    """

    refused_by: Any = None
    by_vmap: bool = False
    is_early: bool = False


class PerSampleWarning(UserWarning):
    """Per-sample gradients are right here, but slower than they may be; the text names the place and the remedy."""


class ConversionError(PerSampleError):
    """`convert` met modules that it cannot convert; the text lists every one of them."""


def complaint(who: str, found: str, wanted: str, remedy: str) -> PerSampleError:
    """Builds an error in the library's form.

    Args:
        who: The qualified name of the module or parameter.
        found: The argument and the value found, as in `"input has shape (6, 3)"`.
        wanted: The value wanted, as in `"4 rows (the batch size)"`.
        remedy: What the user can do, as one imperative sentence.
    """
    return PerSampleError(f"{who}: {found}; wanted {wanted}. {remedy}")
