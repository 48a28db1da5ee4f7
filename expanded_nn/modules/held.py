"""The rows that a model holds, by parameter: their norms, and the refusal of gradients without rows.

Small rows are joined, so that their algebra takes fewer calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint, refuse_no_model
from expanded_nn.common.modes import running_backward
from expanded_nn.common.traced import assume, is_traced, note_recorder
from expanded_nn.core import cost
from expanded_nn.core.products import Products
from expanded_nn.core.terms import Differentiable
from expanded_nn.factored import FactoredTensor, as_factored, as_real, materialized, refuse_hidden
from expanded_nn.modules.base import Expanded, PerSampleModule, all_parameters, recorders_of
from expanded_nn.recording.living import living
from expanded_nn.recording.recorder import Recorder, modules_in
from expanded_nn.recording.sharded import is_shard, is_zero
from expanded_nn.rows.factors import widened


def recorded(who: str, model: nn.Module) -> tuple[dict[str, nn.Parameter], list[Recorder]]:
    """The parameters by name, and the recorders of their rows: several if parts of the model were switched on alone.

    Raises:
        TypeError: If `model` is none.
        PerSampleError: If a trainable parameter has no recorder, the recorders' settings differ, or a backward runs.
    """
    refuse_no_model(who, model)
    modules, parameters = modules_in(model), dict(model.named_parameters())
    layers = [module for module in modules if isinstance(module, Expanded) and module._recorder is not None]
    expandable = {id(parameter) for layer in layers for parameter in all_parameters(layer)}
    lacking = [name for name, p in parameters.items() if p.requires_grad and id(p) not in expandable]
    if lacking:
        converted = {id(p) for module in modules if isinstance(module, Expanded) for p in all_parameters(module)}
        is_off = isinstance(model, PerSampleModule) and converted.issuperset(id(parameters[name]) for name in lacking)
        switch = "model" if is_off else "convert(model, inplace=True)"
        raise complaint(
            type(model).__name__,
            f"the parameters {first_few(lacking)} are in no layer in per-sample mode, so they have no per-sample "
            "gradients",
            "every trainable parameter in a converted layer, with per-sample mode on",
            f"Switch it on before the forward: {switch}.per_sample(True).",
        )
    recorders = recorders_of(modules)
    for recorder in recorders:
        note_recorder(recorder)
        if running_backward() in recorder.store.backwards:
            raise complaint(
                who,
                "it is called within a backward, as by a hook, which has not delivered all rows yet",
                "the rows of a whole backward",
                "Call it after backward().",
            )
        recorder.drop_outdated_rows()
    settings = {(recorder.settings.loss_reduction, recorder.settings.accumulate_grad) for recorder in recorders}
    if len(settings) > 1:
        raise complaint(
            type(model).__name__,
            f"its parts were switched on with different (loss_reduction, accumulate_grad): {sorted(settings)}",
            "the same settings for all of them",
            "Switch on the whole model at once: per_sample(model, ...).",
        )
    _refuse_rows_of_other_models(who, parameters, recorders)
    return parameters, recorders


def _refuse_rows_of_other_models(
    who: str, parameters: Mapping[str, nn.Parameter], recorders: Sequence[Recorder]
) -> None:
    """Raises where row i of some parameter may not be of the sample that row i of the others is of."""
    if len(recorders) > 1:
        passes = [recorder.store.held for recorder in recorders if recorder.store.held]
        backwards = [[(pass_.reached_by, pass_.batch) for pass_ in held] for held in passes]
        if any(own != backwards[0] for own in backwards):
            raise complaint(
                who,
                "parts of the model were switched on each by itself, and their rows are of different backwards, so "
                "that row i of the one may be of another sample than row i of the other",
                "rows of the same backwards in all parts",
                "Switch on the whole model at once: per_sample(model). Parts that are several models go into one, "
                "nn.ModuleList([actor, critic]). Or clip each part alone, after its own backward.",
            )
    others = [recorder for recorder in living() if recorder.store.held]
    if len(others) < 2:
        return
    holders = {name: [one for one in others if one.leaves.has_rows(p)] for name, p in parameters.items()}
    twice = [name for name, own in holders.items() if len(own) > 1 and not set(own).isdisjoint(recorders)]
    if twice:
        raise complaint(
            who,
            f"the parameters {first_few(twice)} are in two models that were switched on each by itself, and both have "
            "rows of them",
            "one model that holds both, so that all rows of a parameter are kept together",
            "Put both into one module, and switch that on: per_sample(nn.ModuleList([first, second])).",
        )


def held_rows(parameters: Mapping[str, Tensor], *, adds: bool) -> dict[str, Tensor]:
    """Parameter name -> its rows, if it holds any; those of a frozen parameter count if they are in its `.grad`.

    `adds` says that clipping adds to `.grad`, and that backwards do not.
    """
    held = {
        name: getattr(parameter, "grad_sample", None)
        for name, parameter in parameters.items()
        if parameter.requires_grad or (parameter.grad is not None and not adds)
    }
    rows_by_name = {name: rows for name, rows in held.items() if rows is not None}
    refuse_hidden(rows_by_name.values())
    for name, rows in rows_by_name.items():
        _refuse_strange_rows(name, rows, parameters[name])
    return rows_by_name


def _refuse_strange_rows(name: str, rows: object, parameter: Tensor) -> None:
    """Raises for what is no row for each sample, as the user may have set it."""
    if isinstance(rows, Tensor) and rows.dim() and (rows.shape[1:] == parameter.shape or is_shard(parameter)):
        return
    found = f"has shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"is a {type(rows).__name__}"
    raise complaint(
        "Per-sample gradients",
        f"the grad_sample of {name} {found}",
        f"a tensor (B, *{tuple(parameter.shape)})",
        "Leave it to the backward, or clear it with .grad, model.zero_grad(); several tensors go into one, "
        "torch.cat(rows).",
    )


def batch_size_of(held: Mapping[str, Tensor]) -> int:
    """B, the number of rows that every parameter holds; 0 without parameters."""
    sizes = {name: rows.shape[0] for name, rows in held.items()}
    batch = next(iter(sizes.values()), 0)
    if any(size != batch for size in sizes.values()):
        raise complaint(
            "Per-sample gradients",
            f"the parameters have different numbers of per-sample gradients, {sizes}",
            "equally many for all of them",
            "Clear the gradients, optimizer.zero_grad(), and run the step again.",
        )
    return batch


def refuse_gradients_without_rows(
    who: str, parameters: Mapping[str, nn.Parameter], recorders: Sequence[Recorder], *, adds: bool = False
) -> None:
    """Raises if an optimizer would take a gradient that is not the sum of rows.

    `adds` says that clipping is about to add to `.grad`: what is there already is then not the sum of the rows held.
    """

    def is_unaccounted(parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad or parameter.grad is None:
            return False
        if any(recorder.lacks_rows(parameter) for recorder in recorders):
            return True
        if not adds and getattr(parameter, "grad_sample", None) is not None:
            return False
        # with accumulate_grad=False earlier clippings have added there; zeros are a gradient that was cleared
        is_clipped = any(recorder.is_clipped(parameter) for recorder in recorders)
        return not is_clipped and not is_zero(parameter.grad)

    unaccounted = [name for name, parameter in parameters.items() if is_unaccounted(parameter)]
    if unaccounted:
        raise complaint(
            who,
            f"the parameters {first_few(unaccounted)} have a gradient in .grad that is not, or not wholly, the sum of "
            "per-sample gradients, so that nothing bounds what a sample adds to it",
            "per-sample gradients of all that is in .grad",
            "If that gradient is left from an earlier step, clear it: optimizer.zero_grad(). If it is of this step, "
            "use the parameter through its layer, or through expanded_nn.expanded(weight).",
        )


def changes_itself(model: nn.Module, name: str) -> bool:
    """Whether a forward changes a parameter in place, as that of an embedding with a `max_norm` does."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "max_norm", None) is not None


