"""The settings of per-sample mode, and the recorder as the parts see it that it is put together from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor, nn

from expanded_nn._errors import complaint, refuse_no_bool, refuse_no_count
from expanded_nn.common.batch import batch_dim, own_batch_first
from expanded_nn.recording.backward import Backward
from expanded_nn.recording.leaf import Leaf, Leaves
from expanded_nn.recording.passes import Pass, Passes

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """What `per_sample` was told; see there."""

    loss_reduction: str = "mean"
    batch_first: bool = True
    batch_size: int | None = None
    materialize: bool = False
    accumulate_grad: bool = True
    keep_factors: bool = False
    escalate: bool = True
    compare: bool = True
    says_layout: bool = False  # whether `batch_first` was told

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f'per_sample: loss_reduction is {self.loss_reduction!r}; wanted "mean" or "sum".')
        if self.batch_size is not None:
            refuse_no_count("per_sample", "batch_size", self.batch_size)
        flags = {name: value for name, value in vars(self).items() if name not in ("loss_reduction", "batch_size")}
        refuse_no_bool("per_sample", **flags)
        if self.keep_factors and self.materialize:
            raise ValueError("per_sample: keep_factors and materialize are both True; wanted one of the two at most.")

    def samples_dim(self, dims: int, module: nn.Module | None = None) -> int:
        """Where the samples stand in a tensor of so many dimensions, of a module that may have a layout of its own."""
        own = None if module is None else own_batch_first(module)
        return batch_dim(dims, batch_first=self.batch_first if own is None else own)


class RecorderLike(Protocol):
    """The recorder, which stands above the parts that call it back; `recorder.py` says what is not said here."""

    settings: Settings
    forward: Any  # a `Forward`, which stands above this file
    general_rule: Any
    escalation: Any  # an `Escalation`, likewise
    passes: Passes
    backward: Backward
    leaves: Leaves

    @property
    def order(self) -> Any: ...  # an `Order`, likewise

    def modules(self) -> Iterator[nn.Module]: ...

    def name_of(self, member: nn.Module | Tensor) -> str: ...

    def holder_of(self, parameter: Tensor) -> nn.Module | None: ...

    def choose_pass(self, forward: Any) -> Pass: ...

    def expand(self, parameter: Tensor) -> Tensor: ...

    def deliver(self, pass_: Pass, leaf: Leaf, rows: Tensor | None, *, stand_alone: bool = False) -> None: ...


def refusing_other_settings(per_sample: Function) -> Function:
    """Makes an unknown setting a `TypeError` that lists the settings; Python's own would name only that one."""
    names = list(signature(per_sample).parameters)[2:]

    @wraps(per_sample)
    def switched(self: Any, *args: Any, **settings: Any) -> Any:
        unknown = sorted(settings.keys() - {"mode", *names})
        if unknown:
            wanted = f"some of {', '.join(names)}"
            remedy = "Correct the name; help(model.per_sample) says what each does."
            raise TypeError(str(complaint("per_sample", f"there are no settings {unknown}", wanted, remedy)))
        return per_sample(self, *args, **settings)

    return cast(Function, switched)
