"""Whether a sample's result and gradient are its own.

That sees what no layer can: samples that the forward mixes, and arguments or tables whose B rows are no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import PerSampleError, complaint, is_ours, warn
from expanded_nn.common.batch import FOLDED, NUMBERS, Dims, contents, is_shared_by_all, marked_like, readings, unfolded
from expanded_nn.common.chance import WithoutChance
from expanded_nn.common.containers import is_packed, leaves_of, rebuilt
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.meanwhile import quiet
from expanded_nn.common.modes import uncounted, unseen, without_fused_inference
from expanded_nn.common.outside import is_a_users_hook
from expanded_nn.common.own_state import attributes_of
from expanded_nn.common.rounding import are_equal, are_like, are_near, is_comparable, near
from expanded_nn.common.steady import Attributes, BeforeForward
from expanded_nn.factored import FactoredTensor
from expanded_nn.recording.doubt import Pair, Rounding
from expanded_nn.recording.graph import graph_of
from expanded_nn.recording.lift import has_guests, is_bias, parameters_of, swapped
from expanded_nn.recording.plain_model import TRIES, refusal_of_another_model
from expanded_nn.recording.sharded import is_sharded

MEET = -1  # in place of a dimension


class Comparison:
    """The samples of a forward that is about to run, in two parts: each alone is to give what it gives in the batch.

    The parts are halves, or one sample and the others, in turns: each half may have one of the longest samples, which
    decide for all others, and of a single sample some forwards make something else. All runs are on copies of the
    arguments, and what they leave behind is taken back.

    Args:
        module: The module that is called.
        forward: Its forward in per-sample mode.
        arguments: Its arguments, and those by keyword.
        batch: B.
        number: That of the call, which says at random which samples are compared.
    """

    calls_hooks = False  # whether the forward hooks of modules within are called, as they change results
    left: Attributes  # what the forward whose results are compared has left

    def __init__(
        self, module: Any, forward: Callable[[Any, Any], Any], arguments: Any, batch: int, number: int
    ) -> None:
        self.module, self.forward, self.batch, self.recorder = module, forward, batch, module._recorder
        chance = Random(number)  # not a generator that somebody else draws from
        is_single = number.bit_length() % 2 == 1  # of the calls that are compared in any case, 1, 7, 31, …
        self.part = sorted(chance.sample(range(batch), min(1, batch // 2) if is_single else batch // 2))
        self.arguments, self.leaves = arguments, leaves_of(arguments, is_packed)
        self.dims = list(map(self._samples_dim, self.leaves))
        self.strange: list[int] = []  # numbers among the results that are neither a mean nor a sum over the samples
        self.plain_results: list[Any] = []  # of all samples, as far as the plain forward has run

    def _samples_dim(self, leaf: Any) -> int | None:
        """Where the samples stand in an argument; `None` where they do not."""
        if not _may_have_samples(leaf):
            return None
        dim: int = self.recorder.settings.samples_dim(leaf.dim(), self.module)
        return dim if leaf.shape[dim] == self.batch else None

    @cached_property
    def looks_at(self) -> int:
        """How many samples the batch has, up to 2: of two, each alone is compared. 0 if no forward can be run again."""
        has_samples = self.dims.count(None) < len(self.dims) and not self._has_offsets()
        is_plain = not any(map(is_sharded, self.module.modules())) and not has_guests(self.module.modules())
        return min(self.batch, 2) if has_samples and is_plain and all(map(_is_open, self.leaves)) else 0

    @cached_property
    def before(self) -> BeforeForward:
        """What each run may leave traces in."""
        return BeforeForward(self.module)

    @cached_property
    def states(self) -> RandomStates:
        """The states of the generators that each run may draw from."""
        return RandomStates([*self.module.modules(), *self.leaves])

    def _has_offsets(self) -> bool:
        """Whether an argument seems to say where bags begin: they are not halved as rows are."""
        if not any(isinstance(module, nn.EmbeddingBag) for module in self.module.modules()):
            return False
        numbers = (x for x in self.leaves if _may_have_samples(x) and x.dtype in (torch.int32, torch.int64))
        starts = (x for x in numbers if x.shape[-1] in (self.batch, self.batch + 1) and not x[..., :1].any())
        return any(bool((x.diff() >= 0).all()) for x in starts)

    def _has_state(self) -> bool:
        """Whether modules keep a tensor for the samples, as the state of a recurrence: half of them have another one.

        When per-sample mode was switched on it was not there, or had other numbers.
        """
        tables = ((table, table.tensor()) for table in self.recorder.escalation.tables)
        unchanged = {id(x) for table, x in tables if x is not None and table.is_as_it_was(x)}
        held = contents(attributes_of(self.module.modules()))
        states = (x for x in held if isinstance(x, Tensor) and id(x) not in unchanged)
        return any(size >= self.batch for x in states for size in x.shape[:2])

    def refusal(self, *, is_first: bool) -> PerSampleError | None:
        """The error where the samples' results, or their gradients, depend on each other.

        In the first comparison also where the plain model's forward does something else. Nothing is said where the
        forward of a part fails, or where its results have another shape.
        """
        if not self.looks_at or (self.looks_at < 2 and not is_first):
            return None
        gradients = self.before.gradients()
        with uncounted():
            try:
                with without_fused_inference:
                    whole, is_random = self.run(self.forward, self.leaves)
            except Exception:  # the forward itself will say so
                return None
            if self.before.gradients() != gradients:
                return complaint(
                    self.recorder.name_of(self.module),
                    "its forward runs a backward, which has added to a .grad; now and then it runs once more, for a "
                    "comparison of its samples, and would add that again",
                    "a backward after the forward",
                    "Return that loss, and run its backward with that of the others, or say "
                    "per_sample(compare=False). Clear the gradients of this call.",
                )
            whole = whole if is_random else self._with_hooks(whole)
            if self.looks_at < 2:
                return refusal_of_another_model(self, whole, is_random=is_random)
            dims = self._dims_of_results(is_random=is_random)
            if dims is not None and not is_random and not self._agrees_with_plain(whole):
                what = (
                    "its results are not those of the plain model, as where it computes with len(x) of what all "
                    "samples share, which has a copy for each of them"
                )
                return self._refusal(what, self.recorder)
            # hooks that a backward would call
            has_hooks = any(each._backward_hooks or each._backward_pre_hooks for each in self.module.modules())
            parameter = None if dims is None or has_hooks else self._seen_by_others(whole, dims)
            is_clear, of_another = dims is not None and parameter is None, None
            has_strange = is_clear and any(_has_graph(whole[number]) for number in self.strange)
            if is_clear and is_first:
                of_another = refusal_of_another_model(self, whole, is_random=is_random)
                dims = None if self._hides_by_zeros(is_random=is_random) else dims
        if dims is None:
            if not is_first and self._has_state():
                return None
            # no layer is to blame, so the module that was called is tried
            return self._refusal("some of the samples give other results without the others", self.recorder)
        if parameter is not None:
            name, layer = self.recorder.name_of(parameter), self.recorder.holder_of(parameter)
            if layer not in {*self.module.modules()}:  # of an earlier call, so that no module in this one is to blame
                layer = self.module
            return self._refusal(f"gradients of samples by {name} are in the rows of others", layer)
        if has_strange and of_another is None:
            self._warn_of_number()
        return of_another

    def _with_hooks(self, whole: list[Any]) -> list[Any]:
        """What is in the result, where hooks of modules within may change it; if one does, all are called from now on.

        What they keep is undone. Those of a library are not called, as what they keep is not found.
        """
        within = [module for module in self.module.modules() if module is not self.module]
        tables = (table for module in within for table in (module._forward_hooks, module._forward_pre_hooks))
        hooks = [hook for table in tables for hook in table.values()]
        if not hooks or not all(map(is_a_users_hook, hooks)):
            return whole
        self.calls_hooks, left = True, self.left
        try:
            with without_fused_inference:
                found, _ = self.run(self.forward, self.leaves)
        except Exception:
            found = whole
        self.calls_hooks = not are_like(found, whole)
        if self.calls_hooks:
            return found
        self.left = left
        return whole

    def _warn_of_number(self) -> None:
        warn(
            f"{self.recorder.name_of(self.module)} returns a number that is neither the mean nor the sum of what each "
            "part of its samples gives. If that is the loss, the rows are not the gradients of the samples' own "
            "losses: it mixes the samples, or it weighs them, as ignore_index and class weights do. Reduce within each "
            "sample first, then over the samples. check(model, ..., loss=...) tells which it is."
        )

    def _refusal(self, what: str, by: Any) -> PerSampleError:
        return complaint(
            self.recorder.name_of(self.module),
            f"in a batch of {self.batch} {what}",
            "samples that do not depend on each other, and arguments whose rows are the samples",
            "Do what mixes samples (a mean over the batch, a similarity of all pairs) outside of the model. Call it "
            "with shared_by_all(x) for an argument that all samples share, and make a table a buffer. Draw random "
            "numbers by torch, not by a generator that the forward makes. check(model, ...) looks for the layer where "
            "samples meet. A loss that needs several samples has no per-sample gradients. per_sample(compare=False) "
            "leaves this comparison out.",
            refused_by=by,
        )

    def _readings(self) -> list[Dims]:
        """Where the samples may stand: in all arguments that have B rows, or elsewhere in those behind the first."""
        first = next(place for place, dim in enumerate(self.dims) if dim is not None)
        others = [() if place <= first else self._elsewhere(place) for place in range(len(self.dims))]
        return readings(self.dims, others)

    def _elsewhere(self, place: int) -> Dims:
        """Where else they may stand in an argument, if anywhere."""
        leaf = self.leaves[place]
        if not _may_have_samples(leaf):
            return ()
        dims = [dim for dim in range(min(leaf.dim(), 2)) if leaf.shape[dim] == self.batch]
        is_folded = len(leaf) > self.batch and len(leaf) % self.batch == 0
        return tuple(dim for dim in (None, *dims, *([FOLDED] if is_folded else ())) if dim != self.dims[place])

    def _dims_of_results(self, *, is_random: bool, with_graph: bool = False) -> list[int | None] | None:
        """Where the samples stand in each result; `None` if some of them give other results without the others.

        `with_graph` takes more memory, and is for forwards that take derivatives themselves.
        """
        tried: list[tuple[list[int | None] | None, list[int]]] = []
        with self._plainly(is_random=is_random, with_graph=with_graph):
            try:
                whole, _ = self.run(self.plain, self.leaves)
                self.plain_results = whole
            except Exception:  # as with weights that come with a batch dimension
                return [] if with_graph else self._dims_of_results(is_random=is_random, with_graph=True)
            for reading in self._readings():
                try:
                    told = self._compared(reading, whole)
                except Exception:  # a forward may ask for so many samples
                    continue
                if told is not None and told[0] is not None and not told[1]:
                    if not self._meet_in_numbers(reading, whole):
                        return told[0]
                    told = None, []
                tried += [] if told is None else [told]
            if tried and not (is_random and self._has_other_chance(whole)):
                dims, self.strange = max(tried, key=lambda found: found[0] is not None)
                return dims
        return [self._samples_dim(result) if _is_clear(result, self.batch) else None for result in whole]

    def _compared(
        self, dims: Sequence[int | None], whole: list[Any]
    ) -> tuple[list[int | None] | None, list[int]] | None:
        """What `_dims_of_results` gives if the samples stand in these `dims` of the arguments; and the strange numbers.

        It is `None` where these may be the wrong dimensions: a result still has B rows when some of the samples are
        taken there, and an argument has B in another one.
        """
        found: list[int | None] = [None] * len(whole)
        rounding = self._rounding(whole)
        sums: dict[int, Any] = {place: 0 for place, x in enumerate(whole) if is_comparable(x) and not x.dim()}
        for samples in (self.part, [i for i in range(self.batch) if i not in self.part]):
            pairs = zip(self.leaves, dims, strict=True)
            part = [leaf if dim is None else _taken(leaf, dim, samples, self.batch) for leaf, dim in pairs]
            of_part, _ = self.run(self.plain, part)
            pairs_of_results = list(zip(whole, of_part, strict=True)) if len(of_part) == len(whole) else []
            if pairs_of_results:
                found = [_place(*pair, samples, self.batch) for pair in pairs_of_results]
            if MEET in found or rounding.is_exceeded(self._pairs(whole, of_part, found, samples)):
                return None, []
            if self._keeps_samples(dims) and any(_has_no_part(*pair, self.batch) for pair in pairs_of_results):
                return None
            weights = torch.tensor([1.0, len(samples) / self.batch])  # of a sum, and of a mean
            sums = {place: total + of_part[place] * weights.to(of_part[place]) for place, total in sums.items()}
        if [*dims] != self.dims:  # layers read the arguments in the usual way, and a number does not show whose it is
            return found, [*sums]
        return found, [place for place, both in sums.items() if not any(are_near(x, whole[place]) for x in both)]

    def _pairs(self, whole: list[Any], of_part: list[Any], dims: list[int | None], samples: list[int]) -> list[Pair]:
        """What is to be the same in the results of all samples, which stand in these `dims`, and of some of them."""
        pairs = []
        for number, dim in enumerate(dims):
            if dim is not None:
                take = partial(_taken, dim=dim, samples=samples, batch=self.batch)
                pairs.append(Pair(number, take(whole[number].detach()), of_part[number].detach(), take))
        return pairs

    def _meet_in_numbers(self, dims: Sequence[int | None], whole: list[Any]) -> bool:
        """Whether samples meet in an argument that has B rows, and that these `dims` take for what all samples share.

        So they do in `lengths` of which the forward takes the largest. It gives the same for these in any order, as for
        none that samples share position by position, and another result for some of them.
        """
        for place, (usual, dim) in enumerate(zip(self.dims, dims, strict=True)):
            leaf = self.leaves[place]
            turned = None if usual is None or dim is not None else leaf.roll(1, usual)
            if turned is None or torch.equal(turned, leaf):
                continue
            with suppress(Exception):  # a forward may ask for an order, as that of lengths
                found, _ = self.run(self.plain, [*self.leaves[:place], turned, *self.leaves[place + 1 :]])
                pairs = [(x, other) for x, other in zip(whole, found, strict=True) if is_comparable(x)]
                if all(is_comparable(other) and x.shape == other.shape and are_near(x, other) for x, other in pairs):
                    told = self._compared([*dims[:place], usual, *dims[place + 1 :]], whole)
                    if told is not None and told[0] is None:
                        return True
        return False

    def _rounding(self, whole: list[Any]) -> Rounding:
        """What rounding does to the plain forward, whose results are `whole`."""
        return Rounding(lambda leaves: self.run(self.plain, leaves)[0], self.leaves, self.module, whole)

    def _keeps_samples(self, dims: Sequence[int | None]) -> bool:
        """Whether an argument has B in a dimension in which no samples are taken, as a matrix of pairs has."""
        pairs = zip(self.leaves, dims, strict=True)
        arguments = [(x, dim) for x, dim in pairs if isinstance(x, Tensor) and not is_shared_by_all(x)]
        return any(size == self.batch and place != dim for x, dim in arguments for place, size in enumerate(x.shape))

    def _hides_by_zeros(self, *, is_random: bool) -> bool:
        """Whether some of the samples give other results, once the parameters that are zero have other numbers.

        What a layer mixes is multiplied by zero where the next one begins with zeros, as the last one of a branch may.
        A bias hides nothing.
        """
        held = {slot: p for slot, p in parameters_of(self.module.modules()).items() if not is_bias(*slot)}
        zeros = {p: torch.empty_like(p) for p in held.values() if p.requires_grad and p.numel() and not p.any()}
        for number, numbers in enumerate(zeros.values()):
            with unseen():
                drawn = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(number), device="cpu")
                numbers.detach().copy_(0.1 * drawn)
        before = self.plain_results, self.strange
        try:
            with swapped({slot: zeros[p] for slot, p in held.items() if p in zeros}):
                if not zeros or self._dims_of_results(is_random=is_random) is not None:
                    return False
                # it may choose by chance, so that results differ in any case
                with self._plainly(is_random=is_random, with_graph=False):
                    return not any(self._has_other_chance(self.plain_results) for _ in range(2 * TRIES))
        finally:
            self.plain_results, self.strange = before

    def _agrees_with_plain(self, whole: list[Any]) -> bool:
        """Whether the forward gives what the plain one gives, so far as that tells: it may draw numbers by itself.

        It does not where a model computes with the size of what all samples share, of which there are B copies.
        """
        if len(self.plain_results) != len(whole) or not self.has_plain_model():
            return True
        if are_like(self.plain_results, whole) and not self._is_unlike_plain(whole):
            return True
        return self.chooses_by_chance()

    def _is_unlike_plain(self, whole: list[Any]) -> bool:
        """Whether the results differ from the plain ones by more than rounding, though by less than is beyond doubt."""
        plain, pairs = self.plain_results, []
        for number, (x, other) in enumerate(zip(plain, whole, strict=True)):
            if is_comparable(x) and is_comparable(other):
                take = partial(Tensor.expand, size=other.shape)
                with suppress(RuntimeError):  # shapes that tell nothing
                    pairs.append(Pair(number, take(x.detach()), other.detach(), take))
        with self._plainly(is_random=False, with_graph=False):
            return self._rounding(plain).is_exceeded(pairs)

    def chooses_by_chance(self) -> bool:
        """Whether the plain forward, which draws no number by torch, gives something else each time."""
        with self._plainly(is_random=False, with_graph=False):
            return self._has_other_chance(self.run(self.plain, self.leaves)[0])

    def has_plain_model(self) -> bool:
        """Whether the plain forward does all that the forward does: not where a subclass of ours adds to that."""
        kind = type(self.module)
        return "plain_class" in vars(kind) or kind.__module__.startswith("expanded_nn.")

    def _has_other_chance(self, whole: list[Any]) -> bool:
        """Whether the forward draws numbers that are not fixed, as numpy's are not."""
        with self.states:
            self._result(self.plain, self.leaves)  # it draws, so that the next one draws other numbers
            again = self._result(self.plain, self.leaves)
        pairs = zip(whole, again, strict=True)
        return not all(are_equal(x, y) for x, y in pairs if is_comparable(x) and is_comparable(y))

    def run(self, forward: Callable[[Any, Any], Any], leaves: list[Any]) -> tuple[list[Any], bool]:
        """What is in the result of a forward, and whether it has drawn random numbers, which are put back."""
        states = self.states
        try:
            result = self._result(forward, leaves)
        finally:
            is_random = states.restore()
        return result, is_random

    def _result(self, forward: Callable[[Any, Any], Any], leaves: list[Any]) -> list[Any]:
        """What is in the result of a forward."""
        args, kwargs = rebuilt(self.arguments, map(_copied, leaves), is_packed)
        with self.before.without_traces(hooks=self.calls_hooks, updates=True), quiet():  # the forward will give them
            found = leaves_of(forward(args, kwargs), is_packed)
            if forward is self.forward:
                self.left = Attributes([*self.module.modules()])
        return found

    def plain(self, args: Any, kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)  # not one that others have put around it

    @contextmanager
    def _plainly(self, *, is_random: bool, with_graph: bool) -> Iterator[None]:
        """Layers run as plain ones do; random numbers differ from run to run, so fixed ones take their place."""
        chance, plain = WithoutChance() if is_random else nullcontext(), self.recorder.in_general_rule({})
        with torch.set_grad_enabled(with_graph), uncounted(), plain, without_fused_inference, chance:
            yield

    def _seen_by_others(self, whole: list[Any], dims: list[int | None]) -> Tensor | None:
        """A parameter whose rows of some samples have gradients of other samples' results, if there is one."""
        places = zip(whole, dims, strict=False)  # there are none where nothing tells
        ends = [(x, dim) for x, dim in places if dim is not None and _has_graph(x)]
        expanded = {key: weight for key, (*_, weight) in self.recorder.expanded.items() if weight.requires_grad}
        if not ends or not expanded or any(map(_runs_code_of_others, graph_of(*(x.grad_fn for x, _ in ends)))):
            return None
        some = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
        some[self.part] = True
        generator, results = torch.Generator().manual_seed(0), [x for x, _ in ends]
        for own, others in ((some, ~some), (~some, some)):
            weights = [_numbers_for(own, x, dim, generator) for x, dim in ends]
            try:
                with self.before.without_traces():  # of the forward's hooks on tensors, which may need what it has left
                    self.left.put_back()
                    by = [*expanded.values()]
                    rows = torch.autograd.grad(results, by, weights, retain_graph=True, allow_unused=True)
            except RuntimeError:  # as of a reentrant checkpoint
                return None
            found = zip(expanded, rows, strict=True)
            seen: Tensor | None = next((key for key, mine in found if mine is not None and _are_in(mine, others)), None)
            if seen is not None:
                return seen
        return None


