"""`enn.compile`: one object in two places at a later call, equal ones that are others, traces that end early."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from some import slow

CALLS = 6  # the last three have another object


def model_and_loss() -> tuple[Any, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = enn.convert(nn.Linear(5, 3)).per_sample()
    x, y = torch.randn(4, 5), torch.zeros(4, dtype=torch.long)
    return model, lambda: F.cross_entropy(model(x), y)


def assert_alike(
    step: Callable[..., Tensor], model: Any, arguments: Callable[[bool], tuple[Any, ...]], **how: Any
) -> None:
    """The compiled step returns, leaves in `.grad` and makes of its arguments what the eager one does."""
    compiled = enn.compile(step, **how)
    for call in range(CALLS):
        found = []
        for run in (compiled, step):
            model.zero_grad()
            given = arguments(call >= 3)
            result = run(*given)
            found.append((result, model.weight.grad.clone(), [x for x in given if isinstance(x, Tensor)]))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def of_two(first: Any, second: Any) -> float:
    """Changes the one, and reads the other."""
    if isinstance(first, list):
        first.append(2.0)
        return 1.0 + len(second)
    first["scale"] = first["scale"] * 2
    return float(second["scale"])


@pytest.mark.filterwarnings("ignore:.*leaves another:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("kind", [list, dict])
def test_one_container_for_two_arguments(kind: type) -> None:
    model, loss = model_and_loss()

    def step(first: Any, second: Any) -> Tensor:
        total = loss() * of_two(first, second)
        total.backward()
        return total.detach()

    def new() -> Any:
        return kind(scale=1.0) if kind is dict else []

    def arguments(is_one: bool) -> tuple[Any, ...]:
        first = new()
        return first, first if is_one else new()

    assert_alike(step, model, arguments, backend="eager")


@pytest.mark.filterwarnings("ignore:.*is one that it refers to by a name:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("is_on_model", [False, True])
def test_a_container_that_the_step_refers_to_as_well(is_on_model: bool) -> None:
    model, loss = model_and_loss()
    settings = model.settings = {"scale": torch.ones(1)}

    def step(given: dict[str, Tensor]) -> Tensor:
        given["scale"] = given["scale"] * 2
        total = loss() * (model.settings if is_on_model else settings)["scale"].sum()
        total.backward()
        return total.detach()

    def arguments(is_one: bool) -> tuple[Any, ...]:
        settings["scale"] = torch.ones(1)
        return (settings if is_one else {"scale": torch.ones(1)},)

    assert_alike(step, model, arguments, backend="eager")


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",  # inductor's own
    "ignore:.*shares its memory:expanded_nn.PerSampleWarning",
)
@pytest.mark.parametrize("backend", ["eager", slow("inductor")])
def test_an_argument_that_the_step_changes_as_a_global(backend: str) -> None:
    model, loss = model_and_loss()
    table = torch.ones(4, 5)

    def step(x: Tensor) -> Tensor:
        table.mul_(2.0)
        both = table + x
        total = loss() + F.cross_entropy(model(both), torch.ones(4, dtype=torch.long))
        total.backward()
        table.add_(x)
        return total.detach() + table.sum()

    def arguments(is_one: bool) -> tuple[Any, ...]:
        table.fill_(1.0)
        return (table if is_one else torch.ones(4, 5),)

    assert_alike(step, model, arguments, backend=backend)


@pytest.mark.parametrize("shared", ["an argument", "a flat tensor", "another gradient"])
def test_zero_gradients_that_share_their_memory(shared: str) -> None:
    model, loss = model_and_loss()
    flat = torch.zeros(18)

    def step(x: Tensor) -> Tensor:
        loss().backward()
        return flat.norm() if shared == "a flat tensor" else x.norm()

    compiled = enn.compile(step, backend="eager")
    for call in range(CALLS):
        found = []
        for run in (compiled, step):
            flat.zero_()
            weight, bias, x = torch.zeros(3, 5), torch.zeros(3), torch.zeros(15)
            if call >= 3:
                if shared == "a flat tensor":
                    weight, bias = flat[:15].view(3, 5), flat[15:]
                elif shared == "an argument":
                    weight = x.view(3, 5)
                else:
                    bias = weight.view(-1)[:3]
            model.weight.grad, model.bias.grad = weight, bias
            found.append((run(x), model.weight.grad.clone()))
        torch.testing.assert_close(*found)


def by_data(x: Tensor) -> None:
    x.data = x.data * 2


CHANGES: list[Callable[[Tensor], Any]] = [
    by_data,
    lambda x: x.unsqueeze_(1),
    lambda x: x.t_(),
    lambda x: x.resize_(2, 2).fill_(3.0),
    lambda x: x.set_(torch.ones(2, 2)),  # type: ignore[call-overload]
]


@pytest.mark.filterwarnings("ignore:.*gives an argument other memory:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("change", CHANGES, ids=["data", "unsqueeze_", "t_", "resize_", "set_"])
def test_an_argument_that_gets_other_memory(change: Callable[[Tensor], Any]) -> None:
    model, loss = model_and_loss()

    def step(x: Tensor) -> Tensor:
        total = loss() * x.mean()
        total.backward()
        change(x)
        return total.detach()

    assert_alike(step, model, lambda _: (torch.ones(4, 5),), backend="eager")


class Base:
    scale = 1.0


class Double(Base):
    scale = 2.0


class Key:
    """Expects its own kind in a comparison."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: Any) -> bool:
        return bool(self.number == other.number)

    def __hash__(self) -> int:
        return hash(self.number)


