"""Forwards that start over: where a layer cannot tell the samples apart, a module around it runs sample by sample.

Every forward of a model begins here, with a comparison of its samples (`independence.py`) where one is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from expanded_nn._errors import PerSampleError, add_note, complaint, sentence, warn
from expanded_nn.common.modes import checkpoint_hooks, is_of_checkpoint, running_backward, uncounted, versions_of
from expanded_nn.common.steady import StateBefore
from expanded_nn.common.traced import is_traced
from expanded_nn.recording.comparisons import past_comparisons
from expanded_nn.recording.independence import Comparison
from expanded_nn.recording.leaf import Noted
from expanded_nn.recording.watch import refuse_outside_use


class Learned(NamedTuple):
    """Why a module goes sample by sample, where a forward found that it has to.

    Attributes:
        why: The error of a layer in it.
        kind: The kind of expanded module that it was before.
        loops: Whether the samples go through it one after the other, as `vmap` fails in it.
    """

    why: str
    kind: type
    loops: bool = False


OF_UNEQUAL_PARTS = (
    "Where samples have unequal numbers of rows, as of images, say per_sample(batch_size=1), call the model with each "
    "alone, and backward() after each: their rows append."
)


class Escalation:
    """The forwards of one model, which start over where a layer refuses an argument.

    It is run again, with the smallest module around that layer sent through the general rule, which compares with the
    plain forward. If that fails as well, the next larger module is tried, up to the one that was
    called. If all fail, the error of the layer is raised.

    Attributes:
        runs: Whether a forward runs that may start over.
        on_trial: The module that goes sample by sample for the first time.
        proven: The kinds of forwards that have succeeded once, and whether with several samples: layers refuse less of
            one. Nothing is kept of the state before these, as they will not start over.
        known_copy_operations: Operations that treat all copies of a shared result as they treat one
            (`shared_results.py`), by shapes and arguments; and where the samples stand in each result.
        tables: What the model has had beside its buffers from the start.
        has_loops: Whether the samples may go through a module one after the other, as was learned.
        has_met: Whether a comparison has found samples that depend on each other.
        in_vain: Why no module can go sample by sample for what the last search has found; empty if one can.
    """

    def __init__(self) -> None:
        self.runs = False
        self.on_trial: Any = None
        self.proven: dict[Any, bool] = {}
        self.known_copy_operations: dict[Any, list[Any]] = {}
        self.tables: list[Noted] = []
        self.has_loops = self.has_met = False
        self.in_vain = ""

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the module that was called."""
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            raise complaint(
                module._recorder.name_of(module),
                "torch.fx traces it symbolically, without tensors, which have no number of samples",
                "per-sample mode off",
                "Trace the model before convert, or switch per_sample(False) for it.",
            )
        kinds = [(name, type(value)) for name, value in kwargs.items()]
        kind = (id(module), module.training, *map(type, args), *kinds)
        if not module._recorder.settings.escalate:
            return self._tried(module, args, kwargs)
        several = self.proven.get(kind)
        is_single = not several and _samples_in(module, args, kwargs) == 1
        is_proven = several or (several is False and is_single)
        state = None if is_proven else StateBefore(module, (args, kwargs))
        attempts = _Attempts(self, module)
        if state is not None and checkpoint_hooks() is not None:
            # A checkpoint counts the tensors that a forward saves, those of failed attempts, too. So the attempts are
            # made without it, and the forward that succeeds is run once more.
            with uncounted(), state.updates:
                self._result_of(attempts, args, kwargs, state)
            state.restore()
            self.proven[kind] = not is_single  # now, as the checkpoint may end the forward that follows early
        try:
            with nullcontext() if state is None else state.updates:
                result = self._result_of(attempts, args, kwargs, state)
        except PerSampleError:
            self.proven.pop(kind, None)  # so that the next call can start over
            raise
        attempts.warn(rolled_back=state is not None)
        if not several:
            self.proven[kind] = not is_single
        return result

    def _result_of(
        self, attempts: _Attempts, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateBefore | None
    ) -> Any:
        """The result of the first attempt that succeeds.

        A use of a parameter outside of its module is looked for in the first forward of a kind, where a module can
        still be sent through the general rule for it. If none helps, it is run once more without that look: what it
        returns is right, and the backward raises the error.
        """
        looks_for_outside_use = state is not None
        if looks_for_outside_use:
            self.in_vain = ""
        is_plain = _Plain(args, kwargs)
        while True:
            try:
                result = self._tried(attempts.called, args, kwargs)
                if looks_for_outside_use:
                    refuse_outside_use(attempts.called._recorder, result)
                return result
            except Exception as error:
                final = attempts.send_another_module(error)
                if final is error and not isinstance(error, PerSampleError):  # the user's own, which leaves what it has
                    attempts.undo()
                    del final  # or else this frame and the error hold each other, and all that the forward has computed
                    raise
                may_start_over = checkpoint_hooks() is None and is_plain.still() if state is None else state.restore()
                if final is None and may_start_over:
                    continue
                attempts.undo()
                final = final or attempts.refused
                if not may_start_over or not getattr(final, "is_early", False):
                    raise final from final.__cause__
                looks_for_outside_use = False
            except BaseException:  # as of Ctrl-C
                attempts.undo()
                raise

    def _tried(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the forward, whose samples are compared first, where it is time to.

        Raises:
            PerSampleError: If they are not independent.
        """
        past, batch = past_comparisons(module), None
        if module._recorder.settings.compare and module.calls_others and running_backward() < 0:
            if is_traced():
                past.wait_for_first()
            else:
                batch = _samples_in(module, args, kwargs)
        forward, refused, looked_at = partial(self._called, module), None, 0
        if batch is not None and past.are_due(batch) and (past.calls or not module.compares_first):
            comparison = Comparison(module, forward, (args, kwargs), batch, past.calls)
            looked_at = comparison.looks_at if torch.is_grad_enabled() else 0
            refused = comparison.refusal(is_first=past.looked_at < min(batch, 2))
        result = forward(args, kwargs)  # a layer that refuses its input says more
        if refused is not None:
            self.has_met = True
            raise refused
        past.note(batch, looked_at)
        return result

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward, which may be a part of a `one_pass`."""
        forward = module._recorder.forward
        if forward is not None and forward.module is module and forward.order is not None:
            forward.order.constants.leave_out((args, kwargs))  # within a `one_pass` of its own
        self.runs = True
        try:
            result = module._in_pass(args, kwargs)
            if forward is not None:
                forward.finish(module, result)
            return result
        except Exception as error:
            if forward is not None:
                forward.blame(error)
            raise
        finally:
            self.runs = False


def _samples_in(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """B, if anything tells it."""
    recorder = module._recorder
    told = recorder.settings.batch_size if recorder.forward is None else recorder.forward.own_pass.batch
    return module.samples_in(*args, **kwargs) if told is None else told  # type: ignore[no-any-return]


class _Attempts:
    """What has been tried in one forward.

    Attributes:
        escalation: The escalation of the model.
        called: The module that was called.
        refused: The error that the module on trial is to avoid.
        of_results: The first error that is about results, where `refused` is about rows.
        larger: The modules around the one on trial that are left to try, nearest first.
        before: The modules sent through the general rule, with what they had learned before.
    """

    def __init__(self, escalation: Escalation, called: Any) -> None:
        self.escalation, self.called = escalation, called
        escalation.on_trial = None
        self.refused: Any = None
        self.of_results: Any = None
        self.larger: Iterator[Any] = iter(())
        self.before: dict[Any, Learned | None] = {}

    def send_another_module(self, error: Any) -> Any:
        """Sends another module through the general rule, or returns the error to raise if none is left."""
        by, trial = getattr(error, "refused_by", None), self.escalation.on_trial
        if self._is_of_user(error, by):
            return error
        clear_frames(error.__traceback__)  # they hold what the forward has computed
        # the search begins: nothing is on trial, or what was has passed and another layer refuses
        begins = trial is None or by not in (None, trial, self.refused.refused_by)
        if begins:
            self.refused, self.of_results, self.larger = error, None, self._around(by)
        if getattr(error, "by_vmap", False) and self._make_general(by if begins else trial, loops=True):
            return None  # only `vmap` fails in it: its samples go one after the other
        if not begins:  # the one on trial has failed, so a larger one is next
            trial._learn(self.before[trial])
            abouts = [getattr(each, "about", "") for each in (self.refused, error)]
            if self.of_results is None and abouts == ["rows", "results"]:
                self.of_results = error
        if any(map(self._make_general, self.larger)):
            return None
        if error is self.refused:
            return self.refused
        if not isinstance(error, PerSampleError):  # perhaps one of the user's, who would not see it
            add_note(self.refused, f"sample by sample there is another error: {type(error).__name__}: {error}")
            return self.refused
        if error.about == "results" and self.of_results is not None:  # so other rows would be no better
            add_note(self.of_results, f"on the whole batch a layer had refused its rows: {self.refused}")
            return self.of_results
        self.escalation.in_vain = f"sample by sample it is not possible either: {error}"
        more = "" if OF_UNEQUAL_PARTS in self.escalation.in_vain else f" {OF_UNEQUAL_PARTS}"
        add_note(self.refused, f"{self.escalation.in_vain}{more}")
        return self.refused

    def _is_of_user(self, error: Any, by: Any) -> bool:
        """Whether an error seems to be the user's own: neither a layer's refusal, nor one of the module on trial."""
        if isinstance(error, torch.OutOfMemoryError) or is_of_checkpoint(error):
            return True
        return by is None and (self.escalation.on_trial is None or isinstance(error, PerSampleError))

    def _around(self, by: nn.Module | None) -> Iterator[Any]:
        """The modules around the module `by`, nearest first, up to the one that was called."""
        modules = dict(self.called.named_modules())
        # a module that is not within counts as a child of the one that was called
        path = next((path for path, module in modules.items() if module is by), "-")
        while path:
            path = path.rpartition(".")[0]
            yield modules[path]

    def _make_general(self, module: Any, *, loops: bool = False) -> bool:
        """Makes a module go sample by sample; whether it can."""
        learned = getattr(module, "_learned", None)
        kind = module._kind() if hasattr(module, "_learned") else None
        if kind is None or (loops and learned is not None and learned.loops):
            return False
        self.before.setdefault(module, learned)
        module._learn(Learned(sentence(self._why()), kind, loops))
        self.escalation.has_loops |= loops
        self.escalation.on_trial = module
        return True

    def _why(self) -> str:
        """The text of the error; torch's own says nothing of the layer whose result has another shape than it had."""
        if isinstance(self.refused, PerSampleError):
            return str(self.refused)
        name = self.called._recorder.name_of(self.refused.refused_by)
        return f"behind {name}, which gives a copy for each sample of what all share, torch raises: {self.refused}"

    def undo(self) -> None:
        """Makes the modules what they were before this forward."""
        self.escalation.on_trial = None
        for module, learned in self.before.items():
            module._learn(learned)

    def warn(self, *, rolled_back: bool) -> None:
        """Says which modules go sample by sample from now on, and why."""
        self.escalation.on_trial = None
        for module in self.before:
            for inner in module.modules() if module._learned is not None else ():
                if inner is not module and getattr(inner, "_learned", None) is not None:
                    inner._learn(None)
        new = [module for module, learned in self.before.items() if module._learned not in (None, learned)]
        if not new:
            return
        names = ", ".join(map(new[0]._recorder.name_of, new))
        loops = any(module._learned.loops for module in new)
        cls: Any = getattr(new[0], "plain_class", None) or type(new[0])
        remedy = "" if loops else f"alone({cls.__name__}) before convert does the same without this warning, and "
        again = "" if rolled_back else " What this forward had drawn or changed until then has happened twice."
        ways = [list(module._told.ways.values()) for module in new]
        cost = "Steps take longer, unless comparisons in the next ones find that the whole batch can run at once."
        in_loop, how = ", in a loop" * loops, f". {cost}"
        if all(known and all(way.known for way in known) for known in ways):
            how = ", where the whole batch cannot run at once. Here it can, as comparisons have found."
        warn(
            f"{names}: runs sample by sample from now on{in_loop}{how} "
            f"The reason: {new[0]._learned.why} {remedy}per_sample(escalate=False) makes it an error.{again}"
        )


class _Plain:
    """Arguments, of which it is asked whether a forward has left nothing behind in them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = (*args, *kwargs.values())
        self.versions = versions_of(self.values)

    def still(self) -> bool:
        """Whether all are tensors that were not changed in place, numbers or strings."""
        if not all(value is None or isinstance(value, Tensor | int | float | str) for value in self.values):
            return False
        return self.versions == versions_of(self.values)
