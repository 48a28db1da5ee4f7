"""Passes, whose loss, who is a sample, outside use: sections 2 and 3 of the contract."""

import gc
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from cases import Scale
from expanded_nn.core import cost
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, sample_losses, total_loss


class Net(nn.Module):
    """Two layers and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5))
        self.one = nn.Linear(5, 2)
        self.other = nn.Linear(5, 2)

    def forward(self, x: Tensor, head: str = "one") -> Tensor:
        return getattr(self, head)(self.body(x))


def net(**arguments: Any) -> tuple[nn.Module, nn.Module]:
    """The plain model and the expanded one."""
    torch.manual_seed(5)
    module = Net()
    return module, enn.convert(module).per_sample(loss_reduction="sum", **arguments)


def batch(samples: int, seed: int = 1, **kwargs: Any) -> Call:
    return Call((torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed)),), kwargs)


def rows(module: nn.Module, call: Call, **arguments: Any) -> dict[str, Tensor]:
    return loop(module, call, len(call.args[0]), **arguments)


def used(rows: dict[str, Tensor | None], *unused: str) -> dict[str, Tensor]:
    """Without the parameters that nothing used; they have no rows at all."""
    for name in list(rows):
        if name.startswith(unused):
            assert rows[name] is None
    return {name: r for name, r in rows.items() if not name.startswith(unused)}


def cat(*passes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in passes]) for name in passes[0]}


def add(*passes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sum(p[name] for p in passes) for name in passes[0]}


def without(rows: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: r for name, r in rows.items() if not name.startswith(prefix)}


# --- passes ---------------------------------------------------------------------------------------------------


def test_no_rows_before_the_first_backward() -> None:
    _, model = net()
    assert all(p.grad_sample is None for p in model.parameters())
    batch(3).on(model)
    assert all(p.grad_sample is None for p in model.parameters())


def test_unused_parameters_have_no_rows() -> None:
    module, model = net()
    total_loss(model, batch(3)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))


def test_a_pass_that_did_not_use_a_parameter_has_zero_rows_there() -> None:
    module, model = net()
    calls = [batch(3), batch(2, 2, head="other"), batch(3, 3)]
    for call in calls:
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), cat(*(rows(module, call) for call in calls)))


def test_two_batch_sizes_in_one_backward() -> None:
    module, model = net()
    calls = [batch(3), batch(2, 2, head="other")]
    sum(total_loss(model, call) for call in calls).backward()
    assert_close_rows(rows_of(model), cat(*(rows(module, call) for call in calls)))
    assert_close_rows(grads_of(model), {n: r.sum(0) for n, r in cat(*(rows(module, c) for c in calls)).items()})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_stand_in_the_order_of_the_forwards(order: tuple[int, ...]) -> None:
    module, model = net()
    calls = [batch(3), batch(2, 2)]
    losses = [total_loss(model, call) for call in calls]
    for i in order:
        losses[i].backward()
    expected = cat(*(rows(module, call) for call in calls))
    assert_close_rows(used(rows_of(model), "other"), without(expected, "other"))


def test_siamese_forwards_add() -> None:
    module, model = net()
    calls = [batch(3), batch(3, 2)]
    first, second = (call.on(model) for call in calls)
    sample_losses(first * second).sum().backward()

    def siamese(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return sample_losses(module(call.args[0]) * module(call.args[1]), first).sum()

    pair = Call((calls[0].args[0], calls[1].args[0]))
    expected = loop(module, pair, 3, objective=siamese)
    assert_close_rows(used(rows_of(model), "other"), without(expected, "other"))


def test_retained_graph_adds() -> None:
    module, model = net()
    out = batch(3).on(model)
    sample_losses(out).sum().backward(retain_graph=True)
    (2 * sample_losses(out)).sum().backward()
    expected = {name: 3 * r for name, r in without(rows(module, batch(3)), "other").items()}
    assert_close_rows(used(rows_of(model), "other"), expected)
    assert_close_rows(used(grads_of(model), "other"), {name: r.sum(0) for name, r in expected.items()})


def test_two_losses_on_one_graph_add() -> None:
    module, model = net()
    features = model.body(batch(3).args[0])
    sample_losses(features).sum().backward(retain_graph=True)
    sample_losses(features.square()).sum().backward()

    def both(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        features = module.body(*call.args)
        return (sample_losses(features, first) + sample_losses(features.square(), first)).sum()

    expected = rows(module, batch(3), objective=both)
    for name, p in model.body.named_parameters():
        assert_close(p.grad_sample, expected[f"body.{name}"])


RESETS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer_set_to_zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model_set_to_zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "grad_none": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_clearing_the_gradient_resets_the_rows(reset: Callable[..., None]) -> None:
    module, model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (batch(3), batch(2, 2)):
        total_loss(model, call).backward()
    reset(model, optimizer)
    total_loss(model, batch(4, 3)).backward()
    expected = without(rows(module, batch(4, 3)), "other")
    assert_close_rows(used(rows_of(model), "other"), expected)
    assert_close_rows(
        used({n: g for n, g in grads_of(model).items() if "other" not in n}), {n: r.sum(0) for n, r in expected.items()}
    )


def test_head_that_was_used_before_the_reset_has_no_rows_after() -> None:
    module, model = net()
    total_loss(model, batch(3, head="other")).backward()
    model.zero_grad()
    total_loss(model, batch(4, 3)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(4, 3)), "other"))


def test_setting_grad_sample_to_none_resets_it() -> None:
    module, model = net()
    total_loss(model, batch(3)).backward()
    for p in model.parameters():
        p.grad_sample = None
    total_loss(model, batch(2, 2)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(2, 2)), "other"))
    total = cat(rows(module, batch(3)), rows(module, batch(2, 2)))
    assert_close(model.one.weight.grad, total["one.weight"].sum(0))


def test_without_accumulation_a_backward_replaces_the_rows() -> None:
    module, model = net(accumulate_grad=False)
    for call in (batch(3), batch(2, 2)):
        total_loss(model, call).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(2, 2)), "other"))
    assert all(p.grad is None for p in model.parameters())


def test_no_grad_forwards_start_no_pass() -> None:
    module, model = net()
    first = batch(3).on(model)
    with torch.no_grad():
        assert_close(batch(5, 4).on(model), batch(5, 4).on(module).detach(), tol=1e-12)
    with torch.inference_mode():
        batch(3, 4).on(model)
    second = batch(3, 2).on(model)
    (sample_losses(first) + sample_losses(second)).sum().backward()
    expected = add(rows(module, batch(3)), rows(module, batch(3, 2)))
    assert_close_rows(used(rows_of(model), "other"), without(expected, "other"))


def test_a_forward_without_backward_leaves_nothing_behind() -> None:
    module, model = net()
    batch(2, 2).on(model)
    total_loss(model, batch(3)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))


def test_a_discarded_forward_of_the_same_size_leaves_nothing_behind() -> None:
    module, model = net()
    batch(3, 2).on(model)
    total_loss(model, batch(3)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))


def test_the_pass_begins_in_forward_and_not_in_a_hook() -> None:
    """A wrapper calls `forward` directly, as Opacus' does."""
    module, model = net()
    sample_losses(model.forward(batch(3).args[0])).sum().backward()
    sample_losses(model.forward(batch(2, 2).args[0])).sum().backward()
    expected = cat(rows(module, batch(3)), rows(module, batch(2, 2)))
    assert_close_rows(used(rows_of(model), "other"), without(expected, "other"))


