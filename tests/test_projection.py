"""Random projections against the dense matrix that they stand for."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import expanded_nn as enn
from expanded_nn.core import cost
from expanded_nn.core.sketch import transform_length
from expanded_nn.core.terms import Dense, OneHot, Outer

BATCH, WORDS = 4, 11
KINDS = ("sketch", "kronecker", "gaussian")


class Tied(nn.Module):
    """Embedding and head share their weight, so that its rows are of two kinds of terms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embedding(index).tanh())


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 7))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.GroupNorm(3, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "one position": (mlp, lambda batch: torch.randn(batch, 30)),
    "positions": (mlp, lambda batch: torch.randn(batch, 3, 30)),
    "cnn": (cnn, lambda batch: torch.randn(batch, 2, 9, 9)),
    "few pixels": (lambda: nn.Conv2d(20, 30, 2), lambda batch: torch.randn(batch, 20, 2, 2)),
    "embedding": (lambda: nn.Embedding(WORDS, 6), lambda batch: torch.randint(WORDS, (batch, 5))),
    "tied": (Tied, lambda batch: torch.randint(WORDS, (batch, 5))),
    "lstm": (Outputs, lambda batch: torch.randn(batch, 4, 6)),
    "prelu": (lambda: nn.PReLU(3), lambda batch: torch.randn(batch, 3)),
}


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sin().flatten(1).sum(1).mean().backward()


def grads_of(model: nn.Module, *batches: Tensor) -> enn.PerSampleGrads:
    model.zero_grad()
    for x in batches:
        backward(model, x)
    return enn.per_sample_grads(model)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[int], Tensor]]:
    make_model, make_input = MODELS[request.param]
    return enn.convert(make_model()).per_sample(), make_input


def matrix_of(projection: enn.Projection, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Parameter name -> the projections of its unit rows, `(P, dim)`."""
    units = {name: torch.eye(shape.numel()).view(-1, *shape) for name, shape in shapes.items()}
    return {name: projection({name: rows}) for name, rows in units.items()}


def projected(matrix: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
    dense = {name: rows.dense() if isinstance(rows, enn.FactoredTensor) else rows for name, rows in grads.items()}
    return sum((dense[name].flatten(1) @ columns for name, columns in matrix.items()), start=torch.zeros(()))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.fixture(params=["as it costs", "factors", "rows"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which route a sketch takes where there are two."""
    if request.param != "as it costs":
        by_factors = request.param == "factors"
        monkeypatch.setattr(cost, "sketch_by_factors", lambda *sizes: by_factors)
    return str(request.param)


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 143])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_sketch_is_the_dense_map(
    case: tuple[nn.Module, Callable[[int], Tensor]], route: str, dim: int, passes: int
) -> None:
    model, make_input = case
    grads = grads_of(model, *(make_input(batch) for batch in (BATCH, 3)[:passes]))
    projection = enn.Projection(dim, seed=3)
    matrix = matrix_of(projection, {name: rows.shape[1:] for name, rows in grads.items()})
    close(projection(grads), projected(matrix, grads))


@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("kind", ["kronecker", "gaussian"])
def test_the_other_kinds_are_dense_maps(case: tuple[nn.Module, Callable[[int], Tensor]], kind: str, dim: int) -> None:
    model, make_input = case
    grads = grads_of(model, make_input(BATCH), make_input(2))
    projection = enn.Projection(dim, kind=kind)
    matrix = matrix_of(projection, {name: rows.shape[1:] for name, rows in grads.items()})
    close(projection(grads), projected(matrix, grads))


def test_a_sketch_is_that_of_its_definition() -> None:
    """Each number is in the bucket h(out) + h'(in), with the sign s(out) s'(in), and nowhere else."""
    columns = matrix_of(enn.Projection(17, seed=5), {"weight": torch.Size([4, 6])})["weight"].view(4, 6, 17)
    assert columns.abs().sum(2).eq(1).all()
    bucket, sign = columns.abs().argmax(2), columns.sum(2)
    assert ((bucket - bucket[:1] - bucket[:, :1] + bucket[0, 0]) % 17 == 0).all()
    assert (sign * sign[:1] * sign[:, :1] * sign[0, 0] == 1).all()
    assert sign.unique().tolist() == [-1, 1]
    for lines in (*bucket, *bucket.t()):  # numbers of one row or one column do not meet
        assert len(lines.unique()) == len(lines)


