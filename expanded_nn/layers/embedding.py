"""Look-ups: `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn.common.shared import as_no_view, is_constant, is_shared, shared
from expanded_nn.common.traced import refuse_values
from expanded_nn.core.terms import OneHot, SparseOneHot
from expanded_nn.factored import from_factors, materialized
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.layout import index_by_sample, note_shared_result, refuse_other_count
from expanded_nn.modules.registry import expands
from expanded_nn.recording.expand import saved_tensors


def one_hot_rows(
    values: Tensor,  # (B, T, dim)
    index: Tensor,  # (B, T) int64
    entries: int,
    dtype: torch.dtype,
    *,
    sparse: bool = False,
) -> Tensor:  # (B, entries, dim)
    """The rows of an embedding's weight, factored; a `sparse` gradient that has a derivative itself is not sparse."""
    kind = OneHot if not sparse or (torch.is_grad_enabled() and values.requires_grad) else SparseOneHot

    def of_values(grad: Tensor, values: Tensor, index: Tensor) -> Tensor:
        return embedding(index, grad).to(values.dtype)

    return from_factors(
        lambda values, index: kind.of(values, index, entries, dtype), (values, index), (of_values, of_values)
    )


def _wrapped(padding_idx: int | None, entries: int) -> int | None:
    """The padding index counted from the start."""
    if padding_idx is not None and not -entries <= padding_idx < entries:
        raise ValueError(f"padding_idx is {padding_idx}; wanted one of the {entries} entries of the weight.")
    return padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + entries


class _Embedding(torch.autograd.Function):
    """A look-up; where `valid` is false nothing was asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        index: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        sparse: bool,
        valid: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(index, valid)
        ctx.padding_idx, ctx.scale_grad_by_freq, ctx.sparse = padding_idx, scale_grad_by_freq, sparse
        ctx.entries, ctx.dtype, ctx.is_shared = weight.shape[1], weight.dtype, is_shared(weight)
        if not ctx.is_shared:
            flat = _flat_index(index)[..., None].expand(-1, -1, weight.shape[2])
            return as_no_view(weight.gather(1, flat).reshape(*index.shape, weight.shape[2]))
        return as_no_view(F.embedding(index, shared(weight)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        index, valid = saved_tensors(ctx)
        index = _flat_index(index)
        values = g.reshape(*index.shape, g.shape[-1])
        rows = _table_rows(ctx, values, index, valid, _dropped(index, valid, ctx.padding_idx))
        return None, rows if ctx.is_shared else materialized(rows), None, None, None, None


def _table_rows(
    ctx: Any,
    values: Tensor,  # (B, T, dim)
    index: Tensor,  # (B, T) int64
    valid: Tensor | None,  # (B, T) bool
    dropped: Tensor | None,  # (B, T) bool
) -> Tensor:  # (B, entries, dim)
    """The rows of a table whose entries get these values."""
    if ctx.scale_grad_by_freq:  # how often the sample looks up the same entry
        ones = torch.ones_like(index) if valid is None else valid.to(index.dtype)
        counts = index.new_zeros(index.shape[0], ctx.entries).scatter_add_(1, index, ones).gather(1, index)
        values = values / counts.clamp(min=1)[..., None].to(values.dtype)
    if dropped is not None:
        values = values.masked_fill(dropped[..., None], 0.0)
    return one_hot_rows(values, index, ctx.entries, ctx.dtype, sparse=ctx.sparse)


def _flat_index(
    index: Tensor,  # (B, *)
) -> Tensor:  # (B, T) int64
    return index.reshape(index.shape[0], prod(index.shape[1:])).long()


def _dropped(index: Tensor, valid: Tensor | None, padding_idx: int | None) -> Tensor | None:
    """Where no gradient goes to, `None` if there is no such place."""
    if padding_idx is None:
        return None if valid is None else ~valid
    return index == padding_idx if valid is None else (index == padding_idx) | ~valid


def _refuse_other_rows(op: str, rows: int, weight: Tensor) -> None:
    if weight.dim() != 3:
        raise complaint(
            f"functional.{op}",
            f"weight has shape {tuple(weight.shape)}",
            f"a table for each sample, ({rows}, entries, dim)",
            "For one that all samples share, (entries, dim), write weight.expand(B, -1, -1).",
        )
    if rows != weight.shape[0]:
        raise complaint(
            op, f"the input has {rows} samples", f"{weight.shape[0]}, as the weight", "Give both the same samples."
        )


def embedding(
    input: Tensor,  # (B, *) int
    weight: Tensor,  # (B, entries, dim)
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # (B, *, dim)
    """Looks up entries in each sample's own table, `y[b, *] = weight[b, input[b, *]]`.

    Args:
        input: Indices `(B, *)`, int32 or int64.
        weight: `(B, entries, dim)`; expanded over the batch (stride 0) it runs as one `F.embedding`.
        padding_idx: The entry that gets no gradient; from the end if negative.
        max_norm: The norm to which the entries looked up are scaled down first, in place.
        norm_type: The p of that p-norm.
        scale_grad_by_freq: Whether an entry's gradient is divided by how often the *sample* looks it up.
        sparse: Whether the gradient of the one weight behind an expanded one is sparse.

    Returns:
        `(B, *, dim)`.

    Raises:
        PerSampleError: If `input` and `weight` differ in B.
        ValueError: If `padding_idx` is no entry.
    """
    _refuse_other_rows("embedding", input.shape[0], weight)
    padding_idx = _wrapped(padding_idx, weight.shape[1])
    if max_norm is not None:
        _renormalize(weight, input, None, max_norm, norm_type)
    if is_constant(weight):
        return F.embedding(input, shared(weight))
    return _Embedding.apply(input, weight, padding_idx, scale_grad_by_freq, sparse, None)  # type: ignore[no-untyped-call,no-any-return]


def _renormalize(weight: Tensor, index: Tensor, valid: Tensor | None, max_norm: float, norm_type: float) -> None:
    """Scales the entries looked up down to `max_norm`, in place: of the one weight, or of each sample's own."""
    if is_shared(weight):
        weight, index, valid = shared(weight)[None], index[None], None if valid is None else valid[None]
    for b, table in enumerate(weight.detach()):
        entries = index[b] if valid is None else index[b][valid[b]]
        torch.embedding_renorm_(table, entries.reshape(-1), max_norm, norm_type)


