"""The order of least peak: that of all orders on tiny graphs, and never above eager frees."""

import dataclasses

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.baselines.single import place_single
from pardnn.place.ordering import least_peak
from pardnn.place.ordering.least_peak import least_peak_positions
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.ordering.schedule import free_plan
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, limited, machine_for
from tests.reference import least_limit
from tests.reference import pardnn as naive
from tests.reference.least_peak import Annealer
from tests.strategies import FAMILIES, random_graph


def peak_of(a: GraphArrays, position: np.ndarray) -> int:
    return int(peaks(a, free_plan(a, 1, np.zeros(a.num_ops, dtype=np.int64), position))[0])


def tiny(seed: int) -> Graph:
    """Seven ops; views, writes in place and workspaces in two of three."""
    return random_graph(seed, 7, FAMILIES[seed % len(FAMILIES)], memory=seed % 3 > 0)


def test_no_order_of_a_tiny_graph_has_a_lower_peak(monkeypatch) -> None:
    monkeypatch.setattr(least_peak, "WORK_OF_PAIR", 250.0)  # plain Python takes its time
    lowered = 0
    for seed in range(20):
        graph = tiny(seed)
        found = peak_of(graph.arrays, least_peak_positions(graph.arrays))
        assert found == least_limit.least_peak(graph, [0] * len(graph.ops))
        lowered += found < peak_of(graph.arrays, eager_free_positions(graph.arrays))
    assert lowered > 1


def in_hundreds(graph: Graph) -> Graph:
    """A hundred times the bytes: a target of 99 % is whole, and so are sums above it."""
    return build_graph("hundreds", [
        dataclasses.replace(op, workspace=100 * op.workspace, outputs=tuple(
            dataclasses.replace(tensor, bytes=100 * tensor.bytes) for tensor in op.outputs
        ))
        for op in graph.ops
    ])  # fmt: skip


def test_moves_are_those_of_an_annealer_who_sums_up_anew() -> None:
    lowered = 0
    for seed in range(8):
        graph = in_hundreds(random_graph(seed, 9, FAMILIES[seed % 6], memory=seed % 3 > 0))
        start = np.argsort(file_positions(graph.arrays)).astype(np.int64)
        twin, best = Annealer(graph, start.tolist()), start.copy()
        peak = max(twin.held(twin.order))
        assert int(0.99 * peak) == 0.99 * peak
        step = least_peak._step_of(graph.arrays)
        least_peak._search_kernel(step, least_peak._room_for_order(step), 4000.0, 0.25, best)
        twin.anneal(3000.0)
        lowered += max(twin.held(twin.order)) < peak
        twin.shorten(1000.0)
        assert best.tolist() == twin.order
    assert lowered > 2


@pytest.mark.jit  # as plain Python the search takes minutes
def test_larger_graphs_need_less_in_a_topological_order(monkeypatch) -> None:
    monkeypatch.setattr(least_peak, "WORK", 1e7)
    parts: list[float] = []
    for seed in range(12):
        graph = random_graph(seed, 80, FAMILIES[seed % len(FAMILIES)], memory=seed % 2 == 0)
        a, position = graph.arrays, least_peak_positions(graph.arrays)
        assert sorted(position.tolist()) == list(range(a.num_ops))
        after = naive.op_successors(graph)
        assert all(position[i] < position[j] for i in range(a.num_ops) for j in after[i])
        parts.append(peak_of(a, position) / peak_of(a, eager_free_positions(a)))
    assert max(parts) <= 1
    assert np.mean(parts) < 0.97


@pytest.mark.jit
def test_within_the_peak_less_is_held_at_other_times() -> None:
    """Of a wide graph's orders of one peak, the one that shortens lifetimes holds less in sum."""
    graph = random_graph(3, 80, FAMILIES[3])

    def held(shortening: float) -> tuple[int, int]:
        step = least_peak._step_of(graph.arrays)
        best = np.argsort(eager_free_positions(graph.arrays)).astype(np.int64)
        order = least_peak._room_for_order(step)
        least_peak._search_kernel(step, order, 1e7, shortening, best)
        return int(order.held.max()), int(order.held.sum())

    (without, long), (shortened, short) = held(1e-9), held(0.5)
    assert without == shortened
    assert short < 0.97 * long


@pytest.mark.jit
def test_one_device_runs_what_no_other_order_fits() -> None:
    lowered = 0
    for seed in range(6):
        graph = random_graph(seed, 80, FAMILIES[seed % len(FAMILIES)])
        a = graph.arrays
        limit = peak_of(a, least_peak_positions(a))
        lowered += limit < min(peak_of(a, file_positions(a)), peak_of(a, eager_free_positions(a)))
        cluster = limited(cluster_of(1), limit)
        plan = place_single(graph, machine_for(graph, cluster), [limit]).plan
        assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    assert lowered > 2
