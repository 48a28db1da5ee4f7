"""The algebra of G against its dense twin, and clipping."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn import preconditioning
from expanded_nn.core import cost
from expanded_nn.core.terms import Outer

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
    return {name: torch.as_tensor(each.grad_sample.clone().cpu().numpy()) for name, each in model.named_parameters()}


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


SOME = [
    slice(1, 3),
    slice(None, None, -2),
    torch.tensor([4, 0, 4]),
    torch.arange(BATCH) > 2,
    [0, -1],
    [],
    [True] * BATCH,
]


@pytest.mark.parametrize("index", SOME)
def test_rows_of_some_samples(case: tuple[nn.Module, Tensor, Tensor], index: Any) -> None:
    model, x, _ = case
    backward(model, x)
    grads = enn.per_sample_grads(model)
    some, dense = (
        grads.rows(index),
        torch.tensor(grads.flatten().cpu().numpy()[index].copy()),
    )  # which knows all of them
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
    projected = grads.project(4_000, generator=torch.Generator().manual_seed(0))
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


def through_a_file(grads: enn.PerSampleGrads) -> enn.PerSampleGrads:
    file = io.BytesIO()
    torch.save([grads], file)
    file.seek(0)
    return torch.load(file, weights_only=True)[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), through_a_file])
def test_copies_keep_the_factors(
    case: tuple[nn.Module, Tensor, Tensor], copied: Callable[[enn.PerSampleGrads], enn.PerSampleGrads]
) -> None:
    model, x, other_x = case
    backward(model, x)
    backward(model, other_x)
    grads = enn.per_sample_grads(model)
    grads.norms()  # may make rows dense
    again = copied(grads)
    kinds = {name: [type(term) for term in rows.terms()] for name, rows in enn.per_sample_grads(model).items()}
    assert {name: [type(term) for term in rows.terms()] for name, rows in again.items()} == kinds
    assert type(again) is enn.PerSampleGrads
    assert again.batch_size == grads.batch_size
    torch.testing.assert_close(again.flatten(), grads.flatten(), rtol=0, atol=0)
    torch.testing.assert_close(again.gram(grads), grads.gram(), rtol=1e-9, atol=1e-12)


def test_kronecker_factors_from_a_file() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample()
    backward(model, torch.randn(BATCH, 8))
    factors, file = enn.per_sample_grads(model).kronecker(), io.BytesIO()
    torch.save(factors, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    torch.testing.assert_close((loaded + loaded).A, 2 * factors["weight"].A)


def test_rows_that_were_scaled_in_place_are_taken_so() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample()
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    before = grads.flatten()
    for rows in grads.values():
        rows.mul_(3)
    torch.testing.assert_close(pickle.loads(pickle.dumps(grads)).flatten(), 3 * before)


def test_rows_that_were_scaled_keep_their_factors_if_not_in_place() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    scaled = enn.PerSampleGrads({name: 3 * rows for name, rows in grads.items()})
    torch.testing.assert_close(scaled.kronecker()["weight"].G, 9 * grads.kronecker()["weight"].G)
    grads["weight"].mul_(3)
    with pytest.raises(enn.PerSampleError, match="are dense"):
        grads.kronecker()


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


def moments(rows: Any) -> tuple[Tensor, Tensor]:
    A, G, _ = enn.PerSampleGrads({"w": rows}).kronecker()["w"]
    return A, G


@pytest.mark.parametrize("sides", [(3, 50), (50, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_kronecker_factors_of_rows_times_a_tensor(sides: tuple[int, int], transposed: bool) -> None:
    """As a GradScaler's scale is: it belongs to the gradient, whichever factor is the smaller one."""

    class Map(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(*sides) if transposed else torch.randn(*sides).t().contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.t() if transposed else self.weight)

    model = enn.convert(Map()).per_sample(keep_factors=True)
    model(torch.randn(BATCH, 2, sides[0])).sin().sum((1, 2)).mean().backward()
    rows = model.weight.grad_sample
    expected = moments(rows * 3.0)
    for scaled in (rows * torch.tensor(3.0), rows / torch.tensor(1 / 3), rows * torch.full((BATCH, 1, 1), 3.0)):
        torch.testing.assert_close(moments(scaled), expected)
    torch.testing.assert_close(moments(pickle.loads(pickle.dumps(3.0 * rows))), expected)


@pytest.mark.parametrize("kind", ["transposed convolution", "tied autoencoder"])
def test_kronecker_factors_are_those_of_a_sum_of_losses(kind: str) -> None:
    """A mean over the samples scales the gradients alone, and is taken out of them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 8) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight).tanh(), self.weight.t())

    module = Tied() if kind == "tied autoencoder" else nn.ConvTranspose2d(2, 3, 2)
    x, found = torch.randn(4, 2, 8) if kind == "tied autoencoder" else torch.randn(4, 2, 3, 3), []
    for reduction in ("sum", "mean"):
        model = enn.convert(module).per_sample(loss_reduction=reduction, keep_factors=True)
        losses = model(x).square().flatten(1).sum(1)
        getattr(losses, reduction)().backward()
        found.append([*enn.per_sample_grads(model).kronecker()["weight"]])
    torch.testing.assert_close(found[1], found[0])


def test_a_weighted_sum_with_another_number_of_weights(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    rows = enn.convert(nn.Linear(200, 200)).per_sample()
    rows(torch.randn(5, 200)).sin().sum(1).mean().backward()
    with pytest.raises(RuntimeError, match=r"does not broadcast|size"):
        torch.einsum("b,b...->...", torch.ones(7), rows.weight.grad_sample)


def test_a_function_of_the_norms_that_changes_them_in_place() -> None:
    model = enn.convert(nn.Linear(4, 3)).per_sample()
    backward(model, torch.randn(BATCH, 4))
    expected = flat(dense(model)).norm(dim=1)
    norms = enn.clip_grad_sample_norms_(model, lambda norms: norms.clamp_(min=1e-3).reciprocal_())
    torch.testing.assert_close(norms, expected)


@pytest.mark.small_rows
def test_in_inference_mode() -> None:
    """As in a hook of a trainer that clips or logs; training goes on with what clipping leaves."""
    model = enn.convert(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 200))).per_sample()
    backward(model, x := torch.randn(BATCH, 4))
    expected = flat(dense(model)).norm(dim=1)
    with torch.inference_mode():
        torch.testing.assert_close(enn.per_sample_grads(model).norms(), expected)
        torch.testing.assert_close(enn.clip_grad_sample_norms_(model, torch.ones(1, 1)), expected)
    assert not any(parameter.grad.is_inference() for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    backward(model, x)


def test_a_kernel_with_channels_last_that_is_also_a_matrix() -> None:
    """The sums of the two kinds of rows lie in memory in other orders."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 8, 3, 3) / 9)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return F.linear(h, self.weight.flatten(1)).mean(1) + F.conv2d(x, self.weight, padding=1).mean((2, 3))

    x, h, module = torch.randn(4, 8, 9, 9), torch.randn(4, 2, 72), Both()
    rows = []
    for given in (x, x.to(memory_format=torch.channels_last)):
        model = enn.convert(module).per_sample(keep_factors=True)
        model(given, h).sin().sum(1).mean().backward()
        rows.append(model.weight.grad_sample)
        torch.testing.assert_close(model.weight.grad, rows[-1].mean(0))
    torch.testing.assert_close(rows[0].clone() * 1, rows[1].clone() * 1)


