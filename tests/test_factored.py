"""The factored gradient against its dense twin: operation by operation, kind by kind."""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from expanded_nn import FactoredTensor, PerSampleError, PerSampleGrads, convert
from expanded_nn.core.algebra import Kind
from expanded_nn.core.geometry import Geometry
from expanded_nn.core.parts import Parts
from expanded_nn.core.patches import Patches, inner_by_entries, inner_by_windows
from expanded_nn.core.terms import Dense, OneHot, Outer, Term
from expanded_nn.factored import TABLE
from expanded_nn.layers.conv import conv2d
from expanded_nn.rows.cell import Cell, Guarded

B = 4


def outer(positions: int) -> Term:
    return Outer.of(torch.randn(B, positions, 3), torch.randn(B, positions, 5), torch.float64)


def one_hot() -> Term:
    return OneHot.of(torch.randn(B, 6, 5), torch.randint(3, (B, 6)), 3, torch.float64)


def patches() -> Term:
    weight = torch.randn(1, 3, 5, 1, 1).expand(B, 3, 5, 1, 1).requires_grad_()
    (rows,) = torch.autograd.grad(conv2d(torch.randn(B, 5, 4, 4), weight, None).sin().sum(), weight)
    (term,) = rows.terms()
    assert isinstance(term, Patches)
    return term


KINDS: dict[str, Callable[[], list[Term]]] = {
    "outer_1": lambda: [outer(1)],
    "outer_2": lambda: [outer(2)],
    "outer_30": lambda: [outer(30)],
    "one_hot": lambda: [one_hot()],
    "patches": lambda: [patches()],
    "dense": lambda: [Dense.of(torch.randn(B, 3, 5))],
    "outer+outer": lambda: [outer(2), outer(1)],
    "outer+one_hot": lambda: [outer(2), one_hot()],
    "all": lambda: [outer(2), one_hot(), patches(), Dense.of(torch.randn(B, 3, 5))],
    "none": list,
}


def make(kind: str) -> tuple[FactoredTensor, Tensor]:
    """A factored tensor `(B, 3, 5)` and its dense twin."""
    terms = KINDS[kind]()
    twin, blocks = torch.zeros(B, 3, 5), [(B, tuple(Guarded.of(term) for term in terms))]
    rows = FactoredTensor(Cell(blocks, Kind((3, 5), twin.dtype, twin.device)), twin.shape)
    for term in terms:
        twin = twin + term.dense().reshape(B, 3, 5)
    return rows, twin


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[FactoredTensor, Tensor]:
    return make(request.param)


def plain(value: Any) -> Any:
    return value.dense() if isinstance(value, FactoredTensor) else value


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(plain(one), plain(other), rtol=1e-9, atol=1e-12)


