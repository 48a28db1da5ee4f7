"""The recorder of a model: it chooses the pass of a forward, expands parameters, and keeps their rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint, named
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import running_backward
from expanded_nn.common.shared import is_parameter
from expanded_nn.common.traced import is_traced, note_recorder
from expanded_nn.recording.backward import Backward, in_transform, keeps_graph, running_node
from expanded_nn.recording.checkpoints import has_learned_to_loop, noted_passes, pass_of_recomputation
from expanded_nn.recording.constants import tables_of
from expanded_nn.recording.escalate import Escalation
from expanded_nn.recording.expand import Computed, Expand, ExpandComputed, Recompute, leaves_of
from expanded_nn.recording.forward import Forward as Forward
from expanded_nn.recording.leaf import Leaf, Leaves, Location, vanishes
from expanded_nn.recording.lift import Lent, Slot
from expanded_nn.recording.linked import linked_pass
from expanded_nn.recording.living import living, note_living
from expanded_nn.recording.order import Order
from expanded_nn.recording.passes import Pass, Passes, PassStage
from expanded_nn.recording.settings import Settings as Settings
from expanded_nn.recording.sharded import holds_back
from expanded_nn.recording.stale import stale
from expanded_nn.recording.store import Store
from expanded_nn.recording.watch import Watch

_ONE_DELIVERY = RLock()


class Recorder:
    """Keeps the passes of one model, expands its parameters and holds their rows.

    Invariants: a parameter is expanded once a pass, unless it is changed in between. A parameter that is expanded is
    watched. Rows are held as long as their gradient is a part of `.grad`.

    Attributes:
        settings: The settings of `per_sample`.
        roots: The outermost modules that share this recorder: the model, or parts of it that were copied.
        forward: The outermost forward that runs.
        general_rule: `None` outside of the general rule: layers make rows. Within its `vmap`: the parameters that the
            `vmap` has replaced, with which a layer may run on the whole batch. Empty: layers run their plain forward.
        passes: Which forwards belong together.
        backward: The backward that runs.
        store: The rows.
        leaves: What is known of each parameter.
        expanded: The expansions of the current pass: parameter -> pass, version, address, `(B, *shape)`.
        escalation: The forwards that start over, with a module sent through the general rule.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.roots: list[weakref.ref[nn.Module]] = []
        self.forward: Forward | None = None
        self.general_rule: Mapping[Slot, Lent] | None = None
        self.leaves = Leaves()
        self.escalation = Escalation()
        self.begin_anew()
        note_living(self)

    def begin_anew(self) -> None:
        """Forgets all passes, rows and expansions."""
        self.passes = Passes()
        self.backward = Backward(self.backward_is_over)
        self.store = Store(self.settings.materialize)
        self.expanded: dict[Tensor, tuple[Pass, int, int, Tensor]] = {}

    def __reduce__(self) -> Any:
        return Recorder, (self.settings,)  # a copied or loaded module joins it by `adopt`

    # The model: whose parameters are watched.

    def adopt(self, module: nn.Module) -> None:
        """Makes a module, with all within it, a part of the model."""
        members = set(module.modules())
        others = [root for root in self.living_roots() if root not in members]
        self.roots = [weakref.ref(root) for root in (*others, module)]
        self.watch_all()
        self.escalation.tables = tables_of(self.modules())
        self.escalation.has_loops = any(map(has_learned_to_loop, self.modules()))  # as a copy remembers
        for member, name, parameter in self._parameters():
            self.leaf_of(parameter, member, name).is_member = True

    def add_member(self, parameter: Tensor) -> None:
        """Notes that a parameter has been put into a module of the model."""
        self.leaf_of(parameter).is_member = True
        if parameter.requires_grad:
            self._watched_leaf(parameter)

    def living_roots(self) -> list[nn.Module]:
        """The roots that are still there."""
        return [root for ref in self.roots if (root := ref()) is not None]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the model, except those that have another recorder now, or that were switched off."""
        return (module for module in modules_in(*self.living_roots()) if vars(module).get("_recorder", self) is self)

    def _parameters(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The parameters of the model, each with the module that holds it and its name there."""
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield module, name, parameter

    def watch_all(self) -> None:
        """Watches every parameter that requires gradients, as it may be used outside of its module."""
        self._forget_lost()
        is_watched = self.leaves.is_watched
        for module, name, parameter in self._parameters():
            # a guest of functional_call is no nn.Parameter
            if parameter.requires_grad and not is_watched(parameter) and is_parameter(parameter):
                self._watched_leaf(parameter, module, name)

    def _watched_leaf(self, parameter: Tensor, module: nn.Module | None = None, name: str = "") -> Leaf:
        """The leaf of a parameter that requires gradients; it is watched from now on."""
        leaf = self.leaf_of(parameter, module, name)
        if leaf.handle is None:
            Watch.put(self, leaf, parameter)
        return leaf

    def _forget_lost(self) -> None:
        if self.leaves.lost:
            self.store.drop(self.leaves.forget_lost())

    def leaf_of(self, parameter: Tensor, module: nn.Module | None = None, name: str = "") -> Leaf:
        """The leaf of a parameter, a new one if need be; `module` holds it under that name, if it is at hand."""
        leaf = self.leaves.get(parameter)
        if leaf is None:
            self._forget_lost()  # a parameter that was deleted may have had the same id
            leaf = self.leaves.add(parameter)
            leaf.scales_rows = self.settings.loss_reduction == "mean"
            if module is None and self.leaves.sharded:
                held = ((holder, own_name) for holder, own_name, own in self._parameters() if own is parameter)
                module, name = next(held, (None, ""))
            if module is not None:  # where its shard will be found again after the forward
                leaf.location = Location(weakref.ref(module), name)
        return leaf

    def name_of(self, member: nn.Module | Tensor) -> str:
        """The qualified name of a parameter, or of a module with its class; for errors."""
        roots = self.living_roots()
        if isinstance(member, nn.Module):
            names = (name for root in roots for name, module in root.named_modules() if module is member)
            return named(next(names, ""), member)
        names = (name for root in roots for name, parameter in root.named_parameters() if parameter is member)
        return next(names, "a parameter")

    def holder_of(self, parameter: Tensor) -> nn.Module | None:
        """The module of the model that holds the parameter itself."""
        return next((module for module, _, own in self._parameters() if own is parameter), None)

    # Forward: passes and expansions.

    def outermost_forward(self, module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `function` as the outermost forward: it begins a pass, or joins the last one."""
        call = self.passes.no_grad_forward.call  # in which gradients were switched on
        forward = Forward(self, *(call or (module, module.samples_in(*args, **kwargs), (args, kwargs))))
        if module.calls_others:
            forward.order = Order(self, forward.inputs)  # each time: no forward has to do what the last one did
        with forward:
            with nullcontext() if forward.order is None else forward.order:
                result = function(*args, **kwargs)
            forward.finish(forward.module, result)
        return result

    def refuse_other_thread(self, module: nn.Module) -> None:
        """Raises if another thread is in the middle of a forward, whose pass this one would share."""
        if self.forward is not None and self.forward.is_of_other_thread:
            raise complaint(
                self.name_of(module),
                "another thread is in the middle of a forward of this model",
                "one thread at a time",
                "Give each thread a model of its own: copy.deepcopy(model).",
            )

    @property
    def order(self) -> Order | None:
        """What looks at the order of the samples between the layers of the forward that runs."""
        return None if self.forward is None else self.forward.order

    @property
    def current_pass(self) -> Pass | None:
        """The pass of the forward that runs; otherwise the one that the next forward may join."""
        return self.passes.last if self.forward is None else self.forward.own_pass

    @contextmanager
    def one_pass(self, module: nn.Module, batch: int) -> Iterator[None]:
        """Makes all calls meanwhile one pass of `batch` samples; inside of a forward they belong to its pass."""
        self.refuse_other_thread(module)
        if self.forward is None:
            with Forward(self, module, batch, (), is_one_pass=True) as forward:
                forward.order = Order(self)
                with forward.order:
                    yield
        elif self.forward.own_pass.batch == batch:
            yield
        else:
            raise complaint(
                "one_pass",
                f"batch_size is {batch}, inside of a forward of {self.forward.own_pass.batch} samples",
                "the same number of samples",
                "Enter one_pass outside of the other forward, or leave it out.",
            )

    def choose_pass(self, forward: Forward) -> Pass:
        """The pass that a forward belongs to, a new one if need be."""
        module, batch = forward.module, forward.batch
        note_recorder(self)
        if running_backward() >= 0:
            return pass_of_recomputation(self, module, batch)
        self.backward.end_unfinished()
        self._refuse_held_back()
        if in_transform():
            raise complaint(
                self.name_of(module),
                "a transform of torch.func (grad, vmap, jvp, ...), or forward-mode differentiation, is applied to a "
                "model in per-sample mode",
                "one of the two",
                "Switch per_sample(False) for the transform; its functions see the plain torch.nn model then.",
            )
        forward.refuse_nodes()
        last = self.passes.last
        if batch is None:
            if last is not None and last.stage is PassStage.OPEN:
                return last
            raise complaint(
                self.name_of(module),
                "no argument is a tensor with a dimension",
                "a tensor with a dimension for the samples",
                "Give tensors, alone or in tuples, dicts or dataclasses, as a model with parameters of its own needs. "
                "Else say how many samples there are: one_pass(model, batch_size), or per_sample(batch_size=...).",
            )
        if forward.is_one_pass:
            pass_ = self.passes.new(batch)
        else:
            pass_ = linked_pass(self, module, forward.inputs, batch) or self.passes.joined_or_new(batch)
            if pass_.stage is PassStage.OPEN:
                self.passes.last = pass_
        self.passes.without_rows = None
        if pass_ is not last:
            self.watch_all()
            self.expanded.clear()
            held = self.leaves.with_rows()
            if held and all(leaf.grad is None for leaf in held):  # as after optimizer.zero_grad()
                self.drop_outdated_rows()  # before the forward needs the memory
        return pass_

    def _refuse_held_back(self) -> None:
        """Raises where FSDP holds gradients back: whether `.grad` was cleared cannot be seen then."""
        if self.leaves.sharded and self.settings.accumulate_grad and any(map(holds_back, self.modules())):
            raise complaint(
                "The gradients of a model sharded by FSDP",
                "they are held back, set_requires_gradient_sync(False) or set_requires_all_reduce(False), and not in "
                ".grad yet",
                "gradients in .grad, which tells whether the rows are a part of it",
                "Say per_sample(accumulate_grad=False), with which clipping alone adds to .grad and there is nothing "
                "to hold back; or leave the synchronization on.",
            )

    def expand(self, parameter: Tensor, recompute: Recompute | None = None) -> Tensor:
        """A parameter as `(B, *shape)`, one tensor for all uses in a pass; or a weight computed from parameters.

        `recompute` is that of `Computed`: it computes such a weight from other values of the parameters.
        """
        pass_ = self.current_pass
        assert pass_ is not None
        if not parameter.requires_grad:
            return parameter.expand(pass_.batch, *parameter.shape)
        if not parameter.is_leaf:
            computed = Computed(parameter, self, recompute)
            return ExpandComputed.apply(computed, pass_.batch, *map(self.expand, computed.leaves))  # type: ignore[no-untyped-call,no-any-return]
        # `parameter.data = ...` changes the address and not the version, an optimizer's step the version alone
        former_pass, version, pointer, expanded = self.expanded.get(parameter, (None, -1, -1, parameter))
        if former_pass is not pass_ or version != parameter._version or pointer != parameter.data_ptr():
            expanded = Expand.apply(parameter, pass_, self._watched_leaf(parameter), weakref.ref(self))  # type: ignore[no-untyped-call]
            self.expanded[parameter] = (pass_, parameter._version, parameter.data_ptr(), expanded)
        return expanded

    def expand_outside(self, weight: Tensor) -> Tensor:
        """`expand`, for a use of a weight outside of the layers: in the forward that runs, or after the last one."""
        if self.order is not None:
            self.order.note_outside_use()
        if self.forward is not None:
            self.refuse_other_thread(self.forward.module)
            return self.expand(weight)
        roots, pass_, is_in_backward = self.living_roots(), self.current_pass, running_backward() >= 0
        is_over = pass_ is None or pass_.stage is not PassStage.OPEN
        # in a backward the pass is that of the forward that a checkpoint runs again
        frozen_batch = None if is_in_backward else self.passes.without_rows
        if roots and (is_in_backward or (is_over and frozen_batch is not None)):
            with Forward(self, roots[0], frozen_batch, ((), {})):
                return self.expand(weight)
        if pass_ is None or is_over:
            raise complaint(
                "expanded(weight)",
                "there was no forward since the last backward",
                "a forward of the model, which says how many samples there are",
                "Call the model first, or use it within one_pass(model, batch_size).",
            )
        self.passes.look_for_broadcast(pass_)
        return self.expand(weight)

    def note_plain_forward(self) -> None:
        """Notes a layer's forward without gradients: in a reentrant checkpoint, the backward will run it again."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        if running_backward() >= 0:  # a checkpoint inside another one, whose backward is a part of the running one
            self.backward.enter(delivers=False)
            self.backward.resumed = noted_passes(running_node()).get(self.passes) or self.backward.resumed
        elif self.forward is not None:
            self.forward.will_run_again = True

    def in_general_rule(self, lent: Mapping[Slot, Lent]) -> AbstractContextManager[None]:
        """Makes layers run their plain forward or, if they can, on the whole batch with these parameters."""
        return meanwhile(self, general_rule=lent)

    def layout(self, *, batch_first: bool) -> AbstractContextManager[None]:
        """Sets `batch_first` for the layers that a module with a layout of its own calls."""
        return meanwhile(self, settings=replace(self.settings, batch_first=batch_first))

    # Backward: rows.

    def deliver(self, pass_: Pass, leaf: Leaf, rows: Tensor | None, *, stand_alone: bool = False) -> None:
        """Takes the rows of one parameter; a backward may deliver them in several parts.

        `rows` is `None` for a parameter that was frozen after the forward. With `stand_alone` the rows are those of
        `torch.autograd.grad`, whose sum does not go to `.grad`.
        """
        with _ONE_DELIVERY:  # a backward has a thread for each device
            if self.backward.enter(delivers=True):
                self._before_delivery(pass_, stand_alone)
            if not stand_alone and pass_.stage is PassStage.OPEN:
                pass_.stage, pass_.may_get_backward = PassStage.REACHED, keeps_graph()
            if rows is not None:
                self.store.add(pass_, leaf, rows)

    def _before_delivery(self, pass_: Pass, stand_alone: bool) -> None:
        """Drops the rows whose gradient was cleared, and those whose `grad_sample` the user has set.

        It runs before the first rows of a backward are added. Autograd has not added to any `.grad` yet, so that one
        that the user has cleared is still seen as such.
        """
        self.store.resume(self.leaves)
        held = self.leaves.with_rows()
        if stand_alone:
            self._drop([leaf for leaf in held if leaf.was_reset()])
            self.store.suspend(self.leaves)
            return
        self._refuse_held_back()
        if self.settings.accumulate_grad:
            self._drop_stale(self.rows_in_question(held))
        else:
            self.store.replaces = pass_ in self.store.held
            self._drop(held)
        self._drop_passes_without_parameters()
        for leaf in self.leaves:
            leaf.lacks_rows()  # looks now whether `.grad` was cleared: this backward is about to add to it
            leaf.note_grad()
            if self.settings.accumulate_grad:
                leaf.note_foreign_part()
        self.store.begin()

    def rows_in_question(self, held: Sequence[Leaf]) -> list[Leaf]:
        """The leaves whose rows may be stale; not those of parameters that have left the model.

        Nobody asks for the rows of these: a doubt about them is no error, and they tell nothing of the others' `.grad`.
        """
        with_grad = [leaf for leaf in held if leaf.grad is not None]
        departed = self.departed(with_grad) if with_grad else set()
        return [leaf for leaf in held if leaf not in departed]

    def departed(self, leaves: Iterable[Leaf]) -> set[Leaf]:
        """The leaves of parameters that have left the model, but live on."""
        in_model = {id(parameter) for _, _, parameter in self._parameters()}
        members = (leaf for leaf in leaves if leaf.is_member and leaf.visible_parameter() is not None)
        return {leaf for leaf in members if in_model.isdisjoint({id(leaf.visible_parameter()), id(leaf.parameter())})}

    def _drop_passes_without_parameters(self) -> None:
        """Drops the passes that only frozen or departed parameters hold rows of."""
        if self.store.held:
            held = self.leaves.with_rows()
            self.store.drop_passes_of(self.departed(held).union(leaf for leaf in held if not leaf.is_trainable()))

    def backward_is_over(self, delivered: bool, failed: bool) -> None:
        """Ends a backward, which has delivered all its rows, or has failed before."""
        self.passes.backward_is_over()
        self.expanded = {key: entry for key, entry in self.expanded.items() if entry[0].stage is PassStage.OPEN}
        if failed:
            for leaf in self.leaves:
                leaf.expected.clear()
            self._drop([leaf for leaf in self.leaves if leaf.was_reset()])
        if not self.rows_stand_alone:
            if failed and delivered:
                self.store.give_up(self.leaves)
            if len(self.store.held) > 1:
                self._drop_passes_without_parameters()
        self.store.complete(self.leaves)
        if self.leaves.sharded:
            for shard in [leaf.publish_on_shard() for leaf in self.leaves]:
                if shard is not None:
                    self.leaf_of(shard)  # clipping notes there what it has set
        if delivered and not self.rows_stand_alone:
            self.note_grads(after_backward=not failed)

    def note_grads(self, clipped: Collection[Leaf] = (), *, after_backward: bool = False) -> None:
        """Notes each `.grad`, so that a later change is seen; clipping has just set those of the leaves `clipped`."""
        for leaf in self.leaves:
            leaf.note_grad(after_backward=after_backward)
        for leaf in clipped:
            leaf.note_clipping()
            leaf.notes.has_foreign_part &= not self.settings.accumulate_grad
        if clipped:
            self.store.suspended = None  # `.grad` is the clipped sum of the rows that stood alone

    @property
    def rows_stand_alone(self) -> bool:
        """Whether `grad_sample` has the rows of a `torch.autograd.grad`, which are no part of `.grad`."""
        return self.store.suspended is not None

    def drop_outdated_rows(self) -> None:
        """Drops the rows of a backward that failed, and those whose `.grad` was cleared; not within a backward."""
        if running_backward() >= 0:
            return
        self.backward.end_unfinished()
        if not self.settings.accumulate_grad or self.rows_stand_alone:
            return
        held = self.leaves.with_rows()
        cleared = [leaf for leaf in held if leaf.was_cleared()]
        if not cleared and not is_traced() and all(leaf.grad is not None and vanishes(leaf.grad) for leaf in held):
            cleared = held  # by `.data`, which no version tells
        if cleared:
            were_cleared, in_question = set(cleared), self.rows_in_question(held)
            others = (leaf for leaf in in_question if leaf not in were_cleared)
            cleared = [leaf for leaf in in_question if leaf in were_cleared]
            self._drop_stale(cleared, beside_held=any(leaf.is_trainable() for leaf in others))
            self._drop_passes_without_parameters()
            self.store.complete(self.leaves)

    def is_clipped(self, parameter: Tensor) -> bool:
        """Whether `.grad` is what clipping has set, and no backward has added to it."""
        leaf, grad = self.leaves.get(parameter), parameter.grad
        if leaf is None or leaf.notes.clipped is None or leaf.notes.clipped.tensor() is not grad or grad is None:
            return False
        return leaf.notes.clipped.is_as_it_was(grad) or not self.settings.accumulate_grad

    def lacks_rows(self, parameter: Tensor) -> bool:
        """Whether `.grad` has a part whose rows were dropped; never with `accumulate_grad=False`."""
        leaf = self.leaves.get(parameter)
        return self.settings.accumulate_grad and leaf is not None and leaf.lacks_rows()

    def drop(self, parameters: Sequence[Tensor], *, grads: bool = False) -> None:
        """Drops the rows of parameters, and their `.grad` if `grads`."""
        note_recorder(self)
        leaves = self.leaves.clear(parameters, grads=grads)
        if self.leaves.sharded:  # the rows are held by the leaves of what FSDP had gathered from them
            shards = set(map(id, parameters))
            leaves |= {leaf for leaf in self.leaves if leaf.location and id(leaf.location.shard) in shards}
            self._drop(leaves)
        elif len(leaves) == len(self.leaves.by_id):  # saves 2.5 us of a compiled step's 55
            self.store.drop_every_pass()
        elif self.store.drop(leaves):
            self.store.complete(self.leaves)

    def _drop_stale(self, leaves: Iterable[Leaf], *, beside_held: bool = False) -> None:
        stale_leaves = stale(leaves, self.name_of, beside_held=beside_held)
        for leaf in stale_leaves:
            leaf.notes.clipped, leaf.notes.is_scaled, leaf.notes.has_foreign_part = None, False, False
        self._drop(stale_leaves)

    def _drop(self, leaves: Collection[Leaf]) -> None:
        self.store.drop(leaves)
        for leaf in leaves:
            leaf.publish(None)

    def close(self, leaving: Iterable[nn.Module]) -> None:
        """Removes hooks and drops all rows, whose graph may lead back here; the modules that are not `leaving` stay."""
        for leaf in self.leaves:
            if leaf.handle is not None:
                leaf.handle.remove()
            leaf.publish(None)
            leaf.expected.clear()
        self.leaves = Leaves()
        self.begin_anew()
        leaving = set(leaving)
        self.roots = [weakref.ref(root) for root in self.living_roots() if root not in leaving]
        self.watch_all()


def modules_in(*roots: nn.Module) -> dict[nn.Module, None]:
    """Some modules and all within them, each once."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [*reversed(roots)]
    while waiting:  # takes a third of the time of torch's `modules()`
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting += reversed(module._modules.values())
    return found


def recorder_of(weight: Tensor) -> Recorder | None:
    """The recorder of a parameter, or of those that a weight was computed from; of several the one in a forward."""
    leaves = [weight] if weight.is_leaf else leaves_of(weight)
    hooks = (hook for leaf in leaves for hook in (leaf._backward_hooks or {}).values())
    watches = [hook for hook in hooks if isinstance(hook, Watch)]
    recorders = [recorder for watch in watches if isinstance(recorder := watch.recorder(), Recorder)]
    if not recorders and weight.requires_grad:  # unfrozen after the last pass began, it is not watched yet
        recorders = [recorder for recorder in living() if any(recorder.leaves.get(leaf) for leaf in leaves)]
    return next((recorder for recorder in recorders if recorder.forward is not None), next(iter(recorders), None))
