"""A backward in a thread that Python has not started, as autograd has one for each device that is no CPU."""

import _thread
from collections.abc import Callable
from threading import Event

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from families import FAMILIES, Family
from oracle import Call, assert_close_rows, loop, rows_of, sample_losses, total_loss

B = 3


def in_engines_thread(backward: Callable[[], None]) -> None:
    """Runs a backward as the engine does for a GPU, and raises its error."""
    is_over, errors = Event(), list[BaseException]()

    def run() -> None:
        try:
            backward()
        except BaseException as error:
            errors.append(error)
        is_over.set()

    _thread.start_new_thread(run, ())
    is_over.wait()
    for error in errors:
        raise error


def checkpointed(module: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    result: Tensor = checkpoint(module, x, use_reentrant=reentrant)
    return result


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_equal_the_loop(family: Family) -> None:
    module, call = family.module(), family.call(B)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    in_engines_thread(total_loss(model, call).backward)
    assert_close_rows(rows_of(model), loop(module, call, B))


@pytest.mark.parametrize("within", [False, True], ids=["alone", "one_pass"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_computed_again_there(*, reentrant: bool, within: bool) -> None:
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(B, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def step() -> None:
        loss = sample_losses(checkpointed(model, x, reentrant=reentrant)).sum()
        in_engines_thread(loss.backward)

    if within:
        with enn.one_pass(model, B):
            step()
    else:
        step()
    assert_close_rows(rows_of(model), loop(module, Call((x,)), B))


def test_another_thread_of_pythons_is_still_refused() -> None:
    """A forward there, which is no part of a backward, would share the pass."""
    model = enn.convert(nn.Linear(4, 2)).per_sample()
    refused = r"another thread is in the middle of a forward of this model"
    with enn.one_pass(model, B), pytest.raises(enn.PerSampleError, match=refused):
        in_engines_thread(lambda: model(torch.randn(B, 4)))
