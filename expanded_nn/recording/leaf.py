"""What a recorder knows of one parameter: its rows, its `.grad` as last noted, and the gradient that has to come."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from expanded_nn.common.modes import running_backward
from expanded_nn.common.rounding import are_equal
from expanded_nn.common.traced import assume, is_traced, known_zero
from expanded_nn.recording.passes import Pass
from expanded_nn.recording.sharded import is_shard, is_sharded, is_zero
from expanded_nn.rows.storage import Recycled


class Noted:
    """A tensor at one moment, to see later whether another one has taken its place, or it was changed in place.

    It is taken as it is now, or as it was before so many changes in place.
    """

    __slots__ = "tensor", "version"  # several are made for each parameter in each step

    def __init__(self, tensor: Tensor, changes_since: int = 0) -> None:
        self.tensor, self.version = weakref.ref(tensor), tensor._version - changes_since

    def is_as_it_was(self, tensor: Tensor) -> bool:
        """Whether a tensor is the one that was noted, unchanged."""
        return self.tensor() is tensor and self.version == tensor._version


class ExpectedGradient:
    """The gradient that has to arrive at a parameter in one backward: what its expansions have returned.

    A single expansion's gradient has to arrive as the very same tensor, which costs nothing to see. Autograd adds up
    those of several passes in the order in which they were returned: the same sum is made here, and compared.

    Invariant: `first` is the only gradient so far and `total` is `None`, or `first` is `None` and `total` is the sum.

    Attributes:
        first: The gradient of the only expansion so far.
        total: The sum over several passes that end in this backward.
        was_changed: Whether something else was added to the first gradient before the second one came.
    """

    def __init__(self, gradient: Tensor) -> None:
        self.first: Noted | None = Noted(gradient)
        self.total: Tensor | None = None
        self.was_changed = False

    def add(self, gradient: Tensor) -> None:
        """Adds the gradient of another expansion."""
        # The engine holds the first gradient until now. If it is gone, the engine has replaced it by its sum with
        # something else, and what arrives will not equal the total made here.
        before = self.total
        if self.first is not None:
            before = self.first.tensor()
            self.was_changed = before is not None and not self.first.is_as_it_was(before)
        self.total = gradient if before is None else (before + gradient).detach()
        self.first = None

    def matches(self, arrived: Tensor) -> bool:
        """Whether the gradient that arrives at the parameter is this one, with nothing added."""
        if self.first is not None:
            return self.first.is_as_it_was(arrived)  # autograd adds a second gradient to the first one, in place
        return self.total is not None and not self.was_changed and _is_sum_of_passes(self.total, arrived.detach())


def _is_sum_of_passes(total: Tensor, arrived: Tensor) -> bool:
    """Whether two gradients have the same numbers, NaN included, as a sample may have such a gradient."""
    if total.is_sparse or arrived.is_sparse:
        total, arrived = total.to_dense(), arrived.to_dense()
    if is_traced():
        assume((total == arrived).all(), "call after call a gradient is not the sum of those of its passes")
        return True
    return are_equal(total, arrived)


@dataclass(slots=True)
class Published:
    """The `grad_sample` that was set last; it does not change.

    Attributes:
        rows: The tensor, `(B, *shape)` of all passes together; `None` where there are no rows.
        passes: The passes that the rows are of, in this order.
        version: The tensor's version when it was set.
        has_room: Whether they begin a buffer of the store's own, to which later rows can be appended.
    """

    rows: Tensor | None = None
    passes: tuple[Pass, ...] = ()
    version: int = 0
    has_room: bool = False


NO_ROWS = Published()


@dataclass
class Location:
    """Where a parameter is in the model: the module that holds it, and its name there.

    Attributes:
        shard: What the module holds under that name once FSDP has freed the parameter that it had gathered.
    """

    module: weakref.ref[nn.Module]
    name: str
    shard: Tensor | None = None


@dataclass
class GradNotes:
    """What is noted of a parameter's `.grad`, to see later what was done to it.

    Attributes:
        last: `.grad` when it was noted last; `None` if there was none.
        is_scaled: Whether it was scaled since it was cleared, so that it differs from the sum of the rows.
        has_foreign_part: Whether a part of it comes from no rows, so that it differs from their sum.
        clipped: The one that clipping has set.
        clipped_rows: The number of the last pass whose rows were clipped, and the parameter's version then.
        is_incomplete: Whether it has a part whose rows were dropped, as after a backward that failed, or as the
            parameter was frozen meanwhile.
        cancels: Whether that part and the rows that came later made it zero, which is not to be taken for cleared.
    """

    last: Noted | None = None
    is_scaled: bool = False
    has_foreign_part: bool = False
    clipped: Noted | None = None
    clipped_rows: tuple[int, int] | None = None
    is_incomplete: bool = False
    cancels: bool = False


@dataclass(eq=False)
class Leaf:
    """What a recorder knows of one parameter.

    Attributes:
        parameter: The parameter, or a guest: a tensor that `functional_call` puts in its place for a while.
        is_member: Whether it has been seen in the model, and so is no guest.
        published: Its `grad_sample`, as it was set last.
        expected: The gradient that has to arrive at it, by the number of the backward.
        scales_rows: Whether its rows are scaled by B, as those of a mean over the samples.
        notes: What is noted of its `.grad`.
        memory: The memory that its dense rows are written to.
        location: Where it is in the model, as far as that is known.
        handle: The handle of the hook that watches it.
    """

    parameter: weakref.ref[Tensor]
    is_member: bool = False
    scales_rows: bool = False
    published: Published = field(default_factory=Published)
    expected: dict[int, ExpectedGradient] = field(default_factory=dict)
    notes: GradNotes = field(default_factory=GradNotes)
    memory: Recycled = field(default_factory=Recycled)
    location: Location | None = None
    handle: Any = None

    def visible_parameter(self) -> Tensor | None:
        """The parameter that the model holds between the passes: itself, or FSDP's shard of it."""
        if self.location is not None and self.location.shard is not None:
            return self.location.shard
        return self.parameter()

    @property
    def grad(self) -> Tensor | None:
        """`.grad` of the visible parameter, `None` if there is neither."""
        parameter = self.visible_parameter()
        return None if parameter is None else parameter.grad

    def is_trainable(self) -> bool:
        """Whether the parameter requires gradients."""
        return bool(getattr(self.visible_parameter(), "requires_grad", False))

    # `grad_sample`

    def publish(self, rows: Tensor | None, passes: Iterable[Pass] = (), *, has_room: bool = False) -> None:
        """Sets `grad_sample`."""
        before, parameter, location = self.published.rows, self.parameter(), self.location
        if rows is not None and before is not None and hasattr(before, "_processed"):
            rows._processed = True  # type: ignore[attr-defined]  # Opacus' mark on rows that a step has used
        self.published = NO_ROWS if rows is None else Published(rows, tuple(passes), rows._version, has_room)
        if parameter is not None:
            parameter.grad_sample = rows  # type: ignore[attr-defined]
        if location is not None and location.shard is not None:
            location.shard.grad_sample = rows  # type: ignore[attr-defined]

    def publish_again(self, published: Published) -> None:
        """Sets `grad_sample` to what it was."""
        self.publish(published.rows)
        self.published = published

    def publish_on_shard(self) -> Tensor | None:
        """Sets `grad_sample` of the shard that has replaced a parameter that FSDP had gathered; the shard."""
        location, rows = self.location, self.published.rows
        module = None if location is None or rows is None else location.module()
        parameter: Any = None if location is None or module is None else module._parameters.get(location.name)
        if location is None or not is_shard(parameter):
            return None
        location.shard, parameter.grad_sample = parameter, rows
        return location.shard

    def was_reset(self) -> bool:
        """Whether `grad_sample` is not what was published: the user has set it."""
        return getattr(self.visible_parameter(), "grad_sample", None) is not self.published.rows

    # `.grad`

    def expect(self, gradient: Tensor) -> None:
        """Notes the gradient that an expansion returns to the parameter in the running backward."""
        number = running_backward()
        if number in self.expected:
            self.expected[number].add(gradient)
        else:
            self.expected[number] = ExpectedGradient(gradient)

    def note_grad(self, *, after_backward: bool = False) -> None:
        """Notes what `.grad` is, so that a change is seen; after a backward also whether parts of it cancel."""
        grad = self.grad
        self.notes.last = None if grad is None else Noted(grad)
        if after_backward:
            self.notes.cancels = self.notes.is_incomplete and grad is not None and vanishes(grad)

    def grad_is_as_noted(self) -> bool:
        """Whether `.grad` is the tensor that was noted, in the same version."""
        grad = self.grad
        if grad is None or self.notes.last is None:
            return grad is None and self.notes.last is None
        return self.notes.last.is_as_it_was(grad)

    def grad_is_another(self) -> bool:
        """Whether `.grad` is another tensor than the one that was noted."""
        return self.notes.last is not None and self.notes.last.tensor() is not self.grad

    def was_cleared(self) -> bool:
        """Whether `.grad` is gone or zero, and has changed since it was noted."""
        if self.grad_is_as_noted() or self.was_reset():
            return False
        grad = self.grad
        return grad is None or vanishes(grad)

    def note_foreign_part(self) -> None:
        """Notes whether `.grad` has a part that comes from no rows; to be called before the first rows come.

        Where it has none, what was done to a `.grad` before is over as well.
        """
        if self.published.rows is None:
            grad, notes = self.grad, self.notes
            notes.has_foreign_part = grad is not None and not vanishes(grad)
            if not notes.has_foreign_part:
                notes.is_scaled, notes.clipped = False, None

    def note_incomplete(self) -> None:
        """Notes that rows are about to be dropped whose gradient is a part of `.grad`."""
        self.notes.is_incomplete = self.notes.is_incomplete or self.grad is not None

    def lacks_rows(self) -> bool:
        """Whether `.grad` still has a part whose rows were dropped; that ends when it is cleared."""
        if self.notes.is_incomplete:
            grad, cancels = self.grad, self.notes.cancels and self.grad_is_as_noted()
            self.notes.is_incomplete = grad is not None and (cancels or not vanishes(grad))
        return self.notes.is_incomplete

    @property
    def clipped_grad(self) -> Tensor | None:
        """`.grad`, if that is the tensor that clipping has set, be it changed since; otherwise `None`."""
        grad, clipped = self.grad, self.notes.clipped
        return grad if clipped is not None and clipped.tensor() is grad else None

    def note_clipping(self) -> None:
        """Notes that clipping has set `.grad` to the sum of the rows held."""
        passes, notes, parameter = self.published.passes, self.notes, self.visible_parameter()
        number = passes[-1].number if passes else -1  # with accumulate_grad=False clipping has dropped them
        notes.clipped, notes.is_incomplete = notes.last, False
        notes.clipped_rows = None if parameter is None else (number, parameter._version)

    def rows_clipped_before(self) -> int:
        """How many of the rows held an earlier clipping has had."""
        if self.notes.clipped is None or self.notes.clipped_rows is None:
            return 0
        last, _ = self.notes.clipped_rows
        return sum(pass_.batch for pass_ in self.published.passes if pass_.number <= last)

    def was_cleared_since_clipping(self) -> bool:
        """Whether there was a clipping, and what it has set is gone."""
        return self.notes.clipped_rows is not None and self.notes.clipped is None

    def grad_is_of_earlier_step(self) -> bool:
        """Whether `.grad` is what clipping has set before the parameter was changed in place, as by an optimizer."""
        grad = self.clipped_grad
        return grad is not None and self.changed_since_clipping() and not vanishes(grad)

    def changed_since_clipping(self) -> bool:
        """Whether the parameter was changed in place since its `.grad` was clipped, as by an optimizer.

        The parameter's version tells. Torch's fused optimizers do not raise it.
        """
        parameter = self.visible_parameter()
        if parameter is None or self.notes.clipped is None or self.notes.clipped_rows is None:
            return False
        return parameter._version != self.notes.clipped_rows[1]

    def was_scaled_or_clipped(self) -> bool:
        """Whether `.grad` was scaled or clipped since it was cleared, so that it differs from the sum of the rows."""
        return self.notes.is_scaled or self.clipped_grad is not None


