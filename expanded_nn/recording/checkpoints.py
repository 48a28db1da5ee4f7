"""The pass of a forward that a checkpoint runs again inside the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn.recording.backward import in_transform, running_node
from expanded_nn.recording.expand import Expand, passes_behind
from expanded_nn.recording.graph import graph_of
from expanded_nn.recording.passes import Pass, Passes, PassStage
from expanded_nn.recording.settings import RecorderLike

_NOTE = "expanded_nn"  # a key in the metadata of a node of the graph


def pass_of_recomputation(recorder: RecorderLike, module: nn.Module, batch: int | None) -> Pass:
    """The pass of a forward of `module` inside a backward: the one that the checkpoint was in at first.

    What is known of the running node counts first. If that is nothing, `Passes.recomputed` decides, by which passes are
    not done and how many samples the arguments hold.

    Raises:
        PerSampleError: If no pass fits, or several do; if hooks of another library, or a Function of the user's within
            what goes in a loop, run the layer again.
    """
    if in_transform():
        raise complaint(
            recorder.name_of(module),
            "a transform of torch.func runs the layer again inside the backward, as the hooks of another library "
            "for per-sample gradients do (Opacus' GradSampleModule)",
            "one library that makes per-sample gradients",
            'Wrap the model without hooks, PrivacyEngine().make_private(..., grad_sample_mode="no_op"), or switch '
            "per_sample(False).",
        )
    looped = filter(has_learned_to_loop, recorder.modules()) if recorder.escalation.has_loops else ()
    if any(module in [*other.modules()][1:] for other in looped):
        raise complaint(
            recorder.name_of(module),
            "an autograd Function computes it again in the backward, as a checkpoint written by hand or an adjoint "
            "method does, and the samples have gone through a module around it one after the other",
            "a checkpoint of torch's, or a plain backward",
            "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); torchdiffeq: odeint, not odeint_adjoint.",
        )
    recorder.backward.enter(delivers=False)
    candidates = _passes_at_running_node(recorder)
    if not candidates and all(pass_.stage is PassStage.DONE for pass_ in recorder.passes.alive):
        candidates = _pass_without_forward(recorder, batch)
    fitting = recorder.passes.recomputed(batch, candidates)
    if len(fitting) == 1:
        recorder.backward.resumed = fitting[0]
        return fitting[0]
    raise complaint(
        recorder.name_of(module),
        f"a checkpoint computes it again in the backward, with {'an unknown number of' if batch is None else batch} "
        "samples, and "
        + (f"{len(fitting)} earlier forwards had so many" if fitting else "no earlier forward had so many"),
        "one forward that it belongs to",
        "Call backward for each forward before the next one, or give the checkpoint use_reentrant=False.",
    )


def has_learned_to_loop(module: Any) -> bool:
    """Whether a forward has learned that the samples have to go through it one after the other."""
    learned = getattr(module, "_learned", None)
    return learned is not None and learned.loops


def _passes_at_running_node(recorder: RecorderLike) -> list[Pass]:
    """The passes that belong to the running node: the one noted on it, or those of the expansions behind it."""
    noted, living = noted_passes(running_node()).get(recorder.passes), list(recorder.passes.alive)
    if noted is not None:
        return [noted]
    if len(living) == 1 and living[0].stage is not PassStage.DONE:
        return living  # there is no other, so the graph need not be asked
    return passes_behind(recorder, running_node(), recorder.backward.computed)


def _pass_without_forward(recorder: RecorderLike, batch: int | None) -> list[Pass]:
    """The pass of a checkpoint's forward where all passes are done; none if B is not known.

    If another checkpoint was run again in this backward, both are of one forward, and of its pass. If not, the
    checkpoint is around the whole model, whose first forward had no gradients and so no pass: a new pass begins. In a
    checkpoint of another model it is one for each pass of that model.
    """
    resumed, node = recorder.backward.resumed, running_node()
    if resumed is not None and batch in (resumed.batch, 1):
        return [resumed]
    if batch is None:
        return []
    around: dict[tuple[Passes, int], Pass] = next((noted.of_others for noted in noted_passes(node).values()), {})
    pass_ = around.get((recorder.passes, batch)) or recorder.passes.new(batch)
    around[recorder.passes, batch] = pass_
    if _is_custom(node):  # for a second backward on the same graph
        node.metadata.setdefault(_NOTE, {})[recorder.passes] = pass_
    return [pass_]


def noted_passes(node: Any) -> dict[Passes, Pass]:
    """The pass that `note_pass` has noted on a node for each of the models that a checkpoint calls, by its passes."""
    notes: dict[Passes, Pass] = node.metadata.get(_NOTE, {}) if _is_custom(node) else {}
    return notes


def note_pass(outputs: Iterable[Any], passes: Passes, pass_: Pass) -> bool:
    """Notes a forward's pass on the nodes that may be its reentrant checkpoints; returns whether there are any.

    The graph ends at the node of a reentrant checkpoint, so that nothing else leads to the pass.

    Args:
        outputs: What the forward returns.
        passes: Those of the model.
        pass_: The one of the forward.
    """
    ends = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn is not None]
    nodes = [node for node in graph_of(*ends) if _is_custom(node) and not isinstance(node, Expand._backward_cls)]
    for node in nodes:
        node.metadata.setdefault(_NOTE, {}).setdefault(passes, pass_)
    return bool(nodes)


def _is_custom(node: Any) -> bool:
    """Whether a node is that of a `torch.autograd.Function`, as a checkpoint's is."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)
