"""METIS: K balanced parts of the graph with little communication between them.

Vertices are groups, weighted by the seconds of their ops; edges are weighted by the seconds of
their tensors on the slowest link; a device's share follows from its speed on the ops that it can
run. The parts, whose numbering is arbitrary, are then assigned to devices so that those that
communicate most share the fastest links, by pairwise exchanges until none helps. METIS considers
neither order nor memory.

Reference: Karypis, Kumar, "A fast and high quality multilevel scheme for partitioning irregular
graphs", SIAM J. Scientific Computing 1998. Runs in a child process; its answer is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, op_edges
from pardnn.graph.ir import Graph
from pardnn.place.baselines.m_sct import edge_seconds
from pardnn.place.colocation import closed_arrays, legal_placement, runnable, speed_shares
from pardnn.place.decision import Decision, fitted
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import Machine, fastest_seconds
from pardnn.solvers import ask, numbers

METIS_SECONDS = 600.0
#: METIS counts in 32-bit integers; the sum of all weights must fit.
TOTAL_WEIGHT = 10**9
#: Exchanges of parts are tried for at most so many rounds.
ROUNDS = 20


def place_metis(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place by METIS.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Of METIS.

    Raises:
        UsageError: E219, if pymetis is not installed.
        InfeasibleError: E301, if this placement does not fit; E302, if an op can run nowhere.
        StuckError: E709, if METIS does not answer in time.
    """
    arrays = closed_arrays(graph)
    k = machine.num_devices
    num_groups = int(arrays.group.max()) + 1
    part = np.zeros(num_groups, dtype=np.int64)
    if 1 < k < num_groups:
        problem = _problem(arrays, machine, seed)
        part = _checked(ask("parts", problem, seconds=METIS_SECONDS, extra="metis"), problem)
    elif k > 1:
        part = np.arange(num_groups) % k
    target = assigned(arrays, machine, part)[arrays.group]
    place = legal_placement(arrays, runnable(arrays, machine), target)
    return fitted(graph, machine, place, capacities)


def _problem(arrays: GraphArrays, machine: Machine, seed: int) -> dict[str, Any]:
    pairs = op_edges(arrays)
    cost = edge_seconds(arrays, pairs, slowest_link(machine))
    g = int(arrays.group.max()) + 1
    one, other = arrays.group[pairs].T
    apart = one != other
    keys = np.minimum(one, other)[apart] * g + np.maximum(one, other)[apart]
    unique, index = np.unique(keys, return_inverse=True)
    weight = _integers(np.bincount(index, weights=cost[apart], minlength=len(unique)))
    one = np.concatenate([unique // g, unique % g])
    other = np.concatenate([unique % g, unique // g])
    by_vertex = np.lexsort((other, one))
    work = np.bincount(arrays.group, weights=fastest_seconds(machine), minlength=g)
    return {
        "start": np.cumsum([0, *np.bincount(one, minlength=g)]).tolist(),
        "index": other[by_vertex].tolist(),
        "edge_weight": np.concatenate([weight, weight])[by_vertex].tolist(),
        "vertex_weight": _integers(work).tolist(),
        "share": speed_shares(machine).tolist(),
        "seed": seed % 2**31,
    }


def _integers(seconds: Float64[ndarray, " v"]) -> Int64[ndarray, " v"]:
    scale = TOTAL_WEIGHT / 2 / max(float(seconds.sum()), 1e-200)
    return np.maximum(np.floor(seconds * scale), 1).astype(np.int64)


def _checked(answer: dict[str, Any], problem: dict[str, Any]) -> Int64[ndarray, " g"]:
    found = numbers("parts", answer, "part", len(problem["start"]) - 1, len(problem["share"]))
    return np.array(found, dtype=np.int64)


def assigned(
    arrays: GraphArrays, machine: Machine, part: Int64[ndarray, " g"]
) -> Int64[ndarray, " g"]:
    """Return the device of each group; parts are exchanged while that makes their messages cheaper.

    Parts are exchanged between devices of one class only: their sizes are shares of the class.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        part: Part of each group, below K.
    """
    k = machine.num_devices
    of = part[arrays.group]
    consumer = np.repeat(np.arange(arrays.num_ops), np.diff(arrays.input_ptr))
    keys = np.unique(arrays.input_tensor * k + of[consumer])
    tensor, target = keys // k, keys % k
    source = of[arrays.tensor_op[tensor]]
    count, size = np.zeros((k, k)), np.zeros((k, k))
    np.add.at(count, (source, target), 1.0)
    np.add.at(size, (source, target), arrays.tensor_bytes[tensor])
    np.fill_diagonal(count, 0.0)
    np.fill_diagonal(size, 0.0)
    # A pair without a link counts as a very slow one.
    latency = np.where(np.isfinite(machine.latency), machine.latency, 1e6)

    def cost(device: Int64[ndarray, " k"]) -> float:
        links = np.ix_(device, device)
        return float((count * latency[links] + size / machine.bandwidth[links]).sum())

    device = np.arange(k)
    least = cost(device)
    for _ in range(ROUNDS):
        before = least
        for p in range(k):
            for q in range(p):
                if machine.device_class[device[p]] != machine.device_class[device[q]]:
                    continue
                device[[p, q]] = device[[q, p]]
                now = cost(device)
                if now < least:
                    least = now
                else:
                    device[[p, q]] = device[[q, p]]
        if least == before:
            break
    return device[part]
