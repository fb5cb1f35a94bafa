"""The files of the package, each parsed once for all tests that look at code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pardnn

PACKAGE = Path(pardnn.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return what Python parses from a file: shared, so not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's code."""
    return list(ast.walk(tree_of(path)))
