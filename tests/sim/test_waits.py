"""Chains of waits: they tile the time before an op, and fill the idle times of a device."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.ordering.schedule import free_plan
from pardnn.plan.lower import first_uses
from pardnn.plan.plan import order_rows
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.waits import (
    COMPUTE,
    MESSAGE,
    ORDER,
    causes,
    chain,
    critical_chain,
    idle_stretches,
)
from tests.strategies import examples, graphs


def cluster_of(devices, links):
    return Cluster.uniform(devices, bandwidth=8.0, latency=0.25, links=links)


def random_order(graph, rng):
    """The position of each op in a topological order drawn by chance: seldom the file's."""
    producer = {t.name: i for i, op in enumerate(graph.ops) for t in op.outputs}
    number = {op.name: i for i, op in enumerate(graph.ops)}
    before = [
        {producer[name] for name in op.inputs} | {number[name] for name in op.after}
        for op in graph.ops
    ]
    position = np.full(len(before), -1, dtype=np.int64)
    for at in range(len(before)):
        ready = [i for i, row in enumerate(before) if position[i] < 0 and not row]
        chosen = int(rng.choice(ready))
        position[chosen] = at
        for row in before:
            row.discard(chosen)
    return position


def planned(graph, devices, links, seed, *, hold):
    """A plan of a random placement and order, with messages posted and held at random."""
    cluster = cluster_of(devices, links)
    machine = machine_of(graph_costs(graph), cluster)
    a, rng = graph.arrays, np.random.default_rng(seed)
    place = rng.integers(0, devices, int(a.group.max()) + 1)[a.group]
    position = random_order(graph, rng)
    plan = free_plan(a, devices, place, position)
    if hold:  # in the latest slots nothing can deadlock: posted at the first reader, held at once
        plan = plan._replace(
            message_post=np.array(first_uses(graph, plan), dtype=np.int64),
            message_hold=np.full(len(plan.message_tensor), -1, dtype=np.int64),
        )
    return machine, plan, simulate(graph, machine, plan)


@examples(15)
@given(graphs(), st.integers(1, 3), st.sampled_from(["independent", "serial"]), st.integers(0, 99),
       st.booleans())  # fmt: skip
def test_chains_have_no_gap_and_waits_sum_up(graph, devices, links, seed, hold):
    machine, plan, timeline = planned(graph, devices, links, seed, hold=hold)
    found = causes(graph, machine, plan, timeline)
    for op in range(graph.arrays.num_ops):
        end = timeline.start[op]
        for stretch in chain(found, op):
            assert stretch.finish == end
            assert stretch.start <= end
            end = stretch.start
        assert end == 0
    busy = timeline.busy(plan.place, devices)
    for device in range(devices):
        waits = list(idle_stretches(found, plan, device))
        total = sum(idle.stretch.finish - idle.stretch.start for idle in waits)
        assert total == pytest.approx(timeline.makespan - busy[device], abs=1e-9)
        assert {idle.before for idle in waits} <= {-1, *order_rows(plan)[device]}
        others = [i.stretch.number for i in waits if i.stretch.what == COMPUTE]
        assert all(plan.place[op] != device for op in others)
    path = list(critical_chain(found))
    assert sum(s.finish - s.start for s in path) == pytest.approx(timeline.makespan)


def fork(**changed):
    """The op "a" on device 0 feeds "b" on device 1, which also comes after "c" on device 0."""
    tensors = [Tensor(name=name, bytes=8) for name in "abc"]
    ops = [
        Op(name="a", kind="op", outputs=(tensors[0],), seconds={"accelerator": 1.0}),
        Op(name="c", kind="op", outputs=(tensors[2],), seconds={"accelerator": 4.0}),
        Op(name="b", kind="op", inputs=("a",), outputs=(tensors[1],),
           seconds={"accelerator": 1.0}),
    ]  # fmt: skip
    return build_graph("fork", [dataclasses.replace(op, **changed.get(op.name, {})) for op in ops])


def waits_of(graph, place, **changed):
    machine = machine_of(graph_costs(graph), cluster_of(2, "independent"))
    plan = free_plan(graph.arrays, 2, np.array(place), np.arange(3))
    plan = plan._replace(**changed)
    timeline = simulate(graph, machine, plan)
    found = causes(graph, machine, plan, timeline)
    return [(i.before, *i.stretch) for i in idle_stretches(found, plan, 1)]


def test_the_reasons_by_hand():
    assert waits_of(fork(), [0, 0, 1]) == [
        (2, MESSAGE, 0, 1.0, 2.25), (2, COMPUTE, 0, 0.0, 1.0), (-1, COMPUTE, 1, 3.25, 5.0)
    ]  # fmt: skip
    late = fork(b={"after": ("c",)})
    assert waits_of(late, [0, 0, 1]) == [
        (2, ORDER, 1, 5.0, 5.25), (2, COMPUTE, 1, 1.0, 5.0), (2, COMPUTE, 0, 0.0, 1.0)
    ]  # fmt: skip


def test_of_two_that_end_together_the_op_that_makes_the_tensor_is_named():
    """The message leaves when "a" is made, and when device 1 comes to make room: both at 1 s."""
    graph = fork(c={"seconds": {"accelerator": 1.0}})
    machine = machine_of(graph_costs(graph), cluster_of(2, "independent"))
    plan = free_plan(graph.arrays, 2, np.array([0, 1, 1]), np.arange(3))
    plan = plan._replace(message_post=np.array([2]))
    found = causes(graph, machine, plan, simulate(graph, machine, plan))
    assert [tuple(each) for each in chain(found, 2)] == [
        (MESSAGE, 0, 1.0, 2.25), (COMPUTE, 0, 0.0, 1.0)
    ]  # fmt: skip


def test_a_device_waits_for_its_own_send_where_it_must_have_left():
    hold = np.array([0])  # "a" is held until it has left, before the device goes on to "c"
    graph = fork()
    machine = machine_of(graph_costs(graph), cluster_of(2, "independent"))
    plan = free_plan(graph.arrays, 2, np.array([0, 0, 1]), np.arange(3))._replace(message_hold=hold)
    found = causes(graph, machine, plan, simulate(graph, machine, plan))
    assert [(i.before, *i.stretch) for i in idle_stretches(found, plan, 0)] == [
        (1, MESSAGE, 0, 1.0, 2.25)
    ]