def test_a_training_loop() -> None:
    module, model = net()
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        call = batch(3 + step % 2, step)
        expected = without(rows(module, call), "other")
        for m, optimizer in ((model, ours), (module, theirs)):
            optimizer.zero_grad()
            total_loss(m, call).backward()
            optimizer.step()
        assert_close_rows(used(rows_of(model), "other"), expected)
    for p, q in zip(model.parameters(), module.parameters(), strict=True):
        assert_close(p, q.detach())


def test_rows_survive_the_step_of_the_optimizer() -> None:
    module, model = net()
    expected = without(rows(module, batch(3)), "other")
    total_loss(model, batch(3)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_close_rows(used(rows_of(model), "other"), expected)


def test_rows_that_a_user_holds_never_change() -> None:
    _, model = net(materialize=True)
    held, copies = [], []
    for step in range(3):
        model.zero_grad()
        total_loss(model, batch(3, step)).backward()
        held.append(model.one.weight.grad_sample)
        copies.append(held[-1].clone())
    for tensor, copy in zip(held, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_switching_off_and_on_again() -> None:
    module, model = net()
    total_loss(model, batch(3)).backward()
    model.per_sample(False)
    model.zero_grad()
    total_loss(model, batch(2)).backward()
    assert_close(model.one.weight.grad, rows(module, batch(2))["one.weight"].sum(0))
    model.zero_grad()
    model.per_sample(loss_reduction="sum")
    total_loss(model, batch(4, 3)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(4, 3)), "other"))


def test_deepcopy_between_forward_and_backward_is_a_model_of_its_own() -> None:
    module, model = net()
    total_loss(model, batch(3)).backward()
    twin = deepcopy(model)
    twin.zero_grad()
    total_loss(twin, batch(2, 2)).backward()
    assert_close_rows(used(rows_of(twin), "other"), without(rows(module, batch(2, 2)), "other"))
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))


def test_two_models_at_once() -> None:
    module, one = net()
    _, other = net()
    (total_loss(one, batch(3)) + total_loss(other, batch(2, 2))).backward()
    assert_close_rows(used(rows_of(one), "other"), without(rows(module, batch(3)), "other"))
    assert_close_rows(used(rows_of(other), "other"), without(rows(module, batch(2, 2)), "other"))


# --- whose loss -----------------------------------------------------------------------------------------------


def test_mean_is_the_default() -> None:
    torch.manual_seed(5)
    module = Net()
    model = enn.convert(module).per_sample(True)
    (total_loss(model, batch(3)) / 3).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))
    assert_close(model.one.weight.grad, model.one.weight.grad_sample.mean(0))


def test_torch_losses() -> None:
    module, _ = net()
    y = torch.tensor([0, 1, 1])
    for reduction in ("mean", "sum"):
        model = enn.convert(module).per_sample(loss_reduction=reduction)
        F.cross_entropy(batch(3).on(model), y, reduction=reduction).backward()

        def alone(module: nn.Module, call: Call, first: int = 0) -> Tensor:
            return F.cross_entropy(call.on(module), y[first : first + 1])

        expected = rows(module, batch(3), objective=alone)
        assert_close_rows(used(rows_of(model), "other"), without(expected, "other"))


def test_wrong_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_reduction"):
        enn.Linear(2, 2).per_sample(loss_reduction="none")


# --- who is a sample ------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Words and positions, added."""

    def __init__(self, positions: Callable[[Tensor], Tensor], length: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.places = nn.Embedding(length, 4)
        self.head = nn.Linear(4, 2)
        self.positions = positions

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words) + self.places(self.positions(words)))


def words_against_the_loop(positions: Callable[[Tensor], Tensor], samples: int, length: int) -> None:
    module = Words(positions)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.randint(10, (samples, length)),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_arange_index_is_shared(samples: int) -> None:
    words_against_the_loop(lambda words: torch.arange(words.shape[1]), samples, 6)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_one_row_of_positions_is_shared(samples: int) -> None:
    words_against_the_loop(lambda words: torch.arange(words.shape[1]).unsqueeze(0), samples, 3)


def test_as_many_positions_as_samples_in_a_layer_called_within_one_pass() -> None:
    """What a part of the model returns there is looked at further on, but not what the model itself returns."""
    module = Words(lambda words: torch.arange(4).unsqueeze(0))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.randint(10, (4, 4)),))

    def in_parts(words: Tensor, take: Callable[[Tensor], Tensor] = lambda table: table) -> Tensor:
        with enn.one_pass(model, len(words)):
            return model.head(model.words(words) + take(model.places(model.positions(words))))

    in_parts(*call.args).square().sum().backward()
    expected = loop(module, call, 4, objective=lambda m, call, first: call.on(m).square().sum())
    assert_close_rows(rows_of(model), expected)
    for take in (lambda table: table[0], lambda table: table.mean(0)):
        with pytest.raises(enn.PerSampleError, match=r"^places .*shared by all 4 samples"):
            in_parts(*call.args, take)


