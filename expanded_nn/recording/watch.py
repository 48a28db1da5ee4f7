"""The watch on a parameter: whether anything but its expansions adds to its gradient."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from expanded_nn._errors import PerSampleError, add_note, complaint
from expanded_nn.common.batch import data_in
from expanded_nn.common.modes import running_backward
from expanded_nn.recording.backward import accumulates
from expanded_nn.recording.expand import Expand
from expanded_nn.recording.graph import graph_of
from expanded_nn.recording.leaf import Leaf
from expanded_nn.recording.settings import RecorderLike

# the parameters of these belong to the module around
PARTS_OF_LAYERS = (nn.ParameterList, nn.ParameterDict, parametrize.ParametrizationList)


class Watch:
    """A hook on a parameter: the gradient that arrives must be the one that its expansions have returned.

    Invariant: it is the first of the parameter's hooks, as those of the user may change the gradient.

    Where nothing was expanded it is silent for guests of a `functional_call`, and for parameters that have left the
    model, which may be trained elsewhere; within `torch.autograd.grad`, which adds nothing to `.grad`, in any case.
    """

    __torch_unserializable__ = True  # torch.multiprocessing leaves it out without a warning

    def __init__(self, recorder: RecorderLike, leaf: Leaf) -> None:
        self.recorder, self.leaf = weakref.ref(recorder), leaf

    @classmethod
    def put(cls, recorder: RecorderLike, leaf: Leaf, parameter: Tensor) -> None:
        """Watches a parameter that requires gradients."""
        leaf.handle = parameter.register_hook(cls(recorder, leaf))
        hooks: Any = parameter._backward_hooks
        for key in [key for key in hooks if key != leaf.handle.id]:
            hooks[key] = hooks.pop(key)  # torch runs hooks in the order of insertion: `move_to_end` does not change it

    def __call__(self, grad: Tensor | None) -> None:
        recorder, parameter = self.recorder(), self.leaf.parameter()
        if grad is None or recorder is None or parameter is None or not parameter.requires_grad:
            return
        expected = self.leaf.expected.pop(running_backward(), None)
        if expected is not None and expected.matches(grad):
            return
        # torch.autograd.grad leaves rows with create_graph=True only
        if not accumulates(get_gradient_edge(parameter).node) and (expected is None or not torch.is_grad_enabled()):
            return
        holder = recorder.holder_of(parameter)
        if expected is None and holder is None:
            self._let_go()
            return
        reason = None if holder is None or isinstance(holder, PARTS_OF_LAYERS) else _without_rows(holder)
        if reason is None:
            has_rows = expected is not None or self.leaf.published.rows is not None
            recorder.escalation.proven.clear()  # the forward may have gone another way: the next one is looked at again
            error = used_in_loss(recorder.name_of(parameter), parameter, has_rows=has_rows)
            if recorder.escalation.in_vain:  # it is in the forward, then
                add_note(error, recorder.escalation.in_vain)
            raise error
        raise complaint(
            recorder.name_of(parameter),
            f"the parameter belongs to {reason}, so its gradient is not per sample",
            "a converted layer, in per-sample mode",
            "Convert the model again after changing its layers: convert(model, inplace=True).per_sample(True). A "
            "part that is to have no per-sample gradients says so, expanded_nn.per_sample(part, False), or is frozen; "
            "clip the other parts by themselves then.",
        )

    def _let_go(self) -> None:
        """Ends the watch on a parameter that has left the model; a guest of `functional_call` has never been in it."""
        if self.leaf.is_member:
            self.leaf.handle.remove()
            self.leaf.handle = None
            self.leaf.notes.clipped = None  # what arrives here is added to it without clipping


def refuse_outside_use(recorder: RecorderLike, result: Any) -> None:
    """Raises where a backward would: for a parameter on which a result depends without an expansion between."""
    ends = [x.grad_fn for x in data_in(result)]
    for node in graph_of(*ends):
        if isinstance(node, Expand._backward_cls):
            continue
        for parent, _ in node.next_functions:
            parameter: Any = getattr(parent, "variable", None)
            is_watched = parameter is not None and recorder.leaves.is_watched(parameter)
            holder = recorder.holder_of(parameter) if is_watched else None
            if holder is not None and _without_rows(holder) is None:  # the watch has more to say of another
                error = used_in_forward(recorder.name_of(parameter), parameter)
                error.refused_by, error.is_early = holder, True
                raise error


def _without_rows(holder: nn.Module) -> str | None:
    """Why a module's parameters have no rows, if they have none; `per_sample` gives each module a `_recorder`."""
    kind = type(holder).__name__
    if not hasattr(holder, "_recorder"):
        return f"a plain {kind}, which was not converted"
    if not hasattr(holder, "expanded_forward"):
        return f"the {kind}, which had no parameters when it was converted"
    return None if "_recorder" in vars(holder) else f"the new layer {kind}, on which per_sample(True) was not called"


def used_in_forward(name: str, parameter: Tensor) -> PerSampleError:
    """The error about a parameter that a forward uses where no expansion sees it."""
    own_layer = "give the second use a layer of its own that shares the parameter (head.weight = embedding.weight)"
    return _used_outside(name, f"Use it through {_by_expansion(parameter)}. Or {own_layer}.")


def used_in_loss(name: str, parameter: Tensor, *, has_rows: bool) -> PerSampleError:
    """The error about a parameter that is used outside of the forward; the likeliest cause comes first.

    Without rows none of what this backward has brought came through a layer.
    """
    causes = [
        "If the loss has a penalty on the weights, take the optimizer's weight_decay in its place, or add the "
        "penalty's gradient after the clipping, its backward() with per_sample(False).",
        f"If a sample's own loss needs the parameter, use it through {_by_expansion(parameter)}.",
        "If per_sample(True) came after the forward, call the model again; if the layer is new in the model, call "
        "model.per_sample(True).",
        "If this backward needs no per-sample gradients, as the outer one of MAML, switch per_sample(False) before it.",
        "If the forward uses it in a branch that it has not taken before, run the step again.",
    ]
    remedy = " ".join(causes if has_rows else [*causes[2:], *causes[:2]])
    more = "The backward stops at the first such parameter: check(model, x, y, loss=...) names them all."
    return _used_outside(name, f"{remedy} {more}")


def _by_expansion(parameter: Tensor) -> str:
    use = (
        "(weight), as in expanded_nn.functional.linear(x, expanded(weight))"
        if parameter.dim() > 1
        else f"(weight).view(-1, 1, ...{', C' * parameter.dim()}), with as many dimensions as the tensor that it meets"
    )
    return f"expanded_nn.expanded{use}, and in a method other than forward within one_pass(model, batch_size)"


def _used_outside(name: str, remedy: str) -> PerSampleError:
    return complaint(
        name,
        "the parameter is also used outside of its module's forward, so a part of its gradient is not per sample",
        "every use inside the forward of the module that holds it",
        remedy,
    )
