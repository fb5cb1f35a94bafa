"""Memory and cores of a container: what its control groups allow, in both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pardnn.cost.host import available_bytes, memory_bytes, usable_cores

GIB = 1 << 30


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write the files of a machine that tell of its control groups."""
    told = {"proc/self/cgroup": groups, "proc/meminfo": f"MemAvailable: {8 << 20} kB\n"}
    for name, text in (told | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)


def test_without_limits_all_is_usable(tmp_path: Path) -> None:
    for root in (tmp_path / "no groups", machine(tmp_path, "0::/a\n", {})):
        assert memory_bytes(root) == 16 * GIB
        assert usable_cores(root) == 6
    assert available_bytes(tmp_path) == 8 * GIB


@pytest.mark.parametrize("own", ["/", "/pod/own", "/../elsewhere"])
def test_the_second_version_limits(tmp_path: Path, own: str) -> None:
    """A container sees its group at the top; elsewhere a group around one's own may limit."""
    top = "sys/fs/cgroup" + ("/pod" if own == "/pod/own" else "")
    root = machine(
        tmp_path, f"0::{own}\n",
        {f"{top}/memory.max": f"{3 * GIB}\n", f"{top}/memory.current": f"{2 * GIB}\n",
         f"{top}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
         f"{top}/cpu.max": "250000 100000\n",
         "sys/fs/cgroup/pod/own/memory.max": "max\n",
         "sys/fs/cgroup/pod/own/cpu.max": "max 100000\n"},
    )  # fmt: skip
    assert memory_bytes(root) == 3 * GIB
    assert available_bytes(root) == 2 * GIB
    assert usable_cores(root) == 2


def test_the_first_version_limits(tmp_path: Path) -> None:
    """Its groups have a tree for each controller; what limits nothing is a number, too."""
    root = machine(
        tmp_path, "9:name=systemd:/\n4:memory:/a/b\n1:cpu,cpuacct:/a\n",
        {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
         "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2 * GIB}\n",
         "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
         "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
         "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
    )  # fmt: skip
    assert memory_bytes(root) == 2 * GIB
    assert available_bytes(root) == 0
    assert usable_cores(root) == 1
