"""Random models out of the zoo, drawn by hypothesis and written down as Python.

A `Draft` writes a module line by line. A torch.nn module of the same lines lives beside it, through which one sample
goes as the lines are added: a line that torch refuses is left out, and the shapes are known without rules for them.
What comes out is a `Plan`, whose `repr` is a program.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from textwrap import indent
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from cases import ClassToken, Gate, Gathered, Holder, OneBag, Position, Scale
from oracle import Call, set_seed

WORDS = 7
PROBE = 13  # samples on their way through a draft: no other size is as large
MOST = 240  # numbers a sample


class LowRank(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(shape[0], 1))
        self.right = nn.Parameter(torch.randn(1, *shape[1:]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.left @ self.right.flatten(1)).view_as(weight)


def low_rank(layer: nn.Module) -> nn.Module:
    register_parametrization(layer, "weight", LowRank(layer.weight.shape))
    return layer


def called(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    """A checkpoint that is none: the loop asks for gradients by name, which a reentrant one refuses."""
    return function(*args)


NAMES = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "alone": enn.alone,
    "checkpoint": checkpoint,
    "pack_padded_sequence": pack_padded_sequence,
    "pad_packed_sequence": pad_packed_sequence,
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "low_rank": low_rank,
    **{each.__name__: each for each in (ClassToken, Gate, Holder, Position, Scale)},
}


class _Others:
    """`torch.nn` with other classes for some of its own."""

    def __init__(self, **others: Callable[..., nn.Module]) -> None:
        self.others = others

    def __getattr__(self, name: str) -> Any:
        return self.others.get(name) or getattr(nn, name)


def bag(*args: Any, scale_grad_by_freq: bool = False, **kwargs: Any) -> nn.EmbeddingBag:
    """In an EmbeddingBag torch 2.13 divides by another word's frequency."""
    made = OneBag if scale_grad_by_freq else nn.EmbeddingBag
    return made(*args, scale_grad_by_freq=scale_grad_by_freq, **kwargs)


# What the loop runs; the second where second derivatives are due, which torch has not of a bag, nor right ones of
# scale_grad_by_freq.
ORACLE = NAMES | {"checkpoint": called, "nn": _Others(EmbeddingBag=bag)}
TWICE = ORACLE | {"nn": _Others(EmbeddingBag=OneBag, Embedding=Gathered)}


@dataclass(frozen=True)
class Input:
    """An argument of the model.

    Attributes:
        code: What makes it for `{B}` samples.
        dim: Where the samples stand.
        offsets: Whether the samples stand between offsets, which are the argument after it.
    """

    name: str
    code: str
    dim: int = 0
    offsets: bool = False

    def make(self, batch: int) -> Tensor:
        return eval(self.code.replace("{B}", str(batch)), NAMES)


