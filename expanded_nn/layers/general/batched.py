"""A forward on the whole batch, and the tensors that stand for parameters in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from expanded_nn.common.containers import flatten
from expanded_nn.common.functions import WITHOUT_RULE, is_in_place
from expanded_nn.common.modes import checkpoint_hooks, is_batched, no_torch_function, unseen
from expanded_nn.common.shared import is_shared, with_dims
from expanded_nn.core import cost
from expanded_nn.layers.general.derived import Derived
from expanded_nn.layers.general.folded import parts_of
from expanded_nn.layers.general.mixing import JOINS, READS, along, is_of_ours
from expanded_nn.layers.general.own_functions import STAND_INS, functions_looked_at, is_apply
from expanded_nn.layers.general.owners import Arrangement, Owners, Writes
from expanded_nn.recording.callers import is_in_reentrant_checkpoint
from expanded_nn.recording.order import BetweenLayers
from expanded_nn.recording.recorder import modules_in
from expanded_nn.recording.settings import RecorderLike

Value = TypeVar("Value")
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# The table of whole.py, which fills it: torch's function -> the rule for it. And those of them that compute something,
# or only ask.
RULES: dict[Any, Rule] = {}
COMPUTED: set[Any] = set()
ASKED: set[Any] = set()


class NotInTable(Exception):
    """A parameter was used in a way, or with a shape, that the table does not have."""


class _Reads(BetweenLayers):
    """Notes what the innermost forward on the whole batch does with tensors that are no parameters of its own.

    It may read values, by which one sample may lead it another way than the next. It may join samples or move them,
    which the forward that was compared may not have done. And it may use a parameter of a module within directly, which
    becomes `Batched` then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and checkpoint_hooks() is not None:
            raise NotInTable("a derivative within a checkpoint, which would compute the forward again for it")
        if func is torch._is_all_true and not is_batched(args[0]):  # by which distributions look at their arguments
            are_true = func(*args, **kwargs)
            return True if bool(are_true) else are_true  # as in a trace: what is so always leads nowhere
        if func in READS:
            _RUNNING.runs[-1].way.append(func.__name__)
        elif func in JOINS and Batched not in types:  # what may be done with parameters is the table's to say
            run, operation = _RUNNING.runs[-1], along(func, args, kwargs)
            if operation not in run.joins and not is_of_ours():
                run.joins.add(operation)
        if func in COMPUTED and torch.is_grad_enabled() and _RUNNING.runs[-1].recorder.general_rule is None:
            args, kwargs = _RUNNING.runs[-1].with_its_own(args, kwargs)  # not in a plain forward beside it
        return func(*args, **kwargs)


