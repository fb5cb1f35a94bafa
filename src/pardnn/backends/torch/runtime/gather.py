"""Whole tensors gathered from the shards that ranks hold, as `DTensor.full_tensor` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import empty_tensor
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import RankError, UsageError, did_you_mean, shown
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.state_layout import STATE_KINDS, Shard


def resident_names(program: Program) -> tuple[str, ...]:
    """Return the names of all parameters, buffers and states of a step, in its order."""
    return tuple(op.name for op in program.sources.values() if op.kind in STATE_KINDS)


def source_of(program: Program, name: str) -> Op:
    """Return the source op of a parameter, buffer or state.

    Args:
        program: What runs.
        name: As in `resident_names`.

    Raises:
        UsageError: E215, if there is no such name.
    """
    if name not in program.state:
        near = did_you_mean(name, resident_names(program)) or "\n`names` lists those it has."
        raise UsageError(
            f"the step has no parameter, buffer or state {shown(name)}.{near}",
            code="E215",
        )
    return next(op for op in program.sources.values() if op.name == name)


def whole_source(
    world: World, program: Program, live: Mapping[str, torch.Tensor], name: str
) -> torch.Tensor:
    """Return a parameter, buffer or state as one device would hold it. All ranks take part.

    Args:
        world: This rank's connections.
        program: What runs.
        live: This rank's live values, by the names of the planned graph.
        name: As in `resident_names`.

    Raises:
        UsageError: E215, if there is no such name.
        RankError: E602, if a rank does not take part; the error of a rank that failed first.
    """
    source, shards = source_of(program, name), program.state.get(name, ())
    mine = next((shard for shard in shards if shard.device == world.rank), None)
    value = None if mine is None else live[program.ops[mine.op].outputs[0].name]
    return gathered(world, source.outputs[0], shards, value)


def gathered(
    world: World, output: Tensor, shards: Sequence[Shard], mine: torch.Tensor | None
) -> torch.Tensor:
    """Return a tensor as one device would hold it; all ranks take part.

    Args:
        world: This rank's connections.
        output: Shape, strides and type of the whole tensor.
        shards: The shard of each device.
        mine: This rank's shard; None if it has none.

    Returns:
        A new tensor on this rank's device; the same on every rank.

    Raises:
        RankError: E602, if a rank does not take part; the error of a rank that failed first.
    """
    whole = empty_tensor(output, world.device)
    by_box = {shard.box: shard for shard in reversed(shards)}  # one of the replicas
    for rank, _, box, _ in sorted(by_box.values()):
        place = whole if box is None else box_view(whole, box)
        place.copy_(_broadcast(rank, mine if rank == world.rank else None, place, world))
    return whole


def _broadcast(
    rank: int, mine: torch.Tensor | None, place: torch.Tensor, world: World
) -> torch.Tensor:
    """Return on all ranks the tensor `mine` of `rank`, which has the shape of `place`."""
    if world.size > 1 and world.reported is not None:
        raise RankError(
            f"the ranks had already stopped: {world.reported.message}\nOnly the last checkpoint "
            "has their state as a whole.",
            details={"rank": world.rank, "first_failing_rank": world.rank} | world.reported.details,
        ) from world.reported
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
    try:
        dist.broadcast(flat, group_src=rank, group=world.channel.group)
    except RuntimeError as error:
        direction = "send its part" if rank == world.rank else f"receive the part of rank {rank}"
        lost = LostError(
            f"rank {world.rank} could not {direction} of a tensor of state.\nAll ranks have to "
            "call `whole`, and change what the step reads, at the same place.",
            details={"rank": world.rank, "peer": rank, "transport": str(error)[:200]},
        )
        # Another rank may have failed: that is the error to raise, on this rank too.
        raise world.report_failure(lost) from error
    return flat.view(place.dtype).reshape(place.shape)
