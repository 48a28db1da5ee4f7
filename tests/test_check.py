"""`check` finds by running what makes rows wrong, names it, and changes nothing."""

import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from cases import Scale
from expanded_nn.modules.registry import EXPANDED
from oracle import Call, assert_close_rows, loop, rows_of, total_loss


class Model(nn.Module):
    """Layers by name, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def between(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    """Two linear maps, and something between them."""
    return Model(lambda m, x: m.b(mix(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))


def features(samples: int = 5) -> Tensor:
    return torch.randn(samples, 4)


def words(samples: int = 5, length: int = 3) -> Tensor:
    return torch.randint(9, (samples, length))


def images() -> Tensor:
    return torch.randn(4, 2, 7, 6)


def of_kind(report: enn.Report, kind: str) -> list[str]:
    return [problem.where for problem in report.problems if problem.kind == kind]


# --- clean models ----------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    return model


def tagger(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """The output is padded to the longest sequence of the batch, or of the sample alone."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.head(pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0])


def chosen(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(torch.zeros_like(h).masked_scatter(mask[..., None], m.act(h[mask])))


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.a(x).transpose(0, 1).flatten(0, 1)


@dataclass
class Pair:
    one: Tensor
    others: dict[str, Tensor]


def pairs(m: Any, pair: Pair, *, scale: Tensor) -> Pair:
    return Pair(m.a(pair.one), {"sum": m.a(pair.others["two"]) * scale, "ids": torch.arange(3)})


CLEAN: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "cnn": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(80, 3)),
        (images(),),
        {},
    ),
    "batch_norm_eval": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).eval(),
        (images(),),
        {},
    ),
    "transformer": lambda: (
        nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
        (torch.randn(3, 5, 4),),
        {},
    ),
    "transformer_samples_second": lambda: (nn.TransformerEncoderLayer(8, 2, 16), (torch.randn(5, 3, 8),), {}),
    "attention_dropout": lambda: (
        Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)),
        (torch.randn(3, 5, 4),),
        {},
    ),
    "lstm": lambda: (
        Model(
            lambda m, x, h: m.a(m.lstm(x, h)[0]),
            lstm=nn.LSTM(4, 5, 2, dropout=0.3, batch_first=True),
            a=nn.Linear(5, 2),
        ),
        (torch.randn(3, 6, 4), (torch.randn(2, 3, 5), torch.randn(2, 3, 5))),
        {},
    ),
    "lstm_samples_second": lambda: (nn.LSTM(4, 5), (torch.randn(6, 3, 4),), {}),
    "packed": lambda: (
        nn.GRU(4, 5, bidirectional=True),
        (pack_sequence([torch.randn(n, 4) for n in (2, 5, 3)], enforce_sorted=False),),
        {},
    ),
    "padded_output": lambda: (
        Model(tagger, lstm=nn.LSTM(4, 5, batch_first=True), head=nn.Linear(5, 2)),
        (torch.randn(3, 6, 4), torch.tensor([4, 6, 1])),
        {},
    ),
    "packed_numbers_that_could_be_split": lambda: (  # in three parts, each as long as the last sequence
        Model(tagger, lstm=nn.LSTM(4, 5, batch_first=True), head=nn.Linear(5, 2)),
        (torch.randn(3, 6, 4), torch.tensor([4, 2, 3])),
        {},
    ),
    "positions_that_could_be_split": lambda: (
        Model(chosen, a=nn.Linear(4, 5), act=nn.Tanh(), head=nn.Linear(5, 2)),
        (torch.randn(3, 4, 4), torch.arange(4) < torch.tensor([4, 2, 3])[:, None]),
        {},
    ),
    "sparse_input": lambda: (Model(lambda m, x: m.a(x.to_dense()), a=nn.Linear(4, 2)), (features().to_sparse(),), {}),
    "number": lambda: (Model(lambda m, x, t: m.a(x) * t, a=nn.Linear(4, 2)), (features(), torch.tensor(2.0)), {}),
    "tied": lambda: (tied(), (words(),), {}),
    "frozen": lambda: (
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2)),
        (features(),),
        {},
    ),
    "dropout": lambda: (nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 3)), (features(),), {}),
    "general": lambda: (nn.Sequential(nn.Linear(4, 4), Scale(4), nn.Linear(4, 2)), (features(),), {}),
    "parametrized": lambda: (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4))),
        (features(),),
        {},
    ),
    "sparse": lambda: (nn.Embedding(9, 4, sparse=True, padding_idx=2), (words(),), {}),
    "folded_output": lambda: (Model(lambda m, x: m.a(x).flatten(0, 1), a=nn.Linear(4, 2)), (torch.randn(3, 5, 4),), {}),
    "transposed_output": lambda: (Model(transposed, a=nn.Linear(4, 2)), (torch.randn(3, 5, 4),), {}),
    "squeezed_output": lambda: (Model(lambda m, x: m.a(x).squeeze(), a=nn.Linear(4, 1)), (features(),), {}),
    "infinite_output": lambda: (
        Model(lambda m, x: m.a(x).masked_fill(x > 0, -torch.inf), a=nn.Linear(4, 4)),
        (features(),),
        {},
    ),
    "complex_output": lambda: (Model(lambda m, x: torch.fft.fft(m.a(x)), a=nn.Linear(4, 4)), (features(),), {}),
    "nested_arguments": lambda: (
        Model(pairs, a=nn.Linear(4, 2)),
        (Pair(features(), {"two": features()}),),
        {"scale": torch.ones(1, 2)},
    ),
    "input_derivative": lambda: (
        Model(
            lambda m, x: torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)[0],
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 1, bias=False),
        ),
        (features().requires_grad_(),),
        {},
    ),
    "checkpoint": lambda: (
        Model(lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=False), a=nn.Linear(4, 4), b=nn.Dropout()),
        (features(),),
        {},
    ),
    "reentrant_checkpoint": lambda: (
        Model(
            lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=True),
            a=nn.Linear(4, 4),
            b=nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        ),
        (features(),),
        {},
    ),
    "zoo": lambda: (
        Model(lambda m, x: m.b(m.a(x)), a=enn.Linear(4, 4), b=enn.LayerNorm(4)),
        (features(),),
        {},
    ),
    "converted": lambda: (
        enn.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))).per_sample(
            loss_reduction="sum", accumulate_grad=False, materialize=True
        ),
        (features(),),
        {},
    ),
    "converted_samples_second": lambda: (
        enn.convert(nn.Sequential(nn.Linear(4, 4), Scale(4))).per_sample(batch_first=False),
        (torch.randn(6, 3, 4),),
        {},
    ),
    "converted_batch_size": lambda: (
        enn.convert(Model(lambda m, table, x: m.a(x) + table.sum(), a=nn.Linear(4, 2))).per_sample(batch_size=5),
        (torch.randn(2, 3), features()),
        {},
    ),
}


