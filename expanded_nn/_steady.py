"""Running a forward again under the same conditions: without chance, and without leaving traces."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

OURS = {"_parameters", "_modules", "_recorder", "_settings", "_compared", "_ways", "_ranks", "_shared_seen", "_learned"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class RandomStates:
    """The states of all generators that a forward may draw from: torch's, Python's, numpy's, and its own.

    Args:
        holders: Modules and arguments, whose own `torch.Generator`s count as well.
    """

    def __init__(self, holders: Any) -> None:
        held = [value for module in holders if isinstance(module, nn.Module) for value in vars(module).values()]
        leaves = tree_leaves([holders, held])
        self.generators = list({id(leaf): leaf for leaf in leaves if _is_generator(leaf)}.values())
        self.before = self._now()

    def _now(self) -> list[Any]:
        states: list[Any] = [torch.get_rng_state(), random.getstate()]
        numpy = sys.modules.get("numpy")
        states.append(None if numpy is None else numpy.random.get_state())
        states += torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return states + [_state_of(generator) for generator in self.generators]

    def restore(self) -> bool:
        """Puts them back; whether anything was drawn since."""
        if all(_same(before, now) for before, now in zip(self.before, self._now(), strict=True)):
            return False
        torch.set_rng_state(self.before[0])
        random.setstate(self.before[1])
        if self.before[2] is not None:
            sys.modules["numpy"].random.set_state(self.before[2])
        rest = self.before[3:]
        if len(rest) > len(self.generators):
            torch.cuda.set_rng_state_all(rest[: len(rest) - len(self.generators)])
        for generator, state in zip(self.generators, rest[len(rest) - len(self.generators) :], strict=True):
            _set_state(generator, state)
        return True


def _is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers: torch's, Python's or numpy's."""
    return isinstance(value, torch.Generator | random.Random) or hasattr(value, "bit_generator")


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return repr(left) == repr(right)  # of numpy's state the position, which a draw moves


class Start:
    """What a forward may change, as it is before it: random states, attributes and buffers, its arguments.

    Args:
        module: The module that is called.
        arguments: What it is called with.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self.random = RandomStates([*module.modules(), arguments])
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self.seen: set[int] = set()
        for each in module.modules():
            self._keep({key: value for key, value in vars(each).items() if key not in OURS}, vars(each))
        self._keep(arguments, inside=True)

    def _keep(self, value: Any, container: Any = None, *, inside: bool = False) -> None:
        """Keeps in mind what is in a value, and with `inside` in the attributes of the objects in it."""
        kept = value if container is None else container
        if id(kept) in self.seen:
            return
        self.seen.add(id(kept))
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self.tensors.append((value, value._version, None if value.requires_grad else value.clone()))
        elif isinstance(value, MutableMapping):
            self.containers.append((kept, dict(value)))
            for item in value.values():
                self._keep(item, inside=inside)
        elif isinstance(value, list | set | deque | tuple):
            self.containers += [] if isinstance(value, tuple) else [(value, list(value))]
            for item in value:
                self._keep(item, inside=inside)
        elif inside and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | FunctionType):
            self._keep(vars(value), inside=True)

    def restored(self) -> bool:
        """Puts all of it back; whether that can be."""
        self.random.restore()
        for container, before in self.containers:
            if isinstance(container, MutableMapping):
                for key in [key for key in container if key not in before and key not in OURS]:
                    del container[key]
                container.update(before)
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)
        changed = [(tensor, before) for tensor, version, before in self.tensors if tensor._version != version]
        with torch.no_grad():
            for tensor, before in changed:
                if before is not None:
                    tensor.copy_(before)
        return all(before is not None for _, before in changed)


@contextmanager
def without_traces(module: nn.Module, *, hooks: bool = True) -> Iterator[None]:
    """What a forward leaves behind in the attributes and buffers of a module, and of those within, goes.

    Args:
        module: The module.
        hooks: Whether the forward hooks of the modules within it are called.
    """
    before = [(each, dict(vars(each))) for each in module.modules()]
    try:
        for each, attributes in before:
            vars(each).update({key: _copied(value) for key, value in attributes.items() if key not in OURS})
            if not hooks and each is not module:
                vars(each).update({key: OrderedDict() for key in _HOOKS})
        yield
    finally:
        for each, attributes in before:
            learned = {key: vars(each)[key] for key in ("_compared", "_ways") if key in vars(each)}
            vars(each).clear()
            vars(each).update(attributes, **learned)


def copies(arguments: Any) -> Any:
    """The arguments again, for a forward that may change them."""
    return tree_map(_copied_argument, arguments)


def _copied_argument(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if not hasattr(leaf, "__dict__") or isinstance(leaf, nn.Module | type | FunctionType | MutableMapping):
        return _copied(leaf)
    try:  # an object of the user's, as a cache, with all that is in it
        return copy.deepcopy(leaf)
    except Exception:  # of something in it that cannot be copied
        return leaf


def _copied(value: Any) -> Any:
    """Containers and the tensors in them anew, all else as it is."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) or value.requires_grad else value.clone()
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = _copied(item)
        return mapping
    if type(value) in (list, set, deque):
        return type(value)(map(_copied, value))
    if type(value) is tuple:
        return tuple(map(_copied, value))
    return value


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off, as its masks for a sample alone and in a batch differ.

    Attributes:
        met: Whether there was any.
    """

    met = False

    def turn_off(self, model: nn.Module) -> None:
        """Turns off what modules hold; a function mode reaches only what is called as a function."""
        for module in model.modules():
            name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention):
                self.met |= module.training and getattr(module, name) > 0
                setattr(module, name, 0.0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            given.update(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            self.met |= bool(given.get("dropout_p"))
            return func(**{**given, "dropout_p": 0.0})
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **given)
            bound.apply_defaults()
            given = bound.arguments
            self.met |= bool(given["training"] and given.get("p", given.get("dropout_p")))
            given["training"] = False
            return func(*bound.args, **bound.kwargs)
        return func(*args, **given)


class WithoutChance(WithoutDropout):
    """Puts one fixed number in the place of what is drawn, so that a batch and its samples alone get the same.

    Attributes:
        has_drawn: Whether anything was.
    """

    has_drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = super().__torch_function__(func, types, args, kwargs)
        fixed = _FIXED.get(getattr(func, "__name__", ""))
        if fixed is None or not isinstance(drawn, Tensor):
            return drawn
        self.has_drawn = True
        return fixed(drawn, args)


def _filled(value: float) -> Callable[[Tensor, Any], Tensor]:
    return lambda drawn, args: drawn.fill_(value)


_FIXED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_", "randn", "randn_like", "normal_", "normal"), _filled(0.5)),
    **dict.fromkeys(("exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli", "bernoulli_"), _filled(1.0)),
    **dict.fromkeys(("multinomial", "random_", "randint_like"), _filled(0)),
    "randint": lambda drawn, args: drawn.fill_(0 if isinstance(args[1], tuple | list) else args[0]),
    "randperm": lambda drawn, args: drawn.copy_(torch.arange(len(drawn)).roll(1)),  # the samples' own would hide mixing
}
_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
}
