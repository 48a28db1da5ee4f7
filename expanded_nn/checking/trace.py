"""What happens inside a model while it runs: the values between its modules, the errors of its layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from expanded_nn._errors import PerSampleError, named
from expanded_nn.common.batch import tensors
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import has_no_values
from expanded_nn.modules.base import PerSampleModule


@dataclass
class Event:
    """A module begins or ends."""

    path: str  # its qualified name
    who: str  # that with its class
    side: str  # "input" or "output"
    running: str  # the module that runs from here to the next event
    values: list[Tensor]  # that go in or come out

    def __str__(self) -> str:
        return f"the {self.side} of {self.who}"


Shapes = list[tuple[str, list[torch.Size]]]  # of each event, which it is, and the shapes of its values


class Trace:
    """All that goes into and comes out of the modules of a model, in order, while the context is open."""

    def __init__(self, model: nn.Module, *, with_grads: bool = False) -> None:
        self.model, self.with_grads = model, with_grads
        self.events: list[Event] = []
        # of the last backward, by the index of the event and that of the tensor in it
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.stack = [named("", model)]  # the modules that run, the innermost last

    def __enter__(self) -> Trace:
        self.handles = []
        for path, module in self.model.named_modules():
            who = named(path, module)
            enter, leave = partial(self._enter, path, who), partial(self._leave, path, who)
            self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, path: str, who: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(who)
        self._note(path, who, "input", (args, kwargs))

    def _leave(self, path: str, who: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.stack.pop()
        self._note(path, who, "output", output)

    def _note(self, path: str, who: str, side: str, value: Any) -> None:
        values: list[Tensor] = []
        for tensor in tensors(value):
            if isinstance(tensor, PackedSequence):  # padded, as its data has no dimension of the samples to look for
                values.append(pad_packed_sequence(tensor, batch_first=True)[0].detach())
                continue
            if tensor.layout is not torch.strided or has_no_values(tensor):
                continue
            if self.with_grads and tensor.requires_grad:
                self._watch(tensor, (len(self.events), len(values)))
            values.append(tensor.detach().clone())
        self.events.append(Event(path, who, side, self.stack[-1], values))

    def _watch(self, tensor: Tensor, key: tuple[int, int]) -> None:
        """Notes the tensor's gradient of each backward."""
        node = tensor.grad_fn
        if node is None:
            tensor.register_hook(partial(self.grads.__setitem__, key))
            return
        number = tensor.output_nr

        def note(grads: tuple[Tensor | None, ...]) -> None:
            grad = grads[number]
            if grad is not None:
                self.grads[key] = grad

        node.register_prehook(note)  # torch crashes at a hook of a view that was changed in place

    def shapes(self) -> Shapes:
        return [(str(event), [value.shape for value in event.values]) for event in self.events]

    def first_difference(self, other: Trace, is_same: Callable[[Tensor, Tensor], bool]) -> int | None:
        """The index of the first event that is not the same in `other`."""
        for index, (event, other_event) in enumerate(zip(self.events, other.events, strict=False)):
            if str(event) != str(other_event) or not all(map(is_same, event.values, other_event.values)):
                return index
        return None if len(self.events) == len(other.events) else min(len(self.events), len(other.events))

    def before(self, index: int) -> tuple[str, str]:
        """The module that runs just before an event; and between what, if that is only a part of the module."""
        index = min(index, len(self.events) - 1)
        first, last = self.events[max(0, index - 1)], self.events[index]
        is_whole = (first.who, first.side, last.side) == (last.who, "input", "output")
        return first.running, "" if is_whole else f"between {first} and {last}"


class ErrorCollector:
    """Collects the errors of expanded layers while the context is open: a layer that raises one runs as a plain one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.errors: list[PerSampleError] = []
        self.failed: str | None = None  # the module that raised an exception of another kind

    def __enter__(self) -> ErrorCollector:
        self.replaced = ExitStack()
        for path, module in self.model.named_modules():
            if isinstance(module, PerSampleModule):
                forward = partial(self._forward, named(path, module), module, module.forward)
                self.replaced.enter_context(meanwhile(module, forward=forward))
        return self

    def __exit__(self, *exception: object) -> None:
        self.replaced.close()

    def _forward(self, who: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except PerSampleError as error:
            self.errors.append(error)
        except Exception:
            self.failed = self.failed or who
            raise
        members = [member for member in module.modules() if isinstance(member, PerSampleModule)]
        recorder = cast(PerSampleModule, module)._recorder
        order = None if recorder is None else recorder.order
        with meanwhile(*members, _recorder=None):
            # what was found here is not found once more by a look at the operations in it
            return forward(*args, **kwargs) if order is None else order.as_one_operation(forward, args, kwargs)
