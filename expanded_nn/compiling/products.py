"""Products of large matrices in a graph, by the faster of the libraries that torch has for them, as measured here.

Torch multiplies dense float32 matrices by one library, mostly MKL, and those in the layout of oneDNN by oneDNN. On an
AMD EPYC (Zen 5, AVX-512) oneDNN takes half of MKL's time, with the copies into its layout and back.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from expanded_nn.common.operations import registered
from expanded_nn.core import cost

_PROBE = 512, 512  # the sizes of the matrices that are multiplied to see which library is faster
_ROUNDS = 9
_SHARE = 0.7  # of the other's time, at most: far from what the two take where they are alike, so that chance is no part


def take_faster_products(graph: fx.GraphModule) -> None:
    """Lets oneDNN multiply the large float32 matrices on a CPU, if it is the faster one here."""
    large = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default and _may_be_large(node)]
    if large and _onednn_is_faster(torch.get_num_threads()):
        for node in large:
            node.target = _operations().product.default
        graph.recompile()


def _may_be_large(node: fx.Node) -> bool:
    value, a = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.device.type != "cpu" or value.dtype is not torch.float32:
        return False
    (m, k), n = a.shape, value.shape[1]
    return any(map(cost.is_symbol, (m, k, n))) or cost.product_is_worth_layouts(m, k, n)


@cache
def _onednn_is_faster(threads: int) -> bool:
    """Whether oneDNN takes less time by far, its copies included, with so many threads; measured once in a process."""
    if not torch.backends.mkldnn.is_available():
        return False
    a, b = (torch.ones(_PROBE, dtype=torch.float32, device="cpu") for _ in range(2))
    seconds: dict[Any, list[float]] = {torch.mm: [], _by_onednn: []}
    for _ in range(_ROUNDS):
        for multiply, times in seconds.items():
            start = perf_counter()
            multiply(a, b)
            times.append(perf_counter() - start)
    return median(seconds[_by_onednn]) < _SHARE * median(seconds[torch.mm])


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a.to_mkldnn(), b.t().to_mkldnn()).to_dense()


def _product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    return _by_onednn(a, b) if cost.product_is_worth_layouts(m, k, n) else torch.mm(a, b)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@cache
def _operations() -> Any:
    """The operation, registered when it is used for the first time."""
    return registered([("product(Tensor a, Tensor b) -> Tensor", _product, _shape)])
