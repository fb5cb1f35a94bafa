"""Functions with a single exit, in which conditions on data control whole statements.

Problem: `choices` handles an `if` on data whose body runs or not, and selects what it binds. A
`return` in the body, a ternary, and an `if` that ends its function do not have this form.

Idea: rewrite the function into an equivalent one, which runs in its place while the step is traced:

    for view in views:                  returned = ended = 0
        if likeness(view) < delta:      for item in views:
            update = project(view)          if isinstance(ended, int) and ended: break
            return update, ratio            if not ended:
    return update, 1.0                          view, skips = item, 0
                                                if likeness(view) < delta:
                                                    update = project(view)
                                                    value, returned, ended, skips = ..., 1, 1, 1
                                        if not returned:
                                            value, returned = (update, 1.0), 1
                                        return value

    scale = a if norm > a else 1.0      if norm > a: chosen = a
                                        else: chosen = 1.0
                                        scale = chosen

A condition with more than one way to the same outcome, `a or b`, becomes ternaries first: `1 if a
else 1 if b else 0`. Only a `return`, `continue` or `break` below such a condition, or after one
that is replaced, changes; one in a `try`, a `while` or a `match` cannot be changed. Each statement
then has its own line number, its original line plus a growing multiple of `LINES`, see
`source_location`.

Complexity: O(statements) for each function.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pardnn.backends.torch.capture.choices.branches import (
    SCOPES,
    Position,
    blocks_of,
    is_conjunction,
    span,
)
from pardnn.backends.torch.capture.source_location import LINES

END: Position = (0, 0)
#: A builtin that refuses iterators: a loop that ends early would not have emptied them.
ITEMS = "_pardnn_items"
_PLACED = ast.stmt | ast.expr | ast.excepthandler
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_LAST_LINE = 2**31 - 1  # a C int
#: Local names that the form adds: whether the function is done, what it returns, ternaries,
RETURNED, VALUE, CHOSEN = "_pardnn_returned", "_pardnn_value", "_pardnn_chosen_"
#: whether a loop is done, whether an iteration is, and over what it goes.
ENDS, SKIPS, ITEM = "_pardnn_ended_", "_pardnn_skips_", "_pardnn_item_"


class NoNormalFormError(Exception):
    """The function has no normal form that changes this code."""


def bring_to_normal_form(function: ast.FunctionDef, asked: Collection[Position]) -> None:
    """Change a function's tree so that conditions on data control whole statements.

    Args:
        function: Changed in place.
        asked: Positions within the conditions; `END` for a line after the last statement.

    Raises:
        NoNormalFormError: Nothing has to change, or nothing can.
    """
    is_other = any(isinstance(x, ast.Yield | ast.YieldFrom | ast.Await) for x in ast.walk(function))
    if is_other or (function.end_lineno or 0) >= LINES:
        raise NoNormalFormError
    tests = [statement for at in asked if (statement := _if_at(function, at)) is not None]
    for statement in tests:
        if not is_conjunction(statement.test):
            made = _decided(statement.test, ast.Constant(1), ast.Constant(0))
            statement.test = _at(made, statement.test)
    names = map(f"{CHOSEN}{{}}".format, itertools.count())
    num_lifted = 0
    while any(_lift_ternary(function, at, names) for at in asked):
        num_lifted += 1
    targets = [each for each in tests if _leaves(each)]
    if not (num_lifted or targets or END in asked):
        raise NoNormalFormError
    last = function.body[-1]
    if not isinstance(last, ast.Return):
        function.body.append(_at(ast.Return(ast.Constant(None)), last))
    ways = _OneWayOut(targets)
    body = ways.block(function.body, is_behind=False)
    if ways.are_returns_replaced:
        begin = _assigned([RETURNED], [ast.Constant(0)], function.body[0])
        body = [begin, *body, _at(ast.Return(ast.Name(VALUE, ast.Load())), last)]
    function.body = body
    _give_lines(function.body, itertools.count(LINES, LINES))


def _give_lines(block: Sequence[ast.stmt], lines: Iterator[int]) -> None:
    """Give each statement its own line number, in increasing order."""
    for statement in block:
        blocks = [getattr(statement, name, None) or [] for name in _BLOCKS]
        inside = {id(x) for each in blocks for part in each for x in ast.walk(part)}
        line = next(lines)
        if line + LINES > _LAST_LINE:
            raise NoNormalFormError
        for each in ast.walk(statement):
            if id(each) not in inside and isinstance(each, _PLACED):
                each.lineno += line
                each.end_lineno = (each.end_lineno or 0) + line
        for each in blocks:
            _give_lines(each, lines)
        if inside:  # it ends after what is in it
            statement.end_lineno = max(x.end_lineno for each in blocks for x in each)


def _if_at(function: ast.FunctionDef, at: Position) -> ast.If | None:
    """Return the innermost `if` statement whose condition is at a position."""
    found = None
    for block, index, _ in blocks_of(function):
        statement = block[index]
        if isinstance(statement, ast.If) and _is_at(statement.test, at):
            found = statement
    return found


def _is_at(node: ast.expr, at: Position) -> bool:
    begin, end = span(node)
    return begin <= at < end


def _leaving(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what leaves a statement: `return`, and `break` or `continue` of a loop around it."""
    if isinstance(node, ast.Return | ast.Break | ast.Continue):
        yield node
    inner = (each for each in ast.iter_child_nodes(node) if not isinstance(each, SCOPES))
    found = (leaving for each in inner for leaving in _leaving(each))
    is_loop = isinstance(node, ast.For | ast.While)
    yield from (each for each in found if not is_loop or isinstance(each, ast.Return))


