"""The values that a trace knows: of tensors that were there before it, and of what is computed from these alone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot
from torch.utils._mode_utils import no_dispatch

from expanded_nn.common.modes import has_no_values, unseen
from expanded_nn.factored import FactoredTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, is made of such, or stands for one within a function transform."""
    return isinstance(tensor, FakeTensor | FactoredTensor) or has_no_values(tensor)


def has_values(value: object) -> bool:
    """Whether it is a tensor with values."""
    return isinstance(value, Tensor) and not is_fake(value)


def known_values(tensor: Tensor) -> tuple[Tensor, Sequence[Tensor]] | None:
    """A tensor of a trace with its values, and the tensors with values that it is computed from; `None` if not known.

    Not known is what depends on the samples, on random numbers, or on a tensor that was changed on the way.
    """
    if not is_fake(tensor):
        return tensor, [tensor]
    tracer: Any = getattr(get_innermost_proxy_mode(), "tracer", None)
    traced: Any = None if tracer is None or not isinstance(tensor, FakeTensor) else get_proxy_slot(tensor, tracer, None)
    nodes = None if traced is None else _nodes_behind(traced.proxy.node)
    if nodes is None:
        return None
    sources = {node: attrgetter(cast(str, node.target))(tracer.root) for node in nodes if node.op == "get_attr"}
    if not all(map(has_values, sources.values())):
        return None
    values = dict(sources)
    with unseen(), no_dispatch(), torch.no_grad():
        for node in nodes:
            if node not in sources:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = cast(Any, node.target)(*args, **kwargs)
    return values[nodes[-1]], [*sources.values()]


def _nodes_behind(node: fx.Node) -> list[fx.Node] | None:
    """A node of a graph, behind all that it is computed from; `None` if that is not the same each time."""
    left, behind = [node], {node}
    while left:
        each = left.pop()
        if each.op != "get_attr" and not _is_the_same_each_time(each):
            return None
        new = [source for source in each.all_input_nodes if source not in behind]
        left += new
        behind.update(new)
    return [each for each in node.graph.nodes if each in behind]


def _is_the_same_each_time(node: fx.Node) -> bool:
    """Whether an operation gives the same for the same inputs, which it does not change."""
    func: Any = node.target
    is_operation = node.op == "call_function" and isinstance(func, torch._ops.OpOverload)
    return is_operation and not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags
