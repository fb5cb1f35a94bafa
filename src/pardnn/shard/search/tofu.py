"""Tofu's search: the sharding that moves the fewest bytes, or takes the fewest seconds.

Problem: find a layout for every tensor and loops for every op, over all axes of a mesh.
Idea: coarsen the graph (`coarsening`), then choose mesh axis by mesh axis (`recursion`), each by a
dynamic program over the coarse graph (`dynamic_program`) inside the blocks of the earlier axes.
Under `bytes` the baselines complete the portfolio; under `seconds` a price on memory enforces the
limit.
Complexity: O(ops) to read the graph; the rest grows with the distinct ops.
Reference: Tofu (EuroSys 2019), section 5. Deviations: see docs/algorithms/tofu.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs, graph_costs
from pardnn.errors import UsageError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Mesh, make_mesh
from pardnn.shard import aten as _descriptions  # noqa: F401  (searching is no time to load them)
from pardnn.shard.cache import begin_graph
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.search.baselines import CHOOSERS, baseline_problem, replicas
from pardnn.shard.search.coarsening import OpCall, op_calls
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, solve
from pardnn.shard.search.free_gradients import free_gradients
from pardnn.shard.search.memory_estimate import (
    SAME_MEMORY,
    memory_weights,
    owned_estimate,
    peak_estimate,
)
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import SecondsObjective, seconds_objective
from pardnn.shard.search.problem import Problem
from pardnn.shard.search.recursion import (
    FEW_CALLS,
    FEW_FACTORS,
    MANY_FACTORS,
    best_state,
    coarse_problem,
    expanded,
    one_axis_solution,
    polished,
    recursive_search,
)
from pardnn.shard.sharding import FixedLayouts, Sharding

#: Prices of memory that are tried.
PRICES = 8
#: Times the least first cut, above which a baseline is not carried on where many ops are distinct.
#: On 17 models what it moves in the end was never below 0.69 of that ratio.
FAR = 1.5


class SearchResult(NamedTuple):
    """A sharding, and how it was found.

    Attributes:
        sharding: The decision.
        cost: Bytes or seconds.
        is_exact: Whether no sharding with the same equivalence classes is better.
        level: Of coarsening.
        num_factors: Number of distinct ops in the search.
    """

    sharding: Sharding
    cost: float
    is_exact: bool
    level: int
    num_factors: int


def search(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str = "bytes",
    *,
    costs: Costs | None = None,
    capacity: float | None = None,
    memory_price: float = 0.0,
    fixed: FixedLayouts | None = None,
) -> Sharding:
    """Return how to cut every tensor and every op of a graph.

    Args:
        graph: One training step.
        target: A mesh, or a cluster, whose number of devices is split into prime factors.
        objective: "bytes": the traffic of a step, every tensor cut. "seconds": estimated duration;
            tensors and ops may stay whole.
        costs: Of the graph's ops, for "seconds"; by default those stated by the ops.
        capacity: Usable bytes of the smallest device, for "seconds"; None is unlimited. It is
            compared with an estimate: the resulting plan has the exact peak.
        memory_price: Bytes of traffic that a byte on the fullest device is worth, for "bytes".
        fixed: State that stays where it is, and its mesh; None for none.

    Raises:
        UsageError: E212, for another objective, or "seconds" without a cluster.
        InfeasibleError: E301, if the step needs other layouts of what is fixed.
    """
    return find_sharding(
        graph,
        target,
        objective,
        costs=costs,
        capacity=capacity,
        memory_price=memory_price,
        fixed=fixed,
    ).sharding


def find_sharding(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str = "bytes",
    *,
    mesh: Mesh | None = None,
    costs: Costs | None = None,
    capacity: float | None = None,
    memory_price: float = 0.0,
    fixed: FixedLayouts | None = None,
) -> SearchResult:
    """Search a sharding, and say how it was found.

    Args:
        graph: See `search`.
        target: See `search`.
        objective: See `search`.
        mesh: The mesh of a cluster; that of `mesh_of` if not given.
        costs: See `search`.
        capacity: See `search`.
        memory_price: See `search`.
        fixed: See `search`.

    Raises:
        UsageError: E212, for another objective, or "seconds" without a cluster.
        InfeasibleError: E301, if the step needs other layouts of what is fixed.
    """
    if objective not in ("bytes", "seconds"):
        raise UsageError(f"no objective {objective!r:.40}; there are bytes, seconds", code="E212")
    begin_graph()
    if fixed is not None:
        mesh = fixed.mesh
    mesh = mesh or (mesh_of(target) if isinstance(target, Cluster) else target)
    with collector_paused():
        return _found(graph, target, objective, mesh, costs, capacity, memory_price, fixed)


def _found(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str,
    mesh: Mesh,
    costs: Costs | None,
    capacity: float | None,
    memory_price: float,
    fixed: FixedLayouts | None,
) -> SearchResult:
    few = FEW_FACTORS if objective == "bytes" else FEW_CALLS
    calls = op_calls(graph)
    level, problem = coarse_problem(graph, calls, few, fixed)

    price = 0.0
    if objective == "seconds" and isinstance(target, Cluster):
        costs = costs or graph_costs(graph)
    if objective == "bytes":
        found = _fewest_bytes(graph, calls, level, problem, mesh, memory_price)
    elif isinstance(target, Cluster) and costs is not None:
        timed = seconds_objective(graph, problem, target, costs)
        solution, price = _within_memory(graph, calls, problem, timed, mesh, capacity)
        found = _Choice(problem, mesh, solution)
    else:
        raise UsageError("the objective 'seconds' needs a cluster: it has the links", code="E212")
    problem, mesh, best = found
    sharding = expanded(problem, best.state, mesh, graph)

    def untied_objective(untied: Problem) -> BytesObjective | SecondsObjective:
        if objective == "bytes" or costs is None or not isinstance(target, Cluster):
            return BytesObjective()
        timed = seconds_objective(graph, untied, target, costs)
        timed.price = price
        return timed

    freed = None
    if fixed is None and not memory_price:
        freed = free_gradients(graph, calls, level, sharding, objective, untied_objective)
    if freed is not None and _fits(graph, *freed, mesh, capacity):
        problem, best = freed
        sharding = expanded(problem, best.state, mesh, graph)
    return SearchResult(sharding, best.cost, best.is_exact, level, len(problem.factors))


def _fits(
    graph: Graph, problem: Problem, found: Solution, mesh: Mesh, capacity: float | None
) -> bool:
    if capacity is None:
        return True
    weights = memory_weights(graph, problem)
    return peak_estimate(problem, weights, found.state, mesh.shape) <= capacity


class _Choice(NamedTuple):
    """A solution of a problem on a mesh."""

    problem: Problem
    mesh: Mesh
    solution: Solution


def _bytes_objective(graph: Graph, problem: Problem, mesh: Mesh, price: float) -> BytesObjective:
    if not price:
        return BytesObjective()
    weights = memory_weights(graph, problem)
    return BytesObjective(weights, price, max(1.0, sum(weights.values()) / mesh.size))


def _fewest_bytes(
    graph: Graph,
    calls: Sequence[OpCall],
    level: int,
    problem: Problem,
    mesh: Mesh,
    price: float,
) -> _Choice:
    """Return what moves the fewest bytes: the portfolio of the search and the baselines.

    A baseline that is better is polished, except for `equal-chop`: its mesh has one axis, and
    where sizes do not divide its blocks are others than any on a mesh of several. It counts only
    where it takes no more memory: what no dim of is long enough for all devices stays whole there,
    and moves nothing. Where many ops are distinct, baselines are dropped whose first cut moves far
    more than it has to.
    """
    tables = CostTables(problem, _bytes_objective(graph, problem, mesh, price), mesh.shape)
    best = _Choice(problem, mesh, best_state(tables))
    if len(mesh.shape) > 1 and problem.fixed is None:
        flat = one_axis_solution(tables)
        held = owned_estimate(problem, flat.state, (mesh.size,))
        most = SAME_MEMORY * owned_estimate(problem, best.solution.state, mesh.shape)
        if flat.cost < best.solution.cost and held <= most:
            best = _Choice(problem, make_mesh((mesh.size,)), flat._replace(is_exact=False))
    if best.solution.is_exact:
        return best
    tied = baseline_problem(graph, calls, level, problem)
    if tied is not problem:
        tables = CostTables(tied, _bytes_objective(graph, tied, mesh, price), mesh.shape)
    bound = math.inf
    if len(tied.factors) > MANY_FACTORS:
        bound = FAR * recursive_search(tables, count=1).cost
    for choose in CHOOSERS.values():
        if bound < math.inf and choose(graph, calls, tables, 1).cost > bound:
            continue
        chosen = choose(graph, calls, tables, len(mesh.shape))
        if chosen.cost < best.solution.cost:
            best = _Choice(tied, mesh, polished(tables, chosen))
    return best


def _fastest(graph: Graph, calls: Sequence[OpCall], tables: CostTables) -> Solution:
    """Return the fastest state that is found, no slower than one device or data parallelism."""
    best = best_state(tables)
    if best.is_exact:
        return best
    none = (None,) * len(tables.axis_sizes)
    problem = tables.problem
    others = [replicas(graph, calls, tables)]
    if problem.fixed is None:
        whole = State((none,) * len(problem.variables), (none,) * len(problem.factors))
        others.insert(0, solve(tables, whole, ()))
    for other in others:
        if other.cost < best.cost:
            best = polished(tables, other)
    return best


def _within_memory(
    graph: Graph,
    calls: Sequence[OpCall],
    problem: Problem,
    objective: SecondsObjective,
    mesh: Mesh,
    capacity: float | None,
) -> tuple[Solution, float]:
    """Return the fastest state that fits, and the price on memory that bisection found for it."""
    tables = CostTables(problem, objective, mesh.shape)
    best = _fastest(graph, calls, tables)
    if (
        capacity is None
        or peak_estimate(problem, objective.weights, best.state, mesh.shape) <= capacity
    ):
        return best, 0.0
    low, high = 0.0, 0.0
    for _ in range(PRICES):
        step = best.cost / max(capacity, 1.0) / 8
        objective.price = (low + high) / 2 if high else max(4 * low, step)
        found = best_state(tables.limited())  # what is sent costs the same at any price
        if peak_estimate(problem, objective.weights, found.state, mesh.shape) <= capacity:
            best, high = found, objective.price
        else:
            best, low = found if not high else best, objective.price
    return best, high or objective.price
