"""`enn.compile`: what the eager step gives, the graph gives.

Nearly all run with the backend `eager`, which replays the graph operation by operation; those marked slow run with the
default one, or over the whole table.
"""

import copy
import functools
import linecache
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from cases import CASES, EVEN_SAME, Case, Scale
from expanded_nn.compiling.backends import (
    _PRODUCTS,
    _decompositions,
    _may_choose,
    _spell_out_small_products,
    _take_biases_out,
)
from expanded_nn.core import cost
from some import some

pytestmark = pytest.mark.filterwarnings(EVEN_SAME, "ignore:Using backward\\(\\) with create_graph=True:UserWarning")


def outcome(model: nn.Module, result: Any) -> dict[str, Any]:
    """All that a step leaves: what it returned, gradients, rows, how these are held, buffers."""
    left = {"result": result}
    for name, parameter in model.named_parameters():
        rows = getattr(parameter, "grad_sample", None)
        left |= {f"{name}.grad": parameter.grad, f"{name}.rows": rows, f"{name}.kind": type(rows).__name__}
    return left | dict(model.named_buffers())


def assert_same(compiled: Any, eager: Any, where: str = "") -> None:
    """Whether two outcomes are the same."""
    if isinstance(eager, dict | enn.PerSampleGrads):
        assert list(compiled) == list(eager), where
        for name, value in eager.items():
            assert_same(compiled[name], value, f"{where}.{name}")
    elif isinstance(eager, list | tuple):
        assert len(compiled) == len(eager), where
        for i, value in enumerate(eager):
            assert_same(compiled[i], value, f"{where}[{i}]")
    elif isinstance(eager, Tensor):
        assert compiled.is_sparse == eager.is_sparse, where
        left, right = (each.detach().to_dense() if each.is_sparse else each.detach() for each in (compiled, eager))
        torch.testing.assert_close(left, right, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(eager, float):
        assert compiled == pytest.approx(eager), where
    else:
        assert compiled == eager, where


def graphs(step: Any) -> list[Any]:
    return [graph for family in step._graphs.families.values() for graph in family.graphs]


def law(
    build: Callable[[], nn.Module],
    step: Callable[..., Any],
    batches: list[tuple[Any, ...]],
    backend: str = "eager",
    clear: bool = True,
    least: int = 1,
    most: int = 3,
    **settings: Any,
) -> Any:
    """Runs a step of two equal models, one of them compiled, on some batches; all has to be the same after each.

    Args:
        build: Makes the model.
        step: A function of the model and a batch.
        batches: The arguments of each call.
        backend: That of `enn.compile`.
        clear: Whether gradients are cleared before each call.
        least: How many graphs there are to be.
        most: How many there may be.
        settings: Those of `per_sample`.

    Returns:
        The compiled step.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(enn.convert(build()).per_sample(**settings))
    mine, theirs = models
    compiled = enn.compile(lambda *batch: step(mine, *batch), backend=backend)
    for number, batch in enumerate(batches):
        results = []
        for model, run in ((mine, compiled), (theirs, lambda *given: step(theirs, *given))):
            if clear:
                model.zero_grad()
            torch.manual_seed(number)
            results.append(outcome(model, run(*batch)))
        assert_same(*results)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
    assert least <= len(graphs(compiled)) <= most
    return compiled


def clipped(model: nn.Module, x: Any) -> Any:
    """A step that clips."""
    result = model(x)
    output = result[0] if isinstance(result, tuple) else result
    loss = (output.sin() * 1.5).sum()
    loss.backward()
    return loss.detach(), enn.clip_grad_sample_norms_(model, 0.5)


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)


def samples(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 8), torch.randint(3, (size,))) for size in sizes]


def perceptron(**_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def two_layers() -> nn.Module:
    """Where there have to be several parameters, not all of which may have the same done to them."""
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


def small() -> nn.Module:
    """Where the model does not matter: a trace takes a third of that of `perceptron`."""
    return nn.Sequential(nn.Linear(8, 3))


# --- the table ----------------------------------------------------------------------------------------------------

OF_TABLE = [case for case in CASES if case.has_parameters()]
FIRST = {case.torch_class: case for case in reversed(OF_TABLE)}.values()
BY_VALUES = ("offset", "packed")  # what is done with them depends on values
UNROLLED = ("gru_cell", "tanh_cell")  # as the LSTM's cell, with as long a trace: with each case alone


def of_case(case: Case) -> None:
    """The law; where a step runs eagerly for good, that is all there is to see."""
    sizes = (3, 3, 2, 2, 3)
    batches = [(case.inputs(batch),) for batch in sizes]
    by_values = any(word in case.name for word in BY_VALUES)
    with pytest.warns(enn.PerSampleWarning, match="different lengths") if by_values else nullcontext():
        law(case.module, of_call, batches, least=0 if by_values else 1)


def of_call(model: nn.Module, call: Any) -> Any:
    loss = (call.on(model).sin() * 1.5).sum()
    loss.backward()
    return loss.detach(), enn.clip_grad_sample_norms_(model, 0.5)


@pytest.mark.parametrize("case", some([c for c in FIRST if c.name not in UNROLLED]), ids=lambda case: case.name)
def test_each_layer(case: Case) -> None:
    of_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_TABLE, ids=lambda case: case.name)
def test_each_case(case: Case) -> None:
    of_case(case)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
        lambda: nn.GRU(3, 4, batch_first=True),
        lambda: nn.RNN(3, 4, batch_first=True, nonlinearity="relu"),
    ],
)
def test_recurrent_layers(build: Callable[[], nn.Module]) -> None:
    sizes = (3, 7), (3, 7), (4, 8), (5, 9), (5, 13), (4, 10)
    step = law(build, clipped, [(torch.randn(*size, 3),) for size in sizes])
    names = {str(node.target) for graph in graphs(step) for node in graph.function.graph.nodes}
    assert "expanded_nn.recurrence_loop.default" in names  # and no loop over time


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("sizes", [(), (39, 38, 40, 41)], ids=["one_size", "any_size"])
@pytest.mark.parametrize("few_states", [0, 1 << 13])
def test_small_states_go_through_torchs_kernel(
    few_states: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for any batch chooses by the call that is traced."""
    monkeypatch.setattr(cost, "FEW_STATES", few_states)
    monkeypatch.setattr(cost, "FEW_STATES_OF_THREADS", few_states)
    batches = [(torch.randn(size, 3, 5, dtype=torch.float32),) for size in (40, 40, *sizes)]
    step = law(lambda: nn.LSTM(5, 32, batch_first=True).float(), clipped, batches)
    nodes = {str(node.target): node for node in graphs(step)[-1].function.graph.nodes}
    keeps_gates = nodes["expanded_nn.recurrence.default"].args[2]
    assert keeps_gates == (few_states == 0)
    assert ("expanded_nn.recurrence_cells.default" in nodes) != keeps_gates


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_recurrences_of_many_sizes_are_compiled_for_any(kind: type[nn.Module], dtype: torch.dtype) -> None:
    is_cell = issubclass(kind, nn.RNNCellBase)
    sizes = (5, 6), (5, 6), (7, 6), (7, 6), (3, 6), (9, 6), (4, 6), (4, 7), (4, 12)
    batches = [(torch.randn(*size[: 1 if is_cell else 2], 3, dtype=dtype),) for size in sizes]
    of_layout = {} if is_cell else {"batch_first": True}
    # whose cache may leave a size out
    law(lambda: kind(3, 4, **of_layout).to(dtype), clipped, batches, backend="inductor")


class Signed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x.sign() * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, (grads[0] * ctx.saved_tensors[0].sign()).flatten(0, -2).sum(0)


class OfWeight(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.computes = nn.Parameter(torch.rand(8)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.computes(x, self.weight)


def by_rows(take: Callable[[enn.PerSampleGrads], Tensor]) -> Callable[..., Any]:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).sin().sum().backward()
        return take(enn.per_sample_grads(model))

    return step


def with_other_weights(model: nn.Module, x: Tensor) -> Any:
    """A forward with weights of each sample's own, while the one before it has had no backward of its own."""
    weights = dict(model.named_parameters())
    torch.autograd.grad(model(x).square().mean(), list(weights.values()), create_graph=True)
    own = {name: 2 * enn.expanded(weight) for name, weight in weights.items()}
    functional_call(model, own, (x,)).sin().sum().backward()
    return None


def adapted(model: nn.Module, x: Tensor) -> Any:
    """A step of MAML, which clears the rows of its inner one at the end."""
    weights = dict(model.named_parameters())
    torch.autograd.grad(model(x).square().mean(), list(weights.values()), create_graph=True)
    own = {name: weight - 0.1 * weight.grad_sample for name, weight in weights.items()}
    outer = torch.autograd.grad(functional_call(model, own, (x,)).square().mean(), list(weights.values()))
    model.zero_grad()
    return [grad.detach() for grad in outer]


OF_ANY_SIZE: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "einsum of three": (lambda: OfWeight(lambda x, w: torch.einsum("btd,btd,d->bt", x, x, w)), clipped),
    "function of the user's": (lambda: OfWeight(Signed.apply), clipped),
    "reshaped": (lambda: OfWeight(lambda x, w: x * w.reshape(2, 4).flatten()), clipped),
    "distribution": (lambda: OfWeight(lambda x, w: distributions.Normal(w, w.exp()).log_prob(x)), clipped),
    "adapted weights": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)), adapted),
    "other weights": (lambda: nn.Linear(8, 3), with_other_weights),
    "gram by pairs": (lambda: nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 300)), by_rows(enn.PerSampleGrads.gram)),
    "some rows": (lambda: nn.Linear(8, 3), by_rows(lambda grads: grads.rows(slice(1, 3)).norms())),
}


