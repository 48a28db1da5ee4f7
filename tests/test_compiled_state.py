"""A compiled step and what it finds and changes in Python: it is as the eager step, call by call."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.core import cost
from some import some
from test_compiled_step import graphs, perceptron, small

SCALE = 1.0
MEAN = torch.zeros(())
Program = Callable[[nn.Module, dict[str, Any]], Any]


def batch(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(size, 8, generator=draw), torch.randint(3, (size,), generator=draw)


def trained(model: nn.Module, x: Tensor, y: Tensor, scale: Any = 1.0) -> Tensor:
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()
    return loss.detach()


def state_of(model: nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        values[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
        rows = getattr(parameter, "grad_sample", None)
        values[f"{name}.rows"] = None if rows is None else rows.to_dense()
    return values


def run(program: Callable[..., Any], wrap: Callable[[Any], Any], make: Callable[[], nn.Module]) -> list[Any]:
    """What each of seven calls returns, and leaves in the model."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = enn.convert(make()).per_sample()
    call, after = program(model, wrap)
    seen = []
    for number in range(7):
        model.zero_grad()
        result = call(number, *batch(number))
        seen.append((result, state_of(model), None if after is None else after(), torch.get_rng_state()))
    return seen


def compared(program: Any, match: str | None, make: Callable[[], nn.Module] = small) -> int:
    """Runs a program with an eager step and with a compiled one; returns the number of graphs."""
    made: list[Any] = []

    def wrap(step: Any) -> Any:
        made.append(enn.compile(step, backend="eager"))
        return made[-1]

    expected = run(program, lambda step: step, make)
    with nullcontext() if match is None else pytest.warns(enn.PerSampleWarning, match=match):
        found = run(program, wrap, make)
    torch.testing.assert_close(found, expected)
    return sum(len(graphs(step)) for step in made)


# Programs: given a model and what wraps the step, they return a call of the step and what else it leaves. With each:
# what its warning says, or None and the number of graphs.


def averaged_in_place(model: nn.Module, wrap: Any) -> Any:
    teacher = enn.revert(model).requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        return loss

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: state_of(teacher)


def counter_in_a_tensor(model: nn.Module, wrap: Any) -> Any:
    count = torch.zeros(())

    def step(x: Tensor, y: Tensor) -> Any:
        count.add_(1)
        return trained(model, x, y, 1 / count)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), count.clone


def counter_in_a_dict(model: nn.Module, wrap: Any) -> Any:
    counts = {"calls": 0}

    def step(x: Tensor, y: Tensor) -> Any:
        counts["calls"] += 1
        return trained(model, x, y, 1 / counts["calls"])

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), counts.copy


def numbers_in_a_list(model: nn.Module, wrap: Any) -> Any:
    seen: list[int] = []

    def step(x: Tensor, y: Tensor) -> Any:
        seen.append(1)
        return trained(model, x, y, 1 / len(seen))

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), seen.copy


def words_from_a_list(model: nn.Module, wrap: Any) -> Any:
    words = list("cbacbacba")

    def step(x: Tensor, y: Tensor) -> Any:
        return trained(model, x, y, {"a": 1.0, "b": 2.0, "c": 3.0}[words.pop()])

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: len(words)


def words_from_a_set(model: nn.Module, wrap: Any) -> Any:
    words = set("abcdefgh")

    def step(x: Tensor, y: Tensor) -> Any:
        words.pop()
        return trained(model, x, y, 1 / len(words))

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: len(words)


def words_in_a_set(model: nn.Module, wrap: Any) -> Any:
    words: set[str] = set()

    def step(x: Tensor, y: Tensor) -> Any:
        words.add(str(len(words)))
        return trained(model, x, y, 1 / len(words))

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: len(words)


