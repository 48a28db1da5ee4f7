"""What goes wrong in the middle of a step, what a step leaves behind, and samples that are not finite.

Elsewhere: rows held of an older step that were made dense at once (test_storage), an exception in the forward and
in the backward of a small network (test_mechanism).
"""

import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import expanded_nn as enn
from cases import Scale
from families import FAMILIES, Family, every_family, families
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, sample_losses, set_seed, total_loss

SAMPLES = 3


def on(module: nn.Module, **settings: Any) -> nn.Module:
    return enn.convert(module).per_sample(loss_reduction="sum", **settings)


def net() -> nn.Module:
    set_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def batch(samples: int = SAMPLES, seed: int = 1) -> Call:
    return Call((torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed)),))


class Fails(torch.autograd.Function):
    """Passes its input on, and fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise ctx.error


def fail(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise error

    return raises


# --- exceptions -----------------------------------------------------------------------------------------------


def last_called(model: nn.Module) -> nn.Module:
    """The last layer that is called; attention multiplies by the weight of its `out_proj` without calling that."""
    out = nn.modules.linear.NonDynamicallyQuantizableLinear
    called = [module for module in model.modules() if not isinstance(module, out)]
    return [module for module in called if all(isinstance(child, out) for child in module.children())][-1]


def in_a_forward_hook(model: nn.Module, call: Call, error: BaseException) -> None:
    handle = last_called(model).register_forward_hook(fail(error))
    try:
        total_loss(model, call).backward()
    finally:
        handle.remove()


def in_the_loss(model: nn.Module, call: Call, error: BaseException) -> None:
    call.on(model)
    raise error


def in_the_backward_of_the_output(model: nn.Module, call: Call, error: BaseException) -> None:
    sample_losses(Fails.apply(call.on(model), error)).sum().backward()


def in_a_hook_on_a_parameter(model: nn.Module, call: Call, error: BaseException) -> None:
    """Some parameters have their rows by then, others have not."""
    last = list(model.parameters())[-1]
    handle = last.register_hook(fail(error))
    try:
        total_loss(model, call).backward()
    finally:
        handle.remove()


def after_the_gradient_was_accumulated(model: nn.Module, call: Call, error: BaseException) -> None:
    handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(fail(error))
    try:
        total_loss(model, call).backward()
    finally:
        handle.remove()


FAULTS = [
    in_a_forward_hook,
    in_the_loss,
    in_the_backward_of_the_output,
    in_a_hook_on_a_parameter,
    after_the_gradient_was_accumulated,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@every_family
def test_right_step_after_a_fault(family: Family, fault: Callable[..., None]) -> None:
    """With another number of samples and with the same, after a good step and before any."""
    error = KeyboardInterrupt("fault") if len(family.name) % 2 else RuntimeError("fault")
    model, module = on(family.module()), family.module()
    for samples in (2, SAMPLES):
        with pytest.raises(type(error), match="fault"):
            fault(model, family.call(2, seed=7), error)
        model.zero_grad()
        total_loss(model, family.call(samples)).backward()
        expected = loop(module, family.call(samples), samples)
        assert_close_rows(rows_of(model), expected)
        assert_close_rows(grads_of(model), {name: rows.sum(0) for name, rows in expected.items()})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_right_step_after_a_fault_without_accumulation(fault: Callable[..., None]) -> None:
    """Nothing has to be cleared there: a backward replaces what there was."""
    model = on(net(), accumulate_grad=False)
    if fault is after_the_gradient_was_accumulated:
        return  # nothing is accumulated
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fault(model, batch(2, seed=7), KeyboardInterrupt("fault"))
        total_loss(model, batch()).backward()
        assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES))


@pytest.mark.parametrize("how", ["optimizer", "set_to_zero", "grad_none"])
@pytest.mark.parametrize("fault", FAULTS[2:], ids=lambda fault: fault.__name__)
def test_clearing_after_a_fault(fault: Callable[..., None], how: str) -> None:
    """A good step before; the fault; any way to clear; a good step."""
    model = on(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total_loss(model, batch(seed=3)).backward()
    with pytest.raises(KeyboardInterrupt):
        fault(model, batch(2, seed=7), KeyboardInterrupt("fault"))
    if how == "grad_none":
        for p in model.parameters():
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=how == "optimizer")
    total_loss(model, batch()).backward()
    assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES))


def test_state_of_the_library_after_a_fault_in_each_forward() -> None:
    """Settings that a forward changes for its time, and parameters it puts others in place of, are back."""
    for family in FAMILIES:
        model = on(family.module())
        before = {name: id(p) for name, p in model.named_parameters()}
        settings, fast_path = model._recorder.settings, torch.backends.mha.get_fastpath_enabled()
        for mode in (model.training, False):
            with pytest.raises(KeyboardInterrupt):
                in_a_forward_hook(model.train(mode), family.call(2), KeyboardInterrupt("fault"))
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert model._recorder.settings is settings
        assert model._recorder.forward is None
        assert model._recorder.general_rule is None
        assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_fault_inside_the_general_rule() -> None:
    class Inner(nn.Module):
        fails = True

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x) * self.scale
            if self.fails:
                raise KeyboardInterrupt("fault")
            return x

    set_seed(5)
    module = nn.Sequential(nn.Linear(4, 4), Inner())
    model = on(module)
    parameters = dict(model.named_parameters())
    for samples in (2, SAMPLES):
        Inner.fails = True
        with pytest.raises(KeyboardInterrupt):
            batch(samples).on(model)
        assert all(p is parameters[name] for name, p in model.named_parameters())
        Inner.fails = False
        model.zero_grad()
        total_loss(model, batch()).backward()
        assert_close_rows(rows_of(model), loop(module, batch(), SAMPLES))


class Recomputed(nn.Module):
    """A checkpoint whose second forward, the one inside the backward, may fail before or after its layer."""

    fails = ""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):  # or nothing after the layer would run again
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant))

    def block(self, h: Tensor) -> Tensor:
        recomputes = torch._C._current_graph_task_id() >= 0
        if recomputes and self.fails == "before":
            raise KeyboardInterrupt("fault")
        h = self.second(h).tanh()
        if recomputes and self.fails == "after":
            raise KeyboardInterrupt("fault")
        return h


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("built_before", [False, True], ids=["next_forward", "graph_built_before"])
def test_fault_in_the_recomputation_of_a_checkpoint(where: str, use_reentrant: bool, built_before: bool) -> None:
    """The next backward may be that of a graph which was there before the fault."""
    set_seed(5)
    module = Recomputed(False)
    model = on(module)
    model.use_reentrant = use_reentrant
    bad = total_loss(model, batch(2, seed=7))
    good = total_loss(model, batch()) if built_before else None
    model.fails = where
    with pytest.raises(KeyboardInterrupt):
        bad.backward()
    model.fails = ""
    for p in model.parameters():
        p.grad = None
    (total_loss(model, batch()) if good is None else good).backward()
    assert_close_rows(rows_of(model), loop(module, batch(), SAMPLES))


def test_fault_in_one_of_two_models_leaves_the_other_alone() -> None:
    one, other = on(net()), on(net())
    total_loss(other, batch()).backward()
    with pytest.raises(KeyboardInterrupt):
        in_a_hook_on_a_parameter(one, batch(2), KeyboardInterrupt("fault"))
    expected = loop(net(), batch(), SAMPLES)
    assert_close_rows(rows_of(other), expected)
    total_loss(other, batch()).backward()
    assert_close_rows(rows_of(other), {name: torch.cat([rows, rows]) for name, rows in expected.items()})


def test_refused_backward_is_refused_again() -> None:
    """The user who catches the error and goes on with the same graph gets it again, and no wrong rows."""
    model = on(net())
    loss = total_loss(model, batch()) + model[0].weight.sum()
    for _ in range(2):
        with pytest.raises(enn.PerSampleError, match=r"0\.weight.*outside"):
            loss.backward(retain_graph=True)


# --- what a step leaves behind ----------------------------------------------------------------------------------


def alive() -> tuple[int, int]:
    """How many objects Python knows of, and how many tensors among them."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(issubclass(type(item), Tensor) for item in objects)