def test_equal_values_that_are_others() -> None:
    class Mine(Base):
        other = 1

    class Rebased(Base):
        pass

    model, loss = model_and_loss()
    held: dict[str, Any] = {"set": {8, 0}, "range": range(0, 3, 2), "complex": complex(1, 0.0)}
    mine, rebased = Mine(), Rebased()
    reads: dict[str, Callable[[], float]] = {
        "set": lambda: 1.0 + next(iter(held["set"])),
        "range": lambda: 1.0 * held["range"].stop,
        "complex": lambda: 1.0 + str(held["complex"]).count("-"),
        "class": lambda: mine.scale,
        "bases": lambda: rebased.scale,
    }

    def change(name: str) -> None:
        held.update({name: {"set": {0, 8}, "range": range(0, 4, 2), "complex": complex(1, -0.0)}.get(name)})
        if name == "class":
            del Mine.other
            Mine.scale = 5.0
        if name == "bases":
            Rebased.__bases__ = (Double,)

    def step(read: Callable[[], float]) -> Tensor:
        total = loss() * read()
        total.backward()
        return total.detach()

    for name, read in reads.items():
        own_step = partial(step, read)
        compiled, changed = enn.compile(own_step, backend="eager"), []
        for call in range(CALLS):
            if call == 3:
                change(name)
            model.zero_grad()
            found = compiled()
            model.zero_grad()
            torch.testing.assert_close(found, own_step())
            changed.append(float(found))
        assert changed[0] != changed[-1], name


def test_keys_that_compare_with_their_own_kind_alone() -> None:
    model, loss = model_and_loss()
    table = {Key(1): 2.0}

    def step() -> Tensor:
        total = loss() * sum(table.values())
        total.backward()
        return total.detach()

    assert_alike(step, model, lambda _: (), backend="eager")


def draws_in_python(loss: Tensor) -> float:
    return random.random()


def seeds(loss: Tensor) -> None:
    torch.manual_seed(0)


def branches(loss: Tensor) -> bool:
    return bool(loss > 0)


@pytest.mark.filterwarnings("ignore:.*runs eagerly:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("ends", [draws_in_python, seeds, branches])
def test_a_trace_that_ends_early_leaves_nothing(ends: Callable[[Tensor], Any]) -> None:
    """Neither a `.grad` without values, nor hooks that the step removes at its end."""
    model, loss = model_and_loss()
    own = torch.ones((), requires_grad=True)
    everywhere = nn.modules.module._global_forward_hooks

    def step() -> Tensor:
        handles = [own.register_hook(lambda grad: 2 * grad), own.register_post_accumulate_grad_hook(lambda x: None)]
        handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, y: 2 * y))
        total = loss() * own
        total.backward()
        ends(total)
        for handle in handles:
            handle.remove()
        return total.detach()

    wanted = step()
    gradient, own.grad = own.grad, None
    compiled = enn.compile(step, backend="eager")
    for call in range(3):
        model.zero_grad()
        own.grad = None
        if ends is branches and call:
            with pytest.raises(enn.PerSampleError, match="reads a value"):
                compiled()
            assert own.grad is None
        else:
            torch.testing.assert_close(compiled(), wanted)
            torch.testing.assert_close(own.grad, gradient)
        assert not any((everywhere, own._backward_hooks, own._post_accumulate_grad_hooks))
