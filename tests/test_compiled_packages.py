"""Compiled steps of models whose packages read values of tensors: a flag is assumed, other values run eagerly."""

import sysconfig
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from oracle import assert_close_rows, grads_of, rows_of

PACKAGE = Path(sysconfig.get_paths()["purelib"]) / "their_package.py"
SOURCE = """
import torch
from torch import nn

class SetUpByFirst(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("is_set", torch.tensor(0, dtype=dtype))

    def forward(self, x):
        if self.training and not self.is_set:
            self.shift.data = torch.full_like(self.shift, 0.5)
            self.is_set.data = torch.ones_like(self.is_set)
        return x + self.shift if self.is_set else x * self.shift

class Looks(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        self.read(x.detach().sum())
        return x
"""
DTYPES = [torch.bool, torch.uint8, torch.float32]


@pytest.fixture(scope="module")
def package() -> dict[str, Any]:
    """The names in an installed package."""
    names: dict[str, Any] = {"__name__": "their_package"}
    exec(compile(SOURCE, str(PACKAGE), "exec"), names)
    return names


def graphs(step: Any) -> int:
    return sum(len(family.graphs) for family in step._graphs.families.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_the_first_batch_sets_up(package: dict[str, Any], dtype: torch.dtype) -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 8), package["SetUpByFirst"](dtype), nn.Linear(8, 3))).per_sample()
    model.per_sample(False)(torch.randn(4, 8))
    twin = deepcopy(model.per_sample())

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).square().sum().backward()
        return enn.clip_grad_sample_norms_(model, max_norm=0.1)

    compiled = enn.compile(step, backend="eager")
    for size in (4, 4, 4, 3, 5, 3, 4):
        x = torch.randn(size, 8)
        for run, each in ((compiled, model), (step, twin)):
            each.zero_grad()
            run(each, x)
        assert_close_rows(rows_of(model), rows_of(twin))
        assert_close_rows(grads_of(model), grads_of(twin))
    assert 1 <= graphs(compiled) <= 2


def graphs_after_calls(layer: nn.Module, flags: Sequence[int]) -> list[int]:
    """How many graphs there are after each call of a compiled step, with one value of the flag after the other."""
    model = enn.convert(nn.Sequential(layer, nn.Linear(8, 3))).per_sample().eval()
    twin = deepcopy(model)
    compiled = enn.compile(lambda x: model(x).square().sum().backward(), backend="eager")
    counts = []
    for flag in flags:
        x = torch.randn(4, 8)
        for each in (model, twin):
            each[0].is_set.fill_(flag)
            each.zero_grad()
        compiled(x)
        twin(x).square().sum().backward()
        assert_close_rows(rows_of(model), rows_of(twin))
        counts.append(graphs(compiled))
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flag_that_changes(package: dict[str, Any], dtype: torch.dtype) -> None:
    """The call runs eagerly, and the next one has a graph for the new value."""
    flags = (0, 0, 0, 0, 1, 1, 1, 1)
    assert graphs_after_calls(package["SetUpByFirst"](dtype), flags) == [0, 1, 1, 1, 0, 1, 1, 1]


def test_a_flag_that_changes_to_and_fro(package: dict[str, Any]) -> None:
    words = r"call after call a tensor that is read in line 15 of .*their_package.py.* has another value"
    with pytest.warns(enn.PerSampleWarning, match=words):
        graphs_after_calls(package["SetUpByFirst"](torch.bool), (0, 0, 0, 1, 1, *[0] * 5))


NORM = nn.BatchNorm1d(8, momentum=None, dtype=torch.float64)
OF_TORCH: dict[str, Any] = {
    "norm": lambda x: NORM(x),
    "distribution": lambda x: torch.distributions.MultivariateNormal(  # torch.compile switches the look off for all
        torch.zeros(8), torch.eye(8), validate_args=True
    ),
}


@pytest.mark.parametrize("read", OF_TORCH.values(), ids=OF_TORCH)
def test_a_value_that_torchs_own_code_reads(read: Any) -> None:
    model = enn.convert(nn.Linear(8, 3)).per_sample()

    def step(x: Tensor) -> None:
        read(x)
        model(x).square().sum().backward()

    compiled = enn.compile(step, backend="eager")
    compiled(torch.randn(4, 8))
    model.zero_grad()
    line = read.__code__.co_firstlineno
    words = rf"runs eagerly, as torch's own code reads a value of a tensor, called in line {line} of .*packages.py"
    with pytest.warns(enn.PerSampleWarning, match=words):
        compiled(torch.randn(4, 8))
    assert model.weight.grad_sample.shape == (4, 3, 8)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 raises an error of its own, as the guide says")
def test_an_operation_that_takes_functions() -> None:
    model = enn.convert(nn.Linear(8, 3)).per_sample()

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return torch.cond(loss.detach() > 1, torch.sin, torch.cos, (loss.detach(),))

    compiled = enn.compile(step, backend="eager")
    compiled(torch.randn(4, 8))
    model.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match="eagerly, as it calls torch's operation cond, which takes functions"):
        compiled(torch.randn(4, 8))


@pytest.mark.parametrize("read", [bool, float, Tensor.item, Tensor.tolist, print])
def test_a_value_that_a_package_reads(package: dict[str, Any], read: Any) -> None:
    model = enn.convert(nn.Sequential(nn.Linear(8, 8), package["Looks"](read), nn.Linear(8, 3))).per_sample()
    compiled = enn.compile(lambda x: model(x).square().sum().backward(), backend="eager")
    compiled(torch.randn(4, 8))
    model.zero_grad()
    words = r"runs eagerly, as a package reads a value of a tensor in line 23 of .*their_package.py"
    with pytest.warns(enn.PerSampleWarning, match=words):
        compiled(torch.randn(4, 8))
    assert model[0].weight.grad_sample.shape == (4, 8, 8)
