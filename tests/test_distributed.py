"""Many processes by torch's own engines: DistributedDataParallel and FSDP2, in real processes under torchrun."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import expanded_nn as enn
from oracle import Call, assert_close, loop
from processes import averaged, gathered, run_scenarios, torchrun

ROWS, LIMIT, VOCABULARY, WIDTH, LENGTH = 4, 0.5, 11, 8, 5


class TinyGPT(nn.Module):
    """Embedding and head share their weight; the block is what one shards on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(index)))


class Branches(nn.Module):
    """A part that the forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda rows: torch.randn(rows, 6)),
    "cnn": (cnn, lambda rows: torch.randn(rows, 1, 6, 6)),
    "gpt": (TinyGPT, lambda rows: torch.randint(VOCABULARY, (rows, LENGTH))),
}


def objective(module: Callable[..., Tensor], call: Call, first: int = 0) -> Tensor:
    return call.on(module).sin().sum()


def backward(model: nn.Module, x: Tensor) -> None:
    """The mean over the rows; a mean over none has gradient zero."""
    (objective(model, Call((x,))) / max(1, len(x))).backward()


def expected_rows(plain: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return loop(plain, Call((x,)), len(x), objective=objective)


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in rows.values()], 1).norm(dim=1)


def clipped_sum(rows: dict[str, Tensor], limit: float = LIMIT) -> dict[str, Tensor]:
    factors = (limit / norms_of(rows)).clamp(max=1)
    return {name: torch.tensordot(factors, each, 1) for name, each in rows.items()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def ddp_reduces_the_gradient_and_leaves_the_rows_local(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            plain = make_model()
            model = DistributedDataParallel(enn.convert(plain).per_sample(), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = make_input(ROWS * world)[rank * ROWS : (rank + 1) * ROWS]
                if step == 1 and rank == 1:
                    x = x[:0]
                for (_, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                    q.data.copy_(p.data)
                rows = expected_rows(plain, x)
                optimizer.zero_grad(set_to_none=step == 2)
                backward(model, x)
                for name, parameter in parameters_of(model).items():
                    assert_close(parameter.grad_sample, rows[name], name=name)
                    assert_close(parameter.grad, averaged(rows[name].sum(0) / max(1, len(x))), name=name)
                optimizer.step()


def ddp_with_a_part_that_is_not_used(rank: int, world: int) -> None:
    model = DistributedDataParallel(enn.convert(Branches()).per_sample(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        backward(model, torch.randn(ROWS + rank, 6))
        assert model.module.used.weight.grad_sample.shape == (ROWS + rank, 3, 6)
        assert model.module.unused.weight.grad_sample is None


def ddp_clips_micro_batches(rank: int, world: int) -> None:
    """Under `no_sync`: rows of this rank's samples alone are clipped, then the ranks add up."""
    for make_model, make_input in MODELS.values():
        plain = make_model()
        model = DistributedDataParallel(enn.convert(plain).per_sample(accumulate_grad=False))
        expected = clipped_sum(expected_rows(plain, x := make_input(ROWS * world)))
        with model.no_sync():
            for part in x[rank * ROWS : (rank + 1) * ROWS].split(2):
                backward(model, part)
                enn.clip_grad_sample_norms_(model, LIMIT)
        for name, parameter in parameters_of(model).items():
            assert parameter.grad_sample is None
            dist.all_reduce(parameter.grad)
            assert_close(parameter.grad, expected[name], name=name)


def ddp_whose_buckets_are_the_gradients(rank: int, world: int) -> None:
    """It makes its buckets anew behind the first backward, and .grad is another tensor then."""
    x = torch.randn(ROWS * world, 6)[rank * ROWS : (rank + 1) * ROWS]
    model = DistributedDataParallel(enn.convert(mlp()).per_sample(), gradient_as_bucket_view=True)
    backward(model, x)
    with pytest.raises(enn.PerSampleError, match=r"part of a larger tensor.*no_sync\(\)"):
        backward(model, x)
    model.zero_grad()
    for _ in range(2):
        backward(model, x)
    assert len(enn.clip_grad_sample_norms_(model, LIMIT)) == 2 * ROWS


