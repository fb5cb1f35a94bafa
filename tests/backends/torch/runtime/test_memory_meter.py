"""The memory meter counts each storage once."""

from __future__ import annotations

from typing import Any

import torch

from pardnn.backends.torch.runtime.memory.meter import MemoryMeter, live_bytes


def test_the_meter_counts_each_storage_once() -> None:
    x = torch.zeros(10)
    env: dict[str, Any] = {"x": x, "view": x[2:], "y": torch.zeros(3), "n": 5}
    meter = MemoryMeter()
    meter.add(env, list(env))
    assert (meter.live, live_bytes(env)) == (52, 52)
    meter.remove(["x", "n"])
    assert meter.live == 52
    meter.remove(["view"])
    assert (meter.live, meter.peak) == (12, 52)
    env["y"] = torch.zeros(1)
    meter.add(env, ["y"])
    assert meter.live == 4
