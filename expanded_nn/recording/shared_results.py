"""Results that all samples share: whether a forward takes one of their copies for all samples.

A layer's result for what all samples share has a copy for each sample: of positions `(1, T)` a table gives `(1, T,
dim)` in the plain model, and `(B, T, dim)` in per-sample mode. So `table(index)[0]`, which is harmless in the plain
model, would take the first sample's copy for all samples, and one row would get the gradient of all. Of positions
`(T,)` the plain model has `(T, dim)`: with copies, `normalize(table(index))` or `q @ table(index).mT` works along other
dimensions.

So each operation on such copies is done again, with copies that differ and with one of them alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.common.batch import may_have_derivatives, tensors
from expanded_nn.common.rounding import are_near
from expanded_nn.common.traced import is_traced, wait_for_values
from expanded_nn.recording.settings import RecorderLike

# operations that draw random numbers, or change a tensor in place; and those of them that change its dimensions
_NOT_REPEATED = re.compile(
    "dropout|rand|multinomial|bernoulli|gumbel|poisson|^normal$|^__i(?!nvert)|^__setitem__|[^_]_$"
)
_RESHAPES = re.compile("(squeeze|transpose|resize|strided|swapaxes|swapdims|^t)_$")


class Form(Enum):
    """What the plain result has in the dimension of the copies: size 1, no such dimension, or B equal rows."""

    ONE_ROW = auto()
    NEW = auto()
    REPEATED = auto()


_MOST_KEPT = 10_000  # operations with their arguments

# the dimension of the copies in a result, and the form of the plain one
CopiesDim = tuple[int, Form]


class Copy(NamedTuple):
    """A copy for each sample of what all of them share.

    Attributes:
        tensor: The copies.
        layer: The layer that they come from.
        dim: Where the samples stand in them.
        form: What the plain result has there.
    """

    tensor: Tensor
    layer: nn.Module
    dim: int
    form: Form

    def differing(self) -> Tensor:
        """Copies of which those beside each other differ."""
        x, count = self.tensor.detach(), self.tensor.shape[self.dim]
        factors = 1 + torch.arange(count, device=x.device) % 3
        factors = factors.to(x.dtype).view(-1, *[1] * (x.dim() - 1 - self.dim))
        return x * factors + (factors - 1)

    def alone(self, differing: Tensor, sample: int) -> Tensor:
        """That of one sample, as the plain model has it."""
        own = differing.narrow(self.dim, sample, 1)
        if self.form is Form.REPEATED:
            return own.expand_as(differing)
        return own.squeeze(self.dim) if self.form is Form.NEW else own


def repeat_over_samples(x: Tensor, *times: int) -> Tensor:
    """`x.repeat(B, ...)` where each sample has a copy already: the first dimension is not repeated again."""
    return x.expand(times[0], *[-1] * (len(times) - 1)).repeat(1, *times[1:])


class Copies:
    """The copies in a forward.

    Attributes:
        recorder: The recorder of the model.
        known: The copies by their ids.
    """

    def __init__(self, recorder: RecorderLike) -> None:
        self.recorder = recorder
        self.known: dict[int, Copy] = {}

    def note(self, x: Tensor, layer: nn.Module, dim: int, *, is_new: bool) -> None:
        """Notes copies."""
        self.known[id(x)] = Copy(x, layer, dim, Form.NEW if is_new else Form.ONE_ROW)

    def repeats_over_samples(self, x: Any, *times: Any) -> bool:
        """Whether `x.repeat(*times)` is to make a copy for each sample, and each has one already."""
        copy = self.known.get(id(x))
        if copy is None or copy.form is Form.REPEATED or copy.dim:
            return False
        return len(times) == x.dim() and bool(times[0] == x.shape[0])

    def look_at(self, func: Any, args: Any, kwargs: Any, result: Any, *, are_samples: Callable[[Tensor], bool]) -> None:
        """Raises where an operation does something else with the copies than with one alone.

        `are_samples` tells of a tensor that has a dimension of size B whether it may have the samples there.
        """
        copies = [self.known[id(x)] for x in tensors((args, kwargs)) if id(x) in self.known]
        results = _numbers(result) if copies else []
        if not results or self.recorder.general_rule is not None:
            return
        told = self.recorder.escalation.known_copy_operations
        if is_traced():  # what eager calls have told holds here
            if not told:
                wait_for_values("it looks at what all samples share")
            return
        first, leaves, name = copies[0], tree_leaves((args, kwargs)), getattr(func, "__name__", "")
        batch = first.tensor.shape[first.dim]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.known]
        meets_samples = any(batch in x.shape and are_samples(x) for x in others)
        if _RESHAPES.search(name):
            raise self.recorder.forward.taking_apart(first.layer, name)
        if _NOT_REPEATED.search(name):
            alike = [x for x in results if x.shape == first.tensor.shape]
            self.known.update({id(x): first._replace(tensor=x) for x in alike if not meets_samples})
            return
        key = (func, meets_samples, *map(self._kind, leaves))
        if key not in told:
            found = self._compared(func, args, kwargs, batch, meets_samples=meets_samples)
            if found is None:
                raise self.recorder.forward.taking_apart(first.layer, "select" if name == "__getitem__" else name)
            if len(told) == _MOST_KEPT:  # as where a number in the arguments is another one in each call
                told.clear()
            told[key] = found
        for x, place in zip(results, told[key], strict=True):
            if place is not None:
                self.known[id(x)] = Copy(x, first.layer, *place)

    def _kind(self, leaf: Any) -> Any:
        """A key: what is true of one argument is true of all with the same key."""
        if not isinstance(leaf, Tensor):
            return str(leaf)
        copy = self.known.get(id(leaf))
        return tuple(leaf.shape), None if copy is None else (copy.dim, copy.form)

    def _compared(
        self, func: Any, args: Any, kwargs: Any, batch: int, *, meets_samples: bool
    ) -> list[CopiesDim | None] | None:
        """Where the samples stand in each result; `None` for one that has no copy for each of them.

        The operation is called with copies that differ, and with that of one sample alone: both have to agree. `None`
        for all where they do not. Two samples are tried, as one may agree by chance, where the operation takes the last
        or the largest.
        """
        leaves, structure = tree_flatten((args, kwargs))
        copies = [self.known.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves]
        differing = [x if copy is None else copy.differing() for x, copy in zip(leaves, copies, strict=True)]
        whole = _called(func, differing, structure) or []
        is_any_new = any(copy is not None and copy.form is Form.NEW for copy in copies)

        def places(sample: int) -> list[list[CopiesDim | None]]:
            """Where the samples may stand in each result, as one of them tells."""
            alone = [x if copy is None else copy.alone(x, sample) for x, copy in zip(differing, copies, strict=True)]
            results = _called(func, alone, structure)
            if results is None:  # a size that the forward has asked for is 1 in the plain model
                results = _called(func, [1 if type(x) is int and x == batch else x for x in alone], structure)
            if results is None or len(whole) != len(results):
                return []
            found = (self._places(*pair, sample, batch, meets_samples) for pair in zip(whole, results, strict=True))
            lost = None if is_any_new else Form.NEW  # which no operation on copies of another form gives
            return [[place for place in own if place is None or place[1] is not lost] for own in found]

        both = [[place for place in own if place in other] for own, other in zip(places(0), places(1), strict=False)]
        return [own[0] for own in both] if both and all(both) else None

    def _places(
        self, whole: Tensor, alone: Tensor, sample: int, batch: int, meets_samples: bool
    ) -> Sequence[CopiesDim | None]:
        """Where the samples may stand in the result for all copies, as one of them tells; see `_compared`."""
        usual = self.recorder.settings.samples_dim(whole.dim())
        if whole.shape == alone.shape:
            dims = [i for i, n in enumerate(whole.shape) if n == batch]
            dims = [usual] if usual in dims else dims
            if not dims:  # a loss of all samples, or what does not depend on the copies
                return [None] if meets_samples or torch.equal(whole, alone) else []
            alike = [dim for dim in dims if are_near(whole.select(dim, sample), alone.select(dim, sample))]
            return [None] * bool(alike) if meets_samples else [(dim, Form.REPEATED) for dim in alike]
        if meets_samples:
            return []
        is_new = whole.dim() > alone.dim()
        found: list[CopiesDim | None] = []
        for dim in dict.fromkeys((usual, 0)) if is_new else range(alone.dim()):
            one = alone.unsqueeze(dim) if is_new else alone
            is_whole = list(whole.shape) == [*one.shape[:dim], batch, *one.shape[dim + 1 :]]
            if is_whole and one.shape[dim] == 1 and are_near(whole.narrow(dim, sample, 1), one):
                found.append((dim, Form.NEW if is_new else Form.ONE_ROW))
        return found

    def follow(self, arguments: Any, result: Any) -> None:
        """Notes that what a layer computes from copies, and from no samples, are copies."""
        inputs = list(tensors(arguments))
        copies = [self.known[id(x)] for x in inputs if id(x) in self.known]
        if not copies:
            return
        first, others = copies[0], [x for x in inputs if id(x) not in self.known]
        batch = first.tensor.shape[first.dim]
        if not all(isinstance(x, Tensor) and batch not in x.shape for x in others):
            return
        for x in _numbers(result):
            if x.dim() > first.dim and x.shape[first.dim] == first.tensor.shape[first.dim]:
                self.known[id(x)] = first._replace(tensor=x)

    def refuse_returned(self, result: Any) -> None:
        """Raises where B places follow the copies in what the forward returns.

        They stand where the samples do, as soon as the plain result's row is gone. So it is with
        `model(x.unsqueeze(0)).squeeze(0)`, where they may be the samples.
        """
        for x in tensors(result):
            copy = self.known.get(id(x))
            sizes = () if copy is None else copy.tensor.shape[copy.dim : copy.dim + 2]
            if copy is not None and copy.form is not Form.REPEATED and len(sizes) == 2 and sizes[0] == sizes[1]:
                raise self.recorder.forward.taking_apart(copy.layer, "return")


def _numbers(result: Any) -> list[Tensor]:
    return [x for x in tensors(result) if isinstance(x, Tensor) and may_have_derivatives(x)]


def _called(func: Any, leaves: list[Any], structure: TreeSpec) -> list[Tensor] | None:
    """The results, `None` if it fails."""
    args, kwargs = tree_unflatten(leaves, structure)
    try:
        with torch.no_grad():
            return _numbers(func(*args, **kwargs))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
