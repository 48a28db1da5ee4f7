"""Which labels are wrong? Ask the gradients.

One in ten of scikit-learn's handwritten digits gets a wrong label, and a small CNN is trained on them all. A
sample whose label contradicts what the others teach keeps pulling hard at the weights: the norm of its own
gradient, added up over the epochs, is large. Ranking the samples by it puts the wrong labels on top.

There are 179 wrong labels. Of the 179 largest norms 173 belong to them (170 to 172 with the seeds 1 to 4), where chance
would find 18. The loss, added up likewise, finds as many (170 to 175): this shows how to get at the rows, not that this
task needs them.
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


def load_with_wrong_labels(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Digits `(N, 1, 8, 8)`, their true labels `(N,)`, and labels `(N,)` of which one in ten is wrong."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    truth = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(truth), generator=generator)[: len(truth) // 10]
    labels = truth.clone()
    labels[wrong] += torch.randint(1, 10, wrong.shape, generator=generator)
    return images, truth, labels % 10


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def gradient_norms(images: Tensor, labels: Tensor, epochs: int) -> Tensor:
    """Trains a CNN; each sample's gradient norm `(N,)`, summed over the epochs."""
    model = enn.convert(small_cnn()).per_sample(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    norms = torch.zeros(len(images))
    for _ in track(range(epochs), description="training"):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            squares = [p.grad_sample.flatten(1).norm(dim=1) ** 2 for p in model.parameters()]
            norms[batch] += torch.stack(squares).sum(0).sqrt()
            optimizer.step()
    return norms


def draw(images: Tensor, truth: Tensor, labels: Tensor, ranking: Tensor, path: Path) -> None:
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    figure.suptitle("The 40 digits with the largest gradients, and the labels they were given")
    for axis, i in zip(figure.subplots(4, 10).flat, ranking.tolist(), strict=False):
        word, color = ("right", "black") if labels[i] == truth[i] else ("wrong", "crimson")
        axis.imshow(images[i, 0].numpy(), cmap="gray_r")
        axis.set_title(f"“{labels[i]}” {word}", color=color)
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/quickstart.png"), help="the picture")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # 8x8 images are too small to share out between threads
    torch.manual_seed(args.seed)
    images, truth, labels = load_with_wrong_labels(args.seed)
    ranking = gradient_norms(images, labels, args.epochs).argsort(descending=True)

    is_wrong = labels != truth
    k = int(is_wrong.sum())
    hits = int(is_wrong[ranking[:k]].sum())
    print(f"{hits} of the {k} wrong labels are among the {k} largest gradient norms of {len(labels)}; "
          f"chance would find {k * k / len(labels):.0f}.")  # fmt: skip
    draw(images, truth, labels, ranking, args.out)
    print(f"The 40 largest: {args.out}")


if __name__ == "__main__":
    main()
