"""What goes on inside a model while it runs: the values between its modules, the complaints of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from expanded_nn._batch import tensors
from expanded_nn._errors import PerSampleError
from expanded_nn._module import PerSampleModule


@dataclass
class Event:
    """A module begins or ends.

    Attributes:
        path: Its qualified name.
        who: The name with the class.
        side: `"input"` or `"output"`.
        inside: Who is running from here to the next event.
        values: The tensors that go in or come out.
    """

    path: str
    who: str
    side: str
    inside: str
    values: list[Tensor]

    def __str__(self) -> str:
        return f"the {self.side} of {self.who}"


class Trace:
    """All that goes into and comes out of the modules of a model, in order, while the context is open.

    Attributes:
        events: What happened.
        grads: Of the last backward, by the event's place and the tensor's place in it.
    """

    def __init__(self, model: nn.Module, *, with_grads: bool = False) -> None:
        self.model, self.with_grads = model, with_grads
        self.events: list[Event] = []
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.stack = [name_of("", model)]

    def __enter__(self) -> Trace:
        self.handles = []
        for path, module in self.model.named_modules():
            who = name_of(path, module)
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
        for each in tensors(value):
            tensor = each.data if isinstance(each, PackedSequence) else each
            if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
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
        place = tensor.output_nr

        def note(grads: tuple[Tensor | None, ...]) -> None:
            grad = grads[place]
            if grad is not None:
                self.grads[key] = grad

        node.register_prehook(note)  # not the tensor's: on a view that was changed in place torch crashes at it

    def first_difference(self, other: Trace, same: Callable[[Tensor, Tensor], bool]) -> int | None:
        """The place of the first event that is not the same in `other`."""
        for place, (mine, its) in enumerate(zip(self.events, other.events, strict=False)):
            if str(mine) != str(its) or not all(map(same, mine.values, its.values)):
                return place
        return None if len(self.events) == len(other.events) else min(len(self.events), len(other.events))

    def before(self, place: int) -> tuple[str, str]:
        """Who runs just before an event; and between what, if that is a part of a module only."""
        place = min(place, len(self.events) - 1)
        first, last = self.events[max(0, place - 1)], self.events[place]
        is_whole = (first.who, first.side, last.side) == (last.who, "input", "output")
        return first.inside, "" if is_whole else f"between {first} and {last} "


class Guard:
    """Takes the complaints of all expanded layers while the context is open: who complains, runs as a plain one.

    Attributes:
        complaints: In order.
        failed: Where an exception of another kind came from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.complaints: list[PerSampleError] = []
        self.failed: str | None = None

    def __enter__(self) -> Guard:
        self.guarded = [
            (path, module) for path, module in self.model.named_modules() if isinstance(module, PerSampleModule)
        ]
        self.before = [vars(module).get("forward") for _, module in self.guarded]
        for path, module in self.guarded:
            module.forward = partial(self._forward, name_of(path, module), module, module.forward)
        return self

    def __exit__(self, *exception: object) -> None:
        for (_, module), before in zip(self.guarded, self.before, strict=True):
            del module.forward
            if before is not None:
                module.forward = before

    def _forward(self, who: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except PerSampleError as error:
            self.complaints.append(error)
        except Exception:
            self.failed = self.failed or who
            raise
        inside = [each for each in module.modules() if isinstance(each, PerSampleModule)]
        recorders = [each._recorder for each in inside]
        try:
            for each in inside:
                each._recorder = None
            return forward(*args, **kwargs)
        finally:
            for each, recorder in zip(inside, recorders, strict=True):
                each._recorder = recorder


def name_of(path: str, module: nn.Module) -> str:
    """The qualified name with the class, as errors have it."""
    kind: str = getattr(module, "shown_as", type(module).__name__)
    return f"{path} ({kind})" if path else kind
