"""Measures how far rows, norms and clipped sums in low precision are from float64, as a markdown table.

    python -m benchmarks.precision > benchmarks/results/precision.md

The reference is the sample-by-sample loop in float64, of the same model and inputs after they were rounded to the
lower precision: what is left is the error of the computation. Beside each number stands that of the plain loop
in the same low precision, the error that torch makes by itself.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

import expanded_nn as enn

PAGE = """# How exact the rows are

Written by `python -m benchmarks.precision > benchmarks/results/precision.md`: the relative error, against a loop over
the samples in float64, of the rows, of their norms and of the clipped sum; in brackets that of the same loop in the
lower precision, which is the error that torch makes by itself.

{}"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Workload(NamedTuple):
    """A model and its inputs.

    Attributes:
        name: What the table calls it.
        makes: The plain model.
        inputs: The inputs of so many samples, floating or an index.
    """

    name: str
    makes: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class _First(nn.Module):
    """The first part of what a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layer(x)[0]
        return first


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def _embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 32), nn.Flatten(), nn.Linear(24 * 32, 10))


WORKLOADS = (
    Workload("MLP", _mlp, lambda b: torch.randn(b, 64)),
    Workload("CNN", _cnn, lambda b: torch.randn(b, 3, 16, 16)),
    Workload("LSTM", lambda: _First(nn.LSTM(32, 48, batch_first=True)), lambda b: torch.randn(b, 20, 32)),
    Workload(
        "Transformer",
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        lambda b: torch.randn(b, 16, 32),
    ),
    Workload("Embedding", _embedding, lambda b: torch.randint(100, (b, 24))),
)


class Errors(NamedTuple):
    """Relative errors: the rows' and the plain loop's rows', the norms', the clipped sum's and a reference for it."""

    rows: float
    plain_rows: float
    norms: float
    plain_norms: float
    clipped: float
    plain_clipped: float


def measure(workload: Workload, dtype: torch.dtype, batch: int = 16, seed: int = 0) -> Errors:
    """The errors of one workload in one precision; the loss is the sum over the samples."""
    torch.manual_seed(seed)
    module, x = workload.makes().to(dtype), workload.inputs(batch)
    x = x.to(dtype) if x.is_floating_point() else x
    weights = _coefficients(module, x)
    exact = _flat(_loop(deepcopy(module).double(), x.double() if x.is_floating_point() else x, weights))
    plain = _flat(_loop(module, x, weights))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    _losses(model(x), weights).sum().backward()
    rows = _flat({name: p.grad_sample.to_dense() for name, p in model.named_parameters()})
    limit = float(exact.norm(dim=1).median())
    norms = enn.clip_grad_sample_norms_(model, limit)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    wanted = _clipped(exact, exact.norm(dim=1), limit)
    # what the most careful user of the plain loop would do: norms and the sum in float32, then the dtype of .grad
    careful = _clipped(plain.float(), plain.float().norm(dim=1), limit).to(dtype)
    return Errors(
        _error(rows, exact),
        _error(plain, exact),
        _error(norms, exact.norm(dim=1)),
        _error(plain.float().norm(dim=1), exact.norm(dim=1)),
        _error(clipped, wanted),
        _error(careful, wanted),
    )


def _coefficients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.randn(module(x).shape, dtype=torch.float64).to(x.dtype if x.is_floating_point() else torch.float32)


def _losses(output: Tensor, weights: Tensor) -> Tensor:
    return (output * weights.to(output.dtype)).flatten(1).sum(1)


def _loop(module: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for i in range(len(x)):
        loss = _losses(module(x[i : i + 1]), weights[i : i + 1]).sum()
        for name, grad in zip(rows, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            rows[name].append(grad)
    return {name: torch.stack(each) for name, each in rows.items()}


def _flat(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in rows.values()], 1)


def _clipped(rows: Tensor, norms: Tensor, limit: float) -> Tensor:
    return (limit / norms).clamp(max=1) @ rows


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def table(batch: int = 16, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """The measurements in markdown; beside each error, in brackets, that of the plain loop in the same dtype."""
    lines = [
        "| Model | dtype | eps | rows (plain loop) | norms (plain loop) | clipped sum (plain loop) |",
        "|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        for dtype in dtypes:
            try:
                each = measure(workload, dtype, batch)
            except (RuntimeError, NotImplementedError) as error:
                lines.append(f"| {workload.name} | {_name(dtype)} | | {error} | | |")
                continue
            pairs = zip(each[::2], each[1::2], strict=True)
            cells = " | ".join(f"{ours:.1e} ({plain:.1e})" for ours, plain in pairs)
            lines.append(f"| {workload.name} | {_name(dtype)} | {torch.finfo(dtype).eps:.1e} | {cells} |")
    return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="samples (16)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(PAGE.format(table(parser.parse_args().batch)))
