"""The laws: what holds for every layer. The cases are in cases.py."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from cases import CASES, EVEN_SAME, GENERAL, Case, layer_of
from expanded_nn.core import cost
from oracle import (
    Call,
    Objective,
    assert_all_close,
    assert_close,
    assert_close_rows,
    coefficients,
    dense,
    gradient_penalty,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    total_loss,
)
from some import slow, some

pytestmark = [
    pytest.mark.filterwarnings(EVEN_SAME),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
]

BATCH = 3


def where(condition: Callable[[Case], bool], choose: Callable[[list[Case]], list[Any]] = list) -> pytest.MarkDecorator:
    chosen = choose([case for case in CASES if condition(case)])
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


every_case = where(lambda case: True)
with_parameters = where(Case.has_parameters)
with_float_input = where(Case.has_float_input)
some_with_parameters = where(Case.has_parameters, some)
some_with_float_input = where(Case.has_float_input, some)


def firsts() -> list[Case]:
    """The first case of each class: enough for what hardly depends on a layer's arguments."""
    by_class: dict[type[nn.Module], Case] = {}
    for case in CASES:
        if case.has_parameters():
            by_class.setdefault(case.torch_class, case)
    return list(by_class.values())


FIRSTS = firsts()
each_class = where(lambda case: case in FIRSTS)


def expanded(case: Case, **arguments: Any) -> nn.Module:
    return enn.convert(case.module()).per_sample(**{"batch_first": True, **arguments})


def rows_after(model: nn.Module, call: Call, samples: int, reduction: str = "sum") -> dict[str, Tensor | None]:
    loss = total_loss(model, call)
    (loss / samples if reduction == "mean" else loss).backward()
    return rows_of(model)


def test_every_layer_of_the_zoo_has_a_case() -> None:
    zoo = {
        value
        for value in vars(enn).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value is not enn.Expanded
    }
    in_cases = {type(layer_of(enn.convert(case.module()))) for case in CASES}
    attentive = (  # test_attention.py
        nn.MultiheadAttention
        | nn.TransformerEncoderLayer
        | nn.TransformerDecoderLayer
        | nn.TransformerEncoder
        | nn.TransformerDecoder
        | nn.Transformer
    )
    elsewhere = {layer for layer in zoo if issubclass(layer, attentive)}
    assert not sorted(layer.__name__ for layer in zoo - in_cases - elsewhere)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


# --- the forward ----------------------------------------------------------------------------------------------


@every_case
def test_same_forward(case: Case) -> None:
    call = case.inputs(BATCH)
    torch_module, model = case.module(), expanded(case)
    assert_close(call.on(model), call.on(torch_module).detach(), tol=1e-12)
    changed = torch_module if case.training else case.module()  # in eval mode they stay as they are
    for (name, actual), expected in zip(model.named_buffers(), changed.buffers(), strict=True):
        assert torch.equal(actual, expected), name


@every_case
def test_off_is_the_very_torch_code(case: Case) -> None:
    call = case.inputs(BATCH)
    off = expanded(case).per_sample(False)
    a, b = call.requires_grad(), call.requires_grad()
    out, expected = a.on(off), b.on(reference := case.module())
    assert torch.equal(out, expected)
    plain_grads = [sample_losses(o).sum().backward() or m for o, m in ((out, off), (expected, reference))]
    for (name, actual), grad in zip(grads_of(plain_grads[0]).items(), grads_of(reference).values(), strict=True):
        assert torch.equal(dense(actual), dense(grad)), name
    for actual, float_input in zip(a.floats(), b.floats(), strict=True):
        assert torch.equal(actual.grad, float_input.grad)
    assert all(getattr(p, "grad_sample", None) is None for p in off.parameters())


# --- the rows -------------------------------------------------------------------------------------------------


@with_parameters
@pytest.mark.parametrize(("reduction", "samples"), [("mean", BATCH), ("sum", BATCH), ("mean", 1)])
def test_rows_equal_the_loop(case: Case, reduction: str, samples: int) -> None:
    call = case.inputs(samples)
    rows = rows_after(expanded(case, loss_reduction=reduction), call, samples, reduction)
    assert_close_rows(rows, loop(case.oracle(), call, samples, take=case.take))
    for name, p in case.module().named_parameters():
        assert rows[name].dtype == p.dtype


@with_parameters
def test_rows_add_up_to_the_gradient(case: Case) -> None:
    call = case.inputs(BATCH).requires_grad()
    model, torch_module = expanded(case), case.module()
    rows = rows_after(model, call, BATCH, "mean")
    total = {name: r.mean(0) for name, r in rows.items()}
    assert_close_rows(grads_of(model), total)
    assert all(type(p.grad) is Tensor for p in model.parameters())
    if case.sum_of_rows:
        loss = total_loss(torch_module, case.inputs(BATCH).requires_grad())
        (loss / BATCH).backward()
        assert_close_rows(grads_of(model), {name: dense(g) for name, g in grads_of(torch_module).items()})


@with_float_input
def test_input_gradients(case: Case) -> None:
    a, b = case.inputs(BATCH).requires_grad(), case.inputs(BATCH).requires_grad()
    total_loss(expanded(case), a).backward()
    total_loss(case.module(), b).backward()
    assert_all_close([t.grad for t in a.floats()], [t.grad for t in b.floats()])


