"""The loops over time of the recurrences, each as one operation of a traced graph.

Unrolled they would take minutes to compile. They are used while a step is traced (`compile.py`), for sequences of equal
length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import is_autocast
from expanded_nn.common.traced import refuse_values
from expanded_nn.layers.recurrent.equations import RECURRENCES, Gates, Inputs, LoopInputs, Recurrence, States, Weights
from expanded_nn.layers.recurrent.steps import Steps


class Operations:
    """The loops of a recurrence, any but a user's own, each as one operation."""

    def __init__(self, recurrence: Recurrence) -> None:
        self._kind = next(kind for kind in RECURRENCES if RECURRENCES[kind] is recurrence)

    def fused(self, inputs: Inputs) -> States:
        y, c, _ = self._forward(inputs, keep_gates=False)
        return y, c

    def with_gates(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Gates]:
        return self._forward(inputs, keep_gates=True)

    def _forward(self, inputs: Inputs, *, keep_gates: bool) -> tuple[Tensor, Tensor | None, Gates]:
        steps, x, h0, c0, weights = inputs
        if steps.packed is not None:
            refuse_values("sequences have different lengths")
        if is_autocast():
            refuse_values("a recurrent layer runs under autocast")
        y, *rest = _operations().recurrence(self._kind, steps.cell, keep_gates, x, h0, c0, list(weights))
        c, gates = (None, rest) if c0 is None else (rest[0], rest[1:])
        return y, c, tuple(gates)

    def loop_cells(self, steps: Steps, c0: Tensor, f: Tensor, cells: Tensor) -> None:
        _operations().recurrence_cells(steps.count, steps.batch, c0, f, cells)

    def loop(self, inputs: LoopInputs) -> None:
        steps, weights, z, multipliers, *grads = inputs
        sizes = steps.count, steps.batch
        _operations().recurrence_loop(self._kind, *sizes, z, list(multipliers), list(weights), *grads)


_LIBRARIES: list[torch.library.Library] = []  # the operations go with theirs


@cache
def _operations() -> Any:
    """The operations, registered when a recurrence is traced for the first time."""
    library = torch.library.Library("expanded_nn", "FRAGMENT")
    operations: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        # the schema, the function, and one that gives tensors of the results' shapes
        (
            "recurrence(str kind, bool cell, bool keep_gates, Tensor x, Tensor h0, Tensor? c0, Tensor?[] weights) "
            "-> Tensor[]",
            _run,
            _shapes,
        ),
        (
            "recurrence_cells(SymInt steps, SymInt batch, Tensor c0, Tensor f, Tensor(a!) cells) -> ()",
            _cells,
            lambda *_: None,
        ),
        (
            "recurrence_loop(str kind, SymInt steps, SymInt batch, Tensor(a!) z, Tensor[] multipliers, "
            "Tensor?[] weights, Tensor(b!) g, Tensor(c!) g_h, Tensor(d!)? g_c) -> ()",
            _loop,
            lambda *_: None,
        ),
    ]
    for schema, run, fake in operations:
        name = library.define(schema).partition("(")[0]
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"expanded_nn::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return torch.ops.expanded_nn


def _run(kind: str, cell: bool, keep_gates: bool, x: Tensor, h0: Tensor, c0: Any, weights: Any) -> list[Tensor]:
    recurrence, inputs = RECURRENCES[kind], Inputs(Steps.of(x, cell=cell), x, h0, c0, Weights(*weights))
    y, c, gates = recurrence.with_gates(inputs) if keep_gates else (*recurrence.fused(inputs), ())
    return [y, *([] if c is None else [c.clone()]), *gates]


def _shapes(
    kind: str, cell: bool, keep_gates: bool, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Any
) -> list[Tensor]:
    y = x.new_empty(*x.shape[:2], h0.shape[1])
    gates = _shapes_of_gates(kind, x, weights) if keep_gates else []
    return [y, *([] if c0 is None else [c0.new_empty(c0.shape)]), *gates]


def _cells(steps: int, batch: int, c0: Tensor, f: Tensor, cells: Tensor) -> None:
    RECURRENCES["LSTM"].loop_cells(Steps(steps, batch), c0, f, cells)


def _shapes_of_gates(kind: str, x: Tensor, weights: Any) -> list[Tensor]:
    gates = Weights(*weights).hh.shape[0]
    sizes = {"LSTM": [gates, gates // 4, gates // 4], "GRU": [gates, gates // 3]}.get(kind, [])
    return [x.new_empty(x.shape[0] * x.shape[1], size) for size in sizes]


def _loop(kind: str, steps: int, batch: int, z: Tensor, multipliers: list[Tensor], weights: Any, *grads: Any) -> None:
    RECURRENCES[kind].loop(LoopInputs(Steps(steps, batch), Weights(*weights), z, multipliers, *grads))
