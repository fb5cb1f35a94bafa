"""`pardnn run --save --every 1`, killed at random moments: ranks, or the launcher itself.

Runs are forked, ranks too: torch is imported once. `KILLS=200` for the long form (`make kills`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.launch import launcher, processes, worker
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.checkpoint.options import SaveOptions
from pardnn.checkpoint.verify import verify
from pardnn.graph.ir import Graph
from tests.backends.torch import entry_points
from tests.backends.torch.plans import random_plan

ENTRY = f"{Path(entry_points.__file__).resolve()}:training"
SIZE, START_S = 2, 120.0


def children(parent: int) -> list[int]:
    """Process ids of a process's living children, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def run_rank(directory: str) -> None:
    torch.set_num_threads(1)
    os._exit(worker.main(Path(directory), int(os.environ["RANK"])))


def forked(name: str, _python: str, commands: Any, environments: Any, logs: Any) -> Any:
    args = {rank: command[-1:] for rank, command in commands.items()}
    return start_processes(name, run_rank, args, environments, logs, start_method="fork")


start_processes = processes.start_processes


def started(root: Path, graph: Graph, first: int | None, log: Path) -> int:
    """Fork a run that goes on from a step and would train for hours."""
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        processes.start_processes = forked  # type: ignore[assignment]
        saving = SaveOptions(directory=str(root), every=1, keep=2, first_step=first)
        launcher.run_plan(
            ENTRY, graph, random_plan(graph, SIZE, seed=3), steps=10**6, timeout=10, saving=saving
        )
    os._exit(1)


def loadable(root: Path) -> int:
    """The step that `latest` leads to, every byte of it verified."""
    path = resolve(root)
    manifest = read_manifest(path)
    verify(path, manifest)
    return manifest.step


def wait_until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def killed(pid: int, whom: int, after_s: float) -> None:
    """Kill the launcher (0) or a rank in a moment, and wait until the whole run has ended."""
    time.sleep(after_s)
    ranks = children(pid)[-SIZE:]
    os.kill(pid if whom == 0 else ranks[whom - 1], signal.SIGKILL)
    if whom != 0:
        # The launcher names the rank and ends; that takes long, and is tested elsewhere.
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 10)


def test_kills_at_random_moments_of_training_leave_a_step_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    step, args = entry_points.training()
    graph, root, rng = capture(step, *args), tmp_path / "run", random.Random(0)
    torch.set_num_threads(1)
    last, log = 0, tmp_path / "log"
    kills = int(os.environ.get("KILLS", "4"))
    for number in range(kills):
        pid = started(root, graph, last or None, log)
        is_under_way = wait_until(functools.partial(has_saved, root, last), START_S)
        assert is_under_way, log.read_text()[-3000:]
        killed(pid, number % (SIZE + 1), rng.uniform(0.0, 0.1))
        found = loadable(root)
        assert found > last
        last = found
    print(f"{kills} of {kills} kills left a checkpoint that loads; {last} steps were trained")


def has_saved(root: Path, step: int) -> bool:
    with contextlib.suppress(Exception):
        return read_manifest(resolve(root)).step > step
    return False
