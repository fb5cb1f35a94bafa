"""Clusters in which not every pair of devices is joined: legal plans, or E301."""

import dataclasses

import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.errors import InfeasibleError
from pardnn.place.baselines.contiguous import place_contiguous
from pardnn.place.baselines.heft import place_heft
from pardnn.place.baselines.linear_clustering import place_linear_clustering
from pardnn.place.baselines.m_etf import place_m_etf
from pardnn.place.baselines.m_topo import place_m_topo
from pardnn.place.baselines.round_robin import place_round_robin
from pardnn.place.baselines.single import place_single
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.peak import one_device_peak
from tests.place.machines import limited, machine_for
from tests.strategies import random_graph

pytestmark = pytest.mark.jit

ALL = (
    place_pardnn, place_single, place_round_robin, place_contiguous, place_linear_clustering,
    place_m_topo, place_m_etf, place_heft,
)  # fmt: skip


def chain() -> Cluster:
    """a - b - c, without a link between a and c."""
    return Cluster(
        devices=tuple(Device(name=name) for name in "abc"),
        links=tuple(
            Link(source=source, target=target, bandwidth=64.0, latency=0.25)
            for source, target in ("ab", "ba", "bc", "cb")
        ),
    )


@pytest.mark.parametrize("place", ALL)
@pytest.mark.parametrize("share", [None, 0.7])
def test_legal_or_refused(place, share: float | None) -> None:
    for seed in range(3):
        graph = random_graph(seed, 24)
        limit = share and int(one_device_peak(graph.arrays) * share)
        machine = machine_for(graph, chain())
        code = None
        try:
            plan = place(graph, machine, [limit] * 3).plan
        except InfeasibleError as error:
            plan, code = None, error.code
        if plan is None:
            assert code == "E301"
            continue
        cluster = limited(chain(), limit)
        assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []


@pytest.mark.parametrize("many", [False, True])
def test_memory_that_forces_a_split_over_no_link(many: bool, monkeypatch) -> None:
    if many:
        for module in ("pardnn", "step1_makespan", "step2_memory"):
            monkeypatch.setattr(f"pardnn.place.pardnn.{module}.MANY_OPS", 10)
        monkeypatch.setattr("pardnn.place.pardnn.step2_memory.ATTEMPT_OPS", 10)
    graph = random_graph(3, 24)
    apart = dataclasses.replace(chain(), links=())
    machine, limit = machine_for(graph, apart), int(one_device_peak(graph.arrays) * 0.8)
    with pytest.raises(InfeasibleError, match="which the cluster does not have"):
        place_pardnn(graph, machine, [limit] * 3)


def test_the_missing_link_is_named() -> None:
    graph = random_graph(3, 24)
    with pytest.raises(InfeasibleError, match=r"a link that the cluster does not have: 'op\d+' on"):
        place_round_robin(graph, machine_for(graph, chain()), [None] * 3)
