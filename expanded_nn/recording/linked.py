"""Refusing a call whose samples are made from other samples, of another call of the same model."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from expanded_nn._batch import tensors
from expanded_nn._errors import complaint
from expanded_nn.recording.expand import Receiver, passes_behind
from expanded_nn.recording.forward import Forward
from expanded_nn.recording.passes import Passes, PassStage


class RecorderOfCalls(Receiver, Protocol):
    """The recorder of a model, as far as it knows the passes and names."""

    passes: Passes

    def name_of(self, member: nn.Module | Tensor) -> str: ...


def refuse_other_samples(recorder: RecorderOfCalls, forward: Forward, batch: int) -> None:
    """Raises if a forward of B samples, which begins a pass, goes on from a pass of another number of samples.

    The rows of the two passes would stand side by side, though one sample may be behind several of them: clipped each
    for itself, they would not bound what the sample adds.

    Args:
        recorder: The recorder of the model.
        forward: The forward.
        batch: B.
    """
    alive = [pass_ for ref in recorder.passes.alive if (pass_ := ref()) is not None]
    if not any(pass_.stage is PassStage.OPEN and pass_.batch != batch for pass_ in alive):
        return
    given: list[Any] = [x.grad_fn for x in tensors(forward.inputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    for pass_ in passes_behind(recorder, *given):
        if pass_.stage is PassStage.OPEN and pass_.batch != batch:
            raise complaint(
                recorder.name_of(forward.module),
                f"it is called with {batch} samples, which are computed from the {pass_.batch} samples of an earlier "
                "call of the model",
                "the same samples in both calls",
                f"Make both calls within one_pass(model, {pass_.batch}), for rows of those {pass_.batch} samples, and "
                "unfold the batch; or detach the argument, if the earlier call is to get no gradient from it.",
            )
