"""What is known of one parameter, and the watch on it: whether something else than its layers adds to its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn._storage import Recycled
from expanded_nn._traced import assume, is_traced, refuse_values
from expanded_nn.factored import as_factored
from expanded_nn.recording.backward import accumulates, running_backward
from expanded_nn.recording.passes import Pass
from expanded_nn.recording.sharded import is_shard, is_zero

_LISTS = (nn.ParameterList, nn.ParameterDict, parametrize.ParametrizationList)  # of the module that holds them


class Sent:
    """What the expansions of a parameter have sent to it in one backward.

    One expansion's gradient has to arrive as the very same tensor, which costs nothing to see. Those of several passes
    are added up by autograd, in the order in which they were sent: the same sum is made here, and compared.

    Attributes:
        first: The gradient of the one expansion, and its version then; `None` once there are several.
        total: The sum of those of several passes that end in this backward.
        mixed: Whether something else was added to what the first of them had sent.
    """

    def __init__(self, gradient: Tensor) -> None:
        self.first: tuple[weakref.ref[Tensor], int] | None = (weakref.ref(gradient), gradient._version)
        self.total: Tensor | None = None
        self.mixed = False

    def add(self, gradient: Tensor) -> None:
        """Another expansion sends its own."""
        # the engine holds the first until now; if that is gone, a sum with something else has taken its place, and what
        # arrives is not equal to what is added up here
        before = self.total
        if self.first is not None:
            before, version = self.first[0](), self.first[1]
            self.mixed = before is not None and before._version != version
        self.total = gradient if before is None else (before + gradient).detach()
        self.first = None

    def is_all(self, arrived: Tensor) -> bool:
        """Whether what arrives at the parameter is this, no more."""
        if self.first is not None:
            # autograd adds in place what comes second, so that the tensor alone does not tell
            return self.first[0]() is arrived and self.first[1] == arrived._version
        return self.total is not None and not self.mixed and _equal(self.total, arrived.detach())


@dataclass(slots=True)
class Shown:
    """The `grad_sample` that was set last.

    Attributes:
        rows: The tensor, `(B, *shape)` of all passes together; `None` where there are no rows.
        passes: Whose rows they are, in this order.
        version: The tensor's version when it was set.
        has_room: Whether the store has made its memory, from its start, so that rows may follow behind it.
    """

    rows: Tensor | None = None
    passes: tuple[Pass, ...] = ()
    version: int = 0
    has_room: bool = False


@dataclass
class Place:
    """Where a parameter stands in the model.

    Attributes:
        module: The module that holds it.
        name: Its name there.
        shard: What the module shows in its place once FSDP has given back what it gathered.
    """

    module: weakref.ref[nn.Module]
    name: str
    shard: Tensor | None = None

    def look(self) -> bool:
        """Whether the module shows a shard now."""
        module = self.module()
        found = None if module is None else module._parameters.get(self.name)
        if not is_shard(found):
            return False
        self.shard = found
        return True


@dataclass(eq=False)
class Leaf:
    """What a recorder knows of one parameter.

    Attributes:
        parameter: The parameter, which may be a guest of `functional_call` and not live long.
        member: Whether it has been seen in the model, and is no guest.
        shown: Its `grad_sample`.
        sent: What its expansions have sent to it, by the backward's number.
        scales_rows: Whether its rows are scaled by B, as those of a mean over the samples.
        grad: `.grad` as it was seen last, and its version then.
        is_scaled: Whether `.grad` was scaled since it was cleared, so that the sum of the rows is no measure of it.
        has_more: Whether `.grad` holds something that no rows are of, so that their sum is no measure of it either.
        clipped: The `.grad` that clipping has set, and its version then.
        lacking: The `.grad` that has a part whose rows were dropped, as the parameter was frozen meanwhile.
        memory: Where its dense rows are written, if memory is used again.
        place: Where it stands, as far as that is known.
        handle: The hook that watches it.
    """

    parameter: weakref.ref[Tensor]
    member: bool = False
    scales_rows: bool = False
    shown: Shown = field(default_factory=Shown)
    sent: dict[int, Sent] = field(default_factory=dict)
    grad: tuple[weakref.ref[Tensor], int] | None = None
    is_scaled: bool = False
    has_more: bool = False
    clipped: tuple[weakref.ref[Tensor], int] | None = None
    lacking: weakref.ref[Tensor] | None = None
    memory: Recycled | None = field(default_factory=Recycled)
    place: Place | None = None
    handle: Any = None

    def show(self, rows: Tensor | None, passes: Iterable[Pass] = (), *, has_room: bool = False) -> None:
        """Sets `grad_sample`."""
        before, parameter = self.shown.rows, self.parameter()
        if rows is not None and before is not None and hasattr(before, "_processed"):
            rows._processed = True  # type: ignore[attr-defined]  # Opacus' mark on rows that a step has used
        self.shown = Shown(rows, tuple(passes), 0 if rows is None else rows._version, has_room)
        if parameter is not None:
            parameter.grad_sample = rows  # type: ignore[attr-defined]
        if self.place is not None and self.place.shard is not None:
            self.place.shard.grad_sample = rows  # type: ignore[attr-defined]

    def show_again(self, shown: Shown) -> None:
        """Sets `grad_sample` to what it was."""
        self.show(shown.rows)
        self.shown = shown

    def as_shown(self) -> Tensor | None:
        """The parameter as the model shows it between the passes: itself, or FSDP's shard of it."""
        if self.place is not None and self.place.shard is not None:
            return self.place.shard
        return self.parameter()

    def show_shard(self) -> None:
        """Hands the rows of a parameter that FSDP had gathered to the shard that is in its place."""
        if self.place is not None and self.shown.rows is not None and self.place.look():
            self.place.shard.grad_sample = self.shown.rows  # type: ignore[union-attr]

    def note_grad(self) -> None:
        """Keeps in mind what `.grad` is now."""
        parameter = self.as_shown()
        grad = None if parameter is None else parameter.grad
        if grad is not None:
            self.grad = (weakref.ref(grad), grad._version)
        elif self.grad is not None:
            self.grad = None

    def grad_is_as_noted(self) -> bool:
        """Whether `.grad` is the tensor that it was, in the same version."""
        parameter = self.as_shown()
        grad = None if parameter is None else parameter.grad
        if grad is None or self.grad is None:
            return grad is None and self.grad is None
        return self.grad[0]() is grad and self.grad[1] == grad._version

    def grad_is_another(self) -> bool:
        """Whether `.grad` is another tensor than it was."""
        parameter = self.as_shown()
        return self.grad is not None and parameter is not None and self.grad[0]() is not parameter.grad

    def note_foreign_part(self) -> None:
        """Keeps in mind that `.grad` holds something that no rows are of, so that their sum is no measure of it."""
        if self.shown.rows is None:
            parameter = self.as_shown()
            self.has_more = parameter is not None and parameter.grad is not None and not _vanishes(parameter.grad)

    def note_lacking(self) -> None:
        """The rows of what is in `.grad` are about to be dropped."""
        parameter = self.as_shown()
        if parameter is not None and parameter.grad is not None:
            self.lacking = weakref.ref(parameter.grad)

    def lacks_rows(self) -> bool:
        """Whether `.grad` still has a part whose rows were dropped."""
        parameter = self.as_shown()
        grad = None if parameter is None else parameter.grad
        if self.lacking is not None and (grad is None or self.lacking() is not grad or _vanishes(grad)):
            self.lacking = None
        return self.lacking is not None

    def has_own_measure(self) -> bool:
        """Whether `.grad` was scaled or clipped since it was cleared: the rows' sum is no measure of it."""
        parameter = self.as_shown()
        grad = None if parameter is None else parameter.grad
        return self.is_scaled or (self.clipped is not None and grad is not None and self.clipped[0]() is grad)

    def was_reset(self) -> bool:
        """Whether the user has set `grad_sample`."""
        return getattr(self.as_shown(), "grad_sample", None) is not self.shown.rows

    def was_cleared(self) -> bool:
        """Whether `.grad` is gone or zero, and has changed since it was noted."""
        if self.grad_is_as_noted() or self.was_reset():
            return False
        grad = getattr(self.as_shown(), "grad", None)
        return grad is None or _vanishes(grad)

    def is_trainable(self) -> bool:
        """Whether it asks for gradients."""
        return bool(getattr(self.as_shown(), "requires_grad", False))

    def send(self, gradient: Tensor) -> None:
        """Notes what an expansion sends to the parameter."""
        task = running_backward()
        if task in self.sent:
            self.sent[task].add(gradient)
        else:
            self.sent[task] = Sent(gradient)


