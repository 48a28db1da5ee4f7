"""What a converted model is used with: autocast, checkpoints, hooks, threads, transforms, copies, pruning.

Each against the sample-by-sample loop. What other files hold to for every layer is not said again here: second
derivatives and derivatives of the rows (test_layers, test_rnn, test_attention), parametrizations and pickles of a
model before and after a step (test_convert), passes (test_mechanism).
"""

import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import expanded_nn as enn
from cases import Scale
from expanded_nn.common.meanwhile import quiet
from expanded_nn.common.modes import without_fused_inference
from expanded_nn.recording.sharded import is_shard
from families import FAMILIES, Family, every_family, families
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    grads_of,
    loop,
    relative_error,
    rows_of,
    sample_losses,
    skip_without_bfloat16,
    take_rows,
    total_loss,
)
from workers import Rows, gradients_in_another_process, spawned

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # torch's RMSNorm
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # vmap of the plain module
]

SAMPLES = 3
with_numbers = pytest.mark.parametrize("family", [f for f in FAMILIES if not f.words], ids=lambda f: f.name)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def batch(samples: int = SAMPLES, seed: int = 1) -> Call:
    return Call((torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed)),))


def on(module: nn.Module, **settings: Any) -> nn.Module:
    return enn.convert(module).per_sample(loss_reduction="sum", **settings)


def right(model: nn.Module, expected: dict[str, Tensor], call: Call) -> None:
    """The rows of one backward, and their sum."""
    model.zero_grad()
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), expected)
    assert_close_rows(grads_of(model), {name: rows.sum(0) for name, rows in expected.items()})


# --- autocast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["backward_outside", "backward_inside"])
@every_family
def test_autocast(family: Family, inside: bool) -> None:
    """No less exact than torch's own step on each sample alone, in the dtype of the parameters."""
    module = family.module().float()
    call = family.call(SAMPLES).map(lambda t: t.float() if t.is_floating_point() else t)
    skip_without_bfloat16(module, call)
    model = on(module)

    def objective(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = call.on(module)
        return sample_losses(output.float(), first).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        objective(model, call).backward()
    exact = loop(copy.deepcopy(module).double(), family.call(SAMPLES), SAMPLES)
    autocast = loop(module, call, SAMPLES, objective=objective)
    for name, rows in rows_of(model).items():
        assert rows.dtype == model.get_parameter(name).grad.dtype == torch.float32
        allowed = 2 * relative_error(autocast[name], exact[name]) + 4 * torch.finfo(torch.bfloat16).eps
        assert_close(rows, exact[name], tol=allowed, name=name)


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prototypes = nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x), self.prototypes)


def test_operation_that_autocast_keeps_in_float32() -> None:
    """By itself `vmap` would give `cdist` half precision, for which there is none."""
    module, call = Prototypes().float(), batch().map(Tensor.float)
    model = on(module)

    def objective(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = call.on(module)
        return sample_losses(output.float(), first).sum()

    objective(model, call).backward()
    expected = loop(module, call, SAMPLES, objective=objective)
    for name, rows in rows_of(model).items():
        assert_close(rows, expected[name], tol=4 * torch.finfo(torch.bfloat16).eps, name=name)


# --- checkpoints ----------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A model whose forward is computed again in the backward, once or at two levels."""

    def __init__(self, inner: nn.Module, use_reentrant: bool, nested: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant, self.nested = use_reentrant, nested

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.deeper if self.nested else self.inner, x, use_reentrant=self.use_reentrant).tanh()

    def deeper(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@every_family
def test_checkpoint(family: Family, use_reentrant: bool, nested: bool) -> None:
    if use_reentrant and family.words:
        return  # a reentrant checkpoint asks for an input with gradient, which words have not
    call = family.call(SAMPLES)
    expected = loop(Checkpointed(family.module(), False), call, SAMPLES)  # torch.autograd.grad refuses reentrant ones
    model = on(Checkpointed(family.module(), use_reentrant, nested))
    call = call.requires_grad() if use_reentrant else call
    for _ in range(2):
        right(model, expected, call)


class Drawing(nn.Module):
    """Has a parameter of its own beside a layer, and draws random numbers in some way."""

    def __init__(self, draw: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale, self.draw = nn.Linear(4, 4), nn.Parameter(torch.linspace(0.5, 1.5, 4)), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self, self.layer(x))


def channels_last(*layers: nn.Module) -> nn.Module:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unflatten(-1, (2, 2)).transpose(1, 2).to(memory_format=torch.channels_last))

    return Model(*layers, nn.Dropout(0.5))


# what gives the same numbers in both forwards of a reentrant checkpoint; and what is refused there
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "of_results": lambda: Drawing(lambda m, h: F.dropout(h * m.scale)),
    "noise": lambda: Drawing(lambda m, h: h * m.scale + torch.randn_like(h)),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
    "group_norm": lambda: channels_last(nn.GroupNorm(1, 2)),
    "prelu": lambda: channels_last(nn.PReLU(2)),
}
DRAWING_OTHERWISE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of_a_weight": lambda m, h: h * F.dropout(m.scale),
    "of_what_all_share": lambda m, h: h + torch.rand(len(h[0]), 1) * m.scale,
    "in_another_order": lambda m, h: F.dropout((h * m.scale).mT).mT,
    "folded": lambda m, h: F.dropout(h.transpose(0, 1).flatten(0, 1) * m.scale).unflatten(0, (-1, len(h))).mT,
}


