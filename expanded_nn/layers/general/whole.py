"""The general rule on the whole batch: a forward runs once, with parameters that know their samples.

In the forward a parameter is a `Batched` tensor. It looks like the parameter, `(*shape)`, and holds a value for each
sample, `(B, *shape)`. What may be done with it stands in one table, below; what is not there runs by `vmap`, if the
forward does not fold its samples, or if only parameters are in it. An operation on `Batched` tensors, alone or with
what all samples share, gives a `Batched` tensor; with a plain tensor `(B, *)` it gives a plain tensor `(B, *)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn.common.batch import FOLDED
from expanded_nn.common.functions import attributes, functions, is_in_place
from expanded_nn.common.modes import is_shown_elsewhere, unseen
from expanded_nn.common.shared import cast_shared, with_dims
from expanded_nn.core import cost
from expanded_nn.layers import conv, norm
from expanded_nn.layers.activation import prelu
from expanded_nn.layers.embedding import embedding
from expanded_nn.layers.general import folded
from expanded_nn.layers.general.attention_rules import by_biased_products, multi_head_attention
from expanded_nn.layers.general.batched import (
    ASKED,
    COMPUTED,
    RULES,
    Batched,
    Rule,
    Run as Run,
    as_it_looks,
    beside,
    by_vmap,
    is_own,
    own_of,
    reads_of_its_own as reads_of_its_own,
    refuse_unless,
    run_of,
)
from expanded_nn.layers.general.folded import linear_of_rows
from expanded_nn.layers.general.folded_rules import (
    FOLDED_RULES,
    as_arranged,
    einsum,
    embedding_of_rows,
    joined_to_rows,
    product_by_expert,
    with_folded_rows,
)
from expanded_nn.layers.general.owners import Owners, takes_view
from expanded_nn.layers.general.recurrent_rules import RECURRENT_RULES
from expanded_nn.layers.linear import linear

_BOTH = ("weight", "bias")
_STATISTICS = ("input", "running_mean", "running_var", *_BOTH)
_BATCH_NORM = (*_STATISTICS, "training", "momentum", "eps")


# Rules: what becomes of the operations of one kind


def _requires_grad(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0].value.requires_grad  # type: ignore[no-any-return]


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on tensors that broadcast: parameters with tensors `(B, *)`, or with what all samples share."""
    refuse_unless(not any(isinstance(operand, Tensor) for operand in kwargs.values()))
    run = run_of(args)
    own = [operand for operand in args if is_own(operand)]
    plain = [operand for operand in args if isinstance(operand, Tensor) and not is_own(operand)]
    dims = max(operand.rank if is_own(operand) else operand.dim() for operand in chain(own, plain))
    is_change = is_in_place(func)
    refuse_unless(not (is_change and is_own(args[0])))
    if any(map(run.holds_all_in_one_row, plain)):
        return run.in_one_row(func, _elementwise, args, kwargs)
    if run.owners is not None and any(operand.dim() for operand in plain):
        result = with_folded_rows(func, args, kwargs, run.owners, dims)
        return _with_shared(func, args, kwargs, run, dims) if result is NotImplemented else result
    if any(operand.rank == 0 for operand in own):  # a number would take the dtype of the others, `(B,)` does not
        refuse_unless(len({operand.dtype for operand in chain((mine.value for mine in own), plain)}) == 1)
    if any(run.has_rows(operand, dims) for operand in plain):
        run.note(func, whole=True)
        return func(*(beside(operand, dims) if is_own(operand) else operand for operand in args), **kwargs)
    refuse_unless(not is_change)
    return _with_shared(func, args, kwargs, run, dims)


