"""Parameters that a forward writes into a matrix of constants, as a triangular one; and writes into views."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.modules.registry import EXPANDED
from oracle import Call, assert_close, assert_close_rows, gradient_penalty, loop, total_loss

B, T, D = 3, 5, 4
LOWER = np.tril_indices(D, -1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        yield


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Triangular(nn.Module):
    """A linear map whose matrix is made of its entries, as by a factorization; `folds` says on which rows it works."""

    def __init__(self, make: Callable[[Any], Tensor], *, folds: bool = False) -> None:
        super().__init__()
        self.entries = nn.Parameter(values(D * (D - 1) // 2, seed=2))
        self.diagonal = nn.Parameter(values(D, seed=3))
        self.number = nn.Parameter(values(seed=4))
        self.layer, self.make, self.folds = nn.Linear(D, D).double(), make, folds

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        matrix = self.make(self)
        rows = self.layer(x.flatten(0, 1) if self.folds else x).tanh()
        return F.linear(rows, matrix).view(x.shape)


def by_arrays(m: Any) -> Tensor:
    matrix = m.entries.new_zeros(D, D)
    matrix[LOWER[0], LOWER[1]] = m.entries
    matrix[np.arange(D), np.arange(D)] = F.softplus(m.diagonal) + 1e-3
    return matrix


def by_tensors(m: Any) -> Tensor:
    matrix = torch.zeros(D, D, dtype=torch.float64)
    rows, columns = torch.tril_indices(D, D, -1)
    matrix[rows, columns] = m.entries
    matrix[torch.arange(D), torch.arange(D)] = m.diagonal.exp()
    return matrix


def by_slices(m: Any) -> Tensor:
    matrix = torch.eye(D, dtype=torch.float64)
    matrix[1, :] = m.diagonal
    matrix[2:, :2] = m.entries[:2]
    matrix[..., -1] = m.number
    matrix[0] = m.number
    return matrix @ matrix.mT


def by_a_mask(m: Any) -> Tensor:
    matrix = torch.zeros(D, D, dtype=torch.float64)
    matrix[torch.ones(D, D).tril(-1) > 0] = m.entries
    matrix[torch.eye(D) > 0] = m.diagonal
    return matrix.T


def by_numbers(m: Any) -> Tensor:
    matrix = torch.zeros(D, D, dtype=torch.float64)
    for place, (row, column) in enumerate(zip(*LOWER, strict=True)):
        matrix[row, column] = m.entries[place]
    for row in range(D):
        matrix[row, row] = m.diagonal[row] * m.number
    return matrix


def with_numbers_behind(m: Any) -> Tensor:
    matrix = m.diagonal.new_zeros(D, D)
    matrix[LOWER[0], LOWER[1]] = m.entries
    matrix[0, :] = 0.5
    matrix[-1, 0] = torch.tensor(2.0, dtype=torch.float64)
    return matrix


MAKE = {make.__name__: make for make in (by_arrays, by_tensors, by_slices, by_a_mask, by_numbers, with_numbers_behind)}


def calls(number: int = 3, samples: int = B) -> list[Call]:
    return [Call((values(samples, T, D, seed=seed),)) for seed in range(number)]


def assert_right(module: nn.Module, *inputs: Call, samples: int = B, objective: Any = total_loss) -> Any:
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in inputs:
        model.zero_grad()
        assert_close(call.on(model), call.on(module).detach())
        objective(model, call).backward()
        held = {name: p.grad_sample for name, p in model.named_parameters() if p.grad is not None}
        expected = loop(module, call, samples, objective=objective)
        assert not any(rows.any() for name, rows in expected.items() if name not in held)
        assert_close_rows(held, {name: expected[name] for name in held})
    return model


def called_or_refused(model: nn.Module) -> None:
    for call in calls():
        with suppress(enn.PerSampleError):
            call.on(model)


def runs_whole(model: Any) -> bool:
    return all(bool(ways.known) for ways in model._told.ways.values()) and bool(model._told.ways)


@pytest.fixture(params=[False, True], ids=["own", "folds"])
def folds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the module folds its samples, so that it goes through the general rule with all that is in it."""
    if request.param:
        monkeypatch.setitem(EXPANDED, Triangular, None)  # to be taken away again
        enn.alone(Triangular)
    return bool(request.param)


@pytest.mark.parametrize("objective", [total_loss, gradient_penalty])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_matrices_of_entries(make: Callable[[Any], Tensor], objective: Any, folds: bool) -> None:
    assert runs_whole(assert_right(Triangular(make, folds=folds), *calls(), objective=objective))


