"""What is due after each step of a training script, by the words of the contract, in plain Python.

`Sent` is a forward, with the loop over its samples on the plain model; `Contract` says which forwards are one pass, and
what is added, appended, stale. Nothing here looks at the library but the models' uses of `expanded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn

TOLERANCE = 1e-9

# --- the models ---------------------------------------------------------------------------------------------------


class Fault(Exception):
    """What goes wrong in the user's code."""


class Gain(nn.Module):
    """A module that goes through the general rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain


class Layers(nn.Module):
    """A block used twice, a tied weight, a frozen layer, a head that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.first = nn.Linear(3, 3)
        self.mix = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.gain = Gain()
        self.head = nn.Linear(3, 2)
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.words.weight
        self.fails = False

    def encode(self, x: Tensor, words: Tensor) -> Tensor:
        h = self.first(x) + self.words(words).sum(1)
        h = self.mix(h.tanh())
        if self.fails:
            raise Fault
        return self.gain(self.frozen(h))

    def forward(self, x: Tensor, words: Tensor, path: str, reentrant: bool | None = None) -> Tensor:
        h = self.encode(x, words)
        h = self.mix(h) if reentrant is None else checkpoint(self.mix, h, use_reentrant=reentrant)
        return h if path == "features" else getattr(self, path)(h)


class Own(Layers):
    """With a parameter of the root itself, so that the general rule serves the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, words: Tensor, path: str, reentrant: bool | None = None) -> Tensor:
        return super().forward(x + self.shift, words, path, reentrant)


# --- what is computed ---------------------------------------------------------------------------------------------

Use = Callable[[Any, Tensor, Tensor], Tensor]  # (model, x, words) -> (B, …), on the converted model and the plain one


def through_expanded(model: Any, x: Tensor, words: Tensor) -> Tensor:
    """A head outside of its layer, in the loss."""
    return enn.functional.linear(model(x, words, "features"), enn.expanded(model.head.weight))


def penalized(model: Any, x: Tensor, words: Tensor) -> Tensor:
    """A penalty on a weight in every sample's loss."""
    output = model(x, words, "head")
    return output + enn.expanded(model.head.weight).square().sum((-2, -1))[..., None]


WHOLE: dict[str, Use] = {
    "head": lambda model, x, words: model(x, words, "head"),
    "back": lambda model, x, words: model(x, words, "back"),
    "features": lambda model, x, words: model(x, words, "features"),
    "expanded": through_expanded,
    "penalized": penalized,
    "checkpoint": lambda model, x, words: model(x, words, "head", False),
    "reentrant": lambda model, x, words: model(x, words, "head", True),
}
# Each layer begins or goes on with a pass. Before the use, the parts of the model that it calls.
PIECES: dict[str, tuple[Sequence[str], Use]] = {
    "layer": (("head",), lambda model, x, words: model.head(x)),
    "submodule": (("mix",), lambda model, x, words: model.mix(x)),
    "general": (("gain",), lambda model, x, words: model.gain(x)),
    "two_layers": (("first", "head"), lambda model, x, words: model.head(model.first(x))),
    "method": (("first", "words", "mix", "gain", "head"), lambda model, x, words: model.head(model.encode(x, words))),
}
# A parameter is used that no layer sees; before the use, the parameter.
OUTSIDE: dict[str, tuple[str, Use]] = {
    "own_parameter": ("shift", lambda model, x, words: model.first(x) * model.shift),
    "plain_weight": ("head.weight", lambda model, x, words: model.first(x) @ model.head.weight.t()),
    "in_the_loss": ("first.weight", lambda model, x, words: model(x, words, "head") + model.first.weight.sum()),
}
TOGETHER: dict[str, Use] = {
    "method": PIECES["method"][1],
    "two_layers": PIECES["two_layers"][1],
    "forward": WHOLE["head"],
    "two_forwards": lambda model, x, words: model(x, words, "head").sin() + model(-x, words, "head"),
    "penalized": penalized,
    "weight": lambda model, x, words: enn.functional.linear(x, enn.expanded(model.head.weight)),
    "own_parameter": lambda model, x, words: model.first(x) * enn.expanded(model.shift),
}
USES: dict[str, Use] = {
    "alone": lambda model, x, words: 0 * x + enn.expanded(model.head.weight).square().sum((-2, -1))[..., None],
    **WHOLE,
    **{name: use for name, (_, use) in PIECES.items()},
    **{f"outside:{name}": use for name, (_, use) in OUTSIDE.items()},
    **{f"together:{name}": use for name, use in TOGETHER.items()},
}
CHECKPOINTS = ("checkpoint", "reentrant")
COEFFICIENTS = torch.randn(8, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def sample_losses(output: Tensor, x: Tensor, kind: str, first: int = 0) -> Tensor:  # (B,)
    """Each sample's own loss, of two kinds on one graph, or with the squared slope by the input."""
    if kind == "squares":
        return output.square().sum(1)
    losses = (COEFFICIENTS[first : first + len(output), : output.shape[1]] * output.sin()).sum(1)
    if kind == "slope":
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + slope.square().sum(1)
    return losses


def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator).requires_grad_()
    return x, torch.randint(5, (samples, 2), generator=generator)


