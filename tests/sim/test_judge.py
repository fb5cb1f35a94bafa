"""The judge's kernels against naive twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan
from pardnn.place.ordering.schedule import first_overwrites, schedule
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import memory_curves, peak_bytes
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.bounds import critical_path_seconds, lower_bound_seconds
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels, top_levels
from pardnn.sim.peak import live_bytes, peaks
from tests.place.machines import cluster_of, clusters, machine_for
from tests.place.ordering.test_fit import random_place
from tests.reference.pardnn import least_makespan
from tests.reference.sim import emulated_finish, finish_times
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(max_ops=12), seed=st.integers(0, 9), tight=st.booleans())
def test_order(graph: Graph, seed: int, tight: bool) -> None:
    machine = machine_for(graph, cluster_of(3))
    place = random_place(graph, 3, seed)
    if tight:
        position = file_positions(graph.arrays)
        plan = latest_slot_plan(graph.arrays, 3, place, position, first_overwrites(graph))
    else:
        plan = schedule(graph, machine, place)
    expected = finish_times(graph, machine, plan_from_arrays(graph, plan))
    assert expected is not None
    finish = simulate(graph, machine, plan).finish
    assert finish.tolist() == [expected[op.name] for op in graph.ops]


@pytest.mark.parametrize("fifo", [True, False])
@given(graph=graphs(max_ops=12, memory=False), seed=st.integers(0, 9))
def test_dynamic(fifo: bool, graph: Graph, seed: int) -> None:
    machine = machine_for(graph, cluster_of(3, bandwidth=3.0, latency=0.11))
    # No op without duration: at one instant, those make the order of devices matter.
    machine = machine._replace(seconds=machine.seconds + 0.13)
    place = np.random.default_rng(seed).integers(0, 3, len(graph.ops))
    key = None if fifo else -bottom_levels(graph.arrays, machine, place)
    finish = emulate(graph.arrays, machine, place, key).finish
    expected = emulated_finish(
        graph, machine, place.tolist(), None if key is None else key.tolist()
    )
    assert finish.tolist() == pytest.approx(expected)


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_peaks_are_those_of_the_checker(graph: Graph, cluster: Cluster, seed: int) -> None:
    k = cluster.num_devices
    machine = machine_for(graph, cluster_of(k))
    plan = schedule(graph, machine, random_place(graph, k, seed))
    assert peaks(graph.arrays, plan).tolist() == peak_bytes(graph, plan)
    profile = [live for curve in memory_curves(graph, plan) for live in curve]
    assert live_bytes(graph.arrays, plan).tolist() == profile


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9))
def test_levels_are_longest_paths(graph: Graph, seed: int) -> None:
    machine = machine_for(graph, cluster_of(2))
    place = random_place(graph, 2, seed)
    top = top_levels(graph.arrays, machine, place)
    bottom = bottom_levels(graph.arrays, machine, place)
    longest = (top + bottom).max()
    assert longest == pytest.approx(bottom.max())
    assert longest <= simulate(graph, machine, schedule(graph, machine, place)).makespan + 1e-9
    assert critical_path_seconds(graph.arrays, machine) <= longest + 1e-9


def test_bound_is_below_the_optimum() -> None:
    for seed in range(10):
        graph = random_graph(seed, 6, FAMILIES[seed % 5], memory=False)
        machine = machine_for(graph, cluster_of(2, speeds=(1.0, 2.0)))
        best = least_makespan(graph, machine, range(len(graph.ops)))
        assert lower_bound_seconds(graph.arrays, machine) <= best * (1 + 1e-12)


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9))
def test_serial_links_never_help(graph: Graph, seed: int) -> None:
    place = random_place(graph, 3, seed)
    times = []
    for serial in (False, True):
        machine = machine_for(graph, cluster_of(3, serial=serial))
        plan = schedule(graph, machine, place)
        cluster = cluster_of(3, serial=serial)
        assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
        times.append(simulate(graph, machine, plan).busy(place, 3).sum())
    assert times[0] == pytest.approx(times[1])  # the work is the same, whatever the links
