"""Effects of a step, carried out after it: prints, log records, and checks that raise."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import decode
from pardnn.backends.torch.ops.number_texts import format_number
from pardnn.backends.torch.user_step.places import SEQUENCES
from pardnn.errors import UserCodeError


def tell(effects: Iterable[dict[str, Any]], sinks: Mapping[str, Any]) -> None:
    """Carry out a step's prints, logs and checks in order; every rank calls it after the step.

    Args:
        effects: As `capture.numbers.effects` records them, with this step's numbers.
        sinks: This rank's files and writers to which the step writes, by name; where one is None,
            nothing is written.

    Raises:
        Exception: A check of the step failed: of the class that the step raises, if that is one of
            Python's own; else `UserCodeError`.
    """
    for effect in effects:
        ((kind, content),) = effect.items()
        if kind == "print":
            args, sep, end, file = content
            print(*map(text_of, args), sep=sep, end=end, file=getattr(sys, _stream(file)))
        elif kind == "log":
            _log(*content)
        elif kind in ("check", "no_nan"):
            value, expected, error, message, line = content
            said = message if isinstance(message, str) else text_of(message)
            _check(value, expected, error, said, line)
        elif kind == "tell" and sinks.get(content[0]) is not None:
            _, method, args, kwargs = content
            named = {key: value_of(item) for key, item in kwargs}
            sink = sinks[content[0]]  # a function itself where there is no method
            (getattr(sink, method) if method else sink)(*map(value_of, args), **named)


def _stream(name: str) -> str:
    return "stderr" if name == "stderr" else "stdout"


def text_of(parts: list[Any]) -> str:
    """Return the text made of parts: texts, and numbers with their formats."""
    return "".join(part if isinstance(part, str) else format_number(*part) for part in parts)


def value_of(content: Any) -> Any:
    """Return the value that `content` describes, with tensors and numbers in their places."""
    if not isinstance(content, dict):
        return content
    ((kind, parts),) = content.items()
    if kind == "text":
        return text_of(parts)
    if kind == "value":
        return decode(parts, torch.device("cpu"))
    if kind == "dict":
        return {value_of(key): value_of(item) for key, item in parts}
    return SEQUENCES[kind](map(value_of, parts))


def _log(parts: list[Any], values: list[Any], name: str, level: int, *place: Any) -> None:
    path, line, function, *given = place
    args = tuple(text_of(value) if isinstance(value, list) else value for value in values)
    logger = logging.getLogger(name)
    record = logger.makeRecord(name, level, path, line, text_of(parts), args, None, function)
    vars(record).update((key, value_of(item)) for items in given for key, item in items)
    logger.handle(record)


#: What a check's exception says in addition.
_OVER = (
    "a check raises after its step has ended on all ranks, so the update that follows it has "
    "been made.\nTo skip the update, use a condition: if torch.isfinite(loss): optimizer.step()."
)


def _check(value: bool, expected: bool, kind: str, message: str, line: str | None) -> None:
    if bool(value) == expected:
        return
    error = getattr(builtins, kind, getattr(torch.linalg, kind, None))
    if error is SystemExit:
        print(f"the step exits{f' ({line})' if line else ''}: {message}", file=sys.stderr)
        raise SystemExit(int(message) if message.isdigit() else message)
    if isinstance(error, type) and issubclass(error, Exception):
        raised = error(message)
        raised.add_note(f"pardnn: {_OVER}")
        raise raised
    where = f" ({line})" if line else ""
    raise UserCodeError(f"your step raises{where}: {kind}: {message}\n{_OVER}")
