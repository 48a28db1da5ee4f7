"""The laws of test_layers.py for attention, whose masks, layouts and two outputs take more words."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
import test_layers as laws
from cases import Case
from oracle import (
    Call,
    assert_all_close,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    total_loss,
)
from some import slow, some

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


@pytest.mark.parametrize("case", [*some(ATTENTION), *TRANSFORMERS], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "law",
    [
        laws.test_same_forward,
        laws.test_off_is_the_very_torch_code,
        laws.test_input_gradients,
        slow(laws.test_input_that_requires_grad_changes_no_row),
        laws.test_second_derivative_by_the_input,
        laws.test_empty_batch,
        laws.test_two_calls_in_one_pass_add,
        slow(laws.test_accumulate_grad_false_replaces),
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
    laws.test_rows_add_up_to_the_gradient(case)


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


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_lower_precision(case: Case) -> None:
    laws.test_lower_precision(case, torch.bfloat16)


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.name)
def test_single_precision(case: Case) -> None:
    laws.test_lower_precision(case, torch.float32)


@every_case
def test_weights_that_differ_by_sample(case: Case) -> None:
    laws.test_weights_that_differ_by_sample(case, True)


@every_case
def test_weights_that_differ_by_sample_off(case: Case) -> None:
    if case.name.endswith(("time_first", "square")) and case in TRANSFORMERS:
        with pytest.raises(enn.PerSampleError, match=r"weights have a batch dimension, its inputs are \(T, B"):
            laws.test_weights_that_differ_by_sample(case, False)
    else:
        laws.test_weights_that_differ_by_sample(case, False)


@pytest.mark.parametrize("case", [case for case in TRANSFORMERS if not case.training], ids=lambda case: case.name)
def test_weights_that_differ_by_sample_without_grad(case: Case) -> None:
    """Torch's fused inference knows of one weight only."""
    weights, call = laws.differing(case), case.inputs(BATCH)
    detached = {name: w.detach() for name, w in weights.items()}
    for on in (True, False):
        for context in (torch.no_grad, torch.enable_grad):
            with context():
                model = laws.expanded(case).per_sample(on)
                output = torch.func.functional_call(model, detached, call.args, dict(call.kwargs))
            with without_fast_paths():
                assert_close(output, laws.loop_with_weights(case, weights, call.requires_grad())[0])


# --- classes, copies, files -----------------------------------------------------------------------------------

CLASSES: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.MultiheadAttention: (SIZE, HEADS),
    nn.TransformerEncoderLayer: (SIZE, HEADS, 6),
    nn.TransformerDecoderLayer: (SIZE, HEADS, 6),
    nn.TransformerEncoder: (encoder_layer(batch_first=False), 2, nn.LayerNorm(SIZE)),
    nn.TransformerDecoder: (decoder_layer(batch_first=False), 2, nn.LayerNorm(SIZE)),
    nn.Transformer: (SIZE, HEADS, 1, 1, 6),
}
each_class = pytest.mark.parametrize("torch_class", CLASSES, ids=lambda torch_class: torch_class.__name__)


def made(torch_class: type[nn.Module], kind: Any) -> nn.Module:
    set_seed(3)
    return kind(*copy.deepcopy(CLASSES[torch_class])).double()


def call_of(module: nn.Module) -> Call:
    inputs = {nn.MultiheadAttention: 3, nn.TransformerEncoderLayer: 1, nn.TransformerEncoder: 1}
    number = next((n for kind, n in inputs.items() if isinstance(module, kind)), 2)
    return Call(tuple(torch.randn(QUERIES, BATCH, SIZE) for _ in range(number)))


def types(module: nn.Module) -> list[type]:
    return [type(each) for each in module.modules()]


