"""Imports within the package point down only: no cycles, none inside functions (ruff sees to that), core lowest."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import expanded_nn

PACKAGE = Path(expanded_nn.__file__).parent


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(["expanded_nn", *file.relative_to(PACKAGE).with_suffix("").parts])
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        found = {node.module for node in nodes if node.module and node.module.startswith("expanded_nn.")}
        found |= {f"expanded_nn.{each.name}" for node in nodes if node.module == "expanded_nn" for each in node.names}
        graph[name] = found
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) >= 20


def test_core_is_the_lowest_floor() -> None:
    """All may stand on the core, which stands on itself and on the errors."""
    for file in (PACKAGE / "core").glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {node.module for node in nodes if node.module and node.module.startswith("expanded_nn")}
        assert {name for name in names if not name.startswith("expanded_nn.core")} <= {"expanded_nn._errors"}
