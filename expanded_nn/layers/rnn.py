"""Recurrent layers: `RNN`, `LSTM`, `GRU` and their cells."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from expanded_nn.common.modes import not_compiled
from expanded_nn.common.traced import refuse_values
from expanded_nn.layers.recurrent.equations import RECURRENCES, Weights
from expanded_nn.layers.recurrent.recurrence import recurrent, stacked
from expanded_nn.layers.recurrent.steps import Steps
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.layout import refuse_other_count, refuse_other_than_sequences
from expanded_nn.modules.registry import expands


class _Layers(Expanded, nn.RNNBase):
    """Layers times directions of one recurrence, over padded or packed sequences."""

    batched_dims: ClassVar[int] = 3

    @property
    def ranks(self) -> dict[str, int]:  # type: ignore[override]
        """Weights are matrices, biases are vectors; how many there are depends on the arguments."""
        return {name: 2 if name.startswith("weight") else 1 for name in self._flat_weights_names}

    def sample_dims(self, tensors: int) -> list[int]:
        return [self._samples_dim] + [1] * (tensors - 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return super().forward(*args, **kwargs)
        # torch.compile leaves these layers out; where torch 2.15 traces this code, it takes each attribute for one that
        # is not None
        return not_compiled(Expanded.forward, self, *args, **kwargs)

    def expanded_forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        x = self._checked_input(input)
        steps = Steps.of_packed(input) if isinstance(input, PackedSequence) else Steps.of(self._time_first(x))
        states = self._initial_states(x, hx, steps)
        states = [steps.in_sequences_order(state, 1) for state in states]
        ends = ("", "_reverse") if self.bidirectional else ("",)
        weights = [self._weights_of(f"l{layer}{end}") for layer in range(self.num_layers) for end in ends]
        dropout = self.dropout if self.training else 0.0
        recurrence = RECURRENCES[self.mode]
        y, *last = stacked(recurrence, steps, self._time_first(x), states, weights, len(ends), dropout)
        last = [steps.in_samples_order(torch.stack(states), 1) for states in last]
        output = PackedSequence(y, *input[1:]) if isinstance(input, PackedSequence) else self._time_first(y)
        return output, tuple(last) if self.mode == "LSTM" else last[0]

    def _weights_of(self, suffix: str) -> Weights:
        ih, hh = (self.expanded(f"weight_{side}_{suffix}") for side in ("ih", "hh"))
        bias_ih, bias_hh = (self.expanded(f"bias_{side}_{suffix}") if self.bias else None for side in ("ih", "hh"))
        return Weights(ih, hh, bias_ih, bias_hh, self.expanded(f"weight_hr_{suffix}") if self.proj_size else None)

    def _initial_states(self, input: Tensor, hx: Any, steps: Steps) -> list[Tensor]:
        """The states given, or zeros; torch's own error where sizes are wrong."""
        lstm = self.mode == "LSTM"
        number = self.num_layers * (2 if self.bidirectional else 1)
        sizes = [self.proj_size or self.hidden_size, *([self.hidden_size] if lstm else [])]
        if hx is None:
            states = [input.new_zeros(number, steps.batch, size) for size in sizes]
            hx = tuple(states) if lstm else states[0]
        self.check_forward_args(input, hx, steps.packed)
        return list(hx) if lstm else [hx]

    def _time_first(self, x: Tensor) -> Tensor:
        """From the layout of padded sequences that the user chose to `(T, B, features)`, and back."""
        return x.transpose(0, 1) if self.batch_first and x.dim() == 3 else x

    def _checked_input(self, input: Tensor | PackedSequence) -> Tensor:
        """The input's tensor, whose samples are those of the pass."""
        if isinstance(input, PackedSequence):
            refuse_values("sequences have different lengths")
            count = int(input.batch_sizes[0])
            remedy = "Pack one sequence per sample, or say per_sample(batch_size=...)."
            refuse_other_count(self, count, f"input is a PackedSequence of {count} sequences", remedy)
            return input.data
        if input.dim() not in (2, 3):
            super(Expanded, self).forward(input)  # torch's own error
        refuse_other_than_sequences(self, "input", input, self._samples_dim)
        return self.checked(input, 2, dim=self._samples_dim)


@expands(nn.RNN)
class RNN(_Layers, nn.RNN):
    """`torch.nn.RNN` with per-sample gradients; input `(B, T, input_size)`, `(T, B, input_size)` or packed."""


@expands(nn.LSTM)
class LSTM(_Layers, nn.LSTM):
    """`torch.nn.LSTM` with per-sample gradients; input `(B, T, input_size)`, `(T, B, input_size)` or packed."""


@expands(nn.GRU)
class GRU(_Layers, nn.GRU):
    """`torch.nn.GRU` with per-sample gradients; input `(B, T, input_size)`, `(T, B, input_size)` or packed."""


class _Cell(Expanded, nn.RNNCellBase):
    """One step of a recurrence; the contributions of the steps that the user unrolls add up."""

    ranks: ClassVar[dict[str, int]] = {"weight_ih": 2, "weight_hh": 2, "bias_ih": 1, "bias_hh": 1}
    batch_first: ClassVar[bool] = True  # (B, features), in a model that has time first as well
    fixed_layout: ClassVar[bool] = True
    mode: str

    def sample_dims(self, tensors: int) -> list[int]:
        return [0] * tensors  # the default, written out: so it is known to hold for several results, too

    def expanded_forward(self, input: Tensor, hx: Any = None) -> Any:
        lstm = self.mode == "LSTM"
        x = self._checked_state("input", input)
        if hx is None:
            states = [x.new_zeros(x.shape[0], self.hidden_size)] * (2 if lstm else 1)
        else:
            states = [self._checked_state("hx", state) for state in (hx if lstm else [hx])]
        weights = Weights(*map(self.expanded, self.ranks))
        y, cells = recurrent(RECURRENCES[self.mode], Steps.of(x[None], cell=True), x[None], states, weights)
        h = y.squeeze(0)
        return (h, *cells) if lstm else h

    def _checked_state(self, argument: str, x: Tensor) -> Tensor:
        if x.dim() not in (1, 2):
            super(Expanded, self).forward(x, x)  # torch's own error
        return self.checked(x, 1, argument=argument)


@expands(nn.RNNCell)
class RNNCell(_Cell, nn.RNNCell):
    """`torch.nn.RNNCell` with per-sample gradients; input `(B, input_size)`."""

    @property
    def mode(self) -> str:  # type: ignore[override]
        """The name of the recurrence."""
        if self.nonlinearity not in ("tanh", "relu"):  # torch's own words
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return f"RNN_{self.nonlinearity.upper()}"


@expands(nn.LSTMCell)
class LSTMCell(_Cell, nn.LSTMCell):
    """`torch.nn.LSTMCell` with per-sample gradients; input `(B, input_size)`."""

    mode = "LSTM"


@expands(nn.GRUCell)
class GRUCell(_Cell, nn.GRUCell):
    """`torch.nn.GRUCell` with per-sample gradients; input `(B, input_size)`."""

    mode = "GRU"
