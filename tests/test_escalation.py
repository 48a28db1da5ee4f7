"""What a layer refuses, the module around it does sample by sample: which one, with the right rows, and no traces."""

import linecache
import pickle
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import expanded_nn as enn
from expanded_nn.core import cost
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    grads_of,
    loop,
    notes_on,
    rows_of,
    sample_losses,
    total_loss,
)

B, T, D = 3, 5, 4


class Does(nn.Module):
    """Layers and lists, and a forward that the test writes."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.does = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


class Around(nn.Module):
    """A model around the part that a case is about."""

    def __init__(self, part: nn.Module, features: int = D) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(D, D), part, nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return self.after(self.part(self.before(x)))


@dataclass(frozen=True)
class Case:
    """A model that escalates.

    Attributes:
        makes: The model, plain.
        learned: The modules that go sample by sample then.
        loops: Whether one after the other.
        shape: Of the input.
    """

    makes: Callable[[], nn.Module]
    learned: set[str] = field(default_factory=lambda: {"part"})
    loops: bool = False
    shape: tuple[int, ...] = (B, T, D)

    def module(self) -> nn.Module:
        torch.manual_seed(5)
        return self.makes()

    def call(self, seed: int = 1, samples: int = B) -> Call:
        generator = torch.Generator().manual_seed(seed)
        return Call((torch.randn(samples, *self.shape[1:], generator=generator),))


def folded(**layers: nn.Module) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.flatten(0, 1)
        for layer in m.children():
            y = layer(y)
        return y.unflatten(0, x.shape[:2])

    return Does(forward, **layers)


def folded_outside() -> nn.Module:
    """The part that is called with folded rows is a module itself, and so is one in it."""
    inner = Does(lambda m, x: m.layer(x.tanh()), layer=Does(lambda m, x: m.linear(x), linear=nn.Linear(D, D)))
    return Around(Does(lambda m, x: m.inner(x.reshape(-1, D)).reshape(x.shape), inner=inner))


def windows() -> nn.Module:
    """Windows of a picture, and a mask of as many rows as there are windows, which is B by chance."""

    def forward(m: Any, x: Tensor) -> Tensor:  # (B, 6, D)
        rows = x.reshape(-1, 2, D)  # (B * 3, 2, D)
        scores = m.qk(rows) @ rows.mT
        scores = (scores.unflatten(0, (-1, 3)) + m.mask).flatten(0, 1)
        return (scores.softmax(-1) @ rows).reshape(x.shape)

    part = Does(forward, qk=nn.Linear(D, D))
    part.register_buffer("mask", torch.linspace(-1, 1, 12).reshape(3, 2, 2))
    return Around(part)


def windows_with_a_mask() -> nn.Module:
    """The mask is an argument of the part that is called with windows: neither of the two has the samples in rows."""
    inner = Does(lambda m, rows, mask: m.qk(rows) * mask.repeat(len(rows) // 3, 1, 1), qk=nn.Linear(D, D))

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.inner(x.reshape(-1, 2, D), m.mask).reshape(x.shape)

    part = Does(forward, inner=inner)
    part.register_buffer("mask", torch.linspace(-1, 1, 24).reshape(3, 2, D))
    return Around(part)


def experts() -> nn.Module:
    """Each position goes to the expert that its values choose: so many rows for each, B and 1 among them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = m.router(rows).softmax(-1)
        chosen, out = scores.argmax(-1), torch.zeros_like(rows)
        for number in range(3):
            where = (chosen == number).nonzero().squeeze(-1)
            if len(where):
                out = out.index_add(0, where, getattr(m, f"expert{number}")(rows[where]) * scores[where, number, None])
        return out.unflatten(0, x.shape[:2])

    return Around(Does(forward, router=nn.Linear(D, 3), **{f"expert{i}": nn.Linear(D, D) for i in range(3)}))


def tied() -> nn.Module:
    """The weight of the folded part is that of the last layer."""
    model = Around(folded(linear=nn.Linear(D, D)))
    model.after = nn.Linear(D, D)
    model.part.linear.weight = model.after.weight
    return model


def one_by_one() -> nn.Module:
    return Around(Does(lambda m, x: torch.cat([m.linear(x[i : i + 1]) for i in range(len(x))]), linear=nn.Linear(D, D)))


def positions(take: Callable[[Tensor], Tensor], index: Callable[[int], Tensor]) -> nn.Module:
    return Around(Does(lambda m, x: x * take(m.table(index(x.shape[1]))), table=nn.Embedding(9, D)))


def coordinates() -> nn.Module:
    table = torch.tensor([[0.1, 0.4], [0.5, 0.2], [0.3, 0.9]], dtype=torch.float64)
    return Around(Does(lambda m, x: m.linear(table) + x, linear=nn.Linear(2, D)))


def memory() -> nn.Module:
    slots = torch.linspace(-1, 1, B * D, dtype=torch.float64).sin().view(B, D)
    return Around(Does(lambda m, x: (x @ m.keys(slots).T).softmax(-1) @ slots, keys=nn.Linear(D, D)))


def checkpointed() -> nn.Module:
    part = folded(linear=nn.Linear(D, D), tanh=nn.Tanh())
    return Around(Does(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=part))


def with_a_branch() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return torch.stack([each * 2 if float(each.detach().sum()) > 0 else each.sin() for each in y])

    return Around(Does(forward, linear=nn.Linear(D, D)))


def written_in_place() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, ::2] = m.linear(x[:, ::2].flatten(0, 1)).unflatten(0, (len(x), -1))
        return out

    return Around(Does(forward, linear=nn.Linear(D, D)))


