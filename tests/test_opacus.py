"""Differential privacy by Opacus' own parts: its optimizers, Poisson loader, memory manager, accountants and engine.

The engine's mode "no_op" takes a model that fills `grad_sample` itself. What it trains is compared with what Opacus
trains by its own hooks, from the same weights over the same random batches, without noise.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import expanded_nn as enn
from oracle import relative_error
from processes import gathered, run_scenarios, torchrun

pytest.importorskip("opacus", reason="Opacus comes with the extra `examples`: pip install expanded_nn[examples]")

from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModuleExpandedWeights, GradSampleModuleNoOp
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

SAMPLES, CLASSES, VOCABULARY, LENGTH, WIDTH, LIMIT = 24, 3, 12, 5, 8, 0.5


@pytest.fixture(autouse=True)
def global_flags() -> Iterator[None]:
    """Opacus sets a flag of torch.backends; importing torch's own test database forbids that for good."""
    with torch.backends.__allow_nonbracketed_mutation():
        yield


class Text(nn.Module):
    """Token ids `(B, T)` to class scores `(B, 3)`, through any layer `(B, T, 8) -> (B, T, 8)`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = layer
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(index))
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, CLASSES))


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4 * 3 * 3, CLASSES),
    )  # fmt: skip


def encoder_layer() -> nn.Module:
    # One head: Opacus' DPMultiheadAttention mixes up heads and positions under batch_first.
    return nn.TransformerEncoderLayer(WIDTH, nhead=1, dim_feedforward=16, dropout=0.0, batch_first=True)


def vectors() -> Tensor:
    return torch.randn(SAMPLES, 6)


def images() -> Tensor:
    return torch.randn(SAMPLES, 1, 6, 6)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, vectors),
    "partly_frozen": (partly_frozen, vectors),
    "cnn": (cnn, images),
    "lstm": (lambda: Text(nn.LSTM(WIDTH, WIDTH, batch_first=True)), tokens),
    "gru": (lambda: Text(nn.GRU(WIDTH, WIDTH, batch_first=True)), tokens),
    "transformer": (lambda: Text(encoder_layer()), tokens),
}
OPACUS_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "DPLSTM": lambda: DPLSTM(WIDTH, WIDTH, batch_first=True),
    "DPGRU": lambda: DPGRU(WIDTH, WIDTH, batch_first=True),
    "DPMultiheadAttention": lambda: SelfAttention(DPMultiheadAttention(WIDTH, 2, batch_first=True)),
}


def dataset(inputs: Tensor) -> TensorDataset:
    return TensorDataset(inputs, torch.randint(CLASSES, (len(inputs),)))


def loader(data: TensorDataset, batch_size: int = 2) -> DataLoader:
    """Read by Opacus' Poisson sampler, which takes the size as the expected one: one batch in eight is empty."""
    return DataLoader(data, batch_size=batch_size, generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> None:
    F.cross_entropy(model(x), y, reduction=reduction).backward()


def train(
    model: nn.Module,
    data: TensorDataset,
    mode: str,
    *,
    reduction: str = "mean",
    noise: float = 0.0,
    physical: int | None = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    epochs: int = 2,
    **settings: Any,
) -> tuple[list[int], PrivacyEngine]:
    """Trains by Opacus' engine in one of its modes; the sizes of the batches that it drew, and the engine."""
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, batches = engine.make_private(
        module=model,
        optimizer=make_optimizer([p for p in model.parameters() if p.requires_grad], lr=0.5),
        data_loader=loader(data),
        noise_multiplier=noise,
        max_grad_norm=settings.pop("max_grad_norm", LIMIT),
        loss_reduction=reduction,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(2),
        **settings,
    )
    sizes = []
    manager = BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical or SAMPLES, optimizer=optimizer)
    for _ in range(epochs):
        with manager as physical_batches:
            for x, y in physical_batches:
                optimizer.zero_grad()
                backward(model, x, y, reduction)
                optimizer.step()
                sizes.append(len(x))
    return sizes, engine