by_row = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
FACTORED: dict[str, Callable[[Any], Any]] = {  # done on the factors
    "add": lambda g: g + g,
    "negate": lambda g: -g,
    "times number": lambda g: g * 3,
    "number times": lambda g: 3.0 * g,
    "sum of a list": lambda g: sum([g, g]),
    "times rows": lambda g: g * by_row[:, None, None],
    "times scalar tensor": lambda g: g * torch.tensor(3.0),
    "divide": lambda g: g / 4,
    "detach": lambda g: g.detach(),
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(B, -1),
    "reshape": lambda g: g.reshape(len(g), -1),
    "flatten": lambda g: g.flatten(1),
    "slice": lambda g: g[1:3],
    "split": lambda g: g.split(3)[1],
    "chunk": lambda g: g.chunk(2)[0],
    "index": lambda g: g[torch.tensor([2, 0, 2])],
    "mask": lambda g: g[torch.tensor([True, False, True, True])],
    "index_select": lambda g: g.index_select(0, torch.tensor([3, 1])),
    "cat": lambda g: torch.cat([g, 2 * g]),
    "to double": lambda g: g.double(),
}
REDUCED: dict[str, Callable[[Any], Any]] = {  # from the factors, a plain tensor
    "sum": lambda g: g.sum(0),
    "sum keepdim": lambda g: g.sum(0, keepdim=True),
    "mean": lambda g: g.mean(0),
    "norm": lambda g: g.norm(),
    "row norms": lambda g: g.flatten(1).norm(dim=1),
    "row norms 2": lambda g: g.reshape(len(g), -1).norm(2, dim=-1),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True),
    "einsum implicit": lambda g: torch.einsum("i,i...", by_row, g),
    "einsum": lambda g: torch.einsum("b,b...->...", by_row, g),
    "einsum named": lambda g: torch.einsum("bij,b->ij", g, by_row),
    "matvec": lambda g: g.flatten(1) @ torch.arange(15.0),
    "mv": lambda g: torch.mv(g.flatten(1), torch.arange(15.0)),
}
DENSE: dict[str, Callable[[Any], Any]] = {  # makes the rows dense, and is right
    "stack": lambda g: torch.stack([g, g]),
    "row": lambda g: g[1],
    "every other row": lambda g: g[::2].flatten(),
    "every other row, contiguous": lambda g: g[1::2].contiguous().view(-1),
    "split columns": lambda g: g.split(2, 1)[1],
    "column": lambda g: g[:, 1],
    "transpose": lambda g: g.transpose(1, 2),
    "permute": lambda g: g.permute(2, 0, 1),
    "subtract": lambda g: g - 2 * g,  # the norm of nearly equal rows would lose half its digits on the factors
    "sub_": lambda g: g.sub_(2 * g),
    "square": lambda g: g.square(),
    "add number": lambda g: g + 1,
    "add dense": lambda g: g + torch.ones(B, 3, 5),
    "dense add_": lambda g: torch.ones(B, 3, 5).add_(g),
    "times tensor": lambda g: g * torch.arange(15.0).view(3, 5),
    "max": lambda g: g.max(),
    "sum all": lambda g: g.sum(),
    "sum rows": lambda g: g.sum((1, 2)),
    "norm 1": lambda g: g.flatten(1).norm(p=1, dim=1),
    "matmul": lambda g: g @ torch.ones(5, 2),
    "einsum pairs": lambda g: torch.einsum("aij,bij->ab", g, g),
    "einsum rows": lambda g: torch.einsum("bij,ij->b", g, torch.ones(3, 5)),
    "mul_": lambda g: g.mul_(3),
    "mul_ rows": lambda g: g.mul_(by_row[:, None, None]),
    "div_": lambda g: g.div_(2),
    "add_": lambda g: g.add_(g),
    "add_ number": lambda g: g.add_(1),
    "clamp_": lambda g: g.clamp_(min=0),
    "zero_": lambda g: g.zero_(),
    "isnan": lambda g: g.isnan(),
    "allclose": lambda g: torch.allclose(g, g),
    "unbind": lambda g: g.unbind()[2],
    "where": lambda g: torch.where(g > 0, g, 0.0),
    "foreach": lambda g: torch._foreach_mul([g, g], 2.0)[1],
    "tolist": lambda g: torch.tensor(g.tolist()),
    "numpy": lambda g: torch.as_tensor(g.detach().cpu().numpy()),
    "asarray": lambda g: torch.as_tensor(np.asarray(g)),
    "dlpack": lambda g: torch.from_dlpack(g),
    "whole numbers": lambda g: (10 * g).to(torch.int64),  # those of the factors would have other products
    "bool": lambda g: g.bool(),
    # what the functions of the table leave to dense rows
    "times a tensor of more dimensions": lambda g: g * torch.full((1, 1, 1, 1), 3.0),
    "times a complex number": lambda g: g * torch.tensor([2 + 1j]),
    "divided by zero": lambda g: (g / 0).nan_to_num(),
    "plus another dtype": lambda g: g + g.to(torch.complex128),
    "plus a share": lambda g: torch.add(g, g, alpha=0.5),
    "sum in another dtype": lambda g: g.sum(0, dtype=torch.float32),
    "dtype of norms": lambda g: torch.linalg.vector_norm(g.float(), dim=(1, 2), dtype=torch.float64).dtype,
    "cat columns": lambda g: torch.cat([g, g], 1),
    "cat other dtypes": lambda g: torch.cat([g, g.to(torch.complex128)]),
    "index of columns": lambda g: g.index_select(1, torch.tensor([2, 0])),
    "index of elements": lambda g: g[torch.tensor([0, 1]), torch.tensor([2, 0])],
    "index of two dimensions": lambda g: g[torch.tensor([[0, 1], [3, 2]])],
    "slice of columns": lambda g: g[:, 1:],
    "device of a copy": lambda g: g.to("meta", torch.complex128).device,
    "some lines of a matrix": lambda g: torch.ops.aten.slice_backward(g, [B, 6, 5], 1, 1, 4, 1),
    "lines of a matrix": lambda g: torch.ops.aten.slice_backward(g, [B, 6, 5], 1, 0, 6, 2),
    "einsum turned": lambda g: torch.einsum("b,bij->ji", by_row, g),
}


@pytest.mark.parametrize("name", FACTORED)
def test_on_the_factors(pair: tuple[FactoredTensor, Tensor], name: str) -> None:
    rows, twin = pair
    kinds = {type(term) for term in rows.terms()}
    result = FACTORED[name](rows)
    assert isinstance(result, FactoredTensor)
    assert not result.is_dense
    assert not rows.is_dense
    assert {type(term) for term in result.terms()} == kinds
    same(result, FACTORED[name](twin))


@pytest.mark.parametrize("name", REDUCED)
def test_reduced_from_the_factors(pair: tuple[FactoredTensor, Tensor], name: str) -> None:
    rows, twin = pair
    same(REDUCED[name](rows), REDUCED[name](twin))
    assert not rows.is_dense


