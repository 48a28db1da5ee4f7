"""Arguments that a forward changes in place, or that mean something else by another name; parameters set later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from oracle import Call, assert_close_rows, loop, rows_of, sample_losses, total_loss

B, D = 4, 3


class Does(nn.Module):
    """Two parameters, and a forward that the test writes."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.v, self.does = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D)), forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.does(self, *args, **kwargs)


class Behind(nn.Module):
    """The same behind a layer."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(D, D), Does(forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x))


class WithPositions(nn.Module):
    """Its index of as many positions as samples can be read in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(D, D), nn.Embedding(9, D)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x) + self.table(torch.arange(x.shape[1], device=x.device))


def changed(m: Any, x: Tensor) -> Tensor:
    x += m.v
    return x * m.w - m.w if x.shape[1] > 6 else x * m.w


def changed_under_vmap(m: Any, x: Tensor) -> Tensor:
    x *= 1.5
    with torch.no_grad():
        scale = m.v.sum()
    return torch.stack([x * m.w, m.v + x]).sum(0) * scale if x.shape[1] > 6 else (x * m.w - m.v) * scale


def refusals(module: nn.Module, lengths: tuple[int, ...]) -> list[tuple[int, str]]:
    """At which lengths a step was refused, and why; the rows of all others are those of the loop."""
    model, refused = enn.convert(module).per_sample(loss_reduction="sum"), []
    for length in lengths:
        x = torch.randn(B, length, D)
        model.zero_grad()
        try:
            total_loss(model, Call((x.clone(),))).backward()
        except enn.PerSampleError as error:
            refused.append((length, str(error)))
        else:
            assert_close_rows(rows_of(model), loop(module, Call((x,)), B))
    return refused


@pytest.mark.parametrize("forward", [changed, changed_under_vmap])
@pytest.mark.parametrize("model_of", [Does, Behind])
def test_a_new_way_after_an_argument_was_changed(
    model_of: Callable[..., nn.Module], forward: Callable[..., Tensor]
) -> None:
    """The forward would run again, on what it has changed; the next call goes the new way at once."""
    refused = refusals(model_of(forward), (5, 5, 7, 7))
    assert all(length == 7 and "Or call the model again" in words for length, words in refused)
    assert len(refused) <= 1


def test_a_layer_that_refuses_after_an_argument_was_changed() -> None:
    """The model would start over, on what it has changed."""
    ((length, words),) = refusals(WithPositions(), (6, 6, B))
    assert length == B
    assert "may be positions" in words


def test_attributes_that_count_beside_a_changed_argument() -> None:
    """What each sample would count is counted by one more forward on all, which would change it once more."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x += 1
        m.count = getattr(m, "count", 0) + len(x)
        with torch.no_grad():
            scale = m.v.sum()
        return x * m.w * scale

    model = enn.convert(Does(forward)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"changed an argument in place.*counts in attributes.*x = x\.clone"):
        model(torch.randn(B, 5, D))


def by_name(m: Any, x: Tensor, bias: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    x = x if bias is None else x + bias[:, None]  # (B, D)
    return of_both(m, x if positions is None else x + positions)  # (T, D), shared by all


def by_key(m: Any, batch: dict[str, Tensor]) -> Tensor:
    return by_name(m, **batch)


def by_flag(m: Any, x: Tensor, table: Tensor, *, shared: bool) -> Tensor:
    return of_both(m, x + table if shared else x + table[:, None])


def of_both(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():  # by which its samples go one by one
        scale = m.v.sum()
    return torch.tanh(x * m.w) * scale


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "keyword": (by_name, lambda m, x, table, shared: m(x, **{"positions" if shared else "bias": table})),
    "key": (by_key, lambda m, x, table, shared: m({"x": x, "positions" if shared else "bias": table})),
    "flag": (by_flag, lambda m, x, table, shared: m(x, table, shared=shared)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_shapes_with_another_meaning(name: str) -> None:
    """What was compared for one of them does not hold for the other: with T = B one is shared by all samples."""
    forward, call = CALLS[name]
    model = enn.convert(Does(forward)).per_sample()
    for _ in range(3):
        call(model, torch.randn(B, B, D), torch.randn(B, D), shared=False)
    with pytest.raises(enn.PerSampleError, match="shared_by_all"):
        call(model, torch.randn(B, B, D), torch.randn(B, D), shared=True)
    call(model, torch.randn(B, B, D), enn.shared_by_all(torch.randn(B, D)), shared=True)


def test_mixing_that_a_parameter_hides() -> None:
    """An operation on a parameter is no reason to take the same one on the samples for known."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return (x.softmax(0) if m.mixes else x) * m.w.softmax(0)

    module = Does(forward)
    module.mixes = False
    model = enn.convert(module).per_sample(compare=False)
    for _ in range(3):
        model(torch.randn(B, D))
    model.mixes = True
    with pytest.raises(enn.PerSampleError, match="samples that do not depend on each other"):
        model(torch.randn(B, D))


@pytest.mark.parametrize("name", ["w", "added"])
def test_a_parameter_of_another_rank(name: str) -> None:
    """It is set after `convert`, in place of another one or of nothing; and is none that has a row for each sample."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x * m.w * m.v + (0 if m.added is None else m.added)

    module = Does(forward)
    module.w, module.added = nn.Parameter(torch.randn(())), None
    model = enn.convert(module).per_sample(loss_reduction="sum")
    x = torch.randn(D, D)  # with as many samples as the parameter will have numbers
    for value in (None, torch.randn(D)):
        if value is not None:
            setattr(module, name, nn.Parameter(value.clone()))
            setattr(model, name, nn.Parameter(value.clone()))
        for _ in range(2):
            model.zero_grad()
            sample_losses(model(x)).sum().backward()
            assert_close_rows(rows_of(model), loop(module, Call((x,)), D))
