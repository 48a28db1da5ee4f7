"""Checking by running: whether a model's per-sample gradients can be trusted on such inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._batch import has_derivatives
from expanded_nn._errors import ConversionError, PerSampleError, complaint
from expanded_nn._module import PerSampleModule
from expanded_nn._report import Problem, Report as Report
from expanded_nn._running import Call, Runner, nudged, undisturbed
from expanded_nn._samples import (
    Layout,
    difference,
    first_mixed,
    last_mixed,
    layer_without_samples,
    sample_loss,
    squares,
)
from expanded_nn._steady import WithoutDropout
from expanded_nn._trace import Guard, Trace
from expanded_nn.convert import convert, revert
from expanded_nn.recording.recorder import Recorder, Settings

_ROUNDINGS = 10  # an error is one of rounding up to so many times what the last bits of the inputs change
_LEAST = 100  # a gradient that is smaller than so many roundings of the loss may be one itself
_REPORT = "If no layer of your own (@expands) is to blame, please report it, with the model."


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Says, by running copies of the model, whether its per-sample gradients can be trusted on such inputs.

    Each sample's output alone is compared with its output in the batch, the gradient of a sample's own loss must not
    reach the other samples inside the model, and the rows of every parameter are compared with the gradients of each
    sample run alone through the plain model. The loss is a fixed random nonlinear function of all floating tensors in
    the output. What is found holds for such inputs: another way through the model is another check.

    Nothing of the model changes, nor the random state, also after an exception. The copies run in the model's own
    dtype, and differences up to the square root of its precision count as rounding (1.5e-8 in float64, 3.5e-4 in
    float32, 3.1e-2 for float32 on a GPU, which may be TF32): `check(model.double(), x.double())` sees more.

    Args:
        model: A converted model, a module that holds layers of this library, or a plain one, of which a copy is
            converted. What it was told by `per_sample` (`batch_first`, `batch_size`, ...) holds here.
        args: The model's inputs, at least 2 samples. Take a B that is the size of no other dimension: a tensor with B
            rows is taken for one row a sample.
        kwargs: The model's inputs by keyword.

    Returns:
        The findings; `print` shows them, and their `raise_for_problems()` raises an error if there are any.

    Raises:
        PerSampleError: If the inputs hold fewer than 2 samples.
        Exception: Whatever the plain model raises on these inputs.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> enn.check(model.eval(), torch.randn(5, 3)).ok
        True
        >>> print(enn.check(model.train(), torch.randn(5, 3)))
        check: ... reason(s) not to trust the per-sample gradients:
          1. 1 (BatchNorm1d): ...
    """
    settings = _settings_of(model)
    with undisturbed(), WithoutDropout() as dropout:
        try:
            plain = revert(model)
            dropout.turn_off(plain)
            expanded = convert(plain)
        except ConversionError as error:
            listed = [each.strip() for each in str(error).splitlines()[1:]] or [str(error)]
            return Report(tuple(Problem("conversion", each.partition(":")[0], each) for each in listed))
        except Exception as error:
            return Report((_uncopied(model, error),))
        expanded.per_sample(**vars(settings))  # type: ignore[operator]
        checking = _Check(plain, expanded, settings, Call.of(plain, settings, (args, kwargs)))
        checking.run()
        if dropout.met:
            checking.notes.append("dropout was switched off in all runs, so that a sample alone can be compared.")
        return checking.report()


def _settings_of(model: nn.Module) -> Settings:
    recorders = [each._recorder for each in model.modules() if isinstance(each, PerSampleModule)]
    return next((each.settings for each in recorders if each is not None), Settings())


def _uncopied(model: nn.Module, error: Exception) -> Problem:
    who, found = type(model).__name__, f"it cannot be copied ({type(error).__name__}: {error})"
    remedy = "Take out what it keeps of an earlier forward, locks and open files before the check."
    return Problem("conversion", who, str(complaint(who, found, "a model that copy.deepcopy takes", remedy)))