class Part(NamedTuple):
    """The rows of one parameter, or of several small ones side by side; as real numbers."""

    shapes: dict[str, torch.Size]  # by the name of the parameter
    rows: FactoredTensor  # of several parameters as a matrix (B, numbers in a row)

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """Takes a tensor of the shape of one row apart, by parameter."""
        if len(self.shapes) == 1:
            return {name: value.view(shape) for name, shape in self.shapes.items()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        values = cast(list[Tensor], torch.split_with_sizes_copy(value, sizes))
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), values, strict=True)}


def side_by_side(held: Mapping[str, Tensor], join: bool = True) -> list[Part]:
    """The rows of each parameter, small dense ones side by side if `join`."""
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
        parts.append(Part(shapes, _with_history(torch.cat([matrix for _, _, matrix in group], 1))))
    return parts


def _small_matrix(rows: Tensor) -> Tensor | None:
    """The rows as `(B, numbers in a row)`, if they are few numbers and dense; else `None`."""
    if not cost.is_worth_joining(rows.numel()):
        return None
    if isinstance(rows, FactoredTensor):
        return rows.held_matrix()
    return rows.detach().reshape(rows.shape[0], math.prod(rows.shape[1:]))


def squared_norms(parts: Iterable[Part]) -> list[Tensor]:
    """`||row||^2` for each row of each part, `(B,)`."""
    products, squares = Products(), []
    for _, rows in parts:
        rows.dense_for_norms()
        squares.append(widened(rows).squared_norms(products).clamp(min=0))
    return squares