@some_with_parameters
def test_input_that_requires_grad_changes_no_row(case: Case) -> None:
    call = case.inputs(BATCH)
    rows = rows_after(expanded(case, loss_reduction="sum"), call.requires_grad(), BATCH)
    assert_close_rows(rows, loop(case.oracle(), call, BATCH, take=case.take))


@some_with_parameters
@pytest.mark.no_modes
def test_another_device_for_new_tensors(case: Case) -> None:
    """What a layer makes is where the samples are, and not where `torch.set_default_device` says."""
    model, call = expanded(case, loss_reduction="sum"), case.inputs(BATCH)
    with torch.device("meta"):
        output = call.on(model)
    loss = sample_losses(output).sum()
    with torch.device("meta"):
        loss.backward()
        norms = enn.clip_grad_sample_norms_(model, 1e9)
    assert_close_rows(rows_of(model), loop(case.oracle(), call, BATCH, take=case.take))
    assert norms.device.type == "cpu"


@each_class
def test_materialize(case: Case) -> None:
    call = case.inputs(BATCH)
    rows = rows_after(expanded(case, loss_reduction="sum", materialize=True), call, BATCH)
    assert all(type(r) is Tensor and not r.is_sparse for r in rows.values())
    assert_close_rows(rows, loop(case.oracle(), call, BATCH, take=case.take))


@each_class
def test_torch_autograd_grad(case: Case) -> None:
    """Gradients asked for by name are the plain ones."""
    call = case.inputs(BATCH).requires_grad()
    model, torch_module = expanded(case), case.module()
    actual = torch.autograd.grad(total_loss(model, call), list(model.parameters()))
    rows = loop(case.oracle(), case.inputs(BATCH), BATCH, take=case.take)
    assert_close_rows(
        dict(zip(dict(torch_module.named_parameters()), actual, strict=True)),
        {name: r.sum(0) for name, r in rows.items()},
    )


@each_class
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_frozen_parameter_has_no_rows(case: Case, name: str) -> None:
    call = case.inputs(BATCH)
    module, model = case.oracle(), expanded(case, loss_reduction="sum")
    if not any(n.endswith(name) for n, _ in module.named_parameters()):
        name = next(module.named_parameters())[0]
    for m in (module, model):
        for n, p in m.named_parameters():
            p.requires_grad_(not n.endswith(name))
    loss = total_loss(model, call)
    if loss.requires_grad:
        loss.backward()
    assert_close_rows(rows_of(model), loop(module, call, BATCH, take=case.take))
    assert all(p.grad_sample is None for n, p in model.named_parameters() if n.endswith(name))


# --- second order ---------------------------------------------------------------------------------------------


@some_with_float_input
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_penalty(case: Case, reduction: str) -> None:
    call = case.inputs(BATCH)
    model = expanded(case, loss_reduction=reduction)
    loss = gradient_penalty(model, call)
    if not case.has_parameters():
        return
    (loss / BATCH if reduction == "mean" else loss).backward()
    expected = loop(case.twice_differentiable(), call, BATCH, take=case.take, objective=gradient_penalty)
    assert_close_rows(rows_of(model), expected)


@with_float_input
def test_second_derivative_by_the_input(case: Case) -> None:
    """The derivative, by the input, of a loss that contains the derivative by the input."""
    call = case.inputs(BATCH)

    def by_input(module: nn.Module, call: Call, first: int = 0) -> list[Tensor]:
        call = call.requires_grad()
        inner = torch.autograd.grad(total_loss(module, call, first), call.floats(), create_graph=True)
        return list(torch.autograd.grad(sum(g.sin().sum() for g in inner), call.floats()))

    actual = by_input(expanded(case), call)
    alone = [by_input(case.twice_differentiable(), case.take(call, i).map(Tensor.contiguous), i) for i in range(BATCH)]
    for i, expected in enumerate(zip(*alone, strict=True)):
        assert_close(actual[i], torch.cat(expected))


@pytest.mark.parametrize(
    ("case", "materialize"),
    [
        pytest.param(case, materialize, id=f"{case.name}{'-materialized' * materialize}")
        for case in CASES
        if case.has_parameters()
        for materialize in {False, case in FIRSTS}
    ],
)
def test_derivative_of_grad_sample(case: Case, materialize: bool) -> None:
    """The sum of the squared norms of the rows, differentiated by the parameters and the inputs."""
    call = case.inputs(BATCH)
    a, b = call.requires_grad(), call.requires_grad()
    model, oracle = expanded(case, loss_reduction="sum", materialize=materialize), case.twice_differentiable()
    total_loss(model, a).backward(create_graph=True)
    actual = squared_norms_differentiated(model, rows_of(model), a.floats())
    rows = loop(oracle, b, BATCH, take=case.take, create_graph=True)
    assert_all_close(actual, squared_norms_differentiated(oracle, rows, b.floats()))


def squared_norms_differentiated(model: nn.Module, rows: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    total = sum((r**2).sum() for r in rows.values())
    if not total.requires_grad:  # linear in the parameters, and no input to differentiate by
        return []
    wanted = [*model.parameters(), *inputs]
    return [dense(g) for g in torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)]


