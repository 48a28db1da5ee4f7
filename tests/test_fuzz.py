"""Random models out of the zoo, against the loop. Each is right, or refused for a reason that the contract gives."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from cases import EVEN_SAME, Holder, Scale
from expanded_nn.core import cost
from oracle import (
    TINY,
    Call,
    assert_all_close,
    assert_close,
    assert_close_rows,
    dense,
    gradient_penalty,
    loop,
    notes_on,
    relative_error,
    rows_of,
    total_loss,
)
from some import some
from zoo import ORACLE, STARTS, TWICE, Plan, plans

pytestmark = [
    pytest.mark.filterwarnings(EVEN_SAME),
    pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning"),  # rows are right where a module goes alone
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
]

Rows = dict[str, Tensor]
# Errors that are not the library's own words yet; each has a test of its own below.
KNOWN = [
    "derivative for aten::_scaled_dot_product",  # torch's own words, of an attention that is frozen
]
# Where the loop of `check` runs torch code that counts another word's frequency.
TORCH_ERRS = re.compile(r"EmbeddingBag\(.*scale_grad_by_freq=True")
TORCH, FLOOR = 10, 1e-4  # in float32 an error may be so many times torch's own, and a little
SMALL = 1e-3  # of the whole gradient: a part that cancels has the rounding errors of what it is the sum of
unhurried = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(unhurried, max_examples=25, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("kind", some([*STARTS]))
def test_random_models(kind: str, data: st.DataObject) -> None:
    plan = data.draw(plans(kind), "plan")
    cost.SMALL_ROWS_NUMEL = data.draw(st.sampled_from([0, 1 << 15]), "rows dense from the start up to")
    verify(plan)


@pytest.mark.fuzz
@settings(unhurried, max_examples=500)
@given(st.data())
@pytest.mark.parametrize("kind", STARTS)
def test_many_random_models(kind: str, data: st.DataObject) -> None:
    plan = data.draw(plans(kind), "plan")
    cost.SMALL_ROWS_NUMEL = data.draw(st.sampled_from([0, 1 << 15]), "rows dense from the start up to")
    verify(plan)


def verify(plan: Plan) -> None:
    """The model's rows, gradients and their algebra are those of the loop."""
    module = plan.module()
    calls = [plan.call(n, seed) for n, seed in zip(batches(plan), (11, 12), strict=True)]
    whole = module if plan.dtype == torch.float64 else copy.deepcopy(module).double()
    reference, exact, expected = played_by_torch(plan, whole, calls)
    tol, whole_norm = 1e-9, float(matrix(expected).norm()) if expected else 0.0
    tols = {name: tol * max(1.0, SMALL * whole_norm / max(float(rows.norm()), TINY)) for name, rows in expected.items()}
    if plan.dtype != torch.float64:  # as exact as torch itself
        _, own_results, own_rows = played_by_torch(plan, module, calls)
        tol = TORCH * max(map(relative_error, own_results, exact), default=0.0) + FLOOR
        tols = {name: TORCH * relative_error(own_rows[name], rows) + FLOOR for name, rows in expected.items()}
    report = None
    try:
        if plan.script == "check" and plan.samples > 1 and not TORCH_ERRS.search(plan.classes):
            call = calls[0].requires_grad() if plan.input_grad else calls[0]  # a reentrant checkpoint asks
            report = enn.check(made(plan, module), *call.args)
        model = made(plan, module)
        results = play(plan, model, calls)
    except (enn.PerSampleError, RuntimeError, IndexError) as error:
        if any(re.search(each, str(error)) for each in KNOWN):
            event("known")
            return
        if not isinstance(error, enn.PerSampleError) or not plan.refuses(error):
            raise
        assert not (report and report.ok), "check found nothing"
        event("refused")
        return
    assert report is None or report.ok, str(report)
    event("right")
    assert_all_close(results, exact, tol)
    reached = {name for name, p in reference.named_parameters() if p.grad is not None}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in named.items() if p.grad_sample is not None} == reached
    rows = {name: each for name, each in expected.items() if name in reached}
    for name, each in rows.items():
        assert_close(named[name].grad_sample, each, tols[name], name)
        assert named[name].grad_sample.dtype == plan.dtype
    if plan.dtype == torch.float64:  # from here on of the rows as they are: where they cancel, each way has its noise
        rows = {name: each.copy_(named[name].grad_sample.detach()) for name, each in rows.items()}
        verify_gradients(plan, reference, named, rows)
        if rows:
            verify_algebra(enn.per_sample_grads(model), rows)
            verify_clipping(plan, model, rows)


