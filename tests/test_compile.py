"""Models in per-sample mode under `torch.compile`: their forward stays as it is, and all that holds eagerly holds.

With the mode off they compile as plain models do. A whole step in one graph is tested in test_compiled_step.py.
"""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from some import some

B = 3
# what the compiler itself warns itself of, whatever the model is
COMPILER_S_OWN = ["The .grad attribute of a Tensor", ".*should not be instantiated", "Dynamo"]
pytestmark = pytest.mark.filterwarnings(*(f"ignore:{text}" for text in COMPILER_S_OWN))


class Block(nn.Module):
    """A transformer block as it is usually written by hand."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.RMSNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, a shared row of positions, blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(7, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList([Block(8, 2), Block(8, 2)])

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index) + self.places(torch.arange(index.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    """A layer that is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(4, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.first(x))[0][:, -1])


class Scaled(nn.Module):
    """A module that holds a parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 5), nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.query = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        return self.attention(self.query(x), memory, memory, need_weights=False)[0]


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x, x.sin())


def norms() -> nn.Module:
    layers = [nn.Linear(4, 6), nn.LayerNorm(6), nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, affine=True)]
    return nn.Sequential(*layers)


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"), nn.GroupNorm(2, 4), nn.PReLU(),
        nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), nn.BatchNorm2d(3).eval(),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


WORDS = torch.tensor([[1, 2, 3, 1], [4, 4, 0, 9], [5, 6, 7, 8]])
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor | tuple[int, ...]]] = {  # the model; its input, or its shape
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), (B, 4)),
    "one layer": (lambda: nn.Linear(4, 2), (B, 5, 4)),
    "cnn": (cnn, (B, 2, 6, 6)),
    "norms": (norms, (B, 4)),
    "gpt": (GPT, WORDS),
    "encoder": (encoder, (B, 5, 8)),
    "cross attention": (CrossAttention, (B, 5, 4)),
    "bilinear": (Bilinear, (B, 4)),
    "called twice": (Twice, (B, 4)),
    "lstm": (Recurrent, (B, 5, 4)),
    "own parameter": (lambda: nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(5, 2)), (B, 4)),
    "bags": (lambda: nn.Sequential(nn.EmbeddingBag(11, 4), nn.Linear(4, 2)), WORDS),
    "weight norm": (weight_norm, (B, 4)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(case: str) -> tuple[nn.Module, Tensor]:
    make, given = CASES[case]
    torch.manual_seed(0)
    return make(), given if isinstance(given, Tensor) else torch.randn(given)


def loss_of(output: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, output[0].numel()).view(output[0].shape)
    return (output * weights).sin().flatten(1).sum(1).mean()


def step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model.zero_grad()
    loss_of(call(x)).backward()


def assert_same(one: nn.Module, other: nn.Module, what: tuple[str, ...] = ("grad_sample", "grad")) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        for kind in what:
            wanted, found = getattr(theirs, kind), getattr(mine, kind)
            assert (wanted is None) == (found is None), f"{name}.{kind}"
            if wanted is not None:
                wanted, found = (each.dense() if hasattr(each, "dense") else each for each in (wanted, found))
                torch.testing.assert_close(
                    found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
                )


@pytest.mark.parametrize("case", some([*CASES]))
def test_rows_are_those_of_the_eager_model(case: str) -> None:
    model, x = made(case)
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(inside, backend=counter)
    for batch in (x, x, x[:2], x[:1], x):
        step(eager, eager, batch)
        step(inside, compiled, batch)
        assert_same(inside, eager)
    assert not counter.graphs


def test_a_compiled_function_around_the_model() -> None:
    """What surrounds the model is compiled, the model is not."""
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: inside(x.sin()).cos(), backend=counter)
    for _ in range(3):
        step(eager, lambda x: eager(x.sin()).cos(), x)
        step(inside, compiled, x)
        assert_same(inside, eager)
    assert counter.graphs


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x * gate).tanh()


def mapped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight).relu() + bias


class Helped(nn.Module):
    """Calls two functions, one after the other, with parameters of its own or with tensors."""

    def __init__(self, own: bool, *helpers: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.helpers = nn.Linear(4, 4), nn.Linear(3, 2), helpers
        for name, shape in {"gate": (4,), "weight": (3, 4), "bias": (3,)}.items():
            values = torch.randn(shape)
            setattr(self, name, nn.Parameter(values)) if own else self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        gate, linear = self.helpers
        return self.last(linear(gate(self.first(x), self.gate), self.weight, self.bias))


@pytest.mark.parametrize("own", [True, False])
def test_compiled_functions_within_a_forward_run_as_they_are_written(own: bool) -> None:
    """Compiled under the modes of a forward they gave wrong results at first, and were compiled anew at each call."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    models = []
    for helpers in ((gated, mapped), [torch.compile(function, backend=counter) for function in (gated, mapped)]):
        torch.manual_seed(0)
        models.append(enn.convert(Helped(own, *helpers)).per_sample())
    eager, inside = models
    for size in (5, 5, 1, 7):
        x = torch.randn(size, 4)
        step(eager, eager, x)
        step(inside, inside, x)
        assert_same(inside, eager)
    assert enn.check(inside, x).ok
    a_step = enn.compile(lambda x: step(inside, inside, x), backend="eager")
    for size in (5, 5, 5):
        x = torch.randn(size, 4)
        step(eager, eager, x)
        a_step(x)
        assert_same(inside, eager)
    assert [len(family.graphs) for family in a_step._graphs.families.values()] == [1]
    assert not counter.graphs
    torch.testing.assert_close(inside.per_sample(False)(x), eager(x))
    assert counter.graphs  # with the mode off they are compiled


