"""Forwards without chance: dropout is off, and drawn numbers are fixed, so that two of them can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn.common.modes import FunctionMode


class WithoutDropout(FunctionMode):
    """Turns dropout off, as its masks differ for a sample alone and in a batch."""

    met = False  # whether there was any

    def turn_off(self, model: nn.Module) -> None:
        """Turns off the dropout of modules; a function mode reaches functions only."""
        for module in model.modules():
            name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention):
                self.met |= module.training and getattr(module, name) > 0
                setattr(module, name, 0.0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            arguments.update(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            self.met |= bool(arguments.get("dropout_p"))
            return func(**{**arguments, "dropout_p": 0.0})
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **arguments)
            bound.apply_defaults()
            arguments = bound.arguments
            self.met |= bool(arguments["training"] and arguments.get("p", arguments.get("dropout_p")))
            arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        return func(*args, **arguments)


class WithoutChance(WithoutDropout):
    """Replaces drawn numbers by a fixed one, so that a batch and its samples alone get the same."""

    has_drawn = False  # whether there was anything to replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = super().__torch_function__(func, types, args, kwargs)
        fixed = _FIXED.get(getattr(func, "__name__", ""))
        if fixed is None or not isinstance(drawn, Tensor):
            return drawn
        self.has_drawn = True
        return fixed(drawn, args)


def _filled(value: float) -> Callable[[Tensor, Any], Tensor]:
    return lambda drawn, args: drawn.fill_(value)


_FIXED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_", "randn", "randn_like", "normal_", "normal"), _filled(0.5)),
    **dict.fromkeys(("exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli", "bernoulli_"), _filled(1.0)),
    **dict.fromkeys(("multinomial", "random_", "randint_like"), _filled(0)),
    "randint": lambda drawn, args: drawn.fill_(0 if isinstance(args[1], tuple | list) else args[0]),
    "randperm": lambda drawn, args: drawn.copy_(torch.arange(len(drawn)).roll(1)),  # the identity would hide mixing
}
_DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_DROPOUTS.add(F.multi_head_attention_forward)
