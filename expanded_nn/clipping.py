"""Clipping: rows of bounded norm, added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint, refuse_no_positive_number, warn
from expanded_nn.common.modes import no_torch_function
from expanded_nn.common.traced import assume, is_traced
from expanded_nn.modules.held import (
    Part,
    batch_size_of,
    changes_itself,
    complex_like,
    first_few,
    held_rows,
    lengths,
    recorded,
    refuse_gradients_without_rows,
    side_by_side,
    snapshot,
    squared_norms,
)
from expanded_nn.recording.leaf import Leaf
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.sharded import added_over_ranks, is_shard, scattered
from expanded_nn.recording.stale import holds_more
from expanded_nn.rows.factors import widened

# a norm to clip to, or a function of the norms that gives the factors
MaxNorm = float | Tensor | Callable[[Tensor], Tensor]


def clip_grad_sample_norms_(
    model: nn.Module, max_norm: MaxNorm | Mapping[str, MaxNorm], *, reduction: str = "sum"
) -> Tensor | dict[str, Tensor]:
    """Scales each row to norm at most `max_norm` and sets `.grad` to the sum of the clipped rows.

    The rows themselves stay as they are. With `per_sample(accumulate_grad=False)` the clipped sum is instead *added* to
    `.grad`, and the rows are freed, so that micro-batches accumulate at constant memory: take `reduction="sum"` there,
    and divide by the size of the whole batch at the end. Norms are accumulated in float32 or a wider dtype (clipping as
    in Abadi et al., 2016, "Deep learning with differential privacy").

    Rows are held until `.grad` is cleared. Without `zero_grad()` those of a step are clipped and added in the next step
    once more, of which a `PerSampleWarning` tells, but not after a step of a fused optimizer.

    Args:
        model: A model in per-sample mode, after a backward; the model itself, not `model.parameters()`.
        max_norm: The norm to clip to, over all parameters together, as a number or a tensor of one. Or a function of
            the norms `(B,)` that gives the number by which each row is multiplied, `(B,)`:
            `lambda norms: 1 / (norms + 0.01)` is automatic clipping (Bu et al., 2022). Or a mapping to any of these
            from names of parameters or modules: the parameters of a module are clipped together, except those with a
            nearer name; `""` is the model. A tied weight goes by the nearest of all its names.
        reduction: `"sum"`, or `"mean"` to divide by the number of rows.

    Returns:
        The norms from before the clipping, `(B,)`, or name -> `(B,)` where `max_norm` is a mapping.

    Raises:
        PerSampleError: If no trainable parameter has rows, a row holds inf or NaN, a parameter belongs to no module in
            per-sample mode, or has a gradient in `.grad` that no row is a part of, so that it would stay unclipped; or
            if `max_norm` lacks a name, or has one of no parameter; or a function gives another shape than `(B,)`, inf
            or NaN.
        ValueError: If `reduction` or `max_norm` has no meaning.
        TypeError: If `model` is no model.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample()
        >>> (9 * model(torch.ones(5, 3))).sum(1).mean().backward()
        >>> enn.clip_grad_sample_norms_(model, max_norm=1.0)
        tensor([25.4558, 25.4558, 25.4558, 25.4558, 25.4558])
        >>> enn.per_sample_grads(model).norms()[0], model.bias.grad  # the rows stay; .grad is the sum of the clipped
        (tensor(25.4558), tensor([1.7678, 1.7678]))
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f'clip_grad_sample_norms_: reduction is {reduction!r}; wanted "sum" or "mean".')
    for name, limit in max_norm.items() if isinstance(max_norm, Mapping) else [(None, max_norm)]:
        if isinstance(limit, Tensor) and limit.numel() == 1 and is_traced():
            assume((limit > 0).all(), "call after call max_norm is not above 0")
        elif not callable(limit):
            argument = "max_norm" if name is None else f"max_norm[{name!r}]"
            wanted = "a number above 0, or a function of the norms"
            if name is None:
                wanted = "a number above 0, a function of the norms, or a mapping from names to these"
            is_list = isinstance(limit, Tensor) and limit.dim() > 0
            remedy = "For a bound per sample give the factors: lambda norms: bounds / norms.clamp(min=bounds)."
            refuse_no_positive_number("clip_grad_sample_norms_", argument, limit, wanted, remedy if is_list else "")
    with no_torch_function():  # the rows' own dispatch costs more than the algebra of small models
        if not torch.is_inference_mode_enabled():
            return _clip(model, max_norm, reduction)
        with torch.inference_mode(False), torch.no_grad():  # training goes on with what it leaves in .grad
            return _clip(model, max_norm, reduction)


