"""This machine: its processor's name, and the memory and cores that this process may use.

A container has a share of its machine: control groups limit what its processes hold together, and
the system ends one of them, silently, where they hold more. So limits of both versions of
control groups count, those of groups around one's own too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def cpu_name() -> str:
    """Name of the processor with its cores and memory, which tell virtual machines apart."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without that line
    return f"{name}, {os.cpu_count()} cores, {_physical_bytes() / 2**30:.0f} GiB"


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 << 30  # not POSIX: assumed


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory that the processes here may have: the machine's, or a container's.

    Args:
        root: Of the file system.
    """
    return min([_physical_bytes(), *(limit for _, limit in _memory_limits(root))])


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory that can be had without swapping.

    Args:
        root: Of the file system.
    """
    left = [limit - _held_bytes(group) for group, limit in _memory_limits(root)]
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return max(0, min([int(line.split()[1]) * 1024, *left]))
    except (OSError, StopIteration, ValueError, IndexError):
        return max(0, min([_physical_bytes() // 2, *left]))  # not Linux: assumed


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use, at least 1.

    Args:
        root: Of the file system.
    """
    has_mask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    for group in _groups("cpu", root):
        share = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us"),
        ]  # fmt: skip
        if len(share) == len(("quota", "period")) and min(share) > 0:
            cores = min(cores, share[0] // share[1])
    return max(1, cores)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the groups whose memory is limited, and the limit in bytes."""
    for group in _groups("memory", root):
        limit = _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
        if limit:
            yield group, limit[0]


def _held_bytes(group: Path) -> int:
    """Return the bytes that the processes of a group hold, without files that can be read again."""
    held = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes") or [0]
    try:
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        files = dict(line.split() for line in lines)
        return held[0] - int(files.get("total_inactive_file", files.get("inactive_file", "0")))
    except (OSError, ValueError):
        return held[0]


def _groups(kind: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process' control groups of a kind, and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and kind not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers  # of version 2 without a name
        names = [name for name in path.split("/") if name]
        # A container sees its own group at the top, whatever it is called outside.
        depth = 0 if ".." in names else len(names)
        yield from (top.joinpath(*names[:count]) for count in range(depth, -1, -1))


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none if it is not there or sets no limit."""
    try:
        return [int(word) for word in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return []