def key_of_a_dict(model: nn.Module, wrap: Any) -> Any:
    """Each call gives the only item another key, which a trace has to take back."""
    rates = {"first": [2.0]}

    def step(x: Tensor, y: Tensor) -> Any:
        key, other = ("first", "second") if "first" in rates else ("second", "first")
        rates[other] = rates.pop(key)
        return trained(model, x, y, 3.0 if key == "first" else 5.0)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), rates.copy


def numbers_in_a_deque(model: nn.Module, wrap: Any) -> Any:
    seen: deque[int] = deque([0], maxlen=3)

    def step(x: Tensor, y: Tensor) -> Any:
        seen.append(seen[-1] + 1)
        return trained(model, x, y, sum(seen))

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: list(seen)


def number_of_the_function(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        return trained(model, x, y, 1 / step.calls)  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: step.calls  # type: ignore[attr-defined]


def generator_of_python(model: nn.Module, wrap: Any) -> Any:
    own = random.Random(0)
    compiled = wrap(lambda x, y: trained(model, x, y, own.random()))
    return lambda number, x, y: compiled(x, y), own.getstate


def generator_of_numpy(model: nn.Module, wrap: Any) -> Any:
    holder = SimpleNamespace(random=np.random.default_rng(0))
    compiled = wrap(lambda x, y: trained(model, x, y, float(holder.random.beta(1.0, 1.0))))
    return lambda number, x, y: compiled(x, y), lambda: holder.random.bit_generator.state["state"]["state"]


def old_generator_of_numpy(model: nn.Module, wrap: Any) -> Any:
    draw = np.random.RandomState(0).rand
    compiled = wrap(lambda x, y: trained(model, x, y, draw()))
    return lambda number, x, y: compiled(x, y), None


def random_state_put_back(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        with torch.random.fork_rng():
            noise = torch.randn_like(x)
        return trained(model, x + noise, y) + torch.rand(())

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), None


def data_set_anew(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad  # type: ignore[operator]
        return loss

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), None


def tensor_in_an_attribute(model: nn.Module, wrap: Any) -> Any:
    held = SimpleNamespace(mean=torch.zeros(()))

    def step(x: Tensor, y: Tensor) -> Any:
        held.mean = 0.9 * held.mean + 0.1 * trained(model, x, y)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: held.mean


def tensor_in_a_dict(model: nn.Module, wrap: Any) -> Any:
    log: dict[str, Any] = {}

    def step(x: Tensor, y: Tensor) -> None:
        log["loss"] = trained(model, x, y)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), log.copy


def tensor_in_variables(model: nn.Module, wrap: Any) -> Any:
    """A number beside it is counted once a call, though the trace that is given up has counted as well."""
    mean, calls = torch.zeros(()), 0

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal mean, calls
        global MEAN
        calls += 1
        mean = 0.9 * mean + trained(model, x, y, 1 / calls)
        MEAN = mean / 2

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: (mean, MEAN, calls)


def result_in_an_object(model: nn.Module, wrap: Any) -> Any:
    compiled = wrap(lambda x, y: SimpleNamespace(loss=trained(model, x, y)))
    return lambda number, x, y: compiled(x, y).loss, None


def mode_switched(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        model.per_sample(False)  # type: ignore[operator]
        with torch.no_grad():
            shift = model(x).mean()
        model.per_sample(True)  # type: ignore[operator]
        return trained(model, x - shift, y)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), None


def queries_as_argument(model: nn.Module, wrap: Any) -> Any:
    def queries_of(number: int) -> enn.PerSampleGrads:
        model.zero_grad()
        trained(model, *batch(number))
        queries = enn.per_sample_grads(model)
        model.zero_grad()
        return queries

    def step(x: Tensor, y: Tensor, queries: Any) -> Any:
        trained(model, x, y)
        return enn.per_sample_grads(model).gram(queries)

    compiled, queries = wrap(step), [queries_of(number) for number in (8, 9)]
    return lambda number, x, y: compiled(x, y, queries[number > 3]), None


