"""Rules for recurrent layers and cells in a forward that folds its samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from expanded_nn.core import cost
from expanded_nn.layers.general.batched import Batched, Rule, Run, is_own, known, refuse_unless, run_of
from expanded_nn.layers.general.folded import linear_of_rows
from expanded_nn.layers.general.folded_rules import as_arranged
from expanded_nn.layers.general.owners import Arrangement
from expanded_nn.layers.recurrent.equations import RECURRENCES, Lstm, Recurrence, Weights
from expanded_nn.layers.recurrent.recurrence import stacked
from expanded_nn.layers.recurrent.steps import Steps


def _cell(recurrence: Recurrence) -> Rule:
    """For a recurrent cell: its linear maps have a rule, and all else is computed number by number."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        refuse_unless(not kwargs and len(args) == 6 and is_own(args[3]))
        x, states, weight_ih, weight_hh, bias_ih, bias_hh = args
        h, c = states if isinstance(recurrence, Lstm) else (states, None)
        of_h = _linear_of_states(func, h, weight_hh, bias_hh, x)
        y, c = recurrence.step(F.linear(x, weight_ih, bias_ih), of_h, h, c, None)
        if weight_hh.run.owners is not None:
            weight_hh.run.owners.of(y)  # as its graph tells, before it is taken for a row of each sample
        return y if c is None else (y, c)

    return rule


def _linear_of_states(func: Any, h: Tensor, weight: Batched, bias: Batched | None, x: Tensor) -> Tensor:
    """The linear map of a cell's states: the first ones, which are zeros, belong to the samples as the input does."""
    arrangement = None if h.requires_grad else weight.run.arranged(x)
    if arrangement is None:
        return F.linear(h, weight, bias)
    weight.run.note(func, whole=True)
    y = linear_of_rows(h, weight.value, None if bias is None else bias.value, arrangement)
    return as_arranged(weight.run, y, arrangement)


def _layers(recurrence: Recurrence) -> Rule:
    """For layers over sequences, of which a sample may have several."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        refuse_unless(not kwargs and len(args) == 9)
        is_packed = type(args[3]) is not bool
        x, sizes, states, own, *options = args if is_packed else (args[0], None, *args[1:])
        has_biases, layers, dropout, training, bidirectional, *batch_first = options
        refuse_unless(isinstance(x, Tensor) and not is_own(x) and all(map(is_own, own)))
        run, directions, is_batch_first = run_of(own), 2 if bidirectional else 1, batch_first == [True]
        if is_packed:
            steps = Steps.of_packed(PackedSequence(x, sizes))
            of_steps, arrangement = known(run.owners).of_sequences(x, steps)
        else:
            arrangement = known(run.arranged(x if is_batch_first else x.transpose(0, 1)))
            x = x.transpose(0, 1) if is_batch_first else x
            steps = Steps.of(x)
        states = states if isinstance(recurrence, Lstm) else [states]
        initial = [_of_sequences(state, arrangement, run) for state in states]
        run.note(func, whole=True)
        weights = _weights([parameter.value for parameter in own], layers * directions, has_biases=has_biases)
        dropout = dropout if training else 0.0
        y, *last = stacked(recurrence, steps, x, initial, weights, directions, dropout, arrangement)
        last = [as_arranged(run, torch.stack(of_layers, 1), arrangement).transpose(0, 1) for of_layers in last]
        if is_packed:
            return as_arranged(run, y, of_steps), *last
        y = as_arranged(run, y.transpose(0, 1), arrangement)
        return y if is_batch_first else y.transpose(0, 1), *last

    return rule


def _of_sequences(states: Any, arrangement: Arrangement, run: Run) -> Tensor:  # (layers * directions, n, features)
    """The first states of each sequence; zeros and other constants belong to the samples as the input does."""
    refuse_unless(isinstance(states, Tensor) and states.dim() == 3)
    if is_own(states):  # learned, and repeated for the sequences
        refuse_unless(not cost.is_symbol(run.batch))
        sequences = torch.arange(len(arrangement.owner), device=arrangement.owner.device)
        return states.value[arrangement.owner, :, sequences].transpose(0, 1)  # type: ignore[no-any-return]
    own = run.arranged(states.transpose(0, 1))
    refuse_unless(own is None or own.is_like(arrangement))
    return states  # type: ignore[no-any-return]


def _weights(values: list[Any], count: int, *, has_biases: bool) -> list[Weights]:
    """The parameters of all layers and directions, in torch's order."""
    of_each = len(values) // count
    parts = [values[start : start + of_each] for start in range(0, len(values), of_each)]
    return [Weights(*(part if has_biases else [*part[:2], None, None, *part[2:]])) for part in parts]


RECURRENT_RULES: dict[Any, Rule] = {
    rule_of: rule(recurrence)
    for kind, recurrence in RECURRENCES.items()
    for rule_of, rule in ((getattr(torch, f"{kind.lower()}_cell"), _cell), (getattr(torch, kind.lower()), _layers))
}
