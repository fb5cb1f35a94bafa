"""The package's exceptions; each says what is wrong, where, the numbers, and what to do next.

Every error that a user can cause is a `PardnnError` with a code. The first digit of the
code is the exit status of the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import traceback
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

#: Exit status of a command that was interrupted.
INTERRUPTED = 130
_LIBRARY = f"{os.sep}site-packages{os.sep}"
_PACKAGE = str(Path(__file__).parent) + os.sep


def shown(name: str) -> str:
    """Quote a name for a message: it is data, and may be long or hold control characters."""
    return repr(name if len(name) <= 120 else name[:117] + "...")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return a text as a terminal, a picture or a page may show it: data must not act on them.

    Control characters, marks that change the direction of writing and all else that shows nothing
    become escapes such as `\x1b`.

    Args:
        text: May be of a file of somebody else's.
        lines: Whether line breaks and tabs stay; in a name they would look like text of ours.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else ascii(c)[1:-1]
        for c in text
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a line that names what a misspelt name is close to; an empty text if nothing is."""
    close = close_names(name, sorted(set(known)), 3)
    return f"\nDid you mean {', '.join(map(shown, close))}?" if close else ""


def close_names(name: str, known: Sequence[str], most: int) -> list[str]:
    """Return names that a misspelt one is close to, large and small letters being the same.

    Those come first of which the name is the end: "h.1" of "model.h.1".

    Args:
        name: The misspelt name.
        known: The names there are; of two that differ in large letters alone, the first counts.
        most: How many are returned.
    """
    ends = [each for each in known if name and each.endswith(f".{name}")]
    lower = {each.lower(): each for each in reversed(known)}
    close = difflib.get_close_matches(name.lower(), lower, n=most)
    return list(dict.fromkeys([*ends, *(lower[each] for each in close)]))[:most]


def without_addresses(text: str) -> str:
    """Leave out memory addresses, which differ from run to run and tell nobody anything."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def told(error: BaseException) -> str:
    """Return the type and text of an error of anybody's, whose `__str__` may raise too."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}"


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error of the user's code, from the first frame of theirs on.

    Without what one of their calls went through in our own frames, and below them in libraries.
    """
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace)
    files = [frame.filename for frame in found.stack]
    ours = [_is_ours(file) for file in files]
    last = max((i for i, file in enumerate(files) if not (ours[i] or _LIBRARY in file)), default=-1)
    end = next((i for i in range(last + 1, len(files)) if ours[i]), len(files))
    found.stack = traceback.StackSummary.from_list(found.stack[:end])
    return "".join(found.format())


def _is_ours(path: str) -> bool:
    return path.startswith((_PACKAGE, "<frozen importlib"))


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends what runs, where an interrupt may only end a search."""


class PardnnError(Exception):
    """Base of all errors meant for users.

    Args:
        message: What is wrong, where, and what to do next. May span lines.
        code: Three digits; the first is the exit status. Defaults to the class's own.
        details: Machine-readable facts for `--json`, JSON types only.
    """

    default_code: ClassVar[str] = "E101"

    def __init__(
        self, message: str, *, code: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        message = printable(message, lines=True)
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.details = details or {}

    @property
    def exit_status(self) -> int:
        """Exit status of the command line for this error."""
        return INTERRUPTED if self.code == "E130" else int(self.code[1])

    def __str__(self) -> str:
        """Return the code and the message, continuation lines indented under the first."""
        return f"{self.code} " + self.message.replace("\n", "\n     ")


class UserCodeError(PardnnError):
    """The user's own code raised; its traceback is kept as `__cause__`."""

    default_code = "E110"


class UsageError(PardnnError):
    """An argument has a value that cannot be used (exit 2)."""

    default_code = "E201"


class InfeasibleError(PardnnError):
    """No plan fits the memory limits (exit 3)."""

    default_code = "E301"


class FileError(PardnnError):
    """A file is missing, corrupt, unwritable, or its content is invalid (exit 4)."""

    default_code = "E401"


class InvalidPlanError(FileError):
    """A plan breaks a rule that `check_plan` verifies (exit 4)."""

    default_code = "E410"


class MismatchError(PardnnError):
    """Two things that must agree do not: plan, graph, world, version (exit 5)."""

    default_code = "E501"


class RankError(PardnnError):
    """A rank failed while running (exit 6)."""

    default_code = "E601"


class StuckError(PardnnError):
    """A wait ran into its time limit (exit 7)."""

    default_code = "E701"


class UnsupportedError(PardnnError):
    """The step or an op in it cannot be captured or run (exit 8)."""

    default_code = "E801"


_BY_STATUS: dict[str, type[PardnnError]] = {
    kind.default_code[1]: kind
    for kind in (
        UsageError, InfeasibleError, FileError, MismatchError, RankError, StuckError,
        UnsupportedError,
    )
}  # fmt: skip


def error_from(code: str, message: str, details: dict[str, Any]) -> PardnnError:
    """Return the error that another process had, of the kind that its exit status tells.

    Args:
        code: Of the error.
        message: Of the error.
        details: Of the error.
    """
    is_users = code == UserCodeError.default_code
    kind = UserCodeError if is_users else _BY_STATUS.get(code[1], PardnnError)
    return kind(message, code=code, details=details)