def test_a_group_of_clipping_without_parameters() -> None:
    """The entry for all others, where there are none: norms of zero."""
    model = enn.convert(nn.Sequential(nn.Linear(4, 3))).per_sample()
    backward(model, torch.randn(BATCH, 4))
    norms = enn.clip_grad_sample_norms_(model, {"": lambda norms: 1 + norms.quantile(0.5).expand(len(norms)), "0": 1e9})
    assert torch.equal(norms[""], torch.zeros(BATCH))
    torch.testing.assert_close(norms["0"], flat(dense(model)).norm(dim=1))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_limit_of_a_layer_that_a_step_does_not_use(frozen: bool) -> None:
    """It has no effect then, so that one mapping serves for all steps."""
    model = enn.convert(nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 2)})).per_sample()
    model["second"].requires_grad_(not frozen)
    limits = {"first": 1e-3, "second.weight": 1.0, "second": 2.0}
    model["first"](torch.randn(BATCH, 4)).sum(1).mean().backward()
    norms = enn.clip_grad_sample_norms_(model, limits)
    assert list(norms) == list(limits)
    assert (norms["first"] > 0).all()
    assert not norms["second"].any()
    assert not norms["second.weight"].any()
    assert model["second"].weight.grad is None
    factors = (1e-3 / norms["first"])[:, None, None]
    torch.testing.assert_close(model["first"].weight.grad, (model["first"].weight.grad_sample * factors).sum(0))


def test_inner_products_with_a_mean(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = case
    backward(model, x)
    grads = enn.per_sample_grads(model)
    with pytest.raises(enn.PerSampleError, match=r"gram: .* belongs into matvec\(vectors\)"):
        grads.gram(grads.mean())
    torch.testing.assert_close(grads.matvec(grads.mean()), grads.gram().mean(1))


def test_several_weightings_at_once(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = case
    backward(model, x)
    grads, weights = enn.per_sample_grads(model), torch.randn(3, len(x))
    sums = torch.func.vmap(grads.sum)(weights)
    for name, rows in dense(model).items():
        torch.testing.assert_close(sums[name], torch.einsum("kb,b...->k...", weights, rows))


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
    with pytest.raises(enn.PerSampleError, match=r"inf or NaN in the rows \[2\]"):
        enn.clip_grad_sample_norms_(model, 1.0)


def test_wrong_arguments() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    backward(model, torch.randn(4, 3))
    with pytest.raises(ValueError, match="reduction is 'max'"):
        enn.clip_grad_sample_norms_(model, 1.0, reduction="max")
    with pytest.raises(ValueError, match="wanted a number above 0"):
        enn.clip_grad_sample_norms_(model, 0.0)
    with pytest.raises(enn.PerSampleError, match=r"max_norm has no entry for the parameters \['bias'\]"):
        enn.clip_grad_sample_norms_(model, {"weight": 1.0})
    with pytest.raises(enn.PerSampleError, match=r"weights has shape \(3,\); wanted a tensor of shape \(4,\)"):
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


class Twice(nn.Module):
    """One linear layer used twice, and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, index: Tensor) -> Tensor:
        return self.layer(self.layer(self.embedding(index)).tanh())


class Unrolled(nn.Module):
    """An LSTM's weights and its first layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def kronecker_model(make: str) -> tuple[nn.Module, Tensor]:
    if make == "twice":
        return Twice(), torch.randint(VOCABULARY, (BATCH, LENGTH))
    if make == "cnn":
        convs = [nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.Conv2d(6, 5, 2, dilation=2)]
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(20, 3)), torch.randn(BATCH, 4, 7, 7)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 7)), torch.randn(BATCH, *make, 8)


