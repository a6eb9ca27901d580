"""Commands read options, call one function and print: the work is in the package that it belongs to."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    *(ROOT / "src" / "divdec" / "cli").rglob("*.py"),
    *(ROOT / "research" / "src" / "divdec_research" / "cli").rglob("*.py"),
]
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
