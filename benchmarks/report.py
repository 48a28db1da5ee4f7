"""Tables and plots of what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {
    "step": "The plain gradient alone",
    "rows": "Rows: the dense `(B, *shape)` gradients of all parameters",
    "clip": "Clip: the sum of the rows, each clipped to norm 1",
}
NOT_DENSE = "expanded_nn, factored"  # rows that were not built
STYLES = {
    "expanded_nn": ("tab:red", "o"),
    "expanded_nn, compiled": ("tab:red", "^"),
    "torch.func": ("tab:blue", "s"),
    "torch.func, compiled": ("tab:blue", "^"),
    "Opacus hooks": ("tab:green", "D"),
    "Opacus ghost clipping": ("tab:green", "v"),
    "BackPACK": ("tab:purple", "P"),
    "JAX": ("tab:orange", "X"),
    "loop": ("tab:gray", "_"),
}
Found = dict[str, Any]


def is_ours(name: str) -> bool:
    return name.startswith("expanded_nn")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def cell(result: Found | None) -> str:
    """The median ratio, or why there is none."""
    if result is None:
        return ""
    return times(result["ratio"][1]) if result["state"] == "measured" else result["state"]


def measured(results: Iterable[Found], kind: str) -> dict[str, float]:
    """Method -> median ratio, of those that were right."""
    return {each["name"]: each["ratio"][1] for each in results if each["kind"] == kind and each["state"] == "measured"}


def details(name: str, entry: Found) -> str:
    """Everything about one workload."""
    plain = entry["results"][0]["seconds"][1]
    sizes = entry["sizes"].strip("{}").replace("'", "")
    head = ["method", "times plain", "quartiles", "ms", "turns", "difference from the loop", "first step, s"]
    lines = [f"### {name}: {entry['about']}", "", f"{sizes}. The plain step takes {plain * 1e3:.3g} ms.", ""]
    rows = []
    for each in entry["results"]:
        label = f"{each['kind']}: {each['name']}"
        error = "" if each["error"] is None else f"{each['error']:.0e}"
        if each["state"] == "measured":
            low, middle, high = each["ratio"]
            spread, ms = f"{times(low)} to {times(high)}", f"{each['seconds'][1] * 1e3:.3g}"
            first = "" if each["first"] is None else f"{each['first']:.2g}"
            rows.append([label, times(middle), spread, ms, str(each["turns"]), error, first])
        else:
            rows.append([label, each["state"], "", "", "", error, ""])
    notes = [f"- {each['kind']}: {each['name']}: `{each['note']}`" for each in entry["results"] if each["note"]]
    return "\n".join([*lines, table(head, rows), "", *notes, *([""] if notes else [])])


def summary(workloads: Found, kind: str) -> str:
    """The median ratios, a line a method and a column a workload; the fastest of each in bold."""
    names = dict.fromkeys(r["name"] for entry in workloads.values() for r in entry["results"] if r["kind"] == kind)
    rows = []
    for name in names:
        cells = [name]
        for entry in workloads.values():
            ratios = measured(entry["results"], kind)
            found = next((r for r in entry["results"] if (r["name"], r["kind"]) == (name, kind)), None)
            text = cell(found)
            best = min(value for key, value in ratios.items() if key != NOT_DENSE)
            cells.append(f"**{text}**" if kind != "step" and name != NOT_DENSE and ratios.get(name) == best else text)
        rows.append(cells)
    return table(["", *workloads], rows)


def best(ratios: dict[str, float], *, ours: bool) -> tuple[str, float]:
    """The fastest way of the library, or of the others, and its median ratio."""
    known = {name: ratio for name, ratio in ratios.items() if is_ours(name) == ours and name != NOT_DENSE}
    return min(known.items(), key=lambda item: item[1], default=("", float("inf")))


def faster_peers(workloads: Found) -> Iterator[tuple[str, dict[str, float], float]]:
    """Each task in which peers' medians are below the library's, compiled or not: these, fastest first, and its own."""
    for name, entry in workloads.items():
        for kind in ("rows", "clip"):
            ratios = measured(entry["results"], kind)
            _, own = best(ratios, ours=True)
            faster = {key: value for key, value in ratios.items() if not is_ours(key) and value < own}
            if faster:
                in_order = sorted(faster.items(), key=lambda item: item[1])
                yield f"{name} {kind}", {key.replace(", ", " "): value for key, value in in_order}, own


def sweep(title: str, entry: Found) -> str:
    by_method: dict[str, list[str]] = {}
    for results in entry["results"]:
        for each in results[1:]:
            by_method.setdefault(f"{each['kind']}: {each['name']}", []).append(cell(each))
    plain = [f"{results[0]['seconds'][1] * 1e3:.3g}" for results in entry["results"]]
    head = [f"{entry['varies']} =", *map(str, entry["values"])]
    rows = [["plain, ms", *plain], *([label, *cells] for label, cells in by_method.items())]
    return "\n".join([f"### {title}", "", table(head, rows), ""])


def memory(entries: Found) -> str:
    labels = list(next(iter(entries.values())))
    rows = []
    for label in labels:
        cells = [label]
        for found in entries.values():
            peak, plain = found[label], found[labels[0]]
            cells.append("failed" if peak is None else f"{peak / plain:.2f} ({peak / 2**20:.0f} MiB)")
        rows.append(cells)
    return table(["", *entries], rows)


def place(machine: Found) -> str:
    return machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"


def title(machine: Found) -> str:
    return f"{place(machine)}, expanded_nn {machine['versions'].get('expanded_nn', '?')}"


def file_name(machine: Found) -> str:
    """Processors differ, so each has files of its own: `amd_epyc_1` with one thread."""
    name = re.sub(r"\(\w+\)", " ", machine["gpu"] or f"{machine['cpu']} {machine['threads']}")
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


def about(machine: Found) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    units = [machine["vector units"], *machine["products"]] if "products" in machine else []
    where = ", ".join([where, *units])
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return f"{machine['date']}, on {where}{gpu} (load before the run: {machine['load before']}). {versions}."


INTRODUCTION = """# What per-sample gradients cost