Place = tuple[str, str]  # a module and its parameter's name there
Key = int  # of a parameter, never used again for another


def places(model: nn.Module) -> dict[Place, nn.Parameter]:
    """Every place of every parameter; tied ones have several."""
    return {
        (path, name): parameter
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


@dataclass(eq=False)
class Pass:
    """The forwards whose rows belong together, and the rows of each parameter that have come."""

    number: int
    batch: int
    reached: bool = False
    rows: dict[Key, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Sent:
    """A forward that waits for its backward, with all that its loop over the samples needs."""

    name: str
    x: Tensor
    words: Tensor
    output: Tensor
    pass_: Pass | None  # None where per-sample mode was off
    values: dict[Key, Tensor]
    keys: dict[Place, Key]
    trainable: set[Key]
    plain: nn.Module
    outside: Key | None = None
    switched: bool = False  # whether per_sample was called since
    changed: bool = False  # whether a weight was changed in place since
    computed: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpointed(self) -> bool:
        return self.name in CHECKPOINTS

    def loss(self, kind: str) -> Tensor:
        return sample_losses(self.output, self.x, kind).sum()

    def whole(self, kind: str) -> dict[Key, Tensor]:
        """Torch's gradient of the sum over the samples, of the parameters that were used."""
        if kind not in self.computed:
            self.computed[kind] = self._gradient(slice(None), kind)
        return self.computed[kind]

    def rows(self, kind: str) -> dict[Key, Tensor]:
        """Each sample's own gradient, in a loop."""
        key = f"rows of {kind}"
        if key not in self.computed:
            rows = [self._gradient(slice(i, i + 1), kind) for i in range(len(self.x))]
            self.computed[key] = {
                used: torch.stack([row[used] for row in rows]) if rows else value.new_zeros(0, *value.shape)
                for used, value in self.whole(kind).items()
            }
        return self.computed[key]

    def _gradient(self, samples: slice, kind: str) -> dict[Key, Tensor]:
        leaves = {key: value.clone().requires_grad_(key in self.trainable) for key, value in self.values.items()}
        for (path, name), key in self.keys.items():
            self.plain.get_submodule(path)._parameters[name] = leaves[key]
        x = self.x.detach()[samples].requires_grad_()
        name = "head" if self.checkpointed else self.name
        losses = sample_losses(USES[name](self.plain, x, self.words[samples]), x, kind, samples.start or 0)
        active = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if not active:
            return {}
        gradients = torch.autograd.grad(losses.sum(), active, allow_unused=True)
        by_key = dict(zip((key for key, leaf in leaves.items() if leaf.requires_grad), gradients, strict=True))
        return {key: gradient for key, gradient in by_key.items() if gradient is not None}


# --- the contract -------------------------------------------------------------------------------------------------


@dataclass
class Contract:
    """What is due, by the words of the contract.

    Attributes:
        settings: What `per_sample` was told.
        on: Whether per-sample mode is on.
        last: The pass that the next forward may go on with.
        passes: Those that hold rows, in the order of their forwards.
        grads: What is in each `.grad`.
        cleared: Parameters whose `.grad` was cleared: their rows go with the next backward.
        doubtful: Parameters of which only the law is known.
        raw: Parameters whose `.grad` is the plain sum of what backwards have added in this mode.
        bare: Parameters whose `.grad` has a part whose rows the user has let go.
        empty: Parameters that a backward of no samples which failed may have left rows of; `.grad` does not tell.
        touched: Passes that a backward has reached which failed.
        moved: Whether parameters were frozen, thawed or replaced since the last backward.
    """

    settings: dict[str, Any]
    on: bool = True
    last: Pass | None = None
    opened: int = 0
    passes: list[Pass] = field(default_factory=list)
    grads: dict[Key, Tensor | None] = field(default_factory=dict)
    cleared: set[Key] = field(default_factory=set)
    doubtful: set[Key] = field(default_factory=set)
    raw: set[Key] = field(default_factory=set)
    bare: set[Key] = field(default_factory=set)
    empty: set[Key] = field(default_factory=set)
    touched: list[Pass] = field(default_factory=list)
    moved: bool = False

    @property
    def accumulates(self) -> bool:
        return self.settings["accumulate_grad"]

    @property
    def mean(self) -> bool:
        return self.settings["loss_reduction"] == "mean"

    def open(self, samples: int) -> Pass:
        """A pass begins where there is none, where a backward has reached the last one, or where B has changed."""
        if self.last is None or self.last.reached or self.last.batch != samples:
            self.last = Pass(self.opened, samples)
            self.opened += 1
        return self.last

    def scale(self, samples: int) -> float:
        """By what the sum of the losses is divided."""
        return max(1, samples) if self.mean else 1

    def deliver(self, parts: Sequence[tuple[Sent, str, float]], trainable: set[Key]) -> None:
        """A backward of the sum, or the mean, of the samples' losses of some kinds, each times a factor."""
        if any(sent.whole(kind) for sent, kind, _ in parts):
            held = {key for pass_ in self.passes for key in pass_.rows}
            without = {key for key, gradient in self.grads.items() if gradient is None}
            # rows of no samples add up to zero, whether their `.grad` was cleared or not: they stay in doubt
            bare = {key for key in self.doubtful if not any(len(pass_.rows.get(key, ())) for pass_ in self.passes)}
            self.drop((self.cleared - bare) | without if self.accumulates else held)
            self.moved, self.cleared = False, set()
            self.doubtful |= self.empty
            if not self.doubtful:
                self.touched = []
            if not self.accumulates:
                self.doubtful, self.empty = set(), set()
        for sent, kind, factor in parts:
            for key, gradient in sent.whole(kind).items():
                if sent.pass_ is not None:
                    sent.pass_.reached = True
                if key not in trainable:  # frozen or replaced since the forward
                    continue
                if self.accumulates or sent.pass_ is None:
                    total = gradient * (factor / self.scale(len(sent.x)))
                    before = self.grads.get(key)
                    self.grads[key] = total if before is None else before + total
                    if before is None:
                        self.raw.add(key)
                if sent.pass_ is not None:
                    rows = factor * sent.rows(kind)[key]
                    held = sent.pass_.rows.get(key)
                    sent.pass_.rows[key] = rows if held is None else held + rows
            if sent.pass_ is not None and sent.pass_.rows and sent.pass_ not in self.passes:
                self.passes.append(sent.pass_)
        self.passes.sort(key=lambda pass_: pass_.number)
        for key, total in self.grads.items():
            if total is not None and key in trainable:
                own = [pass_.rows[key].sum(0) for pass_ in self.passes if key in pass_.rows]
                # rows were taken away by hand, or clipped: whether a `.grad` that vanishes was cleared, nobody can tell
                clipped = vanishes(total) and key not in self.raw
                if own and (vanishes(torch.stack(own).sum(0)) != vanishes(total) or clipped):
                    self.doubtful.add(key)

    def drop(self, keys: set[Key]) -> None:
        """The rows of these parameters are gone."""
        gone = set(keys)
        for pass_ in self.passes:
            pass_.rows = {key: rows for key, rows in pass_.rows.items() if key not in gone}
        self.passes = [pass_ for pass_ in self.passes if pass_.rows]
        self.cleared -= gone
        self.doubtful -= gone

    def due(self, shapes: dict[Key, torch.Size], trainable: set[Key]) -> dict[Key, Tensor | None]:
        """The rows of each trainable parameter: zeros in a pass that did not use it, none where no pass did."""
        counted = [pass_ for pass_ in self.passes if any(key in trainable for key in pass_.rows)]
        due: dict[Key, Tensor | None] = {}
        for key in trainable:
            if any(key in pass_.rows for pass_ in counted):
                parts = [pass_.rows.get(key, torch.zeros(pass_.batch, *shapes[key])) for pass_ in counted]
                due[key] = torch.cat(parts)
            else:
                due[key] = None
        return due


def vanishes(total: Tensor) -> bool:
    """Whether it is zero, but for rounding."""
    return not bool((total.abs() > TOLERANCE**1.5).any())


def differs(actual: Tensor | None, expected: Tensor | None) -> str:
    """What is wrong with a tensor, nothing if it is as expected."""
    if actual is None or expected is None:
        return "" if actual is expected else f"{shape_of(actual)}, expected {shape_of(expected)}"
    if actual.shape != expected.shape:
        return f"{shape_of(actual)}, expected {shape_of(expected)}"
    if actual.numel() == 0:
        return ""
    error = float((actual - expected).abs().max())
    return "" if error <= TOLERANCE * (1 + float(expected.abs().max())) else f"off by {error:.1e}"


def shape_of(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str(tuple(tensor.shape))


class Wrong(AssertionError):
    """The library is not as the contract says; `kind` in a word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