def test_functions_are_compiled_again_after_forwards_within_each_other_and_ones_that_fail() -> None:
    inside, other = (enn.convert(Helped(False, gated, mapped)).per_sample() for _ in range(2))
    within: list[Tensor] = []
    inside.first.register_forward_hook(lambda *_: within.append(other(torch.ones(2, 4))))
    inside(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        inside(torch.ones(2, 3))
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    torch.compile(gated, backend=counter)(torch.ones(4), torch.ones(4))
    assert counter.graphs


def test_second_derivatives() -> None:
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    for each, call in ((eager, eager), (inside, torch.compile(inside, backend="aot_eager"))):
        slopes = torch.autograd.grad(loss_of(call(x)), list(each.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    assert_same(inside, eager)


@pytest.mark.parametrize("settings", [{"loss_reduction": "sum"}, {"materialize": True}, {"accumulate_grad": False}])
def test_settings(settings: dict[str, object]) -> None:
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(**settings), enn.convert(model).per_sample(**settings)
    compiled = torch.compile(inside, backend="aot_eager")
    step(eager, eager, x)
    step(inside, compiled, x)
    assert_same(inside, eager)
    norms = [enn.clip_grad_sample_norms_(each, 0.1) for each in (eager, inside)]
    torch.testing.assert_close(*norms)
    assert_same(inside, eager, ("grad",))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_alone(kind: type[nn.RNNBase]) -> None:
    """The compiler leaves their forward out, and would compile each function that it calls."""
    torch.manual_seed(0)
    model, x = kind(4, 3, batch_first=True), torch.randn(B, 5, 4)
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    for _ in range(2):
        step(eager, lambda x: eager(x)[0], x)
        step(inside, lambda x: compiled(x)[0], x)
        assert_same(inside, eager)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_with_the_mode_off(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(4, 3, batch_first=True), torch.randn(B, 5, 4)
    model = enn.convert(nn.ModuleList([layer]))[0]
    assert torch.equal(torch.compile(model, backend="aot_eager")(x)[0], layer(x)[0])


def test_the_model_s_own_compile() -> None:
    model, x = made("gpt")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    inside.compile(backend="aot_eager")
    step(eager, eager, x)
    step(inside, inside, x)
    assert_same(inside, eager)


def test_passes_that_end_in_one_backward_and_batches_of_other_sizes() -> None:
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    for one, two in ((x, x[:2]), (x[:1], torch.cat([x, x]))):
        for each, call in ((eager, eager), (inside, compiled)):
            each.zero_grad()
            (loss_of(call(one)) + loss_of(call(two))).backward()
        assert_same(inside, eager)


def test_empty_batch() -> None:
    model, x = made("mlp")
    inside = enn.convert(model).per_sample()
    torch.compile(inside, backend="aot_eager")(x[:0]).sum().backward()
    assert inside[0].weight.grad_sample.shape == (0, 5, 4)


def test_backwards_on_one_graph_and_accumulation() -> None:
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    for call in (eager, torch.compile(inside, backend="aot_eager")):
        loss = loss_of(call(x))
        loss.backward(retain_graph=True)
        loss.backward()
        loss_of(call(x[:2])).backward()
    assert_same(inside, eager)
    assert inside[0].weight.grad_sample.shape[0] == B + 2


def test_frozen_layers_and_no_grad() -> None:
    model, x = made("gpt")
    for block in model.blocks:
        block.requires_grad_(False)
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
    step(eager, eager, x)
    step(inside, compiled, x)
    assert_same(inside, eager)
    assert inside.blocks[0].up.weight.grad_sample is None


def test_forward_on_the_instance_is_left_there() -> None:
    model, x = made("own parameter")
    inside = enn.convert(model).per_sample()
    calls = []
    forward = inside[1].forward
    inside[1].forward = lambda each: calls.append(1) or forward(each)
    mine = inside[1].forward
    step(inside, torch.compile(inside, backend="aot_eager"), x)
    assert inside[1].forward is mine
    assert calls


def test_samples_second() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 2))
    settings = {"batch_first": False}
    eager, inside = enn.convert(model).per_sample(**settings), enn.convert(model).per_sample(**settings)
    compiled = torch.compile(inside, backend="aot_eager")
    x = torch.randn(5, B, 4)
    for call in (eager, compiled):
        loss_of(call(x).transpose(0, 1)).backward()
    assert_same(inside, eager)


def test_autocast() -> None:
    model, x = made("gpt")
    model = model.float()
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    for call in (eager, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            output = call(x).float()
        loss_of(output).backward()
    for mine, theirs in zip(inside.parameters(), eager.parameters(), strict=True):
        assert mine.grad_sample.dtype == torch.float32
        error = (mine.grad_sample - theirs.grad_sample).norm() / theirs.grad_sample.norm()
        assert error < 5 * torch.finfo(torch.bfloat16).eps


def test_gradients_of_inputs() -> None:
    model, x = made("cnn")
    inside = enn.convert(model).per_sample()
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(loss_of(torch.compile(inside, backend="aot_eager")(x)), x)
    (wanted,) = torch.autograd.grad(loss_of(model(x)), x)
    torch.testing.assert_close(found, wanted)


def test_one_row_for_all_samples() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.table(torch.ones(1, 5, 2)))

    eager, inside = (enn.convert(copy.deepcopy(model)).per_sample() for model in [Shared()] * 2)
    x = torch.randn(B, 5, 4)
    step(eager, eager, x)
    step(inside, torch.compile(inside, backend="aot_eager"), x)
    assert_same(inside, eager)


def test_bad_input_is_refused_by_name() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.flatten(0, 1))

    inside = enn.convert(Folding()).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    with pytest.raises(Exception, match=r"linear \(Linear\): input has shape \(15, 4\)"):
        compiled(torch.randn(B, 5, 4))
    assert "uses" not in inside.linear.__dict__


def test_weight_outside_of_its_module_is_refused_or_right() -> None:
    class Tied(nn.Module):
        def __init__(self, say: bool) -> None:
            super().__init__()
            self.words, self.say = nn.Embedding(11, 4), say

        def forward(self, index: Tensor) -> Tensor:
            weight = enn.expanded(self.words.weight) if self.say else self.words.weight
            return enn.functional.linear(self.words(index), weight)

    torch.manual_seed(0)
    model = Tied(say=True)
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    step(eager, eager, WORDS)
    step(inside, torch.compile(inside, backend="aot_eager"), WORDS)
    assert_same(inside, eager)
    inside = enn.convert(Tied(say=False)).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"words\.weight"):
        step(inside, torch.compile(inside, backend="aot_eager"), WORDS)


