"""A plan under a scheduler that has only its placement, and bytes that every plan needs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cost.costs import graph_costs
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.sim.engine import Policy, simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import least_bytes, op_needs
from tests.place.machines import cluster_of, machine_for, schedule
from tests.reference.pardnn import levels
from tests.reference.sim import emulated_finish
from tests.strategies import Row, examples, graphs, ops_of


@pytest.mark.parametrize("policy", ["fifo", "priority"])
@examples(15)
@given(graph=graphs(max_ops=10, memory=False), seed=st.integers(0, 9))
def test_policies_take_the_placement_alone(policy: Policy, graph: Graph, seed: int) -> None:
    """By arrival, or by the length of what comes after in seconds, the longest first."""
    machine = machine_for(graph, cluster_of(2, bandwidth=3.0, latency=0.11))
    machine = machine._replace(seconds=machine.seconds + 0.13)
    place = np.random.default_rng(seed).integers(0, 2, len(graph.ops))
    plan = schedule(graph, machine, place)
    key = None
    if policy == "priority":
        _, bottom = levels(
            graph, machine.seconds[0].tolist(), (0.11, 1 / 3.0), place.tolist(), set()
        )
        key = [-bottom[i] for i in range(len(graph.ops))]
    expected = emulated_finish(graph, machine, place.tolist(), key)
    assert simulate(graph, machine, plan, policy).finish.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parameters", "workspace", "expected"),
    [
        ([30, 30, 30, 1], 0, [91, 46, 31, 30]),  # spread, until the largest decides
        ([50, 1, 1], 0, [52, 50, 50, 50]),
        ([7, 7, 7], 80, [88, 88, 88, 88]),  # the op: an input of 7, an output of 1, its workspace
    ],
)
def test_least_bytes_by_hand(parameters: list[int], workspace: int, expected: list[int]) -> None:
    rows = [Row("parameter", bytes=size) for size in parameters]
    rows.append(Row(reads=(len(parameters) - 1,), bytes=1, workspace=workspace))
    arrays = build_graph("weights", ops_of(rows)).arrays
    assert [least_bytes(arrays, k) for k in (1, 2, 3, 4)] == expected
    assert op_needs(arrays).tolist() == [*parameters, parameters[-1] + 1 + workspace]


def test_ops_that_share_a_group_are_held_together() -> None:
    arrays = build_graph("pair", ops_of([Row("parameter", bytes=9)] * 4)).arrays
    group = np.array([0, 0, 0, 1])
    assert [least_bytes(arrays, 4), least_bytes(arrays, 4, group)] == [9, 27]


def test_one_op_of_too_many_seconds_is_refused() -> None:
    graph = build_graph("long", ops_of([Row(), Row(), Row()]))
    costs = graph_costs(graph)
    seconds = {kind: row.copy() for kind, row in costs.seconds.items()}
    for row in seconds.values():
        row[1] = 1e308
    with pytest.raises(UsageError, match=r"up to 1e\+308") as refused:
        machine_of(dataclasses.replace(costs, seconds=seconds), cluster_of(2))
    assert refused.value.code == "E235"
