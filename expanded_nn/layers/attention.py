"""Attention: `MultiheadAttention`, and the `Transformer` family that is made of it."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn.common.batch import own_batch_first, tensors
from expanded_nn.common.modes import without_fused_inference
from expanded_nn.common.shared import as_no_view
from expanded_nn.layers.heads import attention, projected
from expanded_nn.layers.linear import Linear, linear
from expanded_nn.layers.twins import expand_modules, raise_for
from expanded_nn.modules.base import Expanded, PerSampleModule, Root
from expanded_nn.modules.layout import refusal, refuse_other_samples_of_one, refuse_other_than_sequences
from expanded_nn.modules.registry import expands, registered
from expanded_nn.recording.recorder import Recorder


class _Converted(PerSampleModule):
    """A module of `torch.nn` that is made of others: they become expanded with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise_for(self)
        expand_modules(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch_class = next(base for base in cls.__mro__ if not issubclass(base, PerSampleModule))
        cls.__signature__ = inspect.signature(torch_class)  # type: ignore[attr-defined]


@expands(nn.modules.linear.NonDynamicallyQuantizableLinear)
class NonDynamicallyQuantizableLinear(Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """The linear layer at the end of attention; a class of this module's, as a compiler takes torch's for static."""


_ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


@expands(nn.MultiheadAttention)
class MultiheadAttention(_Converted, Expanded, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with per-sample gradients.

    Query, key and value are `(B, T, features)`, or `(T, B, features)` without `batch_first`; each of them may have one
    row that all samples share. A mask `(T, S)` is shared, one of `(B * num_heads, T, S)` is each sample's own.
    """

    ranks: ClassVar[dict[str, int]] = {
        "in_proj_weight": 2,
        "q_proj_weight": 2,
        "k_proj_weight": 2,
        "v_proj_weight": 2,
        "in_proj_bias": 1,
        "bias_k": 3,
        "bias_v": 3,
    }

    batched_dims: ClassVar[int] = 3

    def sample_dims(self, tensors: int) -> list[int]:
        return [self._samples_dim] + [0] * (tensors - 1)

    def _of_samples(self, args: Any, kwargs: Any) -> Any:
        named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        mask = named.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:  # (T, S), where T may be B by chance
            del named["attn_mask"]
        return named

    def samples_in(self, query: Tensor, *args: Any, **kwargs: Any) -> int | None:
        refuse_other_than_sequences(self, "query", query, self._samples_dim)
        return super().samples_in(query)

    def expanded_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise complaint(
                self.qualified_name,
                "is_causal is given without attn_mask",
                "the mask too, as torch does",
                "Pass attn_mask.",
            )
        features = zip((query, key, value), (self.embed_dim, self.kdim, self.vdim), strict=True)
        if any(not x.is_nested and x.shape[-1] != size for x, size in features):
            return super(Expanded, self).forward(query, key, value)  # raises
        q, k, v = self._projected(query, key, value)
        is_causal = is_causal and key_padding_mask is None and not need_weights
        attn_mask = None if is_causal else attn_mask
        attn_mask, key_padding_mask = self._masks((q.shape[1], k.shape[1]), attn_mask, key_padding_mask)
        biases = ("bias_k", "bias_v") if self.bias_k is not None else ()
        attended, weights = attention(
            *(q, k, v, attn_mask, key_padding_mask),
            self.num_heads,
            self.dropout if self.training else 0.0,
            more_keys=[cast(Tensor, self.expanded(name)).flatten(1, 2) for name in biases],
            add_zero_attn=self.add_zero_attn,
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        output = self._out_projection(attended)
        # in memory as torch's: users take views of it, and random numbers that come after follow that
        time_first = output.transpose(0, 1).contiguous()
        return as_no_view(time_first.transpose(0, 1 - self._samples_dim)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value as attention sees them, `(B, T, E)` each."""
        q = self._samples_first("query", query)
        k = q if key is query else self._samples_first("key", key)
        v = q if value is query else k if value is key else self._samples_first("value", value)
        if k.shape[1] != v.shape[1]:
            raise complaint(
                self.qualified_name,
                f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}",
                "one value for each key",
                "Give both the same number of positions.",
            )
        weight: Any = self.expanded("in_proj_weight")
        if not self._qkv_same_embed_dim:
            weight = [self.expanded(f"{letter}_proj_weight") for letter in "qkv"]
        return projected(q, k, v, weight, self.expanded("in_proj_bias"), linear)

    def _masks(
        self,
        sizes: tuple[int, int],  # T, S
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The masks, if they have the shapes that they have to have."""
        batch = self.pass_batch_size
        if attn_mask is not None:
            count = (batch * self.num_heads,) if attn_mask.dim() == 3 else ()
            self._refuse_other_shape("attn_mask", attn_mask, (*count, *sizes))
        if key_padding_mask is not None:
            key_padding_mask = self.checked(key_padding_mask, 1, argument="key_padding_mask")
            self._refuse_other_shape("key_padding_mask", key_padding_mask, (batch, sizes[1]))
        return attn_mask, key_padding_mask

    def _out_projection(
        self,
        heads: Tensor,  # (B, T, E)
    ) -> Tensor:  # (B, T, E)
        """What `out_proj` makes of the heads' features; its own forward torch does not call either."""
        if not isinstance(self.out_proj, Expanded):
            raise complaint(
                self.qualified_name,
                f"out_proj is a plain {type(self.out_proj).__name__}",
                "its expanded twin",
                "Convert the model: convert(model, inplace=True). If a forward puts it there at each call, as that of "
                "peft's LoRA for this class does, adapt other layers.",
            )
        out = self.out_proj
        return linear(heads, out.expanded("weight"), out.expanded("bias"))

    def _samples_first(self, argument: str, x: Tensor) -> Tensor:
        """`x` as `(B, T, features)`."""
        refuse_other_than_sequences(self, argument, x, self._samples_dim)
        return self.checked(x, 2, dim=self._samples_dim, argument=argument).transpose(0, self._samples_dim)

    def _refuse_other_shape(self, argument: str, x: Tensor, wanted: tuple[int, ...]) -> None:
        if x.shape != wanted:
            raise refusal(
                self,
                f"{argument} has shape {tuple(x.shape)}",
                f"{wanted}, for {self.pass_batch_size} samples and {self.num_heads} heads",
                "A mask (T, S) is shared by all samples; one of three dimensions is (B * num_heads, T, S).",
            )

    def _own_batch(self) -> int | None:
        batch = super()._own_batch()
        return self.out_proj._own_batch() if batch is None and isinstance(self.out_proj, Expanded) else batch

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        if self.batch_first:
            return super()._inside_general(recorder, args, kwargs)
        refuse_other_samples_of_one(self, "query", args[0] if args else kwargs.get("query"))
        return super(Expanded, self).forward(*args, **kwargs)  # a whole batch has its samples first


class _Container(_Converted, Root):
    """A module of `torch.nn` whose parameters are all its children's; their samples stand where its attention says."""

    always_converted: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        with without_fused_inference if self._fast_path_is_wrong() else nullcontext():
            if recorder is not None and recorder.order is not None and not self._rows_are_due():
                return recorder.order.as_one_operation(self._forward, args, kwargs)
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, with the layers' samples where its own `batch_first` says."""
        recorder, batch_first = self._recorder, own_batch_first(self)
        if recorder is None or recorder.general_rule is not None or batch_first is None:
            self._refuse_unknown_layout(batch_first)
            return super().forward(*args, **kwargs)
        if self._forward_is_torchs() and self._rows_are_due():
            first = next((x for x in tensors((args, kwargs)) if isinstance(x, Tensor)), None)
            if first is not None:
                refuse_other_than_sequences(self, "input", first, 0 if batch_first else 1)
        if recorder.settings.batch_first == batch_first:
            return super().forward(*args, **kwargs)
        with recorder.layout(batch_first=batch_first):
            return super().forward(*args, **kwargs)

    def _forward_is_torchs(self) -> bool:
        """Whether it takes sequences; a forward of the user's may begin with tokens."""
        found = registered(type(self))
        return self.plain_class is None or found is None or self.plain_class.forward is found[0].forward

    def _rows_are_due(self) -> bool:
        if self._recorder is None or not torch.is_grad_enabled():
            return False
        return self._recorder.general_rule is not None or any(p.requires_grad for p in self.parameters())

    def _fast_path_is_wrong(self) -> bool:
        """Whether torch's fused inference would miss that rows are due, or that weights have a batch dimension."""
        if self.training or torch.compiler.is_compiling():  # in a graph torch itself keeps to what is differentiable
            return False
        return self._rows_are_due() or self._has_batched_weights()

    def _has_batched_weights(self) -> bool:
        return any(layer._own_batch() is not None for layer in self.modules() if isinstance(layer, Expanded))

    def _refuse_unknown_layout(self, batch_first: bool | None) -> None:
        """Off, layers take the first dimension of their input for the samples."""
        if self._recorder is None and batch_first is False and self._has_batched_weights():
            raise complaint(
                type(self).__name__,
                "its weights have a batch dimension, its inputs are (T, B, features)",
                "batch_first=True while per-sample mode is off",
                "Switch per_sample() on, or make it with batch_first=True.",
            )


@expands(nn.TransformerEncoderLayer)
class TransformerEncoderLayer(_Container, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with per-sample gradients."""


@expands(nn.TransformerDecoderLayer)
class TransformerDecoderLayer(_Container, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` with per-sample gradients."""


@expands(nn.TransformerEncoder)
class TransformerEncoder(_Container, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` with per-sample gradients."""


@expands(nn.TransformerDecoder)
class TransformerDecoder(_Container, nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` with per-sample gradients."""


@expands(nn.Transformer)
class Transformer(_Container, nn.Transformer):
    """`torch.nn.Transformer` with per-sample gradients; a custom encoder or decoder is converted in place."""