@pytest.mark.parametrize("name", DENSE)
def test_what_is_not_in_the_table_becomes_dense(pair: tuple[FactoredTensor, Tensor], name: str) -> None:
    rows, twin = pair
    result, expected = DENSE[name](rows), DENSE[name](twin)
    if isinstance(expected, Tensor):
        same(result, expected)
    else:
        assert result == expected


@pytest.mark.parametrize("name", [*FACTORED, *REDUCED, *DENSE])
def test_rows_that_are_dense_already(name: str) -> None:
    rows, twin = make("outer_2")
    rows.dense()
    result, expected = (FACTORED | REDUCED | DENSE)[name](rows), (FACTORED | REDUCED | DENSE)[name](twin)
    if isinstance(expected, Tensor):
        same(result, expected)
    else:
        assert result == expected


@pytest.mark.parametrize(
    "operation",
    [
        lambda g: torch.mv(g.flatten(1), torch.ones(15, dtype=torch.float32)),
        lambda g: torch.einsum("b,bij->ij", by_row.float(), g),
        lambda g: torch.einsum("b,bij->ij", by_row[:, None], g),
        lambda g: torch.einsum("b,bi->i", by_row, g),
        lambda g: torch.cat([g, g.flatten(1)]),
        lambda g: g + g.view(B, 1, 15),
    ],
)
def test_what_torch_refuses_is_refused(pair: tuple[FactoredTensor, Tensor], operation: Callable[[Any], Any]) -> None:
    for rows in pair:
        with pytest.raises(RuntimeError):
            operation(rows)


def test_whole_numbers_divide_as_precisely_as_the_rows_are() -> None:
    rows, twin = make("outer_2")
    torch.set_default_dtype(torch.float32)  # that of an inverse
    same(rows / torch.tensor(3), twin / torch.tensor(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1, 1, 1), (B, 1, 1)])
def test_division_by_other_dtypes_is_as_precise_as_the_rows_are(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows, twin = make("outer_2")
    divisor = torch.full(shape, 3).to(dtype)
    same(rows / divisor, twin / divisor)
    if dtype == torch.float16 and not shape:
        small = torch.tensor(6e-6, dtype=dtype)  # whose reciprocal is infinite in its dtype
        same(rows / small, twin / small)


@pytest.mark.parametrize("size", [1e20, 1e-22])
def test_norms_at_the_ends_of_float32(size: float) -> None:
    term = outer(2).to(torch.float32)
    rows, twin = FactoredTensor.of(term.scaled(size)), term.dense().double() * size
    norms = rows.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), twin.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_complex_numbers_and_back(kind: str) -> None:
    rows, twin = make(kind)
    factor = torch.polar(torch.ones(B), torch.arange(B).double()).view(B, *[1] * (twin.dim() - 1))
    phases = [x.to(torch.complex128) * factor for x in (rows, twin)]
    same(*(x.mean(0) for x in phases))
    same(*(x.real.to(torch.float32) for x in phases))
    same(*(x.to(torch.float32) for x in phases))


