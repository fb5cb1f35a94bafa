"""How a rank gets its device and joins the other ranks, and how it leaves them.

Ranks meet at the store of the user's process group, or of one made from the environment as torchrun
sets it, or at a file where all of them are on one machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.handshake import Watch, wait_for
from pardnn.backends.torch.comm.nodes import (
    advice,
    choose_interface,
    machine_id,
    may_be_several,
    node_numbers,
)
from pardnn.backends.torch.comm.secret import ForgedError, SignedStore, prove_links, signed
from pardnn.backends.torch.comm.unix_sockets import connect_local
from pardnn.backends.torch.comm.world import World
from pardnn.errors import MismatchError, RankError, StuckError
from pardnn.shortage import shortage

_count = itertools.count()


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank on its machine, and make it torch's current one.

    Args:
        kind: "cpu" or "cuda".
        local_rank: The rank's number on its machine.

    Raises:
        MismatchError: E513, if there are fewer GPUs than ranks; shows the mapping.
    """
    if kind != "cuda":
        return torch.device(kind)
    found = torch.cuda.device_count()
    if local_rank >= found:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise MismatchError(
            f"rank {local_rank} of this machine needs device cuda:{local_rank}, but torch sees "
            f"{found} (CUDA_VISIBLE_DEVICES: {visible}).\nRank i uses cuda:i. Plan for "
            f"{max(found, 1)} devices, start fewer ranks here, or run on the CPU.",
            code="E513",
            details={"local_rank": local_rank, "devices": found},
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(
    device: torch.device,
    *,
    timeout_s: float,
    backend: str | None = None,
    headers: bool = False,
    meeting: Path | None = None,
) -> World:
    """Connect to the other ranks: over the user's process group, or one made from the environment.

    Args:
        device: The device of this rank.
        timeout_s: Longest wait for one message, seconds.
        meeting: File of the store by which ranks of one machine meet, in a private folder; None
            takes the one at `MASTER_ADDR`.
        backend: "gloo" or "nccl"; None takes the one that suits the device.
        headers: See `Channel`.

    Raises:
        RankError: E605, if the ranks do not find each other.
        FileError: E413, if this rank is short of open files or memory.
    """
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    wait = timedelta(seconds=timeout_s)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1, device, timeout_s)
    try:
        if backend == "gloo" and not (dist.is_initialized() and dist.get_backend() == "gloo"):
            choose_interface()
        if not dist.is_initialized():
            _initialise(backend, wait, meeting)
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return World(0, 1, device, timeout_s)
        store = _own_store()
        group = dist.new_group(list(range(size)), timeout=wait, backend=backend)
        if backend == "gloo":
            prove_links(group, rank, size)
    except ForgedError:
        raise
    except (RuntimeError, ValueError) as error:
        if (short := shortage(error)) is not None:
            raise short from error
        raise RankError(
            f"the ranks did not find each other within {timeout_s:g} s: {_first_line(error)}.\n"
            "A rank that is missing has ended or was not started; look at what it printed last."
            + (f"\n{advice()}" if backend == "gloo" and may_be_several() else ""),
            code="E605",
        ) from error
    channel = Channel(group, rank, timeout_s=timeout_s, device=device, headers=headers)
    world = World(rank, size, device, timeout_s, store, channel)
    if backend == "gloo" and device.type == "cpu" and not headers:
        channel.local = connect_local(rank, world.all_gather)
    # A barrier: no rank may fail and so close connections while another still connects.
    world.nodes = node_numbers(world.all_gather("joined", machine_id()))
    return world


def _initialise(backend: str, wait: timedelta, meeting: Path | None) -> None:
    """Make the process group from the environment, once all ranks have come to its store.

    Raises:
        RankError: E605, naming the ranks that have not.
    """
    if meeting is None:
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(wait)
    store = dist.PrefixStore(f"default_pg/{_attempt()}", store)
    store.set(f"pardnn/come/{rank}", "")
    keys, watch = (
        [f"pardnn/come/{i}" for i in range(size)],
        Watch(rank, wait.total_seconds(), _none),
    )
    try:
        wait_for(store, keys, range(size), watch, "to come")
    except StuckError as error:
        missing = error.details["missing"]
        raise RankError(
            f"{error.message.splitlines()[0]}\n"
            "It has ended or was not started; look at what it printed last.",
            code="E605",
            details={**error.details, "first_failing_rank": missing[0]},
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)


def _none() -> None:
    """Return None: no failure can be reported yet."""


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _own_store() -> dist.Store | SignedStore:
    # `join` is collective, so the count is the same on every rank.
    default = dist.distributed_c10d._get_default_store()
    return signed(dist.PrefixStore(f"pardnn/{_attempt()}/{next(_count)}", default))


def _attempt() -> str:
    """Return how often torchrun has started the ranks anew: their store outlives them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def leave(worlds: Sequence[World]) -> None:
    """Close everything, including the process group: for processes started by pardnn."""
    for world in worlds:
        world.close()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
