"""The algebra of G against its dense twin, and clipping."""

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn

BATCH, LENGTH, VOCABULARY, WIDTH = 5, 4, 11, 6


class TiedText(nn.Module):
    """Embedding and head share their weight, so its rows are a sum of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(index)).tanh())


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.PReLU(), nn.Flatten(), nn.Linear(3 * 16, 4))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30)), lambda b: torch.randn(b, 30)),
    "positions": (
        lambda: nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 30)),
        lambda b: torch.randn(b, 3, 3),
    ),
    "cnn": (small_cnn, lambda b: torch.randn(b, 1, 6, 6)),
    "tied": (TiedText, lambda b: torch.randint(VOCABULARY, (b, LENGTH))),
}


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sin().flatten(1).sum(1).mean().backward()


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    make_model, make_input = MODELS[request.param]
    return enn.convert(make_model()).per_sample(), make_input(BATCH), make_input(3)


def dense(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.as_tensor(each.grad_sample.clone().numpy()) for name, each in model.named_parameters()}


def flat(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.reshape(len(each), each[0].numel()) for each in rows.values()], 1)


@pytest.mark.parametrize("passes", [1, 2])
def test_algebra_agrees_with_the_dense_matrix(case: tuple[nn.Module, Tensor, Tensor], passes: int) -> None:
    model, x, other_x = case
    backward(model, other_x)
    other = enn.per_sample_grads(model)
    other_dense = flat(dense(model))
    model.zero_grad()
    backward(model, x)
    if passes == 2:
        backward(model, other_x)
    grads, rows = enn.per_sample_grads(model), dense(model)
    matrix = flat(rows)
    weights = torch.randn(len(matrix))
    vectors = {name: torch.randn(each.shape[1:]) for name, each in rows.items()}
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # noqa: E731
    close(grads.norms(), matrix.norm(dim=1))
    close(grads.norms(per_parameter=True), {name: each.flatten(1).norm(dim=1) for name, each in rows.items()})
    close(grads.sum(), {name: each.sum(0) for name, each in rows.items()})
    close(grads.sum(weights), {name: torch.tensordot(weights, each, 1) for name, each in rows.items()})
    close(grads.mean(), {name: each.mean(0) for name, each in rows.items()})
    close(grads.var(), {name: each.var(0) for name, each in rows.items()})
    close(grads.var(correction=0), {name: each.var(0, correction=0) for name, each in rows.items()})
    close(grads.gram(), matrix @ matrix.t())
    close(grads.gram(other), matrix @ other_dense.t())
    close(grads.matvec(vectors), matrix @ torch.cat([vectors[name].flatten() for name in rows]))
    close(grads.flatten(), matrix)


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([4, 0, 4]), torch.arange(BATCH) > 2])
def test_rows_of_some_samples(case: tuple[nn.Module, Tensor, Tensor], index: slice | Tensor) -> None:
    model, x, _ = case
    backward(model, x)
    grads = enn.per_sample_grads(model)
    some, dense = grads.rows(index), grads.flatten()[index]
    torch.testing.assert_close(some.flatten(), dense, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(some.norms(), dense.norm(dim=1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(some.gram(grads), dense @ grads.flatten().T, rtol=1e-9, atol=1e-12)
    assert some.batch_size == len(dense)


def test_a_sample_projects_alike_in_any_batch(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = case
    projections = []
    for batch in (x, x[1:3]):
        model.zero_grad()
        backward(model, batch)
        projections.append(enn.per_sample_grads(model).project(7, generator=torch.Generator().manual_seed(3)))
    torch.testing.assert_close(projections[0][1:3], projections[1], rtol=1e-9, atol=1e-12)


def test_projection_keeps_inner_products_in_expectation() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    backward(model, torch.randn(4, 3))
    grads = enn.per_sample_grads(model)
    projected = grads.project(20_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(projected @ projected.t(), grads.gram(), rtol=0.1, atol=0.05 * float(grads.gram().max()))


def test_a_snapshot_outlives_later_steps() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample()
    backward(model, torch.randn(4, 40))
    grads = enn.per_sample_grads(model)
    before = grads.flatten()
    model.weight.grad_sample.mul_(3)
    model.zero_grad()
    backward(model, torch.randn(6, 40))
    torch.testing.assert_close(grads.flatten(), before)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_clipping(case: tuple[nn.Module, Tensor, Tensor], reduction: str) -> None:
    model, x, _ = case
    backward(model, x)
    rows = dense(model)
    norms = flat(rows).norm(dim=1)
    limit = float(norms.median())
    returned = enn.clip_grad_sample_norms_(model, limit, reduction=reduction)
    torch.testing.assert_close(returned, norms, rtol=1e-9, atol=1e-12)
    factors = (limit / norms).clamp(max=1) / (BATCH if reduction == "mean" else 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, torch.tensordot(factors, rows[name], 1), rtol=1e-9, atol=1e-12)


def test_clipping_by_parameter(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = case
    backward(model, x)
    rows = dense(model)
    limits = {name: 0.5 * float(each.flatten(1).norm(dim=1).max()) for name, each in rows.items()}
    enn.clip_grad_sample_norms_(model, limits)
    for name, parameter in model.named_parameters():
        factors = (limits[name] / rows[name].flatten(1).norm(dim=1)).clamp(max=1)
        torch.testing.assert_close(parameter.grad, torch.tensordot(factors, rows[name], 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_clipping_by_layer(reduction: str) -> None:
    """A parameter belongs to the nearest name: its own, its layer's, that of a module around it, or to all."""
    plain = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 2))
    model = enn.convert(plain).per_sample()
    backward(model, torch.randn(BATCH, 4))
    rows = dense(model)
    groups = {
        "0": ["0.weight", "0.bias"],
        "1": ["1.1.weight", "1.1.bias", "1.0.bias"],
        "1.0.weight": ["1.0.weight"],
        "": ["2.weight", "2.bias"],
    }
    expected = {key: flat({name: rows[name] for name in names}).norm(dim=1) for key, names in groups.items()}
    limits = {key: float(norms.median()) for key, norms in expected.items()}
    norms = enn.clip_grad_sample_norms_(model, limits, reduction=reduction)
    torch.testing.assert_close(norms, expected)
    for key, names in groups.items():
        factors = (limits[key] / expected[key]).clamp(max=1) / (BATCH if reduction == "mean" else 1)
        for name in names:
            clipped = torch.tensordot(factors, rows[name], 1)
            torch.testing.assert_close(model.get_parameter(name).grad, clipped, rtol=1e-9, atol=1e-12)


