"""The laws of test_layers.py for recurrent layers, whose outputs, states and sequences take more words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, unpack_sequence
from torch.testing._internal.common_modules import ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map

import expanded_nn as enn
from oracle import (
    Call,
    Take,
    assert_all_close,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    grads_of,
    loop,
    plain,
    rows_of,
    sample_losses,
    take_rows,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]

BATCH, STEPS, FEATURES, HIDDEN = 3, 5, 4, 6


class Sequences(nn.Module):
    """A recurrent layer as a function of tensors `(B, ...)` with a value `(B, features)`: the outputs and all states.

    Lengths make it pack its input, states come as `(B, layers * directions, features)`.
    """

    def __init__(self, rnn: nn.RNNBase, *, enforce_sorted: bool = False) -> None:
        super().__init__()
        self.rnn = rnn
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, *states: Tensor, lengths: Tensor | None = None) -> Tensor:
        steps, batch_first = x.shape[1], self.rnn.batch_first
        given: Any = x if batch_first else x.transpose(0, 1)
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, batch_first, self.enforce_sorted)
        first = tuple(state.transpose(0, 1).contiguous() for state in states)
        hx = None if not first else first if isinstance(self.rnn, nn.LSTM) else first[0]
        y, last = self.rnn(given, hx)
        if lengths is not None:
            assert isinstance(y, PackedSequence)
            y, returned = pad_packed_sequence(y, batch_first, total_length=steps)
            assert torch.equal(returned, lengths)
        y = y if batch_first else y.transpose(0, 1)
        last = last if isinstance(self.rnn, nn.LSTM) else (last,)
        return torch.cat([y.flatten(1), *(state.transpose(0, 1).flatten(1) for state in last)], 1)


class Unrolled(nn.Module):
    """A cell over time, the loop written by the user."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        lstm = isinstance(self.cell, nn.LSTMCell)
        hx: Any = None if not states else states if lstm else states[0]
        outputs = []
        for step in x.unbind(1):
            hx = self.cell(step, hx)
            outputs.append(hx[0] if lstm else hx)
        return torch.cat([*outputs, hx[1]] if lstm else outputs, 1)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    states: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    take: Take = take_rows

    def module(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()

    def inputs(self, batch: int, seed: int = 11) -> Call:
        torch.manual_seed(seed)
        x, states = torch.randn(batch, STEPS, FEATURES), [torch.randn(batch, *shape) for shape in self.states]
        return Call((x, *states), {"lengths": torch.tensor(self.lengths[:batch])} if self.lengths else {})

    def loop(self, call: Call, samples: int = BATCH, **how: Any) -> dict[str, Tensor]:
        return loop(self.module(), call, samples, take=self.take, **how)


KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm_proj": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
}

CELLS: dict[str, tuple[type[nn.RNNCellBase], dict[str, Any]]] = {
    "tanh": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
}


def layer_case(
    kind: str,
    name: str = "",
    *,
    states: bool = False,
    lengths: tuple[int, ...] = (),
    ordered: bool = False,
    **more: Any,
) -> Case:
    layer, arguments = KINDS[kind]
    arguments = {"batch_first": True, **arguments, **more}
    number = arguments.get("num_layers", 1) * (2 if arguments.get("bidirectional") else 1)
    sizes = [arguments.get("proj_size") or HIDDEN, *([HIDDEN] if layer is nn.LSTM else [])]
    return Case(
        "_".join(filter(None, [kind, name])),
        lambda: Sequences(layer(FEATURES, HIDDEN, **arguments), enforce_sorted=ordered),
        tuple((number, size) for size in sizes) if states else (),
        lengths,
    )


def cell_case(kind: str, name: str, *, states: bool = False, **more: Any) -> Case:
    cell, arguments = CELLS[kind]
    number = 2 if cell is nn.LSTMCell else 1
    return Case(
        f"{kind}_cell{name}",
        lambda: Unrolled(cell(FEATURES, HIDDEN, **arguments, **more)),
        ((HIDDEN,),) * number if states else (),
    )