@pytest.mark.parametrize("name", [*DRAWING, *DRAWING_OTHERWISE])
@pytest.mark.parametrize("nested", [False, True])
def test_random_numbers_in_a_reentrant_checkpoint(name: str, nested: bool) -> None:
    """The gradient is that of the loss that was computed, whose forward had no gradients, or it is an error."""
    module = DRAWING[name]() if name in DRAWING else Drawing(DRAWING_OTHERWISE[name])
    model, x = on(module), torch.randn(SAMPLES, 5, 4, requires_grad=True)

    def loss(part: nn.Module) -> Tensor:
        torch.manual_seed(1)
        inner = partial(checkpoint, part, use_reentrant=False) if nested else part
        return checkpoint(inner, x, use_reentrant=True).exp().sum()

    for _ in range(3):
        model.zero_grad()
        module.zero_grad()
        ours, plain = loss(model), loss(module)
        plain.backward()
        if name in DRAWING_OTHERWISE:
            with pytest.raises(enn.PerSampleError, match=r"draws random numbers .*use_reentrant=False"):
                ours.backward()
            continue
        ours.backward()
        assert float(ours.detach()) == pytest.approx(float(plain.detach()))
        for mine, theirs in zip(model.parameters(), module.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad)
            assert_close(mine.grad_sample.sum(0), theirs.grad)


_ATEN = torch.ops.aten
_KEPT = (_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.tanh, _ATEN.embedding, _ATEN.native_layer_norm, _ATEN._softmax)
KEEPING = partial(create_selective_checkpoint_contexts, [operation.default for operation in _KEPT])


@every_family
def test_selective_checkpoint(family: Family) -> None:
    class Selective(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=KEEPING).tanh()

    call = family.call(SAMPLES)
    model, expected = on(Selective(family.module(), False)), loop(Checkpointed(family.module(), False), call, SAMPLES)
    for _ in range(2):
        right(model, expected, call)


class Positions(nn.Module):
    """What is between its layers is counted by the checkpoint, and looked at: samples in order, copies of positions."""

    keeping: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.places = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(5, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, **self.keeping)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().flip(1)
        h = h + torch.tanh(self.places(torch.arange(5)))
        return self.second((h @ h.mT).softmax(-1) @ h.tanh())


def test_selective_checkpoint_of_more_than_a_layer() -> None:
    call = Call((torch.randn(SAMPLES, 5, 4, dtype=torch.float64),))
    module = Positions()
    expected = loop(module, call, SAMPLES)
    module.keeping = {"context_fn": KEEPING}
    model = on(module)
    for _ in range(2):
        right(model, expected, call)


class Blocks(nn.Module):
    """Each block is a checkpoint of its own, as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_checkpoint_of_a_block_leaves_nothing_behind() -> None:
    """Neither in cycles, which wait for the garbage collector, nor behind nodes that hold each other for ever."""
    model, made = on(Blocks().double()), []
    for layer in model.modules():
        layer.register_forward_hook(lambda layer, args, y: made.append(weakref.ref(y)))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            made.clear()
            model.zero_grad()
            model(torch.randn(SAMPLES, 4, dtype=torch.float64)).square().sum().backward()
            assert len(made) > 8
            assert not [y for y in made if y() is not None]
    finally:
        gc.enable()


def test_a_checkpoint_of_a_block_is_computed_once_more() -> None:
    model, calls = on(Blocks().double()), []
    model.blocks[0][0].register_forward_pre_hook(lambda *_: calls.append(torch._C._current_graph_task_id() >= 0))
    for _ in range(3):
        calls.clear()
        model.zero_grad()
        model(torch.randn(SAMPLES, 4, dtype=torch.float64)).square().sum().backward()
    assert calls.count(True) == 1


class Passing(TorchDispatchMode):
    """A mode that looks on, as one that counts operations."""

    seen: ClassVar[set[Any]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class LookedAt(Positions):
    def inner(self, x: Tensor) -> Tensor:
        with Passing():
            return super().inner(x)


def test_selective_checkpoint_with_another_mode_within() -> None:
    call = Call((torch.randn(SAMPLES, 5, 4, dtype=torch.float64),))
    module = LookedAt()
    expected = loop(module, call, SAMPLES)
    module.keeping = {"context_fn": KEEPING}
    model = on(module)
    for _ in range(2):
        Passing.seen.clear()
        right(model, expected, call)
        assert _ATEN.embedding.default in Passing.seen  # what a layer runs


# --- hooks ----------------------------------------------------------------------------------------------------


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called and hold no general module inside, so that backward hooks are allowed."""
    for module in model.modules():
        if not list(module.children()) and any(True for _ in module.parameters()):
            yield module


@with_numbers
def test_forward_hooks_that_change_what_goes_in_and_out(family: Family) -> None:
    module = family.module()
    module.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    module.register_forward_hook(lambda module, args, out: out.sin())
    for layer in layers(module):
        layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))
    right(on(module), loop(module, family.call(SAMPLES), SAMPLES), family.call(SAMPLES))


