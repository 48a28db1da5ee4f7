"""Operations of this library, each one node in a traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []  # their operations go with them


def registered(operations: Iterable[tuple[str, Callable[..., Any], Callable[..., Any]]]) -> Any:
    """Registers operations, and gives what holds them all.

    Args:
        operations: Of each the schema, the function, and one that gives tensors of the results' shapes.
    """
    library = torch.library.Library("expanded_nn", "FRAGMENT")
    for schema, run, fake in operations:
        name = library.define(schema).partition("(")[0]
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"expanded_nn::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return torch.ops.expanded_nn
