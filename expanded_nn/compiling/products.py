"""Products of large matrices in a graph, by the faster of the libraries that torch has for them."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from expanded_nn.common.operations import registered
from expanded_nn.common.products import by_onednn, is_dense, time_of_onednn
from expanded_nn.core import cost

aten = torch.ops.aten
_OF_BATCHES = aten.bmm.default, aten.bmm.out


def take_faster_products(graph: fx.GraphModule) -> None:
    """Lets oneDNN multiply the large float32 matrices on a CPU, if it is the faster one here.

    It takes a first matrix whose rows lie one after the other. Where that is a transpose, as in sums of weights' rows,
    it is copied, which inductor does in the loops that compute it.
    """
    large = [node for node in graph.graph.nodes if _may_be_large(node)]
    if large and time_of_onednn() < 1:
        for node in large:
            if node.target in _OF_BATCHES:
                _take_out_of_batch(graph.graph, node)
            a, b = cast(tuple[fx.Node, fx.Node], node.args)
            value = a.meta["val"]
            if not value.is_contiguous():
                options: dict[str, Any] = {"memory_format": torch.contiguous_format}
                with graph.graph.inserting_before(node):
                    a = graph.graph.call_function(aten.clone.default, (a,), options)
                a.meta["val"] = value.contiguous()
            node.target, node.args = _operations().product.default, (a, b)
        graph.recompile()


def _may_be_large(node: fx.Node) -> bool:
    """Whether a node is a product of two matrices, be they in batches of one, that may be large enough."""
    if node.target is not aten.mm.default and node.target not in _OF_BATCHES:
        return False
    value, a = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.device.type != "cpu" or value.dtype is not torch.float32:
        return False
    sizes: list[Any] = [*a.shape, value.shape[-1]]
    *batch, m, k, n = sizes
    if any(cost.is_symbol(size) or size != 1 for size in batch):
        return False
    return any(map(cost.is_symbol, (m, k, n))) or cost.product_is_large(m, k, n)


def _take_out_of_batch(graph: fx.Graph, node: fx.Node) -> None:
    """Makes a product of batches of one matrix a product of the matrices, which is copied where it was written to."""
    value, out = node.meta["val"], node.kwargs.get("out")
    with graph.inserting_before(node):
        matrices = [graph.call_function(aten.squeeze.dim, (batch, 0)) for batch in node.args]
        for matrix, batch in zip(matrices, node.args, strict=True):
            matrix.meta["val"] = batch.meta["val"].squeeze(0)  # type: ignore[union-attr]
    with graph.inserting_after(node):
        result = batch = graph.call_function(aten.unsqueeze.default)
    if out is not None:
        with graph.inserting_after(batch):
            result = graph.call_function(aten.copy_.default, (out, batch))
    node.replace_all_uses_with(result)
    batch.args, batch.meta["val"], result.meta["val"] = (node, 0), value, value
    node.target, node.args, node.kwargs, node.meta["val"] = aten.mm.default, (*matrices,), {}, value.squeeze(0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    may_be_onednn = a.is_contiguous() and is_dense(b) and cost.product_is_large(m, k, n)
    return by_onednn(a, b) if may_be_onednn else torch.mm(a, b)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@cache
def _operations() -> Any:
    """The operation, registered when it is used for the first time."""
    return registered([("product(Tensor a, Tensor b) -> Tensor", _product, _shape)])
