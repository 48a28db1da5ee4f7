"""Where the samples stand in a tensor, told by its shape for one sample alone; and where in a model they meet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from expanded_nn.checking.running import Call
from expanded_nn.checking.trace import Shapes, Trace
from expanded_nn.common.batch import batch_dim

# where the samples stand: in which dimension, and whether they change fastest in it, as in `(T * B, ...)`
SampleAxis = tuple[int, bool]


def candidate_splits(whole: Tensor, shape: Sequence[int], batch: int) -> dict[SampleAxis, Tensor]:  # each (B, ...)
    """All ways to split `whole` into B tensors, each of such a shape or a larger one."""
    by_axis: dict[SampleAxis, Tensor] = {}
    if whole.dim() == len(shape) + 1 and whole.numel() == batch * prod(shape):  # squeeze() took the batch of one away
        shape = next((s for s in ((1, *shape), (*shape[:1], 1, *shape[1:])) if _grown(whole, s, batch)), ())
    for dim in _grown(whole, shape, batch):
        size = shape[dim]
        by_axis[dim, False] = whole.unflatten(dim, (batch, size)).movedim(dim, 0)
        if size > 1:
            by_axis[dim, True] = whole.unflatten(dim, (size, batch)).movedim(dim + 1, 0)
    return by_axis


def of_sample(split: Tensor, i: int, shape: Sequence[int]) -> Tensor:
    """The part of sample `i` in such a split, cut to `shape`: a shorter sample was padded in the batch."""
    part = split[i]
    return part[tuple(map(slice, shape))] if part.dim() == len(shape) else part.reshape(shape)


def _grown(whole: Tensor, shape: Sequence[int], batch: int) -> list[int]:
    """The dimensions of `whole` that are B times as large."""
    if whole.dim() != len(shape) or any(size < alone for size, alone in zip(whole.shape, shape, strict=True)):
        return []
    return [dim for dim, alone in enumerate(shape) if alone and whole.shape[dim] == batch * alone]


def difference(value: Tensor, other_value: Tensor) -> float:
    """The norm of the difference, relative to the larger norm; where both are `masked` they agree."""
    part, *norms = squares(value, other_value)
    return (part / max(norms)) ** 0.5 if part else 0.0


def squares(value: Tensor, other_value: Tensor) -> tuple[float, float, float]:
    """The squared norms of the difference of two tensors, of the first and of the second, where they are not `masked`.

    Infinite where one is and the other is not.
    """
    a, b = _plain(value), _plain(other_value)
    if a.shape != b.shape or not torch.equal(left_out := masked(a), masked(b)):
        return torch.inf, 1.0, 1.0
    a, b = (x.masked_fill(left_out, 0).double() for x in (a, b))
    return float((a - b).square().sum()), float(a.square().sum()), float(b.square().sum())


def has_finite(tensor: Tensor) -> tuple[bool, bool]:
    """Whether some numbers of a tensor are finite, and whether all are; see `masked`."""
    left_out = masked(_plain(tensor))
    all_finite = not bool(left_out.any())
    return all_finite or not bool(left_out.all()), all_finite


def masked(tensor: Tensor) -> Tensor:
    """Where numbers are inf, NaN, or so large that they stand for that, as `torch.finfo(dtype).min` does in masks."""
    return ~(tensor.abs() < torch.finfo(tensor.dtype).max / 2)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.is_floating_point() else tensor.float()


class Layout:
    """Where the samples stand in each output of a model; `alone` are the outputs of each sample alone."""

    def __init__(self, outputs: list[Tensor], alone: list[list[Tensor]]) -> None:
        self.batch, self.alone = len(alone), alone
        self.shapes = [[output.shape for output in own] for own in alone]
        self.axes: list[SampleAxis | None] = []  # that of each output; `None` if there are no samples in it
        self.unclear: int | None = None  # the first output in which no one dimension is B times as large as alone
        for n, output in enumerate(outputs):
            own = [outputs_alone[n] for outputs_alone in alone if n < len(outputs_alone)]
            splits = [candidate_splits(output, x.shape, self.batch) for x in own]
            common = [axis for axis in (splits[0] if splits else {}) if all(axis in by_axis for by_axis in splits)]
            if len(own) == self.batch and all(x.shape == output.shape for x in own):
                self.axes.append(None)
            elif len(own) == self.batch and len({dim for dim, _ in common}) == 1:
                self.axes.append(min(common, key=lambda axis: _error(splits, own, axis)))
            else:
                self.unclear = n
                return

    def parts(self, outputs: list[Tensor], i: int) -> list[Tensor]:
        """What is of sample `i`."""
        return [
            of_sample(candidate_splits(output, shape, self.batch)[axis], i, shape)
            for output, shape, axis in zip(outputs, self.shapes[i], self.axes, strict=True)
            if axis is not None
        ]

    def kept(self, alone: list[Tensor]) -> list[Tensor]:
        """Of a sample's own outputs, those that have samples in the batch."""
        return [output for output, axis in zip(alone, self.axes, strict=True) if axis is not None]

    def difference(self, outputs: list[Tensor], own: list[Tensor], i: int) -> float:
        """The largest relative difference of an output for sample `i` in the batch and alone."""
        return max(map(difference, self.parts(outputs, i), self.kept(own)))

    def losses(self, outputs: list[Tensor]) -> list[Tensor]:
        """Each sample's own loss in the batch."""
        return [sample_loss(self.parts(outputs, i), i) for i in range(self.batch)]

    def own_loss(self, own: list[Tensor], i: int) -> Tensor:
        """The same from a sample's own outputs."""
        return sample_loss(self.kept(own), i)

    def total(self, outputs: list[Tensor], reduction: str) -> Tensor:
        """The sum or the mean of the losses."""
        losses = torch.stack(self.losses(outputs))
        return losses.mean() if reduction == "mean" else losses.sum()