def _leaves(statement: ast.AST) -> bool:
    """Whether a statement may leave the function, or the loop around it or its iteration."""
    return any(True for _ in _leaving(statement))


def _ends(loop: ast.For) -> bool:
    """Whether a loop may end early."""
    found = (leaving for each in loop.body for leaving in _leaving(each))
    return any(not isinstance(each, ast.Continue) for each in found)


def _of_its_own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, without those of inner functions."""
    yield node
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, SCOPES):
            yield from _of_its_own(each)


class _OneWayOut:
    """Replaces `return`, `continue` and `break` by assignments.

    Args:
        targets: The `if` statements on data, with one of them inside.

    Attributes:
        are_returns_replaced: Whether any `return` is.
    """

    def __init__(self, targets: Sequence[ast.If]) -> None:
        self._targets = targets
        self._loops: list[str] = []  # flag names of the enclosing loops, without their prefix
        self._names = map(str, itertools.count())
        self.are_returns_replaced = False

    def block(self, block: list[ast.stmt], *, is_behind: bool) -> list[ast.stmt]:
        """Return a block that data-dependent code leaves only at its end.

        Args:
            block: Statements.
            is_behind: Whether data-dependent code may have left it before them.
        """
        for i, statement in enumerate(block):
            holds = any(each in self._targets for each in _of_its_own(statement))
            if not holds and not (is_behind and _leaves(statement)):
                continue
            may_leave = _leaves(statement)
            found = [*block[:i], *self._statement(statement, is_behind=is_behind)]
            rest = block[i + 1 :]
            if isinstance(statement, ast.Return | ast.Break | ast.Continue) or not rest:
                return found
            if not may_leave:
                return [*found, *self.block(rest, is_behind=is_behind)]
            flag = f"{SKIPS}{self._loops[-1]}" if self._loops else RETURNED
            return [*found, _unless(flag, self.block(rest, is_behind=True))]
        return block

    def _statement(self, statement: ast.stmt, *, is_behind: bool) -> list[ast.stmt]:
        match statement:
            case ast.Return(value=value):
                self.are_returns_replaced = True
                flags = [RETURNED, *(kind + x for x in self._loops for kind in (ENDS, SKIPS))]
                values = [value or ast.Constant(None), *(ast.Constant(1) for _ in flags)]
                return [_assigned([VALUE, *flags], values, statement)]
            case ast.Break() | ast.Continue():
                kinds = (SKIPS,) if isinstance(statement, ast.Continue) else (ENDS, SKIPS)
                flags = [kind + self._loops[-1] for kind in kinds]
                return [_assigned(flags, [ast.Constant(1) for _ in flags], statement)]
            case ast.If():
                is_behind |= statement in self._targets
                statement.body = self.block(statement.body, is_behind=is_behind)
                statement.orelse = self.block(statement.orelse, is_behind=is_behind)
            case ast.With():
                statement.body = self.block(statement.body, is_behind=is_behind)
            case ast.For(orelse=[]):
                return self._loop(statement, is_behind=is_behind)
            case _:
                raise NoNormalFormError
        return [statement]

    def _loop(self, loop: ast.For, *, is_behind: bool) -> list[ast.stmt]:
        """Return a loop whose iterations all run to their end, and what comes before it."""
        name, place = next(self._names), loop.body[0]
        self._loops.append(name)
        may_end = _ends(loop)
        inside = self.block(loop.body, is_behind=is_behind or may_end)
        self._loops.pop()
        loop.body = [_assigned([SKIPS + name], [ast.Constant(0)], place), *inside]
        if not may_end:
            return [loop]
        if isinstance(loop.iter, ast.Name | ast.Attribute | ast.Subscript):
            call = ast.Call(ast.Name(ITEMS, ast.Load()), [loop.iter], [])
            loop.iter = _at(call, loop.iter)
        # The variable keeps the value with which the loop ended.
        target, item = loop.target, ITEM + name
        loop.target = _at(ast.Name(item, ast.Store()), target)
        taken = _at(ast.Assign([_moved(target, place)], ast.Name(item, ast.Load())), place)
        loop.body = [_ended(ENDS + name, place), _unless(ENDS + name, [taken, *loop.body])]
        return [_assigned([ENDS + name], [ast.Constant(0)], loop), loop]


def _unless(flag: str, block: list[ast.stmt]) -> ast.stmt:
    test = ast.UnaryOp(ast.Not(), ast.Name(flag, ast.Load()))
    return _at(ast.If(test, block, []), block[0])


def _ended(flag: str, place: ast.stmt) -> ast.stmt:
    """Return the statement that leaves a loop certainly known to have ended."""
    made = ast.parse(f"if isinstance({flag}, int) and {flag}:\n    break").body[0]
    return _moved(made, place)


def _decided(test: ast.expr, yes: ast.expr, no: ast.expr) -> ast.expr:
    """Return nested ternaries, each with a condition that has no parts."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _decided(inner, no, yes)
        case ast.BoolOp(op=op, values=[first, *rest]):
            others = _decided(ast.BoolOp(op, rest), yes, no) if rest else None
            ways = (yes, others or no) if isinstance(op, ast.Or) else (others or yes, no)
            return _decided(first, *ways)
        case ast.Compare(left=left, ops=[op, *ops], comparators=[middle, *rest]) if ops:
            if not _is_plain(middle):
                raise NoNormalFormError
            both = ast.Compare(left, [op], [middle]), ast.Compare(copy.deepcopy(middle), ops, rest)
            pair = [_at(each, test) for each in both]
            return _decided(ast.BoolOp(ast.And(), pair), yes, no)
        case _:
            made = ast.IfExp(test, *(copy.deepcopy(each) for each in (yes, no)))
            return _at(made, test)


