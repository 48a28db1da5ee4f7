"""Sequences of what a training script may do, compared with the contract after each step.

A sequence is a list of steps, such as `[Forward(3), Backward(), Clear("grad_none")]`. After each step every `.grad` is
compared with torch's own and every `.grad_sample` with a loop over the samples, both of the plain model. `Contract`
says which rows are due: which forwards are one pass, what is added, appended, stale. A sequence that fails is shrunk
and printed as a list of steps that can be pasted into `FOUND`, in test_sequences.

Where the contract does not say which rows are due, what is safe is accepted:

- After a backward that failed, and for a parameter that is thawed while it still has a gradient, the parameters are *in
  doubt* until they are cleared: nothing holds but the law that the rows are refused, or add up to `.grad`.
- Rows whose `.grad` was cleared go when the next backward delivers; until then they may be there or not.
- Rows of parameters that were frozen, thawed or replaced get their new number with the next backward; until then the
  old one may be there.
- Clipping may refuse in each of these cases, and changes nothing then.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import expanded_nn as enn
from contract import (
    CHECKPOINTS,
    OUTSIDE,
    PIECES,
    TOGETHER,
    USES,
    WHOLE,
    Contract,
    Fault,
    Key,
    Layers,
    Own,
    Sent,
    Wrong,
    batch,
    differs,
    places,
    vanishes,
)
from oracle import set_seed

WAITING = 4  # forwards that wait for a backward; older ones are dropped
NEARLY_CANCELLED = 1e-7  # of gradients near 1 that cancel: their rounding error is seen in what is left


class Skip(Exception):
    """A step that has no meaning now."""


class Run:
    """A converted model, and what is due of it."""

    def __init__(self, model: type[nn.Module], settings: dict[str, Any]) -> None:
        set_seed(5)
        self.kind, self.plain = model, model()
        settings = {"loss_reduction": "mean", "materialize": False, "accumulate_grad": True, **settings}
        self.model = enn.convert(self.plain).per_sample(**settings)
        self.contract = Contract(settings)
        self.sent: list[Sent] = []
        self.kept: list[nn.Parameter] = []
        self.original: nn.Module | None = None
        self.waiting_there: list[Sent] = []
        self.keys: dict[int, Key] = {}
        self.parameters: dict[Key, nn.Parameter] = {}
        self.shown: dict[Key, Tensor | None] = {}
        self.versions_at_clipping: dict[Key, int] = {}
        self.cleared_since_clipping: set[Key] = set()
        self.counter = itertools.count()
        self.happened: Counter[str] = Counter()
        self.find_parameters()

    # the parameters that the model has now

    def find_parameters(self) -> None:
        """Keys for those that are new; those that are gone are kept by nothing here."""
        now = {id(parameter): parameter for parameter in places(self.model).values()}
        known = {id(self.parameters[key]): key for key in self.parameters}
        self.parameters = {
            known[address] if address in known else next(self.counter): parameter for address, parameter in now.items()
        }
        self.keys = {id(parameter): key for key, parameter in self.parameters.items()}
        for key in self.parameters:
            self.contract.grads.setdefault(key, None)

    @property
    def trainable(self) -> set[Key]:
        return {key for key, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def shapes(self) -> dict[Key, torch.Size]:
        return {key: parameter.shape for key, parameter in self.parameters.items()}

    def name_of(self, key: Key) -> str:
        return next(name for name, parameter in self.model.named_parameters() if parameter is self.parameters[key])

    def key_of(self, name: str) -> Key:
        return self.keys[id(self.model.get_parameter(name))]

    def take(self, number: int, step: Step) -> None:
        """Takes a step, and looks at everything after it."""
        try:
            step.take(self)
            self.happened[type(step).__name__] += 1
            self.check()
        except Skip:
            self.happened["skipped"] += 1
        except Wrong as error:
            error.args = (f"{error.args[0]} after step {number}, {step}",)
            raise
        except enn.PerSampleError as error:
            raise Wrong("false alarm", f"{error} in step {number}, {step}") from error

    # forwards

    def forward(self, name: str, samples: int, seed: int, parts: Sequence[str] | None = None) -> Sent:
        """Calls a use of the model; what comes out waits for its backward."""
        contract = self.contract
        if parts is not None and not any(self.trains(part) for part in parts):
            raise Skip  # whether a frozen layer on its own begins a pass is not said
        if not self.trainable:
            raise Skip
        now = contract.open(samples) if contract.on else None
        x, words = batch(samples, seed)
        keys = {place: self.keys[id(parameter)] for place, parameter in places(self.model).items()}
        values = {key: parameter.detach().clone() for key, parameter in self.parameters.items()}
        trainable = self.trainable
        with warnings.catch_warnings():  # of forwards of one sample and of more: right, if it is used at once
            warnings.filterwarnings("ignore", r"expanded\(weight\): it has \d+ row", enn.PerSampleWarning)
            output = USES[name](self.model, x, words)
        return Sent(name, x, words, output, now, values, keys, trainable, self.plain)

    def trains(self, part: str) -> bool:
        return any(parameter.requires_grad for parameter in self.model.get_submodule(part).parameters())

    def wait(self, sent: Sent) -> None:
        self.sent = [*self.sent, sent][-WAITING:]

    def pick(self, index: int) -> Sent:
        if not self.sent:
            raise Skip
        return self.sent[index % len(self.sent)]

    # backwards

    def total(self, parts: Sequence[tuple[Sent, str, float]]) -> Tensor:
        """The loss of a backward."""
        losses = [factor * sent.loss(kind) / self.contract.scale(len(sent.x)) for sent, kind, factor in parts]
        if not all(loss.requires_grad for loss in losses):
            raise Skip
        return sum(losses[1:], losses[0])

    def backward(
        self,
        parts: Sequence[tuple[Sent, str, float]],
        *,
        retain: bool = False,
        hook: Callable[[Callable[..., None]], RemovableHandle] | None = None,
    ) -> None:
        """A backward, and what is due after it; the `hook` registers a function that fails in it once."""
        loss = self.total(parts)
        sents = [sent for sent, _, _ in parts]
        due, allowed = self.refusal_due(parts), self.refusal_allowed(parts)
        handle = hook(raise_once()) if hook is not None else None
        try:
            loss.backward(retain_graph=retain)
        except Fault:
            self.failed(parts)
            self.happened["a backward failed"] += 1
        except enn.PerSampleError as error:
            is_changed = "between the forward and its backward" in str(error) and any(sent.changed for sent in sents)
            if not due and not allowed and not is_changed:
                raise Wrong("false alarm", str(error)) from error
            self.failed(parts)
            self.happened["a weight was changed in place" if is_changed else f"refused: {due or allowed}"] += 1
        except RuntimeError as error:
            if "inplace" not in str(error) or not any(sent.changed for sent in sents):
                raise
            self.failed(parts)
            self.happened["a weight was changed in place"] += 1
        else:
            if due:
                raise Wrong("no error", f"a backward went through, of {due}")
            if any(sent.switched for sent in sents):  # only the law is known
                self.failed(parts)
            else:
                self.contract.deliver(parts, self.trainable)
                self.happened["a backward"] += 1
        finally:
            if handle is not None:
                handle.remove()
        if not retain or hook is not None:
            self.sent = [sent for sent in self.sent if sent not in sents]

    def refusal_due(self, parts: Sequence[tuple[Sent, str, float]]) -> str:
        """Why a backward has to be refused, empty where it need not be."""
        for sent, kind, _ in parts if self.contract.on else ():
            received = self.trainable & set(sent.whole(kind))
            if not len(sent.x):
                continue  # adds zeros
            if received and sent.pass_ is None:
                return "a forward without per-sample mode"
            if sent.outside in received:
                return "a use that no layer sees"
        return ""

    def refusal_allowed(self, parts: Sequence[tuple[Sent, str, float]]) -> str:
        """Why a backward may be refused, but where it is not its rows have to be right."""
        for sent, _, _ in parts:
            if sent.switched:
                return "a graph from before per_sample was called"
            if sent.outside is not None:
                return "a use that no layer saw, of a parameter that is frozen or replaced"
            if self.contract.on and sent.pass_ is None:
                return "an empty forward without per-sample mode"
        return ""

    def failed(self, parts: Sequence[tuple[Sent, str, float]]) -> None:
        """A backward ended midway: each `.grad` has what it is given, or has not; the rows are in doubt."""
        contract, trainable = self.contract, self.trainable
        for key in trainable:
            totals = [
                sent.whole(kind)[key] * (factor / contract.scale(len(sent.x)))
                for sent, kind, factor in parts
                if key in sent.whole(kind)
            ]
            before, actual = contract.grads[key], self.parameters[key].grad
            after = None if not totals else sum(totals, torch.zeros(()) if before is None else before)
            in_parts = any(sent.name == "reentrant" for sent, _, _ in parts)  # .grad comes in several parts
            if not in_parts and differs(actual, before) and (after is None or differs(actual, after)):
                raise Wrong("grad", f"{self.name_of(key)} after a backward that failed: {differs(actual, before)}")
            if before is None:
                contract.raw.add(key)
            if differs(actual, before):
                contract.cleared.discard(key)
            if any(key in sent.whole(kind) for sent, kind, _ in parts if not len(sent.x)):
                contract.empty.add(key)
            contract.grads[key] = None if actual is None else actual.detach().clone()
        contract.doubtful |= trainable
        # Which passes it has reached is open. What was computed in them is not used any more.
        touched = [sent.pass_ for sent, _, _ in parts if sent.pass_ is not None]
        contract.touched += [now for now in touched if now not in contract.touched]
        self.sent = [sent for sent in self.sent if sent.pass_ is None or sent.pass_ not in touched]
        if contract.last in touched:
            contract.last = None

    # what is there

    def rows(self, key: Key) -> Tensor | None:
        """The rows as they are now, in a copy: looking at them must not change how they are held."""
        rows = getattr(self.parameters[key], "grad_sample", None)
        return None if rows is None else dense(rows)

    def check(self) -> None:
        """After each step: every `.grad`, and the rows."""
        contract, trainable = self.contract, self.trainable
        for key, parameter in self.parameters.items():
            wrong = differs(parameter.grad, contract.grads[key])
            if wrong:
                raise Wrong("grad", f"{self.name_of(key)}.grad: {wrong}")
        shown = {key: self.rows(key) for key in self.parameters}
        if not contract.on:
            there = [self.name_of(key) for key in trainable if shown[key] is not None]
            if there:
                raise Wrong("rows", f"{there} have rows without per-sample mode")
        elif contract.doubtful & trainable:
            self.check_law()
        else:
            due = contract.due(self.shapes, trainable)
            for key in trainable:
                allowed = [due[key]]
                if key in contract.cleared and contract.touched:
                    continue  # what a backward that failed has left, until the next one
                if key in contract.cleared:
                    allowed = [None, self.shown.get(key), due[key]]  # passes of frozen parameters alone may be gone
                elif contract.moved or contract.cleared & trainable:
                    allowed.append(self.shown.get(key))
                wrong = [differs(shown[key], rows) for rows in allowed]
                if all(wrong):
                    raise Wrong("rows", f"{self.name_of(key)}.grad_sample: {wrong[0]}")
        self.shown = shown

    def check_law(self) -> None:
        """The rows are refused, or those of each parameter add up to its `.grad`."""
        if not self.contract.accumulates:
            return
        try:
            grads = dict(enn.per_sample_grads(self.model))
        except enn.PerSampleError:
            self.happened["law: refused"] += 1
            return
        self.happened["law: rows"] += 1
        self.refuse_lawless({self.key_of(name): dense(rows) for name, rows in grads.items()})

    def refuse_lawless(self, rows: dict[Key, Tensor]) -> None:
        contract = self.contract
        raw = (self.trainable & contract.raw) - contract.cleared
        keys = [key for key in raw if contract.grads[key] is not None]
        for key in keys:
            if key not in rows and contract.grads[key].any():
                raise Wrong("law", f"{self.name_of(key)} has a gradient and no rows")
        count = len(next(iter(rows.values()))) if rows else 0
        for scales in self.scales(count):
            sums = add_up(rows, 1 / scales)
            if not any(differs(sums[key], contract.grads[key]) for key in keys if key in sums):
                return
        raise Wrong("law", f"{count} rows do not add up to .grad")

    def scales(self, count: int) -> Iterator[Tensor]:
        """By what each row is divided in `.grad`: which passes the rows are of is in doubt."""
        if not self.contract.mean:
            yield torch.ones(count)
            return
        passes = sorted({*self.contract.passes, *self.contract.touched}, key=lambda pass_: pass_.number)
        found = set()
        for number in range(len(passes) + 1):
            for chosen in itertools.combinations([pass_.batch for pass_ in passes], number):
                if sum(chosen) == count and chosen not in found:
                    found.add(chosen)
                    yield torch.tensor([float(size) for size in chosen for _ in range(size)])

    def uncertain(self) -> bool:
        """Whether rows may be refused, or not be there yet, by the words at the top of this file."""
        contract = self.contract
        return contract.moved or bool((contract.doubtful | contract.cleared | contract.bare) & self.trainable)

    def lacking(self) -> list[Key]:
        """Trainable parameters that have a gradient and no rows; those last whose gradient is zero, which may pass."""
        due = self.contract.due(self.shapes, self.trainable)
        grads = {key: self.contract.grads[key] for key in self.trainable if due[key] is None}
        return sorted((key for key, grad in grads.items() if grad is not None), key=lambda key: not grads[key].any())

    def refusal(self) -> str:
        """Why rows have to be refused, empty where they need not be."""
        if not self.contract.on:
            return "per-sample mode is off"
        if self.uncertain() or not self.contract.accumulates:
            return ""
        lacking = [self.name_of(key) for key in self.lacking() if not vanishes(self.contract.grads[key])]
        return f"{lacking} have a gradient and no rows" if lacking else ""


def dense(rows: Tensor) -> Tensor:
    """The rows made dense, in a copy."""
    return (rows.detach() * 1.0) + torch.zeros(())


def add_up(rows: dict[Key, Tensor], factors: Tensor) -> dict[Key, Tensor]:
    return {key: torch.einsum("b,b...->...", factors, own) for key, own in rows.items()}


# --- the steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Step:
    """One thing that a script does. Every step has a meaning, or is skipped, wherever it stands."""

    def __repr__(self) -> str:
        names = [option.name for option in fields(self) if not self.is_default(option.name)]
        said = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"{type(self).__name__}({', '.join(said)})"

    def is_default(self, name: str) -> bool:
        return getattr(self, name) == getattr(type(self), name, None)

    def take(self, run: Run) -> None:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Forward(Step):
    """A forward whose result waits for a backward, is dropped, is under `no_grad`, or fails in the middle."""

    samples: int = 2
    use: str = "head"
    seed: int = 0
    then: str = ""

    def take(self, run: Run) -> None:
        if isinstance(run.model, Own) and (self.use in CHECKPOINTS or (not self.samples and not self.uses_all(run))):
            raise Skip  # the general rule gives an empty gradient to a parameter that an empty batch did not use
        if self.then == "no_grad":
            if self.use == "reentrant":
                raise Skip  # torch warns
            x, words = batch(self.samples, self.seed)
            with torch.no_grad():
                USES[self.use](run.model, x, words)
            return
        run.model.fails = self.then == "fails"
        try:
            sent = run.forward(self.use, self.samples, self.seed)
        except Fault:
            return
        finally:
            run.model.fails = False
        if self.then == "":
            run.wait(sent)

    def uses_all(self, run: Run) -> bool:
        return self.use in ("head", "penalized") and run.model.back.weight is run.model.words.weight


@dataclass(frozen=True, repr=False)
class Piece(Step):
    """A part of the model is called on its own."""

    samples: int = 2
    use: str = "submodule"
    seed: int = 0

    def take(self, run: Run) -> None:
        run.wait(run.forward(self.use, self.samples, self.seed, parts=PIECES[self.use][0]))


@dataclass(frozen=True, repr=False)
class Outside(Step):
    """A parameter is used where no layer sees it."""

    samples: int = 2
    use: str = "plain_weight"
    seed: int = 0

    def take(self, run: Run) -> None:
        name, _ = OUTSIDE[self.use]
        if name == "shift" and not isinstance(run.model, Own):
            raise Skip
        sent = run.forward(f"outside:{self.use}", self.samples, self.seed, parts=["first"])
        sent.outside = run.key_of(name)
        run.wait(sent)


@dataclass(frozen=True, repr=False)
class Alone(Step):
    """A weight is used by `expanded`, and nothing else: in the pass of the last forward, if there is one."""

    seed: int = 0

    def take(self, run: Run) -> None:
        contract, last = run.contract, run.contract.last
        if not contract.on or last is None or not run.trains("head"):
            raise Skip
        if not last.reached:
            run.wait(run.forward("alone", last.batch, self.seed))
            return
        try:
            sent = run.forward("alone", last.batch, self.seed)
        except enn.PerSampleError:
            return
        finally:
            contract.last = last
        sent.outside = run.key_of("head.weight")
        run.backward([(sent, "plain", 1.0)])


@dataclass(frozen=True, repr=False)
class Together(Step):
    """Parts of the model in `one_pass`, and their backward."""

    samples: int = 2
    use: str = "method"
    seed: int = 0
    kind: str = "plain"

    def take(self, run: Run) -> None:
        one_pass, last = getattr(enn, "one_pass", None), run.contract.last
        if one_pass is None or not run.contract.on or (self.use == "own_parameter" and not isinstance(run.model, Own)):
            raise Skip
        if any(sent.pass_ is last for sent in run.sent):
            raise Skip  # whether this goes on with a pass of as many samples is not said
        run.contract.last = None
        with one_pass(run.model, self.samples):
            sent = run.forward(f"together:{self.use}", self.samples, self.seed, parts=["first", "head"])
        run.backward([(sent, self.kind, 1.0)])


@dataclass(frozen=True, repr=False)
class Backward(Step):
    """A backward of the losses of some forwards, the last by default; `fault` says where a hook raises an error."""

    of: tuple[int, ...] = (-1,)
    kind: str = "plain"
    factor: float = 1.0
    retain: bool = False
    fault: str = ""
    at: int = 0

    def take(self, run: Run) -> None:
        sents = list(dict.fromkeys(run.pick(index) for index in self.of))
        kinds = ["plain" if sent.checkpointed or sent.changed else self.kind for sent in sents]
        parts = [(sent, kind, self.factor) for sent, kind in zip(sents, kinds, strict=True)]
        trainable = sorted(run.trainable)
        parameter = run.parameters[trainable[self.at % len(trainable)]]
        registers = {
            "output": sents[0].output.register_hook,
            "parameter": parameter.register_hook,
            "accumulated": parameter.register_post_accumulate_grad_hook,
        }
        if self.fault == "output" and not sents[0].output.requires_grad:
            raise Skip
        run.backward(parts, retain=self.retain, hook=registers.get(self.fault))


def raise_once() -> Callable[[Tensor], None]:
    faults = [Fault()]

    def hook(_: Tensor) -> None:
        if faults:
            raise faults.pop()

    return hook


@dataclass(frozen=True, repr=False)
class Ask(Step):
    """`torch.autograd.grad`, which adds no rows."""

    of: int = -1
    by: str = "parameters"
    kind: str = "plain"

    def take(self, run: Run) -> None:
        sent = run.pick(self.of)
        if sent.name == "reentrant" or sent.changed or sent.switched or (sent.checkpointed and self.kind == "slope"):
            raise Skip
        loss = run.total([(sent, self.kind, 1.0)])
        if self.by == "inputs":
            torch.autograd.grad(loss, sent.x, retain_graph=True)
            return
        keys = sorted(run.trainable & sent.trainable)
        if not keys or sent.outside is not None:
            raise Skip
        wanted = [run.parameters[key] for key in keys]
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        scale = run.contract.scale(len(sent.x))
        for key, gradient in zip(keys, gradients, strict=True):
            due = sent.whole(self.kind).get(key)
            wrong = differs(gradient, None if due is None else due / scale)
            if wrong:
                raise Wrong("autograd.grad", f"{run.name_of(key)}: {wrong}")


@dataclass(frozen=True, repr=False)
class Clear(Step):
    """One of the ways to clear gradients or rows, of all parameters or of those that are trainable."""

    how: str = "none"
    trainable: bool = False

    def take(self, run: Run) -> None:
        contract = run.contract
        keys = set(run.parameters) if not self.trainable or self.how.startswith("model") else run.trainable
        parameters = [run.parameters[key] for key in keys]
        if self.how == "rows":
            for parameter in parameters:
                parameter.grad_sample = None
            contract.drop(keys)
            contract.raw -= keys
            contract.bare |= {key for key in keys if (grad := contract.grads[key]) is not None and not vanishes(grad)}
            return
        to_zero = self.how in ("optimizer_to_zero", "model_to_zero", "zero", "data_zero")
        if to_zero and any(self.is_zero_anyway(run, key) for key in keys):
            raise Skip  # nobody can tell that it was cleared
        self.clear(run, parameters)
        run.cleared_since_clipping |= keys
        contract.cleared |= {key for key in keys if any(key in held.rows for held in contract.passes)}
        contract.cleared |= contract.doubtful & keys
        contract.doubtful -= keys
        contract.empty -= keys
        contract.bare -= keys
        contract.raw -= keys
        for key in keys:
            gradient = contract.grads[key]
            if gradient is not None:
                contract.grads[key] = torch.zeros_like(gradient) if to_zero else None
            if gradient is not None and to_zero:
                contract.raw.add(key)

    def is_zero_anyway(self, run: Run, key: Key) -> bool:
        gradient, contract = run.contract.grads[key], run.contract
        held = key in contract.doubtful or any(key in held.rows for held in contract.passes)
        return gradient is not None and vanishes(gradient) and held and key not in contract.cleared

    def clear(self, run: Run, parameters: Sequence[nn.Parameter]) -> None:
        if self.how.startswith("model"):
            run.model.zero_grad(set_to_none=self.how == "model")
        elif self.how.startswith("optimizer"):
            torch.optim.SGD(parameters, lr=0.1).zero_grad(set_to_none=self.how == "optimizer")
        for parameter in parameters:
            if self.how == "none":
                parameter.grad = None
            elif self.how == "zero" and parameter.grad is not None:
                parameter.grad.zero_()
            elif self.how == "data_zero" and parameter.grad is not None:
                parameter.grad.data.zero_()


@dataclass(frozen=True, repr=False)
class Scale(Step):
    """The gradients are scaled in place, as by torch's own clipping; the rows stay."""

    factor: float = 0.5

    def take(self, run: Run) -> None:
        if any(self.is_noise(run.contract.grads[key], run.shown.get(key)) for key in run.trainable):
            raise Skip  # nobody can tell what has happened to it
        for key in run.trainable:
            gradient = run.parameters[key].grad
            if gradient is not None:
                gradient.mul_(self.factor)
                run.contract.grads[key] = run.contract.grads[key] * self.factor
                run.contract.raw.discard(key)

    def is_noise(self, gradient: Tensor | None, rows: Tensor | None) -> bool:
        """Whether a gradient and its rows are rounding noise, both of them, or so small that it is seen in them.

        Of gradients that cancel but for 1e-11 of themselves, the sum of the rows differs from `.grad` by 1e-5 of it:
        whether that is a multiple, the rows do not tell.
        """
        if gradient is None or rows is None or not gradient.any():
            return False
        return all(bool((each.abs() <= NEARLY_CANCELLED).all()) for each in (gradient, rows))


