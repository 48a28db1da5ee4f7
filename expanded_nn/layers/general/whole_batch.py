"""When a forward runs on the whole batch: where comparisons have found it right, and still do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_structure, tree_unflatten

from expanded_nn._errors import warn
from expanded_nn.common.batch import FOLDED, Dims, readings
from expanded_nn.common.containers import tensors_of
from expanded_nn.common.modes import function_modes, is_of_checkpoint, running_backward, unseen
from expanded_nn.common.rounding import near
from expanded_nn.common.steady import Undo, Updates
from expanded_nn.common.traced import is_traced, wait_for_values
from expanded_nn.core import cost
from expanded_nn.layers.general.called import Called, of_sample
from expanded_nn.layers.general.gradients import Verdict
from expanded_nn.layers.general.left import with_left
from expanded_nn.layers.general.mapped import MEAN, NOT_OF_THE_FORWARD, SUM
from expanded_nn.layers.general.own_functions import functions_looked_at
from expanded_nn.layers.general.owners import Owners
from expanded_nn.layers.general.plain import Plain
from expanded_nn.layers.general.told import Way, Ways
from expanded_nn.layers.general.trial import Trial
from expanded_nn.layers.general.whole import Run
from expanded_nn.recording.lift import Slot, has_guests, swapped
from expanded_nn.recording.recorder import modules_in


class WholeBatch:
    """The forward of a module of the general rule on the whole batch, for one call."""

    follows_folds: ClassVar[bool] = False  # whether the graph is asked whose the rows are

    def __init__(self, module: Any, call: Called) -> None:
        self.module, self.call, self.told = module, call, module._told
        self.kind = self.follows_folds, call.kind_of_ways()
        self.was_in_vain = False  # whether the forward has run, and its result was not taken
        self.has_failed = False  # whether it has run and could not come to an end

    def result(self) -> Any:
        """What it gives, at some calls only if a sample gives the same alone; else `NotImplemented`."""
        if not self._may_run() or self.call.kind in self.told.failed:
            return NotImplemented
        if not self._is_known():
            return self._by_ways()
        self.told.turn += 1
        turns, is_not_due = divmod(self.told.turn, cost.TURNS_OF_A_SAMPLE)
        if is_not_due:
            return self._by_ways()
        before, number = Undo([*modules_in(self.module)]), turns % self.call.batch
        # first, as both begin with what the call before has left
        alone = self._hidden(_OneAlone, self.module, self.call, number)
        with before.updates:
            result = self._by_ways()
        if result is NotImplemented or alone.agrees(result):
            return result
        if self.module._learned is None and not self._hidden(alone.depends_on_others, result):
            return result
        before.put_back()
        self.told.distrust(self.call)
        return NotImplemented

    def _may_run(self) -> bool:
        """Whether the forward may run so, as far as is known without a trial."""
        call = self.call
        if not torch.is_grad_enabled() or call.batch == 0:
            return False
        if cost.is_symbol(call.batch) and (not self.knows_a_way() or self.told.leaves_something):
            return False
        have_samples_first = {*call.dims} <= {0, None, FOLDED} and (0 in call.dims or call.is_surely_folded)
        may_go = have_samples_first and (self.knows_a_way() or self.ways.trials_left > 0)
        return may_go and self.suits() and not has_guests(modules_in(self.module))

    def suits(self) -> bool:
        """Whether the module, as it is now, may run so at all."""
        module = self.module
        return bool(module._ranks) and module._learned is None and not parametrize.is_parametrized(module)

    def _is_known(self) -> bool:
        """Whether the call may go a known way, and a comparison may read values now."""
        if is_traced() or running_backward() >= 0:  # a checkpoint's forward is computed again, as it was
            return False
        return self.knows_a_way()

    @property
    def ways(self) -> Ways:
        """In which ways it is right, for a call of that kind."""
        ways: Ways = self.told.ways.get(self.kind, Ways())
        return ways

    def knows_a_way(self) -> bool:
        """Whether a comparison has found it right, for a call of that kind."""
        return bool(self.ways.known)

    def _hidden(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function; nobody takes notes of what the module's forward does in it."""
        with self.module._unnoticed():
            return as_one_operation(self.module, function, *args)

    def _by_ways(self) -> Any:
        """The result if the forward goes a way that is known to be right, or that a trial finds right now."""
        kind, ways = self.kind, self.ways
        if ways.known and (result := self.by_known_way(ways)) is not NotImplemented:
            return result
        if running_backward() >= 0 or cost.is_symbol(self.call.batch) or (is_traced() and self.has_failed):
            # a checkpoint's forward that is computed again learns nothing, nor one without sizes, or without the values
            # that tell whose its rows are
            return NotImplemented
        wait_for_values("a module of the general rule is tried on the whole batch first")
        verdict, way = self.judged(hooks=ways.hooks) if ways.trials_left else (Verdict.WRONG, None)
        ways = ways.after(verdict, way, self.told.compared.get(self.call.kind))
        self.told.ways[kind] = ways
        result = self.by_known_way(ways) if ways.known else NotImplemented
        if ways.known and result is NotImplemented:  # what the hooks of its children add may be what it did otherwise
            self.told.ways[kind] = ways._replace(hooks=True)
        return result

    def by_known_way(self, ways: Ways) -> Any:
        """The result, if it went a known way."""
        told = self.told
        self.call.refuse_changes(self.module)
        # a trace is taken back as a whole
        before = Undo([*modules_in(self.module)]) if told.leaves_something and not is_traced() else None
        with nullcontext() if before is None else before.updates:
            result, way = self.attempt(self.call.args, self.call.kwargs)
        self.has_failed = way is None
        found = None if way is None else ways.known.get(way)
        if found is None:
            if before is not None:
                before.put_back()  # what it has counted, drawn and kept, as another forward follows
            elif not is_traced():
                self.was_in_vain = told.leaves_something = True  # until the next run tells
            return NotImplemented
        told.compared[self.call.kind] = found
        if before is None:
            return result
        told.leaves_something = before.has_changed()
        if told.leaves_something and self.was_in_vain:
            warn(
                f"{self.module.qualified_name}: its forward has run twice in this call, as it does what it has not "
                "done before, and it counts, draws or keeps something, which has happened twice. It will not again."
            )
        return result

    def attempt(self, args: Any, kwargs: Any) -> tuple[Any, Way | None]:
        """The result of the forward on the whole batch, and the way it has gone; `None` if it cannot run so.

        The arguments are those of the call, or copies of them.
        """
        module, recorder, dims = self.module, self.module._recorder, self.call.dims
        heard, batch = recorder.forward.notes.inputs_shared, recorder.forward.own_pass.batch
        owners = Owners(batch, self.told.memo) if self.follows_folds else None
        before, run = len(heard), Run(batch, recorder, module, owners)
        try:
            with unseen():
                weights = {place: run.batched(recorder.expand(own)) for place, own in self.lent.items()}
            if owners is not None:
                args, kwargs = owners.begin((args, kwargs), dims)
            with (
                swapped(weights, modules_in(module)),
                nullcontext() if owners is None else recorder.in_general_rule({}),
            ):
                weights.clear()
                with run, functions_looked_at():
                    left = self.told.left.get(self.call.kind, ())
                    result = with_left(module, left, lambda: module._plain_forward(*args, **kwargs))
                result = run.returned(result)
            if owners is not None and (FOLDED in dims or not module._alone):
                owners.refuse_others_places(result, self.told.compared[self.call.kind].dims)
        except Exception as error:
            if isinstance(error, NOT_OF_THE_FORWARD) or is_of_checkpoint(error):
                raise
            del heard[before:]
            return None, None
        if run.failed or run.leaves_something():
            return None, None
        return result, (len(tensors_of(result)), *run.way_gone(), *heard[before:])

    @cached_property
    def lent(self) -> dict[Slot, Tensor]:
        """The parameters that get a value per sample in it, by where they are."""
        return {place: parameter for place, parameter, _ in self.module._own()}

    def judged(self, *, hooks: bool) -> tuple[Verdict, Way | None]:
        """Whether the forward on the whole batch gives what it gives sample by sample, and the way it has gone."""
        mapper = self.module._mapper(self.call)
        if any(weight.is_meta for weight in mapper.expanded):
            return Verdict.UNCLEAR, None
        try:
            with self.module._unnoticed():
                trial = Trial(mapper, hooks=hooks)
                compared = trial.told()
                return trial.judged(compared.dims, self.attempt) if compared.alike else (Verdict.WRONG, None)
        except torch.OutOfMemoryError:  # a comparison takes more than a step
            return Verdict.WRONG, None


