"""`enn.compile`: the numbers that a step finds by names, in whatever holds them, are those of the call."""

import collections
import gc
import importlib
import itertools
import json
import operator
import os
import sys
import time
import warnings
import weakref
from array import array
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, partialmethod, singledispatch
from operator import itemgetter as pick
from os import getenv as of_environment
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import expanded_nn as enn
from cases import EVEN_SAME
from expanded_nn import _errors
from expanded_nn.common.bytecode import computes_names, unread_arguments
from expanded_nn.compile import NEW_KINDS
from some import some_of
from test_compiled_step import assert_same, classified, graphs, perceptron, samples, small

pytestmark = pytest.mark.filterwarnings(EVEN_SAME)
has = hasattr


def assert_same_results(
    model: nn.Module, compiled: Callable[..., Any], step: Callable[..., Any], *args: Tensor
) -> None:
    """Of the compiled step and the eager one, each without gradients from before."""
    results = []
    for run in (compiled, step):
        model.zero_grad()
        results.append(run(*args))
    assert_same(*results)


def test_what_the_step_finds_by_its_names() -> None:
    """A number of a function around it, and a tensor that is another one now."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]
    equal = torch.ones(3)
    limit, weights = 1.0, equal

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y, weights).backward()
        enn.clip_grad_sample_norms_(model, limit)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    compiled = enn.compile(step, backend="eager")
    for limit, weights in ((1.0, equal), (0.1, equal), (0.1, torch.tensor([1.0, 2.0, 3.0]))):  # noqa: B007
        for _ in range(3):
            model.zero_grad()
            left = compiled(x, y)
            model.zero_grad()
            torch.testing.assert_close(left, step(x, y))
    assert len(graphs(compiled)) == 3


LIMIT = 1.0


class Limits:
    """Settings of a step, of the class and of an object."""

    of_class = 1.0

    def __init__(self) -> None:
        self.limit, self.steps = 1.0, 0


def limit_of_module(model: nn.Module) -> float:
    del model
    return LIMIT


class Trainer:
    """Has the step as a method, and its limit in several places."""

    def __init__(self, model: nn.Module, limit: Callable[[Any], float]) -> None:
        self.model, self.limit = model, limit
        self.settings, self.by_name, self.steps = Limits(), {"limit": 1.0, "steps": 0}, [0]
        self.nested = {"all": [self.settings]}

    def clip(self, limit: float = 1.0) -> Tensor:
        return enn.clip_grad_sample_norms_(self.model, limit * self.limit(self))  # type: ignore[return-value]

    def step(self, x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(self.model(x), y).backward()
        return self.clip(), [parameter.grad for parameter in self.model.parameters()]


def halve_global(trainer: Trainer) -> None:
    del trainer
    globals()["LIMIT"] *= 0.1


def halve_class(trainer: Trainer) -> None:
    del trainer
    Limits.of_class *= 0.1


def halve_limit(owner: Any) -> None:
    owner.limit *= 0.1


def halve_defaults(trainer: Trainer) -> None:
    del trainer
    (limit,) = Trainer.clip.__defaults__ or (1.0,)
    Trainer.clip.__defaults__ = (0.1 * limit,)


def halve_attribute(trainer: Trainer) -> None:
    trainer.settings.limit *= 0.1


def halve_item(trainer: Trainer) -> None:
    trainer.by_name["limit"] *= 0.1


KEPT: dict[str, tuple[Callable[[Any], float], Callable[[Trainer], None]]] = {
    "global_of_a_function": (limit_of_module, halve_global),
    "class": (lambda trainer: Limits.of_class, halve_class),
    "default": (lambda trainer: 1.0, halve_defaults),
    "object": (lambda trainer: trainer.settings.limit, halve_attribute),
    "nested": (lambda trainer: trainer.nested["all"][0].limit, halve_attribute),
    "dict": (lambda trainer: trainer.by_name["limit"], halve_item),
}


@pytest.mark.parametrize(("limit", "halve"), KEPT.values(), ids=KEPT)
def test_numbers_that_are_kept_elsewhere(limit: Any, halve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count where the step, or a function that it calls, names them; others may change at each call."""
    monkeypatch.setitem(globals(), "LIMIT", 1.0)
    monkeypatch.setattr(Limits, "of_class", 1.0)
    monkeypatch.setattr(Trainer.clip, "__defaults__", (1.0,))
    trainer, (x, y) = Trainer(enn.convert(small()).per_sample(), limit), samples(4)[0]
    compiled = enn.compile(trainer.step, backend="eager")
    for number in range(6):
        if number == 3:
            halve(trainer)
        trainer.settings.steps = trainer.by_name["steps"] = number
        results = []
        for step in (compiled, trainer.step):
            trainer.model.zero_grad()
            results.append(step(x, y))
        assert_same(*results)
    assert len(graphs(compiled)) == 2


class OfProperty:
    """Has its number behind a property, and behind methods that Python calls without their names."""

    def __init__(self) -> None:
        self._kept = [1.0]

    @property
    def limit(self) -> float:
        return self._kept[0]

    def __call__(self) -> float:
        return self._kept[0]

    def __getitem__(self, index: int) -> float:
        return self._kept[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self._kept)

    def __getattr__(self, name: str) -> float:
        if name == "limits":
            return self._kept[0]
        raise AttributeError(name)

    @staticmethod
    def of_global() -> float:
        return LIMIT

    @classmethod
    def of_class(cls) -> float:
        return cls.of_global()


@dataclass(slots=True)
class InSlots:
    limit: float = 1.0


class Pair(NamedTuple):
    name: str
    kept: dict[str, float]


class OfClass:
    limit = 1.0


def weighing() -> OfClass:
    term = OfClass()
    term.own = 1.0  # type: ignore[attr-defined]
    return term


def scale(values: Any, place: Any) -> None:
    values[place] = 0.1 * values[place]


def scale_kept(held: OfProperty) -> None:
    scale(held._kept, 0)


def scale_set(held: set[float]) -> None:
    held.add(0.1 * held.pop())


class Chain:
    """Objects in objects."""

    def __init__(self, depth: int) -> None:
        self.limit, self.next = 1.0, Chain(depth - 1) if depth else None


class WithNumber:
    of_descriptor = 1.0

    def __get__(self, held: Any, cls: Any) -> float:
        return self.of_descriptor


def itself(self: Any, x: Any = None) -> Any:
    return self if x is None else x


def times_scale(self: Any, x: Tensor) -> Tensor:
    return self.scale * x


def calling_gate(self: Any, x: Tensor) -> Tensor:
    return self.gate(x)


def kept_number(cls: Any) -> float:
    return cls.kept


def scale_key(held: Any) -> None:
    scale(held, KEY)


def fourth(chain: Any) -> Any:
    return chain.next.next.next.next


def made_by_keywords(end: float) -> float:
    return end


@torch.no_grad()
def below_a_decorator(held: Any) -> float:
    return float(held.below_a_decorator)


@contextmanager
def in_a_context(held: Any) -> Iterator[float]:
    yield held.within_a_context


def entered(held: Any) -> float:
    with in_a_context(held) as limit:
        return limit


class Kept:
    """Gives what the object keeps under a name of its own."""

    def __get__(self, instance: Any, owner_class: Any) -> float:
        return float(instance._behind_a_descriptor)


class OfDescriptor:
    limit = Kept()

    def __init__(self) -> None:
        self._behind_a_descriptor = 1.0


class Schedule:
    """Gives a number by a method of its own."""

    def __init__(self) -> None:
        self._epochs = 0

    def step(self) -> None:
        self._epochs += 1

    def value(self, *args: Any) -> float:
        del args
        return 1 / (1 + self._epochs)


