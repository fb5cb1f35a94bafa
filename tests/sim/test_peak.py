"""Live bytes and peaks against the checker of plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.kernels.jit import kernel
from pardnn.plan.memory import memory_profiles, peak_bytes
from pardnn.plan.plan import Message, Plan, PlanArrays, plan_arrays
from pardnn.sim.peak import (
    live_bytes,
    messages_by_tensor,
    one_device_peak,
    op_needs,
    peaks,
    received,
)
from tests.place.machines import cluster_of, clusters, machine_for, random_place, schedule
from tests.plan.test_memory import exchange
from tests.plan.test_memory import op as op_of
from tests.strategies import graphs


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_peaks_are_those_of_the_checker(graph: Graph, cluster: Cluster, seed: int) -> None:
    k = cluster.num_devices
    machine = machine_for(graph, cluster_of(k))
    plan = schedule(graph, machine, random_place(graph, k, seed))
    assert peaks(graph.arrays, plan).tolist() == peak_bytes(graph, plan)
    profile = [live for curve in memory_profiles(graph, plan) for live in curve]
    assert live_bytes(graph.arrays, plan).tolist() == profile


@kernel
def _received(
    plan: PlanArrays, by_tensor: np.ndarray, tensor_ptr: np.ndarray, tensor: int, device: int
) -> int:
    return received(plan, by_tensor, tensor_ptr, tensor, device)


def test_a_tensor_is_received_by_its_own_message() -> None:
    """Devices that receive others alone have none of it; the last tensor is sent, too."""
    reads = {"a": "", "b": "", "c": "ab", "d": "c"}
    ops = [
        Op(name=name, kind="op" if inputs else "input", inputs=tuple(inputs),
           outputs=(Tensor(name=name, bytes=1),) if name < "d" else (),
           seconds={"accelerator": 1.0})
        for name, inputs in reads.items()
    ]  # fmt: skip
    graph, place = build_graph("last sent", ops), np.array([0, 1, 2, 1])
    plan = schedule(graph, machine_for(graph, cluster_of(4)), place)
    rows, expected = messages_by_tensor(graph.arrays, plan), {(0, 2), (1, 2), (2, 1)}
    for tensor, device in np.ndindex(3, 4):
        found = _received(plan, *rows, tensor, device)
        message = (int(plan.message_tensor[found]), int(plan.message_target[found]))
        assert (found >= 0) == ((tensor, device) in expected)
        assert found == -1 or message == (tensor, device)


@given(graph=graphs(max_ops=14))
def test_an_op_needs_what_it_reads_and_makes_and_its_workspace(graph: Graph) -> None:
    """Each storage once, at the most that is read or made of it."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}

    def owner(name: str) -> str:
        while (of := tensors[name].alias_of) is not None:
            name = of
        return name

    for op, needs in zip(graph.ops, op_needs(graph.arrays).tolist(), strict=True):
        largest: dict[str, int] = {}
        for name in (*op.inputs, *(tensor.name for tensor in op.outputs)):
            size = min(tensors[name].bytes, tensors[owner(name)].bytes)
            largest[owner(name)] = max(size, largest.get(owner(name), 0))
        assert needs == op.workspace + sum(largest.values())


#: Bytes and inputs of a graph like that of the thesis's Fig. 4.3, with sizes for which its text
#: holds: B, F and G are 8, B to F are 11.
FIGURE = {
    "A": (0, ""), "B": (3, "A"), "C": (2, "A"), "D": (2, "A"), "E": (2, "A"),
    "F": (2, "CDE"), "G": (3, "BF"),
}  # fmt: skip


@pytest.mark.parametrize(("order", "peak"), [("ACDEFBG", 8), ("ABCDEFG", 11)])
def test_the_order_decides_over_the_peak(order: str, peak: int) -> None:
    """The two schedules of Fig. 4.3: B early is held while all else runs."""
    graph = build_graph("figure 4.3", [
        Op(name=name, kind="op", inputs=tuple(FIGURE[name][1]),
           outputs=(Tensor(name=name, bytes=FIGURE[name][0]),), seconds={"accelerator": 1.0})
        for name in order
    ])  # fmt: skip
    assert one_device_peak(graph.arrays) == peak


@pytest.mark.parametrize("into", [(), (-1, -1), (0, -1), (-1, 3), (1, 1)])
def test_what_is_received_into_a_storage_that_is_there_takes_no_room(into: tuple[int, ...]) -> None:
    """As the checker counts, message by message; without the field nothing is."""
    graph, plan = exchange("d")
    arrays = plan_arrays(graph, plan)._replace(message_into=np.array(into, dtype=np.int64))
    profile = [live for curve in memory_profiles(graph, arrays) for live in curve]
    assert live_bytes(graph.arrays, arrays).tolist() == profile
    one, other = (7 * (into[1:2] <= (-1,)), 5 * (into[:1] <= (-1,))) if into else (7, 5)
    assert profile == [5, 5 + one + 2, 2 + 3, 7, 7 + other + 1, other + 1 + 4]


@pytest.mark.parametrize("into", [(), (-1,), (0,)])
def test_the_only_message_may_be_received_into_a_storage(into: tuple[int, ...]) -> None:
    graph = build_graph("sent", [op_of("a", 5), op_of("c", 1, "a")])
    message = Message(tensor="a", source=0, target=1, post_before="c", hold_until=None)
    plan = Plan(placement={"a": 0, "c": 1}, order=(("a",), ("c",)), messages=(message,))
    arrays = plan_arrays(graph, plan)._replace(message_into=np.array(into, dtype=np.int64))
    assert live_bytes(graph.arrays, arrays).tolist() == [5, 1 + 5 * (into != (0,))]
