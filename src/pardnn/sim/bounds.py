"""Lower bounds on the makespan: certificates that no plan beats.

- *Heads and tails*: the time before an op starts and after it ends, at least. What an op reads is
  made on its device, one op after the other, or arrives later by the fastest link; the cheapest
  split of its inputs into these two kinds bounds its start. Tails are the same, backwards. Where
  two ops cannot share a device, for its type or for the residual bytes of their groups, the message
  is certain. (After Fernandez, Bussell, "Bounds on the number of processors and time for
  multiprocessor optimal schedules", IEEE Trans. Computers 1973.)
- *Intervals*: ops with a head of at least r and a tail of at least q do all their work in between,
  spread over all devices: r + work / devices + q, for `GRID` values of r and of q.
- *Cuts*: an op that comes before or after each other op splits the step in two, and the bounds of
  the parts add up.

O(ops + edges log fan-in), plus 2 `GRID` ** 2.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.sim.levels import bottom_levels, top_levels
from pardnn.sim.machine import Machine, fastest_seconds
from pardnn.sim.peak import residual_bytes

#: Values of heads and of tails between which intervals are tried.
GRID = 64
#: Splits of the inputs of an op that are tried; the last one bounds the others.
MAX_SPLITS = 16
#: Ops above which messages are left out of heads and tails: 0.5 s at 200,000 ops, measured.
MANY_OPS = 200_000
#: Sums of parts may round up, which is taken off.
ROUNDING = 1e-12


def critical_path_seconds(arrays: GraphArrays, machine: Machine) -> float:
    """Return the longest path, every op at its fastest and communication free."""
    return float(bottom_levels(arrays, _without_links(machine)).max())


def work_seconds(machine: Machine) -> float:
    """Return the time of the whole work spread perfectly over all devices.

    Shares of it, see `work_shares`, add up.
    """
    return float(work_shares(machine).sum(axis=1).max())


def work_shares(machine: Machine) -> Float64[ndarray, "w n"]:
    """Return what each op adds to the least time of any set of ops, in seconds, for two weightings.

    Any weights x over the devices with sum 1 bound the time of a set by the sum over its ops of the
    minimum over devices of x * seconds (duality of the linear program that splits ops freely).
    Taken are equal weights and weights by speed; for devices that differ only in speed, the latter
    give work / sum of speeds.
    """
    per_class = np.bincount(machine.device_class, minlength=len(machine.seconds))
    total = np.where(np.isfinite(machine.seconds), machine.seconds, 0.0).sum(axis=1)
    speed = 1.0 / np.where(total > 1e-300, total, 1.0)  # of less the inverse is not finite
    return np.array(
        [
            (weight[:, None] * machine.seconds).min(axis=0) / (weight @ per_class)
            for weight in (np.ones_like(speed), speed)
        ]
    )


def lower_bound_seconds(
    arrays: GraphArrays, machine: Machine, capacities: Sequence[int | None] | None = None
) -> float:
    """Return seconds that no plan is faster than; see the module's docstring.

    Args:
        arrays: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device, None for unlimited ones; None: all unlimited.
    """
    shares = work_shares(machine)
    if arrays.num_ops <= MANY_OPS:
        head, tail = heads_and_tails(arrays, machine, capacities)
    else:
        head = top_levels(arrays, _without_links(machine))
        tail = bottom_levels(arrays, _without_links(machine)) - fastest_seconds(machine)
    bounds = [
        float((head + fastest_seconds(machine) + tail).max()),
        *(interval_seconds(head, tail, share) for share in shares),
        *(cut_seconds(arrays, machine, share) for share in shares),
    ]
    simple = max(critical_path_seconds(arrays, machine), work_seconds(machine))
    return max(simple, max(bounds) * (1 - ROUNDING))


def heads_and_tails(
    arrays: GraphArrays, machine: Machine, capacities: Sequence[int | None] | None = None
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return the seconds that pass before each op starts, and after it ends, in every plan.

    Args:
        arrays: The graph.
        machine: Durations and links.
        capacities: As in `lower_bound_seconds`.
    """
    n, k = arrays.num_ops, machine.num_devices
    apart = ~np.eye(k, dtype=bool)
    latency = float(machine.latency[apart].min(initial=np.inf))
    per_byte = float(1.0 / machine.bandwidth[apart].max(initial=0.0)) if k > 1 else np.inf
    consumer = np.repeat(np.arange(n), np.diff(arrays.input_ptr))
    producer = arrays.tensor_op[arrays.input_tensor]
    forced = np.zeros(len(consumer), dtype=np.bool_)
    if k > 1:
        forced = _apart(arrays, machine, capacities, producer, consumer)
    comm = np.full(len(consumer), np.inf)
    if k > 1:
        comm = latency + arrays.tensor_bytes[arrays.input_tensor] * per_byte
    by_producer = np.argsort(producer, kind="stable").astype(np.int64)
    out_ptr = np.concatenate([[0], np.cumsum(np.bincount(producer, minlength=n))]).astype(np.int64)
    seconds = fastest_seconds(machine)
    head, tail = np.zeros(n), np.zeros(n)
    topological = arrays.topological.copy()
    _heads_kernel(
        topological, arrays.input_ptr.copy(), producer, comm, forced, arrays.after_ptr.copy(),
        arrays.after_op.copy(), seconds, head,
    )  # fmt: skip
    _heads_kernel(
        topological[::-1].copy(), out_ptr, consumer[by_producer], comm[by_producer],
        forced[by_producer], arrays.before_ptr.copy(), arrays.before_op.copy(), seconds, tail,
    )  # fmt: skip
    return head, tail


