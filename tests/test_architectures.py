"""Models that nobody here wrote: `transformers` and `peft`, from small random configs, converted with no edits.

A row of the table is an architecture: how to build it, its inputs, which of its outputs the loss is made of. `general`
names the classes that go through the general rule; all else in the model runs through a layer of the zoo.
"""

import os
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import get_annotations, signature
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import expanded_nn as enn
from expanded_nn.layers.general.rule import General
from expanded_nn.modules.registry import EXPANDED
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    take_rows,
    total_loss,
)
from some import some_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*is deprecated:FutureWarning")

WORDS = 17
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 1}
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}
SPEECH = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (4, 4),
    "conv_stride": (3, 2),
    "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}

Inputs = Callable[[int, int], dict[str, Any]]  # (samples, positions) -> keyword arguments


def words(samples: int, positions: int, seed: int = 0) -> Tensor:
    return torch.randint(3, WORDS, (samples, positions), generator=torch.Generator().manual_seed(seed))


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def text(samples: int, positions: int) -> dict[str, Any]:
    return {"input_ids": words(samples, positions)}


def padded_text(samples: int, positions: int) -> dict[str, Any]:
    mask = torch.ones(samples, positions, dtype=torch.long)
    mask[1:, -2:] = 0
    return {"input_ids": words(samples, positions), "attention_mask": mask}


def two_texts(samples: int, positions: int) -> dict[str, Any]:
    return {"input_ids": words(samples, positions), "decoder_input_ids": words(samples, positions - 1, 5)}


def image(samples: int, positions: int, size: int = 8) -> dict[str, Any]:
    return {"pixel_values": values(samples, 3, size, size)}


def larger_image(samples: int, positions: int) -> dict[str, Any]:
    return image(samples, positions, 16)


def sound(samples: int, positions: int) -> dict[str, Any]:
    return {"input_values": values(samples, 60)}


def spectrum_and_text(samples: int, positions: int) -> dict[str, Any]:
    return {"input_features": values(samples, 4, 12), "decoder_input_ids": words(samples, positions)}


def text_and_image(samples: int, positions: int) -> dict[str, Any]:
    ids = words(samples, positions)
    ids[:, -1] = 2  # where CLIP reads the text's embedding
    return {"input_ids": ids, **image(samples, positions)}


def without_cache(inputs: Inputs) -> Inputs:
    return lambda samples, positions: {**inputs(samples, positions), "use_cache": False}


