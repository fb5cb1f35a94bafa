"""Retention intervals cost what the checker finds of the plan that follows from them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.recompute.calls import second_calls
from pardnn.place.recompute.problem import nodes_of
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
