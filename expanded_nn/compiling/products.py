"""Products of large matrices in a graph, by the faster of the libraries that torch has for them, as measured here.

Torch multiplies float32 matrices by one library, mostly MKL, though it has oneDNN's product as well, which inductor
uses for weights that are frozen. On an AMD EPYC (Zen 4, AVX-512) that takes 0.8 to 0.95 of MKL's time on one thread
and 0.5 to 0.9 on two, on one of the next generation half; on an Intel Xeon it is the slower one.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from expanded_nn.common.operations import registered
from expanded_nn.core import cost

# By whether the first matrix is turned: the sizes of a product that is measured, as small as one may be here, and how
# much of torch's time the other library may take. What is turned is copied, which takes more of a larger product.
_PROBES = {False: ((256, 512, 256), 1.0), True: ((512, 512, 128), 0.9)}
_ROUNDS = 15


def take_faster_products(graph: fx.GraphModule) -> None:
    """Lets oneDNN multiply the large float32 matrices on a CPU, if it is the faster one here."""
    large = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default and _may_be_large(node)]
    threads = torch.get_num_threads()
    if large and torch.backends.mkldnn.enabled and any(_onednn_is_faster(turned, threads) for turned in _PROBES):
        for node in large:
            node.target = _operations().product.default
        graph.recompile()


def _may_be_large(node: fx.Node) -> bool:
    value, a = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.device.type != "cpu" or value.dtype is not torch.float32:
        return False
    (m, k), n = a.shape, value.shape[1]
    return any(map(cost.is_symbol, (m, k, n))) or cost.product_is_large(m, k, n)


@cache
def _onednn_is_faster(is_turned: bool, threads: int) -> bool:
    """Whether oneDNN takes less time with so many threads; measured once in a process.

    It takes matrices whose rows lie one after the other, so one whose columns do, which is turned, is copied first.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch is built without oneDNN
        return False
    (m, k, n), share = _PROBES[is_turned]
    a, b = (torch.ones(size, dtype=torch.float32, device="cpu") for size in ((k, m) if is_turned else (m, k), (k, n)))
    a = a.t() if is_turned else a
    seconds: dict[Any, list[float]] = {torch.mm: [], _by_onednn: []}
    for _ in range(_ROUNDS):
        for multiply, times in seconds.items():
            start = perf_counter()
            multiply(a, b)
            times.append(perf_counter() - start)
    return median(seconds[_by_onednn]) < share * median(seconds[torch.mm])


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a.contiguous(), b.t(), None, "none", [], "")
    return product


def _product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    is_turned = not a.is_contiguous()
    # matrices with gaps between their rows take oneDNN a thousand times as long
    is_dense = (not is_turned or a.t().is_contiguous()) and (b.is_contiguous() or b.t().is_contiguous())
    if is_dense and cost.product_is_large(m, k, n) and _onednn_is_faster(is_turned, torch.get_num_threads()):
        return _by_onednn(a, b)
    return torch.mm(a, b)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@cache
def _operations() -> Any:
    """The operation, registered when it is used for the first time."""
    return registered([("product(Tensor a, Tensor b) -> Tensor", _product, _shape)])