def own_branch() -> nn.Module:
    """A module with a parameter of its own that `vmap` cannot follow."""
    part = Does(lambda m, x: torch.stack([each * m.scale if each.sum() > 0 else each - m.scale for each in x]))
    part.scale = nn.Parameter(torch.linspace(0.5, 1, D))
    return Around(part)


class Reversible(nn.Module):
    """Keeps the statistics of a series in attributes, for when its forecast is scaled back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.linspace(0.5, 1, D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor, back: bool) -> Tensor:  # (B, T, D)
        if back:
            return (x - self.shift) / self.scale * self.spread + self.mean
        self.mean = x.mean(1, keepdim=True).detach()
        self.spread = x.std(1, keepdim=True).detach() + 1
        return (x - self.mean) / self.spread * self.scale + self.shift


def statistics_that_are_kept() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        patches = m.norm(x, False).mT.unfold(-1, 2, 1).flatten(0, 1)  # (B * D, T - 1, 2)
        return m.norm(m.linear(patches).sin().sum(-1).unflatten(0, (-1, D)).mT, True)

    return Around(Does(forward, norm=Reversible(), linear=nn.Linear(2, 2)))


def argument_of_b_rows() -> nn.Module:
    """A table that all samples share, and that has B rows by chance."""
    inner = Does(lambda m, x, table: x * m.scale + (table * m.scale).sin().sum(0))
    inner.scale = nn.Parameter(torch.linspace(0.5, 1, D))
    part = Does(lambda m, x: m.inner(x, torch.linspace(-1, 1, B * D, device=x.device).view(B, D)), inner=inner)
    return Around(part)


def read_counts() -> nn.Module:
    """The numbers of rows are read, and a dtype is kept for later."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.input_dtype = x.dtype
        rows = m.linear(x.flatten(0, 1))
        order = rows.sum(-1).sort().indices
        counts = torch.stack([(rows.sum(-1) < 0).sum(), (rows.sum(-1) >= 0).sum()]).tolist()
        below, above = rows[order].split(counts)
        joined = torch.cat([below.sin(), above.to(m.input_dtype) * 2])
        return torch.zeros_like(rows).index_add(0, order, joined).unflatten(0, x.shape[:2])

    return Around(Does(forward, linear=nn.Linear(D, D)))


def two_parts() -> nn.Module:
    return nn.Sequential(Around(folded(linear=nn.Linear(D, D)), D), nn.Linear(2, D), folded(linear=nn.Linear(D, 3)))


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(D)
    norm.running_mean.add_(torch.linspace(-1, 1, D))
    return Around(folded(linear=nn.Linear(D, D), norm=norm)).eval()


def picklable() -> nn.Module:
    return Around(Folded())


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])


