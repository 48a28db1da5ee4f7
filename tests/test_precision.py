"""How exact rows, norms and clipped sums are in float32, bfloat16 and float16; bounds follow from the dtype.

The reference is always the plain loop in float64, of the model and the inputs as they are after rounding. What
benchmarks/precision.py prints for a table is asserted here.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.core import cost
from oracle import Call, loop, relative_error

PRECISION = Path(__file__).parent.parent / "benchmarks" / "precision.py"
HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
SINGLE = torch.finfo(torch.float32).eps


def benchmark() -> Any:
    """The script as a module, wherever the tests are run from."""
    if "precision" not in sys.modules:
        spec = importlib.util.spec_from_file_location("precision", PRECISION)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["precision"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["precision"])
    return sys.modules["precision"]


@pytest.fixture(autouse=True)
def single_precision_by_default() -> None:
    torch.set_default_dtype(torch.float32)


# --- whole models ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("workload", benchmark().WORKLOADS, ids=lambda workload: workload.name)
def test_models(workload: Any, dtype: torch.dtype) -> None:
    errors, eps = benchmark().measure(workload, dtype, batch=8), torch.finfo(dtype).eps
    # Each number passes through a dozen or two roundings, of eps / 2 each, which add up like the root of their number;
    # in attention a softmax of products grows them. The plain loop in the same dtype fares no better.
    assert errors.rows <= 24 * eps
    assert errors.rows <= 1.5 * errors.plain_rows + eps
    # | ||r|| - ||e|| | <= ||r - e||, and the squares are added up in float32.
    assert errors.norms <= errors.rows + 8 * SINGLE
    # The clipped sum is rounded once more, to the dtype of `.grad`, and so are the factors of its product.
    assert errors.clipped <= 1.5 * errors.plain_clipped + 2 * eps


def test_the_table_of_the_benchmark() -> None:
    lines = benchmark().table(batch=2, dtypes=(torch.float32,)).splitlines()
    assert len(lines) == 2 + len(benchmark().WORKLOADS)
    assert all(line.count("|") == lines[0].count("|") for line in lines)


# --- numbers that half precision cannot hold --------------------------------------------------------------------


def squared(model: nn.Module, call: Tensor, scale: float) -> None:
    (model(call) * scale).sum().backward()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[float], Tensor]]] = {
    "outer": (lambda: nn.Linear(64, 64, bias=False), lambda a: torch.full((2, 64), a)),
    "outer_over_positions": (lambda: nn.Linear(64, 64, bias=False), lambda a: torch.full((2, 3, 64), a)),
    "dense": (lambda: nn.Linear(8, 8, bias=False), lambda a: torch.full((2, 32, 8), a)),
    "patches": (lambda: nn.Conv2d(8, 32, 3, bias=False), lambda a: torch.full((2, 8, 4, 4), a)),
    "one_hot": (lambda: nn.Embedding(99, 32), lambda a: torch.tensor([[1, 2, 2, 5], [7, 7, 7, 7]])),
    "norm": (lambda: nn.LayerNorm(64, bias=False), lambda a: torch.arange(-32, 32).expand(2, 64) * a),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def stepped(kind: str, dtype: torch.dtype, a: float, scale: float) -> tuple[Any, dict[str, Tensor]]:
    """A model of rows of one kind after a backward, and what the rows are in float64."""
    makes, gives = KINDS[kind]
    module, x = makes().to(dtype), gives(a)
    x = x.to(dtype) if x.is_floating_point() else x
    model = enn.convert(module).per_sample(loss_reduction="sum")
    squared(model, x, scale)
    exact = loop(
        module.double(),
        Call((x.double() if x.is_floating_point() else x,)),
        2,
        objective=lambda module, call, first: (call.on(module) * scale).sum(),
    )
    return model, exact


RANGES = [pytest.param(30.0, 8.0, id="large"), pytest.param(2.0**-10, 2.0**-9, id="small")]


@halves
@each_kind
@pytest.mark.parametrize(("a", "scale"), RANGES)
def test_norms_are_accumulated_in_float32(kind: str, dtype: torch.dtype, a: float, scale: float) -> None:
    """Squares of rows of a norm above 256 or below 2e-4 are none of float16's numbers; the norms are right."""
    model, exact = stepped(kind, dtype, a, scale)
    wanted = exact["weight"].flatten(1).norm(dim=1)
    # float16 has no precision of its own below 6e-5, where the smallest number is 6e-8
    allowed = 4 * torch.finfo(dtype).eps + float(wanted.min() < 1e-2) * 0.05
    norms = enn.per_sample_grads(model).norms()
    assert norms.dtype == torch.float32
    assert relative_error(norms, wanted) <= allowed
    assert relative_error(enn.clip_grad_sample_norms_(model, 1.0), wanted) <= allowed