def by_sample_and_position(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Sums of `a aᵀ` and `g gᵀ` in plain torch, sample by sample and position by position."""
    sums: dict[str, tuple[Tensor, Tensor, int]] = {}
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.append((f"{name}.weight", module, inputs[0].detach(), output))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: note(name, module, inputs, output))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    for sample in x:
        model(sample[None]).sin().flatten(1).sum().backward()
    for handle in handles:
        handle.remove()
    for name, module, a, y in seen:
        assert y.grad is not None
        g, groups = y.grad, 1
        if isinstance(module, nn.Conv2d):
            groups = module.groups
            a = nn.functional.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)[0].t()
            g = g[0].flatten(1).t()
        g, a = g.reshape(-1, g.shape[-1]), a.reshape(-1, a.shape[-1])
        A, G, count = torch.zeros(a.shape[1] // groups, a.shape[1] // groups), torch.zeros(g.shape[1], g.shape[1]), 0
        for left, right in zip(g, a, strict=True):
            blocks = [torch.outer(part, part) for part in left.chunk(groups)]
            A += sum(torch.outer(part, part) for part in right.chunk(groups)) / groups
            G += torch.block_diag(*blocks)
            count += 1
        before = sums.get(name, (0, 0, 0))
        sums[name] = (before[0] + A, before[1] + G, before[2] + count)
    model.zero_grad()
    return sums


@pytest.mark.small_rows
@pytest.mark.parametrize("make", [(), (3,), "cnn", "twice"], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kronecker_factors_are_those_of_a_loop(make: str, passes: int, reduction: str) -> None:
    model, x = kronecker_model(make)
    expected = by_sample_and_position(model, x)
    model = enn.convert(model).per_sample(loss_reduction=reduction, keep_factors=True)
    batches = x.split([2, len(x) - 2]) if passes == 2 else [x]
    for batch in batches:
        losses = model(batch).sin().flatten(1).sum(1)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
    factors = enn.per_sample_grads(model).kronecker()
    assert set(factors) == set(expected)
    for name, (A, G, count) in factors.items():
        torch.testing.assert_close(A, expected[name][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(G, expected[name][1], rtol=1e-9, atol=1e-12)
        assert count == expected[name][2]
    grads, weights = enn.per_sample_grads(model), [name for name in factors if factors[name].sizes]
    counted = {name: enn.KroneckerFactors(*factors[name][:2], torch.tensor(factors[name].count)) for name in weights}
    for name in weights:  # counts that were added up over processes are tensors
        wanted = grads.precondition({name: factors[name]}, 0.1)[name]
        torch.testing.assert_close(grads.precondition({name: counted[name]}, 0.1)[name] + 0, wanted + 0)


def test_kronecker_factors_of_a_recurrent_layer() -> None:
    module, x = Unrolled(), torch.randn(BATCH, LENGTH, 4)
    lstm = module.lstm
    h, c, gates, states = torch.zeros(BATCH, 3), torch.zeros(BATCH, 3), [], []
    loss = torch.zeros(())
    for step in x.unbind(1):
        states.append(h.detach())
        gates.append(step @ lstm.weight_ih_l0.t() + h @ lstm.weight_hh_l0.t() + lstm.bias_ih_l0 + lstm.bias_hh_l0)
        gates[-1].retain_grad()
        i, f, g, o = gates[-1].chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        loss = loss + h.sin().sum()
    loss.backward()
    G = sum(gate.grad.t() @ gate.grad for gate in gates)
    module.zero_grad()
    model = enn.convert(module).per_sample(keep_factors=True)
    backward(model, x)
    factors = enn.per_sample_grads(model).kronecker()
    assert set(factors) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    for name, inputs in {"ih": x.unbind(1), "hh": states}.items():
        actual = factors[f"lstm.weight_{name}_l0"]
        torch.testing.assert_close(actual.A, sum(a.t() @ a for a in inputs), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(actual.G, G, rtol=1e-9, atol=1e-12)
        assert actual.count == BATCH * LENGTH


@pytest.mark.small_rows
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kronecker_factors_behind_a_view_of_the_weight(reduction: str) -> None:
    """A layer that turns its weight keeps the factors of small rows, too, and the gradient is scaled as rows are."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3)
    model = enn.convert(conv1d).per_sample(loss_reduction=reduction, keep_factors=True)
    x = torch.randn(BATCH, LENGTH, 3)
    losses = model(x).sin().flatten(1).sum(1)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    A, G, count = enn.per_sample_grads(model).kronecker()["weight"]  # of a weight (in, out): G is the input's
    g = model.per_sample(False)(x).cos()
    torch.testing.assert_close(G, torch.einsum("bti,btj->ij", x, x))
    torch.testing.assert_close(A, torch.einsum("bti,btj->ij", g, g))
    assert count == BATCH * LENGTH


class Texts(nn.Module):
    """Words of each sample, `(B, T, 3)`, and how long they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.windows, self.last = nn.Linear(3, 4), nn.Conv1d(4, 6, 1, groups=2), nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.windows(self.first(x).tanh().mT).mT.sin()
        return self.last((h * mask[..., None]).sum(1))


def test_kronecker_factors_without_padding() -> None:
    torch.manual_seed(0)
    model = enn.convert(Texts().double()).per_sample(keep_factors=True, loss_reduction="sum")
    lengths, x = [4, 2, 5], torch.randn(3, 5, 3).double()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]

    def grads(x: Tensor, mask: Tensor) -> enn.PerSampleGrads:
        model.zero_grad()
        model(x, mask).sin().sum().backward()
        return enn.per_sample_grads(model)

    alone = None
    for i, length in enumerate(lengths):
        alone = grads(x[i : i + 1, :length], mask[i : i + 1, :length]).kronecker(alone)
    assert alone is not None
    both = grads(x, mask)
    for whole in (both.kronecker(mask=mask), grads(x[:2], mask[:2]).kronecker(mask=mask[:2])):
        if whole["last.weight"].count == 2:
            whole = grads(x[2:], mask[2:]).kronecker(whole, mask=mask[2:])
        torch.testing.assert_close(whole, alone, rtol=1e-9, atol=1e-12)
        assert [whole[f"{name}.weight"].count for name in ("first", "windows", "last")] == [11, 11, 3]
    assert both.kronecker()["first.weight"].count == 15
    for bad in (mask.long(), mask[:2], mask[:, :4], "mask"):
        with pytest.raises(enn.PerSampleError, match=r"mask is .*; wanted bools \(B, T\), .*: \(3, 1\) or \(3, 5\)"):
            both.kronecker(mask=bad)  # type: ignore[arg-type]


def test_kronecker_factors_add_up_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", 4)
    model, x = kronecker_model("cnn")
    model = enn.convert(model).per_sample(keep_factors=True)
    parts = []
    for batch in (x, x[:2], x[2:]):
        model.zero_grad()
        backward(model, batch)
        parts.append(enn.per_sample_grads(model).kronecker())
    for name, whole in parts[0].items():
        torch.testing.assert_close(parts[1][name] + parts[2][name], whole, rtol=1e-9, atol=1e-12)
        assert torch.equal(whole.A, whole.A.t())
    total = None
    for batch in (x[:2], x[2:]):
        model.zero_grad()
        backward(model, batch)
        total = enn.per_sample_grads(model).kronecker(total)
    assert total is not None
    torch.testing.assert_close(total, parts[0], rtol=1e-9, atol=1e-12)
    with pytest.raises(
        enn.PerSampleError, match=r"of '0.weight' are those of a matrix \(5, 24\); wanted \(6, 18\), as the pa"
    ):
        enn.per_sample_grads(model).kronecker({"0.weight": parts[0]["2.weight"]})
    with pytest.raises(TypeError):
        parts[0]["0.weight"] + (1, 2, 3)


@pytest.mark.parametrize("use", [copy.deepcopy, copy.copy, lambda total: total + total, list, repr, pickle.dumps])
def test_kronecker_factors_in_which_few_wait(use: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", 4)
    model, total, inputs = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True), None, torch.randn(21, 8)
    for batch in inputs.clone().split(3):
        model.zero_grad()
        backward(model, batch)
        total = enn.per_sample_grads(model).kronecker(total)
        batch.zero_()
        if total["weight"].count == 9:
            use(total["weight"])
    used: object = use(total["weight"])
    torch.testing.assert_close(total["weight"].A, inputs.t() @ inputs)
    assert total["weight"].count == 21
    if isinstance(used, enn.KroneckerFactors):
        torch.testing.assert_close(used.A, inputs.t() @ inputs * used.count / 21)


def test_kronecker_factors_of_no_samples_and_of_half_precision() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    backward(model, torch.randn(0, 8))
    A, G, count = enn.per_sample_grads(model).kronecker()["weight"]
    assert (A.shape, G.shape, count) == ((8, 8), (6, 6), 0)
    assert not A.any()
    half = enn.convert(nn.Linear(8, 6)).to(torch.bfloat16).per_sample()
    backward(half, torch.randn(3, 8, dtype=torch.bfloat16))
    assert enn.per_sample_grads(half).kronecker()["weight"].A.dtype == torch.float32


def test_norms_leave_the_factors() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    x = torch.randn(BATCH, 12, 8)
    backward(model, x)
    grads = enn.per_sample_grads(model)
    grads.norms()
    grads["weight"].dense()
    torch.testing.assert_close(grads.kronecker()["weight"].A, torch.einsum("bti,btj->ij", x, x))


@pytest.mark.small_rows
def test_factors_that_were_not_kept() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample()
    backward(model, torch.randn(BATCH, 8))
    with pytest.raises(enn.PerSampleError, match=r"\['weight'\] are dense.*per_sample\(keep_factors=True\)"):
        enn.per_sample_grads(model).kronecker()


def test_tied_weights_have_no_kronecker_factors() -> None:
    model = enn.convert(TiedText()).per_sample(keep_factors=True)
    backward(model, torch.randint(VOCABULARY, (BATCH, LENGTH)))
    grads = enn.per_sample_grads(model)
    with pytest.raises(enn.PerSampleError, match=r"\['embedding.weight'\] are dense, complex, of computed weights, or"):
        grads.kronecker()
    rest = {name: rows for name, rows in grads.items() if name.startswith("mix")}
    assert set(enn.PerSampleGrads(rest).kronecker()) == {"mix.weight"}


def test_complex_weights_have_neither_factors_nor_positions() -> None:
    """Products of complex numbers are those of pairs of real ones, of which there are no factors."""
    model = enn.convert(nn.Linear(3, 2, bias=False, dtype=torch.complex128)).per_sample(keep_factors=True)
    model(torch.randn(BATCH, LENGTH, 3, dtype=torch.complex128)).abs().flatten(1).sum(1).mean().backward()
    grads = enn.per_sample_grads(model)
    with pytest.raises(
        enn.PerSampleError, match=r"\['weight'\] are dense, complex, of computed weights, or of several kinds"
    ):
        grads.kronecker()
    with pytest.raises(enn.PerSampleError, match=r"\['weight'\] have no positions"):
        grads.gram(per_position=True)


def test_a_refusal_adds_nothing_to_earlier_factors() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 7))).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    total = grads.kronecker()
    before = {name: factors.A.clone() for name, factors in total.items()}
    bad = enn.PerSampleGrads({"0.weight": grads["0.weight"], "1.weight": torch.ones(BATCH, 7, 6)})
    with pytest.raises(enn.PerSampleError, match=r"\['1.weight'\] are dense"):
        bad.kronecker(total)
    assert all(torch.equal(total[name].A, A) for name, A in before.items())


def test_factors_are_kept_where_that_was_said() -> None:
    model, x = enn.convert(nn.Linear(2, 2)).per_sample(keep_factors=True), torch.randn(3, 9, 2)
    backward(model, x)
    assert set(enn.per_sample_grads(model).kronecker()) == {"weight"}
    model.per_sample(False).per_sample(True)  # settings stay
    backward(model, x)
    assert isinstance(model.weight.grad_sample, enn.FactoredTensor)
    model.per_sample(keep_factors=False)
    backward(model, x)
    assert not isinstance(model.weight.grad_sample, enn.FactoredTensor)
    with pytest.raises(ValueError, match="per_sample: keep_factors and materialize are both True; wanted one of the"):
        model.per_sample(keep_factors=True, materialize=True)


@pytest.mark.small_rows
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention, nn.Bilinear])
def test_small_layers_keep_their_factors(kind: type[nn.Module]) -> None:
    if kind is nn.MultiheadAttention:
        module: nn.Module = nn.MultiheadAttention(4, 2, batch_first=True)
        inputs = [torch.randn(BATCH, LENGTH, 4), *[torch.randn(BATCH, LENGTH, 4)] * 2]
    elif kind is nn.Bilinear:
        module, inputs = nn.Bilinear(2, 3, 4), [torch.randn(BATCH, 2), torch.randn(BATCH, 3)]
    else:
        module, inputs = kind(4, 3, batch_first=True), [torch.randn(BATCH, LENGTH, 4)]
    model = enn.convert(module).per_sample(keep_factors=True)
    y = model(*inputs)
    (y if isinstance(y, Tensor) else y[0]).sin().flatten(1).sum(1).mean().backward()
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert set(enn.per_sample_grads(model).kronecker()) == matrices


@pytest.mark.parametrize("make", [(), (3,), "cnn", "twice"], ids=str)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_preconditioned_rows_are_those_of_dense_algebra(make: str, keep: bool, passes: int) -> None:
    model, x = kronecker_model(make)
    model = enn.convert(model).per_sample(keep_factors=True)
    backward(model, x)
    factors = enn.per_sample_grads(model).kronecker()
    model.per_sample(keep_factors=keep)
    for batch in (x.flip(0), x[:2])[:passes]:
        backward(model, batch)
    grads = enn.per_sample_grads(model)
    before = grads.flatten()
    actual = grads.precondition(factors, 0.3)
    expected = {}
    for name, rows in dense(model).items():
        expected[name] = rows
        if name in factors:
            A, G, count = factors[name]
            left = torch.linalg.inv(G / count + 0.3 * torch.eye(len(G)))
            right = torch.linalg.inv(A / count + 0.3 * torch.eye(len(A)))
            expected[name] = (left @ rows.flatten(2) @ right).view_as(rows)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)  # noqa: E731
    matrix = flat(expected)
    assert list(actual) == list(grads)
    close(actual.flatten(), matrix)
    close(actual.norms(), matrix.norm(dim=1))
    close(actual.gram(grads), matrix @ before.t())
    close(actual.sum(), {name: rows.sum(0) for name, rows in expected.items()})
    close(actual.project(9), enn.Projection(9)(expected))
    close(grads.flatten(), before)


@pytest.mark.parametrize("make", [(), (3,), "cnn", "twice"], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_ekfac_is_that_of_dense_algebra(make: str, passes: int) -> None:
    model, x = kronecker_model(make)
    model = enn.convert(model).per_sample(keep_factors=True)
    backward(model, x)
    if passes == 2:
        backward(model, x[1:3])
    grads = enn.per_sample_grads(model)
    factors = grads.kronecker()
    again = grads.rows(slice(2, None)) if passes == 1 else grads
    eigen = again.ekfac(grads.rows(slice(0, 2)).ekfac(factors)) if passes == 1 else grads.ekfac(factors)
    actual = grads.precondition(eigen, 0.3)
    for name, rows in dense(model).items():
        if name not in factors:
            torch.testing.assert_close(actual[name].dense(), rows)
            continue
        matrices = rows.flatten(2)
        basis_G, basis_A = (torch.linalg.eigh(factors[name][i])[1] for i in (1, 0))
        inside = basis_G.t() @ matrices @ basis_A
        assert eigen[name].count == len(rows)
        scale = inside.square().mean(0)
        expected = basis_G @ (inside / (scale + 0.3)) @ basis_A.t()
        torch.testing.assert_close(actual[name].dense(), expected.view_as(rows), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 4, 0)])
def test_ekfac_of_empty_batches(sizes: tuple[int, ...]) -> None:
    """As Poisson sampling draws them."""
    model, x = enn.convert(nn.Linear(3, 2)).per_sample(keep_factors=True), torch.randn(4, 3)

    def rows(size: int) -> enn.PerSampleGrads:
        model.zero_grad()
        model(x[:size]).square().sum(1).mean().backward()
        return enn.per_sample_grads(model)

    factors = rows(4).kronecker()
    expected, found = rows(4).ekfac(factors)["weight"], factors
    for size in sizes:
        found = rows(size).ekfac(found)
    torch.testing.assert_close(found["weight"].scale, expected.scale)
    assert found["weight"].count == expected.count == 4


def test_ekfac_is_nearer_to_the_second_moment_than_kfac() -> None:
    model = enn.convert(nn.Linear(4, 3)).per_sample()
    backward(model, torch.randn(50, 4) * torch.tensor([3.0, 1, 1, 0.1]))
    grads = enn.PerSampleGrads({"weight": enn.per_sample_grads(model)["weight"]})
    factors, rows = grads.kronecker(), grads.flatten()
    exact = rows.t() @ rows / 50
    A, G, count = factors["weight"]
    basis_A, basis_G, scale, rows_seen = grads.ekfac(factors)["weight"]
    basis = torch.kron(basis_G, basis_A)
    by_kfac, by_ekfac = torch.kron(G / count, A / count), basis * (scale.flatten() / rows_seen) @ basis.t()
    assert (by_ekfac - exact).norm() < 0.95 * (by_kfac - exact).norm()
    assert torch.linalg.eigvalsh(by_ekfac).min() >= -1e-12


def test_bad_factors_of_ekfac() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    factors = grads.kronecker()["weight"]
    eigen = grads.ekfac({"weight": factors})["weight"]
    with pytest.raises(
        enn.PerSampleError, match=r"PerSampleGrads.ekfac: 'other' has no per-sample gradients; wanted fac"
    ):
        grads.ekfac({"other": factors})
    with pytest.raises(
        enn.PerSampleError, match=r"ekfac: the factors of 'weight' are those of a matrix \(8, 6\); wanted"
    ):
        grads.ekfac({"weight": enn.KroneckerFactors(factors.G, factors.A, factors.count)})
    with pytest.raises(enn.PerSampleError, match=r"'weight' with damping 0.1 are not positive definite"):
        grads.precondition({"weight": eigen._replace(scale=eigen.scale * float("nan"))}, 0.1)


def test_preconditioned_rows_stay_factored() -> None:
    model = enn.convert(nn.Sequential(nn.Conv2d(20, 30, 2), nn.Flatten(), nn.Linear(30, 40))).per_sample(
        keep_factors=True
    )
    backward(model, torch.randn(BATCH, 20, 2, 2))
    grads = enn.per_sample_grads(model)
    actual = grads.precondition(grads.kronecker(), 1.0)
    for name in ("0.weight", "2.weight"):
        assert actual[name].shape == grads[name].shape
        assert not actual[name].is_dense
        assert actual[name].held_numel() < actual[name].numel()


def test_inverses_are_kept_and_follow_the_factors() -> None:
    """Another damping, more batches, and a change in place, as by a sum over processes."""
    model = enn.convert(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    factors = grads.kronecker()

    def changes(damping: Any) -> Tensor:
        """The rows with these factors, which are those with fresh copies of them."""
        actual = grads.precondition(factors, damping)["0.weight"].dense()
        fresh = {name: enn.KroneckerFactors(A.clone(), G.clone(), count) for name, (A, G, count) in factors.items()}
        torch.testing.assert_close(actual, grads.precondition(fresh, damping)["0.weight"].dense())
        return actual

    first = changes(0.1)
    kept = preconditioning._KEPT[factors["0.weight"]]
    assert torch.equal(first, changes(0.1))
    assert preconditioning._KEPT[factors["0.weight"]] is kept
    assert not torch.equal(first, changes({"0.weight": 0.2, "1.weight": 0.1, "other": -1}))
    damping = torch.tensor(0.1)
    before = changes(damping)
    damping.mul_(2)
    assert not torch.equal(before, changes(damping))
    grads.kronecker(factors)
    again = changes(0.1)
    factors["0.weight"].A.mul_(2)
    assert not torch.equal(again, changes(0.1))
    with pytest.raises(enn.PerSampleError, match=r"damping has no number for '1\.weight'; wanted one for each"):
        grads.precondition(factors, {"0.weight": 0.2})
    with pytest.raises(ValueError, match=r"damping\['1\.weight'\] is 0; wanted a number above 0"):
        grads.precondition(factors, {"0.weight": 0.2, "1.weight": 0})


def test_bad_factors_and_damping() -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 8))
    grads = enn.per_sample_grads(model)
    A, G, count = grads.kronecker()["weight"]
    for damping in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"damping is .*; wanted a number above 0"):
            grads.precondition({}, damping)
    with pytest.raises(
        enn.PerSampleError, match="'other' has no per-sample gradients; wanted factors of parameters that have"
    ):
        grads.precondition({"other": enn.KroneckerFactors(A, G, count)}, 1.0)
    with pytest.raises(enn.PerSampleError, match=r"of 'weight' are those of a matrix \(8, 6\); wanted \(6, 8\), as"):
        grads.precondition({"weight": enn.KroneckerFactors(G, A, count)}, 1.0)
    with pytest.raises(enn.PerSampleError, match="factors for 'weight' with count 0; wanted factors of"):
        grads.precondition({"weight": enn.KroneckerFactors(A, G, 0)}, 1.0)
    for bad in (-A, A * float("nan")):
        with pytest.raises(enn.PerSampleError, match="'weight' with damping 1e-09 are not positive definite"):
            grads.precondition({"weight": enn.KroneckerFactors(bad, G, count)}, 1e-9)


def by_position(grads: enn.PerSampleGrads) -> Tensor:
    """The rows of each position alone, `(B, T, P)`."""
    parts = []
    for rows in grads.values():
        blocks = []
        for _, terms in rows._unchanged():
            total = 0
            for term in terms:
                first, second = term.weighted()
                if not second.is_floating_point():
                    first, second = nn.functional.one_hot(second, term.row_shape[0]).to(first.dtype), first
                total = total + torch.einsum("bto,bti->btoi", first, second)
            blocks.append(total)
        parts.append(torch.cat(blocks).flatten(2))
    return torch.cat(parts, 2)


@pytest.mark.parametrize("make", ["linear", "embedding", "tied"])
@pytest.mark.parametrize("width", [2, 40])
@pytest.mark.parametrize("passes", [1, 2])
def test_inner_products_by_position(make: str, width: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide layers from positions, of narrow ones from rows."""
    if make == "linear":
        module: nn.Module = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False))
        x, other_x = torch.randn(BATCH, LENGTH, width), torch.randn(3, LENGTH + 1, width)
    else:
        monkeypatch.setattr("test_grads.WIDTH", width)
        module = TiedText() if make == "tied" else nn.Sequential(nn.Embedding(VOCABULARY, width))
        x, other_x = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (3, LENGTH + 1))
    model = enn.convert(module).per_sample(keep_factors=True)
    found = []
    for batches in ([other_x], [x, x[:2]][:passes]):
        model.zero_grad()
        for batch in batches:
            backward(model, batch)
        names = [name for name, _ in model.named_parameters() if not name.endswith("bias")]
        found.append(enn.PerSampleGrads({name: enn.per_sample_grads(model)[name] for name in names}))
    other, grads = found
    parts = by_position(grads)
    dense_other = enn.PerSampleGrads(
        {name: torch.as_tensor(rows.clone().cpu().numpy()) for name, rows in other.items()}
    )
    other.norms()  # may make rows dense
    for queries in (other, dense_other, grads):
        actual = grads.gram(queries, per_position=True)
        assert actual.shape == (len(parts), LENGTH, queries.batch_size)
        torch.testing.assert_close(actual, parts @ queries.flatten().t(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(actual.sum(1), grads.gram(queries), rtol=1e-9, atol=1e-11)


def test_inner_products_by_position_that_there_are_not() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 7))).per_sample(keep_factors=True)
    backward(model, torch.randn(BATCH, 2, 8))
    grads = enn.per_sample_grads(model)
    with pytest.raises(enn.PerSampleError, match=r"\['0.bias', '1.bias'\] have no positions; wanted linear layers"):
        grads.gram(grads, per_position=True)
    model.zero_grad()
    model[1](model[0](torch.randn(BATCH, 2, 8)).sum(1)).sin().sum().backward()
    grads = enn.per_sample_grads(model)
    weights = enn.PerSampleGrads({name: grads[name] for name in ("0.weight", "1.weight")})
    with pytest.raises(enn.PerSampleError, match=r"numbers of positions, \{'0.weight': \[2\], '1.weight': \[1\]\}"):
        weights.gram(per_position=True)


