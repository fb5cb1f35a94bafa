"""Graph slicing against Algorithm 1, written naively."""

from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.sim.levels import slowest_link
from tests.place.machines import problem_for
from tests.reference import pardnn as naive
from tests.strategies import graphs


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
