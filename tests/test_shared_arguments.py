"""Arguments that all samples share, as `shared_by_all` says: class texts, the points of an operator network."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from oracle import Call, assert_close_rows, loop, rows_of, total_loss

D = 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        yield


class Scores(nn.Module):
    """A classifier without training: images, and the texts of all classes."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, D), text

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # (B, 6), (classes, ...)
        return self.image(images) @ self.text(texts).flatten(1).T


class Scaled(Scores):
    """With a parameter of its own, so that it goes through the general rule."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__(text)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.scale * super().forward(images, texts)


class Reads(Scores):
    """So that `vmap` cannot follow it."""

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return super().forward(images, texts) * (1 + int(texts.sum() > 1e9))


@dataclass
class Batch:
    points: Tensor  # (N, 2), which all functions share
    values: Tensor  # (B, 6)


class Operator(nn.Module):
    """A DeepONet: functions by their values, and the points at which all of them are asked, which come first."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(6, D), nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, D))

    def forward(self, batch: Any) -> Tensor:
        points, values = (batch["points"], batch["values"]) if isinstance(batch, dict) else vars(batch).values()
        return torch.einsum("bk,nk->bn", self.branch(values), self.trunk(points))


TEXTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "numbers": (lambda: nn.Sequential(nn.Linear(5, D), nn.Tanh()), lambda count: torch.randn(count, 5)),
    "words": (lambda: nn.Embedding(9, 2), lambda count: torch.randint(9, (count, 2))),
    "a class each": (lambda: nn.Embedding(9, D), torch.arange),
}
SIZES = [(3, 3), (3, 5), (4, 3), (1, 3), (3, 1), (2, 4), (4, 2), (3, 3)]  # samples, and rows of what they share


def assert_right(model: nn.Module, call: Call, batch: int, take: Callable[[Call, int], Call]) -> None:
    model.zero_grad()
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(enn.revert(model), call, batch, take=take))


def take_image(call: Call, i: int) -> Call:
    return Call((call.args[0][i : i + 1], call.args[1]))


@pytest.mark.parametrize("sizes", [SIZES, SIZES[1:], SIZES[3:]])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("scores", [Scores, Scaled, Reads])
def test_class_texts(scores: Callable[[nn.Module], nn.Module], text: str, sizes: list[tuple[int, int]]) -> None:
    build, texts = TEXTS[text]
    model = enn.convert(scores(build())).per_sample(loss_reduction="sum")
    for batch, classes in sizes:
        call = Call((torch.randn(batch, 6), enn.shared_by_all(texts(classes))))
        assert_right(model, call, batch, take_image)


@pytest.mark.parametrize("kind", [dict, Batch])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[1:]])
def test_points_that_come_first_and_in_a_container(sizes: list[tuple[int, int]], kind: Any) -> None:
    model = enn.convert(Operator()).per_sample(loss_reduction="sum")
    for batch, count in sizes:
        points, values = enn.shared_by_all(torch.randn(count, 2)), torch.randn(batch, 6)

        def take(call: Call, i: int, points: Tensor = points, values: Tensor = values) -> Call:
            return Call((kind(points=points, values=values[i : i + 1]),))

        assert_right(model, Call((kind(points=points, values=values),)), batch, take)


def test_samples_second() -> None:
    class Second(Scores):
        def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # (T, B, 6), (classes, 5)
            return self.image(images) @ self.text(texts).T

    model = enn.convert(Second(nn.Linear(5, D))).per_sample(batch_first=False)
    for batch, classes in SIZES:
        call = Call((torch.randn(2, batch, 6), enn.shared_by_all(torch.randn(classes, 5))))
        model.zero_grad()
        model(*call.args).sin().sum((0, 2)).mean().backward()
        for name, parameter in enn.revert(model).named_parameters():
            rows = model.get_parameter(name).grad_sample
            assert rows is not None
            assert rows.shape[0] == batch
            for i in range(batch):
                plain = enn.revert(model)
                plain.zero_grad()
                plain(call.args[0][:, i : i + 1], call.args[1]).sin().sum().backward()
                torch.testing.assert_close(rows[i], plain.get_parameter(name).grad)
            assert parameter.shape == rows.shape[1:]


def test_gradients_of_what_is_shared() -> None:
    model = enn.convert(Scaled(nn.Linear(5, D))).per_sample()
    images, texts = torch.randn(3, 6), torch.randn(3, 5, requires_grad=True)
    model(images, enn.shared_by_all(texts)).sin().sum().backward()
    found, texts.grad = texts.grad, None
    enn.revert(model)(images, texts).sin().sum().backward()
    torch.testing.assert_close(found, texts.grad)


def test_a_compiled_step_says_it_itself() -> None:
    model = enn.convert(Scaled(nn.Linear(5, D))).per_sample()

    @enn.compile(backend="eager")
    def step(images: Tensor, texts: Tensor) -> None:
        model(images, enn.shared_by_all(texts)).sin().sum(1).mean().backward()

    for batch in (3, 3, 4, 3, 5):
        model.zero_grad()
        images, texts = torch.randn(batch, 6), torch.randn(3, 5)
        step(images, texts)
        assert_close_rows(rows_of(model), rows_of(_after(model, images, texts)))


