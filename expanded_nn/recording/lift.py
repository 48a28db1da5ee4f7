"""Expanded layers inside the general rule: they leave its `vmap` and run on the whole batch at full speed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode, handle_torch_function, has_torch_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from expanded_nn.common.chance import WithoutDropout
from expanded_nn.common.meanwhile import quiet
from expanded_nn.common.modes import function_modes, is_batched, transforms, unseen
from expanded_nn.common.own_state import OURS
from expanded_nn.common.shared import stand_in, stood_for

Slot = tuple[nn.Module, str]
_LISTS = list, tuple, dict


def has_guests(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters that no layer has were replaced by some with a value per sample, as by `functional_call`."""
    with unseen():
        return any(hasattr(type(module), "_guests") and bool(cast(Any, module)._guests()) for module in modules)


def parameters_of(modules: Iterable[nn.Module]) -> dict[Slot, Tensor]:
    """The parameters of some modules, by where they are."""
    held = ((module, name, value) for module in modules for name, value in module._parameters.items())
    return {(module, name): value for module, name, value in held if value is not None}


def is_bias(layer: Any, name: str) -> bool:
    """Whether a parameter is one that a layer of the library adds to what it gives; not in a subclass of the user's."""
    return "bias" in name and type(layer).__module__.startswith("expanded_nn.layers.") and not layer.calls_others


class Lent(NamedTuple):
    """What stands in the place of a parameter while the general rule's `vmap` runs.

    Attributes:
        original: The parameter.
        weight: The tensor in its place, as the `vmap` sees it.
    """

    original: Tensor
    weight: Tensor


