"""The functions of one capture that run in normal form, see `normal_form`.

A condition that cannot be followed as written is noted; if it ends a trace, its function is brought
to normal form for the next traces.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from pardnn.backends.torch.capture.choices.branches import (
    Position,
    function_of,
    parsed,
    tested_position,
)
from pardnn.backends.torch.capture.choices.normal_form import (
    END,
    ITEMS,
    NoNormalFormError,
    bring_to_normal_form,
)
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.source_location import LINES, shown_path
from pardnn.errors import PardnnError
from pardnn.gc_pause import frozen_too

_Place = tuple[str, str, int]


class _Form(NamedTuple):
    """The normal form of a function.

    Attributes:
        function: Its tree.
        code: Its code.
        source: The function's own code, from its file as it is now.
    """

    function: ast.FunctionDef
    code: types.CodeType
    source: types.CodeType


class NormalForms:
    """The functions of one capture that run in normal form."""

    def __init__(self) -> None:
        self._forms: dict[_Place, _Form] = {}
        self._asked: dict[_Place, set[Position]] = {}
        self._functions: dict[int, types.FunctionType] = {}  # that run, by id
        self._noted: tuple[types.CodeType, Position] | None = None

    def function_of(self, code: types.CodeType) -> ast.FunctionDef | None:
        """Return the tree of the function that a code object runs; None without its source."""
        form = self._forms.get(_place(code))
        return function_of(code) if form is None else form.function

    def has(self, code: types.CodeType) -> bool:
        """Whether a code object is in normal form, with each statement on its own line."""
        return _place(code) in self._forms

    def note(self, frame: types.FrameType) -> None:
        """Note the condition on which a frame is about to jump, if it cannot be followed."""
        at = tested_position(frame)
        if at is not None:
            self._noted = frame.f_code, (at[0] % LINES, at[1])

    def note_end(self, frame: types.FrameType) -> None:
        """Note that a condition controls the end of a function."""
        self._noted = frame.f_code, END

    def forget(self) -> None:
        """Forget the noted condition: it has been followed, or another trace begins."""
        self._noted = None

    def learn(self, error: BaseException) -> bool:
        """Bring the function whose condition ended the last trace to normal form.

        Args:
            error: The error that ended it.

        Returns:
            Whether there is a form that has not been tried.
        """
        if self._noted is None or not isinstance(error, PardnnError) or error.code != "E802":
            return False
        code, at = self._noted
        place = _place(code)
        asked = self._asked.setdefault(place, set())
        if at in asked:
            return False
        asked.add(at)
        form = _form_of(code, asked)
        if form is None:
            return False
        self._forms[place] = form
        with frozen_too():
            holders = gc.get_referrers(code)
        for each in holders:
            if isinstance(each, types.FunctionType) and each.__code__ is code:
                self._functions[id(each)] = each
        return True

    @contextlib.contextmanager
    def inserted(self, functions: Iterable[types.FunctionType]) -> Iterator[None]:
        """Run functions in normal form while the context is open.

        Args:
            functions: The user's functions that may run.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(builtins, ITEMS, _items, create=True))
            for each in {id(f): f for f in (*functions, *self._functions.values())}.values():
                code = self._code(each.__code__) if self._forms else each.__code__
                if code is not each.__code__:
                    stack.callback(setattr, each, "__code__", each.__code__)
                    each.__code__ = code
            yield

    def _code(self, code: types.CodeType) -> types.CodeType:
        """Return the code that normal forms replace, in it or in its inner functions."""
        form = self._forms.get(_place(code))
        # A file edited since it was loaded has another function.
        found = code if form is None or form.source != code else form.code
        consts = tuple(self._code(x) if _is_code(x) else x for x in found.co_consts)
        is_same = all(a is b for a, b in zip(consts, found.co_consts, strict=True))
        return found if is_same else found.replace(co_consts=consts)


def _form_of(code: types.CodeType, asked: Iterable[Position]) -> _Form | None:
    tree, function = parsed(code)
    if tree is None or function is None:
        return None
    try:
        source = _compiled(tree, code)
        bring_to_normal_form(function, sorted(asked))
        form = _compiled(tree, code)
    except (NoNormalFormError, SyntaxError, ValueError):
        return None
    return None if source is None or form is None else _Form(function, form, source)


def _compiled(tree: ast.Module, code: types.CodeType) -> types.CodeType | None:
    """Compile a function's tree to the code that replaces another."""
    compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    found = (each for each in _codes(compiled) if _place(each) == _place(code))
    return next((each for each in found if each.co_freevars == code.co_freevars), None)


def _items(value: Any) -> Any:
    """Return what a loop goes over that data-dependent code may leave.

    Raises:
        UnsupportedError: E802, if it is an iterator, which the loop would empty.
    """
    if isinstance(value, Iterator):
        frame = sys._getframe(1)
        path = shown_path(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
        line = f"{path}:{frame.f_lineno % LINES}"
        raise unsupported.choice(line, "leaves a loop over an iterator, which would continue")
    return value


def _place(code: types.CodeType) -> _Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _is_code(value: object) -> bool:
    return isinstance(value, types.CodeType)