def test_every_entry_of_the_table_has_a_case() -> None:
    seen: set[Any] = set()
    table = dict(TABLE)

    def recording(function: Callable[..., Any], key: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if result is not NotImplemented or key is Tensor.__setitem__:
                seen.add(key)
            return result

        return call

    try:
        TABLE.update({key: recording(function, key) for key, function in table.items()})
        for operation in [*FACTORED.values(), *REDUCED.values(), *DENSE.values(), lambda g: g.__setitem__(0, 1.0)]:
            operation(make("outer_2")[0])
        make("outer_2")[0].sub_(make("outer_2")[0])
        make("outer_2")[0].float()
        torch.ops.aten.slice_backward(make("outer_2")[0], [B, 7, 5], 1, 2, 5, 1)
    finally:
        TABLE.update(table)
    in_backward = {torch.ops.aten.transpose.int, torch.ops.aten.permute.default}  # by the laws of second order
    not_reached = {each for each in TABLE if each not in seen} - in_backward
    scalar = {key for key in not_reached if "Scalar" in str(key)} | {torch.ops.aten.alias.default}
    assert not_reached <= scalar | {torch.ops.aten._unsafe_view.default}


@pytest.mark.parametrize("kind", ["outer_2", "outer_30", "one_hot", "patches", "dense", "all"])
def test_magnitudes(kind: str) -> None:
    """Those of the factors, whatever their signs, bound those of the sum."""
    rows, twin = make(kind)
    weights = torch.rand(B)
    bound = rows.sum_of_magnitudes(weights)
    assert (bound * (1 + 1e-12) >= torch.einsum("b,b...->...", weights, twin).abs()).all()
    same((rows * -2.0).sum_of_magnitudes(weights), 2 * bound)
    if kind == "dense":
        same(bound, torch.einsum("b,b...->...", weights, twin.abs()))


def turned(kind: str, sides: tuple[int, int]) -> Term:
    """A term of rows that have as many numbers as those of the others here, but other sides."""
    lines, columns = sides
    if kind == "outer":
        return Outer.of(torch.randn(B, 1, lines), torch.randn(B, 1, columns), torch.float64)
    if kind == "outers":
        return Outer.of(torch.randn(B, 2, lines), torch.randn(B, 2, columns), torch.float64)
    if kind == "one_hot":
        return OneHot.of(torch.randn(B, 6, columns), torch.randint(lines, (B, 6)), lines, torch.float64)
    part = Outer.of(torch.randn(B, 2, 1), torch.randn(B, 2, columns), torch.float64)
    return Parts.of([None if number % 2 else part for number in range(lines)])


@pytest.mark.parametrize("sides", [(3, 5), (5, 3), (15, 1), (1, 15)], ids=str)
@pytest.mark.parametrize("other_kind", ["outer", "outers", "one_hot", "parts"])
@pytest.mark.parametrize("kind", ["outer", "outers", "one_hot", "parts"])
def test_rows_of_other_sides_meet_as_vectors(kind: str, other_kind: str, sides: tuple[int, int]) -> None:
    """As where the rows of two weights are flattened, and added; one of them was taken for the other's transpose."""
    rows, other = (FactoredTensor.of(turned(*of)).flatten(1) for of in ((kind, (15, 1)), (other_kind, sides)))
    twin, other_twin = rows.clone().flatten(1) + 0.0, other.clone().flatten(1) + 0.0
    torch.testing.assert_close((rows + other).norm(dim=1), (twin + other_twin).norm(dim=1))
    torch.testing.assert_close(torch.cat([rows, other]).norm(dim=1), torch.cat([twin, other_twin]).norm(dim=1))
    torch.testing.assert_close(rows.gram(other), twin @ other_twin.T)
    torch.testing.assert_close(rows.sum(0), twin.sum(0))


@pytest.mark.parametrize("kind", ["outer_2", "one_hot", "all"])
@pytest.mark.parametrize("other", ["outer_2", "outer_30", "one_hot", "patches", "dense", "all"])
def test_gram(kind: str, other: str) -> None:
    (rows, twin), (others, other_twin) = make(kind), make(other)
    same(rows.gram(others), twin.flatten(1) @ other_twin.flatten(1).t())


def test_without_samples() -> None:
    """Many views begin with 0 then."""
    model = convert(nn.Linear(5, 3)).per_sample(keep_factors=True, loss_reduction="sum")
    model(torch.randn(0, 5)).sum().backward()
    rows = model.weight.grad_sample
    assert isinstance(rows, FactoredTensor)
    for product, shape in ((rows @ torch.ones(5), (0, 3)), (rows.view(-1, 5), (0, 5)), (rows.flatten(1), (0, 15))):
        assert tuple(product.shape) == shape
        assert product.sum() == 0
    for size in (0, 2):
        assert [tuple(part.shape) for part in rows.split(size)] == [(0, 3, 5)]


def test_the_algebra_by_keywords() -> None:
    """And with rows that are dense, as those of small layers are."""
    rows, twin = make("outer_2")
    flat, weights, vector = twin.flatten(1), torch.linspace(0, 1, len(twin)), torch.ones(twin.shape[1:])
    torch.testing.assert_close(rows.weighted_sum(weights=weights), torch.tensordot(weights, twin, 1))
    torch.testing.assert_close(rows.matvec(vector=vector), flat.sum(1))
    torch.testing.assert_close(rows.gram(other=rows), flat @ flat.T)
    torch.testing.assert_close(rows.gram(twin), flat @ flat.T)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda g: g.__setitem__(0, 7.0), id="setitem"),
        pytest.param(lambda g: g.__setitem__(slice(1, 3), 0.0), id="setitem_slice"),
        pytest.param(lambda g: g[0].zero_(), id="row"),
        pytest.param(lambda g: g.view(B, -1).mul_(2), id="view_mul"),
        pytest.param(lambda g: g.view(B, -1).add_(1), id="view_add"),
        pytest.param(lambda g: g.detach().mul_(2), id="detached"),
        pytest.param(lambda g: g.unbind()[1].fill_(3), id="unbind"),
        pytest.param(lambda g: g.data.fill_(3), id="data"),
        pytest.param(lambda g: g.apply_(lambda number: 2 * number), id="apply_"),
        pytest.param(lambda g: g.as_strided(g.shape, g.stride()).fill_(3), id="as_strided"),
        pytest.param(lambda g: g.numpy().fill(3), id="numpy"),
        pytest.param(lambda g: torch.from_dlpack(g).fill_(3), id="dlpack"),
        pytest.param(lambda g: torch.empty(0).set_(g.untyped_storage()).fill_(3), id="storage"),
        pytest.param(lambda g: g.share_memory_().numpy().fill(3), id="shared_memory"),
    ],
)
def test_changes_by_way_of_an_alias(pair: tuple[FactoredTensor, Tensor], change: Callable[[Any], Any]) -> None:
    rows, twin = pair
    change(rows), change(twin)
    same(rows, twin)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.unsqueeze_(0),
        lambda rows: rows.squeeze_(),
        lambda rows: rows.transpose_(0, 1),
        lambda rows: rows.t_(),
        lambda rows: rows.resize_(2),
        lambda rows: rows.resize_as_(torch.ones(2)),
        lambda rows: rows.set_(),
        lambda rows: rows.set_(torch.ones(2)),
    ],
    ids=["unsqueeze_", "squeeze_", "transpose_", "t_", "resize_", "resize_as_", "set_", "set_to"],
)
def test_a_change_of_the_shape_in_place_is_refused(
    pair: tuple[FactoredTensor, Tensor], change: Callable[[Any], Any]
) -> None:
    """The tensor would keep its shape, and only its numbers would have another."""
    rows, dense = pair
    with pytest.raises(PerSampleError, match=r"the shape of factored rows in place, by \w+_; .*rows.unsqueeze\(0\)"):
        change(rows.flatten(1))
    torch.testing.assert_close(rows.to_dense(), dense)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda rows: rows.mul_(2),
    "one row": lambda rows: operator.setitem(rows, 0, 0),
    "a column": lambda rows: operator.setitem(rows, (slice(None), 0), 0),
    "a row's view": lambda rows: rows[0].zero_(),
    "rows in a loop": lambda rows: [row.zero_() for row in rows],
    "transposed": lambda rows: rows.mT.mul_(2),
    "flattened": lambda rows: rows.flatten(1).mul_(2),
    "numpy": lambda rows: operator.setitem(rows.detach().numpy(), 0, 0),
    "several at once": lambda rows: torch._foreach_mul_([rows], 2.0),
}
PARTS = (slice(1, 3), slice(0, 2), slice(-2, None), slice(None, None, 2), slice(3, 1), slice(2, 99))