@dataclass(frozen=True)
class Plan:
    """A model, and what is done with it.

    Attributes:
        classes: The source of the blocks and, last, of `Model`.
        dim: Where the samples stand in the model's output.
        reasons: Words of the errors that such a model may meet by contract.
        sum_of_rows: Whether torch's own batch gradient is the sum over the samples.
    """

    classes: str
    inputs: tuple[Input, ...]
    dim: int
    training: bool
    samples: int
    settings: Mapping[str, Any]
    script: str
    made: str = "convert"
    input_grad: bool = True
    dtype: torch.dtype = torch.float64
    reasons: tuple[str, ...] = ()
    sum_of_rows: bool = True

    def module(self, names: Mapping[str, Any] = NAMES) -> nn.Module:
        """The torch.nn module, with no parameter or statistic left at a value as special as 0 or 1."""
        space = dict(names)
        exec(self.classes, space)
        set_seed(7)
        module: nn.Module = space["Model"]().train(self.training)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            for name, buffer in module.named_buffers():
                if "running" in name:
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
        return module.to(self.dtype)

    def call(self, batch: int, seed: int = 11) -> Call:
        set_seed(seed)
        args = Call(tuple(each.make(batch) for each in self.inputs))
        return args.map(lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def take(self, call: Call, i: int) -> Call:
        """Sample `i` alone."""
        args = []
        for each, given in zip(self.inputs, call.args, strict=True):
            if each.offsets:
                words, starts = call.args[:2]
                ends = [*starts.tolist(), len(words)]
                return Call((words[ends[i] : ends[i + 1]], starts[:1] * 0, *_rows(call.args[2:], self.inputs[2:], i)))
            args.append(given.narrow(each.dim, i, 1))
        return Call(tuple(args))

    def samples_first(self, output: Tensor) -> Tensor:
        return output.transpose(0, 1) if self.dim else output

    def refuses(self, error: Exception) -> bool:
        return any(re.search(reason, str(error)) for reason in self.reasons)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints of a failing example."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        dtype = "" if self.dtype == torch.float64 else f".to({self.dtype})"
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        inputs = "\n".join(f"{each.name} = {each.code.replace('{B}', str(self.samples))}" for each in self.inputs)
        return (
            f"\n{self.classes}\nmodule = Model().train({self.training}){dtype}\n{inputs}\n"
            f"model = convert(module).per_sample({settings})  # made by {self.made}\n"
            f"model({', '.join(each.name for each in self.inputs)})  # {self.script}, input_grad={self.input_grad}\n"
        )


def _rows(args: tuple[Tensor, ...], inputs: tuple[Input, ...], i: int) -> list[Tensor]:
    return [given.narrow(each.dim, i, 1) for each, given in zip(inputs, args, strict=True)]


class Draft:
    """A module that is being written, and one sample on its way through it.

    Attributes:
        x: What has become of the sample so far, `(1, *shape)`, or `(T, 1, *)` in a model that has time first.
        layers: What made each layer so far, the rank of its input and the lines of its call, by its name.
        fresh: Whether `x` is a layer's output, which nothing keeps.
    """

    def __init__(self, draw: Callable[..., Any], name: str, training: bool, time_first: bool, x: Tensor) -> None:
        self.draw, self.name, self.training, self.time_first = draw, name, training, time_first
        self.root = name == "Model"
        self.names = dict(NAMES)
        self.alive = nn.Module().train(training)
        self.locals: dict[str, Any] = {"self": self.alive, "x": x}
        self.inputs: list[Input] = []
        self.blocks: list[str] = []
        self.init: list[str] = []
        self.body: list[str] = []
        self.layers: dict[str, tuple[str, int, list[str]]] = {}
        self.fresh = False
        self.owns = False
        self.alone = False
        self.sum_of_rows = True
        self.reasons: set[str] = set()

    # What there is.

    @property
    def x(self) -> Tensor:
        return self.locals["x"]

    @property
    def dim(self) -> int:
        """Where the samples stand."""
        return self._dim_of(self.x)

    def _dim_of(self, x: Tensor) -> int:
        return 1 if self.time_first and x.dim() > 2 else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The sample's shape."""
        return (*self.x.shape[: self.dim], *self.x.shape[self.dim + 1 :])

    @property
    def rank(self) -> int:
        return len(self.shape)

    # Draws.

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def rarely(self, often: int = 4) -> bool:
        return self.draw(st.integers(0, often)) == often

    def divisor(self, of: int) -> int:
        return self.pick(*(n for n in range(1, of + 1) if of % n == 0))

    def options(self, **options: tuple[Any, ...]) -> str:
        """Keyword arguments, the first of each being the default, which is left out."""
        drawn = {name: self.pick(*values) for name, values in options.items()}
        return "".join(f", {name}={value!r}" for name, value in drawn.items() if value != options[name][0])

    # Lines.

    def add(self, init: list[str], body: list[str], *, fixed: bool = False, fresh: bool = False) -> list[str]:
        """Adds lines to the constructor and to the forward, unless torch refuses them.

        Args:
            init: Lines of the constructor.
            body: Lines of the forward.
            fixed: Whether they need the samples first, whatever the model says.
            fresh: Whether nothing keeps the `x` that comes out.

        Returns:
            The forward's lines as they were added; none if they were refused.
        """
        try:
            with torch.no_grad():
                exec("\n".join(init), self.names, {"self": self.alive})
                self.alive.train(self.training)
                body, x = self._tried(body, fixed)
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError, AttributeError):
            return []
        sizes = list(x.shape)
        if (
            not 2 <= x.dim() <= 5
            or sizes.pop(self._dim_of(x)) != PROBE
            or PROBE in sizes
            or not 0 < prod(sizes) <= MOST
        ):
            return []  # samples met, or the tensor is too large
        self.locals["x"] = x
        self.init += init
        self.body += body
        self.fresh = fresh
        return body

    def _tried(self, body: list[str], fixed: bool) -> tuple[list[str], Tensor]:
        space = {**self.names, **self.locals, "x": self.x.clone()}
        fixed = fixed and self.dim == 1
        body = ["x = x.transpose(0, 1)", *body] if fixed else body
        exec("\n".join(body), space)
        if fixed and space["x"].dim() > 2:
            body, space["x"] = [*body, "x = x.transpose(0, 1)"], space["x"].transpose(0, 1)
        return body, space["x"]

    def new(self, kind: str = "layer") -> str:
        return f"{kind}{len(self.init)}"

    def layer(
        self, code: str, call: str = "{}(x)", *, keyword: str = "input", fixed: bool = False, wraps: bool = False
    ) -> bool:
        """A layer and its call, in one of the ways to call one.

        Args:
            code: What makes it.
            call: Its call.
            keyword: The name of its argument.
            fixed: Whether its samples stand first, whatever the model says.
            wraps: Whether its weight may have a parametrization.
        """
        if wraps and self.rarely(7):
            code = f"{self.pick('weight_norm', 'low_rank', *([] if self.training else ['spectral_norm']))}({code})"
        name = self.new()
        me = f"self.{name}"
        call = call.format(me)
        ways = {
            "call": [f"x = {call}"],
            "residual": [f"x = x + {call}"],
            "in place": [f"y = {call}", "y += x", "x = y"],
        }
        if call == f"{me}(x)":
            ways |= {
                "keyword": [f"x = {me}({keyword}=x)"],
                "checkpoint": [f"x = checkpoint({me}, x, use_reentrant=False)"],
                "reentrant": [f"x = checkpoint({me}, x, use_reentrant=True)"],
            }
        way = self.pick("call", "call", *ways)
        for each in (ways[way], ways["call"]):
            rank = self.rank
            body = self.add([f"{me} = {code}"], each, fixed=fixed, fresh=way != "residual")
            if body:
                self.layers[name] = (code, rank, body)
                return True
        return False

    def argument(self, name: str, code: str, dim: int = 0, **more: Any) -> str:
        """A further argument of the model."""
        name = f"{name}{len(self.inputs)}" if self.inputs else name
        self.inputs.append(Input(name, code, dim, **more))
        self.locals[name] = self.inputs[-1].make(PROBE)
        return name

    def other_input(self) -> str:
        """A further argument of the shape that `x` has now."""
        sizes = [*self.shape]
        sizes.insert(self.dim, "{B}")
        return self.argument("y", f"torch.randn({', '.join(map(str, sizes))})", self.dim)

    def source(self) -> str:
        """The blocks' classes and this one."""
        decorator = "@alone\n" if self.alone else ""
        init = indent("\n".join(["super().__init__()", *self.init]), " " * 8)
        body = indent("\n".join([*self.body, "return x"]), " " * 8)
        blocks = "".join(f"{each}\n" for each in self.blocks)
        arguments = ", ".join(each.name for each in self.inputs) if self.root else "x"
        return (
            f"{blocks}{decorator}class {self.name}(nn.Module):\n    def __init__(self):\n{init}\n\n"
            f"    def forward(self, {arguments}):\n{body}\n"
        )


