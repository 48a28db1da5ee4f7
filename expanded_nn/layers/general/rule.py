"""The general rule, for any module with parameters of its own.

A call goes this way (`General.expanded_forward`):

1. Its arguments are read: where do the samples stand in each (`reading.py`)?
2. If they stand first, the forward runs on the whole batch (`whole_batch.py`). In place of the parameters it has
   tensors with a value per sample; the table in `whole.py` says what may be done with them. Where that does not do, the
   graph is asked whose each row is, as of a forward that folds its samples (`folded_batch.py`). The result counts only
   if a comparison with step 3 was right, for this kind of call and this way through the forward (`trial.py`).
3. Otherwise each sample goes through the forward alone (`_sample_by_sample`), under `vmap` or in a loop. The first
   result for a kind of call is compared with that of the plain forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_unflatten

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import FOLDED, data_in
from expanded_nn.common.containers import flatten, tensors_of
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import running_backward, uncounted, unseen
from expanded_nn.common.rounding import near
from expanded_nn.common.steady import Undo
from expanded_nn.common.traced import TraceError, is_traced, refuse_values, wait_for_values
from expanded_nn.core import cost
from expanded_nn.layers.general.called import Called, called, once_per_sample
from expanded_nn.layers.general.folded_batch import FoldedBatch
from expanded_nn.layers.general.left import close, put_in_place
from expanded_nn.layers.general.mapped import NOT_OF_THE_FORWARD, Mapper, left_together
from expanded_nn.layers.general.plain import Plain
from expanded_nn.layers.general.reading import read
from expanded_nn.layers.general.told import Told
from expanded_nn.layers.general.trial import Trial
from expanded_nn.layers.general.whole import reads_of_its_own
from expanded_nn.layers.general.whole_batch import WholeBatch
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.layout import refusal
from expanded_nn.recording.callers import runs_a_plain_forward_again
from expanded_nn.recording.forward import InputNotes
from expanded_nn.recording.lift import Lent, Slot, parameters_of, swapped, with_tensors
from expanded_nn.recording.recorder import Recorder, modules_in
from expanded_nn.recording.sharded import is_sharded

_NOTHING_LENT: Mapping[Slot, Lent] = {}
PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)  # their parameters belong to the module that holds them


class General(Expanded):
    """A module of the user's own, whose forward runs on the whole batch, or for each sample alone as a batch of one.

    The parameters of the module, of its children and of its parameter lists are all expanded, and the forward may
    use them in any way. The forward runs on the whole batch where it uses its own parameters in ways that are known,
    under `vmap` otherwise, which expanded layers among the children leave. A tensor argument with B rows is split into
    samples; any other is shared by all. Every tensor that the forward returns has the samples where the arguments have
    them.
    """

    calls_others: ClassVar[bool] = True
    compares_first: ClassVar[bool] = True
    _trials: Told | None = None  # made when `_told` is first asked for
    _alone: ClassVar[bool] = False  # whether modules of the class go through the rule with all that is in them
    # how its forward may run on the whole batch, the fastest first: the next one is tried where one cannot
    _on_whole_batch: ClassVar[Sequence[type[WholeBatch]]] = (WholeBatch, FoldedBatch)
    _loops: ClassVar[bool] = False  # whether their samples go in a loop, as `vmap` fails
    _ranks: dict[str, int] | None = None  # own parameter, in lists too, -> its number of dimensions at conversion

    @property
    def _told(self) -> Told:
        if self._trials is None:
            vars(self)["_trials"] = Told()
        return cast(Told, self._trials)

    def goes_in_a_loop(self) -> bool:
        """Whether the samples go through it one after the other, as `vmap` fails in it."""
        return self._loops or (self._learned is not None and self._learned.loops)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if self._ranks is None or param is None or self._parameters[name] is not param:
            return
        if self._ranks.get(name) != param.dim():
            self._ranks[name] = param.dim()
            vars(self).pop("_trials", None)  # of the parameter that was there

    def note_ranks(self) -> None:
        """Notes how many dimensions the parameters have now, as long as none has a batch dimension."""
        lists = [(f"{name}.", child) for name, child in self.named_modules() if isinstance(child, PARAMETER_LISTS)]
        vars(self)["_ranks"] = {
            prefix + name: parameter.dim()
            for prefix, module in [("", self), *lists]
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def _own_batch(self) -> int | None:
        return next((guest.shape[0] for guest in self._guests()), None)

    def _guests(self) -> list[Tensor]:
        """The own parameters that the user has replaced by tensors with a batch dimension."""
        return [parameter for _, parameter, rank in self._own() if parameter.dim() == rank + 1]

    def _has_own_rows(self) -> bool:
        """Whether the module's own parameters ask for gradients, or its class was sent here as a whole."""
        own = any(parameter.requires_grad or parameter.dim() > rank for _, parameter, rank in self._own())
        return own or self.always_converted or parametrize.is_parametrized(self) or self._was_looked_at()

    def _was_looked_at(self) -> bool:
        """Whether it went through the rule before its own parameters were frozen: its forward may use those within."""
        is_known = self._trials is not None and bool(self._trials.compared)
        return is_known and any(parameter.requires_grad for parameter in self.parameters())

    def _own(self) -> list[tuple[Slot, Tensor, int]]:
        """The parameters of its own, those in lists included: where they are, and their number of dimensions."""
        own: list[tuple[Slot, Tensor, int]] = []
        for name, rank in (self._ranks or {}).items():
            module, leaf = cast(nn.Module, self), name
            # not by `get_submodule`: a list may have the name of a method, and a parameter one with dots
            while leaf not in module._parameters and (child := module._modules.get(leaf.partition(".")[0])) is not None:
                module, leaf = child, leaf.partition(".")[2]
            parameter = module._parameters.get(leaf)
            if parameter is not None:
                own.append(((module, leaf), parameter, rank))
        return own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result, recorder = super().forward(*args, **kwargs), self._recorder
        if recorder is None or recorder.forward is None or recorder.general_rule is not None or torch.is_grad_enabled():
            return result
        if not self._has_own_rows() or recorder.forward.is_of_other_thread:
            return result
        # a reentrant checkpoint's first forward: of the shapes that the second one will have
        leaves, structure = flatten(result)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                whole = once_per_sample(leaf, self._dim_of(leaf), self.pass_batch_size)
                leaves[place] = leaf if whole.shape == leaf.shape else whole.clone()
        return tree_unflatten(leaves, structure)

    def expanded_forward(self, *args: Any, **kwargs: Any) -> Any:
        with unseen():  # what is asked here is no part of the forward
            has_own_rows = self._has_own_rows()
            if has_own_rows:
                self._refuse_shards_within()
        if not has_own_rows:
            return self._plain_forward(*args, **kwargs)  # its children see to theirs
        if self._holds_the_only_sample(args, kwargs):
            return self._of_the_only_sample(args, kwargs)
        if running_backward() >= 0 and not is_traced() and runs_a_plain_forward_again():
            return self._computed_again(args, kwargs)
        return self._of_samples_in(args, kwargs)

    def _of_samples_in(self, args: Any, kwargs: Any) -> Any:
        """The result for all samples, with a graph for the rows."""
        call = read(self, args, kwargs)
        with reads_of_its_own():
            result = self._of_the_whole_batch(call)
            if result is NotImplemented:
                result = self._sample_by_sample(call)
            else:
                result = contiguous_as_plain(result, self._told.compared[call.kind].orders)
        order = None if self._recorder is None else self._recorder.order
        if order is not None and call.kind in self._told.compared:
            with unseen():
                order.note_layout(self, tensors_of(result), self._told.compared[call.kind].dims)
        result = put_in_place(self, result)
        close(self, left_together(self, call))
        return result

    def _of_the_whole_batch(self, call: Called) -> Any:
        """The result of a forward on the whole batch; `NotImplemented` if there is none."""
        for kind in self._on_whole_batch:
            whole = kind(self, call)
            result = whole.result()
            if result is not NotImplemented or not whole.ways.is_wrong:
                return result
        return NotImplemented

    def _computed_again(self, args: Any, kwargs: Any) -> Any:
        """The result, in a reentrant checkpoint whose first forward was the plain one.

        Raises:
            PerSampleError: If that has drawn other random numbers, so that the loss is not of this result.
        """
        holders = [*self.modules(), args, kwargs]
        before = RandomStates(holders)
        result = self._of_samples_in(args, kwargs)
        after = RandomStates(holders)
        if not before.restore():
            return result
        with unseen(), self._unnoticed():
            plain = Plain(self, (args, kwargs))(hooks=True, draws=True)
            differs = after.restore()
            given = [leaf.detach() for leaf in tensors_of(result)]
            if differs or len(plain) != len(given) or not all(map(near, plain, given)):
                raise complaint(
                    self.qualified_name,
                    "within a reentrant checkpoint it draws random numbers for each sample, and has drawn them in "
                    "another way in the checkpoint's first forward, which has no gradients",
                    "the same numbers both times",
                    "Call checkpoint(..., use_reentrant=False).",
                )
        return result

    def _holds_the_only_sample(self, args: Any, kwargs: Any) -> bool:
        """Whether all rows are of one sample, as the nodes of a graph are, since `batch_size=1` says so."""
        if self._recorder is None or self._recorder.settings.batch_size != 1 or self.pass_batch_size != 1:
            return False
        first = next(data_in((args, kwargs)), None)
        return first is not None and first.dim() > 0 and first.shape[self._dim_of(first)] != 1

    def _of_the_only_sample(self, args: Any, kwargs: Any) -> Any:
        """What the plain forward gives, with the parameters of that sample."""
        originals, expanded, _ = self._expanded_parameters()
        of_it = {slot: weight.squeeze(0) for slot, weight in zip(originals, expanded, strict=True)}
        with swapped(of_it, self.modules()):
            return self._plainly(args, kwargs)

    def _expanded_parameters(self) -> tuple[dict[Slot, Tensor], list[Tensor], set[int]]:
        """The parameters of the module and of all within it; the same as `(B, *shape)`; and the ids of guests."""
        originals = parameters_of(self.modules())
        with unseen():
            within = [module for module in self.modules() if isinstance(module, General)]
            guests = {id(guest) for module in within for guest in module._guests()}
            return originals, [self._expanded_of(*slot, own, guests) for slot, own in originals.items()], guests

    def _error_of(self, call: Called) -> Exception | None:
        """The error of a comparison with the plain forward where the arguments are read so; `None` if they agree."""
        try:
            with RandomStates([*self.modules(), call.args, call.kwargs]), self._unnoticed():
                mapper = self._mapper(call)
                if not mapper.guests:
                    Trial(mapper).compared(with_derivatives=torch.is_grad_enabled())
                return None
        except NOT_OF_THE_FORWARD:
            raise
        except Exception as error:
            return error

    def _sample_by_sample(self, call: Called) -> Any:
        """What the forward gives each sample alone; the first call of a kind is compared with the plain forward."""
        call.refuse_changes(self)
        mapper, told, known = self._mapper(call), self._told, self._told.compared
        if call.batch == 0:
            return mapper.without_samples()
        # another value may lead the forward another way, or tell that rows are another sample's: compared at each call
        reason = self._why_by_values(call)
        if reason is not None:
            if cost.is_symbol(call.batch):  # with a size of its own it may run on the whole batch
                raise TraceError(reason)
            refuse_values(reason)
        if mapper.guests:  # there is no plain forward to compare with
            mapper.counts = True
            return mapper(call.leaves, thorough=False).result()
        reduces = call.kind in known and known[call.kind].reduces
        if reduces:
            refuse_values(
                f"{self.qualified_name} returns a mean or a sum over the samples, compared with theirs at each call "
                "(return a number for each sample, and reduce outside of it)"
            )
        is_known = call.kind in known and not (reason or reduces or told.lacks_derivatives(call))
        if not is_known:
            wait_for_values("a module of the general rule is compared with its plain forward first")
        trial = None if is_known else Trial(mapper)
        mapper.counts = True
        before = Undo([*modules_in(self)]) if is_known and told.leaves_something and not is_traced() else None
        try:
            with trial.by_samples() if trial else before.updates if before else nullcontext():
                mapped = mapper(call.leaves, thorough=trial is not None)
        except PerSampleError as error:
            if trial is not None or not error.by_keeping:
                raise
            return self._in_another_way(call, before)
        if trial is not None:
            with self._unnoticed():
                trial.told(mapped)
        elif not known[call.kind].fits(mapped):
            return self._in_another_way(call, before)
        if before is not None:
            told.leaves_something = before.has_changed()
        compared = known[call.kind]
        if not compared.alike:
            self._refuse_square(call.inputs[1:], call.batch)
        return mapped.with_samples_in(compared.dims).laid_out(compared.orders).result()

    def _why_by_values(self, call: Called) -> str | None:
        """Why each call is compared, and a graph cannot have what it does; `None` where neither is so."""
        if self.goes_in_a_loop():
            how = "one by one, in a loop"
        elif FOLDED in call.dims and not call.is_surely_folded:
            how = "with several rows of each in an argument"
        elif call.kind in self._told.failed:
            how = "alone, as on the whole batch they have given something else"
        else:
            return None
        if self._alone and any(ways.known for ways in self._told.ways.values()):
            return f"what {self.qualified_name} does with the whole batch depends on values"
        return f"the samples go through {self.qualified_name} {how}"

    def _in_another_way(self, call: Called, before: Undo | None) -> Any:
        """The same, once the forward has gone another way than those that were compared."""
        if before is not None:
            before.put_back()
        self._told.leaves_something = True  # until the next run tells
        del self._told.compared[call.kind]
        return self._sample_by_sample(call)

    def _mapper(self, call: Called) -> Mapper:
        self._refuse_backward_hooks()
        return Mapper(self, call, *self._expanded_parameters())

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """For comparisons: layers' notes are dropped, and a checkpoint around does not count what is saved."""
        forward = None if self._recorder is None else self._recorder.forward
        with nullcontext() if forward is None else meanwhile(forward, notes=InputNotes()), uncounted():
            yield

    def _refuse_square(self, others: list[Tensor], batch: int) -> None:
        for tensor in others:
            if batch > 1 and tensor.shape == (batch, batch):
                raise refusal(
                    self,
                    f"an argument has shape {tuple(tensor.shape)}, one row per sample or a matrix that all share",
                    "an argument that can be read in one way only",
                    "Say that all share it: model(x, shared_by_all(matrix)); or make it a buffer.",
                )

    def _plainly(self, args: Any, kwargs: Any, lent: Mapping[Slot, Lent] = _NOTHING_LENT) -> Any:
        """What the plain forward gives; expanded layers within run theirs, or, with the parameters `lent`, leave it."""
        with nullcontext() if self._recorder is None else self._recorder.in_general_rule(lent):
            return self._plain_forward(*args, **kwargs)

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        return self._plain_forward(*args, **kwargs)  # each sample is alone already; its layers leave the `vmap`

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, super(Expanded, self).forward, args, kwargs)

    def _expanded_of(self, module: nn.Module, name: str, parameter: Tensor, guests: set[int]) -> Tensor:
        if id(parameter) in guests or (isinstance(module, Expanded) and module._is_batched(name, parameter)):
            return parameter
        if self._recorder is None or not torch.is_grad_enabled():
            return parameter.expand(self.pass_batch_size, *parameter.shape)
        return self._recorder.expand(parameter)

    def _dim_of(self, tensor: Tensor) -> int:
        return self._samples_dim if tensor.dim() > 1 else 0

    def _refuse_shards_within(self) -> None:
        """Raises if FSDP shards a module within: its hooks gather parameters, and comparisons do not call them."""
        sharded = self._recorder is not None and self._recorder.leaves.sharded
        within = [name for name, module in self.named_modules() if name and is_sharded(module)] if sharded else ()
        if within:
            raise refusal(
                self,
                f"it has parameters of its own, or its samples go through it alone, and FSDP shards {within[0]!r} by "
                "itself, which is within it",
                "a module whose parameters are gathered together",
                f"Shard the {type(self).__name__} as a whole, fully_shard(it), and not the modules within it.",
            )

    def _refuse_backward_hooks(self) -> None:
        for name, module in self.named_modules():
            if module is not self and (module._backward_hooks or module._backward_pre_hooks):
                raise complaint(
                    self.qualified_name,
                    f"its child {name!r} has a full backward hook, which a vmap does not call",
                    "no such hook inside a module with parameters of its own",
                    "Take the hook off, or hook the tensors (register_hook) outside of the module.",
                )


def contiguous_as_plain(result: Any, orders: Sequence[tuple[int, ...]]) -> Any:
    """A forward's result on the whole batch, contiguous where the plain one was, by its `memory_order`."""
    tensors = [result] if type(result) is Tensor else tensors_of(result)
    with unseen():
        pairs_of_orders = zip(tensors, orders, strict=True)
        lacking = [order == tuple(range(x.dim())) and not x.is_contiguous() for x, order in pairs_of_orders]
    if not any(lacking):
        return result
    pairs = zip(tensors, lacking, strict=True)
    return with_tensors(*flatten(result), [x.contiguous() if lacks else x for x, lacks in pairs])
