"""No gradient without rows: what used to be silently wrong, and what used to be refused without need.

Every row is compared with a loop over the samples. Where the library refuses, its words name the parameter or the
layer, and what to do.
"""

import copy
import gc
import io
import random
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, sample_losses, set_seed, total_loss

B, D = 3, 4
IS_OLD = torch.__version__ < (2, 13)
NARROW = torch.narrow if IS_OLD else torch.narrow_copy  # of which torch 2.10 has no derivative

Step = Callable[[Any, Tensor], Tensor]  # a model and its input -> what the loss is made of, (B, …)


def on(module: nn.Module, **settings: Any) -> Any:
    return enn.convert(module).per_sample(loss_reduction="sum", **settings)


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (B, D)), generator=torch.Generator().manual_seed(seed))


def ids_of(parameter: Any) -> str:
    return getattr(parameter, "__name__", str(parameter))


def objective_of(step: Step) -> Callable[..., Tensor]:
    return lambda module, call, first=0: sample_losses(step(module, *call.args), first).sum()


def right(model: nn.Module, module: nn.Module, step: Step, *inputs: Tensor, tol: float = 1e-9) -> None:
    """One backward of a step; the rows are those of the loop, and add up to `.grad`."""
    call, objective = Call(inputs or (values(),)), objective_of(step)
    expected = loop(module, call, len(call.args[0]), objective=objective)
    objective(model, call).backward()
    assert_close_rows(rows_of(model), expected, tol)
    assert_close_rows(grads_of(model), {name: rows.sum(0) for name, rows in expected.items()}, tol)


def forward(m: Any, *inputs: Tensor) -> Tensor:
    return m(*inputs)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Parts(nn.Module):
    """A model of which one also uses the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.part, self.head = nn.Linear(D, D), Scale(), nn.Linear(D, 2)
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.enc(x)) + self.shift)

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x) + self.shift

    def encode_expanded(self, x: Tensor) -> Tensor:
        return self.enc(x) + enn.expanded(self.shift)

    def decode(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def parts() -> Parts:
    set_seed(3)
    return Parts()


# --- silent, 1: a trainable parameter with a gradient and no rows -----------------------------------------------


def a_method(m: Any, x: Tensor) -> Tensor:
    return m.encode(x)


def a_weight_after_a_submodule(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.enc(x), m.head.weight)


def a_parameter_of_a_child(m: Any, x: Tensor) -> Tensor:
    return m.enc(x) * m.part.scale


def a_weight_alone(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.head.weight)


def a_weight_before_a_submodule(m: Any, x: Tensor) -> Tensor:
    return m.head(x @ m.enc.weight)


OUTSIDE = {
    a_method: "shift",
    a_weight_after_a_submodule: "head.weight",
    a_parameter_of_a_child: "part.scale",
    a_weight_alone: "head.weight",
    a_weight_before_a_submodule: "enc.weight",
}

REMEDY = r"expanded_nn\.expanded\(weight\).*one_pass\(model, batch_size\)"


def as_it_is(m: Any) -> None:
    """From the start."""


def after_a_step(m: Any) -> None:
    """After a forward of the whole model, with its backward."""
    m(values(seed=7)).sum().backward()
    m.zero_grad()


def frozen_at_first(m: Any) -> None:
    """All was frozen at the first forward, but what ran first."""
    for p in m.parameters():
        p.requires_grad_(p is m.head.bias)
    after_a_step(m)
    m.requires_grad_(True)


def loaded_anew(m: Any) -> None:
    """The parameters were replaced after the first step."""
    after_a_step(m)
    state = {name: p.detach().clone() for name, p in m.state_dict().items()}
    m.load_state_dict(state, assign=True)


def set_anew(m: Any) -> None:
    after_a_step(m)
    m.head.weight, m.enc.weight = (nn.Parameter(layer.weight.detach().clone()) for layer in (m.head, m.enc))
    m.part.scale, m.shift = (nn.Parameter(p.detach().clone()) for p in (m.part.scale, m.shift))


def copied(m: Any) -> Any:
    after_a_step(m)
    return copy.deepcopy(m)


def pickled(m: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


HISTORIES = [as_it_is, after_a_step, frozen_at_first, loaded_anew, set_anew, copied, pickled]


@pytest.mark.parametrize("history", HISTORIES, ids=ids_of)
@pytest.mark.parametrize("use", OUTSIDE, ids=ids_of)
def test_use_without_rows_is_refused_whatever_is_called(use: Step, history: Callable[[Any], Any]) -> None:
    model = on(parts())
    model = history(model) or model
    with pytest.raises(enn.PerSampleError, match=rf"^{OUTSIDE[use]}: .*{REMEDY}"):
        use(model, values()).sum().backward()


@pytest.mark.parametrize("history", HISTORIES, ids=ids_of)
def test_rows_are_right_whatever_was_before(history: Callable[[Any], Any]) -> None:
    model = on(parts())
    right(history(model) or model, parts(), forward)


class Sharing(nn.Module):
    """Uses the weight of its layer once more."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.layer.weight)


@pytest.mark.parametrize("last", ["own", "other"])
def test_weight_of_a_layer_that_another_model_records(last: str) -> None:
    """Whichever of the two was switched on last, and if the other never runs."""
    shared = enn.convert(nn.Linear(D, D))
    mine, other = (enn.convert(Sharing(shared), inplace=True) for _ in range(2))
    for model in (other, mine) if last == "own" else (mine, other):
        model.per_sample(loss_reduction="sum", escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"^layer\.weight: .*expanded_nn\.expanded\(weight\)"):
        mine(values()).sum().backward()


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("last", ["own", "other"])
def test_weight_of_a_layer_that_another_model_records_sample_by_sample(last: str) -> None:
    shared = enn.convert(nn.Linear(D, D))
    mine, other = (enn.convert(Sharing(shared), inplace=True) for _ in range(2))
    for model in (other, mine) if last == "own" else (mine, other):
        model.per_sample(loss_reduction="sum")
    expected = loop(enn.revert(mine), Call((values(),)), B)
    try:
        total_loss(mine, Call((values(),))).backward()
    except enn.PerSampleError as error:
        assert "layer.weight" in str(error)  # noqa: PT017
        return
    for name in ("layer.weight", "head.weight", "head.bias"):
        assert_close(mine.get_parameter(name).grad_sample, expected[name], name=name)


@pytest.mark.parametrize("last", ["own", "other"])
def test_layer_that_another_model_records_too(last: str) -> None:
    shared = enn.convert(nn.Linear(D, D))
    mine, other = (enn.convert(nn.Sequential(shared, nn.Linear(D, 2)), inplace=True) for _ in range(2))
    for model in (other, mine) if last == "own" else (mine, other):
        model.per_sample(loss_reduction="sum")
    for model in (mine, other, mine):
        for p in [*mine.parameters(), *other.parameters()]:
            p.grad = None
        right(model, enn.revert(model), forward)


@pytest.mark.parametrize("history", [as_it_is, after_a_step, frozen_at_first, loaded_anew], ids=ids_of)
def test_expanded_weight_without_a_pass_is_refused(history: Callable[[Any], Any]) -> None:
    model = on(parts())
    history(model)
    with pytest.raises(enn.PerSampleError, match=r"expanded\(weight\): .*one_pass\(model, batch_size\)"):
        F.linear(values(), enn.expanded(model.head.weight)[0]).sum().backward()


def set_by_hand(m: Any) -> None:
    m.head.weight.grad = torch.ones(2, D)


def of_a_step_before_the_mode(m: Any) -> None:
    m.per_sample(False)
    m.head(values()).sum().backward()
    m.per_sample(True)
    m.enc(values()).sum().backward()


def under_a_hook_that_removed_the_watch(m: Any) -> None:
    (m.head.weight._backward_hooks or {}).clear()
    F.linear(m.enc(values()), m.head.weight).sum().backward()


def clip(m: Any) -> None:
    enn.clip_grad_sample_norms_(m, 1.0)


WAYS = [set_by_hand, of_a_step_before_the_mode, under_a_hook_that_removed_the_watch]


@pytest.mark.parametrize("ask", [clip, enn.per_sample_grads], ids=ids_of)
@pytest.mark.parametrize("way", WAYS, ids=ids_of)
def test_gradient_without_rows_is_refused_by_name(way: Callable[[Any], None], ask: Callable[[Any], Any]) -> None:
    model = on(parts())
    model.enc(values()).sum().backward()
    way(model)
    with pytest.raises(enn.PerSampleError, match=r"'head\.weight'.*a gradient in \.grad.*zero_grad\(\)"):
        ask(model)


def zeros_by_data(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.zero_()


@pytest.mark.parametrize("clear", [lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False), zeros_by_data])
def test_clipping_without_a_backward_since_the_gradients_were_cleared(clear: Callable[[Any], None]) -> None:
    """As where a batch was skipped: those of the step before are not clipped once more."""
    model = on(parts())
    model(values()).sum().backward()
    clear(torch.optim.SGD(model.parameters()))
    assert not enn.per_sample_grads(model)
    with pytest.raises(enn.PerSampleError, match=r"no trainable parameter has per-sample gradients.*before zero_grad"):
        enn.clip_grad_sample_norms_(model, 1.0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_clipping_where_some_gradients_were_cleared_in_place() -> None:
    model, reference = on(parts()), on(parts())
    for trained in (model, reference):
        trained(values()).sum().backward()
    torch.optim.SGD(model.enc.parameters()).zero_grad(set_to_none=False)
    for parameter in reference.enc.parameters():
        parameter.grad_sample = parameter.grad = None
    norms = [enn.clip_grad_sample_norms_(trained, 1.0) for trained in (model, reference)]
    assert torch.equal(*norms)
    assert not any(p.grad.any() for p in model.enc.parameters())
    for name in ("head.weight", "head.bias", "shift"):
        assert torch.equal(model.get_parameter(name).grad, reference.get_parameter(name).grad)


@pytest.mark.parametrize("ask", [clip, enn.per_sample_grads], ids=ids_of)
def test_some_clipped_gradients_that_are_zero_are_refused(ask: Callable[[Any], Any]) -> None:
    """They may have been cleared, or they cancel and were scaled."""
    model = on(parts())
    model(values()).sum().backward()
    clip(model)
    torch.optim.SGD(model.enc.parameters()).zero_grad(set_to_none=False)
    with pytest.raises(enn.PerSampleError, match=r"enc\.\w+: its \.grad was changed.*a sum that cancels.*zero_grad"):
        ask(model)
    torch.optim.SGD(model.enc.parameters()).zero_grad()
    ask(model)


def test_clipped_gradients_are_cleared_in_place_beside_a_parameter_that_has_left() -> None:
    """Somebody keeps it, and the optimizer no longer clears it: it says nothing about those of the model."""
    model = on(parts())
    model(values()).sum().backward()
    clip(model)
    left, model.head.weight = model.head.weight, nn.Parameter(model.head.weight.detach().clone())
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    assert not enn.per_sample_grads(model)
    assert left.grad is not None


def test_clipped_gradients_of_zeros_may_be_scaled() -> None:
    model = on(parts())
    model(values().zero_() * 0).sum().backward()
    clip(model)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    rows = enn.per_sample_grads(model)
    assert set(rows) == {name for name, _ in model.named_parameters()}


def test_backward_of_a_forward_from_before_the_mode_was_switched_off() -> None:
    """No rows appear, also if something still refers to who would have kept them."""
    model = on(parts())
    kept, loss = model._recorder, model(values()).sum()
    model.per_sample(False)
    loss.backward()
    assert all(p.grad is not None and p.grad_sample is None for p in model.parameters())
    del kept


def test_gradient_that_a_clipped_sum_got_outside_of_the_model_is_refused() -> None:
    """With `accumulate_grad=False` clipping adds to its sum; the parameter left the model meanwhile and is back."""
    model = on(parts(), accumulate_grad=False)
    model(values()).sum().backward()
    clip(model)
    weight = model.head.weight
    del model.head.weight
    F.linear(values(), weight).sum().backward()
    model.head.weight = weight
    model(values()).sum().backward()
    with pytest.raises(enn.PerSampleError, match=r"'head\.weight'.*a gradient in \.grad.*zero_grad\(\)"):
        clip(model)


def through_methods(m: Any, x: Tensor) -> Tensor:
    return m.decode(m.encode_expanded(x))


def through_submodules(m: Any, x: Tensor) -> Tensor:
    return m.head(m.part(m.enc(x)) + enn.expanded(m.shift))


def through_a_weight(m: Any, x: Tensor) -> Tensor:
    h = m.head(m.part(x) + enn.expanded(m.shift))
    return enn.functional.linear(h, enn.expanded(m.head.weight).transpose(-1, -2)) + m.enc(x)


def through_the_weight_alone(m: Any, x: Tensor) -> Tensor:
    return enn.functional.linear(x, enn.expanded(m.enc.weight)) + m(x).sum(1, keepdim=True)


@pytest.mark.parametrize("history", HISTORIES, ids=ids_of)
@pytest.mark.parametrize(
    "step", [through_methods, through_submodules, through_a_weight, through_the_weight_alone], ids=ids_of
)
def test_one_pass_makes_methods_submodules_and_weights_one(step: Step, history: Callable[[Any], Any]) -> None:
    module, model = parts(), on(parts())
    model = history(model) or model

    def within(m: Any, x: Tensor) -> Tensor:
        with enn.one_pass(m, len(x)):
            return step(m, x)

    expected = loop(module, Call((values(),)), B, objective=objective_of(step))
    objective_of(within)(model, Call((values(),))).backward()
    used = {name: rows for name, rows in rows_of(model).items() if rows is not None}
    assert_close_rows(used, {name: expected[name] for name in used})
    assert all(not expected[name].any() for name in set(expected) - set(used))


def test_one_pass_is_never_joined() -> None:
    """The same number of samples, the one behind the other, before a common backward."""
    module, model = parts(), on(parts())
    losses, batches = [], [values(seed=seed) for seed in (1, 2)]
    for x in batches:
        with enn.one_pass(model, B):
            losses.append(sample_losses(model.head(model.enc(x))).sum())
    sum(losses).backward()
    expected = [loop(module, Call((x,)), B, objective=objective_of(lambda m, x: m.head(m.enc(x)))) for x in batches]
    assert_close(model.enc.weight.grad_sample, torch.cat([rows["enc.weight"] for rows in expected]))


class Block(nn.Module):
    """A part with children, and positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.positions = nn.Linear(D, D), nn.Embedding(5, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, D)
        return self.inner(x) + self.positions(torch.arange(5).unsqueeze(0))


@pytest.mark.parametrize("depth", [1, 2])
def test_submodule_with_children_that_is_called_alone_is_one_pass(depth: int) -> None:
    module = nn.Sequential(Block(), nn.Linear(D, 2)) if depth == 1 else nn.Sequential(nn.Sequential(Block()))
    model, x = on(module), values(B, 5, D)
    sample_losses(model[0](x)).sum().backward()
    assert_close_rows(rows_of(model[0]), loop(module[0], Call((x,)), B))


# --- silent, 2: ghost rows after a backward that failed ----------------------------------------------------------


def fails_with(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


def zero_in_place(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)


def zero_by_data(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def none(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters()).zero_grad()


def nothing(model: nn.Module) -> None:
    """No clearing."""


@pytest.mark.parametrize("clear", [zero_in_place, zero_by_data, none], ids=ids_of)
@pytest.mark.parametrize("where", ["parameter", "output", "accumulated"])
@pytest.mark.parametrize(
    "error", [RuntimeError("hook"), torch.OutOfMemoryError("hook"), KeyboardInterrupt("hook")], ids=repr
)
def test_failed_backward_leaves_no_ghost_rows(error: BaseException, where: str, clear: Callable[[Any], None]) -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    model, first = on(module), None
    out = model(values(seed=8))
    if where == "accumulated":
        first = model[2].weight.register_post_accumulate_grad_hook(fails_with(error))
    else:
        hidden = model[0].weight if where == "parameter" else model[0](values(seed=8))
        first = (hidden if where == "parameter" else out).register_hook(fails_with(error))
    with pytest.raises(type(error), match="hook"):
        out.sum().backward()
    first.remove()
    clear(model)
    right(model, module, forward)


# --- silent, 3: zero rows of passes that only frozen or removed parameters hold -----------------------------------


def freeze(m: Any) -> Any:
    m.enc.requires_grad_(False)


def swap(m: Any) -> Any:
    kept, m.head = m.head, enn.convert(copy.deepcopy(m.head))
    m.per_sample(loss_reduction="sum")
    return kept


def swap_the_weight(m: Any) -> Any:
    kept = list(m.head.parameters())
    m.head.weight, m.head.bias = (nn.Parameter(p.detach().clone()) for p in kept)
    m.enc.requires_grad_(False)
    return kept


def assign(m: Any) -> Any:
    kept = list(m.parameters())
    m.load_state_dict({name: p.detach().clone() for name, p in m.state_dict().items()}, assign=True)
    return kept


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x).tanh())


@pytest.mark.parametrize("change", [freeze, swap, swap_the_weight, assign], ids=ids_of)
def test_no_zero_rows_of_frozen_or_removed_parameters(change: Callable[[Any], Any]) -> None:
    module, x, limit = Two(), values(6, D), 0.3
    model = on(module)
    total_loss(model, Call((x,))).backward()
    kept = change(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    torch.optim.SGD(trainable).zero_grad()
    total_loss(model, Call((x,))).backward()
    expected = {n: r for n, r in loop(module, Call((x,)), 6).items() if model.get_parameter(n).requires_grad}
    assert_close_rows(rows_of(model), expected)
    norms = torch.cat([rows.flatten(1) for rows in expected.values()], 1).norm(dim=1)
    for p in model.parameters():
        p.grad = p.grad if p.requires_grad else None
    assert_close(enn.clip_grad_sample_norms_(model, limit, reduction="mean"), norms)
    factors = (limit / norms).clamp(max=1)
    assert_close_rows(grads_of(model), {name: torch.tensordot(factors, rows, 1) / 6 for name, rows in expected.items()})
    del kept


def test_no_zero_rows_of_a_pass_that_is_gone() -> None:
    """Two heads are called alone, with batches of their own; the gradients of one are cleared."""
    heads = on(nn.ModuleDict({"a": nn.Linear(D, 2), "b": nn.Linear(D, 2)}))
    total_loss(heads.a, Call((values(4, D),))).backward()
    total_loss(heads.b, Call((values(3, D),))).backward()
    torch.optim.SGD(heads.a.parameters()).zero_grad()
    module = nn.ModuleDict({"b": enn.revert(heads.b)})
    expected = loop(module.b, Call((values(3, D),)), 3)
    norms = enn.clip_grad_sample_norms_(heads, 1e9, reduction="mean")
    assert len(norms) == 3
    assert_close(heads.b.weight.grad_sample, expected["weight"])
    assert_close(heads.b.weight.grad, expected["weight"].mean(0))


# --- silent, 4: the general rule changes the forward's own value ---------------------------------------------------


class Own(nn.Module):
    """A parameter, a dropout, a child, and a forward that the test writes."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.scale, self.drop, self.child = nn.Parameter(torch.linspace(0.5, 1.5, D)), nn.Dropout(0.5), nn.Linear(D, D)
        self.does = does

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


class Around(nn.Module):
    """A layer before, and arguments that the model itself has."""

    def __init__(self, own: nn.Module, *more: Any) -> None:
        super().__init__()
        self.first, self.own, self.more = nn.Linear(D, D), own, more

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.first(x), *self.more)


