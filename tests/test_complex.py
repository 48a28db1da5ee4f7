"""Complex parameters: rows are torch's own convention for complex gradients, and count as pairs of real numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from oracle import Call, assert_close, assert_close_rows, loop, rows_of

B = 4
Z = torch.complex128


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: a weight of its own for each of the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 3, dtype=Z))
        self.skip = nn.Conv1d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("bik,iok->bok", torch.fft.rfft(x)[..., :3], self.weight)
        return torch.fft.irfft(low, n=x.shape[-1]) + self.skip(x)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(z(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight - (x * self.weight).mean(0)


def z(*size: int) -> Tensor:
    return torch.randn(*size, dtype=Z)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(3, 4, dtype=Z), nn.Linear(4, 2, dtype=Z, bias=False)), z(B, 3)),
    "linear of positions": lambda: (nn.Linear(3, 2, dtype=Z), z(B, 5, 3)),
    "conv1d": lambda: (nn.Conv1d(4, 2, 3, padding=1, groups=2, dtype=Z), z(B, 4, 5)),
    "conv2d": lambda: (nn.Conv2d(2, 3, 3, stride=2, dtype=Z), z(B, 2, 5, 5)),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(2, 3, 3, dtype=Z), z(B, 2, 5)),
    "spectral": lambda: (nn.Sequential(Spectral(), nn.Flatten(), nn.Linear(24, 2)), torch.randn(B, 2, 8)),
}


def objective(module: nn.Module, call: Call, first: int = 0) -> Tensor:
    y = torch.view_as_real(z) if (z := call.on(module)).is_complex() else z
    return (y.square() + y.sin()).sum()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Call]:
    module, x = CASES[request.param]()
    return module, Call((x,))


def expected_rows(module: nn.Module, call: Call) -> dict[str, Tensor]:
    return loop(module, call, B, objective=objective)


def as_real(rows: dict[str, Tensor]) -> Tensor:
    real = [torch.view_as_real(each) if each.is_complex() else each for each in rows.values()]
    return torch.cat([each.flatten(1) for each in real], 1)


def test_rows(case: tuple[nn.Module, Call]) -> None:
    module, call = case
    model = enn.convert(module).per_sample(loss_reduction="sum")
    objective(model, call).backward()
    expected = expected_rows(module, call)
    assert_close_rows(rows_of(model), expected)
    for name, p in model.named_parameters():
        assert p.grad_sample.dtype == p.dtype
        assert_close(p.grad, expected[name].sum(0))


def test_algebra(case: tuple[nn.Module, Call]) -> None:
    module, call = case
    model = enn.convert(module).per_sample(loss_reduction="sum")
    objective(model, call).backward()
    grads, rows, weights = enn.per_sample_grads(model), expected_rows(module, call), torch.rand(B)
    real = as_real(rows)
    assert_close(grads.norms(), real.norm(dim=1))
    for name, norms in grads.norms(per_parameter=True).items():
        assert_close(norms, as_real({name: rows[name]}).norm(dim=1))
        assert_close(grads[name].flatten(1).norm(dim=1), norms)
        assert_close(grads.sum(weights)[name], torch.tensordot(weights.to(rows[name].dtype), rows[name], 1))
        assert_close(grads.mean()[name], rows[name].mean(0))
        assert_close(grads.var()[name], rows[name].var(0))
    assert_close(grads.gram(), real @ real.t())
    vectors = {name: each[0] for name, each in rows.items()}
    assert_close(grads.matvec(vectors), real @ real[0])


def test_projection_keeps_lengths_on_average() -> None:
    grads = enn.PerSampleGrads({"weight": z(2, 30), "bias": torch.randn(2, 5)})
    projected = grads.project(4000, generator=torch.Generator().manual_seed(0))
    assert_close(projected.norm(dim=1), grads.norms(), 0.1)


@pytest.mark.parametrize("accumulate_grad", [True, False])
def test_clipping(case: tuple[nn.Module, Call], accumulate_grad: bool) -> None:
    module, call = case
    model = enn.convert(module).per_sample(loss_reduction="sum", accumulate_grad=accumulate_grad)
    objective(model, call).backward()
    rows = expected_rows(module, call)
    norms = as_real(rows).norm(dim=1)
    limit = float(norms.median())
    assert_close(enn.clip_grad_sample_norms_(model, limit), norms)
    factors = (limit / norms).clamp(max=1)
    for name, p in model.named_parameters():
        assert_close(p.grad, torch.tensordot(factors.to(p.dtype), rows[name], 1))


def test_second_derivatives() -> None:
    module, x = nn.Linear(3, 2, dtype=Z), z(B, 3)

    def penalty(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        (x,) = (each.detach().requires_grad_() for each in call.args)
        (by_input,) = torch.autograd.grad(objective(module, Call((x,))), x, create_graph=True)
        return torch.view_as_real(by_input).square().sum()

    model = enn.convert(module).per_sample(loss_reduction="sum")
    penalty(model, Call((x,))).backward()
    assert_close_rows(rows_of(model), loop(module, Call((x,)), B, objective=penalty))


def test_compiled() -> None:
    module, x = nn.Linear(3, 2, dtype=Z), z(B, 3)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    objective(torch.compile(model, backend="aot_eager"), Call((x,))).backward()
    assert_close_rows(rows_of(model), expected_rows(module, Call((x,))))


def test_check(case: tuple[nn.Module, Call]) -> None:
    module, call = case
    enn.check(module, *call.args).raise_for_problems()


def test_empty_batch(case: tuple[nn.Module, Call]) -> None:
    module, call = case
    if any(isinstance(each, Spectral) for each in module.modules()):
        module, call = Mixing(), Call((z(B, 3),))  # torch has no Fourier transform of nothing
    model = enn.convert(module).per_sample()
    objective(model, Call((call.args[0][:0],))).backward()
    for p in model.parameters():
        assert p.grad_sample.shape == (0, *p.shape)
        assert p.grad_sample.dtype == p.dtype
    assert enn.per_sample_grads(model).norms().shape == (0,)


def test_samples_that_mix_are_refused() -> None:
    with pytest.raises(enn.PerSampleError, match=r"Mixing.*sample by sample"):
        enn.convert(nn.Sequential(Mixing())).per_sample()(z(B, 3))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [Z, torch.float64, torch.float32], ids=str)
def test_groups_in_channels_last(samples: int, dtype: torch.dtype) -> None:
    """Torch's own gradient of grouped weights is wrong for an input of such strides."""
    module = nn.Conv2d(6, 4, 3, groups=2, dtype=dtype).to(memory_format=torch.channels_last)
    call = Call((torch.randn(samples, 6, 5, 4, dtype=dtype).to(memory_format=torch.channels_last),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    objective(model, call).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    assert_close_rows(rows_of(model), loop(module, call, samples, objective=objective), tolerance)
