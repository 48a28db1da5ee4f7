"""A compiled step that keeps tensors and numbers: a trace leaves nothing where a step finds it, and counts nothing."""

import ctypes
import functools
import multiprocessing
import queue
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from some import slow
from test_compiled_state import batch, compared, trained

HELD, OF_CONTEXT, OF_THREAD = torch.zeros(1), ContextVar[Any]("OF_CONTEXT", default=None), threading.local()


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file of the user's that keeps things, by its name."""
    monkeypatch.setitem(sys.modules, "kept_by_a_test", ModuleType("kept_by_a_test"))
    yield
    vars(HELD).clear()
    vars(OF_THREAD).clear()


def module() -> Any:
    return sys.modules["kept_by_a_test"]


def mask(length: int) -> Tensor:
    return torch.arange(1.0, length + 1.0)


class Masks:
    @functools.lru_cache  # noqa: B019
    def __call__(self, length: int) -> Tensor:
        return mask(length)


def masks() -> Masks:
    vars(Masks)["__call__"].cache_clear()
    return Masks()


def from_a_dict(table: dict[Any, Tensor]) -> Callable[[int], Tensor]:
    def get(length: int) -> Tensor:
        if length not in table:
            table[length] = mask(length)
        return table[length]

    return get


def from_a_module(length: int) -> Tensor:
    own = module()
    if getattr(own, "last", None) is None or len(own.last) != length:
        own.last = mask(length)
    last: Tensor = own.last
    return last


def from_a_tensor(length: int) -> Tensor:
    held: Any = HELD
    if getattr(held, "mask", None) is None or len(held.mask) != length:
        held.mask = mask(length)
    last: Tensor = held.mask
    return last


def from_a_context(length: int) -> Tensor:
    if OF_CONTEXT.get() is None or len(OF_CONTEXT.get()) != length:
        OF_CONTEXT.set(mask(length))
    last: Tensor = OF_CONTEXT.get()
    return last


def from_a_thread(length: int) -> Tensor:
    if not hasattr(OF_THREAD, "mask") or len(OF_THREAD.mask) != length:
        OF_THREAD.mask = mask(length)
    last: Tensor = OF_THREAD.mask
    return last


def attribute_of_the_step(model: Any, length: int) -> Tensor:
    del model
    step = module().step
    if not hasattr(step, "mask") or len(step.mask) != length:
        step.mask = mask(length)
    last: Tensor = step.mask
    return last


def dict_of_the_model(model: Any, length: int) -> Tensor:
    if not hasattr(model, "masks"):
        model.masks = {}
    return from_a_dict(model.masks)(length)


def dict_of_a_layer(model: Any, length: int) -> Tensor:
    return dict_of_the_model(model[0], length)


CACHES: dict[str, Callable[[], Callable[[Any, int], Tensor]]] = {
    "cache": lambda: ignoring_model(functools.lru_cache(mask)),
    "cache_without_a_limit": lambda: ignoring_model(functools.cache(mask)),
    "cache_of_tuples": lambda: ignoring_model(first_of(functools.cache(lambda length: (mask(length), length)))),
    "cache_of_a_method": lambda: ignoring_model(masks()),
}
PLACES: dict[str, Callable[[], Callable[[Any, int], Tensor]]] = {
    **CACHES,
    "dict": lambda: ignoring_model(from_a_dict({})),
    "module": lambda: ignoring_model(from_a_module),
    "attribute_of_a_tensor": lambda: ignoring_model(from_a_tensor),
    "context_variable": lambda: ignoring_model(from_a_context),
    "variable_of_a_thread": lambda: ignoring_model(from_a_thread),
    "attribute_of_the_step": lambda: attribute_of_the_step,
    "dict_of_the_model": lambda: dict_of_the_model,
    "dict_of_a_layer": lambda: dict_of_a_layer,
}


SELDOM = "module", "attribute_of_a_tensor", "variable_of_a_thread", "dict_of_the_model", "dict_of_a_layer"


def ignoring_model(get: Callable[[int], Tensor]) -> Callable[[Any, int], Tensor]:
    return lambda model, length: get(length)