# --- stages ---------------------------------------------------------------------------------------------------

BIAS = {"bias": (True, False)}


def linear(d: Draft) -> None:
    d.layer(f"nn.Linear({d.shape[-1]}, {d.number(1, 5)}{d.options(**BIAS)})", wraps=True)


def bilinear(d: Draft) -> None:
    other = d.other_input() if d.root and d.rarely() else d.pick("x", "x.tanh()")
    d.layer(
        f"nn.Bilinear({d.shape[-1]}, {d.shape[-1]}, {d.number(1, 3)}{d.options(**BIAS)})",
        d.pick(f"{{}}(x, {other})", f"{{}}(input1=x, input2={other})"),
    )


def convolution(d: Draft) -> None:
    if not 2 <= d.rank <= 4:
        return
    groups = d.divisor(d.shape[0])
    size = d.rank - 1
    numbers = d.pick((1, 2), (1, 2, (2, 1, 3)[:size]))
    code = f"nn.Conv{size}d({d.shape[0]}, {groups * d.number(1, 3)}, {d.number(1, 3)}"
    if groups > 1:
        code += f", groups={groups}"
    padding = d.pick(0, 1, 2, "same")
    code += d.options(
        stride=(1,) if padding == "same" else (1, *numbers[1:], 3),
        dilation=(1, *numbers[1:]),
        padding_mode=("zeros", "reflect", "replicate", "circular"),
        **BIAS,
    )
    d.layer(code + (f", padding={padding!r})" if padding else ")"), fixed=True, wraps=True)


def transposed_convolution(d: Draft) -> None:
    if not 2 <= d.rank <= 4:
        return
    groups = d.divisor(d.shape[0])
    code = f"nn.ConvTranspose{d.rank - 1}d({d.shape[0]}, {groups * d.number(1, 2)}, {d.number(1, 3)}"
    if groups > 1:
        code += f", groups={groups}"
    code += d.options(stride=(1, 2), dilation=(1, 2), padding=(0, 1), output_padding=(0, 1), **BIAS)
    d.layer(f"{code})", fixed=True, wraps=True)