def pair(model: nn.Module, reduction: str = "mean") -> tuple[nn.Module, nn.Module]:
    """Opacus' own version of a model, and ours."""
    return ModuleValidator.fix(deepcopy(model)), enn.convert(model).per_sample(loss_reduction=reduction)


def has_attention(model: nn.Module) -> bool:
    """Opacus' DPMultiheadAttention cannot take an empty batch."""
    return any(isinstance(module, nn.MultiheadAttention | DPMultiheadAttention) for module in model.modules())


def assert_same_weights(ours: nn.Module, theirs: nn.Module, tol: float = 1e-9) -> None:
    expected = theirs.state_dict()
    for name in [name for name in expected if "qlinear" in name]:
        expected[name.replace("qlinear.", "in_proj_")] = torch.cat(
            [expected[name.replace("qlinear", f"{each}linear")] for each in "qkv"]
        )
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter, expected[name]) <= tol, name


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, TensorDataset]]:
    make_model, make_input = MODELS[request.param]
    return make_model(), dataset(make_input())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_engine_trains_as_with_opacus_own_hooks(case: tuple[nn.Module, TensorDataset], reduction: str) -> None:
    theirs, ours = pair(case[0], reduction)
    before = deepcopy(ours.state_dict())
    poisson = not has_attention(ours)
    sizes, _ = train(theirs, case[1], "hooks", reduction=reduction, poisson_sampling=poisson)
    assert (0 in sizes) == poisson
    assert train(ours, case[1], "no_op", reduction=reduction, poisson_sampling=poisson)[0] == sizes
    assert_same_weights(ours, theirs)
    assert any(not torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_the_memory_manager_splits_batches(case: tuple[nn.Module, TensorDataset]) -> None:
    theirs, ours = pair(case[0])
    poisson = not has_attention(ours)
    whole = train(theirs, case[1], "hooks", poisson_sampling=poisson)[0]
    parts = train(ours, case[1], "no_op", physical=1, poisson_sampling=poisson)[0]
    assert max(whole) > 1 >= max(parts)
    assert sum(whole) == sum(parts)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("name", OPACUS_LAYERS)
def test_opacus_own_layers_convert(name: str) -> None:
    theirs = Text(OPACUS_LAYERS[name]())
    ours = enn.convert(theirs).per_sample()
    data = dataset(tokens())
    for model, mode in ((theirs, "hooks"), (ours, "no_op")):
        train(model, data, mode, poisson_sampling=not has_attention(theirs))
    for (parameter_name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert relative_error(parameter, expected) <= 1e-9, parameter_name


@pytest.mark.parametrize("make_model", [mlp, cnn], ids=["mlp", "cnn"])
def test_the_same_noise_and_the_same_epsilon(make_model: Callable[[], nn.Module]) -> None:
    theirs, ours = pair(make_model())
    data = dataset(vectors() if make_model is mlp else images())
    engines = [train(theirs, data, "hooks", noise=1.0)[1], train(ours, data, "no_op", noise=1.0)[1]]
    assert_same_weights(ours, theirs)
    epsilons = [engine.get_epsilon(delta=1e-3) for engine in engines]
    assert epsilons[0] == epsilons[1] > 0


@pytest.mark.parametrize("clipping", ["per_layer", "adaptive"])
def test_opacus_other_ways_of_clipping(clipping: str) -> None:
    theirs, ours = pair(mlp())
    adaptive = {
        "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 2.0, "min_clipbound": 0.1,
        "unclipped_num_std": 1.0,
    }  # fmt: skip
    per_layer = {"max_grad_norm": [0.1, 0.2, 0.3, 0.4]}
    for model, mode in ((theirs, "hooks"), (ours, "no_op")):
        torch.manual_seed(3)
        noise, settings = (1.0, adaptive) if clipping == "adaptive" else (0.0, per_layer)
        train(model, dataset(vectors()), mode, clipping=clipping, noise=noise, poisson_sampling=False, **settings)
    assert_same_weights(ours, theirs)


def test_the_bound_follows_a_quantile_of_the_norms() -> None:
    """Adaptive clipping by a function of the norms gives the steps and the bounds of Opacus' own optimizer."""
    theirs, ours = pair(mlp())
    theirs = GradSampleModule(theirs)
    x, y = torch.randn(9, 4, 6), torch.randint(CLASSES, (9, 4))
    adaptive = AdaClipDPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1.0), noise_multiplier=0.0, target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2, max_clipbound=1e3, min_clipbound=1e-3, unclipped_num_std=1e-12, max_grad_norm=1.0,
        expected_batch_size=4,
    )  # fmt: skip
    optimizer, bound, counts = torch.optim.SGD(ours.parameters(), lr=1.0), 1.0, set()
    for images, labels in zip(x, y, strict=True):
        adaptive.zero_grad()
        backward(theirs, images, labels)
        adaptive.step()
        optimizer.zero_grad()
        backward(ours, images, labels)
        norms = enn.clip_grad_sample_norms_(
            ours, lambda norms, bound=bound: (bound / norms).clamp(max=1), reduction="mean"
        )
        optimizer.step()
        below = (norms <= bound).sum()
        bound *= float(torch.exp(-0.2 * (below / 4 - 0.5)))
        counts.add(int(below))
        assert bound == pytest.approx(float(adaptive.max_grad_norm), rel=1e-6)
    assert len(counts) > 1
    assert_same_weights(ours, theirs._module, 1e-5)  # Opacus adds 1e-6 to the norms


