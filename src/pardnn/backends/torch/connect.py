"""`connect`: joins the ranks of torchrun in scripts whose tools would split data and use DDP.

Trainer, accelerate and Lightning read torchrun's variables and then work in their own way: each
rank gets a part of the data, and the model is wrapped in DDP. With pardnn, each rank must see all
the data and one device. So the ranks are connected first, and the variables are then removed.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from pardnn.backends.torch.comm.joining import rank_device
from pardnn.backends.torch.devices import this_device

#: Variables by which tools learn that they are one of several ranks.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def connect() -> int:
    """Connect the ranks; return this rank's number, 0 without torchrun."""
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        kind = this_device()
        rank_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    for name in _VARIABLES:
        os.environ.pop(name, None)
    return dist.get_rank() if dist.is_initialized() else 0
