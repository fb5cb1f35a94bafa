"""The measured cost of messages between two local ranks: idle, and while the ranks compute.

Two child processes exchange messages of several sizes as the ranks of a run do. Idle, they play
ping-pong; half a round trip is one message. Then both compute between messages, and the time of
each end is measured separately: sending, posting a receive, receiving a message that has arrived,
and waking up a receiver that sleeps. Computation displaces caches and lets processors sleep, so
these take longer than with idle ranks.

The children are spawned, not forked: threads of this process would not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.joining import join
from pardnn.backends.torch.comm.nodes import loopback_environment
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.profile.cpu_clock import undisturbed
from pardnn.backends.torch.profile.ping_pong import End, low
from pardnn.cost.host import cpu_name
from pardnn.cost.links import LinkCosts, LinkFit, fit_link
from pardnn.cost.table import CostTable, Entry, Machine, cache_folder, load_table, save_table
from pardnn.errors import RankError, StuckError, UsageError

#: Bytes of the messages, from far below to far above where latency and transfer take equally long.
MESSAGE_BYTES = tuple(1 << power for power in range(6, 25, 2))

#: Round trips per size: 3 long ones show a bandwidth, short ones need more to show a latency.
MIN_TRIPS, MAX_TRIPS = 3, 40
SIZE_SECONDS = 0.05

#: Rounds of messages between computations, per size.
ROUNDS = 15

#: Longest message timed beside computation: longer ones are moved by threads of the library.
BUSY_BYTES = 1 << 20

#: Rows and columns of the layer that stands for computation: some 0.3 ms on a core, 0.5 MB.
_WORK = (64, 256)

#: Computations after which a message has surely arrived; the quartile drops where it has not.
_MEANWHILE = 3

#: Times that messages are measured: where another program took the core for a while, a fit may find
#: that longer messages take no longer.
TRIES = 3

#: Signatures in the cost cache: one of these, followed in all but the last two by the bytes.
_IDLE, _SEND, _TAKE, _POST, _WAKE = (
    f"pardnn.{kind}." for kind in ("message", "send", "take", "post", "wake")
)
_SIZES = {
    _IDLE: MESSAGE_BYTES,
    _SEND: tuple(size for size in MESSAGE_BYTES if size <= BUSY_BYTES),
    _TAKE: tuple(size for size in MESSAGE_BYTES if size <= BUSY_BYTES),
    _POST: (0,),
    _WAKE: (0,),
}


def measure_links(*, timeout_s: float = 60.0, folder: Path | None = None) -> LinkCosts:
    """Measure messages between two local CPU ranks, idle and computing; keep them in the cache.

    Args:
        timeout_s: Seconds after which the ranks are given up.
        folder: The folder of the cost cache; the user's if absent.

    Raises:
        RankError: E601, if a rank fails.
        StuckError: E701, if they do not finish in time.
        UsageError: E232, if times did not grow with the messages at any try.
    """
    for number in range(TRIES):
        entries = {
            text: Entry(seconds=seconds, repetitions=MIN_TRIPS)
            for text, seconds in _bounced(timeout_s).items()
        }
        try:
            costs = _fitted(entries)
            break
        except UsageError:
            if number == TRIES - 1:
                raise
    save_table(CostTable(_machine(), entries), folder or cache_folder())
    return costs


def cached_links(folder: Path | None = None) -> LinkCosts | None:
    """Return what was last measured on this machine with this library; None if nothing was."""
    entries = load_table(_machine(), folder or cache_folder()).entries
    wanted = {f"{kind}{size}" for kind, sizes in _SIZES.items() for size in sizes}
    return _fitted(entries) if wanted <= set(entries) else None


def _machine() -> Machine:
    library = f"torch {importlib.metadata.version('torch')}, gloo, two local ranks"
    return Machine(device=cpu_name(), library=library, threads=1)


def _fitted(entries: Mapping[str, Entry]) -> LinkCosts:
    # In a fixed order, so that a fit from the cache equals the measured one to the last bit.
    def fitted(kind: str) -> LinkFit:
        sizes = _SIZES[kind]
        return fit_link(sizes, [entries[f"{kind}{size}"].seconds for size in sizes])

    return LinkCosts(
        idle=fitted(_IDLE),
        sending=fitted(_SEND),
        taking=fitted(_TAKE),
        posting=entries[f"{_POST}0"].seconds,
        waking=entries[f"{_WAKE}0"].seconds,
    )


def _bounced(timeout_s: float) -> Mapping[str, float]:
    """Run both ranks; return the seconds of rank 0 by signature."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        environment = (
            os.environ
            | loopback_environment()
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        command = [
            sys.executable,
            "-m",
            "pardnn.backends.torch.profile.link_times",
            f"{folder}/store",
        ]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), str(timeout_s)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        end = time.monotonic() + timeout_s
        try:
            texts = [rank.communicate(timeout=max(0.0, end - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise StuckError(
                f"two local ranks did not all_gather {len(MESSAGE_BYTES)} sizes of messages in "
                f"{timeout_s:g} s.\nCheck that this machine's host name resolves to itself."
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, said)) in enumerate(zip(ranks, texts, strict=True)):
        if rank.returncode:
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise RankError(f"rank {number} of 2 failed while measuring links: {last:.300}")
    return json.loads(texts[0][0])


class _Work:
    """What a layer does to caches: a product, and a few small calls."""

    def __init__(self) -> None:
        self.left, self.right = torch.ones(_WORK), torch.ones(_WORK[1], _WORK[1])

    def __call__(self) -> None:
        made = torch.relu(self.left @ self.right)
        made.view(-1)[:64].mul(0.5).add_(1.0).sum()


def _bounce(store: str, rank: int, timeout_s: float) -> dict[str, float]:
    """Measure as one of the two ranks; return seconds by signature of the cost cache."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=wait
    )
    world, compute = join(torch.device("cpu"), timeout_s=timeout_s), _Work()
    assert world.channel is not None
    end = End(world.channel, 1 - rank)
    found = {f"{_IDLE}{size}": _idle(end, size) for size in MESSAGE_BYTES}
    posts: list[float] = []
    for size in _SIZES[_SEND]:
        sent, posted, taken = _busy(end, compute, size)
        found |= {f"{_SEND}{size}": low(sent), f"{_TAKE}{size}": low(taken)}
        posts.append(low(posted))
    found[f"{_POST}0"] = statistics.median(posts)
    least = min(MESSAGE_BYTES)
    woken = low(_woken(end, world, compute, least))
    found[f"{_WAKE}0"] = max(0.0, woken - found[f"{_TAKE}{least}"])
    world.close()
    dist.destroy_process_group()
    return found


def _idle(end: End, size: int) -> float:
    """Return the seconds of one message between idle ranks."""
    buffer = torch.ones(size, dtype=torch.uint8)
    trip = functools.partial(end.trip, size, buffer, is_first=end.rank == 0)
    trip()
    trips = torch.tensor([max(MIN_TRIPS, min(MAX_TRIPS, int(SIZE_SECONDS / trip())))])
    dist.broadcast(trips, 0)  # each rank measured its own time, and both must agree
    return low([trip() for _ in range(int(trips))]) / 2


def _busy(end: End, compute: _Work, size: int) -> tuple[list[float], list[float], list[float]]:
    """Return a rank's own seconds of sends, of posts, and of receives that need not wait.

    Both ranks compute between the messages.
    """
    (mine, theirs), channel = end.specs(size), end.channel
    sent: list[float] = []
    posted: list[float] = []
    taken: list[float] = []

    def post() -> None:
        channel.allocate(theirs)
        channel.receive(theirs)

    with undisturbed() as timed:
        for _ in range(ROUNDS):
            buffer = torch.ones(size, dtype=torch.uint8)
            compute()
            sending = timed(functools.partial(channel.send, mine, buffer))
            for _ in range(_MEANWHILE):
                compute()
            posted.append(timed(post))
            # After the post, since a message outside the sockets leaves only when both ends wait.
            sent.append(sending + timed(functools.partial(channel.wait, mine)))
            taken.append(timed(functools.partial(channel.wait, theirs)))
    return sent, posted, taken


def _woken(end: End, world: World, compute: _Work, size: int) -> list[float]:
    """Return the seconds from the end of a send to the end of the wait that slept for it."""
    mine, theirs = end.specs(size)
    buffer, marks = torch.ones(size, dtype=torch.uint8), []
    for turn in range(2 * ROUNDS):
        if turn % 2 == end.rank:
            for _ in range(10):
                compute()
            end.send(mine, buffer)
        else:
            end.receive(theirs)
        marks.append(time.perf_counter())  # the clocks agree, as both ranks are on one machine
    both = world.all_gather("marks", marks)
    return [both[1 - turn % 2][turn] - both[turn % 2][turn] for turn in range(2 * ROUNDS)]


if __name__ == "__main__":
    result = _bounce(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.write(json.dumps(result) + "\n")
