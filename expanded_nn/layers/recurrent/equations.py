"""The equations of the recurrences, forward and backward: Elman's, LSTM and GRU.

The backward knows the hidden states. So it computes the gates of all steps at once, if the forward has not kept them,
and the derivatives of the states by the pre-activations; then a loop goes back over time for the gradients only.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.core import cost
from expanded_nn.layers.linear import linear
from expanded_nn.layers.recurrent.steps import Steps

States = tuple[Tensor, Tensor | None]  # hidden states, and an LSTM's cell states


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


class Inputs(NamedTuple):
    """What a forward is given; the loops take the shared weights."""

    steps: Steps
    x: Tensor  # (T, B, in), or (N, in)
    h0: Tensor  # (B, out)
    c0: Tensor | None  # (B, hidden)
    weights: Weights


class Saved(NamedTuple):
    """What a backward knows of the forward, all but `x` flat."""

    steps: Steps
    x: Tensor  # (T, B, in), or (N, in)
    h: Tensor  # (N, out): the state before each step
    y: Tensor  # (N, out)
    c0: Tensor | None  # (B, hidden)
    weights: Weights  # the shared ones


class LoopInputs(NamedTuple):
    """What the loop back over time is given; it works in place."""

    steps: Steps
    weights: Weights  # the shared ones
    z: Tensor  # (N, gates): derivatives of the states by weight_hh h + bias_hh, whose gradients take their place
    multipliers: Sequence[Tensor]  # each (N, hidden): what else gradients are multiplied by
    g: Tensor  # (N, out): the gradient of the outputs; to each is added what comes from the step after it
    g_h: Tensor  # (B, out): zeros; the gradient of the first states is added
    g_c: Tensor | None = None  # (B, hidden): that of the last cell states; that of the first takes its place


Gates = tuple[Tensor, ...]  # each (N, features)


class Loops(Protocol):
    """The loops over time: a recurrence's own, or each as one operation of a traced graph."""

    def fused(self, inputs: Inputs) -> States:
        """Torch's own kernel: the outputs, laid out as `x`, and the last cell states."""

    def with_gates(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Gates]:
        """`fused`, and the gates of all steps, where they are cheaper here than in the backward."""

    def loop_cells(self, steps: Steps, c0: Tensor, f: Tensor, cells: Tensor) -> None:
        """Goes forward over time: adds to what enters an LSTM's cell states, `(N, hidden)`, what stays of the last."""

    def loop(self, inputs: LoopInputs) -> None:
        """Goes back over time, for the gradients of the pre-activations."""


class Recurrence(ABC, Loops):
    """The equations of one step, forward and backward."""

    def with_gates(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Gates]:
        return *self.fused(inputs), ()

    def loop_cells(self, steps: Steps, c0: Tensor, f: Tensor, cells: Tensor) -> None:
        for c_now, f_now in zip(steps.split(cells), steps.split(f), strict=True):
            c0 = c_now.addcmul_(f_now, _first(c0, len(c_now)))

    def has_kernel(self, steps: Steps, weights: Weights) -> bool:
        """Whether `fused` is one kernel for all steps, in which torch makes no call for each."""
        return False

    @abstractmethod
    def step(self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None) -> States:
        """The next states of all samples from `weight_ih x + bias_ih` and `weight_hh h + bias_hh`; differentiable."""

    @abstractmethod
    def backward(self, loops: Loops, saved: Saved, gates: Gates, g: Tensor, g_c: Tensor | None) -> Gradients:
        """The gradients of all pre-activations; `loops` go back over time.

        `g (N, out)` is the gradient of the outputs, and is overwritten; `g_c (B, hidden)` that of the last cell states.
        """


