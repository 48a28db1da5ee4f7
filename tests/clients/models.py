"""A small classifier and its data, for the clients that bring no model of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from oracle import Call

SAMPLES, BATCH, FEATURES, CLASSES = 16, 4, 6, 3


class Parts(nn.Module):
    """Two methods, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()

    def classify(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Scaled(nn.Module):
    """With a parameter of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() * self.scale)


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def cross_entropy(model: nn.Module, call: Call, first: int = 0) -> Tensor:
    x, y = call.args
    return F.cross_entropy(model(x), y, reduction="sum")


def steps(batches_a_step: int = 1) -> list[list[Call]]:
    x, y = data().tensors
    batches = [Call(pair) for pair in zip(x.split(BATCH), y.split(BATCH), strict=True)]
    return [batches[i : i + batches_a_step] for i in range(0, len(batches), batches_a_step)]
