"""Orders and message positions: valid plans, no more memory than their order asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import fit_schedule, fits
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, clusters, limited, machine_for, random_place
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_the_simulator_finds_the_emulation_again(graph: Graph, cluster: Cluster, seed: int) -> None:
    cluster = cluster_of(cluster.num_devices, serial=cluster.link_model == "serial")
    machine = machine_for(graph, cluster)
    place = random_place(graph, cluster.num_devices, seed)
    key = -bottom_levels(graph.arrays, machine, place)
    timeline = emulate(graph.arrays, machine, place, key)
    overwrites = first_overwrites(graph)
    plan = ordered_plan(graph.arrays, machine.num_devices, place, timeline, overwrites)
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    if len(overwrites) == 0:  # a send that must leave before its tensor is overwritten may wait
        assert simulate(graph, machine, plan).makespan <= timeline.makespan * (1 + 1e-12)


@pytest.mark.jit
def test_a_placement_that_fits_in_some_order_is_not_refused() -> None:
    for seed in range(20):
        graph = random_graph(seed, 40, FAMILIES[seed % len(FAMILIES)])
        place, position = random_place(graph, 2, seed), file_positions(graph.arrays)
        machine = machine_for(graph, cluster_of(2))
        tight = latest_slot_plan(graph.arrays, 2, place, position, first_overwrites(graph))
        capacities = [int(peak) for peak in peaks(graph.arrays, tight)]
        plan = fit_schedule(graph, machine, place, capacities)
        assert plan is not None
        assert fits(graph.arrays, plan, capacities)
        within = limited(cluster_of(2), max(capacities))
        assert plan_problems(graph, plan_from_arrays(graph, plan), within) == []
