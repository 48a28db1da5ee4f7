"""The check of a model's forward, and that of a whole training step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expanded_nn._errors import PerSampleError, PerSampleWarning, complaint, named
from expanded_nn.checking.loop import Loop, listed
from expanded_nn.checking.report import Findings, Problem, Report as Report
from expanded_nn.checking.running import Call, Runner, Step
from expanded_nn.checking.samples import GivenLosses, Layout, difference, first_mixed, last_mixed, layer_without_samples
from expanded_nn.checking.trace import ErrorCollector, Shapes, Trace
from expanded_nn.common.batch import may_have_derivatives
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.steady import OutsideBefore
from expanded_nn.layers.general.plain import RightNorms
from expanded_nn.layers.norm import standardized
from expanded_nn.recording.graph import leaves_behind
from expanded_nn.recording.recorder import Recorder, Settings, recorder_of

_APART = (
    "Normalize, pool, attend and route within a sample: GroupNorm for BatchNorm, or its eval mode; attention with "
    "batch_first=True where the samples come first."
)
_MEAN = (
    "Average over a sample's own parts before the samples are averaged: class weights, ignore_index and weighted means "
    'divide by a number of the whole batch, so take reduction="none", each sample\'s own mean, and the mean of these. '
    "Leave penalties on the weights to the optimizer."
)
_OWN = (
    "Compute a sample's loss from that sample alone: one that compares samples is no sample's own. Of "
    "torch.autograd.grad take the sum over the samples, not their mean."
)
_AS_ARGUMENTS = "Labels and the like are arguments of check: check(model, x, y, loss=lambda model, x, y: ...)."
_REPORT = (
    "Look for a result of expanded_nn.expanded, (B, *shape), that broadcasts with another shape: a parameter without "
    "dimensions becomes (B,), and with (B, 1) that makes (B, B), so give it shape (1,). If neither that nor a layer of "
    "your own (@expands) is to blame, please report it, with the model."
)


def strange_loss(problem: str) -> TypeError:
    wanted = "a function of the model and the arguments, which calls the model itself: loss(model, x, y)"
    remedy = "Write it as check(model, x, y, loss=lambda model, x, y: criterion(model(x), y))."
    return TypeError(str(complaint("check", problem, wanted, remedy)))


def _refuse_other_arguments(model: nn.Module, arguments: tuple[Any, Any], error: TypeError) -> None:
    """Raises where an error comes from arguments that a forward, or a loss, does not take."""
    args, kwargs = arguments
    function: Any = model.forward
    if isinstance(model, Step):
        function, args = model.loss, (model.model, *args)
        function = function.forward if isinstance(function, nn.Module) else function
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError as mismatch:
        if isinstance(model, Step):
            problem = f"loss does not take the model and the arguments that check was given ({mismatch})"
            raise strange_loss(problem) from error
        remedy = "Give a target to the loss: check(model, x, y, loss=lambda model, x, y: criterion(model(x), y))."
        problem = f"the forward of {type(model).__name__} does not take the arguments ({mismatch})"
        raise TypeError(str(complaint("check", problem, "what the model is called with", remedy))) from error
    except ValueError:  # it has no signature
        pass


class Check:
    """The check of a model's forward."""

    whole: Trace  # of the batch through the plain copy
    outputs: list[Tensor]  # of the batch
    lone: Trace  # of the last sample alone
    shapes_alone: list[Shapes]  # of each sample alone
    layout: Layout  # where the samples are in the outputs
    remedy_alone = "Keep statistics within a sample, and squeeze dimensions by their number."

    def __init__(self, plain: nn.Module, expanded: nn.Module, settings: Settings, call: Call) -> None:
        self.outside = OutsideBefore([*plain.modules(), *expanded.modules()])
        self.plain, self.expanded = Runner(plain, self.outside), Runner(expanded, self.outside)
        self.call, self.reduction = call, settings.loss_reduction
        self.findings = Findings(call.batch)
        self.is_random = False  # whether the model draws random numbers

    def complain(self, *words: str) -> None:
        self.findings.complain(*words)

    @property
    def who(self) -> str:
        return named("", self.plain.module)

    def run(self, model: nn.Module) -> None:
        """Runs all comparisons; the parameters of `model`, which was copied, must not be used by the copies."""
        with Trace(self.plain.module, with_grads=True) as self.whole:
            try:
                self.outputs = self.plain(self.call)
            except TypeError as error:
                _refuse_other_arguments(self.plain.module, self.call.arguments, error)
                raise
        self.set_tolerance()
        leaves = leaves_behind(*(output.grad_fn for output in self.outputs))
        used = {id(leaf) for leaf in leaves}
        originals = [name for name, p in model.named_parameters() if id(p) in used]
        if originals:
            problem = f"{listed(originals)} of the model itself came into the output of its copy"
            remedy = "Use self, or the model that `loss` is called with; a lambda made earlier keeps the model it saw."
            self.complain("outside", originals[0], problem, "the parameters of the module that runs", remedy)
            return
        watched = [(recorder, leaf) for leaf in leaves if (recorder := recorder_of(leaf)) is not None]
        if watched:
            recorder, leaf = watched[0]
            problem = "it is a parameter of another model, which is in per-sample mode as well and would get rows"
            remedy = "Switch per_sample(False) on the other model for the check."
            self.complain("outside", recorder.name_of(leaf), problem, "one model in per-sample mode", remedy)
            return
        with meanwhile(*leaves, grad=None):
            self.compare()

    def compare(self) -> None:
        """Runs the comparisons one after the other: each makes sense only if those before it found nothing."""
        expanded_outputs = self.forward()
        if not (self.counts_samples() and self.is_deterministic()):
            return
        alone = self.run_alone()
        if alone is None or not self.has_samples(alone):
            return
        is_comparable = self.find_mixing()
        if not self.layout.total(self.outputs, self.reduction).requires_grad:
            self.say_that_nothing_depends()
        elif expanded_outputs is not None and self.backward(expanded_outputs) and self.has_rows() and is_comparable:
            loop = Loop(self.plain, self.call, self.layout, is_random=self.is_random)
            self.compare_rows(loop)
            self.complain_of_rows()

    def say_that_nothing_depends(self) -> None:
        """Notes that there is nothing to compare."""
        self.findings.notes.append("no output depends on a parameter that requires gradients.")

    def compare_rows(self, loop: Loop) -> None:
        """Compares the rows with the loop.

        Torch's own LayerNorm has a wrong third derivative, which a loss of second derivatives needs, and its BatchNorm
        in eval mode a wrong gradient of one sample whose memory is permuted. So rows that differ are compared once
        more, with these corrected.
        """
        findings, losses = self.findings, self.layout.losses(self.outputs)
        loop.compare(self.expanded.module, losses, findings)
        wrong = [name for name, error in findings.errors.items() if error > findings.tolerance]
        if not wrong or self.is_random:
            return
        errors = findings.errors
        with PlainLayerNorms():
            loop.compare(self.expanded.module, losses, findings)
        if max(findings.errors.values()) <= findings.tolerance:  # so there were some
            findings.notes.append(
                f"for {listed(wrong)} the loop took norms in another way, as derivatives of torch's own are "
                "wrong: the third ones of LayerNorm, and those of a single permuted sample of BatchNorm in eval mode."
            )
        else:
            findings.errors = errors

    def set_tolerance(self) -> None:
        values = [value for event in self.whole.events for value in event.values]
        floating = [tensor for tensor in (*self.plain.module.parameters(), *values) if may_have_derivatives(tensor)]
        dtypes = {_precision(tensor): tensor.dtype for tensor in floating} or {0.0: torch.float64}
        self.findings.dtype, self.findings.tolerance = dtypes[max(dtypes)], max(dtypes) ** 0.5

    def same(self, value: Tensor, other_value: Tensor) -> bool:
        return difference(value, other_value) <= self.findings.tolerance

    # In per-sample mode

    def forward(self) -> list[Tensor] | None:
        """The outputs in per-sample mode; `None` if no rows can be right."""
        outputs = self.expanded_outputs()
        if outputs is not None or self.findings.problems:
            return outputs
        with ErrorCollector(self.expanded.module) as collector:
            try:
                outputs = self.expanded(self.call)
            except Exception as error:
                if not collector.errors:
                    self.complain_of(collector.failed or self.who, error)
        self.findings.problems += [Problem.of("layer", error) for error in collector.errors]
        return None if collector.errors else outputs

    def expanded_outputs(self) -> list[Tensor] | None:
        """The outputs, with a note for each module that goes sample by sample; `None` after an error.

        Samples that alone give other results than the batch are a problem that says all: the layers say no more.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerSampleWarning)
            try:
                outputs = self.expanded(self.call)
            except Exception as error:
                if isinstance(error, PerSampleError) and error.about == "results":
                    self.findings.problems.append(Problem.of("mixing", error))
                return None
        for path, module in self.expanded.module.named_modules():
            learned = getattr(module, "_learned", None)
            if learned is not None:
                name = named(path, module)
                why = learned.why.removeprefix(f"{name}: ")
                self.findings.notes.append(f"{name} runs sample by sample, as {why}")
        return outputs

    def complain_of(self, where: str, error: Exception) -> None:
        if isinstance(error, PerSampleError):
            self.findings.problems.append(Problem.of("outside", error))
            return
        problem = f"in per-sample mode it raises {type(error).__name__}: {error}"
        self.complain("run", where, problem, "the plain model's output", _REPORT)

    def counts_samples(self) -> bool:
        """Whether the model counts as many samples as its first tensor has; offsets of bags say another number."""
        recorder: Any = self.expanded.module._recorder
        current_pass = recorder.current_pass if isinstance(recorder, Recorder) else None
        if current_pass is not None and current_pass.batch != self.call.batch:
            problem = f"the model counts {current_pass.batch} samples, its first tensor has {self.call.batch} rows"
            remedy = "Check it with bags as a 2-D input in place of offsets."
            self.complain("run", self.who, problem, "one row per sample", remedy)
            return False
        return True

    def backward(self, outputs: list[Tensor]) -> bool:
        """Whether a backward left rows that can be compared."""
        same_number = len(outputs) == len(self.outputs)
        error = max(map(difference, self.outputs, outputs)) if same_number else torch.inf
        if error > self.findings.tolerance:
            shapes, plain = ([tuple(output.shape) for output in results] for results in (outputs, self.outputs))
            by = f"by {error:.1e}" if shapes == plain else f"shapes {shapes} instead of {plain}"
            problem = f"its output in per-sample mode differs from the plain one ({by})"
            remedy = "Draw random numbers outside of it." if self.is_random else _REPORT
            self.complain("random" if self.is_random else "rows", self.who, problem, "the same output", remedy)
            return False
        loss = self.layout.total(outputs, self.reduction)
        try:
            loss.backward(retain_graph=True)
        except PerSampleError as error:
            errors = [error, *self.other_complaints(loss)]
            self.findings.problems += [Problem.of("outside", complained) for complained in errors]
        except Exception as error:
            self.complain_of(self.who, error)
        else:
            return True
        return False

    def other_complaints(self, loss: Tensor) -> Iterator[PerSampleError]:
        """The errors of the backward parameter by parameter, as a backward of all stops at the first."""
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
        """Whether the same random state gives the same values; notes whether another one gives other values."""
        for seed in (0, 1):
            with Trace(self.plain.module) as again:
                self.plain(self.call, seed)
            index = self.whole.first_difference(again, self.same)
            if index is None:
                continue
            where, between = self.whole.before(index)
            if seed == 0:
                problem = f"two runs from the same random state differ{f', {between}' if between else ''}"
                remedy = "Draw from torch's generators, without generator=, and keep no state between calls."
                self.complain("random", where, problem, "the same values", remedy)
                return False
            self.is_random = True
            self.findings.notes.append(
                f"{where} draws random numbers: outputs alone and in the batch were not compared, mixing was looked "
                "for by gradients, and the loop took each sample's own loss from one batch of the same seed."
            )
        return True

    def run_alone(self) -> list[list[Tensor]] | None:
        """The outputs of each sample alone, `None` if one fails; keeps the trace of the last one."""
        alone: list[list[Tensor]] = []
        self.shapes_alone = []
        for i in range(self.call.batch):
            self.lone = Trace(self.plain.module)
            try:
                with self.lone:
                    alone.append([output.detach() for output in self.plain(self.call.sample(i))])
                self.shapes_alone.append(self.lone.shapes())
            except Exception as error:
                where = self.lone.stack[-1]
                if all(problem.where != where for problem in self.findings.problems):
                    problem = f"on sample {i} alone it raises {type(error).__name__}: {error}"
                    self.complain("run", where, problem, "a forward that takes a batch of one", self.remedy_alone)
                return None
        return alone

    def has_samples(self, alone: list[list[Tensor]]) -> bool:
        """Whether the outputs have a dimension for the samples; keeps the layout."""
        self.layout = Layout(self.outputs, alone)
        unclear = self.layout.unclear
        if unclear is not None:
            shapes = [[tuple(output.shape) for output in outputs] for outputs in (self.outputs, alone[0])]
            problem = f"its outputs have the shapes {shapes[0]} for the batch and {shapes[1]} for a sample alone"
            wanted = f"one dimension {self.call.batch} times as large in output {unclear}"
            remedy = "Keep the samples apart, in one dimension; give shared_by_all(x) for what all samples share."
            self.complain("mixing", self.who, problem, wanted, remedy)
            return False
        left_out = [str(tuple(x.shape)) for x, axis in zip(self.outputs, self.layout.axes, strict=True) if not axis]
        if len(left_out) == len(self.outputs):
            problem = f"none of its floating outputs ({', '.join(left_out)}) has one row per sample"
            remedy = "Return tensors, in tuples, lists, dicts or dataclasses, from before they are reduced to a loss."
            if self.call.batch_first and any(self.call.batch in output.shape for output in self.outputs):
                problem += ": they have the same shapes for one sample alone"
                remedy = f"If the samples stand second, check convert(model).per_sample(batch_first=False). {remedy}"
            self.complain("run", self.who, problem, "one at least", remedy)
            return False
        if left_out:
            self.findings.notes.append(
                f"left out, as they have no samples' dimension: outputs of shape {', '.join(left_out)}."
            )
        return True

    def find_mixing(self) -> bool:
        """Looks for samples that are mixed: by the outputs of one alone, and by where the gradient of its loss goes.

        Returns:
            Whether the rows can be compared nevertheless.
        """
        errors = [self.layout.difference(self.outputs, own, i) for i, own in enumerate(self.layout.alone)]
        i = errors.index(max(errors))
        first = -1
        if not self.is_random and errors[i] > self.findings.tolerance:
            with Trace(self.plain.module) as lone:
                self.plain(self.call.sample(i))
            first = first_mixed(self.whole, lone, i, self.call.batch, self.findings.tolerance)
            evidence = f"alone and in the batch, sample {i} differs by {errors[i]:.1e} in the output"
            self.complain_of_mixing(first, evidence)
        last = last_mixed(self.whole, self.shapes_alone, self.layout.losses(self.outputs))
        if last is not None and last > first:
            self.complain_of_mixing(last, "the gradient of a sample's own loss reaches others")
        return True

    def complain_of_mixing(self, index: int, evidence: str) -> None:
        where, between = self.whole.before(index)
        if any(problem.where == where and between in problem.text for problem in self.findings.problems):
            return
        self.complain(
            "mixing",
            where,
            f"the result for a sample depends on the other samples{f', {between}' if between else ''} ({evidence})",
            "each sample's result from that sample alone",
            self.remedy_for_mixing(where),
        )

    def remedy_for_mixing(self, where: str) -> str:
        return _APART

    # Rows

    def has_rows(self) -> bool:
        """Whether the rows are as many as the samples."""
        named = {name: p for name, p in self.expanded.module.named_parameters() if p.requires_grad}
        rows = {name: getattr(p, "grad_sample", None) for name, p in named.items()}
        lacking = [name for name, p in named.items() if p.grad is not None and rows[name] is None]
        if lacking:
            problem = f"{listed(lacking)} received a gradient and no rows"
            remedy = "Use a parameter inside of its module, or through expanded_nn.expanded(weight)."
            self.complain("outside", lacking[0], problem, "rows that add up to the gradient", remedy)
        numbers = {len(held) for held in rows.values() if held is not None} - {self.call.batch}
        if numbers:
            problem = f"the parameters have {max(numbers)} rows, those of several forwards"
            remedy = (
                f"Make all calls of a step one pass: with expanded_nn.one_pass(model, {self.call.batch}). Keep the "
                "batch in a dimension of its own. Where one call has several rows of each sample, as on "
                "torch.cat([real, fake]), call the model with each part, in one pass. Where terms of the loss have "
                "samples of their own, check them one by one."
            )
            self.complain("rows", self.who, problem, f"{self.call.batch} rows, one for each sample", remedy)
        return not numbers

    def complain_of_rows(self) -> None:
        """Reports rows that differ; by layer, where a layer took other things for samples."""
        errors, tolerance = self.findings.errors, self.findings.tolerance
        layers: dict[tuple[str, str, int], list[str]] = {}
        for name in (name for name, error in errors.items() if error > tolerance):
            layer = layer_without_samples(self.whole, self.shapes_alone[-1], name, self.call)
            layers.setdefault(layer, []).append(name)
        for (where, shape, rows), names in layers.items():
            worst = max(names, key=errors.__getitem__)
            differ = f"the rows of {listed(names)} differ from the sample-by-sample loop (by {errors[worst]:.1e})"
            if rows > 1:
                problem = (
                    f"its input has shape {shape} for the batch and for a sample alone, so its rows are not samples; "
                )
                remedy = "Give it a batch dimension: index.unsqueeze(0) for positions that all samples share."
                self.complain("rows", where, problem + differ, f"{self.call.batch} rows, one per sample, or 1", remedy)
            elif self.findings.problems:
                self.complain("rows", worst, differ, f"at most {tolerance:.1e}", "Solve the problem above first.")
            elif where:
                problem = f"its input of shape {shape} is shared, so that its output has one row per sample; "
                remedy = "Let the output broadcast over the samples: leave out what takes its first row, or the mean."
                self.complain("rows", where, problem + differ, f"at most {tolerance:.1e}", remedy)
            else:
                self.complain("rows", worst, differ, f"at most {tolerance:.1e}", self.remedy_for_rows())

    def remedy_for_rows(self) -> str:
        return _REPORT


class StepCheck(Check):
    """The check of a loss function."""

    remedy_alone = f"{Check.remedy_alone} {_AS_ARGUMENTS}"

    def counts_samples(self) -> bool:
        """Always true: the number of rows is compared later."""
        return True

    def has_samples(self, alone: list[list[Tensor]]) -> bool:
        """Whether the function returns losses."""
        shapes = [[tuple(output.shape) for output in outputs] for outputs in (self.outputs, *alone)]
        if shapes[0] not in ([()], [(self.call.batch,)]) or any(shape not in ([()], [(1,)]) for shape in shapes[1:]):
            problem = f"its floating-point tensors have shapes {shapes[0]} for the batch and {shapes[1]} for one sample"
            problem = problem if self.outputs else "it returns no floating-point tensor"
            wanted = f"the losses, ({self.call.batch},), or their sum or mean, ()"
            self.complain("run", self.who, problem, wanted, f"Return one such tensor. {_AS_ARGUMENTS}")
            return False
        if self.is_random and shapes[0] == [()]:
            problem = "it draws other random numbers for a sample alone than for the batch"
            self.complain("random", self.who, problem, "numbers that can be compared", "Return the losses, (B,).")
            return False
        self.layout: GivenLosses = GivenLosses(self.outputs, alone, self.findings.tolerance)
        return True

    def find_mixing(self) -> bool:
        """Looks for mixed samples; a scalar has to be the mean or the sum of the samples' losses alone."""
        if self.outputs[0].dim():
            return super().find_mixing()
        reduced_by = self.layout.reduced_by
        if not reduced_by:
            index = first_mixed(self.whole, self.lone, self.call.batch - 1, self.call.batch, self.findings.tolerance)
            self.complain_of_mixing(index, self.layout.mismatch(self.outputs))
        elif self.reduction not in reduced_by:
            problem = f"it is the {reduced_by[0]} of the samples' losses, and loss_reduction is {self.reduction!r}"
            remedy = f'Say per_sample(loss_reduction="{reduced_by[0]}"), or return the {self.reduction}.'
            self.complain("loss", self.who, problem, f"the {self.reduction}", remedy)
        return bool(reduced_by)

    def say_that_nothing_depends(self) -> None:
        """A problem, unless the whole model is frozen: the gradients of training come from something else."""
        if not any(parameter.requires_grad for parameter in self.plain.module.parameters()):
            return super().say_that_nothing_depends()
        problem = "what it returns depends on no parameter that requires gradients, so there is nothing to compare"
        remedy = "Return the losses themselves, computed by the model it is given, without detach() and no_grad."
        self.complain("loss", self.who, problem, "losses with their graph", remedy)

    def remedy_for_mixing(self, where: str) -> str:
        """In the loss another one than in the model."""
        if where != self.who:
            return _APART
        of_its_own = f"{_OWN} {_AS_ARGUMENTS}"
        return of_its_own if self.outputs[0].dim() else f"{_MEAN} {of_its_own}"

    def remedy_for_rows(self) -> str:
        if self.outputs[0].dim():
            return _REPORT
        return "Return the losses, (B,), from the function: then the report says where samples are mixed. " + _REPORT


class PlainLayerNorms(RightNorms):
    """LayerNorm in plain operations as well, whose derivatives are right."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = standardized(wide, len(shape), eps, centered=True)[0].to(x.dtype)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _precision(tensor: Tensor) -> float:
    return 2.0**-10 if tensor.is_cuda and tensor.dtype is torch.float32 else torch.finfo(tensor.dtype).eps
