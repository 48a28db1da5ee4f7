"""The trial that the general rule makes first: the whole batch has to give what its samples give alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from expanded_nn._batch import has_derivatives
from expanded_nn._errors import complaint
from expanded_nn._steady import RandomStates, WithoutChance, copies, without_traces


class Compared(NamedTuple):
    """What came out when the results of the samples were compared with the plain forward of the whole batch.

    Attributes:
        alike: Whether they are the same; random results may not be comparable.
        dims: Where the samples stand in each result.
    """

    alike: bool
    dims: tuple[int, ...]

    def fits(self, ones: Sequence[Sequence[int]]) -> bool:
        """Whether the samples may stand there in other results."""
        return len(ones) == len(self.dims) and all(dim in where for dim, where in zip(self.dims, ones, strict=True))


def flatten(result: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a result, dataclasses taken apart as well."""
    leaves, structure = tree_flatten(result)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf)}
    for each in unknown:
        register_dataclass(each)
    return tree_flatten(result) if unknown else (leaves, structure)


@dataclasses.dataclass
class Mapped:
    """What came out of the forward, sample by sample.

    Attributes:
        returned: What the forward has returned, with the tensors of one sample.
        tensors: Those of all samples.
        ones: For each of them, where the samples may stand, likeliest first.
    """

    returned: Any
    tensors: list[Tensor]
    ones: list[list[int]]

    def with_samples_in(self, dims: Sequence[int]) -> Mapped:
        """The same with the samples in these dimensions."""
        moves = zip(self.tensors, self.ones, dims, strict=True)
        moved = [each.transpose(first, dim) if dim != first else each for each, (first, *_), dim in moves]
        return Mapped(self.returned, moved, self.ones)

    def result(self) -> Any:
        """What the forward returns for the whole batch."""
        tensors = iter(self.tensors)
        leaves, structure = flatten(self.returned)
        return tree_unflatten([next(tensors) if isinstance(each, Tensor) else each for each in leaves], structure)


