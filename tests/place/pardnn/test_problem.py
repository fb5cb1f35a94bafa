"""Levels of the clustered graph against recursion."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.pardnn.problem import clustered_levels
from pardnn.sim.levels import slowest_link
from tests.place.machines import problem_for
from tests.reference import pardnn as naive
from tests.strategies import graphs


@given(graph=graphs(max_ops=12), seed=st.integers(0, 5))
def test_clustered_levels(graph: Graph, seed: int) -> None:
    problem = problem_for(graph)
    of = np.random.default_rng(seed).integers(-1, 3, len(graph.ops))
    top, bottom = clustered_levels(problem, of)
    expected = naive.levels(
        graph, problem.seconds.tolist(), slowest_link(problem.machine), of.tolist(), set()
    )
    assert top.tolist() == [expected[0][i] for i in range(len(of))]
    assert bottom.tolist() == [expected[1][i] for i in range(len(of))]