@pytest.mark.parametrize("case", CLEAN.values(), ids=CLEAN)
def test_clean(case: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> None:
    model, args, kwargs = case()
    report = enn.check(model, *args, **kwargs)
    assert report.ok, str(report)
    report.raise_for_problems()
    assert set(report.errors) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert max(report.errors.values()) <= 1e-12
    assert "no problem found" in str(report)


# --- samples mixed across the batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False)], ids=["affine", "plain"])
def test_batch_norm_in_train_mode(norm: nn.Module) -> None:
    report = enn.check(nn.Sequential(nn.Conv2d(2, 2, 3), norm.double()), images())
    assert not report.ok
    assert {problem.where for problem in report.problems} == {"1 (BatchNorm2d)"}
    with pytest.raises(enn.PerSampleError, match=r"1 \(BatchNorm2d\): .*GroupNorm"):
        report.raise_for_problems()


def test_batch_norm_that_does_not_take_one_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert len(enn.check(model, features()).problems) == 1
    by_hand = between(lambda h: F.batch_norm(h, None, None, training=True))
    (problem,) = enn.check(by_hand, features()).problems
    assert problem.kind == "layer"
    assert "normalizes by the statistics of the batch (batch_norm with training=True" in str(problem)
    by_another_name = between(lambda h: F.instance_norm(h.T.unsqueeze(0)).squeeze(0).T)
    (problem,) = enn.check(by_another_name, features()).problems
    assert problem.kind == "run"
    assert "on sample 0 alone it raises ValueError: Expected more than 1 spatial element" in str(problem)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda h: h - h.mean(0),
    "mean": lambda h: h + h.mean(0, keepdim=True),
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "cumulative": lambda h: h.cumsum(0),
    "rolled": lambda h: h.roll(1, 0),
    "weakly": lambda h: h + 1e-12 * h.mean(0),
    "in_the_gradient_only": lambda h: h + h.mean(0) - h.mean(0).detach(),
    "without_gradient": lambda h: h - h.mean(0).detach(),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("convert", [False, True], ids=["plain", "converted"])
def test_mixing_between_layers(mix: Callable[[Tensor], Tensor], convert: bool) -> None:
    module = between(mix)
    report = enn.check(enn.convert(module) if convert else module, features())
    (problem,) = (problem for problem in report.problems if problem.kind == "mixing")
    assert problem.where == "Model"
    assert "between the output of a (Linear) and the input of b (Linear)" in str(problem)
    assert "depends on the other samples" in str(problem)
    assert "GroupNorm" in str(problem)
    is_refused = mix is MIXING["rolled"]  # where it happens, so there are no rows to compare
    assert is_refused or max(report.errors.values()) > 1e-2 or mix is MIXING["weakly"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixing_beside_masked_numbers(dtype: torch.dtype) -> None:
    """What stands for minus infinity is larger than all else, and says nothing."""

    def masked(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return torch.cat([y - y.mean(0), torch.full_like(y, torch.finfo(dtype).min)], 1)

    model = Model(masked, a=nn.Linear(4, 4)).to(dtype)
    report = enn.check(model, features().to(dtype), loss=lambda model, x: model(x)[:, :4].square().mean())
    assert "mixing" in {problem.kind for problem in report.problems}


def test_settings_hold_while_the_mode_is_off() -> None:
    model = enn.convert(nn.LSTM(4, 5)).per_sample(batch_first=False, loss_reduction="sum")
    x = torch.randn(7, 3, 4)
    for _ in range(2):
        report = enn.check(model, x, loss=lambda model, x: model(x)[0].square().sum())
        report.raise_for_problems()
        model.per_sample(False)


def test_mixing_of_packed_sequences() -> None:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(m.a(x), lengths, batch_first=True, enforce_sorted=False)
        centred = PackedSequence(packed.data - packed.data.mean(0), *packed[1:])
        return m.b(pad_packed_sequence(m.lstm(centred)[0], batch_first=True)[0])

    model = Model(forward, a=nn.Linear(4, 4), lstm=nn.LSTM(4, 5, batch_first=True), b=nn.Linear(5, 2))
    report = enn.check(model, torch.randn(3, 6, 4), torch.tensor([6, 2, 3]))
    assert "between the output of a (Linear) and the input of lstm (LSTM)" in str(report.problems[0])


def test_mixing_in_a_layer_of_the_users_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Model(lambda m, h: h - h.mean(0)), nn.Linear(4, 4))
    assert of_kind(enn.check(model, features()), "mixing") == ["1 (Model)"]


def test_mixing_before_the_first_layer() -> None:
    model = Model(lambda m, x: m.a(x - x.mean(0)), a=nn.Linear(4, 4))
    report = enn.check(model, features())
    assert of_kind(report, "mixing") == ["Model"]
    assert "between the input of Model and the input of a (Linear)" in str(report)


def test_the_mean_of_the_batch_into_a_layer() -> None:
    model = Model(lambda m, x: m.a(x) + m.b(x.mean(0, keepdim=True)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    report = enn.check(model, features())
    assert not report.ok
    assert "b (Linear)" in str(report)


def test_attention_across_the_batch() -> None:
    model = Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2))
    first = enn.convert(model).per_sample(batch_first=True)
    report = enn.check(first, torch.randn(3, 3, 4))
    assert of_kind(report, "mixing") == ["a (MultiheadAttention)"]
    assert "batch_first=True" in str(report)
    assert "B = 3 is also the size of another dimension" in str(report)
    assert of_kind(enn.check(model, torch.randn(3, 6, 4)), "layer") == ["a (MultiheadAttention)"]
    unsaid = enn.check(model, torch.randn(3, 3, 4))
    assert of_kind(unsaid, "layer") == ["a (MultiheadAttention)"]
    assert "per_sample(batch_first=False) if they stand second" in str(unsaid)


def test_router_with_capacity() -> None:
    """Who comes late is left out: no gradient shows it."""

    def route(m: Any, x: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), 2)
        has_room = ((chosen.cumsum(0) * chosen).sum(-1, keepdim=True) <= 1).double()
        experts = torch.stack([m.one(x), m.two(x)], 1)
        return x + has_room * ((weights * chosen).unsqueeze(-1) * experts).sum(1)

    model = Model(route, router=nn.Linear(4, 2), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    report = enn.check(model, features(6))
    assert of_kind(report, "mixing") == ["Model"]
    assert "between the output of two (Linear) and the output of Model" in str(report)


def test_mixing_between_two_calls_of_a_layer() -> None:
    model = Model(lambda m, x: m.a(m.a(x).cumsum(0)), a=nn.Linear(4, 4))
    report = enn.check(model, features())
    assert of_kind(report, "mixing") == ["Model"]
    assert "between the output of a (Linear) and the input of a (Linear)" in str(report)


def test_two_places_of_mixing() -> None:
    mean = Model(lambda m, h: h - h.mean(0))
    model = nn.Sequential(nn.Linear(4, 4), mean, nn.Linear(4, 4), nn.Tanh(), deepcopy(mean), nn.Linear(4, 4))
    assert of_kind(enn.check(model, features()), "mixing") == ["1 (Model)", "4 (Model)"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_mixing_inside_a_checkpoint(use_reentrant: bool) -> None:
    model = Model(
        lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=use_reentrant),
        a=nn.Linear(4, 4),
        b=nn.Sequential(nn.Linear(4, 4), Model(lambda m, h: h - h.mean(0))),
    )
    assert of_kind(enn.check(model, features()), "mixing") == ["b.1 (Model)"]


def test_similarities_of_all_samples() -> None:
    report = enn.check(Model(lambda m, x: m.a(x) @ m.a(x).T, a=nn.Linear(4, 2)), features())
    assert "shapes [(5, 5)] for the batch and [(1, 1)] for a sample alone" in str(report)
    assert of_kind(report, "mixing") == ["Model"]


# --- rows that are not samples ---------------------------------------------------------------------------------


def strict(model: nn.Module) -> nn.Module:
    """The model, which takes no module sample by sample of its own accord."""
    return enn.convert(model).per_sample(escalate=False)


def test_folded_batch() -> None:
    model = Model(lambda m, x: m.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]), a=nn.Linear(4, 2))
    report = enn.check(model, torch.randn(3, 5, 4))
    assert report.ok
    assert "Model runs sample by sample, as a (Linear): input has shape (15, 4)" in str(report)
    report = enn.check(strict(model), torch.randn(3, 5, 4))
    assert of_kind(report, "layer") == ["a (Linear)"]
    assert "(15, 4), 15 rows in dimension 0 (folded batch of 3 x 5)" in str(report)
    assert "the rows were not compared" in str(report)


