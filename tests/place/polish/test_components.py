"""Components: what heavy edges connect, and the devices on which they make a step short."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.place.baselines.single import place_single
from pardnn.place.colocation import closed_arrays
from pardnn.place.polish.components import attach_kernel, connect_kernel, levels, refine
from pardnn.place.polish.neighbourhood import State, fill_kernel, state_of, task_of
from pardnn.place.polish.polish import polish, polish_best
from pardnn.sim.engine import simulate
from pardnn.sim.peak import residual_bytes
from tests.place.machines import cluster_of, machine_for, schedule
from tests.place.polish.test_polish import round_robin_searched
from tests.reference.pardnn import op_successors
from tests.strategies import FAMILIES, Row, examples, graphs, ops_of, random_graph


@examples(25)
@given(graph=graphs(max_ops=12), which=st.integers(0, 3))
def test_components_are_what_a_search_by_hand_reaches(graph: Graph, which: int) -> None:
    arrays = closed_arrays(graph)
    task = task_of(arrays, machine_for(graph, cluster_of(2)))
    least = max(1.0, *task.in_bytes[which : which + 1], 0.0)
    component = np.empty(arrays.num_ops, dtype=np.int64)
    number = connect_kernel(task, float(least), component)
    near = {op: {int(each) for each in np.flatnonzero(arrays.group == arrays.group[op])}
            for op in range(arrays.num_ops)}  # fmt: skip
    for op, reads in enumerate(op_successors(graph)):
        for other in (other for other, size in reads.items() if size >= least):
            near[op].add(other)
            near[other].add(op)
    reached = {op: {op} for op in near}
    for _ in near:
        reached = {op: set().union(*(near[other] for other in ops)) for op, ops in reached.items()}
    expected = [min(reached[op]) for op in sorted(reached)]
    assert [component.tolist().index(each) for each in component] == expected
    assert number == len(set(expected)) == component.max() + 1


def test_levels_have_more_and_more_components() -> None:
    graph = random_graph(2, 60, "layered")
    arrays = closed_arrays(graph)
    found = [len(set(each)) for each in levels(task_of(arrays, machine_for(graph, cluster_of(2))))]
    assert found == sorted(set(found))
    assert found[0] > 1


def wide_head(layers: int = 12, updates: int = 20) -> Graph:
    """Return a body of `layers` forward and backward, and a head that is mostly its update.

    An op takes a second; a weight, and what the update hands on, takes 12.75 s to send, an
    activation 3/8 s.
    """
    rows = [Row(role="input", quarters=0)]
    rows += [Row(role="parameter", quarters=0, bytes=800) for _ in range(layers + 1)]
    forward = list(range(len(rows), len(rows) + layers))
    rows += [Row(reads=(1 + i, (0, *forward)[i])) for i in range(layers)]
    product, loss = len(rows), len(rows) + 1
    rows += [Row(reads=(layers + 1, forward[-1])), Row(reads=(product,))]
    update = [loss + 1 + i for i in range(updates)]
    rows += [Row(reads=(op - 1,), bytes=800) for op in update]
    back = len(rows)
    rows += [Row(reads=(layers + 1, loss))]
    rows += [Row(reads=(layers - i, back + i)) for i in range(layers)]
    return build_graph("head", ops_of(rows))


@pytest.mark.jit
def test_a_wide_head_leaves_the_body_as_one() -> None:
    graph = wide_head(layers=40, updates=80)
    machine = machine_for(graph, cluster_of(2, bandwidth=64.0))
    alone = place_single(graph, machine, [None] * 2).plan
    better = polish(graph, machine, alone, [None] * 2, work=50_000)
    before, after = (simulate(graph, machine, plan).makespan for plan in (alone, better))
    # Forward, product and loss, the updates. Even the backward of the head is beside them: its
    # weight is sent during forward.
    assert (before, after) == (40 + 3 + 80 + 40, 40 + 3 / 8 + 2 + 80)


def test_light_ones_go_where_they_exchange_most() -> None:
    # 0 and 1 are heavy. 2 shares more with 0 than with 1; 3 is read by 4 alone, 5 by all.
    edges = [(2, 0, 400), (2, 1, 40), (1, 4, 8), (4, 3, 4), (4, 5, 4), (0, 5, 4), (2, 5, 4)]
    rows = [Row(role="input", quarters=8 if op < 2 else 0, bytes=400) for op in range(6)]
    machine = machine_for(build_graph("light", ops_of(rows)), cluster_of(2))
    is_heavy = machine.seconds[0] > machine.latency.max()
    component = np.arange(6)
    reader, source, _ = np.array(edges).T
    assert attach_kernel(is_heavy, reader, source, component) == 2
    assert component.tolist() == [0, 1, 0, 1, 1, 1]


@pytest.mark.jit
def test_what_all_ops_read_ties_nothing_together() -> None:
    # A rate that two updates read, each with a count of its own: as many bytes.
    rows = [Row(role="input", quarters=0)]
    for _ in range(2):
        at = len(rows)
        rows += [Row(role="parameter", bytes=80, quarters=0), Row(role="input", quarters=0)]
        rows += [Row(reads=(0, at + 1), quarters=0), Row(reads=(at, at + 2), bytes=80)]
    graph = build_graph("rate", ops_of(rows))
    task = task_of(closed_arrays(graph), machine_for(graph, cluster_of(2)))
    for component in levels(task):
        assert component.tolist() in ([0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 0, 0])


@pytest.mark.jit
@pytest.mark.parametrize(("quarters", "messages"), [(0, 0), (1, 3)])
def test_of_two_plans_as_fast_it_is_the_one_with_fewer_messages(
    quarters: int, messages: int
) -> None:
    # Device 1 reads three numbers late, so that nothing is slower where device 0 has them.
    rows = [Row(role="input", quarters=6), Row(role="input", quarters=32)]
    rows += [Row(role="input", quarters=quarters) for _ in range(3)]
    rows += [Row(reads=(1, 2, 3, 4), quarters=8)]
    graph = build_graph("late", ops_of(rows))
    machine = machine_for(graph, cluster_of(2))
    place = np.array([0, 1, 0, 0, 0, 1])
    plan = schedule(graph, machine, place)
    better, _ = polish_best(graph, machine, [plan], [None] * 2, work=0)
    assert plan.message_hold.tolist() == [-1, -1, -1]
    assert [len(each.message_tensor) for each in (plan, better)] == [3, messages]
    assert simulate(graph, machine, better).makespan == simulate(graph, machine, plan).makespan


@pytest.mark.jit
@pytest.mark.parametrize("family", FAMILIES)
def test_refined_plans_are_no_slower_and_all_is_filled(family: str) -> None:
    graph = random_graph(5, 60, family)
    machine, arrays, _, state = round_robin_searched(graph, 3)
    residual = residual_bytes(arrays, np.arange(arrays.num_ops))
    live = np.bincount(state.place, weights=residual, minlength=3).astype(np.int64)
    room, moved = live + residual.max(), False
    task, component = task_of(arrays, machine, room), np.empty(arrays.num_ops, dtype=np.int64)
    for least in (100.0, *sorted(set(task.in_bytes.tolist()), reverse=True)):
        connect_kernel(task, least, component)
        before, place = state.finish.max(), state.place.copy()
        refine(task, state, component, 100_000)
        assert state.finish.max() <= before
        now = np.bincount(state.place, weights=residual, minlength=3).astype(np.int64)
        assert (now <= room).all()
        moved |= bool((state.place != place).any())
        again = state_of(state.place, state.order, 3)
        fill_kernel(task, again)
        for name in State._fields[1:11]:
            assert np.array_equal(getattr(again, name), getattr(state, name)), name
    assert moved


@pytest.mark.jit
def test_one_of_two_goes_where_there_is_room_for_one() -> None:
    rows = [Row(role="parameter", quarters=16, bytes=80) for _ in range(2)]
    graph = build_graph("three", ops_of([*rows, Row(role="parameter", quarters=32, bytes=800)]))
    arrays = closed_arrays(graph)
    task = task_of(arrays, machine_for(graph, cluster_of(2)), np.array([1000, 90]))
    state = state_of(np.zeros(3, dtype=np.int64), arrays.topological, 2)
    fill_kernel(task, state)
    refine(task, state, np.arange(3), 1000)
    assert state.finish.max() == 4 + 8
    assert sorted(state.place[:2].tolist()) == [0, 1]


@pytest.mark.jit
@pytest.mark.parametrize(("is_serial", "seconds"), [(False, 1.5 + 4), (True, 2 + 4)])
def test_messages_queue_at_serial_links(is_serial: bool, seconds: float) -> None:
    # Two messages of 1.5 s, for an op of 4 s beside one of 2 s.
    rows = [Row(role="parameter", quarters=0, bytes=80) for _ in range(2)]
    rows += [Row(role="input", quarters=8), Row(reads=(0, 1), quarters=16)]
    graph = build_graph("queue", ops_of(rows))
    arrays = closed_arrays(graph)
    task = task_of(arrays, machine_for(graph, cluster_of(2)))
    state = state_of(np.zeros(4, dtype=np.int64), np.arange(4), 2)
    fill_kernel(task, state)
    refine(task, state, np.array([0, 0, 0, 1]), 1000, is_serial)
    assert state.finish.max() == seconds


@pytest.mark.jit
def test_no_more_work_than_was_given() -> None:
    graph = random_graph(5, 60, "layered")
    _, arrays, task, state = round_robin_searched(graph, 3)
    place, each = state.place.copy(), np.arange(arrays.num_ops)
    n = arrays.num_ops
    assert refine(task, state, arrays.group, 3 * n) <= 4 * n
    assert len(set(each[state.place != place])) < n