class Leaves:
    """What is known of each parameter, by identity; parameters that are no more are forgotten.

    Attributes:
        known: By the parameter's id.
        lost: Ids of parameters that are no more.
        sharded: Whether FSDP has sharded any of them.
        asleep: Whether the gradients that arrive now are the library's own inner derivatives.
    """

    def __init__(self) -> None:
        self.known: dict[int, Leaf] = {}
        self.lost: list[int] = []
        self.sharded = False
        self.asleep = False

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.known.values())

    def get(self, parameter: Tensor) -> Leaf | None:
        """What is known of a parameter."""
        leaf = self.known.get(id(parameter))
        return leaf if leaf is not None and leaf.parameter() is parameter else None

    def is_watched(self, parameter: Tensor) -> bool:
        """Whether there is a hook on a parameter."""
        leaf = self.known.get(id(parameter))
        return leaf is not None and leaf.handle is not None and leaf.parameter() is parameter

    def add(self, parameter: Tensor) -> Leaf:
        """A new parameter."""
        lost, key = self.lost, id(parameter)
        leaf = self.known[key] = Leaf(weakref.ref(parameter, lambda _: lost.append(key)))
        self.sharded = self.sharded or is_shard(parameter)
        return leaf

    def forget_lost(self) -> list[Leaf]:
        """Forgets parameters that are no more, and says which."""
        gone = []
        while self.lost:
            leaf = self.known.get(key := self.lost.pop())
            if leaf is not None and leaf.parameter() is None:
                gone.append(self.known.pop(key))
        return gone

    def with_rows(self) -> list[Leaf]:
        """Those that hold rows."""
        return [leaf for leaf in self.known.values() if leaf.shown.rows is not None]