@each_class
def test_made_directly(torch_class: type[nn.Module]) -> None:
    kind = getattr(enn, torch_class.__name__)
    ours, theirs = made(torch_class, kind), made(torch_class, torch_class)
    assert isinstance(ours, torch_class)
    assert inspect.signature(kind) == inspect.signature(torch_class)
    assert types(ours) == types(enn.convert(theirs))
    assert types(enn.revert(ours)) == types(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(isinstance(each, enn.Expanded) for each in ours.modules() if list(each.parameters(recurse=False)))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@each_class
def test_copies(torch_class: type[nn.Module]) -> None:
    model = made(torch_class, getattr(enn, torch_class.__name__)).eval().per_sample()
    call = call_of(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for each in copies:
        assert types(each) == types(model)
        rows = []
        for one in (each, model):
            one.zero_grad()
            loss = call.on(one)[0] if torch_class is nn.MultiheadAttention else call.on(one)
            loss.sin().sum().backward()
            rows.append({name: p.grad_sample.clone() for name, p in one.named_parameters()})
        assert_close_rows(*rows)


def test_what_is_given_is_converted_too() -> None:
    norm = nn.LayerNorm(SIZE)
    model = enn.TransformerEncoder(enn.TransformerEncoderLayer(SIZE, HEADS, 6, activation=nn.PReLU()), 2, norm)
    assert model.norm is norm
    assert isinstance(norm, enn.LayerNorm)
    assert isinstance(model.layers[1].activation, enn.PReLU)
    assert type(model.layers[0]) is enn.TransformerEncoderLayer
    custom = enn.Transformer(SIZE, HEADS, custom_encoder=nn.Linear(SIZE, SIZE), num_decoder_layers=1)
    assert isinstance(custom.encoder, enn.Linear)


class Alike(nn.Module):
    """An encoder, or a decoder, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, first: Tensor, second: Tensor | None = None, **masks: Any) -> Tensor:
        y = self.layer(first)
        return y if second is None else y * second.mean(1, keepdim=True)


def test_a_transformer_without_attention() -> None:
    module = nn.Transformer(SIZE, HEADS, custom_encoder=Alike(), custom_decoder=Alike(), batch_first=True)
    call = Call((torch.randn(BATCH, 5, SIZE), torch.randn(BATCH, 3, SIZE)))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, BATCH))


def test_what_is_given_and_cannot_be_converted() -> None:
    with pytest.raises(enn.ConversionError, match=r"norm \(SyncBatchNorm\): it mixes samples"):
        enn.TransformerEncoder(encoder_layer(), 2, nn.SyncBatchNorm(SIZE))


def test_user_class_on_top_of_ours() -> None:
    class Mine(enn.TransformerEncoderLayer):
        def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(src)

    model = Mine(SIZE, HEADS, 6, 0.0, batch_first=True)
    assert type(enn.convert(model)) is Mine
    call = one(BATCH)
    output = call.on(model.per_sample())
    module = encoder_layer()
    module.load_state_dict(model.state_dict())
    assert_close(output, 2 * call.on(module).detach(), tol=1e-12)
    output.sum().backward()
    assert model.self_attn.in_proj_weight.grad_sample.shape == (BATCH, 3 * SIZE, SIZE)


class Louder(nn.TransformerEncoderLayer):
    """A user's subclass with a part of its own, without parameters."""

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._sa_block(x, *args, **kwargs)


class Gated(Louder):
    """And one with a parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = nn.Parameter(torch.full((), 0.5))

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.gate * super()._sa_block(x, *args, **kwargs)


@pytest.mark.parametrize(("kind", "batch_first"), [(Louder, True), (Louder, False), (Gated, True)])
def test_user_subclass(kind: type[nn.Module], batch_first: bool) -> None:
    layer = kind(SIZE, HEADS, 6, dropout=0.0, batch_first=batch_first)
    module = layer if batch_first else BatchFirst(layer)
    model = right(module, square(BATCH))
    assert isinstance(model if batch_first else model.transformer, enn.TransformerEncoderLayer) == (kind is Louder)
    assert types(enn.revert(model)) == types(module)


class OfTokens(nn.Transformer):
    """A user's language model on torch's transformer: a forward of its own, which takes tokens `(T, B)`."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(SIZE, HEADS, 1, 1, 6, dropout=0.0, batch_first=batch_first)
        self.embedding, self.head = nn.Embedding(7, SIZE), nn.Linear(SIZE, 7)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.encoder(self.embedding(tokens)))


@pytest.mark.parametrize("positions", [1, BATCH, BATCH + 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_user_subclass_that_takes_tokens(batch_first: bool, positions: int) -> None:
    module = OfTokens(batch_first)
    tokens = torch.randint(7, (BATCH, positions))
    model = enn.convert(module).per_sample(batch_first=batch_first, loss_reduction="sum")

    def samples_first(model: nn.Module, call: Call, first: int = 0) -> Tensor:
        dim = 0 if batch_first else 1
        return total_loss(lambda x: model(x.transpose(0, dim)).transpose(0, dim), call, first)

    samples_first(model, Call((tokens,))).backward()
    used = {name: rows for name, rows in rows_of(model).items() if not name.startswith("decoder")}
    expected = loop(module, Call((tokens,)), BATCH, objective=samples_first)
    assert_close_rows(used, {name: expected[name] for name in used})


# --- what the kernels do --------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


FUSED = [case for case in ATTENTION if case.name.endswith("_fused")]


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_fused_attention_stays_in_use(case: Case) -> None:
    model, call = laws.expanded(case), case.inputs(BATCH)
    with Operations() as forward:
        loss = total_loss(model, call)
    with Operations() as backward:
        loss.backward()
    assert FLASH in forward.names
    assert f"{FLASH}_backward" in backward.names
    assert not {"_softmax", "_softmax_backward_data"} & (forward.names | backward.names)


@pytest.mark.parametrize("inputs", [1, 2, 3])
def test_rows_of_the_projections_stay_factored(inputs: int) -> None:
    model = enn.convert(Attend(nn.MultiheadAttention(64, 4, batch_first=True), need_weights=False)).per_sample()
    total_loss(model, sequences(*[(2, 64)] * inputs)(BATCH)).backward()
    assert isinstance(model.attention.in_proj_weight.grad_sample, enn.FactoredTensor)
    assert isinstance(model.attention.out_proj.weight.grad_sample, enn.FactoredTensor)


def test_nowhere_to_attend() -> None:
    """A sample whose keys are all padding: the fused kernel gives zeros, and so do all derivatives."""
    call = sequences(QUERY, MEMORY, key_padding_mask=padding(KEYS))(BATCH)
    call.kwargs["key_padding_mask"][1] = True
    module = Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True), need_weights=False)
    model = right(module, call)
    assert not model.attention.in_proj_weight.grad_sample[1].any()
    model.zero_grad()
    gradient_penalty(model, call).backward()
    math = twice(lambda: module, True)()
    assert_close_rows(rows_of(model), loop(math, call, BATCH, take=take, objective=gradient_penalty))
    assert all(p.grad_sample.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
def test_mask_that_needs_gradient(need_weights: bool) -> None:
    """Shared by all samples: its gradient is the sum, and it has second derivatives."""

    def build() -> nn.Module:
        return Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True), need_weights=need_weights)

    module = twice(build, True)()
    model = enn.convert(build()).per_sample(loss_reduction="sum")
    model.load_state_dict(module.state_dict())
    x, mask = torch.randn(BATCH, *QUERY), torch.randn(QUERIES, QUERIES)
    results = []
    for one in (model, module):
        call = Call((x,), {"attn_mask": mask}).requires_grad()
        loss = total_loss(one, call)
        first = torch.autograd.grad(loss, [call.kwargs["attn_mask"], *call.args, *one.parameters()], create_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), [call.kwargs["attn_mask"], *call.args, *one.parameters()]
        )
        results.append([*first, *second])
    assert_all_close(*results)
    model.zero_grad()
    call = Call((x,), {"attn_mask": mask})
    total_loss(model, call.requires_grad()).backward()
    assert_close_rows(rows_of(model), loop(module, call, BATCH, take=take))


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_draws_as_torch_does(need_weights: bool) -> None:
    module = Attend(nn.MultiheadAttention(SIZE, HEADS, dropout=0.4, batch_first=True), need_weights=need_weights)
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), two(BATCH)
    for one in (module, model):
        set_seed(5)
        total_loss(one, call).backward()
    assert_close_rows(grads_of(model), grads_of(module))
    assert_close_rows({name: r.sum(0) for name, r in rows_of(model).items()}, grads_of(module))


