"""What a step leaves: noted at the end of its trace, and put in place after each run of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from expanded_nn.common.traced import OnlyEager
from expanded_nn.compiling.packing import Remake, containers, items_of, packed, packed_items, put_items
from expanded_nn.factored import is_hidden
from expanded_nn.recording.isolation import has_hidden_rows, set_rows
from expanded_nn.recording.leaf import Leaf
from expanded_nn.recording.recorder import Recorder

Saved = Sequence[tuple[dict[str, Any], dict[str, Any]]]  # dicts of attributes, each with a copy from before


class RecorderRows(NamedTuple):
    """What a step leaves in one recorder."""

    recorder: Recorder
    passes: list[dict[Leaf, Remake]]  # for each pass the rows, by parameter
    appends: bool  # whether the rows from before the call stay
    joins: bool  # whether the first pass is one that would have joined an open one
    clipped: set[Leaf]  # the parameters whose `.grad` clipping has set


@dataclass
class Outcome:
    """What to do with the results of a graph.

    *Owners* of gradients are the tensors among the arguments and then the parameters; each has a number.

    Attributes:
        result: What the step returns.
        grads: The new `.grad` of owners, where it is another tensor than before.
        filled: The new numbers of a `.grad` that was zero before.
        flags: Parameters without rows from before, and whether their `.grad` is scaled and whether it has a part that
            is of no rows; only where there was a `.grad` before.
        recorders: Those of the models, in the order of `Met.recorders`.
        rows: The rows that they hold.
        shown: What the step itself has set as the `grad_sample` of parameters, such as `None`.
        trainable: Owners that require gradients now and did not before, or the other way around.
        attributes: The new attributes and buffers of modules, and attributes of parameters: the dictionary that has it,
            the name, and the value.
        removed: The attributes that the step has removed.
        items: The new items of lists and dicts among the arguments: the place of the list or dict among the containers,
            the keys that are gone, and the new items by their keys.
        assumed: The index of the result that says which assumptions of the graph held; the next one says whether all
            did.
        otherwise: What it means that an assumption did not hold.
    """

    result: Remake = lambda values: None
    grads: list[tuple[int, Remake | None]] = field(default_factory=list)
    filled: list[tuple[int, Remake]] = field(default_factory=list)
    flags: list[tuple[Recorder, Leaf, bool, bool]] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)
    rows: list[RecorderRows] = field(default_factory=list)
    shown: list[tuple[Callable[[], Any], Remake]] = field(default_factory=list)
    trainable: list[tuple[int, bool]] = field(default_factory=list)
    attributes: list[tuple[dict[str, Any], str, Remake]] = field(default_factory=list)
    removed: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    items: list[tuple[int, list[Any], dict[Any, Remake]]] = field(default_factory=list)
    assumed: int | None = None
    otherwise: list[str] = field(default_factory=list)

    def put(self, owners: Sequence[Tensor], grads: Sequence[Tensor | None], results: Sequence[Any], call: Any) -> None:
        """Leaves what the step leaves, after a call with these `(args, kwargs)`; `grads` are those of `self.grads`."""
        for number, requires_grad in self.trainable:
            owners[number].requires_grad_(requires_grad)
        for (number, _), grad in zip(self.grads, grads, strict=True):
            owners[number].grad = grad
        for number, remake in self.filled:
            cast(Tensor, owners[number].grad).detach().copy_(remake(results))
        for _, leaf, is_scaled, has_foreign_part in self.flags:
            leaf.notes.is_scaled, leaf.notes.has_foreign_part = is_scaled, has_foreign_part
        this_call = object()
        for recorder, remakes, appends, joins, clipped in self.rows:
            passes = [{leaf: remake(results) for leaf, remake in of_pass.items()} for of_pass in remakes]
            set_rows(recorder, passes, this_call, appends=appends, joins=joins)
            recorder.note_grads(clipped)
        for parameter, remake in self.shown:
            parameter().grad_sample = remake(results)
        for values, name, remake in self.attributes:
            values[name] = remake(results)
        for values, name in self.removed:
            values.pop(name, None)
        if self.items:
            changed = list(containers(call))
            for number, gone, new in self.items:
                put_items(changed[number], gone, {key: remake(results) for key, remake in new.items()})

    def give_rows_to(self, recorders: list[Recorder]) -> None:
        """Lets the rows go to recorders that have taken the places of those of the trace, for the same parameters."""
        if recorders == self.recorders:
            return
        by_former = dict(zip(self.recorders, recorders, strict=True))

        def renewed(leaf: Leaf, recorder: Recorder) -> Leaf:
            return by_former[recorder].leaf_of(cast(Tensor, leaf.parameter()))

        self.rows = [
            RecorderRows(
                by_former[recorder],
                [{renewed(leaf, recorder): remake for leaf, remake in of_pass.items()} for of_pass in passes],
                appends,
                joins,
                {renewed(leaf, recorder) for leaf in clipped},
            )
            for recorder, passes, appends, joins, clipped in self.rows
        ]
        self.flags = [
            (by_former[recorder], renewed(leaf, recorder), is_scaled, has_foreign_part)
            for recorder, leaf, is_scaled, has_foreign_part in self.flags
        ]
        self.recorders = recorders

    # In these, `results` are those of the graph, to which what is found is added.

    def note_grads(
        self,
        owners: Sequence[Tensor],
        before: Sequence[tuple[Tensor | None, bool]],  # of each owner: its `.grad`, and whether it required gradients
        versions: Mapping[int, int],  # of each `.grad` that was zero, by the owner's number
        results: list[Any],
    ) -> None:
        """Notes which owners have another `.grad` than before, or numbers in one that was zero, or were frozen."""
        for number, (owner, (old_grad, was_trainable)) in enumerate(zip(owners, before, strict=True)):
            if owner.requires_grad != was_trainable:
                self.trainable.append((number, not was_trainable))
            if owner.grad is not None and owner.grad.is_sparse:
                raise OnlyEager("its gradients are sparse")
            if owner.grad is not old_grad:
                self.grads.append((number, None if owner.grad is None else packed(owner.grad, results)))
            elif owner.grad is not None and owner.grad._version != versions.get(number, owner.grad._version):
                self.filled.append((number, packed(owner.grad, results)))

    def note_assumptions(self, conditions: Sequence[tuple[Tensor, str]], results: list[Any]) -> None:
        """Notes what the trace has assumed, and what it means where that does not hold."""
        if conditions:
            self.assumed, self.otherwise = len(results), [otherwise for _, otherwise in conditions]
            results.append(torch.stack([condition for condition, _ in conditions]))
            results.append(results[-1].all())

    def note_rows(self, recorder: Recorder, hidden_before: int, results: list[Any], *, looked: bool) -> None:
        """Notes the rows that a recorder holds; `hidden_before` parameters had rows from before the call.

        Where the gradients from before were looked at, notes how `.grad` stands to the rows, if none are from before.
        """
        self.recorders.append(recorder)
        recorder.drop_outdated_rows()
        if recorder.rows_stand_alone:
            raise OnlyEager("it ends with the rows of torch.autograd.grad(..., create_graph=True)")
        hidden = [leaf for leaf in recorder.leaves if has_hidden_rows(leaf)]
        if hidden and (len(hidden) < len(recorder.leaves.with_rows()) or len(hidden) < hidden_before):
            raise OnlyEager(
                "it leaves some of the per-sample gradients from before the call (clear them all, model.zero_grad())"
            )
        parameters = {leaf: leaf.parameter() for leaf in recorder.leaves}
        for leaf, parameter in parameters.items():
            shown = getattr(parameter, "grad_sample", None)
            if parameter is not None and leaf.was_reset() and not is_hidden(shown):
                self.shown.append((leaf.parameter, packed(shown, results)))
        own = {pass_: rows for pass_, rows in recorder.store.held.items() if not any(map(is_hidden, rows.values()))}
        passes = [{leaf: packed(rows, results) for leaf, rows in pass_rows.items()} for pass_rows in own.values()]
        if passes or not hidden:
            clipped = {leaf for leaf, value in parameters.items() if value is not None and recorder.is_clipped(value)}
            joins = next(iter(own), None) is recorder.passes.first
            self.rows.append(RecorderRows(recorder, passes, bool(hidden), joins, clipped))
        if looked and not hidden:
            notes = ((leaf, leaf.notes) for leaf in recorder.leaves)
            self.flags += [(recorder, leaf, of_leaf.is_scaled, of_leaf.has_foreign_part) for leaf, of_leaf in notes]

    def note_attributes(self, saved: Saved, results: list[Any], recorders: Sequence[Recorder]) -> None:
        """Notes which attributes are others than before, but for the rows that recorders hold."""
        parameters = [leaf.parameter() for recorder in recorders for leaf in recorder.leaves]
        recorded = {id(vars(parameter)) for parameter in parameters if parameter is not None}
        for values, before in saved:
            for name, value in values.items():
                if name == "grad_sample" and id(values) in recorded:
                    continue
                if name not in before or value is not before[name]:
                    if name == "_recorder":
                        raise OnlyEager("it switches per-sample mode off and on")
                    self.attributes.append((values, name, packed(value, results)))
            self.removed += [(values, name) for name in before if name not in values]

    def note_items(self, items: Sequence[tuple[Any, dict[Any, Any]]], results: list[Any]) -> None:
        """Notes what was done to lists, dicts and dataclasses among the arguments, given with what they held."""
        for number, (container, before) in enumerate(items):
            after = items_of(container)
            removed = [key for key in before if key not in after]
            new = {key: value for key, value in after.items() if key not in before or value is not before[key]}
            if removed or new:
                self.items.append((number, removed, packed_items(container, new, results)))
