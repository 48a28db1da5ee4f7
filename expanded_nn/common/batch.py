"""Who is a sample: the batch size of a call, found in its arguments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import unwrap
from itertools import islice, product
from types import ModuleType
from typing import Any

from torch import Tensor, device, dtype, nn, stack, strided
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from expanded_nn._errors import shown
from expanded_nn.common.containers import has_dict, is_record, names_in_record
from expanded_nn.common.traced import refuse_values

Dims = tuple[int | None, ...]  # of several arguments, or several of one
FOLDED = -1  # in place of the samples' dimension: all rows of one sample, then all of the next
_MARK = "_shared_by_all_samples"  # an attribute of tensors
NUMBERS = {int, float, bool, str, type(None), slice, dtype, device}


def shared_by_all(x: Tensor) -> Tensor:
    """Says that all samples share an argument of the model: none of its rows is a sample's, whatever its size is.

    As `in_dims=None` of `torch.func.vmap` does. Without it the rows of an argument are the samples where there are B of
    them: the class texts of a classifier without training, the points at which an operator network is asked.

    Args:
        x: The argument, of any shape.

    Returns:
        The same tensor, without a copy unless it is sparse, with a note for converted models. What is computed from it
        has none.

    Raises:
        TypeError: If it is no tensor.

    Example:
        >>> import torch, expanded_nn as enn
        >>> class Classifier(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.image, self.text = torch.nn.Linear(6, 4), torch.nn.Linear(5, 4)
        ...         self.scale = torch.nn.Parameter(torch.ones(()))
        ...     def forward(self, images, texts):  # (B, 6), (classes, 5)
        ...         return self.scale * self.image(images) @ self.text(texts).T
        >>> model, images, texts = enn.convert(Classifier()).per_sample(), torch.randn(3, 6), torch.randn(3, 5)
        >>> logits = model(images, enn.shared_by_all(texts))
        >>> torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2, 1])).backward()
        >>> model.text.weight.grad_sample.shape
        torch.Size([3, 4, 5])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"shared_by_all: x is {shown(x)}; wanted a tensor, one that a model is called with.")
    same = x.view_as(x) if x.layout is strided else x.clone()
    vars(same)[_MARK] = True
    return same


def is_shared_by_all(x: Any) -> bool:
    """Whether an argument was said to be shared by all samples."""
    return isinstance(x, Tensor) and _MARK in vars(x)


def marked_like(original: Any, copy: Tensor) -> Tensor:
    """A copy of an argument, shared by all samples if that is."""
    if is_shared_by_all(original):
        vars(copy)[_MARK] = True
    return copy


def tensors(value: Any) -> Iterator[Tensor | PackedSequence]:
    """The tensors inside tuples, lists, dicts and dataclasses, in order."""
    found: list[Tensor | PackedSequence] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Tensor | PackedSequence]) -> None:
    if isinstance(value, (Tensor, PackedSequence)):
        found.append(value)
    elif type(value) in NUMBERS:  # most other arguments are, and the classes below take long to ask
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, (dict, Mapping)):
        for item in value.values():
            _collect(item, found)
    elif is_record(value):
        for name in names_in_record(value):
            _collect(getattr(value, name), found)


def data_in(value: Any) -> Iterator[Tensor]:
    """The same tensors; of packed sequences their data."""
    return (x if isinstance(x, Tensor) else x.data for x in tensors(value))


def contents(
    value: Any, depth: int = 4, _depths: dict[int, int] | None = None, *, closed: tuple[type, ...] = ()
) -> Iterator[Any]:
    """What is inside containers and plain objects, to some depth; an object that is met again is not opened twice.

    Objects of the classes `closed` are not opened, nor are Python's modules.
    """
    depths = {} if _depths is None else _depths  # id -> depth
    for leaf in tree_leaves(value):
        yield leaf
        if isinstance(leaf, dict | list | tuple):  # of a class of the user's, which torch's trees do not open
            items = leaf.values() if isinstance(leaf, dict) else leaf
            yield from contents([*iter(items)], depth - 1, depths, closed=closed) if depth else ()
        is_object = has_dict(leaf) and not isinstance(leaf, (Tensor, nn.Module, type, ModuleType, *closed))
        if is_object and depths.get(id(leaf), 0) < depth:
            depths[id(leaf)] = depth
            yield from contents(list(vars(leaf).values()), depth - 1, depths, closed=closed)