def centered(m: Any, x: Tensor) -> Tensor:
    return m.drop((x - x.mean(0)) * m.scale) + 0 * m.child(x)


def centered_before_dropout(m: Any, x: Tensor) -> Tensor:
    return (x - x.mean(0)) * m.scale + m.drop(m.child(x))


def similarities(m: Any, x: Tensor) -> Tensor:
    return m.drop(x) @ (x * m.scale).t() @ m.child(x)


def chosen_neighbour(m: Any, x: Tensor) -> Tensor:
    return m.drop(x) + x.roll(1, 0) * m.scale


def with_noise(m: Any, x: Tensor) -> Tensor:
    return (x - x.mean(0)) * m.scale + torch.randn_like(x)


MIXING = [centered, centered_before_dropout, similarities, chosen_neighbour, with_noise]


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("does", MIXING, ids=ids_of)
def test_mixing_beside_chance_is_refused(does: Callable[..., Any], hooked: bool) -> None:
    model = on(Around(Own(does)))
    if hooked:
        model.own.child.register_forward_hook(lambda *_: None)
    with pytest.raises(enn.PerSampleError, match=r"^own \(Own\): on the whole batch .*outside of the module"):
        sample_losses(model(values())).sum().backward()


def test_mixing_below_a_forward_hook_is_refused() -> None:
    model = on(Around(Own(lambda m, x: (x - x.mean(0)) * m.scale + m.child(x))))
    model.own.child.register_forward_hook(lambda *_: None)
    with pytest.raises(enn.PerSampleError, match=r"^own \(Own\): on the whole batch .*outside of the module"):
        model(values())


SHARED: dict[str, Callable[..., Tensor]] = {
    "attends": lambda m, x, table: (m.drop(m.child(x)) @ table.t()).softmax(-1) @ (table * m.scale),
    "adds": lambda m, x, table: m.drop(m.child(x)) * m.scale + table.sum(0),
    "hooked": lambda m, x, table: m.child(x) * m.scale + table.sum(0),
}


@pytest.mark.parametrize("does", SHARED.values(), ids=SHARED)
def test_shared_argument_as_long_as_the_batch_is_refused(does: Callable[..., Any]) -> None:
    """`(T, D)` with T = B: one row per sample, or a table that all share. The module around it can tell."""
    module = Around(Own(does), values(B, D, seed=4))
    model = on(module, escalate=False)
    model.own.child.register_forward_hook(lambda *_: None)
    with pytest.raises(enn.PerSampleError, match=r"^own \(Own\): .*(make a table a buffer|as a buffer)"):
        model(values())
    module.eval()
    model = on(module)
    model.own.child.register_forward_hook(lambda *_: None)
    with pytest.warns(enn.PerSampleWarning, match=r"^Around: runs sample by sample.* own \(Own\): on the whole batch"):
        right(model, module, forward)


# --- silent, 5: a module that changes its input, or leaves something behind ---------------------------------------


IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "mul_add": lambda m, x: x.mul_(2).add_(m.scale) + 0 * m.child(x),
    "index": lambda m, x: m.child(_with_item(x)) * m.scale,
    "iadd": lambda m, x: _added(x, m.scale).tanh() + m.child(x),
}


def _with_item(x: Tensor) -> Tensor:
    x[..., 0] = 2.5 * x[..., 1]
    return x


def _added(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("does", IN_PLACE.values(), ids=IN_PLACE)
def test_input_changed_in_place_by_a_module(does: Callable[..., Any], steps: int) -> None:
    module = Around(Own(does))
    model = on(module)
    for _ in range(steps):
        model.zero_grad()
        right(model, module, forward)


def test_input_of_the_model_changed_in_place_is_changed_once() -> None:
    module = Own(IN_PLACE["mul_add"])
    mine, theirs = values(), values()
    on(module)(mine)
    module(theirs)
    assert_close(mine, theirs)


def test_side_effects_of_a_forward_happen_once() -> None:
    """A counter, a list, a buffer, and the caller's dict: as a plain forward leaves them."""

    def does(m: Any, x: Tensor, log: dict[str, Any]) -> Tensor:
        m.count += 1
        m.seen.append(m.count)
        m.steps += 1
        assert log.pop("y") == 1
        return x * m.scale

    outcomes = []
    for make in (lambda m: m, on):
        module = Own(does)
        module.count, module.seen = 0, []
        module.register_buffer("steps", torch.zeros(()))
        model, log = make(module), {"y": 1, "z": 2}
        model(values(), log)
        outcomes.append((model.count, model.seen, model.steps.item(), set(log)))
    assert outcomes[1][:3] == outcomes[0][:3]
    assert {"z"} <= outcomes[1][3] <= {"y", "z"}


# --- silent, 6: clearing that is not seen, rows that are lost -----------------------------------------------------


def by_data(p: Any) -> None:
    p.grad.data.zero_()


def by_a_penalty(p: Any) -> None:
    p.grad = 0.1 * p.detach()


def by_another_tensor(p: Any) -> None:
    p.grad = torch.zeros_like(p)


def by_detach(p: Any) -> None:
    p.grad.detach().zero_()


def by_multiplying(p: Any) -> None:
    p.grad.mul_(0)


def by_none(p: Any) -> None:
    p.grad = None


@pytest.mark.parametrize(
    "clear", [by_data, by_a_penalty, by_another_tensor, by_detach, by_multiplying, by_none], ids=ids_of
)
def test_clearing_is_seen(clear: Callable[[Any], None]) -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    model = on(module)
    for seed in (5, 6):
        total_loss(model, Call((values(seed=seed),))).backward()
        for p in model.parameters():
            clear(p)
    total_loss(model, Call((values(),))).backward()
    assert_close_rows(rows_of(model), loop(module, Call((values(),)), B))


SCALINGS: dict[str, Callable[[Any], None]] = {
    "in_place": lambda p: p.grad.mul_(0.5),
    "anew": lambda p: setattr(p, "grad", p.grad * 0.5),
    "by_data": lambda p: p.grad.data.div_(2),
    "clipped_by_torch": lambda p: nn.utils.clip_grad_norm_([p], 0.1),
    "not_at_all": lambda p: None,
}


@pytest.mark.parametrize("scale", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("cancels", [True, False])
def test_rows_stay_where_an_accumulated_gradient_is_scaled(scale: Callable[[Any], None], cancels: bool) -> None:
    """Also where the samples' gradients cancel to exactly zero."""
    model = on(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[1.0], [-1.0 if cancels else 2.0]])
    model(x).sum().backward()
    scale(model.weight)
    model(2 * x).sum().backward()
    assert_close(model.weight.grad_sample, torch.cat([x, 2 * x]).unsqueeze(1))


# --- silent, 7: no pass, lost edits, positions that do not count up -----------------------------------------------


class Inside(nn.Module):
    """Its forward enables gradients and takes the backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            out = sample_losses(self.last(self.block(x).tanh())).sum()
            out.backward()
        return out


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "after_a_step"])
def test_gradients_enabled_inside_of_no_grad_have_rows(earlier: bool) -> None:
    module = Inside()
    model = on(module, compare=not earlier)  # as a comparison would run the backward once more
    inner = nn.Sequential(module.block, nn.Tanh(), module.last)
    if earlier:
        model(values(2, 5, D))
        model.zero_grad()
    with torch.no_grad():
        model(values(B, 5, D))
    rows = loop(inner, Call((values(B, 5, D),)), B)
    expected = {name.replace("0.", "block.").replace("2.", "last."): own for name, own in rows.items()}
    assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_edits_of_rows_stay_at_the_next_backward(passes: int, materialize: bool) -> None:
    module, x = nn.Linear(D, 2), values()
    model, rows = on(module, materialize=materialize), loop(module, Call((x,)), B)["weight"]
    for _ in range(passes):
        total_loss(model, Call((x,))).backward()
    model.weight.grad_sample.mul_(2)
    total_loss(model, Call((x,))).backward()
    assert_close(model.weight.grad_sample, torch.cat([2 * rows] * passes + [rows]))


@pytest.mark.parametrize("size", [D, 200])
@pytest.mark.parametrize("materialize", [False, True])
def test_edits_of_zero_rows_stay(materialize: bool, size: int) -> None:
    """Those of a pass that has not used the parameter, however many backwards follow."""
    model = on(nn.ModuleList([nn.Linear(size, size), nn.Linear(size, size)]), materialize=materialize)
    for layer in model:
        layer(values(B, size)).sum().backward()
    model[1].weight.grad_sample[:B] += 7
    for _ in range(4):
        model[0](values(B, size)).sum().backward()
        assert torch.equal(model[1].weight.grad_sample[:B] * 1, torch.full((B, size, size), 7.0))


def test_clipping_what_torch_autograd_grad_has_left_makes_it_the_rows_held() -> None:
    """Rows from before are no part of `.grad` any more, and do not come back with the next backward."""
    model, x = on(nn.Linear(D, 2)), values()
    model(2 * x).sum().backward()
    torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
    with pytest.raises(enn.PerSampleError, match=r"those of the backward before it, .* are set aside"):
        enn.clip_grad_sample_norms_(model, 1e9)  # it would throw the batch of training away
    model.zero_grad()
    torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
    enn.clip_grad_sample_norms_(model, 1e9)
    model(3 * x[:2]).sum().backward()
    assert_close(model.weight.grad_sample, torch.cat([x, 3 * x[:2]])[:, None].expand(-1, 2, -1))


class Positions(nn.Module):
    def __init__(self, ids: Tensor, take: Callable[[Tensor], Tensor] = lambda p: p) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.lin, self.pos, self.take = nn.Linear(D, D), nn.Embedding(9, D), take

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return self.lin(x) + self.take(self.pos(self.ids))


DISORDERED = {"reversed": [2, 1, 0], "even": [0, 2, 4], "cyclic": [1, 2, 0], "buckets": [0, 0, 1]}


@pytest.mark.parametrize("ids", DISORDERED.values(), ids=DISORDERED)
def test_positions_of_a_buffer_that_do_not_count_up(ids: list[int]) -> None:
    """As many as samples: which of the two they are, their shape does not tell, but the module around does."""
    module = Positions(torch.tensor(ids))
    with pytest.warns(enn.PerSampleWarning, match=r"pos \(Embedding\).*unsqueeze\(0\)"):
        right(on(module), module, forward, values(B, B, D))
    with pytest.raises(enn.PerSampleError, match=r"pos \(Embedding\).*unsqueeze\(0\)"):
        on(module, escalate=False)(values(B, B, D))


@pytest.mark.parametrize("ids", DISORDERED.values(), ids=DISORDERED)
def test_check_sees_positions_that_do_not_count_up(ids: list[int]) -> None:
    module = Positions(torch.tensor(ids))
    assert "Positions runs sample by sample, as pos (Embedding)" in str(enn.check(module, values(B, B, D)))
    assert not enn.check(on(module, escalate=False), values(B, B, D)).ok


# --- silent, 8: a shared result of which the model takes the first ------------------------------------------------


TAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda p: p[0],
    "first_row": lambda p: p[:1],
    "last": lambda p: p[-1],
    "mean": lambda p: p.mean(0),
    "unbound": lambda p: p.unbind(0)[0],
    "squeezed": lambda p: p.squeeze(0),
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_first_of_a_shared_result(take: Callable[[Tensor], Tensor]) -> None:
    """Right; or refused, where nothing around the layer may take its place."""
    module = Positions(torch.arange(5).unsqueeze(0), take)
    right(on(module), module, forward, values(B, 5, D))
    try:
        right(on(module, escalate=False), module, forward, values(B, 5, D))
    except enn.PerSampleError as error:
        assert "pos (Embedding)" in str(error)  # noqa: PT017


class BehindLayers(Positions):
    """Takes a part of what layers make of the table, for whatever rows it has."""

    def __init__(self, ids: Tensor, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__(ids, take)
        self.norm, self.pair = nn.LayerNorm(D), nn.Bilinear(D, D, D)

    def forward(self, x: Tensor) -> Tensor:
        table = self.pos(self.ids)
        return self.lin(x) + self.take(self.norm(self.pair(table, self.lin(table)))).reshape(-1, D).sum(0)


@pytest.mark.parametrize("ids", [torch.arange(5), torch.arange(6).view(3, 2)], ids=["1d", "2d"])
@pytest.mark.parametrize("take", [*TAKES.values(), lambda p: p.softmax(0), lambda p: p + len(p)])
@pytest.mark.parametrize("kind", [Positions, BehindLayers])
def test_a_single_sample_has_the_plain_results(kind: Any, ids: Tensor, take: Callable[[Tensor], Tensor]) -> None:
    """With a dimension for it, the forward would speak of another one than it means."""
    module = kind(ids, lambda p: take(p).reshape(-1, D).sum(0))
    right(on(module, escalate=False), module, forward, values(1, 5, D))


@pytest.mark.parametrize("kind", [Positions, BehindLayers])
def test_a_single_sample_and_a_single_index(kind: Any) -> None:
    module = kind(torch.tensor(2), lambda p: p.softmax(0) if p.dim() == 1 else 1 / p.dim())
    right(on(module, escalate=False), module, forward, values(1, 5, D))


class TakenLater(nn.Module):
    """The same layers read what all samples share, and later on it takes a part of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.pos, self.lin = nn.Embedding(5, D), nn.Linear(D, D)

    def forward(self, x: Tensor, take: Callable[[Tensor], Tensor] = lambda p: p) -> Tensor:
        return self.lin(x) + take(self.pos(torch.arange(5).unsqueeze(0)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


LATER = [
    *(TAKES["first"], TAKES["mean"], lambda p: p.tanh()[0], lambda p: p.tril(3)[0], lambda p: Doubled.apply(p)[0]),
    lambda p: p.view(p.shape[0], -1, 1, D).flatten(1, 2)[0],
]


@pytest.mark.parametrize("take", LATER)
def test_a_part_of_a_shared_result_after_whole_ones(take: Callable[[Tensor], Tensor]) -> None:
    module = TakenLater()
    model = on(module)
    for _ in range(2):
        right(model, module, forward, values(B, 5, D))
        model.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match=r"pos \(Embedding\): its input is shared by all"):
        right(model, module, lambda m, x: m(x, take), values(B, 5, D))


LAST = [lambda p: p[-1], lambda p: p[-1:], lambda p: p.exp().amax(0), lambda p: p.exp().amax(0, keepdim=True)]


@pytest.mark.parametrize("take", LAST)
@pytest.mark.parametrize("samples", [2, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_last_copy_of_a_shared_result(take: Callable[[Tensor], Tensor], samples: int, dtype: torch.dtype) -> None:
    """No single copy tells whether it stands for all, and with many samples each has to differ enough."""
    module = TakenLater().to(dtype)
    with pytest.warns(enn.PerSampleWarning, match=r"pos \(Embedding\): its input is shared by all"):
        on(module)(values(samples, 5, D).to(dtype), take)


class Channels(nn.Module):
    """Time first: a layer with samples first, and one behind it that looks for them second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:  # (T, B, D)
        return self.second(self.first(x.permute(1, 2, 0)).relu()).permute(2, 0, 1)


class OwnConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(B, D, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight)


FIRST: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv1d(D, B, 1),
    "frozen": lambda: nn.Conv1d(D, B, 1).requires_grad_(False),
    "own": OwnConv,
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("second", [lambda: nn.Linear(D, 2), Scale, lambda: nn.Conv1d(B, 2, 1)])
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_channels_as_many_as_samples(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> None:
    """`(B, channels, T)` of a model with time first: the channels would be taken for the samples."""
    module, x = Channels(first(), second()), values(D, B, D)
    model = on(module, batch_first=False)
    step: Step = lambda m, x: m(x).transpose(0, 1)  # noqa: E731
    take = lambda call, i: Call((call.args[0][:, i : i + 1],))  # noqa: E731
    expected = loop(module, Call((x,)), B, take=take, objective=objective_of(step))
    sample_losses(step(model, x)).sum().backward()
    assert_close_rows(rows_of(model), expected)


class Between(nn.Module):
    """A layer that reads its samples behind a dimension of size 1, as something that all samples share."""

    def __init__(self, layer: nn.Module, before: Step, after: Step, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.before, self.after, self.last = layer, before, after, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.layer(self.before(x))))


BEHIND_ONE: dict[str, tuple[nn.Module, Any]] = {
    "linear": (nn.Linear(D, D), lambda x: x.unsqueeze(0)),
    "computed": (nn.Linear(D, D), lambda x: torch.stack([2 * x])),
    "several": (nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)), lambda x: x[None]),
    "labels": (nn.Embedding(9, D), lambda x: x[:, 0].mul(7).long().remainder(9)[None]),
    "own": (Scale(), lambda x: x.view(1, *x.shape)),
}


@pytest.mark.parametrize(("layer", "before"), BEHIND_ONE.values(), ids=BEHIND_ONE)
@pytest.mark.parametrize("last", [nn.Linear(D, 2), nn.Identity()], ids=["layer", "returned"])
def test_samples_behind_a_dimension_of_one(layer: nn.Module, before: Any, last: nn.Module) -> None:
    """Right, as the module goes sample by sample: B copies of B positions would be taken for the samples."""
    module = Between(layer, before, lambda y: y.squeeze(0), last).double()
    with pytest.warns(enn.PerSampleWarning, match=r"indexes or reduces these \(by squeeze\)|numbers of all 3 samples"):
        right(on(module), module, forward, values(B, D))


@pytest.mark.parametrize(("layer", "before"), BEHIND_ONE.values(), ids=BEHIND_ONE)
def test_samples_returned_behind_a_dimension_of_one(layer: nn.Module, before: Any) -> None:
    module = Between(layer, before, lambda y: y, nn.Identity()).double()
    with pytest.warns(enn.PerSampleWarning, match=r"indexes or reduces these \(by return\)|numbers of all 3 samples"):
        right(on(module), module, lambda m, x: m(x)[0], values(B, D))


class Temperature(nn.Module):
    """It has no argument, and all samples share what it returns."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full(shape, 0.3))

    def forward(self) -> Tensor:
        return self.log.exp()


class Tempered(nn.Module):
    def __init__(self, shape: tuple[int, ...], features: int, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.temperature, self.use = nn.Linear(D, features), Temperature(*shape), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.lin(x), self.temperature())


USES_OF_A_TEMPERATURE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda y, t: y * t,
    "divided": lambda y, t: y / t,
    "from": lambda y, t: t - y,
    "expanded": lambda y, t: y * t.expand_as(y),
    "squeezed": lambda y, t: y * t.squeeze(),
    "turned": lambda y, t: (y.t() * t).t(),
}


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("features", "use"),  # nothing tells (B, B) from its transpose
    [(n, use) for n in (1, 2, B) for use in USES_OF_A_TEMPERATURE if (n, use) != (B, "turned")],
)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_shared_result_that_broadcasts(shape: tuple[int, ...], features: int, use: str) -> None:
    """`(1,)` meets `(B, 1)`: with a copy for each sample, `(B,)`, that would make `(B, B)`."""
    module = Tempered(shape, features, USES_OF_A_TEMPERATURE[use])
    right(on(module), module, forward, values(B, D))


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class OfColumns(nn.Module):
    """Time first: beside `(T, B, D)` it reads a column, computed from an argument `(B, 1)` or of positions `(T, 1)`."""

    def __init__(self, of_samples: bool) -> None:
        super().__init__()
        self.lin, self.factor, self.of_samples = nn.Linear(D, 1), Factor(), of_samples

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        if self.of_samples:
            return self.lin(x) + self.factor(2 * z + 1)
        return self.lin(x) + self.factor(torch.arange(1.0, len(x) + 1).unsqueeze(1)).unsqueeze(-1)


@pytest.mark.parametrize("of_samples", [True, False])
@pytest.mark.parametrize("length", [1, 2, B])
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_column_in_a_time_first_model(length: int, of_samples: bool) -> None:
    """Its one may be the features of each sample, or what all samples share at each position."""
    module, x, z = OfColumns(of_samples), values(length, B, D), values(B, 1, seed=2)
    model = on(module, batch_first=False)
    step: Step = lambda m, *inputs: m(*inputs).transpose(0, 1)  # noqa: E731
    take = lambda call, i: Call((call.args[0][:, i : i + 1], call.args[1][i : i + 1]))  # noqa: E731
    expected = loop(module, Call((x, z)), B, take=take, objective=objective_of(step))
    sample_losses(step(model, x, z)).sum().backward()
    assert_close_rows(rows_of(model), expected)


class Prototypes(nn.Module):
    """Samples `(B, D)` meet `(1, K, D)`, which all samples share."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor], hidden: nn.Module) -> None:
        super().__init__()
        self.table, self.hidden, self.meet = nn.Embedding(5, D), hidden, meet

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.hidden(x), self.table(torch.arange(5).unsqueeze(0)))


MEETINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, p: (x @ p.mT)[0],
    "squeezed_product": lambda x, p: (x @ p.mT).squeeze(0),
    "squeezed_table": lambda x, p: x @ p.squeeze(0).mT,
    "unsqueezed": lambda x, p: (x[None] @ p.mT)[0],
    "turned": lambda x, p: (p @ x.T)[0].T,
    "distances": lambda x, p: torch.cdist(x, p)[0],
    "squeezed_distances": lambda x, p: torch.cdist(x, p.squeeze(0)),
    "tensordot": lambda x, p: torch.tensordot(x, p, ([1], [2])).squeeze(1),
    "einsum": lambda x, p: torch.einsum("bd,okd->obk", x, p)[0],
    "attention": lambda x, p: F.scaled_dot_product_attention(x[None], p, p)[0],
    "subtracted": lambda x, p: (x[:, None] - p).square().sum(-1),
    "cosine": lambda x, p: F.cosine_similarity(x[:, None], p, dim=-1),
}


@pytest.mark.parametrize("hidden", [nn.Linear(D, D), nn.Identity()], ids=["layer", "argument"])
@pytest.mark.parametrize("meet", MEETINGS.values(), ids=MEETINGS)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_samples_that_meet_what_all_share(hidden: nn.Module, meet: Callable[[Tensor, Tensor], Tensor]) -> None:
    """With a copy `(B, K, D)` for each sample, `(B, D)` would be taken for one matrix, and give `(B, B, K)`."""
    module = Prototypes(meet, hidden).double()
    right(on(module), module, forward, values(B, D))


TABLE = torch.linspace(-1, 1, B * D, dtype=torch.float64).view(B, D).sin()
OF_A_LAMBDA = TABLE.clone()


def helper() -> Tensor:
    return TABLE


def table_around() -> Callable[[], Tensor]:
    """A table in a variable, beside one that has no value."""
    table = TABLE.clone()

    def get() -> Tensor:
        return table if len(TABLE) else missing

    if not len(TABLE):
        missing = table
    return get


AROUND = table_around()


class Tables(nn.Module):
    """Compares samples with B prototypes, which are no samples and no buffer."""

    of_class = TABLE.clone()

    def __init__(self, table: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.lin, self.table = nn.Linear(D, D), table
        self.attribute, self.named = TABLE.clone(), {"prototypes": [TABLE.clone()]}
        self.frozen = nn.ParameterDict({"table": nn.Parameter(TABLE.clone(), requires_grad=False)})
        self.words, self.encoder = nn.Embedding(B, D).requires_grad_(False), nn.Linear(D, D).requires_grad_(False)
        self.trained = nn.Embedding(B, D)
        self.register_buffer("order", torch.arange(B).flip(0))

    def global_table(self) -> Tensor:
        return TABLE

    def table_of_helper(self) -> Tensor:
        return helper()

    def variable(self) -> Tensor:
        return AROUND()

    def in_a_lambda(self) -> Tensor:
        return (lambda: OF_A_LAMBDA)()

    def waves(self) -> Tensor:
        """Made as sinusoidal positions often are."""
        table = self.lin.weight.new_zeros(B, D)
        table[:, 0::2] = torch.sin(torch.arange(B))[:, None]
        table[:, 1::2] = torch.cos(torch.arange(B))[:, None]
        return table

    @torch.no_grad()
    def without_gradients(self) -> Tensor:
        return self.trained(torch.arange(B))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.lin(x) + self.trained((x[:, 0] > 0).long()), self.lin(self.table(self)))


TABLES: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda m: m.attribute,
    "computed": lambda m: 2 * m.attribute.to(torch.float64),
    "container": lambda m: m.named["prototypes"][0],
    "of_class": lambda m: m.of_class,
    "global": lambda m: m.global_table(),
    "global_of_a_helper": lambda m: m.table_of_helper(),
    "variable": lambda m: m.variable(),
    "in_a_lambda": lambda m: m.in_a_lambda(),
    "array": lambda m: torch.as_tensor(TABLE.tolist(), dtype=torch.float64),
    "frozen_parameter": lambda m: m.frozen["table"],
    "frozen_embedding": lambda m: m.words(m.order),
    "frozen_words": lambda m: m.words.weight,
    "frozen_encoder": lambda m: m.encoder(m.attribute),
    "detached": lambda m: m.trained.weight.detach(),
    "without_gradients": lambda m: m.without_gradients(),
    "filled": lambda m: m.waves(),
    "ones": lambda m: torch.ones(B, D, dtype=torch.float64).cumsum(0),
    "new": lambda m: m.attribute.new_tensor(TABLE.tolist()),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_that_is_no_buffer(table: Callable[[Any], Tensor]) -> None:
    """With B rows by chance, a layer would take it for the samples."""
    module = Tables(table).double()
    with pytest.warns(enn.PerSampleWarning, match=r"lin \(Linear\): its input, .* from buffers, attributes or"):
        right(on(module), module, forward, values(B, D))


def set_before_the_call(model: Any, x: Tensor) -> Tensor:
    model.attribute = x + 1
    return model(x)  # type: ignore[no-any-return]


def changed_in_place(model: Any, x: Tensor) -> Tensor:
    model.attribute.copy_(x)
    return model(x)  # type: ignore[no-any-return]


def kept_beside(model: Any, x: Tensor) -> Tensor:
    model.attribute = x
    return model.per_sample()(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [set_before_the_call, changed_in_place, kept_beside], ids=ids_of)
def test_samples_that_an_attribute_holds(step: Step) -> None:
    """A state, or what each sample is given beside the arguments, is no table."""
    model = on(Tables(TABLES["attribute"]).double(), compare=False)  # it compares samples with each other
    step(model, values(B, D)).square().mean().backward()
    assert len(model.lin.weight.grad_sample) == B


class Lengths(nn.Module):
    """Makes of numbers that it reads in the samples what a layer is given, a row for each."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.lin, self.write = nn.Linear(D, D), write

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(len(x), D, dtype=x.dtype)
        self.write(mask, x)
        return self.lin(mask) * x


def by_numbers(mask: Tensor, x: Tensor) -> None:
    for i, row in enumerate(x):
        mask[i, : int((row > 0).sum())] = 1


def by_item(mask: Tensor, x: Tensor) -> None:
    for i, row in enumerate(x):
        mask[i] = row.sum().item()


def by_rows(mask: Tensor, x: Tensor) -> None:
    mask[:] = x


def by_copy(mask: Tensor, x: Tensor) -> None:
    mask.copy_(x)


@pytest.mark.parametrize("write", [by_numbers, by_item, by_rows, by_copy], ids=ids_of)
def test_samples_that_are_written_into_zeros(write: Callable[[Tensor, Tensor], object]) -> None:
    module = Lengths(write).double()
    right(on(module, escalate=False), module, forward, values(B, D))


def test_first_states_of_zeros() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(D, D)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), D)
            for _ in range(2):
                state = self.cell(x, state)
            return state

    module = Steps().double()
    right(on(module, escalate=False), module, forward, values(B, D))


