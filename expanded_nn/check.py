"""Checking by running: whether a model's per-sample gradients can be trusted on such inputs."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence
from torch.overrides import TorchFunctionMode

from expanded_nn._batch import batch_dim, batch_of, tensors
from expanded_nn._errors import ConversionError, PerSampleError, complaint
from expanded_nn._expand import Settings
from expanded_nn._module import PerSampleModule
from expanded_nn.convert import convert, revert

_OWN_LAYOUT = (nn.RNNBase, nn.MultiheadAttention)  # they say themselves where the samples stand
_MADE_OF_ATTENTION = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class Problem:
    """One reason not to trust the rows.

    Attributes:
        kind: `"conversion"`, `"run"` (it does not run), `"random"`, `"mixing"` of samples, `"layer"` (a layer's own
            complaint, as of rows that are not samples), `"outside"` use of a parameter, or `"rows"` that differ.
        where: The qualified name of the module or parameter, with the module's class.
        text: What was found there, what was wanted, and what to do.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        problems: Reasons not to trust the rows, none if they can be trusted on such inputs.
        notes: What is worth knowing and no reason for distrust: parameters never used, what was not compared.
        errors: Parameter name -> relative error of its rows against the sample-by-sample loop; empty if the loop
            was not run.
        samples: B.
        dtype: The coarsest dtype that the model computed in.
        tolerance: The relative error that counts as rounding in that dtype.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    errors: Mapping[str, float]
    samples: int
    dtype: torch.dtype
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raises the report as an error if it holds problems.

        Raises:
            PerSampleError: If not `ok`.
        """
        if self.problems:
            raise PerSampleError(str(self))

    def __str__(self) -> str:
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        if self.problems:
            lines.insert(0, f"check: {len(lines)} reason(s) not to trust the per-sample gradients of this model:")
        else:
            worst = max(self.errors.values(), default=0.0)
            lines.append(
                f"check: no problem found. {self.samples} samples, the rows of {len(self.errors)} parameters, relative "
                f"error against the sample-by-sample loop at most {worst:.1e} ({_name_of(self.dtype)}, tolerance "
                f"{self.tolerance:.1e})."
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Says, by running copies of the model, whether its per-sample gradients can be trusted on such inputs.

    Each sample's output alone is compared with its output in the batch, layer by layer, and the gradient of each
    sample's own loss must not reach the others; the rows of all parameters are compared with the gradients of each
    sample run alone through the plain model. The loss is a fixed random nonlinear function of every floating tensor
    in the output. A finding holds for such inputs: another route through the model is another check.

    Nothing of the model changes: its gradients, buffers, modes and the random state are as before, also after an
    exception. The model runs in its own dtype and device, and differences up to the square root of that dtype's
    precision count as rounding (1.5e-8 in float64, 3.5e-4 in float32; on a GPU, where float32 may mean TF32, 3.1e-2):
    `check(model.double(), x.double())` looks more closely. It costs some 2 log2(B) + 2 B passes.

    Args:
        model: A converted model, a module of zoo layers or a plain one, which is converted as a copy. What it was
            told by `per_sample` (`batch_first`, `batch_size`, …) holds here, also if another module of it holds it.
        args: The model's inputs, of 2 samples at least. Best is a B that no other dimension has: every tensor with B
            rows is taken for one row a sample.
        kwargs: The model's inputs by keyword.

    Returns:
        The findings; `print` it, or call its `raise_for_problems()`.

    Raises:
        PerSampleError: If the inputs hold fewer than 2 samples.
        Exception: What the plain model itself raises on these inputs.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False))
        >>> report = enn.check(model, torch.randn(5, 3))
        >>> report.ok, {problem.where for problem in report.problems}
        (False, {'1 (BatchNorm1d)'})
        >>> enn.check(model.eval(), torch.randn(5, 3)).ok
        True
    """
    with _undisturbed(), _WithoutDropout() as without_dropout:
        try:
            plain = revert(model)
            expanded = convert(plain)
        except ConversionError as error:
            listed = str(error).splitlines()[1:] or [str(error)]
            return _unconverted([(each.strip().partition(": ")[0], each.strip()) for each in listed])
        except Exception as error:  # whatever copying raises
            who = type(model).__name__
            found = f"it cannot be copied ({type(error).__name__}: {error})"
            remedy = "Drop what it keeps of an earlier forward, and locks or open files, before the check."
            return _unconverted([(who, str(complaint(who, found, "a model that copy.deepcopy takes", remedy)))])
        held = [each._recorder for each in model.modules() if isinstance(each, PerSampleModule)]
        settings = next((recorder.settings for recorder in held if recorder is not None), Settings())
        without_dropout.turn_off(plain, expanded)
        inspected = _Check(plain, expanded.per_sample(**vars(settings)), settings, (args, kwargs))  # type: ignore[operator]
        inspected.run()
        if without_dropout.met:
            inspected.notes.append("dropout was off in all comparisons, so that alone and in the batch mean the same.")
        return inspected.report()


