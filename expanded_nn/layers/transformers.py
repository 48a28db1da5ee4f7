"""Layers of the `transformers` package, registered by name: the package is not imported."""

from __future__ import annotations

from typing import Any, ClassVar

from einops import rearrange
from torch import Tensor, nn

from expanded_nn.layers.embedding import Embedding
from expanded_nn.layers.general.alone import Alone
from expanded_nn.layers.linear import linear
from expanded_nn.modules.base import Expanded, Root
from expanded_nn.modules.registry import expands
from expanded_nn.recording.lift import swapped


@expands("transformers.pytorch_utils.Conv1D")
class Conv1D(Expanded):
    """The linear layer of GPT-2, whose weight is `(in, out)`; input `(B, *, in)`."""

    ranks: ClassVar[dict[str, int]] = {"weight": 2, "bias": 1}
    positionwise: ClassVar[bool] = True
    feature_dims: ClassVar[int] = 1

    def expanded_forward(self, x: Tensor) -> Tensor:
        return self.by_sample(
            lambda x: linear(x, self.expanded("weight").mT, self.expanded("bias")), self.feature_dims, x=x
        )


class ScaledEmbedding(Embedding):
    """An embedding that multiplies what it looks up by `embed_scale`; input `(B, *)`."""

    embed_scale: Any  # a number or a tensor

    def expanded_forward(self, input_ids: Tensor) -> Tensor:
        out, scale = super().expanded_forward(input_ids), self.embed_scale
        return out * (scale.to(out.dtype) if isinstance(scale, Tensor) else scale)


class RelativeAttention(Root):
    """Attention with a bias for each pair of positions, looked up by an index that has no batch dimension."""

    always_converted: ClassVar[bool] = True

    def compute_bias(self, *args: Any, **kwargs: Any) -> Tensor:  # (B, heads, T, S)
        compute, recorder, table = super().compute_bias, self._recorder, self.relative_attention_bias  # type: ignore[misc]
        if recorder is None or recorder.forward is None or recorder.general_rule is not None:
            return compute(*args, **kwargs)  # type: ignore[no-any-return]
        if not isinstance(table, Expanded):
            return compute(*args, **kwargs)  # type: ignore[no-any-return]
        batch, heads = table.pass_batch_size, table.embedding_dim
        # B tables of so many heads are one of B times as many
        weight = rearrange(table.expanded("weight"), "b buckets heads -> buckets (b heads)")
        with swapped({(table, "weight"): weight}), recorder.in_general_rule({}):
            bias = compute(*args, **kwargs)
        return rearrange(bias, "1 (b heads) t s -> b heads t s", b=batch, heads=heads)  # type: ignore[no-any-return]


class Experts(Alone):
    """A mixture of experts that folds the samples into rows, and loops over the experts, as `vmap` cannot.

    It runs on the whole batch where its graph tells whose the rows are, which each expert takes.
    """

    _loops: ClassVar[bool] = True


BY_NAME: dict[type[nn.Module], dict[str, str]] = {
    # twin -> the package of each model, its class there
    ScaledEmbedding: {
        "bart": "BartScaledWordEmbedding",
        "gemma": "GemmaTextScaledWordEmbedding",
        "gemma2": "Gemma2TextScaledWordEmbedding",
        "gemma3": "Gemma3TextScaledWordEmbedding",
        "mbart": "MBartScaledWordEmbedding",
    },
    RelativeAttention: {
        "mt5": "MT5Attention",
        "switch_transformers": "SwitchTransformersAttention",
        "t5": "T5Attention",
        "umt5": "UMT5Attention",
    },
    Experts: {
        "deepseek_v2": "DeepseekV2Moe",
        "deepseek_v3": "DeepseekV3MoE",
        "granitemoe": "GraniteMoeMoE",
        "mixtral": "MixtralSparseMoeBlock",
        "olmoe": "OlmoeSparseMoeBlock",
        "qwen2_moe": "Qwen2MoeSparseMoeBlock",
        "qwen3_moe": "Qwen3MoeSparseMoeBlock",
        "switch_transformers": "SwitchTransformersSparseMLP",
    },
    Alone: {"deberta_v2": "DebertaV2Encoder", "opt": "OPTDecoderLayer", "swin": "SwinLayer"},
}
for twin, classes in BY_NAME.items():
    for package, name in classes.items():
        expands(f"transformers.models.{package}.modeling_{package}.{name}")(twin)
