"""The arrows of the design: who may import whom, and how large things may grow."""

import ast
import collections
import subprocess
import sys
import tomllib
from pathlib import Path

import networkx as nx
import pytest

from tests.sources import PACKAGE, SOURCES, nodes_of

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / name for name in ("src", "tests", "bench", "testbed", "docs", "examples")]
#: Data: one captured graph per model and size, named for it; dated pages of results; numbered
#: pages of decisions.
LARGE_FOLDERS = {
    ROOT / name
    for name in ("testbed/graphs", "testbed/graphs/batch", "bench/results", "docs/decisions")
}
#: Where imports stand inside functions: so that `pardnn --help` answers at once, and a rank that
#: does not plan loads no compiler.
DOORS = {"__main__.py", "cli", "api/parallelize.py"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_contracts_are_kept() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_name_every_package() -> None:
    """A new package must say where it stands, in every contract about packages below it."""
    packages = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    by_name = {contract["name"]: contract for contract in CONTRACTS["contracts"]}
    no_torch = by_name["Only backends.torch imports torch"]["source_modules"]
    # The others reach torch, through backends.torch alone.
    below = packages - {"__init__", "__main__", "backends", "planner", "explain", "api", "cli"}
    assert {f"pardnn.{package}" for package in below} == set(no_torch)


@pytest.mark.parametrize(
    "path", ["sim/engine.py", "api/run.py", "cli/main.py", "backends/__init__.py"]
)
def test_ruff_refuses_torch_outside_its_package(path: str) -> None:
    for package, expected in ((path, 1), ("backends/torch/runtime/executor.py", 0)):
        command = [
            sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache",
            "--stdin-filename", str(PACKAGE / package), "-",
        ]  # fmt: skip
        for code in ("import torch\n", "def f():\n    from torch import nn\n"):
            done = subprocess.run(command, input=code, text=True, capture_output=True, cwd=ROOT)
            assert done.returncode == expected, done.stdout
            assert ("TID251" in done.stdout) == bool(expected)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_size_budget(path: Path) -> None:
    """A file of at most 400 lines; a body of at most 40, of at most 60 in a kernel."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    for node in nodes_of(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        size = 1 + (node.end_lineno or 0) - body[0].lineno if body else 0
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        is_kernel = bool(decorators & {"kernel", "helper"})
        assert size <= (60 if is_kernel else 40), f"{node.name} has a body of {size} lines"


def imported(node: ast.stmt, modules: set[str]) -> set[str]:
    """The modules of ours that a statement names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    return (inner & modules) or ({node.module} & modules)


def test_no_two_files_import_each_other() -> None:
    """No circle of files, imports for type checkers and inside functions included."""
    names = {
        path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in SOURCES
    }
    graph, modules = nx.DiGraph(), set(names.values())
    for path, name in names.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                graph.add_edges_from((name, other) for other in imported(node, modules))
    assert graph.number_of_edges() > 500
    circles = [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]
    assert circles == []


def test_a_folder_has_at_most_20_files() -> None:
    files = collections.Counter(
        path.parent
        for top in FOLDERS
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    large = {folder for folder, count in files.items() if count > 20}
    assert large == LARGE_FOLDERS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_inside_functions_stand_at_the_doors(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    if DOORS & {str(relative), relative.parts[0]}:
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {
        node.lineno
        for function in nodes_of(path)
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not late, f"imports inside functions, in lines {sorted(late)}"