class Folds(nn.Module):
    """The module within folds its samples, so that it goes through the general rule with all that is in it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [1, 2, D, 7])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_other_numbers_of_samples(make: Callable[[Any], Tensor], samples: int) -> None:
    """With as many samples as there are rows in the matrix, too."""
    assert_right(Triangular(make), *calls(samples=samples), samples=samples)


def test_a_step_that_is_compiled() -> None:
    model, inputs = enn.convert(Triangular(by_tensors)).per_sample(), calls(6)
    expected = enn.convert(Triangular(by_tensors)).per_sample()
    expected.load_state_dict(model.state_dict())
    step = enn.compile(lambda x: model(x).square().sum((1, 2)).mean().backward(), backend="eager")
    for call in inputs:
        model.zero_grad()
        expected.zero_grad()
        step(*call.args)
        expected(*call.args).square().sum((1, 2)).mean().backward()
        rows = {name: p.grad_sample for name, p in expected.named_parameters() if p.grad is not None}
        assert_close_rows({name: model.get_parameter(name).grad_sample for name in rows}, rows)


# What must not go wrong


def into_a_view(m: Any) -> Tensor:
    matrix = torch.zeros(D, D, dtype=torch.float64)
    matrix.view(-1)[: len(m.entries)] = m.entries
    return matrix


def behind_a_view(m: Any) -> Tensor:
    """The view sees what is written later."""
    matrix = m.diagonal.outer(m.diagonal)
    view = matrix.mT
    matrix[LOWER[0], LOWER[1]] = m.entries
    return view


def into_rows_of_a_product(m: Any) -> Tensor:
    matrix = m.diagonal.outer(m.diagonal) * 1.0
    matrix[1] = 0.0
    return matrix


def under_no_grad(m: Any) -> Tensor:
    matrix = torch.zeros(D, D, dtype=torch.float64)
    with torch.no_grad():
        matrix[LOWER[0], LOWER[1]] = m.entries
    return matrix + m.number


@pytest.mark.parametrize(
    "make", [into_a_view, behind_a_view, into_rows_of_a_product, under_no_grad], ids=lambda x: x.__name__
)
def test_other_writes_are_right(make: Callable[[Any], Tensor], folds: bool) -> None:
    assert_right(Triangular(make, folds=folds), *calls())


def before(matrix: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    view = matrix[0]
    write(matrix)
    return view


def detached_before(matrix: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    view = matrix.detach()
    write(matrix)
    return view[0]


def between(matrix: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    write(matrix)
    view = matrix.mT[:, 0]
    matrix[0] = 2.0
    return view


def in_a_list(matrix: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    write(matrix)
    (view,) = torch.broadcast_tensors(*[matrix])
    matrix[0] = 2.0
    return view[0]


class LateView(nn.Module):
    """What a view of the matrix adds counts in later steps alone."""

    def __init__(self, view: Callable[..., Tensor], new: bool, changes: bool) -> None:
        super().__init__()
        self.entries, self.weight = nn.Parameter(values(len(LOWER[0]))), 0.0
        self.view, self.new, self.changes = view, new, changes

    def write(self, matrix: Tensor) -> None:
        matrix[LOWER[1], LOWER[0]] = self.entries

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.entries.new_zeros(D, D) if self.new else torch.zeros(D, D, dtype=torch.float64)
        row = self.view(matrix, self.write)
        if self.changes:  # which `vmap` follows alone
            matrix *= 2
        return x @ matrix + self.weight * row


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("view", [before, detached_before, between, in_a_list], ids=lambda view: view.__name__)
def test_views_see_what_is_written(view: Callable[..., Tensor], new: bool, changes: bool) -> None:
    plain = LateView(view, new, changes)
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    for step, call in enumerate(calls(8)):
        plain.weight = model.weight = float(step > 4)
        model.zero_grad()
        assert_close(call.on(model), call.on(plain).detach())
        total_loss(model, call).backward()
        assert_close(model.entries.grad_sample, loop(plain, call, B)["entries"])


class Keeps(nn.Module):
    """What it writes into is there in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.kept = nn.Parameter(values(D)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.zeros(D, D, dtype=torch.float64)
        self.kept = self.kept.detach()
        self.kept[1] = self.entries
        return x @ self.kept.mT


def test_a_matrix_that_the_module_keeps_is_no_other_one_afterwards() -> None:
    model = enn.convert(Keeps()).per_sample()
    called_or_refused(model)
    assert model.kept is None or type(model.kept) is Tensor


class IntoFrozen(nn.Module):
    """It writes into a frozen parameter, and into a tensor with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.frozen = nn.Parameter(values(D)), nn.Parameter(torch.zeros(D, D).double(), False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.frozen[0] = self.entries
        marked = torch.zeros(D, D, dtype=torch.float64)
        marked.mark = "kept"
        marked[1] = self.entries
        assert marked.mark == "kept"
        return x @ marked


def test_what_else_is_written_into_stays_what_it_is() -> None:
    model = enn.convert(IntoFrozen()).per_sample()
    called_or_refused(model)
    assert type(model.frozen) is nn.Parameter
    assert list(model.state_dict()) == ["entries", "frozen"]


class OfArgument(nn.Module):
    """It writes into an argument that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(values(D))

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        matrix[1] = self.entries
        return x @ matrix


def test_an_argument_stays_a_tensor() -> None:
    model, matrix = enn.convert(OfArgument()).per_sample(), torch.zeros(D, D, dtype=torch.float64)
    for call in calls():
        own = matrix.clone()
        try:
            model(*call.args, enn.shared_by_all(own))
        except (enn.PerSampleError, RuntimeError):
            continue
        finally:
            assert type(own) is Tensor
            assert own._base is None or type(own._base) is Tensor


class Token(nn.Module):
    """It writes a token of its own into its argument, where a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(values(D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x[mask] = self.token
        return 2 * x


class Goes(nn.Module):
    """The module around it goes on with that argument; with its result as well, or not."""

    def __init__(self, both: bool, of_part: bool) -> None:
        super().__init__()
        self.token, self.skip, self.both, self.of_part = Token(), nn.Linear(D, D).double(), both, of_part

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.cat([x, x.sin()], -1)[..., :D] if self.of_part else x.clone()
        given = self.token(h, mask)
        return self.skip(h) + given if self.both else self.skip(h)


@pytest.mark.parametrize("of_part", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_an_argument_that_a_parameter_was_written_into(both: bool, of_part: bool) -> None:
    inputs = [Call((values(B, T, D, seed=seed), values(B, T, seed=seed) > 0)) for seed in range(3)]
    assert_right(Goes(both, of_part), *inputs)


class WritesTwice(nn.Module):
    """A parameter is written into its argument, and that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(D).abs())

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = self.weight[0]
        return F.relu(x, inplace=True)


