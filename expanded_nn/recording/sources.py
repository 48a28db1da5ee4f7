"""From the rows of a weight that is computed from parameters to the rows of these, factored where that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from expanded_nn.common.traced import is_traced, may_have_hooks
from expanded_nn.core import cost
from expanded_nn.factored import FactoredTensor, materialized, times
from expanded_nn.recording.graph import ELEMENTWISE, graph_of, operation_of, saved_number, shape_of
from expanded_nn.recording.lift import quiet_fallbacks


def rows_of_sources(result: Tensor, sources: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor | None]:
    """The rows of the `sources` that `result` is computed from, by the rows of `result`; some samples at a time."""
    trainable = [source for source in sources if source.requires_grad]
    if not trainable:  # frozen after the forward
        return [None] * len(sources)
    kept: Sequence[Tensor] | None = None
    may_keep = rows.numel() > 0 and not (is_traced() and may_have_hooks())
    if may_keep and isinstance(rows, FactoredTensor) and not rows.is_dense:
        kept = _by_elements(result, trainable, rows) or _by_lines(result, trainable, rows)
    of_trainable = iter(kept or _dense_rows(result, trainable, rows))
    return [next(of_trainable) if source.requires_grad else None for source in sources]


# gradients are tried with such powers of two, up to that and from its inverse on; in these types with any numbers
LARGEST_POWER, TRIED_IN = 30, (torch.float32, torch.float64)

# Number by number, as `mask * parameter`


def _by_elements(result: Tensor, sources: Sequence[Tensor], rows: FactoredTensor) -> list[Tensor] | None:
    """The rows of the only source times its derivative; `None` where numbers of the result come from several."""
    if len(sources) != 1 or not is_elementwise(result, sources[0]):
        return None
    derivative = partial(torch.autograd.grad, result, sources, retain_graph=True)
    (scale,) = derivative(torch.ones_like(result))
    if may_have_hooks():
        trial = _of_all_sizes(result.shape, result.dtype).to(result.device)
        (of_trial,) = derivative(trial)
        product = scale * trial.view(scale.shape)
        # powers of two are multiplied without rounding
        bound = 100 * torch.finfo(result.dtype).eps * product.abs() if result.dtype in TRIED_IN else 0
        if not bool(((of_trial - product).abs() <= bound).all()):
            return None
        if bool(scale.eq(scale.flatten()[0]).all()):
            return [times(rows, float(scale.flatten()[0])).view(-1, *sources[0].shape)]
    return [rows.times_elementwise(scale).view(-1, *sources[0].shape)]


def _of_all_sizes(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Large and small numbers with both signs, in no order: so hooks are found, which show in no graph.

    A hook may bound a gradient, leave small numbers out, round them or subtract their mean. In low precision these are
    powers of two.
    """
    numbers = _few_of_all_sizes(dtype)
    return numbers.repeat(-(-prod(shape) // len(numbers)))[: prod(shape)].view(shape)


@lru_cache(4)
def _few_of_all_sizes(dtype: torch.dtype) -> Tensor:
    """A prime number of them, so that no two lines of a matrix are alike."""
    generator, largest = torch.Generator().manual_seed(0), 8 if dtype == torch.float16 else LARGEST_POWER
    exponents = torch.randint(-largest, largest + 1, (4099,), generator=generator, device="cpu")
    numbers = torch.where(exponents % 2 == 0, 1.0, -1.0) * 2.0 ** exponents.double()
    if dtype in TRIED_IN:
        numbers *= torch.rand(4099, dtype=torch.float64, generator=generator, device="cpu") + 1
    return numbers.to(dtype)


def is_elementwise(result: Tensor, source: Tensor) -> bool:
    """Whether each number of a tensor is computed from the one of `source` in the same place, and no other's."""

    def belongs(node: Any) -> bool:
        if hasattr(node, "variable"):
            return node.variable is source
        has_place = _without_ones(shape_of(node)) == shape and operation_of(node) in BY_PLACE
        return has_place and len(node._input_metadata) == 1

    shape = _without_ones(source.shape)
    return result.dtype == source.dtype and result.is_floating_point() and all(map(belongs, graph_of(result.grad_fn)))


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A shape without the dimensions of size 1 at its front."""
    first = next((number for number, size in enumerate(shape) if size != 1), len(shape))
    return list(shape[first:])


# the operations that leave all numbers in their places where the shape stays the same but for sizes of 1 at its front
SAME_PLACES = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Select", "Slice", "Expand"}
BY_PLACE, OF_LINES = ELEMENTWISE | SAME_PLACES, {"Neg", "Clone", "Alias"} | SAME_PLACES

# Line by line, as `weight_norm`; or all lines alike, as `spectral_norm`

FEWEST_IN_A_LINE = 8  # else the trial would tell nothing


def _by_lines(result: Tensor, sources: Sequence[Tensor], rows: FactoredTensor) -> list[Tensor] | None:
    """The rows of a parameter whose lines, each times a number, are those of the result; `None` elsewhere.

    Where line o is `f(p[o], s[o]) p[o]` with a number `f`, a gradient `G` of the result gives
    `alpha[o] G[o] + <G[o], p[o]> q[o]` for the parameter p, and `gamma[o] <G[o], p[o]>` for the numbers s, which may be
    another parameter. These are found by the gradients for two `G`. If there is one `f` for all, so there is one line.
    """
    found = _lines_and_numbers(result, sources)
    if found is None or any(term.row_shape != tuple(result.shape) for term in rows.terms()):
        return None
    parameter, numbers, lines = found

    def derivatives(of_result: Tensor, power: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """Those of a gradient, computed from another one that is so many times as large."""
        of_result = (of_result * power).view(result.shape)
        grads = torch.autograd.grad(result, [parameter, *numbers], of_result, retain_graph=True)
        return grads[0].reshape(lines, -1) / power, [grad.reshape(lines) / power for grad in grads[1:]]

    p = parameter.detach().reshape(lines, -1).clone()  # a step of an optimizer changes the parameter
    trial = torch.arange(p.numel(), dtype=p.dtype, device=p.device).mul_(12.9898).sin_().view_as(p)
    (of_p, numbers_of_p), (of_trial, numbers_of_trial) = derivatives(p), derivatives(trial, 2.0**LARGEST_POWER)
    squares, slope = p.square().sum(1), (trial * p).sum(1)
    squares = torch.where(squares == 0, 1.0, squares)  # of a line of zeros, whose slopes are zero as well
    along = (slope / squares)[:, None]
    across, of_across = trial - along * p, of_trial - along * of_p  # <across, p> is zero
    alpha = (of_across * across).sum(1) / across.square().sum(1)
    q = (of_p - alpha[:, None] * p) / squares[:, None]
    gammas = [of / squares for of in numbers_of_p]
    if may_have_hooks():
        bound = 1000 * torch.finfo(p.dtype).eps
        of_small, _ = derivatives(trial, 2.0**-LARGEST_POWER)  # as for `_of_all_sizes`
        left = (of_trial - alpha[:, None] * trial - slope[:, None] * q).norm(dim=1) + (of_trial - of_small).norm(dim=1)
        are_as_said = [left <= bound * of_trial.norm(dim=1)]
        for gamma, of in zip(gammas, numbers_of_trial, strict=True):
            are_as_said.append((of - gamma * slope).abs() <= bound * (gamma * squares).abs())
        if not bool(torch.cat(are_as_said).all()):
            return None
    slopes = rows.matvec_by_line(p)
    of_parameter = rows.with_lines(alpha, slopes, q).view(-1, *parameter.shape)
    of_numbers = [(slopes * gamma).view(-1, *each.shape) for each, gamma in zip(numbers, gammas, strict=True)]
    by_source = dict(zip(map(id, (parameter, *numbers)), (of_parameter, *of_numbers), strict=True))
    return [by_source[id(source)] for source in sources]


def _lines_and_numbers(result: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], int] | None:
    """The one source of the result's shape, those of a number for each line, and how many lines there are."""
    shape = tuple(result.shape)
    if len(shape) < 2 or result.dtype not in TRIED_IN or result.numel() < FEWEST_IN_A_LINE * shape[0]:
        return None
    parameters = [source for source in sources if tuple(source.shape) == shape and source.dtype == result.dtype]
    if len(parameters) != 1:
        return None
    numbers = [source for source in sources if source is not parameters[0]]
    for lines in (shape[0], 1):
        if all(each.numel() == lines for each in numbers) and _Scaled(parameters[0], lines).is_line(result.grad_fn):
            return parameters[0], numbers, lines
    return None


def _asked_once(question: Callable[[_Scaled, Any], bool]) -> Callable[[_Scaled, Any], bool]:
    """A question about a node whose answer is kept: a node may be met by many ways."""

    def answer(scaled: _Scaled, node: Any) -> bool:
        key = question, node
        if key not in scaled.known:
            scaled.known[key] = question(scaled, node)
        return scaled.known[key]

    return answer


class _Scaled:
    """What the nodes of a graph stand for: lines of a parameter, each times a number of its own; or such numbers."""

    def __init__(self, parameter: Tensor, lines: int) -> None:
        self.parameter, self.lines = parameter, lines
        self.shape = _without_ones(parameter.shape)
        self.one_each = _without_ones((lines, *[1] * (parameter.dim() - 1)))
        self.known: dict[Any, bool] = {}

    @_asked_once
    def is_line(self, node: Any) -> bool:
        """Whether a node stands for the lines, each times a number of its own."""
        if node is None:
            return False
        if hasattr(node, "variable"):
            return node.variable is self.parameter
        if _without_ones(shape_of(node)) != self.shape:
            return False
        operation, parents = operation_of(node), [parent for parent, _ in node.next_functions]
        if operation == "WeightNormInterface":
            is_by_line = shape_of(node)[0] == self.lines and saved_number(node._saved_dim) == 0
            return is_by_line and self.is_line(parents[0]) and (parents[1] is None or self.is_number(parents[1]))
        if operation in ("Mul", "Div"):
            is_turned = operation == "Mul" and not self.is_line(parents[0])
            line, number = parents[::-1] if is_turned else parents
            constant = "_saved_self" if is_turned else "_saved_other"
            is_number = self.is_number(number) if number is not None else self.is_constant(node, constant)
            return is_number and self.is_line(line)
        return operation in OF_LINES and self.is_line(parents[0])

    def is_constant(self, node: Any, name: str) -> bool:
        """Whether what a node has saved by a name is one number for each line, or one for all."""
        try:
            saved = getattr(node, name)
        except RuntimeError:  # it was changed since
            return False
        return isinstance(saved, Tensor) and (saved.numel() == 1 or _without_ones(saved.shape) == self.one_each)

    @_asked_once
    def is_number(self, node: Any) -> bool:
        """Whether a node stands for one number for each line, made of that line and of constants."""
        if hasattr(node, "variable"):
            return node.variable is not self.parameter and node.variable.numel() == self.lines
        operation, parents = operation_of(node), [parent for parent, _ in node.next_functions if parent is not None]
        if operation == "Expand":
            return _without_ones(shape_of(parents[0])) == self.one_each and self.is_number(parents[0])
        if _without_ones(shape_of(node)) != self.one_each:
            return False
        if self.lines == 1:  # whatever it is made of
            return True
        if operation in ("LinalgVectorNorm", "Norm", "Sum", "Mean"):
            return all(map(self.is_of_line, parents))
        return operation in BY_PLACE and all(map(self.is_number, parents))

    @_asked_once
    def is_of_line(self, node: Any) -> bool:
        """Whether the numbers of a node are made of those of the parameter in the same line, and of constants."""
        if hasattr(node, "variable"):
            return node.variable is self.parameter
        if operation_of(node) not in BY_PLACE or _without_ones(shape_of(node)) != self.shape:
            return False
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        return all(self.is_of_line(parent) or self.is_number(parent) for parent in parents)


# Any other way


def _dense_rows(result: Tensor, sources: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor | None]:
    """The rows of trainable sources, some samples at a time."""
    batch, at_once = rows.shape[0], cost.at_once(result.numel(), cost.DERIVED_AT_ONCE)
    if is_traced() or at_once >= batch:
        return _rows_at_once(result, sources, rows)
    parts = (_rows_at_once(result, sources, rows[first : first + at_once]) for first in range(0, batch, at_once))
    all_rows: list[Tensor | None] = []
    for number, grads in enumerate(parts):
        all_rows = all_rows or [None if grad is None else grad.new_empty(batch, *grad.shape[1:]) for grad in grads]
        for whole, grad in zip(all_rows, grads, strict=True):
            if whole is not None and grad is not None:
                whole[number * at_once : (number + 1) * at_once] = grad
    return all_rows


def _rows_at_once(result: Tensor, sources: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor | None]:
    """The same for a few samples, all at once."""
    rows = materialized(rows)
    gradients = partial(torch.autograd.grad, result, sources, retain_graph=True, allow_unused=True)
    if rows.shape[0] == 1:
        return [None if grad is None else grad[None] for grad in gradients(rows[0])]
    with quiet_fallbacks():
        if cost.is_symbol(rows.shape[0]):  # is_grads_batched takes none, and vmap follows no checkpoint
            return torch.vmap(gradients)(rows)
        return gradients(rows, is_grads_batched=True)
