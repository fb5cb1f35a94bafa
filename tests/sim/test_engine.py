"""The simulator of a plan against its naive twin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.engine import simulate
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.reference.sim import finish_times
from tests.strategies import graphs


@given(graph=graphs(max_ops=12), seed=st.integers(0, 9), tight=st.booleans())
def test_order(graph: Graph, seed: int, tight: bool) -> None:
    machine = machine_for(graph, cluster_of(3))
    place = random_place(graph, 3, seed)
    if tight:
        position = file_positions(graph.arrays)
        plan = latest_slot_plan(graph.arrays, 3, place, position, first_overwrites(graph))
    else:
        plan = schedule(graph, machine, place)
    expected = finish_times(graph, machine, plan_from_arrays(graph, plan))
    assert expected is not None
    finish = simulate(graph, machine, plan).finish
    assert finish.tolist() == [expected[op.name] for op in graph.ops]


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9))
def test_serial_links_never_help(graph: Graph, seed: int) -> None:
    place = random_place(graph, 3, seed)
    times = []
    for serial in (False, True):
        machine = machine_for(graph, cluster_of(3, serial=serial))
        plan = schedule(graph, machine, place)
        cluster = cluster_of(3, serial=serial)
        assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
        times.append(simulate(graph, machine, plan).busy(place, 3).sum())
    assert times[0] == pytest.approx(times[1])  # the work is the same, whatever the links
