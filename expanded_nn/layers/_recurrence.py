"""The recurrences behind `rnn.py`: one layer in one direction, over sequences of equal or different lengths.

The forward is torch's fused kernel on the one shared weight. The backward computes all gates again at once, as the
hidden states are known, and goes back over time only for the gradients of the pre-activations; each weight's rows
are then one sum of outer products over all steps.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expanded_nn._gemm import add_product, affine
from expanded_nn._shared import is_shared, owned, shared
from expanded_nn._terms import in_own_dtype, is_batched
from expanded_nn.layers._steps import Steps
from expanded_nn.layers.linear import linear, outer_rows


class Weights(NamedTuple):
    """The parameters of one layer in one direction: expanded, or the shared ones behind them."""

    ih: Tensor  # (B, gates, in)
    hh: Tensor  # (B, gates, out)
    bias_ih: Tensor | None  # (B, gates)
    bias_hh: Tensor | None  # (B, gates)
    hr: Tensor | None = None  # (B, out, hidden)


class Gradients(NamedTuple):
    """What a recurrence's own backward gives."""

    ih: Tensor  # (N, gates): of weight_ih x + bias_ih
    hh: Tensor  # (N, gates): of weight_hh h + bias_hh
    h0: Tensor  # (B, out)
    c0: Tensor | None = None  # (B, hidden)
    hr: tuple[Tensor, Tensor] | None = None  # (N, out), (N, hidden): of weight_hr h, and h


