"""The general rule: any module with parameters of its own, by `vmap` of its forward over expanded parameters.

Where what it does with its parameters stands in the table of `whole.py`, its forward runs on the whole batch instead,
after a comparison of the two for each kind of input.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_structure, tree_unflatten

from expanded_nn._batch import batch_dim, contents, has_derivatives, is_like_a_state
from expanded_nn._errors import PerSampleError, complaint
from expanded_nn._layout import note_input, refuse_square
from expanded_nn._lift import Slot, quiet_fallbacks, swapped
from expanded_nn._modes import as_it_is, checkpoint_hooks, running_backward
from expanded_nn._module import Expanded
from expanded_nn._steady import OURS, RandomStates, attributes_of
from expanded_nn._traced import FirstEager, OnlyEager, wait_for_values
from expanded_nn.core import cost
from expanded_nn.layers.looped import in_a_loop
from expanded_nn.layers.one_sample import OneSample, ids_of_one_sample, is_of_one_sample
from expanded_nn.layers.trial import Called, Compared, Mapped, Trial, Verdict, Way, Ways, flatten
from expanded_nn.layers.whole import Run, reads_of_its_own
from expanded_nn.recording.backward import graph_of
from expanded_nn.recording.forward import InputNotes
from expanded_nn.recording.recorder import Recorder

# torch's words where vmap gives up; the last two where values are read, and where samples' results differ in size
_OF_VMAP = "vmap|functorch|[Bb]atching rule|doesn't have storage|stack expects each tensor to be equal size"

# what a forward on the whole batch raises, but not because of the batch
_NOT_OF_THE_FORWARD = (torch.OutOfMemoryError, FirstEager, OnlyEager)

PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)  # their parameters belong to the module that holds them


@dataclass
class _Mapper:
    """Sends arguments like those of a call through a forward, sample by sample.

    Attributes:
        module: Whose forward it is.
        call: The call.
        originals: The parameters of the module and of all within it.
        expanded: The same, expanded.
        guests: Which of them have come with a batch dimension of their own, by identity.
    """

    module: General
    call: Called
    originals: Mapping[Slot, Tensor]
    expanded: list[Tensor]
    guests: set[int]

    def __call__(self, given: list[Any]) -> Mapped:
        module, call, told = self.module, self.call, bool(self.guests)
        loops = module.goes_in_a_loop()
        with module._children_inside(self.originals), module._leaving_nothing(given) if loops else nullcontext():
            structure, places = tree_structure((call.args, call.kwargs)), list(self.originals)
            return module._mapped(places, self.expanded, call.dims, structure, given, told=told)


class General(Expanded):
    """A module of the user's own: each sample goes through its forward alone, as a batch of one, under `vmap`.

    The parameters of the module, of its children and of its parameter lists are all expanded, and the forward may
    use them in any way; expanded layers among the children leave the `vmap` and run on the whole batch, and so does the
    forward itself where it uses its own parameters in ways that are known. A tensor
    argument with B rows is split into samples; any other is shared by all. Every tensor that the forward returns has
    the samples where the arguments have them.
    """

    calls_others: ClassVar[bool] = True
    _compared: Mapping[Any, Compared] = {}  # by the way to read the arguments and results
    _readings: Mapping[Any, list[int | None]] = {}  # by the kind of a call: where samples stand in its arguments
    _ways: Mapping[Any, Ways] = {}  # likewise: those by which it may run on the whole batch
    _alone: ClassVar[bool] = False  # whether it goes sample by sample in any case,
    _loops: ClassVar[bool] = False  # and in a loop
    _ranks: dict[str, int] | None = None  # of each own parameter, those in lists included, when it was converted

    def goes_in_a_loop(self) -> bool:
        """Whether the samples go through it one after the other, as `vmap` fails in it."""
        return self._loops or (self._learned is not None and self._learned.loops)

    def note_ranks(self) -> None:
        """Notes how many dimensions the parameters have without a batch dimension."""
        lists = [(f"{name}.", child) for name, child in self.named_modules() if isinstance(child, PARAMETER_LISTS)]
        self._ranks = {
            prefix + name: each.dim()
            for prefix, module in [("", self), *lists]
            for name, each in module._parameters.items()
            if each is not None
        }

    def _own_batch(self) -> int | None:
        return next((each.shape[0] for each in self._guests()), None)

    def _guests(self) -> list[Tensor]:
        """The parameters that have come with a batch dimension of their own."""
        return [parameter for _, parameter, rank in self._own() if parameter.dim() == rank + 1]

    def _has_own_rows(self) -> bool:
        """Whether the module's own parameters ask for gradients, or its class was sent here as a whole."""
        own = any(each.requires_grad or each.dim() > rank for _, each, rank in self._own())
        return own or self.watches or parametrize.is_parametrized(self)

    def _own(self) -> list[tuple[Slot, Tensor, int]]:
        """The parameters of its own, those in lists included: where they are, and their number of dimensions."""
        found: list[tuple[Slot, Tensor, int]] = []
        for name, rank in (self._ranks or {}).items():
            module, (*path, leaf) = cast(nn.Module, self), name.split(".")
            for each in path:  # not by `get_submodule`: a list may have the name of a method
                module = cast(nn.Module, module._modules[each])
            parameter = module._parameters.get(leaf)
            if parameter is not None:
                found.append(((module, leaf), parameter, rank))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result, recorder = super().forward(*args, **kwargs), self._recorder
        if recorder is None or not recorder.in_forward or recorder.general_rule is not None or torch.is_grad_enabled():
            return result
        if not self._has_own_rows():
            return result
        # a reentrant checkpoint's first forward: of the shapes that the second one will have
        leaves, structure = flatten(result)
        return tree_unflatten([self._with_all_rows(each) for each in leaves], structure)

    def _with_all_rows(self, output: Any) -> Any:
        """What samples share, once for each of them."""
        if not isinstance(output, Tensor) or output.dim() == 0:
            return output
        dim, batch = self._dim_of(output), self.pass_batch_size
        if output.shape[dim] != 1 or batch == 1:
            return output
        return output.expand(*output.shape[:dim], batch, *output.shape[dim + 1 :]).clone()

    def expanded_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_own_rows():
            return self._plain_forward(*args, **kwargs)  # its children see to theirs
        batch = self.pass_batch_size
        is_plain = not kwargs and all(type(each) is Tensor for each in args)
        leaves = list(args) if is_plain else tree_leaves((args, kwargs))
        dims = self._read(args, kwargs, leaves, [self._sample_dim(leaf, batch) for leaf in leaves])
        note_input(self, shared=batch > 1 and all(dim is None for dim in dims))
        if self._learned is not None and batch > 1 and all(dim is None for dim in dims):
            raise self._refusal(
                "no argument has one row per sample", f"{batch} rows", "Call it with a batch of inputs."
            )
        given = [each for each in leaves if isinstance(each, Tensor) and each.dim()]
        if given and has_derivatives(given[0]):
            self.checked(given[0], 0, dim=self._dim_of(given[0]), argument="the first tensor")
        kind = (self.training, *dims, bool(batch == 1), *(tuple(bool(n == 1) for n in each.shape) for each in given))
        call = Called(args, kwargs, batch, leaves, dims, given, kind)
        with reads_of_its_own():
            result = self._on_whole_batch(call) if self._may_run_whole(call) else NotImplemented
            return self._sample_by_sample(call) if result is NotImplemented else result

    def _read(self, args: Any, kwargs: Any, leaves: list[Any], dims: list[int | None]) -> list[int | None]:
        """Where the samples stand: as usual or, if that is not right, second in states `(layers, B, hidden)`."""
        batch = self.pass_batch_size
        second = [batch > 1 and dim != 1 and is_like_a_state(x, batch) for x, dim in zip(leaves, dims, strict=True)]
        first = dims.index(0) + 1 if 0 in dims else len(dims)  # the argument that says B has them first
        second[:first] = [False] * first
        if not any(second) or cost.is_symbol(batch):
            return dims
        given = [each for each in leaves if isinstance(each, Tensor)]
        kind = (self.training, *dims, *second, *(tuple(bool(n == 1) for n in each.shape) for each in given))
        if kind not in self._readings:
            wait_for_values("a module of the general rule is compared with its plain forward first")
            sure = [1 if is_second and dim is None else dim for is_second, dim in zip(second, dims, strict=True)]
            states = [1 if is_second else dim for is_second, dim in zip(second, dims, strict=True)]
            calls = (Called(args, kwargs, batch, leaves, each, given, kind) for each in (dims, sure, states))
            self._readings = {**self._readings, kind: next((c.dims for c in calls if self._reads_well(c)), dims)}
        return self._readings[kind]

    def _reads_well(self, call: Called) -> bool:
        """Whether the plain forward of the whole batch says so; if not, all is as it was before."""
        forward = None if self._recorder is None else self._recorder.forward
        if forward is None:
            return True
        notes, forward.notes = forward.notes, InputNotes()
        states = RandomStates([*self.modules(), call.args, call.kwargs])
        try:
            with saved_tensors_hooks(as_it_is, as_it_is) if checkpoint_hooks() is not None else nullcontext():
                mapper = self._mapper(call)
                if not mapper.guests:
                    trial = Trial(self, call.args, call.kwargs, call.batch, mapper)
                    trial.compared(trial.mapped_again(self._refuse_mutation)[0])
                return True
        except Exception as error:
            if isinstance(error, _NOT_OF_THE_FORWARD):
                raise
            return False
        finally:
            states.restore()
            forward.notes = notes

    def _sample_by_sample(self, call: Called) -> Any:
        """The result, by a `vmap` over the samples."""
        batch, mapper = call.batch, self._mapper(call)
        if batch == 0:
            return self._empty([*mapper.originals], mapper.expanded, call.args, call.kwargs)
        loops = self.goes_in_a_loop()  # in which each value may lead another way, and which sees what is left behind
        is_known = call.kind in self._compared and not loops
        if not mapper.guests and not is_known:
            wait_for_values("a module of the general rule is compared with its plain forward first")
        trial = None if mapper.guests or is_known else Trial(self, call.args, call.kwargs, batch, mapper)
        found = mapper(call.leaves)
        if not loops:
            self._refuse_mutation(call.leaves, thorough=trial is not None)
        if mapper.guests:
            return found.result()
        if trial is None and not self._compared[call.kind].fits(found.ones):  # another way through the forward
            trial = Trial(self, call.args, call.kwargs, batch, mapper)
        if trial is not None:
            self._compared = {**self._compared, call.kind: trial.compared(found)}
        compared = self._compared[call.kind]
        if not compared.alike:
            self._refuse_square(call.given[1:], batch)
        return found.with_samples_in(compared.dims).result()

    def _mapper(self, call: Called) -> _Mapper:
        self._refuse_backward_hooks()
        originals = {
            (module, name): each
            for module in self.modules()
            for name, each in module._parameters.items()
            if each is not None
        }
        guests = {id(each) for module in self.modules() if isinstance(module, General) for each in module._guests()}
        expanded = [self._expanded_of(module, name, guests) for module, name in originals]
        return _Mapper(self, call, originals, expanded, guests)

    def _may_run_whole(self, call: Called) -> bool:
        """Whether the forward may run on the whole batch, if its first trial says so."""
        if self._alone or not torch.is_grad_enabled() or not self._ranks or cost.is_symbol(call.batch):
            return False
        if self._recorder is None or not self._recorder.in_forward:  # with weights that come with a batch dimension
            return False
        if self._ways.get(call.kind_of_ways()) == Ways(trials_left=0):
            return False
        is_plain = self._learned is None and not parametrize.is_parametrized(self)
        return is_plain and call.batch > 0 and any(dim == 0 for dim in call.dims) and not any(call.dims)

    def _on_whole_batch(self, call: Called) -> Any:
        """The result of the forward on the whole batch, or `NotImplemented` where that is not known to be right."""
        kind = call.kind_of_ways()
        ways = self._ways.get(kind, Ways())
        if ways.known:
            result, way = self._attempt(call.args, call.kwargs)
            if way in ways.known:
                return result
        if running_backward() >= 0:  # a checkpoint's forward is computed again, and learns nothing
            return NotImplemented
        wait_for_values("a module of the general rule is tried on the whole batch first")
        ways = ways.after(*self._judged(call, hooks=ways.hooks)) if ways.trials_left else Ways(trials_left=0)
        result, way = self._attempt(call.args, call.kwargs) if ways.known else (None, None)
        is_known = way in ways.known
        if ways.known and not is_known:  # what the hooks of its children add may be what it did otherwise
            ways = ways._replace(hooks=True)
        self._ways = {**self._ways, kind: ways}
        return result if is_known else NotImplemented

    def _attempt(self, args: Any, kwargs: Any) -> tuple[Any, Way | None]:
        """The forward on the whole batch: its result and the way it has gone, if it was possible."""
        recorder = self._recorder
        assert recorder is not None
        assert recorder.forward is not None
        own, heard = self._own(), recorder.forward.notes.inputs_shared
        before, run = len(heard), Run(recorder.forward.own_pass.batch, recorder.escalation.order)
        try:
            weights = [run.batched(recorder.expand(parameter)) for _, parameter, _ in own]
            with swapped([place for place, _, _ in own], weights):
                weights.clear()
                with run:
                    result = self._plain_forward(*args, **kwargs)
                result = run.returned(result)
        except Exception as error:
            if isinstance(error, _NOT_OF_THE_FORWARD) or type(error).__module__ == checkpoint.__name__:
                raise
            del heard[before:]
            return None, None
        if run.failed or run.leaves_something():
            return None, None
        return result, (*run.way, frozenset(run.joins), *heard[before:])

    def _judged(self, call: Called, *, hooks: bool) -> tuple[Verdict, Way | None]:
        """Compares the forward on the whole batch with that sample by sample."""
        recorder = self._recorder
        assert recorder is not None
        forward = recorder.forward
        assert forward is not None
        own, mapper = {place for place, _, _ in self._own()}, self._mapper(call)
        if mapper.guests or any(each.is_meta for each in mapper.expanded):
            return Verdict.UNCLEAR, None
        notes, forward.notes = forward.notes, InputNotes()
        in_checkpoint = checkpoint_hooks() is not None  # which counts what is saved
        try:
            with saved_tensors_hooks(as_it_is, as_it_is) if in_checkpoint else nullcontext():
                trial = Trial(self, call.args, call.kwargs, call.batch, mapper, hooks=hooks)
                found = trial.mapped_again(self._refuse_mutation)
                compared = trial.compared(found[0])
                self._compared = {**self._compared, call.kind: compared}
                if not compared.alike:
                    return Verdict.WRONG, None
                rows = [(each, place in own) for place, each in zip(mapper.originals, mapper.expanded, strict=True)]
                return trial.judged(self._attempt, rows, found, compared.dims)
        except torch.OutOfMemoryError:  # a comparison takes more than a step
            return Verdict.WRONG, None
        finally:
            forward.notes = notes

    def _mapped(
        self, places: Sequence[Slot], expanded: Any, dims: Any, structure: TreeSpec, leaves: list[Any], *, told: bool
    ) -> Mapped:
        """Sends each sample through the forward alone."""
        returned: list[Any] = []
        ones: list[list[int]] = []  # for each result: where the sample may stand, likeliest first

        def one_sample(weights: list[Tensor], inputs: list[Any]) -> list[Tensor]:
            alone = [each if dim is None else each.unsqueeze(dim) for each, dim in zip(inputs, dims, strict=True)]
            args, kwargs = tree_unflatten(alone, structure)
            with swapped(places, weights), quiet_fallbacks(), OneSample(self):
                result = self._plain_forward(*args, **kwargs)
            if Counter(ids_of_one_sample((args, kwargs))) - Counter(ids_of_one_sample(alone)):
                raise self._keeping("an argument")
            self._refuse_objects(result)
            outputs, returned[:] = [each for each in flatten(result)[0] if isinstance(each, Tensor)], [result]
            ones[:] = [self._dims_of_one(each, told=told) for each in outputs]
            return [each.squeeze(dims[0]) for each, dims in zip(outputs, ones, strict=True)]

        over_samples = torch.vmap(one_sample, in_dims=(0, dims), randomness="different")
        if self.goes_in_a_loop():
            over_samples = in_a_loop(self, one_sample, dims, returned)
        try:
            results = over_samples(expanded, leaves)
        except RuntimeError as error:
            if isinstance(error, PerSampleError) or not re.search(_OF_VMAP, str(error)):
                raise
            remedy = "Write its per-sample forward with @expands, or keep the parameters in modules of torch.nn."
            if "stack expects" in str(error):
                remedy = "Let all samples give results of one size: pad_packed_sequence(..., total_length=x.shape[1])."
            elif "setup_context" in str(error):
                remedy = "Give a checkpoint use_reentrant=False, and an autograd Function of your own a setup_context."
            raise self._vmap_refusal(
                f"its forward does what vmap cannot follow ({error})",
                "a forward that treats each sample alone and changes nothing in place that samples share",
                remedy,
            ) from error
        moved = [each.movedim(0, first) for each, (first, *_) in zip(results, ones, strict=True)]
        return Mapped(returned[0], moved, ones, is_filled_up=len(returned) > 1)

    @contextmanager
    def _leaving_nothing(self, leaves: list[Any]) -> Iterator[None]:
        """Raises where the forward of one sample leaves something behind that the next one would find."""

        def kept() -> list[tuple[Any, int]]:
            held = contents([*map(attributes_of, self.modules()), leaves])
            return [(value, getattr(value, "_version", 0)) for value in held if not isinstance(value, torch.dtype)]

        before = kept()
        yield
        after = kept()
        if len(before) != len(after) or any(a is not b or v != w for (a, v), (b, w) in zip(before, after, strict=True)):
            raise self._keeping("an attribute, a buffer or an argument")

    def _refuse_objects(self, result: Any) -> None:
        """Raises where tensors of one sample are inside of objects, where nothing can put all samples together."""
        unknown = [leaf for leaf in flatten(result)[0] if not isinstance(leaf, Tensor)]
        holders = [type(leaf).__name__ for leaf in unknown if any(map(is_of_one_sample, contents(leaf)))]
        holders = [name for name in holders if "Cache" not in name]  # of models of `transformers`: no loss reads them
        if holders:
            raise self._refusal(
                f"its forward returns tensors inside of a {holders[0]}",
                "tensors, or lists, tuples, dicts and dataclasses of them",
                f"Return the tensors and make the {holders[0]} of them outside; or hold the parameter in a small "
                "module of its own, so that this forward is not run sample by sample.",
            )

    def _vmap_refusal(self, *said: str) -> PerSampleError:
        """What to say where `vmap` cannot follow the forward, but a loop over the samples may."""
        error = self._refusal(*said)
        error.by_vmap = True
        return error

    def _refuse_square(self, others: list[Tensor], batch: int) -> None:
        for each in others:
            if batch > 1 and each.shape == (batch, batch):
                raise self._refusal(
                    f"an argument has shape {tuple(each.shape)}, one row per sample or a matrix that all share",
                    "an argument that can be read in one way only",
                    "Give the matrix to the module as a buffer, or the batch another size.",
                )

    def _children_inside(self, originals: Mapping[Slot, Tensor]) -> AbstractContextManager[None]:
        """Expanded layers called meanwhile find the parameters that `vmap` has taken from them."""
        return nullcontext() if self._recorder is None else self._recorder.in_general_rule(originals)

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        return self._plain_forward(*args, **kwargs)  # sample by sample already; its layers find their own way

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(Expanded, self).forward(*args, **kwargs)

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
        if dim and leaf.dim() == 2:
            refuse_square(self, leaf)
        return dim if leaf.shape[dim] == batch else None

    def _dim_of(self, tensor: Tensor) -> int:
        """Where the samples stand: as the module says, if it has a `batch_first` of its own, or as the model does."""
        return batch_dim(tensor.dim(), batch_first=getattr(self, "batch_first", self.model_batch_first))

    def _dims_of_one(self, output: Tensor, *, told: bool) -> list[int]:
        """Where the one sample may stand in what the forward returned for it, likeliest first.

        Args:
            output: `(…, 1, …)`.
            told: Whether it has to stand where the module or the model says, as no plain forward can tell.
        """
        ones = [dim for dim, size in enumerate(output.shape) if size == 1]
        usual = self._dim_of(output) if output.dim() else 0
        may_be_features = usual == 1 and output.dim() == 2 and 0 in ones  # (1, features), if not (T, 1)
        if not ones or (told and (may_be_features or usual not in ones)):
            raise self._refusal(
                f"for one sample its forward returns a tensor of shape {tuple(output.shape)}",
                f"size 1 in dimension {usual}, where the samples stand",
                "Return tensors with a batch dimension, and reduce over the samples outside of the module. For a "
                "parameter that is returned, write parameter.expand_as(a tensor that has one), or leave it out and use "
                "expanded_nn.expanded(parameter) in the loss.",
            )
        return sorted(ones, key=lambda dim: dim != (0 if may_be_features else usual))

    def _refuse_backward_hooks(self) -> None:
        for name, module in self.named_modules():
            if module is not self and (module._backward_hooks or module._backward_pre_hooks):
                raise complaint(
                    self.qualified_name,
                    f"its child {name!r} has a full backward hook, which a vmap does not call",
                    "no such hook inside a module with parameters of its own",
                    "Take the hook off, or hook the tensors (register_hook) outside of the module.",
                )

    def _refuse_mutation(self, leaves: list[Any], *, thorough: bool) -> None:
        """Raises if the forward has left a tensor of one sample behind, in the module or in an argument.

        Args:
            leaves: The arguments.
            thorough: Whether to look into the objects that a module holds, too.
        """
        looked_into = object if thorough else (Tensor, dict, list, tuple)
        for module in self.modules():
            kept = [(f"attribute {name!r}", value) for name, value in vars(module).items() if name not in _NOT_ITS_OWN]
            kept += [(f"the buffer {name!r}", value) for name, value in module._buffers.items()]
            for what, value in kept:
                if isinstance(value, looked_into) and any(map(is_of_one_sample, contents(value, 4 * thorough))):
                    raise self._keeping(what)
        if any(map(is_of_one_sample, contents([leaf for leaf in leaves if not isinstance(leaf, Tensor)]))):
            raise self._keeping("an argument")

    def _keeping(self, what: str) -> PerSampleError:
        return complaint(
            self.qualified_name,
            f"its forward keeps tensors in {what}",
            "a forward that keeps nothing for the next call",
            "Do without the cache in per-sample mode (use_cache=False), or write the per-sample forward with @expands.",
        )

    def _empty(self, places: list[Any], expanded: list[Tensor], args: Any, kwargs: Any) -> Any:
        """No samples: the plain forward says the shapes, and every parameter gets no rows."""
        alone = [
            module._parameters[name].detach().requires_grad_(each.requires_grad)
            for (module, name), each in zip(places, expanded, strict=True)
        ]
        with swapped(places, alone), self._children_inside({}), OneSample(self):
            result = self._plain_forward(*args, **kwargs)
        ends = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        used = {id(getattr(node, "variable", None)) for end in ends for node in graph_of(end)}
        of_used = [each.abs().sum() for each, own in zip(expanded, alone, strict=True) if id(own) in used]
        nothing = sum(of_used, start=torch.zeros(()))
        return tree_map(
            lambda x: x + nothing.to(x.dtype) if isinstance(x, Tensor) and has_derivatives(x) else x, result
        )


# what the forward does not write, or is looked at by name
_NOT_ITS_OWN = {*OURS, "_buffers", *(name for name in vars(nn.Module()) if name.startswith("_"))}
