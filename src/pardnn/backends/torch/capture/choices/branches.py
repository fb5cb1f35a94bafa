"""Which code an `if` in the user's code controls.

Problem: Python asks for the truth of a tensor, and does not say which code depends on the answer.

Idea: the instruction that asks has a position in the source, and so has the `if` statement around
it. One of its two branches does nothing:

    if torch.isfinite(loss):          the condition controls the body
        optimizer.step()
    if loss.isnan() or loss.isinf():  it controls the rest of the function or loop
        return loss

Or both branches do something, and run one after the other.

Complexity: one parse of the file for each function with such an `if`.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pardnn.backends.torch.capture.choices.liveness import live_after

Position = tuple[int, int]
_JUMPS = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Region(NamedTuple):
    """The code that a condition controls.

    Attributes:
        test: Where the condition begins and ends.
        begin: Line and column of the first statement.
        end: Line and column where the last one ends.
        outcomes: The outcome of each part of the condition if the code runs, by its position.
        other: Where the code begins and ends that runs otherwise; None if there is none.
        names: Local names that either branch binds and that are read later.
    """

    test: tuple[Position, Position]
    begin: Position
    end: Position
    outcomes: dict[Position, bool]
    other: tuple[Position, Position] | None = None
    names: frozenset[str] = frozenset()

    def holds(self, position: Position | None) -> bool:
        """Whether a position is in it; None means the position of the previous instruction."""
        return position is None or self.begin <= position < self.end


def asking_frame() -> types.FrameType | None:
    """Return the innermost frame that belongs neither to this package nor to a symbol's code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "torch" and module.partition(".")[0] != "pardnn":
            return frame
        frame = frame.f_back
    return None


