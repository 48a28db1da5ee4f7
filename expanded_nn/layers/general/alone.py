"""Modules that go through the general rule as a whole, because the user says so or by escalation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn

from expanded_nn.layers.general.folded_batch import FoldedBatch
from expanded_nn.layers.general.rule import General
from expanded_nn.layers.general.whole_batch import WholeBatch
from expanded_nn.modules.base import Expanded, PerSampleModule
from expanded_nn.modules.registry import EXPANDED, refuse_no_class
from expanded_nn.recording.recorder import Recorder

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module] | str)


class Alone(General):
    """A module that goes through the general rule as a whole, whether it has parameters of its own or not.

    Its samples may be folded into rows within it. It runs on the whole batch, after a trial as other modules do, if its
    graph tells the sample of each row that meets a parameter; otherwise sample by sample.
    """

    always_converted: ClassVar[bool] = True
    _alone: ClassVar[bool] = True
    _on_whole_batch: ClassVar[Sequence[type[WholeBatch]]] = (FoldedBatch,)

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        """As a layer does, it leaves the `vmap` of a module around it, unless that one is tried in its place.

        With the samples second it stays: nothing says where they are in what it returns.
        """
        trial = recorder.escalation.on_trial
        is_within = trial is not None and trial is not self and any(self is inner for inner in trial.modules())
        if is_within or self._samples_dim:
            return self._plain_forward(*args, **kwargs)
        return Expanded._inside_general(self, recorder, args, kwargs)

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
    what the layers inside cannot take apart: it runs sample by sample, each as a batch of one, or on the whole batch
    once a trial has found the same results and rows there. It is slower than layers of their own.

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
