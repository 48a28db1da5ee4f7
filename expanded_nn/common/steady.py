"""Running a forward again under the same conditions: the same random numbers, and nothing left behind.

What a forward changes is taken back in four ways, as each does what the others cannot. `StateBefore` puts the user's
own values back in place, those in arguments too. `BeforeForward` lets the forward work on copies: graphs that are
alive need the originals untouched. `Traces` puts attributes back, and says whether anything else has changed. `Undo` is
for a forward that seldom has to be taken back: it copies a tensor only where that is changed, or where all are small.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from expanded_nn.common.arrays import bytes_of, has_numbers, is_counter
from expanded_nn.common.batch import contents, marked_like
from expanded_nn.common.containers import has_dict
from expanded_nn.common.functions import CHANGED, SIZES, attributes, is_in_place
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.modes import FunctionMode, has_no_values, unseen, version_of
from expanded_nn.common.outside import (
    NOTHING,
    Outside,
    holders_in,
    hooks_on,
    is_users_object,
    kept_in,
    put_back,
    remove_new_hooks,
)
from expanded_nn.common.own_state import HOOK_TABLES, OURS, attributes_of
from expanded_nn.common.shared import is_parameter
from expanded_nn.common.traced import is_traced

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_NO_HOOKS: dict[int, Any] = {}  # what most tables have
MOST_COPIED = 4096  # numbers in tensors that are copied before a forward; more are looked after while it runs


def modules_and_holders(module: nn.Module, arguments: Any = ()) -> tuple[dict[nn.Module, None], list[Any]]:
    """The modules that a forward may change, and the containers and the user's objects that they hold.

    These are a module, those within it, and those in its arguments and in lists, dicts and objects of any of them, as
    `self.teacher = [net]`.
    """
    members = dict.fromkeys(module.modules())

    def inside(hidden: nn.Module) -> list[Any]:
        new = [member for member in hidden.modules() if member not in members]
        members.update(dict.fromkeys(new))
        return attributes_of(new)

    holders = holders_in([*attributes_of(members), arguments], inside)
    return members, holders


class StateBefore:
    """What a forward may change, as it is before: random states, attributes and buffers, parameters, its arguments.

    Attributes:
        updates: The context that sees what the forward changes in parameters, as in those of a teacher that follows.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        members, _ = modules_and_holders(module, arguments)
        self.outside = Outside(members)
        members |= self.outside.modules
        self.random, self.attributes = RandomStates([*members, arguments]), Attributes([*members])
        parameters = [x for member in members for x in member._parameters.values() if x is not None]
        self.updates = Updates([*parameters, *self.outside.tensors])
        self.containers: list[tuple[Any, Any]] = []  # lists, sets and mappings, with copies of them
        # with their versions, and copies of those that require no gradients
        self.tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self.seen: set[int] = set()  # the ids of all that was looked at
        held = attributes_of(members)
        for value in held:
            self._keep(value)
        # within objects that these hold, no tensors, which may be a data set
        self.containers += [pair for pair in kept_in(held) if id(pair[0]) not in self.seen]
        self._keep(arguments, deep=True)

    def _keep(self, value: Any, *, deep: bool = False) -> None:
        """Notes the contents of a value; with `deep` the attributes of objects in it."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, Tensor):
            if not is_parameter(value) and not value.is_inference():
                self.tensors.append((value, value._version, None if value.requires_grad else value.clone()))
        elif isinstance(value, MutableMapping):
            self.containers.append((value, dict(value)))
            for item in value.values():
                self._keep(item, deep=deep)
        elif isinstance(value, list | set | deque | tuple):
            self.containers += [] if isinstance(value, tuple) else [(value, list(value))]
            for item in value:
                self._keep(item, deep=deep)
        elif deep and has_dict(value) and not isinstance(value, nn.Module | type | FunctionType):
            self._keep(vars(value), deep=True)

    def restore(self) -> bool:
        """Puts all of it back; whether that was possible."""
        self.random.restore()
        self.updates.take_back()
        self.attributes.put_back()
        self.outside.put_back()
        for container, before in self.containers:
            put_back(container, before)
        changed = [
            (tensor, before)
            for tensor, version, before in self.tensors
            if tensor._version != version or (before is not None and _has_changed_unseen(tensor, before))
        ]
        with torch.no_grad():
            for tensor, before in changed:
                if before is not None:
                    (tensor if tensor.shape == before.shape else tensor.resize_as_(before)).copy_(before)
        return all(before is not None for _, before in changed)


def _has_changed_unseen(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor has other values, as by `.data` or by an observer, which leave its version."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    return is_dense and not (is_traced() or has_no_values(tensor) or torch.equal(tensor, before))


class Attributes:
    """What the attributes of modules are now, to be put back.

    Attributes:
        taken_back: Whether an attribute was put back.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules, self.taken_back = modules, False
        self.attributes = [dict(vars(module)) for module in modules]
        tables = [before[key] for before in self.attributes for key in HOOK_TABLES if key in before]
        self.hooks = [(table, dict(table) if table else _NO_HOOKS) for table in tables]

    def changed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], set[str]]]:
        """Of each module, its attributes now and before, and the names of those that have other values."""
        for module, before in zip(self.modules, self.attributes, strict=True):
            now = vars(module)
            yield (
                now,
                before,
                {key for key in {*now, *before} - OURS if now.get(key, self) is not before.get(key, self)},
            )

    def put_back(self) -> None:
        """Puts back those that have other values now."""
        for now, before, changed in self.changed():
            self.taken_back |= bool(changed)
            for key in changed - {*before}:
                del now[key]
            now.update((key, before[key]) for key in before if key in changed)
        for table, hooks in self.hooks:  # as of models that note their layers' results from their first call on
            if table.keys() != hooks.keys():
                self.taken_back = True
                table.clear()
                table.update(hooks)


