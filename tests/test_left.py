"""What a forward of the general rule leaves in attributes of its modules: what the plain one leaves."""

import copy
from array import array
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from oracle import Call, assert_all_close, assert_close, assert_close_rows, loop, rows_of, sample_losses

B, T, D = 3, 5, 4
Leave = Callable[[Any, Tensor], Any]


class Attention(nn.Module):
    """Keeps something of what it computes."""

    def __init__(self, leave: Leave) -> None:
        super().__init__()
        self.parts, self.leave, self.calls = nn.Linear(D, 3 * D), leave, 0
        self.register_buffer("buffer", torch.zeros(1))
        self.register_buffer("count", torch.zeros(2))
        self.state = {"left": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        q, k, v = self.parts(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        self.calls += 1
        self.left = self.leave(self, weights)
        return weights @ v


def by_the_batch(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), 1, D), x], 1)
    return m.linear(x) + m.attention(x)


def folded(m: Any, x: Tensor) -> Tensor:
    rows = m.linear(x.flatten(0, 1)) * m.token[0]
    return m.attention(rows.unflatten(0, x.shape[:2]))


def under_vmap(m: Any, x: Tensor) -> Tensor:
    return m.attention(x * torch.logcumsumexp(m.token[0, 0], 0)) + m.linear(x)


def in_a_loop(m: Any, x: Tensor) -> Tensor:
    return m.attention(m.linear(x) * m.token) if float(x.detach().max()) > -100 else x


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], leave: Leave) -> None:
        super().__init__()
        self.token, self.linear, self.attention = nn.Parameter(torch.rand(1, 1, D)), nn.Linear(D, D), Attention(leave)
        self.called = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x)


FORWARDS = [by_the_batch, folded, under_vmap, in_a_loop]
OF_EACH_SAMPLE: dict[str, tuple[Leave, Callable[[Any], Tensor]]] = {
    "a tensor": (lambda m, weights: weights, lambda left: left),
    "without a gradient": (lambda m, weights: weights.detach(), lambda left: left),
    "a list": (lambda m, weights: [weights, {"most": weights.amax(-1)}], lambda left: left[0][:, 0] * left[1]["most"]),
    "samples second": (lambda m, weights: weights.transpose(0, 1), lambda left: left.transpose(0, 1)),
    "a number of each": (lambda m, weights: weights.square().mean((1, 2)), lambda left: left[:, None]),
}
OF_NO_SAMPLE: dict[str, Leave] = {
    "mixed": lambda m, weights: weights.sum(0),
    "of a parameter": lambda m, weights: m.parts.weight.exp(),
    "a number of a parameter": lambda m, weights: m.parts.bias.exp().sum(),
}


def assert_as_plain(model: Any, module: Any, call: Call, used: Callable[[Any], Tensor] | None = None) -> None:
    """Rows, and what is left, where the loss may use that."""
    samples, before = len(call.args[0]), module.attention.calls

    def objective(module: Any, call: Call, first: int = 0) -> Tensor:
        y = call.on(module)
        loss = sample_losses(y, first).sum()
        return loss if used is None else loss + sample_losses(used(module.attention.left), first).sum()

    expected = loop(module, call, samples, objective=objective)
    model.zero_grad()
    objective(model, call).backward()
    assert_close_rows(rows_of(model), expected)
    plain = copy.deepcopy(module)
    call.on(plain)
    parts = model.attention, plain.attention
    left, of_plain = (tree_leaves([part.left, part.buffer, part.state, part.count]) for part in parts)
    assert_all_close(left, of_plain)
    assert [x.requires_grad for x in left] == [x.requires_grad for x in of_plain]
    assert model.attention.calls == before + 1
    module.attention.calls += 1
    module.attention.buffer, module.attention.count = plain.attention.buffer.detach(), plain.attention.count
    module.attention.state = {key: x.detach() for key, x in plain.attention.state.items()}


def assert_rows_of_the_loop(model: Any, module: Any, call: Call) -> None:
    expected = loop(module, call, len(call.args[0]))
    model.zero_grad()
    sample_losses(call.on(model)).sum().backward()
    assert_close_rows(rows_of(model), expected)


def in_a_buffer(m: Any, weights: Tensor) -> Tensor:
    m.buffer = weights.amax(-1)
    return m.buffer


def in_a_dict(m: Any, weights: Tensor) -> Tensor:
    m.state["left"] = weights
    m.state["new"] = weights[:, 0]
    return m.state["left"] * m.state["new"][:, None]


def in_what_was_there(m: Any, weights: Tensor) -> Tensor:
    """A running mean, which is of all samples."""
    m.buffer = 0.9 * m.buffer + weights.detach().mean()
    m.state["left"] = m.state["left"] + m.buffer
    return weights


def in_a_counter(m: Any, weights: Tensor) -> Tensor:
    """As of the tokens that each expert has had."""
    with torch.no_grad():
        m.count.add_(torch.stack([(weights > 0.2).sum(), (weights <= 0.2).sum()]))
        m.count[0] += 1
    return weights


