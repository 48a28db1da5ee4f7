"""The errors of the library, all in one form: where, what was found, what was wanted, and what to do."""

from typing import Any


class PerSampleError(RuntimeError):
    """Per-sample gradients cannot be right here; the text names the place and the remedy.

    Attributes:
        refused_by: The module that cannot tell the samples apart in its arguments, where a module around it may.
        by_vmap: Whether `vmap` fails in that module.
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
    is_early: bool = False


class PerSampleWarning(UserWarning):
    """Per-sample gradients are right here, but slower than they may be; the text names the place and the remedy.

    To make it an error: `warnings.simplefilter("error", expanded_nn.PerSampleWarning)`, or, for the most common of its
    reasons, `per_sample(escalate=False)`.
    """


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


def complaint(who: str, found: str, wanted: str, remedy: str) -> PerSampleError:
    """Builds an error in the library's form.

    Args:
        who: The qualified name of the module or parameter.
        found: The argument and the value found, as in `"input has shape (6, 3)"`.
        wanted: The value wanted, as in `"4 rows (the batch size)"`.
        remedy: What the user can do, as one imperative sentence.
    """
    return PerSampleError(f"{who}: {found}; wanted {wanted}. {remedy}")
