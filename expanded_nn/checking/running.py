"""Runs of a copy of a model under the same conditions, on the whole batch or on one sample."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.batch import (
    batch_dim,
    batch_of,
    in_order,
    is_shared_by_all,
    marked_like,
    may_have_derivatives,
    tensors,
)
from expanded_nn.common.containers import is_packed, leaves_of, rebuilt
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import unseen
from expanded_nn.common.steady import OutsideBefore
from expanded_nn.recording.recorder import Settings


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    # not torch.manual_seed, which would be queued for a CUDA that is not initialized, and change its state later
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Step(nn.Module):
    """A loss of a model, as a module around it; parameters and modules keep the names that they have in the model."""

    shown_as = "the loss"

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The losses.

        Raises:
            PerSampleError: If their backward has run already.
        """
        parameters = [*self.model.parameters()]
        with meanwhile(*parameters, grad=None):
            try:
                losses = self.loss(self.model, *args, **kwargs)
            except PerSampleError:  # as of the clipping that follows a backward
                self._refuse_backward(parameters)
                raise
            self._refuse_backward(parameters)
        return losses

    def _refuse_backward(self, parameters: Iterable[Tensor]) -> None:
        if any(parameter.grad is not None for parameter in parameters):
            raise complaint(
                self.shown_as,
                "it calls backward(), which check does itself",
                "the losses (B,), or their sum or mean, with their graph",
                "Leave backward(), the clipping and the optimizer out of it, and return what backward() is of.",
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Itself, and those of the model."""
        yield "", self
        yield from self.model.named_modules(*args, **kwargs)


class Runner:
    """Runs a module, each time from the same buffers and the same random state, on copies of the arguments.

    What it keeps `outside` of modules, as in global variables, is the same each time, too.
    """

    def __init__(self, module: nn.Module, outside: OutsideBefore) -> None:
        self.module, self.outside = module, outside
        self.modules = list(module.modules())
        self.buffers = copy.deepcopy([module._buffers for module in self.modules])

    def __call__(self, call: Call, seed: int = 0) -> list[Tensor]:
        """Runs the module; the floating tensors in its output."""
        self.outside.put_back()
        for module, buffers in zip(self.modules, copy.deepcopy(self.buffers), strict=True):
            module._buffers.update(buffers)
        args, kwargs = _mapped(call.arguments, _fresh)
        _seed(seed)
        with self.outside.updates:
            return _floats(self.module(*args, **kwargs))


@dataclass(frozen=True)
class Call:
    """The arguments of a forward, by position and by keyword, for a batch of B or, with B = 1, for one sample."""

    arguments: tuple[Any, Any]
    batch: int
    batch_first: bool

    @classmethod
    def of(cls, model: nn.Module, settings: Settings, arguments: tuple[Any, Any]) -> Call:
        """The call of a plain model, with the settings of `per_sample`.

        Raises:
            PerSampleError: If there are fewer than 2 samples.
        """
        batch_first = not settings.samples_dim(2, model)
        args, kwargs = arguments
        batch = settings.batch_size or batch_of((args, in_order(model, kwargs)), batch_first=batch_first) or 0
        if batch < 2:
            found, wanted, remedy = f"the inputs hold {batch} sample(s)", "2 or more", "Give it a larger batch."
            if not list(tensors(arguments)):
                found, wanted = "no input is a tensor", "those of 2 samples or more, as in check(model, x)"
                remedy = (
                    "Give the batch to check, not to the loss: check(model, x, y, loss=...) calls loss(model, x, y)."
                )
            raise complaint("check", found, wanted, remedy)
        return cls(arguments, batch, batch_first)

    def sample(self, i: int) -> Call:
        """The call of one sample alone: of each tensor with B rows, one row."""

        def alone(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return pack_sequence([unpack_sequence(value)[i]])
            dim = self._dim(value)
            if dim is None:
                return value
            number = torch.tensor([i], device=value.device)
            own = value.detach().index_select(dim, number) if value.is_sparse else value.detach().narrow(dim, i, 1)
            return own.requires_grad_(value.requires_grad and value.is_leaf)

        return Call(_mapped(self.arguments, alone), 1, self.batch_first)

    def nudged(self, generator: torch.Generator) -> Call:
        """The call with its numbers changed in their last bits."""

        def with_other_bits(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return PackedSequence(with_other_bits(value.data), *value[1:])
            return _as_argument(value, nudged(value, generator))

        return Call(_mapped(self.arguments, with_other_bits), self.batch, self.batch_first)

    def _dim(self, tensor: Tensor) -> int | None:
        if tensor.dim() == 0 or is_shared_by_all(tensor):
            return None
        dim = batch_dim(tensor.dim(), batch_first=self.batch_first)
        if tensor.shape[dim] == self.batch:
            return dim
        return 1 if tensor.dim() == 3 and tensor.shape[1] == self.batch else None  # a state (layers, B, features)

    def is_ambiguous(self) -> bool:
        """Whether a tensor has several dimensions of size B."""
        shapes = [list(tensor.shape) for tensor in tensors(self.arguments) if isinstance(tensor, Tensor)]
        return any(shape.count(self.batch) > 1 for shape in shapes)


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each number a little larger, smaller or the same, as after rounding."""
    if not may_have_derivatives(tensor) or tensor.layout is not torch.strided:
        return tensor.detach()
    with unseen():  # the model's own numbers may be fixed in these runs
        signs = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor)
    return tensor.detach() * (1 + 2 * torch.finfo(tensor.dtype).eps * signs)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to each tensor in it, once if it is there twice; anything else is copied."""
    leaves = leaves_of(value, is_packed)
    by_id = {id(x): x for x in leaves if isinstance(x, Tensor | PackedSequence)}
    changed = {key: function(x) for key, x in by_id.items()}
    return rebuilt(value, (changed[id(x)] if id(x) in changed else copy.deepcopy(x) for x in leaves), is_packed)


def _fresh(tensor: Any) -> Any:
    if isinstance(tensor, PackedSequence):
        return PackedSequence(_fresh(tensor.data), *tensor[1:])
    return _as_argument(tensor, tensor.detach().clone())


def _as_argument(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy with the flags of a tensor that a model is called with."""
    return marked_like(tensor, copy.requires_grad_(tensor.requires_grad and tensor.is_leaf))


def _floats(output: Any) -> list[Tensor]:
    outputs = [
        pad_packed_sequence(tensor, batch_first=True)[0] if isinstance(tensor, PackedSequence) else tensor
        for tensor in tensors(output)
    ]
    outputs = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in outputs]
    return [tensor for tensor in outputs if tensor.is_floating_point()]