@pytest.mark.parametrize(("build", "step"), OF_ANY_SIZE.values(), ids=OF_ANY_SIZE)
def test_one_graph_for_any_size(build: Callable[[], nn.Module], step: Callable[..., Any]) -> None:
    batches = [(torch.randn(size, 5, 8),) for size in (20, 20, 21, 22, 23, 24)]
    law(build, step, batches, loss_reduction="sum", most=2)


def test_a_graph_for_each_size_is_explained() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        (model(x) * torch.ones([int(size) for size in x.shape[:-1]])[..., None]).sum().backward()

    batches = [(torch.randn(size, 5, 8),) for size in (20, 20, 21, 22, 23, 24)]
    with pytest.warns(enn.PerSampleWarning, match=r"4 sizes have taken graphs .*int\(size\) for size in x\.shape"):
        law(lambda: nn.Linear(8, 3), step, batches, most=5)


@pytest.mark.filterwarnings("ignore:.*runs sample by sample from now on:expanded_nn.PerSampleWarning")
def test_a_graph_for_each_size_by_vmap_is_explained() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            firsts = x.shape[1] * torch.arange(x.shape[0])[:, None]
            places = torch.cat([firsts, firsts + 1], 1).flatten()
            return self.linear(x.flatten(0, 1).index_select(0, places)).unflatten(0, (-1, 2))

    batches = [(torch.randn(size, 5, 8),) for size in (20, 20, 21, 22, 23, 24)]
    with pytest.warns(enn.PerSampleWarning, match=r"4 sizes have taken .* torch\.vmap, .*\.index_select\("):
        law(Picks, clipped, batches, most=5)


def test_attention() -> None:
    batches = [(torch.randn(size, 7, 8),) for size in (3, 3, 4, 5)]
    law(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), clipped, batches)


class MakesModules(nn.Module):
    """Makes modules in its forward: one with a parameter of another, and one around others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = nn.Sequential(self.inner, nn.Dropout(self.p))(x)
        return nn.Softmax(dim=1)(h)


def test_modules_that_a_step_makes_for_itself() -> None:
    weight = torch.tensor([0.5, 1.0, 2.0])

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = nn.CrossEntropyLoss(weight=weight, reduction="sum")(model(x), y)
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    compiled = law(MakesModules, step, samples(4, 4, 5, 6), loss_reduction="sum")
    kinds = {type(module) for module in compiled._graphs.met.modules}
    assert nn.Softmax not in kinds
    assert nn.CrossEntropyLoss not in kinds
    count = len(compiled._graphs.met.modules)
    for module in compiled._graphs.met.modules:
        module.zero_grad()
    compiled(*samples(4)[0])
    assert len(compiled._graphs.met.modules) == count


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "fixed"])
def test_a_copy_of_a_model_that_the_step_makes(is_trained: bool) -> None:
    """No graph can leave rows in it; the copies of earlier calls are let go of, so that each call is of one kind."""
    model = enn.convert(perceptron()).per_sample()

    def step(x: Tensor, y: Tensor) -> Any:
        copied = copy.deepcopy(model)
        if is_trained:
            return classified(copied, x, y), [parameter.grad_sample for parameter in copied.parameters()]
        copied.per_sample(False)
        return classified(model, copied(x).new_ones(x.shape) + x, y), []

    def compared() -> None:
        for batch in samples(4, 4, 4, 4, 4):
            model.zero_grad()
            found = compiled(*batch)
            model.zero_grad()
            assert_same(found, step(*batch))

    compiled = enn.compile(step, backend="eager")
    with pytest.warns(enn.PerSampleWarning) as warned:
        compared()
    (text,) = {str(warning.message) for warning in warned}
    assert "runs eagerly, as it makes or copies a Sequential itself, which it calls in line" in text
    assert "do that before the step" in text
    assert {*compiled._graphs.met.modules} == {*model.modules()}
    assert len(compiled._graphs.met.recorders) == 1


class Branches(nn.Module):
    """Takes another way for a sample if a value says so, which `vmap` cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.scale * (row if row.sum() > 0 else row.sin()) for row in x])


@pytest.mark.filterwarnings("ignore:.*runs sample by sample")
def test_a_module_that_samples_go_through_one_by_one() -> None:
    with pytest.warns(enn.PerSampleWarning, match=r"runs eagerly, as what 1 \(Branches\) does with the whole"):
        law(lambda: nn.Sequential(nn.Linear(8, 3), Branches()), classified, samples(4, 4, 4), least=0)


