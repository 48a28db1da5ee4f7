"""Every code block of the documentation and the README runs, and prints what the page says it prints."""

import ast
import contextlib
import inspect
import io
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import expanded_nn as enn
from expanded_nn.modules.registry import EXPANDED
from expanded_nn.recording import backward, passes, stale

pytestmark = pytest.mark.small_rows

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

# A block of Python with what it prints in the block that follows, or code that the reader does not see.
BLOCK = re.compile(
    r"^<!-- setup\n(?P<hidden>.*?)^-->"
    r"|^```python\n(?P<code>.*?)^```$(?:\n*^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)

NEEDS = {
    "from opacus": "opacus",
    "accountant.": "opacus",
    "from backpack": "backpack",
    "from captum": "captum",
    "trainer": "transformers",
    "transformers.": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "skorch": "skorch",
}


@pytest.fixture(autouse=True)
def as_a_reader_has_it() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    registries: list[dict[Any, Any]] = [EXPANDED]
    with contextlib.suppress(ImportError):
        registries.append(import_module("captum._utils.sample_gradient").SUPPORTED_MODULES)
    with contextlib.suppress(ImportError):
        registries.append(import_module("opacus.validators").ModuleValidator.VALIDATORS)
    registered = [dict(registry) for registry in registries]
    with torch.backends.__allow_nonbracketed_mutation():  # Opacus sets a flag of torch.backends
        yield
    for registry, before in zip(registries, registered, strict=True):
        registry.clear()
        registry.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def missing_for(code: str) -> list[str]:
    """The packages that a block needs, and that are not installed."""
    return [package for words, package in NEEDS.items() if words in code and find_spec(package) is None]


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # Lightning's
@pytest.mark.filterwarnings("ignore:The '\\w+_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page(page: Path) -> None:
    """Block by block in one namespace; errors point to the line of the page."""
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    left_out = []
    for block in BLOCK.finditer(text):
        code = block["hidden"] or block["code"]
        if missing := missing_for(code):
            left_out += missing
            continue
        line = text.count("\n", 0, block.start("hidden" if block["hidden"] else "code"))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + code, str(page), "exec"), names)
        if block["code"] is not None:
            assert out.getvalue() == (block["printed"] or ""), f"{page.name}, the block at line {line + 1}"
    if left_out:
        pytest.skip(f"all of {page.name} ran but the blocks that import {', '.join(left_out)}: not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_reader_can_paste_a_page(page: Path) -> None:
    """Its blocks run one after the other without what only the tests see, where their packages are there."""
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(page.read_text()):
        code = block["code"] or ""
        if "their_package" not in code and not missing_for(code):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                exec(code, names)


def test_blocks_are_found() -> None:
    """Every fence that says Python is one that runs."""
    for page in PAGES:
        text = page.read_text()
        assert text.count("```python") == sum(block["code"] is not None for block in BLOCK.finditer(text)), page.name
        assert text.count("<!-- setup") == sum(block["hidden"] is not None for block in BLOCK.finditer(text)), page.name


def slug(title: str) -> str:
    """A heading's name in links."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text) <= 10_000
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert {path for path, _, _ in links if not (ROOT / path).exists()} == set()
    for path, anchor in ((path, anchor) for path, _, anchor in links if anchor):
        titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert anchor in {slug(title) for title in titles}, anchor
    lowest, above = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "setup.cfg").read_text())[0]
    for page in ("README.md", "docs/tutorial.md"):
        assert f"2.{lowest} to 2.{int(above) - 1}" in (ROOT / page).read_text(), page


def test_links_from_the_pages_lead_to_what_is_there() -> None:
    """To files of the repository, and to headings as a repository's browser names them."""
    anchors = {}
    for page in PAGES:
        text = page.read_text()
        titles, marks = (re.findall(form, text, re.MULTILINE) for form in (r"^#+ (.*)$", r"^\((\S+)\)=$"))
        anchors[page] = {*map(slug, titles), *marks}
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose)):
            if not path.startswith("http"):
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {path}"
                assert not anchor or anchor in anchors[target], f"{page.name}: {path}#{anchor}"


def test_the_gallery_is_what_the_examples_say() -> None:
    """To write it anew: `python docs/conf.py`."""
    pytest.importorskip("sphinx")
    conf = runpy.run_path(str(DOCS / "conf.py"))
    text = (DOCS / "gallery.md").read_text()
    assert text.endswith("\n\n" + conf["gallery"]())
    assert conf["with_code"](text).count("{literalinclude}") == text.count("\n## ") == len(conf["scripts"]())


def test_the_pages_show_no_mark_of_the_site() -> None:
    """What sphinx fills in is a comment, around what the repository's readers get."""
    marks = [
        mark
        for page in PAGES
        for mark in re.findall(r"^<!-- (\w+) -->$.+?^<!-- until here -->$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert sorted(marks) == ["layers", "results"]
    assert not [page for page in PAGES if re.search(r"^%% \w+ %%$", page.read_text(), re.MULTILINE)]
    written = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    linked = re.findall(r"\(\.\./benchmarks/results/([^)]+)\)", (DOCS / "benchmarks.md").read_text())
    assert sorted(linked) == sorted(written)


def test_the_table_of_settings_has_them_all() -> None:
    """With their defaults."""
    table = (DOCS / "meaning.md").read_text().partition("## The settings")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE))
    parameters = list(inspect.signature(enn.Linear.per_sample).parameters)[2:]
    assert {name: ast.literal_eval(value) for name, value in shown.items()} == {
        name: getattr(enn.Linear._settings, name) for name in parameters
    }