def norm(d: Draft) -> None:
    kinds = ["LayerNorm", "RMSNorm", "GroupNorm"]
    if 2 <= d.rank <= 4:
        kinds.append("InstanceNorm")
    if d.rank <= 4 and not d.training:
        kinds.append("BatchNorm")
    kind, eps = d.pick(*kinds), {"eps": (1e-5, 0.1)}
    if kind in ("LayerNorm", "RMSNorm"):
        if d.shape[-1] == 1:
            return  # the result is constant, the gradient nothing but rounding errors
        whole = d.rank > 1 and d.rarely()
        size = d.shape[-2:] if whole else d.shape[-1]
        more = d.options(**eps, **(BIAS if kind == "LayerNorm" else {}), elementwise_affine=(True, True, True, False))
        if whole and d.dim:
            d.layer(f"nn.{kind}({size}{more})", fixed=True) if d.rank > 2 else None
        else:
            d.layer(f"nn.{kind}({size}{more})")
    elif kind == "GroupNorm":
        # torch 2.13 crashes where an input that asks for no gradient is in some memory formats
        call = "{}(x)" if d.layers else "{}(x.clone(memory_format=torch.contiguous_format))"
        code = f"nn.GroupNorm({d.divisor(d.shape[0])}, {d.shape[0]}{d.options(**eps, **BIAS)})"
        d.layer(code, call, fixed=True)
    elif kind == "InstanceNorm":
        more = d.options(**eps, affine=(False, True, True), track_running_stats=(False, True), **BIAS)
        d.layer(f"nn.InstanceNorm{d.rank - 1}d({d.shape[0]}{more})", fixed=True)
    else:
        d.layer(f"nn.BatchNorm{max(1, d.rank - 1)}d({d.shape[0]}{d.options(**eps, **BIAS)})", fixed=True)


def prelu(d: Draft) -> None:
    if d.time_first and d.rank == 1:
        return  # in (B, features) the samples are not where such a model has them
    number = d.pick(1, d.shape[0])
    d.layer(f"nn.PReLU({number})", fixed=number > 1)


def heads(d: Draft) -> int:
    return d.divisor(d.shape[-1])


def batch_first(d: Draft) -> str:
    return "" if d.dim else ", batch_first=True"


def recurrent(d: Draft) -> None:
    if d.rank != 2:
        return
    kind, hidden = d.pick("RNN", "LSTM", "GRU"), d.number(1, 4)
    layers, both = d.pick(1, 1, 2), d.pick(False, True)
    code = f"nn.{kind}({d.shape[-1]}, {hidden}{batch_first(d)}{d.options(**BIAS)}"
    code += f", num_layers={layers}" if layers > 1 else ""
    code += ", bidirectional=True" if both else ""
    size = hidden
    if kind == "LSTM" and hidden > 1 and d.rarely():
        size = hidden - 1
        code += f", proj_size={size}"
    if kind == "RNN":
        code += d.options(nonlinearity=("tanh", "relu"))
    states = [f"torch.ones({layers * (1 + both)}, x.shape[{d.dim}], {n}, dtype=x.dtype)" for n in (size, hidden)]
    hx = ""
    if d.rarely():
        hx = f", ({states[0]}, {states[1]})" if kind == "LSTM" else f", {states[0]}"
    last = d.pick("[1][0]", "[1][1]") if kind == "LSTM" else "[1]"
    every = last if d.dim else f"{last}.transpose(0, 1)"
    d.layer(f"{code})", "{}(x" + hx + ")" + d.pick("[0]", "[0]", f"{last}[-1]", every))


def packed(d: Draft) -> None:
    if not d.root or d.rank != 2 or d.dim:
        return
    steps, name = d.shape[0], d.new()
    lengths = d.argument("lengths", f"torch.randint(1, {steps} + 1, ({{B}},))")
    code = f"nn.{d.pick('GRU', 'LSTM', 'RNN')}({d.shape[1]}, {d.number(1, 3)}, batch_first=True"
    code += d.options(bidirectional=(False, True), num_layers=(1, 2)) + ")"
    body = [
        f"x = pack_padded_sequence(x, {lengths}, batch_first=True, enforce_sorted=False)",
        f"x = pad_packed_sequence(self.{name}(x)[0], batch_first=True, total_length={steps})[0]",
    ]
    d.add([f"self.{name} = {code}"], body)


