"""A network link of a chosen bandwidth and latency between two network namespaces, in user space.

    python -m testbed.slow_link NODE0 NODE1 --bandwidth 125e6 --latency 1e-3

The kernel's own emulation of latency, `tc qdisc ... netem`, is missing in many kernels (those of
small virtual machines); `tc ... tbf` has a bandwidth and no latency. So each namespace gets a TUN
device, and this process carries the packets between the two: a packet leaves when those before it
have left, takes its bytes / bandwidth, and arrives `latency` seconds later, in each direction on
its own. What does not fit the queue is dropped, as a switch drops it. The link is transparent: any
program in the two namespaces uses it. It takes some of a core's time while packets flow.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

#: Of the two ends.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: Largest packet: jumbo frames, which this process can carry at 10 Gbit/s.
MTU = 9000
#: Longest queue in a direction: what a switch may hold.
QUEUE_BYTES = 16 << 20
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def open_tun(namespace: str, address: str) -> int:
    """Enter a namespace, make its end of the link, and return the end's file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    os.close(handle)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"slow0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        ["ip", "address", "add", f"{address}/24", "dev", "slow0"],
        ["ip", "link", "set", "slow0", "mtu", str(MTU), "up"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    return tun


class Direction:
    """Packets on their way from one end to the other."""

    def __init__(self, source: int, target: int, bandwidth: float, latency: float) -> None:
        self.source, self._target = source, target
        self._bandwidth, self._latency = bandwidth, latency
        self._free, self._waiting = 0.0, 0
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read what the source has sent."""
        while True:
            try:
                packet = os.read(self.source, MTU + 64)
            except BlockingIOError:
                return
            if self._waiting + len(packet) > QUEUE_BYTES:
                continue
            self._free = max(self._free, time.monotonic()) + len(packet) / self._bandwidth
            self._queue.append((self._free + self._latency, packet))
            self._waiting += len(packet)

    def deliver(self) -> float | None:
        """Write what is due; return the time of the next packet, None without one."""
        while self._queue:
            due, packet = self._queue[0]
            if due > time.monotonic():
                return due
            self._queue.popleft()
            self._waiting -= len(packet)
            os.write(self._target, packet)
        return None


def carry(ends: tuple[int, int], bandwidth: float, latency: float) -> None:
    """Carry packets between two ends until this process is ended."""
    ways = [Direction(a, b, bandwidth, latency) for a, b in (ends, ends[::-1])]
    while True:
        due = [when for way in ways if (when := way.deliver()) is not None]
        rest = max(0.0, min(due) - time.monotonic()) if due else None
        ready = select.select(ends, [], [], rest)[0]
        for way in ways:
            if way.source in ready:
                way.take()


def main(args: list[str] | None = None) -> None:
    """Make the link, say so, and carry packets."""
    parser = argparse.ArgumentParser(description="Join two network namespaces.")
    parser.add_argument("nodes", nargs=2, help="network namespaces that exist")
    parser.add_argument("--bandwidth", type=float, default=125e6, help="bytes/s")
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds one way")
    given = parser.parse_args(args)
    ends = (open_tun(given.nodes[0], ADDRESSES[0]), open_tun(given.nodes[1], ADDRESSES[1]))
    os.setpriority(os.PRIO_PROCESS, 0, -15)  # the ranks must not make the link slower
    sys.stdout.write("up\n")
    sys.stdout.flush()
    carry(ends, given.bandwidth, given.latency)


if __name__ == "__main__":
    main()
