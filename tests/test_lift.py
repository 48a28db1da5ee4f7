"""Modules with parameters of their own: which layers inside leave the `vmap`, and what such a module may do."""

import pickle
import warnings
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from expanded_nn.layers.general.whole_batch import WholeBatch
from expanded_nn.modules.registry import EXPANDED
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    coefficients,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    total_loss,
)

B, T, D = 3, 5, 4


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Own(nn.Module):
    """A module with a parameter of its own and layers inside."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        for name, layer in layers.items():
            self.add_module(name, layer.double())
        self.use = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


@contextmanager
def whole_batches() -> Iterator[set[str]]:
    """The names of the layers that have seen all samples at once."""
    seen: set[str] = set()
    layers = [each for each in vars(enn).values() if isinstance(each, type) and issubclass(each, enn.Expanded)]
    owners = {base for each in layers for base in each.__mro__ if "expanded_forward" in vars(base)} - {enn.Expanded}
    with pytest.MonkeyPatch.context() as patch:
        for owner in owners:
            patch.setattr(owner, "expanded_forward", noting(owner.expanded_forward, seen))
        yield seen


def noting(forward: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not any(isinstance(each, Tensor) and torch._C._functorch.is_batchedtensor(each) for each in args)
        seen.add(self.qualified_name.partition(" ")[0])
        return forward(self, *args, **kwargs)

    return call


@contextmanager
def sample_by_sample() -> Iterator[None]:
    """No forward runs on the whole batch, so that each goes through `vmap`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeBatch, "suits", lambda whole: False)
        yield


def assert_right(module: nn.Module, call: Call, samples: int = B, fast: set[str] | None = None) -> nn.Module:
    with sample_by_sample(), whole_batches() as seen:
        assert_right_rows(module, call, samples)
    assert fast is None or seen == fast
    return assert_right_rows(module, call, samples)


def assert_right_rows(module: nn.Module, call: Call, samples: int) -> nn.Module:
    model = enn.convert(module).per_sample(loss_reduction="sum")
    output = call.on(model)
    if isinstance(output, Tensor):
        assert_close(output, call.on(module).detach())
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples))
    for name, grad in grads_of(model).items():
        assert_close(grad, rows_of(model)[name].sum(0), name=name)
    return model


