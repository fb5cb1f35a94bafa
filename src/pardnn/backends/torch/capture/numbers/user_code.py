"""Functions that the user's code calls on symbols, made to work while a step is traced.

Problem: `float(loss)` and `"%.3f" % loss.item()` are computed in C, which needs the number itself.

Idea: while a step is traced, the user's functions run with other constants and names: a text with a
"%" belongs to a class that makes marks (`texts`), and calls of `float`, `int` and `bool` go to
functions that accept a tensor as its number, and a symbol as one of the requested type. So does
`x.__class__`, which cannot be replaced on a class. Nothing else of the code changes, neither its
length nor its lines. Other values go to Python's own functions; so do symbols of which a text is
made, except those that only a run knows.

Complexity: O(code of the user's functions), once for each.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import logging
import math
import opcode
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.numbers.containers import is_told
from pardnn.backends.torch.capture.numbers.python_calls import class_of
from pardnn.backends.torch.capture.numbers.texts import Texts
from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.backends.torch.ops.host_scalars import choose, node_of
from pardnn.backends.torch.ops.number_texts import PERCENT
from pardnn.backends.torch.user_step.code_names import is_library_file
from pardnn.errors import shown

#: One conversion of `%`: its flags, width and precision, and its type.
_SPEC = re.compile(r"%(?:\(([^)]*)\))?([#0\- +]*)(\d+|\*)?(?:\.(\d+|\*))?([hlL]?)([a-zA-Z%])")
#: Replacements of Python's own functions, by name.
_PREFIX = "_pardnn_"


@contextlib.contextmanager
def conversions_followed(functions: Iterable[types.FunctionType], texts: Texts) -> Iterator[None]:
    """Run the user's functions with other constants and names while the context is open.

    Args:
        functions: Those that may run.
        texts: Makes marks of numbers.
    """
    changed = {
        id(each): (each, code, _followed(code, code.co_filename, has_own=has_own))
        for each in functions
        for code in [each.__code__]
        for has_own in [not _CALLED.keys().isdisjoint(each.__globals__)]
    }
    with contextlib.ExitStack() as stack:
        for name, call in _CALLED.items():
            named = mock.patch.object(builtins, _PREFIX + name, call, create=True)
            stack.enter_context(named)
        _Percent.texts.append(texts)
        stack.callback(_Percent.texts.pop)
        for function, real, code in changed.values():
            if code is not real:
                stack.callback(setattr, function, "__code__", real)
                function.__code__ = code
        yield


@functools.lru_cache(1024)
def _followed(code: types.CodeType, _file: str, *, has_own: bool) -> types.CodeType:
    """Return code with other constants and names; the same object if nothing is to change.

    The code of two files may be equal.

    Args:
        code: Code of the user's.
        has_own: Whether one of `_CALLED` is a global of its module, so that its calls stay.
    """
    consts = [_constant(value, has_own=has_own) for value in code.co_consts]
    names, content = [*code.co_names], bytearray(code.co_code)
    is_same = all(a is b for a, b in zip(consts, code.co_consts, strict=True))
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval == "__class__":
            consts += [] if consts[-1:] == [_CLASS_OF] else [_CLASS_OF]
            _ask_class(content, each, len(consts) - 1)
        if has_own:
            continue
        # A name to be called is loaded together with a place for `self`.
        if each.opname != "LOAD_GLOBAL" or not (each.arg or 0) & 1 or each.argval not in _CALLED:
            continue
        other = _PREFIX + each.argval
        names += [] if other in names else [other]
        argument = names.index(other) << 1 | 1
        if argument < 256:
            content[each.offset + 1] = argument
    if is_same and bytes(content) == code.co_code:
        return code
    return code.replace(
        co_consts=tuple(consts), co_names=tuple(names), co_code=bytes(content),
        co_stacksize=code.co_stacksize + 1,
    )  # fmt: skip


def _ask_class(content: bytearray, at: dis.Instruction, const: int) -> None:
    """Put `_CLASS_OF >> x` in place of `x.__class__`, which is as long or longer.

    Args:
        content: The bytes of the code.
        at: The instruction that loads the attribute.
        const: Index of `_CLASS_OF`.
    """
    begin = at.offset
    if begin and content[begin - 2] == dis.EXTENDED_ARG:
        content[begin - 2 : begin] = bytes([_OP["NOP"], 0])
    words = [
        dis.EXTENDED_ARG, const >> 8, _OP["LOAD_CONST"], const & 255,
        _OP["SWAP"], 2, _OP["BINARY_OP"], _SHIFT, _OP["CACHE"], 0,
    ]  # fmt: skip
    if _is_called(at):  # a place for `self` belongs to it
        words += [_OP["PUSH_NULL"], 0, _OP["SWAP"], 2]
    content[begin : begin + len(words)] = bytes(words)
    for i in range(begin + len(words), len(content), 2):
        if content[i] != _OP["CACHE"]:
            break
        content[i] = _OP["NOP"]


def _is_called(at: dis.Instruction) -> bool:
    has_flag = at.opname == "LOAD_ATTR" and sys.version_info >= (3, 12)
    return at.opname == "LOAD_METHOD" or (has_flag and bool((at.arg or 0) & 1))


def _constant(value: Any, *, has_own: bool) -> Any:
    if isinstance(value, types.CodeType):
        return _followed(value, value.co_filename, has_own=has_own)
    return _Percent(value) if type(value) is str and _SPEC.search(value) else value


class _ClassOf:
    """Returns the class of a value as an eager step sees it: `_CLASS_OF >> value`."""

    def __rshift__(self, value: Any) -> Any:
        """Return a value's `__class__`."""
        return class_of(value) if _is_symbol(value) else value.__class__