@where(lambda case: case.has_float_input() and not case.name.startswith("embedding_bag"), some)
def test_a_jacobian_by_one_vmapped_backward(case: Case) -> None:
    """By the inputs it is the plain one; rows would be those of several backwards at once.

    Not so for bags, whose weights come with the rows of the table.
    """
    a, b = case.inputs(BATCH).requires_grad(), case.inputs(BATCH).requires_grad()
    model = expanded(case)
    outputs = [out[0] if isinstance(out, tuple) else out for out in (a.on(model), b.on(case.module()))]
    seeds = torch.randn(4, *outputs[0].shape)
    actual = torch.autograd.grad(outputs[0], a.floats(), seeds, retain_graph=True, is_grads_batched=True)
    by_seed = [torch.autograd.grad(outputs[1], b.floats(), seed, retain_graph=True) for seed in seeds]
    assert_all_close(actual, [torch.stack(grads) for grads in zip(*by_seed, strict=True)])
    if case.has_parameters():
        with pytest.raises(enn.PerSampleError, match="vmapped backward"):
            torch.autograd.grad(outputs[0], list(model.parameters()), seeds, is_grads_batched=True)


def jacobian_penalty(module: nn.Module, call: Call, first: int = 0, *, vmapped: bool = False) -> Tensor:
    """The squares of some products with the Jacobian by the input, all at once or one after the other."""
    call = call.requires_grad()
    output = call.on(module)
    output = output[0] if isinstance(output, tuple) else output
    seed = coefficients(output, first)
    seeds = torch.stack([seed, seed.cos()])
    by_input = functools.partial(torch.autograd.grad, output.sin(), call.floats(), create_graph=True)
    grads = by_input(seeds, is_grads_batched=True) if vmapped else [g for seed in seeds for g in by_input(seed)]
    return sum(g.square().sum() for g in grads)


@functools.cache
def torchs_norms_have_such_derivatives() -> bool:
    """Whether torch itself can take the derivative of a vmapped backward through its group norm, as torch 2.15 can."""
    x = torch.randn(2, 4, 3, requires_grad=True)
    y, seeds = F.group_norm(x, 2), torch.randn(3, 2, 4, 3)
    try:
        torch.autograd.grad(y, x, seeds, is_grads_batched=True, create_graph=True)
    except RuntimeError:
        return False
    return True


@where(
    lambda case: case.has_parameters() and case.has_float_input() and not case.name.startswith("embedding_bag"), some
)
def test_a_jacobian_by_one_vmapped_backward_in_the_loss(case: Case) -> None:
    """Its derivative is right, or there is an error: in a Function of torch's it would be lost."""
    model, call = expanded(case, loss_reduction="sum"), case.inputs(BATCH)
    expected = loop(case.twice_differentiable(), call, BATCH, take=case.take, objective=jacobian_penalty)
    of_norms = "" if torchs_norms_have_such_derivatives() else "|shape .* is invalid|size of tensor a"
    is_norm = re.match(r"(group|instance)_norm(?!.*track_eval)", case.name)
    if re.match(r"conv|network", case.name) or (of_norms and is_norm):
        with pytest.raises(RuntimeError, match=f"create_graph=True{of_norms}"):
            jacobian_penalty(model, call, vmapped=True).backward()
        return
    jacobian_penalty(model, call, vmapped=True).backward()
    assert_close_rows(rows_of(model), expected)


# --- small layers ---------------------------------------------------------------------------------------------


@pytest.mark.small_rows
@with_parameters
def test_small_rows_equal_the_loop(case: Case) -> None:
    test_rows_equal_the_loop(case, "mean", BATCH)


@pytest.mark.slow
@pytest.mark.small_rows
@with_float_input
def test_gradient_penalty_with_small_rows(case: Case) -> None:
    test_gradient_penalty(case, "mean")


# --- batches and passes ---------------------------------------------------------------------------------------


@with_parameters
def test_empty_batch(case: Case) -> None:
    try:
        total_loss(case.module(), case.inputs(0).requires_grad()).backward()
        torch_can = True
    except (RuntimeError, IndexError):
        torch_can = False
    model = expanded(case)
    try:
        rows = rows_after(model, case.inputs(0), 1)
    except (RuntimeError, IndexError):
        assert not torch_can
        return
    for name, p in model.named_parameters():
        assert rows[name].shape == (0, *p.shape)
        assert torch.equal(dense(p.grad), torch.zeros_like(p))


@each_class
def test_two_calls_in_one_pass_add(case: Case) -> None:
    first, second = case.inputs(BATCH), case.call(BATCH)
    model = expanded(case, loss_reduction="sum")
    (total_loss(model, first) + total_loss(model, second)).backward()
    one, other = (loop(case.oracle(), call, BATCH, take=case.take) for call in (first, second))
    assert_close_rows(rows_of(model), {name: one[name] + other[name] for name in one})


@each_class
def test_two_backwards_append(case: Case) -> None:
    first, second = case.inputs(BATCH), case.call(BATCH)
    model = expanded(case, loss_reduction="sum")
    for call in (first, second):
        total_loss(model, call).backward()
    one, other = (loop(case.oracle(), call, BATCH, take=case.take) for call in (first, second))
    assert_close_rows(rows_of(model), {name: torch.cat([one[name], other[name]]) for name in one})
    assert_close_rows(grads_of(model), {name: (one[name] + other[name]).sum(0) for name in one})


