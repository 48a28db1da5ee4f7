"""Rows under `torch.compile`: outputs and the gradients of inputs are computed in the graph, rows outside of it.

A pass begins outside of the graph, and hands each layer a `Use`. In the graph the layer sees parameters without
history, so that the compiled backward has no product for them, and its output goes by the use's `anchor`, a tensor of
one number. The anchor's gradient is not a number but the first place in the memory of the output's gradient: so that
gets out of the graph, whatever its shape, and the layer makes the rows of it and its inputs as it does without a
compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler, which takes a second

from expanded_nn._batch import tensors
from expanded_nn._errors import PerSampleError, complaint
from expanded_nn._shared import owned
from expanded_nn.recording.recorder import Recorder

_LIBRARY = torch.library.Library("expanded_nn", "DEF")
_LIBRARY.define("token(Tensor g) -> Tensor")


@torch.library.impl(_LIBRARY, "token", "CompositeExplicitAutograd")
def _token(g: Tensor) -> Tensor:
    """A number in whose memory stands a copy of `g`: the compiler may write other things where `g` itself stands."""
    return g.clone(memory_format=torch.contiguous_format).as_strided((), ()) if g.numel() else g.new_zeros(())


@torch.library.impl(_LIBRARY, "token", "Meta")
def _token_of_shape(g: Tensor) -> Tensor:
    return g.new_empty(())


class Use:
    """One call of a layer within a compiled forward.

    Attributes:
        layer: The layer; its `rows_of` makes the rows.
        names: The parameters that want rows.
        parameters: All parameters, `(B, *shape)`, without history.
        args: What the layer was called with, copied as of then; so is `kwargs`.
        shape: The shape of the layer's output.
        batch_first: Whether samples stood first in what has no layout of its own.
        anchors: What the output's gradient gets out of the graph by, for each dtype that the output may have.
    """

    def __init__(self, layer: Any, names: list[str]) -> None:
        self.layer, self.names = layer, names
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.shape: tuple[int, ...] = ()
        self.batch_first: bool = layer.model_batch_first
        expanded = [layer.expanded(name) for name in names]
        parameters = {name: layer.expanded(name) for name in layer.ranks}
        self.parameters: dict[str, Any] = {
            name: None if each is None else each.detach() for name, each in parameters.items()
        }
        device = expanded[0].device.type
        low = torch.get_autocast_dtype(device)
        self.autocast = torch.autocast(device, low, enabled=torch.is_autocast_enabled(device))
        dtypes = {expanded[0].dtype, low} if torch.is_autocast_enabled(device) else {expanded[0].dtype}
        self.anchors: dict[torch.dtype, Tensor] = {
            dtype: _Anchor.apply(self, dtype, *expanded)  # type: ignore[no-untyped-call]
            for dtype in dtypes
        }

    @property
    def batch(self) -> int:
        """B, a symbol in a graph for any B."""
        batch: int = self.parameters[self.names[0]].shape[0]
        return batch

    def tapped(self, forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What `forward` makes of the arguments by the layer's parameters, whose gradient will reach the anchor."""
        before, self.layer.current_use = self.layer.current_use, self
        try:
            output = forward(*args, **kwargs)
        finally:
            self.layer.current_use = before
        self.args = tuple(_kept(each) for each in args)
        self.kwargs = {name: _kept(each) for name, each in kwargs.items()}
        self.shape = tuple(output.shape)
        return _Tap.apply(output, self.anchors[output.dtype])  # type: ignore[no-untyped-call,no-any-return]

    def rows(self, token: Tensor) -> list[Tensor | None]:
        """The rows of each parameter, from the gradient that the token stands in."""
        strides = [prod(self.shape[place + 1 :]) for place in range(len(self.shape))]
        try:
            g = token.as_strided(self.shape, strides)
        except RuntimeError as error:
            raise complaint(
                self.layer.name,
                "the compiled backward lost the gradient of its output",
                "that gradient in memory of its own",
                'Leave this layer out of the graph, torch.compiler.disable, or compile with another backend="...".',
            ) from error
        self.layer.current_use = self
        try:
            with torch.no_grad(), self.autocast:
                rows = self.layer.rows_of(g, *self.args, **self.kwargs)
        finally:
            del self.layer.current_use
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.args, self.kwargs = (), {}
        return [rows[name] for name in self.names]