def test_an_empty_batch_is_a_step_of_the_bound_too() -> None:
    model, bounds = enn.convert(mlp()).per_sample(accumulate_grad=False), [1.0]
    for x, y in DPDataLoader.from_data_loader(loader(dataset(vectors()))):
        model.zero_grad()
        backward(model, x, y)
        norms = enn.clip_grad_sample_norms_(model, lambda norms: 1 / norms.clamp(min=bounds[-1]))
        bounds.append(bounds[-1] * float(torch.exp(-0.2 * ((norms <= bounds[-1]).sum() / 2 - 0.5))))
        assert norms.shape == (len(x),)
        if not len(x):
            assert not any(parameter.grad.any() for parameter in model.parameters())
            assert bounds[-1] / bounds[-2] == pytest.approx(math.exp(0.1))
            break
    else:
        raise AssertionError("no batch was empty")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_the_modes_with_hooks_of_opacus(mode: str) -> None:
    """With the mode on they are refused; with the mode off Opacus makes the rows, as of the plain model."""

    def fit(model: nn.Module) -> None:
        private, optimizer, *losses, batches = PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader(dataset(vectors())),
            noise_multiplier=0.0, max_grad_norm=LIMIT, grad_sample_mode=mode, poisson_sampling=False,
            criterion=nn.CrossEntropyLoss(),
        )  # fmt: skip
        for x, y in batches:
            optimizer.zero_grad()
            (losses[0] if losses else F.cross_entropy)(private(x), y).backward()
            optimizer.step()

    trained = [mlp()]
    trained.append(enn.convert(trained[0]))
    for model in trained:
        torch.manual_seed(4)
        fit(model)
    assert_same_weights(*trained)
    with pytest.raises(enn.PerSampleError, match=r"Opacus' GradSampleModule.*grad_sample_mode=.no_op"):
        fit(enn.convert(mlp()).per_sample())


def test_the_mode_by_expanded_weights_of_torch() -> None:
    model = GradSampleModuleExpandedWeights(enn.convert(mlp()).per_sample())
    with pytest.raises(RuntimeError, match="Expanded Weights encountered but cannot handle"):
        model(torch.randn(4, 6))