@each_class
def test_zero_grad_resets(case: Case) -> None:
    first, second = case.inputs(BATCH), case.call(BATCH)
    model = expanded(case, loss_reduction="sum")
    total_loss(model, first).backward()
    model.zero_grad()
    total_loss(model, second).backward()
    rows = loop(case.oracle(), second, BATCH, take=case.take)
    assert_close_rows(rows_of(model), rows)
    assert_close_rows(grads_of(model), {name: r.sum(0) for name, r in rows.items()})


@each_class
def test_accumulate_grad_false_replaces(case: Case) -> None:
    first, second = case.inputs(BATCH), case.call(BATCH)
    model = expanded(case, loss_reduction="sum", accumulate_grad=False)
    for call in (first, second):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(case.oracle(), second, BATCH, take=case.take))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
@some_with_parameters
def test_lower_precision(case: Case, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    call = case.inputs(BATCH).map(lambda t: t.to(dtype) if t.is_floating_point() else t)
    model = enn.convert(case.module().to(dtype)).per_sample(loss_reduction="sum", batch_first=True)
    out = call.on(model)
    assert out.dtype == call.on(case.module().to(dtype)).dtype
    rows = rows_after(model, call, BATCH)
    assert all(r.dtype == dtype for r in rows.values())
    in_float64 = call.map(lambda t: t.double() if t.is_floating_point() else t)
    expected = loop(case.oracle().to(dtype).double(), in_float64, BATCH, take=case.take)
    assert_close_rows(rows, expected, tolerance)


# --- who is a sample ------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """A root whose input tells B, and which gives its layer something else."""

    def __init__(self, layer: nn.Module, feed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.feed = feed

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.feed(x))


def takes_one_tensor(case: Case) -> bool:
    return len(case.inputs(1).args) == 1 and not case.inputs(1).kwargs and case not in GENERAL


one_tensor = where(lambda case: case.has_parameters() and takes_one_tensor(case))


@where(lambda case: case in FIRSTS and takes_one_tensor(case))
@pytest.mark.parametrize(
    "feed",
    [
        pytest.param(lambda x: x[: len(x) // 2], id="half"),
        pytest.param(lambda x: torch.cat([x, x]), id="twice"),
        pytest.param(lambda x: x[1:2], id="a_slice_of_one"),
    ],
)
def test_another_number_of_rows_is_an_error(case: Case, feed: Callable[[Tensor], Tensor]) -> None:
    model = enn.convert(Feed(case.module(), feed)).per_sample()
    with pytest.raises(enn.PerSampleError, match="layer"):
        total_loss(model, Call((case.inputs(BATCH).args[0].repeat_interleave(2, 0),)))


@one_tensor
def test_one_row_is_shared_by_all_samples(case: Case) -> None:
    shared = case.inputs(1).args[0]
    if case.name == "embedding_1d_index":
        shared = shared.unsqueeze(0)  # without it ambiguous: test_single_index_is_ambiguous
    module = case.oracle()
    model = enn.convert(Feed(case.module(), lambda x: shared)).per_sample(loss_reduction="sum")
    batch = Call((torch.randn(BATCH, 2),))
    out = batch.on(model)
    assert out.shape == (BATCH, *shared_output(module, shared).shape[1:])
    sample_losses(out).sum().backward()
    expected = loop(Feed(module, lambda x: shared.contiguous()), batch, BATCH)
    assert_close_rows(rows_of(model), expected)


def shared_output(module: nn.Module, shared: Tensor) -> Tensor:
    with torch.no_grad():
        return module(shared)


@pytest.mark.parametrize(
    ("case", "bad"),
    [pytest.param(case, bad, id=f"{case.name}-{i}") for case in CASES for i, bad in enumerate(case.bad)],
)
def test_bad_input_is_refused(case: Case, bad: Any) -> None:
    with pytest.raises(enn.PerSampleError, match=bad.match):
        bad.call().on(expanded(case))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 2), (3, 5)),
        (nn.Conv1d(4, 2, 3), (3, 5, 5)),
        (nn.Conv2d(4, 2, 3), (3, 4, 2, 2)),
        (nn.ConvTranspose1d(4, 2, 3), (3, 5, 5)),
        (nn.LayerNorm(4), (3, 5)),
        (nn.RMSNorm(4), (3, 5)),
        (nn.GroupNorm(2, 4), (3, 6, 5)),
        (nn.GroupNorm(2, 4), (3, 5, 5)),
        (nn.BatchNorm1d(4).eval(), (3, 5)),
        (nn.InstanceNorm1d(4, affine=True), (3, 5, 6)),
        (nn.InstanceNorm1d(4, affine=True), (3, 4, 1)),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 5, 6, 6)),
        (nn.PReLU(4), (3, 5)),
        (nn.LSTM(4, 3, batch_first=True), (3, 5, 6)),
        (nn.RNN(4, 3, batch_first=True), (3, 0, 4)),
        (nn.GRUCell(4, 3), (3, 5)),
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused_in_its_words(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x, model = torch.randn(shape), enn.convert(layer).per_sample()
    with pytest.raises(Exception) as plain:  # noqa: PT011 (whichever it is)
        layer(x)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        model(x)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("group_norm", {"num_groups": 2, "weight": (4,)}),
        ("instance_norm", {"weight": (4,)}),
        ("batch_norm", {"running_mean": (4,), "running_var": (4,), "weight": (4,)}),
    ],
)
def test_operations_refuse_other_channels_in_torchs_words(name: str, arguments: dict[str, Any]) -> None:
    x = torch.randn(BATCH, 6, 5)
    plain = {key: torch.ones(size) if isinstance(size, tuple) else size for key, size in arguments.items()}
    own = plain | {"weight": plain["weight"].expand(BATCH, 4).requires_grad_()}
    with pytest.raises(RuntimeError) as expected:
        getattr(F, name)(x, **plain)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
        getattr(enn.functional, name)(x, **own)


