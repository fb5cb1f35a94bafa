"""What a step reads from outside: files, folders and the clock.

Problem: the result of `open(path).read()` or `os.path.exists(path)` is a constant of the trace, and
what a step writes into a file that it opens would be written only by capture. `time.time() > end`
has the same outcome in traces that are a second apart.

Idea: the functions that read are replaced while the step is traced. If a repeating step looks at a
file, it is refused, and the error names the file; a first step may, since what it keeps is guarded
in its place. Traces made only for comparison see a clock set to another day and hour: a step that
depends on the time then differs, while one that only measures the time between two of its lines
does not. Traces that are kept see the true time.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import datetime
import functools
import gc
import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from pardnn.backends.torch.capture.numbers.namespaces import replace_globals
from pardnn.backends.torch.user_step.code_names import is_library_frame, names_in

#: Every access to a file by its path goes through one of these, or through C.
_FILES = ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "lstat"),
          (os, "listdir"), (os, "scandir"), (os, "access"), (os, "readlink"), (np, "fromfile"),
          (torch, "from_file"), (os, "remove"), (os, "unlink"), (os, "rename"), (os, "replace"),
          (os, "mkdir"), (os, "rmdir"), (os, "link"), (os, "symlink"), (os, "utime"),
          (os, "chmod"), (os, "truncate"), (os, "chdir"))  # fmt: skip
#: Behind `secrets`, `uuid.uuid4`, `random.SystemRandom` and generators without a seed: what comes
#: out alike in two traces, as a rare event does, would be frozen.
_ENTROPY = "asks the system for random bytes"
#: Other requests to the outside, in words; `requests` and `urllib` connect sockets.
_OTHERS: dict[tuple[Any, str], str] = {
    (os, "system"): "starts a program",
    (subprocess.Popen, "_execute_child"): "starts a program",
    (socket.socket, "connect"): "opens a connection",
    (os, "getloadavg"): "asks for the load of the machine",
    (threading, "active_count"): "counts the threads of the process",
    (os, "urandom"): _ENTROPY,
    (random, "_urandom"): _ENTROPY,
    (random.Random, "seed"): _ENTROPY,  # as `_is_deed` tells
    (os, "read"): "reads from a pipe",
    (os, "write"): "writes to a pipe",
    (os, "kill"): "sends a signal",
    (signal, "raise_signal"): "sends a signal",
    (atexit, "register"): "registers what is done at the exit",
    (builtins, "input"): "asks at the terminal",
    (gc, "disable"): "stops the garbage collector",
    (gc, "enable"): "starts the garbage collector",
    **{(socket.socket, f"recv{way}"): "reads from a socket" for way in ("", "_into", "from")},
    **{(socket.socket, f"send{way}"): "writes to a socket" for way in ("", "all", "to")},
}
#: What Python and torch look up on their own, below the user's line.
_INTERNAL = (
    "pardnn",
    "importlib",
    "_frozen_importlib",
    "linecache",
    "inspect",
    "tokenize",
    "torch",
)
_READS_FOR_USERS = ("torch.serialization", "torch.hub")
_SYSTEM = ("/proc/", "/sys/", "/dev/")
#: Between the clocks of two traces, seconds: 1,157 days, 9 hours and 47 minutes, an odd number.
APART_S = 100_000_007
_CLOCKS = (
    "time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime",
)  # fmt: skip
#: Functions that show a given moment or else the present: its position among the arguments.
_SHOWN_MOMENT = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}


class Look(NamedTuple):
    """A look at a file or folder, or beyond the step's own objects.

    Attributes:
        deed: What the step does: "opens a connection"; empty for a file or folder.
        path: The path of the file or folder, as the step gives it; None for anything else.
        line: "file.py:line" of the user's code; None if unknown.
    """

    deed: str
    path: str | None
    line: str | None


@contextlib.contextmanager
def looks_noted(line: Callable[[], str | None]) -> Iterator[list[Look]]:
    """Note what the user's code looks at outside the process while the context is open.

    Args:
        line: Returns the user's line that runs.
    """
    found: list[Look] = []
    noted = _Noted(found, line)
    with contextlib.ExitStack() as stack:
        for owner, name in _FILES:
            stack.enter_context(
                mock.patch.object(owner, name, noted.calls_of(getattr(owner, name)))
            )
        for (owner, name), deed in _OTHERS.items():
            if not hasattr(owner, name):  # not every system has `getloadavg`
                continue
            new = noted.calls_of(getattr(owner, name), deed)
            stack.enter_context(mock.patch.object(owner, name, new))
        yield found


class _Noted:
    """Notes looks of one thread; finding the caller looks at files, too, and is not noted."""

    def __init__(self, found: list[Look], line: Callable[[], str | None]) -> None:
        self._found, self._line, self._is_noting = found, line, False
        self._thread = threading.get_ident()

    def calls_of(self, real: Callable[..., Any], deed: str = "") -> Callable[..., Any]:
        """Return a function that notes each call of `real`, and makes it.

        Args:
            real: The function.
            deed: What a call of it does; empty if it looks at the file that it is given.
        """

        @functools.wraps(real)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not self._is_noting and threading.get_ident() == self._thread:
                self._is_noting = True
                try:
                    if not deed:
                        self._note(next(iter([*args, *kwargs.values()]), "."))
                    elif _is_deed(deed, args) and _is_of_users(sys._getframe(1)):
                        self._found.append(Look(deed, None, self._line()))
                finally:
                    self._is_noting = False
            return real(*args, **kwargs)

        return noting

    def _note(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file that is already open
        text = os.fsdecode(path)
        if not text.startswith(_SYSTEM) and _is_of_users(sys._getframe(2)):
            self._found.append(Look("", text, self._line()))


def _is_deed(deed: str, args: tuple[Any, ...]) -> bool:
    """Whether a call asks the system for anything: with a seed of its own, it does not."""
    is_seed = deed == _ENTROPY and isinstance(next(iter(args), None), random.Random)
    return not is_seed or args[1:] in ((), (None,))


def _is_of_users(frame: types.FrameType | None) -> bool:
    """Whether the user's code asks, directly or through a library that reads for it."""
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if not is_library_frame(frame):
            return True
        if name.partition(".")[0] in _INTERNAL and name not in _READS_FOR_USERS:
            return False
        frame = frame.f_back
    return False


