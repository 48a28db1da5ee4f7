"""Mixing that large, small or many results hide; and no false alarm where rounding is larger than usual."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.common.rounding import usual_sizes
from expanded_nn.recording.doubt import Pair, Rounding

B, D, C = 6, 8, 4
IS_REFUSED = "some of the samples give other results|another result than sample by sample"


class Mixing(nn.Module):
    """Its samples meet; what it returns hides that."""

    def __init__(
        self, mix: Callable[[Tensor], Tensor], hide: Callable[[Tensor], Tensor], own: bool, classes: int
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, classes)
        self.scale = nn.Parameter(torch.rand(D) + 0.5) if own else 1.0
        self.mix, self.hide = mix, hide

    def forward(self, x: Tensor) -> Tensor:
        return self.hide(self.second(self.mix(self.first(x) * self.scale).tanh()))


def some(y: Tensor, value: float) -> Tensor:
    """All classes but two, which are others in each sample, have that value, as where actions are illegal."""
    return y.masked_fill(y < y.topk(2).values[:, 1:], value)


HIDE = {
    "last_class": lambda y: torch.cat([y[:, :-1], torch.full_like(y[:, :1], -1e4)], 1),
    "most_classes": lambda y: some(y, -1e9),
    "least_number": lambda y: some(y, torch.finfo(y.dtype).min),
    "added": lambda y: y + some(y, -1e4).clamp(max=0).detach(),
    "tiny": lambda y: 1e-7 * y,
    "plain": lambda y: y,
}
MIX = {
    "mean": lambda h: h - h.mean(0),
    "detached": lambda h: h - h.detach().mean(0),
    "little": lambda h: h + 0.02 * h.detach().mean(0),
}


def steps(model: nn.Module, x: Tensor, number: int = 1) -> None:
    for _ in range(number):
        model.zero_grad()
        y = model(x)
        y.where(y.abs() < 1e3, 0).sum(1).mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [False, True], ids=["layers", "own"])
@pytest.mark.parametrize("mix", MIX.values(), ids=MIX)
@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE)
def test_mixing_is_refused_at_the_first_call(
    hide: Callable[[Tensor], Tensor], mix: Callable[[Tensor], Tensor], own: bool, dtype: torch.dtype
) -> None:
    model = enn.convert(Mixing(mix, hide, own, C).to(dtype)).per_sample()
    with pytest.raises(enn.PerSampleError, match=f"{IS_REFUSED}|are in the rows of others"):
        steps(model, 1 + torch.randn(B, D, dtype=dtype))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["layers", "own"])
@pytest.mark.parametrize("mix", [MIX["mean"], MIX["detached"]], ids=["mean", "detached"])
@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE)
def test_mixing_in_bfloat16_is_refused(
    hide: Callable[[Tensor], Tensor], mix: Callable[[Tensor], Tensor], own: bool, autocast: bool
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, x = enn.convert(Mixing(mix, hide, own, C).to(dtype)).per_sample(), 1 + torch.randn(B, D, dtype=dtype)
    refused = pytest.raises(enn.PerSampleError, match=f"{IS_REFUSED}|are in the rows of others")
    with refused, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        steps(model, x, number=4)


def test_mixing_before_a_softmax_of_many_classes() -> None:
    model = enn.convert(Mixing(MIX["detached"], lambda y: y.softmax(-1), False, 20_000).float()).per_sample()
    with pytest.raises(enn.PerSampleError, match=IS_REFUSED):
        steps(model, 1 + torch.randn(B, D, dtype=torch.float32))


class OfLength(nn.Module):
    """It computes with the size of what all samples share, of which a converted model has a copy for each."""

    def __init__(self, hide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.hide = nn.Embedding(5, D), nn.Linear(D, C), hide

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, D)
        shared = self.table(torch.arange(5)[None])
        return self.hide(self.layer(x + shared / len(shared)).mean(1))


@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE)
def test_results_of_another_model_are_found(hide: Callable[[Tensor], Tensor]) -> None:
    plain = OfLength(hide).float()
    model, x = enn.convert(plain).per_sample(), torch.randn(B, 5, D, dtype=torch.float32)
    with pytest.warns(enn.PerSampleWarning, match="sample by sample"):
        torch.testing.assert_close(model(x), plain(x))


class Cancels(nn.Module):
    """All that it returns is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) - (self.weight * x[:, None]).sum(-1)


