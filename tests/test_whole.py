"""Modules with parameters of their own whose forward runs on the whole batch; and those that must not."""

import pickle
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from expanded_nn.common.chance import WithoutChance
from expanded_nn.core import cost
from expanded_nn.factored import FactoredTensor
from expanded_nn.layers.general import gradients, whole
from expanded_nn.layers.general.batched import RULES, Rule
from expanded_nn.layers.general.rule import General
from expanded_nn.layers.general.whole_batch import WholeBatch
from expanded_nn.recording.order import Order
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    assert_derivatives_of_rows,
    gradient_penalty,
    grads_of,
    loop,
    rows_of,
    sample_losses,
    set_seed,
    total_loss,
)
from some import some_of

B, T, D = 3, 5, 4


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Own(nn.Module):
    """A module with parameters of its own, of these shapes."""

    def __init__(self, forward: Callable[..., Any], *shapes: tuple[int, ...], **layers: nn.Module) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter("wvu"[number], nn.Parameter(0.5 * values(*shape, seed=number + 5)))
        for name, layer in layers.items():
            self.add_module(name, layer.double())
        self.use = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


def of_class(base: type[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A subclass of a layer with a forward of its own."""

    def make() -> nn.Module:
        made = type(f"My{base.__name__}", (base,), {"forward": forward})(*args, **kwargs).double().eval()
        for number, parameter in enumerate(made.parameters()):
            parameter.data.copy_(values(*parameter.shape, seed=number + 3))
        return made

    return make


def own(forward: Callable[..., Any], *shapes: tuple[int, ...], **layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Own(forward, *shapes, **deepcopy(layers)).double()


def runs_whole(model: nn.Module) -> bool:
    """Whether all modules of the general rule run on the whole batch, in all kinds of calls so far."""
    ways = [list(each._told.ways.values()) for each in model.modules() if isinstance(each, General)]
    assert ways
    return all(ways) and all(each.known for own in ways for each in own)


def assert_right(module: nn.Module, call: Call, samples: int = B) -> nn.Module:
    """In the first step, which compares, and in the second."""
    model = enn.convert(module).per_sample(loss_reduction="sum")
    expected, output = loop(module, call, samples), call.on(module).detach()
    for _ in range(2):
        model.zero_grad()
        assert_close(call.on(model), output)
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), expected)
        for name, grad in grads_of(model).items():
            assert_close(grad, rows_of(model)[name].sum(0), name=name)
    return model


def layer_norm_2d(self: Any, x: Tensor) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
    return y.permute(0, 3, 1, 2)


def batch_norm_act(self: Any, x: Tensor) -> Tensor:
    statistics = (self.running_mean, self.running_var)
    return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.1, self.eps).relu()


def rms(m: Any, x: Tensor) -> Tensor:
    scaled = x.float().double() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.w * scaled.to(x.dtype)


def class_token(m: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([m.w.expand(x.shape[0], -1, -1), x], 1)
    return tokens + m.v[:, : tokens.shape[1]]


def positions(m: Any, x: Tensor) -> Tensor:
    return x + F.embedding(torch.arange(x.shape[1]), m.w)


def standardized(self: Any, x: Tensor) -> Tensor:
    weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def standardized_by_std(m: Any, x: Tensor) -> Tensor:
    weight = (m.w - m.w.mean((1, 2, 3), keepdim=True)) / (m.w.std((1, 2, 3), keepdim=True) + 1e-3) * m.v
    return F.conv2d(x, weight, None, 1, 1)


def standardized_by_var_mean(m: Any, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(m.w, dim=(1, 2, 3), keepdim=True, unbiased=False)
    scale = torch.rsqrt(torch.clamp(var * 36, min=1e-4)) * m.v
    return F.conv2d(x, m.w * scale - mean * scale)


def standardized_in_steps(m: Any, x: Tensor) -> Tensor:
    """As in the first implementations."""
    weight = m.w - m.w.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True).mean(dim=3, keepdim=True)
    std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
    return F.conv2d(x, weight / std.expand_as(weight))


def standardized_by_batch_norm(m: Any, x: Tensor) -> Tensor:
    """As in timm."""
    gain = (m.v * 0.3).view(-1)
    weight = F.batch_norm(m.w.reshape(1, 2, -1), None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
    return F.conv2d(x, weight.reshape_as(m.w), m.u)


def standardized_over_the_first(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.batch_norm(m.w, None, None, training=True))


def weight_norm(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w * (m.v.exp() / m.w.square().sum(1, keepdim=True).sqrt()))


def used_in_two_ways(m: Any, x: Tensor) -> Tensor:
    weight = (m.w @ m.v).tanh()
    first, second = weight.chunk(2)
    return F.linear(x, weight) + F.linear(F.linear(x, first), second.t() * m.w.sum()).sum(-1, keepdim=True) + m.w[0, 0]


def joined_and_resized(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, F.interpolate(torch.cat([m.w.exp(), m.v.sin()]), size=(3, 3)))


def detached_in_part(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w / m.w.detach().square().sum(1, keepdim=True)) * m.v.detach().exp() + m.v


def laid_out_anew(m: Any, x: Tensor) -> Tensor:
    weight = m.w.permute(2, 0, 1).contiguous().flatten(-2)
    return x @ weight.clone() + m.v.flatten() + m.v.flatten(1).flatten(0, 1) + m.u.repeat(2)


def layers_on_parameters(m: Any, x: Tensor) -> Tensor:
    hidden = F.layer_norm(F.dropout(F.linear(m.w, m.v), 0.5, training=False), (D,), m.v[:, 0])
    return x + F.linear(F.rms_norm(m.w, (2,), m.u).relu(), m.v) * F.linear(hidden @ m.v, m.v)


def heads(m: Any, x: Tensor, **options: Any) -> Tensor:
    """Attention of two heads, whose weights are the module's own."""
    x, settings = x.transpose(0, 1), {"need_weights": False, **options}
    others = (x, x.sin()) if m.w.shape[0] == 2 * D else (x, x)
    weight = torch.cat([m.w, m.w[:D] * 2]) if m.w.shape[0] == 2 * D else m.w
    biases = [m.v] * 2 if m.v.dim() == 3 else [None] * 2
    in_bias = None if m.v.dim() == 3 else m.v
    args = (D, 2, weight, in_bias, *biases, settings.pop("zero", False), 0.0, m.u, None, m.training)
    y, weights = F.multi_head_attention_forward(x, *others, *args, **settings)
    y = y.transpose(0, 1)
    return y if weights is None else y * weights.flatten(1).sin().sum(1)[:, None, None]


def separate_heads(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    weights = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), m.w.chunk(3), strict=True))
    fixed = (None, m.v, None, None, False, 0.0)
    y, _ = F.multi_head_attention_forward(
        x, x, x, D, 2, *fixed, m.u, None, need_weights=False, use_separate_proj_weight=True, **weights
    )
    return y.transpose(0, 1)


def parameter_list(m: Any, x: Tensor) -> Tensor:
    return sum((x * weight for weight in m.list), start=x)


def with_list() -> nn.Module:
    module = Own(parameter_list)
    module.list = nn.ParameterList([values(D, seed=k) for k in range(3)])
    return module


X, IMAGE = (values(B, T, D),), (values(B, 4, 6, 6),)
WORDS = (torch.randint(0, 7, (B, T), generator=torch.Generator().manual_seed(3)),)
CAUSAL = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
Case = tuple[Callable[[], nn.Module], tuple[Any, ...]]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).flatten(0, -2).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor) -> Any:
        return 2 * x * weight.reshape(len(weight), *[1] * (x.dim() - weight.dim()), -1), 0