def _has_graph(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _runs_code_of_others(node: Any) -> bool:
    """Whether a node is that of a Function of somebody else's.

    Its backward may call a layer again, run a backward of its own, or use up what it has kept, which cannot be undone.
    """
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and not is_ours(function)


def _is_open(leaf: Any) -> bool:
    """Whether it is a number or the like, or a tensor that can be copied."""
    if isinstance(leaf, Tensor):
        return not (leaf.is_nested or leaf.is_meta)
    return type(leaf) in NUMBERS


def _may_have_samples(leaf: Any) -> bool:
    """Whether an argument is a tensor that samples can be taken from, and that they do not all share."""
    is_dense = isinstance(leaf, Tensor) and not leaf.is_nested and leaf.layout is torch.strided
    return is_dense and leaf.dim() > 0 and not is_shared_by_all(leaf)


def _copied(leaf: Any) -> Any:
    """A copy of an argument, which the forward may change; it has the same history, which may tell the pass."""
    if not isinstance(leaf, Tensor):
        return leaf
    has_history = leaf.grad_fn is not None
    copy = leaf.clone() if has_history else leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return marked_like(leaf, copy)


def _numbers_for(some: Tensor, x: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Random numbers for some samples of a tensor, and zeros for the others."""
    with unseen():  # a check around it counts what is drawn
        numbers = torch.rand(x.shape, generator=generator, device="cpu") + 0.5
    return (numbers * some.view(-1, *[1] * (x.dim() - dim - 1))).to(x)


def _are_in(rows: Tensor, others: Tensor) -> bool:
    """Whether any number in some samples' rows is not zero."""
    norms = rows.squared_norms() if isinstance(rows, FactoredTensor) else rows.reshape(len(rows), -1).abs().sum(1)
    return bool((norms[others.to(norms.device)] > 0).any())


def _is_clear(x: Any, batch: int) -> bool:
    """Whether the samples can stand in one dimension alone."""
    return is_comparable(x) and list(x.shape).count(batch) == 1


def _has_no_part(whole: Any, of_part: Any, batch: int) -> bool:
    """Whether a result has B rows for some of the samples as well, and others than for all."""
    is_whole = _is_clear(whole, batch) and is_comparable(of_part) and whole.shape == of_part.shape
    return is_whole and not near(whole.detach(), of_part, 1.0)


def _taken(x: Tensor, dim: int, samples: list[int], batch: int) -> Tensor:
    """Some samples of a tensor."""
    whole, own_dim = unfolded(x, dim, batch)
    part: Tensor = whole.index_select(own_dim, torch.tensor(samples, device=x.device))
    return part.flatten(0, 1) if dim == FOLDED else part


def _place(whole: Any, of_part: Any, samples: list[int], batch: int) -> int | None:
    """Where the samples stand in a result, by what some of them give without the others; `None` if nothing tells.

    It is `MEET` where that is something else.
    """
    if not (is_comparable(whole) and is_comparable(of_part)) or whole.dim() != of_part.dim():
        return None
    sizes = list(zip(whole.shape, of_part.shape, strict=True))
    differing = [dim for dim, (size, size_of_part) in enumerate(sizes) if size != size_of_part]
    if not differing or any(sizes[dim] != (batch, len(samples)) for dim in differing):  # as filled up to the longest
        return None
    if len(differing) > 1:  # pairs of samples
        return MEET
    return differing[0] if near(_taken(whole.detach(), differing[0], samples, batch), of_part, 1.0) else MEET
