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

    A layer's inputs and outputs are `(T, B, features)` where all sequences are equally long, and *flat*, `(N,
    features)`, as in a `PackedSequence` where they are not: all first steps, then all second steps, and so on, the
    longest sequence first. `samples` says whose a sequence is. The backward works on flat tensors of that order in both
    cases.
    """

    count: int  # T, the number of steps
    batch: int
    packed: Tensor | None = None  # `sizes`, as torch's kernels take it; `None` where all sequences are equally long
    samples: Tensor | None = None  # for each sequence the sample it belongs to; `None` where that is its own number
    cell: bool = False  # whether there is one step, and it is a cell's
    device: torch.device | None = None  # where the tensors are

    @classmethod
    def of(cls, input: Tensor, *, cell: bool = False) -> Steps:
        """The steps of sequences `(T, B, features)`, all equally long."""
        steps, batch, _ = input.shape
        return cls(steps, batch, cell=cell, device=input.device)

    @classmethod
    def of_packed(cls, input: PackedSequence) -> Steps:
        """The steps of a `PackedSequence`."""
        data, packed, samples, _ = input
        return cls(len(packed), int(packed[0]), packed, samples, device=data.device)

    @cached_property
    def sizes(self) -> list[int]:
        """For each step, how many sequences have it."""
        sizes: list[int] = [self.batch] * self.count if self.packed is None else self.packed.tolist()
        return sizes

    @cached_property
    def _of_steps(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each flat entry's step and sequence; each step's first entry; each sequence's length."""
        assert self.packed is not None
        numbers = torch.arange(self.count, device="cpu")
        first = self.packed.cumsum(0) - self.packed
        step = numbers.repeat_interleave(self.packed)
        sequence = torch.arange(len(step), device="cpu") - first[step]
        lengths = (self.packed[:, None] > torch.arange(self.batch, device="cpu")).sum(0)
        return step, sequence, first, lengths

    @property
    def sequences(self) -> Tensor:
        """For each entry of a flat tensor of a `PackedSequence` the number of its sequence."""
        return self._of_steps[1].to(self.device)

    @cached_property
    def _places(self) -> Tensor:
        """For each entry of a flat tensor its place in `(B * T, features)`, samples in the user's order."""
        step, sequence, _, _ = self._of_steps
        sample = sequence if self.samples is None else self.samples.cpu()[sequence]
        return (sample * self.count + step).to(self.device)

    @cached_property
    def _mirror(self) -> Tensor:
        """For each entry of a flat tensor that of the same sequence as far from its end."""
        step, sequence, first, lengths = self._of_steps
        return (first[lengths[sequence] - 1 - step] + sequence).to(self.device)

    @cached_property
    def _last(self) -> Tensor:
        """Where each sequence ends in a flat tensor."""
        _, sequence, first, lengths = self._of_steps
        return (first[lengths - 1] + sequence[: self.batch]).to(self.device)

    @cached_property
    def _ranks(self) -> Tensor:
        """For each sample its sequence."""
        assert self.samples is not None
        return torch.empty_like(self.samples).scatter_(0, self.samples, torch.arange(self.batch, device=self.device))

    @cached_property
    def running(self) -> Tensor:  # (B, T)
        """Whether a sample has a step."""
        is_running = torch.zeros(self.batch * self.count, dtype=torch.bool, device=self.device)
        return is_running.index_fill(0, self._places, True).view(self.batch, self.count)

    def flat(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # (N, features)
        """A layer's input or output, flat."""
        return steps.flatten(0, -2)

    def flat_copy(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
        dtype: torch.dtype,
    ) -> Tensor:  # (N, features)
        """A layer's input or output, flat, in memory of its own."""
        return self.flat(steps.to(dtype, copy=True, memory_format=torch.contiguous_format))

    def unflattened(
        self,
        flat: Tensor,  # (N, features)
    ) -> Tensor:  # (T, B, features), or (N, features)
        """The way back from `flat`."""
        return flat if self.packed is not None else flat.reshape(self.count, self.batch, flat.shape[-1])

    def split(
        self,
        flat: Tensor,  # (N, *)
    ) -> Sequence[Tensor]:  # each (sequences, *)
        """The parts of each step, as views."""
        views: Sequence[Tensor] = flat.split(self.sizes)
        return views

    def by_sample(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # (B, T, features)
        """The steps of each sample, in the user's order; zeros behind the end of its sequence."""
        if self.packed is None:
            return self.unflattened(steps).transpose(0, 1)
        padded = steps.new_zeros(self.batch * self.count, steps.shape[-1])
        return padded.index_copy(0, self._places, steps).view(self.batch, self.count, steps.shape[-1])

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
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # as steps
        """Each sequence from its end to its beginning."""
        return steps.flip(0) if self.packed is None else steps.index_select(0, self._mirror)

    def last(
        self,
        steps: Tensor,  # (T, B, features), or (N, features)
    ) -> Tensor:  # (B, features)
        """The last step of each sequence."""
        return steps[-1] if self.packed is None else steps.index_select(0, self._last)

    def previous(
        self,
        initial: Tensor,  # (B, features)
        flat: Tensor,  # (N, features)
    ) -> Tensor:  # (N, features)
        """For each step what there is at the step before."""
        if self.packed is None:
            return torch.cat([initial, flat[: flat.shape[0] - self.batch]])
        previous = (initial, *flat.split(self.sizes))
        return torch.cat([step[:size] for step, size in zip(previous, self.sizes, strict=False)])

    def in_samples_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sequence, as states by sample."""
        return states if self.samples is None else states.index_select(dim, self._ranks)

    def in_sequences_order(self, states: Tensor, dim: int = 0) -> Tensor:
        """States by sample, as states by sequence."""
        return states if self.samples is None else states.index_select(dim, self.samples)
