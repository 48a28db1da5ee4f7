"""A recorder while a step is traced, and after one that has run as a graph (`compile.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from expanded_nn.factored import is_unseen, unseen
from expanded_nn.recording.backward import Backward
from expanded_nn.recording.passes import Passes, PassStage
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.store import Store
from expanded_nn.recording.watch import Leaf, Shown


@contextmanager
def apart(recorder: Recorder, is_clipped: Callable[[Tensor], bool]) -> Iterator[None]:
    """What happens meanwhile is forgotten afterwards; rows that are held are there, but cannot be looked at.

    Args:
        recorder: The recorder.
        is_clipped: Whether what is in the `.grad` of a parameter counts as set by clipping.
    """
    names = "settings", "passes", "backward", "store", "expanded"
    kept = {name: getattr(recorder, name) for name in names}
    known = {leaf: (dict(vars(leaf)), getattr(leaf.parameter(), "grad_sample", None)) for leaf in recorder.leaves}
    watched = dict(recorder.leaves.known)
    recorder.settings = replace(recorder.settings, materialize=False)
    recorder.passes, recorder.backward = Passes(), Backward(recorder.backward_is_over)
    recorder.store, recorder.expanded = Store(materialize=False), {}
    for leaf in known:
        _begin_anew(leaf, is_clipped)
    held = {leaf: leaf.shown.rows for leaf in known if leaf.shown.rows is not None}
    if held:
        recorder.store.held[recorder.passes.new(0)] = held
    try:
        yield
    finally:
        for leaf in recorder.leaves:
            if leaf not in known and leaf.handle is not None:
                leaf.handle.remove()
        recorder.leaves.known = watched
        for leaf, (fields, rows) in known.items():
            vars(leaf).update(fields)
            parameter = leaf.parameter()
            if parameter is not None:
                parameter.grad_sample = rows  # type: ignore[attr-defined]
        vars(recorder).update(kept)


def _begin_anew(leaf: Leaf, is_clipped: Callable[[Tensor], bool]) -> None:
    """Forgets the past of a parameter: what is in `.grad` is new, and rows that are held are not seen."""
    parameter = leaf.parameter()
    rows = None if leaf.shown.rows is None else unseen(leaf.shown.rows)
    leaf.shown, leaf.sent, leaf.memory = Shown(rows), {}, None
    leaf.is_scaled = leaf.has_more = False
    leaf.lacking = leaf.clipped = None
    if parameter is not None:
        parameter.grad_sample = rows  # type: ignore[attr-defined]
        if parameter.grad is not None and is_clipped(parameter):
            leaf.clipped = weakref.ref(parameter.grad), parameter.grad._version
    leaf.note_grad()


def looks_past(leaf: Leaf) -> bool:
    """Whether `apart` shows rows of this parameter that were held before."""
    return leaf.shown.rows is not None and is_unseen(leaf.shown.rows)


def take(recorder: Recorder, held: Sequence[Mapping[Leaf, Tensor]]) -> None:
    """Rows that a graph has made, pass by pass, in place of those held."""
    recorder.store.clear()
    for of_pass in held:
        pass_ = recorder.passes.new(next(iter(of_pass.values())).shape[0])
        pass_.stage = PassStage.DONE
        recorder.store.held[pass_] = dict(of_pass)
    recorder.passes.current = None
    recorder.expanded.clear()
    for leaf in recorder.leaves:
        leaf.shown = Shown()
        recorder.store.show(leaf)
