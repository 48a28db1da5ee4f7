"""Recurrent layers beyond the laws of test_layers.py: parts of the outputs, packed sequences, dropout, bad input."""

import copy
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, unpack_sequence
from torch.testing._internal.common_modules import ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map

import expanded_nn as enn
from cases import CELLS, FEATURES, HIDDEN, KINDS, RECURRENT, STEPS, Case, recurrent
from expanded_nn.core import cost
from expanded_nn.layers.recurrent.equations import Lstm
from oracle import (
    Call,
    assert_all_close,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    skip_without_bfloat16,
    total_loss,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]

BATCH = 3

every_case = pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)


def expanded(case: Case, **settings: Any) -> nn.Module:
    return enn.convert(case.module()).per_sample(**settings)


def test_the_layers_are_the_zoo_s() -> None:
    for case in RECURRENT:
        (layer,) = expanded(case).children()
        assert type(layer) is getattr(enn, type(layer).__name__)


# --- beyond the laws ------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("case", [case for case in RECURRENT if "lstm" in case.name], ids=lambda case: case.name)
def test_rows_of_an_lstm_with_several_threads(case: Case) -> None:
    call, model = case.inputs(BATCH), expanded(case, loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(case.module(), call, BATCH, take=case.take))


@every_case
def test_without_grad_it_is_torch_s_own_forward(case: Case) -> None:
    call = case.inputs(BATCH)
    with torch.no_grad():
        assert torch.equal(call.on(expanded(case)), call.on(case.module()))


@every_case
def test_each_parameter_alone(case: Case) -> None:
    call = case.inputs(BATCH)
    rows = loop(case.module(), call, BATCH)
    for name in rows:
        model = expanded(case, loss_reduction="sum")
        for other, parameter in model.named_parameters():
            parameter.requires_grad_(other == name)
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), {name: rows[name]})