@dataclass(frozen=True)
class Architecture:
    model: str
    config: Callable[[], Any]
    inputs: Inputs
    output: Callable[[Any], Tensor] = lambda result: result.logits
    general: frozenset[str] = frozenset()
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model in float64, without dropout, in eval mode; no parameter is at a special value."""
        set_seed(0)
        with torch.random.fork_rng():
            model = getattr(hf, self.model)(self.config())
        for setting, value in self.settings.items():
            getattr(model, setting)(value)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return without_dropout(model).double().eval()

    def call(self, samples: int = 3, positions: int = 5) -> Call:
        return Call((), self.inputs(samples, positions))

    def loss(self, model: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        return sample_losses(self.output(call.on(model)), first).sum()


def without_dropout(model: nn.Module) -> nn.Module:
    """Some models ask a dropout layer, some their own attributes, some the config."""
    for module in model.modules():
        holders = [vars(module), vars(module.config)] if hasattr(module, "config") else [vars(module)]
        for holder in holders:
            holder.update({name: 0.0 for name, value in holder.items() if "drop" in name and isinstance(value, float)})
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def clip_config() -> Any:
    return hf.CLIPConfig(text_config={**SMALL, "projection_dim": 4}, vision_config={**VISION, "projection_dim": 4})


def of(model: str, config: str, inputs: Inputs, general: str = "", **arguments: Any) -> Architecture:
    return Architecture(model, lambda: getattr(hf, config)(**arguments), inputs, general=frozenset(general.split()))


OPT = of(
    "OPTForCausalLM",
    "OPTConfig",
    without_cache(padded_text),
    "OPTDecoderLayer OPTLearnedPositionalEmbedding",
    vocab_size=WORDS,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=16,
    max_position_embeddings=16,
    word_embed_proj_dim=4,
    pad_token_id=1,
)


def experts(
    model: str, config: str, implementation: str, block: str = "SparseMoeBlock", **arguments: Any
) -> Architecture:
    """A mixture of experts; the default implementation has no float64."""
    name = model.removesuffix("ForCausalLM")
    router = "TopkRouter" if name.startswith("Deepseek") else "TopKRouter"
    general = f"{name}{block} {name}{router} {name}Experts"
    settings = {"set_experts_implementation": implementation}
    return replace(of(model, config, text, general, **arguments), settings=settings)


def mixtral(implementation: str) -> Architecture:
    return experts(
        "MixtralForCausalLM",
        "MixtralConfig",
        implementation,
        num_local_experts=4,
        num_experts_per_tok=2,
        **GROUPED,
    )


def qwen2_moe(implementation: str) -> Architecture:
    return experts(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        implementation,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        **GROUPED,
    )


ARCHITECTURES = {
    "gpt2": of(
        "GPT2LMHeadModel",
        "GPT2Config",
        padded_text,
        vocab_size=WORDS,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bert": of("BertForSequenceClassification", "BertConfig", padded_text, **SMALL),
    "bert-masked": of("BertForMaskedLM", "BertConfig", padded_text, "BertLMPredictionHead", **SMALL),
    "roberta": of("RobertaForMaskedLM", "RobertaConfig", padded_text, "RobertaLMHead", **{**SMALL, "pad_token_id": 1}),
    "distilbert": of(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        padded_text,
        vocab_size=WORDS,
        dim=8,
        n_layers=2,
        n_heads=2,
        hidden_dim=16,
        max_position_embeddings=16,
    ),
    "vit": of("ViTForImageClassification", "ViTConfig", image, "ViTEmbeddings", num_labels=3, **VISION),
    "llama": of("LlamaForCausalLM", "LlamaConfig", padded_text, **GROUPED),
    "llama-tied": of("LlamaForCausalLM", "LlamaConfig", text, tie_word_embeddings=True, **GROUPED),
    "mistral": of("MistralForCausalLM", "MistralConfig", padded_text, sliding_window=3, **GROUPED),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config", padded_text, **GROUPED),
    "qwen3": of("Qwen3ForCausalLM", "Qwen3Config", padded_text, head_dim=4, **GROUPED),
    "t5": of("T5ForConditionalGeneration", "T5Config", two_texts, **T5),
    "t5-gated": of(
        "T5ForConditionalGeneration",
        "T5Config",
        two_texts,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        **T5,
    ),
    "opt": OPT,
    "mixtral": mixtral("eager"),
    "qwen2-moe": qwen2_moe("batched_mm"),
    "gpt-neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", padded_text, **SMALL),
    "convnext": of(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        larger_image,
        "ConvNextLayer",
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
        image_size=16,
        patch_size=2,
        num_labels=3,
    ),
    "resnet": of(
        "ResNetForImageClassification",
        "ResNetConfig",
        larger_image,
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    ),
    "wav2vec2": of("Wav2Vec2ForCTC", "Wav2Vec2Config", sound, **SPEECH),
    "wav2vec2-layer-norm": of(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", sound, do_stable_layer_norm=True, feat_extract_norm="layer", **SPEECH
    ),
    "whisper": of(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectrum_and_text,
        "WhisperPositionalEmbedding",
        vocab_size=WORDS,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "mamba": of(
        "MambaForCausalLM",
        "MambaConfig",
        without_cache(text),
        "MambaMixer",
        vocab_size=WORDS,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "clip-text": Architecture(
        "CLIPTextModelWithProjection",
        lambda: hf.CLIPTextConfig(**SMALL, projection_dim=4),
        text,
        lambda result: result.text_embeds,
    ),
    "clip-vision": Architecture(
        "CLIPVisionModelWithProjection",
        lambda: hf.CLIPVisionConfig(**VISION, projection_dim=4),
        image,
        lambda result: result.image_embeds,
        frozenset({"CLIPVisionEmbeddings"}),
    ),
}

CLIP = Architecture("CLIPModel", clip_config, text_and_image, lambda result: result.text_embeds * result.image_embeds)


# name -> the architecture, and what the error says: the module, what it found
REFUSED = {
    "clip-contrastive": (CLIP, r"CLIPModel.*on the whole batch its forward gives another result"),
}

WITH_CACHE = {
    "opt": replace(OPT, inputs=padded_text),
    "mamba": Architecture("MambaForCausalLM", ARCHITECTURES["mamba"].config, text),
}

WITHOUT_ATTENTION = {"convnext", "resnet", "mamba"}
WITHOUT_CHECKPOINTS = {"convnext", "resnet"}


def table(but: set[str] = frozenset(), first: int = 0, every: int = 1) -> list[Any]:  # type: ignore[assignment]
    """All architectures but some; those that are not every second, third, … from the first on are tested as slow."""
    chosen = [(name, each) for name, each in ARCHITECTURES.items() if name not in but]
    return [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (number % every != first))
        for number, (name, each) in enumerate(chosen)
    ]


def assert_rows_are_right(
    architecture: Architecture,
    model: nn.Module,
    call: Call,
    samples: int,
    prepare: Callable[[nn.Module], Any] = lambda converted: None,
) -> nn.Module:
    """Same result as the plain model, rows as in the loop over it, which sum to `.grad`."""
    expected = loop(model, call, samples, objective=architecture.loss)
    converted = enn.convert(model).per_sample(loss_reduction="sum")
    prepare(converted)
    output = architecture.output(call.on(converted))
    assert_close(output, architecture.output(call.on(model)).detach())
    sample_losses(output).sum().backward()
    rows = rows_of(converted)
    for name, parameter in converted.named_parameters():
        if parameter.requires_grad and rows[name] is None:
            assert not expected[name].any(), f"{name} has no rows"
            rows[name] = torch.zeros_like(expected[name])
        elif parameter.requires_grad:
            assert_close(parameter.grad, rows[name].sum(0), name=name)
    assert_close_rows(rows, expected)
    return converted


def general_classes(model: nn.Module) -> set[str]:
    """The classes that go through the general rule, as nearly all norms of the package do: these are left out."""
    names = {type(module).__name__ for module in model.modules() if isinstance(module, General)}
    return {name for name in names if not name.endswith(("RMSNorm", "LayerNorm"))}


@pytest.mark.parametrize("architecture", table())
def test_rows_equal_the_loop(architecture: Architecture) -> None:
    model = architecture.build()
    converted = assert_rows_are_right(architecture, model, architecture.call(), 3)
    assert general_classes(converted) == architecture.general
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert isinstance(converted, type(model))


@pytest.mark.parametrize("architecture", table())
def test_rows_equal_the_loop_with_as_many_samples_as_positions(architecture: Architecture) -> None:
    assert_rows_are_right(architecture, architecture.build(), architecture.call(4, 4), 4)


@pytest.mark.parametrize("architecture", table(WITHOUT_ATTENTION, 0, every=3))
def test_eager_attention(architecture: Architecture) -> None:
    model = architecture.build()
    model.set_attn_implementation("eager")
    assert_rows_are_right(architecture, model, architecture.call(), 3)


@pytest.mark.parametrize("architecture", table(WITHOUT_CHECKPOINTS, 1, every=3))
def test_reentrant_checkpointing(architecture: Architecture) -> None:
    assert_right_with_checkpoints(architecture, use_reentrant=True)


@pytest.mark.parametrize("architecture", table(WITHOUT_CHECKPOINTS, 0, every=3))
def test_checkpointing(architecture: Architecture) -> None:
    assert_right_with_checkpoints(architecture, use_reentrant=False)


def assert_right_with_checkpoints(architecture: Architecture, *, use_reentrant: bool) -> None:
    def prepare(converted: nn.Module) -> None:
        converted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    assert_rows_are_right(architecture, architecture.build().train(), architecture.call(), 3, prepare)


@pytest.mark.parametrize("architecture", table({"resnet"}, 1, every=3))
def test_training_with_dropout(architecture: Architecture) -> None:
    model = architecture.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    converted = enn.convert(model).per_sample(loss_reduction="sum")
    architecture.loss(converted, architecture.call()).backward()
    for name, parameter in converted.named_parameters():
        if parameter.grad is not None:
            assert_close(parameter.grad, parameter.grad_sample.sum(0), name=name)


def test_training_of_a_speech_model_after_a_plain_forward() -> None:
    """It draws masks by numpy, makes its argument require a gradient, and puts hooks on its layers as it first runs."""
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "output_hidden_states": True}
    architecture = of("HubertForCTC", "HubertConfig", sound, **SPEECH | masks)
    model, call = architecture.build().train(), architecture.call()
    architecture.loss(model, call)
    converted = enn.convert(model).per_sample(loss_reduction="sum")
    for _ in range(2):
        converted.zero_grad()
        architecture.loss(converted, call).backward()
        for name, parameter in converted.named_parameters():
            if parameter.grad is not None:
                assert_close(parameter.grad, parameter.grad_sample.sum(0), name=name)
        assert converted.hubert.masked_spec_embed.grad.any()


@pytest.mark.parametrize("architecture", table(first=2, every=3))
def test_bfloat16(architecture: Architecture) -> None:
    def half(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
        return model.bfloat16(), call.map(lambda t: t.bfloat16() if t.is_floating_point() else t)

    plain, call = half(architecture.build(), architecture.call())
    expected = loop(plain, call, 3, objective=architecture.loss)
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    architecture.loss(model, call).backward()
    size = torch.cat([rows.double().flatten() for rows in expected.values()]).norm()
    for name, rows in rows_of(model).items():
        if rows is not None:
            assert rows.dtype == torch.bfloat16
            assert (rows.double() - expected[name].double()).norm() <= 0.02 * size, name


@pytest.mark.parametrize(("architecture", "words"), [pytest.param(*row, id=name) for name, row in REFUSED.items()])
def test_refused_by_name(architecture: Architecture, words: str) -> None:
    model = enn.convert(architecture.build()).per_sample()
    with pytest.raises(enn.PerSampleError, match=words):
        architecture.call().on(model)


@pytest.mark.parametrize("name", WITH_CACHE)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_rows_equal_the_loop_with_a_cache(name: str) -> None:
    """A module that is called with a cache, or changes one, runs within a larger one that makes it."""
    architecture = WITH_CACHE[name]
    model = assert_rows_are_right(architecture, architecture.build(), architecture.call(), 3)
    model.zero_grad()
    expected = loop(architecture.build(), architecture.call(), 3, objective=architecture.loss)
    sample_losses(architecture.output(architecture.call().on(model))).sum().backward()
    assert_close_rows(
        {name: rows for name, rows in rows_of(model).items() if rows is not None},
        {name: rows for name, rows in expected.items() if rows_of(model)[name] is not None},
    )


T5_WITHOUT_CACHE = replace(ARCHITECTURES["t5"], inputs=without_cache(two_texts))


class TestAlone:
    """A module in which the samples are folded together, or share an index, takes the general rule as a whole."""

    CASES = (
        pytest.param(OPT, "opt.modeling_opt.OPTDecoderLayer", id="opt"),
        pytest.param(mixtral("batched_mm"), "mixtral.modeling_mixtral.MixtralSparseMoeBlock", id="mixtral"),
        pytest.param(qwen2_moe("batched_mm"), "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock", id="qwen2-moe"),
        pytest.param(
            replace(T5_WITHOUT_CACHE, settings={"set_attn_implementation": "eager"}),
            "t5.modeling_t5.T5Attention",
            id="t5-eager",
        ),
        pytest.param(T5_WITHOUT_CACHE, "t5.modeling_t5.T5Attention", id="t5-sdpa"),
    )

    def register(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _, name = path.rpartition(".")
        folding = getattr(import_module(f"transformers.models.{module}"), name)
        monkeypatch.setitem(EXPANDED, folding, None)  # to be taken away again
        enn.alone(folding)

    @pytest.mark.parametrize(("architecture", "path"), CASES)
    def test_rows_equal_the_loop(self, architecture: Architecture, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.register(path, monkeypatch)
        assert_rows_are_right(architecture, architecture.build(), architecture.call(), 3)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize(("architecture", "path"), CASES)
    def test_checkpointing(
        self, architecture: Architecture, path: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where what comes out is of no sample, but a bias that all share."""
        self.register(path, monkeypatch)
        assert_right_with_checkpoints(architecture, use_reentrant=use_reentrant)

    @pytest.mark.parametrize("architecture", [pytest.param(mixtral("eager"), id="mixtral")])
    def test_a_loop_over_the_experts(self, architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
        self.register("mixtral.modeling_mixtral.MixtralSparseMoeBlock", monkeypatch)
        words = r"mlp \(MixtralSparseMoeBlock\).*vmap cannot follow"
        with pytest.raises(enn.PerSampleError, match=words):
            architecture.call().on(enn.convert(architecture.build()).per_sample(escalate=False))
        with pytest.warns(enn.PerSampleWarning, match=words):
            assert_rows_are_right(architecture, architecture.build(), architecture.call(), 3)


class Layer(NamedTuple):
    """A layer of the package that has a twin registered by name."""

    name: str
    sizes: tuple[int, ...]
    positions: tuple[int, ...] = (5,)

    def build(self) -> nn.Module:
        module, _, name = self.name.rpartition(".")
        layer = getattr(import_module(module), name)(*self.sizes).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return layer

    def call(self, samples: int) -> Call:
        return Call((values(samples, *self.positions, self.sizes[-1]),))


NORMS = ("gemma.modeling_gemma.GemmaRMSNorm", "llama.modeling_llama.LlamaRMSNorm", "t5.modeling_t5.T5LayerNorm")
LAYERS = [
    Layer("transformers.pytorch_utils.Conv1D", (6, 8)),
    Layer("transformers.pytorch_utils.Conv1D", (6, 8), ()),
    *(Layer(f"transformers.models.{name}", (8,)) for name in NORMS),
    Layer("transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm", (4,), (5, 2)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.name.rpartition('.')[2]}-{layer.positions}")
class TestLayers:
    """Single layers of the package keep the laws of those of `torch.nn`; the norms go through the general rule."""

    def test_rows_equal_the_loop(self, layer: Layer) -> None:
        module, call = layer.build(), layer.call(3)
        model = enn.convert(module).per_sample(loss_reduction="sum")
        assert isinstance(model, General) == (type(module).__name__ != "Conv1D")
        assert_close(call.on(model), call.on(module).detach())
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, 3))
        for name, grad in grads_of(model).items():
            assert_close(grad, rows_of(model)[name].sum(0), name=name)

    def test_second_derivatives(self, layer: Layer) -> None:
        module, call = layer.build(), layer.call(3)
        model = enn.convert(module).per_sample(loss_reduction="sum")
        gradient_penalty(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, 3, objective=gradient_penalty))

    def test_weights_that_differ_by_sample(self, layer: Layer) -> None:
        module, call = layer.build(), layer.call(3)
        weights = {name: values(3, *p.shape) for name, p in module.named_parameters()}
        for model in (enn.convert(module), enn.convert(module).per_sample()):
            output = functional_call(model, weights, call.args)
            for i in range(3):
                one = {name: weight[i] for name, weight in weights.items()}
                assert_close(output[i : i + 1], functional_call(module, one, take_rows(call, i).args))

    def test_copies_and_the_way_back(self, layer: Layer) -> None:
        module, call = layer.build(), layer.call(3)
        model = enn.convert(module).per_sample(loss_reduction="sum")
        assert isinstance(model, type(module))
        assert type(enn.revert(model)) is type(module)
        assert torch.equal(call.on(enn.revert(model)), call.on(module))
        assert torch.equal(call.on(enn.convert(module)), call.on(module))
        expected = loop(module, call, 3)
        for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied) is type(model)
            total_loss(copied, call).backward()
            assert_close_rows(rows_of(copied), expected)

    def test_input_that_is_no_batch_is_refused(self, layer: Layer) -> None:
        model = enn.convert(layer.build()).per_sample(batch_size=3)
        with pytest.raises(enn.PerSampleError, match=r"folded batch of 3 x 2"):
            layer.call(6).on(model)


