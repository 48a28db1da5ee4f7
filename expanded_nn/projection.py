"""Random projections of whole gradients to a few numbers, from the factors; `core/sketch.py` has their mathematics."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isqrt, prod, sqrt
from typing import SupportsIndex

import torch
from torch import Tensor

from expanded_nn._errors import complaint, refuse_no_count
from expanded_nn.common.modes import no_torch_function, with_values, without_autocast
from expanded_nn.common.traced import is_traced, refuse_values
from expanded_nn.core import cost
from expanded_nn.core.sketch import Sketch, Small, Totals, TwoSided
from expanded_nn.core.terms import Dense, Term, sides
from expanded_nn.factored import FactoredTensor, as_factored, as_real
from expanded_nn.rows.arguments import refuse_emptiness, refuse_no_rows
from expanded_nn.rows.factors import widened

KINDS = ("sketch", "kronecker", "gaussian")

DRAWN_NUMEL = 1 << 22  # of normal numbers drawn at once; the map depends on it


class Projection:
    """A random linear map of whole gradients to `dim` numbers that keeps inner products on average.

    For the gradients x and y of two samples, `projection(x) @ projection(y)` is `x @ y` on average over the seeds, and
    off by about `|x| |y| / sqrt(dim)`; with `"kronecker"` by up to 3 times as much. The map is the sum over the
    parameters of a map for each, which is drawn from the parameter's name, its shape and the seed, and from nothing
    else: a sample has the same projection in any batch, order, process and precision, and on any device, and the
    projections of two models of which one has frozen parameters differ by what these contribute. Make it once and keep
    it: it holds the random numbers it has drawn, as many as a parameter has rows and columns.

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
        refuse_no_count("Projection", "dim", dim, 1)
        if kind not in KINDS:
            raise ValueError(f"Projection: kind is {kind!r}; wanted one of {', '.join(map(repr, KINDS))}.")
        if not isinstance(seed, SupportsIndex) or isinstance(seed, bool | Tensor):
            raise ValueError(f"Projection: seed is {seed!r}; wanted a whole number.")
        self.dim = int(dim)
        self.kind = kind
        self.seed = int(seed)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._maps: dict[tuple[str, torch.device], Sketch | TwoSided | _Gaussian] = {}
        self._small: dict[tuple[tuple[str, ...], torch.device], Small] = {}  # of their names

    def __repr__(self) -> str:
        return f"Projection({self.dim}, kind={self.kind!r}, seed={self.seed})"

    def __call__(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Projects each row.

        Args:
            grads: Parameter name -> `(B, *shape)`, as `per_sample_grads` gives them. Parameters may be lacking. A
                complex number counts as two real ones.

        Returns:
            `(B, dim)`, in float32 or a wider dtype, without history.

        Raises:
            PerSampleError: If there are no rows, or the parameters hold different numbers of them, or one has another
                shape than in an earlier call.
        """
        grads = dict(grads.items()) if isinstance(grads, Mapping) else grads  # a look at one of them takes a while
        refuse_no_rows("Projection", "grads", grads)
        refuse_emptiness("Projection", grads)
        with torch.no_grad(), no_torch_function():
            rows = {name: widened(as_real(as_factored(tensor))) for name, tensor in grads.items()}
            self._refuse_other_shapes(rows)
            first = next(iter(rows.values()))
            with without_autocast():
                by_kind: dict[tuple[torch.dtype, torch.device], dict[str, FactoredTensor]] = {}
                for name, tensor in rows.items():
                    by_kind.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
                # in the widest of the dtypes, on the first of the devices
                result, *more = (
                    self._of_one_kind(group, Totals(self.dim, first.shape[0], *kind, reuses_memory=not is_traced()))
                    for kind, group in by_kind.items()
                )
                return sum((other.to(first.device) for other in more), start=result)

    def _of_one_kind(self, rows: Mapping[str, FactoredTensor], totals: Totals) -> Tensor:
        """The projections of rows of one dtype, on one device."""
        small = self._held_small(rows)
        if small:
            self._add_small(rows, small, totals)
        for name, tensor in rows.items():
            if name not in small:
                self._add(name, tensor, totals)
        return totals.result()

    def _held_small(self, rows: Mapping[str, FactoredTensor]) -> dict[str, Tensor]:
        """The rows of small parameters that are sketched and held dense, `(B, numbers in a row)`."""
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in rows.items()}
        matrices = {
            name: tensor.held_matrix()
            for name, tensor in rows.items()
            if cost.keeps_buckets(shapes[name]) and isinstance(self._map(name, shapes[name], tensor.device), Sketch)
        }
        return {name: matrix for name, matrix in matrices.items() if matrix is not None}

    def _add_small(self, rows: Mapping[str, FactoredTensor], small: Mapping[str, Tensor], totals: Totals) -> None:
        key = tuple(small), totals.device
        if key not in self._small:
            maps = [self._map(name, tuple(rows[name].shape[1:]), totals.device) for name in small]
            with with_values():
                self._small[key] = Small.of([linear_map for linear_map in maps if isinstance(linear_map, Sketch)])
        self._small[key].add(list(small.values()), totals)

    def _add(self, name: str, rows: FactoredTensor, totals: Totals) -> None:
        linear_map = self._map(name, tuple(rows.shape[1:]), rows.device)
        start = 0
        for size, terms in rows._unchanged():
            for term in terms if size else ():
                linear_map.add(term, totals, start)
            start += size

    def _map(self, name: str, shape: tuple[int, ...], device: torch.device) -> Sketch | TwoSided | _Gaussian:
        key = (name, device)
        if key not in self._maps:
            with with_values():  # it depends on no value of a step, and holds for later calls
                self._maps[key] = self._drawn(name, shape, device)
        return self._maps[key]

    def _drawn(self, name: str, shape: tuple[int, ...], device: torch.device) -> Sketch | TwoSided | _Gaussian:
        text = repr((self.kind, self.seed, name, shape))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        sizes = sides(shape)
        if self.kind == "gaussian":
            return _Gaussian(seed, shape, self.dim)
        if self.kind == "kronecker" and min(sizes) > 1:
            return _drawn_two_sided(seed, sizes, self.dim, device)
        return _drawn_sketch(seed, sizes, self.dim, device)

    def _refuse_other_shapes(self, rows: Mapping[str, Tensor]) -> None:
        sizes = {name: tensor.shape[0] for name, tensor in rows.items()}
        first, *others = sizes.values()
        if any(size != first for size in others):  # no set, as they may be symbols
            raise complaint(
                "Projection", f"the parameters hold {sizes} rows", "equally many", "Project batch by batch."
            )
        for name, tensor in rows.items():
            shape = tuple(tensor.shape[1:])
            first_shape = self._shapes.setdefault(name, shape)
            if first_shape != shape:
                raise complaint(
                    "Projection",
                    f"{name!r} has rows of shape {shape}",
                    f"{first_shape}, as in the first call",
                    "Make one Projection for each model.",
                )


@dataclass(frozen=True)
class _Gaussian:
    """Independent normal numbers for one parameter, drawn in blocks of directions."""

    seed: int
    shape: tuple[int, ...]
    dim: int

    def add(self, term: Term, totals: Totals, start: int) -> None:
        """Adds the projections of a term's rows to those from `start` on."""
        refuse_values('a Projection of kind="gaussian" draws its numbers again in each call (kind="sketch" does not)')
        generator = torch.Generator("cpu").manual_seed(self.seed)
        size = max(1, DRAWN_NUMEL // max(1, prod(self.shape)))  # a draw depends on the sizes of those before
        for first in range(0, self.dim, size):
            count = min(size, self.dim - first)
            normals = torch.randn(count, *term.row_shape, generator=generator, dtype=torch.float32, device="cpu")
            directions = Dense.of((normals.to(totals.dtype) / sqrt(self.dim)).to(totals.device))
            totals.buckets[start : start + term.batch, first : first + count] += term.gram(directions)


def _drawn_sketch(seed: int, sizes: tuple[int, int], dim: int, device: torch.device) -> Sketch:
    generator = torch.Generator("cpu").manual_seed(seed)
    orders = [torch.randperm(size, generator=generator, device="cpu") for size in sizes]
    signs = [_random_signs((size,), generator) for size in sizes]
    shift = int(torch.randint(dim, (), generator=generator, device="cpu"))
    return Sketch.of([order.to(device) for order in orders], [side.to(device) for side in signs], dim, shift)


def _drawn_two_sided(seed: int, sizes: tuple[int, int], dim: int, device: torch.device) -> TwoSided:
    generator = torch.Generator("cpu").manual_seed(seed)
    k_out = isqrt(dim)
    left = _random_signs((k_out, sizes[0]), generator) / sqrt(dim)
    return TwoSided(left.to(device), _random_signs((ceil(dim / k_out), sizes[1]), generator).to(device))


def _random_signs(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, size, generator=generator, device="cpu")
    return bits.to(torch.float32).mul_(2).sub_(1)
