"""Matrix products without history, by the faster of two libraries.

In single precision on the CPU torch's recurrent kernels run on oneDNN and its `mm` on MKL, which on AMD processors
takes more than twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

_WORTHWHILE = 1 << 20  # multiplications below which a call of oneDNN costs more than it saves
_WORTH_A_COPY = 5 << 19  # and one with a copy of its result
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def affine(
    x: Tensor,  # (*, in)
    weight: Tensor,  # (out, in)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (*, out)
    """`F.linear`."""
    if onednn_is_faster(x, weight.shape[0]) and _fit(x, weight, bias) and not torch.is_autocast_enabled("cpu"):
        return _by_onednn(_flat(x), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias)


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these make a plain linear map; for all else torch has a rule, or an error that says what is wrong."""
    kind, width = (torch.strided, x.dtype, x.device), (weight.shape[0],)
    given = (x, weight) if bias is None else (x, weight, bias)
    return (
        all((each.layout, each.dtype, each.device) == kind for each in given)
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == width)
    )


def product(
    x: Tensor,  # (*, in)
    matrix: Tensor,  # (in, out)
) -> Tensor:  # (*, out)
    """`x @ matrix`."""
    rows, shape = _flat(x), (*x.shape[:-1], matrix.shape[1])
    if onednn_is_faster(rows, matrix.shape[1]):
        return _by_onednn(_contiguous(rows), matrix.t(), None).view(shape)
    return torch.mm(rows, matrix).view(shape)


def transposed_product(
    g: Tensor,  # (rows, out)
    a: Tensor,  # (rows, in)
) -> Tensor:  # (out, in)
    """`g.T @ a`; oneDNN gets a transposed copy of `g`, or of `a` where that and one of the result are smaller."""
    if g.numel() <= a.numel() + g.shape[1] * a.shape[1] or not onednn_is_faster(g, a.shape[1]):
        return product(g.t(), a)
    return product(a.t(), g).t().contiguous()


def batched_product(
    x: Tensor,  # (N, rows, in)
    matrix: Tensor,  # (N, in, out)
    out: Tensor | None = None,  # (N, rows, out)
) -> Tensor:  # (N, rows, out)
    """`x[n] @ matrix[n]` for each n, written to `out`; all at once, or one by one and copied."""
    if not len(x) or not onednn_is_faster(x[0], matrix.shape[2], _WORTH_A_COPY):
        return torch.bmm(x, matrix, out=out)
    out = x.new_empty(*x.shape[:2], matrix.shape[2]) if out is None else out
    for each, one, other in zip(out, x, matrix, strict=True):
        each.copy_(product(one, other))
    return out


def batched_gram(
    x: Tensor,  # (N, rows, features)
) -> Tensor:  # (N, rows, rows)
    """`x[n] @ x[n].T` for each n."""
    if not len(x) or not onednn_is_faster(x[0], x.shape[1], _WORTH_A_COPY):
        return torch.bmm(x, x.mT)
    return torch.stack([_by_onednn(one, one, None) for one in map(Tensor.contiguous, x)])


def adding_product(
    matrix: Tensor,  # (in, out)
    rows: int,
) -> Callable[[Tensor, Tensor], object]:
    """A function of `total (rows, out)` and `x (rows, in)` for `total += x @ matrix`, to be called many times."""
    if not onednn_is_faster(matrix, rows):
        return lambda total, x: total.addmm_(x, matrix)
    weight, product = _without_gaps(matrix.t()), torch.ops.mkldnn._linear_pointwise.default
    return lambda total, x: total.add_(product(x, weight, None, "none", [], ""))


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, _without_gaps(weight), bias, "none", [], "")
    return y


def _flat(
    x: Tensor,  # (*, features)
) -> Tensor:  # (rows, features)
    return x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _contiguous(
    x: Tensor,  # (rows, features)
) -> Tensor:  # (rows, features)
    """`x.contiguous()`; torch transposes fast what is in one piece of memory only."""
    return (x.t().contiguous().t() if x.stride(0) == 1 else x).contiguous()


def _without_gaps(weight: Tensor) -> Tensor:
    """The matrix in one piece of memory: between rows that lie apart oneDNN takes a thousand times as long."""
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


def onednn_is_faster(x: Tensor, out: int, worthwhile: int = _WORTHWHILE) -> bool:
    """Whether `affine` of `x`, `(*, in)`, to so many features runs on oneDNN."""
    return x.numel() * out >= worthwhile and _is_its_kind(x) and torch._C._get_mkldnn_enabled()


def may_be_faster(x: Tensor, weight: Tensor) -> bool:
    """What a compiler can know of it, whatever the number of rows."""
    return weight.numel() >= _WORTHWHILE >> 8 and _is_its_kind(x)


def _is_its_kind(x: Tensor) -> bool:
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"
