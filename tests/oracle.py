"""The sample-by-sample loop that every row is compared with.

An objective is a function `(module, call, first) -> scalar`: the sum over the samples of each one's own loss, where the
call's samples are number `first` and following. It knows nothing of rows, so the same objective runs on the expanded
model with the whole batch and on the plain one with each sample alone.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

TINY = 1e-3  # a gradient that vanishes is compared to TINY * tolerance


def set_seed(seed: int) -> None:
    """Sets the seed. `torch.manual_seed` queues that for devices that are not there, each with a stack trace: 4 ms."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Call(NamedTuple):
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}

    def on(self, module: Callable[..., Any]) -> Any:
        return module(*self.args, **self.kwargs)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Call":
        return Call(*tree_map_only(Tensor, function, (self.args, dict(self.kwargs))))

    def floats(self) -> list[Tensor]:
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def requires_grad(self) -> "Call":
        """The same values as new leaves; strides (a permuted view, channels_last) are kept."""
        return self.map(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)


Take = Callable[[Call, int], Call]
Objective = Callable[[Callable[..., Any], Call, int], Tensor]


def take_rows(call: Call, i: int) -> Call:
    """Sample `i` alone, where the batch comes first in every tensor."""
    return call.map(lambda t: t[i : i + 1])


def coefficients(output: Tensor, first: int) -> Tensor:
    """A fixed random tensor a sample, the same whether the sample comes alone or in a batch."""
    rows = [
        torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(1000 + first + i), dtype=torch.float64)
        for i in range(len(output))
    ]
    return torch.stack(rows).to(output.dtype) if rows else torch.zeros_like(output)


def sample_losses(output: Tensor, first: int = 0) -> Tensor:  # (B,)
    """Each sample's own loss: nonlinear, so that second derivatives do not vanish."""
    losses = coefficients(output, first) * output.sin()
    return losses.sum(tuple(range(1, losses.dim()))) if losses.dim() > 1 else losses


def total_loss(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
    return sample_losses(call.on(module), first).sum()


def gradient_penalty(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
    """The loss, and the squared norm of its derivative with respect to the input."""
    call = call.requires_grad()
    loss = total_loss(module, call, first)
    inputs = torch.autograd.grad(loss, call.floats(), create_graph=True)
    return loss + sum(g.square().sum() for g in inputs)


def loop(
    module: nn.Module,
    call: Call,
    samples: int,
    *,
    take: Take = take_rows,
    objective: Objective = total_loss,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """The rows: each sample's own gradient by each parameter, `(B, *shape)` by name."""
    if not create_graph:
        module = deepcopy(module)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(samples if named else 0):
        alone = take(call, i).map(lambda t: t.contiguous() if create_graph else t.detach().contiguous())
        loss = objective(module, alone, i)
        grads = torch.autograd.grad(
            loss, list(named.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
        for name, grad in zip(named, grads, strict=True):
            rows[name].append(dense(grad))
    return {name: torch.stack(rows[name]) if rows[name] else p.new_zeros(0, *p.shape) for name, p in named.items()}


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def rows_of(module: nn.Module) -> dict[str, Tensor]:
    """What the library says, by name."""
    return {name: p.grad_sample for name, p in module.named_parameters() if p.requires_grad}


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (dense(actual.detach()) - expected.detach()).to(wide).norm()
    return float(difference / max(float(expected.detach().to(wide).norm()), TINY))


def assert_close(actual: Tensor | None, expected: Tensor, tol: float = 1e-9, name: str = "tensor") -> None:
    assert isinstance(actual, Tensor), f"{name}: {actual!r} is no tensor"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error <= tol, f"{name}: relative error {error:.1e} > {tol:.0e}"


def assert_close_rows(actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], tol: float = 1e-9) -> None:
    assert set(actual) == set(expected)
    for name, rows in expected.items():
        assert_close(actual[name], rows, tol, name)


def assert_all_close(actual: Iterable[Tensor], expected: Iterable[Tensor], tol: float = 1e-9) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, e, tol, f"tensor {i}")


def assert_derivatives_of_rows(model: nn.Module, module: nn.Module, call: Call, samples: int) -> None:
    """The rows' own derivatives by the weights, after a backward with `create_graph`, are those of the loop's."""
    total_loss(model, call).backward(create_graph=True)
    both = (rows_of(model), model), (loop(module, call, samples, create_graph=True), module)
    actual, expected = (
        torch.autograd.grad(
            torch.stack([(each**3).sum() for each in rows.values()]).sum(),
            [parameter for parameter in owner.parameters() if parameter.requires_grad],
        )
        for rows, owner in both
    )
    assert_all_close(actual, expected)
    model.zero_grad()


def notes_on(error: BaseException) -> list[str]:
    """The library's notes on an error; Python 3.10 has no notes, so there they are lines behind its text."""
    return getattr(error, "__notes__", None) or str(error).split("\n")[1:]


def skip_without_bfloat16(module: nn.Module, call: Call) -> None:
    """Skips a test of a call that torch itself cannot run in bfloat16 on this processor, as that of an LSTM."""
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            call.on(module)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("torch has no kernel in bfloat16 for this processor")