@families("mlp", "cnn", "conv_transpose", "instance_norm", "batch_norm", "lstm", "transformer")
def test_full_backward_hooks_that_change_gradients(family: Family) -> None:
    """Such a hook speaks of a layer's input, so it reaches the layers before."""
    module = family.module()
    for layer in layers(module):
        layer.register_full_backward_pre_hook(lambda module, out: tuple(g if g is None else 0.5 * g for g in out))
        layer.register_full_backward_hook(lambda module, into, out: tuple(g if g is None else 3 * g for g in into))
    call = family.call(SAMPLES)
    right(on(module), loop(module, call, SAMPLES), call)
    right(on(module), loop(module, call, SAMPLES), call.requires_grad())


def test_hook_on_the_output_that_changes_the_gradient_of_one_sample() -> None:
    model, seen = on(net()), []
    out = batch().on(model)
    out.register_hook(lambda g: seen.append(1) or g * torch.tensor([1.0, 0.0, 2.0])[:, None])
    sample_losses(out).sum().backward()
    expected = loop(net(), batch(), SAMPLES)
    factor = torch.tensor([1.0, 0.0, 2.0])
    assert_close_rows(rows_of(model), {n: r * factor.reshape(-1, *[1] * (r.dim() - 1)) for n, r in expected.items()})
    assert seen == [1]


# --- which gradients are asked for ----------------------------------------------------------------------------


@with_numbers
def test_gradients_of_the_inputs_alone_leave_no_rows(family: Family) -> None:
    model, module = on(family.module()), family.module()
    call = family.call(SAMPLES).requires_grad()
    loss = total_loss(model, call)
    for _ in range(2):
        grads = torch.autograd.grad(loss, call.floats(), retain_graph=True)
    assert_close(grads[0], torch.autograd.grad(total_loss(module, call), call.floats())[0])
    assert all(p.grad_sample is None and p.grad is None for p in model.parameters())
    loss.backward()
    assert_close_rows(rows_of(model), loop(module, family.call(SAMPLES), SAMPLES))


def test_backward_for_some_leaves_alone() -> None:
    model = on(net())
    x = batch().args[0].requires_grad_()
    total_loss(model, Call((x,))).backward(inputs=[x, model[3].weight])
    expected = loop(net(), batch(), SAMPLES)
    assert_close(model[3].weight.grad_sample, expected["3.weight"])
    assert all(p.grad_sample is None for name, p in model.named_parameters() if name != "3.weight")


def test_torch_autograd_grad_of_parameters_adds_no_rows_to_those_held() -> None:
    """It adds nothing to `.grad` either."""
    model = on(net())
    total_loss(model, batch()).backward()
    torch.autograd.grad(total_loss(model, batch(seed=2)), list(model.parameters()))
    assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES))


@pytest.mark.parametrize("held", [False, True], ids=["first", "accumulating"])
def test_gradients_of_parameters_inside_the_loss(held: bool) -> None:
    """The norm of each row, taken by `torch.autograd.grad` inside the loss: it must not count as a backward."""
    model = on(net())
    if held:
        total_loss(model, batch(seed=2)).backward()
    loss = total_loss(model, batch())
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward()
    expected = loop(net(), batch(), SAMPLES)
    if held:
        before = loop(net(), batch(seed=2), SAMPLES)
        expected = {name: torch.cat([before[name], rows]) for name, rows in expected.items()}
    assert_close_rows(rows_of(model), expected)


def test_rows_of_torch_autograd_grad_stand_alone() -> None:
    """With create_graph=True they are there, for a loss to contain them; the next backward brings back those held."""
    model = on(net())
    total_loss(model, batch(seed=2)).backward()
    torch.autograd.grad(total_loss(model, batch()), [model[0].weight, model[0].bias], create_graph=True)
    expected = loop(net(), batch(), SAMPLES)
    assert_close(model[0].weight.grad_sample.detach(), expected["0.weight"])
    assert model[3].weight.grad_sample is None
    assert_close(enn.per_sample_grads(model).norms() ** 2, sum(squares(expected[f"0.{p}"]) for p in ("weight", "bias")))
    total_loss(model, batch(4, seed=3)).backward()
    parts = [loop(net(), batch(n, seed), n) for n, seed in ((SAMPLES, 2), (4, 3))]
    assert_close_rows(rows_of(model), {name: torch.cat([part[name] for part in parts]) for name in expected})


def squares(rows: Tensor) -> Tensor:
    """The squared norms of the rows."""
    return rows.flatten(1).square().sum(1)


def test_rows_of_torch_autograd_grad_that_were_taken_away() -> None:
    """Whoever sets `grad_sample` to `None` has reset it, with what was held before."""
    model = on(net())
    total_loss(model, batch(seed=2)).backward()
    torch.autograd.grad(total_loss(model, batch()), list(model.parameters()), create_graph=True)
    for p in model.parameters():
        p.grad_sample = None
    total_loss(model, batch(4, seed=3)).backward()
    assert_close_rows(rows_of(model), loop(net(), batch(4, seed=3), 4))


@pytest.mark.parametrize("create_graph", [False, True])
def test_torch_autograd_grad_without_accumulation(create_graph: bool) -> None:
    """It gives the gradients, which a backward in this mode leaves out."""
    model = on(net(), accumulate_grad=False)
    total_loss(model, batch(seed=2)).backward()
    grads = torch.autograd.grad(total_loss(model, batch()), list(model.parameters()), create_graph=create_graph)
    for (name, rows), grad in zip(loop(net(), batch(), SAMPLES).items(), grads, strict=True):
        assert_close(grad.detach(), rows.sum(0), name=name)
    if not create_graph:
        assert_close_rows(rows_of(model), loop(net(), batch(seed=2), SAMPLES))


