"""What a forward leaves in attributes, as `self.attention = weights`.

What each sample has by itself is a part of what the forward gives: it is collected beside what is returned, compared
like that, and set when the samples are together. What they have only together, as a loss that balances experts, or what
is of parameters alone, is left as the plain forward leaves it, and no loss may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from expanded_nn._errors import complaint
from expanded_nn.common.containers import flatten
from expanded_nn.common.outside import NOTHING
from expanded_nn.common.steady import OURS

# the name of a module within the one whose forward runs, and that of an attribute
Place = tuple[str, str]

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
    places = [(path, name) for path, name in places if path in owners]
    before = [owners[path].__dict__.get(name, NOTHING) for path, name in places]
    left: dict[Place, Any] = {}
    try:
        returned = forward()
    finally:  # a checkpoint that computes again ends it early
        for (path, name), value in zip(places, before, strict=True):
            attributes = owners[path].__dict__
            if attributes.get(name, value) is value:
                continue
            left[path, name] = attributes[name]
            if value is NOTHING:
                del attributes[name]
            else:
                attributes[name] = value
    return Given(returned, left)


def put_in_place(module: nn.Module, given: Any) -> Any:
    """What the forward returns; what it leaves is set."""
    if type(given) is not Given:
        return given
    owners = dict(module.named_modules())
    for (path, name), value in given.left.items():
        owners[path].__dict__[name] = value
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
            f"a loss uses what its forward has left in attribute {name!r}, of which no sample has a part of its own",
            "a loss of what each sample has by itself",
            "Leave it out, or take its value alone, by detach(). For a parameter use expanded_nn.expanded(parameter) "
            "in the loss, by view(-1, 1, ...) with as many dimensions as what it meets there.",
        )


def close(module: Any, places: Sequence[Place]) -> None:
    """Lets no loss use what a forward has left in these places."""
    owners = dict(module.named_modules()) if places else {}
    for path, name in places:
        attributes = owners[path].__dict__ if path in owners else {}
        if name in attributes:
            leaves, structure = flatten(attributes[name])
            kind = type(owners[path]).__name__
            where = f"{path} ({kind})" if path else kind
            attributes[name] = tree_unflatten([_closed(leaf, where, name) for leaf in leaves], structure)


def _closed(leaf: Any, where: str, name: str) -> Any:
    if not (isinstance(leaf, Tensor) and leaf.requires_grad) or type(leaf.grad_fn).__name__ == "_OfNoSampleBackward":
        return leaf
    return _OfNoSample.apply(leaf.detach().requires_grad_(), where, name)  # type: ignore[no-untyped-call]


class Before:
    """The attributes of a module and of those within it, before its forward."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = [(path, vars(owner), dict(vars(owner))) for path, owner in module.named_modules()]

    def places(self) -> list[Place]:
        """Where the forward has left tensors."""
        return [
            (path, name)
            for path, now, before in self.attributes
            for name in now.keys() - NOT_ITS_OWN
            if now[name] is not before.get(name, NOTHING) and _holds_tensors_alone(now[name])
        ]


def _holds_tensors_alone(value: Any) -> bool:
    leaves, _ = flatten(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
