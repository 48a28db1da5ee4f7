"""skorch: a module as an estimator of scikit-learn."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import expanded_nn as enn
from by_hand import LIMIT, LR, assert_same_weights, by_hand
from models import BATCH, Scaled, cross_entropy, data, steps
from oracle import assert_close

pytest.importorskip("skorch")
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback


class Clip(Callback):
    def on_grad_computed(self, net: Any, named_parameters: Any, **others: Any) -> None:
        enn.clip_grad_sample_norms_(net.module_, LIMIT)


class PerSampleNet(NeuralNetClassifier):
    """Converts what it makes, so that any module class may be given."""

    def initialize_module(self) -> "PerSampleNet":
        super().initialize_module()
        enn.per_sample(self.module_)
        return self


def net(module: Any, kind: type = NeuralNetClassifier, **settings: Any) -> NeuralNetClassifier:
    return kind(
        module,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=LR / BATCH,
        batch_size=BATCH,
        max_epochs=1,
        train_split=None,
        verbose=0,
        **settings,
    )


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x, y = data().tensors
    return x.numpy(), y.numpy()


def test_training_a_converted_model() -> None:
    plain = Scaled()
    client = net(enn.convert(plain).per_sample(), callbacks=[Clip]).fit(*arrays())
    assert_same_weights(client.module_, by_hand(plain, steps(), cross_entropy, LR / BATCH))


def test_training_a_class() -> None:
    torch.manual_seed(5)
    plain = Scaled(width=5)
    torch.manual_seed(5)
    client = net(Scaled, PerSampleNet, module__width=5, callbacks=[Clip]).fit(*arrays())
    expected = by_hand(plain, steps(), cross_entropy, LR / BATCH)
    assert_same_weights(client.module_, expected)
    again = pickle.loads(pickle.dumps(client))
    for estimator in (client, again):
        assert_close(estimator.forward(arrays()[0]), expected(data().tensors[0]).detach())


def test_with_the_mode_off() -> None:
    plain = Scaled()
    model = enn.convert(plain)
    for module in (plain, model):
        net(module).fit(*arrays())
    assert_same_weights(model, plain, 0)


def test_a_search_over_settings() -> None:
    client = net(Scaled, PerSampleNet, callbacks=[Clip])
    search = GridSearchCV(client, {"module__width": [4, 5], "lr": [0.1]}, cv=2, scoring="accuracy", error_score="raise")
    search.fit(*arrays())
    assert search.best_estimator_.module_.body.weight.shape[0] in (4, 5)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
