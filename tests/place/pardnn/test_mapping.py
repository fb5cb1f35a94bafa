"""Mapping and swaps: every group whole, on a device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.swaps import swap_clusters
from tests.place.machines import problem_for
from tests.strategies import graphs


@given(graph=graphs(min_ops=2, max_ops=14), num_devices=st.integers(1, 4))
def test_mapping_and_swaps_place_every_group_whole(graph: Graph, num_devices: int) -> None:
    problem = problem_for(graph, num_devices)
    clusters = slice_graph(problem, num_devices)
    device, cluster_graph = map_clusters(problem, clusters)
    swapped = swap_clusters(problem, clusters, cluster_graph, device)
    assert np.all(cluster_graph.begin <= cluster_graph.end)
    for devices in (device, swapped):
        place = placement(problem, clusters, devices)
        assert place.min() >= 0
        assert place.max() < num_devices
        for number in range(len(problem.runs)):
            assert len(set(place[problem.arrays.group == number].tolist())) == 1
