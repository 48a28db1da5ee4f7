"""Forwards that are compared with some of their samples: what mixes samples, or takes a table for them."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from argparse import Namespace
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from oracle import Call, assert_close_rows, loop, rows_of, take_rows, total_loss

pytestmark = pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
MEETS = "some of the samples give other results without the others"
IN_OTHER_ROWS = "are in the rows of others"


def right(model: Any, *args: Tensor, **kwargs: Tensor) -> None:
    """Asserts that the rows of a step are those of the loop; keyword arguments are shared by all samples."""
    call = Call(args, kwargs)

    def take(call: Call, i: int) -> Call:
        return Call(take_rows(Call(call.args), i).args, call.kwargs)

    model.zero_grad()
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(enn.revert(model), call, len(args[0]), take=take))


def train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(6, 4)).sum().backward()


class Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 5), nn.Linear(5, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "detached mean": lambda h: h - h.detach().mean(0),
    "std": lambda h: h / h.std(0),
    "softmax": lambda h: h.softmax(0),
    "cumulative sum": lambda h: h.cumsum(0),
    "similarities": lambda h: (h @ h.T).softmax(1) @ h,
    "distances": lambda h: h * torch.cdist(h, h).mean(1, keepdim=True),
    "largest of all": lambda h: h / h.detach().abs().max(),
    "norm of all": lambda h: h / h.norm(),
    "neighbour": lambda h: h + torch.eye(len(h)).roll(1, 0) @ h,
    "random weights": lambda h: h * torch.rand(len(h), 1) * h.mean(0),
}


@pytest.mark.parametrize("escalate", [True, False])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_samples_that_meet_are_refused(mix: Callable[[Tensor], Tensor], escalate: bool) -> None:
    model = enn.convert(Between(mix)).per_sample(escalate=escalate)
    for _ in range(2):  # a refused call leaves nothing that the next one would take for right
        with pytest.raises(enn.PerSampleError, match=f"{MEETS}|{IN_OTHER_ROWS}|another result than sample by sample"):
            train(model, steps=8)  # half of the samples may have the largest number


class Scaled(Between):
    """The same, with a parameter of its own."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(between)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x) * self.scale))


@pytest.mark.parametrize("begins", [0, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("make", [Between, Scaled])
@pytest.mark.parametrize("mix", [MIXES[name] for name in ("mean", "norm of all")])
def test_samples_that_meet_in_low_precision(
    mix: Callable[[Tensor], Tensor], make: type[Between], autocast: bool, dtype: torch.dtype, begins: int
) -> None:
    steps_before: list[int] = []
    plain = make(lambda h: mix(h) if len(steps_before) >= begins else h)
    model = enn.convert(plain.float() if autocast else plain.to(dtype)).per_sample()
    x = torch.randn(16, 4, dtype=torch.float32 if autocast else dtype) + 1

    def steps() -> None:
        for number in range(40):
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                y = model(x)
            model.zero_grad()
            y.float().square().sum(1).mean().backward()
            steps_before.append(number)

    with pytest.raises(enn.PerSampleError, match=f"{MEETS}|{IN_OTHER_ROWS}|another result than sample by sample"):
        steps()


def test_mixing_that_begins_later_is_refused_soon_after() -> None:
    mixes = []
    model = enn.convert(Between(lambda h: h - h.mean(0) if mixes else h)).per_sample()
    train(model, steps=5)
    mixes.append(True)
    with pytest.raises(enn.PerSampleError, match=MEETS):
        train(model, steps=5)


def test_samples_that_are_sorted_by_a_matrix() -> None:
    def between(h: Tensor) -> Tensor:
        order = torch.eye(len(h))[h.detach().sum(1).argsort()]
        return order.T @ F.gelu(order @ h)

    class Sorts(Between):
        def forward(self, x: Tensor) -> Tensor:
            order = torch.eye(len(x))[x.sum(1).argsort()]
            return order.T @ self.second(order @ self.first(x))

    for plain in (Between(between), Sorts(F.gelu)):
        model = enn.convert(plain).per_sample(loss_reduction="sum")
        for _ in range(3):
            right(model, torch.randn(7, 4))


class Branch(nn.Module):
    """A residual branch that mixes the samples, and whose last layer may begin with zeros."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(4, 4), nn.Linear(4, 4), mix
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        return h + self.last(self.mix(h))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_what_a_layer_of_zeros_hides(mix: Callable[[Tensor], Tensor]) -> None:
    """Its results tell nothing in the first step, and the rows of its weight are already wrong."""
    model = enn.convert(Branch(mix)).per_sample()
    with pytest.raises(enn.PerSampleError, match=MEETS):
        model(torch.randn(6, 4))


def test_a_branch_that_begins_with_zeros() -> None:
    """The comparison leaves its weights, and random numbers, as they are."""
    model = enn.convert(Branch(torch.tanh)).per_sample(loss_reduction="sum")
    state = torch.get_rng_state()
    for _ in range(3):
        right(model, torch.randn(6, 4))
    model(torch.randn(6, 4))
    assert not model.last.weight.any()
    torch.set_rng_state(state)


class Table(nn.Module):
    """Adds to each of five positions what a layer makes of a table of five rows."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.make, self.of_table, self.of_samples = make, nn.Linear(1, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 4)
        return (self.of_samples(x) + self.of_table(self.make().view(5, 1))).tanh().mean(1)


TABLES: dict[str, Callable[[], Tensor]] = {
    "window": lambda: torch.hann_window(5),
    "frequencies": lambda: torch.fft.fftfreq(5),
    "constructor": lambda: torch.Tensor([1.0, 2.0, 3.0, 4.0, 6.0]),
    "kept": lru_cache(lambda: torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0])),
    "of numpy": lambda: torch.from_numpy(np.linspace(0.0, 1.0, 5)),
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("sizes", [(5, 5), (3, 5, 3)], ids=["first", "later"])
def test_tables_with_as_many_rows_as_there_are_samples(make: Callable[[], Tensor], sizes: tuple[int, ...]) -> None:
    model = enn.convert(Table(lambda: make().to(torch.get_default_dtype()))).per_sample(loss_reduction="sum")
    for size in sizes:
        right(model, torch.randn(size, 5, 4))


class TwoTowers(nn.Module):
    """Scores of images and the texts of all classes."""

    def __init__(self, *, has_scale: bool = False) -> None:
        super().__init__()
        self.of_image, self.of_text = nn.Linear(4, 5), nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(2.0)) if has_scale else 2.0

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.normalize(self.of_image(images), dim=-1) @ F.normalize(self.of_text(classes), dim=-1).T * self.scale


