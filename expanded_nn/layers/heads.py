"""Attention of several heads, between the projections of its inputs and that of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from expanded_nn.common.shared import as_no_view


class _TwiceDifferentiable(torch.autograd.Function):
    """Passes the output of fused attention on; its gradient goes back to the kernel, or around it.

    The kernels' own backward has no derivative. Where one is due (`create_graph=True`) the gradient reaches query,
    key, value and mask by plain operations instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,  # (B, heads, T, features), what the kernel made of the others
        query: Tensor,  # (B, heads, T, features)
        key: Tensor,  # (B, heads, S, features)
        value: Tensor,  # (B, heads, S, features)
        mask: Tensor | None,  # (B or 1, heads or 1, T or 1, S)
        is_causal: bool,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.is_causal = is_causal
        return as_no_view(output.view_as(output))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return g, None, None, None, None, None
        # views, as one input may be computed from another, whose gradient must not go through the first
        inputs: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        query, key, value = (x.to(g.dtype) for x in inputs[:3])
        logits = _logits(query, key, inputs[3])
        if ctx.is_causal:
            logits = logits.masked_fill(logits.new_ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        nowhere = (logits == -torch.inf).all(-1, keepdim=True)  # to attend: the output is zero
        output = logits.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0) @ value
        needed = ctx.needs_input_grad[1:5]
        sources = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
        grads = iter(torch.autograd.grad(output, sources, g, create_graph=True))
        return None, *(next(grads) if is_needed else None for is_needed in needed), None


def _logits(
    query: Tensor,  # (B, heads, T, features)
    key: Tensor,  # (B, heads, S, features)
    mask: Tensor | None,  # (B or 1, heads or 1, T or 1, S)
) -> Tensor:  # (B, heads, T, S)
    """What the softmax of attention is taken of."""
    product = (query * sqrt(1 / query.shape[-1])) @ key.mT
    return product if mask is None else product + mask.to(product.dtype)


def projected(
    query: Tensor,  # (n, T, E)
    key: Tensor,  # (n, S, E)
    value: Tensor,  # (n, S, E)
    weight: Tensor | Sequence[Tensor],  # (*, 3 * E, E), or one for each of the three
    bias: Tensor | None,  # (*, 3 * E)
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, ...]:
    """Query, key and value as attention sees them; those of the same tensor are computed together.

    Args:
        query: The input of the queries.
        key: That of the keys.
        value: That of the values.
        weight: The weights of the three, packed or one by one.
        bias: Their biases, packed.
        linear: The linear map, of an input, a weight and a bias.
    """
    if not isinstance(weight, Tensor):
        biases = [None] * 3 if bias is None else bias.chunk(3, -1)
        return tuple(map(linear, (query, key, value), weight, biases))
    features = query.shape[-1]

    def project(x: Tensor, start: int, stop: int) -> Tensor:
        if stop - start == 3:
            return linear(x, weight, bias)
        part = slice(start * features, stop * features)  # rows of such a part stay factored
        return linear(x, weight[..., part, :], None if bias is None else bias[..., part])

    if query is key is value:
        return project(query, 0, 3).chunk(3, -1)
    if key is value:
        return project(query, 0, 1), *project(key, 1, 3).chunk(2, -1)
    return tuple(project(x, place, place + 1) for place, x in enumerate((query, key, value)))


def _mask_of_heads(
    attn_mask: Tensor | None,  # (T, S) or (n * heads, T, S)
    key_padding_mask: Tensor | None,  # (n, S)
    heads: int,
    dtype: torch.dtype,
) -> Tensor | None:  # (n or 1, heads or 1, T or 1, S)
    """What is added to the products of queries and keys, `None` for nothing."""
    key_padding_mask = F._canonical_mask(
        key_padding_mask, "key_padding_mask", F._none_or_dtype(attn_mask), "attn_mask", dtype
    )
    attn_mask = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype, False)
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask[None, None])
    if key_padding_mask is not None:
        masks.append(rearrange(key_padding_mask, "n s -> n 1 1 s"))
    return sum(masks[1:], start=masks[0]) if masks else None


def attention(
    query: Tensor,  # (n, T, E)
    key: Tensor,  # (n, S, E)
    value: Tensor,  # (n, S, E)
    attn_mask: Tensor | None,  # (T, S) or (n * heads, T, S)
    key_padding_mask: Tensor | None,  # (n, S)
    heads: int,
    dropout: float,
    *,
    more_keys: Sequence[Tensor],  # (n, 1, E): a key and its value behind the others, for all queries; or none
    add_zero_attn: bool,
    need_weights: bool,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:  # (n, T, E); (n, T, S) or (n, heads, T, S)
    """What the heads attend to, side by side; and how much to each key, if that is asked for.

    The arguments are those of `torch.nn.MultiheadAttention`; where `is_causal` there are no masks.
    """
    mask = _mask_of_heads(attn_mask, key_padding_mask, heads, query.dtype)
    known = key.shape[1]
    if more_keys:
        key, value = (torch.cat(both, 1) for both in zip((key, value), more_keys, strict=True))
    if add_zero_attn:
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if mask is not None and key.shape[1] > known:
        mask = F.pad(mask, (0, key.shape[1] - known))
    q, k, v = (rearrange(x, "n t (heads f) -> n heads t f", heads=heads) for x in (query, key, value))
    weights = None
    if need_weights:
        weights = F.dropout(_logits(q, k, mask).softmax(-1), dropout)
        attended = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        if not dropout and attended.requires_grad:  # what is drawn at random could not be drawn again
            attended = _TwiceDifferentiable.apply(attended, q, k, v, mask, is_causal)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).flatten(2), weights
