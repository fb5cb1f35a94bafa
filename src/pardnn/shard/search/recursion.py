"""Recursive partitioning: one dynamic program per mesh axis, inside the blocks of earlier axes.

Problem: there are too many strategies of several axes together for one dynamic program.
Idea: if the tables of all axes together are small, the axes are chosen together, and nothing is
lost. Otherwise they are chosen one after the other (`recursive_search`). The paper's Theorem 3 does
not hold under exact costs. So several tied and near-tied plans of each step are kept if that is
little work (a beam); a second start is the best choice that is the same at every axis; and the axes
of each are chosen once more with the others fixed (polish).
Complexity: grows with the distinct ops, and with the strategies of one axis to the power of the
axes that are chosen together.
Reference: Tofu (EuroSys 2019), section 5.2, Theorems 2 and 3.
Deviations: beam, second start and polish; see docs/algorithms/tofu.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh
from pardnn.shard.partition.interning import cuttable_loops
from pardnn.shard.search.alignment import free_loop
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING, OpCall
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, solve, solve_many
from pardnn.shard.search.problem import Problem, Variable, make_problem
from pardnn.shard.search.tensor_classes import Dims
from pardnn.shard.sharding import AxisLoops, FixedLayouts, Sharding

#: Distinct ops up to which no classes are merged but those that must be.
FEW_FACTORS = 40
#: Calls up to which `seconds` are searched without coarsening: a gradient may be laid out unlike
#: its parameter. A transformer block at batch 8 on four slow links is 12 % faster for it.
FEW_CALLS = 320
#: Width of the beam from one mesh axis to the next, and relative noise that its plans come from.
BEAM = 2
NOISES = (0.0, 0.02)
#: Table entries, and calls to cut, up to which several mesh axes are chosen together.
SMALL_ENTRIES = 2e6
SMALL_STRATEGIES = 1500
#: Distinct ops above which one plan is followed and polished once: each more costs tens of ms.
MANY_FACTORS = 64
#: Rounds of polishing at most.
POLISHES = 8


def coarse_problem(
    graph: Graph, calls: Sequence[OpCall], few: int, fixed: FixedLayouts | None = None
) -> tuple[int, Problem]:
    """Return the problem of a graph, coarsened as far as its size requires, and the level.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        few: Number of calls up to which the graph is not coarsened.
        fixed: Layouts of state that stays where it is; None for none.
    """
    if len(calls) <= few:
        return NEEDED, make_problem(graph, NEEDED, calls, fixed)
    level = TRAINING if len(calls) <= 4 * FEW_FACTORS else REPEATED
    return level, make_problem(graph, level, calls, fixed)


def best_state(tables: CostTables) -> Solution:
    """Return the best choice that is found for all mesh axes.

    It is exact, for the classes of the problem, if all axes could be chosen together.
    """
    problem, count = tables.problem, len(tables.axis_sizes)
    empty = _empty(problem)
    if is_tractable(tables, count):
        solution = solve(tables, _lengthened(empty, count), range(count))
        if solution.is_exact:
            return solution
    is_many = len(problem.factors) > MANY_FACTORS
    rounds = 1 if is_many else POLISHES
    first = recursive_search(tables) if is_many else recursive_search(tables, BEAM, NOISES)
    found = [polished(tables, first, rounds, count - 1 if is_many else None)]
    found += [polished(tables, start, rounds) for start in uniform_starts(tables)]
    return min(found, key=lambda s: s.cost)


def uniform_starts(tables: CostTables) -> list[Solution]:
    """Return the best choice that is the same at every mesh axis, if there is one.

    It is found as that of a mesh with one axis, so recursion loses nothing. There is none if state
    stays cut over several axes.
    """
    problem, count = tables.problem, len(tables.axis_sizes)
    if count == 1 or problem.fixed is not None:
        return []
    found = one_axis_solution(tables).state
    state = State(
        tuple(layout * count for layout in found.layouts), tuple(a * count for a in found.axes)
    )
    layouts = tuple(
        _as_cut_as_possible(tables, variable, layout)
        for variable, layout in zip(problem.variables, state.layouts, strict=True)
    )
    if layouts != state.layouts:
        return [recursive_search(tables.limited(layout=among(problem, layouts)))]
    for variable, layout in zip(problem.variables, state.layouts, strict=True):
        if not tables.layouts(variable, layout, ()):
            return []
    for factor, axes in zip(problem.factors, state.axes, strict=True):
        if not len(tables.strategies(factor, axes, ())):
            return []
    return [solve(tables, state, ())]


def _as_cut_as_possible(tables: CostTables, variable: Variable, layout: Layout) -> Layout:
    """Cut what one axis leaves whole, and several need not, one axis after the other.

    No dim may be long enough for all devices, and whole tensors move nothing: such a start would
    look as if nothing were better.
    """
    if tables.objective.may_replicate or not variable.dims:
        return layout
    for axis, dim in enumerate(layout):
        if dim is None:
            found = tables.layouts(variable, layout[: axis + 1], [axis])
            if found:
                layout = (*found[0], *layout[axis + 1 :])
    return layout


def among(problem: Problem, layouts: Sequence[Layout]) -> Callable[[Variable, Layout], bool]:
    """Return a limit that allows only these layouts, one per variable, on the first mesh axes."""
    wanted = {d.root: layout for d, layout in zip(problem.variables, layouts, strict=True)}
    return lambda variable, layout: wanted[variable.root][: len(layout)] == layout


def one_axis_solution(tables: CostTables) -> Solution:
    """Return the best choice on as many devices as one mesh axis: what `equal-chop` chooses."""
    if "flat" not in tables.memo:
        flat = replace(tables, axis_sizes=(math.prod(tables.axis_sizes),))
        tables.memo["flat"] = solve(flat, _lengthened(_empty(tables.problem), 1), [0])
    return tables.memo["flat"]


def _empty(problem: Problem) -> State:
    return State(((),) * len(problem.variables), ((),) * len(problem.factors))


def recursive_search(
    tables: CostTables,
    beam: int = 1,
    noises: Sequence[float] = (0.0,),
    count: int | None = None,
) -> Solution:
    """Choose one mesh axis after the other: the recursion of the paper (section 5.2).

    Step i runs the dynamic program for axis i with the axes before fixed. All worker groups of a
    step are cut in the same way, so one choice serves all; boxes include what earlier steps fetch.

    Args:
        tables: Of the problem.
        beam: Width: how many plans are kept from one axis to the next.
        noises: Relative noise on the tables that further plans come from; of one plan, none.
        count: How many axes to choose, the first ones; all if None.
    """
    count = len(tables.axis_sizes) if count is None else count
    first = Solution(_empty(tables.problem), 0.0, True)
    if beam == 1:
        chosen: list[Solution] = tables.memo.setdefault("steps", [first])
        while len(chosen) <= count:
            axis = len(chosen) - 1
            chosen.append(solve(tables, _lengthened(chosen[-1].state, 1), [axis]))
        return chosen[count]
    memo = [first]
    for axis in range(count):
        found: dict[State, Solution] = {}
        for solution in memo:
            for new in solve_many(tables, _lengthened(solution.state, 1), [axis], noises):
                found.setdefault(new.state, new)
        memo = sorted(found.values(), key=lambda s: s.cost)[:beam]
    return memo[0]


def _lengthened(state: State, count: int) -> State:
    more = (None,) * count
    return State(
        tuple((*layout, *more) for layout in state.layouts),
        tuple((*axes, *more) for axes in state.axes),
    )


def is_tractable(tables: CostTables, count: int) -> bool:
    """Return whether this many mesh axes can be chosen together in little time."""
    problem = tables.problem
    entries, strategies = 0.0, {}
    for factor in problem.factors:
        loops = len(cuttable_loops(factor.number)) or 1
        strategies[factor.number] = loops**count
        sizes = {
            operand.variable: len(problem.variables[operand.variable].dims)
            for operand in factor.operands
        }
        entries += strategies[factor.number] * math.prod(max(1, n) ** count for n in sizes.values())
    return entries <= SMALL_ENTRIES and sum(strategies.values()) <= SMALL_STRATEGIES


def polished(
    tables: CostTables, solution: Solution, rounds: int = POLISHES, last: int | None = None
) -> Solution:
    """Choose mesh axes once more with the others fixed, until nothing improves.

    Two axes are chosen at a time if few ops are distinct and that is little work, otherwise one.

    Args:
        tables: Of the problem.
        solution: The start.
        rounds: How often to revise each axis at most.
        last: An axis that is optimal given the others; None if none is known.
    """
    count = len(tables.axis_sizes)
    if count == 1:
        return solution
    is_many = len(tables.problem.factors) > MANY_FACTORS
    width = 2 if count > 2 and not is_many and is_tractable(tables, 2) else 1
    names = list(range(count))  # by place: which axis of the start is there now
    windows: list[tuple[int, ...]] = list(itertools.combinations(range(count), width))
    tried: set[tuple[int, ...]] = set() if last is None else {(last,)}
    for window in windows * rounds:
        if len(tried) == len(windows):
            break
        if window in tried:
            continue
        order, sub = _brought_last(tables, [names.index(name) for name in window])
        new = solve(tables, _permuted(solution.state, order), sub)
        if new.cost < solution.cost * (1 - 1e-12):
            solution, tried = new, set()
            names = [names[i] for i in order]
        tried.add(window)
    return solution._replace(is_exact=False)


def _brought_last(tables: CostTables, window: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return an order of the mesh axes that opens one of them with the least work, and where.

    Where axes are alike it comes last: then all strategies of an op begin with the same cuts. Two
    keep their places: where sizes do not divide, the result depends on the order.
    """
    count = len(tables.axis_sizes)
    if len(window) > 1:
        return range(count), window
    order = [*(axis for axis in range(count) if axis not in window), *window]
    sizes = tuple(tables.axis_sizes[i] for i in order)
    are_alike = tables.objective.are_axes_alike and tables.problem.fixed is None
    if are_alike and tables.axis_sizes == sizes:
        return order, range(count - len(window), count)
    return range(count), window