def _apart(
    arrays: GraphArrays,
    machine: Machine,
    capacities: Sequence[int | None] | None,
    producer: Int64[ndarray, " e"],
    consumer: Int64[ndarray, " e"],
) -> Bool[ndarray, " e"]:
    """Whether no device can run both ends of an edge and hold the residual bytes of both."""
    limits = [None] * machine.num_devices if capacities is None else list(capacities)
    num_groups = int(arrays.group.max()) + 1
    residual = residual_bytes(arrays)
    one, other = arrays.group[producer], arrays.group[consumer]
    both = residual[one] + residual[other]
    shared = one == other
    kinds = {
        (int(row), None if limit is None else int(limit))
        for row, limit in zip(machine.device_class, limits, strict=True)
    }
    for row, limit in sorted(kinds, key=str):
        runs = np.ones(num_groups, dtype=bool)
        runs[arrays.group[~np.isfinite(machine.seconds[row])]] = False
        together = runs[one] & runs[other]
        if limit is not None:
            together &= both <= limit
        shared |= together
    return ~shared


def interval_seconds(
    head: Float64[ndarray, " n"], tail: Float64[ndarray, " n"], share: Float64[ndarray, " n"]
) -> float:
    """Return the largest r + work / devices + q, r and q among `GRID` quantiles of head and tail.

    Args:
        head: Seconds before each op, at least.
        tail: Seconds after each op, at least.
        share: A row of `work_shares`.
    """
    at = (np.arange(GRID) * len(head)) // GRID
    r, q = (np.unique(np.concatenate([[0.0], np.sort(side)[at]])) for side in (head, tail))
    # An op counts for every r up to its head: its cell, then sums from above.
    cell = (np.searchsorted(r, head, side="right") - 1) * len(q)
    cell += np.searchsorted(q, tail, side="right") - 1
    work = np.bincount(cell, weights=share, minlength=len(r) * len(q)).reshape(len(r), len(q))
    work = work[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    return float(np.where(work > 0, r[:, None] + q[None, :] + work, 0.0).max())


def cut_seconds(arrays: GraphArrays, machine: Machine, share: Float64[ndarray, " n"]) -> float:
    """Return the sum, over the parts between ops that cut the graph, of the bounds of the parts.

    Args:
        arrays: The graph.
        machine: Durations and links.
        share: A row of `work_shares`.
    """
    n = arrays.num_ops
    cuts = np.zeros(n, dtype=np.bool_)
    before = np.zeros(n, dtype=np.int64)
    _cuts_kernel(arrays, cuts, before)
    count = int(cuts.sum())
    if count == 0:
        return 0.0
    inside = ~cuts
    work = np.bincount(before[inside], weights=share[inside], minlength=count + 1)
    seconds = fastest_seconds(machine)
    path = np.zeros(count + 1)
    _parts_kernel(arrays, inside, before, seconds, np.zeros(n), path)
    return float(np.maximum(path, work).sum() + seconds[cuts].sum())


def _without_links(machine: Machine) -> Machine:
    return machine._replace(
        latency=np.zeros_like(machine.latency),
        bandwidth=np.full_like(machine.bandwidth, np.inf),
    )


def degree_of_parallelism(arrays: GraphArrays, machine: Machine) -> float:
    """Return total work / work on the compute-only critical path (thesis, Fig. 6.1)."""
    path = critical_path_seconds(arrays, machine)
    return float(fastest_seconds(machine).sum()) / path if path > 0 else 1.0


@kernel
def _heads_kernel(
    topological: Int64[ndarray, " n"],
    ptr: Int64[ndarray, " p"],
    predecessor: Int64[ndarray, " e"],
    comm: Float64[ndarray, " e"],
    forced: Bool[ndarray, " e"],
    after_ptr: Int64[ndarray, " p"],
    after_op: Int64[ndarray, " a"],
    seconds: Float64[ndarray, " n"],
    head: Float64[ndarray, " n"],
) -> None:
    """Bound the starts of ops; with the graph reversed, how long the step goes on after them."""
    key, item = np.empty(len(predecessor) + 1), np.empty(len(predecessor) + 1, dtype=np.int64)
    mine = np.empty(MAX_SPLITS + 1, dtype=np.int64)
    for op in topological:
        least, ready = 0.0, np.int64(0)
        for i in range(after_ptr[op], after_ptr[op + 1]):
            least = max(least, head[after_op[i]] + seconds[after_op[i]])
        for i in range(ptr[op], ptr[op + 1]):
            done = head[predecessor[i]] + seconds[predecessor[i]]
            ready = heap_push(key, item, ready, -(done + comm[i]), predecessor[i])
            least = max(least, done + comm[i] if forced[i] else done)
        head[op] = least
        if ready < 2:
            continue
        # The inputs that would arrive last are made here, one after the other, the others not.
        best, split, made = np.inf, 0, np.int64(0)
        while True:
            rest = -key[0] if ready > 0 else 0.0
            local = 0.0
            for i in range(made):
                local = max(local, head[mine[i]]) + seconds[mine[i]]
            best = min(best, max(local, rest))
            if ready == 0 or local >= best or split == MAX_SPLITS:
                break
            split += 1
            made = _insert(mine, made, item[0], head)
            ready = heap_pop(key, item, ready)
        if split == MAX_SPLITS and ready > 0:
            # All further splits have at least this local work.
            best = min(best, local)
        head[op] = max(least, best)


@helper
def _insert(
    mine: Int64[ndarray, " s"], made: int, producer: int, head: Float64[ndarray, " n"]
) -> int:
    """Put a producer, unless it is there, among others sorted by head; return their number."""
    for i in range(made):
        if mine[i] == producer:
            return made
    at = made
    while at > 0 and head[mine[at - 1]] > head[producer]:
        mine[at] = mine[at - 1]
        at -= 1
    mine[at] = producer
    return made + 1


@kernel
def _cuts_kernel(a: GraphArrays, cuts: Bool[ndarray, " n"], before: Int64[ndarray, " n"]) -> None:
    """Mark the ops that come before or after each other op.

    `before` counts the marked ops that come before an op.
    """
    n = len(cuts)
    alone = np.zeros((2, n), dtype=np.bool_)
    order = np.empty((2, n), dtype=np.int64)
    missing = np.zeros((2, n), dtype=np.int64)
    for op in range(n):
        missing[0, op] = a.input_ptr[op + 1] - a.input_ptr[op]
        missing[0, op] += a.after_ptr[op + 1] - a.after_ptr[op]
        missing[1, op] = a.consumer_ptr[a.output_ptr[op + 1]] - a.consumer_ptr[a.output_ptr[op]]
        missing[1, op] += a.before_ptr[op + 1] - a.before_ptr[op]
    for direction in range(2):
        ready = 0
        for op in range(n):
            if missing[direction, op] == 0:
                order[direction, ready] = op
                ready += 1
        for at in range(n):
            op = order[direction, at]
            alone[direction, op] = ready == at + 1
            if direction == 0:
                begin, end = a.consumer_ptr[a.output_ptr[op]], a.consumer_ptr[a.output_ptr[op + 1]]
                near, far = a.consumer_op[begin:end], a.before_op
                rest = (a.before_ptr[op], a.before_ptr[op + 1])
            else:
                near = a.tensor_op[a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]]]
                far, rest = a.after_op, (a.after_ptr[op], a.after_ptr[op + 1])
            for i in range(len(near) + rest[1] - rest[0]):
                other = near[i] if i < len(near) else far[rest[0] + i - len(near)]
                missing[direction, other] -= 1
                if missing[direction, other] == 0:
                    order[direction, ready] = other
                    ready += 1
    # Alone at position p, an op comes before all that are not ready: n - 1 - p of them.
    position = np.empty(n, dtype=np.int64)
    for at in range(n):
        position[order[0, at]] = at
    for at in range(n):
        op = order[1, at]
        cuts[op] = alone[0, op] and alone[1, op] and position[op] + at == n - 1
    count = 0
    for op in order[0]:
        before[op] = count
        if cuts[op]:
            count += 1


@kernel
def _parts_kernel(
    a: GraphArrays,
    inside: Bool[ndarray, " n"],
    part: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    top: Float64[ndarray, " n"],
    path: Float64[ndarray, " c"],
) -> None:
    """Find the longest path of each part; edges between parts lead through a cut."""
    for op in a.topological:
        if not inside[op]:
            continue
        for i in range(a.input_ptr[op], a.input_ptr[op + 1]):
            predecessor = a.tensor_op[a.input_tensor[i]]
            if inside[predecessor] and part[predecessor] == part[op]:
                top[op] = max(top[op], top[predecessor] + seconds[predecessor])
        for i in range(a.after_ptr[op], a.after_ptr[op + 1]):
            predecessor = a.after_op[i]
            if inside[predecessor] and part[predecessor] == part[op]:
                top[op] = max(top[op], top[predecessor] + seconds[predecessor])
        path[part[op]] = max(path[part[op]], top[op] + seconds[op])