def test_every_layer_that_complains_is_named() -> None:
    def fold(m: Any, x: Tensor) -> Tensor:
        return m.c(m.b(m.a(x.flatten(0, 1))).unflatten(0, x.shape[:2]) + m.p(torch.arange(x.shape[1])))

    model = Model(fold, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), p=nn.Embedding(9, 4))
    assert of_kind(enn.check(strict(model), torch.randn(3, 3, 4)), "layer") == [
        "a (Linear)",
        "b (Linear)",
        "p (Embedding)",
    ]


def positions(index: Callable[[int], Tensor], join: Callable[..., Tensor] = torch.add) -> nn.Module:
    return Model(lambda m, w: join(m.e(w), m.p(index(w.shape[1]))), e=nn.Embedding(9, 4), p=nn.Embedding(9, 4))


def test_positions_as_many_as_samples() -> None:
    assert enn.check(positions(torch.arange), words(5, 3)).ok
    assert enn.check(positions(torch.arange), words(5, 5)).ok
    report = enn.check(strict(positions(torch.arange)), words(5, 5))
    assert of_kind(report, "layer") == ["p (Embedding)"]
    assert "index.unsqueeze(0)" in str(report)


BACKWARDS = torch.arange(9).flip(0)


def added_unseen(x: Tensor, positions: Tensor) -> Tensor:
    """The sum, by an operation of which no rule sees that the two are broadcast."""
    return x + positions.expand_as(x)


def backwards() -> nn.Module:
    """Positions by an index that no forward makes and no module holds."""
    return positions(lambda n: BACKWARDS[-n:], added_unseen)


def test_positions_that_no_rule_sees() -> None:
    assert enn.check(backwards(), words(5, 5)).ok  # it goes sample by sample
    report = enn.check(strict(backwards()), words(5, 5))
    (problem,) = report.problems
    assert (problem.kind, problem.where) == ("rows", "p (Embedding)")
    assert "its input has shape (5,) for the batch and for a sample alone" in str(problem)
    assert "the rows of p.weight differ from the sample-by-sample loop" in str(problem)
    assert report.errors["p.weight"] > 0.1
    assert report.errors["e.weight"] < 1e-12


# --- parameters ------------------------------------------------------------------------------------------------


