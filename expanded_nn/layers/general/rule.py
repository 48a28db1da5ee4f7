"""The general rule, for any module with parameters of its own.

A call goes this way (`General.expanded_forward`):

1. Its arguments are read: where do the samples stand in each (`_called`)?
2. If they stand first, the forward runs on the whole batch (`_on_whole_batch`). In place of the parameters it has
   tensors with a value per sample; the table in `whole.py` says what may be done with them. The result counts only if a
   comparison with step 3 was right, for this kind of call and this way through the forward (`trial.py`).
3. Otherwise each sample goes through the forward alone (`_sample_by_sample`), under `vmap` or in a loop. The first
   result for a kind of call is compared with that of the plain forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_unflatten

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import FOLDED, batch_dim, data_in, has_derivatives, is_like_a_state
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import is_of_checkpoint, running_backward, uncounted, unseen
from expanded_nn.common.steady import RandomStates
from expanded_nn.common.traced import FirstEager, OnlyEager, is_traced, refuse_values, wait_for_values
from expanded_nn.core import cost
from expanded_nn.layers.general.gradients import Verdict
from expanded_nn.layers.general.mapped import Called, Mapper, flatten, once_per_sample
from expanded_nn.layers.general.opened import called, opened
from expanded_nn.layers.general.owners import Owners
from expanded_nn.layers.general.trial import NO_WAYS, Told, Trial, Way, Ways
from expanded_nn.layers.general.turns import on_whole_batch
from expanded_nn.layers.general.whole import Run, reads_of_its_own
from expanded_nn.modules.base import Expanded
from expanded_nn.modules.layout import all_in_one_row, holds_all_samples, note_input, refuse_square
from expanded_nn.recording.expand import comes_from_rows
from expanded_nn.recording.forward import InputNotes
from expanded_nn.recording.lift import Lent, Slot, swapped
from expanded_nn.recording.recorder import Recorder
from expanded_nn.recording.sharded import is_sharded

# what a forward on the whole batch raises, but not because of the batch
_NOT_OF_THE_FORWARD = (torch.OutOfMemoryError, FirstEager, OnlyEager)

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
    _trials: Told | None = None  # made when `_told` is first asked for
    _alone: ClassVar[bool] = False  # whether modules of the class go through the rule with all that is in them
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
        return own or self.watches or parametrize.is_parametrized(self)

    def _own(self) -> list[tuple[Slot, Tensor, int]]:
        """The parameters of its own, those in lists included: where they are, and their number of dimensions."""
        own: list[tuple[Slot, Tensor, int]] = []
        for name, rank in (self._ranks or {}).items():
            module, (*path, leaf) = cast(nn.Module, self), name.split(".")
            for child in path:  # not by `get_submodule`: a list may have the name of a method
                module = cast(nn.Module, module._modules[child])
            parameter = module._parameters.get(leaf)
            if parameter is not None:
                own.append(((module, leaf), parameter, rank))
        return own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result, recorder = super().forward(*args, **kwargs), self._recorder
        if recorder is None or recorder.forward is None or recorder.general_rule is not None or torch.is_grad_enabled():
            return result
        if not self._has_own_rows():
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
                call = self._called(args, kwargs)
                states, others = self._may_be_states(call), self._may_be_otherwise(call)
        if not has_own_rows:
            return self._plain_forward(*args, **kwargs)  # its children see to theirs
        if any(states) or any(others):
            dims = self._read(call, states, others)
            call = replace(call, dims=dims, kind=(*call.kind, *dims))
        with unseen():
            self._refuse_no_samples(call)
        with reads_of_its_own():
            result = on_whole_batch(self, call) if self._may_run_whole(call) else NotImplemented
            result = self._sample_by_sample(call) if result is NotImplemented else result
        order = None if self._recorder is None else self._recorder.order
        if order is not None and call.kind in self._told.compared:
            with unseen():
                order.note_layout(self, data_in(result), self._told.compared[call.kind].dims)
        return result

    def _refuse_no_samples(self, call: Called) -> None:
        """Raises if no argument has one row per sample, or if the samples stand elsewhere in the first tensor."""
        is_shared = call.batch > 1 and call.dims.count(None) == len(call.dims)
        note_input(self, shared=is_shared)
        if self._learned is not None and is_shared:
            raise self._refusal(
                "no argument has one row per sample", f"{call.batch} rows", "Call it with a batch of inputs."
            )
        if is_shared:
            folded = next((x for x in call.inputs if holds_all_samples(self, x)), None)
            if folded is not None:
                raise all_in_one_row(self, folded, "an argument")
        if call.inputs and has_derivatives(call.inputs[0]):
            first = call.inputs[0]
            read = next(dim for leaf, dim in zip(call.leaves, call.dims, strict=True) if leaf is first)
            if read != FOLDED:
                self.checked(first, 0, dim=self._dim_of(first) if read is None else read, argument="the first tensor")

    # Where the samples stand in the arguments

    def _called(self, args: Any, kwargs: Any) -> Called:
        """What the forward is called with, and where the samples usually stand in such arguments."""
        batch = self.pass_batch_size
        is_plain = not kwargs and all(type(arg) is Tensor for arg in args)
        args, kwargs = (args, kwargs) if is_plain else opened(args, kwargs)
        leaves = list(args) if is_plain else tree_leaves((args, kwargs))
        inputs = [tensor for tensor in leaves if isinstance(tensor, Tensor) and tensor.dim()]
        sizes = (tuple(bool(n == 1) for n in x.shape) for x in inputs)
        dims = [self._sample_dim(leaf, batch) for leaf in leaves]
        kind = (self.training, bool(batch == 1), *sizes, *map(self._reads_either_way, leaves), *dims)
        return Called(args, kwargs, batch, leaves, dims, inputs, kind)

    def _read(self, call: Called, states: list[bool], others: list[tuple[int | None, ...]]) -> list[int | None]:
        """Where the samples stand in the arguments: as `call` says, or elsewhere if only that is right.

        In states, `(layers, B, hidden)`, they may stand second. In a model that has them second, they may stand first
        in a matrix, as in a mask `(B, T)` or in the last step of a sequence, `(B, features)`; or nowhere, as in a mask
        `(T, T)`. An `Alone` module may get an argument of the model that is folded, as the patches of all images are,
        `(B * n, features)`.
        """
        kind, known = (*call.kind, *states, *others, self.goes_in_a_loop()), self._told.readings
        if kind not in known:
            if cost.is_symbol(call.batch):
                return call.dims
            wait_for_values("a module of the general rule is compared with its plain forward first")
            known[kind] = self._best_reading(call, states, others)
        return known[kind]

    def _may_be_states(self, call: Called) -> list[bool]:
        """Which arguments may be states with the samples second: only those behind the first that has them first."""
        first = call.dims.index(0) + 1 if 0 in call.dims else len(call.dims)
        behind = zip(call.leaves[first:], call.dims[first:], strict=True)
        return [False] * first + [call.batch > 1 and dim != 1 and is_like_a_state(x, call.batch) for x, dim in behind]

    def _may_be_otherwise(self, call: Called) -> list[tuple[int | None, ...]]:
        """Where else the samples may stand in each argument, if anywhere.

        In a matrix of a model that has them second: first, or nowhere, unless the matrix is what says B. In an argument
        that may be folded: in several rows per sample.
        """
        matrices = [self._is_matrix(leaf) and leaf.shape[0] == call.batch for leaf in call.leaves]
        if call.dims.count(None) == len(call.dims):  # a table may have B rows by chance
            matrices = [may and self._is_of_samples(leaf) for may, leaf in zip(matrices, call.leaves, strict=True)]
        elif 1 in call.dims:
            matrices[call.dims.index(1)] = False
        folded = [self._alone and self._may_be_folded(leaf, call.batch) for leaf in call.leaves]
        otherwise = zip(matrices, folded, strict=True)
        return [(0, None) if is_matrix else (FOLDED,) if is_folded else () for is_matrix, is_folded in otherwise]

    def _may_be_folded(self, leaf: Any, batch: int) -> bool:
        """Whether it is an argument of the model that may have several rows per sample, sample after sample."""
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or batch < 2 or not self.model_batch_first:
            return False
        if cost.is_symbol(batch) and not cost.is_symbol(leaf.shape[0]):  # it stays as it is in batches of other sizes
            return False
        times, left = leaf.shape[0] // batch, leaf.shape[0] % batch
        forward = None if self._recorder is None else self._recorder.forward
        return times > 1 and left == 0 and forward is not None and forward.is_argument(leaf)

    def _is_matrix(self, leaf: Any) -> bool:
        """Whether it is a matrix in which the samples usually stand second."""
        return isinstance(leaf, Tensor) and leaf.dim() == 2 and self._dim_of(leaf) == 1

    def _is_of_samples(self, leaf: Tensor) -> bool:
        """Whether it is an argument of the model, or was computed from what layers returned."""
        forward = None if self._recorder is None else self._recorder.forward
        return (leaf.requires_grad and comes_from_rows(leaf)) or (forward is not None and forward.is_argument(leaf))

    def _reads_either_way(self, leaf: Any) -> bool:
        """Whether it is such a matrix and equals its transpose: then no comparison tells where its samples stand.

        So what is found with it holds only for other matrices that equal their transposes.
        """
        if not self._is_matrix(leaf) or is_traced() or leaf.is_meta:
            return False
        return leaf.shape[0] == leaf.shape[1] and torch.equal(leaf, leaf.mT)

    def _best_reading(self, call: Called, states: list[bool], others: list[tuple[int | None, ...]]) -> list[int | None]:
        """The first reading that is right; if none is, the one whose error tells the user most."""
        pairs = list(zip(states, call.dims, strict=True))
        where_unknown = [1 if is_state and dim is None else dim for is_state, dim in pairs]
        everywhere = [1 if is_state else dim for is_state, dim in pairs]
        # first the readings that change least: what looks like a state may be an input whose second size is B by chance
        readings = (_readings(dims, others) for dims in (call.dims, where_unknown, everywhere))
        errors: dict[tuple[int | None, ...], Exception] = {}
        for reading in dict.fromkeys(chain(*readings)):
            error = self._error_of(replace(call, dims=list(reading)))
            if error is None:
                return list(reading)
            errors[reading] = error
        # where only `vmap` fails, a loop over the samples comes next
        told = [reading for reading, error in errors.items() if getattr(error, "by_vmap", False)]
        refused = [reading for reading, error in errors.items() if isinstance(error, PerSampleError)]
        # last those by which the forward itself has failed
        told += sorted(refused, key=lambda reading: errors[reading].__cause__ is not None)
        return list(told[0]) if told else call.dims

    def _error_of(self, call: Called) -> Exception | None:
        """The error of a comparison with the plain forward where the arguments are read so; `None` if they agree."""
        if self._recorder is None or self._recorder.forward is None:
            return None
        try:
            with RandomStates([*self.modules(), call.args, call.kwargs]), self._unnoticed():
                mapper = self._mapper(call)
                if not mapper.guests:
                    trial = Trial(mapper)
                    trial.compared(trial.mapped_again()[0], with_derivatives=torch.is_grad_enabled())
                return None
        except _NOT_OF_THE_FORWARD:
            raise
        except Exception as error:
            return error

    def _sample_by_sample(self, call: Called) -> Any:
        """What the forward gives each sample alone; the first call of a kind is compared with the plain forward."""
        mapper = self._mapper(call)
        if call.batch == 0:
            return mapper.without_samples()
        # another value may lead the forward another way, or tell that rows are another sample's: compared at each call
        by_values = self.goes_in_a_loop() or FOLDED in call.dims or call.kind in self._told.failed
        known = self._told.compared
        derivatives = self._compares_derivatives(call)
        is_known = call.kind in known and not by_values and not derivatives
        if by_values:
            how = "with several rows of each in an argument" if FOLDED in call.dims else "alone, as samples have met"
            how = "one by one, in a loop" if self.goes_in_a_loop() else how
            refuse_values(f"the samples go through {self.qualified_name} {how}")
        if not mapper.guests and not is_known:
            wait_for_values("a module of the general rule is compared with its plain forward first")
        trial = None if mapper.guests or is_known else Trial(mapper)
        with nullcontext() if trial is None else trial.by_samples():
            mapped = mapper(call.leaves, thorough=trial is not None)
        if mapper.guests:
            return mapped.result()
        if trial is None and not known[call.kind].fits(mapped):  # another way through the forward
            trial = Trial(mapper)
        if trial is not None:
            with self._unnoticed():
                known[call.kind] = trial.compared(mapped, with_derivatives=derivatives)
            self._told.with_derivatives |= {call.kind} if derivatives else set()
        compared = known[call.kind]
        if not compared.alike:
            self._refuse_square(call.inputs[1:], call.batch)
        return mapped.with_samples_in(compared.dims).laid_out(compared.orders).result()

    def _compares_derivatives(self, call: Called) -> bool:
        """Whether derivatives are compared: once per kind of call, and not while a checkpoint computes again."""
        return torch.is_grad_enabled() and call.kind not in self._told.with_derivatives and running_backward() < 0

    def _mapper(self, call: Called) -> Mapper:
        self._refuse_backward_hooks()
        originals = {
            (module, name): parameter
            for module in self.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        with unseen():
            within = [module for module in self.modules() if isinstance(module, General)]
            guests = {id(guest) for module in within for guest in module._guests()}
            expanded = [self._expanded_of(module, name, guests) for module, name in originals]
        return Mapper(self, call, originals, expanded, guests)

    def _may_run_whole(self, call: Called) -> bool:
        """Whether the forward may run on the whole batch, as far as is known without a trial."""
        if not torch.is_grad_enabled() or cost.is_symbol(call.batch) or call.batch == 0:
            return False
        if self._recorder is None or self._recorder.forward is None:  # with weights that come with a batch dimension
            return False
        have_samples_first = 0 in call.dims and {*call.dims} <= {0, None, FOLDED}
        return have_samples_first and self._suits_whole_batch() and self._told.ways.get(call.kind_of_ways()) != NO_WAYS

    def _suits_whole_batch(self) -> bool:
        """Whether the module, as it is now, may run so at all."""
        return bool(self._ranks) and self._learned is None and not parametrize.is_parametrized(self)

    def _on_whole_batch(self, call: Called) -> Any:
        """The result of the forward on the whole batch, or `NotImplemented` where that is not known to be right."""
        kind = call.kind_of_ways()
        ways = self._told.ways.get(kind, Ways())
        if ways.known and (result := self._by_known_way(call, ways)) is not NotImplemented:
            return result
        if running_backward() >= 0:  # a checkpoint's forward is computed again, and learns nothing
            return NotImplemented
        wait_for_values("a module of the general rule is tried on the whole batch first")
        ways = ways.after(*self._judged(call, hooks=ways.hooks)) if ways.trials_left else NO_WAYS
        result = self._by_known_way(call, ways) if ways.known else NotImplemented
        if ways.known and result is NotImplemented:  # what the hooks of its children add may be what it did otherwise
            ways = ways._replace(hooks=True)
        self._told.ways[kind] = ways
        return result

    def _compares_one_in(self) -> int:
        """Every how many calls on the whole batch one sample is compared alone; 0 for never."""
        return cost.TURNS_WHERE_SAMPLES_MAY_MEET if self._told.may_meet else 0

    def _by_known_way(self, call: Called, ways: Ways) -> Any:
        """The result, if it went a known way."""
        result, way = self._attempt(call, call.args, call.kwargs)
        return result if way in ways.known else NotImplemented

    def _attempt(self, call: Called, args: Any, kwargs: Any) -> tuple[Any, Way | None]:
        """The result of the forward on the whole batch, and the way it has gone; `None` if it cannot run so.

        The arguments are those of the call, or copies of them.
        """
        recorder = self._recorder
        assert recorder is not None
        assert recorder.forward is not None
        heard, batch = recorder.forward.notes.inputs_shared, recorder.forward.own_pass.batch
        owners = Owners(batch, self, self._told.memo) if self._alone else None
        before, run = len(heard), Run(batch, recorder, owners)
        try:
            places, parameters = self._lent()
            with unseen():
                weights = [run.batched(recorder.expand(parameter)) for parameter in parameters]
            if owners is not None:
                args, kwargs = owners.begin((args, kwargs), call.dims)
            with swapped(places, weights), nullcontext() if owners is None else self._children_inside({}):
                weights.clear()
                with run:
                    result = self._plain_forward(*args, **kwargs)
                result = run.returned(result)
            if owners is not None and FOLDED in call.dims:
                owners.refuse_others_places(result, self._told.compared[call.kind].dims)
        except Exception as error:
            if isinstance(error, _NOT_OF_THE_FORWARD) or is_of_checkpoint(error):
                raise
            del heard[before:]
            return None, None
        self._told.may_meet |= run.may_meet
        if run.failed or run.leaves_something():
            return None, None
        return result, (*run.way_gone(), *heard[before:])

    def _lent(self) -> tuple[list[Slot], list[Tensor]]:
        """The parameters that get a value per sample in it: where they are, and they themselves."""
        own = self._own()
        return [place for place, _, _ in own], [parameter for _, parameter, _ in own]

    def _judged(self, call: Called, *, hooks: bool) -> tuple[Verdict, Way | None]:
        """Whether the forward on the whole batch gives what it gives sample by sample, and the way it has gone."""
        mapper = self._mapper(call)
        if mapper.guests or any(weight.is_meta for weight in mapper.expanded):
            return Verdict.UNCLEAR, None
        try:
            with self._unnoticed():
                trial = Trial(mapper, hooks=hooks)
                again = trial.mapped_again()
                derivatives = self._compares_derivatives(call)
                compared = self._told.compared[call.kind] = trial.compared(again[0], with_derivatives=derivatives)
                self._told.with_derivatives |= {call.kind} if derivatives else set()
                if not compared.alike:
                    return Verdict.WRONG, None
                return trial.judged(again, compared.dims)
        except torch.OutOfMemoryError:  # a comparison takes more than a step
            return Verdict.WRONG, None

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """For comparisons: layers' notes are dropped, and a checkpoint around does not count what is saved."""
        forward = None if self._recorder is None else self._recorder.forward
        with nullcontext() if forward is None else meanwhile(forward, notes=InputNotes()), uncounted():
            yield

    def _vmap_refusal(self, *said: str) -> PerSampleError:
        """The error of a forward that `vmap` cannot follow, but a loop over the samples may."""
        error = self._refusal(*said)
        error.by_vmap = True
        return error

    def _refuse_square(self, others: list[Tensor], batch: int) -> None:
        for tensor in others:
            if batch > 1 and tensor.shape == (batch, batch):
                raise self._refusal(
                    f"an argument has shape {tuple(tensor.shape)}, one row per sample or a matrix that all share",
                    "an argument that can be read in one way only",
                    "Give the matrix to the module as a buffer, or the batch another size.",
                )

    def _children_inside(self, lent: Mapping[Slot, Lent]) -> AbstractContextManager[None]:
        """Meanwhile expanded layers within find their parameters in `lent`, as other tensors stand in their places."""
        return nullcontext() if self._recorder is None else self._recorder.in_general_rule(lent)

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        return self._plain_forward(*args, **kwargs)  # each sample is alone already; its layers leave the `vmap`

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        return called(self, super(Expanded, self).forward, args, kwargs)

    def _expanded_of(self, module: nn.Module, name: str, guests: set[int]) -> Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) in guests or (isinstance(module, Expanded) and module._is_batched(name, parameter)):
            return parameter
        if self._recorder is None or not torch.is_grad_enabled():
            return parameter.expand(self.pass_batch_size, *parameter.shape)
        return self._recorder.expand(parameter)

    def _sample_dim(self, leaf: Any, batch: int) -> int | None:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        dim = self._dim_of(leaf)
        # not for an index that is an argument of the model: a comparison tells where its samples stand
        if self._is_matrix(leaf) and (has_derivatives(leaf) or not self._is_of_samples(leaf)):
            refuse_square(self, leaf)
        return dim if leaf.shape[dim] == batch else None

    def _dim_of(self, tensor: Tensor) -> int:
        """Where the samples stand: as the module's own `batch_first` says, or else the model's."""
        return batch_dim(tensor.dim(), batch_first=getattr(self, "batch_first", self.model_batch_first))

    def _refuse_shards_within(self) -> None:
        """Raises if FSDP shards a module within: its hooks gather parameters, and comparisons do not call them."""
        sharded = self._recorder is not None and self._recorder.leaves.sharded
        within = [name for name, module in self.named_modules() if name and is_sharded(module)] if sharded else ()
        if within:
            raise self._refusal(
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

    def _keeping(self, what: str) -> PerSampleError:
        return complaint(
            self.qualified_name,
            f"its forward keeps tensors in {what}",
            "a forward that keeps nothing for the next call",
            "Do without the cache in per-sample mode (use_cache=False), or write the per-sample forward with @expands.",
            refused_by=self,  # a larger module may make what it keeps them in
        )


def _readings(dims: list[int | None], others: list[tuple[int | None, ...]]) -> list[tuple[int | None, ...]]:
    """Where samples may stand: as in `dims`, or elsewhere in all arguments, or in some of them; at most 27 of these."""
    everywhere = tuple(own[0] if own else dim for dim, own in zip(dims, others, strict=True))
    some = product(*((dim, *own) for dim, own in zip(dims, others, strict=True)))
    readings = dict.fromkeys([tuple(dims), everywhere, *islice(some, 27)])
    return [reading for reading in readings if reading.count(None) < len(reading)]