def iterator_as_argument(model: nn.Module, wrap: Any) -> Any:
    compiled, batches = wrap(lambda batches: trained(model, *next(batches))), map(batch, range(20))
    return lambda number, x, y: compiled(batches), None


def array_as_argument(model: nn.Module, wrap: Any) -> Any:
    compiled, weights, names = wrap(lambda x, y, w, n: trained(model, x, y, float(w[0]) + len(n))), np.ones(3), {"a"}

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        weights[0] = 1.0 + (number > 2)
        if number == 5:
            names.add("b")
        return compiled(x, y, weights, names)

    return call, None


def function_as_argument(model: nn.Module, wrap: Any) -> Any:
    global SCALE
    SCALE = 1.0
    by_name = {"loss": lambda outputs, y: F.cross_entropy(outputs, y) * SCALE}

    def step(x: Tensor, y: Tensor, loss_of: Any) -> None:
        (loss_of(model(x), y) + by_name["loss"](model(x), y)).backward()

    compiled = wrap(step)

    def scaled(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * SCALE

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        global SCALE
        SCALE = 1.0 + (number > 3)
        return compiled(x, y, scaled)

    return call, None


def function_found_in_a_dict(model: nn.Module, wrap: Any) -> Any:
    global SCALE
    SCALE = 1.0
    by_name = {"scaled": lambda outputs: outputs * SCALE}
    compiled = wrap(lambda x, y: trained(lambda x: by_name["scaled"](model(x)), x, y))  # type: ignore[arg-type]

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        global SCALE
        SCALE = 1.0 + (number > 3)
        return compiled(x, y)

    return call, None


def arguments_changed(model: nn.Module, wrap: Any) -> Any:
    """A dict loses an item, gains one and has one replaced; a list grows and shrinks."""

    def step(given: dict[str, Any], out: list[Any], spent: list[Any]) -> None:
        y = given.pop("y")
        given["inner"]["x"] = given["inner"]["x"] * 2
        given["loss"] = trained(model, given["inner"]["x"], y)
        out.append(given["loss"] + 1)
        del spent[1:]

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        given, out, spent = {"inner": {"x": x}, "y": y}, [], [1, 2, 3]
        compiled(given, out, spent)
        return given, out, spent

    return call, None


def hook_of_a_module(model: nn.Module, wrap: Any) -> Any:
    settings = {"scale": 1.0}
    model[0].register_forward_hook(lambda module, args, out: out * settings["scale"])  # type: ignore[index, operator]
    compiled = wrap(lambda x, y: trained(model, x, y))

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        settings["scale"] = 1.0 + (number > 3)
        return compiled(x, y)

    return call, None


def function_of_a_module(model: nn.Module, wrap: Any) -> Any:
    settings = {"scale": 1.0}
    model.scaled = lambda outputs: outputs * settings["scale"]  # type: ignore[assignment]
    compiled = wrap(lambda x, y: trained(lambda x: model.scaled(model(x)), x, y))  # type: ignore[arg-type, operator]

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        settings["scale"] = 1.0 + (number > 3)
        return compiled(x, y)

    return call, None


def rate_of_a_scheduler(model: nn.Module, wrap: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def step(x: Tensor, y: Tensor) -> None:
        trained(model, x, y)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=scheduler.get_last_lr()[0])  # type: ignore[arg-type]

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> None:
        compiled(x, y)
        if number:
            optimizer.step()
            scheduler.step()

    return call, None


def preconditioned(model: nn.Module, wrap: Any) -> Any:
    model.per_sample(keep_factors=True)  # type: ignore[operator]

    def step(x: Tensor, y: Tensor) -> Any:
        trained(model, x, y)
        grads = enn.per_sample_grads(model)
        return grads.precondition(grads.kronecker(), damping=0.1).gram(grads)

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), None


def factors_returned(model: nn.Module, wrap: Any) -> Any:
    model.per_sample(keep_factors=True)  # type: ignore[operator]

    def step(x: Tensor, y: Tensor) -> Any:
        trained(model, x, y)
        return enn.per_sample_grads(model).kronecker()

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), None