class Elman(Recurrence):
    """`h' = tanh(weight_ih x + bias_ih + weight_hh h + bias_hh)`, or with `relu` in its place."""

    def __init__(self, *, relu: bool = False) -> None:
        self.relu = relu

    def fused(self, inputs: Inputs) -> States:
        if inputs.steps.cell:
            cell = torch.rnn_relu_cell if self.relu else torch.rnn_tanh_cell
            return cell(inputs.x[0], inputs.h0, *inputs.weights[:4])[None], None
        layer = torch.rnn_relu if self.relu else torch.rnn_tanh
        return _run(layer, inputs, inputs.h0[None])[0], None

    def step(self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None) -> States:
        z = of_x + of_h
        return torch.relu(z) if self.relu else torch.tanh(z), None

    def backward(self, loops: Loops, saved: Saved, gates: Gates, g: Tensor, g_c: Tensor | None) -> Gradients:
        y = saved.y
        z = (y > 0).to(y.dtype) if self.relu else torch.addcmul(y.new_ones(()), y, y, value=-1)
        g_h0 = g.new_zeros(saved.steps.batch, g.shape[1])
        loops.loop(LoopInputs(saved.steps, saved.weights, z, (), g, g_h0))
        return Gradients(z, z, g_h0)

    def loop(self, inputs: LoopInputs) -> None:
        steps = inputs.steps
        gs, zs = steps.split(inputs.g), steps.split(inputs.z)
        for t in reversed(range(len(gs))):
            zs[t].mul_(gs[t])
            _first(gs[t - 1] if t else inputs.g_h, steps.sizes[t]).addmm_(zs[t], inputs.weights.hh)


