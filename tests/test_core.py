"""The core: every function on every kind of term, traced, eager and against the dense twin; and that it is pure."""

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from expanded_nn import core
from expanded_nn.core import (
    algebra,
    cost,
    elementwise,
    geometry,
    kronecker,
    lines,
    parts,
    patches,
    positions,
    products,
    sketch,
    terms,
)
from expanded_nn.core.algebra import Block, Kind
from expanded_nn.core.elementwise import Elementwise
from expanded_nn.core.geometry import Geometry
from expanded_nn.core.lines import Lines, matvec_by_line, with_scaled_lines
from expanded_nn.core.parts import Parts
from expanded_nn.core.patches import Patches
from expanded_nn.core.products import Products, sum_of_both
from expanded_nn.core.sketch import Sketch, Totals, TwoSided
from expanded_nn.core.terms import Dense, Differentiable, OneHot, Outer, PaddedOuter, SparseOneHot, Term
from some import slow, some

FOLDER = Path(core.__file__).parent
B = 3
KIND = Kind((4, 6), torch.float64, torch.device("cpu"))


class Case(NamedTuple):
    """A kind of term.

    Attributes:
        factors: New random factors.
        term: The term of factors.
        twin: Its rows, from the definition.
    """

    factors: Callable[[], tuple[Tensor, ...]]
    term: Callable[..., Term]
    twin: Callable[..., Tensor]


def outer(
    positions: int,
    out: int = 4,
    features: int = 6,
    *,
    dtype: torch.dtype = torch.float64,
    kind: type[Outer] = Outer,
) -> Case:
    return Case(
        lambda: (torch.randn(B, positions, out, dtype=dtype), torch.randn(B, positions, features, dtype=dtype)),
        lambda g, a: kind.of(g, a, dtype),
        lambda g, a: torch.einsum("bto,bti->boi", g, a),
    )


def of_parts(*there: bool) -> Case:
    """A part for each expert; some are zero."""
    pairs, zeros = [outer(3 - k, 2, 3) for k in range(sum(there))], torch.zeros(B, 2, 3, dtype=torch.float64)

    def put(made: Sequence[Any], nothing: Any) -> list[Any]:
        left = iter(made)
        return [next(left) if is_there else nothing for is_there in there]

    def pairwise(factors: Sequence[Tensor]) -> list[tuple[Case, Sequence[Tensor]]]:
        return [(pair, factors[2 * k : 2 * k + 2]) for k, pair in enumerate(pairs)]

    return Case(
        lambda: tuple(factor for pair in pairs for factor in pair.factors()),
        lambda *factors: Parts.of(put([pair.term(*own) for pair, own in pairwise(factors)], None)),
        lambda *factors: torch.stack(put([pair.twin(*own) for pair, own in pairwise(factors)], zeros), 1),
    )


def one_hot(kind: type[OneHot]) -> Case:
    return Case(
        lambda: (torch.randn(B, 5, 6), torch.randint(4, (B, 5))),
        lambda values, index: kind.of(values, index, 4, torch.float64),
        lambda values, index: torch.einsum("btd,bte->bed", values, F.one_hot(index, 4).to(values.dtype)),
    )


def by_lines() -> Case:
    return Case(
        lambda: (torch.randn(B, 4), torch.randn(4, 6)),
        lambda numbers, matrix: Lines.of(numbers, matrix),
        lambda numbers, matrix: numbers[:, :, None] * matrix,
    )


def times_one(of: Case) -> Case:
    """The rows of another kind, all times the same tensor."""

    def factors() -> tuple[Tensor, ...]:
        of_rows = of.factors()
        return *of_rows, torch.randn(of.term(*of_rows).row_shape).clamp(min=-1)

    return Case(
        factors,
        lambda *given: Elementwise.of(of.term(*given[:-1]), given[-1]),
        lambda *given: of.twin(*given[:-1]) * given[-1],
    )


