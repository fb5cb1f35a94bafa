"""Everything on one device: the fastest one that can run it all and hold it."""

from __future__ import annotations

import numpy as np

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.decision import Decision
from pardnn.place.ordering.fit import fit_schedule
from pardnn.sim.machine import Machine


def place_single(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place all ops on one device.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if no device can run and hold everything.
    """
    del seed
    seconds = machine.seconds.sum(axis=1)[machine.device_class]
    tried: set[tuple[int | None, int]] = set()
    for device in np.argsort(seconds, kind="stable").tolist():
        if not np.isfinite(seconds[device]):
            break
        kind = capacities[device], int(machine.device_class[device])
        if kind in tried:  # without messages, devices that are alike do alike
            continue
        tried.add(kind)
        place = np.full(len(graph.ops), device, dtype=np.int64)
        plan = fit_schedule(graph, machine, place, capacities)
        if plan is not None:
            return Decision(plan)
    raise InfeasibleError("no single device can run and hold the whole step.")
