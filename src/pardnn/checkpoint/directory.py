"""The directory of a run's checkpoints, and the commit protocol.

    runs/a/latest                          the name of a step's directory
    runs/a/step-00000012/manifest.json     present in every committed directory
    runs/a/step-00000012/rank-00000.safetensors ...
    runs/a/step-00000015.tmp-3f9a12/...    being written, or left over from a run that was killed

Protocol: reserve a temporary directory; every rank writes its file into it and syncs; when all
have, one rank writes the manifest, syncs, renames the directory, syncs the parent, moves `latest`
and only then removes old steps. Renaming is the commit: before it the step does not exist, after
it the step is complete. So a kill at any moment leaves the last good step, and `latest` names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pardnn import files
from pardnn.checkpoint import disk
from pardnn.checkpoint.manifest import Manifest, manifest_from_json, manifest_to_json
from pardnn.errors import FileError, MismatchError, UsageError, shown

MANIFEST, LATEST, LOCK = "manifest.json", "latest", ".lock"
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
_TEMPORARY = re.compile(r"(?:step-[0-9]{8,18}(?:\.[0-9]{1,9})?|latest)\.tmp-[0-9a-f]{12}")


class Committed(NamedTuple):
    """A step's directory that was committed.

    Attributes:
        time_ns: When its manifest was written.
        step: Steps that were trained.
        version: 1 for the first that was written of that step.
        path: Of the directory.
    """

    time_ns: int
    step: int
    version: int
    path: Path


@dataclass(frozen=True)
class Reservation:
    """A step's directory that is being written.

    Attributes:
        temporary: Where ranks write.
        final: What it is renamed to.
    """

    temporary: Path
    final: Path


def piece_path(directory: Path, file: int) -> Path:
    """Return the path of a rank's file."""
    return directory / f"rank-{file:05d}.safetensors"


def io_error(what: str, path: Path, error: OSError, code: str = "E433") -> FileError:
    """Return the error for a call of the system that failed.

    Args:
        what: Was tried, as in "cannot write".
        path: Of the file.
        error: Of the system.
        code: E433 for writing, E434 for reading.
    """
    reason = error.strerror or str(error)
    advice = (
        "The last complete step is still there; nothing of this one is kept."
        if code == "E433"
        else "Load an older step, or copy the checkpoint again."
    )
    return FileError(
        f"{what} {shown(str(path))}: {reason}"
        + (f" (errno {error.errno})" if error.errno is not None else "")
        + f".\n{advice}",
        code=code,
        details={"path": str(path), "errno": error.errno},
    )


# Writing.


def reserve(root: Path, step: int) -> Reservation:
    """Make the temporary directory of a step, and remove those of runs that were killed.

    Only the holder of the root's lock may call this.

    Args:
        root: Directory of the run; made if it is not there.
        step: Steps that were trained.

    Raises:
        FileError: E433, if it cannot be made.
    """
    try:
        for left in root.iterdir():
            if _TEMPORARY.fullmatch(left.name):
                disk.remove_tree(left) if left.is_dir() else left.unlink()
        name, version = f"step-{step:08d}", 1
        while (root / name).exists():
            version += 1
            name = f"step-{step:08d}.{version}"
        temporary = root / f"{name}.tmp-{secrets.token_hex(6)}"
        temporary.mkdir()
    except OSError as error:
        raise io_error("cannot make a directory in", root, error) from error
    return Reservation(temporary, root / name)


def commit(reservation: Reservation, manifest: Manifest, keep: int | None = None) -> None:
    """Make a step durable whose pieces are: manifest, rename, `latest`; then drop old steps.

    Args:
        reservation: Its directory, which holds all pieces.
        manifest: Of the step.
        keep: How many steps stay, this one among them; None keeps all.

    Raises:
        FileError: E433, if something cannot be written. The step before is then still `latest`.
    """
    temporary, final = reservation.temporary, reservation.final
    path = temporary / MANIFEST
    try:
        disk.write_file(path, [manifest_to_json(manifest)])
        files.sync_directory(temporary)
        path = final
        files.rename(temporary, final)
        path = final.parent / LATEST
        unique = temporary.name.rpartition("-")[2]
        disk.replace_file(path, f"{final.name}\n".encode(), path.with_name(f"latest.tmp-{unique}"))
    except OSError as error:
        raise io_error("cannot write", path, error) from error
    _drop_old(final, manifest.step, keep)


def discard(reservation: Reservation) -> None:
    """Remove what was written of a step that is not committed."""
    disk.remove_tree(reservation.temporary)


