"""The plain forward of a module, beside the one that counts: what it leaves behind is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from expanded_nn.common.batch import may_have_derivatives
from expanded_nn.common.containers import tensors_of
from expanded_nn.common.generators import RandomStates
from expanded_nn.common.modes import FunctionMode, uncounted
from expanded_nn.common.shared import laid_out_like
from expanded_nn.common.steady import BeforeForward, copies
from expanded_nn.layers.general.left import Before, Numbers, Place, with_left
from expanded_nn.layers.norm import with_contiguous_gradient
from expanded_nn.recording.doubt import Rounding


class Plain:
    """The plain forward on copies of some arguments, from the random states that were there at first."""

    def __init__(self, module: Any, arguments: Any) -> None:  # of the general rule
        self.module, self.arguments = module, copies(arguments)
        self.states = self.states_now()
        self.is_random: bool | None = None  # whether it draws random numbers, once it has run
        self.left: Sequence[Place] = ()  # attributes in which it leaves what counts as given
        self.places: list[Place] = []  # all in which it has left tensors, once it has run
        self.numbers: Numbers = {}  # those that it has left, once it has run

    def states_now(self) -> RandomStates:
        """The states of all generators that it may draw from."""
        return RandomStates([*self.module.modules(), self.arguments])

    def first(self) -> list[Tensor]:
        """What it gives without the hooks of modules within; with them, from now on, if it fails else.

        Some models need what their hooks collect, such as hidden states.
        """
        told = self.module._told
        try:
            return self(hooks=told.needs_hooks)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if told.needs_hooks:
                raise
            self.states.restore()
            told.needs_hooks = True
            return self(hooks=True)

    @torch.enable_grad()
    def __call__(self, *, hooks: bool, arguments: Any = None, draws: bool = False) -> list[Tensor]:
        """The tensors that it gives, from these arguments or others. It may take derivatives itself, so it has a graph.

        Random states are put back; with `draws` they are not, so that the next forward draws other numbers.
        """
        args, kwargs = copies(self.arguments if arguments is None else arguments)
        with BeforeForward(self.module).without_traces(hooks=hooks), uncounted():
            before = Before(self.module)
            tensors = self._given(args, kwargs)
            self.places, self.numbers = before.places(), before.numbers()
        drawn = not draws and self.states.restore()
        self.is_random = drawn if self.is_random is None else self.is_random
        return [tensor.detach() for tensor in tensors]

    def rounding(self, results: list[Tensor], *, hooks: bool) -> Rounding:
        """What rounding does to it, where these are its results."""
        leaves, structure = tree_flatten(self.arguments)

        def run(others: list[Any]) -> list[Tensor]:
            return self(hooks=hooks, arguments=tree_unflatten(others, structure))

        return Rounding(run, leaves, self.module, results)

    @torch.enable_grad()
    def with_graph(self, *, hooks: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The same with a graph, and the inputs by which they have derivatives."""
        inputs, (args, kwargs) = self.differentiable()
        with BeforeForward(self.module).without_traces(hooks=hooks), RightNorms():
            tensors = self._given(args, kwargs)
        self.states.restore()
        return tensors, inputs

    def _given(self, args: Any, kwargs: Any) -> list[Tensor]:
        return tensors_of(with_left(self.module, self.left, lambda: self.module._plainly(args, kwargs)))

    def differentiable(self) -> tuple[list[Tensor], Any]:
        """Copies of the floating tensors among the arguments, to take derivatives by, and arguments made of them."""
        leaves, structure = tree_flatten(copies(self.arguments))
        inputs = [leaf.requires_grad_() for leaf in leaves if is_float(leaf)]
        return inputs, tree_unflatten([leaf.clone() if is_float(leaf) else leaf for leaf in leaves], structure)


class RightNorms(FunctionMode):
    """Corrects torch's derivatives of batch norms in eval mode: of a single sample whose memory is permuted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    y = with_contiguous_gradient(F.batch_norm(input.contiguous(), *args, **kwargs))
    return laid_out_like(y, input)


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and may_have_derivatives(leaf)
