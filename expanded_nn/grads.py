"""Using the rows: the algebra of the `B x P` matrix G of per-sample gradients, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn._expand import Recorder
from expanded_nn._kronecker import KroneckerFactors, kronecker_factors, preconditioned, sides_of
from expanded_nn._module import Expanded, PerSampleModule, all_parameters
from expanded_nn._positions import gram_by_position, gram_takes_rows, positions_of
from expanded_nn._sharded import added_over_ranks, is_shard, scattered
from expanded_nn._terms import OneHot, shared_products
from expanded_nn.factored import FactoredTensor, as_factored, as_real, average, widened
from expanded_nn.projection import Projection

FEW_NUMBERS = 1 << 16  # in all rows of a parameter: below, an operation costs more than its arithmetic
KEPT_QUERIES = 1 << 26  # numbers of dense rows that a snapshot keeps for further products


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
        self._blocks = {name: each.blocks for name, each in self._rows.items()}  # what norms may make dense
        self._queries: dict[str, FactoredTensor] = {}

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

    def gram(self, other: PerSampleGrads | None = None, per_position: bool = False) -> Tensor:
        """The inner products of all rows with all rows of `other`, or with each other: `G @ other.T`, `(B, B')`.

        For many batches against the same few queries, take `batch.gram(queries)`: what is needed of the queries' rows
        is made once and kept in `queries`, if it is not too large.

        Args:
            other: The rows of the same parameters, of other samples.
            per_position: Whether to give each position's part of the inner product, such as each token's: of the rows
                of linear layers `sum_t g[b, t] ⊗ a[b, t]` that of each t. All parameters must have as many positions;
                leave the others out: `PerSampleGrads({name: grads[name] for name in names})`.

        Returns:
            `(B, B')`; with `per_position` `(B, T, B')`, whose sum over the positions is the former.

        Raises:
            PerSampleError: If `other` has other parameters, or parameters of other shapes; with `per_position`, if
                parameters hold rows without positions, or not equally many positions.
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
        if per_position:
            return self._gram_by_position(other)
        mine = self._real()
        theirs = mine if other is self else other._as_queries(mine)
        return _added(widened(rows).gram(widened(theirs[name])) for name, rows in mine.items())

    def _as_queries(self, rows: Mapping[str, FactoredTensor]) -> dict[str, FactoredTensor]:
        """The rows as real numbers; dense, and kept so, where their inner products with such rows need that."""
        numel = sum(each.numel() for each in self._queries.values())
        for name, mine in self._real().items():
            if name in self._queries or numel + mine.numel() > KEPT_QUERIES:
                continue
            if any(gram_takes_rows(term, other) for term in mine.terms() for other in rows[name].terms()):
                self._queries[name] = as_factored(torch.cat(list(mine.chunks())))
                numel += mine.numel()
        return self._real() | self._queries

    def _gram_by_position(self, other: PerSampleGrads) -> Tensor:
        lacking, counts = [], dict[str, set[int]]()
        for name, blocks in self._blocks.items():
            positions = positions_of([term for _, terms in blocks for term in terms])
            if positions is None:
                lacking.append(name)
            else:
                counts[name] = positions
        sizes = set[int]().union(*counts.values())
        if lacking or len(sizes) > 1 or not sizes:
            several = {name: sorted(each) for name, each in counts.items()} if len(sizes) > 1 else {}
            raise complaint(
                "PerSampleGrads.gram",
                f"per_position, and {_some(lacking)} have no positions" if lacking else f"the positions are {several}",
                "linear layers' and embeddings' rows, held as factors, with as many positions each",
                "Leave out the others: PerSampleGrads({name: grads[name] for name in names}); for small layers run the "
                "backward within keep_factors().",
            )
        (size,) = sizes
        total = None
        for name, blocks in self._blocks.items():
            theirs = widened(other._held(name))
            parts = []
            for count, terms in blocks:
                part = torch.zeros(count, size, other.batch_size, dtype=theirs.dtype, device=theirs.device)
                for term in terms if count else ():
                    part += gram_by_position(term.to(theirs.dtype), theirs)
                parts.append(part)
            total = torch.cat(parts) if total is None else total + torch.cat(parts)
        assert total is not None
        return total

    def _held(self, name: str) -> FactoredTensor:
        """The rows of a parameter as they were taken, whatever became dense since."""
        rows = self._rows[name]
        return rows._like(self._blocks[name], rows.shape)

    def kronecker(self, total: Mapping[str, KroneckerFactors] | None = None) -> dict[str, KroneckerFactors]:
        """The Kronecker factors of each weight's second moment, as K-FAC and influence functions take them.

        A row of a linear layer's weight is `sum_t g[b, t] ⊗ a[b, t]`, with `a` the layer's input and `g` the gradient
        of its output, scaled as the rows are: with `loss_reduction="mean"` that of a sample's own loss. The second
        moment of the weight's gradient is taken for `E[g gᵀ] ⊗ E[a aᵀ]` (Martens and Grosse, 2015, "Optimizing neural
        networks with Kronecker-factored approximate curvature"; for convolutions Grosse and Martens, 2016). Factors of
        several batches add up: `factors[name] + more[name]`, or, without memory for both, `factors =
        grads.kronecker(factors)`.

        Weights of linear and recurrent layers, of attention, and of convolutions, which are flattened to `(out, in *
        kernel)`, have factors; vectors and embeddings are left out. Each group of a convolution is a linear map: its
        `g gᵀ` is one of the blocks of `G`, and `A` is the mean over the groups. The weight of a transposed convolution
        begins with the input's channels, so that `G` is there the input's.

        Args:
            total: Factors of earlier batches, which these are added to in place.

        Returns:
            Name -> `(A, G, count)`: the sums over samples and positions of `a aᵀ`, `(in, in)`, and of `g gᵀ`, `(out,
            out)`, and how many were added. In float32 at the least.

        Raises:
            PerSampleError: If a matrix holds dense rows, whose factors are gone: run the backward within
                `keep_factors()`. If `total` has other sizes.
        """
        factors, lacking = dict(total or {}), []
        for name, rows in self._rows.items():
            terms = [term for _, held in self._blocks[name] for term in held]
            if rows.dim() < 3 or (terms and all(isinstance(term, OneHot) for term in terms)):
                continue
            before = factors.get(name)
            if before is not None:
                _refuse_other_sizes("kronecker", name, rows, before)
            found = kronecker_factors(self._blocks[name], rows, before)
            if found is None:
                lacking.append(name)
            else:
                factors[name] = found
        if lacking:
            raise complaint(
                "PerSampleGrads.kronecker",
                f"{_some(lacking)} hold rows that are dense, or of several kinds",
                "the factors of linear layers and convolutions",
                "Run the backward within keep_factors(), and take the factors before the rows are used; leave out "
                "what is neither: PerSampleGrads({name: grads[name] for name in names}).",
            )
        return factors

    def precondition(self, factors: Mapping[str, KroneckerFactors], damping: float) -> PerSampleGrads:
        """The rows times the inverse of a damped Kronecker-factored second moment: `(G + d)⁻¹ · row · (A + d)⁻¹`.

        `A` and `G` are here those of `factors` divided by their count. `queries.precondition(factors, d).gram(train)`
        are influences in the sense of Koh and Liang (2017), with K-FAC in place of the Hessian (Grosse et al., 2023,
        "Studying large language model generalization with influence functions").

        Args:
            factors: As `kronecker()` gives them, of this batch or, added up, of many. Parameters without stay as they
                are.
            damping: The number d that is added to the diagonals, above 0.

        Returns:
            The new rows, factored where these are: `norms`, `gram`, `project` work as before.

        Raises:
            PerSampleError: If `factors` has parameters that have no rows here, matrices of other sizes, none added up,
                or numbers that are not finite.
            ValueError: If `damping` is not above 0.
        """
        if not damping > 0:
            raise ValueError(f"PerSampleGrads.precondition: damping is {damping}; wanted a number above 0.")
        rows = {name: self._held(name) for name in self._rows}
        for name, parts in factors.items():
            if name not in rows or parts.count < 1:
                raise complaint(
                    "PerSampleGrads.precondition",
                    f"factors for {name!r} with count {parts.count}" if name in rows else f"{name!r} has no rows",
                    "factors of parameters that have rows, and of one sample at the least",
                    "Leave this one out.",
                )
            _refuse_other_sizes("precondition", name, rows[name], parts)
            rows[name] = preconditioned(name, rows[name], self._blocks[name], parts, damping)
        return PerSampleGrads(rows)

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


def _refuse_other_sizes(what: str, name: str, rows: Tensor, factors: KroneckerFactors) -> None:
    found, wanted = (len(factors.G), len(factors.A)), sides_of(rows)
    if found != wanted:
        raise complaint(
            f"PerSampleGrads.{what}",
            f"the factors of {name!r} are those of rows {found}",
            f"{wanted}, as the rows are",
            "Take the factors of kronecker() from the same model.",
        )


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
