"""Learning to learn: a start from which one step of gradient descent fits a sine wave never seen before.

Each row of the batch is a task: a wave with an amplitude and a phase of its own, seen at ten points. The rows of the
gradient give each task weights of its own, `(B, *shape)`; one batched forward runs them all, and the loss after the
step is differentiated through the step (MAML; Finn et al., 2017, "Model-agnostic meta-learning").
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call

import expanded_nn as enn

SHOTS = 10


def waves(tasks: int) -> tuple[Tensor, Tensor]:
    """Points x and y of random sine waves, `(B, 61, 1)`: ten to learn from, then a grid to be tested on."""
    grid = torch.linspace(-5, 5, 51).expand(tasks, 51)
    x = torch.cat([10 * torch.rand(tasks, SHOTS) - 5, grid], 1).unsqueeze(2)
    amplitudes, phases = 0.1 + 4.9 * torch.rand(tasks, 1, 1), math.pi * torch.rand(tasks, 1, 1)
    return x, amplitudes * torch.sin(x - phases)


def error(predicted: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(predicted[:, SHOTS:], y[:, SHOTS:])


def after_a_step(model: nn.Module, x: Tensor, y: Tensor, rate: float = 0.02) -> Tensor:
    """What each task predicts once its own weights have made a step on its ten points."""
    start = dict(model.per_sample(True).named_parameters())
    torch.autograd.grad(F.mse_loss(model(x[:, :SHOTS]), y[:, :SHOTS]), list(start.values()), create_graph=True)
    adapted = {name: weight - rate * weight.grad_sample for name, weight in start.items()}  # (B, *shape)
    model.zero_grad()
    model.per_sample(False)  # rows are wanted of the step, not of what comes after it
    return functional_call(model, adapted, x)


def train(steps: int, meta: bool) -> tuple[nn.Module, list[float]]:
    """A model trained for what it predicts after a step or, plainly, for what it predicts; its errors on the way."""
    model = enn.convert(nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    errors = []
    for _ in track(range(steps), description="meta-learning" if meta else "plain training"):
        x, y = waves(64)
        loss = error(after_a_step(model, x, y) if meta else model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    return model, errors


def draw(x: Tensor, curves: dict[str, Tensor], training: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    *panels, last = figure.subplots(1, 4)
    for i, panel in enumerate(panels):
        for (name, y), style in zip(curves.items(), ("k-", "C0:", "C0-", "C1-"), strict=True):
            panel.plot(x[i, SHOTS:, 0], y[i, SHOTS:, 0], style, label=name)
        panel.plot(x[i, :SHOTS, 0], curves["true wave"][i, :SHOTS, 0], "ko", markersize=5)
    for name, errors in training.items():
        last.plot(errors, linewidth=0.8, label=name)
    last.set(ylim=0, xlabel="training step", ylabel="squared error on new waves")
    last.legend()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/maml.png"), help="the picture")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # too little work to share out between threads
    torch.manual_seed(args.seed)
    (meta, meta_errors), (plain, plain_errors) = (train(args.steps, is_meta) for is_meta in (True, False))
    x, y = waves(500)
    steps = [after_a_step(plain, x, y, rate).detach() for rate in (0.005, 0.01, 0.02)]  # its best is smaller
    best = min(steps, key=lambda predicted: error(predicted, y))
    before, after = meta(x).detach(), after_a_step(meta, x, y).detach()
    print(f"A step on {SHOTS} points takes the error on 500 new waves from {error(before, y):.2f} to "
          f"{error(after, y):.2f}; from a plainly trained start, at best to {error(best, y):.2f}.")  # fmt: skip
    curves = {"true wave": y, "meta-learned start": before, "after one step": after, "plain start after one step": best}
    draw(x, curves, {"after one step": meta_errors, "plain training": plain_errors}, args.out)
    print(f"Three of the waves, and the training: {args.out}")


if __name__ == "__main__":
    main()
