"""Imports within the package point down only: no cycles, none inside functions (ruff sees to that), core lowest."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import expanded_nn
from expanded_nn.common.own_state import OWN_STATE

PACKAGE = Path(expanded_nn.__file__).parent
# lowest first; what is not named stands above them all
FLOORS = ["_errors", "common", "core", "rows", "factored", "recording", "modules", "layers"]


def imports() -> dict[str, set[str]]:
    """For each module of the package, by its dotted name: which others of the package it imports."""
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(["expanded_nn", *file.relative_to(PACKAGE).with_suffix("").parts])
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        imported = [f"{node.module}.{alias.name}" for node in nodes if node.module for alias in node.names]
        graph[name] = {as_file(whole) for whole in imported if whole.startswith("expanded_nn.")}
    return graph


def as_file(name: str) -> str:
    """The module that a dotted name is, or is defined in."""
    path = PACKAGE.parent / Path(*name.split("."))
    is_module = path.is_dir() or path.with_suffix(".py").exists()
    return name if is_module else name.rpartition(".")[0]


def floor(module: str) -> int:
    room = module.split(".")[1]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def test_imports_have_no_cycle() -> None:
    order = list(TopologicalSorter(imports()).static_order())  # raises CycleError
    assert len(order) >= 20


def test_rooms_stand_on_the_floors_below() -> None:
    below = [(module, other) for module, others in imports().items() for other in others if other != "expanded_nn"]
    assert not [pair for pair in below if floor(pair[0]) < floor(pair[1])]
    assert {floor(module) for module, _ in below} == set(range(1, len(FLOORS) + 1))  # each floor was looked at


def test_a_layer_reaches_no_compiler() -> None:
    graph, reached = imports(), {"expanded_nn.layers.linear"}
    while unseen := set().union(*(graph.get(module, set()) for module in reached)) - reached:
        reached |= unseen
    assert "expanded_nn.recording.recorder" in reached
    assert not [module for module in reached if "compil" in module]


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
    files = [PACKAGE / "modules" / "base.py", PACKAGE / "modules" / "layout.py", *(PACKAGE / "layers").glob("*.py")]
    files += [PACKAGE / "layers" / "general" / f"{name}.py" for name in ("alone", "rule")]
    files.append(PACKAGE / "recording" / "comparisons.py")
    found = set().union(*(private_attributes_set(ast.parse(file.read_text())) for file in files))
    forward = ast.parse((PACKAGE / "recording" / "forward.py").read_text())
    found |= private_attributes_set(forward) - {"_pass"}  # a forward's own
    assert found == {*OWN_STATE, "_takes_labels"}
