"""Libraries that look a layer up by its exact class, and so do not know its twin until it is registered."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from models import BATCH, data, mlp
from oracle import assert_close

TWINS = {nn.Linear: enn.Linear, nn.Conv2d: enn.Conv2d, nn.BatchNorm2d: enn.BatchNorm2d}


def register(known: dict[type, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for plain in [plain for plain in TWINS if plain in known]:
        monkeypatch.setitem(known, TWINS[plain], known[plain])


def test_opacus_validator(monkeypatch: pytest.MonkeyPatch) -> None:
    validators = pytest.importorskip("opacus.validators").ModuleValidator
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model = enn.convert(plain)
    assert not validators.validate(model)
    with pytest.raises(enn.PerSampleError, match=r"BatchNorm2d.*mix the samples"):
        model.per_sample()(torch.randn(4, 1, 5, 5))
    register(validators.VALIDATORS, monkeypatch)
    assert [type(error) for error in validators.validate(model)] == [
        type(error) for error in validators.validate(plain)
    ]
    assert validators.validate(plain)
    assert isinstance(enn.convert(validators.fix(plain))[1], enn.GroupNorm)


@pytest.mark.filterwarnings("ignore")
def test_captum_with_gradients_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    influence = pytest.importorskip("captum.influence")
    gradients = pytest.importorskip("captum._utils.sample_gradient")

    def scores(model: nn.Module) -> Tensor:
        return influence.TracInCP(
            model, data(), ["final"], checkpoints_load_func=lambda model, path: 1.0, batch_size=BATCH,
            loss_fn=nn.CrossEntropyLoss(reduction="sum"), sample_wise_grads_per_batch=True,
        ).influence(data()[:3])  # fmt: skip

    plain = mlp()
    model = enn.convert(plain)
    with pytest.raises(KeyError, match=r"expanded_nn\.layers\.linear\.Linear"):
        scores(model)
    assert_close(scores(enn.revert(model)), scores(plain))
    register(gradients.SUPPORTED_MODULES, monkeypatch)
    for mode in (False, True):
        assert_close(scores(model.per_sample(mode)), scores(plain))


@pytest.mark.filterwarnings("ignore")
def test_kronfluence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    analyzer = pytest.importorskip("kronfluence.analyzer", exc_type=ImportError)
    task = pytest.importorskip("kronfluence.task")
    tracked = pytest.importorskip("kronfluence.module").TrackedModule

    class Classify(task.Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    def scores(model: nn.Module, name: str) -> Tensor:
        model = analyzer.prepare_model(enn.convert(model) if name != "plain" else model, Classify())
        run = analyzer.Analyzer(name, model, Classify(), cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
        run.fit_all_factors("factors", data(), per_device_batch_size=BATCH)
        run.compute_pairwise_scores("scores", "factors", data(), data(), per_device_query_batch_size=BATCH)
        return run.load_pairwise_scores("scores")["all_modules"]

    plain = mlp()
    with pytest.raises(KeyError, match=r"expanded_nn\.layers\.linear\.Linear"):
        scores(plain, "not registered")
    register(tracked.SUPPORTED_MODULES, monkeypatch)
    assert_close(scores(plain, "registered"), scores(deepcopy(plain), "plain"), 1e-5)  # its factors are float32
