"""Which training digits does a prediction depend on? TRAK, from a store of projected gradients, put to the test.

TRAK (Park et al., 2023) regresses on gradients of the margin, projected to a few numbers. Does it predict a new
digit's margin after a training on half of the digits? The rank correlation is the linear datamodeling score.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import expanded_nn as enn

TRAIN, NEW, DIM = 1437, 60, 128


def margins(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (B,) log p / (1 - p) of the right label
    outputs, labels = model(images), labels[:, None]
    return outputs.gather(1, labels)[:, 0] - outputs.scatter(1, labels, -torch.inf).logsumexp(1)


def fit(images: Tensor, labels: Tensor) -> nn.Module:
    model = enn.convert(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def attribute(model: nn.Module, images: Tensor, labels: Tensor, folder: str) -> dict[str, Tensor]:
    """What each training digit adds to each new digit's margin, `(TRAIN, NEW)`."""
    model.per_sample(True, accumulate_grad=False)  # rows alone, no .grad
    store = enn.ProjectionStore(folder, enn.Projection(DIM), model)
    for ids in store.batches(range(TRAIN + NEW), 256, progress=False):
        margins(model, images[ids], labels[ids]).mean().backward()
        store.add(ids, enn.per_sample_grads(model))
    train, new = store.read(range(TRAIN + NEW)).split([TRAIN, NEW])
    with torch.no_grad():
        slopes = torch.sigmoid(-margins(model, images[:TRAIN], labels[:TRAIN]))[:, None]  # by which losses fall: 1 - p
    damping = 0.1 * train.square().sum(0).mean() * torch.eye(DIM)  # relative to the diagonal of train.T @ train
    trak = slopes * (train @ torch.linalg.solve(train.T @ train + damping, new.T))
    return {"TRAK": trak, "TracIn": slopes * (train @ new.T), "random": torch.randn(TRAIN, NEW)}


def foretold(scores: Tensor, halves: Tensor, outcomes: Tensor) -> Tensor:
    """The rank correlation over the halves `(S, TRAIN)` of forecasts with outcomes `(S, NEW)`, for each new digit."""
    ranks = torch.stack([values.argsort(0).argsort(0).float() for values in (halves @ scores, outcomes)])
    return nn.functional.cosine_similarity(*(ranks - ranks.mean(1, keepdim=True)), dim=0)


def draw(scores: dict[str, Tensor], forecasts: dict[str, Tensor], outcome: Tensor, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, forecast in forecasts.items():
        left.plot(range(1, 6), scores[name].mean(1), "o-", label=name)
        right.plot((forecast - forecast.mean()) / forecast.std(), outcome, ".", label=name)
    left.set(xlabel="networks averaged", ylabel="linear datamodeling score", xticks=range(1, 6), ylim=(None, 0.8))
    right.set(xlabel="forecast, standardized", ylabel="margin of one new digit after training on a half")
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/trak.png"), help="the picture")
    parser.add_argument("--halves", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # 8x8 images are too small to share out between threads
    torch.manual_seed(args.seed)
    digits, order = load_digits(), torch.randperm(1797)[: TRAIN + NEW]
    images, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 8 - 1, torch.tensor(digits.target)[order]
    halves, outcomes, runs = torch.stack([torch.randperm(TRAIN) < TRAIN // 2 for _ in range(args.halves)]), [], []
    for half in track(halves, description="training on halves"):
        outcomes.append(margins(fit(images[:TRAIN][half], labels[:TRAIN][half]), images[TRAIN:], labels[TRAIN:]))
    for _ in track(range(5), description="attributing"):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(attribute(fit(images[:TRAIN], labels[:TRAIN]), images, labels, folder))
    halves, outcomes = halves.float(), torch.stack(outcomes).detach()
    totals = {name: torch.stack([run[name] for run in runs]).cumsum(0) for name in runs[0]}  # (5, TRAIN, NEW)
    scores = {name: torch.stack([foretold(t, halves, outcomes) for t in total]) for name, total in totals.items()}
    for name, (first, *_, last) in scores.items():
        print(f"{name}: linear datamodeling score {first.mean():.2f}, of 5 networks {last.mean():.2f}")
    digit = scores["TRAK"][-1].argsort()[NEW // 2]  # neither the best forecasts nor the worst
    draw(scores, {name: halves @ total[-1, :, digit] for name, total in totals.items()}, outcomes[:, digit], args.out)
    print(f"The scores, and forecasts for one new digit: {args.out}")


if __name__ == "__main__":
    main()