Written by `make bench`. All numbers are times of a whole step (forward, backward, freeing) as a multiple of the plain
mini-batch step of the same `torch.nn` model: medians over rounds in which all methods take turns in one process, in a
new order each round. Each method's result was first compared with a loop over the samples in float64: "wrong" means
that the gradient of a parameter differed by more than 0.5 % of its norm (10 % in bfloat16), "failed" that the method
raised, and its words are with the workload below. The fastest is in bold. Rows that are left factored are not in memory
as dense tensors, so they do not compete.

The first eight steps of expanded_nn are not timed. In the first, second, fourth and eighth it also compares the forward
with that of some of the samples, so that they take up to four times as long; later in the 16th, 32nd, 64th, and so on.

Opacus has LSTM and GRU classes of its own, which take the place of torch's here.

How fast matrix products are differs by library and processor, and is not ours to choose: on the AMD EPYC of family 26
torch's (MKL) run at 120 GFLOP/s on one thread, those of JAX at 255, and those in torch's own LSTM (oneDNN) at 170.
"""
MEMORY = """## Memory

What three steps need at most beyond the model and its data, as a multiple of the plain step's need: the peak of the
resident set of a process of its own, in which freed blocks of 64 kB and more go back to the system at once. On a GPU,
the peak of the allocator.
"""


def page(title: str, found: Found) -> str:
    parts = [f"## {title}", "", about(found["machine"]), ""]
    for kind, heading in TITLES.items() if found["workloads"] else ():
        parts += [f"### {heading}", "", summary(found["workloads"], kind), ""]
    if found["workloads"]:
        faster = []
        for task, peers, own in faster_peers(found["workloads"]):
            names = ", ".join(f"{who} {times(ratio)}" for who, ratio in peers.items())
            faster.append(f"- {task}, {names} ({times(own)})")
        faster = faster or ["- nowhere"]
        parts += ["### Where a peer is faster (expanded_nn in brackets)", "", *faster, ""]
    if found["sweeps"]:
        parts += [f"## {title}: growth", "", *(sweep(*each) for each in found["sweeps"].items())]
    if found["memory"]:
        parts += [MEMORY, memory(found["memory"]), ""]
    parts += [f"## {title}: all there is", ""] if found["workloads"] else []
    parts += [details(*each) for each in found["workloads"].items()]
    return "\n".join(parts)


MARKS = "<!-- written by make bench -->", "<!-- until here -->"


def digest(runs: Iterable[Found], images: str) -> str:
    """What the README shows: the picture of the newest run, and where a peer is faster on each machine."""
    runs = list(runs)
    newest = max(runs, key=lambda found: str(found["machine"]["date"]))
    picture = f"{images}/bench_{file_name(newest['machine'])}.png"
    drawn = f"{place(newest['machine'])}: the fastest peer, and expanded_nn, eager and compiled"
    by_task: dict[str, list[str]] = {}
    for number, found in enumerate(runs):
        for task, faster, own in faster_peers(main_ones(found["workloads"])):
            who, ratio = next(iter(faster.items()))
            by_task.setdefault(task, [""] * len(runs))[number] = f"{who} {times(ratio)} ({times(own)})"
    head = ["", *(re.sub(r"\(R\)| Processor", "", place(found["machine"])) for found in runs)]
    faster_on = table(head, ([task, *row] for task, row in by_task.items()))
    said = "Where a peer is faster, in plain steps (in brackets: expanded_nn):"
    return "\n".join([f"![{drawn}]({picture})", "", said, "", faster_on])


def main_ones(workloads: Found) -> Found:
    return {name: entry for name, entry in workloads.items() if not entry["extra"]}


def into(page: Path, text: str) -> None:
    """Puts the text between the marks of a page."""
    before, begin, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def runs_in(results: Path) -> list[Found]:
    """The last run of each machine and number of threads."""
    return [json.loads(each.read_text()) for each in sorted(results.glob("*.json"))]


def write(found: Found, results: Path, images: Path) -> None:
    """Writes the file of a run, the page of all runs that lie beside it, and the plots of this one.

    Args:
        found: The run.
        results: The folder of the tables.
        images: The folder of the plots.
    """
    name = file_name(found["machine"])
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    pages = [page(title(run["machine"]), run) for run in runs_in(results)]
    (results / "README.md").write_text("\n".join([INTRODUCTION, *pages]))
    draw_steps(found["workloads"], images / f"bench_steps_{name}.png")
    draw_best(main_ones(found["workloads"]), images / f"bench_{name}.png")
    if found["sweeps"]:
        draw_growth(found["sweeps"], images / f"bench_growth_{name}.png")


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def draw_workloads(
    workloads: Found, path: Path, mark: Callable[[Axes, str], None], size: tuple[float, float], columns: int
) -> None:
    """A line for each workload, rows on the left and clipping on the right.

    Args:
        workloads: The workloads.
        path: The picture.
        mark: Puts the marks of one kind of result into a panel.
        size: The width, and the height of a line, in inches.
        columns: Of the legend.
    """
    figure = Figure(figsize=(size[0], 1.4 + size[1] * len(workloads)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axis, kind in zip(panels, ("rows", "clip"), strict=True):
        mark(axis, kind)
        finish(axis, "dense rows" if kind == "rows" else "clipped sum")
        axis.set_xscale("log")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel("time, as a multiple of the plain step")
    panels[0].set_yticks(range(len(workloads)), list(workloads))
    panels[0].invert_yaxis()
    handles = {label: mark for axis in panels for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    save(figure, path)


def draw_steps(workloads: Found, path: Path) -> None:
    """A mark for each method."""

    def mark(axis: Axes, kind: str) -> None:
        for name, (color, marker) in STYLES.items():
            found = [(measured(entry["results"], kind).get(name), i) for i, entry in enumerate(workloads.values())]
            points = [(ratio, i) for ratio, i in found if ratio is not None]
            if points:
                size = 80 if name == "expanded_nn" else 40
                axis.scatter(*zip(*points, strict=True), s=size, c=color, marker=marker, label=name, alpha=0.85)

    draw_workloads(workloads, path, mark, (11, 0.42), columns=5)


def draw_best(workloads: Found, path: Path) -> None:
    """The library, compiled too, and the fastest peer with its name."""

    def mark(axis: Axes, kind: str) -> None:
        for i, entry in enumerate(workloads.values()):
            ratios = measured(entry["results"], kind)
            peer, ratio = best(ratios, ours=False)
            if peer:
                axis.plot(ratio, i, "s", color="tab:blue", label="fastest peer")
                axis.annotate(peer, (ratio, i), (0, 5), textcoords="offset points", fontsize=7, ha="center")
            for name in ("expanded_nn", "expanded_nn, compiled"):
                color, marker = STYLES[name]
                if name in ratios:
                    axis.plot(ratios[name], i, marker, color=color, label=name)
        axis.margins(x=0.2)

    draw_workloads(workloads, path, mark, (9, 0.36), columns=3)


def draw_growth(sweeps: Found, path: Path) -> None:
    """The ratios of rows (full lines) and of clipping (dashed) as B or T grows."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
    for axis, (title, entry) in zip(panels, sweeps.items(), strict=True):
        for kind, line in (("rows", "-"), ("clip", "--")):
            for name, (color, marker) in STYLES.items():
                found = [measured(results, kind).get(name) for results in entry["results"]]
                if any(found):
                    axis.plot(entry["values"], found, line, c=color, marker=marker, label=f"{kind}: {name}", ms=5)
        finish(axis, title)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(entry["values"], map(str, entry["values"]))
        axis.set_xlabel(entry["varies"])
    panels[0].set_ylabel("time / plain step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def finish(axis: Axes, title: str) -> None:
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