CASES = [
    *(layer_case(kind) for kind in KINDS),
    *(layer_case(kind, "states_time_first", states=True, batch_first=False) for kind in KINDS),
    *(layer_case(kind, "no_bias_both_ways", bias=False, bidirectional=True) for kind in KINDS),
    *(layer_case(kind, "deep_both_ways", num_layers=2, bidirectional=True, states=True) for kind in KINDS),
    *(layer_case(kind, "packed", lengths=(2, 5, 1), states=True, batch_first=False) for kind in KINDS),
    *(
        layer_case(kind, "packed_deep_both_ways", lengths=(2, 4, 4), states=True, num_layers=2, bidirectional=True)
        for kind in KINDS
    ),
    layer_case("lstm", "packed_sorted", lengths=(5, 3, 1), ordered=True, bidirectional=True, states=True),
    layer_case("gru", "packed_no_bias", lengths=(1, 1, 1), bias=False),
    layer_case("gru", "dropout_0_three_layers", num_layers=3, dropout=0.0),
    *(
        cell_case(kind, name, **more)
        for kind in CELLS
        for name, more in (("", {"states": True}), ("_no_bias", {"bias": False}))
    ),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def expanded(case: Case, **settings: Any) -> nn.Module:
    return enn.convert(case.module()).per_sample(**settings)


def test_the_layers_are_the_zoo_s() -> None:
    for case in CASES:
        (layer,) = expanded(case).children()
        assert type(layer) is getattr(enn, type(layer).__name__)


# --- the laws -------------------------------------------------------------------------------------------------


@every_case
def test_forward_and_off(case: Case) -> None:
    call, model = case.inputs(BATCH), expanded(case)
    expected = call.on(case.module()).detach()
    assert_close(call.on(model), expected, tol=1e-12)
    with torch.no_grad():
        assert torch.equal(call.on(model), expected)
    model.per_sample(False)
    a, b = call.requires_grad(), call.requires_grad()
    plain(model, a).backward()
    plain(module := case.module(), b).backward()
    for p, q in zip(model.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for x, y in zip(a.floats(), b.floats(), strict=True):
        assert torch.equal(x.grad, y.grad)


@every_case
@pytest.mark.parametrize("samples", [BATCH, 1])
@pytest.mark.parametrize("settings", [{}, {"materialize": True}], ids=["factored", "dense"])
def test_rows_equal_the_loop(case: Case, samples: int, settings: dict[str, Any]) -> None:
    call, model = case.inputs(samples), expanded(case, **settings)
    (plain(model, call) / max(samples, 1)).backward()
    rows = case.loop(call, samples)
    assert_close_rows(rows_of(model), rows)
    assert_close_rows(grads_of(model), {name: row.mean(0) for name, row in rows.items()})


@every_case
def test_input_and_state_gradients(case: Case) -> None:
    a, b = case.inputs(BATCH).requires_grad(), case.inputs(BATCH).requires_grad()
    plain(expanded(case), a).backward()
    plain(case.module(), b).backward()
    assert_all_close([t.grad for t in a.floats()], [t.grad for t in b.floats()])


@every_case
def test_each_parameter_alone(case: Case) -> None:
    call, rows = case.inputs(BATCH), case.loop(case.inputs(BATCH))
    for name in rows:
        model = expanded(case, loss_reduction="sum")
        for other, parameter in model.named_parameters():
            parameter.requires_grad_(other == name)
        plain(model, call).backward()
        assert_close_rows(rows_of(model), {name: rows[name]})


@every_case
def test_gradient_penalty(case: Case) -> None:
    call, model = case.inputs(BATCH), expanded(case, loss_reduction="sum")
    gradient_penalty(model, call).backward()
    assert_close_rows(rows_of(model), case.loop(call, objective=gradient_penalty))


@every_case
def test_derivative_of_grad_sample(case: Case) -> None:
    a, b = case.inputs(BATCH).requires_grad(), case.inputs(BATCH).requires_grad()
    model, module = expanded(case, loss_reduction="sum"), case.module()
    plain(model, a).backward(create_graph=True)
    rows = loop(module, b, BATCH, take=case.take, create_graph=True)
    assert_close_rows(rows_of(model), {name: row.detach() for name, row in rows.items()})

    def differentiated(rows: dict[str, Tensor], module: nn.Module, call: Call) -> list[Tensor]:
        total = sum(row.square().sum() for row in rows.values())
        wanted = [*module.parameters(), *call.floats()]
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    assert_all_close(differentiated(rows_of(model), model, a), differentiated(rows, module, b))


@every_case
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_weights_that_differ_by_sample(case: Case, on: bool) -> None:
    call, module, model = case.inputs(BATCH).requires_grad(), case.module(), expanded(case).per_sample(on)
    named = dict(module.named_parameters())
    weights = {n: (p + 0.3 * torch.randn(BATCH, *p.shape)).detach().requires_grad_() for n, p in named.items()}
    output = torch.func.functional_call(model, weights, call.args, dict(call.kwargs))
    wanted = [*weights.values(), *call.floats()]
    actual = torch.autograd.grad(sample_losses(output).sum(), wanted)
    alone = []
    for i in range(BATCH):
        one = case.take(call, i)
        own = {name: weight[i] for name, weight in weights.items()}
        alone.append(torch.func.functional_call(module, own, one.args, dict(one.kwargs)))
    expected = torch.cat(alone)
    assert_close(output, expected.detach())
    assert_all_close(actual, torch.autograd.grad(sample_losses(expected).sum(), wanted))
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())


@every_case
def test_empty_batch(case: Case) -> None:
    call, module, model = case.inputs(0), case.module(), expanded(case)
    try:
        plain(module, call).backward()
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            plain(model, call).backward()
        return
    plain(model, call).backward()
    assert_close_rows(rows_of(model), {name: p.new_zeros(0, *p.shape) for name, p in module.named_parameters()})
    assert all(not p.grad.any() for p in model.parameters())


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(case: Case, dtype: torch.dtype) -> None:
    call = case.inputs(BATCH).map(lambda t: t.to(dtype) if t.is_floating_point() else t)
    model = enn.convert(case.module().to(dtype)).per_sample(loss_reduction="sum")
    assert call.on(model).dtype == call.on(case.module().to(dtype)).dtype
    plain(model, call).backward()
    assert all(p.grad_sample.dtype == dtype for p in model.parameters())
    module = case.module().to(dtype).double()
    exact = call.map(lambda t: t.double() if t.is_floating_point() else t)
    assert_close_rows(rows_of(model), loop(module, exact, BATCH), 1e-4 if dtype == torch.float32 else 5e-2)


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
            torch.manual_seed(3)
            self.rnn = layer(FEATURES, HIDDEN, bidirectional=True, batch_first=True, **arguments)

        def forward(self, x: Tensor) -> Tensor:
            y, last = self.rnn(x)
            last = last if isinstance(last, tuple) else (last,)
            return y[:, 1] if part == "output" else last[part == "c_n"].transpose(0, 1)

    model, call = enn.convert(Part()).per_sample(loss_reduction="sum"), Call((x.transpose(0, 1),))
    plain(model, call).backward()
    assert_close_rows(rows_of(model), loop(Part(), call, BATCH))


def test_an_initial_state_computed_from_the_input() -> None:
    """One input of the recurrence is made of another: a gradient with a graph must not go through it twice."""

    class FromInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Linear(FEATURES, HIDDEN)
            self.rnn = nn.GRU(FEATURES, HIDDEN, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x, self.first(x[:, 0])[None])[0].flatten(1)

    call = Call((torch.randn(BATCH, STEPS, FEATURES),))
    model = enn.convert(FromInput()).per_sample(loss_reduction="sum")
    gradient_penalty(model, call).backward()
    assert_close_rows(rows_of(model), loop(FromInput(), call, BATCH, objective=gradient_penalty))


def test_third_derivative() -> None:
    case, total = layer_case("lstm"), []
    for model in (expanded(case), case.module()):
        call = case.inputs(BATCH).requires_grad()
        value = plain(model, call)
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, call.floats(), create_graph=True)
            value = slope.sin().sum()
        total.append(torch.autograd.grad(value, call.floats())[0])
    assert_close(*total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(), (2, 5, 1)])
