"""What a forward computes from its weights alone: once, for all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import autocast_as_now, refuse_batched
from expanded_nn.factored import materialized
from expanded_nn.recording.expand import rows_of_sources, saved_tensors

Function = Callable[..., Tensor]  # of tensors (B, *shape), for any B; it treats each sample alone


class Derived:
    """A weight that all samples share, or what is computed from such, for one sample."""

    def __init__(
        self,
        shared: Tensor,  # (1, *shape), with its graph
        value: Tensor | None,  # (B, *shape), expanded; `None` for what is computed
        function: Function | None = None,  # what computes it from the sources; `None` for a weight
        sources: Sequence[Derived] = (),
    ) -> None:
        self.shared, self.value, self.function, self.sources = shared, value, function, sources
        self.autocast = autocast_as_now(shared.device)  # as it was set when this was computed

    @classmethod
    def weight(cls, value: Tensor) -> Derived:
        return cls(value.detach()[:1].requires_grad_(value.requires_grad), value)

    @classmethod
    def computed(cls, function: Function, sources: Sequence[Derived]) -> Derived:
        return cls(function(*(source.shared for source in sources)), None, function, sources)

    def weights(self) -> list[Derived]:
        """The weights that it is computed from."""
        if self.value is not None:
            return [self]
        return list(dict.fromkeys(weight for source in self.sources for weight in source.weights()))

    def expanded(self, batch: int) -> Tensor:
        """The value `(B, *shape)`."""
        weights = self.weights()
        return _Expanded.apply(self, weights, batch, *(weight.value for weight in weights))  # type: ignore[no-untyped-call,no-any-return]

    def recomputed(self, values: dict[Derived, Tensor]) -> Tensor:
        """The same from other `values`, `(B, *shape)`, of the weights; those of what is computed are added to them."""
        if self not in values:
            assert self.function is not None
            inputs = [source.recomputed(values) for source in self.sources]
            with self.autocast():
                values[self] = self.function(*inputs)
        return values[self]


class _Expanded(torch.autograd.Function):
    """What is computed from weights, expanded; the backward takes each row to rows of the weights."""

    @staticmethod
    def forward(ctx: Any, derived: Derived, weights: list[Derived], batch: int, *values: Tensor) -> Tensor:
        ctx.derived, ctx.weights = derived, weights
        ctx.save_for_backward(*values)
        return derived.shared.detach().expand(batch, *derived.shared.shape[1:])

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(rows)
        needed = [place for place, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        grads: list[Tensor | None] = [None] * len(ctx.weights)
        if not ctx.derived.shared.requires_grad:
            return None, None, None, *grads
        if torch.is_grad_enabled():  # a second derivative is that of each sample's own weight
            values = [value.view_as(value) for value in saved_tensors(ctx)]  # of which none comes from another
            result = ctx.derived.recomputed(dict(zip(ctx.weights, values, strict=True)))
            inputs = [values[place] for place in needed]
            needed_grads: Sequence[Tensor | None] = torch.autograd.grad(
                result, inputs, materialized(rows), create_graph=True, allow_unused=True
            )
        else:
            sources = [ctx.weights[place].shared for place in needed]
            with torch.enable_grad():
                result = ctx.derived.shared.squeeze(0)
            of_sources = rows_of_sources(result, sources, rows)
            needed_grads = [None if grad is None else grad.squeeze(1) for grad in of_sources]
        for place, grad in zip(needed, needed_grads, strict=True):
            grads[place] = grad
        return None, None, None, *grads
