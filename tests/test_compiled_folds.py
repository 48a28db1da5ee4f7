"""Compiled steps of modules that fold their samples: whose the rows are is no part of the graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes

import expanded_nn as enn
from expanded_nn.common.traced import is_traced
from expanded_nn.layers.general.alone import FoldedBatch
from expanded_nn.layers.general.owners import Owners
from expanded_nn.layers.general.samples import Memo, Unknown
from expanded_nn.modules.registry import EXPANDED
from test_compiled_step import clipped, law
from test_folded import (
    OF_LETTERS,
    RECURRENT,
    B,
    BiasedWindows,
    Characters,
    D,
    EachAlone,
    Frames,
    LettersFirst,
    Mixture,
    OutOfOrder,
    Packed,
    Patches,
    Sequences,
    Slopes,
    Slots,
    T,
    Windows,
    WithBiases,
    built,
    values,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*runs sample by sample")
SIZES = B, B, B, 4, 5, 2, 6, 1, B


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], set[str]]:
    """Tells how the forwards in traces have run; they print it, as what they put into a list is taken back."""
    result_of = FoldedBatch.result

    def noted(self: FoldedBatch) -> Any:
        result = result_of(self)
        if is_traced():
            print("other" if result is NotImplemented else "whole")
        return result

    monkeypatch.setattr(FoldedBatch, "result", noted)
    return lambda: set(capsys.readouterr().out.split())


def of_size(*shape: int, sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor]]:
    return [(values(size, *shape, seed=number),) for number, size in enumerate(sizes)]


def follows(module: Callable[[], nn.Module], batches: Any, **options: Any) -> None:
    law(lambda: built(module(), around=False), clipped, batches, loss_reduction="sum", **options)


@pytest.mark.parametrize("first", ["zeros", "computed"])
@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers(layer: Callable[[], nn.RNNBase], first: str, whole: Callable[[], set[str]]) -> None:
    follows(lambda: Sequences(layer(), first), of_size(2, T, D))
    assert whole() == {"whole"}


def test_first_states_that_are_learned_take_a_graph_for_each_size(whole: Callable[[], set[str]]) -> None:
    with pytest.warns(enn.PerSampleWarning, match="each size takes a graph of its own"):
        follows(lambda: Sequences(nn.GRU(D, 3), "learned"), of_size(2, T, D), most=8)
    assert whole() == {"whole", "other"}


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(kind: type[nn.RNNCellBase], whole: Callable[[], set[str]]) -> None:
    follows(lambda: Slots(kind), of_size(T, D))
    assert whole() == {"whole"}


@pytest.mark.parametrize("of_letters", OF_LETTERS.values(), ids=OF_LETTERS)
def test_folded_indices(of_letters: Callable[[Tensor], Tensor], whole: Callable[[], set[str]]) -> None:
    batches = [(torch.randint(7, (size, 6, T)),) for size in SIZES]
    follows(lambda: Characters(of_letters), batches)
    assert whole() == {"whole"}


@pytest.mark.parametrize(
    ("module", "shape"),
    [(Windows, (6, D)), (BiasedWindows, (6, D)), (Patches, (8, D)), (Slopes, (T, D)), (EachAlone, (T, D))],
)
def test_other_folds(
    module: Any, shape: tuple[int, ...], whole: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPANDED, module, None)  # to be taken away again
    enn.alone(module)
    follows(module, of_size(*shape))
    assert whole() == {"whole"}


def test_a_part_for_the_rows_of_all_samples(whole: Callable[[], set[str]]) -> None:
    follows(Frames, of_size(2, 4, 4))
    assert whole() == {"whole"}


def test_rows_in_another_order_are_arranged_for_one_size(
    whole: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPANDED, OutOfOrder, None)
    enn.alone(OutOfOrder)
    follows(OutOfOrder, of_size(T, D), most=8)
    assert whole() == {"whole", "other"}


def test_rows_are_known_for_batches_of_any_size_where_their_number_is_a_symbol() -> None:
    dims, env = symbolic_shapes.DimDynamic, symbolic_shapes.ShapeEnv()
    context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[dims.DYNAMIC, dims.STATIC])
    x = FakeTensorMode(shape_env=env).from_tensor(torch.zeros(T, 2), symbolic_context=context)
    of_any, samples = Owners(x.shape[0], Memo()), torch.arange(T).unsqueeze(-1)
    assert of_any.arranged(samples, x.shape[0]).length == 1
    assert of_any.one_by_one(samples, x.shape).length == 2
    with pytest.raises(Unknown):
        of_any.arranged(samples, T)  # as many as there are samples in this call alone
    with pytest.raises(Unknown):
        of_any.one_by_one(samples, (T, x.shape[0]))
    with pytest.raises(Unknown):
        of_any.arranged(samples.flip(0), x.shape[0])


class ByShape(nn.Module):
    """Puts the steps of a single sample first by a view, which mixes several, but for as many as there are steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(D, D), nn.Embedding(7, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D), or (B, T)
        x = x.view(x.shape[1], x.shape[0], *x.shape[2:])
        rows = self.table(x) if x.dim() == 2 else x
        rows = self.layer(rows.flatten(0, 1)).tanh().unflatten(0, rows.shape[:2])
        return rows.reshape(rows.shape[1], -1)


@pytest.mark.parametrize("of_words", [False, True])
def test_what_is_true_of_one_size_alone(monkeypatch: pytest.MonkeyPatch, *, of_words: bool) -> None:
    monkeypatch.setitem(EXPANDED, ByShape, None)
    enn.alone(ByShape)
    batches = of_size(T, D, sizes=(4, 4, T, T, 3, 6, T, 7))
    if of_words:
        batches = [(x[..., 0].abs().long() % 7,) for (x,) in batches]
    follows(ByShape, batches, most=16)


def test_letters_first(whole: Callable[[], set[str]]) -> None:
    with pytest.warns(enn.PerSampleWarning, match="each size takes a graph of its own"):
        follows(
            lambda: LettersFirst(OF_LETTERS["viewed"]), [(torch.randint(7, (size, 6, T)),) for size in SIZES], most=8
        )
    assert whole() == {"whole", "other"}


def test_rows_that_values_choose_run_eagerly() -> None:
    with pytest.warns(
        enn.PerSampleWarning, match="runs eagerly, as what Mixture does with the whole batch depends on values"
    ):
        follows(partial(Mixture, WithBiases()), of_size(T, D, sizes=(B, B, B)), least=0, most=0)


def test_packed_sequences_run_eagerly() -> None:
    with pytest.warns(
        enn.PerSampleWarning, match="runs eagerly, as what Packed does with the whole batch depends on values"
    ):
        follows(lambda: Packed(nn.GRU(D, 3)), of_size(6, T, D, sizes=(B, B, B)), least=0, most=0)


class Turned(nn.Module):
    """Takes positions by an index in a buffer, which may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("places", torch.tensor([1, 0, 3, 2]))

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, D)
        return self.layer(x[:, self.places].flatten(0, 1)).view(x.shape)


def test_an_index_in_a_buffer_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    enn.alone(Turned)
    models = [enn.convert(built(Turned(), around=False)).per_sample(materialize=True) for _ in range(2)]
    compiled = enn.compile(lambda x: clipped(models[0], x), backend="eager")
    for number in range(5):
        (x,) = of_size(4, D, sizes=(B,))[0]
        for model in models:
            model.places.copy_(torch.randperm(4, generator=torch.Generator().manual_seed(number)))
            model.zero_grad()
        compiled(x)
        clipped(models[1], x)
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(own.grad_sample, other.grad_sample)
