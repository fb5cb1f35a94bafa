"""Co-location groups against their naive twin."""

from hypothesis import given

from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.ordering.schedule import first_overwrites
from tests.reference import pardnn as naive
from tests.strategies import graphs


@given(graph=graphs(max_ops=12))
def test_groups_close_over_written_storages(graph: Graph) -> None:
    numbers = colocated(graph.arrays, first_overwrites(graph))
    sets: dict[int, set[int]] = {}
    for op, number in enumerate(numbers.tolist()):
        sets.setdefault(number, set()).add(op)
    assert sorted(sets.values(), key=min) == naive.closed_groups(graph)
