"""What a client's run is compared with: SGD on clipped rows, written out with the loop over single samples."""

from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import nn

from oracle import Call, Objective, assert_close, loop

LR, LIMIT = 0.1, 0.05


def by_hand(
    model: nn.Module,
    steps: Iterable[list[Call]],  # for each step of the optimizer its batches
    objective: Objective,
    lr: float = LR,
) -> nn.Module:
    """A plain copy, trained: each step adds up the clipped gradients of all its samples."""
    model = deepcopy(model)
    for batches in steps:
        totals = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for batch in batches:
            samples = len(next(iter([*batch.args, *batch.kwargs.values()])))
            gradients = loop(model, batch, samples, objective=objective)
            norms = torch.cat([rows.reshape(samples, -1) for rows in gradients.values()], 1).norm(dim=1)
            assert (norms > LIMIT).any()
            for name, rows in gradients.items():
                totals[name] += torch.tensordot((LIMIT / norms).clamp(max=1), rows, 1)
        with torch.no_grad():
            for name, total in totals.items():
                model.get_parameter(name).sub_(lr * total)
    return model


def assert_same_weights(actual: nn.Module, expected: nn.Module, tol: float = 1e-9) -> None:
    weights = dict(expected.named_parameters())
    assert dict(actual.named_parameters()).keys() == weights.keys()
    for name, parameter in actual.named_parameters():
        assert_close(parameter.detach(), weights[name].detach(), tol, name)


def assert_same_updates(actual: nn.Module, expected: nn.Module, start: nn.Module, tol: float) -> None:
    """In low precision, where the weights themselves are nearly alike."""
    for name, before in start.named_parameters():
        updates = [model.get_parameter(name).detach() - before.detach() for model in (actual, expected)]
        assert_close(*updates, tol, name)
