"""What a step with per-sample gradients costs, as a ratio to the plain step of the same model.

All variants run in one process, interleaved, and the medians are compared. Usage: python benchmarks/steps.py [names]
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn

Step = Callable[[], None]


def cnn() -> nn.Module:
    """The network of the functorch tutorial on per-sample gradients."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


class Transformer(nn.Module):
    """A small GPT: width 256, 4 layers, 64 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(1000, 256), nn.Embedding(64, 256), nn.Linear(256, 1000)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        steps = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(steps)
        hidden = self.words(words) + self.places(torch.arange(steps)[None])
        return self.head(self.layers(hidden, mask=mask, is_causal=True)).transpose(1, 2)


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "cnn": (cnn, lambda: torch.randn(64, 1, 28, 28), lambda: torch.randint(10, (64,))),
    "mlp": (mlp, lambda: torch.randn(64, 784), lambda: torch.randint(10, (64,))),
    "gpt": (Transformer, lambda: torch.randint(1000, (8, 64)), lambda: torch.randint(1000, (8, 64))),
    "tiny": (tiny, lambda: torch.randn(8, 16), lambda: torch.randint(16, (8,))),
}


def step(model: nn.Module, x: Tensor, y: Tensor, *, clip: bool = False) -> Step:
    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), y).backward()
        if clip:
            enn.clip_grad_sample_norms_(model, 1.0)

    return run


def variants(plain: nn.Module, x: Tensor, y: Tensor) -> dict[str, Step]:
    return {
        "plain": step(plain, x, y),
        "mode off": step(enn.convert(plain), x, y),
        "factored rows": step(enn.convert(plain).per_sample(), x, y),
        "dense rows": step(enn.convert(plain).per_sample(materialize=True), x, y),
        "clip and sum": step(enn.convert(plain).per_sample(accumulate_grad=False), x, y, clip=True),
    }


def measure(steps: dict[str, Step], seconds: float = 6.0) -> dict[str, float]:
    """The median time of each step, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[2:]) for name, each in times.items()}


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:] or WORKLOADS:
        model, make_x, make_y = WORKLOADS[name]
        found = measure(variants(model(), make_x(), make_y()))
        ratios = "  ".join(f"{each} {found[each] / found['plain']:.2f}" for each in found if each != "plain")
        print(f"{name:5} plain {found['plain'] * 1e3:7.2f} ms   {ratios}")


if __name__ == "__main__":
    main()