@pytest.mark.parametrize("lengths", [None, (3, 32, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_many_steps(kind: str, lengths: tuple[int, ...] | None) -> None:
    """So many that the loop over time takes a copy of the transposed weight."""
    steps = 32
    assert cost.turns_weight_once(steps)
    layer, arguments = KINDS[kind]
    module, x = layer(3, 4, batch_first=True, **arguments), torch.randn(BATCH, steps, 3)
    samples = [x[i : i + 1, : steps if lengths is None else lengths[i]] for i in range(BATCH)]
    model = enn.convert(module).per_sample(loss_reduction="sum")
    inputs = x if lengths is None else pack_sequence([sample[0] for sample in samples], enforce_sorted=False)
    output = model(inputs)[0]
    (output.data if lengths else output).sin().sum().backward()
    for i, sample in enumerate(samples):
        module.zero_grad()
        module(sample)[0].sin().sum().backward()
        assert_close_rows({name: rows[i] for name, rows in rows_of(model).items()}, grads_of(module))


@pytest.mark.parametrize("kind", KINDS)
def test_large_layers_in_single_precision(kind: str) -> None:
    layer, arguments = KINDS[kind]
    module, x = layer(32, 128, batch_first=True, **arguments), torch.randn(64, 3, 32)

    def rows(dtype: torch.dtype) -> dict[str, Tensor]:
        model = enn.convert(module.to(dtype)).per_sample(loss_reduction="sum")
        model(x.to(dtype))[0].sin().sum().backward()
        return {name: row.double() for name, row in rows_of(model).items()}

    expected = rows(torch.float64)
    assert_close_rows(rows(torch.float32), expected, 1e-5)


@pytest.mark.parametrize("keeps_gates", [True, False])
def test_small_states_go_through_torchs_kernel(keeps_gates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of the loop over time; that is for what is larger, or has no such kernel."""
    if keeps_gates:
        monkeypatch.setattr(cost, "FEW_STATES", 0)
        monkeypatch.setattr(cost, "FEW_STATES_OF_THREADS", 0)
    looped, with_gates = [], Lstm.with_gates

    def noted(recurrence: Lstm, inputs: Any) -> Any:
        looped.append(inputs.x.shape)
        return with_gates(recurrence, inputs)

    monkeypatch.setattr(Lstm, "with_gates", noted)
    module, x = nn.LSTM(FEATURES, HIDDEN, 2, bidirectional=True), torch.randn(STEPS, 3, FEATURES)
    expected = loop(module, Call((x.transpose(0, 1),)), 3, objective=lambda m, call, first=0: of_steps(m, call.args[0]))
    model = enn.convert(copy.deepcopy(module).float()).per_sample(loss_reduction="sum", batch_first=False)
    of_steps(model, x.transpose(0, 1).float()).backward()
    assert_close_rows({name: p.grad_sample.double() for name, p in model.named_parameters()}, expected, 1e-5)
    assert len(looped) == 4 * keeps_gates
    packed = pack_padded_sequence(x.float(), torch.tensor([5, 3, 1], device="cpu"))
    for layer, given in ((model, packed), (enn.convert(nn.LSTM(FEATURES, HIDDEN, proj_size=2).float()), x.float())):
        looped.clear()
        layer.per_sample(batch_first=False)(given)
        assert looped


def of_steps(model: Any, x: Tensor) -> Tensor:
    y, (h, c) = model(x.transpose(0, 1))
    return y.sin().sum() + (h * c).sum()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_graph_is_used_twice(kind: type[nn.Module]) -> None:
    model = enn.convert(kind(5, 6, batch_first=True)).per_sample()
    loss, rows = model(torch.randn(BATCH, 4, 5))[0].sin().sum(), []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        rows.append({name: row.clone() for name, row in rows_of(model).items()})
    assert_close_rows(rows[1], rows[0], 1e-12)


@every_case
def test_autocast(case: Case) -> None:
    call = case.inputs(BATCH).map(lambda t: t.float() if t.is_floating_point() else t)
    skip_without_bfloat16(case.module().float(), call)
    model, off = (enn.convert(case.module().float()).per_sample(on, loss_reduction="sum") for on in (True, False))
    a, b = call.requires_grad(), call.requires_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = a.on(model), b.on(off)
    assert out.dtype == expected.dtype
    for output in (out, expected):
        sample_losses(output).sum().backward()
    for p, q in zip(model.parameters(), off.parameters(), strict=True):
        assert p.grad_sample.dtype == p.grad.dtype == torch.float32
        assert_close(p.grad_sample.sum(0), q.grad, 5e-2)
    for x, y in zip(a.floats(), b.floats(), strict=True):
        assert x.grad.dtype == y.grad.dtype
        assert_close(x.grad, y.grad, 5e-2)


# --- parts of the loss, and of the graph ----------------------------------------------------------------------


PARTS = [(kind, part) for kind in KINDS for part in ("output", "h_n")]
PARTS += [(kind, "c_n") for kind, (layer, _) in KINDS.items() if layer is nn.LSTM]


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_one_output_alone_in_the_loss(kind: str, part: str) -> None:
    layer, arguments = KINDS[kind]
    x = torch.randn(STEPS, BATCH, FEATURES)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            set_seed(3)
            self.rnn = layer(FEATURES, HIDDEN, bidirectional=True, batch_first=True, **arguments)

        def forward(self, x: Tensor) -> Tensor:
            y, last = self.rnn(x)
            last = last if isinstance(last, tuple) else (last,)
            return y[:, 1] if part == "output" else last[part == "c_n"].transpose(0, 1)

    model, call = enn.convert(Part()).per_sample(loss_reduction="sum"), Call((x.transpose(0, 1),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(Part(), call, BATCH))


def test_an_initial_state_computed_from_the_input() -> None:
    """One input of the recurrence is made of another: a gradient with a graph must not go through it twice."""

    class FromInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            set_seed(3)
            self.first = nn.Linear(FEATURES, HIDDEN)
            self.rnn = nn.GRU(FEATURES, HIDDEN, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x, self.first(x[:, 0])[None])[0].flatten(1)

    call = Call((torch.randn(BATCH, STEPS, FEATURES),))
    model = enn.convert(FromInput()).per_sample(loss_reduction="sum")
    gradient_penalty(model, call).backward()
    assert_close_rows(rows_of(model), loop(FromInput(), call, BATCH, objective=gradient_penalty))


def test_third_derivative() -> None:
    case, total = recurrent("lstm"), []
    for model in (expanded(case), case.module()):
        call = case.inputs(BATCH).requires_grad()
        value = total_loss(model, call)
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, call.floats(), create_graph=True)
            value = slope.sin().sum()
        total.append(torch.autograd.grad(value, call.floats())[0])
    assert_close(*total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(), (2, 5, 1)])
def test_a_jacobian_by_one_vmapped_backward(kind: str, lengths: tuple[int, ...]) -> None:
    case = recurrent(kind, lengths=lengths, states=True, bidirectional=True)
    model, jacobians = expanded(case), []
    for each in (model, case.module()):
        call = case.inputs(BATCH).requires_grad()
        out = call.on(each)
        seeds = torch.randn(4, *out.shape, generator=torch.Generator().manual_seed(5))
        if each is model:
            jacobians.append(torch.autograd.grad(out, call.floats(), seeds, is_grads_batched=True))
        else:
            by_seed = [torch.autograd.grad(out, call.floats(), seed, retain_graph=True) for seed in seeds]
            jacobians.append([torch.stack(grads) for grads in zip(*by_seed, strict=True)])
    assert_all_close(*jacobians)
    with pytest.raises(enn.PerSampleError, match="vmapped backward"):
        torch.autograd.grad(case.inputs(BATCH).on(model), [*model.parameters()], seeds, is_grads_batched=True)


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind} cell" for kind in CELLS)])
def test_an_in_place_operation_on_the_outputs(kind: str) -> None:
    kind, cell = kind.removesuffix(" cell"), kind.endswith(" cell")
    layer, arguments = (CELLS if cell else KINDS)[kind]

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            set_seed(3)
            self.rnn = layer(FEATURES, HIDDEN, **arguments)

        def forward(self, x: Tensor) -> Tensor:
            if not cell:
                return self.rnn(x.transpose(0, 1))[0].mul_(2).transpose(0, 1).relu_()
            out = self.rnn(x[:, 0])
            return (out[0] if isinstance(out, tuple) else out).mul_(2)

    class OutOfPlace(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            if not cell:
                return (self.rnn(x.transpose(0, 1))[0].transpose(0, 1) * 2).relu()
            out = self.rnn(x[:, 0])
            return (out[0] if isinstance(out, tuple) else out) * 2

    call, model = Call((torch.randn(BATCH, STEPS, FEATURES),)), enn.convert(InPlace()).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(OutOfPlace(), call, BATCH))


def test_tied_directions() -> None:
    def build() -> nn.Module:
        module = recurrent("gru", bidirectional=True).module()
        module.layer.weight_hh_l0_reverse = module.layer.weight_hh_l0
        return module

    call, model = recurrent("gru").inputs(BATCH), enn.convert(build()).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(build(), call, BATCH))


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
@pytest.mark.parametrize("lengths", [(), (2, 5, 1)])
def test_dropout_between_layers_draws_as_torch_does(kind: str, lengths: tuple[int, ...]) -> None:
    case = recurrent(kind, num_layers=3, dropout=0.4, bidirectional=True, lengths=lengths)
    call, model, module = case.inputs(BATCH), expanded(case), case.module()
    outputs = []
    for each in (model, module):
        set_seed(5)
        outputs.append(call.on(each))
        (sample_losses(outputs[-1]).sum() / BATCH).backward()
    assert_close(*outputs)
    assert_close_rows({name: p.grad_sample.mean(0) for name, p in model.named_parameters()}, grads_of(module))
    assert_close(call.on(model.eval()), call.on(module.eval()).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_on_its_own_knows_its_batch(kind: str) -> None:
    layer, arguments = KINDS[kind]
    for batch_first in (True, False):
        rnn = enn.convert(layer(FEATURES, HIDDEN, batch_first=batch_first, **arguments)).per_sample()
        x = torch.randn(BATCH, STEPS, FEATURES)
        rnn(x if batch_first else x.transpose(0, 1))[0].sum().backward()
        assert all(len(p.grad_sample) == BATCH for p in rnn.parameters())
        rnn.zero_grad()
        packed = pack_padded_sequence(x, torch.tensor([1, 5, 2], device="cpu"), batch_first=True, enforce_sorted=False)
        rnn(packed)[0].data.sum().backward()
        assert all(len(p.grad_sample) == BATCH for p in rnn.parameters())


def test_packed_output_keeps_its_order() -> None:
    rnn = enn.LSTM(FEATURES, HIDDEN).per_sample()
    packed = pack_padded_sequence(
        torch.randn(STEPS, BATCH, FEATURES), torch.tensor([1, 5, 2], device="cpu"), enforce_sorted=False
    )
    out, _ = rnn(packed)
    assert out.batch_sizes is packed.batch_sizes
    assert out.sorted_indices is packed.sorted_indices
    assert out.unsorted_indices is packed.unsorted_indices


def test_weights_are_held_as_factors_of_all_steps() -> None:
    model = expanded(recurrent("lstm"))
    total_loss(model, recurrent("lstm").inputs(BATCH)).backward()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        rows = getattr(model.layer, name).grad_sample
        wide = enn.LSTM(40, 50, batch_first=True).per_sample()
        wide(torch.randn(BATCH, STEPS, 40))[0].sum().backward()
        rows = getattr(wide, name).grad_sample
        assert isinstance(rows, enn.FactoredTensor)
        assert not rows.is_dense
        (term,) = rows.terms()
        assert term.factors[0].shape[1] == STEPS


def test_one_sequence_shared_by_all_samples() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            set_seed(3)
            self.rnn, self.x = nn.GRU(FEATURES, HIDDEN, batch_first=True), torch.randn(1, STEPS, FEATURES)

        def forward(self, scale: Tensor) -> Tensor:
            return self.rnn(self.x)[0].flatten(1) * scale

    call, model = Call((torch.randn(BATCH, 1),)), enn.convert(Shared()).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(Shared(), call, BATCH))


# --- torch's module database: all its cases are unbatched, or packed ------------------------------------------


def database() -> Iterator[object]:
    for info in module_db:
        if issubclass(info.module_cls, nn.RNNBase | nn.RNNCellBase):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
            )
            for i, given in enumerate(inputs):
                yield pytest.param(info.module_cls, given, id=f"{info.module_cls.__name__}-{i}")


@pytest.mark.parametrize(("kind", "given"), list(database()))
def test_a_case_of_the_module_database(kind: type[nn.Module], given: ModuleInput) -> None:
    module = kind(*given.constructor_input.args, **given.constructor_input.kwargs)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    x, *hx = given.forward_input.args
    if isinstance(x, PackedSequence):
        sequences = [(each, *hx) for each in unpack_sequence(x)]
        together = (x, *tree_map(lambda t: torch.stack([t] * len(sequences), 1), hx))
    else:
        with pytest.raises(enn.PerSampleError, match=rf"^{kind.__name__}: .*(a batch of sequences|no batch dimension)"):
            model(x, *hx)
        sequences = [tree_map(lambda t, i=i: t + i / 2, (x, *hx)) for i in range(BATCH)]
        in_cell = isinstance(module, nn.RNNCellBase)
        dims = (0 if in_cell or module.batch_first else 1, 0 if in_cell else 1)
        together = tuple(
            tree_map(lambda *ts, dim=dim: torch.stack(ts, dim), *each)
            for each, dim in zip(zip(*sequences, strict=True), dims, strict=False)
        )
    sum(t.sin().sum() for t in floats(model(*together))).backward()
    rows = [
        torch.autograd.grad(sum(t.sin().sum() for t in floats(module(*each))), list(module.parameters()))
        for each in sequences
    ]
    assert_all_close([p.grad_sample for p in model.parameters()], map(torch.stack, zip(*rows, strict=True)))


def floats(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


# --- bad input ------------------------------------------------------------------------------------------------


def both(rnn: nn.Module, *arguments: Any) -> tuple[Exception, Exception]:
    """What torch's layer raises, and what its twin raises."""
    raised = []
    for each in (rnn, enn.convert(rnn).per_sample()):
        with pytest.raises(Exception) as info:  # noqa: PT011
            each(*arguments)
        raised.append(info.value)
    return raised[0], raised[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((torch.zeros(5, 3, 7),), id="features"),
        pytest.param((torch.zeros(2, 5, 3, 4),), id="dimensions"),
        pytest.param((torch.zeros(5, 3, 4), "states of 2"), id="states"),
        pytest.param((torch.zeros(5, 3, 4, dtype=torch.float32),), id="dtype"),
    ],
)
def test_wrong_sizes_give_torch_s_own_error(kind: str, arguments: tuple[Any, ...]) -> None:
    layer, more = KINDS[kind]
    rnn = layer(FEATURES, HIDDEN, **more).double()
    x, *rest = arguments
    if rest:
        state = torch.zeros(1, 2, HIDDEN, dtype=torch.float64)
        rest = [(state, state) if layer is nn.LSTM else state]
    x = x if x.dtype == torch.float32 and x.shape == (5, 3, 4) and not rest else x.double()
    theirs, ours = both(rnn, x, *rest)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


def test_wrong_sizes_of_a_packed_sequence_give_torch_s_own_error() -> None:
    packed = pack_padded_sequence(torch.randn(5, 3, 7), torch.tensor([5, 3, 1], device="cpu"))
    theirs, ours = both(nn.GRU(FEATURES, HIDDEN), packed)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("kind", CELLS)
def test_wrong_sizes_give_torch_s_own_error_in_cells(kind: str) -> None:
    cell, more = CELLS[kind]
    state = torch.randn(BATCH, HIDDEN + 1)
    for arguments in (
        (torch.randn(BATCH, FEATURES + 1),),
        (torch.randn(1, BATCH, FEATURES),),
        (torch.randn(BATCH, FEATURES), (state, state) if cell is nn.LSTMCell else state),
    ):
        theirs, ours = both(cell(FEATURES, HIDDEN, **more), *arguments)
        assert type(ours) is type(theirs)
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unbatched_sequence_is_refused(kind: str) -> None:
    layer, more = KINDS[kind]
    for batch_first, dim in ((True, 0), (False, 1)):
        rnn = enn.convert(layer(FEATURES, HIDDEN, batch_first=batch_first, **more)).per_sample()
        words = rf"{layer.__name__}: input has shape \(5, 4\); wanted a batch of sequences.*unsqueeze\({dim}\)"
        with pytest.raises(enn.PerSampleError, match=words):
            rnn(torch.randn(5, 4))
        rnn.per_sample(False)(torch.randn(5, 4))


@pytest.mark.parametrize("kind", CELLS)
def test_an_unbatched_cell_input_is_refused(kind: str) -> None:
    cell, more = CELLS[kind]
    rnn = enn.convert(cell(FEATURES, HIDDEN, **more)).per_sample()
    with pytest.raises(enn.PerSampleError, match=rf"{cell.__name__}: input has shape \(4,\), no batch dimension"):
        rnn(torch.randn(4))
    state = torch.randn(HIDDEN)
    with pytest.raises(enn.PerSampleError, match=rf"{cell.__name__}: hx has shape \(6,\), no batch dimension"):
        rnn(torch.randn(BATCH, 4), (state, state) if cell is nn.LSTMCell else state)


class Feed(nn.Module):
    """A root whose input tells B, and which gives its layer something else."""

    def __init__(self, layer: nn.Module, feed: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.feed = layer, feed

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.feed(x))


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        pytest.param(lambda x: x[:2], r"layer \(LSTM\): input has shape \(2, 5, 4\), 2 rows", id="half"),
        pytest.param(lambda x: torch.cat([x, x]), r"layer \(LSTM\): .*folded batch of 4 x 2", id="twice"),
        pytest.param(lambda x: x[1:2], r"layer \(LSTM\): .*is a slice", id="slice"),
        pytest.param(lambda x: x[0], r"layer \(LSTM\): input has shape \(5, 4\); wanted a batch", id="unbatched"),
        pytest.param(
            lambda x: pack_padded_sequence(x[:3], torch.tensor([5, 3, 1], device="cpu"), batch_first=True),
            r"layer \(LSTM\): input is a PackedSequence of 3 sequences; wanted 4",
            id="packed",
        ),
    ],
)
def test_another_batch_is_refused(feed: Callable[[Tensor], Any], words: str) -> None:
    model = enn.convert(Feed(nn.LSTM(FEATURES, HIDDEN, batch_first=True), feed)).per_sample()
    with pytest.raises(enn.PerSampleError, match=words):
        model(torch.randn(4, STEPS, FEATURES))


def test_another_batch_in_a_cell_is_refused() -> None:
    model = enn.convert(Feed(nn.GRUCell(FEATURES, HIDDEN), lambda x: x[:2])).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"layer \(GRUCell\): input has shape \(2, 4\), 2 rows"):
        model(torch.randn(4, FEATURES))


