"""A compiled step whose calls repeat: what a graph depends on is seen at each call, whatever way it is changed."""

import operator
import random
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import expanded_nn as enn
from expanded_nn.compiling.families import Family
from expanded_nn.compiling.kinds import Call
from expanded_nn.compiling.seen import Seen
from test_compiled_step import assert_same, graphs, outcome, samples, small


class Scaled(nn.Module):
    """Numbers, a tensor, a buffer, a hook, a child and parameters, each of which the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop, self.factor, self.shift = nn.Linear(8, 3), nn.Dropout(0.5), 2.0, torch.ones(3)
        self.register_buffer("bias", torch.full((3,), 0.5))
        self.number, self.gains, self.config = 1, [1.0], SimpleNamespace(gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(self.out(x)) * self.factor + self.shift + self.bias
        return h * self.number * self.gains[0] * self.config.gain


class Step:
    """A step that refers to its model by an attribute, and to a number by a closure's variable."""

    def __init__(self, *, clears: bool = False) -> None:
        torch.manual_seed(0)
        self.model, limit, self.power = enn.convert(Scaled()).per_sample(), 1.0, 1

        def step(x: Tensor, y: Tensor) -> Any:
            if clears:
                self.model.zero_grad()
            loss = F.cross_entropy(self.model(x) ** self.power, y)
            loss.backward()
            return loss.detach(), enn.clip_grad_sample_norms_(self.model, limit)

        def set_limit(value: float) -> None:
            nonlocal limit
            limit = value

        self.step, self.set_limit = step, set_limit
        self.compiled = enn.compile(step, backend="eager")

    def left_by(self, run: Callable[..., Any], batch: tuple[Tensor, ...]) -> dict[str, Any]:
        torch.manual_seed(3)
        return outcome(self.model, run(*batch))

    def assert_as_eager(self, batch: tuple[Tensor, ...]) -> None:
        results = []
        for run in (self.compiled, self.step):
            self.model.zero_grad()
            results.append(self.left_by(run, batch))
        assert_same(*results)


def replaced_hook(step: Step) -> None:
    """Another one, so that there are as many as before."""
    step.model.out._forward_hooks.clear()
    step.model.out.register_forward_hook(lambda module, args, output: 3 * output)


def replaced_parameter(step: Step) -> None:
    step.model.out.weight = nn.Parameter(torch.ones(3, 8))


def replaced_child(step: Step) -> None:
    step.model.out = enn.convert(nn.Linear(8, 3))
    step.model.per_sample()


def gradient_hook(step: Step) -> None:
    step.model.out.weight.register_hook(lambda grad: 0.5 * grad)


def gradient_is_there(step: Step) -> None:
    step.model.out.weight.grad = torch.zeros(3, 8)


def attribute(name: str, value: Any) -> Callable[[Step], None]:
    return lambda step: setattr(step.model, name, value)


def below_setattr(step: Step) -> None:
    vars(step.model)["factor"] = 3.0


CHANGES: dict[str, Callable[[Step], Any]] = {
    "eval": lambda step: step.model.eval(),
    "frozen": lambda step: step.model.out.bias.requires_grad_(False),
    "settings": lambda step: step.model.per_sample(loss_reduction="sum"),
    "number": attribute("factor", 3.0),
    "number of another kind": attribute("number", 1.0),
    "number as a tensor": attribute("number", torch.tensor([1.0])),
    "below __setattr__": below_setattr,
    "number in a list": lambda step: operator.setitem(step.model.gains, 0, 3.0),
    "number in an object": lambda step: setattr(step.model.config, "gain", 3.0),
    "tensor of another shape": attribute("shift", torch.ones(1)),
    "buffer of another shape": attribute("bias", torch.ones(1)),
    "data of another dtype": lambda step: setattr(step.model.bias, "data", torch.ones(3, dtype=torch.float32)),
    "probability": lambda step: setattr(step.model.drop, "p", 0.1),
    "child": replaced_child,
    "parameter": replaced_parameter,
    "hook": lambda step: step.model.out.register_forward_hook(lambda module, args, output: 2 * output),
    "other hook": replaced_hook,
    "hook of a gradient": gradient_hook,
    "gradient": gradient_is_there,
    "closure": lambda step: step.set_limit(0.01),
    "default dtype": lambda step: torch.set_default_dtype(torch.float32),
}