@halves
@each_kind
@pytest.mark.parametrize(("a", "scale"), RANGES)
def test_norm_of_the_rows_as_of_any_tensor(kind: str, dtype: torch.dtype, a: float, scale: float) -> None:
    """`torch.linalg.vector_norm` of a dense tensor in half precision adds up in float32; so does that of factors."""
    model, _ = stepped(kind, dtype, a, scale)
    rows = model.weight.grad_sample
    norms = rows.flatten(1).norm(dim=1)
    wanted = torch.as_tensor(rows.clone().float().cpu().numpy()).flatten(1).norm(dim=1).to(dtype)
    assert norms.dtype == dtype
    assert norms.isfinite().all()
    assert relative_error(norms, wanted) <= 4 * torch.finfo(dtype).eps


@halves
@each_kind
def test_clipped_sum_with_a_small_factor(kind: str, dtype: torch.dtype) -> None:
    """The factor is 1e-6 and less; in float16 it would be a number of one or two bits, or zero."""
    model, exact = stepped(kind, dtype, 30.0, 8.0)
    rows = exact["weight"]
    norms = rows.flatten(1).norm(dim=1)
    limit = float(norms.max()) * 1e-6
    enn.clip_grad_sample_norms_(model, limit)
    wanted = torch.tensordot((limit / norms).clamp(max=1), rows, 1)
    # what float16 cannot hold of the result itself is its own: half of its smallest number, 3e-8, for each entry
    own = 3e-8 * wanted.ne(0).sum() ** 0.5 / wanted.norm() if dtype == torch.float16 else 0.0
    assert relative_error(model.weight.grad, wanted) <= 4 * torch.finfo(dtype).eps + float(own)


@halves
@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("positions", [(), (32,)], ids=["one", "many"])
def test_mean_of_rows_whose_sum_is_too_large(dtype: torch.dtype, positions: tuple[int, ...], materialize: bool) -> None:
    """512 rows of 256: their sum, 131072, is above the largest number of float16, 65504; their mean is not.

    The mean over the samples is the plain gradient, which torch computes without such a sum.
    """
    samples = 512
    module = nn.Linear(8, 8, bias=False).to(dtype)
    x = torch.full((samples, *positions, 8), 256.0 / (positions[0] if positions else 1), dtype=dtype)
    model = enn.convert(module).per_sample(materialize=materialize)
    model(x).sum(tuple(range(1, x.dim()))).mean().backward()
    module(x).sum(tuple(range(1, x.dim()))).mean().backward()
    allowed = 4 * torch.finfo(dtype).eps
    assert relative_error(model.weight.grad, module.weight.grad) <= allowed
    assert relative_error(model.weight.grad_sample[0], torch.full((8, 8), 256.0)) <= allowed
    assert relative_error(enn.per_sample_grads(model).mean()["weight"], torch.full((8, 8), 256.0)) <= allowed
    assert relative_error(model.weight.grad_sample.mean(0), torch.full((8, 8), 256.0)) <= allowed
    assert relative_error(enn.per_sample_grads(model).var()["weight"] + 1, torch.ones(8, 8)) <= allowed