@contextlib.contextmanager
def clock_set(number: int, functions: Collection[types.FunctionType]) -> Iterator[None]:
    """Show the user's code a different time in each trace while the context is open.

    Args:
        number: The number of the trace; 0 for the true time.
        functions: The user's, which may have imported a clock by its name.
    """
    with contextlib.ExitStack() as stack:
        clocks = list(_shifted_clocks(number * APART_S))
        shifted = {id(getattr(owner, name)): new for owner, name, new in clocks}
        for owner, name, new in clocks:
            stack.enter_context(mock.patch.object(owner, name, new))
        for function in functions:
            if "datetime64" in names_in(function.__code__):
                new = _later_numpy_dates(number * APART_S, _asked_by_user())
                stack.enter_context(mock.patch.object(np, "datetime64", new))
        replace_globals(stack, functions, shifted)
        yield


def _shifted_clocks(by_s: int) -> Iterator[tuple[types.ModuleType, str, Any]]:
    """Yield clocks, by module and name, with replacements that are `by_s` seconds later."""
    is_asked = _asked_by_user()
    for name in filter(functools.partial(hasattr, time), _CLOCKS):  # not all systems have all
        yield time, name, _later(getattr(time, name), by_s, is_asked)
        yield time, f"{name}_ns", _later(getattr(time, f"{name}_ns"), by_s * 10**9, is_asked)
    for name, position in _SHOWN_MOMENT.items():
        yield time, name, _showing(getattr(time, name), position, by_s, is_asked)
    for real in (datetime.datetime, datetime.date):
        yield datetime, real.__name__, _later_dates(real, by_s, is_asked)


def _asked_by_user() -> Callable[[], bool]:
    """Return a function that says whether the caller of its caller is the user's code."""
    thread = threading.get_ident()

    def is_asked() -> bool:
        is_library = is_library_frame(sys._getframe(2))
        return threading.get_ident() == thread and not is_library

    return is_asked


def _later(real: Callable[..., Any], by: Any, is_asked: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(real)
    def later(*args: Any) -> Any:
        return real(*args) + by if is_asked() else real(*args)

    return later


def _showing(
    real: Callable[..., Any], position: int, by_s: int, is_asked: Callable[[], bool]
) -> Callable[..., Any]:
    now, as_tuple = time.time, real.__name__ in ("asctime", "strftime")
    local = time.localtime

    @functools.wraps(real)
    def showing(*args: Any) -> Any:
        is_now = len(args) == position or (args == (None,) and not as_tuple)
        if is_now and is_asked():
            moment = now() + by_s
            args = (*args[:position], local(moment) if as_tuple else moment)
        return real(*args)

    return showing


def _later_dates(real: type[Any], by_s: int, is_asked: Callable[[], bool]) -> type[Any]:
    """Return a stand-in for the class `real` whose present is later; it makes `real` objects."""

    class Stand(type(real)):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type[Any]) -> bool:
            return issubclass(subclass, real)

        def __getattribute__(cls, name: str) -> Any:
            member = getattr(real, name)
            if name not in ("now", "utcnow", "today"):
                return member

            def later(*args: Any, **kwargs: Any) -> Any:
                moment = member(*args, **kwargs)
                return moment + datetime.timedelta(seconds=by_s) if is_asked() else moment

            return later

    return Stand(real.__name__, (real,), {})


def _later_numpy_dates(by_s: int, is_asked: Callable[[], bool]) -> type[Any]:
    """Return a stand-in for `numpy.datetime64` with a later "now" and "today"."""
    real = np.datetime64

    class Stand(type):
        def __call__(cls, *args: Any) -> Any:
            made = real(*args)
            if str(next(iter(args), "")) not in ("now", "today") or not is_asked():
                return made
            return (made + np.timedelta64(by_s, "s")).astype(made.dtype)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __getattribute__(cls, name: str) -> Any:
            return getattr(real, name)

    return Stand("datetime64", (), {})
