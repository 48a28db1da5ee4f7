"""What a step with per-sample gradients costs, as a multiple of the plain mini-batch step of the same model.

All methods take turns in one process, so that a busy machine slows all alike; each is first compared with a loop over
the samples. A whole run writes benchmarks/results/ and the plots in docs/images/; a part of it only prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from benchmarks import report
from benchmarks.measure import MOST, as_json, compare, peak, peak_here
from benchmarks.peers import METHODS, Method
from benchmarks.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parent.parent
PACKAGES = ("expanded_nn", "torch", "opacus", "backpack-for-pytorch", "jax", "numpy")
SWEEPS: dict[str, tuple[str, str, list[int]]] = {
    # name: the workload, what varies, its values
    "samples, perceptron": ("mlp", "batch", [2, 8, 32, 128]),
    "samples, CNN": ("cnn", "batch", [2, 8, 32, 128]),
    "steps, LSTM": ("lstm", "steps", [8, 32, 128]),
    "steps, GPT": ("gpt", "steps", [16, 64, 256]),
}
BESIDE_PLAIN = [
    *("rows: expanded_nn", "rows: torch.func", "rows: Opacus hooks"),
    *("clip: expanded_nn", "clip: Opacus hooks", "clip: Opacus ghost clipping"),
]
SWEPT = ["step: plain", *BESIDE_PLAIN, "rows: loop"]
MEMORY_OF = ["cnn", "mlp", "resnet", "gpt", "lstm"]
MEMORY_METHODS = ["step: plain", *BESIDE_PLAIN, "rows: expanded_nn, factored", "clip: expanded_nn, .grad as well"]


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "cpu": processor(),
        "vector units": torch.backends.cpu.get_cpu_capability(),
        "products": products(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "load before": round(os.getloadavg()[0], 1),
        "date": date.today().isoformat(),
        "versions": {"python": python_version()} | {name: version_of(name) for name in PACKAGES},
    }


def processor() -> str:
    """Its name, with its family and model where the name has no number, as on a virtual machine."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", "unknown")
    has_number = any(map(str.isdigit, name)) or "cpu family" not in facts
    return name if has_number else f"{name} (family {facts['cpu family']}, model {facts['model']})"


def products() -> list[str]:
    """The libraries of matrix products that torch was built with, MKL and oneDNN (which was MKL-DNN), and versions."""
    found = re.findall(r"(Math Kernel Library|MKL-DNN)\D*([\d.]+)", torch.__config__.show())
    return [f"{'MKL' if 'Math' in library else 'oneDNN'} {number}" for library, number in found]


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def chosen(workload: Workload, arguments: argparse.Namespace) -> list[Method]:
    may_compile = not arguments.no_compile and not arguments.quick
    plain, *others = METHODS
    others = [each for each in others if any(part in each.key for part in arguments.methods)]
    others = [each for each in others if each.extra or not workload.extra]
    return [
        plain,
        *(each for each in others if not each.compiles or (may_compile and (workload.compiles or each.loops))),
    ]


def is_part(arguments: argparse.Namespace) -> bool:
    return bool(arguments.only or arguments.quick or arguments.methods != [""])


def by_key(keys: Sequence[str]) -> list[Method]:
    return [each for each in METHODS if each.key in keys]


def measure_all(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(device), "workloads": {}, "sweeps": {}, "memory": {}}
    limits = {"seconds": 0.0, "rounds": 2} if arguments.quick else vars(arguments)
    limits = {name: limits[name] for name in ("seconds", "rounds")}
    names = arguments.only or [
        name
        for name, each in WORKLOADS.items()
        if (device.type == "cuda" or not each.needs_gpu) and not (arguments.main and each.extra)
    ]
    for name in names:
        workload = WORKLOADS[name]
        results = compare(workload.task(device, arguments.quick), chosen(workload, arguments), **limits)
        said = {"about": workload.about, "extra": workload.extra, "sizes": str(workload.sizes)}
        found["workloads"][name] = {**said, "results": as_json(results)}
        print(report.details(name, found["workloads"][name]), flush=True)
    if is_part(arguments) or arguments.main:
        return found
    for title, (name, what, values) in SWEEPS.items():
        results = [compare(WORKLOADS[name].task(device, **{what: each}), by_key(SWEPT), **limits) for each in values]
        found["sweeps"][title] = {"varies": what, "values": values, "results": [as_json(each) for each in results]}
        print(report.sweep(title, found["sweeps"][title]), flush=True)
    settings = ["--device", device.type, "--threads", str(torch.get_num_threads())]
    for name in MEMORY_OF:
        found["memory"][name] = {each.key: peak(name, each, settings) for each in by_key(MEMORY_METHODS)}
    print(report.memory(found["memory"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="some workloads, printed and not written")
    parser.add_argument("--methods", nargs="+", default=[""], help="those whose name has one of these parts, likewise")
    parser.add_argument("--main", action="store_true", help="the main workloads, without growth and memory; written")
    parser.add_argument("--quick", action="store_true", help="a trial run at tiny sizes, printed and not written")
    parser.add_argument("--rounds", type=int, default=MOST, help="the most turns of each method")
    parser.add_argument("--seconds", type=float, default=1.0, help="what each method may spend on a workload")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="fewer than cores: on the first cores"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--peak", nargs=2, metavar=("WORKLOAD", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device(("cuda" if has_gpu else "cpu") if arguments.device == "auto" else arguments.device)
    torch.set_num_threads(arguments.threads)
    if arguments.threads < (os.cpu_count() or 1) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(arguments.threads))  # JAX takes as many threads as there are cores
    warnings.simplefilter("ignore")  # the peers' own
    logging.disable(logging.WARNING)
    if arguments.peak:
        workload, key = arguments.peak
        print(peak_here(WORKLOADS[workload].task(device), *by_key([key])))
        return
    with tempfile.TemporaryDirectory() as cache:  # so that each graph is compiled
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        found = measure_all(arguments, device)
    if not is_part(arguments):
        results = ROOT / "benchmarks/results"
        report.write(found, results, ROOT / "docs/images")
        report.into(ROOT / "README.md", report.digest(report.runs_in(results), "docs/images"))


if __name__ == "__main__":
    main()