@dataclass(frozen=True, repr=False)
class Freeze(Step):
    """`requires_grad_` of a part of the model; a part that is thawed may have its old gradient cleared."""

    part: str = "head"
    on: bool = True
    clears: bool = False

    def take(self, run: Run) -> None:
        if self.part == "shift" and not isinstance(run.model, Own):
            raise Skip
        before, contract = run.trainable, run.contract
        part = run.model.shift if self.part == "shift" else run.model.get_submodule(self.part)
        keys = {run.keys[id(p)] for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())}
        if self.on and not before - keys:
            raise Skip
        part.requires_grad_(not self.on)
        thawed = run.trainable - before
        contract.moved = contract.moved or run.trainable != before
        drop_checkpoints(run)
        if thawed:  # a second derivative would reach what was a constant in the forward
            run.sent = []
        for key in thawed:
            held = any(key in held.rows for held in contract.passes)
            if self.clears:
                run.parameters[key].grad = None
                run.cleared_since_clipping.add(key)
                contract.grads[key] = None
                contract.doubtful.discard(key)
                contract.raw.discard(key)
                contract.bare.discard(key)
                if held:
                    contract.cleared.add(key)
            elif held and key not in contract.cleared:
                contract.doubtful.add(key)


@dataclass(frozen=True, repr=False)
class Replace(Step):
    """Another Parameter in the place of one, which somebody may keep."""

    module: str = "head"
    name: str = "weight"
    keeps: bool = False

    def take(self, run: Run) -> None:
        if self.name == "shift" and not isinstance(run.model, Own):
            raise Skip
        module = run.model.get_submodule(self.module)
        before = getattr(module, self.name)
        run.kept += [before] if self.keeps else []
        setattr(module, self.name, nn.Parameter(0.8 * before.detach(), requires_grad=before.requires_grad))
        run.contract.moved = True
        drop_checkpoints(run)
        run.find_parameters()


