"""Placements of small graphs, with and without limits, are those that are kept as text."""

import sys
from typing import Any

import pytest

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.pardnn import place_pardnn
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.plan import PlanArrays
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine
from pardnn.sim.peak import one_device_peak, peaks
from pardnn.sim.period import period
from pardnn.sim.policy_peak import policy_peaks
from tests.kept import assert_kept, check_sum
from tests.place.grouped import grouped_graph
from tests.place.machines import cluster_of, machine_for
from tests.strategies import FAMILIES, random_graph

#: Seconds and messages are sums of quarters and of powers of two: the same on every machine.
LINKS: tuple[dict[str, Any], ...] = (
    {},
    {"bandwidth": 16.0},
    {"speeds": (1.0, 0.5)},
    {"serial": True},
)
#: Usable bytes of a device, as shares of what one device alone needs.
SHARES = (None, 0.8, 0.6, 0.45)


#: Of graphs: some without limits, two that nothing fits, many from which the memory step moves ops.
SEEDS = (0, 1, 8, 9, 2, 4, 3, 5, 10, 11, 13, 19, 27, 28, 31, 34, 35, 37)

pytestmark = pytest.mark.skipif(
    "shape_checker" in sys.modules,
    reason="20 times as long where shapes are checked; compiled kernels run it too",
)


def case(seed: int) -> tuple[str, Graph, Machine, list[int | None]]:
    graph = random_graph(seed, 14 + seed % 5, FAMILIES[seed % 6])
    if seed % 5 == 4:
        graph = grouped_graph(seed, 12)
    k, links = 2 + seed % 3, LINKS[seed % 4]
    share = SHARES[seed // 2 % 4]
    limit = None if share is None else int(share * one_device_peak(graph.arrays))
    machine = machine_for(graph, cluster_of(k, **links))
    return f"{graph.name} on {k}, {links or 'plain'}, {limit}", graph, machine, [limit] * k


def text_of(graph: Graph, machine: Machine, plan: PlanArrays) -> str:
    a = graph.arrays
    line = f"{simulate(graph, machine, plan).makespan:g} s"
    for policy in ("fifo", "priority"):
        timeline = simulate(graph, machine, plan, policy)
        held = policy_peaks(a, plan.place, machine.num_devices, timeline).tolist()
        line += f", {policy} {timeline.makespan:g} s {held}"
    line += f", period {period(a, machine, plan).seconds:g} s, {peaks(a, plan).tolist()} bytes"
    return f"{line}, on {''.join(map(str, plan.place.tolist()))}, {check_sum(*plan)}"


@pytest.mark.parametrize("seed", SEEDS)
def test_placements_are_those_that_are_kept(seed: int) -> None:
    name, graph, machine, limits = case(seed)
    lines = [name, f"at least {lower_bound_seconds(graph.arrays, machine, limits):.6g} s"]
    for algorithm in (place_pardnn, place_thesis):
        try:
            found = algorithm(graph, machine, list(limits))
        except InfeasibleError as error:
            text = error.message.splitlines()[0]
        else:
            text = f"{text_of(graph, machine, found.plan)}, {found.moved_ops} moved"
        lines.append(f"{algorithm.__name__}: {text}")
    assert_kept("placements.txt", lines)