def test_torch_autograd_grad_of_two_batches() -> None:
    """Parameters that one of them has not used have zero rows there."""
    model = on(net())
    loss = total_loss(model, batch()) + total_loss(model[3], Call((torch.ones(2, 5),)))
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert {len(p.grad_sample) for p in model.parameters()} == {SAMPLES + 2}
    assert_close(model[0].weight.grad_sample[SAMPLES:].detach(), torch.zeros(2, 5, 4))


def test_gradients_of_the_inputs_through_a_checkpoint_leave_the_rows_alone() -> None:
    """Its forward in the middle of `torch.autograd.grad` is no backward of the parameters."""
    model = on(Checkpointed(net(), False), accumulate_grad=False)
    total_loss(model, batch(seed=2)).backward()
    call = batch().requires_grad()
    torch.autograd.grad(total_loss(model, call), call.floats())
    assert_close_rows(rows_of(model), loop(Checkpointed(net(), False), batch(seed=2), SAMPLES))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@families("mlp", "cnn", "embedding", "lstm", "attention", "general")
def test_backward_through_a_loss_on_the_rows(family: Family) -> None:
    """Both backwards belong to one pass: row i is the gradient of sample i's loss and of its row's squared norm."""
    model, call = on(family.module()), family.call(SAMPLES)
    total_loss(model, call).backward(create_graph=True)
    sum(rows.square().sum() for rows in rows_of(model).values()).backward()

    def both(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        loss = total_loss(module, call, first)
        grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the fused kernel has no second
        expected = loop(family.module(), call, SAMPLES, objective=both)
    assert_close_rows({name: rows.detach() for name, rows in rows_of(model).items()}, expected)


# --- batches --------------------------------------------------------------------------------------------------


@every_family
def test_batches_of_changing_size_are_appended(family: Family) -> None:
    model, module = on(family.module()), family.module()
    sizes = [3, 1, 4, 2]
    for seed, samples in enumerate(sizes):
        total_loss(model, family.call(samples, seed)).backward()
    parts = [loop(module, family.call(samples, seed), samples) for seed, samples in enumerate(sizes)]
    expected = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert_close_rows(rows_of(model), expected)
    assert_close_rows(grads_of(model), {name: rows.sum(0) for name, rows in expected.items()})
    norms = torch.cat([rows.reshape(len(rows), -1) for rows in expected.values()], 1).norm(dim=1)
    assert_close(enn.per_sample_grads(model).norms(), norms)


@every_family
def test_an_empty_batch_among_others(family: Family) -> None:
    if family.name in ("rnn", "lstm", "gru"):
        return  # torch's own layers refuse it
    model = on(family.module())
    for samples in (2, 0, 3):
        total_loss(model, family.call(samples, samples)).backward()
    parts = [loop(family.module(), family.call(samples, samples), samples) for samples in (2, 3)]
    assert_close_rows(rows_of(model), {name: torch.cat([part[name] for part in parts]) for name in parts[0]})


# --- threads --------------------------------------------------------------------------------------------------


@contextmanager
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(*functions: Callable[[], None]) -> list[BaseException]:
    """Runs all at the same time; what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def guarded(function: Callable[[], None]) -> None:
        torch.set_default_dtype(torch.float64)
        start.wait()
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    with eager_switches():
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return raised


def test_models_in_threads_of_their_own() -> None:
    chosen = [family for family in FAMILIES if family.name in ("mlp", "cnn", "embedding", "general")]

    def steps(family: Family, model: nn.Module, expected: dict[str, Tensor]) -> Callable[[], None]:
        return lambda: [right(model, expected, family.call(SAMPLES)) for _ in range(10)] and None

    runs = [steps(f, on(f.module()), loop(f.module(), f.call(SAMPLES), SAMPLES)) for f in chosen]
    assert in_threads(*runs) == []


def test_switches_of_the_process_are_put_back_by_the_last_of_two_threads() -> None:
    """Torch has one for attention's inference, and Python one list of filters of warnings, for all threads."""
    first, second, filters = ExitStack(), ExitStack(), [*warnings.filters]
    for each in (first, second):
        each.enter_context(without_fused_inference)
        each.enter_context(quiet())
    for each in (first, second):
        assert not torch.backends.mha.get_fastpath_enabled()
        warnings.warn("not seen", stacklevel=1)
        each.close()
    assert torch.backends.mha.get_fastpath_enabled()
    assert warnings.filters == filters


def test_saved_tensors_in_another_dtype() -> None:
    """By methods of torch's own, which have no module."""
    model, module = on(net()), net()
    with saved_tensors_hooks(Tensor.double, Tensor.double):
        loss = total_loss(model, batch())
    loss.backward()
    assert_close_rows(rows_of(model), loop(module, batch(), SAMPLES))


def test_step_while_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch imports `torch.distributed.tensor` when it is first needed; a module stands there empty meanwhile."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_shard(net()[0].weight)


def test_forward_and_backward_in_different_threads() -> None:
    model, losses = on(net()), []
    assert in_threads(lambda: losses.append(total_loss(model, batch()))) == []
    assert in_threads(losses[0].backward) == []
    assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES))