class Leaves:
    """The leaf of each parameter, by the parameter's identity.

    Invariant: a leaf whose parameter is gone stays until `forget_lost`, as its rows have to be dropped, too. `get` does
    not return it, even if another tensor has got the same id.

    Attributes:
        by_id: By the parameter's id.
        lost: Ids of parameters that are gone.
        sharded: Whether FSDP has sharded any of them.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Leaf] = {}
        self.lost: list[int] = []
        self.sharded = False

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.by_id.values())

    def get(self, parameter: Tensor) -> Leaf | None:
        """The leaf of a parameter."""
        leaf = self.by_id.get(id(parameter))
        return leaf if leaf is not None and leaf.parameter() is parameter else None

    def is_watched(self, parameter: Tensor) -> bool:
        """Whether there is a hook on a parameter."""
        leaf = self.get(parameter)
        return leaf is not None and leaf.handle is not None

    def look_for_shards(self, module: nn.Module) -> None:
        """Notes whether FSDP has sharded parameters of a module; those that it gathers at the root are whole now."""
        self.sharded = self.sharded or any(map(is_sharded, module.modules())) or any(map(is_shard, module.parameters()))

    def add(self, parameter: Tensor) -> Leaf:
        """The leaf of a parameter that has none."""
        lost, key = self.lost, id(parameter)
        leaf = self.by_id[key] = Leaf(weakref.ref(parameter, lambda _: lost.append(key)))
        if not hasattr(parameter, "grad_sample"):
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self.sharded = self.sharded or is_shard(parameter)
        return leaf

    def clear(self, parameters: Iterable[Tensor], *, grads: bool) -> set[Leaf]:
        """Lets go of the rows of parameters, and of their `.grad` if `grads`; their leaves. It runs at each step."""
        cleared = set()
        for parameter in parameters:
            if grads and parameter.grad is not None:
                parameter.grad = None
            leaf = self.get(parameter)
            if leaf is not None:
                leaf.notes.clipped, leaf.published = None, NO_ROWS
                cleared.add(leaf)
            parameter.grad_sample = None  # type: ignore[attr-defined]
        return cleared

    def holds(self, parameter: Tensor, rows: Tensor) -> bool:
        """Whether these are the rows of a parameter that were published."""
        leaf = self.get(parameter)
        return leaf is not None and leaf.published.rows is rows

    def has_rows(self, parameter: Tensor) -> bool:
        """Whether rows of a parameter were published."""
        leaf = self.get(parameter)
        return leaf is not None and leaf.published.rows is not None

    def forget_lost(self) -> list[Leaf]:
        """Forgets the parameters that are gone, and returns their leaves."""
        forgotten = []
        while self.lost:
            leaf = self.by_id.get(key := self.lost.pop())
            if leaf is not None and leaf.parameter() is None:
                forgotten.append(self.by_id.pop(key))
        return forgotten

    def with_rows(self) -> list[Leaf]:
        """The leaves that hold rows."""
        return [leaf for leaf in self.by_id.values() if leaf.published.rows is not None]


def vanishes(grad: Tensor) -> bool:
    """Whether all numbers are zero; a trace assumes that they are not. The first numbers nearly always tell."""
    values = grad._values() if grad.is_sparse else grad
    zero = known_zero(grad)
    if zero is not None:
        return zero
    if is_traced():
        assume(values.any(), "call after call a gradient that it changes is zero")
        return False
    if not is_shard(values) and values.numel() > 64 and values.is_contiguous() and bool(values.view(-1)[:64].any()):
        return False
    return is_zero(values)