def convolution(
    size: tuple[int, ...],
    row_shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    groups: int = 1,
    stride: int = 1,
    padding: int = 0,
) -> Case:
    dims = len(size)
    moving = Geometry((stride,) * dims, (padding,) * dims, (1,) * dims, groups)
    positions = [(n + 2 * padding - k) // stride + 1 for n, k in zip(size, row_shape[2:], strict=True)]

    def twin(g: Tensor, x: Tensor) -> Tensor:
        weight = torch.zeros(row_shape, dtype=dtype, requires_grad=True)
        outputs = [torch.convolution(one_x[None], weight, None, *moving.arguments()) for one_x in x]
        gradients = [torch.autograd.grad(y, weight, one_g[None])[0] for y, one_g in zip(outputs, g, strict=True)]
        return torch.stack(gradients)

    return Case(
        lambda: (
            torch.randn(B, row_shape[0], *positions, dtype=dtype),
            torch.randn(B, row_shape[1] * groups, *size, dtype=dtype),
        ),
        lambda g, x: Patches.of(g, x, row_shape, moving, dtype),
        twin,
    )


CASES = {
    "with a history": Case(lambda: (torch.randn(B, 4, 6),), Differentiable.of, lambda rows: rows),
    "dense": Case(lambda: (torch.randn(B, 4, 6),), Dense.of, lambda rows: rows),
    "outer, no position": outer(0),
    "outer, one position": outer(1),
    "outer, few positions": outer(2),
    "outer, many positions": outer(9),
    "outer, float32": outer(2, dtype=torch.float32),
    "outer, padded": outer(3, kind=PaddedOuter),
    "parts": of_parts(True, False, True, True),
    "parts, one without positions": of_parts(True, True, True, True),
    "parts, others": of_parts(True, True, False, False),
    "parts, only one": of_parts(False, True, False, False),
    "one-hot": one_hot(OneHot),
    "sparse one-hot": one_hot(SparseOneHot),
    "patches, pairs of entries": convolution((5,), (8, 8, 3), padding=1),
    "patches, pairs of windows": convolution((5, 5), (8, 8, 2, 2), stride=2),
    "patches, dense rows": convolution((7,), (2, 2, 3)),
    "patches, groups": convolution((4,), (24, 8, 3), groups=3, padding=1),
    "patches by groups": convolution((7,), (2, 2, 3), torch.float32),
    "patches by moving": convolution((7,), (4, 1, 3), torch.float32, groups=4),
    "patches by columns": convolution((6,), (16, 16, 5), torch.float32),
    "lines": by_lines(),
    "elementwise, lines": times_one(by_lines()),
    "elementwise, outer": times_one(outer(1)),
    "elementwise, no position": times_one(outer(0)),
    "elementwise, many positions": times_one(outer(9)),
    "elementwise, twice": times_one(times_one(outer(2))),
    "elementwise, parts": times_one(of_parts(True, False, True, True)),
    "elementwise, dense": times_one(Case(lambda: (torch.randn(B, 4, 6),), Dense.of, lambda rows: rows)),
    "elementwise, one-hot": times_one(one_hot(OneHot)),
    "elementwise, patches": times_one(convolution((5,), (8, 8, 3), padding=1)),
}


def weights(term: Term) -> Tensor:
    return torch.tensor([0.5, -1.0, 2.0][: term.batch], dtype=term.dtype)


def vector(term: Term) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(term.row_shape), dtype=term.dtype).view(term.row_shape) / 10


def filled(term: Term) -> Tensor:
    """The dense rows, in memory that is given where the term fills such, whatever is in it."""
    out = torch.full((term.batch, *term.row_shape), torch.nan, dtype=term.dtype)
    rows = term.dense(out)
    return out if term.fills_memory else rows