WHOLE: dict[str, Case] = {
    "layer norm over channels": (of_class(nn.LayerNorm, layer_norm_2d, 4), IMAGE),
    "layer norm without bias": (of_class(nn.LayerNorm, layer_norm_2d, 4, bias=False), IMAGE),
    "layer norm, super": (of_class(nn.LayerNorm, lambda m, x: nn.LayerNorm.forward(m, x.mT).mT, T), X),
    "batch norm and activation": (of_class(nn.BatchNorm2d, batch_norm_act, 4), IMAGE),
    "group norm": (of_class(nn.GroupNorm, lambda m, x: F.group_norm(x, 2, m.weight, m.bias), 2, 4), IMAGE),
    "instance norm": (
        of_class(nn.InstanceNorm2d, lambda m, x: F.instance_norm(x, weight=m.weight, bias=m.bias), 4, affine=True),
        IMAGE,
    ),
    "rms norm": (of_class(nn.RMSNorm, lambda m, x: F.rms_norm(x, (D,), m.weight, 1e-3), D), X),
    "rms norm by hand": (own(rms, (D,)), X),
    "linear": (of_class(nn.Linear, lambda m, x: F.linear(x.tanh(), m.weight, m.bias), D, 6), X),
    "linear, weight scaled": (of_class(nn.Linear, lambda m, x: F.linear(x, m.weight * 0.5, bias=m.bias), D, 6), X),
    "linear, weight masked": (
        of_class(nn.Linear, lambda m, x: F.linear(x, m.weight * torch.ones(6, D).double().tril(), m.bias), D, 6),
        X,
    ),
    "convolution": (of_class(nn.Conv2d, lambda m, x: F.conv2d(x, m.weight, m.bias, 1, 1), 4, 2, 3), IMAGE),
    "standardized convolution": (of_class(nn.Conv2d, standardized, 4, 2, 3), IMAGE),
    "standardized by std, gain": (own(standardized_by_std, (2, 4, 3, 3), (2, 1, 1, 1)), IMAGE),
    "standardized by var_mean": (own(standardized_by_var_mean, (2, 4, 3, 3), (2, 1, 1, 1)), IMAGE),
    "standardized in steps": (own(standardized_in_steps, (2, 4, 3, 3)), IMAGE),
    "standardized by batch norm": (own(standardized_by_batch_norm, (2, 4, 3, 3), (2, 1, 1, 1), (2,)), IMAGE),
    "standardized over the first": (own(standardized_over_the_first, (6, D)), X),
    "weight norm by hand": (own(weight_norm, (6, D), (6, 1)), X),
    "a child's weight": (
        own(lambda m, x: F.linear(m.w * x, m.inner.weight, m.inner.bias), (D,), inner=nn.Linear(D, 6)),
        X,
    ),
    "a child's weight, scaled": (
        own(lambda m, x: F.linear(x, m.inner.weight * m.w), (6, 1), inner=nn.Linear(D, 6, bias=False)),
        X,
    ),
    "a child and its weight": (
        own(lambda m, x: F.linear(m.inner(x * m.w), m.inner.weight.t()), (D,), inner=nn.Linear(D, 6)),
        X,
    ),
    "a child's weight, biases in part constant": (
        own(
            lambda m, x: F.linear(x, weight=m.inner.weight, bias=torch.cat((m.w, torch.ones(2).to(x), m.v))),
            (1,),
            (3,),
            inner=nn.Linear(D, 6, bias=False),
        ),
        X,
    ),
    "a frozen child's weight": (
        own(lambda m, x: F.linear(m.w * x, m.inner.weight), (D,), inner=nn.Linear(D, 6).requires_grad_(False)),
        X,
    ),
    "low rank": (own(lambda m, x: F.linear(x, m.w + m.v @ m.u * 0.5), (6, D), (6, 2), (2, D)), X),
    "computed, normalized": (own(lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w, dim=1)), (6, D)), X),
    "computed, orthogonal, and a determinant": (
        own(lambda m, x: F.linear(x, torch.linalg.qr(m.w).Q) + torch.linalg.slogdet(m.w)[1], (D, D)),
        X,
    ),
    "as complex numbers": (
        own(lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=T, dim=1), (3, D, 2)),
        X,
    ),
    "computed, rotated and repeated": (
        own(lambda m, x: F.conv2d(x, torch.rot90(m.w, 1, (2, 3)), m.v.repeat_interleave(2, dim=0)), (2, 4, 3, 3), (1,)),
        IMAGE,
    ),
    "computed, from two by name": (own(lambda m, x: F.linear(x, torch.outer(m.w, vec2=m.v)), (6,), (D,)), X),
    "computed, used in two ways": (own(used_in_two_ways, (6, 2), (2, D)), X),
    "computed, detached in part": (own(detached_in_part, (D, D), (D,)), X),
    "laid out anew": (own(laid_out_anew, (2, 3, D), (2, 1, 3), (3,)), X),
    "computed, stacked and resized": (
        own(
            lambda m, x: F.conv2d(x, F.interpolate(torch.cat([m.w.exp(), m.v.sin()]), size=(3, 3))), *[(1, 4, 2, 2)] * 2
        ),
        IMAGE,
    ),
    "transposed convolution": (
        of_class(nn.ConvTranspose1d, lambda m, x: F.conv_transpose1d(x.mT, m.weight, m.bias, 2), D, 2, 3),
        X,
    ),
    "prelu": (of_class(nn.PReLU, lambda m, x: F.prelu(x, m.weight) + 1, T), X),
    "embedding": (of_class(nn.Embedding, lambda m, i: F.embedding(i, m.weight, m.padding_idx) * 2, 7, D, 1), WORDS),
    "layer scale": (own(lambda m, x: x * m.w, (D,)), X),
    "layer scale, in place": (own(lambda m, x: x.sin().mul_(m.w), (D,)), X),
    "layer scale of channels": (own(lambda m, x: x * m.w[:, None, None], (4,)), IMAGE),
    "a number": (own(lambda m, x: m.w * x + (1 - m.w) * x.sin(), ()), X),
    "gate": (own(lambda m, x: torch.sigmoid(m.w) * x + m.v.tanh() * x.flip(1), (D,), (1,)), X),
    "class token": (own(class_token, (1, 1, D), (1, 9, D)), X),
    "repeated token": (own(lambda m, x: torch.cat([m.w.repeat(len(x), 1, 1), x], 1), (1, 2, D)), X),
    "tokens unsqueezed": (own(lambda m, x: m.w.unsqueeze(0).expand(len(x), -1, -1) * x[:, :2], (2, D)), X),
    "positions": (own(positions, (9, D)), X),
    "positions of each sample": (own(lambda m, i: F.embedding(i, m.w).cumsum(1), (7, D)), WORDS),
    "positions indexed": (own(lambda m, x: x + m.w[torch.arange(T)], (9, D)), X),
    "squeezed": (own(lambda m, x: x * m.w.squeeze() + m.v.squeeze(0) - m.u.squeeze(), (1, D), (1, 1, D), (1, 1)), X),
    "a row of a table": (own(lambda m, x: x * m.w[torch.tensor(1)], (2, D)), X),
    "positions sliced": (own(lambda m, x: x + m.w[:T].unsqueeze(0), (9, D)), X),
    "positions resized": (own(lambda m, x: x + F.interpolate(m.w, T).transpose(1, 2), (1, D, 3)), X),
    "grid resized": (
        own(lambda m, x: x * F.interpolate(m.w, size=(6, 6), mode="bicubic", antialias=True)[0], (2, 4, 3, 3)),
        IMAGE,
    ),
    "positions alone": (own(lambda m, x: x + m.inner(x), inner=Own(lambda m, x: m.w[None, : x.shape[1]], (9, D))), X),
    "matrix product": (own(lambda m, x: (x @ m.w).relu() @ m.v.t(), (D, 2), (3, 2)), X),
    "einsum": (
        own(
            lambda m, x: torch.einsum("btd,de,ft->bfe", x, torch.einsum("dk,ek->de", m.w, m.v), m.u),
            (D, 2),
            (6, 2),
            (3, T),
        ),
        X,
    ),
    "einsum without names": (own(lambda m, x: torch.einsum("...d,de->...e", x, m.w), (D, D)), X),
    "einsum with dimensions for none": (own(lambda m, x: torch.einsum("...btd,...de->...bte", x, m.w), (D, D)), X),
    "einsum of two tensors": (own(lambda m, x: torch.einsum("btd,d,bsd->bts", x, m.w, x.sin()), (D,)), X),
    "bilinear": (own(lambda m, x: torch.einsum("btd,kde,be->btk", x, m.w, x.sum(1)), (2, D, D)), X),
    "by vmap": (own(lambda m, x: torch.tensordot(x, m.w, 1), (D, D)), X),
    "by vmap, distances": (
        own(lambda m, x: torch.cdist(x, m.w) + m.v.outer(torch.arange(9.0).to(x))[:T], (9, D), (T,)),
        X,
    ),
    "by vmap, two results": (own(lambda m, x: torch.mul(*torch.broadcast_tensors(x, m.w)), (D,)), X),
    "product and a bias": (own(lambda m, x: torch.addmm(m.v, x[:, 0], m.w), (D, 6), (6,)), X),
    "parts of a product and a bias": (
        own(
            lambda m, x: torch.addmm(m.v, x[:, 0], m.w, beta=2, alpha=0.5) + m.v.addmm(x[:, 1], m.w, beta=0),
            (D, 6),
            (6,),
        ),
        X,
    ),
    "product with a vector and a bias": (own(lambda m, x: torch.addmv(m.v, x[:, 0], m.w, alpha=3), (D,), (1,)), X),
    "scores and biases": (own(lambda m, x: torch.baddbmm(m.w, x, x.mT, beta=-1).softmax(-1) @ x, (T, T)), X),
    "product with a vector": (own(lambda m, x: (x @ m.w).softmax(1) + x[:, 0].mv(m.w)[:, None], (D,)), X),
    "matrix product from the left": (own(lambda m, x: m.w @ x, (2, T)), X),
    "learned queries": (own(lambda m, x: (m.w @ m.v).expand(len(x), -1, -1) @ x.mT, (1, 2, D), (1, D, D)), X),
    "attention bias": (
        own(lambda m, x: F.scaled_dot_product_attention(x, x + 1, x.sin(), m.w + x @ x.mT), (T, T)),
        X,
    ),
    "attention bias alone": (
        own(lambda m, x: F.scaled_dot_product_attention(x, x + 1, x.sin(), attn_mask=m.w), (T, T)),
        X,
    ),
    "heads": (own(heads, (3 * D, D), (3 * D,), (D, D)), X),
    "heads, causal": (
        own(lambda m, x: heads(m, x, attn_mask=CAUSAL, is_causal=True), (3 * D, D), (3 * D,), (D, D)),
        X,
    ),
    "heads, masks and weights": (
        own(
            lambda m, x: heads(m, x, attn_mask=CAUSAL, key_padding_mask=x[..., 0].detach(), need_weights=True),
            (3 * D, D),
            (3 * D,),
            (D, D),
        ),
        X,
    ),
    "heads, a mask for each": (
        own(
            lambda m, x: heads(m, x, attn_mask=(x @ x.mT).repeat_interleave(2, 0).detach(), zero=True),
            (3 * D, D),
            (3 * D,),
            (D, D),
        ),
        X,
    ),
    "heads, keys and values of their own": (own(lambda m, x: heads(m, x), (2 * D, D), (1, 1, D), (D, D)), X),
    "separate heads": (own(separate_heads, (3 * D, D), (3 * D,), (D, D)), X),
    "layers on parameters": (own(layers_on_parameters, (T, 2), (D, 2), (2,)), X),
    "softmax": (own(lambda m, x: (F.softmax(m.w, dim=0)[:, None] * x).sum(1), (T,)), X),
    "split": (own(lambda m, x: x * m.w.chunk(2)[0] + m.w.split(D, 0)[1], (2 * D,)), X),
    "joined": (own(lambda m, x: x + torch.cat([m.w, m.v], 1), (1, 2, D), (1, 3, D)), X),
    "used twice": (own(lambda m, x: (x * m.w + m.w).sin() * m.w, (D,)), X),
    "branch": (own(lambda m, x: x * m.w if m.training else x + m.w, (D,)), X),
    "cast, and asked": (own(lambda m, x: (m.w.requires_grad, x * m.w.to(x.dtype))[1], (D,)), X),
    "a list": (with_list, X),
    "layers inside": (
        own(lambda m, x: m.w * m.norm(m.linear(x)).relu(), (6,), linear=nn.Linear(D, 6), norm=nn.LayerNorm(6)),
        X,
    ),
    "one without numbers": (own(lambda m, x: x * torch.cat([m.w, m.v]), (D,), (0,)), X),
    "its own inside": (own(lambda m, x: m.inner(x) + m.w, (D,), inner=Own(lambda m, x: x * m.w, (D,))), X),
    "tied": (own(lambda m, x: m.inner(x) + m.w, (D,), inner=Own(lambda m, x: x * m.w, (D,))), X),
    "a function of the user's": (own(lambda m, x: Doubled.apply(x, m.w), (D,)), X),
}


