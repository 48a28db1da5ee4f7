"""The benchmarks' workloads at tiny sizes: all ways of the library agree with the loop; the tables are written."""

import json
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.modules.registry import EXPANDED

sys.path.insert(0, str(Path(__file__).parent.parent))  # Opacus installs a package `benchmarks` of its own

from benchmarks import report, zoos
from benchmarks.__main__ import chosen
from benchmarks.measure import TOLERANCES, Result, admitted, as_json, compare, difference, expected, peak, timed
from benchmarks.peers import METHODS, Method, NotInstalled, Step, plain
from benchmarks.workloads import WORKLOADS, Task

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
OURS = [each for each in METHODS if "expanded_nn" in each.name and not each.compiles]
CLIP = next(each for each in OURS if each.kind == "clip")


def task(name: str) -> Task:
    return WORKLOADS[name].task(CPU, quick=True, dtype=torch.float64)


@pytest.mark.parametrize("name", WORKLOADS)
def test_agrees_with_the_loop(name: str) -> None:
    wanted = expected(task(name))
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in wanted["rows"]]).norm(dim=0)
    assert (norms > 1).any(), "nothing would be clipped"
    for method in OURS:
        result, step = admitted(method, task(name), wanted[method.kind])
        assert result.state == "measured", result
        assert step is not None
        assert difference(step.run(), wanted[method.kind]) <= TOLERANCES[torch.float64], "the second step"


def scaled(task: Task, factor: float) -> Step:
    step = plain(task)
    return Step(lambda: [each * factor for each in step.run()], step.clear)


def raising(error: Exception) -> Step:
    raise error


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (partial(scaled, factor=1.0), "measured"),
        (partial(scaled, factor=1.001), "wrong"),
        (partial(scaled, factor=float("nan")), "wrong"),
        (lambda _: raising(NotInstalled("peer")), "not installed"),
        (lambda _: raising(RuntimeError("one line\nanother")), "failed"),
    ],
)
def test_states(build: object, state: str) -> None:
    methods = [METHODS[0], Method("under test", "step", build)]  # type: ignore[arg-type]
    first, second = compare(task("tiny"), methods, seconds=0.0, rounds=2)
    assert (first.state, first.ratio) == ("measured", [1.0, 1.0, 1.0])
    assert second.state == state
    assert second.note == ("RuntimeError: one line" if state == "failed" else "")
    assert bool(second.ratio) == (state == "measured")


def test_methods_have_keys_of_their_own() -> None:
    assert len({each.key for each in METHODS}) == len(METHODS)


def test_chosen_methods() -> None:
    asked = SimpleNamespace(quick=False, no_compile=False, methods=["ghost"])
    names = [each.name for each in chosen(WORKLOADS["tiny"], asked)]  # type: ignore[arg-type]
    assert names == ["plain", "Opacus ghost clipping"]