def test_positions_a_sample_are_not_shared() -> None:
    words_against_the_loop(lambda words: words.cumsum(1) % 7, 3, 6)


class Shifted(nn.Module):
    """A line, and what a layer makes of what all samples share."""

    def __init__(self, layer: nn.Module, shared: Tensor, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.layer, self.use = nn.Linear(4, 4), layer, use
        self.register_buffer("shared", shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) + self.use(self.layer(self.shared))


ONE_FOR_ALL: dict[str, tuple[type[nn.Module], tuple[int, ...], Tensor]] = {
    "row": (nn.Linear, (4, 4), torch.linspace(0, 1, 4, dtype=torch.float64)[None]),
    "row_of_two_dimensions": (nn.LayerNorm, ([1, 4],), torch.linspace(0, 1, 4, dtype=torch.float64)[None, None]),
    "state": (nn.GRUCell, (4, 4), torch.linspace(0, 1, 4, dtype=torch.float64)[None]),
    "number": (nn.Embedding, (9, 4), torch.tensor(2)),
    "bag": (nn.EmbeddingBag, (9, 4), torch.tensor([[2, 5, 2]])),
}


one_for_all = pytest.mark.parametrize(("layer", "sizes", "shared"), ONE_FOR_ALL.values(), ids=ONE_FOR_ALL)


@one_for_all
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_first_row_of_what_all_samples_share_is_refused(
    layer: type[nn.Module], sizes: tuple[int, ...], shared: Tensor, batch_first: bool
) -> None:
    """It has the samples first, also where they stand second in the model's input."""
    module = Shifted(layer(*sizes), shared, lambda out: out[0])
    model = enn.convert(module).per_sample(batch_first=batch_first, escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"^layer .*shared by all 3 samples.*\(by select\)"):
        model(torch.randn((3, 5, 4) if batch_first else (5, 3, 4)))


@pytest.mark.parametrize("kind", ["row", "state", "number", "bag"])
def test_a_part_of_each_row_of_what_all_samples_share(kind: str) -> None:
    def first_feature(out: Tensor) -> Tensor:
        return out[..., 0].unsqueeze(-1)

    def objective(model: Callable[..., Any], call: Call, first: int) -> Tensor:
        return sample_losses(call.on(model).transpose(0, 1), first).sum()

    layer, sizes, shared = ONE_FOR_ALL[kind]
    module, call = Shifted(layer(*sizes), shared, first_feature), Call((torch.randn(5, 3, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False, escalate=False)
    objective(model, call, 0).backward()
    expected = loop(module, call, 3, take=lambda call, i: call.map(lambda x: x[:, i : i + 1]), objective=objective)
    assert_close_rows(rows_of(model), expected)


class Placed(nn.Module):
    """Adds what is made of a table of positions, `(T, 4)`, which the samples share without a dimension for them."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.out, self.use = nn.Embedding(5, 4), nn.Linear(4, 2), use

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 4)
        return self.out(x + self.use(self.table(torch.arange(5)))).mean(1)  # type: ignore[no-any-return]


ALONG_THE_COPIES: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda table: table.softmax(0),
    "cumsum": lambda table: table.cumsum(0),
    "mean": lambda table: table.mean(),
    "norm": lambda table: table.norm(),
    "first_of_doubled": lambda table: (2 * table)[0],
    "first_of_activated": lambda table: torch.relu(table + 1)[0],
    "first_of_a_sum": lambda table: (table.sin() + 2 * table)[0],
    "standardized": lambda table: (table - table.mean(0)) / table.var(0),
    "len": lambda table: table / len(table),
    "shape": lambda table: table / table.shape[0],
    "size": lambda table: table / table.size(0),
    "numel": lambda table: table / table.numel(),
    "numel_function": lambda table: table / torch.numel(table),
    "one_of_all": lambda table: table.unbind(0)[-1],
    "dim": lambda table: table / table.dim(),
    "normalized_shape": lambda table: F.layer_norm(table, table.shape),
    "nanmean": lambda table: table.nanmean(0),
    "transformed": lambda table: torch.fft.fft(table, dim=0).real,
    "of_all_positions": lambda table: table.reshape(-1, 4)[:5],
    "constant": lambda table: table - table.detach().mean(0),
    "normalized": lambda table: F.normalize(table),
    "norm_of_features": lambda table: table / table.norm(dim=1, keepdim=True),
    "within_a_product": lambda table: torch.ones(5, 5) @ table.unsqueeze(1).squeeze(1),
}
WITHIN_A_COPY: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda table: table.softmax(-1),
    "mean": lambda table: table.mean(-1, keepdim=True),
    "features": lambda table: table / table.shape[-1],
    "positions": lambda table: table / table.size(-2),
    "layer_norm": lambda table: F.layer_norm(table, table.shape[-1:]),
    "pairs": lambda table: (table @ table.mT).softmax(-1) @ table,
    "transformed": lambda table: torch.fft.fft(table, dim=-1).real,
    "product": lambda table: F.linear(table @ torch.ones(4, 4), torch.ones(4, 4), torch.zeros(4)),
    "halves": lambda table: table.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2),
    "normalized": lambda table: F.normalize(table, dim=-1),
    "in_place": lambda table: table.clone().mul_(2),
    "dropped": lambda table: F.dropout(table, 0.0),
}


@pytest.mark.parametrize("use", ALONG_THE_COPIES.values(), ids=ALONG_THE_COPIES)
def test_what_a_forward_does_along_the_copies_goes_sample_by_sample(use: Callable[[Tensor], Any]) -> None:
    """In the plain model there is no such dimension: it would be that of the positions."""
    module, call = Placed(use), Call((torch.randn(3, 5, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"table \(Embedding\): its input is shared by all 3 samples"):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))
    with pytest.raises(enn.PerSampleError, match="the mean over a dimension of one, or the len that follows"):
        enn.convert(module).per_sample(escalate=False)(*call.args)


def test_copies_of_zeros_differ_as_well() -> None:
    module, call = Placed(lambda table: (2 * table)[0]), Call((torch.randn(3, 5, 4),))
    nn.init.zeros_(module.table.weight)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"table \(Embedding\): its input is shared by all 3 samples"):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


def test_what_a_layer_makes_of_copies_are_copies() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.out = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:  # (B, 5, 4)
            return self.out(x + self.layer(self.table(torch.arange(5))).softmax(0)).mean(1)  # type: ignore[no-any-return]

    with pytest.raises(enn.PerSampleError, match=r"table \(Embedding\): its input is shared .*\(by softmax"):
        enn.convert(Model()).per_sample(escalate=False)(torch.randn(3, 5, 4))


def test_copies_are_let_go_after_the_step() -> None:
    """At once: with them goes the graph that they are a part of."""
    held: list[weakref.ref[Tensor]] = []

    def use(table: Tensor) -> Tensor:
        held.append(weakref.ref(doubled := 2 * table))
        return doubled

    model = enn.convert(Placed(use)).per_sample()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model(torch.randn(3, 5, 4)).sum().backward()
        assert held[-1]() is None
    finally:
        gc.enable()


class Met(nn.Module):
    """A table that all samples share meets the samples."""

    def __init__(self, use: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.use = nn.Embedding(7, 4), nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x), x, self.table)


EVERY = torch.arange(7)
MISPLACED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "product": (lambda h, x, table: h @ table(EVERY).mT, (3, 4)),
    "distances": (lambda h, x, table: torch.cdist(h, table(EVERY)), (3, 4)),
    "inner": (lambda h, x, table: torch.inner(x, table(EVERY)) + h[:, :1], (3, 4)),
    "similarities": (lambda h, x, table: F.cosine_similarity(h[:, None], table(EVERY)[None], dim=-1), (3, 4)),
    "added": (lambda h, x, table: h + table(torch.tensor(2)), (3, 3, 4)),
    "expanded": (lambda h, x, table: h + table(torch.tensor(2)).expand(len(h), h.shape[1], 4), (3, 3, 4)),
    "chosen": (lambda h, x, table: h + torch.where(x > 0, table(torch.tensor(2)), x), (3, 3, 4)),
    "heads": (lambda h, x, table: h + table(torch.arange(5)), (3, 3, 5, 4)),
}
IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "product": lambda h, x, table: h.unsqueeze(1) @ table(EVERY).mT,
    "similarities": lambda h, x, table: F.cosine_similarity(h[:, None], table(EVERY), dim=-1),
    "spread": lambda h, x, table: h + table(EVERY).expand(len(h), -1, -1).sum(1),
    "behind_a_layer": lambda h, x, table: (h[:, None] * F.layer_norm(table(EVERY), (4,))).sum(1),
}


@pytest.mark.parametrize("use", MISPLACED.values(), ids=MISPLACED)
def test_copies_that_meet_another_dimension_than_the_samples(
    use: tuple[Callable[..., Tensor], tuple[int, ...]],
) -> None:
    """In the plain model there is no dimension of copies that could meet one."""
    module, call = Met(use[0]), Call((torch.randn(use[1]),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"table \(Embedding\): its input is shared by all 3 samples"):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


@pytest.mark.parametrize("use", IN_PLACE.values(), ids=IN_PLACE)
def test_copies_that_meet_the_samples_are_right(use: Callable[..., Tensor]) -> None:
    module, call = Met(use), Call((torch.randn(3, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


def test_copies_that_meet_the_samples_in_a_loss_are_right() -> None:
    """It is no row of a sample that the operation gives, but the loss of all."""

    def divergence(h: Tensor, x: Tensor, table: nn.Module) -> Tensor:
        return F.kl_div(h.log_softmax(-1), table(torch.tensor(2)).softmax(-1), reduction="sum")

    module = Met(divergence)
    model, x = enn.convert(module).per_sample(loss_reduction="sum", escalate=False), torch.randn(3, 4)
    model(x).backward()
    for i, alone in enumerate(x.split(1)):
        module.zero_grad()
        module(alone).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad_sample[i], parameter.grad)


@pytest.mark.parametrize("use", WITHIN_A_COPY.values(), ids=WITHIN_A_COPY)
def test_what_a_forward_does_within_each_copy_is_right(use: Callable[[Tensor], Any]) -> None:
    module, call = Placed(use), Call((torch.randn(3, 5, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


def test_the_shape_of_a_shared_result_with_a_batch_dimension_is_not_asked_for() -> None:
    """A dimension of size 1 is there in the plain model as well, and code keeps it."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.out = nn.Linear(1, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            time = self.time(torch.ones(1, 1))
            return self.out(x + time.view(time.shape[0], 1, time.shape[1])).mean(1)  # type: ignore[no-any-return]

    module, call = Timed(), Call((torch.randn(3, 5, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


def lstm() -> nn.Module:
    return nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, proj_size=2)


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, batch_first=True)


# a layer, and what it makes of (1, 5, 4), as (1, 5 or 1, 4)
SEVERAL: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "lstm": (lstm, lambda layer, x: layer(x)[0]),
    "gru_time_first": (lambda: nn.GRU(4, 4), lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)),
    "attention": (attention, lambda layer, x: layer(x, x, x)[0]),
    "attention_fused": (attention, lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "cell": (lambda: nn.LSTMCell(4, 4), lambda layer, x: layer(x[:, 0])[0][:, None]),
    "cell_state": (lambda: nn.LSTMCell(4, 4), lambda layer, x: layer(x[:, 0])[1][:, None]),
}


class Several(nn.Module):
    """A line, and what a layer with several results makes of a sequence that all samples share."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.layer, self.use = nn.Linear(4, 4), layer, use
        self.register_buffer("shared", torch.linspace(-1, 1, 20, dtype=torch.float64).view(1, 5, 4).sin())

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) + self.use(self.layer, self.shared)


@pytest.mark.parametrize(("layer", "use"), SEVERAL.values(), ids=SEVERAL)
def test_several_results_of_what_all_samples_share(layer: Callable[[], nn.Module], use: Callable[..., Any]) -> None:
    module, call = Several(layer(), use), Call((torch.randn(3, 5, 4),))
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


WEIGHTS = {"attention_weights": (attention, lambda layer, x: layer(x, x[:, :4], x[:, :4])[1])}


@pytest.mark.parametrize(("layer", "use"), (SEVERAL | WEIGHTS).values(), ids=SEVERAL | WEIGHTS)
def test_the_first_row_of_several_results_is_refused(layer: Callable[[], nn.Module], use: Callable[..., Any]) -> None:
    """It would be the first sample's copy."""
    model = enn.convert(Several(layer(), lambda layer, x: use(layer, x)[0])).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"^layer .*shared by all 3 samples.*\(by select\)"):
        model(torch.randn(3, 5, 4))


@pytest.mark.parametrize("first", [0, 1])
def test_a_loop_over_numbers_is_a_slice(first: int) -> None:
    """Each number is one sample's index; its result would have a row per sample again."""

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4)

        def forward(self, words: Tensor) -> Tensor:
            return torch.stack([self.words(word) for word in words + first])

    model = enn.convert(Looped()).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"^words .*of shape \(\) is a slice of a tensor of shape \(3,\)"):
        model(torch.tensor([4, 1, 1]))


