"""Orders and message positions: valid plans, no more memory than their order asks for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.ordering.fit import fit_schedule, fits
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan, limits, memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan, schedule
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, clusters, limited, machine_for
from tests.place.pardnn.test_steps import problem_for
from tests.strategies import FAMILIES, graphs, random_graph


def random_place(graph: Graph, num_devices: int, seed: int) -> np.ndarray:
    group = colocated(graph.arrays, first_overwrites(graph), with_views=bool(seed % 2))
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_devices, int(group.max()) + 1)[group]


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_the_judge_finds_the_emulation_again(graph: Graph, cluster: Cluster, seed: int) -> None:
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


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9), slack=st.sampled_from([0, 1, 30, 10**6]))
def test_squeezed_plans_are_valid_and_within_what_the_order_needs(
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


@given(graph=graphs(max_ops=14), seed=st.integers(1, 9).filter(lambda seed: seed % 2))
def test_curves_of_the_memory_step_are_those_of_tight_plans(graph: Graph, seed: int) -> None:
    place, position = random_place(graph, 3, seed), file_positions(graph.arrays)
    plan = latest_slot_plan(graph.arrays, 3, place, position, first_overwrites(graph))
    problem = problem_for(graph, 3, with_views=True)
    top = memory_profile_of(problem.arrays, place, position, limits([None] * 3)).top[:, 1]
    busy = np.bincount(place, minlength=3) > 0
    assert (np.where(busy, top, 0) >= peaks(graph.arrays, plan)).all()
    first = plan.order_op[plan.order_ptr[plan.message_target]]
    if not (plan.message_post == first).any():
        # A device that has not begun receives at any time, so the sender need not wait.
        assert np.array_equal(np.where(busy, top, 0), peaks(graph.arrays, plan))


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


def test_room_buys_time() -> None:
    graph = random_graph(4, 120, "layered")
    machine = machine_for(graph, cluster_of(3))
    place = random_place(graph, 3, 0)
    overwrites, position = first_overwrites(graph), schedule_rank(graph, machine, place)
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


def schedule_rank(graph: Graph, machine: Machine, place: np.ndarray) -> np.ndarray:
    key = -bottom_levels(graph.arrays, machine, place)
    return emulate(graph.arrays, machine, place, key).dispatch
