"""Ops dealt out in topological order, one device after the other (thesis, 6.4)."""

from __future__ import annotations

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.sim.machine import Machine


def place_round_robin(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place the i-th op in topological order on device i mod K.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit.
    """
    del seed
    target = np.empty(len(graph.ops), dtype=np.int64)
    target[graph.arrays.topological] = np.arange(len(target)) % machine.num_devices
    arrays = closed_arrays(graph)
    place = legal_placement(arrays, runnable(arrays, machine), target)
    return fitted(graph, machine, place, capacities)
