"""Rows times the inverse of a damped second moment, which is kept for the next rows."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from expanded_nn._errors import complaint
from expanded_nn.common.modes import without_autocast
from expanded_nn.common.traced import assume, is_traced
from expanded_nn.core.kronecker import EigenFactors, KroneckerFactors, damped_inverse
from expanded_nn.factored import FactoredTensor, as_factored

# the inverses that were computed last, and what they depend on; no attribute, as they are no part of the factors
_KEPT: WeakKeyDictionary[KroneckerFactors, tuple[Any, list[Tensor]]] = WeakKeyDictionary()


def preconditioned(
    name: str, rows: FactoredTensor, factors: KroneckerFactors | EigenFactors, damping: float
) -> FactoredTensor:
    """`(G / count + damping)⁻¹ · row · (A / count + damping)⁻¹` for each row, factored where the rows are."""
    if isinstance(factors, EigenFactors):
        A, G, scale = (part.to(rows) for part in factors[:3])
        divisor = scale / factors.count + damping
        _refuse_not_definite(name, damping, divisor.gt(0).all())
        in_eigenbasis = rows.between(G.t(), A).dense().view(rows.shape[0], *divisor.shape)
        with without_autocast():
            return as_factored((G @ (in_eigenbasis / divisor) @ A.t()).view(rows.shape))
    return rows.between(*(inverse.to(rows) for inverse in _inverses(name, factors, damping)))


def _inverses(name: str, factors: KroneckerFactors, damping: float) -> list[Tensor]:
    """Those of the damped `G` and `A`, computed once: they take as long as many batches of queries."""
    count: Any = factors.count  # in a trace, or with a mask, it is a tensor
    totals = factors.G, factors.A
    if is_traced() or isinstance(count, Tensor) or totals[0].is_inference():
        return [_inverse(name, total, count, damping) for total in totals]
    # the caller may change them in place, as by a mean over processes, which no version tells
    key = float(damping), count, *(total._version for total in totals), *(total.sum().item() for total in totals)
    kept = _KEPT.get(factors)
    if kept is None or kept[0] != key:
        kept = _KEPT[factors] = key, [_inverse(name, total, count, damping) for total in totals]
    return kept[1]


def _inverse(name: str, total: Tensor, count: int, damping: float) -> Tensor:
    inverse, is_definite = damped_inverse(total, count, damping)
    _refuse_not_definite(name, damping, is_definite)
    return inverse


def _refuse_not_definite(name: str, damping: float, is_definite: Tensor) -> None:
    if is_traced():
        assume(is_definite, "call after call its Kronecker factors are not positive definite")
    elif not is_definite:
        raise complaint(
            "PerSampleGrads.precondition",
            f"the factors of {name!r} with damping {damping} are not positive definite",
            "sums of a aᵀ and g gᵀ of finite numbers",
            "Take the factors of kronecker(), without inf or NaN, and a larger damping.",
        )