def _lift_ternary(function: ast.FunctionDef, at: Position, names: Iterator[str]) -> bool:
    """Replace a ternary by an `if` before its statement; return whether there is one."""
    for block, index, _ in blocks_of(function):
        statement = block[index]
        for field, found in _evaluated(statement):
            ternary = _ternary_at(found, at)
            if ternary is not None:
                name = next(names)
                ways = ([_assigned([name], [x], x)] for x in (ternary.body, ternary.orelse))
                chosen = _at(ast.Name(name, ast.Load()), ternary)
                setattr(statement, field, _Replaced(ternary, chosen).visit(found))
                block.insert(index, _at(ast.If(ternary.test, *ways), statement))
                return True
    return False


def _evaluated(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the expressions that a statement evaluates first."""
    for field in ("value", "test"):
        found = getattr(statement, field, None)
        if isinstance(found, ast.expr) and not isinstance(statement, ast.While | ast.Assert):
            yield field, found


def _ternary_at(node: ast.AST, at: Position) -> ast.IfExp | None:
    """Return the ternary whose condition is at a position, if only plain names come before it.

    If others are around it, as for `best is None or value < best`, it is the outermost.

    Raises:
        NoNormalFormError: Something else is evaluated before it.
    """
    if isinstance(node, ast.IfExp):
        ways = (_ternary_at(each, at) for each in (node.body, node.orelse))
        return node if _is_at(node.test, at) or any(ways) else None
    if isinstance(node, ast.Lambda | ast.BoolOp | ast.NamedExpr) or hasattr(node, "generators"):
        return None
    before: list[ast.AST] = []
    for each in ast.iter_child_nodes(node):
        found = _ternary_at(each, at)
        if found is not None:
            if not all(map(_is_plain, before)):
                raise NoNormalFormError
            return found
        before.append(each)
    return None


def _is_plain(node: ast.AST) -> bool:
    """Whether it can be evaluated earlier or later with the same result."""
    kinds = ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp
    kinds += ast.operator, ast.unaryop
    return all(isinstance(each, (*kinds, ast.expr_context)) for each in ast.walk(node))


class _Replaced(ast.NodeTransformer):
    """Puts one node in place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return the node that replaces a node."""
        return self._new if node is self._old else self.generic_visit(node)


def _assigned(names: Sequence[str], values: Sequence[ast.expr], place: ast.AST) -> ast.stmt:
    targets: list[ast.expr] = [ast.Name(each, ast.Store()) for each in names]
    if len(targets) == 1:
        return _at(ast.Assign(targets, values[0]), place)
    pair = ast.Tuple(targets, ast.Store()), ast.Tuple([*values], ast.Load())
    return _at(ast.Assign([pair[0]], pair[1]), place)


def _moved(node: Any, place: ast.AST) -> Any:
    """Give a node and everything in it the position of another."""
    for each in ast.walk(node):
        if isinstance(each, _PLACED):
            ast.copy_location(each, place)
    return node


def _at(made: Any, place: ast.AST) -> Any:
    """Give a new node and the new nodes in it the position of another."""
    return ast.fix_missing_locations(ast.copy_location(made, place))