def test_make_private_with_epsilon_on_adam() -> None:
    model = enn.convert(mlp()).per_sample()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, batches = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=loader(dataset(vectors()), 4),
        target_epsilon=5.0, target_delta=1e-3, epochs=2, max_grad_norm=LIMIT, grad_sample_mode="no_op",
    )  # fmt: skip
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
    assert 0 < engine.get_epsilon(1e-3) <= 5.0 + 0.01


def dp_optimizer(model: nn.Module, kind: type[DPOptimizer] = DPOptimizer, **settings: Any) -> DPOptimizer:
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    defaults = {"noise_multiplier": 0.0, "max_grad_norm": LIMIT, "expected_batch_size": 4}
    return kind(plain, **(defaults | settings))


def test_factored_rows_stay_factored_through_the_optimizer() -> None:
    model = enn.convert(nn.Linear(64, 64)).per_sample()
    optimizer = dp_optimizer(model)
    model(torch.randn(4, 64)).square().sum(1).mean().backward()
    dense = model.weight.grad_sample.clone().cpu().numpy()
    rows = model.weight.grad_sample
    optimizer.step()
    assert isinstance(rows, enn.FactoredTensor)
    assert not rows.is_dense
    norms = torch.cat([torch.tensor(dense).flatten(1), model.bias.grad_sample], 1).norm(dim=1)
    factors = (LIMIT / (norms + 1e-6)).clamp(max=1) / 4
    torch.testing.assert_close(model.weight.grad, torch.tensordot(factors, torch.tensor(dense), 1))
    optimizer.zero_grad()
    assert model.weight.grad_sample is None


def test_rows_of_several_backwards_in_a_list_as_opacus_keeps_them() -> None:
    """Opacus counts the batches of a step by the list's length, and its accountant relies on that."""
    theirs, ours = pair(mlp())
    data = [(torch.randn(4, 6), torch.randint(CLASSES, (4,))) for _ in range(2)]
    theirs = GradSampleModule(theirs)
    for model in (theirs, ours):
        optimizer = dp_optimizer(model)
        parts: list[list[Tensor]] = []
        for x, y in data:
            backward(model, x, y)
            if model is ours:
                parts.append([p.grad_sample for p in model.parameters()])
                model.zero_grad()
        for parameter, *rows in zip(ours.parameters(), *parts, strict=True) if parts else ():
            parameter.grad_sample = rows
        assert optimizer.accumulated_iterations == 2
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(ours, theirs._module)


@pytest.mark.parametrize("materialize", [False, True])
def test_a_forgotten_zero_grad_is_found_by_opacus(materialize: bool) -> None:
    model = enn.convert(mlp()).per_sample(materialize=materialize)
    optimizer = dp_optimizer(model)
    x, y = torch.randn(4, 6), torch.randint(CLASSES, (4,))
    backward(model, x, y)
    optimizer.step()
    with pytest.raises(ValueError, match=r"must call optimizer\.zero_grad"):
        optimizer.step()
    backward(model, x, y)
    with pytest.raises(ValueError, match=r"must call optimizer\.zero_grad"):
        optimizer.step()


def test_a_forgotten_zero_grad_between_micro_batches_is_found_by_opacus() -> None:
    model = enn.convert(mlp()).per_sample()
    optimizer = dp_optimizer(model)
    x, y = torch.randn(4, 6), torch.randint(CLASSES, (4,))
    optimizer.signal_skip_step(True)
    backward(model, x, y)
    optimizer.step()
    with pytest.warns(enn.PerSampleWarning, match="as one batch"):
        backward(model, x, y)
    with pytest.raises(ValueError, match=r"must call optimizer\.zero_grad"):
        optimizer.step()


