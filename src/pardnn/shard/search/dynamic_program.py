"""The best choice of some mesh axes, the others fixed: the dynamic program over the coarse graph.

Idea: `tables` knows what each way to compute costs under each layout; the loops of an op are chosen
inside of its term, which leaves a table over the layouts of its few tensors, and `eliminate` finds
the layouts. Ops with many tensors keep their loops as a variable.
Complexity: O(terms + sum of the tables' sizes).
Reference: Tofu (EuroSys 2019), section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pardnn.shard.search.cost_tables import CostTables, Layouts, State
from pardnn.shard.search.objective import MeshStrategies
from pardnn.shard.search.problem import Factor, Variable
from pardnn.shard.search.variable_elimination import Minimum, Table, minimise
from pardnn.shard.sharding import AxisLoops

#: Cost of a written tensor that is held whole though it could be cut: less than what must not be.
WHOLE = 1e18
#: Entries up to which a term becomes one table; above, its loops are a variable of their own.
FACTOR_ENTRIES = 1 << 16
#: Entries that are worked on at a time: 8 MiB.
AT_ONCE = 1 << 20


class Solution(NamedTuple):
    """A state of least cost among those that were open.

    Attributes:
        state: The choice.
        cost: In the objective's unit, without penalties only if it is feasible.
        is_exact: Whether none is better, for the ties of the problem and the axes that were open.
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
    """Return a choice of the open mesh axes for each disturbance of the tables.

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
    """The ways of a term, what computing costs, and what the layout of each decision costs."""

    strategies: MeshStrategies
    computation: ndarray
    by_variable: dict[int, ndarray]


class Subproblem(NamedTuple):
    """All that may be chosen, with its tables."""

    options: list[Layouts]
    layout_costs: list[ndarray]
    factor_costs: list[FactorCosts]


def subproblem(tables: CostTables, fixed: State, open_axes: tuple[int, ...]) -> Subproblem:
    """Return all that may be chosen at some mesh axes, the others as a state has them."""
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
    asked = [
        (operand, each, options[operand.variable])
        for factor, each in zip(problem.factors, strategies, strict=True)
        for operand in factor.operands
    ]
    communication = iter(tables.communication(asked))
    factor_costs: list[FactorCosts] = []
    for factor, each in zip(problem.factors, strategies, strict=True):
        by_variable: dict[int, ndarray] = {}
        for operand, values in zip(factor.operands, communication, strict=False):
            known = by_variable.get(operand.variable)
            by_variable[operand.variable] = values if known is None else known + values
        factor_costs.append(
            FactorCosts(each, tables.objective.computation(factor, each), by_variable)
        )
    return Subproblem(options, layout_costs, factor_costs)


def layout_cost(tables: CostTables, variable: Variable, layouts: Layouts) -> ndarray:
    """Return what holding a decision costs in each layout; a written one had better be cut."""
    layout_costs = tables.objective.layout_cost(
        variable, layouts, tables.axis_sizes[: len(layouts[0])]
    )
    if variable.is_written and not tables.objective.may_replicate:
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


class _Row(NamedTuple):
    """A term before its loops are chosen.

    Attributes:
        keys: Decisions with a choice, in increasing order.
        weight: How often it occurs.
        fixed: Cost of each way whatever is chosen.
        tables: By decision, ways by layouts.
    """

    keys: tuple[int, ...]
    weight: int
    fixed: ndarray
    tables: list[ndarray]


def _factor_tables(
    factors: Sequence[Factor], factor_costs: Sequence[FactorCosts], sizes: list[int]
) -> list[Table]:
    """Return the tables of all terms; loops of terms with many tensors become new variables."""
    alike: dict[tuple[int, ...], list[_Row]] = {}
    summed: dict[tuple[int, ...], ndarray] = {}
    for factor, (strategies, fixed, by_variable) in zip(factors, factor_costs, strict=True):
        for number, values in by_variable.items():
            if sizes[number] == 1:
                fixed = fixed + values[:, 0]
        keys = tuple(sorted([number for number in by_variable if sizes[number] > 1]))
        if keys:
            row = _Row(keys, len(factor.ops), fixed, [by_variable[number] for number in keys])
            alike.setdefault((len(strategies), *[sizes[number] for number in keys]), []).append(row)
    for shape, rows in alike.items():
        entries = math.prod(shape)
        if not 0 < entries <= FACTOR_ENTRIES:
            for row in rows:
                _add_variable(row, sizes, summed)
            continue
        step = max(1, AT_ONCE // entries)
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            for row, values in zip(some, _least(some, shape), strict=True):
                known = summed.get(row.keys)
                summed[row.keys] = values if known is None else known + values
    return [Table(keys, values) for keys, values in summed.items()]


def _least(rows: Sequence[_Row], shape: tuple[int, ...]) -> ndarray:
    """Return a table over layouts for each of some terms of one form: their best way counts."""
    ones = (1,) * (len(shape) - 1)
    total = np.array([row.fixed for row in rows]).reshape(-1, shape[0], *ones)
    for position, size in enumerate(shape[1:]):
        wide = (*ones[:position], size, *ones[position + 1 :])
        total = total + np.array([row.tables[position] for row in rows]).reshape(
            -1, shape[0], *wide
        )
    return total.min(axis=1) * np.array([row.weight for row in rows]).reshape(-1, *ones)


def _add_variable(row: _Row, sizes: list[int], summed: dict[tuple[int, ...], ndarray]) -> None:
    """Add the tables of a term whose way is a variable of its own."""
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
