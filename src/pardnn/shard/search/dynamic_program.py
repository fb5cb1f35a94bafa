"""The dynamic program over the coarse graph: the best choice for some mesh axes, given the others.

Problem: find a layout for every variable and a strategy for every factor, of least total cost.
Idea: `cost_tables` knows what each strategy costs under each layout. In each factor the strategy is
minimised out, which leaves a table over the layouts of its few tensors:

    table[l1, l2, ...] = min over strategies s of (compute[s] + move1[s, l1] + move2[s, l2] + ...)

The sum of these tables is minimised by eliminating one variable at a time (`variable_elimination`):
on a chain of layers that is the forward pass of the dynamic program, and reading the choices off
backwards is its traceback. The paper's brute force inside a group is the table of a factor.
Complexity: O(factors + sum of the tables' sizes).
Reference: Tofu (EuroSys 2019), section 5.1; the algorithm of Jia et al., ICML 2018, there [14].
Deviations: the coarse graph need not be a chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.shard.partition.mesh_strategies import MeshStrategies
from pardnn.shard.search.cost_tables import CostTables, Layouts, State
from pardnn.shard.search.problem import Factor, Variable
from pardnn.shard.search.variable_elimination import Minimum, Table, minimise
from pardnn.shard.sharding import AxisLoops
from pardnn.time_limit import check_time

#: Cost of a written tensor that is held whole though it could be cut: less than what must not be.
WHOLE = 1e18
#: Entries up to which a factor becomes one table; above, its strategy is a variable of its own.
FACTOR_ENTRIES = 1 << 16
#: Entries that are worked on at a time: 8 MiB.
AT_ONCE = 1 << 20


class Solution(NamedTuple):
    """A state of least cost among those that the open mesh axes allow.

    Attributes:
        state: The choice.
        cost: In the objective's unit, without penalties only if it is feasible.
        is_exact: Whether no state is better, for the classes of the problem and these open axes.
    """

    state: State
    cost: float
    is_exact: bool


def solve(tables: CostTables, fixed: State, open_axes: Sequence[int]) -> Solution:
    """Return the best choice of the open mesh axes.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
    """
    return solve_many(tables, fixed, open_axes, (0.0,))[0]


def solve_many(
    tables: CostTables, fixed: State, open_axes: Sequence[int], noises: Sequence[float]
) -> list[Solution]:
    """Return a choice of the open mesh axes for each perturbation of the tables.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
        noises: Relative: 0 gives the best choice, others give choices that are nearly as good.
    """
    sub = subproblem(tables, fixed, tuple(open_axes))
    sizes = [len(layouts) for layouts in sub.options]
    found = _layout_tables(sub)
    found += _factor_tables(tables.problem.factors, sub.factor_costs, sizes)
    return [
        _chosen(tables, sub, minimise(sizes, _disturbed(found, noise, seed)))
        for seed, noise in enumerate(noises)
    ]


def _chosen(tables: CostTables, sub: Subproblem, minimum: Minimum) -> Solution:
    chosen = minimum.assignment[: len(sub.options)]
    cost = sum(
        float(layout_costs[choice])
        for layout_costs, choice in zip(sub.layout_costs, chosen, strict=True)
    )
    axes: list[AxisLoops] = []
    for factor, costs in zip(tables.problem.factors, sub.factor_costs, strict=True):
        total = costs.computation
        for number, values in costs.by_variable.items():
            total = total + values[:, chosen[number]]
        best = int(total.argmin())
        cost += float(total[best]) * len(factor.ops)
        axes.append(costs.strategies.axes[best])
    layouts = tuple(o[c] for o, c in zip(sub.options, chosen, strict=True))
    return Solution(State(layouts, tuple(axes)), cost, minimum.is_exact)


class FactorCosts(NamedTuple):
    """The cost table of a factor, before a strategy is chosen.

    Attributes:
        strategies: The options.
        computation: Cost of computing one op, by strategy.
        by_variable: Cost of moving the tensors of each variable, strategies by layouts.
    """

    strategies: MeshStrategies
    computation: Float64[ndarray, " s"]
    by_variable: dict[int, Float64[ndarray, "s l"]]


class Subproblem(NamedTuple):
    """All options at the open mesh axes, with their costs.

    Attributes:
        options: By variable, its layouts.
        layout_costs: By variable, the cost of each layout, apart from ops.
        factor_costs: By factor.
    """

    options: list[Layouts]
    layout_costs: list[Float64[ndarray, " l"]]
    factor_costs: list[FactorCosts]


def subproblem(tables: CostTables, fixed: State, open_axes: tuple[int, ...]) -> Subproblem:
    """Return all options at some mesh axes, with the others fixed by a state.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose.
    """
    problem = tables.problem
    bare = [_without(layout, open_axes) for layout in fixed.layouts]
    options = [
        tables.layouts(variable, layout, open_axes)
        for variable, layout in zip(problem.variables, bare, strict=True)
    ]
    layout_costs = [
        layout_cost(tables, variable, layouts)
        for variable, layouts in zip(problem.variables, options, strict=True)
    ]
    strategies = [
        tables.strategies(factor, _without(axes, open_axes), open_axes)
        for factor, axes in zip(problem.factors, fixed.axes, strict=True)
    ]
    requests = [
        (operand, each, options[operand.variable])
        for factor, each in zip(problem.factors, strategies, strict=True)
        for operand in factor.operands
    ]
    communication = iter(tables.communication(requests))
    factor_costs: list[FactorCosts] = []
    for factor, each in zip(problem.factors, strategies, strict=True):
        check_time()
        by_variable: dict[int, ndarray] = {}
        for operand, values in zip(factor.operands, communication, strict=False):
            known = by_variable.get(operand.variable)
            by_variable[operand.variable] = values if known is None else known + values
        factor_costs.append(
            FactorCosts(each, tables.objective.computation(factor, each), by_variable)
        )
    return Subproblem(options, layout_costs, factor_costs)


def layout_cost(tables: CostTables, variable: Variable, layouts: Layouts) -> Float64[ndarray, " l"]:
    """Return the cost of each layout of a variable; leaving cuttable axes uncut is penalised.

    Args:
        tables: Of the problem.
        variable: The variable.
        layouts: Its options.
    """
    layout_costs = tables.objective.layout_cost(
        variable, layouts, tables.axis_sizes[: len(layouts[0])]
    )
    if not tables.objective.may_replicate:
        unused = np.array([layout.count(None) for layout in layouts])
        layout_costs = layout_costs + WHOLE * (unused - unused.min())
    return layout_costs


def _layout_tables(sub: Subproblem) -> list[Table]:
    return [
        Table((number,), layout_costs)
        for number, layout_costs in enumerate(sub.layout_costs)
        if len(layout_costs) > 1 and bool(layout_costs.any())
    ]


def _without(choice: Any, open_axes: Sequence[int]) -> Any:
    return tuple(None if axis in open_axes else c for axis, c in enumerate(choice))


class _Weighted(NamedTuple):
    """A factor whose strategy is to be minimised out.

    Attributes:
        keys: Variables with a choice, in increasing order.
        weight: How many ops it stands for.
        fixed: Cost of each strategy whatever is chosen.
        tables: By key, strategies by layouts.
    """

    keys: tuple[int, ...]
    weight: int
    fixed: ndarray
    tables: list[ndarray]


def _factor_tables(
    factors: Sequence[Factor], factor_costs: Sequence[FactorCosts], sizes: list[int]
) -> list[Table]:
    """Return tables over layouts for all factors, each with the least cost over its strategies.

    The strategy of a factor with many tensors becomes a new variable instead, whose size is added
    to `sizes`.
    """
    alike: dict[tuple[int, ...], list[_Weighted]] = {}
    summed: dict[tuple[int, ...], ndarray] = {}
    for factor, (strategies, fixed, by_variable) in zip(factors, factor_costs, strict=True):
        for number, values in by_variable.items():
            if sizes[number] == 1:
                fixed = fixed + values[:, 0]
        keys = tuple(sorted([number for number in by_variable if sizes[number] > 1]))
        if keys:
            row = _Weighted(keys, len(factor.ops), fixed, [by_variable[number] for number in keys])
            alike.setdefault((len(strategies), *[sizes[number] for number in keys]), []).append(row)
    for shape, rows in alike.items():
        entries = math.prod(shape)
        if entries > FACTOR_ENTRIES:
            for row in rows:
                _add_variable(row, sizes, summed)
            continue
        step = max(1, AT_ONCE // entries)
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            for row, values in zip(some, _minimum(some, shape), strict=True):
                known = summed.get(row.keys)
                summed[row.keys] = values if known is None else known + values
    return [Table(keys, values) for keys, values in summed.items()]


def _minimum(rows: Sequence[_Weighted], shape: tuple[int, ...]) -> ndarray:
    """Return min over strategies of the summed tables, for some factors of one shape."""
    ones = (1,) * (len(shape) - 1)
    total = np.array([row.fixed for row in rows]).reshape(-1, shape[0], *ones)
    for position, size in enumerate(shape[1:]):
        wide = (*ones[:position], size, *ones[position + 1 :])
        total = total + np.array([row.tables[position] for row in rows]).reshape(
            -1, shape[0], *wide
        )
    return total.min(axis=1) * np.array([row.weight for row in rows]).reshape(-1, *ones)


def _add_variable(row: _Weighted, sizes: list[int], summed: dict[tuple[int, ...], ndarray]) -> None:
    """Add the tables of a factor whose strategy is a variable of its own."""
    own = len(sizes)
    sizes.append(len(row.fixed))
    summed[(own,)] = row.fixed * row.weight
    for number, values in zip(row.keys, row.tables, strict=True):
        summed[(number, own)] = values.T * row.weight


def _disturbed(tables: list[Table], noise: float, seed: int) -> list[Table]:
    if not noise:
        return tables
    rng = np.random.default_rng(seed)
    return [Table(t.variables, t.values * (1 + noise * rng.random(t.values.shape))) for t in tables]
