"""The caches of functions, `functools.lru_cache`: what is in them, and how a trace's results are taken out."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from expanded_nn.common.containers import has_dict
from expanded_nn.common.outside import CACHED


def results_of(function: Any) -> list[Any]:
    """What a function with a cache has made and gives again, as far as it may change: objects, lists, dicts."""
    results = [value for value in _contents_of(function) if not isinstance(value, Tensor)]
    return [value for value in results if has_dict(value) or isinstance(value, list | dict | set)]


def clear_caches(tensors: Sequence[Tensor]) -> bool:
    """Clears the caches that have some tensors or tuples of these as results; whether there are any.

    A cache with other results is left as it is: what can be changed is more than a result.
    """
    if not tensors:
        return False
    made = {*map(id, tensors)}  # to ask for the referrers of all of them would take long
    functions = [value for value in gc.get_objects() if issubclass(type(value), CACHED)]
    caches = [function for function in functions if any(_is_of(made, value) for value in _contents_of(function))]
    for function in caches:
        function.cache_clear()
    return bool(caches)


def _contents_of(function: Any) -> list[Any]:
    """What is in the cache of a function: results, and what they were made of."""
    referents = gc.get_referents(function)
    dicts = [value for value in referents if type(value) is dict and value is not vars(function)]
    tables = dicts[-1:]  # results come first, which may be dicts, too
    inside = {*map(id, tables), id(vars(function)), id(type(function)), id(function.__wrapped__)}
    values = [*referents, *(value for table in tables for value in table.values())]  # those of a cache without a limit
    return [value for value in values if id(value) not in inside]


def _is_of(made: set[int], value: Any) -> bool:
    """Whether a value is one of the tensors with such ids, or a tuple with one."""
    return id(value) in made or (isinstance(value, tuple) and any(id(item) in made for item in value))
