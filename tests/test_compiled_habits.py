"""A compiled step with the habits of training loops: registries, flags, records of what was done, callbacks in turn."""

import heapq
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from test_compiled_state import compared, trained


class Habit(NamedTuple):
    """What a step does, and what is done before each call."""

    held: Callable[[], Any]  # makes what the step refers to
    scale: Callable[[Any], Any]  # of the loss; it may change what is held
    before: Callable[[Any, int], Any]  # changes what is held before a call of this number
    left: Callable[[Any], Any] = lambda held: None  # numbers to compare after each call


class Scale:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Settings(UserDict[str, float]):
    """A user's subclass of a container of Python's."""


class OfOptimizer(torch.optim.SGD):
    """Has a number of its own, as optimizers for private training have."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], lr=1.0)
        self.noise = 1.0


@dataclass(order=True)
class Stage:
    number: int = 0


def made_if_missing(held: dict[str, Scale]) -> float:
    if "scale" not in held:
        held["scale"] = Scale()
    return held["scale"].scale


def taken_once(held: set[str]) -> float:
    if "reset" in held:
        held.discard("reset")
        return 3.0
    return 1.0


def after_sorting(held: list[Scale]) -> float:
    held.sort(key=lambda each: each.scale)
    return held[-1].scale


def in_turn(held: Any) -> float:
    held.rotate()
    return held[0]()  # type: ignore[no-any-return]


def one_and_the_other(held: Any) -> float:
    held.first, held.second = held.second, held.first
    return held.first.p  # type: ignore[no-any-return]


def twice_as(held: Any, change: Callable[[Any], Any]) -> float:
    change(held)
    return 2.0


def every(first: int, change: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    return lambda held, number: change(held) if number >= first else None


def once_at(calls: tuple[int, ...], change: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    return lambda held, number: change(held) if number in calls else None


def nothing(held: Any, number: int) -> None:
    pass


def set_later(held: Any) -> None:
    held.kept = ["a"]


HABITS = {
    "default_of_a_dict": Habit(
        lambda: defaultdict(lambda: 1.0),
        lambda held: sum(held[name] for name in ("ce", "l2")),
        once_at((4,), lambda held: held.update(l2=5.0)),
    ),
    "object_made_if_missing": Habit(
        dict, made_if_missing, once_at((4,), lambda held: vars(held["scale"]).update(scale=4.0))
    ),
    "request_in_a_set": Habit(set, taken_once, once_at((3, 5, 6), lambda held: held.add("reset")), len),
    "request_in_a_queue": Habit(
        deque, lambda held: held.popleft() if held else 1.0, once_at((3, 5, 6), lambda held: held.append(2.0)), len
    ),
    "request_in_a_dict": Habit(
        dict, lambda held: held.pop("reset", 1.0), once_at((3, 5, 6), lambda held: held.update(reset=2.0)), len
    ),
    "callbacks_that_are_sorted": Habit(
        lambda: [Scale(2.0), Scale(1.0)], after_sorting, once_at((4,), lambda held: held.append(Scale(5.0)))
    ),
    "functions_in_turn": Habit(lambda: deque([lambda: 1.0, lambda: 2.0]), in_turn, nothing),
    "modules_in_turn": Habit(
        lambda: SimpleNamespace(first=nn.Dropout(0.5), second=nn.Dropout(0.25)), one_and_the_other, nothing
    ),
    "records": Habit(list, lambda held: twice_as(held, lambda x: x.append({"size": 4})), nothing, len),
    "records_in_a_dict": Habit(
        lambda: defaultdict(list),
        lambda held: twice_as(held, lambda x: x["shape"].append((4, 8))),
        once_at((4,), lambda held: held.clear()),
        lambda held: len(held["shape"]),
    ),
    "records_in_order": Habit(list, lambda held: twice_as(held, lambda x: heapq.heappush(x, (4, "a"))), nothing, len),
    "none_to_a_list": Habit(
        lambda: SimpleNamespace(kept=None),
        lambda held: twice_as(held, set_later),
        every(0, lambda held: vars(held).update(kept=None)),
        lambda held: len(held.kept),
    ),
    "count_of_numpy": Habit(
        lambda: {"warm": np.float64(0.0)},
        lambda held: twice_as(held, lambda x: x.update(warm=x["warm"] + 1.0)),
        nothing,
        lambda held: float(held["warm"]),
    ),
    "fraction": Habit(
        lambda: {"total": Fraction(1)},
        lambda held: twice_as(held, lambda x: x.update(total=x["total"] + Fraction(1, 3))),
        nothing,
        lambda held: float(held["total"]),
    ),
    "array_made_anew": Habit(
        lambda: SimpleNamespace(kept=np.zeros(2)),
        lambda held: twice_as(held, lambda x: vars(x).update(kept=np.ones(2))),
        every(0, lambda held: vars(held).update(kept=np.zeros(2))),
        lambda held: held.kept.tolist(),
    ),
    "counter": Habit(
        Counter, lambda held: twice_as(held, lambda x: x.update(["calls"])), nothing, lambda held: held["calls"]
    ),
    "order_that_others_change": Habit(
        lambda: OrderedDict(a=1.0, b=2.0),
        lambda held: twice_as(held, lambda x: x.move_to_end("a")),
        every(2, lambda held: held.move_to_end("b")),
        lambda held: [*map(ord, held)],
    ),
    "method_of_a_list": Habit(
        lambda: SimpleNamespace(add=[].append),
        lambda held: twice_as(held, lambda x: x.add(1)),
        nothing,
        lambda held: len(held.add.__self__),
    ),
    "method_of_a_dict": Habit(
        lambda: {"named": 1.0, "kept": 1.0}.get,
        lambda held: held("kept") * held("named"),
        once_at((4,), lambda held: held.__self__.update(kept=3.0)),
    ),
    "comparison_of_records": Habit(
        Stage, lambda held: 1.0 if held < Stage(1) else 2.0, once_at((4,), lambda held: vars(held).update(number=3))
    ),
    "own_dict": Habit(
        lambda: Settings(scale=1.0), lambda held: held["scale"], once_at((4,), lambda held: held.update(scale=2.0))
    ),
    "number_of_an_optimizer": Habit(
        OfOptimizer, lambda held: held.noise, once_at((4,), lambda held: setattr(held, "noise", 0.5))
    ),
    "zero_below": Habit(
        lambda: {"sign": 0.0},
        lambda held: float(np.copysign(1.0, held["sign"])),
        once_at((4,), lambda held: held.update(sign=-0.0)),
    ),
}


@pytest.mark.filterwarnings("ignore:enn.compile")
@pytest.mark.parametrize("name", HABITS)
def test_a_habit(name: str) -> None:
    """Call by call as eagerly, whether it runs as a graph or not."""
    habit = HABITS[name]

    def program(model: nn.Module, wrap: Any) -> Any:
        held = habit.held()
        compiled = wrap(lambda x, y: trained(model, x, y, habit.scale(held)))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            habit.before(held, number)
            return compiled(x, y)

        return call, lambda: habit.left(held)

    compared(program, None)


def test_what_is_made_at_the_first_call_only_is_a_graph() -> None:
    """And numbers in it count."""

    def program(model: nn.Module, wrap: Any) -> Any:
        held: dict[str, Scale] = {}
        compiled = wrap(lambda x, y: trained(model, x, y, made_if_missing(held)))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == 4:
                held["scale"].scale = 2.0
            return compiled(x, y)

        return call, None

    assert compared(program, None) == 2


def sizes_in_an_object(x: Tensor) -> Any:
    return SimpleNamespace(n=x.shape[0])


def sizes_in_a_slice(x: Tensor) -> Any:
    return slice(0, x.shape[0])


@pytest.mark.parametrize("make", [sizes_in_an_object, sizes_in_a_slice])
def test_sizes_that_are_returned_are_numbers(make: Callable[[Tensor], Any]) -> None:
    model, found = enn.convert(nn.Linear(8, 3)).per_sample(), []

    @enn.compile(backend="eager")
    def step(x: Tensor) -> Any:
        model(x).sum().backward()
        return make(x)

    with pytest.warns(enn.PerSampleWarning, match="that holds tensors or sizes"):
        found += [(model.zero_grad(), step(torch.randn(size, 8)))[1] for size in (4, 5, 6, 4)]
    assert [getattr(value, "n", None) or value.stop for value in found] == [4, 5, 6, 4]


def test_hooks_that_a_step_leaves() -> None:
    """One more at each call; the trace's own is taken back."""

    def program(model: Any, wrap: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            model[0].weight.register_hook(lambda grad: grad * 0.9)
            return trained(model, x, y)

        compiled = wrap(step)
        return lambda number, x, y: compiled(x, y), lambda: len(model[0].weight._backward_hooks)

    compared(program, None)


class Cycles(nn.Module):
    """Has an iterator among its attributes."""

    scales: Iterator[float]

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(8, 3), iter([1.0, 2.0, 3.0] * 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_an_iterator_of_a_module() -> None:
    def program(model: Any, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: trained(model, x, y, next(model.scales)))
        return lambda number, x, y: compiled(x, y), None

    assert compared(program, "it refers to an iterator, a list_iterator", Cycles) == 0


def test_more_objects_than_are_looked_into() -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        data, settings = [{"words": [1], "label": [2]} for _ in range(5000)], {"beta": 1.0}
        compiled = wrap(lambda x, y: trained(model, x, y, settings["beta"] * 5000 / len(data)))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            settings["beta"] = 1.0 if number < 4 else 2.0
            return compiled(x, y)

        return call, None

    assert compared(program, "it refers to more than 10000 lists, dicts and objects") == 0


def test_lists_within_lists_without_end() -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        held: list[Any] = []
        for _ in range(3000):
            held = [held]
        return (lambda compiled: lambda number, x, y: compiled(x, y))(
            wrap(lambda x, y: trained(model, x, y, len(held)))
        ), None

    assert compared(program, None) == 1


def test_a_count_beside_much_that_is_kept() -> None:
    """What is near is put back and compared, however much there is behind it."""

    def program(model: nn.Module, wrap: Any) -> Any:
        own = SimpleNamespace(stats={"calls": 0}, replay=[{"x": [i], "y": [[i]]} for i in range(30_000)])

        def step(x: Tensor, y: Tensor) -> Any:
            own.stats["calls"] += 1
            own.replay.sort(key=id) if own.stats["calls"] < 0 else None
            return trained(model, x, y)

        compiled = wrap(step)
        return lambda number, x, y: compiled(x, y), lambda: own.stats["calls"]

    compared(program, "runs eagerly")