@pytest.mark.parametrize("part", PARTS, ids=repr)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["outer_2", "outer+outer"])
def test_a_slice_shares_what_is_written(name: str, write: str, part: slice) -> None:
    """As that of a dense tensor: what is written into either is seen in the other, taken before or after."""
    for of_whole in (False, True):
        tensors = make(name)
        slices = [rows[part] for rows in tensors]
        for rows, own in zip(tensors, slices, strict=True):
            written = rows if of_whole else own
            if len(written):
                WRITES[write](written)
        for whole, own in (tensors, slices), (slices, [rows[part] for rows in tensors]):
            torch.testing.assert_close(whole[0].to_dense(), whole[1])
            torch.testing.assert_close(own[0].to_dense(), own[1])
            torch.testing.assert_close(own[0].flatten(1).norm(dim=1), own[1].flatten(1).norm(dim=1))
            torch.testing.assert_close(whole[0].sum(0), whole[1].sum(0))


def test_a_slice_is_read_alone() -> None:
    """To read some of many rows does not make all of them dense."""
    rows, dense = make("outer_2")
    part = rows[1:3][1:]
    torch.testing.assert_close(part.dense(), dense[2:3])
    torch.testing.assert_close(part.abs().to_dense(), dense[2:3].abs())
    assert not rows.is_dense
    rows[2] = 0
    assert rows.is_dense
    assert part.is_dense
    assert not part.any()


def test_rows_in_another_dtype_stay_in_range() -> None:
    """Factors may be out of range where the rows are not."""
    g, a = torch.full((2, 1, 4), 1e-6, dtype=torch.float32), torch.full((2, 1, 5), 1e6, dtype=torch.float32)
    rows = FactoredTensor.of(Outer.of(g, a, torch.float32))
    torch.testing.assert_close(rows.bfloat16().float(), torch.ones(2, 4, 5, dtype=torch.float32))
    torch.testing.assert_close(rows.half(), torch.ones(2, 4, 5, dtype=torch.float16))


def test_views_in_inference_mode() -> None:
    """Those of rows that are no inference tensors are none either."""
    rows, dense = make("outer_2")
    with torch.inference_mode():
        for of in (rows[1:], rows[0], next(iter(rows)), rows.detach(), rows.flatten(1), rows.mT):
            assert not of.is_inference()
        rows[1:].zero_()
    assert not rows[1:].any()
    torch.testing.assert_close(rows[0], dense[0])


def test_a_copy_asks_for_gradients_as_the_rows_do() -> None:
    rows, _ = make("outer_2")
    for requires_grad in (False, True):
        assert copy.deepcopy(rows.detach().requires_grad_(requires_grad)).requires_grad is requires_grad


def test_a_vector_is_no_partner_of_matrices() -> None:
    rows, _ = make("outer_2")
    with pytest.raises(RuntimeError, match="expected"):
        torch.mv(rows, torch.ones(rows[0].numel()))