# --- weights that really differ by sample ---------------------------------------------------------------------


def no_renorm(case: Case) -> bool:
    """max_norm changes the weight in place, so it needs the one weight that is there."""
    return case.has_parameters() and "max_norm" not in case.name


def differing(case: Case) -> dict[str, Tensor]:
    """Each sample's own weights."""
    set_seed(23)
    return {
        name: (p + 0.3 * torch.randn(BATCH, *p.shape)).detach().requires_grad_()
        for name, p in case.module().named_parameters()
    }


def dense_gradients(module: nn.Module) -> nn.Module:
    """A row of a weight cannot take a sparse gradient."""
    if hasattr(module, "sparse"):
        module.sparse = False
    return module


def loop_with_weights(case: Case, weights: dict[str, Tensor], call: Call) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and gradients by the weights and by the inputs."""
    module = dense_gradients(case.oracle())
    outputs = []
    for i in range(BATCH):
        own = {name: w[i] for name, w in weights.items()}
        alone = case.take(call, i).map(Tensor.contiguous)
        outputs.append(torch.func.functional_call(module, own, alone.args, dict(alone.kwargs)))
    output = torch.cat(outputs)
    grads = torch.autograd.grad(sample_losses(output).sum(), [*weights.values(), *call.floats()])
    return output.detach(), [dense(g) for g in grads]


def on_and_off(case: Case) -> tuple[bool, ...]:
    """Off, a module of the user's own is the user's own code, which knows of one weight only."""
    return (True,) if case in GENERAL else (True, False)


@pytest.mark.parametrize(
    ("case", "on"),
    [
        pytest.param(case, on, id=f"{case.name}-{'on' if on else 'off'}")
        for case in CASES
        if no_renorm(case)
        for on in on_and_off(case)
    ],
)
def test_weights_that_differ_by_sample(case: Case, on: bool) -> None:
    weights, call = differing(case), case.inputs(BATCH).requires_grad()
    model = expanded(case).per_sample(on)
    output = torch.func.functional_call(model, weights, call.args, dict(call.kwargs))
    grads = torch.autograd.grad(sample_losses(output).sum(), [*weights.values(), *call.floats()])
    expected, expected_grads = loop_with_weights(case, weights, call)
    assert_close(output, expected)
    assert_all_close(grads, expected_grads)
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())


def conv_arguments(m: Any) -> dict[str, Any]:
    return {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "groups": m.groups}


def conv_transpose_arguments(m: Any) -> dict[str, Any]:
    return {**conv_arguments(m), "output_padding": m.output_padding}


def embedding_arguments(m: Any) -> dict[str, Any]:
    names = ("padding_idx", "scale_grad_by_freq", "sparse")
    return {name: getattr(m, name) for name in names}


def embedding_bag_arguments(m: Any) -> dict[str, Any]:
    return {**embedding_arguments(m), "mode": m.mode, "include_last_offset": m.include_last_offset}


# class -> name of the operation, its arguments beside input and weights
OPERATIONS: dict[type[nn.Module], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    nn.Linear: ("linear", lambda m: {}),
    nn.Bilinear: ("bilinear", lambda m: {}),
    nn.Conv1d: ("conv1d", conv_arguments),
    nn.Conv2d: ("conv2d", conv_arguments),
    nn.Conv3d: ("conv3d", conv_arguments),
    nn.ConvTranspose1d: ("conv_transpose1d", conv_transpose_arguments),
    nn.ConvTranspose2d: ("conv_transpose2d", conv_transpose_arguments),
    nn.ConvTranspose3d: ("conv_transpose3d", conv_transpose_arguments),
    nn.Embedding: ("embedding", embedding_arguments),
    nn.EmbeddingBag: ("embedding_bag", embedding_bag_arguments),
    nn.LayerNorm: ("layer_norm", lambda m: {"normalized_shape": m.normalized_shape, "eps": m.eps}),
    nn.RMSNorm: ("rms_norm", lambda m: {"normalized_shape": m.normalized_shape, "eps": m.eps}),
    nn.GroupNorm: ("group_norm", lambda m: {"num_groups": m.num_groups, "eps": m.eps}),
    nn.PReLU: ("prelu", lambda m: {}),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), ("instance_norm", lambda m: {"eps": m.eps})
    ),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        ("batch_norm", lambda m: {"running_mean": m.running_mean, "running_var": m.running_var, "eps": m.eps}),
    ),
}


def has_operation(case: Case) -> bool:
    """Whether the functional form has what the module does."""
    return (
        no_renorm(case)
        and case.torch_class in OPERATIONS
        and getattr(case.build(), "padding_mode", "zeros") == "zeros"
        and not case.name.endswith(("output_size", "track_eval"))
    )


def operate(functional: Any, case: Case, weights: dict[str, Tensor], call: Call) -> Tensor:
    name, arguments = OPERATIONS[case.torch_class]
    inputs = list(call.args)
    if name in ("embedding", "embedding_bag"):
        inputs.insert(1, weights["weight"])
        weights = {}
    if name in ("bilinear", "prelu"):  # torch's own take no keywords here
        return getattr(functional, name)(*inputs, *weights.values())
    return getattr(functional, name)(*inputs, **weights, **arguments(case.module()), **call.kwargs)


@where(has_operation)
def test_operation_with_weights_that_differ_by_sample(case: Case) -> None:
    weights, call = differing(case), case.inputs(BATCH).requires_grad()
    output = operate(enn.functional, case, weights, call)
    grads = torch.autograd.grad(sample_losses(output).sum(), [*weights.values(), *call.floats()])
    expected, expected_grads = loop_with_weights(case, weights, call)
    assert_close(output, expected)
    assert_all_close(grads, expected_grads)


@where(has_operation)
def test_operation_with_expanded_weights(case: Case) -> None:
    module, call = case.module(), case.inputs(BATCH).requires_grad()
    shared = dict(module.named_parameters())
    weights = {name: p.detach().expand(BATCH, *p.shape).requires_grad_() for name, p in shared.items()}
    output = operate(enn.functional, case, weights, call)
    assert_close(output, operate(torch.nn.functional, case, shared, call).detach(), tol=1e-12)
    grads = torch.autograd.grad(sample_losses(output).sum(), list(weights.values()))
    assert_close_rows(
        dict(zip(weights, grads, strict=True)), loop(case.oracle(), case.inputs(BATCH), BATCH, take=case.take)
    )


@where(lambda case: has_operation(case) and case.torch_class is not nn.EmbeddingBag)
def test_operation_with_a_parameter_that_all_samples_share(case: Case) -> None:
    """As a frozen one, of which `expanded` gives the parameter itself, beside one that is expanded."""
    module, call = case.module(), case.inputs(BATCH)
    own = differing(case)
    for name, parameter in module.named_parameters():
        alone = parameter.detach()
        output = operate(enn.functional, case, own | {name: alone}, call)
        expected = operate(enn.functional, case, own | {name: alone.expand(BATCH, *alone.shape)}, call)
        assert_close(output, expected.detach(), tol=1e-12)


@where(has_operation)
def test_operation_twice_differentiated(case: Case) -> None:
    """Weights that differ: the squared norms of their gradients, differentiated by the weights and the inputs."""
    weights, call = differing(case), case.inputs(BATCH).requires_grad()
    wanted = [*weights.values(), *call.floats()]
    loss = sample_losses(operate(enn.functional, case, weights, call)).sum()
    grads = torch.autograd.grad(loss, wanted, create_graph=True)
    actual = torch.autograd.grad(sum((g**2).sum() for g in grads), wanted, allow_unused=True, materialize_grads=True)
    module, total = dense_gradients(case.twice_differentiable()), torch.zeros(())
    for i in range(BATCH):
        own = {name: w[i] for name, w in weights.items()}
        alone = case.take(call, i).map(Tensor.contiguous)
        loss = sample_losses(torch.func.functional_call(module, own, alone.args, dict(alone.kwargs)), i).sum()
        grads = torch.autograd.grad(loss, [*own.values(), *alone.floats()], create_graph=True)
        total = total + sum((dense(g) ** 2).sum() for g in grads)
    expected = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    assert_all_close(actual, [dense(g) for g in expected])


@pytest.mark.parametrize("at_once", [1 << 20, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), (16, 16)),
        (nn.Conv2d(32, 256, 3, stride=2, dilation=2), (9, 12)),
        (nn.Conv2d(64, 128, 3, groups=2), (6, 6)),
        (nn.Conv2d(64, 64, 1), (20, 20)),
        (nn.ConvTranspose2d(64, 64, 3, stride=2), (6, 6)),
        (nn.ConvTranspose2d(32, 32, 3, stride=2, dilation=3, output_padding=2), (5, 6)),  # more than a stride is unread
    ],
    ids=str,
)
def test_large_convolutions(
    layer: nn.Module, size: tuple[int, int], dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to the rows that a shape may take, for all samples at once or a few; the small cases take but one."""
    monkeypatch.setattr(cost, "GROUPED_NUMEL", at_once)
    monkeypatch.setattr(cost, "COLUMNS_NUMEL", at_once)
    layer = layer.double()
    call = Call((torch.randn(BATCH, layer.in_channels, *size, dtype=torch.float64),))
    expected = loop(layer, call, BATCH)
    model = enn.convert(layer.to(dtype)).per_sample()
    (total_loss(model, Call((call.args[0].to(dtype),))) / BATCH).backward()
    rows = {name: dense(p.grad_sample).double() for name, p in model.named_parameters()}
    assert_close_rows(rows, expected, 1e-9 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [2, 3])
