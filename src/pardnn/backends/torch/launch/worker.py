"""A process of `pardnn run`: one rank, or the reference, with its guards.

`python -m pardnn.backends.torch.launch.worker DIRECTORY [--reference]`, started by the launcher.
The guards are set up before the framework is loaded, which takes seconds and may fail: the process
ends with its launcher, has a moment to report when it is told to end, and writes every error into
its result file, including those of imports. So the code that it runs is imported late and by name,
and the reference loads nothing that only ranks need.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from pardnn.backends.torch.launch.job import (
    NO_OPEN_FILES,
    REFERENCE,
    UNWRITTEN,
    Job,
    read_job,
    stack_path,
    write_pid,
    write_result,
    write_stage,
)
from pardnn.errors import PardnnError, UserCodeError, told, users_traceback
from pardnn.shortage import shortage

#: How long a process told to end may take to notice and report a failure, seconds.
REPORT_S = 2.5
_ROOM = "pardnn.backends.torch.launch"
_PR_SET_PDEATHSIG = 1
#: Sockets that must stay open although no code here writes to them.
_KEPT: list[socket.socket] = []


def _end_with_parent(parent: int) -> None:
    """Ask the system to end this process when the launcher ends (Linux)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _ignore(_number: int, _frame: Any) -> None:
    """Do nothing: the thread that reads the wake-up bytes ends the process."""


def _delay_sigterm(stack: Path) -> None:
    """End `REPORT_S` after SIGTERM, so that this process can report why it failed.

    Args:
        stack: File that then gets the stacks of its threads.

    The launcher ends all ranks as soon as one has died, which the others are about to notice. A
    thread waits for the signal because the main one may be deep inside a wait or an op.
    """
    woken, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore)

    def end() -> None:
        while signal.SIGTERM not in woken.recv(1):
            pass
        with contextlib.suppress(OSError), stack.open("w") as stream:
            faulthandler.dump_traceback(stream)
        time.sleep(REPORT_S)
        os._exit(128 + signal.SIGTERM)

    _KEPT.append(signalled)
    threading.Thread(target=end, name="pardnn-end", daemon=True).start()


def _run(directory: Path, job: Job, rank: int | str) -> dict[str, Any]:
    if rank == REFERENCE:
        return importlib.import_module(f"{_ROOM}.reference").run_reference(job, directory)
    return importlib.import_module(f"{_ROOM}.rank").run_rank(directory, job, rank)


def _error(error: BaseException, rank: int | str) -> dict[str, Any]:
    """Return an error as JSON; the traceback is the user's or the op's, if there is one."""
    cause = error.__cause__ or error
    is_users = isinstance(error, UserCodeError)
    text = users_traceback(cause) if is_users else "".join(traceback.format_exception(cause))
    if isinstance(error, PardnnError):
        details = {"rank": rank, **error.details}
        found = {"code": error.code, "message": error.message, "details": details}
    elif isinstance(error, Exception) and (short := shortage(error)) is not None:
        details = {"rank": rank, "first_failing_rank": rank}
        found = {"code": short.code, "message": f"rank {rank}: {short.message}", "details": details}
    elif isinstance(error, KeyboardInterrupt):
        message = f"rank {rank} was interrupted by SIGINT, sent to it and not to the run"
        details = {"rank": rank, "first_failing_rank": rank}
        found = {"code": "E602", "message": message, "details": details}
    else:
        message = f"internal error in rank {rank}: {told(error)}"
        details = {"rank": rank, "first_failing_rank": rank}
        found = {"code": "E101", "message": message, "details": details}
    return {**found, "traceback": text[-8000:]}


def main(directory: Path, rank: int | str) -> int:
    """Run a rank or the reference, write its result file, and return the exit status.

    Args:
        directory: The directory of the run.
        rank: This rank, or `REFERENCE`.
    """
    try:
        job = read_job(directory)
        write_pid(directory, rank)
    except FileNotFoundError:  # the launcher was killed and its folder is gone, so nobody listens
        return UNWRITTEN
    except OSError as error:
        print(f"rank {rank} cannot use the folder of its run: {error}", file=sys.stderr)
        return _unwritten(error)
    _end_with_parent(job.parent)
    _delay_sigterm(stack_path(directory, rank))
    # A shell starts background scripts with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write_stage(directory, rank, "loading the framework")
    # Standard output belongs to the command's own result.
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(job.threads)
    try:
        result = _run(directory, job, rank)
    except BaseException as error:
        result = {"error": _error(error, rank)}
    return _written(directory, rank, result)


def _written(directory: Path, rank: int | str, result: dict[str, Any]) -> int:
    """Write a result; only the exit status returned tells if it could not be written."""
    try:
        write_result(directory, rank, result)
    except OSError as error:
        text = f"rank {rank} cannot write its result: {error}"
        print(text, file=sys.stderr, flush=True)
        return _unwritten(error)
    return int(result["error"]["code"][1]) if "error" in result else 0


def _unwritten(error: OSError) -> int:
    return NO_OPEN_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else UNWRITTEN


if __name__ == "__main__":
    _rank = REFERENCE if "--reference" in sys.argv else int(os.environ.get("RANK", "0"))
    _status = main(Path(sys.argv[1]), _rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that still wait for a failed peer must not keep the process alive.
    os._exit(_status)