class Updates(FunctionMode):
    """Changes of tensors in place, as of weights that follow another network's; to be taken back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        with_values = (x for x in tensors if not (x.is_inference() or has_no_values(x)))
        pairs = ((x, x.data) for x in with_values if x.layout is torch.strided)
        self.data = [(x, data) for x, data in pairs if type(data) is Tensor and not data.is_nested]
        self.changed: list[tuple[Tensor, Tensor]] = []  # each with a copy of it from before

    @cached_property
    def memory(self) -> set[int]:
        """Where the tensors are."""
        return {data.untyped_storage().data_ptr() for _, data in self.data}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = slice(1) if is_in_place(func) else CHANGED.get(func)
        if places is not None and self.data:
            with unseen():
                changed = filter(self._is_a_part_of, tree_leaves(args[places]))
                self.changed += [(x.data, x.detach().clone()) for x in changed]
        return func(*args, **(kwargs or {}))

    def _is_a_part_of(self, x: Any) -> bool:
        """Whether a tensor is one of them, or shows a part of one."""
        if not (type(x) is Tensor or isinstance(x, nn.Parameter)) or has_no_values(x) or x.layout is not torch.strided:
            return False
        return x.untyped_storage().data_ptr() in self.memory

    def take_back(self) -> None:
        """Gives all of them the numbers and the memory that they had."""
        with unseen():
            for x, before in reversed(self.changed):
                x.copy_(before)
            for x, data in self.data:
                if x.data_ptr() != data.data_ptr():
                    x.data = data


class _Copies(AbstractContextManager[None]):
    """Copies of small tensors, made at once: that takes less than a look at each operation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        with unseen():
            self.copies = [(x, x.data, x.detach().clone()) for x in tensors]

    def __exit__(self, *_: object) -> None:
        return None

    def take_back(self) -> None:
        """Gives all of them the numbers and the memory that they had."""
        with unseen():
            for x, data, before in self.copies:
                if x.data_ptr() != data.data_ptr():
                    x.data = data
                if not torch.equal(data, before):
                    data.copy_(before)


class _Writes(Updates):
    """Likewise; and whether something has read one of the tensors, other than to change it."""

    has_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if not self.has_read and self.data and func not in _READS_NO_VALUES:
            with unseen():
                given = args[0] if is_in_place(func) else result  # a view, or what is changed, stays among them
                others = () if self._is_a_part_of(given) else (args, kwargs)
                self.has_read = any(map(self._is_a_part_of, tree_leaves(others)))
        return result

    def has_counted(self, x: Any) -> bool:
        """Whether a tensor was changed, and nothing has read it."""
        if self.has_read or not isinstance(x, Tensor) or not self._is_a_part_of(x):
            return False
        return any(x.untyped_storage().data_ptr() == part.untyped_storage().data_ptr() for part, _ in self.changed)


