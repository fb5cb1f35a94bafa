"""Whole tensors on rank 0, one or a few rows at a time: gathered from shards, or scattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import elements_of
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.program import Program
from pardnn.checkpoint.manifest import intersection, whole_box, within
from pardnn.checkpoint.pieces import CHUNK_BYTES
from pardnn.errors import shown
from pardnn.plan.mesh import Box
from pardnn.plan.state_layout import Shard

#: Between steps no message of a step is in flight, and none has this tag.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, buffers and states."""
        return tuple(self._program.state)

    def gather(self, name: str) -> torch.Tensor | None:
        """Return a parameter, buffer or state whole, on the host of rank 0; None elsewhere.

        Args:
            name: The name of its source.
        """
        shape, dtype = self._kind(name)
        whole = torch.empty(shape, dtype=dtype) if self._world.rank == 0 else None
        self._move(name, whole_box(shape), whole, gather=True)
        return whole

    def gather_rows(self, name: str, rooms: list[torch.Tensor]) -> Iterator[torch.Tensor | None]:
        """Yield the same, `CHUNK_BYTES` or one row at a time; None on ranks other than 0.

        Args:
            name: The name of its source.
            rooms: Rank 0's buffers for the rows, used in turn; enlarged if needed.
        """
        shape, dtype = self._kind(name)
        extent = shape[0] if shape else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for low in range(0, extent, step):
            high = min(extent, low + step)
            box = ((low, high), *whole_box(shape[1:])) if shape else ()
            rows = None
            if self._world.rank == 0:
                rooms.reverse()
                size = (high - low) * row_bytes
                if rooms[0].numel() < size:
                    rooms[0] = torch.empty(size, dtype=torch.uint8)
                rows = rooms[0][:size].view(dtype).view([end - start for start, end in box])
            self._move(name, box, rows, gather=True)
            yield rows

    def scatter(self, name: str, whole: torch.Tensor | None) -> None:
        """Copy a whole tensor of rank 0 into every shard of it.

        Args:
            name: The name of its source.
            whole: The tensor on rank 0, of the source's shape and type.
        """
        self._move(name, whole_box(self._kind(name)[0]), whole, gather=False)

    def _kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        output = self._outputs[name]
        return tuple(output.shape or ()), getattr(torch, output.dtype or "float32")

    def _move(self, name: str, box: Box, part: torch.Tensor | None, *, gather: bool) -> None:
        """Move a box between rank 0, which has it in `part`, and the shards that share it.

        If several ranks hold a shard, one of them sends it and all receive it.
        """
        shards = self._program.state[name]
        if gather:
            found = {shard.box: shard for shard in reversed(shards)}
            shards = sorted(found.values(), key=lambda each: each.device)
        shape = self._kind(name)[0]
        for shard in shards:
            held = shard.box or whole_box(shape)
            common = intersection(held, box)
            if common is not None:
                place = None if part is None else box_view(part, within(common, box))
                self._move_shard(shard, within(common, held), place, name, gather=gather)

    def _move_shard(
        self, shard: Shard, box: Box, place: torch.Tensor | None, name: str, *, gather: bool
    ) -> None:
        """Move a box of a shard, by indices into the shard, between its rank and rank 0."""
        mine = None
        if shard.device == self._world.rank:
            live = self._live[self._program.ops[shard.op].outputs[0].name]
            mine = box_view(live.detach(), box)
        if mine is not None and place is not None:
            place.copy_(mine) if gather else mine.copy_(place)
        elif mine is not None:
            self._transfer(mine, 0, name, send=gather)
        elif place is not None:
            self._transfer(place, shard.device, name, send=not gather)

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
        # Sent as bytes: not every back end knows every type.
        flat = elements_of(buffer).view(torch.uint8)
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
