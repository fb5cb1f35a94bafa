"""Live bytes and peaks against the checker of plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.memory import memory_profiles, peak_bytes
from pardnn.sim.peak import live_bytes, one_device_peak, peaks
from tests.place.machines import cluster_of, clusters, machine_for, random_place, schedule
from tests.strategies import graphs


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_peaks_are_those_of_the_checker(graph: Graph, cluster: Cluster, seed: int) -> None:
    k = cluster.num_devices
    machine = machine_for(graph, cluster_of(k))
    plan = schedule(graph, machine, random_place(graph, k, seed))
    assert peaks(graph.arrays, plan).tolist() == peak_bytes(graph, plan)
    profile = [live for curve in memory_profiles(graph, plan) for live in curve]
    assert live_bytes(graph.arrays, plan).tolist() == profile


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