@pytest.mark.parametrize("accumulate_grad", [True, False])
def test_gradients_in_a_dtype_of_their_own(accumulate_grad: bool) -> None:
    """`parameter.grad_dtype`, by which sums of micro-batches are in float32."""
    model = enn.convert(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).bfloat16())
    model.per_sample(accumulate_grad=accumulate_grad)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    sums: dict[str, Tensor] = {}
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.bfloat16)
        model(x).square().sum(1).mean().backward()
        if not accumulate_grad:
            rows = enn.per_sample_grads(model)
            factors = (1.0 / (rows.norms() + 1e-6)).clamp(max=1)
            for name, total in rows.sum(factors.to(torch.bfloat16)).items():
                sums[name] = sums.get(name, 0) + total.float()
            enn.clip_grad_sample_norms_(model, 1.0)
    if accumulate_grad:
        sums = {name: total.float() / 4 for name, total in enn.per_sample_grads(model).sum().items()}  # of means over 4
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert relative_error(parameter.grad, sums[name]) < 4 * torch.finfo(torch.bfloat16).eps


class Router(nn.Module):
    """Sets the dtype of its layer in its forward, as that of the Switch Transformer, here once it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)
        self.layer = self.layer.to(torch.float32)
        return y.softmax(-1)


def test_a_dtype_that_the_forward_sets() -> None:
    module = nn.Sequential(nn.Linear(4, 6), Router(), nn.Linear(3, 2)).double()
    model, x = enn.convert(module).per_sample(loss_reduction="sum"), torch.randn(3, 4, dtype=torch.float64)
    module(x)  # the loop's is in float32 from the start
    for _ in range(2):
        model.zero_grad()
        model(x).sin().sum().backward()
        expected = loop(module, Call((x,)), 3, objective=lambda m, call, first=0: call.on(m).sin().sum())
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad_sample + 0, expected[name]) < 1e-6


@halves
def test_mean_of_clipped_rows_whose_sum_is_too_large(dtype: torch.dtype) -> None:
    model = enn.convert(nn.Linear(64, 64, bias=False).to(dtype)).per_sample()
    model(torch.full((512, 64), 256.0, dtype=dtype)).sum(1).mean().backward()
    enn.clip_grad_sample_norms_(model, 1e9, reduction="mean")
    assert relative_error(model.weight.grad, torch.full((64, 64), 256.0)) <= 4 * torch.finfo(dtype).eps


@halves
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-4])
def test_small_gradients_that_are_scaled_between_backwards(dtype: torch.dtype, size: float) -> None:
    """In float16 products of such numbers are zero, and the numbers themselves are rounded to few digits."""
    model = enn.convert(nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)).per_sample()
    for _ in range(3):
        scores = model(torch.randn(5, 40).to(dtype))
        (size * F.cross_entropy(scores.float(), torch.randint(3, (5,)))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.3)
    assert all(len(rows) == 15 for rows in enn.per_sample_grads(model).values())


@halves
def test_sums_over_many_positions_do_not_stall(dtype: torch.dtype) -> None:
    """In bfloat16 256 + 1 is 256: a sum of 4096 ones, one after the other, would never get further."""
    layers = {
        "weight": (nn.Linear(2, 2), torch.ones(2, 4096, 2)),
        "bias": (nn.Conv1d(2, 2, 1), torch.ones(2, 2, 4096)),
        "norm": (nn.LayerNorm(2), torch.tensor([1.0, -1.0]).expand(2, 4096, 2)),
        "group_norm": (nn.GroupNorm(1, 2), torch.tensor([1.0, -1.0])[:, None].expand(2, 2, 4096)),
    }
    for name, (module, x) in layers.items():
        module, x = module.to(dtype), x.to(dtype)
        model = enn.convert(module).per_sample(loss_reduction="sum")
        model(x).sum().backward()
        exact = loop(module.double(), Call((x.double(),)), 2, objective=lambda m, call, first: call.on(m).sum())
        for p, wanted in zip(model.parameters(), exact.values(), strict=True):
            assert relative_error(p.grad_sample, wanted) <= 4 * torch.finfo(dtype).eps, name


@halves
def test_words_repeated_often_add_up_no_worse_than_in_torch(dtype: torch.dtype) -> None:
    """Torch adds them one after the other, in the dtype of the weight; norms of the factors are better than that."""
    index = torch.zeros(2, 1000, dtype=torch.int64)
    module = nn.Embedding(2000, 4).to(dtype)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    model(index).sum().backward()
    own = loop(module, Call((index,)), 2, objective=lambda m, call, first: call.on(m).sum())["weight"]
    exact = torch.zeros(2, 2000, 4)
    exact[:, 0] = 1000
    assert relative_error(enn.per_sample_grads(model).norms(), exact.flatten(1).norm(dim=1)) <= 4 * SINGLE
    assert relative_error(model.weight.grad_sample, exact) <= relative_error(own, exact) + torch.finfo(dtype).eps


# --- autocast around the use of the rows ------------------------------------------------------------------------


def assert_same_under_autocast(everything: Callable[[], list[Tensor]], tolerance: float) -> None:
    outside = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = everything()
    for one, other in zip(inside, outside, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other.double()) <= tolerance


UNDER_AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (F.conv1d, (3, 4, 8), (6, 4, 3)),
    "conv2d": (lambda x, w: F.conv2d(input=x, weight=w), (3, 4, 6, 6), (6, 4, 3, 3)),
    "conv3d": (F.conv3d, (3, 4, 5, 5, 5), (2, 4, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (3, 4, 8), (4, 6, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (3, 4, 6, 6), (4, 2, 3, 3)),
    "linear": (F.linear, (3, 5, 8), (6, 8)),
    "addmm": (lambda x, w: torch.stack([torch.addmm(w[0], part, w) for part in x]), (3, 5, 8), (8, 8)),
    "baddbmm": (lambda x, w: torch.baddbmm(x, x, w.expand(len(x), 8, 8)), (3, 5, 8), (8, 8)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x @ w, x, x), (3, 5, 8), (8, 8)),
    "masked": (lambda x, w: F.scaled_dot_product_attention(x, x, x, attn_mask=w), (3, 5, 8), (5, 5)),
    "prelu": (F.prelu, (3, 4, 8), (4,)),
    "rfft": (lambda x, w: torch.fft.rfft(x @ w).abs(), (3, 5, 8), (8, 8)),
    "irfft": (lambda x, w: torch.fft.irfft(torch.fft.rfft(x @ w)), (3, 5, 8), (8, 8)),
    "cdist": (lambda x, w: torch.cdist(x @ w, x), (3, 5, 8), (8, 8)),
    "layer norm": (lambda x, w: F.layer_norm(input=x, normalized_shape=(8,), weight=w), (3, 5, 8), (8,)),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (3, 4, 8), (4,)),
    "vecdot": (torch.linalg.vecdot, (3, 5, 8), (8,)),
    "mv": (lambda x, w: torch.stack([torch.mv(part, w) for part in x.float()]), (3, 5, 8), (8,)),
    "cross entropy": (lambda x, w: F.cross_entropy((x @ w).mT, labels(x), reduction="none"), (3, 5, 8), (8, 8)),
    "nll": (lambda x, w: F.nll_loss((x @ w).mT, labels(x), reduction="none"), (3, 5, 8), (8, 8)),
    "l1": (lambda x, w: F.l1_loss(x @ w, torch.ones_like(x @ w), reduction="none"), (3, 5, 8), (8, 8)),
    "logits": (
        lambda x, w: F.binary_cross_entropy_with_logits(x @ w, torch.ones_like(x @ w), reduction="none"),
        (3, 5, 8),
        (8, 8),
    ),
    "poisson": (lambda x, w: F.poisson_nll_loss(x @ w, torch.ones_like(x @ w), reduction="none"), (3, 5, 8), (8, 8)),
    "hinge": (lambda x, w: F.hinge_embedding_loss(x @ w, torch.ones_like(x), reduction="none"), (3, 5, 8), (8, 8)),
    "cosine": (
        lambda x, w: F.cosine_embedding_loss(x[:, 0] @ w, x[:, 1] @ w, torch.ones(len(x)), reduction="none"),
        (3, 5, 8),
        (8, 8),
    ),
}


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(x.shape[:2])


class Operation(nn.Module):
    """One with a parameter of its own, of samples that autocast has made, and of ones that it has not; under `vmap`."""

    def __init__(self, name: str, *, is_low: bool) -> None:
        super().__init__()
        self.operation, _, shape = UNDER_AUTOCAST[name]
        self.weight, self.is_low = nn.Parameter(torch.rand(shape)), is_low

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16() if self.is_low else x
        scale = torch.linalg.matrix_exp(0 * self.weight.flatten()[:4].view(2, 2)).trace()
        return self.operation(x, self.weight * scale / 2)


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("is_low", [True, False])
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_operations_have_the_dtype_that_autocast_gives(name: str, is_low: bool) -> None:
    torch.manual_seed(0)
    plain = Operation(name, is_low=is_low)
    model = enn.convert(nn.Sequential(plain)).per_sample(loss_reduction="sum")
    x = torch.randn(UNDER_AUTOCAST[name][1])
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = model(x), plain(x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * float(expected.detach().abs().max()))
        found.float().square().sum().backward()
    for i in range(len(x)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            alone = plain(x[i : i + 1])
        (wanted,) = torch.autograd.grad(alone.float().square().sum(), [plain.weight])
        far = (model[0].weight.grad_sample[i] - wanted).norm()
        assert far < 0.03 * wanted.norm() + 1e-3


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits])
def test_a_loss_that_the_model_returns_under_autocast(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Its mean over the samples, in a model with a parameter of its own."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.layer(x) * self.scale, y)

    plain, x, y = Returns(), torch.randn(5, 8), torch.rand(5, 3).softmax(1)
    model = enn.convert(plain).per_sample()
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = model(x, y), plain(x, y)
        assert found.dtype == expected.dtype == torch.float32
        assert relative_error(found, expected) < 1e-2
        found.backward()
    for i in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (wanted,) = torch.autograd.grad(plain(x[i : i + 1], y[i : i + 1]), [plain.layer.weight])
        assert relative_error(model.layer.weight.grad_sample[i], wanted) < 2e-2


def test_autocast_does_not_reach_rows_of_several_positions() -> None:
    model = enn.convert(nn.Linear(30, 20, bias=False, dtype=torch.float32)).per_sample(keep_factors=True)
    x = torch.randn(3, 4, 30, dtype=torch.float32)
    model(x).sin().sum((1, 2)).mean().backward()
    grads = enn.per_sample_grads(model)

    def everything() -> list[Tensor]:
        preconditioned = grads.precondition(grads.ekfac(grads.kronecker()), damping=0.1)
        return [grads.flatten(), *grads.var().values(), preconditioned.norms()]

    assert_same_under_autocast(everything, 8 * SINGLE)


@pytest.mark.parametrize("kind", ["outer", "dense", "patches", "one_hot"])
def test_autocast_does_not_reach_the_algebra(kind: str) -> None:
    model, _ = stepped(kind, torch.float32, 1.3, 0.7)
    grads = enn.per_sample_grads(model)
    vectors = {name: torch.randn(rows.shape[1:]) for name, rows in grads.items()}

    def everything() -> list[Tensor]:
        return [
            grads.norms(),
            grads.gram(),
            grads.matvec(vectors),
            *grads.sum(torch.tensor([0.3, 0.7])).values(),
            *grads.var().values(),
            grads.flatten(),
        ]

    assert_same_under_autocast(everything, 4 * SINGLE)


# --- cancellation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("positions", [2, 8])
def test_norms_of_rows_that_nearly_cancel(left: float, positions: int) -> None:
    """The contributions of the positions cancel but for a part `left` of one of them.

    From factors the squared norm is a sum of terms as large as `S^2`, with `S = sum_t ||g[t]|| ||a[t]||`, each rounded
    by eps: its error is some `eps * S^2`, and that of the norm up to `sqrt(eps) * S`, however small the norm. Dense
    rows have an error of some `eps * S`: whoever needs norms far below S asks for `materialize=True`.
    """
    torch.manual_seed(1)
    a = torch.randn(4, 1, 64).expand(4, positions, 64)
    g = torch.ones(positions)
    g[positions // 2 :] = -1
    g[0] += left
    total = float(a[:, 0].norm(dim=1).max() * 64**0.5 * g.abs().sum())
    exact = (a.double() * g.double()[:, None]).sum(1).norm(dim=1) * 64**0.5
    for materialize, allowed in ((False, 2 * SINGLE**0.5 * total), (True, 4 * SINGLE * total)):
        model = enn.convert(nn.Linear(64, 64, bias=False)).per_sample(loss_reduction="sum", materialize=materialize)
        (model(a) * g[:, None]).sum().backward()
        norms = enn.per_sample_grads(model).norms()
        assert norms.isfinite().all()
        assert float((norms - exact).abs().max()) <= allowed


def test_gram_of_half_precision_rows() -> None:
    """Inner products of rows of norm 1000 are above float16's largest number: float32, as the norms."""
    for dtype in HALVES:
        model, exact = stepped("outer", dtype, 30.0, 8.0)
        flat = exact["weight"].flatten(1)
        gram = enn.per_sample_grads(model).gram()
        assert relative_error(gram, flat @ flat.T) <= 4 * torch.finfo(dtype).eps


