"""Sequences in a batch: where their steps lie, padded or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Steps:
    """Where the steps of B sequences lie in memory.

    A layer's inputs and outputs are `(T, B, features)` where all sequences are equally long, and rows `(N, features)`
    as in a `PackedSequence` where they are not: all first steps, then all second steps, and so on, the longest
    sequence first. `samples` says whose a sequence is. The *rows* `(N, features)` that the backward works on are in
    that order for both.

    Attributes:
        sizes: For each step, how many sequences have it.
        batch: B.
        packed: `sizes` as the tensor that torch's kernels take, `None` where all sequences are equally long.
        samples: For each sequence the sample it belongs to, `None` where that is its own number.
        cell: Whether there is one step, and it is a cell's.
        device: Where the rows are.
    """

    sizes: list[int]
    batch: int
    packed: Tensor | None = None
    samples: Tensor | None = None
    cell: bool = False
    device: torch.device | None = None

    @classmethod
    def of(cls, input: Tensor, *, cell: bool = False) -> Steps:
        """The steps of sequences `(T, B, features)`, all equally long."""
        steps, batch, _ = input.shape
        return cls([batch] * steps, batch, cell=cell, device=input.device)

    @classmethod
    def of_packed(cls, input: PackedSequence) -> Steps:
        """The steps of a `PackedSequence`."""
        data, packed, samples, _ = input
        sizes: list[int] = packed.tolist()
        return cls(sizes, sizes[0], packed, samples, device=data.device)

    @cached_property
    def _of_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each row its step and its sequence; for each step its first row; for each sequence its length."""
        assert self.packed is not None
        count = torch.arange(len(self.sizes))
        first = self.packed.cumsum(0) - self.packed
        step = count.repeat_interleave(self.packed)
        sequence = torch.arange(len(step)) - first[step]
        lengths = (self.packed[:, None] > torch.arange(self.batch)).sum(0)
        return step, sequence, first, lengths

    @cached_property
    def _places(self) -> Tensor:
        """For each row its place in `(B * T, features)`, samples in the user's order."""
        step, sequence, _, _ = self._of_rows
        sample = sequence if self.samples is None else self.samples.cpu()[sequence]
        return (sample * len(self.sizes) + step).to(self.device)

    @cached_property
    def _mirror(self) -> Tensor:
        """For each row the row of the same sequence as far from its end."""
        step, sequence, first, lengths = self._of_rows
        return (first[lengths[sequence] - 1 - step] + sequence).to(self.device)

    @cached_property
    def _last(self) -> Tensor:
        """The last row of each sequence."""
        _, sequence, first, lengths = self._of_rows
        return (first[lengths - 1] + sequence[: self.batch]).to(self.device)

    @cached_property
    def _ranks(self) -> Tensor:
        """For each sample its sequence."""
        assert self.samples is not None
        return torch.empty_like(self.samples).scatter_(0, self.samples, torch.arange(self.batch, device=self.device))

    @cached_property
    def running(self) -> Tensor:  # (B, T)
        """Whether a sample has a step."""
        done = torch.zeros(self.batch * len(self.sizes), dtype=torch.bool, device=self.device)
        return done.index_fill(0, self._places, True).view(self.batch, len(self.sizes))

    def rows(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # (N, features)
        """A layer's input or output as rows."""
        return steps.flatten(0, -2)

    def copied_rows(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
        dtype: torch.dtype,
    ) -> Tensor:  # (N, features)
        """A layer's input or output as rows in memory of their own."""
        return self.rows(steps.to(dtype, copy=True, memory_format=torch.contiguous_format))

    def from_rows(
        self,
        rows: Tensor,  # (N, features)
    ) -> Tensor:  # (T, B, features), or (N, features)
        """The way back from `rows`."""
        return rows if self.packed is not None else rows.reshape(len(self.sizes), self.batch, rows.shape[-1])

    def split(
        self,
        rows: Tensor,  # (N, *)
    ) -> Sequence[Tensor]:  # each (sequences, *)
        """The rows of each step, as views."""
        views: Sequence[Tensor] = rows.split(self.sizes)
        return views

    def by_sample(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # (B, T, features)
        """The steps of each sample, in the user's order; zeros behind the end of its sequence."""
        if self.packed is None:
            return self.from_rows(steps).transpose(0, 1)
        places = steps.new_zeros(self.batch * len(self.sizes), steps.shape[-1])
        return places.index_copy(0, self._places, steps).view(self.batch, len(self.sizes), steps.shape[-1])

    def from_samples(
        self,
        steps: Tensor,  # (B, T, features)
    ) -> Tensor:  # (T, B, features), or (N, features)
        """A layer's output from the steps of each sample."""
        if self.packed is None:
            return steps.transpose(0, 1)
        return steps.flatten(0, 1).index_select(0, self._places)

    def reversed(
        self,
        rows: Tensor,  # (N, features), or (T, B, features)
    ) -> Tensor:
        """Each sequence from its end to its beginning."""
        return rows.flip(0) if self.packed is None else rows.index_select(0, self._mirror)

    def last(
        self,
        rows: Tensor,  # (N, features), or (T, B, features)
    ) -> Tensor:  # (B, features)
        """The last step of each sequence."""
        return rows[-1] if self.packed is None else rows.index_select(0, self._last)

    def previous(
        self,
        initial: Tensor,  # (B, features)
        rows: Tensor,  # (N, features)
    ) -> Tensor:  # (N, features)
        """For each row the row of the step before."""
        if self.packed is None:
            return torch.cat([initial, rows[: rows.shape[0] - self.batch]])
        before = (initial, *rows.split(self.sizes))
        return torch.cat([step[:size] for step, size in zip(before, self.sizes, strict=False)])

    def in_samples_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sequence, as states by sample."""
        return states if self.samples is None else states.index_select(dim, self._ranks)

    def in_sequences_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sample, as states by sequence."""
        return states if self.samples is None else states.index_select(dim, self.samples)