@pytest.mark.parametrize("within", [False, True])
def test_a_table_that_the_model_is_called_with(within: bool) -> None:
    """The points of a PINN may stand in the model itself."""
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    module.register_buffer("grid", TABLE.clone())
    model = on(module)
    with enn.one_pass(model, B) if within else nullcontext():
        sample_losses(model(model.grid)).sum().backward()
    assert_close_rows(rows_of(model), loop(module, Call((TABLE,)), B))


class Attends(nn.Module):
    """What all samples share meets samples that stand where it has its copies."""

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.lin, self.use = nn.Embedding(B, D), nn.Linear(D, D), use
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        used = self.use(self, x, self.table(torch.arange(B).unsqueeze(0)))
        return self.lin(used) + self.attention(x, x, x, need_weights=False)[0]


USES_OF_A_TABLE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "added": lambda m, x, p: m.lin(x) + p,
    "added_to_an_argument": lambda m, x, p: x + p,
    "attends": lambda m, x, p: m.attention(x + p, x + p, x + p, need_weights=False)[0],
    "is_attended": lambda m, x, p: m.attention(m.lin(x), p, p, need_weights=False)[0],
    "queries": lambda m, x, p: m.attention(p.expand(len(x), -1, -1), m.lin(x), m.lin(x), need_weights=False)[0],
    "product": lambda m, x, p: (m.lin(x) @ p.mT).softmax(-1) @ p,
    "kernel": lambda m, x, p: F.scaled_dot_product_attention(p, m.lin(x), m.lin(x)),
}


@pytest.mark.parametrize("use", USES_OF_A_TABLE.values(), ids=USES_OF_A_TABLE)
@pytest.mark.parametrize("samples", [2, B, D])
def test_what_all_share_meets_samples_in_their_place(
    use: Callable[[Any, Tensor, Tensor], Tensor], samples: int
) -> None:
    """No false alarm where there are as many positions, or features, as samples."""
    module = Attends(use)
    right(on(module, escalate=False), module, forward, values(samples, B, D))


class OfCoordinates(nn.Module):
    """Several layers, one behind the other, read what all samples share; the model takes a part of their result."""

    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, D), nn.Tanh(), nn.LayerNorm(D), nn.Linear(D, D))
        self.lin, self.take = nn.Linear(D, D), take

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.take(self.inner(torch.ones(1, 2)))


PARTS_OF_COORDINATES: dict[str, Callable[[Any], Tensor]] = {
    "first": lambda r: r[0],
    "mean": lambda r: r.mean(0),
    "divided_by_its_numbers": lambda r: r / r.numel(),
    "gathered": lambda r: r.gather(1, torch.arange(D).flip(0).unsqueeze(0)),
    "whole": lambda r: r.flip(1),
}


@pytest.mark.parametrize(("name", "take"), PARTS_OF_COORDINATES.items(), ids=PARTS_OF_COORDINATES)
def test_a_part_of_a_shared_result_behind_several_layers(name: str, take: Callable[[Any], Tensor]) -> None:
    module = OfCoordinates(take)
    model = on(module, escalate=False)
    if name == "whole":
        right(model, module, forward, values(B, D))
        return
    with pytest.raises(enn.PerSampleError, match=r"inner.0 \(Linear\): its input is shared by all"):
        model(values(B, D))
    with pytest.warns(enn.PerSampleWarning, match=r"inner.0 \(Linear\): its input is shared by all"):
        right(on(module), module, forward, values(B, D))


@pytest.mark.parametrize("labels", [[0, 6, 12], [0, 6, 7, 13], [0, 6, 12, 13]])
def test_cluster_that_a_part_of_the_samples_belongs_to(labels: list[int]) -> None:
    """Chosen by an index, a single sample looks like what all share."""
    module = nn.AdaptiveLogSoftmaxWithLoss(D, 20, cutoffs=[5, 10], div_value=2.0)
    x, y = values(len(labels), D), torch.tensor(labels)
    with pytest.raises(enn.PerSampleError, match=r"tail\.[01]\.0 \(Linear\): .*(shared by all|other rows)"):
        on(module, escalate=False)(x, y)

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clusters = module

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.clusters(x, y).output

    with pytest.warns(enn.PerSampleWarning, match=r"tail\.[01]\.0 \(Linear\): "):
        right(on(Outputs()), Outputs(), forward, x, y)


class Started(nn.Module):
    """A recurrent layer reads what all samples share; the model takes a part of what it returns."""

    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.lstm, self.lin, self.take = nn.LSTM(3, D, num_layers=2, batch_first=True), nn.Linear(D, D), take

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.take(self.lstm(torch.linspace(-1, 1, 15).view(1, 5, 3)))


PARTS_OF_STATES: dict[str, Callable[[Any], Tensor]] = {
    "last_state": lambda r: r[1][0][-1][0],
    "last_step": lambda r: r[0][:, -1][0],
    "first_then_step": lambda r: r[0][0, -1],
    "layer_behind": lambda r: r[1][0][:, 0][-1],
    "unbound": lambda r: r[1][0].unbind(0)[1][0],
    "mean_of_a_slice": lambda r: r[0][:, 1:3].mean(1)[0],
    "kept_dimension": lambda r: r[0].amax(1, keepdim=True)[0, 0],
    "permuted": lambda r: r[0].permute(1, 2, 0)[-1, :, 0],
    "transposed": lambda r: r[0].transpose(0, 2)[:, -1, 0],
    "turned": lambda r: r[0][:, -1].t()[:, 0],
    "by_an_index": lambda r: r[0][torch.tensor([0]), -1][0],
    "whole": lambda r: r[1][0][-1],
    "whole_by_an_index": lambda r: r[0][:, torch.tensor([4])].squeeze(1),
    "whole_step": lambda r: r[0][:, -1],
}


@pytest.mark.parametrize(("name", "take"), PARTS_OF_STATES.items(), ids=PARTS_OF_STATES)
def test_a_part_of_a_shared_result_behind_another_dimension(name: str, take: Callable[[Any], Tensor]) -> None:
    module = Started(take)
    model = on(module, escalate=False)
    if name.startswith("whole"):
        right(model, module, forward, values(B, D))
        return
    with pytest.raises(enn.PerSampleError, match=r"lstm \(LSTM\): its input is shared by all"):
        model(values(B, D))


class Table(nn.Module):
    """Its own parameter, for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 5 * D).view(1, 5, D))

    def forward(self) -> Tensor:
        return self.table


class Tokens(nn.Module):
    def __init__(self, take: Callable[[Tensor], Tensor], argument: bool) -> None:
        super().__init__()
        self.lin, self.table, self.take, self.argument = nn.Linear(D, D), Table(), take, argument

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.take(self.table())


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_first_of_a_parameter_that_a_module_returns(take: Callable[[Tensor], Tensor]) -> None:
    module = Tokens(take, False)
    right(on(module), module, forward, values(B, 5, D))
    try:
        right(on(module, escalate=False), module, forward, values(B, 5, D))
    except enn.PerSampleError as error:
        assert "table" in str(error)  # noqa: PT017


# --- silent, 9: a closure over the original model ------------------------------------------------------------------


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, D)
        self.to_logits = lambda h: h @ self.emb.weight.t()

    def forward(self, words: Tensor) -> Tensor:
        return self.to_logits(self.emb(words))


class BoundMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, D)
        self.to_logits = SimpleNamespace(call=self.logits).call

    def logits(self, h: Tensor) -> Tensor:
        return h @ self.emb.weight.t()

    def forward(self, words: Tensor) -> Tensor:
        return self.to_logits(self.emb(words))


class Weak(nn.Module):
    """A part that reaches the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, D)
        self.emb.around = weakref.ref(self)

    def forward(self, words: Tensor) -> Tensor:
        return self.emb(words) @ self.emb.around().emb.weight.t()


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("kind", [Closure, BoundMethod, Weak])
def test_closure_over_the_original_model(kind: type[nn.Module]) -> None:
    """A copy that computes with the original's weights is refused, where it is made or where it is used."""
    module, words = kind(), torch.tensor([[1, 2], [3, 3], [0, 6]])
    expected = loop(module, Call((words,)), B)
    try:
        model = on(module)
        total_loss(model, Call((words,))).backward()
    except (enn.PerSampleError, enn.ConversionError) as error:
        assert "emb" in str(error) or "to_logits" in str(error)  # noqa: PT017
        assert "inplace=True" in str(error) or "expanded" in str(error)  # noqa: PT017
        return
    assert module.emb.weight.grad is None
    assert_close_rows(rows_of(model), expected)