def grows(step: Callable[[int], None], steps: int) -> tuple[int, int, int]:
    """By how many objects, tensors and bytes it does, after the first steps."""
    for i in range(10):
        step(i)
    before, memory = alive(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(steps):
        step(i)
    after = alive()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return after[0] - before[0], after[1] - before[1], 1024 * peak


def train(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


def clip(model: nn.Module, x: Tensor) -> None:
    for part in x.split(2):
        model(part).square().sum().backward()
        enn.clip_grad_sample_norms_(model, 1.0)
    model.zero_grad()


def snapshot(model: nn.Module, x: Tensor) -> None:
    train(model, x)
    grads = enn.per_sample_grads(model)
    grads.norms(), grads.gram(), grads.flatten()


def forwards_alone(model: nn.Module, x: Tensor) -> None:
    model(x), model(x[:1])
    with torch.no_grad():
        model(x)


def twice(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward(create_graph=True)
    sum(p.grad_sample.square().sum() for p in model.parameters()).backward()
    model.zero_grad()


def interrupted(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    out = model(x)
    out.register_hook(lambda g: {}["fault"])  # an error kept by the hook would hold the graph that holds the hook
    with pytest.raises(KeyError):
        out.sum().backward()


def switched(model: nn.Module, x: Tensor) -> None:
    train(model.per_sample(False), x)
    train(model.per_sample(), x)


def functional(model: nn.Module, x: Tensor) -> None:
    """Fresh leaves at each step, as in an inner loop."""
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (x,)).square().sum().backward()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (train, {}),
        (train, {"materialize": True}),
        (clip, {"accumulate_grad": False}),
        (snapshot, {}),
        (forwards_alone, {}),
        (twice, {}),
        (interrupted, {}),
        (switched, {}),
        (functional, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value) or "plain",
)
def test_steps_do_not_grow(step: Callable[..., None], settings: dict[str, Any]) -> None:
    """Nothing that could be one object a step; batches change in size, so that memory is not reused by chance."""
    model = enn.convert(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.LayerNorm(30), Scale(30))).per_sample(**settings)
    steps = 30 if step is functional else 50
    objects, tensors, size = grows(lambda i: step(model, torch.randn(1 + i % 5, 40)), steps)
    assert tensors <= 5
    assert objects < steps
    assert size < 16 * 2**20


@pytest.mark.usefixtures("small_heap")
def test_hundreds_of_steps_do_not_grow() -> None:
    """Rows of 2 MB a step, dense: a leak of one in a hundred would show."""
    model = enn.convert(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))).per_sample(materialize=True)
    objects, tensors, size = grows(lambda i: train(model, torch.randn(16, 128)), 400)
    assert tensors <= 0
    assert objects < 40
    assert size < 16 * 2**20