FIRST, IN_CONTEXT, REFERENT = operator.itemgetter(0), ContextVar("IN_CONTEXT", default=1.0), Limits()
KEY, ATTRIBUTE = "the key", "li" + "mit"
SOFTSIGN = F.softsign


def module_with(**constants: Any) -> ModuleType:
    module = ModuleType("constants_of_a_test")
    vars(module).update(constants)
    return module


class PlainWithMethod(nn.Module):
    """Is not called, but for a method of its own."""

    def limit(self) -> float:
        return LIMIT


class TimesLimit(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * LIMIT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Made:
    def __init__(self) -> None:
        self.limit = LIMIT


class MadeAnew:
    limit: float

    def __new__(cls) -> Any:
        made = super().__new__(cls)
        made.limit = LIMIT
        return made


class Scales:
    limit: float

    def __setattr__(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value * LIMIT)


class Shows:
    def __repr__(self) -> str:
        return str(LIMIT)


@dataclass
class WithFactory:
    limit: float = field(default_factory=lambda: LIMIT)


@dataclass
class Point:
    above: float = 1.0
    beside: float = 1.0


class WithGetter:
    limit = property(operator.attrgetter("_kept"))

    def __init__(self) -> None:
        self._kept = 1.0


class Inverse(torch.distributions.Transform):
    """Only a distribution's own code calls its methods."""

    domain = codomain = torch.distributions.constraints.real
    bijective = True

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.inv  # of which torch 2.10 keeps a weak reference, and makes it anew where it is gone

    def _inverse(self, y: Tensor) -> Tensor:
        return y * LIMIT

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        del y
        return torch.zeros_like(x)


def scaled_once() -> float:
    scales = Scales()
    scales.limit = 1.0
    return scales.limit


def matched_by_name(held: Point) -> float:
    match held:
        case Point(beside=limit):
            return limit
    return 0.0


def matched_by_place(held: Point) -> float:
    match held:
        case Point(_, limit):
            return limit
    return 0.0


def log_density(held: Any) -> Tensor:
    normal = torch.distributions.Normal(torch.zeros(1), torch.ones(1), validate_args=False)
    density = torch.distributions.TransformedDistribution(normal, [held], validate_args=False)
    return density.log_prob(torch.ones(1)).abs().sum()


def in_a_registry(name: str) -> dict[str, Any]:
    """The namespace of a module of a library, which calls what users register."""
    namespace: dict[str, Any] = {"REGISTRY": {name: lambda: LIMIT}, "__name__": "torch.of_a_test"}
    code = "def call(name):\n    return REGISTRY[name]()"
    exec(compile(code, os.path.join(torch.__path__[0], "of_a_test.py"), "exec"), namespace)
    return namespace


def registered_module() -> ModuleType:
    module = sys.modules["constants_of_a_test"] = module_with(limit=1.0)
    return module


GET, GET_ITEM, CALL = operator.attrgetter("_kept"), operator.itemgetter("kept"), operator.methodcaller("value")


def with_a_constant() -> list[Any]:
    """A tuple whose class has a constant, and which no variable of the step's functions names."""

    class Bounds(NamedTuple):
        name: str

    Bounds.limit = 1.0  # type: ignore[attr-defined]
    return [Bounds("")]


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "property": (OfProperty, lambda held: held.limit, scale_kept),
    "call": (OfProperty, lambda held: held(), scale_kept),
    "getitem": (OfProperty, lambda held: held[0], scale_kept),
    "iter": (OfProperty, lambda held: next(iter(held)), scale_kept),
    "getattr": (OfProperty, lambda held: held.limits, scale_kept),
    "static_method": (OfProperty, lambda held: held.of_global(), halve_global),
    "class_method": (OfProperty, lambda held: held.of_class(), halve_global),
    "class_attribute": (OfClass, lambda held: held.limit, lambda held: setattr(OfClass, "limit", 0.1)),
    "constant_of_a_tuple": (
        with_a_constant,
        lambda held: held[0].limit,
        lambda held: setattr(type(held[0]), "limit", 0.1),
    ),
    "slots": (InSlots, lambda held: held.limit, halve_limit),
    "any_attribute": (Limits, lambda held: getattr(held, ATTRIBUTE), halve_limit),
    "deep": (lambda: Chain(5), lambda held: fourth(held).limit, lambda held: halve_limit(fourth(held))),
    "named_tuple": (lambda: Pair("", {KEY: 1.0}), lambda held: held.kept[KEY], lambda held: scale_key(held.kept)),
    "deque": (lambda: deque([1.0]), lambda held: held[0], lambda held: scale(held, 0)),
    "set": (lambda: {1.0}, max, scale_set),
    "array": (lambda: np.ones(2), lambda held: float(held[1]), lambda held: scale(held, 1)),
    "computed_key": (lambda: {KEY: 1.0}, lambda held: held[KEY], scale_key),
    "values": (lambda: {KEY: 1.0}, lambda held: sum(held.values()), scale_key),
    "keywords": (lambda: {"end": 1.0}, lambda held: made_by_keywords(**held), lambda held: scale(held, "end")),
    "user_dict": (lambda: UserDict({KEY: 1.0}), lambda held: held[KEY], scale_key),
    "partial": (
        lambda: partial(operator.getitem, {KEY: 1.0}, KEY),
        lambda held: held(),
        lambda held: scale_key(held.args[0]),
    ),
    "keyword_of_a_partial": (
        lambda: partial(made_by_keywords, end=1.0),
        lambda held: held(),
        lambda held: scale(held.keywords, "end"),
    ),
    "object_of_an_object": (
        lambda: SimpleNamespace(inner=Schedule()),
        lambda held: held.inner.value(),
        lambda held: held.inner.step(),
    ),
    "object_of_a_list": (
        lambda: {KEY: [Schedule()]},
        lambda held: max(each.value() for each in held[KEY]),
        lambda held: held[KEY][0].step(),
    ),
    "bound_method": (lambda: Schedule().value, lambda held: held(), lambda held: held.__self__.step()),
    "replaced_method": (
        lambda: type("Own", (), {"value": lambda self: 1.0})(),
        lambda held: held.value(),
        lambda held: setattr(type(held), "value", lambda self: 0.1),
    ),
    "descriptor": (
        OfDescriptor,
        lambda held: held.limit,
        lambda held: setattr(held, "_behind_a_descriptor", 0.1),
    ),
    "decorator": (
        lambda: SimpleNamespace(below_a_decorator=1.0),
        below_a_decorator,
        lambda held: setattr(held, "below_a_decorator", 0.1),
    ),
    "context_manager": (
        lambda: SimpleNamespace(within_a_context=1.0),
        entered,
        lambda held: setattr(held, "within_a_context", 0.1),
    ),
    "context_variable": (lambda: IN_CONTEXT.set(1.0), lambda held: IN_CONTEXT.get(), lambda held: IN_CONTEXT.set(0.1)),
    "weak_reference": (
        lambda: vars(REFERENT).update(limit=1.0) or weakref.ref(REFERENT),
        lambda held: held().limit,
        lambda held: setattr(held(), "limit", 0.1),
    ),
    "mapping_proxy": (
        lambda: MappingProxyType({KEY: [1.0]}),
        lambda held: held[KEY][0],
        lambda held: scale(held[KEY], 0),
    ),
    "number_as_a_key": (
        lambda: {"limit": 1.0, 1: 1.0},
        lambda held: held["limit"] * held[1],
        lambda held: scale(held, 1),
    ),
    "size_of_a_dict": (
        lambda: {"limit": 1.0},
        lambda held: held["limit"] / len(held),
        lambda held: held.update(unnamed=0),
    ),
    "function_of_c": (lambda: [1.0], lambda held: FIRST(held), lambda held: scale(held, 0)),
    "slot_filled_later": (
        lambda: InSlots.__new__(InSlots),
        lambda held: getattr(held, "limit", 1.0),
        lambda held: setattr(held, "limit", 0.1),
    ),
    "array_of_python": (lambda: array("d", [1.0]), lambda held: held[0], lambda held: scale(held, 0)),
    "bytes": (
        lambda: bytearray([10]),
        lambda held: held[0] / 10,
        lambda held: operator.setitem(held, 0, 1),
    ),
    "long_list": (
        lambda: [1.0] * 9000,
        lambda held: held[5000],
        lambda held: scale(held, 5000),
    ),
    "longer_list": (
        lambda: [1.0] * 12_000,
        lambda held: held[5000],
        lambda held: scale(held, 5000),
    ),
    "longer_dict": (
        lambda: dict.fromkeys(range(12_000), 1.0),
        lambda held: held[5000],
        lambda held: scale(held, 5000),
    ),
    "global_of_a_computed_name": (
        lambda: None,
        lambda held: globals()["".join(("LIM", "IT"))],
        lambda held: globals().update(LIMIT=0.1),
    ),
    "module_of_a_computed_name": (
        lambda: module_with(limit=1.0),
        lambda held: getattr(held, "".join(("lim", "it"))),
        lambda held: setattr(held, "limit", 0.1),
    ),
    "constant_of_a_library": (
        lambda: setattr(torch.nn.functional, "LIMIT", 1.0),
        lambda held: F.LIMIT,  # type: ignore[attr-defined]
        lambda held: setattr(torch.nn.functional, "LIMIT", 0.1),
    ),
    "function_of_a_library": (
        lambda: setattr(torch.nn.functional, "softsign", SOFTSIGN),
        lambda held: torch.nn.functional.softsign(torch.ones(1)),
        lambda held: setattr(torch.nn.functional, "softsign", torch.sigmoid),
    ),
    "method_of_tensors": (
        lambda: None,
        lambda held: torch.ones(1).rsqrt(),
        lambda held: setattr(Tensor, "rsqrt", lambda self: 0.1 * self),
    ),
    "method_of_a_class_of_a_library": (
        lambda: None,
        lambda held: torch.distributions.Normal(0.0, 1.0).cdf(torch.ones(1)),
        lambda held: setattr(torch.distributions.Normal, "cdf", lambda self, value: 0.1 * value),
    ),
    "length_of_a_long_list": (
        lambda: [1.0] * 12_000,
        lambda held: 1e4 / len(held),
        lambda held: held.extend(held * 10),
    ),
    "long_dict": (
        lambda: dict.fromkeys(range(9000), 1.0),
        lambda held: held[5000],
        lambda held: scale(held, 5000),
    ),
    "metaclass": (
        lambda: type("Meta", (type,), {"limit": 1.0})("Own", (), {}),
        lambda held: held.limit,
        lambda held: setattr(type(held), "limit", 0.1),
    ),
    "attribute_of_a_function": (
        lambda: lambda: None,
        lambda held: getattr(held, "limit", 1.0),
        lambda held: setattr(held, "limit", 0.1),
    ),
    "code_of_a_function": (
        lambda: lambda: 1.0,
        lambda held: held(),
        lambda held: setattr(held, "__code__", (lambda: LIMIT / 10).__code__),
    ),
    "attribute_of_a_tensor": (
        lambda: torch.ones(1),
        lambda held: getattr(held, "limit", 1.0),
        lambda held: setattr(held, "limit", 0.1),
    ),
    "module_that_is_not_called": (nn.Dropout, lambda held: 2 * held.p, lambda held: setattr(held, "p", 0.1)),
    "mode_of_a_module": (nn.Dropout, lambda held: 1.0 if held.training else 0.1, lambda held: held.eval()),
    "module_within_one_that_is_not_called": (
        lambda: nn.Sequential(nn.Dropout()),
        lambda held: 2 * held[0].p,
        lambda held: setattr(held[0], "p", 0.1),
    ),
    "method_of_a_module": (
        lambda: type("Own", (nn.Module,), {"forward": calling_gate, "gate": lambda self, x: x})(),
        lambda held: held(torch.ones(1)),
        lambda held: setattr(type(held), "gate", lambda self, x: 0.1 * x),
    ),
    "method_of_no_name": (
        lambda: type("Own", (), {"__call__": lambda self: 1.0})(),
        lambda held: held(),
        lambda held: setattr(type(held), "__call__", lambda self: 0.1),
    ),
    "method_of_a_computed_name": (
        lambda: type("Own", (), {"limit_of_class": lambda self: LIMIT})(),
        lambda held: getattr(held, "_".join(("limit", "of", "class")))(),
        lambda held: setattr(type(held), "limit_of_class", lambda self: 0.1),
    ),
    "constant_of_a_computed_name": (
        lambda: type("Own", (), {"limit_of_class": 1.0})(),
        lambda held: getattr(held, "_".join(("limit", "of", "class"))),
        lambda held: setattr(type(held), "limit_of_class", 0.1),
    ),
    "constant_of_a_module": (
        lambda: type("Own", (type("Base", (nn.Module,), {"scale": 1.0}),), {"forward": times_scale})(),
        lambda held: held(torch.ones(1)),
        lambda held: setattr(type(held), "scale", 0.1),
    ),
    "property_itself": (
        lambda: type("Own", (), {"limit": property(lambda self: 1.0)})(),
        lambda held: held.limit,
        lambda held: setattr(type(held), "limit", property(lambda self: 0.1)),
    ),
    "partial_method": (
        lambda: type("Own", (), {"limit": partialmethod(itself, 1.0)})(),
        lambda held: held.limit(),
        lambda held: setattr(type(held), "limit", partialmethod(itself, 0.1)),
    ),
    "number_of_a_descriptor": (
        lambda: type("Own", (), {"limit": WithNumber()})(),
        lambda held: held.limit,
        lambda held: setattr(vars(type(held))["limit"], "of_descriptor", 0.1),
    ),
    "property_of_a_metaclass": (
        lambda: type("Meta", (type,), {"limit": property(kept_number), "kept": 1.0})("Own", (), {}),
        lambda held: held.limit,
        lambda held: setattr(type(held), "kept", 0.1),
    ),
    "class_of_an_object": (
        lambda: OfProperty(),
        lambda held: held.limit,
        lambda held: setattr(held, "__class__", type("Own", (OfProperty,), {"limit": 0.1})),
    ),
    "class_of_a_module": (
        lambda: nn.ReLU(),
        lambda held: held(torch.ones(1)),
        lambda held: setattr(held, "__class__", nn.Sigmoid),
    ),
    "function_of_several_kinds": (
        lambda: singledispatch(itself),
        lambda held: held(torch.ones(1)).sum(),
        lambda held: held.register(Tensor, lambda x: 0.1 * x),
    ),
    "environment": (
        lambda: os.environ.update(LIMIT="1.0"),
        lambda held: float(os.environ["LIMIT"]),
        lambda held: os.environ.update(LIMIT="0.1"),
    ),
    "method_of_a_module_that_is_not_called": (PlainWithMethod, lambda held: held.limit(), halve_global),
    "autograd_function": (
        lambda: None,
        lambda held: TimesLimit.apply(torch.ones(1)).sum(),  # type: ignore[no-untyped-call]
        halve_global,
    ),
    "init": (lambda: None, lambda held: Made().limit, halve_global),
    "new": (lambda: None, lambda held: MadeAnew().limit, halve_global),
    "setattr": (lambda: None, lambda held: scaled_once(), halve_global),
    "repr": (Shows, lambda held: float(repr(held)), halve_global),
    "default_factory": (lambda: None, lambda held: WithFactory().limit, halve_global),
    "match_by_name": (Point, matched_by_name, lambda held: setattr(held, "beside", 0.1)),
    "match_by_place": (Point, matched_by_place, lambda held: setattr(held, "beside", 0.1)),
    "property_that_gets_an_attribute": (WithGetter, lambda held: held.limit, lambda held: setattr(held, "_kept", 0.1)),
    "getter_of_an_attribute": (WithGetter, lambda held: GET(held), lambda held: setattr(held, "_kept", 0.1)),
    "getter_of_an_item": (
        lambda: {"kept": 1.0, "named": 1.0},
        lambda held: GET_ITEM(held) * held["named"],
        lambda held: scale(held, "kept"),
    ),
    "caller_of_a_method": (Schedule, lambda held: CALL(held), lambda held: held.step()),
    "method_that_only_a_library_calls": (Inverse, log_density, halve_global),
    "function_in_a_registry": (lambda: in_a_registry("mine"), lambda held: held["call"]("mine"), halve_global),
    "another_function_in_a_registry": (
        lambda: in_a_registry("mine"),
        lambda held: held["call"]("mine"),
        lambda held: held["REGISTRY"].update(mine=lambda: 0.1),
    ),
    "object_of_a_long_list": (
        lambda: [SimpleNamespace(limit=1.0) for _ in range(3000)],
        lambda held: held[2500].limit,
        lambda held: setattr(held[2500], "limit", 0.1),
    ),
    "computed_keys_of_a_function": (
        lambda: {KEY: 1.0, "named": 1.0},
        lambda held: sum(map(held.__getitem__, [KEY])) * held["named"],
        scale_key,
    ),
    "text_that_is_code": (lambda: None, lambda held: eval("LIMIT"), halve_global),
    "module_by_its_name": (
        registered_module,
        lambda held: importlib.import_module("constants_of_a_test").limit,
        lambda held: setattr(held, "limit", 0.1),
    ),
    "module_in_the_table": (
        registered_module,
        lambda held: sys.modules["constants_of_a_test"].limit,
        lambda held: setattr(held, "limit", 0.1),
    ),
    "environment_by_another_name": (
        lambda: os.environ.update(LIMIT="1.0"),
        lambda held: float(of_environment("LIMIT", "0")),
        lambda held: os.environ.update(LIMIT="0.1"),
    ),
    "count_of_all": (
        lambda: collections.Counter(named=1, other=1),
        lambda held: held["named"] / held.total(),
        lambda held: held.update(other=9),
    ),
    "text_of_all": (
        lambda: {"named": 1.0, "other": 1.0},
        lambda held: held["named"] / len(json.dumps(held)),
        lambda held: held.update(other=10000),
    ),
    "method_of_an_array": (
        lambda: np.ones(1).item,
        lambda held: held(),
        lambda held: held.__self__.fill(0.1),
    ),
    "leaves_of_a_tree": (
        lambda: {"named": 1.0, "other": 1.0},
        lambda held: held["named"] * sum(tree_leaves(held)),
        lambda held: held.update(other=0.1),
    ),
    "getter_under_another_name": (
        lambda: {"named": 1.0, KEY: 1.0},
        lambda held: held["named"] * pick(KEY)(held),
        scale_key,
    ),
    "attribute_that_was_not_there": (
        lambda: SimpleNamespace(limit=1.0),
        lambda held: held.limit / (2 if has(held, KEY) else 1),
        lambda held: setattr(held, KEY, None),
    ),
    "one_of_some_attributes_that_was_not_there": (
        lambda: SimpleNamespace(limit=1.0),
        lambda held: held.limit / (2 if any(hasattr(held, name) for name in ("third", "half")) else 1),
        lambda held: setattr(held, "half", None),
    ),
    "object_as_a_key": (
        lambda: {weighing(): 1.0},
        lambda held: sum(key.own for key in held),
        lambda held: setattr(next(iter(held)), "own", 0.1),
    ),
    "optimizer": (
        lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0),
        lambda held: held.param_groups[0]["lr"],
        lambda held: scale(held.param_groups[0], "lr"),
    ),
}


