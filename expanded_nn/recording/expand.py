"""From a parameter to its `(B, *shape)` view: the autograd Functions whose backward delivers the rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import no_torch_function, refuse_batched, without_autocast
from expanded_nn.core import cost
from expanded_nn.core.terms import Dense
from expanded_nn.factored import FactoredTensor, as_factored, materialized, times
from expanded_nn.recording.backward import accumulates
from expanded_nn.recording.graph import graph_of, leaves_behind
from expanded_nn.recording.leaf import Leaf
from expanded_nn.recording.lift import quiet_fallbacks
from expanded_nn.recording.passes import Pass
from expanded_nn.recording.settings import RecorderLike, Settings
from expanded_nn.recording.sources import rows_of_sources
from expanded_nn.rows.storage import Recycled

# computes a weight anew, from the leaves that it was computed from and other values for them
Recompute = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


class Expand(torch.autograd.Function):
    """`parameter -> (B, *shape)`; the backward delivers the rows and returns their sum, the plain gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, pass_: Pass, leaf: Leaf, recorder: weakref.ref[RecorderLike]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.pass_, ctx.leaf, ctx.recorder = parameter, pass_, leaf, recorder
        return parameter.expand(pass_.batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        recorder: RecorderLike | None = ctx.recorder()
        leaf: Leaf = ctx.leaf
        if rows is None:  # the loss does not depend on the parameter
            return None, None, None, None
        refuse_batched(rows)
        if recorder is None or recorder.leaves.get(ctx.parameter) is not leaf:
            return rows.sum(0), None, None, None  # per_sample(...) was called after the forward
        if not ctx.parameter.requires_grad:  # frozen after the forward: torch adds nothing to its .grad
            recorder.deliver(ctx.pass_, leaf, None)
            return None, None, None, None
        # torch.autograd.grad asks for the gradient, and adds nothing to .grad
        settings, asked_for = recorder.settings, not accumulates(ctx.next_functions[0][0])
        scale = max(1, ctx.pass_.batch) if settings.loss_reduction == "mean" else 1
        # without no_torch_function each attribute of a factored tensor costs a call in Python
        with no_torch_function(), without_autocast():
            add_up = settings.accumulate_grad or asked_for
            kept, total = _kept_and_total(rows, scale, add_up, settings, leaf.memory)
            if not asked_for or torch.is_grad_enabled():
                recorder.deliver(ctx.pass_, leaf, kept, stand_alone=asked_for)
        if total is not None:
            dtype = ctx.parameter.grad_dtype if ctx.parameter.is_leaf else None  # which the user may have set
            total = total if dtype in (None, ctx.parameter.dtype) else total.to(dtype)
            leaf.expect(total)
        return total, None, None, None


_IS_EXPANDED = "_is_expanded_by_a_layer"  # an attribute of tensors


class ExpandComputed(torch.autograd.Function):
    """A weight computed from parameters, expanded; the backward turns its rows into rows of the parameters."""

    @staticmethod
    def forward(ctx: Any, computed: Computed, batch: int, *expanded: Tensor) -> Tensor:
        ctx.computed = computed
        ctx.save_for_backward(*expanded)
        setattr(computed.weight, _IS_EXPANDED, True)
        weight = computed.weight.detach()
        return weight.expand(batch, *weight.shape)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(rows)
        computed: Computed = ctx.computed
        leaves = computed.leaves
        if rows.shape[0] == 0:
            return None, None, *(leaf.new_zeros(0, *leaf.shape) for leaf in leaves)
        if torch.is_grad_enabled():
            return None, None, *computed.differentiable(saved_tensors(ctx), materialized(rows))
        with meanwhile(computed.recorder.backward, computed=ctx):
            return None, None, *rows_of_sources(computed.weight, leaves, rows)


def derivatives(args: Any, kwargs: Any) -> Any:
    """What `torch.autograd.grad` gives.

    Raises:
        PerSampleError: If it gives nothing by a weight that is computed from parameters and that a layer has expanded:
            the layer's result depends on those parameters, and not on it.
    """
    found = torch.autograd.grad(*args, **kwargs)
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    pairs = zip([inputs] if isinstance(inputs, Tensor) else inputs, found, strict=False)
    if any(grad is None and hasattr(x, _IS_EXPANDED) for x, grad in pairs):
        raise complaint(
            "torch.autograd.grad",
            "it was asked for a derivative by a weight that is computed from parameters, and a layer in per-sample "
            "mode depends on these alone",
            "derivatives by parameters, or by weights that are given to the layers by functional_call",
            "Write the inner step with torch.func.functional_call(net, weights, x), outside of the model's forward.",
        )
    return found


class Computed:
    """A weight that is computed from parameters, as by a parametrization.

    Attributes:
        weight: The weight, with its graph.
        leaves: The parameters that it was computed from.
        recorder: The recorder that takes the rows of those.
        recompute: Computes the weight from other values of its leaves; `None` if that is not known.
    """

    def __init__(self, weight: Tensor, recorder: RecorderLike, recompute: Recompute | None = None) -> None:
        self.weight, self.recorder, self.recompute = weight, recorder, recompute
        self.leaves = leaves_of(weight, recorder)

    def differentiable(self, expanded: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor]:
        """The rows of the leaves, with a graph: each sample's weight is computed from parameters of its own."""
        if self.recompute is None:
            raise PerSampleError(
                "create_graph=True reached a weight that is computed from other parameters outside of a "
                "parametrization: their per-sample gradients have no second derivative. Register the computation by "
                "torch.nn.utils.parametrize, or ask for derivatives with respect to inputs only."
            )
        recompute, leaves = self.recompute, self.leaves
        with quiet_fallbacks():
            weights = torch.vmap(lambda *values: recompute(leaves, values))(*expanded)
        if not torch.allclose(weights[0], self.weight, equal_nan=True):
            raise PerSampleError(
                "create_graph=True reached a parametrization that gives another weight when it is computed again, so "
                "its derivative is not known. Remove what is random in it, or what changes from call to call."
            )
        return torch.autograd.grad(weights, expanded, rows, create_graph=True)


def leaves_of(weight: Tensor, recorder: RecorderLike | None = None) -> list[Tensor]:
    """The leaf tensors that `weight` was computed from; `recorder` gives its name for errors."""
    if comes_from_rows(weight):
        raise complaint(
            "expanded(weight)" if recorder is None else recorder.name_of(weight),
            "the weight was computed from the output of a model in per-sample mode, or from a gradient of its loss, so "
            "it mixes the samples",
            "a weight that no samples went into, or one for each sample, (B, *shape)",
            "Compute it with per_sample(False), from data that are no samples of this batch.",
        )
    return leaves_behind(weight.grad_fn)


def comes_from_rows(x: Tensor) -> bool:
    """Whether `x` was computed from a layer's output in per-sample mode, which has B rows."""
    expansions = Expand._backward_cls | ExpandComputed._backward_cls
    return any(isinstance(node, expansions) for node in graph_of(x.grad_fn))


def saved_tensors(ctx: Any) -> Sequence[Any]:
    """What the forward of a layer's Function has saved for its backward.

    Raises:
        PerSampleError: If a weight among it was changed in place since; autograd itself finds that.
    """
    try:
        return cast(Sequence[Any], ctx.saved_tensors)
    except RuntimeError as error:
        weights = [node for node, _ in ctx.next_functions[1:]]  # the first one is the input's
        nodes: list[Any] = [node for node in graph_of(*weights) if isinstance(node, Expand._backward_cls)]
        if "has been modified inplace" not in str(error) or not nodes:
            raise
        recorder: RecorderLike | None = nodes[0].recorder()
        raise complaint(
            "a parameter" if recorder is None else recorder.name_of(nodes[0].parameter),
            "it was changed in place between the forward and its backward, as by the step of an optimizer",
            "the same parameters in both",
            "Call backward() before optimizer.step(), or call the model again after it.",
        ) from error


def passes_behind(recorder: RecorderLike, *ends: Any) -> list[Pass]:
    """The passes of a model that the graph of some nodes comes from."""
    nodes: list[Any] = [parent for parent in graph_of(*ends) if isinstance(parent, Expand._backward_cls)]
    return list(dict.fromkeys(parent.pass_ for parent in nodes if parent.recorder() is recorder))


def keeps_factors(*expanded: Tensor | None) -> bool:
    """Whether one of these expanded weights, or views of them, belongs to a model with `keep_factors=True`."""
    for weight in expanded:
        node: Any = None if weight is None else weight.grad_fn
        while node is not None and not isinstance(node, Expand._backward_cls):
            node = node.next_functions[0][0] if node.next_functions else None
        recorder: RecorderLike | None = None if node is None else cast(Any, node).recorder()
        if recorder is not None and recorder.settings.keep_factors:
            return True
    return False


def _kept_and_total(
    rows: Tensor, scale: float, add_up: bool, settings: Settings, memory: Recycled
) -> tuple[Tensor, Tensor | None]:
    """The rows times `scale`, factored or dense as sizes and settings say; and the plain gradient, the rows' own sum.

    Without `add_up` the plain gradient is not needed. Dense rows are written to `memory`.
    """
    if not isinstance(rows, FactoredTensor) or rows.requires_grad:
        is_large = not rows.requires_grad and not cost.rows_are_small(rows.numel())
        kept = materialized(times(as_factored(rows), scale), memory) if is_large else times(rows, scale)
        return kept, rows.sum(0) if add_up else None
    kept = times(rows, scale)
    terms = rows.terms()
    larger = sum(term.numel() for term in terms) >= rows.numel() and not settings.keep_factors
    dense = larger or (settings.materialize and rows.sums_faster_dense())
    if dense:
        kept = materialized(kept, memory)
    if not add_up:
        return kept, None
    sparse = rows.sparse_sum()
    if sparse is not None:
        return kept, sparse
    if not dense:
        return kept, rows.weighted_sum()
    return kept, Dense.of(kept).scaled(1 / scale).weighted_sum(None)
