"""`enn.compile` where gradients and rows are there before the call: what the eager step does, the graph does."""

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from some import slow, some
from test_compiled_step import assert_same, classified, graphs, outcome, perceptron, samples, two_layers


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def two_backwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    backward(model, x, y)
    backward(model, 2 * x, y)


def model_cleared_first(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    model.zero_grad(set_to_none=False)
    return classified(model, x, y)


def optimizer_cleared_first(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
    return classified(model, x, y)


def rows_taken_away_at_the_end(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    result = classified(model, x, y)
    rows_taken_away(model)
    return result


def rows_changed_at_the_end(model: nn.Module, x: Tensor, y: Tensor) -> None:
    backward(model, x, y)
    first, *others = model.parameters()
    first.grad_sample = None  # type: ignore[attr-defined]
    for parameter in others:
        parameter.grad_sample = parameter.grad_sample * 2  # type: ignore[attr-defined]


STEPS = [backward, two_backwards, classified, model_cleared_first, optimizer_cleared_first]


def scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def zeroed_below_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def zeroed_in_part(model: nn.Module) -> None:
    first = next(model.parameters())
    if first.grad is not None:
        first.grad.zero_()


def set_to(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def action(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = make(parameter)

    return action


def rows_taken_away(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad_sample = None  # type: ignore[attr-defined]


def clipped_between(model: nn.Module) -> None:
    if all(parameter.grad_sample is not None for parameter in model.parameters()):  # type: ignore[attr-defined]
        enn.clip_grad_sample_norms_(model, 0.7)


BETWEEN: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda model: None,
    "model.zero_grad()": lambda model: model.zero_grad(),
    "model.zero_grad(False)": lambda model: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "optimizer.zero_grad(False)": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "zeroed below autograd": zeroed_below_autograd,
    "zeroed in part": zeroed_in_part,
    "new zeros": set_to(torch.zeros_like),
    "new ones": set_to(torch.ones_like),
    "scaled": scaled,
    "rows taken away": rows_taken_away,
    "clipped": clipped_between,
}


def run(step: Callable[..., Any], model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Any], list[bool]]:
    """What a call leaves, an error included, and which gradients are the same tensors as before."""
    before = [parameter.grad for parameter in model.parameters()]
    try:
        left = outcome(model, step(*batch))
    except enn.PerSampleError as error:
        return {"error": str(error)}, []
    return left, [parameter.grad is grad for parameter, grad in zip(model.parameters(), before, strict=True)]


def compared(step: Callable[..., Any], between: list[str], sizes: list[int], **settings: Any) -> tuple[Any, list[str]]:
    """Runs a step compiled and eagerly, with something done to the gradients before each call.

    Returns:
        The compiled step, and the texts of the warnings.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(enn.convert(two_layers()).per_sample(**settings))
    mine, theirs = models
    compiled = enn.compile(lambda *batch: step(mine, *batch), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, (name, batch) in enumerate(zip(between, samples(*sizes), strict=True)):
            results = []
            for model, called in ((mine, compiled), (theirs, lambda *given: step(theirs, *given))):
                BETWEEN[name](model)
                results.append(run(called, model, batch))
            assert_same(*results, where=f"call {number} of {between}")
            if "error" in results[0][0]:  # what an eager step has done before it fails, a trace takes back
                break
    return compiled, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("step", some(STEPS), ids=lambda step: step.__name__)
@pytest.mark.parametrize("accumulate_grad", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_whatever_is_done_between_the_calls(step: Callable[..., Any], accumulate_grad: bool, seed: int) -> None:
    draw = random.Random(f"{step.__name__} {accumulate_grad} {seed}")
    few = draw.sample(list(BETWEEN), draw.choice([1, 2, 3, 4]))
    between, sizes = [draw.choice(few) for _ in range(9)], [draw.choice([4, 4, 5]) for _ in range(9)]
    compared(step, between, sizes, accumulate_grad=accumulate_grad, materialize=draw.random() < 0.3)


@pytest.mark.parametrize("step", [rows_taken_away_at_the_end, rows_changed_at_the_end])
@pytest.mark.parametrize("between", ["nothing", "model.zero_grad()", "optimizer.zero_grad()"])
def test_rows_that_the_step_itself_sets(step: Callable[..., Any], between: str) -> None:
    """Also `None`, as Opacus does once it has used them."""
    compared(step, [between] * 5, [4, 4, 4, 5, 4])


@pytest.mark.parametrize(
    "step",
    [
        *(classified, backward),
        *(pytest.param(step, marks=pytest.mark.slow) for step in (model_cleared_first, optimizer_cleared_first)),
    ],
)
@pytest.mark.parametrize("accumulate_grad", [True, False])
@pytest.mark.parametrize(
    "clearing",
    ["model.zero_grad(False)", pytest.param("optimizer.zero_grad(False)", marks=pytest.mark.slow), "new zeros"],
)
def test_zeros_left_in_grad_are_a_graph(step: Callable[..., Any], accumulate_grad: bool, clearing: str) -> None:
    compiled, texts = compared(step, [clearing] * 6, [4, 4, 4, 5, 6, 5], accumulate_grad=accumulate_grad)
    assert not texts
    assert 1 <= len(graphs(compiled)) <= 3


def test_a_graph_for_zeros_is_not_taken_for_other_gradients() -> None:
    """Clipping refuses these eagerly: nothing bounds what a sample has added to them."""
    model, (x, y) = enn.convert(perceptron()).per_sample(accumulate_grad=False), samples(4)[0]
    step = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for _ in range(4):
        set_to(torch.zeros_like)(model)
        step(x, y)
    assert len(graphs(step)) == 1
    set_to(torch.ones_like)(model)
    with pytest.raises(enn.PerSampleError, match=r"a gradient in .grad that is not, or not wholly"):
        step(x, y)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:grad and param do not:UserWarning")
def test_gradients_that_lie_in_another_way() -> None:
    """A compiler's graph would read them as they lay before."""
    model, (x, y) = enn.convert(nn.Linear(8, 8)).per_sample(), samples(4)[0]

    def left_by(step: Callable[..., Any], number: int) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(number)
        grad = torch.randn(8, 8)
        model.weight.grad = grad if number < 3 else grad.t()
        step(model, x, y)
        return [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(backward)
    for number in range(6):
        assert_same(left_by(compiled, number), left_by(backward, number))
    assert len(graphs(compiled)) == 2


def cleared_by_optimizer(own: nn.Module, other: nn.Module) -> None:
    torch.optim.SGD([*own.parameters(), *other.parameters()], lr=0.1).zero_grad()


def cleared_by_model(own: nn.Module, other: nn.Module) -> None:
    own.zero_grad()
    other.zero_grad()


def added_up(own: nn.Module, other: nn.Module) -> Tensor:
    own.zero_grad()
    return sum((p.grad.square().sum() for p in other.parameters() if p.grad is not None), torch.zeros(()))


@pytest.mark.parametrize("is_converted", [True, slow(False)])
@pytest.mark.parametrize("look", [cleared_by_optimizer, cleared_by_model, added_up])
def test_gradients_of_a_model_that_the_step_does_not_call(look: Callable[..., Any], is_converted: bool) -> None:
    """They are not there when the step is traced, and later they are."""
    torch.manual_seed(0)
    own, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]
    other = enn.convert(perceptron()).per_sample() if is_converted else perceptron()

    def step(x: Tensor, y: Tensor) -> Any:
        return look(own, other), classified(own, x, y)

    def left_by(run: Callable[..., Any], number: int) -> Any:
        other.zero_grad()
        if number > 3:
            backward(other, x, y)
        return run(x, y), outcome(own, None), outcome(other, None)

    compiled = enn.compile(step, backend="eager")
    for number in range(9):
        assert_same(left_by(compiled, number), left_by(step, number))
    assert len(graphs(compiled)) == 2


def test_a_tensor_of_no_module_is_trained() -> None:
    model, factor, (x, y) = enn.convert(perceptron()).per_sample(), torch.ones(3, requires_grad=True), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x) * factor, y).backward()

    def left_by(run: Callable[..., Any], before: Tensor | None) -> Any:
        model.zero_grad()
        factor.grad = None if before is None else before.clone()
        run(x, y)
        return outcome(model, factor.grad)

    compiled = enn.compile(step, backend="eager")
    for before in [None] * 5 + [torch.ones(3)] * 3:
        assert_same(left_by(compiled, before), left_by(step, before))
    assert len(graphs(compiled)) == 2


def test_a_model_that_is_only_changed_in_place_may_require_gradients() -> None:
    model, (x, y) = enn.convert(perceptron()).per_sample(), samples(4)[0]
    model(x).sum().backward()
    averages = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    for average in averages:
        average.load_state_dict(model.state_dict())
        average[0].weight.grad = torch.ones(16, 8)

    def averaged(x: Tensor, y: Tensor, average: nn.Module) -> None:
        backward(model, x, y)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter - parameter.grad, 0.5)

    compiled = enn.compile(lambda x, y: averaged(x, y, averages[0]), backend="eager")
    for _ in range(4):
        for step in (compiled, lambda x, y: averaged(x, y, averages[1])):
            model.zero_grad()
            step(x, y)
        assert_same(*(outcome(average, None) for average in averages))
    assert len(graphs(compiled)) == 1


def test_micro_batches_append_in_a_graph() -> None:
    between = ["model.zero_grad()", "nothing", "nothing", "nothing"] * 3
    for settings in ({}, {"materialize": True}, {"loss_reduction": "sum"}):
        compiled, texts = compared(backward, between, [4, 4, 4, 5] * 3, **settings)
        assert not texts
        assert 2 <= len(graphs(compiled)) <= 4


def test_rows_of_many_calls_are_clipped_after_the_last() -> None:
    models = [enn.convert(perceptron()).per_sample() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    step = enn.compile(lambda x, y: backward(models[0], x, y), backend="eager")
    for _ in range(3):
        for model, called in ((models[0], step), (models[1], lambda x, y: backward(models[1], x, y))):
            model.zero_grad()
            for batch in samples(4, 4, 4):
                called(*batch)
            assert enn.clip_grad_sample_norms_(model, 1.0).shape == (12,)
        assert_same(outcome(models[0], None), outcome(models[1], None))
    assert len(graphs(step)) == 2


@pytest.mark.filterwarnings("ignore:.*was set anew since:expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("calls", [2, 3, 4])
@pytest.mark.parametrize("sets_anew", [False, True])
def test_a_grad_that_the_user_changes_between_micro_batches(calls: int, sets_anew: bool) -> None:
    """A graph and the step beside it leave `.grad` as it was noted: what is an error then is one here."""

    def said(compiles: bool) -> str:
        torch.manual_seed(0)
        model = enn.convert(perceptron()).per_sample()
        step = (lambda x, y: backward(model, x, y)) if not compiles else None
        step = step or enn.compile(lambda x, y: backward(model, x, y), backend="eager")
        for batch in samples(*[4] * calls):
            step(*batch)
        weight = model[0].weight
        weight.grad = torch.ones_like(weight) if sets_anew else weight.grad.add_(1.0)
        try:
            step(*next(iter(samples(4))))
        except enn.PerSampleError as error:
            return str(error)
        return f"{float(weight.grad.norm()):.4f}"

    assert said(compiles=True) == said(compiles=False)


def counted(model: nn.Module, x: Tensor, y: Tensor) -> int:
    backward(model, x, y)
    return model[0].weight.grad_sample.shape[0]  # type: ignore[no-any-return, union-attr, index]


def length(model: nn.Module, x: Tensor, y: Tensor) -> int:
    backward(model, x, y)
    return len(model[0].weight.grad_sample)  # type: ignore[index]


def measured(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    backward(model, x, y)
    return enn.per_sample_grads(model).norms()


@pytest.mark.parametrize(
    ("step", "reason"),
    [(classified, "uses"), (measured, "uses"), (counted, "uses the number of"), (length, "uses the number of")],
)
def test_a_look_at_rows_from_before_runs_eagerly(step: Callable[..., Any], reason: str) -> None:
    _, (text,) = compared(step, ["nothing"] * 4, [4, 4, 4, 4])
    assert f"runs eagerly, as it {reason} per-sample gradients from before the call" in text


def read(parameters: Sequence[nn.Parameter], _: Tensor) -> Tensor:
    return 2 * cast(Any, parameters[0]).grad_sample


def dropped(parameters: Sequence[nn.Parameter], _: Tensor) -> None:
    for parameter in parameters:
        parameter.grad_sample = None  # type: ignore[attr-defined]


def written(parameters: Sequence[nn.Parameter], rows: Tensor) -> None:
    parameters[0].grad_sample = 2 * rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_alone", [False, True], ids=["beside", "alone"])
@pytest.mark.parametrize("by_model", [False, True], ids=["by_parameters", "by_model"])
@pytest.mark.parametrize("use", [read, dropped, written])
def test_rows_of_a_model_that_the_step_does_not_call(use: Any, by_model: bool, is_alone: bool) -> None:
    """They are those of a backward outside of it."""
    torch.manual_seed(0)
    own, other = (enn.convert(perceptron()).per_sample() for _ in range(2))
    parameters = list(other.parameters())

    def step(x: Tensor, y: Tensor) -> Any:
        if not is_alone:
            backward(own, x, y)
        return use(list(other.parameters()) if by_model else parameters, x)

    def left_by(run: Callable[..., Any], number: int) -> Any:
        own.zero_grad()
        other.zero_grad()
        (first, second) = samples(4, 5)
        backward(other, first[0] * number, first[1])
        return run(*second), outcome(own, None), outcome(other, None)

    compiled = enn.compile(step, backend="eager")
    for number in range(5):
        warns = use is read and number == 1
        with pytest.warns(enn.PerSampleWarning, match="uses per-sample gradients from") if warns else nullcontext():
            left = left_by(compiled, number)
        assert_same(left, left_by(step, number))
    assert len(graphs(compiled)) == (use is not read)


def test_rows_that_the_user_sets_on_a_parameter_of_no_recorder() -> None:
    """Be it a parameter of no module, or of a plain one that the step does not call."""
    torch.manual_seed(0)
    model, plain = enn.convert(perceptron()).per_sample(), nn.Linear(2, 3)
    loose = [nn.Parameter(torch.ones(3)), *plain.parameters()]
    for parameter in loose:
        parameter.grad_sample = None  # type: ignore[attr-defined]

    def step(x: Tensor, y: Tensor) -> Any:
        rows = [parameter.grad_sample for parameter in (*loose, *plain.parameters())]
        return classified(model, x, y), [2 * own for own in rows if own is not None]

    compiled, (batch,) = enn.compile(step, backend="eager"), samples(4)
    for set_by_user in [(), (), (), (0,), (0,), (1,), (), (0, 1, 2)]:
        for number, parameter in enumerate(loose):
            parameter.grad_sample = torch.randn(4, 3) if number in set_by_user else None  # type: ignore[attr-defined]
        left = []
        for run in (compiled, step):
            model.zero_grad()
            left.append((run(*batch), outcome(model, None)))
        assert_same(*left)
    assert len(graphs(compiled)) >= 1


def within_a_pass(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with enn.one_pass(model, x.shape[0]):
        backward(model, x, y)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("use", [backward, classified, two_backwards, within_a_pass])
def test_a_forward_before_the_call_whose_backward_comes_after_it(use: Any, size: int) -> None:
    """A forward of the same samples is of one pass with the step's, whose rows are added."""
    models = [enn.convert(perceptron()).per_sample(), enn.convert(perceptron()).per_sample()]
    models[1].load_state_dict(models[0].state_dict())
    own, other = models
    compiled = enn.compile(functools.partial(use, own), backend="eager")
    for number, (x, y) in enumerate(samples(4, 4, 4, 4)):
        for model, run in ((own, compiled), (other, functools.partial(use, other))):
            model.zero_grad()
            opened = model(torch.ones(size, 8)).square().mean() if number != 1 else None
            run(x, y)
            if opened is not None:
                opened.backward()
        assert_same(outcome(own, None), outcome(other, None))
    assert len(graphs(compiled)) == 1


def test_what_is_no_part_of_grad_runs_eagerly() -> None:
    _, (text,) = compared(backward, ["nothing", "new ones", "new ones", "new ones"], [4, 4, 4, 4])
    assert "runs eagerly, as a .grad was set anew since the last backward" in text


def test_rows_of_gradients_that_the_step_sets_to_zero() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
        backward(model, x, y)

    _, (text,) = compared(step, ["nothing"] * 4, [4, 4, 4, 4])
    assert "runs eagerly, as it sets a gradient to zero whose per-sample gradients are held" in text


def test_an_assumption_that_fails_is_named() -> None:
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor, scale: Tensor) -> Any:
        (scale * F.cross_entropy(model(x), y)).backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    (x, y), texts = samples(4)[0], []
    for scale in (1.0, 1.0, *[1e-200] * 6):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(x, y, torch.tensor(scale))
        texts += [str(warning.message) for warning in caught]
    (text,) = texts
    assert "as call after call the squares of its gradients are out of range" in text


def test_factors_that_are_not_finite_are_refused_in_a_graph() -> None:
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor, factors: Tensor) -> Any:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, lambda norms: norms * factors)

    (x, y), factors = samples(4)[0], torch.ones(4)
    for _ in range(3):
        step(x, y, factors)
    assert len(graphs(step)) == 1
    with pytest.raises(enn.PerSampleError, match=r"max_norm returned inf or NaN for the rows \[2\] of grad_sample"):
        step(x, y, torch.tensor([1.0, 1.0, torch.nan, 1.0]))


def test_a_gradient_that_the_step_makes_where_there_is_none() -> None:
    """The trace leaves none behind, at which the eager step after it would find one."""
    model, own = enn.convert(perceptron()).per_sample(), nn.Parameter(torch.ones(3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        if own.grad is None:
            own.grad = torch.zeros(3)
        F.cross_entropy(model(x), y).backward()
        return own.grad + 1

    compiled = enn.compile(step, backend="eager")
    for x, y in samples(4, 4, 4, 4):
        own.grad = None
        model.zero_grad()
        assert_same(compiled(x, y), torch.ones(3))
        assert_same(own.grad, torch.zeros(3))
