"""A cut inside submeshes, placed: local ops run where their column does.

Columns are placed by what places whole ops. Local ops then run at their position of the submesh
that their column is on, in the order of the columns, and what they read of another submesh is sent
to them: an ordinary placement of the local ops, with messages and memory as of any other.
O((local ops + messages) log messages), beside partitioning and placement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays, op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.partitioned_graph import FETCH, SLICE
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import plan_from_arrays
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.microbatches.below import far, only_below
from pardnn.planner.microbatches.decide import STAGES, in_stages
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import ShardedPlan, check_fixed
from pardnn.planner.submesh.columns import Columns, check_computing, columns_of
from pardnn.planner.submesh.demanded import inside_of_submesh, layouts_inside, on_submeshes
from pardnn.shard.recipes.in_pieces import in_pieces
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import PositionedOps
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine, fastest_seconds, machine_of
from pardnn.sim.peak import peaks
from pardnn.units import bytes_text

#: Fractions of the usable memory for which columns are placed, one after the other, until all that
#: a device holds fits, and takes at most `NEAR` times as long: a column does not tell how long what
#: it fetches is held, and messages come late where there is no room for them.
ROOM, NEAR = (1.0, 0.9, 0.8, 0.65), 1.05


def cut_of_submesh(problem: Problem, cut: Problem, algorithm: str, size: int) -> Sharding:
    """Return how an algorithm cuts the pieces of a step over one submesh.

    `tofu` looks at the pieces, of which each brings gradients to add up; a recipe cuts the step.

    Args:
        problem: The step.
        cut: The same with its batch in pieces; the same problem if it is whole.
        algorithm: A key of `SHARDED`.
        size: Devices of a submesh.

    Returns:
        What the local ops can carry out (see `legalize`).

    Raises:
        InfeasibleError: E301, if it has no cut with the layouts that are demanded.
        UsageError: E226, E228 or E229, if it has no such cut.
    """
    inside, search = inside_of_submesh(problem, cut, size), SHARDED[algorithm]
    fixed, cluster = layouts_inside(inside), inside.cluster
    if algorithm == "tofu":
        sharding = search(cut.graph, cluster, "seconds", costs=cut.costs, fixed=fixed)
    else:
        whole = layouts_inside(inside_of_submesh(problem, problem, size))
        sharding = search(problem.graph, whole or cluster)
        if cut.graph is not problem.graph:
            sharding = in_pieces(problem.graph, cut.graph, sharding)
    legal = legalize(cut.graph, sharding)
    check_fixed(inside, legal)
    return legal


def placed_on_submeshes(
    problem: Problem,
    cut: Problem,
    pieces: Pieces | None,
    sharding: Sharding,
    name: str,
    decide: Decide,
    below: float = math.inf,
) -> Outcome:
    """Return the plan of a cut, with its columns placed by an algorithm.

    Args:
        problem: The step.
        cut: The same with its batch in pieces; the same problem if it is whole.
        pieces: The pieces; None where it is whole.
        sharding: From `cut_of_submesh`.
        name: Of what places whole ops.
        decide: Runs it on a problem.
        below: Seconds; columns are not placed that compute for as long.

    Raises:
        InfeasibleError: E301, if no plan fits, or the columns compute for too long.
    """
    columns = columns_of(problem, cut, sharding)
    column = on_submeshes(problem, columns.column, sharding.mesh.size)
    least = float(fastest_seconds(column.machine).sum()) / column.cluster.num_devices
    check_computing(least, below)
    column = only_below(column, far(column.graph) * below)
    return best_spread(
        problem, columns, column, pieces, lambda within: _placed(problem, within, name, decide)
    )


def best_spread(
    problem: Problem,
    columns: Columns,
    column: Problem,
    pieces: Pieces | None,
    place: Callable[[Problem], Outcome],
) -> Outcome:
    """Return the plan of columns that are placed, under less and less memory until all fits.

    Args:
        problem: The step.
        columns: Its columns.
        column: One position as a problem, with what is demanded of it.
        pieces: Of the batch; None where it is whole.
        place: Places the columns.

    Raises:
        InfeasibleError: E301, if no plan fits.
    """
    step = _step_of(problem, columns)
    is_limited = any(device.memory is not None for device in column.cluster.devices)
    best: Outcome | None = None
    failure: InfeasibleError | None = None
    for room in ROOM if is_limited else ROOM[:1]:
        try:
            placed = place(_within(column, room))
        except InfeasibleError as error:  # nor do columns fit into less
            failure = failure or error
            break
        try:
            found = _spread(problem, columns, step, placed)
        except InfeasibleError as error:
            failure = failure or error
            continue
        if best is None or found.makespan_s < best.makespan_s:
            best = found
        if best.makespan_s <= NEAR * placed.makespan_s or placed.makespan_s >= column.below:
            break
    if best is None:
        assert failure is not None
        raise failure
    return completed(columns, pieces, best)


def _placed(problem: Problem, column: Problem, name: str, decide: Decide) -> Outcome:
    if name == STAGES and column.cut is not None:
        return in_stages(problem, column)
    return decide(column, (name,))


def _within(column: Problem, room: float) -> Problem:
    """Return a problem with less memory."""
    devices = tuple(
        dataclasses.replace(d, memory=None if d.memory is None else int(d.memory * room))
        for d in column.cluster.devices
    )
    return dataclasses.replace(column, cluster=dataclasses.replace(column.cluster, devices=devices))


class _LocalStep(NamedTuple):
    """What is the same wherever columns are: the local ops, and the machine that runs them.

    Attributes:
        arrays: Of their graph, with closed groups.
        machine: Of all devices.
        overwrites: Of their graph.
        follows: From `followers`.
    """

    arrays: GraphArrays
    machine: Machine
    overwrites: Int64[ndarray, "w 2"]
    follows: list[tuple[int, int]]


def _step_of(problem: Problem, columns: Columns) -> _LocalStep:
    local, overwrites = columns.local, first_overwrites(columns.local)
    machine = machine_of(columns.costs, problem.cluster)
    return _LocalStep(closed_arrays(local), machine, overwrites, followers(local, overwrites))


def followers(local: Graph, overwrites: Int64[ndarray, "w 2"]) -> list[tuple[int, int]]:
    """Return the local ops that go to the submesh of another, and that one, in topological order.

    Each other local op runs on the submesh of the op that it stands beside, so a shard crosses to
    another submesh once, at its own position, and is cut and passed on there. What is cut out of a
    tensor that is written in place is cut where that is, with the copy that makes it contiguous;
    and what is written into one is written there.

    Args:
        local: The graph of the local ops.
        overwrites: From `first_overwrites`.
    """
    a, found = local.arrays, list[tuple[int, int]]()
    written = set(overwrites[:, 0].tolist())
    for i in a.topological.tolist():
        op = local.ops[i]
        if not (op.kind.startswith("pardnn.") and op.inputs and op.outputs):
            continue
        tensor = a.input_tensor[a.input_ptr[i]]
        maker = int(a.tensor_op[tensor])
        is_view = op.outputs[0].alias_of is not None and a.tensor_owner[tensor] in written
        is_packed = op.kind == FETCH and len(op.inputs) == 1 and local.ops[maker].kind == SLICE
        if is_view or is_packed:
            found.append((i, maker))
    return found


def devices_of(
    made: PositionedOps, follows: Sequence[tuple[int, int]], row: Int64[ndarray, " n"]
) -> Int64[ndarray, " m"]:
    """Return the device of each local op.

    Args:
        made: The local ops.
        follows: From `followers`.
        row: The submesh of each op of the graph that is cut.
    """
    rows = row[np.array(made.of)]
    for op, maker in follows:
        rows[op] = rows[maker]
    return rows * made.partition.mesh.size + np.array(made.position)


def rows_of(
    made: PositionedOps,
    follows: Sequence[tuple[int, int]],
    place: Int64[ndarray, " m"],
    count: int,
) -> Int64[ndarray, " n"]:
    """Return the submesh of each op of the graph that is cut; the inverse of `devices_of`.

    Args:
        made: The local ops.
        follows: From `followers`.
        place: The device of each local op.
        count: Ops of the graph.
    """
    own = np.ones(len(made.of), dtype=bool)
    own[[op for op, _ in follows]] = False
    row = np.zeros(count, dtype=np.int64)
    row[np.array(made.of)[own]] = place[own] // made.partition.mesh.size
    return row


def turns_of(
    graph: Graph, made: PositionedOps, dispatch: Int64[ndarray, " m"]
) -> Int64[ndarray, " n"]:
    """Return the position of each op of the graph that is cut in the order of its local ops.

    An op begins with the first of its local ops, but not before what it depends on: another cut may
    read what this one does not.

    Args:
        graph: What is cut.
        made: Its local ops.
        dispatch: The turn of each local op.
    """
    a, edges = graph.arrays, op_edges(graph.arrays)
    first = np.full(a.num_ops, len(made.of))
    np.minimum.at(first, np.array(made.of), dispatch)
    begins = np.searchsorted(edges[:, 0], np.arange(a.num_ops + 1))
    for op in a.topological.tolist():
        successors = edges[begins[op] : begins[op + 1], 1]
        first[successors] = np.maximum(first[successors], first[op])
    return inverse_permutation(np.lexsort((inverse_permutation(a.topological), first)))


def positions_of(made: PositionedOps, turn: Int64[ndarray, " n"]) -> Int64[ndarray, " m"]:
    """Return the position of each local op in an order of all.

    Args:
        made: The local ops.
        turn: The position of each op of the graph that is cut in a topological order of these.
    """
    of = np.array(made.of)
    return inverse_permutation(np.lexsort((np.arange(len(of)), turn[of])))


def _spread(problem: Problem, columns: Columns, step: _LocalStep, column: Outcome) -> Outcome:
    """Place all local ops as their columns are, in the order of the columns.

    Raises:
        InfeasibleError: E301, if that does not fit.
    """
    local, size = columns.local, columns.made.partition.mesh.size
    dispatch = simulate(columns.column.graph, columns.column.machine, column.plan).dispatch
    position = positions_of(columns.made, dispatch)
    place = devices_of(columns.made, step.follows, column.plan.place)
    plan = memory_bounded_plan(
        step.arrays, step.machine, place, position, problem.capacities, step.overwrites
    )
    if not fits(local.arrays, plan, problem.capacities):
        worst = int(peaks(local.arrays, plan).max())
        raise InfeasibleError(
            f"no plan fits. With ops cut over {size} devices, a device holds {bytes_text(worst)}.",
            details={"peak_bytes": worst},
        )
    timeline = simulate(local, step.machine, plan)
    return column._replace(
        plan=plan,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(local),
        lower_bound_s=0.0,
    )


def completed(columns: Columns, pieces: Pieces | None, outcome: Outcome) -> Outcome:
    """Return an outcome with its partitioned graph.

    Args:
        columns: Of the step.
        pieces: Of the batch; None where it is whole.
        outcome: A plan of the local ops.
    """
    made, local = columns.made, columns.local
    plan = dataclasses.replace(
        plan_from_arrays(local, outcome.plan), partition=made.partition, pieces=pieces
    )
    size = made.partition.mesh.size
    count = 1 if pieces is None else len(pieces.points) - 1
    notes = [f"batch in {count} pieces"] if pieces else []
    notes.append(
        f"every op cut over {size} devices, on one of {made.partition.submeshes} submeshes"
    )
    return outcome._replace(
        notes=(*notes, *outcome.notes, *made.notes),
        sharded=ShardedPlan(
            plan=plan, graph=local, costs=columns.costs, arrays=outcome.plan,
            makespan_s=outcome.makespan_s, transfer_bytes=outcome.transfer_bytes,
            planning_s=outcome.planning_s,
        ),
    )  # fmt: skip