def batches(plan: Plan) -> list[int]:
    """The numbers of samples in the two calls."""
    return [plan.samples, plan.samples + (plan.script in ("append", "uneven"))]


def played_by_torch(plan: Plan, module: nn.Module, calls: list[Call]) -> tuple[nn.Module, list[Tensor], Rows]:
    """The same by torch, and the loop's rows; a model that torch itself refuses is no example."""
    dtype = next((p.dtype for p in module.parameters()), plan.dtype)
    calls = [call.map(lambda t: t.to(dtype) if t.is_floating_point() else t) for call in calls]
    reference = copy.deepcopy(module)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            return reference, play(plan, reference, calls), expected_rows(plan, module, calls)
    except (RuntimeError, IndexError, ValueError) as error:
        event(f"torch: {str(error)[:60]}")
        reject()


def made(plan: Plan, module: nn.Module) -> nn.Module:
    """The model in per-sample mode, in one of the ways to get there."""
    if plan.made == "convert inplace":
        return enn.convert(copy.deepcopy(module), inplace=True).per_sample(**plan.settings)
    model = enn.convert(module).per_sample(**plan.settings)
    if plan.made == "deepcopy":
        return copy.deepcopy(model)
    return model.per_sample(False).per_sample(**plan.settings) if plan.made == "off and on" else model


def play(plan: Plan, module: nn.Module, calls: list[Call]) -> list[Tensor]:
    """The script, by a model in per-sample mode or by torch; the losses and the inputs' gradients."""
    if plan.input_grad:
        calls = [call.requires_grad() for call in calls]
    losses: list[Tensor] = []

    def loss(call: Call) -> Tensor:
        total = objective(plan)(module, call, 0)
        mean = plan.settings["loss_reduction"] == "mean"
        losses.append(total / max(1, samples_of(plan, call)) if mean else total)
        return losses[-1]

    one, other = calls
    if plan.script in ("twice", "uneven"):
        backward(loss(one) + loss(other))
    elif plan.script == "retained":
        backward(loss(one), retain_graph=True)
        backward(losses[0])
    else:
        backward(loss(one))
        if plan.script == "cleared":
            module.zero_grad()
        if plan.script in ("append", "cleared"):
            backward(loss(other))
    inputs = [each.grad for call in calls for each in call.floats() if each.grad is not None]
    return [each.detach() for each in losses] + inputs


def backward(loss: Tensor, **options: bool) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def samples_of(plan: Plan, call: Call) -> int:
    first = next(i for i, each in enumerate(plan.inputs) if not each.offsets)
    return call.args[first].shape[plan.inputs[first].dim]


def objective(plan: Plan) -> Callable[..., Tensor]:
    chosen = gradient_penalty if plan.script == "penalty" and plan.call(1).floats() else total_loss

    def total(module: Callable[..., Tensor], call: Call, first: int) -> Tensor:
        return chosen(lambda *args: plan.samples_first(module(*args)), call, first)

    return total


def expected_rows(plan: Plan, module: nn.Module, calls: list[Call]) -> Rows:
    """What the loop says."""
    oracle = plan.module(TWICE if plan.script == "penalty" else ORACLE)
    oracle = oracle.to(next((p.dtype for p in module.parameters()), plan.dtype))
    oracle.load_state_dict(module.state_dict())

    def rows(call: Call) -> Rows:
        return loop(oracle, call, samples_of(plan, call), take=plan.take, objective=objective(plan))

    one, accumulate = rows(calls[0]), plan.settings["accumulate_grad"]
    if plan.script == "retained":
        return {name: each * (2 if accumulate else 1) for name, each in one.items()}
    if plan.script not in ("twice", "append", "uneven", "cleared"):
        return one
    other = rows(calls[1])
    if plan.script == "twice":
        return {name: each + other[name] for name, each in one.items()}
    if plan.script == "cleared" or (plan.script == "append" and not accumulate):
        return other
    return {name: torch.cat([each, other[name]]) for name, each in one.items()}