def test_inner_products_with_a_plain_mapping() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    backward(model, torch.randn(4, 3))
    grads = enn.per_sample_grads(model)
    torch.testing.assert_close(grads.gram({name: rows.clone() for name, rows in grads.items()}), grads.gram())


def test_entries_of_a_mapping() -> None:
    grads = enn.PerSampleGrads({"a": torch.ones(3, 2)})
    assert "a" in grads
    assert "b" not in grads
    assert grads.get("b") is None
    with pytest.raises(KeyError, match=r"^PerSampleGrads: it has no entry 'b'"):
        grads["b"]


def test_what_is_needed_of_queries_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True)
    made: list[int] = []
    original = Outer.dense
    monkeypatch.setattr(Outer, "dense", lambda term, out=None: made.append(term.batch) or original(term, out))

    def grads_of(batch: int) -> enn.PerSampleGrads:
        model.zero_grad()
        backward(model, torch.randn(batch, 9, 8))
        return enn.per_sample_grads(model)

    queries, batches = grads_of(3), [grads_of(4), grads_of(5)]
    assert [batches[0].gram(queries).shape, made] == [(4, 3), [3, 4]]
    actual = batches[1].gram(queries)
    assert made == [3, 4, 5]
    assert not queries["weight"].is_dense
    torch.testing.assert_close(actual, batches[1].flatten() @ queries.flatten().t(), rtol=1e-9, atol=1e-12)
    made.clear()
    monkeypatch.setattr(cost, "KEPT_QUERIES_NUMEL", 10)
    other = grads_of(3)
    for _ in range(2):
        batches[0].gram(other)
    assert sorted(made) == [3, 3, 4, 4]


