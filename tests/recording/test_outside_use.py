"""Weights used outside of their module: `expanded(weight)`, and the operations that take it with and without rows."""

import copy
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, notes_on, rows_of, sample_losses, total_loss

B = 3


def words(samples: int = B, seed: int = 0) -> Tensor:
    return torch.randint(0, 7, (samples, 4), generator=torch.Generator().manual_seed(seed))


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Uses(nn.Module):
    """Two layers, and a forward that uses a weight of theirs itself."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.use = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def tied_head(m: Any, x: Tensor) -> Tensor:
    return enn.functional.linear(m.norm(m.tok(x)), enn.expanded(m.tok.weight))


def tied_autoencoder(m: Any, x: Tensor) -> Tensor:
    return enn.functional.linear(m.encoder(x).tanh(), enn.expanded(m.encoder.weight).transpose(-1, -2))


def cosine_head(m: Any, x: Tensor) -> Tensor:
    directions = F.normalize(enn.expanded(m.head.weight), dim=-1)
    return m.head(x) + enn.functional.linear(F.normalize(x, dim=-1), directions)


def plain_product(m: Any, x: Tensor) -> Tensor:
    return m.encoder(x) @ enn.expanded(m.encoder.weight)


def penalty(m: Any, x: Tensor) -> Tensor:
    return m.head(x) + enn.expanded(m.head.weight).square().sum((-2, -1))[..., None, None]


def only_outside(m: Any, x: Tensor) -> Tensor:
    return enn.functional.linear(m.encoder(x), enn.expanded(m.head.weight), enn.expanded(m.head.bias))


def looked_up_in_the_head(m: Any, x: Tensor) -> Tensor:
    return m.head(enn.functional.embedding(x, enn.expanded(m.head.weight)).sin())


def shared_kernel(m: Any, x: Tensor) -> Tensor:
    return enn.functional.conv_transpose2d(m.conv(x).tanh(), enn.expanded(m.conv.weight), padding=1)


def shared_bilinear(m: Any, x: Tensor) -> Tensor:
    return m.bilinear(x, x) + enn.functional.bilinear(x, x.sin(), enn.expanded(m.bilinear.weight))


USES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "tied head": (lambda: Uses(tied_head, tok=nn.Embedding(7, 5), norm=nn.LayerNorm(5)), Call((words(),))),
    "tied autoencoder": (lambda: Uses(tied_autoencoder, encoder=nn.Linear(5, 2)), Call((values(B, 4, 5),))),
    "cosine head": (lambda: Uses(cosine_head, head=nn.Linear(5, 2)), Call((values(B, 4, 5),))),
    "plain product": (lambda: Uses(plain_product, encoder=nn.Linear(5, 2)), Call((values(B, 4, 5),))),
    "penalty": (lambda: Uses(penalty, head=nn.Linear(5, 2)), Call((values(B, 4, 5),))),
    "only outside": (
        lambda: Uses(only_outside, encoder=nn.Linear(5, 2), head=nn.Linear(2, 6)),
        Call((values(B, 4, 5),)),
    ),
    "embedding": (lambda: Uses(looked_up_in_the_head, head=nn.Linear(5, 7)), Call((words(),))),
    "convolution": (lambda: Uses(shared_kernel, conv=nn.Conv2d(2, 5, 3, padding=1)), Call((values(B, 2, 6, 6),))),
    "bilinear": (lambda: Uses(shared_bilinear, bilinear=nn.Bilinear(5, 5, 2)), Call((values(B, 4, 5),))),
    "parametrized": (
        lambda: Uses(tied_autoencoder, encoder=parametrizations.weight_norm(nn.Linear(5, 2))),
        Call((values(B, 4, 5),)),
    ),
}
every_use = pytest.mark.parametrize(("make", "call"), USES.values(), ids=USES)


def assert_right(module: nn.Module, model: nn.Module, call: Call, samples: int = B) -> None:
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples))
    for name, grad in grads_of(model).items():
        assert_close(grad, rows_of(model)[name].sum(0), name=name)


@every_use
def test_rows_equal_the_loop(make: Callable[[], nn.Module], call: Call) -> None:
    module = make()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    assert_close(call.on(model), call.on(module).detach())
    assert_right(module, model, call)


@every_use
def test_off_has_the_same_bits(make: Callable[[], nn.Module], call: Call) -> None:
    module = make()
    model = enn.convert(module).per_sample().per_sample(False)
    assert torch.equal(call.on(model), call.on(module))
    total_loss(model, call).backward()
    total_loss(module, call).backward()
    assert all(torch.equal(grad, grads_of(module)[name]) for name, grad in grads_of(model).items())


@every_use
def test_without_grad_nothing_is_expanded(make: Callable[[], nn.Module], call: Call) -> None:
    module = make()
    model = enn.convert(module).per_sample()
    with torch.no_grad():
        assert torch.equal(call.on(model), call.on(module))


@every_use
def test_revert_and_copies(make: Callable[[], nn.Module], call: Call) -> None:
    module = make()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert torch.equal(call.on(enn.revert(model)), call.on(module))
    assert_right(module, copy.deepcopy(model), call)
    if not any(map(parametrize.is_parametrized, model.modules())):  # torch pickles no others
        assert_right(module, pickle.loads(pickle.dumps(model)), call)


class Head(nn.Module):
    """A language model without a body, in plain torch."""

    def __init__(self, *, look_up: bool = True) -> None:
        super().__init__()
        self.tok, self.look_up = nn.Embedding(60, 16), look_up

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) if self.look_up else self.tok(x).detach()
        return F.linear(h.sin(), self.tok.weight)


def test_tied_head_keeps_its_factors_and_norms_have_the_cross_term() -> None:
    """The rows of a tied weight are a sum of two kinds of factors; their product is in the norm."""
    call, in_torch = Call((words(B),)), Head()
    module = Uses(lambda m, x: enn.functional.linear(m.tok(x).sin(), enn.expanded(m.tok.weight)), tok=in_torch.tok)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    rows = model.tok.weight.grad_sample
    assert isinstance(rows, enn.FactoredTensor)
    assert not rows.is_dense
    norms = enn.per_sample_grads(model).norms()
    assert not rows.is_dense
    expected = loop(in_torch, call, B)["tok.weight"]
    assert_close(norms, expected.flatten(1).norm(dim=1))
    assert_close(rows, expected)
    without_look_up = Head(look_up=False)
    without_look_up.load_state_dict(in_torch.state_dict())
    head = loop(without_look_up, call, B)["tok.weight"]
    apart = head.flatten(1).square().sum(1) + (expected - head).flatten(1).square().sum(1)
    assert ((norms.square() - apart).abs() > 1e-3).all()


def test_second_derivatives() -> None:
    make, call = USES["tied autoencoder"]
    module = make()
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def objective(m: Callable[..., Any], c: Call, first: int) -> Tensor:
        x = c.args[0].detach().requires_grad_()
        (g,) = torch.autograd.grad(sample_losses(m(x), first).sum(), x, create_graph=True)
        return g.square().sum()

    objective(model, call, 0).backward()
    assert_close_rows(rows_of(model), loop(module, call, B, objective=objective))


def test_in_the_loss() -> None:
    """After the forward: the samples are those of the last one."""
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6))
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def objective(m: Any, call: Call, first: int) -> Tensor:
        hidden = m[1](m[0](*call.args))
        logits = enn.functional.linear(hidden, enn.expanded(m[2].weight), enn.expanded(m[2].bias))
        return sample_losses(logits, first).sum() + sample_losses(m(*call.args), first).sum()

    call = Call((values(B, 5),))
    model(*call.args)
    objective(model, call, 0).backward()
    assert_close_rows(rows_of(model), loop(module, call, B, objective=objective))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.encoder, self.use_reentrant = nn.Linear(5, 2), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.decode, self.encoder(x), use_reentrant=self.use_reentrant)

    def decode(self, h: Tensor) -> Tensor:
        return enn.functional.linear(h.tanh(), enn.expanded(self.encoder.weight).mT)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint(use_reentrant: bool) -> None:
    module, call = Checkpointed(False), Call((values(B, 4, 5),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    model.use_reentrant = use_reentrant
    assert_right(module, model, call)


def test_in_the_general_rule() -> None:
    """A module with a parameter of its own is mapped over the samples, and each weight in it is one sample's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.scale = nn.Embedding(7, 5), nn.Parameter(torch.rand(7))

        def forward(self, x: Tensor) -> Tensor:
            return enn.functional.linear(self.tok(x), enn.expanded(self.tok.weight)) * self.scale

    module = Scaled()
    assert_right(module, enn.convert(module).per_sample(loss_reduction="sum"), Call((words(),)))