WRITTEN = in_a_buffer, in_a_dict, in_what_was_there, in_a_counter
OF_EACH_SAMPLE |= {leave.__name__: (leave, lambda left: left) for leave in WRITTEN}


def calls() -> list[Call]:
    return [Call((torch.randn(samples, T, D),)) for samples in (B, B, B + 1, 1, B)]


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("leave", "used"), OF_EACH_SAMPLE.values(), ids=OF_EACH_SAMPLE)
def test_what_each_sample_has_counts_as_returned(forward: Any, leave: Leave, used: Callable[[Any], Tensor]) -> None:
    """A loss may use it."""
    module = Model(forward, leave)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        assert_as_plain(model, module, call, used)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("leave", OF_NO_SAMPLE.values(), ids=OF_NO_SAMPLE)
def test_what_no_sample_has(forward: Any, leave: Leave) -> None:
    """It is there to be looked at, and a loss that uses it is an error."""
    module = Model(forward, leave)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        assert_as_plain(model, module, call)
        loss = call.on(model).sum() + model.attention.left.detach().sum()
        loss.backward()
        with pytest.raises(enn.PerSampleError, match=r"attention \(Attention\): a loss uses .* attribute 'left'"):
            (call.on(model).sum() + model.attention.left.sum()).backward()
        module.attention.calls += 2


class Around(nn.Module):
    """Has no parameters of its own, and its forward may read what the part has left."""

    def __init__(self, part: nn.Module, after: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.last, self.after = part, nn.Linear(D, 2), after

    @property
    def attention(self) -> Any:
        return self.part.attention

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self, self.part(x)))


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("leave", [OF_EACH_SAMPLE["a tensor"][0], OF_NO_SAMPLE["of a parameter"]], ids=["each", "none"])
def test_what_a_part_leaves_for_the_forward_around_it(forward: Any, leave: Leave) -> None:
    module = Around(Model(forward, leave), lambda m, y: y * m.attention.left.sum(-1).mean(-1, keepdim=True)[..., None])
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        assert_as_plain(model, module, call)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("forward", FORWARDS)
def test_what_is_left_later(forward: Any) -> None:
    """A switch may turn it on and off."""
    module = Model(forward, lambda m, weights: weights if m.keeps else None)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call, keeps in zip(calls() * 2, [False, True, False, True, True, False, True, False, False, True], strict=True):
        module.attention.keeps = model.attention.keeps = keeps
        if keeps:
            assert_as_plain(model, module, call, lambda left: left)
        else:
            model(*call.args)
            assert model.attention.left is None
            module.attention.calls += 1


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
def test_a_weight_that_is_set_by_the_forward() -> None:
    """As by a dropout of weights (AWD-LSTM)."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.raw = nn.LSTM(D, D, batch_first=True), nn.Parameter(torch.rand(4 * D, D))
            del self.lstm._parameters["weight_hh_l0"]

        def forward(self, x: Tensor) -> Any:
            self.lstm.weight_hh_l0 = self.raw * 0.5
            return self.lstm(x)[0]

    module = Dropped()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        assert_rows_of_the_loop(model, module, call)
        assert_close(model.lstm.weight_hh_l0, module.raw.detach() * 0.5)


def in_place(m: Any, h: Tensor) -> None:
    m.state += len(h)


def without_grad(m: Any, h: Tensor) -> None:
    with torch.no_grad():
        m.state.add_(h.numel())


def anew(m: Any, h: Tensor) -> None:
    m.state = m.state + len(h)


def as_a_number(m: Any, h: Tensor) -> None:
    m.number += len(h)


def in_a_list(m: Any, h: Tensor) -> None:
    m.lengths.append(len(h))


class CountingSamples(nn.Module):
    """Counts samples by the size of its batch."""

    def __init__(self, count: Callable[[Any, Tensor], None], way: str = "") -> None:
        super().__init__()
        self.linear, self.scale, self.count = nn.Linear(D, D), nn.Parameter(torch.rand(D)), count
        self.register_buffer("state", torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()))
        if way == "by its layers":
            self.scale.requires_grad_(False)
        self.number, self.lengths, self.way = 0, [], way
        self.array, self.counter = np.zeros(()), array("i", [0])

    def part(self, h: Tensor) -> Tensor:
        self.count(self, h)
        if self.way == "in a loop":
            return (h * self.scale).tanh()
        self.steps += 1  # which the graph holds, and which is the same for a sample alone
        return (h * self.scale).tanh() * self.steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.way == "in a loop" and float(h.detach().max()) < -100:
            return x
        return checkpoint(self.part, h, use_reentrant=False) if self.way == "in a checkpoint" else self.part(h)

    def counted(self) -> float:
        return float(self.state) + self.number + sum(self.lengths) + float(self.array) + self.counter[0]


def in_an_array(m: Any, h: Tensor) -> None:
    m.array += len(h)


def in_an_array_of_python(m: Any, h: Tensor) -> None:
    m.counter[0] += len(h)


COUNTS = [in_place, without_grad, anew, as_a_number, in_a_list, in_an_array, in_an_array_of_python]


@pytest.mark.parametrize("count", COUNTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["on the whole batch", "under vmap", "in a loop", "in a checkpoint", "by its layers"])
@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
def test_counters_of_samples(count: Any, way: str) -> None:
    """A sample alone would count one; what a checkpoint computes again is not counted again."""
    plain = CountingSamples(count, "in a loop" if way == "in a loop" else "")
    module = CountingSamples(count, way)
    module.load_state_dict(plain.state_dict())
    plain.scale.requires_grad_(module.scale.requires_grad)
    if way == "in a loop" and count is in_a_list:
        with pytest.raises(enn.PerSampleError, match="its forward keeps tensors in an attribute, a buffer"):
            enn.convert(module).per_sample()(*calls()[0].args)
        return
    if way == "under vmap":
        parametrize.register_parametrization(module, "scale", nn.Softplus())
        parametrize.register_parametrization(plain, "scale", nn.Softplus())
    model: Any = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        steps = float(plain.steps)

        def objective(module: Any, call: Call, first: int = 0, steps: float = steps) -> Tensor:
            module.steps.fill_(steps)
            return sample_losses(call.on(module), first).sum()

        expected = loop(copy.deepcopy(plain), call, len(call.args[0]), objective=objective)
        model.zero_grad()
        sample_losses(call.on(model)).sum().backward()
        assert_close_rows(rows_of(model), expected)
        call.on(plain)
        assert (model.counted(), float(model.steps)) == (plain.counted(), float(plain.steps))


class Keep:
    """A hook that keeps results in a dict, which others may have as well."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        self.kept = kept

    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.kept["result"] = result


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("forward", FORWARDS)
def test_what_a_hook_keeps_for_the_forward(forward: Any) -> None:
    def with_kept(m: Any, x: Tensor) -> Tensor:
        y = forward(m, x)
        return y * m.kept["result"].reshape(len(x), -1).mean(1)[:, None, None]

    module: Any = Model(with_kept, OF_EACH_SAMPLE["without a gradient"][0])
    module.kept = {}
    module.linear.register_forward_hook(Keep(module.kept))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls():
        assert_rows_of_the_loop(model, module, call)