class Lstm(Recurrence):
    """`c' = f c + i n`, `h' = o tanh(c')`, or `weight_hr` times that."""

    def fused(self, inputs: Inputs) -> States:
        assert inputs.c0 is not None
        if inputs.steps.cell:
            y, c = torch.lstm_cell(inputs.x[0], (inputs.h0, inputs.c0), *inputs.weights[:4])
            return y[None], c
        y, _, c = _run(torch.lstm, inputs, (inputs.h0[None], inputs.c0[None]))
        return y, c[0]

    def has_kernel(self, steps: Steps, weights: Weights) -> bool:  # that of oneDNN
        is_at_hand = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        return is_at_hand and steps.packed is None and weights.hr is None and weights.ih.dtype == torch.float32

    def step(self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None) -> States:
        assert c is not None
        i, f, n, o = (of_x + of_h).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
        y = torch.sigmoid(o) * torch.tanh(c)
        return y if weight_hr is None else linear(y, weight_hr), c

    def with_gates(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Gates]:
        steps, x, h, c, weights = inputs
        assert c is not None
        size, outputs = c.shape[1], []
        z, weight_hh = self._of_x(steps.flat(x), weights), _turned(weights.hh, steps)
        gates = z.unflatten(1, (4, size))
        n, cells = z.new_empty(len(z), size), z.new_empty(len(z), size)
        for z_now, i, f, third, o, n_now, c_now in zip(*map(steps.split, (z, *gates.unbind(1), n, cells)), strict=True):
            z_now.addmm_(_first(h, len(z_now)), weight_hh)
            _tanh(third, n_now)
            z_now.sigmoid_()
            c = torch.mul(i, n_now, out=c_now).addcmul_(f, _first(c, len(z_now)))
            h = o * _tanh(c, third)
            if weights.hr is not None:
                h = F.linear(h, weights.hr)
            outputs.append(h)
        y = torch.stack(outputs) if steps.packed is None else torch.cat(outputs)
        return y, steps.last(steps.unflattened(cells)).clone(), (z, n, cells)

    def backward(self, loops: Loops, saved: Saved, gates: Gates, g: Tensor, g_c: Tensor | None) -> Gradients:
        steps, c0 = saved.steps, saved.c0
        assert c0 is not None
        if gates:
            stacked, n, cells = gates
            gates = *stacked.unflatten(1, (4, c0.shape[1])).unbind(1), n, cells
        i, f, tanh, o, n, cells = gates or self._gates(loops, saved)
        entering, forgotten, hidden = i * n, steps.previous(c0, cells).mul_(f), o * tanh
        slope = torch.addcmul(o, hidden, tanh, value=-1)  # of h by c
        hr = None if saved.weights.hr is None else (g, hidden.clone())
        by_n = torch.addcmul(i, entering, n, value=-1)  # of the cell state by the gate's pre-activation
        by_i, by_f = entering.addcmul_(entering, i, value=-1), forgotten.addcmul_(forgotten, f, value=-1)
        by_o = hidden.addcmul_(hidden, o, value=-1)  # of h
        z = torch.stack((by_i, by_f, by_n, by_o), 1).flatten(1)
        del entering, forgotten, hidden, by_i, by_f, by_n, by_o  # memory that the loop need not hold
        g_h0 = g.new_zeros(steps.batch, g.shape[1])
        g_c0 = torch.zeros_like(c0) if g_c is None else g_c.clone()
        loops.loop(LoopInputs(steps, saved.weights, z, (slope, f), g, g_h0, g_c0))
        return Gradients(z, z, g_h0, g_c0, hr)

    def loop(self, inputs: LoopInputs) -> None:
        steps, weights, z, multipliers, g, g_h, g_c = inputs
        assert g_c is not None
        gs, zs, slopes, forgets = map(steps.split, (g, z, *multipliers))
        for t in reversed(range(len(gs))):
            running = steps.sizes[t]
            by_h = gs[t] if weights.hr is None else torch.mm(gs[t], weights.hr)
            by_c = _first(g_c, running).addcmul_(by_h, slopes[t])
            zs[t].mul_(torch.cat((by_c, by_c, by_c, by_h), 1))
            by_c.mul_(forgets[t])
            _first(gs[t - 1] if t else g_h, running).addmm_(zs[t], weights.hh)

    def _of_x(self, x: Tensor, weights: Weights) -> Tensor:
        """What the pre-activations are without the states, `(N, 4 * hidden)`."""
        bias = None if weights.bias_ih is None or weights.bias_hh is None else weights.bias_ih + weights.bias_hh
        return F.linear(x, weights.ih, bias)

    def _gates(self, loops: Loops, saved: Saved) -> Gates:
        """The gates i and f, the tanh of the new cell states, the gate o; n; and the new cell states."""
        steps, weights = saved.steps, saved.weights
        assert saved.c0 is not None
        z = self._of_x(steps.flat(saved.x), weights).addmm_(saved.h, weights.hh.t())
        gates = z.unflatten(1, (4, saved.c0.shape[1]))
        n = gates[:, 2].clone(memory_format=torch.contiguous_format).tanh_()
        i, f, _, o = gates.sigmoid_().unbind(1)
        cells = i * n
        loops.loop_cells(steps, saved.c0, f, cells)
        return i, f, torch.tanh(cells), o, n, cells