CASES: dict[str, Case] = {
    "picklable": Case(picklable),
    "folded": Case(lambda: Around(folded(linear=nn.Linear(D, D), norm=nn.LayerNorm(D)))),
    "folded_outside": Case(folded_outside),
    "convolution": Case(
        lambda: Around(Does(lambda m, x: m.c(x.reshape(-1, 1, D)).reshape(x.shape), c=nn.Conv1d(1, 1, 1)))
    ),
    "windows": Case(windows, shape=(B, 6, D)),
    "windows_with_a_mask": Case(windows_with_a_mask, shape=(B, 6, D)),
    "experts": Case(experts, loops=True),
    "tied": Case(tied),
    "one_by_one": Case(one_by_one),
    "positions": Case(lambda: positions(lambda p: p, torch.arange), shape=(B, B, D)),
    "first_of_positions": Case(lambda: positions(lambda p: p[0], lambda n: torch.arange(n)[None])),
    "view_of_positions": Case(
        lambda: positions(lambda p: p.view(1, -1).view(-1, D), lambda n: torch.arange(n)[None]), {"part"}
    ),
    "positions_backwards": Case(
        lambda: positions(lambda p: p, lambda n: torch.arange(n).flip(0)), {"part"}, shape=(B, B, D)
    ),
    "coordinates": Case(coordinates, {""}, shape=(B, B, D)),
    "memory": Case(memory, {""}, shape=(B, B, D)),
    "checkpointed": Case(checkpointed, {"part.inner"}),
    "branch": Case(with_a_branch, loops=True),
    "written_in_place": Case(written_in_place),
    "own_branch": Case(own_branch, loops=True),
    "statistics_that_are_kept": Case(statistics_that_are_kept),
    "mapped": Case(lambda: Around(Does(lambda m, x: torch.vmap(m.linear, 1, 1)(m.linear(x)), linear=nn.Linear(D, D)))),
    "argument_of_b_rows": Case(argument_of_b_rows),
    "read_counts": Case(read_counts, loops=True),
    "outside": Case(
        lambda: Around(Does(lambda m, x: F.linear(m.linear(x).tanh(), m.linear.weight), linear=nn.Linear(D, D)))
    ),
    "outside_of_a_folded_part": Case(
        lambda: Does(lambda m, x: F.linear(m.part(x), m.part.linear.weight), part=folded(linear=nn.Linear(D, D))), {""}
    ),
    "two_parts": Case(two_parts, {"0.part", "2"}),
    "batch_norm": Case(batch_norm),
    "root": Case(lambda: folded(linear=nn.Linear(D, D)), {""}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
quiet = pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")


def on(module: nn.Module, **settings: Any) -> Any:
    return enn.convert(module).per_sample(loss_reduction="sum", **settings)


def learned(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "_learned", None) is not None}


def rows(model: nn.Module, samples: int = B) -> dict[str, Tensor]:
    """The rows; of an expert that no position went to they are none, and so zero."""
    parameters = dict(model.named_parameters())
    return {
        n: parameters[n].new_zeros(samples, *parameters[n].shape) if r is None else r for n, r in rows_of(model).items()
    }


def assert_right(model: Any, module: nn.Module, call: Call) -> None:
    total_loss(model, call).backward()
    samples = len(call.args[0])
    expected = loop(module, call, samples)
    assert_close_rows(rows(model, samples), expected)
    for name, grad in grads_of(model).items():
        assert_close(
            torch.zeros(()).expand_as(expected[name][0]) if grad is None else grad, expected[name].sum(0), name=name
        )


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@every_case
class TestLaws:
    def test_rows_equal_the_loop(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        with pytest.warns(enn.PerSampleWarning) as said:
            assert_right(model, module, call)
        assert len(said) == 1
        assert ("in a loop" in str(said[0].message)) == case.loops
        assert learned(model) == case.learned
        with silent():
            model.zero_grad()
            assert_right(model, module, case.call(seed=2, samples=B + 1 if case.shape[1] != B else B))

    def test_off(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module, escalate=False)
        with pytest.raises(enn.PerSampleError):
            total_loss(model, call).backward()
        assert learned(model) == set()
        model.zero_grad()
        with pytest.warns(enn.PerSampleWarning):
            assert_right(model.per_sample(escalate=True), module, call)
        model.zero_grad()
        with silent():
            assert_right(model.per_sample(False).per_sample(), module, call)
        with pytest.raises(enn.PerSampleError):
            total_loss(model.per_sample(escalate=False), call).backward()

    @quiet
    def test_second_derivatives(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        gradient_penalty(model, call).backward()
        assert_close_rows(rows(model), loop(module, call, B, objective=gradient_penalty))

    @quiet
    def test_copies_and_the_way_back(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        call.on(model)
        for copied in (deepcopy(model), *([pickle.loads(pickle.dumps(model))] if "Does" not in repr(model) else [])):
            with silent():
                assert_right(copied, module, call)
            assert learned(copied) == case.learned
        plain_model = enn.revert(model)
        assert {type(each) for each in plain_model.modules()} == {type(each) for each in module.modules()}
        assert not any("_learned" in vars(each) for each in plain_model.modules())
        assert torch.equal(call.on(plain_model), call.on(module))

    @quiet
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoints(self, case: Case, use_reentrant: bool) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        x = call.args[0].clone().requires_grad_()
        again = Call((x,))
        total_loss(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), again).backward()
        assert_close_rows(rows(model), loop(module, call, B))

    @quiet
    def test_several_passes(self, case: Case) -> None:
        module, calls = case.module(), [case.call(seed) for seed in (1, 2)]
        model = on(module)
        for call in calls:
            total_loss(model, call).backward()
        expected = [loop(module, call, B) for call in calls]
        assert_close_rows(rows(model, 2 * B), {name: torch.cat([e[name] for e in expected]) for name in expected[0]})

    @quiet
    def test_a_forward_without_gradients(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        with torch.no_grad(), silent():
            assert torch.equal(call.on(model), call.on(module))
        assert learned(model) == set()
        total_loss(model, call)
        with torch.no_grad():
            assert_close(call.on(model), call.on(module))

    @quiet
    def test_a_single_sample(self, case: Case) -> None:
        module, call = case.module(), case.call(samples=1)
        assert_right(on(module), module, call)

    @quiet
    def test_within_one_pass(self, case: Case) -> None:
        module, call = case.module(), case.call()
        model = on(module)
        with enn.one_pass(model, B):
            total_loss(model, call).backward()
        assert_close_rows(rows(model), loop(module, call, B))

    def test_check_lists_them(self, case: Case) -> None:
        with silent():
            report = enn.check(case.module(), *case.call().args)
        assert report.ok, str(report)
        assert str(report).count("runs sample by sample") == len(case.learned)


class Leaves(nn.Module):
    """Leaves traces, before and behind the part that escalates."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.drop = folded(linear=nn.Linear(D, D), drop=nn.Dropout(0.5)), nn.Dropout(0.5)
        self.calls, self.shapes, self.generator = 0, [], torch.Generator()
        self.register_buffer("seen", torch.zeros(D))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.seen.add_(1)
        for each in others:
            each.append(self.calls) if isinstance(each, list) else each.keep(x)
        noise = torch.rand(1, generator=self.generator) + random.random()
        return self.part(self.drop(x) + noise) + self.drop(x)


class Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def keep(self, x: Tensor) -> None:
        self.kept.append(x)


class TestTraces:
    """What a forward that is given up has drawn, counted and kept is as if it had not been."""

    @quiet
    def test_of_the_model_and_its_arguments(self) -> None:
        module, x, kept, cache = Leaves(), torch.randn(B, T, D), [], Cache()
        model = on(module)
        buffer = model.seen
        model(x, kept, cache).sum().backward()
        assert (model.calls, model.shapes, kept, len(cache.kept)) == (1, [(B, T, D)], [1], 1)
        assert model.seen is buffer
        assert torch.equal(buffer, torch.ones(D))
        assert cache.kept[0] is x
        assert len(model.part.linear.weight.grad_sample) == B

    @quiet
    @pytest.mark.parametrize("place", ["attribute", "list", "object", "argument"])
    @pytest.mark.parametrize("trains", [False, True])
    def test_of_a_network_that_follows_another(self, place: str, trains: bool) -> None:
        """It moves once, wherever it is held."""
        part, teacher = folded(linear=nn.Linear(D, D)), nn.Linear(D, D).requires_grad_(trains)
        held = {"list": [teacher], "object": SimpleNamespace(net=teacher), "argument": None}.get(place, teacher)

        def follows(m: Any, x: Tensor, *_: Any) -> Tensor:
            with torch.no_grad():
                teacher.weight.lerp_(m.part.linear.weight, 0.1)
                teacher.bias.data = 0.9 * teacher.bias
            return m.part(x)

        module = Does(follows, part=part, teacher=held)
        wanted = [torch.lerp(teacher.weight, part.linear.weight, 0.1), 0.9 * teacher.bias]
        model = enn.convert(module, inplace=True).per_sample()
        model(torch.randn(B, T, D), *([teacher] if place == "argument" else [])).sum().backward()
        assert learned(model)
        for parameter, value in zip(teacher.parameters(), wanted, strict=True):
            assert torch.equal(parameter, value)

    @quiet
    def test_of_random_numbers(self) -> None:
        """The first forward draws what one draws that knows already."""
        first = on(Leaves())
        known = deepcopy(first)
        known(torch.randn(B, T, D))
        known.generator.manual_seed(3), first.generator.manual_seed(3)
        outputs, states = [], []
        for model in (first, known):
            torch.manual_seed(7), random.seed(7)
            outputs.append(model(torch.ones(B, T, D)))
            states.append((torch.get_rng_state(), random.getstate(), model.generator.get_state()))
        assert torch.equal(*outputs)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(*states, strict=True))

    @quiet
    def test_rows_of_an_earlier_pass_stay(self) -> None:
        """An open pass of as many samples goes on; rows held are not touched."""
        module = nn.ModuleDict({"a": nn.Linear(D, D), "b": folded(linear=nn.Linear(D, D))})
        model, x = on(module), torch.randn(B, T, D)
        with enn.one_pass(model, B):
            loss = (model["a"](x) * model["b"](x)).sum()
        loss.backward()
        assert len(model["a"].weight.grad_sample) == len(model["b"].linear.weight.grad_sample) == B

    def test_an_input_that_was_changed_in_place(self) -> None:
        """It cannot be run twice where the argument has a graph of its own."""
        part = folded(linear=nn.Linear(D, D))
        model = on(Does(lambda m, x: m.part(x.mul_(2)), part=part))
        with pytest.raises(enn.PerSampleError, match="folded batch"):
            model(torch.randn(B, T, D, requires_grad=True) * 1)
        x = torch.ones(B, T, D)
        with pytest.warns(enn.PerSampleWarning):
            model(x)
        assert torch.equal(x, 2 * torch.ones(B, T, D))

    @pytest.mark.parametrize("at", range(5))
    def test_of_an_interrupted_attempt(self, at: int) -> None:
        """The next forward finds out anew, and warns."""
        calls = count()

        def flattened(m: Any, x: Tensor) -> Tensor:
            if next(calls) == at:
                raise KeyboardInterrupt
            return m.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])

        module = nn.Sequential(Does(flattened, linear=nn.Linear(D, D)))
        model, x = on(module), torch.randn(B, T, D)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert not learned(model)
        with pytest.warns(enn.PerSampleWarning, match="folded"):
            model(x)

    def test_a_refusal_in_a_later_forward(self) -> None:
        """Of a kind that has gone through before: it is said that it has happened twice."""
        model = on(
            Does(lambda m, x: m.part(x) if len(x) > B else m.part.linear(x), part=folded(linear=nn.Linear(D, D)))
        )
        model(torch.randn(B, T, D))
        with pytest.warns(enn.PerSampleWarning, match="has happened twice"):
            model(torch.randn(B + 1, T, D))
        part = folded(linear=nn.Linear(D, D))
        model = on(Does(lambda m, x, cache: m.part(x) if len(x) > B else m.part.linear(x), part=part))
        model(torch.randn(B, T, D), Cache())
        with pytest.raises(enn.PerSampleError, match="folded"):
            model(torch.randn(B + 1, T, D), Cache())


def refused(forward: Callable[..., Any], words: str, **layers: nn.Module | list[Any]) -> None:
    model = on(Around(Does(forward, **layers)))
    with pytest.raises(enn.PerSampleError, match=words), silent():
        model(torch.randn(B, T, D))
    assert learned(model) == set()


class TestRefused:
    """What is no sample's own stays an error, and the model what it was."""

    def test_samples_that_are_mixed(self) -> None:
        refused(
            lambda m, x: m.linear((x - x.mean(0)).flatten(0, 1)).unflatten(0, x.shape[:2]),
            r"part\.linear \(Linear\): input has shape \(15, 4\)",
            linear=nn.Linear(D, D),
        )

    def test_samples_that_are_sorted(self) -> None:
        refused(
            lambda m, x: m.linear(x.flatten(0, 1).sort(0).values).unflatten(0, x.shape[:2]),
            "folded batch of 3 x 5",
            linear=nn.Linear(D, D),
        )

    def test_a_branch_on_the_whole_batch(self) -> None:
        def forward(m: Any, x: Tensor) -> Tensor:
            y = m.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return y * 2 if x[1].sum() > x[0].sum() else y * 3

        refused(forward, "folded batch of 3 x 5", linear=nn.Linear(D, D))

    def test_batch_norm_in_training(self) -> None:
        refused(
            lambda m, x: m.norm(m.linear(x.flatten(0, 1))).unflatten(0, x.shape[:2]),
            "folded batch of 3 x 5",
            linear=nn.Linear(D, D),
            norm=nn.BatchNorm1d(D),
        )

    def test_batch_norm_in_training_elsewhere(self) -> None:
        model = on(nn.Sequential(Around(folded(linear=nn.Linear(D, D))), nn.BatchNorm1d(T)))
        with pytest.raises(
            enn.PerSampleError, match=r"1 \(BatchNorm1d\): it normalizes by the statistics of the batch"
        ):
            model(torch.randn(B, T, D))
        assert learned(model) == set()

    def test_a_cache(self) -> None:
        def forward(m: Any, x: Tensor) -> Tensor:
            m.cache.append(m.linear(x.flatten(0, 1)))
            return m.cache[-1].unflatten(0, x.shape[:2])

        refused(forward, "folded batch of 3 x 5", linear=nn.Linear(D, D), cache=[])

    def test_use_of_a_weight_in_the_loss(self) -> None:
        """No module is around that."""
        model = on(Around(folded(linear=nn.Linear(D, D))))
        with pytest.warns(enn.PerSampleWarning):
            loss = model(torch.randn(B, T, D)).sum() + model.after.weight.sum()
        with pytest.raises(enn.PerSampleError, match=r"after\.weight: .*outside of its module"):
            loss.backward()

    def test_a_penalty_that_the_forward_returns(self) -> None:
        """It is of no sample: the rows are right as long as it is not in the loss."""
        module = Does(lambda m, x: (m.linear(x), m.linear.weight.square().sum()), linear=nn.Linear(D, D))
        model, call = on(module), Call((torch.randn(B, D),))
        with silent():
            output, penalty = call.on(model)
        output.sum().backward(retain_graph=True)
        assert_close(model.linear.weight.grad_sample, call.args[0][:, None].expand(-1, D, -1))
        with pytest.raises(enn.PerSampleError, match=r"linear\.weight: .*outside of its module"):
            penalty.backward()
        assert learned(model) == set()

    def test_the_models_own_error(self) -> None:
        model = on(Does(lambda m, x: m.table(torch.arange(T))[x.shape], table=nn.Embedding(9, D)))
        with pytest.raises(IndexError):
            model(torch.randn(B, T, D))
        assert learned(model) == set()

    def test_an_error_behind_the_part(self) -> None:
        model = on(Does(lambda m, x: 1 / 0 + m.part(x), part=folded(linear=nn.Linear(D, D))))
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(B, T, D))


def test_a_fold_that_changes_with_the_input() -> None:
    """Rows are B by chance for some inputs: what was learned holds for those too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        chosen = x.detach()[..., 0] > 0
        return torch.zeros_like(x).index_put((chosen,), m.linear(x[chosen]))

    module = Around(Does(forward, linear=nn.Linear(D, D)))
    model, generator = on(module), torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(8):
            model.zero_grad()
            assert_right(model, module, Call((torch.randn(B, T, D, generator=generator),)))
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:.*runs sample by sample")
@pytest.mark.parametrize("sizes", [(1, 4, 4), (1, 1, 2, 4), (2, 1, 4)])
def test_a_first_batch_of_one(sizes: tuple[int, ...]) -> None:
    """Layers refuse less of one sample. Forwards with a list cannot start over once they have been right."""

    def forward(m: Any, crops: list[Tensor]) -> tuple[Tensor, ...]:
        return m.head(torch.cat([m.part(x) for x in crops])).chunk(len(crops))  # type: ignore[no-any-return]

    def loss(called: nn.Module, crops: list[Tensor]) -> Tensor:
        return torch.cat(called(crops)).square().sum()

    model = Does(forward, part=nn.Linear(D, D), head=nn.Linear(D, 2))
    expanded = on(model)
    for size in sizes:
        crops = [torch.randn(size, D) for _ in range(2)]
        expanded.zero_grad()
        loss(expanded, crops).backward()
        for i in range(size):
            model.zero_grad()
            loss(model, [x[i : i + 1] for x in crops]).backward()
            for name, parameter in model.named_parameters():
                assert_close(expanded.get_parameter(name).grad_sample[i], parameter.grad, name=name)


def test_a_kind_of_call_that_fails_later_can_start_over_at_the_next_one() -> None:
    def forward(m: Any, given: list[Any]) -> Tensor:
        x, folds = given
        return m.linear(x.flatten(0, folds)).unflatten(0, x.shape[: folds + 1])  # type: ignore[no-any-return]

    model = on(Does(forward, linear=nn.Linear(D, D)))
    model([torch.randn(B, T, D), 0]).sum().backward()
    with pytest.raises(enn.PerSampleError, match="folded batch"):
        model([torch.randn(B, T, D), 1])
    with pytest.warns(enn.PerSampleWarning, match="runs sample by sample"):
        model([torch.randn(B, T, D), 1])


def test_a_module_whose_own_parameter_is_frozen_later() -> None:
    """It uses a weight of a layer within, which the rule sees as long as it has a parameter of its own to train."""
    module = Does(lambda m, x: F.linear(m.layer(x).sigmoid(), m.layer.weight.t(), m.shift), layer=nn.Linear(D, 2))
    module.shift = nn.Parameter(torch.zeros(D))
    model = on(module)
    for frozen in (False, False, True, True, False):
        model.shift.requires_grad_(not frozen)
        model.zero_grad()
        call = Call((torch.randn(B, T, D),))
        total_loss(model, call).backward()
        expected = loop(module, call, B)
        assert_close(model.layer.weight.grad_sample, expected["layer.weight"])
        assert (model.shift.grad is None) == frozen


def test_many_parts_are_named_in_one_warning() -> None:
    parts = [Around(folded(linear=nn.Linear(D, D)), D) for _ in range(4)]
    for part in parts:
        part.after = nn.Linear(D, D)
    with pytest.warns(enn.PerSampleWarning, match=r"0\.part.*1\.part.*2\.part.*3\.part \(Does\): runs") as said:
        on(nn.Sequential(*parts))(torch.randn(B, T, D))
    assert len(said) == 1


def test_the_larger_part_takes_the_place_of_those_in_it() -> None:
    """A part that was learned alone, and then something around it refuses."""
    part = folded(linear=nn.Linear(D, D))
    model = Does(
        lambda m, x: m.outer(x), outer=Does(lambda m, x: m.last(m.part(x)[None])[0], part=part, last=nn.Linear(D, D))
    )
    expanded = on(model)
    with pytest.warns(enn.PerSampleWarning):
        assert_right(expanded, model, Call((torch.randn(B, T, D),)))
    assert learned(expanded) == {"outer"}


@pytest.mark.parametrize("shape", [(3, 2, D), (5, 4, D)])
def test_a_checkpoint_ends_a_recomputation_early(shape: tuple[int, ...]) -> None:
    """It does so by an exception, which is no failure of the embedding that was broadcast before."""
    part = Does(
        lambda m, x: m.linear(x + m.table(torch.arange(x.shape[1]))), table=nn.Embedding(4, D), linear=nn.Linear(D, D)
    )
    module = Around(Does(lambda m, x: checkpoint(m.part, x, use_reentrant=False), part=part))
    call = Call((torch.randn(shape).requires_grad_(),))
    model = on(module)
    with silent():
        assert_right(model, module, call)
    assert learned(model) == set()


class Prompts(nn.Module):
    """One row of prompts, which the model itself repeats for the samples."""

    def __init__(self, repeat: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.table, self.linear, self.after = nn.Embedding(3, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        prompts = self.linear(self.table(torch.arange(3)[None])).tanh()
        return self.after(torch.cat([self.repeat(prompts, len(x)), x], 1))


REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "repeat": lambda x, count: x.repeat(count, 1, 1),
    "repeat, a tuple": lambda x, count: x.repeat((count, 2, 1)),
    "expand": lambda x, count: x.expand(count, -1, -1),
}


@pytest.mark.parametrize("watched", [False, True], ids=["a call", "one_pass"])
@pytest.mark.parametrize("how", REPEATS)
def test_a_row_that_the_model_repeats_for_the_samples(how: str, watched: bool) -> None:
    module, call = nn.Sequential(Prompts(REPEATS[how]), nn.Linear(2, 2)), Call((torch.randn(B, T, D),))
    model = on(module)
    with silent(), enn.one_pass(model, B) if watched else nullcontext():
        total_loss(model, call).backward()
    assert_close_rows(rows(model), loop(module, call, B))
    assert learned(model) == set()


OTHER_REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cat": lambda x, count: torch.cat([x] * count),
    "repeated also by samples": lambda x, count: x.repeat(2 * count, 1, 1)[count:],
    "the samples' mean": lambda x, count: x.repeat(count, 1, 1).mean(0, keepdim=True).expand(count, -1, -1),
}


@pytest.mark.parametrize("watched", [False, True], ids=["a call", "one_pass"])
@pytest.mark.parametrize("how", OTHER_REPEATS)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_row_that_the_model_repeats_in_another_way(how: str, watched: bool) -> None:
    module, call = nn.Sequential(Prompts(OTHER_REPEATS[how]), nn.Linear(2, 2)), Call((torch.randn(B, T, D),))
    model = on(module)
    with enn.one_pass(model, B) if watched else nullcontext():
        total_loss(model, call).backward()
    assert_close_rows(rows(model), loop(module, call, B))


def test_a_row_that_is_repeated_for_as_many_heads_as_samples() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        heads = m.heads(x).view(len(x), T, B, 2).transpose(1, 2)
        bias = m.table(torch.arange(T)[None]).repeat(B, 1, 1)
        return ((heads @ heads.mT + bias).softmax(-1) @ heads).sum((1, 2))

    module = Does(forward, heads=nn.Linear(D, 2 * B), table=nn.Embedding(T, T))
    around, call = Around(module, 2), Call((torch.randn(B, T, D),))
    model = on(around)
    with pytest.warns(enn.PerSampleWarning, match="by add"):
        total_loss(model, call).backward()
    assert_close_rows(rows(model), loop(around, call, B))


# copies that the model makes as many as samples, though they are none; and what it does with these
TO_HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat": lambda x: x.repeat(B, 1, 1),
    "expand": lambda x: x.expand(B, -1, -1),
    "zeros": lambda x: x + torch.zeros(B, 1, 1),
    "a layer behind": lambda x: F.layer_norm(x.expand(B, -1, -1), (D,)),
}
OF_HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda x, heads: torch.einsum("btd,hsd->btsh", x, heads * torch.arange(1.0, B + 1)[:, None, None]),
    "pairs": lambda x, heads: x.unsqueeze(1) * heads,
    "summed": lambda x, heads: x * (heads * torch.arange(1.0, B + 1)[:, None, None]).sum(0),
}


# these take row i of them for sample i, which one sample alone does not
OF_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda x, heads: x + heads.flip(0) * heads,
    "moved": lambda x, heads: x * torch.cat([heads[1:], heads[:1]]),
}


def with_heads(how: str, combine: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return combine(m.linear(x), TO_HEADS[how](m.table(torch.arange(T)[None]))).flatten(1)

    return Does(forward, linear=nn.Linear(D, D), table=nn.Embedding(T, D))


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("what", OF_HEADS)
@pytest.mark.parametrize("how", TO_HEADS)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_rows_that_are_as_many_as_samples(how: str, what: str, compared: bool) -> None:
    module, call = with_heads(how, OF_HEADS[what]), Call((torch.randn(B, T, D),))
    model = on(module, compare=compared)
    for _ in range(2):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows(model), loop(module, call, B))


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("what", OF_ROWS)
@pytest.mark.parametrize("how", TO_HEADS)
def test_rows_that_are_taken_for_those_of_samples(how: str, what: str, compared: bool) -> None:
    model = on(with_heads(how, OF_ROWS[what]), compare=compared)
    with pytest.raises(enn.PerSampleError):
        model(torch.randn(B, T, D))


class Balanced(nn.Module):
    """Experts, and the loss that balances them, which all samples have together."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, rows = self.router(x).softmax(-1).flatten(0, -2), x.flatten(0, -2)
        chosen, result = shares.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places = torch.where(chosen == number)[0]
            result = result.index_add(0, places, expert(rows[places]) * shares[places, number, None])
        balance = (F.one_hot(chosen, 2).to(shares).mean(0) * shares.mean(0)).sum()
        return result.view_as(x), balance


@pytest.mark.parametrize("shape", [(4 * B, D), (B, T, D)])
def test_a_loss_that_balances_experts(shape: tuple[int, ...]) -> None:
    """What is wrong is not the rows of the layers, whatever these say."""
    x = torch.randn(shape)
    for module in Balanced(), nn.Sequential(nn.Linear(D, D), Balanced()):
        with pytest.raises(enn.PerSampleError, match=rf"^{type(module).__name__}: .*balances experts") as info:
            on(module)(x)
        assert any("a layer had refused its rows: " in note for note in notes_on(info.value))
        first, *others = enn.check(module, x).problems
        assert (first.kind, str(first), others) == ("mixing", str(info.value), [])


def test_samples_that_are_compared_with_each_other_are_no_positions() -> None:
    module = Does(lambda m, x: m.linear(x).unsqueeze(1) - m.linear(x), linear=nn.Linear(D, D))
    model = on(module, escalate=False, compare=False)
    assert model(torch.randn(B, D)).shape == (B, B, D)


def test_derivatives_within_the_forward() -> None:
    """Those of an energy, as of a Hamiltonian network."""

    def force(m: Any, x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda state: m.linear(state).sin().square().sum()))(x)

    module = Around(Does(force, linear=nn.Linear(D, 2)))
    with pytest.warns(
        enn.PerSampleWarning, match=r"part \(Does\): .*part.linear \(Linear\): it is called within a trans"
    ):
        assert_right(on(module), module, Call((torch.randn(B, T, D),)))


@pytest.mark.parametrize("product", [torch.autograd.functional.jvp, torch.autograd.functional.hvp])
def test_products_with_derivatives_of_a_forward_with_a_parameter_of_its_own(product: Any) -> None:
    """They differentiate by a tensor that the forward makes, which `vmap` cannot."""

    def forward(m: Any, x: Tensor) -> Tensor:
        def scaled(z: Tensor) -> Tensor:
            return m.linear(z).tanh() * m.scale

        asked = scaled if product is torch.autograd.functional.jvp else lambda z: scaled(z).square().sum()
        return product(asked, x, x.sin(), create_graph=True)[1]

    part = Does(forward, linear=nn.Linear(D, D))
    part.scale = nn.Parameter(torch.randn(D))
    module = Around(part)
    model = on(module)
    for size in (B, B, B + 1, 1):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", enn.PerSampleWarning)
            assert_right(model, module, Call((torch.randn(size, T, D),)))


def test_a_counter_that_hooks_all_modules() -> None:
    part = Does(lambda m, x: m.linear(x).tanh() * m.scale, linear=nn.Linear(D, D))
    part.scale = nn.Parameter(torch.randn(D))
    module = Around(part)
    model = on(module)
    for number in range(3):
        model.zero_grad()
        says = nullcontext() if number else pytest.warns(enn.PerSampleWarning, match="in a loop")
        with FlopCounterMode(display=False) as counter, says:
            assert_right(model, module, Call((torch.randn(B, T, D),)))
        assert counter.get_total_flops()


class Polar(nn.Module):
    """Angles of positions that all samples share, and a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 1, D))
        self.register_buffer("frequencies", torch.randn(D))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions[None, :, None] * self.frequencies, self.bias.clamp(-6, 0)  # (1, T, D), (heads, 1, D)


def test_several_results_that_all_samples_share() -> None:
    """Copies for the samples do not fit together as the plain results do, of which torch's error says nothing."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        angles, bias = self.polar(torch.arange(T))
        return self.last(self.first(x)[:, None] * (angles + bias).sin()).mean(1)

    plain = Does(forward, first=nn.Linear(D, D), polar=Polar(), last=nn.Linear(D, 2))
    model = enn.convert(plain).per_sample()
    for number, size in enumerate((B, B + 1, 1)):
        call = Call((torch.randn(size, T, D),))
        model.zero_grad()
        with nullcontext() if number else pytest.warns(enn.PerSampleWarning, match="runs sample by sample"):
            out = call.on(model)
        sample_losses(out).mean().backward()
        assert_close_rows(rows_of(model), loop(plain, call, size))


def test_a_row_that_does_not_fit_without_escalation() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) * m.table(torch.zeros(1, 1, dtype=torch.int64))).transpose(0, 1)

    with pytest.raises(RuntimeError, match="The size of tensor a") as info:
        on(Does(forward, table=nn.Embedding(3, D)), escalate=False)(torch.randn(B, T, D))
    (note,) = notes_on(info.value)
    assert re.search(r"table \(Embedding\) was called with an input that all samples share.*alone", note)


