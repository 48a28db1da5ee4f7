"""Models that nobody here wrote: `transformers` and `peft`, from small random configs, converted with no edits.

A row of the table is an architecture: how to build it, its inputs, which of its outputs the loss is made of. `general`
names the classes that go through the general rule; all else in the model runs through a layer of the zoo.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn._registry import EXPANDED
from expanded_nn.layers.general import General
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, sample_losses

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
        torch.manual_seed(0)
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


ARCHITECTURES = {
    "gpt2": of(
        "GPT2LMHeadModel",
        "GPT2Config",
        padded_text,
        "Conv1D",
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
    "llama": of("LlamaForCausalLM", "LlamaConfig", padded_text, "LlamaRMSNorm", **GROUPED),
    "llama-tied": of("LlamaForCausalLM", "LlamaConfig", text, "LlamaRMSNorm", tie_word_embeddings=True, **GROUPED),
    "mistral": of("MistralForCausalLM", "MistralConfig", padded_text, "MistralRMSNorm", sliding_window=3, **GROUPED),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config", padded_text, "Qwen2RMSNorm", **GROUPED),
    "qwen3": of("Qwen3ForCausalLM", "Qwen3Config", padded_text, "Qwen3RMSNorm", head_dim=4, **GROUPED),
    "t5": of("T5ForConditionalGeneration", "T5Config", two_texts, "T5LayerNorm", **T5),
    "t5-gated": of(
        "T5ForConditionalGeneration",
        "T5Config",
        two_texts,
        "T5LayerNorm",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        **T5,
    ),
    "gpt-neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", padded_text, **SMALL),
    "convnext": of(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        larger_image,
        "ConvNextLayer ConvNextLayerNorm",
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
        "MambaMixer MambaRMSNorm",
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

OPT = of(
    "OPTForCausalLM",
    "OPTConfig",
    padded_text,
    vocab_size=WORDS,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=16,
    max_position_embeddings=16,
    word_embed_proj_dim=4,
    pad_token_id=1,
)
CLIP = Architecture("CLIPModel", clip_config, text_and_image, lambda result: result.text_embeds * result.image_embeds)


def experts(model: str, config: str, implementation: str, **arguments: Any) -> Architecture:
    """A mixture of experts; the default implementation has no float64."""
    settings = {"set_experts_implementation": implementation}
    return Architecture(model, lambda: getattr(hf, config)(**GROUPED, **arguments), text, settings=settings)


def mixtral(implementation: str) -> Architecture:
    return experts("MixtralForCausalLM", "MixtralConfig", implementation, num_local_experts=4, num_experts_per_tok=2)


def qwen2_moe(implementation: str) -> Architecture:
    return experts(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        implementation,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )


# name -> the architecture, and what the error says: the module, what it found
REFUSED = {
    "opt": (OPT, r"layers\.0\.final_layer_norm \(LayerNorm\).*folded batch of 3 x 5"),
    "mixtral-eager": (mixtral("eager"), r"mlp\.gate \(MixtralTopKRouter\)"),
    "mixtral-batched": (mixtral("batched_mm"), r"mlp\.gate \(MixtralTopKRouter\)"),
    "qwen2-moe-eager": (qwen2_moe("eager"), r"mlp\.shared_expert\.gate_proj \(Linear\).*folded batch of 3 x 5"),
    "qwen2-moe-batched": (qwen2_moe("batched_mm"), r"mlp\.shared_expert\.gate_proj \(Linear\).*folded batch of 3 x 5"),
    "mamba-with-cache": (
        Architecture("MambaForCausalLM", ARCHITECTURES["mamba"].config, text),
        r"layers\.0\.mixer \(MambaMixer\)",
    ),
    "t5": (ARCHITECTURES["t5"], r"relative_attention_bias \(Embedding\).*index without a batch dimension"),
    "t5-gated": (ARCHITECTURES["t5-gated"], r"relative_attention_bias \(Embedding\).*index without a batch dimension"),
    "clip-contrastive": (CLIP, r"CLIPModel.*on the whole batch its forward gives another result"),
}

RELATIVE = ("t5", "t5-gated")  # refused as they are, right with T5Attention taken as a whole
WITHOUT_ATTENTION = {"convnext", "resnet", "mamba"}
WITHOUT_CHECKPOINTS = {"convnext", "resnet"}


def table(but: set[str] = frozenset()) -> list[Any]:  # type: ignore[assignment]
    return [pytest.param(each, id=name) for name, each in ARCHITECTURES.items() if name not in {*but, *RELATIVE}]


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
    return {type(module).__name__ for module in model.modules() if isinstance(module, General)}


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


@pytest.mark.parametrize("architecture", table(WITHOUT_ATTENTION))
def test_eager_attention(architecture: Architecture) -> None:
    model = architecture.build()
    model.set_attn_implementation("eager")
    assert_rows_are_right(architecture, model, architecture.call(), 3)


@pytest.mark.parametrize("architecture", table(WITHOUT_CHECKPOINTS))
def test_reentrant_checkpointing(architecture: Architecture) -> None:
    assert_right_with_checkpoints(architecture, use_reentrant=True)


@pytest.mark.parametrize("architecture", table(WITHOUT_CHECKPOINTS))
def test_checkpointing(architecture: Architecture) -> None:
    assert_right_with_checkpoints(architecture, use_reentrant=False)


def assert_right_with_checkpoints(architecture: Architecture, *, use_reentrant: bool) -> None:
    def prepare(converted: nn.Module) -> None:
        converted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    assert_rows_are_right(architecture, architecture.build().train(), architecture.call(), 3, prepare)


@pytest.mark.parametrize("architecture", table({"resnet"}))
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


@pytest.mark.parametrize("architecture", table())
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


T5_WITHOUT_CACHE = replace(ARCHITECTURES["t5"], inputs=without_cache(two_texts))


class TestAlone:
    """A module in which the samples are folded together, or share an index, takes the general rule as a whole."""

    CASES = (
        pytest.param(replace(OPT, inputs=without_cache(padded_text)), "opt.modeling_opt.OPTDecoderLayer", id="opt"),
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

    def test_a_cache_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.register("opt.modeling_opt.OPTDecoderLayer", monkeypatch)
        model = enn.convert(OPT.build()).per_sample()
        with pytest.raises(enn.PerSampleError, match=r"layers\.0 \(OPTDecoderLayer\).*its forward keeps tensors"):
            OPT.call().on(model)

    @pytest.mark.parametrize("architecture", [pytest.param(mixtral("eager"), id="mixtral")])
    def test_a_loop_over_the_experts_is_refused(
        self, architecture: Architecture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.register("mixtral.modeling_mixtral.MixtralSparseMoeBlock", monkeypatch)
        model = enn.convert(architecture.build()).per_sample()
        with pytest.raises(enn.PerSampleError, match=r"mlp \(MixtralSparseMoeBlock\).*vmap cannot follow"):
            architecture.call().on(model)


def test_clip_embeddings_with_a_frozen_temperature() -> None:
    """The rows of a loss that mixes no samples; only the temperature's would be of all pairs."""
    model = CLIP.build()
    model.logit_scale.requires_grad_(False)
    assert_rows_are_right(CLIP, model, CLIP.call(), 3)


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
        converted = enn.convert(model).per_sample(loss_reduction="sum")
        assert kept_bytes(architecture, converted) <= kept_bytes(architecture, model)
        assert all(parameter.requires_grad for parameter in converted._recorder.expanded)


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