class Owner(Protocol):
    """Whose parameters are watched: the recorder, as far as the watch needs it.

    Attributes:
        leaves: What is known of each parameter.
    """

    leaves: Leaves

    def name_of(self, member: nn.Module | Tensor) -> str: ...

    def holder_of(self, parameter: Tensor) -> nn.Module | None: ...


class Watch:
    """A hook on a parameter: what arrives must be what its expansions have sent.

    It has to be the first of the parameter's hooks, as those of the user may change the gradient. Guests of a
    `functional_call`, and parameters that have left the model, may be trained elsewhere: where no expansion has sent
    anything, they are none of our business. `torch.autograd.grad` adds nothing to `.grad` and needs no rows.
    """

    __torch_unserializable__ = True  # torch.multiprocessing leaves it out without a warning

    def __init__(self, owner: Owner, leaf: Leaf) -> None:
        self.owner, self.leaf = weakref.ref(owner), leaf

    @classmethod
    def put(cls, owner: Owner, leaf: Leaf, parameter: Tensor) -> None:
        """Watches a parameter that requires gradients."""
        leaf.handle = parameter.register_hook(cls(owner, leaf))
        hooks = parameter._backward_hooks
        assert hooks is not None
        # torch reads the order of insertion, which `move_to_end` does not change
        others = {key: hook for key, hook in hooks.items() if key != leaf.handle.id}
        mine = hooks[leaf.handle.id]
        hooks.clear()
        hooks.update({leaf.handle.id: mine, **others})

    def __call__(self, grad: Tensor | None) -> None:
        owner, parameter = self.owner(), self.leaf.parameter()
        if grad is None or owner is None or parameter is None or owner.leaves.asleep or not parameter.requires_grad:
            return
        sent = self.leaf.sent.pop(running_backward(), None)
        if sent is not None and sent.is_all(grad):
            return
        # of `torch.autograd.grad` there are rows with create_graph=True only
        if not accumulates(parameter) and (sent is None or not torch.is_grad_enabled()):
            return
        holder = owner.holder_of(parameter)
        if sent is None and holder is None:
            if self.leaf.member:
                self.leaf.handle.remove()
                self.leaf.handle = self.leaf.clipped = None  # what is added to a clipped `.grad` here is not clipped
            return
        if holder is not None and not hasattr(holder, "_recorder") and not isinstance(holder, _LISTS):
            raise complaint(
                owner.name_of(parameter),
                f"the parameter belongs to a plain {type(holder).__name__}, which was not converted, so its "
                "gradient is not per sample",
                "a converted layer",
                "Convert the model again after changing its layers: convert(model, inplace=True).per_sample(True).",
            )
        raise used_outside(owner.name_of(parameter))


