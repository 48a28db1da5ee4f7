"""The contestants: ways to get per-sample gradients, and the plain step that they are compared with.

A method makes a `Step` from a task. There are two kinds of results, each a list in the order of the parameters:
`rows` are dense `(B, *shape)` gradients in memory, `clip` is the sum of the rows after clipping each to norm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import expanded_nn as enn
from benchmarks.workloads import Recurrent, Task

MAX_NORM = 1.0


@dataclass(frozen=True)
class Step:
    """A step of one method: `run` gives its results, `clear` frees them as `zero_grad` does. Both are timed.

    Attributes:
        untimed: How many steps after the first one are not, as the library looks in them whether samples are mixed.
    """

    run: Callable[[], list[Any]]
    clear: Callable[[], object] = lambda: None
    untimed: int = 0


class NotInstalled(Exception):
    """A peer is missing here."""


def optional(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def needed(module: ModuleType | None, name: str) -> ModuleType:
    if module is None:
        raise NotInstalled(name)
    return module


opacus_wrappers, opacus_layers = optional("opacus.grad_sample"), optional("opacus.layers")
backpack, backpack_extensions = optional("backpack"), optional("backpack.extensions")
jax_models = optional("benchmarks.jax_models")


def clip_factors(norms: Tensor) -> Tensor:
    return (MAX_NORM / norms).clamp(max=1.0)


def clipped_sum(rows: Iterable[Tensor]) -> list[Tensor]:
    """The sum of the rows, each clipped to norm 1, from dense rows: what Opacus' optimizer does."""
    rows = list(rows)
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in rows]).norm(dim=0)
    return [torch.einsum("b,b...->...", clip_factors(norms), each) for each in rows]


def plain(task: Task, convert: Callable[[nn.Module], nn.Module] = deepcopy, compiled: bool = False) -> Step:
    """The ordinary mini-batch step."""
    model = convert(task.model)
    called, parameters = torch.compile(model) if compiled else model, list(model.parameters())

    def run() -> list[Tensor]:
        task.loss(called).backward()
        return gradients(parameters, "grad")

    return Step(run, model.zero_grad)


def gradients(parameters: list[nn.Parameter], attribute: str) -> list[Tensor]:
    return [getattr(parameter, attribute) for parameter in parameters]


def ours(task: Task, clip: bool = False, compiled: bool = False, **mode: bool) -> Step:
    model = enn.convert(task.model).per_sample(**mode)
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        replace(task, x=x, y=y).loss(model).backward()
        if clip:
            enn.clip_grad_sample_norms_(model, MAX_NORM)

    called = enn.compile(step) if compiled else step
    waits = compiled  # the graph is made at the second call

    def run() -> list[Tensor]:
        nonlocal waits
        if waits:
            called(task.x, task.y)
            model.zero_grad()
            waits = False
        called(task.x, task.y)
        return gradients(parameters, "grad" if clip else "grad_sample")

    return Step(run, model.zero_grad, untimed=7)


def each_alone(task: Task, model: nn.Module) -> Iterable[tuple[Tensor, ...]]:
    parameters = list(model.parameters())
    for i in range(len(task.x)):
        yield torch.autograd.grad(task.loss(model, slice(i, i + 1)), parameters)


def loop_rows(task: Task) -> Step:
    """The samples one by one: what all others have to agree with."""
    model = deepcopy(task.model)
    return Step(lambda: [torch.stack(rows) for rows in zip(*each_alone(task, model), strict=True)])


def loop_clip(task: Task) -> Step:
    model = deepcopy(task.model)

    def run() -> list[Tensor]:
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for grads in each_alone(task, model):
            factor = clip_factors(torch.stack([each.norm() for each in grads]).norm())
            for sum_so_far, each in zip(total, grads, strict=True):
                sum_so_far.add_(each * factor)
        return total

    return Step(run)


def functional(task: Task, clip: bool, compiled: bool = False) -> Step:
    """`torch.func`: `vmap` over the gradient of one sample's loss."""
    model = deepcopy(task.model)
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return Task(model, x[None], y[None]).loss(partial(functional_call, model, parameters))

    def results(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        rows = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y).values()
        return clipped_sum(rows) if clip else list(rows)

    called = torch.compile(results) if compiled else results
    return Step(lambda: called(parameters, task.x, task.y))