class _Running(local):
    """The forwards on the whole batch that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.reads = _Reads()


_RUNNING = _Running()


class Run:
    """One forward on the whole batch.

    Its *way* lists what it does with parameters, and where it reads values. Two forwards that go the same way treat
    their samples alike, so that one comparison with the samples alone serves for both.

    Args:
        batch: B.
        recorder: The recorder of the model.
        module: Whose forward it is, of the general rule: its buffers have no rows of samples.
        owners: Tells whose the rows of a tensor are, in a forward that may fold its samples. `None` in any other: there
            a tensor of B rows has one per sample, and all others are shared.
    """

    def __init__(self, batch: int, recorder: RecorderLike, module: Any, owners: Owners | None = None) -> None:
        self.batch, self.recorder, self.module, self.owners = batch, recorder, module, owners
        self.way: list[Any] = []
        # operations that may join samples or move them; each once, as a layer may be dropped by chance
        self.joins: set[str] = set()
        self.failed = False  # whether a rule was lacking, even if the forward has caught the error
        self.numel = 0  # of the largest tensor so far
        # the tensors that must not outlive the forward, and whether they were plain ones before
        self.made: list[tuple[weakref.ref[Tensor], bool]] = []
        self.hooks = checkpoint_hooks()

    def __enter__(self) -> None:
        self.mode = self._looks_at()
        self.mode.__enter__()
        _RUNNING.runs.append(self)

    def __exit__(self, *error: Any) -> None:
        _RUNNING.runs.pop()
        self.mode.__exit__(*error)
        for made, was_plain in self.made:
            x: Any = made() if was_plain else None
            if x is not None:
                vars(x).clear()
                x.__class__ = Tensor

    def lend(self, x: Tensor) -> None:
        """Makes a plain tensor a `Batched` one until the forward ends, as parameters were written into it."""
        x.__class__ = Batched
        self.made.append((weakref.ref(x), True))

    def _looks_at(self) -> AbstractContextManager[Any]:
        """What looks at operations; where the graph tells whose the rows are, at writes alone, if there are any."""
        if self.owners is not None:
            return Writes(self.owners) if self.owners.memo.follows_writes else nullcontext()
        return nullcontext() if _RUNNING.reads.is_on() else _RUNNING.reads

    def has_rows(self, x: Any, dims: int) -> bool:
        """Whether it is a plain tensor of B rows, one for each sample, with at least so many dimensions."""
        if not isinstance(x, Tensor) or is_own(x) or x.dim() < max(dims, 1):
            return False
        if self.owners is not None:
            return self.owners.have_a_row_each(x)
        return bool(x.shape[0] == self.batch) and not (x.grad_fn is None and self._is_of_buffer(x))

    def _is_of_buffer(self, x: Tensor) -> bool:
        """Whether it is a buffer of the module, or a view of one; such a one may have B rows by chance."""
        whole = x if x._base is None else x._base
        return any(whole is buffer for buffers in self._buffers for buffer in buffers.values())

    @cached_property
    def _buffers(self) -> list[dict[str, Tensor | None]]:
        """The tables of buffers, which the forward may set anew."""
        return [member._buffers for member in modules_in(self.module)]

    def are_shared(self, x: Tensor) -> bool:
        """Whether all samples share a tensor, such as an index, as it has not one row for each."""
        if x.dim() == 0:
            return True
        return bool(x.shape[0] != self.batch) if self.owners is None else self._is_of_buffer(x)

    def is_constant(self, x: Any) -> bool:
        """Whether it is a table that all samples share: a buffer, or a view of one, in a forward that may fold them."""
        return self.owners is not None and isinstance(x, Tensor) and not x.requires_grad and self.are_shared(x)

    def is_for_all(self, x: Tensor) -> bool:
        """Whether all samples may take the whole tensor, one without a history, such as coordinates in a table."""
        if x.requires_grad or self.owners is None:
            return False
        return self._is_of_buffer(x) or self.may_be_looked_up_by_all(x, 1)

    def may_be_looked_up_by_all(self, index: Tensor, numel: int) -> bool:
        """Whether every sample may look up the whole index, `numel` numbers per entry, as if all shared it.

        In a forward that may fold its samples, nothing tells whose an index is that it computes. So each sample looks
        up all of it; where the result meets rows whose samples are known, each row takes that of its own sample.
        """
        return self.owners is not None and self.batch * index.numel() * numel <= cost.LOOKED_UP_FOR_EACH

    def arranged(self, x: Any) -> Arrangement | None:
        """How the rows of a plain tensor belong to the samples, in a forward that may fold them."""
        if self.owners is None or not isinstance(x, Tensor) or is_own(x) or x.dim() == 0:
            return None
        return self.owners.of_rows(x)

    def holds_all_in_one_row(self, x: Any) -> bool:
        """Whether a plain tensor `(1, n, ...)` has all samples in its only row, one after the other."""
        if self.owners is None or not isinstance(x, Tensor) or is_own(x) or x.dim() < 3 or x.shape[0] != 1:
            return False
        samples = self.owners.of(x)
        return samples is not None and samples.shape[1] > 1

    def in_one_row(self, func: Any, rule: Rule, args: Any, kwargs: Any) -> Tensor:
        """The result of a rule where all samples stand in one row, `(1, n, ...)`, whose first dimension is left away.

        Raises:
            NotInTable: If it changes what it is given, or if something else has more there.
        """
        owners = known(self.owners)
        dims = max(x.dim() for x in args if isinstance(x, Tensor))
        wide = [x for x in args if isinstance(x, Tensor) and x.dim() == dims]
        refuse_unless(not is_in_place(func) and not any(is_own(x) or x.shape[0] > 1 for x in wide))
        rows = tuple(x[0] if any(x is other for other in wide) else x for x in args)
        y: Tensor = rule(func, rows, kwargs).unsqueeze(0)
        owners.of(y)  # known, it is not taken for one with a row for each sample
        return y

    def batched(self, value: Tensor | Derived) -> Batched:
        made = Batched(value, self)
        self.made.append((weakref.ref(made), False))
        self.numel = max(self.numel, (value.shared if isinstance(value, Derived) else value).shape[1:].numel())
        return made

    def with_its_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operation; parameters of modules within become `Batched`, as the module's own are."""
        if not any(type(value) is nn.Parameter for value in chain(args, kwargs.values())):
            return args, kwargs
        return tuple(map(self._own, args)), {name: self._own(value) for name, value in kwargs.items()}

    def _own(self, value: Any) -> Any:
        is_trained = type(value) is nn.Parameter and value.requires_grad and self.recorder.leaves.is_watched(value)
        return self.batched(self.recorder.expand(value)) if is_trained else value

    def derived(self, func: Any, function: Callable[..., Tensor], *operands: Any, begins: bool = True) -> Batched:
        """What is computed from parameters alone: once for all samples, where it pays.

        Args:
            func: What the forward calls.
            function: The same, of values `(B, *shape)`, for any B; it must not hold a `Batched` tensor.
            operands: `Batched` tensors, and tensors `(B, *shape)` that all samples share.
            begins: Whether it is worth it by itself, or only for what has been computed so already, as a view is.
        """
        self.note(func, whole=False)
        own = [operand for operand in operands if is_own(operand)]
        if cost.derives_once(self.numel) and (begins or any(operand.is_computed for operand in own)):
            sources = [operand.source if is_own(operand) else source_of(operand) for operand in operands]
            known = [source for source in sources if source is not None]
            if len(known) == len(sources):
                return self.batched(Derived.computed(function, known))
        return self.batched(function(*(operand.value if is_own(operand) else operand for operand in operands)))

    def note(self, func: Any, *, whole: bool) -> None:
        """Adds to the way that a parameter is used: together with a tensor of B rows, or not."""
        if not torch.is_grad_enabled() or checkpoint_hooks() != self.hooks:
            raise NotInTable("a checkpoint inside, which computes it again when the parameters are what they were")
        self.way.append((func.__name__, whole))

    def way_gone(self) -> Any:
        """The way of this forward; with `owners` the order and the number of operations do not count."""
        return *(self.way if self.owners is None else [frozenset(self.way)]), frozenset(self.joins)

    def returned(self, result: Any) -> Any:
        """What the forward returns; a parameter `(1, *)` in it has become a tensor with one row per sample."""
        leaves, structure = flatten(result)
        leaves = [beside(leaf, leaf.rank) if is_own(leaf) else leaf for leaf in leaves]
        with unseen():
            self.way += [leaf.shape[:1] == (self.batch,) for leaf in leaves if isinstance(leaf, Tensor)]
        self.way += [type(leaf).__name__ for leaf in leaves if isinstance(leaf, int | float | str)]  # it was read
        return tree_unflatten(leaves, structure)

    def leaves_something(self) -> bool:
        """Whether one of its tensors outlives the forward: something keeps it for the next one."""
        return any(made() is not None for made, _ in self.made)