def test_the_gradient_of_some_lines_of_a_matrix_stays_factored() -> None:
    rows, twin = make("outer+outer")
    given = (torch.Size([B, 7, 5]), 1, 2, 5, 1)
    padded = torch.ops.aten.slice_backward(3 * rows, *given)
    assert isinstance(padded, FactoredTensor)
    assert not padded.is_dense
    same(padded, torch.ops.aten.slice_backward(3 * twin, *given))
    same(torch.ops.aten.slice_backward(rows, [B, 3, 9], 2, 4, 9, 1)[..., 4:], twin)


def test_a_changed_factor_is_refused() -> None:
    g, a = torch.randn(B, 2, 3), torch.randn(B, 2, 5)
    rows = FactoredTensor.of(Outer.of(g, a, torch.float64)) * 2
    held = rows.clone()
    a.add_(1)
    with pytest.raises(PerSampleError, match=r"changed in place.*materialize=True"):
        rows.sum(0)
    held.sum(0)


def through_a_file(rows: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(lambda g: pickle.loads(pickle.dumps(g)), id="pickle"),
        pytest.param(through_a_file, id="save"),
    ],
)
def test_copies(pair: tuple[FactoredTensor, Tensor], copied: Callable[[Tensor], Tensor]) -> None:
    """They keep their factors, in memory of their own."""
    rows, twin = pair
    scaled, kinds, dense = rows * 2, [type(term) for term in rows.terms()], rows * 1
    assert dense.dense() is not None
    copies = [copied(rows), copied(scaled), copied(rows.view(B, 15)), copied(rows.float())]
    assert all([type(term) for term in each.terms()] == kinds for each in copies)  # type: ignore[attr-defined]
    for factor in [factor for term in rows.terms() for factor in term.factors]:
        factor.zero_()
    same(copies[0], twin)
    same(copies[1], 2 * twin)
    same(copies[2], twin.view(B, 15))
    torch.testing.assert_close(plain(copies[3]), twin.float(), rtol=1e-5, atol=1e-6)
    same(copied(dense), twin)


def saved_size(rows: object) -> int:
    file = io.BytesIO()
    torch.save(rows, file)
    return file.getbuffer().nbytes


@pytest.mark.parametrize("choose", [lambda rows: rows, lambda rows: rows[1:3]], ids=["all", "some"])
def test_a_file_has_the_size_of_the_factors(choose: Callable[[Tensor], Tensor]) -> None:
    g, a = torch.randn(B, 2, 300), torch.randn(B, 2, 200)
    rows = choose(FactoredTensor.of(Outer.of(g, a, torch.float64)))
    assert len(rows) * 2 * 500 * 8 < saved_size(rows) < len(rows) * 2 * 500 * 8 + 4096


def test_factors_in_common_are_saved_once() -> None:
    g, h, a = (torch.randn(B, 2, 300) for _ in range(3))
    both = {name: FactoredTensor.of(Outer.of(factor, a, torch.float64)) for name, factor in (("q", g), ("k", h))}
    assert saved_size(PerSampleGrads(both)) < B * 2 * 900 * 8 + 4096


def test_a_file_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr("expanded_nn.factored.SAVED_VERSION", 7)
        torch.save(FactoredTensor.of(outer(2)), file)
    file.seek(0)
    with pytest.raises(PerSampleError, match=r"torch.load: .* in version 7 of the format; wanted 2 at most. Update"):
        torch.load(file)


def test_another_dtype(pair: tuple[FactoredTensor, Tensor]) -> None:
    rows, twin = pair
    single = rows.float()
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.dense(), twin.float(), rtol=1e-5, atol=1e-6)


def test_manners_of_a_tensor(pair: tuple[FactoredTensor, Tensor]) -> None:
    rows, twin = pair
    assert isinstance(rows, Tensor)
    assert (rows.shape, rows.dtype, rows.device) == (twin.shape, twin.dtype, twin.device)
    assert (len(rows), rows.numel(), rows.dim()) == (len(twin), twin.numel(), twin.dim())
    assert "FactoredTensor(shape=(4, 3, 5)" in repr(rows)
    assert rows.data_ptr() == rows.dense().data_ptr()
    for row, expected in zip(rows, twin, strict=True):
        same(row, expected)


@pytest.mark.parametrize("positions", [1, 2])
def test_a_coefficient_stays_within_half_precision(positions: int) -> None:
    g, a = torch.full((B, positions, 8), 1e-3).half(), torch.full((B, positions, 5), 500.0).half()
    rows, expected = FactoredTensor.of(Outer.of(g, a, torch.float16)) * 256, 256 * 0.5 * positions
    weights = torch.full((B,), 1 / B)
    torch.testing.assert_close(rows.weighted_sum(), torch.full((8, 5), B * expected).half(), rtol=1e-2, atol=0)
    torch.testing.assert_close(rows.weighted_sum(weights), torch.full((8, 5), expected).half(), rtol=1e-2, atol=0)
    by_row = Outer.of(g, a, torch.float16).scaled(torch.full((B,), 256.0).half())
    torch.testing.assert_close(by_row.dense(), torch.full((B, 8, 5), expected).half(), rtol=1e-2, atol=0)
    torch.testing.assert_close(rows.dense(), torch.full((B, 8, 5), expected).half(), rtol=1e-2, atol=0)