class GivenLosses(Layout):
    """The same for what a loss function returned: the losses `(B,)`, or their sum or mean."""

    def __init__(self, outputs: list[Tensor], alone: list[list[Tensor]], tolerance: float) -> None:
        super().__init__(outputs, alone)
        self.reduced_by: list[str] = []  # which of the two a scalar is, as far as its value tells
        if outputs[0].dim() == 0:
            values = self._values()
            sums = {"mean": values.mean(), "sum": values.sum()}
            least = {"mean": values.abs().mean(), "sum": values.abs().sum()}  # they may cancel
            close = {name: (outputs[0].detach() - sums[name]).abs() <= tolerance * least[name] for name in sums}
            self.reduced_by = [name for name in sums if close[name]]

    def _values(self) -> Tensor:
        return torch.stack([own[0].detach().double().sum() for own in self.alone])

    def losses(self, outputs: list[Tensor]) -> list[Tensor]:
        """Each sample's own loss; behind a scalar those of the samples alone, which have no graph."""
        return list(outputs[0] if outputs[0].dim() else self._values())

    def own_loss(self, own: list[Tensor], i: int) -> Tensor:
        return own[0].sum()

    def total(self, outputs: list[Tensor], reduction: str) -> Tensor:
        """The sum or the mean, of which a scalar may be the other one."""
        if outputs[0].dim():
            return super().total(outputs, reduction)
        if reduction in self.reduced_by or not self.reduced_by:
            return outputs[0]
        return outputs[0] / self.batch if reduction == "mean" else outputs[0] * self.batch

    def mismatch(self, outputs: list[Tensor]) -> str:
        """In words: a scalar is neither the sum nor the mean."""
        values = self._values()
        return (
            f"the loss of the batch is {float(outputs[0].detach()):.6g}; of the samples' own losses the mean is "
            f"{float(values.mean()):.6g}, and the sum {float(values.sum()):.6g}"
        )


def _error(splits: list[dict[SampleAxis, Tensor]], own: list[Tensor], axis: SampleAxis) -> float:
    """How far the samples are from their own outputs, where they stand on this axis."""
    pairs = enumerate(zip(splits, own, strict=True))
    return sum(difference(of_sample(by_axis[axis], i, x.shape), x) for i, (by_axis, x) in pairs)