def test_each_line_of_the_silent_failures_names_a_test() -> None:
    text = (DOCS / "silent_failures.md").read_text()
    named = re.findall(r'^pytest "(\S+)::(\w+)"$', text, re.MULTILINE)
    assert len(named) == text.count("\n### ") >= 30
    trees = {file: ast.parse((ROOT / file).read_text()) for file, _ in named}
    for file, test in named:
        assert test in {node.name for node in trees[file].body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_each_step_of_a_training_script_names_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    script = import_module("silent_failures")
    assert script.steps() in (DOCS / "silent_failures.md").read_text()
    for _, _, test in script.STEPS:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.filterwarnings("ignore")  # other libraries', which are not ours to mend
def test_the_silent_failures_come_out_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the libraries that are installed in the page's versions; ours is right, or refuses in its own words."""
    monkeypatch.syspath_prepend(DOCS)
    script = import_module("silent_failures")
    text = (DOCS / "silent_failures.md").read_text()
    torch.set_default_dtype(torch.float64)
    traps = list(script.traps())
    assert len(traps) == text.count("\n### ")
    for trap in traps:
        part = text.partition(f"\n### {trap.title}\n")[2].partition("\n### ")[0]
        outcomes = script.run(trap)
        for title in [each for each in outcomes if each in text]:
            outcome = outcomes[title]
            assert f"\n- {title}: {outcome.cell}" in part, (trap.title, title, outcome)
        ours = outcomes["expanded_nn"]
        assert ours.word == "right" or ours.detail.startswith("PerSampleError"), trap.title


def test_the_places_in_the_code_that_the_pages_name_are_there() -> None:
    package = Path(enn.__file__).parent
    text = (DOCS / "lifetime.md").read_text()
    places = re.findall(r"`([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)", text)
    assert len(places) >= 12
    rooms = (package, package / "recording", package / "compiling")
    for file, names in places:
        (path,) = [room / file for room in rooms if (room / file).exists()]
        tree = ast.parse(path.read_text())
        for name in re.findall(r"`([\w.]+)`", names):
            body = tree.body
            for part in name.split("."):
                defined = [node for node in body if getattr(node, "name", None) == part]
                assert defined, f"{file}: {name}"
                body = getattr(defined[0], "body", [])
    table = (DOCS / "how_it_works.md").read_text().partition("## The files")[2].partition("\n## ")[0]
    named = [
        name for line in table.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]
    ]
    assert {name for name in named if not (package / name).exists()} == set()
    files = {str(each.relative_to(package)) for each in package.rglob("*.py") if not each.name.startswith("__")}
    assert {file for file in files if file not in named and f"{file.split('/')[0]}/" not in named} == set()


def rows_of_tables(text: str) -> list[list[str]]:
    """The cells of all tables in a text; a row without a first cell goes on from the one before."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.strip().startswith("|") and "---" not in line:
            cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
            rows.append(cells if cells[0] else [" ".join(pair).strip() for pair in zip(rows.pop(), cells, strict=True)])
    return rows


@pytest.mark.parametrize("place", [passes.Pass, backward.Backward, stale.stale])
def test_the_page_has_the_tables_of_the_code(place: object) -> None:
    page = rows_of_tables((DOCS / "lifetime.md").read_text())
    rows = rows_of_tables(place.__doc__ or "")
    assert len(rows) > 6
    assert rows[0] in page
    start = page.index(rows[1])
    assert page[start : start + len(rows) - 1] == rows[1:]


def test_the_clients_are_named_with_the_versions_that_the_tests_run() -> None:
    text = (DOCS / "guides" / "interoperability.md").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| [\[`]*(\w+)[^|]* \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) == 8
    not_pinned = {"kronfluence"}  # asks for a torchvision
    wrong = {name: version for name, version in rows if pins.get(name.lower(), name) != version}
    assert wrong.keys() == not_pinned
    assert f"with torch {pins['torch']};" in text


def test_the_table_of_layers_has_them_all() -> None:
    text = (DOCS / "layers.md").read_text()
    ours = {each.__name__ for each in EXPANDED.values() if each.__module__.startswith("expanded_nn.layers")}
    missing = {name for name in ours & set(enn.__all__) if f"`{name}`" not in text}
    assert not missing


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    layers = {each.__name__ for each in EXPANDED.values()}
    missing = {name for name in set(enn.__all__) - layers if not re.search(rf":: {name}(\(\))?$", text, re.MULTILINE)}
    assert missing == {"functional"}  # a module; its functions have a part of their own
    ops = [name for name, each in vars(enn.functional).items() if callable(each) and not name.startswith("_")]
    assert not {name for name in ops if not re.search(rf":: {name}$", text, re.MULTILINE)}


def test_each_public_function_has_an_example_that_runs() -> None:
    """In its docstring, or in the reference; layers and errors are there by their kinds."""
    shown = "".join(block["code"] or "" for block in BLOCK.finditer((DOCS / "api.md").read_text()))
    kinds = {twin.__name__ for twin in EXPANDED.values()} | {"Expanded", "functional"}
    kinds |= {name for name in enn.__all__ if name.endswith(("Error", "Warning"))}
    names = set(enn.__all__) - kinds
    assert {name for name in names if ">>>" not in (getattr(enn, name).__doc__ or "") and name not in shown} == set()
    operations = {name for name, value in vars(enn.functional).items() if callable(value) and name[0] != "_"}
    assert {name for name in operations if f"EF.{name}(" not in shown} == set()
