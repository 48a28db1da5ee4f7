"""Checks of the arguments that `PerSampleGrads` and the like take."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from expanded_nn._errors import complaint, refuse_no_positive_number, refuse_other_kind, shown
from expanded_nn.common.traced import assume, is_traced
from expanded_nn.core.kronecker import EigenFactors, KroneckerFactors
from expanded_nn.core.terms import sides


def refuse_no_tensors(who: str, argument: str, tensors: Any, shape: str, remedy: str) -> None:
    """Raises if an argument is no mapping from parameter name to tensors."""
    refuse_other_kind(who, argument, tensors, Mapping, f"a mapping from parameter name to {shape}", remedy)
    for name, value in tensors.items():
        refuse_other_kind(who, f"{argument}[{name!r}]", value, Tensor, f"a tensor {shape}", remedy)


def refuse_no_rows(who: str, argument: str, rows: Any) -> None:
    """Raises if an argument is no mapping from parameter name to per-sample gradients."""
    remedy = "Give it per_sample_grads(model)."
    refuse_no_tensors(who, argument, rows, "(B, *shape)", remedy)
    for name, value in rows.items():
        if not value.shape:
            raise complaint(who, f"{argument}[{name!r}] has no dimensions", "a tensor (B, *shape)", remedy)
        if not value.is_floating_point() and not value.is_complex():
            raise complaint(who, f"{argument}[{name!r}] is of {value.dtype}", "gradients, of a floating dtype", remedy)


def refuse_emptiness(who: str, rows: Mapping[str, Tensor]) -> None:
    """Raises if there are no rows at all, as before the first backward."""
    if not rows:
        raise complaint(
            who,
            "no parameter has per-sample gradients",
            "those of a backward in per-sample mode",
            "Call per_sample_grads(model) after backward and before zero_grad.",
        )


def refuse_others(method: str, rows: Mapping[str, Tensor], other: Mapping[str, Tensor], dims: int) -> None:
    """Raises if `other` is not of the same parameters; its tensors have `dims` dimensions before theirs."""
    if set(other) != set(rows):
        lacking, more = (sorted(map(str, some)) for some in (set(rows) - set(other), set(other) - set(rows)))
        raise complaint(
            f"PerSampleGrads.{method}",
            f"what it is given has not the names of the rows: it lacks {lacking} and has {more} besides",
            "one entry for each parameter that has per-sample gradients",
            "Leave out what is in one of the two only: {name: given[name] for name in grads}, or "
            "PerSampleGrads({name: grads[name] for name in names}).",
        )
    for name, parameter_rows in rows.items():
        shape = other[name].shape
        if shape[dims:] != parameter_rows.shape[1:]:
            is_vector = dims and shape == parameter_rows.shape[1:]
            raise complaint(
                f"PerSampleGrads.{method}",
                f"{name!r} has the shapes {tuple(parameter_rows.shape[1:])} and {tuple(shape[dims:])}",
                "the same parameters",
                "Take both from one model, or from copies of it."
                + " A vector of the parameters' shapes, as a mean is, belongs into matvec(vectors)." * bool(is_vector),
            )


def refuse_other_weights(weights: Any, batch_size: int) -> None:
    """Raises if an argument is not one weight per sample."""
    if not isinstance(weights, Tensor) or weights.shape != (batch_size,):
        found = f"has shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"is {shown(weights)}"
        raise complaint(
            "PerSampleGrads.sum",
            f"weights {found}",
            f"a tensor of shape ({batch_size},)",
            "Give one weight per sample. For several weightings W, (K, B), write torch.func.vmap(grads.sum)(W).",
        )


def samples_chosen(index: Any, batch: int) -> Tensor:
    """The numbers `(n,)` or the mask `(B,)` by which an argument chooses samples.

    Raises:
        TypeError: If it is neither of these: one number would take away the samples' dimension.
        PerSampleError: If a mask has another length, or there is no sample with such a number.
    """
    who, remedy = "PerSampleGrads.rows", "For one sample write rows([i])."
    wanted = f"a slice, numbers (n,) below {batch} or a mask ({batch},)"
    if isinstance(index, slice):  # as numbers: some of the rows, and no view that makes all of them dense
        if index.step is None or index.step > 0:  # which a batch whose size is a symbol allows
            return torch.arange(batch)[index]
        return torch.tensor(range(batch)[index], dtype=torch.int64)
    kinds = {*map(type, index)} if isinstance(index, list) else set()
    are_numbers = all(issubclass(kind, Integral) for kind in kinds) and (kinds <= {bool} or bool not in kinds)
    if getattr(index, "ndim", None) != 1 and not (isinstance(index, list) and are_numbers):
        raise TypeError(str(complaint(who, f"index is {shown(index)}", wanted, remedy)))
    chosen = torch.as_tensor(index, dtype=torch.int64 if isinstance(index, list) and not index else None)
    if chosen.dtype not in (torch.bool, torch.int64, torch.int32):
        raise TypeError(str(complaint(who, f"index is of {chosen.dtype}", wanted, remedy)))
    if chosen.dtype == torch.bool and len(chosen) != batch:
        raise complaint(who, f"index is a mask ({len(chosen)},)", wanted, remedy)
    if chosen.dtype != torch.bool and chosen.numel() and not is_traced():
        first, last = int(chosen.min()), int(chosen.max())
        if not -batch <= first <= last < batch:
            raise complaint(who, f"index has the numbers {first} to {last}", wanted, remedy)
    return chosen


def refuse_no_factors(method: str, argument: str, factors: Any, *, eigen: bool) -> None:
    """Raises if an argument is no mapping from parameter name to Kronecker factors, or those of EK-FAC if `eigen`."""
    who, wanted, remedy = f"PerSampleGrads.{method}", "factors by parameter name", "Give it what kronecker() returns."
    refuse_other_kind(who, argument, factors, Mapping, wanted, remedy)
    kinds = (KroneckerFactors, EigenFactors) if eigen else KroneckerFactors
    for name, value in factors.items():
        refuse_other_kind(who, f"{argument}[{name!r}]", value, kinds, "KroneckerFactors", remedy)


def refuse_strange_factors(
    method: str, rows: Mapping[str, Tensor], factors: Mapping[str, KroneckerFactors | EigenFactors]
) -> None:
    """Raises if there are factors of a parameter without rows, of no samples, or of other sizes."""
    refuse_no_factors(method, "factors", factors, eigen=True)
    for name, second_moment in factors.items():
        may_be_empty = method == "ekfac" and isinstance(second_moment, EigenFactors)  # so far
        if name not in rows or (not may_be_empty and _is_empty(second_moment.count)):
            raise complaint(
                f"PerSampleGrads.{method}",
                f"factors for {name!r} with count {second_moment.count}"
                if name in rows
                else f"{name!r} has no per-sample gradients",
                "factors of parameters that have per-sample gradients, and of at least one sample",
                "Leave this one out.",
            )
        refuse_other_sizes(method, name, rows[name], second_moment)


def _is_empty(count: Any) -> bool:
    if not isinstance(count, Tensor) or not is_traced():
        return bool(count < 1)
    assume(count.ge(1), "call after call there are Kronecker factors of no samples")
    return False


def refuse_strange_mask(mask: Any, weights: Mapping[str, Any]) -> None:
    """Raises if a mask is not `(B, T)` of bools, or if no weight's rows have T positions."""
    batch = next((rows.shape[0] for rows in weights.values()), 0)
    shapes = [(batch, term.positions) for rows in weights.values() for term in rows.terms()]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else shown(mask)
        raise complaint(
            "PerSampleGrads.kronecker",
            f"mask is {found}",
            f"bools (B, T), with T the number of positions of a layer: {' or '.join(sorted({*map(str, shapes)}))}",
            "Give it True where a position counts, and False where it is padding.",
        )


def refuse_strange_damping(damping: Any, factors: Mapping[str, Any]) -> None:
    """Raises if it is neither a number above 0 nor one for each parameter that has factors."""
    who = "PerSampleGrads.precondition"
    if not isinstance(damping, Mapping):
        refuse_no_positive_number(who, "damping", damping)
        return
    for name in factors:
        if name not in damping:
            problem = f"damping has no number for {name!r}"
            raise complaint(who, problem, "one for each parameter that has factors", "Add it, or give one for all.")
        refuse_no_positive_number(who, f"damping[{name!r}]", damping[name])


def refuse_other_sizes(method: str, name: str, rows: Tensor, factors: KroneckerFactors | EigenFactors) -> None:
    sizes, wanted = factors.sizes, sides(rows.shape[1:])
    if sizes != wanted:
        raise complaint(
            f"PerSampleGrads.{method}",
            f"the factors of {name!r} are those of a matrix {sizes}",
            f"{wanted}, as the parameter is",
            "Take the factors of kronecker() from the same model.",
        )
