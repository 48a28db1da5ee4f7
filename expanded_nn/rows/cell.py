"""What a factored gradient holds: blocks of guarded terms, or the dense rows once these are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from expanded_nn._errors import complaint
from expanded_nn.common.modes import version_of
from expanded_nn.core import algebra
from expanded_nn.core.algebra import Kind
from expanded_nn.core.terms import Dense, Term
from expanded_nn.rows.storage import Recycled


class Guarded(NamedTuple):
    """A term, and the tensors that it was made of, each with its version then.

    A term that is derived from another one keeps its guards. Its factors may be views of the other's: below autograd a
    view does not share the version counter of its base.
    """

    term: Term
    guards: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(cls, term: Term) -> Guarded:
        """Guards a term against changes from here on."""
        return cls(term, tuple((factor, version_of(factor)) for factor in term.factors))

    def check(self) -> None:
        """Raises if a factor was changed in place since the term was made."""
        for factor, version in self.guards:
            if version_of(factor) != version:
                raise complaint(
                    "grad_sample",
                    "a tensor that a factored gradient, or a snapshot by per_sample_grads, still needs (a layer's "
                    "input, the gradient of its output, or the rows themselves) was changed in place",
                    "no change of it until the rows have been used",
                    "Change a clone of it, or switch on per_sample(materialize=True).",
                )

    def clone(self) -> Guarded:
        """The same rows, from factors in memory of their own."""
        self.check()
        return Guarded.of(self.term.map(Tensor.clone))

    def derived(self, change: Callable[[Term], Term]) -> Guarded:
        """A term whose factors may share the memory of this one's."""
        self.check()
        return Guarded(change(self.term), self.guards)


Block = tuple[int, tuple[Guarded, ...]]  # how many rows, and the terms that add up to them


class Cell:
    """The rows that a factored tensor shares with its aliases (detached, reshaped).

    Invariant: the rows are held once, in `blocks` or as `dense`; where these are set, `blocks` is empty.
    """

    def __init__(self, blocks: Sequence[Block], kind: Kind) -> None:
        self.blocks: tuple[Block, ...] = tuple(blocks)
        self.dense: Tensor | None = None  # (B, *row_shape)
        self.kind = kind

    @property
    def is_dense(self) -> bool:
        """Whether the rows have been made dense."""
        return self.dense is not None

    def merge(self) -> tuple[Block, ...]:
        """The blocks of factors, with the terms of each merged by kind."""
        for _, terms in self.blocks:
            if len(terms) > 1:
                self.blocks = tuple((size, _merged(own)) for size, own in self.blocks)
                break
        return self.blocks

    def unchanged(self) -> list[algebra.Block]:
        """The blocks for the algebra; raises if a factor was changed in place."""
        if self.is_dense:
            rows = self.densify()
            return [(rows.shape[0], (Dense.of(rows),))]
        blocks = self.merge()
        for _, terms in blocks:
            for guarded in terms:
                guarded.check()
        return [(size, tuple(guarded.term for guarded in terms)) for size, terms in blocks]

    def densify(self, memory: Recycled | None = None) -> Tensor:
        """Makes the rows `(B, *row_shape)` and holds them in place of the factors; in `memory`, if that serves."""
        if self.dense is None:
            blocks, out = self.unchanged(), None
            if memory is not None and len(blocks) == 1 and blocks[0][1] and blocks[0][1][0].fills_memory:
                out = memory.empty((blocks[0][0], *self.kind.row_shape), self.kind.dtype, self.kind.device)
            self.dense = algebra.dense(blocks, self.kind, out).contiguous()  # as the wrapper says it is
            self.blocks = ()
        return self.dense

    def to_read(self, memory: Recycled | None = None) -> Tensor:
        """The rows, to be read alone; from then on they are held, unless they are a slice of others."""
        return self.densify(memory)


class Slice(Cell):
    """Some of the rows of another cell, `whole[part]`: once that is dense, a part of its memory.

    So what is written into a slice is written into the whole, and the other way around, as with any tensor. To be read
    alone it takes no more memory than its own rows.
    """

    def __init__(self, blocks: Sequence[Block], whole: Cell, part: slice) -> None:
        super().__init__(blocks, whole.kind)
        self.whole, self.part = whole, part

    @property
    def is_dense(self) -> bool:
        return self.whole.is_dense

    def to_read(self, memory: Recycled | None = None) -> Tensor:
        return self.densify() if self.is_dense else algebra.dense(self.unchanged(), self.kind, None).contiguous()

    def densify(self, memory: Recycled | None = None) -> Tensor:
        if self.dense is None:
            self.dense, self.blocks = self.whole.densify()[self.part], ()
        return self.dense


def _merged(terms: tuple[Guarded, ...]) -> tuple[Guarded, ...]:
    """The terms with those of one kind added up, in memory of their own."""
    guarded_of = {id(guarded.term): guarded for guarded in terms}
    merged = algebra.merged([guarded.term for guarded in terms])
    kept_ids = {id(term) for term in merged}
    for guarded in terms:
        if id(guarded.term) not in kept_ids:
            guarded.check()
    return tuple(guarded_of.get(id(term)) or Guarded.of(term) for term in merged)
