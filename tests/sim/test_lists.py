"""Every time of a timeline, serial links included, beside the simulator that scans everything."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import PlanArrays, plan_arrays, plan_from_arrays
from pardnn.sim.adjacency import adjacency_of
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists, simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, fastest_seconds, restricted, serial_seconds
from pardnn.sim.timeline import Timeline, static_timeline
from pardnn.sim.transfers import missing_link, transfers_of
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.reference import lists
from tests.strategies import graphs


def uneven(graph: Graph, num_devices: int, seed: int, *, serial: bool) -> Machine:
    """Two speeds, links that all differ, and no two sums of durations alike."""
    rng, k = np.random.default_rng(seed), num_devices
    machine = machine_for(graph, cluster_of(k, speeds=(1.0, 2.0), serial=serial))
    return machine._replace(
        seconds=machine.seconds + rng.uniform(0.1, 0.2, machine.seconds.shape),
        latency=np.where(np.eye(k), 0.0, rng.uniform(0.1, 0.9, (k, k))),
        bandwidth=np.where(np.eye(k), np.inf, rng.uniform(5.0, 80.0, (k, k))),
    )


def assert_same(graph: Graph, found: Timeline, expected: lists.Times) -> None:
    """Starts and ends of all ops and messages, and the order in which ops start."""
    names = [op.name for op in graph.ops]
    assert found.start.tolist() == pytest.approx([expected.start[n] for n in names])
    assert found.finish.tolist() == pytest.approx([expected.finish[n] for n in names])
    tensors = [t.name for op in graph.ops for t in op.outputs]
    keys = [
        (tensors[t], int(d))
        for t, d in zip(found.message_tensor, found.message_target, strict=True)
    ]
    assert sorted(keys) == sorted(expected.sent)
    assert found.message_start.tolist() == pytest.approx([expected.sent[k] for k in keys])
    assert found.message_finish.tolist() == pytest.approx([expected.arrived[k] for k in keys])
    assert sorted(found.dispatch.tolist()) == list(range(len(names)))
    assert (np.diff(found.start[np.argsort(found.dispatch)]) >= 0).all()
    assert found.makespan == pytest.approx(max(expected.finish.values()))


def late(plan: PlanArrays, seed: int) -> PlanArrays:
    """The plan with some sends waited for at once, and others at the end of the step."""
    rng = np.random.default_rng(seed)
    hold = plan.message_hold.copy()
    hold[rng.random(len(hold)) < 0.5] = -1
    return plan._replace(message_hold=hold)


@pytest.mark.parametrize("serial", [False, True])
@given(graph=graphs(max_ops=12), seed=st.integers(0, 99))
def test_lists(serial: bool, graph: Graph, seed: int) -> None:
    machine = uneven(graph, 3, seed, serial=serial)
    plan = late(schedule(graph, machine, random_place(graph, 3, seed)), seed)
    expected = lists.run_lists(graph, machine, plan_from_arrays(graph, plan))
    assert_same(graph, simulate(graph, machine, plan), expected)


@given(graph=graphs(max_ops=10), seed=st.integers(0, 99), serial=st.booleans())
def test_lists_of_devices_that_begin_late(graph: Graph, seed: int, serial: bool) -> None:
    machine = uneven(graph, 2, seed, serial=serial)
    plan = schedule(graph, machine, random_place(graph, 2, seed))
    ready = np.random.default_rng(seed).uniform(0.0, 3.0, 2)
    found = run_lists(graph.arrays, machine, plan, ready)
    expected = lists.run_lists(graph, machine, plan_from_arrays(graph, plan), ready.tolist())
    assert_same(graph, found, expected)


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("serial", [False, True])
@given(graph=graphs(max_ops=10, memory=False), seed=st.integers(0, 99))
def test_engines_that_choose(fifo: bool, serial: bool, graph: Graph, seed: int) -> None:
    machine = uneven(graph, 3, seed, serial=serial)
    place = np.random.default_rng(seed).integers(0, 3, len(graph.ops))
    key = None if fifo else -bottom_levels(graph.arrays, machine, place)
    found = emulate(graph.arrays, machine, place, key)
    expected = lists.emulate(graph, machine, place.tolist(), None if key is None else key.tolist())
    assert_same(graph, found, expected)
    again = emulate(graph.arrays, machine, place, key, adjacency_of(graph.arrays))
    assert again.finish.tolist() == found.finish.tolist()


@given(graph=graphs(max_ops=12), seed=st.integers(0, 99))
def test_transfers_of_a_placement(graph: Graph, seed: int) -> None:
    """One per tensor and other device that reads it, with all its readers there."""
    place = random_place(graph, 3, seed)
    found = transfers_of(graph.arrays, place, 3)
    device = {op.name: int(d) for op, d in zip(graph.ops, place, strict=True)}
    tensors = [(t.name, op.name) for op in graph.ops for t in op.outputs]
    expected: list[tuple[int, int, list[int]]] = []
    for number, (name, maker) in enumerate(tensors):
        readers: dict[int, list[int]] = {}
        for i, op in enumerate(graph.ops):
            if name in op.inputs and device[op.name] != device[maker]:
                readers.setdefault(device[op.name], []).append(i)
        rows = sorted((min(ops), d, ops) for d, ops in readers.items())
        expected += [(number, d, ops) for _, d, ops in rows]
        assert found.of_tensor[number + 1] == len(expected)
    ptr = found.consumer_ptr.tolist()
    assert [
        (t, d, sorted(found.consumer[a:z].tolist()))
        for t, d, (a, z) in zip(
            found.tensor.tolist(), found.target.tolist(), itertools.pairwise(ptr), strict=True
        )
    ] == expected


@given(graph=graphs(max_ops=12))
def test_edges_of_both_directions(graph: Graph) -> None:
    """Of each op what it reads and follows, and who reads and follows it, with the bytes."""
    number = {op.name: i for i, op in enumerate(graph.ops)}
    tensors = {t.name: (i, t.bytes) for i, (t, _) in enumerate(
        (t, op) for op in graph.ops for t in op.outputs)}  # fmt: skip
    maker = {t.name: op.name for op in graph.ops for t in op.outputs}
    into = {
        (number[op.name], number[maker[t]], *tensors[t]) for op in graph.ops for t in op.inputs
    } | {(number[op.name], number[other], -1, -1) for op in graph.ops for other in op.after}
    found = adjacency_of(graph.arrays)

    def rows(edges):
        ptr = edges.ptr.tolist()
        return [(i, *row) for i, (a, z) in enumerate(itertools.pairwise(ptr))
                for row in edges.edge[a:z].tolist()]  # fmt: skip

    assert sorted(rows(found.predecessors)) == sorted(into)
    assert sorted(rows(found.successors)) == sorted((b, a, *rest) for a, b, *rest in into)
    for i, (a, z) in enumerate(itertools.pairwise(found.successors.ptr)):
        kinds = found.successors.edge[a:z, 1] < 0
        assert (np.diff(kinds.astype(int)) >= 0).all(), f"op {i}: order comes after data"
    assert found.order.tolist() == found.reverse.tolist()[::-1]
    at = {op: i for i, op in enumerate(found.order.tolist())}
    assert all(at[before] < at[after] for before, after in op_edges(graph.arrays).tolist())


def three(latency: list[list[float]]) -> tuple[Graph, Machine]:
    """x -> y -> z, 12 bytes each; 8 bytes/s."""
    ops = [
        Op(name=name, kind="op", inputs=inputs, outputs=(Tensor(name=name, bytes=12),),
           seconds={"accelerator": seconds})
        for name, inputs, seconds in (("x", (), 1.0), ("y", ("x",), 2.0), ("z", ("x", "y"), 4.0))
    ]  # fmt: skip
    graph = build_graph("three", ops)
    machine = machine_for(graph, cluster_of(3, speeds=(1.0, 0.5)))
    k = np.eye(3, dtype=bool)
    return graph, machine._replace(latency=np.array(latency), bandwidth=np.where(k, np.inf, 8.0))


EVEN = [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]


def test_a_schedule_s_transfers_leave_when_their_tensor_exists() -> None:
    """x on 0 until 1, y on the slower 1 from 3 to 7, z on 0 from 9 on."""
    graph, machine = three(EVEN)
    place = np.array([0, 1, 0])
    start, finish = np.array([0.0, 3.0, 9.0]), np.array([1.0, 7.0, 13.0])
    line = static_timeline(graph.arrays, machine, place, start, finish, np.arange(3))
    assert line.message_tensor.tolist() == [0, 1]
    assert line.message_source.tolist() == [0, 1]
    assert line.message_target.tolist() == [1, 0]
    assert line.message_start.tolist() == [1.0, 7.0]
    assert line.message_finish.tolist() == [3.0, 9.0]
    assert line.makespan == 13.0
    assert line.busy(place, 3).tolist() == [5.0, 4.0, 0.0]
    assert line.transfer_bytes(graph) == 24
    assert emulate(graph.arrays, machine, place).finish.tolist() == [1.0, 7.0, 13.0]


def test_a_link_that_is_missing_is_named_by_the_ops_between_which_it_is() -> None:
    inf = np.inf
    graph, machine = three([[0.0, 0.5, inf], [0.5, 0.0, 0.5], [0.5, inf, 0.0]])
    arrays = graph.arrays
    assert missing_link(arrays, machine, np.array([0, 1, 1])) is None
    assert missing_link(arrays, machine, np.array([2, 1, 1])) == (0, 1)
    assert missing_link(arrays, machine, np.array([2, 0, 0])) is None
    assert missing_link(arrays, machine, np.array([0, 0, 2])) == (0, 2)
    assert missing_link(arrays, three(EVEN)[1], np.array([0, 1, 2])) is None


def test_durations_of_machines_by_hand() -> None:
    _, machine = three(EVEN)
    assert fastest_seconds(machine).tolist() == [1.0, 2.0, 4.0]
    assert serial_seconds(machine) == 7.0
    assert serial_seconds(machine._replace(seconds=machine.seconds[1:])) == 14.0
    allowed = np.array([[True, True, True], [False, True, False], [False, False, True]])
    pinned = restricted(machine, allowed)
    assert pinned.seconds.tolist() == [[1.0, np.inf, np.inf], [2.0, 4.0, np.inf],
                                       [1.0, np.inf, 4.0]]  # fmt: skip
    assert pinned.num_devices == 3
    assert fastest_seconds(pinned).tolist() == [1.0, 4.0, 4.0]
    assert serial_seconds(pinned) == np.inf


def test_two_messages_on_one_serial_link_follow_each_other() -> None:
    """a and b, 16 bytes at 8 bytes/s and 1 s each: until 3 and, of a link that is shared, 6."""
    ops = [
        Op(
            name="s",
            kind="op",
            seconds={"accelerator": 0.5},
            outputs=(Tensor(name="a", bytes=16), Tensor(name="b", bytes=16)),
        )
    ]
    ops += [Op(name=f"r{n}", kind="op", inputs=(n,), outputs=(Tensor(name=f"o{n}", bytes=0),),
               seconds={"accelerator": 1.0}) for n in "ab"]  # fmt: skip
    graph = build_graph("two", ops)
    ends = {}
    for serial in (False, True):
        machine = machine_for(graph, cluster_of(2, bandwidth=8.0, latency=1.0, serial=serial))
        plan = schedule(graph, machine, np.array([0, 1, 1]))
        line = simulate(graph, machine, plan)
        assert line.message_start.tolist() == [0.5, 3.5 if serial else 0.5]
        ends[serial] = line.finish.tolist()
        assert plan_arrays(graph, plan_from_arrays(graph, plan)).message_tensor.tolist() == [0, 1]
    assert ends == {False: [0.5, 4.5, 5.5], True: [0.5, 4.5, 7.5]}
