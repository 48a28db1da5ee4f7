"""Two matrices from the rows: the tangent kernel predicts a training, and the Fisher matrix need not be built.

Inner products of the outputs' gradients are the empirical neural tangent kernel (Jacot et al., 2018). If it stayed as
it is at the start, training would have a closed form; wide networks come nearest to it. Inner products of the losses'
gradients, divided by B, have the nonzero eigenvalues of the empirical Fisher matrix F `(P, P)`.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import expanded_nn as enn

WIDTHS, TRAIN = (512, 64, 16), 240


def load() -> tuple[Tensor, Tensor]:
    """357 threes and eights `(N, 64)`, and -1 for each three, 1 for each eight `(N,)`."""
    digits = load_digits()
    indices = torch.tensor([i for i, digit in enumerate(digits.target) if digit in (3, 8)])[torch.randperm(357)]
    return torch.tensor(digits.data)[indices] / 8 - 1, torch.tensor(digits.target)[indices].sub(5.0).sign()


def gradients(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, enn.PerSampleGrads]:
    """The outputs `(B,)`, and the gradient of each one; or that of its squared error, if there are labels."""
    model.zero_grad()
    outputs = model.per_sample(True, loss_reduction="sum")(images).squeeze(1)
    (outputs if labels is None else (outputs - labels) ** 2 / 2).sum().backward()
    return outputs.detach(), enn.per_sample_grads(model)


def foretell_and_train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> tuple[Tensor, ...]:
    """The new digits' outputs as foretold, and as trained by gradient descent; the kernel's eigenvalues."""
    start, grads = gradients(model, images[:TRAIN])
    new, new_grads = gradients(model, images[TRAIN:])
    values, vectors = torch.linalg.eigh(grads.gram())
    rate = 0.5 / float(values[-1])
    learned = vectors @ ((1 - (1 - rate * values) ** steps) / values * (vectors.T @ (labels[:TRAIN] - start)))
    optimizer = torch.optim.SGD(model.per_sample(False).parameters(), lr=rate)
    for _ in track(range(steps), description="training"):
        optimizer.zero_grad()
        ((model(images[:TRAIN]).squeeze(1) - labels[:TRAIN]) ** 2 / 2).sum().backward()
        optimizer.step()
    return new + new_grads.gram(grads) @ learned, model(images[TRAIN:]).squeeze(1).detach(), values


def fisher(grads: enn.PerSampleGrads) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues `(B,)` of F, and those of the Gram matrix divided by B; prints how they differ."""
    matrix, v = grads.flatten().T @ grads.flatten() / TRAIN, grads.mean()
    ours, plain = (nn.utils.parameters_to_vector(named.values()) for named in (grads.sum(grads.matvec(v) / TRAIN), v))
    direct, by_gram = torch.linalg.eigvalsh(matrix)[-TRAIN:], torch.linalg.eigvalsh(grads.gram() / TRAIN)
    apart, error = (direct - by_gram).abs().max() / direct[-1], (ours - matrix @ plain).norm() / ours.norm()
    print(f"F's eigenvalues by the Gram matrix are {apart:.0e} off, F v by matvec and sum {error:.0e}.")
    return direct, by_gram


def draw(results: dict[int, tuple[Tensor, ...]], direct: Tensor, by_gram: Tensor, path: Path) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for width, (foretold, trained, values) in results.items():
        left.plot(foretold, trained, ".", label=f"width {width}")
        middle.semilogy(values.flip(0))
    left.axline((0, 0), slope=1, color="gray", ls=":")
    left.set(title="outputs for new digits", xlabel="foretold by the kernel", ylabel="after the training")
    left.legend()
    middle.set_title("eigenvalues of the kernels")
    right.semilogy(direct.flip(0), "C0o", by_gram.flip(0), "k-")
    right.set_title("eigenvalues of F; line: gram / B")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/ntk_fisher.png"), help="the picture")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the networks are too small to share out between threads
    torch.manual_seed(args.seed)
    (images, labels), results = load(), {}
    for n in WIDTHS:
        model = enn.convert(nn.Sequential(nn.Linear(64, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 1)))
        foretold, trained, _ = results[n] = foretell_and_train(model.double(), images, labels, args.steps)
        network, kernel = ((outputs * labels[TRAIN:] > 0).double().mean() for outputs in (trained, foretold))
        off = (foretold - trained).norm() / trained.norm()
        print(f"width {n}: {off:.0%} off the kernel's forecast; {network:.1%} right, the forecast {kernel:.1%}")
    draw(results, *fisher(gradients(model, images[:TRAIN], labels[:TRAIN])[1]), args.out)
    print(f"Forecasts and spectra: {args.out}")


if __name__ == "__main__":
    main()
