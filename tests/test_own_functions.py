"""Autograd Functions of the user's in modules with parameters of their own; `vmap` cannot follow most of them."""

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from oracle import Call, assert_close, assert_close_rows, gradient_penalty, loop, rows_of, total_loss

B, T, D = 3, 5, 4
APPLY_IS_IN_C = not hasattr(Function.apply, "__func__")  # as in torch 2.15


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Sign(Function):
    """Lets gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scaled(Function):
    """Signs of a scale of their own; the backward looks at the whole gradient, so that rows must not meet in it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.sign() * w.abs().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean()


class Linear(Function):
    """Of torch's tutorial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), of_bias


class Product(Function):
    """In the new way, but without a rule for `vmap`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).flatten(0, -2).sum(0)


class WithPlaces(Function):
    """Returns a tensor, an index and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        places = (x * w).argmax(-1)
        ctx.mark_non_differentiable(places)
        return x * w, places, 3.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).flatten(0, -2).sum(0)


class Doubled(Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class OwnApply(Sign):
    """With an `apply` of its own, which must not run twice."""

    @classmethod
    def apply(cls, x: Tensor, scale: float = 2.0) -> Tensor:
        return super().apply(x + scale)  # type: ignore[no-any-return]


class Rounded(Function):
    """To one of two neighbours, by chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        drawn = torch.rand_like(x)
        ctx.save_for_backward(drawn)
        return torch.floor(x + drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (1 + ctx.saved_tensors[0])


class Observed(Function):
    """Keeps the largest value in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        largest.copy_(x.abs().max())
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class WithFlag(Function):
    """Returns a number that depends on the sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w, float(x.abs().max() > 10)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).flatten(0, -2).sum(0)


sign, linear = Sign.apply, Linear.apply  # before anything has looked at Functions


class Own(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.b, self.v = (
            nn.Parameter(values(*shape, seed=n)) for n, shape in enumerate([(6, D), (6,), (D,)], 5)
        )
        self.out, self.use = nn.Linear(6, 2).double(), use
        self.register_buffer("table", values(6, D, seed=9))

    def forward(self, x: Tensor) -> Tensor:
        every = self.w.sum() + self.b.sum() + self.v.sum()  # so that all have rows
        return every * self.out(self.use(self, x))  # type: ignore[no-any-return]


def with_places(m: Any, x: Tensor) -> Tensor:
    product, places, number = WithPlaces.apply(x, m.v)
    return F.linear(product * number, m.w, m.b) + places.unsqueeze(-1)


def in_place_of_a_part(m: Any, x: Tensor) -> Tensor:
    weight = m.w.clone()
    Doubled.apply(weight[0])
    return F.linear(x, weight, m.b)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of a weight": lambda m, x: F.linear(x, Sign.apply(m.w), m.b),
    "of a weight, by its mean": lambda m, x: F.linear(x, Scaled.apply(m.w), m.b),
    "of what is computed from a weight": lambda m, x: F.linear(x, Scaled.apply(m.w[:, :D] * m.v), m.b),
    "of the samples": lambda m, x: Sign.apply(F.linear(x, m.w, m.b)),
    "of both": lambda m, x: Linear.apply(x, m.w, m.b),
    "with None": lambda m, x: Linear.apply(x, m.w, None) + m.b,
    "of a buffer": lambda m, x: F.linear(x, Sign.apply(m.table) * m.w, m.b),
    "with a context of its own": lambda m, x: F.linear(Product.apply(x, m.v), m.w, m.b),
    "with several results": with_places,
    "in place": lambda m, x: F.linear(Doubled.apply(x * m.v), m.w, m.b),
    "in place, of a part of a clone": in_place_of_a_part,
    "bound early": lambda m, x: linear(x, sign(m.w), m.b),
    "with an apply of its own": lambda m, x: F.linear(x, OwnApply.apply(m.w), m.b),
    "in a checkpoint, with saved tensors": lambda m, x: checkpoint(
        lambda x: Linear.apply(x, m.w, m.b), x, use_reentrant=False
    ),
    "two in a row": lambda m, x: F.linear(Sign.apply(Product.apply(x, m.v)), Sign.apply(m.w), m.b),
    "in a checkpoint": lambda m, x: checkpoint(lambda x: F.linear(x, Sign.apply(m.w), m.b), x, use_reentrant=False),
}
WHERE_SAMPLES_ARE = pytest.mark.parametrize("shape", [(B, D), (B, T, D), (1, D), (D, D), (0, D)], ids=str)


