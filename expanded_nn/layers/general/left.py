"""What a forward leaves in attributes and buffers, and in dicts among these, as `self.attention = weights`.

What each sample has by itself is a part of what the forward gives: it is collected beside what is returned, compared
like that, and set when the samples are together. What they have only together, as a loss that balances experts, or what
is of parameters alone, is left as the plain forward leaves it, and no loss may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from expanded_nn._errors import complaint
from expanded_nn.common.arrays import bytes_of, has_numbers, is_counter
from expanded_nn.common.batch import may_have_derivatives
from expanded_nn.common.containers import flatten
from expanded_nn.common.modes import has_no_values, version_of
from expanded_nn.common.outside import NOTHING
from expanded_nn.common.own_state import OURS
from expanded_nn.common.rounding import near


class Place(NamedTuple):
    """Where a forward leaves something."""

    path: str  # the name of a module within the one whose forward runs
    table: str  # the attribute of it that holds the dict, as `_buffers`; empty for the attributes themselves
    key: Any

    @property
    def name(self) -> str:
        """What it is called in messages."""
        if self.table == "_buffers":
            return f"the buffer {self.key!r}"
        return f"attribute {self.key!r}" if not self.table else f"attribute {self.table!r}, by the key {self.key!r}"

    def dict_in(self, owners: Mapping[str, nn.Module]) -> dict[Any, Any]:
        """The dict that it is in; an empty one where the module or the dict is no longer there."""
        attributes = owners[self.path].__dict__ if self.path in owners else {}
        held = attributes.get(self.table) if self.table else attributes
        return held if isinstance(held, dict) else {}


# attributes that a forward does not write, or that are looked at one by one
NOT_ITS_OWN = {*OURS, "_buffers", *(name for name in vars(nn.Module()) if name.startswith("_"))}


class Given(NamedTuple):
    """What a forward has given."""

    returned: Any
    left: dict[Place, Any]  # what it has left in attributes


def with_left(module: nn.Module, places: Sequence[Place], forward: Callable[[], Any]) -> Any:
    """What a forward gives, with what it has left in these places, where the attributes are as before then."""
    if not places:
        return forward()
    owners = dict(module.named_modules())
    dicts = [place.dict_in(owners) for place in places]
    before = [held.get(place.key, NOTHING) for held, place in zip(dicts, places, strict=True)]
    left: dict[Place, Any] = {}
    try:
        returned = forward()
    finally:  # a checkpoint that computes again ends it early
        for held, place, value in zip(dicts, places, before, strict=True):
            if held.get(place.key, value) is value:
                continue
            left[place] = held[place.key]
            if value is NOTHING:
                del held[place.key]
            else:
                held[place.key] = value
    return Given(returned, left)


def put_in_place(module: nn.Module, given: Any) -> Any:
    """What the forward returns; what it leaves is set."""
    if type(given) is not Given:
        return given
    owners = dict(module.named_modules())
    for place, value in given.left.items():
        place.dict_in(owners)[place.key] = value
    return given.returned


class _OfNoSample(torch.autograd.Function):
    """A value without a derivative: no sample has a part of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, where: str, name: str) -> Tensor:
        ctx.said = where, name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        where, name = ctx.said
        raise complaint(
            where,
            f"a loss uses what its forward has left in {name}, of which no sample has a part of its own",
            "a loss of what each sample has by itself",
            "Compute it for each sample, as the mean over its own positions; or leave it out, or take its value alone, "
            "by detach(). For a parameter use expanded_nn.expanded(parameter) in the loss, by view(-1, 1, ...) with as "
            "many dimensions as what it meets there.",
        )


def close(module: Any, places: Sequence[Place]) -> None:
    """Lets no loss use what a forward has left in these places."""
    owners = dict(module.named_modules()) if places else {}
    for place in places:
        held = place.dict_in(owners)
        if place.key in held:
            leaves, structure = flatten(held[place.key])
            kind = type(owners[place.path]).__name__
            where = f"{place.path} ({kind})" if place.path else kind
            held[place.key] = tree_unflatten([_closed(leaf, where, place.name) for leaf in leaves], structure)


def _closed(leaf: Any, where: str, name: str) -> Any:
    if not (isinstance(leaf, Tensor) and leaf.requires_grad) or type(leaf.grad_fn).__name__ == "_OfNoSampleBackward":
        return leaf
    return _OfNoSample.apply(leaf.detach().requires_grad_(), where, name)  # type: ignore[no-untyped-call]


# the numbers and tensors of attributes, by their places
Numbers = dict[Place, list[Any]]


class Before:
    """The attributes of a module and of those within it, before its forward."""

    def __init__(self, module: nn.Module) -> None:
        # the path and the table of a `Place`, the dict there, and a copy of it from before
        self.dicts: list[tuple[str, str, dict[Any, Any], dict[Any, Any]]] = []
        for path, owner in module.named_modules():
            attributes = owner.__dict__
            self.dicts.append((path, "", attributes, {**attributes}))
            own = ((name, value) for name, value in attributes.items() if name not in NOT_ITS_OWN or name == "_buffers")
            self.dicts += [(path, name, value, {**value}) for name, value in own if isinstance(value, dict)]
        # kept, so that no other tensor gets the id of one of these
        self.kept = {place: _numbers_in(value) for place, value, _ in self._now()}
        self.states = {place: _states(numbers) for place, numbers in self.kept.items()}

    def _now(self) -> Iterator[tuple[Place, Any, Any]]:
        """Each place in which there is something now, with that and with what was there before."""
        for path, table, now, before in self.dicts:
            for key, value in now.items():
                if table or key not in NOT_ITS_OWN:
                    yield Place(path, table, key), value, before.get(key, NOTHING)

    def numbers(self) -> Numbers:
        """The numbers and tensors that the forward has changed, as a counter of samples, and those beside them."""
        found = ((place, _numbers_in(value)) for place, value, _ in self._now())
        return {place: numbers for place, numbers in found if _states(numbers) != self.states.get(place)}

    def places(self) -> list[Place]:
        """Where the forward has left tensors."""
        return [place for place, now, before in self._now() if now is not before and _holds_tensors_alone(now)]


def are_same_numbers(numbers: Numbers, others: Numbers) -> bool:
    """Whether two forwards have left the same."""
    for place in {*numbers, *others}:
        left, other = numbers.get(place, []), others.get(place, [])
        if len(left) != len(other) or not all(map(_same, left, other)):
            return False
    return True


def _same(number: Any, other: Any) -> bool:
    if has_numbers(number):
        return type(number) is type(other) and bytes_of(number) == bytes_of(other)
    if not (isinstance(number, Tensor) and isinstance(other, Tensor)):
        return type(number) is type(other) and bool(number == other or number != number)
    if number.shape != other.shape or number.dtype != other.dtype:
        return False
    return near(number, other) if may_have_derivatives(number) else torch.equal(number, other)


def _numbers_in(value: Any) -> list[Any]:
    return list(filter(_is_number, tree_leaves(value)))


def _states(numbers: list[Any]) -> list[tuple[Any, int]]:
    """What tells whether numbers are others later: tensors by what they are, and how often they were changed."""
    return list(map(_state, numbers))


def _state(number: Any) -> tuple[Any, int]:
    if isinstance(number, Tensor):
        return id(number), version_of(number)
    return bytes_of(number) if has_numbers(number) else number, 0


def _is_number(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, bool | int | float | complex) or is_counter(value)
    return not value.requires_grad and value.layout is torch.strided and not (value.is_nested or has_no_values(value))


def _holds_tensors_alone(value: Any) -> bool:
    leaves, _ = flatten(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
