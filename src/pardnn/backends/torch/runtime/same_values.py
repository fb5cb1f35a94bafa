"""Consistency checks across ranks: equal initial state, random state and batches.

Problem: a step over several ranks is one step of one model on one global batch. A rank with another
seed, or with its own part of the data, trains a mixture that no single device would, and no shape
gives this away. Idea: ranks compare checksums, the CRC-32 of each tensor's bytes; this finds
accidents, not attacks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import bytes_of
from pardnn.errors import MismatchError, shown

#: Steps between two comparisons of batches: an exchange takes about 1 ms.
COMPARE_EVERY = 100

_STATE_ADVICE = (
    "Every rank has to build the same model: seed all of them alike before they build it, or "
    "load one checkpoint on all. pardnn gives each rank its shard."
)
_BATCH_ADVICE = (
    "Give every rank the same whole (global) batch: leave out DistributedSampler and per-rank "
    "seeds of the data loader. pardnn cuts the batch where the plan says so."
)
_RANDOM_ADVICE = (
    "Random numbers are those of one device, so all ranks start from one generator state: call "
    "torch.manual_seed with the same seed on every rank."
)


def checksum(value: Any) -> int | None:
    """Return a checksum of a number, or a tensor's values, shape and dtype; None for no data."""
    if isinstance(value, int | float):
        return zlib.crc32(repr(value).encode())
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.is_meta:
        return None
    if value.layout != torch.strided:
        return None
    data = bytes_of(value.detach().resolve_conj().resolve_neg().cpu()).numpy()
    return zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), zlib.crc32(data))


def check_same_state(
    world: World, values: Iterable[tuple[str, Any]], *, is_random: bool, key: str = ""
) -> None:
    """Compare the initial state of all ranks, and their random state if the step draws.

    Args:
        world: This rank's connections.
        values: Name and live value of each parameter, buffer and optimizer state.
        is_random: Whether the graph has random ops.
        key: Distinguishes this exchange from others of these ranks.

    Raises:
        MismatchError: E518, on all ranks, naming the first tensor that differs.
    """
    if world.store is None:
        return
    _compare(world, f"state{key}", {name: checksum(value) for name, value in values}, _STATE_ADVICE)
    if is_random:
        state = {"torch's random state": checksum(torch.get_rng_state())}
        _compare(world, f"random{key}", state, _RANDOM_ADVICE)


def check_same_batch(world: World, batch: Mapping[str, Any], step: int, key: str = "") -> None:
    """Compare the batch of all ranks, at every `COMPARE_EVERY`-th step.

    Args:
        world: This rank's connections.
        batch: The batch's tensors by name.
        step: Steps run before.
        key: Distinguishes this step from others of these ranks.

    Raises:
        MismatchError: E518, on all ranks, naming the first tensor that differs.
    """
    if world.store is None or step % COMPARE_EVERY:
        return
    sums = {name: checksum(value) for name, value in batch.items()}
    _compare(world, f"batch{key} {step}", sums, _BATCH_ADVICE)


def _compare(world: World, key: str, sums: Mapping[str, int | None], advice: str) -> None:
    gathered = world.all_gather(key, dict(sums))
    for name, own in gathered[0].items():
        others = [rank for rank, theirs in enumerate(gathered) if theirs.get(name, own) != own]
        if others:
            count = sum(
                any(theirs.get(each, value) != value for theirs in gathered)
                for each, value in gathered[0].items()
            )
            more = f" ({count} of {len(sums)} differ)" if count > 1 else ""
            raise MismatchError(
                f"{shown(name)} has other values on rank {others[0]} than on rank 0{more}.\n"
                + advice,
                code="E518",
                details={"name": name, "ranks": others, "num_different": count},
            )