class Prototypes(nn.Module):
    """Scores inputs by what a layer makes of a few vectors that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.layer = nn.Linear(5, 8), nn.Linear(8, 8)
        self.register_buffer("vectors", torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.keys(self.vectors)).tanh()


@pytest.mark.filterwarnings("ignore:Prototypes")
def test_a_module_that_goes_sample_by_sample_at_many_sizes() -> None:
    batches = [(torch.randn(size, 8),) for size in (7, 9, 6, 5, 8, 3, 10, 11)]
    law(Prototypes, clipped, batches, least=1, loss_reduction="sum")


class Beside(nn.Module):
    """A layer and a parameter `(1, 1, 8)` beside each other."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8), forward
        self.own = nn.Parameter(torch.linspace(-1.0, 1.0, 8).view(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.does(self, x))  # type: ignore[no-any-return]


def rotated(m: Any, x: Tensor) -> Tensor:
    one, other = (x * m.own).chunk(2, -1)
    return torch.cat([-other, one], -1)


OF_MANY_SIZES: dict[str, Callable[..., Tensor]] = {
    "class_token": lambda m, x: torch.cat([m.own.expand(x.shape[0], -1, -1), x], 1),
    "rotated": rotated,
    "layer_norm": lambda m, x: F.layer_norm(x, (8,), m.own.flatten()),
    "group_norm": lambda m, x: F.group_norm(x.mT, 2, m.own.flatten()).mT,
    "convolution": lambda m, x: F.conv1d(x.mT, m.own.permute(2, 1, 0), groups=8).mT,
}


@pytest.mark.parametrize("forward", OF_MANY_SIZES.values(), ids=OF_MANY_SIZES)
def test_modules_with_parameters_of_their_own_take_sizes_as_symbols(forward: Callable[..., Tensor]) -> None:
    """Through `vmap` some operations make a number of the size: then each takes a graph of its own."""
    law(
        lambda: nn.Sequential(Beside(forward)), clipped, [(torch.randn(size, 4, 8),) for size in (3, 3, 5, 6, 7, 9, 11)]
    )


def test_a_computed_weight_takes_sizes_as_symbols() -> None:
    def build() -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(8, 8)).eval())

    law(build, clipped, [(torch.randn(size, 8),) for size in (3, 3, 5, 6, 7, 9, 11)])


class RelativeBias(nn.Module):
    """Adds a bias for each pair of positions, by a table and an index that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, 7)[:, None])
        self.register_buffer("index", torch.arange(4)[:, None] - torch.arange(4) + 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.index.view(-1)].view(4, 4)  # type: ignore[operator]
        return (x @ x.mT + bias).softmax(-1) @ x


def test_a_size_without_a_graph_leaves_the_others_theirs() -> None:
    generator = torch.Generator()

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        if x.shape[0] == 2:
            x = x * torch.rand(1, generator=generator.manual_seed(0))
        return classified(model, x, y)

    with pytest.warns(enn.PerSampleWarning, match=r"torch.Generator of its own \(other sizes have graphs\)"):
        law(small, step, samples(4, 4, 4, 2, 2, 2, 4, 5))


class Residual(nn.Module):
    """A norm after what a parameter of its own, repeated for the samples, is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.norm, self.layer = nn.Parameter(torch.rand(3, 8)), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.unsqueeze(1).repeat(1, x.shape[0], 1).transpose(0, 1)
        return self.norm(queries + self.layer(queries)).mean(1) + x


def test_a_batch_of_one_through_a_function_that_vmap_does_not_follow() -> None:
    law(lambda: nn.Sequential(Residual()), clipped, [(torch.randn(size, 8),) for size in (4, 4, 1, 1, 1, 5, 5)])


class Weighted(nn.Module):
    """Returns its loss, of two kinds, each weighted by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(8, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.layer(x)
        losses = torch.stack([F.cross_entropy(scores, y), scores.square().mean()])
        return ((-self.weights).exp() * losses + self.weights).sum()


def test_a_loss_that_is_compared_at_each_call() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = model(x, y)
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    with pytest.warns(
        enn.PerSampleWarning, match=r"runs eagerly, as Weighted returns a mean or a sum over the samples"
    ):
        law(Weighted, step, samples(4, 4, 4), least=0, most=0)


def test_the_ctc_loss_reads_lengths() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        scores, (counts, lengths) = (
            model(x.unflatten(1, (4, 2))).log_softmax(-1).transpose(0, 1),
            (y * 0 + 4, y * 0 + 1),
        )
        loss = F.ctc_loss(scores, y[:, None], counts, lengths, reduction="none").mean()
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    with pytest.warns(enn.PerSampleWarning, match=r"as torch reads the lengths for the CTC loss in line \d+ of"):
        law(lambda: nn.Sequential(nn.Linear(2, 4)), step, samples(4, 4, 4), least=0, most=0)


def test_distributions_look_at_their_arguments() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return distributions.Normal(x, m.own.expand_as(x).exp()).log_prob(x.cos())

    law(lambda: nn.Sequential(Beside(forward)), clipped, [(torch.randn(size, 4, 8),) for size in (3, 3, 5, 6)])


def test_a_table_by_an_index() -> None:
    batches = [(torch.randn(size, 4, 8),) for size in (3, 3, 3, 3, 5)]
    law(lambda: nn.Sequential(nn.Linear(8, 8), RelativeBias()), clipped, batches, least=2)


class Placed(nn.Module):
    """Adds two tables that all samples share, of positions `(1, T)` and `(T,)`."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.plain = nn.Embedding(4, 8), nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        row = self.row(torch.arange(4)[None]).expand(x.shape[0], -1, -1)
        return x + row + self.plain(torch.arange(4)).tanh()  # type: ignore[no-any-return]


class Prompted(nn.Module):
    """Puts the rows of a table before each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.table(torch.arange(4)[None]).repeat(x.shape[0], 1, 1), x], 1)


def test_a_table_that_is_repeated_takes_sizes_as_symbols() -> None:
    batches = [(torch.randn(size, 4, 8),) for size in (3, 3, 5, 6, 7, 9, 11)]
    law(lambda: nn.Sequential(Prompted(), nn.Linear(8, 8)), clipped, batches)


@pytest.mark.parametrize("sizes", [(3, 3, 5, 6, 7, 9, 11), (1, 1, 3, 3, 5, 6, 7, 9)])
def test_shared_tables(sizes: tuple[int, ...]) -> None:
    batches = [(torch.randn(size, 4, 8),) for size in sizes]
    law(lambda: nn.Sequential(Placed(), nn.Linear(8, 8)), clipped, batches, least=2)


class ByPositions(nn.Module):
    """Looks positions up by `arange(T)`, which a batch of T samples takes for the samples'."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.places(torch.arange(x.shape[1]))


