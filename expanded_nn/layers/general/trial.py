"""The general rule's trial: the forward of the whole batch has to give what the samples give alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import FOLDED, unfolded
from expanded_nn.common.chance import WithoutChance
from expanded_nn.common.containers import flatten, tensors_of
from expanded_nn.common.modes import unseen
from expanded_nn.common.rounding import are_equal, are_near, is_comparable, near
from expanded_nn.common.shared import memory_order
from expanded_nn.common.steady import BeforeForward
from expanded_nn.factored import as_factored
from expanded_nn.layers.general.batched import Batched
from expanded_nn.layers.general.called import is_cache, of_sample, once_per_sample
from expanded_nn.layers.general.gradients import (
    Verdict,
    are_alike,
    as_compared,
    compared_rows,
    derivatives,
    random_numbers,
)
from expanded_nn.layers.general.left import Place
from expanded_nn.layers.general.mapped import MEAN, NOWHERE, OF_PARAMETERS, SUM, Mapped, Mapper, moved
from expanded_nn.layers.general.plain import Plain, is_float
from expanded_nn.layers.general.told import Compared, Way
from expanded_nn.layers.general.trial_errors import of_mixing, of_reduced
from expanded_nn.modules.layout import refusal
from expanded_nn.recording.doubt import Pair
from expanded_nn.recording.lift import swapped

# the leaves of a result, their structure, and their derivatives by the trained parameters and the arguments
Alone = tuple[list[Any], TreeSpec | None, list[Tensor | None] | None]


class Trial:
    """Compares the samples' results with the plain forward of the whole batch: they have to be the same.

    They differ if the forward mixes samples, or if an argument that all samples share has B rows by chance. What the
    forwards leave behind is taken back, random states as well. Random numbers that they draw are replaced by fixed
    ones; if the results differ nevertheless, derivatives tell whether samples are mixed.

    Args:
        mapper: Sends arguments through the forward of the module sample by sample; it has the call that is made.
        hooks: Whether the forward hooks of modules within are called in that.
    """

    def __init__(self, mapper: Mapper, *, hooks: bool = True) -> None:
        self.mapper, self.module, self.batch = mapper, mapper.module, mapper.call.batch
        self.hooks = hooks or self.module._told.needs_hooks
        self.plain = Plain(self.module, (mapper.call.args, mapper.call.kwargs))
        self.expected = self._first()
        self.module._told.left[mapper.call.kind] = self.module._told.together[mapper.call.kind] = ()
        self.again: tuple[Mapped, list[Tensor]] | None = None  # see `_mapped_again`, until derivatives are taken
        self.alone: dict[tuple[int, ...], Alone] = {}  # see `_of_samples`
        if self.plain.places and not mapper.guests:
            self._count_what_is_left(self.plain.places)
        mapper.numbers = self.plain.numbers

    @torch.no_grad()
    def _first(self) -> list[Tensor]:
        """The plain forward's tensors. It may change a parameter in place, if running again changes nothing more.

        Raises:
            PerSampleError: If each run changes one further, as by a factor; all are put back.
        """
        parameters = [weight for weight in self.mapper.originals.values() if not weight.is_meta]
        before = [weight.detach().clone() for weight in parameters]
        expected = self.plain.first()
        self.hooks |= self.module._told.needs_hooks
        pairs = list(zip(parameters, before, strict=True))
        if all(map(are_equal, parameters, before)):
            return expected
        once = [weight.detach().clone() for weight in parameters]
        self.plain(hooks=self.module._told.needs_hooks)
        changed = [pair for pair, weight in zip(pairs, once, strict=True) if not are_equal(pair[0], weight)]
        if not changed:
            return expected
        for weight, value in pairs:
            weight.data.copy_(value)
        recorder = self.module._recorder
        raise complaint(
            self.module.qualified_name,
            f"its forward changes the parameter {recorder.name_of(changed[0][0]) if recorder else ''} in place, and "
            "more each time that it runs",
            "a forward that leaves parameters as they are, as it may run more than once",
            "Change them after the optimizer's step, or in the forward of a module around this one that has no "
            "parameters of its own.",
        )

    def _count_what_is_left(self, places: list[Place]) -> None:
        """Finds the attributes in which the forward leaves what samples have, and which count as results then.

        What samples have together does not, nor does what all share, as a table of positions.
        """
        told, kind = self.module._told, self.mapper.call.kind
        told.left[kind] = self.plain.left = places
        fitting: list[Place] = []
        failures = suppress(PerSampleError, RuntimeError, ValueError, IndexError, TypeError, AssertionError)
        with self.plain.states_now(), WithoutChance() if self.plain.is_random else nullcontext(), failures:
            mapped, _ = self._mapped_again()  # if it fails, that is told where it counts
            fitting = self._places_that_fit(mapped, self.plain(hooks=self.hooks))
        told.left[kind] = self.plain.left = fitting
        told.together[kind] = [place for place in places if place not in fitting]
        if fitting:
            self.expected = self._first()

    def _places_that_fit(self, mapped: Mapped, expected: list[Tensor]) -> list[Place]:
        fitting, start, size = [], len(tensors_of(mapped.returned.returned)), self._size_of_arguments()
        if len(mapped.tensors) != len(expected):
            return []
        for place, value in mapped.returned.left.items():
            part = slice(start, start + len(tensors_of(value)))
            start = part.stop
            left = Mapped(value, mapped.tensors[part], mapped.possible_dims[part])
            numbers = [x for x, (first, *_) in zip(left.tensors, left.possible_dims, strict=True) if first == MEAN]
            if [NOWHERE] in left.possible_dims or any(map(_is_one_for_all, numbers)):
                continue
            dims = self._dims(left, expected[part], hooks=self.hooks, start=part.start)
            pairs = zip(left.with_samples_in(dims).tensors, expected[part], strict=True) if dims is not None else ()
            if dims is not None and all(x.shape == plain.shape and near(plain, x.detach(), size) for x, plain in pairs):
                fitting.append(place)
        return fitting

    def compared(self, mapped: Mapped | None = None, *, with_derivatives: bool = False) -> Compared:
        """Where the samples stand in the results; `with_derivatives` these are compared as well.

        `mapped` is what the samples have given, if they have gone through the forward.

        Raises:
            PerSampleError: If the forward of the whole batch gives another result.
        """
        what = "on the whole batch its forward gives another result than sample by sample"
        with self.plain.states_now(), BeforeForward(self.module).without_traces():  # checkpoints compute again in it
            with WithoutChance() if self.plain.is_random else nullcontext():
                if mapped is None or self.plain.is_random:
                    self.again = self._mapped_again()
                    mapped, _ = self.again
                needs_hooks = self.module._told.needs_hooks
                for hooks in sorted({needs_hooks, self.hooks}):  # they may add to what the forward returns
                    is_other = hooks != needs_hooks or self.plain.is_random
                    expected = self.plain(hooks=hooks) if is_other else self.expected
                    dims = self._dims(mapped, expected, hooks=hooks)
                    if dims is None or not self._agree(mapped, dims, expected, hooks=hooks):
                        continue
                    self._refuse_shared_numbers(mapped, dims)
                    try:
                        is_same = not with_derivatives or self._have_same_derivatives(dims, hooks=hooks)
                    except torch.OutOfMemoryError:  # a comparison takes more than a step
                        is_same = True
                    if is_same:
                        return Compared(True, dims, tuple(map(memory_order, expected)))
                    what = (
                        "its results are those of single samples, and their derivatives are others (a backward of your "
                        "own that clips the gradient of a weight clips the sum of the samples' gradients)"
                    )
                repeats = self._repeats(expected)
                is_certain = repeats and (not self.plain.is_random or self._repeats(expected, other_numbers=True))
            # where the plain forward gives another result each time, a difference tells nothing
            if dims is None or mapped.is_filled_up or is_certain or self._mixes(dims, repeats=repeats):
                self.module._told.distrust(self.mapper.call)
                arguments = zip(self.mapper.call.leaves, self.mapper.call.dims, strict=True)
                others = [x for x, dim in arguments if isinstance(x, Tensor) and dim in (None, FOLDED)]
                reduces = dims is None and [MEAN, SUM] in mapped.possible_dims
                error = of_reduced(self.module) if reduces else of_mixing(self.module, what, others, self.batch)
                if not others:
                    error.about = "results"  # else the samples may have unequal parts of an argument
                raise error
        return Compared(False, dims, tuple(map(memory_order, expected)))

    def _refuse_shared_numbers(self, mapped: Mapped, dims: tuple[int, ...]) -> None:
        """Raises if a number that is returned is of parameters alone: each sample may use it in another way.

        It is the same for all samples then, though these differ, and so is its derivative. Their mean has the right
        rows only where the loss adds it.
        """
        places = [place for place, dim in enumerate(dims) if dim in (MEAN, SUM)]
        numbers = [(place, x) for place in places if (x := mapped.tensors[place]).requires_grad and _is_one_for_all(x)]
        by_sample = self.mapper.call.by_sample(self.mapper.call.leaves) if numbers else ()
        if all(_is_one_for_all(x.movedim(dim, 0)) for x, dim in by_sample if dim is not None):
            return
        for place, number in numbers:
            rows = torch.autograd.grad(number.sum(), [*self._trained()], retain_graph=True, allow_unused=True)
            found = [as_factored(of).dense() for of in rows if of is not None]
            if (
                any(map(torch.any, found))
                and all(map(_is_one_for_all, found))
                and not self._changes_with_samples(place)
            ):
                raise refusal(
                    self.module,
                    "its forward returns a number that depends on parameters alone, and not on the samples",
                    "one number for each sample, as the loss may use it for each in another way",
                    "Return it with a row for each sample and as many dimensions as what it meets, "
                    f"number.view(1, 1).expand(len(x), 1) for (B, C). {OF_PARAMETERS}",
                )

    def _changes_with_samples(self, place: int) -> bool:
        """Whether a result of the plain forward is another one for other samples; not if it fails with them."""
        leaves, structure = tree_flatten(self.plain.arguments)
        floats = [leaf for leaf in leaves if is_float(leaf)]
        drawn = iter(random_numbers([leaf.shape for leaf in floats], floats))
        others = [next(drawn) if is_float(x) else torch.zeros_like(x) if isinstance(x, Tensor) else x for x in leaves]
        try:
            found = self.plain(hooks=self.hooks, arguments=tree_unflatten(others, structure))
        except (RuntimeError, ValueError, IndexError):
            return False
        return len(found) != len(self.expected) or not near(self.expected[place], found[place])

    def _repeats(self, expected: list[Tensor], *, other_numbers: bool = False) -> bool:
        """Whether the plain forward gives this again; with `other_numbers` after other random numbers were drawn."""
        if other_numbers:
            self.plain(hooks=self.hooks, draws=True)
        return all(map(near, expected, self.plain(hooks=self.hooks)))

    def _mapped_again(self) -> tuple[Mapped, list[Tensor]]:
        """The samples' results from copies of the arguments, and the inputs by which they have derivatives."""
        inputs, arguments = self.plain.differentiable()
        with BeforeForward(self.module).without_traces(hooks=self.hooks), self.by_samples():
            mapped = self.mapper(tree_leaves(arguments))
        self.plain.states.restore()
        return mapped, inputs

    @contextmanager
    def by_samples(self) -> Iterator[None]:
        """Raises a refusal where the forward fails sample by sample: on the whole batch it has run."""
        try:
            yield
        except (PerSampleError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            raise of_mixing(
                self.module, f"on the whole batch its forward runs, and it fails sample by sample ({error})"
            ) from error

    def told(self, mapped: Mapped | None = None) -> Compared:
        """`compared`, which is kept for later calls of the kind; the first of these compares derivatives as well."""
        call, told = self.mapper.call, self.module._told
        with_derivatives = told.lacks_derivatives(call)
        found = told.compared[call.kind] = self.compared(mapped, with_derivatives=with_derivatives)
        told.with_derivatives |= {call.kind} if with_derivatives else set()
        return found

    def judged(self, dims: tuple[int, ...], attempt: Callable[..., Any]) -> tuple[Verdict, Way | None]:
        """Whether the forward on the whole batch gives the samples' results and derivatives, and the way it has gone.

        The samples stand in `dims` of the results. `attempt(args, kwargs)` runs that forward.
        """
        trained, own = self._trained(), {id(parameter) for _, parameter, _ in self.module._own()}
        is_own = [id(parameter) in own for parameter in trained.values()]
        states, traces = self.plain.states_now(), BeforeForward(self.module).without_traces()
        with states, traces, WithoutChance() if self.plain.is_random else nullcontext():
            leaves, structure, wanted = self._of_samples(dims)
            self.alone.clear()
            wanted = as_compared(wanted)  # which lets go of what the graph holds
            inputs, (args, kwargs) = self.plain.differentiable()
            with BeforeForward(self.module).without_traces(hooks=self.hooks):
                result, way = attempt(args, kwargs)
            whole, other_structure = flatten(result)
            if way is None or structure != other_structure or not all(map(_is_same, leaves, whole)):
                return Verdict.WRONG, None
            if self._is_seen_by_others(whole, dims, [*trained]):
                return Verdict.WRONG, None
            given = as_compared(derivatives(whole, [*trained, *inputs]))
        is_own += [False] * len(inputs)
        verdict = Verdict.WRONG if wanted is None or given is None else compared_rows(wanted, given, is_own)
        return verdict, way if verdict is Verdict.RIGHT else None

    def _is_seen_by_others(self, whole: list[Any], dims: tuple[int, ...], weights: list[Tensor]) -> bool:
        """Whether the first sample's results have derivatives by the rows of other samples.

        These are zero to the last bit, however small the difference is that a table of B rows makes.
        """
        results = [leaf for leaf in whole if isinstance(leaf, Tensor)]
        pairs = [(x, dim) for x, dim in zip(results, dims, strict=True) if x.requires_grad and dim not in (MEAN, SUM)]
        with torch.enable_grad():
            ends = [of_sample(x, dim, 0, self.batch) for x, dim in pairs if x.dim()]
        if self.batch < 2 or not ends or not weights:
            return False
        numbers = random_numbers([end.shape for end in ends], ends)
        try:
            rows = torch.autograd.grad(ends, weights, numbers, retain_graph=True, allow_unused=True)
        except RuntimeError:  # the user's own backward says so where it comes to one
            return False
        return any(bool((as_factored(of).squared_norms()[1:] > 0).any()) for of in rows if of is not None)

    def _trained(self) -> dict[Tensor, Tensor]:
        """The expanded parameters by which there are derivatives, and the parameters themselves; tied ones once.

        A layer within expands a weight that is computed, as by a step of MAML, once more for itself.
        """
        pairs = zip(self.mapper.expanded, self.mapper.originals.values(), strict=True)
        own = {id(parameter) for _, parameter, _ in self.module._own()}
        are_seen = ((weight, p) for weight, p in pairs if p.is_leaf or id(p) in own)
        return {weight: parameter for weight, parameter in are_seen if weight.requires_grad}

    def _of_samples(self, dims: tuple[int, ...]) -> Alone:
        """What the samples give alone, in these dimensions, and its derivatives: once for both comparisons with it."""
        if dims not in self.alone:
            mapped, inputs = self.again or self._mapped_again()
            self.again = None
            if len(mapped.tensors) != len(dims):  # it asks whether its arguments require grad: nothing to tell by
                return [], None, None
            leaves, structure = flatten(mapped.with_samples_in(dims).result())
            self.alone[dims] = leaves, structure, derivatives(leaves, [*self._trained(), *inputs])
        return self.alone[dims]

    def _have_same_derivatives(self, dims: tuple[int, ...], *, hooks: bool) -> bool:
        """Whether the plain forward has the samples' derivatives, each compared by its own size.

        A table that all samples share, with B rows by chance, may change the results by less than rounding does, and be
        all that the rows of some parameter are made of.
        """
        if self._is_within_another():
            return True
        _, _, wanted = self._of_samples(dims)

        def ends(plain: list[Tensor]) -> list[Tensor]:
            return [once_per_sample(x, dim, self.batch) for x, dim in zip(plain, dims, strict=False)]

        pair = self._beside_plain(wanted, ends, hooks=hooks)
        return pair is None or are_alike(*pair, self._size_of_arguments())

    def _mean_or_sum(self, place: int, *, hooks: bool) -> list[int]:
        """Which of both a result of zero is, as its derivatives tell; if they are zero as well, what was found before.

        Then all rows are zero.
        """
        if self._is_within_another():
            return []
        mapped, inputs = self._mapped_again()
        if place >= len(mapped.tensors):  # it asks whether its arguments require grad: nothing to tell by
            return []
        wanted = derivatives([mapped.tensors[place].sum()], [*self._trained(), *inputs])
        pair = self._beside_plain(wanted, lambda plain: [plain[place]], hooks=hooks)
        if pair is None:
            return []
        of_sum, given = pair
        of_mean = [None if each is None else each / self.batch for each in of_sum]
        fitting = [dim for dim, each in ((MEAN, of_mean), (SUM, of_sum)) if are_alike(each, given, 0.0)]
        known = self.module._told.compared.get(self.mapper.call.kind)
        before = [known.dims[place]] if known is not None and place < len(known.dims) else []
        return [dim for dim in before if dim in fitting] or fitting[-1:]

    def _is_within_another(self) -> bool:
        """Whether a module around this one compares derivatives, or there are no numbers to compare."""
        return any(isinstance(parameter, Batched) or parameter.is_meta for parameter in self.mapper.originals.values())

    def _beside_plain(
        self, wanted: list[Tensor | None] | None, ends: Callable[[list[Tensor]], list[Tensor]], *, hooks: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        """Derivatives of all samples, their rows added up, and those of the plain forward's `ends`.

        `None` if the backward fails, as the user's will.
        """
        originals, trained = self.mapper.originals, self._trained()
        # torch counts frequencies in the whole batch, so that a gradient scaled by them is not the sum of the rows
        by_frequency = {id(p) for (m, _), p in originals.items() if getattr(m, "scale_grad_by_freq", False)}
        places = {id(parameter): place for place, parameter in enumerate(trained.values())}
        compared = {key: place for key, place in places.items() if key not in by_frequency}
        with unseen():  # by a module around this one, whose forward runs on the whole batch
            alone = {id(p): p.detach().requires_grad_(id(p) in places) for p in originals.values()}
        with swapped({place: alone[id(own)] for place, own in originals.items()}, self.module.modules()):
            plain, own_inputs = self.plain.with_graph(hooks=hooks)
            # here, as a Function of the user's may run a part of the forward again for them
            given = derivatives(ends(plain), [*map(alone.__getitem__, compared), *own_inputs])
        if wanted is None or given is None:
            return None
        rows, of_inputs = [wanted[place] for place in compared.values()], wanted[len(trained) :]
        sums = [None if each is None else as_factored(each).weighted_sum(each.new_ones(self.batch)) for each in rows]
        return [*sums, *of_inputs], given

    def _dims(self, mapped: Mapped, expected: list[Tensor], *, hooks: bool, start: int = 0) -> tuple[int, ...] | None:
        """Where the samples stand in each result, by the plain result's shape; `None` if nothing tells.

        These are the results from the `start`-th on.
        """
        if len(mapped.tensors) != len(expected):
            return None
        dims: list[int] = []
        for result, possible, plain in zip(mapped.tensors, mapped.possible_dims, expected, strict=True):
            first = possible[0]
            if first == MEAN:
                fitting = [dim for dim in possible if are_near(moved(result, first, dim).detach(), plain.detach())]
                if self.batch > 1 and len(fitting) == 2:
                    fitting = self._mean_or_sum(start + len(dims), hooks=hooks)
                if self.batch > 1 and (len(fitting) != 1 or (fitting == [MEAN] and self._may_be_of_no_sample(result))):
                    return None
                dims.append(fitting[0] if fitting else MEAN)
                continue
            others = [*range(result.dim()), *([FOLDED] if FOLDED in possible else ())]
            fitting = [dim for dim in others if first != FOLDED and moved(result, first, dim).shape == plain.shape]
            dims.append(first if first in fitting or not fitting else fitting[0])
        return tuple(dims)

    def _may_be_of_no_sample(self, numbers: Tensor) -> bool:
        """Whether the same number for all samples may be one beside a sum of their losses, as a penalty is."""
        recorder = self.module._recorder
        is_sum = recorder is not None and recorder.settings.loss_reduction == "sum"
        return is_sum and bool((numbers == numbers[0]).all())

    def _agree(self, mapped: Mapped, dims: tuple[int, ...], expected: list[Tensor], *, hooks: bool) -> bool:
        results = mapped.with_samples_in(dims).tensors
        size, pairs = self._size_of_arguments(), []
        for number, (result, plain, dim) in enumerate(zip(results, expected, dims, strict=True)):
            if plain.shape == (1,) and self.batch > 1:  # (B,) would broadcast with (B, 1) to (B, B)
                raise refusal(
                    self.module,
                    "its forward returns a tensor of shape (1,) that all samples share",
                    "a tensor with a batch dimension",
                    OF_PARAMETERS,
                )
            take = partial(once_per_sample, dim=dim, batch=self.batch)
            plain = take(plain)
            if result.shape != plain.shape or not near(plain, result.detach(), size):
                return False
            if is_comparable(plain):
                pairs.append(Pair(number, plain, result.detach(), take))
        return self._is_within_another() or not self.plain.rounding(expected, hooks=hooks).is_exceeded(pairs)

    def _size_of_arguments(self) -> float:
        """The largest number in the arguments."""
        floats = [x.detach() for x in tree_leaves(self.plain.arguments) if is_float(x)]
        sizes = (x.abs().where(x.isfinite(), 0).max() for x in floats if x.numel() and not x.is_meta)
        return max(map(float, sizes), default=1.0)

    def _mixes(self, dims: tuple[int, ...], *, repeats: bool) -> bool:
        """Whether a sample's result depends on the arguments of the others, or nothing could tell."""
        try:
            may_have_derivatives = self._has_derivatives_by_others(dims)
        except RuntimeError:  # where the forward makes its argument require a gradient itself
            may_have_derivatives = None
        if may_have_derivatives is None:
            self.plain.states.restore()
            return not repeats or self._changes_with_others(dims)
        return may_have_derivatives

    def _changes_with_others(self, dims: tuple[int, ...]) -> bool:
        """Whether the first sample's result changes when all samples are like the first, or nothing could tell."""
        leaves, structure = tree_flatten(self.plain.arguments)
        places, first = self.mapper.call.dims, torch.zeros(self.batch, dtype=torch.int64)
        alike = [
            leaf if dim is None else x.index_select(dim, first.to(leaf.device)).view_as(leaf)
            for leaf, (x, dim) in zip(leaves, self.mapper.call.by_sample(leaves), strict=True)
        ]
        if all(dim is None or torch.equal(*pair) for dim, *pair in zip(places, leaves, alike, strict=True)):
            return True
        before = self.plain(hooks=self.hooks)
        after = self.plain(hooks=self.hooks, arguments=tree_unflatten(alike, structure))
        both = [results for results in zip(before, after, dims, strict=True) if results[0].dim()]
        pairs = ((of_sample(x, dim, 0, self.batch), of_sample(y, dim, 0, self.batch)) for x, y, dim in both)
        return not all(torch.equal(*pair) for pair in pairs)

    def _has_derivatives_by_others(self, dims: tuple[int, ...]) -> bool | None:
        """Whether a sample's result has derivatives by the arguments of the others, or nothing could tell.

        `None` if there are indices alone.
        """
        results, inputs = self.plain.with_graph(hooks=self.hooks)
        with torch.enable_grad():
            ends = [
                of_sample(result, dim, 0, self.batch)
                for result, dim in zip(results, dims, strict=True)
                if result.requires_grad and result.dim() and (dim == FOLDED or result.shape[dim] == self.batch)
            ]
        read = [dim for leaf, dim in zip(self.mapper.call.leaves, self.mapper.call.dims, strict=True) if is_float(leaf)]
        by_sample = [(x, dim) for x, dim in zip(inputs, read, strict=True) if dim is not None]
        if not ends:
            return True
        if not by_sample:
            return None
        weights = random_numbers([end.shape for end in ends], ends)
        grads = torch.autograd.grad(ends, [x for x, _ in by_sample], weights, allow_unused=True)
        pairs = zip(grads, by_sample, strict=True)
        given = [unfolded(grad, dim, self.batch) for grad, (_, dim) in pairs if grad is not None]
        return any(bool(grad.narrow(dim or 0, 1, self.batch - 1).any()) for grad, dim in given)


def _is_same(leaf: Any, other: Any) -> bool:
    """Whether two parts of results are the same, tensors but for rounding."""
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        is_alike = leaf.shape == other.shape and leaf.dtype == other.dtype
        return is_alike and near(leaf.detach(), other.detach(), 1.0)
    return type(leaf) is type(other) and (leaf is other or is_cache(leaf) or bool(leaf == other))


def _is_one_for_all(of_samples: Tensor) -> bool:
    """Whether all samples, in the first dimension, have the same numbers."""
    return bool((of_samples == of_samples[:1]).all())
