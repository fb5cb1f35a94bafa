"""Many steps with many saves: nothing grows, and the losses are those of one device.

`SOAK=1000` for the long form (`make soak`).
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch

from pardnn.checkpoint.directory import committed
from tests.backends.torch.checkpoint.training import (
    Rank,
    batch_numbers,
    on_ranks,
    plan_of,
    uninterrupted,
    values,
)
from tests.backends.torch.executors import bits, perceptron

STEPS, EVERY, KEEP, SIZE = (
    int(os.environ.get("SOAK", "60")),
    10,
    3,
    3 if "SOAK" in os.environ else 2,
)
#: What a rank may grow by from the second fifth of the steps to their end, bytes.
SLACK_BYTES = 1 << 20


def _descriptors() -> int:
    time.sleep(0.01)
    return len(list(Path("/proc/self/fd").iterdir()))


def held(root: Path) -> dict[str, int]:
    """What this process and the run hold of what the system counts."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "resident": int(resident.split()[1]) << 10,
        # The flight record is open for a moment in each second.
        "descriptors": min(_descriptors() for _ in range(5)),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(root.rglob("*"))),
        "shared memory": len(list(Path("/dev/shm").glob("torch_*"))),
    }


def test_nothing_grows_and_no_bit_is_lost(tmp_path: Path) -> None:
    def body(one: Rank) -> Any:
        losses, first = [], {}
        for number, i in enumerate(itertools.islice(batch_numbers(one.order), STEPS), 1):
            losses.append(one.step(i))
            one.fast.save(tmp_path, extra=one.extra, keep=KEEP, every=EVERY)
            if number == max(KEEP + 1, STEPS // EVERY // 5) * EVERY:
                first = held(tmp_path)
        return [losses, bits(torch.get_rng_state()), first, held(tmp_path)]

    *expected, generator = uninterrupted(perceptron, STEPS)
    outcomes = on_ranks(perceptron, plan_of(perceptron, SIZE), body, limit_s=1500)
    for rank, (losses, state, first, last) in enumerate(values(outcomes)):
        print(f"rank {rank}: {first} -> {last}")
        assert (losses, state) == (expected, generator)
        grown = last.pop("resident") - first.pop("resident")
        assert grown <= SLACK_BYTES
        assert all(last[name] <= first[name] for name in first)
    assert [each.step for each in committed(tmp_path)] == list(
        range(STEPS - EVERY * (KEEP - 1), STEPS + 1, EVERY)
    )