@pytest.mark.parametrize("has_scale", [False, True])
def test_an_argument_that_all_samples_share_has_as_many_rows(has_scale: bool) -> None:
    classes = torch.randn(6, 3)
    model = enn.convert(TwoTowers(has_scale=has_scale)).per_sample(loss_reduction="sum")
    for _ in range(2):  # they may be pairs of an image and a text, whose losses depend on each other
        with pytest.raises(enn.PerSampleError, match=f"{IN_OTHER_ROWS}|another result than sample by sample"):
            model(torch.randn(6, 4), classes=classes)
    for size in (4, 6, 5, 6):  # other numbers of samples tell that it is shared
        right(model, torch.randn(size, 4), classes=classes)


class OnGraph(nn.Module):
    """Layers on the nodes of a graph that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # (B, nodes, 4), (nodes, nodes)
        return weights @ self.second((weights @ self.first(x)).relu())


@pytest.mark.parametrize("size", [5, 3])
def test_a_matrix_that_all_samples_share_and_no_layer_takes(size: int) -> None:
    model = enn.convert(OnGraph()).per_sample(loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            right(model, torch.randn(size, 5, 4), weights=torch.rand(5, 5))


class Trimmed(nn.Module):
    """Texts that are cut to the longest of the batch, so that each is filled up as far as the longest needs it."""

    def __init__(self, longest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.words, self.longest = nn.Embedding(20, 8), longest
        self.layer, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        steps, _ = self.layer(self.words(ids[:, self.longest(mask)]))
        return self.last(steps.mean(1))


LONGEST: dict[str, Callable[[Tensor], Any]] = {
    "largest length": lambda mask: slice(int(mask.sum(1).max())),
    "any mask": lambda mask: mask.any(0),
}


@pytest.mark.parametrize("samples", [9, 64])
@pytest.mark.parametrize("argument", ["of its own", "the ids"])
@pytest.mark.parametrize("longest", LONGEST.values(), ids=LONGEST)
def test_texts_that_are_cut_to_the_longest(longest: Callable[[Tensor], Any], argument: str, samples: int) -> None:
    """One text of full length is in half of the halves, and of 64 texts eight are; but seldom is it the single one."""
    model = enn.convert(Trimmed(longest)).per_sample()

    def steps() -> None:
        for _ in range(32):
            mask = torch.arange(8) < torch.randint(2, 9, (samples, 1))
            ids = torch.randint(1, 20, (samples, 8)) * mask
            model(ids, mask if argument == "of its own" else ids != 0).sum().backward()

    with pytest.raises(enn.PerSampleError, match=MEETS):
        steps()


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(),
    "sum": lambda weights: weights.sum(),
    "largest": lambda weights: weights.amax(),
}


@pytest.mark.parametrize("reduce", REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)], ids=str)
def test_an_argument_in_whose_numbers_samples_meet(shape: tuple[int, ...], reduce: Callable[[Tensor], Tensor]) -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return self.layer(x) / reduce(weights)

    model, x, weights = enn.convert(Divided()).per_sample(loss_reduction="sum"), torch.randn(6, 4), torch.rand(shape)
    with pytest.raises(enn.PerSampleError, match=MEETS):
        model(x, weights)
    right(model, x, weights=enn.shared_by_all(weights))


POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda h, weights: h * weights,
    "mask": lambda h, weights: h.masked_fill(weights < 0.5, 0),
    "weighed mean": lambda h, weights: (h * weights).sum(1, keepdim=True),
    "order": lambda h, weights: h[:, weights.argsort()] * torch.arange(5),
}


@pytest.mark.parametrize("use", POSITIONS.values(), ids=POSITIONS)
def test_an_argument_for_positions_that_all_samples_share(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    """It has as many rows as there are samples, and is no error where each row has its place."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(1, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # (B, positions), (positions,)
            h = self.layer(x.unsqueeze(2)).transpose(1, 2)
            return self.last(use(h.flatten(0, 1), weights).unflatten(0, (len(x), 4)).flatten(2).mean(2))

    model = enn.convert(Positions()).per_sample(loss_reduction="sum")
    for _ in range(4):
        right(model, torch.randn(5, 5), weights=torch.rand(5))


INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "noise": lambda h: h + torch.randn_like(h),
    "squeezed": lambda h: h.unsqueeze(2).squeeze(),
    "asks for several": lambda h: h if len(h) > 3 else h[:, :0],
    "folded and back": lambda h: F.gelu(h.reshape(-1, 1)).reshape(h.shape),
}


@pytest.mark.parametrize("between", INDEPENDENT.values(), ids=INDEPENDENT)
def test_no_false_alarm_and_the_same_random_numbers(between: Callable[[Tensor], Tensor]) -> None:
    plain, x = Between(between), torch.randn(6, 4)
    model = enn.convert(plain).per_sample()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            torch.manual_seed(seed)
            result, state = model(x), torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(result, plain(x))
            assert torch.equal(state, torch.get_rng_state())


def test_random_numbers_that_differ_little_are_no_mixing() -> None:
    """No fixed numbers take their place: two forwards of one batch may be nearer than those of two halves."""
    model = enn.convert(Between(lambda h: F.rrelu(h, 0.1, 0.1 + 2e-6, training=True))).per_sample(escalate=False)
    for size in range(2, 30):
        model(torch.randn(size, 4))


SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "len": lambda h, shared: h * len(shared) + shared,
    "size": lambda h, shared: h + shared / shared.size(0),
    "shape": lambda h, shared: h + shared * shared.shape[0],
}