def verify_gradients(plan: Plan, reference: nn.Module, named: Rows, rows: Rows) -> None:
    """`.grad` is torch's own, and the sum of the rows."""
    if not plan.settings["accumulate_grad"]:
        assert all(p.grad is None for p in named.values())
        return
    sizes = batches(plan) if plan.script in ("append", "uneven") else [plan.samples]
    mean = plan.settings["loss_reduction"] == "mean"
    weights = torch.cat([torch.full((n,), 1 / n if mean and n else 1.0) for n in sizes])
    total = {name: torch.einsum("b...,b->...", each, weights) for name, each in rows.items()}
    grads = {name: dense(named[name].grad) for name in rows}
    assert_close_rows(grads, total)
    if plan.sum_of_rows and plan.script != "penalty":
        assert_close_rows(grads, {name: dense(reference.get_parameter(name).grad) for name in rows})


def matrix(rows: Rows) -> Tensor:  # (B, P)
    return torch.cat([each[..., None].flatten(1) for each in rows.values()], 1)


def verify_algebra(grads: enn.PerSampleGrads, rows: Rows) -> None:
    """What is computed from the factors is what the dense rows say."""
    G = matrix(rows)
    assert set(grads) == set(rows)
    grads = enn.PerSampleGrads({name: grads[name] for name in rows})
    samples, generator = len(G), torch.Generator().manual_seed(3)
    weights = torch.randn(samples, generator=generator, dtype=torch.float64)
    vectors = {name: torch.randn(each.shape[1:], generator=generator) for name, each in rows.items()}
    dtype = next(iter(grads.values())).dtype
    assert_close(grads.norms(), G.norm(dim=1), name="norms")
    assert_close_rows(
        grads.norms(per_parameter=True),
        {name: each[..., None].flatten(1).norm(dim=1) for name, each in rows.items()},
    )
    assert_close_rows(
        grads.sum(weights.to(dtype)), {n: torch.einsum("b...,b->...", r, weights) for n, r in rows.items()}
    )
    assert_close(grads.gram(), G @ G.T, name="gram")
    assert_close(grads.matvec(vectors), G @ torch.cat([each.flatten() for each in vectors.values()]), name="matvec")
    assert_close(grads.flatten(), G, name="flatten")
    if samples:
        assert_close_rows(grads.mean(), {name: each.mean(0) for name, each in rows.items()})
    if samples > 1:
        assert_close_rows(grads.var(), {name: each.var(0) for name, each in rows.items()})


def verify_clipping(plan: Plan, model: nn.Module, rows: Rows) -> None:
    norms = matrix(rows).norm(dim=1)
    max_norm = 0.9 * float(norms.median()) + 1e-3 if len(norms) else 1.0
    reduction = plan.settings["loss_reduction"]
    assert_close(enn.clip_grad_sample_norms_(model, max_norm, reduction=reduction), norms, name="norms")
    factors = (max_norm / norms.clamp(min=1e-300)).clamp(max=1) / (max(1, len(norms)) if reduction == "mean" else 1)
    named = dict(model.named_parameters())
    total = {name: torch.einsum("b...,b->...", each, factors) for name, each in rows.items()}
    assert_close_rows({name: dense(named[name].grad) for name in rows}, total)
    if not plan.settings["accumulate_grad"]:
        assert all(named[name].grad_sample is None for name in rows)


# --- what random models have found ----------------------------------------------------------------------------


