"""Ranks for benchmarks: forked processes that talk over gloo, each with one thread."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.joining import join
from pardnn.backends.torch.comm.world import World


def forked(size: int, body: Callable[[int, str], Any], limit_s: float = 600.0) -> list[Any]:
    """Return what `body(rank, store)` returns, JSON, in each of `size` forked processes.

    Args:
        size: Number of processes.
        body: Runs in each, with its rank and the path of a store that all share.
        limit_s: Seconds after which what still runs is killed.

    Raises:
        RuntimeError: With the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{rank}.json" for rank in range(size)]
        sys.stdout.flush()
        pids = [_fork(rank, body, f"{directory}/store", paths[rank]) for rank in range(size)]
        end, left = time.monotonic() + limit_s, set(pids)
        while left:
            left = {pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]}
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise RuntimeError(f"{len(left)} of {size} ranks did not end in {limit_s:g} s")
            time.sleep(0.01)
        found = [json.loads(path.read_text()) for path in paths]
    for rank, each in enumerate(found):
        if "error" in each:
            raise RuntimeError(f"rank {rank}: {each['error']}")
    return [each["value"] for each in found]


def _fork(rank: int, body: Callable[[int, str], Any], store: str, path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        try:
            data = {"value": body(rank, store)}
        except BaseException:
            data = {"error": traceback.format_exc()}
        path.write_text(json.dumps(data))
    finally:
        os._exit(0)


def process_group(rank: int, size: int, store: str) -> None:
    """Start the default process group of a forked rank.

    Args:
        rank: Of this process.
        size: Number of ranks.
        store: Path of the file by which they find each other.
    """
    shared = dist.FileStore(store, size)
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=wait)


def world_of(rank: int, size: int, store: str) -> World:
    """Join a forked rank to the others.

    Args:
        rank: Of this process.
        size: Number of ranks.
        store: Path of the file by which they find each other.
    """
    if size > 1:
        process_group(rank, size, store)
    return join(torch.device("cpu"), timeout_s=120.0)
