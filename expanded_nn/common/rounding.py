"""Whether tensors have the same numbers, exactly or but for rounding. All bounds were chosen, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expanded_nn.common.batch import may_have_derivatives
from expanded_nn.common.modes import unseen


class Bound(NamedTuple):
    """How far apart two results may be that differ by rounding alone, in a dtype of precision `eps`."""

    roots: float  # the share of their own size is so many `sqrt(eps)`,
    most: float = inf  # and this at most
    roundings: float = 0.0  # the share of their inputs' size is so many `eps`,
    most_of_inputs: float = inf  # and this at most
    of_coarse: float = 0.0  # where `eps` is coarse the share of their own size is this at least

    def of(self, dtype: torch.dtype, own_size: float, size_of_inputs: float = 0.0) -> float:
        eps: float = torch.finfo(dtype).eps
        of_inputs: float = min(self.roundings * eps, self.most_of_inputs) * size_of_inputs
        return self.of_precision(eps) * own_size + of_inputs

    def of_precision(self, eps: float) -> float:
        """The share of their own size."""
        return max(float(min(self.roots * eps**0.5, self.most)), self.of_coarse if eps > COARSE else 0.0)


COARSE = 1e-4  # a precision `eps` that is as good as that of float16, or worse
OF_RESULTS = Bound(roots=100, most=0.1, roundings=1000, most_of_inputs=0.01)
PLAINLY_ALIKE = Bound(roots=100, most=1e-3, of_coarse=0.1)  # of results that need no second look, as of `doubt.py`
OF_ROWS = Bound(roots=100, most=0.05, roundings=30, most_of_inputs=0.01)
OF_GRADIENTS = Bound(roots=inf, most=0.03, roundings=30)  # whole ones: rounding decides a few of the forward's `x > 0`
OF_COARSE_GRADIENTS = Bound(roots=inf, most=0.2, roundings=30)  # in bfloat16
OF_MULTIPLES = Bound(roots=1)  # of a sum by one number
_LOOKED_AT = 10_000  # numbers of a tensor, to know how large most of them are


def are_equal(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and numbers; NaN equals NaN."""
    if x.shape != other.shape or x.dtype != other.dtype:
        return False
    return torch.equal(x, other) or bool(torch.allclose(x, other, rtol=0.0, atol=0.0, equal_nan=True))


def near(plain: Tensor, other: Tensor, size: float = 0.0) -> bool:
    """Whether two results differ by no more than rounding, of themselves or of inputs of such a size."""
    if not may_have_derivatives(plain) or plain.is_meta:
        return plain.shape == other.shape
    plain, other = plain.detach(), other.detach()
    finite = plain.isfinite()
    scale = float(plain.where(finite, 0).abs().max()) if plain.numel() else 1.0
    return bool(((other - plain).abs() <= OF_RESULTS.of(plain.dtype, scale, size)).logical_or(~finite).all())


def usual_sizes(x: Tensor) -> Tensor:
    """What each number is measured by: the size of the largest, but for those that stand out, as masked logits do.

    These are measured each by itself. They are larger than most by a factor of 10,000 and more.
    """
    own = x.detach().abs()
    own = own.where(own.isfinite(), 0)
    if own.numel() > _LOOKED_AT:
        with unseen():  # a check around it counts what is drawn
            places = torch.randint(own.numel(), (_LOOKED_AT,), generator=torch.Generator().manual_seed(0), device="cpu")
        some = own.flatten()[places.to(own.device)]
    else:
        some = own.flatten()
    some = some[some > 0].double()
    if not len(some):
        return own
    others = some[some != some.mode().values]  # what is masked has one number
    some = others if len(others) else some
    return own.clamp(min=own.where(own <= 1e4 * some.quantile(0.1), 0).max())


def are_near(x: Tensor, other: Tensor) -> bool:
    """Whether two results differ by no more than rounding, each number measured by its own size."""
    share = 1e-2 if min(x.dtype.itemsize, other.dtype.itemsize) < 4 else 1e-4
    dtype = torch.promote_types(x.dtype, other.dtype)  # under autocast one may be of lower precision
    return torch.allclose(x.to(dtype), other.to(dtype), rtol=share, equal_nan=True)


def is_comparable(x: Any) -> bool:
    """Whether it is a tensor whose numbers can be compared."""
    return isinstance(x, Tensor) and may_have_derivatives(x) and x.layout is torch.strided and not x.is_nested


def are_like(plain: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether results have the plain ones' numbers, as far as shapes tell: they may have a copy for each sample."""
    pairs = zip(plain, results, strict=False)
    return all(_is_like(x.detach(), y.detach()) for x, y in pairs if is_comparable(x) and is_comparable(y))


def _is_like(plain: Tensor, result: Tensor) -> bool:
    try:
        return near(plain.expand(result.shape), result, 1.0)
    except RuntimeError:
        return True
