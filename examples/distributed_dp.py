"""DP-SGD in several processes: each clips the gradients of its own samples, and together they add up and add noise.

Twice, by torch's own engines: DistributedDataParallel, where each process holds the whole model, under Opacus'
PrivacyEngine; and FSDP2, where each holds a part of it and the clipped sums are scattered over the parts.
Started as it is, this script starts itself under torchrun.
"""

import argparse
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import FSDPOptimizerFastGradientClipping
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import expanded_nn as enn

BATCH, MAX_NORM, NOISE, RATE, DELTA = 256, 1.0, 2.0, 2.0, 1e-4


def load() -> tuple[TensorDataset, TensorDataset]:
    """1437 digits `(64,)` to train on, 360 to test on; the same in every process."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    train, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split([1437, 360])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def train_ddp(data: TensorDataset, engine: PrivacyEngine, epochs: Iterable[int]) -> nn.Module:
    """Opacus' engine sees a model that fills `grad_sample` itself, and takes its distributed optimizer."""
    model = DistributedDataParallel(enn.convert(mlp()).per_sample())
    private_model, optimizer, batches = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), data_loader=DataLoader(data, BATCH),
        noise_multiplier=NOISE, max_grad_norm=MAX_NORM, grad_sample_mode="no_op",
    )  # fmt: skip
    for _ in epochs:
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(private_model(images), labels).backward()
            optimizer.step()
    return model


def train_fsdp(data: TensorDataset, engine: PrivacyEngine, epochs: Iterable[int]) -> nn.Module:
    """No process holds all weights, or any rows: the clipped sums are scattered, and each part gets its noise."""
    model = enn.convert(mlp()).per_sample(accumulate_grad=False)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    batches = DPDataLoader.from_data_loader(DataLoader(data, BATCH), distributed=True)
    optimizer = FSDPOptimizerFastGradientClipping(  # takes the sum over all processes
        torch.optim.SGD(model.parameters(), lr=RATE / BATCH), noise_multiplier=NOISE, max_grad_norm=MAX_NORM,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(batches.sample_rate))
    for _ in epochs:
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            enn.clip_grad_sample_norms_(model, MAX_NORM)
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = ["--standalone", f"--nproc-per-node={args.processes}", __file__, f"--epochs={args.epochs}"]
        return torchrun(command)

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data, test = load()
    for name, train in (("DDP", train_ddp), ("FSDP", train_fsdp)):
        torch.manual_seed(dist.get_rank())  # each process draws its own samples
        engine = PrivacyEngine(accountant="rdp")
        epochs: Iterator[int] = track(range(args.epochs), description=name, disable=dist.get_rank() > 0)
        model = train(data, engine, epochs)
        with torch.no_grad():
            accuracy = float((model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean())
        if dist.get_rank() == 0:
            epsilon = engine.get_epsilon(DELTA)
            print(f"{name}, {dist.get_world_size()} processes: {accuracy:.0%} right at epsilon {epsilon:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