@pytest.mark.parametrize(("make", "args"), WHOLE.values(), ids=WHOLE)
def test_runs_whole(make: Callable[[], nn.Module], args: Any) -> None:
    module = make()
    if isinstance(getattr(module, "inner", None), Own) and hasattr(module, "w"):
        module.inner.w = module.w
    assert runs_whole(assert_right(module, Call(args)))


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set()

    def noting(rule: Rule) -> Rule:
        def noted(func: Any, args: Any, kwargs: Any) -> Any:
            result = rule(func, args, kwargs)
            reached.add(rule)
            return result

        return noted

    for func, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, func, noting(rule))
    rules = set(whole.TABLE.values()) - {whole._write}  # `vmap` cannot follow it, so it is tested in test_folded.py
    of_layers = {rule for rule in rules if rule.__name__ == "rule"}  # those of further dimensions are alike
    for make, args in WHOLE.values():
        enn.convert(make()).per_sample()(*args)
    assert reached >= rules - of_layers
    assert len(reached & of_layers) >= 8


def test_what_the_library_asks_by_itself_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is a call of Python: a scale has one operation, and all else is ours."""
    seen, look = [], Order.__torch_function__

    def noting(self: Order, func: Any, *arguments: Any) -> Any:
        seen.append(func.__name__)
        return look(self, func, *arguments)

    module = nn.Sequential(own(lambda m, x: x * m.w, (D,))(), nn.Linear(D, D).double())
    model = enn.convert(module).per_sample(compare=False)
    for _ in range(2):  # in the second one a sample is compared alone
        model(*X)
    monkeypatch.setattr(Order, "__torch_function__", noting)
    model(*X)
    assert seen == ["mul"]


# --- what is computed from weights alone, once for all samples ------------------------------------------------------


@pytest.fixture(params=[1, 1 << 20], ids=["row by row", "all rows"])
def once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any size are computed once."""
    monkeypatch.setattr(cost, "DERIVED_NUMEL", 0)
    monkeypatch.setattr(cost, "DERIVED_AT_ONCE", request.param)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(("make", "args"), some_of(WHOLE))
def test_computed_once(make: Callable[[], nn.Module], args: Any) -> None:
    module = make()
    if isinstance(getattr(module, "inner", None), Own) and hasattr(module, "w"):
        module.inner.w = module.w
    assert runs_whole(assert_right(module, Call(args)))


def sines(module: nn.Module, call: Call, first: int = 0) -> Tensor:
    return call.on(module).sin().sum()