SCALES = [(1e-20, 1e20), (1.0, 1e19), (1e-24, 1.0), (1e-30, 1.0), (1e-18, 1e18), (1e10, 1e25), (0.0, 1.0)]


@pytest.mark.parametrize("small_rows", [True, False])
@pytest.mark.parametrize("positions", [(), (3,), (40,)], ids=str)
@pytest.mark.parametrize(("of_g", "of_a"), SCALES)
def test_norms_of_numbers_that_cannot_be_squared(
    of_g: float, of_a: float, positions: tuple[int, ...], small_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The squares of the gradient, or of the input, are out of the range of float32; the rows are not."""
    if small_rows:
        monkeypatch.setattr(cost, "SMALL_ROWS_NUMEL", 1 << 15)
    torch.set_default_dtype(torch.float32)
    a, g = torch.randn(4, *positions, 20), torch.randn(4, *positions, 30)
    model = enn.convert(nn.Linear(20, 30)).per_sample(loss_reduction="sum")
    model(of_a * a).backward(of_g * g)
    grads = enn.per_sample_grads(model)
    rows = {name: each.double().flatten(1).norm(dim=1) for name, each in grads.items()}
    expected = torch.stack(list(rows.values())).norm(dim=0)
    for name, norms in grads.norms(per_parameter=True).items():
        torch.testing.assert_close(norms.double(), rows[name], rtol=1e-5, atol=0)
    torch.testing.assert_close(grads.norms().double(), expected, rtol=1e-5, atol=0)
    norms = enn.clip_grad_sample_norms_(model, 1.0)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0)
    clipped = (grads["weight"].double() * (1 / expected.clamp(min=1.0))[:, None, None]).sum(0)
    torch.testing.assert_close(model.weight.grad.double(), clipped, rtol=1e-4, atol=1e-6 * float(clipped.abs().max()))
