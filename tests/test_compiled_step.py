"""`enn.compile`: what the eager step gives, the graph gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from cases import CASES, EVEN_SAME, Case

pytestmark = [pytest.mark.filterwarnings(EVEN_SAME)]


def outcome(model: nn.Module, result: Any) -> dict[str, Any]:
    """All that a step leaves: what it returned, gradients, rows, how these are held, buffers."""
    found = {"result": result}
    for name, parameter in model.named_parameters():
        rows = getattr(parameter, "grad_sample", None)
        found |= {f"{name}.grad": parameter.grad, f"{name}.rows": rows, f"{name}.kind": type(rows).__name__}
    return found | dict(model.named_buffers())


def assert_same(compiled: Any, eager: Any, where: str = "") -> None:
    """Whether two outcomes are the same."""
    if isinstance(eager, dict):
        assert list(compiled) == list(eager), where
        for name, value in eager.items():
            assert_same(compiled[name], value, f"{where}.{name}")
    elif isinstance(eager, list | tuple):
        assert len(compiled) == len(eager), where
        for i, value in enumerate(eager):
            assert_same(compiled[i], value, f"{where}[{i}]")
    elif isinstance(eager, Tensor):
        dense = [each.to_dense() if each.is_sparse else each for each in (compiled, eager)]
        torch.testing.assert_close(dense[0].detach(), dense[1].detach(), equal_nan=True, msg=lambda text: f"{where}: {text}")
        assert compiled.is_sparse == eager.is_sparse
    else:
        assert compiled == eager, where


def graphs(step: Any) -> list[Any]:
    return [graph for family in step.families.values() for graph in family.graphs]


@pytest.mark.parametrize("case", [case for case in CASES if case.has_parameters()], ids=lambda case: case.name)
def test_compiled_is_eager(case: Case) -> None:
    mine = enn.convert(case.module()).per_sample()
    theirs = enn.convert(case.module()).per_sample()

    def step(model: nn.Module, call: Any) -> Any:
        loss = (call.on(model).sin() * 1.5).sum()
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(model, 0.5)

    compiled = enn.compile(lambda call: step(mine, call), backend="eager")
    for batch in (3, 3, 4, 4, 2):
        for model in (mine, theirs):
            model.zero_grad()
        call = case.inputs(batch)
        assert_same(outcome(mine, compiled(call)), outcome(theirs, step(theirs, call)))
    assert graphs(compiled)
