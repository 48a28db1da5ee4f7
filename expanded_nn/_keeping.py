"""Whether a backward keeps the factors of rows that would be dense from the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_depth = 0  # of the process, not of the thread: on a GPU a backward runs in threads of its own


@contextmanager
def keep_factors() -> Iterator[None]:
    """Within it, a backward keeps all factors, also those of rows that are small enough to be dense from the start.

    Small linear layers, and layers whose factors are larger than their rows (convolutions, many positions), give
    dense rows, which takes less time and memory. `PerSampleGrads.kronecker` and `gram(per_position=True)` need what
    those were made of. It applies to the whole process.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = enn.convert(torch.nn.Linear(3, 2)).per_sample()
        >>> loss = model(torch.randn(5, 3)).square().sum(1).mean()
        >>> with enn.keep_factors():
        ...     loss.backward()
        >>> A, G, count = enn.per_sample_grads(model).kronecker()["weight"]
        >>> A.shape, G.shape, count
        (torch.Size([3, 3]), torch.Size([2, 2]), 5)
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def keeps_factors() -> bool:
    """Whether a backward is to keep all factors."""
    return _depth > 0


def _change(by: int) -> None:
    global _depth
    with _lock:
        _depth += by