def first_of(get: Callable[[int], Any]) -> Callable[[int], Tensor]:
    return lambda length: get(length)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("place", "gives_gradients"),
    [
        *(slow((place, False)) if place in SELDOM else (place, False) for place in PLACES),
        *(
            pytest.param(place, True, marks=pytest.mark.slow)
            for place in ("cache_of_a_method", "dict_of_the_model", "context_variable")
        ),
    ],
)
def test_a_mask_for_each_length(place: str, gives_gradients: bool) -> None:
    """The trace for a new length finds none, and leaves none without values.

    With a cache of Python's it is put off until an eager call has made one.
    """

    def program(model: nn.Module, wrap: Any) -> Any:
        get = PLACES[place]()

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = (F.cross_entropy(model(x), y, reduction="none") * get(model, int(x.shape[0]))).mean()
            loss.backward()
            return loss.detach()

        compiled = module().step = wrap(step)

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            x, y = batch(number, (4, 4, 5, 5, 6, 7, 5)[number])
            result = compiled(x.requires_grad_(gives_gradients), y)
            for value in (result, *(parameter.grad for parameter in model.parameters())):
                assert not isinstance(value, FakeTensor)
            return result, x.grad

        return call, None

    graphs = 2 if place in CACHES else 0 if place == "context_variable" else 1  # that of the first length
    words = "sets .* to a tensor|a tensor of it is kept|its graph leaves another value of OF_CONTEXT"
    assert compared(program, None if place in CACHES else words) == graphs


class Tracker:
    def __init__(self) -> None:
        self.limit, self.calls, self.mean = 1.0, 0, torch.zeros(())


def test_a_number_of_an_object_that_a_function_makes_once() -> None:
    """As settings are kept behind a function with a cache."""

    def program(model: nn.Module, wrap: Any) -> Any:
        tracker = functools.lru_cache(lambda: Tracker())
        compiled = wrap(lambda x, y: trained(model, x, y, tracker().limit))

        def call(number: int, x: Tensor, y: Tensor) -> Any:
            tracker().limit = 1.0 if number < 4 else 2.0
            return compiled(x, y)

        return call, None

    assert compared(program, None) == 2


def once(
    model: nn.Module, wrap: Any, keep: Callable[[Any, Tensor], Any], held: Any, after: Callable[[Any], Any]
) -> Any:
    """A program whose step keeps its loss, or counts, in what is held."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = trained(model, x, y)
        keep(held, loss)
        return loss

    compiled = wrap(step)
    return lambda number, x, y: compiled(x, y), lambda: after(held)


def add_one(held: Any, loss: Any) -> None:
    held.value += 1


def add_to_item(index: Any) -> Callable[[Any, Any], None]:
    def add(held: Any, loss: Any) -> None:
        held[index] += 1

    return add


def rotate(held: Any, loss: Any) -> None:
    held.move_to_end(next(iter(held)))


def put_last(held: Any, loss: Any) -> None:
    first = next(iter(held))
    held[first] = held.pop(first)


def names_in_order(held: Any) -> list[int]:
    return [*map(ord, held)]


def take_all(held: Any) -> int:
    count = len(held)
    held.clear()
    return count


COUNTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "number_of_a_module": (lambda: vars(module()).update(value=0) or module(), add_one, lambda held: held.value),
    "number_of_several_processes": (lambda: multiprocessing.Value("i", 0), add_one, lambda held: held.value),
    "number_of_c": (lambda: ctypes.c_int(0), add_one, lambda held: held.value),
    "array_of_python": (lambda: array("l", [0]), add_to_item(0), lambda held: held[0]),
    "bytes": (lambda: bytearray(2), add_to_item(1), lambda held: held[1]),
    "long_list": (
        lambda: [SimpleNamespace(value=0)] * 3000,
        lambda held, _: add_one(held[2000], _),
        lambda h: h[0].value,
    ),
    "object_made_once": (
        lambda: functools.lru_cache(lambda: SimpleNamespace(value=0)),
        lambda held, loss: add_one(held(), loss),
        lambda held: held().value,
    ),
    "new_key": (dict, lambda held, loss: held.update(key=1), take_all),
    "order": (lambda: OrderedDict(a=1, b=2, c=3), rotate, names_in_order),
    "order_of_a_dict": (lambda: {"a": 1, "b": 2, "c": 3}, put_last, names_in_order),
    "tensor_of_an_object_made_once": (
        lambda: functools.cache(lambda: Tracker()),
        lambda held, loss: setattr(held(), "mean", held().mean * 0.9 + loss),
        lambda held: held().mean,
    ),
    "tensors_of_a_list_made_once": (
        lambda: functools.cache(lambda: []),
        lambda held, loss: held().append(loss),
        lambda held: torch.stack(held()),
    ),
    "tensors_of_a_queue": (queue.Queue, lambda held, loss: held.put(loss), lambda held: held.qsize()),
}


@pytest.mark.parametrize("place", COUNTS)
def test_what_a_step_keeps_is_kept_once_a_call(place: str) -> None:
    make, keep, after = COUNTS[place]
    words = "its graph leaves another|sets .* to a tensor|a tensor of it is kept outside"
    assert compared(lambda model, wrap: once(model, wrap, keep, make(), after), words) == 0
