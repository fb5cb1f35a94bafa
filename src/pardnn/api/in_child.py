"""Planning in a child process, so that its memory is freed once the plan is there.

Problem: a rank under a memory limit has room for its share and little else, and planning loads
a compiler and its kernels: 80 to 150 MiB that stay, and several hundred where kernels are compiled.
Idea: a fork plans and writes the plan, or the error, to a pipe.

A new process would lack the user's own operators and descriptions, which planning may
need. A fork has them, but none of the threads: so the child calls nothing that waits for one. If
a device's driver would not survive the fork (CUDA), planning stays in the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from pardnn.errors import PardnnError, error_from
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan

_PR_SET_PDEATHSIG = 1


def can_fork(device: str) -> bool:
    """Whether a child can plan for ranks on this device.

    Args:
        device: "cpu" or "cuda".
    """
    return device == "cpu" and sys.platform == "linux"


def plan_in_child(make: Callable[[], Plan]) -> Plan:
    """Return what `make` returns, called in a fork of this process.

    Raises:
        PardnnError: As `make` does.
        RuntimeError: If it raises anything else, or the child ends before it has planned.
    """
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child would write it once more
    from_child, to_parent = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: the threads of this process are not in the child.
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(from_child)
        _answer(make, to_parent, parent)
    os.close(to_parent)
    try:
        with os.fdopen(from_child, "rb") as stream:
            content = stream.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    return _plan_of(content, os.waitstatus_to_exitcode(status))


def _answer(make: Callable[[], Plan], to_parent: int, parent: int) -> NoReturn:
    """Write the plan or the error, and end this process without its parent's clean-up."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be followed
            os._exit(status)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the limit is of the parent's
        content = _content_of(make)
        with os.fdopen(to_parent, "wb") as stream:
            stream.write(content)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _content_of(make: Callable[[], Plan]) -> bytes:
    try:
        return b"P" + plan_to_json(make())
    except PardnnError as error:
        kind, row = b"E", {"code": error.code, "message": error.message, "details": error.details}
    except BaseException as error:
        kind = b"X"
        row = {"text": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return kind + json.dumps(row).encode()


def _plan_of(content: bytes, status: int) -> Plan:
    kind, rest = content[:1], content[1:]
    if kind == b"P" and status == 0:
        return plan_from_json(rest, "the plan of the child process")
    row: dict[str, Any] = json.loads(rest) if kind in (b"E", b"X") and status == 0 else {}
    if kind == b"E" and row:
        raise error_from(**row)
    error = RuntimeError(row.get("text", f"the process that plans ended with status {status}"))
    if "trace" in row:
        error.add_note(row["trace"])
    raise error