def test_the_error_says_why_no_module_can_go_sample_by_sample() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.cache.append(m.linear(x.flatten(0, 1)))
        return m.cache[-1].unflatten(0, x.shape[:2])

    with pytest.raises(enn.PerSampleError, match="folded batch of 3 x 5") as info:
        on(Does(forward, linear=nn.Linear(D, D), cache=[]))(torch.randn(B, T, D))
    (note,) = notes_on(info.value)
    assert re.search(r"not possible either: Does: its forward keeps tensors in attribute 'cache'.*use_cache", note)


class Drifts(nn.Module):
    """Keeps the mean of all inputs so far, and takes those before from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.linspace(0.5, 1, D)), torch.zeros(D)

    def forward(self, x: Tensor) -> Tensor:
        before, self.seen = self.seen, 0.9 * self.seen + 0.1 * x.mean((0, 1)).detach()
        return (x - before) * self.scale


@quiet
def test_what_a_forward_keeps_for_the_next_one() -> None:
    """Each call goes on from what the call before has kept, and not from what a comparison has."""
    module = Around(Drifts())
    model = on(module)

    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        model.part.seen = before
        return total_loss(model, call, first)

    for seed in range(cost.TURNS_OF_A_SAMPLE + 2):
        call = Call((torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)),))
        before = module.part.seen
        expected = loop(module, call, B, objective=objective)
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows(model), expected)
        call.on(module)
        assert_close(model.part.seen, module.part.seen)


def test_a_cache_that_the_model_makes() -> None:
    """A part of it fills the cache, so that the model goes sample by sample."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(D))

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x * self.scale)
            return torch.stack(cache).sum(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        return m.second(m.first(m.linear(x), cache), cache)

    module = Does(forward, linear=nn.Linear(D, D), first=Cached(), second=Cached())
    model = on(module)
    with pytest.warns(enn.PerSampleWarning, match="Does: runs sample by sample.*keeps tensors in an argument"):
        assert_right(model, module, Call((torch.randn(B, T, D),)))
    assert learned(model) == {""}


def test_an_error_that_is_not_of_shapes_behind_a_shared_row() -> None:
    """The forward does not start over for it."""
    calls: list[int] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        calls.append(1)
        m.table(torch.arange(3)[None])
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        on(Does(forward, table=nn.Embedding(3, D)), compare=False)(torch.randn(B, T, D))
    assert len(calls) == 1


def test_the_warning_quotes_an_error_of_torch_as_a_sentence() -> None:
    """And names the layer whose result has another shape than the plain one's."""
    module = positions(lambda p: p.permute(1, 0).T, torch.arange)
    words = r"The reason: behind .*Embedding.*torch raises: permute.*= 2\. alone\(Does\) before convert"
    with pytest.warns(enn.PerSampleWarning, match=words):
        assert_right(on(module), module, Call((torch.randn(B, T, D),)))


def test_the_warning_points_to_the_call() -> None:
    """And not into this library, or torch."""
    model = enn.convert(folded(linear=nn.Linear(D, D))).per_sample()
    x = torch.randn(B, T, D)
    with pytest.warns(enn.PerSampleWarning) as said:
        model(x)
    assert linecache.getline(said[0].filename, said[0].lineno).strip() == "model(x)"


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_hook_on_a_tensor_in_the_forward(asks: bool, within: bool) -> None:
    """As a layer that turns gradients around has it, for domains that are to look alike."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(D))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            if not asks or y.requires_grad:
                y.register_hook(lambda gradient: -2 * gradient)
            return y * self.scale

    plain = nn.Sequential(nn.Linear(D, D), Reversed()) if within else Reversed()
    model, x = enn.convert(plain).per_sample(loss_reduction="sum"), torch.randn(5, D)
    with pytest.warns(enn.PerSampleWarning, match=r"in a loop.*registers a hook on a tensor"):
        total_loss(model, Call((x,))).backward()
    for _ in range(2):
        model.zero_grad()
        total_loss(model, Call((x,))).backward()
        assert_close_rows(rows_of(model), loop(plain, Call((x,)), 5))


@pytest.mark.parametrize("is_own", [False, True])
def test_a_hook_on_a_parameter_in_the_forward(is_own: bool) -> None:
    """Comparisons run the forward several times, and leave one hook."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_done = nn.Linear(D, D), False
            self.scale = nn.Parameter(torch.ones(D)) if is_own else None

        def forward(self, x: Tensor) -> Tensor:
            parameter = self.layer.weight if self.scale is None else self.scale
            if not self.is_done:
                self.is_done = True
                parameter.register_hook(lambda gradient: 2 * gradient)
            return self.layer(x) if self.scale is None else self.layer(x) * self.scale

    plain = Hooked()
    model, x = enn.convert(plain).per_sample(loss_reduction="sum"), torch.randn(5, D)
    if is_own:
        with pytest.raises(enn.PerSampleError, match="its forward registers a hook on a parameter"):
            model(x)
        return
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(x).sin().sum().backward()
        assert_close(model.layer.weight.grad, plain.layer.weight.grad)


class WrongHead(nn.Module):
    """Folds its batch, and has an error of its own behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(2, 2), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x.reshape(-1, 2)).reshape(x.shape))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_of_the_users_behind_a_refused_layer_is_named() -> None:
    model = enn.convert(WrongHead()).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"^mix.*folded batch") as caught:
        model(torch.randn(4, 6))
    (note,) = caught.value.__notes__
    assert "there is another error: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in note
