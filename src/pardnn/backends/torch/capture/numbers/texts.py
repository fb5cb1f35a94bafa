"""Texts of numbers that only a run knows: marks, while a step is traced.

Problem: `print(f"{loss.item():.3f}")` makes a text before the number exists, and code may do
anything with texts: `text.ljust(10)`, `text[:5]`, `text.replace(".", ",")`.

Idea: the text is a mark, which ranks replace by the number's text. In one trace a mark is a
character between spaces, in the other it is long and consists of the characters of numbers; so code
that inspects the text, such as its length, gives different results in the two traces, and is
refused.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.ops.number_texts import text_format

#: Modules of this package that make texts of a step's effects.
_TELLS = (".numbers.effects", ".numbers.texts", ".numbers.user_code")
#: Number 0 in short marks: the first private character beyond the basic plane.
_FIRST, _MAX = 0xF0000, 0x1FFFD
#: What surrounds the number in a long mark.
_BEGIN, _END = "-0.0e+ InfaN \ue000", "\ue001 nAn -E+0.0"
_MARK = re.compile(f"{re.escape(_BEGIN)}([0-9]+){re.escape(_END)}| ([\U000f0000-\U0010fffd]) ")


class Texts:
    """The texts that a traced step makes of numbers.

    Args:
        locator: Finds the user's line.
        record: Copies a tensor, as it is now, for its text.
        is_long: Whether marks are long.
    """

    def __init__(
        self, locator: Locator, record: Callable[[Any], Any], *, is_long: bool = True
    ) -> None:
        # Numbers, their formats, and the lines that made the texts.
        self._made: list[tuple[Any, str, str | None]] = []
        self._told: set[int] = set()
        self._locator, self._record, self._is_long = locator, record, is_long

    def mark(self, number: Any, spec: str) -> str:
        """Return the mark that stands for the text of a number or tensor.

        Args:
            number: A symbol or fake tensor.
            spec: See `format_number`.
        """
        kept = self._record(number) if isinstance(number, torch.Tensor) else number
        self._made.append((kept, spec, self._locator.line()))
        at = len(self._made) - 1
        return f"{_BEGIN}{at}{_END}" if self._is_long or at > _MAX else f" {chr(_FIRST + at)} "

    def pieces(self, text: str) -> Iterator[str | tuple[Any, str]]:
        """Yield the parts of an output text: texts, and numbers with their formats."""
        at = 0
        for found in _MARK.finditer(text):
            index = int(found[1]) if found[1] else ord(found[2]) - _FIRST
            if index < len(self._made):  # else the character is the user's own
                if found.start() > at:
                    yield text[at : found.start()]
                self._told.add(index)
                yield self._made[index][:2]
                at = found.end()
        if at < len(text):
            yield text[at:]

    def drop(self, text: str) -> None:
        """Treat a text that is not output, such as a log record below the level, as output."""
        for _ in self.pieces(text):
            pass

    @property
    def untold(self) -> tuple[str | None] | None:
        """The user's line that made a text which was not output; None if there is none."""
        left = {*range(len(self._made))} - self._told
        return (self._made[min(left)][2],) if left else None


def marks_in(text: str) -> list[str]:
    """Return the marks in a text."""
    return [found[0] for found in _MARK.finditer(text)]


@contextlib.contextmanager
def texts_marked(texts: Texts) -> Iterator[None]:
    """Make marks of symbols and of fake tensors while the context is open.

    Args:
        texts: The texts of the step that runs in it.
    """
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, new: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            patch(kind, "__format__", lambda number, spec: texts.mark(number, spec))
            patch(kind, "__str__", lambda number: texts.mark(number, "str"))
            patch(kind, "__repr__", lambda number: texts.mark(number, "str"))
        real_format = torch.Tensor.__format__

        def formatted(tensor: torch.Tensor, spec: str) -> str:
            is_plain = isinstance(tensor, torch.nn.Parameter) or tensor.dim()
            is_users = isinstance(tensor, FakeTensor) and not _is_own(sys._getframe(1))
            if not is_users or (spec and is_plain):
                return real_format(tensor, spec)
            return str(tensor) if is_plain else format(tensor.item(), spec)

        for kind in (torch.Tensor, torch.nn.Parameter):
            patch(kind, "__repr__", _marking(kind.__repr__, texts))
        patch(torch.Tensor, "__format__", formatted)
        patch(logging.Logger, "isEnabledFor", _dropping(texts, logging.Logger.isEnabledFor))
        yield


def _dropping(texts: Texts, real: Callable[..., bool]) -> Callable[..., bool]:
    """Return what tells whether a logger takes a record; texts of a rejected one are dropped."""

    def is_enabled(logger: logging.Logger, level: int) -> bool:
        is_taken, frame = real(logger, level), sys._getframe(1)
        if not is_taken and frame.f_globals.get("__name__") == "logging":
            for each in (frame.f_locals.get("msg"), *frame.f_locals.get("args", ())):
                texts.drop(str(each) if isinstance(each, str) else "")
        return is_taken

    return is_enabled


def _marking(real: Callable[..., str], texts: Texts) -> Callable[..., str]:
    def of_tensor(tensor: torch.Tensor, **kwargs: Any) -> str:
        if kwargs or not isinstance(tensor, FakeTensor) or _is_own(sys._getframe(1)):
            return real(tensor, **kwargs)
        return texts.mark(tensor, text_format(tensor))

    return of_tensor


def _is_own(frame: Any) -> bool:
    """Whether torch or this package makes a text, other than of what the user prints."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in ("torch", "pardnn") and not name.endswith(_TELLS)