class Items(MutableMapping[str, Any]):
    """A copy of it shares the items."""

    def __init__(self, **items: Any) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


COUNTED = Items(calls=0)


class Counting(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.linear, self.counted = nn.Linear(D, 2), Items(calls=0)
        self.scale = nn.Parameter(torch.rand(2)) if own else None

    def forward(self, x: Tensor, more: Items | None = None) -> Tensor:
        for counted in (COUNTED, self.counted):
            counted["calls"] += 1
        y = self.linear(x if more is None else x + more["shift"])
        return y if self.scale is None else y * self.scale


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_what_is_in_a_mapping_of_the_users_class(own: bool, given: bool) -> None:
    COUNTED["calls"] = 0
    model = enn.convert(Counting(own=own)).per_sample()
    for _ in range(3):
        shift = torch.rand(D)
        more = Items(shift=shift) if given else None
        model(torch.rand(B, D), more).square().sum(1).mean().backward()
        assert more is None or more["shift"] is shift
    assert (COUNTED["calls"], model.counted["calls"]) == (3, 3)


class Tally:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls: list[int] = []


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], list[int]]]] = {  # what a module holds, and the list in it
    "list": (list, lambda held: held),
    "list in a dict": (lambda: {"calls": []}, lambda held: held["calls"]),
    "object": (Tally, lambda held: held.calls),
    "object in a list": (lambda: [Tally()], lambda held: held[0].calls),
    "object in a tuple": (lambda: ({"a": Tally()}, 1), lambda held: held[0]["a"].calls),
}


@pytest.mark.parametrize(("make", "calls"), HELD.values(), ids=HELD)
def test_a_forward_in_vain_leaves_nothing_in_what_a_module_holds(make: Any, calls: Any) -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.held = nn.Parameter(torch.rand(D)), make()

        def forward(self, x: Tensor, way: int) -> Tensor:
            calls(self.held).append(way)
            if way < 2:
                return x * self.scale if way else (x * self.scale).sin()
            return x * self.scale + torch.einsum("bi,i->bi", x, self.scale) if way == 2 else x + self.scale.cumprod(0)

    model, ways = enn.convert(Ways()).per_sample(), [0, 0, 1, 0, 3, 1, 2, 0, 2, 3, 3, 1]
    for way in ways:
        model(torch.rand(B, D), way).square().sum(1).mean().backward()
    assert calls(model.held) == ways


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize(("make", "calls"), HELD.values(), ids=HELD)
def test_a_forward_that_starts_over_leaves_what_one_leaves(make: Any, calls: Any) -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.held = nn.Linear(D, 2), make()

        def forward(self, x: Tensor) -> Tensor:
            calls(self.held).append(0)
            return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model = enn.convert(Folds()).per_sample()
    for _ in range(3):
        model(torch.rand(B, T, D)).square().sum((1, 2)).mean().backward()
    assert len(calls(model.held)) == 3