# --- silent, 10: an exception of the user's code stays what it is --------------------------------------------------


class Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.lin, self.pos, self.error = nn.Linear(D, D), nn.Embedding(9, D), error

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x) + self.pos(torch.arange(5))
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("own words"),
        torch.OutOfMemoryError("own words"),
        ValueError("own words"),
        KeyboardInterrupt("own words"),
    ],
    ids=repr,
)
def test_exception_of_the_users_own_stays_what_it_is(error: BaseException) -> None:
    model = on(Fails(error))
    model.error = error
    with pytest.raises(type(error)) as info:
        model(values(B, 5, D))
    assert info.value is error
    assert str(info.value) == "own words"


class Stops(nn.Module):
    """Keeps what it has computed, and stops there."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.kept = nn.Linear(D, D), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.lin(x)
        self.kept.append(self.features)
        try:
            raise KeyError("first")
        except KeyError:
            raise StopIteration("features are there")  # noqa: B904


def test_what_a_forward_has_kept_when_it_stops_stays() -> None:
    """As a hook keeps features, and raises an exception where the rest is not wanted."""
    model = on(Stops())
    for number in range(1, 4):
        with pytest.raises(StopIteration) as info:
            model(values(B, 5, D))
        assert isinstance(info.value.__context__, KeyError)
        assert not info.value.__suppress_context__
        assert len(model.kept) == number
        assert model.kept[-1] is model.features


# --- false alarms, 1: class labels that happen to be consecutive ----------------------------------------------------


class Labelled(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.lin, self.labels, self.change = nn.Linear(D, D), nn.Embedding(20, D), change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.lin(x) * self.labels(self.change(y))


@pytest.mark.parametrize(
    "change", [lambda y: y, lambda y: y + 1, lambda y: y.clone()], ids=["as_it_is", "moved", "cloned"]
)
@pytest.mark.parametrize("labels", [[3, 4], [5, 6, 7], [9, 10, 11, 12], [4, 3], [7]], ids=str)
def test_consecutive_labels_are_one_per_sample(labels: list[int], change: Callable[[Tensor], Tensor]) -> None:
    module = Labelled(change)
    right(on(module), module, forward, values(len(labels), D), torch.tensor(labels))


# --- false alarms, 2: one row of a table whose width is B -----------------------------------------------------------


class OneRow(nn.Module):
    def __init__(self, width: int, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("table", values(50, width, seed=9))
        self.lin, self.row, self.take = nn.Linear(D, 2), nn.Linear(width, 2), take

    def forward(self, x: Tensor, *shared: Tensor) -> Tensor:
        return self.lin(x) + self.row(self.take(*(shared or [self.table])))


ROWS_OF_TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda table: table[7:8],
    "first": lambda table: table[:1],
    "narrow": lambda table: table.narrow(0, 3, 1),
    "unsqueezed": lambda table: table[4].unsqueeze(0),
}


@pytest.mark.parametrize("samples", [2, 6])
@pytest.mark.parametrize("take", ROWS_OF_TABLES.values(), ids=ROWS_OF_TABLES)
def test_one_row_of_a_table_as_wide_as_the_batch(take: Callable[[Tensor], Tensor], samples: int) -> None:
    module = OneRow(samples, take)
    right(on(module), module, forward, values(samples, D))


def test_view_of_a_shared_argument_that_is_as_long_as_the_batch() -> None:
    """`(1, B, D)`, of which the model takes the first position."""
    module, shared = OneRow(D, lambda table: table[:, 0]), values(1, B, D, seed=4)
    expected = loop(
        module,
        Call((values(), shared)),
        B,
        take=lambda call, i: Call((call.args[0][i : i + 1], shared)),
    )
    model = on(module)
    total_loss(model, Call((values(), shared))).backward()
    assert_close_rows(rows_of(model), expected)


# --- false alarms, 3: a module's own chance ------------------------------------------------------------------------


def drops_itself(m: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x * m.scale + m.child(x)


def drops_by_a_count(m: Any, x: Tensor) -> Tensor:
    m.count = getattr(m, "count", 0) + 1
    return x * m.scale if m.count % 2 else m.child(x) + 0 * m.scale


def noise_of_numpy(m: Any, x: Tensor) -> Tensor:
    return x * m.scale + m.child(torch.from_numpy(np.random.normal(size=D)))  # noqa: NPY002


def noise_of_its_own(m: Any, x: Tensor) -> Tensor:
    return x * m.scale + m.child(torch.from_numpy(m.noise.normal(size=D)))


def noise_of_its_own_python(m: Any, x: Tensor) -> Tensor:
    return x * m.scale + m.chance.random() * m.child(x)


def start(m: Any, seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    for own in [part for part in m.modules() if isinstance(part, Own)]:
        own.noise, own.chance, own.count = np.random.default_rng(seed), random.Random(seed), 0


CHANCES = [drops_itself, drops_by_a_count, noise_of_numpy, noise_of_its_own, noise_of_its_own_python]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("does", CHANCES, ids=ids_of)
def test_chance_and_counters_of_a_module_are_no_mixing(does: Callable[..., Any], seed: int) -> None:
    """The first step, in which results are compared, and the next; drawn as the plain model draws."""
    module = Around(Own(does))
    start(module, seed)
    model = on(module)

    def seeded(m: Any, x: Tensor) -> Tensor:
        start(m, seed)
        return m(x)

    expected = loop(module, Call((values(),)), B, objective=objective_of(seeded))
    for _ in range(2):
        model.zero_grad()
        objective_of(seeded)(model, Call((values(),))).backward()
        unused = {name: torch.zeros_like(rows) for name, rows in expected.items()}
        used = {name: rows for name, rows in rows_of(model).items() if rows is not None}
        assert_close_rows(unused | used, expected)


class Residual(nn.Module):
    """What rounding leaves of a product in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight - (x.double() @ self.weight.double()).to(x.dtype)


@pytest.mark.parametrize("seed", range(3))
def test_result_that_is_rounding_noise_is_no_mixing(seed: int) -> None:
    set_seed(seed)
    model = on(Residual().float())
    model(torch.randn(7, 300).float()).sum().backward()


class Random(nn.Module):
    """Noise of a generator, in a shape of the test's."""

    def __init__(self, shape: Callable[[Tensor], tuple[int, ...]]) -> None:
        super().__init__()
        self.scale, self.shape, self.generator = nn.Parameter(torch.ones(D)), shape, torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.randn(self.shape(x), generator=self.generator)) * self.scale


@pytest.mark.parametrize("shape", [lambda x: x.shape, lambda x: x.shape[-1:]], ids=["per_sample", "shared"])
def test_noise_of_a_generator_is_no_mixing(shape: Callable[[Tensor], tuple[int, ...]]) -> None:
    model, x = on(Random(shape)), values()
    out = model(x)
    out.sum().backward()
    assert_close(model.scale.grad_sample, out.detach() / model.scale.detach())


def test_noise_of_numpy_per_sample_is_no_crash() -> None:
    """Noise in the shape of the batch, which no comparison can fix: its derivative tells that nothing is mixed."""
    model = on(Around(Own(lambda m, x: (x + torch.from_numpy(np.random.normal(size=x.shape))) * m.scale)))  # noqa: NPY002
    model(values()).sum().backward()
    assert_close(model.own.scale.grad, model.own.scale.grad_sample.sum(0))


# --- false alarms, 4: NaN, checkpoints, and backwards inside of backwards ------------------------------------------


def test_nan_in_a_backward_of_two_passes() -> None:
    model, bad = on(nn.Linear(D, 2)), values()
    bad[1] = torch.nan
    (model(bad).sum() + model(values(2, D, seed=4)).sum()).backward()
    assert model.weight.grad_sample.shape == (B + 2, 2, D)
    assert model.weight.grad_sample.isnan().flatten(1).any(1).tolist() == [False, True, False, False, False]


class InAndOut(nn.Module):
    """A layer in a checkpoint, and before or behind it."""

    def __init__(self, order: str, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.both, self.order, self.use_reentrant = nn.Linear(D, D), nn.Linear(D, D), order, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.order == "before":
            x = self.both(x).tanh()
        x = checkpoint(lambda h: self.both(h).sin(), x, use_reentrant=self.use_reentrant)
        return self.both(x) if self.order == "behind" else x


@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sizes", [(3,), (3, 2)])
def test_weight_inside_and_outside_of_a_checkpoint(sizes: tuple[int, ...], order: str, reentrant: bool) -> None:
    """In one pass, and in two that end in one backward."""
    module = InAndOut(order, False)
    model, calls = on(module), [Call((values(n, D, seed=n),)) for n in sizes]
    model.use_reentrant = reentrant
    sum(total_loss(model, call) for call in calls).backward()
    expected = [loop(module, call, n) for call, n in zip(calls, sizes, strict=True)]
    assert_close_rows(rows_of(model), {name: torch.cat([rows[name] for rows in expected]) for name in expected[0]})


PLACES = ["output", "0.weight", "2.weight", "after 0.weight", "after 2.weight"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("same", [True, False], ids=["same_model", "other_model"])
def test_backward_inside_a_hook_of_another_one(same: bool, place: str) -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    model = on(module)
    second = model if same else on(module)
    inner, todo = total_loss(second, Call((values(2, D, seed=5),))), [True]

    def hook(*_: Any) -> None:
        if todo:
            todo.clear()
            inner.backward()

    out = model(values())
    if place == "output":
        out.register_hook(hook)
    elif place.startswith("after"):
        model.get_parameter(place.removeprefix("after ")).register_post_accumulate_grad_hook(hook)
    else:
        model.get_parameter(place).register_hook(hook)
    sample_losses(out).sum().backward()
    rows, outer = loop(module, Call((values(2, D, seed=5),)), 2), loop(module, Call((values(),)), B)
    both = {name: torch.cat([rows[name], outer[name]]) for name in rows}
    for m, expected in [(model, both)] if same else [(model, outer), (second, rows)]:
        assert_close_rows(rows_of(m), expected)
        assert_close_rows(grads_of(m), {name: own.sum(0) for name, own in expected.items()})


# --- false alarms, 5: passes that nobody asks for any more ---------------------------------------------------------


class Words(nn.Module):
    """A frozen embedding, and behind it a checkpoint that no trainable layer is before."""

    def __init__(self, use_reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.words, self.lin, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.words.weight.requires_grad_(False)
        self.use_reentrant, self.inside = use_reentrant, inside

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(1, D, requires_grad=True) if self.inside else self.words(ids).requires_grad_()
        return self.head(checkpoint(self.block, h, ids, use_reentrant=self.use_reentrant))

    def block(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.lin(self.words(ids) + h if self.inside else h)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("skipped", [[], [4], [4, 2], [4, 2, 4, 2]], ids=str)
def test_checkpoint_after_skipped_batches(skipped: list[int], inside: bool, reentrant: bool) -> None:
    """Batches for which no backward was run, of the same size and of another."""
    module, ids = Words(False, inside), torch.tensor([3, 1, 3, 0])
    model = on(module)
    model.use_reentrant = reentrant
    kept = [model(ids[:size]) for size in skipped]
    total_loss(model, Call((ids,))).backward()
    assert_close_rows(rows_of(model), loop(module, Call((ids,)), 4))
    del kept


class Bags(nn.Module):
    """Bags by offsets, which say B, and a checkpoint behind or around them."""

    def __init__(self, use_reentrant: bool, around: bool) -> None:
        super().__init__()
        self.bags, self.lin = nn.EmbeddingBag(9, D), nn.Linear(D, D)
        self.use_reentrant, self.around = use_reentrant, around

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        if self.around:
            start = torch.zeros(1, D, requires_grad=True)
            return checkpoint(self.block, ids, offsets, start, use_reentrant=self.use_reentrant)
        return checkpoint(self.lin, self.bags(ids, offsets), use_reentrant=self.use_reentrant)

    def block(self, ids: Tensor, offsets: Tensor, start: Tensor) -> Tensor:
        return self.lin(self.bags(ids, offsets) + start)


@pytest.mark.parametrize("around", [False, True], ids=["behind", "around"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("skipped", [[], [B], [B, 2], [B, 2, B]], ids=str)
def test_bags_in_a_checkpoint_after_skipped_batches(skipped: list[int], reentrant: bool, around: bool) -> None:
    module = Bags(reentrant, around)
    model, plain_module = on(module), nn.Sequential(copy.deepcopy(module.bags), copy.deepcopy(module.lin))
    ids = torch.randint(9, (B, 2), generator=torch.Generator().manual_seed(2))
    kept = [model(ids[:size].flatten(), 2 * torch.arange(size)) for size in skipped]
    sample_losses(model(ids.flatten(), 2 * torch.arange(B))).sum().backward()
    expected = loop(plain_module, Call((ids,)), B)
    assert_close(model.bags.weight.grad_sample, expected["0.weight"])
    assert_close(model.lin.weight.grad_sample, expected["1.weight"])
    del kept


def objects_of_passes() -> int:
    gc.collect()
    return sum(type(item).__name__ == "Pass" for item in gc.get_objects())


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_abandoned_passes_are_let_go(reentrant: bool, inside: bool) -> None:
    model, before = on(Words(reentrant, inside)), objects_of_passes()
    for n in range(40):
        model(torch.tensor([1, 5, 2, 2])[: 2 + n % 2])
    assert objects_of_passes() <= before + 3


class Wrapped(Words):
    """Its result stands in an object of the user's own."""

    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(output=SimpleNamespace(logits=super().forward(ids)))


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_whose_result_is_in_an_object(inside: bool) -> None:
    """Batches for which no backward was run are no candidates, and are let go."""
    module, ids, before = Wrapped(True, inside), torch.tensor([3, 1, 3, 0]), objects_of_passes()
    model = on(module)
    for size in (4, 2) * 10:
        model(ids[:size])
    assert objects_of_passes() <= before + 3
    sample_losses(model(ids).output.logits).sum().backward()
    plain_module = Words(False, inside)
    plain_module.load_state_dict(module.state_dict())
    assert_close_rows(rows_of(model), loop(plain_module, Call((ids,)), 4))


# --- false alarms, 6: parameters of another model, and those that have left it --------------------------------------


def test_parameters_of_another_model_are_let_alone() -> None:
    """Guests of a `functional_call`, which are trained elsewhere."""
    mine, theirs = on(nn.Linear(D, 2)), nn.Linear(D, 2)
    functional_call(mine, dict(theirs.named_parameters()), (values(),)).sum().backward()
    theirs.zero_grad()
    theirs(values()).sum().backward()
    expected = torch.autograd.grad(theirs(values()).sum(), theirs.weight)[0]
    assert_close(theirs.weight.grad, expected)
    mine(values()).sum().backward()
    theirs(values()).sum().backward()


@pytest.mark.parametrize("way", ["swapped", "assigned", "deleted", "replaced_dict"])
def test_parameters_that_have_left_the_model_are_let_alone(way: str) -> None:
    model, x = on(nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))), values()
    model(x).sum().backward()
    left = model[1].weight
    if way == "swapped":
        model[1] = enn.convert(nn.Linear(D, 2)).per_sample(loss_reduction="sum")
    elif way == "assigned":
        model[1].load_state_dict({n: p.detach().clone() for n, p in model[1].state_dict().items()}, assign=True)
    elif way == "deleted":
        del model[1]
    else:
        model[1]._parameters["weight"] = nn.Parameter(left.detach().clone())
    left.grad = None
    F.linear(x, left).sum().backward()
    assert_close(left.grad, x.sum(0).expand(2, D))


# --- false alarms, 7: gradients by parameters that go nowhere ------------------------------------------------------


def test_torch_autograd_grad_by_parameters_beside_an_outside_use() -> None:
    module = nn.Linear(D, D)
    model, x = on(module), values()

    def loss(m: Any) -> Tensor:
        return sample_losses(m(x)).sum() + m.weight.square().sum()

    mine = torch.autograd.grad(loss(model), list(model.parameters()))
    theirs = torch.autograd.grad(loss(module), list(module.parameters()))
    for ours, plain_one in zip(mine, theirs, strict=True):
        assert_close(ours, plain_one)
    assert model.weight.grad is None


def test_outer_step_of_maml() -> None:
    """By parameters through an inner step that was written with weights."""
    module = nn.Linear(D, 2)
    model, x = on(module), values()
    grads = []
    for m in (model, module):
        inner = torch.autograd.grad(m(x).square().sum(), list(m.parameters()), create_graph=True)
        weight, bias = (p - 0.1 * g for p, g in zip(m.parameters(), inner, strict=True))
        grads.append(torch.autograd.grad(F.linear(x, weight, bias).square().sum(), list(m.parameters())))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs)


# --- false alarms, 8: the hooks of another library -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_opacus_with_its_hooks_on_a_model_in_the_mode() -> None:
    opacus = pytest.importorskip("opacus")
    model = enn.convert(nn.Linear(D, 2)).per_sample()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values(8, D)), batch_size=4)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        wrapped, _, batches = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, **arguments
        )
        for (x,) in batches:
            wrapped(x).sum().backward()

    with pytest.raises((enn.PerSampleError, ValueError, NotImplementedError), match=r"(?s)Opacus.*no_op"):
        train()


# --- beyond --------------------------------------------------------------------------------------------------------