@pytest.mark.filterwarnings("ignore:.*runs sample by sample from now on:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("sizes", [(5, 5, 6, 6, 6), (5, 6, 6, 6), (5, 5, 5, 5, 6, 5, 6)])
def test_a_size_at_which_a_layer_refuses_its_input_runs_eagerly_first(sizes: tuple[int, ...]) -> None:
    """Eagerly the forward starts over there, which no trace can."""
    law(ByPositions, clipped, [(torch.randint(7, (size, 6)),) for size in sizes])


@pytest.mark.parametrize("has_parameters", [True, False])
def test_a_module_that_is_first_called_in_the_trace(has_parameters: bool, tmp_path: Path) -> None:
    """As a file is there, which no key holds; the module takes part from then on: what is set on it is seen."""
    torch.manual_seed(0)
    other: nn.Module = enn.convert(nn.Linear(3, 3)) if has_parameters else nn.Dropout(0.0)
    models = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    others, file = [other, copy.deepcopy(other)], tmp_path / "calls the other"

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        out = models[number](x)
        if file.exists():
            out = others[number](out)
        F.cross_entropy(out, y).backward()
        return enn.clip_grad_sample_norms_(models[number], 1.0)

    compiled = enn.compile(lambda x, y: step(0, x, y), backend="eager")
    for turn, (x, y) in enumerate(samples(*[4] * 8)):
        if turn == 1:
            file.touch()
        if turn == 5 and not has_parameters:
            for module in others:
                module.p = 1.0
        for model in models:
            model.zero_grad()
        assert_same(compiled(x, y), step(1, x, y))


class Cached(nn.Module):
    """Attention with its keys behind those of a cache, which is empty, as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (part(x).unflatten(2, (2, 4)).transpose(1, 2) for part in (self.queries, self.keys))
        keys = torch.cat([torch.tensor([]), keys], -2)
        return (queries @ keys.transpose(-1, -2)).softmax(-1) @ keys


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
def test_a_compiler_may_lay_results_out_in_another_way() -> None:
    """Inductor's `cat` does, where one tensor is empty; the view of the result has to be a copy then."""
    step = law(
        Cached,
        clipped,
        [(torch.randn(size, 7, 8),) for size in (3, 3, 4, 5, 3, 4)],
        backend="aot_eager_decomp_partition",
    )
    assert graphs(step)


def test_views_of_memory_that_is_written_to_stay_views() -> None:
    targets: list[Any] = []

    def backend(graph: Any, examples: list[Any]) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    def written(model: nn.Module, x: Tensor) -> Any:
        h = x.clone()
        h.view(-1).mul_(2)
        loss = model(h.view(h.shape)).view(-1).square().sum()
        loss.backward()
        return loss.detach()

    law(lambda: nn.Linear(8, 3), written, [(torch.randn(4, 8),) for _ in range(4)], backend=backend)
    assert torch.ops.aten.view.default in targets
    assert torch.ops.aten.reshape.default in targets


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.chunk(2, 1)[1].mul_(2),
        lambda x: torch._foreach_mul_([x[:, 0], x[:, 1]], 2),
        lambda x: x.t()[2].view(-1, 1).mul_(2),
    ],
    ids=["whole", "piece", "several", "view"],
)
def test_inputs_that_a_graph_has_changed_are_as_before_if_an_assumption_fails(change: Callable[[Tensor], Any]) -> None:
    """The step runs eagerly then, and changes them itself."""

    def step(model: nn.Module, x: Tensor) -> Any:
        change(x)
        model(x).sum().backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    batches = [torch.randn(4, 8) for _ in range(4)]
    batches[3] *= 1e200  # whose squares are out of range
    model, results = enn.convert(nn.Linear(8, 3)).per_sample(), []
    for run in (enn.compile(step, backend="eager"), step):
        xs = [x.clone() for x in batches]
        for x in xs:
            model.zero_grad()
            norms = run(model, x)
        results.append((*xs, norms))
    assert_same(*results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("build", [perceptron, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 3))])
def test_default_backend(build: Callable[[], nn.Module]) -> None:
    law(build, classified, samples(4, 4, 5, 6), backend="inductor")


@pytest.mark.parametrize("fails_for", ["any size", "all"])
def test_a_compiler_that_fails(fails_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for each size alone; if that fails as well, the step runs eagerly."""

    def compiler(graph: Any, examples: list[Any]) -> Any:
        if fails_for == "all" or not all(isinstance(each, Tensor) for each in examples):
            raise RuntimeError("no way\nthrough")
        return graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compiler)
    words = "runs eagerly, as" if fails_for == "all" else "each size takes a graph of its own, as"
    with pytest.warns(enn.PerSampleWarning, match=f"{words} its compiler raises RuntimeError: no way"):
        step = law(perceptron, classified, samples(4, 4, 5, 6, 5), least=0, backend="failing")
    assert len(graphs(step)) == (0 if fails_for == "all" else 3)


class GatedTable(nn.Module):
    """A table whose rows are looked up, each times a gate of its own; and the table once more, as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Parameter(torch.randn(11, 6)), nn.Parameter(torch.randn(11))

    def forward(self, index: Tensor) -> Tensor:
        return self.table[index] * self.gate[index].sigmoid()[..., None]


class TextFilter(nn.Module):
    """Words, filtered along time in two ways, which a gate mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = GatedTable(), nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.table
        self.gate = nn.Linear(6, 6)
        self.filter, self.kernel = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 1, 3))

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index)
        filtered = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=7, dim=1)
        convolved = F.conv1d(x.mT, self.kernel, padding=1, groups=6).mT
        share = self.gate(x).sigmoid()
        return self.head(share * filtered + (1 - share) * convolved)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:Torchinductor does not:UserWarning")
def test_inductor_reads_what_is_written_before() -> None:
    """With its order for the least memory, torch 2.13 reads the gate's rows before they are added up."""
    batches = [(torch.randint(11, (4, 7)), torch.randint(11, (4, 7))) for _ in range(4)]

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x).mT, y).backward()
        return enn.per_sample_grads(model).norms()

    law(TextFilter, step, batches, backend="inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
def test_options_are_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = functools.partial(enn.compile, cpp_wrapper=True)
    monkeypatch.setattr(enn, "compile", compiled)
    law(perceptron, classified, samples(4, 4, 5, 6), backend="inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:Torchinductor does not:UserWarning")
def test_sums_by_an_index_on_two_threads() -> None:
    """Inductor calls torch's kernel for them there."""
    torch.set_num_threads(2)
    graph = make_fx(lambda v, i: torch.ops.aten.embedding_dense_backward(v, i, 9, -1, False))
    by_index = torch.ops.aten.embedding_dense_backward.default
    examples = [torch.randn(3, 4), torch.randint(9, (3,))]
    assert (by_index not in _decompositions({}, examples)) == _may_choose()
    assert any(node.target is by_index for node in graph(*examples).graph.nodes)
    batches = [(torch.randint(11, (size, 7)), torch.randint(3, (size,))) for size in (4, 4, 6, 5, 6, 1, 1)]

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x).mean(1), y).backward()
        return enn.clip_grad_sample_norms_(model, max_norm=0.1)

    try:
        law(lambda: nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 3)), step, batches, backend="inductor")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("tracing_mode", "left"), [("fake", 1), ("symbolic", 4)])
