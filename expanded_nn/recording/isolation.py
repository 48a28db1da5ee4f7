"""A recorder while a step is traced (`isolated`), and after a traced step has run as a graph (`set_rows`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from expanded_nn.factored import hidden, is_hidden
from expanded_nn.recording.leaf import Leaf, Published
from expanded_nn.recording.passes import PassStage
from expanded_nn.recording.recorder import Recorder


@contextmanager
def isolated(recorder: Recorder, is_clipped: Callable[[Tensor], bool]) -> Iterator[None]:
    """Gives the recorder a state of its own, and its old one back afterwards.

    The rows that were held are there meanwhile, but hidden: they can be dropped or appended to, not looked at. The
    `.grad` of a parameter that `is_clipped` counts as set by clipping.
    """
    before = dict(vars(recorder))
    leaves = {leaf: (dict(vars(leaf)), getattr(leaf.parameter(), "grad_sample", None)) for leaf in recorder.leaves}
    by_id = dict(recorder.leaves.by_id)
    recorder.settings = replace(recorder.settings, materialize=False)
    recorder.begin_anew()
    for leaf in leaves:
        _begin_anew(leaf, is_clipped)
    held = {leaf: leaf.published.rows for leaf in leaves if leaf.published.rows is not None}
    if held:  # in a pass of no forward, which holds the hidden rows and nothing else
        recorder.store.held[recorder.passes.new(0)] = held
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


def _begin_anew(leaf: Leaf, is_clipped: Callable[[Tensor], bool]) -> None:
    """Leaves a parameter without a past: its `.grad` counts as new, and its rows are hidden."""
    parameter = leaf.parameter()
    rows = None if leaf.published.rows is None else hidden(leaf.published.rows)
    place = {"location": leaf.location, "handle": leaf.handle}
    new = Leaf(leaf.parameter, leaf.is_member, leaf.scales_rows, Published(rows), memory=None, **place)
    vars(leaf).update(vars(new))
    if parameter is not None:
        parameter.grad_sample = rows  # type: ignore[attr-defined]
        if parameter.grad is not None and is_clipped(parameter):
            leaf.note_clipped(parameter.grad)
    leaf.note_grad()


def has_hidden_rows(leaf: Leaf) -> bool:
    """Whether a parameter still has the rows that `isolated` has hidden."""
    return leaf.published.rows is not None and is_hidden(leaf.published.rows)


def set_rows(recorder: Recorder, passes: Sequence[Mapping[Leaf, Tensor]]) -> None:
    """Replaces the rows held by those that a graph has made, pass by pass."""
    recorder.store.drop_every_pass()
    for pass_rows in passes:
        pass_ = recorder.passes.new(next(iter(pass_rows.values())).shape[0])
        pass_.stage = PassStage.DONE
        recorder.store.held[pass_] = dict(pass_rows)
    recorder.passes.last = None
    recorder.expanded.clear()
    for leaf in recorder.leaves:
        if passes or leaf.published.rows is not None or leaf.was_reset():
            leaf.published = Published()
            recorder.store.publish(leaf)
