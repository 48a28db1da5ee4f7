"""The operations of a module's forward while `vmap` takes it over the samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map

from expanded_nn.common.functions import WITHOUT_RULE, attributes, functions, is_in_place
from expanded_nn.common.modes import (
    FunctionMode,
    autocast_dtype,
    checkpoint_hooks,
    is_autocast,
    is_batched,
    is_expanded,
    is_shown_elsewhere,
    of_all,
    of_one,
    outside_of_vmap,
    samples_first,
    transforms,
    uncounted,
)
from expanded_nn.common.shared import stood_for
from expanded_nn.common.traced import is_traced
from expanded_nn.layers.linear import linear
from expanded_nn.layers.norm import with_contiguous_gradient
from expanded_nn.modules.layout import refusal
from expanded_nn.recording.lift import OfAllSamples


class OneSample(FunctionMode):
    """Corrects operations whose gradient is wrong under `vmap`, and names shared tensors that the forward changes.

    What the forward makes to write into, as by `torch.zeros`, is each sample's own from then on.

    Args:
        module: The module of the general rule.
        own: A sample's parameter, as the `vmap` sees it. Where it is given, all that the forward makes is each sample's
            own from the start: in a trace a tensor cannot become another one later.
    """

    def __init__(self, module: Any, own: Tensor | None = None) -> None:
        super().__init__()
        self.module, self.own, self.hooks = module, own, checkpoint_hooks()
        self.made: dict[int, Tensor] = {}  # such tensors by their ids
        self.read: set[int] = set()  # where those are in memory whose `.data` was read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("memory_format") in _CHANNELS_LAST:  # under `vmap` there is a dimension more in memory
            usual = torch.contiguous_format if func is Tensor.contiguous else torch.preserve_format
            kwargs = kwargs | {"memory_format": usual}
        hooks = checkpoint_hooks()
        if hooks is not None and hooks != self.hooks:
            # a checkpoint within: nothing of the vmap can be computed again once it is over
            with uncounted():
                return self._corrected(func, args, kwargs or {})
        if is_in_place(func) or func in _CORRECTED:
            return self._corrected(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in _MAKES:
            if self.own is not None:
                result = result + _nothing_of(self.own, result.dtype)
            self.made[id(result)] = result
        return result

    def _corrected(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _REQUIRES and is_of_one_sample(args[0]) and transforms() == 1:
            return self._requires_grad(func, *args, **kwargs)
        if func in _DERIVATIVES:
            return self._derivatives(func, args, kwargs)
        if func in _DATA and is_of_one_sample(args[0]):
            return self._data(func, *args)
        if func is Tensor.register_hook:
            self._refuse_hook(args[0])
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in WITHOUT_RULE:
            return WITHOUT_RULE[func](*args, **kwargs)
        if func is Tensor.view:
            return _view(*args, **kwargs)
        if func is F.batch_norm:
            y = func(*args, **kwargs)
            return y if is_of_one_sample(y) else with_contiguous_gradient(y)
        if func in _STRIDED:
            return _strided(func, *args, **kwargs)
        if func in _KEEP_DTYPE:
            return _normed(func, *args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag and ((len(args) > 2 and args[2] is not None) or kwargs.get("offsets") is not None):
            self._refuse_offsets()
        if func in _ATTENTIONS:
            masks = filter(is_of_one_sample, (*args[3:4], kwargs.get("attn_mask")))
            has_mask = any(mask.is_floating_point() for mask in masks)
            # the fused kernels refuse a mask that may need gradient
            with sdpa_kernel(SDPBackend.MATH) if has_mask else nullcontext():
                if func in _OF_AUTOCAST:
                    return _as_under_autocast(func, args, kwargs)
                return func(*args, **kwargs)
        if func in _OF_AUTOCAST:
            return _as_under_autocast(func, args, kwargs)
        return self._changed(func, args, kwargs) if is_in_place(func) else func(*args, **kwargs)

    def _changed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A change of the first argument in place."""
        x = args[0]
        if not is_of_one_sample(x):
            of_one_sample = next(filter(is_of_one_sample, tree_leaves(args)), None)
            if of_one_sample is not None and not self._becomes_its_own(x, of_one_sample):
                self._refuse_change(x)
        elif self.read and _memory_of(x) in self.read:
            raise RuntimeError("changing `.data` in place under vmap is not allowed")  # as torch says of a look at it
        result = func(*args, **kwargs)
        if not is_traced():
            _read_history(x)
        return result

    def _data(self, func: Any, x: Tensor, other: Tensor | None = None) -> Any:
        """`x.data`, which may be set to itself, as where a module is moved to the device where it is."""
        if other is None:
            self.read.add(_memory_of(x))
            data = x.detach()
            vars(data)["_data_of"] = x
            return data
        return func(x, other) if vars(other).get("_data_of") is not x else None

    def _becomes_its_own(self, tensor: Tensor, of_one_sample: Tensor) -> bool:
        """Gives each sample a copy of a tensor that the forward has made; whether it can, as nothing else uses that."""
        if id(tensor) not in self.made or is_shown_elsewhere(tensor):
            return False
        try:
            swap_tensors(tensor, tensor + _nothing_of(of_one_sample, tensor.dtype))
        except RuntimeError:
            return False
        return True

    def _refuse(self, *said: str, writes: bool = False) -> None:
        """Raises for a forward that `vmap` cannot follow, but a loop over the samples may."""
        error = refusal(self.module, *said)
        error.by_vmap, error.by_writing = True, writes
        raise error

    def _requires_grad(self, func: Any, x: Tensor, *flag: bool, **flags: bool) -> Any:
        """Asks or says whether a tensor of one sample requires a gradient: autograd knows that of all samples."""
        with outside_of_vmap():
            if func in _ASKS:
                return of_all(x).requires_grad
            of_all(x).requires_grad_(*flag, **flags)  # the argument may require one already, in a comparison
        return x

    def _derivatives(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What autograd gives; it knows the tensors of all samples behind the `vmap`, not those of one sample.

        Where these are not all there is, as in a transform of the forward's own, torch goes on, or fails.
        """
        if self.hooks is not None:
            raise refusal(
                self.module,
                "it takes derivatives by torch.autograd in a checkpoint, which would run it again for them",
                "no checkpoint around it",
                "Leave the checkpoint out, or give it a part of that forward alone, without the derivatives.",
            )
        if not any(map(is_of_one_sample, tree_leaves(args))):
            return func(*args, **kwargs)
        outputs, inputs = args if func is torch.autograd.grad else ((), ())
        weights = _weights(outputs, kwargs.get("grad_outputs"))
        if transforms() == 1 and weights and all(map(is_of_one_sample, (*outputs, *inputs))):
            is_batched = int(kwargs["is_grads_batched"])
            whole = [samples_first(torch.zeros_like(y) + w) for y, w in zip(outputs, weights, strict=True)]
            options = {**kwargs, "grad_outputs": [w.transpose(0, is_batched) for w in whole]}
            with outside_of_vmap():
                found = func(list(map(samples_first, outputs)), list(map(of_all, inputs)), **options)
            return tuple(x if x is None else of_one(x, like, is_batched) for x, like in zip(found, inputs, strict=True))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            return self._refuse(
                f"its forward takes derivatives by torch.autograd, and vmap fails in them ({error})",
                "derivatives of tensors that each sample has for itself",
                "Take them by torch.autograd.grad, of tensors of the samples and by such tensors.",
            )

    def _refuse_hook(self, tensor: Tensor) -> None:
        """Raises for a hook in the forward; a loop may follow one, but not on a parameter, which all samples share."""
        remedy = "Write it as a torch.autograd.Function, or move the parameter into a small module of its own."
        if stood_for(tensor) is not tensor:
            raise refusal(
                self.module, "its forward registers a hook on a parameter", "one that is registered outside", remedy
            )
        if is_of_one_sample(tensor):
            self._refuse(
                "its forward registers a hook on a tensor, and one sample's has no gradient of its own under vmap",
                "no hooks, or a Function in their place",
                remedy,
            )

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
            writes=True,
        )


def _read_history(x: Tensor) -> None:
    """Reads the history of what was written into: until then torch takes such a view for a leaf, and refuses writes."""
    with torch._C.DisableTorchFunction():
        _ = (of_all(x) if is_of_one_sample(x) else x).grad_fn


def _nothing_of(sample: Tensor, dtype: torch.dtype) -> Tensor:
    """A zero that is one sample's."""
    return sample.detach().flatten()[:0].sum().to(dtype)


def _weights(outputs: Sequence[Tensor], given: Any) -> list[Any]:
    """What derivatives of some outputs are multiplied by; nothing where that is not said."""
    weights = [given] if isinstance(given, Tensor) else list(given or [None] * len(outputs))
    weights = [1.0 if w is None and y.numel() == 1 else w for y, w in zip(outputs, weights, strict=True)]
    return [] if any(weight is None for weight in weights) else weights


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


def _memory_of(x: Tensor) -> int:
    with outside_of_vmap():
        return of_all(x).untyped_storage().data_ptr()


def _view(x: Tensor, *shape: Any, **named: Any) -> Tensor:
    """`view`, where `vmap` has laid a sample out in memory in another way than a plain tensor."""
    try:
        return x.view(*shape, **named)
    except RuntimeError:
        if not is_of_one_sample(x):
            raise
        return x.contiguous().view(*shape, **named)


def _normed(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A norm in the dtype of its input. Without weights `group_norm` wants samples one after the other in memory."""
    try:
        normed = func(input, *args, **kwargs)
    except RuntimeError:
        if not is_of_one_sample(input):
            raise
        normed = func(input.clone(memory_format=torch.contiguous_format), *args, **kwargs)
    return cast(Tensor, normed.to(input.dtype))


def _strided(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A view by strides, of a copy of what all samples share: its backward divides by how often numbers stand there."""
    return func(x + torch.zeros_like(x) if is_expanded(x) else x, *args, **kwargs)


def _as_under_autocast(func: Any, args: Any, kwargs: Any) -> Any:
    """What autocast makes of some functions, which a `vmap` hides from it, or makes of others that it sees."""
    tensors = filter(is_of_one_sample, tree_leaves((args, kwargs)) if is_autocast() else ())
    device = next((tensor.device.type for tensor in tensors), None)
    lower = None if device is None else autocast_dtype(device)
    if device is None or lower is None:
        return func(*args, **kwargs)
    if func in _IN_LOWER or func in _LOSSES or (func in _IN_HIGHER and device == "cpu"):
        dtype = lower if func in _IN_LOWER else torch.float32
        args, kwargs = tree_map(partial(_cast, dtype=dtype), (args, kwargs))
    with torch.autocast(device, enabled=False):
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in another dtype, but for those of double precision."""
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in (torch.float64, dtype)
    return value.to(dtype) if is_cast else value


_MAKES = {*functions("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like")}
_MAKES.update(functions("new_zeros", "new_ones", "new_full", "new_empty"))
_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_ASKS = set(attributes("requires_grad"))
_REQUIRES = {*_ASKS, Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_ATTENTIONS = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_CHANNELS_LAST = torch.channels_last, torch.channels_last_3d
_CORRECTED = {Tensor.register_hook, Tensor.view, F.batch_norm, F.embedding, F.embedding_bag, F.linear}
_DATA = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]
_STRIDED = [*functions("as_strided", "as_strided_copy"), torch.ops.aten.as_strided, torch.ops.aten.as_strided.default]
_KEEP_DTYPE = functions("layer_norm", "group_norm")  # of whose parts the batching rules promote
# what autocast computes in its dtype, in float32, in float32 on a CPU alone, or as it is; it sees the rest under `vmap`
_IN_LOWER = {*functions("addmm", "baddbmm", "addbmm", "prelu", "scaled_dot_product_attention"), torch.linalg.vecdot}
_IN_LOWER.update(functions(*(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))))
_LOSSES = {*functions("cross_entropy", "nll_loss", "l1_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss")}
_LOSSES.update(functions("hinge_embedding_loss", "cosine_embedding_loss"))
_IN_HIGHER = {*filter(callable, vars(torch.fft).values()), *functions("cdist")}
_OF_AUTOCAST = _IN_LOWER | _LOSSES | _IN_HIGHER | {*functions("mv", "dot")}
_CORRECTED |= {*WITHOUT_RULE, *_DATA, *_ATTENTIONS, *_DERIVATIVES, *_REQUIRES, *_STRIDED, *_KEEP_DTYPE, *_OF_AUTOCAST}


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
