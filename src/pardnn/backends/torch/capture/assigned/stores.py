"""Where the user's code writes a name: the lines of assignments, deletions and changing calls.

Problem: a step's changes show in its objects only afterwards, when no frame tells which line made
    them.

Idea: the bytecode of the functions that may run says which lines store an attribute, a global, a
variable of a closure or a key that is a literal. An object's name is followed by its last part, as
in `used_names`; of several lines, the first is named.

Complexity: O(instructions of the user's functions), where anything has changed.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator

from pardnn.backends.torch.capture.source_location import shown_path
from pardnn.backends.torch.user_step.code_names import codes_of

_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})
_DELETES = frozenset({"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_METHOD"})
_ITEMS = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
#: Functions that write names which code computes.
_COMPUTED = frozenset({"setattr", "delattr", "vars", "__dict__", "__setattr__"})
#: Methods that change their object.
_CHANGING = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
    "popleft", "remove", "reverse", "rotate", "setdefault", "sort", "update",
})  # fmt: skip


class Stores:
    """The names that functions write, with the lines.

    Args:
        functions: The user's functions that may run in the step.
    """

    def __init__(self, functions: Iterable[types.FunctionType]) -> None:
        self._lines: dict[str, str] = {}
        self._is_open = False
        for function in functions:
            module = function.__module__ or ""
            for code in codes_of(function.__code__):
                self._read(code, module)

    def has(self, name: str) -> bool:
        """Whether the user's code may write a place, named by its path in the step's objects."""
        return self._is_open or self.line(name) is not None

    def line(self, name: str) -> str | None:
        """Return "file.py:line" of the first line that writes this place; None if unknown."""
        parts = [part for part in name.split(".") if not part.isdigit()]
        return next((self._lines[p] for p in reversed(parts) if p in self._lines), None)

    def _read(self, code: types.CodeType, module: str) -> None:
        path = shown_path(code.co_filename, module)
        line = code.co_firstlineno
        before: list[dis.Instruction] = []
        for at in dis.get_instructions(code):
            line = (at.positions.lineno if at.positions else None) or line
            for name in _written(at, before):
                self._lines.setdefault(name, f"{path}:{line}")
            self._is_open |= at.argval in _COMPUTED if isinstance(at.argval, str) else False
            before.append(at)


def _written(at: dis.Instruction, before: list[dis.Instruction]) -> Iterator[str]:
    """Yield the names that an instruction writes, given those before it."""
    last = before[-1] if before else None
    if at.opname in _STORES or at.opname in _DELETES:
        yield at.argval
    elif at.opname in _ITEMS and last is not None:
        container, key = _container_and_key(before)
        if isinstance(key.argval, str):
            yield key.argval
        if container is not None and container.opname in _LOADS:
            yield container.argval
    elif _is_changing_call(at) and last is not None and last.opname in _LOADS:
        yield last.argval


def _container_and_key(
    before: list[dis.Instruction],
) -> tuple[dis.Instruction | None, dis.Instruction]:
    """Return what put the container and the key of an item on the stack before it is written."""
    if before[-1].opname == "SWAP":  # `a[k] += x` first copies both
        copies = [i for i, at in enumerate(before) if at.opname == "COPY" and at.arg == 2]
        before = before[: copies[-2]] if len(copies) > 1 and copies[-2] else before
    before = before[-8:]
    key = before.pop()
    while len(before) > 2 and before[-1].opname == "BINARY_SUBSCR":
        before = before[:-2]  # `a[j][k] = x`: the item and its key
    return before[-1] if before else None, key


def _is_changing_call(at: dis.Instruction) -> bool:
    return at.opname in ("LOAD_ATTR", "LOAD_METHOD") and at.argval in _CHANGING
