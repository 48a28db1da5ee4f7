"""Rules for attention with parameters: of tensors `(B, *)`, or of folded ones whose rows' samples are known."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from expanded_nn.layers.general.batched import Run, beside, is_own, own_of, refuse_unless, run_of
from expanded_nn.layers.general.folded import linear_of_rows
from expanded_nn.layers.general.folded_rules import as_arranged, own_rows
from expanded_nn.layers.general.owners import Arrangement
from expanded_nn.layers.heads import attention, projected


def by_biased_products(func: Any, args: Any, kwargs: Any) -> Tensor:
    """With a mask computed from parameters, as a bias by position is."""
    named = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
    inputs = [named.pop(name) for name in ("query", "key", "value")]
    own = own_of(named.pop("attn_mask"))
    run, mask = own.run, beside(own, inputs[0].dim())
    refuse_unless(len(args) < 5 and not any(map(is_own, inputs)))
    arrangement = _arranged(run, inputs)
    refuse_unless(arrangement is not None or (run.owners is None and all(run.has_rows(x, 3) for x in inputs)))
    run.note(func, whole=True)
    if arrangement is None:
        return func(*inputs, mask, **named)  # type: ignore[no-any-return]
    return as_arranged(run, func(*inputs, arrangement.rows_of(mask), **named), arrangement)


def _arranged(run: Run, inputs: Sequence[Tensor]) -> Arrangement | None:
    """How the rows of folded queries, keys and values belong to the samples, which has to be alike for all three."""
    if run.owners is None:
        return None
    dims = inputs[0].dim()
    samples = run.owners.together(inputs, dims, along=(dims - 2, dims - 1))
    return None if samples is None else run.owners.arranged(samples, inputs[0].shape[0])


_SIGNATURE = signature(F.multi_head_attention_forward)
_INPUTS = ("query", "key", "value")
_WEIGHTS = ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_weight", "out_proj_bias")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def multi_head_attention(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`, of sequences `(T, n, E)`, one or several per sample."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    run = run_of(call.values())
    refuse_unless(all(call[name] is None or is_own(call[name]) for name in (*_WEIGHTS, *_SEPARATE)))
    refuse_unless(call["static_k"] is None and call["static_v"] is None)
    by_input = {id(call[name]): call[name] for name in _INPUTS}
    refuse_unless(all(x.dim() == 3 for x in by_input.values()))
    turned = {key: x.transpose(0, 1) for key, x in by_input.items()}
    arrangement = _arranged(run, [x for x in turned.values() if not is_own(x)])

    def linear(x: Tensor, weight: Any, bias: Any) -> Tensor:
        if arrangement is None:
            return F.linear(x, weight, bias)
        bias = None if bias is None else bias.value
        return as_arranged(run, linear_of_rows(x, weight.value, bias, arrangement), arrangement)

    weight = call["in_proj_weight"]
    if call["use_separate_proj_weight"]:
        weight = [call[name] for name in _SEPARATE]
    query, key, value = (_rows(run, turned[id(call[name])], arrangement) for name in _INPUTS)
    q, k, v = projected(query, key, value, weight, call["in_proj_bias"], linear)
    is_causal = call["is_causal"] and call["key_padding_mask"] is None and not call["need_weights"]
    masks = None if is_causal else call["attn_mask"], call["key_padding_mask"]
    refuse_unless(all(x is None or not (is_own(x) or x.requires_grad) for x in masks))
    biases = ("bias_k", "bias_v") if call["bias_k"] is not None else ()
    attended, weights = attention(
        *(q, k, v, *masks),
        call["num_heads"],
        call["dropout_p"] if call["training"] else 0.0,
        more_keys=[_rows(run, call[name], arrangement) for name in biases],
        is_causal=is_causal,
        **{name: call[name] for name in ("add_zero_attn", "need_weights", "average_attn_weights")},
    )
    output = linear(attended, call["out_proj_weight"], call["out_proj_bias"]).transpose(0, 1).contiguous()
    run.note(func, whole=True)
    return output, weights


def _rows(run: Run, x: Tensor, arrangement: Arrangement | None) -> Tensor:
    """What is a parameter, `(n or 1, T, E)`, as a tensor that has the value of its sample in each row."""
    if not is_own(x):
        return x
    if arrangement is None:
        return beside(own_of(x), 3)
    return as_arranged(run, own_rows(own_of(x), arrangement, 3), arrangement)
