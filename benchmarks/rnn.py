"""Recurrent classifiers: a step with per-sample gradients, as a multiple of the plain mini-batch step.

All contestants take turns in one process, so that a busy machine slows all alike; medians over the rounds.

    python benchmarks/rnn.py                 # the table
    python benchmarks/rnn.py --threads 2 --rounds 30 --only lstm
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn

CLASSES = 10
CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any], tuple[int, int]]] = {
    # name: the layer, its arguments, (B, T)
    "lstm": (nn.LSTM, {"input_size": 64, "hidden_size": 128}, (32, 32)),
    "gru": (nn.GRU, {"input_size": 64, "hidden_size": 128}, (32, 32)),
    "tanh": (nn.RNN, {"input_size": 64, "hidden_size": 128}, (32, 32)),
    "lstm-2-layers-both-ways": (
        nn.LSTM,
        {"input_size": 64, "hidden_size": 128, "num_layers": 2, "bidirectional": True},
        (32, 32),
    ),
    "lstm-512-128-steps": (nn.LSTM, {"input_size": 64, "hidden_size": 512}, (32, 128)),
    "gru-512-128-steps": (nn.GRU, {"input_size": 64, "hidden_size": 512}, (32, 128)),
}


class Classifier(nn.Module):
    """A recurrent layer and a linear head on its last output."""

    def __init__(self, layer: type[nn.RNNBase], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.rnn = layer(batch_first=True, **arguments)
        features = self.rnn.hidden_size * (2 if self.rnn.bidirectional else 1)
        self.head = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def contestants(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, Callable[[], None]]]:
    """Steps by name, the plain one first."""

    def backward(model: nn.Module) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    def plain() -> None:
        backward(model)

    yield "plain", plain

    dense = enn.convert(model).per_sample(materialize=True)
    yield "dense rows", lambda: backward(dense)

    factored = enn.convert(model).per_sample()
    yield "factored", lambda: backward(factored)

    def clip(model: nn.Module) -> None:
        backward(model)
        parameters = list(model.parameters())
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters], 1).norm(dim=1)
        weights = (1 / norms).clamp(max=1.0)
        for p in parameters:
            p.grad = torch.einsum("b,b...->...", weights, p.grad_sample)

    yield "clip and sum", lambda: clip(factored)

    only_rows = enn.convert(model).per_sample(accumulate_grad=False)
    yield "clip and sum, no plain .grad", lambda: clip(only_rows)

    def loop() -> None:
        for i in range(len(x)):
            model.zero_grad()
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()

    yield "loop over the samples", loop


def measure(name: str, rounds: int, skip: tuple[str, ...]) -> None:
    layer, arguments, (batch, steps) = CASES[name]
    torch.manual_seed(0)
    model = Classifier(layer, arguments)
    x, y = torch.randn(batch, steps, arguments["input_size"]), torch.randint(0, CLASSES, (batch,))
    entrants = {label: step for label, step in contestants(model, x, y) if label not in skip}
    times: dict[str, list[float]] = {label: [] for label in entrants}
    for turn in range(rounds + 2):
        for label, step in entrants.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[label].append(time.perf_counter() - start)
    plain = times["plain"]
    print(f"{name}  (B={batch}, T={steps}, {arguments}): plain {statistics.median(plain) * 1e3:.1f} ms")
    for label, each in times.items():
        ratio = statistics.median(t / p for t, p in zip(each, plain, strict=True))
        print(f"  {label:30s} {ratio:6.2f}x   ({statistics.median(each) * 1e3:.1f} ms, best {min(each) * 1e3:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--no-loop", action="store_true", help="without the slow loop over the samples")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.only or CASES:
        measure(name, arguments.rounds, ("loop over the samples",) if arguments.no_loop else ())


if __name__ == "__main__":
    main()