WEIGHTS = torch.arange(float(BATCH), dtype=torch.float64)
WITH_HISTORY: dict[str, tuple[Callable[[enn.PerSampleGrads], object], Callable[[Tensor], Tensor]]] = {
    "norms": (lambda grads: grads.norms(), lambda G: G.norm(dim=1)),
    "rows": (lambda grads: grads.rows(slice(1, 3)).norms(), lambda G: G[1:3].norm(dim=1)),
    "sum": (lambda grads: grads.sum(WEIGHTS), lambda G: WEIGHTS @ G),
    "mean": (lambda grads: grads.mean(), lambda G: G.mean(0)),
    "var": (lambda grads: grads.var(), lambda G: G.var(0)),
    "gram": (lambda grads: grads.gram(), lambda G: G @ G.mT),
    "matvec": (
        lambda grads: grads.matvec({key: torch.ones_like(rows[0]) for key, rows in grads.items()}),
        lambda G: G.sum(1),
    ),
    "flatten": (lambda grads: grads.flatten(), lambda G: G),
    "items": (dict, lambda G: G),
}


@pytest.mark.parametrize("name", WITH_HISTORY)
@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_create_graph_give_numbers_with_a_history(name: str, kind: str) -> None:
    make_model, make_input = MODELS[kind]
    model, x = enn.convert(make_model()).per_sample(), make_input(BATCH)
    parameters, (of_grads, of_matrix) = list(model.parameters()), WITH_HISTORY[name]
    loss = model(x).sin().flatten(1).sum(1).mean()
    torch.autograd.grad(loss, parameters, create_graph=True)
    G = torch.cat([parameter.grad_sample.reshape(BATCH, -1) for parameter in parameters], 1)
    value = of_grads(enn.per_sample_grads(model))
    parts = list(value.values()) if isinstance(value, dict) else [value]
    penalty = sum(part.pow(3).sum() for part in parts)

    def slopes(of_rows: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(of_rows, parameters, retain_graph=True, materialize_grads=True)

    torch.testing.assert_close(slopes(penalty), slopes(of_matrix(G).pow(3).sum()))
    with torch.no_grad():
        assert not enn.per_sample_grads(model).norms().requires_grad


def test_slope_of_a_norm_that_is_zero() -> None:
    model = enn.convert(nn.Linear(2, 1)).per_sample()
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    scale = torch.tensor([1.0, 0.0])  # the second sample's loss is zero
    torch.autograd.grad((model(x)[:, 0].square() * scale).mean(), list(model.parameters()), create_graph=True)
    norms = enn.per_sample_grads(model).norms()
    slopes = torch.autograd.grad(norms.sum(), list(model.parameters()))
    assert norms[1] == 0
    assert all(slope.isfinite().all() and slope.any() for slope in slopes)


@pytest.mark.parametrize("steps_before", ["norms", "dense"])
def test_rows_taken_after_they_were_made_dense_keep_their_factors(steps_before: str) -> None:
    """The norms of small rows are those of dense rows, which the snapshot keeps beside the factors."""
    model = enn.convert(nn.Linear(7, 6)).per_sample(keep_factors=True)
    backward(model, torch.randn(12, 8, 7))
    grads, fresh = enn.per_sample_grads(model), enn.per_sample_grads(model)
    grads.norms() if steps_before == "norms" else grads["weight"].dense()
    weight = enn.PerSampleGrads({"weight": grads["weight"]})
    torch.testing.assert_close(weight.gram(per_position=True).sum(1), weight.gram())
    torch.testing.assert_close(weight.kronecker()["weight"].A, fresh.kronecker()["weight"].A)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_rows_with_a_history_are_saved_without_it() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    model(torch.randn(4, 3)).sin().sum(1).mean().backward(create_graph=True)
    grads, file = enn.per_sample_grads(model), io.BytesIO()
    torch.save(grads, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(grads)), copy.deepcopy(grads)):
        torch.testing.assert_close(loaded.norms(), grads.norms().detach())
        assert not loaded["weight"].requires_grad


