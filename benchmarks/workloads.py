"""The models that are measured, each with a batch of random data.

They are written from plain `torch.nn` layers, in the form that most contestants accept: position indices have a row for
each sample, and what reaches a layer in the backward is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A model, a batch of B samples, and their loss: the mean over the samples of each one's own loss."""

    model: nn.Module
    x: Tensor  # (B, …)
    y: Tensor  # (B, …)

    def loss(self, model: Callable[[Tensor], Tensor], rows: slice = slice(None), reduction: str = "mean") -> Tensor:
        scores = model(self.x[rows])  # (B, classes) or (B, T, classes)
        return F.cross_entropy(scores.flatten(0, -2), self.y[rows].flatten(), reduction=reduction)

    def to(self, device: torch.device, dtype: torch.dtype) -> Task:
        """A copy; indices stay integers."""
        x, y = (each.to(device, dtype if each.is_floating_point() else each.dtype) for each in (self.x, self.y))
        return Task(deepcopy(self.model).to(device, dtype), x, y)

    def losses(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Each sample's own, `(B,)`."""
        return self.loss(model, reduction="none").reshape(len(self.x), -1).mean(1)


@dataclass(frozen=True)
class Workload:
    """A task by its sizes.

    Attributes:
        about: What it is, in a few words.
        make: Sizes -> the task, on the CPU.
        sizes: What it is measured at.
        quick: What changes for a trial run.
        extra: Whether it is measured against fewer contestants, as it only varies another workload.
        compiles: Whether `torch.compile` takes part; it takes minutes on a loop over time.
        needs_gpu: Whether it is too large for a CPU.
    """

    about: str
    make: Callable[..., Task]
    sizes: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    extra: bool = False
    compiles: bool = False
    needs_gpu: bool = False

    def task(self, device: torch.device, quick: bool = False, **changes: Any) -> Task:
        torch.manual_seed(0)
        sizes = self.sizes | (self.quick if quick else {}) | changes
        dtype = sizes.pop("dtype", torch.get_default_dtype())
        return self.make(**sizes).to(device, dtype)


def perceptron(batch: int, widths: list[int]) -> Task:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return Task(nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,)))


def cnn(batch: int, channels: int) -> Task:
    """The network of torch's own tutorial on per-sample gradients."""
    model = nn.Sequential(
        *(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Conv2d(channels, 2 * channels, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(288 * channels, 4 * channels), nn.ReLU(), nn.Linear(4 * channels, 10)),
    )
    return Task(model, torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,)))


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm, or three with a narrow one in the middle."""

    def __init__(self, before: int, after: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inner = after // 4 if bottleneck else after
        shapes = [(before, inner, 1, 1), (inner, inner, 3, stride), (inner, after, 1, 1)]
        if not bottleneck:
            shapes = [(before, after, 3, stride), (after, after, 3, 1)]
        self.convs = nn.ModuleList(convolution(*shape) for shape in shapes)
        self.norms = nn.ModuleList(nn.GroupNorm(8, shape[1]) for shape in shapes)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(convolution(before, after, 1, stride), nn.GroupNorm(8, after))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(F.relu(h) if i else h))
        return F.relu(h + self.shortcut(x))


def convolution(before: int, after: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)


class ResNet(nn.Module):
    """A residual network for small images, with GroupNorm in place of BatchNorm, which mixes the samples."""

    def __init__(self, width: int, blocks: list[int], bottleneck: bool) -> None:
        super().__init__()
        self.stem, self.norm = convolution(3, width, 3, 1), nn.GroupNorm(8, width)
        before, stages = width, []
        for stage, count in enumerate(blocks):
            after = width * 2**stage * (4 if bottleneck else 1)
            for i in range(count):
                stages.append(ResidualBlock(before, after, 2 if stage and not i else 1, bottleneck))
                before = after
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def resnet(batch: int, width: int, blocks: list[int], size: int = 32, bottleneck: bool = False) -> Task:
    model = ResNet(width, blocks, bottleneck)
    return Task(model, torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))


class Block(nn.Module):
    """A transformer layer, with the norms first."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, heads, T, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, steps: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(steps, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:  # (B, T) -> (B, T, vocabulary)
        places = torch.arange(words.shape[1], device=words.device).repeat(len(words), 1)
        return self.head(self.norm(self.blocks(self.words(words) + self.places(places))))


def gpt(batch: int, steps: int, vocabulary: int, width: int, layers: int, heads: int) -> Task:
    model = GPT(vocabulary, steps, width, layers, heads)
    return Task(model, *torch.randint(vocabulary, (2, batch, steps)))


