"""A new graph of `enn.compile` beside one eager step: what differs runs eagerly, and rounding is no difference."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import expanded_nn as enn
from expanded_nn.compiling.comparison import Comparison
from test_compiled_step import assert_same, graphs, outcome, perceptron, samples


def has_values(tensor: Tensor) -> bool:
    """What transformers' `is_tracing` and its like come to."""
    return not isinstance(tensor, FakeTensor)


def another_loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach() if has_values(x) else 2 * loss.detach()


def another_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    (loss if has_values(x) else 2 * loss).backward()


def no_gradient(model: Any, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    if has_values(x):
        model[0].weight.grad = None


def other_rows(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Of the same sum."""
    x, y = (x, y) if has_values(x) else (x.flip(0), y.flip(0))
    F.cross_entropy(model(x), y).backward()


def no_rows(model: Any, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad_sample = None if has_values(x) else model[0].weight.grad_sample * 2


def another_buffer(model: Any, x: Tensor, y: Tensor) -> Any:
    if has_values(x):
        model.count.add_(1)
    F.cross_entropy(model(x), y).backward()


def another_change(model: Any, x: Tensor, y: Tensor) -> Any:
    model.count.add_(1 if has_values(x) else 2)
    F.cross_entropy(model(x), y).backward()


def another_attribute(model: Any, x: Tensor, y: Tensor) -> Any:
    model.mean = x.mean(0) if has_values(x) else x.sum(0)
    F.cross_entropy(model(x), y).backward()


def frozen(model: Any, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    model[0].bias.requires_grad_(not has_values(x))


def another_number(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    return 1 if has_values(x) else 2


def another_argument(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    if has_values(x):
        y.zero_()


def more_rows(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    if has_values(x):
        F.cross_entropy(model(2 * x), y).backward()


def fewer_rows(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    if not has_values(x):
        F.cross_entropy(model(2 * x), y).backward()


def rows_of_other_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    (model(x) if has_values(x) else model[0](x)).sum().backward()


def one_attribute_fewer(model: Any, x: Tensor, y: Tensor) -> Any:
    F.cross_entropy(model(x), y).backward()
    if not has_values(x):
        del model.mean


STEPS: dict[Callable[..., Any], str] = {
    another_loss: "another returned value than",
    another_gradient: r"another \.grad of 0\.weight than",
    no_gradient: r"another \.grad of 0\.weight than",
    other_rows: "another grad_sample of",
    no_rows: "another grad_sample than",
    another_buffer: r"another tensor of shape \(\), which the step changes",
    another_change: r"another tensor of shape \(\), changed in place",
    another_attribute: "another attribute mean than",
    frozen: r"another requires_grad of 0\.bias than",
    another_number: "another returned value than",
    another_argument: r"another tensor of shape \(4,\), which the step changes",
    more_rows: "another number of rows than",
    fewer_rows: "another number of rows than",
    rows_of_other_parameters: "another number of rows than",
    one_attribute_fewer: "another attribute mean than",
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_trace_that_goes_another_way(step: Callable[..., Any]) -> None:
    """One warning names what differs first, and every call is as the eager one."""
    models, batches = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = enn.convert(perceptron()).per_sample()
        model.register_buffer("count", torch.zeros(()))
        model.mean = torch.zeros(8)
        models.append(model)
        batches.append(samples(4, 4, 4, 4))
    mine, theirs = models
    compiled = enn.compile(lambda x, y: step(mine, x, y), backend="eager")
    for call, (batch, other) in enumerate(zip(*batches, strict=True)):
        results = []
        expected = pytest.warns(enn.PerSampleWarning, match=f"eagerly, as its graph leaves {STEPS[step]}")
        for model, run in ((mine, compiled), (theirs, lambda x, y: step(theirs, x, y))):
            for parameter in model.parameters():
                parameter.requires_grad_(True).grad = None
            torch.manual_seed(call)
            with expected if model is mine and call == 1 else nullcontext():
                result = run(*(batch if model is mine else other))
            results.append([outcome(model, result), model.mean, torch.get_rng_state()])
        assert_same(*results)
        assert_same(batch, other)
    assert not graphs(compiled)


def broken(target: Any) -> Callable[..., Any]:
    """A backend that forgets one operation of the graph."""

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        node = next(node for node in graph.graph.nodes if node.target is target)
        node.replace_all_uses_with(node.args[0])
        graph.recompile()
        return graph

    return backend


@pytest.mark.parametrize("target", [torch.ops.aten.tanh.default, torch.ops.aten.tanh_backward.default])
def test_a_graph_that_is_broken(target: Any) -> None:
    model, other = (copy.deepcopy(enn.convert(perceptron()).per_sample()) for _ in range(2))
    other.load_state_dict(model.state_dict())

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 1.0)

    compiled = enn.compile(step, backend=broken(target))
    for call, (x, y) in enumerate(samples(4, 4, 4)):
        model.zero_grad()
        other.zero_grad()
        with pytest.warns(enn.PerSampleWarning, match="its graph leaves another") if call == 1 else nullcontext():
            result = compiled(model, x, y)
        assert_same(outcome(model, result), outcome(other, step(other, x, y)))


def test_random_numbers_are_those_of_the_eager_step() -> None:
    model = enn.convert(nn.Sequential(perceptron(), nn.Dropout(0.5))).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(4):
        model.zero_grad()
        torch.manual_seed(0)
        losses.append(step(*samples(4)[0]))
    assert len(graphs(step)) == 1
    assert_same(losses, losses[:1] * 4)


def test_other_random_numbers_are_not_compared() -> None:
    """Those of a backend of which nothing is known."""

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            torch.rand(1)
            return graph(*inputs)

        return run

    model = enn.convert(nn.Sequential(perceptron(), nn.Dropout(0.5))).per_sample()

    @enn.compile(backend=backend)
    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()

    for x, y in samples(4, 4, 4):
        model.zero_grad()
        step(x, y)
    assert len(graphs(step)) == 1


# --- rounding -----------------------------------------------------------------------------------------------------


def difference(found: Any, wanted: Any, dtype: torch.dtype = torch.float32, largest: float = 0.0) -> str | None:
    comparison = Comparison(torch.finfo(dtype).eps)
    comparison.add("values", "value", found, wanted)
    comparison.add("values", "largest", torch.tensor(largest), torch.tensor(largest))
    return comparison.first_difference()


def test_rounding_is_no_difference() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(10_000, dtype=torch.float32)
    noise = torch.randn(10_000, dtype=torch.float32)
    assert difference(wanted + 1e-5 * noise, wanted) is None
    assert difference(wanted + 1e-2 * noise, wanted) is not None
    assert difference(wanted.half() + (1e-2 * noise).half(), wanted.half(), torch.float16) is None
    assert difference(2 * wanted.half(), wanted.half(), torch.float16) is not None
    assert difference(wanted.double() + 1e-6 * noise, wanted.double(), torch.float64) is not None
    # one of many values that a comparison has decided the other way
    assert difference(wanted.index_fill(0, torch.tensor([7]), 0.0), wanted) is not None
    assert difference(wanted.repeat(100).index_fill(0, torch.tensor([7]), 0.0), wanted.repeat(100)) is None
    # what cancels to zero is compared with the others
    assert difference(1e-8 * noise, -1e-8 * noise) is not None
    assert difference(1e-8 * noise, -1e-8 * noise, largest=1.0) is None


def test_what_is_not_finite_and_what_are_no_floats() -> None:
    nan, inf = float("nan"), float("inf")
    wanted = torch.tensor([1.0, nan, inf, -inf])
    assert difference(wanted.clone(), wanted) is None
    assert difference(torch.tensor([1.0, nan, -inf, -inf]), wanted) is not None
    assert difference(torch.tensor([1.0, nan, nan, -inf]), wanted) is not None
    assert difference(torch.tensor([2.0, nan, inf, -inf]), wanted) is not None
    assert difference(torch.tensor([nan, nan, inf, -inf]), wanted) is not None
    whole = torch.arange(1000)
    assert difference(whole.clone(), whole) is None
    assert difference(whole.index_fill(0, torch.tensor([3]), 0), whole) is not None
    assert difference(whole[:3], whole) is not None
    assert difference(whole.int(), whole) is not None
    assert difference({"a": [1.0, None]}, {"a": [1.0, None]}) is None
    assert difference({"a": [1.0, None]}, {"b": [1.0, None]}) is not None
    assert difference([1.0, "x"], [1.0, "y"]) is not None
    assert difference((1.0, 2), (1.1, 2)) is not None
    assert difference(torch.zeros(3, 0), torch.zeros(3, 0)) is None


@pytest.mark.parametrize("first", [True, False])
def test_rows_of_another_backward(first: bool) -> None:
    """Where `.grad` does not tell of them, and clipping makes it of all rows that are there."""
    model = enn.convert(perceptron()).per_sample(accumulate_grad=False)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        if has_values(x) is first:
            F.cross_entropy(model(2 * x), y).backward()

    compiled = enn.compile(step, backend="eager")
    for number, batch in enumerate(samples(4, 4, 4, 4)):
        norms = []
        for run in (compiled, step):
            model.zero_grad()
            warns = number == 1 and run is compiled
            with pytest.warns(enn.PerSampleWarning, match="its graph leaves") if warns else nullcontext():
                run(*batch)
            norms.append(enn.clip_grad_sample_norms_(model, 1.0))
        torch.testing.assert_close(*norms)
    assert not graphs(compiled)


@pytest.mark.parametrize(
    "values",
    [
        ([].append, {}.get),
        (nn.Linear(2, 2).extra_repr, nn.Linear(2, 3).extra_repr),
        (nn.Tanh(), nn.Tanh()),
        (nn.Tanh, nn.ReLU),
        ({1}, {2}),
        (frozenset({1}), frozenset({2})),
        (len, max),
        (samples, perceptron),
        (torch.nn.functional, torch.linalg),
    ],
    ids=[
        "methods_in_C",
        "methods",
        "modules",
        "classes",
        "sets",
        "frozen_sets",
        "functions_in_C",
        "functions",
        "Python's",
    ],
)
def test_what_the_step_exchanges(values: tuple[Any, Any]) -> None:
    """The graph does not, which is seen when it is compared."""
    model, place = enn.convert(perceptron()).per_sample(), SimpleNamespace(now=values[0], then=values[1])

    def step(x: Tensor, y: Tensor) -> None:
        place.now, place.then = place.then, place.now
        F.cross_entropy(model(x), y).backward()

    compiled = enn.compile(step, backend="eager")
    for number, batch in enumerate(samples(4, 4, 4, 4, 4, 4)):
        model.zero_grad()
        warns = pytest.warns(enn.PerSampleWarning, match="its graph leaves another value of (now|then) than")
        with warns if number == 1 else nullcontext():
            compiled(*batch)
        assert place.now is values[(number + 1) % 2]
    assert not graphs(compiled)