def right(module: nn.Module, *args: Tensor, **settings: Any) -> nn.Module:
    """The rows are those of the loop, with the samples in the first dimension."""
    model = enn.convert(module).per_sample(loss_reduction="sum", **settings)
    call = Call(args)
    total_loss(model, call).backward()
    expected = loop(module, call, len(args[0]))
    assert_close_rows({name: p.grad_sample for name, p in model.named_parameters()}, expected)
    return model


class Scaled(nn.Module):
    """A layer around which the module's own parameter sends the whole forward through the general rule."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.full(shape, 0.7))

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return self.scale * self.layer(x, *args)


class Applied(nn.Module):
    """A layer, called by a function."""

    def __init__(self, layer: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


def test_scalar_parameter() -> None:
    x = torch.randn(3, 4)
    module = Scaled(nn.Linear(4, 2))
    model = right(module, x)
    rows = loop(module, Call((x,)), 3)
    verify_algebra(enn.per_sample_grads(model), rows)
    assert_close(enn.clip_grad_sample_norms_(model, 1.0), matrix(rows).norm(dim=1))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_one_channel(affine: bool) -> None:
    right(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=affine)).eval(), torch.randn(3, 2))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.GroupNorm(1, 1), (1, 4)),
        (lambda: nn.InstanceNorm1d(1, affine=True), (1, 4)),
        (lambda: nn.InstanceNorm1d(1, affine=True, track_running_stats=True).eval(), (1, 4)),
        (lambda: nn.BatchNorm2d(1).eval(), (1, 4, 2)),
        (lambda: nn.PReLU(), (1, 4)),
        (lambda: nn.Conv1d(1, 1, 3), (1, 4)),
        (lambda: nn.Conv2d(1, 1, 1), (1, 4, 2)),
        (lambda: nn.ConvTranspose1d(1, 1, 3), (1, 4)),
        (lambda: nn.Linear(1, 1), (1,)),
        (lambda: nn.LayerNorm(1), (4, 1)),
    ],
)
def test_layers_of_one_channel(make: Callable[[], nn.Module], size: tuple[int, ...]) -> None:
    """Expanded weights `(B, 1)` stay expanded where they are reshaped."""
    right(nn.Sequential(nn.Linear(size[-1], size[-1]), make(), nn.Tanh()).eval(), torch.randn(3, *size))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_states_that_the_general_rule_makes_for_one_sample(kind: type[nn.RNNBase]) -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros(1, x.shape[0], 3)
        return layer(x, (state, state) if kind is nn.LSTM else state)[0]

    right(Scaled(Applied(kind(2, 3, batch_first=True), how), 3), torch.randn(2, 4, 2))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_in_the_general_rule_of_a_time_first_model(kind: type[nn.RNNCellBase]) -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        state = None
        for step in x:
            state = layer(step, state)
        return (state[0] if isinstance(state, tuple) else state)[None]

    module = Scaled(Applied(kind(2, 3), how), 3)
    model = enn.convert(module).per_sample(batch_first=False, loss_reduction="sum")
    call = Call((torch.randn(4, 2, 2),))
    total_loss(lambda x: model(x).transpose(0, 1), call).backward()
    time_second = Applied(module, lambda inner, x: inner(x.transpose(0, 1)).transpose(0, 1))
    expected = loop(time_second, Call((call.args[0].transpose(0, 1),)), 2)
    assert_close_rows({f"layer.{name}": p.grad_sample for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("lengths", [[1, 2], [2, 2]])
def test_packing_in_the_general_rule(lengths: list[int]) -> None:
    def split(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=2)[0]

    class Packs(Scaled):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            return self.scale * split(self.layer, x, lengths)

    module, call = Packs(nn.GRU(2, 3, batch_first=True), 3), Call((torch.randn(2, 2, 2), torch.tensor(lengths)))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"Packs: .*in a loop.*what vmap cannot follow"):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 2))


@pytest.mark.parametrize("words", [[1, 2, 3, 4], [1, 2]])
@pytest.mark.parametrize("offsets", [[0, 2], [0, 0]])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_bags_with_offsets_in_the_general_rule(words: list[int], offsets: list[int], batch_size: int | None) -> None:
    model = enn.convert(Scaled(nn.EmbeddingBag(7, 2), 2)).per_sample(batch_size=batch_size)
    with pytest.raises(enn.PerSampleError, match=r"Scaled: .* bags by offsets.* 2-D input \(B, N\)"):
        model(torch.tensor(words), torch.tensor(offsets))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.GRU(2, 2, batch_first=True),
        lambda: nn.Sequential(nn.Linear(2, 2), Scale(2)),
    ],
)
def test_checkpoint_in_the_general_rule(make: Callable[[], nn.Module]) -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        def some(x: Tensor) -> Tensor:
            y = layer(x.sin())
            return (y[0] if isinstance(y, tuple) else y).exp() * x.cos()

        return checkpoint(some, x, use_reentrant=False)

    inside = Scaled(Applied(make(), how), 2)
    right(inside, torch.randn(3, 4, 2))
    right(Applied(inside, how), torch.randn(3, 4, 2))


def test_checkpoint_in_the_general_rule_without_samples() -> None:
    """The backward computes it again when the rule is over."""
    module = Scaled(Applied(nn.PReLU(1), lambda layer, x: checkpoint(layer, x, use_reentrant=False)), 1)
    model = enn.convert(module).per_sample()
    x = torch.randn(0, 1, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 1)
    for parameter in model.parameters():
        assert parameter.grad_sample is not None
        assert parameter.grad_sample.shape == (0, *parameter.shape)


def test_reentrant_checkpoint_in_the_general_rule() -> None:
    module = Scaled(Applied(nn.Linear(2, 2), lambda layer, x: checkpoint(layer, x, use_reentrant=True)), 2)
    for escalate in (False, True):
        model = enn.convert(module).per_sample(escalate=escalate)
        with pytest.raises(enn.PerSampleError, match=r"layer \(Applied\): .*setup_context.* use_reentrant=False"):
            model(torch.randn(3, 2, requires_grad=True))


@pytest.mark.parametrize("mixes", [False, True])
def test_check_of_a_view_that_was_changed_in_place(mixes: bool) -> None:
    def how(layers: nn.Module, x: Tensor) -> Tensor:
        x = layers[0](x).transpose(0, 1)
        x[..., 0] *= 2
        y = layers[1](x).transpose(0, 1)
        return y - y.mean(0) if mixes else y

    model = Applied(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), how)
    report = enn.check(model, torch.randn(4, 3, 2))
    assert report.ok != mixes, str(report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layer", [nn.LayerNorm, nn.RMSNorm])
def test_check_of_gradients_that_are_all_rounding(layer: type[nn.Module], dtype: torch.dtype) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 1), layer(1)).to(dtype)
        report = enn.check(model, torch.randn(4, 3, dtype=dtype))
        assert report.ok, str(report)


def test_check_of_a_model_without_a_gradient() -> None:
    """What is normalised does not depend on the one weight that scales it."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.RMSNorm(5, eps=0.0))
        for trained in (True, False):
            model[1].requires_grad_(trained)
            report = enn.check(model, torch.randn(4, 1, 5))
            assert report.ok, str(report)


