"""Ping-pong between two ranks: half a round trip is one message.

One rank leads: it chooses sizes and numbers of round trips by the time they take, so that slow
links are measured within the same bounded time as fast ones, and tells the other rank before each
batch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.wire_format import MessageSpec

#: Bytes of the messages that `lead` sends, from a latency's to a bandwidth's.
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
#: These are always sent: without two sizes there is no bandwidth.
_ALWAYS = 64 << 10
#: Round trips per size, and the time after which no more are begun.
MIN_TRIPS, MAX_TRIPS = 3, 30
_SIZE_S = 0.04
_ORDER_BYTES = 16
#: What is done, in errors about a lost or missing rank.
_WHAT, _OP = "a message to measure", "measuring links"


class Trip(NamedTuple):
    """What a message of some size takes, in seconds.

    Attributes:
        seconds: From one rank to the other.
        overhead: Of processors at each end, in all threads.
    """

    seconds: float
    overhead: float


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


def lead(end: End, budget_s: float) -> dict[int, Trip]:
    """Measure messages to and from a rank that calls `follow`.

    Args:
        end: This rank's end.
        budget_s: Seconds after which no longer messages are tried.

    Returns:
        What one message takes, by its bytes.
    """
    finish = time.perf_counter() + budget_s
    found: dict[int, Trip] = {}
    for size in SIZES:
        left = finish - time.perf_counter()
        if size > _ALWAYS and 2 * (MIN_TRIPS + 1) * _extrapolated(found, size) > left:
            break
        warm = _lot(end, size, 1)[0]  # opens TCP windows and buffers
        count = max(MIN_TRIPS, min(MAX_TRIPS, int(_SIZE_S / warm)))
        before = time.process_time()
        taken = _lot(end, size, count)
        found[size] = Trip(low(taken) / 2, (time.process_time() - before) / (2 * count))
    _order(end, 0, 0)
    return found


def _extrapolated(found: dict[int, Trip], size: int) -> float:
    """Estimate the seconds of a longer message from the shortest and the longest so far."""
    least, most = min(found), max(found)
    slope = max(0.0, found[most].seconds - found[least].seconds) / (most - least)
    return found[most].seconds + (size - most) * slope


def follow(end: End) -> None:
    """Make the round trips of a rank that calls `lead`."""
    _, theirs = end.specs(_ORDER_BYTES)
    while True:
        size, count = end.receive(theirs).view(torch.int64).tolist()
        if count == 0:
            return
        buffer = torch.ones(size, dtype=torch.uint8, device=end.channel.device)
        for _ in range(count):
            end.trip(size, buffer, is_first=False)


def _lot(end: End, size: int, count: int) -> list[float]:
    _order(end, size, count)
    buffer = torch.ones(size, dtype=torch.uint8, device=end.channel.device)
    return [end.trip(size, buffer, is_first=True) for _ in range(count)]


def _order(end: End, size: int, count: int) -> None:
    order = torch.tensor([size, count], device=end.channel.device)
    end.send(end.specs(_ORDER_BYTES)[0], order.view(torch.uint8))
