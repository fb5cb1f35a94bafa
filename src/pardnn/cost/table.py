"""Measured costs on disk: one file per machine, one entry per call signature.

A number from another machine, another library version or a damaged file must never be used, so
the file names its machine, and every entry carries a checksum over machine, signature and numbers:
an entry that fails it is ignored, said once, and measured again. Writers merge under a lock file
and replace the file as a whole; on systems without file locks the replacement is still atomic, so
the worst outcome is an entry measured twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

from pardnn.errors import FileError, PardnnError, told
from pardnn.files import dump_json, parse_json, read_bytes, write_bytes

FORMAT = "pardnn.costs/1"

#: Seconds to wait for another writer, which holds the lock for milliseconds.
LOCK_SECONDS = 10.0


class CostCacheWarning(UserWarning):
    """A cost file was ignored, whole or in part, and its ops will be measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What measured costs belong to; costs of different machines never mix.

    Attributes:
        device: Name of the processor or GPU, with what else tells two apart.
        library: Name and version of the library that ran the ops.
        threads: That an op may use; 0 for a GPU.
    """

    device: str
    library: str
    threads: int

    @property
    def file_name(self) -> str:
        """Name of the file of this machine's costs."""
        text = json.dumps([FORMAT, self.device, self.library, self.threads])
        return f"costs-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Cost of one call.

    Attributes:
        seconds: Median over the repetitions.
        spread: Half the distance between the quartiles, seconds.
        repetitions: How often it was timed; 0 if it could not be run and was estimated instead.
        workspace: Bytes that the call held beside its outputs; 0 where that cannot be measured.
    """

    seconds: float
    spread: float = 0.0
    repetitions: int = 0
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured costs of one machine.

    Attributes:
        machine: Where they were measured.
        entries: By call signature (`pardnn.cost.call.signature`).
    """

    format: ClassVar[str] = FORMAT

    machine: Machine
    entries: Mapping[str, Entry] = field(default_factory=dict[str, Entry])

    def with_entries(self, entries: Mapping[str, Entry]) -> CostTable:
        """Return the table with these entries added; they win over older ones."""
        return replace(self, entries={**self.entries, **entries})


def cache_folder() -> Path | None:
    """Folder for caches: the first of these that can be written, else None.

    `PARDNN_CACHE`, `XDG_CACHE_HOME/pardnn`, `~/.cache/pardnn`, and a folder in the system's
    temporary one that belongs to this user alone.
    """
    for folder in _candidates():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return _private_temporary()


def _candidates() -> Iterator[Path]:
    named = os.environ.get("PARDNN_CACHE")
    if named:
        yield Path(named)
        return
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():
        yield Path(xdg) / "pardnn"
    with contextlib.suppress(RuntimeError):  # no HOME
        yield Path.home() / ".cache" / "pardnn"


def _private_temporary() -> Path | None:
    """Folder in the temporary one; None if someone else made it, as they could plant numbers."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        folder = Path(tempfile.gettempdir()) / f"pardnn-{user}"
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError:
        return None
    mine = not hasattr(os, "getuid") or (status.st_uid == user and not status.st_mode & 0o022)
    return folder if folder.is_dir() and not folder.is_symlink() and mine else None


def load_table(machine: Machine, folder: Path | None) -> CostTable:
    """Return the costs measured on this machine; none if there is no file or folder.

    Never raises for what a file holds: a damaged or foreign file, or a damaged entry, is ignored
    with one `CostCacheWarning`.
    """
    table, fault = _loaded(machine, folder)
    if folder is not None and fault is not None:
        path = str(folder / machine.file_name)
        text = f"cost cache {path!r}: {fault}; what cannot be used is measured again"
        warnings.warn(text, CostCacheWarning, stacklevel=2)
    return table


def _loaded(machine: Machine, folder: Path | None) -> tuple[CostTable, str | None]:
    """Return the costs of a file, and why some of it, or all, is ignored."""
    path = folder / machine.file_name if folder is not None else None
    if path is None or not path.exists():
        return CostTable(machine), None
    try:
        entries, ignored = _read_entries(machine, path)
    except PardnnError as error:
        return CostTable(machine), f"{error.message.splitlines()[0]:.200}"
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return CostTable(machine), f"{told(error).splitlines()[0]:.200}"
    fault = f"{ignored} of {ignored + len(entries)} entries fail their checksum"
    return CostTable(machine, entries), fault if ignored else None


def _read_entries(machine: Machine, path: Path) -> tuple[dict[str, Entry], int]:
    data = parse_json(read_bytes(path), "the file")
    if data["format"] != FORMAT or data["machine"] != asdict(machine):
        raise FileError("it was written for another machine, library or version", code="E408")
    entries: dict[str, Entry] = {}
    ignored = 0
    for row in data["entries"]:
        entry = _entry(machine, row)
        if entry is None:
            ignored += 1
        else:
            entries[row["signature"]] = entry
    return entries, ignored


def _entry(machine: Machine, row: Any) -> Entry | None:
    """Return the row's entry; None if the row is not exactly what `_row` wrote."""
    try:
        fields = dict(row)
        text, _ = fields.pop("signature"), fields.pop("checksum")
        entry = Entry(**fields)
        valid = _row(machine, text, entry) == row and math.isfinite(entry.seconds)
    except (TypeError, ValueError, KeyError):
        return None
    return entry if valid and entry.seconds >= 0 else None


def _row(machine: Machine, text: str, entry: Entry) -> dict[str, Any]:
    # repr of a float is exact, so equal checksums mean equal numbers.
    content = json.dumps([FORMAT, asdict(machine), text, asdict(entry)], sort_keys=True)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    return {"signature": text, **asdict(entry), "checksum": checksum}


def save_table(table: CostTable, folder: Path | None) -> CostTable:
    """Merge the table into the machine's file; return what the file then holds.

    Entries of other writers are kept; where both have one, this table's wins. What else the file
    holds and cannot be used goes silently: who reads costs is told (`load_table`). Without a
    folder, or where the file cannot be written, the table is returned as it is, with a warning in
    the latter case: costs are worth measuring even where they cannot be kept.
    """
    if folder is None or not table.entries:
        return table
    path = folder / table.machine.file_name
    try:
        with _lock(path.with_suffix(".lock")):
            merged = _loaded(table.machine, folder)[0].with_entries(table.entries)
            rows = [
                _row(table.machine, text, merged.entries[text]) for text in sorted(merged.entries)
            ]
            machine = asdict(table.machine)
            write_bytes(path, dump_json({"format": FORMAT, "machine": machine, "entries": rows}))
    except (FileError, OSError) as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"measured costs are not kept: {reason}", CostCacheWarning, stacklevel=2)
        return table
    return merged


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold the lock file; after `LOCK_SECONDS`, or where there are no locks, go on without.

    The operating system releases the lock of a process that dies.
    """
    if fcntl is None:
        yield
        return
    with path.open("a") as stream:
        end = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        yield