def test_frozen_weight() -> None:
    make, call = USES["tied head"]
    module = make()
    module.tok.weight.requires_grad_(False)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    assert_right(module, model, call)
    assert model.tok.weight.grad_sample is None


@pytest.mark.parametrize("before", [True, False])
def test_a_frozen_weight_is_expanded_to_itself(before: bool) -> None:
    model = nn.Linear(3, 2).requires_grad_(not before)
    model = enn.convert(model).per_sample()
    model(torch.randn(4, 3))
    model.weight.requires_grad_(False)
    assert enn.expanded(model.weight) is model.weight


def test_weights_that_differ_by_sample() -> None:
    make, call = USES["tied autoencoder"]
    module = make()
    model = enn.convert(module).per_sample()
    weights = {name: values(B, *p.shape, seed=5) for name, p in module.named_parameters()}
    output = functional_call(model, weights, call.args)
    for i in range(B):
        one = {name: weight[i] for name, weight in weights.items()}
        assert_close(output[i], functional_call(module, one, (call.args[0][i : i + 1],))[0])


def test_two_passes_and_two_uses() -> None:
    make, _ = USES["tied head"]
    module = make()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    first, second = Call((words(3),)), Call((words(2, 5),))
    (total_loss(model, first) + total_loss(model, second)).backward()
    both = [loop(module, first, 3), loop(module, second, 2)]
    assert_close_rows(rows_of(model), {name: torch.cat([rows[name] for rows in both]) for name in both[0]})


