"""Kronecker factors of the rows' second moments, and rows preconditioned by them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from expanded_nn._errors import complaint
from expanded_nn.core import cost
from expanded_nn.core.algebra import Block, Kind
from expanded_nn.core.patches import Patches, as_linear
from expanded_nn.core.terms import Dense, OneHot, Outer, PaddedOuter, Term, sides


class SecondMoment:
    """A sum of `xᵀ x`, for `x` with few rows at a time.

    To add a product of few rows takes as long as to read and write the whole sum. So few rows are copied, and wait
    until there are enough for one product.

    Attributes:
        features: The size of the sum, `(features, features)`.
    """

    def __init__(self, total: Tensor) -> None:
        self._total, self.features = total, len(total)
        self._waiting: Tensor | None = None  # (SYMMETRIC_PANEL, features), of which the first `_count` count
        self._count = 0

    def total(self) -> Tensor:
        """The sum, `(features, features)`, after which nothing waits."""
        if self._waiting is not None and self._count:
            waiting, self._count = self._waiting[: self._count], 0
            _add_product(self._total, waiting)
        return self._total

    def add(
        self,
        x: Tensor,  # (N, features)
        scale: float,
        *,
        may_wait: bool,
    ) -> None:
        """Adds `scale * xᵀ x`, with a copy of what waits."""
        x = x.to(self._total)
        if not may_wait or not cost.is_second_moment_to_wait(self.features, len(x)):
            _add_product(self._total, x, scale)
            return
        if self._waiting is None:
            self._waiting = x.new_empty(cost.SYMMETRIC_PANEL, self.features)
        for part in (x[: len(self._waiting) - self._count], x[len(self._waiting) - self._count :]):
            torch.mul(part, sqrt(scale), out=self._waiting[self._count : self._count + len(part)])
            self._count += len(part)
            if self._count == len(self._waiting):
                self.total()


class KroneckerFactors(Sequence[Any]):
    """The second moments of the factors of a weight's rows: `A` of the layer's inputs, `G` of its outputs' gradients.

    So it is for weights `(out, in)`. Of one that begins with the inputs, `(in, out)`, such as that of a transposed
    convolution, `G` is of the inputs, and `A` of the outputs' gradients.

    `PerSampleGrads.kronecker` makes them. Factors of several batches, or processes, add up: `factors + more`.

    Attributes:
        A: The sum of `a aᵀ` over samples and positions, with `a` the layer's input: `(in, in)`.
        G: The sum of `g gᵀ`, with `g` the gradient of the layer's output: `(out, out)`.
        count: How many were added: samples times positions.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample(keep_factors=True)
        >>> model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> A, G, count = enn.per_sample_grads(model).kronecker()["weight"]
        >>> A.shape, G.shape, count
        (torch.Size([3, 3]), torch.Size([2, 2]), 5)
    """

    def __init__(self, A: Tensor, G: Tensor, count: int) -> None:
        self._inputs, self._outputs = SecondMoment(A), SecondMoment(G)
        self.count: int = count  # type: ignore[assignment]  # a sequence has a method of that name

    @property
    def A(self) -> Tensor:
        return self._inputs.total()

    @property
    def G(self) -> Tensor:
        return self._outputs.total()

    @property
    def sizes(self) -> tuple[int, int]:
        """Those of the weight as a matrix, `(out, in)`."""
        return self._outputs.features, self._inputs.features

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return (self.A, self.G, self.count)[index]

    def __repr__(self) -> str:
        return f"KroneckerFactors(A={self.A}, G={self.G}, count={self.count})"

    def __reduce__(self) -> Any:
        return KroneckerFactors, tuple(self)

    def __add__(self, other: object) -> KroneckerFactors:
        if not isinstance(other, KroneckerFactors):
            return NotImplemented
        if self.sizes != other.sizes:
            raise complaint(
                "KroneckerFactors",
                f"factors of matrices {self.sizes} and {other.sizes} are added",
                "those of one weight",
                "Add them name by name: factors[name] + more[name].",
            )
        return KroneckerFactors(self.A + other.A, self.G + other.G, self.count + other.count)


class EigenFactors(NamedTuple):
    """The eigenvectors of Kronecker factors, and the second moment of the rows' entries in that basis (EK-FAC).

    `PerSampleGrads.ekfac` makes them.

    Attributes:
        A: Eigenvectors of `a aᵀ` as columns, `(in, in)`.
        G: Eigenvectors of `g gᵀ` as columns, `(out, out)`.
        scale: The sum over the rows of the squares of `Gᵀ · row · A`, `(out, in)`. In the same basis they add up.
        count: How many rows were added.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample(keep_factors=True)
        >>> model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> grads = enn.per_sample_grads(model)
        >>> eigen = grads.ekfac(grads.kronecker())
        >>> eigen["weight"].scale.shape, eigen["weight"].count
        (torch.Size([2, 3]), 5)
    """

    A: Tensor
    G: Tensor
    scale: Tensor
    count: int  # type: ignore[assignment]

    @property
    def sizes(self) -> tuple[int, int]:
        """Those of the weight as a matrix, `(out, in)`."""
        return len(self.G), len(self.A)

    def __add__(self, other: object) -> EigenFactors:
        raise TypeError(
            "EigenFactors: two of them are added, which may be of different bases; wanted one that goes through all "
            "batches. Give it to each: factors = grads.ekfac(factors)."
        )


def eigenbasis(factors: KroneckerFactors) -> EigenFactors:
    """The basis of the factors, with no rows added."""
    A, G = (torch.linalg.eigh(total.double())[1].to(total.dtype) for total in (factors.A, factors.G))
    return EigenFactors(A, G, A.new_zeros(len(G), len(A)), 0)


def has_factors(terms: Sequence[Term], row_shape: Sequence[int]) -> bool:
    """Whether all terms are made of outer products of the row's two sides."""
    sizes = sides(row_shape)
    are_counted = all(isinstance(term, Outer | Patches) and not isinstance(term, PaddedOuter) for term in terms)
    return are_counted and all(sides(term.row_shape) == sizes for term in terms)


