"""Dense rows are written to recycled memory, and what somebody holds never changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn


def step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().sum(1).mean().backward()
    return model.weight.grad_sample


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(lambda rows: rows, id="tensor"),
        pytest.param(lambda rows: rows[1:], id="slice"),
        pytest.param(lambda rows: rows.detach().flatten(1), id="view"),
        pytest.param(lambda rows: rows.numpy(), id="array"),
        pytest.param(lambda rows: rows.untyped_storage(), id="storage"),
        pytest.param(lambda rows: [rows.unbind()[0]], id="list"),
    ],
)
def test_held_rows_never_change(hold: Callable[[Tensor], object]) -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(materialize=True)
    held = hold(step(model, torch.randn(4, 40)))
    before = torch.tensor(list(held)) if isinstance(held, torch.UntypedStorage) else torch.as_tensor(held[0]).clone()
    for _ in range(3):
        step(model, torch.randn(4, 40))
    after = torch.tensor(list(held)) if isinstance(held, torch.UntypedStorage) else torch.as_tensor(held[0])
    assert torch.equal(before, after)


def test_memory_shared_with_other_processes_is_not_used_again() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(materialize=True)
    sent = step(model, torch.randn(4, 40)).share_memory_().data_ptr()
    for _ in range(3):
        assert step(model, torch.randn(4, 40)).data_ptr() != sent
    assert all(not piece.is_shared() for leaf in model._recorder.leaves for piece in leaf.memory.pieces)


def test_memory_is_used_again() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(materialize=True)
    places = {step(model, torch.randn(4, 40)).data_ptr() for _ in range(5)}
    assert len(places) == 1


def test_a_smaller_batch_fits_into_the_memory_of_a_larger_one() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(materialize=True)
    plain = nn.Linear(40, 30)
    plain.load_state_dict(model.state_dict())
    for batch in (8, 5, 8, 1, 0, 8):
        x = torch.randn(batch, 40)
        rows = step(model, x)
        expected = [torch.autograd.grad(plain(sample).square().sum(), plain.weight)[0] for sample in x]
        assert rows.shape == (batch, 30, 40)
        assert torch.allclose(rows, torch.stack(expected) if expected else rows)


def test_memory_goes_with_the_mode() -> None:
    model = enn.convert(nn.Linear(40, 30)).per_sample(materialize=True)
    step(model, torch.randn(4, 40))
    recorder = model._recorder
    model.per_sample(False)
    assert not list(recorder.leaves)


def test_memory_of_a_convolution_is_used_again() -> None:
    """Its rows are made from columns, as they are much larger than their factors."""
    model = enn.convert(nn.Conv2d(16, 32, 3)).per_sample(materialize=True)
    reference = nn.Conv2d(16, 32, 3)
    reference.load_state_dict(model.state_dict())
    held, places = [], set()
    for turn in range(5):
        x = torch.randn(4, 16, 4, 4)
        model.zero_grad()
        model(x).square().sum((1, 2, 3)).mean().backward()
        rows = model.weight.grad_sample
        expected = [torch.autograd.grad(reference(sample[None]).square().sum(), reference.weight)[0] for sample in x]
        assert torch.allclose(rows, torch.stack(expected))
        places.add(rows.data_ptr())
        if turn == 0:
            held = [rows, rows.clone()]
        del rows
    assert len(places) == 2
    assert places <= {memory.data_ptr() for leaf in model._recorder.leaves for memory in leaf.memory.pieces}
    assert torch.equal(*held)
