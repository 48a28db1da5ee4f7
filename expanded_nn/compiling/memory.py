"""Which values of a graph show the same memory, and what it writes to, as the schemas of its operations say."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx


def memory_of(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """For each value the first one that shows the same memory; and those of these whose memory is written to."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        roots = [first[value] for value, _ in _shown_by(node)]
        first[node] = roots[0] if roots else node
        for root in roots[1:]:  # of an operation on several, as `_foreach_add_`
            first.update({value: roots[0] for value, own in first.items() if own is root})
    return first, {first[value] for node in graph.nodes for value, is_written in _shown_by(node) if is_written}


def _shown_by(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """The values whose memory an operation's result may show, or that it changes; and whether it changes them."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        yield node.args[0], False
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return
    names = [argument.name for argument in schema.arguments]
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for argument in schema.arguments:
        value = values.get(argument.name)
        if argument.alias_info is not None:
            several = value if isinstance(value, list | tuple) else [value]
            yield from ((item, argument.alias_info.is_write) for item in several if isinstance(item, fx.Node))