def test_a_product_with_a_vector_does_not_vanish_before_its_coefficient() -> None:
    g, a = torch.full((B, 1, 8), 4e-6).half(), torch.full((B, 1, 5), 0.02).half()
    rows, vector = FactoredTensor.of(Outer.of(g, a, torch.float16)) * 256, torch.full((8, 5), 0.05).half()
    expected = 256 * (g.double()[:, :, :, None] * a.double()[:, :, None] * vector.double()).sum((1, 2, 3))
    torch.testing.assert_close(rows.matvec(vector).double(), expected, rtol=1e-2, atol=0)


def test_a_sum_of_half_precision_rows_has_its_coefficient_before_it_is_rounded() -> None:
    rows = FactoredTensor.of(Dense.of(torch.full((256, 3), 500.0).half()).scaled(1 / 256))
    torch.testing.assert_close(rows.sum(0), torch.full((3,), 500.0).half())
    torch.testing.assert_close(rows.weighted_sum(torch.full((256,), 0.5)), torch.full((3,), 250.0).half())


@pytest.mark.parametrize(
    "change",
    [
        *(lambda rows: rows * torch.full((B, 1, 1), 1e-3).half(), lambda rows: rows * torch.tensor(1e-3)),
        *(lambda rows: rows / torch.tensor(1000.0), lambda rows: rows * 1e-3, lambda rows: rows / 1000),
        lambda rows: torch.add(torch.zeros_like(rows), rows, alpha=1e-3),
    ],
)
def test_rows_of_float16_do_not_vanish_by_a_factor(change: Callable[[Tensor], Tensor]) -> None:
    g, a = torch.full((B, 2, 8), 2e-6).half(), torch.full((B, 2, 5), 400.0).half()
    rows = FactoredTensor.of(Outer.of(g, a, torch.float16))
    expected = 1e-3 * FactoredTensor.of(Outer.of(g, a, torch.float16)).dense().double()
    torch.testing.assert_close(plain(change(rows)).double(), expected, rtol=5e-2, atol=0)


def test_rows_in_bfloat16_whose_positions_cancel() -> None:
    """Rounded factors would make other rows."""
    a = torch.randn(B, 50, 1, 5).expand(B, 50, 2, 5) + 1e-2 * torch.randn(B, 50, 2, 5)
    g = torch.tensor([1.0, -1.0]).repeat(50)[None, :, None] * torch.ones(B, 100, 3)
    rows = FactoredTensor.of(Outer.of(g.float(), a.flatten(1, 2).float(), torch.float32))
    narrow = rows.to(torch.bfloat16)
    assert torch.equal(plain(narrow), rows.dense().bfloat16())


@pytest.mark.parametrize("kind", ["outer_2", "one_hot", "patches"])
@pytest.mark.parametrize(
    "index",
    [
        *(slice(1, 3), slice(2, 10), slice(5, 7), slice(None)),
        *([5, 1], [2, 2, 9, 8, 11], [0, 4, 8], []),
        *([i % 3 == 1 for i in range(3 * B)], [i == 5 for i in range(3 * B)]),
    ],
    ids=str,
)
def test_some_rows_of_several_passes(kind: str, index: Any) -> None:
    """They stay factored, but for none, and where the passes would be gone through to and fro."""
    parts = [make(kind) for _ in range(3)]
    rows, twin = torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])
    index = torch.tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index
    chosen = rows[index]
    assert not len(chosen) or not rows.is_dense
    same(chosen, twin[index])


def test_rows_of_passes_to_and_fro() -> None:
    parts = [make("outer_2") for _ in range(2)]
    rows, twin = torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])
    order = torch.tensor([0, 4, 1, 5])
    same(rows[order], twin[order])


@pytest.mark.parametrize("kind", ["outer_2", "one_hot", "patches", "dense"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32])
def test_weights_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    rows, twin = make(kind)
    weights = torch.tensor([1, 0, 1, 1]).to(dtype)
    same((rows / 3 * 257).weighted_sum(weights), torch.einsum("b,bij->ij", weights.double(), twin) * 257 / 3)


@pytest.mark.parametrize("kind", ["outer_2", "one_hot", "dense"])
def test_rows_of_narrower_factors_are_scaled_in_their_own_dtype(kind: str) -> None:
    (term,) = KINDS[kind]()
    narrow = term.remake([f.half() if f.is_floating_point() else f for f in term.factors], 1.0, torch.float32)
    scaled = narrow.scaled(torch.full((B,), 1e6, dtype=torch.float32))
    torch.testing.assert_close(scaled.dense(), narrow.dense() * 1e6, rtol=1e-5, atol=10)


