"""Live bytes and peaks against the checker of plans."""

from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.memory import memory_profiles, peak_bytes
from pardnn.sim.peak import live_bytes, peaks
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
