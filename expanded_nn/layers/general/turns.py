"""Now and then a sample alone, beside a forward on the whole batch that comparisons have found right.

Values may lead it where its samples meet, as in a clamp by a norm over the batch, though it goes a known way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from expanded_nn.common.modes import running_backward
from expanded_nn.common.rounding import near
from expanded_nn.common.steady import Attributes, RandomStates, copies, without_traces
from expanded_nn.common.traced import is_traced
from expanded_nn.layers.general.mapped import Called, flatten, of_sample
from expanded_nn.layers.general.trial import NO_WAYS, without_hooks
from expanded_nn.recording.recorder import modules_in


def on_whole_batch(module: Any, call: Called) -> Any:
    """The result of `_on_whole_batch`, at some calls only if a sample gives the same alone; else `NotImplemented`."""
    told, every = module._told, module._compares_one_in()
    if call.kind in told.failed:
        return NotImplemented
    if not every or not _is_known(module, call):
        return module._on_whole_batch(call)
    told.turn += 1
    if told.turn % every:
        return module._on_whole_batch(call)
    before, sample = Attributes([*modules_in(module)]), told.turn // every % call.batch
    alone = _hidden(module, _one_alone, call, sample)  # first, as both begin with what the call before has left
    result = module._on_whole_batch(call)
    if result is NotImplemented or alone is None or _agree(module, call, alone, result, sample):
        return result
    if module._learned is None and not _hidden(module, _depends_on_others, call, result, sample):
        return result
    before.put_back()
    told.distrust(call)
    return NotImplemented


def _is_known(module: Any, call: Called) -> bool:
    """Whether the call may go a known way, and a comparison may read values now."""
    if is_traced() or running_backward() >= 0:  # a checkpoint's forward is computed again, as it was
        return False
    return bool(module._told.ways.get(call.kind_of_ways(), NO_WAYS).known)


def _hidden(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of a module; nobody takes notes of what its forward does in it."""
    with module._unnoticed():
        return as_one_operation(module, function, module, *args)


def as_one_operation(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in which nobody looks for samples that take each other's places."""
    order = None if module._recorder is None else module._recorder.order
    return function(*args) if order is None else order.as_one_operation(function, *args)


def _one_alone(module: Any, call: Called, i: int) -> list[Any] | None:
    """What a sample alone gives; `None` where random numbers are drawn, of which nothing can tell."""
    leaves = zip(call.leaves, call.dims, strict=True)
    return _plain(module, call, [x if dim is None else of_sample(x, dim, i, call.batch) for x, dim in leaves])


def _plain(module: Any, call: Called, leaves: list[Any]) -> list[Any] | None:
    """What the plain forward gives for other arguments; `None` where it draws random numbers."""
    args, kwargs = copies(tree_unflatten(leaves, tree_structure((call.args, call.kwargs))))
    states = RandomStates([*module.modules(), args, kwargs])

    def run(hooks: bool) -> Any:
        with torch.no_grad(), without_traces(module, hooks=hooks), module._children_inside({}):
            return module._plain_forward(*args, **kwargs)

    result = flatten(without_hooks(module, states, run))[0]
    return None if states.restore() else result


def _agree(module: Any, call: Called, alone: list[Any], result: Any, i: int) -> bool:
    """Whether a sample alone gives what it gives in the batch."""
    return _are_near(alone, _of_sample(module, call, flatten(result)[0], i))


def _of_sample(module: Any, call: Called, results: list[Any], i: int) -> list[Tensor]:
    dims = module._told.compared[call.kind].dims
    tensors = [x.detach() for x in results if isinstance(x, Tensor)]
    return [of_sample(x, dim, i, call.batch) for x, dim in zip(tensors, dims, strict=True)]


def _are_near(some: list[Any], others: list[Tensor]) -> bool:
    tensors = [x for x in some if isinstance(x, Tensor)]
    return len(tensors) == len(others) and all(near(x, y, 1.0) for x, y in zip(tensors, others, strict=True))


def _depends_on_others(module: Any, call: Called, result: Any, i: int) -> bool:
    """Whether a sample's result is another one where all other samples are zero, or nothing can tell.

    If it is not, rounding alone has led the sample another way, as where the nearest of a codebook's entries is chosen:
    in a batch of the same size numbers are rounded in the same way.
    """
    leaves = [
        x if dim is None else _with_one(x, dim, i, call.batch) for x, dim in zip(call.leaves, call.dims, strict=True)
    ]
    try:
        beside_zeros = _plain(module, call, leaves)
    except (RuntimeError, ValueError, IndexError):  # zeros may be no arguments for it, as of lengths
        return True
    both = [_of_sample(module, call, results, i) for results in (beside_zeros or [], flatten(result)[0]) if results]
    return len(both) < 2 or not _are_near(*both)


def _with_one(leaf: Tensor, dim: int, i: int, batch: int) -> Tensor:
    """A tensor of all samples in which all but one are zero."""
    zeros = torch.zeros_like(leaf)
    of_sample(zeros, dim, i, batch).copy_(of_sample(leaf, dim, i, batch))
    return zeros
