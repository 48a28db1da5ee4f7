"""A forward of the general rule sample by sample: under `vmap` or, where `vmap` cannot follow it, in a loop."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import FOLDED, contents, may_have_derivatives, stacked
from expanded_nn.common.containers import flatten, tensors_of
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.modes import of_all, set_version, version_of
from expanded_nn.common.shared import laid_out
from expanded_nn.common.steady import Attributes, Traces, Undo
from expanded_nn.common.traced import FirstEager, OnlyEager, is_traced
from expanded_nn.layers.general.called import Called, held_by, is_cache, keeping
from expanded_nn.layers.general.left import (
    NOT_ITS_OWN,
    Before,
    Given,
    Numbers,
    Place,
    are_same_numbers,
    put_in_place,
    with_left,
)
from expanded_nn.layers.general.one_sample import OneSample, ids_of_one_sample, is_of_one_sample
from expanded_nn.layers.general.own_functions import functions_looked_at
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.modules.layout import hint_of_layout, refusal
from expanded_nn.recording.graph import graph_of
from expanded_nn.recording.lift import Lent, Slot, quiet_fallbacks, swapped, with_tensors

# torch's words where vmap gives up; the last four: values are read, results differ in size, a derivative by what the
# forward makes (torch.autograd.functional.jvp), hooks of torch's own on all modules (FlopCounterMode)
_OF_VMAP = (
    "vmap|functorch|[Bb]atching rule|doesn't have storage|stack expects each tensor to be equal size"
    "|One of the differentiated Tensors does not require grad|'NoneType' object has no attribute 'next_functions'"
)

# torch's words where a tensor is changed in place that is one for all samples
_OF_CHANGES = r"more than one element of the written-to tensor|Output 0 of Expand\w* is a view"

# what a forward raises, but not because of its samples
NOT_OF_THE_FORWARD = (torch.OutOfMemoryError, FirstEager, OnlyEager)

# what to do with a parameter that is returned
OF_PARAMETERS = (
    "For a parameter that is returned, write parameter.expand_as(a tensor that has one), or leave it out and use "
    "expanded_nn.expanded(parameter) in the loss, by view(-1, 1, ...) with as many dimensions as what it meets there."
)

# what to do with a module that sets its parameters by the first batch
OF_FIRST_FORWARDS = (
    "If it does so at its first forward alone, as ActNorm does, call the model once before per_sample(True)."
)

# in place of the samples' dimension, of a result that is a single number: the plain forward gives the samples' mean, or
# their sum
MEAN, SUM = -2, -3
NOWHERE = -4  # of what is left in an attribute, and has no dimension in which samples may stand


def _is_outermost(module: Any) -> bool:
    """Whether the user called it. A number that an inner module returns may be used by other samples."""
    recorder = module._recorder
    return recorder is not None and recorder.forward is not None and recorder.forward.module is module


def left_together(module: Any, call: Called) -> Sequence[Place]:
    """The attributes in which a forward leaves what no sample has a part of, if no forward around it reads them."""
    together: Sequence[Place] = module._told.together.get(call.kind, ())
    return together if together and _is_outermost(module) else ()


@dataclasses.dataclass
class Mapped:
    """What came out of the forward, sample by sample."""

    returned: Any  # what the forward has returned for the last sample
    tensors: list[Tensor]  # those of all samples, for each tensor in it
    possible_dims: list[list[int]]  # where the samples may stand in each of these; now in the first one
    is_filled_up: bool = False  # whether results of some samples were shorter, and zeros were added

    def with_samples_in(self, dims: Sequence[int]) -> Mapped:
        """The same with the samples in these dimensions."""
        moves = zip(self.tensors, self.possible_dims, dims, strict=True)
        return dataclasses.replace(self, tensors=[moved(x, first, dim) for x, (first, *_), dim in moves])

    def laid_out(self, orders: Sequence[tuple[int, ...]]) -> Mapped:
        """The same, laid out in memory as torch's results are, by their `memory_order`: `view` depends on it."""
        return dataclasses.replace(self, tensors=list(map(laid_out, self.tensors, orders)))

    def result(self) -> Any:
        """What the forward returns for the whole batch."""
        return with_tensors(*flatten(self.returned), self.tensors)