def test_small_products_are_spelled_out(tracing_mode: str, left: int) -> None:
    """For inductor, whose loops take them up; where sizes are symbols, they may be large ones at the next call."""

    def multiplied(a: Tensor, b: Tensor, offset: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        return a @ b, torch.addmm(offset, a, b), torch.bmm(a[None], b[None]), large @ large

    inputs = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5), torch.randn(21, 21)
    graph = make_fx(multiplied, tracing_mode=tracing_mode)(*inputs)
    _spell_out_small_products(graph)
    torch.testing.assert_close(graph(*inputs), multiplied(*inputs))
    assert sum(node.target in _PRODUCTS for node in graph.graph.nodes) == left


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_biases_are_added_behind_products(tracing_mode: str) -> None:
    """For inductor, whose loops take them up; an `addmm` would copy them first."""

    def sums(bias: Tensor, matrix: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        scaled = torch.addmm(bias, a, b, alpha=2)
        return torch.addmm(bias, a, b), torch.addmm(matrix, a, b), torch.addmm(bias[:1], a, b), scaled

    inputs = torch.randn(5), torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    graph = make_fx(sums, tracing_mode=tracing_mode)(*inputs)
    _take_biases_out(graph)
    torch.testing.assert_close(graph(*inputs), sums(*inputs))
    assert [node.target for node in graph.graph.nodes].count(torch.ops.aten.addmm.default) == 1


# --- sizes and kinds ----------------------------------------------------------------------------------------------


def test_batches_of_many_sizes_take_few_graphs() -> None:
    """As Poisson sampling draws them, none and one included."""
    torch.manual_seed(5)
    sizes = [4, *torch.randint(0, 30, (60,)).tolist()]
    model = enn.convert(perceptron()).per_sample()
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for (x, y), size in zip(samples(*sizes), sizes, strict=True):
        model.zero_grad()
        _, norms = step(x, y)
        assert norms.shape == (size,)
        rows = model[0].weight.grad_sample
        assert rows.shape == (size, 16, 8)
    assert len(graphs(step)) <= 5


def test_several_sizes_that_change_in_a_module_with_parameters_of_its_own() -> None:
    model = enn.convert(Scale(4)).per_sample()

    def step(x: Tensor) -> Any:
        model.zero_grad()
        loss = model(x).square().flatten(1).sum(1).mean()
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    compiled = enn.compile(step, backend="eager")
    for sizes in ((3, 5), (4, 6), (5, 5), (6, 7), (7, 8), (9, 9), (12, 3)):
        x = torch.randn(*sizes, 4)
        assert_same(compiled(x), step(x))
    assert len(graphs(compiled)) <= 3


class Filled(nn.Module):
    """Fills tensors that it makes: its result by slices, as a Fourier layer does, and a matrix from a parameter."""

    def __init__(self, make: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.scale, self.upper, self.make = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(6)), make

    def forward(self, x: Tensor) -> Tensor:
        matrix, result = torch.zeros(4, 4), self.make(x.shape[0], 6)
        rows, columns = torch.triu_indices(4, 4, 1)
        matrix[rows, columns] = self.upper
        result[:, :4] = x * self.scale @ (matrix - matrix.T)
        return result.sin()


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, lambda *size: torch.empty(size).fill_(0.5)])
def test_tensors_that_a_forward_makes_and_fills(make: Callable[[int, int], Tensor]) -> None:
    model = enn.convert(Filled(make)).per_sample()

    def step(x: Tensor) -> Any:
        model.zero_grad()
        model(x).square().sum(1).mean().backward()
        return enn.clip_grad_sample_norms_(model, 1.0), model.upper.grad_sample

    compiled = enn.compile(step, backend="eager")
    for size in (3, 3, 4, 5, 1, 7):
        x = torch.randn(size, 4)
        assert_same(compiled(x), step(x))
    assert 1 <= len(graphs(compiled)) <= 3


def test_sizes_that_come_once_are_not_compiled() -> None:
    """None and one have graphs of their own, which may take as long to compile as an epoch takes."""
    sizes = [8, 8, 5, 1, 7, 0, 6, 1, 0, 9]
    model, counts = enn.convert(perceptron()).per_sample(), []
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for x, y in samples(*sizes):
        model.zero_grad()
        step(x, y)
        counts.append(len(graphs(step)))
    assert counts == [0, 1, 2, 2, 2, 2, 2, 3, 4, 4]


def test_a_length_takes_a_graph_for_each_size() -> None:
    model = enn.convert(perceptron()).per_sample(loss_reduction="sum")

    def step(x: Tensor, y: Tensor, count: Callable[[Tensor], int]) -> None:
        (F.cross_entropy(model(x), y, reduction="sum") / count(x)).backward()

    by_len = enn.compile(lambda x, y: step(x, y, len), backend="eager")
    by_shape = enn.compile(lambda x, y: step(x, y, lambda x: x.shape[0]), backend="eager")

    def run(compiled: Any) -> None:
        for x, y in samples(4, 4, 5, 6, 7):
            model.zero_grad()
            compiled(x, y)

    with pytest.warns(enn.PerSampleWarning, match=r"each size takes a graph.* line \d+ of .*test_compiled_step.*shape"):
        run(by_len)
    run(by_shape)
    assert len(graphs(by_len)) == 4
    assert len(graphs(by_shape)) == 2


def test_modes_and_frozen_layers_have_graphs_of_their_own() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))).per_sample()
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    (x, y), *_ = samples(4)

    def norms(run: Callable[..., Any]) -> Tensor:
        model.zero_grad()
        torch.manual_seed(2)
        result: Tensor = run(x, y)[1]
        return result

    def both() -> None:
        for _ in range(3):
            torch.testing.assert_close(norms(step), norms(lambda x, y: classified(model, x, y)))

    both()
    model.eval()
    both()
    model[0].requires_grad_(False)
    both()
    assert model[0].weight.grad_sample is None
    model.per_sample(loss_reduction="sum")
    both()
    model[1].p = 0.1
    model.train()
    both()
    model[2] = enn.convert(nn.Linear(8, 3)).per_sample()
    model.per_sample()
    both()
    model.per_sample(False)
    with pytest.raises(enn.PerSampleError, match="no per-sample gradients"):
        step(x, y)


LEGACY = np.random.mtrand  # the generator that all share, which most scripts use


@pytest.mark.parametrize("draw", [random.random, lambda: float(LEGACY.rand())], ids=["python", "numpy"])
def test_random_numbers_of_others_run_eagerly(draw: Callable[[], float]) -> None:
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        return classified(model, x * draw(), y)[1]  # type: ignore[no-any-return]

    compiled = enn.compile(step, backend="eager")
    for number in range(4):
        results = []
        for run in (compiled, step):
            random.seed(number), LEGACY.seed(number)
            model.zero_grad()
            warns = number == 1 and run is compiled
            with pytest.warns(enn.PerSampleWarning, match="Python or NumPy") if warns else nullcontext():
                results.append(run(x, y))
        torch.testing.assert_close(*results)


