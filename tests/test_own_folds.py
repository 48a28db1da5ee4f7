"""Modules with parameters of their own that fold their samples, or put them second, run on the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.factored import FactoredTensor
from oracle import Call, assert_close_rows, loop, rows_of, total_loss
from test_compiled_step import graphs

B, T, D = 4, 6, 3


class Folds(nn.Module):
    """Parameters and layers, and a forward that the test writes."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.reorders, self.mixes = forward, False, False
        self.w, self.token = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.stack = nn.Parameter(torch.randn(T, D, D))
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.reorders:
            x = x.index_select(0, torch.tensor([1, 0, 2, 3], device=x.device))
        if self.mixes:
            x = x - x.mean(0)
        return self.does(self, x)


def windows(m: Any, x: Tensor) -> Tensor:
    parts = m.linear(x.reshape(-1, 2, D) + m.token)
    seen = F.scaled_dot_product_attention(parts[:, None], parts[:, None], parts[:, None])
    return (seen.squeeze(1) @ m.w).reshape(x.shape)


def frames(m: Any, x: Tensor) -> Tensor:
    seen = m.conv(x.reshape(-1, 1, D).mT.expand(-1, -1, 4)).mean(2)
    return m.norm(seen).view(x.shape) * m.token


def stack_of_matrices(m: Any, x: Tensor) -> Tensor:
    return (x.transpose(0, 1) @ m.stack).transpose(0, 1).tanh() * m.token


def flat(m: Any, x: Tensor) -> Tensor:
    return ((x.flatten(0, 1) + m.token) @ m.w).unflatten(0, x.shape[:2]).cumsum(1)


def interleaved(m: Any, x: Tensor) -> Tensor:
    first, second = (m.linear(part.reshape(-1, D)) * m.token for part in (x[:, ::2], x[:, 1::2]))
    return torch.stack([first, second], 1).view(x.shape) @ m.w


def queries(m: Any, x: Tensor) -> Tensor:
    asked = m.stack[:, 0].unsqueeze(1).repeat(1, len(x), 1)  # (T, B, D)
    asked = asked + m.token.view(1, 1, D).expand(-1, len(x), -1)
    asked = asked.transpose(0, 1)
    return m.norm(asked + m.linear(asked)) * x @ m.w


def positions(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, D) + m.stack[:, 0].repeat(len(x), 1)  # (B * T, D)
    return (m.linear(flat) @ m.w).view(x.shape)


FORWARDS = [queries, positions, windows, frames, stack_of_matrices, flat, interleaved]


def one_step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    total_loss(model, Call((x,))).backward()


@pytest.mark.parametrize("forward", FORWARDS)
def test_rows_equal_the_loop_on_the_whole_batch(forward: Callable[[Any, Tensor], Tensor]) -> None:
    module = Folds(forward)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(4):
        x = torch.randn(B, T, D)
        one_step(model, x)
        used = {name: rows for name, rows in rows_of(model).items() if rows is not None}
        expected = loop(module, Call((x,)), B)
        assert_close_rows(used, {name: expected[name] for name in used})
        assert not any(bool(rows.any()) for name, rows in expected.items() if name not in used)
    assert any(ways.known for ways in model._told.ways.values())


def test_rows_of_a_stack_of_matrices_are_factored() -> None:
    model = enn.convert(Folds(stack_of_matrices)).per_sample()
    for _ in range(3):
        one_step(model, torch.randn(B, T, D))
    rows = model.stack.grad_sample
    assert rows.shape == (B, T, D, D)
    assert isinstance(rows, FactoredTensor)


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("change", ["reorders", "mixes"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_samples_that_meet_later_are_seen(
    forward: Callable[[Any, Tensor], Tensor], change: str, *, compare: bool
) -> None:
    """The graph tells where the samples stand in each result, at each call."""
    model = enn.convert(Folds(forward)).per_sample(compare=compare)
    for _ in range(5):
        one_step(model, torch.randn(B, T, D))
    setattr(model, change, True)
    with pytest.raises(enn.PerSampleError):
        one_step(model, torch.randn(B, T, D))


@pytest.mark.parametrize("forward", FORWARDS)
def test_compiled(forward: Callable[[Any, Tensor], Tensor]) -> None:
    model = enn.convert(Folds(forward)).per_sample()
    twin = copy.deepcopy(model)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).sin().flatten(1).sum(1).mean().backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    compiled = enn.compile(step, backend="eager")
    for _ in range(5):
        x = torch.randn(B, T, D)
        model.zero_grad()
        twin.zero_grad()
        torch.testing.assert_close(compiled(model, x), step(twin, x))
    assert len(graphs(compiled)) == 1
