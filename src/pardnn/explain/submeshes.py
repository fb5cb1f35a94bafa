"""Alternatives for plans that cut ops inside submeshes: another submesh, or another cut.

The submesh of an op and its cut are two decisions. On another submesh, all that an op does goes to
the same mesh positions there, and the cut stays; with another cut, each op stays on its submesh, in
its turn. Either is an ordinary placement of local ops, evaluated like any other (`explain.moved`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.explain.case import Case
from pardnn.explain.moved import Judged, judged
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.planner.costs import costs_for
from pardnn.planner.submesh.read_back import on_submeshes_of
from pardnn.planner.submesh.spread import devices_of, followers, positions_of, turns_of
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import PositionedOps, partition_for_submeshes
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of


class Mixed(NamedTuple):
    """A plan that cuts ops inside submeshes, by the ops that it cuts.

    Attributes:
        graph: What is cut: the step, or its pieces.
        made: Its local ops.
        follows: Of these, those that are on the submesh of another one, and that one.
        row: Submesh of each op of `graph`.
        group: Of each op of `graph`; groups are together.
    """

    graph: Graph
    made: PositionedOps
    follows: list[tuple[int, int]]
    row: Int64[ndarray, " n"]
    group: Int64[ndarray, " n"]


def mixed_of(case: Case) -> Mixed | None:
    """Return the decisions of a plan; None where it has no submeshes."""
    partition = case.plan.partition
    if partition is None or partition.submeshes == 1:
        return None
    read = on_submeshes_of(
        case.graph, case.plan, case.planned, case.overwrites, case.arrays.place
    )  # fmt: skip
    return Mixed(*read, group=colocated(read.graph.arrays, first_overwrites(read.graph)))


def together(mixed: Mixed, ops: Sequence[int]) -> Bool[ndarray, " n"]:
    """Return which ops of `graph` go with some local ops."""
    return np.isin(mixed.group, mixed.group[np.array(mixed.made.of)[list(ops)]])


def on_submesh(
    mixed: Mixed, goes: Bool[ndarray, " n"], submesh: int | Int64[ndarray, " n"]
) -> Int64[ndarray, " m"]:
    """Return the placement of the local ops with some ops of `graph` on other submeshes.

    Args:
        mixed: The plan.
        goes: Whether each op of `graph` moves.
        submesh: Where to; one for all, or one for each.
    """
    return devices_of(mixed.made, mixed.follows, np.where(goes, submesh, mixed.row))


def cut_anew(case: Case, mixed: Mixed, legal: Sharding) -> tuple[Case, Judged]:
    """Evaluate another cut, with each op on its submesh and in its turn.

    Args:
        case: The plan.
        mixed: The same.
        legal: Of `mixed.graph`, over the mesh of a submesh; see `legalize`.

    Returns:
        The plan with the other cut and no order of its own, and how it was judged.
    """
    made = partition_for_submeshes(mixed.graph, legal, mixed.made.partition.submeshes)
    local = build_graph(case.graph.name, made.partition.ops)
    costs = costs_for(local, case.cluster, case.choice, whole=case.graph)
    machine, overwrites = machine_of(costs, case.cluster), first_overwrites(local)
    place = devices_of(made, followers(local, overwrites), mixed.row)
    turns = turns_of(mixed.graph, mixed.made, case.timeline.dispatch)
    arrays = memory_bounded_plan(
        local.arrays, machine, place, positions_of(made, turns), case.usable, overwrites
    )
    line = simulate(local, machine, arrays)
    plan = dataclasses.replace(case.plan, partition=made.partition)
    other = Case(case.graph, plan, case.choice, local, costs, machine, arrays, line)
    return other, judged(other, place)
