"""DP-SGD in several processes: each clips the gradients of its own samples, and together they add up and add noise.

Twice, by torch's own engines: DistributedDataParallel, under Opacus' PrivacyEngine, and FSDP2, where each process holds
a part of the model only. Started as it is, this script starts itself under torchrun.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def ddp(data: TensorDataset, engine: PrivacyEngine) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """Opacus' engine sees a model that fills `grad_sample` itself, and takes its distributed optimizer."""
    model = DistributedDataParallel(enn.convert(mlp()).per_sample())
    return engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), data_loader=DataLoader(data, BATCH),
        noise_multiplier=NOISE, max_grad_norm=MAX_NORM, grad_sample_mode="no_op",
    )  # fmt: skip


def fsdp(data: TensorDataset, engine: PrivacyEngine) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """No process holds all weights, or any rows: the clipped sums are scattered, and each part gets its noise."""
    model = enn.convert(mlp()).per_sample(accumulate_grad=False)
    for module in (model[0], model[2], model):
        fully_shard(module)
    batches = DPDataLoader.from_data_loader(DataLoader(data, BATCH), distributed=True)
    optimizer = FSDPOptimizerFastGradientClipping(  # takes the sum over all processes
        torch.optim.SGD(model.parameters(), lr=RATE / BATCH), noise_multiplier=NOISE, max_grad_norm=MAX_NORM,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(batches.sample_rate))
    return model, optimizer, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("processes", 2), ("epochs", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("docs/images/distributed_dp.png"), help="the picture")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        options = [f"--{name}={value}" for name, value in vars(args).items()]
        return torchrun(["--standalone", f"--nproc-per-node={args.processes}", __file__, *options])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first, digits = dist.get_rank() == 0, load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    seen, new = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed)).split([1437, 360])
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    axes.set(ylim=(0, 1), xlabel=f"privacy spent: ε at δ = {DELTA:g}", ylabel="accuracy on new digits")
    for set_up, marker in ((ddp, "."), (fsdp, "x")):
        torch.manual_seed(args.seed + dist.get_rank())  # each process draws its own samples
        engine, curve = PrivacyEngine(accountant="rdp"), []
        model, optimizer, batches = set_up(TensorDataset(x[seen], y[seen]), engine)
        for _ in track(range(args.epochs), description=set_up.__name__, disable=not first):
            for images, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                if set_up is fsdp:  # otherwise Opacus' optimizer clips
                    enn.clip_grad_sample_norms_(model, MAX_NORM)
                optimizer.step()
            with torch.no_grad():
                curve.append((engine.get_epsilon(DELTA), float((model(x[new]).argmax(1) == y[new]).double().mean())))
        axes.plot(*zip(*curve, strict=True), marker=marker, label=set_up.__name__)
        if first:
            print(f"{set_up.__name__}: {curve[-1][1]:.0%} right at epsilon {curve[-1][0]:.2f}")
    axes.legend(title=f"a point an epoch, {dist.get_world_size()} processes", loc="lower right")
    if first:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out, dpi=100)
        print(f"Accuracy against epsilon: {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
