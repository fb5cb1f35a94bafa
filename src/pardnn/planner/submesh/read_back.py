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

from pardnn.graph.ir import Graph
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.plan import Plan, graph_in_pieces
from pardnn.planner.submesh.spread import followers, rows_of, turns_of
from pardnn.planner.submesh.submeshes import part_of
from pardnn.shard.sharding import sharding_of
from pardnn.shard.spmd.partitioner import partition_for_submeshes
from pardnn.sim.machine import Machine


class OnSubmeshes(NamedTuple):
    """The ops that a mixed plan cuts, placed.

    Attributes:
        graph: The step, or its pieces.
        row: The submesh of each op.
        orders: The ops of each submesh, in their order.
        machine: With a device for each submesh, where each op takes as long as one of its local
            ops.
    """

    graph: Graph
    row: Int64[ndarray, " n"]
    orders: list[list[int]]
    machine: Machine


def on_submeshes_of(
    graph: Graph,
    plan: Plan,
    local: Graph,
    machine: Machine,
    place: Int64[ndarray, " m"],
    dispatch: Int64[ndarray, " m"],
) -> OnSubmeshes:
    """Return where and in which order a mixed plan runs the ops that it cuts.

    Args:
        graph: The step.
        plan: A valid plan of it with several submeshes.
        local: The graph of the local ops, which it places.
        machine: Durations of the local ops, and links.
        place: The device of each.
        dispatch: The turn of each in a run.
    """
    partition, cluster = plan.partition, plan.cluster
    assert partition is not None
    assert cluster is not None
    size, cut = partition.mesh.size, graph_in_pieces(graph, plan)
    made = partition_for_submeshes(cut, sharding_of(partition), partition.submeshes)
    row = rows_of(made, followers(local, first_overwrites(local)), place, len(cut.ops))
    order = np.argsort(turns_of(cut, made, dispatch))
    orders = [order[row[order] == each].tolist() for each in range(partition.submeshes)]
    first = np.unique(np.array(made.of), return_index=True)[1]
    links = part_of(cluster, range(0, cluster.num_devices, size), size).arrays
    columns = machine._replace(
        seconds=machine.seconds[:, first],
        device_class=machine.device_class[::size],
        latency=links.latency,
        bandwidth=links.bandwidth,
    )
    return OnSubmeshes(cut, row, orders, columns)
