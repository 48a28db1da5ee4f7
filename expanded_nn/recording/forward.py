"""The outermost forward that runs, what layers note in it, and what it refuses once it has run."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import PerSampleError, add_note, complaint, warn
from expanded_nn.common.batch import (
    batch_dim,
    contents,
    data_in,
    is_shared_by_all,
    may_have_derivatives,
    own_batch_first,
    rows_are_nodes,
    tensors,
)
from expanded_nn.common.modes import is_in_engines_thread, is_of_checkpoint, running_backward
from expanded_nn.common.traced import is_traced
from expanded_nn.recording.checkpoints import note_pass
from expanded_nn.recording.expand import passes_behind
from expanded_nn.recording.linked import note_result
from expanded_nn.recording.order import Order
from expanded_nn.recording.passes import Pass
from expanded_nn.recording.settings import RecorderLike

# what torch raises where sizes do not fit, and models that check sizes themselves
_OF_SHAPES = (RuntimeError, ValueError, IndexError)


@dataclass
class InputNotes:
    """What layers have noted about their inputs in one forward.

    Attributes:
        broadcast: Embeddings whose index had no batch dimension.
        inputs_shared: For each input read so far, whether it is a single one that all samples share.
        sharing: The layers that have returned a result for an input that all samples share.
    """

    broadcast: list[nn.Module] = field(default_factory=list)
    inputs_shared: list[bool] = field(default_factory=list)
    sharing: list[nn.Module] = field(default_factory=list)


class Forward:
    """The outermost forward that runs.

    Its pass is chosen when a layer first needs it, and then stays: a forward without gradients has none, and a layer
    may know B better than the first argument does. (A context manager that is a class costs less than a generator.)

    Attributes:
        recorder: The recorder of the model.
        module: The module whose forward it is.
        batch: B, as its arguments say.
        inputs: Its arguments.
        is_one_pass: Whether `one_pass` has opened it.
        thread: The thread it runs in.
        notes: What layers have noted about their inputs.
        will_run_again: Whether a layer has run without gradients in it, as in a reentrant checkpoint: then the backward
            will run layers again.
        order: What looks at the order of the samples between the layers, if there are any within the module.
    """

    def __init__(
        self, recorder: RecorderLike, module: nn.Module, batch: int | None, inputs: Any, *, is_one_pass: bool = False
    ) -> None:
        batch_size = recorder.settings.batch_size
        self.recorder, self.module, self.inputs = recorder, module, inputs
        self.batch = batch if batch_size is None or is_one_pass else batch_size
        self.is_one_pass = is_one_pass
        self.thread = get_ident()
        self.notes = InputNotes()
        self.will_run_again = False
        self.order: Order | None = None
        self._pass: Pass | None = None

    def __enter__(self) -> Forward:
        if self.recorder.passes.opened == 0:  # while a layer runs, FSDP has replaced its shards
            self.recorder.leaves.look_for_shards(self.module)
        if self.batch is None or (self.is_one_pass and torch.is_grad_enabled()):
            self.own_pass  # noqa: B018  # chosen at once, as no layer knows B better
        self.recorder.forward = self
        return self

    @property
    def own_pass(self) -> Pass:
        """The pass that the forward belongs to."""
        if self._pass is None:
            self._pass = self.recorder.choose_pass(self)
        return self._pass

    @property
    def is_of_other_thread(self) -> bool:
        """Whether it runs in another thread than this code, and this code is no part of a backward within it."""
        return self.thread != get_ident() and not is_in_engines_thread()

    @property
    def batch_so_far(self) -> int | None:
        """B as it is known at this moment; that chooses no pass."""
        return self.batch if self._pass is None else self._pass.batch

    @property
    def batch_is_told(self) -> bool:
        """Whether B was told, by `one_pass` or by the settings, and is not what the arguments say."""
        return self.is_one_pass or self.recorder.settings.batch_size is not None

    @property
    def samples(self) -> list[Tensor]:
        """The tensors among the arguments whose first or second dimension has size B."""
        batch = self.own_pass.batch
        inputs = (x for x in tensors(self.inputs) if isinstance(x, Tensor) and not is_shared_by_all(x))
        return [x for x in inputs if batch in x.shape[:2]]

    def is_argument(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of this forward, or shows the memory of one."""
        base = x if x._base is None else x._base
        return any(argument is base or argument is x or argument._base is base for argument in data_in(self.inputs))

    def is_shifted_argument(self, index: Tensor) -> bool:
        """Whether an index `(B,)` is an argument of this forward plus a constant, as `labels + 1` is."""
        labels = [x for x in self.samples if x.shape == index.shape and x.numel() and not may_have_derivatives(x)]
        return any(torch.equal((x - x[0]).to(index), index - index[0]) for x in labels)

    def correct_batch(self, batch: int) -> None:
        """Takes B from a layer that knows better than the first argument; not if a pass is chosen or B was told."""
        if self._pass is None and not self.batch_is_told:
            self.batch = batch

    def refuse_nodes(self) -> None:
        """Raises if the rows of the input are the nodes of graphs, unless B was told."""
        is_twin = getattr(self.module, "plain_class", None)
        if is_twin and not self.batch_is_told and rows_are_nodes(self.module, *self.inputs):
            raise complaint(
                self.recorder.name_of(self.module),
                "its edge_index joins the rows of its input, which are the nodes of graphs, not samples",
                "a sample in each row",
                "Graphs side by side, which a batch vector tells apart, are not supported. Call it with one graph at a "
                'time, per_sample(batch_size=1, loss_reduction="sum"), and backward() after each: their rows append. '
                "Or fill them up to (B, nodes, features). If each row is a sample whose result depends on no other "
                "row, say so: per_sample(batch_size=B).",
            )

    def finish(self, module: nn.Module, result: Any) -> None:
        """Looks at what a module returns; notes its pass in the graph if the backward will run layers again.

        It is the module whose forward it is, or another one that is called within `one_pass`.

        Raises:
            PerSampleError: If the first argument has one row, and all else has as many as the result.
        """
        if self.order is not None and module is self.module:  # what a part of it returns is looked at further on
            self.order.copies.refuse_returned(result)
        if not self.batch_is_told and not is_traced():
            self._refuse_other_rows(result)
        elif not self.is_one_pass and not is_traced():
            self._refuse_stale_batch_size()
        if self._pass is not None:
            self._refuse_other_passes(result, self._pass)
            input_ids = [id(x) for x in tensors(self.inputs)]  # one that is returned as it is comes from elsewhere
            own_layout = own_batch_first(self.module) is not None
            note_result([x for x in tensors(result) if id(x) not in input_ids], self._pass, own_layout=own_layout)
        if not self.will_run_again or (self._pass is None and self.batch is None):
            return
        if not note_pass(contents(result), self.recorder.passes, self.own_pass):
            self.recorder.passes.kept.add(self.own_pass)

    def _refuse_other_rows(self, result: Any) -> None:
        """Raises or warns where the result has another number of rows than the first tensor among the arguments."""
        batch = self.batch_so_far
        if batch is None or hasattr(self.module, "batch_first"):  # the module says itself where samples stand
            return
        results = [x for x in tensors(result) if isinstance(x, Tensor) and x.requires_grad and x.numel() > 1]
        counts = set(map(self._rows_in, results))
        if not counts or batch in counts:
            return
        inputs = [x for x in tensors(self.inputs) if isinstance(x, Tensor) and x.dim() and not is_shared_by_all(x)]
        if batch == 1:
            rows = {self._rows_in(x) for x in inputs if not _may_be_features(x)} - {1}
            if len(rows) == 1 and counts == rows:
                (count,) = rows
                raise complaint(
                    self.recorder.name_of(self.module),
                    "the first tensor among its arguments has one row, so that there is one per-sample gradient, but "
                    f"the others have {count}, as its result has",
                    "the number of samples",
                    "Call the model with shared_by_all(x) for the first one, or put the samples' tensor first; or say "
                    f"it: per_sample(batch_size={count}), or per_sample(batch_size=1) if it is one sample.",
                )
            return
        is_other = bool(counts & set(map(self._rows_in, inputs)) - {1})
        if is_other or (max(counts) < batch and not any(batch in x.shape for x in results)):
            name, count = self.recorder.name_of(self.module), max(counts)
            warn(
                f"{name} is called with {batch} samples, as the first tensor among its arguments has {batch} rows, and "
                f"returns {count}{', as others among them have' * is_other}: there are {batch} per-sample gradients. "
                "If these are not your samples, clipping does not bound what one of yours adds. Give it an input with "
                "a row for each sample, filled up if need be, as the first tensor; or say per_sample(batch_size=...)."
            )

    def _refuse_stale_batch_size(self) -> None:
        """Raises where no argument can hold as many samples as `per_sample(batch_size=...)` has said."""
        told, arguments = self.recorder.settings.batch_size, list(tensors(self.inputs))
        shapes = [tuple(x.shape) for x in arguments if isinstance(x, Tensor) and x.dim() and not x.is_nested]
        are_known = all(isinstance(x, Tensor) and not x.is_nested for x in arguments)
        sizes = {size for shape in shapes for size in shape}
        indices = [x for x in arguments if isinstance(x, Tensor) and x.dim() == 1 and x.dtype == torch.int64]
        if len(indices) > 1:  # of bags, whose offsets may be one more than the bags
            sizes |= {len(x) - 1 for x in indices if len(x) > 1}
        if told and shapes and are_known and not any(size % told == 0 for size in sizes):
            raise complaint(
                self.recorder.name_of(self.module),
                f"per_sample(batch_size={told}) has said that there are {told} samples, and its arguments have shapes "
                f"{', '.join(map(str, shapes))}",
                "one with a row for each sample",
                "Say the number of this batch: per_sample(batch_size=...).",
            )

    def _refuse_other_passes(self, result: Any, own_pass: Pass) -> None:
        """Raises if the result depends on another pass, by what the model or the code around it has kept.

        Passes behind the arguments of the outermost forward are left out: `choose_pass` has looked at them. `one_pass`
        has none, so that calls within it may not go on from others.
        """
        others = {pass_ for pass_ in self.recorder.passes.alive if pass_.may_get_backward and pass_ is not own_pass}
        if not others:
            return
        others.difference_update(passes_behind(self.recorder, *(x.grad_fn for x in data_in(self.inputs))))
        ends = (x.grad_fn for x in data_in(result)) if others else ()
        pass_ = next((pass_ for pass_ in passes_behind(self.recorder, *ends) if pass_ in others), None)
        if pass_ is not None:
            way = "by its arguments or by what" if self.is_one_pass else "by what"
            raise complaint(
                self.recorder.name_of(self.module),
                f"its result comes from the {pass_.batch} samples of an earlier call as well, {way} it has kept of "
                f"that, so that its {own_pass.batch} samples would have rows beside those",
                "one row for each sample",
                f"Make both calls within one_pass(model, {own_pass.batch}); or detach what is kept, if the earlier "
                "call is to get no gradient from this one.",
            )

    def _rows_in(self, x: Tensor) -> int:
        batch_first = getattr(self.module, "fixed_layout", False) or self.recorder.settings.batch_first
        are_first = x.dim() == 2 and x.shape[0] == self.batch_so_far  # (B, classes) in a model that has time first
        dim = batch_dim(x.dim(), batch_first=batch_first or are_first)
        return x.shape[dim] if x.dim() else 1

    def note_shared(self, layer: nn.Module, result: Any, dim: int, *, is_new: bool) -> None:
        """Notes a layer's result for an input that all samples share: its samples stand in dimension `dim`.

        `is_new` says that the plain layer's result does not have that dimension.
        """
        if not isinstance(result, Tensor):  # several, and nothing tells where their samples stand
            self.notes.sharing.append(layer)
        elif result.grad_fn is not None and result.dim() > dim:
            self.notes.sharing.append(layer)
            if self.order is not None and self.own_pass.batch > 1 and may_have_derivatives(result):
                self.order.copies.note(result, layer, dim, is_new=is_new)

    def taking_apart(self, layer: nn.Module, operation: str) -> PerSampleError:
        """The error where a model takes a part of a result that all samples share, of which each has a copy."""
        return complaint(
            self.recorder.name_of(layer),
            f"its input is shared by all {self.own_pass.batch} samples, so its result has a copy for each of "
            f"them where the plain result has one row, and the model indexes or reduces these (by {operation})",
            "the whole result",
            "Leave out the index [0], the mean over a dimension of one, or the len that follows; unsqueeze the input, "
            "not the result; or run the module around it sample by sample: alone(ItsClass) before convert.",
            refused_by=layer,
        )

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.recorder.forward = None
        if self.is_one_pass:
            self.recorder.passes.last = None
            if self.will_run_again and self._pass is not None:
                self.recorder.passes.kept.add(self._pass)
        if error is not None:
            self.blame(error)
        elif self._pass is None and running_backward() < 0:
            self.recorder.passes.note_without_rows(self.batch)

    def blame(self, error: BaseException) -> None:
        """Adds to an error of the model's own the layer that may have led to it, by a copy for each sample."""
        if isinstance(error, PerSampleError) or is_of_checkpoint(error) or hasattr(error, "refused_by"):
            return
        if self.notes.broadcast:
            layer, what = self.notes.broadcast[0], "an index without a batch dimension"
        elif self.notes.sharing and isinstance(error, _OF_SHAPES):
            layer, what = self.notes.sharing[0], "an input that all samples share"
        else:
            return
        error.refused_by = layer  # type: ignore[attr-defined]
        add_note(
            error,
            f"before this, {self.recorder.name_of(layer)} was called with {what}, and returned a result for each "
            "sample, (B, ...). If that is the reason, let what follows broadcast over the samples, without a repeat of "
            "its own, or run the module around it sample by sample: alone(ItsClass) before convert.",
        )


def _may_be_features(x: Tensor) -> bool:
    """Whether they may be the features `(1, n)` of a single sample, also in a model that has the samples second."""
    return x.dim() == 2 and x.shape[0] == 1 and may_have_derivatives(x)
