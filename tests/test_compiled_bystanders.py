"""A compiled step and what is beside it: modules that it does not call, and what is set for all of torch."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from queue import Queue
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from test_compiled_step import assert_same, graphs, outcome, perceptron, samples


class Beside(nn.Module):
    """A module with a parameter, a buffer and a tensor as an attribute."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(2))
        self.weight.scale, self.weight.offset, self.weight.grad_sample = 1.0, torch.zeros(2), torch.zeros(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.bound = torch.zeros(2)


def left_in(beside: Beside) -> list[Any]:
    values = vars(beside.weight)
    rest = [values[name] for name in sorted(values)]
    return [*rest, beside.weight.requires_grad, beside.mean, beside.bound]


def law(use: Callable[[Beside, Tensor], Any], between: Callable[[Beside, int], None]) -> int:
    """A step that uses such a module, compiled and not; how many graphs there are."""
    torch.manual_seed(0)
    models = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    besides, runs = [Beside(), Beside()], []
    for model, beside in zip(models, besides, strict=True):

        def step(x: Tensor, y: Tensor, model: Any = model, beside: Beside = beside) -> Any:
            F.cross_entropy(model(x), y).backward()
            return use(beside, model[0].weight.grad_sample)

        runs.append(step)
    compiled = runs[0] = enn.compile(runs[0], backend="eager")
    for number, (x, y) in enumerate(samples(4, 4, 4, 4, 4, 4)):
        outcomes = []
        for model, beside, run in zip(models, besides, runs, strict=True):
            model.zero_grad()
            between(beside, number)
            outcomes.append((outcome(model, run(x, y)), left_in(beside)))
        assert_same(*outcomes)
    return len(graphs(compiled))


def other_number(beside: Beside, number: int) -> None:
    beside.weight.scale = float(number // 3)


def other_tensor_of_parameter(beside: Beside, number: int) -> None:
    beside.weight.offset = torch.full((2,), float(number))


def other_rows(beside: Beside, number: int) -> None:
    beside.weight.grad_sample = torch.full((3, 2), float(number))


def other_buffer(beside: Beside, number: int) -> None:
    beside.mean = torch.full((2,), float(number))


def other_attribute(beside: Beside, number: int) -> None:
    beside.bound = torch.full((2,), float(number))


def read(beside: Beside, _: Tensor) -> Tensor:
    weight = beside.weight
    return weight.detach() * weight.scale + weight.offset + weight.grad_sample.sum(0) + beside.mean + beside.bound


@pytest.mark.parametrize(
    "between", [other_number, other_tensor_of_parameter, other_rows, other_buffer, other_attribute]
)
def test_what_is_set_anew_between_the_calls_is_seen(between: Callable[[Beside, int], None]) -> None:
    assert law(read, between) == (2 if between is other_number else 1)


def set_attribute(beside: Beside, rows: Tensor) -> None:
    beside.weight.offset = rows.sum((0, 1))[:2]


def set_rows(beside: Beside, rows: Tensor) -> None:
    beside.weight.grad_sample = rows


def freeze(beside: Beside, _: Tensor) -> None:
    beside.weight.requires_grad_(False)


def thaw(beside: Beside, _: int) -> None:
    beside.weight.requires_grad = True


@pytest.mark.parametrize("use", [set_attribute, set_rows, freeze])
def test_what_the_step_sets_is_set_by_the_graph(use: Callable[[Beside, Tensor], Any]) -> None:
    assert law(use, thaw) == 1


def without_gradients() -> None:
    torch.set_grad_enabled(False)


def in_single() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("change", [without_gradients, in_single])
def test_a_step_that_sets_what_holds_for_all_of_torch_runs_eagerly(change: Callable[[], None]) -> None:
    model, before = enn.convert(perceptron()).per_sample(), torch.get_default_dtype()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        change()

    for number, (x, y) in enumerate(samples(4, 4, 4)):
        warns = pytest.warns(enn.PerSampleWarning, match="gradients switched off, or another default dtype")
        with warns if number == 1 else nullcontext():
            step(x, y)
        left = torch.is_grad_enabled(), torch.get_default_dtype()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(before)
        assert left == (change is not without_gradients, torch.float32 if change is in_single else before)


def test_an_argument_with_a_history_runs_eagerly() -> None:
    model, scale = enn.convert(perceptron()).per_sample(), torch.ones(8, requires_grad=True)

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for number, (x, y) in enumerate(samples(4, 4, 4)):
        scale.grad = None
        warns = pytest.warns(enn.PerSampleWarning, match=r"was computed from what requires gradients.*compute it in")
        with warns if number == 0 else nullcontext():
            step(x * scale, y)
        assert scale.grad is not None


@pytest.mark.parametrize("of_parameter", [False, True])
def test_factored_rows_that_are_kept_between_the_calls(of_parameter: bool) -> None:
    """They hold other factors at each call."""
    model, other = (enn.convert(perceptron()).per_sample(keep_factors=True) for _ in range(2))
    place: Any = model[0].weight if of_parameter else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        return place.kept.sum(0)

    compiled = enn.compile(step, backend="eager")
    for x, y in samples(4, 4, 4, 4):
        other.zero_grad()
        F.cross_entropy(other(x), y).backward()
        place.kept = other[0].weight.grad_sample
        model.zero_grad()
        torch.testing.assert_close(compiled(x, y), place.kept.to_dense().sum(0))


class Loader:
    """Batches that another thread keeps ready, one more each time that it is asked."""

    def __init__(self) -> None:
        self.ready: Queue[int] = Queue()
        self.sent: deque[int] = deque([100, 101, 102, 103])
        self.count = 0
        self.asked, self.done = Event(), Event()

    def fill(self) -> None:
        while self.asked.wait(timeout=60) and self.count >= 0:
            self.asked.clear()
            self.count += 1
            self.ready.put(self.count)
            self.sent.popleft()
            self.done.set()


class Trainer:
    """Its step refers to no attribute of the loader, which can be reached from it."""

    def __init__(self) -> None:
        self.model = enn.convert(perceptron()).per_sample()
        self.loader = Loader()
        self.model.register_forward_hook(meanwhile(self.loader.asked, self.loader.done))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(self.model(x), y).backward()
        return enn.clip_grad_sample_norms_(self.model, 1.0)


def meanwhile(asked: Event, done: Event) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        done.clear(), asked.set()
        assert done.wait(timeout=60)

    return hook


def test_what_another_thread_changes_during_a_trace_stays() -> None:
    """A trace lasts long enough for a loader to add a batch, and one that is put back would be missed for ever."""
    trainer = Trainer()
    loader, step = trainer.loader, enn.compile(trainer.step, backend="eager")
    thread = Thread(target=loader.fill, daemon=True)
    thread.start()
    for x, y in samples(4, 4, 4, 4):
        trainer.model.zero_grad()
        step(x, y)
    assert len(graphs(step)) == 1  # the first call, the trace and the comparison have asked, and no call after them
    assert (loader.count, list(loader.ready.queue), list(loader.sent)) == (3, [1, 2, 3], [103])
    loader.count = -1
    loader.asked.set()
    thread.join()
