"""The sample-by-sample loop through the plain model, and how far the rows are from it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from expanded_nn.checking.report import Findings
from expanded_nn.checking.running import Call, Runner, nudged
from expanded_nn.checking.samples import Layout, has_finite, squares

_ROUNDINGS = 10  # an error up to so many times the effect of the inputs' last bits counts as rounding
_LEAST = 100  # a gradient below so many roundings of the loss may be rounding itself


class Loop:
    """The gradient of each sample's own loss through the plain model.

    If the model draws random numbers (`is_random`), the losses are those of one batch.
    """

    def __init__(self, plain: Runner, call: Call, layout: Layout, *, is_random: bool) -> None:
        self.plain, self.call, self.layout, self.is_random = plain, call, layout, is_random

    def compare(self, expanded: nn.Module, losses: list[Tensor], findings: Findings) -> None:
        """Finds the error of the rows of each parameter of `expanded`; `losses` are each sample's own in the batch."""
        names = [name for name, p in self.plain.module.named_parameters() if p.requires_grad]
        rows = {name: getattr(p, "grad_sample", None) for name, p in expanded.named_parameters()}
        differences, norms, used = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), set()
        compared, partly = set(), set()  # names of parameters; samples whose gradients are not finite
        for i, gradients in enumerate(self.gradients(self.call, losses)):
            for name, (grad, was_used) in gradients.items():
                held_rows = rows[name]
                difference, _, norm = squares(torch.zeros_like(grad) if held_rows is None else held_rows[i], grad)
                differences[name] += difference
                norms[name] += norm
                some, all_ = has_finite(grad)
                used |= {name} if was_used else set()
                compared |= {name} if some else set()
                partly |= set() if all_ else {i}
        unused = [name for name in names if name not in used]
        if unused:
            findings.notes.append(
                f"never used: {listed(unused)}; the loss does not depend on them, and they get no rows."
            )
        not_compared = [name for name in names if name in used - compared]
        if not_compared:
            findings.complain(
                "rows",
                not_compared[0],
                f"the gradients of {listed(not_compared)} are not finite for any sample, so they tell nothing",
                "finite gradients",
                "Give it other inputs; torch.autograd.set_detect_anomaly(True) finds what makes a NaN.",
            )
        elif partly:
            findings.notes.append(
                f"the gradients of {len(partly)} sample(s) are not finite, and were not compared where they are not."
            )
        # errors are relative to a gradient's norm, which may be nothing but rounding
        tolerance = findings.tolerance
        total = max(sum(norms.values()), torch.finfo(torch.float64).tiny)
        floor = (10 * tolerance) ** 2 * total
        errors = {name: (differences[name] / max(norms[name], floor)) ** 0.5 for name in used}
        if 0 < max(errors.values(), default=0.0) - tolerance < torch.inf:
            noise = self.noise()
            scales = {name: noise[name] * (_ROUNDINGS / tolerance) ** 2 for name in used}
            least_total = (_LEAST * tolerance**2) ** 2 * sum(float(loss.detach()) ** 2 for loss in losses)
            if total <= least_total and total <= _ROUNDINGS**2 * sum(noise.values()):
                findings.notes.append("the gradients are no more than rounding errors, and were compared as such.")
            else:
                scales = {name: min(total, scale) for name, scale in scales.items()}
            errors = {name: (differences[name] / max(norms[name], floor, scales[name])) ** 0.5 for name in used}
        findings.errors = {name: errors[name] for name in names if name in used}

    def gradients(self, call: Call, losses: list[Tensor]) -> Iterator[dict[str, tuple[Tensor, bool]]]:
        """For each sample, parameter name -> the gradient of its own loss, and whether the loss depends on it.

        A model that draws random numbers takes each sample's own loss from `losses`, those in the batch.
        """
        named = {name: p for name, p in self.plain.module.named_parameters() if p.requires_grad}
        for i in range(call.batch):
            for p in named.values():
                p.grad = None
            loss = losses[i] if self.is_random else self.layout.own_loss(self.plain(call.sample(i)), i)
            if loss.requires_grad:
                loss.backward(retain_graph=self.is_random)
            yield {
                name: (torch.zeros_like(p) if p.grad is None else p.grad, p.grad is not None)
                for name, p in named.items()
            }

    def noise(self) -> dict[str, float]:
        """Parameter name -> the squared rounding error of the loop's gradients.

        It is how much they change when inputs and parameters change in their last bits.
        """
        parameters = list(self.plain.module.parameters())
        values = [p.detach().clone() for p in parameters]
        grads = list(self.gradients(self.call, self.layout.losses(self.plain(self.call))))
        largest: dict[str, float] = {}
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            call = self.call.nudged(generator)
            _fill(parameters, [nudged(p, generator) for p in parameters])
            try:
                nudged_grads = list(self.gradients(call, self.layout.losses(self.plain(call))))
            finally:
                _fill(parameters, values)
            for name in grads[0]:
                pairs = zip(grads, nudged_grads, strict=True)
                change = sum(squares(grad[name][0], nudged_grad[name][0])[0] for grad, nudged_grad in pairs)
                largest[name] = max(change, largest.get(name, 0.0))
        return largest


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@torch.no_grad()
def _fill(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