def test_micro_batches_accumulate_clipped_sums_and_free_the_rows() -> None:
    plain = nn.Linear(7, 3)
    whole = enn.convert(plain).per_sample(loss_reduction="sum")
    parts = enn.convert(plain).per_sample(loss_reduction="sum", accumulate_grad=False)
    x = torch.randn(6, 7)
    whole(x).sin().sum().backward()
    enn.clip_grad_sample_norms_(whole, 0.5)
    for part in x.split(2):
        parts(part).sin().sum().backward()
        enn.clip_grad_sample_norms_(parts, 0.5)
        assert parts.weight.grad_sample is None
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)


def test_rows_of_bfloat16_have_norms_in_float32() -> None:
    model = enn.convert(nn.Linear(64, 64, dtype=torch.bfloat16)).per_sample()
    backward(model, torch.randn(4, 64, dtype=torch.bfloat16))
    norms = enn.clip_grad_sample_norms_(model, 1.0)
    assert norms.dtype == torch.float32
    assert model.weight.grad.dtype == torch.bfloat16


def test_a_row_of_nan_is_named() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    x = torch.randn(4, 3)
    x[2] = float("nan")
    backward(model, x)
    with pytest.raises(enn.PerSampleError, match=r"inf or NaN in rows \[2\]"):
        enn.clip_grad_sample_norms_(model, 1.0)


def test_wrong_arguments() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    backward(model, torch.randn(4, 3))
    with pytest.raises(ValueError, match="reduction is 'max'"):
        enn.clip_grad_sample_norms_(model, 1.0, reduction="max")
    with pytest.raises(ValueError, match="wanted a number above 0"):
        enn.clip_grad_sample_norms_(model, 0.0)
    with pytest.raises(enn.PerSampleError, match=r"max_norm has none for \['bias'\]"):
        enn.clip_grad_sample_norms_(model, {"weight": 1.0})
    with pytest.raises(enn.PerSampleError, match=r"weights has shape \(3,\); wanted \(4,\)"):
        enn.per_sample_grads(model).sum(torch.ones(3))


def test_a_wide_linear_is_normed_clipped_and_summed_without_its_dense_rows() -> None:
    model = enn.convert(nn.Linear(1024, 1024, dtype=torch.float32)).per_sample()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(64, 1024, dtype=torch.float32)).square().sum(1).mean().backward()
        grads = enn.per_sample_grads(model)
        grads.norms(), grads.sum(), grads.gram()
        enn.clip_grad_sample_norms_(model, 1.0)
        model.weight.grad_sample.flatten(1).norm(dim=1)
        model.weight.grad_sample.sum(0)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 64 * 1024 * 1024 * 4 / 8


def test_small_parameters_of_two_dtypes() -> None:
    """They go side by side by dtype, and come back in their own order, shape and dtype."""
    rows = {
        "a": torch.randn(4, 3),
        "b": torch.randn(4, 2, 5).float(),
        "c": torch.randn(4),
        "d": torch.randn(4, 0, 2),
        "e": torch.randn(4, 3, 0).float(),
        "f": torch.randn(4, 2).float(),
    }
    grads, weights = enn.PerSampleGrads(rows), torch.rand(4)
    weighted = {name: torch.einsum("b,b...->...", weights.to(each.dtype), each) for name, each in rows.items()}
    means = {name: each.mean(0) for name, each in rows.items()}
    for actual, expected in ((grads.sum(weights), weighted), (grads.mean(), means)):
        assert list(actual) == list(rows)
        for name, each in actual.items():
            assert each._base is None or each._base.numel() == each.numel(), "memory of its own"
            torch.testing.assert_close(each, expected[name])
    torch.testing.assert_close(grads.norms(), flat(rows).norm(dim=1), check_dtype=False)


def test_parts_with_other_settings_are_refused() -> None:
    halves = [enn.convert(nn.Linear(3, 3)).per_sample(loss_reduction=each) for each in ("sum", "mean")]
    model = nn.Sequential(*halves)
    model(torch.randn(4, 3)).sum().backward()
    for use in (enn.per_sample_grads, lambda model: enn.clip_grad_sample_norms_(model, 1.0)):
        with pytest.raises(enn.PerSampleError, match=r"'mean'.*'sum'.*Switch on the whole model at once"):
            use(model)


@pytest.mark.parametrize("accumulate_grad", [True, False])
def test_parts_that_were_switched_on_one_by_one(accumulate_grad: bool) -> None:
    halves = [enn.convert(nn.Linear(3, 3)).per_sample(accumulate_grad=accumulate_grad) for _ in range(2)]
    model, x = nn.Sequential(*halves), torch.randn(4, 3)
    whole = enn.per_sample(enn.convert(model), accumulate_grad=accumulate_grad)
    for each in (model, whole):
        for _ in range(2):
            if accumulate_grad:
                each.zero_grad()
            backward(each, x)
            norms = enn.clip_grad_sample_norms_(each, 0.1)
            assert norms.shape == (4,)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