def _permuted(state: State, order: Sequence[int]) -> State:
    return State(
        tuple(tuple([layout[i] for i in order]) for layout in state.layouts),
        tuple(tuple([axes[i] for i in order]) for axes in state.axes),
    )


def expanded(problem: Problem, state: State, mesh: Mesh, graph: Graph) -> Sharding:
    """Return the sharding of all tensors and ops given by a choice for the coarse graph.

    Args:
        problem: The coarse graph.
        state: The choice for all mesh axes.
        mesh: The devices.
        graph: The graph.
    """
    layouts: dict[str, Layout] = {}
    for root, members in problem.classes.members.items():
        chosen = state.layouts[problem.numbers[root]]
        if not problem.classes.shapes[root]:
            chosen = (None,) * len(mesh.shape)
        by_dims: dict[Dims, Layout] = {}
        for name in members:
            dims = problem.classes.dims[name]
            if dims not in by_dims:
                by_dims[dims] = tuple([None if d is None else dims[d] for d in chosen])
            layouts[name] = by_dims[dims]
    axes: dict[str, AxisLoops] = {}
    whole = (None,) * len(mesh.shape)
    for op in graph.ops:
        if not op.is_source:
            axes[op.name] = whole
    for factor, chosen_axes in zip(problem.factors, state.axes, strict=True):
        for op_call in factor.ops:
            axes[op_call.op.name] = chosen_axes
    free: dict[tuple[int, Layout], AxisLoops] = {}
    for op_call in problem.free:
        layout = layouts[op_call.places[0]]
        key = (op_call.number, layout)
        if key not in free:
            free[key] = tuple([None if d is None else free_loop(key[0], d) for d in layout])
        axes[op_call.op.name] = free[key]
    return Sharding(mesh, layouts, axes)
