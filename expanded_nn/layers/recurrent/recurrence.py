"""The recurrences behind `rnn.py`: one layer in one direction, over sequences of equal or different lengths.

The forward runs on the one shared weight. The backward has the gradients of all steps' pre-activations, and each
weight's rows are one sum of outer products over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.common.modes import is_autocast, is_batched, without_autocast
from expanded_nn.common.shared import as_no_view, is_shared, shared
from expanded_nn.common.traced import is_traced
from expanded_nn.core import cost
from expanded_nn.core.terms import Outer, PaddedOuter
from expanded_nn.layers.linear import linear, outer_rows, positions
from expanded_nn.layers.recurrent import opaque
from expanded_nn.layers.recurrent.equations import Inputs, Loops, Recurrence, Saved, States, Weights
from expanded_nn.layers.recurrent.steps import Steps
from expanded_nn.recording.expand import keeps_factors, saved_tensors


class Arranged(Protocol):
    """How n sequences belong to B samples, where a sample may have several."""

    def rows_of(self, values: Tensor) -> Tensor:
        """For each sequence the value of its sample: from `(B, *)` to `(n, *)`."""

    def padded(self, x: Tensor) -> Tensor:
        """The sequences of each sample, and zeros behind them: from `(n, *)` to `(B, sequences, *)`."""


class _Recurrent(torch.autograd.Function):
    """One layer in one direction, whose weights all samples share."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        steps: Steps,
        keep_gates: bool,
        arrangement: Arranged | None,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights: Tensor | None,
    ) -> States:
        ctx.set_materialize_grads(False)
        ctx.how = recurrence, steps, arrangement
        inputs, loops = Inputs(steps, x, h0, c0, _shared_weights(weights)), _loops(recurrence)
        y, c, gates = loops.with_gates(inputs) if keep_gates else (*loops.fused(inputs), ())
        # a copy of the outputs, as the next layer may change them in place
        ctx.save_for_backward(x, h0, c0, steps.flat_copy(y, y.dtype), *weights, *gates)
        return as_no_view(y), c

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_c: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        if g is None and g_c is None:
            return (None,) * (4 + len(needed))
        recurrence, steps, arrangement = ctx.how
        x, h0, c0, y, *weights_and_gates = saved_tensors(ctx)
        weights = Weights(*weights_and_gates[: len(Weights._fields)])
        gates = tuple(weights_and_gates[len(weights) :])
        with without_autocast():
            if torch.is_grad_enabled() or any(grad is not None and is_batched(grad) for grad in (g, g_c)):
                inputs = (x, h0, c0, *weights)
                grads = _composite_gradients(recurrence, steps, arrangement, inputs, needed, g, g_c)
            else:
                saved = (x, h0, c0, y)
                grads = _gradients(recurrence, steps, arrangement, saved, gates, weights, needed, g, g_c)
        return None, None, None, None, *grads


def _loops(recurrence: Recurrence) -> Loops:
    return opaque.Operations(recurrence) if is_traced() else recurrence