def test_both_routes_are_taken() -> None:
    """Rows that are large beside the transforms go by these, others are made."""
    assert cost.sketch_by_factors(1, 1024, 1024, transform_length(512))
    assert not cost.sketch_by_factors(9, 10, 10, transform_length(4096))
    assert not cost.sketch_by_factors(2048, 1024, 1024, transform_length(1 << 14))


@pytest.mark.parametrize("chunk", [1, 50, 1000])
def test_small_chunks(
    case: tuple[nn.Module, Callable[[int], Tensor]], route: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, make_input = case
    grads = grads_of(model, make_input(BATCH), make_input(3))
    for kind in ("sketch", "kronecker"):
        whole = enn.Projection(24, kind=kind)(grads)
        with monkeypatch.context() as patch:
            patch.setattr(cost, "CHUNK_NUMEL", chunk)
            patch.setattr(cost, "SHUFFLED_NUMEL", chunk)
            close(enn.Projection(24, kind=kind)(grads), whole)


def test_a_compiled_step_projects_alike(route: str) -> None:
    """From a traced graph, in which passing results do not share memory: it would be copied at each use."""
    make_model, make_input = MODELS["lstm"]
    model = enn.convert(make_model()).per_sample()
    projection = enn.Projection(24)

    captured: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        captured.append(graph)
        return graph

    @enn.compile(backend=backend)
    def step(x: Tensor) -> Tensor:
        return projection(grads_of(model, x))

    for batch in (BATCH, BATCH, BATCH, 3, 3, 1, 7, BATCH):
        x = make_input(batch)
        actual = step(x)
        close(actual, projection(grads_of(model, x)))
    nodes = captured[0].graph.nodes
    sizes = [math.prod(node.args[0]) for node in nodes if node.target is torch.ops.aten.empty.memory_format]
    assert sizes
    assert all(size < cost.SHUFFLED_NUMEL for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_projects_alike_in_any_batch_and_order(
    case: tuple[nn.Module, Callable[[int], Tensor]], kind: str
) -> None:
    model, make_input = case
    x = make_input(BATCH)
    projection = enn.Projection(30, kind=kind)
    whole = projection(grads_of(model, x))
    close(projection(grads_of(model, x[2:3])), whole[2:3])
    close(projection(grads_of(model, x.flip(0))), whole.flip(0))
    backwards = dict(reversed(list(grads_of(model, x).items())))
    close(enn.Projection(30, kind=kind)(backwards), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_leave_the_map_of_the_others(kind: str) -> None:
    model, x = enn.convert(mlp()).per_sample(), torch.randn(BATCH, 30)
    projection = enn.Projection(30, kind=kind)
    grads = grads_of(model, x)
    last = {name: rows for name, rows in grads.items() if name.startswith("2.")}
    first = {name: rows for name, rows in grads.items() if name.startswith("0.")}
    close(projection(first) + projection(last), projection(grads))
    model[0].requires_grad_(False)
    frozen = grads_of(model, x)
    assert set(frozen) == set(last)
    close(projection(frozen), projection(last))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_and_the_name_make_the_map(kind: str) -> None:
    rows = torch.randn(3, 5, 6)
    first = enn.Projection(8, kind=kind, seed=1)({"a": rows})
    assert torch.equal(first, enn.Projection(8, kind=kind, seed=1)({"a": rows}))
    assert not torch.allclose(first, enn.Projection(8, kind=kind, seed=2)({"a": rows}))
    assert not torch.allclose(first, enn.Projection(8, kind=kind, seed=1)({"b": rows}))
    assert not torch.allclose(first, enn.Projection(8, kind=kind, seed=1)({"a": rows.reshape(3, 6, 5)}))


def test_the_map_does_not_change_between_versions() -> None:
    """Projections that were stored once are compared with those of later processes."""
    rows = torch.arange(12.0).view(1, 3, 4)
    assert enn.Projection(5, seed=7)({"weight": rows}).tolist() == [[5, 10, 5, 4, -10]]
    assert enn.Projection(4, kind="kronecker", seed=7)({"weight": rows}).tolist() == [[-6, -7, -2, -1]]


def test_no_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    for kind in KINDS:
        enn.Projection(8, kind=kind)({"a": torch.ones(3, 5, 6)})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("kind", "shape"), [(kind, shape) for kind in ("sketch", "gaussian") for shape in [(200,), (12, 17), (6, 5, 2, 2)]]
)
@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_inner_products_are_kept_in_the_mean(kind: str, shape: tuple[int, ...], alike: float) -> None:
    """Over the seeds the mean is the inner product, and the variance at most that of normal numbers."""
    dim, seeds = 16, 600
    x = torch.randn(shape)
    y = alike * x + math.sqrt(1 - alike**2) * torch.randn(shape)
    pairs = [enn.Projection(dim, kind=kind, seed=seed)({"a": torch.stack([x, y])}) for seed in range(seeds)]
    inner = torch.stack([first @ second for first, second in pairs])
    exact = (x * y).sum()
    variance = (x.square().sum() * y.square().sum() + exact**2) / dim
    assert abs(inner.mean() - exact) < 4 * (variance / seeds).sqrt()
    assert 0.6 < inner.var() / variance < 1.3


@pytest.mark.parametrize("shape", [(12, 17)])
def test_the_kronecker_kind_has_the_variance_of_two_sides(shape: tuple[int, int]) -> None:
    """For two rows of rank one it is the product of the second moments of the two sides, by random signs."""
    dim, seeds = 16, 1500
    (g, h), (a, b) = torch.randn(2, shape[0]), torch.randn(2, shape[1])
    rows = {"a": torch.stack([torch.outer(g, a), torch.outer(h, b)])}
    pairs = [enn.Projection(dim, kind="kronecker", seed=seed)(rows) for seed in range(seeds)]
    inner = torch.stack([first @ second for first, second in pairs])
    exact = (g @ h) * (a @ b)

    def second_moment(u: Tensor, v: Tensor) -> Tensor:  # of the mean over 4 vectors p of (p u) (p v)
        once = (u @ u) * (v @ v) + 2 * (u @ v) ** 2 - 2 * (u * u * v * v).sum()
        return once / 4 + (u @ v) ** 2 * 3 / 4

    variance = second_moment(g, h) * second_moment(a, b) - exact**2
    assert abs(inner.mean() - exact) < 4 * (variance / seeds).sqrt()
    assert 0.75 < inner.var() / variance < 1.3


@pytest.mark.parametrize("positions", [1, 20])
@pytest.mark.parametrize("dim", [128, 256, 1000])
def test_errors_of_cosines_are_those_of_normal_numbers(positions: int, dim: int) -> None:
    """Of rows of rank one and of many positions, with inputs that are alike as those behind a ReLU are."""
    g, a = torch.randn(30, positions, 96), torch.randn(30, positions, 200).relu()
    rows = torch.einsum("bto,bti->boi", g, a)
    exact = _cosines(rows.flatten(1))
    projected = [enn.Projection(dim, seed=seed)({"a": rows}) for seed in range(5)]
    errors = torch.stack([_cosines(numbers) - exact for numbers in projected])[:, ~torch.eye(30, dtype=torch.bool)]
    assert 0.8 < errors.square().mean().sqrt() * math.sqrt(dim) < 1.2


def _cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.t()


@pytest.mark.parametrize("kind", KINDS)
def test_complex_numbers_count_as_two(kind: str) -> None:
    rows = torch.randn(3, 4, 5, dtype=torch.complex128)
    pairs = torch.view_as_real(rows)
    projection = enn.Projection(9, kind=kind)
    actual = projection({"a": rows})
    assert actual.dtype == torch.float64
    close(actual, enn.Projection(9, kind=kind)({"a": pairs}))
    many = enn.Projection(3000, kind="sketch")({"a": rows})
    torch.testing.assert_close(many @ many.t(), (rows.flatten(1).conj() @ rows.flatten(1).t()).real, rtol=0.2, atol=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_map_is_that_of_float64(kind: str, dtype: torch.dtype) -> None:
    g, a = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 9).to(dtype)
    rows = enn.FactoredTensor.of(Outer.of(g, a, dtype))
    exact = enn.FactoredTensor.of(Outer.of(g.double(), a.double(), torch.float64))
    actual = enn.Projection(20, kind=kind)({"a": rows})
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), enn.Projection(20, kind=kind)({"a": exact}), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_no_parameters_no_numbers(kind: str) -> None:
    model = enn.convert(mlp()).per_sample()
    projection = enn.Projection(6, kind=kind)
    assert projection(grads_of(model, torch.randn(0, 30))).shape == (0, 6)
    with pytest.raises(enn.PerSampleError, match="Projection: no parameter has per-sample gradients"):
        projection({})
    assert projection({"empty": torch.zeros(3, 0, 5)}).tolist() == torch.zeros(3, 6).tolist()
    assert projection({"scalar": torch.ones(3)}).shape == (3, 6)


@pytest.mark.parametrize("kind", ["sketch", "kronecker"])
def test_no_positions(kind: str, route: str) -> None:
    model = enn.convert(mlp()).per_sample(keep_factors=True)
    grads = grads_of(model, torch.randn(BATCH, 0, 30))
    assert enn.Projection(6, kind=kind)(grads).tolist() == torch.zeros(BATCH, 6).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows(kind: str) -> None:
    """A parameter that a pass did not use has rows without terms."""
    model = enn.convert(nn.ModuleDict({"a": nn.Linear(30, 20), "b": nn.Linear(30, 20)})).per_sample(batch_size=2)
    x = torch.randn(2, 30)
    for name in ("a", "b"):
        model[name](x).square().sum().backward()
    grads = enn.per_sample_grads(model)
    assert grads.batch_size == 4
    projection = enn.Projection(12, kind=kind)
    alone = projection({name: rows for name, rows in grads.items() if name.startswith("a.")})
    close(projection(grads)[:2], alone[:2])
    assert alone[2:].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_rows(kind: str) -> None:
    """Numbers that multiply all rows, or each its own, are held beside the factors."""
    terms = {
        "outer": Outer.of(torch.randn(3, 2, 8), torch.randn(3, 2, 9), torch.float64),
        "one hot": OneHot.of(torch.randn(3, 2, 9), torch.randint(8, (3, 2)), 8, torch.float64),
        "dense": Dense.of(torch.randn(3, 8, 9)),
    }
    projection, by_row = enn.Projection(16, kind=kind), torch.tensor([2.0, -1.0, 0.5])
    for name, term in terms.items():
        plain = projection({name: enn.FactoredTensor.of(term)})
        close(projection({name: enn.FactoredTensor.of(term.scaled(3.0))}), 3 * plain)
        close(projection({name: enn.FactoredTensor.of(term.scaled(3.0).scaled(by_row))}), 3 * by_row[:, None] * plain)


def test_a_view_of_factored_rows() -> None:
    """A bilinear weight has three dimensions and the factors of two."""
    model = enn.convert(nn.Bilinear(4, 5, 6)).per_sample()
    model(torch.randn(3, 4), torch.randn(3, 5)).sin().sum(1).mean().backward()
    grads = enn.per_sample_grads(model)
    assert not grads["weight"].is_dense
    projection = enn.Projection(20)
    matrix = matrix_of(projection, {name: rows.shape[1:] for name, rows in grads.items()})
    close(projection(grads), projected(matrix, grads))


def test_project_is_that_projection() -> None:
    model = enn.convert(mlp()).per_sample()
    grads = grads_of(model, torch.randn(BATCH, 30))
    close(grads.project(12, seed=4), enn.Projection(12, seed=4)(grads))
    close(grads.project(12), enn.Projection(12)(grads))


def test_nothing_as_large_as_the_rows_is_kept() -> None:
    projection = enn.Projection(32)
    projection({"a": torch.ones(1, 300, 200), "b": torch.ones(1, 400)})
    kept = [tensor for linear_map in projection._maps.values() for side in linear_map.sides for tensor in side]
    assert sum(tensor.numel() for tensor in kept) <= 4 * (301 + 200 + 1 + 401)  # the longer sides have a gap


@pytest.mark.parametrize("dim", [0, -3, 2.0, True, "8"])
def test_a_bad_dim(dim: object) -> None:
    with pytest.raises(ValueError, match=r"Projection: dim is .*; wanted a whole number, 1 or more"):
        enn.Projection(dim)  # type: ignore[arg-type]


def test_a_bad_kind() -> None:
    with pytest.raises(ValueError, match=r"kind is 'normal'; wanted one of 'sketch', 'kronecker', 'gaussian'"):
        enn.Projection(8, kind="normal")


@pytest.mark.parametrize("seed", [None, 1.5, True])
def test_a_bad_seed(seed: object) -> None:
    with pytest.raises(ValueError, match=r"seed is .*; wanted a whole number"):
        enn.Projection(8, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_with_another_shape(kind: str) -> None:
    projection = enn.Projection(8, kind=kind)
    projection({"weight": torch.ones(2, 3, 4)})
    with pytest.raises(enn.PerSampleError, match=r"'weight' has rows of shape \(4, 3\); wanted \(3, 4\), as in the fi"):
        projection({"weight": torch.ones(2, 4, 3)})


def test_different_numbers_of_rows() -> None:
    with pytest.raises(enn.PerSampleError, match=r"the parameters hold {'a': 2, 'b': 3} rows; wanted equally many"):
        enn.Projection(8)({"a": torch.ones(2, 3), "b": torch.ones(3, 3)})


def test_the_text_of_a_projection() -> None:
    assert repr(enn.Projection(8, seed=3)) == "Projection(8, kind='sketch', seed=3)"
