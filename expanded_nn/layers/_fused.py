"""Torch's fused kernels for recurrent layers, and the gates that one of them leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expanded_nn.layers._steps import Steps

_LSTM = 2  # as torch's kernels number the recurrences
_LINE = 16  # numbers in a cache line
_FEW = 1 << 16  # gates below which looking for them takes longer than computing them again
_MANY = 1 << 21  # gates above which the workspace they lie in is fresh memory each time, which takes longer too
_CLOSE = 1e-4


def run(layer: Any, steps: Steps, x: Tensor, states: Any, weights: Sequence[Tensor | None]) -> Any:
    """One of torch's fused kernels, as one layer in one direction."""
    given = [weight for weight in weights if weight is not None]
    how = (given, weights[2] is not None, 1, 0.0, False, False)
    with warnings.catch_warnings():
        if x.is_cuda:  # the weights of one layer among several are no buffer of their own
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        if steps.packed is None:
            return layer(x, states, *how, False)
        return layer(x, steps.packed, states, *how)


def lstm_may_leave_gates(
    x: Tensor,  # (T, B, in)
    hidden: int,
) -> bool:
    """Whether `lstm_with_gates` is worth a call: the gates are neither few nor many, and `torch.lstm` is oneDNN's."""
    return (
        _FEW <= x.shape[0] * x.shape[1] * 4 * hidden <= _MANY
        and x.numel() > 0
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch._C._get_mkldnn_enabled()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.aten, "mkldnn_rnn_layer")
    )


def lstm_with_gates(
    x: Tensor,  # (T, B, in)
    h0: Tensor,  # (B, hidden)
    c0: Tensor,  # (B, hidden)
    ih: Tensor,  # (4 * hidden, in)
    hh: Tensor,  # (4 * hidden, hidden)
    bias_ih: Tensor | None,  # (4 * hidden,)
    bias_hh: Tensor | None,  # (4 * hidden,)
) -> tuple[Tensor, Tensor, Tensor | None]:  # (T, B, hidden), (B, hidden), (T, B, 4 * hidden)
    """`torch.lstm`'s kernel as it runs when a plain backward is to follow, and the gates if they are found."""
    biased = bias_ih is not None and bias_hh is not None
    if bias_ih is None or bias_hh is None:
        bias_ih = bias_hh = hh.new_zeros(hh.shape[0])
    x, h0, c0, ih, hh = (each.detach().contiguous() for each in (x, h0, c0, ih, hh))
    how: tuple[Any, ...] = (False, [], _LSTM, h0.shape[1], 1, biased, False, False, True)
    with torch.enable_grad():  # else it keeps nothing
        y, _, c, workspace = torch.ops.aten.mkldnn_rnn_layer(x, ih, hh, bias_ih, bias_hh, h0[None], c0[None], *how)
    gates = _gates_in(workspace, (*x.shape[:2], hh.shape[0]))
    if gates is not None:
        # the gates of one sample at one step, far enough from the beginning to tell how all are laid out
        t, b, before = (0, -1, h0[-1]) if len(x) == 1 else (-1, 0, y[-2, 0])
        z = torch.addmv(bias_ih, ih, x[t, b]) + torch.addmv(bias_hh, hh, before)
        gates = gates.contiguous() if _are_gates_of(gates[t, b], z) else None
    return y, c[0], gates


def _gates_in(workspace: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
    """Where oneDNN keeps the gates, `(T, B, 4 * hidden)`, which is documented nowhere: to be checked by who uses it.

    They are at the beginning, in whole cache lines, and in one line more where rows a power of two apart would share
    few places in a cache.
    """
    steps, batch, width = shape
    row = -(-width // _LINE) * _LINE
    row += _LINE if row % 256 == 0 else 0
    if workspace is None or workspace.numel() * workspace.element_size() < 4 * steps * batch * row:
        return None
    return workspace.view(torch.float32).as_strided(shape, (batch * row, row, 1))


def _are_gates_of(
    gates: Tensor,  # (4 * hidden,)
    z: Tensor,  # (4 * hidden,)
) -> bool:
    """Whether these are the gates of the pre-activations `z`."""
    i, f, n, o = z.chunk(4)
    return bool((torch.cat([i.sigmoid(), f.sigmoid(), n.tanh(), o.sigmoid()]) - gates).abs().max() < _CLOSE)