def test_parameters_used_outside_of_their_modules() -> None:
    def outside(m: Any, x: Tensor) -> Tensor:
        return F.linear(m.a(x), m.a.weight) + m.b(x) * m.b.bias + m.c(x)

    model = Model(outside, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    assert enn.check(model, features()).ok
    report = enn.check(strict(model), features())
    assert set(of_kind(report, "outside")) == {"a.weight", "b.bias"}
    assert "also used outside of its module" in str(report)


def test_parameters_never_used_are_a_note() -> None:
    model = Model(lambda m, x: m.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4).requires_grad_(False))
    report = enn.check(model, features())
    assert report.ok
    assert any("never used: b.weight, b.bias;" in note for note in report.notes)
    assert "c.weight" not in str(report)
    assert set(report.errors) == {"a.weight", "a.bias"}


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ExpandedWrong(enn.Expanded, Wrong):
    """Its output is right, its rows are twice too large."""

    def expanded_forward(self, x: Tensor) -> Tensor:
        weight = self.expanded("weight")
        return x * (2 * weight - weight.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_differ_from_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, Wrong, ExpandedWrong)
    model = nn.Sequential(nn.Linear(4, 4), Wrong()).to(dtype)
    report = enn.check(model, features().to(dtype))
    assert of_kind(report, "rows") == ["1.weight"]
    if dtype in (torch.float64, torch.float32):  # below, a part of the gradient is measured by the whole
        assert report.errors["1.weight"] == pytest.approx(1)
    assert max(report.errors["0.weight"], report.errors["0.bias"]) <= report.tolerance
    assert report.dtype is dtype
    assert "the rows of 1.weight differ from the sample-by-sample loop (by " in str(report)


def test_rows_that_differ_where_rounding_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tie the last bits change the gradient by all of itself; that makes it no rounding error."""
    monkeypatch.setitem(EXPANDED, Wrong, ExpandedWrong)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.head = Wrong(), nn.Linear(4, 3)
            nn.init.ones_(self.wrong.weight)

        def forward(self, x: Tensor) -> Tensor:
            x = self.wrong(x)
            return self.head(x * (x >= 1))

    report = enn.check(Tied(), torch.randint(0, 2, (5, 4)).float())
    assert of_kind(report, "rows") == ["wrong.weight"]


# --- randomness ------------------------------------------------------------------------------------------------


def test_what_a_comparison_draws_is_no_chance_of_the_models() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    assert enn.check(Scale(), features(), loss=squared).notes == ()


def test_what_rounding_is_measured_by_is_no_chance_of_the_models() -> None:
    def slope_of_the_mean(m: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).mean(), x, create_graph=True)
        return slope[:, 1].square()

    report = enn.check(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), features(), loss=slope_of_the_mean)
    assert not any("random numbers" in note for note in report.notes)
    assert not report.ok


def test_dropout_is_a_note() -> None:
    for layer in (nn.Dropout(0.2), Model(lambda m, h: F.dropout(h, 0.2, m.training))):
        model = nn.Sequential(nn.Linear(4, 50), layer, nn.Linear(50, 2))
        assert any("dropout was switched off" in note for note in enn.check(model, features()).notes)
        assert enn.check(model.eval(), features()).notes == ()


@pytest.mark.parametrize("mix", [False, True])
def test_other_random_numbers_are_a_note(mix: bool) -> None:
    noise = Model(lambda m, h: h + torch.randn_like(h) + random.random() + np.random.random())  # noqa: NPY002
    model = nn.Sequential(nn.Linear(4, 4), noise, nn.Linear(4, 2))
    if mix:
        model.insert(1, Model(lambda m, h: h - h.mean(0)))
    report = enn.check(model, features())
    assert of_kind(report, "mixing") == (["1 (Model)"] if mix else [])
    assert report.ok is not mix
    assert report.errors
    assert any("(Model) draws random numbers" in note for note in report.notes)


def test_random_numbers_out_of_nowhere() -> None:
    generator = random.Random(1)
    model = nn.Sequential(nn.Linear(4, 4), Model(lambda m, h: h * generator.random()))
    report = enn.check(model, features())
    assert of_kind(report, "random") == ["1 (Model)"]
    assert "two runs from the same random state differ" in str(report)


def test_state_from_one_call_to_the_next() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = nn.Sequential(nn.Linear(4, 4), Counts())
    report = enn.check(model, features())
    assert of_kind(report, "random") == ["1 (Counts)"]
    assert "keep no state" in str(report)
    assert model[1].calls == 0


# --- what cannot be checked ------------------------------------------------------------------------------------


def test_conversion_errors_are_problems() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.SyncBatchNorm(3), nn.Linear(3, 3))
    report = enn.check(model, features())
    assert of_kind(report, "conversion") == ["0 (LazyLinear)", "1 (SyncBatchNorm)"]
    assert "use GroupNorm" in str(report)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 4)
    model.stream = (each for each in ())
    report = enn.check(model, features())
    assert of_kind(report, "conversion") == ["Linear"]
    assert "it cannot be copied (TypeError: cannot pickle 'generator' object)" in str(report)


@pytest.mark.parametrize("output", [lambda h: h.mean(), lambda h: None], ids=["loss", "nothing"])
def test_an_output_without_samples(output: Callable[[Tensor], Any]) -> None:
    report = enn.check(Model(lambda m, x: output(m.a(x)), a=nn.Linear(4, 4)), features())
    assert of_kind(report, "run") == ["Model"]
    assert "has one row per sample" in str(report)
    assert "samples stand second" not in str(report)


def test_samples_second_as_many_as_positions() -> None:
    model = Model(lambda m, x: m.head(m.lstm(x)[0][-1]), lstm=nn.LSTM(4, 5), head=nn.Linear(5, 3))
    report = enn.check(model, torch.randn(6, 6, 4))
    words = r"\(\(6, 3\)\) has one row per sample: they have the same shapes .*per_sample\(batch_first=False\)\. Ret"
    assert re.search(words, str(report))
    assert enn.check(enn.convert(model).per_sample(batch_first=False), torch.randn(6, 6, 4)).ok


def test_a_loss_beside_the_output_is_left_out() -> None:
    model = Model(lambda m, x: {"loss": m.a(x).mean(), "logits": m.a(x)}, a=nn.Linear(4, 4))
    report = enn.check(model, features())
    assert report.ok
    assert any("left out" in note for note in report.notes)


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), Model(lambda m, h: h - h.mean(0)))
    assert "2.bias, 3.weight, 3.bias and 4 more differ" in str(enn.check(model, features()))


def test_gradients_that_are_not_finite() -> None:
    """A comparison of NaN with NaN says nothing."""
    x = features()
    report = enn.check(nn.Linear(4, 2), torch.full_like(x, torch.nan))
    assert [(problem.kind, problem.where) for problem in report.problems] == [("rows", "weight")]
    assert "weight are not finite for any sample, so they tell nothing" in str(report)
    x[1] = torch.nan
    report = enn.check(nn.Linear(4, 2), x)
    assert report.ok
    assert "the gradients of 1 sample(s) are not finite" in report.notes[0]


def test_a_frozen_model() -> None:
    report = enn.check(nn.Linear(4, 4).requires_grad_(False), features())
    assert report.ok
    assert any("no output depends on a parameter" in note for note in report.notes)


def test_bags_by_offsets() -> None:
    model = nn.EmbeddingBag(9, 4)
    assert enn.check(model, words(5, 3)).ok
    report = enn.check(model, words(1, 10)[0], torch.tensor([0, 3, 5]))
    assert "the model counts 3 samples, its first tensor has 10 rows" in str(report)


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(enn.PerSampleError, match=r"the inputs hold 1 sample\(s\); wanted 2 or more"):
        enn.check(nn.Linear(4, 4), features(1))


def test_what_only_per_sample_mode_raises() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if any(isinstance(module, enn.Linear) for module in self.modules()):
                raise KeyError("oh")
            return self.a(x)

    model = Fails()
    model.a = nn.Linear(4, 4)
    report = enn.check(model, features())
    assert of_kind(report, "run") == ["Fails"]
    assert "in per-sample mode it raises KeyError" in str(report)


# --- the report, and what must not change ------------------------------------------------------------------------


def test_the_report_reads_well() -> None:
    text = str(enn.check(between(MIXING["centred"]), features()))
    first, *lines = text.splitlines()
    assert first == "check: 2 reason(s) not to trust the per-sample gradients:"
    assert [line[:5] for line in lines] == ["  1. ", "  2. "]
    assert lines[1].endswith("Solve the problem above first.")


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_under_a_context_of_the_users(context: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).float()
    with context():
        report = enn.check(model, features().float())
    assert report.ok, str(report)
    assert len(report.errors) == 4


def everything_of(model: nn.Module) -> list[Any]:
    """What identifies a model's state, by name; tensors as copies."""
    state: list[Any] = [torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled()]
    for name, module in model.named_modules():
        hooks = [len(each) for each in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)]
        recorder = id(vars(module).get("_recorder"))
        state.append((name, type(module), module.training, hooks, sorted(vars(module)), recorder))
        state.append(list(vars(module).get("calls", [])))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        rows = getattr(tensor, "grad_sample", None)
        state.append((name, id(tensor), tensor.tolist(), tensor._version, tensor.requires_grad))
        state.append((id(tensor.grad), None if tensor.grad is None else tensor.grad.tolist()))
        state.append((id(rows), None if rows is None else rows.tolist()))
    return state


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.fails_on = 0
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        if len(x) == self.fails_on:
            raise KeyboardInterrupt
        self.seen += 1
        return F.dropout(x, 0.5) * random.random()


