"""Step times of devices that share cores and memory."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.cluster import Cluster, Rate, Sharing
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import PlanArrays, plan_arrays
from pardnn.sim.engine import simulate
from pardnn.sim.period import period
from pardnn.sim.sharing import step_times, stretched, timeline_on, with_overhead
from pardnn.sim.timeline import Timeline
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.strategies import examples, graphs


def op(name: str, seconds: float, *inputs: str, size: int = 64) -> Op:
    return Op(
        name=name, kind="op", inputs=inputs, outputs=(Tensor(name=name, bytes=size),),
        seconds={"accelerator": seconds},
    )  # fmt: skip


def sharing(*slowdown: float, overhead: Rate | None = None) -> Sharing:
    return Sharing(slowdown=slowdown, overhead=overhead)


def elapsed(timeline: Timeline, slowdown: tuple[float, ...], until: float) -> float:
    """Go through the timeline from one event to the next until a time; count who computes."""
    busy = [
        (begin, end)
        for begin, end in zip(timeline.start.tolist(), timeline.finish.tolist(), strict=True)
        if end > begin
    ]
    known = {0.0, until, *(time for both in busy for time in both)}
    times = sorted(time for time in known if time <= until)
    total = 0.0
    for begin, end in itertools.pairwise(times):
        count = sum(first <= begin and last >= end for first, last in busy)
        total += (end - begin) * (slowdown[count - 1] if count else 1.0)
    return total


@examples(40)
@given(graph=graphs(max_ops=10), seed=st.integers(0, 9), serial=st.booleans())
def test_time_passes_more_slowly_while_several_compute(
    graph: Graph, seed: int, serial: bool
) -> None:
    machine = machine_for(graph, cluster_of(3, serial=serial))
    plan = schedule(graph, machine, random_place(graph, 3, seed))
    timeline, slowdown = simulate(graph, machine, plan), (1.0, 1.5, 2.25)
    found = stretched(timeline, slowdown)
    for before, after in zip(timeline[:2] + timeline[6:], found[:2] + found[6:], strict=True):
        expected = [elapsed(timeline, slowdown, when) for when in before.tolist()]
        np.testing.assert_allclose(after, expected, rtol=1e-12)
    np.testing.assert_allclose(stretched(timeline, (1.0,)).finish, timeline.finish, rtol=1e-12)


@examples(40)
@given(graph=graphs(max_ops=10), seed=st.integers(0, 9))
def test_a_message_takes_time_of_its_producer_and_of_its_first_reader(
    graph: Graph, seed: int
) -> None:
    machine = machine_for(graph, cluster_of(2))
    plan = schedule(graph, machine, random_place(graph, 2, seed))
    overhead = Rate(bandwidth=32.0, latency=0.5)
    found = with_overhead(graph, machine, plan, overhead)
    expected = machine.seconds[0].copy()
    order = plan.order_op.tolist()
    for tensor, target in zip(
        plan.message_tensor.tolist(), plan.message_target.tolist(), strict=True
    ):
        own = 0.5 + int(graph.arrays.tensor_bytes[tensor]) / 32.0
        readers = [
            each
            for each in order
            if plan.place[each] == target and tensor in inputs_of(graph, each)
        ]
        expected[readers[0]] += own
        expected[graph.arrays.tensor_op[tensor]] += own
    np.testing.assert_allclose(found.seconds[0], expected, rtol=1e-12)


def inputs_of(graph: Graph, number: int) -> list[int]:
    a = graph.arrays
    return a.input_tensor[a.input_ptr[number] : a.input_ptr[number + 1]].tolist()


def two_at_once() -> tuple[Graph, Cluster, PlanArrays]:
    """Two ops of 4 seconds on two devices, whose results meet in one of 2 seconds on the first."""
    graph = build_graph("two", [op("a", 4.0), op("b", 4.0), op("c", 2.0, "a", "b")])
    cluster = cluster_of(2, bandwidth=64.0, latency=1.0)
    plan = schedule(graph, machine_for(graph, cluster), np.array([0, 1, 0]))
    return graph, cluster, plan


def test_steps_by_hand() -> None:
    graph, cluster, plan = two_at_once()
    machine = machine_for(graph, cluster)
    alone = step_times(cluster, graph, machine, plan)
    assert alone.timeline.makespan == 4 + 2 + 2  # a message takes 1 s + 64 bytes / 64
    assert alone.period == period(graph.arrays, machine, plan).seconds
    shared = dataclasses.replace(cluster, sharing=sharing(1.0, 1.5))
    times = step_times(shared, graph, machine, plan)
    assert times.timeline.makespan == 1.5 * 4 + 2 + 2
    assert times.period == pytest.approx(alone.period * 10 / 8)
    # The message takes half a second of b, and half a second of c; a goes on by itself at the end.
    own = sharing(1.0, 1.5, overhead=Rate(bandwidth=256.0, latency=0.25))
    costly = dataclasses.replace(cluster, sharing=own)
    assert timeline_on(costly, graph, machine, plan).makespan == 1.5 * 4 + 0.5 + 2 + 2.5


def test_plans_are_chosen_by_what_devices_share() -> None:
    rows = [op(f"x{i}", 1.0) for i in range(8)]
    graph = build_graph("rows", [*rows, op("end", 1.0, *(f"x{i}" for i in range(8)))])
    cluster = cluster_of(2, bandwidth=1e6, latency=0.01)
    free = pardnn.plan(graph, cluster, algorithm="auto-whole", costs=None)
    assert {len(order) for order in free.order} == {4, 5}
    for slow, spread in ((1.5, True), (2.5, False)):
        shared = dataclasses.replace(cluster, sharing=sharing(1.0, slow))
        plan = pardnn.plan(graph, shared, algorithm="auto-whole", costs=None)
        assert all(plan.order) == spread
        assert plan.predicted is not None
        assert plan.predicted.makespan_s == pytest.approx(
            4 * slow + 1.01 if spread else 9, rel=0.01
        )
        assert pardnn.simulate(graph, plan).makespan_s == plan.predicted.makespan_s
        pardnn.check_plan(graph, plan)
        told = {each.algorithm: each.makespan_s for each in plan.tried}
        assert min(each for each in told.values() if each) >= plan.predicted.makespan_s * 0.999


def test_a_prediction_without_what_devices_share_is_found_out() -> None:
    graph, cluster, _ = two_at_once()
    shared = dataclasses.replace(cluster, sharing=sharing(1.0, 1.2))
    plan = pardnn.plan(graph, cluster, algorithm="pardnn")
    assert plan.predicted is not None
    if not all(plan.order):
        pytest.fail("the plan was to be on both devices")
    moved = dataclasses.replace(plan, cluster=shared, checksum=None)
    with pytest.raises(pardnn.PardnnError, match="predicted.makespan_s"):
        pardnn.check_plan(graph, moved)
    assert plan_arrays(graph, plan).num_devices == 2
