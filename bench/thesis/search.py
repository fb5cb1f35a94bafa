"""The largest batch that fits, and what it yields: Table 6.1 and Fig. 6.1 of the thesis.

Batch sizes are powers of two, as in the thesis. A search starts where the bytes of one device
running everything, spread evenly, would fill all devices, and doubles or halves until the largest
size that fits has been planned and the next one has been refused. Where no power of two is the
answer to "which batch fits?", the answer is a range: it fits at B and not at 2 B.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.thesis.batch import captured, model
from pardnn.api.batch_scaling import graph_at
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.decision import Decision
from pardnn.place.pardnn import place_pardnn
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.check import capacities
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine, machine_of
from pardnn.sim.peak import one_device_peak, peaks

PRESET, RESERVE, LARGEST = "dgx-v100", 0.1, 1 << 16


class Planned(NamedTuple):
    """One plan: simulated seconds, peak bytes per device, CPU seconds of planning."""

    decision: Decision
    makespan: float
    peak: list[int]
    cpu_s: float


def cluster_of(num_devices: int) -> Cluster:
    """Return so many V100 of 32 GB behind NVSwitch."""
    return Cluster.preset(PRESET, num_devices)


def timed_plan(
    graph: Graph,
    machine: Machine,
    limits: list[int | None],
    place: Callable[..., Decision] = place_pardnn,
) -> Planned:
    """Plan under limits in bytes.

    Args:
        graph: What is planned.
        machine: Its devices.
        limits: Bytes of each device; None for no limit.
        place: The algorithm.

    Raises:
        InfeasibleError: E301, if no plan was found that fits.
    """
    begin = time.process_time()
    decision = place(graph, machine, limits)
    cpu = time.process_time() - begin
    makespan = simulate(graph, machine, decision.plan).makespan
    return Planned(decision, makespan, peaks(graph.arrays, decision.plan).tolist(), cpu)


class Search:
    """The plans of one model, by number of devices and batch size; each is made once."""

    def __init__(self, name: str, place: Callable[..., Decision] = place_pardnn) -> None:
        """Take a graph of `testbed/graphs/` that has a rule, and an algorithm."""
        self.name, self.place = name, place
        self.made: dict[tuple[int, int], Planned | None] = {}
        self.refusals_s = 0.0

    def _peak(self, batch_size: int) -> int:
        return one_device_peak(graph_at(captured(self.name), batch_size).arrays)

    def fits(self, num_devices: int, batch_size: int) -> bool:
        """Return whether a plan was found."""
        key = num_devices, batch_size
        if key not in self.made:
            graph, costs = model(self.name, batch_size)
            cluster = cluster_of(num_devices)
            begin = time.process_time()
            try:
                usable = capacities(cluster, RESERVE)
                found = timed_plan(graph, machine_of(costs, cluster), usable, self.place)
            except InfeasibleError:
                found = None
                self.refusals_s += time.process_time() - begin
            self.made[key] = found
        return self.made[key] is not None

    def largest(self, num_devices: int) -> int:
        """Return the largest power of two that fits; 0 if a batch of 1 does not."""
        cluster = cluster_of(num_devices)
        usable = sum(size or 0 for size in capacities(cluster, RESERVE))
        batch = 1
        while batch < LARGEST and self._peak(2 * batch) <= usable:
            batch *= 2
        if self.fits(num_devices, batch):
            while batch < LARGEST and self.fits(num_devices, 2 * batch):
                batch *= 2
            return batch
        while batch > 1:
            batch //= 2
            if self.fits(num_devices, batch):
                return batch
        return 0


def search_row(name: str, devices: tuple[int, ...]) -> dict[str, Any]:
    """Return the largest batch on each number of devices, with the figures of its plan."""
    search, thesis = Search(name), Search(name, place_thesis)
    cells, thesis_cells = ({
        str(k): _cell(batch := each.largest(k), each.made.get((k, batch))) for k in devices
    } for each in (search, thesis))  # fmt: skip
    graph = captured(name).graph
    refused = sum(1 for planned in search.made.values() if planned is None)
    return {
        "graph": name, "ops": len(graph.ops), "cells": cells, "plans": len(search.made),
        "thesis_cells": thesis_cells,
        "refused": refused, "refusals_cpu_s": search.refusals_s,
    }  # fmt: skip


def given_row(name: str, batches: dict[int, int]) -> dict[str, Any]:
    """Return the figures of plans at given batch sizes, by number of devices.

    One device is given all the memory it needs: it is what others are compared with.
    """
    cells: dict[str, Any] = {}
    thesis_cells: dict[str, Any] = {}
    for k, batch in batches.items():
        graph, costs = model(name, batch)
        cluster = cluster_of(k)
        limits: list[int | None] = capacities(cluster, RESERVE) if k > 1 else [None]
        for into, place in ((cells, place_pardnn), (thesis_cells, place_thesis)):
            try:
                planned = timed_plan(graph, machine_of(costs, cluster), limits, place)
            except InfeasibleError:
                planned = None
            into[str(k)] = _cell(batch, planned)
    ops = len(captured(name).graph.ops)
    return {"graph": name, "ops": ops, "cells": cells, "thesis_cells": thesis_cells}


def _cell(batch: int, planned: Planned | None) -> dict[str, Any]:
    if planned is None:
        return {"batch": batch}
    return {
        "batch": batch,
        "makespan_s": planned.makespan,
        "samples_per_s": batch / planned.makespan,
        "peak_bytes": max(planned.peak),
        "cpu_s": planned.cpu_s,
        "moved": planned.decision.moved_ops,
        "seconds_by_step": dict(planned.decision.seconds_by_step),
    }
