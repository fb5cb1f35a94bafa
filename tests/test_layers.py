"""The arrows of the design: who may import whom, and how large things may grow."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pardnn

PACKAGE = Path(pardnn.__file__).parent
ROOT = Path(__file__).parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_contracts_are_kept() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_name_every_room() -> None:
    """A room that is new must say where it stands, in every contract about rooms below it."""
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    by_name = {contract["name"]: contract for contract in CONTRACTS["contracts"]}
    no_torch = by_name["Only backends.torch imports torch"]["source_modules"]
    # The others reach torch, through backends.torch alone.
    below = rooms - {"__init__", "__main__", "backends", "planner", "api", "cli"}
    assert {f"pardnn.{room}" for room in below} == set(no_torch)


@pytest.mark.parametrize(
    "path", ["sim/engine.py", "api/run.py", "cli/main.py", "backends/__init__.py"]
)
def test_ruff_refuses_torch_outside_its_room(path: str) -> None:
    for room, expected in ((path, 1), ("backends/torch/runtime/executor.py", 0)):
        command = [
            sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache",
            "--stdin-filename", str(PACKAGE / room), "-",
        ]  # fmt: skip
        for code in ("import torch\n", "def f():\n    from torch import nn\n"):
            done = subprocess.run(command, input=code, text=True, capture_output=True, cwd=ROOT)
            assert done.returncode == expected, done.stdout
            assert ("TID251" in done.stdout) == bool(expected)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_size_budget(path: Path) -> None:
    """A file of at most 400 lines; a body of at most 40, of at most 60 in a kernel."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        size = 1 + (node.end_lineno or 0) - body[0].lineno if body else 0
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        is_kernel = bool(decorators & {"kernel", "helper"})
        assert size <= (60 if is_kernel else 40), f"{node.name} has a body of {size} lines"
