"""A new graph beside one eager step: whether both come to the same, before the graph's results are trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from expanded_nn.common.arrays import bytes_of, has_numbers
from expanded_nn.common.containers import has_dict
from expanded_nn.common.modes import without_autocast
from expanded_nn.common.outside import LISTS, NOTHING
from expanded_nn.common.own_state import OWN_STATE
from expanded_nn.compiling.kinds import Call
from expanded_nn.compiling.names import PLAIN, Referred
from expanded_nn.compiling.outcome import Outcome, RecorderRows
from expanded_nn.compiling.packing import containers, has_items, items_of
from expanded_nn.compiling.replay import Graph
from expanded_nn.compiling.state import WAITING, State, items_in, key_of
from expanded_nn.core.kronecker import KroneckerFactors
from expanded_nn.factored import FactoredTensor
from expanded_nn.modules.held import snapshot

# Rounding turns a share `digits` of all comparisons, such as x > 0, and each of these changes a number as a whole. So
# it changes a tensor by about sqrt(digits) of its norm. Of numbers that cancel some `digits` of their size are left.
MOST_ROUNDING = 10.0  # times sqrt(digits)
MOST_ALIKE = 0.3  # what differs by more is not rounding in any dtype
MOST_CANCELLED = 100.0  # times digits
_TRACED = (
    "code that asks whether tensors have values has gone another way in the trace, or reads what a graph cannot see, "
    'as the time: make both the same. Or the compiler has made an error: backend="eager" does without one'
)
_TAKEN = "take it out before the step, and give it to the step"
_COUNTED = "return a tensor and change it after the call, or change a tensor in place, n.add_(1)"
MOST_DEPTH = 8  # of objects within objects that a step makes anew


class Comparison:
    """What a graph leaves and what the eager step leaves, value by value.

    Attributes:
        digits: The precision of the least precise numbers.
        difference: The first difference that needs no look at numbers, as the end of a sentence "as its graph ...".
        pairs: Group of values -> of each pair of tensors, a name, what the graph leaves, and what the step leaves.
    """

    def __init__(self, digits: float) -> None:
        self.digits = digits
        self.difference: str | None = None
        self.pairs: dict[str, list[tuple[str, Tensor, Tensor]]] = {}

    def differ(self, name: str, remedy: str = _TRACED) -> None:
        """Notes a difference."""
        self.difference = self.difference or f"its graph leaves another {name} than the eager step ({remedy})"

    def add(self, group: str, name: str, found: Any, wanted: Any) -> None:
        """Adds what the graph (`found`) and the step (`wanted`) leave in one place: tensors, numbers, and `None`."""
        if (found is None) is not (wanted is None):
            self.differ(name)
        elif isinstance(found, Tensor) and isinstance(wanted, Tensor):
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                self.differ(name)
            elif not isinstance(found, FactoredTensor) and not isinstance(wanted, FactoredTensor):
                self.pairs.setdefault(group, []).append((name, found, wanted))
            elif found.shape[0]:  # of rows a weighted sum, for which they need not be dense
                weights = torch.linspace(0.5, 1.5, found.shape[0], dtype=found.dtype, device=found.device)
                sums = [snapshot(rows.detach()).weighted_sum(weights) for rows in (found, wanted)]
                self.pairs.setdefault("rows", []).append((name, sums[0], sums[1]))
        elif has_items(found) and has_items(wanted):
            items, wanted_items = items_of(found), items_of(wanted)
            if items.keys() != wanted_items.keys():
                self.differ(name)
                return
            for key, item in items.items():
                self.add(group, f"{name}[{key!r}]", item, wanted_items[key])
        elif isinstance(found, float) and isinstance(wanted, float):
            numbers = torch.tensor([found, wanted], dtype=torch.float64)
            self.pairs.setdefault(group, []).append((name, numbers[0], numbers[1]))
        elif isinstance(found, Tensor) or isinstance(wanted, Tensor) or _are_other_numbers(found, wanted):
            self.differ(name)
        elif has_numbers(found) and type(found) is type(wanted) and bytes_of(found) != bytes_of(wanted):
            self.differ(name, "return a tensor, or make the array after the call")

    def first_difference(self) -> str | None:
        """The first difference beyond rounding."""
        for pairs in self.pairs.values() if self.difference is None else ():
            sizes = [_size(wanted) for _, _, wanted in pairs]
            for (name, found, wanted), size in zip(pairs, sizes, strict=True):
                if not self._are_alike(found, wanted, size, max(sizes)):
                    self.differ(name)
                    return self.difference
        return self.difference

    def _are_alike(self, found: Tensor, wanted: Tensor, size: float, largest: float) -> bool:
        tolerance: float = min(MOST_ROUNDING * self.digits**0.5, MOST_ALIKE)
        if found is wanted or not wanted.numel():
            return True
        if not wanted.is_floating_point() and not wanted.is_complex():
            return bool((found != wanted).double().mean() <= tolerance**2)
        is_usual = wanted.isfinite()
        if not torch.equal(is_usual, found.isfinite()):
            return False
        if not torch.equal(found[~is_usual].nan_to_num(), wanted[~is_usual].nan_to_num()):
            return False
        distance = _size(torch.where(is_usual, found, 0) - torch.where(is_usual, wanted, 0))
        return distance <= tolerance * size + min(MOST_CANCELLED * self.digits, tolerance) * largest


def _are_other_numbers(found: Any, wanted: Any) -> bool:
    """Whether two values are numbers, strings or the like, and not equal."""
    return type(found) in PLAIN and type(wanted) in PLAIN and bool(found != wanted)


def _size(tensor: Tensor) -> float:
    """The root of the mean square of what is finite."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    values = torch.where(tensor.isfinite(), tensor, 0)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    largest = float(values.abs().max())
    return largest * float((values / largest).abs().square().mean().sqrt()) if largest else 0.0