def test_a_line_that_no_file_has() -> None:
    """As of `python -c`, in a program without any other code of the user's."""
    code = """if True:
        import torch, expanded_nn as enn
        model = enn.convert(torch.nn.Linear(3, 2)).per_sample()
        @enn.compile(backend="eager")
        def step(x):
            if model(x).sum() > 0:
                pass
        step(torch.randn(4, 3))
        step(torch.randn(4, 3))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the step reads a value of a tensor in code without a file; wanted" in done.stderr


SCALES = dict.fromkeys(range(20), 0.5) | {4: 2.0, 6: 3.0}


@functools.cache
def scale_for(size: int) -> float:
    return 1.0 / size


@pytest.mark.parametrize(
    "scale",
    [lambda size: float(np.sqrt(size)), lambda size: SCALES[size], scale_for],
    ids=["NumPy", "a key", "a cache"],
)
def test_what_takes_no_symbol_has_a_graph_for_each_size(scale: Callable[[int], float]) -> None:
    model = enn.convert(perceptron()).per_sample()

    def step(x: Tensor, y: Tensor) -> Tensor:
        (F.cross_entropy(model(x), y) * scale(x.shape[0])).backward()
        return enn.per_sample_grads(model).norms()

    compiled, said = enn.compile(step, backend="eager"), 0
    for batch in samples(4, 4, 5, 6, 5, 4, 6):
        results = []
        for run in (compiled, step):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(run(*batch))
            words = "each size takes a graph of its own, as its trace raises TypeError"
            said += sum(words in str(each.message) for each in caught)
            assert len(caught) <= 1
        torch.testing.assert_close(*results)
    assert said == 1
    assert len(graphs(compiled)) == 3


def test_a_fault_of_the_step_is_its_own() -> None:
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor, fault: bool) -> None:
        classified(model, x, y)
        if fault:
            raise KeyError("of the user's own")

    compiled = enn.compile(step, backend="eager")
    compiled(x, y, False)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(KeyError, match="of the user's own"):
            compiled(x, y, True)


def test_an_empty_batch_of_a_mean() -> None:
    """Its mean is `nan`, and its trace divides by zero."""
    model = enn.convert(perceptron()).per_sample()
    compiled = enn.compile(lambda x: F.mse_loss(model(x), torch.zeros(len(x), 3)).backward(), backend="eager")
    for size in (4, 4, 0, 0, 0, 4):
        model.zero_grad()
        compiled(torch.randn(size, 8))
        assert model[0].weight.grad_sample.shape == (size, 16, 8)


def triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


@pytest.mark.parametrize("where", ["all_modules", "gradient"])
def test_other_hooks_that_come_later(where: str) -> None:
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return model[0].weight.grad

    compiled, handle = enn.compile(step, backend="eager"), None
    try:
        for number in range(6):
            if number == 3 and where == "gradient":
                handle = model[0].weight.register_post_accumulate_grad_hook(triple)
            elif number == 3:
                double = lambda module, _, output: 2 * output if isinstance(module, nn.Tanh) else None  # noqa: E731
                handle = nn.modules.module.register_module_forward_hook(double)
            results = []
            for run in (compiled, step):
                model.zero_grad()
                results.append(run(x, y))
            torch.testing.assert_close(*results)
    finally:
        if handle is not None:
            handle.remove()


def test_hooks_that_come_later_are_seen() -> None:
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for _ in range(3):
        model.zero_grad()
        loss, _ = step(x, y)
    losses = [loss]
    for factor in (0, 2):  # one takes the place of the other
        handle = model[0].register_forward_hook(lambda module, args, output, factor=factor: factor * output)
        for _ in range(3):
            model.zero_grad()
            loss, _ = step(x, y)
            assert all(not torch.equal(loss, before) for before in losses)
        losses.append(loss)
        handle.remove()


def test_new_values_are_seen() -> None:
    """Optimizer steps, loaded weights and `.data` make no new graph."""
    model, other = enn.convert(perceptron()).per_sample(), perceptron()
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    (x, y), *_ = samples(4)
    for _ in range(2):
        model.zero_grad()
        step(x, y)
    torch.optim.Adam(model.parameters()).step()
    model.load_state_dict(other.state_dict())
    model[3].bias.data = torch.ones(3)
    model.zero_grad()
    loss, _ = step(x, y)
    other[3].bias.data = torch.ones(3)
    torch.testing.assert_close(loss, F.cross_entropy(other(x), y).detach())
    assert len(graphs(step)) == 1


# --- what steps do ------------------------------------------------------------------------------------------------


def algebra(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    grads = enn.per_sample_grads(model)
    return grads, grads.norms(), grads.mean(), grads.gram(), grads.var()


def several_backwards(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(model(2 * x), y).backward()
    return enn.clip_grad_sample_norms_(model, {"": 1.0})


def one_graph_twice(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    scores = model(x)
    scores.square().mean(1).mean().backward(retain_graph=True)
    F.cross_entropy(scores, y).backward()
    return enn.clip_grad_sample_norms_(model, lambda norms: 1 / (norms + 0.01))


def laplacian(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (slope.square().sum(1) - y).square().mean()
    loss.backward()
    return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    return enn.clip_grad_sample_norms_(model, 1.0)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """A step that changes gradients and parameters, and returns a number."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    enn.clip_grad_sample_norms_(model, 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter)
            parameter -= 0.1 * parameter.grad
    return {"loss": loss.item(), "scores": (model(x).detach(), None, "text")}


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return enn.clip_grad_sample_norms_(model, 1.0)


def of_distributions(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """As in REINFORCE and a VAE; distributions look at the values that they are given."""
    scores = model(x)
    choice, place = distributions.Categorical(logits=scores), distributions.Normal(scores, scores.exp() + 0.1)
    prior = distributions.Normal(torch.zeros(3), torch.ones(3))
    drawn = place.rsample()
    losses = distributions.kl_divergence(place, prior).sum(1) - prior.log_prob(drawn).sum(1) - choice.entropy()
    (losses - choice.log_prob(y)).mean().backward()
    return enn.clip_grad_sample_norms_(model, 1.0), drawn.detach()


STEPS = [
    classified, algebra, several_backwards, one_graph_twice, laplacian, checkpointed, by_hand, under_autocast,
    of_distributions,
]  # fmt: skip


@dataclass(frozen=True)
class Example:
    """What a step is given, and what it returns."""

    x: Tensor
    y: Tensor
    note: str


def test_a_step_takes_and_returns_a_frozen_dataclass() -> None:
    plain = nn.Linear(8, 3)
    model = enn.convert(plain).per_sample()

    @enn.compile(backend="eager")
    def step(batch: Example) -> Example:
        loss = F.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        return Example(loss.detach(), model.weight.grad_sample.flatten(1).norm(dim=1), batch.note)

    returned = []
    for x, y in samples(4, 4, 4):
        model.zero_grad()
        returned.append(step(Example(x, y, "given")))
        losses = F.cross_entropy(plain(x), y, reduction="none")
        alone = [torch.autograd.grad(loss, plain.weight, retain_graph=True)[0].norm() for loss in losses]
        torch.testing.assert_close(returned[-1].x, losses.mean().detach())
        torch.testing.assert_close(returned[-1].y, torch.stack(alone))
    assert len(graphs(step)) == 1
    assert {example.note for example in returned} == {"given"}


@pytest.mark.parametrize("step", some(STEPS), ids=lambda step: step.__name__)
def test_steps(step: Callable[..., Any]) -> None:
    law(perceptron, step, samples(4, 4, 5, 5, 4))


@pytest.mark.parametrize(
    "step",
    [step if step is algebra else pytest.param(step, marks=pytest.mark.slow) for step in STEPS],
    ids=lambda step: step.__name__,
)
@pytest.mark.parametrize("settings", [{"materialize": True}, {"loss_reduction": "sum"}], ids=str)
def test_steps_with_other_settings(step: Callable[..., Any], settings: dict[str, Any]) -> None:
    law(perceptron, step, samples(4, 4, 5, 5, 4), **settings)


class Own(nn.Module):
    """Parameters of its own, a buffer that changes, a counter, and a weight that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(1))
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.out = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.two(self.one(x).relu()) * self.scale + self.shift
        out: Tensor = self.out(h)
        return out


class Counts(nn.Module):
    """A buffer that each forward changes, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().abs().mean()
        self.last = x.detach().mean(0)
        out: Tensor = self.out(x + self.seen)
        return out


def test_the_general_rule_and_tied_weights() -> None:
    law(Own, classified, samples(4, 4, 4, 5, 6))


def test_buffers_change() -> None:
    law(Counts, classified, samples(4, 4, 4, 5, 6), compare=False)  # statistics of the batch


def test_random_numbers_are_drawn_anew() -> None:
    law(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)), classified, samples(4, 4, 4, 5, 6))


def test_gradients_of_arguments() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return x.grad

    batches = [(x.requires_grad_(), y) for x, y in samples(4, 4, 4)]
    models = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = enn.compile(lambda x, y: step(models[0], x, y), backend="eager")
    for x, y in batches:
        mine, theirs = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
        compiled(mine, y), step(models[1], theirs, y)
        torch.testing.assert_close(mine.grad, theirs.grad)
        for model in models:
            model.zero_grad()
    assert graphs(compiled)


