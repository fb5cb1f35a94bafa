"""Plans for engines with their own scheduler, and the thesis's steps alone."""

import numpy as np
import pytest

import pardnn
from pardnn.errors import InfeasibleError, UsageError
from pardnn.place.thesis.policy_memory import fit_scheduler, scheduled
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.engine import simulate
from pardnn.sim.peak import one_device_peak
from pardnn.sim.policy_peak import policy_peaks
from tests.place.machines import cluster_of, limited, machine_for
from tests.sim.test_policy_peak import three_pairs
from tests.strategies import FAMILIES, random_graph

pytestmark = pytest.mark.jit


def test_memory_is_that_of_the_scheduler_that_will_run_it() -> None:
    graph = three_pairs()
    free = pardnn.plan(graph, cluster_of(1, memory=15), algorithm="single", reserve=0.0)
    assert pardnn.simulate(graph, free).peak_bytes == (13,)
    under = pardnn.simulate(graph, free, policy="fifo")
    assert (under.peak_bytes, under.peak_along) == ((31,), "time")
    with pytest.raises(InfeasibleError, match="under fifo"):
        pardnn.plan(graph, cluster_of(1, memory=15), reserve=0.0, policy="fifo")
    spread = pardnn.plan(graph, cluster_of(3, memory=15), reserve=0.0, policy="fifo")
    assert max(pardnn.simulate(graph, spread, policy="fifo").peak_bytes) <= 15
    assert any("under fifo" in note for note in spread.notes)


def test_a_placement_that_fits_to_the_last_byte_is_kept() -> None:
    kept = 0
    for seed in range(6):
        graph = random_graph(seed, 10, FAMILIES[seed % 5], memory=False)
        machine, place = machine_for(graph, cluster_of(2)), np.arange(len(graph.ops)) % 2
        timeline = scheduled(graph.arrays, machine, place, "fifo")
        peaks = policy_peaks(graph.arrays, place, 2, timeline).tolist()
        found = fit_scheduler(graph, machine, place, peaks, "fifo", only=True)
        if found is not None:
            kept += 1
            assert found.moved_ops == 0
            assert found.plan.place.tolist() == place.tolist()
    assert kept > 1


def test_an_engine_with_its_own_scheduler_runs_whole_ops() -> None:
    with pytest.raises(UsageError, match="cuts ops"):
        pardnn.plan(three_pairs(), cluster_of(2), algorithm="tofu", policy="fifo")
    with pytest.raises(UsageError, match="order, fifo or priority"):
        pardnn.plan(three_pairs(), cluster_of(2), policy="lifo")  # pyright: ignore


@pytest.mark.parametrize("family", FAMILIES)
def test_thesis_plans_fit_under_fifo_and_in_their_order(family: str) -> None:
    graph = random_graph(5, 60, family)
    peak, cluster = one_device_peak(graph.arrays), cluster_of(3)
    machine = machine_for(graph, cluster)
    for limit in (None, peak, int(peak * 0.8)):
        try:
            plan = place_thesis(graph, machine, [limit] * 3).plan
        except InfeasibleError:
            assert limit is not None
            continue
        within = limited(cluster, limit)
        assert plan_problems(graph, plan_from_arrays(graph, plan), within) == []
        timeline = scheduled(graph.arrays, machine, plan.place, "fifo")
        if limit is None:
            assert simulate(graph, machine, plan).makespan == timeline.makespan
        else:
            assert policy_peaks(graph.arrays, plan.place, 3, timeline).max() <= limit
