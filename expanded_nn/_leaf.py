"""What is known of one parameter: its rows, whether they were reset, and whether something else uses it too."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from expanded_nn._errors import complaint
from expanded_nn._modes import running_backward
from expanded_nn._sharded import is_shard, is_zero
from expanded_nn._storage import Recycled


class Owner(Protocol):
    """Whose parameters they are: the recorder, as far as the watch on a parameter needs it."""

    mapping: bool

    def name_of(self, member: nn.Module | Tensor) -> str: ...

    def holder_of(self, parameter: Tensor) -> nn.Module | None: ...


class Leaf:
    """What the recorder knows of one parameter.

    Attributes:
        parameter: The parameter, which may be a guest of `functional_call` and not live long.
        task: The backward, by number, that `sent` and `expected` speak of.
        sent: The gradient that its one expansion has sent to it, and its version then.
        expected: The sum of those that several expansions have sent, of passes that end in one backward.
        mixed: Whether something else was added to what the first of them has sent.
        given: The `grad_sample` that the recorder set last.
        memory: Where dense rows are written.
        grad: `.grad` when the rows were delivered last, and its version then.
        home: The module that holds the parameter, and its name there, in a model that FSDP has sharded.
        shard: What the module shows in place of the parameter once FSDP has given back what it gathered.
        handle: The hook that finds uses outside of the module.
    """

    def __init__(self, parameter: weakref.ref[Tensor]) -> None:
        self.parameter = parameter
        self.task = -1
        self.sent: tuple[weakref.ref[Tensor], int] | None = None
        self.expected: Tensor | None = None
        self.mixed = False
        self.given: Tensor | None = None
        self.grad: tuple[weakref.ref[Tensor], int] | None = None
        self.handle: Any = None
        self.memory = Recycled()
        self.home: tuple[weakref.ref[nn.Module], str] | None = None
        self.shard: Tensor | None = None

    def give(self, rows: Tensor | None) -> None:
        """Sets `grad_sample`."""
        self.given = rows
        for shown in (self.parameter(), self.shard):
            if shown is not None:
                shown.grad_sample = rows  # type: ignore[attr-defined]

    def shown(self) -> Tensor | None:
        """The parameter as the model shows it between the passes: itself, or FSDP's shard of it."""
        return self.parameter() if self.shard is None else self.shard

    def show(self) -> None:
        """Hands the rows of a parameter that FSDP had gathered to the shard that is in its place."""
        module = self.home[0]() if self.home is not None else None
        shown = module._parameters.get(self.home[1]) if self.home is not None and module is not None else None
        if self.given is not None and shown is not None and is_shard(shown):
            self.shard = shown
            shown.grad_sample = self.given  # type: ignore[attr-defined]

    def note_grad(self) -> None:
        """Notes `.grad` as it is now, so that clearing it is seen."""
        shown = self.shown()
        grad = None if shown is None else shown.grad
        self.grad = None if grad is None else (weakref.ref(grad), grad._version)

    def was_reset(self) -> bool:
        """Whether the user has set `grad_sample`."""
        return getattr(self.shown(), "grad_sample", None) is not self.given

    def was_cleared(self) -> bool:
        """Whether `.grad` or `.grad_sample` was reset since the rows were delivered."""
        parameter = self.shown()
        if parameter is None or parameter.grad is None or self.was_reset():
            return True
        if self.grad is None:
            return False
        grad, version = self.grad
        if grad() is parameter.grad and parameter.grad._version == version:
            return False
        values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
        return is_zero(values)  # zero_grad(set_to_none=False)

    def watch(self, parameter: Tensor, owner: Owner) -> None:
        """A hook that finds uses outside of the module; before those of the user, which may change the gradient."""
        self.handle = parameter.register_hook(OutsideUse(owner, self))
        hooks = parameter._backward_hooks
        assert hooks is not None
        mine = hooks.pop(self.handle.id)
        others = list(hooks.items())
        hooks.clear()
        hooks[self.handle.id] = mine
        hooks.update(others)

    def send(self, total: Tensor) -> None:
        """Notes what the expansions of the parameter send to it in this backward."""
        if self.task != running_backward():
            self.task, self.sent, self.expected = running_backward(), (weakref.ref(total), total._version), None
            self.mixed = False
            return
        first = self.expected
        if self.sent is not None:
            first, version = self.sent[0](), self.sent[1]
            self.mixed = first is not None and first._version != version
        self.expected = total if first is None else (first + total).detach()
        self.sent = None

    def has_sent(self, grad: Tensor) -> bool:
        """Whether what arrives at the parameter is what its expansions sent, no more; asked once in a backward."""
        mine = self.task == running_backward()
        sent, expected, mixed = (self.sent, self.expected, self.mixed) if mine else (None, None, False)
        self.task, self.sent, self.expected = -1, None, None
        # autograd adds in place what comes second, so that the tensor alone does not tell
        if sent is not None and sent[0]() is grad and sent[1] == grad._version:
            return True
        return expected is not None and not mixed and _equal(expected, grad.detach())


class OutsideUse:
    """A hook on a parameter: what arrives must be what its expansions sent, or something else uses it too."""

    __torch_unserializable__ = True  # torch.multiprocessing leaves it out without a warning

    def __init__(self, owner: Owner, leaf: Leaf) -> None:
        self.recorder, self.leaf = weakref.ref(owner), leaf

    def __call__(self, grad: Tensor | None) -> None:
        recorder, parameter = self.recorder(), self.leaf.parameter()
        if grad is None or recorder is None or parameter is None or recorder.mapping or self.leaf.has_sent(grad):
            return
        name, holder = recorder.name_of(parameter), recorder.holder_of(parameter)
        if holder is not None and not hasattr(holder, "_recorder"):
            raise complaint(
                name,
                f"the parameter belongs to a plain {type(holder).__name__}, so its gradient has no rows",
                "an expanded module",
                "Convert the model again after changing its layers: convert(model, inplace=True).per_sample(True).",
            )
        raise complaint(
            name,
            "the parameter is also used outside of its module, so its gradient has a part that belongs to no row",
            "every use inside the module that holds it",
            "Use it by expanded_nn.expanded(weight), as in expanded_nn.functional.linear(x, expanded(weight)); or give "
            "the second use a layer of its own that shares the parameter (head.weight = embedding.weight). A penalty "
            "on weights that is no sample's own is the optimizer's weight_decay. If no rows are wanted of this "
            "backward, as in the outer step of meta-learning, switch per_sample(False) before it.",
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other)