class Recurrence(ABC):
    """The equations of one step, forward and backward."""

    @abstractmethod
    def fused(
        self, steps: Steps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor | None]:
        """Torch's own kernel: the outputs, laid out as `x`, and the last cell states."""

    @abstractmethod
    def step(
        self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next states of all samples from `weight_ih x + bias_ih` and `weight_hh h + bias_hh`; differentiable."""

    @abstractmethod
    def backward(self, steps: Steps, saved: Saved, weights: Weights, g: Tensor, g_c: Tensor | None) -> Gradients:
        """The gradients of all pre-activations, by a loop back over time.

        Args:
            steps: Where the steps lie.
            saved: What is known of the forward.
            weights: The shared ones.
            g: The gradient of the outputs, `(N, out)`; it is overwritten.
            g_c: The gradient of the last cell states, `(B, hidden)`.
        """


class Saved(NamedTuple):
    """Inputs, outputs and states of a forward, as rows."""

    x: Tensor  # (N, in)
    h: Tensor  # (N, out): the state before each step
    y: Tensor  # (N, out)
    c0: Tensor | None  # (B, hidden)


class Elman(Recurrence):
    """`h' = tanh(weight_ih x + bias_ih + weight_hh h + bias_hh)`, or `relu`.

    Args:
        relu: Whether it is `relu`.
    """

    def __init__(self, *, relu: bool = False) -> None:
        self.relu = relu

    def fused(
        self, steps: Steps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor | None]:
        if steps.cell:
            cell = torch.rnn_relu_cell if self.relu else torch.rnn_tanh_cell
            return cell(x[0], h0, *weights[:4])[None], None
        layer = torch.rnn_relu if self.relu else torch.rnn_tanh
        return _run(layer, steps, x, h0[None], weights)[0], None

    def step(
        self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        z = of_x + of_h
        return torch.relu(z) if self.relu else torch.tanh(z), None

    def backward(self, steps: Steps, saved: Saved, weights: Weights, g: Tensor, g_c: Tensor | None) -> Gradients:
        y = saved.y
        slope = (y > 0).to(y.dtype) if self.relu else torch.addcmul(y.new_ones(()), y, y, value=-1)
        gs, slopes = steps.split(g), steps.split(slope)
        g_h0 = g.new_zeros(steps.batch, g.shape[1])
        for t in reversed(range(len(gs))):
            gs[t].mul_(slopes[t])
            add_product(_first(gs[t - 1] if t else g_h0, steps.sizes[t]), gs[t], weights.hh)
        return Gradients(g, g, g_h0)


class Lstm(Recurrence):
    """`c' = f c + i n`, `h' = o tanh(c')`, or `weight_hr` times that."""

    def fused(
        self, steps: Steps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor | None]:
        assert c0 is not None
        if steps.cell:
            y, c = torch.lstm_cell(x[0], (h0, c0), *weights[:4])
            return y[None], c
        y, _, c = _run(torch.lstm, steps, x, (h0[None], c0[None]), weights)
        return y, c[0]

    def step(
        self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert c is not None
        i, f, n, o = (of_x + of_h).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
        y = torch.sigmoid(o) * torch.tanh(c)
        return y if weight_hr is None else linear(y, weight_hr), c

    def backward(self, steps: Steps, saved: Saved, weights: Weights, g: Tensor, g_c: Tensor | None) -> Gradients:
        x, h, y, c0 = saved
        assert c0 is not None
        bias = None if weights.bias_ih is None or weights.bias_hh is None else weights.bias_ih + weights.bias_hh
        z = affine(torch.cat([x, h], 1), torch.cat([weights.ih, weights.hh], 1), bias)
        gates = z.unflatten(1, (4, c0.shape[1]))
        gates[:, :2].sigmoid_()
        gates[:, 2].tanh_()
        gates[:, 3].sigmoid_()
        i, f, n, o = gates.unbind(1)
        entering, forget = i * n, f.clone(memory_format=torch.contiguous_format)
        c = _cell_states_before(steps, c0, forget, entering)
        new_c = torch.addcmul(entering, forget, c)
        hidden = y if weights.hr is None else o * new_c.tanh()
        half = new_c.mul_(2).sigmoid_()  # tanh is slow, and 1 - tanh(c)^2 = 4 s (1 - s) with s = sigmoid(2 c)
        slope = torch.addcmul(half, half, half, value=-1, out=half).mul_(o).mul_(4)
        # each gate gives way to the derivative of its pre-activation: by h for o, by c for the others
        torch.addcmul(hidden, hidden, o, value=-1, out=o)
        torch.addcmul(i, entering, n, value=-1, out=n)
        torch.addcmul(entering, entering, i, value=-1, out=i)
        kept = c.mul_(f)
        torch.addcmul(kept, kept, f, value=-1, out=f)

        gs, zs, slopes, forgets = map(steps.split, (g, z, slope, forget))
        by_c, by_h = steps.split(gates[:, :3]), steps.split(o)
        g_h0 = g.new_zeros(steps.batch, g.shape[1])
        g_c = torch.zeros_like(c0) if g_c is None else g_c.clone()
        for t in reversed(range(len(gs))):
            size = steps.sizes[t]
            g_h = gs[t] if weights.hr is None else torch.mm(gs[t], weights.hr)
            g_now = _first(g_c, size).addcmul_(g_h, slopes[t])
            by_c[t].mul_(g_now.unsqueeze(1))
            by_h[t].mul_(g_h)
            g_now.mul_(forgets[t])
            add_product(_first(gs[t - 1] if t else g_h0, size), zs[t], weights.hh)
        return Gradients(z, z, g_h0, g_c, None if weights.hr is None else (g, hidden))


class Gru(Recurrence):
    """`h' = (1 - z) n + z h` with `n = tanh(weight_in x + bias_in + r (weight_hn h + bias_hn))`."""

    def fused(
        self, steps: Steps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor | None]:
        if steps.cell:
            return torch.gru_cell(x[0], h0, *weights[:4])[None], None
        return _run(torch.gru, steps, x, h0[None], weights)[0], None

    def step(
        self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = of_x.chunk(3, 1), of_h.chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return n + z * (h - n), None

    def backward(self, steps: Steps, saved: Saved, weights: Weights, g: Tensor, g_c: Tensor | None) -> Gradients:
        x, h, _, _ = saved
        size = h.shape[1]
        of_x, of_h = affine(x, weights.ih, weights.bias_ih), affine(h, weights.hh, weights.bias_hh)
        of_h[:, : 2 * size].add_(of_x[:, : 2 * size]).sigmoid_()
        r, z, h_n = of_h.unflatten(1, (3, size)).unbind(1)
        n = of_x[:, 2 * size :].addcmul_(r, h_n).tanh_()
        keep, renew = z.clone(memory_format=torch.contiguous_format), 1 - z
        slope = torch.addcmul(renew, renew * n, n, value=-1)  # of h' by n's pre-activation
        # each gate gives way to the derivative of h' by its pre-activation
        torch.mul((h - n).mul_(renew), z, out=z)
        by_h_n = slope * r
        through_r = by_h_n * h_n
        torch.addcmul(through_r, through_r, r, value=-1, out=r)
        h_n.copy_(by_h_n)

        gs, keeps, zs, by_h = map(steps.split, (g, keep, of_h, of_h.unflatten(1, (3, size))))
        g_h0 = g.new_zeros(steps.batch, size)
        for t in reversed(range(len(gs))):
            by_h[t].mul_(gs[t].unsqueeze(1))
            before = _first(gs[t - 1] if t else g_h0, steps.sizes[t])
            before.addcmul_(gs[t], keeps[t])
            add_product(before, zs[t], weights.hh)
        of_x[:, : 2 * size] = of_h[:, : 2 * size]
        torch.mul(g, slope, out=of_x[:, 2 * size :])
        return Gradients(of_x, of_h, g_h0)


RECURRENCES: dict[str, Recurrence] = {
    "RNN_TANH": Elman(),
    "RNN_RELU": Elman(relu=True),
    "LSTM": Lstm(),
    "GRU": Gru(),
}


def _run(layer: Any, steps: Steps, x: Tensor, states: Any, weights: Weights) -> Any:
    """One of torch's fused kernels, as one layer in one direction."""
    given = [weight for weight in weights if weight is not None]
    how = (given, weights.bias_ih is not None, 1, 0.0, False, False)
    with warnings.catch_warnings():
        if x.is_cuda:  # the weights of one layer among several are no buffer of their own
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        if steps.packed is None:
            return layer(x, states, *how, False)
        return layer(x, steps.packed, states, *how)


def _first(states: Tensor, size: int) -> Tensor:
    return states if states.shape[0] == size else states[:size]


def _cell_states_before(
    steps: Steps,
    c0: Tensor,  # (B, hidden)
    forget: Tensor,  # (N, hidden)
    entering: Tensor,  # (N, hidden)
) -> Tensor:  # (N, hidden)
    """For each row the cell state before its step, by `c' = f c + i n`."""
    states = torch.empty_like(entering)
    before, kept, new = steps.split(states), steps.split(forget), steps.split(entering)
    before[0].copy_(c0)
    for t, size in enumerate(steps.sizes[1:]):
        torch.addcmul(_first(new[t], size), _first(kept[t], size), _first(before[t], size), out=before[t + 1])
    return states


class _Recurrent(torch.autograd.Function):
    """One layer in one direction whose weights are one, expanded over the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        steps: Steps,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.recurrence, ctx.steps = recurrence, steps
        y, c = recurrence.fused(steps, x, h0, c0, _shared_weights(weights))
        # a copy of the outputs, as the next layer may change them in place
        ctx.save_for_backward(x, h0, c0, steps.copied_rows(y, y.dtype), *weights)
        return owned(y), c

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_c: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if g is None and g_c is None:
            return (None,) * (2 + len(needed))
        x, h0, c0, y, *weights = ctx.saved_tensors
        with in_own_dtype(x):
            if torch.is_grad_enabled() or any(each is not None and is_batched(each) for each in (g, g_c)):
                inputs = (x, h0, c0, *weights)
                return None, None, *_composite_gradients(ctx.recurrence, ctx.steps, inputs, needed, g, g_c)
            inputs = (x, h0, c0, y)
            return None, None, *_gradients(ctx.recurrence, ctx.steps, inputs, weights, needed, g, g_c)


def _shared_weights(weights: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Weights:
    ih, hh, *others = (None if each is None else shared(each).to(dtype or each.dtype) for each in weights)
    assert ih is not None
    assert hh is not None
    return Weights(ih, hh, *others)


def _gradients(
    recurrence: Recurrence,
    steps: Steps,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    weights: Sequence[Tensor | None],
    needed: Sequence[bool],
    g: Tensor | None,
    g_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs and the rows of the weights."""
    assert weights[0] is not None
    row_dtype = weights[0].dtype
    dtype = torch.promote_types(row_dtype, torch.float32)
    one = _shared_weights(weights, dtype)
    x, h0, c0, y = (None if each is None else each.to(dtype) for each in inputs)
    assert x is not None
    assert h0 is not None
    assert y is not None
    saved = Saved(steps.rows(x), steps.previous(h0, y), y, c0)
    reached_hr = g is not None or len(steps.sizes) > 1  # the cell state after the first step does not depend on it
    g = torch.zeros_like(y) if g is None else steps.copied_rows(g, dtype)
    found = recurrence.backward(steps, saved, one, g, None if g_c is None else g_c.to(dtype))

    grads: list[Tensor | None] = [None] * len(needed)
    if needed[0]:
        grads[0] = steps.from_rows(affine(found.ih, one.ih.t())).to(inputs[0].dtype)
    if needed[1]:
        grads[1] = found.h0.to(inputs[1].dtype)
    if needed[2] and inputs[2] is not None and found.c0 is not None:
        grads[2] = found.c0.to(inputs[2].dtype)
    ih = steps.by_sample(found.ih)
    hh = ih if found.hh is found.ih else steps.by_sample(found.hh)
    if needed[3]:
        grads[3] = outer_rows(ih, steps.by_sample(saved.x), row_dtype)
    if needed[4]:
        grads[4] = outer_rows(hh, steps.by_sample(saved.h), row_dtype)
    if needed[5]:
        grads[5] = ih.sum(1).to(row_dtype)
    if needed[6]:
        grads[6] = grads[5] if hh is ih and needed[5] else hh.sum(1).to(row_dtype)
    if needed[7] and found.hr is not None and reached_hr:
        g, hidden = found.hr
        grads[7] = outer_rows(steps.by_sample(g), steps.by_sample(hidden), row_dtype)
    return tuple(grads)


def _composite_gradients(
    recurrence: Recurrence,
    steps: Steps,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    g: Tensor | None,
    g_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The same gradients from differentiable operations, so that they have derivatives themselves."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, as one input may be computed from another, whose gradient must not go through the first
        aliases = [None if each is None else each.view_as(each) for each in inputs]
        x, h0, c0, *weights = aliases
        assert x is not None
        assert h0 is not None
        ih, hh, *others = weights
        assert ih is not None
        assert hh is not None
        first_c = None if c0 is None else c0.to(ih.dtype)
        y, c = _composite(recurrence, steps, x.to(ih.dtype), h0.to(ih.dtype), first_c, Weights(ih, hh, *others))
    outputs = [(output, grad) for output, grad in ((y, g), (c, g_c)) if output is not None and grad is not None]
    wanted = [alias for alias, each in zip(aliases, needed, strict=True) if each and alias is not None]
    grads = iter(
        torch.autograd.grad(
            [output for output, _ in outputs],
            wanted,
            [grad.to(output.dtype) for output, grad in outputs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return tuple(
        next(grads) if each and alias is not None else None for alias, each in zip(aliases, needed, strict=True)
    )


def _composite(
    recurrence: Recurrence, steps: Steps, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Weights
) -> tuple[Tensor, Tensor | None]:
    """One layer in one direction, step by step, each sample with its own weights."""
    of_x = linear(steps.by_sample(steps.rows(x)), weights.ih, weights.bias_ih)
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


def recurrent(
    recurrence: Recurrence,
    steps: Steps,
    x: Tensor,  # (T, B, in), or (N, in)
    initial: Sequence[Tensor],  # (B, out), and for an LSTM (B, hidden)
    weights: Weights,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction.

    Args:
        recurrence: The equations of a step.
        steps: Where the steps lie in `x`.
        x: `(T, B, in)`, or the rows `(N, in)` of sequences of different lengths.
        initial: The hidden states before the first step, `(B, out)`, and an LSTM's cell states, `(B, hidden)`.
        weights: Those of each sample, in the user's order; expanded over the batch (stride 0) they run as torch's
            fused kernel.

    Returns:
        The outputs, shaped as `x`, and a list that for an LSTM holds the cell states after each sequence's last
        step, `(B, hidden)`.
    """
    h0, c0 = (*initial, None)[:2]
    assert h0 is not None
    if is_shared(*weights):
        y, c = _Recurrent.apply(recurrence, steps, x, h0, c0, *weights)  # type: ignore[no-untyped-call]
    else:
        y, c = _composite(recurrence, steps, x, h0, c0, weights)
    return y, [] if c is None else [c]
