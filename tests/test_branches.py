"""Models whose forward takes another branch from call to call, and gives something else: rows equal the loop's."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import expanded_nn as enn
from oracle import Call, assert_all_close, assert_close, loop, rows_of
from test_fuzz import unhurried

D = 4
Operation = Callable[[Any, Tensor], Tensor]
CONDITIONS: dict[str, Callable[..., bool]] = {
    "long": lambda m, x, mask, flag: x.shape[1] > 4,
    "odd": lambda m, x, mask, flag: x.shape[1] % 2 == 1,
    "masked": lambda m, x, mask, flag: mask is not None,
    "flag": lambda m, x, mask, flag: flag,
    "training": lambda m, x, mask, flag: m.training,
    "every third call": lambda m, x, mask, flag: m.calls % 3 == 0,
}
OF_OWN: dict[str, Operation] = {
    "scaled": lambda m, x: x * m.w,
    "positions": lambda m, x: x + m.p[: x.shape[1]],
    "class token": lambda m, x: torch.cat([m.w.expand(len(x), 1, D), x], 1),
    "folded by matmul": lambda m, x: (x.reshape(-1, D) @ m.q).view(x.shape),
    "attends": lambda m, x: F.scaled_dot_product_attention(x @ m.q, x, x),
    "summed up": lambda m, x: x.cumsum(1) * m.w,
    "mean of positions": lambda m, x: x.mean(1, keepdim=True) + m.w,
    "computed weight": lambda m, x: x @ (m.q @ m.q.T),
    "positions first": lambda m, x: (x.transpose(0, 1) * m.w).transpose(0, 1),
    "buffer": lambda m, x: x * m.buffer,
}
OF_LAYERS: dict[str, Operation] = {
    "linear": lambda m, x: m.linear(x),
    "folded": lambda m, x: m.linear(x.reshape(-1, D)).view(x.shape),
    "folded, positions first": lambda m, x: (
        m.linear(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1)
    ),
    "in parts": lambda m, x: torch.cat([m.linear(part) for part in x.split(2, 1)], 1),
    "by position": lambda m, x: torch.stack([m.linear(x[:, t]) for t in range(x.shape[1])], 1),
    "sample by sample": lambda m, x: torch.stack([m.linear(row) for row in x]),
    "table": lambda m, x: x + m.table(torch.arange(x.shape[1])),
    "table through a layer": lambda m, x: x + m.linear(m.table(torch.arange(x.shape[1]))),
    "tied": lambda m, x: F.linear(x, m.linear.weight),
    "norm": lambda m, x: m.norm(x.flatten(0, 1)).view_as(x),
    "convolution": lambda m, x: m.conv(x.mT).mT,
    "recurrent": lambda m, x: m.gru(x)[0],
    "last state": lambda m, x: x + m.gru(x)[1][-1][:, None],
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "two copies": lambda m, x: m.linear(torch.stack([x, x.sin()])).sum(0),
    "tanh": lambda m, x: x.tanh(),
}
RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "with a mask": lambda y, x: (y, x > 0),
    "with the input": lambda y, x: [y, (x, None)],
    "dict": lambda y, x: {"y": y, "mean": y.mean((1, 2))},
    "transposed as well": lambda y, x: (y, y.transpose(0, 1)),
    "with a number": lambda y, x: (y, y.square().mean()),
}
# what is left in an attribute, and the part of it that a loss may use
LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor] | None]] = {
    "nothing": (lambda y, x: None, None),
    "result": (lambda y, x: y, lambda left: left),
    "without a gradient": (lambda y, x: y.detach(), lambda left: left),
    "list": (lambda y, x: [y, {"x": x}], lambda left: left[0] * left[1]["x"].sum((1, 2))[:, None, None]),
    "mean of each sample": (lambda y, x: y.mean((1, 2)), lambda left: left),
    "mean of all": (lambda y, x: y.square().mean(), None),
    "mixed": (lambda y, x: y.sum(0), None),
    "shared": (lambda y, x: torch.arange(x.shape[1]), None),
}


class Branching(nn.Module):
    """Two random stages, each of which may be a choice between two; and such choices of what is returned and left."""

    def __init__(self, chance: random.Random, *, own: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.table = nn.Linear(D, D), nn.LayerNorm(D), nn.Embedding(40, D)
        self.conv, self.gru = nn.Conv1d(D, D, 3, padding=1), nn.GRU(D, D, batch_first=True)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        if own:
            self.w, self.q = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D, D))
            self.p = nn.Parameter(torch.rand(40, D))
        self.register_buffer("buffer", torch.rand(D) + 0.5)
        self.calls = 0
        operations = {**OF_OWN, **OF_LAYERS} if own else OF_LAYERS
        self.stages = [
            (chance.choice([*CONDITIONS]), [chance.choices([*operations], k=chance.randint(1, 3)) for _ in range(2)])
            for _ in range(2)
        ]
        self.returned = (chance.choice([*CONDITIONS]), chance.choices([*RESULTS], k=2))
        self.leaves = (chance.choice([*CONDITIONS]), chance.choices([*LEFT], k=2))
        self.operations, self.left, self.used = operations, None, None

    def forward(self, x: Tensor, mask: Tensor | None = None, *, flag: bool = False) -> Any:
        self.calls += 1
        y = x
        for condition, branches in self.stages:
            for name in branches[CONDITIONS[condition](self, x, mask, flag)]:
                y = self.operations[name](self, y)
        if mask is not None:
            y = y * mask[:, :1, None]
        condition, names = self.leaves
        leaves, self.used = LEFT[names[CONDITIONS[condition](self, x, mask, flag)]]
        if (left := leaves(y, x)) is not None:
            self.left = left
        condition, results = self.returned
        return RESULTS[results[CONDITIONS[condition](self, x, mask, flag)]](y, x)


def objective(module: Any, call: Call, first: int = 0) -> Tensor:
    module.left = None
    result = call.on(module)
    y = result if isinstance(result, Tensor) else result["y"] if isinstance(result, dict) else result[0]
    loss = (y.flatten(1).sin() * torch.arange(1, 1 + y[0].numel())).sum()
    return loss if module.used is None else loss + module.used(module.left).cos().sum()


def play(seed: int, *, own: bool) -> tuple[int, int]:
    """Some random steps, compared with the loop; how many went through, and how many were refused."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    plain = Branching(chance, own=own).double()
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    taken = refused = 0
    for _ in range(chance.randint(4, 10)):
        samples, positions = chance.randint(1, 5), chance.randint(1, 7)
        mask = torch.rand(samples, positions, dtype=torch.float64).round() if chance.random() < 0.4 else None
        args = (torch.randn(samples, positions, D, dtype=torch.float64), *([] if mask is None else [mask]))
        call = Call(args, {"flag": True} if chance.random() < 0.4 else {})
        training = chance.random() < 0.5
        plain.train(training)
        model.train(training)
        model.calls = plain.calls
        model.zero_grad()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                loss = objective(model, call)
            if loss.requires_grad:
                loss.backward()
        except enn.PerSampleError:
            refused += 1
            continue
        if model.calls != plain.calls + 1:  # which may have led it another way
            assert any("happened twice" in str(warning.message) for warning in said)
            plain.calls += 1
            continue
        taken += 1
        reference, before = copy.deepcopy(plain), plain.calls
        of_plain = objective(reference, call)
        assert_close(loss, of_plain.detach())
        left, of_reference = (tree_leaves(module.left) for module in (model, reference))
        if left != [None]:
            assert_all_close(left, of_reference)

        def one(module: Any, call: Call, first: int = 0, before: int = before) -> Tensor:
            module.calls = before
            return objective(module, call, first)

        expected = loop(plain, call, samples, objective=one) if of_plain.requires_grad else {}
        for name, rows in rows_of(model).items():
            wanted = expected.get(name, torch.zeros(samples, *model.get_parameter(name).shape, dtype=torch.float64))
            if rows is not None or wanted.any():
                assert_close(rows, wanted, name=name)
        plain.calls += 1
    return taken, refused


@pytest.mark.parametrize("own", [False, True], ids=["layers", "own"])
def test_random_branches(*, own: bool) -> None:
    """The same each time; refusals are few."""
    counts = [play(seed, own=own) for seed in range(12)]
    taken, refused = (sum(count) for count in zip(*counts, strict=True))
    assert refused < taken / 10


def test_what_is_left_has_other_dimensions_later() -> None:
    assert sum(play(766126, own=False))  # a number, and then positions
    assert sum(play(1454, own=False))  # a result, and then a single position
    assert sum(play(98608, own=False))  # a number beside it, by whether the arguments require gradients


@pytest.mark.fuzz
@settings(unhurried, max_examples=500)
@given(st.integers(0, 2**32), st.booleans())
def test_many_random_branches(seed: int, own: bool) -> None:
    play(seed, own=own)