def moved(result: Tensor, first: int, dim: int) -> Tensor:
    """A result with the samples moved to another dimension, in which that of one sample has size 1."""
    if dim in (MEAN, SUM):
        total = result.sum(0)
        return (total / result.shape[0] if dim == MEAN else total).to(result.dtype)
    if dim == first:
        return result
    if dim == FOLDED:
        return result.movedim(first, 0).unsqueeze(first + 1).flatten(0, 1)
    return result.transpose(first, dim)


@dataclasses.dataclass
class Mapper:
    """Sends arguments like those of a call through the forward of a module, sample by sample."""

    module: Any  # of the general rule
    call: Called
    originals: Mapping[Slot, Tensor]  # the parameters of the module and of all within it
    expanded: list[Tensor]  # the same, `(B, *shape)`
    guests: set[int]  # the ids of those that have come with a batch dimension of their own
    makes_own: bool = False  # whether all that the forward makes is each sample's own, see `OneSample`
    counts: bool = False  # whether a loss may come of what it gives, and not a comparison alone
    leaves_traces: bool = False  # whether the plain forward has to run for what it leaves in attributes
    numbers: Numbers | None = None  # those that the plain forward has left, in a comparison with it
    # what the samples have changed in place, with the version and the numbers that it had then
    changed: Sequence[tuple[Tensor, int, Tensor]] = ()

    def __call__(self, leaves: list[Any], *, thorough: bool = True) -> Mapped:
        """Sends each sample through the forward alone.

        Args:
            leaves: The leaves of the arguments.
            thorough: Whether to look for what the forward leaves behind in objects that the module holds, too.

        Raises:
            PerSampleError: If `vmap` cannot follow the forward, if it leaves something behind, or if what it returns
                cannot be put together.
        """
        returned: list[Any] = []  # one result under `vmap`, one per sample in a loop
        possible_dims: list[list[int]] = []  # the same for all samples

        def one_sample(weights: list[Tensor], inputs: list[Any]) -> list[Tensor]:
            result = self._of_one_sample(weights, inputs)
            outputs = tensors_of(result)
            returned.append(result)
            left = len(tensors_of(result.left)) if type(result) is Given else 0
            possible_dims[:] = map(self._possible_dims, outputs[: len(outputs) - left])
            self._refuse_folded_alone(outputs, possible_dims)
            possible_dims.extend(map(self._possible_dims_left, outputs[len(outputs) - left :]))
            pairs = zip(outputs, possible_dims, strict=True)
            return [output if first < 0 else output.squeeze(first) for output, (first, *_) in pairs]

        loops, self.leaves_traces, self.changed = self.module.goes_in_a_loop(), False, ()
        with nullcontext() if loops else self._nothing_of_one_sample(leaves, thorough=thorough):
            try:
                results = (self._one_by_one if loops else self._by_vmap)(one_sample, leaves)
            except (RuntimeError, ValueError, IndexError, AttributeError) as error:
                if isinstance(error, PerSampleError) and error.by_writing and is_traced() and not self.makes_own:
                    return dataclasses.replace(self, makes_own=True)(leaves, thorough=thorough)
                if isinstance(error, PerSampleError | torch.OutOfMemoryError):
                    raise
                if re.search(_OF_CHANGES, str(error)):
                    raise self._changes(error) from error
                if isinstance(error, NotImplementedError) or re.search(_OF_VMAP, str(error)):
                    raise self._not_followed(error) from error
                if FOLDED in self.call.dims:
                    raise self._not_folded(error) from error
                raise
        if loops:
            self._refuse_differences(returned)
        if self.leaves_traces:
            self._leave_traces()
        shapes = [[x.shape for x in tensors_of(result)] for result in returned]  # which may be of symbols
        pairs = zip(results, possible_dims, strict=True)
        of_all = [_with_samples_in(first, x) for x, (first, *_) in pairs]
        return Mapped(returned[-1], of_all, possible_dims, is_filled_up=any(each != shapes[0] for each in shapes))

    def _of_one_sample(self, weights: list[Tensor], inputs: list[Any]) -> Any:
        """What the forward returns for one sample, as a batch of one: its parameters are `weights` meanwhile."""
        module, dims = self.module, self.call.dims
        alone = [x if dim in (None, FOLDED) else x.unsqueeze(dim) for x, dim in zip(inputs, dims, strict=True)]
        args, kwargs = tree_unflatten(alone, tree_structure((self.call.args, self.call.kwargs)))
        pairs = zip(self.originals.items(), weights, strict=True)
        lent = {place: Lent(original, weight) for (place, original), weight in pairs}
        own = next(filter(is_of_one_sample, weights), None) if self.makes_own else None
        in_their_places = swapped(dict(zip(lent, weights, strict=True)), module.modules())
        with in_their_places, quiet_fallbacks(), OneSample(module, own):
            together = left_together(self.module, self.call)
            places = [*module._told.left.get(self.call.kind, ()), *together]
            result = with_left(module, places, lambda: module._plainly(args, kwargs, lent))
        if together:
            result = self._without(together, result)
        if Counter(ids_of_one_sample((args, kwargs))) - Counter(ids_of_one_sample(alone)):
            raise keeping(self.module, "an argument")
        self._refuse_objects(result)
        return result

    def _without(self, together: Sequence[Place], given: Given) -> Any:
        """What one sample has given, without what is left for all in other attributes."""
        left = {place: given.left.pop(place) for place in together if place in given.left}
        if left and (self.module.goes_in_a_loop() or any(map(is_of_one_sample, tree_leaves(left)))):
            self.leaves_traces = True
        else:
            put_in_place(self.module, Given(None, left))
        return given if self.module._told.left.get(self.call.kind) else given.returned

    def _by_vmap(self, one_sample: Callable[..., list[Tensor]], leaves: list[Any]) -> list[Tensor]:
        weights, inputs = self._weights(), self.call.by_sample(leaves)
        in_dims = [dim for _, dim in weights], [dim for _, dim in inputs]
        over_samples = torch.vmap(one_sample, in_dims=in_dims, randomness="different")
        with functions_looked_at():
            return over_samples([weight for weight, _ in weights], [leaf for leaf, _ in inputs])

    def _weights(self) -> list[tuple[Tensor, int | None]]:
        """The parameters, and where the samples stand in them; a frozen one is itself, as the forward may keep it."""
        pairs = zip(self.expanded, self.originals.values(), strict=True)
        if all(dim is None for dim in self.call.dims):  # `vmap` needs something to map
            return [(weight, 0) for weight in self.expanded]
        return [(own, None) if weight is not own and not own.requires_grad else (weight, 0) for weight, own in pairs]

    def _one_by_one(self, one_sample: Callable[..., list[Tensor]], leaves: list[Any]) -> list[Tensor]:
        """What `vmap` does, for one sample after the other."""
        batch, compares, inputs = self.call.batch, leaves is not self.call.leaves, self.call.by_sample(leaves)
        by_sample = [[x] * batch if dim is None else _parts(x, dim, compares) for x, dim in inputs]
        weights = [[weight] * batch if dim is None else weight.unbind() for weight, dim in self._weights()]
        results, traces = [], Traces([*self.module.modules()], [x for x, dim in inputs if dim is None])
        for i in range(batch):
            with traces.writes:
                results.append(one_sample([w[i] for w in weights], [x[i] for x in by_sample]))
            if not traces.take_back():
                raise keeping(self.module, "an attribute, a buffer or an argument")
            if self.counts and traces.writes.changed and traces.writes.has_read:
                raise refusal(
                    self.module,
                    "its samples go through it one after the other, and it changes a buffer or an attribute in place "
                    "without autograd's knowledge, as .data does, though what samples have computed may need it",
                    "a forward that makes it anew",
                    "Write self.noise = torch.randn_like(self.noise) for self.noise.data.normal_(). Switch observers "
                    "of quantization off, model.apply(torch.ao.quantization.disable_observer).",
                )
        for (x, dim), parts in () if compares else zip(inputs, by_sample, strict=True):
            if dim is not None and any(version_of(own) and not own._is_view() for own in parts):
                # as they were changed, by parameters perhaps; what has a history has it from the samples already
                with torch.set_grad_enabled(not x.requires_grad and any(own.requires_grad for own in parts)):
                    x.copy_(torch.stack(parts, dim))
        self.leaves_traces |= traces.taken_back
        ends = (result.grad_fn for of_sample in results for result in of_sample)
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_of(*ends)):
            raise complaint(  # not seen: users see the error of `vmap` in its place
                self.module.qualified_name,
                "its samples go through it one after the other, and it holds a reentrant checkpoint",
                "a checkpoint that is not reentrant",
                "Give the checkpoint use_reentrant=False.",
            )
        return list(map(stacked, zip(*results, strict=True)))

    def _not_folded(self, error: Exception) -> PerSampleError:
        """The error where the forward fails with an even part of the rows of a folded argument."""
        shapes = [tuple(x.shape) for x, dim in zip(self.call.leaves, self.call.dims, strict=True) if dim == FOLDED]
        return refusal(
            self.module,
            f"an argument has shape {shapes[0]}, several rows of each sample, and on an even part of them its forward "
            f"fails ({error})",
            "equally many rows of each sample, one sample's after the other's",
            "Call it with samples that have equally many, as many images in each text.",
        )

    def _not_followed(self, error: Exception) -> PerSampleError:
        """The error where `vmap` gives up."""
        remedy = "Write its per-sample forward with @expands, or keep the parameters in modules of torch.nn."
        if "stack expects" in str(error):
            remedy = "Let all samples give results of one size: pad_packed_sequence(..., total_length=x.shape[1])."
        elif "dynamic shape" in str(error):  # as x[mask]
            remedy = "Compute all and choose afterwards: torch.where(mask, layer(x), 0), not layer(x[mask])."
        elif "`.data`" in str(error):
            remedy = OF_FIRST_FORWARDS
        elif re.search("setup_context|generate_vmap_rule", str(error)):
            remedy = (
                "Give a checkpoint use_reentrant=False, and an autograd Function of your own a setup_context and "
                "generate_vmap_rule = True."
            )
        refused = refusal(
            self._where_raised(error),
            f"its forward does what vmap cannot follow ({error})",
            "a forward that treats each sample alone and changes nothing in place that samples share",
            hint_of_layout(self.module) + remedy,
        )
        refused.by_vmap = True
        return refused

    def _where_raised(self, error: BaseException) -> Any:
        """The innermost module whose forward ran when it was raised and that can go sample by sample itself."""
        if self.module._alone:
            return self.module
        within = {id(module): module for module in self.module.modules()}
        called = (within.get(id(frame.f_locals.get("self"))) for frame, _ in walk_tb(error.__traceback__))
        return [self.module, *(m for m in called if isinstance(m, PerSampleModule) and m._kind() is not None)][-1]

    def _changes(self, error: Exception) -> PerSampleError:
        """The error where torch cannot change in place what is one tensor for all samples."""
        return refusal(
            self.module,
            f"its forward changes in place what all samples share, such as a parameter ({error})",
            "a forward that leaves it as it is",
            f"{OF_FIRST_FORWARDS} Else change parameters after the optimizer's step, or in the forward of a module "
            "around this one that has no parameters of its own.",
        )

    # What the forward leaves behind

    def _leave_traces(self) -> None:
        """Runs the plain forward once more, for what it leaves in attributes."""
        self.call.refuse_changes(self.module, counts=True)
        states = RandomStates([*self.module.modules(), self.call.args, self.call.kwargs])
        with torch.enable_grad(), states, self.module._unnoticed():
            self.module._plainly(self.call.args, self.call.kwargs)
        for x, version, number in self.changed:
            if torch.equal(x, number):  # the samples' graph may hold it
                set_version(x, version)

    @contextmanager
    def _nothing_of_one_sample(self, leaves: list[Any], *, thorough: bool) -> Iterator[None]:
        """Raises where the forward has left a tensor of one sample behind, in the module or in an argument."""
        modules, told, kind = [*self.module.modules()], self.module._told, self.call.kind
        together = left_together(self.module, self.call)
        undo = Undo(modules) if together or self.numbers is not None or kind in told.miscounts else None
        before = Attributes(modules) if undo is None else undo.attributes
        with nullcontext() if undo is None else undo.updates:
            numbers = None if self.numbers is None else Before(self.module)
            yield
        if numbers is not None and not self._are_of_all(numbers.numbers()):
            told.miscounts.add(kind)
        miscounts = leaves is self.call.leaves and kind in told.miscounts
        self.leaves_traces |= miscounts
        if undo is not None and self.leaves_traces and not is_traced():
            changed = (x for x, version in undo.versions if version_of(x) != version)
            self.changed = [(x, version_of(x), x.detach().clone()) for x in changed]
        if undo is not None and together and self.leaves_traces:
            undo.put_back(drawn=False)
        looked_into = object if thorough else (Tensor, dict, list, tuple)
        for module in self.module.modules():
            kept = [(f"attribute {name!r}", value) for name, value in vars(module).items() if name not in NOT_ITS_OWN]
            kept += [(f"the buffer {name!r}", value) for name, value in module._buffers.items()]
            for what, value in kept:
                if not isinstance(value, looked_into):
                    continue
                left = list(filter(is_of_one_sample, contents(value, 4 * thorough)))
                if left:
                    before.put_back()
                    error = keeping(self.module, what)
                    error.by_keeping = True
                    # in a loop it can be taken back, if no loss may read it
                    error.by_vmap = not any(of_all(x).requires_grad for x in left)
                    raise error
        if any(map(is_of_one_sample, contents([leaf for leaf in leaves if not isinstance(leaf, Tensor)]))):
            raise keeping(self.module, "an argument")
        if undo is not None and miscounts:
            undo.put_back(drawn=False)

    def _are_of_all(self, numbers: Numbers) -> bool:
        """Whether the forward has left the plain one's numbers; a counter of samples has one sample's."""
        left = self.module._told.left.get(self.call.kind, ())
        plain = {place: found for place, found in (self.numbers or {}).items() if place not in left}
        return are_same_numbers(plain, numbers)

    # What the forward returns

    def _possible_dims(self, output: Tensor) -> list[int]:
        """Where the one sample may stand in what the forward returned for it, `(…, 1, …)`, likeliest first.

        With `guests` there is no plain forward to compare with: it has to stand where the module or the model says.
        """
        ones = [dim for dim, size in enumerate(output.shape) if size == 1]
        if not output.dim() and not self.guests and _is_outermost(self.module):
            return [MEAN, SUM]
        may_be_folded = FOLDED in self.call.dims and output.dim() > 0
        if may_be_folded and not ones:
            return [FOLDED]
        usual = self.module._dim_of(output) if output.dim() else 0
        may_be_features = usual == 1 and output.dim() == 2 and 0 in ones  # (1, features), if not (T, 1)
        if not ones or (self.guests and (may_be_features or usual not in ones)):
            raise refusal(
                self.module,
                f"for one sample its forward returns a tensor of shape {tuple(output.shape)}",
                f"size 1 in dimension {usual}, where the samples stand",
                f"{self._of_arguments(output, usual) or _of_folded_results(output, usual)}"
                "For squeeze() write squeeze(-1). Return tensors with a batch dimension, and reduce over the samples "
                f"outside of the module. {OF_PARAMETERS}",
            )
        self._refuse_unclear(output, usual)
        ones.sort(key=lambda dim: dim != (0 if may_be_features else usual))
        return [*ones, FOLDED] if may_be_folded else ones

    def _possible_dims_left(self, output: Tensor) -> list[int]:
        try:
            return self._possible_dims(output)
        except PerSampleError:
            return [NOWHERE]

    def _of_arguments(self, output: Tensor, usual: int) -> str:
        """What may be wrong with the arguments, where one sample has a result with other rows; it may be empty."""
        unopened = (leaf for leaf in self.call.leaves if not isinstance(leaf, Tensor))
        holder = next((leaf for leaf in unopened if any(isinstance(x, Tensor) for x in contents(leaf))), None)
        if holder is not None:
            return f"Give it the tensors of the {type(holder).__name__} alone, in a dict or in a dataclass. "
        if self.call.batch == 1 and output.dim() > usual:
            number = f"per_sample(batch_size={output.shape[usual]})"
            return (
                "The first tensor of the call has one row: if all samples share it, call the model with "
                f"shared_by_all(x), or say how many there are, {number}. "
            )
        return "Give a tensor in place of a list with an entry for each sample. " * (self.call.batch in output.shape)

    def _refuse_folded_alone(self, outputs: list[Tensor], possible_dims: list[list[int]]) -> None:
        """Raises where all results are folded: nothing in them tells whether arguments were folded in that order."""
        are_folded = bool(possible_dims) and all(dims == [FOLDED] for dims in possible_dims)
        if are_folded and not self.call.is_surely_folded:
            raise refusal(
                self.module,
                f"for one sample its forward returns a tensor of shape {tuple(outputs[0].shape)}",
                "a result with one row per sample",
                "Return tensors with a batch dimension.",
            )

    def _refuse_unclear(self, output: Tensor, usual: int) -> None:
        """Raises for `(B, 1)` and `(1, 1)` in a time-first model, if no argument has samples: B positions, or samples?

        With an argument that has the samples, the plain forward's result tells.
        """
        batch, is_column = self.call.batch, output.dim() == 2 and output.shape[1] == 1
        if usual == 1 and is_column and len(output) in (1, batch) and set(self.call.dims) <= {None} and batch > 1:
            raise refusal(
                self.module,
                f"its forward returns a tensor of shape {tuple(output.shape)} for arguments that all samples share, as "
                "it seems; in a model with batch_first=False its rows may be positions, or samples",
                "a shape that says which",
                "Say it with another dimension: unsqueeze(-1) of the argument for positions.",
            )

    def _refuse_objects(self, result: Any) -> None:
        """Raises where tensors of one sample are inside of objects, where nothing can put all samples together."""
        unknown = [leaf for leaf in flatten(result)[0] if not isinstance(leaf, Tensor) and not is_cache(leaf)]
        holders = [type(leaf).__name__ for leaf in unknown if any(map(is_of_one_sample, contents(held_by(leaf))))]
        if holders:
            raise refusal(
                self.module,
                f"its forward returns tensors inside of a {holders[0]}",
                "tensors, or lists, tuples, dicts and dataclasses of them",
                f"Return the tensors and make the {holders[0]} of them outside, a parameter as parameter.expand_as(x); "
                "or hold the parameter in a small module that returns that, so that this forward runs as it is.",
            )

    def _refuse_differences(self, returned: Sequence[Any]) -> None:
        """Raises where what samples return one after the other cannot be put together, as it is no tensor."""
        flat = [flatten(result)[0] for result in returned]
        others = [[leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_cache(leaf)] for leaves in flat]
        if any(isinstance(part, Tensor) for leaves in others for leaf in leaves for part in contents(leaf)):
            raise keeping(self.module, "an object that it returns")
        values = [[leaf for leaf in leaves if isinstance(leaf, bool | int | float | str)] for leaves in others]
        if any(own != values[0] for own in values):
            raise refusal(
                self.module,
                "its forward returns numbers that differ from sample to sample",
                "tensors",
                "Return tensors.",
            )

    def without_samples(self) -> Any:
        """What the plain forward returns for B = 0, connected to the parameters that it uses: these get 0 rows."""
        alone = [
            original.detach().requires_grad_(weight.requires_grad)
            for original, weight in zip(self.originals.values(), self.expanded, strict=True)
        ]
        with swapped(dict(zip(self.originals, alone, strict=True)), self.module.modules()), OneSample(self.module):
            result = self.module._plainly(self.call.args, self.call.kwargs)
        ends = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        used = {id(getattr(node, "variable", None)) for end in ends for node in graph_of(end)}
        of_used = [weight.abs().sum() for weight, own in zip(self.expanded, alone, strict=True) if id(own) in used]
        nothing = sum(of_used, start=torch.zeros(()))
        return tree_map(
            lambda x: x + nothing.to(x.dtype) if isinstance(x, Tensor) and may_have_derivatives(x) else x, result
        )


def _parts(x: Tensor, dim: int, compares: bool) -> list[Tensor]:
    """The parts that samples have of an argument.

    They are copies, which may be changed in place, unless something derives by them outside of a comparison.
    """
    parts = x.unbind(dim)
    return [*parts] if x.requires_grad and not compares else [part.clone() for part in parts]


def _with_samples_in(dim: int, results: Tensor) -> Tensor:
    """The results of all samples `(B, *)`, with the samples where that of one has size 1; numbers as they are."""
    if dim == FOLDED:
        return results.flatten(0, 1)
    return results if dim < 0 else results.movedim(0, dim)


def _of_folded_results(output: Tensor, usual: int) -> str:
    """What to do if the rows of a result are parts of one sample, as its masked words; empty if there are none."""
    rows = output.shape[usual] if output.dim() > usual else 0
    if rows < 2:
        return ""
    return (
        f"If each sample has {rows} rows of the result, as of its masked words, return "
        f"result.unflatten({usual}, (-1, {rows})), or the losses of the samples, where their numbers differ. "
    )