def test_cleaning_up_after_opacus() -> None:
    model = enn.convert(mlp()).per_sample()
    wrapped = GradSampleModuleNoOp(model)
    x, y = torch.randn(4, 6), torch.randint(CLASSES, (4,))
    backward(wrapped, x, y)
    wrapped.del_grad_sample()
    backward(wrapped, x, y)
    assert model[0].weight.grad_sample.shape == (4, 40, 6)
    assert wrapped.to_standard_module() is model
    assert not hasattr(model[0].weight, "grad_sample")
    model.zero_grad()
    backward(model, x, y)
    assert model[0].weight.grad_sample.shape == (4, 40, 6)


@pytest.mark.parametrize("physical", [SAMPLES, 2])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_fast_clipping_holds_no_rows(case: tuple[nn.Module, TensorDataset], physical: int, noise: float) -> None:
    """The clipped sum by `clip_grad_sample_norms_`; noise, scale, accounting and sampling by Opacus."""
    trained = []
    for fast in (False, True):
        model = enn.convert(case[0]).per_sample(accumulate_grad=not fast)
        kind = DPOptimizerFastGradientClipping if fast else DPOptimizer
        generator = torch.Generator().manual_seed(2)
        optimizer = dp_optimizer(model, kind, noise_multiplier=noise, generator=generator)
        batches = DPDataLoader.from_data_loader(loader(case[1]))
        accountant = RDPAccountant()
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(batches.sample_rate))
        with BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=physical, optimizer=optimizer
        ) as physical_batches:
            for x, y in physical_batches:
                optimizer.zero_grad()
                backward(model, x, y)
                if fast:
                    enn.clip_grad_sample_norms_(model, LIMIT)
                    assert all(parameter.grad_sample is None for parameter in model.parameters())
                optimizer.step()
        trained.append((model, accountant.history))
    (exact, history), (fast, fast_history) = trained
    assert history == fast_history
    assert_same_weights(fast, exact, 1e-5)  # Opacus adds 1e-6 to the norms


BATCHES = (8, 5, 0)  # how many samples a rank sees in each step; the second rank one less


def alone(model: nn.Module, world: int) -> nn.Module:
    """Trained by Opacus in this process, on what all ranks see together."""
    model = enn.convert(model).per_sample()
    optimizer = dp_optimizer(model, expected_batch_size=8 * world)
    for step in range(len(BATCHES)):
        parts = [share(rank, step) for rank in range(world)]
        optimizer.zero_grad()
        backward(model, *(torch.cat(part) for part in zip(*parts, strict=True)))
        optimizer.step()
    return model