class LiftedCall:
    """A layer's call inside `vmap`: the arguments' structure, and then the result's."""

    def __init__(
        self, module: nn.Module, originals: Mapping[Slot, Tensor], structure: TreeSpec, dims: Sequence[int]
    ) -> None:
        self.module, self.originals, self.structure, self.dims = module, originals, structure, dims
        # torch switches a mode off within a function that the mode was told of
        self.modes = [mode for mode in function_modes() if isinstance(mode, WithoutDropout)]
        self.result: tuple[list[Any], TreeSpec] = ([], structure)  # its leaves, whose tensors are of all samples

    def __call__(self, batch: int, in_dims: Sequence[int | None], leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The layer's per-sample forward on the whole batch; the result's tensors, and where their samples stand."""
        where = iter(self.dims)
        whole = []
        for leaf, mapped in zip(leaves, in_dims, strict=True):
            dim = next(where) if isinstance(leaf, Tensor) else None
            whole.append(leaf if dim is None else _of_all_samples(leaf, dim, mapped, batch))
        args, kwargs = tree_unflatten(whole, self.structure)
        with heard_by(self.modes), swapped(self.originals):
            self.result = tree_flatten(self.module.expanded_forward(*args, **kwargs))  # type: ignore[operator]
        outputs = [leaf for leaf in self.result[0] if isinstance(leaf, Tensor)]
        dims = self.module.sample_dims(len(outputs))  # type: ignore[operator]
        return tuple(output.unsqueeze(dim + 1) for output, dim in zip(outputs, dims, strict=True)), tuple(dims)


class OfAllSamples(torch.autograd.Function):
    """An operation of one sample that leaves the `vmap`: `whole` computes it for all samples at once.

    `whole(B, in_dims, leaves)` gives the results, and the dimensions in which their samples stand, as a batching rule
    of torch's does.
    """

    @staticmethod
    def forward(whole: Callable[..., tuple[Any, Any]], *leaves: Any) -> Any:
        raise AssertionError("at least one argument is a batched one")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], whole: Any, *leaves: Any) -> tuple[Any, Any]:
        return whole(info.batch_size, in_dims[1:], leaves)  # type: ignore[no-any-return]


def _of_all_samples(leaf: Tensor, dim: int, mapped: int | None, batch: int) -> Tensor:
    """What the samples have each, or share, as the argument of a call on the whole batch."""
    if mapped is not None:
        return leaf.movedim(mapped, dim).flatten(dim, dim + 1)
    if dim == 0:
        return leaf  # a layer knows one row that all share
    return leaf.expand(*leaf.shape[:dim], batch, *leaf.shape[dim + 1 :])


def _apply(call: LiftedCall, *leaves: Any) -> tuple[Tensor, ...]:
    """The call, as a function of torch's in the eyes of a `TorchFunctionMode`."""
    if has_torch_function(leaves):
        return handle_torch_function(_apply, leaves, call, *leaves)
    return OfAllSamples.apply(call, *leaves)  # type: ignore[no-untyped-call,no-any-return]


def lifted(module: nn.Module, lent: Mapping[Slot, Lent], args: Any, kwargs: Any) -> Any:
    """The layer's result, computed on the whole batch, or `NotImplemented` where that cannot be."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(map(is_batched, tensors)):
        return NotImplemented
    originals = _originals(module, lent)
    if originals is None or transforms() > 1:  # a transform of the user's own, inside
        return NotImplemented
    dims: list[int] = module.sample_dims(len(tensors))  # type: ignore[operator]
    have_sample = [
        # one sample, or a matrix that all samples share, as a mask is
        (x.dim() > 1 and x.shape[dim] == 1) or (x.dim() == 2 and not is_batched(x))
        for x, dim in zip(tensors, dims, strict=True)
    ]
    call = LiftedCall(module, originals, structure, dims)
    if all(have_sample) and tensors[0].dim() >= cast(Any, module).batched_dims:
        seen = _apply(call, *leaves)  # as the `vmap` sees them
        return with_tensors(*call.result, seen)
    if not module.positionwise or any(x.dim() == 0 for x in tensors):
        return NotImplemented
    # (T, features): a sample's positions without its batch dimension
    seen = _apply(call, *(leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    return with_tensors(*call.result, seen).squeeze(0)


def _originals(module: nn.Module, lent: Mapping[Slot, Lent]) -> dict[Slot, Tensor] | None:
    """The layer's parameters; `None` if the forward gives it other weights, as by `functional_call`."""
    originals = {}
    for slot, parameter in parameters_of(module.modules()).items():
        loan = lent.get(slot)
        if loan is None and isinstance(parameter, nn.Parameter) and not is_batched(parameter):
            continue  # of a layer that is given to the module, which has it as it is
        if loan is None or loan.weight is not parameter:
            return None
        originals[slot] = loan.original
    held = (value for member in module.modules() for value in vars(member).values())
    return None if any(isinstance(value, Tensor) and is_batched(value) for value in held) else originals


def with_tensors(leaves: Sequence[Any], structure: TreeSpec, tensors: Sequence[Tensor]) -> Any:
    """The tree of these leaves, with other tensors in the places of theirs."""
    others = iter(tensors)
    return tree_unflatten([next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


@contextmanager
def swapped(weights: Mapping[Slot, Tensor], within: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Other tensors in the parameters' places, and in the plain lists of parameters that modules within have.

    Lists and dicts stay the same ones, as the forward may change them; only the parameters in them are others.
    """
    before = {(module, name): module._parameters[name] for module, name in weights}
    stand_ins = {slot: stand_in(weight, before[slot]) for slot, weight in weights.items()}
    others: dict[int, Any] = {id(before[slot]): weight for slot, weight in stand_ins.items()}
    own: dict[int, Any] = {id(weight): before[slot] for slot, weight in stand_ins.items()}
    lists = [(module, name, held, _exchanged(held, others)) for module, name, held in _lists_of(within, others)]
    try:
        for (module, name), weight in stand_ins.items():
            module._parameters[name] = weight
        for module, name, _, lent in lists:
            vars(module)[name] = lent
        yield
    finally:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter
        for module, name, held, lent in lists:
            _exchanged(held, own)
            if name in vars(module):  # which the forward may have set anew
                now = vars(module)[name]
                vars(module)[name] = held if now is lent else _exchanged(now, own)
        for module in {module for module, _ in before}:  # a forward may have given a parameter a second name
            second = {name: x for name, x in module._parameters.items() if (module, name) not in before}
            module._parameters.update({name: stood_for(x) for name, x in second.items() if stood_for(x) is not x})
            if isinstance(module, nn.RNNBase):  # its plain forward has put them into a list of its own
                module._update_flat_weights()


def _exchanged(held: Any, others: Mapping[int, Any]) -> Any:
    """A list or a dict in which others stand in the places of some items, by their ids; of a tuple a new one."""
    if type(held) is list:
        held[:] = [others.get(id(item), item) for item in held]
    elif type(held) is dict:
        held.update({key: others[id(item)] for key, item in held.items() if id(item) in others})
    elif type(held) is tuple:
        return tuple(others.get(id(item), item) for item in held)
    return held


def _lists_of(modules: Iterable[nn.Module], by_id: Collection[int]) -> Iterator[tuple[nn.Module, str, Any]]:
    """The plain lists, tuples and dicts among the attributes of modules whose first item is one of these parameters."""
    for module in modules:
        for name, value in vars(module).items():
            if type(value) in _LISTS and value and name not in OURS:
                items = value.values() if isinstance(value, dict) else value
                if id(next(iter(items))) in by_id:
                    yield module, name, value


@contextmanager
def heard_by(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Lets modes hear of torch's functions, such as one that fixes random numbers."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def quiet_fallbacks() -> AbstractContextManager[None]:
    """Without the warning that `vmap` loops over the samples for some operation, as nothing can be done about it."""
    return quiet("There is a performance drop because we have not yet implemented")
