"""One small model a family of layers, each with one tensor as its input: what composes has to compose with all."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cases import Gate, Scale
from oracle import Call, set_seed

WORDS = 9


@dataclass(frozen=True)
class Family:
    """A model, and its input for so many samples.

    Attributes:
        build: Makes the torch.nn model.
        shape: The shape of one sample's input; of words, where `words` is set.
        words: Whether the input is an index.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False

    def module(self, seed: int = 5) -> nn.Module:
        set_seed(seed)
        return self.build()

    def call(self, samples: int, seed: int = 1) -> Call:
        generator = torch.Generator().manual_seed(seed)
        if self.words:
            return Call((torch.randint(WORDS, (samples, *self.shape), generator=generator),))
        return Call((torch.randn(samples, *self.shape, generator=generator, dtype=torch.float64),))


class Taken(nn.Module):
    """A layer that returns a tuple: its first part."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.times)[0]


class Both(nn.Module):
    """A bilinear map of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.cos())


class Gated(nn.Module):
    """A module of the general rule with layers inside, called with two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x, context=x.cos())


class Tied(nn.Module):
    """Words in, words out, by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.mix(self.words(index)).tanh())


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


FAMILIES = [
    Family("mlp", lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)), (4,)),
    Family("bilinear", Both, (5, 4)),
    Family(
        "cnn",
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Conv2d(4, 3, 3)),
        (2, 5, 6),
    ),
    Family("conv_groups", lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same", padding_mode="circular"), (4, 7)),
    Family("conv_transpose", lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 3, 4)),
    Family("embedding", lambda: nn.Sequential(nn.Embedding(WORDS, 4), nn.Tanh(), nn.Linear(4, 2)), (6,), words=True),
    Family("embedding_bag", lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Linear(4, 2)), (6,), words=True),
    Family("tied", Tied, (6,), words=True),
    Family("rms_norm", lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), (6, 4)),
    Family(
        "instance_norm",
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.InstanceNorm1d(4, affine=True)),
        (2, 7),
    ),
    Family("batch_norm", lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4)).eval(), (2, 7)),
    Family("rnn", lambda: Taken(nn.RNN(4, 5, batch_first=True)), (6, 4)),
    Family("lstm", lambda: Taken(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True)), (6, 4)),
    Family("gru", lambda: Taken(nn.GRU(4, 5, batch_first=True)), (6, 4)),
    Family("lstm_cell", lambda: Taken(nn.LSTMCell(4, 5)), (4,)),
    Family("attention", lambda: Taken(nn.MultiheadAttention(4, 2, batch_first=True), times=3), (5, 4)),
    Family("transformer", transformer, (5, 4)),
    Family("general", lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scale(4)), (6, 4)),
    Family("general_with_layers", Gated, (6, 4)),
    Family("parametrized", lambda: parametrizations.weight_norm(nn.Linear(4, 5)), (6, 4)),
]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def families(*names: str) -> pytest.MarkDecorator:
    """Some of them by name."""
    chosen = [family for family in FAMILIES if family.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("family", chosen, ids=lambda family: family.name)
