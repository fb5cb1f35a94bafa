"""Durations and links as arrays for kernels: costs and cluster together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import UsageError

#: A step's seconds stay below it: sums with those of messages are finite, in nanoseconds too.
MAX_SECONDS = 1e290


class Machine(NamedTuple):
    """Durations and links. Devices of equal type and speed are one class.

    Attributes:
        seconds: Of each op on each class; infinite where the class cannot run it.
        device_class: Row of `seconds` of each device.
        latency: Seconds, from a device to another.
        bandwidth: Bytes per second, from a device to another.
        serial: 1: one transfer at a time per directed link.
    """

    seconds: Float64[ndarray, "f n"]
    device_class: Int64[ndarray, " k"]
    latency: Float64[ndarray, "k k"]
    bandwidth: Float64[ndarray, "k k"]
    serial: int

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.device_class)


def machine_of(costs: Costs, cluster: Cluster) -> Machine:
    """Return the arrays of `cluster` under `costs`.

    Raises:
        UsageError: E235, if the seconds of all ops add up to no finite number.
    """
    classes: dict[tuple[str, float], int] = {}
    device_class = [
        classes.setdefault((device.type, device.speed), len(classes)) for device in cluster.devices
    ]
    num_ops = len(next(iter(costs.seconds.values())))
    nowhere = np.full(num_ops, np.inf)
    with np.errstate(over="ignore"):
        rows = [costs.seconds.get(kind, nowhere) / speed for kind, speed in classes]
    for (kind, speed), row in zip(classes, rows, strict=True):
        known = np.isfinite(costs.seconds.get(kind, nowhere))
        if row[known].max(initial=0.0) > MAX_SECONDS / max(num_ops, 1):
            raise UsageError(
                f"the seconds of the ops on devices of type {kind!r:.40} and speed {speed:g} are "
                f"up to {row[known].max():.3g}: a step of {num_ops} of them has no finite time.\n"
                "Check the unit: `seconds` are seconds.",
                code="E235",
            )
    return Machine(
        seconds=np.ascontiguousarray(rows, dtype=np.float64),
        device_class=np.array(device_class, dtype=np.int64),
        latency=cluster.arrays.latency.copy(),
        bandwidth=cluster.arrays.bandwidth.copy(),
        serial=int(cluster.link_model == "serial"),
    )


def restricted(machine: Machine, allowed: Bool[ndarray, "n k"]) -> Machine:
    """Return a machine on which each op can run on the devices allowed to it alone."""
    seconds = machine.seconds[machine.device_class].copy()
    seconds[~allowed.T] = np.inf
    return machine._replace(seconds=seconds, device_class=np.arange(machine.num_devices))


def fastest_seconds(machine: Machine) -> Float64[ndarray, " n"]:
    """Return each op's duration on the device that runs it fastest."""
    return machine.seconds.min(axis=0)


def serial_seconds(machine: Machine) -> float:
    """Return the shortest duration of the whole step on one device; infinite if none runs all."""
    return float(machine.seconds.sum(axis=1).min())


def with_slower_links(machine: Machine, times: float) -> Machine:
    """Return a machine on which messages take so many times as long.

    Args:
        machine: Durations and links.
        times: 1.0 leaves it as it is.
    """
    if times == 1.0:
        return machine
    return machine._replace(latency=machine.latency * times, bandwidth=machine.bandwidth / times)
