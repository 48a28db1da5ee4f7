"""Linear maps of rows to a few numbers: count sketches and two-sided projections, from the factors.

The random numbers of a map are drawn elsewhere; a map is given by its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.core.kronecker import between
from expanded_nn.core.patches import Patches, as_linear
from expanded_nn.core.terms import Dense, OneHot, Outer, Term, sides


class Totals:
    """The projections of one batch while they add up: in buckets, and as a Fourier transform.

    With `reuses_memory` passing results share memory, of which a traced graph would copy all at each use.
    """

    def __init__(
        self, dim: int, batch: int, dtype: torch.dtype, device: torch.device, *, reuses_memory: bool = True
    ) -> None:
        self.dtype, self.device, self.dim, self.reuses_memory = dtype, device, dim, reuses_memory
        self.buckets = torch.zeros(batch, dim, dtype=dtype, device=device)
        self.length = transform_length(dim)
        self._spectrum: Tensor | None = None
        self._scratch: Tensor | None = None

    def scratch(self, *shape: int) -> Tensor:
        """Memory for passing results, used again: fresh pages cost more than writing to them."""
        if not self.reuses_memory:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        numel = prod(shape)
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(max(numel, cost.SHUFFLED_NUMEL), dtype=self.dtype, device=self.device)
        return self._scratch[:numel].view(shape)

    @property
    def spectrum(self) -> Tensor:
        """The Fourier transform of what is to be added to the buckets, `(B, length / 2 + 1)`."""
        if self._spectrum is None:
            size = (self.buckets.shape[0], self.length // 2 + 1)
            self._spectrum = torch.zeros(size, dtype=self.dtype.to_complex(), device=self.device)
        return self._spectrum

    def result(self) -> Tensor:
        """The projections, `(B, dim)`."""
        if self._spectrum is None or not self.buckets.shape[0]:
            return self.buckets
        return self.buckets + _folded(torch.fft.irfft(self._spectrum, n=self.length), self.dim)


class Side(NamedTuple):
    """How the indices of one side of a matrix are shuffled; the longer one has a gap behind, up to the next line."""

    order: Tensor  # the index at each place of the shuffled order, 0 in the gap
    placed_signs: Tensor  # the sign at each place, 0 in the gap
    buckets: Tensor  # the bucket of each index: h(out) or h'(in)
    signs: Tensor  # ±1 for each index


@dataclass(frozen=True)
class Sketch:
    """The count sketch of one parameter, as a matrix `(out, in)`.

    A number goes to the bucket `h(out) + h'(in)` with the sign `s(out) s'(in)`. For two matrices `g ⊗ a` is one of rank
    one, and a sum of such is a row: `g ⊗ a` goes to the circular convolution of the sketches of `g` and of `a` (Pham
    and Pagh, 2013, "Fast and scalable polynomial kernels via explicit feature maps"), so that the row need not be made.

    The buckets are those of the matrix that is shuffled on both sides, laid out along the longer one with a gap after
    each line that makes the distance of two lines prime to `dim`, and wrapped around after `dim` numbers. With `in` the
    longer side:

        h(out) = width * (place of out) + shift,    h'(in) = place of in,    both mod dim.

    So the sketch of a dense row is the sum of pieces of `dim` numbers, one after the other. And as the places on each
    side are all different, two numbers that have an index in common never share a bucket, unless a side is longer than
    `dim`. Independent hashes that put two indices of one side into one bucket do so for all indices of the other.
    """

    sides: tuple[Side, Side]  # those of the output and of the input
    dim: int  # the number of buckets
    along: int  # the longer side, along which the matrix is laid out
    width: int  # how far two lines of the layout are apart, prime to `dim`
    shift: int  # the bucket of the first number

    @classmethod
    def of(cls, orders: Sequence[Tensor], signs: Sequence[Tensor], dim: int, shift: int) -> Sketch:
        """That of a matrix whose sides, output and input, are shuffled to these orders, with these signs."""
        sizes = [len(order) for order in orders]
        along, longer = int(sizes[1] >= sizes[0]), max(sizes)
        width = next(width for width in range(max(1, longer), longer + dim + 1) if gcd(width, dim) == 1)

        def shuffled(side: int, order: Tensor, signs: Tensor) -> Side:
            places = order.argsort()
            buckets = places if side == along else places * width + shift
            gap = (0, width - longer if side == along else 0)
            return Side(F.pad(order, gap), F.pad(signs[order], gap), buckets % dim, signs)

        return cls((shuffled(0, orders[0], signs[0]), shuffled(1, orders[1], signs[1])), dim, along, width, shift)

    @property
    def sizes(self) -> tuple[int, int]:
        """Those of the matrix, `(out, in)`."""
        return self.sides[0].signs.shape[0], self.sides[1].signs.shape[0]

    def add(self, term: Term, totals: Totals, start: int) -> None:
        """Adds the sketches of a term's rows to those from sample `start` on."""
        if isinstance(term, Patches) and self._fits(term) and self._is_faster_by_factors(term, totals.length):
            for chunk in term.chunks(prod(term.row_shape[1:]) * term.positions):
                self._add_by_factors(as_linear(chunk), totals, start)
                start += chunk.batch
        elif isinstance(term, Outer) and self._fits(term):
            add = self._add_by_factors if self._is_faster_by_factors(term, totals.length) else self._add_by_rows
            add(term, totals, start)
        elif isinstance(term, OneHot) and self._fits(term):
            self._add_by_entries(term, totals, start)
        else:
            self._add_numbers(term, totals, start)

    def _fits(self, term: Term) -> bool:
        """Whether the term's factors are those of the parameter's two sides."""
        return sides(term.row_shape) == self.sizes and prod(self.sizes) > 0

    def _is_faster_by_factors(self, term: Outer | Patches, length: int) -> bool:
        grouped = isinstance(term, Patches) and term.geometry.groups > 1
        return not grouped and cost.sketch_by_factors(term.positions, *self.sizes, length)

    def _add_by_factors(self, term: Outer, totals: Totals, start: int) -> None:
        """Adds the sketches, from Fourier transforms of the sketches of the factors, position by position."""
        time_first = term.positions != 1 and _is_time_first(term.factors[self.along])
        g, a = (factor.transpose(0, 1) if time_first else factor for factor in term.unscaled())
        write_g, write_a = (self._writer(side, term.dtype) for side in (0, 1))
        size, width = g.shape[:2]  # the parts are those of the first dimension
        numel, limit = width * totals.length, cost.CHUNK_NUMEL // cost.SPECTRUM_SHARE
        numel = 2 * numel if totals.reuses_memory else numel
        at_once = size if cost.is_symbol(term.batch) else cost.at_once(numel, limit)
        flat = (factor.flatten(0, 1).split(max(1, at_once * width)) for factor in (g, a))
        for g_part, a_part in zip(*flat, strict=True) if size * width else ():
            shape = g_part.shape[0], totals.length
            if totals.reuses_memory:
                sketches = totals.scratch(2, *shape)
                write_g(g_part, sketches[0])
                write_a(a_part, sketches[1])
                spectra = torch.fft.rfft(sketches).unbind()  # of both at once, as each call makes a plan
            else:
                written = write_g(g_part, totals.scratch(*shape)), write_a(a_part, totals.scratch(*shape))
                spectra = tuple(torch.fft.rfft(sketch) for sketch in written)
            products = spectra[0].mul_(spectra[1]).view(-1, width, spectra[0].shape[1])
            spectrum = products.squeeze(1) if term.positions == 1 else products.sum(0 if time_first else 1)
            totals.spectrum[start : start + spectrum.shape[0]].add_(spectrum, alpha=term.coefficient)
            start += 0 if time_first else spectrum.shape[0]

    def _writer(self, side: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        """What writes the sketches of a factor `(N, features)`, and zeros behind, to `(N, length)`."""
        order, placed_signs, buckets, signs = self.sides[side]
        features = len(signs)
        if side != self.along or features > self.dim:
            signs = signs.to(dtype)
            return lambda factor, out: out.zero_().index_add_(1, buckets, factor * signs)
        order, signs = order[:features], placed_signs[:features].to(dtype)  # places are buckets

        def write(factor: Tensor, out: Tensor) -> Tensor:
            if features == out.shape[1]:
                torch.index_select(factor, 1, order, out=out).mul_(signs)
            else:
                torch.mul(factor.index_select(1, order), signs, out=out[:, :features])
                out[:, features:] = 0.0
            return out

        return write

    def _add_by_rows(self, term: Outer, totals: Totals, start: int) -> None:
        """Adds the sketches, from shuffled rows, which are made from shuffled factors, a bounded number at once."""
        lines = min(self.sizes)
        lines_at_once = min(lines, cost.at_once(self.width, cost.SHUFFLED_NUMEL))
        for chunk in term.chunks(max(lines_at_once * self.width, term.positions * (lines + self.width))):
            factors = chunk.unscaled()
            across, along = (_shuffled(factors[side], self.sides[side]) for side in (1 - self.along, self.along))
            for samples in _groups(chunk.batch, cost.at_once(lines_at_once * self.width, cost.SHUFFLED_NUMEL)):
                for line in range(0, lines, lines_at_once):
                    lines_across = across[samples, :, line : line + lines_at_once].mT
                    rows = totals.scratch(lines_across.shape[0], lines_across.shape[1], self.width)
                    folded = _folded(torch.bmm(lines_across, along[samples], out=rows).flatten(1), self.dim)
                    numbers = totals.buckets[start + samples.start : start + samples.stop]
                    _add_shifted(numbers, folded, (self.shift + line * self.width) % self.dim, chunk.coefficient)
            start += chunk.batch

    def _add_by_entries(self, term: OneHot, totals: Totals, start: int) -> None:
        """Adds the values of an embedding's rows to their buckets."""
        out_buckets, in_buckets = (side.buckets for side in self.sides)
        for chunk in term.chunks(term.factors[0][0].numel()):
            values, index = chunk.weighted()
            out_signs, in_signs = (side.signs.to(values.dtype) for side in self.sides)
            signs = out_signs[index][..., None] * in_signs
            buckets = (out_buckets[index][..., None] + in_buckets) % self.dim
            totals.buckets[start : start + chunk.batch].scatter_add_(1, buckets.flatten(1), (values * signs).flatten(1))
            start += chunk.batch

    def _add_numbers(self, term: Term, totals: Totals, start: int) -> None:
        """Adds the numbers of the dense rows to their buckets."""
        out, in_ = self.sizes
        if not out * in_:
            return
        chunks: Iterable[Term] = [term] if isinstance(term, Dense) else term.chunks()
        blocks = list(_blocks(out, in_, cost.at_once(term.batch if isinstance(term, Dense) else 1, cost.CHUNK_NUMEL)))
        of_only_block = self._buckets_of(*blocks[0]) if len(blocks) == 1 else None
        for chunk in chunks:
            rows = chunk.matrix() if isinstance(chunk, Dense) else chunk.dense()
            rows = rows.reshape(chunk.batch, out, in_)
            for lines, columns in blocks:
                buckets, signs = of_only_block or self._buckets_of(lines, columns)
                signed = rows[:, lines, columns].flatten(1) * signs.to(rows.dtype)
                if isinstance(chunk, Dense) and chunk.coefficient != 1.0:
                    signed *= chunk.coefficient
                totals.buckets[start : start + chunk.batch].scatter_add_(1, buckets.expand_as(signed), signed)
            start += chunk.batch

    def _buckets_of(self, lines: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The buckets and the signs of a part of the matrix, flat."""
        out, in_ = self.sides
        buckets = (out.buckets[lines, None] + in_.buckets[columns]) % self.dim
        return buckets.flatten(), (out.signs[lines, None] * in_.signs[columns]).flatten()


@dataclass(frozen=True)
class Small:
    """The count sketches of several small parameters, side by side, in one call."""

    buckets: Tensor  # (n,), that of each number of all of them
    signs: Tensor  # (n,)

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> Small:
        """Those of the parameters of which these are the sketches."""
        every = slice(None)
        buckets, signs = zip(*(sketch._buckets_of(every, every) for sketch in sketches), strict=True)
        return cls(torch.cat(buckets), torch.cat(signs))

    def add(self, rows: Sequence[Tensor], totals: Totals) -> None:
        """Adds the sketches of the parameters' rows, each `(B, numbers in a row)`."""
        signed = torch.cat(list(rows), 1).mul_(self.signs.to(totals.dtype))
        totals.buckets.scatter_add_(1, self.buckets.expand_as(signed), signed)


@dataclass(frozen=True)
class TwoSided:
    """`(P_out g) ⊗ (P_in a)` of one parameter, of which the first `dim` numbers are taken."""

    left: Tensor  # P_out, (k_out, out)
    right: Tensor  # P_in, (k_in, in)

    def add(self, term: Term, totals: Totals, start: int) -> None:
        """Adds the projections of a term's rows to those from sample `start` on."""
        left, right = self.left.to(term.dtype), self.right.to(term.dtype)
        for chunk in term.chunks(self._numel(term)):
            projected = between(chunk, left, right.t()).dense()
            totals.buckets[start : start + chunk.batch] += projected.flatten(1)[:, : totals.dim]
            start += chunk.batch

    def _numel(self, term: Term) -> int | None:
        """How many numbers are needed in passing for one row; `None` for those of the dense row."""
        if not isinstance(term, Outer | OneHot) or sides(term.row_shape) != (self.left.shape[1], self.right.shape[1]):
            return None
        return term.factors[0].shape[1] * (len(self.left) + len(self.right)) + len(self.left) * len(self.right)


def _groups(batch: int, most: int) -> list[slice]:
    """The samples in groups of about equal sizes, up to `most`; all at once where the batch is a symbol."""
    if cost.is_symbol(batch):
        return [slice(0, batch)]
    size = ceil(batch / ceil(batch / most))
    return [slice(first, min(first + size, batch)) for first in range(0, batch, size)]


def _shuffled(
    factor: Tensor,  # (B, T, features)
    side: Side,
) -> Tensor:  # (B, T, places)
    """A factor in the shuffled order, with the signs, and zeros in the gap; it lies in memory as it did."""
    if _is_time_first(factor):
        return _shuffled(factor.transpose(0, 1), side).transpose(0, 1)
    ordered = factor.flatten(0, 1).index_select(1, side.order)
    return ordered.mul_(side.placed_signs.to(factor.dtype)).view(*factor.shape[:2], ordered.shape[1])


def _is_time_first(factor: Tensor) -> bool:
    """Whether a factor `(B, T, features)` lies in memory as those of recurrent layers do."""
    return factor.stride(0) < factor.stride(1)


def transform_length(dim: int) -> int:
    """The length of the Fourier transforms: `dim`, or if that has large prime factors, room for a whole convolution."""
    cofactor = dim
    for prime in (2, 3, 5, 7):
        while cofactor % prime == 0:
            cofactor //= prime
    return dim if cofactor == 1 else 1 << (2 * dim - 2).bit_length()


def _folded(
    numbers: Tensor,  # (B, n)
    dim: int,
) -> Tensor:  # (B, dim)
    """The numbers wrapped around after `dim`, and added up."""
    length = numbers.shape[1]
    multiple = length // dim * dim
    if multiple == length == dim:
        return numbers
    folded: Tensor = numbers[:, :multiple].unflatten(1, (length // dim, dim)).sum(1)
    folded[:, : length - multiple] += numbers[:, multiple:]
    return folded


def _add_shifted(
    total: Tensor,  # (B, dim)
    numbers: Tensor,  # (B, dim)
    shift: int,
    scale: float,
) -> None:
    """`total += scale * numbers.roll(shift, 1)`."""
    split = total.shape[1] - shift
    total[:, shift:].add_(numbers[:, :split], alpha=scale)
    total[:, :shift].add_(numbers[:, split:], alpha=scale)


def _blocks(out: int, in_: int, numel: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a matrix of bounded size."""
    columns = min(in_, numel)
    lines = max(1, numel // columns)
    for first in range(0, out, lines):
        for start in range(0, in_, columns):
            yield slice(first, first + lines), slice(start, start + columns)
