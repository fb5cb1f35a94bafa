"""Memory-constrained schedules: valid, and as fast as memory allows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan, memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.strategies import graphs, random_graph


def schedule_positions(graph: Graph, machine: Machine, place: np.ndarray) -> np.ndarray:
    key = -bottom_levels(graph.arrays, machine, place)
    return emulate(graph.arrays, machine, place, key).dispatch


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9), slack=st.sampled_from([0, 1, 30, 10**6]))
def test_plans_are_valid_and_within_what_the_order_needs(
    graph: Graph, seed: int, slack: int
) -> None:
    cluster = cluster_of(3)
    machine = machine_for(graph, cluster)
    place, position = random_place(graph, 3, seed), file_positions(graph.arrays)
    overwrites = first_overwrites(graph)
    least = peaks(graph.arrays, latest_slot_plan(graph.arrays, 3, place, position, overwrites))
    capacities = [int(peak) + slack for peak in least]
    plan = memory_bounded_plan(graph.arrays, machine, place, position, capacities, overwrites)
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    assert fits(graph.arrays, plan, capacities)
    simulate(graph, machine, plan)  # raises on a deadlock


def test_room_buys_time() -> None:
    graph = random_graph(4, 120, "layered")
    machine = machine_for(graph, cluster_of(3))
    place = random_place(graph, 3, 0)
    overwrites, position = first_overwrites(graph), schedule_positions(graph, machine, place)
    tight = latest_slot_plan(graph.arrays, 3, place, position, overwrites)
    least = [int(peak) for peak in peaks(graph.arrays, tight)]
    times = [
        simulate(
            graph,
            machine,
            memory_bounded_plan(graph.arrays, machine, place, position, c, overwrites),
        ).makespan
        for c in (least, [peak * 4 for peak in least])
    ]
    assert times[1] < times[0]
    free = simulate(graph, machine, schedule(graph, machine, place)).makespan
    assert times[1] <= free * (1 + 1e-12)
