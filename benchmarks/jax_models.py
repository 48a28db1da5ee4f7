"""The workloads once more, for JAX: each network as a function of torch's weights and of one sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from torch import nn

from benchmarks.workloads import GPT, Recurrent, ResidualBlock, ResNet, Task, Text, ViT

Weights = dict[str, Array]  # by their names in torch


def step(task: Task, max_norm: float | None) -> Callable[[], list[Array]]:
    """The rows, or the sum of the rows clipped to `max_norm`, in the order of torch's parameters."""
    if task.x.device.type != "cpu":
        raise NotImplementedError("JAX is installed for the CPU alone")
    names = [name for name, _ in task.model.named_parameters()]
    weights = {name: jnp.asarray(each.detach().numpy()) for name, each in task.model.named_parameters()}
    forward = partial(FORWARDS[type(task.model)], task.model)

    def loss(weights: Weights, x: Array, y: Array) -> Array:
        scores = jax.nn.log_softmax(forward(weights, x))  # (classes,) or (T, classes)
        return -jnp.take_along_axis(scores, y[..., None], -1).mean()

    def results(weights: Weights, x: Array, y: Array) -> list[Array]:
        rows = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, x, y)
        if max_norm is not None:
            norms = jnp.sqrt(sum((each**2).reshape(len(x), -1).sum(1) for each in rows.values()))
            factors = jnp.minimum(max_norm / norms, 1)
            rows = {name: jnp.einsum("b,b...->...", factors, each) for name, each in rows.items()}
        return [rows[name] for name in names]

    compiled, x, y = jax.jit(results), jnp.asarray(task.x.numpy()), jnp.asarray(task.y.numpy())
    return lambda: jax.block_until_ready(compiled(weights, x, y))


def inside(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def convolution(layer: nn.Conv2d, weights: Weights, name: str, x: Array) -> Array:  # (C, H, W)
    padding = [(each, each) for each in layer.padding]
    out = lax.conv_general_dilated(x[None], weights[f"{name}.weight"], layer.stride, padding)[0]
    return out if layer.bias is None else out + weights[f"{name}.bias"][:, None, None]


def normalized(x: Array, axes: Any) -> Array:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def layer_norm(weights: Weights, name: str, x: Array) -> Array:
    return normalized(x, -1) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def group_norm(weights: Weights, name: str, x: Array) -> Array:
    out = normalized(x.reshape(8, -1), -1).reshape(x.shape)
    return out * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]


def sequential(model: nn.Sequential, weights: Weights, x: Array) -> Array:
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d):
            x = convolution(layer, weights, name, x)
        elif isinstance(layer, nn.Linear):
            x = linear(weights, name, x)
        elif isinstance(layer, nn.ReLU):
            x = jax.nn.relu(x)
        elif isinstance(layer, nn.MaxPool2d):
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")
        else:
            x = x.reshape(-1)
    return x


def residual_block(block: ResidualBlock, weights: Weights, x: Array) -> Array:
    h, shortcut = x, x
    for i, layer in enumerate(block.convs):
        h = convolution(layer, weights, f"convs.{i}", jax.nn.relu(h) if i else h)
        h = group_norm(weights, f"norms.{i}", h)
    if isinstance(block.shortcut, nn.Sequential):
        shortcut = convolution(block.shortcut[0], weights, "shortcut.0", x)
        shortcut = group_norm(weights, "shortcut.1", shortcut)
    return jax.nn.relu(h + shortcut)


def resnet(model: ResNet, weights: Weights, x: Array) -> Array:
    x = jax.nn.relu(group_norm(weights, "norm", convolution(model.stem, weights, "stem", x)))
    for i, block in enumerate(model.blocks):
        x = residual_block(block, inside(weights, f"blocks.{i}."), x)
    return linear(weights, "head", x.mean((1, 2)))


def blocks(model: GPT | ViT, weights: Weights, x: Array) -> Array:  # (T, width)
    for i, block in enumerate(model.blocks):
        own = inside(weights, f"blocks.{i}.")
        q, k, v = jnp.moveaxis(
            linear(own, "qkv", layer_norm(own, "norm1", x)).reshape(len(x), 3, block.heads, -1), 1, 0
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=block.causal)
        x = x + linear(own, "out", mixed.reshape(x.shape))
        x = x + linear(own, "down", jax.nn.gelu(linear(own, "up", layer_norm(own, "norm2", x)), approximate=False))
    return layer_norm(weights, "norm", x)


def gpt(model: GPT, weights: Weights, words: Array) -> Array:
    x = weights["words.weight"][words] + weights["places.weight"][: len(words)]
    return linear(weights, "head", blocks(model, weights, x))


def vit(model: ViT, weights: Weights, x: Array) -> Array:
    patches = convolution(model.patches, weights, "patches", x)
    x = patches.reshape(len(patches), -1).T + weights["places.weight"]
    return linear(weights, "head", blocks(model, weights, x)[0])


def recurrent(model: Recurrent, weights: Weights, x: Array) -> Array:  # (T, inputs)
    if model.rnn.num_layers > 1 or model.rnn.bidirectional:
        raise NotImplementedError("not written for JAX")
    own = inside(weights, "rnn.")
    inputs = x @ own["weight_ih_l0"].T + own["bias_ih_l0"]

    def recurrence(h: Array) -> Array:
        return own["weight_hh_l0"] @ h + own["bias_hh_l0"]

    def lstm(state: Any, z: Array) -> tuple[Any, None]:
        h, c = state
        i, f, g, o = jnp.split(z + recurrence(h), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    def gru(state: Any, z: Array) -> tuple[Any, None]:
        (h,) = state
        (r, u, n), (hr, hu, hn) = jnp.split(z, 3), jnp.split(recurrence(h), 3)
        u = jax.nn.sigmoid(u + hu)
        return ((1 - u) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + u * h,), None

    zero = jnp.zeros(model.rnn.hidden_size)
    cell, start = (lstm, (zero, zero)) if isinstance(model.rnn, nn.LSTM) else (gru, (zero,))
    return linear(weights, "head", lax.scan(cell, start, inputs)[0][0])


def text(_: Text, weights: Weights, words: Array) -> Array:
    return linear(weights, "head", jax.nn.relu(linear(weights, "hidden", weights["words.weight"][words].mean(0))))


FORWARDS: dict[type[nn.Module], Callable[..., Array]] = {
    nn.Sequential: sequential,
    ResNet: resnet,
    GPT: gpt,
    ViT: vit,
    Recurrent: recurrent,
    Text: text,
}