@pytest.mark.parametrize("fails_on", [0, 5, 1], ids=["works", "fails", "fails_alone"])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_nothing_is_changed(fails_on: int, on: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Stateful(), nn.LayerNorm(4).eval(), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    model = enn.convert(module).per_sample(on, loss_reduction="sum")
    model[3].register_forward_hook(lambda module, args, output: 2 * output)
    x = features()
    model(x).sum().backward()
    model[1].fails_on = fails_on
    before, inputs = everything_of(model), x.clone()
    if fails_on:
        with pytest.raises(KeyboardInterrupt):
            enn.check(model, x)
    else:
        assert enn.check(model, x).ok
    assert everything_of(model) == before
    assert torch.equal(x, inputs)


def test_in_the_middle_of_a_pass() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((features(),))
    loss = total_loss(model, call)
    assert enn.check(model, features(3)).ok
    loss.backward()
    assert_close_rows(rows_of(model), loop(module, call, 5))


# --- the whole training step, by its loss ------------------------------------------------------------------------


class Vae(nn.Module):
    """Methods in place of a forward, and a parameter of its own."""

    def __init__(self, use: Callable[[Tensor], Tensor] = enn.expanded) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 6), nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.randn(3))
        self.use = use

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.down(x).chunk(2, -1)
        return mean + self.use(self.shift), log_std

    def elbo(self, x: Tensor) -> Tensor:
        mean, log_std = self.encode(x)
        decoded = self.up(mean + log_std.exp() * torch.randn_like(mean))
        divergence = 0.5 * (mean**2 + (2 * log_std).exp() - 1 - 2 * log_std).sum(-1)
        return (decoded - x).square().sum(-1) + divergence

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        with enn.one_pass(self, len(batch[0])):
            return (batch[1] * self.elbo(batch[0])).mean()


def squared(m: Any, x: Tensor) -> Tensor:
    return m(x).square().mean()


@pytest.mark.parametrize("reduce", [lambda losses: losses, torch.mean], ids=["losses", "mean"])
def test_methods_and_a_parameter_of_the_models_own(reduce: Callable[[Tensor], Tensor]) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        with enn.one_pass(m, len(x)):
            return reduce(m.elbo(x))

    report = enn.check(Vae(), features(), loss=step)
    assert report.ok, str(report)
    assert set(report.errors) == {"shift", "down.weight", "down.bias", "up.weight", "up.bias"}
    assert report.notes == ("random numbers were the same in all runs, so that a sample alone can be compared.",)
    report = enn.check(Vae(use=lambda shift: shift), features(), loss=step)
    assert of_kind(report, "outside") == ["shift"]
    assert "also used outside of its module" in str(report)


def test_an_expanded_parameter_that_broadcasts() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    x = torch.randn(5, 4)
    report = str(enn.check(Scaled(), x, loss=lambda m, x: (m(x) * enn.expanded(m.scale)).squeeze(1)))
    assert "differs from the plain one (shapes [(5, 5)] instead of [(5,)])" in report
    assert "give it shape (1,)" in report
    report = str(enn.check(Scaled(), x, loss=lambda m, x: (m(x) * enn.expanded(m.scale)).square().mean()))
    assert "the rows of scale differ" in report
    assert "give it shape (1,)" in report
    assert enn.check(Scaled(), x, loss=lambda m, x: (m(x) * enn.expanded(m.scale).view(-1, 1)).square().sum(1)).ok


