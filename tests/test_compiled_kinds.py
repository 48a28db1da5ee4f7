"""A compiled step whose calls differ in little: by tensors that are one, hooks of arguments, names, negated numbers."""

import random
import sys
import warnings
from collections import UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.compile import NEW_KINDS
from test_compiled_state import compared, trained
from test_left import Items


def mask(*values: float) -> Tensor:
    return torch.tensor(values)


class Masked(nn.Module):
    """Two buffers, an attribute and a layer."""

    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        same = mask(1.0, 2.0, 3.0)
        self.register_buffer("first", same)
        self.register_buffer("second", same)
        self.current = self.past = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.first + self.second.cos()
        return y * self.current + self.past.cos()


def program_of(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A program whose model changes before its fifth call."""

    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda x, y: trained(model, x, y))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                change(model)
            return step(x, y)

        return call, None

    return program


def other_first(model: Any) -> None:
    model.first = mask(3.0, 1.0, 2.0)


def other_second(model: Any) -> None:
    model.second = mask(3.0, 1.0, 2.0)


def other_past(model: Any) -> None:
    model.past = mask(0.5, 0.25, 0.125)


def other_current(model: Any) -> None:
    model.current = mask(0.5, 0.25, 0.125)


@pytest.mark.parametrize("change", [other_first, other_second, other_past, other_current])
def test_tensors_that_were_one_are_two(change: Callable[[Any], Any]) -> None:
    assert compared(program_of(change), None, Masked) == 2


def of_a_variable(model: Any, wrap: Any) -> Any:
    weights = model.first

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x) * weights, y)
        loss.backward()
        return loss.detach()

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        if number == 4:
            other_first(model)
            other_second(model)
        return compiled(x, y)

    return call, None


def of_parameters(model: Any, wrap: Any) -> Any:
    """Both parameters of a layer have a mask among their attributes."""
    layer = model.layer
    layer.weight.mask = layer.bias.mask = torch.ones(3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = trained(model, x, y)
        for parameter in (layer.weight, layer.bias):
            parameter.grad.mul_(parameter.mask.view(3, *[1] * (parameter.dim() - 1)))
        return loss

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        if number == 4:
            layer.bias.mask = mask(0.0, 1.0, 0.0)
        return compiled(x, y)

    return call, None


@pytest.mark.parametrize("program", [of_a_variable, of_parameters])
def test_a_tensor_of_a_model_that_is_another_thing_too(program: Any) -> None:
    assert compared(program, None, Masked) == 2


def test_tensors_that_become_one() -> None:
    """And are two again: the graph of two is there still."""

    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda x, y: trained(model, x, y))
        both = mask(3.0, 1.0, 2.0), mask(1.0, 1.0, 5.0)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            model.first, model.second = both if number < 3 or number == 6 else both[:1] * 2
            return step(x, y)

        return call, None

    assert compared(program, None, Masked) == 2


def test_two_modules_of_one_mask() -> None:
    """An inner module gets another one of its own."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
        same = mask(1.0, 2.0, 3.0)
        for layer in model:
            layer.register_buffer("mask", same)
        return model

    def program(model: Any, wrap: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model[1](model[0](x) * model[0].mask) * model[1].mask, y)
            loss.backward()
            return loss.detach()

        compiled = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                model[1].mask = mask(2.0, 0.0, 1.0)
            return compiled(x, y)

        return call, None

    assert compared(program, None, make) == 2


class ByName(nn.Module):
    """Has a layer in a dict of modules, and does what its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"tanh": nn.Linear(8, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = getattr(torch, name)(layer(x))
        return x


def rename_layer(model: Any) -> None:
    model.layers["sin"] = model.layers.pop("tanh")


def test_a_layer_that_is_renamed() -> None:
    assert compared(program_of(rename_layer), None, ByName) == 2


def add_hook(x: Tensor) -> None:
    x.register_hook(lambda grad: 2 * grad)


def add_last_hook(x: Tensor) -> None:
    x.register_post_accumulate_grad_hook(double_grad)


def double_grad(x: Tensor) -> None:
    assert x.grad is not None
    x.grad.mul_(2)


@pytest.mark.parametrize("add", [add_hook, add_last_hook])
@pytest.mark.parametrize("first", [0, 4], ids=["always", "from_the_fifth_call_on"])
def test_hooks_on_an_argument_run(add: Callable[[Tensor], None], first: int) -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            trained(model, x, y)
            assert x.grad is not None
            return x.grad

        compiled = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            x.requires_grad_()
            if number >= first:
                add(x)
            return compiled(x, y)

        return call, None

    compared(program, "an argument has hooks, which a graph does not call .register them in the step.")


def test_an_argument_whose_numbers_are_negated_when_they_are_read() -> None:
    """The imaginary part of what is conjugated, which lies in memory as that of what is not."""

    def program(model: nn.Module, wrap: Any) -> Any:
        step = wrap(lambda x, y: trained(model, x, y))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            z = torch.complex(x, x.flip(0))
            return step(z.imag if number < 4 else z.conj().imag, y)

        return call, None

    assert compared(program, "the numbers of an argument are negated when they are read .give it x.resolve_neg") == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_arguments_without_usual_numbers_run_eagerly(kind: str) -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            return trained(model, x.to_padded_tensor(0.0) if x.is_nested else x.dequantize().double(), y)

        compiled = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            nested = torch.nested.nested_tensor([*x])
            return compiled(
                nested if kind == "nested" else torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), y
            )

        return call, None

    assert compared(program, "an argument is a nested or a quantized tensor") == 0


def test_numbers_that_the_system_draws() -> None:
    """Their generator has no state that could be put back."""
    model, draw = enn.convert(nn.Linear(8, 3)).per_sample(), random.SystemRandom()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        scale = draw.random()
        (F.cross_entropy(model(x), y) * scale).backward()
        return model.weight.grad / scale, scale  # type: ignore[return-value]

    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    found = [step(x, y)]
    with pytest.warns(enn.PerSampleWarning, match="its graph leaves another returned value"):
        found += [(model.zero_grad(), step(x, y))[1] for _ in range(3)]
    assert len({scale for _, scale in found}) == 4
    for grad, _ in found:
        torch.testing.assert_close(grad, found[0][0])


@pytest.mark.parametrize("of_model", [False, True])
def test_zeros_of_both_signs(of_model: bool) -> None:
    """They are equal, and what is made of them is not."""

    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda x, y, number: (trained(model, x, y), 1 / torch.tensor(model.number if of_model else number)))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            model.number = zero = 0.0 if number < 3 else -0.0
            return step(x, y, 1.0 if of_model else zero)

        return call, None

    assert compared(program, None) == 2


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("calls", [True, False])
def test_a_module_of_torchscript(calls: bool) -> None:
    """A step that calls it runs eagerly; one that refers to it need not."""

    def program(model: Any, wrap: Any) -> Any:
        scripted = torch.jit.freeze(torch.jit.script(nn.Linear(8, 8)).eval())

        def step(x: Tensor, y: Tensor) -> Any:
            return trained(model, scripted(x) if calls else x, y), len(list(scripted.children()))

        compiled = wrap(step)
        return (lambda _, x, y: compiled(x, y)), None

    assert compared(program, "it calls a module of TorchScript" if calls else None) == (0 if calls else 1)


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    weights: Tensor = field(init=False)


def test_a_field_that_has_no_value() -> None:
    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda batch: trained(model, batch.x, batch.y))
        return (lambda _, x, y: step(Batch(x, y))), None

    assert compared(program, None) == 1


@dataclass
class Completed:
    """With attributes that are no fields."""

    x: Tensor

    def __post_init__(self) -> None:
        self.scaled = 2 * self.x


def test_attributes_that_are_no_fields() -> None:
    def program(model: Any, wrap: Any) -> Any:
        def step(batch: Completed, y: Tensor) -> Completed:
            loss = trained(model, batch.scaled, y)
            del batch.scaled
            batch.loss = loss  # type: ignore[attr-defined]
            result = Completed(batch.x)
            result.scaled = loss * 2
            return result

        compiled = wrap(step)

        def call(_: Any, x: Tensor, y: Tensor) -> Any:
            batch = Completed(x)
            return vars(compiled(batch, y)), vars(batch)

        return call, None

    # Python 3.14 sets `__slotnames__` of the class once an object is copied, which makes another kind
    assert compared(program, None) == (1 if sys.version_info < (3, 14) else 2)


class Named(dict[str, Tensor]):
    scale: Any


class NamedByUser(UserDict[str, Tensor]):
    scale: Any


class Own(Items):
    scale: Any


@pytest.mark.parametrize(
    ("kind", "scale", "match", "count"),
    [
        (Named, lambda number, x: number // 4 + 1.0, None, 2),
        (Named, lambda number, x: x.abs().max(), "takes or returns a Named, with tensors in attributes", 0),
        (NamedByUser, lambda number, x: number // 4 + 1.0, None, 2),
        (NamedByUser, lambda number, x: [x.abs().max()], "NamedByUser, with tensors in attributes", 0),
        (Own, lambda number, x: 1.0, "takes or returns a Own, a copy of which may share its items", 0),
    ],
)
def test_a_mapping_with_attributes(kind: Any, scale: Any, match: str | None, count: int) -> None:
    def program(model: Any, wrap: Any) -> Any:
        def step(batch: Any, y: Tensor) -> Any:
            return trained(model, batch["x"], y, batch.scale[0] if isinstance(batch.scale, list) else batch.scale)

        compiled = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            batch = kind(x=x)
            batch.scale = scale(number, x)
            return compiled(batch, y), batch["x"]

        return call, None

    assert compared(program, match) == count


def test_a_step_that_calls_no_module() -> None:
    def program(model: Any, wrap: Any) -> Any:
        weight = torch.linspace(-1, 1, 24).view(8, 3).requires_grad_()

        def step(x: Tensor, y: Tensor) -> Any:
            weight.grad = None
            F.cross_entropy(x @ weight, y).backward()
            assert weight.grad is not None
            return 2 * weight.grad

        compiled = wrap(step)
        return (lambda _, x, y: compiled(x, y)), None

    assert compared(program, None) == 1


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # torch makes a number of a tensor
    "alpha": lambda x, s: x.add(x, alpha=s),
    "value": lambda x, s: x.addcmul(x, x, value=s),
    "slope": lambda x, s: F.leaky_relu(x, s),
    "full": lambda x, s: torch.full((2,), s),
    "of_a_list": lambda x, s: torch.tensor([s, s]),
}


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("use", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_torch_takes_from_a_tensor(use: Callable[[Tensor, Tensor], Tensor], buffer: bool) -> None:
    """As `alpha`, the noise of a schedule: a graph would keep that of the trace."""
    model, number = enn.convert(nn.Linear(4, 4)).per_sample(), torch.tensor(0.1)
    if buffer:
        model.register_buffer("number", number)

    def step(x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        return use(x, model.number if buffer else number)

    compiled = enn.compile(step, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(4):
            number.fill_(call + 0.5)
            model.zero_grad()
            x = torch.linspace(-1, 1, 12).view(3, 4)
            torch.testing.assert_close(compiled(x), use(x, number))
    assert any("it takes a number from a tensor in line" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("accumulates", [False, True])
def test_sparse_gradients_run_eagerly(accumulates: bool) -> None:
    model = enn.convert(nn.Embedding(9, 2, sparse=True)).per_sample()

    def step(x: Tensor) -> None:
        if not accumulates:
            model.zero_grad()
        model(x).square().mean().backward()

    compiled = enn.compile(step, backend="eager")
    compiled(torch.randint(9, (4, 3)))
    with pytest.warns(enn.PerSampleWarning, match="runs eagerly, as its gradients are sparse"):
        compiled(torch.randint(9, (4, 3)))
    compiled(torch.randint(9, (4, 3)))
    assert model.weight.grad.is_sparse


class ReadOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def test_gradients_of_other_strides_than_a_trace_says() -> None:
    """Those of the mean squared error behind a recurrent layer, of which a graph took a view that is none."""
    model = enn.convert(ReadOut()).per_sample()

    def step(x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()

    compiled = enn.compile(step, backend="eager")
    for _ in range(7):
        x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
        compiled(x, y)
        rows = [parameter.grad_sample for parameter in model.parameters()]
        step(x, y)
        for own, parameter in zip(rows, model.parameters(), strict=True):
            torch.testing.assert_close(own.to_dense(), parameter.grad_sample.to_dense())
    assert sum(len(family.graphs) for family in compiled._graphs.families.values()) == 1


def triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


class Scaled(nn.Module):
    """A layer, a buffer and another tensor; the buffer and a parameter have attributes, the bias had a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("table", torch.ones(3))
        self.kept = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        return self.layer(x) * table * table.scale * self.kept  # type: ignore[no-any-return]


def other_buffers(model: Any) -> None:
    model._buffers = dict(model._buffers)
    model.table = 5 * model.table
    model.table.scale = 1.0


def other_attributes(model: Any) -> None:
    model.__dict__ = dict(vars(model))
    model.kept = 5 * model.kept


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.table, "scale", 5.0),
        other_buffers,
        other_attributes,
        lambda model: setattr(model.layer.weight.options, "scale", 5.0),
        lambda model: model.layer.bias.register_post_accumulate_grad_hook(triple),
    ],
    ids=["attribute of a buffer", "buffers", "attributes", "object of a parameter", "hook after another one"],
)
def test_what_tensors_and_modules_have_is_another_thing(change: Callable[[Any], Any]) -> None:
    def program(model: Any, wrap: Any) -> Any:
        model.table.scale = 1.0
        model.layer.weight.options = SimpleNamespace(scale=1.0)
        model.layer.bias.register_post_accumulate_grad_hook(triple).remove()

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = trained(model, x, y)
            for parameter in (model.layer.weight,):
                parameter.grad.mul_(parameter.options.scale)
            return loss

        run = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                change(model)
            return run(x, y)

        return call, None

    assert compared(program, None, Scaled) == 2


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Weighted(Pair):
    weight = 1.0