class OutsideBefore:
    """What forwards change outside of some modules, as it is before.

    Attributes:
        updates: The context that sees what they change in place.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.outside = Outside(modules)
        others = [module for module in self.outside.modules if module not in modules]
        held = [x for x in tree_leaves(attributes_of(others)) if isinstance(x, Tensor)]
        self.attributes, self.updates = Attributes(others), Updates([*self.outside.tensors, *held])

    def put_back(self) -> None:
        """Puts all of it back."""
        self.updates.take_back()
        self.attributes.put_back()
        self.outside.put_back()


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and not (x.is_inference() or x.is_nested or x.is_meta)


class Undo:
    """What a forward leaves, to be taken back; `updates` is the context that sees what is changed in place."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.attributes, self.random = Attributes(modules), RandomStates()
        held = attributes_of(modules)
        self.containers = kept_in(held)
        tensors = [x for x in tree_leaves(held) if isinstance(x, Tensor) and not x.requires_grad]
        are_small = not is_traced() and all(map(_is_plain, tensors)) and sum(map(Tensor.numel, tensors)) <= MOST_COPIED
        self.updates: Updates | _Copies = _Copies(tensors) if are_small else Updates(tensors)
        self.versions = [(x, version_of(x)) for x in tensors]

    def has_changed(self) -> bool:
        """Whether there is anything, but for what was drawn from torch's generators."""
        if any(changed for *_, changed in self.attributes.changed()) or self.random.has_drawn_elsewhere():
            return True
        if any(version_of(x) != version for x, version in self.versions):
            return True
        return not all(_holds_the_same(now, before) for now, before in self.containers)

    def put_back(self, *, drawn: bool = True) -> None:
        """Takes all of it back; random states only if what was `drawn` is to be drawn again."""
        if drawn:
            self.random.restore()
        self.updates.take_back()
        for container, before in self.containers:
            put_back(container, before)
        self.attributes.put_back()


def _holds_the_same(container: Any, before: Any) -> bool:
    """Whether a list, set or dict has the very objects that it had, an array its numbers."""
    if has_numbers(container):
        return bytes_of(container) == bytes_of(before)
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(before.get(key, NOTHING) is value for key, value in container.items())
    return all(map(is_, container, before))


class Traces(Attributes):
    """What a forward leaves in modules and in its arguments, which the next one would find.

    Args:
        modules: A module and those within it.
        arguments: What its forward is called with.

    Attributes:
        writes: The context that sees what the forward changes in place: counters, which it does not read, are put back.
    """

    def __init__(self, modules: list[nn.Module], arguments: Any) -> None:
        super().__init__(modules)
        self.arguments = arguments
        self.before = self._held()
        held = tree_leaves(attributes_of(modules))
        self.writes = _Writes([x for x in held if isinstance(x, Tensor) and not x.requires_grad])
        self.arrays = kept_in(filter(is_counter, held))

    def _held(self) -> list[tuple[Any, int]]:
        held = contents([*attributes_of(self.modules), self.arguments])
        return [(value, getattr(value, "_version", 0)) for value in held if not isinstance(value, torch.dtype)]

    def take_back(self) -> bool:
        """Puts the attributes back; whether nothing else was left.

        What was computed from parameters may be a part of the loss. Then nothing is put back.
        """
        left = contents([now.get(key) for now, _, changed in self.changed() for key in changed])
        if any(getattr(value, "requires_grad", False) for value in left):
            return False
        self.put_back()
        held, counted = self._held(), self.writes.has_counted
        pairs = zip(self.before, held, strict=False)
        if len(held) != len(self.before) or any(a is not b or (v != w and not counted(a)) for (a, v), (b, w) in pairs):
            return False
        if self.writes.changed and not self.writes.has_read:
            self.writes.take_back()
            self.taken_back = True
        for numbers, before in self.arrays:
            self.taken_back |= bytes_of(numbers) != bytes_of(before)
            put_back(numbers, before)
        return True