def test_page(tmp_path: Path) -> None:
    results = as_json(compare(task("tiny"), [METHODS[0], *OURS], seconds=0.0, rounds=2))
    peers = [Result("JAX", "rows", ratio=[0.1, 0.2, 0.3], seconds=[1.0] * 3, error=0.0, first=1.0)]
    peers += [Result("JAX", "clip", state="failed", note="no")]
    found = {
        "machine": {
            "cpu": "Some(R) CPU",
            "cores": 1,
            "threads": 1,
            "gpu": None,
            "load before": 0,
            "date": "",
            "versions": {},
        },
        "workloads": {"tiny": {"about": "small", "extra": False, "sizes": "{}", "results": results + as_json(peers)}},
        "sweeps": {"samples": {"varies": "batch", "values": [3], "results": [results]}},
        "memory": {"tiny": {"step: plain": 2**20, "clip: expanded_nn": 2**21, "clip: JAX": None}},
    }
    report.write(found, tmp_path, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| JAX | **0.20** |" in page
    assert "| JAX | failed |" in page
    assert "- clip: JAX: `no`" in page
    assert "- tiny rows, JAX 0.20 (" in page
    assert "| clip: expanded_nn | 2.00 (2 MiB) |" in page
    assert json.loads((tmp_path / "some_cpu_1.json").read_text()) == found
    assert report.runs_in(tmp_path) == [found]
    assert {each.name for each in tmp_path.glob("*.png")} == {
        "bench_steps_some_cpu_1.png",
        "bench_some_cpu_1.png",
        "bench_growth_some_cpu_1.png",
    }
    assert "## Some(R) CPU, 1 thread" in page

    readme = tmp_path / "digest.md"
    readme.write_text("\n".join(["before", report.MARKS[0], "older", report.MARKS[1], "after"]))
    older = {**found, "machine": {**found["machine"], "cpu": "Old CPU", "date": "2001-01-01"}}
    newer = {**found, "machine": {**found["machine"], "date": "2002-01-01"}}
    for _ in range(2):  # it replaces what it wrote
        report.into(readme, report.digest([newer, older], "pictures"))
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "older" not in text
    assert text.count("](pictures/") == text.count("](pictures/bench_some_cpu_1.png)") == 1
    assert "| Some CPU, 1 thread | Old CPU, 1 thread |" in text
    assert re.search(r"\| tiny rows \| JAX 0\.20 \([\d.]+\) \| JAX 0\.20 \([\d.]+\) \|", text)
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        report.into(readme, "")


@pytest.mark.parametrize(("threads", "others", "seconds"), [(1, False, 1.0), (1, True, 5.0), (2, False, 5.0)])
def test_one_thread_is_timed_by_its_own_clock(
    threads: int, others: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, wall = iter((0.0, 1.0)), iter((0.0, 5.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    clocks = SimpleNamespace(process_time=lambda: next(own), perf_counter=lambda: next(wall))
    monkeypatch.setattr("benchmarks.measure.time", clocks)
    assert timed(lambda: None, CPU, others=others) == seconds


@pytest.mark.slow
def test_command_line() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "tiny", "--methods", "expanded_nn", "loop"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for method in (each for each in METHODS if ("expanded_nn" in each.name or each.name == "loop")):
        assert (f"| {method.key} |" in done.stdout) == (not method.compiles)


@pytest.mark.slow
def test_what_attribution_costs() -> None:
    command = [sys.executable, "-m", "benchmarks.attribution", "--quick", "--rounds", "1", "--only", "cnn", "lstm"]
    done = subprocess.run([*command, "--methods", "expanded_nn"], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if ": expanded_nn |" in line]
    number = r"[\d.]+( \(\d\.\d+\))?"
    assert len(rows) == 4
    assert all(re.fullmatch(rf"\| [\w ]+: expanded_nn \| {number} \| {number} \|", row) for row in rows)


@pytest.mark.slow
def test_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = peak("mlp", CLIP, ["--device", "cpu"])
    assert found is not None
    assert found > 1 << 20


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.kept: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        self.kept.append(input * self.scale)
        return self.kept[-1]


class Folding(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1)).unflatten(0, input.shape[:2])


class Mixing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(0))


class MixingWhatIsEqual(nn.Module):
    """The mean over the samples is what each of them has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        equal = self.first(torch.zeros_like(input))
        return self.last(equal.mean(0, keepdim=True).expand_as(input) * input)


class Broken(nn.Linear):
    pass


class BrokenTwin(enn.Linear, Broken):
    def expanded_forward(self, input: Tensor) -> Tensor:
        out = super().expanded_forward(input)
        return out.detach() + 2 * (out - out.detach())


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), "right"),
        (lambda: nn.Sequential(Folding(4, 4)), "right"),
        (lambda: nn.Sequential(Keeping()), "refused"),
        (lambda: nn.Sequential(Mixing(4, 4)), "unfit"),
        (MixingWhatIsEqual, "right"),
        (lambda: nn.Sequential(Broken(4, 4)), "wrong"),
    ],
)
def test_verdicts_of_the_zoos(model: Any, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, Broken, BrokenTwin)
    case = zoos.Case(model(), {"input": torch.randn(zoos.SMALL.samples, 5, 4)})
    found = zoos.judged(case)
    assert found["verdict"] == verdict
    if verdict == "right":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", enn.PerSampleWarning)
            assert zoos.timed(case).keys() == {"ratio", "plain ms"}


def test_page_of_the_zoos() -> None:
    rows = [
        {"zoo": "timm", "name": "a", "verdict": "right", "escalated": ["b.c (D): runs sample by sample"]}
        | {"ratio": 2.0, "plain ms": 30.4, "wide": {"ratio": 1.2, "plain ms": 200.0}},
        {"zoo": "timm", "name": "h", "verdict": "right", "escalated": [], "ratio": 3.0, "plain ms": 2.0},
        {"zoo": "timm", "name": "e", "verdict": "refused", "why": "f: vmap cannot follow | it"},
        {"zoo": "timm", "name": "g", "verdict": "unfit", "why": "too large"},
    ]
    page = zoos.page(rows)
    assert "| timm | 3 | 2 | 1 | 1 | 0 | 0 | 2.50 | 3.00 | 1 | 2.00 | 2.00 |" in page
    assert "- vmap cannot follow: 1" in page
    assert "| a | right | 30 | 2.00 | 200 | 1.20 | `b.c (D)` |" in page
    assert "| e | refused |  |  |  |  | `f: vmap cannot follow / it` |" in page
    assert "| g |" not in page