def test_without_accumulation_and_clipping() -> None:
    make, call = USES["tied head"]
    module = make()
    model = enn.convert(module).per_sample(loss_reduction="sum", accumulate_grad=False)
    total_loss(model, call).backward()
    expected = loop(module, call, B)
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in expected.values()]).norm(dim=0)
    assert_close(enn.clip_grad_sample_norms_(model, 1.0), norms)
    weights = (1.0 / norms).clamp(max=1.0)
    for name, grad in grads_of(model).items():
        assert_close(grad, torch.einsum("b,b...->...", weights, expected[name]), name=name)


def test_check_agrees() -> None:
    make, call = USES["tied head"]
    assert enn.check(make(), *call.args).ok


def test_the_refusal_names_the_remedy() -> None:
    module = Uses(lambda m, x: F.linear(m.tok(x), m.tok.weight), tok=nn.Embedding(7, 5))
    model = enn.convert(module).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"tok\.weight: .*also used outside.*expanded_nn\.expanded\(weight\)"):
        total_loss(model, Call((words(),))).backward()


@pytest.mark.filterwarnings("ignore:.*runs sample by sample:expanded_nn.PerSampleWarning")
def test_in_a_branch_that_is_taken_later() -> None:
    """The backward refuses it the first time; then the forward is looked at anew."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.encoder(x) @ m.encoder.weight if x.shape[1] > 3 else m.encoder(x)

    plain = Uses(forward, encoder=nn.Linear(4, 3)).double()
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    total_loss(model, Call((values(B, 3, 4),))).backward()
    model.zero_grad()
    call = Call((values(B, 5, 4),))
    with pytest.raises(enn.PerSampleError, match="run the step again"):
        total_loss(model, call).backward()
    for _ in range(2):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(plain, call, B))


def test_before_a_forward_is_an_error() -> None:
    make, call = USES["tied head"]
    model = enn.convert(make()).per_sample()
    total_loss(model, call).backward()
    with pytest.raises(enn.PerSampleError, match=r"no forward since the last backward.*Call the model first"):
        enn.expanded(model.tok.weight)


def test_weight_of_no_model() -> None:
    weight = nn.Parameter(values(2, 5))
    assert enn.expanded(weight) is weight
    assert torch.equal(enn.functional.linear(values(B, 5), weight), F.linear(values(B, 5), weight))


@pytest.mark.parametrize("shape", [(B * 4, 5), (1, 4, 5)])
def test_rows_that_are_no_samples_are_an_error(shape: tuple[int, ...]) -> None:
    model = enn.convert(Uses(tied_autoencoder, encoder=nn.Linear(5, 2))).per_sample()
    model(values(B, 4, 5))
    with pytest.raises(enn.PerSampleError, match=r"functional\.linear: the input has shape.*unflatten a folded batch"):
        enn.functional.linear(values(*shape), enn.expanded(model.encoder.weight))


class Ignores(torch.autograd.Function):
    """It takes a weight, and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_a_function_that_gives_the_weight_no_gradient() -> None:
    layers = {"head": nn.Linear(4, 2), "other": nn.Linear(4, 2)}
    model = enn.convert(Uses(lambda m, x: m.head(Ignores.apply(x, enn.expanded(m.other.weight))), **layers))
    x = values(3, 4)
    model.per_sample(loss_reduction="sum")(x).sum().backward()
    assert model.other.weight.grad is None
    assert model.other.weight.grad_sample is None
    assert_close(model.head.weight.grad_sample, x[:, None].expand(3, 2, 4))


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_a_weight_that_would_broadcast_with_another_forward(sizes: tuple[int, int]) -> None:
    """Used after both forwards it belongs to the last one."""
    model = enn.convert(nn.ModuleList([nn.Linear(2, 1)])).per_sample()
    outputs = [model[0](torch.randn(size, 2)) for size in sizes]
    with pytest.warns(enn.PerSampleWarning, match=r"it has \d row.* forwards of \d sample.*no backward.*one_pass"):
        weight = enn.expanded(model[0].bias)
    (outputs[0] * weight).sum().backward()
    with enn.one_pass(model, 1):  # says what it belongs to
        (model[0](torch.randn(1, 2)) * enn.expanded(model[0].bias)).sum().backward()
    outputs = [model[0](torch.randn(size, 2)) for size in (4, 2)]  # torch's own error says that sizes do not fit
    enn.expanded(model[0].bias)


class KeepsItsDistribution(nn.Module):
    """A policy whose method uses a parameter, and keeps what it has made in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))
        self.kept = SimpleNamespace(distribution=None)

    def evaluate(self, x: Tensor) -> Tensor:
        self.kept.distribution = torch.distributions.Normal(self.mean(x), self.log_std.exp())
        return self.kept.distribution.log_prob(torch.ones(2)).sum(1)


def test_why_the_forward_cannot_run_sample_by_sample() -> None:
    """The backward says it with its error."""
    model = enn.convert(Uses(lambda m, x: m.policy.evaluate(x), policy=KeepsItsDistribution())).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"policy\.log_std: .* used outside of its module's forward") as info:
        model(values(3, 4)).sum().backward()
    (note,) = notes_on(info.value)
    assert re.search(r"sample by sample it is not possible either: .*keeps tensors in .*'kept'", note), note
