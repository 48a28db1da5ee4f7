"""Refusing a call whose samples are made from other samples, of another call of the same model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expanded_nn._batch import tensors
from expanded_nn._errors import complaint
from expanded_nn.recording.expand import passes_behind
from expanded_nn.recording.forward import Forward
from expanded_nn.recording.owner import Owner
from expanded_nn.recording.passes import PassStage


def refuse_other_samples(owner: Owner, forward: Forward, batch: int) -> None:
    """Raises if a forward of B samples, which begins a pass, goes on from a pass of another number of samples.

    The rows of the two passes would stand side by side, though one sample may be behind several of them: clipped each
    for itself, they would not bound what the sample adds.

    Args:
        owner: The recorder of the model.
        forward: The forward.
        batch: B.
    """
    if not any(pass_.stage is PassStage.OPEN and pass_.batch != batch for pass_ in owner.passes.living()):
        return
    given: list[Any] = [x.grad_fn for x in tensors(forward.inputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    for pass_ in passes_behind(owner, *given):
        if pass_.stage is PassStage.OPEN and pass_.batch != batch:
            raise complaint(
                owner.name_of(forward.module),
                f"it is called with {batch} samples, which are computed from the {pass_.batch} samples of an earlier "
                "call of the model",
                "the same samples in both calls",
                f"Make both calls within one_pass(model, {pass_.batch}), for rows of those {pass_.batch} samples, and "
                "unfold the batch; or detach the argument, if the earlier call is to get no gradient from it.",
            )
