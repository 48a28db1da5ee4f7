"""The operations of a module's forward while `vmap` takes it over the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves

from expanded_nn.common.functions import functions, is_in_place
from expanded_nn.common.modes import checkpoint_hooks, is_batched, is_expanded, uncounted
from expanded_nn.layers.linear import linear
from expanded_nn.modules.layout import refusal
from expanded_nn.recording.lift import OfAllSamples


class OneSample(TorchFunctionMode):
    """Corrects operations whose gradient is wrong under `vmap`, and names shared tensors that the forward changes.

    What the forward makes to write into, as by `torch.zeros`, is each sample's own from then on.
    """

    def __init__(self, module: Any) -> None:  # of the general rule
        super().__init__()
        self.module, self.hooks = module, checkpoint_hooks()
        self.made: dict[int, Tensor] = {}  # such tensors by their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = checkpoint_hooks()
        if hooks is not None and hooks != self.hooks:
            # a checkpoint within: nothing of the vmap can be computed again once it is over
            with uncounted():
                return self._corrected(func, args, kwargs or {})
        if is_in_place(func) or func in _CORRECTED:
            return self._corrected(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in _MAKES:
            self.made[id(result)] = result
        return result

    def _corrected(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is Tensor.view:
            return _view(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag and ((len(args) > 2 and args[2] is not None) or kwargs.get("offsets") is not None):
            self._refuse_offsets()
        if func is F.scaled_dot_product_attention and any(
            map(_is_floating_mask, (*args[3:4], kwargs.get("attn_mask")))
        ):
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels refuse a mask that may need gradient
                return func(*args, **kwargs)
        if is_in_place(func) and not is_of_one_sample(args[0]):
            of_one_sample = next(filter(is_of_one_sample, tree_leaves(args)), None)
            if of_one_sample is not None and not self._becomes_its_own(args[0], of_one_sample):
                self._refuse_change(args[0])
        return func(*args, **kwargs)

    def _becomes_its_own(self, tensor: Tensor, of_one_sample: Tensor) -> bool:
        """Gives each sample a copy of a tensor that the forward has made; whether it can, as nothing else uses that."""
        if id(tensor) not in self.made:
            return False
        nothing = of_one_sample.detach().flatten()[:0].sum().to(tensor.dtype)
        try:
            swap_tensors(tensor, tensor + nothing)
        except RuntimeError:
            return False
        return True

    def _refuse(self, *said: str) -> None:
        """Raises for a forward that `vmap` cannot follow, but a loop over the samples may."""
        error = refusal(self.module, *said)
        error.by_vmap = True
        raise error

    def _refuse_offsets(self) -> None:
        self._refuse(
            "its forward looks up bags by offsets, which tell the samples apart for the whole batch only",
            "one bag per sample in each row",
            "Give the bags to EmbeddingBag as a 2-D input (B, N), filled up with its padding_idx, without offsets.",
        )

    def _refuse_change(self, tensor: Tensor) -> None:
        names = [f"the buffer {name!r}" for name, buffer in self.module.named_buffers() if buffer is tensor]
        self._refuse(
            "its forward writes what is of one sample, or computed from a parameter, into "
            f"{names[0] if names else 'a tensor that all share'}",
            "a forward that changes nothing that samples share",
            "Move the parameter into a small module of its own, beside what is written; do without that buffer or "
            "cache in per-sample mode (use_cache=False); or write the per-sample forward with @expands.",
        )


def _linear_of_all(batch: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The linear map of a layer, for all samples at once, so that its rows stay factored."""
    return linear(*(_by_sample(tensor, dim, batch) for tensor, dim in zip(tensors, in_dims, strict=True))), 0


def _by_sample(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    if dim is None:
        return tensor.expand(batch, *tensor.shape)
    return tensor.movedim(dim, 0) if dim else tensor  # rows of the weight itself stay factored


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not is_expanded(weight) or input.dim() == 0:
        return F.linear(input, weight, bias)
    own_bias = [] if bias is None or not is_expanded(bias) else [bias]
    y: Tensor = OfAllSamples.apply(_linear_of_all, input, weight, *own_bias)  # type: ignore[no-untyped-call]
    return y if bias is None or own_bias else y + bias


def _view(x: Tensor, *shape: Any, **named: Any) -> Tensor:
    """`view`, where `vmap` has laid a sample out in memory in another way than a plain tensor."""
    try:
        return x.view(*shape, **named)
    except RuntimeError:
        if not is_of_one_sample(x):
            raise
        return x.contiguous().view(*shape, **named)


def _is_floating_mask(mask: Any) -> bool:
    return is_of_one_sample(mask) and mask.is_floating_point()


_MAKES = {*functions("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like")}
_MAKES.update(functions("new_zeros", "new_ones", "new_full", "new_empty"))
_CORRECTED = {Tensor.view, F.embedding, F.embedding_bag, F.linear, F.scaled_dot_product_attention}


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """`F.embedding` with constant padding rows: the gradient of its own `padding_idx` is wrong under `vmap`."""
    rows = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return rows
    padding_idx = padding_idx % weight.shape[0]
    return torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)


def ids_of_one_sample(values: Any) -> list[int]:
    """The ids of such tensors in a value."""
    return [id(leaf) for leaf in tree_leaves(values) if is_of_one_sample(leaf)]


def is_of_one_sample(value: Any) -> bool:
    """Whether a tensor is one that the `vmap` over the samples maps."""
    return isinstance(value, Tensor) and is_batched(value)
