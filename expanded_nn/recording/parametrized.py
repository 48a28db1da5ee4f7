"""Weights that `torch.nn.utils.parametrize` computes from parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from expanded_nn._errors import complaint
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.recording.expand import Recompute
from expanded_nn.recording.lift import quiet_fallbacks


def parametrization_of(layer: nn.Module, name: str) -> nn.Module | None:
    """The module that computes a layer's weight; `None` where the weight is a parameter."""
    if name in layer._parameters or not parametrize.is_parametrized(layer, name):
        return None
    return cast(nn.Module, layer.parametrizations[name])  # type: ignore[index]


def computed_again(parametrization: nn.Module) -> Recompute:
    """A function that computes the weight from other values of its parameters."""

    def again(leaves: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        value_of = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
        named = {key: value_of[id(own)] for key, own in parametrization.named_parameters() if id(own) in value_of}
        return _computed(parametrization, named)

    return again


def of_each_sample(who: str, parametrization: nn.Module) -> Tensor:  # (B, *shape)
    """The weight of each sample, from parameters that come with a batch dimension of their own.

    `who` has the weight, for errors.
    """
    parameters = dict(parametrization.named_parameters())
    # those that `functional_call` has put there are no parameters, the module's own are
    dims = {key: None if isinstance(own, nn.Parameter) else 0 for key, own in parameters.items()}
    try:
        with quiet_fallbacks():
            return torch.vmap(partial(_computed, parametrization), (dims,))(parameters)
    except (RuntimeError, ValueError) as error:
        raise complaint(
            who,
            f"a parametrization cannot be mapped over the weights that each sample has of its own ({error})",
            "operations that torch.vmap maps, on weights that are no nn.Parameter",
            "Call remove_parametrizations of torch.nn.utils.parametrize before functional_call.",
        ) from error


def _computed(parametrization: nn.Module, values: dict[str, Tensor]) -> Tensor:
    # spectral_norm takes a step of its iteration in every training forward
    with meanwhile(*parametrization.modules(), training=False):
        return cast(Tensor, functional_call(parametrization, values, ()))
