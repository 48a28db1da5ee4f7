"""The rows that a model holds: which parameters hold how many, and small ones side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn._module import Expanded, PerSampleModule, all_parameters
from expanded_nn._rows import widened
from expanded_nn._traced import assume, is_traced, note_recorder
from expanded_nn.core import cost
from expanded_nn.core.terms import Products
from expanded_nn.factored import FactoredTensor, as_factored, as_real
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.sharded import is_zero


def recorded(model: nn.Module) -> tuple[dict[str, nn.Parameter], list[Recorder]]:
    """The parameters by name, and the recorders of their rows: several if parts were switched on one by one.

    Raises:
        PerSampleError: If a trainable parameter has no recorder, or the recorders' settings differ.
    """
    parameters = dict(model.named_parameters())
    recording = {each: each._recorder for each in model.modules() if isinstance(each, PerSampleModule)}
    known = {
        id(parameter)
        for module, recorder in recording.items()
        if recorder is not None and isinstance(module, Expanded)
        for parameter in all_parameters(module)
    }
    others = [name for name, each in parameters.items() if each.requires_grad and id(each) not in known]
    if others:
        raise complaint(
            type(model).__name__,
            f"the parameters {some(others)} are in no layer in per-sample mode, so they have no per-sample gradients",
            "every trainable parameter in a converted layer, with per-sample mode on",
            "Switch it on before the forward: model.per_sample(True) if the model is converted, "
            "convert(model, inplace=True).per_sample(True) if not.",
        )
    recorders = list(dict.fromkeys(each for each in recording.values() if each is not None))
    for recorder in recorders:
        note_recorder(recorder)
        recorder.settle()
    kinds = {(each.settings.loss_reduction, each.settings.accumulate_grad) for each in recorders}
    if len(kinds) > 1:
        raise complaint(
            type(model).__name__,
            f"its parts were switched on with different (loss_reduction, accumulate_grad): {sorted(kinds)}",
            "the same settings for all of them",
            "Switch on the whole model at once: per_sample(model, ...).",
        )
    return parameters, recorders


def held_rows(parameters: Mapping[str, Tensor], *, adds: bool) -> dict[str, Tensor]:
    """Parameter name -> the rows it holds, of those that hold any; frozen ones only if they are a part of its `.grad`.

    Args:
        parameters: The parameters, by name.
        adds: Whether no backward adds to `.grad`, only clipping does.
    """
    held = {
        name: getattr(parameter, "grad_sample", None)
        for name, parameter in parameters.items()
        if parameter.requires_grad or (parameter.grad is not None and not adds)
    }
    return {name: rows for name, rows in held.items() if rows is not None}


def refuse_what_is_no_mapping(who: str, rows: object) -> None:
    if not isinstance(rows, Mapping):
        raise complaint(
            who,
            f"it is given a {type(rows).__name__}",
            "a mapping from parameter name to per-sample gradients",
            "Give it per_sample_grads(model).",
        )


def batch_size_of(held: Mapping[str, Tensor]) -> int:
    """How many rows all parameters hold; 0 without parameters."""
    sizes = {name: rows.shape[0] for name, rows in held.items()}
    batch = next(iter(sizes.values()), 0)
    if any(size != batch for size in sizes.values()):
        raise complaint(
            "per_sample_grads",
            f"the parameters have different numbers of per-sample gradients, {sizes}",
            "equally many for all of them",
            "Clear the gradients, optimizer.zero_grad(), and run the step again.",
        )
    return batch


def refuse_gradients_without_rows(
    who: str, parameters: Mapping[str, nn.Parameter], recorders: Sequence[Recorder], *, adds: bool = False
) -> None:
    """Raises if an optimizer would take a gradient that no row is a part of.

    Args:
        who: Who asks.
        parameters: The parameters, by name.
        recorders: Those of their rows.
        adds: Whether clipping is about to add to what is in `.grad`, so that rows do not account for that.
    """

    def is_unaccounted(parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad or parameter.grad is None:
            return False
        if any(recorder.lacks_rows(parameter) for recorder in recorders):
            return True
        if not adds and getattr(parameter, "grad_sample", None) is not None:
            return False
        # with accumulate_grad=False clipping has left its sums there; zeros are a gradient that was cleared
        is_clipped = any(recorder.is_clipped(parameter) for recorder in recorders)
        return not is_clipped and not is_zero(_values(parameter.grad))

    found = [name for name, parameter in parameters.items() if is_unaccounted(parameter)]
    if found:
        raise complaint(
            who,
            f"the parameters {some(found)} have a gradient in .grad that is not, or not wholly, the sum of per-sample "
            "gradients, so that nothing bounds what a sample adds to it",
            "per-sample gradients of all that is in .grad",
            "If that gradient is left from an earlier step, clear it: optimizer.zero_grad(). If it is of this step, "
            "use the parameter through its layer, or through expanded_nn.expanded(weight).",
        )


def _values(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad._values() if grad.is_sparse else grad


class Part(NamedTuple):
    """The rows of one parameter, or of several small ones side by side, as one; of real numbers."""

    shapes: dict[str, torch.Size]  # those of the parameters
    rows: FactoredTensor

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """What has the shape of one row of the part, by parameter."""
        if len(self.shapes) == 1:
            return {name: value.view(shape) for name, shape in self.shapes.items()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        values = cast(list[Tensor], torch.split_with_sizes_copy(value, sizes))
        return {name: each.view(shape) for (name, shape), each in zip(self.shapes.items(), values, strict=True)}


def side_by_side(held: Mapping[str, Tensor], join: bool = True) -> list[Part]:
    """The rows of each parameter; small ones that are dense may be side by side."""
    parts, small = [], dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Size, Tensor]]]()
    for name, rows in held.items():
        real = as_real(as_factored(rows)) if rows.is_complex() else rows
        matrix = _small_matrix(real) if join else None
        if matrix is None:
            parts.append(Part({name: real.shape[1:]}, as_factored(real)))
        else:
            small.setdefault((real.dtype, real.device), []).append((name, real.shape[1:], matrix))
    for group in small.values():
        shapes = {name: shape for name, shape, _ in group}
        parts.append(Part(shapes, as_factored(torch.cat([matrix for _, _, matrix in group], 1))))
    return parts


def _small_matrix(rows: Tensor) -> Tensor | None:
    """Few numbers that are held as dense rows, `(B, numbers in a row)`."""
    if not cost.is_worth_joining(rows.numel()):
        return None
    if isinstance(rows, FactoredTensor):
        return rows.held_matrix()
    return rows.detach().reshape(rows.shape[0], math.prod(rows.shape[1:]))


def squared_norms(parts: Iterable[Part]) -> list[Tensor]:
    products, squares = Products(), []
    for _, rows in parts:
        rows.dense_for_norms()
        squares.append(widened(rows).squared_norms(products).clamp(min=0))
    return squares


def lengths(squares: Iterable[Tensor], parts: Sequence[Part]) -> Tensor:
    """The norm of each row over all parts, from the squares; those that are too large or small to be squared anew."""
    norms = added(squares).sqrt()
    if norms.numel() == 0 or norms.is_meta:
        return norms
    numbers = torch.finfo(norms.dtype)
    low, high = (numbers.tiny / numbers.eps) ** 0.5, numbers.max**0.5
    least, most = norms.aminmax()
    if is_traced():
        assume((low < least) & (most < high))
        return norms
    if low < float(least) and float(most) < high:  # no NaN either
        return norms
    doubtful = (~((norms > low) & (norms < high))).nonzero().flatten()
    doubtful = doubtful[~_are_zero(parts, doubtful)]
    if len(doubtful):
        alone = [_scaled_lengths(widened(part.rows)[doubtful]) for part in parts]
        norms[doubtful] = _scaled_length(torch.stack(alone, 1)).to(norms.dtype)
    return norms


def _are_zero(parts: Sequence[Part], index: Tensor) -> Tensor:
    """Whether all that such rows are made of is zero, as that of samples whose loss is zero."""
    zero = torch.ones_like(index, dtype=torch.bool)
    for part in parts:
        rows = part.rows[index]
        for term in as_factored(rows).terms():
            numbers = [each for each in term.factors if each.is_floating_point()]
            ones = [each.reshape(len(each), -1).ne(0).any(1).logical_not() for each in numbers if each.numel()]
            zero &= torch.stack(ones).any(0) if ones else zero
    return zero


def _scaled_lengths(rows: Tensor) -> Tensor:
    chunks = list(as_factored(rows).chunks())
    return torch.cat([_scaled_length(chunk.reshape(len(chunk), -1)) for chunk in chunks])


def _scaled_length(matrix: Tensor) -> Tensor:
    """The norm of each row, whose squares may be out of range."""
    if not matrix.numel():
        return matrix.new_zeros(len(matrix))
    largest = matrix.abs().amax(1).clamp(min=torch.finfo(matrix.dtype).tiny)
    return cast(Tensor, torch.linalg.vector_norm(matrix / largest[:, None], dim=1)) * largest


def snapshot(rows: Tensor) -> FactoredTensor:
    if not isinstance(rows, FactoredTensor):
        return as_factored(rows)
    return rows._like(rows.blocks, rows.shape)


def as_before(value: Tensor, like: Tensor) -> Tensor:
    """A value for a parameter's real numbers, as complex ones where the parameter has such."""
    return torch.view_as_complex(value) if like.is_complex() else value


def added(parts: Iterable[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return torch.zeros(0) if total is None else total


def some(items: list[Any]) -> str:
    """The first items of a list that may be long."""
    return f"{items[:5]}{'...' if len(items) > 5 else ''}"
