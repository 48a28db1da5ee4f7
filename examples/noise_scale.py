"""How large should a batch be? The gradients' own noise says so, at each stage of the training.

With a batch smaller than the noise scale tr(Σ) / |G|² a step is mostly the luck of the draw; with a larger one it is
mostly signal, and more samples are wasted on it (McCandlish et al., 2018, "An empirical model of large-batch
training"). G is the true gradient, Σ the covariance of the samples' gradients: the rows of a batch tell of both.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import expanded_nn as enn

BATCH, WINDOW = 64, 100  # samples in a step; steps to average over


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def moments(grads: enn.PerSampleGrads) -> Tensor:
    """Unbiased estimates of tr(Σ) and |G|², `(2,)`, from the norms and the mean of a batch of rows."""
    size, square = grads.batch_size, sum(grad.square().sum() for grad in grads.mean().values())
    spread = (grads.norms().square().mean() - square) * size / (size - 1)
    return torch.stack([spread, square - spread / size])  # the mean of B rows has tr(Σ) / B of noise in it


def rows(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, enn.PerSampleGrads]:
    model.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach(), enn.per_sample_grads(model)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> Tensor:
    """SGD; each batch's loss and moments, `(steps, 3)`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in track(range(epochs), description="training"):
        for batch in torch.randperm(len(images)).split(BATCH)[:-1]:
            loss, grads = rows(model, images[batch], labels[batch])
            history.append(torch.stack([loss, *moments(grads)]))
            optimizer.step()
    return torch.stack(history)


def draw(scale: Tensor, losses: Tensor, path: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    steps = range(WINDOW, WINDOW + len(scale))
    top.semilogy(steps, losses)
    top.set_ylabel("training loss")
    bottom.semilogy(steps, scale, "C1")
    bottom.axhline(BATCH, color="gray", linestyle="--", label=f"the batch used, {BATCH}")
    bottom.set(xlabel=f"training step (means of the last {WINDOW})", ylabel="noise scale, samples")
    bottom.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/noise_scale.png"), help="the picture")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # 8x8 images are too small to share out between threads
    torch.manual_seed(args.seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 8 - 1
    model = enn.convert(small_cnn()).per_sample(True)
    early = train(model, images, labels, epochs=2)
    batches = torch.randperm(len(images)).split(BATCH)[:-1]
    small = torch.stack([moments(rows(model, images[batch], labels[batch])[1]) for batch in batches]).mean(0)
    large = moments(rows(model, images, labels)[1])
    print(f"After two epochs: {small[0] / small[1]:.0f} by batches, {large[0] / large[1]:.0f} by all samples at once.")
    history = torch.cat([early, train(model, images, labels, args.epochs - 2)])
    losses, spread, square = history.unfold(0, WINDOW, 1).mean(2).T
    scale = spread / square  # means first: each moment is unbiased, their ratio is not
    print(f"From the first {WINDOW} steps to the last the noise scale goes from {scale[0]:.0f} to {scale[-1]:.0f}; "
          f"in a batch of {BATCH}, the signal from {BATCH / scale[0]:.1f} times the noise to "
          f"{BATCH / scale[-1]:.1f}.")  # fmt: skip
    draw(scale, losses, args.out)
    print(f"The noise scale during the training: {args.out}")


if __name__ == "__main__":
    main()
