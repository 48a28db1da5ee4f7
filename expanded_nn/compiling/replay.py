"""A traced step as a function that is called many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from expanded_nn._errors import first_line
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.modes import set_grad_enabled, set_version, version_of, without_autocast
from expanded_nn.compiling.kinds import Call
from expanded_nn.compiling.memory import memory_of
from expanded_nn.compiling.tracing import Traced
from expanded_nn.recording.callers import text_of

ArgumentDim = tuple[int, int]  # the number of a tensor among the arguments, and of one of its dimensions


class Sizes:
    """The shapes that a graph is for.

    Attributes:
        shapes: The shapes of the tensors among the arguments when the step was traced.
        symbols: The symbols that stand for any size, each with the first dimension that has it.
        alike: Pairs of dimensions that have the same symbol.
        shape_env: What else is known of the sizes; compiling adds to it.
        vmap_line: The user's line where `torch.vmap` has first made a number of a size, if it has.
    """

    def __init__(self, traced: Traced, shapes: Sequence[torch.Size], varying: Collection[ArgumentDim]) -> None:
        self.shapes, self.shape_env, self.vmap_line = shapes, traced.shape_env, traced.vmap_line
        self.symbols: dict[Any, ArgumentDim] = {}
        self.alike: list[tuple[ArgumentDim, ArgumentDim]] = []
        for dim in sorted(varying):
            size: Any = traced.examples[dim[0]].shape[dim[1]]
            if isinstance(size, torch.SymInt):
                first = self.symbols.setdefault(size.node._expr, dim)
                if first != dim:
                    self.alike.append((first, dim))

    def why_single(self) -> str | None:
        """Why the graph is for one size alone, where it is: something has made a number of a symbol."""
        numbers = self.symbols.keys() & self.shape_env.replacements.keys()
        guards = [guard for guard in self.shape_env.guards if numbers & guard.expr.free_symbols]
        frames = [guard.sloc.framework_loc for guard in guards if guard.expr.is_Equality]
        lines = [text_of((frame.filename, frame.lineno)) for frame in frames if hasattr(frame, "lineno")]
        if not lines:
            return None
        if self.vmap_line is not None:
            return (
                "torch.vmap, by which a part of the model or of its gradients is computed, makes a number of a size in "
                f"{self.vmap_line}."
            )
        return (
            f"a size is made a number in {lines[0]}. If that is a line of the step, compute with x.shape[0] by "
            "Python's operators, as x.shape[0] ** 0.5."
        )

    def fit(self, shapes: Sequence[torch.Size]) -> bool:
        """Whether the graph is right for arguments of such shapes."""
        free = {*self.symbols.values(), *(dim for pair in self.alike for dim in pair)}
        for number, (shape, traced) in enumerate(zip(shapes, self.shapes, strict=True)):
            fixed_dims = (dim for dim in range(len(traced)) if (number, dim) not in free)
            if any(shape[dim] != traced[dim] for dim in fixed_dims):
                return False
        if any(shapes[i][j] != shapes[k][m] for (i, j), (k, m) in self.alike):
            return False
        sizes = {symbol: shapes[i][j] for symbol, (i, j) in self.symbols.items()}
        ranges = self.shape_env.var_to_range
        # tracing starts with sizes from 2 on, and compiling may add bounds
        if any(size not in ranges[symbol] for symbol, size in sizes.items() if symbol in ranges):
            return False
        return all(guard.expr.subs(sizes) == True for guard in self.shape_env.guards)  # noqa: E712 (sympy's own)


class Graph:
    """A compiled step, for arguments of some shapes.

    Attributes:
        sizes: The shapes.
        outcome: What to do with the results.
        inputs: What it takes, but for sizes.
        draws: Whether it draws random numbers.
        free_dims: The dimensions of arguments whose sizes are inputs of their own.
        changed: The inputs that it changes.
        digits: The precision `eps` of the least precise dtype that it computes in.
        is_compared: Whether its results were compared with those of the eager step; see `comparison.py`.
        copied: The indices of the gradients that share their memory with another tensor, and so are cloned; `None`
            before the first run.
        function: The compiled graph.
    """

    def __init__(
        self,
        traced: Traced,
        shapes: Sequence[torch.Size],
        varying: Collection[ArgumentDim],
        backend: Callable[..., Any],
    ) -> None:
        self.sizes = Sizes(traced, shapes, varying)
        self.outcome, self.inputs, self.draws = traced.outcome, traced.inputs, traced.draws
        numbers = traced.shape_env.replacements  # what tracing has made of some symbols
        self.free_dims = [dim for symbol, dim in self.sizes.symbols.items() if symbol not in numbers]
        examples = [traced.examples[number].shape[dim] for number, dim in self.free_dims]
        _add_inputs(traced.graph, examples)
        self.changed = Changed(traced.graph)
        self.copied: set[int] | None = None
        self.digits, self.is_compared = _digits(traced.graph), False
        places = _first_places(traced.graph)  # before the backend changes it
        with torch.no_grad(), without_autocast():
            self.function = _with_same_results(backend(traced.graph, [*traced.examples, *examples]), places)

    def run(self, call: Call) -> tuple[str | None, Any]:
        """Runs the graph, and leaves what the step leaves.

        Returns:
            Which of the graph's assumptions did not hold, if any, so that nothing has changed; and what the step
            returns.
        """
        otherwise, inputs, results, _ = self.compute(call)
        if otherwise is not None:
            return otherwise, None
        grads = [None if remake is None else remake(results) for _, remake in self.outcome.grads]
        if self.copied is None:
            self.copied = _with_shared_memory(grads, [*inputs, *results])
        copies: dict[int, Tensor] = {}
        for index in self.copied:
            shared = cast(Tensor, grads[index])
            grads[index] = shared.clone()
            copies.setdefault(id(shared), cast(Tensor, grads[index]))
        results = [copies.get(id(value), value) for value in results] if copies else results
        self.outcome.put(self.inputs.owners(call), grads, results, call.arguments)
        return None, self.outcome.result(results)

    def compute(self, call: Call) -> tuple[str | None, list[Any], Sequence[Any], Callable[[], None]]:
        """Runs the graph, and does nothing with its results.

        Returns:
            Which of its assumptions did not hold, if any; its inputs; its results; and what takes the changes of inputs
            and of random states back, which is done already if an assumption did not hold.
        """
        inputs = self.inputs.of(call)
        if self.free_dims:
            inputs += [call.shapes[number][dim] for number, dim in self.free_dims]
        # eagerly the graph's operations see each other's changes
        changed_inputs = [] if isinstance(self.function, fx.GraphModule) else self.changed.indices
        owners = self.inputs.owners(call) if self.outcome.filled else []
        filled = [owners[number].grad for number, _ in self.outcome.filled]
        if self.changed.share_memory(inputs, changed_inputs, filled, call.shapes):
            return "what it changes in place shares its memory with another tensor", inputs, (), lambda: None
        changed: list[Tensor] = [inputs[index] for index in self.changed.indices]
        saved = [(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in changed]
        states = RandomStates(()) if self.draws else None

        def undo() -> None:
            with torch.no_grad():
                for tensor, values, version in saved:
                    tensor.copy_(values)
                    set_version(tensor, version)  # what is noted of a `.grad`, and graphs from before, go by that
            if states is not None:
                states.restore()

        set_grad_enabled(False)
        try:
            with without_autocast():  # the graph has the casts that it made
                results = self.function(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as of a label out of range, of which the step itself says more
            undo()
            return f"its graph raises {first_line(error)} (the step itself does not)", inputs, (), undo
        finally:
            set_grad_enabled(True)  # as it was: there is no graph for a call without
        assumed = self.outcome.assumed
        if assumed is not None and not bool(results[assumed + 1]):
            undo()
            return self.outcome.otherwise[results[assumed].tolist().index(False)], inputs, results, undo
        return None, inputs, results, undo


def _add_inputs(graph: fx.GraphModule, sizes: Sequence[Any]) -> None:
    """Makes sizes inputs of a graph, which does not use them.

    But inductor's cache keeps only those conditions on sizes that are inputs: taken from there, a graph that was
    compiled for up to 4096 samples would run for more. They are the last inputs, as with sizes in front of tensors
    inductor's `cpp_wrapper` takes one input for another.
    """
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for size in sizes:
        with graph.graph.inserting_before(first):
            node = graph.graph.placeholder(f"size_{size}")
        node.meta["val"] = size
    graph.recompile()


def _digits(graph: fx.GraphModule) -> float:
    """The precision of a graph's least precise numbers; products of float32 may be of bfloat16 or TF32."""
    values = [value for node in graph.graph.nodes for value in tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    is_coarse = any(tensor.is_cuda for tensor in tensors) or torch.get_float32_matmul_precision() != "highest"
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)
    return max(eps, 2.0**-10) if is_coarse and torch.float32 in dtypes else eps