def test_a_bound_that_asks_for_gradients() -> None:
    """What is clipped has no history, whatever the bound is computed from."""
    for bound in (torch.tensor(0.1, requires_grad=True), torch.tensor(0.1, requires_grad=True) * 2):
        model = enn.convert(nn.Linear(3, 2)).per_sample()
        model(torch.randn(4, 3)).sum(1).mean().backward()
        enn.clip_grad_sample_norms_(model, bound)
        assert not model.weight.grad.requires_grad


def test_a_tied_weight_belongs_to_the_nearest_limit_of_all_its_names() -> None:
    model = enn.convert(TiedText()).per_sample()
    backward(model, torch.randint(VOCABULARY, (4, LENGTH)))
    named = list(model.named_parameters(remove_duplicate=False))
    names = {id(p): [name for name, other in named if other is p] for _, p in named}
    (first, second) = next(own for own in names.values() if len(own) > 1)
    module = second.rpartition(".")[0]
    expected = enn.per_sample_grads(model).norms(per_parameter=True)
    of_module = [own[0] for own in names.values() if any(name.startswith(f"{module}.") for name in own)]
    norms = enn.clip_grad_sample_norms_(model, {module: 1.0, "": 2.0})
    assert first in of_module
    torch.testing.assert_close(norms[module], torch.stack([expected[name] for name in of_module]).norm(dim=0))


