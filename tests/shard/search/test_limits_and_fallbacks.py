"""What a limit on memory leaves, beside trying all; what is taken where the search is poor."""

import itertools
import math
import unittest.mock
from typing import Any

import numpy as np
import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import baselines, objective_bytes, tofu
from pardnn.shard.search.baselines import CHOOSERS, icml18, replicas
from pardnn.shard.search.coarsening import NEEDED, TRAINING, op_calls
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, solve
from pardnn.shard.search.memory_estimate import memory_weights, peak_estimate
from pardnn.shard.search.objective import TableRequest
from pardnn.shard.search.objective_bytes import BytesObjective, elements
from pardnn.shard.search.objective_seconds import SecondsObjective, seconds_objective
from pardnn.shard.search.problem import Problem, make_problem
from pardnn.shard.search.recursion import recursive_search
from pardnn.shard.search.tofu import TimedSearch
from testbed.hand_graphs import Steps, chain, matmul, mlp
from tests.shard.search.test_dynamic_program import empty, terms

pytestmark = pytest.mark.jit


def timed(graph: Graph, cluster: Cluster) -> tuple[Problem, SecondsObjective]:
    problem = make_problem(graph, NEEDED)
    return problem, seconds_objective(graph, problem, cluster, preset_costs(graph, "k80"))


def frontier(tables: CostTables) -> list[tuple[float, float]]:
    """Peak and seconds of the best ops for all layouts: the corners of the lower convex hull."""
    axes = tuple(range(len(tables.axis_sizes)))
    variables, factors = terms(tables, empty(tables, len(axes)), axes)
    found: dict[float, float] = {}
    for at in itertools.product(*(range(len(options)) for options, _ in variables)):
        total = sum(float(alone[c]) for (_, alone), c in zip(variables, at, strict=True))
        for count, _, computing, moved in factors:
            total += count * (computing + sum(v[:, at[number]] for number, v in moved)).min()
        layouts = tuple(o[c] for (o, _), c in zip(variables, at, strict=True))
        objective: Any = tables.objective
        state = State(layouts, ())
        peak = peak_estimate(tables.problem, objective.weights, state, tables.axis_sizes)
        found[peak] = min(total, found.get(peak, math.inf))
    corners: list[tuple[float, float]] = []
    for peak, seconds in sorted(found.items()):
        if corners and seconds >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (a, s), (b, t) = corners[-2:]
            if (s - t) * (peak - b) > (t - seconds) * (b - a):
                break
            corners.pop()
        corners.append((peak, seconds))
    return corners