def sample_loss(parts: list[Tensor], i: int) -> Tensor:
    """A sample's own loss: a fixed nonlinear function of all its outputs, the same alone and in a batch."""
    generator = torch.Generator().manual_seed(i)
    losses = []
    for part in parts:
        coefficients = torch.randn(part.shape, generator=generator, dtype=torch.float32).to(part.device)
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        part = part.where(part.isfinite(), 0)  # masked logits
        losses.append((coefficients * (part + 0.5 * torch.hypot(part, torch.ones_like(part)))).sum())
    return torch.stack(losses).sum()


def first_mixed(whole: Trace, lone: Trace, i: int, batch: int, tolerance: float) -> int:
    """The place of the first event whose values for sample `i` are others in the batch than alone."""

    def agree(in_batch: Tensor, alone: Tensor) -> bool:
        splits = candidate_splits(in_batch, alone.shape, batch).values()
        if splits:
            return any(difference(of_sample(split, i, alone.shape), alone) <= tolerance for split in splits)
        return in_batch.shape != alone.shape or in_batch.dim() == 0 or difference(in_batch, alone) <= tolerance

    place = whole.first_difference(lone, agree)
    return len(whole.events) if place is None else place


def last_mixed(
    whole: Trace,  # with_grads
    alone: list[Shapes],  # of each sample
    losses: list[Tensor],  # each sample's own
) -> int | None:
    """The place of the first event from which on the loss of some samples reaches no others.

    Any two samples are parted in one of `2 log2(B)` backwards, by a bit of their numbers.
    """
    batch, reached = len(losses), -1

    @cache
    def shape_alone(k: int, n: int) -> torch.Size | None:
        """The shape for one sample, if each sample's shape splits the batch's value; a mask's choice may by chance."""
        value, shapes = whole.events[k].values[n], [lone_shape(whole, own, k, n) for own in alone]
        return shapes[-1] if all(shape is None or candidate_splits(value, shape, batch) for shape in shapes) else None

    for bit in range((batch - 1).bit_length()):
        for side in (0, 1):
            others = (torch.arange(batch) >> bit) % 2 == side
            own = [loss for loss, is_other in zip(losses, others, strict=True) if not is_other and loss.requires_grad]
            whole.grads.clear()
            if own:
                torch.stack(own).sum().backward(retain_graph=True)
            for (k, n), grad in whole.grads.items():
                if k > reached and _reaches(grad, shape_alone(k, n), others.to(grad.device)):
                    reached = k
    whole.grads.clear()
    return None if reached < 0 else reached + 1


def lone_shape(whole: Trace, lone: Shapes, k: int, n: int) -> torch.Size | None:
    """The shape that a value has for one sample, as far as the model goes the same way."""
    event, shapes = lone[k] if k < len(lone) else ("", [])
    return shapes[n] if event == str(whole.events[k]) and n < len(shapes) else None


def _reaches(grad: Tensor, shape: torch.Size | None, others: Tensor) -> bool:
    precision = torch.finfo(grad.dtype).eps
    grad = _plain(grad)
    splits = [] if shape is None else list(candidate_splits(grad, shape, len(others)).values())
    return bool(splits) and all(bool(split[others].norm() > precision * split.norm()) for split in splits)


def layer_without_samples(whole: Trace, lone: Shapes, parameter: str, call: Call) -> tuple[str, str, int]:
    """The layer that holds a parameter, if its input has as many rows for one sample as for the batch, 1 or B.

    Returns:
        Its name, the shape of its input, and how many rows that has; empty if there is none.
    """
    for k, event in enumerate(whole.events):
        if event.side == "output" or not event.path or not parameter.startswith(f"{event.path}."):
            continue
        for n, value in enumerate(event.values):
            alone = lone_shape(whole, lone, k, n)
            dim = batch_dim(max(1, value.dim()), batch_first=call.batch_first)
            same = alone is not None and value.dim() == len(alone) > dim and value.shape[dim] == alone[dim]
            if same and value.shape[dim] in (1, call.batch):
                return event.who, str(tuple(value.shape)), value.shape[dim]
    return "", "", 0