def used_outside(name: str) -> PerSampleError:
    """What to say of a parameter that is used where no expansion sees it."""
    return complaint(
        name,
        "the parameter is also used outside of its module's forward, so a part of its gradient is not per sample",
        "every use inside the forward of the module that holds it",
        "Use it through expanded_nn.expanded(weight), as in expanded_nn.functional.linear(x, expanded(weight)), and in "
        "a method other than forward within one_pass(model, batch_size). Or give the second use a layer of its own "
        "that shares the parameter (head.weight = embedding.weight). For a penalty on the weights alone take "
        "the optimizer's weight_decay. If this backward needs no per-sample gradients, switch per_sample(False) before "
        "its forward.",
    )


def stale(leaves: Iterable[Leaf], name_of: Callable[[Tensor], str], *, beside_held: bool = False) -> list[Leaf]:
    """The leaves whose `.grad` was cleared since it was seen last, so that the rows held are no part of it.

    The first line that fits counts:

    | `.grad`                                            | rows                                                  |
    |----------------------------------------------------|-------------------------------------------------------|
    | `None`, or `grad_sample` was set by the user       | stale                                                 |
    | zero, scaled or clipped before, and `beside_held`  | refused, as it may be a sum that cancels. Held, if    |
    |                                                    | all rows are zero                                     |
    | zero, and the rows do not add up to zero           | stale                                                 |
    | zero, as is the sum of the rows (they cancel)      | stale if no `.grad` is held and another parameter's   |
    |                                                    | zero is stale: they were cleared together. Held else  |
    | another tensor, no multiple of the sum of the rows | stale: it was set anew. A shard's is held, as its sum |
    |                                                    | is known on all ranks together only                   |
    | changed in place, no multiple of the sum           | refused: they may be a part of it or not. Held, if it |
    |                                                    | was scaled or clipped before, or lacks rows, so that  |
    |                                                    | they are refused where they are asked for             |
    | any other                                          | held: the same tensor, or a scaled copy of it         |

    Args:
        leaves: Those that have rows.
        name_of: Gives the name of a parameter, for the error.
        beside_held: Whether these are only a part of the leaves, and rows of others are known to be held.

    Raises:
        PerSampleError: If a `.grad` was changed in place so that nothing tells whether the rows are a part of it.
    """
    found, zeros, some_held = [], [], beside_held
    for leaf in leaves:
        parameter = leaf.as_shown()
        if parameter is None or parameter.grad is None or leaf.was_reset():
            found.append(leaf)
        elif _vanishes(parameter.grad):
            if not beside_held or not leaf.has_own_measure():
                zeros.append(leaf)
            elif leaf.shown.rows is not None and bool(leaf.shown.rows.norm()):
                raise _in_doubt(
                    name_of(parameter),
                    "is zero, which may be a sum that cancels",
                    "gradients that were all cleared together, or set to None, or left alone",
                )
        elif leaf.grad is None or leaf.grad_is_as_noted() or is_shard(parameter):
            some_held = True
        elif _is_multiple(parameter.grad, leaf):
            some_held = leaf.is_scaled = True
        elif not leaf.grad_is_another() and (leaf.has_more or leaf.has_own_measure() or leaf.lacks_rows()):
            some_held = True
        elif leaf.grad_is_another() and not leaf.has_own_measure():
            found.append(leaf)
        else:
            raise _in_doubt(
                name_of(parameter),
                "is no multiple of the per-sample gradients held",
                "a .grad that was cleared, scaled or left alone before the next backward adds to it",
            )
    zeros.sort(key=_size)
    if not some_held and any(not _rows_cancel(leaf) for leaf in zeros):  # one that was cleared tells of all
        return found + zeros
    return found + [leaf for leaf in zeros if not _rows_cancel(leaf)]