COMPUTED = {name: WHOLE[name] for name in WHOLE if re.search("standardized|weight norm|low rank|computed", name)}


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(("make", "args"), COMPUTED.values(), ids=COMPUTED)
class TestComputedOnce:
    def test_weights_are_shared(
        self, make: Callable[[], nn.Module], args: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No product is with a weight for each sample."""
        model = enn.convert(make()).per_sample()
        step(model, *args)
        seen: list[Tensor] = []
        for name in ("conv2d", "linear"):
            rule = RULES[getattr(F, name)]

            def noting(func: Any, args: Any, kwargs: Any, rule: Any = rule) -> Tensor:
                seen.append(args[1].value)
                return rule(func, args, kwargs)  # type: ignore[no-any-return]

            monkeypatch.setitem(RULES, getattr(F, name), noting)
        step(model, *args)
        assert seen
        assert all(weight.stride(0) == 0 for weight in seen)

    def test_second_derivatives(self, make: Callable[[], nn.Module], args: Any) -> None:
        module = make()
        model = enn.convert(module).per_sample(loss_reduction="sum")
        call = Call((args[0].clone().requires_grad_(),))
        for _ in range(2):
            model.zero_grad()
            gradient_penalty(model, call).backward()
            assert_close_rows(rows_of(model), loop(module, call, B, objective=gradient_penalty))
        assert runs_whole(model)

    @pytest.mark.filterwarnings("ignore:Using backward")
    @pytest.mark.parametrize("frozen", [False, True])
    def test_derivatives_of_the_rows(self, make: Callable[[], nn.Module], args: Any, frozen: bool) -> None:
        """Of all weights, or of the last one alone."""
        module = make()
        for parameter in list(module.parameters())[:-1]:
            parameter.requires_grad_(not frozen)
        model = enn.convert(module).per_sample(loss_reduction="sum")
        step(model, *args)
        model.zero_grad()
        assert_derivatives_of_rows(model, module, Call(args), B)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_inside_of_a_checkpoint(self, make: Callable[[], nn.Module], args: Any, reentrant: bool) -> None:
        module = make()
        model = enn.convert(nn.Sequential(module, nn.Flatten())).per_sample(loss_reduction="sum")
        x = args[0].clone().requires_grad_()
        step(model, x)
        for _ in range(2):
            model.zero_grad()
            checkpoint(model, x * 1, use_reentrant=reentrant).sin().sum().backward()
            expected = loop(nn.Sequential(module, nn.Flatten()), Call((x,)), B, objective=sines)
            assert_close_rows(rows_of(model), expected)

    def test_frozen_in_part(self, make: Callable[[], nn.Module], args: Any) -> None:
        module = make()
        for frozen in list(module.parameters())[:-1]:
            frozen.requires_grad_(False)
        model = assert_right(module, Call(args))
        for each in (module, model):
            each.requires_grad_(True)
        step(model, *args)
        assert_close_rows(rows_of(model), loop(module, Call(args), B))

    @pytest.mark.filterwarnings("ignore:Using backward")
    def test_autocast(self, make: Callable[[], nn.Module], args: Any) -> None:
        module, x = make().float(), args[0].float()
        model = enn.convert(module).per_sample(loss_reduction="sum")
        for create_graph in (False, False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                result = total_loss(model, Call((x,)))
            result.backward(create_graph=create_graph)
            for name, rows in loop(module, Call((x,)), B).items():
                assert_close(rows_of(model)[name].detach(), rows, 0.1, name)
        model.zero_grad()

    def test_compiled(self, make: Callable[[], nn.Module], args: Any) -> None:
        module = make()
        model = enn.convert(module).per_sample(loss_reduction="sum")

        @enn.compile(backend="eager")
        def training(x: Tensor) -> None:
            model.zero_grad()
            model(x).sin().sum().backward()

        expected = loop(module, Call(args), B, objective=sines)
        for _ in range(3):
            training(*args)
            assert_close_rows(rows_of(model), expected)


@pytest.mark.parametrize(("make", "args"), some_of(WHOLE))
@pytest.mark.parametrize("samples", [1, 4, *(pytest.param(samples, marks=pytest.mark.slow) for samples in (2, 5))])
def test_other_numbers_of_samples(make: Callable[[], nn.Module], args: Any, samples: int) -> None:
    """One sample; as many as there are features or positions; after another number of them."""
    module, (x,) = make(), args
    model = enn.convert(module).per_sample(loss_reduction="sum")
    x = torch.cat([x, x.flip(0) + 0 if x.dtype == torch.int64 else x.flip(0) * 0.7])[:samples]
    for many in (args[0], x, args[0], x):
        model.zero_grad()
        call = Call((many,))
        assert_close(call.on(model), call.on(module).detach())
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, len(many)))


def swallows(m: Any, x: Tensor) -> Tensor:
    try:
        return x * m.w.clone().sin_()
    except Exception:
        return x


SQUARE, TABLE = (values(B, B, D),), values(T, D)
NOT_WHOLE: dict[str, Case] = {
    "einsum of two tensors, one of positions": (
        own(lambda m, x: torch.einsum("btd,d,td->bt", x, m.w, TABLE), (D,)),
        X,
    ),
    "numbers drawn for a parameter": (own(lambda m, x: x * (m.w + 0 * torch.randn_like(m.w)), (D,)), X),
    "a parameter's copy that is changed": (own(lambda m, x: x * m.w.clone().cumsum_(0), (D,)), X),
    "an error that the forward catches": (own(swallows, (D,)), X),
    "a child's weight, of a class that is not in the table": (
        own(lambda m, x: torch.tensordot(m.w * x, m.inner.weight, ([2], [1])), (D,), inner=nn.Linear(D, 6, False)),
        X,
    ),
    "linear maps in a vmap": (
        own(
            lambda m, x: (
                F.linear(
                    torch.tensordot(x, m.w.clone().sin_(), 1), m.inner.weight, torch.cat((m.v, m.inner.bias[2:] * 0))
                )
                + F.linear(x.sum(1), m.inner.weight, m.inner.bias)[:, None]
                + F.linear(torch.ones(2, D).to(x), m.inner.weight).sum(0)
            ),
            (D, D),
            (2,),
            inner=nn.Linear(D, 6),
        ),
        X,
    ),
    "folded": (own(lambda m, x: F.linear(x.flatten(0, 1), m.w).unflatten(0, x.shape[:2]), (6, D)), X),
    "folded, elementwise": (own(lambda m, x: (x.flatten(0, 1) * m.w).unflatten(0, x.shape[:2]), (D,)), X),
    "samples moved": (own(lambda m, x: (x.transpose(0, 1) * m.w).transpose(0, 1), (D,)), X),
    "samples moved, as many as positions": (
        own(lambda m, x: (x.transpose(0, 1) * m.w).transpose(0, 1), (D,)),
        SQUARE,
    ),
    "as many positions as samples": (own(lambda m, x: x + F.embedding(torch.arange(B), m.w), (9, D)), SQUARE),
    "expanded to positions, not samples": (own(lambda m, x: x * m.w.expand(B, D), (1, D)), SQUARE),
    "a table of B rows": (own(lambda m, x: x + torch.arange(B)[:, None] * m.w, (D,)), SQUARE),
    "a checkpoint inside": (
        own(lambda m, x: checkpoint(lambda y: (y * m.w).sin(), x, use_reentrant=False), (D,)),
        X,
    ),
    "without gradient for a while": (own(lambda m, x: x * m.w / scale_of(m), (D,)), X),
}

if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # up to torch 2.10 no vmap follows a checkpoint
    del NOT_WHOLE["a checkpoint inside"]


def scale_of(m: Any) -> Tensor:
    with torch.no_grad():
        return 1 + m.w.abs().amax()


def test_a_weight_that_is_computed_in_part_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was small has a value for each sample; what is computed of it is large enough to be computed once."""
    monkeypatch.setattr(cost, "DERIVED_NUMEL", 6 * D)
    module = Own(lambda m, x: F.linear(x, (m.w * m.v).tanh()), (6, 1), (1, D))
    assert runs_whole(assert_right(module, Call(X)))


@pytest.mark.parametrize(("make", "args"), NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_goes_sample_by_sample(make: Callable[[], nn.Module], args: Any) -> None:
    assert not runs_whole(assert_right(make(), Call(args)))


def test_linear_maps_in_a_vmap_keep_their_factors() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(x * torch.atan2(x, m.w), m.inner.weight)

    model = enn.convert(own(forward, (D,), inner=nn.Linear(D, 60))()).per_sample()
    model(values(B, 1, D)).sin().mean().backward()
    rows = model.inner.weight.grad_sample
    assert isinstance(rows, FactoredTensor)
    assert not rows.is_dense


@pytest.mark.parametrize(("make", "args"), [*WHOLE.values(), *NOT_WHOLE.values()], ids=[*WHOLE, *NOT_WHOLE])
def test_large_rows_are_compared_by_products(
    make: Callable[[], nn.Module], args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all of them together would be: the comparison comes to the same."""
    monkeypatch.setattr(cost, "COMPARED_NUMEL", 0)
    assert runs_whole(assert_right(make(), Call(args))) == ((make, args) in WHOLE.values())


class NoBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("no backward of the user's")


def test_a_backward_that_raises() -> None:
    """The comparison leaves it to the backward to say so."""
    module = Own(lambda m, x: NoBackward.apply(x) * m.w, (D,))
    model = enn.convert(module).per_sample()
    (x,) = X
    loss = model(x.clone().requires_grad_()).sum()
    assert not runs_whole(model)
    with pytest.raises(RuntimeError, match="no backward of the user's"):
        loss.backward()


def test_samples_second() -> None:
    module = nn.Sequential(Own(lambda m, x: x * m.w, (D,)))
    model = enn.convert(module).per_sample(loss_reduction="sum", batch_first=False)
    x = values(T, B, D)
    model(x).sin().sum().backward()
    assert not runs_whole(model)
    for i in range(B):
        (grad,) = torch.autograd.grad(module(x[:, i : i + 1]).sin().sum(), list(module.parameters()))
        assert_close(rows_of(model)["0.w"][i], grad)


def shared_positions(m: Any, x: Tensor, index: Tensor) -> Tensor:
    return x + F.embedding(index, m.w)


@pytest.mark.parametrize("index", [torch.arange(T)[None], torch.arange(T), torch.arange(B * T).view(B, T) % 7])
def test_an_index_that_all_samples_share_or_not(index: Tensor) -> None:
    module = Own(shared_positions, (9, D))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    assert_close(model(*X, index), module(*X, index).detach())
    model(*X, index).sin().sum().backward()
    model.zero_grad()
    model(*X, index).sin().sum().backward()
    for i in range(B):
        own = index[i : i + 1] if index.shape == (B, T) else index
        (grad,) = torch.autograd.grad(module(X[0][i : i + 1], own).sin().sum(), [module.w])
        assert_close(rows_of(model)["w"][i], grad)
    assert runs_whole(model)


# --- what is compared, and when ------------------------------------------------------------------------------------


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that were compared, once for each time."""
    compared: list[Any] = []
    judged = WholeBatch.judged

    def noting(self: WholeBatch, **settings: bool) -> Any:
        compared.append(self.module)
        return judged(self, **settings)

    monkeypatch.setattr(WholeBatch, "judged", noting)
    return compared


def step(model: nn.Module, *args: Any) -> None:
    model.zero_grad()
    total_loss(model, Call(args)).backward()


def test_is_compared_once_for_each_kind_of_input(comparisons: list[Any]) -> None:
    model = enn.convert(Own(lambda m, x: x * m.w, (D,))).per_sample()
    for samples in (B, B, 2, 7, T, D):
        step(model, values(samples, T, D))
    assert len(comparisons) == 1
    for _ in range(3):
        step(model, values(1, T, D))  # a single sample tells less
    assert len(comparisons) == 2


def test_zeros_tell_nothing(comparisons: list[Any]) -> None:
    """A batch of zeros, to warm up, has no rows to compare."""
    module = Own(lambda m, x: x * m.w, (D,))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    step(model, torch.zeros_like(X[0]))
    assert not runs_whole(model)
    step(model, *X)
    assert runs_whole(model)
    assert_close_rows(rows_of(model), loop(module, Call(X), B))
    step(model, *X)
    assert len(comparisons) == 2


class Masked(nn.Module):
    """A buffer meets a parameter in a term that counts later; there may be as many samples as it has rows."""

    def __init__(self, gate: float, of_view: bool) -> None:
        super().__init__()
        self.weight, self.gate, self.of_view = nn.Parameter(values(D)), nn.Parameter(torch.tensor([gate])), of_view
        self.register_buffer("mask", torch.ones(D, D).tril())

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask.mT if self.of_view else self.mask
        return x * self.weight + self.gate * (x @ (mask * self.weight))


@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_buffer_with_as_many_rows_as_samples(gate: float, of_view: bool) -> None:
    plain = Masked(gate, of_view).double()
    model = enn.convert(plain).per_sample(loss_reduction="sum")
    for seed in range(6):
        call = Call((values(D, D, seed=seed),))
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(plain, call, D))
        with torch.no_grad():
            for module in (plain, model):
                module.gate.add_(0.5)


def changes_its_ways(m: Any, x: Tensor) -> Tensor:
    return x * m.w if m.first else (x.transpose(0, 1) + m.w).transpose(0, 1)


def test_as_many_samples_as_positions_later() -> None:
    """Numbers of positions that all samples share are no rows of these, if there are as many of both by chance."""
    module = Own(lambda m, x: x + torch.outer(torch.arange(T).to(x), m.w)[None], (D,)).double()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for samples in (B, T, B):
        call = Call((values(samples, T, D),))
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, samples))


