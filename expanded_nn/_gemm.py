"""Matrix products in single precision on the CPU, by the library that is fastest.

torch's own recurrent layers run on oneDNN, its `mm` on MKL, which on some processors is half as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def affine(
    x: Tensor,  # (rows, in)
    weight: Tensor,  # (out, in)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (rows, out)
    """`x @ weight.T + bias`, without history."""
    if _onednn_takes(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


class Product:
    """The product with one matrix, many times over.

    Args:
        matrix: `(in, out)`.
        rows: How many rows the other factor has.
        times: How often it is to be used: packing pays from a few times on.
    """

    def __init__(self, matrix: Tensor, rows: int, times: int) -> None:
        self.matrix = matrix
        self.packed: Tensor | None = None
        if times > 3 and rows and _onednn_takes(matrix):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), rows)

    def add_to(
        self,
        total: Tensor,  # (rows, out)
        x: Tensor,  # (rows, in)
    ) -> None:
        """`total += x @ matrix`."""
        if self.packed is None:
            total.addmm_(x, self.matrix)
        else:
            total.add_(torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], ""))


def _onednn_takes(x: Tensor) -> bool:
    return (
        _ONEDNN
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and torch._C._get_mkldnn_enabled()
    )
