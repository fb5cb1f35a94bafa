"""Shares of different devices: how much each one gets of everything that `tofu` cuts.

Problem: with equal parts, all wait for the slowest device, and the smallest sets the limit.
Idea: parts in the ratio of the devices' speeds, but none larger than its device's memory. Each mesh
axis has a share for each of its coordinates, so blocks are as wide in one group as in any other,
and partial results of two groups lie over each other. Where no such product is near to what devices
should get, a mesh of one axis has the shares themselves. Layouts are searched for as many devices
of the mean speed; the simulator times the plan on the real ones, beside the plan of equal parts.
Complexity: O(devices^2); a search and a few simulations for each mesh.
Reference: none; Tofu (EuroSys 2019), section 9, leaves unlike devices open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.plan.mesh import Mesh, make_mesh
from pardnn.planner.problem import Problem
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import Sharding
from pardnn.sim.peak import one_device_peak

#: Sums of the shares of an axis. Powers of two divide what sizes of tensors do, so cuts of a batch
#: and of the batch times the sequence meet; the larger one is nearer to the devices' speeds.
TOTALS = (16, 64)

#: Devices that differ by less than this ratio get equal shares.
ALIKE = 1.05

#: Times its fraction of the one-device peak that a device is taken to need, tried one after the
#: other where nothing fits: fetched regions come on top of its blocks.
SLACKS = (1.2, 1.6, 2.4)


def shared_shardings(problem: Problem, slack: float, objective: str) -> Iterator[Sharding]:
    """Yield shardings with unequal shares; none where devices should get equal ones.

    Args:
        problem: A captured graph, and what it runs on.
        slack: See `SLACKS`.
        objective: Of the layouts, "bytes" or "seconds"; shares are by the problem's own.
    """
    fractions = device_fractions(problem, slack)
    if fractions.max() <= ALIKE * fractions.min():
        return
    size = len(fractions)
    limits = [
        usable / (size * fraction)  # as if each got an equal share
        for usable, fraction in zip(problem.capacities, fractions, strict=True)
        if usable is not None
    ]
    for shape in _shapes(mesh_of(problem.cluster).shape, fractions):
        found = find_sharding(
            problem.graph,
            _even(problem),
            objective,
            mesh=make_mesh(shape),
            costs=problem.costs,
            capacity=min(limits, default=None),
        ).sharding
        meshes = [_mesh(shape, fractions, total) for total in TOTALS]
        yield from (replace(found, mesh=mesh) for mesh in dict.fromkeys(meshes))


def device_fractions(problem: Problem, slack: float) -> Float64[ndarray, " k"]:
    """Return the fraction of all work and memory that each device should get; the sum is 1.

    Args:
        problem: Has costs and limits.
        slack: See `SLACKS`.
    """
    speeds = np.ones(problem.cluster.num_devices)
    if problem.options.is_timed:
        speeds = 1 / _step_seconds(problem)
    needed = slack * max(one_device_peak(problem.graph.arrays), 1)
    most = np.array([math.inf if u is None else u / needed for u in problem.capacities])
    if most.sum() <= 1:
        return most / most.sum()
    is_full = np.zeros(len(speeds), dtype=bool)
    while True:  # what one device has no memory for, the others get
        left = 1 - most[is_full].sum()
        found = np.where(is_full, most, left * speeds / speeds[~is_full].sum())
        over = ~is_full & (found > most)
        if not over.any():
            return found
        is_full |= over


def _step_seconds(problem: Problem) -> Float64[ndarray, " k"]:
    """Seconds on each device of all ops that every device can run."""
    rows = [problem.costs.on(device.type, device.speed) for device in problem.cluster.devices]
    seconds = np.array(rows)
    total = seconds[:, np.isfinite(seconds).all(axis=0)].sum(axis=1)
    return np.maximum(total, np.finfo(np.float64).tiny)


def _even(problem: Problem) -> Cluster:
    """Return a cluster of as many devices that together take as long as the unlike ones."""
    seconds = _step_seconds(problem)
    devices = problem.cluster.devices
    fastest = devices[int(seconds.argmin())]
    mean = len(seconds) / (1 / seconds).sum()
    speed = fastest.speed * float(seconds.min() / mean)
    return replace(
        problem.cluster,
        devices=tuple(replace(each, type=fastest.type, speed=speed) for each in devices),
    )


def _shapes(shape: tuple[int, ...], fractions: Float64[ndarray, " k"]) -> Iterator[tuple[int, ...]]:
    """Yield the shape of a cluster's mesh, and one axis where shares are no product along it."""
    yield shape
    mesh = _mesh(shape, fractions, max(TOTALS))
    one = _mesh((mesh.size,), fractions, max(TOTALS))
    if len(shape) > 1 and _excess(mesh, fractions) > ALIKE * _excess(one, fractions):
        yield (mesh.size,)


def _excess(mesh: Mesh, fractions: Float64[ndarray, " k"]) -> float:
    """Return the largest ratio of a device's share to its fraction."""
    return float((np.array(mesh.fractions()) / fractions).max())


def _mesh(shape: tuple[int, ...], fractions: Float64[ndarray, " k"], total: int) -> Mesh:
    """Return a mesh whose shares along each axis are those of its groups of devices."""
    grid = fractions.reshape(shape)
    rows: list[tuple[int, ...]] = []
    for axis in range(len(shape)):
        others = tuple(each for each in range(len(shape)) if each != axis)
        rows.append(whole_shares(grid.sum(axis=others).tolist(), total))
    return make_mesh(shape, rows)


def whole_shares(fractions: Sequence[float], total: int) -> tuple[int, ...]:
    """Return whole numbers in the ratio of fractions, at least 1 each; (1, 1, ...) if all alike.

    Args:
        fractions: Positive.
        total: Their sum, unless that leaves some less than 1. What rounding leaves goes where it
            adds the least part of a share.
    """
    if max(fractions) <= ALIKE * min(fractions):
        return (1,) * len(fractions)
    exact = [each * total / sum(fractions) for each in fractions]
    found = [max(1, int(each)) for each in exact]
    for _ in range(total - sum(found)):
        found[min(range(len(found)), key=lambda n: (found[n] + 1) / exact[n])] += 1
    return tuple(found)