def test_single_index_is_ambiguous() -> None:
    """`(1,)` is one row that all share, `(1, dim)`, or one position, `(T, dim)` with T = 1."""
    model = enn.convert(Words(lambda words: torch.tensor([4]))).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"places.*\(1,\).*unsqueeze\(0\)"):
        model(torch.randint(10, (3, 6)))


@pytest.mark.parametrize("dim", [0, 1])
def test_single_index_with_two_dimensions_is_shared(dim: int) -> None:
    words_against_the_loop(lambda words: torch.tensor([4]).unsqueeze(dim), 3, 6)


class Relative(nn.Module):
    """T5's `(T, T)`."""

    def __init__(self, signed: bool) -> None:
        super().__init__()
        self.bias, self.signed = nn.Embedding(10, 4), signed

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        distance = steps[:, None] - steps
        bias = self.bias(distance + 4 if self.signed else distance.abs())  # (T, T, 4)
        return (x.unsqueeze(1) + bias).sum(2)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("steps", [2, 3, 4, 5])
@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_relative_positions_are_shared(samples: int, steps: int, signed: bool) -> None:
    module = Relative(signed)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.randn(samples, steps, 4),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, samples))


def test_arange_of_the_length_of_the_batch_is_ambiguous() -> None:
    """To the layer; the model around it can tell."""
    with pytest.warns(enn.PerSampleWarning, match=r"places.*(?s:.*)unsqueeze\(0\)"):
        words_against_the_loop(lambda words: torch.arange(words.shape[1]), 3, 3)


