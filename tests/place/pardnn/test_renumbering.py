"""A renumbered graph is the same graph."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.schedule import first_overwrites, free_plan
from pardnn.place.pardnn.renumbering import (
    original_plan,
    renumbered,
    renumbered_overwrites,
    renumbering_by_priority,
)
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, machine_for
from tests.reference import pardnn as naive
from tests.strategies import graphs


@given(graph=graphs(max_ops=14, shuffled=True), num_devices=st.integers(1, 3))
def test_another_numbering_is_the_same_graph(graph: Graph, num_devices: int) -> None:
    a, machine = graph.arrays, machine_for(graph, cluster_of(num_devices))
    numbers = renumbering_by_priority(a, machine)
    here = renumbered(a, numbers)
    written = renumbered_overwrites(first_overwrites(graph), numbers)
    successors = [[] for _ in range(a.num_ops)]
    for pair in op_edges(here).tolist():
        assert pair[0] < pair[1]
        successors[numbers.op[pair[0]]].append(int(numbers.op[pair[1]]))
    assert [sorted(row) for row in successors] == [
        sorted(set(row)) for row in naive.op_successors(graph)
    ]
    assert np.array_equal(here.tensor_bytes, a.tensor_bytes[numbers.tensor])
    assert np.array_equal(numbers.op[here.tensor_op], a.tensor_op[numbers.tensor])
    group = colocated(here, written)[numbers.op_here]
    own = colocated(a, first_overwrites(graph))
    assert len(set(zip(group.tolist(), own.tolist(), strict=True))) == len(set(own.tolist()))
    place = np.random.default_rng(0).integers(0, num_devices, a.num_ops)
    plan = free_plan(a, num_devices, place, file_positions(a))
    there = free_plan(here, num_devices, place[numbers.op], file_positions(here))
    assert np.array_equal(peaks(a, plan), peaks(a, original_plan(there, numbers)))
    assert np.array_equal(peaks(a, plan), peaks(here, there))