class Teacher(nn.Module):
    """The divergence of two models that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9)) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        ours, theirs = self.student(x).log_softmax(-1), self.teacher(x.flip(1).flip(1)).softmax(-1)
        return (theirs * (theirs.log() - ours)).sum(-1, keepdim=True)


class Quantized(nn.Module):
    """Rounding decides to which of few numbers some numbers are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h + ((h * 16).round() / 16 - h).detach())  # type: ignore[no-any-return]


class Residual(nn.Module):
    """How far the last step of an iteration has gone: for most samples nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x).tanh()
        return z, 1 - F.cosine_similarity(z, z, dim=-1)


class Unstable(nn.Module):
    """A recurrence that makes differences larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.layer.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = self.layer(x).sin()
        return x


class Ranges(nn.Module):
    """Results from 1e-6 to 1e6."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * torch.linspace(-20, 20, 50, dtype=h.dtype)).exp()


NO_MIXING = [Cancels, Teacher, Quantized, Residual, Unstable, Ranges]


@pytest.mark.parametrize("compiles", [torch.float32, torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("kind", NO_MIXING)
def test_no_false_alarm(kind: Callable[[], nn.Module], compiles: Any) -> None:
    torch.manual_seed(0)
    model = enn.convert(kind().float()).per_sample()
    x = torch.randn(130, 64, dtype=torch.float32)
    if compiles is torch.bfloat16:
        model, x = model.to(compiles), x.to(compiles)
    for size in (130, 7, 64, 2, 33):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=compiles == "autocast"):
                y = model(x[:size])
            (y[0] if isinstance(y, tuple) else y).float().sum(1).mean().backward()
            model.zero_grad()


def test_results_that_rounding_moves_are_not_taken_for_others() -> None:
    layer, x = nn.Linear(D, C), torch.randn(B, D)

    def run(leaves: list[Any]) -> list[Tensor]:
        return [1e-12 * layer(leaves[0]), layer(leaves[0]) - F.linear(x, layer.weight, layer.bias)]

    with torch.no_grad():
        rounding = Rounding(run, [x], layer, run([x]))
        small, noise = run([x])
        assert not rounding.is_exceeded([Pair(0, small, small.clone(), lambda y: y)])
        assert rounding.is_exceeded([Pair(0, small, 1.01 * small, lambda y: y)])
        assert not rounding.is_exceeded([Pair(1, noise, noise + 1e-15, lambda y: y)])


def test_a_forward_that_fails_with_other_numbers_tells_nothing() -> None:
    def fails(leaves: list[Any]) -> list[Tensor]:
        raise ValueError

    x = torch.ones(B)
    assert not Rounding(fails, [x], nn.Identity(), [x]).is_exceeded([Pair(0, x, 2 * x, lambda y: y)])


def test_what_numbers_are_measured_by() -> None:
    x = torch.tensor([[1.0, -2.0, -1e9], [0.5, 4.0, -1e9]])
    assert torch.equal(usual_sizes(x), torch.tensor([[4.0, 4.0, 1e9], [4.0, 4.0, 1e9]]))
    assert torch.equal(usual_sizes(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert torch.equal(usual_sizes(torch.tensor([1.0, float("inf")])), torch.ones(2))
    assert torch.equal(usual_sizes(torch.tensor([3.0])), torch.tensor([3.0]))
    many = torch.full((100, 1000), -1e9)
    many[:, :20] = torch.linspace(-1, 1, 20)
    assert torch.equal(usual_sizes(many)[:, :20], torch.ones(100, 20))