def position_of(frame: types.FrameType) -> Position | None:
    """Return the line and column that a frame executes; None if unknown."""
    return _positions(frame.f_code)[frame.f_lasti // 2]


def tested_position(frame: types.FrameType) -> Position | None:
    """Return where the part of a condition is on which a frame is about to jump."""
    code = frame.f_code.co_code
    if "JUMP" not in dis.opname[code[frame.f_lasti]]:
        return None
    # A jump has the position of its statement; the instruction before it has the part's.
    at = frame.f_lasti - 2
    while at > 0 and dis.opname[code[at]] in ("CACHE", "EXTENDED_ARG"):
        at -= 2
    return _positions(frame.f_code)[at // 2]


@functools.lru_cache(64)
def _positions(code: types.CodeType) -> list[Position | None]:
    found = ((line, column) for line, _, column, _ in code.co_positions())
    return [None if line is None or column is None else (line, column) for line, column in found]


def region_of(frame: types.FrameType, function: ast.FunctionDef | None) -> Region | None:
    """Return the code controlled by the `if` on which a frame is about to jump; None if unclear.

    It is unclear where both branches jump, or where several conditions lead to one of them.

    Args:
        frame: The frame that asks.
        function: The tree of its function, see `function_of`.
    """
    at = tested_position(frame)
    if function is None or at is None:
        return None
    for block, index, inside in blocks_of(function):
        statement = block[index]
        if isinstance(statement, ast.If) and span(statement.test)[0] <= at < _end(statement.test):
            return _region(function, block, index, inside)
    return None


@functools.lru_cache(64)
def function_of(code: types.CodeType) -> ast.FunctionDef | None:
    """Return the tree of the function with this code; None if its source is not available."""
    return parsed(code)[1]


def parsed(code: types.CodeType) -> tuple[ast.Module | None, ast.FunctionDef | None]:
    """Return a fresh tree of a code object's file, and the function in it."""
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None, None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return tree, node
    return None, None


def blocks_of(function: ast.FunctionDef) -> Iterator[tuple[list[ast.stmt], int, ast.AST]]:
    """Yield each statement of a function: its block, its index there, and the block's owner."""
    stack: list[ast.AST] = [function]
    while stack:
        owner = stack.pop()
        for name in ("body", "orelse", "finalbody"):
            block = getattr(owner, name, None)
            for i, statement in enumerate(block if isinstance(block, list) else ()):
                yield block, i, owner
                if not isinstance(statement, SCOPES):
                    stack.append(statement)
        stack.extend(getattr(owner, "handlers", ()))


def _region(
    function: ast.FunctionDef, block: list[ast.stmt], index: int, owner: ast.AST
) -> Region | None:
    statement = block[index]
    assert isinstance(statement, ast.If)
    rest = block[index + 1 :]
    if not statement.orelse and not _jumps(statement.body):
        return _checked(function, statement, statement.body, is_body=True)
    if _is_nothing(statement.body) and statement.orelse:
        return _checked(function, statement, statement.orelse, is_body=False)
    if statement.orelse and not _jumps([*statement.body, *statement.orelse]):
        return _checked(function, statement, statement.body, statement.orelse, is_body=True)
    if statement.orelse or not rest or len(statement.body) != 1:
        return None
    (jump,) = statement.body
    if isinstance(jump, ast.Continue) and isinstance(owner, ast.For) and block is owner.body:
        return _checked(function, statement, rest, is_body=False)
    last = rest[-1]
    if isinstance(jump, ast.Return) and owner is function and isinstance(last, ast.Return):
        is_same = ast.dump(jump) == ast.dump(last)
        names = {node.id for node in ast.walk(last) if isinstance(node, ast.Name)}
        if is_same and len(rest) > 1 and not names & _stored(rest[:-1]):
            return _checked(function, statement, rest[:-1], is_body=False)
    return None


def _checked(
    function: ast.FunctionDef,
    statement: ast.If,
    code: Sequence[ast.stmt],
    other: Sequence[ast.stmt] = (),
    *,
    is_body: bool,
) -> Region | None:
    """Return the region of a branch and its other branch, if nothing else differs.

    Args:
        function: The function that holds the statement.
        statement: The `if`.
        code: The code that it controls.
        other: The code that runs otherwise.
        is_body: Whether the code runs where the condition is true.
    """
    outcomes: dict[Position, bool] = {}
    if _jumps(code) or not _conjunction(statement.test, is_body, outcomes):
        return None
    spans = [(span(each[0])[0], _end(each[-1])) for each in (code, other) if each]
    held = live_after(function, statement if code is statement.body else code[-1])
    names = _stored([*code, *other]) & (held | _not_local(function))
    # The rest of a function has no line after it, where a name could get its value.
    if names and (code is not statement.body or names & _not_local(function)):
        return None
    rest = spans[1] if other else None
    return Region(span(statement.test), *spans[0], outcomes, rest, frozenset(names))


def _not_local(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function declares as global or nonlocal."""
    nodes = ast.walk(function)
    return {name for n in nodes if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}


def is_conjunction(test: ast.expr) -> bool:
    """Whether a condition can be true in only one way."""
    return _conjunction(test, True, {})


def _conjunction(test: ast.expr, wanted: bool, outcomes: dict[Position, bool]) -> bool:
    """Note the outcome of each part of a condition if the whole is `wanted`.

    Returns:
        False, if there is more than one way to this outcome.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _conjunction(test.operand, not wanted, outcomes)
    if isinstance(test, ast.BoolOp):
        is_and = isinstance(test.op, ast.And)
        return is_and == wanted and all(_conjunction(x, wanted, outcomes) for x in test.values)
    is_nested = any(isinstance(x, ast.BoolOp | ast.IfExp | ast.NamedExpr) for x in _own(test))
    is_chain = isinstance(test, ast.Compare) and len(test.ops) > 1
    outcomes[span(test)[0]] = wanted
    return not is_nested and not is_chain


def _own(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the nodes of a condition that its own frame evaluates."""
    stack: list[ast.AST] = [test]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.GeneratorExp | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))


def _stored(code: Sequence[ast.stmt]) -> set[str]:
    """Return the local names that statements bind."""
    nodes = [node for statement in code for node in ast.walk(statement)]
    found = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    found |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names = [name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for name in n.names]
    return found | {(name.asname or name.name).partition(".")[0] for name in names}


def _jumps(code: Iterable[ast.AST], *, is_loop: bool = False) -> bool:
    """Whether statements visibly leave the block.

    Args:
        code: The statements, or parts of them.
        is_loop: Whether they are in a loop of the block, so that `break` and `continue` stay in it.
    """
    for each in code:
        stays = is_loop and isinstance(each, ast.Break | ast.Continue)
        if (isinstance(each, _JUMPS) and not stays) or _exits(each):
            return True
        inside = is_loop or isinstance(each, ast.For | ast.While)
        if _jumps(ast.iter_child_nodes(each), is_loop=inside):
            return True
    return False


def _exits(node: ast.AST) -> bool:
    """Whether it is a call such as `sys.exit()`."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name in ("exit", "quit", "_exit")


def _is_nothing(code: Sequence[ast.stmt]) -> bool:
    return all(isinstance(each, ast.Pass) for each in code)


def span(node: ast.stmt | ast.expr) -> tuple[Position, Position]:
    """Return where a statement or an expression begins and ends."""
    # The tree counts columns in bytes, as positions of code do.
    return (node.lineno, node.col_offset), _end(node)


def _end(node: ast.stmt | ast.expr) -> Position:
    return (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
