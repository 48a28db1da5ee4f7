"""Using the rows: the algebra of the `B x P` matrix G of per-sample gradients, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn._expand import Recorder
from expanded_nn._module import Expanded, PerSampleModule, all_parameters
from expanded_nn._sharded import added_over_ranks, is_shard, scattered
from expanded_nn._terms import shared_products
from expanded_nn.factored import FactoredTensor, as_factored, as_real, average, widened
from expanded_nn.projection import Projection

FEW_NUMBERS = 1 << 16  # in all rows of a parameter: below, an operation costs more than its arithmetic


class _Part(NamedTuple):
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


class PerSampleGrads(Mapping[str, Tensor]):
    """The per-sample gradients of a model, and the algebra of the matrix G `(B, P)` they stand for.

    A mapping from parameter name to `(B, *shape)`. It is a snapshot: later steps do not change it. None of `norms`,
    `sum`, `mean`, `gram`, `matvec` builds G; they work on the factors. A complex number counts as two real ones in
    norms, variances and products.

    Args:
        rows: Parameter name -> `(B, *shape)`, dense or factored.

    Raises:
        PerSampleError: If the parameters hold different numbers of rows.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._batch = _batch_size(rows)
        self._rows = {name: _snapshot(each) for name, each in rows.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"PerSampleGrads({', '.join(f'{name}: {tuple(rows.shape)}' for name, rows in self.items())})"

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self._batch

    def rows(self, index: slice | Tensor) -> PerSampleGrads:
        """The gradients of some of the samples, as of one of two passes.

        Args:
            index: A slice, or the samples' numbers `(n,)`, or a mask `(B,)`.
        """
        return PerSampleGrads({name: rows[index] for name, rows in self._rows.items()})

    @overload
    def norms(self, per_parameter: Literal[False] = False) -> Tensor: ...
    @overload
    def norms(self, per_parameter: Literal[True]) -> dict[str, Tensor]: ...
    @overload
    def norms(self, per_parameter: bool) -> Tensor | dict[str, Tensor]: ...

    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """The Euclidean norm of each row, accumulated in float32 at the least.

        Args:
            per_parameter: Whether to give the norms of each parameter's rows by name.

        Returns:
            `(B,)` over all parameters together, or name -> `(B,)`.
        """
        if per_parameter:
            squares = _squared_norms(_parts(self._rows, join=False))
            return {name: each.sqrt() for name, each in zip(self, squares, strict=True)}
        return _added(_squared_norms(_parts(self._rows))).sqrt()

    def sum(
        self,
        weights: Tensor | None = None,  # (B,)
    ) -> dict[str, Tensor]:
        """`sum_b weights[b] * row[b]` of each parameter, `(*shape)`; the plain sum without `weights`.

        Raises:
            PerSampleError: If `weights` has another shape than `(B,)`.
        """
        if weights is not None and weights.shape != (self.batch_size,):
            raise complaint(
                "PerSampleGrads.sum",
                f"weights has shape {tuple(weights.shape)}",
                f"({self.batch_size},)",
                "Give one a row.",
            )
        return self._by_parameter(lambda rows: rows.weighted_sum(weights))

    def mean(self) -> dict[str, Tensor]:
        """The mean row of each parameter, `(*shape)`."""
        return self._by_parameter(average)

    def var(self, correction: float = 1) -> dict[str, Tensor]:
        """The variance over the rows of each entry of each parameter, `(*shape)`.

        Args:
            correction: What is taken off B in the denominator, as in `torch.var`.
        """
        parts = {name: _variance(rows, correction) for name, rows in self._real().items()}
        return {name: each.sum(-1) if self._rows[name].is_complex() else each for name, each in parts.items()}

    def gram(self, other: PerSampleGrads | None = None) -> Tensor:
        """The inner products of all rows with all rows of `other`, or with each other: `G @ other.T`, `(B, B')`.

        Raises:
            PerSampleError: If `other` has other parameters, or parameters of other shapes.
        """
        other = self if other is None else other
        self._refuse_other_names(other, "gram")
        for name, rows in self._rows.items():
            if rows.shape[1:] != other[name].shape[1:]:
                raise complaint(
                    "PerSampleGrads.gram",
                    f"{name!r} has rows of shape {tuple(rows.shape[1:])} and {tuple(other[name].shape[1:])}",
                    "the rows of the same parameters",
                    "Take both from one model, or from copies of it.",
                )
        theirs = self._real() if other is self else other._real()
        mine = theirs if other is self else self._real()
        return _added(widened(rows).gram(widened(theirs[name])) for name, rows in mine.items())

    def matvec(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each row with one vector, `G @ v`, `(B,)`.

        Args:
            vectors: Parameter name -> `(*shape)`.

        Raises:
            PerSampleError: If `vectors` has other names than the parameters.
        """
        self._refuse_other_names(vectors, "matvec")
        return _added(_matvec(rows, vectors[name]) for name, rows in self._rows.items())

    def project(self, dim: int, *, generator: torch.Generator | None = None, seed: int = 0) -> Tensor:
        """A random projection of the rows, `(B, dim)`, that keeps inner products in expectation.

        That of `Projection(dim, seed=seed)`; for many batches make one and keep it. With a `generator` the entries of
        the matrix are drawn from N(0, 1 / dim), anew in each call and one direction after the other: the projection
        depends on the parameters and the generator's state alone, so that the same sample projects alike in any batch
        (Johnson and Lindenstrauss, 1984).

        Args:
            dim: The number of dimensions to project to.
            generator: Where normal numbers come from, on the parameters' device; slow.
            seed: Of the projection, where there is no generator.

        Raises:
            ValueError: If `dim` or `seed` has no meaning.
        """
        if generator is None:
            return Projection(dim, seed=seed)(self)
        columns = []
        for _ in range(dim):
            directions = {
                name: torch.randn(rows.shape[1:], generator=generator, dtype=rows.dtype, device=generator.device)
                for name, rows in self._rows.items()
            }
            for each in directions.values():
                if each.is_complex():  # of variance 1 in each part
                    each *= math.sqrt(2)
            columns.append(self.matvec({name: each.to(self._rows[name].device) for name, each in directions.items()}))
        return torch.stack(columns, 1) / math.sqrt(dim)

    def flatten(self) -> Tensor:
        """G itself, dense: `(B, P)`."""
        return torch.cat(
            [
                torch.cat([part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in rows.chunks()])
                for rows in self._rows.values()
            ],
            1,
        )

    def _real(self) -> dict[str, FactoredTensor]:
        """The rows as real numbers."""
        return {name: as_real(rows) for name, rows in self._rows.items()}

    def _by_parameter(self, value: Callable[[FactoredTensor], Tensor]) -> dict[str, Tensor]:
        found = {name: each for part in _parts(self._rows) for name, each in part.split(value(part.rows)).items()}
        return {name: _as_before(found[name], rows) for name, rows in self._rows.items()}

    def _refuse_other_names(self, other: Mapping[str, object], what: str) -> None:
        if set(other) != set(self):
            raise complaint(
                f"PerSampleGrads.{what}",
                f"the names differ in {sorted(set(other) ^ set(self))}",
                "one entry for each parameter that has rows",
                "Leave out, or add, what differs.",
            )


def per_sample_grads(model: nn.Module) -> PerSampleGrads:
    """The rows that `model` holds now, as the matrix G and its algebra.

    Args:
        model: A model in per-sample mode, after a backward.

    Returns:
        A mapping from parameter name to `(B, *shape)`; parameters that no backward has reached are not in it.

    Raises:
        PerSampleError: If a trainable parameter belongs to no module in per-sample mode.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample()
        >>> model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> enn.per_sample_grads(model).norms().shape
        torch.Size([5])
    """
    parameters, _ = _recorded(model)
    return PerSampleGrads(_held(parameters))


def clip_grad_sample_norms_(
    model: nn.Module, max_norm: float | Mapping[str, float], *, reduction: str = "sum"
) -> Tensor | dict[str, Tensor]:
    """Scales each row to norm at most `max_norm` and sets `.grad` to the sum of the clipped rows.

    The rows themselves stay as they are. With `per_sample(accumulate_grad=False)` the clipped sum is instead *added* to
    `.grad`, and the rows are freed, so that micro-batches accumulate at constant memory: take `reduction="sum"` there,
    and divide by the size of the whole batch at the end. Norms are accumulated in float32 at the least (clipping as in
    Abadi et al., 2016, "Deep learning with differential privacy").

    Args:
        model: A model in per-sample mode, after a backward.
        max_norm: The norm to clip to, over all parameters together; or several by name, of a parameter or of a module,
            whose parameters are clipped together but for those that have a nearer name.
        reduction: `"sum"`, or `"mean"` to divide by the number of rows.

    Returns:
        The norms from before the clipping, `(B,)`, or name -> `(B,)` where `max_norm` is a mapping.

    Raises:
        PerSampleError: If no parameter has rows, a row holds inf or NaN, a parameter belongs to no module in per-sample
            mode, or `max_norm` lacks one or has a name too many.
        ValueError: If `reduction` or `max_norm` has no meaning.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f'clip_grad_sample_norms_: reduction is {reduction!r}; wanted "sum" or "mean".')
    limits = max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]
    if any(not limit > 0 for limit in limits):
        raise ValueError(f"clip_grad_sample_norms_: max_norm is {max_norm}; wanted a number above 0.")
    with torch._C.DisableTorchFunctionSubclass():  # the rows' own dispatch costs more than the algebra of small models
        return _clip(model, max_norm, reduction)