def test_an_argument_that_is_changed_in_place_after_a_write() -> None:
    plain = WritesTwice()
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    for seed in range(3):
        x = values(B, D, seed=seed)
        model(x.clone()).exp().sum().backward()
        expected = [torch.autograd.grad(plain(one.clone()).exp().sum(), plain.weight)[0] for one in x.split(1)]
        assert_close(model.weight.grad_sample, torch.stack(expected))
        model.zero_grad()


# Writes into views, where samples are folded


class Spline(nn.Module):
    """Features are split into parts that are changed in place, as splines of flows do."""

    def __init__(self, change: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(D, 6).double(), nn.Linear(6, D).double(), change

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        h = self.first(x.flatten(0, 1)).tanh() + 0.0
        self.change(h)
        return self.second(h).view(x.shape)


def divided(h: Tensor) -> None:
    part = h[..., :3]
    part /= np.sqrt(7.0)
    part[..., 0] = np.float64(0.5)


def added_to_parts(h: Tensor) -> None:
    h[:, 1:3].add_(h[:, 3:5].detach())
    h[..., -1] += 1e-6
    h[..., 0].mul_(2)


def functions_in_place(h: Tensor) -> None:
    h[:, :2].neg_()
    h[:, 2:4].sub_(0.5).mul_(np.float64(2.0))


def of_another_row(h: Tensor) -> None:
    """Within a sample: row i gets what row i + 1 has."""
    h.view(-1, T, 6)[:, :-1, 0] += h.view(-1, T, 6)[:, 1:, 1].detach()


@pytest.mark.parametrize("change", [divided, added_to_parts, functions_in_place, of_another_row])
def test_parts_that_are_changed_in_place(change: Callable[[Tensor], None]) -> None:
    model = assert_right(Folds(Spline(change)), *calls())
    assert runs_whole(model.part) or change is of_another_row


def from_other_samples(h: Tensor) -> None:
    h[:, :2].add_(h.roll(T, 0)[:, 2:4])


def test_parts_that_come_from_other_samples_are_refused() -> None:
    model = enn.convert(Folds(Spline(from_other_samples))).per_sample()
    with pytest.raises(enn.PerSampleError):
        calls()[0].on(model)
