"""Lightning's `Trainer` with pardnn's checkpoints, written and read by all ranks.

Lightning asks its strategy to save and to restore. This one writes each rank's shards of the model
and the optimizers, and the state of the loop, callbacks and schedulers as plain values: any number
of ranks can resume, and nothing is unpickled. Lightning is not imported here: the class comes from
the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.devices import this_device


def _sent(value: Any, source: int) -> Any:
    """Return a JSON value of one rank on all ranks."""
    if not dist.is_initialized():
        return value
    device = torch.device(this_device())
    data = bytearray(json.dumps(value).encode()) if dist.get_rank() == source else bytearray()
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, source)
    text = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        text = torch.frombuffer(data, dtype=torch.uint8)
    text = text.to(device)
    dist.broadcast(text, source)
    return json.loads(bytes(text.tolist()))


def lightning_strategy(base: Any, step: Any) -> Any:
    """Return a strategy that saves and restores a step that is spread over the ranks.

    Args:
        base: `SingleDeviceStrategy`.
        step: The result of `parallelize`; its caller or Lightning saves what it does not reach.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    class DistributedStrategy(base):
        @property
        def is_global_zero(self) -> bool:
            """Rank 0 logs, and removes old checkpoints."""
            return rank == 0

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            """Return what rank `src` has: names of checkpoints come from a search on disk."""
            return _sent(obj, src)

        def lightning_module_state_dict(self) -> dict[str, Any]:
            """Return nothing, as the checkpoint holds it."""
            return {}

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            """Return nothing, as the checkpoint holds it."""
            return {}

        def save_checkpoint(
            self, checkpoint: Mapping[str, Any], filepath: Any, storage_options: Any = None
        ) -> None:
            step.save(filepath, extra=dict(checkpoint))

        def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
            return step.load(checkpoint_path)

        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            """Do nothing: the step loads it."""

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            """Do nothing: the step loads it."""

    return DistributedStrategy()
