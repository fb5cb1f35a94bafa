"""Mutants of a file: one small change each, inside a function, made on the syntax tree.

Not changed: docstrings, annotations, decorators, default values, texts, assertions of our own
invariants (`strict=` of `zip` is one), and what is raised. Code of modules and classes outside
functions is not changed either: other modules have copies of what it defines.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "minimum": "maximum",
    "maximum": "minimum", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil",
}  # fmt: skip
SYMMETRIC = {"min", "max", "minimum", "maximum"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Decorators of functions that Numba compiles.
KERNELS = {"kernel", "helper"}
LEFT_ALONE = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
#: Fields of nodes that hold no code of the function itself.
NO_CODE = {"annotation", "returns", "decorator_list", "args", "type_params", "type_comment"}


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
        path: Of the file, from the root of the repository.
        function: Outermost function or method that is changed, `Class.method`.
        change: What was and what is, as source text; with a number where it occurs repeatedly.
        line: In the file.
        lines: Of the statement: those that tell whether a test runs it.
        number: Of the change among those of the file.
        is_kernel: Whether Numba compiles the function.
    """

    path: str
    function: str
    change: str
    line: int
    lines: range
    number: int
    is_kernel: bool = False

    @property
    def key(self) -> str:
        """What it is called in journals: lines may move."""
        return f"{self.path}::{self.function}::{self.change}"


class Change(NamedTuple):
    """A node in its place, and another for it, in a statement of some lines."""

    function: str
    lines: range
    owner: ast.AST
    field: str
    index: int | None
    old: ast.AST
    new: ast.AST

    def make(self) -> None:
        """Put the other node in place."""
        if self.index is None:
            setattr(self.owner, self.field, self.new)
        else:
            getattr(self.owner, self.field)[self.index] = self.new


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a file."""
    found: list[Mutant] = []
    seen = Counter[tuple[str, str]]()
    tree = ast.parse(source)
    kernels = {
        node.name
        for node in tree.body
        if isinstance(node, FUNCTIONS)
        and KERNELS & {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    }
    for number, change in enumerate(_changes(tree)):
        text = f"{_shown(change.old)} -> {_shown(change.new)}"
        seen[change.function, text] += 1
        if seen[change.function, text] > 1:
            text += f" #{seen[change.function, text]}"
        line = getattr(change.old, "lineno", change.lines.start)
        is_kernel = change.function in kernels
        found.append(Mutant(path, change.function, text, line, change.lines, number, is_kernel))
    return found


def mutated(source: str, number: int) -> ast.Module:
    """Return the tree of a file with one change made."""
    tree = ast.parse(source)
    for at, change in enumerate(_changes(tree)):
        if at == number:
            change.make()
            break
    return ast.fix_missing_locations(tree)


def sampled(root: Path, paths: list[Path], size: int, seed: int) -> list[Mutant]:
    """Return mutants of files, chosen by hash: those of unchanged code stay in the sample.

    Args:
        root: Of the repository.
        paths: Files.
        size: Of the sample.
        seed: Another one, another sample.
    """
    every = [
        mutant
        for path in sorted(paths)
        for mutant in mutants_of(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    ]
    return sorted(every, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest())[:size]


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"


def _changes(tree: ast.Module) -> Iterator[Change]:
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield from _inside(node, node.name, range(0))
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, FUNCTIONS):
                    yield from _inside(method, f"{node.name}.{method.name}", range(0))


def _inside(node: ast.AST, function: str, lines: range) -> Iterator[Change]:
    """Yield the changes of what a node holds.

    Args:
        node: The node.
        function: In which it is.
        lines: Of the statement in which it is.
    """
    for field, value in ast.iter_fields(node):
        if field in NO_CODE and not (field == "args" and isinstance(node, ast.Call)):
            continue
        children: list[tuple[int | None, Any]] = (
            list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        )
        for index, child in children:
            if not isinstance(child, ast.AST) or isinstance(child, LEFT_ALONE):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            here = _head(child) if isinstance(child, ast.stmt) else lines
            for new in _others(child):
                yield Change(function, here, node, field, index, child, new)
            yield from _inside(child, function, here)


def _head(statement: ast.stmt) -> range:
    """Return the lines of a statement, without those of the statements in it."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(end, statement.lineno) + 1)


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node becomes in its mutants."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.And() if isinstance(op, ast.Or) else ast.Or())
            for i in range(len(values)):
                left = [*values[:i], *values[i + 1 :]]
                yield left[0] if len(left) == 1 else _with(node, values=left)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            if not isinstance(operand, ast.Constant):  # -1 is a mark, not a number
                yield operand
        case ast.Constant(value=bool() as value):
            yield _with(node, value=not value)
        case ast.Constant(value=int() as value):
            yield _with(node, value=value + 1)
        case ast.Constant(value=float() as value):
            yield _with(node, value=value * 2 if value else 1.0)
        case ast.Name(id=name) if name in NAMES:
            yield _with(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield _with(node, attr=NAMES[name])
        # The order of what a minimum or maximum is taken of does not matter.
        case ast.Call(func=func, args=args) if _name(func) not in SYMMETRIC:
            # One pair, of two that look alike: others end in an error of types.
            for i in range(len(args) - 1):
                one, other = args[i : i + 2]
                if type(one) is type(other) and type(one) is not ast.Starred:
                    if ast.dump(one) == ast.dump(other):
                        continue
                    yield _with(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
                    break
        case ast.IfExp(test=test) | ast.If(test=test):
            if not isinstance(test, ast.Compare) or len(test.ops) > 1:
                yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=ifs):
            for i in range(len(ifs)):
                yield _with(node, ifs=[*ifs[:i], *ifs[i + 1 :]])
        case ast.Break() | ast.Continue() | ast.Return(value=None):
            yield ast.copy_location(ast.Pass(), node)
        case _:
            pass
    yield from _removed(node)


def _name(function: ast.AST) -> str:
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _removed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `pass` for a statement that changes something besides a local name."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.copy_location(ast.Pass(), node)
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.copy_location(ast.Pass(), node)
        case ast.If(body=[*_, ast.Return()]):
            yield ast.copy_location(ast.Pass(), node)
        case _:
            pass


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    """Return a copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
