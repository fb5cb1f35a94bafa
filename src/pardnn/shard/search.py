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

from collections.abc import Sequence
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh, make_mesh
from pardnn.shard.aligned import free_loop
from pardnn.shard.coarsen import NEEDED, REPEATED, TRAINING, OpCall, op_calls
from pardnn.shard.leaves import Axes
from pardnn.shard.problem import Problem, make_problem
from pardnn.shard.sharding import Sharding
from pardnn.shard.tables import ByBytes, Solved, State, Tables, solve

#: Distinct ops up to which no tensors are tied but those that must be.
FEW_TERMS = 40


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
    """Return a mesh over a cluster: its prime factors, the largest first."""
    return make_mesh(prime_factors(cluster.num_devices))


def search(graph: Graph, target: Mesh | Cluster, objective: str = "bytes") -> Sharding:
    """Return how to cut every tensor and every op of a graph.

    Args:
        graph: One training step.
        target: A mesh, or a cluster, whose number of devices is split into prime factors.
        objective: "bytes": the traffic of a step, every tensor cut.

    Raises:
        UsageError: E212, for another objective.
    """
    return find_sharding(graph, target, objective).sharding


def find_sharding(graph: Graph, target: Mesh | Cluster, objective: str = "bytes") -> Found:
    """Return the result of `search` with how it was found."""
    if objective != "bytes":
        raise UsageError(f"no objective {objective!r:.40}; there is bytes", code="E212")
    mesh = mesh_of(target) if isinstance(target, Cluster) else target
    calls = op_calls(graph)
    level, problem = _coarsened(graph, calls)
    tables = Tables(problem, ByBytes(), mesh.shape)
    best = _best(tables)
    return Found(
        completed(problem, best.state, mesh, graph),
        best.cost,
        best.is_exact,
        level,
        len(problem.terms),
    )


def _coarsened(graph: Graph, calls: Sequence[OpCall]) -> tuple[int, Problem]:
    if len(calls) <= FEW_TERMS:
        return NEEDED, make_problem(graph, NEEDED, calls)
    level = TRAINING if len(calls) <= 4 * FEW_TERMS else REPEATED
    return level, make_problem(graph, level, calls)


def _best(tables: Tables) -> Solved:
    problem, count = tables.problem, len(tables.parts)
    empty = State(((),) * len(problem.decisions), ((),) * len(problem.terms))
    kept = [Solved(empty, 0.0, True)]
    for axis in range(count):
        found: dict[State, Solved] = {}
        for solved in kept:
            longer = State(
                tuple((*layout, None) for layout in solved.state.layouts),
                tuple((*axes, None) for axes in solved.state.axes),
            )
            for seed in range(2):
                new = solve(tables, longer, [axis], noise=0.02 * seed, seed=seed)
                found.setdefault(new.state, new)
        kept = sorted(found.values(), key=lambda s: s.cost)[:3]
    return polished(tables, kept[0])


def polished(tables: Tables, solved: Solved) -> Solved:
    """Choose each mesh axis once more, the others fixed, until nothing gets better."""
    better = len(tables.parts) > 1
    while better:
        better = False
        for axis in range(len(tables.parts)):
            new = solve(tables, solved.state, [axis])
            if new.cost < solved.cost * (1 - 1e-12):
                solved, better = new._replace(is_exact=False), True
    return solved


def completed(problem: Problem, state: State, mesh: Mesh, graph: Graph) -> Sharding:
    """Return the sharding of all tensors and ops that a choice for the coarse graph stands for."""
    layouts: dict[str, Layout] = {}
    for root, members in problem.ties.members.items():
        chosen = state.layouts[problem.number[root]]
        for name in members:
            dims = problem.ties.dims[name]
            layouts[name] = tuple(None if d is None else dims[d] for d in chosen)
    axes: dict[str, Axes] = {}
    whole = (None,) * len(mesh.shape)
    for op in graph.ops:
        if not op.is_source:
            axes[op.name] = whole
    for term, chosen_axes in zip(problem.terms, state.axes, strict=True):
        for op_call in term.ops:
            axes[op_call.op.name] = chosen_axes
    for op_call in problem.free:
        layout = layouts[op_call.places[0]]
        axes[op_call.op.name] = tuple(
            None if d is None else free_loop(op_call.call, d) for d in layout
        )
    return Sharding(mesh, layouts, axes)
