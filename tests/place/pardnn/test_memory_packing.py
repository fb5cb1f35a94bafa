"""Activations that are larger than parameters are spread like parameters."""

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.pardnn.memory_packing import packed_place
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from tests.place.machines import problem_for
from tests.place.pardnn.test_view_priority import op_of


def test_activations_larger_than_parameters_are_spread() -> None:
    ops, layers, last = [], 12, "x.out"
    ops.append(op_of("x", (), 0.0, 1000))
    for i in range(layers):
        ops.append(op_of(f"p{i}", (), 0.0, 8, memory="residual"))
        ops.append(op_of(f"f{i}", (last, f"p{i}.out"), 1.0, 1000))
        last = f"f{i}.out"
    for i in reversed(range(layers)):
        ops.append(op_of(f"b{i}", (last, f"f{i}.out", f"p{i}.out"), 1.0, 1000))
        last = f"b{i}.out"
    graph = build_graph("deep", ops)
    problem, capacity = problem_for(graph, 4), limits([None] * 4)
    position = file_positions(graph.arrays)
    place = packed_place(problem, position, capacity)
    live = memory_profile_of(graph.arrays, place, position, capacity).top[:, 1]
    alone = memory_profile_of(graph.arrays, np.zeros_like(place), position, capacity).top[0, 1]
    assert live.max() < 0.5 * alone
