"""The rows of a parameter from which a weight is computed number by number, as `mask * parameter`."""

from __future__ import annotations

from torch import Tensor

from expanded_nn.core.products import Products
from expanded_nn.core.terms import Dense, OneHot, Outer, Term


class Elementwise(Term):
    """Rows of another kind, `(B, *row_shape)`, each times the same tensor `(*row_shape)`, number by number."""

    kind: Term  # a term of the other kind, without factors

    @classmethod
    def of(cls, term: Term, scale: Tensor) -> Term:
        """The rows of a term times `scale (*row_shape)`; in another kind where that holds them as well."""
        if isinstance(term, Dense):
            return term.remake((term.unscaled()[0] * scale,), term.coefficient, term.dtype)
        if isinstance(term, OneHot):
            values, index = term.unscaled()
            return term.remake((values * scale[index], index), term.coefficient, term.dtype)
        if isinstance(term, Elementwise):
            return term._with(shared=(term.shared[0] * scale,))
        scaled = cls(term.factors, term.row_shape, term.dtype, term.coefficient)
        scaled.shared, scaled.of_gradient = (scale.detach(),), term.of_gradient
        scaled.kind = term._with(factors=(), coefficient=1.0)
        return scaled

    @property
    def unchanged(self) -> Term:
        """The rows of the other kind."""
        return self.kind.remake(self.factors, self.coefficient, self.dtype)

    @property
    def _scale(self) -> Tensor:
        return self.shared[0].to(self.dtype)

    @property
    def positions(self) -> int:
        return self.unchanged.positions

    @property
    def fills_memory(self) -> bool:
        return self.unchanged.fills_memory

    @property
    def norms_take_rows(self) -> bool:
        return not isinstance(self.kind, Outer) or self.positions != 1

    def numel(self) -> int:
        return super().numel() + self.shared[0].numel()

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.unchanged.dense(out).mul_(self._scale)

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        return self.unchanged.weighted_sum(weights) * self._scale

    def matvec(self, vector: Tensor) -> Tensor:
        return self.unchanged.matvec(vector.reshape(self.row_shape) * self._scale)

    def squared_norms(self, products: Products | None = None) -> Tensor:
        if not self.norms_take_rows:
            g, a = (factor[:, 0].square() for factor in self.unscaled())
            return ((g @ self._scale.square()) * a).sum(1).mul_(self.coefficient).mul_(self.coefficient)
        return super().squared_norms()

    def gram_takes_rows(self, other: Term) -> bool:
        return True

    # what one factor is multiplied with is the other kind's to say

    def scaled(self, factor: float | Tensor) -> Elementwise:
        return self._around(self.unchanged.scaled(factor))

    def unscaled(self) -> tuple[Tensor, ...]:
        return self.unchanged.unscaled()

    def weighted(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.unchanged.weighted(weights)

    def absorbed(self) -> tuple[Tensor, ...]:
        return self.unchanged.absorbed()

    def have_zero_factors(self) -> Tensor:
        return self.unchanged.have_zero_factors()

    def magnitudes(self) -> Elementwise:
        return self._around(self.unchanged.magnitudes())._with(shared=(self.shared[0].abs(),))

    def _around(self, term: Term) -> Elementwise:
        """The same with the rows of another term of that kind."""
        return self._with(factors=term.factors, coefficient=term.coefficient)
