"""m-TOPO: fill one device after the other, in topological order.

Each device takes ops until it holds total bytes / K + the largest op; an op goes to the device of
its group if that is placed already. Bytes of an op are those of the storages that it owns, and its
workspace. O(ops + groups K).

Reference: Jeon, Cai, Srivastava, Jiang, Ke, Meng, Cong, Gupta, "Baechi: fast device placement of
machine learning graphs", SoCC 2020.

Deviations: an op that the current device cannot run goes to the next one that can.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.sim.machine import Machine


def place_m_topo(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place by m-TOPO.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit.
    """
    del seed
    return fitted(graph, machine, filled(closed_arrays(graph), machine), capacities)


def op_bytes(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return the bytes of the storages that each op owns, and of its workspace."""
    owned = np.where(arrays.tensor_alias < 0, arrays.tensor_bytes, 0)
    total = arrays.workspace.copy()
    np.add.at(total, arrays.tensor_op, owned)
    return total


def filled(arrays: GraphArrays, machine: Machine) -> Int64[ndarray, " n"]:
    """Return the placement; `arrays` with closed groups."""
    k = machine.num_devices
    runs = runnable(arrays, machine)
    size = np.zeros(len(runs), dtype=np.int64)
    np.add.at(size, arrays.group, op_bytes(arrays))
    cap = int(size.sum()) // k + int(size.max())
    where = np.full(len(size), -1, dtype=np.int64)
    filled_bytes = [0] * k
    device = 0
    for op in arrays.topological.tolist():
        group = arrays.group[op]
        if where[group] >= 0:
            continue
        while device < k - 1 and filled_bytes[device] + size[group] > cap:
            device += 1
        turns = [(device + i) % k for i in range(k)]
        where[group] = next(d for d in turns if runs[group, d])
        filled_bytes[where[group]] += int(size[group])
    return where[arrays.group]
