"""What a compiled step draws once, as a projection's numbers, and what it adds up from call to call."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.core import cost
from some import slow
from test_compiled_step import assert_same, graphs, outcome, perceptron

Step = Callable[..., Any]
PROJECTION = enn.Projection(6, kind="kronecker")


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> enn.PerSampleGrads:
    F.cross_entropy(model(x), y).backward()
    return enn.per_sample_grads(model)


def batches(*sizes: int, features: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, features), torch.randint(3, (size,))) for size in sizes]


def models(build: Callable[[], nn.Module] = perceptron) -> list[nn.Module]:
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(enn.convert(build()).per_sample(keep_factors=True))
    return built


# --- random numbers that a seed fixes -----------------------------------------------------------------------------


def projected(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return rows_of(model, x, y).project(6, seed=3)


def projected_beyond_the_factors(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of more dimensions than the transforms of factors pay for."""
    return rows_of(model, x, y).project(50)


def by_a_new_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return enn.Projection(6, kind="kronecker", seed=1)(rows_of(model, x, y))


@pytest.mark.parametrize("step", [projected, projected_beyond_the_factors, by_a_new_one])
def test_a_projection_that_the_step_makes(step: Step) -> None:
    mine, theirs = models()
    compiled = enn.compile(lambda x, y: step(mine, x, y), backend="eager")
    for x, y in batches(4, 4, 5, 6, 7, 4):
        for model in (mine, theirs):
            model.zero_grad()
        torch.testing.assert_close(compiled(x, y), step(theirs, x, y))
    # for four samples, and for any number; torch 2.10 fixes the size in one of the maps, and traces anew
    assert len(graphs(compiled)) == 2 or torch.__version__ < "2.11"


def test_a_projection_among_the_arguments() -> None:
    mine, theirs = models()
    compiled = enn.compile(lambda x, y, projection: projection(rows_of(mine, x, y)), backend="eager")
    for x, y in batches(4, 4, 4):
        for model in (mine, theirs):
            model.zero_grad()
        torch.testing.assert_close(compiled(x, y, PROJECTION), PROJECTION(rows_of(theirs, x, y)))
    assert len(graphs(compiled)) == 1


def test_a_gaussian_projection_runs_eagerly() -> None:
    mine, theirs = models()
    projection = enn.Projection(6, kind="gaussian")
    compiled = enn.compile(lambda x, y: projection(rows_of(mine, x, y)), backend="eager")
    for number, (x, y) in enumerate(batches(4, 4, 4)):
        for model in (mine, theirs):
            model.zero_grad()
        reason = r'kind="gaussian" draws its numbers again.*\(kind="sketch" does not'
        with pytest.warns(enn.PerSampleWarning, match=reason) if number == 1 else nullcontext():
            result = compiled(x, y)
        torch.testing.assert_close(result, projection(rows_of(theirs, x, y)))


# --- totals that go through the calls -----------------------------------------------------------------------------


def added_in_place(model: nn.Module, x: Tensor, y: Tensor, total: Any) -> None:
    rows_of(model, x, y).kronecker(total)


def returned(model: nn.Module, x: Tensor, y: Tensor, total: Any) -> Any:
    total.update(rows_of(model, x, y).kronecker(total, mask=x[:, :1] > 0))


def added_up(model: nn.Module, x: Tensor, y: Tensor, total: Any) -> None:
    total.update({name: total[name] + more for name, more in rows_of(model, x, y).kronecker().items()})


def preconditioned(model: nn.Module, x: Tensor, y: Tensor, total: Any) -> Any:
    grads = rows_of(model, x, y)
    return grads.precondition(grads.kronecker(total), damping=0.1).norms()


def in_their_basis(model: nn.Module, x: Tensor, y: Tensor, total: Any) -> None:
    total.update(rows_of(model, x, y).ekfac(total))


@pytest.mark.parametrize("waits", [False, True], ids=["at_once", "waits"])
@pytest.mark.parametrize(
    "step",
    [
        *(added_in_place, preconditioned, in_their_basis),
        *map(slow, (returned, added_up)),
    ],
)
def test_factors_that_go_through_the_calls(step: Step, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counts change at each call; eagerly few samples may wait in them."""
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", 6 if waits else 256)
    both = models()
    totals: list[Any] = [rows_of(model, *batches(3)[0]).kronecker() for model in both]
    compiled = enn.compile(lambda x, y, total: step(both[0], x, y, total), backend="eager")
    for number, (x, y) in enumerate(batches(4, 4, 4, 5, 5, 4, 5)):
        results = []
        for model, total, run in zip(both, totals, (compiled, lambda *given: step(both[1], *given)), strict=True):
            model.zero_grad()
            # an eager call in between
            result = step(model, x, y, total) if number == 3 else run(x, y, total)
            results.append((outcome(model, result), {name: tuple(factors) for name, factors in total.items()}))
        assert_same(*results)
        assert all(type(factors.count) is int for factors in totals[0].values())
    assert len(compiled._graphs.families) == 1
    assert 1 <= len(graphs(compiled)) <= 2


def test_factors_of_no_samples_are_refused_as_eagerly() -> None:
    (model, _) = models()
    x, y = batches(4)[0]
    total = rows_of(model, x, y).kronecker()
    compiled = enn.compile(lambda x, y, total: rows_of(model, x, y).precondition(total, 0.1).norms(), backend="eager")
    for _ in range(3):
        model.zero_grad()
        compiled(x, y, total)
    for factors in total.values():
        factors.count = 0
    model.zero_grad()
    with pytest.raises(enn.PerSampleError, match="with count 0"):
        compiled(x, y, total)
