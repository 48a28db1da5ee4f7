"""The laws of test_layers.py for attention, whose masks, layouts and two outputs take more words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import expanded_nn as enn
import test_layers as laws
from cases import Case
from oracle import Call

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

BATCH, QUERIES, KEYS, SIZE, HEADS = 3, 5, 7, 4, 2


class Attend(nn.Module):
    """Attention as a function of tensors `(B, ...)` with a value `(B, features)`: the output and the weights."""

    def __init__(self, attention: nn.MultiheadAttention, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.attention = attention
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **kwargs: Any) -> Tensor:
        first = self.attention.batch_first
        given = [query, query if key is None else key]
        given.append(given[1] if value is None else value)
        moved = {id(x): x if first else x.transpose(0, 1) for x in given}
        if self.mask is not None:
            kwargs["attn_mask"] = self.mask
        output, weights = self.attention(*(moved[id(x)] for x in given), **kwargs, **self.options)
        output = output if first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


class BatchFirst(nn.Module):
    """A transformer as a function of tensors `(B, ...)`, whatever its layout."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.transformer(*(x.transpose(0, 1) for x in inputs), **kwargs).transpose(0, 1)


def twice(build: Callable[[], nn.Module], training: bool) -> Callable[[], nn.Module]:
    """The module with the attention that torch can differentiate twice."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return super(type(self), self).forward(*args, **kwargs)

    def built() -> nn.Module:
        module = build().train(training)
        module.__class__ = type("Twice", (type(module),), {"forward": forward})
        return module

    return built


def take(call: Call, i: int) -> Call:
    """Sample `i` alone; a mask of two dimensions belongs to all samples."""

    def one(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or (name.endswith("mask") and "padding" not in name and x.dim() == 2):
            return x
        rows = HEADS if name.endswith("mask") and x.dim() == 3 else 1
        return x[i * rows : (i + 1) * rows]

    return Call(tuple(one("", x) for x in call.args), {name: one(name, x) for name, x in call.kwargs.items()})


def sequences(*shapes: tuple[int, int], **masks: Callable[[int], Tensor]) -> Callable[[int], Call]:
    return lambda batch: Call(
        tuple(torch.randn(batch, *shape) for shape in shapes), {name: make(batch) for name, make in masks.items()}
    )


def padding(keys: int) -> Callable[[int], Tensor]:
    """Padding at the end, another length for each sample."""
    return lambda batch: torch.arange(keys) >= keys - torch.arange(batch)[:, None]


def each_its_own(queries: int, keys: int) -> Callable[[int], Tensor]:
    """A mask `(B * heads, T, S)` that leaves each query the first key."""

    def make(batch: int) -> Tensor:
        mask = torch.rand(batch * HEADS, queries, keys) < 0.4
        mask[..., 0] = False
        return mask

    return make


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


QUERY, MEMORY = (QUERIES, SIZE), (KEYS, SIZE)
one = sequences(QUERY)
two = sequences(QUERY, MEMORY)
three = sequences(QUERY, MEMORY, MEMORY)
narrow = sequences(QUERY, (KEYS, 6), (KEYS, 8))
half = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.4
half[:, 0] = False


def attention(
    name: str,
    call: Callable[[int], Call],
    *,
    mask: Tensor | None = None,
    options: dict[str, Any] | None = None,
    training: bool = True,
    **arguments: Any,
) -> list[Case]:
    """The case with the weights returned, and without them."""

    def case(name: str, **more: Any) -> Case:
        def build() -> nn.Module:
            return Attend(nn.MultiheadAttention(SIZE, HEADS, **arguments), mask, **(options or {}), **more)

        return Case(name, build, call, take=take, twin=twice(build, training), training=training)

    return [case(name), case(f"{name}_fused", need_weights=False)]


ATTENTION = [
    *attention("self", one, batch_first=True),
    *attention("self_time_first", one),
    *attention("memory", two, batch_first=True),
    *attention("memory_time_first", two, bias=False),
    *attention("three", three, batch_first=True),
    *attention("query_is_key", sequences(QUERY, QUERY, QUERY), batch_first=True, bias=False),
    *attention("kdim_vdim", narrow, kdim=6, vdim=8, batch_first=True),
    *attention("kdim_vdim_no_bias", narrow, kdim=6, vdim=8, bias=False),
    *attention("bias_kv", two, add_bias_kv=True, batch_first=True),
    *attention("bias_kv_zero", one, add_bias_kv=True, add_zero_attn=True),
    *attention("kdim_bias_kv", narrow, kdim=6, vdim=8, add_bias_kv=True, add_zero_attn=True, bias=False),
    *attention("zero", two, add_zero_attn=True, batch_first=True),
    *attention("heads", one, options={"average_attn_weights": False}, batch_first=True)[:1],
    *attention("mask", two, mask=half, batch_first=True),
    *attention("mask_float", two, mask=half.double(), batch_first=True),
    *attention(
        "mask_everything",
        sequences(QUERY, MEMORY, key_padding_mask=padding(KEYS)),
        mask=half,
        add_zero_attn=True,
        add_bias_kv=True,
    ),
    *attention("mask_each", sequences(QUERY, MEMORY, attn_mask=each_its_own(QUERIES, KEYS)), batch_first=True),
    *attention(
        "mask_each_float",
        sequences(QUERY, MEMORY, attn_mask=lambda batch: torch.randn(batch * HEADS, QUERIES, KEYS)),
        add_bias_kv=True,
    ),
    *attention("padding", sequences(QUERY, MEMORY, key_padding_mask=padding(KEYS)), batch_first=True),
    *attention("padding_float", sequences(QUERY, key_padding_mask=lambda batch: torch.randn(batch, QUERIES))),
    *attention(
        "padding_and_mask_each",
        sequences(QUERY, MEMORY, key_padding_mask=padding(KEYS), attn_mask=each_its_own(QUERIES, KEYS)),
        batch_first=True,
    ),
    *attention("causal", one, mask=causal(QUERIES), options={"is_causal": True}, batch_first=True),
    *attention(
        "causal_padding",
        sequences(QUERY, key_padding_mask=padding(QUERIES)),
        mask=causal(QUERIES),
        options={"is_causal": True},
    ),
    *attention("causal_bias_kv", one, mask=causal(QUERIES), options={"is_causal": True}, add_bias_kv=True),
    *attention("eval", one, batch_first=True, dropout=0.5, training=False),
]


def transformer(name: str, build: Callable[[], nn.Module], call: Callable[[int], Call], training: bool = True) -> Case:
    return Case(name, build, call, take=take, twin=twice(build, training), training=training)


def encoder_layer(**arguments: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(SIZE, HEADS, 6, **{"dropout": 0.0, "batch_first": True, **arguments})


def decoder_layer(**arguments: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(SIZE, HEADS, 6, **{"dropout": 0.0, "batch_first": True, **arguments})


def encoder(layers: int = 2, norm: bool = True, **arguments: Any) -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(**arguments), layers, nn.LayerNorm(SIZE) if norm else None)


def decoder(**arguments: Any) -> nn.Module:
    return nn.TransformerDecoder(decoder_layer(**arguments), 2, nn.LayerNorm(SIZE))


def whole(**arguments: Any) -> nn.Module:
    return nn.Transformer(SIZE, HEADS, 1, 2, 6, **{"dropout": 0.0, "batch_first": True, **arguments})


padded = sequences(QUERY, src_key_padding_mask=padding(QUERIES))
square = sequences((BATCH, SIZE))  # as many positions as samples: a layer that takes the one for the other is silent
TRANSFORMERS = [
    transformer("encoder_layer", encoder_layer, one),
    transformer("encoder_layer_time_first", lambda: BatchFirst(encoder_layer(batch_first=False)), one),
    transformer("encoder_layer_square", lambda: BatchFirst(encoder_layer(batch_first=False)), square),
    transformer(
        "encoder_layer_norm_first", lambda: encoder_layer(norm_first=True, activation="gelu", bias=False), padded
    ),
    transformer("encoder_layer_prelu", lambda: encoder_layer(activation=nn.PReLU()), one),
    transformer("encoder_layer_eval", lambda: encoder_layer(dropout=0.5), padded, training=False),
    transformer("encoder", encoder, padded),
    transformer("encoder_square", lambda: BatchFirst(encoder(batch_first=False)), square),
    transformer("encoder_eval", encoder, padded, training=False),
    transformer("encoder_eval_no_norm", lambda: encoder(norm=False), one, training=False),
    transformer("decoder_layer", decoder_layer, two),
    transformer("decoder_layer_time_first", lambda: BatchFirst(decoder_layer(batch_first=False, norm_first=True)), two),
    transformer("decoder_layer_eval", lambda: decoder_layer(dropout=0.5, bias=False), two, training=False),
    transformer("decoder", decoder, sequences(QUERY, MEMORY, memory_key_padding_mask=padding(KEYS))),
    transformer(
        "decoder_square", lambda: BatchFirst(decoder(batch_first=False)), sequences((BATCH, SIZE), (BATCH, SIZE))
    ),
    transformer(
        "transformer",
        whole,
        sequences(MEMORY, QUERY, src_key_padding_mask=padding(KEYS), memory_key_padding_mask=padding(KEYS)),
    ),
    transformer(
        "transformer_time_first",
        lambda: BatchFirst(whole(batch_first=False, norm_first=True)),
        sequences(MEMORY, QUERY, tgt_mask=lambda batch: causal(QUERIES)),
    ),
    transformer(
        "transformer_eval",
        lambda: whole(dropout=0.5),
        sequences(MEMORY, QUERY, tgt_mask=lambda batch: causal(QUERIES)),
        training=False,
    ),
]

every_case = pytest.mark.parametrize("case", ATTENTION + TRANSFORMERS, ids=lambda case: case.name)


# --- the laws -------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize(
    "law",
    [
        laws.test_same_forward,
        laws.test_off_is_the_very_torch_code,
        laws.test_input_gradients,
        laws.test_input_that_requires_grad_changes_no_row,
        laws.test_second_derivative_by_the_input,
        laws.test_empty_batch,
        laws.test_two_calls_in_one_pass_add,
        laws.test_accumulate_grad_false_replaces,
    ],
    ids=lambda law: law.__name__,
)
def test_law(law: Callable[[Case], None], case: Case) -> None:
    law(case)


@every_case
@pytest.mark.parametrize("samples", [BATCH, 1])
def test_rows_equal_the_loop(case: Case, samples: int) -> None:
    laws.test_rows_equal_the_loop(case, "mean", samples)


@every_case
def test_rows_add_up_to_the_gradient(case: Case) -> None:
    laws.test_rows_add_up_to_the_gradient(case, "sum")


@every_case
@pytest.mark.parametrize("name", ["in_proj_weight", "bias"])
def test_frozen_parameter_has_no_rows(case: Case, name: str) -> None:
    laws.test_frozen_parameter_has_no_rows(case, name)


@every_case
def test_gradient_penalty(case: Case) -> None:
    laws.test_gradient_penalty(case, "mean")


@every_case
def test_derivative_of_grad_sample(case: Case) -> None:
    laws.test_derivative_of_grad_sample(case, False)


@every_case
def test_lower_precision(case: Case) -> None:
    laws.test_lower_precision(case, torch.bfloat16)


@every_case
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_weights_that_differ_by_sample(case: Case, on: bool) -> None:
    laws.test_weights_that_differ_by_sample(case, on)
