"""The rows that a model holds: of each pass, those of each parameter; and `grad_sample`, which shows them together."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from expanded_nn._cell import Cell
from expanded_nn._modes import running_backward
from expanded_nn._traced import is_traced
from expanded_nn.core.algebra import Kind
from expanded_nn.factored import FactoredTensor, joined, materialized, parted
from expanded_nn.recording.passes import Pass
from expanded_nn.recording.watch import Leaf, Shown

Held = dict[Pass, dict[Leaf, Tensor]]  # each parameter's rows `(B, *shape)`, pass by pass, in the order of the forwards


class Store:
    """The rows held, and how to go back to those from before a backward that failed.

    `held` is in the order of the passes, and no pass in it is empty. A parameter without rows in a pass that others
    have rows in has zero rows there: in `grad_sample` only, never in `held`. While a backward runs, `grad_sample` may
    lack passes that `held` has, as another parameter's rows have come first: `Shown.passes` says what it shows, and
    `complete` makes up for it.

    Rows of several passes are shown in one of two ways. Factored, they are joined into a new tensor, of which `held`
    knows nothing: what the user changes in it in place is taken over before it is made anew. Dense, `held` has slices
    of the memory that is shown, so that it sees such changes by itself.

    Attributes:
        held: The rows.
        rows_before: What `undo` restores: for each parameter and pass that the running backward has delivered to, the
            rows from before it, `None` where there were none.
        tasks: The numbers of the backwards that have delivered: the running one, and those inside of it.
        suspended: The rows held, and what was published of them, while those of a `torch.autograd.grad` stand alone.
        materialize: Whether `grad_sample` is to be dense.
    """

    def __init__(self, materialize: bool) -> None:
        self.held: Held = {}
        self.rows_before: dict[Leaf, dict[Pass, Tensor | None]] = {}
        self.tasks: set[int] = set()
        self.suspended: tuple[Held, dict[Leaf, Shown]] | None = None
        self.materialize = materialize

    def add(self, pass_: Pass, leaf: Leaf, rows: Tensor) -> None:
        """Takes rows `(B, *shape)` of one parameter; a backward may bring those of one pass in several parts."""
        if len(leaf.shown.passes) > 1:
            self._take_over_edits(leaf)
        if pass_ not in self.held:
            in_order = all(other.number < pass_.number for other in self.held)
            self.held[pass_] = {}
            if not in_order:
                self.held = dict(sorted(self.held.items(), key=lambda item: item[0].number))
        of_pass = self.held[pass_]
        self.tasks.add(running_backward())
        before = self.rows_before.get(leaf)
        if before is None or not leaf.grad_is_as_noted():  # what came before has arrived
            if before is not None:
                leaf.note_grad()
            self.rows_before[leaf] = {pass_: of_pass.get(leaf)}
        else:
            before.setdefault(pass_, of_pass.get(leaf))
        of_pass[leaf] = of_pass[leaf] + rows if leaf in of_pass else rows
        self._show(leaf, pass_)

    def show(self, leaf: Leaf, first_new: Pass | None = None) -> None:
        """Sets `grad_sample` to what is held of all passes together, with what the user has changed in it.

        Args:
            leaf: The parameter.
            first_new: The first pass whose rows are not yet in `grad_sample`, if those before it are.
        """
        self._take_over_edits(leaf)
        self._show(leaf, first_new)

    def _show(self, leaf: Leaf, first_new: Pass | None = None) -> None:
        parameter = leaf.parameter()
        if parameter is None:
            return
        if not any(leaf in of_pass for of_pass in self.held.values()):
            leaf.show(None)
            return
        parts = [of_pass.get(leaf) for of_pass in self.held.values()]
        if len(parts) == 1 and parts[0] is not None:
            rows = materialized(parts[0], leaf.memory) if self.materialize else parts[0]
            leaf.show(rows, self.held)
        elif self.materialize or not any(isinstance(part, FactoredTensor) for part in parts):
            self._show_dense(leaf, parameter, parts, first_new)
        else:
            passes = zip(self.held, parts, strict=True)
            all_parts = [_zero_rows(pass_.batch, parameter) if part is None else part for pass_, part in passes]
            leaf.show(joined(all_parts), self.held)

    def _show_dense(self, leaf: Leaf, parameter: Tensor, parts: list[Tensor | None], first_new: Pass | None) -> None:
        """The dense rows of several passes, behind those that are shown already, in memory with room for more.

        Writing behind what is shown is safe as long as nobody else has written there: rows that a failed backward left
        behind are followed by rows in other memory, as `undo` shows all of them anew.
        """
        passes, shown = tuple(self.held), leaf.shown
        batches = [pass_.batch for pass_ in passes]
        if is_traced() or any(part is not None and part.requires_grad for part in parts):
            pairs = zip(batches, parts, strict=True)
            zeros_for_none = [parameter.new_zeros(n, *parameter.shape) if part is None else part for n, part in pairs]
            leaf.show(torch.cat(zeros_for_none), passes)
            return
        behind = 0 if first_new is None else passes.index(first_new)
        start = sum(batches[:behind])
        room = _room(shown, start, sum(batches), parameter) if shown.passes == passes[:behind] else None
        if room is None:
            room = parameter.detach().new_empty(2 * sum(batches), *parameter.shape)
            if behind and shown.passes == passes[:behind]:
                _from(room, 0, start).copy_(_dense(shown.rows))  # with what the user has written to zero rows, too
            else:
                behind, start = 0, 0
        rows = _from(room, 0, sum(batches))
        for batch, part in list(zip(batches, parts, strict=True))[behind:]:
            place = _from(room, start, batch)
            if part is None:
                place.zero_()
            else:
                place.copy_(_dense(part))
            start += batch
        leaf.show(rows, passes, has_room=True)
        self._hold_slices(leaf)

    def _take_over_edits(self, leaf: Leaf) -> None:
        """What the user has changed in place in rows of several passes."""
        shown = leaf.shown
        rows = shown.rows
        if len(shown.passes) < 2 or not isinstance(rows, FactoredTensor) or leaf.was_reset():
            return
        if rows.is_dense or rows._version != shown.version:
            self._hold_slices(leaf, edited=True)

    def _hold_slices(self, leaf: Leaf, *, edited: bool = False) -> None:
        """Holds what is shown in place of its parts; of zero rows that may have been edited, what is no longer zero."""
        rows, sizes = leaf.shown.rows, [pass_.batch for pass_ in leaf.shown.passes]
        assert rows is not None
        parts = parted(rows, sizes) if isinstance(rows, FactoredTensor) else rows.split(sizes)
        for pass_, part in zip(leaf.shown.passes, parts, strict=True):
            of_pass = self.held.get(pass_, {})
            if leaf in of_pass or (edited and bool(part.any())):
                of_pass[leaf] = part

    def complete(self, leaves: Iterable[Leaf]) -> None:
        """All rows of a backward are here: parameters that it left out have zero rows."""
        self.rows_before.clear()
        passes = tuple(self.held)
        for leaf in leaves:
            shown = leaf.shown
            if shown.rows is not None and shown.passes != passes:
                behind = len(shown.passes)
                self.show(leaf, passes[behind] if shown.passes == passes[:behind] else None)

    def begin(self) -> None:
        """A backward begins to deliver: from here on what it changes is kept in mind."""
        self.rows_before.clear()
        self.tasks.clear()

    def undo(self) -> None:
        """The backward has failed: rows go whose gradient has not come to `.grad`.

        Autograd adds to `.grad` parameter by parameter, so a fault in the middle leaves some of them with the whole
        gradient and others with nothing. That `.grad` is as it was noted tells which.

        Where others ran inside of it, as reentrant checkpoints do, nothing tells which of the rows have come: they are
        refused until `.grad` is cleared.
        """
        for leaf in self.rows_before if len(self.tasks) > 1 else ():
            leaf.note_lacking()
        lost = {leaf: before for leaf, before in self.rows_before.items() if leaf.grad_is_as_noted()}
        for leaf, before in lost.items():
            self._take_over_edits(leaf)
            for pass_, rows in before.items():
                if rows is None:
                    self.held.get(pass_, {}).pop(leaf, None)
                elif pass_ in self.held:
                    self.held[pass_][leaf] = rows
        self.rows_before.clear()
        self._without_empty_passes()
        for leaf in lost:
            self._show(leaf)

    def drop(self, leaf: Leaf) -> None:
        """Forgets the rows of a parameter; what it shows is left to the caller, who has a reason to change it."""
        for of_pass in self.held.values():
            of_pass.pop(leaf, None)
        held, shown = self.suspended if self.suspended is not None else ({}, {})
        for of_pass in held.values():
            of_pass.pop(leaf, None)
        shown.pop(leaf, None)
        self._without_empty_passes()

    def _without_empty_passes(self) -> None:
        if not all(self.held.values()):
            self.held = {pass_: of_pass for pass_, of_pass in self.held.items() if of_pass}

    def drop_passes_of(self, others: Iterable[Leaf]) -> None:
        """Drops the passes that only such parameters hold rows of, frozen ones or those that have left the model."""
        others = set(others)
        gone = [pass_ for pass_, of_pass in self.held.items() if others.issuperset(of_pass)]
        changed = {leaf for pass_ in gone for leaf in self.held.pop(pass_)}
        for leaf in changed:
            leaf.note_lacking()
            self.show(leaf)

    def suspend(self, leaves: Iterable[Leaf]) -> None:
        """Rows whose sum does not go to `.grad` are going to stand alone: these come back with the next backward."""
        leaves = list(leaves)
        self.suspended, self.held = (self.held, {leaf: leaf.shown for leaf in leaves}), {}
        for leaf in leaves:
            leaf.show(None)

    def resume(self, leaves: Iterable[Leaf]) -> None:
        """The rows that were set aside, but for those that the user took away since."""
        if self.suspended is None:
            return
        (self.held, before), self.suspended = self.suspended, None
        for leaf in list(leaves):
            if leaf.was_reset():
                self.drop(leaf)
                leaf.show(None)
            else:
                leaf.show_again(before.get(leaf, Shown()))

    def clear(self) -> None:
        """Lets go of all rows."""
        self.held, self.suspended = {}, None
        self.rows_before.clear()


def _dense(rows: Tensor | None) -> Tensor:
    assert rows is not None
    return rows.dense() if isinstance(rows, FactoredTensor) else rows


def _zero_rows(batch: int, parameter: Tensor) -> FactoredTensor:
    cell = Cell([(batch, ())], Kind(parameter.shape, parameter.dtype, parameter.device))
    return FactoredTensor(cell, (batch, *parameter.shape))


def _room(shown: Shown, start: int, end: int, parameter: Tensor) -> Tensor | None:
    """The memory of the rows that are shown, if all others fit in behind them, up to row `end`."""
    rows = shown.rows
    if rows is None or not shown.has_room or len(rows) != start:
        return None
    return rows if rows.untyped_storage().nbytes() >= end * prod(parameter.shape) * rows.element_size() else None


def _from(room: Tensor, start: int, count: int) -> Tensor:
    """So many rows in some memory; no view of it in autograd's eyes, so that rows of older steps keep their version."""
    size = prod(room.shape[1:])
    rows = torch.empty(0, dtype=room.dtype, device=room.device)
    return rows.set_(room.untyped_storage(), start * size, (count, *room.shape[1:]))  # type: ignore[call-overload,no-any-return]