def _shared_weights(weights: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Weights:
    tensors = [None if weight is None else shared(weight).to(dtype or weight.dtype) for weight in weights]
    return Weights(*tensors)  # type: ignore[arg-type]


def _gradients(
    recurrence: Recurrence,
    steps: Steps,
    arrangement: Arranged | None,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    gates: tuple[Tensor, ...],
    weights: Weights,
    needed: Sequence[bool],
    g: Tensor | None,
    g_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs and the rows of the weights."""
    x, h0, c0, y = inputs
    row_dtype, keep_factors = weights.ih.dtype, arrangement is None and keeps_factors(*weights)

    def by_sample(flat: Tensor) -> Tensor:  # (B, T, features)
        of_sequences = steps.by_sample(flat)
        return of_sequences if arrangement is None else positions(arrangement.padded(of_sequences))

    def rows(g: Tensor, a: Tensor) -> Tensor:
        kind = Outer if arrangement is None else PaddedOuter
        return outer_rows(g, by_sample(a), row_dtype, keep_factors=keep_factors, kind=kind)

    dtype = torch.promote_types(row_dtype, torch.float32)
    shared_weights, y, first_c = _shared_weights(weights, dtype), y.to(dtype), None if c0 is None else c0.to(dtype)
    saved = Saved(steps, x.to(dtype), steps.previous(h0.to(dtype), y), y, first_c, shared_weights)
    reached_hr = g is not None or steps.count > 1  # the cell state after the first step does not depend on it
    g = torch.zeros_like(y) if g is None else steps.flat_copy(g, dtype)
    loops, g_c = _loops(recurrence), None if g_c is None else g_c.to(dtype)
    gradients = recurrence.backward(loops, saved, gates, g, g_c)

    grads: list[Tensor | None] = [None] * len(needed)
    if needed[0]:
        grads[0] = steps.unflattened(F.linear(gradients.ih, shared_weights.ih.t())).to(x.dtype)
    if needed[1]:
        grads[1] = gradients.h0.to(h0.dtype)
    if needed[2] and c0 is not None and gradients.c0 is not None:
        grads[2] = gradients.c0.to(c0.dtype)
    ih = by_sample(gradients.ih)
    hh = ih if gradients.hh is gradients.ih else by_sample(gradients.hh)
    if needed[3]:
        grads[3] = rows(ih, saved.x)
    if needed[4]:
        grads[4] = rows(hh, saved.h)
    if needed[5]:
        grads[5] = ih.sum(1).to(row_dtype)
    if needed[6]:
        grads[6] = grads[5] if hh is ih and needed[5] else hh.sum(1).to(row_dtype)
    if needed[7] and gradients.hr is not None and reached_hr:
        g, hidden = gradients.hr
        grads[7] = rows(by_sample(g), hidden)
    return tuple(grads)


def _composite_gradients(
    recurrence: Recurrence,
    steps: Steps,
    arrangement: Arranged | None,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    g: Tensor | None,
    g_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The same gradients from differentiable operations, so that they have derivatives themselves."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, as one input may be computed from another, whose gradient must not go through the first
        aliases: list[Any] = [None if x is None else x.view_as(x) for x in inputs]
        x, h0, c0, *weights = aliases
        dtype = weights[0].dtype
        first_c = None if c0 is None else c0.to(dtype)
        own_weights = _of_sequences(Weights(*weights), arrangement)
        y, c = _composite(recurrence, Inputs(steps, x.to(dtype), h0.to(dtype), first_c, own_weights))
    outputs = [(output, grad) for output, grad in ((y, g), (c, g_c)) if output is not None and grad is not None]
    ends, gradients = [output for output, _ in outputs], [grad.to(output.dtype) for output, grad in outputs]
    wanted = [place for place, is_needed in enumerate(needed) if is_needed]
    sources = [aliases[place] for place in wanted]
    grads = torch.autograd.grad(ends, sources, gradients, create_graph=create_graph, allow_unused=True)
    return tuple(map(dict(zip(wanted, grads, strict=True)).get, range(len(needed))))


def _of_sequences(weights: Weights, arrangement: Arranged | None) -> Weights:
    """The weights of each sequence, where a sample may have several."""
    if arrangement is None:
        return weights
    return Weights(*(None if weight is None else arrangement.rows_of(weight) for weight in weights))  # type: ignore[arg-type]


def _composite(recurrence: Recurrence, inputs: Inputs) -> States:
    """One layer in one direction, step by step, each sample with its own weights."""
    steps, x, h0, c0, weights = inputs
    of_x = linear(steps.by_sample(x), weights.ih, weights.bias_ih)
    h, c = steps.in_samples_order(h0), None if c0 is None else steps.in_samples_order(c0)
    outputs = []
    for t, of_x_now in enumerate(of_x.unbind(1)):
        of_h = linear(h, weights.hh, weights.bias_hh)
        new_h, new_c = recurrence.step(of_x_now, of_h, h, c, weights.hr)
        if steps.packed is None:
            h, c = new_h, new_c
        else:
            running = steps.running[:, t : t + 1]
            h = torch.where(running, new_h, h)
            c = None if c is None or new_c is None else torch.where(running, new_c, c)
        outputs.append(h)
    y = steps.from_samples(torch.stack(outputs, 1))
    return y, None if c is None else steps.in_sequences_order(c)


def _keeps_gates(recurrence: Recurrence, steps: Steps, weights: Weights, *inputs: Tensor | None) -> bool:
    """Whether a backward may follow, in the dtype of the forward, for which gates are worth keeping."""
    tensors = [x for x in (*inputs, *weights) if x is not None]
    has_kernel, threads = recurrence.has_kernel(steps, weights), torch.get_num_threads()
    states = steps.batch * weights.hh.shape[-1]
    return (
        torch.is_grad_enabled()
        and bool(steps.count)  # without steps, torch's own error tells what is wrong
        and not steps.cell
        and any(x.requires_grad for x in tensors)
        and all(cost.keeps_gates(x.dtype, x.device.type, states, threads, has_kernel=has_kernel) for x in tensors)
        and not is_autocast()
    )


def recurrent(
    recurrence: Recurrence,
    steps: Steps,
    x: Tensor,  # (T, B, in), or (N, in)
    initial: Sequence[Tensor],  # (B, out), and for an LSTM (B, hidden)
    weights: Weights,
    arrangement: Arranged | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction, from the first hidden states, `(B, out)`, and an LSTM's cell states, `(B, hidden)`.

    The weights are those of each sample, in the user's order; expanded over the batch (stride 0) they run as torch's
    fused kernel. With an `arrangement` there are n sequences in place of B.

    Returns:
        The outputs, shaped as `x`, and a list that for an LSTM holds the cell states after each sequence's last
        step, `(B, hidden)`.
    """
    h0, c0 = initial[0], initial[1] if len(initial) > 1 else None
    if is_shared(*weights):
        keep_gates = _keeps_gates(recurrence, steps, weights, x, h0, c0)
        y, c = _Recurrent.apply(recurrence, steps, keep_gates, arrangement, x, h0, c0, *weights)  # type: ignore[no-untyped-call]
    else:
        y, c = _composite(recurrence, Inputs(steps, x, h0, c0, _of_sequences(weights, arrangement)))
    return y, [] if c is None else [c]


def stacked(
    recurrence: Recurrence,
    steps: Steps,
    x: Tensor,  # (T, B, in), or (N, in)
    initial: Sequence[Tensor],  # each (layers * directions, B, features)
    weights: Sequence[Weights],  # layers * directions
    directions: int,
    dropout: float,  # between the layers
    arrangement: Arranged | None = None,
) -> tuple[Any, ...]:
    """Layers times directions: the last layer's outputs, shaped as `x`, and the last states of all of them.

    The states are a list with those of each layer and direction; an LSTM has two kinds of states, so two lists.
    """
    last: list[list[Tensor]] = [[] for _ in initial]
    for number in range(0, len(weights), directions):
        outputs = []
        for direction in range(directions):
            first = [states[number + direction] for states in initial]
            along = steps.reversed(x) if direction else x
            y, cells = recurrent(recurrence, steps, along, first, weights[number + direction], arrangement)
            for states, state in zip(last, (steps.last(y), *cells), strict=True):
                states.append(state)
            outputs.append(steps.reversed(y) if direction else y)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if dropout and number + directions < len(weights):
            x = F.dropout(x, dropout)
    return x, *last
