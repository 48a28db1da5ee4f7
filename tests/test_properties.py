"""Random shapes and arguments, against the loop."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import nn

import expanded_nn as enn
from oracle import Call, assert_all_close, assert_close_rows, loop, rows_of, total_loss

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

few = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.filter_too_much]
)
small = st.integers(1, 4)
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def check(module: nn.Module, *args: torch.Tensor) -> None:
    call, samples = Call(args), len(args[0])
    expected = loop(module, call, samples)
    model = enn.convert(module).per_sample()
    a, b = call.requires_grad(), call.requires_grad()
    (total_loss(model, a) / samples).backward()
    assert_close_rows(rows_of(model), expected)
    (total_loss(module, b) / samples).backward()
    assert_all_close([t.grad for t in a.floats()], [t.grad for t in b.floats()])


@few
@given(st.lists(small, min_size=1, max_size=4), small, st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_linear(middle: list[int], samples: int, inputs: int, outputs: int, bias: bool) -> None:
    check(nn.Linear(inputs, outputs, bias=bias), torch.randn(samples, *middle[1:], inputs))


def each(d: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """One number for all dimensions, or one for each."""
    return values | st.tuples(*[values] * d)


def as_tuple(value: Any, d: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * d


@few
@given(st.data())
@pytest.mark.parametrize("d", [1, 2, 3])
def test_convolution(d: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3), "groups")
    channels, out = groups * data.draw(small, "channels"), groups * data.draw(small, "out")
    kernel = data.draw(each(d, st.integers(1, 4)), "kernel")
    dilation = data.draw(each(d, st.integers(1, 3)), "dilation")
    padding = data.draw(each(d, st.integers(0, 3)) | st.sampled_from(["same", "valid"]), "padding")
    stride = 1 if padding == "same" else data.draw(each(d, st.integers(1, 3)), "stride")
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]), "padding_mode")
    space = data.draw(st.tuples(*[st.integers(3, 8)] * d), "space")
    samples, bias = data.draw(small, "samples"), data.draw(st.booleans(), "bias")
    module = CONV[d](
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        padding_mode=mode,
    )
    x = torch.randn(samples, channels, *space)
    if data.draw(st.booleans(), "permuted"):
        x = torch.randn(samples, *space, channels).movedim(-1, 1)
    assume(torch_accepts(module, x))
    check(module, x)


@few
@given(st.data())
@pytest.mark.parametrize("d", [1, 2, 3])
def test_transposed_convolution(d: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3), "groups")
    channels, out = groups * data.draw(small, "channels"), groups * data.draw(small, "out")
    kernel = data.draw(each(d, st.integers(1, 4)), "kernel")
    dilation = data.draw(each(d, st.integers(1, 3)), "dilation")
    stride = data.draw(each(d, st.integers(1, 3)), "stride")
    padding = data.draw(each(d, st.integers(0, 2)), "padding")
    output_padding = data.draw(each(d, st.integers(0, 2)), "output_padding")
    space = data.draw(st.tuples(*[st.integers(1, 5)] * d), "space")
    samples, bias = data.draw(small, "samples"), data.draw(st.booleans(), "bias")
    module = CONV_TRANSPOSE[d](
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        groups=groups,
        bias=bias,
        dilation=dilation,
    )
    x = torch.randn(samples, channels, *space)
    assume(torch_accepts(module, x))
    check(module, x)


@few
@given(st.data())
def test_embedding(data: st.DataObject) -> None:
    words, features = data.draw(st.integers(1, 9), "words"), data.draw(small, "features")
    shape = (data.draw(st.integers(1, 4), "samples"), *data.draw(st.lists(st.integers(1, 5), max_size=2), "shape"))
    assume(len(shape) > 1)  # one index a sample may be positions, which is another law
    padding_idx = data.draw(st.none() | st.integers(-words, words - 1), "padding_idx")
    scale, sparse = data.draw(st.booleans(), "scale"), data.draw(st.booleans(), "sparse")
    module = nn.Embedding(words, features, padding_idx, scale_grad_by_freq=scale and not sparse, sparse=sparse)
    check(module, torch.randint(words, shape))


@few
@given(st.data())
def test_embedding_bag(data: st.DataObject) -> None:
    words, features = data.draw(st.integers(1, 9), "words"), data.draw(small, "features")
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6)), "shape")
    padding_idx = data.draw(st.none() | st.integers(0, words - 1), "padding_idx")
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]), "mode")
    check(nn.EmbeddingBag(words, features, mode=mode, padding_idx=padding_idx), torch.randint(words, shape))


def torch_accepts(module: nn.Module, x: torch.Tensor) -> bool:
    """Padding may exceed the input, a kernel the padded input, output_padding the stride."""
    try:
        return module(x).numel() > 0
    except (RuntimeError, ValueError):
        return False