def test_conv1d_keeps_its_factors() -> None:
    """The weight is `(in, out)`: its rows are transposed factors, and nothing is built for their norms."""
    model = enn.convert(Layer("transformers.pytorch_utils.Conv1D", (32, 48)).build()).per_sample()
    model(values(3, 2, 48)).square().sum().backward()
    rows = model.weight.grad_sample
    assert isinstance(rows, enn.FactoredTensor)
    norms = enn.per_sample_grads(model).norms(per_parameter=True)["weight"]
    assert not rows.is_dense
    assert_close(norms, rows.dense().flatten(1).norm(dim=1))


def test_every_named_class_is_there() -> None:
    """A name that the package has no more would leave its class to the general rule, or refused."""
    for name in (name for name in EXPANDED if isinstance(name, str) and name.startswith("transformers.")):
        module, _, class_name = name.rpartition(".")
        assert issubclass(getattr(import_module(module), class_name), nn.Module)


BART = {
    "vocab_size": WORDS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
OPENAI = {
    "vocab_size": WORDS,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "rotary_dim": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    **SMALL,
    "num_key_value_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LABELS = {**VISION, "num_labels": 3}
# only the rows: what else there is to test is that of a neighbour in the table
RELATIVES = {
    "albert": of("AlbertForMaskedLM", "AlbertConfig", padded_text, "AlbertMLMHead", embedding_size=4, **SMALL),
    "bart": of("BartForConditionalGeneration", "BartConfig", two_texts, "BartLearnedPositionalEmbedding", **BART),
    "beit": of("BeitForImageClassification", "BeitConfig", image, "BeitLayer BeitEmbeddings", **LABELS),
    "bloom": of(
        "BloomForCausalLM",
        "BloomConfig",
        padded_text,
        vocab_size=WORDS,
        hidden_size=8,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "codegen": of("CodeGenForCausalLM", "CodeGenConfig", padded_text, **OPENAI),
    "cohere": of("CohereForCausalLM", "CohereConfig", padded_text, **GROUPED),
    "convnext-2": of(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        larger_image,
        "ConvNextV2GRN",
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
        image_size=16,
        patch_size=2,
        num_labels=3,
    ),
    "deberta-2": of(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        padded_text,
        "DebertaV2Encoder LegacyDebertaV2LMPredictionHead",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        **SMALL,
    ),
    "deepseek-2": experts("DeepseekV2ForCausalLM", "DeepseekV2Config", "eager", block="Moe", **DEEPSEEK),
    "deepseek-3": experts("DeepseekV3ForCausalLM", "DeepseekV3Config", "eager", block="MoE", **DEEPSEEK),
    "deit": of("DeiTForImageClassification", "DeiTConfig", image, "DeiTEmbeddings", **LABELS),
    "dinov2": of("Dinov2ForImageClassification", "Dinov2Config", image, "Dinov2LayerScale Dinov2Embeddings", **LABELS),
    "electra": of("ElectraForMaskedLM", "ElectraConfig", padded_text, embedding_size=8, **SMALL),
    "falcon": of(
        "FalconForCausalLM",
        "FalconConfig",
        padded_text,
        "FalconLinear",
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma": of("GemmaForCausalLM", "GemmaConfig", padded_text, head_dim=4, **GROUPED),
    "gemma-2": of("Gemma2ForCausalLM", "Gemma2Config", padded_text, head_dim=4, **GROUPED),
    "gemma-3": of("Gemma3ForCausalLM", "Gemma3TextConfig", padded_text, head_dim=4, **GROUPED),
    "glm4": of("Glm4ForCausalLM", "Glm4Config", padded_text, head_dim=4, **GROUPED),
    "gpt-neo": of(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        padded_text,
        vocab_size=WORDS,
        hidden_size=8,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=2,
        max_position_embeddings=16,
        window_size=3,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gptj": of("GPTJForCausalLM", "GPTJConfig", padded_text, **OPENAI),
    "granite": of("GraniteForCausalLM", "GraniteConfig", padded_text, **GROUPED),
    "hubert": of("HubertForCTC", "HubertConfig", sound, **SPEECH),
    "mamba-2": of(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        without_cache(text),
        "Mamba2Mixer MambaRMSNormGated",
        vocab_size=WORDS,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=4,
        n_groups=1,
        chunk_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mbart": of("MBartForConditionalGeneration", "MBartConfig", two_texts, "MBartLearnedPositionalEmbedding", **BART),
    "modernbert": of("ModernBertForMaskedLM", "ModernBertConfig", padded_text, **SMALL),
    "mt5": of("MT5ForConditionalGeneration", "MT5Config", two_texts, **T5),
    "olmo2": of("Olmo2ForCausalLM", "Olmo2Config", padded_text, **GROUPED),
    "olmoe": experts("OlmoeForCausalLM", "OlmoeConfig", "eager", num_experts=4, num_experts_per_tok=2, **GROUPED),
    "phi": of("PhiForCausalLM", "PhiConfig", padded_text, **GROUPED),
    "phi3": of("Phi3ForCausalLM", "Phi3Config", padded_text, **GROUPED),
    "qwen3-moe": experts(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "eager",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        head_dim=4,
        decoder_sparse_step=1,
        **GROUPED,
    ),
    "segformer": of(
        "SegformerForImageClassification",
        "SegformerConfig",
        larger_image,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[4, 8],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        num_labels=3,
    ),
    "smollm3": of("SmolLM3ForCausalLM", "SmolLM3Config", padded_text, **GROUPED),
    "stablelm": of("StableLmForCausalLM", "StableLmConfig", padded_text, **GROUPED),
    "starcoder2": of("Starcoder2ForCausalLM", "Starcoder2Config", padded_text, **GROUPED),
    "swin": of(
        "SwinForImageClassification",
        "SwinConfig",
        larger_image,
        "SwinLayer SwinRelativePositionBias",
        image_size=16,
        patch_size=2,
        embed_dim=4,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        num_labels=3,
    ),
    "umt5": of("UMT5ForConditionalGeneration", "UMT5Config", two_texts, **T5),
}


@pytest.mark.parametrize("architecture", some_of(RELATIVES))
def test_rows_of_relatives(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "float32", torch.float64)  # routers compute in it, more roughly than the tolerance
    converted = assert_rows_are_right(architecture, architecture.build(), architecture.call(), 3)
    assert general_classes(converted) == architecture.general


@pytest.mark.parametrize(
    "architecture", [*ARCHITECTURES.values(), *RELATIVES.values()], ids=[*ARCHITECTURES, *RELATIVES]
)
def test_what_other_programs_read_is_the_plain_models(architecture: Architecture) -> None:
    model = architecture.build()
    converted = enn.convert(model).per_sample()
    for module, twin in zip(model.modules(), converted.modules(), strict=True):
        for expected, shown in ((module.forward, twin.forward), (type(module).forward, type(twin).forward)):
            assert signature(shown) == signature(expected)
            assert (shown.__doc__, shown.__annotations__) == (expected.__doc__, expected.__annotations__)
        assert signature(type(twin)) == signature(type(module))
    assert type(converted).__doc__ == type(model).__doc__
    assert get_annotations(type(converted)) == get_annotations(type(model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_keep_their_implementation(implementation: str) -> None:
    """In per-sample mode alone another one runs."""
    architecture = mixtral(implementation)
    model = architecture.build()
    converted = enn.convert(model).per_sample()
    architecture.call().on(converted)
    assert converted.config._experts_implementation == implementation
    off = converted.per_sample(False)
    assert torch.equal(architecture.call().on(off).logits, architecture.call().on(model).logits)


def test_clip_embeddings_with_a_frozen_temperature() -> None:
    """The rows of a loss that mixes no samples; only the temperature's would be of all pairs."""
    model = CLIP.build()
    model.logit_scale.requires_grad_(False)
    assert_rows_are_right(CLIP, model, CLIP.call(), 3)


def test_a_cache_that_nobody_reads() -> None:
    """Sample by sample it is of one sample alone, and does not keep the rows from being right."""
    architecture = ARCHITECTURES["gpt2"]
    model = architecture.build()
    model.unused = nn.Parameter(torch.zeros(1))
    assert architecture.call().on(model).past_key_values is not None
    assert_rows_are_right(architecture, model, Call((), text(3, 5)), 3)


class TestLora:
    """Only the adapters have rows; frozen layers are plain ones."""

    CASES = (
        pytest.param("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, id="gpt2"),
        pytest.param("gpt2", {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}, id="gpt2-embedding"),
        pytest.param("llama", {"target_modules": ["q_proj", "v_proj"]}, id="llama"),
        pytest.param("llama", {"target_modules": "all-linear", "use_rslora": True}, id="llama-all"),
        pytest.param("llama", {"target_modules": ["q_proj"], "use_dora": True}, id="llama-dora"),
        pytest.param("llama", {"target_modules": ["q_proj", "embed_tokens"]}, id="llama-embedding"),
        pytest.param("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, id="llama-saved-head"),
    )

    def build(self, architecture: Architecture, lora: dict[str, Any]) -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **lora)
        model = peft.get_peft_model(architecture.build(), config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    @pytest.mark.parametrize(("name", "lora"), CASES)
    def test_rows_equal_the_loop(self, name: str, lora: dict[str, Any]) -> None:
        architecture = ARCHITECTURES[name]
        converted = assert_rows_are_right(architecture, self.build(architecture, lora), architecture.call(), 3)
        for parameter in converted.parameters():
            assert parameter.requires_grad or (parameter.grad_sample is None and parameter.grad is None)
        assert set(rows_of(converted)) == set(grads_of(converted))

    @pytest.mark.parametrize(("name", "lora"), [CASES[0], CASES[2]])
    def test_frozen_layers_cost_nothing(self, name: str, lora: dict[str, Any]) -> None:
        """As many bytes wait for the backward as in the plain model."""
        architecture = ARCHITECTURES[name]
        model = self.build(architecture, lora)
        converted = enn.convert(model).per_sample(loss_reduction="sum", compare=False)
        assert kept_bytes(architecture, converted) <= kept_bytes(architecture, model)
        assert all(parameter.requires_grad for parameter in converted._recorder.expanded)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning", "ignore:`is_gradient_checkpointing`:FutureWarning")
def test_prompts_that_are_learned(kind: str) -> None:
    """All but the last have one row of prompts, which `peft` itself repeats for the samples."""
    peft = pytest.importorskip("peft")
    architecture = replace(ARCHITECTURES["gpt2"], inputs=without_cache(padded_text))
    hidden = {"encoder_hidden_size": 8} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2, **hidden)
    model = peft.get_peft_model(architecture.build(), config).double().eval()
    converted = assert_rows_are_right(architecture, model, architecture.call(), 3)
    assert all(each.norm() > 1e-3 for each in rows_of(converted).values())


def kept_bytes(architecture: Architecture, model: nn.Module) -> int:
    """What a forward keeps for its backward, each storage once."""
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = architecture.output(architecture.call().on(model))
    assert output.requires_grad
    return sum(storages.values())
