"""Real ranks for tests at a tenth of a second: forked processes that talk over gloo.

torch is imported once, in the parent, and what its optimizers import at first use with it: 3 s a
child. A child uses one thread, so it never enters a pool of threads that did not survive the fork.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

import pardnn
from pardnn.backends.torch.comm.joining import join
from pardnn.backends.torch.comm.world import World
from pardnn.errors import PardnnError
from pardnn.planner.warm_up import warm_up
from testbed.small_graphs import small_case


@dataclass
class Outcome:
    """How a rank ended: `status` is its exit status, or minus the signal that ended it.

    `crash` is what Python said of a fatal signal: pytest would print it beside a green run.
    """

    rank: int
    status: int | None
    seconds: float
    value: Any = None
    crash: str = ""
    error: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str | None:
        return self.error.get("code")


def connect(rank: int, size: int, path: str, timeout_s: float, **kwargs: Any) -> World:
    """Join a forked rank to the others."""
    if size > 1:
        store = dist.FileStore(path, size)  # pyright: ignore[reportPrivateImportUsage]
        wait = timedelta(seconds=max(20, timeout_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    return join(torch.device("cpu"), timeout_s=timeout_s, **kwargs)


def run_ranks(
    size: int,
    body: Callable[[int, str], Any],
    *,
    limit_s: float = 60.0,
    victim: int | None = None,
) -> list[Outcome]:
    """Fork `size` ranks, run `body(rank, store_path)` in each, and return how each ended.

    `body` returns JSON. A rank that has not ended after `limit_s` is killed: status None, and
    `crash` says where it was; so is `victim` once all others have ended.
    """
    _load_planner()
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{rank}.json" for rank in range(size)]
        store = str(Path(directory) / "store")
        start = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pids = [_fork(rank, body, store, paths[rank]) for rank in range(size)]
        ends = _ended(pids, start + limit_s, None if victim is None else pids[victim])
        outcomes = []
        for rank, (status, end) in enumerate(ends):
            outcome = Outcome(rank, status, end - start)
            outcome.crash = crash_path(paths[rank]).read_text()
            if paths[rank].exists():
                data = json.loads(paths[rank].read_text())
                outcome.value, outcome.error = data.get("value"), data.get("error", {})
            outcomes.append(outcome)
        return outcomes


@functools.cache
def _load_planner() -> None:
    """Load here what ranks that plan need: half a second each, a minute where kernels are new."""
    pardnn.plan(*small_case(0, seed=0), "round-robin")
    warm_up(["pardnn"], polished=True)


def crash_path(path: Path) -> Path:
    return path.with_suffix(".crash")


def _fork(rank: int, body: Callable[[int, str], Any], store: str, path: Path) -> int:
    crash = crash_path(path).open("w")
    pid = os.fork()
    if pid:
        crash.close()
        return pid
    status = 99
    try:
        faulthandler.enable(crash)
        faulthandler.register(signal.SIGUSR1, crash, chain=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        try:
            data = {"value": body(rank, store)}
            status = 0
        except PardnnError as error:
            data = {"error": {"code": error.code, "message": error.message,
                              "details": error.details}}  # fmt: skip
            status = error.exit_status
        except SystemExit as error:
            data, status = {}, int(error.code or 0)
        except BaseException:
            data = {"error": {"code": "bare", "message": traceback.format_exc()}}
            status = 1
        path.with_suffix(".tmp").write_text(json.dumps(data))
        path.with_suffix(".tmp").rename(path)
    finally:
        os._exit(status)


def _ended(
    pids: list[int], deadline: float, victim: int | None = None
) -> list[tuple[int | None, float]]:
    ends: dict[int, tuple[int | None, float]] = {}
    while len(ends) < len(pids):
        for pid in pids:
            if pid in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
            elif time.monotonic() > deadline or (pid == victim and len(ends) == len(pids) - 1):
                if pid != victim:
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ends[pid] = (None, time.monotonic())
        time.sleep(0.005)
    return [ends[pid] for pid in pids]