@pytest.mark.parametrize("escalate", [True, False])
@pytest.mark.parametrize("compute", SIZES.values(), ids=SIZES)
def test_the_size_of_what_all_samples_share(compute: Callable[[Tensor, Tensor], Tensor], escalate: bool) -> None:
    """It has a copy for each sample, so that its size is another one than in the plain model."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(4, 5), nn.Embedding(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return compute(self.first(x), self.table(torch.tensor([[0, 2]])))

    model = enn.convert(Shared()).per_sample(loss_reduction="sum", escalate=escalate)
    if escalate:
        for _ in range(3):
            right(model, torch.randn(6, 2, 4))
    else:
        with pytest.raises(enn.PerSampleError, match="its results are not those of the plain model"):
            model(torch.randn(6, 2, 4))


def test_frozen_words_beside_positions_that_are_trained() -> None:
    """No graph tells that words without gradients are samples, where positions, a copy for each, meet them."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.layer = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
            self.words.requires_grad_(False)

        def forward(self, index: Tensor) -> Tensor:
            scores = self.layer((self.words(index) + self.places(torch.arange(5))).tanh())
            return scores.view(-1, 3).log_softmax(-1).view(len(index), 5, 3)

    model = enn.convert(Words()).per_sample(loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (6, 6, 4, 1, 3):
            right(model, torch.randint(7, (size, 5)))


def test_a_forward_is_compared_at_few_calls() -> None:
    calls = StringIO()  # a list would be as if there were no comparisons

    def between(h: Tensor) -> Tensor:
        calls.write(str(len(h)))
        return h

    model = enn.convert(Between(between)).per_sample()
    for _ in range(31):
        model(torch.randn(6, 4))
    found = calls.getvalue()
    assert found.count("33") == 3  # at the calls 0, 3, 15 with halves
    assert found.count("15") == 2  # at the calls 1, 7 with a single sample and the others
    assert found.count("6") == 31 + 2 * 5 + 1  # once also for the parameters that the plain one uses
    model(torch.randn(8, 4))
    assert calls.getvalue().removeprefix(found) == "88178"  # a size that is new
    with torch.no_grad():
        model(torch.randn(9, 4))
    assert calls.getvalue().removeprefix(found) == "881789"


def test_a_compiled_step_is_compared_before_its_graph() -> None:
    model = enn.convert(Between(lambda h: h - h.mean(0))).per_sample()
    step = enn.compile(lambda x: model(x).sum().backward(), backend="eager")
    with pytest.raises(enn.PerSampleError, match=MEETS):
        step(torch.randn(6, 4))


@pytest.mark.parametrize(
    "mix", [lambda h: h / h.abs().max().clamp(min=100), lambda h: h * (1 + h.mean().abs().floor())]
)
def test_a_compiled_step_is_compared_now_and_then(mix: Callable[[Tensor], Tensor]) -> None:
    """By values, samples meet later, which the graph does as the eager step does."""
    model = enn.convert(Between(mix)).per_sample()
    step = enn.compile(lambda x: model(x).sum().backward(), backend="eager")
    for _ in range(10):
        step(1e-3 * torch.randn(6, 4))
    with pytest.raises(enn.PerSampleError, match=MEETS):  # noqa: PT012
        for _ in range(8):
            step(1e6 * torch.randn(6, 4))


def test_a_new_kind_of_a_compiled_step_is_compared() -> None:
    model = enn.convert(Between(lambda h: h - h.mean(0) if model.mixes else h))
    model.per_sample().mixes = False
    step = enn.compile(lambda x: model(x).sum().backward(), backend="eager")
    for _ in range(3):
        step(torch.randn(6, 4))
    model.mixes = True
    with pytest.raises(enn.PerSampleError, match=MEETS):
        step(torch.randn(6, 4))
    model.per_sample(compare=False)
    for _ in range(20):
        step(torch.randn(6, 4))


@dataclass
class Pair:
    first: Tensor
    second: Any = None


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Pair,
    "user dict": lambda x: UserDict(first=x),
    "dataclass in a list": lambda x: Pair(x.new_zeros(()), [Pair(x)]),
}


def content(value: Any) -> Tensor:
    if isinstance(value, UserDict):
        return value["first"]
    return content(value.second[0]) if value.second else value.first


@pytest.mark.parametrize("of_result", [True, False])
@pytest.mark.parametrize("contained", CONTAINERS.values(), ids=CONTAINERS)
def test_samples_in_objects_are_compared(contained: Callable[[Tensor], Any], of_result: bool) -> None:
    class Objects(Between):
        def forward(self, x: Any) -> Any:
            result = super().forward(x if isinstance(x, Tensor) else content(x))
            return contained(result) if of_result else result

    x = torch.randn(6, 4)
    given = x if of_result else contained(x)
    model = enn.convert(Objects(lambda h: h - h.mean(0))).per_sample(escalate=False, batch_size=6)
    with pytest.raises(enn.PerSampleError, match=MEETS):
        model(given)
    model = enn.convert(Objects(torch.tanh)).per_sample(batch_size=6)
    model(given)
    assert not of_result or type(model(given)) is type(contained(x))


def test_class_texts_in_a_dataclass_are_refused() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, pair: Pair) -> Tensor:
            return self.image(pair.first) @ self.text(pair.second).T

    model, x = enn.convert(Scores()).per_sample(), torch.randn(3, 4)
    with pytest.raises(enn.PerSampleError, match=f"{MEETS}|{IN_OTHER_ROWS}|another result than sample by sample"):
        model(Pair(x, torch.randn(3, 4)))
    model(Pair(x, enn.shared_by_all(torch.randn(3, 4)))).sum().backward()


def test_results_are_compared_beside_backward_hooks() -> None:
    heard = []
    model = enn.convert(Between(lambda h: h - h.mean(0))).per_sample(escalate=False)
    model.second.register_full_backward_hook(lambda *_: heard.append(1))
    with pytest.raises(enn.PerSampleError, match=MEETS):
        model(torch.randn(6, 4))
    model.between = torch.tanh
    model(torch.randn(6, 4)).sum().backward()
    assert len(heard) == 1


