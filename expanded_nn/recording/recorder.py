"""The recorder of a model: it says which pass a forward belongs to, expands parameters, and keeps their rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._batch import tensors
from expanded_nn._errors import complaint
from expanded_nn._escalate import Escalation
from expanded_nn._traced import note_recorder
from expanded_nn.recording.backward import Backward, graph_of, in_transform, running_backward, running_node
from expanded_nn.recording.expand import Again, Computed, Expand, ExpandComputed, leaves_of, passes_behind
from expanded_nn.recording.forward import NOTED_PASS, Forward as Forward, Settings as Settings
from expanded_nn.recording.passes import Pass, Passes, PassStage
from expanded_nn.recording.sharded import is_shard
from expanded_nn.recording.store import Store
from expanded_nn.recording.watch import Leaf, Leaves, Location, Watch, stale, used_outside

_LIVE: weakref.WeakSet[Recorder] = weakref.WeakSet()  # recorders, for parameters that no hook leads from


class Recorder:
    """Keeps the passes of one model, expands its parameters and holds their rows.

    Attributes:
        settings: What `per_sample` was told.
        homes: The outermost modules that share this recorder: the model, or parts of it that were copied.
        forward: The outermost forward that runs.
        originals: While a module goes through the general rule: the parameters that `vmap` has taken out of it.
        passes: Which forwards belong together.
        backward: The backward that runs.
        store: The rows.
        leaves: What is known of each parameter.
        expanded: The expansions of the current pass: parameter -> pass, version, address, `(B, *shape)`.
        escalation: Which modules forwards have sent through the general rule by themselves.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.homes: list[weakref.ref[nn.Module]] = []
        self.forward: Forward | None = None
        self.originals: Mapping[tuple[nn.Module, str], Tensor] | None = None
        self.passes = Passes()
        self.backward = Backward(self.backward_is_over)
        self.store = Store(settings.materialize)
        self.leaves = Leaves()
        self.expanded: dict[Tensor, tuple[Pass, int, int, Tensor]] = {}
        self.escalation = Escalation()
        _LIVE.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        copied: Recorder = memo.setdefault(id(self), Recorder(self.settings))
        return copied  # the modules that are copied with it adopt themselves

    def __getstate__(self) -> Settings:
        return self.settings

    def __setstate__(self, settings: Settings) -> None:
        self.__init__(settings)  # type: ignore[misc]

    # The model: whose parameters are watched.

    def look_for_shards(self, module: nn.Module) -> None:
        """Whether FSDP has sharded parameters of a module."""
        self.leaves.sharded = self.leaves.sharded or any(map(is_shard, module.parameters()))

    def adopt(self, module: nn.Module) -> None:
        """A module, with all within it, is one that this recorder is for."""
        members = set(module.modules())
        self.homes = [home for home in self.homes if (root := home()) is not None and root not in members]
        self.homes.append(weakref.ref(module))
        self.watch_all()
        for member in self.modules():
            for name, parameter in member._parameters.items():
                if parameter is not None:
                    self._known(parameter, member, name).member = True

    def add_member(self, parameter: Tensor) -> None:
        """A parameter has been put into a module of the model."""
        self._known(parameter).member = True
        if parameter.requires_grad:
            self.leaf(parameter)
        if not hasattr(parameter, "grad_sample"):
            parameter.grad_sample = None  # type: ignore[attr-defined]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the model, but those that belong to another recorder as well."""
        waiting = [root for home in reversed(self.homes) if (root := home()) is not None]
        seen = set()
        while waiting:  # in a third of the time of `modules()`
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            waiting.extend(child for child in reversed(module._modules.values()) if child is not None)
            if getattr(module, "_recorder", self) is self:
                yield module

    def watch_all(self) -> None:
        """Watches every parameter that asks for gradients: it may be used outside of its module."""
        self._forget_lost()
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or self.leaves.is_watched(parameter):
                    continue
                # no guest of functional_call
                if parameter.requires_grad and isinstance(parameter, nn.Parameter):
                    self.leaf(parameter, module, name)
                    if not hasattr(parameter, "grad_sample"):
                        parameter.grad_sample = None  # type: ignore[attr-defined]

    def leaf(self, parameter: Tensor, module: nn.Module | None = None, name: str = "") -> Leaf:
        """What is known of a parameter that requires gradients, and of its location; it is watched from now on."""
        leaf = self._known(parameter, module, name)
        if leaf.handle is None:
            Watch.put(self, leaf, parameter)
        return leaf

    def _forget_lost(self) -> None:
        for leaf in self.leaves.forget_lost():
            self.store.drop(leaf)

    def _known(self, parameter: Tensor, module: nn.Module | None = None, name: str = "") -> Leaf:
        leaf = self.leaves.get(parameter)
        if leaf is None:
            self._forget_lost()  # one of those may have had the same id
            leaf = self.leaves.add(parameter)
            leaf.scales_rows = self.settings.loss_reduction == "mean"
            if module is not None:
                leaf.location = Location(weakref.ref(module), name)
            elif self.leaves.sharded:
                leaf.location = self._location_of(parameter)
        return leaf

    def _location_of(self, parameter: Tensor) -> Location | None:
        holder = self.holder_of(parameter)
        if holder is None:
            return None
        return Location(weakref.ref(holder), next(name for name, own in holder._parameters.items() if own is parameter))

    def name_of(self, member: nn.Module | Tensor) -> str:
        """The qualified name of a module or a parameter, with its class, as far as the model is known."""
        roots = [root for home in self.homes if (root := home()) is not None]
        if isinstance(member, nn.Module):
            names = (name for root in roots for name, module in root.named_modules() if module is member)
            name = next(names, "")
            return f"{name} ({type(member).__name__})" if name else type(member).__name__
        names = (name for root in roots for name, parameter in root.named_parameters() if parameter is member)
        return next(names, "a parameter")

    def holder_of(self, parameter: Tensor) -> nn.Module | None:
        """The module of the model that holds the parameter itself."""
        holders = (each for each in self.modules() if any(parameter is own for own in each._parameters.values()))
        return next(holders, None)

    # Forward: passes and expansions.

    def open_forward(self, module: nn.Module, batch: int | None, inputs: Any) -> Forward:
        """The forward of `module`, where none runs yet: it begins a pass, or joins the last."""
        outermost = getattr(self.passes.no_grad_forward, "call", None)  # gradients were switched on inside of it
        return Forward(self, *(outermost or (module, batch, inputs)))

    @contextmanager
    def without_gradients(self, module: nn.Module, batch: int | None, inputs: Any) -> Iterator[None]:
        """An outermost forward without gradients, of this thread: layers within it may switch them on."""
        self.passes.no_grad_forward.call = (module, batch, inputs)
        try:
            yield
        finally:
            self.passes.no_grad_forward.call = None

    @property
    def in_forward(self) -> bool:
        """Whether a forward runs that a backward may follow."""
        return self.forward is not None

    def in_any_forward(self) -> bool:
        """Whether a forward runs, with or without gradients."""
        return self.in_forward or getattr(self.passes.no_grad_forward, "call", None) is not None

    def refuse_other_thread(self, module: nn.Module) -> None:
        """Raises if another thread is in the middle of a forward, whose pass this one would share."""
        if self.forward is not None and self.forward.thread != get_ident():
            raise complaint(
                self.name_of(module),
                "another thread is in the middle of a forward of this model",
                "one thread at a time",
                "Give each thread a model of its own: copy.deepcopy(model).",
            )

    @property
    def current_pass(self) -> Pass | None:
        """The pass of the forward that runs, or of the last one."""
        return self.passes.current if self.forward is None else self.forward.current_pass

    def one_pass(self, module: nn.Module, batch: int) -> AbstractContextManager[object]:
        """Makes all calls meanwhile one pass of `batch` samples; inside of a forward they are a part of that."""
        self.refuse_other_thread(module)
        if self.forward is None:
            return Forward(self, module, batch, (), is_explicit=True)
        if self.forward.current_pass.batch != batch:
            raise complaint(
                "one_pass",
                f"batch_size is {batch}, inside of a forward of {self.forward.current_pass.batch} samples",
                "the same number of samples",
                "Enter one_pass outside of the other forward, or leave it out.",
            )
        return nullcontext()

    def begin(self, forward: Forward) -> Pass:
        """The pass that a forward belongs to, a new one if need be."""
        module, batch = forward.module, forward.batch
        note_recorder(self)
        if running_backward() >= 0:
            return self._recomputed_pass(module, batch)
        self.backward.end_unfinished()
        if in_transform():
            raise complaint(
                self.name_of(module),
                "a transform of torch.func (grad, vmap, jvp, ...) is applied to a model in per-sample mode",
                "one of the two",
                "Switch per_sample(False) for the transform; its functions see the plain torch.nn model then.",
            )
        before = self.passes.current
        if batch is None:
            if before is not None and before.stage is PassStage.OPEN:
                return before
            raise complaint(
                self.name_of(module),
                "no argument is a tensor",
                "a tensor with a dimension for the samples",
                "Say the number of samples: per_sample(batch_size=...), or one_pass(model, batch_size).",
            )
        pass_ = self.passes.new(batch) if forward.is_explicit else self.passes.joined_or_new(batch)
        if pass_ is not before:
            self.watch_all()
            self.expanded.clear()
        return pass_

    def _recomputed_pass(self, module: nn.Module, batch: int | None) -> Pass:
        """A checkpoint computes a forward again inside the backward: it belongs to the pass it was first in.

        What tells, in this order: the note that `Forward.finish` has left at the running node (reentrant
        checkpoints, behind which there is no graph); the expansions in the graph behind that node; and where neither
        says anything, `Passes.recomputed`: which passes are not done, and the number of samples.
        """
        if in_transform():
            raise complaint(
                self.name_of(module),
                "a transform of torch.func runs the layer again inside the backward, as the hooks of another library "
                "for per-sample gradients do (Opacus' GradSampleModule)",
                "one library that makes per-sample gradients",
                'Wrap the model without hooks, PrivacyEngine().make_private(..., grad_sample_mode="no_op"), or switch '
                "per_sample(False).",
            )
        self.backward.enter(delivers=False)
        node = running_node()
        noted = getattr(node, "metadata", {}).get(NOTED_PASS)
        alive = [pass_ for ref in self.passes.alive if (pass_ := ref()) is not None]
        is_sure = len(alive) == 1 and alive[0].stage is not PassStage.DONE
        behind = [noted] if noted is not None else [] if is_sure else passes_behind(node, self)
        if not behind and all(pass_.stage is PassStage.DONE for pass_ in alive):
            # the pass of the last recomputation in this backward: a checkpoint around this one, or beside it
            behind = [pass_ for pass_ in self.backward.resumed[-1:] if batch in (pass_.batch, 1)]
            if not behind and batch is not None:
                # The checkpoint is around the whole model, whose first forward had no gradients, and so no pass. The
                # node keeps the new one in mind, for a second backward on the same graph.
                behind = [self.passes.new(batch)]
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    node.metadata[NOTED_PASS] = behind[0]
        fitting = self.passes.recomputed(batch, behind)
        if len(fitting) == 1:
            self.backward.resumed.append(fitting[0])
            return fitting[0]
        raise complaint(
            self.name_of(module),
            f"a checkpoint computes it again in the backward, with {batch} samples, and "
            + (f"{len(fitting)} earlier forwards had so many" if fitting else "no earlier forward had so many"),
            "one forward that it belongs to",
            "Call backward for each forward before the next one, or give the checkpoint use_reentrant=False.",
        )

    def expand(self, parameter: Tensor, again: Again | None = None) -> Tensor:
        """The parameter as `(B, *shape)`, the same tensor for all its uses in a pass.

        Args:
            parameter: A parameter, or a weight that is computed from parameters.
            again: Computes that weight anew, as `Computed` has it.
        """
        pass_ = self.current_pass
        assert pass_ is not None
        if not parameter.requires_grad:
            return parameter.expand(pass_.batch, *parameter.shape)
        if not parameter.is_leaf:
            computed = Computed(parameter, self, again)
            return ExpandComputed.apply(computed, pass_.batch, *map(self.expand, computed.leaves))  # type: ignore[no-untyped-call,no-any-return]
        owner, version, pointer, expanded = self.expanded.get(parameter, (None, -1, -1, parameter))
        if owner is not pass_ or version != parameter._version or pointer != parameter.data_ptr():
            expanded = Expand.apply(parameter, pass_, self.leaf(parameter), weakref.ref(self))  # type: ignore[no-untyped-call]
            self.expanded[parameter] = (pass_, parameter._version, parameter.data_ptr(), expanded)
        return expanded

    def expand_outside(self, weight: Tensor) -> Tensor:
        """`expand`, for a use of a weight outside of the layers: in the forward that runs, or the last."""
        if self.forward is not None:
            return self.expand(weight)
        home = next((root for ref in self.homes if (root := ref()) is not None), None)
        if home is not None and running_backward() >= 0:
            with Forward(self, home, None, ()):  # in the pass that a checkpoint's forward was in
                return self.expand(weight)
        if self.current_pass is None or self.current_pass.stage is not PassStage.OPEN:
            raise complaint(
                "expanded(weight)",
                "there was no forward since the last backward",
                "a forward of the model, which says how many samples there are",
                "Call the model first, or use it within one_pass(model, batch_size).",
            )
        return self.expand(weight)

    def note_plain_forward(self) -> None:
        """A layer runs without gradients, as a reentrant checkpoint has it: the backward will run it again."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        if running_backward() >= 0:  # a checkpoint inside another one, whose backwards are parts of this one
            self.backward.enter(delivers=False)
            noted = getattr(running_node(), "metadata", {}).get(NOTED_PASS)
            if noted is not None:
                self.backward.resumed.append(noted)
        elif self.forward is not None:
            self.forward.is_awaited = True

    @contextmanager
    def in_general_rule(self, originals: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        """Layers called meanwhile run their plain forward, or on the whole batch with these parameters, if they can."""
        before, self.originals = self.originals, originals
        try:
            yield
        finally:
            self.originals = before

    @contextmanager
    def layout(self, *, batch_first: bool) -> Iterator[None]:
        """Layers called meanwhile have their samples where a module around them says."""
        before, self.settings = self.settings, replace(self.settings, batch_first=batch_first)
        try:
            yield
        finally:
            self.settings = before

    def refuse_outside_use(self, result: Any) -> None:
        """Raises early where a backward will: for a parameter that a result depends on by another way than its rows."""
        ends = [each.grad_fn for each in tensors(result) if isinstance(each, Tensor)]
        for node in graph_of(*ends):
            if isinstance(node, Expand._backward_cls):
                continue
            for parent, _ in node.next_functions:
                leaf: Any = getattr(parent, "variable", None)
                holder = self.holder_of(leaf) if leaf is not None and self.leaves.is_watched(leaf) else None
                if hasattr(holder, "_recorder"):  # no plain one, of which there is more to say
                    error = used_outside(self.name_of(leaf))
                    error.refused_by, error.is_early = holder, True
                    raise error

    # Backward: rows.

    def deliver(self, pass_: Pass, leaf: Leaf, rows: Tensor | None, *, stand_alone: bool = False) -> None:
        """Takes the rows of one parameter; a backward may bring a parameter's rows in several parts.

        Args:
            pass_: The pass they are of.
            leaf: The parameter.
            rows: `(B, *shape)`, or none for a parameter that was frozen after the forward.
            stand_alone: Whether `torch.autograd.grad` asked for the gradient, which does not go to `.grad` then.
        """
        if self.backward.enter(delivers=True):
            self._before_delivery(stand_alone)
        if not stand_alone and pass_.stage is PassStage.OPEN:
            pass_.stage = PassStage.REACHED
        if rows is not None:
            self.store.add(pass_, leaf, rows)

    def _before_delivery(self, stand_alone: bool) -> None:
        """Rows go when the gradient they add up to was cleared, or when the user took them away.

        At the first rows of a backward, before autograd has added anything to any `.grad`: later it could not be told
        what the user had cleared.
        """
        self.store.resume(self.leaves)
        held = self.leaves.with_rows()
        if stand_alone:
            for leaf in held:
                if leaf.was_reset():
                    self._forget(leaf)
            self.store.suspend(self.leaves)
            return
        if self.settings.accumulate_grad:
            left = self._left(held) if held else set()  # nobody asks for their rows: in doubt or not, they hold up none
            self._forget_stale(leaf for leaf in held if leaf not in left)
        else:
            for leaf in held:
                self._forget(leaf)
        self._drop_passes_without_parameters()
        for leaf in self.leaves:
            leaf.note_grad()
            leaf.note_foreign_part()
            if leaf.lacking is not None:
                leaf.lacks_rows()  # looks while `.grad` may still be zero
        self.store.begin()

    def _left(self, leaves: Iterable[Leaf]) -> set[Leaf]:
        """Those of parameters that have left the model, but live on."""
        in_model = {id(parameter) for module in self.modules() for parameter in module._parameters.values()}
        parameters = {leaf: (leaf.as_shown(), leaf.parameter()) for leaf in leaves if leaf.member}
        return {
            leaf
            for leaf, (shown, parameter) in parameters.items()
            if shown is not None and id(shown) not in in_model and id(parameter) not in in_model
        }

    def _drop_passes_without_parameters(self) -> None:
        """Drops the passes that only frozen parameters hold rows of, or those that have left the model."""
        if self.store.held:
            held = self.leaves.with_rows()
            self.store.drop_passes_of(self._left(held).union(leaf for leaf in held if not leaf.is_trainable()))

    def backward_is_over(self, delivered: bool, failed: bool) -> None:
        """All rows of a backward are here, or it has failed on the way."""
        self.passes.backward_is_over()
        if any(entry[0].stage is not PassStage.OPEN for entry in self.expanded.values()):
            self.expanded = {key: entry for key, entry in self.expanded.items() if entry[0].stage is PassStage.OPEN}
        for leaf in self.leaves if failed else ():
            leaf.sent.clear()
            if leaf.was_reset():
                self._forget(leaf)
        if failed and delivered and self.store.suspended is None:
            self.store.undo()
        if len(self.store.held) > 1 and self.store.suspended is None:
            self._drop_passes_without_parameters()
        self.store.complete(self.leaves)
        if self.leaves.sharded:
            for leaf in self.leaves:
                leaf.show_shard()
        if delivered and self.store.suspended is None:
            self.note_grads()

    def note_grads(self) -> None:
        """Keeps in mind each `.grad` as it is now, so that clearing it is seen."""
        for leaf in self.leaves:
            leaf.note_grad()

    @property
    def rows_stand_alone(self) -> bool:
        """Whether the rows shown are those of a `torch.autograd.grad`, and no part of `.grad`."""
        return self.store.suspended is not None

    def drop_outdated_rows(self) -> None:
        """Outside of any backward: takes back what one that failed has left, and rows whose `.grad` was cleared."""
        if running_backward() < 0:
            self.backward.end_unfinished()
            if self.settings.accumulate_grad and not self.rows_stand_alone:
                held = self.leaves.with_rows()
                cleared = [leaf for leaf in held if leaf.was_cleared()]
                others = set(held).difference(cleared)
                self._forget_stale(cleared, beside_held=any(leaf.is_trainable() for leaf in others))
                if cleared:
                    self._drop_passes_without_parameters()

    def note_clipped(self, parameter: Tensor) -> None:
        """Clipping has set `.grad`."""
        leaf = self.leaves.get(parameter)
        if leaf is not None and parameter.grad is not None:
            leaf.clipped, leaf.lacking = (weakref.ref(parameter.grad), parameter.grad._version), None
            leaf.has_more = leaf.has_more and not self.settings.accumulate_grad
            self.store.suspended = None  # rows that stood alone are what `.grad` is made of now

    def is_clipped(self, parameter: Tensor) -> bool:
        """Whether `.grad` is what clipping has set, and no backward has added to it."""
        leaf = self.leaves.get(parameter)
        if leaf is None or leaf.clipped is None or parameter.grad is None:
            return False
        grad, version = leaf.clipped
        return grad() is parameter.grad and (version == parameter.grad._version or not self.settings.accumulate_grad)

    def lacks_rows(self, parameter: Tensor) -> bool:
        """Whether `.grad` has a part whose rows were dropped; with `accumulate_grad=False` only clipping adds."""
        leaf = self.leaves.get(parameter)
        return self.settings.accumulate_grad and leaf is not None and leaf.lacks_rows()

    def forget(self, parameter: Tensor) -> None:
        """Drops the rows of one parameter."""
        leaf = self.leaves.get(parameter)
        if leaf is not None:
            self._forget(leaf)
            leaf.clipped = None
        parameter.grad_sample = None  # type: ignore[attr-defined]
        if self.leaves.sharded and is_shard(parameter):
            for gathered in self.leaves:
                if gathered.location is not None and gathered.location.shard is parameter:
                    self._forget(gathered)

    def _forget_stale(self, leaves: Iterable[Leaf], *, beside_held: bool = False) -> None:
        for leaf in stale(leaves, self.name_of, beside_held=beside_held):
            leaf.clipped, leaf.is_scaled, leaf.has_more = None, False, False
            self._forget(leaf)

    def _forget(self, leaf: Leaf) -> None:
        self.store.drop(leaf)
        leaf.show(None)

    def close(self, leaving: Iterable[nn.Module]) -> None:
        """Takes the hooks off and lets go of the rows, whose graph may lead back here; goes on with what is left.

        Args:
            leaving: The modules that have no use of this recorder any more.
        """
        for leaf in self.leaves:
            if leaf.handle is not None:
                leaf.handle.remove()
            leaf.shown.rows = None
            leaf.sent.clear()
        self.leaves, self.passes = Leaves(), Passes()
        self.expanded.clear()
        self.store.clear()
        leaving = set(leaving)
        self.homes = [home for home in self.homes if (root := home()) is not None and root not in leaving]
        self.watch_all()


def recorder_of(weight: Tensor) -> Recorder | None:
    """The recorder that knows a parameter, or those that a weight was computed from; `None` if nothing does."""
    leaves = [weight] if weight.is_leaf else leaves_of(weight)
    hooks = [hook for leaf in leaves for hook in (leaf._backward_hooks or {}).values()]
    found = [owner for hook in hooks if isinstance(hook, Watch) and isinstance(owner := hook.owner(), Recorder)]
    if not found and weight.requires_grad:  # it was thawed after the last pass began, and is not watched yet
        found = [recorder for recorder in _LIVE if any(recorder.leaves.get(leaf) for leaf in leaves)]
    return next((recorder for recorder in found if recorder.forward is not None), next(iter(found), None))