def _with_shared(func: Any, args: Any, kwargs: Any, run: Run, dims: int) -> Batched:
    """The same with numbers, and with tensors that all samples share and that are no larger than a parameter."""
    is_tensor = [isinstance(arg, Tensor) and (is_own(arg) or arg.dim() > 0) for arg in args]
    numbers = [arg for arg, is_operand in zip(args, is_tensor, strict=True) if not is_operand]
    operands = [arg for arg, is_operand in zip(args, is_tensor, strict=True) if is_operand]
    refuse_unless(not any(isinstance(number, Tensor) and number.requires_grad for number in numbers))
    if not all(map(is_own, operands)):
        shapes = [operand.value.shape[1:] for operand in operands if is_own(operand)]
        shared = (operand.shape for operand in operands if not is_own(operand))
        shape = torch.broadcast_shapes(*shapes, *shared)
        refuse_unless(shape in shapes or run.batch * shape.numel() <= cost.LOOKED_UP_FOR_EACH)

    def of_values(*values: Tensor) -> Any:
        left_numbers, left_values = iter(numbers), (with_dims(value, dims) for value in values)
        return func(*(next(left_values) if is_operand else next(left_numbers) for is_operand in is_tensor), **kwargs)

    spread = (operand if is_own(operand) else operand.expand(run.batch, *operand.shape) for operand in operands)
    return run.derived(func, of_values, *spread)


def _of_each_number(func: Any, args: Any, kwargs: Any) -> Batched:
    own, rest = own_of(args[0]), args[1:]
    refuse_unless(not any(isinstance(value, Tensor) for value in chain(rest, kwargs.values())))
    return own.run.derived(func, lambda value: func(value, *rest, **kwargs), own)


def _cast(func: Any, args: Any, kwargs: Any) -> Batched:
    """Another dtype; a value with stride 0 keeps it."""
    own, rest = own_of(args[0]), args[1:]
    refuse_unless(not any(map(is_own, rest)))
    like = func(own.value.new_empty(()), *rest, **kwargs)
    refuse_unless(isinstance(like, Tensor) and like.device == own.value.device)
    if like.dtype == own.value.dtype:
        return own
    own.run.note(func, whole=False)
    return own.run.batched(cast_shared(own.value, like.dtype))


def _numbers(values: tuple[Any, ...]) -> list[int]:
    """Sizes or dimensions, given one by one or as one list."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = tuple(values[0])
    refuse_unless(bool(values) and all(type(number) in (int, torch.SymInt) for number in values))
    return list(values)


def _behind(dim: int) -> int:
    """Where a dimension of the parameter is in its value."""
    return dim if dim < 0 else dim + 1


def _by_dims(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that name one dimension or some, after the tensor and, for `split`, the sizes."""
    own, rest = own_of(args[0]), args[1:]
    refuse_unless(own.rank > 0)
    before = rest[:1] if func in _SIZES_FIRST else ()
    named = (kwargs["dim"],) if "dim" in kwargs else rest[len(before) :]
    if not named and func in _HAVE_DEFAULT:
        named = tuple(range(own.rank)) if func in _REDUCTIONS else (0,)
    dims: list[Any] = [_behind(dim) for dim in _numbers(named)]
    options = {name: value for name, value in kwargs.items() if name != "dim"}
    if func in _SEVERAL:
        own.run.note(func, whole=False)
        return tuple(map(own.run.batched, func(own.value, *before, *dims, **options)))
    computes = func in _REDUCTIONS or func in _SOFTMAX
    refuse_unless(computes or not options)
    if func in _REDUCTIONS:
        dims = [dims]
    elif func in _PERMUTE:
        dims = [[0, *dims]]
    return own.run.derived(func, lambda value: func(value, *dims, **options), own, begins=computes)


def _same(func: Any, args: Any, kwargs: Any) -> Batched:
    """A copy, or another layout in memory: nothing is changed in place."""
    own = own_of(args[0])
    own.run.note(func, whole=False)
    return own.run.batched(own.value)


def _matrix_transposed(func: Any, args: Any, kwargs: Any) -> Batched:
    own = own_of(args[0])
    refuse_unless(own.rank == 2)
    return own.run.derived(func, lambda value: value.mT, own, begins=False)


def _reshape(func: Any, args: Any, kwargs: Any) -> Batched:
    own, sizes = own_of(args[0]), _sizes(args[1:])
    refuse_unless(not kwargs)
    return own.run.derived(func, lambda value: value.reshape(value.shape[0], *sizes), own, begins=False)


def _sizes(values: tuple[Any, ...]) -> list[int]:
    """Sizes, given one by one, as one list, or as a tensor that has them."""
    return list(values[0].shape) if isinstance(values[0], Tensor) else _numbers(values)