class Loss(nn.Module):
    """A model that returns its loss, and nothing else or what `also` says."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, also: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.loss, self.also = nn.Linear(4, 5), nn.Linear(4, 5), loss, also

    def forward(self, x: Tensor, y: Tensor) -> Any:
        a, b = self.first(x), self.second(y)
        return (a, self.loss(a, b)) if self.also else self.loss(a, b)


ARE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda a, b: (a - b).square().mean(),
    "sum": lambda a, b: (a - b).square().sum(),
    "mean of sums": lambda a, b: F.cross_entropy(a, b.softmax(1)) + (a * b).sum(1).mean(),
    "with a dropout": lambda a, b: (F.dropout(a) - b).square().mean(),
    "with a constant": lambda a, b: (a - b).square().mean() + 3,
}
ARE_NONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contrastive": lambda a, b: F.cross_entropy(a @ b.T, torch.arange(len(a))),
    "weighed": lambda a, b: F.cross_entropy(a, b.argmax(1), weight=torch.tensor([1.0, 9, 2, 5, 3])),
    "root": lambda a, b: (a - b).square().mean().sqrt(),
    "sum and mean": lambda a, b: (a - b).square().mean() + a.square().sum(),
}


@pytest.mark.filterwarnings("error::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("loss", ARE_LOSSES.values(), ids=ARE_LOSSES)
def test_a_mean_or_a_sum_is_a_loss(loss: Callable[[Tensor, Tensor], Tensor], also: bool) -> None:
    model = enn.convert(Loss(loss, also=also)).per_sample()
    for size in (6, 3, 2, 1, 5):
        model(torch.randn(size, 4), torch.randn(size, 4))


@pytest.mark.filterwarnings("error::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("loss", ARE_NONE.values(), ids=ARE_NONE)
def test_a_number_that_is_neither_is_warned_of(loss: Callable[[Tensor, Tensor], Tensor], also: bool) -> None:
    model = enn.convert(Loss(loss, also=also)).per_sample()
    with pytest.warns(enn.PerSampleWarning, match=r"^Loss returns a number that is neither the mean nor the sum of .*"):
        model(torch.randn(6, 4), torch.randn(6, 4))
    with torch.no_grad():
        model(torch.randn(7, 4), torch.randn(7, 4))


@pytest.mark.filterwarnings("error::expanded_nn.PerSampleWarning")
def test_a_loss_of_class_texts_is_warned_of() -> None:
    """They have as many rows as there are samples."""
    model = enn.convert(
        Loss(lambda a, b: F.cross_entropy(a @ b.T, torch.zeros(len(a), dtype=torch.int64)))
    ).per_sample()
    with pytest.warns(enn.PerSampleWarning, match="returns a number that is neither"):
        model(torch.randn(6, 4), torch.randn(6, 4))


class Graph(nn.Module):
    """Nodes with features, and what joins them."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], has_scale: bool) -> None:
        super().__init__()
        self.first, self.second, self.join = nn.Linear(4, 5), nn.Linear(5, 3), join
        self.scale = nn.Parameter(torch.ones(())) if has_scale else None

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        joined = self.second(self.join(adjacency, self.first(x)).relu())
        return joined if self.scale is None else joined * self.scale


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, h: a @ h,
    "attention": lambda a, h: a.softmax(1) @ h,
    "einsum": lambda a, h: torch.einsum("ij,jd->id", a, h),
    "linear": lambda a, h: F.linear(a, h.T),
    "a part": lambda a, h: a[:, :3] @ h[:3],
    "with themselves": lambda a, h: h + a @ h,
    "sparse": lambda a, h: torch.sparse.mm(a.to_sparse(), h),
}


@pytest.mark.parametrize("has_scale", [False, True], ids=["layers alone", "own parameter"])
@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_samples_that_a_matrix_of_pairs_joins(join: Callable[[Tensor, Tensor], Tensor], has_scale: bool) -> None:
    """Half of the samples have no matrix of their own; without these columns it has the results' shape."""
    model = enn.convert(Graph(join, has_scale)).per_sample()
    for n in (6, 7):
        with pytest.raises(enn.PerSampleError, match=f"{IN_OTHER_ROWS}|it fails sample by sample|another result than"):
            model(torch.randn(n, 4), torch.rand(n, n))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_samples_that_a_sparse_matrix_joins(layout: torch.layout) -> None:
    model = enn.convert(Graph(torch.sparse.mm, has_scale=False)).per_sample()
    adjacency = torch.rand(6, 6).to_sparse(layout=layout)
    with pytest.raises(enn.PerSampleError, match=IN_OTHER_ROWS):
        model(torch.randn(6, 4), adjacency)


class Gated(nn.Module):
    """Gates that are zero at first, where the forward finds one by what it asks."""

    def __init__(self, asks: Callable[[Any], bool]) -> None:
        super().__init__()
        self.layer, self.branch, self.asks = nn.Linear(4, 3), nn.Linear(4, 3), asks
        self.gate, self.gates = nn.Parameter(torch.zeros(3)), nn.ParameterList([torch.zeros(3)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result + (self.gate + self.gates[0]) * self.branch(x) if self.asks(self) else result


ASKS: dict[str, Callable[[Any], bool]] = {
    "a parameter": lambda m: isinstance(m.gate, nn.Parameter),
    "in a list": lambda m: isinstance(m.gates[0], nn.Parameter),
    "by a name": lambda m: m.get_parameter("gate") is m.gate,
    "a tensor": lambda m: isinstance(m.gate, Tensor),
    "a layer": lambda m: isinstance(m.branch, nn.Linear),
}
ASKS_CLASSES: dict[str, Callable[[Any], bool]] = {
    "of a parameter": lambda m: type(m.gate) is nn.Parameter,
    "of a layer": lambda m: type(m.branch) is nn.Linear,
    "from a dict": lambda m: {nn.Linear: True}.get(type(m.branch), False),
    "of itself": lambda m: type(m) is Gated,
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_what_stands_in_for_a_parameter_is_one(asks: Callable[[Any], bool], within: bool) -> None:
    gated = Gated(asks)
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), gated) if within else gated).per_sample(loss_reduction="sum")
    for _ in range(3):
        right(model, torch.randn(6, 4))
    norms = enn.per_sample_grads(model).norms(per_parameter=True)
    assert all(norm.min() > 0 for name, norm in norms.items() if "gate" in name)