def test_a_jacobian_by_one_vmapped_backward(kind: str, lengths: tuple[int, ...]) -> None:
    case = layer_case(kind, lengths=lengths, states=True, bidirectional=True)
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


def test_two_calls_in_one_pass_add() -> None:
    case = layer_case("lstm", lengths=(2, 5, 1))
    model = expanded(case, loss_reduction="sum")
    first, second = case.inputs(BATCH), case.inputs(BATCH, seed=12)
    (plain(model, first) + plain(model, second)).backward()
    one, other = case.loop(first), case.loop(second)
    assert_close_rows(rows_of(model), {name: one[name] + other[name] for name in one})


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind} cell" for kind in CELLS)])
def test_an_in_place_operation_on_the_outputs(kind: str) -> None:
    kind, cell = kind.removesuffix(" cell"), kind.endswith(" cell")
    layer, arguments = (CELLS if cell else KINDS)[kind]

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
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
    plain(model, call).backward()
    assert_close_rows(rows_of(model), loop(OutOfPlace(), call, BATCH))


def test_tied_directions() -> None:
    def build() -> nn.Module:
        module = layer_case("gru", bidirectional=True).module()
        module.rnn.weight_hh_l0_reverse = module.rnn.weight_hh_l0
        return module

    call, model = layer_case("gru").inputs(BATCH), enn.convert(build()).per_sample(loss_reduction="sum")
    plain(model, call).backward()
    assert_close_rows(rows_of(model), loop(build(), call, BATCH))


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
@pytest.mark.parametrize("lengths", [(), (2, 5, 1)])
def test_dropout_between_layers_draws_as_torch_does(kind: str, lengths: tuple[int, ...]) -> None:
    case = layer_case(kind, num_layers=3, dropout=0.4, bidirectional=True, lengths=lengths)
    call, model, module = case.inputs(BATCH), expanded(case), case.module()
    outputs = []
    for each in (model, module):
        torch.manual_seed(5)
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
        packed = pack_padded_sequence(x, torch.tensor([1, 5, 2]), batch_first=True, enforce_sorted=False)
        rnn(packed)[0].data.sum().backward()
        assert all(len(p.grad_sample) == BATCH for p in rnn.parameters())