def share(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """What a rank sees in a step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = max(0, BATCHES[step] - (rank == 1))
    return torch.randn(rows, 6, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def opacus_on_ddp(rank: int, world: int) -> None:
    plain = mlp()
    model = DistributedDataParallel(enn.convert(plain).per_sample())
    optimizer = dp_optimizer(model, DistributedDPOptimizer, expected_batch_size=8)
    for step in range(len(BATCHES)):
        optimizer.zero_grad()
        backward(model, *share(rank, step))
        optimizer.step()
    assert_same_weights(model.module, alone(plain, world))


def opacus_engine_on_ddp(rank: int, world: int) -> None:
    model = DistributedDataParallel(enn.convert(mlp()).per_sample())
    data = dataset(torch.randn(100 * world, 6))  # many: Opacus' distributed sampler skips empty batches, one rank waits
    torch.manual_seed(rank)  # each rank draws its own samples, and the first one all of the noise
    wrapped, optimizer, batches = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=50 * world),
        noise_multiplier=1.0, max_grad_norm=LIMIT, grad_sample_mode="no_op",
    )  # fmt: skip
    assert isinstance(optimizer, DistributedDPOptimizer)
    for x, y in batches:
        optimizer.zero_grad()
        backward(wrapped, x, y)
        optimizer.step()
    for parameter in model.parameters():
        assert all(torch.equal(parameter, other) for other in gathered(parameter.detach()))


def opacus_fast_clipping_on_ddp(rank: int, world: int) -> None:
    plain = mlp()
    model = DistributedDataParallel(enn.convert(plain).per_sample(accumulate_grad=False))
    optimizer = dp_optimizer(model, DistributedDPOptimizerFastGradientClipping, expected_batch_size=8)
    for step in range(len(BATCHES)):
        optimizer.zero_grad()
        with model.no_sync():  # Opacus' optimizer adds up the ranks
            backward(model, *share(rank, step))
        enn.clip_grad_sample_norms_(model, LIMIT)
        optimizer.step()
    assert_same_weights(model.module, alone(plain, world), 1e-5)  # Opacus adds 1e-6 to the norms


def even_mlp(width: int) -> nn.Module:
    """Parts of equal size for each rank: Opacus' optimizer cannot step on others."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 8))


def sharded(plain: nn.Module) -> nn.Module:
    model = enn.convert(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model).per_sample(accumulate_grad=False)


def opacus_fast_clipping_on_fsdp(rank: int, world: int) -> None:
    """The clipped sum over all ranks: to Opacus, which would divide the noise else, a loss that is summed."""
    plain = even_mlp(40)
    model = sharded(plain)
    optimizer = FSDPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0 / (8 * world)), noise_multiplier=0.0, max_grad_norm=LIMIT,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    for step in range(len(BATCHES)):
        optimizer.zero_grad()
        backward(model, *share(rank, step))
        enn.clip_grad_sample_norms_(model, LIMIT)
        optimizer.step()
    expected = dict(alone(plain, world).named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.full_tensor(), expected[name]) <= 1e-5, name


def opacus_noise_on_fsdp(rank: int, world: int) -> None:
    """The noise on the sum has the standard deviation that the accountant is told, whatever the number of ranks."""
    model = sharded(even_mlp(500))
    optimizer = FSDPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=3.0, max_grad_norm=LIMIT,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    before = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
    backward(model, torch.randn(0, 6), torch.randint(CLASSES, (0,)))
    enn.clip_grad_sample_norms_(model, LIMIT)
    optimizer.step()
    after = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
    assert abs(float((after - before).std()) / (3.0 * LIMIT) - 1) < 0.05


SCENARIOS = [
    opacus_on_ddp,
    opacus_engine_on_ddp,
    opacus_fast_clipping_on_ddp,
    opacus_fast_clipping_on_fsdp,
    opacus_noise_on_fsdp,
]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_real_processes(processes: int) -> None:
    output = torchrun(__file__, processes)
    for scenario in SCENARIOS:
        assert output.count(f"passed {scenario.__name__}") == processes


if __name__ == "__main__":
    run_scenarios(SCENARIOS)


@pytest.mark.parametrize("optimizer_class", [DPOptimizer, DPOptimizerFastGradientClipping, None])
def test_several_backwards_before_a_step_are_one_batch_to_opacus(optimizer_class: type[DPOptimizer] | None) -> None:
    model = enn.convert(mlp()).per_sample()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer_class is not None:
        optimizer = optimizer_class(optimizer, noise_multiplier=1.0, max_grad_norm=LIMIT, expected_batch_size=4)
    x, y = torch.randn(8, 6), torch.randint(CLASSES, (8,))
    for _ in range(2):  # one backward, of one pass and of two
        backward(model, x, y)
        model.zero_grad()
        (F.cross_entropy(model(x[:4]), y[:4]) + F.cross_entropy(model(x[4:]), y[4:])).backward()
        optimizer.zero_grad()
        model.zero_grad()
    backward(model, x[:4], y[:4])
    expected = nullcontext() if optimizer_class is None else pytest.warns(enn.PerSampleWarning, match="as one batch")
    with expected as found:
        backward(model, x[4:], y[4:])
    assert optimizer_class is None or len(found) == 1
    assert all(len(parameter.grad_sample) == 8 for parameter in model.parameters())
