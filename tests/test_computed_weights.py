"""Weights that are computed from parameters, as `mask * weight` and `weight_norm`: rows that stay factored."""

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import expanded_nn as enn
from expanded_nn.core import cost
from expanded_nn.factored import FactoredTensor
from expanded_nn.recording import sources
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, total_loss

B, IN, OUT = 5, 12, 16
Make = Callable[[], nn.Module]


def of(base: type[nn.Module], forward: Callable[..., Tensor], *args: Any) -> Make:
    """A layer with a forward of its own, and a mask."""

    def make() -> nn.Module:
        layer: Any = type("Own", (base,), {"forward": forward})(*args)
        layer.register_buffer("mask", (torch.rand_like(layer.weight) > 0.4).to(layer.weight))
        return layer

    return make


class Through(nn.Module):
    """A parametrization."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, weight: Tensor) -> Tensor:
        return self.function(weight)


def parametrized(function: Callable[[Tensor], Tensor], layer: Callable[[], nn.Module]) -> Make:
    def make() -> nn.Module:
        made = layer()
        parametrize.register_parametrization(made, "weight", Through(function))
        return made

    return make


def linear() -> nn.Module:
    return nn.Linear(IN, OUT)


def square() -> nn.Module:
    return nn.Linear(IN, IN)


def pruned() -> nn.Module:
    layer: nn.Module = prune.random_unstructured(linear(), "weight", 0.5)  # type: ignore[no-untyped-call]
    layer.weight = layer.weight.detach()  # which the next forward sets anew; deepcopy takes none with a history
    return layer


ONE, FEW, IMAGES = (torch.randn(B, *shape, dtype=torch.float64) for shape in ((IN,), (3, IN), (2, 6, 6)))
WORDS = torch.randint(7, (B, 4))


def of_linear(weight: Callable[[Any], Tensor]) -> Make:
    return of(nn.Linear, lambda layer, x: F.linear(x, weight(layer), layer.bias), IN, OUT)


def many_ways(number: Tensor) -> Tensor:
    """Each step has two ways to the one before: two to the power of 30 in all."""
    for _ in range(30):
        number = (number * number).sqrt()
    return number


def masked_images(layer: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, layer.weight * layer.mask, layer.bias)


FACTORED: dict[str, tuple[Make, Tensor, str]] = {  # the module, its input, how its rows are held
    "mask": (of_linear(lambda m: m.mask * m.weight), ONE, "Elementwise"),
    "mask, positions": (of_linear(lambda m: m.mask * m.weight), FEW, "Elementwise"),
    "mask of a convolution": (of(nn.Conv2d, masked_images, 2, 8, 3), IMAGES, "Dense"),
    "mask of a table": (of(nn.Embedding, lambda m, i: F.embedding(i, m.mask * m.weight), 7, 9), WORDS, "OneHot"),
    "number": (of_linear(lambda m: 0.5 * m.weight), FEW, "Outer"),
    "vector": (of_linear(lambda m: m.weight * m.mask[0]), ONE, "Elementwise"),
    "functions": (of_linear(lambda m: m.weight.tanh() / 2 + m.weight**3), ONE, "Elementwise"),
    "another shape": (of_linear(lambda m: (m.mask * m.weight)[None][0]), ONE, "Elementwise"),
    "straight through": (of_linear(lambda m: m.weight + (m.weight.sign() - m.weight).detach()), ONE, "Outer"),
    "pruned": (pruned, ONE, "Elementwise"),
    "parametrized": (parametrized(torch.sigmoid, linear), FEW, "Elementwise"),
    "parametrized twice": (parametrized(lambda w: w.exp() * w, parametrized(torch.sin, linear)), ONE, "Elementwise"),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), ONE, "Outer + Lines"),
    "weight norm, positions": (lambda: parametrizations.weight_norm(linear()), FEW, "Outer + Lines"),
    "weight norm of a convolution": (
        lambda: parametrizations.weight_norm(nn.Conv2d(2, 8, 5)),
        IMAGES,
        "Patches + Lines",
    ),
    "weight norm of all": (lambda: parametrizations.weight_norm(linear(), dim=None), ONE, "Outer + Lines"),  # type: ignore[arg-type]
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()).eval(), ONE, "Outer + Lines"),
    "unit lines": (of_linear(lambda m: F.normalize(m.weight, dim=1)), FEW, "Outer + Lines"),
    "unit lines, scaled": (of_linear(lambda m: -3 * F.normalize(m.weight, dim=1) / m.mask.sum()), ONE, "Outer + Lines"),
    "bounded lines": (
        of_linear(lambda m: m.weight / m.weight.norm(dim=1, keepdim=True).clamp(min=0.5)),
        ONE,
        "Outer + Lines",
    ),
    "lines by their sums": (
        of_linear(lambda m: m.weight * m.weight.square().sum(1, keepdim=True).sigmoid()),
        ONE,
        "Outer + Lines",
    ),
    "many ways to a number": (
        of_linear(lambda m: m.weight * many_ways(m.weight.norm(dim=1, keepdim=True))),
        ONE,
        "Outer + Lines",
    ),
    "all by their mean": (of_linear(lambda m: m.weight * m.weight.exp().mean()), ONE, "Outer + Lines"),
}
OTHERS: dict[str, tuple[Make, Tensor]] = {  # a number of these weights is computed from several of the parameter
    "transposed": (parametrized(lambda w: w + w.t(), square), ONE),
    "flipped": (parametrized(lambda w: w * w.flip(0), square), ONE),
    "mean": (parametrized(lambda w: w - w.mean(), square), ONE),
    "softmax": (parametrized(lambda w: w.softmax(1), square), ONE),
    "broadcast": (parametrized(lambda w: w[:1] * torch.ones(IN, IN), square), ONE),
    "cumsum": (parametrized(lambda w: w.cumsum(0), square), ONE),
    "weight norm of columns": (lambda: parametrizations.weight_norm(linear(), dim=1), ONE),
    "unit columns": (parametrized(lambda w: F.normalize(w, dim=0), square), ONE),
    "norms of other lines": (parametrized(lambda w: w * w.norm(dim=1, keepdim=True).flip(0), square), ONE),
    "norms of all and of lines": (parametrized(lambda w: w * w.norm(dim=1, keepdim=True) / w.norm(), square), ONE),
    "softmax of norms": (parametrized(lambda w: w * w.norm(dim=1, keepdim=True).softmax(0), square), ONE),
    "centered lines": (parametrized(lambda w: w - w.mean(1, keepdim=True), square), ONE),
    "short lines": (of(nn.Linear, lambda m, x: F.linear(x, F.normalize(m.weight, dim=1), m.bias), 3, 4), ONE[:, :3]),
    "hook of large numbers": (parametrized(lambda w: hooked(w, lambda grad: grad.clamp(-1e4, 1e4)), square), ONE),
    "hook that rounds": (parametrized(lambda w: hooked(w, lambda grad: grad.bfloat16().to(grad)), square), ONE),
    "hook that rounds lines": (
        parametrized(lambda w: hooked(F.normalize(w, dim=1), lambda grad: grad.bfloat16().to(grad)), square),
        ONE,
    ),
    "hook of small numbers": (
        parametrized(lambda w: hooked(F.normalize(w, dim=1), lambda grad: grad * (grad.abs() > 1e-3)), square),
        ONE,
    ),
    "hook of large numbers in lines": (
        parametrized(lambda w: hooked(F.normalize(w, dim=1), lambda grad: grad.clamp(-1e4, 1e4)), square),
        ONE,
    ),
    "hook of lines": (
        parametrized(lambda w: hooked(F.normalize(w, dim=1), lambda grad: grad.clamp(-0.1, 0.1)), square),
        ONE,
    ),
    "hook of columns": (
        parametrized(lambda w: hooked(F.normalize(w, dim=1), lambda grad: grad - grad.mean(0)), square),
        ONE,
    ),
    "hook": (parametrized(lambda w: hooked(w, lambda grad: grad.clamp(-0.1, 0.1)), square), ONE),
    "hook of all numbers": (parametrized(lambda w: hooked(w, lambda grad: grad - grad.mean()), square), ONE),
    "hook of positive numbers": (parametrized(lambda w: hooked(w, torch.relu), square), ONE),
}


def hooked(weight: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A computed weight whose gradient goes through a hook."""
    result = weight * 2
    if result.requires_grad:
        result.register_hook(hook)
    return result


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any size are computed once."""
    monkeypatch.setattr(cost, "DERIVED_NUMEL", 0)


def converted(module: nn.Module, **settings: Any) -> nn.Module:
    return enn.convert(module).per_sample(loss_reduction="sum", **settings)


def held(model: nn.Module) -> str:
    """How the rows of the weight are held."""
    rows = [p.grad_sample for name, p in model.named_parameters() if "bias" not in name and p.numel() > OUT]
    factored = [" + ".join(type(term).__name__ for term in each.terms()) for each in rows if hasattr(each, "terms")]
    (kind,) = factored or ["Dense"]
    return kind


@pytest.mark.parametrize("name", FACTORED)
class TestFactored:
    def test_rows(self, name: str) -> None:
        make, x, kind = FACTORED[name]
        module, call = make(), Call((x,))
        expected = loop(module, call, B)
        model = converted(module)
        for _ in range(3):
            model.zero_grad()
            total_loss(model, call).backward()
            assert held(model) == kind
            of_sum = {name: rows.sum(0) for name, rows in expected.items()}
            assert_close_rows(grads_of(model), of_sum)
            flat = torch.cat([rows.reshape(B, -1) for rows in expected.values()], 1)
            assert_close(enn.per_sample_grads(model).norms(), flat.norm(dim=1))
            assert_close_rows(rows_of(model), expected)

    def test_clipped_and_used(self, name: str) -> None:
        make, x, _ = FACTORED[name]
        module, call = make(), Call((x,))
        expected = loop(module, call, B)
        model = converted(module, accumulate_grad=False)
        total_loss(model, call).backward()
        grads = enn.per_sample_grads(model)
        flat = torch.cat([expected[name].reshape(B, -1) for name in grads], 1)
        assert_close(grads.gram(), flat @ flat.t())
        assert_close(grads.matvec({name: torch.ones_like(grads[name][0]) for name in grads}), flat.sum(1))
        weight = next(name for name in grads if "bias" not in name)
        rows = grads[weight]
        assert_close(rows[1:4].dense() if isinstance(rows[1:4], FactoredTensor) else rows[1:4], expected[weight][1:4])
        clone = deepcopy(rows)
        file = io.BytesIO()
        torch.save(rows, file)
        file.seek(0)
        norms = enn.clip_grad_sample_norms_(model, max_norm=0.5)
        factors = (0.5 / flat.norm(dim=1)).clamp(max=1)
        assert_close(norms, flat.norm(dim=1))
        of_clipped = {name: torch.einsum("b,b...", factors, expected[name]) for name in expected}
        assert_close_rows(grads_of(model), of_clipped, tol=1e-6)
        for copy in (clone, torch.load(file, weights_only=True)):
            assert type(copy) is type(rows)
            assert_close(copy + 0, expected[weight])

    def test_two_uses_and_two_backwards(self, name: str) -> None:
        """Rows of one parameter by two ways add up, and those of a second backward are appended."""
        make, x, _ = FACTORED[name]
        if x.dtype == torch.int64:
            return

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = make()

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) * self.layer(x.cos()).sin()  # type: ignore[no-any-return]

        module = Twice()
        calls = [Call((x,)), Call((x[:3].tanh(),))]
        expected = [loop(module, call, call.args[0].shape[0]) for call in calls]
        model = enn.convert(module, inplace=True).per_sample(loss_reduction="sum")
        for call in calls:
            total_loss(model, call).backward()
        assert_close_rows(rows_of(model), {name: torch.cat([e[name] for e in expected]) for name in expected[0]})

    def test_as_a_graph(self, name: str) -> None:
        make, x, kind = FACTORED[name]
        model = converted(make())

        def step(x: Tensor) -> Tensor:
            model(x).sin().sum().backward()
            return enn.clip_grad_sample_norms_(model, max_norm=0.5)

        compiled = enn.compile(step, backend="eager")
        for size in (B, B, B, 4, 4, 3, B):
            model.zero_grad()
            norms = compiled(x[:size])
            rows, grads = rows_of(model), {name: grad.clone() for name, grad in grads_of(model).items()}
            assert held(model) in (kind, "Elementwise")
            model.zero_grad()
            assert_close(norms, step(x[:size]))
            assert_close_rows(rows_of(model), rows)
            assert_close_rows(grads_of(model), grads)
        assert any(family.graphs for family in compiled._graphs.families.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_line_of_zeros(backend: str | None) -> None:
    """Such as that of padding, or of a unit that was pruned after the graph was made."""
    make, x, _ = FACTORED["bounded lines"]
    module = make()
    model = converted(module)
    step: Any = lambda x: model(x).sin().sum().backward()  # noqa: E731
    step = step if backend is None else enn.compile(step, backend=backend)
    for number in range(4):
        with torch.no_grad():
            for each in (module, model):
                each.weight[number // 2 :: 3].zero_()
        model.zero_grad()
        step(x)
        assert held(model) == "Outer + Lines"
        expected = loop(module, Call((x,)), B, objective=lambda module, call, first=0: call.on(module).sin().sum())
        assert_close_rows(rows_of(model), expected)


def test_a_hook_in_a_graph() -> None:
    """There is no trial, and the hook does nothing at first."""
    module = parametrized(lambda w: hooked(w.tanh(), lambda grad: grad.clamp(-1, 1)), square)()
    model = converted(module)
    step = enn.compile(lambda x: model(x).square().sum().backward(), backend="eager")
    for scale in (1e-3, 1e-3, 1e-3, 100.0):
        x = scale * ONE
        model.zero_grad()
        step(x)
        expected = loop(module, Call((x,)), B, objective=lambda module, call, first=0: call.on(module).square().sum())
        assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(12, 0), (0, 16)])
def test_weights_without_numbers(sizes: tuple[int, int], backend: str | None) -> None:
    make = parametrized(lambda w: 2 * F.normalize(w.sin(), dim=1), lambda: nn.Linear(*sizes))
    model = converted(make())
    step: Any = lambda x: model(x).sum().backward()  # noqa: E731
    step = step if backend is None else enn.compile(step, backend=backend)
    for _ in range(3):
        model.zero_grad()
        step(torch.randn(B, sizes[0]))
        assert {len(rows) for rows in rows_of(model).values()} == {B}


@pytest.mark.parametrize("make", [pruned, lambda: parametrizations.weight_norm(linear())])
def test_frozen_between_forward_and_backward(make: Make) -> None:
    model = converted(make())
    loss = model(ONE).sum()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad_sample is not None] == ["bias"]


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    make, x = OTHERS[name]
    module, call = make(), Call((x,))
    expected = loop(module, call, B)
    model = converted(module)
    total_loss(model, call).backward()
    assert held(model) == "Dense"
    assert_close_rows(rows_of(model), expected)


def test_the_trial_finds_what_is_not_elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks show in no graph."""
    make, x = OTHERS["hook"]
    module = make()
    expected = loop(module, Call((x,)), B)
    monkeypatch.setattr(sources, "TRIED_IN", ())
    monkeypatch.setattr(sources, "_of_all_sizes", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    model = converted(module)
    total_loss(model, Call((x,))).backward()
    with pytest.raises(AssertionError):
        assert_close_rows(rows_of(model), expected)