def _first_places(graph: fx.GraphModule) -> list[int] | None:
    """For each result the index of the first one that is the same; `None` where none are."""
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
    first: dict[Any, int] = {}
    places = [
        first.setdefault(node if isinstance(node, fx.Node) else index, index) for index, node in enumerate(results)
    ]
    return places if len(first) < len(places) else None


def _with_same_results(function: Callable[..., Any], places: list[int] | None) -> Callable[..., Any]:
    """Lets a graph give one tensor where results are the same: a step may return the `.grad` that it leaves."""
    if places is None or isinstance(function, fx.GraphModule):  # which gives one tensor anyway
        return function

    def run(*inputs: Any) -> list[Any]:
        results = function(*inputs)
        return [results[place] for place in places]

    return run


def _overlapping(tensors: Iterable[Any]) -> set[int]:
    """The ids of the tensors whose memory reaches into that of another one."""
    spans: dict[int, tuple[int, int]] = {}  # of each tensor, the addresses from its first number to its last
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.numel():
            spans[id(tensor)] = _span(tensor)
    shared, farthest, last = set(), 0, 0  # the tensor that reaches farthest so far, and where it ends
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if start < last:
            shared |= {key, farthest}
        if end > last:
            farthest, last = key, end
    return shared


class Changed:
    """The inputs that a graph changes in place.

    Attributes:
        indices: Their indices.
        places: Where the inputs of the last call were in memory, and the shapes of its arguments.
        is_shared: Whether any of them shared its memory with another input there.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        memory, written = memory_of(graph.graph)
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.indices = [number for number, node in enumerate(inputs) if memory[node] in written]
        self.places: Any = None
        self.is_shared = False

    def share_memory(self, inputs: Sequence[Any], indices: Sequence[int], filled: Sequence[Any], shapes: Any) -> bool:
        """Whether inputs with these `indices`, or gradients that are `filled`, share their memory with another input.

        Compilers know from the trace alone what does. A gradient that is filled is no input, as it is zero.
        """
        if not indices and not filled:
            return False
        tensors = [x for x in (*inputs, *filled) if isinstance(x, Tensor) and x.layout is torch.strided]
        places = [x.data_ptr() for x in tensors], shapes
        if places != self.places:
            changed = [*(inputs[index] for index in indices), *filled]
            others = _overlapping(tensors)
            near = [x for x in tensors if id(x) in others]
            uses = Counter(map(id, tensors))
            self.is_shared = any(uses[id(x)] > 1 or any(x is not y and _meet(x, y) for y in near) for x in changed)
            self.places = places
        return self.is_shared


def _meet(x: Any, y: Tensor) -> bool:
    """Whether two tensors have a number in common; columns of one matrix have none, though they lie between each other.

    Where that is not known it is true.
    """
    if x.layout is not torch.strided:
        return True
    spans = [_span(x), _span(y)]
    if max(start for start, _ in spans) >= min(end for _, end in spans):
        return False
    row = x.stride(0) if x.dim() else 0
    if x.dtype != y.dtype or x.stride() != y.stride() or not row:
        return True
    first = min(start for start, _ in spans)
    starts = [(start - first) // x.element_size() % row for start, _ in spans]
    ends = [start + _extent(t[:1]) for start, t in zip(starts, (x, y), strict=True)]
    return bool(max(ends) > row or max(starts) < min(ends))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's numbers begin in memory, and where they end."""
    return tensor.data_ptr(), tensor.data_ptr() + _extent(tensor) * tensor.element_size()


def _extent(tensor: Tensor) -> int:
    """How many places there are from a tensor's first number to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _with_shared_memory(grads: Sequence[Tensor | None], values: Sequence[Any]) -> set[int]:
    """The indices of the gradients whose numbers are those of another tensor as well, as a compiler may decide."""
    shared, uses = _overlapping((*grads, *values)), Counter(map(id, grads))
    return {i for i, grad in enumerate(grads) if grad is not None and (id(grad) in shared or uses[id(grad)] > 1)}
