"""Autograd Functions of the user's that `vmap` cannot follow: each sample goes through such a Function alone.

torch's `vmap` needs a Function to have a `setup_context` and a rule of its own. Most that people write have neither, as
an estimator that lets gradients straight through a rounding. All that is around the Function stays on the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import local
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import handle_torch_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.common.meanwhile import OfAllThreads
from expanded_nn.common.modes import function_modes, is_batched, outside_of_vmap, transforms, version_of
from expanded_nn.common.traced import refuse_values
from expanded_nn.recording.lift import OfAllSamples, heard_by, with_tensors

# Classes of tensors that stand for parameters, and that a Function would take for plain tensors (`batched.py`).
STAND_INS: set[type[Tensor]] = set()


class _Forwards(local):
    """How many forwards of the general rule run in a thread, in which Functions are looked at."""

    running = 0


_FORWARDS = _Forwards()
_APPLY = vars(Function)["apply"]  # a class method
_APPLY_IN_PYTHON: Any = getattr(_APPLY, "__func__", None)


def _torchs_apply_of() -> Any:
    """What `Function.apply` does in torch, as a function of the class and its arguments."""
    if hasattr(Function, "_torchs_apply"):  # this is imported again
        return Function._torchs_apply
    if _APPLY_IN_PYTHON is None:
        return lambda cls, *args, **kwargs: _APPLY.__get__(None, cls)(*args, **kwargs)
    return FunctionType(
        _APPLY_IN_PYTHON.__code__, _APPLY_IN_PYTHON.__globals__, "apply", closure=_APPLY_IN_PYTHON.__closure__
    )


_torchs_apply = _torchs_apply_of()


@contextmanager
def functions_looked_at() -> Iterator[None]:
    """Lets each sample go alone through Functions that `vmap` cannot follow.

    torch calls nothing where a Function is applied. So `Function.apply` gets other code, when this is first called and
    for good; outside of this context it does what it did. It stays the same object: many bind it when they are
    imported, `sign = Sign.apply`, and `torch.compile` knows such names by comparing them with it. A torch whose own
    code has other free variables keeps it, and the samples go through the module in a loop.

    Where torch has it in C, as in torch 2.15, `Function.apply` is another one within this context. Names that were
    bound before are torch's then, and the samples go through modules that use them in a loop.
    """
    is_in_c, code = _APPLY_IN_PYTHON is None, _OtherCode.apply.__code__
    is_new = getattr(Function, "_apply_of_expanded_nn", None) is not _apply
    if is_new and not is_in_c and _APPLY_IN_PYTHON.__code__.co_freevars == code.co_freevars:
        Function._torchs_apply = staticmethod(_torchs_apply)  # type: ignore[attr-defined]
        Function._apply_of_expanded_nn = staticmethod(_apply)  # type: ignore[attr-defined]
        _APPLY_IN_PYTHON.__code__ = code
    with _IN_PLACE_OF_C if is_in_c else nullcontext():
        _FORWARDS.running += 1
        try:
            yield
        finally:
            _FORWARDS.running -= 1


@contextmanager
def _in_place_of_c() -> Iterator[None]:
    Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = _APPLY  # type: ignore[method-assign]


# `Function.apply` in place of torch's, as long as a forward of any thread looks at Functions
_IN_PLACE_OF_C = OfAllThreads(_in_place_of_c)


class _OtherCode:
    """What `Function.apply` does instead, among torch's own names: `__class__` is `Function` there."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return __class__._apply_of_expanded_nn(cls, *args, **kwargs)  # type: ignore[name-defined]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`."""
    if not _FORWARDS.running or issubclass(cls, OfAllSamples):
        return _torchs_apply(cls, *args, **kwargs)
    stand_ins = [arg for arg in args if type(arg) in STAND_INS]
    if stand_ins:  # not `cls.apply`, which may be the user's own and have been called already
        return handle_torch_function(MethodType(_apply, cls), stand_ins, *args, **kwargs)
    # one that is given a module or a function runs a part of the forward, in whose modules tensors are mapped
    if transforms() == 1 and not _is_followed(cls) and not any(map(callable, tree_leaves((args, kwargs)))):
        return _sample_by_sample(cls, args, kwargs)
    return _torchs_apply(cls, *args, **kwargs)


def is_apply(func: Any) -> bool:
    """Whether it applies a Function to what stands for parameters."""
    return type(func) is MethodType and func.__func__ is _apply


def _is_followed(cls: Any) -> bool:
    """Whether `vmap` can follow a Function."""
    has_rule = cls.generate_vmap_rule or cls.vmap is not Function.vmap
    return has_rule and cls.setup_context is not Function.setup_context


class _Applied:
    """A Function that is applied to one sample after the other, within a `vmap` over the samples."""

    def __init__(self, cls: Any, structure: TreeSpec) -> None:
        self.cls, self.structure = cls, structure
        self.modes = function_modes()  # torch takes them off for what leaves a `vmap`
        self.result: tuple[list[Any], TreeSpec] | None = None  # that of the first sample

    def __call__(self, batch: int, in_dims: Sequence[int | None], leaves: Sequence[Any]) -> tuple[Any, Any]:
        if batch != 1:
            refuse_values(f"the samples go through the autograd Function {self.cls.__name__} one by one")
        pairs = list(zip(leaves, in_dims, strict=True))
        by_leaf = [[leaf] * batch if dim is None else list(leaf.unbind(dim)) for leaf, dim in pairs]
        is_shared = [dim is None or leaf.stride(dim) == 0 for leaf, dim in pairs]
        for parts, shared, (_, dim) in zip(by_leaf, is_shared, pairs, strict=True):
            if shared and dim is not None and batch:  # perhaps a parameter, which is not to change
                parts[0] = parts[0].clone()
        results = [self._of_one(parts, is_shared) for parts in zip(*by_leaf, strict=True)]
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    def _of_one(self, parts: Sequence[Any], is_shared: Sequence[bool]) -> list[Tensor]:
        """The tensors that it gives for one sample.

        Raises:
            RuntimeError: If it changes in place what all samples share, or what autograd lets nobody change; or if it
                gives other numbers than for the first sample.
        """
        shared = [part for part, every in zip(parts, is_shared, strict=True) if every and isinstance(part, Tensor)]
        versions = list(map(version_of, shared))
        args, kwargs = tree_unflatten(parts, self.structure)
        try:
            with heard_by(self.modes):
                result, structure = tree_flatten(_torchs_apply(self.cls, *args, **kwargs))
        except RuntimeError as error:
            if "modified inplace" not in str(error):
                raise
            raise self._not_by_vmap("changes its argument in place") from error
        if versions != list(map(version_of, shared)):
            raise self._not_by_vmap("changes in place what all samples share")
        self.result = self.result or (result, structure)
        if structure != self.result[1] or _values(result) != _values(self.result[0]):
            raise self._not_by_vmap("returns numbers that differ from sample to sample, and are no tensors")
        return [leaf for leaf in result if isinstance(leaf, Tensor)]

    def _not_by_vmap(self, what: str) -> RuntimeError:
        return RuntimeError(f"under vmap the autograd Function {self.cls.__name__} {what}")


def _values(leaves: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, bool | int | float | str)]


def _sample_by_sample(cls: Any, args: Any, kwargs: Any) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) and is_batched(leaf) for leaf in leaves):  # of what all samples share
        with outside_of_vmap():
            return _torchs_apply(cls, *args, **kwargs)
    applied = _Applied(cls, structure)
    seen = OfAllSamples.apply(applied, *leaves)  # type: ignore[no-untyped-call]
    assert applied.result is not None
    return with_tensors(*applied.result, seen)
