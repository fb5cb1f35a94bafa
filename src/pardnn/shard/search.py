"""Search for the sharding that moves the fewest bytes, or takes the fewest seconds.

Problem: a layout for every tensor and loops for every op, over all axes of a mesh.
Idea: coarsen the graph (`coarsen`), then choose mesh axis by mesh axis, each by a dynamic program
over the coarse graph (`eliminate`) inside of the blocks that the axes before left. Where the
tables of all axes together are small, they are chosen together: no recursion, nothing lost.
Else several tied and near-tied plans of each step are kept, and the axes of the best are chosen
once more, one by one with the others fixed, until nothing gets better.
Complexity: O(ops) to read the graph; the rest grows with the distinct ops.
Reference: Tofu (EuroSys 2019), section 5. Deviations: see docs/algorithms/tofu.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.collector import collector_paused
from pardnn.cost.costs import Costs, graph_costs
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh, make_mesh
from pardnn.shard import describe as _descriptions  # noqa: F401  (searching is no time to load them)
from pardnn.shard.aligned import free_loop
from pardnn.shard.by_bytes import ByBytes
from pardnn.shard.coarsen import NEEDED, REPEATED, TRAINING, OpCall, op_calls
from pardnn.shard.interned import forget_if_large, loops_of
from pardnn.shard.leaves import Axes
from pardnn.shard.problem import Problem, make_problem
from pardnn.shard.seconds import BySeconds, by_seconds, fraction
from pardnn.shard.sharding import Sharding
from pardnn.shard.steps import Solved, solve, solve_many
from pardnn.shard.tables import State, Tables
from pardnn.shard.ties import Dims

#: Distinct ops up to which no tensors are tied but those that must be.
FEW_TERMS = 40
#: Calls up to which `seconds` are searched with no more ties than needed: a gradient may lie unlike
#: its parameter. A transformer block at batch 8 on four slow links is 12 % faster for it.
FEW_CALLS = 320
#: Plans that are kept from one mesh axis to the next, and disturbances that others come from.
BEAM = 2
NOISES = (0.0, 0.02)
#: Table entries, and calls to cut, up to which several mesh axes are chosen together.
SMALL_ENTRIES = 2e6
SMALL_WAYS = 1500
#: Distinct ops above which one plan is followed and polished once: each more costs tens of ms.
MANY_TERMS = 64
#: Rounds of polishing at most.
POLISHES = 8
#: Prices of memory that are tried.
PRICES = 8


class Found(NamedTuple):
    """A sharding, and how it was found.

    Attributes:
        sharding: The decision.
        cost: Bytes or seconds.
        is_exact: Whether no sharding with the same ties is better.
        level: Of coarsening.
        num_terms: Distinct ops that were decided.
    """

    sharding: Sharding
    cost: float
    is_exact: bool
    level: int
    num_terms: int


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number, the largest first."""
    found: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(reversed(found))


def mesh_of(cluster: Cluster) -> Mesh:
    """Return a mesh over a cluster: its prime factors, the slowest links on the first axes.

    Of all orders of the factors that is taken whose groups of neighbours have the fastest links
    among themselves, summed over the levels; where all are equal, the largest factor first.
    """
    factors = prime_factors(cluster.num_devices)
    bandwidth = cluster.arrays.bandwidth

    def slowest(size: int) -> float:
        return min(
            float(bandwidth[i : i + size, i : i + size].min())
            for i in range(0, len(bandwidth), size)
        )

    def speed(order: tuple[int, ...]) -> float:
        return sum(slowest(math.prod(order[axis:])) for axis in range(1, len(order)))

    orders = sorted(set(itertools.permutations(factors)), reverse=True)
    return make_mesh(max(orders, key=speed))


def search(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str = "bytes",
    *,
    costs: Costs | None = None,
    capacity: float | None = None,
) -> Sharding:
    """Return how to cut every tensor and every op of a graph.

    Args:
        graph: One training step.
        target: A mesh, or a cluster, whose number of devices is split into prime factors.
        objective: "bytes": the traffic of a step, every tensor cut. "seconds": estimated duration;
            tensors and ops may stay whole.
        costs: Of the graph's ops, for "seconds"; without them those that the ops state.
        capacity: Usable bytes of the smallest device, for "seconds"; None is unlimited. It is
            compared with an estimate: the plan that comes of it has the exact peak.

    Raises:
        UsageError: E212, for another objective, or "seconds" without a cluster.
    """
    return find_sharding(graph, target, objective, costs=costs, capacity=capacity).sharding


