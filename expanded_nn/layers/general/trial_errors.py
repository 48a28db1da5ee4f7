"""What a trial says where samples and the whole batch give other results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import is_shared_by_all
from expanded_nn.modules.layout import hint_of_layout, refusal
from expanded_nn.recording.escalate import OF_UNEQUAL_PARTS


def of_mixing(module: Any, what: str, others: Sequence[Tensor] = (), batch: int = 1) -> PerSampleError:
    """The error about samples that mix; `others` are arguments that do not have the B samples first."""
    are_parts = any(x.dim() and x.shape[0] not in (1, batch) and not is_shared_by_all(x) for x in others)
    more = f" {OF_UNEQUAL_PARTS}" if are_parts else ""
    return complaint(
        module.qualified_name,
        what,
        "samples that do not depend on each other, and arguments whose rows are the samples",
        f"{hint_of_layout(module)}Do what mixes samples (a mean over the batch, a similarity of all pairs) outside of "
        "the module. Call the model with shared_by_all(x) for an argument that all samples share; make a table a "
        f"buffer. Draw random numbers by torch. A loss of several samples has no per-sample gradients.{more}",
        refused_by=module,  # around it, B rows by chance may be a dimension that all share
    )


def of_reduced(module: Any) -> PerSampleError:
    """The error about a number that is neither the mean nor the sum over the samples."""
    return refusal(
        module,
        "its forward returns a number that is neither the mean nor the sum of what it returns for single samples, "
        "or may be both",
        "a loss that is one of the two",
        "For squeeze() write squeeze(-1). Return tensors with a batch dimension, and reduce outside of the module; "
        "over the words of each sample first, where samples have different numbers of them. A loss that samples "
        "have only together, such as one that balances experts, is no sample's own: compute it for each, or not.",
    )