@pytest.mark.parametrize(("make", "read", "change"), some_of(HELD, every=3))
def test_numbers_that_are_found_in_other_ways(
    make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LIMIT", 1.0)
    monkeypatch.setattr(OfClass, "limit", 1.0)
    monkeypatch.setenv("LIMIT", "1.0")
    monkeypatch.setitem(sys.modules, "constants_of_a_test", ModuleType("constants_of_a_test"))
    monkeypatch.setattr(F, "softsign", SOFTSIGN)
    monkeypatch.setattr(F, "LIMIT", 1.0, raising=False)
    monkeypatch.setattr(Tensor, "rsqrt", Tensor.rsqrt)
    monkeypatch.setattr(torch.distributions.Normal, "cdf", torch.distributions.Normal.cdf)
    model, held, (x, y) = enn.convert(small()).per_sample(), make(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, read(held)), [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    for number in range(4):
        if number == 3:
            assert compiled._graphs.last is not None
            model.zero_grad()
            assert compiled._graphs.last.seen.holds()
            change(held)
            assert not compiled._graphs.last.seen.holds()
        assert_same_results(model, compiled, step, x, y)
    assert len(compiled._graphs.families) == 2
    assert len(graphs(compiled)) == 1


@pytest.mark.parametrize("name", ["method_that_only_a_library_calls", "function_in_a_registry"])
def test_functions_that_no_name_leads_to_in_a_frozen_heap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.freeze` hides from `gc` who refers to their code."""
    monkeypatch.setitem(globals(), "LIMIT", 1.0)
    make, read, change = HELD[name]
    model, held, (x, y) = enn.convert(small()).per_sample(), make(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, read(held)), [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    gc.freeze()
    try:
        for number in range(8):
            if number == 5:
                change(held)
            assert_same_results(model, compiled, step, x, y)
    finally:
        gc.unfreeze()
    assert len(graphs(compiled)) == 2


def test_a_variable_that_a_trace_makes_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager step that follows at once finds what it would find without a trace."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> bool:
        global MADE_BY_THE_STEP
        is_there = "MADE_BY_THE_STEP" in globals()
        MADE_BY_THE_STEP = 1
        F.cross_entropy(model(x), y).backward()
        return is_there

    compiled = enn.compile(step, backend="eager")
    for _ in range(3):
        monkeypatch.delitem(globals(), "MADE_BY_THE_STEP", raising=False)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", enn.PerSampleWarning)  # it runs eagerly, as it sets a variable
            assert not compiled(x, y)


def test_an_array_that_is_returned() -> None:
    """Of what nothing tells that it changes: a graph would return that of the trace at each call."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        return np.array([time.perf_counter()])

    compiled, results = enn.compile(step, backend="eager"), []
    with pytest.warns(enn.PerSampleWarning, match="runs eagerly, as its graph leaves another returned value"):
        results += [compiled(x, y) for _ in range(4)]
    assert len({float(result[0]) for result in results}) == 4


class Decorated:
    """Has a compiled method, which gets the object as an argument."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.limit, self.settings, self.calls = model, 1.0, InSlots(), 0

    def clipped(self) -> Any:
        return enn.clip_grad_sample_norms_(self.model, self.limit * self.settings.limit)

    def plain(self, x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(self.model(x), y).backward()
        return self.clipped(), [parameter.grad for parameter in self.model.parameters()]

    step = enn.compile(plain, backend="eager")


@pytest.mark.parametrize("place", ["limit", "settings"])
def test_a_method_that_is_compiled_in_its_class(place: str) -> None:
    """Numbers of its object count where it names them; a count of calls does not."""
    trainer, (x, y) = Decorated(enn.convert(small()).per_sample()), samples(4)[0]
    for number in range(6):
        trainer.calls += 1
        if number == 3:
            halve_limit(trainer if place == "limit" else trainer.settings)
        results = []
        for run in (trainer.step, trainer.plain):
            trainer.model.zero_grad()
            results.append(run(x, y))
        assert_same(*results)
    assert len(graphs(Decorated.step)) == 2


@pytest.mark.parametrize(
    ("held", "read"),
    [
        ({"own": 1.0}.values(), sum),
        (memoryview(bytearray(b"\1")), lambda held: held[0]),
        (np.array([{"own": 1.0}], dtype=object), lambda held: held[0]["own"]),
    ],
)
def test_what_shows_others_runs_eagerly(held: Any, read: Callable[[Any], float]) -> None:
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]
    step = enn.compile(lambda x, y: classified(model, x * read(held), y), backend="eager")
    with pytest.warns(enn.PerSampleWarning, match=f"it refers to a {type(held).__name__}, in which a change"):
        step(x, y)
    model.zero_grad()
    step(x, y)
    assert graphs(step) == []


def test_an_iterator_runs_eagerly() -> None:
    """It gives something else at each call."""
    model, batches = enn.convert(small()).per_sample(), iter(samples(4) * 3)
    step = enn.compile(lambda: classified(model, *next(batches)), backend="eager")
    with pytest.warns(enn.PerSampleWarning, match="it refers to an iterator, a list_iterator, .*next item before"):
        norms = [(model.zero_grad(), step()[1])[1] for _ in range(3)]
    for (x, y), found in zip(samples(4) * 3, norms, strict=False):
        model.zero_grad()
        torch.testing.assert_close(found, classified(model, x, y)[1])


def test_a_large_array_runs_eagerly() -> None:
    model, (x, y), limits = enn.convert(small()).per_sample(), samples(4)[0], np.ones(100_001)

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, float(limits[7])), [p.grad for p in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    with pytest.warns(enn.PerSampleWarning, match="it refers to an array of 100001 numbers, .*make it a tensor"):
        assert_same_results(model, compiled, step, x, y)
    for limit in (1.0, 1.0, 0.1):
        limits[7] = limit
        assert_same_results(model, compiled, step, x, y)


def test_an_iterator_that_the_step_makes() -> None:
    model, held = enn.convert(small()).per_sample(), Limits()

    def step(x: Tensor, y: Tensor) -> Any:
        held.limit = held.limit if isinstance(held.limit, Iterator) else itertools.repeat(1.0)  # type: ignore[assignment]
        return classified(model, x, y)[1]

    compiled, (x, y) = enn.compile(step, backend="eager"), samples(4)[0]
    for number in range(3):
        words = "it refers to an iterator, a repeat"
        with pytest.warns(enn.PerSampleWarning, match=words) if number == 1 else nullcontext():
            model.zero_grad()
            norms = compiled(x, y)
        model.zero_grad()
        torch.testing.assert_close(norms, classified(model, x, y)[1])


def test_what_makes_each_call_another_kind_is_named() -> None:
    trainer, (x, y) = Decorated(enn.convert(small()).per_sample()), samples(4)[0]
    step = enn.compile(trainer.plain, backend="eager")

    def call_with_other_limits() -> None:
        for number in range(NEW_KINDS + 1):
            trainer.limit = 1.0 + number
            trainer.model.zero_grad()
            step(x, y)

    with pytest.warns(enn.PerSampleWarning, match="another kind, as 'limit' of a Decorated changes"):
        call_with_other_limits()


def scaled_by(schedule: Schedule, x: Tensor) -> Tensor:
    return x * schedule.value()


class Scaled(nn.Module):
    """Has numbers in a list, in a dict and in objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales, self.by_name, self.config = nn.Linear(8, 3), [1.0, 1.0], {"scale": 1.0}, Limits()
        self.schedule, self.schedules = Schedule(), {"all": [Schedule()]}
        self.function = partial(scaled_by, Schedule())

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * self.scales[1] * self.by_name["scale"] * self.config.limit
        scaled = scaled * self.schedule.value() * self.schedules["all"][0].value()
        return self.function(scaled)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.scales.__setitem__(1, 3.0),
        lambda model: model.by_name.update(scale=3.0),
        lambda model: setattr(model.config, "limit", 3.0),
        lambda model: model.schedule.step(),
        lambda model: model.schedules["all"][0].step(),
        lambda model: model.function.args[0].step(),
    ],
    ids=["list", "dict", "object", "method", "method_in_a_list", "partial"],
)
def test_numbers_that_a_module_keeps(change: Callable[[Any], Any]) -> None:
    model, (x, y) = enn.convert(Scaled()).per_sample(), samples(4)[0]
    compiled = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for number in range(6):
        if number == 3:
            change(model)
        results = []
        for step in (compiled, lambda x, y: classified(model, x, y)):
            model.zero_grad()
            results.append(step(x, y))
        assert_same(*results)
    assert len(graphs(compiled)) == 2


@pytest.mark.parametrize("of_parameter", [False, True], ids=["module", "parameter"])
@pytest.mark.parametrize("kind", ["method", "object", "partial"])
def test_numbers_that_a_hook_keeps(kind: str, of_parameter: bool) -> None:
    model, (x, y), schedule = enn.convert(small()).per_sample(), samples(4)[0], Schedule()

    class Hook:
        def __init__(self) -> None:
            self.inner = schedule

        def __call__(self, *args: Any) -> Tensor:
            return args[-1] * self.inner.value()  # type: ignore[no-any-return]

    hook = {"method": Hook().__call__, "object": Hook(), "partial": partial(scaled_by, schedule)}[kind]
    if of_parameter:
        model[0].weight.register_hook(hook)
    else:
        last_only = partial(lambda hook, module, args, result: hook(result), hook)
        model[0].register_forward_hook(last_only if kind == "partial" else hook)
    compiled = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    for number in range(6):
        if number == 3:
            schedule.step()
        results = []
        for step in (compiled, lambda x, y: classified(model, x, y)):
            model.zero_grad()
            results.append((step(x, y), model[0].weight.grad))
        assert_same(*results)
    assert len(graphs(compiled)) == 2


@pytest.mark.parametrize("runs", ["callback", "finalizer"])
def test_code_that_runs_as_garbage_is_collected(runs: str, request: pytest.FixtureRequest) -> None:
    """It is not the step's, whenever it happens to run: what it counts may differ from call to call."""
    model, (x, y), seen = enn.convert(small()).per_sample(), samples(4)[0], Schedule()

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            seen.step()

    def note(phase: str, info: Any) -> None:
        seen.step()

    def step(x: Tensor, y: Tensor) -> Tensor:
        gc.collect(0)
        return classified(model, x, y)

    if runs == "callback":
        gc.callbacks.append(note)
        request.addfinalizer(partial(gc.callbacks.remove, note))
    compiled = enn.compile(step, backend="eager")
    for _ in range(4):
        results = []
        for call in (compiled, step):
            model.zero_grad()
            if runs == "finalizer":
                Finalized()
            results.append((call(x, y), model[0].weight.grad))
        assert_same(*results)
    assert seen._epochs > 1
    assert len(graphs(compiled)) == 1


def test_a_forward_that_is_replaced_in_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = enn.convert(Scaled()).per_sample(), samples(4)[0]
    compiled = enn.compile(lambda x, y: classified(model, x, y), backend="eager")
    losses = []
    for number in range(6):
        if number == 3:
            monkeypatch.setattr(Scaled, "forward", lambda self, x: 3 * self.layer(x))
        model.zero_grad()
        losses.append(compiled(x, y)[0])
    assert losses[2] != losses[3] == losses[5]


def test_a_module_that_the_step_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModuleType("settings_of_a_test")
    settings.own_limit = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def limit() -> float:
        from settings_of_a_test import own_limit  # type: ignore[import-not-found]  # noqa: PLC0415

        return own_limit  # type: ignore[no-any-return]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, limit()), [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    for number in range(6):
        if number == 3:
            settings.own_limit = 0.1  # type: ignore[attr-defined]
        assert_same_results(model, compiled, step, x, y)
    assert len(graphs(compiled)) == 2


def add_to_variable() -> Callable[[], int]:
    calls = 0

    def add() -> int:
        nonlocal calls
        calls += 1
        return calls

    return add


class Counter:
    """Counts in an attribute."""

    calls = 0

    def add(self) -> int:
        self.calls += 1
        return self.calls


class CountsInClass:
    """Counts in an attribute of the class."""

    calls = 0

    def add(self) -> int:
        CountsInClass.calls += 1
        return self.calls


def add_to_item(calls: Any, place: Any) -> Callable[[], int]:
    def add() -> int:
        calls[place] += 1
        return int(calls[place])

    return add


def add_to_list() -> Callable[[], int]:
    log: list[str] = []

    def add() -> int:
        log.append("a step")
        return len(log)

    return add


COUNTERS: dict[str, Callable[[], Callable[[], int]]] = {
    "variable": add_to_variable,
    "attribute": lambda: Counter().add,
    "item of a dict": lambda: add_to_item({"calls": 0}, "calls"),
    "attribute of a class": lambda: CountsInClass().add,
    "item of a list": lambda: add_to_item([0], 0),
    "number of an array": lambda: add_to_item(np.zeros(1), 0),
    "list": add_to_list,
}


@pytest.mark.parametrize("in_hook", [False, True], ids=["step", "hook"])
@pytest.mark.parametrize("counter", COUNTERS)
def test_what_the_step_counts_goes_on(counter: str, in_hook: bool) -> None:
    """The comparison with the eager step finds it at the second call."""
    model, (x, y), add = enn.convert(small()).per_sample(), samples(4)[0], COUNTERS[counter]()
    CountsInClass.calls = 0

    def step(x: Tensor, y: Tensor) -> None:
        if not in_hook:
            add()
        classified(model, x, y)

    def hook(_: Tensor) -> None:
        add()

    if in_hook:
        model[0].weight.register_post_accumulate_grad_hook(hook)

    compiled = enn.compile(step, backend="eager")
    for call in range(5):
        model.zero_grad()
        expected = pytest.warns(enn.PerSampleWarning, match="runs eagerly.*change it after the call")
        with expected if call == 1 else nullcontext():
            compiled(x, y)
    assert add() == 6
    assert not graphs(compiled)


class Trains:
    """A method that is compiled in its class; the object keeps what it returns, and reads settings by `getattr`."""

    def __init__(self) -> None:
        self.model, self.options, self.losses = enn.convert(small()).per_sample(), SimpleNamespace(), list[Tensor]()

    def plain(self, batch: tuple[Tensor, Tensor], batch_idx: int, epoch: int = 0) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach(), enn.clip_grad_sample_norms_(self.model, getattr(self.options, "limit", 1.0))

    step = enn.compile(plain, backend="eager")


@pytest.mark.filterwarnings("error::expanded_nn.PerSampleWarning")
def test_a_trainer_that_keeps_losses_and_counts_batches() -> None:
    """Arguments that the step does not read make no other kind of call, and what it does not name is not looked at."""
    trainer, batches = Trains(), samples(*[4] * (NEW_KINDS + 4))
    for number, batch in enumerate(batches):
        if number == 3:
            trainer.options.limit = 0.1
        results = []
        for run in (trainer.step, trainer.plain):
            trainer.model.zero_grad()
            results.append(run(batch, number, epoch=number // 2))
        assert_same(*results)
        trainer.losses.append(results[0][0])
    assert len(graphs(Trains.step)) == 2


def reads_later(x: Tensor, number: int) -> Any:
    return [number for _ in x], lambda: number


def reads_all(x: Tensor, number: int) -> Any:
    return locals()["number"]


@pytest.mark.parametrize("reads", [reads_later, reads_all])
def test_an_argument_that_is_read_in_another_way(reads: Callable[..., Any]) -> None:
    assert not unread_arguments(reads.__code__) & {"number"}


CONSTANT: list[Callable[..., Any]] = [
    lambda x: getattr(x, "limit", 1.0),
    lambda x: x.options.inner.limit,
    lambda x: hasattr(x, "limit") and getattr(x, "limit", None),
    lambda x: [getattr(item, "limit", x.default) for item in x],
]
COMPUTED: list[Callable[..., Any]] = [
    lambda x, name: getattr(x, name),
    lambda x, name: getattr(x, "li" + name),
    lambda x, name: getattr(x, f"li{name}", 1.0),
    lambda x, name: getattr(x, "limit" if name else "other"),
    lambda x, names: map(getattr, x, names),
    lambda x, *name: getattr(x, *name),
    lambda x, names: [hasattr(x, name) for name in names],
    lambda x, name: getattr(x.limit, name),
    lambda x, name: getattr(x, name).limit,
    lambda x: (get := getattr, get(x, "limit")),
]


@pytest.mark.parametrize("reads", CONSTANT)
def test_attributes_by_constant_names(reads: Callable[..., Any]) -> None:
    assert not computes_names(reads.__code__)


@pytest.mark.parametrize("reads", COMPUTED)
def test_attributes_by_computed_names(reads: Callable[..., Any]) -> None:
    assert computes_names(reads.__code__)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_argument_that_makes_each_call_another_kind_is_named(by_name: bool) -> None:
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    @enn.compile(backend="eager")
    def step(x: Tensor, weight: float) -> None:
        (weight * F.cross_entropy(model(x), y)).backward()

    def calls() -> None:
        for number in range(NEW_KINDS + 1):
            model.zero_grad()
            step(x, **{"weight": 1.0 + number}) if by_name else step(x, 1.0 + number)

    with pytest.warns(enn.PerSampleWarning, match="call after call is of another kind, as its argument weight changes"):
        calls()


class Batch:
    """An object that holds tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_batches_in_objects_run_eagerly() -> None:
    """The next call may find other tensors in the same object, or the same in another one; none is held."""
    model = enn.convert(small()).per_sample()
    compiled = enn.compile(lambda batch: classified(model, batch.x, batch.y), backend="eager")
    batch, held = Batch(*samples(4)[0]), []
    for number in range(4):
        batch.x = torch.randn(4, 8)
        held.append(weakref.ref(batch.x))
        model.zero_grad()
        with pytest.warns(enn.PerSampleWarning, match="a Batch that holds tensors") if not number else nullcontext():
            _, norms = compiled(batch)
        model.zero_grad()
        torch.testing.assert_close(norms, classified(model, batch.x, batch.y)[1])
    model.zero_grad()
    del batch
    assert [ref() for ref in held] == [None] * 4


class Fitted:
    """A model and its optimizer, with a step that is a method."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model, self.limit = enn.convert(small()).per_sample(), 1.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def eager(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Any:
        optimizer = optimizer or self.optimizer
        F.cross_entropy(self.model(x), y).backward()
        norms = enn.clip_grad_sample_norms_(self.model, self.limit * optimizer.param_groups[0]["lr"])
        state = optimizer.state.get(self.model[0].weight, {})
        return norms, [moments.sum() for moments in state.values()]

    step = enn.compile(eager, backend="eager")


@pytest.mark.parametrize("given", [False, True], ids=["of_self", "argument"])
def test_a_method_of_what_holds_an_optimizer(given: bool) -> None:
    compiled, eager = Fitted(), Fitted()
    for number, (x, y) in enumerate(samples(*[4] * 9)):
        if number == 6:
            compiled.limit = eager.limit = 0.5
        results = []
        for fitted, step in ((compiled, compiled.step), (eager, eager.eager)):
            result = step(x, y, fitted.optimizer) if given else step(x, y)
            fitted.optimizer.step()
            results.append((result, fitted.model[0].weight.grad.clone(), fitted.model[0].weight.detach().clone()))
            fitted.optimizer.zero_grad()
        assert_same(*results)
    assert len(graphs(Fitted.step)) == 2


class WithAnyName:
    """Has no dict of attributes, and gives something for its name."""

    __slots__ = ("limit",)

    def __init__(self) -> None:
        self.limit = 1.0

    def __getattr__(self, name: str) -> Any:
        return None


def test_an_object_that_has_any_name_but_no_dict() -> None:
    model, held, (x, y) = enn.convert(small()).per_sample(), WithAnyName(), samples(4)[0]

    def step() -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, held.limit), model[0].weight.grad

    compiled = enn.compile(step, backend="eager")
    for number in range(6):
        held.limit = 1.0 if number < 4 else 0.1
        model.zero_grad()
        found = compiled()
        model.zero_grad()
        torch.testing.assert_close(found, step())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_an_argument_that_has_any_name_but_no_dict(compiles: bool, own: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(3)) if own else 1.0

        def forward(self, x: Tensor, held: WithAnyName) -> Tensor:
            return self.layer(x) * self.scale * held.limit  # type: ignore[no-any-return]

    plain, held, (x, y) = Scaled(), WithAnyName(), samples(4)[0]
    model = enn.convert(plain).per_sample()

    def step(x: Tensor, y: Tensor, held: WithAnyName) -> None:
        F.cross_entropy(model(x, held), y).backward()

    called = enn.compile(step, backend="eager") if compiles else step
    for number in range(6):
        held.limit = 1.0 if number < 4 else 0.1
        model.zero_grad()
        called(x, y, held)
        (expected,) = torch.autograd.grad(F.cross_entropy(plain(x, held), y), [plain.layer.weight])
        torch.testing.assert_close(model.layer.weight.grad, expected)


def test_what_a_trace_imports_stays_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, (x, y), modules = enn.convert(small()).per_sample(), samples(4)[0], sys.modules

    def step(x: Tensor, y: Tensor) -> None:
        if "torch_xla" in modules or type(x) is not Tensor:
            importlib.import_module("imported_by_a_trace")  # as torch does
        F.cross_entropy(model(x), y).backward()

    (tmp_path / "imported_by_a_trace.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    compiled = enn.compile(step, backend="eager")
    for _ in range(4):
        compiled(x, y)
        model.zero_grad()
    assert sys.modules.pop("imported_by_a_trace").__file__ == str(tmp_path / "imported_by_a_trace.py")


def test_tensors_that_are_found_by_names_run_eagerly() -> None:
    """A key holds each, so they are let go of after a while."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]
    found: dict[str, Any] = {}

    def step() -> Any:
        return classified(model, found["x"], y)

    compiled, held = enn.compile(step, backend="eager"), []
    for number in range(70):
        found["x"] = torch.randn_like(x)
        held.append(weakref.ref(found["x"]))
        model.zero_grad()
        words = "call after call is of another kind, as 'x' of a dict changes .*an argument of the step"
        with pytest.warns(enn.PerSampleWarning, match=words) if number == NEW_KINDS else nullcontext():
            _, norms = compiled()
        model.zero_grad()
        torch.testing.assert_close(norms, step()[1])
    assert sum(ref() is not None for ref in held) < 10


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("other", [lambda old: old.t(), lambda old: old.float(), lambda old: old[:, :1]])
def test_a_tensor_that_is_found_by_a_name_gets_other_memory(other: Callable[[Tensor], Tensor]) -> None:
    """A compiler's graph would read the new memory as it lay before."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]
    mixing = torch.randn(3, 3)

    def step(x: Tensor, y: Tensor) -> Any:
        scores = model(x) @ mixing.double()
        F.cross_entropy(scores.expand(-1, 3), y).backward()
        return enn.clip_grad_sample_norms_(model, 1.0)

    compiled = enn.compile(step)
    for number in range(6):
        if number == 3:
            mixing.data = other(torch.randn(3, 3))
        assert_same_results(model, compiled, step, x, y)
    assert len(graphs(compiled)) == 2


class Clips:
    """A step that is an object."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.limit = model, 1.0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(self.model(x), y).backward()
        enn.clip_grad_sample_norms_(self.model, self.limit)
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


def test_a_step_that_is_an_object() -> None:
    step, (x, y) = Clips(enn.convert(small()).per_sample()), samples(4)[0]
    compiled = enn.compile(step, backend="eager")
    for limit in (1.0, 0.1):
        step.limit = limit
        for _ in range(3):
            step.model.zero_grad()
            left = compiled(x, y)
            step.model.zero_grad()
            torch.testing.assert_close(left, step(x, y))
    assert len(graphs(compiled)) == 2


class WithLoss(nn.Module):
    """Returns an object with the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=F.cross_entropy(self.out(x), y))


def test_a_global_variable_of_an_attributes_name_is_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step names `loss` as an attribute alone; the global one is set anew at each call."""
    model, (x, y) = enn.convert(WithLoss()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        result = model(x, y)
        result.loss.backward()
        return result.loss.detach()  # type: ignore[no-any-return]

    compiled = enn.compile(step, backend="eager")
    for _ in range(4):
        model.zero_grad()
        monkeypatch.setitem(globals(), "loss", compiled(x, y))
    assert len(graphs(compiled)) == 1
    assert compiled._graphs.last is not None


def test_attributes_in_another_dict_are_seen() -> None:
    model, held, (x, y) = enn.convert(small()).per_sample(), Limits(), samples(4)[0]

    @enn.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        enn.clip_grad_sample_norms_(model, held.limit)

    for _ in range(4):
        model.zero_grad()
        step(x, y)
    held.__dict__ = {"limit": 0.01}  # the one before is not changed
    model.zero_grad()
    step(x, y)
    assert torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm() <= 0.041


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.cross_entropy else result


@pytest.mark.parametrize(
    "surroundings",
    [Doubling, partial(saved_tensors_hooks, lambda x: x, lambda x: 2 * x if x.is_floating_point() else x)],
)
def test_what_changes_operations_around_a_step_runs_eagerly(surroundings: Callable[[], Any]) -> None:
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    for _ in range(3):
        assert_same_results(model, compiled, step, x, y)
    with torch.device("cpu"):  # which is a mode as well
        assert compiled._graphs.last is not None
        assert not compiled._graphs.last.seen.holds()
        assert_same_results(model, compiled, step, x, y)
    with surroundings(), pytest.warns(enn.PerSampleWarning, match="within a mode of torch's"):
        assert_same_results(model, compiled, step, x, y)
    assert_same_results(model, compiled, step, x, y)


def test_anomaly_mode_looks_at_values() -> None:
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    with torch.autograd.set_detect_anomaly(True):
        with pytest.warns(enn.PerSampleWarning, match="set_detect_anomaly is on"):
            assert_same_results(model, compiled, step, x, y)
        for _ in range(2):
            assert_same_results(model, compiled, step, x, y)
    for _ in range(3):
        assert_same_results(model, compiled, step, x, y)
    assert len(graphs(compiled)) == 1


def test_an_object_without_an_error_for_unknown_names() -> None:
    """It raises KeyError for an attribute that it lacks."""
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]
    held = type("Own", (), {"__getattr__": lambda self, name: {"limit": 1.0}[name]})()

    def step(x: Tensor, y: Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        return enn.clip_grad_sample_norms_(model, held.limit)

    compiled = enn.compile(step, backend="eager")
    for _ in range(3):
        assert_same_results(model, compiled, step, x, y)
    assert graphs(compiled)


class ScaledInside(nn.TransformerEncoderLayer):
    """Overrides what only torch's own forward calls."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * LIMIT


def scale_linear(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
    return result * LIMIT if isinstance(module, nn.Linear) else None


class WithScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(8, 3), {KEY: 1.0, "named": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scales["named"]  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8)), ScaledInside(8, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.ReLU())


@pytest.mark.parametrize("kind", ["method", "hook", "item"])
def test_numbers_that_the_model_reads_in_other_ways(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a method that only torch calls, in a hook of all modules; in a dict of the model, by a computed key."""
    monkeypatch.setitem(globals(), "LIMIT", 1.0)
    made = {"method": encoder, "hook": perceptron, "item": WithScales}[kind]()
    model, (x, y) = enn.convert(made).per_sample(), samples(4)[0]

    def step(x: Tensor, y: Tensor) -> Any:
        scale = model.scales["".join(KEY)] if kind == "item" else 1.0
        (scale * F.cross_entropy(model(x), y)).backward()
        return [parameter.grad for parameter in model.parameters()]

    compiled = enn.compile(step, backend="eager")
    hook = nn.modules.module.register_module_forward_hook(scale_linear) if kind == "hook" else nullcontext()
    with hook:
        for number in range(7):
            if number == 4:
                scale_key(model.scales) if kind == "item" else halve_global(None)  # type: ignore[arg-type]
            assert_same_results(model, compiled, step, x, y)
    assert len(graphs(compiled)) == 2


@pytest.mark.parametrize(
    "of_call",
    [
        lambda settings, find: settings["scale"] * settings[0],
        lambda settings, find: settings["scale"] * find(KEY_OF_ITEM),
    ],
    ids=["a key that is a number", "the bound method of a dict"],
)
def test_an_item_beside_a_named_one(of_call: Callable[..., float]) -> None:
    settings: dict[Any, float] = {"scale": 1.0, 0: 1.0, KEY_OF_ITEM: 1.0}
    model, find = enn.convert(small()).per_sample(), settings.get

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        return x.sum() * of_call(settings, find)

    compiled = enn.compile(step, backend="eager")
    for number, (x, y) in enumerate(samples(4, 4, 4, 4, 4)):
        settings[0] = settings[KEY_OF_ITEM] = 1.0 + number // 3
        assert_same_results(model, compiled, step, x, y)
    assert graphs(compiled)


KEY_OF_ITEM = "".join(["li", "mit"])  # no function has it as a constant


def test_a_step_without_arguments() -> None:
    model, (x, y) = enn.convert(small()).per_sample(), samples(4)[0]

    def step() -> Tensor:
        F.cross_entropy(model(x), y).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    compiled = enn.compile(step, backend="eager")
    for _ in range(4):
        x.mul_(1.5)
        assert_same_results(model, compiled, step)
    assert len(graphs(compiled)) == 1


class Lazy:
    """As a module that is imported at first use, or a reference to a class that is not there yet."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not ready")


class WithoutLength(tuple[int, int]):
    """A tuple that has no length, as those of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class HoldsThem(nn.Module):
    tool = Lazy()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pairs = small(), [WithoutLength((1, 2))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.tool is not None else x


def test_objects_that_raise_where_they_are_asked() -> None:
    model = enn.convert(HoldsThem()).per_sample()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    compiled = enn.compile(step, backend="eager")
    for x, y in samples(4, 4):
        assert_same_results(model, compiled, step, x, y)
    assert graphs(compiled)


def test_folders_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of installed packages, as by `pip install --target`; not the one in which the script is."""
    packages, script, own = (tmp_path / name for name in ("packages", "script", "own"))
    for folder in (packages, script):
        (folder / "something-1.0.dist-info").mkdir(parents=True)
    own.mkdir()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script / "train.py"), raising=False)
    monkeypatch.setattr(sys, "path", [str(packages), str(script), str(own), ""])
    assert _errors._folders_of_packages(sys.path) == [f"{packages}{os.sep}"]


class Activations:
    """Has what it calls in its class, behind `staticmethod`."""

    activation = staticmethod(torch.tanh)


class Slope:
    def __init__(self) -> None:
        self.slope = 0.1

    def __call__(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class InClass(nn.Module):
    """A module that the step reads and does not call."""

    temperature: Any = 1.0

    @property
    def doubled(self) -> float:
        return 2.0 * self.temperature


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InClass()


SETTINGS_MODULE, SETTINGS_IN_DICT, SETTINGS_AROUND = InClass(), {"settings": InClass()}, Around()


def set_activation(function: Any) -> Callable[[], None]:
    return lambda: setattr(Activations, "activation", staticmethod(function))


SLOPE, OF_PARTIAL = Slope(), partial(F.leaky_relu, negative_slope=0.1)
STATIC_CHANGES: dict[str, tuple[Any, Callable[[], object]]] = {
    "a builtin function": (torch.tanh, set_activation(torch.sin)),
    "a partial function": (OF_PARTIAL, lambda: OF_PARTIAL.keywords.update(negative_slope=0.7)),
    "an object": (SLOPE, lambda: setattr(SLOPE, "slope", 0.7)),
    "a module": (nn.Tanh(), set_activation(nn.Sigmoid())),
}


@pytest.mark.parametrize("change", STATIC_CHANGES.values(), ids=STATIC_CHANGES)
def test_what_a_class_has_behind_staticmethod(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Activations, "activation", staticmethod(change[0]))
    seen_to_change(lambda loss: Activations.activation(loss), change[1])


READS_OF_CLASS: dict[str, Callable[[Tensor], Tensor]] = {
    "attribute": lambda loss: SETTINGS_MODULE.temperature * loss,
    "property": lambda loss: SETTINGS_MODULE.doubled * loss,
    "in a dict": lambda loss: SETTINGS_IN_DICT["settings"].temperature * loss,
    "of a module within": lambda loss: SETTINGS_AROUND.inner.temperature * loss,
}


@pytest.mark.parametrize("read", READS_OF_CLASS.values(), ids=READS_OF_CLASS)
def test_a_class_attribute_of_a_module_that_is_not_called(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InClass, "temperature", 1.0)
    seen_to_change(read, lambda: setattr(InClass, "temperature", 3.0))


def seen_to_change(of_loss: Callable[[Tensor], Tensor], change: Callable[[], object]) -> None:
    """A compiled step sees a change of what is done with its loss."""
    model = enn.convert(small()).per_sample()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = of_loss(F.cross_entropy(model(x), y) - 2.0)
        loss.backward()
        return loss.detach()

    compiled = enn.compile(step, backend="eager")
    for call in range(7):
        if call == 4:
            assert len(graphs(compiled)) == 1
            change()
        assert_same_results(model, compiled, step, *samples(4)[0])