class _Anchor(torch.autograd.Function):
    """A number that depends on expanded parameters; its gradient leads to the rows."""

    @staticmethod
    def forward(ctx: Any, use: Use, dtype: torch.dtype, *expanded: Tensor) -> Tensor:
        ctx.use = use
        return expanded[0].new_zeros((), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.use.rows(token)


class _Tap(torch.autograd.Function):
    """Passes the output on, and its gradient to two places: on, and as a token to the anchor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return owned(output.view_as(output))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, torch.ops.expanded_nn.token(g)


def _kept(value: Any) -> Any:
    """A copy: a view would follow what the graph does to it in place afterwards."""
    return value.detach().clone() if isinstance(value, Tensor) else value


@_disable_dynamo(recursive=False)
def compiled_pass(module: Any, args: Any, kwargs: Any) -> Any:
    """The forward that begins a pass; what lies within it is compiled."""
    scope = _Scope(module, args, kwargs)
    with scope:
        result = module.forward(*args, **kwargs)
    if scope.has_uses:
        given = {each.grad_fn for each in tensors((args, kwargs)) if isinstance(each, Tensor)}
        for node in {each.grad_fn for each in tensors(result) if isinstance(each, Tensor)} - given:
            if node is not None:
                node.register_prehook(_refuse_second_derivatives)
    return result


def _refuse_second_derivatives(grads: Any) -> None:
    """A hook behind the outputs: parameters are constants in the graph, which its own derivative would lack."""
    if torch.is_grad_enabled():
        raise PerSampleError(
            "create_graph=True reached a compiled model in per-sample mode, whose graph has no second derivatives of "
            "parameters. Call the model itself, without torch.compile, where a loss contains derivatives."
        )


@_disable_dynamo
def outside_of_graph(layer: Any, args: Any, kwargs: Any) -> Any:
    """The forward of a layer that cannot be, or was not expected, in the graph."""
    layer.uses_missing += 1
    return layer.forward(*args, **kwargs)


class _Scope:
    """A pass, begun and ended outside of the graph, with a use at hand for each call of a layer."""

    def __init__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.has_uses = False

    @_disable_dynamo
    def __enter__(self) -> None:
        recorder: Recorder = self.module._recorder
        batch = self.module.samples_in(*self.args, **self.kwargs)
        self.scope = recorder.scope(self.module, batch, (self.args, self.kwargs))
        self.scope.__enter__()
        self.layers: list[Any] = []
        self.own_forwards: list[tuple[Any, Any]] = []
        try:
            self._prepare(recorder)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _prepare(self, recorder: Recorder) -> None:
        if recorder.current is None or recorder.current.batch == 0 or recorder.leaves.sharded:
            return
        for layer in self.module.modules():
            if not hasattr(layer, "traced_parameters"):
                continue
            self.layers.append(layer)
            names = layer.traced_parameters()
            if not layer.traceable:
                self.own_forwards.append((layer, layer.__dict__.get("forward")))
                layer.forward = torch._dynamo.disable(layer.forward)
            elif names:
                self.has_uses = True
                layer.uses = [Use(layer, names) for _ in range(1 + layer.uses_missing)]
                layer.current_use = None  # its own, as the compiler looks whether it is

    @_disable_dynamo
    def __exit__(self, *error: Any) -> None:
        for layer in self.layers:
            layer.__dict__.pop("uses", None)
            layer.__dict__.pop("current_use", None)
        for layer, forward in self.own_forwards:
            del layer.forward
            if forward is not None:  # one that somebody has put on the instance
                layer.forward = forward
        self.scope.__exit__(*error)
