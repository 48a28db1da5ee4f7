"""A compiled step whose tensors share memory, whose graph raises, and what is found in libraries' objects."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import expanded_nn as enn
from expanded_nn.compiling import names
from expanded_nn.compiling.replay import _meet
from test_compiled_state import batch, trained
from test_compiled_step import graphs, perceptron


def as_a_compiler(graph: Any, examples: Any) -> Callable[..., Any]:
    """A backend whose results are new tensors, and which is no graph any longer, as inductor's."""
    return lambda *inputs: [x.clone() if isinstance(x, Tensor) else x for x in graph(*inputs)]


def failing(graph: Any, examples: Any) -> Callable[..., Any]:
    """A backend that raises an error of its own where the labels are out of range."""

    def run(*inputs: Any) -> Any:
        if any(x.dtype is torch.int64 and x.numel() and int(x.max()) > 2 for x in inputs if isinstance(x, Tensor)):
            raise RuntimeError("kernel, line 17")
        return graph(*inputs)

    return run


def twins() -> list[Any]:
    torch.manual_seed(0)
    plain = perceptron()
    return [enn.convert(plain).per_sample() for _ in range(2)]


@pytest.mark.filterwarnings("ignore:.*what it changes in place shares its memory:expanded_nn.PerSampleWarning")
def test_windows_of_one_tensor_that_the_step_changes() -> None:
    """They lie elsewhere at each call, and a compiler's graph has the distances of its trace."""
    results = []
    series = torch.randn(80, generator=torch.Generator().manual_seed(1))
    for model, wrap in zip(
        twins(), (lambda step: step, lambda step: enn.compile(step, backend=as_a_compiler)), strict=True
    ):
        own = series.clone()

        def body(x: Tensor, y: Tensor, model: Any = model) -> Any:
            x.clamp_(-0.5, 0.5)
            (model(x) - y[:, :3]).square().mean().backward()
            return enn.per_sample_grads(model).norms()

        step = wrap(body)
        for start in (0, 8, 3, 16, 11, 30):
            model.zero_grad()
            windows = own[start : start + 32].view(4, 8), own[start + 1 : start + 33].view(4, 8)
            results.append((step(*windows), own.clone()))
    torch.testing.assert_close(results[6:], results[:6])


def test_memory_that_two_storages_share() -> None:
    """Of arrays; the second one begins in the middle of the first."""
    numbers = np.zeros((6, 4))
    x, y = torch.from_numpy(numbers)[:, 2:], torch.from_numpy(numbers[:, 2:])
    assert x.storage_offset() != y.storage_offset()
    assert _meet(x, y)
    assert not _meet(x, torch.from_numpy(numbers)[:, :2])


def test_parameters_that_share_memory_later() -> None:
    plain, other = twins()
    steps = []
    for model in (plain, other):
        p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))

        def body(x: Tensor, y: Tensor, model: Any = model, p: Any = p, q: Any = q) -> Any:
            loss = trained(model, x, y)
            with torch.no_grad():
                p.mul_(0.5)
                q.add_(1)
            return loss, p.clone(), q.clone()

        steps.append((model, body, p, q))
    compiled = enn.compile(steps[1][1], backend=as_a_compiler)
    for number in range(6):
        found = []
        for (model, _, p, q), run in zip(steps, (steps[0][1], compiled), strict=True):
            model.zero_grad()
            if number == 3:
                q.data = p.data
            found.append(run(*batch(number)))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["eager", as_a_compiler])
def test_the_gradient_that_is_returned_is_the_one_that_is_set(backend: Any) -> None:
    """Noise that is added to it after the call reaches `.grad`."""
    model = twins()[0]

    @enn.compile(backend=backend)
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        enn.clip_grad_sample_norms_(model, 1.0)
        return loss, [parameter.grad for parameter in model.parameters()], loss

    for number in range(4):
        model.zero_grad()
        first, grads, second = step(*batch(number))
        assert all(grad is parameter.grad for grad, parameter in zip(grads, model.parameters(), strict=True))
        assert first is second
    assert graphs(step)


@pytest.mark.parametrize("after", [2, 5])
def test_a_label_out_of_range(after: int) -> None:
    """The step's own error says more than the graph's; what comes next is as without it."""
    expected, model = twins()
    step = enn.compile(lambda x, y: trained(model, x, y), backend=failing)
    for number in range(8):
        x, y = batch(number)
        for each in (expected, model):
            each.zero_grad()
        if number == after:
            with pytest.raises(IndexError, match="out of bounds"):
                step(x, y + 3)
            model.zero_grad()
        torch.testing.assert_close(step(x, y), trained(expected, x, y))
        rows = [[parameter.grad_sample for parameter in each.parameters()] for each in (model, expected)]
        torch.testing.assert_close(*rows)
    assert graphs(step)


SOURCE = """
import torch.nn.functional as F
scale = 1.0

def loss(out, y):
    return F.cross_entropy(out, y) * scale

def step(model, x, y):
    value = loss(model(x), y)
    value.backward()
    return value.detach()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in a folder of installed packages."""
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "train.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(names, "_NOT_THE_USERS", (*names._NOT_THE_USERS, str(tmp_path)))
    monkeypatch.setattr(names, "_OF_STEPS", set())
    names._is_the_users.cache_clear()
    yield importlib.import_module("users_package.train")
    for name in ("users_package.train", "users_package"):
        del sys.modules[name]
    names._is_the_users.cache_clear()