def test_functional_calls_with_fresh_leaves_know_nothing_of_each_other() -> None:
    """The leaves of an earlier step are gone, and their rows with them."""
    model = on(net())
    for seed, samples in enumerate((3, 2, 4)):
        given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        sample_losses(torch.func.functional_call(model, given, batch(samples, seed).args)).sum().backward()
        assert_close_rows({n: p.grad_sample for n, p in given.items()}, loop(net(), batch(samples, seed), samples))


def test_rows_of_leaves_that_the_user_keeps_are_none_of_the_model() -> None:
    """The model's own parameters took no part in the calls with other leaves."""
    model, kept = on(net()), []
    for seed, samples in enumerate((3, 2, 4)):
        given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        kept.append(given)
        sample_losses(torch.func.functional_call(model, given, batch(samples, seed).args)).sum().backward()
        model.zero_grad()
        total_loss(model, batch(samples, seed)).backward()
        assert_close_rows(rows_of(model), loop(net(), batch(samples, seed), samples))
        assert len(enn.clip_grad_sample_norms_(model, 1.0)) == samples


@pytest.mark.usefixtures("small_heap")
@families("mlp", "cnn", "embedding", "lstm", "transformer", "general_with_layers", "parametrized")
def test_dropping_the_model_frees_it(family: Family) -> None:
    """Without the collector, where that holds of the plain model; its rows, its input and its activations too."""
    model, call = on(family.module()), family.call(SAMPLES)
    total_loss(model, call).backward()
    out = call.on(model)
    kept = [*model.parameters(), out, *(p.grad_sample for p in model.parameters()), call.args[0]]
    refs = [weakref.ref(item) for item in kept]
    del kept, out, model, call
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


