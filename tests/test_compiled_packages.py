"""Compiled steps that read values of tensors: a known one is assumed; in packages others run eagerly."""

import sysconfig
from collections.abc import Callable, Sequence
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


def names_in(path: Path) -> dict[str, Any]:
    """The names in a module that stands in a file."""
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(SOURCE, str(path), "exec"), names)
    return names


@pytest.fixture(scope="module")
def package() -> dict[str, Any]:
    """The names in an installed package."""
    return names_in(PACKAGE)


def graphs(step: Any) -> int:
    return sum(len(family.graphs) for family in step._graphs.families.values())


@pytest.mark.parametrize("path", [PACKAGE, Path(__file__)], ids=["package", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_the_first_batch_sets_up(path: Path, dtype: torch.dtype) -> None:
    layer = names_in(path)["SetUpByFirst"](dtype)
    model = enn.convert(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3))).per_sample()
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


class Buffers(nn.Module):
    """A layer that counts its calls, and has other tensors that no sample changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(0.5))
        self.register_buffer("ones", torch.ones(4, dtype=torch.int64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


Read = Callable[[Any, Any], Any]  # of a linear layer and one with buffers
KNOWN: dict[str, Read] = {
    "item": lambda linear, held: held.value.item(),
    "float": lambda linear, held: float(held.value * 2),
    "int": lambda linear, held: int(held.ones.sum()),
    "index": lambda linear, held: [1.0, 2.0, 3.0][held.ones[1]],
    "yes or no": lambda linear, held: 2.0 if held.value > 0.3 else 1.0,
    "yes or no, of a made one": lambda linear, held: 2.0 if held.value > torch.tensor(0.3) else 1.0,
    "all": lambda linear, held: 2.0 if (held.ones == 1).all() else 1.0,
    "shape (1,)": lambda linear, held: 2.0 if held.ones[:1] else 1.0,
    "the larger one": lambda linear, held: max(held.value, torch.tensor(0.3)) * 1.0,
    "of a weight": lambda linear, held: 2.0 if linear.weight.norm() > 0 else 1.0,
    "a number that comes up": lambda linear, held: 2.0 if held.calls > 5 else 1.0,
}
CHANGES: dict[str, Read] = {
    "a number of a weight": lambda linear, held: float(linear.bias.detach()[0]),
    "a count": lambda linear, held: held.calls.item(),
    "random": lambda linear, held: 2.0 if torch.rand(()) > 0.5 else 1.0,
    "changed on the way": lambda linear, held: 2.0 if held.value.clone().add_(1) > 1 else 1.0,
}


def beside_eager(read: Read, change: Callable[[int, Any], object], calls: int) -> list[int]:
    """How many graphs there are after each call of a compiled step, each compared with the eager one."""
    model = enn.convert(nn.Sequential(nn.Linear(8, 3), Buffers())).per_sample()
    twin = deepcopy(model)

    def step(model: Any, x: Tensor) -> Tensor:
        (model(x) * read(*model)).square().sum().backward()
        return enn.clip_grad_sample_norms_(model, max_norm=0.1)

    compiled, counts = enn.compile(step, backend="eager"), []
    for call in range(calls):
        x = torch.randn(4, 8)
        for run, each in ((compiled, model), (step, twin)):
            change(call, each[1])
            each.zero_grad()
            run(each, x)
        assert_close_rows(rows_of(model), rows_of(twin))
        assert_close_rows(grads_of(model), grads_of(twin))
        assert model[1].calls == twin[1].calls
        counts.append(graphs(compiled))
    return counts


@pytest.mark.parametrize("read", KNOWN.values(), ids=KNOWN)
def test_a_value_that_no_sample_changes_is_assumed(read: Read) -> None:
    counts = beside_eager(read, lambda call, held: None, 9)
    assert counts[1:4] == [1, 1, 1]
    assert counts[-1] == 1


@pytest.mark.parametrize("name", ["item", "float", "yes or no", "the larger one"])
def test_an_assumed_value_that_changes_once(name: str) -> None:
    def change(call: int, held: Any) -> None:
        held.value.fill_(0.5 if call < 4 else 0.2)

    assert beside_eager(KNOWN[name], change, 8) == [0, 1, 1, 1, 0, 1, 1, 1]


def test_an_assumed_value_that_changes_at_each_call() -> None:
    words = r"call after call a tensor that is read in line \d+ of .*packages.py.* has another value \(compute with the"
    with pytest.warns(enn.PerSampleWarning, match=words):
        assert beside_eager(KNOWN["item"], lambda call, held: held.value.fill_(call), 10)[-1] == 0


@pytest.mark.parametrize(
    "read",
    [lambda linear, held: (held.value * 2).item(), lambda linear, held: linear.bias[0].item()],
    ids=["buffer", "weight"],
)
def test_a_number_that_torch_keeps_as_a_symbol(read: Read) -> None:
    assert beside_eager(read, lambda call, held: held.value.fill_(call + 0.5), 8)[-1] == 1


@pytest.mark.parametrize("read", CHANGES.values(), ids=CHANGES)
def test_a_value_that_changes_at_each_call_is_refused(read: Read) -> None:
    with pytest.raises(enn.PerSampleError, match=r"the step reads a value of a tensor in line \d+ of .*packages.py"):
        beside_eager(read, lambda call, held: None, 3)
