"""Algorithms side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from pardnn.errors import PardnnError
from pardnn.planner.make_plan import make_plan
from pardnn.planner.problem import Problem
from pardnn.report.results import CompareRow, PlanResult


def compare(
    problem: Problem, names: Iterable[str], tell: Callable[[str], None] = lambda _: None
) -> tuple[CompareRow, ...]:
    """Plan with each of these algorithms, under one simulator; a failure is a row, not an error.

    Args:
        problem: What to plan.
        names: Of the algorithms.
        tell: Called with a short text about what is being tried.
    """
    names, rows = tuple(names), list[CompareRow]()
    for number, name in enumerate(names, 1):
        head = f"comparing, {number} of {len(names)}: {name}"
        tell(head)
        try:
            _, result = make_plan(
                problem.with_options(algorithm=name), functools.partial(_told, tell, head)
            )
        except PardnnError as error:
            rows.append(_compared(name, None, str(error)))
        else:
            rows.append(_compared(name, result, None))
    return tuple(rows)


def _told(
    tell: Callable[[str], None], head: str, what: str, tried: int, best_s: float | None
) -> None:
    """Report what one of the algorithms is trying."""
    del best_s
    tell(f"{head}: {what}; {tried} tried" if tried else head)


def _compared(name: str, result: PlanResult | None, error: str | None) -> CompareRow:
    return CompareRow(
        algorithm=name,
        makespan_s=result and result.makespan_s,
        peak_bytes=result and result.peak_bytes,
        planning_s=result and result.planning_s,
        fits=result is not None,
        error=error,
    )