def lengths(squares: Iterable[Tensor], parts: Sequence[Part]) -> Tensor:
    """The norm of each row over all parts, from the squares; where these overflow or vanish, from scaled rows."""
    total = added(squares)
    if total.requires_grad:  # at a row of zeros the root's derivative is infinite, that of the norm is taken for 0
        are_zero = total.eq(0)
        norms = total.masked_fill(are_zero, 1).sqrt().masked_fill(are_zero, 0)
    else:
        norms = total.sqrt()
    if norms.numel() == 0 or norms.is_meta:
        return norms
    numbers = torch.finfo(norms.dtype)
    low, high = (numbers.tiny / numbers.eps) ** 0.5, numbers.max**0.5
    smallest, largest = norms.detach().aminmax()
    if is_traced():
        in_range = (low < smallest) & (largest < high)
        assume(
            in_range,
            "call after call the squares of its gradients are out of range",
            lambda: (((low < norms) & (norms < high)) | _are_zero(part.rows for part in parts)).all(),
        )
        return norms
    if low < float(smallest) and float(largest) < high:  # false for NaN
        return norms
    doubtful = (~((norms > low) & (norms < high))).nonzero().flatten()
    doubtful = doubtful[~_are_zero(part.rows[doubtful] for part in parts)]
    if len(doubtful):
        alone = [_scaled_lengths(widened(part.rows)[doubtful]) for part in parts]
        norms[doubtful] = _scaled_length(torch.stack(alone, 1)).to(norms.dtype)
    return norms


def _are_zero(parts: Iterable[Tensor]) -> Tensor:  # (B,)
    """Whether a sample's rows are zero because a factor of each is, as where its loss is zero."""
    return torch.stack([_have_zero_factors(rows) for rows in parts]).all(0)


def _have_zero_factors(rows: Tensor) -> Tensor:  # (B,)
    zero = []
    for size, terms in as_factored(rows).blocks:
        of_block = torch.ones(size, dtype=torch.bool, device=rows.device)
        for guarded in terms:
            of_block = of_block & guarded.term.have_zero_factors()
        zero.append(of_block)
    return torch.cat(zero)


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
    """The rows as they are now: what is made dense later, or replaced in place, is not seen here.

    Rows with a history are dense, as autograd knows nothing of their factors.
    """
    if rows.requires_grad and torch.is_grad_enabled():
        return _with_history(materialized(rows))
    if not isinstance(rows, FactoredTensor):
        return as_factored(rows)
    return rows._like(rows.blocks, rows.shape)


def _with_history(rows: Tensor) -> FactoredTensor:
    """Dense rows with their history, if they have one."""
    return FactoredTensor.of(Differentiable.of(rows)) if rows.requires_grad else as_factored(rows)


def complex_like(value: Tensor, like: Tensor) -> Tensor:
    """A value made of the rows' real numbers, with complex numbers again where `like` has such."""
    return torch.view_as_complex(value) if like.is_complex() else value


def added(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors, made one by one, so that none is kept; an empty one without any."""
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part.to(total.device)
    return torch.zeros(0) if total is None else total


def first_few(items: list[Any]) -> str:
    """The first items of a list that may be long."""
    return f"{items[:5]}{'...' if len(items) > 5 else ''}"
