"""The general rule on the whole batch: a forward runs once, with parameters that know their samples.

A parameter of its own meets the batch as a `Batched` tensor. To the forward it looks like the parameter, `(*shape)`; it
holds a value for each sample, `(B, *shape)`. What may be done with it stands in one table, below. An operation on
`Batched` tensors, alone or with what all samples share, gives a `Batched` tensor; with a tensor of B rows it gives a
plain tensor of B rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from expanded_nn._modes import checkpoint_hooks, no_torch_function
from expanded_nn._shared import cast_shared
from expanded_nn.layers import conv, norm
from expanded_nn.layers.activation import prelu
from expanded_nn.layers.embedding import embedding
from expanded_nn.layers.linear import linear
from expanded_nn.layers.trial import flatten
from expanded_nn.layers.ways import JOINS, READS, along, attributes, is_of_a_layer, named

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class NotInTable(Exception):
    """A parameter was used in a way, or with a shape, that the table does not have."""


class _Reads(TorchFunctionMode):
    """Notes what the innermost forward on the whole batch does with other tensors than its parameters.

    It may read values: one sample may lead elsewhere than another. Or it may join samples or move them, as it does not
    in the forward that was compared.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            _RUNNING.runs[-1].way.append(func.__name__)
        elif func in JOINS:
            joins, operation = _RUNNING.runs[-1].joins, along(func, args, kwargs)
            if operation not in joins and not is_of_a_layer():
                joins.add(operation)
        return func(*args, **kwargs)


class _Running(local):
    """The forwards on the whole batch that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.reads = _Reads()


_RUNNING = _Running()


class Run:
    """One forward on the whole batch.

    Attributes:
        batch: B.
        order: What looks at the order of the samples, if that is looked at.
        way: What was done with the parameters, and whether with a tensor of B rows, and where values were read: another
            forward that goes this way does the same with its samples.
        joins: What is done with other tensors that may join samples or move them. How often does not count: a layer
            may be dropped by chance.
        failed: Whether something was not in the table, even if the forward caught the error.
        made: The tensors that must not outlive the forward.
    """

    def __init__(self, batch: int, order: Any = None) -> None:
        self.batch, self.order = batch, order
        self.way: list[Any] = []
        self.joins: set[str] = set()
        self.failed = False
        self.made: list[weakref.ref[Tensor]] = []
        self.hooks = checkpoint_hooks()

    def __enter__(self) -> None:
        if not _RUNNING.runs:
            _RUNNING.reads.__enter__()  # type: ignore[no-untyped-call]
        _RUNNING.runs.append(self)

    def __exit__(self, *error: object) -> None:
        _RUNNING.runs.pop()
        if not _RUNNING.runs:
            _RUNNING.reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def batched(self, value: Tensor) -> Batched:
        made = Batched(value, self)
        self.made.append(weakref.ref(made))
        return made

    def note(self, func: Any, *, whole: bool) -> None:
        """Something is done with a parameter: with a tensor of B rows, or not."""
        if not torch.is_grad_enabled() or checkpoint_hooks() != self.hooks:
            raise NotInTable("a checkpoint inside, which computes it again when the parameters are what they were")
        self.way.append((func.__name__, whole))

    def returned(self, result: Any) -> Any:
        """What the forward returns: of a parameter with one row there is one for each sample."""
        if type(result) is Tensor:
            self.way.append(result.shape[:1] == (self.batch,))
            return result
        leaves, structure = flatten(result)
        leaves = [_beside(leaf, leaf.rank) if _is_own(leaf) else leaf for leaf in leaves]
        self.way += [leaf.shape[:1] == (self.batch,) for leaf in leaves if isinstance(leaf, Tensor)]
        return tree_unflatten(leaves, structure)

    def leaves_something(self) -> bool:
        """Whether a tensor of the forward that is over still lives: something keeps it for the next one."""
        return any(made() is not None for made in self.made)


@contextmanager
def reads_of_its_own() -> Iterator[None]:
    """Keeps what a module inside of another one reads, or what is read to compare it, out of the other one's way."""
    run = _RUNNING.runs[-1] if _RUNNING.runs else None
    length, joins = (len(run.way), set(run.joins)) if run is not None else (0, set())
    yield
    if run is not None:
        run.joins = joins
        run.way[length:] = [entry for entry in run.way[length:] if not isinstance(entry, str)]