def test_one_model_in_two_threads_at_once_is_refused() -> None:
    """A hook keeps the first thread inside its forward until the second has tried its own."""
    model = on(net())
    inside, tried = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any, out: Tensor) -> None:
        if not inside.is_set():
            inside.set()
            tried.wait(10)

    model[0].register_forward_hook(wait)

    def second() -> None:
        inside.wait(10)
        try:
            total_loss(model, batch(seed=2)).backward()
        finally:
            tried.set()

    raised = in_threads(lambda: total_loss(model, batch()).backward(), second)
    assert [type(each) for each in raised] == [enn.PerSampleError]
    assert "thread" in str(raised[0])


def test_inference_in_another_thread() -> None:
    model, module = on(net()), net()

    def infer() -> None:
        with torch.no_grad():
            for _ in range(20):
                assert_close(batch(5).on(model), batch(5).on(module).detach(), tol=1e-12)

    expected = loop(net(), batch(), SAMPLES)
    assert in_threads(infer, lambda: [right(model, expected, batch()) for _ in range(10)] and None) == []


# --- conversion in parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_part_converted_and_switched_on_before_the_whole(inplace: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scale(4))
    enn.convert(inner, inplace=True).per_sample()
    total_loss(inner, batch()).backward()
    outer = nn.Sequential(inner, nn.LayerNorm(4), nn.Linear(4, 2))
    module = enn.revert(outer)
    model = enn.convert(outer, inplace=inplace)
    model = enn.convert(model, inplace=inplace).per_sample(loss_reduction="sum")
    right(model, loop(module, batch(), SAMPLES), batch())


def test_part_of_a_model_switched_off() -> None:
    """A part that is off trains as ever: its parameters have a gradient and no rows."""
    model = on(net())
    model[0].per_sample(False)
    total_loss(model, batch()).backward()
    expected = loop(net(), batch(), SAMPLES)
    assert model[0].weight.grad_sample is None
    assert_close(model[0].weight.grad, expected["0.weight"].sum(0))
    assert_close(model[3].weight.grad_sample, expected["3.weight"])


def test_no_bags_by_offsets() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(9, 4)

        def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
            return self.table(words, offsets)

    model, none = enn.convert(Bags()).per_sample(), torch.zeros(0, dtype=torch.long)
    model(none, none).sum().backward()
    assert model.table.weight.grad_sample.shape == (0, 9, 4)


def test_bags_by_offsets_beside_the_number_of_samples() -> None:
    """With the last offset there is one more than there are bags."""
    module = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)
    model = on(module, batch_size=3)
    words, offsets = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.tensor([0, 3, 4, 8])
    model(words, offsets).sum().backward()
    expected = torch.stack([F.one_hot(words[a:b], 9).sum(0) for a, b in pairwise(offsets)])
    assert_close(model.weight.grad_sample, expected[..., None].expand(3, 9, 4).to(torch.float64))


def test_a_shallow_copy_leaves_the_rows() -> None:
    model = on(net())
    total_loss(model, batch()).backward()
    copied = copy.copy(model)
    assert copied[0].weight is model[0].weight
    assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES))
    enn.clip_grad_sample_norms_(model, 1.0)


def test_a_part_of_a_computed_weight_that_is_frozen_after_the_forward() -> None:
    module = parametrizations.weight_norm(nn.Linear(4, 3))
    model, expected = on(module), loop(module, batch(), SAMPLES)
    loss = total_loss(model, batch())
    model.parametrizations.weight.original0.requires_grad_(False)
    loss.backward()
    first, second = model.parametrizations.weight.original0, model.parametrizations.weight.original1
    assert first.grad is None
    assert first.grad_sample is None
    assert_close(second.grad_sample, expected["parametrizations.weight.original1"])


def test_a_weight_expanded_within_the_forward_of_another_thread_is_refused() -> None:
    model, raised = on(net()), []

    def expand(*_: Any) -> None:
        raised.extend(in_threads(lambda: enn.expanded(model[3].weight)))

    model[0].register_forward_hook(expand)
    model(*batch().args)
    assert "another thread is in the middle of a forward" in str(raised[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].per_sample(materialize=True),
        lambda m: m[0].per_sample(False),
        lambda m: enn.revert(m[0], inplace=True),
    ],
    ids=["another_recorder", "off", "reverted"],
)
def test_rows_from_before_a_part_is_switched_are_gone(change: Callable[[Any], Any]) -> None:
    """Of the whole model: clipping would take those of the last step for those of the next."""
    model = on(net())
    total_loss(model, batch()).backward()
    change(model)
    assert all(getattr(parameter, "grad_sample", None) is None for parameter in model.parameters())