@dataclass
class WeightedBatch:
    x: Tensor
    y: Tensor
    weight: ClassVar[float] = 1.0


@pytest.mark.parametrize("kind", [Weighted, WeightedBatch])
def test_an_attribute_of_the_class_of_an_argument(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda batch: trained(model, batch.x, batch.y, batch.weight))
        monkeypatch.setattr(kind, "weight", 1.0)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                monkeypatch.setattr(kind, "weight", 5.0)
            return step(kind(x, y))

        return call, None

    assert compared(program, None, lambda: nn.Linear(8, 3)) == 2


def test_an_array_of_another_shape() -> None:
    def program(model: Any, wrap: Any) -> Any:
        numbers = np.arange(4.0)
        step = wrap(lambda x, y: trained(model, x, y, numbers.ndim))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            numbers.shape = (2, 2) if number > 3 else (4,)
            return step(x, y)

        return call, None

    assert compared(program, None, lambda: nn.Linear(8, 3)) == 2


def test_a_tuple_with_attributes_of_its_own_runs_eagerly() -> None:
    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda batch: trained(model, batch.x, batch.y, getattr(batch, "scale", 1.0)))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            batch = Weighted(x, y)
            if number > 3:
                batch.scale = 5.0  # type: ignore[attr-defined]
            return step(batch)

        return call, None

    assert compared(program, "Weighted with attributes of its own", lambda: nn.Linear(8, 3)) == 1


