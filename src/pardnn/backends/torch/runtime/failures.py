"""What a rank reports when it fails, or when another one asks what it is doing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import spec_text
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.deferred_init.blocks import Shard
from pardnn.backends.torch.deferred_init.initialise import largest_made_whole
from pardnn.backends.torch.deferred_init.recording import Recording
from pardnn.backends.torch.runtime.memory.limits import is_out_of_memory, lift_limit
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import RankError, shown
from pardnn.graph.ir import Op
from pardnn.plan.actions import Action, Compute, Free

#: How many of a rank's last actions a flight record lists.
ACTIONS_KEPT = 16


def out_of_memory(
    program: Program, world: World, where: str, held: int, details: dict[str, Any]
) -> RankError:
    """Return the error of a rank that ran out of memory.

    Args:
        program: What runs.
        world: This rank's connections.
        where: The action that ran, in words.
        held: Bytes of tensors that were held.
        details: The details of the failure, with the step.
    """
    rank, predicted = world.rank, program.peaks[world.rank]
    cluster = program.plan.cluster
    name = cluster.devices[rank].name if cluster else str(world.device)
    return RankError(
        f"rank {rank} (device {name}) ran out of memory at {where}, step "
        f"{details['step']}. It held {held} bytes of tensors; the plan's peak for it is "
        f"{predicted} bytes.\n"
        "If the limit is below the plan's peak, plan again with this limit; else raise "
        "--reserve, or give this device more memory.",
        code="E603",
        details=details | {"held_bytes": held, "predicted_peak_bytes": predicted},
    )


@contextlib.contextmanager
def naming_out_of_memory(world: World, doing: str) -> Iterator[None]:
    """Report to all ranks if this one runs out of memory outside a step.

    Args:
        world: This rank's connections.
        doing: What it does, in words.

    Raises:
        RankError: E603.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lift_limit()  # so that the failure can be reported
        failure = RankError(
            f"rank {world.rank} ran out of memory while {doing}: {memory_reason(error)}",
            code="E603",
            details={"rank": world.rank},
        )
        raise world.report_failure(failure) from error


@contextlib.contextmanager
def naming_what_is_made_whole(
    recording: Recording,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    shards: Sequence[Shard | None],
) -> Iterator[None]:
    """Name the largest tensor that was made whole, if memory ran out.

    Args:
        recording: The recording that is replayed.
        names: The names of the tensors.
        tensors: The tensors that are wanted.
        shards: The shards of each.

    Raises:
        MemoryError: Instead of the system's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        largest = largest_made_whole(recording, tensors, shards)
        if largest is None:
            raise
        raise MemoryError(
            f"{shown(names[largest])} takes {tensors[largest].nbytes} bytes, and is made whole "
            "before this rank's shard is cut from it: only a tensor that one uniform_, normal_ or "
            "fill_ fills is made in parts"
        ) from error


def memory_reason(error: BaseException) -> str:
    """Return what the system said when memory ran out, and what to do about it."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{said[:300]}\nRaise --reserve (`reserve=`), or give this device more memory."


def action_text(program: Program, actions: Sequence[Action], at: int) -> tuple[str, Op | None]:
    """Return an action as text, and its op if it computes one.

    Args:
        program: What runs.
        actions: The actions of this rank.
        at: Position of the action; their number at the end of the step.
    """
    if at >= len(actions):
        return "the end of its step", None
    action = actions[at]
    if isinstance(action, Compute):
        op = program.ops[action.op]
        return f"op {shown(op.name)}" + (f" ({op.source})" if op.source else ""), op
    if isinstance(action, Free):
        return f"the release of {shown(action.tensors[0])}", None
    return spec_text(program.specs[action.message]), None


def recent_actions(program: Program, actions: Sequence[Action], at: int) -> list[str]:
    """Return the actions up to the running one, as `action_text` has them."""
    first = max(0, at + 1 - ACTIONS_KEPT)
    return [
        f"{type(actions[i]).__name__.lower()} {action_text(program, actions, i)[0]}"
        for i in range(first, min(at + 1, len(actions)))
    ]
