"""Imports within the package point down only: no cycles, none inside functions (ruff sees to that), core lowest."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import expanded_nn
from expanded_nn._steady import OWN_STATE

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


def private_attributes_set(tree: ast.AST) -> set[str]:
    """The private attributes that code sets on `self` or on a module, by name or in the dictionary of attributes."""
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for whole in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
    ]
    names = {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "module")
    }
    keys = {target.slice for target in targets if isinstance(target, ast.Subscript) and of_attributes(target.value)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    keys |= {call.args[0] for call in calls if call.func.attr == "setdefault" and of_attributes(call.func.value)}
    names |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def of_attributes(dictionary: ast.expr) -> bool:
    return ast.unparse(dictionary).endswith(".__dict__") or ast.unparse(dictionary).startswith("vars(")


def test_the_attributes_that_the_library_sets_on_modules_are_named() -> None:
    """Where a forward starts over, all others are taken for the user's; and none is named that nobody sets."""
    files = ["_module.py", "_layout.py", *(f"layers/{file.name}" for file in (PACKAGE / "layers").glob("[a-z]*.py"))]
    found = set().union(*(private_attributes_set(ast.parse((PACKAGE / file).read_text())) for file in files))
    forward = ast.parse((PACKAGE / "recording" / "forward.py").read_text())
    found |= private_attributes_set(forward) - {"_pass"}  # a forward's own
    assert found == {*OWN_STATE, "_takes_labels"}