@pytest.mark.parametrize("need_weights", [True, False])
def test_output_with_time_first_lies_as_torch_lays_it(need_weights: bool) -> None:
    module, x = nn.MultiheadAttention(SIZE, HEADS), torch.randn(QUERIES, BATCH, SIZE)
    model = enn.convert(module).per_sample()
    ours, theirs = (one(x, x, x, need_weights=need_weights)[0] for one in (model, module))
    assert ours.stride() == theirs.stride()


def test_dropout_is_differentiable_twice() -> None:
    module = Attend(nn.MultiheadAttention(SIZE, HEADS, dropout=0.4, batch_first=True), need_weights=False)
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), two(BATCH)
    for one in (module, model):
        set_seed(5)
        gradient_penalty(one, call).backward()
    assert_close_rows(grads_of(model), grads_of(module))


@pytest.mark.parametrize("case", [case for case in ATTENTION if "_time" not in case.name], ids=lambda case: case.name)
def test_autocast(case: Case) -> None:
    """Rows have the parameter's dtype, outputs that of torch."""
    call = case.inputs(BATCH).map(lambda t: t.float() if t.is_floating_point() else t)
    model = enn.convert(case.module().float()).per_sample(loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = call.on(model), call.on(case.module().float())
        loss = sample_losses(output.float()).sum()
    assert output.dtype == expected.dtype
    loss.backward()
    assert all(r.dtype == torch.float32 for r in rows_of(model).values())
    in_float64 = call.map(lambda t: t.double() if t.is_floating_point() else t)
    assert_close_rows(rows_of(model), loop(case.module(), in_float64, BATCH, take=take), tol=8e-2)


class Causal(nn.Module):
    """A model that makes the mask itself or has it as a buffer, around attention or a container of torch's."""

    def __init__(self, inner: nn.Module, mask: Tensor | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.mask is None else self.mask
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(x, x, x, None, False, mask)[0]
        return self.inner(x, mask)


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("container", [False, True])
def test_causal_mask_of_as_many_positions_as_samples(container: bool, is_buffer: bool) -> None:
    """A mask `(T, S)` has no samples: with T = B nothing is refused, and no module goes sample by sample."""
    inner: nn.Module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    if container:
        layer = nn.TransformerEncoderLayer(SIZE, HEADS, 8, dropout=0.0, batch_first=True)
        inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(BATCH) if is_buffer else None
    right(Causal(inner, mask), Call((torch.randn(BATCH, BATCH, SIZE),)), escalate=False)


# --- sharing, freezing, nesting -------------------------------------------------------------------------------


def right(module: nn.Module, call: Call, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    """The rows of the converted model are those of the loop."""
    model = enn.convert(module) if model is None else model
    enn.per_sample(model, **{"loss_reduction": "sum", "batch_first": True, **settings})
    assert_close(call.on(model), call.on(module).detach(), tol=1e-12)
    model.zero_grad()
    total_loss(model, call).backward()
    expected = loop(module, call, BATCH, take=take)
    assert_close_rows(rows_of(model), expected)
    assert_close_rows(grads_of(model), {name: r.sum(0) for name, r in expected.items()})
    return model


class Twice(nn.Module):
    """One attention called twice, and another that shares its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True))
        self.other = Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True), need_weights=False)
        self.other.attention.in_proj_weight = self.one.attention.in_proj_weight
        self.other.attention.out_proj = self.one.attention.out_proj

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.other(x)
        return self.one(x) + self.one(self.other(x, x.cos()))


def test_tied_layers() -> None:
    model = right(Twice(), one(BATCH))
    assert model.one.attention.out_proj is model.other.attention.out_proj


def test_one_layer_many_times() -> None:
    layer = encoder_layer()
    right(nn.Sequential(layer, layer, nn.Linear(SIZE, 2)), one(BATCH))


class Padded(nn.Module):
    """A padding mask for an encoder that some layers follow."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, -2:] = True
        return self.head(self.encoder(x, src_key_padding_mask=mask))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trainable", ["none", "layers.1.", "layers.0.", "norm.", "norm1", "out_proj"])
def test_frozen_parts(trainable: str, training: bool) -> None:
    """In eval mode torch's nested tensors and its fused inference would meet layers that have rows."""
    module = Padded(encoder(dropout=0.0)).train(training)
    for name, p in module.encoder.named_parameters():
        p.requires_grad_(trainable in name)
    call = one(BATCH)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    with without_fast_paths(trainable != "none"):
        assert_close_rows(rows_of(model), loop(module, call, BATCH))


@contextmanager
def without_fast_paths(really: bool = True) -> Iterator[None]:
    """Without torch's fast paths, which give zeros where the input is padding, or fail where some layers are frozen."""
    torch.backends.mha.set_fastpath_enabled(not really)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.no_modes
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("on", [True, False])
def test_inference_is_fused(on: bool, frozen: bool) -> None:
    """Where no rows are due torch's fast paths run, per-sample mode or not."""
    module, call = Padded(encoder(dropout=0.5)).eval(), one(BATCH)
    model = enn.convert(module).per_sample(on)
    model.encoder.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen), Operations() as seen:
        output = call.on(model)
    assert "_transformer_encoder_layer_fwd" in seen.names
    with torch.no_grad():
        assert torch.equal(output, call.on(module))


def test_one_row_is_shared_by_all_samples() -> None:
    class Pool(nn.Module):
        """A table of queries and one of keys for all samples."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, SIZE)
            self.attend = Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True))
            self.back = Attend(nn.MultiheadAttention(SIZE, HEADS))
            self.explicit = False

        def forward(self, x: Tensor) -> Tensor:
            table = self.table(torch.arange(10)[None])
            if self.explicit:
                table = table.expand(len(x), -1, -1)
            return torch.cat([self.attend(table, x), self.back(x, table)], 1)

    module = Pool()
    model = enn.convert(module)
    module.explicit = True  # torch itself broadcasts nothing here
    right(module, one(BATCH), model)


class Classifier(nn.Module):
    """Parameters of its own beside an encoder: the general rule, with a class token."""

    def __init__(self, masked: bool, **arguments: Any) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, SIZE))
        self.encoder = encoder(**arguments)
        self.first = arguments.get("batch_first", True)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        mask = causal(x.shape[1]) if self.masked else None
        x = self.encoder(x if self.first else x.transpose(0, 1), mask)
        return x[:, 0] if self.first else x[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("steps", [QUERIES, 2, 0])
def test_inside_the_general_rule(masked: bool, batch_first: bool, training: bool, steps: int) -> None:
    module = Classifier(masked, batch_first=batch_first).train(training)
    right(module, sequences((steps, SIZE))(BATCH))


def test_frozen_inside_the_general_rule() -> None:
    module = Classifier(False).eval()
    module.encoder.layers.requires_grad_(False)
    right(module, one(BATCH))


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "bias_k"])
def test_parametrized(name: str) -> None:
    module = Attend(nn.MultiheadAttention(SIZE, HEADS, batch_first=True, add_bias_kv=True))
    nn.init.normal_(module.attention.in_proj_bias)
    nn.utils.parametrizations.weight_norm(module.attention, name)
    nn.utils.parametrizations.weight_norm(module.attention.out_proj)
    right(module, two(BATCH))


class Checkpointed(nn.Module):
    def __init__(self, batch_first: bool, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(SIZE, SIZE)
        layer = encoder_layer(batch_first=batch_first)
        self.layer = layer if batch_first else BatchFirst(layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_checkpoint(batch_first: bool, reentrant: bool) -> None:
    module = Checkpointed(batch_first, None)
    model = Checkpointed(batch_first, reentrant)
    model.load_state_dict(module.state_dict())
    right(module, square(BATCH), enn.convert(model))


# --- time first -----------------------------------------------------------------------------------------------


@each_class
@pytest.mark.parametrize("batch_first", [True, False])
def test_time_first_root(torch_class: type[nn.Module], batch_first: bool) -> None:
    """The layer itself says where the samples stand, whatever `per_sample` was told; also with T = B."""
    module = made(torch_class, torch_class).eval()
    model = enn.convert(module).per_sample(batch_first=batch_first, loss_reduction="sum")
    call = call_of(module).map(lambda x: x[:BATCH])
    result = call.on(model)
    output = result[0] if isinstance(result, tuple) else result
    sample_losses(output.transpose(0, 1)).sum().backward()
    for i in range(BATCH):
        module.zero_grad()
        result = call.map(lambda x, i=i: x[:, i : i + 1]).on(module)
        output = result[0] if isinstance(result, tuple) else result
        sample_losses(output.transpose(0, 1), i).sum().backward()
        assert_close_rows({name: r[i] for name, r in rows_of(model).items()}, grads_of(module))


# --- what is refused ------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """A root whose input tells B, and which gives attention something else."""

    def __init__(self, feed: Callable[[Tensor], tuple[Any, ...]], **arguments: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(SIZE, HEADS, batch_first=True, **arguments)
        self.feed = feed

    def forward(self, x: Tensor) -> Tensor:
        *given, masks = self.feed(x)
        return self.layer(*given, **masks)[0]


@pytest.mark.parametrize(
    ("feed", "match"),
    [
        (lambda x: (x[:2], x, x, {}), r"layer \(MultiheadAttention\): query has shape \(2, 5, 4\), 2 rows"),
        (lambda x: (x, x[:2], x, {}), r"layer \(MultiheadAttention\): key has shape \(2, 5, 4\), 2 rows"),
        (lambda x: (x, x, x[:2], {}), r"layer \(MultiheadAttention\): value has shape \(2, 5, 4\), 2 rows"),
        (lambda x: (torch.cat([x, x]), x, x, {}), r"query has shape \(6, 5, 4\), .*folded batch of 3 x 2"),
        (lambda x: (x, x[1:2], x[1:2], {}), r"key of shape \(1, 5, 4\) is a slice"),
        (lambda x: (x[0], x[0], x[0], {}), r"query has shape \(5, 4\); wanted a batch of .*query.unsqueeze\(0\)"),
        (lambda x: (x, x[0], x[0], {}), r"key has shape \(5, 4\); wanted a batch of sequences, \(B, T, features\)"),
        (lambda x: (x[:, None], x, x, {}), r"query has shape \(3, 1, 5, 4\); wanted a batch of sequences"),
        (lambda x: (x, x, x[:, :2], {}), r"key has shape \(3, 5, 4\), value \(3, 2, 4\); wanted one value for each"),
        (
            lambda x: (x, x, x, {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}),
            r"key_padding_mask has shape \(2, 5\), 2 rows",
        ),
        (
            lambda x: (x, x, x, {"key_padding_mask": torch.zeros(3, 4, dtype=torch.bool)}),
            r"key_padding_mask has shape \(3, 4\); wanted \(3, 5\), for 3 samples",
        ),
        (
            lambda x: (x, x, x, {"key_padding_mask": torch.zeros(5, dtype=torch.bool)}),
            r"key_padding_mask has shape \(5,\), no batch dimension",
        ),
        (
            lambda x: (x, x, x, {"attn_mask": torch.zeros(4, 5, dtype=torch.bool)}),
            r"attn_mask has shape \(4, 5\); wanted \(5, 5\), for 3 samples and 2 heads",
        ),
        (
            lambda x: (x, x, x, {"attn_mask": torch.zeros(3, 5, 5, dtype=torch.bool)}),
            r"attn_mask has shape \(3, 5, 5\); wanted \(6, 5, 5\), .* is \(B \* num_heads, T, S\)",
        ),
        (lambda x: (x, x, x, {"is_causal": True}), r"is_causal is given without attn_mask"),
        (
            lambda x: (torch.nested.nested_tensor(list(x.detach())), x, x, {}),
            r"query is a nested tensor; .*Pad it \(key_padding_mask\)",
        ),
    ],
)
def test_bad_input(feed: Callable[[Tensor], tuple[Any, ...]], match: str) -> None:
    with pytest.raises(enn.PerSampleError, match=match):
        enn.convert(Feed(feed)).per_sample()(torch.randn(BATCH, *QUERY).sin())


def test_unbatched_input_is_refused_by_name() -> None:
    attention = enn.MultiheadAttention(SIZE, HEADS).per_sample()
    x = torch.randn(QUERY)
    with pytest.raises(enn.PerSampleError, match=r"MultiheadAttention: query .*query.unsqueeze\(1\)"):
        attention(x, x, x)
    with pytest.raises(enn.PerSampleError, match=r"MultiheadAttention: query .*query.unsqueeze\(1\)"):
        attention(query=x, key=x, value=x)
    with pytest.raises(enn.PerSampleError, match=r"^TransformerEncoderLayer: input has shape \(5, 4\)"):
        enn.convert(encoder_layer(norm_first=True)).per_sample()(x)


def test_plain_child_put_in_later() -> None:
    attention = enn.MultiheadAttention(SIZE, HEADS).per_sample()
    attention.out_proj = nn.Linear(SIZE, SIZE)
    x = torch.randn(QUERIES, BATCH, SIZE)
    with pytest.raises(enn.PerSampleError, match=r"out_proj is a plain Linear; .*convert\(model, inplace=True\)"):
        attention(x, x, x)
    enn.per_sample(attention)(x, x, x)[0].sum().backward()
    assert attention.out_proj.weight.grad_sample.shape == (BATCH, SIZE, SIZE)


# --- torch's own module database ------------------------------------------------------------------------------


def database() -> Iterator[Any]:
    """What torch tests: products of all arguments. Every fifth is tested each time, whatever its arguments are."""
    for info in module_db:
        if info.module_cls in CLASSES:
            for training in (True, False):
                for i, given in enumerate(inputs_of(info, training)):
                    name = f"{info.module_cls.__name__}-{training}-{i}-{given.desc}"
                    yield pytest.param(info, training, i, id=name, marks=[pytest.mark.slow] * (i % 5 > 0))


@cache
def inputs_of(info: ModuleInfo, training: bool) -> list[Any]:
    return info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)


class Output(nn.Module):
    """Samples first, and one tensor."""

    def __init__(self, module: nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.module, self.batch_first = module, batch_first

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.module(*args, **kwargs)
        output, weights = result if isinstance(result, tuple) else (result, None)
        output = output if self.batch_first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


@pytest.mark.parametrize(("info", "training", "i"), [*database()])
def test_module_database(info: ModuleInfo, training: bool, i: int) -> None:
    given = inputs_of(info, training)[i]
    arguments = given.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).double().train(training)
    attention = next(each for each in module.modules() if isinstance(each, nn.MultiheadAttention))
    call = Call(given.forward_input.args, given.forward_input.kwargs).map(Tensor.detach)
    model = enn.convert(Output(module, attention.batch_first)).per_sample(
        loss_reduction="sum", batch_first=attention.batch_first
    )
    if call.args[0].dim() == 2:
        with pytest.raises(enn.PerSampleError, match=type(module).__name__):
            call.on(model)
        return
    dim = 0 if attention.batch_first else 1
    samples = call.args[0].shape[dim]

    def alone(call: Call, i: int) -> Call:
        def cut(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or (name.endswith("mask") and "padding" not in name and x.dim() == 2):
                return x
            if name.endswith("mask"):
                rows = attention.num_heads if x.dim() == 3 else 1
                return x[i * rows : (i + 1) * rows]
            return x.narrow(dim, i, 1)

        return Call(tuple(cut("", x) for x in call.args), {name: cut(name, x) for name, x in call.kwargs.items()})

    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(Output(module, attention.batch_first), call, samples, take=alone))
