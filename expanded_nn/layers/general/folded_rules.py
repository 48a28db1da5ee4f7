"""Rules for parameters that meet folded tensors, of which it is known to which sample each row `x[i]` belongs.

In a mixture of experts each expert takes some rows of `(B * T, features)`; other models fold the images of all samples.
In such forwards the parameters of all layers within are `Batched`.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.functions import functions, is_in_place
from expanded_nn.core import cost
from expanded_nn.layers.embedding import embedding
from expanded_nn.layers.general.batched import (
    Batched,
    Rule,
    Run,
    as_it_looks,
    beside,
    is_own,
    known,
    own_of,
    refuse_unless,
    run_of,
)
from expanded_nn.layers.general.folded import linear_of_rows
from expanded_nn.layers.general.owners import Arrangement, Owners
from expanded_nn.recording.places import einsum_names


def as_arranged(run: Run, y: Tensor, arrangement: Arrangement) -> Tensor:
    """A result whose rows belong to the samples as those of an operand do."""
    samples = arrangement.samples
    known(run.owners).note_like(y, samples, samples.shape if samples.dim() == y.dim() else (-1, *[1] * (y.dim() - 1)))
    return y


def embedding_of_rows(func: Any, index: Tensor, samples: Tensor, own: Batched, options: dict[str, Any]) -> Tensor:
    """A look-up by an index of which it is known whose each of its numbers is."""
    owners = known(own.run.owners)
    arrangement = owners.one_by_one(samples, index.shape)
    refuse_unless(arrangement.length is not None or not options.get("scale_grad_by_freq"))  # zeros fill others up
    own.run.note(func, whole=True)
    y = arrangement.unpadded(embedding(arrangement.padded(index.flatten()), own.value, **options))
    y = y.view(*index.shape, -1)
    owners.note_like(y, samples, (*samples.shape, 1))
    return y


def own_rows(own: Batched, arrangement: Arrangement, dims: int) -> Tensor:
    """For each row the value of its sample; of a table with an entry for each row, that entry."""
    count = len(arrangement.owner)
    if own.rank == dims and own.value.shape[1] == count and not cost.is_symbol(own.run.batch):
        return own.value[arrangement.owner, torch.arange(count, device=arrangement.owner.device)]
    return arrangement.rows_of(beside(own, dims))


def with_folded_rows(func: Any, args: Any, kwargs: Any, owners: Owners, dims: int) -> Tensor:
    """An elementwise operation with folded tensors; `NotImplemented` where these are what all samples share."""
    run, own = run_of(args), [operand for operand in args if is_own(operand)]
    plain = [operand for operand in args if isinstance(operand, Tensor) and not is_own(operand) and operand.dim()]
    samples = owners.together(plain, dims)
    if samples is None:
        refuse_unless(not is_in_place(func))
        return NotImplemented  # type: ignore[no-any-return]
    arrangement = owners.arranged(samples, max(operand.shape[0] for operand in plain if operand.dim() == dims))
    run.note(func, whole=True)
    have_one_row = all(operand.rank < dims or operand.value.shape[1] == 1 for operand in own)
    if len(plain) == 1 and arrangement.length is not None and have_one_row and not is_in_place(func):
        by_sample = arrangement.padded(plain[0])
        y = func(*(by_sample if x is plain[0] else beside(x, dims + 1) if is_own(x) else x for x in args), **kwargs)
        return as_arranged(run, arrangement.unpadded(y), arrangement)
    of_rows = (own_rows(x, arrangement, dims) if is_own(x) else x for x in args)
    return as_arranged(run, func(*of_rows, **kwargs), arrangement)


def joined_to_rows(func: Any, joined: Sequence[Any], dim: int, run: Run) -> Tensor:
    """Joins parameters and a folded tensor, such as a class token and the patches of images."""
    rows = next(part for part in joined if not is_own(part) and part.requires_grad)
    arrangement = known(run.arranged(rows))
    refuse_unless(dim % rows.dim() > 0 and all(is_own(part) or part is rows for part in joined))
    run.note(func, whole=True)
    parts = [part if part is rows else own_rows(part, arrangement, rows.dim()) for part in joined]
    return as_arranged(run, func(parts, dim), arrangement)


def einsum(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`torch.einsum` with parameters: the samples' index comes in front of the indices of each parameter."""
    names, operands = known(einsum_names(_spelled_out(*args), *args[1:])), args[1:]
    plain = [place for place, operand in enumerate(operands) if not is_own(operand)]
    refuse_unless(not kwargs and all(map(str.isalpha, "".join(names))))
    run, after = run_of(operands), names[-1]
    if len(operands) == 2 and plain == [0] and run.owners is not None and _is_by_expert(*names):
        return product_by_expert(func, operands[0], operands[1], run.owners)
    name = names[plain[0]][0] if plain else next(letter for letter in ascii_letters if letter not in "".join(args[0]))
    refuse_unless(
        all(of_one[:1] == name if place in plain else name not in of_one for place, of_one in enumerate(names[:-1]))
    )
    before = [of_one if place in plain else name + of_one for place, of_one in enumerate(names[:-1])]
    if not plain:
        equation = f"{','.join(before)}->{name}{after}"
        return run.derived(func, lambda *values: torch.einsum(equation, *values), *operands)
    arrangement = run.arranged(operands[plain[0]])
    are_rows = all(run.has_rows(operands[place], 1) for place in plain) if arrangement is None else len(plain) == 1
    refuse_unless(name in after and are_rows)
    run.note(func, whole=True)
    equation = f"{','.join(before)}->{after}"
    if arrangement is None:
        values = (operand.value if is_own(operand) else operand for operand in operands)
        return torch.einsum(equation, *values)
    of_rows = (arrangement.rows_of(operand.value) if is_own(operand) else operand for operand in operands)
    y: Tensor = torch.einsum(equation, *of_rows)
    known(run.owners).note_like(y, arrangement.owner, [-1 if letter == name else 1 for letter in after])
    return y