def _clip(model: nn.Module, max_norm: float | Mapping[str, float], reduction: str) -> Tensor | dict[str, Tensor]:
    parameters, recorders = _recorded(model)
    held = _held(parameters)
    if not held and any(each.requires_grad for each in parameters.values()):
        raise complaint(
            "clip_grad_sample_norms_",
            "no parameter has rows",
            "the rows of a backward in per-sample mode, (0, *shape) if there were no samples",
            "Clip after backward and before zero_grad; with accumulate_grad=False, clipping takes the rows away.",
        )
    count = _batch_size(held)
    shards = [parameters[name] for name in held if is_shard(parameters[name])]
    together = not isinstance(max_norm, Mapping)
    # sums of shards add up over the ranks, one after the other in the same order, whatever the numbers of samples there
    parts = [_Part(shapes, _snapshot(rows)) for shapes, rows in _parts(held, join=together and not shards)]
    adds = any(not each.settings.accumulate_grad for each in recorders)
    limits = max_norm if isinstance(max_norm, Mapping) else {"": max_norm}
    groups = dict.fromkeys(held, "") if together else _grouped(held, limits)
    held.clear()
    squares = list(zip([groups[next(iter(shapes))] for shapes, _ in parts], _squared_norms(parts), strict=True))
    norms = {key: _added(each for group, each in squares if group == key).sqrt() for key in limits}
    for key, each in norms.items():
        _refuse_nonfinite(key or "all parameters", each)
    factors = {key: _factors(each, limits[key]) for key, each in norms.items()}
    if shards and reduction == "mean":
        count = added_over_ranks(count, shards[0])
    while parts:  # taken out one by one, so that the rows make room for the sums
        shapes, rows = part = parts.pop()
        weights = factors[groups[next(iter(shapes))]]
        totals = part.split(widened(rows).weighted_sum(weights / max(1, count) if reduction == "mean" else weights))
        del part, rows
        for name, total in totals.items():
            _set_grad(parameters[name], total, add=adds)
            for recorder in recorders if adds else []:
                recorder.forget(parameters[name])
    for recorder in recorders:
        recorder.note_grads()
    return norms[""] if together else norms


