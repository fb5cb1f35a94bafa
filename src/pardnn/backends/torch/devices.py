"""Which devices torch sees here."""

from __future__ import annotations

import torch


def this_device() -> str:
    """Return the device that ranks run on: "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def visible_devices() -> list[str]:
    """Return a line per device, with its memory."""
    found = [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / (1 << 30):.1f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    return [*found, f"cpu {torch.backends.cpu.get_cpu_capability()}"]