def test_folded_index_is_an_error() -> None:
    module = nn.Sequential(nn.Flatten(0, 1), nn.Embedding(10, 4))
    model = enn.convert(module).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"1 \(Embedding\).*\(6,\)"):
        model(torch.tensor([[1, 5, 5], [2, 7, 0]]))


def test_one_index_a_sample() -> None:
    module = nn.Embedding(10, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.tensor([3, 1, 3]),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


@pytest.mark.parametrize("index", [0, 7])
def test_one_index_for_one_sample_is_not_ambiguous(index: int) -> None:
    module = nn.Embedding(10, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.tensor([index]),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 1))


@pytest.mark.parametrize(
    "fold",
    [
        pytest.param(lambda x: x.flatten(0, 1), id="into_rows"),
        pytest.param(lambda x: x[:, 0].flatten()[:, None].expand(-1, 4), id="features_into_rows"),
        pytest.param(lambda x: x[:2], id="half"),
        pytest.param(lambda x: x[:1], id="slice_of_one"),
        pytest.param(lambda x: x[0], id="one_sample_without_batch"),
        pytest.param(lambda x: x[0, 0], id="no_batch_dimension"),
    ],
)
def test_rows_that_are_no_samples_are_an_error(fold: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(fold(x))

    model = enn.convert(Model()).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"layer.*(shape|its input,) \(.*4"):
        model(torch.randn(4, 6, 4))


@pytest.mark.parametrize("samples", ["leaf", "view", "computed", "part_of_a_data_set", "permuted"])
def test_a_loop_over_the_samples_is_an_error(samples: str) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if samples == "computed":
                x = x.tanh()
            return torch.cat([self.layer(x[i : i + 1]) for i in range(len(x))])

    x = {
        "view": torch.randn(12).view(3, 4),
        "part_of_a_data_set": torch.randn(50, 4)[10:13],
        "permuted": torch.randn(4, 3).T,
    }.get(samples, torch.randn(3, 4))
    model = enn.convert(Loop()).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"layer.*slice"):
        model(x)


