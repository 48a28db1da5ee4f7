"""Calls whose samples are made from other samples: an error within one model, a warning between two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from expanded_nn._batch import tensors
from expanded_nn._errors import complaint, warn
from expanded_nn.recording.backward import graph_of
from expanded_nn.recording.checkpoints import pass_of
from expanded_nn.recording.forward import Forward
from expanded_nn.recording.owner import Owner
from expanded_nn.recording.passes import PassStage


def refuse_other_samples(owner: Owner, forward: Forward, batch: int, models: Iterable[Owner]) -> None:
    """Raises if a forward of B samples, which begins a pass, goes on from a pass of another number of samples.

    The rows of the two passes would stand side by side, though one sample may be behind several of them: clipped each
    for itself, they would not bound what the sample adds. Between two of the `models` only a warning is given: each has
    rows per sample of its own calls, as where a GAN's discriminator sees real and made images at once.
    """
    others = {
        pass_: model
        for model in models
        for pass_ in model.passes.living()
        if pass_.stage is PassStage.OPEN and pass_.batch != batch
    }
    if not others:
        return
    given: list[Any] = [x.grad_fn for x in tensors(forward.inputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    for pass_ in map(pass_of, graph_of(*given)):
        model = None if pass_ is None else others.get(pass_)
        if pass_ is None or model is None:
            continue
        if model is owner:
            raise complaint(
                owner.name_of(forward.module),
                f"it is called with {batch} samples, which are computed from the {pass_.batch} samples of an earlier "
                "call of the model",
                "the same samples in both calls",
                f"Make both calls within one_pass(model, {pass_.batch}), for rows of those {pass_.batch} samples, and "
                "unfold the batch; or detach the argument, if the earlier call is to get no gradient from it.",
            )
        if not any(parameter.requires_grad for parameter in forward.module.parameters()):
            return
        warn(
            f"{owner.name_of(forward.module)} is called with {batch} samples, which are computed from the "
            f"{pass_.batch} samples of another model. It has {batch} rows, and the other {pass_.batch}: where one of "
            f"the {pass_.batch} is behind several of the {batch}, clipping does not bound what it adds. For rows of "
            f"the {pass_.batch}, convert one module that holds both models, and call it."
        )
        return