class ViT(nn.Module):
    """A vision transformer that classifies by its first position."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, patch, patch), nn.Embedding((size // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, size, size) -> (B, 10)
        h = self.patches(x).flatten(2).transpose(1, 2)
        places = torch.arange(h.shape[1], device=x.device).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(h + self.places(places))[:, 0]))


def vit(batch: int, size: int, patch: int, width: int, layers: int, heads: int) -> Task:
    model = ViT(size, patch, width, layers, heads)
    return Task(model, torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))


class Recurrent(nn.Module):
    """A recurrent layer and a linear head on its last output."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, hidden: int, layers: int, both_ways: bool) -> None:
        super().__init__()
        self.rnn = kind(inputs, hidden, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(hidden * (2 if both_ways else 1), 10)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, inputs) -> (B, 10)
        return self.head(self.rnn(x)[0][:, -1])


def recurrent(
    batch: int, steps: int, hidden: int, kind: type[nn.RNNBase] = nn.LSTM, layers: int = 1, both_ways: bool = False
) -> Task:
    model = Recurrent(kind, 64, hidden, layers, both_ways)
    return Task(model, torch.randn(batch, steps, 64), torch.randint(10, (batch,)))


class Text(nn.Module):
    """The mean of a text's word vectors, and two linear layers on it."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:  # (B, T) -> (B, 10)
        return self.head(F.relu(self.hidden(self.words(words).mean(1))))


def text(batch: int, steps: int, vocabulary: int, width: int) -> Task:
    words = torch.randint(vocabulary, (batch, steps))
    return Task(Text(vocabulary, width), words, torch.randint(10, (batch,)))


TEXT = {"batch": 32, "steps": 64, "vocabulary": 20_000, "width": 128}
SMALL_GPT = {"batch": 8, "steps": 64, "vocabulary": 1000, "width": 256, "layers": 4, "heads": 4}
QUICK_GPT = {"batch": 3, "steps": 5, "vocabulary": 11, "width": 16, "layers": 1, "heads": 2}
LSTM = {"batch": 32, "steps": 32, "hidden": 128}
LONG_RNN = {"batch": 32, "steps": 128, "hidden": 512}
QUICK_RNN = {"batch": 3, "steps": 5, "hidden": 8}

WORKLOADS = {
    "cnn": Workload(
        "CNN of torch's tutorial", cnn, {"batch": 64, "channels": 32}, {"batch": 3, "channels": 4}, compiles=True
    ),
    "mlp": Workload(
        "784-1024-1024-10 perceptron",
        perceptron,
        {"batch": 64, "widths": [784, 1024, 1024, 10]},
        {"batch": 3, "widths": [9, 8, 8, 5]},
        compiles=True,
    ),
    "resnet": Workload(
        "ResNet-18 with GroupNorm, 32x32 images",
        resnet,
        {"batch": 16, "width": 64, "blocks": [2, 2, 2, 2]},
        {"batch": 3, "width": 8, "blocks": [1, 1], "size": 8},
    ),
    "gpt": Workload("GPT of 4 layers, width 256", gpt, SMALL_GPT, QUICK_GPT, compiles=True),
    "vit": Workload(
        "ViT of 4 layers, width 192, 32x32 images",
        vit,
        {"batch": 16, "size": 32, "patch": 4, "width": 192, "layers": 4, "heads": 3},
        {"batch": 3, "size": 8, "patch": 4, "width": 16, "layers": 1, "heads": 2},
        compiles=True,
    ),
    "text": Workload(
        "mean of embeddings, 20 000 words", text, TEXT, {"batch": 3, "steps": 5, "vocabulary": 11, "width": 8}
    ),
    "lstm": Workload("LSTM 64-128", recurrent, LSTM, QUICK_RNN),
    "tiny": Workload(
        "3 linear layers of 16: overhead alone",
        perceptron,
        {"batch": 8, "widths": [16] * 4},
        {"batch": 3, "widths": [4] * 4},
        compiles=True,
    ),
    "gru": Workload("GRU 64-128", recurrent, LSTM | {"kind": nn.GRU}, QUICK_RNN, extra=True),
    "bilstm": Workload(
        "LSTM 64-128, 2 layers, both ways", recurrent, LSTM | {"layers": 2, "both_ways": True}, QUICK_RNN, extra=True
    ),
    "lstm512": Workload("LSTM 64-512", recurrent, LONG_RNN, QUICK_RNN, extra=True),
    "gru512": Workload("GRU 64-512", recurrent, LONG_RNN | {"kind": nn.GRU}, QUICK_RNN, extra=True),
    "gpt2": Workload(
        "GPT-2 small, bfloat16",
        gpt,
        {"batch": 16, "steps": 512, "vocabulary": 50_257, "width": 768, "layers": 12, "heads": 12}
        | {"dtype": torch.bfloat16},
        QUICK_GPT,
        needs_gpu=True,
    ),
    "resnet50": Workload(
        "ResNet-50 with GroupNorm, 64x64 images",
        resnet,
        {"batch": 64, "width": 64, "blocks": [3, 4, 6, 3], "size": 64, "bottleneck": True},
        {"batch": 3, "width": 8, "blocks": [1, 1], "size": 8},
        needs_gpu=True,
    ),
    "lstm1024": Workload("LSTM 64-1024", recurrent, LONG_RNN | {"hidden": 1024}, QUICK_RNN, needs_gpu=True),
}
