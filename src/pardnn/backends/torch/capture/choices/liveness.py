"""Local names that are read after a statement before they are assigned again.

Problem: data-dependent code binds names, and a name that is not read afterwards needs
no value for both branches.

Idea: live-variable analysis of a function's tree, backwards over its statements. Names that an
inner function reads, or that `locals()` shows, are always live; a `try` kills no name.

Complexity: O(statements x depth of loops).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SHOWN_BY = {"locals", "vars", "dir", "eval", "exec"}
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
Names = frozenset[str]


class _Exits(NamedTuple):
    """The names that are live where a loop is left and where it continues."""

    left: Names = frozenset()
    again: Names = frozenset()


def live_after(function: ast.FunctionDef, statement: ast.stmt) -> Names:
    """Return the local names whose value after a statement is read later.

    Args:
        function: The function that holds the statement.
        statement: A statement of its body, at any depth, but not in an inner function.
    """
    found: dict[int, Names] = {}
    _Liveness(found).block(function.body, frozenset(), _Exits())
    return found.get(id(statement), frozenset()) | _always(function)


def _always(function: ast.FunctionDef) -> Names:
    """Return the names read by code that runs at an unknown time."""
    inner = (n for n in ast.walk(function) if isinstance(n, _INNER) and n is not function)
    found = frozenset().union(*(_loads(each) for each in inner))
    is_shown = not _SHOWN_BY.isdisjoint(_loads(function))
    return found | (_names(function) if is_shown else frozenset())


class _Liveness:
    """Walks blocks from their ends.

    Args:
        found: Gets the names that are live after each statement, by its id.
    """

    def __init__(self, found: dict[int, Names]) -> None:
        self._found = found

    def block(self, block: Sequence[ast.stmt], live: Names, exits: _Exits) -> Names:
        """Return the names that are live before a block, given those that are `live` after it."""
        for statement in reversed(block):
            self._found[id(statement)] = self._found.get(id(statement), frozenset()) | live
            live = self._before(statement, live, exits)
        return live

    def _before(self, statement: ast.stmt, live: Names, exits: _Exits) -> Names:
        match statement:
            case ast.Return() | ast.Raise():
                return _loads(statement)
            case ast.Break():
                return exits.left
            case ast.Continue():
                return exits.again
            case ast.If(test=test, body=body, orelse=other):
                ways = (self.block(each, live, exits) for each in (body, other))
                return _loads(test).union(*ways)
            case ast.For(target=target, iter=items, body=body, orelse=other):
                after = self.block(other, live, exits)
                return (
                    _loads(items) | _loads(target) | self._loop(body, after, live, _bound(target))
                )
            case ast.While(test=test, body=body, orelse=other):
                after = self.block(other, live, exits) | _loads(test)
                return after | self._loop(body, after, live, frozenset())
            case ast.With(items=items, body=body):
                inside = self.block(body, live, exits)
                self._add_inside(statement, live)  # it may swallow an exception
                bound = [each.optional_vars for each in items if each.optional_vars is not None]
                return live | _loads(*items) | (inside - frozenset().union(*map(_bound, bound)))
            case _ if hasattr(statement, "body") or isinstance(statement, ast.Match):
                return self._unclear(statement, live, exits)
            case _:
                return (live - _stored_by(statement)) | _loads(statement)

    def _loop(self, body: Sequence[ast.stmt], after: Names, live: Names, bound: Names) -> Names:
        """Return what is live before a round of a loop, which may be the last."""
        again = after
        while True:
            before = self.block(body, again, _Exits(live, again)) - bound
            if before <= again:
                return again
            again |= before

    def _unclear(self, statement: ast.AST, live: Names, exits: _Exits) -> Names:
        """Return what is live before a statement with arbitrary jumps inside."""
        everything = live | exits.left | exits.again | _loads(statement)
        self._add_inside(statement, everything)
        return everything

    def _add_inside(self, statement: ast.AST, live: Names) -> None:
        """Let names be live after each statement inside one."""
        for each in ast.walk(statement):
            if isinstance(each, ast.stmt) and each is not statement:
                self._found[id(each)] = self._found.get(id(each), frozenset()) | live


def _stored_by(statement: ast.stmt) -> Names:
    """Return the names that a simple statement certainly binds."""
    if isinstance(statement, ast.Assign):
        return frozenset().union(*map(_bound, statement.targets))
    return frozenset()


def _bound(target: ast.expr) -> Names:
    if isinstance(target, ast.Name):
        return frozenset([target.id])
    if isinstance(target, ast.Starred):
        return _bound(target.value)
    parts: Iterable[ast.expr] = target.elts if isinstance(target, ast.Tuple | ast.List) else ()
    return frozenset().union(*map(_bound, parts))


def _loads(*nodes: ast.AST) -> Names:
    """Return the names that code reads; an augmented assignment reads its target."""
    found = [each for node in nodes for each in ast.walk(node)]
    targets = [each.target for each in found if isinstance(each, ast.AugAssign)]
    names = [*targets, *(each for each in found if not _is_store(each))]
    return frozenset(each.id for each in names if isinstance(each, ast.Name))


def _names(node: ast.AST) -> Names:
    return frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
