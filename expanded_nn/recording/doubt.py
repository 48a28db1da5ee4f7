"""Whether two results differ by more than rounding, where that is not plain: then rounding is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expanded_nn.common.modes import autocast_dtype, unseen
from expanded_nn.common.rounding import COARSE, PLAINLY_ALIKE, is_comparable, usual_sizes
from expanded_nn.recording.lift import parameters_of, swapped

REPEATS = 8  # of a forward at most, each with other roundings: some results are the same after most of them
# a difference is real if it is larger by so much than what rounding does; in numbers of few digits that is much already
FACTOR, FACTOR_OF_COARSE = 30, 5
_OF_COARSE_PRODUCTS = 2.0**-10  # as on GPUs, by TF32 or by algorithms that depend on the size of the batch


class Pair(NamedTuple):
    """A part of a result, and another tensor that is to have the same numbers."""

    number: int  # of the result
    part: Tensor
    other: Tensor
    take: Callable[[Tensor], Tensor]  # takes the part out of the result


class Rounding:
    """What rounding does to the results of a forward.

    It is run again with parameters and arguments that differ in their last digits. Whole numbers stay, as masks and
    counts are made of them.

    Args:
        run: What is in the result of the forward for such arguments.
        leaves: The arguments.
        module: The module whose forward it is.
        results: What it gives without such a change.
    """

    def __init__(
        self, run: Callable[[list[Any]], list[Any]], leaves: Sequence[Any], module: nn.Module, results: list[Any]
    ) -> None:
        self.run, self.leaves, self.module, self.results = run, leaves, module, results
        self._moves: list[Any] = []  # for each result how far its numbers have moved in the repeats so far
        self._repeats = 0

    @property
    def eps(self) -> float:
        """The precision of the coarsest numbers that it computes with."""
        tensors = [x for x in (*self.module.parameters(), *self.leaves, *self.results) if is_comparable(x)]
        dtypes = {x.dtype for x in tensors} | {autocast_dtype(x.device.type) for x in tensors}
        eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype is not None), default=0.0)
        is_coarse = torch.get_float32_matmul_precision() != "highest" or any(x.device.type != "cpu" for x in tensors)
        return max(eps, _OF_COARSE_PRODUCTS) if is_coarse and torch.float32 in dtypes else eps

    def is_exceeded(self, pairs: Sequence[Pair]) -> bool:
        """Whether any pair differs by more than rounding."""
        eps = self.eps
        share, factor = PLAINLY_ALIKE.of_precision(eps), FACTOR_OF_COARSE if eps > COARSE else FACTOR
        doubtful = [pair for pair in pairs if bool(_beyond(pair, share).any())]
        while doubtful:
            if self._moves:
                doubtful = [pair for pair in doubtful if self._is_exceeded(pair, share, factor)]
            if self._repeats == REPEATS:
                break
            try:
                self._repeat()
            except Exception:  # it fails with other numbers, which tells nothing
                return False
        return bool(doubtful)

    def _is_exceeded(self, pair: Pair, share: float, factor: float) -> bool:
        rounding = usual_sizes(pair.take(self._moves[pair.number]))
        return bool((_beyond(pair, share) & ((pair.other - pair.part).abs() > factor * rounding)).any())

    def _repeat(self) -> None:
        """Runs the forward with other last digits once more."""
        results = zip(self.results, self._repeated(self._repeats), strict=True)
        moves = [(other.detach() - x.detach()).abs() if is_comparable(x) else None for x, other in results]
        if self._moves:
            pairs = zip(self._moves, moves, strict=True)
            moves = [None if move is None else torch.maximum(before, move) for before, move in pairs]
        self._moves, self._repeats = moves, self._repeats + 1

    def _repeated(self, number: int) -> list[Any]:
        """What it gives for other last digits."""
        generator, held = torch.Generator().manual_seed(number), parameters_of(self.module.modules())
        own = {id(parameter): _rounded(parameter, self.eps, generator) for parameter in held.values()}
        leaves = [_rounded(leaf, self.eps, generator) for leaf in self.leaves]
        with swapped({slot: own[id(parameter)] for slot, parameter in held.items()}):
            return self.run(leaves)


def _beyond(pair: Pair, share: float) -> Tensor:
    """Which numbers differ by more than a share of what they are measured by."""
    return ((pair.other - pair.part).abs() > share * usual_sizes(pair.part)) & pair.part.isfinite()


def _rounded(x: Any, eps: float, generator: torch.Generator) -> Any:
    """A tensor of floating-point numbers with other last digits; anything else as it is."""
    if not is_comparable(x):
        return x
    x, dtype = x.detach(), torch.float64 if x.dtype.to_real() == torch.float64 else torch.float32
    with unseen():  # a check around it counts what is drawn
        drawn = 2 * torch.rand(x.shape, generator=generator, device="cpu", dtype=dtype) - 1
    other = x * (1 + 2 * eps * drawn).to(x.device, x.dtype)
    return other if x.is_complex() else torch.where(x == x.round(), x, other)