def _in_doubt(where: str, state: str, wanted: str) -> PerSampleError:
    return complaint(
        where,
        f"its .grad was changed since the last backward, and {state}, so that the rows may or may not be a part of it",
        wanted,
        "Clear it, optimizer.zero_grad(), or change it once all backwards of the step are done.",
    )


def _vanishes(grad: Tensor) -> bool:
    """Whether all numbers are zero; the first ones tell for nearly every gradient that is not."""
    values = grad._values() if grad.is_sparse else grad
    if is_traced():
        assume(values.any())
        return False
    if not is_shard(values) and values.numel() > 64 and values.is_contiguous() and bool(values.view(-1)[:64].any()):
        return False
    return is_zero(values)


def _size(leaf: Leaf) -> int:
    return 0 if leaf.shown.rows is None else leaf.shown.rows.numel()


def _sum_of_rows(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """What the rows held add up to in `.grad`, and how large rounding errors in it may be, all in all."""
    rows = leaf.shown.rows
    assert rows is not None
    batches = [max(1, now.batch) if leaf.scales_rows else 1 for now in leaf.shown.passes for _ in range(now.batch)]
    weights = torch.tensor(batches, dtype=torch.float64, device=rows.device).reciprocal()
    with torch.no_grad():
        total = as_factored(rows.detach()).weighted_sum(weights.to(as_factored(rows).dtype))
        size = rows.norm() * (weights.max() if len(weights) else 1.0)
    epsilon = torch.finfo(rows.dtype).eps
    return total, size * epsilon * 8 * max(1, rows.shape[0])


def _rows_cancel(leaf: Leaf) -> bool:
    refuse_values("a gradient is zero between two backwards")
    if leaf.has_more:
        return False  # a `.grad` that holds more than rows that cancel is not zero, unless it was cleared
    parameter = leaf.as_shown()
    if leaf.clipped is not None and parameter is not None and parameter.grad is not None:
        grad, version = leaf.clipped
        if grad() is parameter.grad and version != parameter.grad._version:
            return False  # their sum says nothing about a `.grad` that clipping has set and others have changed
    total, rounding = _sum_of_rows(leaf)
    return bool(total.norm() <= rounding)


def _is_multiple(grad: Tensor, leaf: Leaf) -> bool:
    """Whether a gradient is the sum of the rows times a number, as one that was scaled is."""
    refuse_values("a gradient is changed between two backwards")
    total, rounding = _sum_of_rows(leaf)
    grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
    if grad.shape != total.shape:
        return False
    length = total.norm()
    if not bool(length > rounding):
        return bool(grad.norm() <= rounding)  # both are rounding noise, of rows that cancel
    factor = torch.sum(grad * total.conj()) / length.square()
    tolerance = rounding / length + torch.finfo(grad.dtype).eps ** 0.5
    return bool((grad - factor * total).norm() <= tolerance * grad.norm())


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two gradients are the same, those of samples that are NaN included."""
    if left.is_sparse or right.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    if is_traced():
        assume((left == right).all())
        return True
    return torch.equal(left, right) or bool(torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True))