@pytest.mark.parametrize("place", ["a new name", "a name that was None"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_a_forward_that_gives_a_parameter_a_second_name(within: bool, reads: bool, place: str) -> None:
    """As torch does, it becomes a parameter under that name, and no tensor of one sample is kept."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
            if place != "a new name":
                self.last = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.scale
            return self.layer(x) * (self.last if reads else self.scale)

    named = Named()
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), named) if within else named).per_sample(loss_reduction="sum")
    for _ in range(3):
        right(model, torch.randn(6, 4))
    inner = model[1] if within else model
    assert inner.last is inner.scale
    assert type(inner.scale) is nn.Parameter
    assert not {"_is_param", "_stands_for"} & vars(inner.scale).keys()


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("asks", ASKS_CLASSES.values(), ids=ASKS_CLASSES)
def test_a_forward_that_asks_for_a_class(asks: Callable[[Any], bool], within: bool, draws: bool) -> None:
    """It does not find the gates, which would stay zero; the results do not show that."""
    layers = [nn.Dropout(0.5 if draws else 0.0), Gated(asks)]
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), *layers) if within else nn.Sequential(*layers)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"its results do not depend on .*gate.*isinstance\(layer"):  # noqa: PT012
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()


def test_a_layer_that_is_left_out_by_chance() -> None:
    """It draws what it uses anew in each forward, by torch or by Python."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            if torch.rand(()) < 0.5:
                x = x + self.first(self.dropout(x))
            return x + self.second(x) if random.random() < 0.5 else x

    model = enn.convert(Dropped()).per_sample()
    for _ in range(20):
        vars(model).pop("_past_comparisons", None)  # so that each call is the first one
        model(torch.randn(6, 4))


def test_graphs_one_at_a_time() -> None:
    """What the error about nodes says: each graph is one sample, whatever its nodes, and the rows append."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            hidden = self.first(x)
            start, end = edge_index
            return self.second((hidden + torch.zeros_like(hidden).index_add(0, end, hidden[start])).relu()).mean(0)

    plain = Convolved()
    model = enn.convert(plain).per_sample(batch_size=1, loss_reduction="sum")
    graphs = [(torch.randn(n, 4), torch.randint(n, (2, 2 * n))) for n in (4, 3, 5, 4, 1)]
    for _ in range(2):
        model.zero_grad()
        for graph in graphs:
            model(*graph).sin().sum().backward()
        rows = [torch.autograd.grad(plain(*graph).sin().sum(), [*plain.parameters()]) for graph in graphs]
        names = [name for name, _ in plain.named_parameters()]
        assert_close_rows(rows_of(model), dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)))


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("reduce", [lambda p: p.mean(0), lambda p: p.sum(0)], ids=["mean", "sum"])
def test_a_statistic_with_as_many_entries_as_samples(reduce: Callable[[Tensor], Tensor], detached: bool) -> None:
    """As a mixture of experts returns it beside its result; it is no result of the samples."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.layer = nn.Linear(4, 6), nn.Linear(4, 3)

        def forward(self, x: Tensor, mixes: bool = False) -> Any:
            shares, y = self.gate(x).softmax(1), self.layer(x)
            statistic = reduce(shares.detach() if detached else shares)
            return (y - y.mean(0).detach() if mixes else y * shares[:, :1]), statistic

    model = enn.convert(Mixture()).per_sample()
    x = torch.randn(6, 4)
    for _ in range(3):
        model(x)[0].sum().backward()
    with pytest.raises(enn.PerSampleError, match=MEETS):
        enn.convert(Mixture()).per_sample()(x, mixes=True)


def test_a_layer_whose_forward_was_wrapped() -> None:
    """The wrapper has the forward of the converted class, which is none of the class before `convert`."""
    model = enn.convert(Between(lambda h: h - h.mean(0))).per_sample()
    forward = model.first.forward
    model.first.forward = lambda *args: forward(*args)
    with pytest.raises(enn.PerSampleError, match=MEETS):
        model(torch.randn(6, 4))


@pytest.mark.parametrize(
    "of_numpy", [np.random.default_rng(0).random, random.SystemRandom().random], ids=["numpy", "system"]
)
def test_chance_that_nobody_puts_back_chooses_the_layers(of_numpy: Callable[[], float]) -> None:
    """A branch that is zero at first is left out by chance, which is no other model."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.branch, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return x + self.gate(self.branch(x)) if of_numpy() < 0.5 else x

    for _ in range(10):
        enn.convert(Deep()).per_sample()(torch.randn(6, 4))


@pytest.mark.parametrize("within", [False, True])
def test_classes_are_asked_for_in_batches_of_one(within: bool) -> None:
    gated = Gated(ASKS_CLASSES["of a layer"])
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), gated) if within else gated).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"its results do not depend on .*gate"):  # noqa: PT012
        for _ in range(2):
            model(torch.randn(1, 4)).sum().backward()


@pytest.mark.parametrize("samples", [1, 6])
def test_a_forward_that_does_something_else_by_a_class(samples: int) -> None:
    """It is an error each time, as its reason stays."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if type(self.layer) is nn.Linear else 1)

    model = enn.convert(nn.Sequential(nn.Linear(4, 4), Doubling())).per_sample()
    for _ in range(3):
        with pytest.raises(
            enn.PerSampleError, match=r"its results are not those of the plain model.*isinstance\(layer"
        ):
            model(torch.randn(samples, 4))


@pytest.mark.parametrize("fails", ["by torch", "by another refusal"])
def test_a_first_call_that_fails_is_none(fails: str) -> None:
    """What is looked at once is looked at in the first forward that succeeds, as where a notebook's cell runs again."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.zeros_(self.last.weight)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return x + self.last(h - h.mean(0))

    model = enn.convert(nn.Sequential(nn.Linear(4, 4), Mixed())).per_sample()
    wrong = torch.randn(6, 7) if fails == "by torch" else torch.randn(4)
    with pytest.raises(RuntimeError):
        model(wrong)
    for _ in range(3):
        with pytest.raises(enn.PerSampleError, match="some of the samples give other results without the others"):
            model(torch.randn(6, 4))


class Recomputed(torch.autograd.Function):
    """A checkpoint written by hand, whose backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.part, ctx.kept = part, [x.detach()]
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.kept.pop().requires_grad_()
            torch.autograd.backward(ctx.part(x), grad)
        return x.grad, None


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(Recomputed.apply(self.first(x), self.second).tanh())


def test_no_backward_of_others_runs_in_a_comparison() -> None:
    """It would leave gradients and rows, and use up what it has kept."""
    module, x = ByHand(), torch.randn(6, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(5):
        model.zero_grad()
        output = model(x)
        assert all(parameter.grad is None and parameter.grad_sample is None for parameter in model.parameters())
        output.sin().sum().backward()
        for i in range(6):
            module.zero_grad()
            module(x[i : i + 1]).sin().sum().backward()
            for parameter, alone in zip(model.parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad_sample[i], alone.grad)


def test_what_hooks_on_tensors_count_in_a_comparison_is_undone() -> None:
    class Counts(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(self.note)
            return self.third(h)

        def note(self, grad: Tensor) -> None:
            self.count += 1
            self.seen.append(grad.shape)

    model = enn.convert(Counts()).per_sample()
    train(model, 5)
    assert model.count == len(model.seen) == 5


class Tracker:
    """An object that is no module."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.calls = 0


LOSSES: list[Tensor] = []
COUNTS: dict[str, int] = {"calls": 0}
NAMED: dict[str, object] = {"call": object()}
CALLS = 0


class Tracked(nn.Module):
    """Keeps a part of its loss, and counts its calls, in an object and in global variables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tracker = nn.Linear(4, 5), nn.Linear(5, 3), Tracker()

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        h = self.first(x).tanh()
        for losses in (LOSSES, self.tracker.losses):
            losses.append(h.square().sum())
        CALLS += 1
        COUNTS["calls"] += 1
        (name,) = NAMED
        NAMED[name + "'"] = NAMED.pop(name)
        self.tracker.calls += 1
        return self.second(h)


def tracked(model: Any, call: Call, first: int = 0) -> Tensor:
    LOSSES.clear()
    model.tracker.losses.clear()
    return total_loss(model, call, first) + sum(LOSSES) + sum(model.tracker.losses)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Tracker, id="class"),
        pytest.param(lambda: Namespace(losses=[], calls=0), id="argparse"),
        pytest.param(lambda: SimpleNamespace(losses=[], calls=0), id="types"),
    ],
)
def test_what_a_comparison_leaves_in_objects_and_globals_is_undone(make: Callable[[], Any]) -> None:
    module, x = Tracked(), torch.randn(6, 4)
    module.tracker = make()
    expected = loop(module, Call((x,)), 6, objective=tracked)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    calls_before, (name,) = (CALLS, COUNTS["calls"]), NAMED
    for step in range(9):
        model.zero_grad()
        tracked(model, Call((x,))).backward()
        assert_close_rows(rows_of(model), expected)
        calls = CALLS - calls_before[0], COUNTS["calls"] - calls_before[1], model.tracker.calls
        assert calls == (step + 1,) * 3
        assert [*NAMED] == [name + "'" * (step + 1)]


class Metric(nn.Module):
    """Counts in a buffer and in an attribute; the model calls it, and does not hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.total = torch.zeros(())

    def forward(self, h: Tensor) -> None:
        self.calls += 1
        self.total = self.total + 1


class CountsInClass:
    of_class = torch.zeros(())


def count(h: Tensor, by_default: dict[str, Tensor] = {"calls": torch.zeros(())}) -> Tensor:  # noqa: B006, B008
    by_default["calls"] += 1
    return by_default["calls"]


COUNTED, IN_LIST, IN_OBJECT = torch.zeros(()), [torch.zeros(())], SimpleNamespace(calls=torch.zeros(()))
METRIC, OF_THREAD = Metric(), threading.local()


def of_metric(h: Tensor) -> Tensor:
    METRIC(h)
    assert METRIC.calls == METRIC.total
    return METRIC.calls


def of_thread(h: Tensor) -> Tensor:
    OF_THREAD.calls = getattr(OF_THREAD, "calls", torch.zeros(())) + 1
    return OF_THREAD.calls


def of_function(h: Tensor) -> Tensor:
    of_function.calls = getattr(of_function, "calls", torch.zeros(())) + 1
    return of_function.calls


COUNTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "global": lambda h: COUNTED.add_(1),
    "list": lambda h: IN_LIST[0].add_(1),
    "object": lambda h: IN_OBJECT.calls.add_(1),
    "class": lambda h: CountsInClass.of_class.add_(1),
    "module": of_metric,
    "default": count,
    "thread": of_thread,
    "function": of_function,
}


class Warmed(nn.Module):
    """Its output grows with the number of calls."""

    def __init__(self, count: Callable[[Tensor], Tensor], folds: bool) -> None:
        super().__init__()
        self.count, self.folds = count, folds
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3 if folds else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * (self.count(x) / 20)
        return self.second(h.reshape(-1, 3)).reshape(len(x), 6) if self.folds else self.second(h)


@pytest.mark.filterwarnings("ignore:.*runs sample by sample from now on")
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("count", COUNTERS.values(), ids=COUNTERS)
def test_a_tensor_that_counts_outside_of_modules_counts_once(count: Any, folds: bool) -> None:
    start, x = int(count(torch.zeros(()))), torch.randn(5, 4)
    model = enn.convert(Warmed(count, folds)).per_sample(loss_reduction="sum")
    for step in range(1, 6):
        model.zero_grad()
        model(x).square().sum().backward()
        h = F.linear(x, model.first.weight, model.first.bias) * ((start + step) / 20)
        if not folds:
            out = F.linear(h, model.second.weight, model.second.bias)
            torch.testing.assert_close(model.second.bias.grad_sample + 0, 2 * out)
    assert int(count(torch.zeros(()))) == start + 6


@pytest.mark.parametrize("count", COUNTERS.values(), ids=COUNTERS)
def test_check_leaves_a_tensor_that_counts_as_it_is(count: Any) -> None:
    start = int(count(torch.zeros(())))
    assert enn.check(Warmed(count, folds=False), torch.randn(5, 4)).ok
    assert int(count(torch.zeros(()))) == start + 1


class Losses:
    """Keeps losses in the class, or in the object."""

    of_class: ClassVar[list[Tensor]] = []
    calls = 0

    def __init__(self) -> None:
        self.held: dict[str, list[Tensor]] = {"own": []}

    @classmethod
    def add_to_class(cls, loss: Tensor) -> None:
        cls.of_class.append(loss)
        cls.calls += 1

    def add(self, loss: Tensor) -> None:
        self.held["own"].append(loss)


def add_to_list(loss: Tensor) -> None:
    LOSSES.append(loss)


def add_in_two_steps(loss: Tensor) -> None:
    add_to_list(loss)


OF_DECORATED: list[Tensor] = []
OF_PARTIAL: list[Tensor] = []
OF_CACHED: list[Tensor] = []
OF_PROPERTY: list[Tensor] = []


@torch.no_grad()
def add_undifferentiated(loss: Tensor) -> None:
    OF_DECORATED.append(loss)


def add_to(losses: list[Tensor], loss: Tensor) -> None:
    losses.append(loss)


ADD = partial(add_to, OF_PARTIAL)


@lru_cache(maxsize=1)
def add_anew(loss: Tensor) -> None:
    OF_CACHED.append(loss)


def in_a_variable() -> tuple[list[Tensor], Callable[[Tensor], None]]:
    losses: list[Tensor] = []
    return losses, lambda loss: losses.append(loss)


OF_OBJECT, FILE = Losses(), ModuleType("kept_by_a_test")
exec("LOSSES = []\ndef add(loss):\n    LOSSES.append(loss)", vars(FILE))
FILE.itself, FILE.other = FILE, ModuleType("refers_to_it")  # type: ignore[attr-defined]
FILE.other.FILE, FILE.other.other = FILE, FILE.other  # type: ignore[attr-defined]
OF_VARIABLE, add_to_variable = in_a_variable()


class KeepsBy(nn.Module):
    """Keeps a part of its loss by a function; with a parameter of its own or without."""

    scale: Tensor

    def __init__(self, way: str, has_parameter: bool) -> None:
        super().__init__()
        self.first, self.second, self.way, self.functions = nn.Linear(4, 5), nn.Linear(5, 3), way, [add_in_two_steps]
        scale = torch.full((5,), 0.7)
        if has_parameter:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def keep(self, loss: Tensor) -> None:
        LOSSES.append(loss)

    @cached_property
    def kept(self) -> None:
        OF_PROPERTY.append(self.loss)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * self.scale
        loss = h.square().sum(1)
        if self.way == "function":
            add_in_two_steps(loss)
        elif self.way == "method":
            self.keep(loss)
        elif self.way == "class":
            Losses.add_to_class(loss)
        elif self.way == "object":
            OF_OBJECT.add(loss)
        elif self.way == "file":
            FILE.itself.other.FILE.LOSSES.append(loss)
        elif self.way == "decorated":
            add_undifferentiated(loss)
        elif self.way == "partial":
            ADD(loss)
        elif self.way == "cached":
            add_anew(loss)
        elif self.way == "cached_property":
            self.loss = loss
            assert self.kept is None
            del self.kept, self.loss
        elif self.way == "function_of_a_file":
            FILE.add(loss)
        elif self.way == "variable":
            add_to_variable(loss)
        else:
            for function in self.functions:
                function(loss)
        return self.second(h)


WAYS = {
    "function": LOSSES,
    "method": LOSSES,
    "class": Losses.of_class,
    "object": OF_OBJECT.held["own"],
    "file": FILE.LOSSES,
    "decorated": OF_DECORATED,
    "partial": OF_PARTIAL,
    "cached": OF_CACHED,
    "cached_property": OF_PROPERTY,
    "function_of_a_file": FILE.LOSSES,
    "variable": OF_VARIABLE,
    "functions_of_the_module": LOSSES,
}


@pytest.mark.parametrize("has_parameter", [False, True], ids=["", "own_parameter"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_comparison_leaves_by_functions_is_undone(way: str, has_parameter: bool) -> None:
    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        WAYS[way].clear()
        return total_loss(model, call, first) + torch.stack([loss.sum() for loss in WAYS[way]]).sum()

    module, x = KeepsBy(way, has_parameter), torch.randn(6, 4)
    expected = loop(module, Call((x,)), 6, objective=objective)
    model, calls = enn.convert(module).per_sample(loss_reduction="sum"), Losses.calls
    for step in range(9):
        model.zero_grad()
        objective(model, Call((x,))).backward()
        assert_close_rows(rows_of(model), expected)
        assert len(WAYS[way]) == 1
        assert way != "class" or Losses.calls == calls + step + 1


class Link:
    """One of a chain, whose method refers to itself by a global name."""

    def __init__(self, following: Any) -> None:
        self.following, self.seen = following, Counter[str]()

    def count(self, name: str) -> None:
        if name:
            self.seen.update([name])
            COUNT("")


CHAIN = Link(None)
for _ in range(2000):
    CHAIN = Link(CHAIN)
COUNT, RUNS = CHAIN.count, StringIO()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        COUNT("calls")
        RUNS.write(str(len(x)))
        return self.layer(x)


def test_a_long_chain_of_objects_that_a_forward_counts_in() -> None:
    """It is compared, and counts once a call."""
    model = enn.convert(Counts()).per_sample()
    for step in range(4):
        model(torch.randn(6, 4)).sum().backward()
        assert CHAIN.seen["calls"] == step + 1
    assert RUNS.getvalue().count("33") == 2  # halves at the calls 0 and 3


def test_samples_that_are_moved_between_two_calls_where_no_operation_tells() -> None:
    """The rows are of another call's samples, so that no module in this one is to blame: it does not go on."""
    model = enn.convert(nn.ModuleDict({"first": nn.Linear(4, 4), "second": Between(torch.tanh)})).per_sample()
    h = model["first"](torch.randn(6, 4))
    moved = torch.stack([h[i].tanh() for i in reversed(range(6))])
    with pytest.raises(enn.PerSampleError, match=f"gradients of samples by first.weight {IN_OTHER_ROWS}"):
        model["second"](moved)


UPDATES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "in place": lambda own, other: own.mul_(0.5).add_(other, alpha=0.5),
    "in place by data": lambda own, other: own.data.mul_(0.5).add_(other, alpha=0.5),
    "by copy": lambda own, other: own.data.copy_(0.5 * own + 0.5 * other),
    "by data": lambda own, other: setattr(own, "data", 0.5 * own.data + 0.5 * other),
    "a part": lambda own, other: own[:1].copy_(0.5 * own[:1] + 0.5 * other[:1]),
    "foreach": lambda own, other: torch._foreach_lerp_([own], [other.detach()], 0.5),
}


