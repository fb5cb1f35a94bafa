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
from typing import NamedTuple, final

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

#: Prices of memory that are tried, each so many times the one before, until a state fits; and
#: bisections then, which end where a state takes this part of the capacity.
PRICES, TIMES, BISECTIONS, FULL = 5, 16, 6, 0.98
#: Times the least memory that is as good where nothing fits: the last 0.1 % of it cost 11 % of the
#: seconds of a Qwen2 on 16 devices.
LEAST = 1.01
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
    if objective == "seconds":
        if not isinstance(target, Cluster):
            raise UsageError(
                "the objective 'seconds' needs a cluster: it has the links", code="E212"
            )
        return TimedSearch(graph, target, costs, mesh=mesh, fixed=fixed).within(capacity)
    mesh = _mesh(target, mesh, fixed)
    with collector_paused():
        return _least_traffic(graph, mesh, memory_price, fixed)


def _mesh(target: Mesh | Cluster, mesh: Mesh | None, fixed: FixedLayouts | None) -> Mesh:
    """Return the mesh of a search; before a new graph, what earlier ones left may be forgotten."""
    begin_graph()
    if fixed is not None:
        return fixed.mesh
    return mesh or (mesh_of(target) if isinstance(target, Cluster) else target)


def _least_traffic(
    graph: Graph, mesh: Mesh, memory_price: float, fixed: FixedLayouts | None
) -> SearchResult:
    calls = op_calls(graph)
    level, problem = coarse_problem(graph, calls, FEW_FACTORS, fixed)
    problem, mesh, best = _fewest_bytes(graph, calls, level, problem, mesh, memory_price)
    sharding = expanded(problem, best.state, mesh, graph)
    freed = None
    if fixed is None and not memory_price:
        freed = free_gradients(graph, calls, level, sharding, "bytes", lambda _: BytesObjective())
    if freed is not None:
        problem, best = freed
        sharding = expanded(problem, best.state, mesh, graph)
    return SearchResult(sharding, best.cost, best.is_exact, level, len(problem.factors))


@final
class TimedSearch:
    """A search for the sharding of the fewest seconds within several capacities.

    A price on memory keeps a state within a capacity. What is searched at one price is kept, so
    another capacity takes few more searches.

    Args:
        graph: See `search`.
        cluster: Has the links and the devices.
        costs: See `search`.
        mesh: See `find_sharding`.
        fixed: See `search`.

    Raises:
        InfeasibleError: E301, if the step needs other layouts of what is fixed.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        costs: Costs | None = None,
        *,
        mesh: Mesh | None = None,
        fixed: FixedLayouts | None = None,
    ) -> None:
        self.graph, self.cluster, self.costs = graph, cluster, costs or graph_costs(graph)
        self.mesh, self.is_fixed = _mesh(cluster, mesh, fixed), fixed is not None
        with collector_paused():
            self.calls = op_calls(graph)
            self.level, self.problem = coarse_problem(graph, self.calls, FEW_CALLS, fixed)
            self.objective = seconds_objective(graph, self.problem, cluster, self.costs)
        self.tables = CostTables(self.problem, self.objective, self.mesh.shape)
        self._known: dict[float, _Priced] = {}

    @collector_paused()
    def within(self, capacity: float | None) -> SearchResult:
        """Return the fastest sharding that is estimated to fit, or that comes nearest.

        Args:
            capacity: See `search`.
        """
        best, price = self._cheapest(capacity)
        problem, sharding = self.problem, expanded(self.problem, best.state, self.mesh, self.graph)
        freed = None if self.is_fixed else self._freed(sharding, price)
        if freed is not None:
            untied = self._priced(*freed, price)
            if capacity is None or untied.peak <= capacity:
                problem, best = freed[0], untied.solution
                sharding = expanded(problem, best.state, self.mesh, self.graph)
        return SearchResult(sharding, best.cost, best.is_exact, self.level, len(problem.factors))

    def _cheapest(self, capacity: float | None) -> tuple[Solution, float]:
        """Return the state at the least price that fits, and the price; else the one that ends."""
        first = self._at(0.0)
        if capacity is None or first.peak <= capacity:
            return first.solution, 0.0
        last, low, high = first, 0.0, 0.0
        for number in range(PRICES):
            low, high = high, TIMES**number * first.solution.cost / first.peak / 8
            last = self._at(high)
            if last.peak <= capacity:
                break
        else:
            return self._near_least(last.peak)
        for _ in range(BISECTIONS):
            if last.peak >= FULL * capacity:
                break
            price = math.sqrt(low * high) if low else high / 4
            found = self._at(price)
            if found.peak <= capacity:
                last, high = found, price
            else:
                low = price
        return last.solution, high

    def _near_least(self, least: float) -> tuple[Solution, float]:
        """Return the state at the lowest price that holds about the least; the last bytes cost."""
        price, found = min(
            (price, each) for price, each in self._known.items() if each.peak <= LEAST * least
        )
        return found.solution, price

    def _at(self, price: float) -> _Priced:
        """Return the fastest state at a price of memory."""
        if price not in self._known:
            self.objective.price = price
            if price:
                found = best_state(self.tables.limited())  # what is sent costs the same
            else:
                found = _fastest(self.graph, self.calls, self.tables)
            self._known[price] = self._priced(self.problem, found, price)
        return self._known[price]

    def _priced(self, problem: Problem, found: Solution, price: float) -> _Priced:
        weights = self.objective.weights
        if problem is not self.problem:
            weights = memory_weights(self.graph, problem)
        peak = peak_estimate(problem, weights, found.state, self.mesh.shape)
        return _Priced(found._replace(cost=found.cost - price * peak), peak)

    def _freed(self, sharding: Sharding, price: float) -> tuple[Problem, Solution] | None:
        def timed(problem: Problem) -> SecondsObjective:
            found = seconds_objective(self.graph, problem, self.cluster, self.costs)
            found.price = price
            return found

        given = (self.graph, self.calls, self.level, sharding)
        return free_gradients(*given, "seconds", timed)


class _Priced(NamedTuple):
    """The fastest state at a price of memory, with its seconds, and the bytes of a device."""

    solution: Solution
    peak: float


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
    """Return the choice that moves the fewest bytes, of a portfolio of search and baselines.

    A better baseline is polished, except `equal-chop`: its mesh has one axis, and if sizes do not
    divide, its blocks differ from those of any mesh of several. It counts only if it takes no more
    memory: a tensor without a dim that is long enough for all devices stays whole there, and moves
    nothing. If many ops are distinct, baselines whose first cut moves far too much are dropped.
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
