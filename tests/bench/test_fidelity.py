"""Ranks that share cores, on plans of a few ops, counted by hand."""

import pytest

from bench.shared_cores import Machine, step_seconds
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.lower import lower
from pardnn.plan.plan import Message, Plan

SIZE = 1000


def graph_of(num_chains: int) -> Graph:
    """Chains of two ops of one second each, and one op that reads the first chain's end."""
    ops: list[Op] = []

    def op(name: str, *inputs: str) -> None:
        ops.append(Op(name=name, kind="bench.op", inputs=inputs, seconds={"accelerator": 1.0},
                      outputs=(Tensor(name=name, bytes=SIZE),)))  # fmt: skip

    for i in range(num_chains):
        op(f"a{i}")
        op(f"b{i}", f"a{i}")
    op("last", "b0")
    return build_graph("chains", ops)


def seconds_on(num_ranks: int, cores: int) -> float:
    """Simulate a chain per rank; the last op is on the last rank, a message from the first."""
    graph = graph_of(num_ranks)
    names = [[f"a{i}", f"b{i}"] for i in range(num_ranks)]
    names[-1].append("last")
    message = Message(tensor="b0", source=0, target=num_ranks - 1, post_before="last",
                      hold_until=None)  # fmt: skip
    plan = Plan(
        placement={name: i for i, row in enumerate(names) for name in row},
        order=tuple(map(tuple, names)),
        messages=(message,) if num_ranks > 1 else (),
    )
    seconds = dict(
        zip([op.name for op in graph.ops], graph_costs(graph).on("accelerator"), strict=True)
    )
    machine = Machine(cores=cores, latency=0.25, bandwidth=4 * SIZE, posting=0.0, action=0.0)
    return step_seconds(lower(graph, plan), seconds, [SIZE] * (num_ranks > 1), machine)


def test_a_core_for_each_rank() -> None:
    assert seconds_on(1, 2) == pytest.approx(3.0)
    # Two ops side by side, 0.25 + 0.25 s of message, the last op.
    assert seconds_on(2, 2) == pytest.approx(2 + 0.5 + 1)


def test_more_ranks_than_cores_take_turns() -> None:
    assert seconds_on(4, 2) == pytest.approx(2 * 2 + 0.5 + 1)
    assert seconds_on(4, 1) == pytest.approx(4 * 2 + 0.5 + 1)
