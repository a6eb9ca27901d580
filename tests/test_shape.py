"""Commands are short, imports have no cycles, and shapes in signatures are checked in both packages."""

import ast
import graphlib
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

ROOT = Path(__file__).parents[1]
COMMANDS = [
    *(ROOT / "src" / "divdec" / "cli").rglob("*.py"),
    *(ROOT / "research" / "src" / "divdec_research" / "cli").rglob("*.py"),
]
PACKAGES = (ROOT / "src" / "divdec", ROOT / "research" / "src" / "divdec_research")
MAX_LINES = 40


def body_lines(function):
    """Number of lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_functions_of_commands_are_short(path):
    functions = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    ]
    assert {node.name: lines for node in functions if (lines := body_lines(node)) > MAX_LINES} == {}


def imported_names(path):
    """Return what a file imports at any level: in functions and for type checking too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def import_graph(package):
    """Return the modules that each module of a package imports; of a package, only what its `__init__.py` imports."""
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    graph = {}
    for module, path in paths.items():
        names = [name if name in paths else name.rpartition(".")[0] for name in imported_names(path)]
        graph[module] = {name for name in names if name in paths} - {module}
    return graph


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_imports_have_no_cycles(package):
    graphlib.TopologicalSorter(import_graph(package)).prepare()  # its CycleError names the modules


def test_cycle_through_function_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "first.py").write_text("import package.second\n")
    (package / "second.py").write_text("def load():\n    from package.first import something\n")
    with pytest.raises(graphlib.CycleError, match="nodes are in a cycle"):
        graphlib.TopologicalSorter(import_graph(package)).prepare()


@pytest.mark.parametrize(
    ("module", "function"),
    [("divdec.steering", "steer_linear"), ("divdec_research.suites.aggregate", "_means")],
)
def test_wrong_shapes_are_refused_in_tests(module, function):
    arguments = (torch.zeros(3), torch.zeros(2), 1.0) if function == "steer_linear" else (np.ones((2, 2)), None)
    with pytest.raises(TypeCheckError):
        getattr(importlib.import_module(module), function)(*arguments)