class UsedTwice(nn.Module):
    """A layer whose weight and bias are used once more by the functional form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x)).tanh()
        h = enn.functional.linear(h, enn.expanded(self.layer.weight), enn.expanded(self.layer.bias))
        return enn.functional.layer_norm(h, (4,), enn.expanded(self.norm.weight), enn.expanded(self.norm.bias))


@pytest.mark.parametrize("frozen", ["none", "layer.weight", "layer.bias", "norm.weight", "norm.bias"])
@pytest.mark.parametrize("positions", [3, 5])  # as many as samples, or others
def test_a_frozen_parameter_in_a_functional_form(frozen: str, positions: int) -> None:
    """`expanded` gives it as it is, beside the expanded other one."""
    module, call = UsedTwice(), Call((torch.randn(3, positions, 4),))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    sample_losses(call.on(model)).sum().backward()
    assert_close_rows(rows_of(model), loop(module, call, 3))


# --- torch.func and functional calls --------------------------------------------------------------------------


@every_family
def test_transforms_in_plain_mode_are_those_of_the_plain_module(family: Family) -> None:
    module, call = family.module(), family.call(SAMPLES)
    model = enn.convert(module).per_sample().per_sample(False)

    def rows(module: nn.Module) -> Any:
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(module, parameters, (x[None],)).sin().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, *call.args)

    try:
        expected = rows(module)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            rows(model)
        return
    actual = rows(model)
    for name, each in expected.items():
        assert torch.equal(actual[name], each), name


def test_forward_mode_and_jacobians_in_plain_mode() -> None:
    module, x = net(), batch().args[0]
    model = enn.convert(module).per_sample().per_sample(False)
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        assert torch.equal(transform(model)(x), transform(module)(x))
    assert torch.equal(torch.func.jvp(model, (x,), (x.cos(),))[1], torch.func.jvp(module, (x,), (x.cos(),))[1])
    hessians = [torch.func.hessian(lambda x, each=each: each(x).sum())(x) for each in (model, module)]
    assert torch.equal(*hessians)


@every_family
def test_functional_call_with_other_leaves(family: Family) -> None:
    """The rows belong to the tensors that were given, not to the model's own parameters."""
    if family.name == "parametrized":
        return  # torch computes its weight before the call
    model, module = on(family.module()), family.module()
    given = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
    output = torch.func.functional_call(model, given, family.call(SAMPLES).args)
    sample_losses(output).sum().backward()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(given[name])
    expected = loop(module, family.call(SAMPLES), SAMPLES)
    assert_close_rows({name: p.grad_sample for name, p in given.items()}, expected)
    assert_close_rows({name: p.grad for name, p in given.items()}, {n: r.sum(0) for n, r in expected.items()})
    assert all(p.grad_sample is None and p.grad is None for p in model.parameters())


@families("mlp", "cnn", "embedding", "lstm")
def test_functional_call_with_computed_weights(family: Family) -> None:
    """A step of an inner loop: the rows are those of the leaves that the weights were computed from."""
    model, module = on(family.module()), family.module()
    call = family.call(SAMPLES)

    def loss(given: nn.Module, leaves: dict[str, Tensor], call: Call, first: int = 0) -> Tensor:
        weights = {name: (0.5 * each).tanh() for name, each in leaves.items()}
        return sample_losses(torch.func.functional_call(given, weights, call.args), first).sum()

    def fresh() -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    ours, theirs = fresh(), fresh()
    loss(model, ours, call).backward()
    rows = [
        torch.autograd.grad(loss(module, theirs, take_rows(call, i), i), list(theirs.values())) for i in range(SAMPLES)
    ]
    for (name, leaf), *own in zip(ours.items(), *rows, strict=True):
        assert_close(leaf.grad_sample, torch.stack(own), name=name)


# --- tracing, export, compilation, in plain mode --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch's own layers look at sizes
@families("mlp", "cnn", "embedding", "lstm", "general_with_layers")
def test_jit_trace_in_plain_mode(family: Family) -> None:
    model, call = enn.convert(family.module().eval()).per_sample().per_sample(False), family.call(SAMPLES)
    traced = torch.jit.trace(model, call.args)
    assert_close(call.on(traced), call.on(family.module().eval()).detach(), tol=1e-12)


def test_attributes_of_a_layer_that_is_off_can_be_asked_for() -> None:
    """Tools walk over `dir(module)`, and take an AttributeError for a no."""
    layer = enn.Linear(4, 2)
    for name in dir(layer):
        if not name.startswith("__"):
            getattr(layer, name, None)


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights.* were assigned during export")  # torch's GRU
@families("mlp", "cnn", "embedding", "gru", "transformer", "general_with_layers")
def test_export_in_plain_mode(family: Family) -> None:
    model, call = enn.convert(family.module().eval()).per_sample().per_sample(False), family.call(SAMPLES)
    exported = torch.export.export(model, call.args)
    assert_close(call.on(exported.module()), call.on(family.module().eval()).detach(), tol=1e-12)


@families("mlp", "cnn", "embedding", "general_with_layers")
def test_compile_in_plain_mode(family: Family) -> None:
    """As one graph; back in per-sample mode the rows are right."""
    torch._dynamo.reset()
    model, call = enn.convert(family.module()).per_sample().per_sample(False), family.call(SAMPLES)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    total_loss(compiled, call).backward()
    expected = loop(family.module(), call, SAMPLES)
    assert_close_rows(grads_of(model), {name: rows.sum(0) for name, rows in expected.items()})
    assert all(p.grad_sample is None for p in model.parameters())
    model.per_sample(loss_reduction="sum")
    right(model, expected, call)


# --- lazy, meta, dtype ----------------------------------------------------------------------------------------


def test_lazy_modules_convert_once_they_have_shapes() -> None:
    module = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyInstanceNorm1d(affine=True), nn.Flatten(), nn.LazyLinear(2))
    call = Call((torch.randn(SAMPLES, 2, 7),))
    with pytest.raises(enn.ConversionError, match=r"0 \(LazyConv1d\): its parameters have no shape yet; run the model"):
        enn.convert(module)
    call.on(module)
    right(on(module), loop(module, call, SAMPLES), call)


