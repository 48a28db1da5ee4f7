"""The laws in float32 with the thresholds that ship: a case per class, and the sizes at both sides of each threshold.

The loop runs in float64, through the model and with the inputs as they are in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from cases import CASES, Case, indices, randn
from expanded_nn.core import cost
from families import FAMILIES
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, total_loss

pytestmark = pytest.mark.small_rows

BATCH = 3
# An output, its gradient and a row are sums of at most some hundred products each. Their roundings, of eps / 2, add up
# like the root of their number: to 8 eps and less, measured for all cases of the table. A wrong term is 1e5 times that.
TOLERANCE = 32 * torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def single_precision_by_default() -> None:
    torch.set_default_dtype(torch.float32)


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    return call.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


# --- the thresholds -------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """A recurrent layer without the last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def linear(*positions: int) -> Callable[[int], Case]:
    return lambda size: Case(f"linear_{len(positions) + 2}d", lambda: nn.Linear(size, 64), randn(*positions, size))


def conv(size: int) -> Case:
    return Case("conv2d", lambda: nn.Conv2d(size, size, 3), randn(size, 5, 5))


def conv_to(out: int) -> Callable[[int], Case]:
    return lambda size: Case(f"conv2d_to_{out}", lambda: nn.Conv2d(size, out, 3), randn(size, 5, 5))


def lstm(size: int) -> Case:
    return Case("lstm", lambda: Outputs(nn.LSTM(size, size, batch_first=True)), randn(5, size))


def embedding(size: int) -> Case:
    """With so many words in a sample that factors are no smaller than dense rows, which may be joined with others."""
    build = lambda: nn.Sequential(nn.Embedding(size, 16), nn.Linear(16, 2))  # noqa: E731
    return Case("embedding", build, indices(size, words=size))


@dataclass(frozen=True)
class Threshold:
    """A predicate of costs, and the last size of a layer for which all its answers are the same."""

    predicate: str
    make: Callable[[int], Case]
    last: int
    answer: bool

    def case(self, size: int) -> Case:
        case = self.make(size)
        return Case(f"{case.name}_{self.predicate}_{size}", case.build, case.call)


THRESHOLDS = [
    Threshold("rows_are_small", linear(), 170, True),
    Threshold("rows_are_small", linear(5), 170, True),
    Threshold("inner_by_pairs", conv_to(12), 4, False),
    Threshold("rows_by_columns", conv, 30, False),
    Threshold("rows_by_columns", conv_to(cost.MANY_CHANNELS), 2, False),
    Threshold("rows_are_small", lstm, 52, True),
    Threshold("is_worth_joining", embedding, 1365, True),
]


@pytest.mark.parametrize("at", THRESHOLDS, ids=lambda at: f"{at.make(at.last).name}-{at.predicate}")
def test_the_threshold_is_between_the_sizes(at: Threshold, monkeypatch: pytest.MonkeyPatch) -> None:
    predicate, answers = getattr(cost, at.predicate), []

    def kept(*sizes: Any) -> bool:
        answers.append(predicate(*sizes))
        return answers[-1]

    monkeypatch.setattr(cost, at.predicate, kept)
    for size in (at.last, at.last + 1):
        answers.clear()
        model, _ = step(at.case(size))
        grads = enn.per_sample_grads(model)
        grads.norms()
        grads.flatten()
        assert answers
        assert all(answer == at.answer for answer in answers) == (size == at.last)


# --- the laws -------------------------------------------------------------------------------------------------

FIRST_OF_CLASS = {case.torch_class: case for case in reversed(CASES) if case.has_parameters()}
WITHOUT_A_CASE = ("attention", "transformer")
EVERY = [
    *reversed(FIRST_OF_CLASS.values()),
    *(Case(family.name, family.build, family.call) for family in FAMILIES if family.name in WITHOUT_A_CASE),
    *(at.case(size) for at in THRESHOLDS for size in (at.last, at.last + 1)),
]

every_case = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)


def step(case: Case) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model after the backward of a mean, and the rows that are due, in float64."""
    call = in_dtype(case.inputs(BATCH), torch.float32)
    model = enn.convert(case.module()).per_sample(batch_first=True)
    (total_loss(model, call) / BATCH).backward()
    return model, loop(case.oracle().double(), in_dtype(call, torch.float64), BATCH, take=case.take)


def norms_by_name(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: r.reshape(BATCH, -1).norm(dim=1) for name, r in rows.items()}


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return torch.stack([*norms_by_name(rows).values()]).norm(dim=0)


def assert_close_sums(actual: dict[str, Tensor], rows: dict[str, Tensor], weights: Tensor) -> None:
    """An error of a sum is one of its rows, which may cancel each other."""
    assert set(actual) == set(rows)
    norms, weights = norms_by_name(rows), weights.double()
    for name, r in rows.items():
        error = actual[name] - torch.einsum("b,b...->...", weights, r)
        assert error.norm() <= TOLERANCE * (weights * norms[name]).sum(), name


@every_case
def test_rows_equal_the_loop(case: Case) -> None:
    model, expected = step(case)
    assert all(rows.dtype == torch.float32 for rows in rows_of(model).values())
    assert_close_rows(rows_of(model), expected, TOLERANCE)


@every_case
def test_rows_add_up_to_the_gradient(case: Case) -> None:
    model, expected = step(case)
    assert_close_sums(grads_of(model), expected, torch.full((BATCH,), 1 / BATCH))
    assert_close_sums({name: rows.sum(0) for name, rows in rows_of(model).items()}, expected, torch.ones(BATCH))


@every_case
def test_norms_are_those_of_dense_rows(case: Case) -> None:
    model, expected = step(case)
    grads = enn.per_sample_grads(model)
    assert_close_rows(grads.norms(per_parameter=True), norms_by_name(expected), TOLERANCE)
    assert_close(grads.norms(), norms_of(expected), TOLERANCE)


@every_case
def test_weighted_sums_are_those_of_dense_rows(case: Case) -> None:
    model, expected = step(case)
    grads, weights = enn.per_sample_grads(model), torch.tensor([0.5, 2.0, 1.25])
    assert_close_sums(grads.sum(weights), expected, weights)
    grads.norms()  # which may have made the rows dense
    assert_close_sums(grads.sum(weights), expected, weights)


@every_case
def test_clipped_sums_are_those_of_dense_rows(case: Case) -> None:
    model, expected = step(case)
    norms = norms_of(expected)
    limit = float(norms.median())
    assert_close(enn.clip_grad_sample_norms_(model, limit), norms, TOLERANCE)
    assert_close_sums(grads_of(model), expected, (limit / norms).clamp(max=1))