def _clip(model: nn.Module, max_norm: MaxNorm | Mapping[str, MaxNorm], reduction: str) -> Tensor | dict[str, Tensor]:
    parameters, recorders = recorded("clip_grad_sample_norms_", model)
    adds = any(not recorder.settings.accumulate_grad for recorder in recorders)
    held = _rows_to_clip(model, parameters, recorders, adds=adds)
    count, together = batch_size_of(held), not isinstance(max_norm, Mapping)
    limits = max_norm if isinstance(max_norm, Mapping) else {"": max_norm}
    groups = dict.fromkeys(held, "") if together else _grouped(model, parameters, held, limits)
    shards = [parameters[name] for name in held if is_shard(parameters[name])]
    # sums of shards add up over the ranks: each rank makes the same sums in the same order, whatever its samples
    parts = [Part(shapes, snapshot(rows)) for shapes, rows in side_by_side(held, join=together and not shards)]
    held.clear()
    norms = _norms(parts, groups, limits)
    _refuse_nonfinite(norms)
    weights = {key: _factors(group_norms, limits[key]) for key, group_norms in norms.items()}
    if reduction == "mean":
        count = added_over_ranks(count, shards[0]) if shards else count
        weights = {key: factors / max(1, count) for key, factors in weights.items()}
    while parts:  # taken out one by one, so that the rows make room for the sums
        shapes, rows = part = parts.pop()
        totals = part.split(widened(rows).weighted_sum(weights[groups[next(iter(shapes))]].to(rows.device)))
        del part, rows
        for name, total in totals.items():
            _set_grad(parameters[name], total, add=adds)
        for recorder in recorders if adds else ():
            recorder.drop([parameters[name] for name in totals])
    for recorder in recorders:
        leaves = (recorder.leaves.get(parameters[name]) for name in groups)
        recorder.note_grads([leaf for leaf in leaves if leaf is not None])
    return norms[""] if together else norms


def _rows_to_clip(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], recorders: list[Recorder], *, adds: bool
) -> dict[str, Tensor]:
    """Parameter name -> its rows, if all that an optimizer would take is made of rows.

    With `adds`, clipping adds to `.grad`, and backwards do not.
    """
    if any(recorder.store.sets_rows_aside for recorder in recorders):
        raise complaint(
            "clip_grad_sample_norms_",
            "grad_sample has the rows of torch.autograd.grad(..., create_graph=True), and those of the backward before "
            "it, which .grad is the sum of, are set aside",
            "the rows of one of them",
            "Clip before that call. If its rows are meant, clear the gradients of the backward before it, by "
            "model.zero_grad(), before that call.",
        )
    held = held_rows(parameters, adds=adds)
    refuse_gradients_without_rows("clip_grad_sample_norms_", parameters, recorders, adds=adds)
    for name, parameter in parameters.items():
        if not parameter.requires_grad and name not in held and getattr(parameter, "grad_sample", None) is not None:
            for recorder in recorders:  # it is not clipped with the others, and must not come back when it is thawed
                recorder.drop([parameter])
    trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if (trainable or not held) and trainable.isdisjoint(held):
        raise complaint(
            "clip_grad_sample_norms_",
            "no trainable parameter has per-sample gradients",
            "those of a backward in per-sample mode",
            "Clip after backward and before zero_grad, also where the batch is empty. With accumulate_grad=False clip "
            "once after each backward: clipping drops the rows there, and they may have been clipped already.",
        )
    if not is_traced():
        known = _leaves_of(parameters, held, recorders)
        if adds:
            _warn_of_earlier_sums(model, known)
            _warn_of_replaced_rows(recorders)
        else:
            _warn_of_what_is_replaced(known)
            _warn_of_earlier_steps(model, known)
    return held


