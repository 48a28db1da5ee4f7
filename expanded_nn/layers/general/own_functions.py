"""Autograd Functions of the user's that `vmap` cannot follow: each sample goes through such a Function alone.

torch's `vmap` needs a Function to have a `setup_context` and a rule of its own. Most that people write have neither, as
an estimator that lets gradients straight through a rounding. All that is around the Function stays on the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import handle_torch_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.common.modes import is_batched, outside_of_vmap, transforms
from expanded_nn.common.traced import refuse_values
from expanded_nn.recording.lift import OfAllSamples, with_tensors

# Classes of tensors that stand for parameters, and that a Function would take for plain tensors (`batched.py`).
STAND_INS: set[type[Tensor]] = set()


class _Forwards(local):
    """How many forwards of the general rule run in a thread, in which Functions are looked at."""

    running = 0


_FORWARDS = _Forwards()
_torchs_apply: Any = Function.apply.__func__  # type: ignore[attr-defined]


@contextmanager
def functions_looked_at() -> Iterator[None]:
    """Lets each sample go alone through Functions that `vmap` cannot follow.

    torch calls nothing where a Function is applied. So `Function.apply` is replaced, when this is first called and for
    good; outside of this context it does what it did.
    """
    if Function.apply.__func__ is _torchs_apply:  # type: ignore[attr-defined]
        Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
    _FORWARDS.running += 1
    try:
        yield
    finally:
        _FORWARDS.running -= 1


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`."""
    if _FORWARDS.running and not issubclass(cls, OfAllSamples):
        stand_ins = [arg for arg in args if type(arg) in STAND_INS]
        if stand_ins:
            return handle_torch_function(cls.apply, stand_ins, *args, **kwargs)
        # one that is given a module or a function runs a part of the forward, in whose modules tensors are mapped
        if transforms() == 1 and not _is_followed(cls) and not any(map(callable, tree_leaves((args, kwargs)))):
            return _sample_by_sample(cls, args, kwargs)
    return _torchs_apply(cls, *args, **kwargs)


def _is_followed(cls: Any) -> bool:
    """Whether `vmap` can follow a Function."""
    has_rule = cls.generate_vmap_rule or cls.vmap is not Function.vmap
    return has_rule and cls.setup_context is not Function.setup_context


class _Applied:
    """A Function that is applied to one sample after the other, within a `vmap` over the samples."""

    def __init__(self, cls: Any, structure: TreeSpec) -> None:
        self.cls, self.structure = cls, structure
        self.result: Any = None  # of the last sample

    def __call__(self, batch: int, in_dims: Sequence[int | None], leaves: Sequence[Any]) -> tuple[Any, Any]:
        refuse_values(f"the samples go through the autograd Function {self.cls.__name__} one by one")
        pairs, results = list(zip(leaves, in_dims, strict=True)), []
        for number in range(batch):
            # `select`, as of what `unbind` gives none may be changed in place
            of_one = [leaf if dim is None else leaf.select(dim, number) for leaf, dim in pairs]
            args, kwargs = tree_unflatten(of_one, self.structure)
            self.result = _torchs_apply(self.cls, *args, **kwargs)
            results.append([leaf for leaf in tree_flatten(self.result)[0] if isinstance(leaf, Tensor)])
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)


def _sample_by_sample(cls: Any, args: Any, kwargs: Any) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) and is_batched(leaf) for leaf in leaves):  # of what all samples share
        with outside_of_vmap():
            return _torchs_apply(cls, *args, **kwargs)
    applied = _Applied(cls, structure)
    seen = OfAllSamples.apply(applied, *leaves)  # type: ignore[no-untyped-call]
    return with_tensors(*tree_flatten(applied.result), seen)
