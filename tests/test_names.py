"""Names and docstrings of both packages and of the scripts follow the rules of CONTRIBUTING.md."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "divdec", ROOT / "research" / "src" / "divdec_research")
SCRIPTS = (ROOT / "research" / "studies", ROOT / "benchmarks", ROOT / "examples")
FILES = sorted(path for folder in PACKAGES + SCRIPTS for path in folder.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
VAGUE = {"one", "own", "held", "taken", "told", "found"}


def nodes(*kinds):
    return [(path, node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def bound_names(node):
    """Names that a function, an assignment or a loop binds."""
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def test_bounds_are_called_min_and_max():
    constants = [name for _, node in nodes(ast.Name) for name in bound_names(node) if name.isupper()]
    assert [
        name
        for name in constants
        if re.match(r"_?(LEAST|MOST|LARGEST|SMALLEST|LONGEST|SHORTEST|HIGHEST|LOWEST)(_|$)", name)
    ] == []


def test_docstrings_do_not_begin_with_a_clause():
    documented = nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert [path.name for path, node in documented if (ast.get_docstring(node) or "").startswith("What ")] == []


def test_no_class_name_is_used_twice():
    counts = Counter(node.name for _, node in nodes(ast.ClassDef))
    # vLLM finds its model class by the name of transformers' class.
    assert {name for name, count in counts.items() if count > 1} == {"DivergenceForCausalLM"}


def test_no_variable_has_a_vague_name():
    # Fields of classes are read with the name of their object before them.
    fields = {
        statement.target
        for _, node in nodes(ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    vague = [
        f"{path.name}:{node.lineno} {name}"
        for path, node in nodes(ast.Name, ast.arg)
        if node not in fields
        for name in bound_names(node)
        if name in VAGUE
    ]
    assert vague == []