def scaled_later(namespace: dict[str, Any]) -> list[Tensor]:
    model = twins()[0]
    step = enn.compile(lambda x, y: namespace["step"](model, x, y), backend="eager")
    if namespace["__name__"] != "<exec>":
        compiled = enn.compile(namespace["step"], backend="eager")
        step = lambda x, y: compiled(model, x, y)  # noqa: E731
    losses = []
    for number in range(6):
        namespace["scale"] = 1.0 if number < 3 else 5.0
        model.zero_grad()
        losses.append(step(*batch(0)))
    return losses


def test_a_package_of_the_users_that_is_installed(package: Any) -> None:
    losses = scaled_later(vars(package))
    torch.testing.assert_close(losses, [losses[0]] * 3 + [losses[0] * 5] * 3)


def test_code_without_a_file() -> None:
    """As of `python -c`, whose numbers may change as well."""
    namespace: dict[str, Any] = {"__name__": "<exec>"}
    exec(compile(SOURCE, "<string>", "exec"), namespace)
    losses = scaled_later(namespace)
    torch.testing.assert_close(losses, [losses[0]] * 3 + [losses[0] * 5] * 3)


def test_the_state_of_an_optimizer() -> None:
    """Its tensors are others after `load_state_dict`."""
    expected, model = twins()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (expected, model)]

    def preconditioned(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        scales = {p: optimizer.state[p]["exp_avg_sq"].sqrt() + 1e-3 for p in model.parameters()}
        return torch.stack([(p.grad_sample / scale).flatten(1).norm(dim=1) for p, scale in scales.items()])

    step = enn.compile(lambda x, y: preconditioned(model, optimizers[1], x, y), backend="eager")
    for each, optimizer in zip((expected, model), optimizers, strict=True):
        trained(each, *batch(0))
        optimizer.step()
    saved = copy.deepcopy(optimizers[0].state_dict())
    for number in range(7):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = step(*batch(number))
        torch.testing.assert_close(found, preconditioned(expected, optimizers[0], *batch(number)))
        for optimizer in optimizers:
            optimizer.step()
            if number == 3:
                optimizer.load_state_dict(copy.deepcopy(saved))


class Wider(distributions.Normal):
    """A class of the user's, whose numbers torch's own methods read."""


@pytest.mark.parametrize("kind", [distributions.Normal, Wider])
def test_a_distribution_whose_numbers_change(kind: Any) -> None:
    model = twins()[0]
    prior = kind(torch.tensor(0.0), torch.tensor(1.0))

    @enn.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = -prior.log_prob(model(x)).mean()
        loss.backward()
        return loss.detach()

    x, _ = batch(0)
    for number in range(6):
        prior.scale = torch.tensor(1.0 if number < 3 else 3.0)
        model.zero_grad()
        torch.testing.assert_close(step(x), -prior.log_prob(model(x).detach()).mean())


def test_columns_of_one_matrix_have_a_graph() -> None:
    """They lie between each other, and have no number in common."""
    model = twins()[0]
    mean = torch.zeros(8, 8)
    left, right = mean[:, :4], mean[:, 4:]

    @enn.compile(backend=as_a_compiler)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = trained(model, x, y)
        with torch.no_grad():
            left.mul_(0.9).add_(1)
            right.sub_(left)
        return loss

    expected = torch.zeros(8, 8)
    for number in range(5):
        model.zero_grad()
        step(*batch(number))
        expected[:, :4] = 0.9 * expected[:, :4] + 1
        expected[:, 4:] -= expected[:, :4]
        torch.testing.assert_close(mean, expected)
    assert graphs(step)


def test_one_result_of_a_compiler_for_two_gradients() -> None:
    """Each gets its own memory."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = twins()[0]

    def joining(graph: Any, examples: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            results = list(graph(*inputs))
            first: list[Tensor] = []
            for place, x in enumerate(results):
                same = [y for y in first if isinstance(x, Tensor) and y.shape == x.shape and torch.equal(x, y)]
                results[place] = same[0] if same else x
                first += [x] if isinstance(x, Tensor) and not same else []
            return results

        return run

    @enn.compile(backend=joining)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + (p * x.sum()).sum() + (q * x.sum()).sum()
        loss.backward()
        return loss.detach()

    for number in range(4):
        model.zero_grad()
        p.grad = q.grad = None
        step(*batch(number))
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.data_ptr() != q.grad.data_ptr()


def test_counters_of_an_optimizer_and_a_cache_of_a_transform() -> None:
    """They change at each call, and the step does not read them."""
    model = twins()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": 0}
    transform = distributions.ExpTransform(cache_size=1)
    status = type("Status", (), {"state": 1.0})()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        assert optimizer.param_groups
        assert transform.bijective
        loss = F.cross_entropy(model(x), y) * status.state
        loss.backward()
        return loss.detach()

    for number in range(6):
        model.zero_grad()
        step(*batch(number))
        transform(torch.randn(3))
        for state in optimizer.state.values():
            state["step"] += 1
    assert len(graphs(step)) == 1