@pytest.fixture(autouse=True)
def _no_loop() -> Any:
    """No sample goes through the whole module alone: that is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", enn.PerSampleWarning)
        yield


@WHERE_SAMPLES_ARE
@pytest.mark.parametrize("name", USES)
def test_rows(name: str, shape: tuple[int, ...]) -> None:
    if name.startswith("in ") or (name == "bound early" and APPLY_IS_IN_C):
        warnings.simplefilter("ignore", enn.PerSampleWarning)  # these may go in a loop
    module, call = Own(USES[name]), Call((values(*shape),))
    expected = loop(module, call, shape[0])
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(3):
        model.zero_grad()
        assert_close(call.on(model), call.on(module).detach())
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize("size", [1, 3])
def test_a_clone_that_changes_in_place(size: int) -> None:
    """The parameter itself stays as it is, though it is not copied for a clone."""
    warnings.simplefilter("ignore", enn.PerSampleWarning)
    module = Own(in_place_of_a_part)
    model = enn.convert(module).per_sample()
    for _ in range(3):
        model(values(size, D)).sum().backward()
        for parameter, other in zip(model.parameters(), module.parameters(), strict=True):
            assert torch.equal(parameter, other)


def test_random_numbers() -> None:
    """A comparison fixes them within Functions, too."""
    model = enn.convert(Own(lambda m, x: F.linear(Rounded.apply(x), m.w, Rounded.apply(m.b)))).per_sample()
    for _ in range(3):
        model.zero_grad()
        model(values(B, D)).sum().backward()
        for parameter in model.parameters():
            assert_close(parameter.grad, parameter.grad_sample.mean(0))


@pytest.mark.parametrize("of", ["w", "x"])
def test_a_buffer_that_changes_in_place(of: str) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        return F.linear(Observed.apply(x * m.v, m.largest) if of == "x" else x, Observed.apply(m.w, m.largest), m.b)

    warnings.simplefilter("ignore", enn.PerSampleWarning)
    module = Own(use)
    module.register_buffer("largest", torch.zeros((), dtype=torch.float64))
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call((values(B, D),))
    for _ in range(3):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))
        plain = copy.deepcopy(module)
        call.on(plain)
        assert_close(model.largest, plain.largest)


def test_numbers_that_differ() -> None:
    """Not seen by the first comparison, where they are the same."""

    def use(m: Any, x: Tensor) -> Tensor:
        product, flag = WithFlag.apply(x, m.v)
        return F.linear(product * (1 + flag), m.w, m.b)

    warnings.simplefilter("ignore", enn.PerSampleWarning)
    model = enn.convert(Own(use)).per_sample()
    model(values(B, D)).sum().backward()
    x = values(B, D)
    x[0] += 50
    with pytest.raises(enn.PerSampleError, match=r"Own: .*WithFlag returns numbers that differ from sample to sample"):
        model(x)


def test_a_graph_of_a_function_bound_early() -> None:
    """`torch.compile` goes on knowing it, after a forward of ours."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of what torch.compile does with Functions
    enn.convert(Own(USES["of both"])).per_sample()(values(B, D))
    x = values(B, D).requires_grad_()
    torch.compile(lambda x: sign(x.sin()), fullgraph=True, backend="eager")(x).sum().backward()
    assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("name", ["of both", "with a context of its own", "two in a row"])
def test_second_derivatives(name: str) -> None:
    module, call = Own(USES[name]), Call((values(B, T, D),))
    expected = loop(module, call, B, objective=gradient_penalty)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(2):
        model.zero_grad()
        gradient_penalty(model, call).backward()
        assert_close_rows(rows_of(model), expected)


def test_batches_of_other_sizes() -> None:
    module = Own(USES["of both"])
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for size in (4, 1, 7, 0, 4):
        call = Call((values(size, T, D),))
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, size))


def test_compiled_step() -> None:
    """It runs eagerly, and says so: a graph would hold one Function per sample."""
    module, call = Own(USES["of both"]), Call((values(B, T, D),))
    model = enn.convert(module).per_sample(loss_reduction="sum")

    @enn.compile(backend="eager")
    def step(x: Tensor) -> None:
        model.zero_grad()
        total_loss(model, Call((x,))).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        step(*call.args)
    with pytest.warns(enn.PerSampleWarning, match="the autograd Function Linear one by one"):
        step(*call.args)
    assert_close_rows(rows_of(model), loop(module, call, B))


class Again(Function):
    """A checkpoint of the user's own, which runs a part of the forward again in its backward."""

    @staticmethod
    def forward(ctx: Any, part: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        return None, *torch.autograd.grad(y, [x, w], grad, allow_unused=True)


def test_a_part_of_the_forward_that_runs_again() -> None:
    """Its derivative by the parameter comes from the parameter itself, which none of the samples has."""
    warnings.simplefilter("ignore", enn.PerSampleWarning)
    model = enn.convert(Own(lambda m, x: F.linear(Again.apply(lambda x: x * m.v, x, m.v), m.w, m.b))).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Own: .*setup_context"):
        model(values(B, D)).sum().backward()


def test_others_are_left_alone() -> None:
    """Functions outside of per-sample forwards are what torch makes of them."""
    call = Call((values(B, D),))
    total_loss(enn.convert(Own(USES["of both"])).per_sample(), call).backward()
    x = values(B, D).requires_grad_()
    Sign.apply(x).sum().backward()
    assert_close(x.grad, torch.ones_like(x))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(Sign.apply)(x)


AGAIN = """
import sys, torch
from torch import nn

class Sign(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.sign())
    backward = staticmethod(lambda ctx, grad: grad)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
    def forward(self, x):
        return Sign.apply(self.w) * x

for _ in range(2):
    import expanded_nn as enn
    model = enn.convert(Own()).per_sample(loss_reduction="sum")
    model(2 * torch.ones(4, 3)).sum().backward()
    assert torch.equal(model.w.grad_sample, 2 * torch.ones(4, 3))
    for name in [name for name in sys.modules if name.startswith("expanded_nn")]:
        del sys.modules[name]
"""


def test_the_library_imported_again() -> None:
    """As in a notebook: the Functions that it replaces are its own by then."""
    subprocess.run([sys.executable, "-c", AGAIN], check=True)
