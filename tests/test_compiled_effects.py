"""A compiled step and what it does to tensors' attributes, to state below the names, beside other threads."""

import copy
import functools
import gc
import importlib
import pickle
import sys
import threading
import weakref
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
from expanded_nn.compiling import tracing
from expanded_nn.compiling.tracing import trace
from some import some
from test_compiled_state import batch, compared, trained
from test_compiled_step import graphs, perceptron

COMPILE: Any = importlib.import_module("expanded_nn.compile")  # the name in the package is the function's


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each trace."""
    traces: list[int] = []

    def counted(*args: Any, **settings: Any) -> Any:
        traces.append(0)
        return trace(*args, **settings)

    monkeypatch.setattr(COMPILE, "trace", counted)
    return traces


def called(step: Callable[..., Any], wrap: Any, after: Any = None) -> Any:
    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), after


# Programs, as in `test_compiled_state.py`.


def momentum_in_a_list(model: nn.Module, wrap: Any) -> Any:
    """The list is an attribute of an object, as with a user's own optimizer."""
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    own = SimpleNamespace(momenta=momenta, steps=0)

    def step(x: Tensor, y: Tensor) -> Any:
        own.steps += 1
        loss = trained(model, x, y)
        for i, parameter in enumerate(model.parameters()):
            own.momenta[i] = 0.9 * own.momenta[i] + parameter.grad
            parameter.data.sub_(own.momenta[i], alpha=0.1)
        return loss

    return called(step, wrap, lambda: (own.steps, *own.momenta))


def momentum_in_tuples(model: nn.Module, wrap: Any) -> Any:
    state = {name: (torch.zeros_like(parameter), 0.5) for name, parameter in model.named_parameters()}

    def step(x: Tensor, y: Tensor) -> None:
        trained(model, x, y)
        for name, parameter in model.named_parameters():
            state[name] = (state[name][0] + parameter.grad, 0.5)

    return called(step, wrap, state.copy)


class Remembers(nn.Module):
    """Keeps a sum in a dict among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(8, 3), {"sum": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["sum"] = self.cache["sum"] + x.detach().mean()
        result: Tensor = self.layer(x) + self.cache["sum"]
        return result


def cache_of_a_module(model: Any, wrap: Any) -> Any:
    own = enn.convert(Remembers()).per_sample(compare=False)  # a sum over the batch

    def step(x: Tensor, y: Tensor) -> Any:
        own.zero_grad()
        return trained(own, x, y)

    return called(step, wrap, lambda: own.cache["sum"])


class Slots:
    """Has slots."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(())


def tensor_in_a_slot(model: nn.Module, wrap: Any) -> Any:
    own = Slots()

    def step(x: Tensor, y: Tensor) -> None:
        own.mean = 0.9 * own.mean + trained(model, x, y)

    return called(step, wrap, lambda: own.mean)


