"""Parts of a batch, as `h[1]` and `h[:2]`: which samples are in them, and in which places they are put.

A part is followed through what is computed from it: `z[0] = h[1] + 1` and `z[0].copy_(h[1])` put sample 1 into the
place of sample 0, as `torch.stack([h[1], h[0]])` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expanded_nn.common.batch import data_in, may_have_derivatives
from expanded_nn.common.functions import functions, is_in_place
from expanded_nn.common.modes import has_no_values, pad_sequence
from expanded_nn.common.traced import is_traced
from expanded_nn.recording import callers, places
from expanded_nn.recording.settings import RecorderLike

Numbers = tuple[int, ...]  # of samples, or of places, in their order


class Part(NamedTuple):
    """A part of what has B rows.

    Attributes:
        tensor: The part.
        samples: The samples in it, in their order; several such where parts have met, and none in zeros and the like.
        whole: The tensor that it is a view of: what is written to the part is written there. `None` if it is no view.
        places: The rows of `whole` that it shows.
    """

    tensor: Tensor
    samples: frozenset[Numbers]
    whole: Tensor | None = None
    places: Numbers = ()


class BatchParts:
    """The parts in a forward.

    Attributes:
        known: The parts by their ids.
        recorder: The recorder of the model.
    """

    def __init__(self, recorder: RecorderLike) -> None:
        self.known: dict[int, Part] = {}
        self.recorder = recorder

    def samples_in(self, values: Any) -> frozenset[Numbers]:
        """The samples in some tensors; indices and masks count only where there is nothing else."""
        parts = [part for x in data_in(values) if (part := self.known.get(id(x))) is not None]
        numbers = [part for part in parts if may_have_derivatives(part.tensor)]
        return frozenset().union(*(part.samples for part in numbers or parts))

    def look_at(
        self, func: Any, args: Any, kwargs: Any, result: Any, batch: int, holds_samples: Callable[[Tensor], bool]
    ) -> Tensor | None:
        """Follows an operation; returns what it has put samples into, in other places than their own.

        `holds_samples` tells of a tensor with B rows whether these are the samples, in their order.
        """
        if func in _TAKES and self._take(func, args, kwargs, result, batch, holds_samples):
            return None
        if not self.known:
            return None
        if func in _JOINS:
            return self._join(func, args, kwargs, result, batch)
        if func is Tensor.__setitem__:
            return self._set(args[0], args[1], args[2], batch)
        written = kwargs.get("out", args[0] if args and is_in_place(func) else None)
        part = self.known.get(id(written))
        if part is not None and part.whole is not None and not part.samples:
            others = self.samples_in((args, {**kwargs, "out": None}))
            return part.whole if _differ(others, part.places) else None
        self.follow((args, kwargs), result)
        return None

    def follow(self, arguments: Any, results: Any) -> None:
        """Notes the samples that are in what was computed from parts."""
        inputs = list(data_in(arguments))
        samples = self.samples_in(inputs)
        parts = [part for x in inputs if (part := self.known.get(id(x))) is not None]
        are_indices = not any(may_have_derivatives(part.tensor) for part in parts)
        if are_indices and any(map(may_have_derivatives, inputs)):  # a mask, say, that meets what it is for
            samples = frozenset()
        views = [part for part in parts if part.whole is not None]
        for x in data_in(results):
            kept = frozenset(own for own in samples if len(own) in (1, *x.shape[:2]))
            if x._base is not None and len(views) == 1:
                self.known[id(x)] = views[0]._replace(tensor=x, samples=kept)
            elif kept:
                self.known[id(x)] = Part(x, kept)

    def _dim(self, x: Tensor, batch: int) -> int:
        """Where the samples stand in a tensor."""
        return places.dim_of_samples(x, x.shape, self.recorder.settings.samples_dim(x.dim()), batch)

    def _take(
        self, func: Any, args: Any, kwargs: Any, result: Any, batch: int, holds_samples: Callable[[Tensor], bool]
    ) -> bool:
        """Notes the parts that an operation takes along the samples; whether it does."""
        x: Any = args[0] if args else None
        part = self.known.get(id(x))
        if type(x) not in places.TENSORS or (part is not None and (part.whole is None or len(part.places) < 2)):
            return False  # of a single sample, or of several in an order that is not told
        count = len(part.places) if part else batch
        dim = self._dim(x, count)
        if x.dim() <= dim or x.shape[dim] != count:
            return False
        taken = list(_taken(func, x, args[1:], kwargs, list(data_in(result)), dim))
        taken = [(piece, numbers) for piece, numbers in taken if len(numbers) != count]
        if not taken or callers.is_called_by_libraries(func):
            return False
        whole = x if part is None else part.whole
        samples = frozenset([tuple(range(batch))] if holds_samples(x) else ()) if part is None else part.samples
        own = range(batch) if part is None else part.places
        for piece, numbers in taken:
            chosen = frozenset(tuple(of[number] for number in numbers) for of in samples)
            self.known[id(piece)] = Part(piece, chosen, whole, tuple(own[number] for number in numbers))
        return True

    def _join(self, func: Any, args: Any, kwargs: Any, result: Tensor, batch: int) -> Tensor | None:
        """The result of an operation that puts tensors beside each other, if samples are not in their places there."""
        tensors, dim = _joined(func, *args, **kwargs)
        dim %= result.dim()
        samples = self.samples_in(tensors)
        is_of_one = len(samples) == 1 and len(next(iter(samples))) == 1
        if dim != self._dim(result, batch) or not samples or is_of_one:
            self.follow(tensors, result)
            return None
        place, in_order, are_known = 0, [], True
        is_whole, is_moved = result.shape[dim] == batch, False
        for x in tensors:
            rows = x.shape[dim] if x.dim() == result.dim() else 1
            own = self.samples_in([x])
            is_moved |= _differ(own, tuple(range(place, place + rows)))
            are_known &= len(own) == 1
            in_order += [number for numbers in own for number in (numbers if len(numbers) == rows else numbers * rows)]
            place += rows
        if not is_whole and are_known:
            self.known[id(result)] = Part(result, frozenset([tuple(in_order)]))
        return result if is_whole and is_moved else None

    def _set(self, x: Tensor, key: Any, value: Any, batch: int) -> Tensor | None:
        """The tensor that rows are written into, if they are those of samples that belong elsewhere."""
        samples = self.samples_in([value])
        if not samples:
            return None
        part, dim = self.known.get(id(x)), self._dim(x, batch)
        whole, own = x, tuple(range(batch))
        if part is not None and part.whole is not None and not part.samples:
            whole, own = part.whole, part.places
        elif part is not None or x.dim() <= dim or x.shape[dim] != batch:
            self.follow((x, value), x)
            return None
        has_rows = whole.dim() == x.dim() > dim and whole.stride(dim) == x.stride(dim)  # where `whole` has them
        rows = _numbers(places.keys_by_dim(key, x.dim())[dim], len(own)) if has_rows else None
        if rows is None and whole is x:  # not along the samples
            self.follow((x, value), x)
            return None
        written = own if rows is None else tuple(own[row] for row in rows)
        return whole if _differ(samples, written) else None


def _differ(samples: frozenset[Numbers], numbers: Numbers) -> bool:
    """Whether samples are put into other places than their own; a single one may have all of them."""
    return any(own != numbers and not (len(own) == 1 and set(numbers) == set(own)) for own in samples)


def _taken(
    func: Any, x: Tensor, args: Any, kwargs: Any, results: Sequence[Tensor], dim: int
) -> Iterator[tuple[Tensor, Numbers]]:
    """What an operation takes along the dimension of the samples, each part with the rows that are in it."""
    count = x.shape[dim]
    if func is Tensor.__getitem__:
        numbers = _numbers(places.keys_by_dim(args[0], x.dim())[dim], count)
        yield from () if numbers is None or not results else [(results[0], numbers)]
        return
    told = {"dim": 0, **dict(zip(_TAKES[func], args, strict=False)), **kwargs}
    if not isinstance(told["dim"], int) or told["dim"] % x.dim() != dim:
        return
    start = told.get("start", 0)
    if "index" in told:
        numbers = _numbers(told["index"], count)
        yield from () if numbers is None else [(results[0], numbers)]
        return
    for piece in results:
        rows = piece.shape[dim] if piece.dim() == x.dim() else 1
        yield piece, tuple(range(start % count, start % count + rows))
        start += rows


def _numbers(key: Any, count: int) -> Numbers | None:
    """The rows that a key of an index takes of so many, `None` if that is not told; or all, which are no part."""
    if isinstance(key, int) and not isinstance(key, bool):
        return (key % count,)
    if isinstance(key, slice):
        numbers = tuple(range(count)[key])
        return None if len(numbers) == count else numbers
    key = places.as_torch_takes(key)
    if not isinstance(key, Tensor) or is_traced() or key.dim() > 1 or key.dtype.is_floating_point:
        return None
    if has_no_values(key):
        return None
    if key.dtype in (torch.bool, torch.uint8):
        key = key.nonzero().flatten() if key.shape == (count,) else None
    return None if key is None else tuple(number % count for number in key.flatten().tolist())


def _joined(func: Any, tensors: Any = (), *args: Any, **kwargs: Any) -> tuple[Sequence[Tensor], int]:
    """The tensors that an operation puts beside each other, and along which dimension."""
    tensors = kwargs.get("tensors", kwargs.get("sequences", tensors))
    if func is pad_sequence:
        return tensors, 0 if kwargs.get("batch_first", args[0] if args else False) else 1
    return tensors, kwargs.get("dim", kwargs.get("axis", args[0] if args else 0))


# what takes parts, with the names of its arguments after the first
_TAKES: dict[Any, Sequence[str]] = {
    Tensor.__getitem__: (),
    Tensor.__iter__: (),
    **dict.fromkeys(functions("unbind"), ("dim",)),
    **dict.fromkeys(functions("select"), ("dim", "index")),
    **dict.fromkeys(functions("index_select"), ("dim", "index")),
    **dict.fromkeys(functions("narrow", "narrow_copy"), ("dim", "start", "length")),
    **dict.fromkeys(functions("split", "split_with_sizes", "chunk", "tensor_split"), ("sizes", "dim")),
    **dict.fromkeys(functions("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), ("sizes", "dim")),
    **dict.fromkeys(functions("vsplit"), ("sizes",)),
}
_JOINS = {*functions("cat", "concat", "concatenate", "stack", "vstack", "row_stack"), pad_sequence}
LOOKED_AT = {*_TAKES, *_JOINS}
