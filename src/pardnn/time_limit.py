"""The time limit of a search: long work asks whether it has passed, and ends where it has.

One limit holds for all that runs within it, however deep: an inner one cannot outlast it. Nothing
is interrupted: each part of a search asks between two of its steps (`check_time`), so what it
keeps for later stays whole. A compiled kernel asks nothing; those take a second or two for a
million ops, or are given less work (`place.polish`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from time import monotonic

from pardnn.errors import StuckError

#: By the monotonic clock.
_ENDS: ContextVar[float] = ContextVar("ends", default=math.inf)


class OutOfTimeError(StuckError):
    """A search was cut off by its time limit before it found what it looked for (exit 7)."""

    default_code = "E710"


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit what runs within; None leaves the limit that holds already.

    Args:
        seconds: From now on.
    """
    ends = _ENDS.get() if seconds is None else min(_ENDS.get(), monotonic() + seconds)
    token = _ENDS.set(ends)
    try:
        yield
    finally:
        _ENDS.reset(token)


@contextlib.contextmanager
def no_time_limit() -> Iterator[None]:
    """Lift the limit: for the little that must be done when it has passed."""
    token = _ENDS.set(math.inf)
    try:
        yield
    finally:
        _ENDS.reset(token)


def seconds_left() -> float:
    """Return the seconds until the limit; infinite without one, negative once it has passed."""
    return _ENDS.get() - monotonic()


def check_time() -> None:
    """Raise if the limit has passed; takes 0.2 us.

    Raises:
        OutOfTimeError: E710.
    """
    if seconds_left() < 0:
        raise OutOfTimeError("cut off by the time limit.\nGive it more time, or use auto.")
