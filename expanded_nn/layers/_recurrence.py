"""The recurrences behind `rnn.py`: one layer in one direction, over sequences of equal or different lengths.

The forward is torch's fused kernel on the one shared weight. The backward computes all gates again at once, as the
hidden states are known, and goes back over time only for the gradients of the pre-activations; each weight's rows
are then one sum of outer products over all steps.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from expanded_nn._shared import is_shared, owned, shared
from expanded_nn.layers.linear import linear, outer_rows


@dataclass(frozen=True)
class Steps:
    """Where the steps of B sequences lie in rows `(N, features)`: all first steps, then all second steps, and so on.

    Sequences of different lengths come longest first, as in a `PackedSequence`; `samples` says whose they are.

    Attributes:
        sizes: For each step, how many sequences have it.
        batch: B.
        packed: `sizes` as the tensor that torch's kernels take, `None` where all sequences are equally long.
        samples: For each sequence the sample it belongs to, `None` where that is its own number.
        cell: Whether there is one step, and it is a cell's.
        device: Where the rows are.
    """

    sizes: list[int]
    batch: int
    packed: Tensor | None = None
    samples: Tensor | None = None
    cell: bool = False
    device: torch.device | None = None

    @classmethod
    def of(cls, input: Tensor, *, cell: bool = False) -> Steps:
        """The steps of sequences `(T, B, features)`, all equally long."""
        steps, batch, _ = input.shape
        return cls([batch] * steps, batch, cell=cell, device=input.device)

    @classmethod
    def of_packed(cls, input: PackedSequence) -> Steps:
        """The steps of a `PackedSequence`."""
        data, packed, samples, _ = input
        sizes: list[int] = packed.tolist()
        return cls(sizes, sizes[0], packed, samples, device=data.device)

    @cached_property
    def _of_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each row its step and its sequence; for each step its first row; for each sequence its length."""
        assert self.packed is not None
        count = torch.arange(len(self.sizes))
        first = self.packed.cumsum(0) - self.packed
        step = count.repeat_interleave(self.packed)
        sequence = torch.arange(len(step)) - first[step]
        lengths = (self.packed[:, None] > torch.arange(self.batch)).sum(0)
        return step, sequence, first, lengths

    @cached_property
    def _places(self) -> Tensor:
        """For each row its place in `(B * T, features)`, samples in the user's order."""
        step, sequence, _, _ = self._of_rows
        sample = sequence if self.samples is None else self.samples.cpu()[sequence]
        return (sample * len(self.sizes) + step).to(self.device)

    @cached_property
    def _mirror(self) -> Tensor:
        """For each row the row of the same sequence as far from its end."""
        step, sequence, first, lengths = self._of_rows
        return (first[lengths[sequence] - 1 - step] + sequence).to(self.device)

    @cached_property
    def _last(self) -> Tensor:
        """The last row of each sequence."""
        _, sequence, first, lengths = self._of_rows
        return (first[lengths - 1] + sequence[: self.batch]).to(self.device)

    @cached_property
    def _ranks(self) -> Tensor:
        """For each sample its sequence."""
        assert self.samples is not None
        return torch.empty_like(self.samples).scatter_(0, self.samples, torch.arange(self.batch, device=self.device))

    @cached_property
    def running(self) -> Tensor:  # (B, T)
        """Whether a sample has a step."""
        done = torch.zeros(self.batch * len(self.sizes), dtype=torch.bool, device=self.device)
        return done.index_fill(0, self._places, True).view(self.batch, len(self.sizes))

    def by_sample(
        self,
        rows: Tensor,  # (N, features), or (T, B, features)
    ) -> Tensor:  # (B, T, features)
        """The steps of each sample, in the user's order; zeros behind the end of its sequence."""
        if self.packed is None:
            return rows.reshape(len(self.sizes), self.batch, rows.shape[-1]).transpose(0, 1)
        places = rows.new_zeros(self.batch * len(self.sizes), rows.shape[-1])
        return places.index_copy(0, self._places, rows).view(self.batch, len(self.sizes), rows.shape[-1])

    def by_step(
        self,
        steps: Tensor,  # (B, T, features)
    ) -> Tensor:  # (N, features), or (T, B, features)
        """The way back from `by_sample`."""
        if self.packed is None:
            return steps.transpose(0, 1)
        return steps.flatten(0, 1).index_select(0, self._places)

    def reversed(
        self,
        rows: Tensor,  # (N, features), or (T, B, features)
    ) -> Tensor:
        """Each sequence from its end to its beginning."""
        return rows.flip(0) if self.packed is None else rows.index_select(0, self._mirror)

    def last(
        self,
        rows: Tensor,  # (N, features), or (T, B, features)
    ) -> Tensor:  # (B, features)
        """The last step of each sequence."""
        return rows[-1] if self.packed is None else rows.index_select(0, self._last)

    def previous(
        self,
        states: Tensor,  # (B + N, features): the initial ones, then those of all rows
    ) -> Tensor:  # (N, features)
        """For each row the state before its step."""
        if self.packed is None:
            return states[: len(states) - self.batch]
        before = states.split([self.batch, *self.sizes])
        return torch.cat([each[:size] for each, size in zip(before, self.sizes, strict=False)])

    def in_samples_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sequence, as states by sample."""
        return states if self.samples is None else states.index_select(dim, self._ranks)

    def in_sequences_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sample, as states by sequence."""
        return states if self.samples is None else states.index_select(dim, self.samples)


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
        """Torch's own kernel: the outputs, shaped as `x`, and the last cell states."""

    @abstractmethod
    def step(
        self, of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor | None, weight_hr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next states of all samples from `weight_ih x + bias_ih` and `weight_hh h + bias_hh`; differentiable."""

    @abstractmethod
    def backward(
        self,
        steps: Steps,
        x: Tensor,  # (N, in)
        c0: Tensor | None,  # (B, hidden)
        y: Tensor,  # (N, out)
        h: Tensor,  # (N, out), the state before each step
        weights: Weights,
        g: Tensor,  # (N, out), the gradient of y; may be written to
        g_c: Tensor | None,  # (B, hidden), the gradient of the last cell states
    ) -> Gradients:
        """The gradients of all pre-activations, by a loop back over time."""


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

    def backward(
        self,
        steps: Steps,
        x: Tensor,
        c0: Tensor | None,
        y: Tensor,
        h: Tensor,
        weights: Weights,
        g: Tensor,
        g_c: Tensor | None,
    ) -> Gradients:
        slope = (y > 0).to(y.dtype) if self.relu else torch.addcmul(y.new_ones(()), y, y, value=-1)
        slopes, gs, g_h0 = slope.split(steps.sizes), g.split(steps.sizes), g.new_zeros(steps.batch, g.shape[1])
        for t in reversed(range(len(gs))):
            gs[t].mul_(slopes[t])
            before = gs[t - 1] if t else g_h0
            _rows(before, steps.sizes[t]).addmm_(gs[t], weights.hh)
        return Gradients(g, g, g_h0)


class Lstm(Recurrence):
    """`c' = f c + i g`, `h' = o tanh(c')`, or `weight_hr` times that."""

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
        i, f, g, o = (of_x + of_h).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        y = torch.sigmoid(o) * torch.tanh(c)
        return y if weight_hr is None else linear(y, weight_hr), c

    def backward(
        self,
        steps: Steps,
        x: Tensor,
        c0: Tensor | None,
        y: Tensor,
        h: Tensor,
        weights: Weights,
        g: Tensor,
        g_c: Tensor | None,
    ) -> Gradients:
        assert c0 is not None
        z = _affine(x, weights.ih, weights.bias_ih).addmm_(h, weights.hh.t())
        if weights.bias_hh is not None:
            z += weights.bias_hh
        gates = z.unflatten(1, (4, c0.shape[1]))
        gates[:, :2].sigmoid_()
        gates[:, 2].tanh_()
        gates[:, 3].sigmoid_()
        i, f, new, o = gates.unbind(1)
        entering = i * new
        c = _cell_states(steps, c0, f, entering)
        tanh_c = c[steps.batch :].tanh()
        forget = f.clone(memory_format=torch.contiguous_format)
        y = y if weights.hr is None else o * tanh_c
        # each gate gives way to the derivative of its pre-activation: by h for o, by c for the others
        slope = torch.addcmul(o, y, tanh_c, value=-1)
        kept = steps.previous(c).mul_(f)
        torch.addcmul(y, y, o, value=-1, out=o)
        torch.addcmul(i, entering, new, value=-1, out=new)
        torch.addcmul(entering, entering, i, value=-1, out=i)
        torch.addcmul(kept, kept, f, value=-1, out=f)

        gs, zs, slopes, forgets = (each.split(steps.sizes) for each in (g, z, slope, forget))
        by_c, by_h = gates[:, :3].split(steps.sizes), o.split(steps.sizes)
        g_h0 = g.new_zeros(steps.batch, g.shape[1])
        g_c = torch.zeros_like(c0) if g_c is None else g_c.clone()
        for t in reversed(range(len(gs))):
            size = steps.sizes[t]
            g_h = gs[t] if weights.hr is None else torch.mm(gs[t], weights.hr)
            g_now = _rows(g_c, size)
            g_now.addcmul_(g_h, slopes[t])
            by_c[t].mul_(g_now.unsqueeze(1))
            by_h[t].mul_(g_h)
            g_now.mul_(forgets[t])
            _rows(gs[t - 1] if t else g_h0, size).addmm_(zs[t], weights.hh)
        return Gradients(z, z, g_h0, g_c, None if weights.hr is None else (g, y))


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

    def backward(
        self,
        steps: Steps,
        x: Tensor,
        c0: Tensor | None,
        y: Tensor,
        h: Tensor,
        weights: Weights,
        g: Tensor,
        g_c: Tensor | None,
    ) -> Gradients:
        size = g.shape[1]
        of_x, of_h = _affine(x, weights.ih, weights.bias_ih), _affine(h, weights.hh, weights.bias_hh)
        of_h[:, : 2 * size].add_(of_x[:, : 2 * size]).sigmoid_()
        r, z, h_n = of_h.unflatten(1, (3, size)).unbind(1)
        n = of_x[:, 2 * size :].addcmul_(r, h_n).tanh_()
        kept, renewed = z.clone(memory_format=torch.contiguous_format), 1 - z
        slope = torch.addcmul(renewed, renewed * n, n, value=-1)  # of h' by n's pre-activation
        # each gate gives way to the derivative of h' by its pre-activation
        torch.mul((h - n).mul_(renewed), z, out=z)
        by_h_n = slope * r
        through_r = by_h_n * h_n
        torch.addcmul(through_r, through_r, r, value=-1, out=r)
        h_n.copy_(by_h_n)

        gs, kepts, zs = g.split(steps.sizes), kept.split(steps.sizes), of_h.split(steps.sizes)
        by_h = of_h.unflatten(1, (3, size)).split(steps.sizes)
        g_h0 = g.new_zeros(steps.batch, g.shape[1])
        for t in reversed(range(len(gs))):
            by_h[t].mul_(gs[t].unsqueeze(1))
            before = _rows(gs[t - 1] if t else g_h0, steps.sizes[t])
            before.addcmul_(gs[t], kepts[t]).addmm_(zs[t], weights.hh)
        of_x[:, : 2 * size] = of_h[:, : 2 * size]
        torch.mul(g, slope, out=of_x[:, 2 * size :])
        return Gradients(of_x, of_h, g_h0)


RECURRENCES: dict[str, Recurrence] = {
    "RNN_TANH": Elman(),
    "RNN_RELU": Elman(relu=True),
    "LSTM": Lstm(),
    "GRU": Gru(),
}


def _shared_weights(weights: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Weights:
    ih, hh, *others = (None if each is None else shared(each).to(dtype or each.dtype) for each in weights)
    assert ih is not None
    assert hh is not None
    return Weights(ih, hh, *others)


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


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _rows(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[0] == size else tensor[:size]


def _cell_states(
    steps: Steps,
    c0: Tensor,  # (B, hidden)
    forget: Tensor,  # (N, hidden)
    entering: Tensor,  # (N, hidden)
) -> Tensor:  # (B + N, hidden)
    """The initial cell states, then `c' = f c + i g` of all rows."""
    states = entering.new_empty(len(c0) + len(entering), c0.shape[1])
    before, *after = states.split([steps.batch, *steps.sizes])
    before.copy_(c0)
    for now, kept, new in zip(after, forget.split(steps.sizes), entering.split(steps.sizes), strict=True):
        torch.addcmul(new, kept, _rows(before, now.shape[0]), out=now)
        before = now
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
        ctx.save_for_backward(x, h0, c0, torch.cat([h0, y.reshape(-1, h0.shape[1])]), *weights)
        return owned(y), c

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_c: Tensor | None) -> tuple[Tensor | None, ...]:
        recurrence, steps = ctx.recurrence, ctx.steps
        x, h0, c0, states, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if g is None and g_c is None:
            return (None,) * (2 + len(needed))
        weights = Weights(*saved)
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled():
                inputs = (x, h0, c0, *weights)
                return None, None, *_composite_gradients(recurrence, steps, inputs, needed, g, g_c)
            return None, None, *_gradients(recurrence, steps, x, h0, c0, states, weights, needed, g, g_c)


def _gradients(
    recurrence: Recurrence,
    steps: Steps,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    states: Tensor,
    weights: Weights,
    needed: Sequence[bool],
    g: Tensor | None,
    g_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs and the rows of the weights, on the fast path."""
    row_dtype = weights.ih.dtype
    dtype = torch.promote_types(row_dtype, torch.float32)
    one = _shared_weights(weights, dtype)
    flat_x, states = x.to(dtype).reshape(-1, x.shape[-1]), states.to(dtype)
    y, h = states[steps.batch :], steps.previous(states)
    first_c = None if c0 is None else c0.to(dtype)
    g = (
        torch.zeros_like(y)
        if g is None
        else g.to(dtype, copy=True, memory_format=torch.contiguous_format).view(y.shape)
    )
    g_c = None if g_c is None else g_c.to(dtype)
    found = recurrence.backward(steps, flat_x, first_c, y, h, one, g, g_c)

    grads: list[Tensor | None] = [None] * len(needed)
    if needed[0]:
        grads[0] = torch.mm(found.ih, one.ih).view(x.shape).to(x.dtype)
    if needed[1]:
        grads[1] = found.h0.to(h0.dtype)
    if needed[2] and c0 is not None and found.c0 is not None:
        grads[2] = found.c0.to(c0.dtype)
    if any(needed[3:7]):
        ih = steps.by_sample(found.ih).contiguous()
        hh = ih if found.hh is found.ih else steps.by_sample(found.hh).contiguous()
        if needed[3]:
            grads[3] = outer_rows(ih, steps.by_sample(x.to(dtype)), row_dtype)
        if needed[4]:
            grads[4] = outer_rows(hh, steps.by_sample(h).contiguous(), row_dtype)
        if needed[5]:
            grads[5] = ih.sum(1).to(row_dtype)
        if needed[6]:
            grads[6] = grads[5] if hh is ih and needed[5] else hh.sum(1).to(row_dtype)
    if needed[7] and found.hr is not None:
        projected, hidden = map(steps.by_sample, found.hr)
        grads[7] = outer_rows(projected.contiguous(), hidden.contiguous(), row_dtype)
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
            create_graph=True,
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
    y = steps.by_step(torch.stack(outputs, 1))
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