def test_shared_table_of_coordinates() -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Linear(2, 5)
            self.code = nn.Linear(4, 5)
            self.register_buffer("coordinates", torch.randn(1, 7, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.grid(self.coordinates) * self.code(x).unsqueeze(1)

    module = Field()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = Call((torch.randn(3, 4),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


@dataclass
class Batch:
    label: int
    features: Tensor
    lacking: Tensor = field(init=False)


@dataclass
class Made:
    """Its tensor is an attribute, and no field."""

    given: list[Tensor]

    def __post_init__(self) -> None:
        (self.features,), self.given = self.given, []


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda x: {"x": x}, id="dict"),
        pytest.param(lambda x: Batch(1, x), id="dataclass"),
        pytest.param(lambda x: Made([x]), id="attribute_of_a_dataclass"),
        pytest.param(lambda x: (("a", [x]),), id="nested_tuple"),
        pytest.param(lambda x: {"scale": torch.tensor(2.0), "x": x}, id="after_a_number"),
    ],
)
def test_the_batch_is_found_in_a_structure(wrap: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, given: Any) -> Tensor:
            return self.layer(self.unwrap(given))

        def unwrap(self, given: Any) -> Tensor:
            if isinstance(given, dict):
                return given["x"]
            return given.features if isinstance(given, Batch | Made) else given[0][1][0]

    module = Model()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    x = torch.randn(3, 4)
    sample_losses(model(wrap(x))).sum().backward()
    expected = loop(module.layer, Call((x,)), 3)
    assert_close_rows(rows_of(model.layer), expected)


def test_batch_size_says_it() -> None:
    class Graph(nn.Module):
        """The first input is no batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
            return self.layer(adjacency @ x)

    module, adjacency, x = Graph(), torch.randn(5, 5), torch.randn(3, 5, 4)
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_size=3)
    sample_losses(model(adjacency, x)).sum().backward()
    assert_close_rows(
        rows_of(model), loop(module, Call((adjacency, x)), 3, take=lambda c, i: Call((c.args[0], c.args[1][i : i + 1])))
    )
    with pytest.raises(enn.PerSampleError, match="layer"):
        enn.convert(module).per_sample(escalate=False)(adjacency, x)


def test_batch_second() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), Scale(5), nn.PReLU())
            self.words = nn.Embedding(10, 4)

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            return self.net(x + self.words(words))  # (T, B, 5)

    def objective(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return sample_losses(call.on(module).transpose(0, 1), first).sum()

    module = Model()
    call = Call((torch.randn(6, 3, 4), torch.randint(10, (6, 3))))
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    objective(model, call).backward()
    expected = loop(module, call, 3, take=lambda c, i: c.map(lambda t: t[:, i : i + 1]), objective=objective)
    assert_close_rows(rows_of(model), expected)


def test_layer_on_its_own() -> None:
    module = nn.Linear(4, 2)
    layer = enn.Linear(4, 2).per_sample(loss_reduction="sum")
    layer.load_state_dict(module.state_dict())
    total_loss(layer, batch(3)).backward()
    assert_close_rows(rows_of(layer), rows(module, batch(3)))


def test_users_own_module_that_holds_zoo_layers() -> None:
    class Model(nn.Module):
        def __init__(self, zoo: Any) -> None:
            super().__init__()
            self.a, self.b = zoo.Linear(4, 5), zoo.LayerNorm(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    module, model = Model(nn), Model(enn)
    model.load_state_dict(module.state_dict())
    assert enn.per_sample(model, loss_reduction="sum") is model
    total_loss(model, batch(3)).backward()
    assert_close_rows(rows_of(model), rows(module, batch(3)))
    enn.per_sample(model, False)
    assert torch.equal(batch(3).on(model), batch(3).on(module))


# --- outside use ----------------------------------------------------------------------------------------------


class Outside(nn.Module):
    def __init__(self, use: Callable[["Outside", Tensor], Tensor]) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.emb(x))


OUTSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, h: F.linear(h, m.emb.weight),
    "penalty": lambda m, h: h + m.emb.weight.square().sum(),
    "scaled": lambda m, h: h * m.emb.bias,
}


@pytest.mark.parametrize("accumulate_grad", [True, False])
@pytest.mark.parametrize("use", OUTSIDE.values(), ids=OUTSIDE)
def test_outside_use_is_an_error_that_names_the_parameter(use: Any, accumulate_grad: bool) -> None:
    module = Outside(use)
    model = enn.convert(module).per_sample(accumulate_grad=accumulate_grad, escalate=False, loss_reduction="sum")
    with pytest.raises(enn.PerSampleError, match=r"emb\.(weight|bias)"):
        total_loss(model, batch(3)).backward()
    with pytest.warns(enn.PerSampleWarning, match=r"emb\.(weight|bias)"):
        total_loss(model.per_sample(escalate=True), batch(3)).backward()
    assert_close_rows(rows_of(model), loop(module, batch(3), 3))


def test_outside_use_in_the_loss_is_an_error() -> None:
    _, model = net()
    with pytest.raises(enn.PerSampleError, match=r"one\.weight"):
        (total_loss(model, batch(3)) + model.one.weight.square().sum()).backward()


EARLY: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 4)),
    "layer_norm": (lambda: nn.LayerNorm(4), lambda n: torch.randn(n, 4)),
    "prelu": (lambda: nn.PReLU(), lambda n: torch.randn(n, 4)),
    "conv": (lambda: nn.Conv1d(4, 3, 2), lambda n: torch.randn(n, 4, 5)),
    "embedding": (lambda: nn.Embedding(5, 3), lambda n: torch.randint(5, (n, 4))),
    "cell": (lambda: nn.RNNCell(4, 3), lambda n: torch.randn(n, 4)),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("passes", ["one", "two", "between"])
@pytest.mark.parametrize("layer", EARLY)
def test_outside_use_before_the_layer(
    layer: str, passes: str, materialize: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd delivers such a part last, and adds it in place to the gradient that the layer has sent."""
    if small:
        monkeypatch.setattr(cost, "SMALL_ROWS_NUMEL", 1 << 15)
    make, inputs = EARLY[layer]
    model = enn.convert(make()).per_sample(materialize=materialize)
    losses = []
    if passes == "between":
        losses.append(total_loss(model, Call((inputs(2),))))
    losses.append(sum(p.square().sum() for p in model.parameters()))
    losses.append(total_loss(model, Call((inputs(3),))))
    if passes == "two":
        losses.append(total_loss(model, Call((inputs(2),))))
    with pytest.raises(enn.PerSampleError, match=r"used outside of its module"):
        sum(losses).backward()


def test_outside_use_with_two_passes_in_one_backward() -> None:
    _, model = net()
    with pytest.raises(enn.PerSampleError, match=r"one\.weight"):
        (total_loss(model, batch(3)) + total_loss(model, batch(2, 2)) + model.one.weight.sum()).backward()


def test_a_parameter_used_only_outside_is_an_error() -> None:
    _, model = net()
    with pytest.raises(enn.PerSampleError, match=r"other\.weight"):
        (total_loss(model, batch(3)) + model.other.weight.sum()).backward()


def test_right_step_after_an_outside_use() -> None:
    module, model = net()
    with pytest.raises(enn.PerSampleError):
        (total_loss(model, batch(3)) + model.one.weight.sum()).backward()
    model.zero_grad()
    total_loss(model, batch(2, 2)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(2, 2)), "other"))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("hook", "factor"),
    [
        pytest.param(lambda g: 2 * g, 2, id="doubles"),
        pytest.param(lambda g: None, 1, id="looks"),
        pytest.param(lambda g: g.clone(), 1, id="copies"),
    ],
)
def test_hook_of_the_user_is_no_outside_use(hook: Any, factor: int, before: bool) -> None:
    module, _ = net()
    model = enn.convert(module)
    if before:
        model.one.weight.register_hook(hook)
    model.per_sample(loss_reduction="sum")
    if not before:
        model.one.weight.register_hook(hook)
    total_loss(model, batch(3)).backward()
    expected = without(rows(module, batch(3)), "other")
    assert_close_rows(used(rows_of(model), "other"), expected)
    assert_close(model.one.weight.grad, factor * expected["one.weight"].sum(0))