def factors_added_up(model: nn.Module, wrap: Any) -> Any:
    """Few rows wait in the factors, and are read within the step."""
    model.per_sample(keep_factors=True)  # type: ignore[operator]
    total: dict[str, enn.KroneckerFactors] = {}

    def step(x: Tensor, y: Tensor) -> Any:
        trained(model, x, y)
        before = [factors.A.clone() for factors in total.values()]
        total.update(enn.per_sample_grads(model).kronecker(total))
        return before[:1]

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: total


EAGER = {
    factors_added_up: "its graph leaves another value of",
    generator_of_python: "random numbers of Python or NumPy",
    generator_of_numpy: "random numbers of Python or NumPy",
    old_generator_of_numpy: "random numbers of Python or NumPy",
    random_state_put_back: "sets the state of torch's random numbers",
    data_set_anew: r"sets .data of a tensor anew \(change it in place",
    tensor_in_an_attribute: r"it sets 'mean' to a tensor, which a graph does not \(return the tensor",
    tensor_in_a_dict: "it sets 'loss' to a tensor",
    tensor_in_variables: "it sets .* to a tensor",
    result_in_an_object: "it returns a SimpleNamespace, .* that holds tensors",
    mode_switched: "it switches per-sample mode off and on",
    queries_as_argument: "per-sample gradients are among its arguments",
    iterator_as_argument: "it refers to an iterator, a map",
    counter_in_a_dict: "its graph leaves another value of calls",
    number_of_the_function: "its graph leaves another value of calls",
    numbers_in_a_list: "its graph leaves another list to which the step adds",
    words_from_a_list: "its graph leaves another list from which the step takes something",
    words_from_a_set: "its graph leaves another set from which the step takes something",
    words_in_a_set: "its graph leaves another set to which the step adds",
    key_of_a_dict: "its graph leaves another dict from which the step takes something",
    numbers_in_a_deque: "its graph leaves another (list|value of item 0)",
}
COMPILED = {
    averaged_in_place: 1,
    counter_in_a_tensor: 1,
    array_as_argument: 3,
    function_as_argument: 2,
    function_found_in_a_dict: 2,
    arguments_changed: 1,
    hook_of_a_module: 2,
    function_of_a_module: 2,
    rate_of_a_scheduler: 2,
    preconditioned: 1,
    factors_returned: 1,
}


