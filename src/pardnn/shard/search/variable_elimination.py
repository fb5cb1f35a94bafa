"""Minimum of a sum of tables over discrete variables, by eliminating one variable at a time.

Problem: choose a value for each variable so that the sum of tables, each over a few of them, is
least. A chain of layers is the easy case, in which this is the ordinary dynamic program.
Idea: the variable whose elimination makes the smallest table goes first (greedy order); the result
is a table over its neighbours, the frontier. This is exact for any graph.
Complexity: O(sum of the tables' sizes), exponential only in the width of the frontier. If a table
would exceed a bound, the variable with the most neighbours is instead fixed to its value in a given
assignment, and the answer is no longer called exact.
Reference: bucket elimination, R. Dechter, Artificial Intelligence 113, 1999; on a chain the dynamic
program of Tofu (EuroSys 2019), section 5.1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.time_limit import check_time

#: Entries of the largest table that is made: 16 MiB.
MAX_ENTRIES = 1 << 21


class Table(NamedTuple):
    """Values for each combination of its variables, which are in increasing order."""

    variables: tuple[int, ...]
    values: Float64[ndarray, "..."]


class Minimum(NamedTuple):
    """An assignment of least sum.

    Attributes:
        assignment: A value for each variable.
        is_exact: Whether no variable had to be fixed.
    """

    assignment: list[int]
    is_exact: bool


class _Step(NamedTuple):
    variable: int
    others: tuple[int, ...]
    best: ndarray


def joined(tables: Sequence[Table], variables: tuple[int, ...]) -> ndarray:
    """Return the sum of tables as a table over `variables`, which include all of theirs."""
    total: ndarray | None = None
    for table in tables:
        mine = set(table.variables)
        index = tuple(slice(None) if v in mine else None for v in variables)
        values = table.values[index]
        total = values if total is None else total + values
    assert total is not None
    return total


def minimise(
    sizes: Sequence[int],
    tables: Sequence[Table],
    start: Sequence[int] | None = None,
    max_entries: int = MAX_ENTRIES,
) -> Minimum:
    """Return the assignment of least sum.

    Args:
        sizes: Number of values of each variable.
        tables: At least one value each; a variable in no table gets its value of `start`.
        start: An assignment, for variables that have to be fixed; zeros if not given.
        max_entries: Bound of a table's size.
    """
    chosen = list(start) if start is not None else [0] * len(sizes)
    at: list[dict[int, Table]] = [{} for _ in sizes]
    near: list[set[int]] = [set() for _ in sizes]
    for number, table in enumerate(tables):
        for variable in table.variables:
            at[variable][number] = table
            near[variable].update(table.variables)
    count = len(tables)
    steps: list[_Step] = []
    is_exact = True
    waiting = [(_entries(near[v], sizes), v) for v in range(len(sizes)) if at[v]]
    heapq.heapify(waiting)
    done = [False] * len(sizes)
    while waiting:
        check_time()
        entries, variable = heapq.heappop(waiting)
        if done[variable] or entries != _entries(near[variable], sizes):
            continue
        if entries > max_entries:
            others = (v for _, v in waiting if not done[v])
            fixed = max(others, key=lambda v: len(near[v]), default=variable)
            heapq.heappush(waiting, (entries, variable))
            variable, is_exact = fixed, False
            changed = _fix(variable, chosen[variable], at, near)
        else:
            changed, step = _eliminate(variable, count, at, near)
            steps.append(step)
            count += 1
        done[variable] = True
        for other in changed:
            heapq.heappush(waiting, (_entries(near[other], sizes), other))
    for step in reversed(steps):
        chosen[step.variable] = int(step.best[tuple(chosen[v] for v in step.others)])
    return Minimum(chosen, is_exact)


def _entries(variables: set[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[v] for v in variables)


def _eliminate(
    variable: int, number: int, at: list[dict[int, Table]], near: list[set[int]]
) -> tuple[list[int], _Step]:
    mine = at[variable]
    union = tuple(sorted(near[variable] | {variable}))
    values = joined(list(mine.values()), union)
    axis = union.index(variable)
    others = union[:axis] + union[axis + 1 :]
    best = values.argmin(axis=axis)
    table = Table(others, values.min(axis=axis))
    for other in others:
        for gone in mine:
            at[other].pop(gone, None)
        at[other][number] = table
        near[other] |= near[variable]
        near[other].discard(variable)
    at[variable] = {}
    return list(others), _Step(variable, others, np.asarray(best))


def _fix(variable: int, value: int, at: list[dict[int, Table]], near: list[set[int]]) -> list[int]:
    changed = [v for v in near[variable] if v != variable]
    for number, table in at[variable].items():
        axis = table.variables.index(variable)
        rest = table.variables[:axis] + table.variables[axis + 1 :]
        smaller = Table(rest, table.values.take(value, axis=axis))
        for other in rest:
            at[other][number] = smaller
    for other in changed:
        near[other] = {v for table in at[other].values() for v in table.variables} | {other}
    at[variable] = {}
    return changed
