"""Contiguous blocks of layers, one block per device: what `device_map="auto"` does.

Ops in topological order are cut into K blocks, whose work is in proportion to the speed of the
devices, or, if devices have memory limits, whose memory is in proportion to those. A backward op
stays with its forward op, and groups stay together, so that forward, backward and update of a layer
share a device. Neighbouring blocks are on devices with consecutive numbers, hence on one island of
fast links if the cluster lists its islands one after the other. All pieces of a batch go where the
first one does: a stage runs all of them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, legal_placement, runnable, speed_shares
from pardnn.place.decision import Decision, fitted
from pardnn.plan.pieces import first_piece, piece_number
from pardnn.sim.machine import Machine, fastest_seconds


def place_contiguous(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Cut the ops into K contiguous blocks.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit; E302, if an op can run nowhere.
    """
    del seed
    arrays = closed_arrays(graph)
    runs = runnable(arrays, machine)
    leader = _forward_ops(graph)
    limits = [size for size in capacities if size is not None]
    if len(limits) == len(capacities):
        weight = _owned_bytes(graph)
        share = np.array(limits, dtype=np.float64)
    else:
        weight = fastest_seconds(machine)
        share = speed_shares(machine)
    gathered = np.bincount(leader, weights=weight, minlength=len(weight))[arrays.topological]
    middle = np.cumsum(gathered) - gathered / 2
    ends = np.cumsum(share) / (share.sum() or 1.0) * max(gathered.sum(), 1e-300)
    target = np.empty(len(graph.ops), dtype=np.int64)
    target[arrays.topological] = np.searchsorted(ends[:-1], middle, side="right")
    place = legal_placement(arrays, runs, target[leader])
    return fitted(graph, machine, place, capacities)


def _forward_ops(graph: Graph) -> Int64[ndarray, " n"]:
    """Number of the forward op that each op belongs to; its own if it is none's backward.

    Of the first piece, if the batch is in pieces.
    """
    leader = np.arange(len(graph.ops))
    followed = {
        i: op.backward_of or op.name
        for i, op in enumerate(graph.ops)
        if op.backward_of or piece_number(op.name) >= 0
    }
    number = {op.name: i for i, op in enumerate(graph.ops)} if followed else {}
    for i, name in followed.items():
        leader[i] = number.get(first_piece(name), number.get(name, i))
    return leader


def _owned_bytes(graph: Graph) -> Float64[ndarray, " n"]:
    arrays = graph.arrays
    owned = np.where(arrays.tensor_alias < 0, arrays.tensor_bytes, 0).astype(np.float64)
    return np.bincount(arrays.tensor_op, weights=owned, minlength=arrays.num_ops)
