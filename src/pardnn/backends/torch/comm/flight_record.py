"""The flight record: what each rank did last, on disk after a run that ended badly.

Problem: a rank that hangs or was killed cannot say what it was doing.
Idea: each rank keeps one short text file in a folder of its run. The thread that looks for failures
rewrites it once a second, which takes a millisecond, so the record of a killed rank is at most a
second old. A run that ends well removes its folder; of the others, the newest `KEPT` of this user
stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from pardnn.errors import PardnnError

#: Prefix of the folders' names, below the system's temporary folder.
PREFIX = "pardnn-flight-"
#: Variable that tells the folder to the ranks that a launcher starts.
VARIABLE = "PARDNN_FLIGHT_FOLDER"
KEPT = 10
#: How often a record is written while nothing is wrong, seconds.
EVERY_S = 1.0
MAX_CHARACTERS = 1 << 16
_MAX_FRAMES = 40
#: Weights of records: what a rank does, or did when one failed, with or without an own error.
RUNNING, FAILED, WITH_ERROR, _REMOVED = range(4)


def make_folder() -> Path | None:
    """Make a folder for the records of a run, private to this user; None if that fails."""
    with contextlib.suppress(OSError):
        for folder in _own_folders()[KEPT - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    return None


def _own_folders() -> list[Path]:
    """Return this user's folders of records, those written last first."""
    found: list[tuple[float, Path]] = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid():
                found.append((status.st_mtime, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def folder_named(name: str) -> Path | None:
    """Return the folder of this name that another rank has made; None if there is none.

    Args:
        name: A name from the store, which may be open to others: it only leads to a folder of
            records of this user.
    """
    return next((folder for folder in _own_folders() if folder.name == name), None)


def main_stack() -> list[str]:
    """Return the stack of the main thread, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return []
    return "".join(traceback.format_stack(frame)[-_MAX_FRAMES:]).splitlines()


def add_line(error: PardnnError, folder: Path) -> None:
    """Name the folder of records in an error, once; on a separate line for the first failure."""
    if "flight_record" in error.details:
        return
    error.details["flight_record"] = str(folder)
    if "report" not in error.details:  # otherwise a rank reports just one line
        error.message += f"\nFlight record, what each rank did last: {folder}"
        error.args = (error.message,)


class FlightRecord:
    """One rank's record.

    Args:
        folder: The folder of the run.
        rank: The rank that keeps it.
        pid: Its process id; None takes this process's.
    """

    def __init__(self, folder: Path, rank: int, pid: int | None = None) -> None:
        self.folder = folder
        self._rank, self._pid = rank, pid or os.getpid()
        self._path = folder / f"rank-{rank}.txt"
        self._lock = threading.Lock()
        self._weight = 0
        self._written = -EVERY_S

    @property
    def is_due(self) -> bool:
        """Whether the record is due to be written again."""
        return time.monotonic() - self._written >= EVERY_S

    def write(self, lines: Iterable[str], *, weight: int = 0) -> None:
        """Replace the record if it can be written.

        Args:
            lines: What the rank does.
            weight: The record's weight; no record of less weight replaces it.
        """
        with self._lock:
            if weight < self._weight:
                return
            self._weight, self._written = weight, time.monotonic()
            temporary = self._path.with_suffix(".tmp")
            with contextlib.suppress(OSError):
                temporary.write_text(self._text(lines), encoding="utf-8", errors="replace")
                temporary.replace(self._path)

    def _text(self, lines: Iterable[str]) -> str:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"rank {self._rank}, process {self._pid}, at {now}"
        return "\n".join([head, *_printable(lines)])[:MAX_CHARACTERS] + "\n"

    def remove(self) -> None:
        """Remove the record, and with the last record the folder."""
        with self._lock, contextlib.suppress(OSError):
            self._weight = _REMOVED
            self._path.unlink(missing_ok=True)
            self.folder.rmdir()


def _printable(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines without control characters, since names in them are data."""
    for line in lines:
        yield "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