def test_another_way_is_compared_anew() -> None:
    """In the second, samples and positions are as many by chance, so that nothing fails of itself."""
    module = Own(changes_its_ways, (D,))
    module.first = True
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call(SQUARE)
    step(model, *SQUARE)
    assert runs_whole(model)
    module.first = model.first = False
    for _ in range(2):
        step(model, *SQUARE)
        assert_close_rows(rows_of(model), loop(module, call, B))
    assert not runs_whole(model)


@pytest.mark.parametrize(
    "later",
    [
        lambda x: x - x.mean(0),
        lambda x: x - x.mean(-2),
        lambda x: x.softmax(0),
        lambda x: F.layer_norm(x, x.shape),
        lambda x: x.logcumsumexp(0),
        lambda x: x - x.quantile(0.5, 0),
        lambda x: torch.fft.fft(x, dim=0).real,
        lambda x: x / torch.linalg.vector_norm(x),
    ],
)
def test_samples_that_are_joined_later(later: Callable[[Tensor], Tensor]) -> None:
    """What is done with other tensors than parameters is a part of the way."""
    module = Own(lambda m, x: (x - x.mean(-1, keepdim=True) if m.first else later(x)) * m.w, (D,))
    module.first = True
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(2):
        step(model, torch.randn(B, D))
        assert runs_whole(model)
    model.first = False
    with pytest.raises(enn.PerSampleError, match="on the whole batch"):
        model(torch.randn(B, D))


@pytest.mark.parametrize(
    "meet",
    [
        lambda x: x / (x.norm() / 20).clamp(min=1),
        lambda x: torch.where(x.abs().max() > 20, x / x.abs().max(), x),
        lambda x: x + (x.mean(0) - 5).relu(),
        lambda x: x + ((x @ x.mT - 50).relu() @ x),
    ],
)
def test_samples_that_meet_by_their_values_later(meet: Callable[[Tensor], Tensor]) -> None:
    """One sample is compared alone now and then; after a failure every call is compared."""
    model = enn.convert(Own(lambda m, x: m.w * meet(x), (D,))).per_sample(loss_reduction="sum", compare=False)
    for _ in range(2):
        step(model, values(B, D).abs())
        assert runs_whole(model)
    large = 50 + values(B, D).abs()
    large[0] += 20  # another one is compared, which this one changes
    for _ in range(cost.TURNS_OF_A_SAMPLE - 1):
        model(large)
    for _ in range(3):
        with pytest.raises(enn.PerSampleError, match="on the whole batch"):
            model(large)
    x = values(B, D).abs()
    step(model, x)
    with pytest.raises(enn.PerSampleError, match="on the whole batch"):
        model(large)