def _drop_old(new: Path, step: int, keep: int | None) -> None:
    """Remove steps beyond the `keep` newest, and other versions of the new step."""
    others = [each for each in committed(new.parent) if each.path != new]
    old = [each.path for each in others if each.step == step]
    if keep is not None:
        rest = [each.path for each in others if each.step != step]
        old += rest[: max(0, len(rest) - (keep - 1))]
    for path in old:
        # Renamed first: a directory without half of its files must not look like a step.
        left = path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):
            path.rename(left)
            disk.remove_tree(left)


def check_steps(name: str, steps: int | None) -> None:
    """Raise E233 if `keep` or `every` is no number of steps."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        text = f"{name} is {steps!r:.40}; it is a number of steps, 1 or more"
        raise UsageError(text, code="E233")


class Lock:
    """Keeps two runs from saving into one directory; the system drops it when the process ends.

    Args:
        root: Directory of the run; made if it is not there.

    Raises:
        MismatchError: E522, if another run holds it.
        FileError: E433, if the directory cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        path = root / LOCK
        try:
            root.mkdir(parents=True, exist_ok=True)
            files.sync_directory(root.parent)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise io_error("cannot write", path, error) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            raise MismatchError(
                f"another run saves its checkpoints in {shown(str(root))}.\n"
                "Give each run a directory of its own, or wait until the other one has ended.",
                code="E522",
            ) from error

    def release(self) -> None:
        """Let another run save here."""
        os.close(self._handle)


# Reading.


def committed(root: Path) -> list[Committed]:
    """Return the committed steps of a run, oldest first.

    Raises:
        FileError: E430, if there is no such directory; E434, if it cannot be read.
    """
    found: list[Committed] = []
    try:
        for path in root.iterdir():
            match = _STEP.fullmatch(path.name)
            manifest = path / MANIFEST
            if match and manifest.is_file():
                time_ns = manifest.stat().st_mtime_ns
                found.append(Committed(time_ns, int(match[1]), int(match[2] or 1), path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileError(
            f"there is no checkpoint: {shown(str(root))} is not a directory.\nName the directory "
            "that was given to `save`.",
            code="E430",
        ) from error
    except OSError as error:
        raise io_error("cannot read", root, error, "E434") from error
    return sorted(found)


def resolve(root: Path, step: int | None = None) -> Path:
    """Return the directory of a committed step.

    Args:
        root: Directory of the run.
        step: Steps that were trained; None takes the one that `latest` names.

    Raises:
        FileError: E430, if there is none; E431, if the one asked for is torn.
    """
    found = committed(root)
    if step is not None:
        path = next((each.path for each in reversed(found) if each.step == step), None)
        if path is None:
            raise _no_step(root, f"step {step}", f"step-{step:08d}", found)
        return path
    try:
        name = (root / LATEST).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        # Killed between the first commit and its `latest`: the step is complete.
        if found:
            return found[-1].path
        raise _no_step(root, "a step", "", found) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error if isinstance(error, OSError) else OSError("it is not text")
        raise io_error("cannot read", root / LATEST, reason, "E434") from error
    path = next((each.path for each in found if each.path.name == name), None)
    if path is None:
        raise _no_step(root, f"{shown(name)}, which `latest` names", name, found)
    return path


def _no_step(root: Path, wanted: str, name: str, found: list[Committed]) -> FileError:
    steps = ", ".join(str(number) for number in sorted({each.step for each in found}))
    there = f"Complete steps: {steps}." if steps else "No complete step is there."
    if name and _STEP.fullmatch(name) and (root / name).is_dir():
        return FileError(
            f"{wanted} in {shown(str(root))} is torn: it has no {MANIFEST}.\n{there}", code="E431"
        )
    return FileError(f"{shown(str(root))} does not hold {wanted}.\n{there}", code="E430")


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a committed step, and that its files have their sizes.

    Raises:
        FileError: E406 to E408, E435 (damaged manifest); E431 (a file is missing or too short).
        MismatchError: E502.
    """
    path = directory / MANIFEST
    manifest = manifest_from_json(files.read_bytes(path), f"checkpoint {str(path)!r}")
    for number, size in enumerate(manifest.files):
        piece = piece_path(directory, number)
        try:
            found = piece.stat().st_size
        except OSError as error:
            found = None
            if not isinstance(error, FileNotFoundError):
                raise io_error("cannot read", piece, error, "E434") from error
        if found != size:
            told = "is missing" if found is None else f"has {found} bytes"
            raise FileError(
                f"the checkpoint is torn: {shown(str(piece))} {told}, but {size} were "
                "written.\nLoad an older step, or copy the checkpoint again.",
                code="E431",
                details={"path": str(piece)},
            )
    return manifest