def test_a_large_coefficient_overflows_as_numbers_do() -> None:
    rows = FactoredTensor.of(Outer.of(torch.ones(B, 2, 30), torch.ones(B, 2, 50), torch.float64))
    same((rows * 1e200).squared_norms(), torch.full((B,), torch.inf))


def test_a_complex_term_takes_a_coefficient() -> None:
    g, a = torch.randn(B, 2, 3, dtype=torch.complex128), torch.randn(B, 2, 5, dtype=torch.complex128)
    term = Outer.of(g, a, torch.complex128)
    same(term.scaled(3.0).dense(), 3 * term.dense())


def convolution(size: tuple[int, ...], kernel: tuple[int, ...], groups: int = 1, **how: int) -> Patches:
    """A term of many channels at few positions, so that its norms are made from products of those."""
    each = {name: (how.get(name, default),) * len(size) for name, default in ONCE.items()}
    geometry = Geometry(**each, groups=groups)
    row_shape = (8 * groups, 8, *kernel)
    positions = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    ]
    x, g = torch.randn(B, 8 * groups, *size), torch.randn(B, row_shape[0], *positions)
    return Patches.of(g, x, row_shape, geometry, torch.float64)


ONCE = {"stride": 1, "padding": 0, "dilation": 1}
CONVOLUTIONS = {  # two for the same weight
    "1d": lambda: (convolution((5,), (3,), padding=1), convolution((4,), (3,))),
    "2d": lambda: (convolution((2, 3), (2, 3), padding=1), convolution((3, 3), (2, 3))),
    "3d": lambda: (convolution((2,) * 3, (2,) * 3, padding=1), convolution((2, 3, 2), (2,) * 3)),
    "groups": lambda: (convolution((4,), (3,), 3, padding=1), convolution((5,), (3,), 3)),
    "strides": lambda: (convolution((6,), (5,), stride=2, padding=2), convolution((5,), (5,), padding=1)),
    "dilation": lambda: (convolution((7,), (4,), dilation=2, padding=1), convolution((4,), (4,))),
    "gaps": lambda: (convolution((9,), (2,), stride=3), convolution((8,), (2,), stride=3)),
}


@pytest.mark.parametrize("pair", CONVOLUTIONS)
@pytest.mark.parametrize("algorithm", [inner_by_windows, inner_by_entries, Patches.inner])
def test_inner_products_of_convolutions(pair: str, algorithm: Callable[[Patches, Patches], Tensor]) -> None:
    one, two = (term.scaled(number) for term, number in zip(CONVOLUTIONS[pair](), (3.0, -0.5), strict=True))
    for left, right in ((one, one), (one, two), (two, one)):
        same(algorithm(left, right), (left.dense() * right.dense()).flatten(1).sum(1))


def test_rows_that_norms_make_stay_where_they_are_small() -> None:
    """What comes after the norms, as a sum, has them; rows that are taken out, and the parameter's, stay factored."""
    rows, twin = make("outer_30")
    grads = PerSampleGrads({"weight": rows})
    same(grads.norms(), twin.flatten(1).norm(dim=1))
    assert grads._rows["weight"].is_dense
    assert not grads["weight"].is_dense
    assert not rows.is_dense
    term = convolution((9, 9), (7, 7))  # its rows are more than four times as large as its factors
    assert term.norms_take_rows
    large = FactoredTensor.of(term)
    grads = PerSampleGrads({"weight": large})
    grads.norms()
    assert not grads._rows["weight"].is_dense


def test_rows_of_any_layout() -> None:
    """The rows may lie in memory in another order than a new tensor's, as those that a view was the gradient of."""
    rows = torch.randn(B, 5, 3).transpose(1, 2)
    grads = PerSampleGrads({"weight": rows})
    same(grads["weight"].flatten(1), rows.flatten(1))
    same(grads["weight"].view(B, 15), rows.reshape(B, 15))
    same(grads.flatten(), rows.flatten(1))


@pytest.mark.parametrize("write", [*(name for name in WRITES if name != "numpy"), "detached"])  # numpy counts nothing
def test_what_was_computed_from_dense_rows_knows_that_they_were_changed(write: str) -> None:
    """It may share their memory."""
    rows, _ = make("outer_2")
    rows.mT  # noqa: B018 (which makes them dense)
    snapshot, tripled = PerSampleGrads({"w": rows}), 3 * rows
    if write == "detached":
        rows.detach().mul_(0)
    else:
        WRITES[write](rows)
    for read in (snapshot.norms, lambda: tripled.flatten(1).norm(dim=1)):
        with pytest.raises(PerSampleError, match="was changed in place"):
            read()


def test_a_product_with_a_slice_leaves_the_whole_factored() -> None:
    rows, dense = make("outer_2")
    vector = torch.randn(5)
    torch.testing.assert_close(rows[1:3] @ vector, dense[1:3] @ vector)
    torch.testing.assert_close(torch.einsum("boi,i->bo", rows[1:3], vector), dense[1:3] @ vector)
    assert not rows.is_dense