def factors(
    blocks: Sequence[Block],
    kind: Kind,
    total: KroneckerFactors | None = None,
    mask: Tensor | None = None,  # (B, T)
    *,
    may_wait: bool = False,
) -> KroneckerFactors:
    """The Kronecker factors of rows, added to `total`; with `may_wait` few rows wait there, which a graph cannot do.

    Of terms with T positions those count where `mask` is true, and the count becomes a tensor.
    """
    dtype = torch.promote_types(kind.dtype, torch.float32)
    if total is None:
        G, A = (torch.zeros(size, size, dtype=dtype, device=kind.device) for size in sides(kind.row_shape))
        total = KroneckerFactors(A, G, 0)
    masks = [None] * len(blocks) if mask is None else mask.split([size for size, _ in blocks])
    for term, of_block in ((term, own) for (_, terms), own in zip(blocks, masks, strict=True) for term in terms):
        counts = None if of_block is None or of_block.shape[1] != term.positions else of_block
        if isinstance(term, Patches):
            _add_patches(term.to(dtype), counts, total)
        elif isinstance(term, Outer):
            sides_of = zip((total._outputs, total._inputs), term.factors, _scales(term), strict=True)
            for side, factor, scale in sides_of:
                side.add(_in_order(_masked(factor, counts)), scale, may_wait=may_wait)
        # not in place: a tensor may be an argument of a traced step
        total.count = total.count + (term.batch * term.positions if counts is None else cast(Any, counts.sum()))
    return total


def _scales(term: Term) -> list[float]:
    """What multiplies the second moment of each factor: that of the gradient is scaled as the rows are."""
    scales = [1.0, 1.0]
    scales[term.of_gradient] = term.coefficient**2
    return scales


def _masked(
    factor: Tensor,  # (B, T, features)
    mask: Tensor | None,  # (B, T)
) -> Tensor:
    return factor if mask is None else factor * mask[..., None]


def _in_order(
    factor: Tensor,  # (B, T, features)
) -> Tensor:  # (B * T, features)
    """In the order of memory, which is that of time in recurrent layers."""
    return (factor.transpose(0, 1) if factor.stride(0) < factor.stride(1) else factor).flatten(0, 1)


def _add_patches(term: Patches, mask: Tensor | None, total: KroneckerFactors) -> None:
    """Adds those of a convolution, whose groups are linear maps: to `A` their mean, to `G` a block for each."""
    groups, (A, G, _), first = term.geometry.groups, total, 0
    scales = _scales(term)
    for chunk in term.chunks(prod(term.row_shape[1:]) * term.positions * groups):
        g, columns = as_linear(chunk).unscaled()  # (B * groups, T, out / groups), (B * groups, T, in * kernel)
        if mask is not None:
            own = mask[first : first + chunk.batch].repeat_interleave(groups, 0)
            g, columns, first = _masked(g, own), _masked(columns, own), first + chunk.batch
        _add_product(A, columns.flatten(0, 1), scales[1] / groups)
        size = len(G) // groups
        for group in range(groups):
            channels = slice(group * size, (group + 1) * size)
            _add_product(G[channels, channels], g[group::groups].flatten(0, 1), scales[0])


def _add_product(
    total: Tensor,  # (features, features)
    x: Tensor,  # (N, features)
    scale: float = 1.0,
) -> None:
    """`total += scale * x.T @ x`, both symmetric; of a large one only the upper part is computed, and copied."""
    features, panel = x.shape[1], cost.SYMMETRIC_PANEL
    if not cost.is_product_by_panels(features, x.shape[0]):
        total.addmm_(x.t(), x, alpha=scale)
        return
    for start in range(0, features, panel):
        stop = min(start + panel, features)
        total[start:stop, start:].addmm_(x[:, start:stop].t(), x[:, start:], alpha=scale)
        total[stop:, start:stop] = total[start:stop, stop:].t()


def damped_inverse(
    total: Tensor,  # (features, features), symmetric
    count: int,
    damping: float,
) -> tuple[Tensor, Tensor]:
    """`(total / count + damping)⁻¹`, in float64, and whether that matrix is positive definite."""
    matrix = total.double() / count
    matrix.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_inverse(lower), failed.eq(0) & lower.isfinite().all()


def between(
    term: Term,
    left: Tensor,  # (k, out)
    right: Tensor,  # (in, l)
) -> Term:
    """The term of the rows `left @ row @ right`, `(k, l)`; in memory of its own."""
    sizes, row_shape = (left.shape[1], len(right)), (len(left), right.shape[1])
    if isinstance(term, Patches) and term.geometry.groups == 1 and term.positions * sum(sizes) < prod(sizes):
        term = as_linear(term)
    if isinstance(term, Outer | OneHot) and sides(term.row_shape) == sizes:
        first, second = term.unscaled()
        g, a = (first @ left.t(), second) if isinstance(term, Outer) else (left.t()[second], first)
        return Outer((g, a @ right), row_shape, term.dtype, term.coefficient)
    chunks = [left @ chunk.dense().reshape(chunk.batch, *sizes) @ right for chunk in term.chunks()]
    return Dense.of(torch.cat(chunks))