def find_sharding(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str = "bytes",
    *,
    mesh: Mesh | None = None,
    costs: Costs | None = None,
    capacity: float | None = None,
) -> Found:
    """Return the result of `search` with how it was found; `mesh` may lay a cluster out."""
    if objective not in ("bytes", "seconds"):
        raise UsageError(f"no objective {objective!r:.40}; there are bytes, seconds", code="E212")
    forget_if_large()
    mesh = mesh or (mesh_of(target) if isinstance(target, Cluster) else target)
    with collector_paused():
        return _found(graph, target, objective, mesh, costs, capacity)


def _found(
    graph: Graph,
    target: Mesh | Cluster,
    objective: str,
    mesh: Mesh,
    costs: Costs | None,
    capacity: float | None,
) -> Found:
    few = FEW_TERMS if objective == "bytes" else FEW_CALLS
    level, problem = _coarsened(graph, op_calls(graph), few)
    if objective == "bytes":
        best = best_state(Tables(problem, ByBytes(), mesh.shape))
    elif isinstance(target, Cluster):
        found = by_seconds(graph, problem, target, costs or graph_costs(graph))
        best = _within(problem, found, mesh, capacity)
    else:
        raise UsageError("the objective 'seconds' needs a cluster: it has the links", code="E212")
    sharding = completed(problem, best.state, mesh, graph)
    return Found(sharding, best.cost, best.is_exact, level, len(problem.terms))


def _within(problem: Problem, objective: BySeconds, mesh: Mesh, capacity: float | None) -> Solved:
    """Return the fastest state that fits, by a price on memory that is found by bisection."""
    best = best_state(Tables(problem, objective, mesh.shape))
    if capacity is None or held_bytes(problem, objective, best.state, mesh) <= capacity:
        return best
    low, high = 0.0, 0.0
    for _ in range(PRICES):
        step = best.cost / max(capacity, 1.0) / 8
        objective.price = (low + high) / 2 if high else max(4 * low, step)
        found = best_state(Tables(problem, objective, mesh.shape))
        if held_bytes(problem, objective, found.state, mesh) <= capacity:
            best, high = found, objective.price
        else:
            best, low = found if not high else best, objective.price
    return best


def held_bytes(problem: Problem, objective: BySeconds, state: State, mesh: Mesh) -> float:
    """Return an estimate of the peak of the fullest device, in bytes."""
    return sum(
        weight * fraction(decision, layout, mesh.shape)
        for decision, layout in zip(problem.decisions, state.layouts, strict=True)
        if (weight := objective.weights.get(decision.root, 0.0))
    )


def _coarsened(graph: Graph, calls: Sequence[OpCall], few: int) -> tuple[int, Problem]:
    if len(calls) <= few:
        return NEEDED, make_problem(graph, NEEDED, calls)
    level = TRAINING if len(calls) <= 4 * FEW_TERMS else REPEATED
    return level, make_problem(graph, level, calls)


def best_state(tables: Tables) -> Solved:
    """Return the best choice that is found for all mesh axes.

    It is exact, for the ties of the problem, if all axes could be chosen together.
    """
    problem, count = tables.problem, len(tables.parts)
    empty = _empty(problem)
    if is_small(tables, count):
        solved = solve(tables, _longer(empty, count), range(count))
        if solved.is_exact:
            return solved
    is_many = len(problem.terms) > MANY_TERMS
    starts = [stepwise(tables) if is_many else stepwise(tables, BEAM, NOISES)]
    if tables.objective.may_replicate or not is_many:
        starts += chopped(tables)
    rounds = 1 if is_many else POLISHES
    return min((polished(tables, start, rounds) for start in starts), key=lambda s: s.cost)