def _spread(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A parameter expanded or repeated, to a plain tensor `(B, *)` or to a larger parameter."""
    own, sizes = own_of(args[0]), _sizes(args[1:])
    refuse_unless(not kwargs)

    def spread(value: Tensor, sizes: list[int]) -> Tensor:
        return value.repeat(1, *sizes) if func is Tensor.repeat else value.expand(-1, *sizes)

    run = own.run
    if sizes[0] == run.batch and (own.rank < len(sizes) or own.value.shape[1:2] == (1,)):
        run.note(func, whole=True)
        return spread(beside(own, len(sizes)), sizes[1:])
    if run.owners is not None and not run.module._alone and run.batch != 1 and run.batch in sizes:
        return _over_the_samples(func, own, sizes, run.owners)
    return own.run.derived(func, lambda value: spread(with_dims(value, len(sizes)), sizes), own, begins=False)


def _over_the_samples(func: Any, own: Batched, sizes: Sequence[int], owners: Owners) -> Tensor:
    """A parameter once per sample, as queries `(T, B, d)` or positions `(B * T, d)`: each sample gets its own.

    It would be computed B times for each sample, if it were taken for a larger parameter.
    """
    refuse_unless(own.rank == len(sizes))
    dim, shape = sizes.index(own.run.batch), own.value.shape[1:]
    others = [place for place in range(len(sizes)) if place != dim]
    stay = [sizes[place] == 1 if func is Tensor.repeat else sizes[place] in (-1, shape[place]) for place in others]
    is_folded = func is Tensor.repeat and dim == 0
    refuse_unless((shape[dim] == 1 or is_folded) and all(stay))
    own.run.note(func, whole=True)
    y = own.value.flatten(0, 1) if is_folded else own.value.squeeze(dim + 1).movedim(0, dim)
    owners.note_samples_in(y, FOLDED if is_folded else dim)
    return y


def _index(func: Any, args: Any, kwargs: Any) -> Batched:
    own, key = own_of(args[0]), args[1]
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and own.run.owners is not None and _is_number(keys[0]):  # the weight of one of the experts
        number = int(keys[0])
        refuse_unless(-own.value.shape[1] <= number < own.value.shape[1])
        own.run.note(func, whole=False)
        return own.run.batched(own.part(number % own.value.shape[1]))
    if len(keys) == 1 and isinstance(keys[0], Tensor):  # entries of a table, by an index that all samples share
        (index,) = keys
        by_all = own.run.are_shared(index) or own.run.may_be_looked_up_by_all(index, own.value[0, :1].numel())
        refuse_unless(not is_own(index) and index.dtype == torch.int64 and by_all)
    else:
        refuse_unless(takes_view(key))
    return own.run.derived(func, lambda value: value[(slice(None), *keys)], own, begins=False)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """A parameter written where a mask says, `x[mask] = weight`, or into what no sample went into."""
    x, mask, own = args
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and not is_own(x) and is_own(own)
    if not is_mask or not (x.requires_grad or own.run.has_rows(x, 1) or own.run.has_rows(mask, 1)):
        return _written_for_each(func, *args)
    while own.rank > x.dim() - mask.dim() and own.value.shape[1] == 1:  # as torch leaves such dimensions out
        own = own.squeeze(0)
    refuse_unless(mask.shape == x.shape[: mask.dim()] and own.rank <= x.dim() - mask.dim())
    written = _elementwise(torch.where, (mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), own, x), {})
    refuse_unless(not is_own(written))
    return x.copy_(written)


def _written_for_each(func: Any, x: Tensor, key: Any, value: Any) -> None:
    """Entries of a matrix, as of a triangular one: it becomes what is computed from parameters."""
    run, keys = run_of((x, value)), key if isinstance(key, tuple) else (key,)
    plain = [part for part in (x, *keys, value) if isinstance(part, Tensor) and not is_own(part)]
    are_for_all = (not part.requires_grad and (run.are_shared(part) or run.is_for_all(part)) for part in plain)
    refuse_unless(torch.is_grad_enabled() and not any(map(is_own, keys)) and all(are_for_all))
    if is_own(x):  # neither a part of something else, which would change as well, nor the other way around
        is_part = (x.source.shared if x.is_computed else x.value)._is_view()  # type: ignore[attr-defined]
        refuse_unless(not (is_part or x.was_used))  # type: ignore[attr-defined]
    else:
        refuse_unless(type(x) is Tensor and not vars(x) and not is_shown_elsewhere(x))
        refuse_unless(run.batch * x.numel() <= cost.LOOKED_UP_FOR_EACH)
    before, number = None if is_own(x) else x.detach().clone(), None if is_own(value) else value

    def written(*values: Tensor) -> Tensor:
        left, place = iter(values), (slice(None), *keys)
        whole = (next(left) if before is None else before.expand(values[0].shape[0], *before.shape)).clone()
        whole[place] = with_dims(next(left), whole[place].dim() - 1) if number is None else number
        return whole

    result = run.derived(func, written, *filter(is_own, (x, value)))
    if before is not None:
        with torch.no_grad(), unseen():  # what else sees its memory sees the numbers
            x.copy_(result.value[0] if run.batch else before)
        run.lend(x)
    x.become(result)  # type: ignore[attr-defined]


def _is_number(key: Any) -> bool:
    return type(key) is int or (isinstance(key, Tensor) and key.dim() == 0 and key.dtype == torch.int64)


def _join(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Parameters beside each other, or beside constants that all samples share."""
    joined, *rest = args
    dim, run = rest[0] if rest else kwargs.get("dim", 0), run_of(joined)
    constants = [part for part in joined if not is_own(part)]
    if run.owners is not None and func is not torch.stack and any(part.requires_grad for part in constants):
        return joined_to_rows(func, joined, dim, run)
    refuse_unless(all(run.are_shared(part) and not part.requires_grad for part in constants))
    refuse_unless(len({part.rank if is_own(part) else part.dim() for part in joined}) == 1)
    spread = (part if is_own(part) else part.expand(run.batch, *part.shape) for part in joined)
    return run.derived(func, lambda *values: func(values, _behind(dim)), *spread)


def _with_weights(
    op: Callable[..., Tensor],
    dims: int,
    names: Sequence[str],
    weights: Sequence[str],
    *,
    of_folded: Callable[..., Tensor] | None = None,
) -> Rule:
    """A layer's operation on weights with a batch dimension, called as torch's is.

    Args:
        op: Takes what torch's takes, by the same names but for the input.
        dims: How many dimensions the input has, `(B, …)`, at the least.
        names: What torch's operation calls its arguments.
        weights: Which of them are weights.
        of_folded: What does the same where a sample may have any number of rows, as `folded.by_position` does.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Tensor:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        own = [named[name] for name in weights if named.get(name) is not None]
        x = named.pop("input")
        refuse_unless(bool(own) and all(map(is_own, own)))
        run = run_of(own)
        is_by_position = of_folded in (folded.by_position, folded.linear_by_name)
        if is_by_position and (is_own(x) or run.is_constant(x)):
            return _of_weights_alone(func, op, x, named, weights)
        if is_by_position and run.holds_all_in_one_row(x):
            return run.in_one_row(func, lambda _, rows, named: rule(func, rows, named), (x,), named)
        dims_needed = max(dims, 1 + len(named.get("normalized_shape", ())))
        may_fold = of_folded is not None and run.owners is not None and not is_own(x) and x.dim() >= dims_needed
        arrangement = run.arranged(x) if may_fold else None
        whole = arrangement is not None or run.has_rows(x, dims_needed)
        refuse_unless(whole and not named.get("training") and named.get("max_norm") is None)
        run.note(func, whole=True)
        for name in weights:
            named[name] = named[name].value if named.get(name) is not None else None
        if arrangement is None or of_folded is None or arrangement.length == 1:
            return op(x, **named)
        return as_arranged(run, of_folded(func, op, x, named, arrangement), arrangement)

    return rule


def _of_weights_alone(
    func: Any, op: Callable[..., Tensor], x: Tensor, named: dict[str, Any], weights: Sequence[str]
) -> Batched:
    """A layer's operation on the positions of a parameter, or of a table that all samples share."""
    own = {name: named[name] for name in weights if named.get(name) is not None}
    run, options = run_of(own.values()), {name: value for name, value in named.items() if name not in own}

    def of_values(positions: Tensor, *values: Tensor) -> Tensor:
        return op(positions, **options, **dict(zip(names, values, strict=True)))

    names, table = list(own), x if is_own(x) else x.expand(run.batch, *x.shape)
    return run.derived(func, of_values, table, *own.values())


_batch_norm_of_samples = _with_weights(norm.batch_norm, 2, _BATCH_NORM, _BOTH, of_folded=folded.by_channel)


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Of samples, in eval mode; or of a parameter `(N, C, *)`, which is standardized by it."""
    of_parameter = is_own(args[0] if args else kwargs["input"])
    return (by_vmap if of_parameter else _batch_norm_of_samples)(func, args, kwargs)  # type: ignore[no-any-return]


def _look_up(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A look-up by one index per sample, or by one that all samples share."""
    named = {**dict(zip(("input", "weight", *_LOOK_UP), args, strict=False)), **kwargs}
    index, own = named.pop("input"), own_of(named.pop("weight"))
    refuse_unless(isinstance(index, Tensor) and not is_own(index) and named.get("max_norm") is None)
    run = own.run
    samples = None if run.owners is None else run.owners.of(index)
    if samples is not None:
        return embedding_of_rows(func, index, samples, own, named)
    whole = run.has_rows(index, 1)
    if not whole and run.may_be_looked_up_by_all(index, own.value.shape[-1]):
        refuse_unless(not named.get("scale_grad_by_freq"))
        constants = None if named.get("padding_idx") is None else (index == named["padding_idx"] % own.value.shape[1])

        def looked_up(table: Tensor) -> Tensor:  # by indexing, whose backward may be vmapped
            rows = table[:, index]
            return rows if constants is None else torch.where(constants[..., None], rows.detach(), rows)

        return run.derived(func, looked_up, own)
    refuse_unless(whole or run.are_shared(index))
    run.note(func, whole=whole)
    if whole:
        return embedding(index, own.value, **named)
    return run.batched(embedding(index.expand(run.batch, *index.shape), own.value, **named))


def _product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A matrix product with a parameter on one side."""
    left, right = args
    refuse_unless(not kwargs)
    run = run_of(args)
    if is_own(left) and is_own(right):
        refuse_unless(left.rank == right.rank >= 2)
        return run.derived(func, torch.matmul, left, right)
    own, x = (right, left) if is_own(right) else (left, right)
    is_linear = own is right and own.rank in (1, 2)
    if is_linear and isinstance(x, Tensor) and x.dim() >= 2:
        arrangement, weight = run.arranged(x), own.value.mT if own.rank == 2 else own.value[:, None]
        refuse_unless(arrangement is not None or run.has_rows(x, 2))
        run.note(func, whole=True)
        y = linear(x, weight) if arrangement is None else linear_of_rows(x, weight, None, arrangement)
        y = y if own.rank == 2 else y.squeeze(-1)
        return y if arrangement is None else as_arranged(run, y, arrangement)
    if run.owners is not None and own is right and own.rank == x.dim() == 3:
        return product_by_expert(func, x, own, run.owners)
    refuse_unless(own.rank >= 2 and not is_linear and run.has_rows(x, 3))
    run.note(func, whole=True)
    return torch.matmul(*(beside(side, x.dim()) if side is own else side for side in args))


def _plus_product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A matrix product and what is added to it, each by its own rule."""
    total, left, right = args
    options = {"beta": 1, "alpha": 1, **kwargs}
    refuse_unless(options.keys() == {"beta", "alpha"})
    product, beta, alpha = torch.matmul(left, right), options["beta"], options["alpha"]
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then even what is not finite counts as zero
        return product
    return product + (total if beta == 1 else total * beta)  # type: ignore[no-any-return]


# The table: what may be done with a parameter, and by which rule


_LOOK_UP = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding")
_SIZES_FIRST = set(functions("split", "chunk"))
_SEVERAL = set(functions("split", "chunk", "unbind"))
_SOFTMAX = set(functions("softmax"))
_REDUCTIONS = set(functions("sum", "mean", "std", "var"))
_PERMUTE = set(functions("permute"))
_HAVE_DEFAULT = {*_REDUCTIONS, *functions("split", "chunk", "unbind", "flatten")}

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(
        attributes("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_nested", "_base"), as_it_looks
    ),
    **dict.fromkeys(functions("dim", "size", "numel", "nelement", "is_floating_point", "is_complex"), as_it_looks),
    Tensor.__len__: as_it_looks,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    **dict.fromkeys(
        functions(
            *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "rsub"),
            *("add_", "sub_", "mul_", "div_", "maximum", "minimum", "where", "lerp", "addcmul"),
            *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
            *("__truediv__", "__rtruediv__", "__itruediv__", "__div__", "__rdiv__", "__idiv__", "__pow__", "__rpow__"),
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        functions(
            *("neg", "__neg__", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin"),
            *("cos", "sigmoid", "tanh", "relu", "silu", "gelu", "softplus", "logsigmoid", "clamp", "detach"),
        ),
        _of_each_number,
    ),
    **dict.fromkeys(functions("clone", "contiguous"), _same),
    **dict.fromkeys([F.dropout, *functions("squeeze")], by_vmap),
    **dict.fromkeys(functions("to", "type", "type_as", "float", "double", "half", "bfloat16"), _cast),
    **dict.fromkeys(functions("unsqueeze", "transpose", "permute", "flatten", "unbind", "split", "chunk"), _by_dims),
    **dict.fromkeys(functions("softmax", "sum", "mean", "std", "var"), _by_dims),
    **dict.fromkeys([Tensor.t, torch.t, *attributes("T", "mT")], _matrix_transposed),
    **dict.fromkeys(functions("view", "reshape", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(functions("expand", "expand_as", "broadcast_to", "repeat"), _spread),
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _write,
    **dict.fromkeys(functions("cat", "concat", "stack"), _join),
    **dict.fromkeys(functions("matmul", "__matmul__", "mm", "mv", "bmm"), _product),
    **dict.fromkeys(functions("addmm", "addmv", "baddbmm"), _plus_product),
    torch.einsum: einsum,
    F.embedding: _look_up,
    F.scaled_dot_product_attention: by_biased_products,
    F.multi_head_attention_forward: multi_head_attention,
    F.linear: _with_weights(linear, 2, ("input", *_BOTH), _BOTH, of_folded=folded.linear_by_name),
    F.prelu: _with_weights(prelu, 1, ("input", "weight"), ("weight",)),
    F.layer_norm: _with_weights(
        norm.layer_norm, 2, ("input", "normalized_shape", *_BOTH, "eps"), _BOTH, of_folded=folded.by_position
    ),
    F.rms_norm: _with_weights(
        norm.rms_norm, 2, ("input", "normalized_shape", "weight", "eps"), ("weight",), of_folded=folded.by_position
    ),
    F.group_norm: _with_weights(
        norm.group_norm, 2, ("input", "num_groups", *_BOTH, "eps"), _BOTH, of_folded=folded.by_channel
    ),
    F.batch_norm: _batch_norm,
    F.instance_norm: _with_weights(
        norm.instance_norm, 2, (*_STATISTICS, "use_input_stats", "momentum", "eps"), _BOTH, of_folded=folded.by_channel
    ),
    **{
        func: _with_weights(op, op.dims + 2, (*_CONVOLUTION, *names), _BOTH, of_folded=folded.images)
        for names, ops in (
            (("dilation", "groups"), (conv.conv1d, conv.conv2d, conv.conv3d)),
            (
                ("output_padding", "groups", "dilation"),
                (conv.conv_transpose1d, conv.conv_transpose2d, conv.conv_transpose3d),
            ),
        )
        for op in ops
        for func in (getattr(F, op.__name__),)
    },
}
RULES.update({**TABLE, **FOLDED_RULES, **RECURRENT_RULES})
ASKED.update(func for func, rule in TABLE.items() if rule in (as_it_looks, _requires_grad))
COMPUTED.update(TABLE.keys() - ASKED)