class _Before:
    """The numbers and tensors in Python before an eager step, which may change some that its graph does not."""

    def __init__(self, referred: Referred, others: Sequence[Any]) -> None:
        self.state = State(referred, others)
        places = (place for _, before in self.state.kept for place in items_in(before).items())
        values = [value for name, value in places if isinstance(value, Tensor) and name is not WAITING]
        tensors = {id(value): value for value in values if not _is_apart(value)}
        self.versions = [(tensor, tensor._version) for tensor in tensors.values()]

    def add_changes(self, comparison: Comparison, done: set[tuple[int, Any]], written: Iterable[Tensor]) -> None:
        """Notes what has changed, except in places that the graph sets (`done`) and tensors that it writes to."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in written}
        for tensor, version in self.versions:
            if tensor._version != version and tensor.untyped_storage().data_ptr() not in memory:
                comparison.differ(f"tensor of shape {tuple(tensor.shape)}, which the step changes in place,")
        for container, before in self.state.kept:
            kind = "list" if isinstance(container, LISTS) else "set" if isinstance(container, set) else "dict"
            places_of = _by_id if kind == "set" else items_in
            items, items_before = places_of(container), places_of(before)
            gone = (place for place in items_before.keys() - items.keys() if (key_of(container), place) not in done)
            if not all(map(_is_own_state, gone)):
                comparison.differ(f"{kind} from which the step takes something", _TAKEN)
            elif kind == "dict" and id(container) not in self.state.of_owners:
                orders = [[key for key in of if key in items and key in items_before] for of in (items, items_before)]
                if orders[0] != orders[1]:
                    comparison.differ("order of the items of a dict")
            for place, value in items.items():
                if (key_of(container), place) in done or _is_own_state(place):
                    continue
                old = items_before.get(place, NOTHING)
                name = f"item {place}" if isinstance(container, LISTS) else str(place)
                if old is NOTHING:  # a new tensor may be a cache's
                    if not isinstance(value, Tensor):
                        comparison.differ(f"{kind} to which the step adds something", _COUNTED)
                else:
                    _add_change(comparison, name, old, value)
        for variable in self.state.variables:
            _add_change(comparison, variable.name, variable.value, variable.now())


def _is_own_state(place: Any) -> bool:
    """Whether it is the name of an attribute that the library sets; keys of users compare in their own way.

    Python notes the slots of a class where the first of its objects is copied.
    """
    return type(place) is str and place in (*OWN_STATE, "grad_sample", "__slotnames__")


def _by_id(items: Iterable[Any]) -> dict[Any, Any]:
    """The items of a set, which has no places."""
    return {id(item): item for item in items}


def _add_change(comparison: Comparison, name: str, old: Any, new: Any, depth: int = 0) -> None:
    """Adds a place that the step has changed, and its graph has not: a number, a tensor, or an object with such."""
    if new is old or depth > MOST_DEPTH:
        return
    if _are_other_numbers(old, new):
        comparison.differ(f"value of {name}", _COUNTED)
    elif isinstance(new, Tensor) and isinstance(old, Tensor):
        comparison.add("state", f"value of {name}", old, new)
    elif type(new) is type(old):
        if _are_other_things(old, new):
            comparison.differ(f"value of {name}", _COUNTED)
            return
        items_before, items = _items_held(old), _items_held(new)
        if items.keys() != items_before.keys():
            comparison.differ(f"value of {name}", _COUNTED)
            return
        for key, item in items.items():
            _add_change(comparison, name, items_before[key], item, depth + 1)
    elif not isinstance(new, Tensor):  # one may be a cache's
        comparison.differ(f"value of {name}", _COUNTED)


def _are_other_things(old: Any, new: Any) -> bool:
    """Whether two values of one type are others, whatever they hold: functions, modules, arrays, dates."""
    if isinstance(new, FunctionType):
        return old.__code__ is not new.__code__
    if isinstance(new, MethodType | nn.Module | type | ModuleType | set | frozenset):
        return bool(old != new)
    if has_numbers(new):
        return bytes_of(old) != bytes_of(new)
    compares: Any = type(new).__eq__
    is_value = not has_items(new) and not has_dict(new) and compares is not object.__eq__
    return is_value and bool(old != new)


def _items_held(value: Any) -> dict[Any, Any]:
    """What a container holds, or the attributes of another object."""
    return items_of(value) if has_items(value) else vars(value) if has_dict(value) else {}


def _is_apart(tensor: Tensor) -> bool:
    """Whether a tensor has no memory or no version of its own."""
    return isinstance(tensor, FactoredTensor) or tensor.is_inference() or tensor.layout is not torch.strided


def run_beside(
    graph: Graph,
    call: Call,
    step: Callable[..., Any],
    modules: Sequence[nn.Module],
    referred: Referred,
    *,
    draws_alike: bool,
) -> tuple[str | None, str | None, Any]:
    """Runs a graph, takes back what it has changed, and runs the step.

    It takes an eager step's time and memory beside the graph's. With `draws_alike` the graph draws the random numbers
    of the eager step; without, nothing is compared if it draws any.

    Returns:
        Which of the graph's assumptions did not hold, if any, so that nothing is compared; what differs, if anything;
        and what the step returns.
    """
    args, kwargs = call.arguments
    otherwise, inputs, results, undo = graph.compute(call)
    if otherwise is not None:
        return otherwise, None, step(*args, **kwargs)
    outcome, comparison = graph.outcome, Comparison(graph.digits)
    changed = [(inputs[index], inputs[index].detach().clone()) for index in graph.changed.indices]
    undo()
    owners = graph.inputs.owners(call)
    grads = [(owner, owner.grad, owner.requires_grad) for owner in owners if owner.is_leaf]
    sets = {id(owners[number]): None if remake is None else remake(results) for number, remake in outcome.grads}
    sets |= {id(owners[number]): remake(results) for number, remake in outcome.filled}
    switched = {id(owners[number]) for number, _ in outcome.trainable}
    watched = [*call.tensors, *(grad for _, grad, _ in grads)]
    before = _Before(referred, [*modules, call.arguments, watched])
    result = step(*args, **kwargs)
    if graph.draws and not draws_alike:
        return None, None, result
    for container in containers(call.arguments):
        items_of(container)  # adds up what the step has left waiting in Kronecker factors
    with torch.no_grad(), without_autocast():
        comparison.add("result", "returned value", outcome.result(results), result)
        for tensor, values in changed:
            comparison.add("state", f"tensor of shape {tuple(tensor.shape)}, changed in place,", values, tensor)
        names = {id(p): name for module in reversed(modules) for name, p in module.named_parameters()}
        for leaf, grad, was_trainable in grads:
            name = names.get(id(leaf), "an argument")
            comparison.add("grads", f".grad of {name}", sets.get(id(leaf), grad), leaf.grad)
            if (leaf.requires_grad != was_trainable) != (id(leaf) in switched):
                comparison.differ(f"requires_grad of {name}")
        for rows in outcome.rows:
            _add_rows(comparison, rows, results)
        for parameter, remake in outcome.shown:
            comparison.add("rows", "grad_sample", remake(results), getattr(parameter(), "grad_sample", None))
        done = _add_places(comparison, outcome, results, list(containers(call.arguments)))
        written = [tensor for tensor, _ in changed]
        written += [grad for leaf, grad, _ in grads if grad is not None and id(leaf) in sets]
        before.add_changes(comparison, done, written)
        return None, comparison.first_difference(), result


def _add_rows(comparison: Comparison, rows: RecorderRows, results: Sequence[Any]) -> None:
    """Adds the rows of the passes that a graph leaves."""
    held = [*rows.recorder.store.held.values()]
    if not rows.passes and all(leaf.was_cleared() for pass_rows in held for leaf in pass_rows):
        return  # the step has cleared `.grad` at its end, and the trace has dropped the rows at once
    count = len(rows.passes)
    if len(held) < count or (len(held) > count and not rows.appends):
        comparison.differ("number of rows")
        return
    for pass_rows, wanted in zip(rows.passes, held[len(held) - count :], strict=True):
        if pass_rows.keys() != wanted.keys():
            comparison.differ("number of rows")
            return
        for leaf, remake in pass_rows.items():
            name = rows.recorder.name_of(cast(Tensor, leaf.parameter()))
            shown = leaf.published.rows if len(held) == 1 else wanted.get(leaf)
            comparison.add("rows", f"grad_sample of {name}", remake(results), shown)


def _add_places(
    comparison: Comparison, outcome: Outcome, results: Sequence[Any], owners: Sequence[Any]
) -> set[tuple[int, Any]]:
    """Adds the attributes and items that a graph sets; returns them, by the id of what has them, and the name there."""
    done = set()
    for values, name, remake in outcome.attributes:
        comparison.add("state", f"attribute {name}", remake(results), values.get(name))
        done.add((id(values), name))
    for values, name in outcome.removed:
        if name in values:
            comparison.differ(f"attribute {name}")
        done.add((id(values), name))
    for number, gone, new in outcome.items:
        owner, items = owners[number], items_of(owners[number])
        if not items.keys().isdisjoint(gone) or not items.keys() >= new.keys():
            comparison.differ("number of items in an argument")
            continue
        container = id(vars(owner) if isinstance(owner, KroneckerFactors) else owner)
        for key, remake in new.items():
            comparison.add("state", f"item {key!r} of an argument", remake(results), items[key])
        done.update((container, key) for key in (*gone, *new))
    return done