def test_a_method_without_one_pass() -> None:
    class Shifted(Vae):
        def elbo(self, x: Tensor) -> Tensor:
            return self.up(x[:, :3] + self.use(self.shift)).square().sum(-1)

    report = enn.check(Shifted(), features(), loss=Shifted.elbo)
    assert of_kind(report, "outside") == ["expanded(weight)"]
    assert "Call the model first, or use it within one_pass" in str(report)


def test_training_step() -> None:
    batch = (features(), torch.rand(5))
    report = enn.check(Vae(), batch, 0, loss=Vae.training_step)
    assert report.ok, str(report)
    assert len(report.errors) == 5
    assert enn.check(Vae(), batch, number=0, loss=Vae.training_step).ok
    assert enn.check(enn.convert(Vae()).per_sample(), batch, 0, loss=Vae.training_step).ok


def test_weights_in_the_loss() -> None:
    def step(m: Any, x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
        with enn.one_pass(m, len(x)):
            return m(x).square().mean() + 0.1 * use(m.weight).square().sum((-2, -1)).mean()

    assert enn.check(nn.Linear(4, 2), features(), enn.expanded, loss=step).ok
    report = enn.check(nn.Linear(4, 2), features(), lambda weight: weight, loss=step)
    assert of_kind(report, "outside") == ["weight"]


def test_a_weight_used_by_a_function() -> None:
    def step(m: Any, x: Tensor, y: Tensor, linear: Callable[..., Tensor], use: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = m.enc(x)
        return F.cross_entropy(linear(hidden, use(m.head.weight)), y, reduction="none")

    model, y = Model(lambda m, x: x, enc=nn.Linear(4, 3), head=nn.Linear(3, 2)), torch.randint(2, (5,))
    report = enn.check(model, features(), y, F.linear, lambda weight: weight, loss=step)
    assert of_kind(report, "outside") == ["head.weight"]
    report = enn.check(model, features(), y, linear=enn.functional.linear, use=enn.expanded, loss=step)
    assert report.ok, str(report)
    assert any("never used: head.bias;" in note for note in report.notes)


@pytest.mark.parametrize("reduce", [lambda losses: losses, torch.mean], ids=["losses", "mean"])
def test_contrastive_loss(reduce: Callable[[Tensor], Tensor]) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        codes = F.normalize(m(x), dim=-1)
        return reduce(F.cross_entropy(codes @ codes.T, torch.arange(len(x)), reduction="none"))

    report = enn.check(nn.Linear(4, 3), features(), loss=step)
    assert of_kind(report, "mixing") == ["the loss"]
    where = "between the output of Linear and the output of the loss"
    assert f"the result for a sample depends on the other samples, {where}" in str(report)
    if reduce is torch.mean:
        assert "of the samples' own losses the mean is" in str(report)
        assert "the rows were not compared" in str(report)


def test_mixing_inside_the_model_by_a_scalar_loss() -> None:
    report = enn.check(between(MIXING["centred"]), features(), loss=squared)
    assert of_kind(report, "mixing") == ["Model"]
    assert "between the output of a (Linear) and the input of b (Linear)" in str(report)
    report = enn.check(between(MIXING["in_the_gradient_only"]), features(), loss=squared)
    assert "the rows of a.weight, a.bias differ from the sample-by-sample loop" in str(report)
    assert "Return the losses, (B,), from the function" in str(report)


def test_the_mean_for_the_sum_and_the_sum_for_the_mean() -> None:
    def step(m: Any, x: Tensor, reduction: str) -> Tensor:
        return F.mse_loss(m(x), x, reduction=reduction)

    model = enn.convert(nn.Linear(4, 4)).per_sample(loss_reduction="sum")
    assert enn.check(model, features(), "sum", loss=step).ok
    report = enn.check(model, features(), "mean", loss=step)
    (problem,) = report.problems
    assert (problem.kind, problem.where) == ("loss", "the loss")
    assert "it is the mean of the samples' losses, and loss_reduction is 'sum'" in str(problem)
    assert max(report.errors.values()) < 1e-12  # the rest is right
    (problem,) = enn.check(nn.Linear(4, 4), features(), "sum", loss=step).problems
    assert 'Say per_sample(loss_reduction="sum"), or return the mean.' in str(problem)


def test_losses_that_cancel() -> None:
    """A critic's: their mean is nearly nothing beside each of them."""
    x = torch.cat([y := features(4), -y])
    assert enn.check(nn.Linear(4, 1, bias=False), x, loss=lambda m, x: m(x).mean()).ok


def looked_up(m: Any, w: Tensor) -> Tensor:
    positions = m.p(torch.arange(w.shape[1]).unsqueeze(0))
    return (m.e(w) + positions).square().mean((1, 2))


def test_positions_in_a_submodule_called_alone() -> None:
    model = Model(lambda m, w: w, e=nn.Embedding(9, 4), p=nn.Embedding(9, 4))
    report = enn.check(model, words(), loss=looked_up)
    assert of_kind(report, "rows") == ["the loss"]
    assert "the parameters have 6 rows, those of several forwards; wanted 5 rows, one for each sample" in str(report)

    def step(m: Any, w: Tensor) -> Tensor:
        with enn.one_pass(m, len(w)):
            return looked_up(m, w)

    assert enn.check(model, words(), loss=step).ok


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_generator_step(inside: bool, frozen: bool) -> None:
    critic = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).requires_grad_(not frozen)
    model = Model(lambda m, z: m.g(z), g=nn.Linear(2, 4), **({"d": critic} if inside else {}))
    step = (lambda m, z: -m.d(m(z)).mean()) if inside else (lambda m, z: -critic(m(z)).mean())
    z = torch.randn(5, 2)
    before = everything_of(critic)
    report = enn.check(model, z, loss=step)
    assert report.ok, str(report)
    assert len(report.errors) == (6 if inside and not frozen else 2)
    assert everything_of(critic) == before


def test_derivatives_by_the_inputs() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (slope[:, 1] - curvature[:, 0]).square().mean()

    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    report = enn.check(model, torch.rand(6, 2, requires_grad=True), loss=step)
    assert report.ok, str(report)
    assert len(report.errors) == 3
    assert any("never used: 2.bias" in note for note in report.notes)


@pytest.mark.parametrize("fails_on", [0, 5, 1], ids=["works", "fails", "fails_alone"])
def test_a_step_changes_nothing(fails_on: int) -> None:
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), Stateful(), nn.Linear(4, 2))).per_sample()
    x = features()
    model(x).sum().backward()
    before, inputs = everything_of(model), x.clone()

    def step(m: Any, x: Tensor) -> Tensor:
        if len(x) == fails_on:
            raise KeyboardInterrupt
        return squared(m, x + torch.randn_like(x)) * random.random()

    if fails_on:
        with pytest.raises(KeyboardInterrupt):
            enn.check(model, x, loss=step)
    else:
        assert of_kind(enn.check(model, x, loss=step), "random") == ["the loss"]
    assert everything_of(model) == before
    assert torch.equal(x, inputs)