def test_settings_stay_over_off_and_on() -> None:
    model, x = nn.Linear(D, 2), values()
    converted = enn.convert(model).per_sample(loss_reduction="sum", materialize=True, accumulate_grad=False)
    converted.per_sample(False).per_sample(True)
    total_loss(converted, Call((x,))).backward()
    assert converted.weight.grad is None
    assert_close_rows(rows_of(converted), loop(model, Call((x,)), B))
    converted.per_sample(accumulate_grad=True)
    total_loss(converted, Call((x,))).backward()
    assert_close(converted.weight.grad, converted.weight.grad_sample.sum(0))
    again = enn.per_sample(copy.deepcopy(converted), loss_reduction="mean")
    total_loss(again, Call((x,))).backward()
    assert_close(again.weight.grad, again.weight.grad_sample.mean(0))


@pytest.mark.parametrize("name", ["batch_size", "batch_first"])
def test_settings_of_shape_stay(name: str) -> None:
    model = enn.convert(nn.Sequential(nn.Linear(D, 2))).per_sample(**{name: 6 if name == "batch_size" else False})
    model.per_sample(False).per_sample()
    x = values(6, D) if name == "batch_size" else values(5, 6, D)
    model(x).sum().backward()
    assert len(model[0].weight.grad_sample) == 6


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(values(D, 2, seed=11)), nn.Parameter(values(2, D, seed=12))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def with_low_rank(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", LowRank())


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def orthogonal(layer: nn.Module) -> nn.Module:
    return parametrizations.orthogonal(layer, orthogonal_map="cayley")


def chained(layer: nn.Module) -> nn.Module:
    return with_low_rank(symmetric(layer))


PARAMETRIZATIONS = [parametrizations.weight_norm, with_low_rank, symmetric, orthogonal, chained]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("register", PARAMETRIZATIONS, ids=ids_of)
def test_derivatives_of_rows_through_a_parametrization(register: Callable[[nn.Module], nn.Module]) -> None:
    """The gradient of a function of all rows, by the parameters and by the input, against torch.func."""
    module = nn.Sequential(register(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 2))
    model, x = on(module), values().requires_grad_()
    given = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    def own_loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(module, parameters, (row.unsqueeze(0),)).sin().sum()

    rows = vmap(grad(own_loss), in_dims=(None, 0))(given, x)
    expected = torch.autograd.grad(sum(own.pow(3).sum() for own in rows.values()), [*given.values(), x])
    model(x).sin().sum().backward(create_graph=True)
    mine = rows_of(model)
    assert_close_rows(mine, {name: own.detach() for name, own in rows.items()})
    parameters = dict(model.named_parameters())
    loss = sum(mine[name].pow(3).sum() for name in given)
    found = torch.autograd.grad(loss, [*(parameters[name] for name in given), x])
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 1e-8)


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the numbers that are copied from one tensor to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in ("aten::copy_", "aten::cat", "aten::clone", "aten::_to_copy", "aten::_foreach_copy_"):
            written = result if isinstance(result, Tensor) else args[0]
            self.count += written.numel() if isinstance(written, Tensor) else 0
        return result


@pytest.mark.parametrize("materialize", [True, False])
def test_accumulating_copies_each_row_a_bounded_number_of_times(materialize: bool) -> None:
    """Over n backwards, the numbers copied grow with n, not with its square."""
    copied = []
    for steps in (16, 64):
        model = on(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), materialize=materialize)
        with Copies() as copies:
            for _ in range(steps):
                model(values(2, 8)).sum().backward()
        copied.append(copies.count / steps)
        assert len(model[0].weight.grad_sample) == 2 * steps
    assert copied[1] <= 1.5 * copied[0] + 8


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "automatic": lambda norms: 1 / (norms + 0.01),
    "constant": lambda norms: torch.full_like(norms, 0.5),
    "as_a_number": lambda norms: (0.3 / norms).clamp(max=1),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_clipping_by_a_function(function: Callable[[Tensor], Tensor], reduction: str, named: bool) -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    model, rows = on(module), loop(module, Call((values(),)), B)
    total_loss(model, Call((values(),))).backward()
    norms = enn.clip_grad_sample_norms_(model, {"0": function, "2": 0.5} if named else function, reduction=reduction)
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]] if named else [list(rows)]
    count = B if reduction == "mean" else 1
    for group, key in zip(groups, ("0", "2"), strict=False):
        own = torch.cat([rows[name].flatten(1) for name in group], 1).norm(dim=1)
        assert_close(norms[key] if named else norms, own)
        factors = (0.5 / own).clamp(max=1) if named and key == "2" else function(own)
        for name in group:
            assert_close(model.get_parameter(name).grad, torch.tensordot(factors, rows[name], 1) / count)


def test_one_pass_without_the_mode_and_within_a_forward_of_its_own() -> None:
    module = parts()
    plain_model = enn.convert(module)
    with enn.one_pass(plain_model, B):
        assert_close(plain_model(values()), module(values()))
    model = on(module)

    def step(m: Any, x: Tensor) -> Tensor:
        with enn.one_pass(m, len(x)), enn.one_pass(m, len(x)):
            return m(x)

    right(model, module, lambda m, x: step(m, x) if m is model else m(x))


@pytest.mark.parametrize("first", [nullcontext, enn.one_pass], ids=["call", "one_pass"])
def test_one_pass_does_not_go_on_from_another_call(first: Callable[..., Any]) -> None:
    """Each sample would have two rows, which are clipped apart."""
    model = on(nn.ModuleDict({"encoder": nn.Linear(D, D), "decoder": nn.Linear(D, D)}))
    with first(model, B) if first is enn.one_pass else first():
        h = model["encoder"](values(B, D))
    refused = pytest.raises(
        enn.PerSampleError, match=r"by its arguments or .* Make both calls within one_pass\(model, 3\)"
    )
    with refused, enn.one_pass(model, B):
        model["decoder"](h)
    with enn.one_pass(model, B):
        model["decoder"](h.detach())


def test_one_pass_that_fails_leaves_nothing_open() -> None:
    module, model = parts(), on(parts())
    hook = model.enc.register_forward_hook(fails_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), enn.one_pass(model, 2):
        model.enc(values(2, D))
    hook.remove()
    right(model, module, forward)


def test_one_pass_of_no_samples() -> None:
    model = on(parts())
    with enn.one_pass(model, 0):
        model(values(0, D)).sum().backward()
    assert len(model.enc.weight.grad_sample) == 0


def test_samples_made_of_other_samples() -> None:
    """Of two calls in one graph the rows would stand side by side, and clipping would not bound what a sample adds."""
    module, x = parts(), values()
    del module.shift, module.part
    model = on(module)

    def folded(m: Any, x: Tensor) -> Tensor:
        return m.head(m.enc(x).repeat_interleave(2, 0)).unflatten(0, (-1, 2))

    def unfolded(m: Any, x: Tensor) -> Tensor:
        return m.head(m.enc(x).unsqueeze(1).expand(-1, 2, -1))

    with pytest.raises(enn.PerSampleError, match=r"head \(Linear\): it is called with 6 samples.*the 3 samples of"):
        folded(model, x)
    model.head(model.enc(x).detach().repeat_interleave(2, 0)).sum().backward()
    assert model.enc.weight.grad_sample is None
    assert len(model.head.weight.grad_sample) == 2 * B
    model.zero_grad()
    together = on(module)
    with enn.one_pass(together, B):
        right(together, module, unfolded, x)


class Kept:
    """What a caller gives to call after call, as a cache."""

    codes: Tensor


class GoesOn(nn.Module):
    """Its second call goes on from what the first one has left, in an object or in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def begin(self, x: Tensor, kept: Any = None) -> None:
        kept = self if kept is None else kept
        kept.codes = self.enc(x)

    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        return self.head(x + (self if kept is None else kept).codes)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", [Kept(), None], ids=["object", "module"])
def test_samples_made_of_other_samples_that_were_kept(kept: Any) -> None:
    prefix, module = values(1, D, seed=2), GoesOn()
    model = on(module)
    model.begin(prefix, kept)
    words = "computed from the 1 samples.*give the earlier call a row" if kept else "comes from the 1 samples of"
    with pytest.raises(enn.PerSampleError, match=rf"GoesOn: .*{words}"):
        model(values(), kept)

    def begun_with(rows: int) -> Step:
        def step(m: Any, x: Tensor) -> Tensor:
            m.begin(prefix.expand(rows if len(x) == B else 1, -1), kept)
            return m(x, kept)  # type: ignore[no-any-return]

        return step

    for rows in (1, B):
        model.zero_grad()
        with enn.one_pass(model, B):
            right(model, module, begun_with(rows))
    (kept or model).codes.detach_()
    model(values(), kept).sum().backward()


@pytest.mark.parametrize("kept", [Kept(), None], ids=["object", "module"])
def test_a_graph_that_is_left_for_a_call_that_goes_on(kept: Any) -> None:
    model, x = on(GoesOn()), values()
    model.begin(x, kept)
    model(x, kept).sum().backward(retain_graph=True)
    if kept is None:
        with pytest.raises(enn.PerSampleError, match="GoesOn: its result comes from the 3 samples of an earlier call"):
            model(x)
    else:
        model(x, kept).sum().backward()
        assert len(model.enc.weight.grad_sample) == B
    (kept or model).codes.detach_()
    model(x, kept).sum().backward()


class Checkpointed(nn.Sequential):
    """Runs its layers again in the backward."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_samples_made_of_other_samples_behind_a_checkpoint(*, reentrant: bool) -> None:
    module = nn.ModuleDict({"enc": Checkpointed(nn.Linear(D, D)), "head": nn.Linear(D, 2)})
    module["enc"].reentrant = reentrant
    model = on(module)
    codes = model["enc"](values().requires_grad_())
    with pytest.raises(enn.PerSampleError, match=r"head \(Linear\): it is called with 6 samples.*the 3 samples of"):
        model["head"](codes.repeat_interleave(2, 0))


def test_samples_made_of_another_models_samples() -> None:
    """Each model has rows of its own samples; that one image may be behind several of the other's is said."""
    encoder, decoder = on(nn.Linear(D, D)), on(nn.Linear(D, 2))
    codes = encoder(values())
    with pytest.warns(enn.PerSampleWarning, match=r"Linear is called with 6 samples.*from the 3 samples of another"):
        decoder(codes.repeat_interleave(2, 0)).sum().backward()
    assert len(encoder.weight.grad_sample) == B
    assert len(decoder.weight.grad_sample) == 2 * B
    for model in (encoder, decoder):
        model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder(encoder(values())).sum().backward()  # as many samples
        encoder(values()), decoder(values(2 * B, D)).sum().backward()  # they do not meet
        decoder(encoder(values()).detach().repeat_interleave(2, 0)).sum().backward()


def test_clipping_says_that_it_replaces_other_gradients() -> None:
    model, x = on(nn.Linear(D, 2)), values()
    replaced = r"clip_grad_sample_norms_: .grad of the parameters \['weight'\] is more than the sum"

    def step(after: Callable[[Tensor], Any] = lambda grad: None) -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        after(model.weight.grad)
        enn.clip_grad_sample_norms_(model, 1.0)
        return model.weight.grad.clone()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right_grad = step()
        for harmless in (lambda grad: grad.mul_(0.5), lambda grad: grad.add_(grad)):
            assert_close(step(harmless), right_grad)
        enn.clip_grad_sample_norms_(model, 1.0)
    with pytest.warns(enn.PerSampleWarning, match=replaced):
        assert_close(step(lambda grad: grad.add_(100.0)), right_grad)


def test_clipping_says_that_it_replaces_what_was_there_before() -> None:
    """A backward with the mode off, or one whose rows `per_sample` has dropped."""
    model, x = on(nn.Linear(D, 2)), values()
    replaced = r"\['weight', 'bias'\] is more than the sum.*with per-sample mode off"
    for first in (False, True):
        model.zero_grad()
        model.per_sample(first)
        model(x).square().sum().backward()
        model.per_sample(True)
        model(x).sum().backward()
        with pytest.warns(enn.PerSampleWarning, match=replaced):
            enn.clip_grad_sample_norms_(model, 1.0)
        enn.clip_grad_sample_norms_(model, 1.0)
    for clear in (lambda p: p.grad.zero_(), lambda p: setattr(p, "grad", None)):
        model.per_sample(False)
        model(x).square().sum().backward()
        model.per_sample(True)
        for parameter in model.parameters():
            clear(parameter)
        model(x).sum().backward()
        enn.clip_grad_sample_norms_(model, 1.0)


AGAIN = (
    r"^clip_grad_sample_norms_: 4 of the per-sample gradients held were clipped once already, before the parameters "
    r"\['weight', 'bias'\] were changed, as by an optimizer's step, so that these samples count again in \.grad\. "
    r"Clear the gradients of the last step before the next backward: optimizer\.zero_grad\(\)\.$"
)


def clipped_step(model: nn.Module, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    norms = enn.clip_grad_sample_norms_(model, 1.0)
    assert isinstance(norms, Tensor)
    return norms


def changed_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), foreach=True).step(),
    "by hand": changed_by_hand,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("settings", [{}, {"materialize": True}, {"keep_factors": True}], ids=str)
def test_clipping_says_that_a_zero_grad_is_missing(change: Callable[[nn.Module], Any], settings: Any) -> None:
    model = on(nn.Linear(D, 2), **settings)
    clipped_step(model, values(4, D))
    change(model)
    with pytest.warns(enn.PerSampleWarning, match=AGAIN):
        assert len(clipped_step(model, values(3, D))) == 7
    assert len(clipped_step(model, values(3, D))) == 10  # no step came in between
    change(model)
    with pytest.warns(enn.PerSampleWarning, match="10 of the per-sample gradients held were clipped once already"):
        enn.clip_grad_sample_norms_(model, 1.0)


UNCLEARED = (
    r"^clip_grad_sample_norms_: 4 of the per-sample gradients held were clipped once already; since then other "
    r"gradients were cleared, and those of the parameters \['0\.weight', '0\.bias'\] were not, so that these samples "
    r"count again in \.grad\. Freeze the parameters that no optimizer trains, or clear by model\.zero_grad\(\)\.$"
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"materialize": True}, {"keep_factors": True}], ids=str)
def test_clipping_says_that_the_optimizer_lacks_parameters(settings: Any, fused: bool) -> None:
    model = on(nn.Sequential(nn.Linear(D, 3), nn.Linear(3, 2)), **settings)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, fused=fused)
    assert len(clipped_step(model, values(4, D))) == 4
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match=UNCLEARED):
        assert len(clipped_step(model, values(3, D))) == 7
    model.zero_grad()
    model[0].requires_grad_(False)
    for _ in range(2):
        assert len(clipped_step(model, values(4, D))) == 4
        optimizer.zero_grad()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_clipping_that_adds_says_that_a_zero_grad_is_missing(change: Callable[[nn.Module], Any]) -> None:
    model = on(nn.Linear(D, 2), accumulate_grad=False)
    for clear in (None, True, False):  # each but the first once after the optimizer's step
        if clear is not None:
            torch.optim.SGD(model.parameters()).zero_grad(set_to_none=clear)
        for _ in range(2):  # the parts of one step
            clipped_step(model, values(4, D))
        change(model)
    with pytest.warns(
        enn.PerSampleWarning, match=r"\.grad holds the clipped sum from before .*'weight', 'bias'.*zero_grad"
    ):
        clipped_step(model, values(4, D))


def test_a_zero_grad_is_missing_where_clipping_was_a_part_of_a_graph() -> None:
    model = on(nn.Linear(D, 2))
    step = enn.compile(lambda x: clipped_step(model, x), backend="eager")
    for _ in range(4):
        model.zero_grad()
        step(values(4, D))
        changed_by_hand(model)
    with pytest.warns(enn.PerSampleWarning, match=AGAIN):
        clipped_step(model, values(3, D))


