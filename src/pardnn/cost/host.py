"""This machine: its processor's name and its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
    return f"{name}, {os.cpu_count()} cores, {memory_bytes() / 2**30:.0f} GiB"


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 << 30  # not POSIX: assumed


def available_bytes() -> int:
    """Bytes of this machine's memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return memory_bytes() // 2  # not Linux: assumed
