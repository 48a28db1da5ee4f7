"""The outermost forward that runs, and the settings that it runs with."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from expanded_nn._batch import has_derivatives, inside, tensors
from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.recording.backward import graph_of
from expanded_nn.recording.expand import Expand
from expanded_nn.recording.passes import Pass, Passes
from expanded_nn.recording.shared_results import SharedResult, taken_apart

NOTED_PASS = "expanded_nn"  # where a node of the graph keeps its pass


@dataclass(frozen=True)
class Settings:
    """What `per_sample` was told; see there."""

    loss_reduction: str = "mean"
    batch_first: bool = True
    batch_size: int | None = None
    materialize: bool = False
    accumulate_grad: bool = True
    keep_factors: bool = False
    escalate: bool = True

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f'per_sample: loss_reduction is {self.loss_reduction!r}; wanted "mean" or "sum".')
        if self.batch_size is not None and self.batch_size < 0:
            raise ValueError(f"per_sample: batch_size is {self.batch_size}; wanted None, or 0 or more.")
        if self.keep_factors and self.materialize:
            raise ValueError("per_sample: keep_factors and materialize are both True; wanted one of the two at most.")


class Keeper(Protocol):
    """Whose forward it is: the recorder, as far as a forward needs it."""

    settings: Settings
    passes: Passes
    forward: Forward | None

    def begin(self, forward: Forward) -> Pass: ...

    def look_for_shards(self, module: nn.Module) -> None: ...

    def name_of(self, member: nn.Module | Tensor) -> str: ...


@dataclass
class Heard:
    """What layers have told of their inputs.

    Attributes:
        broadcast: Embeddings whose index has had no batch dimension.
        inputs_shared: For each input that a layer has read so far, whether it has one row, which all samples share.
        shared: What layers have returned for inputs that all samples share.
    """

    broadcast: list[nn.Module] = field(default_factory=list)
    inputs_shared: list[bool] = field(default_factory=list)
    shared: list[SharedResult] = field(default_factory=list)


class Forward:
    """The outermost forward that runs; a class, as a generator costs more than all else at its start.

    Its pass is looked for when a layer needs it: a forward without gradients has none, and a layer may know better
    than the first argument how many samples there are.

    Attributes:
        recorder: Whose passes it is in.
        module: The module whose forward it is.
        batch: B, as its arguments say.
        inputs: Its arguments.
        is_explicit: Whether `one_pass` has opened it.
        thread: The thread it runs in.
        heard: What layers have told of their inputs.
        is_awaited: Whether a layer has run without gradients in it, as in a reentrant checkpoint.
    """

    def __init__(
        self, recorder: Keeper, module: nn.Module, batch: int | None, inputs: Any, *, is_explicit: bool = False
    ) -> None:
        stated = recorder.settings.batch_size
        self.recorder, self.module, self.inputs = recorder, module, inputs
        self.batch = batch if stated is None or is_explicit else stated
        self.is_explicit = is_explicit
        self.thread = get_ident()
        self.heard = Heard()
        self.is_awaited = False
        self._now: Pass | None = None

    def __enter__(self) -> Forward:
        if self.recorder.passes.opened == 0:  # FSDP's shards are out of sight once their layers run
            self.recorder.look_for_shards(self.module)
        if self.batch is None or (self.is_explicit and torch.is_grad_enabled()):
            self.now  # noqa: B018  # at once, as no layer could say it better
        self.recorder.forward = self
        return self

    @property
    def now(self) -> Pass:
        """The pass that it belongs to."""
        if self._now is None:
            self._now = self.recorder.begin(self)
        return self._now

    @property
    def samples(self) -> list[Tensor]:
        """The tensors among the arguments that have B rows, in the first or the second dimension."""
        batch = self.now.batch
        return [each for each in tensors(self.inputs) if isinstance(each, Tensor) and batch in each.shape[:2]]

    def is_argument(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of this forward, or a view of one."""
        whole = x if x._base is None else x._base
        return any(each is x or each is whole or each._base is whole for each in self.samples)

    def is_shifted_argument(self, index: Tensor) -> bool:
        """Whether an index `(B,)` is an argument of this forward but for a constant, as `labels + 1` is."""
        alike = [each for each in self.samples if each.shape == index.shape and not has_derivatives(each)]
        return any(torch.equal((each - each[0]).to(index), index - index[0]) for each in alike if each.numel())

    def correct(self, batch: int) -> None:
        """Sets B before a pass is chosen, unless the user said it: a layer knows it better than the first argument."""
        if self._now is None and self.recorder.settings.batch_size is None and not self.is_explicit:
            self.batch = batch

    def returned(self, result: Any) -> None:
        """What the forward returns: where a backward will run layers again, the graph keeps their pass in mind.

        Raises:
            PerSampleError: If a result that all samples share was taken apart as if it were one.
        """
        if self.heard.shared:
            self._refuse_taken_apart(result)
        if not self.is_awaited or (self._now is None and self.batch is None):
            return
        now, is_found = self.now, False
        ends = [each.grad_fn for each in inside(result) if isinstance(each, Tensor) and each.grad_fn is not None]
        for node in {node for end in ends for node in graph_of(end)}:
            is_own = isinstance(node, Expand._backward_cls)
            if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_own:
                node.metadata.setdefault(NOTED_PASS, now)
                is_found = True
        if not is_found and now not in self.recorder.passes.kept:
            self.recorder.passes.kept.append(now)

    def note_shared(self, layer: nn.Module, result: Any, dim: int) -> None:
        """A layer has returned a result for an input that all samples share."""
        if isinstance(result, Tensor) and result.grad_fn is not None and result.dim() > dim:
            self.heard.shared.append(SharedResult(layer, result.grad_fn, dim, result.dim()))

    def _refuse_taken_apart(self, result: Any) -> None:
        """Looks at the graph, once for each mode and each list of layers whose results are shared."""
        kind = (self.module.training, *((id(shared.layer), shared.dim, shared.rank) for shared in self.heard.shared))
        seen: set[Any] = vars(self.module).setdefault("_shared_seen", set())
        if kind in seen:
            return
        ends = [each for each in tensors(result) if isinstance(each, Tensor) and each.requires_grad]
        taken = taken_apart(self.heard.shared, ends, self.now.batch)
        if taken is not None:
            layer, operation = taken
            error = complaint(
                self.recorder.name_of(layer),
                f"its input is shared by all {self.now.batch} samples, so its result has a copy for each of them, and "
                f"the model takes a part of these ({operation} over the samples)",
                "the whole result",
                "Leave out the index [0], or the mean over a dimension of one, that follows; or run the module around "
                "it sample by sample: alone(ItsClass) before convert.",
            )
            error.refused_by = layer
            raise error
        seen.add(kind)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.recorder.forward = None
        if self.is_explicit:
            self.recorder.passes.current = None
            if self.is_awaited and self._now is not None:
                self.recorder.passes.kept.append(self._now)
        if (
            not self.heard.broadcast
            or error is None
            or isinstance(error, PerSampleError)
            or not hasattr(error, "add_note")
        ):
            return
        name = self.recorder.name_of(self.heard.broadcast[0])
        error.refused_by = self.heard.broadcast[0]  # type: ignore[attr-defined]
        error.add_note(
            f"expanded_nn: before this, {name} has looked up an index without a "
            "batch dimension, and returned a result per sample, (B, *index.shape, dim). If that is the reason, let "
            "what follows broadcast over the samples, or run the module around it sample by sample: alone(ItsClass) "
            "before convert."
        )