def test_a_loss_that_fails() -> None:
    def step(m: Any, x: Tensor, fails: Callable[[Any, Tensor], bool]) -> Tensor:
        if fails(m, x):
            raise KeyError("oh")
        return squared(m, x)

    model = nn.Linear(4, 2)
    with pytest.raises(KeyError, match="oh"):
        enn.check(model, features(), lambda m, x: True, loss=step)
    report = enn.check(model, features(), lambda m, x: isinstance(m, enn.Linear), loss=step)
    assert of_kind(report, "run") == ["the loss"]
    assert "in per-sample mode it raises KeyError: 'oh'" in str(report)
    report = enn.check(model, features(), lambda m, x: len(x) == 1, loss=step)
    assert of_kind(report, "run") == ["the loss"]
    assert "on sample 0 alone it raises KeyError: 'oh'" in str(report)
    with pytest.raises(enn.PerSampleError, match=r"the inputs hold 1 sample\(s\); wanted 2 or more"):
        enn.check(model, features(1), loss=squared)


@pytest.mark.parametrize("returned", [lambda m, x: m(x), lambda m, x: (m(x).sum(), x), lambda m, x: None])
def test_a_function_that_returns_no_losses(returned: Callable[..., Any]) -> None:
    report = enn.check(nn.Linear(4, 2), features(), loss=returned)
    assert of_kind(report, "run") == ["the loss"]
    assert "wanted the losses, (5,), or their sum or mean, ()" in str(report)


@pytest.mark.parametrize("loss", [lambda m, x: x.sum(-1), lambda m, x: m(x).sum(-1).detach()])
def test_a_loss_that_depends_on_no_parameter(loss: Callable[..., Any]) -> None:
    report = enn.check(nn.Linear(4, 2), features(), loss=loss)
    assert of_kind(report, "loss") == ["the loss"]
    assert "depends on no parameter that requires gradients" in str(report)
    report = enn.check(nn.Linear(4, 2).requires_grad_(False), features(), loss=loss)
    assert report.ok
    assert any("no output depends on a parameter" in note for note in report.notes)