class _Check:
    """The copies, the call, and what was found so far."""

    def __init__(self, plain: nn.Module, expanded: nn.Module, settings: Settings, call: Call) -> None:
        self.plain, self.expanded = Runner(plain), Runner(expanded)
        self.settings, self.call, self.batch = settings, call, call.batch
        self.who = type(plain).__name__
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.errors: dict[str, float] = {}
        self.dtype, self.tolerance, self.is_random = torch.float64, 0.0, False

    def report(self) -> Report:
        problems = tuple({problem.text: problem for problem in self.problems}.values())
        if problems and not self.errors:
            self.notes.append("the rows were not compared with the sample-by-sample loop.")
        if problems and self.call.is_ambiguous():
            self.notes.append(f"B = {self.batch} is the size of another dimension too: try another B if that misleads.")
        return Report(problems, tuple(self.notes), self.errors, self.batch, self.dtype, self.tolerance)

    def complain(self, kind: str, where: str, found: str, wanted: str, remedy: str) -> None:
        self.problems.append(Problem(kind, where, str(complaint(where, found, wanted, remedy))))

    def run(self) -> None:
        """Each comparison makes sense only after the one before."""
        with Trace(self.plain.module, with_grads=True) as self.whole:
            self.outputs = self.plain(self.call)
        self.set_tolerance()
        expanded_outputs = self.forward()
        if not (self.counts_samples() and self.is_deterministic() and self.runs_alone() and self.has_samples()):
            return
        losses = self.layout.losses(self.outputs)
        self.find_mixing(losses)
        if not any(each.requires_grad for each in losses):
            self.notes.append("no output depends on a parameter that requires gradients.")
        elif expanded_outputs is not None and self.backward(expanded_outputs):
            self.compare_rows(losses)

    def set_tolerance(self) -> None:
        inside = [each for event in self.whole.events for each in event.values]
        floating = [each for each in (*self.plain.module.parameters(), *inside) if has_derivatives(each)]
        dtypes = {_precision(each): each.dtype for each in floating} or {0.0: self.dtype}
        self.dtype, self.tolerance = dtypes[max(dtypes)], max(dtypes) ** 0.5

    def same(self, one: Tensor, other: Tensor) -> bool:
        return difference(one, other) <= self.tolerance

    # In per-sample mode

    def forward(self) -> list[Tensor] | None:
        """The outputs, `None` if no rows can be right."""
        outputs = None
        with Guard(self.expanded.module) as guard:
            try:
                outputs = self.expanded(self.call)
            except Exception as error:
                if not guard.complaints:
                    self.complain_of(guard.failed or self.who, error)
        self.problems += [_problem("layer", each) for each in guard.complaints]
        return None if guard.complaints else outputs

    def complain_of(self, where: str, error: Exception) -> None:
        found = f"in per-sample mode it raises {type(error).__name__}: {error}"
        self.complain("run", where, found, "the plain model's output", _REPORT)

    def counts_samples(self) -> bool:
        """Whether the model found B samples, which the offsets of bags correct."""
        recorder: Any = self.expanded.module._recorder
        now = recorder.current if isinstance(recorder, Recorder) else None
        if now is not None and now.batch != self.batch:
            found = f"the model counts {now.batch} samples, its first tensor has {self.batch} rows"
            remedy = "Check it with bags as a 2-D input in place of offsets."
            self.complain("run", self.who, found, "one row a sample", remedy)
            return False
        return True

    def backward(self, outputs: list[Tensor]) -> bool:
        """Whether a backward left rows that can be compared."""
        same_number = len(outputs) == len(self.outputs)
        error = max(map(difference, self.outputs, outputs)) if same_number else torch.inf
        if error > self.tolerance:
            found = f"its output in per-sample mode differs from the plain one (by {error:.1e})"
            remedy = "Draw random numbers outside of it." if self.is_random else _REPORT
            self.complain("random" if self.is_random else "rows", self.who, found, "the same output", remedy)
            return False
        losses = torch.stack(self.layout.losses(outputs))
        loss = losses.mean() if self.settings.loss_reduction == "mean" else losses.sum()
        try:
            loss.backward(retain_graph=True)
        except PerSampleError as error:
            self.problems += [_problem("outside", each) for each in (error, *self.other_complaints(loss))]
        except Exception as error:
            self.complain_of(self.who, error)
        else:
            return True
        return False

    def other_complaints(self, loss: Tensor) -> Iterator[PerSampleError]:
        """A backward stops at the first: one for each parameter."""
        for parameter in self.expanded.module.parameters():
            try:
                if parameter.requires_grad:
                    loss.backward(inputs=[parameter], retain_graph=True)
            except PerSampleError as error:
                yield error
            except RuntimeError:  # a reentrant checkpoint refuses `inputs`
                return

    # A sample alone and in the batch

    def is_deterministic(self) -> bool:
        """Whether the same random state gives the same values; another one may give others."""
        for seed in (0, 1):
            with Trace(self.plain.module) as again:
                self.plain(self.call, seed)
            place = self.whole.first_difference(again, self.same)
            if place is None:
                continue
            where, between = self.whole.before(place)
            if seed == 0:
                found = f"{between}two runs from the same random state differ"
                remedy = "Draw from torch's generators, and keep no state from one call to the next."
                self.complain("random", where, found, "the same values", remedy)
                return False
            self.is_random = True
            self.notes.append(
                f"{where} draws random numbers: outputs alone and in the batch were not compared, mixing was looked "
                "for by gradients, and the loop took each sample's own loss from one batch of the same seed."
            )
        return True

    def runs_alone(self) -> bool:
        """Runs each sample alone; keeps what comes out, and the trace of the last."""
        self.alone: list[list[Tensor]] = []
        for i in range(self.batch):
            self.lone = Trace(self.plain.module)
            try:
                with self.lone:
                    self.alone.append([each.detach() for each in self.plain(self.call.sample(i))])
            except Exception as error:
                where = self.lone.stack[-1]
                if all(problem.where != where for problem in self.problems):
                    found = f"on sample {i} alone it raises {type(error).__name__}: {error}"
                    remedy = "Keep statistics within a sample, and squeeze dimensions by their number."
                    self.complain("run", where, found, "a forward that takes a batch of one", remedy)
                return False
        return True

    def has_samples(self) -> bool:
        """Whether the outputs have the samples in a place of their own; keeps the places."""
        self.layout = Layout(self.outputs, self.alone)
        unclear = self.layout.unclear
        if unclear is not None:
            shapes = [[tuple(each.shape) for each in outputs] for outputs in (self.outputs, self.alone[0])]
            found = f"its outputs have the shapes {shapes[0]} for the batch and {shapes[1]} for a sample alone"
            wanted = f"one dimension {self.batch} times as large in output {unclear}"
            self.complain("mixing", self.who, found, wanted, "Keep the samples apart, in one dimension.")
            return False
        left_out = [str(tuple(x.shape)) for x, place in zip(self.outputs, self.layout.places, strict=True) if not place]
        if len(left_out) == len(self.outputs):
            found = f"none of its floating outputs ({', '.join(left_out)}) has one row a sample"
            remedy = "Return tensors, in tuples, lists, dicts or dataclasses, from before they are reduced to a loss."
            self.complain("run", self.who, found, "one at least", remedy)
            return False
        if left_out:
            self.notes.append(f"left out, as no samples are in them: outputs of shape {', '.join(left_out)}.")
        return True

    def find_mixing(self, losses: list[Tensor]) -> None:
        """By the values of a sample alone and in the batch, and by where the gradient of its own loss goes."""
        errors = [self.layout.difference(self.outputs, own, i) for i, own in enumerate(self.alone)]
        i = errors.index(max(errors))
        first = -1
        if not self.is_random and errors[i] > self.tolerance:
            with Trace(self.plain.module) as lone:
                self.plain(self.call.sample(i))
            first = first_mixed(self.whole, lone, i, self.batch, self.tolerance)
            evidence = f"alone and in the batch, sample {i} differs by {errors[i]:.1e} in the output"
            self.complain_of_mixing(first, evidence)
        last = last_mixed(self.whole, self.lone, losses)
        if last is not None and last > first:
            self.complain_of_mixing(last, "the gradient of a sample's own loss reaches others")

    def complain_of_mixing(self, place: int, evidence: str) -> None:
        where, between = self.whole.before(place)
        if any(problem.where == where and between in problem.text for problem in self.problems):
            return
        self.complain(
            "mixing",
            where,
            f"{between}the result for a sample depends on the other samples ({evidence})",
            "each sample's result from that sample alone",
            "Normalise, pool, attend and route within a sample: GroupNorm for BatchNorm, or its eval mode; attention "
            "with batch_first=True where the samples come first.",
        )

    # Rows

    def compare_rows(self, losses: list[Tensor]) -> None:
        """Compares the rows with the gradient of each sample's own loss through the plain model."""
        plain = [name for name, p in self.plain.module.named_parameters() if p.requires_grad]
        rows = {name: getattr(p, "grad_sample", None) for name, p in self.expanded.module.named_parameters()}
        parts, norms, used = dict.fromkeys(plain, 0.0), dict.fromkeys(plain, 0.0), set()
        for i, own in enumerate(self.gradients(self.call, losses)):
            for name, (grad, was_used) in own.items():
                part, _, norm = squares(_row(rows[name], i, self.batch, grad), grad)
                parts[name] += part
                norms[name] += norm
                used |= {name} if was_used else set()
        unused = [name for name in plain if name not in used]
        if unused:
            self.notes.append(f"never used: {_listed(unused)}; no output depends on them, they get no rows.")
        # a gradient may vanish but for rounding
        total = max(sum(norms.values()), torch.finfo(torch.float64).tiny)
        least = (10 * self.tolerance) ** 2 * total
        errors = {name: (parts[name] / max(norms[name], least)) ** 0.5 for name in used}
        if 0 < max(errors.values(), default=0.0) - self.tolerance < torch.inf:
            noise = self.noise()
            scales = {name: noise[name] * (_ROUNDINGS / self.tolerance) ** 2 for name in used}
            least_total = (_LEAST * self.tolerance**2) ** 2 * sum(float(each.detach()) ** 2 for each in losses)
            if total <= least_total and total <= _ROUNDINGS**2 * sum(noise.values()):
                self.notes.append("the gradients are no more than rounding errors, and were compared as such.")
            else:
                scales = {name: min(total, scale) for name, scale in scales.items()}
            errors = {name: (parts[name] / max(norms[name], least, scales[name])) ** 0.5 for name in used}
        self.errors = {name: errors[name] for name in plain if name in used}
        self.complain_of_rows({name: error for name, error in self.errors.items() if error > self.tolerance})

    def gradients(self, call: Call, losses: list[Tensor]) -> Iterator[dict[str, tuple[Tensor, bool]]]:
        """For each sample, parameter name -> the gradient of its own loss through the plain model, if it has one.

        Args:
            call: The batch.
            losses: Each sample's own loss in it, for a model that draws random numbers.
        """
        named = {name: p for name, p in self.plain.module.named_parameters() if p.requires_grad}
        for i in range(self.batch):
            for p in named.values():
                p.grad = None
            loss = losses[i] if self.is_random else sample_loss(self.layout.kept(self.plain(call.sample(i))), i)
            if loss.requires_grad:
                loss.backward(retain_graph=self.is_random)
            yield {
                name: (torch.zeros_like(p) if p.grad is None else p.grad, p.grad is not None)
                for name, p in named.items()
            }

    def noise(self) -> dict[str, float]:
        """Parameter name -> how much the loop's gradients owe to rounding, squared.

        It is what changes where inputs and parameters change by no more than rounding does.
        """
        parameters = list(self.plain.module.parameters())
        before = [p.detach().clone() for p in parameters]
        own = list(self.gradients(self.call, self.layout.losses(self.plain(self.call))))
        most: dict[str, float] = {}
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            call = self.call.nudged(generator)
            _fill(parameters, [nudged(p, generator) for p in parameters])
            try:
                other = list(self.gradients(call, self.layout.losses(self.plain(call))))
            finally:
                _fill(parameters, before)
            for name in own[0]:
                now = sum(squares(one[name][0], two[name][0])[0] for one, two in zip(own, other, strict=True))
                most[name] = max(now, most.get(name, 0.0))
        return most

    def complain_of_rows(self, errors: dict[str, float]) -> None:
        """By layer, where the layer took for samples what are none."""
        layers: dict[tuple[str, str], list[str]] = {}
        for name in errors:
            layers.setdefault(layer_without_samples(self.whole, self.lone, name, self.call), []).append(name)
        for (where, shape), names in layers.items():
            worst = max(names, key=errors.__getitem__)
            differ = f"the rows of {_listed(names)} differ from the sample-by-sample loop (by {errors[worst]:.1e})"
            if where:
                found = (
                    f"its input has shape {shape} for the batch and for a sample alone, so its rows are no samples; "
                )
                remedy = "Give it a batch dimension: index.unsqueeze(0) for positions that all samples share."
                self.complain("rows", where, found + differ, f"{self.batch} rows, one a sample, or 1", remedy)
            else:
                remedy = "See to the problem above first." if self.problems else _REPORT
                self.complain("rows", worst, differ, f"at most {self.tolerance:.1e}", remedy)


def _problem(kind: str, error: PerSampleError) -> Problem:
    return Problem(kind, str(error).partition(": ")[0], str(error))


@torch.no_grad()
def _fill(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _precision(tensor: Tensor) -> float:
    return 2.0**-10 if tensor.is_cuda and tensor.dtype is torch.float32 else torch.finfo(tensor.dtype).eps


def _row(rows: Tensor | None, i: int, batch: int, parameter: Tensor) -> Tensor:
    if rows is None:
        return torch.zeros_like(parameter)
    return rows[i] if len(rows) == batch else rows  # another number of rows is as wrong as can be
