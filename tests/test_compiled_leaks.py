"""A tensor of a step that is kept outside of it, which a graph would not do, is named by its line."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from test_compiled_step import graphs, perceptron, samples

KEPT: list[Any] = []


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def a_result(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    KEPT.append(loss + 1)  # here
    return loss


def what_is_returned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y) * 2  # here
    KEPT.append(loss)
    return loss


def with_its_graph(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)  # here
    KEPT.append(loss)
    loss.backward()
    return loss.detach()


def rows(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y)
    KEPT.append(model[0].weight.grad_sample)  # type: ignore[union-attr, index]


def within_a_module(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.history.append(model(x).detach())  # type: ignore[union-attr, operator]  # here
    loss_of(model, x, y)


LINES = {rows: r"line \d+ of .*loss.backward\(\)"}


@pytest.mark.parametrize("step", [a_result, what_is_returned, with_its_graph, rows, within_a_module])
def test_a_tensor_that_is_kept_is_named(step: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]
    KEPT.clear()
    model.history = []
    compiled = enn.compile(lambda x, y: step(model, x, y), backend="eager")
    compiled(x, y)
    model.zero_grad()
    line = LINES.get(step, rf"line \d+ of .*{step.__code__.co_filename.rpartition('/')[2]}: .*# here")
    with pytest.warns(enn.PerSampleWarning, match=rf"kept outside of it.* made in {line}.*return it from the step"):
        compiled(x, y)
    model.zero_grad()
    compiled(x, y)
    kept = [*KEPT, *model.history]
    assert len(kept) == 3
    assert all(value.detach().sum().item() for value in kept)  # they have values


def test_what_is_returned_or_held_is_not_kept() -> None:
    """Warnings are errors here."""
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        loss = loss_of(model, x, y)
        grads = enn.per_sample_grads(model)
        return {"loss": loss, "grads": grads, "rows": [dict(grads)], "twice": (loss, loss)}

    for x, y in samples(4, 4, 4):
        model.zero_grad()
        left = step(x, y)
        torch.testing.assert_close(left["grads"]["0.weight"].to_dense(), model[0].weight.grad_sample.to_dense())
        assert left["rows"][0]["0.weight"].shape == (4, 16, 8)
    assert len(graphs(step)) == 1


@pytest.mark.filterwarnings("ignore:.*call after call is of another kind")
@pytest.mark.parametrize("is_hook", [False, True], ids=["argument", "hook"])
def test_functions_that_are_new_at_each_call_are_let_go_of(*, is_hook: bool) -> None:
    model, functions = enn.convert(perceptron()).per_sample(), []

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor, change: Any = None) -> None:
        loss_of(model if change is None else lambda x: change(model(x)), x, y)

    def call(x: Tensor, y: Tensor) -> None:
        shift = torch.zeros(())
        if is_hook:
            changed = lambda module, args, output: output + shift  # noqa: E731
            handle = model[0].register_forward_hook(changed)
            step(x, y)
            handle.remove()
        else:
            changed = lambda output: output + shift  # noqa: E731
            step(x, y, changed)
        functions.append(weakref.ref(changed))

    for x, y in samples(*[4] * 40):
        model.zero_grad()
        call(x, y)
    gc.collect()
    assert sum(function() is not None for function in functions) < 20
