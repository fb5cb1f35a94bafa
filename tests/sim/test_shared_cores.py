"""Ranks that share cores, on plans of a few ops, counted by hand."""

import pytest

from pardnn.cost.costs import graph_costs
from pardnn.cost.links import LinkCosts, LinkFit
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import Message, Plan
from pardnn.sim.shared_cores import Host, Step, simulated_step

SIZE = 1000


def graph_of(num_chains: int, busy: int) -> Graph:
    """Chains of two ops of one second each, and one op that reads the first chain's end."""
    ops: list[Op] = []

    def op(name: str, *inputs: str) -> None:
        ops.append(Op(name=name, kind="bench.op", inputs=inputs, seconds={"accelerator": 1.0},
                      outputs=(Tensor(name=name, bytes=SIZE),)))  # fmt: skip

    for i in range(num_chains):
        op(f"a{i}")
        op(f"b{i}", f"a{i}")
    for i in range(busy):
        op(f"busy{i}")
    op("last", "b0")
    return build_graph("chains", ops)


def step_on(
    num_ranks: int, cores: int, busy: int = 0, threads: int = 1, action: float = 0.0
) -> Step:
    """Simulate a chain per rank; the last op is on the last rank, a message from the first.

    The last rank runs `busy` ops more before it.
    """
    graph = graph_of(num_ranks, busy)
    names = [[f"a{i}", f"b{i}"] for i in range(num_ranks)]
    names[-1] += [f"busy{i}" for i in range(busy)]
    names[-1].append("last")
    message = Message(tensor="b0", source=0, target=num_ranks - 1, post_before="last",
                      hold_until=None)  # fmt: skip
    plan = Plan(
        placement={name: i for i, row in enumerate(names) for name in row},
        order=tuple(map(tuple, names)),
        messages=(message,) if num_ranks > 1 else (),
    )
    links = LinkCosts(
        idle=LinkFit(0.0, 1e9, 0.0),
        sending=LinkFit(0.25, 4 * SIZE, 0.0),
        taking=LinkFit(0.125, 8 * SIZE, 0.0),
        posting=0.0625,
        waking=0.03125,
    )
    host = Host(cores=cores, links=links, threads=threads, action=action)
    return simulated_step(graph, plan, graph_costs(graph).on("accelerator"), host)


def seconds_on(num_ranks: int, cores: int, busy: int = 0) -> float:
    return step_on(num_ranks, cores, busy).seconds


#: The message: sent, then woken up for and taken. The receive is posted while it is sent.
SENT, TAKEN = 0.25 + 0.25, 0.03125 + 0.125 + 0.125


def test_a_core_for_each_rank() -> None:
    assert seconds_on(1, 2) == pytest.approx(3.0)
    assert seconds_on(2, 2) == pytest.approx(2 + SENT + TAKEN + 1)


def test_more_ranks_than_cores_take_turns() -> None:
    # The last rank posts its receive while others compute or send.
    assert seconds_on(4, 2) == pytest.approx(2 * 2 + SENT + TAKEN + 1, abs=0.04)
    assert seconds_on(4, 1) == pytest.approx(4 * 2 + SENT + 0.0625 + TAKEN + 1)


def test_a_message_that_is_there_wakes_nobody() -> None:
    """The receiver computes for two more seconds, so only its own time for the message counts."""
    assert seconds_on(2, 2, busy=2) == pytest.approx(2 + 2 + 0.0625 + TAKEN - 0.03125 + 1)


def test_work_is_the_same_on_any_number_of_cores() -> None:
    for cores in (1, 2, 4):
        expected = 4 * 2 + SENT + 0.0625 + TAKEN + 1
        assert step_on(4, cores).work == pytest.approx(expected)


def test_ops_of_two_threads_take_two_cores() -> None:
    for cores in (2, 4, 8):
        narrow = step_on(4, cores // 2).seconds
        assert step_on(4, cores, threads=2).seconds == pytest.approx(narrow)


def test_what_is_no_op_and_no_message_takes_its_own_time() -> None:
    """Alone, a rank frees `a0`, `b0` and `last`. Two free `a1`, `b1` and the copy of `b0`, too.

    And the sender waits for what it has sent; to allocate a buffer takes no time.
    """
    tick = 1 / 64
    assert step_on(1, 2, action=tick).work == pytest.approx(3 + 3 * tick)
    both = 2 * 2 + SENT + 0.0625 + TAKEN + 1
    assert step_on(2, 2, action=tick).work == pytest.approx(both + 7 * tick)
