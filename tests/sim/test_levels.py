"""Top and bottom levels are longest paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op
from pardnn.sim.bounds import critical_path_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels, slowest_link, top_levels
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


def test_the_slowest_link_is_that_of_two_devices() -> None:
    """Per field: of two links with 2 s and 1 byte/s, and 0.5 s and 8 bytes/s, 2 s and 1 byte/s."""
    graph = build_graph("one", [Op(name="a", kind="op", seconds={"accelerator": 1.0})])
    machine = machine_for(graph, cluster_of(3, latency=0.5, bandwidth=8.0))
    assert slowest_link(machine) == (0.5, 1 / 8)
    latency, bandwidth = machine.latency.copy(), machine.bandwidth.copy()
    latency[0, 2] = 2.0
    bandwidth[2, 1] = 1.0
    assert slowest_link(machine._replace(latency=latency, bandwidth=bandwidth)) == (2.0, 1.0)
    missing = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    assert slowest_link(machine._replace(latency=missing)) == (0.0, 0.0)
    assert slowest_link(machine_for(graph, cluster_of(1))) == (0.0, 0.0)
