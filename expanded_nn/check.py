"""Checking by running: whether a model's per-sample gradients can be trusted on such inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from expanded_nn._errors import ConversionError, complaint, refuse_no_model, shown
from expanded_nn.checking.checks import Check, StepCheck, strange_loss
from expanded_nn.checking.report import Problem, Report as Report
from expanded_nn.checking.running import Call, Step
from expanded_nn.common.chance import WithoutChance, WithoutDropout
from expanded_nn.common.generators import RandomStates
from expanded_nn.convert import convert, revert
from expanded_nn.modules.base import PerSampleModule, recorders_of, switch
from expanded_nn.recording.recorder import Settings
from expanded_nn.recording.sharded import is_sharded


def check(model: nn.Module, *args: Any, loss: Callable[..., Any] | None = None, **kwargs: Any) -> Report:
    """Says, by running copies of the model, whether its per-sample gradients can be trusted on such inputs.

    Each sample's output alone is compared with its output in the batch, the gradient of a sample's own loss must not
    reach the other samples inside the model, and the rows of every parameter are compared with the gradients of each
    sample run alone through the plain model. The loss is a fixed random nonlinear function of all floating tensors in
    the output. What is found holds for such inputs: another way through the model is another check.

    With `loss` the whole training step is checked, as it is written for per-sample mode: methods other than the
    forward, submodules called alone, parameters used in the loss. The lone sample's loss is `loss(plain_copy, ...)` on
    its row of each argument, where `one_pass` and `expanded` do nothing; random numbers are fixed ones in all runs.

    Nothing of the model changes, nor the random state, also after an exception. The copies run in the model's own
    dtype, and differences up to the square root of its precision count as rounding (1.5e-8 in float64, 3.5e-4 in
    float32, 3.1e-2 for float32 on a GPU, which may be TF32): `check(model.double(), x.double())` sees more.

    Args:
        model: A converted model, a module that holds layers of this library, or a plain one, of which a copy is
            converted. What it was told by `per_sample` (`batch_first`, `batch_size`, ...) holds here.
        args: The model's inputs, at least 2 samples. Take a B that is the size of no other dimension: a tensor with B
            rows is taken to hold one for each sample. If your batches may be as large as another dimension (the length
            of the sequences, the number of classes or prototypes), check that B as well.
        loss: A function `loss(model, *args, **kwargs)` of the model it is given, a copy, and of the arguments. It
            returns the losses `(B,)`, or a scalar, their sum or mean as `per_sample(loss_reduction=...)` says, with
            their graph: backward, clipping and the optimizer are left out.
        kwargs: The model's inputs by keyword.

    Returns:
        The findings; `print` shows them, and their `raise_for_problems()` raises an error if there are any.

    Raises:
        PerSampleError: If the inputs hold fewer than 2 samples, or `loss` calls backward itself.
        TypeError: If `model` is no model, or `loss` no function of one, or either does not take the arguments.
        Exception: Whatever the plain model, or the loss of it, raises on these inputs.

    Example:
        >>> import torch, expanded_nn as enn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> enn.check(model.eval(), torch.randn(5, 3)).ok
        True
        >>> print(enn.check(model.train(), torch.randn(5, 3)))
        check: ... reason(s) not to trust the per-sample gradients:
          1. 1 (BatchNorm1d): ...
        >>> def step(model, x, y):
        ...     return (torch.nn.functional.linear(model[0](x), model[2].weight) - y).square().mean()
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> print(enn.check(model, torch.randn(5, 3), torch.randn(5, 2), loss=step))
        check: 1 reason(s) not to trust the per-sample gradients:
          1. 2.weight: the parameter is also used outside of its module...
    """
    refuse_no_model("check", model)
    if loss is not None and (not callable(loss) or isinstance(loss, type) or _is_torchs(loss)):
        is_function = not isinstance(loss, type) and hasattr(loss, "__name__")
        raise strange_loss(f"loss is {loss.__name__ if is_function else shown(loss)}")
    told = [recorder.settings for recorder in recorders_of(model.modules())]  # also with the mode off:
    told += [module._settings for module in model.modules() if isinstance(module, PerSampleModule)]
    settings = next(iter(told), Settings())
    chance = WithoutDropout() if loss is None else WithoutChance()
    with RandomStates(), torch.inference_mode(False), torch.enable_grad(), chance:
        try:
            plain, expanded = _copies(model, chance)
        except ConversionError as error:
            if isinstance(error.__cause__, Exception):  # what copy.deepcopy has raised
                return Report((_uncopied(model, error.__cause__),))
            texts = [text.strip() for text in str(error).splitlines()[1:]] or [str(error)]
            return Report(tuple(Problem("conversion", text.partition(":")[0], text) for text in texts))
        except Exception as error:
            return Report((_uncopied(model, error),))
        call = Call.of(plain, settings, (args, kwargs))
        switch(expanded, settings, mode=True)
        checking = _run(model, plain, expanded, call, loss)
        if any(recorder.escalation.has_met for recorder in recorders_of(expanded.modules())):
            # without the comparison by the forward itself, more can be said of where samples meet
            plain, expanded = _copies(model, chance)
            switch(expanded, replace(settings, compare=False), mode=True)
            other = _run(model, plain, expanded, call, loss)
            checking = other if other.findings.problems and checking.findings.problems else checking
        has_drawn = isinstance(chance, WithoutChance) and chance.has_drawn
        for is_met, what in ((chance.met, "dropout was switched off"), (has_drawn, "random numbers were the same")):
            if is_met:
                checking.findings.notes.append(f"{what} in all runs, so that a sample alone can be compared.")
        return checking.findings.report(is_ambiguous=call.is_ambiguous())


def _copies(model: nn.Module, chance: WithoutDropout) -> tuple[nn.Module, nn.Module]:
    """A plain copy of the model, without dropout, and an expanded one."""
    plain = revert(model)
    chance.turn_off(plain)
    return plain, convert(plain)


def _run(model: nn.Module, plain: nn.Module, expanded: nn.Module, call: Call, loss: Callable[..., Any] | None) -> Check:
    """A check of a plain copy of the model and an expanded one that has run."""
    settings = recorders_of(expanded.modules())[0].settings
    checking = (
        Check(plain, expanded, settings, call)
        if loss is None
        else StepCheck(Step(plain, loss), Step(expanded, loss), settings, call)
    )
    try:
        checking.run(model)
    finally:
        checking.outside.put_back()
    return checking


def _is_torchs(loss: Any) -> bool:
    """Whether it is one of torch's own losses, which take the model's output and not the model."""
    while isinstance(loss, partial):
        loss = loss.func
    return isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "__module__", None) == "torch.nn.functional"


def _uncopied(model: nn.Module, error: Exception) -> Problem:
    who, problem = type(model).__name__, f"it cannot be copied ({type(error).__name__}: {error})"
    remedy = "Take out what it keeps of an earlier forward, locks and open files before the check."
    if any(map(is_sharded, model.modules())):
        remedy = "Check it before it is sharded."
    return Problem("conversion", who, str(complaint(who, problem, "a model that copy.deepcopy takes", remedy)))