def repeats(compiled: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call would be known as one like the last."""
    call, last = Call(args, kwargs, compiled._graphs.step_values), compiled._graphs.last
    return call.key == last.arguments and call.shapes in last.family.by_shapes and bool(last.seen.holds())


@pytest.mark.parametrize(
    ("change", "clears"),
    [
        pytest.param(
            *(change, clears),
            id=f"{change}-{'clears' if clears else 'cleared_before'}",
            marks=[pytest.mark.slow] * (clears == number % 2),  # one of the two each time
        )
        for number, change in enumerate(CHANGES)
        for clears in (False, True)
    ],
)
def test_a_change_is_seen(change: str, clears: bool) -> None:
    step, batch = Step(clears=clears), samples(4)[0]
    if change == "other hook":
        step.model.out.register_forward_hook(lambda module, args, output: output)

    def compare() -> None:
        for run in (step.compiled, step.step):
            if not clears:
                step.model.zero_grad()
            if change == "gradient":
                gradient_is_there(step)
            results.append(step.left_by(run, batch))
        assert_same(*results[-2:])

    results: list[dict[str, Any]] = []
    saved, change_it = torch.get_default_dtype(), CHANGES[change]
    try:
        name, change = change, ""
        for _ in range(5):
            compare()
        if not clears:
            step.model.zero_grad()
        assert step.compiled._graphs.last is not None
        assert repeats(step.compiled, *batch)
        change_it(step)
        assert not repeats(step.compiled, *batch)
        change = name
        for _ in range(4):
            compare()
    finally:
        torch.set_default_dtype(saved)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, y: (x.float().double()[:3], y[:3]),
        lambda x, y: (x.t().contiguous().t(), y),
        lambda x, y: (x.clone().requires_grad_(), y),
        lambda x, y: (nn.Parameter(x), y),
    ],
    ids=["size", "strides", "requires_grad", "parameter"],
)
def test_other_arguments_are_seen(changed: Callable[..., tuple[Tensor, Tensor]]) -> None:
    step, batch = Step(), samples(4)[0]
    for _ in range(5):
        step.model.zero_grad()
        step.left_by(step.compiled, batch)
    step.model.zero_grad()
    assert repeats(step.compiled, *batch)
    assert repeats(step.compiled, *samples(4, 4)[1])
    other = changed(*batch)
    assert not repeats(step.compiled, *other)
    for _ in range(3):
        step.assert_as_eager(other)


def test_batches_in_dicts_and_keywords_repeat() -> None:
    step, (batch, other, *_) = Step(), samples(4, 4)
    step.compiled = enn.compile(lambda batch, *, scale: scale * step.step(*batch["xy"])[0], backend="eager")
    for x, y in [batch, other] * 3:
        step.model.zero_grad()
        got = step.compiled({"xy": [x, y]}, scale=2.0)
    step.model.zero_grad()
    assert repeats(step.compiled, {"xy": [x, y]}, scale=2.0)
    assert not repeats(step.compiled, {"xy": [x, y]}, scale=3.0)
    assert not repeats(step.compiled, {"xy": [x, x]}, scale=2.0)
    assert not repeats(step.compiled, {"yx": [x, y]}, scale=2.0)
    assert got.shape == ()


def test_one_tensor_for_two_arguments() -> None:
    model = enn.convert(nn.Linear(3, 3)).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        (model(x) * y).sum(1).mean().backward()
        return model.weight.grad_sample  # type: ignore[no-any-return]

    def left(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        return step(x, y).clone()

    for _ in range(5):
        left(torch.ones(2, 3), torch.ones(2, 3))
    x = torch.ones(2, 3)
    torch.testing.assert_close(left(x, x), torch.full((2, 3, 3), 4.0))
    assert len(graphs(step)) == 1


def test_a_module_that_keeps_its_buffers_in_a_dict_of_its_own() -> None:
    step, batch = Step(), samples(4)[0]
    vars(step.model.out)["_buffers"] = UserDict()
    for _ in range(5):
        step.assert_as_eager(batch)
    assert len(graphs(step.compiled)) == 1
    step.model.zero_grad()
    assert not repeats(step.compiled, *batch)


def test_attributes_of_a_parameter_are_seen() -> None:
    step, batch = Step(), samples(4)[0]
    step.model.out.weight.scale = 2.0  # type: ignore[assignment]
    step.compiled = enn.compile(lambda x, y: step.model.out.weight.scale * step.step(x, y)[0], backend="eager")
    for number in range(8):
        if number == 5:
            step.model.zero_grad()
            assert repeats(step.compiled, *batch)
            step.model.out.weight.scale = 3.0  # type: ignore[assignment]
            assert not repeats(step.compiled, *batch)
        torch.manual_seed(3)
        step.model.zero_grad()
        loss = step.compiled(*batch)
        torch.manual_seed(3)
        step.model.zero_grad()
        torch.testing.assert_close(loss, step.model.out.weight.scale * step.step(*batch)[0])
    assert len(graphs(step.compiled)) == 2


def test_a_step_that_runs_eagerly_for_good_is_known_again() -> None:
    model, draws, (x, y) = enn.convert(nn.Linear(8, 3)).per_sample(), True, samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, random.uniform(1, 1) if draws else 1.0)

    compiled = enn.compile(step, backend="eager")

    def call() -> None:
        model.zero_grad()
        compiled(x, y)
        model.zero_grad()

    call()
    with pytest.warns(enn.PerSampleWarning, match="runs eagerly, as it draws random numbers of Python"):
        call()
    looks = compiled._graphs.step_values.looks
    for _ in range(3):
        assert repeats(compiled, x, y)
        call()
    assert compiled._graphs.step_values.looks is looks
    draws = False
    assert not repeats(compiled, x, y)
    for _ in range(3):
        call()
    assert len(graphs(compiled)) == 1


NOTED: dict[str, tuple[Callable[[Seen, Any], None], Callable[[], Any], Callable[[Any], Any]]] = {
    "item behind the last": (Seen.note_items, lambda: [1], lambda items: items.append(2)),
    "item of an empty list": (Seen.note_items, lambda: [], lambda items: items.append(2)),
    "equal number": (Seen.note_items, lambda: [1], lambda items: operator.setitem(items, 0, True)),
    "place behind the last": (
        lambda seen, owner: seen.note_places(list, owner),
        lambda: [1],
        lambda owner: owner.append(2),
    ),
    "equal number in a place": (
        lambda seen, owner: seen.note_places(operator.itemgetter("a", "b"), owner),
        lambda: {"a": 1, "b": 2},
        lambda owner: operator.setitem(owner, "a", 1.0),
    ),
    "place that is gone": (
        lambda seen, owner: seen.note_places(operator.itemgetter("a", "b"), owner),
        lambda: {"a": 1, "b": 2},
        lambda owner: owner.pop("a"),
    ),
    "values of a dict": (
        lambda seen, owner: seen.note_items(owner.values()),
        lambda: {"a": 1},
        lambda owner: operator.setitem(owner, "a", 2),
    ),
    "attribute": (
        lambda seen, model: seen.note_attributes(model),
        nn.Flatten,
        lambda model: setattr(model, "start_dim", 2),
    ),
    "value in a dict": (
        lambda seen, owner: seen.note_dict(owner),
        lambda: {"a": 1},
        lambda owner: owner.update(a=2),
    ),
    "dict that was empty": (
        lambda seen, owner: seen.note_dict(owner),
        dict,
        lambda owner: owner.update(a=2),
    ),
    "order of a dict": (
        lambda seen, owner: seen.note_dict(owner),
        lambda: {"a": 1, "b": 2},
        lambda owner: operator.setitem(owner, "a", owner.pop("a")),
    ),
    "order of an OrderedDict": (
        lambda seen, owner: seen.note_dict(owner),
        lambda: OrderedDict(a=1, b=2),
        lambda owner: owner.move_to_end("a"),
    ),
    "requires_grad": (
        lambda seen, tensor: seen.tensors.append(tensor),
        lambda: torch.ones(2),
        lambda tensor: tensor.requires_grad_(),
    ),
    "sparse tensor": (
        lambda seen, tensor: seen.tensors.append(tensor),
        lambda: torch.ones(2).to_sparse(),
        lambda tensor: tensor.requires_grad_(),
    ),
    "dtype": (
        lambda seen, tensor: seen.tensors.append(tensor),
        lambda: torch.ones(2),
        lambda tensor: setattr(tensor, "data", torch.ones(2, dtype=torch.float16)),
    ),
    "strides": (
        lambda seen, tensor: seen.tensors.append(tensor),
        lambda: torch.ones(2, 2),
        lambda tensor: setattr(tensor, "data", torch.ones(2, 2).t()),
    ),
    "other dict of attributes": (
        lambda seen, model: seen.holders.append(model),
        nn.Flatten,
        lambda model: setattr(model, "__dict__", dict(vars(model))),
    ),
    "fact": (lambda seen, items: seen.note_fact(items.copy), lambda: [1], lambda items: items.append(2)),
}


@pytest.mark.parametrize(("note", "make", "change"), NOTED.values(), ids=NOTED)
def test_what_is_noted_is_seen_to_change(
    note: Callable[[Seen, Any], None], make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    seen, noted = Seen(), make()
    note(seen, noted)
    seen.close()
    assert seen.holds()
    change(noted)
    assert not seen.holds()


def test_what_is_put_back_is_seen_to_be_the_same() -> None:
    seen, noted = Seen(), {"a": 1, "b": 2}
    seen.note_dict(noted)
    seen.close()
    noted.update(a=3)
    noted.update(a=1)
    assert seen.holds()
    noted.update(b=1)
    assert not seen.holds()


@pytest.mark.parametrize("ways", ["clip", "two models", "accumulated", "dense"])
def test_a_mode_that_is_switched_off_and_on_keeps_its_graph(ways: str) -> None:
    """As for an evaluation after each epoch: `per_sample` makes another recorder, which gets the rows from then on."""
    settings = {"dense": {"materialize": True}, "accumulated": {"accumulate_grad": False}}.get(ways, {})
    pairs = [[enn.convert(small()).per_sample(**settings) for _ in range(2 if ways == "two models" else 1)]]
    pairs.append([deepcopy(model) for model in pairs[0]])

    def step(models: list[nn.Module], x: Tensor, y: Tensor) -> Any:
        loss = sum(F.cross_entropy(model(x), y) for model in models)
        loss.backward()
        norms = [enn.clip_grad_sample_norms_(model, 0.1) for model in models if ways != "dense"]
        return loss.detach(), norms

    compiled, counts = enn.compile(partial(step, pairs[0]), backend="eager"), []
    for _ in range(4):
        for x, y in samples(4, 4, 4, 5):
            left = [run(x, y) for run in (compiled, partial(step, pairs[1]))]
            assert_same(*left)
            for model, other in zip(*pairs, strict=True):
                for own, wanted in zip(model.parameters(), other.parameters(), strict=True):
                    assert_same(own.grad, wanted.grad)
                    assert_same(own.grad_sample, wanted.grad_sample)
                for one in (model, other):
                    if ways != "accumulated":
                        one.zero_grad()
        for model in (*pairs[0], *pairs[1]):
            model.per_sample(False)
            model(samples(3)[0][0]).sum().backward()
            model.per_sample(True).zero_grad()
        counts.append(len(graphs(compiled)))
    assert counts[2] == counts[3] > 0


@pytest.mark.parametrize("changed", ["halved", "zeroed", "clipped"])
def test_a_mode_that_is_switched_on_before_the_trace(changed: str) -> None:
    """A trace that is given up left tensors without values in the recorder that `per_sample` had made meanwhile."""
    model, other = (enn.convert(small()).per_sample() for _ in range(2))
    other.load_state_dict(model.state_dict())
    x, y = samples(4)[0]

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    compiled = enn.compile(partial(step, model), backend="eager")
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        for own, run in ((model, compiled), (other, partial(step, other))):
            run(x, y)
            own.per_sample(True)
            step(own, x, y)
            if changed == "clipped":
                enn.clip_grad_sample_norms_(own, 1.0)
            for parameter in own.parameters():
                parameter.grad.mul_(0.0 if changed == "zeroed" else 0.5)
            results.append([run(x, y), *(p.grad for p in own.parameters()), *(p.grad_sample for p in own.parameters())])
    assert not any(isinstance(left, FakeTensor) for left in results[0])
    assert_same(*results)


def test_how_often_the_samples_are_compared_again() -> None:
    family = Family()
    assert [run for run in range(1, 70) if family.count_run()] == [8, 16, 32, 64]