CLEARED: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model.zero_grad(),
    "model, zeros": lambda model: model.zero_grad(set_to_none=False),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "optimizer, zeros": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "data": lambda model: [parameter.grad.data.zero_() for parameter in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_zero_grad_is_missing_after_one(clear: Callable[[nn.Module], Any], compiled: bool) -> None:
    """Neither in steps of several parts, without a change in between."""
    model = on(nn.Linear(D, 2))
    state = {name: 2 * value for name, value in model.state_dict().items()}

    def first_part(x: Tensor) -> Tensor:
        model.zero_grad()
        return clipped_step(model, x)

    first = enn.compile(first_part, backend="eager") if compiled else lambda x: clipped_step(model, x)
    for _ in range(4):
        first(values(4, D))
        clipped_step(model, values(4, D))
        enn.clip_grad_sample_norms_(model, 0.5)
        changed_by_hand(model)
        clear(model)
        model.load_state_dict(state)


def test_no_zero_grad_is_missing_in_a_second_backward_of_a_graph() -> None:
    """The pass is that of before, its rows are new."""
    model = on(nn.Embedding(5, D))  # whose backward does not look at the weight
    output = model(torch.tensor([[1, 2], [3, 4]]))
    for _ in range(3):
        output.square().sum().backward(retain_graph=True)
        enn.clip_grad_sample_norms_(model, 1.0)
        changed_by_hand(model)
        model.zero_grad()


def test_an_embedding_changes_itself() -> None:
    """`max_norm` scales entries down in each forward, which is no step."""
    model, index = on(nn.Embedding(5, D, max_norm=0.5)), torch.tensor([[1, 2], [3, 4]])
    for _ in range(3):
        clipped_step(model, index)
    assert len(model.weight.grad_sample) == 6


class Pooled(nn.Module):
    """Adds up rows by an index, as those of sets that lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor, which: Tensor, count: int) -> Tensor:
        return torch.zeros(count, D).index_add(0, which, self.first(x))


def test_fewer_results_than_samples() -> None:
    """What the model takes for samples may be parts of the user's."""
    model = on(Pooled())
    with pytest.warns(enn.PerSampleWarning, match="Pooled is called with 6 samples.* and returns 2: there are 6 per-s"):
        model(values(6, D), torch.arange(6) // 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(values(6, D), torch.arange(6), 6)
        model(values(6, D), torch.arange(6) // 3, 12)
        on(Pooled(), batch_size=6)(values(6, D), torch.arange(6) // 3, 2)


def test_two_calls_of_other_sizes_that_do_not_meet() -> None:
    model = on(parts())
    small, large = model(values()), model(values(B + 2, D))
    (small.sum() + large.sum()).backward()
    assert len(model.head.weight.grad_sample) == 2 * B + 2


def test_cleared_rows_make_room_before_the_next_forward() -> None:
    model = on(parts())
    model(values()).sum().backward()
    held = weakref.ref(model.head.weight.grad_sample)
    torch.optim.SGD(model.parameters()).zero_grad()
    model(values())
    gc.collect()
    assert held() is None
    assert model.head.weight.grad_sample is None


class Turned(nn.Module):
    """Recurrent over `(T, B, features)`, with the samples of its input first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0].transpose(0, 1))


def test_time_first_layer_where_there_are_as_many_steps_as_samples() -> None:
    """Where the samples stand is said, or known from an input of other sizes."""
    module, square = Turned(), values(B, B, D)
    with pytest.raises(enn.PerSampleError, match=r"rnn \(LSTM\).*both have size 3.*batch_first=True\) if they stand f"):
        on(module)(square)
    right(on(module, batch_first=True), module, forward, square)
    model = on(module)
    model(values(B, B + 1, D))
    right(model, module, forward, square)
    alone = nn.LSTM(D, D)
    for model in (on(alone), on(alone, batch_first=False)):
        y, _ = model(square)
        y.sum().backward()
        assert_close(model.weight_hh_l0.grad_sample.sum(0), model.weight_hh_l0.grad)


# --- samples in another order -----------------------------------------------------------------------------------------


class Moved(nn.Module):
    """Two layers, of which the second one sees the samples in another order; it is undone behind it."""

    def __init__(self, away: Callable[..., Tensor], back: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.away, self.back = away, back

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        moved = self.second(self.away(self.first(x), order))
        return self.last(self.back(moved, order.argsort()))


def written(h: Tensor, order: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result[order] = h
    return result


def written_row_by_row(h: Any, rows: list[int], result: Tensor | None = None) -> Tensor:
    result = torch.zeros_like(h) if result is None else result
    for place, row in enumerate(rows):
        result[place - len(h)] = h[row]
    return result


def copied_row_by_row(h: Tensor, rows: list[int]) -> Tensor:
    result = torch.zeros_like(h)
    for place, row in enumerate(rows):
        result[place].copy_(h[row])
    return result


def added_row_by_row(h: Tensor, rows: list[int]) -> Tensor:
    result = torch.zeros_like(h)
    for place, row in enumerate(rows):
        if place % 2:
            result.select(0, place).add_(h.narrow(0, row, 1)[0])
        else:
            result[place] += h[row]
    return result


def masked_apart(h: Tensor, order: Tensor) -> Tensor:
    is_first = order != len(h) - 1
    return torch.cat([2 * h[is_first], 2 * h[~is_first]])


def written_by_masks(h: Tensor, order: Tensor) -> Tensor:
    result, is_first = torch.zeros_like(h), order.argsort() != len(h) - 1
    result[is_first], result[~is_first] = 2 * h[:-1], 2 * h[-1:]
    return result


def written_to_views(h: Tensor, order: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    head = result[: len(h) - 1]
    for place, row in enumerate(order.tolist()[:-1]):
        head[place] = h[row]
    result[len(h) - 1 :][:] = h[order.tolist()[-1]]
    return result


def written_to_turned_views(h: Tensor, order: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    for place, row in enumerate(order.tolist()):
        result[place : place + 1].t()[:, 0] = h[row]
    return result


def across(h: Tensor, order: Tensor) -> Tensor:
    return order.unsqueeze(1).expand(-1, h.shape[1])


MOVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "index": (lambda h, order: h[order], lambda h, order: h[order]),
    "index_of_slices": (lambda h, order: h[order, :], lambda h, order: h[order, ...]),
    "list": (lambda h, order: h[order.tolist()], lambda h, order: h[order.tolist(), :]),
    "array": (lambda h, order: h[order.numpy()], lambda h, order: h[tuple(order.tolist()), ...]),
    "index_select": (
        lambda h, order: h.index_select(0, order),
        lambda h, order: torch.index_select(h, dim=-2, index=order),
    ),
    "gather": (lambda h, order: h.gather(0, across(h, order)), lambda h, order: torch.gather(h, 0, across(h, order))),
    "take_along_dim": (
        lambda h, order: torch.take_along_dim(h, order[:, None], 0),
        lambda h, order: h.take_along_dim(order[:, None], dim=0),
    ),
    "flip": (lambda h, order: h.flip(0), lambda h, order: torch.flip(h, [0, 1]).flip(1)),
    "flipud": (lambda h, order: h.flipud(), lambda h, order: torch.flipud(h)),
    "rot90": (lambda h, order: torch.rot90(h, 2).flip(1), lambda h, order: h.rot90(2, (0, 1)).fliplr()),
    "reduce": (
        lambda h, order: torch.zeros_like(h).index_reduce(0, order, h, "mean", include_self=False),
        lambda h, order: torch.zeros_like(h).scatter_reduce(0, across(h, order), h, "sum"),
    ),
    "split": (
        lambda h, order: torch.cat(h.vsplit(len(h))[::-1]),
        lambda h, order: torch.cat([NARROW(h, 0, i, 1) for i in range(len(h))][::-1]),
    ),
    "turned": (lambda h, order: h.t()[:, order].t(), lambda h, order: h.mT.index_select(1, order).mT),
    "behind": (lambda h, order: h.unsqueeze(0).flip(1).squeeze(0), lambda h, order: h[None][:, order][0]),
    "roll": (lambda h, order: h.roll(1, 0), lambda h, order: torch.roll(h, -1, dims=(0,))),
    "cat": (
        lambda h, order: torch.cat([h[1:], h[:1]]),
        lambda h, order: torch.concat([h.tensor_split([-1])[i] for i in (1, 0)], dim=-2),
    ),
    "cat_of_views": (
        lambda h, order: torch.cat([h.view(len(h), 2, -1)[-1:], h.view(len(h), 2, -1)[:-1]]).view(h.shape),
        lambda h, order: torch.concatenate([h.t()[:, 1:], h.t()[:, :1]], axis=1).t(),
    ),
    "stack": (
        lambda h, order: torch.stack(h.unbind()[::-1]),
        lambda h, order: torch.stack([h[-1 - i] for i in range(len(h))], dim=0),
    ),
    "set": (lambda h, order: h[order], lambda h, order: written(h, order.argsort())),
    "row_by_row": (
        lambda h, order: written_row_by_row(h, order.tolist()),
        lambda h, order: written_row_by_row(h.t().contiguous().t(), order.tolist()),
    ),
    "rows_after_arithmetic": (
        lambda h, order: torch.stack([h[row] + 1 for row in order.tolist()]),
        lambda h, order: written_row_by_row([2 * row for row in h], order.tolist(), torch.zeros_like(h)),
    ),
    "rows_in_place": (
        lambda h, order: copied_row_by_row(h, order.tolist()),
        lambda h, order: added_row_by_row(h, order.tolist()),
    ),
    "rows_by_masks": (masked_apart, written_by_masks),
    "rows_of_views": (written_to_views, written_to_turned_views),
    "parts_after_arithmetic": (
        lambda h, order: torch.cat([2 * h[1:], 2 * h[:1]]),
        lambda h, order: torch.vstack([part * 2 for part in h.split([len(h) - 1, 1])][::-1]),
    ),
    "parts_of_parts": (
        lambda h, order: torch.cat([torch.cat([h[1:2], h[:1]]), h[2:]]),
        lambda h, order: torch.cat([2 * torch.vstack([h[1:2], h[:1]]), 2 * h[2:]]),
    ),
    "padded": (
        lambda h, order: nn.utils.rnn.pad_sequence([h[row] for row in order.tolist()], batch_first=True),
        lambda h, order: nn.utils.rnn.pad_sequence([h[row, :1].expand(D) for row in order.tolist()], True),
    ),
    "index_copy": (
        lambda h, order: torch.zeros_like(h).index_copy(0, order.argsort(), h),
        lambda h, order: torch.zeros_like(h).index_add(0, order.argsort(), h),
    ),
    "index_put": (
        lambda h, order: torch.zeros_like(h).index_put((order.argsort(),), h),
        lambda h, order: torch.zeros_like(h).scatter(0, across(h, order.argsort()), h),
    ),
}
SORTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(0).values,
    "msort": lambda h: torch.msort(h),
    "topk": lambda h: h.topk(len(h), 0).values,
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("way", ["forth", "back"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_samples_in_another_order(move: tuple[Any, Any], way: str) -> None:
    """Their rows in the layer between would be those of other samples: the model goes sample by sample."""
    module = Moved(*(move if way == "forth" else reversed(move)))
    with pytest.warns(enn.PerSampleWarning, match="samples have taken each other's places .*test_trust.py"):
        right(on(module), module, forward)
    with pytest.raises(enn.PerSampleError, match="samples have taken each other's places"):
        on(module, escalate=False)(values())


def test_rows_written_in_their_own_places() -> None:
    """And steps of all samples, of which there are as many as samples, into a tensor that has time first."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = written_row_by_row(h, list(range(len(h))))
            result = torch.zeros_like(h)
            head = result[:2]
            head[0], head[1:] = h[0], h[1:2]
            tail = result[2:]
            tail[:] = h[2:]
            h = result
            steps = h.unsqueeze(1).expand(-1, B, -1).contiguous()  # (B, T, D)
            time_first = torch.zeros(B, len(h), D)
            for step in range(B):
                time_first[step] = steps[:, step]
            return self.last(time_first.sum(0))

    module = Written()
    right(on(module, escalate=False), module, forward)


def test_rows_of_a_table_that_the_model_is_called_with() -> None:
    """It has several rows for each sample, but they belong to none: to look one up moves no sample."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.last(self.first(x) + table[(100 * x[:, 0]).long() % len(table)])

    module, table = Table(), values(2 * B, D)
    right(on(module, escalate=False), module, lambda m, x: m(x, table))


def test_statistics_of_each_sample_in_a_model_with_time_first() -> None:
    """What `batch_norm` takes for channels are the samples."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:  # (T, B, D)
            h = nn.functional.batch_norm(self.first(x), None, None, training=True)
            return self.last(h).transpose(0, 1)

    module, x = Normalized(), values(2 * B, B, D)
    expected = loop(module, Call((x,)), B, take=lambda call, i: Call((call.args[0][:, i : i + 1],)))
    model = on(module, batch_first=False, escalate=False)
    total_loss(model, Call((x,))).backward()
    assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize("sort", SORTS.values(), ids=SORTS)
def test_samples_that_are_sorted(sort: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(enn.PerSampleError, match="samples have taken each other's places"):
        on(TurnedAbout(sort, lambda h: h), escalate=False)(values())


@pytest.mark.parametrize("own", [False, True], ids=["layers", "general_rule"])
def test_samples_that_are_in_order_by_chance_at_first(own: bool) -> None:
    """What the first batch does not show is looked at in each."""
    module: nn.Module = Moved(*MOVES["index"])
    if own:
        module = Own(lambda m, x: (x[x[:, 0].argsort()] * m.scale)[x[:, 0].argsort().argsort()] + m.child(x))
    model, x = on(module), values()
    right(model, module, forward, x[x[:, 0].argsort()])
    model.zero_grad()
    with nullcontext() if own else pytest.warns(enn.PerSampleWarning, match="each other's places"):
        right(model, module, forward, x)


@pytest.mark.parametrize("frozen", [False, True])
def test_arguments_in_another_order(*, frozen: bool) -> None:
    """Before the first layer with rows: those would be in another order than the samples of the call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort(descending=True)
            return self.second(self.first(x[order]).tanh())[order.argsort()]

    module, x = Model(), values()
    module.first.requires_grad_(not frozen)
    x = x[x[:, 0].argsort()]
    with pytest.warns(
        enn.PerSampleWarning, match=r"(first|second) \(Linear\): in its input samples have taken each oth"
    ):
        right(on(module), module, forward, x)


def test_samples_that_a_hook_moves() -> None:
    """In the model they are seen to move; what its own hook returns are its samples, in that order."""
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    x, order = values(), torch.tensor([2, 0, 1])
    expected = loop(module, Call((x,)), B, objective=objective_of(forward))
    model = on(module, escalate=False)
    model.register_forward_pre_hook(lambda _, args: (args[0][order],))
    sample_losses(model(x)[order.argsort()]).sum().backward()
    assert_close_rows(rows_of(model), {name: rows[order] for name, rows in expected.items()})
    model[2].register_forward_pre_hook(lambda _, args: (args[0][order],))
    with pytest.raises(enn.PerSampleError, match="samples have taken each other's places"):
        model(x)


UNIQUE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "function": lambda x: torch.unique(x, dim=0, return_inverse=True),
    "method": lambda x: x.unique(dim=0, return_inverse=True),
}


@pytest.mark.parametrize("unique", UNIQUE.values(), ids=UNIQUE)
def test_samples_that_are_computed_once_each(unique: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """What is unique is sorted, and of B rows where none is there twice."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            each, places = unique(x)
            return self.second(self.first(each)[places])

    module = Model()
    with pytest.warns(enn.PerSampleWarning, match=r"each other's places \(unique"):
        right(on(module), module, forward)


class Reversed(nn.Module):
    """Two layers, the second one on the reversed batch, if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.told = nn.Linear(D, D), nn.Linear(D, 2), False

    def forward(self, x: Tensor, *, backwards: bool = False) -> Tensor:
        h = self.first(x)
        if backwards or self.told or x.sum() > 100:
            return self.second(h.flip(0)).flip(0)
        return self.second(h)


@pytest.mark.parametrize("by", ["argument", "attribute", "values"])
def test_samples_that_only_a_later_forward_moves(by: str) -> None:
    """Each forward is looked at: the first one may have gone another way."""
    module, x = Reversed(), values()
    model = on(module)
    right(model, module, forward)
    model.zero_grad()
    if by == "attribute":
        model.told = module.told = True
    with pytest.warns(enn.PerSampleWarning, match=r"each other's places \(flip"):
        right(model, module, lambda m, x: m(x, backwards=by == "argument"), x + 100 * (by == "values"))


class TurnedAbout(nn.Module):
    """Layers whose inputs a test turns."""

    def __init__(self, away: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.away, self.back = away, back

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return self.last(self.back(self.second(self.away(self.first(x)).tanh())))


def by_head(h: Tensor) -> Tensor:
    return h.reshape(len(h), -1, D // 2)


TURNS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "transpose": (lambda h: h.transpose(0, 1), lambda h: torch.transpose(h, 1, 0)),
    "permute": (lambda h: h.permute(1, 0, 2), lambda h: h.permute((1, 0, 2))),
    "swapaxes": (lambda h: h.swapaxes(0, 1), lambda h: h.swapdims(1, 0)),
    "movedim": (lambda h: h.movedim(0, 1), lambda h: torch.moveaxis(h, 0, 1)),
    "stack": (lambda h: torch.stack([h[:, t] for t in range(h.shape[1])]), lambda h: torch.stack(h.unbind(1))),
    "einsum": (lambda h: torch.einsum("btd -> tbd", h), lambda h: torch.einsum("tbd, d -> btd", [h, torch.ones(D)])),
    "twice": (lambda h: h.permute(1, 2, 0).transpose(1, 2), lambda h: h.transpose(0, 1)),
    "heads": (
        lambda h: by_head(h.transpose(0, 1)).transpose(0, 1).tanh().transpose(0, 1).reshape(h.shape[1], -1, D),
        lambda h: h.transpose(0, 1),
    ),
}


TURNED = r"from \w+, line .*test_trust.py, has the samples in dimension"
PLACES = rf"{TURNED}|each other's places \(.*test_trust.py"


@pytest.mark.parametrize("way", ["forth", "back"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_positions_that_are_as_many_as_the_samples(turn: tuple[Any, Any], way: str, *, batch_first: bool) -> None:
    """Turned about, they would be taken for samples."""
    module = TurnedAbout(*(turn if way == "forth" else reversed(turn)))
    with pytest.warns(enn.PerSampleWarning, match=TURNED):
        right(on(module), module, forward, values(B, B, D))
    with pytest.raises(enn.PerSampleError, match=f"{TURNED}|comes from a part of the samp"):
        on(module, escalate=False, batch_first=batch_first)(values(B, B, D))


def numbered(h: Tensor) -> Tensor:
    """The numbers of all positions, `(B, T)`."""
    return torch.arange(h.shape[0] * h.shape[1]).view(h.shape[:2])


FOLDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "turned": (
        lambda h: h.view(-1, D)[numbered(h).T.flatten()].view(h.shape[1], -1, D),
        lambda h: h.transpose(0, 1),
    ),
    "moved": (
        lambda h: h.view(-1, D)[numbered(h).roll(1, 0).flatten()].view(h.shape),
        lambda h: h.view(-1, D).index_select(0, numbered(h).roll(-1, 0).flatten()).view(h.shape),
    ),
}


@pytest.mark.parametrize("steps", [B, B + 1])
@pytest.mark.parametrize("move", FOLDED.values(), ids=FOLDED)
def test_all_positions_in_another_order(move: tuple[Any, Any], steps: int) -> None:
    if steps != B and move is FOLDED["turned"]:
        return  # other rows than B, which the layer refuses
    module = TurnedAbout(*move)
    with pytest.warns(enn.PerSampleWarning, match=PLACES):
        right(on(module), module, forward, values(B, steps, D))


FOLDED_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "turned_back": lambda h: h.view(-1, D)[numbered(h).T.flatten()].view(h.shape[1], -1, D).transpose(0, 1),
    "within": lambda h: h.view(-1, D)[numbered(h).flip(1).flatten()].view(h.shape),
}


@pytest.mark.parametrize("steps", [B, B + 1])
@pytest.mark.parametrize("move", FOLDED_IN_PLACE.values(), ids=FOLDED_IN_PLACE)
def test_all_positions_that_leave_the_samples_in_place(move: Callable[[Tensor], Tensor], steps: int) -> None:
    module = TurnedAbout(move, lambda h: h)
    right(on(module, escalate=False), module, forward, values(B, steps, D))


BACK_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda h: h.transpose(0, 1).tanh().transpose(0, 1),
    "last": lambda h: h.transpose(0, 1)[-1],
    "mean": lambda h: h.transpose(0, 1).mean(0),
    "max": lambda h: h.permute(1, 0, 2).max(0).values,
    "unbind": lambda h: h.transpose(0, 1).unbind(0)[1],
    "loop": lambda h: torch.stack(list(h.transpose(0, 1)), 1),
    "attention": lambda h: (h @ h.transpose(1, 2)).softmax(-1) @ h,
    "of_all_samples": lambda h: h + 0 * h.detach().mean(0),
    "of_a_stack": lambda h: torch.stack([h.sum(1), h[:, 0], h[:, 1]])[1],
}


@pytest.mark.parametrize("turn", BACK_IN_PLACE.values(), ids=BACK_IN_PLACE)
def test_samples_that_are_back_in_their_place(turn: Callable[[Tensor], Tensor]) -> None:
    module = TurnedAbout(turn, lambda h: h)
    right(on(module), module, forward, values(B, B, D))


def test_single_position_in_the_place_of_the_samples() -> None:
    """It would be taken for what all samples share."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)

    module = Model()
    with pytest.warns(enn.PerSampleWarning, match=TURNED):
        right(on(module), module, forward, values(B, 1, D))


def test_samples_turned_for_a_layer_that_wants_them_second() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(D, D), nn.LSTM(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.lstm(self.first(x).transpose(0, 1))[0].transpose(0, 1))

    module = Model()
    right(on(module, batch_first=True), module, forward, values(B, B, D))


class SecondForALayer(nn.Module):
    """A recurrent layer that has time first, whose input and output a test moves."""

    def __init__(self, away: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.gru, self.last = nn.Linear(D, D), nn.GRU(D, D), nn.Linear(D, 2)
        self.away, self.back = away, back

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        h = self.gru(self.away(self.first(x).transpose(0, 1)))[0]
        return self.last(self.back(h).transpose(0, 1))


def backwards(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1]).flip(0)


MOVED_WHERE_SECOND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "index": (lambda h: h[:, backwards(h)], lambda h: h[:, backwards(h)]),
    "index_of_a_copy": (lambda h: h.contiguous()[:, backwards(h)], lambda h: h[:, backwards(h)]),
    "index_select": (lambda h: h.index_select(1, backwards(h)), lambda h: h.index_select(1, backwards(h))),
    "flip": (lambda h: h.flip(1), lambda h: h.flip(1)),
    "rot90": (lambda h: torch.rot90(h, 2, (1, 2)), lambda h: h.flip(1)),
    "roll": (lambda h: h.roll(1, 1), lambda h: h.roll(-1, 1)),
    "of_results": (lambda h: h.tanh().gather(1, backwards(h)[None, :, None].expand_as(h)), lambda h: h.flip(1)),
    "cat": (lambda h: torch.cat([h[:, 1:], h[:, :1]], 1), lambda h: torch.cat([h[:, -1:], h[:, :-1]], 1)),
    "stack": (
        lambda h: torch.stack(h.unbind(1)[::-1], 1),
        lambda h: torch.stack([2 * r for r in h.unbind(1)][::-1], 1),
    ),
    "split": (lambda h: torch.cat(h.split(1, 1)[::-1], 1), lambda h: torch.cat(h.chunk(B, 1)[::-1], 1)),
    "one_by_one": (lambda h: written_second(h), lambda h: written_second(h)),
}


def written_second(h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    for row in range(h.shape[1]):
        result[:, -1 - row] = h[:, row]
    return result


@pytest.mark.parametrize("steps", [B + 2, 2 * B])
@pytest.mark.parametrize("move", MOVED_WHERE_SECOND.values(), ids=MOVED_WHERE_SECOND)
def test_samples_in_another_order_where_they_stand_second(move: tuple[Any, Any], steps: int) -> None:
    """As sequences with time first that are sorted by their lengths."""
    module = SecondForALayer(*move)
    with pytest.warns(enn.PerSampleWarning, match="samples have taken each other's places .*test_trust.py"):
        right(on(module), module, forward, values(B, steps, D))


STAY_WHERE_SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "time": lambda h: h.flip(0),
    "times": lambda h: h[torch.arange(h.shape[0]).flip(0)],
    "features": lambda h: h.sort(2).values,
    "one_by_one": lambda h: h[:, torch.arange(h.shape[1])],
    "cat": lambda h: torch.cat([h[:, :1], h[:, 1:]], 1),
    "stack": lambda h: torch.stack(h.unbind(1), 1),
    "times_one_by_one": lambda h: torch.stack([step.tanh() for step in h]),
}


@pytest.mark.parametrize("steps", [B + 2, 2 * B])
@pytest.mark.parametrize("move", STAY_WHERE_SECOND.values(), ids=STAY_WHERE_SECOND)
def test_samples_that_stay_in_place_where_they_stand_second(move: Callable[[Tensor], Tensor], steps: int) -> None:
    module = SecondForALayer(move, move)
    right(on(module, escalate=False), module, forward, values(B, steps, D))


CHOSEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda h, mask: h[mask],
    "flat_mask": lambda h, mask: h.flatten(0, 1)[mask.flatten()],
    "index": lambda h, mask: h.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)],
    "index_select": lambda h, mask: h.flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1)),
}