def _warn_of_replaced_rows(recorders: list[Recorder]) -> None:
    """Warns where only the rows of the last of several backwards are there to be clipped."""
    if any(recorder.store.replaces for recorder in recorders):
        warn(
            "clip_grad_sample_norms_: the last backward has replaced the rows of an earlier one of the same forwards, "
            "which were not clipped: with accumulate_grad=False only the last rows are held. Add the losses up before "
            "one backward, or say per_sample(accumulate_grad=True). Clip after each backward if each part of a "
            "sample's gradient may be as large as max_norm."
        )


def _refuse_nonfinite(norms: Mapping[str, Tensor]) -> None:
    """Raises for rows whose norms, by the group that is clipped together, are inf or NaN."""
    for key, group_norms in norms.items():
        bad = _nonfinite(group_norms, "call after call its gradients are not finite")
        if bad:
            raise complaint(
                "clip_grad_sample_norms_",
                f"the per-sample gradients of {key or 'all parameters'} are inf or NaN in the rows {first_few(bad)} of "
                "grad_sample",
                "finite ones",
                "Leave these samples out, or scale their loss down.",
            )


def _leaves_of(
    parameters: Mapping[str, Tensor], held: Iterable[str], recorders: Iterable[Recorder]
) -> list[tuple[str, Leaf]]:
    """The parameters that hold rows, each with what its recorder knows of it."""
    leaves = ((name, recorder.leaves.get(parameters[name])) for recorder in recorders for name in held)
    return [(name, leaf) for name, leaf in leaves if leaf is not None]


def _warn_of_what_is_replaced(leaves: Iterable[tuple[str, Leaf]]) -> None:
    """Says that clipping replaces more than the sum of rows, such as the gradient of a penalty."""
    more = [name for name, leaf in leaves if holds_more(leaf)]
    if more:
        warn(
            f"clip_grad_sample_norms_: .grad of the parameters {first_few(more)} is more than the sum of the "
            "per-sample gradients, as with that of a penalty or of a backward with per-sample mode off, and is "
            "replaced as a whole. Add what is to stay after the clipping."
        )


def _warn_of_earlier_steps(model: nn.Module, leaves: Sequence[tuple[str, Leaf]]) -> None:
    """Says that samples are clipped and added again that an optimizer's step has used already."""
    before = [(name, leaf) for name, leaf in leaves if leaf.rows_clipped_before()]
    if not before:
        return
    count, again = before[0][1].rows_clipped_before(), "so that these samples count again in .grad"
    counted = f"clip_grad_sample_norms_: {count} of the per-sample gradients held were clipped once already"
    changed = [name for name, leaf in before if leaf.changed_since_clipping() and not changes_itself(model, name)]
    if changed:
        warn(
            f"{counted}, before the parameters {first_few(changed)} were changed, as by an optimizer's step, {again}. "
            "Clear the gradients of the last step before the next backward: optimizer.zero_grad()."
        )
    elif any(leaf.was_cleared_since_clipping() for _, leaf in leaves):
        names = first_few([name for name, _ in before])
        warn(
            f"{counted}; since then other gradients were cleared, and those of the parameters {names} were not, "
            f"{again}. Freeze the parameters that no optimizer trains, or clear by model.zero_grad()."
        )


def _warn_of_earlier_sums(model: nn.Module, leaves: Iterable[tuple[str, Leaf]]) -> None:
    """Says that clipping adds to a sum that an optimizer's step has used already."""
    of_earlier_step = (name for name, leaf in leaves if leaf.grad_is_of_earlier_step())
    changed = [name for name in of_earlier_step if not changes_itself(model, name)]
    if changed:
        warn(
            f"clip_grad_sample_norms_: .grad holds the clipped sum from before the parameters {first_few(changed)} "
            "were changed, as by an optimizer's step, so that those samples count again. Clear the gradients of the "
            "last step before the next backward: optimizer.zero_grad()."
        )


def _norms(parts: list[Part], groups: Mapping[str, str], limits: Iterable[str]) -> dict[str, Tensor]:
    """Group -> the norms of the rows over its parameters; a function, as its lists would keep the rows alive."""
    group_of_part = [groups[next(iter(shapes))] for shapes, _ in parts]
    squares = squared_norms(parts)
    norms = {}
    for key in limits:
        chosen = [i for i, group in enumerate(group_of_part) if group == key]
        if chosen:
            norms[key] = lengths([squares[i] for i in chosen], [parts[i] for i in chosen])
        else:
            norms[key] = torch.zeros_like(squares[0])
    return norms


