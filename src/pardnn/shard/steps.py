"""The best choice of some mesh axes, the others fixed: the dynamic program over the coarse graph.

Idea: `tables` knows what each way to compute costs under each layout; the loops of an op are chosen
inside of its term, which leaves a table over the layouts of its few tensors, and `eliminate` finds
the layouts. Ops with many tensors keep their loops as a variable.
Complexity: O(terms + sum of the tables' sizes).
Reference: Tofu (EuroSys 2019), section 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pardnn.plan.mesh import Layout
from pardnn.shard.eliminate import Minimum, Table, minimise
from pardnn.shard.leaves import Axes
from pardnn.shard.problem import Decision, Term
from pardnn.shard.tables import State, Tables
from pardnn.shard.ways import Ways

#: Cost of a written tensor that is held whole though it could be cut: less than what must not be.
WHOLE = 1e18
#: Entries up to which a term becomes one table; above, its loops are a variable of their own.
TERM_ENTRIES = 1 << 16


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

    options: list[list[Layout]]
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


def held_cost(tables: Tables, decision: Decision, layouts: list[Layout]) -> ndarray:
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


def _term_tables(
    terms: Sequence[Term], parcels: Sequence[_Parcel], sizes: list[int]
) -> list[Table]:
    """Return the tables of all terms; loops of terms with many tensors become new variables."""
    summed: dict[tuple[int, ...], ndarray] = {}
    for term, (ways, base, by_decision) in zip(terms, parcels, strict=True):
        weight, row = len(term.ops), base
        for number, values in by_decision.items():
            if sizes[number] == 1:
                row = row + values[:, 0]
        rest = {n: values for n, values in by_decision.items() if sizes[n] > 1}
        if not rest:
            continue
        keys = tuple(sorted(rest))
        entries = len(ways) * int(np.prod([float(sizes[n]) for n in keys]))
        if 0 < entries <= TERM_ENTRIES:
            total = row.reshape(-1, *[1] * len(keys))
            for position, number in enumerate(keys):
                shape = [len(ways), *[1] * len(keys)]
                shape[1 + position] = sizes[number]
                total = total + rest[number].reshape(shape)
            values = total.min(axis=0) * weight
            summed[keys] = summed[keys] + values if keys in summed else values
            continue
        own = len(sizes)
        sizes.append(len(ways))
        summed[(own,)] = row * weight
        for number in keys:
            summed[(number, own)] = rest[number].T * weight
    return [Table(keys, values) for keys, values in summed.items()]


def _disturbed(tables: list[Table], noise: float, seed: int) -> list[Table]:
    if not noise:
        return tables
    rng = np.random.default_rng(seed)
    return [Table(t.variables, t.values * (1 + noise * rng.random(t.values.shape))) for t in tables]