_CLASS_OF = _ClassOf()
_OP = dis.opmap
#: The argument of `BINARY_OP` for `>>`.
_SHIFT = next(i for i, (_, sign) in enumerate(opcode._nb_ops) if sign == ">>")  # type: ignore[attr-defined]


class _Percent(str):
    """A text in the user's code: `%` makes a mark of each number that only a run knows."""

    __slots__ = ()
    #: The texts of the running traces.
    texts: list[Texts] = []  # noqa: RUF012

    def __mod__(self, value: Any) -> str:
        """Return the text with values for its conversions."""
        given = list(value.values() if isinstance(value, dict) else _as_tuple(value))
        if not any(map(_is_data, given)):
            return str.__mod__(self, value)
        rest, made, at, key = iter(_as_tuple(value)), [], 0, None
        for found in _SPEC.finditer(self):
            made.append(self[at : found.start()])
            at = found.end()
            key, flags, width, precision, _, kind = found.groups()
            if kind == "%":
                made.append("%")
                continue
            sizes = [next(rest) if each == "*" else each for each in (width, precision)]
            item = next(rest) if key is None else value[key]
            after = "" if sizes[1] is None else f".{sizes[1]}"
            spec = f"%{flags}{'' if sizes[0] is None else sizes[0]}{after}{kind}"
            made.append(self._text(item, spec))
        if key is None and next(rest, None) is not None:
            raise TypeError("not all arguments converted during string formatting")
        return "".join([*made, self[at:]])

    def _text(self, item: Any, spec: str) -> str:
        if not _is_data(item) or (isinstance(item, torch.Tensor) and item.dim()):
            return str.__mod__(spec, (item,))
        if spec[-1] in "sra":
            text = str(item)
            return text if len(spec) == 2 else str.__mod__(spec, (text,))
        return self.texts[-1].mark(_number(item), PERCENT + spec)


