"""What a forward computes from its weights alone, which is computed once for all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expanded_nn.common.modes import autocast_as_now
from expanded_nn.recording.expand import Computed, ExpandComputed
from expanded_nn.recording.graph import leaves_behind
from expanded_nn.recording.settings import RecorderLike

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
        leaf = value.detach()[0].requires_grad_(value.requires_grad)
        with torch.enable_grad():
            return cls(leaf[None], value)

    @classmethod
    def computed(cls, function: Function, sources: Sequence[Derived]) -> Derived:
        return cls(function(*(source.shared for source in sources)), None, function, sources)

    def weights(self) -> list[Derived]:
        """The weights that it is computed from."""
        seen: dict[Derived, None] = {}
        left = [self]
        while left:  # each once, whatever the ways to it
            derived = left.pop()
            if derived not in seen:
                seen[derived] = None
                left.extend(reversed(derived.sources))
        return [derived for derived in seen if derived.value is not None]

    def expanded(self, batch: int, recorder: RecorderLike) -> Tensor:
        """The value `(B, *shape)`."""
        if not self.shared.requires_grad:
            return self.shared.detach().expand(batch, *self.shared.shape[1:])
        computed = _OfWeights(self, recorder)
        return ExpandComputed.apply(computed, batch, *(weight.value for weight in computed.weights))  # type: ignore[no-untyped-call,no-any-return]

    def recomputed(self, values: dict[Derived, Tensor]) -> Tensor:
        """The value `(B, *shape)` from other `values` of the weights, to which what is computed on the way is added."""
        if self not in values:
            if self.function is None:
                assert self.value is not None
                return self.value
            inputs = [source.recomputed(values) for source in self.sources]
            with self.autocast():
                values[self] = self.function(*inputs)
        return values[self]


class _OfWeights(Computed):
    """What a forward computes from weights, as `ExpandComputed` takes it."""

    def __init__(self, derived: Derived, recorder: RecorderLike) -> None:
        super().__init__(derived.shared[0], recorder)
        self.derived = derived
        by_leaf = {id(leaf): weight for weight in derived.weights() for leaf in leaves_behind(weight.shared.grad_fn)}
        self.weights = [by_leaf[id(leaf)] for leaf in self.leaves]

    def differentiable(self, expanded: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor]:
        values = [value.view_as(value) for value in expanded]  # of which none comes from another
        result = self.derived.recomputed(dict(zip(self.weights, values, strict=True)))
        return torch.autograd.grad(result, values, rows, create_graph=True, allow_unused=True)