def _after(model: nn.Module, images: Tensor, texts: Tensor) -> nn.Module:
    """A copy of the model after an eager step."""
    eager = enn.convert(enn.revert(model)).per_sample()
    eager(images, enn.shared_by_all(texts)).sin().sum(1).mean().backward()
    return eager


def test_a_compiled_step_that_is_given_it_runs_eagerly() -> None:
    model = enn.convert(Scaled(nn.Linear(5, D))).per_sample()
    step = enn.compile(lambda x, texts: model(x, texts).sin().sum(1).mean().backward(), backend="eager")
    with pytest.warns(enn.PerSampleWarning, match=r"runs eagerly, as an argument is shared_by_all.*in the step"):
        step(torch.randn(3, 6), enn.shared_by_all(torch.randn(3, 5)))
    assert model.scale.grad_sample is not None


@pytest.mark.parametrize("scores", [Scores, Scaled])
def test_check_knows_it(scores: Callable[[nn.Module], nn.Module]) -> None:
    model = scores(nn.Linear(5, D))
    arguments = torch.randn(3, 6), torch.randn(3, 5)
    assert not enn.check(model, *arguments).ok
    assert enn.check(model, arguments[0], enn.shared_by_all(arguments[1])).ok


def test_plain_models_take_it() -> None:
    plain, images, texts = Scores(nn.Linear(5, D)), torch.randn(3, 6), torch.randn(3, 5)
    assert torch.equal(plain(images, enn.shared_by_all(texts)), plain(images, texts))
    model = enn.convert(plain).per_sample(False)
    assert torch.equal(model(images, enn.shared_by_all(texts)), plain(images, texts))
    assert not vars(texts)  # the note is on another tensor


@pytest.mark.parametrize("in_forward", [True, False])
def test_as_many_rows_as_samples_in_one_row(*, in_forward: bool) -> None:
    """`unsqueeze(0)`, which a refusal tells to write, in the forward or by the user."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(5, D), nn.Linear(5, D)

        def forward(self, x: Tensor, texts: Tensor) -> Tensor:
            of_texts = self.text(texts.unsqueeze(0) if in_forward else texts)
            return (of_texts @ self.image(x).unsqueeze(-1)).squeeze(-1)

    plain, x, texts = Both(), torch.randn(3, 5), torch.randn(3, 5)
    model = enn.convert(plain).per_sample(loss_reduction="sum", escalate=False)
    shared = enn.shared_by_all(texts if in_forward else texts.unsqueeze(0))
    model(x, shared).sin().sum().backward()
    names = [name for name, _ in plain.named_parameters()]
    each = [torch.autograd.grad(plain(x[i : i + 1], shared).sin().sum(), [*plain.parameters()]) for i in range(3)]
    assert_close_rows(rows_of(model), dict(zip(names, map(torch.stack, zip(*each, strict=True)), strict=True)))


def test_all_arguments_are_shared() -> None:
    with pytest.raises(enn.PerSampleError, match="no argument is a tensor with a dimension"):
        enn.convert(nn.Linear(5, D)).per_sample()(enn.shared_by_all(torch.randn(3, 5)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_matrix(layout: torch.layout) -> None:
    """Each sample is a signal on the nodes of one graph, as many as there are samples."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor, operator: Tensor) -> Tensor:  # (B, nodes, 2)
            hidden = self.first(x).tanh()
            joined = operator @ hidden.transpose(0, 1).flatten(1)
            return self.second(joined.unflatten(1, (len(x), 3)).transpose(0, 1))

    plain, operator = Filter(), torch.rand(5, 5).to_sparse(layout=layout)
    model, x = enn.convert(plain).per_sample(loss_reduction="sum"), torch.randn(5, 5, 2)
    for _ in range(3):
        model.zero_grad()
        model(x, enn.shared_by_all(operator)).sin().sum().backward()
        losses = [plain(x[i : i + 1], operator).sin().sum() for i in range(5)]
        rows = [torch.autograd.grad(loss, [*plain.parameters()]) for loss in losses]
        names = [name for name, _ in plain.named_parameters()]
        assert_close_rows(rows_of(model), dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)))


class Masked(nn.Module):
    """Attention with a mask as an argument, `(T, T)`, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = nn.MultiheadAttention(D, 2, batch_first=True), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x * self.scale, x, x, attn_mask=mask)[0]


@pytest.mark.parametrize("compare", [True, False])
def test_a_mask_that_has_b_rows_by_chance_in_a_later_batch(*, compare: bool) -> None:
    """As it had others before, it is none of the samples', also where both readings give the same results."""
    mask = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    module = Masked()
    model = enn.convert(module).per_sample(loss_reduction="sum", compare=compare)
    for batch in (3, 4, 2, 4, 4):
        x = torch.randn(batch, 4, D)
        model.zero_grad()
        model(x, mask).sin().sum().backward()
        for i in range(batch):
            grads = torch.autograd.grad(module(x[i : i + 1], mask).sin().sum(), list(module.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                torch.testing.assert_close(parameter.grad_sample[i], grad)
