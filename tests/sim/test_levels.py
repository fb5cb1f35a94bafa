"""Top and bottom levels are longest paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.sim.bounds import critical_path_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels, top_levels
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.strategies import graphs


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9))
def test_levels_are_longest_paths(graph: Graph, seed: int) -> None:
    machine = machine_for(graph, cluster_of(2))
    place = random_place(graph, 2, seed)
    top = top_levels(graph.arrays, machine, place)
    bottom = bottom_levels(graph.arrays, machine, place)
    longest = (top + bottom).max()
    assert longest == pytest.approx(bottom.max())
    assert longest <= simulate(graph, machine, schedule(graph, machine, place)).makespan + 1e-9
    assert critical_path_seconds(graph.arrays, machine) <= longest + 1e-9
