"""Too little disk, memory or open files: told as that, with what to do, and no file is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import pardnn
from pardnn.cli import file_commands

ROOT = Path(pardnn.__file__).resolve().parents[1]
#: Temporary folders of 64 KiB, all full; files beside the package may be written.
FULL = """
for folder in /tmp /var/tmp "$PWD"; do
    mount -t tmpfs -o size=64k tmpfs "$folder" && dd if=/dev/zero of="$folder/fill" bs=1k
done 2> /mnt/errors
unset TMPDIR; cd "$PWD"; exec "$@"
"""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), "No usable"),
        (ImportError("lib.so: failed to map segment from shared object"), "failed to map"),
        (MemoryError(), "out of memory"),
        (SystemError("error return without exception set"), "error return"),  # of CPython, too
        (caused(OSError("no lib.so"), OSError("lib.so: failed to map segment")), "failed to map"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_the_system_lacks_is_no_bug_of_ours(
    error: Exception, told: str, form: tuple[str, ...], tiny: Path, tmp_path: Path, run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(file_commands.opt, "read_both", fails)
    of = (tiny / "plan.json", "--graph", tiny / "graph.json")
    status, out, err = run("report", *of, "-o", tmp_path / "r.html", *form)
    assert status == 4
    assert "E413" in out + err
    assert told in out + err
    assert "ulimit -a" in out + err
    assert "Traceback" not in out + err


def test_another_error_is_still_one_of_ours(
    tiny: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(file_commands.opt, "read_both", fails)
    of = (tiny / "plan.json", "--graph", tiny / "graph.json")
    status, _, err = run("report", *of, "-o", tmp_path / "r.html")
    assert status == 1
    assert "E199 internal error, a bug in pardnn" in err


def can_mount() -> bool:
    """Whether this process may make file systems that it alone sees."""
    words = ("unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /var/tmp")
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not can_mount(), reason="mounts need root")
def test_full_temporary_folders_end_in_an_error_or_not_at_all(tiny: Path, tmp_path: Path) -> None:
    """What needs no temporary folder works in full ones; the rest says E4xx."""
    package, data = Path("/mnt/package"), Path("/mnt/data")
    python = Path("/mnt/python")  # this clone may be below a folder that is hidden
    prepare = (
        "mount -t tmpfs tmpfs /mnt && mkdir -p /mnt/package /mnt/data /mnt/cwd /mnt/python && "
        f"mount --bind '{sys.prefix}' {python} && mount --bind '{ROOT}' {package} && "
        f"mount --bind '{tmp_path}' {data} && cd /mnt/cwd && "
        "PARDNN_CACHE=/mnt/cache PYTHONPATH=/mnt/package "
    )
    for name in ("graph", "plan"):
        shutil.copy(tiny / f"{name}.json", tmp_path)
    of, planned = (f"{data}/{name}.json --graph {data}/graph.json" for name in ("plan", "p"))
    commands = {
        f"plan {data}/graph.json --devices 2 --algorithm heft -o {data}/p.json": 0,
        f"plan {data}/graph.json --devices 2 --algorithm heft -o p.json": 4,
        f"check {of}": 0,
        f"report {planned} -o {data}/r.html": 0,
        f"report {planned} -o r.html": 4,
        f"plan {data}/graph.json --devices 2 --algorithm heft --costs measured": 4,
    }
    for words, status in commands.items():
        pardnn_of = f"{python}/bin/{Path(sys.executable).name} -m pardnn {words}"
        script = f"{prepare} sh -c '{FULL}' sh {pardnn_of}"
        done = subprocess.run(
            ("unshare", "-m", "sh", "-c", script), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, (words, done.stderr)
        assert "Traceback" not in done.stderr, words
        assert status == 0 or "E4" in done.stderr