def test_parameters_in_a_list_have_no_rows_after_a_copy() -> None:
    model = copy.deepcopy(enn.convert(Holder(2)).per_sample())
    assert all(p.grad_sample is None for p in model.parameters())


def test_layer_of_fixed_layout_alone_in_a_time_first_model() -> None:
    layer = enn.GroupNorm(3, 3).per_sample(batch_first=False)
    layer(torch.randn(2, 3, 4)).sum().backward()
    assert layer.weight.grad_sample.shape == (2, 3)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 4), (1,)])
def test_checkpoint_of_a_fixed_layout_in_a_time_first_model(sizes: tuple[int, ...]) -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x.transpose(0, 1), use_reentrant=False)

    model = enn.convert(Applied(nn.GroupNorm(3, 3), how)).per_sample(batch_first=False, loss_reduction="sum")
    calls = [Call((torch.randn(3, n, 5),)) for n in sizes]
    sum(total_loss(model, call) for call in calls).backward()
    alone = Applied(nn.GroupNorm(3, 3), lambda layer, x: layer(x))
    rows = [loop(alone, Call((call.args[0].transpose(0, 1),)), n) for call, n in zip(calls, sizes, strict=True)]
    assert_close(model.layer.weight.grad_sample, torch.cat([each["layer.weight"] for each in rows]))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (3, 2)])