def _renormalize_once(module: Embedding | EmbeddingBag, index: Tensor) -> float | None:
    """Scales down the entries of the one weight; gives the `max_norm` left for the op to do.

    That is done before it is expanded: torch refuses the expanded weight, a view, once its base has changed.
    """
    if module.max_norm is None:
        return None
    weight = module.weight  # which a parametrization computes
    if weight.dim() == 3:
        return module.max_norm
    if not weight.is_leaf:
        raise complaint(
            module.qualified_name,
            f"max_norm is {module.max_norm} and the weight is computed from other parameters, which it cannot scale",
            "a weight that is itself a parameter",
            "Remove the parametrization, or do without max_norm.",
        )
    torch.embedding_renorm_(weight.detach(), index.reshape(-1), module.max_norm, module.norm_type)
    return None


@expands(nn.Embedding)
class Embedding(Expanded, nn.Embedding):
    """`torch.nn.Embedding` with per-sample gradients; input `(B, *)`, or an index that all samples share.

    With `scale_grad_by_freq` rows follow the sample alone: its own frequencies scale them, and `.grad` is their sum.
    """

    ranks: ClassVar[dict[str, int]] = {"weight": 2}
    positionwise: ClassVar[bool] = True
    _takes_labels = False  # whether it was called with one index per sample before

    def expanded_forward(self, input: Tensor) -> Tensor:
        index, dim = index_by_sample(self, input)
        max_norm = _renormalize_once(self, input)
        options = (self.padding_idx, max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        out = embedding(index, self.expanded("weight"), *options)
        if self.pass_batch_size == 1 and index.dim() > input.dim():
            return out.squeeze(0)  # as the plain layer gives it: all rows are the single sample's
        if input.dim() == 0:
            note_shared_result(self, out, is_new=True)
        return out.transpose(0, dim).contiguous() if dim else out


@dataclass(frozen=True)
class _Bags:
    """Bags of entries, each as long as the longest."""

    index: Tensor  # (B, T) int64; 0 where a bag has ended
    valid: Tensor | None  # (B, T), where a bag has not ended; `None` if all are equally long
    place: Tensor | None  # (B, T), where the entry stands in the flat input; `None` if that is (B, T) itself

    @classmethod
    def of(cls, input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> _Bags:
        if offsets is None:
            return cls(input.long(), None, None)
        offsets = offsets.long()
        if not include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), len(input))])
        starts, lengths = offsets[:-1], offsets.diff()[:, None]
        longest = int(lengths.max()) if lengths.numel() else 0
        numbers = torch.arange(longest, device=input.device)
        valid = numbers < lengths
        place = (starts[:, None] + numbers).masked_fill(~valid, 0)
        return cls(input.long()[place].masked_fill(~valid, 0), valid, place)

    def unpadded(self, padded: Tensor, shape: torch.Size) -> Tensor:
        """One number per entry, in the input's own shape."""
        if self.place is None or self.valid is None:
            return padded
        values = padded.masked_fill(~self.valid, 0.0)
        return padded.new_zeros(shape).scatter_add(0, self.place.flatten(), values.flatten())

    def coefficients(
        self, mode: str, per_sample_weights: Tensor | None, dropped: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What each entry counts for in its bag's result, `(B, T, 1)` or `(B, 1, 1)`; `None` where that is 1."""
        if per_sample_weights is not None:
            return (per_sample_weights if self.place is None else per_sample_weights[self.place])[..., None].to(dtype)
        if mode != "mean":
            return None
        kept = torch.ones_like(self.index, dtype=torch.bool) if dropped is None else ~dropped
        return kept.sum(1).clamp(min=1)[:, None, None].to(dtype).reciprocal()


class _EmbeddingBag(torch.autograd.Function):
    """The sum or the mean of each bag's entries, from a weight that all samples share."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        per_sample_weights: Tensor | None,
        input: Tensor,
        offsets: Tensor | None,
        scale_grad_by_freq: bool,
        mode: str,
        sparse: bool,
        include_last_offset: bool,
        padding_idx: int | None,
    ) -> Tensor:
        ctx.save_for_backward(weight if ctx.needs_input_grad[1] else None, per_sample_weights, input, offsets)
        ctx.scale_grad_by_freq, ctx.mode, ctx.sparse = scale_grad_by_freq, mode, sparse
        ctx.include_last_offset, ctx.padding_idx = include_last_offset, padding_idx
        ctx.entries, ctx.dtype = weight.shape[1], weight.dtype
        options = (per_sample_weights, include_last_offset, padding_idx)
        return F.embedding_bag(input, shared(weight), offsets, None, 2.0, False, mode, False, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, per_sample_weights, input, offsets = saved_tensors(ctx)
        bags = _Bags.of(input, offsets, ctx.include_last_offset)
        dropped = _dropped(bags.index, bags.valid, ctx.padding_idx)
        grad_weight = grad_per_sample_weights = None
        if ctx.needs_input_grad[0]:
            values = g[:, None, :].expand(-1, bags.index.shape[1], -1)
            coefficients = bags.coefficients(ctx.mode, per_sample_weights, dropped, values.dtype)
            if coefficients is not None:
                values = values * coefficients
            grad_weight = _table_rows(ctx, values, bags.index, bags.valid, dropped)
        if ctx.needs_input_grad[1]:
            products = (embedding(bags.index, weight) * g[:, None, :]).sum(2)
            if dropped is not None:
                products = products.masked_fill(dropped, 0.0)
            grad_per_sample_weights = bags.unpadded(products, per_sample_weights.shape)
        return grad_weight, grad_per_sample_weights, *[None] * 7


def embedding_bag(
    input: Tensor,  # (B, N) or (N,) int
    weight: Tensor,  # (B, entries, dim)
    offsets: Tensor | None = None,  # (B,) int
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,  # as input
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:  # (B, dim)
    """Adds up, averages or maximizes the entries of each bag, looked up in each sample's own table.

    Args:
        input: Indices: `(B, N)`, or all bags one after the other, `(N,)`. The bag is the sample.
        weight: `(B, entries, dim)`; expanded over the batch (stride 0), a sum or mean runs as one `F.embedding_bag`.
        offsets: Where each bag begins in an input `(N,)`: `(B,)`.
        max_norm: The norm to which the entries looked up are scaled down first, in place.
        norm_type: The p of that p-norm.
        scale_grad_by_freq: Whether an entry's gradient is divided by how often its *bag* holds it.
        mode: `"sum"`, `"mean"` or `"max"`.
        sparse: Whether the gradient of the one weight behind an expanded one is sparse.
        per_sample_weights: What each entry counts for, of `input`'s shape; with `mode="sum"` only.
        include_last_offset: Whether `offsets` ends with the length of `input`, `(B + 1,)`.
        padding_idx: The entry that does not count and gets no gradient; from the end if negative.

    Returns:
        `(B, dim)`; zeros for an empty bag.

    Raises:
        PerSampleError: If there are not as many bags as the weight has samples.
        ValueError: If arguments do not go together, or `padding_idx` is no entry.
    """
    input, offsets, per_sample_weights, include_last_offset = _as_strided_bags(
        input, offsets, per_sample_weights, include_last_offset
    )
    _refuse_mode(mode, scale_grad_by_freq, sparse, per_sample_weights)
    _refuse_other_rows("embedding_bag", _bag_count(input, offsets, include_last_offset), weight)
    padding_idx = _wrapped(padding_idx, weight.shape[1])
    if mode != "max" and is_shared(weight):
        if max_norm is not None:
            _renormalize(weight, input, None, max_norm, norm_type)
        tensors = (weight, per_sample_weights, input, offsets)
        options = (scale_grad_by_freq, mode, sparse, include_last_offset, padding_idx)
        return _EmbeddingBag.apply(*tensors, *options)  # type: ignore[no-untyped-call,no-any-return]
    bags = _Bags.of(input, offsets, include_last_offset)
    if max_norm is not None:
        _renormalize(weight, bags.index, bags.valid, max_norm, norm_type)
    dropped = _dropped(bags.index, bags.valid, padding_idx)
    entries: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        bags.index, weight, padding_idx, scale_grad_by_freq, sparse, bags.valid
    )
    if mode == "max" and bags.index.shape[1]:
        if dropped is None:
            return entries.max(1).values
        most = entries.masked_fill(dropped[..., None], -torch.inf).max(1).values
        return most.masked_fill(dropped.all(1, keepdim=True), 0.0)
    if dropped is not None:
        entries = entries.masked_fill(dropped[..., None], 0.0)
    coefficients = bags.coefficients(mode, per_sample_weights, dropped, entries.dtype)
    if coefficients is not None:
        entries = entries * coefficients
    return entries.sum(1)


def _as_strided_bags(
    input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, include_last_offset: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
    """A nested input as its values and offsets, as torch takes it apart; any other as it is, if it is complete."""
    if input.dim() == 2 and input.is_nested:
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.values().reshape(-1)
        return input.values().reshape(-1), input.offsets(), per_sample_weights, True  # type: ignore[attr-defined]
    if offsets is not None:
        refuse_values("bags of different lengths are looked up by offsets")
    if input.dim() not in (1, 2) or (input.dim() == 1) != (offsets is not None):
        text = "no offsets" if offsets is None else f"offsets of shape {tuple(offsets.shape)}"
        raise ValueError(
            f"embedding_bag: input has shape {tuple(input.shape)}, with {text}; wanted (B, N) without offsets or "
            "(N,) with them."
        )
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
        raise ValueError(
            f"embedding_bag: per_sample_weights has shape {tuple(per_sample_weights.shape)}; wanted that of input, "
            f"{tuple(input.shape)}."
        )
    return input, offsets, per_sample_weights, include_last_offset and offsets is not None


def _bag_count(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> int:
    return input.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)


def _refuse_mode(mode: str, scale_grad_by_freq: bool, sparse: bool, per_sample_weights: Tensor | None) -> None:
    """What torch refuses, in its own classes of error."""
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f'embedding_bag: mode is {mode!r}; wanted "sum", "mean" or "max".')
    if mode == "max" and (scale_grad_by_freq or sparse):
        raise ValueError('embedding_bag: mode="max" supports neither scale_grad_by_freq nor sparse.')
    if mode != "sum" and per_sample_weights is not None:
        raise NotImplementedError(f'embedding_bag: per_sample_weights with mode={mode!r}; wanted mode="sum".')


@expands(nn.EmbeddingBag)
class EmbeddingBag(Expanded, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` with per-sample gradients: the bag is the sample.

    With `scale_grad_by_freq` rows follow the bag alone: its own frequencies scale them, and `.grad` is their sum.
    """

    ranks: ClassVar[dict[str, int]] = {"weight": 2}
    fixed_layout: ClassVar[bool] = True

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        forward = None if self._recorder is None or offsets is None else self._recorder.forward
        if forward is not None:  # before the layer runs, be it without gradients
            forward.correct_batch(_bag_count(input, offsets, self.include_last_offset))
        return cast(Tensor, super().forward(input, offsets, per_sample_weights))

    def _of_samples(self, args: Any, kwargs: Any) -> Any:
        return (*args[:1], *args[2:]), kwargs  # offsets, which say where the samples begin, may be numbers of the model

    def samples_in(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Any = None) -> int | None:
        return _bag_count(input, offsets, self.include_last_offset and offsets is not None)

    def expanded_forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        input, offsets, per_sample_weights, include_last_offset = _as_strided_bags(
            input, offsets, per_sample_weights, self.include_last_offset
        )
        if offsets is None:
            input = self.checked(input, 1)
            if per_sample_weights is not None:
                per_sample_weights = self.checked(per_sample_weights, 1, argument="per_sample_weights")
        else:
            bags = _bag_count(input, offsets, include_last_offset)
            remedy = "Say the number of bags: per_sample(batch_size=...), or give the input as (B, N)."
            refuse_other_count(self, bags, f"offsets say {bags} bags", remedy)
        max_norm = _renormalize_once(self, input)
        options = (max_norm, self.norm_type, self.scale_grad_by_freq, self.mode, self.sparse)
        bag_options = (per_sample_weights, include_last_offset, self.padding_idx)
        return embedding_bag(input, self.expanded("weight"), offsets, *options, *bag_options)