@pytest.mark.parametrize("first", [1, B])
def test_a_mask_of_as_many_positions_as_samples(first: int) -> None:
    """It is read as one with a row per sample, which makes no difference but for a sample that is compared alone."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(D, 1, 3, dropout=0.0, batch_first=True)
            self.scale = nn.Parameter(torch.tensor(1.3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            inner: Tensor = self.inner(x, src_mask=mask)
            return inner * self.scale

    module = Masked().double()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for positions in (first, *[B] * (cost.TURNS_OF_A_SAMPLE + 2)):
        call = Call((values(B, positions, D), torch.ones(positions, positions, dtype=torch.bool).triu(1)))
        model.zero_grad()
        sample_losses(call.on(model)).sum().backward()
    mask = call.args[1]
    each = [Call((call.args[0][i : i + 1], mask)) for i in range(B)]
    losses = [sample_losses(one.on(module), i).sum() for i, one in enumerate(each)]
    rows = [torch.autograd.grad(loss, [*module.parameters()]) for loss in losses]
    names = [name for name, _ in module.named_parameters()]
    assert_close_rows(rows_of(model), dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)))
    assert runs_whole(model)


@pytest.mark.parametrize(
    "returned",
    [lambda x, y: (y, x > 0) if x.shape[1] > 3 else (y,), lambda x, y: (y,) if x.shape[1] > 3 else (y, x > 0, x < 0)],
)
def test_other_numbers_of_results(returned: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    """What is done with the parameter is the same, so that this is no other way."""
    module = Own(lambda m, x: returned(x, x * m.w), (D,)).double()
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def objective(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        return sample_losses(call.on(module)[0], first).sum()

    for positions in (3, 5, 2, 6, 3, 5):
        call = Call((values(B, positions, D),))
        model.zero_grad()
        objective(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B, objective=objective))
    assert runs_whole(model)


def test_what_is_returned_depends_on_requires_grad() -> None:
    """Comparisons take derivatives by the arguments: at first it is refused, and then nothing tells."""
    module = Own(lambda m, x: (x * m.w, x > 0) if x.requires_grad else (x * m.w,), (D,))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with pytest.raises(enn.PerSampleError, match="another result"):
        model(*X)
    model(*X)[0].square().sum().backward()
    assert_close_rows(rows_of(model), {"w": 2 * module.w.detach() * X[0].square().sum(1)})


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_sample_alone_has_another_number_of_results() -> None:
    """Where all samples are short, which it sees by their values, it returns something more."""

    def forward(m: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return (x * m.w, x > 0) if bool((lengths < T).all()) else (x * m.w,)

    model = enn.convert(Own(forward, (D,))).per_sample()

    def steps() -> None:
        for number in range(2 * B * cost.TURNS_OF_A_SAMPLE):
            lengths = torch.full((B,), T) if number < 10 else T - torch.arange(B) % 2
            model(values(B, T, D), lengths)[0].sum().backward()

    with pytest.raises(enn.PerSampleError):
        steps()


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
def test_a_sample_alone_has_a_result_of_another_shape() -> None:
    """The longest one of the batch says how much is kept: that is an error, though not at once."""

    class Trimmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return x[:, : int(lengths.max())] * self.scale

    model = enn.convert(Trimmed()).per_sample()

    def steps() -> None:
        for number in range(3 * cost.TURNS_OF_A_SAMPLE):
            lengths = torch.full((B,), T) if number < 10 else T - torch.arange(B) % 3
            model(values(B, T, D), lengths).sum().backward()

    with pytest.raises(enn.PerSampleError):
        steps()


def test_layers_dropped_by_chance_are_no_other_way(comparisons: list[Any]) -> None:
    def dropping(m: Any, x: Tensor) -> Tensor:
        for _ in range(m.count):
            x = x.transpose(1, 2).transpose(1, 2) + x.mean(-1, keepdim=True)
        return x * m.w

    model = enn.convert(Own(dropping, (D,))).per_sample(loss_reduction="sum")
    for model.count in (2, 1, 3):
        step(model, *X)
    assert len(comparisons) == 1


def test_many_ways(comparisons: list[Any]) -> None:
    """After eight comparisons there are no more: what is known goes on, until another way comes."""

    def often(m: Any, x: Tensor) -> Tensor:
        for _ in range(m.count):
            x = x * m.w
        return x

    module = Own(often, (D,))
    module.count = 0
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for count in (*range(1, 9), 3, 8, 1):
        module.count = model.count = count
        step(model, *X)
        assert_close_rows(rows_of(model), loop(module, Call(X), B))
        assert runs_whole(model)
    assert len(comparisons) == 8
    for count in (9, 1):
        module.count = model.count = count
        step(model, *X)
        assert_close_rows(rows_of(model), loop(module, Call(X), B))
        assert not runs_whole(model)
    assert len(comparisons) == 8


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_a_hook_that_adds_to_the_result(comparisons: list[Any], chance: float) -> None:
    """As those of `transformers` do once a plain forward has put them there."""
    collected: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        collected.clear()
        return (F.dropout(m.layer(x) * m.w, chance), *collected)

    module = Own(forward, (D,), layer=nn.Linear(D, D)).double()
    module.layer.register_forward_hook(lambda layer, args, output: collected.append(output))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(4):
        model.zero_grad()
        output, hidden = model(*X)
        (output + hidden).sum().backward()
        rows = rows_of(model)
        assert_close(rows["w"], output.detach().sum(1) / module.w.detach())
        if not chance:
            expected = loop(module, Call(X), B, objective=lambda m, call, i: sum(call.on(m)).sum())
            assert_close_rows(rows, expected)
    assert len(comparisons) == 2
    assert runs_whole(model)


def test_a_hook_that_changes_the_result() -> None:
    """Where the samples go one by one, as a parameter's copy is changed."""
    module = Own(lambda m, x: m.layer(x) * m.w.clone().sin_(), (D,), layer=nn.Linear(D, D)).double()
    module.layer.register_forward_hook(lambda layer, args, output: 3 * output)
    assert not runs_whole(assert_right(module, Call(X)))


def test_a_forward_that_needs_what_a_hook_collects() -> None:
    collected: list[Tensor] = []
    module = Own(lambda m, x: m.layer(x) + collected.pop() * m.w, (D,), layer=nn.Linear(D, D)).double()
    module.layer.register_forward_hook(lambda layer, args, output: collected.append(output.sin()))
    assert runs_whole(assert_right(module, Call(X)))


def slope(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True, **options)[0]


def residual(m: Any, x: Tensor) -> Tensor:
    """As of an equation, by derivatives of the first and the second order by the argument."""
    u = m.layer(x).tanh() * m.w
    first = slope(u, x)
    return u * first - m.v * sum(slope(first[:, i], x) for i in range(D))


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    energy = (m.layer(x).sin() * m.w).sum(1, keepdim=True)
    return energy * m.v, -slope(energy, x)


def forces_where_needed(m: Any, x: Tensor) -> Tensor:
    """As in evaluation, with gradients switched on; and an attribute in place of a method."""
    if not x.requires_grad:
        x.requires_grad = True
    with torch.enable_grad():
        energy = (m.layer(x).sin() * m.w) @ m.v
    return torch.autograd.grad([energy], [x], [torch.ones_like(energy)], create_graph=True, allow_unused=True)[0]


def by_what_is_computed(m: Any, x: Tensor) -> Tensor:
    hidden = m.layer(x * m.w).tanh()
    return hidden + slope((hidden * m.v).sin(), hidden)


def by_constants(m: Any, x: Tensor) -> Tensor:
    """A derivative that is not differentiated again."""
    x = x.detach().requires_grad_()
    u = m.layer(x).tanh()
    (first,) = torch.autograd.grad(u.sum(), x, retain_graph=True)
    return u * m.w + first * m.v


