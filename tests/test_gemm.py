"""Products without history: by either library, of any layout, large enough for both."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expanded_nn import _gemm

N, ROWS, IN, OUT = 3, 140, 150, 141


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(_gemm, "_ONEDNN", False)
    return request.param and _gemm._ONEDNN and torch.get_default_device().type == "cpu"


def matrix(*size: int, transposed: bool, gaps: bool = False) -> Tensor:
    *batch, rows, columns = size
    drawn = torch.randn(*batch, columns, rows).mT if transposed else torch.randn(*size)
    return torch.cat([drawn.float()] * 2, -1)[..., :columns] if gaps else drawn.float()


def adding_product(x: Tensor, y: Tensor) -> Tensor:
    total = torch.ones(x.shape[0], y.shape[1], dtype=x.dtype)
    _gemm.adding_product(y, len(x))(total, x)
    return total - 1


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "affine": lambda x, y: _gemm.affine(x, y.t()),
    "affine with a bias": lambda x, y: _gemm.affine(x, y.t(), torch.ones(OUT).float()) - 1,
    "affine, more dimensions": lambda x, y: _gemm.affine(x.unflatten(0, (2, -1)), y.t()).flatten(0, 1),
    "product": _gemm.product,
    "product, more dimensions": lambda x, y: _gemm.product(x.unflatten(0, (2, -1)), y).flatten(0, 1),
    "transposed_product": lambda x, y: _gemm.transposed_product(x.t(), y),
    "adding_product": adding_product,
}


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, left: bool, right: bool, gaps: bool, by_onednn: bool) -> None:
    x, y = matrix(ROWS, IN, transposed=left, gaps=gaps), matrix(IN, OUT, transposed=right, gaps=gaps)
    assert _gemm.onednn_is_faster(x, OUT) == by_onednn
    torch.testing.assert_close(PRODUCTS[name](x, y).double(), x.double() @ y.double(), rtol=1e-4, atol=1e-4)


def test_onednn_gets_no_matrix_with_gaps() -> None:
    """The result would be right, but late."""
    for each in (matrix(IN, OUT, transposed=False, gaps=True), matrix(IN, OUT, transposed=False, gaps=True).t()):
        whole = _gemm._without_gaps(each)
        assert torch.equal(whole, each)
        assert whole.is_contiguous() or whole.t().is_contiguous()
    for each in (matrix(IN, OUT, transposed=False), matrix(IN, OUT, transposed=True)):
        assert _gemm._without_gaps(each) is each


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_batched_products(left: bool, right: bool, given: bool, by_onednn: bool) -> None:
    x, y = matrix(N, ROWS, IN, transposed=left), matrix(N, IN, OUT, transposed=right)
    assert _gemm.onednn_is_faster(x[0], OUT, _gemm._WORTH_A_COPY) == by_onednn
    out = torch.empty(N, ROWS, OUT).float() if given else None
    found = _gemm.batched_product(x, y, out)
    assert out is None or found is out
    torch.testing.assert_close(found.double(), x.double() @ y.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps_first", [False, True])
def test_batched_grams(steps_first: bool, by_onednn: bool) -> None:
    x = matrix(ROWS, N, IN, transposed=False).transpose(0, 1) if steps_first else matrix(N, ROWS, IN, transposed=False)
    torch.testing.assert_close(_gemm.batched_gram(x).double(), x.double() @ x.double().mT, rtol=1e-4, atol=1e-4)


def test_no_samples() -> None:
    x, y = torch.ones(0, ROWS, IN), torch.ones(0, IN, OUT)
    assert _gemm.batched_product(x.float(), y.float()).shape == (0, ROWS, OUT)
    assert _gemm.batched_gram(x.float()).shape == (0, ROWS, ROWS)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_no_plain_map_is_torch_s_own() -> None:
    x, weight, bias = torch.randn(ROWS, IN).float(), torch.randn(OUT, IN).float(), torch.randn(OUT).float()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _gemm.affine(x, weight[:, 1:], bias)
    with pytest.raises(RuntimeError, match="same dtype"):
        _gemm.affine(x, weight.double())
    found = _gemm.affine(x, weight, bias[:1])  # broadcast
    torch.testing.assert_close(found, x @ weight.t() + bias[:1], rtol=1e-4, atol=1e-4)
    found = _gemm.affine(x.relu().to_sparse_csr(), weight, bias)
    torch.testing.assert_close(found, x.relu() @ weight.t() + bias, rtol=1e-4, atol=1e-4)