def test_batch_norm_leaves_channels_where_they_are(dims: int, affine: bool) -> None:
    memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
    norm = (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(4, affine=affine)
    with torch.no_grad():
        for statistic in (norm.running_mean, norm.running_var, *norm.parameters()):
            statistic.copy_(torch.rand_like(statistic) + 0.5)
    module = nn.Sequential((nn.Conv2d if dims == 2 else nn.Conv3d)(4, 4, 1), norm).eval()
    x = torch.randn(BATCH, 4, *[5] * dims).to(memory_format=memory_format)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    assert model[1](x).is_contiguous(memory_format=memory_format)
    total_loss(model, Call((x,))).backward()
    assert_close_rows({name: p.grad_sample for name, p in model.named_parameters()}, loop(module, Call((x,)), BATCH))


@where(lambda case: case.has_parameters() and case not in GENERAL)  # a vmap's outputs are views
def test_outputs_are_views_only_where_torchs_are(case: Case) -> None:
    """What comes out may be changed in place, also where a wrapper around the layer looks at views."""
    call = case.inputs(BATCH)
    theirs, ours = call.on(case.module()), call.on(expanded(case))
    assert theirs._is_view() or not ours._is_view()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_permuted_memory_give_no_views(norm: type[nn.Module]) -> None:
    layer = enn.convert(norm(4)).per_sample()
    assert not layer(torch.randn(5, BATCH, 4).transpose(0, 1))._is_view()


LAID_OUT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 6),
    "linear without bias": lambda: nn.Linear(4, 6, bias=False),
    "layer norm": lambda: nn.LayerNorm(4),
    "layer norm over steps": lambda: nn.LayerNorm((5, 4)),
    "rms norm": lambda: nn.RMSNorm(4),
}


