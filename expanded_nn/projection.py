"""Random projections of whole gradients to a few numbers, from the factors.

For two matrices `g ⊗ a` is one of rank one, and a sum of such is a row. A count sketch whose bucket and sign are those
of the row's two sides added and multiplied, `h(out) + h'(in)` and `s(out) s'(in)`, maps `g ⊗ a` to the circular
convolution of the sketches of `g` and of `a` (Pham and Pagh, 2013, "Fast and scalable polynomial kernels via explicit
feature maps"), so that the row itself need not be made. Here the buckets are those of a matrix that is shuffled on both
sides, laid out along the longer one with a gap after each line that makes the distance of two lines prime to `dim`, and
wrapped around after `dim` numbers. With `in` the longer side:

    h(out) = width * (place of out) + shift,    h'(in) = place of in,    both mod dim.

Of a dense row the sketch is then the sum of pieces of `dim` numbers, one after the other. And as the places on each
side are all different, two numbers that have an index in common never share a bucket, unless a side is longer than
`dim`: where independent hashes put two indices of one side into one bucket, they do so for all indices of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd, isqrt, log2, prod, sqrt

import torch
from torch import Tensor

from expanded_nn._errors import complaint
from expanded_nn._patches import Patches, as_linear
from expanded_nn._terms import CHUNK_NUMEL, Dense, OneHot, Outer, Term, in_own_dtype
from expanded_nn.factored import FactoredTensor, as_factored, as_real, widened

KINDS = ("sketch", "kronecker", "gaussian")

SCRATCH_NUMEL = 1 << 20  # of dense rows made at once: they stay in the cache

# The unit of costs is a multiplication in a product of matrices, 0.03 ns on one core of an AMD EPYC, float32.
NUMBER_OF_ROW = 12  # to write a number of a dense row and to read it again
NUMBER_OF_FACTOR = 60  # to put a number of a factor into its bucket, with its sign
NUMBER_OF_FFT = 6  # of one transform, for each of its `n log2(n)`
NUMBER_OF_SPECTRUM = 20  # to multiply two and to add them up


class Projection:
    """A random linear map of whole gradients to `dim` numbers that keeps inner products in the mean.

    For the gradients x and y of two samples, `projection(x) @ projection(y)` is `x @ y` in the mean over the seeds, and
    off by about `|x| |y| / sqrt(dim)`. The map is the sum over the parameters of a map for each, which is drawn from
    the parameter's name, its shape and the seed, and from nothing else: a sample projects alike in any batch, in any
    order, in any process, on any device, in any precision, and the projections of two models of which one has frozen
    parameters differ by what these contribute. Make it once and keep it: it holds the random numbers it has drawn, as
    many as a parameter has rows and columns.

    Args:
        dim: The number of numbers to project to.
        kind: Which map.

            `"sketch"`: each number of a gradient is added to one of the `dim`, or taken off it: a count sketch whose
            buckets and signs are made of those of the two sides of a matrix (Pham and Pagh, 2013). From the factors by
            Fourier transforms where there are few positions, from a few dense rows at once where there are many. The
            best for nearly all uses.

            `"kronecker"`: `(P_out g) ⊗ (P_in a)` with random signs, on two sides of about `sqrt(dim)` numbers each, as
            in LoGra (Choe et al., 2024, "What is your data worth to GPT?"), but added up over the parameters. Vectors
            are sketched.

            `"gaussian"`: independent normal numbers (Johnson and Lindenstrauss, 1984), drawn again for each call, in
            blocks. It takes some `dim` times as long as the others: for reference.
        seed: Another seed, another map. Any whole number.

    Raises:
        ValueError: If `dim`, `kind` or `seed` has no meaning.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(30, 20)).per_sample()
        >>> model(torch.randn(5, 30)).square().sum(1).mean().backward()
        >>> projection = enn.Projection(64)
        >>> projection(enn.per_sample_grads(model)).shape
        torch.Size([5, 64])
    """

    def __init__(self, dim: int, *, kind: str = "sketch", seed: int = 0) -> None:
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ValueError(f"Projection: dim is {dim!r}; wanted a whole number from 1.")
        if kind not in KINDS:
            raise ValueError(f"Projection: kind is {kind!r}; wanted one of {', '.join(map(repr, KINDS))}.")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"Projection: seed is {seed!r}; wanted a whole number.")
        self.dim = dim
        self.kind = kind
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._maps: dict[tuple[str, torch.device], _Sketch | _TwoSided | _Gaussian] = {}

    def __repr__(self) -> str:
        return f"Projection({self.dim}, kind={self.kind!r}, seed={self.seed})"

    def __call__(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Projects each row.

        Args:
            grads: Parameter name -> `(B, *shape)`, as `per_sample_grads` gives them. Parameters may be lacking. A
                complex number counts as two real ones.

        Returns:
            `(B, dim)`, in float32 at the least, without history.

        Raises:
            PerSampleError: If the parameters hold different numbers of rows, or one has another shape than in an
                earlier call.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            rows = {name: widened(as_real(as_factored(tensor))) for name, tensor in grads.items()}
            self._refuse_other_shapes(rows)
            if not rows:
                return torch.zeros(0, self.dim)
            first = next(iter(rows.values()))
            with in_own_dtype(first):
                totals = [
                    _Totals(self.dim, first.shape[0], dtype, device)
                    for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in rows.values())
                ]
                by_kind = {(total.dtype, total.device): total for total in totals}
                for name, tensor in rows.items():
                    self._add(name, tensor, by_kind[tensor.dtype, tensor.device])
                return _summed([total.result() for total in totals])

    def _add(self, name: str, rows: FactoredTensor, totals: _Totals) -> None:
        linear_map = self._map(name, tuple(rows.shape[1:]), rows.device)
        start = 0
        for size, terms in rows.blocks:
            for term in terms if size else ():
                linear_map.add(term, totals, start)
            start += size

    def _map(self, name: str, shape: tuple[int, ...], device: torch.device) -> _Sketch | _TwoSided | _Gaussian:
        key = (name, device)
        if key not in self._maps:
            text = repr((self.kind, self.seed, name, shape))
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            sides = _sides(shape)
            if self.kind == "gaussian":
                self._maps[key] = _Gaussian(seed, shape, self.dim)
            elif self.kind == "kronecker" and min(sides) > 1:
                self._maps[key] = _TwoSided.drawn(seed, sides, self.dim, device)
            else:
                self._maps[key] = _Sketch.drawn(seed, sides, self.dim, device)
        return self._maps[key]

    def _refuse_other_shapes(self, rows: Mapping[str, Tensor]) -> None:
        sizes = {name: tensor.shape[0] for name, tensor in rows.items()}
        if len(set(sizes.values())) > 1:
            raise complaint("Projection", f"the parameters hold {sizes} rows", "equally many", "Project one batch.")
        for name, tensor in rows.items():
            shape = tuple(tensor.shape[1:])
            before = self._shapes.setdefault(name, shape)
            if before != shape:
                raise complaint(
                    "Projection",
                    f"{name!r} has rows of shape {shape}",
                    f"{before}, as in the first call",
                    "Take a projection of its own for each model.",
                )


class _Totals:
    """What the projections of one batch add up to: numbers, and numbers that are still in a Fourier transform."""

    def __init__(self, dim: int, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.dim = dtype, device, dim
        self.buckets = torch.zeros(batch, dim, dtype=dtype, device=device)
        self.length = _transform_length(dim)
        self._spectrum: Tensor | None = None
        self._scratch: Tensor | None = None

    def scratch(self, *shape: int) -> Tensor:
        """Memory for what is needed in passing: fresh pages cost more than to write to them."""
        numel = prod(shape)
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(max(numel, SCRATCH_NUMEL), dtype=self.dtype, device=self.device)
        return self._scratch[:numel].view(shape)

    @property
    def spectrum(self) -> Tensor:
        """`(B, length / 2 + 1)`."""
        if self._spectrum is None:
            size = (self.buckets.shape[0], self.length // 2 + 1)
            self._spectrum = torch.zeros(size, dtype=self.dtype.to_complex(), device=self.device)
        return self._spectrum

    def result(self) -> Tensor:
        """`(B, dim)`."""
        if self._spectrum is None or not len(self.buckets):
            return self.buckets
        return self.buckets + _folded(torch.fft.irfft(self._spectrum, n=self.length), self.dim)


@dataclass(frozen=True)
class _Sketch:
    """The count sketch of one parameter, as a matrix `(out, in)`.

    Attributes:
        sides: Its two sizes.
        dim: The number of buckets.
        along: The longer side, along which the matrix is laid out.
        width: How far two lines of the layout are apart, prime to `dim`.
        shift: The bucket of the first number.
        order: For each side, which index stands at which place.
        place: For each side, the place of each index.
        signs: For each side, ±1 for each index.
    """

    sides: tuple[int, int]
    dim: int
    along: int
    width: int
    shift: int
    order: tuple[Tensor, Tensor]
    place: tuple[Tensor, Tensor]
    signs: tuple[Tensor, Tensor]

    @classmethod
    def drawn(cls, seed: int, sides: tuple[int, int], dim: int, device: torch.device) -> _Sketch:
        generator = torch.Generator("cpu").manual_seed(seed)
        order = [torch.randperm(size, generator=generator, device="cpu") for size in sides]
        signs = [_random_signs((size,), generator) for size in sides]
        shift = int(torch.randint(dim, (), generator=generator, device="cpu"))
        along = int(sides[1] >= sides[0])
        width = next(width for width in range(max(1, *sides), max(sides) + dim + 1) if gcd(width, dim) == 1)
        placed = [indices.argsort() for indices in order]
        out, in_ = order[0].to(device), order[1].to(device)
        return cls(
            sides,
            dim,
            along,
            width,
            shift,
            (out, in_),
            (placed[0].to(device), placed[1].to(device)),
            (signs[0].to(device), signs[1].to(device)),
        )

    def add(self, term: Term, totals: _Totals, start: int) -> None:
        """Adds the sketches of a term's rows to those from `start` on."""
        if isinstance(term, Patches) and self._fits(term) and self._is_faster_by_factors(term):
            for part in term.chunks(prod(term.row_shape[1:]) * term.positions):
                self._add_by_factors(as_linear(part), totals, start)
                start += part.batch
        elif isinstance(term, Outer) and self._fits(term):
            add = self._add_by_factors if self._is_faster_by_factors(term) else self._add_by_rows
            add(term, totals, start)
        elif isinstance(term, OneHot) and self._fits(term):
            self._add_by_entries(term, totals, start)
        else:
            self._add_numbers(term, totals, start)

    def _fits(self, term: Term) -> bool:
        """Whether the term's factors are those of the parameter's two sides."""
        return _sides(term.row_shape) == self.sides and prod(self.sides) > 0

    def _is_faster_by_factors(self, term: Outer | Patches) -> bool:
        if isinstance(term, Patches) and term.geometry.groups > 1:
            return False
        out, in_ = self.sides
        length = _transform_length(self.dim)
        transforms = length * (2 * NUMBER_OF_FFT * log2(max(2, length)) + NUMBER_OF_SPECTRUM)
        by_factors = term.positions * (transforms + NUMBER_OF_FACTOR * (out + in_))
        return by_factors < out * in_ * (term.positions + NUMBER_OF_ROW)

    def _add_by_factors(self, term: Outer, totals: _Totals, start: int) -> None:
        """By Fourier transforms of the sketches of the factors, position by position."""
        for part in term.chunks(2 * term.positions * totals.length):
            g, a = part.weighted()
            spectrum = self._transform(g, 0, totals.length).mul_(self._transform(a, 1, totals.length)).sum(1)
            totals.spectrum[start : start + part.batch] += spectrum
            start += part.batch

    def _transform(self, factor: Tensor, side: int, length: int) -> Tensor:
        """The transform of the sketch of a factor `(B, T, features)`, `(B, T, length / 2 + 1)`."""
        signed = factor.reshape(-1, factor.shape[-1]) * self.signs[side].to(factor.dtype)
        sketch = signed.new_zeros(len(signed), self.dim).index_add_(1, self._buckets(side), signed)
        spectrum: Tensor = torch.fft.rfft(sketch, n=length)
        return spectrum.view(*factor.shape[:-1], length // 2 + 1)

    def _buckets(self, side: int) -> Tensor:
        """`h(out)` or `h'(in)`."""
        place = self.place[side]
        return (place if side == self.along else place * self.width + self.shift) % self.dim

    def _add_by_rows(self, term: Outer, totals: _Totals, start: int) -> None:
        """By the shuffled rows, made from shuffled factors, a bounded number of them at once."""
        lines = min(self.sides)
        some = min(lines, max(1, SCRATCH_NUMEL // self.width))
        for part in term.chunks(max(some * self.width, term.positions * (lines + self.width))):
            factors = part.weighted()
            across = self._shuffled(factors[1 - self.along], 1 - self.along, lines)
            along = self._shuffled(factors[self.along], self.along, self.width)
            count = max(1, SCRATCH_NUMEL // (some * self.width))
            count = ceil(part.batch / ceil(part.batch / count))  # no small rest
            for first in range(0, part.batch, count):
                samples = slice(first, min(first + count, part.batch))
                for place in range(0, lines, some):
                    left = across[samples, :, place : place + some].mT
                    rows = totals.scratch(len(left), left.shape[1], self.width)
                    folded = _folded(torch.bmm(left, along[samples], out=rows).flatten(1), self.dim)
                    numbers = totals.buckets[start + samples.start : start + samples.stop]
                    _add_shifted(numbers, folded, (self.shift + place * self.width) % self.dim)
            start += part.batch

    def _shuffled(
        self,
        factor: Tensor,  # (B, T, features)
        side: int,
        width: int,
    ) -> Tensor:  # (B, T, width)
        """A factor by places, with the signs, and zeros behind; sample after sample in memory."""
        batch, positions, features = factor.shape
        order = self.order[side]
        if not factor.is_contiguous() and factor.transpose(0, 1).is_contiguous():  # recurrent: step after step
            chosen = factor.transpose(0, 1).reshape(-1, features).index_select(1, order)
            chosen = chosen.view(positions, batch, features).transpose(0, 1)
        else:
            chosen = factor.reshape(-1, features).index_select(1, order).view(factor.shape)
        shuffled = factor.new_empty(batch, positions, width)
        shuffled[:, :, features:] = 0.0
        torch.mul(chosen, self.signs[side].to(factor.dtype)[order], out=shuffled[:, :, :features])
        return shuffled

    def _add_by_entries(self, term: OneHot, totals: _Totals, start: int) -> None:
        """Each value of an embedding's rows by itself."""
        out_buckets, in_buckets = self._buckets(0), self._buckets(1)
        for part in term.chunks(term.factors[0][0].numel()):
            values, index = part.weighted()
            signs = self.signs[0].to(values.dtype)[index][..., None] * self.signs[1].to(values.dtype)
            buckets = (out_buckets[index][..., None] + in_buckets) % self.dim
            totals.buckets[start : start + part.batch].scatter_add_(1, buckets.flatten(1), (values * signs).flatten(1))
            start += part.batch

    def _add_numbers(self, term: Term, totals: _Totals, start: int) -> None:
        """Each number of the dense rows by itself."""
        out, in_ = self.sides
        if not out * in_:
            return
        parts: Iterable[Term] = [term] if isinstance(term, Dense) else term.chunks()
        blocks = list(_blocks(out, in_, CHUNK_NUMEL // max(1, term.batch) if isinstance(term, Dense) else CHUNK_NUMEL))
        placed = self._buckets_of(*blocks[0]) if len(blocks) == 1 else None
        for part in parts:
            rows = part.matrix() if isinstance(part, Dense) else part.dense()
            rows = rows.reshape(part.batch, out, in_)
            for some, columns in blocks:
                buckets, signs = placed or self._buckets_of(some, columns)
                signed = rows[:, some, columns].flatten(1) * signs.to(rows.dtype)
                if isinstance(part, Dense) and part.coefficient != 1.0:
                    signed *= part.coefficient
                totals.buckets[start : start + part.batch].scatter_add_(1, buckets.expand_as(signed), signed)
            start += part.batch

    def _buckets_of(self, some: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The buckets and the signs of a part of the matrix, flat."""
        buckets = (self._buckets(0)[some, None] + self._buckets(1)[columns]) % self.dim
        return buckets.flatten(), (self.signs[0][some, None] * self.signs[1][columns]).flatten()


@dataclass(frozen=True)
class _TwoSided:
    """`(P_out g) ⊗ (P_in a)` of one parameter, of which the first `dim` numbers are taken.

    Attributes:
        sides: The two sizes of the parameter as a matrix.
        left: `P_out`, `(k_out, out)`.
        right: `P_in`, `(k_in, in)`.
    """

    sides: tuple[int, int]
    left: Tensor
    right: Tensor

    @classmethod
    def drawn(cls, seed: int, sides: tuple[int, int], dim: int, device: torch.device) -> _TwoSided:
        generator = torch.Generator("cpu").manual_seed(seed)
        k_out = isqrt(dim)
        left = _random_signs((k_out, sides[0]), generator) / sqrt(dim)
        return cls(sides, left.to(device), _random_signs((ceil(dim / k_out), sides[1]), generator).to(device))

    def add(self, term: Term, totals: _Totals, start: int) -> None:
        """Adds the projections of a term's rows to those from `start` on."""
        left, right = self.left.to(term.dtype), self.right.to(term.dtype)
        fits = _sides(term.row_shape) == self.sides
        for part in term.chunks(self._numel(term) if fits else None):
            if isinstance(part, Outer) and fits:
                g, a = part.weighted()
                projected = torch.bmm((g @ left.t()).mT, a @ right.t())
            elif isinstance(part, OneHot) and fits:
                values, index = part.weighted()
                projected = torch.bmm(left.t()[index].mT, values @ right.t())
            else:
                projected = left @ part.dense().reshape(part.batch, *self.sides) @ right.t()
            totals.buckets[start : start + part.batch] += projected.flatten(1)[:, : totals.dim]
            start += part.batch

    def _numel(self, term: Term) -> int | None:
        """How many numbers are made of one row on the way."""
        if not isinstance(term, Outer | OneHot):
            return None
        return term.factors[0].shape[1] * (len(self.left) + len(self.right)) + len(self.left) * len(self.right)


@dataclass(frozen=True)
class _Gaussian:
    """Independent normal numbers for one parameter, drawn in blocks of directions."""

    seed: int
    shape: tuple[int, ...]
    dim: int

    def add(self, term: Term, totals: _Totals, start: int) -> None:
        """Adds the projections of a term's rows to those from `start` on."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        size = max(1, CHUNK_NUMEL // max(1, prod(self.shape)))  # a draw depends on the sizes of those before
        for first in range(0, self.dim, size):
            count = min(size, self.dim - first)
            drawn = torch.randn(count, *term.row_shape, generator=generator, dtype=torch.float32, device="cpu")
            directions = Dense.of((drawn.to(totals.dtype) / sqrt(self.dim)).to(totals.device))
            totals.buckets[start : start + term.batch, first : first + count] += term.gram(directions)


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """The sizes of a parameter as a matrix; a vector is a row of one."""
    return (1, prod(shape)) if len(shape) < 2 else (shape[0], prod(shape[1:]))


def _random_signs(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, size, generator=generator, device="cpu")
    return bits.to(torch.float32).mul_(2).sub_(1)


def _transform_length(dim: int) -> int:
    """How long the Fourier transforms are: `dim`, or enough for a convolution that is wrapped around afterwards."""
    rest = dim
    for prime in (2, 3, 5, 7):
        while rest % prime == 0:
            rest //= prime
    return dim if rest == 1 else 1 << (2 * dim - 2).bit_length()


def _folded(
    numbers: Tensor,  # (B, n)
    dim: int,
) -> Tensor:  # (B, dim)
    """The numbers wrapped around after `dim`, and added up."""
    length = numbers.shape[1]
    whole = length // dim * dim
    if whole == length == dim:
        return numbers
    folded: Tensor = numbers[:, :whole].unflatten(1, (length // dim, dim)).sum(1)
    folded[:, : length - whole] += numbers[:, whole:]
    return folded


def _add_shifted(
    total: Tensor,  # (B, dim)
    numbers: Tensor,  # (B, dim)
    shift: int,
) -> None:
    """`total += numbers.roll(shift, 1)`."""
    rest = total.shape[1] - shift
    total[:, shift:] += numbers[:, :rest]
    total[:, :shift] += numbers[:, rest:]


def _blocks(out: int, in_: int, numel: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a matrix of bounded size."""
    columns = min(in_, max(1, numel))
    some = max(1, numel // columns)
    for first in range(0, out, some):
        for start in range(0, in_, columns):
            yield slice(first, first + some), slice(start, start + columns)


def _summed(parts: list[Tensor]) -> Tensor:
    """The sum, in the widest of the dtypes, on the first of the devices."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total