def test_meta_device() -> None:
    for family in FAMILIES:
        if family.name in ("embedding", "embedding_bag", "tied", "general", "general_with_layers"):
            continue  # they look at values: of an index, and of what the general rule compares
        if family.name == "parametrized" and not torch._C._dispatch_has_kernel_for_dispatch_key(
            "aten::_weight_norm_interface_backward", "Meta"
        ):
            continue  # an older torch
        model = on(family.module()).to("meta")
        family.call(SAMPLES).map(lambda t: t.to("meta")).on(model).sum().backward()
        for p in model.parameters():
            assert p.grad_sample.shape == (SAMPLES, *p.shape)
            assert p.grad_sample.device.type == p.grad.device.type == "meta"


@pytest.mark.parametrize("name", ["embedding", "embedding_bag", "general"])
def test_meta_device_where_values_are_looked_at(name: str) -> None:
    """Shapes all the same, or an error that names the layer."""
    family = next(each for each in FAMILIES if each.name == name)
    model = on(family.module()).to("meta")
    try:
        family.call(SAMPLES).map(lambda t: t.to("meta")).on(model).sum().backward()
    except enn.PerSampleError as error:
        assert "meta" in str(error)  # noqa: PT017
        return
    assert all(p.grad_sample.shape == (SAMPLES, *p.shape) for p in model.parameters())


@every_family
def test_dtype_changed_after_the_conversion(family: Family) -> None:
    model = on(family.module().float())
    single = family.call(SAMPLES).map(lambda t: t.float() if t.is_floating_point() else t)
    total_loss(model, single).backward()
    assert all(p.grad_sample.dtype == torch.float32 for p in model.parameters())
    model.double().load_state_dict(family.module().state_dict())
    right(model, loop(family.module(), family.call(SAMPLES), SAMPLES), family.call(SAMPLES))
    assert all(p.grad_sample.dtype == torch.float64 for p in model.parameters())


def test_clipping_after_a_change_of_dtype() -> None:
    """Rows held from before are of another dtype than the parameter; what is set is of the parameter's."""
    model = on(net().float())
    total_loss(model, batch().map(Tensor.float)).backward()
    model.double()
    enn.clip_grad_sample_norms_(model, 1.0)
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())


# --- copies and processes -------------------------------------------------------------------------------------


@every_family
def test_pickle_of_a_model_that_holds_rows(family: Family) -> None:
    if family.name == "parametrized":
        return  # torch refuses to pickle parametrized modules
    model, call = on(family.module(), materialize=family.name == "cnn"), family.call(SAMPLES)
    total_loss(model, call).backward()
    before = {name: rows.clone() for name, rows in rows_of(model).items()}
    twin = pickle.loads(pickle.dumps(model))
    expected = loop(family.module(), call, SAMPLES)
    right(twin, expected, call)
    total_loss(model, call).backward()  # the original goes on, and appends
    assert_close_rows(rows_of(model), {name: torch.cat([before[name], rows]) for name, rows in expected.items()})


def test_copy_between_forward_and_backward() -> None:
    model, expected = on(net()), loop(net(), batch(), SAMPLES)
    loss = total_loss(model, batch())
    twin = copy.deepcopy(model)
    right(twin, expected, batch())
    loss.backward()
    assert_close_rows(rows_of(model), expected)
    assert_close_rows(rows_of(twin), expected)


def test_copy_made_inside_a_forward() -> None:
    """As an average of the weights might be updated in a hook."""
    model, twins = on(net()), []
    handle = model[1].register_forward_hook(lambda *_: twins.append(copy.deepcopy(model)))
    expected = loop(net(), batch(), SAMPLES)
    loss = total_loss(model, batch())
    handle.remove()
    loss.backward()
    assert_close_rows(rows_of(model), expected)
    right(twins[0], expected, batch())


def test_spawned_process_computes_the_same_rows() -> None:
    model, call = on(net()), batch()
    total_loss(model, call).backward()
    theirs = spawned(gradients_in_another_process, model, call.args[0])
    assert_close_rows({name: torch.as_tensor(rows) for name, rows in theirs.items()}, loop(net(), call, SAMPLES))


