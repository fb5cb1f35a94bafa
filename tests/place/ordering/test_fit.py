"""Orders and message positions: valid plans, no more memory than their order asks for."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import (
    BISECTIONS,
    fit_near,
    fit_order,
    fit_schedule,
    fits,
    holds_residuals,
)
from pardnn.place.ordering.low_memory_orders import (
    blended_positions,
    eager_free_positions,
    file_positions,
)
from pardnn.place.ordering.memory_bounded import (
    fitting_plan,
    latest_slot_plan,
    limits,
    memory_bounded_plan,
)
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import PlanArrays, plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists, simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks, residual_bytes
from pardnn.sim.timeline import Timeline
from tests.place.machines import cluster_of, clusters, limited, machine_for, random_place
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(max_ops=14), cluster=clusters(), seed=st.integers(0, 9))
def test_the_simulator_finds_the_emulation_again(graph: Graph, cluster: Cluster, seed: int) -> None:
    cluster = cluster_of(cluster.num_devices, serial=cluster.link_model == "serial")
    machine = machine_for(graph, cluster)
    place = random_place(graph, cluster.num_devices, seed)
    key = -bottom_levels(graph.arrays, machine, place)
    timeline = emulate(graph.arrays, machine, place, key)
    overwrites = first_overwrites(graph)
    plan = ordered_plan(graph.arrays, machine.num_devices, place, timeline, overwrites)
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    if len(overwrites) == 0:  # a send that must leave before its tensor is overwritten may wait
        assert simulate(graph, machine, plan).makespan <= timeline.makespan * (1 + 1e-12)


@pytest.mark.jit
def test_a_placement_that_fits_in_some_order_is_not_refused() -> None:
    for seed in range(20):
        graph = random_graph(seed, 40, FAMILIES[seed % len(FAMILIES)])
        place, position = random_place(graph, 2, seed), file_positions(graph.arrays)
        machine = machine_for(graph, cluster_of(2))
        tight = latest_slot_plan(graph.arrays, 2, place, position, first_overwrites(graph))
        capacities = [int(peak) for peak in peaks(graph.arrays, tight)]
        plan = fit_schedule(graph, machine, place, capacities)
        assert plan is not None
        assert fits(graph.arrays, plan, capacities)
        within = limited(cluster_of(2), max(capacities))
        assert plan_problems(graph, plan_from_arrays(graph, plan), within) == []


def _between(
    graph: Graph,
    machine: Machine,
    place: np.ndarray,
    timeline: Timeline,
    base: np.ndarray,
    capacities: Sequence[int],
) -> tuple[PlanArrays | None, float]:
    """Return the fastest plan of all blends that `fit_order` tries, each made and simulated."""
    a, written = graph.arrays, first_overwrites(graph)
    best, low, high, weight = (None, np.inf), 0.0, 1.0, 0.0
    for step in range(2 + BISECTIONS):
        position = blended_positions(timeline.dispatch, base, weight)
        plan = memory_bounded_plan(a, machine, place, position, capacities, written)
        if fits(a, plan, capacities):
            seconds = run_lists(a, machine, plan).makespan
            best = (plan, seconds) if seconds < best[1] else best
            if weight == 0:
                break
            high = weight
        elif weight == 1:
            break
        else:
            low = weight
        weight = 1.0 if step == 0 else (low + high) / 2
    return best


@pytest.mark.jit
@pytest.mark.parametrize("serial", [False, True])
def test_what_a_bound_leaves_out_is_no_faster(serial: bool) -> None:
    """Plans below some seconds are those of a search that makes and simulates every plan."""
    outcomes = set[tuple[bool, bool]]()
    for seed in range(24):
        graph = random_graph(seed, 40, FAMILIES[seed % len(FAMILIES)])
        a, machine = graph.arrays, machine_for(graph, cluster_of(3, serial=serial))
        place, written = random_place(graph, 3, seed), first_overwrites(graph)
        timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
        own, tight = (
            peaks(a, latest_slot_plan(a, 3, place, position, written))
            for position in (timeline.dispatch, file_positions(a))
        )
        share = (0.0, 0.3, 0.8)[seed % 3]
        capacities = (share * own + (1 - share) * tight).astype(int).tolist()
        given = a, machine, place, timeline
        bases = file_positions(a), eager_free_positions(a)
        every = [_between(graph, machine, place, timeline, base, capacities) for base in bases]
        plan, seconds = min(every, key=lambda one: one[1])
        for below in (np.inf, seconds * (1 + 1e-9), seconds, 0.9 * min(seconds, 1e9)):
            near = fit_near(*given, capacities, written, below=below)
            expected = plan if seconds < below else None
            assert (near is None) == (expected is None)
            if near is not None and expected is not None:
                assert all(np.array_equal(*both) for both in zip(near, expected, strict=True))
            outcomes.add((bool(np.isfinite(seconds)), near is None))
            one = fit_order(*given, bases[0], capacities, written, below=below)
            assert (one is None) == (not every[0][1] < below)
    assert outcomes >= {(True, False), (True, True)}


@pytest.mark.parametrize("serial", [False, True])
def test_seconds_of_an_order_are_those_of_its_plan(serial: bool) -> None:
    is_left_out = 0
    for seed in range(20):
        graph = random_graph(seed, 30, "layered")
        a, machine = graph.arrays, machine_for(graph, cluster_of(3, serial=serial))
        place, position = random_place(graph, 3, seed), file_positions(a)
        written = first_overwrites(graph)
        least = peaks(a, latest_slot_plan(a, 3, place, position, written))
        capacities = (np.array([0.9, 1.5, 2]) * least).astype(int).tolist()
        given = a, machine, place, position, capacities, written
        found = fitting_plan(*given)
        if found is None or found.plan is None:
            continue
        assert found.seconds == run_lists(a, machine, found.plan).makespan
        for share in (0.5, 0.9, 1.0):
            slow = fitting_plan(*given, below=share * found.seconds)
            assert slow is not None  # it fits, whatever it takes
            assert slow.plan is None or slow.seconds == found.seconds
            is_left_out += slow.plan is None
    assert (is_left_out > 0) == (not serial)


@pytest.mark.parametrize(("num_devices", "num_ops"), [(3, 12), (4, 60)])
def test_whether_an_order_fits_is_asked_of_slow_ones_too(num_devices: int, num_ops: int) -> None:
    """None of these waits for ever, as slow ones do that are told to fit: 24 of 18,000 orders."""
    refused = 0
    for seed in range(14):
        graph = random_graph(seed, num_ops, FAMILIES[seed % len(FAMILIES)])
        a, machine = graph.arrays, machine_for(graph, cluster_of(num_devices))
        place, position = random_place(graph, num_devices, seed), file_positions(a)
        written = first_overwrites(graph)
        least = peaks(a, latest_slot_plan(a, num_devices, place, position, written))
        for share in (0.9, 0.97):
            given = a, machine, place, position, (share * least).astype(int).tolist(), written
            found = fitting_plan(*given)
            assert (fitting_plan(*given, below=0.0) is None) == (found is None)
            refused += found is None
    assert refused


def test_no_order_fits_where_residuals_do_not() -> None:
    refused = 0
    for seed in range(12):
        graph = random_graph(seed, 30, FAMILIES[seed % len(FAMILIES)])
        a, place = graph.arrays, random_place(graph, 3, seed)
        residual = residual_bytes(a, np.arange(a.num_ops))
        tight = peaks(a, latest_slot_plan(a, 3, place, file_positions(a), first_overwrites(graph)))
        held = np.bincount(place, weights=residual, minlength=3).astype(np.int64)
        assert (tight >= held).all()
        for short in range(3):
            usable = [int(size) - (device == short) for device, size in enumerate(held)]
            assert not holds_residuals(residual, place, limits(usable))
            refused += 1
        assert holds_residuals(residual, place, limits([int(size) for size in held]))
    assert refused
