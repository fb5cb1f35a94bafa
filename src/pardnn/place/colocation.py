"""Co-location groups: ops that no placement may split.

These are the groups of the graph, joined with what in-place writes require: the op that owns a
written storage, every op that makes an alias of it, and every op that writes it. Union-find, O(ops
+ tensors) up to the inverse Ackermann function.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.jit import helper, kernel
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.sim.machine import Machine, fastest_seconds


def colocated(
    arrays: GraphArrays, overwrites: Int64[ndarray, "w 2"], *, with_views: bool = False
) -> Int64[ndarray, " n"]:
    """Return a dense group number per op, numbered by first member.

    Args:
        arrays: The graph.
        overwrites: From `place.schedule.first_overwrites`.
        with_views: Also join the views of storages that nothing writes, so that each storage is
            on one device, sent copies aside.
    """
    root = np.arange(arrays.num_ops)
    _union_kernel(arrays, overwrites, with_views, root)
    numbers = np.empty(arrays.num_ops, dtype=np.int64)
    number_kernel(root, numbers)
    return numbers


@helper
def find(root: Int64[ndarray, " n"], op: int) -> int:
    """Return the representative of the ops that an op was joined with; shortens paths.

    Args:
        root: Of each op, an op nearer to its representative.
        op: The op.
    """
    while root[op] != op:
        root[op] = root[root[op]]
        op = root[op]
    return op


@kernel
def _union_kernel(
    a: GraphArrays, overwrites: Int64[ndarray, "w 2"], with_views: bool, root: Int64[ndarray, " n"]
) -> None:
    n = len(root)
    first = np.full(n, -1, dtype=np.int64)
    for op in range(n):
        group = a.group[op]
        if first[group] < 0:
            first[group] = op
        root[find(root, op)] = find(root, first[group])
    written = np.zeros(len(a.tensor_op), dtype=np.bool_)
    for i in range(len(overwrites)):
        written[overwrites[i, 0]] = True
        root[find(root, overwrites[i, 1])] = find(root, a.tensor_op[overwrites[i, 0]])
    for t in range(len(a.tensor_op)):
        owner = a.tensor_owner[t]
        if owner != t and (with_views or written[owner]):
            root[find(root, a.tensor_op[t])] = find(root, a.tensor_op[owner])


@kernel
def number_kernel(root: Int64[ndarray, " n"], numbers: Int64[ndarray, " n"]) -> int:
    """Number the joined sets by their first members; return how many there are.

    Args:
        root: As in `find`.
        numbers: Written: of each op, from 0 on.
    """
    number_of = np.full(len(root), -1, dtype=np.int64)
    count = 0
    for op in range(len(root)):
        top = find(root, op)
        if number_of[top] < 0:
            number_of[top] = count
            count += 1
        numbers[op] = number_of[top]
    return count


def closed_arrays(graph: Graph) -> GraphArrays:
    """Return the graph's arrays, groups joined with what in-place writes hold together."""
    group = colocated(graph.arrays, first_overwrites(graph))
    group.setflags(write=False)
    return graph.arrays._replace(group=group)


def runnable(arrays: GraphArrays, machine: Machine) -> Bool[ndarray, "g k"]:
    """Return whether every op of a group can run on a device.

    Raises:
        InfeasibleError: E302, if a group can run nowhere.
    """
    num_groups = int(arrays.group.max()) + 1
    runs = np.ones((num_groups, machine.num_devices), dtype=bool)
    for device, row in enumerate(machine.device_class):
        runs[arrays.group[~np.isfinite(machine.seconds[row])], device] = False
    nowhere = np.all(~runs, axis=1)
    if np.any(nowhere):
        op = int(np.flatnonzero(nowhere[arrays.group])[0])
        raise InfeasibleError(
            f"op number {op} cannot run on any device of the cluster, alone or with its group.\n"
            "Add a device of the type that its `seconds` name.",
            code="E302",
            details={"op": op},
        )
    return runs


def speed_shares(machine: Machine) -> Float64[ndarray, " k"]:
    """Return the fraction of the work that each device should do; they sum to 1.

    It follows from its speed on the ops that it can run, and from their fraction of the work: a CPU
    that only runs what no accelerator can gets little.
    """
    fastest = fastest_seconds(machine)
    can = np.isfinite(machine.seconds)
    work = np.where(can, fastest, 0.0).sum(axis=1)
    spent = np.where(can, machine.seconds, 0.0).sum(axis=1)
    rate = np.where(spent > 0, work, 1.0) ** 2 / np.where(spent > 0, spent, 1.0)
    share = rate[machine.device_class]
    return share / share.sum() if share.sum() > 0 else np.full(len(share), 1.0 / len(share))


def next_runnable(runs: Bool[ndarray, "g k"], target: Int64[ndarray, " g"]) -> Int64[ndarray, " g"]:
    """Return the target device of each group, or the next one, cyclically, that can run it.

    Args:
        runs: Whether a device can run a group.
        target: Device of each group.
    """
    k = runs.shape[1]
    circle = (target[:, None] + np.arange(k)[None, :]) % k
    able = np.take_along_axis(runs, circle, axis=1)
    return np.take_along_axis(circle, able.argmax(axis=1)[:, None], axis=1)[:, 0]


def legal_placement(
    arrays: GraphArrays,
    runs: Bool[ndarray, "g k"],
    target: Int64[ndarray, " n"],
    order: Int64[ndarray, " n"] | None = None,
) -> Int64[ndarray, " n"]:
    """Return the placement nearest to a target: groups are together, each where it can run.

    Each group goes to the target device of its first op, or to the next device that can run it.

    Args:
        arrays: The graph, with closed groups.
        runs: From `runnable`.
        target: Device of each op.
        order: Of the ops, which decides the first op of a group; None for the topological order.
    """
    backwards = (arrays.topological if order is None else order)[::-1]
    chosen = np.empty(len(runs), dtype=np.int64)
    chosen[arrays.group[backwards]] = target[backwards]
    return next_runnable(runs, chosen)[arrays.group]
