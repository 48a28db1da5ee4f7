"""Two kinds of points pull at one network: a physics-informed network for the Poisson equation, balanced by its rows.

Points in a square, whose loss holds the network's Laplacian, and points on its boundary are two passes that end in one
backward. Every 25 steps the boundary's weight moves to where the mean norms of their rows agree. (Wang et al., 2021,
SIAM J. Sci. Comput. 43, compare the terms' own.) Hooks on layers fail here, as the loss runs backward through them.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import expanded_nn as enn

INSIDE, EDGE = 256, 64


def solution(x: Tensor) -> Tensor:
    """Zero on the boundary of the unit square, with a bump at (0.7, 0.3)."""
    return (torch.pi * x).sin().prod(1) * (0.2 + (-20 * (x - torch.tensor([0.7, 0.3])).square().sum(1)).exp())


def laplacian(values: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))


def residual(model: nn.Module, inside: Tensor) -> Tensor:
    x = inside.clone().requires_grad_()
    return (laplacian(model(x), x) - laplacian(solution(x), x).detach()) ** 2


def boundary() -> Tensor:
    sides = torch.randint(2, (EDGE, 1)), torch.rand(EDGE, 1).round()  # x or y, 0 or 1
    return torch.rand(EDGE, 2).scatter(1, *sides)


def train(weight: float, balance: bool, steps: int) -> tuple[nn.Module, float]:
    model = enn.convert(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in track(range(steps), description="balanced" if balance else f"weight {weight:g}"):
        model.per_sample(balance and step % 25 == 0).zero_grad()
        (residual(model, torch.rand(INSIDE, 2)).mean() + weight * (model(boundary()) ** 2).mean()).backward()
        if balance and step % 25 == 0:
            norms = enn.per_sample_grads(model).norms()  # the inner points' rows come first, as their forward did
            weight *= 0.9 + 0.1 * float(norms[:INSIDE].mean() / norms[INSIDE:].mean())
        optimizer.step()
        optimizer.param_groups[0]["lr"] -= 1e-2 / steps
    return model, weight


def check_rows(model: nn.Module, inside: Tensor, edge: Tensor) -> tuple[Tensor, float]:
    """The norm of each point's row, and the rows' largest relative error against a loop over the points."""
    model.per_sample(True).zero_grad()
    (residual(model, inside).mean() + (model(edge) ** 2).mean()).backward()
    rows = enn.per_sample_grads(model).flatten()
    losses = [residual(model.per_sample(False), x[None]) for x in inside] + [model(x[None]) ** 2 for x in edge]
    grads = [torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True) for loss in losses]
    loop = torch.stack([nn.utils.parameters_to_vector(grad) for grad in grads])
    return rows.norm(dim=1), float(((rows - loop).norm(dim=1) / loop.norm(dim=1)).max())


def draw(panels: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    for axes, (title, (x, color)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        figure.colorbar(axes.scatter(*x.T, c=color, s=9, marker="s"), ax=axes)
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
        print(f"relative error {error.norm() / solution(grid).norm():.1%} with the boundary's weight at {weight:.0f}")
    inside, edge = torch.rand(INSIDE, 2), boundary()
    norms, difference = check_rows(model, inside, edge)
    print(f"The rows differ from a loop over the points by {difference:.0e} of their norm at most.")
    pull = torch.cat([inside, edge]), norms.log10()
    draw({"solution": (grid, error + solution(grid)), "error": (grid, error), "log10 |gradient|": pull}, args.out)
    print(f"Solution, error, and who pulls how hard: {args.out}")


if __name__ == "__main__":
    main()