def cell(d: Draft) -> None:
    if d.rank != 2:
        return
    kind, name = d.pick("RNNCell", "LSTMCell", "GRUCell"), d.new()
    init = [f"self.{name} = nn.{kind}({d.shape[1]}, {d.number(1, 3)}{d.options(**BIAS)})"]
    new = "h[0]" if kind == "LSTMCell" else "h"
    time = 0 if d.dim else 1
    body = [
        "h, steps = None, []",
        f"for step in x.unbind({time}):",
        f"    h = self.{name}(step, h)",
        f"    steps.append({new})",
        f"x = torch.stack(steps, {time})" if d.pick(True, False) else f"x = {new}",
    ]
    d.add(init, body)


def attention(d: Draft) -> None:
    if d.rank != 2:
        return
    steps = d.shape[0]
    code = f"nn.MultiheadAttention({d.shape[1]}, {heads(d)}{batch_first(d)}{d.options(**BIAS)}"
    code += d.options(add_bias_kv=(False, True), add_zero_attn=(False, True)) + ")"
    mask = d.pick("", "", f", attn_mask=torch.ones({steps}, {steps}, dtype=torch.bool).triu(1)")
    keys = d.pick("x, x", "x, x", "x.sin(), x", "x[1:], x[1:]" if d.dim else "x[:, 1:], x[:, 1:]")
    weights = d.pick("", ", need_weights=False")
    call = f"{{}}(x, {keys}{mask}{weights})[0]"
    if keys == "x, x" and d.rarely():
        call = f"{{}}(query=x, key=x, value=x{mask}{weights})[0]"
    d.layer(code, call)


def transformer(d: Draft) -> None:
    if d.rank != 2 or d.shape[1] == 1:
        return
    code = f"({d.shape[1]}, {heads(d)}, {d.number(1, 4)}, dropout=0.0{batch_first(d)}"
    code += d.options(norm_first=(False, True), activation=("relu", "gelu"), **BIAS) + ")"
    kind = d.pick("TransformerEncoderLayer", "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer")
    if kind == "TransformerDecoderLayer":
        memory = d.other_input() if d.root and d.rarely() else "x.cos()"
        d.layer(f"nn.{kind}{code}", f"{{}}(x, {memory})")
    elif kind == "TransformerEncoder":
        d.layer(f"nn.{kind}(nn.TransformerEncoderLayer{code}, 2, enable_nested_tensor=False)", keyword="src")
    else:
        d.layer(f"nn.{kind}{code}", keyword="src")


def embedding_code(d: Draft, features: int) -> str:
    options = d.options(padding_idx=(None, 2, -1), scale_grad_by_freq=(False, False, True))
    d.sum_of_rows = d.sum_of_rows and "scale_grad_by_freq" not in options
    return f"nn.Embedding({WORDS}, {features}{options})"


def bag_code(d: Draft, features: int) -> str:
    mode = d.pick("mean", "sum", "max")
    options = d.options(padding_idx=(None, 2), scale_grad_by_freq=(False,) if mode == "max" else (False, False, True))
    d.sum_of_rows = d.sum_of_rows and "scale_grad_by_freq" not in options
    return f"nn.EmbeddingBag({WORDS}, {features}, mode={mode!r}{options})"


def words(d: Draft, *shape: int) -> str:
    """A further argument, of words."""
    dim = 1 if d.time_first and shape else 0
    sizes = [*map(str, shape)]
    sizes.insert(dim, "{B}")
    return d.argument("words", f"torch.randint({WORDS}, ({', '.join(sizes)},))", dim)


def add_words(d: Draft) -> None:
    if not d.root or d.rank > 2:
        return
    name = d.new()
    if d.rank == 2:
        init = [f"self.{name} = {embedding_code(d, d.shape[1])}"]
        d.add(init, [f"x = x + self.{name}({words(d, d.shape[0])})"])
        d.layers[name] = (init[0].partition(" = ")[2], 0, [])
    elif d.time_first:
        return
    elif d.pick(True, False):
        d.add([f"self.{name} = {bag_code(d, d.shape[0])}"], [f"x = x + self.{name}({words(d, d.number(1, 4))})"])
    else:
        d.add([f"self.{name} = {embedding_code(d, d.shape[0])}"], [f"x = x + self.{name}({words(d)})"])
        d.reasons.add("may be positions")


def positions(d: Draft) -> None:
    if d.rank != 2:
        return
    index = f"torch.arange({d.shape[0]})"
    if d.pick(True, False):
        index += "[:, None]" if d.dim else "[None]"
    else:
        d.reasons.add("may be positions")
    name = d.new()
    d.add([f"self.{name} = nn.Embedding({d.shape[0]}, {d.shape[1]})"], [f"x = x + self.{name}({index})"])