def _is_by_expert(rows: str, matrices: str, result: str) -> bool:
    """Whether the names are those of such a product, `end,edh->enh`."""
    if not len(rows) == len(matrices) == len(result) == len(set(rows)) == len(set(matrices)) == 3:
        return False
    return (*matrices[:2], *result) == (rows[0], rows[2], rows[0], rows[1], matrices[2])


def _spelled_out(equation: Any, *operands: Any) -> Any:
    """The equation with names for the dimensions of an ellipsis, where it stands for as many in each operand."""
    if not isinstance(equation, str) or "..." not in equation:
        return equation
    named = equation.replace(" ", "").partition("->")[0].split(",")
    ranks = [operand.rank if is_own(operand) else operand.dim() for operand in operands]
    counts = [rank - len(names.replace("...", "")) for names, rank in zip(named, ranks, strict=True)]
    missing = {count for names, count in zip(named, counts, strict=True) if count or "..." in names}
    letters = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(letters[: missing.pop()])) if len(missing) == 1 else equation


def product_by_expert(func: Any, x: Tensor, own: Batched, owners: Owners) -> Tensor:
    """The product of the same rows for each expert, `(E, n, in)`, with the experts' matrices, `(E, in, out)`."""
    samples, rows = known(owners.together([x], 3, along=(0, 2))), x.unbind()
    refuse_unless(len(rows) == own.value.shape[1] > 0)
    arrangement = known(owners.of_rows(rows[0]))
    own.run.note(func, whole=True)
    y = torch.stack([linear_of_rows(of_one, own.part(e).mT, None, arrangement) for e, of_one in enumerate(rows)])
    owners.note(y, samples)
    return y


def _grouped_product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The product of rows `(n, in)`, which stand expert by expert, with the experts' matrices, `(E, in, out)`."""
    x: Tensor = args[0]
    own, ends = own_of(args[1]), kwargs.get("offs", args[2] if len(args) > 2 else None)
    refuse_unless(isinstance(x, Tensor) and not is_own(x))
    options = {name: value for name, value in kwargs.items() if value is not None and name != "offs"}
    owners = known(own.run.owners)
    refuse_unless(isinstance(ends, Tensor) and not options and len(args) < 4)
    refuse_unless(x.dim() == 2 and own.rank == 3 and len(ends) == own.value.shape[1])
    samples, numbers, results = known(owners.together([x], 2, along=(1,))), ends.tolist(), []
    refuse_unless(numbers[-1] == len(x))
    own.run.note(func, whole=True)
    for expert, (start, end) in enumerate(zip([0, *numbers], numbers, strict=False)):
        if start < end:
            arrangement = owners.arranged(samples.expand(len(x), 1)[start:end], end - start)
            results.append(linear_of_rows(x[start:end], own.part(expert).mT, None, arrangement))
    y = torch.cat(results)
    owners.note(y, samples)
    return y


def _data(func: Any, args: Any, kwargs: Any) -> Batched:
    """The value without its history."""
    own = own_of(args[0])
    data = own.run.derived(func, Tensor.detach, own, begins=False)
    data.data_of = own
    return data


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """To itself, as where a module is moved to the dtype that it has."""
    refuse_unless(args[0] is args[1] or (is_own(args[1]) and args[1].data_of is args[0]))


def _no_grad(func: Any, args: Any, kwargs: Any) -> None:
    """The `.grad` of what is no leaf."""


# what only such forwards do, beside the table of `whole.py`
FOLDED_RULES: dict[Any, Rule] = {
    torch._has_compatible_shallow_copy_type: as_it_looks,
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__get__: _no_grad,  # type: ignore[union-attr]
    **dict.fromkeys(functions("grouped_mm", "_grouped_mm"), _grouped_product),
}
