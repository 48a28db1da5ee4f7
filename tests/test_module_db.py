"""torch's own module database: every class of the zoo, with the inputs torch tests it with."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, module_db

import expanded_nn as enn
from cases import CASES, RECURRENT
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, total_loss

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

TORCH_CLASSES = {case.torch_class for case in CASES if case not in RECURRENT}  # test_rnn.py has the others
CLASSES = TORCH_CLASSES & {info.module_cls for info in module_db}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def database() -> Iterator[object]:
    for info in module_db:
        if info.module_cls in CLASSES:
            for training in (True, False) if info.train_and_eval_differ else (True,):
                for i, given in enumerate(inputs_of(info, training)):
                    words = [info.module_cls.__name__, given.desc or "plain", "train" if training else "eval", str(i)]
                    yield pytest.param(info, training, i, id="-".join(words))


def inputs_of(info: ModuleInfo, training: bool) -> list:
    return info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)


def build(info: ModuleInfo, given: FunctionInput) -> nn.Module:
    factory = {} if "device" in given.kwargs else {"device": "cpu", "dtype": torch.float64}
    return info.module_cls(*given.args, **given.kwargs, **factory)


def test_the_database_knows_every_class_but_one() -> None:
    of_torch = {each for each in TORCH_CLASSES if each.__module__.startswith("torch.nn")}
    assert of_torch - CLASSES == {nn.EmbeddingBag, nn.Sequential}


@pytest.mark.parametrize(("info", "training", "i"), list(database()))
def test_rows_equal_the_loop(info: ModuleInfo, training: bool, i: int) -> None:
    given = inputs_of(info, training)[i]
    module = build(info, given.constructor_input).train(training)
    call = Call(given.forward_input.args, given.forward_input.kwargs).map(torch.Tensor.detach)
    first = [*call.args, *call.kwargs.values()][0]
    model = enn.convert(module).per_sample(loss_reduction="sum")

    mixes = isinstance(module, BATCH_NORMS) and (training or module.running_mean is None)
    unbatched = "no_batch_dim" in given.desc or first.dim() == 0
    if isinstance(module, nn.PReLU) and first.dim() == 1:
        unbatched = False  # a batch of numbers
    if mixes or (unbatched and any(True for _ in module.parameters())):
        with pytest.raises(enn.PerSampleError, match="train|statistics" if mixes else type(module).__name__):
            call.on(model)
        return

    expected_output = call.on(deepcopy(module))
    assert_close(call.on(model), expected_output.detach(), tol=1e-12)
    if not any(True for _ in module.parameters()):
        return
    rows = loop(module, call, len(first))
    model.zero_grad()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), rows)
    assert_close_rows(grads_of(model), {name: r.sum(0) for name, r in rows.items()})