def batch_of(value: Any, *, batch_first: bool = True) -> int | None:
    """The number of samples in the first tensor of `value` that has a batch dimension, `None` without one.

    Args:
        value: Tensors in tuples, lists, dicts, dataclasses; a `PackedSequence` says its batch itself.
        batch_first: Whether samples stand first, as in `(B, T, …)`, or second, as in `(T, B, …)`.
    """
    for tensor in tensors(value):
        if isinstance(tensor, PackedSequence):
            refuse_values("sequences have different lengths")
            return int(tensor.batch_sizes[0]) if len(tensor.batch_sizes) else 0
        if tensor.dim() > 0 and not is_shared_by_all(tensor):
            return tensor.size(batch_dim(tensor.dim(), batch_first=batch_first))  # a nested tensor has no shape
    return None


def in_order(module: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments by keyword, in the order in which the forward names them: a call may have another one."""
    if len(kwargs) < 2:
        return kwargs
    code = getattr(unwrap(type(module).forward), "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code is not None else ()
    return {name: kwargs[name] for name in (*(name for name in names if name in kwargs), *kwargs)}


def rows_are_nodes(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is one of graphs, whose `edge_index (2, edges)` joins the rows of `(nodes, features)`."""
    code = getattr(unwrap(module.plain_class.forward), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    graphs = [argument for argument in named.values() if hasattr(argument, "edge_index")]
    edges = graphs[0].edge_index if graphs else named.get("edge_index")
    x = next(tensors([*named.values()]), None)
    is_edges = isinstance(edges, Tensor) and edges.dim() == 2 and len(edges) == 2 and not may_have_derivatives(edges)
    return is_edges and (x is None or (isinstance(x, Tensor) and x.dim() < 3))


def batch_dim(dims: int, *, batch_first: bool) -> int:
    """Where the samples stand in a tensor of so many dimensions: first, or second if it has two or more."""
    return 0 if batch_first or dims < 2 else 1


def unfolded(leaf: Any, dim: int | None, batch: int) -> tuple[Any, int | None]:
    """An argument, with a dimension for the samples if it is folded, and where they stand in it."""
    return (leaf.unflatten(0, (batch, -1)), 0) if dim == FOLDED else (leaf, dim)


def readings(dims: Sequence[int | None], others: Sequence[Dims]) -> list[Dims]:
    """Where samples may stand in arguments: as in `dims`, or elsewhere in all, or in some; at most 27 of these."""
    everywhere = tuple(own[0] if own else dim for dim, own in zip(dims, others, strict=True))
    some = product(*((dim, *own) for dim, own in zip(dims, others, strict=True)))
    possible = dict.fromkeys([tuple(dims), everywhere, *islice(some, 27)])
    return [reading for reading in possible if reading.count(None) < len(reading)]


def is_like_a_state(x: Any, batch: int) -> bool:
    """Whether it may be the state of a recurrent layer, `(layers, B, hidden)`."""
    return isinstance(x, Tensor) and x.dim() > 2 and x.shape[1] == batch


_OF_ATTENTION = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def own_batch_first(module: nn.Module) -> bool | None:
    """The `batch_first` of a module with parameters of its own, or of a container of attention; else `None`."""
    own = getattr(module, "batch_first", None)
    if isinstance(own, bool) and (isinstance(module, nn.RNNBase) or [*module.parameters(recurse=False)]):
        return own
    members = module.modules() if isinstance(module, _OF_ATTENTION) else ()
    return next((member.batch_first for member in members if isinstance(member, nn.MultiheadAttention)), None)


def may_have_derivatives(tensor: Tensor) -> bool:
    """Whether it holds real or complex numbers, and no counts, indices or truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def lies_turned(x: Tensor) -> bool:
    """Whether a tensor `(B, T, …)` lies in memory as `(T, B, …)`, as what an RNN returns with `batch_first`."""
    return x.dim() > 2 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def in_memory_order(
    function: Callable[..., Any],
    x: Tensor,  # (B, *, *features)
    *others: Tensor,  # (B, *, …)
    feature_dims: int = 1,
) -> Any:  # (B, *, …), one or several
    """`function` of each position, in the order in which the positions of `x` lie in memory; so the results lie too.

    Where that is `(T, B, …)` there is nothing to copy.
    """
    if x.dim() < feature_dims + 2 or not lies_turned(x):
        return function(x, *others)
    results = function(x.transpose(0, 1), *(other.transpose(0, 1) for other in others))
    return tree_map(lambda result: result.transpose(0, 1), results)


def stacked(results: Sequence[Tensor]) -> Tensor:
    """What samples have returned, one after the other, as one tensor; shorter ones are filled up with zeros.

    So `pad_packed_sequence` fills a batch up. Whether it is right is for the comparison with the whole batch to say.
    """
    shapes = {result.shape for result in results}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1:
        sizes = [max(sizes) for sizes in zip(*shapes, strict=True)]
        results = [_filled_up(result, sizes) for result in results]
    return stack(list(results))


def _filled_up(part: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, part.shape, strict=True)]
    filled: Tensor = pad(part, [number for size in reversed(missing) for number in (0, size)])
    return filled