def _unconverted(problems: list[tuple[str, str]]) -> Report:
    listed = tuple(Problem("conversion", where, text) for where, text in problems)
    return Report(listed, (), MappingProxyType({}), 0, torch.get_default_dtype(), 0.0)


class _Check:
    """One check: the plain and the expanded copy, the call, and what was found so far."""

    def __init__(self, plain: nn.Module, expanded: nn.Module, settings: Settings, call: tuple[Any, Any]) -> None:
        self.settings, self.call = settings, call
        own = [each.batch_first for each in plain.modules() if isinstance(each, _OWN_LAYOUT)]
        has_own = isinstance(plain, (*_OWN_LAYOUT, *_MADE_OF_ATTENTION)) and own
        self.batch_first: bool = own[0] if has_own else settings.batch_first
        batch = settings.batch_size
        self.batch = batch if batch is not None else batch_of(call, batch_first=self.batch_first) or 0
        if self.batch < 2:
            raise complaint("check", f"the inputs hold {self.batch} sample(s)", "2 or more", "Give it a larger batch.")
        self.plain, self.expanded = _Runner(plain), _Runner(expanded)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.errors: dict[str, float] = {}
        self.dtype, self.tolerance = torch.float64, 0.0
        self.random = False

    def report(self) -> Report:
        problems = tuple({problem.text: problem for problem in self.problems}.values())
        if problems and not self.errors:
            self.notes.append("the rows were not compared with the sample-by-sample loop.")
        if problems and self._is_ambiguous():
            self.notes.append(
                f"B = {self.batch} is the size of another dimension as well; every argument with {self.batch} rows was "
                "taken for one row a sample. Check with another B if that is wrong."
            )
        errors = MappingProxyType(self.errors)
        return Report(problems, tuple(self.notes), errors, self.batch, self.dtype, self.tolerance)

    def run(self) -> None:
        with _Trace(self.plain.module) as whole:
            outputs = self.plain(self._whole())
        self._set_tolerance([*whole.dtypes(), *(each.dtype for each in outputs)])
        expanded_outputs = self._expanded_forward()
        if self._is_deterministic(whole) and outputs:
            shapes = self._alone(whole, outputs)
            if shapes is None:
                return
            layout = _Layout(outputs, shapes)
            losses = layout.losses(outputs)
            if sum(losses).requires_grad:  # type: ignore[union-attr]
                self._mixing_by_gradients(whole, layout.losses(outputs, narrowed=False))
                if expanded_outputs is not None and self._backward(layout, outputs, expanded_outputs):
                    self._loop(layout, losses, whole)
            else:
                self.notes.append("no output depends on a parameter that requires gradients.")
        elif not outputs:
            who = type(self.plain.module).__name__
            found = "its output holds no floating tensor"
            remedy = "Return tensors, or tuples, lists, dicts or dataclasses of them."
            self._complain("run", who, found, "one at least", remedy)

    def _complain(self, kind: str, where: str, found: str, wanted: str, remedy: str) -> None:
        self.problems.append(Problem(kind, where, str(complaint(where, found, wanted, remedy))))

    def _set_tolerance(self, dtypes: Sequence[torch.dtype]) -> None:
        parameters = list(self.plain.module.parameters())
        floating = {each for each in [*dtypes, *(p.dtype for p in parameters)] if each.is_floating_point}
        self.dtype = max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.get_default_dtype())
        precision = torch.finfo(self.dtype).eps
        if any(p.is_cuda for p in parameters) and self.dtype is torch.float32:
            precision = 2.0**-10  # TF32
        self.tolerance = precision**0.5

    # Inputs

    def _whole(self) -> Any:
        return _mapped(self.call, _fresh)

    def _sample(self, i: int) -> Any:
        """The call of sample `i` alone."""

        def alone(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return pack_sequence([unpack_sequence(_fresh(value))[i]])
            dim = self._sample_dim(value)
            return _fresh(value if dim is None else value.narrow(dim, i, 1))

        return _mapped(self.call, alone)

    def _sample_dim(self, tensor: Tensor) -> int | None:
        if tensor.dim() == 0:
            return None
        dim = batch_dim(tensor.dim(), batch_first=self.batch_first)
        if tensor.shape[dim] == self.batch:
            return dim
        is_state = tensor.dim() == 3 and tensor.shape[1] == self.batch  # (layers, B, features)
        return 1 if is_state else None

    def _is_ambiguous(self) -> bool:
        given = [each for each in tensors(self.call) if isinstance(each, Tensor)]
        return any(list(each.shape).count(self.batch) > 1 for each in given)

    # The expanded model

    def _expanded_forward(self) -> list[Tensor] | None:
        """The outputs in per-sample mode; `None` if layers complained: all of them did, each in its turn."""
        guard = _Guard(self.expanded.module)
        try:
            outputs = self.expanded(self._whole())
        except Exception as error:  # whatever the model raises
            if not guard.complaints:
                self._complain_of(guard.where, error)
            outputs = None
        guard.close()
        for error in guard.complaints:
            self.problems.append(Problem("layer", str(error).partition(": ")[0], str(error)))
        recorder = self.expanded.module._recorder
        found = recorder.current.batch if recorder is not None and recorder.current is not None else self.batch
        if found != self.batch:
            who = type(self.plain.module).__name__
            remedy = "Give its bags as a 2-D input, without offsets, for the check."
            text = f"the model counts {found} samples, where its first tensor has {self.batch} rows"
            self._complain("run", who, text, "one row a sample", remedy)
        return None if guard.complaints else outputs

    def _complain_of(self, where: str, error: Exception) -> None:
        found = f"in per-sample mode it raises {type(error).__name__}: {error}"
        self._complain("run", where, found, "the plain model's output", "Please report it, with the model.")

    def _backward(self, layout: _Layout, outputs: list[Tensor], expanded_outputs: list[Tensor]) -> bool:
        """The backward in per-sample mode, whether the rows are there to be compared."""
        pairs = list(zip(outputs, expanded_outputs, strict=False))
        difference = max(_difference(*pair) for pair in pairs)
        if len(outputs) != len(expanded_outputs) or difference > self.tolerance:
            who = type(self.plain.module).__name__
            found = f"its output in per-sample mode differs from the plain one (relative difference {difference:.1e})"
            remedy = "Draw random numbers outside of it." if self.random else "Please report it, with the model."
            self._complain("random" if self.random else "rows", who, found, "the same output", remedy)
            return False
        losses = torch.stack(layout.losses(expanded_outputs))
        loss = losses.mean() if self.settings.loss_reduction == "mean" else losses.sum()
        try:
            loss.backward(retain_graph=True)
        except PerSampleError as error:
            found_by = [error, *self._other_outside_uses(loss)]
            self.problems += [Problem("outside", str(each).partition(": ")[0], str(each)) for each in found_by]
        except Exception as error:  # whatever the model raises
            self._complain_of(type(self.plain.module).__name__, error)
        else:
            return True
        return False

    def _other_outside_uses(self, loss: Tensor) -> Iterator[PerSampleError]:
        for parameter in self.expanded.module.parameters():
            try:
                if parameter.requires_grad:
                    loss.backward(inputs=[parameter], retain_graph=True)
            except PerSampleError as error:
                yield error
            except RuntimeError:  # reentrant checkpoints refuse `inputs`
                return

    # What is compared

    def _is_deterministic(self, whole: _Trace) -> bool:
        """Whether the same random state gives the same output; notes whether another one gives another."""
        for seed in (0, 1):
            with _Trace(self.plain.module) as again:
                self.plain(self._whole(), seed)
            place = whole.first_difference(again, self._same)
            if place is None:
                continue
            where = whole.place(place)[0]
            if seed == 0:
                remedy = "Draw from torch's generators, and keep no state from one call to the next."
                self._complain("random", where, "two runs from the same random state differ", "equal outputs", remedy)
                return False
            self.random = True
            self.notes.append(
                f"{where} draws random numbers: samples were not compared alone and in the batch, mixing was looked "
                "for by gradients only, and the loop ran each sample's own loss on one batch of the same seed."
            )
        return True

    def _same(self, one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and _difference(one, other) <= self.tolerance

    def _alone(self, whole: _Trace, outputs: list[Tensor]) -> list[list[torch.Size]] | None:
        """Compares each sample alone with the same in the batch; gives the shapes of its outputs."""
        shapes: list[list[torch.Size]] = []
        worst, place, sample = 0.0, None, 0
        for i in range(self.batch):
            trace = _Trace(self.plain.module)
            try:
                with trace:
                    alone = self.plain(self._sample(i))
            except Exception as error:  # whatever the model raises
                found = f"on sample {i} alone it raises {type(error).__name__}: {error}"
                remedy = "Keep statistics within a sample, and squeeze dimensions by number."
                self._complain("run", trace.inside, found, "a forward that takes a batch of one", remedy)
                return None
            if not self._fits(outputs, alone, i):
                return None
            shapes.append([each.shape for each in alone])
            self.lone = trace
            if self.random:
                continue
            for output, each in zip(outputs, alone, strict=True):
                views = list(_views(output, each.shape, self.batch))
                difference = min((_difference(_fit(view[i], each.shape), each) for view in views), default=0.0)
                if difference > max(self.tolerance, worst):
                    worst, sample = difference, i
                    place = whole.first_difference(trace, lambda w, a: self._agrees(w, a, sample))
        if worst:
            evidence = f"sample {sample} alone and in the batch differ by {worst:.1e}"
            self._complain_of_mixing(whole, 1 if place is None else place, evidence)
        return shapes

    def _fits(self, outputs: list[Tensor], alone: list[Tensor], i: int) -> bool:
        """Whether every output has the samples somewhere, or none of them."""
        shapes = [tuple(each.shape) for each in outputs], [tuple(each.shape) for each in alone]
        fits = len(outputs) == len(alone)
        for many, one in zip(outputs, alone, strict=False):
            has_samples = any(True for _ in _views(many, one.shape, self.batch))
            fits = fits and (has_samples or many.shape == one.shape)
            if fits and not has_samples and i == 0:
                self.notes.append(f"an output of shape {tuple(many.shape)} has no samples in it and was left out.")
        if not fits:
            who = type(self.plain.module).__name__
            found = f"its outputs have shapes {shapes[0]} for the batch and {shapes[1]} for sample {i} alone"
            self._complain("mixing", who, found, f"{self.batch} times as many rows", "Keep the samples apart.")
        return fits

    def _agrees(self, many: Tensor, one: Tensor, i: int) -> bool:
        """Whether a tensor inside the model has the same values for sample `i` in the batch and alone."""
        views = list(_views(many, one.shape, self.batch))
        if views:
            return any(_difference(_fit(view[i], one.shape), one) <= self.tolerance for view in views)
        return many.shape != one.shape or many.dim() == 0 or _difference(many, one) <= self.tolerance

    def _complain_of_mixing(self, whole: _Trace, place: int, evidence: str) -> None:
        where, between = whole.place(place)
        if any(problem.where == where and between in problem.text for problem in self.problems):
            return
        self._complain(
            "mixing",
            where,
            f"{between}what becomes of a sample depends on the other samples of the batch ({evidence})",
            "each sample's result from that sample alone",
            "Normalise, pool, attend and route within a sample (GroupNorm in place of BatchNorm, or its eval mode; "
            "batch_first where the samples come first).",
        )

    def _mixing_by_gradients(self, whole: _Trace, losses: list[Tensor]) -> None:
        """Every two samples are in different groups once: the loss of a group must not reach the rows of the rest."""
        reached: set[int] = set()
        numbers = torch.arange(self.batch)
        for bit in range((self.batch - 1).bit_length()):
            for side in (0, 1):
                others = ((numbers >> bit) & 1) == side
                whole.grads.clear()
                self.plain.module.zero_grad()
                sum(loss for loss, other in zip(losses, others, strict=True) if not other).backward(retain_graph=True)  # type: ignore[union-attr]
                for (k, n), grad in whole.grads.items():
                    if k not in reached and self._reaches(grad, self._lone_shape(whole, k, n), others):
                        reached.add(k)
        whole.grads.clear()
        if reached:
            evidence = "the gradient of one sample's own loss reaches the others"
            self._complain_of_mixing(whole, max(reached) + 1, evidence)

    def _lone_shape(self, whole: _Trace, k: int, n: int) -> torch.Size | None:
        """The shape of a traced tensor for one sample alone, as far as the model went the same way."""
        if k >= len(self.lone.events) or self.lone.events[k].label != whole.events[k].label:
            return None
        values = self.lone.events[k].values
        return values[n].shape if n < len(values) else None

    def _reaches(self, grad: Tensor, shape: torch.Size | None, others: Tensor) -> bool:
        views = [] if shape is None else list(_views(grad, shape, self.batch))
        precision = torch.finfo(grad.dtype).eps
        chosen = others.to(grad.device)
        return bool(views) and all(bool(view[chosen].norm() > precision * view.norm()) for view in views)

    def _loop(self, layout: _Layout, losses: list[Tensor], whole: _Trace) -> None:
        """Compares the rows with each sample's own gradient, by parameter, on the plain model."""
        module = self.plain.module
        wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
        rows = {name: getattr(p, "grad_sample", None) for name, p in self.expanded.module.named_parameters()}
        squares = {name: torch.zeros(2, dtype=torch.float64) for name in wanted}  # of the difference, of the gradient
        used: set[str] = set()
        for i in range(self.batch):
            module.zero_grad()
            loss = losses[i] if self.random else _loss(layout.kept(self.plain(self._sample(i))), i)
            if loss.requires_grad:
                loss.backward(retain_graph=self.random)
            for name, p in wanted.items():
                if p.grad is not None:
                    used.add(name)
                given, grad = rows[name], _plain(torch.zeros_like(p) if p.grad is None else p.grad)
                fits = given is not None and given.shape == (self.batch, *p.shape)
                difference = _plain(given[i]) - grad if fits else grad if given is None else grad + torch.inf
                squares[name] += torch.stack([difference.square().sum(), grad.square().sum()])
        unused = [name for name in wanted if name not in used]
        if unused:
            self.notes.append(f"never used: {', '.join(unused)}. No output depends on them; they get no rows.")
        total = float(sum(float(norm) for _, norm in squares.values())) ** 0.5
        floor = 10 * self.tolerance * total  # the gradient of a parameter may vanish but for rounding
        for name in sorted(used, key=list(wanted).index):
            difference, norm = squares[name].sqrt().tolist()
            self.errors[name] = difference / max(norm, floor) if difference else 0.0
        self._complain_of_rows(whole)

    def _complain_of_rows(self, whole: _Trace) -> None:
        bad = {name: error for name, error in self.errors.items() if not error <= self.tolerance}
        by_layer: dict[tuple[str, str], list[str]] = {}
        for name in bad:
            by_layer.setdefault(self._layer_without_samples(whole, name), []).append(name)
        for (where, shape), names in by_layer.items():
            worst = max(names, key=bad.__getitem__)
            differ = f"the rows of {', '.join(names)} differ from the sample-by-sample loop (relative error {bad[worst]:.1e})"
            if where:
                found = f"its input has shape {shape} for the batch and for one sample alike, its rows are no samples; {differ}"
                remedy = "Give it a dimension for the batch: index.unsqueeze(0) for positions that all samples share."
                self._complain("rows", where, found, f"{self.batch} rows, one a sample, or 1 that all share", remedy)
            else:
                remedy = "Remove the other problems first; if there are none, please report it, with the model."
                self._complain("rows", worst, differ, f"at most {self.tolerance:.1e}", remedy)

    def _layer_without_samples(self, whole: _Trace, parameter: str) -> tuple[str, str]:
        """The layer of a parameter and its input's shape, if as many rows come in for one sample as for the batch."""
        for event, alone in zip(whole.events, self.lone.events, strict=False):
            if event.label == alone.label and event.is_input and event.path and parameter.startswith(event.path + "."):
                for many, one in zip(event.values, alone.values, strict=False):
                    dim = batch_dim(max(1, many.dim()), batch_first=self.batch_first)
                    if many.dim() == one.dim() > dim and many.shape[dim] == one.shape[dim] == self.batch:
                        return event.who, str(tuple(many.shape))
        return "", ""


class _Layout:
    """Where the samples stand in each output, and each sample's own shapes."""

    def __init__(self, outputs: list[Tensor], shapes: list[list[torch.Size]]) -> None:
        self.shapes = shapes
        self.has_samples = [output.shape != shape for output, shape in zip(outputs, shapes[-1], strict=True)]

    def kept(self, outputs: list[Tensor]) -> list[Tensor]:
        return [output for output, has in zip(outputs, self.has_samples, strict=True) if has]

    def losses(self, outputs: list[Tensor], *, narrowed: bool = True) -> list[Tensor]:
        """Each sample's own loss; without `narrowed`, what a sample alone has not counts too, such as padding."""
        last = self.kept(self.shapes[-1])  # type: ignore[arg-type]
        views = [next(_views(each, shape, len(self.shapes))) for each, shape in zip(self.kept(outputs), last, strict=True)]  # type: ignore[arg-type]
        if not narrowed:
            return [_loss([view[i] for view in views], i) for i in range(len(self.shapes))]
        own = [self.kept(each) for each in self.shapes]  # type: ignore[arg-type]
        return [
            _loss([_fit(view[i], shape) for view, shape in zip(views, own[i], strict=True)], i)  # type: ignore[arg-type]
            for i in range(len(self.shapes))
        ]