LAWS: dict[str, tuple[Callable[[Term], Tensor], Callable[[Tensor, Term], Tensor]]] = {  # of a term, of its twin
    "dense": (lambda t: t.dense(), lambda rows, t: rows),
    "dense out": (filled, lambda rows, t: rows),
    "weighted_sum": (lambda t: t.weighted_sum(weights(t)), lambda rows, t: torch.einsum("b,b...", weights(t), rows)),
    "weighted_sum plain": (lambda t: t.weighted_sum(None), lambda rows, t: rows.sum(0)),
    "add_weighted_sum": (
        lambda t: t.add_weighted_sum(t.weighted_sum(None), weights(t)),
        lambda rows, t: rows.sum(0) + torch.einsum("b,b...", weights(t), rows),
    ),
    "add_weighted_sum plain": (
        lambda t: t.add_weighted_sum(t.weighted_sum(None), None),
        lambda rows, t: 2 * rows.sum(0),
    ),
    "matvec": (lambda t: t.matvec(vector(t)), lambda rows, t: (rows * vector(t)).flatten(1).sum(1)),
    "lines.matvec_by_line": (
        lambda t: matvec_by_line(t, vector(t)),
        lambda rows, t: (rows * vector(t)).flatten(2).sum(2),
    ),
    "lines.matvec_by_line of one": (
        lambda t: matvec_by_line(t, vector(t)[None]),
        lambda rows, t: (rows * vector(t)).flatten(1).sum(1, keepdim=True),
    ),
    "lines.matvec_by_line of others": (
        lambda t: matvec_by_line(t, vector(t).view(2, -1)),
        lambda rows, t: (rows * vector(t)).view(len(rows), 2, -1).sum(2),
    ),
    "lines.with_scaled_lines": (
        lambda t: with_scaled_lines(t, vector(t).flatten()[: t.row_shape[0]]).dense(),
        lambda rows, t: torch.einsum("bo...,o->bo...", rows, vector(t).flatten()[: rows.shape[1]]),
    ),
    "squared_norms": (lambda t: t.squared_norms(), lambda rows, t: rows.flatten(1).square().sum(1)),
    "squared_norms products": (
        lambda t: t.squared_norms(Products()),
        lambda rows, t: rows.flatten(1).square().sum(1),
    ),
    "have_zero_factors": (
        lambda t: t.scaled(weights(t).clamp(min=0)).have_zero_factors().double(),
        lambda rows, t: ((weights(t) < 0) | rows.flatten(1).eq(0).all(1)).double(),
    ),
    "inner": (lambda t: t.inner(t.scaled(2.0)), lambda rows, t: 2 * rows.flatten(1).square().sum(1)),
    "gram": (lambda t: t.gram(t), lambda rows, t: rows.flatten(1) @ rows.flatten(1).t()),
    "scaled": (
        lambda t: t.scaled(weights(t)).dense(),
        lambda rows, t: torch.einsum("b,b...->b...", weights(t), rows),
    ),
    "map": (lambda t: t.map(lambda factor: factor[1:]).dense(), lambda rows, t: rows[1:]),
    "map clone": (lambda t: t.map(Tensor.clone).dense(), lambda rows, t: rows),
    "to": (lambda t: t.to(torch.float64).dense(), lambda rows, t: rows.double()),
    "chunks": (lambda t: torch.cat([part.dense() for part in t.chunks(1)]), lambda rows, t: rows),
    "remake": (lambda t: t.remake(t.factors, 2.0, t.dtype).dense(), lambda rows, t: rows * 2 / t.coefficient),
    "unscaled": (lambda t: t.remake(t.unscaled(), 1.0, t.dtype).dense(), lambda rows, t: rows / t.coefficient),
    "weighted": (lambda t: t.remake(t.weighted(), 1.0, t.dtype).dense(), lambda rows, t: rows),
    "absorbed": (lambda t: t.remake(t.absorbed(), 1.0, t.dtype).dense(), lambda rows, t: rows),
    "algebra.merged": (
        lambda t: sum(part.dense() for part in algebra.merged([t, t.scaled(3.0)])),
        lambda rows, t: 4 * rows,
    ),
}
OF_ONE_KIND = {  # what one kind of term has beside
    "matrix": ("dense", lambda t: t.matrix(), lambda rows, t: rows.flatten(1) / t.coefficient),
    "transposed": ("outer, few positions", lambda t: t.transposed().dense(), lambda rows, t: rows.mT),
    "outers": ("parts, others", lambda t: next(t.outers())[1].dense(), lambda rows, t: rows[:, 0]),
    "numbered": ("parts, only one", lambda t: t.numbered((2,)).dense(), lambda rows, t: rows.roll(1, 1)),
    "magnitudes": ("outer, one position", lambda t: t.magnitudes().dense(), lambda rows, t: rows.abs()),
    "magnitudes of two": ("elementwise, outer", lambda t: t.magnitudes().dense(), lambda rows, t: rows.abs()),
    "magnitudes of lines": ("lines", lambda t: t.magnitudes().dense(), lambda rows, t: rows.abs()),
    "matrix of lines": ("lines", lambda t: t.factors[0][:, :, None] * t.matrix * t.coefficient, lambda rows, t: rows),
    "matvec_by_channel": (
        "patches, groups",
        lambda t: t.matvec_by_channel(vector(t)),
        lambda rows, t: (rows * vector(t)).flatten(2).sum(2),
    ),
    "unchanged": ("elementwise, outer", lambda t: t.unchanged.dense() * t.shared[0], lambda rows, t: rows),
    "padded": ("outer, few positions", lambda t: t.padded((1, 2)).dense(), lambda rows, t: F.pad(rows, (0, 0, 1, 2))),
}
SIZES = {
    *("numel", "positions", "fills_memory", "norms_take_rows", "gram_takes_rows", "batch", "padded_size", "of"),
    "numbers",
}


def assert_traced(function: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]]) -> None:
    """What is traced on the first inputs gives the eager result on the second."""
    first, second = inputs
    eager = function(*second)
    traced = make_fx(function, tracing_mode="fake")(*first)
    torch.testing.assert_close(traced(*second), eager, rtol=1e-12 if eager.dtype == torch.float64 else 1e-6, atol=0)


def assert_is_law(
    case: Case, of_term: Callable[[Term], Tensor], of_twin: Callable[[Tensor, Term], Tensor], *, traced: bool = True
) -> None:
    inputs = [case.factors() for _ in range(2)]
    term = case.term(*inputs[1]).scaled(-0.5)
    expected = of_twin(case.twin(*inputs[1]) * -0.5, term)
    close = {"rtol": 1e-9, "atol": 1e-9} if term.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(of_term(term), expected, check_dtype=False, **close)
    if traced:
        assert_traced(lambda *factors: of_term(case.term(*factors).scaled(-0.5)), inputs)


ROWS_AT_ONCE = [1, 1 << 22]  # chunks make long traces, of the same operations: only the larger one is traced