def test_checkpoint_whose_first_layer_has_a_shared_row(sizes: tuple[int, int]) -> None:
    """Its one row does not say which of the passes it belongs to; the graph does."""

    def how(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: layer(torch.ones(1, 2)) * y, x, use_reentrant=False)

    module = Applied(nn.Linear(2, 2), how)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    calls = [Call((torch.randn(n, 2),)) for n in sizes]
    sum(total_loss(model, call) for call in calls).backward()
    expected = [loop(module, call, n) for call, n in zip(calls, sizes, strict=True)]
    for name, p in model.named_parameters():
        assert_close(p.grad_sample, torch.cat([rows[name] for rows in expected]), name=name)


def test_reentrant_checkpoint_whose_first_layer_has_a_shared_row() -> None:
    """Its number of rows says nothing here, and the checkpoint's inputs have no layer behind them."""

    def how(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda layer, x: checkpoint(lambda y: layer(torch.ones(1, 2)) * y, x, use_reentrant=use_reentrant)

    layer = nn.Linear(2, 2)
    model = enn.convert(Applied(layer, how(True))).per_sample(loss_reduction="sum")
    calls = [Call((torch.randn(n, 2, requires_grad=True),)) for n in (2, 1)]
    sum(total_loss(model, call) for call in calls).backward()
    parts = [loop(Applied(layer, how(False)), call, n) for call, n in zip(calls, (2, 1), strict=True)]
    assert_close_rows(
        {name: p.grad_sample for name, p in model.named_parameters()},
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]},
    )


def test_features_in_a_time_first_model() -> None:
    """In `(B, features)` a layer without a layout would take the features for the samples."""
    module = Applied(nn.Sequential(nn.RNN(2, 3), nn.PReLU()), lambda layers, x: layers[1](layers[0](x)[1][-1]))
    model = enn.convert(module).per_sample(batch_first=False, escalate=False)
    with pytest.raises(enn.PerSampleError, match="PReLU"):
        model(torch.randn(4, 3, 2))


def test_features_in_a_time_first_model_with_a_reentrant_checkpoint() -> None:
    """The layer cannot tell the samples, and sample by sample the checkpoint would lose its graph: both are said."""

    def how(layers: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layers[1], layers[0](x)[1][-1], use_reentrant=True)

    model = enn.convert(Applied(nn.Sequential(nn.RNN(1, 1), nn.PReLU()), how)).per_sample(batch_first=False)
    with pytest.raises(enn.PerSampleError, match=r"layer\.1 \(PReLU\): .* has the samples in dimension 0") as raised:
        model(torch.randn(1, 2, 1, requires_grad=True))
    assert "use_reentrant=False" in notes_on(raised.value)[0]


def test_features_in_a_time_first_general_rule() -> None:
    module = Applied(nn.Sequential(Scale(3), nn.RNN(2, 3)), lambda layers, x: layers[0](layers[1](x)[1][-1]))
    model = enn.convert(module).per_sample(batch_first=False, escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"layer\.0 \(Scale\): .* has the samples in dimension 0"):
        model(torch.randn(4, 3, 2))


