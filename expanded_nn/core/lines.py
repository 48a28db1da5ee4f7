"""Rows each line of which is a number times the same line of one matrix; and rows taken line by line."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expanded_nn.core.elementwise import Elementwise
from expanded_nn.core.patches import Patches
from expanded_nn.core.products import Products
from expanded_nn.core.terms import Outer, Term, _wide


class Lines(Term):
    """`numbers[b,o] * matrix[o,...]`: rows `(B, lines, ...)` with numbers `(B, lines)`, and one matrix for all."""

    @classmethod
    def of(
        cls,
        numbers: Tensor,  # (B, lines)
        matrix: Tensor,  # (lines, ...), any shape
    ) -> Lines:
        return cls((numbers,), matrix.shape, numbers.dtype)._with(shared=(matrix.detach(),))

    @property
    def matrix(self) -> Tensor:
        """What the numbers multiply, `(*row_shape)`."""
        return self.shared[0].to(self.dtype)

    @property
    def fills_memory(self) -> bool:
        return True

    def numel(self) -> int:
        return super().numel() + self.shared[0].numel()

    def dense(self, out: Tensor | None = None) -> Tensor:
        (numbers,) = self.weighted()
        return torch.mul(_with_dims(numbers, self.matrix.dim() + 1), self.matrix, out=out)

    def weighted_sum(self, weights: Tensor | None) -> Tensor:
        (numbers,) = self.weighted(weights)
        return _with_dims(numbers.sum(0), self.matrix.dim()) * self.matrix

    def matvec(self, vector: Tensor) -> Tensor:
        (numbers,) = self.weighted()
        return torch.mv(numbers, (vector.reshape(self.row_shape) * self.matrix).flatten(1).sum(1))

    def squared_norms(self, products: Products | None = None) -> Tensor:
        (numbers,) = self.weighted()
        return torch.mv(numbers.square(), self.matrix.flatten(1).square().sum(1))

    def inner(self, other: Term) -> Tensor:
        (numbers,) = self.weighted()
        return (numbers * matvec_by_line(other, self.matrix)).sum(1)

    def gram(self, other: Term) -> Tensor:
        (numbers,) = self.weighted()
        return numbers @ matvec_by_line(other, self.matrix).t()

    def magnitudes(self) -> Term:
        return super().magnitudes()._with(shared=(self.shared[0].abs(),))


def matvec_by_line(
    term: Term,
    matrix: Tensor,  # (lines, ...), as many numbers as a row has
) -> Tensor:  # (B, lines)
    """The product of each line of a row with the same line of the matrix: the sum of these is `matvec`."""
    lines = len(matrix)
    if lines == 1:
        return term.matvec(matrix)[:, None]
    if isinstance(term, Lines) and term.row_shape[0] == lines:
        (numbers,) = term.weighted()
        return numbers * (term.matrix.reshape(matrix.shape) * matrix).flatten(1).sum(1)
    if isinstance(term, Elementwise) and term.row_shape[0] == lines:
        return matvec_by_line(term.unchanged, matrix.reshape(term.row_shape) * term.shared[0].to(term.dtype))
    if isinstance(term, Outer) and term.row_shape[0] == lines:
        g, a = term.unscaled()
        y = torch.matmul(a, matrix.reshape(term.row_shape).t()).to(_wide(term.dtype))
        return (y * g).sum(1).mul_(term.coefficient).to(term.dtype)
    if isinstance(term, Patches) and term.row_shape[0] == lines:
        return term.matvec_by_channel(matrix)
    flat = matrix.reshape(lines, -1)
    return torch.cat([(rows.dense().reshape(-1, *flat.shape) * flat).sum(2) for rows in term.chunks()])


def with_scaled_lines(
    term: Term,
    numbers: Tensor,  # (lines,), as many as there are in the first dimension of a row
) -> Term:
    """The rows with each line times its own number."""
    if isinstance(term, Outer):
        g, a = term.unscaled()
        return term.remake((g * numbers, a), term.coefficient, term.dtype)
    if isinstance(term, Patches):
        g, x = term.unscaled()
        return term.remake((g * _with_dims(numbers, g.dim() - 1), x), term.coefficient, term.dtype)
    return Elementwise.of(term, _with_dims(numbers, len(term.row_shape)).expand(term.row_shape))


def _with_dims(x: Tensor, dims: int) -> Tensor:
    """A tensor with dimensions of size 1 behind, so that it has `dims`."""
    shape: Sequence[int] = (*x.shape, *[1] * (dims - x.dim()))
    return x.reshape(shape)