class Following(nn.Module):
    """The weights of a second network follow the first one's, at each forward, as in momentum contrast."""

    def __init__(self, update: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.leading, self.following = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.following.parameters(), self.leading.parameters(), strict=True):
                self.update(own, other)
            target = self.following(x)
        return (self.leading(x) - target).square()


@pytest.mark.parametrize("way", UPDATES)
def test_weights_that_follow_others_do_so_once_a_call(way: str) -> None:
    module = Following(UPDATES[way])
    model = enn.convert(module).per_sample()
    for _ in range(5):
        x = torch.randn(6, 4)
        expected, result = module(x), model(x)
        torch.testing.assert_close(result, expected)
        result.sum(1).mean().backward()
        torch.testing.assert_close(model.following.weight, module.following.weight)


class Held:
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher


HIDES: dict[str, tuple[Callable[[Any, nn.Module], object], Callable[[Any], Any]]] = {
    "list": (lambda own, teacher: setattr(own, "held", [teacher]), lambda own: own.held[0]),
    "dict in a tuple": (lambda own, teacher: setattr(own, "held", ({"t": teacher},)), lambda own: own.held[0]["t"]),
    "object": (lambda own, teacher: setattr(own, "held", Held(teacher)), lambda own: own.held.teacher),
    "attribute": (lambda own, teacher: object.__setattr__(own, "held", teacher), lambda own: own.held),
}


