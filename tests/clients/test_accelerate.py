"""accelerate: a loop of one's own, prepared for any machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import expanded_nn as enn
from by_hand import LIMIT, LR, assert_same_updates, assert_same_weights, by_hand
from models import BATCH, cross_entropy, data, mlp, steps

accelerate = pytest.importorskip("accelerate")


def train(model: nn.Module, accelerator: Any, *, clip: bool = True) -> None:
    optimizer, dtype = torch.optim.SGD(model.parameters(), lr=LR), next(model.parameters()).dtype
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=BATCH))
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x.to(dtype)), y, reduction="sum"))
            if clip:  # `backward` divides the loss by the number of batches in a step
                enn.clip_grad_sample_norms_(model, LIMIT / accelerator.gradient_accumulation_steps)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield accelerate.Accelerator(cpu=True, **getattr(request, "param", {}))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("accelerator", "batches"), [({}, 1), ({"gradient_accumulation_steps": 2}, 2)], indirect=["accelerator"]
)
def test_training(accelerator: Any, batches: int) -> None:
    plain = mlp()
    model = enn.convert(plain).per_sample(loss_reduction="sum", accumulate_grad=False)
    train(model, accelerator)
    assert_same_weights(model, by_hand(plain, steps(batches), cross_entropy, LR / batches))


def test_with_the_mode_off(accelerator: Any) -> None:
    plain = mlp()
    model = enn.convert(plain)
    for module in (model, plain):
        train(module, accelerator, clip=False)
    assert_same_weights(model, plain, 0)


def test_save_and_load(accelerator: Any, tmp_path: Path) -> None:
    model = accelerator.prepare(enn.convert(mlp()).per_sample())
    accelerator.save_state(tmp_path)
    expected = {name: p.clone() for name, p in model.state_dict().items()}
    nn.init.zeros_(model[0].weight)
    accelerator.load_state(tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in model.state_dict().items())
    assert type(accelerator.unwrap_model(model)) is type(model)


@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)
def test_bf16(accelerator: Any) -> None:
    plain = mlp()
    model = enn.convert(plain).float().per_sample(loss_reduction="sum", accumulate_grad=False)
    train(model, accelerator)
    assert_same_updates(model, by_hand(plain, steps(), cross_entropy), plain, 2e-2)
