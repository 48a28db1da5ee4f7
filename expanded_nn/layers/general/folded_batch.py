"""A forward on the whole batch that may fold its samples, as its graph tells whose each row is."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from expanded_nn.common.modes import saved_tensors_are_packed
from expanded_nn.common.steady import Attributes
from expanded_nn.layers.general.gradients import Verdict
from expanded_nn.layers.general.told import Way, Ways
from expanded_nn.layers.general.whole_batch import WholeBatch, as_one_operation
from expanded_nn.recording.lift import Slot, parameters_of
from expanded_nn.recording.recorder import modules_in


class FoldedBatch(WholeBatch):
    """The forward of a module in which all parameters get a value per sample, those of modules within as well."""

    follows_folds = True

    def suits(self) -> bool:
        """Whether its graph may tell whose the rows of each layer are.

        No parameter may be sharded, or have a batch dimension of its own.
        """
        are_plain = all(type(parameter) is nn.Parameter for parameter in self.lent.values())
        return are_plain and not saved_tensors_are_packed()

    def by_known_way(self, ways: Ways) -> Any:
        """The result, if it went a known way; if not, what it has kept is taken back.

        Where `vmap` follows, nothing is kept.
        """
        before = Attributes([*modules_in(self.module)]) if self.module.goes_in_a_loop() else None
        result = super().by_known_way(ways)
        if before is not None and result is NotImplemented:
            before.put_back()
        return result

    def attempt(self, args: Any, kwargs: Any) -> tuple[Any, Way | None]:
        """The same as one operation, as the graph tells of samples that take each other's places."""
        result: tuple[Any, Way | None] = as_one_operation(self.module, super().attempt, args, kwargs)
        return result

    def judged(self, *, hooks: bool) -> tuple[Verdict, Way | None]:
        """The same; once more, if the first time has shown that writes are to be looked at."""
        follows_writes = self.told.memo.follows_writes
        judged = super().judged(hooks=hooks)
        has_met_writes = self.told.memo.follows_writes and not follows_writes
        return super().judged(hooks=hooks) if has_met_writes else judged

    @cached_property
    def lent(self) -> dict[Slot, Tensor]:
        """The parameters that get a value per sample: those of all modules within."""
        return parameters_of(modules_in(self.module))