def test_model_in_the_workers_of_a_data_loader() -> None:
    """A converted model, with rows, inside a data set that spawned workers use."""
    model = on(net())
    total_loss(model, batch()).backward()
    loader = DataLoader(Rows(model, batch(4).args[0]), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    rows = list(loader)
    assert len(rows) == 4
    for i, row in enumerate(rows):
        alone = Call((batch(4).args[0][i : i + 1],))
        assert_close(row, loop(net(), alone, 1)["0.weight"][0])


# --- averages, pruning, norms of weights ----------------------------------------------------------------------


def test_averaged_model() -> None:
    model = on(net())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        right(model, loop(enn.revert(model), batch(seed=seed), SAMPLES), batch(seed=seed))
        optimizer.step()
        averaged.update_parameters(model)
    assert all(p.grad_sample is None for p in averaged.parameters())
    right(averaged.module, loop(enn.revert(averaged.module), batch(), SAMPLES), batch())


@pytest.mark.parametrize("when", ["before", "after"])
def test_pruning(when: str) -> None:
    """The rows are those of the parameter behind the mask."""

    def pruned(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        for layer, name in ((model[0], "weight"), (model[3], "weight"), (model[3], "bias")):
            prune.random_unstructured(layer, name, 0.4)
        return model

    if when == "before":
        model = enn.convert(pruned(net()), inplace=True).per_sample(loss_reduction="sum")
    else:
        model = pruned(on(net()))
    expected = loop(pruned(net()), batch(), SAMPLES, create_graph=True)  # pruned modules cannot be copied
    right(model, {name: rows.detach() for name, rows in expected.items()}, batch())
    assert set(rows_of(model)) >= {"0.weight_orig", "3.weight_orig", "3.bias_orig"}
    for layer in (model[0], model[3]):
        prune.remove(layer, "weight")
    prune.remove(model[3], "bias")
    module = enn.revert(model)
    right(model.per_sample(loss_reduction="sum"), loop(module, batch(), SAMPLES), batch())


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
def test_old_spectral_norm_in_place(training: bool) -> None:
    def normed() -> nn.Module:
        module = net()
        nn.utils.spectral_norm(module[0])
        return module.train(training)

    model = enn.convert(normed(), inplace=True).per_sample(loss_reduction="sum")
    total_loss(model, batch()).backward()
    module = normed()
    batch().on(module)  # one step of the power iteration, as the batch has made
    expected = loop(module.eval(), batch(), SAMPLES, create_graph=True)
    assert_close_rows(rows_of(model), {name: rows.detach() for name, rows in expected.items()})


def test_parametrization_registered_in_the_middle_of_training() -> None:
    model, module = on(net()), net()
    total_loss(model, batch(seed=2)).backward()
    for each in (model, module):
        each.zero_grad()
        parametrizations.weight_norm(each[0])
    total_loss(model, batch()).backward()
    assert_close_rows(rows_of(model), loop(module, batch(), SAMPLES))


# --- shapes and layouts of memory -----------------------------------------------------------------------------


@with_numbers
def test_input_that_is_not_contiguous(family: Family) -> None:
    """Every second row of a larger tensor, flipped, with its last two dimensions stored the other way round."""
    (x,) = family.call(2 * SAMPLES).args
    odd = x.flip(0)[::2]
    odd = odd if odd.dim() < 3 else odd.mT.contiguous().mT
    right(on(family.module()), loop(family.module(), Call((odd,)), SAMPLES), Call((odd,)))


@every_family
def test_gradient_of_the_output_that_is_not_contiguous(family: Family) -> None:
    """As a sum gives it: one number seen many times (stride 0), and a transposed one."""
    for objective in (
        lambda module, call, first=0: call.on(module).sum(),
        lambda module, call, first=0: (call.on(module).flatten(1).T.contiguous().cumsum(0)).sum(),
    ):
        model, call = on(family.module()), family.call(SAMPLES)
        objective(model, call).backward()
        assert_close_rows(rows_of(model), loop(family.module(), call, SAMPLES, objective=objective))


@every_family
def test_layer_used_again_on_what_comes_from_it(family: Family) -> None:
    """One model on two inputs, their outputs multiplied, so that each use's gradient depends on the other."""
    calls = [family.call(SAMPLES, seed) for seed in (1, 2)]

    def product(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return sample_losses(module(call.args[0]) * module(call.args[1]), first).sum()

    pair = Call((calls[0].args[0], calls[1].args[0]))
    model = on(family.module())
    product(model, pair).backward()
    assert_close_rows(rows_of(model), loop(family.module(), pair, SAMPLES, objective=product))


@every_family
def test_second_backward_on_a_retained_graph(family: Family) -> None:
    model, call = on(family.module()), family.call(SAMPLES)
    loss = total_loss(model, call)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = {name: 2 * rows for name, rows in loop(family.module(), call, SAMPLES).items()}
    assert_close_rows(rows_of(model), expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_layers_that_share_weights_crosswise() -> None:
    """The weight of the one is that of the other, the bias of the other that of the one; one is used twice."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight, self.one.bias = self.one.weight, self.two.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh()) * self.one(x)

    module = Shared()
    right(on(module), loop(module, batch(), SAMPLES), batch())


def test_losses_of_samples_weighted_by_hand() -> None:
    """The rows follow the loss that was given, sample by sample."""
    weights, y = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1, 0, 1])
    model = on(net())
    (F.cross_entropy(batch().on(model), y, reduction="none") * weights).sum().backward()

    def own(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return weights[first] * F.cross_entropy(call.on(module), y[first : first + 1])

    assert_close_rows(rows_of(model), loop(net(), batch(), SAMPLES, objective=own))


def test_warnings_of_torch_stay_torch_s_own() -> None:
    """Nothing of the library warns in an ordinary step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in FAMILIES:
            total_loss(on(family.module()), family.call(SAMPLES)).backward()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("mlp", "cnn", "general")], ids=lambda f: f.name)
def test_a_thread_evaluates_while_another_one_trains(family: Family) -> None:
    """It has the plain forward, with as many samples as it likes; the training forward goes on as before."""
    module, call, few = family.module(), family.call(SAMPLES), family.call(1)
    with torch.no_grad():
        expected = few.on(module)
    model, found, begun = on(module), list[Tensor](), list[bool]()

    @torch.no_grad()
    def evaluate() -> None:
        found.append(few.on(model))

    def meanwhile(*_: Any) -> None:
        if not begun:
            begun.append(True)
            assert not in_threads(evaluate)

    last = [name for name, each in model.named_modules() if not [*each.children()]][-1]
    model.get_submodule(last).register_forward_hook(meanwhile)
    right(model, loop(module, call, SAMPLES), call)
    assert_close(found[0], expected)