class BehindRNN(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rnn, self.layer = nn.GRU(4, 4, batch_first=True), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rnn(x)[0]).view(len(x), -1)


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_comes_behind_a_recurrent_layer_lies_as_torch_lays_it(name: str) -> None:
    """What an RNN returns with `batch_first` lies in memory with time first; users view what a layer makes of it."""
    layer, x = LAID_OUT[name](), torch.randn(5, BATCH, 4).transpose(0, 1)
    assert enn.convert(layer).per_sample()(x).stride() == layer(x).stride()
    module, call = BehindRNN(layer), Call((torch.randn(BATCH, 5, 4),))
    rows = rows_after(enn.convert(module).per_sample(loss_reduction="sum"), call, BATCH)
    assert_close_rows(rows, loop(module, call, BATCH))


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_is_looked_up_lies_as_torch_lays_it(batch_first: bool) -> None:
    """Whatever the index is a view of: of what comes out users take views."""
    index = torch.randint(13, (4, BATCH))
    module, index = nn.Sequential(nn.Embedding(13, 6)), index.t() if batch_first else index
    model = enn.convert(module).per_sample(batch_first=batch_first)
    assert model(index).stride() == module(index).stride()


POSITIONWISE = [
    (lambda: nn.Linear(4, 5), (4,)),
    (lambda: nn.Linear(4, 5, bias=False), (2, 4)),
    (lambda: nn.LayerNorm(4), (4,)),
    (lambda: nn.LayerNorm((3, 4)), (3, 4)),
    (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    (lambda: nn.RMSNorm(4), (4,)),
    (lambda: nn.RMSNorm((3, 4)), (2, 3, 4)),
    (lambda: nn.PReLU(), (4,)),
]


@pytest.mark.parametrize("objective", [total_loss, gradient_penalty])
@pytest.mark.parametrize("lies_so", [True, False])
@pytest.mark.parametrize(("build", "shape"), POSITIONWISE)
def test_time_first_in_memory(
    build: Callable[[], nn.Module], shape: tuple[int, ...], lies_so: bool, objective: Objective
) -> None:
    """Samples second: results lie in memory as torch's, and the rows are right, also where they do not."""

    def samples_first(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return objective(lambda x: module(x.transpose(0, 1)).transpose(0, 1), call, first)

    set_seed(7)
    module, x = nn.Sequential(nn.PReLU(), build()), torch.randn(BATCH, 3, *shape)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if lies_so else x
    model = enn.convert(module).per_sample(batch_first=False, loss_reduction="sum")
    ours = model(x.transpose(0, 1))
    assert ours.stride() == torch.empty(ours.shape).stride()
    assert not ours._is_view()
    samples_first(model, Call((x,))).backward()
    assert_close_rows(rows_of(model), loop(module, Call((x,)), BATCH, objective=samples_first))


def test_means_of_bags_take_the_weight_s_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        model, bags = nn.EmbeddingBag(13, 6, mode="mean").double(), torch.randint(13, (5, 3))
        model(bags).sin().sum().backward()
        found = enn.convert(model).per_sample(loss_reduction="sum")
        found(bags).sin().sum().backward()
        torch.testing.assert_close(found.weight.grad, model.weight.grad, rtol=1e-12, atol=1e-14)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["embedding", "bags", "maxima of bags by offsets"])
def test_operations_scale_entries_down(kind: str, shared: bool) -> None:
    """Of each sample's own weight those that the sample looks up; of one weight those that any of them does."""
    weight = torch.randn(7, 4).expand(BATCH, 7, 4) if shared else torch.randn(BATCH, 7, 4)
    alone, index = [own.clone() for own in weight], torch.randint(7, (BATCH, 3))
    name, options = ("embedding", {"norm_type": 1.0}) if kind == "embedding" else ("embedding_bag", {})
    options["max_norm"], samples, given = 0.5, index.split(1), {"input": index}
    if "offsets" in kind:
        options["mode"], index = "max", index.flatten()
        samples, given = (
            [index[None, :4], index[None, 4:5], index[None, 5:]],
            {"input": index, "offsets": torch.tensor([0, 4, 5])},
        )
    expected = [getattr(F, name)(own_index, own, **options) for own_index, own in zip(samples, alone, strict=True)]
    assert_close(getattr(enn.functional, name)(weight=weight, **given, **options), torch.cat(expected))
    if not shared:
        assert_close(weight, torch.stack(alone))


def test_frequencies_in_bags_of_other_lengths() -> None:
    """A shorter one is filled up with entry 0, which does not count."""
    model = enn.convert(nn.EmbeddingBag(3, 2, mode="sum", scale_grad_by_freq=True)).per_sample(loss_reduction="sum")
    model(torch.tensor([1, 0, 1, 0, 2]), torch.tensor([0, 3, 4])).sum().backward()
    looked_up = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 1]])
    assert_close(model.weight.grad_sample, looked_up[:, :, None].expand(3, 3, 2))


