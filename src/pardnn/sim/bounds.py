"""Lower bounds on the makespan: certificates that no plan beats."""

from __future__ import annotations

import numpy as np

from pardnn.graph.csr import GraphArrays
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, fastest_seconds


def critical_path_seconds(arrays: GraphArrays, machine: Machine) -> float:
    """Return the longest path, every op at its fastest and communication free."""
    free = machine._replace(
        latency=np.zeros_like(machine.latency),
        bandwidth=np.full_like(machine.bandwidth, np.inf),
    )
    return float(bottom_levels(arrays, free).max())


def work_seconds(machine: Machine) -> float:
    """Return the time of the whole work spread perfectly over all devices.

    Any weights x over the devices with sum 1 bound it by sum over ops of min over devices of
    x * seconds (duality of the linear program that splits ops freely). Taken is the better of equal
    weights and weights by speed; for devices that differ only in speed, the latter is work / sum
    of speeds.
    """
    per_class = np.bincount(machine.device_class, minlength=len(machine.seconds))
    total = np.where(np.isfinite(machine.seconds), machine.seconds, 0.0).sum(axis=1)
    speed = 1.0 / np.where(total > 0, total, 1.0)
    bounds = [
        (weight[:, None] * machine.seconds).min(axis=0).sum() / (weight @ per_class)
        for weight in (np.ones_like(speed), speed)
    ]
    return float(max(bounds))


def lower_bound_seconds(arrays: GraphArrays, machine: Machine) -> float:
    """Return max(compute-only critical path, work spread over all devices), in seconds."""
    return max(critical_path_seconds(arrays, machine), work_seconds(machine))


def degree_of_parallelism(arrays: GraphArrays, machine: Machine) -> float:
    """Return total work / work on the compute-only critical path (thesis, Fig. 6.1)."""
    path = critical_path_seconds(arrays, machine)
    return float(fastest_seconds(machine).sum()) / path if path > 0 else 1.0
