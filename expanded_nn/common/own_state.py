"""The attributes of modules: which are the library's own, and what the others hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

# The attributes that the library sets on modules: by `per_sample`, by the general rule, by what layers have seen of
# inputs. A forward that starts over puts back all attributes but those in `OURS`; an Embedding's `_takes_labels` is put
# back as well, so it is not among these.
OWN_STATE = ("_recorder", "_settings", "_trials", "_ranks", "_learned", "_layout_is_clear", "_past_comparisons")
OURS = {"_parameters", "_modules", "_flat_weights", "_flat_weight_refs", *OWN_STATE}
HOOK_TABLES = {name for name in vars(nn.Module()) if "_hooks" in name}


def attributes_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The values of the attributes of modules, but for ours, parameters, modules, and tables without hooks."""
    pairs = (pair for module in modules for pair in vars(module).items() if pair[0] not in OURS)
    return [value for name, value in pairs if name not in HOOK_TABLES or value]
