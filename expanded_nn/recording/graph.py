"""Reading autograd's graph: which nodes are behind a tensor, and what their operations have done to its dimensions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor


def graph_of(*ends: Any) -> Iterator[Any]:
    """The nodes of the graph behind the nodes `ends`, and those themselves, nearest first."""
    seen: set[Any] = set()
    nodes = deque(ends)
    while nodes:
        node = nodes.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(parent for parent, _ in node.next_functions)


def leaves_behind(*ends: Any) -> list[Tensor]:
    """The leaf tensors that require gradients in the graph behind the nodes `ends`, each once."""
    return list(dict.fromkeys(node.variable for node in graph_of(*ends) if hasattr(node, "variable")))


def operation_of(node: Any) -> str:
    """Of which operation of torch's a node is the backward: `"Mean"` of `MeanBackward0`; `""` for a user's Function."""
    operation, _, number = node.name().rpartition("Backward")
    return operation if number else ""


def shape_of(node: Any, output: int = 0) -> Sequence[int]:
    """The shape of a tensor that a node stands for; none where there is no node."""
    return () if node is None else cast(Sequence[int], node._input_metadata[output].shape)


# the operations each number of whose result is computed from one number of each tensor, in its place
ELEMENTWISE = {
    *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Exp", "Expm1", "Log", "Log1P", "Sqrt", "Rsqrt", "Pow", "Abs"),
    *("Reciprocal", "Sin", "Cos", "Tanh", "Sigmoid", "LogSigmoid", "Relu", "Silu", "Gelu", "Softplus", "Elu"),
    *("Mish", "LeakyRelu", "Hardtanh", "Hardswish", "Hardsigmoid", "Threshold", "Clamp", "ClampMin"),
    *("ClampMax", "Erf", "Maximum", "Minimum", "Where", "MaskedFill", "Addcmul", "Lerp", "NativeDropout"),
    *("Tan", "Atan", "Sinh", "Cosh", "Log2", "Log10", "Exp2", "Celu", "Round", "Floor", "Ceil", "Sign"),
    *("NanToNum", "Clone", "ToCopy", "Alias"),
}


def saved_number(number: int) -> int:
    """A number that a node has saved; torch shows a negative one as one without a sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def saved_keys(node: Any) -> tuple[Any, ...]:
    """The keys of an index that a node's operation takes places by."""
    return tuple(slice(None) if key is None else key for key in node._saved_indices)


def saved_dims(node: Any, rank: int) -> list[int]:
    """The dimensions that a node's operation on a tensor of so many dimensions names."""
    names = ("_saved_dim", "_saved_dims", "_saved_dimension")
    saved = next((found for name in names if (found := getattr(node, name, None)) is not None), None)
    return [saved_number(number) % rank for number in ([saved] if isinstance(saved, int) else saved or ())]


def part_taken(node: Any, number: int) -> tuple[int, ...] | int:
    """What a node's operation takes along the dimension that it names, as one of its results: a place, or a slice."""
    operation = operation_of(node)
    if operation == "Slice":
        return tuple(saved_number(bound) for bound in (node._saved_start, node._saved_end, node._saved_step))
    if operation in ("Split", "SplitWithSizes"):
        size = node._saved_split_size if operation == "Split" else node._saved_split_sizes[number]
        start = number * size if operation == "Split" else sum(node._saved_split_sizes[:number])
        return start, start + size
    return saved_number(node._saved_index) if operation == "Select" else number  # of Unbind


# the operations that take a part of a tensor, see `part_taken`
PARTS = {"Slice", "Select", "Unbind", "Split", "SplitWithSizes"}


def turned_dims(node: Any, rank: int) -> list[int] | None:
    """Which of so many dimensions each one was before a node turned them; `None` for a node that turns none."""
    operation, dims = operation_of(node), list(range(rank))
    if operation == "Permute":
        return saved_dims(node, rank)
    if operation == "Transpose":
        first, second = saved_number(node._saved_dim0) % rank, saved_number(node._saved_dim1) % rank
        dims[first], dims[second] = second, first
        return dims
    return dims[::-1] if operation == "T" else None
