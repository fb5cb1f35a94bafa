"""Ping-pong between two ranks: half a round trip is one message.

One rank leads: it chooses sizes and numbers of round trips by the time they take, so that slow
links are measured within the same bounded time as fast ones, and tells the other rank before each
batch.

Messages also take processors, in threads of the process group and of the system, too. On a CPU all
that shows if both ranks compute meanwhile, for as long as two messages take: rounds with a message
each way take longer than rounds without.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.profile.rank_sharing import like_a_step

#: Bytes of the messages that `lead` sends, from a latency's to a bandwidth's.
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
#: These are always sent: without two sizes there is no bandwidth.
_ALWAYS = 64 << 10
#: Round trips per size, and the time after which no more are begun.
MIN_TRIPS, MAX_TRIPS = 3, 30
_SIZE_S = 0.04
_ORDER_BYTES = 24
#: Rounds of work with and without messages, turns of both, seconds of the longest message in them.
_ROUNDS, _TURNS, _BUSY_S = 3, 5, 0.005
#: What is done, in errors about a lost or missing rank.
_WHAT, _OP = "a message to measure", "measuring links"


class Messages(NamedTuple):
    """What messages between two ranks take, in seconds, by their bytes.

    Attributes:
        seconds: From one rank to the other.
        overhead: Of each end, while both compute; empty if it was not measured or is nothing.
    """

    seconds: Mapping[int, float]
    overhead: Mapping[int, float]


class End:
    """One end of messages to and from another rank.

    Args:
        channel: The channel of this rank.
        peer: The other rank.
    """

    def __init__(self, channel: Channel, peer: int) -> None:
        self.rank, self.peer = channel.rank, peer
        self.channel = channel

    def specs(self, size: int) -> tuple[MessageSpec, MessageSpec]:
        """Return the specs of a message of this many bytes from this rank, and of one to it."""
        ends = ((self.rank, self.peer), (self.peer, self.rank))
        mine, theirs = (
            MessageSpec(source, _WHAT, source, target, size, "uint8", (size,), (1,), _OP, _OP)
            for source, target in ends
        )
        return mine, theirs

    def send(self, spec: MessageSpec, value: torch.Tensor) -> None:
        """Send a value and wait until it has left."""
        self.channel.send(spec, value)
        self.channel.wait(spec)

    def receive(self, spec: MessageSpec) -> Any:
        """Receive a message and return its tensor."""
        self.channel.allocate(spec)
        self.channel.receive(spec)
        return self.channel.wait(spec)

    def trip(self, size: int, buffer: torch.Tensor, *, is_first: bool) -> float:
        """Return the seconds of a round trip, which the other end makes too.

        Args:
            size: Bytes of the message each way.
            buffer: A buffer of this size, to be sent.
            is_first: Whether this end sends first.
        """
        mine, theirs = self.specs(size)
        start = time.perf_counter()
        for is_mine in (is_first, not is_first):
            self.send(mine, buffer) if is_mine else self.receive(theirs)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        return time.perf_counter() - start


def low(seconds: list[float]) -> float:
    """Return the lower quartile: other processes only ever make a message slower."""
    return statistics.quantiles(seconds)[0] if len(seconds) > 1 else seconds[0]


def lead(end: End, budget_s: float, *, overhead: bool = False) -> Messages:
    """Measure messages to and from a rank that calls `follow`.

    Args:
        end: This rank's end.
        budget_s: Seconds after which no longer messages are tried.
        overhead: Whether to measure what they take of both ends, of CPU ranks.
    """
    finish = time.perf_counter() + budget_s
    found: dict[int, float] = {}
    for size in SIZES:
        left = finish - time.perf_counter()
        if size > _ALWAYS and 2 * (MIN_TRIPS + 1) * _extrapolated(found, size) > left:
            break
        warm = _lot(end, _Lot(size, 1))[0]  # opens TCP windows and buffers
        count = max(MIN_TRIPS, min(MAX_TRIPS, int(_SIZE_S / warm)))
        found[size] = low(_lot(end, _Lot(size, count))) / 2
    own = _overhead(end, found) if overhead and end.channel.device.type == "cpu" else {}
    _lot(end, _Lot(0, 0))
    return Messages(found, own)


def _extrapolated(found: dict[int, float], size: int) -> float:
    """Estimate the seconds of a longer message from the shortest and the longest so far."""
    least, most = min(found), max(found)
    slope = max(0.0, found[most] - found[least]) / (most - least)
    return found[most] + (size - most) * slope


def _overhead(end: End, seconds: dict[int, float]) -> dict[int, float]:
    """Return what a short and a long message take of each end that computes, by their bytes.

    Empty where the link is so slow that it makes no difference.
    """
    sizes = [size for size, each in seconds.items() if each <= _BUSY_S]
    if len(sizes) < 2:
        return {}
    unit = _lot(end, _Lot(0, 1, 1))[0]
    work = max(1, math.ceil(2 * seconds[sizes[-1]] / unit))
    taken: dict[int, list[float]] = {0: [], sizes[0]: [], sizes[-1]: []}
    for _ in range(_TURNS):  # in turns, as a machine is faster at one time than at another
        for size, rounds in taken.items():
            rounds += _lot(end, _Lot(size, _ROUNDS, work))
    alone, *with_messages = map(statistics.median, taken.values())
    return {
        size: max(0.0, each - alone) / 2
        for size, each in zip((sizes[0], sizes[-1]), with_messages, strict=True)
    }


def follow(end: End) -> None:
    """Make the round trips of a rank that calls `lead`."""
    _, theirs = end.specs(_ORDER_BYTES)
    while True:
        lot = _Lot(*end.receive(theirs).view(torch.int64).tolist())
        if lot.count == 0:
            return
        _done(end, lot, is_first=False)


class _Lot(NamedTuple):
    """What both ends do so many times: a trip; or a message each way, while both work."""

    size: int
    count: int
    work: int = 0


def _lot(end: End, lot: _Lot) -> list[float]:
    """Tell the other end, do the lot, and return the seconds of each."""
    order = torch.tensor(lot, device=end.channel.device)
    end.send(end.specs(_ORDER_BYTES)[0], order.view(torch.uint8))
    return _done(end, lot, is_first=True)


def _done(end: End, lot: _Lot, *, is_first: bool) -> list[float]:
    buffer = torch.ones(lot.size, dtype=torch.uint8, device=end.channel.device)
    if not lot.work:
        return [end.trip(lot.size, buffer, is_first=is_first) for _ in range(lot.count)]
    work = like_a_step()
    return [_round(end, buffer, work, lot.work) for _ in range(lot.count)]


def _round(end: End, buffer: torch.Tensor, work: Callable[[], None], times: int) -> float:
    """Return the seconds of some work, during which a message goes each way if it has bytes."""
    (mine, theirs), channel = end.specs(buffer.nbytes), end.channel
    begin = time.perf_counter()
    if buffer.nbytes:
        channel.allocate(theirs)
        channel.receive(theirs)
        channel.send(mine, buffer)
    for _ in range(times):
        work()
    if buffer.nbytes:
        channel.wait(mine)
        channel.wait(theirs)
    return time.perf_counter() - begin
