"""A weight used outside of its module: its rows in the pass, and operations that take it with and without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from expanded_nn._errors import complaint
from expanded_nn._expand import recorder_of

Operation = TypeVar("Operation", bound=Callable[..., Tensor])


def expanded(weight: Tensor) -> Tensor:
    """A parameter as its own layer sees it, for a forward or a loss that uses it as well.

    In per-sample mode it is expanded over the samples of the last forward, `(B, *weight.shape)`, the same tensor that
    the layers see, so that the gradient of this use is added to the rows. In any other case, with per-sample mode off,
    in `no_grad`, or for a frozen parameter, it is `weight` itself. The maps of `expanded_nn.functional` (`linear`,
    `bilinear`, `embedding`, the convolutions) take both; so does code that counts dimensions from the end.

    Args:
        weight: A parameter of a converted model, or what was computed from parameters alone.

    Returns:
        `(B, *weight.shape)`, or `weight`.

    Raises:
        PerSampleError: If per-sample mode is on and there was no forward since the last backward.

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
        return _outside_of_graph(expanded, weight)
    if torch._C._functorch.is_batchedtensor(weight) or not torch.is_grad_enabled():
        return weight  # inside the general rule: the weight of one sample
    recorder = recorder_of(weight)
    return weight if recorder is None else recorder.expand_outside(weight)


def with_plain_weights(operation: Operation, torchs: Callable[..., Tensor], rank: int) -> Operation:
    """The operation, and torch's own for a weight without a batch dimension.

    Args:
        operation: The operation on weights with a batch dimension.
        torchs: The function of the same arguments in `torch.nn.functional`.
        rank: The number of dimensions of a weight without a batch dimension.
    """
    parameters = signature(operation)

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = parameters.bind(*args, **kwargs)
        x, weight = next(iter(given.arguments.values())), given.arguments["weight"]
        if weight.dim() == rank:
            return torchs(*given.args, **given.kwargs)
        if weight.dim() != rank + 1 or x.shape[:1] != weight.shape[:1]:
            raise complaint(
                f"functional.{operation.__name__}",
                f"the input has shape {tuple(x.shape)}, the weight {tuple(weight.shape)}",
                f"a weight of {rank} dimensions, or of {rank + 1} and as many rows as the input, the samples",
                "Keep the samples in the first dimension of both; unflatten a folded batch.",
            )
        if torch.compiler.is_compiling() and weight.requires_grad:
            return _outside_of_graph(operation, *given.args, **given.kwargs)
        return operation(*given.args, **given.kwargs)

    return cast(Operation, call)


@_disable_dynamo
def _outside_of_graph(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """What makes rows is no part of a graph of `torch.compile`."""
    return function(*args, **kwargs)