def test_post_accumulate_hook_is_no_outside_use() -> None:
    module, model = net()
    seen = []
    model.one.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad_sample is not None))
    total_loss(model, batch(3)).backward()
    assert seen == [True]
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(3)), "other"))


# --- in-place changes -----------------------------------------------------------------------------------------


def wide(**arguments: Any) -> nn.Module:
    return enn.convert(nn.Linear(64, 64)).per_sample(loss_reduction="sum", **arguments)


def test_changing_a_kept_factor_is_an_error() -> None:
    model, x = wide(), torch.randn(3, 64)
    total_loss(model, Call((x,))).backward()
    x.zero_()
    with pytest.raises(enn.PerSampleError, match=r"(?i)in.?place|changed|modified"):
        model.weight.grad_sample.norm()


def test_dense_rows_do_not_mind_a_changed_input() -> None:
    model, x = wide(materialize=True), torch.randn(3, 64)
    expected = loop(enn.revert(model), Call((x.clone(),)), 3)
    total_loss(model, Call((x,))).backward()
    x.zero_()
    assert_close_rows(rows_of(model), expected)


def test_changing_the_input_before_the_backward_is_torchs_own_error() -> None:
    model, x = wide(), torch.randn(3, 64)
    loss = total_loss(model, Call((x,)))
    x.zero_()
    with pytest.raises(RuntimeError, match=r"inplace operation|in.place"):
        loss.backward()


# --- dtype ----------------------------------------------------------------------------------------------------


def test_rows_under_autocast_have_the_dtype_of_the_parameter() -> None:
    module = Net().float()
    x = torch.randn(3, 4, dtype=torch.float32)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        assert out.dtype == module(x).dtype == torch.bfloat16
        loss = sample_losses(out.float()).sum()
    loss.backward()
    expected = loop(deepcopy(module).double(), Call((x.double(),)), 3)
    for name, r in used(rows_of(model), "other").items():
        assert r.dtype == torch.float32
        assert_close(r, expected[name], tol=3e-2, name=name)
        assert model.get_parameter(name).grad.dtype == torch.float32


# --- shared weights, calls and graphs ---------------------------------------------------------------------------


class Tied(nn.Module):
    """Words in, words out, by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.emb(words))))


@pytest.mark.parametrize("materialize", [False, True])
def test_tied_weights(materialize: bool) -> None:
    module = Tied()
    model = enn.convert(module).per_sample(loss_reduction="sum", materialize=materialize)
    assert model.head.weight is model.emb.weight
    call = Call((torch.randint(10, (3, 6)),))
    total_loss(model, call).backward()
    expected = loop(module, call, 3)
    assert_close_rows(rows_of(model), expected)
    norms = model.emb.weight.grad_sample.flatten(1).norm(dim=1)
    assert_close(norms, expected["emb.weight"].flatten(1).norm(dim=1))


def test_tied_weights_outside_is_still_an_error() -> None:
    model = enn.convert(Tied()).per_sample()
    out = model(torch.randint(10, (3, 6)))
    with pytest.raises(enn.PerSampleError, match=r"(emb|head)\.weight"):
        (out.sum() + model.emb.weight.sum()).backward()


def test_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.norm(self.layer(x).tanh())
            return x

    module = Twice()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, batch(3)).backward()
    assert_close_rows(rows_of(model), rows(module, batch(3)))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, *, parametrized: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        linear = parametrizations.weight_norm(nn.Linear(5, 5)) if parametrized else nn.Linear(5, 5)
        self.block = nn.Sequential(linear, nn.Tanh(), nn.LayerNorm(5), Scale(5))
        self.last = nn.Linear(5, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.block, h, use_reentrant=self.use_reentrant)
        return self.last(h)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    module = Checkpointed(use_reentrant)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    reference = deepcopy(module)
    reference.use_reentrant = False  # torch.autograd.grad refuses reentrant checkpoints
    for seed in (1, 2):
        total_loss(model, batch(3, seed)).backward()
    expected = cat(*(rows(reference, batch(3, seed)) for seed in (1, 2)))
    assert_close_rows(rows_of(model), expected)
    assert_close_rows(grads_of(model), {name: r.sum(0) for name, r in expected.items()})


@pytest.mark.parametrize("parametrized", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_two_passes_with_checkpoints_in_one_backward(
    use_reentrant: bool, sizes: tuple[int, int], parametrized: bool
) -> None:
    """A single row of what runs again may be of a single sample, or shared by all of another pass."""
    module, (one, two) = Checkpointed(use_reentrant, parametrized=parametrized), sizes
    model = enn.convert(module).per_sample(loss_reduction="sum")
    (total_loss(model, batch(one)) + total_loss(model, batch(two, 2))).backward()
    reference = deepcopy(module)
    reference.use_reentrant = False
    assert_close_rows(rows_of(model), cat(rows(reference, batch(one)), rows(reference, batch(two, 2))))


def test_rows_that_a_second_backward_replaces() -> None:
    """Only the last are held with `accumulate_grad=False`: that others are not clipped is said."""
    module, model = net(accumulate_grad=False)
    call = batch(3)
    (x,) = call.args

    def parts() -> Iterator[Tensor]:
        with enn.one_pass(model, 3):
            yield from (total_loss(model, Call((factor * x,))) for factor in (1, 2))

    for loss in parts():
        loss.backward()
        enn.per_sample_grads(model).norms()  # whoever only looks at rows is told nothing
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, Call((2 * x,))), "other"))
    with pytest.warns(enn.PerSampleWarning, match=r"has replaced the rows of an earlier one .*Clip after each"):
        enn.clip_grad_sample_norms_(model, 1.0)
    for loss in parts():  # each is clipped: nothing is lost, and nothing is said
        loss.backward()
        enn.clip_grad_sample_norms_(model, 1.0)
    for _ in range(2):  # rows that are only looked at make way for those of the next forward
        total_loss(model, call).backward()
    enn.clip_grad_sample_norms_(model, 1.0)


class Caller(nn.Module):
    """It calls another model, which is none of its modules, in a checkpoint."""

    def __init__(self, other: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other, self.use_reentrant = [other], use_reentrant

    def part(self, x: Tensor) -> Tensor:
        result: Tensor = self.other[0](self.first(x).tanh())
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(checkpoint(self.part, x, use_reentrant=self.use_reentrant))
        return result


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_calls_another_model(use_reentrant: bool) -> None:
    """Each model has its own passes: the checkpoint's is that of the model around it."""
    plain_other = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plain = Caller(plain_other, use_reentrant=False)
    other = enn.convert(plain_other).per_sample(loss_reduction="sum")
    model = enn.convert(Caller(other, use_reentrant))
    model.load_state_dict(plain.state_dict())
    (other,) = model.other  # a list's models are copied with it
    model.per_sample(loss_reduction="sum", compare=False)
    (x,), (others,) = batch(3, 1).requires_grad().args, batch(2, 2).args
    for samples in x, x[:2], x:  # passes of the model, none of the other one's
        model(samples)
    losses = [plain(row).square().sum() for row in x.split(1)]
    expected = 2 * torch.stack([torch.autograd.grad(loss, plain_other[0].weight)[0] for loss in losses])
    for _ in range(2):
        model.zero_grad()
        other.zero_grad()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()  # which adds to the rows
        assert_close(other[0].weight.grad_sample, expected)
        other(others).square().sum().backward()
        assert_close(other[0].weight.grad_sample[:3], expected)
        assert len(other[0].weight.grad_sample) == 5


