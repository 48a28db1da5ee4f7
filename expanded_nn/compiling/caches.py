"""The caches of functions, `functools.lru_cache`: what is in them, and how a trace's results are taken out."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from expanded_nn.common.outside import CACHED

_FOR_GOOD = Tensor, str, bytes, int, float, complex, tuple, frozenset, type(None)  # what a result is and stays


def results_of(function: Any) -> list[Any]:
    """What a function with a cache has made and gives again, as far as it may change: objects, lists, dicts."""
    referents = gc.get_referents(function)
    tables = [value for value in referents if type(value) is dict and value is not vars(function)]
    values = [*referents, *(value for table in tables for value in table.values())]
    inside = {*map(id, tables), id(vars(function)), id(type(function)), id(function.__wrapped__)}
    results = [value for value in values if id(value) not in inside and not isinstance(value, _FOR_GOOD)]
    return [value for value in results if hasattr(value, "__dict__") or isinstance(value, list | dict | set)]


def clear_caches(tensors: Sequence[Tensor]) -> bool:
    """Clears the caches that have some tensors or tuples of these as results; whether there are any.

    A cache with other results is left as it is: what can be changed is more than a result.
    """
    if not tensors:
        return False
    values: list[Any] = [*tensors, *(holder for holder in gc.get_referrers(*tensors) if isinstance(holder, tuple))]
    holders = gc.get_referrers(*values)
    tables = [holder for holder in holders if type(holder) is dict]  # that of a cache without a limit
    holders += gc.get_referrers(*tables) if tables else []
    caches = [holder for holder in holders if isinstance(holder, CACHED)]
    for function in caches:
        function.cache_clear()
    return bool(caches)
