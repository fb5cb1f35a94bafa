"""What one mesh position of a submesh does, as a graph that can be placed on its own.

Problem: algorithms that place whole ops should decide where each op of a cut step runs, but they
know nothing about cuts.
Idea: cut first, on one submesh. All positions do the same, so the ops of one position, a *column*,
stand for the submesh: the graph of the step, in which an op takes as long as its local op including
fetches and sums, and a tensor is as large as its largest shard. One device of each submesh runs it.
Any placement of the columns is a placement of all local ops.
Complexity: O(local ops + messages), beside the partitioning.
Deviations: messages inside the submesh are counted one after the other, with the op that needs
them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.gc_pause import collector_paused
from pardnn.graph.build import made_graph
from pardnn.graph.ir import Graph
from pardnn.planner.costs import partitioned_costs, scaled_costs
from pardnn.planner.kept_state import state_of_columns
from pardnn.planner.microbatches.best import TooManyPiecesError
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import OPTIMISM
from pardnn.planner.sharded.sharding_seconds import sharding_seconds
from pardnn.planner.submesh.submeshes import part_of
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import PositionedOps, partition_for_submeshes


class Columns(NamedTuple):
    """A step that is cut on each submesh, before it is placed.

    Attributes:
        made: The local ops.
        local: Their graph.
        costs: Of that graph.
        column: One position as a problem: a device for each submesh.
    """

    made: PositionedOps
    local: Graph
    costs: Costs
    column: Problem


def estimated_columns(inside: Problem, sharding: Sharding) -> float:
    """Return the seconds of all columns by a low estimate, before anything is partitioned.

    0 where there is none.

    Args:
        inside: The graph that is cut, on the devices of a submesh.
        sharding: Of that graph; see `legalize`.
    """
    if sharding.mesh.shares or inside.costs.source == "graph":
        return 0.0
    found = sharding_seconds(inside.graph, sharding, inside.cluster, inside.costs)
    estimated = OPTIMISM * sum(found)
    return max(found.computing, estimated) if math.isfinite(estimated) else 0.0


def check_computing(least: float, below: float) -> None:
    """Raise if each device computes for at least as long as a known plan takes.

    Args:
        least: Seconds of each device.
        below: Of the plan.
    """
    if least >= below:
        raise TooManyPiecesError(f"each device computes for {least:.4g} s")


@collector_paused()
def columns_of(problem: Problem, cut: Problem, sharding: Sharding) -> Columns:
    """Return what each position of a submesh does.

    Args:
        problem: The step.
        cut: The same with its batch in pieces; the same problem if it is whole.
        sharding: Of the graph of the pieces, over the mesh of a submesh; see `legalize`.
    """
    cluster, size = problem.cluster, sharding.mesh.size
    submeshes = cluster.num_devices // size
    made = partition_for_submeshes(cut.graph, sharding, submeshes)
    local = made_graph(problem.graph.name, made.partition.ops)
    if problem.costs.is_measured:
        costs = scaled_costs(cut.graph, cut.costs, local)
    else:
        costs = partitioned_costs(problem.graph, local, cluster, problem.costs)
    inside = part_of(cluster, range(size))
    of, position = np.array(made.of), np.array(made.position)
    links = _link_seconds(local, of, position, inside, len(cut.graph.ops))
    seconds = {
        kind: _largest(row, of, position, len(cut.graph.ops)) + links
        for kind, row in costs.seconds.items()
    }
    graph = _column_graph(cut.graph, local, of, position)
    devices = part_of(cluster, range(0, cluster.num_devices, size), size)
    column = dataclasses.replace(
        cut,
        graph=graph,
        cluster=devices,
        costs=Costs(seconds=seconds, source=costs.source),
        cut=None if cut.cut is None else dataclasses.replace(cut.cut, cut=graph),
        state=cut.state and state_of_columns(cut.graph, cut.state, size),
    )
    return Columns(made, local, costs, column)


def _largest(
    values: Float64[ndarray, " m"], of: ndarray, position: ndarray, count: int
) -> Float64[ndarray, " n"]:
    """Return, per op, the total over its local ops at the position where it is largest."""
    return np.max(
        [
            np.bincount(of[position == each], values[position == each], minlength=count)
            for each in range(int(position.max()) + 1)
        ],
        axis=0,
    )


def _link_seconds(
    local: Graph, of: ndarray, position: ndarray, inside: Cluster, count: int
) -> Float64[ndarray, " n"]:
    """Return, by op, the seconds of the slowest position's messages from others."""
    a, links = local.arrays, inside.arrays
    reader = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    tensor = a.input_tensor
    source, target = position[a.tensor_op[tensor]], position[reader]
    seconds = (
        links.latency[source, target] + a.tensor_bytes[tensor] / links.bandwidth[source, target]
    )
    is_sent = source != target
    return _largest(np.where(is_sent, seconds, 0.0), of[reader], target, count)


def _column_graph(graph: Graph, local: Graph, of: ndarray, position: ndarray) -> Graph:
    """Return the graph of a position: tensors and workspaces are as large as the largest."""
    largest: dict[str, int] = {}
    extra = np.zeros(len(local.ops))
    known = {tensor.name for op in graph.ops for tensor in op.outputs}
    for i, op in enumerate(local.ops):
        extra[i] = op.workspace
        for tensor in op.outputs:
            name = tensor.name.rpartition("@")[0]
            if name in known:
                largest[name] = max(largest.get(name, 0), tensor.bytes)
            elif tensor.alias_of is None:
                extra[i] += tensor.bytes
    workspace = _largest(extra, of, position, len(graph.ops)).tolist()
    return made_graph(
        graph.name,
        [
            dataclasses.replace(
                op,
                workspace=int(workspace[i]),
                outputs=tuple(
                    dataclasses.replace(t, bytes=largest.get(t.name, t.bytes)) for t in op.outputs
                ),
            )
            for i, op in enumerate(graph.ops)
        ],
    )