@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_positions_chosen_that_are_as_many_as_the_samples(chosen: Callable[..., Tensor], *, argument: bool) -> None:
    """One of each sample is right; two of one and none of another would be taken for samples."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            of_chosen = self.second(chosen(x if argument else self.first(x), mask))
            places = mask.unsqueeze(-1).expand(*mask.shape, 2)
            result = torch.zeros(*mask.shape, 2).masked_scatter(places, of_chosen)
            return result + self.first(x).sum(-1, keepdim=True)

    module, x = Model(), values(B, 4, D)
    model = on(module)
    right(model, module, forward, x, torch.eye(B, 4).roll(1, 1) > 0)
    model.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match="each other's places"):
        right(model, module, forward, x, torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]) > 0)


CHOSEN_IN_A_VMAP: dict[str, Any] = {
    "number": pytest.param(
        lambda h, index: vmap(lambda of_one, i: of_one[i])(h, index),
        True,
        marks=pytest.mark.skipif(IS_OLD, reason="torch 2.10 takes no position by a number of each sample under vmap"),
    ),
    "vector": (lambda h, index: vmap(lambda of_one, i: of_one[i])(h, index.unsqueeze(1).expand(-1, B)).mean(1), True),
    "index_select": (lambda h, index: vmap(lambda of_one, i: of_one.index_select(0, i[None])[0])(h, index), True),
    "of_the_batch": (lambda h, index: vmap(lambda i: h[i])(index).mean(1), False),
    "of_the_batch_by_index_select": (
        lambda h, index: vmap(lambda i: h.index_select(0, i[None])[0])(index).mean(1),
        False,
    ),
}


@pytest.mark.parametrize(("chosen", "is_of_one"), CHOSEN_IN_A_VMAP.values(), ids=CHOSEN_IN_A_VMAP)
def test_positions_chosen_in_a_vmap(chosen: Callable[..., Tensor], *, is_of_one: bool) -> None:
    """Each sample has as many as there are samples; the values of an index are not told there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.second(chosen(self.first(x), index))

    module, x, index = Model(), values(B, B, D), torch.tensor([2, 0, 1])
    if is_of_one:
        right(on(module), module, forward, x, index)
        return
    with pytest.raises(enn.PerSampleError, match=r"each other's places .*test_trust.py"):
        on(module)(x, index)


@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_moved_within_a_checkpoint(*, reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

        def away_and_back(self, h: Tensor) -> Tensor:
            return self.second(self.first(h).flip(0)).flip(0)  # type: ignore[no-any-return]

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.last(checkpoint(self.away_and_back, x, use_reentrant=reentrant))

    module = Model()
    refused = pytest.raises(enn.PerSampleError, match="each other's places")  # no loop over samples is possible in it
    with refused if reentrant else pytest.warns(enn.PerSampleWarning, match="each other's places"):
        right(on(module), module, forward)


def test_samples_moved_without_gradients() -> None:
    """As by a teacher, whose layers leave no rows there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.second(self.first(x).flip(0)).flip(0)
            return self.second(self.first(x)) - target

    module = Model()
    right(on(module), module, forward)


@pytest.mark.parametrize("key", [(..., [2, 0, 1], slice(None)), (slice(None), torch.tensor([2, 0, 1]), ...)])
def test_samples_in_another_order_that_stand_second(key: Any) -> None:
    model = on(TurnedAbout(lambda h: h[key], lambda h: h), escalate=False, batch_first=False)
    with pytest.raises(enn.PerSampleError, match="each other's places"):
        model(values(5, B, D))


def test_samples_that_an_expanded_weight_meets_in_another_order() -> None:
    """No layer is behind it, and the weight was asked for before the samples were moved."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = enn.expanded(self.second.weight)
            return enn.functional.linear(self.first(x).flip(0), weight).flip(0)

    with pytest.raises(enn.PerSampleError, match="each other's places"):
        on(Model(), escalate=False)(values())


def test_samples_compared_with_each_other_have_shares() -> None:
    """What follows no layer any more is a loss, be it in the forward or in one_pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return (h * h[[1, 2, 0]]).sum(1) - (h * h.roll(1, 0)).sum(1)

    module, x = Model(), values()
    model, layer = on(module, compare=False), on(module.first)
    model(x).sum().backward()
    with enn.one_pass(layer, B):
        h = layer(x)
        ((h * h[[1, 2, 0]]).sum() - (h * h.roll(1, 0)).sum()).backward()
    for weight in (model.first.weight, layer.weight):
        module.zero_grad()
        module(x).sum().backward()
        assert len(weight.grad_sample) == B
        assert_close(weight.grad_sample.sum(0), module.first.weight.grad)


class ByLength(nn.Module):
    """Sorts its sequences by length, as PyTorch once wanted it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(9, D), nn.LSTM(D, D, batch_first=True), nn.Linear(D, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.table(ids)[order], lengths.tolist(), batch_first=True)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1][order.argsort()])


def test_sequences_sorted_by_hand() -> None:
    module = ByLength()
    ids, lengths = torch.arange(15).view(B, 5) % 9, torch.tensor([2, 5, 3])
    model = on(module)
    with pytest.warns(enn.PerSampleWarning, match="each other's places .*in a loop|in a loop.*each other's places"):
        right(model, module, forward, ids, lengths)
    model.zero_grad()
    right(model, module, forward, ids, lengths)


def test_order_that_torch_keeps_account_of() -> None:
    """And what only looks like another order: an element of each sample, all samples, a dimension that is none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(D, D), nn.LSTM(D, D, batch_first=True), nn.Linear(D, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            h = self.first(x)
            packed = pack_padded_sequence(h, lengths.tolist(), batch_first=True, enforce_sorted=False)
            out, _ = self.lstm(packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
            everything = torch.ones(len(x), dtype=torch.bool)
            last = out[torch.arange(len(x)), lengths - 1] + h.flip(1)[:, 0] + h[everything].roll((1, 2), (1, 2))[:, 1]
            return self.last(last + h[torch.arange(len(x))].sum(1))

    module = Model()
    right(on(module), module, forward, values(B, 5, D), torch.tensor([2, 5, 3]))


def test_samples_in_another_order_between_two_calls_of_one_pass() -> None:
    module = Moved(*MOVES["index"])
    model, x, order = on(module), values(), torch.tensor([1, 2, 0])
    for take in (order.tolist(), list(range(B))):
        refused = pytest.raises(enn.PerSampleError, match="each other's places") if take[0] else nullcontext()
        with refused, enn.one_pass(model, B):
            loss = sample_losses(model.second(model.first(x)[take])).sum()
    loss.backward()
    assert_close_rows(
        {"weight": model.second.weight.grad_sample},
        {"weight": loop(module, Call((x,)), B, objective=objective_of(two_calls))["second.weight"]},
    )


def two_calls(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x))  # type: ignore[no-any-return]


def moved_between(move: Callable[[Tensor], Tensor]) -> Step:
    return lambda m, x: m.second(move(m.first(x)).tanh())


ORDER = torch.tensor([1, 2, 0])
BETWEEN_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda h: h.flip(0),
    "flip_behind": lambda h: h.flip(-2),
    "roll": lambda h: h.roll(1, -2),
    "sort": lambda h: h.sort(-2)[0],
    "stable_sort": lambda h: h.sort(dim=-2, stable=True)[0],
    "index": lambda h: h[ORDER],
    "index_of_two": lambda h: h[ORDER, :].tanh(),
    "list": lambda h: h[[2, 0, 1]],
    "index_select": lambda h: h.index_select(-2, ORDER),
    "gather": lambda h: h.gather(-2, across(h, ORDER)),
    "take_along_dim": lambda h: h.take_along_dim(ORDER[:, None], 0),
    "set": lambda h: written(h, ORDER),
    "scatter": lambda h: torch.zeros_like(h).scatter(0, across(h, ORDER), h),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add(0, across(h, ORDER), h),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(0, ORDER, h),
    "index_add": lambda h: torch.zeros_like(h).index_add(0, ORDER, h),
    "index_put": lambda h: torch.zeros_like(h).index_put((ORDER,), h),
    "cat": lambda h: torch.cat([h[1:], h[:1]]),
    "cat_of_rows": lambda h: torch.cat([h[-1][None], h[0][None], h[1][None]], -2),
    "cat_of_parts": lambda h: torch.cat(h.split([1, 2])[::-1]),
    "cat_of_halves": lambda h: torch.cat(h.split(2)[::-1]),
    "cat_with_a_constant": lambda h: torch.cat([h[2:], torch.zeros(2, D).requires_grad_()]),
    "stack": lambda h: torch.stack(h.unbind()[::-1]),
    "stack_of_rows": lambda h: torch.stack([h[2], h[0], h[1]]),
    "mixed": lambda h: 0.7 * h + 0.3 * h[ORDER],
    "another_model": lambda h: on(nn.Linear(D, D))(h.flip(0)),
}


TWO_OF_ONE = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]) > 0
TURNED_BETWEEN_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda h: h.transpose(0, 1).tanh(),
    "permute": lambda h: h.permute(1, 0, 2),
    "of_three": lambda h: h.permute(1, 2, 0).movedim(-1, 1),
    "mask": lambda h: h[TWO_OF_ONE],
    "index": lambda h: h.flatten(0, 1)[TWO_OF_ONE.flatten().nonzero().squeeze(1)],
}
NOT_TURNED_BETWEEN_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda h: h.transpose(0, 1).tanh().permute(1, 0, 2),
    "last": lambda h: h.transpose(0, 1)[-1],
    "mean": lambda h: h.transpose(0, 1).mean(0),
    "attention": lambda h: h @ h.transpose(1, 2) @ h,
    "mask": lambda h: h[torch.eye(B)[1:2].expand(len(h), B) > 0],
    "index": lambda h: h.flatten(0, 1)[torch.arange(len(h)) * B + 1],
}


@pytest.mark.parametrize("turn", TURNED_BETWEEN_CALLS.values(), ids=TURNED_BETWEEN_CALLS)
def test_positions_taken_for_samples_between_two_calls(turn: Callable[[Tensor], Tensor]) -> None:
    model = on(Moved(*MOVES["index"]))
    with pytest.raises(enn.PerSampleError, match=r"second \(Linear\): since an earlier call .*each other's places \("):
        moved_between(turn)(model, values(B, B, D))


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda x: x.transpose(0, 1), id="transpose"),
        pytest.param(lambda x: (2 * x).permute(1, 0, 2), id="permute"),
        pytest.param(lambda x: torch.stack(x.unbind(1)), id="stack"),
        pytest.param(lambda x: torch.einsum("btd->tbd", x), id="einsum"),
    ],
)
def test_positions_taken_for_samples_in_one_pass(turn: Callable[[Tensor], Tensor]) -> None:
    """Nothing says that `x` holds the samples, as no call of the model has it for an argument."""
    model = on(nn.ModuleList([nn.Linear(D, D)]))
    refused = pytest.raises(enn.PerSampleError, match=r"its input, from .* has the samples in dimension 1")
    with refused, enn.one_pass(model, B):
        model[0](turn(values(B, B, D)))


def written_in_another_order(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row, sample in enumerate(ORDER.tolist()):
        out[row] = x[sample]
    return out


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda x: torch.cat([x[1:], x[:1]]), id="cat"),
        pytest.param(lambda x: torch.stack([x[i] for i in ORDER.tolist()]), id="stack"),
        pytest.param(lambda x: torch.stack((2 * x).unbind()[::-1]), id="stack_of_a_product"),
        pytest.param(written_in_another_order, id="written"),
    ],
)
def test_parts_of_the_input_in_another_order_in_one_pass(move: Callable[[Tensor], Tensor]) -> None:
    model = on(nn.ModuleList([nn.Linear(D, D)]))
    refused = pytest.raises(enn.PerSampleError, match=r"0 \(Linear\): in its input samples have taken each other's")
    with refused, enn.one_pass(model, B):
        model[0](move(values(B, D)))


@pytest.mark.parametrize("turn", NOT_TURNED_BETWEEN_CALLS.values(), ids=NOT_TURNED_BETWEEN_CALLS)
def test_samples_that_are_back_in_their_place_between_two_calls(turn: Callable[[Tensor], Tensor]) -> None:
    module = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, 2)])
    right(on(module), module, lambda m, x: m[1](turn(m[0](x))), values(B, B, D))


def test_samples_turned_for_a_call_that_wants_them_second() -> None:
    module = nn.ModuleList([nn.Linear(D, D), nn.LSTM(D, D), nn.Linear(D, 2)])

    def step(m: Any, x: Tensor) -> Tensor:
        return m[2](m[1](m[0](x).transpose(0, 1))[0].transpose(0, 1))  # type: ignore[no-any-return]

    right(on(module), module, step, values(B, B, D))


@pytest.mark.parametrize("move", BETWEEN_CALLS.values(), ids=BETWEEN_CALLS)
def test_samples_in_another_order_between_two_calls(move: Callable[[Tensor], Tensor]) -> None:
    """In a training loop: the rows of the second call would be those of other samples."""
    model = on(Moved(*MOVES["index"]))
    with pytest.raises(enn.PerSampleError, match=r"second \(Linear\): since an earlier call .*each other's places \("):
        moved_between(move)(model, values())
    model.second(move(model.first(values()).detach()))


STAYING: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda h: h[torch.arange(B)],
    "index_of_two": lambda h: h[:, None].expand(-1, 2, -1)[torch.arange(B), torch.tensor([1, 0, 0])],
    "mask": lambda h: h[torch.ones(B, dtype=torch.bool)],
    "gather": lambda h: h.gather(0, across(h, torch.arange(B))),
    "sort": lambda h: (h.cumsum(1).abs() + 9 * torch.arange(B)[:, None]).sort(0)[0],
    "flip": lambda h: h.flip(1),
    "roll": lambda h: h.roll(1, 1).roll(0),
    "index_behind": lambda h: h[:, [3, 2, 1, 0]].index_select(1, torch.tensor([0, 2, 1, 3])),
    "scatter": lambda h: torch.zeros_like(h).scatter(1, h.argsort(1), h),
    "cat": lambda h: torch.cat([h[:1], h[1:]]) + torch.cat(h.split([1, 2])) + torch.cat([h[:, 1:], h[:, :1]], 1),
    "cat_of_new_ones": lambda h: torch.cat([h[:1].exp(), h[1:2], h[2:]]),
    "stack": lambda h: torch.stack(h.unbind()) + torch.stack([h[0], h[1], h[-1]]) + torch.stack(h.unbind(1), 1),
    "constant": lambda h: h.index_put((ORDER,), torch.randn(B, D)).scatter(0, across(h, ORDER), 0.5 * h.detach()) + h,
}


@pytest.mark.parametrize("move", STAYING.values(), ids=STAYING)
def test_samples_that_stay_in_their_places_between_two_calls(move: Callable[[Tensor], Tensor]) -> None:
    module = Moved(*MOVES["index"])
    set_seed(0)
    objective_of(moved_between(move))(model := on(module), Call((values(),))).backward()
    set_seed(0)
    objective_of(moved_between(move))(module, Call((values(),))).backward()
    assert len(model.second.weight.grad_sample) == B
    assert_close(model.first.weight.grad_sample.sum(0), module.first.weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_two_calls_and_an_index(*, reentrant: bool) -> None:
    """The index is a value that the checkpoint would have to run the layers again for, without an end."""
    module = Moved(*MOVES["index"])

    def first(m: Any, x: Tensor) -> Tensor:
        return m.first(x).index_select(0, torch.arange(len(x), device=x.device))

    def both(m: Any, x: Tensor) -> Tensor:
        return m.second(first(m, x).tanh())

    def checkpointed(m: Any, x: Tensor, *, whole: bool) -> Tensor:
        x = x.clone().requires_grad_()
        if whole:
            return checkpoint(lambda x: both(m, x), x, use_reentrant=reentrant)
        return m.second(checkpoint(lambda x: first(m, x), x, use_reentrant=reentrant).tanh())

    expected = loop(module, Call((values(),)), B, objective=objective_of(both))
    for whole in (True, False):
        model = on(module)
        sample_losses(checkpointed(model, values(), whole=whole)).sum().backward()
        for name in ("first.weight", "second.weight"):
            assert_close(model.get_parameter(name).grad_sample, expected[name])


class Sequences(nn.ModuleDict):
    def __init__(self, *, batch_first: bool = True) -> None:
        first = nn.LSTM(D, D, batch_first=batch_first)
        super().__init__({"first": first, "second": nn.GRU(D, D, batch_first=batch_first), "last": nn.Linear(D, 2)})


def packed_in_the_loop(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.last(x).repeat(1, 1, 2), lengths.tolist(), batch_first=True, enforce_sorted=False)
    out, (hidden, _) = m.first(packed)
    out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    out, last = m.second(pack_padded_sequence(out, lengths.tolist(), batch_first=True, enforce_sorted=False))
    out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return m.last(out).sum(1) + m.last(hidden[-1]) + m.last(last[-1]) + m.last(out[torch.arange(len(x)), lengths - 1])


def test_order_that_torch_keeps_account_of_between_two_calls() -> None:
    module = Sequences()
    right(on(module), module, packed_in_the_loop, values(B, 5, D), torch.tensor([2, 5, 3]))


@pytest.mark.parametrize("steps", [B, B + 1])
def test_time_reversed_between_two_calls(steps: int) -> None:
    """Of samples that stand second, even where there are as many of them as steps."""
    module = Sequences(batch_first=False)
    model, x = on(module), values(steps, B, D)
    for m in (model, module):
        m["second"](m["first"](x)[0].flip(0))[0].square().sum().backward()
    weight = model["second"].weight_hh_l0
    assert len(weight.grad_sample) == B
    assert_close(weight.grad_sample.sum(0), module["second"].weight_hh_l0.grad)
    with pytest.raises(enn.PerSampleError, match=r"second .*each other's places"):
        model["second"](model["first"](x)[0].flip(1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_states_of_as_many_layers_as_samples(*, batch_first: bool) -> None:
    """The samples of a recurrent layer's states stand second, wherever those of its input do."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(D, D, num_layers=B, batch_first=batch_first)

        def forward(self, x: Tensor, states: Tensor) -> Tensor:
            steps, _ = self.rnn(x if batch_first else x.transpose(0, 1), states.transpose(0, 1).contiguous())
            return steps.flatten(1) if batch_first else steps.transpose(0, 1).flatten(1)

    module = Model()
    right(on(module), module, forward, values(B, 5, D), values(B, B, D))


