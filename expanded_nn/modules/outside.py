"""For code outside of the model's forward: several calls as one pass, and weights that are used by other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint, refuse_no_count, refuse_no_model, refuse_other_kind
from expanded_nn.common.modes import is_batched, outside_of_graph
from expanded_nn.common.shared import is_shared
from expanded_nn.modules.base import recorders_of
from expanded_nn.recording.recorder import recorder_of

Operation = TypeVar("Operation", bound=Callable[..., Tensor])


@contextmanager
def one_pass(model: nn.Module, batch_size: int) -> Iterator[None]:
    """Makes all calls within the `with` block one forward of `batch_size` samples.

    For what is not one call of the model: methods other than `forward` (a VAE's `encode` and `decode`, a Lightning
    module's `training_step`), submodules called one by one, weights used in a loss through `expanded`. Their rows
    belong together and add up. Rows of another `one_pass`, or of calls outside of it, are never added to them, but
    appended, even if these have as many samples.

    With per-sample mode off it does nothing; inside of a forward of the model it is a part of that.

    Args:
        model: A model in per-sample mode.
        batch_size: B, the number of samples.

    Raises:
        PerSampleError: If it is inside of a forward of another number of samples.
        ValueError: If `batch_size` is no whole number, or negative.
        TypeError: If `model` is no model.

    Example:
        >>> import torch, expanded_nn as enn
        >>> class Autoencoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.down, self.up = torch.nn.Linear(5, 2), torch.nn.Linear(2, 5)
        ...         self.shift = torch.nn.Parameter(torch.zeros(2))
        ...     def encode(self, x):
        ...         return self.down(x) + enn.expanded(self.shift)
        >>> model, x = enn.convert(Autoencoder()).per_sample(), torch.randn(4, 5)
        >>> with enn.one_pass(model, batch_size=4):
        ...     loss = (model.up(model.encode(x)) - x).square().mean()
        >>> loss.backward()
        >>> model.shift.grad_sample.shape
        torch.Size([4, 2])
    """
    refuse_no_model("one_pass", model)
    refuse_no_count("one_pass", "batch_size", batch_size)
    with ExitStack() as stack:
        for recorder in recorders_of(model.modules()):
            stack.enter_context(recorder.one_pass(model, batch_size))
        yield


def expanded(weight: Tensor) -> Tensor:
    """A parameter with a batch dimension, for a forward or a loss that uses it outside of its layer.

    In per-sample mode it is expanded over the samples of the forward that runs or, after it, of the last one:
    `(B, *weight.shape)`, the same tensor that the layers see. So the gradient of this use is added to the rows. In any
    other case, with per-sample mode off, in `no_grad`, or for a frozen parameter, it is `weight` itself. A parameter
    without dimensions becomes `(B,)`, which with `(B, 1)` broadcasts to `(B, B)`, and the rows are wrong: give it shape
    `(1,)`, or write `expanded(weight).view(-1, 1)`. The operations of `expanded_nn.functional` take both, but for
    `embedding_bag`; so does code that counts dimensions from the end.

    Args:
        weight: A parameter of a converted model, or what was computed from parameters alone.

    Returns:
        `(B, *weight.shape)`, or `weight`.

    Raises:
        PerSampleError: If per-sample mode is on and there was no forward since the last backward.
        TypeError: If `weight` is no tensor.

    Example:
        >>> import torch, expanded_nn as enn
        >>> class Tied(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.tok = torch.nn.Embedding(7, 3)
        ...     def forward(self, words):  # (B, T)
        ...         return enn.functional.linear(self.tok(words), enn.expanded(self.tok.weight))
        >>> model = enn.convert(Tied()).per_sample()
        >>> model(torch.tensor([[1, 2], [3, 3]])).square().sum((1, 2)).mean().backward()
        >>> model.tok.weight.grad_sample.shape
        torch.Size([2, 7, 3])
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, outside_of_graph(expanded, weight))
    refuse_other_kind("expanded", "weight", weight, Tensor, "a parameter", "Give it as in expanded(model.fc.weight).")
    if is_batched(weight) or not torch.is_grad_enabled():
        return weight  # inside the general rule: the weight of one sample
    recorder = recorder_of(weight) if weight.requires_grad else None
    return weight if recorder is None else recorder.expand_outside(weight)


def with_plain_weights(operation: Operation, plain: Callable[..., Tensor], rank: int) -> Operation:
    """An operation on weights `(B, *shape)` that is torch's `plain` one on weights of `rank` dimensions, `(*shape)`."""
    parameters = signature(operation)

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        bound = parameters.bind(*args, **kwargs)
        x, weight, bias = next(iter(bound.arguments.values())), bound.arguments["weight"], bound.arguments.get("bias")
        if isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor):
            if (weight.dim(), bias.dim()) == (rank, 2):  # a frozen weight beside an expanded bias
                weight = bound.arguments["weight"] = weight.expand(*x.shape[:1], *weight.shape)
            elif (weight.dim(), bias.dim()) == (rank + 1, 1):
                bound.arguments["bias"] = bias.expand(*x.shape[:1], *bias.shape)
        if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or weight.dim() == rank:
            return plain(*bound.args, **bound.kwargs)
        if weight.dim() != rank + 1 or x.shape[:1] != weight.shape[:1]:
            raise complaint(
                f"functional.{operation.__name__}",
                f"the input has shape {tuple(x.shape)}, the weight {tuple(weight.shape)}",
                f"a weight with {rank} dimensions, or with {rank + 1}, the first that of the samples, as in the input",
                "Keep the samples in the first dimension of both; unflatten a folded batch.",
            )
        if torch.compiler.is_compiling() and weight.requires_grad:
            return cast(Tensor, outside_of_graph(operation, *bound.args, **bound.kwargs))
        return operation(*bound.args, **bound.kwargs)

    return cast(Operation, call)


def with_shared_parameters(operation: Operation) -> Operation:
    """An operation on `weight` and `bias` `(B, *shape)` that also takes those that all samples share, `(*shape)`.

    Their shape is one number for each channel, or `normalized_shape`.
    """
    parameters = signature(operation)

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        bound = parameters.bind(*args, **kwargs)
        x, rank = next(iter(bound.arguments.values())), len(bound.arguments.get("normalized_shape", "C"))
        for name in ("weight", "bias"):
            own = bound.arguments.get(name)
            if isinstance(own, Tensor) and isinstance(x, Tensor) and own.dim() == rank:
                bound.arguments[name] = own.expand(*x.shape[:1], *own.shape)
        return operation(*bound.args, **bound.kwargs)

    return cast(Operation, call)


def refuse_other_shapes(function: str, x: Tensor, shape: Sequence[int], **parameters: Tensor | None) -> None:
    """Raises if a parameter is not one of this shape for each sample of the input `x`."""
    wanted = (*x.shape[:1], *shape)
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != wanted:
            raise complaint(
                f"functional.{function}",
                f"{name} has shape {tuple(parameter.shape)}",
                f"one for each sample, {wanted}",
                f"One that all samples share has the shape {tuple(shape)}.",
            )


def refuse_other_channels(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raises for a weight or a bias that is not `(B, C)`; of one that all samples share torch says what is wrong."""
    for name, own in (("weight", weight), ("bias", bias)):
        if own is not None and not (own.dim() == 2 and own.shape[0] == x.shape[0] and is_shared(own)):
            refuse_other_shapes(norm, x, x.shape[1:2], **{name: own})
