"""What a factored gradient holds: blocks of rows, each a sum of terms, or the dense rows once they were made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expanded_nn._storage import Recycled
from expanded_nn._terms import Dense, Term, merged

Block = tuple[int, tuple[Term, ...]]  # so many rows, and the terms that add up to them


def running_backward() -> int:
    """The number of the backward that this code runs in, -1 outside of any."""
    return torch._C._current_graph_task_id()


def cat(parts: list[Tensor]) -> Tensor:
    """The parts of all blocks, one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Cell:
    """What a factored tensor and its aliases (detached, reshaped) share: blocks of rows, or the dense rows."""

    def __init__(self, blocks: Sequence[Block], row_shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.blocks: tuple[Block, ...] = tuple(blocks)
        self.dense: Tensor | None = None
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.device = device
        self.version = 0

    def merge(self) -> tuple[Block, ...]:
        """The blocks, with the terms of each merged by kind."""
        if self.dense is not None:
            return ((self.dense.shape[0], (Dense.of(self.dense),)),)
        if any(len(terms) > 1 for _, terms in self.blocks):
            self.blocks = tuple((size, merged(terms) if len(terms) > 1 else terms) for size, terms in self.blocks)
        return self.blocks

    def densify(self, memory: Recycled | None = None) -> Tensor:
        """The rows `(B, *row_shape)`, kept in place of the factors; written to `memory`, if that serves."""
        if self.dense is None:
            blocks = self.merge()
            if len(blocks) > 1:
                memory = None
            rows = cat([self._block_rows(size, terms, memory) for size, terms in blocks])
            self.dense = rows.contiguous()  # as the wrapper says it is
            self.blocks = ()
        return self.dense

    def _block_rows(self, size: int, terms: tuple[Term, ...], memory: Recycled | None) -> Tensor:
        if not terms:
            return self.zeros(size, *self.row_shape)
        out = None
        if memory is not None and terms[0].fills_memory:
            out = memory.empty((size, *terms[0].row_shape), self.dtype, self.device)
        rows = terms[0].dense(out).reshape(size, *self.row_shape)
        for term in terms[1:]:
            rows += term.dense().reshape(size, *self.row_shape)
        return rows

    def zeros(self, *size: int) -> Tensor:
        """Zeros of the rows' dtype, on the rows' device."""
        return torch.zeros(*size, dtype=self.dtype, device=self.device)

    def replace(self, blocks: Sequence[Block]) -> None:
        """Other rows in this place: an in-place change."""
        self.blocks, self.dense, self.version = tuple(blocks), None, self.version + 1