def test_weights_that_are_complex(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, _ = case
    backward(model, x)
    rows, weights = dense(model), torch.randn(len(x), dtype=torch.complex128)
    for name, total in enn.per_sample_grads(model).sum(weights).items():
        torch.testing.assert_close(total, torch.einsum("b,b...", weights, rows[name].to(weights.dtype)))


def test_complex_weights_of_complex_rows() -> None:
    model = enn.convert(nn.Linear(4, 3, dtype=torch.complex128)).per_sample()
    model(torch.randn(5, 4, dtype=torch.complex128)).abs().square().sum(1).mean().backward()
    weights, rows = torch.randn(5, dtype=torch.complex128), model.weight.grad_sample
    total = enn.per_sample_grads(model).sum(weights)["weight"]
    torch.testing.assert_close(total, torch.einsum("b,bij->ij", weights, rows))


def test_sums_and_products_of_float16() -> None:
    """They are made in float32: a factor times a small number would vanish, and a product be too large."""
    model = enn.convert(nn.Linear(64, 48).half()).per_sample()
    (model((torch.randn(64, 64) * 100).half()).float().sum(1) * 1e-4).mean().backward()
    grads, rows = enn.per_sample_grads(model), model.weight.grad_sample.clone().dense().double()
    total = grads.sum(torch.full((64,), 1e-4))["weight"]
    assert total.dtype == torch.float16
    torch.testing.assert_close(total.double(), 1e-4 * rows.sum(0), rtol=2e-2, atol=1e-7)
    products = grads.matvec({name: torch.full_like(p, 1e4) for name, p in model.named_parameters()})
    assert products.dtype == torch.float32
    expected = 1e4 * (rows.sum((1, 2)) + model.bias.grad_sample.double().sum(1))
    torch.testing.assert_close(products.double(), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


def test_inverses_follow_factors_that_are_changed_behind_their_versions() -> None:
    model = enn.convert(nn.Linear(4, 3)).per_sample(keep_factors=True)
    backward(model, torch.randn(5, 4))
    grads = enn.per_sample_grads(model)
    factors = grads.kronecker()
    grads.precondition(factors, 0.1)
    factors["weight"].A.data.mul_(100)
    anew = {"weight": enn.KroneckerFactors(factors["weight"].A.clone(), factors["weight"].G.clone(), 5)}
    kept, made = (grads.precondition(each, 0.1).norms() for each in (factors, anew))
    torch.testing.assert_close(kept, made)


def test_factors_are_added_to_all_or_to_none() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))).per_sample(keep_factors=True)
    x = torch.randn(5, 4)
    backward(model, x)
    grads = enn.per_sample_grads(model)
    total, turned = grads.kronecker(), enn.PerSampleGrads({name: grads[name] for name in ("1.weight", "0.weight")})
    x.add_(1)
    with pytest.raises(enn.PerSampleError, match="changed in place"):
        turned.kronecker(total)
    assert {name: factors.count for name, factors in total.items()} == {"0.weight": 5, "1.weight": 5}