def test_a_loss_that_is_a_whole_step() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses = model(x).square().sum()
        losses.backward()
        enn.clip_grad_sample_norms_(model, 1.0)
        return losses.detach()

    model = nn.Linear(4, 2)
    with pytest.raises(enn.PerSampleError, match=r"^the loss: it calls backward\(\)"):
        enn.check(model, features(), loss=loss)
    assert model.weight.grad is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_loss_that_is_cut_off_behind_a_backward(error: type[BaseException]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model(x).sum().backward()
        raise error

    with pytest.raises(error):
        enn.check(nn.Linear(4, 2), features(), loss=loss)


def test_random_numbers_that_are_not_fixed() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return m(x * random.random()).square().mean(1)

    report = enn.check(nn.Linear(4, 2), features(), loss=step)
    assert report.ok, str(report)
    assert any("draws random numbers" in note for note in report.notes)


def test_mixing_by_a_random_order() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return squared(m, 0.7 * x + 0.3 * x[torch.randperm(len(x))])

    assert of_kind(enn.check(nn.Linear(4, 2), features(), loss=step), "mixing") == ["the loss"]


def test_the_weights_of_the_original() -> None:
    """A copy of the model still has the function that was made in it, and so would the loss."""
    model = Model(lambda m, w: m.to_logits(m.emb(w)), emb=nn.Embedding(9, 4))
    model.to_logits = lambda h: h @ model.emb.weight.T
    report = enn.check(model, words())
    assert [problem.kind for problem in report.problems] == ["conversion"]
    assert "to_logits refers to this model" in str(report)
    assert model.emb.weight.grad is None
    linear = nn.Linear(4, 2)
    report = enn.check(linear, features(), loss=lambda m, x: squared(linear, x))
    assert of_kind(report, "outside") == ["weight"]
    assert "weight, bias of the model itself came into" in str(report)


def test_another_model_in_per_sample_mode() -> None:
    critic = enn.convert(nn.Linear(2, 1)).per_sample()
    critic(features()[:, :2]).mean().backward()
    model, z = nn.Linear(4, 2), features()
    before = everything_of(critic)
    report = enn.check(model, z, loss=lambda m, z: critic(m(z)).mean())
    assert of_kind(report, "outside") == ["weight"]
    assert "a parameter of another model, which is in per-sample mode as well" in str(report)
    assert everything_of(critic) == before
    critic.per_sample(False)
    assert enn.check(model, z, loss=lambda m, z: critic(m(z)).mean()).ok


def test_a_mean_over_all_tokens() -> None:
    def step(m: Any, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(m(w).flatten(0, 1), target.flatten(), ignore_index=0)

    model, w = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), words()
    assert enn.check(model, w, w.clamp(min=1), loss=step).ok
    report = enn.check(model, w, torch.tensor([[1, 2, 3]] + 4 * [[1, 0, 0]]), loss=step)
    assert of_kind(report, "mixing") == ["the loss"]
    remedy = r"averaged: class weights, ignore_index and weighted means divide by .* reduction=.none., .* compares"
    assert re.search(remedy, str(report))
    assert "GroupNorm" not in str(report)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def weighted(m: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(m(x), y, WEIGHTS, reduction=reduction)


class WithLoss(nn.Module):
    """As the models of transformers, it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y, WEIGHTS)


def centered(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (m(x) - m(x).mean(0)).square().sum(1)


def test_the_remedy_for_mixing_in_a_loss() -> None:
    """Another one than for mixing in the model, and the one that helps."""
    y = torch.tensor([0, 1, 2, 1, 0])
    cases: list[tuple[nn.Module, Any, str, bool, bool]] = [
        (nn.Linear(4, 3), weighted, "the loss", True, False),
        (nn.Linear(4, 3), centered, "the loss", False, False),
        (WithLoss(), lambda m, x, y: m(x, y), "the loss", True, False),
        (nn.Sequential(nn.Linear(4, 3), Pooling()), weighted, "1 (Pooling)", False, True),
    ]
    for model, loss, where, averages, normalizes in cases:
        (problem, *_) = enn.check(model, features(), y, loss=loss).problems
        assert (problem.kind, problem.where) == ("mixing", where)
        assert ("class weights, ignore_index and weighted means" in problem.text) == averages
        assert ("GroupNorm for BatchNorm" in problem.text) == normalizes
        assert ("compares samples is no sample's own" in problem.text) == (where != "1 (Pooling)")
    assert enn.check(nn.Linear(4, 3), features(), y, loss=lambda *step: weighted(*step, reduction="none").mean()).ok


class Pooling(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def unseen(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x.tril(5)


@pytest.mark.parametrize("samples", [3, 5])
@pytest.mark.parametrize(
    ("is_direct", "kind", "words"),
    [
        (True, "layer", "its input is shared by all"),
        (False, "rows", "its input of shape (1, 5) is shared, so that its output has one row per sample"),
    ],
    ids=["direct", "behind_what_nobody_sees"],
)
def test_the_first_of_a_shared_result(samples: int, is_direct: bool, kind: str, words: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        shared = m.pos(m.ids) if is_direct else unseen(m.pos(m.ids))
        return added_unseen(m.lin(x), shared[0])

    model = Model(forward, lin=nn.Linear(4, 6), pos=nn.Embedding(9, 6))
    model.register_buffer("ids", torch.arange(5).unsqueeze(0))
    for loss in (None, lambda m, x: m(x).square().mean((1, 2))):
        assert enn.check(model, torch.randn(samples, 5, 4), loss=loss).ok  # it goes sample by sample
        report = enn.check(strict(model), torch.randn(samples, 5, 4), loss=loss)
        assert of_kind(report, kind) == ["pos (Embedding)"]
        assert words in str(report)


def test_unordered_positions_by_the_loss() -> None:
    report = enn.check(strict(backwards()), words(5, 5), loss=squared)
    assert of_kind(report, "rows") == ["p (Embedding)"]


def test_where_torch_is_wrong_of_one_sample() -> None:
    """Its BatchNorm in eval mode, on a permuted input: the loop is no judge then, but the batch's gradient is."""

    def forward(m: Any, x: Tensor) -> Tensor:  # (B, 3, 5, 4)
        return m.norm(torch.stack(m.a(x).unbind(1)).permute(1, 3, 0, 2)).contiguous()

    model = Model(forward, a=nn.Linear(4, 4), norm=nn.BatchNorm2d(4)).eval()
    model.norm.running_mean.normal_()
    report = enn.check(model, torch.randn(2, 3, 5, 4))
    assert report.ok, str(report)
    assert re.search(r"for a.weight, a.bias.* the loop took norms in another way, as .*BatchNorm in eval", str(report))
    assert max(report.errors.values()) < 1e-12


def normalized_by_itself(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss / loss.detach()


def with_a_clipped_gradient(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    if output.requires_grad:
        output.register_hook(lambda grad: grad * (0.1 / grad.norm()).clamp(max=1))
    return output.square().sum(1)


@pytest.mark.parametrize("loss", [normalized_by_itself, with_a_clipped_gradient])
def test_gradients_that_the_backward_mixes(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """The rows add up to the gradient of the batch, but a sample's own gradient is another one."""
    report = enn.check(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), features(), loss=loss)
    assert not report.ok
    assert max(report.errors.values()) > 0.1


@pytest.mark.parametrize("reduced", [False, True], ids=["losses", "mean"])
def test_where_torchs_layer_norm_is_wrong(reduced: bool) -> None:
    """Its third derivative, of which a loss of second derivatives is made; rows that are wrong are found still."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))

    def squared_laplacian(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (first,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, 1].sum(), x, create_graph=True)
        losses = (first[:, 0] + second[:, 1]).square()
        return losses.mean() if reduced else losses

    report = enn.check(model, torch.randn(5, 2), loss=squared_laplacian)
    report.raise_for_problems()
    assert "as derivatives of torch's own are wrong: the third ones of LayerNorm" in str(report)
    assert max(report.errors.values()) < 1e-10

    wrong = Model(lambda m, x: m.b(m.norm(m.a(x))), a=enn.Linear(4, 4), norm=enn.LayerNorm(4), b=enn.Linear(4, 1))
    wrong.a.register_forward_hook(lambda m, args, y: 2 * y - y.detach() if getattr(m, "_recorder", None) else y)
    report = enn.check(wrong, torch.randn(5, 4))
    assert of_kind(report, "rows")
    assert "third derivative" not in str(report)


def test_arguments_that_all_samples_share() -> None:
    """A vector, and a matrix whose second dimension is as large as the batch."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor, basis: Tensor) -> Any:
            return self.layer(x * scale + basis.sum(1))

    assert enn.check(Scaled(), torch.randn(5, 3), torch.randn(3), torch.randn(3, 5)).ok


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, y: F.cross_entropy(scores, y),
        lambda scores, y: F.mse_loss(scores, F.one_hot(y, 3).to(scores)),
        lambda scores, y: (scores - F.one_hot(y, 3)).square().sum(1),
    ],
)
def test_labels_that_are_no_argument(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3
    remedy = "Labels and the like are arguments of check"
    assert remedy in str(enn.check(model, x, loss=lambda model, x: loss(model(x), y)))
    assert enn.check(model, x, y, loss=lambda model, x, y: loss(model(x), y)).ok