def test_attention_beyond_the_compiler_s_limit() -> None:
    """After so many shapes the compiler leaves some frames to Python, in the middle of a forward."""
    torch.manual_seed(0)
    eager, inside = (enn.convert(model).per_sample() for model in [SelfAndOther()] * 2)
    compiled = torch.compile(inside, backend="aot_eager")
    for batch, length in [(4, 3), (6, 3), (6, 5), (1, 2), (2, 1), (1, 1), (3, 3)]:
        x = torch.randn(batch, length, 6)
        step(eager, eager, x)
        step(inside, compiled, x)
        assert_same(inside, eager)


class SelfAndOther(nn.Module):
    """Attention to what has other lengths, keys and values apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 0, 0, 1), value=0.5)
        return self.attention(x, y, y * 2, need_weights=False)[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("width", [64, 128])
def test_autocast_of_large_maps(width: int, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64)).float()
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    x, compiled = torch.randn(B, 64).float(), torch.compile(inside, backend=backend)
    for call in (eager, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            output = call(x)
        assert output.dtype == torch.bfloat16
        loss_of(output.float()).backward()
    for mine, theirs in zip(inside.parameters(), eager.parameters(), strict=True):
        error = (mine.grad_sample - theirs.grad_sample).norm() / theirs.grad_sample.norm()
        assert error < 5 * torch.finfo(torch.bfloat16).eps


def test_after_a_fault_the_next_step_is_right() -> None:
    model, x = made("mlp")
    eager, inside = enn.convert(model).per_sample(), enn.convert(model).per_sample()
    compiled = torch.compile(inside, backend="aot_eager")
    output = compiled(x)
    output.register_hook(lambda g: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    step(eager, eager, x)
    step(inside, compiled, x)
    assert_same(inside, eager)


@pytest.mark.no_modes
def test_mode_off_is_one_plain_graph() -> None:
    model, x = made("gpt")
    off = enn.convert(model)
    compiled = torch.compile(off, backend="aot_eager", fullgraph=True)
    loss_of(compiled(x)).backward()
    loss_of(model(x)).backward()
    assert_same(off, model, ("grad",))


def test_copies_and_pickles_of_a_compiled_model() -> None:
    model, x = made("mlp")
    inside = enn.convert(model).per_sample()
    inside.compile(backend="aot_eager")
    step(inside, inside, x)
    for other in (copy.deepcopy(inside), pickle.loads(pickle.dumps(inside))):
        step(other, other, x)
        assert_same(other, inside)


@pytest.mark.small_rows
def test_small_layers_keep_their_factors() -> None:
    model, x = enn.convert(nn.Linear(8, 6)).per_sample(keep_factors=True), torch.randn(B, 8)
    torch.compile(model, backend="aot_eager")(x).sin().sum(1).mean().backward()
    torch.testing.assert_close(enn.per_sample_grads(model).kronecker()["weight"].A, x.t() @ x)