def _grouped(names: Iterable[str], limits: Mapping[str, float]) -> dict[str, str]:
    """Parameter name -> the nearest of the names that have a limit: its own, or that of a module around it."""
    groups = {}
    for name in names:
        path = name.split(".")
        around = (".".join(path[:depth]) for depth in range(len(path), -1, -1))
        key = next((each for each in around if each in limits), None)
        if key is not None:
            groups[name] = key
    lacking, idle = [name for name in names if name not in groups], sorted(set(limits) - set(groups.values()) - {""})
    if lacking or idle:
        raise complaint(
            "clip_grad_sample_norms_",
            f"max_norm has none for {_some(lacking)} and more for {_some(idle)}",
            "one for each parameter that has rows, or for a module around it",
            "Add what is lacking, leave out what has no rows.",
        )
    return groups


def _set_grad(parameter: Tensor, total: Tensor, *, add: bool) -> None:
    total = _as_before(total, parameter).to(parameter.dtype)
    if is_shard(parameter):
        total = scattered(total, parameter)
    parameter.grad = parameter.grad + total if add and parameter.grad is not None else total


def _squared_norms(parts: Iterable[_Part]) -> list[Tensor]:
    with shared_products():
        found = []
        for _, rows in parts:
            rows.dense_for_norms()
            found.append(widened(rows).squared_norms().clamp(min=0))
        return found