@contextmanager
def reads_of_its_own() -> Iterator[None]:
    """Keeps what a module within reads, or a comparison of it, out of the way of the forward around it."""
    run = _RUNNING.runs[-1] if _RUNNING.runs else None
    length, joins = (len(run.way), set(run.joins)) if run is not None else (0, set())
    yield
    if run is not None:
        run.joins = joins
        run.way[length:] = [entry for entry in run.way[length:] if not isinstance(entry, str)]


class Batched(Tensor):
    """What looks like a parameter `(*shape)` and has a value for each sample, `(B, *shape)`."""

    run: Run  # the forward that it belongs to
    rank: int  # the number of dimensions of `shape`
    is_computed: bool  # whether it is computed once for all samples, from its `source`
    was_used: bool = False  # other than to be written into, so that something else may show its memory
    data_of: Batched | None = None  # what it is the `.data` of
    _parts: tuple[Tensor, ...] | None = None

    @staticmethod
    def __new__(cls, value: Tensor | Derived, run: Run) -> Batched:
        one = value.shared if isinstance(value, Derived) else value
        made: Batched = Tensor._make_wrapper_subclass(cls, one.shape[1:], dtype=one.dtype, device=one.device)
        made.run, made.rank, made.is_computed = run, one.dim() - 1, isinstance(value, Derived)
        made.__dict__["source" if made.is_computed else "value"] = value
        return made

    def become(self, other: Batched) -> None:
        """Takes the value of another one, as after a write in place."""
        vars(self).clear()
        vars(self).update(vars(other))

    @cached_property
    def value(self) -> Tensor:  # (B, *shape)
        assert self.source is not None
        return self.source.expanded(self.run.batch, self.run.recorder)

    def part(self, number: int) -> Tensor:
        """One part of a parameter, `(B, *shape)`; the rows of all parts are put together once."""
        if self._parts is None:
            self._parts = parts_of(self.value)
        return self.value[:, number] if self._parts is None else self._parts[number]

    @cached_property
    def source(self) -> Derived | None:
        """What gives its value once for all samples; `None` where each sample has a value of its own."""
        return source_of(self.value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        try:
            run = _RUNNING.runs[-1] if _RUNNING.runs else None
            order = None if run is None else run.recorder.order
            if order is not None and order.reasons((args, kwargs)):
                raise NotInTable(func)
            if func not in ASKED and func is not Tensor.__setitem__:
                for value in chain.from_iterable(x if isinstance(x, list | tuple) else (x,) for x in args):
                    if type(value) is Batched:
                        value.was_used = True
            try:
                result = (rule or by_vmap)(func, args, kwargs or {})
            except NotInTable:
                if torch.is_grad_enabled() or not (rule is None or func in COMPUTED):
                    raise
                return _without_derivatives(func, args, kwargs or {})
            is_plain = isinstance(result, Tensor) and not is_own(result)
            if run is not None and run.owners is not None and is_plain and result.dim():
                run.owners.note_a_row_each(result)
            return result
        except Exception:
            for value in tree_leaves((args, kwargs)):
                if type(value) is Batched:
                    value.run.failed = True
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotInTable(func)


STAND_INS.add(Batched)


def by_vmap(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that is not in the table: under `vmap` over the samples' values and rows.

    Any other tensor is taken for shared by all samples; it must not require a gradient. Where samples may be folded,
    nothing tells whose a tensor without a gradient is: as with an index, every sample takes all of it.
    """
    leaves, structure = tree_flatten((args, kwargs))
    run = run_of(leaves)
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_own(leaf)]
    rows = [leaf for leaf in plain if run.has_rows(leaf, 1)]
    refuse_unless(not is_in_place(func) and (run.owners is None or (not rows and all(map(run.is_for_all, plain)))))
    are_mapped = [is_own(leaf) or any(leaf is x for x in rows) for leaf in leaves]
    shared = [None if is_mapped else leaf for leaf, is_mapped in zip(leaves, are_mapped, strict=True)]
    refuse_unless(not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in shared))
    of_results: Any = None

    def of_one(*values: Tensor) -> Any:
        left = iter(values)
        filled = [next(left) if is_mapped else leaf for leaf, is_mapped in zip(shared, are_mapped, strict=True)]
        args, kwargs = tree_unflatten(filled, structure)
        return WITHOUT_RULE.get(func, func)(*args, **kwargs)

    def results(*values: Tensor) -> list[Tensor]:
        nonlocal of_results
        if is_apply(func):  # it may change in place what it is given, and one value may be the parameter itself
            values = tuple(value.clone() if value.shape[0] == 1 else value for value in values)
        with functions_looked_at():
            found, of_results = tree_flatten(torch.vmap(of_one)(*values))
        return found

    operands = [leaf for leaf, is_mapped in zip(leaves, are_mapped, strict=True) if is_mapped]
    if rows:
        run.note(func, whole=True)
        made: list[Tensor] = results(*(x.value if is_own(x) else x[:, None] for x in operands))
        refuse_unless(all(y.shape[1:2] == (1,) for y in made))
        return tree_unflatten([y.squeeze(1) for y in made], of_results)
    made = [run.derived(func, lambda *values: results(*values)[0], *operands)]
    made += [run.derived(func, lambda *x, n=n: results(*x)[n], *operands) for n in range(1, of_results.num_leaves)]
    return tree_unflatten(made, of_results)


def _without_derivatives(func: Any, args: Any, kwargs: Any) -> Any:
    """What a forward that may fold its samples computes under `no_grad`, as by what index it takes words: no rows."""
    leaves, structure = tree_flatten((args, kwargs))
    run = run_of(leaves)
    refuse_unless(run.owners is not None and checkpoint_hooks() == run.hooks and not is_in_place(func))
    refuse_unless(not is_in_reentrant_checkpoint())  # which computes it again, when the parameters are what they were
    sources = [leaf.source if is_own(leaf) else None for leaf in leaves]
    refuse_unless(all(source is not None or not is_own(leaf) for source, leaf in zip(sources, leaves, strict=True)))
    run.way.append((func.__name__, "no_grad"))
    pairs = zip(sources, leaves, strict=True)
    plain = [leaf if source is None else source.shared.detach()[0] for source, leaf in pairs]
    args, kwargs = tree_unflatten(plain, structure)
    return func(*args, **kwargs)


def source_of(value: Tensor) -> Derived | None:
    return Derived.weight(value) if value.shape[0] > 1 and is_shared(value) else None


def is_own(value: Any) -> bool:
    return type(value) is Batched


def refuse_unless(condition: bool) -> None:
    if not condition:
        raise NotInTable


def known(value: Value | None) -> Value:
    """What a rule needs; without it the operation is not in the table."""
    if value is None:
        raise NotInTable
    return value


def own_of(value: Any) -> Batched:
    refuse_unless(is_own(value))
    return value  # type: ignore[no-any-return]


def run_of(args: Any) -> Run:
    run: Run = next(value.run for value in args if is_own(value))
    return run


def as_it_looks(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule for questions about a parameter's shape, dtype and the like."""
    with no_torch_function():
        return func(*args, **kwargs)


def beside(own: Batched, dims: int) -> Tensor:
    """The value with as many dimensions as a tensor of B rows has, the samples first."""
    if own.rank < dims:
        return with_dims(own.value, dims - 1)
    refuse_unless(own.rank == dims > 0 and own.value.shape[1] == 1)
    return own.value.squeeze(1)