def unscaled(model: nn.Module, wrap: Any) -> Any:
    """The scaler keeps tensors in dicts below its attributes, and there that it has unscaled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> float:
        compiled(x, y)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return call, None


def seed_set(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        torch.manual_seed(3)
        return trained(model, x + torch.randn_like(x), y)

    return called(step, wrap)


def argument_with_attributes(model: nn.Module, wrap: Any) -> Any:
    compiled = wrap(lambda x, y: trained(model, x, y, getattr(x, "scale", 1.0)))

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        x.scale = 1.0 + (number > 3)  # type: ignore[attr-defined]
        return compiled(x, y)

    return call, None


def attribute_of_an_argument(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> None:
        x.loss = trained(model, x, y)  # type: ignore[attr-defined]

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        compiled(x, y)
        return x.loss  # type: ignore[attr-defined]

    return call, None


def state_of_chance(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        state = torch.get_rng_state()
        return trained(model, x + torch.rand_like(x), y), state

    return called(step, wrap)


class Listed(list[Any]):
    """A list with an attribute."""


class Pair(tuple[Any, ...]):
    """A tuple that is made of two items, not of one iterable."""

    def __new__(cls, one: Any, two: Any) -> "Pair":
        return super().__new__(cls, (one, two))


def listed(loss: Tensor) -> Listed:
    result = Listed([loss])
    result.double = loss * 2  # type: ignore[attr-defined]
    return result


def result_of(kind: Callable[[Tensor], Any], read: Callable[[Any], Any]) -> Any:
    def program(model: nn.Module, wrap: Any) -> Any:
        compiled = wrap(lambda x, y: kind(trained(model, x, y)))
        return lambda number, x, y: read(compiled(x, y)), None

    return program


EAGER = {
    momentum_in_a_list: "sets item 0 of a list to a tensor",
    momentum_in_tuples: "sets '0.weight' to a tensor",
    cache_of_a_module: "sets 'sum' to a tensor",
    tensor_in_a_slot: "sets 'mean' to a tensor",
    unscaled: "sets .* to a tensor",
    seed_set: "sets the seed of torch's random numbers",
    state_of_chance: "reads the state of torch's random numbers",
    argument_with_attributes: "an argument is a tensor with attributes of its own",
    attribute_of_an_argument: "it sets an attribute of a tensor among its arguments",
}
RESULTS = {
    "generator": (lambda loss: (loss * i for i in range(2)), list, "it returns a generator"),
    "map": (lambda loss: map(torch.neg, [loss]), list, "it returns a map"),
    "set": (lambda loss: {loss}, lambda result: result.pop(), "it returns a set"),
    "values": (lambda loss: {"loss": loss}.values(), list, "it returns a dict_values"),
    "function": (lambda loss: lambda: loss, lambda result: result(), "it returns a function"),
    "list with an attribute": (listed, lambda result: [*result, result.double], "it returns a Listed, with attributes"),
    "tuple made otherwise": (lambda loss: Pair(loss, loss), list, "it returns a Pair, .*constructor of its own"),
    "sparse": (lambda loss: loss[None].to_sparse(), Tensor.to_dense, "it returns a sparse tensor"),
    "compressed": (lambda loss: loss[None, None].to_sparse_csr(), Tensor.to_dense, "it returns a sparse tensor"),
    "meta": (lambda loss: loss.to("meta"), lambda result: result.shape, "or one without values"),
    "partial": (lambda loss: functools.partial(torch.neg, loss), lambda result: result(), "it returns a partial"),
}


@pytest.mark.parametrize("program", some([*EAGER]), ids=lambda program: program.__name__)
def test_a_step_that_runs_eagerly(program: Any) -> None:
    assert compared(program, EAGER[program]) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_hides_tensors(name: str) -> None:
    kind, read, reason = RESULTS[name]
    assert compared(result_of(kind, read), reason) == 0


def momentum_of_parameters(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        for parameter in model.parameters():
            parameter.momentum = 0.9 * getattr(parameter, "momentum", 0.0) + parameter.grad  # type: ignore[attr-defined]
            parameter.steps = 1  # type: ignore[attr-defined]
        return loss

    return called(step, wrap, lambda: [(p.momentum.clone(), p.steps) for p in model.parameters()])  # type: ignore[attr-defined]


def number_of_a_parameter(model: Any, wrap: Any) -> Any:
    weight = model[0].weight
    weight.scale = 1.0
    compiled = wrap(lambda x, y: trained(model, x, y, weight.scale))

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        weight.scale = 1.0 + (number > 3)
        return compiled(x, y)

    return call, None


def frozen_and_thawed(model: Any, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        model[0].weight.requires_grad_(not model[0].weight.requires_grad)
        return loss

    return called(step, wrap, lambda: model[0].weight.requires_grad)


def gradients_of_an_argument(model: nn.Module, wrap: Any) -> Any:
    """As in a PINN whose step makes its points require gradients."""

    def step(x: Tensor, y: Tensor) -> Any:
        return trained(model, x.requires_grad_(), y)

    compiled = wrap(step)

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        compiled(x, y)
        return x.requires_grad, x.grad

    return call, None


def rows_set_to_none(model: nn.Module, wrap: Any) -> Any:
    """As Opacus does; `grad_sample` is seen by what is compared."""

    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        for parameter in model.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        return loss

    return called(step, wrap)


def rows_set_anew(model: Any, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        model[0].weight.grad_sample = 2 * model[0].weight.grad_sample
        return loss

    return called(step, wrap)


def settings_in_a_partial(model: nn.Module, wrap: Any) -> Any:
    settings = {"scale": 1.0}

    def step(settings: dict[str, float], x: Tensor, y: Tensor) -> Any:
        return trained(model, x, y, settings["scale"])

    compiled = wrap(functools.partial(step, settings))

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        settings["scale"] = 1.0 + (number > 3)
        return compiled(x, y)

    return call, None


def numbers_of_numpy(model: nn.Module, wrap: Any) -> Any:
    compiled = wrap(lambda x, y, scale, twice: trained(model, x, y, scale * (1 + bool(twice))))
    return lambda number, x, y: compiled(x, y, np.float64(1 + number // 4), np.bool_(True)), None


def autocast_around(model: nn.Module, wrap: Any) -> Any:
    compiled = wrap(lambda x, y: trained(model, x, y))

    def call(number: int, x: Tensor, y: Tensor) -> Any:
        model.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(x.float(), y)

    return call, None


def step_within_a_step(model: nn.Module, wrap: Any) -> Any:
    inner = wrap(lambda x, y: trained(model, x, y))
    return called(lambda x, y: (inner(x, y), enn.clip_grad_sample_norms_(model, 0.5)), wrap)


def gradients_of_a_transform(model: nn.Module, wrap: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        return trained(model, x, y), torch.func.grad(lambda z: z.square().sum())(x)

    return called(step, wrap)


COMPILED = {
    gradients_of_a_transform: 1,
    momentum_of_parameters: 1,
    number_of_a_parameter: 2,
    frozen_and_thawed: 2,
    gradients_of_an_argument: 1,
    rows_set_to_none: 1,
    rows_set_anew: 1,
    settings_in_a_partial: 2,
    numbers_of_numpy: 2,
    autocast_around: 1,
    step_within_a_step: 3,  # two of the inner one, which the outer one calls eagerly as well
}


@pytest.mark.parametrize("program", COMPILED, ids=lambda program: program.__name__)
def test_a_step_that_is_a_graph(program: Any) -> None:
    assert compared(program, None) == COMPILED[program]


def test_gradients_that_the_step_clears_at_its_end() -> None:
    """As where it has an update of its own."""
    model = enn.convert(perceptron()).per_sample()
    eager = copy.deepcopy(model)

    def updated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        trained(model, x, y)
        norms = enn.clip_grad_sample_norms_(model, 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        return norms

    compiled = enn.compile(functools.partial(updated, model), backend="eager")
    for number in range(5):
        torch.testing.assert_close(compiled(*batch(number)), updated(eager, *batch(number)))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert len(graphs(compiled)) > 0


@pytest.mark.filterwarnings("ignore:.*each size takes a graph of its own")
@pytest.mark.parametrize("text", [lambda n: f"{n} samples", "{:d}".format, "%s".__mod__, lambda n: f"{n / 2:.1f}"])
def test_a_size_in_a_text(text: Callable[[Any], str]) -> None:
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        trained(model, x, y)
        return text(x.shape[0])

    for number, size in enumerate((4, 4, 5, 6, 4, 5)):
        model.zero_grad()
        assert step(*batch(number, size)) == text(size)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_arguments() -> None:
    model = enn.convert(perceptron()).per_sample()
    compiled = enn.compile(lambda x, y: trained(model, x.to_dense(), y), backend="eager")
    for number in range(4):
        x, y = batch(number)
        model.zero_grad()
        expected = trained(model, x, y)
        model.zero_grad()
        torch.testing.assert_close(compiled(x.to_sparse_csr() if number < 3 else x, y), expected)


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_step_in_several_threads() -> None:
    models = [enn.convert(perceptron()).per_sample() for _ in range(3)]

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        model.zero_grad()
        return trained(model, x, y), enn.clip_grad_sample_norms_(model, 0.5)

    compiled = enn.compile(step, backend="eager")
    found = in_threads(lambda number: [compiled(models[number], *batch(i)) for i in range(6)], 3)
    torch.testing.assert_close(found, [[step(model, *batch(i)) for i in range(6)] for model in models])


def test_models_that_other_threads_are_at_work_with() -> None:
    """A thread does not touch them, as reading a `.grad` that another thread clears may end the process."""
    models = [enn.convert(perceptron()).per_sample() for _ in range(3)]
    wanted = [copy.deepcopy(model) for model in models]
    barrier = threading.Barrier(3)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return trained(model, x, y)

    def work(number: int) -> set[nn.Module]:
        barrier.wait()
        for i in range(12):
            models[number].zero_grad()
            compiled(models[number], *batch(i))
        barrier.wait()
        return {*compiled._graphs.met.modules}

    compiled = enn.compile(step, backend="eager")
    assert in_threads(work, 3) == [{*model.modules()} for model in models]
    assert len(graphs(compiled)) == 3
    for model, other in zip(models, wanted, strict=True):
        step(other, *batch(11))
        for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, same.grad)
            torch.testing.assert_close(parameter.grad_sample, same.grad_sample)


def test_a_thread_for_each_call_is_warned_of() -> None:
    model = enn.convert(perceptron()).per_sample()
    compiled = enn.compile(lambda x, y: trained(model, x, y), backend="eager")
    for _ in range(16):
        in_threads(lambda _: compiled(*batch(0)), 1)
        model.zero_grad()
    with pytest.warns(enn.PerSampleWarning, match="the first call of each thread does, and 16 that have called it"):
        compiled(*batch(0))
    assert len(compiled._graphs.mets) == 1


def test_what_other_threads_do_beside_a_trace() -> None:
    """They may call new modules, step optimizers and set seeds."""
    model = enn.convert(perceptron()).per_sample()

    def train_other(_: int) -> None:
        torch.manual_seed(0)
        other = perceptron()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        F.cross_entropy(other(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        return loss, in_threads(train_other, 1)

    for number in range(2):
        model.zero_grad()
        assert step(*batch(number))[1] == [None]


MODEL = enn.convert(perceptron().double()).per_sample()


@enn.compile(backend="eager")
def decorated(x: Tensor, y: Tensor) -> Any:
    """A step of this module."""
    MODEL.zero_grad()
    return trained(MODEL, x, y)


class Trainer:
    """Holds its step, and has one in its class."""

    def __init__(self) -> None:
        self.model = enn.convert(perceptron()).per_sample()
        self.step = enn.compile(self.run, backend="eager")

    def run(self, x: Tensor, y: Tensor) -> Any:
        """The step."""
        self.model.zero_grad()
        return trained(self.model, x, y)

    @enn.compile(backend="eager")
    def of_class(self, x: Tensor, y: Tensor) -> Any:
        """Another one."""


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    trainer = Trainer()
    for number in range(3):
        trainer.step(*batch(number))
        decorated(*batch(number))
    assert copied(decorated) is decorated
    assert copied(Trainer.of_class) is Trainer.of_class
    other = copied(trainer)
    assert not graphs(other.step)
    with torch.no_grad():
        trainer.model[0].weight.zero_()
    torch.testing.assert_close([other.step(*batch(i)) for i in range(3)], [other.run(*batch(i)) for i in range(3)])


class Holder:
    """What a step finds its model in."""

    model: nn.Module

    @enn.compile(backend="eager")
    def method(self, x: Tensor, y: Tensor) -> Any:
        """The step as a method."""
        return trained(self.model, x, y)


@pytest.mark.parametrize("given", ["as an argument", "by a name", "by the object of a method"])
def test_a_model_that_is_gone_is_let_go_of(given: str) -> None:
    """Models are trained one after the other, as for a cross-validation: there is a graph for each, and no limit."""
    held, alive, holder = list[Any](), list[int](), Holder()
    by_argument = enn.compile(trained, backend="eager")
    by_name = enn.compile(lambda x, y: trained(holder.model, x, y), backend="eager")
    for fold in range(20):
        holder = Holder() if given == "by the object of a method" else holder
        holder.model = enn.convert(perceptron()).per_sample()
        held.append(weakref.ref(holder.model))
        for number in range(4):
            x, y = batch(number)
            holder.model.zero_grad()
            if given == "as an argument":
                loss, compiled = by_argument(holder.model, x, y), by_argument
            elif given == "by a name":
                loss, compiled = by_name(x, y), by_name
            else:
                loss, compiled = holder.method(x, y), Holder.method
            torch.testing.assert_close(loss, trained(copy.deepcopy(holder.model), x, y))
        assert len(graphs(compiled)) == 1, fold
        if fold % 9 == 8:  # a collection takes half a second among the objects of all tests
            gc.collect()
            alive.append(sum(model() is not None for model in held))
    assert max(alive) <= 2, alive


def test_models_that_take_turns_keep_their_graphs() -> None:
    """Two of a game, and ones that come back after others."""
    models = [enn.convert(perceptron()).per_sample() for _ in range(3)]
    compiled = enn.compile(trained, backend="eager")
    for turn in range(8):
        for model in models:
            for number in range(1 if turn < 4 else 2):
                model.zero_grad()
                compiled(model, *batch(number))
    made = graphs(compiled)
    assert len(made) == 3
    for model in models:
        model.zero_grad()
        compiled(model, *batch(0))
    assert graphs(compiled) == made


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_loss_that_is_made_at_each_call_takes_no_trace_of_its_own(traced: list[int]) -> None:
    model, kept = enn.convert(perceptron()).per_sample(), list[Any]()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> None:
        kept.append(nn.CrossEntropyLoss())
        kept[-1](model(x), y).backward()

    for number in range(30):
        model.zero_grad()
        step(*batch(number))
    assert len(traced) <= 2


def test_a_new_model_at_each_call_is_said() -> None:
    compiled = enn.compile(trained, backend="eager")
    for number in range(40):
        words = "call after call is of new modules"
        with pytest.warns(enn.PerSampleWarning, match=words) if number == 15 else nullcontext():
            compiled(enn.convert(perceptron()).per_sample(), *batch(number))
    assert len(compiled._graphs.met.modules) < 10


@pytest.mark.filterwarnings("ignore:.*call after call is of another kind")
def test_graphs_stay_where_other_calls_are_of_new_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation, say, whose number is another one each time; but the kinds of the training are few."""
    monkeypatch.setattr(COMPILE, "MOST_KINDS", 10)
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor, number: int) -> Any:
        return trained(model, x, y) + number

    made = []
    for number in range(50):
        for given in (0, number + 1):
            model.zero_grad()
            step(*batch(number), given)
        made.append(graphs(step))
    assert made[-1] == made[1] != []
    assert len(step._graphs.families) <= 10