def table(d: Draft) -> None:
    """One row that all samples share."""
    name, layer = d.new("table"), d.new()
    sizes = [*d.shape]
    sizes.insert(d.dim, 1)
    init = [
        f"self.register_buffer('{name}', torch.randn({', '.join(map(str, sizes))}))",
        f"self.{layer} = nn.Linear({d.shape[-1]}, {d.shape[-1]}{d.options(**BIAS)})",
    ]
    d.add(init, [d.pick(f"x = x + self.{layer}(self.{name})", f"x = self.{layer}(self.{name}) * x")])


def activation(d: Draft) -> None:
    kinds = [
        "x.tanh()",
        "F.relu(x)",
        "F.gelu(x)",
        "x.sigmoid()",
        "x.softmax(-1)",
        "F.leaky_relu(x, 0.1)",
        "x.sin() + x",
    ]
    if d.fresh:
        kinds += ["F.relu(x, inplace=True)", "x.mul_(0.5)", "x.add_(1.0)", "F.leaky_relu_(x, 0.1)", "x.tanh_()"]
        kinds += ["x.clamp_(min=-0.5)", "x.masked_fill_(x > 1, 0.5)"]
    d.add([], [f"x = {d.pick(*kinds)}"])


def shared_in_place(d: Draft) -> None:
    """A part of a layer's output, changed in place."""
    if d.fresh:
        d.add([], [d.pick("x[..., 0] *= 2", "x[..., :1] = 0.5", "x[..., -1].tanh_()")])


def dropout(d: Draft) -> None:
    name = d.new()
    d.add([f"self.{name} = nn.Dropout({0.0 if d.training else 0.5})"], [f"x = self.{name}(x)"])


ANY = [
    "x.flip(1)",
    "x[:, 1:]",
    "x[:, ::2]",
    "torch.cat([x, x.sin()], 1)",
    "x[..., 1:]",
    "x.roll(1, -1)",
    "x.unsqueeze(1)",
]
RANKS = {
    1: ["x.unsqueeze(-1)", "x.unflatten(1, (2, -1))", "x[:, :, None].expand(-1, -1, 3)", "F.pad(x, (1, 1))"],
    2: [
        "x.flatten(1)",
        "x.mean(1)",
        "x.sum(-1)",
        "x[:, -1]",
        "x.mT",
        "F.max_pool1d(x, 2)",
        "F.glu(x, -1)",
        "x.amax(1)",
    ],
    3: [
        "x.contiguous(memory_format=torch.channels_last)",
        "x.permute(0, 2, 3, 1)",
        "F.avg_pool2d(x, 2)",
        "F.max_pool2d(x, 2)",
        "x.flatten(2)",
        "x.flatten(1)",
        "x.mean((2, 3))",
        "F.interpolate(x, scale_factor=2)",
        "x.flatten(2).mT",
    ],
    4: [
        "x.contiguous(memory_format=torch.channels_last_3d)",
        "x.flatten(3)",
        "x.flatten(1)",
        "F.avg_pool3d(x, 2)",
        "x.movedim(-1, 1)",
        "x.mean(2)",
    ],
}


def layout(d: Draft) -> None:
    d.add([], [f"x = {d.pick(*RANKS[d.rank], *ANY)}"], fixed=True)


def again(d: Draft) -> None:
    """A layer once more."""
    fitting = [body for _, rank, body in d.layers.values() if rank == d.rank]
    if fitting:
        d.add([], d.pick(*fitting))


def tied(d: Draft) -> None:
    """A new layer that shares the weight of another."""
    fitting = [name for name, (code, rank, _) in d.layers.items() if rank == d.rank and code.startswith("nn.")]
    heads = [name for name, (code, _, _) in d.layers.items() if re.match(rf"nn.Embedding\(\d+, {d.shape[-1]}\b", code)]
    if not fitting and not heads:
        return
    old, name = d.pick(*heads, *fitting), d.new()
    code, _, body = d.layers[old]
    if old in heads:
        d.add(
            [f"self.{name} = nn.Linear({d.shape[-1]}, {WORDS}, bias=False)", f"self.{name}.weight = self.{old}.weight"],
            [f"x = self.{name}(x)"],
        )
        return
    lines = [re.sub(rf"\bself\.{old}\b", f"self.{name}", line) for line in body]
    init = [f"self.{name} = {code}", f"self.{name}.weight = self.{old}.weight"]
    if d.rarely():
        init.append(f"self.{name}.bias = self.{old}.bias")
    d.add(init, lines)


