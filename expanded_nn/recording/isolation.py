"""For `enn.compile`: a recorder before and while a step is traced, and after its graph has run.

First `look_at_grads` says what the step will find, `isolated` is around the trace, `set_rows` follows the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from expanded_nn.common.traced import OnlyEager
from expanded_nn.factored import hidden, is_hidden
from expanded_nn.recording.leaf import NO_ROWS, Leaf, Noted, Published, vanishes
from expanded_nn.recording.passes import Pass, PassStage
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.stale import stale

Grads = Mapping[int, tuple[bool, bool]]  # by the parameter's id: whether `.grad` is zero, and its rows stale


def look_at_grads(recorder: Recorder) -> Grads:
    """What a backward would find in each `.grad` that is there, as far as that decides what it does with rows.

    With `accumulate_grad=False` nothing depends on what clipping has set, so these gradients are left out.

    Raises:
        PerSampleError: If a `.grad` was changed so that nothing tells whether the rows held are a part of it.
    """
    accumulates = recorder.settings.accumulate_grad
    held = recorder.leaves.with_rows() if accumulates else []
    stale_leaves = stale(recorder.rows_in_question(held), recorder.name_of)
    states = {}
    for leaf in recorder.leaves:
        parameter = leaf.parameter()
        if parameter is None or parameter.grad is None or (not accumulates and recorder.is_clipped(parameter)):
            continue
        states[id(parameter)] = vanishes(parameter.grad), leaf in stale_leaves and not leaf.was_reset()
    return states


@contextmanager
def isolated(recorder: Recorder, clipped: Collection[int], grads: Grads) -> Iterator[None]:
    """Gives the recorder a state of its own, and its old one back afterwards.

    The rows that were held are there meanwhile, but hidden: they can be dropped or appended to, not looked at.

    Args:
        recorder: The recorder.
        clipped: The ids of the parameters whose `.grad` counts as set by clipping.
        grads: What is known of the gradients.

    Raises:
        OnlyEager: If rows are stale, though there is another gradient in `.grad`; or if they are no part of it.
    """
    if any(is_stale and not is_zero for is_zero, is_stale in grads.values()):
        raise OnlyEager("a .grad was set anew since the last backward, beside per-sample gradients from before")
    if recorder.rows_stand_alone and any(leaf.grad is not None for leaf in recorder.leaves):
        raise OnlyEager("a parameter has the rows of torch.autograd.grad(..., create_graph=True), and a .grad")
    before = dict(vars(recorder))
    leaves = {leaf: (dict(vars(leaf)), getattr(leaf.parameter(), "grad_sample", None)) for leaf in recorder.leaves}
    by_id = dict(recorder.leaves.by_id)
    recorder.settings = replace(recorder.settings, materialize=False)
    recorder.begin_anew()
    for leaf in leaves:
        _begin_anew(leaf, clipped, grads.get(id(leaf.parameter()), (False, False))[1])
    held = {leaf: leaf.published.rows for leaf in leaves if leaf.published.rows is not None}
    if held:  # in a pass of no forward, which holds the hidden rows and nothing else
        recorder.store.held[Pass(0, -1)] = held
    try:
        yield
    finally:
        for leaf in recorder.leaves:
            if leaf not in leaves and leaf.handle is not None:
                leaf.handle.remove()
        recorder.leaves.by_id = by_id
        for leaf, (fields, rows) in leaves.items():
            vars(leaf).update(fields)
            parameter = leaf.parameter()
            if parameter is not None:
                parameter.grad_sample = rows  # type: ignore[attr-defined]
        vars(recorder).update(before)


def _begin_anew(leaf: Leaf, clipped: Collection[int], is_stale: bool) -> None:
    """Makes a parameter as if nothing were known of it: its `.grad` counts as new, and its rows are hidden."""
    parameter, was_reset = leaf.parameter(), leaf.was_reset()
    rows = None if leaf.published.rows is None else hidden(leaf.published.rows)
    own = getattr(parameter, "grad_sample", None)
    place = {"location": leaf.location, "handle": leaf.handle}
    new = Leaf(leaf.parameter, leaf.is_member, leaf.scales_rows, Published(rows), **place)
    vars(leaf).update(vars(new))
    leaf.note_grad()
    if parameter is not None:
        shown = hidden(own) if was_reset and own is not None else None
        parameter.grad_sample = shown if was_reset else rows  # type: ignore[attr-defined]
        if leaf.grad is not None and is_stale:
            # as if it was cleared after clipping: then `stale` does not look at the rows, which are hidden
            leaf.notes.clipped = Noted(leaf.grad, changes_since=1)
        elif id(parameter) in clipped:
            leaf.notes.clipped = leaf.notes.last


def has_hidden_rows(leaf: Leaf) -> bool:
    """Whether a parameter still has the rows that `isolated` has hidden."""
    return leaf.published.rows is not None and is_hidden(leaf.published.rows)


def set_rows(
    recorder: Recorder, passes: Sequence[dict[Leaf, Tensor]], call: object, *, appends: bool, joins: bool
) -> None:
    """Holds the rows that a graph has made in a call, pass by pass: in place of those from before, or behind them.

    If the first pass `joins`, it is that of a forward before the call whose backward has not come, if there is one.
    """
    store, last = recorder.store, recorder.passes.last
    if not appends:
        store.drop_every_pass()
    for number, pass_rows in enumerate(passes):
        batch = next(iter(pass_rows.values())).shape[0]
        is_open = joins and last is not None and last.stage is PassStage.OPEN and last.batch == batch
        pass_ = last if last is not None and is_open else recorder.passes.finished(batch)
        pass_.stage, pass_.reached_by, joins = PassStage.DONE, (call, number), False
        store.held[pass_] = pass_rows
    recorder.passes.last = None
    recorder.expanded.clear()
    if not appends:
        for leaf in recorder.leaves:
            leaf.published = NO_ROWS
    store.publish_all(recorder.leaves)