class Batched(Tensor):
    """What looks like a parameter and has a value for each sample.

    Attributes:
        value: `(B, *shape)`.
        run: The forward that it belongs to.
        rank: The number of dimensions of `shape`.
    """

    value: Tensor
    run: Run
    rank: int

    @staticmethod
    def __new__(cls, value: Tensor, run: Run) -> Batched:
        made: Batched = Tensor._make_wrapper_subclass(cls, value.shape[1:], dtype=value.dtype, device=value.device)
        made.value, made.run, made.rank = value, run, value.dim() - 1
        return made

    def __init__(self, value: Tensor, run: Run) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = TABLE.get(func)
        try:
            order = _RUNNING.runs[-1].order if _RUNNING.runs else None
            if rule is None or (order is not None and order.moved and order.has_moved((args, kwargs))):
                raise NotInTable(func)
            return rule(func, args, kwargs or {})
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


def _is_own(value: Any) -> bool:
    return type(value) is Batched


def _run_of(args: Any) -> Run:
    run: Run = next(value.run for value in args if _is_own(value))
    return run


def _refuse_unless(condition: bool) -> None:
    if not condition:
        raise NotInTable


def _lifted(own: Batched, dims: int) -> Tensor:
    """The value `(B, 1, …, 1, *shape)` with `dims` dimensions behind the samples."""
    value = own.value
    missing = dims - own.rank
    return value.reshape(value.shape[0], *[1] * missing, *value.shape[1:]) if missing else value


def _beside(own: Batched, dims: int) -> Tensor:
    """The value with as many dimensions as a tensor of B rows has, the samples first."""
    if own.rank < dims:
        return _lifted(own, dims - 1)
    _refuse_unless(own.rank == dims > 0 and own.value.shape[1] == 1)
    return own.value.squeeze(1)


def _has_rows(x: Any, run: Run, dims: int) -> bool:
    """Whether it is a plain tensor of B rows with at least so many dimensions."""
    return isinstance(x, Tensor) and not _is_own(x) and x.dim() >= max(dims, 1) and x.shape[0] == run.batch


# Rules: what becomes of the operations of one kind


def _as_it_looks(func: Any, args: Any, kwargs: Any) -> Any:
    with no_torch_function():
        return func(*args, **kwargs)


def _requires_grad(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0].value.requires_grad  # type: ignore[no-any-return]


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors that broadcast against each other."""
    _refuse_unless(not any(isinstance(operand, Tensor) for operand in kwargs.values()))
    run = _run_of(args)
    own = [operand for operand in args if _is_own(operand)]
    plain = [operand for operand in args if isinstance(operand, Tensor) and not _is_own(operand)]
    dims = max(operand.rank if _is_own(operand) else operand.dim() for operand in chain(own, plain))
    if any(operand.rank == 0 for operand in own):  # a number takes the dtype of the others, a row of numbers does not
        _refuse_unless(len({operand.dtype for operand in chain((mine.value for mine in own), plain)}) == 1)
    whole = any(_has_rows(operand, run, dims) for operand in plain)
    in_place = getattr(func, "__name__", "")
    if in_place.startswith("__i") or (in_place.endswith("_") and not in_place.endswith("__")):
        _refuse_unless(whole and not _is_own(args[0]))
    run.note(func, whole=whole)
    if whole:
        return func(*(_beside(operand, dims) if _is_own(operand) else operand for operand in args), **kwargs)
    if any(operand.dim() for operand in plain):  # what all samples share, but no larger than the parameter
        shapes = [operand.value.shape[1:] for operand in own]
        _refuse_unless(torch.broadcast_shapes(*shapes, *(operand.shape for operand in plain)) in shapes)
    return run.batched(func(*(_lifted(operand, dims) if _is_own(operand) else operand for operand in args), **kwargs))


def _of_each_number(func: Any, args: Any, kwargs: Any) -> Batched:
    own, *rest = args
    _refuse_unless(_is_own(own) and not any(isinstance(value, Tensor) for value in chain(rest, kwargs.values())))
    own.run.note(func, whole=False)
    return own.run.batched(func(own.value, *rest, **kwargs))  # type: ignore[no-any-return]


def _cast(func: Any, args: Any, kwargs: Any) -> Batched:
    """Another dtype; a value that is expanded stays so."""
    own, *rest = args
    _refuse_unless(_is_own(own) and not any(map(_is_own, rest)))
    own.run.note(func, whole=False)
    like = func(own.value.new_empty(()), *rest, **kwargs)
    _refuse_unless(like.device == own.value.device)
    return own.run.batched(cast_shared(own.value, like.dtype))  # type: ignore[no-any-return]


def _numbers(values: tuple[Any, ...]) -> list[int]:
    """Sizes or dimensions, given one by one or as one list."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = tuple(values[0])
    _refuse_unless(bool(values) and all(type(number) is int for number in values))
    return list(values)