def test_rows_that_are_taken_in_inference_mode() -> None:
    model = enn.convert(nn.Linear(4, 3)).per_sample(keep_factors=True)
    backward(model, torch.randn(5, 4))
    expected = enn.per_sample_grads(model)
    with torch.inference_mode():
        grads = enn.per_sample_grads(model)
        for value in (lambda g: g.gram(), lambda g: g["weight"].dense(), lambda g: g.project(3)):
            torch.testing.assert_close(value(grads), value(expected))
        assert grads.kronecker()["weight"].count == 5
        assert "weight" in repr(grads)
        assert dict(grads.rows(slice(1, 3)))["bias"].shape == (2, 3)


def test_snapshots_are_not_compared_by_numbers() -> None:
    grads = enn.PerSampleGrads({"weight": torch.ones(2, 3)})
    assert grads == grads
    assert grads != enn.PerSampleGrads(dict(grads))
    assert len({grads, grads}) == 1


def test_products_of_many_passes_are_made_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    gram = Outer.gram
    monkeypatch.setattr(Outer, "gram", lambda self, other: made.append(self) or gram(self, other))
    model = enn.convert(nn.Linear(40, 30)).per_sample(keep_factors=True)
    for samples in (2, 3, 2, 4):
        backward(model, torch.randn(samples, 40))
    grads = enn.per_sample_grads(model)
    rows = flat(dense(model))
    torch.testing.assert_close(grads.gram(), rows @ rows.t())
    assert len(made) == 1


def test_some_of_several_passes_keep_their_factors() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(keep_factors=True)
    for samples in (2, 3):
        backward(model, torch.randn(samples, 40))
    grads = enn.per_sample_grads(model)
    assert grads.rows(slice(0, 4)).kronecker()["weight"].count == 4


def test_inner_products_of_rows_in_two_dtypes() -> None:
    def rows_in(dtype: torch.dtype) -> enn.PerSampleGrads:
        torch.manual_seed(0)
        model, x = enn.convert(nn.Linear(30, 20).to(dtype)).per_sample(), torch.randn(4, 5, 30, dtype=dtype)
        model(x).sum((1, 2)).mean().backward()
        return enn.per_sample_grads(model)

    one, other = rows_in(torch.float32), rows_in(torch.float64)
    wide = one.flatten().double()
    for product, wanted in ((one.gram(other), wide @ other.flatten().T), (other.gram(one), other.flatten() @ wide.T)):
        assert product.dtype == torch.float64
        torch.testing.assert_close(product, wanted, rtol=1e-5, atol=1e-4)


def test_gradients_after_clipping_are_tensors_of_their_own() -> None:
    """Some optimizers detach them in place, which a view refuses."""
    model = enn.convert(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))).per_sample()
    model(torch.randn(5, 4)).square().mean().backward()
    enn.clip_grad_sample_norms_(model, 1.0)
    for parameter in model.parameters():
        parameter.grad.detach_().zero_()
    assert not any(parameter.grad.any() for parameter in model.parameters())
