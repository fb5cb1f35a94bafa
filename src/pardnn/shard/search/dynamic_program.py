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

from pardnn.shard.partition.per_device import Axes
from pardnn.shard.search.cost_tables import Layouts, State, Tables
from pardnn.shard.search.objective import Ways
from pardnn.shard.search.problem import Decision, Term
from pardnn.shard.search.variable_elimination import Minimum, Table, minimise

#: Cost of a written tensor that is held whole though it could be cut: less than what must not be.
WHOLE = 1e18
#: Entries up to which a term becomes one table; above, its loops are a variable of their own.
TERM_ENTRIES = 1 << 16
#: Entries that are worked on at a time: 8 MiB.
AT_ONCE = 1 << 20


class Solved(NamedTuple):
    """A state of least cost among those that were open.

    Attributes:
        state: The choice.
        cost: In the objective's unit, without penalties only if it is feasible.
        is_exact: Whether none is better, for the ties of the problem and the axes that were open.
    """

    state: State
    cost: float
    is_exact: bool


def solve(tables: Tables, fixed: State, open_axes: Sequence[int]) -> Solved:
    """Return the best choice of the open mesh axes.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
    """
    return solve_many(tables, fixed, open_axes, (0.0,))[0]


def solve_many(
    tables: Tables, fixed: State, open_axes: Sequence[int], noises: Sequence[float]
) -> list[Solved]:
    """Return a choice of the open mesh axes for each disturbance of the tables.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
        noises: Relative: 0 gives the best choice, others give choices that are nearly as good.
    """
    opened = opened_problem(tables, fixed, tuple(open_axes))
    sizes = [len(layouts) for layouts in opened.options]
    found = _held_tables(opened)
    found += _term_tables(tables.problem.terms, opened.parcels, sizes)
    return [
        _chosen(tables, opened, minimise(sizes, _disturbed(found, noise, seed)))
        for seed, noise in enumerate(noises)
    ]


def _chosen(tables: Tables, opened: Opened, minimum: Minimum) -> Solved:
    chosen = minimum.assignment[: len(opened.options)]
    cost = sum(float(held[choice]) for held, choice in zip(opened.held, chosen, strict=True))
    axes: list[Axes] = []
    for term, parcel in zip(tables.problem.terms, opened.parcels, strict=True):
        total = parcel.computed
        for number, values in parcel.by_decision.items():
            total = total + values[:, chosen[number]]
        best = int(total.argmin())
        cost += float(total[best]) * len(term.ops)
        axes.append(parcel.ways.axes[best])
    layouts = tuple(o[c] for o, c in zip(opened.options, chosen, strict=True))
    return Solved(State(layouts, tuple(axes)), cost, minimum.is_exact)


class _Parcel(NamedTuple):
    """The ways of a term, what computing costs, and what the layout of each decision costs."""

    ways: Ways
    computed: ndarray
    by_decision: dict[int, ndarray]


class Opened(NamedTuple):
    """All that may be chosen, with its tables."""

    options: list[Layouts]
    held: list[ndarray]
    parcels: list[_Parcel]


def opened_problem(tables: Tables, fixed: State, open_axes: tuple[int, ...]) -> Opened:
    """Return all that may be chosen at some mesh axes, the others as a state has them."""
    problem = tables.problem
    bare = [_opened(layout, open_axes) for layout in fixed.layouts]
    options = [
        tables.layouts(decision, layout, open_axes)
        for decision, layout in zip(problem.decisions, bare, strict=True)
    ]
    held = [
        held_cost(tables, decision, layouts)
        for decision, layouts in zip(problem.decisions, options, strict=True)
    ]
    ways = [
        tables.ways(term, _opened(axes, open_axes), open_axes)
        for term, axes in zip(problem.terms, fixed.axes, strict=True)
    ]
    asked = [
        (use, each, options[use.decision])
        for term, each in zip(problem.terms, ways, strict=True)
        for use in term.uses
    ]
    moved = iter(tables.moved(asked))
    parcels: list[_Parcel] = []
    for term, each in zip(problem.terms, ways, strict=True):
        by_decision: dict[int, ndarray] = {}
        for use, values in zip(term.uses, moved, strict=False):
            known = by_decision.get(use.decision)
            by_decision[use.decision] = values if known is None else known + values
        parcels.append(_Parcel(each, tables.objective.computed(term, each), by_decision))
    return Opened(options, held, parcels)


def held_cost(tables: Tables, decision: Decision, layouts: Layouts) -> ndarray:
    """Return what holding a decision costs in each layout; a written one had better be cut."""
    held = tables.objective.held(decision, layouts, tables.parts[: len(layouts[0])])
    if decision.is_written and not tables.objective.may_replicate:
        unused = np.array([layout.count(None) for layout in layouts])
        held = held + WHOLE * (unused - unused.min())
    return held


def _held_tables(opened: Opened) -> list[Table]:
    return [
        Table((number,), held)
        for number, held in enumerate(opened.held)
        if len(held) > 1 and bool(held.any())
    ]


def _opened(choice: Any, open_axes: Sequence[int]) -> Any:
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


def _term_tables(
    terms: Sequence[Term], parcels: Sequence[_Parcel], sizes: list[int]
) -> list[Table]:
    """Return the tables of all terms; loops of terms with many tensors become new variables."""
    alike: dict[tuple[int, ...], list[_Row]] = {}
    summed: dict[tuple[int, ...], ndarray] = {}
    for term, (ways, fixed, by_decision) in zip(terms, parcels, strict=True):
        for number, values in by_decision.items():
            if sizes[number] == 1:
                fixed = fixed + values[:, 0]
        keys = tuple(sorted([number for number in by_decision if sizes[number] > 1]))
        if keys:
            row = _Row(keys, len(term.ops), fixed, [by_decision[number] for number in keys])
            alike.setdefault((len(ways), *[sizes[number] for number in keys]), []).append(row)
    for shape, rows in alike.items():
        entries = math.prod(shape)
        if not 0 < entries <= TERM_ENTRIES:
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
