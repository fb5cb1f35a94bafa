"""Views run with what they view, and large activations are spread like parameters."""

import numpy as np
from hypothesis import given

from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph, MemoryKind, Op, Tensor
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.pardnn.memory_packing import packed_place
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.view_priority import views_of, with_bases
from pardnn.sim.levels import bottom_levels
from tests.place.pardnn.test_steps import problem_for
from tests.strategies import graphs


def op_of(
    name: str,
    reads: tuple[str, ...],
    seconds: float,
    size: int = 4,
    *,
    views: str | None = None,
    memory: MemoryKind = "normal",
) -> Op:
    output = Tensor(name=f"{name}.out", bytes=size, alias_of=views)
    cost = {"accelerator": seconds}
    return Op(
        name=name, kind="test.op", inputs=reads, outputs=(output,), seconds=cost, memory=memory
    )


@given(graph=graphs(max_ops=12))
def test_keys_grow_along_edges_and_views_come_with_their_base(graph: Graph) -> None:
    problem = problem_for(graph, with_views=True)
    group = problem.arrays.group
    views = views_of(graph.arrays, np.zeros(len(graph.ops)))
    key = with_bases(views, -bottom_levels(graph.arrays, problem.machine), group)
    for source, target in op_edges(graph.arrays).tolist():
        assert key[source] <= key[target]
    near = group[views.op] == group[views.base]
    assert (key[views.op[near]] == key[views.base[near]]).all()


def test_a_view_does_not_wait_for_what_is_more_urgent_than_its_reader() -> None:
    graph = build_graph("waits", [
        op_of("make", (), 1.0),
        op_of("long", ("make.out",), 10.0),
        op_of("view", ("make.out",), 0.0, views="make.out", memory="reference"),
        op_of("read", ("view.out",), 9.5),
    ])  # fmt: skip
    problem = problem_for(graph)
    assert emulated(problem, np.array([0, 0, 0, 1])).makespan < 11.1


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
