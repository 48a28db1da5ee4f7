"""Operations of a forward on the whole batch in which samples may meet, with tensors that are no parameters."""

from __future__ import annotations

import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.functions import attributes, functions
from expanded_nn.common.modes import unseen
from expanded_nn.recording.constants import READS_NUMBERS

# operations that read values
READS = READS_NUMBERS | {*functions("equal", "allclose", "is_nonzero", "__bool__")}
# operations that may join samples or move them
_BY_KEY = set(functions("__getitem__", "__setitem__"))
JOINS = _BY_KEY | set(
    functions(
        *("sum", "mean", "prod", "max", "min", "amax", "amin", "median", "std", "var", "norm", "logsumexp", "any"),
        *("softmax", "log_softmax", "normalize", "cumsum", "cumprod", "sort", "argsort", "topk", "flip", "roll"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "cdist"),
        *("transpose", "permute", "movedim", "swapaxes", "t", "view", "reshape", "flatten", "unflatten", "repeat"),
        *("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy", "index_put", "take_along_dim"),
        *("scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_", "repeat_interleave"),
        *("all", "cat", "concat", "stack", "split", "chunk", "unbind", "select", "narrow", "batch_norm"),
        *("layer_norm", "group_norm", "instance_norm", "rms_norm", "scaled_dot_product_attention", "aminmax"),
        *("logcumsumexp", "cummax", "cummin", "quantile", "nanquantile", "nanmean", "nansum", "nanmedian", "mode"),
        *("kthvalue", "std_mean", "var_mean", "dist", "cov", "corrcoef", "diff", "count_nonzero", "cosine_similarity"),
        *("mv", "dot", "inner", "outer", "kron", "conv1d", "conv2d", "conv3d", "avg_pool1d", "avg_pool2d"),
        *("interpolate", "softmin", "cumsum_", "cumprod_", "renorm", "renorm_", "trapezoid", "trapz", "gradient"),
        *("sum_to_size", "argmax", "argmin", "bincount", "tril", "triu", "as_strided", "take", "embedding"),
        *("embedding_bag", "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_", "frobenius_norm"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss", "kl_div"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"),
        *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"),
        *("multi_margin_loss", "soft_margin_loss", "ctc_loss"),
    )
).union(attributes("T", "mT"), *(filter(callable, vars(room).values()) for room in (torch.fft, torch.linalg)))
_TORCH, _OURS = f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}"


def is_of_ours() -> bool:
    """Whether our own code calls the operation: it keeps samples apart, and may choose operations by sizes."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_OURS)


def along(func: Any, args: Any, kwargs: Any) -> str:
    """The name of an operation, and whether it works along the samples' dimension."""
    if func in _BY_KEY:
        keys = args[1]
        key = keys[0] if isinstance(keys, tuple) and keys else keys  # of the first dimension
        takes_all = isinstance(key, slice) and key == slice(None)
        kind = "Tensor" if isinstance(key, Tensor) else type(key).__name__  # in a trace it is one of another class
        return f"{func.__name__} {kind} {takes_all}"
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, tuple | list)]
    numbers = [value for value in chain(values, *lists) if type(value) is int]
    with unseen():
        first = 0 in numbers or (isinstance(args[0], Tensor) and -args[0].dim() in numbers) if args else True
    return f"{func.__name__} {first} {next((value for value in values if isinstance(value, str)), '')}"
