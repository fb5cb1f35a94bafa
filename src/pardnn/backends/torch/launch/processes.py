"""The rank processes of a run on this machine: they are started, watched, and never left behind.

They meet in the run's private folder, so nothing listens on a network: the store is a file
(`STORE_FILE`), and gloo and NCCL are told to use the loopback interface. torchrun's rendezvous,
which this replaces, listens on every interface and unpickles what it receives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pardnn.backends.large_pages import LARGE_PAGES
from pardnn.backends.torch.comm.flight_record import VARIABLE as RECORDS_VARIABLE
from pardnn.backends.torch.comm.nodes import loopback_environment
from pardnn.backends.torch.comm.secret import VARIABLE as SECRET_VARIABLE
from pardnn.backends.torch.comm.secret import make_secret
from pardnn.backends.torch.comm.stop_signal import SIGNALS
from pardnn.backends.torch.launch.job import (
    SIGNAL_FILE,
    Job,
    read_pid,
    read_progress,
    read_result,
    write_result,
    write_whole,
)

WORKER = "pardnn.backends.torch.launch.worker"
#: How long ranks may take to end, after one has failed or they are told to, before they are killed.
#: torch waits 30 s for a stopped one, which cannot heed SIGTERM.
SHUTDOWN_S = 4
_WATCH_S = 0.25
#: A run reads from here, when it starts, which signals end it at once.
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def run_processes(
    directory: Path,
    job: Job,
    records: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Mapping[int, ProcessFailure]:
    """Run all ranks to their end; return how failed ranks ended, by rank.

    Args:
        directory: The directory of the run.
        job: What to do.
        records: Folder of their flight records; None lets ranks choose one.
        progress: Called with what happens next, in a few words.

    Raises:
        KeyboardInterrupt: If a signal ended the run.
    """
    num_ranks = len(job.limits)
    shared = loopback_environment() | {SECRET_VARIABLE: make_secret()}
    shared[LARGE_PAGES] = os.environ.get(LARGE_PAGES, "1")
    if records is not None:
        shared |= {RECORDS_VARIABLE: str(records)}
    environments = {
        rank: shared | {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        for rank in range(num_ranks)
    }  # fmt: skip
    commands = dict.fromkeys(range(num_ranks), ("-m", WORKER, str(directory)))
    logs = DefaultLogsSpecs(log_dir=str(directory / "logs"))
    with _quiet_launcher(job), contextlib.ExitStack() as stack:
        if job.on_signal is not None:
            _heed(directory)
        try:
            stack.enter_context(_none_left(directory, job))
            ranks = start_processes("pardnn", sys.executable, commands, environments, logs)
            stack.callback(_close, ranks)
            done, told = ranks.wait(timeout=0.5, period=0.1), None
            while done is None:
                told, before = read_progress(directory), told
                if told is not None and told != before:
                    progress(told)
                done = ranks.wait(timeout=0.5, period=0.1)
        except SignalException as error:
            raise KeyboardInterrupt from error
    return done.failures


def _close(ranks: PContext) -> None:
    """End the ranks that still run."""
    ranks.close(signal.SIGTERM, timeout=SHUTDOWN_S)


def _heed(directory: Path) -> None:
    """Let the ranks handle SIGTERM and SIGINT; a second one interrupts."""
    marker = directory / SIGNAL_FILE

    def heed(number: int, _frame: FrameType | None) -> None:
        write_whole(marker, signal.Signals(number).name)
        for each in SIGNALS:
            signal.signal(each, interrupt)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for each in SIGNALS:
        signal.signal(each, heed)


@contextmanager
def _quiet_launcher(job: Job) -> Iterator[None]:
    """Silence torch's own failure report, and restore our signal handlers."""
    logger = logging.getLogger("torch.distributed.elastic")
    level, before = logger.level, os.environ.get(_SIGNALS_VARIABLE)
    logger.setLevel(logging.CRITICAL)
    os.environ[_SIGNALS_VARIABLE] = "SIGHUP,SIGQUIT" + ("" if job.on_signal else ",SIGTERM,SIGINT")
    ending = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in ending}
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop(_SIGNALS_VARIABLE)
        if before is not None:
            os.environ[_SIGNALS_VARIABLE] = before
        for number, handler in handlers.items():
            try:
                signal.signal(number, handler)
            except ValueError:  # not in the main thread, so they are unchanged
                break


@contextmanager
def _none_left(directory: Path, job: Job) -> Iterator[None]:
    """Kill ranks that still run `SHUTDOWN_S` after the first one has written an error.

    A process that is stopped (SIGSTOP) is then killed at once. Before that, it may hold the lock of
    the store's file, so that no other rank can even report its wait: it gets the timeout of a
    message plus the time that ranks have to end.
    """
    done, num_ranks = threading.Event(), len(job.limits)

    def watch() -> None:
        most_s = job.timeout_s + SHUTDOWN_S
        if _is_error_seen(directory, num_ranks, most_s, done):
            _kill_the_rest(directory, num_ranks, done)

    watcher = threading.Thread(target=watch, name="pardnn-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _is_error_seen(directory: Path, num_ranks: int, most_s: float, done: threading.Event) -> bool:
    """Wait until a rank has written an error, or the run has ended; return which.

    Args:
        directory: The directory of the run.
        num_ranks: The number of ranks of the run.
        most_s: The time, seconds, after which a stopped rank gets an error.
        done: Set at the end of the run.
    """
    since: dict[int, float] = {}
    while not any("error" in (read_result(directory, r) or {}) for r in range(num_ranks)):
        for rank in range(num_ranks):
            if _state(read_pid(directory, rank)) != "T":
                since.pop(rank, None)
            elif _waited(since, rank) > most_s:
                _blame_stopped(directory, rank, _waited(since, rank))
        if done.wait(_WATCH_S):
            return False
    return True


def _kill_the_rest(directory: Path, num_ranks: int, done: threading.Event) -> None:
    """Kill what still runs after a while, and at once what is stopped and cannot heed SIGTERM."""
    killed_at = time.monotonic() + SHUTDOWN_S
    while time.monotonic() < killed_at:
        for rank in range(num_ranks):
            if _state(read_pid(directory, rank)) == "T":
                _kill_child(read_pid(directory, rank))
        if done.wait(_WATCH_S):
            return
    for rank in range(num_ranks):
        _kill_child(read_pid(directory, rank))


def _waited(since: dict[int, float], rank: int) -> float:
    return time.monotonic() - since.setdefault(rank, time.monotonic())


def _blame_stopped(directory: Path, rank: int, seconds: float) -> None:
    """Write the error that a stopped rank cannot write itself, and end it."""
    message = (
        f"rank {rank} was stopped by a signal (SIGSTOP) and did not continue for {seconds:.0f} s"
    )
    details = {"rank": rank, "first_failing_rank": rank}
    found = {"error": {"code": "E702", "message": message, "details": details}}
    write_result(directory, rank, found)
    _kill_child(read_pid(directory, rank))


def _stat(pid: int | None) -> list[str]:
    """Return the state and parent of a process; nothing without one, or without Linux."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[:2]
    return []


def _state(pid: int | None) -> str:
    return _stat(pid)[0] if pid is not None and _stat(pid) else ""


def _kill_child(pid: int | None) -> None:
    """Kill a process if it is a child of this one: by now, its id may be another's."""
    found = _stat(pid)
    if pid is not None and found and int(found[1]) == os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
