"""Graph slicing against Algorithm 1, written naively."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.pardnn import slicing
from pardnn.place.pardnn.problem import clustered_levels
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.sim.levels import slowest_link
from tests.place.machines import problem_for
from tests.reference import pardnn as naive
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(max_ops=12, shuffled=True), num_primaries=st.integers(1, 3))
def test_slicing(graph: Graph, num_primaries: int) -> None:
    problem = problem_for(graph)
    clusters = slice_graph(problem, num_primaries)
    paths = naive.slices(
        graph,
        problem.seconds.tolist(),
        slowest_link(problem.machine),
        problem.arrays.group.tolist(),
        num_primaries,
    )
    assert clusters.head.tolist() == [path[0] if path else -1 for path in paths]
    assert clusters.tail.tolist() == [path[-1] if path else -1 for path in paths]
    for number, path in enumerate(paths):
        assert all(clusters.of[op] == number for op in path)


@pytest.mark.parametrize("seed", range(6))
def test_of_many_ops_the_longest_path_that_is_left_begins_a_secondary(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted by sums that may differ by rounding."""
    monkeypatch.setattr(slicing, "MANY_KEYS", 0)
    problem = problem_for(random_graph(seed, 30, FAMILIES[seed], memory=False))
    clusters = slice_graph(problem, 2)
    level = np.sum(clustered_levels(problem, np.where(clusters.of < 2, clusters.of, -1)), axis=0)
    for number in range(2, len(clusters.head)):
        left = clusters.of >= number
        assert level[clusters.head[number]] >= level[left].max() * (1 - 1e-9)
