"""Whole tensors gathered from the shards that ranks hold, as `DTensor.full_tensor` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import empty_tensor
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import UsageError, shown
from pardnn.plan.state_layout import STATE_KINDS


def resident_names(program: Program) -> tuple[str, ...]:
    """Return the names of all parameters, buffers and states of a step, in its order."""
    return tuple(op.name for op in program.sources.values() if op.kind in STATE_KINDS)


def whole_value(program: Program, world: World, live: Mapping[str, Any], name: str) -> Any:
    """Return a parameter, buffer or state as one device would hold it; all ranks take part.

    Args:
        program: What runs.
        world: This rank's connections.
        live: This rank's live values, by the names of the planned graph.
        name: As in `resident_names`.

    Returns:
        A new tensor on this rank's device; the same on every rank.

    Raises:
        UsageError: E215, if there is no such name.
    """
    if name not in resident_names(program):
        near = [each for each in resident_names(program) if each.endswith(name)][:3]
        raise UsageError(
            f"the step has no parameter, buffer or state {shown(name)}.\n"
            + (f"Did you mean {', '.join(near)}?" if near else "`names` lists those it has."),
            code="E215",
        )
    source = next(op for op in program.sources.values() if op.name == name)
    whole = empty_tensor(source.outputs[0], world.device)
    shards = {shard.box: shard for shard in reversed(program.state[name])}  # one of the replicas
    for rank, op, box in sorted(shards.values()):
        place = whole if box is None else box_view(whole, box)
        mine = live[program.ops[op].outputs[0].name] if rank == world.rank else None
        place.copy_(_broadcast(rank, mine, place, world))
    return whole


def _broadcast(
    rank: int, mine: torch.Tensor | None, place: torch.Tensor, world: World
) -> torch.Tensor:
    """Return on all ranks the tensor `mine` of `rank`, which has the shape of `place`."""
    if world.channel is None or world.channel.group is None:
        assert mine is not None
        return mine
    staged = world.device.type == "cuda" and dist.get_backend(world.channel.group) == "gloo"
    device = torch.device("cpu") if staged else world.device
    sent = torch.empty(place.shape, dtype=place.dtype, device=device)
    if mine is not None:
        sent.copy_(mine.detach())
    # As bytes: not every back end knows every type.
    flat = sent.reshape(-1).view(torch.uint8) if sent.dim() else sent.reshape(1).view(torch.uint8)
    dist.broadcast(flat, group_src=rank, group=world.channel.group)
    return flat.view(place.dtype).reshape(place.shape)
