"""Commands read options, call one function and print; shapes in signatures are checked in both packages."""

import ast
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


@pytest.mark.parametrize(
    ("module", "function"),
    [("divdec.steering", "steer_linear"), ("divdec_research.suites.aggregate", "_means")],
)
def test_wrong_shapes_are_refused_in_tests(module, function):
    arguments = (torch.zeros(3), torch.zeros(2), 1.0) if function == "steer_linear" else (np.ones((2, 2)), None)
    with pytest.raises(TypeCheckError):
        getattr(importlib.import_module(module), function)(*arguments)
