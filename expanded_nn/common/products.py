"""Products of float32 matrices by oneDNN, which is the faster library on some processors, as measured here.

Torch multiplies float32 matrices by one library, mostly MKL, though it has oneDNN's product as well, which inductor
uses for weights that are frozen. On an AMD EPYC (Zen 4, AVX-512) that takes 0.8 to 0.95 of MKL's time on one thread
and 0.5 to 0.9 on two, on one of the next generation half; on an Intel Xeon it is the slower one.
"""

from __future__ import annotations

from functools import cache
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.modes import with_values

_PROBE = 256, 512, 256  # the sizes of a product that is measured, as small as a large one may be
_ROUNDS = 15


def time_of_onednn() -> float:
    """The time that oneDNN takes for a product, as a ratio to torch's usual one; infinite if there is no oneDNN.

    Measured once for each number of threads.
    """
    return _measured(torch.get_num_threads()) if torch.backends.mkldnn.enabled else inf


@cache
def _measured(threads: int) -> float:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch is built without oneDNN
        return inf
    m, k, n = _PROBE
    with with_values():
        a, b = (torch.ones(size, dtype=torch.float32, device="cpu") for size in ((m, k), (k, n)))
        seconds: dict[Any, list[float]] = {torch.mm: [], by_onednn: []}
        for _ in range(_ROUNDS):
            for multiply, times in seconds.items():
                start = perf_counter()
                multiply(a, b)
                times.append(perf_counter() - start)
    return median(seconds[by_onednn]) / median(seconds[torch.mm])


def is_dense(b: Tensor) -> bool:
    """Whether a matrix has no gaps between its rows or its columns, which take oneDNN a thousand times as long."""
    return b.is_contiguous() or b.t().is_contiguous()


def by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, where `a` is contiguous, and `b` is dense."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product