def test_packed_output_keeps_its_order() -> None:
    rnn = enn.LSTM(FEATURES, HIDDEN).per_sample()
    packed = pack_padded_sequence(torch.randn(STEPS, BATCH, FEATURES), torch.tensor([1, 5, 2]), enforce_sorted=False)
    out, _ = rnn(packed)
    assert out.batch_sizes is packed.batch_sizes
    assert out.sorted_indices is packed.sorted_indices
    assert out.unsorted_indices is packed.unsorted_indices


def test_weights_are_held_as_factors_of_all_steps() -> None:
    model = expanded(layer_case("lstm"))
    plain(model, layer_case("lstm").inputs(BATCH)).backward()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        rows = getattr(model.rnn, name).grad_sample
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
            torch.manual_seed(3)
            self.rnn, self.x = nn.GRU(FEATURES, HIDDEN, batch_first=True), torch.randn(1, STEPS, FEATURES)

        def forward(self, scale: Tensor) -> Tensor:
            return self.rnn(self.x)[0].flatten(1) * scale

    call, model = Call((torch.randn(BATCH, 1),)), enn.convert(Shared()).per_sample(loss_reduction="sum")
    plain(model, call).backward()
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
        with pytest.raises(enn.PerSampleError, match=rf"^{kind.__name__}: .*(unbatched sequence|no batch dimension)"):
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
    packed = pack_padded_sequence(torch.randn(5, 3, 7), torch.tensor([5, 3, 1]))
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
        words = rf"{layer.__name__}: input has shape \(5, 4\), an unbatched sequence.*unsqueeze\({dim}\)"
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
        pytest.param(lambda x: x[0], r"layer \(LSTM\): input has shape \(5, 4\), an unbatched", id="unbatched"),
        pytest.param(
            lambda x: pack_padded_sequence(x[:3], torch.tensor([5, 3, 1]), batch_first=True),
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