class Taught(nn.Module):
    """A teacher that `parameters()` does not find, whose weights and buffers the forward changes."""

    def __init__(self, hide: Callable[[Any, nn.Module], object], get: Callable[[Any], Any], *, is_used: bool) -> None:
        super().__init__()
        self.layer, self.get, self.is_used = nn.Linear(4, 4), get, is_used
        hide(self, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()).requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        teacher = self.get(self)
        with torch.no_grad():
            teacher[0].weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
            teacher[1].running_mean.add_(0.1)
        return self.layer(x) - teacher(x) if self.is_used else self.layer(x)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", HIDES)
def test_a_teacher_that_is_hidden_follows_once_a_call(way: str, is_used: bool) -> None:
    module = Taught(*HIDES[way], is_used=is_used)
    model = enn.convert(module).per_sample()
    for _ in range(5):
        x = torch.randn(6, 4)
        torch.testing.assert_close(model(x), module(x))
        torch.testing.assert_close(model.get(model).state_dict(), module.get(module).state_dict())


class Greedy(nn.Module):
    """An auxiliary loss that has its backward within the forward."""

    def __init__(self, leaf: Tensor | None) -> None:
        super().__init__()
        self.layer, self.aux, self.leaf = nn.Linear(4, 4), nn.Linear(4, 1), leaf

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        own = self.aux(h.detach()) if self.leaf is None else h.detach() * self.leaf
        own.square().mean().backward()
        return h


