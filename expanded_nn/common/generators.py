"""Random numbers that are drawn again: the states of all generators that a forward may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from expanded_nn.common.own_state import attributes_of

Source = tuple[Callable[[], Any], Callable[[Any], Any]]


class RandomStates:
    """The states of all generators that a forward may draw from: torch's, Python's, numpy's, and its own.

    As a context it sets them back at the end.

    Args:
        holders: Modules and arguments, among which generators are looked for.
    """

    sources: list[Source]  # of each generator, what gets its state and what sets it

    def __init__(self, holders: Any = ()) -> None:
        held = attributes_of(holder for holder in holders if isinstance(holder, nn.Module))
        generators = {id(leaf): leaf for leaf in tree_leaves([holders, held]) if is_generator(leaf)}
        self.sources = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
        numpy = sys.modules.get("numpy")
        self.has_numpy = numpy is not None
        if numpy is not None:
            self.sources.append((numpy.random.get_state, numpy.random.set_state))
        for device in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
            get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
            self.sources.append((partial(get_state, device), partial(set_state, device=device)))
        self.sources += map(_source_of, generators.values())
        self.before = [get_state() for get_state, _ in self.sources]

    def __enter__(self) -> RandomStates:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def has_drawn_elsewhere(self) -> bool:
        """Whether anything was drawn from Python's or numpy's generators."""
        others = list(zip(self.before, self.sources, strict=True))[1 : 2 + self.has_numpy]
        return not all(_same(before, get_state()) for before, (get_state, _) in others)

    def restore(self) -> bool:
        """Sets the states to those from the beginning; whether anything was drawn since."""
        if all(_same(before, get_state()) for before, (get_state, _) in zip(self.before, self.sources, strict=True)):
            return False
        for before, (_, set_state) in zip(self.before, self.sources, strict=True):
            set_state(before)
        return True


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers: torch's, Python's or numpy's, of the new kind or the old one.

    The one that draws from the system has no state, and is none.
    """
    if isinstance(value, random.SystemRandom):
        return False
    return isinstance(value, torch.Generator | random.Random) or hasattr(type(value), "_bit_generator")


def _source_of(generator: Any) -> Source:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    bits = getattr(generator, "bit_generator", None)  # of numpy's new kind
    if bits is None:
        return generator.get_state, generator.set_state
    return lambda: bits.state, partial(setattr, bits, "state")


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, after)
    if hasattr(before, "tobytes"):
        return bool(before.tobytes() == after.tobytes())
    try:
        return bool(before == after)
    except ValueError:  # there are numpy's arrays in it
        pairs = ((before[key], after[key]) for key in (before if isinstance(before, dict) else range(len(before))))
        return all(_same(*pair) for pair in pairs)