def chopped(tables: Tables) -> list[Solved]:
    """Return the best choice that is the same at every mesh axis, if there is one.

    It is found as that of a mesh of one axis, so it is what `equal-chop` would choose, and no
    recursion has lost anything.
    """
    problem, count = tables.problem, len(tables.parts)
    if count == 1:
        return []
    flat = replace(tables, parts=(math.prod(tables.parts),))
    found = solve(flat, _longer(_empty(problem), 1), [0]).state
    state = State(
        tuple(layout * count for layout in found.layouts), tuple(a * count for a in found.axes)
    )
    for decision, layout in zip(problem.decisions, state.layouts, strict=True):
        if not tables.layouts(decision, layout, ()):
            return []
    for term, axes in zip(problem.terms, state.axes, strict=True):
        if not len(tables.ways(term, axes, ())):
            return []
    return [solve(tables, state, ())]


def _empty(problem: Problem) -> State:
    return State(((),) * len(problem.decisions), ((),) * len(problem.terms))


def stepwise(tables: Tables, beam: int = 1, noises: Sequence[float] = (0.0,)) -> Solved:
    """Choose one mesh axis after the other: the recursion of the paper.

    Args:
        tables: Of the problem.
        beam: Plans that are kept from one axis to the next.
        noises: Disturbances of the tables that further plans come from.
    """
    problem = tables.problem
    empty = _empty(problem)
    kept = [Solved(empty, 0.0, True)]
    for axis in range(len(tables.parts)):
        found: dict[State, Solved] = {}
        for solved in kept:
            for new in solve_many(tables, _longer(solved.state, 1), [axis], noises):
                found.setdefault(new.state, new)
        kept = sorted(found.values(), key=lambda s: s.cost)[:beam]
    return kept[0]


def _longer(state: State, count: int) -> State:
    more = (None,) * count
    return State(
        tuple((*layout, *more) for layout in state.layouts),
        tuple((*axes, *more) for axes in state.axes),
    )


def is_small(tables: Tables, count: int) -> bool:
    """Return whether so many mesh axes can be chosen together in little time."""
    problem = tables.problem
    entries, ways = 0.0, {}
    for term in problem.terms:
        loops = len(loops_of(term.number)) or 1
        ways[term.number] = loops**count
        sizes = {use.decision: len(problem.decisions[use.decision].dims) for use in term.uses}
        entries += ways[term.number] * math.prod(max(1, n) ** count for n in sizes.values())
    return entries <= SMALL_ENTRIES and sum(ways.values()) <= SMALL_WAYS


def polished(tables: Tables, solved: Solved, rounds: int = POLISHES) -> Solved:
    """Choose mesh axes once more, the others fixed, until nothing gets better.

    Two axes are chosen at a time where that is little work, else one.
    """
    count = len(tables.parts)
    if count == 1:
        return solved
    width = 2 if count > 2 and is_small(tables, 2) else 1
    for _ in range(rounds):
        better = False
        for window in itertools.combinations(range(count), width):
            new = solve(tables, solved.state, window)
            if new.cost < solved.cost * (1 - 1e-12):
                solved, better = new, True
        if not better:
            break
    return solved._replace(is_exact=False)


def completed(problem: Problem, state: State, mesh: Mesh, graph: Graph) -> Sharding:
    """Return the sharding of all tensors and ops that a choice for the coarse graph stands for."""
    layouts: dict[str, Layout] = {}
    for root, members in problem.ties.members.items():
        chosen = state.layouts[problem.number[root]]
        if not problem.ties.shapes[root]:
            chosen = (None,) * len(mesh.shape)
        known: dict[Dims, Layout] = {}
        for name in members:
            dims = problem.ties.dims[name]
            if dims not in known:
                known[dims] = tuple([None if d is None else dims[d] for d in chosen])
            layouts[name] = known[dims]
    axes: dict[str, Axes] = {}
    whole = (None,) * len(mesh.shape)
    for op in graph.ops:
        if not op.is_source:
            axes[op.name] = whole
    for term, chosen_axes in zip(problem.terms, state.axes, strict=True):
        for op_call in term.ops:
            axes[op_call.op.name] = chosen_axes
    free: dict[tuple[int, Layout], Axes] = {}
    for op_call in problem.free:
        layout = layouts[op_call.places[0]]
        key = (op_call.number, layout)
        if key not in free:
            free[key] = tuple([None if d is None else free_loop(key[0], d) for d in layout])
        axes[op_call.op.name] = free[key]
    return Sharding(mesh, layouts, axes)