def test_activations_go_with_the_loss() -> None:
    """No pass, and no row made dense, keeps a layer's output: without the collector."""
    model, seen = on(net(), materialize=True), []
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    gc.disable()
    try:
        loss = total_loss(model, batch())
        loss.backward()
        del loss
        assert [ref() for ref in seen if ref() is not None] == []
        batch().on(model)
        assert [ref() for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


def test_inputs_held_as_factors_go_with_the_rows() -> None:
    model = on(nn.Linear(64, 64))
    x = torch.randn(SAMPLES, 64)
    memory = weakref.ref(x.untyped_storage())
    total_loss(model, Call((x,))).backward()
    del x
    model.zero_grad()
    gc.collect()
    assert memory() is None


# --- rows of an older step ------------------------------------------------------------------------------------

HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda rows: rows,
    "slice": lambda rows: rows[1:],
    "row": lambda rows: rows[-1],
    "view": lambda rows: rows.flatten(1),
    "detached": lambda rows: rows.detach(),
    "array": lambda rows: rows.numpy(),
    "part_of_an_array": lambda rows: rows.numpy()[1:],
    "as_tensor_of_an_array": lambda rows: torch.from_numpy(rows.numpy()),
    "dlpack": lambda rows: torch.from_dlpack(rows),
    "scaled": lambda rows: rows * 2,
    "chunk": lambda rows: rows.chunk(2)[0],
    "unbound": lambda rows: rows.unbind()[0],
    "iterated": lambda rows: next(iter(rows)),
    "in_a_graph": lambda rows: (rows * torch.ones((), requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("materialize", [False, True], ids=["as_they_are", "materialized"])
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
@families("mlp", "cnn", "embedding")
def test_rows_of_an_older_step_never_change(family: Family, hold: Callable[[Tensor], Any], materialize: bool) -> None:
    """Nor do steps that follow go wrong for it."""
    model, module = on(family.module(), materialize=materialize), family.module()
    total_loss(model, family.call(SAMPLES)).backward()
    held = {name: hold(rows) for name, rows in rows_of(model).items()}
    before = {name: value_of(value) for name, value in held.items()}
    for seed in range(3):
        model.zero_grad()
        total_loss(model, family.call(SAMPLES, seed)).backward()
        for rows in rows_of(model).values():
            rows.mul_(3)  # what is done to the new rows does not reach the old ones
    for name, value in held.items():
        assert torch.equal(value_of(value), before[name]), name
    model.zero_grad()
    total_loss(model, family.call(SAMPLES, 9)).backward()
    assert_close_rows(rows_of(model), loop(module, family.call(SAMPLES, 9), SAMPLES))


def value_of(held: Any) -> Tensor:
    if hasattr(held, "_saved_self"):
        held = held._saved_self
    return torch.as_tensor(held).detach().clone().contiguous()


def test_snapshot_of_an_older_step_never_changes() -> None:
    for family in FAMILIES:
        model = on(family.module(), materialize=True)
        total_loss(model, family.call(SAMPLES)).backward()
        grads = enn.per_sample_grads(model)
        rows = dict(grads)
        expected = loop(family.module(), family.call(SAMPLES), SAMPLES)
        for seed in range(3):
            model.zero_grad()
            total_loss(model, family.call(SAMPLES, seed)).backward()
        assert_close_rows(rows, expected)
        assert_close_rows(grads.sum(), {name: rows.sum(0) for name, rows in expected.items()})


def test_plain_gradient_of_an_older_step_never_changes() -> None:
    """`.grad` is no part of memory that is used again."""
    model = on(net(), materialize=True)
    total_loss(model, batch()).backward()
    held = {name: p.grad for name, p in model.named_parameters()}
    for seed in range(3):
        model.zero_grad()
        total_loss(model, batch(seed=seed + 2)).backward()
    assert_close_rows(held, {name: rows.sum(0) for name, rows in loop(net(), batch(), SAMPLES).items()})


# --- samples that are not finite --------------------------------------------------------------------------------

POISONED = 1


def poisoned_input(family: Family, bad: float) -> tuple[Call, Callable[..., Tensor]]:
    call = family.call(SAMPLES)
    call.args[0][POISONED].view(-1)[0] = bad
    return call, total_loss


def poisoned_loss(family: Family, bad: float) -> tuple[Call, Callable[..., Tensor]]:
    def objective(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        losses = sample_losses(call.on(module), first)
        factors = torch.ones(SAMPLES)
        factors[POISONED] = bad
        return (losses * factors[first : first + len(losses)]).sum()

    return family.call(SAMPLES), objective


@pytest.mark.parametrize(("bad", "materialize"), [(torch.nan, False), (torch.inf, False), (torch.nan, True)])
@pytest.mark.parametrize("poisoned", [poisoned_input, poisoned_loss], ids=lambda f: f.__name__)
@every_family
def test_a_bad_sample_stays_in_its_own_row(
    family: Family, poisoned: Callable[..., Any], bad: float, materialize: bool
) -> None:
    if family.words and poisoned is poisoned_input:
        return
    call, objective = poisoned(family, bad)
    model = on(family.module(), materialize=materialize)
    objective(model, call).backward()
    expected = loop(family.module(), call, SAMPLES, objective=objective)
    good = [i for i in range(SAMPLES) if i != POISONED]
    grads = enn.per_sample_grads(model)
    flat = torch.cat([rows.reshape(SAMPLES, -1) for rows in expected.values()], 1)
    assert not flat[POISONED].isfinite().all()

    assert_close(grads.norms()[good], flat[good].norm(dim=1))
    assert not grads.norms()[POISONED].isfinite()
    for name, norms in grads.norms(per_parameter=True).items():
        assert_close(norms[good], expected[name].reshape(SAMPLES, -1).norm(dim=1)[good], name=name)
    assert_close(grads.gram()[good][:, good], flat[good] @ flat[good].T)
    vectors = {name: torch.ones(rows.shape[1:]) for name, rows in expected.items()}
    assert_close(grads.matvec(vectors)[good], flat[good].sum(1), 1e-6)
    assert_close(grads.flatten()[good], flat[good])
    with pytest.raises(enn.PerSampleError, match=rf"inf or NaN in the rows \[{POISONED}\]"):
        enn.clip_grad_sample_norms_(model, 1.0)
    for name, rows in rows_of(model).items():
        assert_close(rows[good], expected[name][good], name=name)
        assert_close(model.get_parameter(name).grad.nan_to_num(7, 7, 7), expected[name].sum(0).nan_to_num(7, 7, 7))
        assert torch.equal(rows[POISONED].isfinite(), expected[name][POISONED].isfinite()), name


def test_the_step_after_a_bad_sample() -> None:
    """Memory that held NaN is written over, not added to."""
    for family in FAMILIES:
        model = on(family.module(), materialize=True)
        call, objective = poisoned_loss(family, float("nan"))
        objective(model, call).backward()
        model.zero_grad()
        total_loss(model, family.call(SAMPLES)).backward()
        assert_close_rows(rows_of(model), loop(family.module(), family.call(SAMPLES), SAMPLES))


def test_clipping_leaves_the_gradient_alone_where_it_refuses() -> None:
    model = on(net())
    call = batch()
    call.args[0][POISONED] = float("nan")
    total_loss(model, call).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    with pytest.raises(enn.PerSampleError, match=r"Leave these samples out"):
        enn.clip_grad_sample_norms_(model, dict.fromkeys(before, 1.0))
    assert all(p.grad is before[name] for name, p in model.named_parameters())


def test_switching_off_lets_go_of_rows_with_a_graph() -> None:
    model = enn.convert(nn.Linear(3, 2)).per_sample()
    x = torch.randn(5, 3)
    alive = weakref.ref(x)
    torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    model.per_sample(False)
    del x
    gc.collect()
    assert alive() is None
