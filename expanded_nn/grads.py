"""Using the rows: the algebra of the `B x P` matrix G of per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from expanded_nn._errors import UnknownNameError, complaint, refuse_no_bool, refuse_other_kind, shown
from expanded_nn.common.modes import no_torch_function, version_of
from expanded_nn.core import cost
from expanded_nn.core.kronecker import EigenFactors, KroneckerFactors, eigenbasis
from expanded_nn.core.terms import OneHot
from expanded_nn.factored import FactoredTensor, as_factored, as_real
from expanded_nn.modules.held import (
    added,
    batch_size_of,
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
from expanded_nn.preconditioning import preconditioned
from expanded_nn.projection import Projection
from expanded_nn.rows.arguments import (
    refuse_emptiness,
    refuse_no_factors,
    refuse_no_rows,
    refuse_no_tensors,
    refuse_other_sizes,
    refuse_other_weights,
    refuse_others,
    refuse_strange_damping,
    refuse_strange_factors,
    refuse_strange_mask,
    samples_chosen,
)
from expanded_nn.rows.factors import average, in_one_dtype, widened


class PerSampleGrads(Mapping[str, Tensor]):
    """The per-sample gradients of a model, and the algebra of the matrix G `(B, P)` they stand for.

    A mapping from parameter name to `(B, *shape)`. It is a snapshot: later steps do not change it. None of `norms`,
    `sum`, `mean`, `gram`, `matvec` builds G; they work on the factors. A complex number counts as two real ones in
    norms, variances and products. `torch.save` writes the factors; `torch.load` reads them wherever expanded_nn is
    imported, with `weights_only=True` as well.

    Rows of `torch.autograd.grad(..., create_graph=True)` have a history. So has what is computed from them here, but
    for `project`, `kronecker`, `ekfac` and `precondition`. Within `torch.no_grad()` nothing has, which takes less
    memory.

    Args:
        rows: Parameter name -> `(B, *shape)`, dense or factored.

    Raises:
        PerSampleError: If the parameters hold different numbers of rows. One that is a `KeyError` too, at
            `grads[name]`, if there is no such parameter.

    Example:
        >>> import torch, expanded_nn as enn
        >>> grads = enn.PerSampleGrads({"weight": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "bias": torch.zeros(2, 1)})
        >>> grads.norms(), grads.gram()
        (tensor([5., 2.]), tensor([[25.,  8.],
                [ 8.,  4.]]))
        >>> grads.mean()["weight"], grads.rows(slice(0, 1)).batch_size
        (tensor([1.5000, 3.0000]), 1)
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        with no_torch_function():
            refuse_no_rows("PerSampleGrads", "rows", rows)
            self._batch = batch_size_of(rows)
            self._rows = {name: snapshot(held) for name, held in rows.items()}
        self._with_history = {
            name: held for name, held in rows.items() if held.requires_grad and torch.is_grad_enabled()
        }
        self._blocks = {name: held._cell.blocks for name, held in self._rows.items()}  # as norms may make rows dense
        self._queries: dict[str, FactoredTensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if not isinstance(name, str) or name not in self._rows:
            raise UnknownNameError(
                f"PerSampleGrads: it has no entry {shown(name)}; wanted a parameter's name, one of "
                f"{first_few(list(self._rows))}. For some samples take rows(index); sample i of each parameter is "
                "{name: rows[i] for name, rows in grads.items()}."
            )
        self._rows[name] = self._held(name)
        return self._with_history.get(name, self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    __eq__, __hash__ = object.__eq__, object.__hash__  # a mapping's would ask whether tensors are true

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"PerSampleGrads({', '.join(f'{name}: {tuple(rows.shape)}' for name, rows in self.items())})"

    def __reduce__(self) -> Any:
        return PerSampleGrads, ({name: self._held(name) for name in self._rows},)

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self._batch

    def rows(self, index: slice | Tensor) -> PerSampleGrads:
        """The gradients of some of the samples, such as those of one of two passes.

        Args:
            index: A slice, or the samples' numbers `(n,)`, or a mask `(B,)`.

        Raises:
            TypeError: If it is one number, or anything else.
            PerSampleError: If there are other samples than that.
        """
        chosen = samples_chosen(index, self._batch)
        return PerSampleGrads({name: rows[chosen] for name, rows in self.items()})

    @overload
    def norms(self, per_parameter: Literal[False] = False) -> Tensor: ...
    @overload
    def norms(self, per_parameter: Literal[True]) -> dict[str, Tensor]: ...
    @overload
    def norms(self, per_parameter: bool) -> Tensor | dict[str, Tensor]: ...

    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """The Euclidean norm of each row, accumulated in float32 or a wider dtype.

        Args:
            per_parameter: Whether to give the norms of each parameter's rows by name.

        Returns:
            `(B,)` over all parameters together, or name -> `(B,)`.
        """
        refuse_no_bool("PerSampleGrads.norms", per_parameter=per_parameter)
        refuse_emptiness("PerSampleGrads.norms", self._rows)
        parts = side_by_side(self._rows, join=not per_parameter)
        squares = squared_norms(parts)
        if per_parameter:
            own = zip(self, squares, parts, strict=True)
            return {name: lengths([square], [part]) for name, square, part in own}
        return lengths(squares, parts)

    def sum(
        self,
        weights: Tensor | None = None,  # (B,)
    ) -> dict[str, Tensor]:
        """`sum_b weights[b] * row[b]` of each parameter, `(*shape)`; the plain sum without `weights`.

        A row that is inf or NaN makes the sum so, even with the weight 0: choose the others by `rows(index)`. Several
        weightings W, `(K, B)`, at once: `torch.func.vmap(grads.sum)(W)`, `(K, *shape)` each.

        Raises:
            PerSampleError: If `weights` has another shape than `(B,)`.
        """
        refuse_emptiness("PerSampleGrads.sum", self._rows)
        if weights is not None:
            refuse_other_weights(weights, self.batch_size)
            if weights.is_complex():
                real, imaginary = self.sum(weights.real), self.sum(weights.imag)
                return {name: total + 1j * imaginary[name] for name, total in real.items()}
        return self._by_parameter(lambda rows: widened(rows).weighted_sum(weights).to(rows.dtype))

    def mean(self) -> dict[str, Tensor]:
        """The mean row of each parameter, `(*shape)`."""
        refuse_emptiness("PerSampleGrads.mean", self._rows)
        return self._by_parameter(average)

    def var(self, correction: float = 1) -> dict[str, Tensor]:
        """The variance over the rows of each entry of each parameter, `(*shape)`.

        Args:
            correction: What is taken off B in the denominator, as in `torch.var`.
        """
        refuse_emptiness("PerSampleGrads.var", self._rows)
        variances = {name: _variance(rows, correction) for name, rows in self._real().items()}
        return {name: var.sum(-1) if self._rows[name].is_complex() else var for name, var in variances.items()}

    def gram(self, other: Mapping[str, Tensor] | None = None, per_position: bool = False) -> Tensor:
        """The inner products of all rows with all rows of `other`, or with each other: `G @ other.T`, `(B, B')`.

        For many batches against the same few queries, take `batch.gram(queries)`: what is needed of the queries' rows
        is made once and kept in `queries`, if it is not too large.

        Args:
            other: The rows of the same parameters, of other samples: a `PerSampleGrads`, or a mapping by name.
            per_position: Whether to give each position's part of the inner product, such as each token's: of the rows
                of linear layers `sum_t g[b, t] ⊗ a[b, t]` that of each t. All parameters must have as many positions;
                leave the others out: `PerSampleGrads({name: grads[name] for name in names})`.

        Returns:
            `(B, B')`; with `per_position` `(B, T, B')`, whose sum over the positions is the former.

        Raises:
            PerSampleError: If `other` has other parameters, or parameters of other shapes; with `per_position`, if
                parameters hold rows without positions, or not equally many positions.
        """
        refuse_no_bool("PerSampleGrads.gram", per_position=per_position)
        refuse_emptiness("PerSampleGrads.gram", self._rows)
        if other is None:
            other = self
        elif not isinstance(other, PerSampleGrads):
            refuse_no_rows("PerSampleGrads.gram", "other", other)
        with no_torch_function():
            refuse_others("gram", self._rows, other, 1)
            if not isinstance(other, PerSampleGrads):
                other = PerSampleGrads(other)
            if per_position:
                return self._gram_by_position(other)
            own_rows = self._real()
            other_rows = own_rows if other is self else other._as_queries(own_rows)
            pairs = (in_one_dtype(rows, other_rows[name]) for name, rows in own_rows.items())
            return added(rows.gram(others) for rows, others in pairs)

    def _as_queries(self, rows: Mapping[str, FactoredTensor]) -> dict[str, FactoredTensor]:
        """The rows as real numbers; dense, and kept so, where their inner products with `rows` take dense ones."""
        numel = sum(kept.numel() for kept in self._queries.values())
        for name, own_rows in self._real().items():
            if name in self._queries or not cost.keeps_queries(numel + own_rows.numel()):
                continue
            if any(term.gram_takes_rows(other) for term in own_rows.terms() for other in rows[name].terms()):
                self._queries[name] = as_factored(torch.cat(list(own_rows.chunks())))
                numel += own_rows.numel()
        return self._real() | self._queries

    def _gram_by_position(self, other: PerSampleGrads) -> Tensor:
        own_rows = {name: widened(self._held(name)) for name in self._rows}
        counts = {name: None if rows.is_complex() else rows.positions() for name, rows in own_rows.items()}
        lacking = [name for name, positions in counts.items() if positions is None]
        numbers = {name: sorted(positions) for name, positions in counts.items() if positions is not None}
        sizes = {size for positions in numbers.values() for size in positions}
        if lacking or len(sizes) != 1:
            raise complaint(
                "PerSampleGrads.gram",
                f"per_position=True, and the per-sample gradients of {first_few(lacking)} have no positions"
                if lacking
                else f"per_position=True, and the parameters have different numbers of positions, {numbers}",
                "linear layers and embeddings with equally many positions, whose per-sample gradients are factored",
                "Leave out the others: PerSampleGrads({name: grads[name] for name in names}); for small layers switch "
                "on per_sample(keep_factors=True).",
            )
        (size,) = sizes
        return added(rows.gram_by_position(widened(other._held(name)), size) for name, rows in own_rows.items())

    def _held(self, name: str) -> FactoredTensor:
        """The rows of a parameter as they were in the beginning: factored, even if they were made dense since."""
        rows = self._rows[name]
        is_as_it_was = not version_of(rows) and rows.is_dense
        return rows._like(self._blocks[name], rows.shape) if is_as_it_was else rows

    def kronecker(
        self, total: Mapping[str, KroneckerFactors] | None = None, *, mask: Tensor | None = None
    ) -> dict[str, KroneckerFactors]:
        """The Kronecker factors of each weight's second moment, as K-FAC and influence functions take them.

        A row of a linear layer's weight is `sum_t g[b, t] ⊗ a[b, t]`, with `a` the layer's input and `g` the gradient
        of its output, scaled as the rows are: with `loss_reduction="mean"` that of a sample's own loss. The second
        moment of the weight's gradient is taken for `E[g gᵀ] ⊗ E[a aᵀ]` (Martens and Grosse, 2015, "Optimizing neural
        networks with Kronecker-factored approximate curvature"; for convolutions Grosse and Martens, 2016). Factors of
        several batches, or processes, add up: `factors[name] + more[name]`.

        Weights of linear and recurrent layers, of attention, and of convolutions, which are flattened to `(out, in *
        kernel)`, have factors; vectors and embeddings are left out. Each group of a convolution is a linear map: its
        `g gᵀ` is one of the blocks of `G`, and `A` is the mean over the groups. A weight that begins with the input's
        features, as that of a transposed convolution or of `transformers`' `Conv1D`, has `G` of the input, and `A` of
        the output's gradient.

        Args:
            total: The factors so far, of earlier batches. They are changed in place and returned, so that `factors =
                grads.kronecker(factors)`, with `None` before the first batch, adds up a whole data set in the memory of
                one. What few samples add waits until `A` or `G` is read, or there is enough of it for one product.
                Weights that only one of the two has are kept, or begun.
            mask: Which positions count, `(B, T)`, `True` for those that are no padding, for layers with T positions.
                Without it padding counts: its inputs are part of `A`, and of `count`.

        Returns:
            Name -> `(A, G, count)`: the sums over samples and positions of `a aᵀ`, `(in, in)`, and of `g gᵀ`, `(out,
            out)`, and how many were added. In float32 or a wider dtype.

        Raises:
            PerSampleError: If a matrix holds dense rows, whose factors are gone: switch on
                `per_sample(keep_factors=True)`. If `total` has other sizes. If `mask` is not of bools, or fits no
                layer. Then nothing was added.
        """
        with no_torch_function():
            return self._kronecker(total, mask)

    def _kronecker(
        self, total: Mapping[str, KroneckerFactors] | None, mask: Tensor | None
    ) -> dict[str, KroneckerFactors]:
        held = {name: self._held(name) for name, rows in self._rows.items() if rows.dim() > 2}
        weights = {name: rows for name, rows in held.items() if not _is_of_embedding(rows)}
        lacking = [name for name, rows in weights.items() if rows.is_complex() or not rows.has_kronecker_factors()]
        if lacking:
            raise complaint(
                "PerSampleGrads.kronecker",
                f"the rows of {first_few(lacking)} are dense, complex, of computed weights, or of several kinds (an "
                "embedding shares them)",
                "the factors of linear layers and convolutions",
                "Factors are there after a backward without create_graph, with per_sample(keep_factors=True), until "
                "the rows are used. Leave out what has none: PerSampleGrads({name: grads[name] for name in names}).",
            )
        refuse_no_factors("kronecker", "total", {} if total is None else total, eigen=False)
        if mask is not None:
            refuse_strange_mask(mask, weights)
        before = dict(total or {})
        for name in weights.keys() & before.keys():
            refuse_other_sizes("kronecker", name, weights[name], before[name])
        for rows in weights.values():
            rows.check()  # all of them, before anything is added
        return before | {name: rows.kronecker_factors(before.get(name), mask) for name, rows in weights.items()}

    def ekfac(self, factors: Mapping[str, KroneckerFactors | EigenFactors]) -> dict[str, EigenFactors]:
        """The second moment of the rows' entries in the eigenbasis of Kronecker factors, added up over the data.

        Of all second moments that are diagonal in that basis it is the nearest to the true one, K-FAC's included
        (George et al., 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis"). Take the
        factors of all data first, then go through data once more: `factors = grads.ekfac(factors)`, batch by batch.

        Args:
            factors: As `kronecker()` gives them, added up over all data; or what this method returned for the batch
                before, to which this batch's rows are added in place.

        Raises:
            PerSampleError: If `factors` has parameters that have no rows here, matrices of other sizes, or none added
                up.
        """
        refuse_strange_factors("ekfac", self._rows, factors)
        return {name: self._in_eigenbasis(name, second_moment) for name, second_moment in factors.items()}

    def _in_eigenbasis(self, name: str, factors: KroneckerFactors | EigenFactors) -> EigenFactors:
        A, G, scale, count = eigenbasis(factors) if isinstance(factors, KroneckerFactors) else factors
        rows = widened(self._held(name))
        for part in rows.between(G.t().to(rows), A.to(rows)).chunks():
            scale += part.square().sum(0).view_as(scale)
        return EigenFactors(A, G, scale, count + self.batch_size)

    def precondition(
        self, factors: Mapping[str, KroneckerFactors | EigenFactors], damping: float | Mapping[str, float]
    ) -> PerSampleGrads:
        """The rows times the inverse of a damped Kronecker-factored second moment: `(G + d)⁻¹ · row · (A + d)⁻¹`.

        `A` and `G` are here those of `factors` divided by their count. `queries.precondition(factors, d).gram(train)`
        are influences in the sense of Koh and Liang (2017), with K-FAC in place of the Hessian (Grosse et al., 2023,
        "Studying large language model generalization with influence functions"). Their count is that of positions, so
        a layer with T positions per sample comes out T times as large; the guide says what to do about it. With factors
        of `ekfac()` each entry in their eigenbasis is divided by `scale / count + d`, with the count of samples.

        Args:
            factors: As `kronecker()` gives them, of this batch or, added up, of many; or as `ekfac()` does. Parameters
                without, as biases and embeddings, stay as they are, on another scale: leave them out of a `gram`.
            damping: The number d that is added, above 0; or one for each of these parameters, by name.

        Returns:
            The new rows, factored where these are, but dense with factors of `ekfac()`: `norms`, `gram`, `project` work
            as before.

        Raises:
            PerSampleError: If `factors` has parameters that have no rows here, other sizes, none added up, inf or NaN.
            ValueError: If `damping` is not above 0.
        """
        refuse_strange_factors("precondition", self._rows, factors)
        refuse_strange_damping(damping, factors)
        rows = {name: self._held(name) for name in self._rows}
        for name, second_moment in factors.items():
            own = damping[name] if isinstance(damping, Mapping) else damping
            rows[name] = preconditioned(name, widened(rows[name]), second_moment, own)
        return PerSampleGrads(rows)

    def matvec(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each row with one vector, `G @ v`, `(B,)`, in float32 or a wider dtype.

        Args:
            vectors: Parameter name -> `(*shape)`, one entry for each parameter.

        Raises:
            PerSampleError: If `vectors` has other names or shapes than the parameters.
            TypeError: If it is no mapping to tensors.
        """
        refuse_emptiness("PerSampleGrads.matvec", self._rows)
        remedy = "Give it as in {name: p.detach() for name, p in model.named_parameters() if name in grads}."
        refuse_no_tensors("PerSampleGrads.matvec", "vectors", vectors, "(*shape)", remedy)
        refuse_others("matvec", self._rows, vectors, 0)
        return added(_matvec(rows, vectors[name]) for name, rows in self._rows.items())

    def project(self, dim: int, *, generator: torch.Generator | None = None, seed: int = 0) -> Tensor:
        """A random projection of the rows, `(B, dim)`, that keeps inner products on average.

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
        refuse_emptiness("PerSampleGrads.project", self._rows)
        projection = Projection(dim, seed=seed)
        if generator is None:
            return projection(self)
        kind, remedy = torch.Generator, "Give a number as seed=..., with no generator."
        refuse_other_kind("PerSampleGrads.project", "generator", generator, kind, "a torch.Generator", remedy)
        columns = []
        for _ in range(dim):
            directions = {
                name: torch.randn(rows.shape[1:], generator=generator, dtype=rows.dtype, device=generator.device)
                for name, rows in self._rows.items()
            }
            for direction in directions.values():
                if direction.is_complex():  # of variance 1 in each part
                    direction *= math.sqrt(2)
            columns.append(self.matvec({name: x.to(self._rows[name].device) for name, x in directions.items()}))
        return torch.stack(columns, 1) / math.sqrt(dim)

    def flatten(self) -> Tensor:
        """G itself, dense: `(B, P)`."""
        refuse_emptiness("PerSampleGrads.flatten", self._rows)
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
        values: dict[str, Tensor] = {}
        for part in side_by_side(self._rows):
            values |= part.split(value(part.rows))
        return {name: complex_like(values[name], rows) for name, rows in self._rows.items()}


torch.serialization.add_safe_globals([PerSampleGrads, KroneckerFactors, EigenFactors])


def per_sample_grads(model: nn.Module) -> PerSampleGrads:
    """The rows that `model` holds, as the matrix G and its algebra.

    Args:
        model: A model in per-sample mode, after a backward.

    Returns:
        A mapping from parameter name to `(B, *shape)`; parameters that no backward has reached are not in it.

    Raises:
        PerSampleError: If a trainable parameter belongs to no module in per-sample mode, or has a gradient in `.grad`
            that no row is a part of.
        TypeError: If `model` is no model.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample()
        >>> model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> enn.per_sample_grads(model).norms().shape
        torch.Size([5])
    """
    parameters, recorders = recorded("per_sample_grads", model)
    held = held_rows(parameters, adds=any(not recorder.settings.accumulate_grad for recorder in recorders))
    if not any(recorder.rows_stand_alone for recorder in recorders):
        refuse_gradients_without_rows("per_sample_grads", parameters, recorders)
    return PerSampleGrads(held)


def _is_of_embedding(rows: FactoredTensor) -> bool:
    terms = rows.terms()
    return bool(terms) and all(isinstance(term, OneHot) for term in terms)


def _matvec(rows: FactoredTensor, vector: Tensor) -> Tensor:
    if rows.is_complex():
        rows, vector = as_real(rows), torch.view_as_real(vector.to(rows.dtype).resolve_conj())
    wide = widened(rows)
    return wide.matvec(vector.to(wide.dtype))


def _variance(rows: FactoredTensor, correction: float) -> Tensor:
    wide = widened(rows)
    mean = wide.weighted_sum() / rows.shape[0]
    squares = added((part - mean).square().sum(0) for part in wide.chunks())
    return (squares / max(0.0, rows.shape[0] - correction)).to(rows.dtype)
