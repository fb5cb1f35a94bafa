"""A mixed plan as what it was made from: the graph that is cut, placed on submeshes.

The plan places local ops; those of one op are on one submesh, and they run in the order in which
the columns were placed (`spread`), so submeshes and order of the columns can be read off it.
O(local ops log local ops), beside partitioning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.plan.plan import Plan, graph_in_pieces
from pardnn.planner.submesh.spread import followers, rows_of, turns_of
from pardnn.planner.submesh.submeshes import part_of
from pardnn.shard.sharding import sharding_of
from pardnn.shard.spmd.partitioner import PositionedOps, partition_for_submeshes
from pardnn.sim.machine import Machine


class OnSubmeshes(NamedTuple):
    """The ops that a mixed plan cuts, placed.

    Attributes:
        graph: What is cut: the step, or its pieces.
        made: Its local ops.
        follows: Of these, those that are on the submesh of another one, and that one.
        row: The submesh of each op of `graph`.
    """

    graph: Graph
    made: PositionedOps
    follows: list[tuple[int, int]]
    row: Int64[ndarray, " n"]


def on_submeshes_of(
    graph: Graph,
    plan: Plan,
    local: Graph,
    overwrites: Int64[ndarray, "w 2"],
    place: Int64[ndarray, " m"],
) -> OnSubmeshes:
    """Return where a mixed plan runs the ops that it cuts.

    Args:
        graph: The step.
        plan: A valid plan of it with several submeshes.
        local: The graph of the local ops, which it places.
        overwrites: From `first_overwrites`, of `local`.
        place: The device of each local op.
    """
    partition, cut = plan.partition, graph_in_pieces(graph, plan)
    assert partition is not None
    made = partition_for_submeshes(cut, sharding_of(partition), partition.submeshes)
    follows = followers(local, overwrites)
    return OnSubmeshes(cut, made, follows, rows_of(made, follows, place, len(cut.ops)))


def orders_of(read: OnSubmeshes, dispatch: Int64[ndarray, " m"]) -> list[list[int]]:
    """Return the ops of each submesh in their order.

    Args:
        read: The plan.
        dispatch: The turn of each local op in a run.
    """
    order = inverse_permutation(turns_of(read.graph, read.made, dispatch))
    submeshes = range(read.made.partition.submeshes)
    return [order[read.row[order] == each].tolist() for each in submeshes]


def machine_of_columns(read: OnSubmeshes, cluster: Cluster, machine: Machine) -> Machine:
    """Return a machine with a device for each submesh.

    An op takes as long there as one of its local ops.

    Args:
        read: The plan.
        cluster: All devices.
        machine: Durations of the local ops, and links.
    """
    size = read.made.partition.mesh.size
    first = np.unique(np.array(read.made.of), return_index=True)[1]
    links = part_of(cluster, range(0, cluster.num_devices, size), size).arrays
    return machine._replace(
        seconds=machine.seconds[:, first],
        device_class=machine.device_class[::size],
        latency=links.latency,
        bandwidth=links.bandwidth,
    )