def test_two_models_one_of_them_plain() -> None:
    model, teacher = enn.convert(perceptron()).per_sample(), perceptron()

    def step(x: Tensor) -> Tensor:
        loss = (model(x) - teacher(x)).square().mean(1).mean()
        loss.backward()
        return loss.detach()

    compiled, (x, _) = enn.compile(step, backend="eager"), samples(4)[0]
    results = []
    for run in (compiled, compiled, compiled, step):
        model.zero_grad()
        teacher.zero_grad()
        results.append((run(x), teacher[0].weight.grad, model[0].weight.grad_sample))
    for result in results:
        assert_same(result, results[-1])
    assert len(graphs(compiled)) == 1


# --- gradients that are there already -------------------------------------------------------------------------------


def test_gradients_are_cleared_within_the_step() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        model.zero_grad()
        return classified(model, x, y)

    law(perceptron, step, samples(4, 4, 4, 4), clear=False)


@pytest.mark.filterwarnings("ignore:clip_grad_sample_norms_. .grad holds the clipped sum from before the parameters")
def test_clipping_accumulates() -> None:
    law(perceptron, classified, samples(4, 4, 4, 5, 6), clear=False, accumulate_grad=False)


def test_clipping_rows_of_earlier_calls_runs_eagerly() -> None:
    """The warning points to the user's line."""
    model = enn.convert(perceptron()).per_sample()
    compiled = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in samples(4, 4, 4):
            compiled(x, y)
    (warning,) = caught
    assert linecache.getline(warning.filename, warning.lineno).strip() == "compiled(x, y)"
    text = str(warning.message)
    assert "runs eagerly, as it uses per-sample gradients from before the call (clear them, model.zero_grad();" in text
    assert model[0].weight.grad_sample.shape == (12, 16, 8)


def test_what_a_graph_takes_for_granted() -> None:
    """Norms whose squares are out of range, and such as are not finite: the step runs eagerly."""
    model = enn.convert(nn.Linear(8, 3)).per_sample()
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    x, y = samples(4)[0]
    for factor in (1.0, 1.0, 1e-200, 1.0):
        model.zero_grad()
        _, norms = step(factor * x, y)
        expected = enn.convert(nn.Linear(8, 3)).per_sample()
        expected.load_state_dict(model.state_dict())
        torch.testing.assert_close(norms, classified(expected, factor * x, y)[1])
    model.zero_grad()
    x[1, 2] = float("nan")
    with pytest.raises(enn.PerSampleError, match="inf or NaN"):
        step(x, y)
    assert len(graphs(step)) == 1


def test_what_a_distribution_does_not_allow_is_refused_as_eagerly() -> None:
    model = enn.convert(nn.Linear(8, 3)).per_sample()

    def step(x: Tensor, scale: Tensor) -> Tensor:
        normal = distributions.Normal(model(x), scale, validate_args=True)  # torch.compile switches it off for all
        (-normal.log_prob(x[:, :3])).sum(1).mean().backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    compiled, (x, _) = enn.compile(step, backend="eager"), samples(4)[0]
    for scale in (1.0, 2.0, -1.0, 3.0):
        model.zero_grad()
        with pytest.raises(ValueError, match="parameter scale") if scale < 0 else nullcontext():
            compiled(x, torch.tensor(scale))
    assert len(graphs(compiled)) == 1
    norms = enn.per_sample_grads(model).norms()
    model.zero_grad()
    torch.testing.assert_close(norms, step(x, torch.tensor(3.0)))


class Sorting(nn.Module):
    """Sorts its samples between two layers, and goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(self.first(x)[order])[order.argsort()]


def test_samples_that_change_places_after_the_trace() -> None:
    """The graph assumes the order of the first batches; another one is noticed, and the step goes on eagerly."""
    (x, y), *_ = samples(4)
    x = x[x[:, 0].argsort()]
    model, other = (enn.convert(Sorting()).per_sample() for _ in range(2))
    other.load_state_dict(model.state_dict())
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for number, batch in enumerate((x, x, x, x.flip(0), x.flip(0))):
        model.zero_grad(), other.zero_grad()
        with pytest.warns(enn.PerSampleWarning, match="each other's places") if number == 3 else nullcontext():
            compiled = step(batch, y)
        alone = [classified_alone(other, batch[i : i + 1], y[i : i + 1]) for i in range(4)]
        torch.testing.assert_close(compiled[1], torch.cat(alone))
        assert number not in (1, 2) or len(graphs(step)) == 1


def classified_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The norm of one sample's gradient."""
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return enn.per_sample_grads(model).norms()


def test_what_follows_a_graph_may_be_eager() -> None:
    """Rows, `.grad` and what is known of both are as after an eager step."""
    models = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    compiled = enn.compile(lambda x, y: backward(models[0], x, y), backend="eager")
    batches = samples(4, 4, 4, 5)
    for model, run in zip(models, (compiled, lambda x, y: backward(models[1], x, y)), strict=True):
        for x, y in batches[:3]:
            model.zero_grad()
            run(x, y)
        backward(model, *batches[3])  # appends
        assert model[0].weight.grad_sample.shape[0] == 9
        enn.clip_grad_sample_norms_(model, 1.0)
    assert_same(outcome(models[0], None), outcome(models[1], None))
    for model in models:
        model.zero_grad()
        backward(model, *batches[3])
        assert model[0].weight.grad_sample.shape[0] == 5


# --- errors -------------------------------------------------------------------------------------------------------


def refused(step: Callable[..., Any], model: nn.Module, match: str) -> None:
    """The second call, which is traced, raises, and leaves the model as it was."""
    compiled, (x, y) = enn.compile(step, backend="eager"), samples(4)[0]
    compiled(x, y)
    model.zero_grad()
    before = outcome(model, None)
    with pytest.raises(enn.PerSampleError, match=match):
        compiled(x, y)
    after = outcome(model, None)
    assert all(after[name] is value for name, value in before.items() if isinstance(value, Tensor))
    model.zero_grad()
    classified(model, x, y)
    assert model[0].weight.grad_sample.shape[0] == 4


def test_values_are_refused_by_the_line() -> None:
    model = enn.convert(perceptron()).per_sample()

    def step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        if loss > 0:
            loss.backward()

    def by_item(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 0:
            loss.backward()

    refused(step, model, r"reads a value of a tensor in line \d+ of .*test_compiled_step.py: if loss > 0:")
    refused(by_item, model, r"reads a value of a tensor in line \d+ of .*test_compiled_step.py: if loss\.item\(\) > 0:")


def test_an_optimizer_is_refused() -> None:
    model = enn.convert(perceptron()).per_sample()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        classified(model, x, y)
        optimizer.step()

    refused(step, model, r"calls SGD.step\(\).*Call the optimizer after the compiled step")


def test_a_result_with_a_history_is_refused() -> None:
    model = enn.convert(perceptron()).per_sample()
    refused(lambda x, y: F.cross_entropy(model(x), y), model, "has called no backward")


def test_random_numbers_within_a_backward_run_eagerly() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))).per_sample()
    step, (x, y) = enn.compile(lambda x, y: checkpointed(model, x, y), backend="eager"), samples(4)[0]
    step(x, y)
    model.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match="random numbers within a backward"):
        step(x, y)
    assert model[0].weight.grad_sample.shape[0] == 4


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)[:, None, None]
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5 if self.training else 0.0)[:, 0, 0]


