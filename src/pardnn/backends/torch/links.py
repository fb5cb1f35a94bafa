"""Latency and bandwidth between two local ranks, measured.

Two child processes bounce messages of several sizes over gloo; half a round trip is one message.
The children are started anew, not forked: threads of this process would not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from pardnn.cost.links import LinkFit, fit_link
from pardnn.cost.table import CostTable, Entry, Machine, cache_folder, load_table, save_table
from pardnn.cost.this_cpu import cpu_name
from pardnn.errors import RankError, StuckError

#: Bytes of the messages. From far below to far above where latency and transfer take equally long.
MESSAGE_BYTES = tuple(1 << power for power in range(6, 25, 2))

#: Round trips per size: 3 long ones show a bandwidth, short ones need more to show a latency.
MIN_TRIPS, MAX_TRIPS = 3, 40
SIZE_SECONDS = 0.05

#: Signatures of messages in the cost cache: this and the number of bytes.
_MESSAGE = "pardnn.message."


def measure_links(*, timeout_s: float = 60.0, folder: Path | None = None) -> LinkFit:
    """Measure latency and bandwidth between two local CPU ranks over gloo; keep them in the cache.

    Args:
        timeout_s: After which the ranks are given up.
        folder: Of the cost cache; the user's if absent.

    Raises:
        RankError: E601, if a rank fails.
        StuckError: E701, if they do not finish in time.
    """
    entries = {
        f"{_MESSAGE}{size}": Entry(seconds=seconds, repetitions=MIN_TRIPS)
        for size, seconds in _bounced(timeout_s).items()
    }
    fit = _fitted(entries)
    save_table(CostTable(_machine(), entries), folder or cache_folder())
    return fit


def cached_links(folder: Path | None = None) -> LinkFit | None:
    """Return the links last measured on this machine with this library; None if never."""
    entries = load_table(_machine(), folder or cache_folder()).entries
    return _fitted(entries) if len(entries) == len(MESSAGE_BYTES) else None


def _machine() -> Machine:
    library = f"torch {importlib.metadata.version('torch')}, gloo, two local ranks"
    return Machine(device=cpu_name(), library=library, threads=1)


def _fitted(entries: Mapping[str, Entry]) -> LinkFit:
    # In one order, so that the fit from the cache is the one that was measured, to the last bit.
    messages = sorted((int(text.removeprefix(_MESSAGE)), e.seconds) for text, e in entries.items())
    return fit_link([size for size, _ in messages], [seconds for _, seconds in messages])


def _bounced(timeout_s: float) -> Mapping[int, float]:
    """Run both ranks; return seconds of a message by its bytes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "pardnn.backends.torch.links", f"{folder}/store"]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), str(timeout_s)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        end = time.monotonic() + timeout_s
        try:
            texts = [rank.communicate(timeout=max(0.0, end - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise StuckError(
                f"two local ranks did not exchange {len(MESSAGE_BYTES)} sizes of messages in "
                f"{timeout_s:g} s.\nCheck that this machine's host name resolves to itself."
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, said)) in enumerate(zip(ranks, texts, strict=True)):
        if rank.returncode:
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise RankError(f"rank {number} of 2 failed while measuring links: {last:.300}")
    return {int(size): seconds for size, seconds in json.loads(texts[0][0]).items()}


def _bounce(store: str, rank: int, timeout_s: float) -> dict[int, float]:
    """Do one rank's part: send and receive each size, both ranks in step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=wait
    )
    found: dict[int, float] = {}
    for size in MESSAGE_BYTES:
        buffer = torch.ones(size, dtype=torch.uint8)

        def trip(buffer: torch.Tensor = buffer) -> float:
            start = time.perf_counter()
            for sender in range(2):
                (dist.send if sender == rank else dist.recv)(buffer, 1 - rank)
            return time.perf_counter() - start

        trip()
        trips = torch.tensor([max(MIN_TRIPS, min(MAX_TRIPS, int(SIZE_SECONDS / trip())))])
        dist.broadcast(trips, 0)  # each rank measured another time; both must agree
        # The lower quartile: what else runs on this machine delays messages, and only delays.
        found[size] = statistics.quantiles([trip() for _ in range(int(trips))])[0] / 2
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    result = _bounce(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.write(json.dumps(result) + "\n")
