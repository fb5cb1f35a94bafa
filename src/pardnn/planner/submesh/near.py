"""Mixed plans near one to start from: its cut, and columns on the submeshes that they were on.

Candidates are the plan itself, in an order near its own where it has to fit a new limit, and its
columns placed near where they were, as whole ops are near a plan of these (`start.near`). Ops and
devices are matched by name. Where the graph is another one, its state stays cut as it was, and all
else is cut around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pardnn.errors import InfeasibleError, PardnnError
from pardnn.place.colocation import closed_arrays
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Plan, PlanArrays, plan_from_arrays
from pardnn.planner.algorithms import BEFORE, SHARDED, mixed_parts
from pardnn.planner.microbatches.best import Best
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import check_fixed
from pardnn.planner.start.earlier import devices_now, fixed_state, plan_before
from pardnn.planner.start.near import itself
from pardnn.planner.steering.preferences import unmet_by
from pardnn.planner.submesh.columns import Columns, columns_of
from pardnn.planner.submesh.demanded import inside_of_submesh, layouts_inside, on_submeshes
from pardnn.planner.submesh.spread import (
    best_spread,
    completed,
    followers,
    rows_of,
    turns_of,
)
from pardnn.planner.submesh.submeshes import submesh_sizes
from pardnn.shard.sharding import FixedLayouts, Sharding, sharding_of
from pardnn.shard.spmd.legalize import legalize
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of

#: The cut and the placement of a plan that does not say by which algorithm it was made.
USUAL = ("tofu", "pardnn")


class _Near(NamedTuple):
    """A step, cut near a plan to start from.

    Attributes:
        problem: The step, with the plan.
        start: The plan, as a placement of its local ops.
        name: Its algorithm.
        pieces: Of the batch; None where it is whole.
        columns: Of the step.
        local: The same, if it is a plan of these local ops on these devices; else None.
    """

    problem: Problem
    start: Plan
    name: str
    pieces: Pieces | None
    columns: Columns
    local: PlanArrays | None


def starts_mixed(problem: Problem) -> bool:
    """Whether the plan to start from cuts ops inside submeshes."""
    start = problem.start
    return start is not None and start.partition is not None and start.partition.submeshes > 1


def decide_mixed_near(
    problem: Problem, decide: Decide, afresh: Callable[[Problem], Outcome]
) -> Outcome:
    """Return the best mixed plan near the one to start from; without it where none is near.

    Args:
        problem: What to plan, with such a plan to start from.
        decide: Runs placements on a problem.
        afresh: Plans without a start.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E226 to E229, if the step has no such pieces.
    """
    start = problem.start
    assert start is not None
    pair = mixed_parts(start.algorithm or "") or USUAL
    try:
        near = _cut_near(problem, start, "*".join(pair))
        best = Best(problem)
        best.try_(lambda: _as_it_was(near))
        best.try_(lambda: _columns_near(near, decide))
        return best.best()
    except InfeasibleError as error:
        why = error.message.splitlines()[0].rstrip(".")
    found = afresh(dataclasses.replace(problem, start=None))
    note = f"planned from scratch, since no plan near the start plan was found: {why}"
    return found._replace(notes=(*found.notes, note))


def _cut_near(problem: Problem, start: Plan, name: str) -> _Near:
    """Cut a step as the plan to start from does.

    Raises:
        InfeasibleError: E301, if the devices have no such submeshes, or the step no such cut.
    """
    partition, wanted = start.partition, problem.options.microbatches
    assert partition is not None
    size, count = partition.mesh.size, wanted if isinstance(wanted, int) else 1
    if size not in submesh_sizes(problem.cluster):
        raise InfeasibleError(f"the devices do not form submeshes of {size}")
    free = problem.with_options(constraints=())
    pieces, cut = (None, free) if count == 1 else problem_in_pieces(free, count, 1)
    columns = columns_of(problem, cut, _sharding(problem, cut, start))
    is_same = partition.ops == columns.made.partition.ops
    plain = dataclasses.replace(start, partition=None, pieces=None, constraints=None)
    local = plan_before(columns.local, plain, problem.cluster) if is_same else None
    return _Near(problem, plain, name, pieces, columns, local)


def _sharding(problem: Problem, cut: Problem, start: Plan) -> Sharding:
    """Return the cut of the plan to start from, or one that leaves state cut as there.

    Raises:
        InfeasibleError: E301, if the step needs other layouts.
    """
    partition = start.partition
    assert partition is not None
    inside = inside_of_submesh(problem, cut, partition.mesh.size)
    names = {tensor.name for op in cut.graph.ops for tensor in op.outputs}
    if partition.loops is not None and names == set(partition.sharding):
        try:
            legal = legalize(cut.graph, sharding_of(partition))
            check_fixed(inside, legal)
            return legal
        except PardnnError:  # a shape is another one, or so is what is demanded
            pass
    state, demanded = fixed_state(cut.graph, partition), layouts_inside(inside)
    layouts = {**(state.layouts if state else {}), **(demanded.layouts if demanded else {})}
    found = SHARDED["tofu"](
        cut.graph, inside.cluster, "seconds", costs=cut.costs,
        fixed=FixedLayouts(partition.mesh, layouts),
    )  # fmt: skip
    legal = legalize(cut.graph, found)
    check_fixed(inside, legal)
    return legal


def _as_it_was(near: _Near) -> Outcome:
    """Return the plan to start from, in an order near its own.

    Raises:
        InfeasibleError: E301, if it is for another step or other devices, does not fit, or does not
            meet what is demanded.
    """
    problem, columns = near.problem, near.columns
    if near.local is None:
        raise InfeasibleError("the start plan is for another step or other devices")
    local = dataclasses.replace(
        problem.with_options(constraints=()),
        graph=columns.local,
        costs=columns.costs,
        start=near.start,
    )
    plan, count = itself(local), len(columns.column.graph.ops)
    timeline = simulate(columns.local, local.machine, plan)
    outcome = Outcome(
        algorithm=near.name, plan=plan, moved_ops=0, makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(columns.local), planning_s=0.0,
        notes=(f"started from a plan: {count} of {count} ops stay on their devices",),
    )  # fmt: skip
    found = completed(columns, near.pieces, outcome)
    broken = unmet_by(problem, found, problem.options.constraints)
    if broken:
        raise InfeasibleError(f"the start plan breaks constraint {broken[0]}")
    return found


def _columns_near(near: _Near, decide: Decide) -> Outcome:
    """Place columns near where they were.

    Raises:
        InfeasibleError: E301, if no plan fits.
    """
    problem, columns = near.problem, near.columns
    column = on_submeshes(problem, columns.column, columns.made.partition.mesh.size)
    column = dataclasses.replace(column, start=_plan_of_columns(near))
    names = ("pardnn",) if near.local is None else (BEFORE, "pardnn")
    found = best_spread(problem, columns, column, near.pieces, lambda within: decide(within, names))
    return found._replace(algorithm=near.name)


def _plan_of_columns(near: _Near) -> Plan:
    """Return the plan to start from as one of its columns, with the submeshes as devices.

    It has an order where the local ops are the same, and is a plan to be near to in any case.
    """
    columns = near.columns
    graph, cluster = columns.column.graph, columns.column.cluster
    if near.local is None:
        rows = _rows_before(near)
        placement = {op.name: rows[op.name] for op in graph.ops if rows.get(op.name, -1) >= 0}
        return Plan(placement=placement, order=((),) * cluster.num_devices, cluster=cluster)
    local, made = columns.local, columns.made
    machine = machine_of(columns.costs, near.problem.cluster)
    dispatch = simulate(local, machine, near.local).dispatch
    follows = followers(local, first_overwrites(local))
    arrays = memory_bounded_plan(
        closed_arrays(graph), columns.column.machine,
        rows_of(made, follows, near.local.place, len(graph.ops)),
        turns_of(graph, made, dispatch), [None] * cluster.num_devices, first_overwrites(graph),
    )  # fmt: skip
    return dataclasses.replace(plan_from_arrays(graph, arrays), cluster=cluster)


def _rows_before(near: _Near) -> dict[str, int]:
    """Return the submesh of each op that the plan to start from had; -1 if it is gone."""
    size = near.columns.made.partition.mesh.size
    now = np.array(devices_now(near.start, near.problem.cluster)).reshape(-1, size)
    whole = (now == now[:, :1] + np.arange(size)).all(axis=1) & (now[:, 0] % size == 0)
    row = np.where(whole & (now[:, 0] >= 0), now[:, 0] // size, -1).tolist()
    return {
        name.rpartition("@")[0]: row[device // size]
        for name, device in near.start.placement.items()
    }