def test_fused_attention_without_dropout_draws_nothing() -> None:
    """Torch marks it as an operation that draws, whatever its dropout is."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Attends().eval(), nn.Linear(8, 3))

    compiled = law(build, checkpointed, samples(4, 4, 4))
    assert not graphs(compiled)[0].draws


def test_a_decorator() -> None:
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        """Clips."""
        return classified(model, x, y)

    assert step.__name__ == "step"
    assert step.__doc__ == "Clips."
    x, y = samples(4)[0]
    for _ in range(3):
        model.zero_grad()
        step(x, y=y)
    assert len(graphs(step)) == 1


def test_attributes_that_the_user_sets_are_those_of_the_step() -> None:
    """Whatever their names: the step finds them, also by its own name, and so does the one who has set them."""
    model = enn.convert(perceptron()).per_sample()

    def step(x: Tensor, y: Tensor) -> Tensor:
        (F.cross_entropy(model(x), y) * compiled.families).backward()
        return parameter_grads(model)

    step.last = 3  # type: ignore[attr-defined]
    compiled = enn.compile(step, backend="eager")
    compiled.families, (x, y) = 2.0, samples(4)[0]
    grads = []
    for number in range(6):
        model.zero_grad()
        compiled.families = 2.0 if number < 3 else 6.0
        grads.append(compiled(x, y))
    torch.testing.assert_close(3 * grads[0], grads[5])
    assert compiled.last == 3
    assert step.families == 6.0  # type: ignore[attr-defined]
    assert compiled.__name__ == "step"
    assert copy.copy(compiled).families == 6.0
    del compiled.families
    assert not hasattr(step, "families")
    with pytest.raises(AttributeError, match="mets"):
        compiled.mets  # noqa: B018
    assert len(graphs(compiled)) == 2


def parameter_grads(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


def test_without_gradients_a_step_runs_as_it_is() -> None:
    model = enn.convert(perceptron()).per_sample()
    step = enn.compile(lambda x: model(x), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(samples(4)[0][0]), model(samples(4)[0][0]))
    assert not graphs(step)


def test_gradients_that_arguments_have_already() -> None:
    """An argument whose `.grad` is there is added to, one whose is not gets its own."""
    model = enn.convert(perceptron()).per_sample()
    step = enn.compile(lambda x, y: F.cross_entropy(model(x), y).backward(), backend="eager")
    (x, y), *_ = samples(4)

    def left(run: Callable[..., Any], grad: Tensor | None) -> Tensor:
        leaf = x.clone().requires_grad_()
        leaf.grad = None if grad is None else grad.clone()
        model.zero_grad()
        run(leaf, y)
        assert leaf.grad is not None
        return leaf.grad

    for grad in (None, None, None, torch.ones_like(x), torch.ones_like(x), torch.ones_like(x), None):
        torch.testing.assert_close(left(step, grad), left(step.__wrapped__, grad))


class Remembers(nn.Module):
    """A tensor that is an attribute, and another one after each forward; a tuple among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.last, self.factors = nn.Linear(8, 3), torch.zeros(3), (1.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x) * self.factors[1] + self.last
        self.last = out.detach().mean(0)
        return out


def test_attributes_of_modules() -> None:
    compiled = law(Remembers, classified, samples(4, 4, 4, 5, 6))
    model = next(module for module in compiled._graphs.met.modules if isinstance(module, Remembers))
    (x, y), *_ = samples(4)
    model.zero_grad()
    before = compiled(x, y)[0]
    model.factors, model.last = (1.0, 30.0), torch.zeros(3)
    model.zero_grad()
    assert not torch.isclose(compiled(x, y)[0], before)


LOG: list[Any] = []


def logged(loss: Tensor) -> None:
    LOG.append(loss.item())


def printed(loss: Tensor) -> None:
    print(f"{loss.item():.3f}")


def rounded(loss: Tensor) -> None:
    LOG.append(float(loss.detach()))


def counted(loss: Tensor) -> None:
    LOG.append((loss > 0).int().item())


@pytest.mark.parametrize("use", [logged, printed, rounded, counted], ids=lambda use: use.__name__)
def test_values_that_leave_the_step_are_refused(use: Callable[[Tensor], None]) -> None:
    """The graph would keep a symbol, or not be asked again."""
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        use(loss)

    LOG.clear()
    first, second, third = samples(4, 4, 5)
    step(*first)
    model.zero_grad()
    for batch in (second, third):
        with pytest.raises(
            enn.PerSampleError, match=rf"reads a value of a tensor in line {use.__code__.co_firstlineno + 1} "
        ):
            step(*batch)
        assert all(parameter.grad is None for parameter in model.parameters())
    F.cross_entropy(model(third[0]), third[1]).backward()
    assert model[0].weight.grad_sample.shape == (5, 16, 8)


def test_a_value_may_be_used_in_the_step() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        (loss * loss.item()).backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    law(perceptron, step, samples(4, 4, 4, 5))


@pytest.mark.parametrize(
    "build", [perceptron, Own, lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(32, 3))]
)
def test_samples_without_a_loss(build: Callable[[], nn.Module]) -> None:
    """They are no reason to leave the graph: it is made anew once, so as to know them."""

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        x = x.mul(9).abs().long().clamp(max=8) if isinstance(model, nn.Sequential) and "Emb" in repr(model) else x
        losses = F.cross_entropy(model(x), y, reduction="none") * (y != 2)
        losses.mean().backward()
        return losses.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    batches = samples(4, 4, 5, 5, 6, 5, 4, 7)
    assert any((y == 2).any() for _, y in batches[2:])
    compiled = law(build, step, [*batches, (batches[0][0], torch.full((4,), 2))])
    (family,) = compiled._graphs.families.values()
    assert family.is_thorough
    assert not family.is_eager
    assert family.faults == 0


def test_a_pass_of_any_size_in_one_graph() -> None:
    """The second graph has a symbol for the size, which `one_pass` takes as a number without making it one."""
    model = enn.convert(nn.Sequential(nn.Linear(3, 2))).per_sample()

    def call(x: Tensor) -> None:
        with enn.one_pass(model, x.shape[0]):
            model[0](x).square().sum(1).mean().backward()

    compiled = enn.compile(call, backend="eager")
    for size in (4, 4, 5, 6, 7):
        model.zero_grad()
        compiled(torch.randn(size, 3))
        assert len(model[0].weight.grad_sample) == size
    assert [len(family.graphs) for family in compiled._graphs.families.values()] == [2]


def test_a_bound_that_is_a_tensor() -> None:
    """It changes from call to call, and is no value that the step reads."""
    (x, y), *_ = samples(4)
    model, other = (enn.convert(nn.Linear(x.shape[1], 3)).per_sample() for _ in range(2))
    other.load_state_dict(model.state_dict())

    def clipped(model: Any, bound: Tensor) -> Tensor:
        F.cross_entropy(model(x), y % 3).backward()
        return enn.clip_grad_sample_norms_(model, bound)  # type: ignore[return-value]

    step = enn.compile(lambda bound: clipped(model, bound), backend="eager")
    for bound in (1.0, 0.5, 0.1, 0.01):
        model.zero_grad(), other.zero_grad()
        torch.testing.assert_close(step(torch.tensor(bound)), clipped(other, torch.tensor(bound)))
        torch.testing.assert_close(model.weight.grad, other.weight.grad)
    assert len(graphs(step)) == 1
    with pytest.raises(ValueError, match=r"max_norm is .*wanted a number above 0"):
        step(torch.tensor(-1.0))
