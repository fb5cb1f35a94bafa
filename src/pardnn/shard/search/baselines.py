"""The partitioning algorithms that Tofu is compared with, each as a `Sharding`.

All use the costs of `communication_bytes`, cut every tensor at every mesh axis where possible, and
have the same options, so only the choice differs.

| name | choice |
| --- | --- |
| `allrow-greedy` | every tensor by its first dim, each op by its best strategy then |
| `spartan` | the largest tensor first, along the dim that is best for the ops at it, and so on |
| `equal-chop` | search, but each tensor is cut along one dim only, into k parts |
| `icml18` | search, but no op is cut along a loop whose partial results would be added up |
| `zero-3` | every op along the batch, whose dims are followed from the inputs on |

References: Tofu (EuroSys 2019), section 7.3; Spartan: Huang et al., USENIX ATC 2015; ICML18: Jia,
Lin, Qi, Aiken, "Exploring hidden dimensions in parallelizing CNNs", ICML 2018.
Data parallelism at equal memory is ZeRO's third stage (Rajbhandari et al., SC 2020): weights,
gradients and optimizer state are cut, and each op gathers the weights that it reads. The stages
before are in `shard.recipes`: they keep weights whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh, make_mesh
from pardnn.shard.cache import begin_graph
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.partition.mesh_strategies import Flags
from pardnn.shard.search.batch import batch_dims, batch_variables
from pardnn.shard.search.coarsening import NEEDED, TRAINING, OpCall, op_calls
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, layout_cost, solve
from pardnn.shard.search.memory_estimate import SAME_MEMORY, owned_estimate
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import Factor, Problem, Variable, make_problem
from pardnn.shard.search.recursion import (
    FEW_FACTORS,
    among,
    best_state,
    coarse_problem,
    expanded,
    one_axis_solution,
    recursive_search,
    uniform_starts,
)
from pardnn.shard.sharding import FixedLayouts, Sharding

Chooser = Callable[[Graph, Sequence[OpCall], CostTables, int], Solution]
"""Chooses for some first mesh axes of the tables of a graph's problem."""


Target = Mesh | Cluster | FixedLayouts
"""A mesh, a cluster to lay one over, or the mesh of state that stays cut as it is."""


def _laid_over(target: Target) -> tuple[Mesh, FixedLayouts | None]:
    if isinstance(target, FixedLayouts):
        return target.mesh, target
    return mesh_of(target) if isinstance(target, Cluster) else target, None


def _chosen(choose: Chooser, graph: Graph, target: Target) -> Sharding:
    begin_graph()
    mesh, fixed = _laid_over(target)
    calls = op_calls(graph)
    problem = baseline_problem(graph, calls, *coarse_problem(graph, calls, FEW_FACTORS, fixed))
    tables = CostTables(problem, BytesObjective(), mesh.shape)
    return expanded(problem, choose(graph, calls, tables, len(mesh.shape)).state, mesh, graph)


def baseline_problem(
    graph: Graph, calls: Sequence[OpCall], level: int, problem: Problem
) -> Problem:
    """Return the problem for the baselines: that of the search, coarsened to `TRAINING` at least.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        level: Of `problem`.
        problem: Of the search.
    """
    return make_problem(graph, TRAINING, calls, problem.fixed) if level == NEEDED else problem


