"""Whole tensors on rank 0, one at a time: gathered from shards, or scattered to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import shown
from pardnn.plan.state_layout import Shard

#: Between steps no message of a step is on its way, and no message has this tag.
_TAG = (1 << 26) + 1


class Exchange:
    """Moves whole tensors between rank 0 and the ranks that hold their shards.

    Every rank calls the same methods in the same order.

    Args:
        program: What runs.
        world: This rank's connections.
        live: This rank's live values, by the names of the planned graph.
    """

    def __init__(self, program: Program, world: World, live: Mapping[str, Any]) -> None:
        self._program, self._world, self._live = program, world, live
        self._outputs = {op.name: op.outputs[0] for op in program.sources.values()}

    def gather(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a parameter, buffer or state whole, on the host of rank 0; None elsewhere.

        Args:
            name: Of its source.
            room: Bytes that the result may lie in; overwritten.
        """
        whole = self._empty(name, room) if self._world.rank == 0 else None
        shards = {shard.box: shard for shard in reversed(self._program.state[name])}
        for shard in sorted(shards.values(), key=lambda each: each.device):
            self._move(shard, None if whole is None else _part(whole, shard), name, gather=True)
        return whole

    def scatter(self, name: str, whole: torch.Tensor | None) -> None:
        """Copy a whole tensor of rank 0 into every shard of it.

        Args:
            name: Of its source.
            whole: On rank 0; of its shape and type.
        """
        for shard in self._program.state[name]:
            self._move(shard, None if whole is None else _part(whole, shard), name, gather=False)

    def _empty(self, name: str, room: torch.Tensor | None) -> torch.Tensor:
        output = self._outputs[name]
        shape, dtype = output.shape or (), getattr(torch, output.dtype or "float32")
        if room is None:
            return torch.empty(shape, dtype=dtype)
        return room[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _move(self, shard: Shard, part: torch.Tensor | None, name: str, *, gather: bool) -> None:
        rank, op, _ = shard
        mine = (
            self._live[self._program.ops[op].outputs[0].name].detach()
            if (rank == self._world.rank)
            else None
        )
        if mine is not None and part is not None:
            part.copy_(mine) if gather else mine.copy_(part)
        elif mine is not None:
            self._transfer(mine, 0, name, send=gather)
        elif part is not None:
            self._transfer(part, rank, name, send=not gather)

    def _transfer(self, value: torch.Tensor, peer: int, name: str, *, send: bool) -> None:
        """Send a tensor to a peer, or receive it in place."""
        world = self._world
        assert world.channel is not None
        group = world.channel.group
        staged = world.device.type == "cuda" and dist.get_backend(group) == "gloo"
        device = torch.device("cpu") if staged else world.device
        is_direct = value.is_contiguous() and value.device.type == device.type
        buffer = value if is_direct else torch.empty(value.shape, dtype=value.dtype, device=device)
        if send and not is_direct:
            buffer.copy_(value)
        # As bytes: not every back end knows every type.
        flat = buffer.reshape(-1).view(torch.uint8)
        try:
            if flat.numel() and send:
                dist.send(flat, group_dst=peer, group=group, tag=_TAG)
            elif flat.numel():
                dist.recv(flat, group_src=peer, group=group, tag=_TAG)
        except RuntimeError as error:
            lost = LostError(
                f"rank {world.rank} lost rank {peer} with {shown(name)} on its way",
                details={"rank": world.rank, "peer": peer, "transport": str(error)[:200]},
            )
            raise world.report_failure(lost) from error
        if not send and not is_direct:
            value.copy_(buffer)


def _part(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    return whole if shard.box is None else box_view(whole, shard.box)