def _grouped(
    model: nn.Module, parameters: Mapping[str, Tensor], held: Iterable[str], limits: Mapping[str, MaxNorm]
) -> dict[str, str]:
    """Parameter name -> the nearest name with a limit: one of its own, or that of a module around it.

    A tied parameter has several names of its own. Entries for parameters without rows now have no effect.
    """
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    names, groups = {name: by_id.get(id(parameters[name]), [name]) for name in held}, {}
    for name, own_names in names.items():
        prefixes = (pair for own_name in own_names for pair in enumerate(_with_modules_around(own_name)))
        with_limit = [(above, prefix) for above, prefix in prefixes if prefix in limits]
        if with_limit:
            groups[name] = min(with_limit, key=itemgetter(0))[1]
    known = {prefix for own_names in by_id.values() for name in own_names for prefix in _with_modules_around(name)}
    lacking, idle = [name for name in names if name not in groups], sorted(set(limits) - known - {""})
    if lacking or idle:
        problem = f"the entries of max_norm for {first_few(idle)} belong to no parameter"
        remedy = "Correct these names, or leave them out."
        if lacking:
            problem = (
                f"max_norm has no entry for the parameters {first_few(lacking)}{f', and {problem}' if idle else ''}"
            )
            remedy = f'{f"{remedy} " if idle else ""}Add an entry: their names, their module\'s, or "" for all others.'
        wanted = "one entry for each parameter that has per-sample gradients, or for a module around it"
        raise complaint("clip_grad_sample_norms_", problem, wanted, remedy)
    return groups


def _with_modules_around(name: str) -> list[str]:
    """A parameter's name, and those of the modules around it, nearest first; the last one is that of the model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _set_grad(parameter: Tensor, total: Tensor, *, add: bool) -> None:
    total = complex_like(total, parameter).to(parameter.grad_dtype or parameter.dtype)
    if is_shard(parameter):
        total = scattered(total, parameter)
    # a tensor of its own, and no view of the sums of several: `grad.detach_()` refuses these
    parameter.grad = parameter.grad + total if add and parameter.grad is not None else total.data


def _factors(norms: Tensor, max_norm: MaxNorm) -> Tensor:
    if callable(max_norm):
        factors = max_norm(norms.clone())  # it may change them in place
        factors = factors.detach() if isinstance(factors, Tensor) else factors
        if not isinstance(factors, Tensor) or factors.shape != norms.shape or factors.is_complex():
            returned = f"a {type(factors).__name__}"
            if isinstance(factors, Tensor):
                returned = "complex numbers" if factors.is_complex() else f"shape {tuple(factors.shape)}"
            raise complaint(
                "clip_grad_sample_norms_",
                f"the function given as max_norm returned {returned}",
                f"a tensor of shape {tuple(norms.shape)}, the number that multiplies each sample's gradient",
                "Return one number per sample, such as max_norm / norms.clamp(min=max_norm).",
            )
        factors = factors.to(norms.device)
        bad = _nonfinite(factors, "call after call the function given as max_norm returns inf or NaN")
        if bad:
            raise complaint(
                "clip_grad_sample_norms_",
                f"the function given as max_norm returned inf or NaN for the rows {first_few(bad)} of grad_sample, "
                f"whose norms are {first_few(norms[bad].tolist())}",
                "finite numbers, for a norm of 0 as well",
                "Add to the norm or clamp it, as in 1 / (norms + 0.01) or max_norm / norms.clamp(min=max_norm).",
            )
        return factors
    max_norm = max_norm.detach().reshape(()) if isinstance(max_norm, Tensor) else max_norm
    return (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def _nonfinite(
    values: Tensor,  # (B,)
    otherwise: str,
) -> list[int]:
    """The samples whose number is inf or NaN; a trace assumes that there are none, or else what `otherwise` says."""
    if is_traced():
        assume(values.isfinite().all(), otherwise)
        return []
    if math.isfinite(values.sum()):  # one operation in place of four; a sum may be too large as well
        return []
    numbers: list[int] = (~values.isfinite()).nonzero().flatten().tolist()
    return numbers