def test_reentrant_checkpoints_around_the_calls_of_two_passes_are_refused() -> None:
    """Nothing in the graph says which of the two a layer that runs again is of: rows must not be added up."""
    model, loss = enn.convert(nn.Linear(4, 2)).per_sample(loss_reduction="sum"), torch.zeros(())
    for seed in (1, 2):
        with enn.one_pass(model, 3):
            (x,) = batch(3, seed).requires_grad().args
            loss = loss + checkpoint(model, x, use_reentrant=True).sum()
    with pytest.raises(enn.PerSampleError, match=r"Linear: .*2 earlier forwards had so many"):
        loss.backward()


class Shift(nn.Module):
    """A parameter for all samples, without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 2).view(1, 2))

    def forward(self) -> Tensor:
        return self.shift


def test_a_call_without_arguments_is_of_the_open_pass() -> None:
    model, call = enn.convert(nn.ModuleList([nn.Linear(4, 2), Shift()])).per_sample(loss_reduction="sum"), batch(3)
    out = call.on(model[0])
    (out * model[1]()).sum().backward()
    assert_close(model[1].shift.grad_sample, out.detach().unsqueeze(1))
    with pytest.raises(enn.PerSampleError, match="no argument is a tensor"):
        model[1]()


# --- exceptions -----------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 5), nn.Linear(5, 2)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if self.fails:
            raise KeyError("mid-forward")
        return self.after(h)


@pytest.mark.parametrize("samples", [3, 2])
def test_right_step_after_an_exception_in_the_forward(samples: int) -> None:
    module = Fails()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    model.fails = True
    with pytest.raises(KeyError, match="mid-forward"):
        batch(3).on(model)
    model.fails = False
    total_loss(model, batch(samples, 2)).backward()
    assert_close_rows(rows_of(model), rows(module, batch(samples, 2)))


def test_right_step_after_an_exception_in_the_backward() -> None:
    module, model = net()
    out = batch(3).on(model)

    def fail(gradient: Tensor) -> Tensor:
        raise KeyError("mid-backward")

    out.register_hook(fail)
    with pytest.raises(KeyError, match="mid-backward"):
        sample_losses(out).sum().backward()
    model.zero_grad()
    total_loss(model, batch(2, 2)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(2, 2)), "other"))


def test_right_step_after_a_refused_input() -> None:
    module, model = net()
    with pytest.raises(enn.PerSampleError):
        model.body[0](torch.randn(4))
    total_loss(model, batch(2, 2)).backward()
    assert_close_rows(used(rows_of(model), "other"), without(rows(module, batch(2, 2)), "other"))


# --- no B x out x in tensor -------------------------------------------------------------------------------------


def test_wide_linear_is_normed_and_summed_without_dense_rows() -> None:
    samples, size = 64, 1024
    model = enn.Linear(size, size, dtype=torch.float32).per_sample(loss_reduction="sum")
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal biggest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if type(tensor) is Tensor:
                    biggest = max(biggest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    with Watch():
        model(torch.randn(samples, size, dtype=torch.float32)).square().sum().backward()
        model.weight.grad_sample.flatten(1).norm(dim=1)
        model.weight.grad_sample.sum(0)
    assert size * size <= biggest < 4 * size * size


def test_a_reentrant_checkpoint_around_the_whole_model_may_be_retained() -> None:
    """The rows of a second backward on one graph add up to those of the first, as without the checkpoint."""
    model, x = enn.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))).per_sample(), torch.randn(5, 4)
    rows = []
    for reentrant in (True, False):
        model.zero_grad()
        loss = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        rows.append(enn.per_sample_grads(model).flatten())
    torch.testing.assert_close(*rows)
