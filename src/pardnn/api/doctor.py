"""What this machine has, and what will work on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import tempfile

from pardnn import backends
from pardnn.cost.host import usable_cores
from pardnn.cost.table import cache_folder
from pardnn.report.results import DoctorResult
from pardnn.version import __version__

#: torch versions that the backend was tested with.
TESTED_TORCH = ("2.13",)


def examine() -> DoctorResult:
    """Look at packages, devices and folders; import torch only to see its devices."""
    problems: list[str] = []
    torch_version, devices = _torch(problems)
    folder = cache_folder()
    if folder is None:
        problems.append("no folder for measured costs can be written: every run measures again")
    try:
        with tempfile.TemporaryFile() as stream:
            stream.write(b"x")
    except OSError as error:
        problems.append(
            "no temporary folder can be written, so no step can be run: "
            f"{error.strerror or error}; TMPDIR names another"
        )
    return DoctorResult(
        pardnn=__version__,
        python=platform.python_version(),
        numba=importlib.metadata.version("numba"),
        torch=torch_version,
        devices=tuple(devices),
        cpu_cores=usable_cores(),
        cache=None if folder is None else str(folder),
        problems=tuple(problems),
    )


def _torch(problems: list[str]) -> tuple[str | None, list[str]]:
    if importlib.util.find_spec("torch") is None:
        problems.append(
            "torch is not installed: graph files can be planned, but no step captured or run; "
            "install pardnn[torch]"
        )
        return None, []
    version = importlib.metadata.version("torch")
    if not version.startswith(TESTED_TORCH):
        problems.append(f"torch {version} has not been tested; {', '.join(TESTED_TORCH)} have")
    return version, backends.visible_devices()