def compiled_steps_clip_their_own_samples(rank: int, world: int) -> None:
    """The model within DistributedDataParallel, whose communication is left to the caller."""
    for make_model, make_input in MODELS.values():
        plain = make_model()
        model = DistributedDataParallel(enn.convert(plain).per_sample()).module

        def step(x: Tensor, model: nn.Module = model) -> None:
            backward(model, x)
            enn.clip_grad_sample_norms_(model, LIMIT)

        compiled = enn.compile(step, backend="eager")
        expected = clipped_sum(expected_rows(plain, x := make_input(ROWS * world)))
        for _ in range(3):
            model.zero_grad()
            compiled(x[rank * ROWS : (rank + 1) * ROWS])
            for name, parameter in parameters_of(model).items():
                dist.all_reduce(parameter.grad)
                assert_close(parameter.grad, expected[name], name=name)
        assert any(family.graphs for family in compiled._graphs.families.values())


def sharded(plain: nn.Module, **options: object) -> nn.Module:
    """A converted copy; the layers with layers or parameters of their own are shards, and so is what is left."""
    model = enn.convert(plain)
    for module in [model.block] if isinstance(model, TinyGPT) else model:
        if any(True for _ in module.parameters()):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def fsdp_scatters_the_gradient_and_leaves_the_rows_local(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        for reshard in (True, False):
            plain = make_model()
            model = sharded(plain, reshard_after_forward=reshard).per_sample()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = make_input(ROWS * world)[rank * ROWS : (rank + 1) * ROWS]
                if step == 1 and rank == 1:
                    x = x[:0]
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    q.data.copy_(whole(p.data))
                rows = expected_rows(plain, x)
                optimizer.zero_grad(set_to_none=step == 2)
                backward(model, x)
                for name, parameter in model.named_parameters():
                    assert isinstance(parameter, DTensor)
                    assert_close(parameter.grad_sample, rows[name], name=name)
                    assert_close(whole(parameter.grad), averaged(rows[name].sum(0) / max(1, len(x))), name=name)
                assert_close(enn.per_sample_grads(model).norms(), norms_of(rows))
                optimizer.step()


def fsdp_clears_by_zeros_behind_a_batch_that_one_rank_lacks(rank: int, world: int) -> None:
    """That rank's own rows tell nothing of the gradient; the ranks agree, or one waits for the others for ever."""
    plain, make_input = mlp(), MODELS["mlp"][1]
    model = sharded(plain).per_sample()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(6):
        x = make_input(ROWS * world)[rank * ROWS : (rank + 1) * ROWS]
        if step % 2 and rank == step // 2 % world:
            x = x[:0]
        backward(model, x)
        for name, rows in expected_rows(plain, x).items():
            assert_close(parameters_of(model)[name].grad_sample, rows, name=name)
        if step > 2:
            enn.clip_grad_sample_norms_(model, LIMIT)
        optimizer.zero_grad(set_to_none=False)


def fsdp_appends_the_rows_of_several_backwards(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        plain = make_model()
        model = sharded(plain).per_sample()
        x = make_input(ROWS * world)[rank * ROWS : (rank + 1) * ROWS]
        for _ in range(2):
            model.zero_grad()
            backward(model, x[:1])
            backward(model, x[1:])
            for name, rows in expected_rows(plain, x).items():
                assert_close(parameters_of(model)[name].grad_sample, rows, name=name)


def fsdp_scatters_the_clipped_sum(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        for reduction in ("sum", "mean"):
            plain = make_model()
            model = sharded(plain).per_sample()
            x = make_input(ROWS * world)
            rows = expected_rows(plain, x)
            backward(model, x[rank * ROWS : (rank + 1) * ROWS])
            norms = enn.clip_grad_sample_norms_(model, LIMIT, reduction=reduction)
            assert_close(torch.cat(gathered(norms)), norms_of(rows))
            for name, total in clipped_sum(rows).items():
                parameter = parameters_of(model)[name]
                assert parameter.grad.placements == parameter.placements
                assert_close(whole(parameter.grad), total if reduction == "sum" else total / len(x), name=name)


def fsdp_scatters_in_one_order(rank: int, world: int) -> None:
    """Few samples have dense rows, many have factored ones; the ranks wait for each other parameter by parameter."""
    plain = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60))
    model = sharded(plain).per_sample()
    sizes = [4 if each % 2 else 16 for each in range(world)]
    parts = torch.randn(sum(sizes), 60).split(sizes)
    backward(model, parts[rank])
    assert isinstance(parameters_of(model)["0.weight"].grad_sample, enn.FactoredTensor) == (sizes[rank] == 16)
    enn.clip_grad_sample_norms_(model, LIMIT)
    rows = [expected_rows(plain, part) for part in parts]
    for name, total in clipped_sum({name: torch.cat([each[name] for each in rows]) for name in rows[0]}).items():
        assert_close(whole(parameters_of(model)[name].grad), total, name=name)


def fsdp_clips_micro_batches_at_constant_memory(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        plain = make_model()
        model = sharded(plain).per_sample(accumulate_grad=False)
        expected = clipped_sum(expected_rows(plain, x := make_input(ROWS * world)))
        for part in x[rank * ROWS : (rank + 1) * ROWS].split(2):
            backward(model, part)
            enn.clip_grad_sample_norms_(model, LIMIT)
            assert all(parameter.grad_sample is None for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            assert_close(whole(parameter.grad), expected[name], name=name)


def fsdp_in_mixed_precision(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = mlp().float()
    model = sharded(plain, mp_policy=policy).per_sample()
    x = torch.randn(ROWS * world, 6, dtype=torch.float32)
    expected = clipped_sum(expected_rows(plain, x))
    backward(model, x[rank * ROWS : (rank + 1) * ROWS])
    enn.clip_grad_sample_norms_(model, LIMIT)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert_close(whole(parameter.grad), expected[name], 3e-2, name)


def a_model_converted_after_it_was_sharded(rank: int, world: int) -> None:
    plain = mlp()
    model = deepcopy(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    model = enn.convert(fully_shard(model), inplace=True).per_sample()
    x = torch.randn(ROWS * world, 6)
    backward(model, x[rank * ROWS : (rank + 1) * ROWS])
    enn.clip_grad_sample_norms_(model, LIMIT)
    for name, total in clipped_sum(expected_rows(plain, x)).items():
        assert_close(whole(parameters_of(model)[name].grad), total, name=name)


class Scaled(nn.Module):
    """A parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


def fsdp_of_the_model_alone(rank: int, world: int) -> None:
    """All parameters are gathered before the root's forward; the model was switched on before it was sharded."""
    for make_model, make_input in (*MODELS.values(), (Scaled, lambda rows: torch.randn(rows, 6))):
        for accumulate in (True, False):
            plain = make_model()
            model = fully_shard(enn.convert(plain).per_sample(accumulate_grad=accumulate))
            x = make_input(ROWS * world)
            rows = expected_rows(plain, x)
            for _ in range(2):
                model.zero_grad()
                backward(model, x[rank * ROWS : (rank + 1) * ROWS])
                assert_close(torch.cat(gathered(enn.clip_grad_sample_norms_(model, LIMIT))), norms_of(rows))
            for name, total in clipped_sum(rows).items():
                assert_close(whole(parameters_of(model)[name].grad), total, name=name)


def fsdp_clips_micro_batches_that_are_not_synchronized(rank: int, world: int) -> None:
    for make_model, make_input in MODELS.values():
        plain = make_model()
        model = enn.convert(plain).per_sample(accumulate_grad=False)
        for module in [model.block] if isinstance(model, TinyGPT) else model:
            if any(True for _ in module.parameters()):
                fully_shard(module)
        fully_shard(model)
        expected = clipped_sum(expected_rows(plain, x := make_input(ROWS * world)))
        for number, part in enumerate(x[rank * ROWS : (rank + 1) * ROWS].split(2)):
            model.set_requires_gradient_sync(number == 1)
            backward(model, part)
            enn.clip_grad_sample_norms_(model, LIMIT)
        for name, parameter in model.named_parameters():
            assert_close(whole(parameter.grad), expected[name], name=name)


def fsdp_refusals(rank: int, world: int) -> None:
    x = torch.randn(ROWS, 6)
    model = fully_shard(enn.convert(mlp()).per_sample())
    backward(model, x)
    model.set_requires_gradient_sync(False)
    with pytest.raises(enn.PerSampleError, match=r"set_requires_gradient_sync.*accumulate_grad=False"):
        backward(model, x)
    model.set_requires_gradient_sync(True)
    loss = objective(model, Call((x,)))
    model.set_requires_all_reduce(False)
    with pytest.raises(enn.PerSampleError, match="held back"):
        loss.backward()
    assert "before it is sharded" in str(enn.check(model, x))
    model = enn.convert(Scaled()).per_sample()
    fully_shard(model.layer)
    fully_shard(model)
    with pytest.raises(enn.PerSampleError, match=r"FSDP shards 'layer'.*as a whole"):
        model(x)


def ddp_is_switched_off_and_on(rank: int, world: int) -> None:
    model = DistributedDataParallel(enn.convert(mlp()).per_sample())
    x = torch.randn(ROWS, 6)
    for mode in (False, True):
        model.zero_grad()
        assert enn.per_sample(model, mode) is model
        backward(model, x)
        assert all((p.grad_sample is not None) == mode for p in model.parameters())


class TwoTasks(nn.Module):
    """Each process trains a head of its own, as the guide's recipe for clipping has to allow."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return (self.second if task else self.first)(self.body(x).tanh())


def ranks_that_use_different_layers(rank: int, world: int) -> None:
    plain, x, task = TwoTasks(), torch.randn(world, ROWS, 6)[rank], min(rank, 1)
    inner = enn.convert(plain).per_sample(accumulate_grad=False)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    (model(x, task).sin().sum() / ROWS).backward()
    enn.clip_grad_sample_norms_(model, LIMIT)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
    used = nn.Sequential(plain.body, nn.Tanh(), plain.second if task else plain.first)
    sums = clipped_sum(expected_rows(used, x))
    names = {"body": "0", "second" if task else "first": "2"}
    for name, parameter in parameters_of(model).items():
        part, _, kind = name.partition(".")
        own = sums[f"{names[part]}.{kind}"] if part in names else torch.zeros_like(parameter)
        total = torch.stack(gathered(own)).sum(0)
        assert_close(parameter.grad, total, name=name)


DDP = [
    ddp_reduces_the_gradient_and_leaves_the_rows_local,
    ddp_with_a_part_that_is_not_used,
    ddp_clips_micro_batches,
    ddp_whose_buckets_are_the_gradients,
    compiled_steps_clip_their_own_samples,
    ddp_is_switched_off_and_on,
    ranks_that_use_different_layers,
]
FSDP = [
    fsdp_scatters_the_gradient_and_leaves_the_rows_local,
    fsdp_clears_by_zeros_behind_a_batch_that_one_rank_lacks,
    fsdp_appends_the_rows_of_several_backwards,
    fsdp_scatters_the_clipped_sum,
    fsdp_scatters_in_one_order,
    fsdp_clips_micro_batches_at_constant_memory,
    fsdp_in_mixed_precision,
    a_model_converted_after_it_was_sharded,
    fsdp_of_the_model_alone,
    fsdp_clips_micro_batches_that_are_not_synchronized,
    fsdp_refusals,
]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_real_processes(processes: int) -> None:
    output = torchrun(__file__, processes)
    for scenario in (*DDP, *FSDP):
        assert output.count(f"passed {scenario.__name__}") == processes


if __name__ == "__main__":
    run_scenarios([*DDP, *FSDP])
