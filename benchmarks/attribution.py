"""Measures what attribution takes beside the plain step, as a markdown table.

    python -m benchmarks.attribution > benchmarks/results/attribution.md

Everything is included: forward, backward, and what is done with the rows. All methods take turns. Beside a projection
stands the rms error of the cosines of 16 gradients times sqrt(dim), which is about 1 for normal random numbers.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

import expanded_nn as enn
from benchmarks.__main__ import machine, version_of
from benchmarks.measure import quartiles, timed
from benchmarks.peers import functional, needed, optional, plain
from benchmarks.report import about, table, times
from benchmarks.workloads import WORKLOADS, Task

PAGE = """# What attribution costs

Written by `python -m benchmarks.attribution > benchmarks/results/attribution.md`: the time of a step over 16 samples,
everything included, as a multiple of the plain step of the same model; medians of rounds in which all methods take
turns. Kronecker factors are added up over 16 batches, and read at the end. In brackets, beside a projection: the rms
error of the cosines of the samples' gradients times the root of the number of dimensions, about 1 for normal random
numbers. LoGra shares out the dimensions among the layers. `dattri-llm` leaves out norms here, and recurrent layers
always: of the LSTM there is only its head.

{}

{}"""
BATCH, QUERIES, DIMS = 16, 8, (512, 4096)
BATCHES = 16  # that Kronecker factors are added up over
SLOW = 50  # plain steps: what takes longer is timed once
dattri, trak = optional("dattri_llm"), optional("trak.projectors")
Run = Callable[[], Any]


def ours(task: Task, **mode: bool) -> Callable[[], enn.PerSampleGrads]:
    model = enn.convert(task.model).per_sample(accumulate_grad=False, **mode)

    def grads() -> enn.PerSampleGrads:
        task.loss(model).backward()
        return enn.per_sample_grads(model)

    return grads


def attribute(task: Task, make: Callable[[enn.PerSampleGrads], Tensor], compiled: bool) -> Run:
    """A step that makes something of the rows, and nothing else."""
    model = enn.convert(task.model).per_sample(accumulate_grad=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        replace(task, x=x, y=y).loss(model).backward()
        return make(enn.per_sample_grads(model))

    run = enn.compile(step) if compiled else step
    for _ in range(3 if compiled else 0):  # the graph is made at the second call
        run(task.x, task.y)
    return lambda: run(task.x, task.y)


def project(task: Task, queries: Task, dim: int, compiled: bool = False) -> Run:
    return attribute(task, enn.Projection(dim), compiled)


def influence(task: Task, queries: Task, compiled: bool = False) -> Run:
    asked = ours(queries)()
    return attribute(task, lambda grads: grads.gram(asked), compiled)


def kronecker(task: Task, queries: Task) -> Run:
    grads, total = ours(task, keep_factors=True), ours(task, keep_factors=True)().kronecker()

    def run() -> list[tuple[Any, ...]]:
        for _ in range(BATCHES):
            grads().kronecker(total)
        return [tuple(factors) for factors in total.values()]

    return run


def trak_projection(task: Task, queries: Task, dim: int) -> Run:
    """The projector of TRAK for the CPU, on dense rows."""
    package, rows = needed(trak, "traker"), functional(task, clip=False).run
    numel = sum(parameter.numel() for parameter in task.model.parameters())
    projector = package.BasicProjector(numel, dim, 0, package.ProjectionType.rademacher, torch.device("cpu"))
    return lambda: projector.project(torch.cat([each.flatten(1) for each in rows()], 1), 0)


def hooked(task: Task, callbacks: list[Any] | None = None, dim: int | None = None) -> Run:
    """`dattri-llm`: what its hooks caught, in its fastest mode, which leaves linear layers without `.grad`."""
    package = needed(dattri, "dattri-llm")
    model, caught = plain_copy(task.model), package.CaptureCallback()
    kinds = {
        name: "invasive_linear_io" if isinstance(layer, nn.Linear) else "linear_io" for name, layer in layers_of(model)
    }
    settings: dict[str, Any] = {"hook_types": kinds}
    if dim is not None:
        width = max(1, round(sqrt(dim / len(kinds))))
        settings["projection_kwargs"] = {"__default__": {"style": "logra", "proj_dim": width}}
        settings["projector"] = normal_numbers
    manager = package.HookManager(model, package.HookManagerConfig(**settings), callbacks=callbacks or [caught])

    def run() -> Any:
        with manager.collect():
            task.loss(model).backward()
        model.zero_grad()
        return caught.record and caught.record.gradient

    return run


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those whose factors it catches, but norms, which it does not project so."""
    kinds = nn.Linear | nn.Conv2d | nn.Embedding
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]


def plain_copy(model: nn.Module) -> nn.Module:
    return enn.revert(enn.convert(model))