@dataclass(frozen=True, repr=False)
class Load(Step):
    """`load_state_dict`, into the parameters or in place of them."""

    assign: bool = True

    def take(self, run: Run) -> None:
        state = {name: 0.9 * value for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=self.assign)
        if self.assign:
            run.contract.moved = True
            drop_checkpoints(run)
            # a backward of the old weights with the mode off is one that the model hears nothing of
            run.sent = [sent for sent in run.sent if sent.pass_ is not None]
            run.find_parameters()
        else:
            changed_in_place(run)


@dataclass(frozen=True, repr=False)
class Update(Step):
    """A step of an optimizer."""

    def take(self, run: Run) -> None:
        torch.optim.SGD([run.parameters[key] for key in run.trainable], lr=0.05).step()
        changed_in_place(run)


def drop_checkpoints(run: Run) -> None:
    """Their second forward would be another one than the first."""
    run.sent = [sent for sent in run.sent if not sent.checkpointed]


def changed_in_place(run: Run) -> None:
    """The backward of a forward that waits is torch's own error, or right."""
    drop_checkpoints(run)
    for sent in run.sent:
        sent.changed = True


@dataclass(frozen=True, repr=False)
class PerSample(Step):
    """Per-sample mode on or off, and what is said with it; the rest stays."""

    on: bool = True
    said: tuple[tuple[str, Any], ...] = ()

    def take(self, run: Run) -> None:
        contract = run.contract
        run.model.per_sample(self.on, **dict(self.said))
        graded = {key for key, gradient in contract.grads.items() if gradient is not None and not vanishes(gradient)}
        contract.settings = {**contract.settings, **dict(self.said)}
        contract.on, contract.last, contract.moved = self.on, None, False
        contract.passes, contract.touched = [], []
        contract.cleared, contract.doubtful, contract.raw, contract.bare = set(), set(), set(), graded
        contract.empty = set()
        drop_checkpoints(run)
        for sent in run.sent:
            sent.switched = sent.switched or sent.pass_ is not None