class _OneAlone:
    """What one sample of a call gives alone, beside a forward on the whole batch that comparisons have found right.

    Values may lead that where samples meet, as in a clamp by a norm over the batch, though it goes a known way.

    An argument may have B rows by chance, as a mask `(T, T)`, and be read as one with a row per sample, which makes no
    difference on the whole batch. Where a sample cannot run with its row alone, all rows are given to it.

    Attributes:
        dims: Where the samples stand in the arguments.
        runs: Whether a sample can run alone at all.
        given: What it gives then; `None` where random numbers leave nothing to compare.
    """

    def __init__(self, module: Any, call: Called, number: int) -> None:
        self.module, self.call, self.number = module, call, number
        self.dims, self.runs, self.given = tuple(call.dims), False, None
        first = [dim is None for dim in call.dims].index(False)
        others: list[Dims] = [() if dim is None else (None,) for dim in call.dims]
        others[first] = ()
        for dims in readings(call.dims, others):
            leaves = zip(call.leaves, dims, strict=True)
            arguments = [x if dim is None else of_sample(x, dim, number, call.batch) for x, dim in leaves]
            try:
                self.given, self.dims, self.runs = self._given(arguments), dims, True
                return
            except NOT_OF_THE_FORWARD:
                raise
            except Exception:
                continue

    def agrees(self, result: Any) -> bool:
        """Whether the result for all has the same for this sample; also where nothing can be compared."""
        if self.given is None:
            return self.runs
        return _are_near([x for x, _ in self._with_samples(self.given)], self._part(tensors_of(result)))

    def depends_on_others(self, result: Any) -> bool:
        """Whether this sample's result is another one where all others are zero, or nothing can tell.

        If it is the same, rounding alone has led the sample another way, as where the nearest entry of a codebook is
        chosen: in a batch of the same size numbers are rounded in the same way.
        """
        leaves = zip(self.call.leaves, self.dims, strict=True)
        try:
            beside_zeros = self._given([x if dim is None else self._with_one(x, dim) for x, dim in leaves])
        except (RuntimeError, ValueError, IndexError):  # zeros may be no arguments for it, as of lengths
            return True
        both = [self._part(tensors) for tensors in (beside_zeros or [], tensors_of(result)) if tensors]
        return len(both) < 2 or not _are_near(*both)

    def _given(self, leaves: list[Any]) -> list[Tensor] | None:
        """What the plain forward gives for other arguments; `None` where it draws random numbers."""
        plain = Plain(self.module, tree_unflatten(leaves, tree_structure((self.call.args, self.call.kwargs))))
        plain.left = self.module._told.left.get(self.call.kind, ())
        tensors = plain.first()
        return None if plain.is_random else tensors

    def _part(self, tensors: list[Tensor]) -> list[Tensor]:
        return [of_sample(x.detach(), dim, self.number, self.call.batch) for x, dim in self._with_samples(tensors)]

    def _with_samples(self, tensors: list[Tensor]) -> list[tuple[Tensor, int]]:
        """Those in which samples stand, and where; a mean or a sum over the samples is left out.

        None of them where a sample alone gives another number of results than the batch.
        """
        dims = self.module._told.compared[self.call.kind].dims
        if len(tensors) != len(dims):
            return []
        return [(x, dim) for x, dim in zip(tensors, dims, strict=True) if dim not in (MEAN, SUM)]

    def _with_one(self, leaf: Tensor, dim: int) -> Tensor:
        """A tensor of all samples in which all but this one are zero."""
        zeros = torch.zeros_like(leaf)
        of_sample(zeros, dim, self.number, self.call.batch).copy_(of_sample(leaf, dim, self.number, self.call.batch))
        return zeros


def _are_near(some: list[Tensor], others: list[Tensor]) -> bool:
    if [x.shape for x in some] != [x.shape for x in others]:
        return False
    return all(near(x, y, 1.0) for x, y in zip(some, others, strict=True))


def as_one_operation(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in which nobody looks for samples that take each other's places, but for what it changes."""
    order, updates = module._recorder.order, [mode for mode in function_modes() if isinstance(mode, Updates)]

    def looked_after(*args: Any) -> Any:
        with ExitStack() as stack:
            for mode in updates:
                stack.enter_context(mode)
            return function(*args)

    return function(*args) if order is None else order.as_one_operation(looked_after, args, {})