def _behind(dim: int) -> int:
    """Where a dimension of the parameter is in its value."""
    return dim if dim < 0 else dim + 1


def _by_dims(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that name one dimension or some, after the tensor and, for `split`, the sizes."""
    own, *rest = args
    _refuse_unless(_is_own(own) and own.rank > 0)
    before = rest[:1] if func in _SIZES_FIRST else []
    dims = (kwargs["dim"],) if "dim" in kwargs else tuple(rest[len(before) :])
    if not dims and func in _HAVE_DEFAULT:
        dims = tuple(range(own.rank)) if func in _REDUCTIONS else (0,)
    behind = [_behind(dim) for dim in _numbers(dims)]
    options = {name: value for name, value in kwargs.items() if name != "dim"}
    own.run.note(func, whole=False)
    found = func(own.value, *before, *([behind] if func in _REDUCTIONS else behind), **options)
    return tuple(map(own.run.batched, found)) if isinstance(found, tuple | list) else own.run.batched(found)


def _same(func: Any, args: Any, kwargs: Any) -> Batched:
    """A copy, or another layout in memory: nothing is changed in place."""
    own = args[0]
    own.run.note(func, whole=False)
    return own.run.batched(own.value)  # type: ignore[no-any-return]


def _permute(func: Any, args: Any, kwargs: Any) -> Batched:
    own, *dims = args
    _refuse_unless(_is_own(own) and not kwargs)
    own.run.note(func, whole=False)
    return own.run.batched(own.value.permute(0, *(dim % own.rank + 1 for dim in _numbers(tuple(dims)))))  # type: ignore[no-any-return]


def _matrix_transposed(func: Any, args: Any, kwargs: Any) -> Batched:
    (own,) = args
    _refuse_unless(own.rank == 2)
    own.run.note(func, whole=False)
    return own.run.batched(own.value.mT)  # type: ignore[no-any-return]


def _flatten(func: Any, args: Any, kwargs: Any) -> Batched:
    own, *dims = args
    _refuse_unless(not kwargs and own.rank > 0)
    start, end = [*dims, 0, -1][:2] if len(dims) != 1 else (dims[0], -1)
    own.run.note(func, whole=False)
    return own.run.batched(own.value.flatten(_behind(start), _behind(end)))  # type: ignore[no-any-return]


def _reshape(func: Any, args: Any, kwargs: Any) -> Batched:
    own, *sizes = args
    _refuse_unless(not kwargs)
    own.run.note(func, whole=False)
    return own.run.batched(own.value.reshape(own.run.batch, *_numbers(tuple(sizes))))  # type: ignore[no-any-return]


def _to_rows(own: Batched, sizes: list[int]) -> bool:
    """Whether a parameter is spread to B rows, one for each sample, and not to a larger parameter."""
    return sizes[0] == own.run.batch and (own.rank < len(sizes) or own.value.shape[1:2] == (1,))


def _expand(func: Any, args: Any, kwargs: Any) -> Tensor:
    """To B rows, one for each sample, or to a larger parameter."""
    own, *sizes = args
    _refuse_unless(_is_own(own) and not kwargs)
    sizes = list(sizes[0].shape) if isinstance(sizes[0], Tensor) else _numbers(tuple(sizes))
    whole = _to_rows(own, sizes)
    own.run.note(func, whole=whole)
    if whole:
        return _beside(own, len(sizes)).expand(own.run.batch, *sizes[1:])
    return own.run.batched(_lifted(own, len(sizes)).expand(own.run.batch, *sizes))  # type: ignore[no-any-return]


def _repeat(func: Any, args: Any, kwargs: Any) -> Tensor:
    own, *times = args
    _refuse_unless(not kwargs)
    times = _numbers(tuple(times))
    whole = _to_rows(own, times)
    own.run.note(func, whole=whole)
    if whole:
        return _beside(own, len(times)).repeat(1, *times[1:])
    return own.run.batched(_lifted(own, len(times)).repeat(1, *times))  # type: ignore[no-any-return]


def _index(func: Any, args: Any, kwargs: Any) -> Batched:
    own, key = args
    _refuse_unless(_is_own(own))
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and isinstance(keys[0], Tensor):  # rows of a table, by an index that all samples share
        (index,) = keys
        _refuse_unless(not _is_own(index) and index.dtype == torch.int64 and not _has_rows(index, own.run, 1))
    else:
        _refuse_unless(all(part is None or part is Ellipsis or type(part) in (int, slice) for part in keys))
    own.run.note(func, whole=False)
    return own.run.batched(own.value[(slice(None), *keys)])  # type: ignore[no-any-return]


def _resized(func: Any, args: Any, kwargs: Any) -> Batched:
    """Images `(N, C, …)`, as a table of positions is, at another size."""
    own, *rest = args
    _refuse_unless(_is_own(own) and own.rank > 2)
    own.run.note(func, whole=False)
    resized = func(own.value.flatten(0, 1), *rest, **kwargs)
    return own.run.batched(resized.unflatten(0, own.value.shape[:2]))  # type: ignore[no-any-return]


def _join(func: Any, args: Any, kwargs: Any) -> Batched:
    """Parameters beside each other."""
    given, *rest = args
    dim = rest[0] if rest else kwargs.get("dim", 0)
    _refuse_unless(all(map(_is_own, given)) and len({own.rank for own in given}) == 1)
    run = _run_of(given)
    run.note(func, whole=False)
    return run.batched(func([own.value for own in given], _behind(dim)))


def _with_weights(op: Callable[..., Tensor], dims: int, names: Sequence[str], weights: Sequence[str]) -> Rule:
    """A layer's operation on weights with a batch dimension, called as torch's is.

    Args:
        op: Takes what torch's takes, by the same names but for the input.
        dims: How many dimensions the input has, `(B, …)`, at the least.
        names: What torch's operation calls its arguments.
        weights: Which of them are weights.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Tensor:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        own = [named[name] for name in weights if named.get(name) is not None]
        x = named.pop("input")
        _refuse_unless(bool(own) and all(map(_is_own, own)))
        run = _run_of(own)
        whole = _has_rows(x, run, max(dims, 1 + len(named.get("normalized_shape", ()))))
        _refuse_unless(whole and not named.get("training") and named.get("max_norm") is None)
        run.note(func, whole=True)
        for name in weights:
            named[name] = named[name].value if named.get(name) is not None else None
        return op(x, **named)

    return rule


def _look_up(func: Any, args: Any, kwargs: Any) -> Tensor:
    """By one index per sample, or by one that all samples share."""
    named = {**dict(zip(("input", "weight", *_LOOK_UP), args, strict=False)), **kwargs}
    index, own = named.pop("input"), named.pop("weight")
    _refuse_unless(_is_own(own) and isinstance(index, Tensor) and not _is_own(index) and named.get("max_norm") is None)
    run = own.run
    whole = _has_rows(index, run, 1)
    run.note(func, whole=whole)
    if whole:
        return embedding(index, own.value, **named)
    return run.batched(embedding(index.expand(run.batch, *index.shape), own.value, **named))  # type: ignore[no-any-return]


def _product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A matrix product with a parameter on one side."""
    left, right = args
    _refuse_unless(not kwargs)
    run = _run_of(args)
    if _is_own(left) and _is_own(right):
        _refuse_unless(left.rank == right.rank >= 2)
        run.note(func, whole=False)
        return run.batched(torch.matmul(left.value, right.value))
    own, x = (right, left) if _is_own(right) else (left, right)
    _refuse_unless(own.rank >= 2 and _has_rows(x, run, 2 if own is right and own.rank == 2 else 3))
    run.note(func, whole=True)
    if own is right and own.rank == 2:
        return linear(x, own.value.mT)
    return torch.matmul(*(_beside(side, x.dim()) if side is own else side for side in args))


# The table: what may be done with a parameter, and by which rule


_LOOK_UP = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding")
_SIZES_FIRST = set(named("split", "chunk"))
_REDUCTIONS = set(named("sum", "mean"))
_HAVE_DEFAULT = {*_REDUCTIONS, *named("split", "chunk", "unbind")}
_BOTH = ("weight", "bias")

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(attributes("shape", "dtype", "device", "ndim", "layout", "is_cuda"), _as_it_looks),
    **dict.fromkeys(named("dim", "size", "numel", "nelement", "is_floating_point", "is_complex"), _as_it_looks),
    Tensor.__len__: _as_it_looks,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    **dict.fromkeys(
        named(
            *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "rsub"),
            *("add_", "sub_", "mul_", "div_", "maximum", "minimum", "where", "lerp", "addcmul"),
            *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
            *("__truediv__", "__rtruediv__", "__itruediv__", "__div__", "__rdiv__", "__idiv__", "__pow__", "__rpow__"),
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        named(
            *("neg", "__neg__", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin"),
            *("cos", "sigmoid", "tanh", "relu", "silu", "gelu", "softplus", "logsigmoid", "clamp", "detach"),
        ),
        _of_each_number,
    ),
    **dict.fromkeys(named("clone", "contiguous"), _same),
    **dict.fromkeys(named("to", "type_as", "float", "double", "half", "bfloat16"), _cast),
    **dict.fromkeys(named("unsqueeze", "squeeze", "transpose", "unbind", "split", "chunk"), _by_dims),
    **dict.fromkeys(named("softmax", "sum", "mean"), _by_dims),
    **dict.fromkeys(named("permute"), _permute),
    **dict.fromkeys([Tensor.t, torch.t, *attributes("T", "mT")], _matrix_transposed),
    **dict.fromkeys(named("flatten"), _flatten),
    **dict.fromkeys(named("view", "reshape"), _reshape),
    **dict.fromkeys(named("expand", "expand_as", "broadcast_to"), _expand),
    Tensor.repeat: _repeat,
    Tensor.__getitem__: _index,
    **dict.fromkeys(named("cat", "concat", "stack"), _join),
    **dict.fromkeys(named("matmul", "__matmul__", "bmm"), _product),
    F.embedding: _look_up,
    F.interpolate: _resized,
    F.linear: _with_weights(linear, 2, ("input", *_BOTH), _BOTH),
    F.prelu: _with_weights(prelu, 1, ("input", "weight"), ("weight",)),
    F.layer_norm: _with_weights(norm.layer_norm, 2, ("input", "normalized_shape", *_BOTH, "eps"), _BOTH),
    F.rms_norm: _with_weights(norm.rms_norm, 2, ("input", "normalized_shape", "weight", "eps"), ("weight",)),
    F.group_norm: _with_weights(norm.group_norm, 2, ("input", "num_groups", *_BOTH, "eps"), _BOTH),
    F.batch_norm: _with_weights(norm.batch_norm, 2, (*_STATISTICS, "training", "momentum", "eps"), _BOTH),
    F.instance_norm: _with_weights(norm.instance_norm, 2, (*_STATISTICS, "use_input_stats", "momentum", "eps"), _BOTH),
    F.conv1d: _with_weights(conv.conv1d, 3, (*_CONVOLUTION, "dilation", "groups"), _BOTH),
    F.conv2d: _with_weights(conv.conv2d, 4, (*_CONVOLUTION, "dilation", "groups"), _BOTH),
    F.conv3d: _with_weights(conv.conv3d, 5, (*_CONVOLUTION, "dilation", "groups"), _BOTH),
    **{
        func: _with_weights(op, dims, (*_CONVOLUTION, "output_padding", "groups", "dilation"), _BOTH)
        for func, op, dims in (
            (F.conv_transpose1d, conv.conv_transpose1d, 3),
            (F.conv_transpose2d, conv.conv_transpose2d, 4),
            (F.conv_transpose3d, conv.conv_transpose3d, 5),
        )
    },
}