class Trial:
    """Compares the samples' results with the plain forward of the whole batch: it has to say the same.

    It does not where the forward mixes samples, or where an argument that all samples share has B rows by chance. What
    the forward leaves behind goes, and what it draws is drawn again. Where it draws random numbers they are fixed for
    the comparison; where that does not help, a derivative tells whether samples are mixed.

    Args:
        module: The module, of the general rule.
        args: What its forward is about to be called with; so is `kwargs`.
        batch: B.
        mapped: Sends arguments through the forward sample by sample.
    """

    def __init__(self, module: Any, args: Any, kwargs: Any, batch: int, mapped: Callable[[list[Any]], Mapped]) -> None:
        self.module, self.batch, self.mapped = module, batch, mapped
        self.arguments = copies((args, kwargs))  # as the forward may change its own
        self.states = RandomStates([*module.modules(), self.arguments])
        self.expected = self.plain(hooks=False)
        self.is_random = self.states.restore()

    @torch.no_grad()
    def plain(self, *, hooks: bool) -> list[Tensor]:
        """The tensors that the plain forward returns for the whole batch."""
        args, kwargs = copies(self.arguments)
        with without_traces(self.module, hooks=hooks), self.module._children_inside({}):
            leaves, _ = flatten(self.module._plain_forward(*args, **kwargs))
        return [each for each in leaves if isinstance(each, Tensor)]

    @torch.no_grad()
    def compared(self, found: Mapped) -> Compared:
        """Where the samples stand in the results.

        Raises:
            PerSampleError: If the forward of the whole batch gives another result.
        """
        before = RandomStates([*self.module.modules(), self.arguments])
        try:
            return self._compared(found)
        finally:
            before.restore()

    def _compared(self, found: Mapped) -> Compared:
        if len(found.tensors) != len(self.expected):  # forward hooks of its children add to what it returns
            self.expected = self.plain(hooks=True)
            self.states.restore()
        dims = self._dims(found)
        if not self.is_random and self._agree(found, dims, self.expected):
            return Compared(True, dims)
        self.states.restore()
        if self.is_random:
            with WithoutChance():
                fixed = self._found_again()
                self.states.restore()
                if self._agree(fixed, dims, self.plain(hooks=False)):
                    return Compared(True, dims)
            found = fixed
            self.states.restore()
        with WithoutChance() if self.is_random else nullcontext():
            expected = self.plain(hooks=True)
            if self._agree(found, dims, expected):
                return Compared(True, dims)
            self.states.restore()
            repeats = all(map(_near, expected, self.plain(hooks=True)))
        self.states.restore()
        if (repeats and not self.is_random) or self._mixes(dims):
            raise complaint(
                self.module.qualified_name,
                "on the whole batch its forward gives another result than sample by sample",
                "samples that do not depend on each other, and arguments whose rows are the samples",
                "Do what mixes samples (a mean over the batch, a similarity of all pairs) outside of the module; give "
                "a tensor that all samples share to the module as a buffer. Random numbers for the whole batch have to "
                "come from torch's generators.",
            )
        return Compared(False, dims)

    @torch.no_grad()
    def _found_again(self) -> Mapped:
        """The samples' results once more, in the mode that is on now."""
        leaves, _ = tree_flatten(copies(self.arguments))
        with without_traces(self.module):
            return self.mapped(leaves)

    def _dims(self, found: Mapped) -> tuple[int, ...]:
        """Where the samples stand in each result, as its shape says."""
        dims = []
        for result, (first, *_), plain in zip(found.tensors, found.ones, self.expected, strict=True):
            moved = [dim for dim in range(result.dim()) if result.transpose(first, dim).shape == plain.shape]
            dims.append(first if first in moved or not moved else moved[0])
        return tuple(dims)

    def _agree(self, found: Mapped, dims: tuple[int, ...], expected: list[Tensor]) -> bool:
        results = found.with_samples_in(dims).tensors
        floats = [each for each in tree_leaves(self.arguments) if isinstance(each, Tensor) and has_derivatives(each)]
        sizes = (each.abs().where(each.isfinite(), 0).max() for each in floats if each.numel() and not each.is_meta)
        size = max(map(float, sizes), default=1.0)
        for result, plain, dim in zip(results, expected, dims, strict=True):
            if plain.dim() == result.dim() > 0 and plain.shape[dim] == 1:
                plain = plain.expand(*plain.shape[:dim], result.shape[dim], *plain.shape[dim + 1 :])
            if result.shape != plain.shape or not _near(plain, result.detach(), size):
                return False
        return True

    def _mixes(self, dims: tuple[int, ...]) -> bool:
        """Whether a sample's result depends on the arguments of the others, or nothing could tell."""
        leaves, structure = tree_flatten(copies(self.arguments))
        places = [self.module._sample_dim(leaf, self.batch) for leaf in leaves]
        inputs = [
            (leaf.requires_grad_(), place)
            for leaf, place in zip(leaves, places, strict=True)
            if place is not None and has_derivatives(leaf)
        ]
        args, kwargs = tree_unflatten(leaves, structure)
        with torch.enable_grad(), without_traces(self.module), self.module._children_inside({}):
            # behind an operation, as a forward may change its arguments in place
            args, kwargs = tree_map_only(Tensor, lambda each: each * 1 if each.requires_grad else each, (args, kwargs))
            result = [each for each in flatten(self.module._plain_forward(*args, **kwargs))[0] if _is_float(each)]
            ends = [
                each.select(dim, 0)
                for each, dim in zip(result, dims, strict=False)
                if each.requires_grad and each.dim() and each.shape[dim] == self.batch
            ]
        if not inputs or not ends:
            return True
        weights = [torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).to(each) for each in ends]
        grads = torch.autograd.grad(ends, [leaf for leaf, _ in inputs], weights, allow_unused=True)
        of_others = [
            grad.narrow(dim, 1, self.batch - 1)
            for grad, (_, dim) in zip(grads, inputs, strict=True)
            if grad is not None and self.batch > 1
        ]
        return any(bool(part.any()) for part in of_others)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and has_derivatives(leaf)


def _near(plain: Tensor, other: Tensor, size: float = 0.0) -> bool:
    """Whether two results differ by no more than rounding, of themselves or of inputs of such a size."""
    if not has_derivatives(plain) or plain.is_meta:
        return plain.shape == other.shape
    epsilon = torch.finfo(plain.dtype).eps
    finite = plain.isfinite()
    scale = plain.where(finite, 0).abs().max() if plain.numel() else torch.ones(())
    limit = 100 * epsilon**0.5 * scale + 1000 * epsilon * size
    return bool(((other - plain).abs() <= limit).logical_or(~finite).all())