@dataclass(frozen=True, repr=False)
class Copy(Step):
    """Going on with a deep copy; the original lives on."""

    def take(self, run: Run) -> None:
        run.original, run.waiting_there = run.model, run.sent
        run.model = deepcopy(run.original)
        settings, on = run.contract.settings, run.contract.on
        run.sent, run.parameters, run.contract = [], {}, Contract(settings, on)
        run.find_parameters()
        run.shown = {}


@dataclass(frozen=True, repr=False)
class Original(Step):
    """A backward of the model that was copied, which does not reach the copy: of an old forward, or of a new one."""

    samples: int = 2
    new: bool = True

    def take(self, run: Run) -> None:
        if run.original is None or not (self.new or run.waiting_there):
            raise Skip
        try:
            if self.new:
                x, words = batch(self.samples, 0)
                USES["head"](run.original, x, words).sum().backward()
            else:
                run.waiting_there.pop().loss("squares").backward()
        except RuntimeError:  # PerSampleError is one; what is due of the original was asked before
            return


@dataclass(frozen=True, repr=False)
class Clip(Step):
    """`clip_grad_sample_norms_`."""

    max_norm: float = 0.5
    reduction: str = "sum"

    def take(self, run: Run) -> None:
        contract, trainable = run.contract, run.trainable
        gone = {key for key in contract.cleared if contract.grads[key] is None} if contract.accumulates else set()
        rows = {key: shown for key, shown in run.shown.items() if shown is not None and key not in gone}
        of_trainable = {key: shown for key, shown in rows.items() if key in trainable}
        lacking, uncertain = run.lacking(), run.uncertain()
        refusal = "there are no rows" if not of_trainable and (gone or not uncertain) else run.refusal()
        foreign = contract.bare | contract.doubtful
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                norms = enn.clip_grad_sample_norms_(run.model, self.max_norm, reduction=self.reduction)
        except enn.PerSampleError as error:
            run.happened[f"clipping refused{', as is due' if refusal else ''}"] += 1
            if not refusal and not uncertain and not lacking:
                raise Wrong("false alarm", str(error)) from error
            return
        if refusal:
            raise Wrong("no error", f"clipping went through where {refusal}")
        texts = [str(warning.message) for warning in caught]
        words = (
            "were clipped once already, before the parameters",
            ".grad holds the clipped sum from before the parameters",
        )
        of_earlier_steps = [text for text in texts if any(each in text for each in words)]
        of_parts_cleared = [text for text in texts if "since then other gradients were cleared" in text]
        said = [text for text in texts if text not in (*of_earlier_steps, *of_parts_cleared)]
        if of_parts_cleared and not run.cleared_since_clipping & trainable:
            raise Wrong("false alarm", of_parts_cleared[0])
        if not contract.accumulates:  # rows that the next backward of the same forwards has replaced
            said = [text for text in said if "has replaced the rows of an earlier one of the same forwards" not in text]
        if said and not foreign:
            raise Wrong("false alarm", said[0])
        versions = {key: parameter._version for key, parameter in run.parameters.items()}
        named = [run.key_of(name) for text in of_earlier_steps for name in re.findall("'([^']+)'", text)]
        if any(run.versions_at_clipping.get(key, versions[key]) == versions[key] for key in named):
            raise Wrong("false alarm", of_earlier_steps[0])
        run.happened[f"clipped{', with a warning of what it replaces' if said else ''}"] += 1
        replaced = {key for key in contract.bare - contract.doubtful - contract.cleared if key in of_trainable}
        if replaced and contract.accumulates and not said:
            raise Wrong("no warning", "clipping has replaced gradients of which there were no rows")
        if contract.doubtful & trainable and contract.accumulates:
            run.refuse_lawless(of_trainable)
        # rows of frozen parameters may count or not, and those whose gradient is zero may have gone with it
        drawn = itertools.product([set(), set(rows) - trainable], [set(), set(rows) & contract.cleared])
        readings = [self.clipped({key: rows[key] for key in rows.keys() - frozen - zero}) for frozen, zero in drawn]
        fitting = [self.added(run, totals) for expected, totals in readings if not differs(norms, expected)]
        if not fitting:
            raise Wrong("norms", differs(norms, readings[0][0]))
        after = [{**contract.grads, **grads} for grads in fitting]
        fits = [
            all(not differs(parameter.grad, grads[key]) for key, parameter in run.parameters.items()) for grads in after
        ]
        clipped = fitting[fits.index(True) if any(fits) else 0]
        contract.grads.update(clipped)
        run.versions_at_clipping.update({key: versions[key] for key in clipped})  # others keep their clipped sum
        run.cleared_since_clipping -= set(clipped)
        grads_now = {key: parameter.grad for key, parameter in run.parameters.items()}
        fits = [all(not differs(grad, grads[key]) for key, grad in grads_now.items()) for grads in after]
        contract.doubtful |= {key for key, grad in clipped.items() if vanishes(grad)}
        contract.raw -= set(clipped)
        contract.bare -= set(clipped)
        if not contract.accumulates:
            contract.drop(set(rows))
        again = contract.cleared & set(clipped)
        contract.cleared -= again
        contract.doubtful |= again

    def added(self, run: Run, totals: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """What each gradient is after the clipping."""
        adds, grads = not run.contract.accumulates, run.contract.grads
        return {key: grads[key] + total if adds and grads[key] is not None else total for key, total in totals.items()}

    def clipped(self, rows: dict[Key, Tensor]) -> tuple[Tensor, dict[Key, Tensor]]:
        """The norms, and what each gradient becomes."""
        count = len(next(iter(rows.values()))) if rows else 0
        squares = [own.reshape(len(own), math.prod(own.shape[1:])).square().sum(1) for own in rows.values()]
        if any(len(square) != count for square in squares):
            return torch.full((count,), math.nan), {}
        norms = sum(squares, torch.zeros(count)).sqrt()
        factors = (self.max_norm / norms).clamp(max=1.0)
        if self.reduction == "mean":
            factors = factors / max(1, count)
        return norms, add_up(rows, factors)


@dataclass(frozen=True, repr=False)
class Grads(Step):
    """`per_sample_grads`."""

    def take(self, run: Run) -> None:
        lacking, uncertain, refusal = run.lacking(), run.uncertain(), run.refusal()
        try:
            grads = dict(enn.per_sample_grads(run.model))
        except enn.PerSampleError as error:
            if not refusal and not uncertain and not lacking:
                raise Wrong("false alarm", str(error)) from error
            return
        if refusal and run.contract.on:
            raise Wrong("no error", f"per_sample_grads gave rows where {refusal}")
        for key in run.trainable if not uncertain else ():
            rows = grads.get(run.name_of(key))
            wrong = differs(None if rows is None else dense(rows), run.shown.get(key))
            if wrong:
                raise Wrong("per_sample_grads", f"{run.name_of(key)}: {wrong}")


# --- stories ------------------------------------------------------------------------------------------------------

MODELS = {"Layers": Layers, "Own": Own}
PARTS = ["words", "first", "mix", "frozen", "gain", "head", "shift"]
PARAMETERS = [("head", "weight"), ("head", "bias"), ("first", "weight"), ("words", "weight"), ("mix.2", "bias")]
PARAMETERS += [("gain", "gain"), ("", "shift")]
CLEARS = ["optimizer", "optimizer_to_zero", "model", "model_to_zero", "none", "zero", "data_zero", "rows"]
FAULTS = ["output", "parameter", "parameter", "accumulated"]
SAID = [
    {"loss_reduction": "mean"},
    {"loss_reduction": "sum"},
    {"materialize": True},
    {"materialize": False},
    {"accumulate_grad": True},
    {"accumulate_grad": False},
    {},
]


@dataclass
class Story:
    """Steps, and what they begin with."""

    steps: list[Step]
    model: str = "Layers"
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        steps = "".join(f"    {step},\n" for step in self.steps)
        return f"Story([\n{steps}], {self.model!r}, {self.settings})"

    @classmethod
    def random(cls, seed: int, length: int = 40) -> Story:
        rng = random.Random(seed)
        settings: dict[str, Any] = {"loss_reduction": "sum"} if rng.random() < 0.3 else {}
        settings |= {"accumulate_grad": False} if rng.random() < 0.2 else {}
        settings |= {"materialize": True} if rng.random() < 0.2 else {}
        model = "Own" if rng.random() < 0.25 else "Layers"
        steps: list[Step] = []
        while len(steps) < length:
            steps += some_steps(rng)
        return cls(steps[:length], model, settings)

    def play(self) -> Counter[str]:
        """Takes the steps; what has happened."""
        run = Run(MODELS[self.model], self.settings)
        gc.disable()  # or what goes wrong may depend on when a parameter that was replaced is gone
        try:
            with warnings.catch_warnings():  # stories know what is held, and clip when they like
                warnings.filterwarnings("ignore", "clip.*has replaced the rows", enn.PerSampleWarning)
                for number, step in enumerate(self.steps):
                    run.take(number, step)
        finally:
            gc.enable()
        return run.happened

    def error(self) -> Exception | None:
        """What goes wrong."""
        try:
            self.play()
        except Exception as error:
            return error
        return None

    def shrunk(self, tries: int = 400) -> Story:
        """The shortest that goes wrong in the same way: steps left out, then each as plain as can be."""
        story, kind = self, kind_of(self.error())

        def still(other: Story) -> bool:
            nonlocal story, tries
            tries -= 1
            if tries < 0 or kind_of(other.error()) != kind:
                return False
            story = other
            return True

        size = len(story.steps)
        while size:
            start = 0
            while start < len(story.steps):
                if not still(replace(story, steps=story.steps[:start] + story.steps[start + size :])):
                    start += size
            size //= 2
        still(replace(story, model="Layers"))
        still(replace(story, settings={}))
        for number, step in enumerate(story.steps):
            for option in fields(step):
                plain = replace(story.steps[number], **{option.name: option.default})
                if plain != story.steps[number]:
                    still(replace(story, steps=[*story.steps[:number], plain, *story.steps[number + 1 :]]))
        return story


def kind_of(error: Exception | None) -> str:
    return "" if error is None else error.kind if isinstance(error, Wrong) else type(error).__name__


def some_steps(rng: random.Random) -> list[Step]:
    """A step, or a few that seldom meet by chance."""
    samples, seed = rng.choice([0, 1, 2, 2, 3, 3, 3, 4]), rng.randrange(4)
    kind = rng.choice(["plain", "plain", "plain", "squares", "slope"])
    use = rng.choice([*WHOLE, "head", "head", "back"])
    said = tuple(rng.choice(SAID).items())
    step = [Forward(samples, use, seed), Backward((-1,), kind)]
    draws: list[tuple[int, Callable[[], list[Step]]]] = [
        (20, lambda: [Forward(samples, use, seed)]),
        (5, lambda: [Forward(samples, use, seed, rng.choice(["dropped", "no_grad", "fails"]))]),
        (5, lambda: [Piece(samples, rng.choice(list(PIECES)), seed)]),
        (1, lambda: [Outside(samples, rng.choice(list(OUTSIDE)), seed)]),
        (1, lambda: [Alone(seed)]),
        (4, lambda: [Together(samples, rng.choice(list(TOGETHER)), seed, kind)]),
        (18, lambda: [Backward((rng.randrange(4),), kind, rng.choice([1.0, 1.0, 2.0, -1.0]), rng.random() < 0.3)]),
        (6, lambda: [Backward((0, 1, 2)[: rng.choice([2, 3])], kind, retain=rng.random() < 0.2)]),
        (3, lambda: [Backward((-1,), kind, fault=rng.choice(FAULTS), at=rng.randrange(12))]),
        (4, lambda: [Ask(rng.randrange(4), rng.choice(["parameters", "inputs"]), kind)]),
        (12, lambda: [Clear(rng.choice(CLEARS), rng.random() < 0.3)]),
        (1, lambda: [Scale()]),
        (4, lambda: [Freeze(rng.choice(PARTS), rng.random() < 0.5, rng.random() < 0.5)]),
        (2, lambda: [Replace(*rng.choice(PARAMETERS), rng.random() < 0.5)]),
        (1, lambda: [Load(rng.random() < 0.7)]),
        (3, lambda: [Update()]),
        (2, lambda: [PerSample(rng.random() < 0.6, said)]),
        (1, lambda: [PerSample(False), PerSample(True)]),
        (1, lambda: [Copy()]),
        (1, lambda: [Original(samples, rng.random() < 0.5)]),
        (5, lambda: [Clip(rng.choice([0.1, 0.5, 5.0]), rng.choice(["sum", "sum", "mean"]))]),
        (2, lambda: [Grads()]),
        # a step of training
        (
            6,
            lambda: [
                Forward(samples, use, seed),
                Backward((-1,), kind),
                Clip(),
                Update(),
                Clear(rng.choice(CLEARS[:7])),
            ],
        ),
        (3, lambda: [*step, Clear(rng.choice(CLEARS))]),
        (1, lambda: [Copy(), Original(samples), Forward(2), Original(samples, False), Backward()]),
        # a new optimizer for what is not frozen
        (
            2,
            lambda: [
                Freeze(part := rng.choice(PARTS)),
                Clear(rng.choice(CLEARS[:7]), True),
                *step,
                Freeze(part, False),
            ],
        ),
        # two forwards of a pass, and between them what begins none
        (4, lambda: [Forward(samples, use, seed), *between(rng), Forward(samples, use), Backward((-1, -2), kind)]),
        # gradients that cancel, and are scaled
        (1, lambda: [Forward(samples), Backward(), Forward(samples), Backward(factor=-1.0), Scale()]),
    ]
    weights, makers = zip(*draws, strict=True)
    return rng.choices(makers, weights)[0]()


def between(rng: random.Random) -> list[Step]:
    """What stands between two forwards that are one pass, and changes nothing of that."""
    return rng.choice(
        [
            [Forward(rng.randrange(5), then="no_grad")],
            [Ask(-1, rng.choice(["parameters", "inputs"]))],
            [Clear(rng.choice(CLEARS))],
            [Clip()],
            [Grads()],
            [],
        ]
    )