def message_and_args(record: logging.LogRecord) -> tuple[Any, tuple[Any, ...]]:
    """Return the message and the arguments of a log record.

    Arguments are texts and numbers that JSON has. If there are others (infinity, NumPy numbers),
    the message is formatted with all of them: "%.3f" does not accept a number as text.
    """
    message, args = record.msg, record.args
    if not isinstance(message, str) or not args:
        return record.getMessage(), ()
    if isinstance(args, tuple):
        kinds = [found[6] for found in _SPEC.finditer(message) if found[6] != "%"]
        if len(kinds) == len(args):
            args = tuple(map(_argument, args, kinds))
        if all(map(_is_loggable, args)):
            return message, args
    try:
        return _Percent(message) % args, ()
    except (TypeError, ValueError, LookupError, StopIteration):
        return f"a log record with a format that is wrong: {str.__str__(message)}", ()


#: Attributes that every record has.
_OF_RECORDS = frozenset(vars(logging.makeLogRecord({})))


def given_attributes(record: logging.LogRecord, where: str | None) -> dict[str, Any]:
    """Return what a log record has besides its message: `extra=`, an exception, a stack.

    Args:
        record: The record that the step makes.
        where: "file.py:line" of it; None if unknown.

    Raises:
        UnsupportedError: E802, for values that cannot be logged after the step.
    """
    given = {key: each for key, each in vars(record).items() if key not in _OF_RECORDS}
    if record.exc_info:
        given["exc_text"] = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        given["stack_info"] = _users_stack(record.stack_info)
    for key, each in given.items():
        if not is_told(each):
            raise error_at(
                where,
                f"the step logs a record{at(where)} with an object of class "
                f"{shown(type(each).__name__)} as {shown(key)}:\n"
                "each rank logs after the step, and is given numbers, texts and tensors.\n"
                "Give its text (extra={'who': str(who)}).",
                "E802",
            )
    return given


def _users_stack(text: str) -> str:
    """Return a call stack without library frames, which differ under capture."""
    title, *calls = re.split(r'^(?=  File ")', text, flags=re.MULTILINE)
    return title + "".join(each for each in calls if not is_library_file(each.split('"')[1]))


def _argument(arg: Any, kind: str) -> Any:
    """Return a logger's argument as its conversion sees it: a tensor as its number or text."""
    if _is_loggable(arg) or kind in "ra":
        return arg
    if kind == "s":
        return str(arg)
    return _number(arg) if isinstance(arg, FakeTensor) and not arg.dim() else arg


def _is_loggable(arg: Any) -> bool:
    is_finite = isinstance(arg, float) and math.isfinite(arg)
    return is_finite or isinstance(arg, str | int) or node_of(arg) is not None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_data(value: Any) -> bool:
    """Whether only a run knows a value: a number of the graph, or a tensor during tracing."""
    node = node_of(value)
    return isinstance(value, FakeTensor) if node is None else node.hint is None


def _is_symbol(value: Any) -> bool:
    return isinstance(value, FakeTensor) or node_of(value) is not None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _float(*args: Any) -> Any:
    if len(args) != 1 or not _is_symbol(args[0]):
        return float(*args)
    number = _number(args[0])
    if isinstance(number, torch.SymBool):
        return choose(number, 1.0, 0.0)
    return torch.sym_float(number)


def _int(*args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not _is_symbol(args[0]):
        return int(*args, **kwargs)
    number = _number(args[0])
    if isinstance(number, torch.SymBool):
        return choose(number, 1, 0)
    return math.trunc(number) if isinstance(number, torch.SymFloat) else number


def _bool(*args: Any) -> Any:
    value = args[0] if len(args) == 1 else None
    if not _is_data(value) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return bool(*args)
    number = _number(value)
    return number if isinstance(number, torch.SymBool) else number != 0


def _getattr(value: Any, name: Any, *default: Any) -> Any:
    if isinstance(name, str) and name == "__class__" and _is_symbol(value):
        return class_of(value)
    return getattr(value, name, *default)


_CALLED = {"float": _float, "int": _int, "bool": _bool, "getattr": _getattr}