@pytest.mark.parametrize("samples", [1, B, T])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_with_a_gradient(batch_first: bool, samples: int) -> None:
    """Torch's fused kernels refuse it; plain torch sees that it requires one, and takes others."""
    distances = values(T, T, seed=2)

    def masked(m: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        y = m.attention(x, x, x, attn_mask=m.scale * distances, need_weights=False)[0]
        return y if batch_first else y.transpose(0, 1)

    layer = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    assert_right(Own(masked, attention=layer), features(T, 4)(samples), samples)


@dataclass
class Output:
    y: Tensor
    penalty: Any = field(init=False, default=0.0)

    @property
    def total(self) -> Tensor:
        return self.y + self.penalty + getattr(self, "more", 0.0)


def test_a_dataclass_that_the_forward_completes() -> None:
    """A field that is no argument, and an attribute that is no field; to torch's trees the class is as before."""

    def completed(m: Any, x: Tensor) -> Output:
        output = Output(m.scale * x)
        output.penalty, output.more = (m.scale * x).square(), m.linear(x)  # type: ignore[attr-defined]
        return output

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Own(completed, linear=nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x).total

    assert_right(Total(), features(3)(B))
    output = Output(values(2))
    assert tree_leaves(output) == [output]


class Counts(nn.Module):
    """Torch divides a word's gradient by how often the whole batch has it, rows by how often their sample has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(3, D, scale_grad_by_freq=True), nn.Parameter(values(D))

    def forward(self, index: Tensor) -> Tensor:
        return (self.words(index) * self.scale).sin().sum(1)


def test_gradients_that_torch_scales_by_counts() -> None:
    assert_right(Counts().double(), Call((torch.tensor([[0, 0, 1, 2, 0], [1, 1, 1, 0, 2], [2, 0, 2, 2, 2]]),)))


# --- which layers leave the vmap --------------------------------------------------------------------------------


def attention(**arguments: Any) -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True, **arguments)


def causal(steps: int = T) -> Tensor:
    return torch.ones(steps, steps, dtype=torch.bool).triu(1)


def fold(layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The layer on all positions of all samples, folded into one dimension: `(T, features)` for one sample."""
    return layer(*(x.flatten(0, 1) for x in inputs)).unflatten(0, inputs[0].shape[:2])


def single(layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The layer on each position alone, `(features,)`."""
    return torch.stack([torch.stack([layer(position) for position in sample]) for sample in x])


def squeezed(layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The layer on each sample alone, without a batch dimension."""
    return torch.stack([layer(sample) for sample in x])


def own_mask(m: Any, x: Tensor) -> Tensor:
    """A mask made of the sample's own values, one for each head."""
    mask = (x @ x.mT).repeat_interleave(2, 0)
    return m.scale * m.layer(x, x, x, attn_mask=mask)[0]


def features(*shape: int) -> Callable[[int], Call]:
    return lambda samples: Call((values(samples, *shape),))


def indices(*shape: int) -> Callable[[int], Call]:
    return lambda samples: Call((torch.randint(0, 7, (samples, *shape), generator=torch.Generator().manual_seed(3)),))


Case = tuple[Callable[..., Any], Callable[[], nn.Module], Callable[[int], Call], bool]
ONE_LAYER: dict[str, Case] = {
    # how the layer is called, the layer, the input, whether it sees the whole batch
    "linear": (lambda m, x: m.scale * m.layer(x), lambda: nn.Linear(D, 6), features(T, D), True),
    "linear, by keyword": (lambda m, x: m.scale * m.layer(input=x), lambda: nn.Linear(D, 6), features(T, D), True),
    "linear, no batch dimension": (
        lambda m, x: m.scale * fold(m.layer, x),
        lambda: nn.Linear(D, 6),
        features(T, D),
        True,
    ),
    "linear, one position": (
        lambda m, x: m.scale * single(m.layer, x),
        lambda: nn.Linear(D, 6),
        features(T, D),
        True,
    ),
    "linear, single step": (lambda m, x: m.scale * fold(m.layer, x), lambda: nn.Linear(D, 6), features(1, D), True),
    "linear, more dimensions": (
        lambda m, x: m.scale * fold(m.layer, x),
        lambda: nn.Linear(D, 6),
        features(T, 2, D),
        True,
    ),
    "linear, twice": (
        lambda m, x: m.scale * fold(m.layer, fold(m.layer, x).tanh()) + m.layer(x),
        lambda: nn.Linear(D, D),
        features(T, D),
        True,
    ),
    "bilinear, no batch dimension": (
        lambda m, x: m.scale * fold(m.layer, x, x.sin()),
        lambda: nn.Bilinear(D, D, 6),
        features(T, D),
        True,
    ),
    "layer norm, no batch dimension": (
        lambda m, x: m.scale * fold(m.layer, x),
        lambda: nn.LayerNorm(D),
        features(T, D),
        True,
    ),
    "layer norm over positions": (
        lambda m, x: m.scale * squeezed(m.layer, x),
        lambda: nn.LayerNorm((T, D)),
        features(T, D),
        True,
    ),
    "rms norm, no batch dimension": (
        lambda m, x: m.scale * fold(m.layer, x),
        lambda: nn.RMSNorm(D),
        features(T, D),
        True,
    ),
    "embedding": (lambda m, x: m.scale * m.layer(x), lambda: nn.Embedding(7, D), indices(T), True),
    "sparse embedding": (lambda m, x: m.scale * m.layer(x), lambda: nn.Embedding(7, D, sparse=True), indices(T), True),
    "embedding, no batch dimension": (
        lambda m, x: m.scale * fold(m.layer, x),
        lambda: nn.Embedding(7, D, padding_idx=2),
        indices(T),
        True,
    ),
    "embedding of one word": (
        lambda m, x: m.scale * single(m.layer, x),
        lambda: nn.Embedding(7, D, padding_idx=2),
        indices(T),
        False,
    ),
    "convolution": (lambda m, x: m.scale * m.layer(x), lambda: nn.Conv2d(2, 3, 3), features(2, 6, 6), True),
    "convolution, no batch dimension": (
        lambda m, x: m.scale * squeezed(m.layer, x),
        lambda: nn.Conv2d(2, 3, 3),
        features(2, 6, 6),
        False,
    ),
    "lstm": (lambda m, x: m.scale * m.layer(x)[0], lambda: nn.LSTM(D, 3, batch_first=True), features(T, D), True),
    "attention": (lambda m, x: m.scale * m.layer(x, x, x)[0], attention, features(T, D), True),
    "attention, mask that all share": (
        lambda m, x: m.scale * m.layer(x, x, x, attn_mask=causal())[0],
        attention,
        features(T, D),
        True,
    ),
    "attention, as many positions as samples": (
        lambda m, x: m.scale * m.layer(x, x, x, attn_mask=causal(B))[0],
        attention,
        features(B, D),
        True,
    ),
    "attention, padding": (
        lambda m, x: m.scale * m.layer(x, x, x, key_padding_mask=x[..., 0] > 1)[0],
        attention,
        features(T, D),
        True,
    ),
    "attention, mask of each sample": (own_mask, attention, features(T, D), False),
    "inside a vmap of its own": (
        lambda m, x: m.scale * fold(torch.vmap(m.layer), x),
        lambda: nn.Linear(D, 6),
        features(T, D),
        False,
    ),
    "inside a jacobian of its own": (
        lambda m, x: m.scale * fold(torch.vmap(torch.func.jacrev(lambda one: m.layer(one).sin())), x),
        lambda: nn.Linear(D, 6),
        features(T, D),
        False,
    ),
}


@pytest.mark.parametrize("samples", [B, 1])
@pytest.mark.parametrize(("use", "layer", "call", "fast"), ONE_LAYER.values(), ids=ONE_LAYER)
def test_one_layer(use: Any, layer: Callable[[], nn.Module], call: Any, fast: bool, samples: int) -> None:
    module = Own(use, layer=layer())
    assert_right(module, call(samples), samples, fast={"layer"} if fast else set())


def test_encoder_with_a_mask() -> None:
    """All layers of it, as it stands in a module with a class token."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.scale * m.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(T))

    layer = nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, batch_first=True)
    module = Own(forward, encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    own = {"self_attn", "linear1", "linear2", "norm1", "norm2"}
    assert_right(module, features(T, D)(B), fast={f"encoder.layers.0.{name}" for name in own})


def called_with(weights: Callable[[Any], dict[str, Tensor]]) -> Callable[..., Tensor]:
    return lambda module, x: functional_call(module.layer, weights(module), (x,))


def with_a_weight_in_its_place(module: Any, x: Tensor) -> Tensor:
    layer, weight = module.layer, module.layer.weight
    layer._parameters["weight"] = weight * module.scale
    try:
        return layer(x)  # type: ignore[no-any-return]
    finally:
        layer._parameters["weight"] = weight


OTHER_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "scaled": called_with(lambda module: {"weight": module.layer.weight * module.scale}),
    "that of another layer": called_with(lambda module: {"weight": module.other.weight}),
    "detached": called_with(lambda module: {"weight": module.layer.weight.detach(), "bias": module.scale.expand(D)}),
    "put in its place": with_a_weight_in_its_place,
}


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("forward", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_layer_that_is_given_other_weights(forward: Callable[..., Tensor], is_frozen: bool, scale: float) -> None:
    def also_as_it_is(module: Any, x: Tensor) -> Any:
        return forward(module, x) * module.scale + module.layer(x).sin() + module.other(x).cos()

    module = Own(also_as_it_is, layer=nn.Linear(D, D).requires_grad_(not is_frozen), other=nn.Linear(D, D))
    module.scale.data.fill_(scale)  # of 1 no result tells
    assert_right(module, features(T, D)(B))


@pytest.mark.parametrize("loops", [False, True])
def test_forward_that_scales_a_parameter_leaves_it_as_it_was(*, loops: bool) -> None:
    """Each comparison would scale it once more."""

    def forward(module: Any, x: Tensor) -> Any:
        module.layer.weight.data.mul_(0.9)
        return module.layer(x * (2 if loops and x.sum() > 100 else 1)) * module.scale

    module = Own(forward, layer=nn.Linear(D, D))
    model = enn.convert(module).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"changes the parameter layer\.weight in place"):
        model(values(B, T, D))
    assert_close(model.layer.weight, module.layer.weight)


def test_forward_that_bounds_a_parameter() -> None:
    """Once more changes nothing."""

    def forward(module: Any, x: Tensor) -> Any:
        module.layer.weight.data.clamp_(-0.1, 0.1)
        return module.layer(x) * module.scale

    with pytest.warns(enn.PerSampleWarning, match="in a loop"):
        assert_right(Own(forward, layer=nn.Linear(D, D)), features(T, D)(B))


@pytest.mark.parametrize("bounds", [lambda data: data.clamp_(-0.3, 0.3), lambda data: data.view(-1)[:1].fill_(0.2)])
def test_a_parameter_of_its_own_that_a_forward_bounds_in_each_step(bounds: Callable[[Tensor], Tensor]) -> None:
    def forward(module: Any, x: Tensor) -> Any:
        bounds(module.scale.data)
        return module.layer(x) * module.scale

    plain = Own(forward, layer=nn.Linear(D, D))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = enn.convert(plain).per_sample()
        for seed in range(3):
            for module in (plain, model):
                module.zero_grad()
                module(values(B, T, D, seed=seed)).square().sum((1, 2)).mean().backward()
            for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(own.grad, expected.grad)
                assert_close(own, expected.detach())
                with torch.no_grad():
                    for parameter in (own, expected):
                        parameter.add_(0.4 * (seed + 1))


def test_lifted_layers_keep_their_factors() -> None:
    """The rows of a layer that has left the `vmap` are held as factors; those of the others are dense."""
    module = Own(lambda m, x: m.scale * fold(m.layer, x), layer=nn.Linear(32, 48))
    model = enn.convert(module).per_sample()
    model(values(B, 2, 32)).square().sum().backward()
    rows = model.layer.weight.grad_sample
    assert isinstance(rows, enn.FactoredTensor)
    assert rows.held_numel() < rows.numel()


def test_general_inside_general() -> None:
    inner = Own(lambda m, x: m.scale * fold(m.layer, x), layer=nn.Linear(D, D))
    module = Own(lambda m, x: m.inner(x).tanh() * m.scale, inner=inner)
    assert_right(module, features(T, D)(B), fast={"inner.layer"})


def test_folded_children_of_a_module_taken_as_a_whole() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, 6), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.flatten(0, 1)).relu()).unflatten(0, x.shape[:2])

    enn.alone(Folded)
    module = nn.Sequential(nn.Linear(D, D), Folded().double()).double()
    assert_right(module, features(T, D)(B), fast={"0", "1.first", "1.second.0", "1.second.1"})


def test_samples_second() -> None:
    module = Own(lambda m, x: m.scale * m.layer(x), layer=nn.Linear(D, 6))
    call = Call((values(T, B, D),))
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    (coefficients(call.on(model).transpose(0, 1), 0).transpose(0, 1) * call.on(model).sin()).sum().backward()
    assert rows_of(model)["layer.weight"].shape == (B, 6, D)
    model.zero_grad()
    call.on(model).sin().sum().backward()
    for i in range(B):
        grads = torch.autograd.grad(module(call.args[0][:, i : i + 1]).sin().sum(), list(module.parameters()))
        for rows, grad in zip(rows_of(model).values(), grads, strict=True):
            assert_close(rows[i], grad)


@pytest.mark.parametrize("features_out", [1, 4])
@pytest.mark.parametrize("of_steps", [True, False], ids=["(T, B)", "(B, features)"])
def test_samples_second_and_results_of_two_dimensions(of_steps: bool, features_out: int) -> None:
    """Of one sample, one step and one feature are both of shape (1, 1)."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y, h = m.layer(x)
        return m.scale.sum() * (y.sum(2) if of_steps else h[-1])

    module = Own(forward, layer=nn.RNN(D, features_out))
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    for steps, batch in [(1, 1), (5, 3), (1, 3), (3, 3), (1, 2), (4, 1)]:
        x = values(steps, batch, D)
        model.zero_grad()
        y = model(x)
        assert_close(y, module(x))
        y.sin().sum().backward()
        for i in range(batch):
            grads = torch.autograd.grad(module(x[:, i : i + 1]).sin().sum(), list(module.parameters()))
            for rows, grad in zip(rows_of(model).values(), grads, strict=True):
                assert_close(rows[i], grad)


def rows_of_second(module: nn.Module, call: Call, dims: tuple[int, ...]) -> dict[str, Tensor]:
    """The rows by the loop, for arguments that have their samples in these dimensions."""

    def of_sample(i: int) -> tuple[Tensor, ...]:
        args = (x.narrow(dim, i, 1) for x, dim in zip(call.args, dims, strict=True))
        return torch.autograd.grad(module(*args).sin().sum(), list(module.parameters()))

    rows = zip(*map(of_sample, range(B)), strict=True)
    return {name: torch.stack(grads) for (name, _), grads in zip(module.named_parameters(), rows, strict=True)}


def assert_right_second(module: nn.Module, *calls: tuple[Call, tuple[int, ...]]) -> None:
    """In a model that has its samples second, call after call."""
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    for call, dims in calls:
        model.zero_grad()
        y = call.on(model)
        assert_close(y, call.on(module).detach())
        y.sin().sum().backward()
        assert_close_rows(rows_of(model), rows_of_second(module, call, dims))


class Steps(nn.Module):
    """A loop over time, whose result a module around it views."""

    def __init__(self, *, samples_first: bool) -> None:
        super().__init__()
        self.loop, self.samples_first = Own(self.of_steps, layer=nn.Linear(D, D)), samples_first

    def of_steps(self, m: Any, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(x.shape[1:]), []
        for step in x:
            h = (m.layer(step) + h * m.scale).tanh()
            outputs.append(h)
        return torch.stack(outputs, 1).transpose(0, 1) if self.samples_first else torch.stack(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.loop(x)
        if self.samples_first:
            return y.transpose(0, 1).view(x.shape[1], -1)
        return y.view(-1, D).view(len(x), -1, D)


@pytest.mark.parametrize("steps", [T, B, 1])
@pytest.mark.parametrize("samples_first", [False, True])
def test_results_lie_in_memory_as_those_of_the_plain_module(steps: int, samples_first: bool) -> None:
    calls = [(Call((values(steps, B, D, seed=seed),)), (1,)) for seed in (1, 2)]
    assert_right_second(Steps(samples_first=samples_first).double(), *calls)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first = nn.MultiheadAttention(D, 2), nn.Parameter(values(1, 1, D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.attention(x + self.first, x, x, key_padding_mask=mask)[0]
        return y + self.first


@pytest.mark.parametrize("steps", [T, B, 2])
def test_a_mask_with_its_samples_first_beside_a_sequence_with_them_second(steps: int) -> None:
    """As attention takes them; also where the first mask is the same read either way, as it hides nothing."""
    nothing = torch.zeros(B, steps, dtype=torch.bool)
    ends = torch.arange(steps) >= torch.tensor([[1], [steps], [2]])
    calls = [(Call((values(steps, B, D), mask)), (1, 0)) for mask in (nothing, ends, nothing)]
    assert_right_second(Masked().double(), *calls)


@pytest.mark.parametrize("steps", [T, B])
def test_indices_with_a_mask_that_has_its_samples_first(steps: int) -> None:
    module = Own(lambda m, x, y, mask: m.masked(m.layer(x) + m.layer(y), mask) * m.scale, layer=nn.Embedding(9, D))
    module.masked = Masked()
    x, y = torch.arange(steps * B).view(steps, B) % 9, torch.arange(steps * B).view(steps, B) % 7
    mask = torch.arange(steps) >= torch.tensor([[1], [steps], [2]])
    assert_right_second(module.double(), (Call((x, y, mask)), (1, 1, 0)))


@pytest.mark.parametrize("steps", [T, B])
def test_a_mask_of_steps_by_steps_beside_one_with_its_samples_first(steps: int) -> None:
    """All samples share it, though it may have as many rows as there are samples."""
    causal = torch.ones(steps, steps, dtype=torch.bool).triu(1)

    def forward(m: Any, x: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = m.attention(x, x * m.scale, x, attn_mask=mask, key_padding_mask=ends)[0]
        return y * m.scale

    module = Own(forward, attention=nn.MultiheadAttention(D, 2))
    ends = torch.arange(steps) >= torch.tensor([[1], [steps], [2]])
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    x = values(steps, B, D)
    y = model(x, causal, ends)
    assert_close(y, module(x, causal, ends).detach())
    y.sin().sum().backward()
    alone = Own(lambda m, x, ends: forward(m, x, causal, ends), attention=module.attention)
    assert_close_rows(rows_of(model), rows_of_second(alone, Call((x, ends)), (1, 0)))


def test_what_is_folded_beside_a_mask_is_said() -> None:
    """And not what attention raises for a mask that was read in another way."""
    module = Own(lambda m, x, mask: m.masked(x, mask).view(-1, D) * m.scale, masked=Masked())
    model = enn.convert(module).per_sample(batch_first=False)
    with pytest.raises(enn.PerSampleError, match=r"for one sample its forward returns a tensor of shape \(5, 4\)"):
        model(values(T, B, D), torch.zeros(B, T, dtype=torch.bool))


def test_a_mask_that_was_the_same_read_either_way() -> None:
    """It tells nothing of the next one."""
    module = Own(
        lambda m, x, mask: m.layer(x) * m.scale * mask.reshape(x.shape[1], -1).T.unsqueeze(-1), layer=nn.Linear(D, D)
    )
    masks = torch.ones(B, B, dtype=torch.int64), torch.ones(B, B, dtype=torch.int64).tril()
    assert_right_second(module, *[(Call((values(B, B, D), mask)), (1, 0)) for mask in masks])


class Head(nn.Module):
    """What is left of a sequence, `(B, features)`, goes into a module with a parameter of its own."""

    def __init__(self, table: Tensor | None = None) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 6), Own(lambda m, h: m.layer(h) * m.scale, layer=nn.Linear(6, D))
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[1][-1] if self.table is None else self.table)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [T, B, 1])
def test_what_is_left_of_a_sequence_with_samples_second(steps: int) -> None:
    assert_right_second(Head().double(), *[(Call((values(steps, B, D),)), (1,))] * 2)


def test_a_table_that_has_as_many_rows_as_samples_by_chance() -> None:
    module = Head(values(B, 6)).double()
    model = enn.convert(module).per_sample(batch_first=False, escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"head \(Own\): the first tensor has shape \(3, 6\), 6 rows in dim"):
        model(values(T, B, D))


def test_an_index_of_as_many_steps_as_samples() -> None:
    """It has no features; where its samples stand is compared, also if the first one is the same read either way."""
    module = Own(lambda m, x: (m.layer(x[:-1]) * m.scale + x[1:].unsqueeze(-1)).cumsum(0), layer=nn.Embedding(17, D))
    index = torch.arange(B * B).view(B, B)
    calls = [(Call((x,)), (1,)) for x in (index + index.T, index, index.T)]
    assert_right_second(module, *calls)


def test_a_matrix_of_positions_is_no_index_of_the_model() -> None:
    """It has as many rows as there are samples by chance, and all share it."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = Own(lambda m, index: m.layer(index) * m.scale, layer=nn.Embedding(9, D))

        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(len(x))
            return x + self.bias(steps - steps.unsqueeze(1) + 4).sum(1, keepdim=True)

    model = enn.convert(Relative().double()).per_sample(batch_first=False, escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"bias \(Own\): input of shape \(3, 3\) .* first or second"):
        model(values(B, B, D))


# --- containers: arguments and results --------------------------------------------------------------------------


@dataclass
class Pair:
    one: Tensor
    other: Tensor | None
    label: str = "a pair"


class Named(NamedTuple):
    one: Tensor
    other: Tensor


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"one": a, "other": b},
    "named tuple": Named,
    "dataclass": Pair,
    "nested": lambda a, b: {"pairs": [Pair(a, None), (b, "text")], "count": 2, "none": None},
}


def leaves(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Pair):
        return leaves([result.one, result.other])
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else []
    return [leaf for part in parts for leaf in leaves(part)]


class Sums(nn.Module):
    """What comes out of another module, as one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([leaf.flatten(1) for leaf in leaves(self.inner(x))], 1)


@pytest.mark.parametrize("wrap", RESULTS.values(), ids=RESULTS)
def test_results(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    inner = Own(
        lambda m, x: wrap(m.scale * m.first(x), m.second(x).tanh()), first=nn.Linear(D, 2), second=nn.Linear(D, 3)
    )
    model = assert_right(Sums(inner), features(T, D)(B), fast={"inner.first", "inner.second"})
    result, expected = model.inner(values(B, T, D)), inner(values(B, T, D))
    assert type(result) is type(expected)
    if isinstance(result, Pair):
        assert result.label == "a pair"
    if isinstance(result, dict) and "pairs" in result:
        assert (result["count"], result["none"], result["pairs"][1][1]) == (2, None, "text")


@dataclass(frozen=True)
class Batch:
    """A class of which no result is made, so that torch's trees never hear of it."""

    one: Tensor
    rest: list[Any]
    label: str = "a batch"

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Fields(dict[str, Any]):
    """A mapping of a user's own class."""


ARGUMENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": lambda a, b: Batch(a, [b]),
    "dict": lambda a, b: {"one": a, "rest": [b]},
    "mapping": lambda a, b: Fields(one=a, rest=[b]),
    "UserDict": lambda a, b: UserDict(one=a, rest=[b]),
    "nested": lambda a, b: UserDict(one=a, rest=[Batch(a, [b])]),
}


class Packs(nn.Module):
    """What calls another module with one object."""

    def __init__(self, inner: nn.Module, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.pack = inner, pack

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(self.pack(x, y))


@pytest.mark.parametrize("samples", [B, 1, 0])
@pytest.mark.parametrize("pack", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_in_one_object(pack: Callable[[Tensor, Tensor], Any], samples: int) -> None:
    """Each sample's own part of it goes through the module; torch's trees do not open its class afterwards."""

    def forward(m: Any, batch: Any) -> Tensor:
        (other,) = batch["rest"]
        other = other["rest"][0] if isinstance(other, Batch) else other
        return m.scale * (m.first(batch["one"]) + m.second(other)).tanh()

    module = Packs(Own(forward, first=nn.Linear(D, 2), second=nn.Linear(D, 2)), pack)
    call = Call((values(samples, D), values(samples, D, seed=2)))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples))
    assert len(tree_leaves(Batch(values(1), [values(1)]))) == 1


@pytest.mark.parametrize("pack", [ARGUMENTS["mapping"], ARGUMENTS["dict"]], ids=["mapping", "dict"])
def test_module_that_puts_a_result_into_its_argument(pack: Callable[[Tensor, Tensor], Any]) -> None:
    def forward(m: Any, batch: Any) -> Tensor:
        batch["one"] = m.first(batch["one"])
        return m.scale * batch["one"]

    module = Packs(Own(forward, first=nn.Linear(D, 2)), pack)
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    call = Call((values(B, D), values(B, D, seed=2)))
    with pytest.raises(enn.PerSampleError, match="keeps tensors in an argument"):
        model(*call.args)
    with pytest.warns(enn.PerSampleWarning, match="Packs: runs sample by sample"):
        total_loss(model.per_sample(escalate=True), call).backward()
    assert_close_rows(rows_of(model), loop(module, call, B))


def without_nans(x: Tensor) -> None:
    x[torch.isnan(x)] = 0


def within_bounds(x: Tensor) -> None:
    if float(x.detach().abs().max()) > -1:
        x.clamp_(min=-0.3)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("change", [without_nans, within_bounds])
@pytest.mark.parametrize("is_first", [True, False])
def test_module_that_changes_its_argument_by_values(change: Callable[[Tensor], None], is_first: bool) -> None:
    """In a loop each sample's part of it is changed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        change(x)
        return m.first(x * m.scale)

    own = Own(forward, first=nn.Linear(D, 2))
    module = own if is_first else nn.Sequential(nn.Linear(D, D).double(), own)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for samples in (B, B, B + 2, 1):
        x = values(samples, D, seed=samples)
        if is_first and change is without_nans:
            x[0, 1] = torch.nan
        given, of_plain = Call((x.clone(),)), Call((x.clone(),))
        expected = loop(module, Call((x,)), samples)
        model.zero_grad()
        sample_losses(model(given.args[0])).sum().backward()
        module(of_plain.args[0])
        assert_close_rows(rows_of(model), expected)
        assert torch.equal(given.args[0], of_plain.args[0])


class Windows(nn.Module):
    """Folds windows into the batch, and then convolves and normalizes, as TinyViT."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own(lambda m, x: m.first(x) * m.scale, first=nn.Linear(D, D))
        self.local = nn.Sequential(nn.Conv2d(D, D, 1), nn.BatchNorm2d(D)).double().eval()

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, D)
        x = self.inner(x.reshape(-1, 2, D)).reshape(x.shape)
        return self.local(x.mT.reshape(-1, D, 2, 2)).flatten(2).mT


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("batches", [(1, 1), (B, B, B + 1, 1)])
def test_windows_before_a_batch_norm(batches: tuple[int, ...]) -> None:
    """For a single sample torch's derivative of the norm is wrong, in comparisons as well."""
    module = Windows()
    module.local[1].running_mean.normal_()
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def loss(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return call.on(module).sin().square().sum()

    def both(call: Call, i: int) -> Call:
        return call.map(lambda x: x[2 * i : 2 * i + 2])

    for samples in batches:
        call = Call((values(samples, 4, D, seed=samples),))
        model.zero_grad()
        loss(model, call).backward()
        # beside a copy of itself torch's derivative is right
        twice = Call((call.args[0].repeat_interleave(2, 0),))
        expected = loop(module, twice, samples, take=both, objective=loss)
        assert_close_rows(rows_of(model), {name: rows / 2 for name, rows in expected.items()})


class Normalized(nn.Module):
    """A batch norm in eval mode by own parameters, of channels that lie last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, 3, 1)
        return F.batch_norm(x * self.scale.view(-1, 1, 1), self.mean, torch.ones(3), self.weight).transpose(1, 3)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
def test_a_batch_norm_of_one_sample_whose_channels_lie_last() -> None:
    """Torch's derivative of it is wrong, in the plain forward that the samples are compared with as well."""
    module, x, by = Normalized(), torch.randn(1, 3, 3, 1).transpose(1, 2), torch.randn(1, 1, 3, 3)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    (model(x).contiguous() * by).sum().backward()
    g, mean = by.transpose(1, 3), module.mean.view(-1, 1, 1)
    xhat = (x * module.scale.detach().view(-1, 1, 1) - mean) / (1 + 1e-5) ** 0.5
    assert_close_rows({"weight": model.weight.grad_sample}, {"weight": (g * xhat).sum((2, 3))})


class Results(dict[str, Any]):
    """As those of some libraries, a class of its own."""


class Sequence(list[Any]):
    pass


@pytest.mark.parametrize(
    ("kind", "item"),
    [(lambda y: Results(y=y), "y"), (lambda y: UserDict(y=y), "y"), (lambda y: Sequence([y]), 0)],
    ids=["dict", "UserDict", "list"],
)
def test_results_in_containers_of_the_users(kind: Callable[[Tensor], Any], item: Any) -> None:
    module = Own(lambda m, x: kind(m.first(x) * m.scale), first=nn.Linear(D, 2))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for samples in (B, B, B + 2, 1):
        call = Call((values(samples, D, seed=samples),))
        model.zero_grad()
        result = call.on(model)
        assert type(result) is type(kind(torch.zeros(1)))
        sample_losses(result[item]).sum().backward()
        expected = loop(
            module, call, samples, objective=lambda m, call, first=0: sample_losses(call.on(m)[item], first).sum()
        )
        assert_close_rows(rows_of(model), expected)


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("computed", [nn.utils.weight_norm, pruned], ids=["weight_norm", "prune"])
@pytest.mark.parametrize("within", [False, True])
def test_layer_whose_weight_a_hook_of_torch_computes(computed: Callable[..., nn.Module], within: bool) -> None:
    """Before each forward, a comparison's as well."""

    def built() -> nn.Module:
        own = Own(lambda m, x: m.first(x * m.scale).tanh(), first=computed(nn.Linear(D, 2)))
        return nn.Sequential(nn.Linear(D, D).double(), own) if within else own

    module, model = built(), enn.convert(built(), inplace=True).per_sample(loss_reduction="sum")
    model.load_state_dict(module.state_dict())
    for samples in (B, B, B + 2, 1):
        call = Call((values(samples, D, seed=samples),))
        model.zero_grad()
        total_loss(model, call).backward()
        expected = loop(module, call, samples, create_graph=True)  # what has a history is not copied
        assert_close_rows(rows_of(model), {name: rows.detach() for name, rows in expected.items()})


@pytest.mark.parametrize("reads", [False, True])
def test_module_that_changes_what_all_samples_share(reads: bool) -> None:
    """In a loop it would be changed once for each sample."""

    def forward(m: Any, x: Tensor, table: Tensor) -> Tensor:
        if not reads or float(x.detach().abs().max()) > -1:
            table[table > 0.5] += 1
        return m.first(x * m.scale + table)

    model = enn.convert(Own(forward, first=nn.Linear(D, 2))).per_sample()
    table = torch.ones(D, dtype=torch.float64)
    if reads:
        with pytest.raises(enn.PerSampleError, match="its forward does what vmap cannot follow"):
            model(values(B, D), table)
    else:
        model(values(B, D), table)
        assert torch.equal(table, torch.full_like(table, 2))


def test_keyword_and_other_arguments() -> None:
    def forward(m: Any, x: Tensor, *, context: Tensor, power: int, how: str = "add", mask: Tensor | None = None) -> Any:
        assert isinstance(power, int)
        both = m.first(x) ** power + m.second(context) if how == "add" else m.first(x) * m.second(context)
        return m.scale * both if mask is None else m.scale * both * mask

    module = Own(forward, first=nn.Linear(D, 2), second=nn.Linear(D, 2))
    x, context, mask = values(B, T, D), values(B, T, D, seed=2), values(T, 1, seed=3)
    fast = {"first", "second"}
    assert_right(module, Call((x,), {"context": context, "power": 3}), fast=fast)
    assert_right(module, Call((x,), {"context": context, "power": 2, "how": "times", "mask": None}), fast=fast)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((x,), {"context": context, "power": 2, "mask": mask})  # the mask is of all samples
    total_loss(model, call).backward()
    expected = loop(
        module, Call((x, context)), B, objective=lambda m, c, i: total_loss(lambda x, y: shared(m, x, y, mask), c, i)
    )
    assert_close_rows(rows_of(model), expected)


def shared(module: nn.Module, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
    return module(x, context=context, power=2, mask=mask)


def test_arguments_in_containers() -> None:
    def forward(m: Any, batch: dict[str, Any]) -> Tensor:
        return m.scale * m.layer(batch["x"]) + batch["more"][0].sum(-1, keepdim=True) * batch["factor"]

    module = Own(forward, layer=nn.Linear(D, 2))
    call = Call(({"x": values(B, T, D), "more": [values(B, T, D, seed=2), None], "factor": 0.5},))
    assert_right(module, call, fast={"layer"})


def test_children_of_a_module_with_parameters_in_lists() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.rand(2) for _ in range(2)])
            self.layers = nn.ModuleDict({"a": nn.Linear(D, 2), "b": nn.Linear(D, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return sum(w * layer(x) for w, layer in zip(self.weights, self.layers.values(), strict=True))

    assert_right(Mixture().double(), features(T, D)(B), fast={"layers.a", "layers.b"})


def write_a_part(m: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=1)
    low = torch.zeros(*spectrum.shape[:2], 2 * D, dtype=spectrum.dtype)
    low[:, :2, :D] = spectrum[:, :2] * m.scale
    return torch.fft.irfft(low, dim=1)


def write_twice(m: Any, x: Tensor) -> Tensor:
    made = torch.full((len(x), T, D), 0.5).add_(m.scale * x)
    made[:, 0] = 2 * made[:, 1] * m.scale
    return made


def write_marks(m: Any, x: Tensor) -> Tensor:
    marks = torch.zeros(len(x), T, D, dtype=torch.bool)
    marks[:, 1:] = x[:, 1:] > 0
    return m.scale * x * marks


@pytest.mark.parametrize("write", [write_a_part, write_twice, write_marks])
def test_a_forward_that_writes_into_what_it_makes(write: Callable[..., Tensor]) -> None:
    """It is each sample's own, and `vmap` can follow: no warning that its samples go one by one."""
    assert_right(Own(write), features(T, D)(B))


# --- what is refused, by name -----------------------------------------------------------------------------------


def write_into_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.layer.running.mul_(0.9).add_(x.detach().mean((0, 1)))
    return m.scale * (x - m.layer.running)


def write_a_part_of_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.layer.running[0] = x.detach().mean()
    return m.scale * (x - m.layer.running)


def fill_an_attribute(m: Any, x: Tensor) -> Tensor:
    m.layer.kept.append(x)
    return m.scale * x


def fill_an_argument(m: Any, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
    if cache is not None:
        cache["x"] = x
    return m.scale * x


def branch_on_a_value(m: Any, x: Tensor) -> Tensor:
    return m.scale * x if x.sum() > 0 else -m.scale * x


def take_an_item(m: Any, x: Tensor) -> Tensor:
    return m.scale * x * x.sum().item()


def return_a_distribution(m: Any, x: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Normal(x, m.scale.exp())


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


def return_an_object(m: Any, x: Tensor) -> tuple[Tensor, Box]:
    return m.scale * x, Box([m.scale * x])


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "buffer in place": (write_into_a_buffer, r"part \(Own\): .*the buffer 'layer\.running'"),
    "part of a buffer": (write_a_part_of_a_buffer, r"part \(Own\): .*the buffer 'layer\.running'"),
    "attribute": (fill_an_attribute, r"part \(Own\): its forward keeps tensors in attribute 'kept'"),
    "branch": (branch_on_a_value, r"part \(Own\): its forward does what vmap cannot follow.*@expands"),
    "item": (take_an_item, r"part \(Own\): its forward does what vmap cannot follow.*@expands"),
    "distribution": (
        return_a_distribution,
        r"part \(Own\): .*returns tensors inside of a Normal.*Return the tensors",
    ),
    "object": (return_an_object, r"part \(Own\): .*returns tensors inside of a Box; .*small module that returns"),
    "object with slots": (lambda m, x: Slotted(m.scale * x), r"part \(Own\): .*returns tensors inside of a Slotted;"),
    "generator of a tuple": (lambda m, x: (h for h in (m.scale * x,)), "returns tensors inside of a generator;"),
    "map": (lambda m, x: map(torch.tanh, [m.scale * x]), "returns tensors inside of a map;"),
    "zip": (lambda m, x: zip((m.scale * x,), (x,), strict=True), "returns tensors inside of a zip;"),
    "values": (lambda m, x: {"a": m.scale * x}.values(), "returns tensors inside of a dict_values;"),
}


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(D))
        self.kept: list[Tensor] = []


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


@pytest.mark.parametrize(("forward", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(forward: Callable[..., Any], words: str) -> None:
    model = enn.convert(Around(Own(forward, layer=Running()))).per_sample()
    with pytest.raises(enn.PerSampleError, match=words):
        model(values(B, T, D))


class Policy(nn.Module):
    def __init__(self, layers: int, *, results: int) -> None:
        super().__init__()
        self.gru, self.mean = nn.GRU(D, 6, layers, batch_first=True), nn.Linear(6, 2)
        self.log_std, self.results = nn.Parameter(torch.tensor([0.3, -0.2])), results

    def forward(self, x: Tensor, h: Tensor) -> Any:
        y, h = self.gru(x, h)
        return (self.mean(y) * self.log_std.exp(), h * self.log_std.exp().sum())[: self.results]


def of_policy(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
    results = call.on(module)
    return sum(sample_losses(each.transpose(0, dim), first).sum() for dim, each in enumerate(results))


@pytest.mark.parametrize("steps", [T, B, 1])
@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("layers", [1, 2, B])
@pytest.mark.parametrize("zeros", [False, True])
def test_states_have_their_samples_second(layers: int, results: int, steps: int, zeros: bool) -> None:
    """Also where there are as many layers as samples, and where the first state, of zeros, tells nothing."""
    module = Policy(layers, results=results).double()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for seed in (1, 2):
        h = values(layers, B, 6, seed=seed) * (0 if zeros and seed == 1 else 1)
        call = Call((values(B, steps, D), h))
        for result, expected in zip(call.on(model), call.on(module), strict=True):
            assert_close(result, expected.detach())
        of_policy(model, call).backward()
        alone = loop(
            module,
            call,
            B,
            take=lambda c, i: Call((c.args[0][i : i + 1], c.args[1][:, i : i + 1])),
            objective=of_policy,
        )
        assert_close_rows(rows_of(model), alone)
        model.zero_grad()


def test_an_argument_that_looks_like_states() -> None:
    """A table that all samples share, whose second dimension has B entries by chance."""
    module = Own(lambda m, x, table: m.scale * x + (m.layer(table) * m.scale).sin().mean((0, 1)), layer=nn.Linear(D, D))
    table = values(2, B, D)
    model, x = enn.convert(module).per_sample(loss_reduction="sum"), values(B, T, D)
    total_loss(model, Call((x, table))).backward()
    alone = loop(module, Call((x, table)), B, take=lambda c, i: Call((c.args[0][i : i + 1], c.args[1])))
    assert_close_rows(rows_of(model), alone)


class Packed(nn.Module):
    """A recurrent layer with a learned first state, on sequences of different lengths."""

    def __init__(self, total_length: int | None = None, *, after: nn.Module | None = None) -> None:
        super().__init__()
        self.gru, self.after = nn.GRU(D, D, batch_first=True), after or nn.Tanh()
        self.h0, self.total_length = nn.Parameter(torch.linspace(-1, 1, D).view(1, 1, D)), total_length

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.gru(packed, self.h0.expand(-1, len(x), -1).contiguous())
        return self.after(pad_packed_sequence(packed, batch_first=True, total_length=self.total_length)[0])


def no_padding(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
    """A loss of the steps that each sample has."""
    lengths = call.args[1]
    y = call.on(module)
    return (y.sin() * (torch.arange(y.shape[1]) < lengths.view(-1, 1)).unsqueeze(-1)).sum()


@pytest.mark.parametrize(
    "module", [Packed(), Packed(T, after=nn.Linear(D, 2))], ids=["filled up with zeros", "of the length that is said"]
)
def test_samples_of_different_lengths(module: nn.Module) -> None:
    module, call = module.double(), Call((values(B, T, D), torch.tensor([3, T, 1])))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"in a loop.*of one size: pad_packed_sequence\(\.\.\., total_length"):
        output = call.on(model)
    assert_close(output, call.on(module).detach())
    no_padding(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, B, objective=no_padding))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape))


@pytest.mark.parametrize("after", [nn.Linear(D, 2), Noise()], ids=["linear", "noise that nothing can fix"])
def test_samples_of_different_lengths_that_zeros_do_not_fill_up(after: nn.Module) -> None:
    model = enn.convert(Packed(after=after).double()).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Packed: .*vmap cannot follow.*pad_packed_sequence\(.*total_length"):
        model(values(B, T, D), torch.tensor([3, T, 1]))


def test_a_list_with_a_tensor_for_each_sample_is_refused() -> None:
    """A sample alone gives another number of tensors than the batch."""
    model = enn.convert(Own(lambda m, x: [m.scale * row for row in x.split(1)])).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Own: on the whole batch its forward gives another result"):
        model(values(B, D))


def test_an_argument_that_cannot_be_copied() -> None:
    module, options = Own(lambda m, x, options: m.scale * x * options.factor), SimpleNamespace(factor=2.0, lock=Lock())
    assert_right_rows(module, Call((values(B, D), options)), B)


def test_cache_in_an_argument_is_refused() -> None:
    model = enn.convert(Own(fill_an_argument)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Own: .*keeps tensors in an argument.*use_cache=False"):
        model(values(B, T, D), {})


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_a_result_that_all_samples_share(use_reentrant: bool) -> None:
    """The first forward of a reentrant checkpoint has no gradient, and yet a row for each sample."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, D).double()
            self.bias = Own(lambda m, x: (m.scale * m.layer(x), m.scale.expand(1, T, 1)), layer=nn.Linear(D, 2))
            self.use_reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            values, shared = checkpoint(self.bias, self.first(x), use_reentrant=self.use_reentrant)
            return values * shared.exp()

    module, call = Model(), features(T, D)(B)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    model.use_reentrant = use_reentrant
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, B))


# --- randomness -------------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_each_sample_draws_for_itself(draw: Callable[[Tensor], Tensor]) -> None:
    """And the rows are of what was drawn: the gradient of `scale` is the sum of a sample's own noise."""
    model = enn.convert(Own(lambda m, x: m.scale * draw(x))).per_sample(loss_reduction="sum")
    output = model(values(2, 40))
    assert not torch.equal(output[0], output[1])
    output.sum().backward()
    assert_close(model.scale.grad_sample, output.detach().sum(1) / model.scale.detach())
    assert_close(model.scale.grad, model.scale.grad_sample.sum(0))


def masked(m: Any, x: Tensor) -> Tensor:
    """As speech models of `transformers` do: a mask by numpy, and an argument that is made to require a gradient."""
    y = x[:]
    y.requires_grad = True
    mask = torch.from_numpy(np.random.random(x.shape[:2]) < 0.5)  # noqa: NPY002  # its own state is what they draw from
    return torch.where(mask[..., None], m.scale, y)


def test_a_mask_by_numpy_over_an_argument_that_takes_no_gradient() -> None:
    """Under `vmap` a mask is drawn once, for all samples."""
    model = enn.convert(Own(masked)).per_sample(loss_reduction="sum")
    x = values(B, 20, D)
    for _ in range(3):
        model.zero_grad()
        output = model(x)
        output.sum().backward()
        is_masked = (output != x).all(-1)
        assert 0 < int(is_masked[0].sum()) < 20
        assert_close(model.scale.grad_sample, D * is_masked.sum(1).double())


@pytest.mark.parametrize("mixes", [False, True])
def test_such_a_mask_over_what_an_index_chooses(mixes: bool) -> None:
    """There are no derivatives by an index."""

    def chosen(m: Any, index: Tensor) -> Tensor:
        found = m.scale * index * torch.from_numpy(np.random.random(index.shape))  # noqa: NPY002
        return found - index.double().mean(0) if mixes else found

    model, index = enn.convert(Own(chosen)).per_sample(loss_reduction="sum", escalate=False), torch.arange(B * T)
    if mixes:
        with pytest.raises(enn.PerSampleError, match="another result than sample by sample"):
            model(index.view(B, T))
        return
    output = model(index.view(B, T))
    output.sum().backward()
    assert_close(model.scale.grad_sample, output.detach().sum(1) / model.scale.detach())


def mean_of_batch(m: Any, x: Tensor) -> Tensor:
    return masked(m, x) - x.mean(0)


def test_samples_that_mix_beside_such_a_mask() -> None:
    model, words = enn.convert(Own(mean_of_batch)).per_sample(escalate=False), "another result than sample by sample"
    with pytest.raises(enn.PerSampleError, match=words):
        model(values(B, 20, D))
    with pytest.raises(enn.PerSampleError, match=words):  # where all samples are alike, nothing can tell
        model(torch.ones(B, 20, D, dtype=torch.float64))


@pytest.mark.parametrize(
    "of_batch",
    [lambda x: x / x.shape[0], lambda x: x - x.detach().mean(0), lambda x: x * x.argmin(0)],
    ids=["the number of samples", "a mean without derivatives", "the place of the smallest"],
)
def test_samples_that_mix_beside_dropout(of_batch: Callable[[Tensor], Tensor]) -> None:
    """No derivative tells, but without the dropout the results differ, whatever is drawn."""
    forward = lambda m, x: m.scale * of_batch(m.dropout(x))  # noqa: E731
    model = enn.convert(Own(forward, dropout=nn.Dropout(0.3))).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match="another result than sample by sample"):
        model(values(B, D))


def test_samples_that_mix_to_one_row_beside_noise() -> None:
    """Which nothing can fix, nor tell of which samples it is."""
    forward = lambda m, x: m.noise((m.scale * x).mean(0, keepdim=True))  # noqa: E731
    model = enn.convert(Own(forward, noise=Noise())).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match="another result than sample by sample"):
        model(values(B, D))


def test_the_seed_says_what_is_drawn() -> None:
    model = enn.convert(Own(lambda m, x: m.layer(m.scale * x), layer=nn.Dropout())).per_sample()
    model(values(B, 40))  # compares once
    set_seed(3)
    first = model(values(B, 40))
    assert not torch.equal(first, model(values(B, 40)))
    set_seed(3)
    assert torch.equal(first, model(values(B, 40)))


# --- registration -----------------------------------------------------------------------------------------------


class Gain(nn.Module):
    """As if of a package that is not imported for its twin."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class MyGain(Gain):
    """With nothing of its own but the way it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = True


class Negative(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class GainTwin(enn.Expanded):
    def expanded_forward(self, x: Tensor) -> Tensor:
        return self.by_sample(lambda x: x * self.expanded("gain")[:, None], 2, x=x)


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, f"{__name__}.Gain", GainTwin)


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("plain_class", [Gain, MyGain])
def test_twin_by_name(plain_class: type[nn.Module]) -> None:
    module = nn.Sequential(plain_class(), nn.Linear(D, 2).double())
    model = assert_right(module, features(T, D)(B))
    assert isinstance(model[0], GainTwin)
    assert isinstance(model[0], plain_class)
    assert type(enn.revert(model)[0]) is plain_class
    assert model[0].__class__.__name__ == plain_class.__name__
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is type(model[0])


@pytest.mark.usefixtures("by_name")
def test_subclass_with_another_forward_keeps_to_the_general_rule() -> None:
    model = assert_right(Negative(), features(T, D)(B))
    assert not isinstance(model, GainTwin)


@pytest.mark.usefixtures("by_name")
def test_a_class_comes_before_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, Gain, None)  # to be taken away again

    @enn.expands(Gain)
    class Other(enn.Expanded, Gain):
        def expanded_forward(self, x: Tensor) -> Tensor:
            return x * self.expanded("gain")[:, None]

    assert type(enn.convert(Gain())) is Other
    assert type(enn.revert(enn.convert(Gain()))) is Gain


def test_expands_and_alone_take_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, name := f"{__name__}.Gain", None)
    assert enn.expands(name)(GainTwin) is GainTwin
    assert isinstance(enn.convert(Gain()), GainTwin)
    assert enn.alone(name) == name
    assert not isinstance(enn.convert(Gain()), GainTwin)
    assert_right(Gain(), features(T, D)(B))


class Slope(nn.Module):
    """Says itself where the samples stand."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first, self.weight = batch_first, nn.Parameter(torch.rand(D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("length", [1, B, T])
@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("of_layer", [True, False])
@pytest.mark.parametrize("vmapped", [True, False])
def test_a_layer_of_the_users_with_a_batch_first_of_its_own(
    vmapped: bool, of_layer: bool, of_model: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPANDED, Slope, None)

    @enn.expands(Slope)
    class SlopeTwin(enn.Expanded, Slope):
        ranks = {"weight": 1}  # noqa: RUF012
        feature_dims = 1

        def expanded_forward(self, x: Tensor) -> Tensor:
            return self.by_sample(lambda x: x * self.expanded("weight")[:, None], 1, x=x)

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x * (torch.logcumsumexp(self.scale[None], 0) if vmapped else self.scale)
        return self.layer(x if of_layer == of_model else x.transpose(0, 1))

    def loss(module: Any, call: Call, first: int = 0) -> Tensor:
        return call.on(module).square().sum()

    module, x = Own(forward, layer=Slope(of_layer)), values(B, length, D)
    call = Call((x if of_model else x.transpose(0, 1),))
    expected = loop(module, call, B, take=lambda c, i: c.map(lambda x: x.narrow(1 - of_model, i, 1)), objective=loss)
    model = enn.convert(module).per_sample(batch_first=of_model, loss_reduction="sum")
    for _ in range(3):
        model.zero_grad()
        loss(model, call).backward()
        assert_close_rows(rows_of(model), expected)


class Folding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_copies_of_a_module_taken_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, Folding, None)
    enn.alone(Folding)
    module, call = Folding(), features(T, D)(B)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for copied in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        total_loss(copied, call).backward()
        assert_close_rows(rows_of(copied), loop(module, call, B))
    assert type(enn.revert(model)) is Folding


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten()),
    "sum": lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum"),
    "of several": lambda scores, y: scores.sin().mean() + 0.1 * scores.square().mean((1, 2)).mean(),
}


class WithLoss(nn.Module):
    """A model with a parameter of its own that returns its loss, as a small GPT with its positions does."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, way: str = "") -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, D), nn.Linear(D, 7)
        self.positions, self.loss, self.way = nn.Parameter(torch.rand(T, D)), loss, way

    def forward(self, words: Tensor, y: Tensor) -> Any:
        x = self.words(words) + self.positions
        if self.way == "vmap":
            x = x + 0 * torch.linalg.matrix_exp(self.positions.T @ self.positions).sum()
        if self.way == "loop" and float(x.detach().sum()) > 1e9:
            x = 2 * x
        scores = self.head(x)
        return {"scores": scores, "loss": self.loss(scores, y), "count": torch.tensor(y.numel())}


@pytest.mark.parametrize("way", ["", "vmap", "loop"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "of_samples",
    [
        lambda scores, y: y[:, 0] * scores.mean((1, 2)).sin(),
        lambda scores, y: scores.mean((1, 2)).exp() - scores.detach().mean((1, 2)).exp(),
    ],
    ids=["of some batches", "with a gradient"],
)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_loss_that_is_zero(of_samples: Callable[[Tensor, Tensor], Tensor], reduction: str, way: str) -> None:
    """It may be a mean or a sum: derivatives tell, and if they are zero as well, so are the rows."""
    module = WithLoss(lambda scores, y: getattr(of_samples(scores, y), reduction)(), way=way).double()
    model = enn.convert(module).per_sample(loss_reduction=reduction)

    def objective(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        return module(*call.args)["loss"]

    for largest in (1, 7, 1, 7):
        call = Call((torch.randint(7, (B, T)), torch.randint(largest, (B, T))))
        model.zero_grad()
        objective(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B, objective=objective))


@pytest.mark.parametrize("way", ["", "vmap", "loop"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_loss_that_the_forward_returns(loss: Callable[[Tensor, Tensor], Tensor], way: str) -> None:
    module = WithLoss(loss, way=way)
    is_sum = loss is LOSSES["sum"]
    model = enn.convert(module).per_sample(loss_reduction="sum" if is_sum else "mean")
    for samples in (3, 1, 4, 3, 2):
        words, y = torch.randint(7, (2, samples, T))
        model.zero_grad()
        found, expected = model(words, y), module(words, y)
        assert_close(found["loss"], expected["loss"].detach())
        assert_close(found["scores"], expected["scores"].detach())
        assert found["count"] == samples * T
        found["loss"].backward()
        for i in range(samples):
            module.zero_grad()
            module(words[i : i + 1], y[i : i + 1])["loss"].backward()
            for (name, own), parameter in zip(module.named_parameters(), model.parameters(), strict=True):
                assert own.grad is not None
                assert_close(parameter.grad_sample[i], own.grad, name=name)


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, y: scores.max(),
        lambda scores, y: scores.mean(0).sin().sum(),
        lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=0),
    ],
)
@pytest.mark.parametrize("way", ["", "vmap", "loop"])
def test_a_number_that_is_no_mean_and_no_sum(loss: Callable[[Tensor, Tensor], Tensor], way: str) -> None:
    model, words = enn.convert(WithLoss(loss, way=way)).per_sample(), torch.arange(3 * T).view(3, T) // 3
    with pytest.raises(enn.PerSampleError, match=r"number that is neither the mean nor the sum .*words of each sample"):
        model(words, words)


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_an_inner_number_is_refused() -> None:
    """Other samples may use it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Own(lambda m, x: (m.scale * x).abs().mean())
            self.head = nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x / self.part(x))

    with pytest.raises(enn.PerSampleError, match="on the whole batch its forward gives another result"):
        enn.convert(Normed()).per_sample()(values(B, T, D))


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_a_view_of_a_parameter_by_strides(strides: tuple[int, int]) -> None:
    """As a Toeplitz matrix is made; its backward divides by how often a number stands in the memory."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight.as_strided((D, 4), strides) + torch.as_strided(self.weight, (4,), (2,), 3)
            return y + torch.ops.aten.as_strided(self.weight, (4,), (0,), 5)

    x, module = values(B, D), Strided()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(3):
        model.zero_grad()
        model(x).sin().sum().backward()
        for i in range(B):
            module.zero_grad()
            module(x[i : i + 1]).sin().sum().backward()
            assert_close(model.weight.grad_sample[i], module.weight.grad)


def in_a_list(model: Any, kind: type, *, tied: bool) -> Any:
    weights = [model.layer.weight] if tied else [model.first, model.second]
    model.weights = {str(number): x for number, x in enumerate(weights)} if kind is dict else kind(weights)
    return model


class Listed(nn.Module):
    """Its parameters, or a layer's, stand in a plain list too, from where its forward takes them."""

    def __init__(self, kind: type, *, tied: bool, on_whole_batch: bool) -> None:
        super().__init__()
        self.layer, self.on_whole_batch = nn.Linear(D, D), on_whole_batch
        if not tied:
            self.first, self.second = (nn.Parameter(torch.rand(D, D)) for _ in range(2))
        in_a_list(self, kind, tied=tied)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for weight in self.weights.values() if isinstance(self.weights, dict) else self.weights:
            x = (x @ (weight if self.on_whole_batch else torch.linalg.matrix_exp(weight))).tanh()
        return x


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("on_whole_batch", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_parameters_in_a_plain_list(kind: type, tied: bool, on_whole_batch: bool) -> None:
    module = Listed(kind, tied=tied, on_whole_batch=on_whole_batch)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for samples in (3, 1, D):
        x = values(samples, D)
        model.zero_grad()
        model(x).sin().sum().backward()
        for i in range(samples):
            module.zero_grad()
            module(x[i : i + 1]).sin().sum().backward()
            for parameter, own in zip(model.parameters(), module.parameters(), strict=True):
                assert_close(parameter.grad_sample[i], own.grad)
    held = list(model.weights.values() if kind is dict else model.weights)
    assert type(model.weights) is kind
    assert all(weight is own for weight, own in zip(held, [*model.parameters()][: len(held)], strict=True))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_a_plain_list_of_parameters_that_the_forward_changes(kind: str, samples: int) -> None:
    """What it has counted or added there stays, and no stand-in of a parameter does."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(D))
            self.held: Any = {"w": self.weight, "n": 0} if kind == "dict" else [self.weight]
            self.held = (self.weight, 0) if kind == "tuple" else self.held

        def forward(self, x: Tensor) -> Tensor:
            if kind == "dict":
                self.held["n"] += 1
                return x * self.held["w"] * self.held["n"]
            if kind == "list":
                self.held.append(1.0)
                return x * self.held[0] * len(self.held)
            self.held = (self.held[0], self.held[1] + 1)
            return x * self.held[0] * self.held[1]

    x, module = values(samples, D), Counting()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    held = model.held
    for step in range(3):
        model.zero_grad()
        model(x).sin().sum().backward()
        module.zero_grad()
        factor = step + (2 if kind == "list" else 1)
        rows = factor * x * (x * module.weight * factor).cos()
        assert_close(model.weight.grad_sample, rows.detach())
        weight = model.held["w"] if kind == "dict" else model.held[0]
        assert weight is model.weight
    assert (model.held is held) == (kind != "tuple")


class Returning(nn.Module):
    """Returns a number of its parameters beside its result: a penalty, or a scale for the loss."""

    def __init__(self, *, for_each: bool) -> None:
        super().__init__()
        self.weight, self.for_each = nn.Parameter(torch.rand(D)), for_each

    def forward(self, x: Tensor) -> Any:
        number = self.weight.square().sum()
        return x * self.weight, number.expand(len(x)) if self.for_each else number


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # the samples' losses
    "a penalty": lambda output, number: output.sin().sum(1) + number,
    "a scale": lambda output, number: (output.sum(1) * number).sin(),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_number_of_parameters_alone_is_refused(reduction: str) -> None:
    """As the mean over the samples it would have right rows where the loss adds it, and wrong ones where it scales."""
    model = enn.convert(Returning(for_each=False)).per_sample(loss_reduction=reduction)
    model(values(1, D))
    for _ in range(2):
        with pytest.raises(enn.PerSampleError, match=r"number that (depends on parameters alone|is neither the mean)"):
            model(values(B, D))


def test_losses_that_are_alike_by_chance() -> None:
    """The samples of one batch have the same loss and gradients, as a layer is dead; other samples would not."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(D, D), nn.Parameter(torch.rand(D))
            nn.init.constant_(self.layer.bias, -100.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(F.relu(self.layer(x)) + self.bias, y)

    module = Dead()
    model = enn.convert(module).per_sample()
    for _ in range(2):
        model.zero_grad()
        x, y = values(B, D), torch.ones(B, D, dtype=torch.float64)
        model(x, y).backward()
        for i in range(B):
            module.zero_grad()
            module(x[i : i + 1], y[i : i + 1]).backward()
            assert_close(model.bias.grad_sample[i], module.bias.grad)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_number_of_parameters_for_each_sample(reduction: str, use: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, module = values(B, D), Returning(for_each=True)
    model = enn.convert(module).per_sample(loss_reduction=reduction)
    for _ in range(2):
        model.zero_grad()
        losses = use(*model(x))
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        for i in range(B):
            module.zero_grad()
            use(*module(x[i : i + 1])).sum().backward()
            assert_close(model.weight.grad_sample[i], module.weight.grad)


# --- one sample, all rows of which are its own ------------------------------------------------------------------


class OfGraph(nn.Module):
    """A graph's nodes are `(nodes, features)`, and its edges pairs of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bias, self.out = nn.Linear(D, 2), nn.Parameter(torch.randn(2)), nn.Linear(2, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.lin(x)
        nodes = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + self.bias
        return self.out(nodes.tanh().mean(0, keepdim=True))


class NormedGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph, self.norm = OfGraph(), nn.LayerNorm(3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.norm(self.graph(x, edges))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("module_class", [OfGraph, NormedGraph])
def test_graphs_one_at_a_time(module_class: type[nn.Module], compiled: bool) -> None:
    """With `batch_size=1`, each call is one sample, whatever the sizes of its arguments are."""
    module = module_class()
    model = enn.convert(module).per_sample(batch_size=1, loss_reduction="sum", accumulate_grad=False)
    graphs = [(torch.randn(nodes, D), torch.randint(nodes, (2, 9))) for nodes in (4, 6, 1, 6, 6)]

    def step(x: Tensor, edges: Tensor) -> Tensor:
        model(x, edges).sin().sum().backward()
        return enn.per_sample_grads(model).norms()

    run = enn.compile(step, backend="eager") if compiled else step
    for x, edges in graphs:
        run(x, edges)
        grads = torch.autograd.grad(module(x, edges).sin().sum(), [*module.parameters()])
        for own, wanted in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(own.grad_sample, wanted[None])


UNBATCHED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # a layer, and a sample whose first size is 1
    "conv1d": (lambda: nn.Conv1d(1, 2, 2), (1, 5)),
    "conv2d": (lambda: nn.Conv2d(1, 2, 2), (1, 4, 5)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(1, 2, 2), (1, 5)),
    "instance_norm": (lambda: nn.InstanceNorm1d(1, affine=True), (1, 5)),
    "layer_norm": (lambda: nn.LayerNorm((1, 3)), (1, 3)),
    "linear": (lambda: nn.Linear(3, 2), (1, 3)),
    "gru": (lambda: nn.GRU(3, 2, batch_first=True), (1, 3)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (1, 4)),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", UNBATCHED)
def test_unbatched_layers_in_a_loop_over_samples(name: str, own: bool) -> None:
    """A sample's first dimension of size 1, as one channel, is no dimension of the samples."""
    make, shape = UNBATCHED[name]

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()
            self.scale = nn.Parameter(torch.ones(1)) if own else None

        def forward(self, x: Tensor) -> Tensor:
            calls = [self.layer(*[row] * (3 if name == "attention" else 1)) for row in x]
            result = torch.stack([call[0] if isinstance(call, tuple) else call for call in calls])
            return result if self.scale is None else result * self.scale

    module, x = Looped(), torch.randn(3, *shape)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    expected = loop(module, Call((x,)), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)  # it goes sample by sample
        total_loss(model, Call((x,))).backward()
    assert_close_rows(rows_of(model), expected)


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.lin = nn.Parameter(torch.randn(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.scale)


def test_fast_weights_of_a_module_with_parameters_and_layers() -> None:
    """All of them are computed, as by an inner step of MAML."""
    module = ScaledLayer()
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def objective(of: Any, call: Call, first: int = 0) -> Tensor:
        fast = {name: parameter - 0.1 * parameter.sin() for name, parameter in of.named_parameters()}
        return sample_losses(functional_call(of, fast, call.args), first).sum()

    for _ in range(3):
        call = Call((torch.randn(4, D),))
        model.zero_grad()
        objective(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, 4, objective=objective))


def test_a_table_that_changes_little() -> None:
    """In float32 rows are compared to 3 %, so less would pass, were it not zero to the last bit that is due."""

    class Nudged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(10, 3))

        def forward(self, x: Tensor) -> Tensor:
            table = F.embedding(torch.arange(x.shape[1]), self.w)
            return F.linear(x + 0.005 * table.expand_as(x), self.w)

    module = Nudged().float()
    model = enn.convert(module).per_sample(loss_reduction="sum", compare=False)
    for _ in range(2):
        call = Call((torch.randn(4, 4, 3, dtype=torch.float32),))
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, 4), 1e-5)


def test_a_layer_alone_in_a_model_whose_samples_stand_second() -> None:
    """In `(B, features)` they stand first, as within a forward."""
    model = enn.convert(nn.ModuleDict({"head": nn.Linear(5, 2)})).per_sample(batch_first=False)
    for shape, samples in (((1, 5), 1), ((4, 5), 4), ((7, 3, 5), 3)):
        model.zero_grad()
        model["head"](torch.randn(shape)).sum().backward()
        assert len(model["head"].weight.grad_sample) == samples


class Derives(nn.Module):
    """Its forward takes derivatives by a tensor that it makes, which under `vmap` is no sample's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.zeros(x.shape, dtype=x.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad((x * self.w + shift).sin().sum(), shift, create_graph=True)
        return slope * self.w


class WritesBesideAView(nn.Module):
    """What it makes to write into has a view, so that no sample can get one of its own under `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.zeros(2, *x.shape)
        first = both[0]
        both[1] = torch.tensordot(x, self.w.clone().sin_(), 1)
        return both[1] + first


@pytest.mark.parametrize("kind", [Derives, WritesBesideAView])
def test_what_vmap_cannot_follow_goes_in_a_loop(kind: type[nn.Module]) -> None:
    call = Call((torch.randn(B, 4),))
    with pytest.warns(enn.PerSampleWarning, match="sample by sample"):
        model = assert_right_rows(kind(), call, B)
    assert model.goes_in_a_loop()


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.calls = nn.Parameter(torch.rand(4)), Counter[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls["forward"] += 1
        return x * self.w


def test_a_forward_that_counts_in_a_mapping_of_another_class() -> None:
    module, call = CountsCalls(), Call((torch.randn(B, 4),))
    model = enn.convert(module).per_sample()
    for number in (1, 2, 3):
        total_loss(model, call).backward()
        assert model.calls == {"forward": number}


class InLists(nn.Module):
    """Its parameters stand in lists within lists of modules, or in dicts."""

    def __init__(self, *, of_modules: bool) -> None:
        super().__init__()
        scale, shift = nn.Parameter(values(D).abs()), nn.Parameter(values(D))
        self.layer = nn.Linear(D, D).double()
        if of_modules:
            self.parts: Any = nn.ModuleDict(
                {"0": nn.ParameterDict({"scale": scale}), "1": nn.ModuleList([nn.ParameterList([shift])])}
            )
        else:
            self.parts = nn.ModuleList([nn.ParameterDict({"scale": scale}), nn.ParameterList([shift])])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts
        while isinstance(second[0], nn.ParameterList):
            second = second[0]
        return self.layer(x * first["scale"]) + second[0]


@pytest.mark.parametrize("of_modules", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_lists_of_parameters_within_lists(of_modules: bool, around: bool) -> None:
    module = InLists(of_modules=of_modules)
    module = nn.Sequential(nn.Linear(D, D), module).double() if around else module
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), features(T, D)(B)
    for _ in range(3):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))


class Rotary(nn.Module):
    """Keeps what it computes of a frozen parameter in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(values(D), requires_grad=False)
        self.register_buffer("kept", torch.zeros(2 * T, D, dtype=torch.float64), persistent=False)
        self.length = 0

    def forward(self, length: int) -> Tensor:
        if self.length < length:
            self.kept[:length] = torch.arange(length)[:, None] * self.frequencies
            self.length = length
        return self.kept[:length]


def test_a_frozen_parameter_in_a_buffer() -> None:
    module = Own(lambda m, x: m.layer(x * m.scale) * m.rotary(x.shape[1]).cos(), layer=nn.Linear(D, D), rotary=Rotary())
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for length in (T, T, T + 1, 2):
        call = features(length, D)(B)
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))
    assert model.rotary.length == T + 1


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
@pytest.mark.parametrize("where", [slice(1, 3), torch.tensor([2, 0])])
def test_an_index_that_is_a_list(where: Any) -> None:
    """Torch takes it for a tuple."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D).double(), nn.Linear(D, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[[slice(None), where]].sum(1, keepdim=True) * x)

    module, call = Indexed(), features(D)(B)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, B))


@pytest.mark.parametrize("own", [False, True], ids=["of_a_parameter", "of_a_sample"])
def test_moveaxis(own: bool) -> None:
    """It has no batching rule of its own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        turned = torch.moveaxis(x if own else m.scale * m.layer.weight.tanh(), -1, 0)
        return m.layer(x) * (m.scale * turned.moveaxis(0, -1) if own else turned.sum(0))

    module = Own(forward, layer=nn.Linear(D, D))
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), features(T, D)(B)
    for _ in range(2):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))


class Memory(nn.Module):
    """Learns by a step of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(values(D, D)), nn.Linear(D, D).double()

    def forward(self, x: Tensor) -> Tensor:
        def loss(weight: Tensor, x: Tensor) -> Tensor:
            return (x @ weight - x).square().sum()

        step = torch.vmap(torch.func.grad(loss))(self.start.expand(len(x), D, D), x)
        return self.layer(x) @ (self.start - 0.1 * step)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
def test_functional_derivatives_beside_what_is_kept() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.rotary(x.shape[1])
        m.last = x.mean().detach()
        return m.memory(m.scale * x)

    module = Own(forward, memory=Memory(), rotary=Rotary())
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), features(T, D)(B)
    for _ in range(3):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(memory_format=torch.channels_last),
    "clone": lambda x: x.clone(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(memory_format=torch.channels_last),
    "zeros_like": lambda x: x + torch.zeros_like(x, memory_format=torch.channels_last),
    "empty_like": lambda x: x * torch.empty_like(x, memory_format=torch.channels_last).fill_(2.0),
}


class ChannelsLast(nn.Module):
    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order, self.conv, self.scale = order, nn.Conv2d(2, 3, 1), nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.order(x)) * self.scale


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_channels_that_lie_last_in_memory(order: Any) -> None:
    module, x = ChannelsLast(order), torch.randn(3, 2, 4, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    expected = loop(module, Call((x,)), 3)
    for _ in range(3):
        model.zero_grad()
        total_loss(model, Call((x,))).backward()
        assert_close_rows(rows_of(model), expected)


class Folded(nn.Module):
    """A norm without weights in front of a layer that takes the channels of all samples as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.GroupNorm(1, 2, affine=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).reshape(-1, 3)).reshape(x.shape)


@pytest.mark.filterwarnings("ignore:.*runs sample by sample from now on")
@pytest.mark.parametrize("take", [lambda x: x[1::2], lambda x: x[:1].expand(4, 2, 3), lambda x: x[2:6]])
def test_a_group_norm_without_weights_of_samples_apart_in_memory(take: Any) -> None:
    module, x = Folded(), take(torch.randn(9, 2, 3))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    expected = loop(module, Call((x,)), 4)
    for _ in range(3):
        model.zero_grad()
        total_loss(model, Call((x,))).backward()
        assert_close_rows(rows_of(model), expected)