def hessian_at_once(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    first = slope(m.layer(x).sin() * m.w, x)
    seeds = torch.eye(D, dtype=x.dtype)[:, None].expand(D, *x.shape)
    (second,) = torch.autograd.grad(first, x, seeds, is_grads_batched=True, create_graph=True)
    return second.movedim(0, 1) * m.v


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "vmap"])
@pytest.mark.parametrize("within", [False, True], ids=["called", "within"])
@pytest.mark.parametrize(
    "forward", [residual, forces, forces_where_needed, by_what_is_computed, by_constants, hessian_at_once]
)
def test_derivatives_that_a_forward_takes(
    forward: Callable[..., Any], within: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the argument of the model, of a module behind a layer, or by what was computed; not in a loop."""
    if not is_whole:
        monkeypatch.setattr(WholeBatch, "suits", lambda self: False)
    module: nn.Module = Own(forward, (D,), (D,), layer=nn.Linear(D, D))
    detaches = forward in (forces, by_constants, hessian_at_once)
    if within:
        module = nn.Sequential(nn.Linear(D, D, dtype=torch.float64).requires_grad_(not detaches), module)

    def loss(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        results = module(*call.requires_grad().args)
        results = results if isinstance(results, tuple) else (results,)
        return sum(total_loss(lambda result: result, Call((result,)), first) for result in results)

    def penalty(module: Callable[..., Any], call: Call, first: int = 0) -> Tensor:
        call = call.requires_grad()
        value = loss(lambda _: module(*call.args), call, first)
        return value + sum(g.square().sum() for g in torch.autograd.grad(value, call.floats(), create_graph=True))

    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call((values(B, D),))
    for objective in (loss, loss) if detaches else (loss, loss, penalty):
        model.zero_grad()
        objective(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B, objective=objective))
    assert runs_whole(model) == is_whole
    assert not any(each.goes_in_a_loop() for each in model.modules() if isinstance(each, General))


@pytest.mark.parametrize("own", [False, True])
def test_a_derivative_of_a_mean_over_the_batch(own: bool) -> None:
    """It depends on how many samples there are, in a model without parameters of its own as well."""
    weights = [(D,)] if own else []
    module = Own(lambda m, x: slope(m.layer(x).sin().mean(), x) * (m.w if own else 1), *weights, layer=nn.Linear(D, D))
    with pytest.raises(enn.PerSampleError, match=r"sample by sample|some of the samples give other results"):
        enn.convert(module).per_sample()(values(B, D).requires_grad_())


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "vmap"])
def test_derivatives_that_a_forward_takes_within_a_checkpoint(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would run the forward again for them."""
    if not is_whole:
        monkeypatch.setattr(WholeBatch, "suits", lambda self: False)
    model = enn.convert(Own(forces, (D,), (D,), layer=nn.Linear(D, D))).per_sample()
    with pytest.raises(
        enn.PerSampleError, match=r"Own: .*takes derivatives.* in a checkpoint.*Leave the checkpoint out"
    ):
        checkpoint(model, values(B, D).requires_grad_(), use_reentrant=False)


def test_a_checkpoint_within_what_a_forward_derives() -> None:
    def checkpointed(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return slope(checkpoint(lambda x: m.layer(x).sin() @ m.w, x, use_reentrant=False), x)

    assert_right(Own(checkpointed, (D,), layer=nn.Linear(D, D)), Call((values(B, D),)))


def looks_at_values(m: Any, x: Tensor) -> Tensor:
    y = x * m.w
    return y if m.first or y.max() < 0.1 else y.sin()


def keeps(m: Any, x: Tensor) -> Tensor:
    if not m.first:
        m.kept.append(m.w)
    return x * m.w


@pytest.mark.parametrize(
    ("forward", "words"),
    [(looks_at_values, "vmap cannot follow"), (keeps, "keeps tensors in attribute 'kept'")],
    ids=["a_value_that_is_read", "what_is_kept"],
)
def test_what_vmap_refuses_later(forward: Callable[[Any, Tensor], Tensor], words: str) -> None:
    """One sample may go another way than the next: what `vmap` refuses is refused whenever it comes."""
    module = Own(forward, (D,))
    module.first, module.kept = True, []
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    step(model, *X)
    assert runs_whole(model)
    model.first = False
    with pytest.raises(enn.PerSampleError, match=words):
        model(*X)


def catches(m: Any, x: Tensor) -> Tensor:
    if not m.first:
        try:
            x = x * torch.logsumexp(m.w, 0)
        except Exception:
            x = x + 1
    return x * m.w


def test_an_error_that_is_caught_later() -> None:
    module = Own(catches, (D,))
    module.first = True
    model = enn.convert(module).per_sample(loss_reduction="sum")
    step(model, *X)
    assert runs_whole(model)
    module.first = model.first = False
    step(model, *X)
    assert_close_rows(rows_of(model), loop(module, Call(X), B))


# --- what composes ---------------------------------------------------------------------------------------------------


def modules() -> dict[str, nn.Module]:
    return {
        "scale": nn.Sequential(nn.Linear(D, D), Own(lambda m, x: x.sin() * m.w, (D,))).double(),
        "token": nn.Sequential(Own(class_token, (1, 1, D), (1, 9, D)), nn.Linear(D, D)).double(),
        "norm": nn.Sequential(
            nn.Linear(D, D), of_class(nn.LayerNorm, lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias), D)()
        ).double(),
    }


@pytest.fixture(params=["scale", "token", "norm"])
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    made = enn.convert(modules()[request.param]).per_sample(loss_reduction="sum")
    yield made
    assert runs_whole(made)


def test_second_derivatives(model: nn.Module) -> None:
    module = enn.revert(model)
    for _ in range(2):
        model.zero_grad()
        gradient_penalty(model, Call(X)).backward()
        assert_close_rows(rows_of(model), loop(module, Call(X), B, objective=gradient_penalty))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_derivatives_of_the_rows(model: nn.Module) -> None:
    module = enn.revert(model)
    step(model, *X)
    model.zero_grad()
    assert_derivatives_of_rows(model, module, Call(X), B)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_checkpoint(model: nn.Module, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x * 1, use_reentrant=reentrant)  # type: ignore[no-any-return]

    around = enn.convert(Checkpointed(), inplace=True).per_sample(loss_reduction="sum")
    x, module = X[0].clone().requires_grad_(), enn.revert(model)
    for _ in range(3):
        step(around, x)
        assert_close_rows(rows_of(model), loop(module, Call(X), B))
    step(model, *X)  # a reentrant one learns nothing by itself


@pytest.mark.parametrize("sizes", [(3, 1, 3), (3, 3, 1), (4, 4, 4, 4, 2, 1)], ids=str)
def test_batches_of_other_sizes_in_a_checkpoint_within(sizes: tuple[int, ...]) -> None:
    """The last batch of an epoch may have one sample; what comparisons compute is no part of the way that it goes."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(D, D), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.layer(x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Gated(), nn.Parameter(torch.rand(D))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x * self.scale, use_reentrant=False)  # type: ignore[no-any-return]

    module = Around().double()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for size in sizes:
        x = values(size, D)
        step(model, x)
        assert_close_rows(rows_of(model), loop(module, Call((x,)), size))


def test_derivatives_are_compared_of_a_random_combination() -> None:
    """Also where the numbers that a forward draws are fixed to one: of a sum, a softmax or a norm has none."""
    x = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    with WithoutChance() as chance:
        found = gradients.derivatives([x.softmax(-1)], [x])
    assert not chance.has_drawn
    assert found is not None
    assert found[0] is not None
    assert found[0].abs().max() > 1e-3


def test_dropout_draws_what_the_plain_model_draws() -> None:
    module = nn.Sequential(Own(lambda m, x: F.dropout(x, 0.5, m.training) * m.w, (D,)))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    step(model, *X)
    assert runs_whole(model)
    for _ in range(2):
        model.zero_grad()
        with torch.random.fork_rng():
            set_seed(0)
            found = model(*X)
            set_seed(0)
            expected = module(*X)
        assert_close(found, expected.detach())
        found.sin().sum().backward()
        ratio = torch.autograd.grad(expected.sin().sum(), expected)[0] * expected.detach() / module[0].w.detach()
        assert_close(rows_of(model)["0.w"], ratio.sum(1))


def test_autocast(model: nn.Module) -> None:
    module = enn.revert(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(*X).dtype == module(*X).dtype
            step(model, *X)
        for name, rows in loop(module, Call(X), B).items():
            assert rows_of(model)[name].dtype == rows.dtype
            assert_close(rows_of(model)[name], rows, 0.05, name)


def test_copies_and_files() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), MyScale())).double().per_sample()
    step(model, *X)
    assert runs_whole(model)
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(copied, *X)
        assert_close_rows(rows_of(copied), rows_of(model))
    assert "_trials" not in vars(enn.revert(model)[2])


class MyScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(values(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def test_frozen_and_thawed() -> None:
    module = Own(lambda m, x: x * m.w + m.v, (D,), (D,))
    module.v.requires_grad_(False)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(2):
        step(model, *X)
        assert_close_rows(rows_of(model), loop(module, Call(X), B))
    module.v.requires_grad_(True)
    model.v.requires_grad_(True)
    step(model, *X)
    assert_close_rows(rows_of(model), loop(module, Call(X), B))
    assert runs_whole(model)


def test_gives_up_where_nothing_is_to_be_seen(comparisons: list[Any]) -> None:
    """A parameter that never has a gradient is not compared in every step."""
    model = enn.convert(Own(lambda m, x: x.sin() + 0 * m.w, (D,))).per_sample()
    for _ in range(6):
        step(model, *X)
    assert len(comparisons) == 3
    assert not runs_whole(model)


def test_two_threads() -> None:
    """Each has forwards of its own."""
    models = [enn.convert(Own(rms, (D,))).per_sample(loss_reduction="sum") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda model: [step(model, *X) for _ in range(20)], models))
    for model in models:
        assert runs_whole(model)
        assert_close_rows(rows_of(model), loop(Own(rms, (D,)), Call(X), B))


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 1),
    "norm first": lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.3, batch_first=True, norm_first=True),
    "of the attention alone": lambda: AttentionAlone(need_weights=False),
    "with weights": lambda: AttentionAlone(need_weights=True),
}


class AttentionAlone(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(D, 2, 0.4, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return result


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_dropout_of_attention_beside_own_parameters(kind: str) -> None:
    """It is left out where samples are compared."""
    plain = Own(lambda m, x: m.inner(x + m.w), (5, D))
    plain.inner = ATTENTIONS[kind]()
    model, x = enn.convert(plain).per_sample(loss_reduction="sum"), torch.randn(B, 5, D)
    for _ in range(4):
        step(model, x)
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.grad_sample.sum(0), parameter.grad)
    assert runs_whole(model)
    for module in (plain, model):
        module.eval()
    step(model, x)
    assert_close_rows(rows_of(model), loop(plain, Call((x,)), B))


class OtherPath(nn.Module):
    """Takes another path from its third call on, or by chance; it has a parameter of its own."""

    def __init__(self, count: Callable[[Any], int]) -> None:
        super().__init__()
        self.gate, self.branch, self.count = nn.Parameter(torch.ones(D)), nn.Linear(D, D), count
        self.calls, self.seen, self.numbers = 0, list[int](), dict[str, int]()
        self.inner = nn.Module()
        self.register_buffer("counted", torch.zeros(()))
        self.inner.register_buffer("counted", torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        calls = self.count(self)
        if calls >= 3:
            x = x + self.branch(x)
        return x * self.gate * (calls / 10)


def counted(module: Any) -> int:
    module.calls += 1
    return module.calls  # type: ignore[no-any-return]


def counted_in_a_buffer(module: Any) -> int:
    module.counted += 1
    return int(module.counted)


def counted_within(module: Any) -> int:
    module.inner.counted[2:5].add_(1)
    return int(module.inner.counted[3])


def counted_anew(module: Any) -> int:
    module.counted = module.counted + 1
    return int(module.counted)


def counted_in_a_list(module: Any) -> int:
    module.seen.append(len(module.seen))
    return len(module.seen)


def counted_in_a_dict(module: Any) -> int:
    module.numbers["calls"] = module.numbers.get("calls", 0) + 1
    return module.numbers["calls"]  # type: ignore[no-any-return]


def by_chance(module: Any) -> int:
    return 3 if random.random() < 0.5 else 1


@pytest.mark.parametrize(
    "count",
    [
        *(counted, counted_in_a_buffer, counted_within, counted_anew, counted_in_a_list, counted_in_a_dict),
        *(by_chance, lambda module: 3 if np.random.rand() < 0.5 else 1),  # noqa: NPY002
    ],
)
def test_a_forward_that_takes_another_path_counts_and_draws_once(count: Callable[[Any], int]) -> None:
    module = OtherPath(count)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    found = []
    for each in (module, model):
        random.seed(1), np.random.seed(1)  # noqa: NPY002
        found.append([each(torch.ones(B, D) * number).detach() for number in range(12)])
    assert_close(torch.stack(found[1]), torch.stack(found[0]))


def test_what_begins_on_another_path_is_said_to_have_happened_twice() -> None:
    """Until then it had left nothing, so that nothing was kept of the state before."""
    switch = [False]

    def only_there(module: Any) -> int:
        if switch[0]:
            module.counted += 1
        return 3 if switch[0] else 1

    model = enn.convert(OtherPath(only_there)).per_sample()
    for _ in range(5):  # no call at which samples are compared follows
        model(torch.randn(B, D)).sum().backward()
    switch[0] = True
    with pytest.warns(enn.PerSampleWarning, match="its forward has run twice in this call"):
        model(torch.randn(B, D)).sum().backward()
    before = float(model.counted)
    model(torch.randn(B, D)).sum().backward()
    assert float(model.counted) == before + 1


BEHIND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "matmul": lambda m, x: x @ m.w,
    "linear": lambda m, x: F.linear(x, m.w),
    "layer norm": lambda m, x: F.layer_norm(x, (D,), m.w[0], m.w[1]),
    "rms norm": lambda m, x: F.rms_norm(x, (D,), m.w[0]),
    "scale": lambda m, x: (x * m.w[0]).contiguous(),
}


class BehindRNN(nn.Module):
    """An RNN, whose outputs lie in memory with time first, and a view of what an own parameter makes of them."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.rnn, self.own = nn.GRU(D, D, batch_first=True), own(function, (D, D))()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.rnn(x)[0]).view(len(x), -1)


@pytest.mark.parametrize("name", BEHIND)
def test_results_are_contiguous_where_the_plain_ones_are(name: str) -> None:
    module = BehindRNN(BEHIND[name])
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call((torch.randn(B, T, D),))
    for _ in range(3):
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))