class Gru(Recurrence):
    """`h' = (1 - z) n + z h` with `n = tanh(weight_in x + bias_in + r (weight_hn h + bias_hn))`."""

    def fused(self, inputs: Inputs) -> States:
        if inputs.steps.cell:
            return torch.gru_cell(inputs.x[0], inputs.h0, *inputs.weights[:4])[None], None
        return _run(torch.gru, inputs, inputs.h0[None])[0], None

    def step(self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None) -> States:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = of_x.chunk(3, 1), of_h.chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return n + z * (h - n), None

    def with_gates(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Gates]:
        steps, x, h, _, weights = inputs
        size, weight_hh, outputs = h.shape[1], _turned(weights.hh, steps), []
        of_h = F.linear(steps.flat(x), weights.ih, weights.bias_ih)  # that of x, so far
        rz, h_n = of_h.split([2 * size, size], 1)
        n = h_n.clone(memory_format=torch.contiguous_format)
        h_n.zero_()
        if weights.bias_hh is not None:
            of_h += weights.bias_hh
        for h_now, rz_now, r, z, h_n_now, n_now in zip(
            *map(steps.split, (of_h, rz, *rz.chunk(2, 1), h_n, n)), strict=True
        ):
            h = _first(h, len(h_now))
            h_now.addmm_(h, weight_hh)
            rz_now.sigmoid_()
            h = torch.lerp(n_now.addcmul_(r, h_n_now).tanh_(), h, z)
            outputs.append(h)
        y = torch.stack(outputs) if steps.packed is None else torch.cat(outputs)
        return y, None, (of_h, n)

    def backward(self, loops: Loops, saved: Saved, gates: Gates, g: Tensor, g_c: Tensor | None) -> Gradients:
        h, size, (stacked, n) = saved.h, saved.h.shape[1], gates or self._gates(saved)
        r, z, h_n = stacked.unflatten(1, (3, size)).unbind(1)
        renew = 1 - z
        slope = torch.addcmul(renew, renew * n, n, value=-1)  # of h' by n's pre-activation
        by_h_n = slope * r
        through_r = by_h_n * h_n
        by_r = torch.addcmul(through_r, through_r, r, value=-1)
        of_h = torch.stack((by_r, (h - n).mul_(renew).mul_(z), by_h_n), 1).flatten(1)
        g_h0 = g.new_zeros(saved.steps.batch, size)
        loops.loop(LoopInputs(saved.steps, saved.weights, of_h, (z,), g, g_h0))
        of_x = torch.cat([of_h[:, : 2 * size], slope.mul_(g)], 1)
        return Gradients(of_x, of_h, g_h0)

    def loop(self, inputs: LoopInputs) -> None:
        steps, weights, z, (keep,), g, g_h, _ = inputs
        gs, keeps, zs = map(steps.split, (g, keep, z))
        by_h = steps.split(z.unflatten(1, (3, g.shape[1])))
        for t in reversed(range(len(gs))):
            by_h[t].mul_(gs[t].unsqueeze(1))
            g_before = _first(gs[t - 1] if t else g_h, steps.sizes[t])
            g_before.addcmul_(gs[t], keeps[t])
            g_before.addmm_(zs[t], weights.hh)

    def _gates(self, saved: Saved) -> Gates:
        """The gates r and z and `weight_hn h + bias_hn`; and n."""
        size, weights = saved.h.shape[1], saved.weights
        of_x = F.linear(saved.steps.flat(saved.x), weights.ih, weights.bias_ih)
        of_h = F.linear(saved.h, weights.hh, weights.bias_hh)
        of_h[:, : 2 * size].add_(of_x[:, : 2 * size]).sigmoid_()
        r, _, h_n = of_h.chunk(3, 1)
        return of_h, torch.addcmul(of_x[:, 2 * size :], r, h_n).tanh_()


RECURRENCES: dict[str, Recurrence] = {
    "RNN_TANH": Elman(),
    "RNN_RELU": Elman(relu=True),
    "LSTM": Lstm(),
    "GRU": Gru(),
}


def _run(layer: Any, inputs: Inputs, states: Any) -> Any:
    """One of torch's fused kernels, as one layer in one direction."""
    steps, x, _, _, weights = inputs
    flat_weights = [weight for weight in weights if weight is not None]
    options = (flat_weights, weights.bias_ih is not None, 1, 0.0, False, False)
    arguments = (x, states, *options, False) if steps.packed is None else (x, steps.packed, states, *options)
    if not x.is_cuda:
        return layer(*arguments)
    with warnings.catch_warnings():  # the weights of one layer among several are no buffer of their own
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        return layer(*arguments)


def _turned(weight: Tensor, steps: Steps) -> Tensor:
    """The transpose of a weight; in memory of its own where that is worth it, as each product packs it anew."""
    return weight.t().contiguous() if cost.turns_weight_once(steps.count) else weight.t()


def _tanh(x: Tensor, out: Tensor) -> Tensor:
    """`tanh` where one of the two is a part of each row: with several threads torch's own starts all anew per row."""
    return torch.tanh(x, out=out) if torch.get_num_threads() == 1 else out.copy_(x.contiguous().tanh())


def _first(states: Tensor, size: int) -> Tensor:
    return states if states.shape[0] == size else states[:size]