@pytest.mark.parametrize("rows_at_once", ROWS_AT_ONCE)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", CASES)
def test_of_each_kind(kind: str, law: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CHUNK_NUMEL", rows_at_once)
    assert_is_law(CASES[kind], *LAWS[law], traced=rows_at_once > 1)


@pytest.mark.parametrize("law", OF_ONE_KIND)
def test_of_one_kind(law: str) -> None:
    kind, of_term, of_twin = OF_ONE_KIND[law]
    assert_is_law(CASES[kind], of_term, of_twin)


PAIRS = [name for name in CASES if "patches" not in name and "float32" not in name]


@pytest.mark.parametrize(("left", "right"), some([*product(PAIRS, PAIRS)]))
def test_of_two_kinds(left: str, right: str) -> None:
    one, two = CASES[left], CASES[right]
    inputs = [(*one.factors(), *two.factors()) for _ in range(2)]
    count = len(one.factors())

    def both(*factors: Tensor) -> tuple[Term, Term]:
        return one.term(*factors[:count]).scaled(3.0), two.term(*factors[count:])

    mine, theirs = (rows.flatten(1) for rows in (3 * one.twin(*inputs[1][:count]), two.twin(*inputs[1][count:])))

    def products(*factors: Tensor) -> Tensor:
        term, other = both(*factors)
        return torch.cat([term.inner(other)[:, None], term.gram(other)], 1)

    expected = torch.cat([(mine * theirs).sum(1, keepdim=True), mine @ theirs.t()], 1)
    torch.testing.assert_close(products(*inputs[1]), expected)
    assert_traced(products, inputs)


def blocks(*factors: Tensor) -> list[Block]:
    """Rows in four blocks: a sum of several kinds, one of one kind, one without terms, one without rows."""
    g, a, h, c, values, index, rows = factors
    several = (Outer.of(g, a, KIND.dtype), OneHot.of(values, index, 4, KIND.dtype), Dense.of(rows))
    nothing = Outer.of(g[:0], a[:0], KIND.dtype)
    return [(B, several), (B, (Outer.of(h, c, KIND.dtype).scaled(2.0),)), (2, ()), (0, (nothing,))]


def factors_of_blocks() -> tuple[Tensor, ...]:
    names = ("outer, many positions", "outer, few positions", "one-hot", "dense")
    return tuple(factor for name in names for factor in CASES[name].factors())


def twin_of_blocks(*factors: Tensor) -> Tensor:
    g, a, h, c, values, index, rows = factors
    several = CASES["outer, few positions"].twin(g, a) + CASES["one-hot"].twin(values, index) + rows
    return torch.cat([several, 2 * CASES["outer, few positions"].twin(h, c), torch.zeros(2, 4, 6)])


def by_row() -> Tensor:
    return torch.linspace(-1, 1, 2 * B + 2)


OF_BLOCKS: dict[str, tuple[Callable[[list[Block]], Tensor], Callable[[Tensor], Tensor]]] = {
    "dense": (lambda b: algebra.dense(b, KIND), lambda rows: rows),
    "dense out": (lambda b: algebra.dense(b[1:2], KIND, torch.empty(B, 4, 6)), lambda rows: rows[B : 2 * B]),
    "chunks": (lambda b: torch.cat(list(algebra.chunks(b, KIND))), lambda rows: rows),
    "squared_norms": (lambda b: algebra.squared_norms(b, KIND, Products()), lambda r: r.flatten(1).square().sum(1)),
    "weighted_sum": (lambda b: algebra.weighted_sum(b, KIND, by_row()), lambda r: torch.einsum("b,b...", by_row(), r)),
    "weighted_sum plain": (lambda b: algebra.weighted_sum(b, KIND), lambda rows: rows.sum(0)),
    "weighted_sum none": (lambda b: algebra.weighted_sum(b[2:3], KIND), lambda rows: torch.zeros(4, 6)),
    "matvec_by_line": (lambda b: algebra.matvec_by_line(b, KIND, torch.ones(4, 6)), lambda rows: rows.sum(2)),
    "matvec": (lambda b: algebra.matvec(b, KIND, torch.ones(4, 6)), lambda rows: rows.sum((1, 2))),
    "joined": (lambda b: algebra.dense(algebra.joined(doubled(b)), KIND), lambda rows: torch.cat([rows, 2 * rows])),
    "gram": (lambda b: algebra.gram(b, b[::-1], KIND), lambda r: r.flatten(1) @ r[reversed_blocks()].flatten(1).t()),
}


def doubled(blocks: list[Block]) -> list[Block]:
    """Each block, and behind it what it is joined with; in the end the rows, and then twice the rows."""
    twice = [(size, tuple(term.scaled(2.0) for term in terms)) for size, terms in blocks]
    assert [len(algebra.joined(pair)) for pair in zip(blocks, twice, strict=True)] == [1] * len(blocks)
    return [*blocks, *twice]


def reversed_blocks() -> list[int]:
    return [2 * B, 2 * B + 1, *range(B, 2 * B), *range(B)]


@pytest.mark.parametrize("rows_at_once", ROWS_AT_ONCE)
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_of_blocks(name: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CHUNK_NUMEL", rows_at_once)
    of_blocks, of_twin = OF_BLOCKS[name]
    inputs = [factors_of_blocks() for _ in range(2)]
    torch.testing.assert_close(of_blocks(blocks(*inputs[1])), of_twin(twin_of_blocks(*inputs[1])))
    if rows_at_once > 1:
        assert_traced(lambda *factors: of_blocks(blocks(*factors)), inputs)


KRONECKER = [name for name in CASES if name.startswith(("outer", "patches")) and name != "outer, padded"]


def second_moments(term: Term, *factors: Tensor) -> tuple[Tensor, Tensor]:
    """`A` and `G` of a term, from the definition: the sums over positions of `a aᵀ` and `g gᵀ`, group by group."""
    g, a = factors
    groups = 1
    if isinstance(term, Patches):
        groups = term.geometry.groups
        a = geometry.windows(a, g.shape[2:], term.row_shape[2:], term.geometry).reshape(
            a.shape[0], -1, math.prod(g.shape[2:])
        )
        a, g = a.mT, g.flatten(2).mT
    A = sum(torch.einsum("bti,btj->ij", part, part) for part in a.chunk(groups, 2)) / groups
    G = torch.block_diag(*(torch.einsum("bti,btj->ij", part, part) for part in g.chunk(groups, 2)))
    return A, G


@pytest.mark.parametrize("panel", [2, 256])
@pytest.mark.parametrize("name", KRONECKER)
def test_kronecker_factors(name: str, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", panel)
    case = CASES[name]
    inputs = [case.factors() for _ in range(2)]

    def factors(*tensors: Tensor, times: float = 3.0) -> kronecker.KroneckerFactors:
        term = case.term(*tensors)
        kind = Kind(term.row_shape, term.dtype, term.factors[0].device)
        total = kronecker.factors([(B, (term.scaled(times),)), (2, ())], kind)
        return kronecker.factors([(B, (term,))], kind, total)

    term = case.term(*inputs[1])
    assert kronecker.has_factors([term, term], term.row_shape)
    A, G = second_moments(term, *inputs[1])
    close = {"rtol": 1e-9, "atol": 1e-9} if term.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    found = factors(*inputs[1])
    torch.testing.assert_close(found.A, 2 * A, **close)
    torch.testing.assert_close(found.G, (1 + 9) * G, **close)
    assert found.count == 2 * B * term.positions
    if panel > 2:

        def both(*tensors: Tensor) -> Tensor:
            found = factors(*tensors)
            return torch.block_diag(found.A, found.G)

        assert_traced(both, inputs)


@pytest.mark.parametrize("counts", [(3, 2), (4,), (3, 3, 3), (9, 1, 0, 2), (2, 20, 2)])
@pytest.mark.parametrize("reads", [False, True])
def test_second_moment_of_few(counts: tuple[int, ...], reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", 4)
    parts, moment = [torch.randn(count, 7) for count in counts], kronecker.SecondMoment(torch.eye(7))
    for part in parts:
        given = part.clone()
        moment.add(given, 0.5, may_wait=True)
        given.zero_()
        if reads:
            moment.total()
    expected = torch.eye(7) + 0.5 * sum(part.t() @ part for part in parts)
    for _ in range(2):
        torch.testing.assert_close(moment.total(), expected)


def test_what_has_no_kronecker_factors() -> None:
    for name in ("dense", "one-hot"):
        assert not kronecker.has_factors([CASES[name].term(*CASES[name].factors())], KIND.row_shape)


@pytest.mark.parametrize("name", CASES)
def test_preconditioned(name: str) -> None:
    case = CASES[name]
    inputs = [(*case.factors(), torch.randn(9, 9), torch.randn(200, 200)) for _ in range(2)]

    def rows(*tensors: Tensor) -> Tensor:
        *factors, left, right = tensors
        term = case.term(*factors).scaled(-0.5)
        out, in_ = terms.sides(term.row_shape)
        left, right = (side.repeat(3, 3)[:size, :size].to(term.dtype) for side, size in ((left, out), (right, in_)))
        return kronecker.between(term, left + left.t(), right + right.t()).dense().flatten(1)

    *factors, left, right = inputs[1]
    twin = case.twin(*factors) * -0.5
    out, in_ = len(twin[0]), twin[0].numel() // len(twin[0])
    left, right = (side.repeat(3, 3)[:size, :size].to(twin.dtype) for side, size in ((left, out), (right, in_)))
    expected = (left + left.t()) @ twin.flatten(2) @ (right + right.t())
    close = {"rtol": 1e-9, "atol": 1e-9} if twin.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-2}
    torch.testing.assert_close(rows(*inputs[1]), expected.flatten(1), **close)
    assert_traced(rows, inputs)


def test_damped_inverse() -> None:
    inputs = [(torch.randn(6, 4),) for _ in range(2)]

    def inverse(x: Tensor) -> Tensor:
        return kronecker.damped_inverse(x.t() @ x, 6, 0.1)[0]

    (x,) = inputs[1]
    torch.testing.assert_close(inverse(x), torch.linalg.inv(x.t() @ x / 6 + 0.1 * torch.eye(4)))
    assert_traced(inverse, inputs)
    assert [bool(kronecker.damped_inverse(k * torch.eye(2), 1, 0.1)[1]) for k in (1.0, -1.0, math.nan)] == [1, 0, 0]


def test_eigenbasis() -> None:
    inputs = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(2)]

    def second_moments(a: Tensor, g: Tensor) -> Tensor:
        """What the basis makes diagonal; its signs are free."""
        factors = kronecker.KroneckerFactors(a.t() @ a, g.t() @ g, 6)
        basis = kronecker.eigenbasis(factors)
        return torch.block_diag(basis.A.t() @ factors.A @ basis.A, basis.G.t() @ factors.G @ basis.G)

    made = second_moments(*inputs[1])
    torch.testing.assert_close(made, made.diagonal().diag())
    assert_traced(second_moments, inputs)


WITH_POSITIONS = {"outer, one position": 1, "outer, many positions": 9, "one-hot": 5, "sparse one-hot": 5}
LIKE_THEM = [name for name in PAIRS if not name.startswith("patches")]


@pytest.mark.parametrize("right", LIKE_THEM)
@pytest.mark.parametrize("left", WITH_POSITIONS)
@pytest.mark.parametrize("rows_at_once", ROWS_AT_ONCE)
def test_gram_by_position(left: str, right: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CHUNK_NUMEL", rows_at_once)
    one, two, size = CASES[left], CASES[right], WITH_POSITIONS[left]
    inputs = [(*one.factors(), *two.factors()) for _ in range(2)]
    count = len(one.factors())

    def products(*factors: Tensor) -> Tensor:
        mine = [(2, ()), (B, (one.term(*factors[:count]).scaled(3.0),))]
        return positions.gram_by_position(mine, [(B, (two.term(*factors[count:]),)), (1, ())], KIND, size)

    assert positions.numbers_of_positions([(B, (one.term(*inputs[1][:count]),))]) == {size}
    mine = [one.twin(*(factor[:, t : t + 1] for factor in inputs[1][:count])).flatten(1) for t in range(size)]
    expected = torch.zeros(2 + B, size, B + 1)
    expected[2:, :, :B] = 3 * torch.stack(mine, 1) @ two.twin(*inputs[1][count:]).flatten(1).t()
    torch.testing.assert_close(products(*inputs[1]), expected)
    if rows_at_once > 1:
        assert_traced(products, inputs)


def test_what_has_no_positions() -> None:
    for name in ("dense", "patches, dense rows"):
        assert positions.numbers_of_positions([(B, (CASES[name].term(*CASES[name].factors()),))]) is None


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gram_takes_rows(name: str, of_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said whether `gram` makes the other's rows dense."""
    monkeypatch.setattr(cost, "gram_by_pairs", lambda *sizes: not of_rows)
    term, other = (CASES[name].term(*CASES[name].factors()) for _ in range(2))
    made: list[Term] = []
    dense = type(other).dense
    monkeypatch.setattr(type(other), "dense", lambda self, out=None: made.append(self) or dense(self, out))
    term.gram(other)
    assert other.gram_takes_rows(term) == (other in made and not isinstance(other, Dense))


def drawn_sketch(sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """How both sides are shuffled, and their signs."""
    return *map(torch.randperm, sizes), *(torch.randint(2, (size,)) * 2.0 - 1 for size in sizes)


def sketch_of(dim: int, drawn: Sequence[Tensor]) -> Sketch:
    return Sketch.of(drawn[:2], drawn[2:], dim, 2)


@pytest.mark.parametrize("by_factors", [True, False])
@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("dim", [1, slow(7), 11, slow(16)])
@pytest.mark.parametrize("name", CASES)
def test_sketches(name: str, dim: int, at_once: int, by_factors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number's bucket is the sum of its sides' buckets, its sign the product of their signs."""
    monkeypatch.setattr(cost, "sketch_by_factors", lambda *sizes: by_factors)
    monkeypatch.setattr(cost, "SHUFFLED_NUMEL", at_once)
    monkeypatch.setattr(cost, "CHUNK_NUMEL", at_once)
    case = CASES[name]
    term = case.term(*case.factors())
    sizes, count = terms.sides(term.row_shape), len(case.factors())
    inputs = [(*case.factors(), *drawn_sketch(sizes)) for _ in range(2)]

    def numbers(*tensors: Tensor) -> Tensor:
        totals = Totals(dim, B + 1, term.dtype, term.factors[0].device)
        sketch_of(dim, tensors[count:]).add(case.term(*tensors[:count]).scaled(-0.5), totals, 1)
        return totals.result()

    drawn = sketch_of(dim, inputs[1][count:])
    places = [side.order[: len(side.signs)].argsort() for side in drawn.sides]
    places[1 - drawn.along] = places[1 - drawn.along] * drawn.width + drawn.shift
    buckets = (places[0][:, None] + places[1]) % dim
    signs = drawn.sides[0].signs[:, None] * drawn.sides[1].signs
    twin = -0.5 * case.twin(*inputs[1][:count]).reshape(B, *sizes).double() * signs
    expected = torch.zeros(B + 1, dim)
    expected[1:].index_add_(1, buckets.flatten(), twin.flatten(1))
    close = {"rtol": 1e-9, "atol": 1e-9} if term.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(numbers(*inputs[1]), expected, check_dtype=False, **close)
    if at_once > 1 and dim in (7, 11):
        assert_traced(numbers, inputs)


@pytest.mark.parametrize("name", CASES)
def test_two_sided_projections(name: str) -> None:
    case = CASES[name]
    term = case.term(*case.factors())
    sizes, count = terms.sides(term.row_shape), len(case.factors())
    inputs = [(*case.factors(), torch.randn(2, sizes[0]), torch.randn(4, sizes[1])) for _ in range(2)]

    def numbers(*tensors: Tensor) -> Tensor:
        totals = Totals(7, B + 1, term.dtype, term.factors[0].device)
        TwoSided(*tensors[count:]).add(case.term(*tensors[:count]).scaled(-0.5), totals, 1)
        return totals.result()

    left, right = inputs[1][count:]
    expected = torch.zeros(B + 1, 7)
    rows = case.twin(*inputs[1][:count]).reshape(B, *sizes).double()
    expected[1:] = -0.5 * (left @ rows @ right.t()).flatten(1)[:, :7]
    close = {"rtol": 1e-9, "atol": 1e-9} if term.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(numbers(*inputs[1]), expected, check_dtype=False, **close)
    assert_traced(numbers, inputs)


def test_lengths_of_transforms() -> None:
    """Lengths of small primes serve as they are; others take room for a whole convolution."""
    assert [sketch.transform_length(dim) for dim in (1, 7, 11, 16, 210, 22)] == [1, 7, 32, 16, 210, 64]


def test_products_of_a_factor_in_common_are_made_once() -> None:
    g, a, h = torch.randn(B, 2, 30), torch.randn(B, 2, 30), torch.randn(B, 2, 30)

    def norms(g: Tensor, a: Tensor, h: Tensor) -> Tensor:
        products = Products()
        parts = [Outer.of(left, right, g.dtype) for left, right in ((g, a), (h, a), (g, a.clone()), (g, h))]
        return torch.stack([term.squared_norms(products) for term in parts])

    expected = [torch.einsum("bto,bti->boi", x, y).square().sum((1, 2)) for x, y in ((g, a), (h, a), (g, a), (g, h))]
    torch.testing.assert_close(norms(g, a, h), torch.stack(expected))
    calls = [node.target for node in make_fx(norms, tracing_mode="fake")(g, a, h).graph.nodes]
    # of g and a; of h; of g and a's copy, as two are kept; of h
    assert calls.count(torch.ops.aten.bmm.default) == 2 + 1 + 2 + 1


@pytest.mark.parametrize("many", [127, 128, 129, 130, 131, 257])
def test_norms_of_many_positions(many: int) -> None:
    """The products of positions are symmetric: of many only what stands up to the diagonal's panels is made."""
    case = outer(many, 2 * many + 3, 2 * many + 1)
    factors = case.factors()
    made = Products()
    panels = [made.of(factor, torch.float64) for factor in factors]
    assert sum(panel[0].numel() for panel in panels[0]) <= (many**2 if many < 128 else 0.65 * many**2)
    expected = case.twin(*factors).square().sum((1, 2))
    torch.testing.assert_close(sum_of_both(*panels), expected)
    assert not case.term(*factors).norms_take_rows
    assert_traced(lambda *factors: case.term(*factors).squared_norms(), (factors, case.factors()))


def test_which_factor_is_the_gradient() -> None:
    term = Outer.of(torch.randn(B, 4, 3), torch.randn(B, 4, 2), torch.float64).padded((1, 0)).scaled(3.0)
    assert (term.of_gradient, term.transposed().of_gradient, term.transposed().transposed().of_gradient) == (0, 1, 0)
    assert term.transposed().map(lambda factor: factor[:1]).of_gradient == 1


@pytest.mark.parametrize("law", ["dense", "dense out", "weighted_sum", "weighted_sum plain", "add_weighted_sum"])
@pytest.mark.parametrize("features", [1, 2, 8, 9])
def test_products_with_few_features(features: int, law: str) -> None:
    case = outer(64, 512, features)
    factors = case.factors()
    compute, wanted = LAWS[law]
    torch.testing.assert_close(compute(case.term(*factors)), wanted(case.twin(*factors), case.term(*factors)))


BY_NAME = {
    *(
        "kronecker.has_factors",
        "kronecker.factors",
        "kronecker.damped_inverse",
        "kronecker.between",
        "kronecker.eigenbasis",
        "terms.sides",
        "terms.outer_products",
        "products.sum_of_both",
    ),
    *("positions.numbers_of_positions", "positions.gram_by_position", "terms.products_of_positions"),
    *("sketch.transform_length", "algebra.of_pairs", "of_gradient", "shared"),
}


def public(module: object) -> set[str]:
    """The functions of a module, and the methods of its terms."""
    names = set()
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
            continue
        if inspect.isfunction(value):
            names.add(f"{module.__name__.rpartition('.')[2]}.{name}")
        elif inspect.isclass(value) and issubclass(value, Term):
            names |= {attribute for attribute in vars(value) if not attribute.startswith("_")}
    return names


def test_a_sample_that_one_part_has_no_rows_of() -> None:
    """Its other parts have some, so its row is not zero."""
    case = CASES["parts, others"]
    factors = list(case.factors())
    factors[0][0], factors[2][1], factors[0][2], factors[3][2] = 0, 0, 0, 0
    term = case.term(*factors)
    assert term.have_zero_factors().tolist() == [False, False, True]
    assert term.squared_norms().gt(0).tolist() == [True, True, False]


def test_every_function_has_a_case() -> None:
    by_term = {law.partition(" ")[0] for law in LAWS} | set(OF_ONE_KIND) | SIZES
    by_blocks = {f"algebra.{name.partition(' ')[0]}" for name in OF_BLOCKS}
    names = set().union(
        *map(
            public,
            (terms, parts, patches, elementwise, lines, algebra, geometry, kronecker, positions, products, sketch),
        )
    )
    by_path = public(geometry) | {"patches.inner_by_windows", "patches.inner_by_entries", "patches.as_linear"}
    assert names <= by_term | by_blocks | by_path | BY_NAME  # test_paths_of_patches, the tests above
    files = {file.stem for file in FILES} - {"__init__", "cost"}
    assert files == {
        *(
            "terms",
            "parts",
            "patches",
            "elementwise",
            "lines",
            "algebra",
            "geometry",
            "kronecker",
            "positions",
            "products",
        ),
        "sketch",
    }


def test_paths_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases take every way that there is, by themselves."""
    taken: set[str] = set()
    for module in (geometry, patches):
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ in (geometry.__name__, patches.__name__):

                def call(*args: object, name: str = name, function: Callable[..., object] = function) -> object:
                    taken.add(name)
                    return function(*args)

                monkeypatch.setattr(module, name, call)
    for case in CASES.values():
        term = case.term(*case.factors())
        for of_term, _ in LAWS.values():
            of_term(term)
    names = {name.partition(".")[2] for name in public(geometry)} | {"inner_by_windows", "inner_by_entries"}
    assert names <= taken


MAY_IMPORT = {"__future__", "abc", "collections", "dataclasses", "functools", "itertools", "math", "typing", "torch"}
IMPURE = {
    *("weakref", "contextvars", "ContextVar", "_version", "data_ptr", "_cdata", "_C", "autograd", "nn", "Module"),
    *("cache", "lru_cache", "cached_property", "global", "nonlocal", "item", "tolist", "hash", "id"),
}
NUMBERS = ast.BinOp | ast.Constant | ast.operator | ast.Tuple | ast.expr_context
FILES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_core_is_pure(file: Path) -> None:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names} - {"torch.nn.functional"}
            assert {name.partition(".")[0] for name in names} <= MAY_IMPORT
            assert not {part for name in names for part in name.split(".")} & IMPURE
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            ours = (node.module or "").startswith(("expanded_nn.core", "expanded_nn._errors"))
            assert ours or (node.module or "").partition(".")[0] in MAY_IMPORT
            assert not {*(node.module or "").split("."), *(alias.name for alias in node.names)} & IMPURE
        elif isinstance(node, ast.Global | ast.Nonlocal):
            raise AssertionError(f"{file.name}:{node.lineno}: state that outlives a call")
        elif isinstance(node, ast.Attribute | ast.Name):
            assert (node.attr if isinstance(node, ast.Attribute) else node.id) not in IMPURE, f"line {node.lineno}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_core_has_no_state(file: Path) -> None:
    """At the module's level stand imports, functions, classes, numbers and names of types."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign):
            names_a_type = isinstance(node.value, ast.Subscript) or ast.unparse(node.value).startswith("TypeVar(")
            are_numbers = all(isinstance(part, NUMBERS) for part in ast.walk(node.value))
            assert names_a_type or are_numbers, f"line {node.lineno}"
        else:
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Expr)
