"""Retention intervals cost what the checker finds of the plan that follows from them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.recompute.calls import second_calls
from pardnn.place.recompute.problem import SEND, nodes_of
from pardnn.place.recompute.retention import cost_of, empty_schedule
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from tests.strategies import graphs


def seconds_of(graph: Graph) -> ndarray:
    return np.array([(op.seconds or {}).get("accelerator", 0.0) for op in graph.ops])


@given(graphs(min_ops=3, max_ops=14), st.data())
def test_a_schedule_costs_what_its_plan_does(graph: Graph, data: st.DataObject) -> None:
    n = len(graph.ops)
    order, seconds = graph.arrays.topological, seconds_of(graph)
    nodes, schedule = (
        nodes_of(graph, order, seconds),
        empty_schedule(nodes_of(graph, order, seconds)),
    )
    kept = np.array(data.draw(st.lists(st.integers(0, n), min_size=n, max_size=n)))
    limit = data.draw(st.integers(0, 500))
    cost = cost_of(nodes, kept, limit, schedule)
    calls, names = second_calls(graph, order, nodes, kept, schedule)
    again = {call.op for call in calls}
    assert cost.seconds == sum(
        s for op, s in zip(graph.ops, seconds, strict=True) if op.name in again
    )
    plan = Plan(placement=dict.fromkeys(names, 0), order=(tuple(names),), recompute=calls)
    problems = plan_problems(graph, plan)
    assert bool(problems) == bool(cost.late), problems
    if not problems:
        rewritten = planned_graph(graph, plan)
        assert peak_bytes(rewritten, plan_arrays(rewritten, plan)) == [cost.peak]
        assert (cost.excess > 0) == (cost.peak > limit)


def test_what_is_sent_is_kept_until_it_has_left() -> None:
    made = (Tensor(name="h", bytes=10),)
    ops = [Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=1),)),
           Op(name="h", kind="aten.mm.default", inputs=("x",), outputs=made)]  # fmt: skip
    ops += [Op(name=f"s{i}", kind=SEND, inputs=("h",)) for i in range(2)]
    ops += [
        Op(name="g", kind="aten.mm.default", inputs=("h",), outputs=(Tensor(name="g", bytes=1),))
    ]
    graph, order = build_graph("sent", ops), np.arange(5)
    nodes = nodes_of(graph, order, np.zeros(5))
    schedule, kept = empty_schedule(nodes), np.array([5, 1, 5, 5, 5])
    cost_of(nodes, kept, 100, schedule)
    calls, names = second_calls(graph, order, nodes, kept, schedule)
    assert [call.readers for call in calls] == [("g",)]
    assert names == ["x", "h", "s0", "s1", "h~2", "g"]