CASES = [
    (chain(64, 32, 96, 16), Cluster.uniform(2, bandwidth=1e8, latency=1e-6)),
    (matmul(512, 256, 384), Cluster.uniform(2, bandwidth=1e9)),
    (chain(32, 64, 128), Cluster.uniform(4, bandwidth=1e8)),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_limit_leaves_the_fastest_that_a_price_on_memory_can_find(number: int) -> None:
    """Corners of the hull of (peak, seconds); at the price that is returned none is better."""
    graph, cluster = CASES[number]
    search = TimedSearch(graph, cluster, preset_costs(graph, "k80"))
    tables, objective = search.tables, search.objective
    corners = frontier(tables)
    assert len(corners) > 1
    for most, below in itertools.pairwise(reversed(corners)):
        for capacity in (most[0], (most[0] + below[0]) / 2):
            found, price = search._cheapest(capacity)
            peak = peak_estimate(search.problem, objective.weights, found.state, search.mesh.shape)
            expected = most if capacity == most[0] else below
            assert peak == pytest.approx(expected[0])
            assert found.cost == pytest.approx(expected[1])
            objective.price = 0.0
            alone = CostTables(search.problem, objective, search.mesh.shape)
            assert solve(alone, found.state, ()).cost == pytest.approx(found.cost)
            assert price >= 0.0
            dearest = min(s + price * p for p, s in corners)
            assert found.cost + price * peak == pytest.approx(dearest)


def test_what_just_fits_has_no_price() -> None:
    graph, cluster = CASES[1]
    search = TimedSearch(graph, cluster, preset_costs(graph, "k80"))

    def peak_of(found: Solution) -> float:
        return peak_estimate(search.problem, search.objective.weights, found.state, (2,))

    free = tofu._fastest(graph, search.calls, search.tables)
    for capacity in (None, peak_of(free)):
        assert search._cheapest(capacity) == (free, 0.0)
    found, price = search._cheapest(0.99 * peak_of(free))
    assert price > 0.0
    assert found.state != free.state
    none, price = search._cheapest(1.0)
    assert price > 0.0  # nothing fits: what holds least is left, and its price
    assert peak_of(none) == pytest.approx(min(p for p, _ in frontier(search.tables)))


def test_states_at_a_price_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = CASES[2]
    asked = unittest.mock.Mock(wraps=tofu.best_state)
    monkeypatch.setattr(tofu, "best_state", asked)
    search = TimedSearch(graph, cluster, preset_costs(graph, "k80"))
    peaks = [peak for peak, _ in frontier(search.tables)]
    capacity = (peaks[0] + peaks[1]) / 2
    first = search.within(capacity)
    count = asked.call_count
    assert search.within(capacity) == first
    assert asked.call_count == count
    fewer = TimedSearch(graph, cluster, preset_costs(graph, "k80")).within(peaks[-1])
    assert search.within(peaks[-1]) == fewer


def poor(tables: CostTables) -> Solution:
    """The worst layouts and loops of each axis, and no claim to be the best."""

    class Backwards(BytesObjective):
        may_replicate = tables.objective.may_replicate

        def communication(self, requests: Any) -> list[np.ndarray]:
            return [-values for values in BytesObjective.communication(self, requests)]

    state = recursive_search(CostTables(tables.problem, Backwards(), tables.axis_sizes)).state
    return solve(tables, state, ())._replace(is_exact=False)


@pytest.mark.parametrize(("bandwidth", "batch"), [(1e3, 64), (1e9, 65536)])
def test_nothing_slower_than_one_device_or_data_parallelism_is_taken(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, batch: int
) -> None:
    """Slow links leave all whole; a large batch is cut, the weights are not."""
    graph = mlp(batch, 64, 64, 64)
    calls = op_calls(graph)
    problem, objective = timed(graph, Cluster.uniform(2, bandwidth=bandwidth, latency=0))
    tables = CostTables(problem, objective, (2,))
    monkeypatch.setattr(tofu, "best_state", poor)
    monkeypatch.setattr(tofu, "polished", lambda _, solution: solution)
    found = tofu._fastest(graph, calls, tables)
    none = ((None,),)
    whole = State(none * len(problem.variables), none * len(problem.factors))
    costs = [poor(tables).cost, solve(tables, whole, ()).cost, replicas(graph, calls, tables).cost]
    assert found.cost == min(costs) < costs[0]
    assert (found.state == whole) == (batch == 64)
    layouts = {name: problem.layout(name, found.state.layouts) for name in ("x", "w1", "w2")}
    assert layouts["w1"] == layouts["w2"] == (None,)
    assert layouts["x"] == ((None,) if batch == 64 else (0,))


@pytest.mark.parametrize("price", [0.0, 4.0])
def test_no_baseline_is_better_at_a_price_either(
    monkeypatch: pytest.MonkeyPatch, price: float
) -> None:
    graph, mesh = mlp(23, 17, 29, 19), make_mesh((2, 2))
    monkeypatch.setattr(tofu, "best_state", poor)
    found = tofu.find_sharding(graph, mesh, memory_price=price)
    problem, calls = make_problem(graph, TRAINING), op_calls(graph)
    weights = memory_weights(graph, problem)
    scale = sum(weights.values()) / 4
    objective = BytesObjective(weights, price, scale) if price else BytesObjective()
    for choose in CHOOSERS.values():
        tables = CostTables(problem, objective, (2, 2))
        assert found.cost <= choose(graph, calls, tables, 2).cost
    tables = CostTables(problem, objective, (2, 2))
    assert found.cost < poor(tables).cost


def test_baselines_whose_first_cut_is_far_off_are_not_carried_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where many ops are distinct; each is asked for one axis first."""
    graph, asked = mlp(24, 16, 32, 8), list[tuple[str, int]]()
    least = recursive_search(
        CostTables(make_problem(graph, TRAINING), BytesObjective(), (2, 2)), count=1
    ).cost

    def chooser(name: str, first: float) -> Any:
        def choose(graph: Graph, calls: Any, tables: CostTables, count: int) -> Solution:
            assert isinstance(graph, Graph)
            assert isinstance(calls, list)
            asked.append((name, count))
            found = recursive_search(tables)
            return found._replace(cost=first if count == 1 else math.inf)

        return choose

    choosers = {"near": chooser("near", tofu.FAR * least), "far": chooser("far", 1.6 * least)}
    monkeypatch.setattr(tofu, "CHOOSERS", choosers)
    monkeypatch.setattr(tofu, "best_state", poor)
    monkeypatch.setattr(tofu, "MANY_FACTORS", 0)
    tofu.find_sharding(graph, make_mesh((2, 2)))
    assert asked == [("near", 1), ("near", 2), ("far", 1)]
    asked.clear()
    monkeypatch.setattr(tofu, "MANY_FACTORS", 1000)
    tofu.find_sharding(graph, make_mesh((2, 2)))
    assert asked == [("near", 2), ("far", 2)]


def test_icml18_adds_up_no_partial_results() -> None:
    """A sum over all dims can be cut in no other way: each device takes all of it."""
    s = Steps()
    s.source("x", (4, 6), "input")
    s.mm("y", "x", s.source("w", (6, 8)))
    s.call("total", "aten.sum.default", ["y"], ())
    found = icml18(s.graph(), make_mesh((2,)))
    assert found.axes["total"] == (None,)
    assert found.axes["y"] in (("i",), ("j",))
    # By output and mesh axis: one that is in parts is one too many.
    assert baselines._keeps_outputs([(False, False), (False, False)])
    assert not baselines._keeps_outputs([(False, False), (True, False)])


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_few_boxes_at_a_time_are_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Rows of 8 x 4 by 4 x 2: each of two devices gets the other's four elements of w."""
    monkeypatch.setattr(objective_bytes, "_AT_ONCE", at_once)
    tables = CostTables(make_problem(matmul(8, 4, 2), NEEDED), BytesObjective(), (2,))
    assert recursive_search(tables).cost == 2 * 4 * 4


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_a_sum_to_one_number_is_exchanged(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Each of two devices gets the other's part: an element each, however many fit at a time."""
    s = Steps()
    s.source("x", (4, 6), "input")
    s.call("total", "aten.sum.default", ["x"], ())
    problem = make_problem(s.graph(), NEEDED)
    (factor,) = problem.factors
    monkeypatch.setattr(objective_bytes, "_AT_ONCE", at_once)
    strategies = CostTables(problem, BytesObjective(), (2,)).strategies(factor, (None,), [0])
    requests = [
        TableRequest(operand, strategies, np.zeros((1, 2, 0, 2), np.int64), (2,))
        for operand in factor.operands
        if operand.outputs
    ]
    assert [found.tolist() for found in elements(requests)] == [[[2]] * len(strategies)]
