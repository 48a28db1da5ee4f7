"""Two kinds of points pull at one network: a physics-informed network for the Poisson equation, balanced by its rows.

The loss holds the Laplacian of the network at points inside a square, and its value at points of the boundary. These
are two passes of different numbers of points that end in one backward; their rows stand one below the other. Every 25
steps the boundary's weight is moved to where the mean norms of both agree (after Wang et al., 2021, "Understanding and
mitigating gradient flow pathologies in physics-informed neural networks"). Hooks that pair each backward of a layer
with a forward fail here: the loss itself runs backward through the layers.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import expanded_nn as enn

INSIDE, EDGE, LEARNING_RATE = 256, 64, 1e-2


def solution(x: Tensor) -> Tensor:
    """Zero on the boundary of the unit square, with a bump at (0.7, 0.3)."""
    return (torch.pi * x).sin().prod(1) * (0.2 + (-20 * ((x - x.new_tensor([0.7, 0.3])) ** 2).sum(1)).exp())


def laplacian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))


def points() -> tuple[Tensor, Tensor]:
    edge, side = torch.rand(EDGE, 2), torch.randint(4, (EDGE,))
    edge[torch.arange(EDGE), side % 2] = (side // 2).to(edge)
    return torch.rand(INSIDE, 2), edge


def losses(model: nn.Module, inside: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    return (laplacian(model, inside) - laplacian(solution, inside).detach()) ** 2, model(edge).squeeze(1) ** 2


def train(weight: float, balance: bool, steps: int) -> tuple[nn.Module, float]:
    model = enn.convert(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in track(range(steps), description="balanced" if balance else f"weight {weight:g}"):
        model.per_sample(balance and step % 25 == 0).zero_grad()
        inner, outer = losses(model, *points())
        (inner.mean() + weight * outer.mean()).backward()
        if balance and step % 25 == 0:
            norms = enn.per_sample_grads(model).norms()
            weight *= 0.9 + 0.1 * float(norms[:INSIDE].mean() / norms[INSIDE:].mean())
        optimizer.step()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (step + 1) / steps)
    return model.per_sample(False), weight


def check_rows(model: nn.Module, inside: Tensor, edge: Tensor) -> tuple[Tensor, float]:
    """The norms of all rows, and the rows' largest relative error against a loop over the points."""
    sum(each.mean() for each in losses(model.per_sample(True), inside, edge)).backward()
    rows = enn.per_sample_grads(model).flatten()
    alone = [losses(model.per_sample(False), x[None], edge[:1])[0] for x in inside]
    alone += [losses(model, inside[:1], x[None])[1] for x in edge]
    grads = [torch.autograd.grad(each, [*model.parameters()], materialize_grads=True) for each in alone]
    loop = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in grads])
    return rows.norm(dim=1), float(((rows - loop).norm(dim=1) / loop.norm(dim=1)).max())


def draw(panels: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    for axes, (title, (where, values)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        figure.colorbar(axes.scatter(*where.T, c=values, s=9, marker="s"), ax=axes)
        axes.set(title=title, aspect="equal")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/pinn.png"), help="the picture")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the network is too small to share out between threads
    torch.set_default_dtype(torch.float64)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 61), torch.linspace(0, 1, 61))
    for start, balance in ((1.0, False), (100.0, False), (1.0, True)):
        torch.manual_seed(args.seed)
        model, weight = train(start, balance, args.steps)
        error = model(grid).detach().squeeze(1) - solution(grid)
        print(
            f"boundary's weight {'ends at' if balance else 'is'} {weight:.0f}: relative error {error.norm() / solution(grid).norm():.1%}"
        )
    inside, edge = points()
    norms, difference = check_rows(model, inside, edge)
    print(f"The rows differ from a loop over the points by {difference:.0e} of their norm at most.")
    pull = (torch.cat([inside, edge]), norms.log10())
    draw({"solution": (grid, solution(grid)), "error": (grid, error), "log10 of the gradient's norm": pull}, args.out)
    print(f"Solution, error, and who pulls how hard: {args.out}")


if __name__ == "__main__":
    main()
