"""Modules that go through the general rule as a whole, because the user says so or by escalation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from expanded_nn.common.modes import saved_tensors_are_packed
from expanded_nn.common.rounding import near
from expanded_nn.common.steady import Attributes, RandomStates, without_traces
from expanded_nn.common.traced import is_traced
from expanded_nn.core import cost
from expanded_nn.layers.general.batched import NotInTable
from expanded_nn.layers.general.gradients import Verdict
from expanded_nn.layers.general.mapped import Called, flatten, of_sample
from expanded_nn.layers.general.rule import General
from expanded_nn.layers.general.trial import Way, Ways, without_hooks
from expanded_nn.modules.base import Expanded, PerSampleModule
from expanded_nn.modules.registry import EXPANDED, refuse_no_class
from expanded_nn.recording.lift import Slot
from expanded_nn.recording.recorder import Recorder, modules_in

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module] | str)


class Alone(General):
    """A module that goes through the general rule as a whole, whether it has parameters of its own or not.

    Its samples may be folded into rows within it. It runs on the whole batch, after a trial as other modules do, if its
    graph tells the sample of each row that meets a parameter; otherwise sample by sample.
    """

    watches: ClassVar[bool] = True
    _alone: ClassVar[bool] = True

    def _suits_whole_batch(self) -> bool:
        """Whether its graph may tell whose the rows of each layer are."""
        return not is_traced() and not saved_tensors_are_packed()

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        """As a layer does, it leaves the `vmap` of a module around it, unless that one is tried in its place."""
        trial = recorder.escalation.on_trial
        if trial is not None and trial is not self and any(self is inner for inner in trial.modules()):
            return self._plain_forward(*args, **kwargs)
        return Expanded._inside_general(self, recorder, args, kwargs)

    def _on_whole_batch(self, call: Called) -> Any:
        if not self.goes_in_a_loop() or not self._told.ways.get(call.kind_of_ways(), Ways()).known:
            return super()._on_whole_batch(call)
        self._told.turn = turn = self._told.turn + 1
        if turn % cost.TURNS_OF_A_SAMPLE:
            return super()._on_whole_batch(call)
        # values lead it, so that samples may meet which have not met in the trial
        before, sample = Attributes([*modules_in(self)]), turn // cost.TURNS_OF_A_SAMPLE % call.batch
        alone = self._unseen(self._one_alone, call, sample)  # first, as both begin with what the call before has left
        result = super()._on_whole_batch(call)
        if result is NotImplemented or alone is None or self._agrees(call, alone, result, sample):
            return result
        before.put_back()
        return NotImplemented

    def _by_known_way(self, call: Called, ways: Ways) -> Any:
        """Likewise; if it did not, what it has kept is taken back. Where `vmap` follows, nothing is kept."""
        before = Attributes([*modules_in(self)]) if self.goes_in_a_loop() else None
        result = super()._by_known_way(call, ways)
        if before is not None and result is NotImplemented:
            before.put_back()
        return result

    def _one_alone(self, call: Called, i: int) -> Any:
        """What a sample alone gives; `None` where random numbers are drawn, of which nothing can tell."""
        leaves = zip(call.leaves, call.dims, strict=True)
        rows = [leaf if dim is None else of_sample(leaf, dim, i, call.batch) for leaf, dim in leaves]
        args, kwargs = tree_unflatten(rows, tree_structure((call.args, call.kwargs)))
        states = RandomStates([*self.modules(), call.args, call.kwargs])

        def run(hooks: bool) -> Any:
            with torch.no_grad(), without_traces(self, hooks=hooks), self._children_inside({}):
                return self._plain_forward(*args, **kwargs)

        alone = without_hooks(self, states, run)
        return None if states.restore() else alone

    def _agrees(self, call: Called, alone: Any, result: Any, i: int) -> bool:
        """Whether a sample alone gives what it gives in the batch."""
        pairs = zip(flatten(alone)[0], flatten(result)[0], strict=True)
        dims = iter(self._told.compared[call.kind].dims)
        tensors = [(x, y, next(dims)) for x, y in pairs if isinstance(x, Tensor)]
        return all(near(x, of_sample(y.detach(), dim, i, call.batch), 1.0) for x, y, dim in tensors)

    def _attempt(self, call: Called, args: Any, kwargs: Any) -> tuple[Any, Way | None]:
        result: tuple[Any, Way | None] = self._unseen(partial(super()._attempt, call), args, kwargs)
        return result

    def _unseen(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in which nobody looks for samples that take each other's places, as the graph tells."""
        order = None if self._recorder is None else self._recorder.order
        return function(*args) if order is None else order.as_one_operation(function, *args)

    def _judged(self, call: Called, *, hooks: bool) -> tuple[Verdict, Way | None]:
        follows_writes = self._told.memo.follows_writes
        judged = super()._judged(call, hooks=hooks)
        has_met_writes = self._told.memo.follows_writes and not follows_writes
        return super()._judged(call, hooks=hooks) if has_met_writes else judged

    def _lent(self) -> tuple[list[Slot], list[Tensor]]:
        lent = [(module, name, value) for module in modules_in(self) for name, value in module._parameters.items()]
        places = [(module, name) for module, name, value in lent if value is not None]
        parameters = [value for _, _, value in lent if value is not None]
        if any(type(parameter) is not nn.Parameter for parameter in parameters):
            raise NotInTable("a parameter that is sharded, or has a batch dimension of its own")
        return places, parameters  # type: ignore[return-value]

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