def test_a_padding_idx_from_the_end() -> None:
    """As torch's own operation counts it."""
    weight, index = torch.randn(7, 4, requires_grad=True), torch.tensor([[1, 6], [6, 0]])
    (actual,) = torch.autograd.grad(enn.functional.embedding(index, weight.expand(2, 7, 4), -1).sum(), weight)
    (expected,) = torch.autograd.grad(F.embedding(index, weight, -1).sum(), weight)
    assert_close(actual, expected)


@pytest.mark.parametrize("lengths", [(3, 5, 2), (4,), (1, 1)])
@pytest.mark.parametrize("sizes", [(4, 5, 2), (30, 20, 25)])
def test_sequences_as_a_jagged_tensor(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Each as it is alone, whether its rows are dense from the start or factored."""
    module = nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    sequences = [torch.randn(length, sizes[0]) for length in lengths]
    model(torch.nested.nested_tensor(sequences, layout=torch.jagged)).values().sin().sum().backward()
    alone = [torch.autograd.grad(module(x).sin().sum(), list(module.parameters())) for x in sequences]
    expected = dict(zip(rows_of(model), map(torch.stack, zip(*alone, strict=True)), strict=True))
    assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_as_a_nested_tensor(mode: str) -> None:
    """They are those of the same entries by offsets."""
    layer, words, sizes = nn.EmbeddingBag(7, 4, mode=mode), torch.tensor([1, 2, 2, 5, 0, 3]), [3, 1, 2]
    of_entries = [torch.arange(6.0)] if mode == "sum" else []  # what each counts for
    nested = [torch.nested.nested_tensor(list(x.split(sizes)), layout=torch.jagged) for x in (words, *of_entries)]
    calls = (
        Call((nested[0], None, *nested[1:])),
        Call((words, torch.tensor([0, 3, 4]), *of_entries)),
    )
    actual, expected = (rows_after(enn.convert(layer).per_sample(), call, BATCH) for call in calls)
    assert_close_rows(actual, {name: rows.dense() for name, rows in expected.items()})


@pytest.mark.parametrize("samples", [1, 3])
def test_a_permuted_gradient_of_batch_norm(samples: int) -> None:
    """In eval mode. For a single sample torch's own is wrong; those of several are right, and tell."""
    module, mixed = nn.BatchNorm2d(8).eval(), torch.randn(5, 8)
    module.running_mean.normal_()
    model, x = enn.convert(module).per_sample(loss_reduction="sum"), torch.randn(3, 8, 6, 6, requires_grad=True)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return torch.einsum("bcn,oc->bno", module(x).flatten(2), mixed).square().sum()

    whole = torch.autograd.grad(loss(module, x), [*module.parameters(), x])
    parts = []
    for part in x.split(samples):
        model.zero_grad()
        x.grad = None
        loss(model, part).backward()
        parts.append([model.weight.grad_sample.sum(0), model.bias.grad_sample.sum(0), x.grad])
    assert_all_close([sum(each) for each in zip(*parts, strict=True)], whole)


def test_a_gradient_of_batch_norm_with_positions_first() -> None:
    """In eval mode, before what takes `(T, B, C)`: to torch's kernel the whole batch is one sample."""
    module, by = nn.BatchNorm2d(3).eval(), torch.randn(4, 4, 3)
    module.running_mean.normal_()
    model, x = enn.convert(module).per_sample(loss_reduction="sum"), torch.randn(4, 3, 2, 2, requires_grad=True)
    (model(x).flatten(2).permute(2, 0, 1).contiguous() * by).sum().backward()
    g = by.permute(1, 2, 0).unflatten(2, (2, 2))
    scale = torch.rsqrt(module.running_var + module.eps).view(3, 1, 1)
    xhat = (x.detach() - module.running_mean.view(3, 1, 1)) * scale
    found = [model.weight.grad_sample, model.bias.grad_sample, x.grad]
    assert_all_close(found, [(g * xhat).sum((2, 3)), g.sum((2, 3)), g * scale * module.weight.detach().view(3, 1, 1)])