@pytest.mark.parametrize("program", some([*EAGER]), ids=lambda program: program.__name__)
def test_a_step_that_runs_eagerly(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SYMMETRIC_PANEL", 2)
    assert compared(program, EAGER[program]) == 0


@pytest.mark.parametrize(
    ("first", "following"),
    [
        ((0, 1), lambda old: (0, old[1] + 1)),
        ((1,), lambda old: (*old, 1)),
        ([1], lambda old: [*old, 1]),
        ({"n": 1}, lambda old: {"n": old["n"] + 1}),
        ({0: 1}, lambda old: {**old, len(old): 1}),
        (frozenset({0}), lambda old: old | {len(old)}),
        (SimpleNamespace(n=(1,)), lambda old: SimpleNamespace(n=(old.n[0] + 1,))),
    ],
    ids=["tuple", "longer tuple", "list", "dict", "longer dict", "set", "object"],
)
def test_a_step_that_counts_by_making_an_object_anew(first: Any, following: Any) -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        held = {"count": first}

        def step(x: Tensor, y: Tensor) -> Any:
            held["count"] = following(held["count"])
            return trained(model, x, y)

        compiled = wrap(step)
        return lambda number, x, y: compiled(x, y), lambda: list(repr(held).encode())

    assert compared(program, "its graph leaves another value of count") == 0


@pytest.mark.parametrize("program", COMPILED, ids=lambda program: program.__name__)
def test_a_step_that_is_a_graph(program: Any) -> None:
    assert compared(program, None) == COMPILED[program]


class Scaled(nn.Module):
    """Computes with a global number, and with one of its class."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * SCALE
        return self.scaled(scaled)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.of_class


@pytest.fixture
def own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(Scaled, "of_class", 1.0)


@pytest.mark.parametrize("place", ["global", "class"])
@pytest.mark.usefixtures("own_numbers")
def test_numbers_that_the_functions_of_a_module_name(place: str) -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: trained(model, x, y))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            global SCALE
            SCALE = 1.0 + (place == "global" and number > 3)
            Scaled.of_class = 1.0 + (place == "class" and number > 3)
            return compiled(x, y)

        return call, None

    assert compared(program, None, Scaled) == 2


class Draws(nn.Module):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.random = nn.Linear(8, 3), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        drawn: Tensor = self.layer(x) * self.random.random()
        return drawn


def test_a_generator_of_a_module() -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: trained(model, x, y))
        return lambda number, x, y: compiled(x, y), None

    assert compared(program, "random numbers of Python or NumPy", Draws) == 0


@pytest.mark.parametrize("fast", [False, True])
def test_weights_of_other_strides(fast: bool) -> None:
    """A call that is like the last one is known in another way."""

    def program(model: nn.Module, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: trained(model, x[:, :, None, None].expand(-1, -1, 4, 4).clone(), y))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            if number == (5 if fast else 2):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            return compiled(x, y)

        return call, None

    layers = nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten()
    assert compared(program, None, lambda: nn.Sequential(*layers)) == 2


def test_a_number_that_the_step_writes_in_its_code_may_be_read() -> None:
    def program(model: nn.Module, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: trained(model, x, y, float(torch.tensor(0.5))))
        return lambda number, x, y: compiled(x, y), None

    assert compared(program, None) == 1


def test_a_scheduler_takes_its_step_outside() -> None:
    model = enn.convert(perceptron()).per_sample()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: Tensor, y: Tensor) -> None:
        trained(model, x, y)
        scheduler.step()

    compiled = enn.compile(step, backend="eager")
    optimizer.step()
    compiled(*batch(0))
    with pytest.raises(enn.PerSampleError, match=r"the step calls ExponentialLR.step\(\); .*after the optimizer"):
        compiled(*batch(0))


@pytest.mark.parametrize(
    "read",
    [
        lambda bound: 2.0 if bound > torch.tensor(0.3) else 1.0,
        lambda bound: float(torch.tensor(0.9) ** bound),
        lambda bound: max(bound, torch.tensor(0.3)) * 1.0,
        lambda bound: [1.0, 2.0][torch.tensor(0) + (bound > 0.3)],
    ],
)
def test_a_number_of_a_named_tensor_and_one_made_in_the_step(read: Callable[[Tensor], float]) -> None:
    """Torch could tell it in the trace; it may be another one at the next call."""
    model, bound = enn.convert(small()).per_sample(), torch.tensor(0.5)

    def step(x: Tensor, y: Tensor) -> Any:
        return trained(model, x * read(bound), y)

    compiled = enn.compile(step, backend="eager")
    for call in range(5):
        bound.fill_(0.5 if call < 3 else 0.2)
        model.zero_grad()
        wanted = step(*batch(4))
        model.zero_grad()
        torch.testing.assert_close(compiled(*batch(4)), wanted)


@pytest.mark.parametrize("other", [lambda bound: torch.tensor(0.3), lambda bound: bound])
def test_named_tensors_that_the_step_compares(other: Callable[[Tensor], Tensor]) -> None:
    model, bound = enn.convert(small()).per_sample(), torch.tensor(0.5)

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        return trained(model, x * (2.0 if torch.equal(bound, other(bound)) else 1.0), y)

    step(*batch(4))
    with pytest.raises(enn.PerSampleError, match="reads a value of a tensor in line"):
        step(*batch(4))