def wrapped_by_opacus(task: Task, mode: str, **arguments: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """The wrapped model, and its parameters in the order of the task's own."""
    wrappers, layers = needed(opacus_wrappers, "opacus"), needed(opacus_layers, "opacus")
    model = deepcopy(task.model)
    if isinstance(model, Recurrent):
        old = model.rnn
        twin = {nn.LSTM: layers.DPLSTM, nn.GRU: layers.DPGRU}[type(old)]
        new = twin(old.input_size, old.hidden_size, old.num_layers, batch_first=True, bidirectional=old.bidirectional)
        new.load_state_dict(old.state_dict())
        model.rnn = new.to(task.x.device, task.x.dtype)
    by_name = dict(model.named_parameters())
    parameters = [by_name[name] for name, _ in task.model.named_parameters()]
    return wrappers.wrap_model(model, grad_sample_mode=mode, **arguments), parameters


def opacus(task: Task, clip: bool, mode: str) -> Step:
    model, parameters = wrapped_by_opacus(task, mode)

    def run() -> list[Tensor]:
        task.loss(model).backward()
        rows = [parameter.grad_sample for parameter in parameters]
        return clipped_sum(rows) if clip else rows

    return Step(run, partial(forget, parameters, "grad_sample"))


def ghost_clipping(task: Task) -> Step:
    """Opacus: one backward for the norms, a second one of the weighted losses."""
    model, parameters = wrapped_by_opacus(task, "ghost", max_grad_norm=MAX_NORM, use_ghost_clipping=True)

    def run() -> list[Tensor]:
        losses = task.losses(model)
        losses.mean().backward(retain_graph=True)
        factors = model.get_clipping_coef()
        for parameter in parameters:
            parameter.grad = None
        model.disable_hooks()
        (losses * factors).sum().backward()
        model.enable_hooks()
        return [parameter.grad for parameter in parameters]

    return Step(run, partial(forget, parameters, "grad_sample", "_norm_sample"))


def batch_grad(task: Task, clip: bool) -> Step:
    """BackPACK; its rows are those of the loss as it is scaled, so the samples' losses are summed."""
    package, extensions = needed(backpack, "backpack-for-pytorch"), needed(backpack_extensions, "backpack-for-pytorch")
    model = package.extend(deepcopy(task.model))
    parameters = list(model.parameters())

    def run() -> list[Tensor]:
        with package.backpack(extensions.BatchGrad()):
            (task.loss(model) * len(task.x)).backward()
        missing = {type(each).__name__ for each in model.modules() for p in each.parameters(recurse=False) if lacks(p)}
        if missing:
            raise NotImplementedError(f"no rows for the parameters of {', '.join(sorted(missing))}")
        rows = gradients(parameters, "grad_batch")
        return clipped_sum(rows) if clip else rows

    return Step(run, partial(forget, parameters, "grad_batch"))


def lacks(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "grad_batch", None) is None


def forget(parameters: list[nn.Parameter], *attributes: str) -> None:
    for parameter in parameters:
        for attribute in ("grad", *attributes):
            setattr(parameter, attribute, None)


def jax(task: Task, clip: bool) -> Step:
    """JAX: `jit(vmap(grad))` of the same network, written once more."""
    return Step(needed(jax_models, "jax").step(task, MAX_NORM if clip else None))


@dataclass(frozen=True)
class Method:
    """A contestant in one kind of task: `step` (the plain gradient), `rows`, or `clip`."""

    name: str
    kind: str
    build: Callable[[Task], Step]
    extra: bool = True  # whether it is measured in the workloads that only vary others
    compiles: bool = False
    loops: bool = False  # whether it compiles a loop over time in no more time than anything else

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.name}"


def both(name: str, build: Callable[..., Step], **settings: bool) -> list[Method]:
    return [Method(name, kind, partial(build, clip=kind == "clip"), **settings) for kind in ("rows", "clip")]


METHODS = [
    Method("plain", "step", plain),
    Method("plain, compiled", "step", partial(plain, compiled=True), compiles=True),
    Method("expanded_nn, mode off", "step", partial(plain, convert=enn.convert)),
    Method("expanded_nn", "rows", partial(ours, materialize=True, accumulate_grad=False)),
    Method("expanded_nn, .grad as well", "rows", partial(ours, materialize=True)),
    Method("expanded_nn, factored", "rows", partial(ours, accumulate_grad=False)),
    Method(
        "expanded_nn, compiled",
        "rows",
        partial(ours, materialize=True, accumulate_grad=False, compiled=True),
        compiles=True,
        loops=True,
    ),
    Method("expanded_nn", "clip", partial(ours, clip=True, accumulate_grad=False)),
    Method("expanded_nn, .grad as well", "clip", partial(ours, clip=True)),
    Method(
        "expanded_nn, compiled",
        "clip",
        partial(ours, clip=True, accumulate_grad=False, compiled=True),
        compiles=True,
        loops=True,
    ),
    Method("loop", "rows", loop_rows),
    Method("loop", "clip", loop_clip),
    *both("torch.func", functional, extra=False),
    *both("torch.func, compiled", partial(functional, compiled=True), compiles=True),
    *both("Opacus hooks", partial(opacus, mode="hooks")),
    *both("Opacus functorch", partial(opacus, mode="functorch"), extra=False),
    *both("Opacus ew", partial(opacus, mode="ew"), extra=False),
    Method("Opacus ghost clipping", "clip", ghost_clipping),
    *both("BackPACK", batch_grad),
    *both("JAX", jax),
]
