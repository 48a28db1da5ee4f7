"""From a parameter to its `(B, *shape)` view and back: passes, and the capture of rows into `grad_sample`.

One `Recorder` serves all modules under one root. It opens a `Pass` at the root's forward, expands each parameter
once in it, and receives the `(B, *shape)` gradients, the rows, when a backward reaches the expansion.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._batch import tensors
from expanded_nn._cell import Cell, running_backward
from expanded_nn._errors import PerSampleError, complaint
from expanded_nn._keeping import keeps_factors
from expanded_nn._leaf import Leaf, OutsideUse
from expanded_nn._sharded import is_shard
from expanded_nn._storage import Recycled
from expanded_nn._terms import Dense, SparseOneHot, Term, in_own_dtype, refuse_batched
from expanded_nn.factored import FactoredTensor, materialized, times


@dataclass(frozen=True)
class Settings:
    """What `per_sample` was told; see there."""

    loss_reduction: str = "mean"
    batch_first: bool = True
    batch_size: int | None = None
    materialize: bool = False
    accumulate_grad: bool = True

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f'per_sample: loss_reduction is {self.loss_reduction!r}; wanted "mean" or "sum".')
        if self.batch_size is not None and self.batch_size < 0:
            raise ValueError(f"per_sample: batch_size is {self.batch_size}; wanted None or a number from 0.")


class Pass:
    """The forwards whose rows belong together.

    Attributes:
        batch: B, the number of samples.
        number: Its place among all passes, in the order of their forwards.
        reached: Whether a backward has reached the pass.
        done: Whether such a backward has ended.
    """

    def __init__(self, batch: int, number: int) -> None:
        self.batch, self.number = batch, number
        self.reached = False
        self.done = False


Held = dict[Pass, dict[Leaf, Tensor]]  # each parameter's rows `(B, *shape)`, pass by pass


class Recorder:
    """Keeps the passes of one model, expands its parameters and holds their rows.

    Args:
        settings: What `per_sample` was told.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.depth, self.thread = 0, 0
        self.samples: list[Tensor] = []
        self.broadcast: list[nn.Module] = []  # embeddings whose index has had no batch dimension in this forward
        self.originals: Mapping[tuple[nn.Module, str], Tensor] | None = None
        self.root: weakref.ref[nn.Module] | None = None
        self.current: Pass | None = None
        self.before: Pass | None = None
        self.live: list[weakref.ref[Pass]] = []
        self.awaited: list[Pass] = []  # which no graph keeps alive
        self.passes = 0
        self.held: Held = {}
        self.aside: tuple[Held, dict[Leaf, Tensor | None]] | None = None
        self.leaves: dict[int, Leaf] = {}  # by the parameter's id
        self.lost: list[int] = []
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.expanded: dict[Tensor, tuple[Pass, int, int, Tensor]] = {}
        self.backward: int | None = None
        self.recomputing = self.delivering = False
        self.finish: Callable[[], Any] = lambda: None
        self.behind: tuple[Any, list[Pass]] | None = None
        self.mapping = False
        self.sharded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        copied: Recorder = memo.setdefault(id(self), Recorder(self.settings))
        return copied

    def __getstate__(self) -> Settings:
        return self.settings

    def __setstate__(self, settings: Settings) -> None:
        self.__init__(settings)  # type: ignore[misc]

    # Forward: passes and expansions.

    def scope(self, module: nn.Module, batch: int | None, inputs: Any) -> Forward:
        """The forward of `module`; the outermost one begins a pass, or goes on with the last."""
        return Forward(self, module, batch, inputs)

    def begin(self, module: nn.Module, batch: int | None, inputs: Any) -> None:
        """The start of an outermost forward."""
        if self.root is None or running_backward() < 0:  # a layer that a checkpoint runs again is no root
            self.root = weakref.ref(module)
            self._let_go()
            self._watch(module)
        now = self.open(module, self.settings.batch_size if self.settings.batch_size is not None else batch)
        self.samples = [each for each in tensors(inputs) if isinstance(each, Tensor) and now.batch in each.shape[:2]]
        self.broadcast.clear()

    @contextmanager
    def inside_general(self, originals: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
        """Layers called meanwhile run their plain forward, or on the whole batch with these parameters, if they can."""
        before, self.originals = self.originals, originals
        try:
            yield
        finally:
            self.originals = before

    def _watch(self, module: nn.Module) -> None:
        """Hooks on all parameters: one that no layer expands may be used outside of its module as well."""
        if module in self.watched:
            return
        self.watched.add(module)
        self.sharded = self.sharded or any(is_shard(each) for each in module.parameters())
        for member in module.modules():
            if getattr(member, "_recorder", self) is not self:
                continue  # it belongs to another model as well
            for parameter in member._parameters.values():
                # no guest of functional_call
                if parameter is not None and parameter.requires_grad and isinstance(parameter, nn.Parameter):
                    self._leaf(parameter)
                    if is_shard(parameter) and not hasattr(parameter, "grad_sample"):
                        parameter.grad_sample = None  # type: ignore[attr-defined]

    def inside(self, module: nn.Module) -> bool:
        """Whether this is in the middle of a forward: of this thread, as another's would share its pass."""
        if not self.depth:
            return False
        if not torch.compiler.is_compiling() and self.thread != get_ident():
            raise complaint(
                self.name_of(module),
                "another thread is in the middle of a forward of this model",
                "one thread at a time",
                "Give each thread a model of its own: copy.deepcopy(model).",
            )
        return True

    def open(self, module: nn.Module, batch: int | None) -> Pass:
        """The pass that a forward of so many samples belongs to, a new one if need be."""
        if running_backward() >= 0:
            self.current = self._recomputed_pass(module, batch)
            return self.current
        self._end_backward()
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise complaint(
                self.name_of(module),
                "a transform of torch.func (grad, vmap, jvp, ...) is applied to a model in per-sample mode",
                "one of the two",
                "Switch per_sample(False) for the transform; its functions see the plain torch.nn model then.",
            )
        if batch is None:
            raise complaint(
                self.name_of(module),
                "no argument is a tensor",
                "a tensor whose rows are the samples",
                "Say the number of samples: per_sample(batch_size=...).",
            )
        if self.current is None or self.current.reached or self.current.batch != batch:
            self.before = self.current
            self.current, self.passes = Pass(batch, self.passes), self.passes + 1
            self.expanded.clear()
            self.live = [ref for ref in self.live if ref() is not None]
            self.live.append(weakref.ref(self.current))
        return self.current

    def correct(self, batch: int) -> None:
        """The number of samples as a layer knows it better than the root's first tensor, if nothing relied on that."""
        if self.current is None or self.expanded or self.settings.batch_size is not None or running_backward() >= 0:
            return
        before = self.before
        if before is not None and not before.reached and before.batch == batch:
            self.current = before
        else:
            self.current.batch = batch

    def _recomputed_pass(self, module: nn.Module, batch: int | None) -> Pass:
        """A checkpoint computes a forward again inside the backward: it belongs to the pass it was first in."""
        self._begin_backward(recomputing=True)
        alive = [each for ref in self.live if (each := ref()) is not None]
        if len(alive) > 1:
            alive = self._passes_behind(torch._C._current_autograd_node()) or alive
        passes = [each for each in alive if not each.done] or alive  # done ones: a second backward on a retained graph
        # one row may be one that all samples share
        fitting = [each for each in passes if batch in (each.batch, 1)] if len(passes) > 1 else passes
        if len(fitting) == 1:
            return fitting[0]
        raise complaint(
            self.name_of(module),
            f"a forward inside a backward, as a checkpoint makes it, fits {len(fitting)} of {len(passes)} passes",
            "exactly one",
            "Call backward for each pass before the next forward, or do without checkpoints here.",
        )

    def _passes_behind(self, node: Any) -> list[Pass]:
        """The passes that the graph of a node comes from."""
        if self.behind is None or self.behind[0] is not node:
            nodes: list[Any] = [each for each in _graph_of(node) if isinstance(each, _Expand._backward_cls)]
            self.behind = (node, list(dict.fromkeys(each.now for each in nodes if each.recorder() is self)))
        return self.behind[1]

    def expand(self, parameter: Tensor) -> Tensor:
        """The parameter as `(B, *shape)`, the same tensor for all its uses in a pass."""
        now = self.current
        assert now is not None
        if not parameter.requires_grad:
            return parameter.expand(now.batch, *parameter.shape)
        if not parameter.is_leaf:
            return self._expand_computed(parameter, now.batch)
        owner, version, pointer, expanded = self.expanded.get(parameter, (None, -1, -1, parameter))
        if owner is not now or version != parameter._version or pointer != parameter.data_ptr():
            leaf = self._leaf(parameter)
            expanded = _Expand.apply(parameter, now, leaf, weakref.ref(self))  # type: ignore[no-untyped-call]
            self.expanded[parameter] = (now, parameter._version, parameter.data_ptr(), expanded)
        return expanded

    def _expand_computed(self, weight: Tensor, batch: int) -> Tensor:
        """A weight computed from parameters (a parametrization): shared value, rows for the parameters."""
        leaves = _leaves_of(weight)
        return _ExpandComputed.apply((weight, leaves, self), batch, *map(self.expand, leaves))  # type: ignore[no-untyped-call,no-any-return]

    def expand_outside(self, weight: Tensor) -> Tensor:
        """`expand`, for a use of a weight outside of the layers: in the pass of the last forward."""
        previous, recomputing = self.current, running_backward() >= 0
        module = self.root() if self.root is not None else None
        if module is not None and recomputing and not self.depth:
            self.current = self._recomputed_pass(module, None)
        try:
            if self.current is None or (self.current.reached and not recomputing):
                raise complaint(
                    "expanded(weight)",
                    "there was no forward since the last backward",
                    "a forward of the model, which says how many samples there are",
                    "Call the model first.",
                )
            return self.expand(weight)
        finally:
            self.current = previous

    def _leaf(self, parameter: Tensor) -> Leaf:
        leaf = self.leaves.get(id(parameter))
        if leaf is None or leaf.parameter() is not parameter:
            self._let_go()
            lost, key = self.lost, id(parameter)
            leaf = self.leaves[key] = Leaf(weakref.ref(parameter, lambda _: lost.append(key)))
            leaf.watch(parameter, self)
            if self.sharded:
                leaf.home = self._home_of(parameter)
        return leaf

    def _let_go(self) -> None:
        """Forgets parameters that are no more."""
        while self.lost:
            leaf = self.leaves.get(key := self.lost.pop())
            if leaf is not None and leaf.parameter() is None:
                del self.leaves[key]
                self._drop(leaf)

    def _home_of(self, parameter: Tensor) -> tuple[weakref.ref[nn.Module], str] | None:
        root = self.root() if self.root is not None else None
        for module in root.modules() if root is not None else ():
            for name, each in module._parameters.items():
                if each is parameter:
                    return weakref.ref(module), name
        return None

    def name_of(self, member: nn.Module | Tensor) -> str:
        """The qualified name of a module or a parameter, with its class, as far as the root is known."""
        root = self.root() if self.root is not None else None
        if isinstance(member, nn.Module):
            names = root.named_modules() if root is not None else iter([])
            name = next((name for name, module in names if module is member), "")
            return f"{name} ({type(member).__name__})" if name else type(member).__name__
        parameters = root.named_parameters() if root is not None else iter([])
        return next((name for name, parameter in parameters if parameter is member), "a parameter")

    def holder_of(self, parameter: Tensor) -> nn.Module | None:
        """The module that stands for itself and holds the parameter, as far as the root is known."""
        root = self.root() if self.root is not None else None
        modules = root.modules() if root is not None else iter([])
        holders = (each for each in modules if any(parameter is one for one in each._parameters.values()))
        return next(holders, None)

    # Backward: rows.

    def deliver(self, now: Pass, leaf: Leaf, rows: Tensor, *, asked: bool = False) -> None:
        """Takes the rows of one parameter; a backward may bring a parameter's rows in several parts.

        Args:
            now: The pass they are of.
            leaf: The parameter.
            rows: `(B, *shape)`.
            asked: Whether `torch.autograd.grad` asked for the gradient, which does not go to `.grad` then.
        """
        self._begin_backward()
        if not self.delivering:
            self.delivering = True
            if asked:
                self._set_aside()
            else:
                self._drop_stale_rows()
        now.reached = now.reached or not asked
        if now not in self.held:
            self.held[now] = {}
            self.held = dict(sorted(self.held.items(), key=lambda item: item[0].number))
        of_pass = self.held[now]
        of_pass[leaf] = of_pass[leaf] + rows if leaf in of_pass else rows
        self._publish(leaf)

    def note_plain_forward(self) -> None:
        """A layer runs without gradients, as a reentrant checkpoint has it: the backward will run it again.

        Within a backward it is a checkpoint inside another one, whose backwards are parts of this one.
        """
        if torch.compiler.is_compiling():
            return
        if running_backward() >= 0:
            self._begin_backward(recomputing=True)
        elif self.depth and self.current is not None and self.current not in self.awaited:
            self.awaited.append(self.current)

    def _begin_backward(self, recomputing: bool = False) -> None:
        task = running_backward()
        if self.backward == task or (self.recomputing and self.finish() is not None):
            self.recomputing = self.recomputing or recomputing
            return
        self._end_backward()
        self.backward, self.recomputing, self.delivering = task, recomputing, False
        recorder = weakref.ref(self)

        def finish() -> None:
            alive = recorder()
            if alive is not None and alive.backward == task:
                adds = alive.delivering and alive.aside is None
                alive._end_backward()
                if adds:
                    alive.note_grads()

        self.finish = weakref.ref(finish)  # the backward holds it, and lets go of it when it ends or fails
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _end_backward(self) -> None:
        """All rows of a backward are here: parameters that it left out have zero rows."""
        if self.backward is None:
            return
        self.backward, self.recomputing, self.behind = None, False, None
        if self.current is not None and self.current.reached:
            self.current = self.before = None
            self.expanded.clear()
        for ref in self.live:
            now = ref()
            if now is not None and now.reached:
                now.done = True
        self.awaited = [each for each in self.awaited if not each.reached]
        if len(self.held) > 1:
            rows = sum(each.batch for each in self.held)
            for leaf in self.leaves.values():
                if leaf.given is not None and leaf.given.shape[0] != rows:
                    self._publish(leaf)
        if self.sharded:
            for leaf in self.leaves.values():
                leaf.show()

    def note_grads(self) -> None:
        """Notes each `.grad` as it is now, so that clearing it is seen."""
        for leaf in self.leaves.values():
            leaf.note_grad()

    def _drop_stale_rows(self) -> None:
        """Rows go when the gradient they add up to was cleared, or when the user took them away."""
        self._take_back()
        for leaf in self.leaves.values():
            if leaf.given is not None and (not self.settings.accumulate_grad or leaf.was_cleared()):
                self._forget(leaf)

    def _set_aside(self) -> None:
        """Rows whose sum does not go to `.grad` stand alone: the others come back with the next backward."""
        self._take_back()
        for leaf in self.leaves.values():
            if leaf.given is not None and leaf.was_reset():
                self._forget(leaf)
        self.aside, self.held = (self.held, {leaf: leaf.given for leaf in self.leaves.values()}), {}
        for leaf in self.leaves.values():
            leaf.give(None)

    def _take_back(self) -> None:
        """The rows that were set aside, but for those that the user took away since."""
        if self.aside is None:
            return
        (self.held, before), self.aside = self.aside, None
        for leaf in self.leaves.values():
            if leaf.was_reset():
                self._forget(leaf)
            else:
                leaf.give(before.get(leaf))

    def forget(self, parameter: Tensor) -> None:
        """Drops the rows of one parameter."""
        leaf = self.leaves.get(id(parameter))
        if leaf is not None:
            self._forget(leaf)
        parameter.grad_sample = None  # type: ignore[attr-defined]
        if self.sharded and is_shard(parameter):
            for gathered in [each for each in self.leaves.values() if each.shard is parameter]:
                self._forget(gathered)

    def _forget(self, leaf: Leaf) -> None:
        self._drop(leaf)
        leaf.give(None)

    def _drop(self, leaf: Leaf) -> None:
        for held in (self.held, self.aside[0]) if self.aside is not None else (self.held,):
            for now, rows in list(held.items()):
                rows.pop(leaf, None)
                if not rows:
                    del held[now]

    def _publish(self, leaf: Leaf) -> None:
        parameter = leaf.parameter()
        if parameter is None:
            return
        parts = [held[leaf] if leaf in held else _zero_rows(now.batch, parameter) for now, held in self.held.items()]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.settings.materialize:
            rows = materialized(rows, leaf.memory)
        if leaf.given is not None and hasattr(leaf.given, "_processed"):  # Opacus' mark on rows that a step has used
            rows._processed = True  # type: ignore[attr-defined]
        leaf.give(rows)

    def close(self) -> None:
        """Takes the hooks off the parameters and lets go of the rows, which may have a graph that leads back here."""
        for leaf in self.leaves.values():
            leaf.handle.remove()
            leaf.given = leaf.expected = None
        self.leaves.clear()
        self.watched.clear()
        self.expanded.clear()
        self.held.clear()
        self.awaited.clear()
        self.current = self.aside = None


class Forward:
    """A forward within a recorder's scope; a class, as a generator costs more than all else at the start of a pass.

    Args:
        recorder: Whose passes it is in.
        module: The module whose forward it is.
        batch: B, as its arguments say.
        inputs: Its arguments.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, batch: int | None, inputs: Any) -> None:
        self.recorder, self.module, self.batch, self.inputs = recorder, module, batch, inputs

    def __enter__(self) -> None:
        recorder = self.recorder
        self.previous = recorder.current
        if recorder.depth == 0:
            recorder.begin(self.module, self.batch, self.inputs)
        recorder.depth, recorder.thread = recorder.depth + 1, get_ident()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        recorder = self.recorder
        recorder.depth -= 1
        if recorder.depth:
            return
        recorder.samples = []
        if running_backward() >= 0:
            recorder.current = self.previous
        if recorder.broadcast and isinstance(error, RuntimeError | IndexError | ValueError):
            if isinstance(error, PerSampleError):
                return
            raise complaint(
                recorder.name_of(recorder.broadcast[0]),
                f"its index without a batch dimension gave one row a sample, and later the forward failed ({error})",
                "code that goes on with (B, *index.shape, dim)",
                "Let what follows the embedding broadcast over the samples, or send the module around it through the "
                "general rule: alone(ItsClass) before convert.",
            ) from error


class _Expand(torch.autograd.Function):
    """`parameter -> (B, *shape)`; the backward keeps the rows and returns their sum, the plain gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, now: Pass, leaf: Leaf, recorder: weakref.ref[Recorder]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.now, ctx.leaf, ctx.recorder = parameter, now, leaf, recorder
        return parameter.expand(now.batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        recorder: Recorder | None = ctx.recorder()
        if rows is None:  # the loss does not depend on the parameter
            return None, None, None, None
        refuse_batched(rows)
        if recorder is None:
            return rows.sum(0), None, None, None
        settings, asked = recorder.settings, _is_asked_for(ctx)
        scale = max(1, ctx.now.batch) if settings.loss_reduction == "mean" else 1
        # without the first, each attribute of a factored tensor takes a way through Python
        with torch._C.DisableTorchFunctionSubclass(), in_own_dtype(rows):
            add_up = settings.accumulate_grad or asked
            kept, total = _kept_and_total(rows, scale, add_up, settings.materialize, ctx.leaf.memory)
            if not asked or torch.is_grad_enabled():
                recorder.deliver(ctx.now, ctx.leaf, kept, asked=asked)
        if total is not None:
            ctx.leaf.send(total)
        return total, None, None, None


def _is_asked_for(ctx: Any) -> bool:
    """Whether `torch.autograd.grad` asks for the parameter's gradient, so that `.grad` stays as it is."""
    try:
        torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # its words: it does not speak of a leaf in torch.autograd.grad
        return True
    return False


class _ExpandComputed(torch.autograd.Function):
    """A computed weight, expanded; its vector-Jacobian product is mapped over the rows."""

    @staticmethod
    def forward(ctx: Any, computed: tuple[Tensor, list[Tensor], Recorder], batch: int, *expanded: Tensor) -> Tensor:
        ctx.computed = computed
        weight = computed[0].detach()
        return weight.expand(batch, *weight.shape)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise PerSampleError(
                "create_graph=True reached a weight that is computed from other parameters (a parametrization): the "
                "rows of those have no second derivative. Ask for derivatives with respect to inputs only, or remove "
                "the parametrization."
            )
        weight, leaves, recorder = ctx.computed
        if rows.shape[0] == 0:
            return None, None, *(leaf.new_zeros(0, *leaf.shape) for leaf in leaves)
        dense = rows.dense() if isinstance(rows, FactoredTensor) else rows
        recorder.mapping = True
        try:
            grads = torch.autograd.grad(weight, leaves, dense, retain_graph=True, is_grads_batched=True)
        finally:
            recorder.mapping = False
        return None, None, *grads


def _leaves_of(weight: Tensor) -> list[Tensor]:
    """The leaf tensors that `weight` was computed from."""
    nodes = list(_graph_of(weight.grad_fn))
    if any(map(_is_expansion, nodes)):
        raise PerSampleError(
            "A weight was computed from the output of a model in per-sample mode, so its samples are mixed. "
            "Compute it with per_sample(False), or give each sample its own weight, (B, *shape)."
        )
    return list(dict.fromkeys(node.variable for node in nodes if hasattr(node, "variable")))


def comes_from_rows(x: Tensor) -> bool:
    """Whether `x` was computed from a layer's output in per-sample mode, which has B rows."""
    return any(map(_is_expansion, _graph_of(x.grad_fn)))


def _is_expansion(node: Any) -> bool:
    return isinstance(node, _Expand._backward_cls | _ExpandComputed._backward_cls)


def _graph_of(node: Any) -> Iterator[Any]:
    """The nodes of the graph that `node` ends, nearest first."""
    seen: set[Any] = set()
    nodes = deque([node])
    while nodes:
        node = nodes.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(parent for parent, _ in node.next_functions)


def _kept_and_total(
    rows: Tensor, scale: float, add_up: bool, materialize: bool, memory: Recycled
) -> tuple[Tensor, Tensor | None]:
    """The scaled rows, in the smaller of their forms, and the plain gradient, the sum of the unscaled ones."""
    kept = times(rows, scale)
    if not isinstance(rows, FactoredTensor) or rows.requires_grad:
        return kept, rows.sum(0) if add_up else None
    terms = rows.terms()
    larger = sum(term.numel() for term in terms) >= rows.numel() and not keeps_factors()
    dense = larger or (materialize and rows.sums_faster_dense())
    if dense:
        kept = materialized(kept, memory)
    if not add_up:
        return kept, None
    sparse = _sparse_total(terms)
    if sparse is not None:
        return kept, sparse
    if not dense:
        return kept, rows.weighted_sum()
    return kept, Dense.of(kept).scaled(1 / scale).weighted_sum(None)


def _sparse_total(terms: Sequence[Term]) -> Tensor | None:
    """The plain gradient where torch's is sparse."""
    sparse = [term.sparse_sum() for term in terms if isinstance(term, SparseOneHot)]
    return reduce(torch.add, sparse) if sparse and len(sparse) == len(terms) else None


def _zero_rows(batch: int, parameter: Tensor) -> Tensor:
    cell = Cell([(batch, ())], parameter.shape, parameter.dtype, parameter.device)
    return FactoredTensor(cell, (batch, *parameter.shape))


def recorder_of(weight: Tensor) -> Recorder | None:
    """The recorder that watches a parameter, or those that a weight was computed from; `None` if nothing does."""
    leaves = [weight] if weight.is_leaf else _leaves_of(weight)
    hooks = [hook for leaf in leaves for hook in (leaf._backward_hooks or {}).values()]
    owners = [hook.recorder() for hook in hooks if isinstance(hook, OutsideUse)]
    found = [each for each in owners if isinstance(each, Recorder)]
    return next((each for each in found if each.depth), next(iter(found), None))
