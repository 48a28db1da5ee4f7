"""Lightning: its Trainer around a converted LightningModule."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import expanded_nn as enn
from by_hand import LIMIT, LR, assert_same_weights, by_hand
from models import BATCH, CLASSES, Parts, Scaled, data, mlp, steps
from oracle import Call, assert_close
from processes import run_scenarios, torchrun

L = pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '\\w+_dataloader' does not have many workers"),
]


class Classifier(L.LightningModule):
    """As its author wrote it: nothing in it knows of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = self.loss(x, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation_loss", self.loss(*batch))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class InTwoParts(Classifier):
    """Calls methods of its model other than forward."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model.classify(self.model.encode(x)), y)


class Manual(Classifier):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()


class WithItsOwn(Classifier):
    """With a parameter of its own, used in forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.temperature = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.temperature

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


class OutsideOfForward(Classifier):
    """With a parameter of its own, used in another method: one word more than its author wrote."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scale = nn.Parameter(torch.rand(CLASSES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x) * enn.expanded(self.scale), y)


class ClipRows(L.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        enn.clip_grad_sample_norms_(module, LIMIT / trainer.accumulate_grad_batches, reduction="mean")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():  # the clipped means of all processes
            parameter.grad = trainer.strategy.reduce(parameter.grad, reduce_op="mean")


def fit(module: Any, path: Any, *callbacks: Any, checkpoint: Any = None, **settings: Any) -> Any:
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=path,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"devices": 1, "max_epochs": 1, **settings},
    )
    sampler = DistributedSampler(data(), shuffle=False) if dist.is_initialized() else None
    batches = DataLoader(data(), batch_size=BATCH, sampler=sampler)
    trainer.fit(module, batches, DataLoader(data(), batch_size=BATCH), ckpt_path=checkpoint)
    return trainer


def objective(module: Any, call: Call, first: int = 0) -> Tensor:
    return module.loss(*call.args)


MODULES = {
    "automatic": lambda: Classifier(mlp()),
    "manual": lambda: Manual(mlp()),
    "methods other than forward": lambda: InTwoParts(Parts()),
    "a module with a parameter of its own": lambda: Classifier(Scaled()),
    "a parameter of its own": lambda: WithItsOwn(mlp()),
    "a parameter outside of forward": lambda: OutsideOfForward(mlp()),
}


@pytest.mark.parametrize("name", MODULES)
def test_training_and_validation(name: str, tmp_path: Any) -> None:
    plain = MODULES[name]()
    model = enn.convert(plain).per_sample()
    metrics = fit(model, tmp_path, ClipRows()).callback_metrics
    expected = by_hand(plain, steps(), objective, LR / BATCH)
    assert_same_weights(model, expected)
    assert_close(metrics["validation_loss"], expected.loss(*data().tensors).detach(), 1e-6)


def test_accumulation(tmp_path: Any) -> None:
    plain = Classifier(mlp())
    model = enn.convert(plain).per_sample(accumulate_grad=False)
    fit(model, tmp_path, ClipRows(), accumulate_grad_batches=2)
    assert_same_weights(model, by_hand(plain, steps(2), objective, LR / BATCH / 2))


def test_with_the_mode_off(tmp_path: Any) -> None:
    plain = Classifier(Scaled())
    model = enn.convert(plain)
    for module in (plain, model):
        fit(module, tmp_path)
    assert_same_weights(model, plain, 0)


def test_save_and_resume(tmp_path: Any) -> None:
    plain = Classifier(mlp())
    model, resumed = (enn.convert(plain).per_sample() for _ in range(2))
    fit(model, tmp_path, ClipRows()).save_checkpoint(tmp_path / "saved.ckpt")
    assert_same_weights(Classifier.load_from_checkpoint(tmp_path / "saved.ckpt", model=mlp()), enn.revert(model))
    fit(resumed, tmp_path, ClipRows(), checkpoint=tmp_path / "saved.ckpt", max_epochs=2)
    assert_same_weights(resumed, by_hand(plain, 2 * steps(), objective, LR / BATCH))


def automatic(rank: int, world: int) -> None:
    for settings in ({}, {"accumulate_grad": False}):
        plain = Classifier(mlp())
        model = enn.convert(plain).per_sample(**settings)
        fit(model, None, ClipRows(), devices=world, strategy="ddp")
        assert_same_weights(model, by_hand(plain, steps(world), objective, LR / BATCH / world))


def with_accumulation(rank: int, world: int) -> None:
    plain = Classifier(mlp())
    model = enn.convert(plain).per_sample(accumulate_grad=False)
    fit(model, None, ClipRows(), devices=world, strategy="ddp", accumulate_grad_batches=2)
    assert_same_weights(model, by_hand(plain, steps(2 * world), objective, LR / BATCH / world / 2))


def manual(rank: int, world: int) -> None:
    plain = Manual(Scaled())
    model = enn.convert(plain).per_sample()
    fit(model, None, ClipRows(), devices=world, strategy="ddp")
    assert_same_weights(model, by_hand(plain, steps(world), objective, LR / BATCH / world))


SCENARIOS = [automatic, with_accumulation, manual]


@pytest.mark.slow
def test_in_two_processes() -> None:
    output = torchrun(__file__, 2)
    for scenario in SCENARIOS:
        assert output.count(f"passed {scenario.__name__}") == 2


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