@pytest.mark.parametrize("accumulate_grad", [True, False])
def test_second_backward_through_nested_reentrant_checkpoints(accumulate_grad: bool) -> None:
    """The backwards inside are parts of the one around them, and do not replace each other's rows."""

    def how(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
        def nested(layer: nn.Module, x: Tensor) -> Tensor:
            inner = lambda y: checkpoint(layer, y, use_reentrant=use_reentrant)  # noqa: E731
            return checkpoint(inner, x, use_reentrant=use_reentrant).tanh()

        return lambda layers, x: nested(layers[2], nested(layers[1], layers[0](x).tanh()))

    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model = enn.convert(Applied(layers, how(True))).per_sample(loss_reduction="sum", accumulate_grad=accumulate_grad)
    x = torch.randn(3, 2)
    loss = total_loss(model, Call((x.clone().requires_grad_(),)))
    expected = loop(Applied(layers, how(False)), Call((x,)), 3)
    for times in (1, 2 if accumulate_grad else 1):
        loss.backward(retain_graph=True)
        rows = {name: p.grad_sample for name, p in model.named_parameters()}
        assert_close_rows(rows, {name: times * each for name, each in expected.items()})


@pytest.mark.parametrize("samples", [3, 4])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2), lambda: nn.Bilinear(3, 3, 2), lambda: nn.LayerNorm(3), lambda: nn.RMSNorm(3)]
)
def test_features_of_a_time_first_model_by_a_layer_that_says_which_they_are(
    make: Callable[[], nn.Module], samples: int
) -> None:
    """In `(B, features)` it has its samples first, also where they are as many as the features."""

    def how(layers: nn.Module, x: Tensor) -> Tensor:
        h = layers[0](x)[1][-1]
        return layers[1](h, h) if isinstance(layers[1], nn.Bilinear) else layers[1](h)

    module = Applied(nn.Sequential(nn.GRU(2, 3), make()), how)
    model = enn.convert(module).per_sample(batch_first=False, loss_reduction="sum", escalate=False)
    x = torch.randn(5, samples, 2)
    total_loss(model, Call((x,))).backward()
    expected = loop(module, Call((x,)), samples, take=lambda call, i: call.map(lambda t: t.narrow(1, i, 1)))
    assert_close_rows({name: p.grad_sample for name, p in model.named_parameters()}, expected)


def test_table_of_as_many_positions_as_samples_in_a_time_first_model() -> None:
    """A layer that reads `(T, features)` would take them for the samples where T = B."""

    class Coordinates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_x, self.of_places = nn.Linear(2, 3), nn.Linear(2, 3)
            self.register_buffer("places", torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:  # (T, B, 2)
            return (self.of_x(x) * self.of_places(self.places).unsqueeze(1)).sum(0)

    module = Coordinates()
    model = enn.convert(module).per_sample(batch_first=False, loss_reduction="sum", escalate=False)
    x = torch.randn(3, 3, 2)
    with pytest.raises(enn.PerSampleError, match="its 3 rows may be positions"):
        model(x)
    model.per_sample(escalate=True)
    total_loss(model, Call((x,))).backward()
    expected = loop(module, Call((x,)), 3, take=lambda call, i: call.map(lambda t: t.narrow(1, i, 1)))
    assert_close_rows({name: p.grad_sample for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("samples", [1, 2])
def test_features_beside_the_sequences_of_a_time_first_model(samples: int) -> None:
    """`(1, features)` of a single sample are no samples that stand second."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sequences, self.both = nn.GRU(2, 3), nn.Bilinear(3, 4, 4)

        def forward(self, x: Tensor, features: Tensor) -> Tensor:
            return self.both(self.sequences(x)[1][-1], features)

    def take(call: Call, i: int) -> Call:
        return Call((call.args[0].narrow(1, i, 1), call.args[1].narrow(0, i, 1)))

    module, call = Beside(), Call((torch.randn(5, samples, 2), torch.randn(samples, 4)))
    model = enn.convert(module).per_sample(batch_first=False, loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples, take=take))


@pytest.mark.parametrize("samples", [1, 3])
def test_offsets_of_bags_that_the_forward_makes(samples: int) -> None:
    """They are numbers of the model, and as many as the samples."""

    def how(bags: nn.Module, words: Tensor) -> Tensor:
        return bags(words.flatten(), torch.arange(0, words.numel(), words.shape[1]))

    right(Applied(nn.EmbeddingBag(7, 3), how), torch.randint(7, (samples, 4)))
