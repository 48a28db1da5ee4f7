"""Learning from people without remembering any one of them: DP-SGD on handwritten digits.

Each sample's gradient is clipped before it is added up, at a bound that follows the median norm (Andrew et al., 2021),
and Opacus adds noise to the sum, so that no single digit can leave its mark. Its accountant says how much privacy is
spent, epsilon; the picture shows the accuracy that it buys. The rows are never in memory, only their factors.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizerFastGradientClipping
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import expanded_nn as enn

BATCH, COUNT_NOISE, DELTA = 256, 256 / 20, 1e-4  # the noise on how many norms are below the bound
Curve = tuple[list[float], list[float]]  # epsilons, accuracies


def load(seed: int) -> list[TensorDataset]:
    """1437 digits `(1, 8, 8)` to train on, 360 to test on."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return [TensorDataset(images[part], labels[part]) for part in order.split([1437, 360])]


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def train(data: TensorDataset, test: tuple[Tensor, Tensor], noise: float, epochs: int) -> Curve:
    """DP-SGD; after each epoch the epsilon spent and the accuracy on the test set."""
    model = enn.convert(small_cnn()).per_sample(accumulate_grad=False)
    batches = DPDataLoader.from_data_loader(DataLoader(data, batch_size=BATCH))
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5), max_grad_norm=1.0, expected_batch_size=BATCH,
        noise_multiplier=(noise**-2 - (2 * COUNT_NOISE) ** -2) ** -0.5,  # the noise on the count does its part
    )  # fmt: skip
    accountant, bound = RDPAccountant(), 1.0
    epsilons, accuracies = [], []
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            norms = enn.clip_grad_sample_norms_(model, lambda norms, bound=bound: 1 / norms.clamp(min=bound))
            optimizer.step()
            below = (norms <= bound).sum() + COUNT_NOISE * torch.randn(())
            bound *= float(torch.exp(-0.2 * (below / BATCH - 0.5)))
            accountant.step(noise_multiplier=noise, sample_rate=batches.sample_rate)
        with torch.no_grad():
            accuracies.append(float((model(test[0]).argmax(1) == test[1]).double().mean()))
        epsilons.append(accountant.get_epsilon(DELTA))
    return epsilons, accuracies


def draw(curves: dict[float, Curve], path: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for noise, (epsilons, accuracies) in curves.items():
        axes.plot(epsilons, accuracies, marker=".", label=f"noise {noise:g}")
    axes.set(xscale="log", ylim=(0, 1), xlabel=f"privacy spent: ε at δ = {DELTA:g}", ylabel="accuracy on new digits")
    axes.grid(alpha=0.3)
    axes.legend(title="a point an epoch", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/dp_sgd.png"), help="the picture")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # 8x8 images are too small to share out between threads
    torch.manual_seed(args.seed)
    data, test = load(args.seed)
    curves = {noise: train(data, test.tensors, noise, args.epochs) for noise in (1.0, 2.0, 4.0)}
    for noise, (epsilons, accuracies) in curves.items():
        print(f"noise {noise:g}: {accuracies[-1]:.0%} right at epsilon {epsilons[-1]:.2f}")
    draw(curves, args.out)
    print(f"Accuracy against epsilon: {args.out}")


if __name__ == "__main__":
    main()