def _recorded(model: nn.Module) -> tuple[dict[str, nn.Parameter], list[Recorder]]:
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
            f"the parameters {_some(others)} have no rows",
            "every trainable parameter in a module in per-sample mode",
            "Switch it on before the forward: convert(model, inplace=True).per_sample(True).",
        )
    recorders = list(dict.fromkeys(each for each in recording.values() if each is not None))
    kinds = {(each.settings.loss_reduction, each.settings.accumulate_grad) for each in recorders}
    if len(kinds) > 1:
        raise complaint(
            type(model).__name__,
            f"its parts are in per-sample mode with (loss_reduction, accumulate_grad) = {sorted(kinds)}",
            "the same for all of them",
            "Switch on the whole model at once: per_sample(model, ...).",
        )
    return parameters, recorders


def _held(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter name -> the rows it holds, of those that hold any."""
    held = {name: getattr(parameter, "grad_sample", None) for name, parameter in parameters.items()}
    return {name: rows for name, rows in held.items() if rows is not None}


def _batch_size(held: Mapping[str, Tensor]) -> int:
    """How many rows all parameters hold; 0 without parameters."""
    sizes = {name: rows.shape[0] for name, rows in held.items()}
    if len(set(sizes.values())) > 1:
        raise complaint(
            "per_sample_grads",
            f"the parameters hold {sizes} rows",
            "equally many",
            "Clear the gradients and run again.",
        )
    return next(iter(sizes.values()), 0)


def _parts(held: Mapping[str, Tensor], join: bool = True) -> list[_Part]:
    """The rows of each parameter; small ones that are dense may be side by side."""
    parts, small = [], dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Size, Tensor]]]()
    for name, rows in held.items():
        real = as_real(as_factored(rows)) if rows.is_complex() else rows
        matrix = _small_matrix(real) if join else None
        if matrix is None:
            parts.append(_Part({name: real.shape[1:]}, as_factored(real)))
        else:
            small.setdefault((real.dtype, real.device), []).append((name, real.shape[1:], matrix))
    for group in small.values():
        shapes = {name: shape for name, shape, _ in group}
        parts.append(_Part(shapes, as_factored(torch.cat([matrix for _, _, matrix in group], 1))))
    return parts


def _small_matrix(rows: Tensor) -> Tensor | None:
    """Few numbers that are held as dense rows, `(B, numbers in a row)`."""
    if rows.numel() > FEW_NUMBERS:
        return None
    if isinstance(rows, FactoredTensor):
        return rows.held_matrix()
    return rows.detach().reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _factors(norms: Tensor, max_norm: float) -> Tensor:
    return (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def _refuse_nonfinite(what: str, norms: Tensor) -> None:
    if math.isfinite(norms.sum()):  # one operation in place of four; a sum may be too large as well
        return
    bad = (~norms.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise complaint(
            "clip_grad_sample_norms_",
            f"the gradient of {what} is inf or NaN in rows {_some(bad)}",
            "finite rows",
            "Leave these samples out, or scale their loss down.",
        )


def _some(items: list[Any]) -> str:
    """The first items of a list that may be long."""
    return f"{items[:10]}{'...' if len(items) > 10 else ''}"


def _snapshot(rows: Tensor) -> FactoredTensor:
    if not isinstance(rows, FactoredTensor):
        return as_factored(rows)
    return rows._like(rows.blocks, rows.shape)


def _matvec(rows: FactoredTensor, vector: Tensor) -> Tensor:
    if rows.is_complex():
        rows, vector = as_real(rows), torch.view_as_real(vector.to(rows.dtype).resolve_conj())
    wide = widened(rows)
    return wide.matvec(vector.to(wide.dtype)).to(rows.dtype)


def _as_before(value: Tensor, like: Tensor) -> Tensor:
    """A value for a parameter's real numbers, as complex ones where the parameter has such."""
    return torch.view_as_complex(value) if like.is_complex() else value


def _variance(rows: FactoredTensor, correction: float) -> Tensor:
    wide = widened(rows)
    mean = wide.weighted_sum() / rows.shape[0]
    squares = _added((part - mean).square().sum(0) for part in wide.chunks())
    return (squares / max(0.0, rows.shape[0] - correction)).to(rows.dtype)


def _added(parts: Iterable[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return torch.zeros(0) if total is None else total
