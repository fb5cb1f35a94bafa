"""The optimal placement and order of a few ops by CP-SAT.

Reads {"device": [[[device, ticks], ...] per op], "group", "edges": [[i, j, w, size]], "comm":
[[ticks per pair of devices] per size], "residual": [bytes per group], "capacity": [bytes or null],
"storages": [[i, bytes, [[op, ...], ...]]], "copies": [[i, bytes, [op, ...]]],
"workspace": [bytes per op], "with_memory", "forbidden": [placement of groups], "horizon", "until",
"seed"}; writes {"status", "place", "start", "bound"}, times in ticks. Op j reads what i makes; if
they are on two devices, op w (j, or the op that overwrites it) starts no earlier than its arrival.
`until` is when to stop, by the monotonic clock, which processes share: building the model counts.

Of a storage, each row is a way to read it where it was made: through the views that the row begins
with, all on the same device, by the op it ends with. Of a copy, the ops that read the tensor.
"""

# The solver is an optional extra.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any

from ortools.sat.python import cp_model


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the best schedule found and a proven lower bound."""
    model: Any = cp_model.CpModel()
    k = len(problem["capacity"])
    on = [[model.new_bool_var("") for _ in range(k)] for _ in problem["residual"]]
    start, end = _add_ops(model, problem, on)
    _add_limits(model, problem, on)
    if problem["with_memory"]:
        _add_memory(model, problem, on, start, end)
    solver: Any = cp_model.CpSolver()
    left = problem["until"] - time.monotonic()
    if left <= 0:
        return {"status": "UNKNOWN"}
    solver.parameters.max_time_in_seconds = left
    # One worker gives the same answer every time. Without linear relaxations, which say little of
    # an order, it proves in-trees of 20 ops in 0.1 s; with them, 20 s did not suffice.
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    # With them OR-Tools 9.15 calls a schedule optimal that is 8.5e-6 above the optimum
    # (`tests/place/baselines/test_exact.py` has the graph); without them it proves as fast.
    solver.parameters.use_precedences_in_disjunctive_constraint = False
    solver.parameters.random_seed = problem["seed"]
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return {"status": status}
    device = [next(d for d in range(k) if solver.value(row[d])) for row in on]
    return {
        "status": status,
        "place": [device[group] for group in problem["group"]],
        "start": [solver.value(s) for s in start],
        "bound": solver.best_objective_bound,
    }


def _add_ops(
    model: Any, problem: dict[str, Any], on: list[list[Any]]
) -> tuple[list[Any], list[Any]]:
    n, horizon = len(problem["device"]), problem["horizon"]
    devices = range(len(problem["capacity"]))
    start = [model.new_int_var(0, horizon, "") for _ in range(n)]
    end = [model.new_int_var(0, horizon, "") for _ in range(n)]
    step = model.new_int_var(0, horizon, "")
    busy: list[list[Any]] = [[] for _ in devices]
    for op, options in enumerate(problem["device"]):
        row = on[problem["group"][op]]
        for d, ticks in options:
            busy[d].append(model.new_optional_interval_var(start[op], ticks, end[op], row[d], ""))
        for d in {*devices} - {d for d, _ in options}:
            model.add(row[d] == 0)
        model.add(step >= end[op])
    for intervals in busy:
        model.add_no_overlap(intervals)
    for i, j, w, size in problem["edges"]:
        one, other = (on[problem["group"][op]] for op in (i, j))
        model.add(start[w] >= end[i])
        if one is not other:
            _add_comm(model, one, other, end[i], start[w], problem["comm"][size])
    model.minimize(step)
    return start, end


def _add_limits(model: Any, problem: dict[str, Any], on: list[list[Any]]) -> None:
    for row in on:
        model.add_exactly_one(row)
    for d, capacity in enumerate(problem["capacity"]):
        if capacity is not None:
            residual = [size * on[group][d] for group, size in enumerate(problem["residual"])]
            model.add(sum(residual) <= capacity)
    for place in problem["forbidden"]:
        model.add_bool_or([on[group][d].negated() for group, d in enumerate(place)])


def _add_memory(
    model: Any, problem: dict[str, Any], on: list[list[Any]], start: list[Any], end: list[Any]
) -> None:
    """Bound the bytes alive on each device at any time, from below: holds for sends are left out.

    A storage is alive from the start of the op that makes it to the end of the last that reads it
    there; a received copy from the start of the first reader to the end of the last.
    """
    for d, capacity in enumerate(problem["capacity"]):
        if capacity is None:
            continue
        here = [on[g][d] for g in problem["group"]]
        spans = _storages(model, problem, here, start, end)
        spans += _copies(model, problem, here, start, end)
        spans += [
            (start[op], end[op], here[op], size) for op, size in enumerate(problem["workspace"])
        ]
        first, last = model.new_constant(0), model.new_constant(problem["horizon"])
        spans += [(first, last, on[g][d], size) for g, size in enumerate(problem["residual"])]
        spans = [span for span in spans if span[-1]]
        alive = [
            model.new_optional_interval_var(
                begin, model.new_int_var(0, problem["horizon"], ""), until, present, ""
            )
            for begin, until, present, _ in spans
        ]
        model.add_cumulative(alive, [size for *_, size in spans], capacity)


def _storages(
    model: Any, problem: dict[str, Any], here: list[Any], start: list[Any], end: list[Any]
) -> list[tuple[Any, Any, Any, int]]:
    spans: list[tuple[Any, Any, Any, int]] = []
    for i, size, rows in problem["storages"]:
        until = model.new_int_var(0, problem["horizon"], "")
        model.add(until >= end[i])
        for row in rows:
            model.add(until >= end[row[-1]]).only_enforce_if([here[op] for op in row])
        spans.append((start[i], until, here[i], size))
    return spans


def _copies(
    model: Any, problem: dict[str, Any], here: list[Any], start: list[Any], end: list[Any]
) -> list[tuple[Any, Any, Any, int]]:
    spans: list[tuple[Any, Any, Any, int]] = []
    for i, size, readers in problem["copies"]:
        comes = model.new_bool_var("")
        begin, until = (model.new_int_var(0, problem["horizon"], "") for _ in range(2))
        for j in readers:
            model.add_bool_or([here[j].negated(), here[i], comes])
            model.add(begin <= start[j]).only_enforce_if(here[j])
            model.add(until >= end[j]).only_enforce_if(here[j])
        spans.append((begin, until, comes, size))
    return spans


def _add_comm(
    model: Any,
    one: list[Any],
    other: list[Any],
    end: Any,
    start: Any,
    ticks: list[list[int | None]],
) -> None:
    for p, row in enumerate(ticks):
        for q, comm in enumerate(row):
            if p == q:
                continue
            if comm is None:
                model.add_bool_or([one[p].negated(), other[q].negated()])
            else:
                model.add(start >= end + comm).only_enforce_if([one[p], other[q]])