@pytest.mark.filterwarnings("ignore:.*each size takes a graph of its own")
def test_a_step_that_has_no_graph_is_given_up(traced: list[int]) -> None:
    """Also where it has to look at gradients first, as at zeros that are left in them."""
    model = enn.convert(perceptron()).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        loss = trained(model, x, y)
        if type(x) is not Tensor:
            raise KeyError("only in a trace")
        return loss

    def train() -> None:
        for number in range(12):
            model.zero_grad(set_to_none=False)
            step(*batch(number))

    with pytest.warns(enn.PerSampleWarning, match="KeyError") as warned:
        train()
    assert len(warned) == 1
    assert 0 < len(traced) < 7


class TracerInC:
    """As coverage's: where it is called from Python it takes its place again."""

    def __call__(self, *_: Any) -> Any:
        sys.settrace(self)
        return self


def test_functions_are_seen_beside_a_tracer_in_c() -> None:
    model, settings = enn.convert(perceptron()).per_sample(), SimpleNamespace(scale=1.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * settings.scale

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * settings.scale

    step = enn.compile(lambda x, y: trained(model, x, y, Scaled.apply(x.new_ones(()))), backend="eager")
    former = sys.gettrace()
    sys.settrace(TracerInC())
    try:
        for number in range(6):
            settings.scale = 1.0 + number // 3
            model.zero_grad()
            found = step(*batch(number))
            model.zero_grad()
            torch.testing.assert_close(found, trained(model, *batch(number), settings.scale))
        assert isinstance(sys.gettrace(), TracerInC)
        assert sys.getprofile() is None
    finally:
        sys.settrace(former)
    assert len(graphs(step)) == 2


def test_an_interruption_before_the_trace_begins_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C while torch is imported for it."""
    model = enn.convert(nn.Linear(4, 3)).per_sample()

    @enn.compile(backend="eager")
    def step(x: Tensor) -> None:
        model(x).square().sum().backward()

    def interrupted(name: str) -> Any:
        if name == "torch._dynamo":
            raise KeyboardInterrupt
        return importlib.import_module(name)

    x = torch.randn(5, 4)
    step(x)
    model.zero_grad()
    with monkeypatch.context() as patches:
        patches.setattr(tracing, "import_module", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(x)
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for _ in range(2):
        model.zero_grad()
        step(x)
    assert len(graphs(step)) == 1


def test_parameters_that_are_assigned_again_and_again() -> None:
    """Graphs of those that no module has any more make way for new ones."""
    model = enn.convert(nn.Linear(4, 3)).per_sample()

    def step(x: Tensor) -> Tensor:
        model(x).square().sum().backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    compiled, former = enn.compile(step, backend="eager"), []
    for _ in range(COMPILE.MOST_GRAPHS + 4):
        former.append(weakref.ref(model.weight))
        model.load_state_dict(
            {name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True
        )
        for _ in range(5):
            x = torch.randn(5, 4)
            model.zero_grad()
            norms, grad = compiled(x), model.weight.grad
            model.zero_grad()
            torch.testing.assert_close((norms, grad), (step(x), model.weight.grad))
    assert 0 < len(graphs(compiled)) <= COMPILE.MOST_GRAPHS
    assert any(weight() is None for weight in former)