STATES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "each": lambda last, h: last(h).sum(0),
    "one": lambda last, h: last(h)[-1],
    "mean": lambda last, h: last(h.tanh()).mean(0),
}
STATES_IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "last": lambda last, h: last(h[-1]),
    "all": lambda last, h: last(h.transpose(0, 1)).flatten(1),
    "named": lambda last, h: last(torch.einsum("lbd->bld", h)).flatten(1),
    "sum": lambda last, h: last(torch.einsum("lbd->bd", h)),
    "joined": lambda last, h: last(torch.cat([h[0], h[-1]], -1)[:, :D]),
}


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("use", {**STATES, **STATES_IN_PLACE}.values(), ids={**STATES, **STATES_IN_PLACE})
def test_layer_of_the_states_of_as_many_layers_as_samples(use: Callable[[Any, Tensor], Tensor], kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = kind(D, D, num_layers=B, batch_first=True), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            _, states = self.rnn(x)
            return use(self.last, states if isinstance(states, Tensor) else states[0])

    module, refused = Model(), r"M.*from what (GRU|LSTM) returns, line \d+ .*has the samples in dimension 1"
    with pytest.warns(enn.PerSampleWarning, match=refused) if use in STATES.values() else nullcontext():
        right(on(module), module, forward, values(B, 5, D))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [True, False])
def test_states_of_as_many_layers_as_samples_go_on(kind: Any, *, batch_first: bool) -> None:
    """What a recurrent layer makes of them is in order; a state that another layer reads is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = kind(D, D, num_layers=B, batch_first=batch_first), nn.Linear(D, 2)

        def forward(self, x: Tensor, state: Any = None) -> Any:
            steps, state = self.rnn(x, state)
            return self.last(steps), state

    def loss(model: Any, x: Tensor) -> Tensor:
        total, state = 0, None
        for piece in (x if batch_first else x.transpose(0, 1)).split(2, 1 if batch_first else 0):
            steps, state = model(piece, state)
            total = total + steps.square().sum()
        return total

    module, x = Model(), values(B, 6, D)
    model = on(module, batch_first=batch_first)
    with enn.one_pass(model, B):
        loss(model, x).backward()
    call = Call((x,))
    expected = loop(module, call, B, objective=lambda module, call, first=0: loss(module, *call.args))
    assert_close_rows(rows_of(model), expected)
    refused = pytest.raises(enn.PerSampleError, match=r"from what .* returns, line") if batch_first else nullcontext()
    with refused, enn.one_pass(model, B):
        _, state = model(x if batch_first else x.transpose(0, 1))
        model.last(state if isinstance(state, Tensor) else state[0])


def test_samples_in_another_order_between_two_models() -> None:
    """Each has rows of its own samples, as the discriminator of images that were shuffled."""
    made, seen = on(nn.Linear(D, D)), on(nn.Linear(D, 2))
    seen(values())
    seen(made(values())[ORDER]).sum().backward()
    assert len(made.weight.grad_sample) == len(seen.weight.grad_sample) == B


# --- calls that go on from an earlier one -----------------------------------------------------------------------------


def another_call_between(m: Any, x: Tensor) -> Tensor:
    h = m.enc(x)
    m.part(values(B + 2, D))
    return m.head(h)


def after_one_pass(m: Any, x: Tensor) -> Tensor:
    with enn.one_pass(m, len(x)):
        h = m.enc(x)
    m.part(values(seed=2))
    return m.head(h)


@pytest.mark.parametrize("step", [another_call_between, after_one_pass], ids=ids_of)
def test_call_that_goes_on_from_an_earlier_one_is_in_its_pass(step: Step) -> None:
    """Whatever came between: in two passes a sample would have two rows, and clipping would not bound what it adds."""
    module, model, x = parts(), on(parts()), values()
    expected = loop(module, Call((x,)), B, objective=objective_of(lambda m, x: m.head(m.enc(x))))
    objective_of(step)(model, Call((x,))).backward()
    for name in ("enc.weight", "head.weight"):
        rows = model.get_parameter(name).grad_sample
        assert_close(rows[:B], expected[name])
        assert not rows[B:].any()


@pytest.mark.parametrize("cleared", [False, True])
def test_heads_with_a_backward_each(*, cleared: bool) -> None:
    """On one graph: the rows of the second head are added to those of the first, as with two losses."""
    module, model, x = parts(), on(parts()), values()
    h = model.enc(x)
    sample_losses(model.head(h)).sum().backward(retain_graph=True)
    if cleared:
        torch.optim.SGD(model.parameters()).zero_grad()
    sample_losses(model.part(h)).sum().backward()
    first = loop(module, Call((x,)), B, objective=objective_of(lambda m, x: m.head(m.enc(x))))
    second = loop(module, Call((x,)), B, objective=objective_of(lambda m, x: m.part(m.enc(x))))
    assert_close(model.part.scale.grad_sample, second["part.scale"])
    encoder = second["enc.weight"] if cleared else first["enc.weight"] + second["enc.weight"]
    assert_close(model.enc.weight.grad_sample, encoder)
    if not cleared:
        assert_close(model.head.weight.grad_sample, first["head.weight"])
    norms = enn.clip_grad_sample_norms_(model, 1.0)
    assert len(norms) == B


def test_state_that_goes_from_step_to_step_without_detach() -> None:
    module, model, x = parts(), on(parts()), values(3, B, D)

    def states(m: Any, *inputs: Tensor) -> list[Tensor]:
        states = [inputs[0].new_zeros(inputs[0].shape)]
        for each in inputs:
            states.append(m.enc(each + states[-1]).tanh())
        return states[1:]

    state = torch.zeros(B, D)
    for each in x:
        state = model.enc(each + state).tanh()
        sample_losses(state).sum().backward(retain_graph=True)
    expected = loop(
        module,
        Call(tuple(x)),
        B,
        objective=lambda m, call, first=0: sum(sample_losses(state, first).sum() for state in states(m, *call.args)),
    )
    assert_close(model.enc.weight.grad_sample, expected["enc.weight"])


def test_other_samples_made_of_those_of_a_pass_that_is_done() -> None:
    model = on(parts())
    h = model.enc(values())
    model.head(h).sum().backward(retain_graph=True)
    with pytest.raises(enn.PerSampleError, match=r"head \(Linear\): it is called with 6 samples.*the 3 samples of"):
        model.head(h.repeat_interleave(2, 0))


def test_argument_that_is_returned_says_nothing_of_the_call() -> None:
    """It comes from elsewhere, and a second call with it has rows of its own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), x

    model, made = on(Model()), nn.Linear(D, D)(values())
    for count in (B, 2 * B):
        result, _ = model(made)
        result.sum().backward(retain_graph=True)
        assert len(model.layer.weight.grad_sample) == count


class AsOneSequence(nn.Module):
    """A layer that is given all samples in one row, which belong to one sample each behind it."""

    def __init__(self, layer: nn.Module, fold: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.fold = layer, fold

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.fold(x)).view(len(x), -1, D).mean(1)


def a_view(x: Tensor) -> Tensor:
    return x.reshape(1, -1, D)


def computed(x: Tensor) -> Tensor:
    return (2 * x).view(1, -1, D)


def a_copy(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT.reshape(1, -1, D)


@pytest.mark.parametrize("fold", [a_view, computed, a_copy], ids=ids_of)
@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Linear(D, D), lambda: nn.LayerNorm(D), lambda: nn.PReLU(), Scale],
    ids=["linear", "norm", "activation", "general"],
)
def test_all_samples_as_one_sequence(layer: Callable[[], nn.Module], fold: Callable[[Tensor], Tensor]) -> None:
    model = AsOneSequence(layer(), fold)
    converted = on(model)
    with pytest.warns(enn.PerSampleWarning, match="sample by sample"):
        right(converted, model, lambda m, x: m(x), values(B, 6, D))


def test_indices_of_all_samples_as_one_sequence() -> None:
    model = AsOneSequence(nn.Embedding(9, D), lambda index: index.reshape(1, -1))
    index = torch.tensor([[1, 5, 2, 2], [0, 8, 3, 1], [7, 7, 4, 6]])
    converted = on(model)
    with pytest.warns(enn.PerSampleWarning, match="sample by sample"):
        right(converted, model, lambda m, x: m(x), index)


def test_positions_that_all_samples_share_have_as_many_numbers_as_indices() -> None:
    """They count up, so that they are shared: without a warning."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(B, D), nn.Linear(D, 2)

        def forward(self, labels: Tensor) -> Tensor:  # (B,), as many as there are positions
            return self.head(self.table(torch.arange(B)[None]) * labels[:, None, None]).mean(1)

    model = Positions()
    right(on(model), model, lambda m, x: m(x), torch.tensor([3.0, 5.0, 4.0]))


# --- a table of as many rows as there are samples, which is met where a mask says -------------------------------------


class Filled(nn.Module):
    """Masked positions are those of a table, computed from a parameter in some way."""

    def __init__(self, table: Callable[[Any, int], Tensor], join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.v, self.table, self.join = (
            nn.Parameter(torch.randn(D, D)),
            nn.Parameter(torch.randn(D)),
            table,
            join,
        )
        self.register_buffer("pe", torch.randn(10, D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.linear(self.join(mask[..., None], self.table(self, x.shape[1]), x), self.w) * self.v


MASKED_TABLES: dict[str, Callable[[Any, int], Tensor]] = {
    "look-up": lambda m, T: F.embedding(torch.arange(T) % D, m.w),
    "buffer": lambda m, T: m.pe[:T] * m.v,
    "expanded": lambda m, T: m.v.expand(T, D),
    "product": lambda m, T: m.pe[:T] @ m.w,
    "linear": lambda m, T: F.linear(m.pe[:T], m.w),
    "numbers": lambda m, T: torch.linspace(0, 1, T)[:, None] * m.v,
    "zeros": lambda m, T: torch.zeros(T, D) + m.v,
}
JOINED: dict[str, Callable[..., Tensor]] = {
    "where": torch.where,
    "lerp": lambda mask, table, x: x.lerp(table, mask.to(x)),
    "addcmul": lambda mask, table, x: torch.addcmul(x, mask.to(x), table),
    "maximum": lambda mask, table, x: torch.maximum(x, torch.where(mask, table, -9.0)),
}


@pytest.mark.parametrize("behind_a_layer", [False, True])
@pytest.mark.parametrize("join", JOINED)
@pytest.mark.parametrize("table", MASKED_TABLES)
def test_a_table_that_a_mask_has_hidden_so_far(table: str, join: str, behind_a_layer: bool) -> None:
    """While no position is masked, nothing tells that its rows are no samples."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.filled = nn.Linear(D, D), Filled(MASKED_TABLES[table], JOINED[join])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.filled(self.lin(x), mask)

    module = Behind() if behind_a_layer else Filled(MASKED_TABLES[table], JOINED[join])
    model = on(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)  # it may go sample by sample
        for seed in range(4):
            mask = torch.zeros(B, B, dtype=torch.bool)
            mask[:, -1] = seed >= 2
            model.zero_grad()
            right(model, module, forward, values(B, B, D, seed=seed), mask)


# --- iterators --------------------------------------------------------------------------------------------------------


class Up(nn.Module):
    """Goes through an argument, which an iterator gives once only."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.v = nn.Parameter(torch.ones(D)) if own else None

    def forward(self, x: Tensor, skips: Iterable[Tensor]) -> Tensor:
        x = x if self.v is None else x * self.v
        for skip in skips:
            x = torch.tanh(self.lin(x) + skip)
        return x


ITERATORS: dict[str, Callable[[list[Tensor]], Any]] = {
    "reversed": reversed,
    "iter": iter,
    "map": lambda skips: map(torch.neg, skips),
    "generator": lambda skips: (2 * skip for skip in skips),
}


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("make", ITERATORS)
def test_an_iterator_as_an_argument(make: str, own: bool, compare: bool) -> None:
    """A forward that runs several times, as to be compared, goes through all of it each time."""
    module = Up(own=own)
    model = on(module, compare=compare)

    def step(m: Any, x: Tensor, *skips: Tensor) -> Tensor:
        return m(x, ITERATORS[make](list(skips)))

    for _ in range(2):
        model.zero_grad()
        right(model, module, step, values(), values(seed=2), values(seed=3))


# --- what no layer with rows has made -------------------------------------------------------------------------------


class Sorted(nn.Module):
    """Sorts what it has computed from its input by itself, and sorts back."""

    def __init__(self, before: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.before = nn.Embedding(9, D).requires_grad_(False), before
        self.lin, self.other = nn.Linear(D, 2), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(self, x)
        order = h.sum(1).argsort()
        return self.lin(h[order]).tanh()[order.argsort()] + self.other(h)


BEFORE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Tensor]]] = {
    "arithmetic": (lambda m, x: (x - 1) / 2, lambda: torch.randn(B, D)),
    "frozen": (lambda m, x: m.table(x).mean(1), lambda: torch.randint(9, (B, 5))),
    "no_grad": (lambda m, x: m.other(x).detach().repeat(1, 2), lambda: torch.randn(B, D)),
}


@pytest.mark.parametrize("name", BEFORE)
def test_samples_that_change_places_before_the_first_layer_with_rows(name: str) -> None:
    """Where no forward is compared, only the look at operations sees it."""
    before, make = BEFORE[name]
    model = on(Sorted(before), compare=False, escalate=False)
    batches = []
    for seed in range(4):  # some batches are in order
        set_seed(seed)
        batches.append(make())
    with pytest.raises(enn.PerSampleError, match=r"samples have taken each other's places \(__getitem__"):
        [model(batch) for batch in batches]
