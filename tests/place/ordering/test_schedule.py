"""Complete plans of a placement: where messages are posted and held."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.kernels.jit import kernel
from pardnn.place.colocation import closed_arrays
from pardnn.place.ordering.schedule import (
    first_overwrites,
    first_reaching,
    free_plan,
    ordered_plan,
)
from pardnn.plan.plan import plan_arrays, plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists, simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import machine_of
from pardnn.sim.timeline import Timeline
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.strategies import FAMILIES, examples, random_graph


@given(st.integers(0, 2**32), st.integers(2, 4))
@examples(15)
def test_transfers_of_no_time_do_not_wait_for_each_other(seed: int, num_devices: int) -> None:
    """Ops and messages that take no time tie everywhere; order alone keeps them apart."""
    draw = np.random.default_rng(seed)
    ops: list[Op] = []
    for i in range(int(draw.integers(4, 30))):
        inputs = {f"o{draw.integers(i)}" for _ in range(draw.integers(3)) if i}
        size, seconds = int(draw.choice([0, 100])), float(draw.choice([0.0, 1e-3]))
        ops.append(
            Op(
                name=f"o{i}",
                kind="op",
                inputs=tuple(sorted(inputs)),
                outputs=(Tensor(name=f"o{i}", bytes=size),),
                seconds={"accelerator": seconds},
            )
        )
    graph = build_graph("ties", ops)
    cluster = Cluster.uniform(num_devices, bandwidth=1e30, latency=0.0)
    machine = machine_of(graph_costs(graph), cluster)
    place = draw.integers(num_devices, size=len(ops))
    simulate(graph, machine, schedule(graph, machine, place))


def naive_slots(
    graph: Graph, place: np.ndarray, timeline: Timeline, overwrites: np.ndarray
) -> dict[tuple[int, int], str]:
    """Before which op each message is posted, till after which it is held, by tensor and target.

    A sender waits after the first op that ends when the message has arrived, or later, and not
    before the last op of its own that reads the storage; for what outlives the step, and for
    numbers that it is given, it waits last. The receiver posts before the last op that it reaches
    by the time the message is sent.
    """
    a, finish = graph.arrays, timeline.finish
    rows = [
        sorted(np.flatnonzero(place == d), key=lambda op: timeline.dispatch[op])
        for d in range(int(place.max()) + 1)
    ]
    reach = {op: 0.0 if i == 0 else finish[row[i - 1]] for row in rows for i, op in enumerate(row)}
    columns = (timeline.message_start, timeline.message_finish, timeline.message_tensor,
               timeline.message_source, timeline.message_target)  # fmt: skip
    messages = sorted(zip(*columns, strict=True), key=lambda m: (m[0], m[1]))
    writers = {t: [op for owner, op in overwrites.tolist() if owner == t]
               for t in range(a.num_tensors)}  # fmt: skip
    hold: dict[tuple[int, int], int] = {}
    for sent, arrived, t, source, target in messages:
        row = rows[source]
        begin = row.index(a.tensor_op[t])
        takes_none = arrived <= sent
        end = next((i for i in range(begin, len(row)) if finish[row[i]] >= arrived
                    and not (takes_none and finish[row[i]] <= arrived)), len(row))  # fmt: skip
        owner = a.tensor_owner[t]
        if place[a.tensor_op[owner]] == source:
            inputs = [a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]] for op in row]
            reads = [i for i, each in enumerate(inputs) if owner in a.tensor_owner[each]]
            maker = a.tensor_op[owner]
            is_given = a.input_ptr[maker] == a.input_ptr[maker + 1] and a.tensor_bytes[owner] <= 8
            outlives = a.memory[maker] == RESIDUAL or is_given
            end = len(row) if outlives else max([end, *reads])
        late = [row.index(op) for op in writers[int(a.tensor_owner[t])] if op in row[begin + 1 :]]
        end = min([end, *(at - 1 for at in late)])
        hold[t, target] = row[end] if end < len(row) else -1
        if end < len(row) - 1:
            reach[row[end + 1]] = max(reach[row[end + 1]], arrived)
    found: dict[tuple[int, int], str] = {}
    for sent, arrived, t, _, target in messages:
        row, at = rows[target], 0
        while at + 1 < len(row) and reach[row[at + 1]] <= sent:
            at += 1
        readers = [i for i, op in enumerate(row) if t in
                   a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]]]  # fmt: skip
        at = min(at, *readers, len(row))
        while arrived <= sent and at > 0 and reach[row[at]] >= sent:
            at -= 1
        found[t, target] = f"before {row[at]}, till {hold[t, target]}"
    return found


@pytest.mark.jit
@pytest.mark.parametrize("seed", range(16))
def test_slots_are_those_of_the_timeline(seed: int) -> None:
    """In the last four any ops count as writers, several of a storage on either device."""
    graph = random_graph(seed, 12, FAMILIES[seed % 6])
    latency, bandwidth = ((0.25, 16.0), (0.0, 1e30))[seed % 2]
    cluster = cluster_of(2 + seed % 2, latency=latency, bandwidth=bandwidth, serial=seed % 3 == 0)
    place, machine = random_place(graph, cluster.num_devices, seed), machine_for(graph, cluster)
    timeline = emulate(graph.arrays, machine, place, -bottom_levels(graph.arrays, machine, place))
    overwrites, rng = first_overwrites(graph), np.random.default_rng(seed)
    if seed >= 12:
        owners = graph.arrays.tensor_owner[rng.integers(0, graph.arrays.num_tensors, 30)]
        pairs = zip(owners.tolist(), rng.integers(0, 12, 30).tolist(), strict=True)
        overwrites = np.array(sorted(set(pairs)))
    plan = ordered_plan(graph.arrays, cluster.num_devices, place, timeline, overwrites)
    columns = (plan.message_tensor, plan.message_target, plan.message_post, plan.message_hold)
    found = {(t, d): f"before {p}, till {h}" for t, d, p, h in zip(*columns, strict=True)}
    assert found == naive_slots(graph, place, timeline, overwrites)


@pytest.mark.jit
@pytest.mark.parametrize("seed", [199, 298, 721, 2215, 2349])
def test_no_writer_of_another_view_waits_for_ever(seed: int) -> None:
    """Any ops count as writers, as where a view of a storage is written and another one sent.

    No edge orders these two: of 2,500 such graphs, five plans stood still.
    """
    graph = random_graph(seed, 40, FAMILIES[seed % 6])
    machine, a = machine_for(graph, cluster_of(3, serial=True, bandwidth=8.0)), closed_arrays(graph)
    rng = np.random.default_rng(seed)
    place = rng.integers(0, 3, a.num_ops)[a.group]
    owners = a.tensor_owner[rng.integers(0, a.num_tensors, 30)]
    pairs = zip(owners.tolist(), rng.integers(0, a.num_ops, 30).tolist(), strict=True)
    timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
    plan = ordered_plan(a, 3, place, timeline, np.array(sorted(set(pairs))))
    assert np.isfinite(run_lists(a, machine, plan).finish).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_spends_memory_freely_is_read_back_as_it_is(seed: int) -> None:
    """Sends that are held to the end have one mark, however the plan was made."""
    graph = random_graph(seed, 12, FAMILIES[seed])
    position = np.arange(graph.arrays.num_ops)
    plan = free_plan(graph.arrays, 3, random_place(graph, 3, seed), position)
    assert len(plan.message_tensor) > 0
    again = plan_arrays(graph, plan_from_arrays(graph, plan))
    assert [column.tolist() for column in again] == [column.tolist() for column in plan]


@kernel
def first_reaching_kernel(values: Int64[ndarray, " n"], begin: int, end: int, least: float) -> int:
    """Kernels alone may call it."""
    return first_reaching(values, begin, end, least)


@given(
    values=st.lists(st.integers(0, 9), max_size=40).map(sorted),
    ends=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    least=st.integers(-1, 10),
)
def test_the_first_value_that_reaches_a_bound(
    values: list[int], ends: tuple[int, int], least: int
) -> None:
    """Of several that are just as much the first; the end if none is."""
    begin, end = sorted(min(each, len(values)) for each in ends)
    expected = next((i for i in range(begin, end) if values[i] >= least), end)
    found = first_reaching_kernel(np.array(values, dtype=np.int64), begin, end, float(least))
    assert found == expected
