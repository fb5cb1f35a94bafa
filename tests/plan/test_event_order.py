"""Orders of ops and messages that the events of a plan can come in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.schedule import free_plan
from pardnn.plan.lower import message_order, op_times
from tests.place.machines import random_place
from tests.strategies import graphs


@given(graph=graphs(max_ops=12, shuffled=True), seed=st.integers(0, 5))
def test_ops_have_a_place_after_what_they_need_and_what_is_listed_before(
    graph: Graph, seed: int
) -> None:
    plan = free_plan(graph.arrays, 3, random_place(graph, 3, seed), file_positions(graph.arrays))
    times = op_times(graph, plan)
    assert sorted(times.tolist()) == list(range(len(graph.ops)))
    for source, target in op_edges(graph.arrays).tolist():
        assert times[source] < times[target]
    for d in range(3):
        listed = plan.order_op[plan.order_ptr[d] : plan.order_ptr[d + 1]]
        assert (np.diff(times[listed]) > 0).all()


def test_messages_that_would_wait_in_a_circle_are_sent_in_another_order() -> None:
    """`b` follows `c` on the other device, which reads `a`: so the message of `a` comes first."""
    ops = [
        Op(name=name, kind="aten.mm.default" if reads else "input", inputs=reads, after=after,
           outputs=(Tensor(name=name, bytes=4),), seconds={"accelerator": 1.0})
        for name, reads, after in (("a", (), ()), ("c", ("a",), ()), ("b", (), ("c",)),
                                   ("d", ("b",), ()))
    ]  # fmt: skip
    graph = build_graph("circle", ops)
    plan = free_plan(graph.arrays, 2, np.array([0, 1, 0, 1]), file_positions(graph.arrays))
    names = [ops[op].name for op in graph.arrays.tensor_op[plan.message_tensor]]
    assert names == ["a", "b"]
    assert message_order(graph, plan) == [0, 1]
    turned = plan._replace(**{
        name: getattr(plan, name)[::-1].copy()
        for name in plan._fields
        if name.startswith("message_")
    })  # fmt: skip
    assert message_order(graph, turned) == [1, 0]
