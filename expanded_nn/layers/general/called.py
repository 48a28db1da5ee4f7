"""What a forward of the general rule is called with, and the parts of one sample.

Arguments in objects that torch's trees do not open, such as dataclasses, are opened here, for the call.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, MappingView
from functools import partial
from types import FunctionType, GeneratorType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import FOLDED, unfolded
from expanded_nn.common.bytecode import variables_around
from expanded_nn.common.containers import Opened, has_dict, holds_tensors, leaves_of, rebuilt
from expanded_nn.common.modes import checkpoint_hooks, versions_of
from expanded_nn.modules.layout import refusal


@dataclasses.dataclass
class Called:
    """What a forward is called with."""

    args: Any
    kwargs: Any
    batch: int
    leaves: list[Any]  # of `args` and `kwargs`
    dims: list[int | None]  # where the samples stand in each leaf, if it has any, or `FOLDED`
    inputs: list[Tensor]  # the tensors among the leaves, but for single numbers
    kind: Any  # what a trial finds holds for all calls of the same kind
    is_surely_folded: bool = False  # whether folded leaves are views of the model's arguments, with the samples first

    def __post_init__(self) -> None:
        self.versions = versions_of(self.inputs)

    def refuse_changes(self, module: Any, *, counts: bool = False) -> None:
        """Raises if the forward has to run on the arguments again, and has changed one of them in place.

        It has to where it was in vain, or where it `counts` in attributes.
        """
        if self.versions != versions_of(self.inputs):
            raise complaint(
                module.qualified_name,
                "its forward has changed an argument in place, and has to run once more, as it "
                + ("counts in attributes" if counts else "has done what it did not do in earlier calls"),
                "a forward that leaves its arguments as they are",
                "Write x = x + y in place of x += y, or change a copy, x = x.clone()."
                + ("" if counts else " Or call the model again: what the forward has done is known then."),
            )

    def by_sample(self, leaves: list[Any]) -> list[tuple[Any, int | None]]:
        """Leaves like those of the call, folded ones with a dimension for the samples, and where the samples stand."""
        return [unfolded(leaf, dim, self.batch) for leaf, dim in zip(leaves, self.dims, strict=True)]

    def kind_of_ways(self) -> Any:
        """The `kind` for comparisons with the forward on the whole batch.

        A checkpoint counts what is saved, even for a result that is dropped. So in it sizes that equal B by chance,
        which may lead another way, make another kind.
        """
        if checkpoint_hooks() is None:
            return self.kind
        return self.kind, *(bool(n == self.batch) for tensor in self.inputs for n in tensor.shape)


def is_cache(leaf: Any) -> bool:
    """Whether it is a cache, which models of `transformers` return for decoding: no loss reads it."""
    return "Cache" in type(leaf).__name__


def of_sample(leaf: Tensor, dim: int, sample: int, batch: int) -> Tensor:
    """The part of one sample, as a batch of one."""
    if dim != FOLDED:
        return leaf.narrow(dim, sample, 1)
    count = len(leaf) // batch
    return leaf[sample * count : (sample + 1) * count]


def once_per_sample(x: Tensor, dim: int, batch: int) -> Tensor:
    """A tensor; if it has a single row that all samples share, that row once per sample."""
    if x.dim() <= dim or dim < 0 or x.shape[dim] != 1:
        return x
    return x.expand(*x.shape[:dim], batch, *x.shape[dim + 1 :])


def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, opened where there are such objects in them."""
    return tuple(map(_opened, args)), {name: _opened(value) for name, value in kwargs.items()}


def _opened(value: Any) -> Any:
    return Opened(value, stays=True) if any(map(holds_tensors, tree_leaves(value))) else value


def held_by(value: Any) -> Any:
    """What a function, an iterator, a view of a dict or an object with slots holds; of anything else, that itself."""
    if isinstance(value, GeneratorType):
        return [] if value.gi_frame is None else [*map(held_by, value.gi_frame.f_locals.values())]
    if isinstance(value, Iterator | MappingView) or (hasattr(value, "__slots__") and not has_dict(value)):
        held = gc.get_referents(value)
        return [held_by(each) for one in held for each in (one if isinstance(one, tuple) else [one])]
    if isinstance(value, partial):
        return [value.args, value.keywords, held_by(value.func)]
    return variables_around(value) if isinstance(value, FunctionType) else value


def keeping(module: Any, what: str) -> PerSampleError:
    """The error of a forward that keeps tensors for the next call."""
    return refusal(  # a larger module may make what it keeps them in
        module,
        f"its forward keeps tensors in {what}",
        "a forward that keeps nothing for the next call",
        "Do without the cache (use_cache=False), or the statistic of the batch, in per-sample mode; keep what the loss "
        "needs in an attribute of the module itself, not of an object in it; or write the per-sample forward with "
        "@expands.",
    )


def called(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of a module returns for opened arguments; it is given copies of the objects in them.

    Raises:
        PerSampleError: If it puts other tensors into one, which the caller would not see.
    """
    if not any(type(value) is Opened for value in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    args, kwargs = tuple(map(_closed, args)), {name: _closed(value) for name, value in kwargs.items()}
    before = leaves_of((args, kwargs))
    result, after = forward(*args, **kwargs), leaves_of((args, kwargs))
    if len(before) != len(after) or any(leaf is not other for leaf, other in zip(before, after, strict=True)):
        raise keeping(module, "an argument")
    return result


def _closed(value: Any) -> Any:
    return rebuilt(value.value, iter(leaves_of(value.value))) if type(value) is Opened else value
