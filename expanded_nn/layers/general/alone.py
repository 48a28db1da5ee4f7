"""Modules that go through the general rule as a whole, because the user says so or by escalation."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import nn

from expanded_nn.layers.general.rule import General
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.modules.registry import EXPANDED, refuse_no_class

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module] | str)


class Alone(General):
    """A module that goes through the general rule as a whole, whether it has parameters of its own or not."""

    watches: ClassVar[bool] = True
    _alone: ClassVar[bool] = True

    def expanded_forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().expanded_forward(*args, **kwargs)
        except Exception as error:
            if self._recorder is not None and self._recorder.escalation.on_trial is self:  # a larger module is next
                error.refused_by = self  # type: ignore[attr-defined]
            raise


PerSampleModule._alone_class = Alone


def alone(module_class: ModuleClass) -> ModuleClass:
    """Sends the modules of a class through the general rule as a whole, with all that is in them.

    For a class whose forward folds samples into rows, looks up an index without a batch dimension, or otherwise does
    what the layers inside cannot take apart: each sample goes through it alone, as a batch of one. It is slower than
    layers of their own, and needs a forward that `vmap` can follow.

    Args:
        module_class: The class, or its full name `"package.module.Class"`; also usable as a decorator.

    Returns:
        What was given.

    Raises:
        TypeError: If that is neither.

    Example:
        >>> import torch, expanded_nn as enn
        >>> @enn.alone
        ... class Folded(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(3, 2)
        ...     def forward(self, x):  # (B, T, 3)
        ...         return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        >>> model = enn.convert(Folded()).per_sample()
        >>> model(torch.randn(5, 4, 3)).square().sum((1, 2)).mean().backward()
        >>> model.linear.weight.grad_sample.shape
        torch.Size([5, 2, 3])
    """
    refuse_no_class("alone", module_class, "Give the class of the module, type(module), before convert.")
    EXPANDED[module_class] = Alone
    return module_class