class BeforeForward:
    """What a forward may leave traces in, as it is before: it is found once, however often the forward runs then.

    These are the attributes and buffers of a module, of those within, and of those that these hold in lists, dicts and
    objects, where `parameters()` does not find them; the attributes of the user's own objects among these, as a tracker
    of losses; what its functions keep outside of modules; and hooks on parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        members, holders = modules_and_holders(module)
        self.module = module
        self.outside = Outside(members)
        members |= self.outside.modules
        held = attributes_of(members)
        objects = filter(is_users_object, holders)  # of the user's own classes, each once
        self.attributes = [(owner, dict(vars(owner))) for owner in (*members, *objects)]
        own = [x for member in members for x in member._parameters.values() if x is not None]
        parameters = {id(parameter): parameter for parameter in own}
        self.hooks = [(parameter, hooks_on(parameter)) for parameter in parameters.values()]
        others = [x for x in tree_leaves(held) if isinstance(x, Tensor)]
        self.leaves = [x for x in (*parameters.values(), *others) if x.requires_grad and x.is_leaf]

    def gradients(self) -> list[tuple[int, int]]:
        """What tells whether any `.grad` was set or added to."""
        return [(id(x.grad), 0 if x.grad is None else version_of(x.grad)) for x in self.leaves]

    @contextmanager
    def without_traces(self, *, hooks: bool = True, updates: bool = False) -> Iterator[None]:
        """Takes back what a forward leaves in all of it; with `updates` also what it changes in parameters.

        Without `hooks`, the forward hooks of the modules within the module are not called.
        """
        parameters = [parameter for parameter, _ in self.hooks] if updates else []
        updated = Updates([*parameters, *self.outside.tensors])
        try:
            for owner, attributes in self.attributes:
                own = ((key, value) for key, value in attributes.items() if key not in OURS)
                vars(owner).update({key: _copied(value, self.outside.kept) for key, value in own})
                if not hooks and isinstance(owner, nn.Module) and owner is not self.module:
                    vars(owner).update({key: _of_weights(attributes[key]) for key in _HOOKS})
            with updated if updated.data else nullcontext():
                yield
        finally:
            updated.take_back()
            self.outside.put_back()
            for owner, attributes in self.attributes:
                learned = {key: vars(owner)[key] for key in ("_trials",) if key in vars(owner)}
                for name in vars(owner).keys() - attributes.keys() - learned.keys():
                    del vars(owner)[name]
                vars(owner).update(attributes, **learned)  # never empty, as another thread may run it for inference
            for parameter, before in self.hooks:
                remove_new_hooks(parameter, before, but_ours=True)  # the watch stays


def _of_weights(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    """Those hooks of torch's that compute a weight before each forward, as `weight_norm` and pruning do."""
    own = ((key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils."))
    return OrderedDict(own)


def copies(arguments: Any) -> Any:
    """Copies of the arguments, for a forward that may change them."""
    return tree_map(_copied_argument, arguments)


def _copied_argument(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        copied = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        copied = copied if leaf.is_leaf else copied.clone()  # which may be changed in place, as it may
        return marked_like(leaf, copied)
    if not has_dict(leaf) or isinstance(leaf, nn.Module | type | FunctionType | dict | UserDict):
        return _copied(leaf)
    try:  # an object of the user's, such as a cache; its tensors may be computed, which torch does not copy
        return copy.deepcopy(leaf, {id(x): x.detach().clone() for x in contents(leaf) if isinstance(x, Tensor)})
    except Exception:  # it holds something that cannot be copied
        return leaf


def _copied(value: Any, kept: Collection[int] = ()) -> Any:
    """Copies containers, but for those with the ids given, and the tensors in them; all else is taken as it is."""
    if isinstance(value, Tensor):
        return value if is_parameter(value) or value.requires_grad else value.clone()
    if id(value) in kept:
        return value
    if is_counter(value):
        return copy.copy(value)
    if type(value) in (dict, OrderedDict) and not getattr(value, "__dict__", None):  # a module has a dozen empty ones
        return type(value)((key, _copied(item, kept)) for key, item in value.items())
    if isinstance(value, MutableMapping) and not is_users_object(value):  # a copy of such a one may share its items
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = _copied(item, kept)
        return mapping
    if type(value) in (list, set, deque):
        return type(value)([_copied(item, kept) for item in value])
    if type(value) is tuple:
        return tuple([_copied(item, kept) for item in value])
    return value


_READS_NO_VALUES = {*SIZES, *attributes("data", "dtype", "device", "requires_grad", "is_cuda", "layout")}