def test_time_first_in_a_batch_first_layer_is_refused() -> None:
    model = enn.convert(Feed(nn.LSTM(FEATURES, HIDDEN, batch_first=True), lambda x: x.transpose(0, 1))).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"layer \(LSTM\): input has shape \(5, 4, 4\), 5 rows"):
        model(torch.randn(4, STEPS, FEATURES))


def test_the_last_cell_state_of_one_step_does_not_depend_on_the_projection() -> None:
    module = nn.LSTM(3, 4, proj_size=2, batch_first=True)
    model = enn.convert(module).per_sample()
    for each in (module, model):
        each(torch.randn(2, 1, 3))[1][1].sum().backward()
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {"weight_hr_l0"}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (parameter.grad_sample is None) == (name == "weight_hr_l0")


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_a_layer_whose_outputs_get_no_gradient(kind: type[nn.Module], create_graph: bool) -> None:
    """What is behind it says so, with `None`."""
    model = enn.convert(nn.Sequential(kind(3, 4, batch_first=True))).per_sample()
    y, _ = model(torch.randn(2, 5, 3))
    Stopped.apply(y).sum().backward(create_graph=create_graph)
    assert all(parameter.grad is None and parameter.grad_sample is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_no_weight_of_a_single_sample_stays_behind() -> None:
    """Torch's layers have a list of their weights, which their plain forward renews, here for each sample."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.scale = nn.GRU(3, 4, batch_first=True), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.gru(x)[0] * self.scale
            return y if float(y.detach().sum()) < 1e9 else 2 * y  # so that the samples go in a loop

    model = enn.convert(Gated()).per_sample()
    model(torch.randn(2, 5, 3)).sum().backward()
    assert all(map(is_, model.gru._flat_weights, model.gru.parameters()))


def test_one_sample_with_a_mask_of_as_many_steps_as_classes() -> None:
    """In a model that has time first, `(B, T)` and `(B, classes)` have the samples first all the same."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 3), nn.Linear(3, 5)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # (T, B, 4), (B, T)
            kept: Tensor = self.rnn(x)[0] * keep.T[..., None]
            return self.head(kept.sum(0))  # type: ignore[no-any-return]

    module = Classifier().double()
    model = enn.convert(module).per_sample(batch_first=False)
    for batch in (3, 1):
        x, keep = torch.randn(5, batch, 4, dtype=torch.float64), torch.ones(batch, 5, dtype=torch.bool)
        model.zero_grad()
        model(x, keep).square().sum(1).mean().backward()
        for i in range(batch):
            loss = module(x[:, i : i + 1], keep[i : i + 1]).square().sum()
            (expected,) = torch.autograd.grad(loss, [module.head.weight])
            assert_close(model.head.weight.grad_sample[i], expected)
        assert len(model.head.weight.grad_sample) == batch


class Unrolled(nn.Module):
    """A cell over time, of as many features as there are samples; `stacks` puts its states together."""

    def __init__(self, stacks: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.cell, self.head, self.stacks = nn.GRUCell(4, 3), nn.Linear(3, 5), stacks

    def forward(self, x: Tensor) -> Tensor:  # (T, B, 4)
        states: list[Tensor] = []
        for step in x:
            states.append(self.cell(step, states[-1] if states else None))
        return self.head(self.stacks(x, states))  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_states_of_a_cell_with_as_many_features_as_samples(steps: int) -> None:
    """In a model that has time first `(B, features)` has the samples first all the same, until they are stacked."""
    module = Unrolled(lambda x, states: torch.stack(states)).double()
    model = enn.convert(module).per_sample(batch_first=False)
    x = torch.randn(steps, 3, 4, dtype=torch.float64)
    model(x).square().sum((0, 2)).mean().backward()
    for i in range(3):
        loss = module(x[:, i : i + 1]).square().sum()
        expected = torch.autograd.grad(loss, [*module.parameters()])
        for own, other in zip(model.parameters(), expected, strict=True):
            assert_close(own.grad_sample[i], other)


def test_states_that_are_stacked_otherwise_are_refused() -> None:
    module = Unrolled(lambda x, states: torch.stack(states, 1))
    model = enn.convert(module).per_sample(batch_first=False, escalate=False)
    with pytest.raises(enn.PerSampleError, match="has the samples in dimension 0"):
        model(torch.randn(3, 3, 4))