def normal_numbers(_: Tensor, __: int, *, proj_dim: int, proj_seed: int, **___: Any) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(proj_seed)
    return lambda x: x @ torch.randn(x.shape[1], proj_dim, generator=generator.manual_seed(proj_seed)) / sqrt(proj_dim)


def hooked_projection(task: Task, queries: Task, dim: int) -> Run:
    run = hooked(task, dim=dim)

    def rows() -> Tensor:
        parts = run().materialize().data
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    return rows


def hooked_influence(task: Task, queries: Task) -> Run:
    run, asked = hooked(task), hooked(queries)()
    return lambda: run().similarity(asked, reduce="all")


def hooked_kronecker(task: Task, queries: Task) -> Run:
    run = hooked(task, [needed(dattri, "dattri-llm").KroneckerCovarianceCallback()])
    return lambda: [run() for _ in range(BATCHES)]


METHODS: dict[str, Callable[[Task, Task], Run]] = {
    **{f"projection to {dim}: expanded_nn": partial(project, dim=dim) for dim in DIMS},
    **{f"projection to {dim}: expanded_nn, compiled": partial(project, dim=dim, compiled=True) for dim in DIMS},
    **{f"projection to {dim}: dattri-llm, LoGra": partial(hooked_projection, dim=dim) for dim in DIMS},
    f"projection to {DIMS[0]}: traker": partial(trak_projection, dim=DIMS[0]),
    "Kronecker factors: expanded_nn": kronecker,
    "Kronecker factors: dattri-llm": hooked_kronecker,
    f"influence {BATCH} x {QUERIES}: expanded_nn": influence,
    f"influence {BATCH} x {QUERIES}: expanded_nn, compiled": partial(influence, compiled=True),
    f"influence {BATCH} x {QUERIES}: dattri-llm": hooked_influence,
}


def cosines(inner: Tensor) -> Tensor:
    norms = inner.diagonal().sqrt()
    return (inner / norms / norms[:, None])[~torch.eye(len(inner), dtype=torch.bool)]


def seconds(run: Run, often: int = 1) -> float:
    def several() -> None:
        for _ in range(often):
            run()

    return timed(several, torch.device("cpu")) / often


def measure(task: Task, queries: Task, methods: list[str], rounds: int) -> dict[str, str]:
    """The cells of a column."""
    step, exact, order = plain(task), ours(task)().gram(), random.Random(0)

    def whole() -> None:
        step.run()
        step.clear()

    whole()
    often = max(1, round(0.02 / seconds(whole)))
    notes: dict[str, str] = {}
    playing: dict[str, tuple[Run, int, list[float]]] = {}
    ratios: dict[str, list[float]] = {}
    for name in methods:
        try:
            run, found = METHODS[name](task, queries), []
            steps = BATCHES if name.startswith("Kronecker") else 1
            gc.collect()  # not in the first call, which may be the only one that is timed
            first = seconds(lambda run=run, found=found: found.append(run())) / seconds(whole, often) / steps
        except Exception as error:  # whatever a peer raises belongs into the table
            notes[name] = type(error).__name__
            continue
        notes[name], result = "", found[0]
        if name.startswith("projection"):
            dim = int(name.split()[2].rstrip(":"))
            off = (cosines(result @ result.T) - cosines(exact)).square().mean().sqrt()
            notes[name] = f" ({float(off) * sqrt(dim):.2f})"
        elif name.startswith("influence"):
            alike = torch.cosine_similarity(result.flatten(), influence(task, queries)().flatten(), dim=0)
            notes[name] = "" if alike > 0.999 else f" (not the same: cosine {alike:.3f})"
        ratios[name] = [first] if first > SLOW else []
        if first <= SLOW:
            playing[name] = run, steps, ratios[name]
    for _ in range(rounds):
        base = seconds(whole, often)
        for run, steps, own in order.sample(list(playing.values()), len(playing)):
            own.append(seconds(run, max(1, often // steps)) / steps / base)
    return {name: (times(quartiles(ratios[name])[1]) if name in ratios else "") + note for name, note in notes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=["gpt", "cnn", "mlp", "lstm"])
    parser.add_argument("--methods", nargs="+", default=[""], help="those whose name has one of these parts")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a trial run at tiny sizes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # the peers' own
    logging.disable(logging.WARNING)
    methods = [name for name in METHODS if any(part in name for part in arguments.methods)]
    columns = {}
    for name in arguments.only:
        tasks = (WORKLOADS[name].task(torch.device("cpu"), arguments.quick, batch=batch) for batch in (BATCH, QUERIES))
        columns[name] = measure(*tasks, methods, arguments.rounds)
        print(name, columns[name], file=sys.stderr, flush=True)
    versions = {name: version_of(name) for name in ("expanded_nn", "torch", "dattri-llm", "traker")}
    where = about(machine(torch.device("cpu")) | {"versions": versions})
    rows = [[name, *(column[name] for column in columns.values())] for name in methods]
    print(PAGE.format(table(["", *columns], rows), f"Measured {where}"))


if __name__ == "__main__":
    main()