def scaled(*shape: int) -> Callable[[], nn.Module]:
    return own(lambda self, x: x * self.w, shape)


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (scaled(), values(D, D)),
        (lambda: nn.Sequential(nn.Linear(D, D), scaled()()).double(), values(D, D)),
        (scaled(D), values(B, B, D)),
        (lambda: nn.Sequential(nn.Linear(D, D), scaled(D)()).double(), values(B, B, D)),
        (scaled(3, 4), values(1, 3, 1)),
        (own(lambda self, x: torch.tanh(self.inner(x) * self.w), (D,), inner=nn.Linear(2, D)), values(1, 2)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)).double(), values(B, D)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(D, 2, 2)).double(), values(B, D, T)),
    ],
    ids=[
        "number",
        "number behind a layer",
        "by feature",
        "behind a layer",
        "one",
        "one, around a layer",
        "norm",
        "conv",
    ],
)
def test_weights_of_each_sample_after_steps(
    make: Callable[[], nn.Module], x: Tensor, history: bool, steps: int
) -> None:
    """What is known of the forward with one weight for all says nothing of one for each."""
    plain = make()
    model = enn.convert(plain).per_sample()
    for _ in range(steps):
        model(x).square().flatten(1).sum(1).mean().backward()
        model.zero_grad()
    given = {name: values(len(x), *weight.shape).requires_grad_() for name, weight in plain.named_parameters()}
    weights = {name: weight * 1 for name, weight in given.items()} if history else given
    found = torch.func.functional_call(model, weights, (x,))
    of_each = [{name: weight[i] for name, weight in given.items()} for i in range(len(x))]
    expected = torch.cat([torch.func.functional_call(plain, w, (x[i : i + 1],)) for i, w in enumerate(of_each)])
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(output.sin().sum(), [*given.values()]) for output in (found, expected)]
    torch.testing.assert_close(*grads)
