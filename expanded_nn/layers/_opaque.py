"""The loops over time of the recurrences as single operations of a traced graph, which would take minutes to compile.

They are there while a step is traced (`compile.py`), for sequences of one length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from expanded_nn._modes import is_autocast
from expanded_nn._traced import refuse_values
from expanded_nn.layers._equations import RECURRENCES, Gradients, Recurrence, Saved, Weights
from expanded_nn.layers._steps import Steps


def forward(
    recurrence: Recurrence,
    steps: Steps,
    x: Tensor,  # (T, B, in)
    h0: Tensor,  # (B, out)
    c0: Tensor | None,  # (B, hidden)
    weights: Weights,
) -> tuple[Tensor, Tensor | None]:
    """`Recurrence.fused` as one operation."""
    if steps.packed is not None:
        refuse_values("sequences have different lengths")
    if is_autocast():
        refuse_values("a recurrent layer runs under autocast")
    y, *c = _operations().recurrence(_kind(recurrence), steps.cell, x, h0, c0, list(weights))
    return y, c[0] if c else None


def backward(
    recurrence: Recurrence, steps: Steps, saved: Saved, weights: Weights, g: Tensor, g_c: Tensor | None
) -> Gradients:
    """`Recurrence.backward` as one operation."""
    tensors = (saved.x, saved.h, saved.y, saved.c0, list(weights), g, g_c)
    ih, h0, *others = _operations().recurrence_backward(_kind(recurrence), steps.cell, *tensors)
    hh = others.pop(0) if recurrence is RECURRENCES["GRU"] else ih
    c0 = others.pop(0) if saved.c0 is not None else None
    return Gradients(ih, hh, h0, c0, (others[0], others[1]) if others else None)


def _kind(recurrence: Recurrence) -> str:
    return next(kind for kind, known in RECURRENCES.items() if known is recurrence)


@cache
def _operations() -> Any:
    """The two operations, registered when a recurrence is traced for the first time."""
    library = torch.library.Library("expanded_nn", "FRAGMENT")
    library.define("recurrence(str kind, bool cell, Tensor x, Tensor h0, Tensor? c0, Tensor?[] weights) -> Tensor[]")
    library.define(
        "recurrence_backward(str kind, bool cell, Tensor x, Tensor h, Tensor y, Tensor? c0, Tensor?[] weights, "
        "Tensor g, Tensor? g_c) -> Tensor[]"
    )
    library.impl("recurrence", _run, "CompositeExplicitAutograd")
    library.impl("recurrence_backward", _run_back, "CompositeExplicitAutograd")
    torch.library.register_fake("expanded_nn::recurrence", _shapes, lib=library)
    torch.library.register_fake("expanded_nn::recurrence_backward", _shapes_back, lib=library)
    _KEPT.append(library)  # its operations go with it
    return torch.ops.expanded_nn


_KEPT: list[torch.library.Library] = []


def _run(kind: str, cell: bool, x: Tensor, h0: Tensor, c0: Tensor | None, weights: list[Tensor | None]) -> list[Tensor]:
    y, c = RECURRENCES[kind].fused(Steps.of(x, cell=cell), x, h0, c0, Weights(*weights))  # type: ignore[arg-type]
    return [y] if c is None else [y, c.clone()]


def _shapes(
    kind: str, cell: bool, x: Tensor, h0: Tensor, c0: Tensor | None, weights: list[Tensor | None]
) -> list[Tensor]:
    y = x.new_empty(*x.shape[:2], h0.shape[1])
    return [y] if c0 is None else [y, c0.new_empty(c0.shape)]


def _run_back(kind: str, cell: bool, *tensors: Any) -> list[Tensor]:
    x, h, y, c0, weights, g, g_c = tensors
    saved, given = Saved(x, h, y, c0, ()), Weights(*weights)
    found = RECURRENCES[kind].backward(Steps.of(x, cell=cell), saved, given, g.clone(), g_c)
    hr = None if found.hr is None else (found.hr[0].clone(), found.hr[1].clone())
    return _listed(kind, found._replace(hr=hr))


def _listed(kind: str, found: Gradients) -> list[Tensor]:
    """What there is of the gradients; `hh` is `ih` but for a GRU."""
    hh = found.hh if kind == "GRU" else None
    return [each for each in (found.ih, found.h0, hh, found.c0, *(found.hr or ())) if each is not None]


def _shapes_back(kind: str, cell: bool, *tensors: Any) -> list[Tensor]:
    x, _, y, c0, weights, *_ = tensors
    hh, hr = weights[1], weights[4]
    z, hidden = y.new_empty(y.shape[0], hh.shape[0]), hh.shape[0] // 4
    return _listed(
        kind,
        Gradients(
            z,
            y.new_empty(z.shape),
            y.new_empty(x.shape[1], y.shape[1]),
            None if c0 is None else c0.new_empty(c0.shape),
            None if hr is None else (y.new_empty(y.shape), y.new_empty(y.shape[0], hidden)),
        ),
    )