def users_module(d: Draft) -> None:
    """A module with parameters of its own."""
    if d.time_first and d.rank == 1:
        return  # in (B, features) the samples are not where such a model has them
    size = d.shape[-1]
    kinds = [f"Scale({size})", f"Holder({size})"]
    if d.rank == 2 and not d.dim:
        kinds.append(f"Position({d.shape[0]}, {size})")
        if size > 1:  # as in `norm`
            kinds.append(f"ClassToken({size})")
    code = d.pick(*kinds, f"Gate({size})")
    d.layer(code, "{}(x, context=x.sin())" if code.startswith("Gate") else "{}(x)", keyword="x")
    note_general(d)


def own(d: Draft) -> None:
    """A parameter of the module itself, which sends its whole forward through the general rule."""
    size, name = d.shape[-1], d.new("own")
    kind = d.pick("* self.{}", "+ self.{}", "@ self.{}")
    shape = f"{size}, {d.number(1, 4)}" if "@" in kind else f"{size}"
    if d.add([f"self.{name} = nn.Parameter(torch.randn({shape}))"], [f"x = x {kind.format(name)}"]):
        d.owns = True
        note_general(d)


def note_general(d: Draft) -> None:
    if d.time_first:  # in (B, features) the samples are not where such a model has them
        d.reasons.add("rows in dimension 1|size 1 in dimension 1")
    # a reentrant checkpoint, and a memory format, inside; the children say what they make of it
    d.reasons |= {"must override the setup_context", "is_contiguous inside of vmap"}


def block(d: Draft) -> None:
    """A module of a class of its own."""
    if not d.root:
        return
    name = f"Block{len(d.blocks)}"
    inner = Draft(d.draw, name, d.training, d.time_first, d.x)
    for _ in range(d.number(1, 3)):
        d.pick(*IN_BLOCKS)(inner)
    if not inner.body:
        return
    inner.alone = d.rarely()
    if inner.alone:
        note_general(inner)
    me = f"self.{d.new('block')}"
    way = d.pick("call", "call", "residual", "twice", "siamese", "checkpoint", "reentrant")
    body = {
        "residual": [f"x = x + {me}(x)"],
        "twice": [f"x = {me}(x) + {me}(x.flip(-1))"],
        "checkpoint": [f"x = checkpoint({me}, x, use_reentrant=False)"],
        "reentrant": [f"x = checkpoint({me}, x, use_reentrant=True)"],
    }.get(way, [f"x = {me}(x)"])
    if way == "siamese":
        body = [f"x = {me}(x) - {me}({d.other_input()})"]
    exec(inner.source(), d.names)
    if d.add([f"{me} = {name}()"], body):
        d.blocks.append(inner.source())
        d.reasons |= inner.reasons
        d.sum_of_rows = d.sum_of_rows and inner.sum_of_rows


def fold(d: Draft) -> None:
    """A batch folded into rows."""
    if d.rank > 1 and not d.time_first:
        code = f"nn.Linear({d.shape[-1]}, {d.number(1, 3)})"
        if d.layer(code, f"{{}}(x.flatten(0, 1)).unflatten(0, (-1, {d.shape[0]}))"):
            d.reasons |= {"folded batch", "other rows", "is a slice"}


def loop_over_samples(d: Draft) -> None:
    if not d.time_first and d.layer(
        f"nn.Linear({d.shape[-1]}, {d.number(1, 3)})", "torch.cat([{}(x[i : i + 1]) for i in range(len(x))])"
    ):
        # sample by sample a reentrant checkpoint in the model is the error
        d.reasons |= {"is a slice", "has one row, but was computed", "vmap", "it holds a reentrant checkpoint"}


def outside(d: Draft) -> None:
    """A weight used outside of its module."""
    fitting = [name for name, (code, _, _) in d.layers.items() if re.match(r"nn\.(Linear|Embedding)\(", code)]
    if fitting and d.add([], [f"x = F.linear(x, self.{d.pick(*fitting)}.weight)"]):
        # where the forward sees it, the model goes sample by sample, and a reentrant checkpoint in it is the error
        d.reasons |= {"outside of its module", "must override the setup_context"}


LAYERS = [linear, convolution, norm, recurrent, attention, transformer, transposed_convolution, cell, prelu, bilinear]
AROUND = [activation, layout, shared_in_place, dropout, again, tied]
GENERAL = [users_module, own]
IN_BLOCKS = [*LAYERS, *AROUND, *GENERAL, table, positions]
TRAPS = [fold, loop_over_samples, outside]
ROOT = [
    *LAYERS,
    *LAYERS,
    *AROUND,
    *AROUND,
    block,
    block,
    users_module,
    add_words,
    positions,
    table,
    packed,
    own,
    *TRAPS,
]


