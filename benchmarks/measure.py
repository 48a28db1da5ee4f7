"""Time and memory of the methods on one task, each checked against the loop over the samples first."""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Method, NotInstalled, Step, clipped_sum, loop_rows
from benchmarks.workloads import Task

BLOCK = 0.01  # seconds: shorter steps are repeated, and timed together
FEWEST, MOST = 5, 40  # turns of a method
SMALL = 1e-3  # of the whole gradient: parameters whose gradient is smaller are compared on this scale
# A ReLU whose input is rounded to the other side of zero moves a float32 gradient by 1e-3.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 1e-1}


@dataclass
class Result:
    """What was found about one method on one task.

    Attributes:
        state: "measured", "failed", "wrong", or "not installed".
        note: The error's first line, where there is one.
        error: The largest relative difference from the loop, over the parameters.
        first: Seconds that the first step took, with whatever is compiled there.
        seconds: The quartiles of the step's time.
        ratio: The quartiles of the step's time divided by that of the plain step in the same round.
    """

    name: str
    kind: str
    state: str = "measured"
    note: str = ""
    error: float | None = None
    first: float | None = None
    turns: int = 0
    seconds: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)


def timed(action: Callable[[], object], device: torch.device, *, others: bool = False) -> float:
    """Seconds; on a GPU between two events, so that what was only queued counts as well.

    With one thread they are those of the processor, so that other programs do not count, nor, unless `others` is true,
    the processes of a compiler.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    clock = time.perf_counter if others or torch.get_num_threads() > 1 else time.process_time
    begin = clock()
    action()
    return clock() - begin


def whole(step: Step) -> None:
    step.run()
    step.clear()


def expected(task: Task) -> dict[str, list[Tensor]]:
    """The results of each kind, from the loop over the samples in float64."""
    rows = loop_rows(task.to(task.x.device, torch.float64)).run()
    return {"rows": rows, "clip": clipped_sum(rows), "step": [each.mean(0) for each in rows]}


def as_tensor(result: Any, like: Tensor) -> Tensor:
    """A result of any library, in the type and on the device of `like`."""
    return (result if isinstance(result, Tensor) else torch.tensor(result.__array__())).to(like)


def difference(results: Sequence[Any], wanted: Sequence[Tensor]) -> float:
    """The largest over the parameters of `|result - wanted| / |wanted|`."""
    floor = SMALL * torch.stack([each.norm() for each in wanted]).norm()
    found = [as_tensor(each, like) for each, like in zip(results, wanted, strict=True)]
    if any(each.shape != like.shape for each, like in zip(found, wanted, strict=True)):
        raise ValueError("results of another shape")
    return max(float((a - b).norm() / (b.norm() + floor)) for a, b in zip(found, wanted, strict=True))


def admitted(method: Method, task: Task, wanted: Sequence[Tensor]) -> tuple[Result, Step | None]:
    """Builds and checks a method; no step where it is missing, fails, or is wrong."""
    result = Result(method.name, method.kind)
    found: list[Any] = []
    try:
        step = method.build(task)
        result.first = timed(lambda: found.extend(step.run()), task.x.device, others=True)
        result.error = difference(found, wanted)
        step.clear()
    except NotInstalled:
        result.state = "not installed"
        return result, None
    except Exception as error:  # whatever a peer raises belongs into the table
        result.state = "failed"
        result.note = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"
        return result, None
    if not result.error <= TOLERANCES[next(task.model.parameters()).dtype]:
        result.state = "wrong"
        return result, None
    return result, step


def compare(task: Task, methods: Sequence[Method], *, seconds: float, rounds: int = MOST) -> list[Result]:
    """Times the methods in turns, in a new order each round.

    Args:
        task: What they compute.
        methods: The first is the plain step.
        seconds: What each method may spend, as long as it had `FEWEST` turns.
        rounds: The most turns of each.
    """
    torch._dynamo.reset()
    wanted = expected(task)
    results, steps = zip(*(admitted(each, task, wanted[each.kind]) for each in methods), strict=True)
    del wanted
    entrants = [i for i, step in enumerate(steps) if step is not None]
    if 0 not in entrants:
        raise RuntimeError(f"the plain step: {results[0]}")
    for step in filter(None, steps):
        for _ in range(step.untimed):
            whole(step)
    repeats = calls_a_turn(steps[0], task.x.device)
    times: list[list[float]] = [[] for _ in methods]
    ratios: list[list[float]] = [[] for _ in methods]
    order = random.Random(0)
    for turn in range(rounds):
        playing = [i for i in entrants if turn < FEWEST or sum(times[i]) * repeats < seconds]
        if not playing:
            break
        playing = list({0, *playing})
        order.shuffle(playing)
        spent = {i: timed(lambda i=i: [whole(steps[i]) for _ in range(repeats)], task.x.device) for i in playing}
        for i in playing:
            times[i].append(spent[i] / repeats)
            ratios[i].append(spent[i] / spent[0])
    for i in entrants:
        results[i].turns = len(times[i])
        results[i].seconds, results[i].ratio = quartiles(times[i]), quartiles(ratios[i])
    return list(results)


def calls_a_turn(step: Step, device: torch.device) -> int:
    whole(step)
    return ceil(BLOCK / min(BLOCK, timed(lambda: whole(step), device)))


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [asdict(each) for each in results]


def resident(field: str) -> int:
    """Bytes of this process' memory by the kernel's account: `VmRSS` now, `VmHWM` at its highest."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


def peak_here(task: Task, method: Method, steps: int = 3) -> int:
    """Bytes that a few steps need at most beyond the model and its data. Call it in a process of its own.

    Args:
        task: What is measured.
        method: What is measured.
        steps: How many.
    """
    whole(method.build(task))  # loads the code, and the kernels that are made for these shapes, and is gone
    gc.collect()
    if task.x.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step, before = method.build(task), torch.cuda.memory_allocated()
        for _ in range(steps):
            whole(step)
        return torch.cuda.max_memory_allocated() - before
    step, before = method.build(task), resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the highest so far is forgotten
    for _ in range(steps):
        whole(step)
    return resident("VmHWM") - before


def peak(workload: str, method: Method, arguments: Sequence[str]) -> int | None:
    """`peak_here` in a process of its own, where every block of 64 kB goes back to the system when it is freed."""
    command = [sys.executable, "-m", "benchmarks", "--peak", workload, method.key, *arguments]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(["env", *(f"{k}={v}" for k, v in environment.items()), *command], capture_output=True)
    return int(done.stdout) if done.returncode == 0 else None
