"""ParDNN by the thesis's steps alone, to attribute results honestly.

Its clusters (Algorithm 1), its mapping (Algorithm 2, Eq. 4.2), its refinement (swaps, then at most
K rounds of critical-path switches), its memory step under TensorFlow's rule of first come, first
served, and the order that this rule gives. What `pardnn` adds is left out: list scheduling, starts
that are not clusters, the choice among placements by the simulator, orders by priority.

What remains of our own: one message per tensor and device; co-location groups; the deviations that
`slicing`, `initial_merge`, `level_aware_balancing`, `swaps`, `critical_path_switch` and
`policy_memory` name; and the rule that the plan must also fit in its own order, which the runtime
follows.
"""

from __future__ import annotations

import time

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays
from pardnn.place.decision import Decision, fitted
from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.problem import problem_of
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.place.thesis.policy_memory import fit_scheduler, scheduled
from pardnn.sim.machine import Machine


def place_thesis(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place by the steps of the thesis; ops run first come, first served.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used: nothing is random.

    Raises:
        InfeasibleError: E301, if its memory step finds no placement that fits; E302, if an op can
            run nowhere.
    """
    del seed
    begin, seconds = time.perf_counter(), {}
    problem = problem_of(closed_arrays(graph), machine)
    clusters = slice_graph(problem, machine.num_devices)
    device, cluster_graph = map_clusters(problem, clusters)
    place = placement(problem, clusters, swap_clusters(problem, clusters, cluster_graph, device))
    for _ in range(machine.num_devices):
        place, switched = switch_critical_path(problem, place)
        if switched == 0:
            break
    seconds["makespan"] = time.perf_counter() - begin
    if all(size is None for size in capacities):
        timeline = scheduled(graph.arrays, machine, place, "fifo")
        return fitted(graph, machine, place, capacities, timeline)._replace(seconds_by_step=seconds)
    begin = time.perf_counter()
    found = fit_scheduler(graph, machine, place, capacities, "fifo", only=True)
    seconds["memory"] = time.perf_counter() - begin
    if found is None:
        raise InfeasibleError(
            "the thesis's memory step finds no placement that fits under its scheduler (fifo).\n"
            "Try pardnn, or auto."
        )
    return found._replace(seconds_by_step=seconds)