@pytest.mark.parametrize("has_leaf", [False, True])
def test_a_backward_within_the_forward(has_leaf: bool) -> None:
    leaf, x = torch.randn(4, requires_grad=True) if has_leaf else None, torch.randn(5, 4)
    plain = Greedy(leaf)
    with pytest.raises(
        enn.PerSampleError, match=r"its forward runs a backward, which has added to a \.grad; now and then"
    ):
        enn.convert(plain).per_sample()(x)
    model = enn.convert(Greedy(None)).per_sample(compare=False)
    expected = copy.deepcopy(enn.revert(model))
    for _ in range(3):
        for module in (expected, model):
            module.zero_grad()
            module(x).square().mean().backward()
        torch.testing.assert_close(model.aux.weight.grad_sample.mean(0), expected.aux.weight.grad)


class Bags(nn.Module):
    def __init__(self, *, has_features: bool) -> None:
        super().__init__()
        self.bag, self.out, self.has_features = nn.EmbeddingBag(20, 4), nn.Linear(4 + 2 * has_features, 1), has_features

    def forward(self, *args: Tensor) -> Tensor:
        bags = self.bag(*args[-2:])
        return self.out(torch.cat([args[0], bags], 1) if self.has_features else bags)


@pytest.mark.parametrize("samples", [2, 3, 4, 6])
@pytest.mark.parametrize("has_features", [True, False])
def test_bags_by_their_offsets(samples: int, has_features: bool) -> None:
    """They are not halved as rows are, so samples are not compared."""
    module, offsets = Bags(has_features=has_features), 2 * torch.arange(samples)
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_size=samples)
    for _ in range(9):
        features, words = torch.randn(samples, 2), torch.randint(20, (2 * samples,))
        call = Call((features, words, offsets) if has_features else (words, offsets))

        def alone(call: Call, i: int) -> Call:
            own = call.args[-2][2 * i : 2 * i + 2], torch.zeros(1, dtype=torch.int64)
            return Call((call.args[0][i : i + 1], *own) if len(call.args) == 3 else own)

        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, samples, take=alone))


class Recurrent(nn.Module):
    """Goes on with the state of the last call, if that had as many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None or self.state.shape[1] != len(x):
            self.state = torch.zeros(1, len(x), 4)
        outputs, state = self.rnn(x, self.state)
        self.state = state.detach()
        return self.out(outputs[:, -1])


class Cached(nn.Module):
    """Step by step, with what it has made of the steps before in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 4), 0
        self.register_buffer("cache", torch.zeros(8, 10, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[: len(x), self.steps] = self.layer(x).detach()
        self.steps += 1
        return self.layer(x) + self.cache[: len(x), : self.steps].mean(1)


@pytest.mark.parametrize(("kind", "shape"), [(Recurrent, (6, 3, 4)), (Cached, (6, 4))])
def test_a_state_with_a_row_for_each_sample(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    """Half of the samples have another one, which says nothing of the samples."""
    module = kind()
    model = enn.convert(module).per_sample()
    for _ in range(9):
        x = torch.randn(shape)
        result = model(x)
        torch.testing.assert_close(result, module(x))
        result.sum(1).mean().backward()
        assert len(model.layer.weight.grad_sample if kind is Cached else model.out.weight.grad_sample) == len(x)
        model.zero_grad()


def test_a_mixing_forward_with_a_state_is_refused_at_the_first_call() -> None:
    class Mixing(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.raises(enn.PerSampleError, match=MEETS):
        enn.convert(Mixing()).per_sample()(torch.randn(6, 3, 4))


@pytest.mark.parametrize("before", [False, True])
def test_a_forward_hook_that_mixes(before: bool) -> None:
    """And one that changes each sample by itself, which is right."""
    model = enn.convert(Between(torch.tanh))
    layer = model.second
    for change, mixes in ((lambda x: x.sin(), False), (lambda x: x - x.mean(0), True)):
        if before:
            handle = layer.register_forward_pre_hook(lambda module, args, change=change: (change(args[0]),))
        else:
            handle = layer.register_forward_hook(lambda module, args, output, change=change: change(output))
        model = enn.convert(enn.revert(model)).per_sample(loss_reduction="sum", escalate=False)  # as at a first call
        if mixes:
            with pytest.raises(enn.PerSampleError, match=MEETS):
                model(torch.randn(6, 4))
        else:
            right(model, torch.randn(6, 4))
        handle.remove()
        layer = model.second


def test_what_a_forward_hook_keeps_in_a_comparison_is_undone() -> None:
    heard: list[Tensor] = []
    model = enn.convert(Between(torch.tanh)).per_sample()
    model.second.register_forward_hook(lambda module, args, output: heard.append(output))
    for count in (1, 2, 3):
        train(model, 1)
        assert len(heard) == count


def test_a_hook_that_removes_itself() -> None:
    """As one that solves for the gradient of a fixed point, by the tensor that it is a hook of."""

    class FixedPoint(nn.Module):
        hook: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.first, self.third = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).detach().requires_grad_()
            h = torch.tanh(y) + self.first(x)

            def solve(grad: Tensor) -> Tensor:
                self.hook.remove()  # it would call itself without end
                return torch.autograd.grad(h, y, grad, retain_graph=True)[0] + grad

            if h.requires_grad:
                self.hook = h.register_hook(solve)
            return self.third(h)

    model = enn.convert(FixedPoint()).per_sample(loss_reduction="sum")
    for _ in range(3):
        right(model, torch.randn(5, 4))