# --- starts ---------------------------------------------------------------------------------------------------

RANK = {"features": 1, "sequences": 2, "images": 3, "volumes": 4, "time first": 2}


def start(d: Draft, kind: str) -> None:
    """The first argument of the model."""
    if kind in RANK:
        shape = [d.number(1, 5) for _ in range(RANK[kind])]
        sizes = ", ".join(map(str, shape))
        codes = [f"torch.randn({{B}}, {sizes})", f"torch.randn({{B}}, {sizes}, 2)[..., 0]"]
        codes.append(f"torch.randn({sizes}, {{B}}).movedim(-1, 0)")
        if len(shape) > 1:
            codes.append(f"torch.randn({{B}}, {', '.join(map(str, [*shape[1:], shape[0]]))}).movedim(-1, 1)")
        if d.time_first:
            codes = [f"torch.randn({shape[0]}, {{B}}, {shape[1]})"]
        d.argument("x", d.pick(*codes), int(d.time_first))
        return
    d.locals["x"] = torch.zeros(PROBE, 1)
    features, name = d.number(1, 5), d.new()
    if kind == "words":
        index = words(d, *[d.number(1, 4)] * d.pick(1, 1, 2))
        init = [f"self.{name} = {embedding_code(d, features)}"]
        d.layers[name] = (init[0].partition(" = ")[2], 0, [])
        d.add(init, [f"x = self.{name}({index})"], fresh=True)
    elif d.pick(True, False):
        d.add([f"self.{name} = {bag_code(d, features)}"], [f"x = self.{name}({words(d, d.number(1, 5))})"], fresh=True)
    else:
        flat = d.argument("words", f"torch.randint({WORDS}, (2 * {{B}},))", offsets=True)
        starts = d.argument("starts", "torch.arange({B}) * 2")
        d.add([f"self.{name} = {bag_code(d, features)}"], [f"x = self.{name}({flat}, {starts})"], fresh=True)


STARTS = [*RANK, "words", "bags"]
SCRIPTS = ["once", "once", "penalty", "retained", "twice", "append", "uneven", "cleared", "check"]


@st.composite
def plans(draw: Callable[..., Any], kind: str) -> Plan:
    """Models whose first argument is of one kind."""
    training = draw(st.booleans())
    d = Draft(draw, "Model", training, kind == "time first", torch.zeros(PROBE, 1))
    start(d, kind)
    for _ in range(draw(st.integers(1, 5))):
        d.pick(*ROOT)(d)
    # where an input asks for no gradient, torch drops some in a reentrant checkpoint and crashes in a GroupNorm
    needs_grad = re.search("use_reentrant=True|GroupNorm", d.source()) is not None
    for name in list(d.layers):
        if not needs_grad and d.rarely(9):
            part = d.pick("", ".weight", ".bias") if d.layers[name][0].startswith("nn.") else ""
            d.add([f"self.{name}{part}.requires_grad_(False)"], [])
    bags = any(each.offsets for each in d.inputs)
    if d.owns and "pack_padded_sequence" in d.source():
        d.reasons.add("vmap")
    if d.owns and bags:
        d.reasons.add("bags by offsets")
    if d.owns and "track_running_stats=True" in d.source():
        d.reasons.add("running_mean or running_var")  # of a norm without parameters, which no layer stands for
    if "checkpoint" in d.source():
        d.reasons.add("as a checkpoint makes it")  # of several passes, if a layer's own input does not tell which
    script = d.pick(*SCRIPTS[: -1 if bags else None])  # check wants bags without offsets
    samples = d.pick(2, 3, 1, 5, 0)
    settings: dict[str, Any] = {
        "loss_reduction": d.pick("mean", "sum"),
        "materialize": d.pick(False, False, True),
        "accumulate_grad": d.pick(True, True, False),
    }
    if d.time_first:
        settings["batch_first"] = False
        d.reasons.add("may have its samples first or second")  # as many samples as positions
        if "use_reentrant=True" in d.source():  # where (B, features) send the model sample by sample
            d.reasons.add("taken each other's places")
    if bags and script not in ("append", "uneven", "cleared") and d.pick(False, True):
        settings["batch_size"] = samples
    return Plan(
        d.source(),
        tuple(d.inputs),
        d.dim,
        training,
        samples,
        settings,
        script,
        d.pick("convert", "convert", "convert inplace", "deepcopy", "off and on"),
        needs_grad or d.pick(True, False),
        torch.float32 if d.sum_of_rows and d.rarely(9) else torch.float64,
        tuple(sorted(d.reasons)),
        d.sum_of_rows,
    )