def lookup(config: Any, name: str) -> Any:
    return getattr(config, name)


def test_an_attribute_that_a_function_finds_by_a_computed_name() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kind, self.config = nn.Linear(8, 3), "a", SimpleNamespace(scale_a=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * lookup(self.config, f"scale_{self.kind}")  # type: ignore[no-any-return]

    def change(model: Any) -> None:
        model.config.scale_a = 5.0

    assert compared(program_of(change), None, Configured) == 2


@pytest.mark.parametrize("first", [0, 6])  # the call from which on the number changes, before or after a graph
def test_a_number_of_the_model_that_changes_at_each_call(first: int) -> None:
    """Nothing reads it, but code of a library may."""
    model, x = enn.convert(Masked()).double().per_sample(), torch.randn(4, 8, dtype=torch.float64)
    model.steps = 0
    compiled = enn.compile(lambda x, y: trained(model, x, y), backend="eager")

    def calls() -> None:
        for number in range(first + NEW_KINDS + 4):
            compiled(x, torch.zeros(4, dtype=torch.long))
            model.steps += number >= first

    with pytest.warns(enn.PerSampleWarning, match="another kind, as 'steps' of a Masked changes") as warned:
        calls()
    assert len(warned) == 1


def test_a_tensor_that_a_trace_does_not_see_runs_eagerly() -> None:
    def program(model: Any, wrap: Any) -> Any:
        step = wrap(lambda x, y: trained(model, x.as_subclass(Tensor), y))
        return lambda number, x, y: step(x, y), None

    with pytest.warns(enn.PerSampleWarning, match=r"in a way that no trace sees, such as x\.as_subclass"):
        compared(program, None, Masked)


def test_a_default_that_only_the_step_makes() -> None:
    """A look at a dict takes no default from it, which would be an item that the step finds."""

    def program(model: Any, wrap: Any) -> Any:
        weights = defaultdict(lambda: 5.0, a=1.0)
        step = wrap(lambda x, y: trained(model, x, y, weights["a"] if "a" in [*weights] else 9.0))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                del weights["a"]
                weights["b"] = 1.0
            return step(x, y)

        return call, lambda: dict(weights)

    assert compared(program, None, lambda: nn.Linear(8, 3)) == 2
