"""What is compiled without a way in from Python is called by kernels alone."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECORATORS = {"helper", "kernel"}


def module_of(path: Path) -> str:
    """Return a file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.")


def decorated(tree: ast.AST, names: set[str]) -> Iterator[ast.FunctionDef]:
    """Yield functions that are compiled."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
            if marks & names:
                yield node


def calls_from_python(tree: ast.AST, module: str, helpers: set[tuple[str, str]]) -> list[str]:
    """Return the helpers that a file uses outside kernels."""
    known = {name: name for home, name in helpers if home == module}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (node.module, alias.name) in helpers:
                    known[alias.asname or alias.name] = alias.name
    inside = {id(part) for function in decorated(tree, DECORATORS) for part in ast.walk(function)}
    outside = (part for part in ast.walk(tree) if id(part) not in inside)
    used = {
        part.id for part in outside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    return sorted(used & set(known))


def files(*folders: str) -> list[Path]:
    """Return all Python files below folders."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def all_helpers() -> set[tuple[str, str]]:
    """Return (module, name) of every helper."""
    texts = {path: path.read_text(encoding="utf-8") for path in files("src")}
    return {
        (module_of(path), function.name)
        for path, text in texts.items()
        if "helper" in text
        for function in decorated(ast.parse(text), {"helper"})
    }


def test_helpers_are_called_by_kernels_alone() -> None:
    helpers = all_helpers()
    assert len(helpers) > 20
    modules = {module for module, _ in helpers}
    for path in files("src", "tests", "bench"):
        text = path.read_text(encoding="utf-8")
        if module_of(path) not in modules and not any(module in text for module in modules):
            continue  # to parse all files takes 3 s
        tree = ast.parse(text)
        used = calls_from_python(tree, module_of(path), helpers)
        assert used == [], f"{path}: Python cannot call {used}: make them kernels"


@pytest.mark.parametrize("call", ["add_to(1)", "f = add_to", "@kernel\ndef g():\n  pass\nadd_to()"])
def test_a_call_from_python_is_seen(call: str) -> None:
    tree = ast.parse(f"from room import add_to\n{call}\n")
    assert calls_from_python(tree, "other", {("room", "add_to")}) == ["add_to"]


def test_a_call_from_a_kernel_is_none() -> None:
    tree = ast.parse("from room import add_to\n@kernel\ndef g():\n  add_to()\n")
    assert calls_from_python(tree, "other", {("room", "add_to")}) == []


def test_all_kernels_are_compiled_alike() -> None:
    """With `numba.njit` they would get wrappers that take as long to compile as the kernel."""
    other = [
        str(path)
        for path in files("src")
        if "numba.njit" in path.read_text(encoding="utf-8") and path.name != "jit.py"
    ]
    assert other == []


NO_CACHE = """
import numba
from numba.core import caching
for each in caching.CacheImpl._locator_classes:
    each.from_function = classmethod(lambda *_: None)
from pardnn.kernels import jit
@jit.helper
def twice(x):
    return 2 * x
@jit.kernel
def four_times(x):
    return twice(twice(x))
assert four_times(3) == 12
assert four_times.stats.cache_path is None
"""
FULL_CACHE = """
from pardnn.kernels import jit
def full(*_):
    raise OSError(28, "No space left on device")
jit.numba.core.caching.IndexDataCacheFile.save = full
@jit.kernel
def one(x):
    return x + 1
@jit.kernel
def two(x):
    return x + 2
assert (one(1), two(1)) == (2, 3)
"""


@pytest.mark.parametrize("text", [NO_CACHE, FULL_CACHE], ids=["no folder", "full"])
def test_kernels_that_cannot_be_kept_run_all_the_same(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(f"{text}assert jit.COMPILATIONS.kept == 'not kept'\n")
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "0", "PYTHONPATH": str(ROOT / "src")}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "compiled kernels cannot be kept" in done.stderr