def allrow_greedy(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return each tensor cut along its first dim that can be cut, each op by its best strategy.

    A gradient or a transposed view is cut like the tensor that it belongs to.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.
    """
    del objective  # the choice does not depend on it
    return _chosen(choose_rows, graph, target)


def choose_rows(graph: Graph, calls: Sequence[OpCall], tables: CostTables, count: int) -> Solution:
    """Choose as `allrow_greedy` does, on the first `count` mesh axes.

    Args:
        graph: A captured graph.
        calls: Its calls.
        tables: Cost tables of the coarse graph; what is derived from them is kept in `memo`.
        count: Mesh axes to choose for, from the first.
    """
    if "rows" not in tables.memo:
        tables.memo["rows"] = _row_tables(tables)
    return recursive_search(tables.memo["rows"], count=count)


def _row_tables(tables: CostTables) -> CostTables:
    problem = tables.problem
    position = {name: i for i, name in enumerate(problem.tensors)}
    first: dict[str, int | None] = {}
    for root, members in problem.classes.members.items():
        dims = problem.classes.dims[min(members, key=position.__getitem__)]
        variable = problem.variables[problem.numbers[root]]
        if variable.dims:
            own = {dims[d]: d for d in variable.dims}
            first[variable.root] = own[min(dim for dim in own if dim is not None)]

    def allows(variable: Variable, layout: Layout) -> bool:
        return layout[-1] == first.get(variable.root)

    return tables.limited(layout=allows)


def spartan(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return tensors cut in the order of their size, each along the best dim for its ops.

    A tensor counts with its gradient and its optimizer state.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.
    """
    del objective  # the choice does not depend on it
    return _chosen(choose_largest_first, graph, target)


def choose_largest_first(
    graph: Graph, calls: Sequence[OpCall], tables: CostTables, count: int
) -> Solution:
    """Choose as `spartan` does, on the first `count` mesh axes.

    Args:
        graph: A captured graph.
        calls: Its calls.
        tables: Cost tables of the coarse graph; what is derived from them is kept in `memo`.
        count: Mesh axes to choose for, from the first.
    """
    problem = tables.problem
    at: list[list[Factor]] = [[] for _ in problem.variables]
    for factor in problem.factors:
        for number in {operand.variable for operand in factor.operands}:
            at[number].append(factor)
    order = sorted(range(len(at)), key=lambda n: -problem.variables[n].bytes)
    found = Solution(
        State(((),) * len(problem.variables), ((),) * len(problem.factors)), 0.0, False
    )
    place = {id(factor): i for i, factor in enumerate(problem.factors)}
    for axis in range(count):
        chosen: dict[int, Layout] = {}
        for number in order:
            chosen[number] = _greedy(tables, found.state, axis, number, at[number], chosen, place)
        layouts = tuple(chosen[n] for n in range(len(at)))
        state = State(layouts, tuple((*axes, None) for axes in found.state.axes))
        fixed = tables.limited(layout=among(problem, layouts))
        found = solve(fixed, state, [axis])
    return found


def _greedy(
    tables: CostTables,
    state: State,
    axis: int,
    number: int,
    factors: list[Factor],
    chosen: Mapping[int, Layout],
    place: Mapping[int, int],
) -> Layout:
    """Return the layout of one variable that is best for its ops; undecided operands are free."""
    problem = tables.problem
    variable = problem.variables[number]
    options = tables.layouts(variable, (*state.layouts[number], None), [axis])
    total = layout_cost(tables, variable, options)
    others = {number: options}
    for near in {
        operand.variable for factor in factors for operand in factor.operands
    } & chosen.keys():
        others[near] = tables.layouts(problem.variables[near], (*state.layouts[near], None), [axis])
    requests = [
        (factor, operand, tables.strategies(factor, (*state.axes[place[id(factor)]], None), [axis]))
        for factor in factors
        for operand in factor.operands
        if operand.variable in others
    ]
    communication = tables.communication(
        [(operand, strategies, others[operand.variable]) for _, operand, strategies in requests]
    )
    rows: dict[int, np.ndarray] = {}
    for (factor, operand, _), values in zip(requests, communication, strict=True):
        if operand.variable != number:
            at = others[operand.variable].index(chosen[operand.variable])
            values = values[:, at : at + 1]
        known = rows.get(id(factor))
        rows[id(factor)] = values if known is None else known + values
    for factor in factors:
        total += rows[id(factor)].min(axis=0) * len(factor.ops)
    return options[int(total.argmin())]


def equal_chop(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return the best sharding that cuts each tensor along one dim only, into k parts.

    Its mesh has one axis. If that leaves tensors whole because none of their dims is long enough,
    all tensors are cut along the axes of the target instead, each by one dim as far as possible.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E225, if state stays on a mesh of several axes.
    """
    del objective  # the choice does not depend on it
    begin_graph()
    laid, fixed = _laid_over(target)
    mesh = make_mesh((laid.size,))
    if fixed is not None and laid.shape != mesh.shape:
        raise UsageError(
            f"equal-chop lays {laid.size} devices out along one axis, but the state is on a mesh "
            f"of {laid.shape}.\nUse tofu.",
            code="E225",
        )
    _, problem = coarse_problem(graph, op_calls(graph), FEW_FACTORS, fixed)
    tables = CostTables(problem, BytesObjective(), laid.shape)
    state = one_axis_solution(tables).state
    for start in uniform_starts(tables):
        least = owned_estimate(problem, start.state, laid.shape)
        if owned_estimate(problem, state, mesh.shape) > SAME_MEMORY * least:
            return expanded(problem, start.state, laid, graph)
    return expanded(problem, state, mesh, graph)


def _keeps_outputs(reduced: Sequence[Flags]) -> bool:
    return not any(map(any, reduced))


def icml18(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return the best sharding found if no partial results are combined.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.
    """
    del objective  # the choice does not depend on it
    return _chosen(choose_unreduced, graph, target)


def choose_unreduced(
    graph: Graph, calls: Sequence[OpCall], tables: CostTables, count: int
) -> Solution:
    """Choose as `icml18` does, on the first `count` mesh axes.

    Args:
        graph: A captured graph.
        calls: Its calls.
        tables: Cost tables of the coarse graph; what is derived from them is kept in `memo`.
        count: Mesh axes to choose for, from the first.
    """
    if "unreduced" not in tables.memo:
        tables.memo["unreduced"] = tables.limited(strategy=_keeps_outputs)
    limited = tables.memo["unreduced"]
    is_all = count == len(tables.axis_sizes)
    return best_state(limited) if is_all else recursive_search(limited, count=count)


def zero_3(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return ops on the batch cut along it, and tensors without a batch dim by their first dim.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.
    """
    del objective  # the choice does not depend on it
    return _chosen(choose_batch, graph, target)


def choose_batch(graph: Graph, calls: Sequence[OpCall], tables: CostTables, count: int) -> Solution:
    """Choose as `zero_3` does, on the first `count` mesh axes.

    Args:
        graph: A captured graph.
        calls: Its calls.
        tables: Cost tables of the coarse graph; what is derived from them is kept in `memo`.
        count: Mesh axes to choose for, from the first.
    """
    if "batch" not in tables.memo:
        tables.memo["batch"] = _batch_tables(graph, calls, tables)
    return recursive_search(tables.memo["batch"], count=count)


def _batch_tables(graph: Graph, calls: Sequence[OpCall], tables: CostTables) -> CostTables:
    dims, loops = batch_dims(graph, calls)
    batch = batch_variables(tables.problem, dims)

    def allows_layout(variable: Variable, layout: Layout) -> bool:
        return layout[-1] == batch.get(variable.root, min(variable.dims, default=None))

    def loop(factor: Factor) -> str | None:
        return None if factor.is_local else loops.get(factor.ops[0].op.name)

    return tables.limited(layout=allows_layout, loop=loop)


def replicas(graph: Graph, calls: Sequence[OpCall], tables: CostTables) -> Solution:
    """Return the best choice that cuts the batch and replicates everything else (data parallelism).

    Args:
        graph: A captured graph.
        calls: Its calls.
        tables: Cost tables of the coarse graph.
    """
    batch = batch_variables(tables.problem, batch_dims(graph, calls)[0])

    def allows(variable: Variable, layout: Layout) -> bool:
        return layout[-1] == batch.get(variable.root)

    return recursive_search(tables.limited(layout=allows))


#: The baselines by name.
BASELINES: Mapping[str, Callable[..., Sharding]] = {
    "allrow-greedy": allrow_greedy,
    "spartan": spartan,
    "equal-chop": equal_chop,
    "icml18": icml18,
    "zero-3": zero_3,
}

#: How baselines choose that keep to the mesh.
CHOOSERS: Mapping[str, Chooser] = {
    "allrow-greedy": choose_rows,
    "spartan": choose_largest_first,
    "icml18": choose_unreduced,
    "zero-3": choose_batch,
}
