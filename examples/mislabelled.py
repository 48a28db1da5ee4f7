"""Who taught the network that? Data attribution finds wrong labels among handwritten digits.

Three scores from the rows look for the wrong labels: self-influence, `sum over epochs of lr * |g_i|^2`; harm to clean
digits j, `-sum over epochs of lr * <g_i, g_j>` (TracIn: Pruthi et al., 2020, "Estimating training data influence by
tracing gradient descent"); and GraNd, `|g_i|` early in training (Paul et al., 2021, "Deep learning on a data diet").
The loss finds as many as the best of them. Who taught a network its mistake on one digit, harm alone can say.
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

TRAIN, WRONG, LEARNING_RATE, NETWORKS, EARLY = 1437, 143, 0.1, 3, 3  # GraNd is taken after epoch 3


def load() -> tuple[Tensor, Tensor, Tensor]:
    """Digits `(N, 64)`, their labels `(N,)`, and which of them are wrong `(N,)`: some of the first TRAIN."""
    digits, order = load_digits(), torch.randperm(1797)
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    is_wrong = F.pad(torch.randperm(TRAIN) < WRONG, (0, len(order) - TRAIN))
    labels = torch.tensor(digits.target)[order] + is_wrong * torch.randint(1, 10, order.shape)
    return images[order], labels % 10, is_wrong


def losses_and_grads(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, enn.PerSampleGrads]:
    model.zero_grad()
    losses = F.cross_entropy(model(images), labels, reduction="none")
    losses.mean().backward()
    return losses.detach(), enn.per_sample_grads(model)


def attribute(images: Tensor, labels: Tensor, epochs: int) -> dict[str, Tensor]:
    """Trains by SGD; each training digit's scores `(TRAIN, 1)`, and its harm to each clean digit `(TRAIN, M)`."""
    influence = grand = loss = harm = torch.zeros(())
    for network in range(NETWORKS):
        model = enn.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))).per_sample(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for epoch in track(range(1, epochs + 1), description=f"network {network + 1}"):
            for batch in torch.randperm(TRAIN).split(32):
                losses_and_grads(model, images[batch], labels[batch])
                optimizer.step()
            _, clean = losses_and_grads(model, images[TRAIN:], labels[TRAIN:])
            losses, grads = losses_and_grads(model, images[:TRAIN], labels[:TRAIN])
            influence = influence + LEARNING_RATE * grads.norms() ** 2
            harm = harm - LEARNING_RATE * grads.gram(clean)
            grand = grand + grads.norms() * (epoch == min(EARLY, epochs))
            loss = loss + losses
    return {"self-influence": influence[:, None], "GraNd": grand[:, None], "harm": harm, "loss": loss[:, None]}


def draw(images: Tensor, labels: Tensor, is_wrong: Tensor, curves: dict[str, Tensor], harm: Tensor, path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.2])
    axes = left.subplots()
    for name, curve in curves.items():
        axes.plot(curve, label=name, ls="--" if name == "loss" else "-")
    axes.axline((0, 0), slope=WRONG / TRAIN, color="gray", ls=":", label="chance")
    axes.set(xlabel=f"digits looked at, of {TRAIN}", ylabel=f"wrong labels found, of {WRONG}", xlim=(0, TRAIN / 2))
    axes.legend(loc="lower right")
    harmed = harm.clamp(min=0).sum(0).argmax()  # the clean digit that was harmed most
    right.suptitle("One clean digit, and the training digits that did it most harm")
    shown = [TRAIN + int(harmed), *harm[:, harmed].argsort(descending=True)[:7].tolist()]
    for axis, i in zip(right.subplots(2, 4).flat, shown, strict=True):
        axis.imshow(images[i].reshape(8, 8).numpy(), cmap="gray_r")
        word, color = ("wrong", "crimson") if is_wrong[i] else ("right", "black")
        axis.set_title(f"“{labels[i]}” {word}", color=color)
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/mislabelled.png"), help="the picture")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # 8x8 images are too small to share out between threads
    torch.manual_seed(args.seed)
    images, labels, is_wrong = load()
    scores = attribute(images, labels, args.epochs)
    curves = {name: is_wrong[score.mean(1).argsort(descending=True)].cumsum(0) for name, score in scores.items()}
    print(f"Of the {WRONG} wrong labels this many have one of the {WRONG} highest scores of {TRAIN}:")
    print(", ".join(f"{name} {curve[WRONG - 1]}" for name, curve in curves.items()), f"(chance {WRONG**2 // TRAIN})")
    draw(images, labels, is_wrong, curves, scores["harm"], args.out)
    print(f"The curves, and who harmed one digit: {args.out}")


if __name__ == "__main__":
    main()
