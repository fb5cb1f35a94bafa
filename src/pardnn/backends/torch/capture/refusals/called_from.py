"""The user's own line in errors whose place is a line of an installed package."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType

from pardnn.backends.torch.capture.source_location import LINES, is_internal_frame, shown_path
from pardnn.backends.torch.user_step.code_names import is_library_frame
from pardnn.errors import PardnnError


def with_users_line(error: PardnnError, start: CodeType) -> PardnnError:
    """Return an error that also names the user's line from which a package was called.

    Args:
        error: Its details name the line of a package as "source"; any other is left unchanged.
        start: The code that calls the step.
    """
    place = error.details.get("source")
    caller = None if place is None else _caller(error, str(place), start)
    if caller is None:
        return error
    message = error.message.replace(f" ({place})", f" ({place}, called from {caller})", 1)
    if message == error.message:
        message += f"\nThe step gets there from {caller}."
    message += (
        "\nThat line is a package's. What you can change is the call of it, such as an argument\n"
        "or a setting that leads elsewhere, or your own copy of the function or class, rewritten."
    )
    details = error.details | {"called_from": caller}
    found = type(error)(message, code=error.code, details=details)
    found.__cause__ = error.__cause__
    return found


def _caller(error: BaseException, place: str, start: CodeType) -> str | None:
    """Return the user's last line above the line of a package; None if that is not known."""
    users: str | None = None
    for frame, number in _frames(error, start):
        shown = f"{_path(frame)}:{number % LINES}"
        if not is_library_frame(frame):
            users = shown
        elif shown == place and not is_internal_frame(frame):
            return users
    return None


def _frames(error: BaseException, start: CodeType) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that an error came through below the call of the step, and their lines."""
    is_below = False
    for each in (error, error.__cause__):
        trace: TracebackType | None = None if each is None else each.__traceback__
        while trace is not None:
            if is_below:
                yield trace.tb_frame, trace.tb_lineno
            is_below = is_below or trace.tb_frame.f_code is start
            trace = trace.tb_next


def _path(frame: FrameType) -> str:
    return shown_path(frame.f_code.co_filename, frame.f_globals.get("__name__") or "")
