"""The rows that a model holds, by pass and parameter; and `grad_sample`, which has those of all passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from expanded_nn._errors import warn
from expanded_nn.common.modes import running_backward
from expanded_nn.common.traced import is_traced
from expanded_nn.core.algebra import Kind
from expanded_nn.factored import FactoredTensor, joined, materialized
from expanded_nn.recording.leaf import NO_ROWS, Leaf, Published
from expanded_nn.recording.passes import Pass
from expanded_nn.rows.cell import Cell

Held = dict[Pass, dict[Leaf, Tensor]]  # pass -> parameter -> its rows `(B, *shape)`


class Store:
    """The rows held.

    Invariants: `held` is in the order of the forwards, and no pass in it is empty. A parameter without rows in a pass
    that others have rows in has zero rows there: in `grad_sample` only, never in `held`. Outside of a backward,
    `grad_sample` has the rows of every pass in `held`. While a backward runs it may lack passes whose rows have come
    for other parameters first: `Published.passes` says which it has, and `complete` adds the others.

    The rows of several passes are published in one of two ways. Factored rows are joined into a new tensor that `held`
    has no part in: what the user changes in it in place is copied to `held` before it is made anew. Of dense rows
    `held` has slices of the published memory, so that it sees such changes by itself.

    Attributes:
        held: The rows.
        backwards: The numbers of the backwards that have delivered: the running one, and those inside of it.
        suspended: The rows held, and what was published of them, while those of a `torch.autograd.grad` stand alone.
        materialize: Whether `grad_sample` is to be dense.
        replaces: With `accumulate_grad=False`, whether the rows held took the place of rows of the same forwards, which
            were not clipped.
    """

    def __init__(self, materialize: bool) -> None:
        self.held: Held = {}
        self.backwards: set[int] = set()
        self.suspended: tuple[Held, dict[Leaf, Published]] | None = None
        self.materialize, self.replaces = materialize, False

    def add(self, pass_: Pass, leaf: Leaf, rows: Tensor) -> None:
        """Adds rows `(B, *shape)` of one parameter; a backward may deliver those of one pass in several parts."""
        self._take_over_edits(leaf)
        backward = running_backward()
        if pass_ not in self.held:
            if self.held and hasattr(leaf.parameter(), "summed_grad"):  # which Opacus' optimizers set
                self._warn_of_several_backwards()
            self.held = dict(sorted([*self.held.items(), (pass_, {})], key=lambda item: item[0].number))
            pass_.reached_by = backward
        pass_rows = self.held[pass_]
        self.backwards.add(backward)
        pass_rows[leaf] = pass_rows[leaf] + rows if leaf in pass_rows else rows
        self._publish(leaf, anew=pass_ in leaf.published.passes)

    def _warn_of_several_backwards(self) -> None:
        """Warns where Opacus will take the rows of several backwards for those of one batch."""
        if not self.backwards.issuperset(pass_.reached_by for pass_ in self.held):
            warn(
                "Opacus' optimizer: grad_sample has the rows of several backwards. It counts them as one batch, in the "
                "mean and in ε, which is right only where they are parts of one batch; wanted one backward before each "
                "step. Let Opacus' BatchMemoryManager split large batches: it counts what it has split."
            )

    def publish(self, leaf: Leaf) -> None:
        """Sets `grad_sample` to the rows of all passes, with what the user has changed in it."""
        self._take_over_edits(leaf)
        self._publish(leaf)

    def publish_all(self, leaves: Iterable[Leaf]) -> None:
        """`publish` for each of the leaves; at little cost where there is one pass, as after most compiled steps."""
        passes = tuple(self.held)
        if len(passes) > 1:
            for leaf in leaves:
                self.publish(leaf)
            return
        pass_rows = self.held[passes[0]] if passes else {}
        for leaf in leaves:
            rows = pass_rows.get(leaf)
            if rows is None:
                leaf.publish(None)
            else:
                leaf.publish(materialized(rows, leaf.memory) if self.materialize else rows, passes)

    def _publish(self, leaf: Leaf, *, anew: bool = False) -> None:
        """`publish`; `anew` where the rows of a pass that is shown already are others now."""
        parameter = leaf.parameter()
        if parameter is None:
            return
        passes = self._passes_of(leaf)
        parts = [self.held[pass_].get(leaf) for pass_ in passes]
        if len(parts) == 1 and parts[0] is not None:  # as in most steps
            rows = materialized(parts[0], leaf.memory) if self.materialize else parts[0]
            leaf.publish(rows, passes)
            return
        if all(part is None for part in parts):
            leaf.publish(None)
            return
        is_factored = not self.materialize and any(isinstance(part, FactoredTensor) for part in parts)
        pairs = zip(passes, parts, strict=True)
        full = [_zeros(pass_.batch, parameter, is_factored) if part is None else part for pass_, part in pairs]
        if is_factored:
            leaf.publish(joined(full), passes)
        else:
            self._publish_dense(leaf, parameter, passes, full, anew=anew)

    def _passes_of(self, leaf: Leaf) -> tuple[Pass, ...]:
        """The passes that a parameter shows rows of, be they zero: of the model's own not those of guests alone."""
        passes = tuple(self.held)
        if len(passes) == 1 or not leaf.is_member:
            return passes
        return tuple(pass_ for pass_ in passes if any(each.is_member for each in self.held[pass_]))

    def _publish_dense(
        self, leaf: Leaf, parameter: Tensor, passes: tuple[Pass, ...], parts: list[Tensor], *, anew: bool
    ) -> None:
        """Publishes dense rows of several passes: behind those published already, in memory with room for more.

        Writing behind the published rows is safe, as nobody else has written there.
        """
        published = leaf.published
        batches = [pass_.batch for pass_ in passes]
        if is_traced() or any(part.requires_grad for part in parts):
            leaf.publish(torch.cat(parts), passes)
            return
        first = len(published.passes)  # of the passes that are not there yet
        before = published.rows if published.passes == passes[:first] and not anew else None
        first = 0 if before is None else first
        start, end = sum(batches[:first]), sum(batches)
        size = prod(parameter.shape) * parameter.element_size()
        if before is not None and published.has_room and before.untyped_storage().nbytes() >= end * size:
            room = before
        else:
            room = parameter.detach().new_empty(2 * end, *parameter.shape)
            if before is not None:
                _from(room, 0, start).copy_(materialized(before))  # with what the user has written to zero rows
        rows = _from(room, 0, end)
        for batch, part in zip(batches[first:], parts[first:], strict=True):
            _from(room, start, batch).copy_(materialized(part))
            start += batch
        leaf.publish(rows, passes, has_room=True)
        self._hold_slices(leaf)

    def _take_over_edits(self, leaf: Leaf) -> None:
        """Copies to `held` what the user has changed in place in rows of several passes."""
        published = leaf.published
        rows = published.rows
        if len(published.passes) < 2 or not isinstance(rows, FactoredTensor) or leaf.was_reset():
            return
        if rows.is_dense or rows._version != published.version:
            self._hold_slices(leaf, edited=True)

    def _hold_slices(self, leaf: Leaf, *, edited: bool = False) -> None:
        """Holds slices of the published rows; where the user has `edited` them also zero rows that are zero no more."""
        rows, sizes = leaf.published.rows, [pass_.batch for pass_ in leaf.published.passes]
        assert rows is not None
        for pass_, part in zip(leaf.published.passes, materialized(rows).split(sizes), strict=True):
            pass_rows = self.held.get(pass_, {})
            if leaf in pass_rows or (edited and bool(part.any())):
                pass_rows[leaf] = part

    def complete(self, leaves: Iterable[Leaf]) -> None:
        """Gives parameters zero rows in passes without rows of theirs, and no more of those in passes that are gone."""
        for leaf in leaves:
            if leaf.published.rows is not None and leaf.published.passes != self._passes_of(leaf):
                self.publish(leaf)

    def begin(self) -> None:
        """Begins a backward."""
        self.backwards.clear()

    def give_up(self, leaves: Iterable[Leaf]) -> None:
        """Drops all rows after a backward that failed, as some parameters have its gradient in `.grad` and others not.

        Clipping refuses each `.grad` that is there now, until it is cleared.
        """
        for leaf in leaves:
            if leaf.published.rows is not None:
                leaf.note_incomplete()
                leaf.publish(None)
        self.drop_every_pass()

    def drop(self, leaves: Collection[Leaf]) -> bool:
        """Drops the rows of parameters, suspended ones as well; their `grad_sample` is left to the caller.

        Returns:
            Whether passes are gone with them, which other parameters may show zero rows of.
        """
        held, published = self.suspended if self.suspended is not None else ({}, {})
        mappings: list[dict[Leaf, Any]] = [*self.held.values(), *held.values(), published]
        for mapping in mappings:
            for leaf in leaves:
                mapping.pop(leaf, None)
        if all(self.held.values()):
            return False
        self.held = {pass_: pass_rows for pass_, pass_rows in self.held.items() if pass_rows}
        if not self.held and not any(held.values()):
            self.suspended = None  # nothing stands alone
        return True

    def drop_passes_of(self, leaves: Iterable[Leaf]) -> None:
        """Drops the passes that no other parameters hold rows of."""
        leaves = set(leaves)
        dropped = [pass_ for pass_, pass_rows in self.held.items() if leaves.issuperset(pass_rows)]
        changed = {leaf for pass_ in dropped for leaf in self.held.pop(pass_)}
        for leaf in changed:
            leaf.note_incomplete()
            self.publish(leaf)

    def suspend(self, leaves: Iterable[Leaf]) -> None:
        """Makes way for rows that stand alone, as their sum does not go to `.grad`, until `resume`."""
        leaves = list(leaves)
        self.suspended, self.held = (self.held, {leaf: leaf.published for leaf in leaves}), {}
        for leaf in leaves:
            leaf.publish(None)

    def resume(self, leaves: Iterable[Leaf]) -> None:
        """Goes back to the suspended rows, but for those that the user took away meanwhile."""
        if self.suspended is None:
            return
        (self.held, published), self.suspended = self.suspended, None
        for leaf in list(leaves):
            if leaf.was_reset():
                self.drop((leaf,))
                leaf.publish(None)
            else:
                leaf.publish_again(published.get(leaf, NO_ROWS))

    @property
    def sets_rows_aside(self) -> bool:
        """Whether there are rows of a backward behind those of a `torch.autograd.grad`."""
        return self.suspended is not None and any(self.suspended[0].values())

    def drop_every_pass(self) -> None:
        """Drops all rows, suspended ones as well."""
        self.held, self.suspended = {}, None


def _zeros(batch: int, parameter: Tensor, is_factored: bool) -> Tensor:
    """Rows of zeros that take no memory: expanded, or without any terms."""
    if not is_factored:
        return parameter.new_zeros(()).expand(batch, *parameter.shape)
    cell = Cell([(batch, ())], Kind(parameter.shape, parameter.dtype, parameter.device))
    return FactoredTensor(cell, (batch, *parameter.shape))


def _from(room: Tensor, start: int, count: int) -> Tensor:
    """`count` rows in the memory of `room`; to autograd no view of it, so that rows of old steps keep their version."""
    size = prod(room.shape[1:])
    rows = torch.empty(0, dtype=room.dtype, device=room.device)
    return rows.set_(room.untyped_storage(), start * size, (count, *room.shape[1:]))  # type: ignore[call-overload,no-any-return]
