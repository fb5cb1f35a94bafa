"""Views run with what they view."""

import numpy as np
from hypothesis import given

from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph, MemoryKind, Op, Tensor
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.view_priority import views_of, with_bases
from pardnn.sim.levels import bottom_levels
from tests.place.machines import problem_for
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
