"""Components of ops that exchange much data: they are placed as a whole, before single ops.

Over a slow link an op can seldom move alone. In a network with many classes, the product, loss and
update of the last layer share tensors that take longer to send than to compute: each of them alone
is worse elsewhere, all together are better. So ops connected by edges above a threshold of bytes
form a component. From few large components to many small ones, each is tried as a whole on every
device, along one global order, and stays where the step is shortest.

This is the coarsening by heavy edges and the refinement at every level of multilevel partitioning
(Karypis, Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", SIAM
J. Scientific Computing 1998), with two deviations: a level is a threshold of bytes, not a matching,
and refinement reduces the time of the step, not the cut.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import transposed
from pardnn.kernels.jit import helper, kernel
from pardnn.place.colocation import find, number_kernel
from pardnn.place.polish.blocks import may_go, residual
from pardnn.place.polish.neighbourhood import State, Task, fill_kernel

#: Components of a level that are tried, those of the most work.
MOST_TRIED = 64
#: Passes over the components of a level, at most; one that changes nothing is the last.
PASSES = 3
#: By how much more than a limit a bound has to be: it is a sum in another order.
ROUNDING = 1e-9
#: Thresholds grow by this factor from one level to the next.
STEP = 4.0


def levels(t: Task) -> Iterator[Int64[ndarray, " n"]]:
    """Yield the component of each op, level by level, the fewest components first.

    Components that compute for less time than a message takes join the one that they exchange most
    with, so scalars and small weights cause no messages of their own.

    Args:
        t: What stays as it is.
    """
    sizes = t.in_bytes[t.in_bytes > 0]
    least, most = (sizes.min(), sizes.max()) if len(sizes) else (1.0, 0.0)
    before, edges = 1, _by_bytes(t)
    while least <= most:
        component = np.empty(len(t.group), dtype=np.int64)
        number, _ = _attached(t, edges, component, connect_kernel(t, float(least), component))
        if number > before:
            yield component
        before, least = number, least * STEP


def with_heavy_ones(t: Task, place: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return a placement with light components on the device that they exchange most with.

    Args:
        t: What stays as it is.
        place: Device of each op.
    """
    component = t.group.copy()
    number, heaviest = _attached(t, _by_bytes(t), component, len(t.member_ptr) - 1)
    device = np.full(number, -1, dtype=np.int64)
    device[component[heaviest]] = place[heaviest]
    return np.where(device[component] < 0, place, device[component])


def _by_bytes(t: Task) -> tuple[Int64[ndarray, " e"], Int64[ndarray, " e"]]:
    """Return the reader and the source of each edge, those with most bytes first."""
    # Of equal edges those first whose tensor few ops read: all of them read the learning rate.
    order = np.lexsort((np.diff(t.out_ptr)[t.in_op], -t.in_bytes))
    reader = np.repeat(np.arange(len(t.group)), np.diff(t.in_ptr))
    return reader[order], t.in_op[order]


def _attached(
    t: Task,
    edges: tuple[Int64[ndarray, " e"], Int64[ndarray, " e"]],
    component: Int64[ndarray, " n"],
    number: int,
) -> tuple[int, Int64[ndarray, " heavy"]]:
    """Join light components to others; return how many there are now, and ops of heavy ones."""
    work = np.bincount(component, weights=t.seconds[0], minlength=number)
    is_heavy = work > t.latency.max()
    heavy = np.flatnonzero(is_heavy[component])
    return attach_kernel(is_heavy, *edges, component), heavy


@kernel
def attach_kernel(
    is_heavy: Bool[ndarray, " c"],
    reader: Int64[ndarray, " e"],
    source: Int64[ndarray, " e"],
    component: Int64[ndarray, " n"],
) -> int:
    """Join components along edges, in turn, unless both are heavy; return how many remain.

    Args:
        is_heavy: Of each component; updated when components join.
        reader: Op at the end of each edge.
        source: Op at the beginning of each edge.
        component: Of each op; written.
    """
    root = np.arange(len(is_heavy))
    for edge in range(len(reader)):
        one = find(root, component[reader[edge]])
        other = find(root, component[source[edge]])
        if one != other and not (is_heavy[one] and is_heavy[other]):
            root[one] = other
            is_heavy[other] = is_heavy[one] or is_heavy[other]
    numbers = np.empty(len(root), dtype=np.int64)
    number = number_kernel(root, numbers)
    for op in range(len(component)):
        component[op] = numbers[component[op]]
    return number


@kernel
def connect_kernel(t: Task, least: float, component: Int64[ndarray, " n"]) -> int:
    """Number the sets that groups and edges of `least` bytes or more connect; return how many.

    Args:
        t: What stays as it is.
        least: Bytes.
        component: Written: of each op, from 0 on.
    """
    n = len(component)
    root = np.arange(n)
    for op in range(n):
        group = t.group[op]
        root[find(root, op)] = find(root, t.member[t.member_ptr[group]])
        for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
            if t.in_bytes[edge] >= least:
                root[find(root, t.in_op[edge])] = find(root, op)
    return number_kernel(root, component)


def refine(
    t: Task, s: State, component: Int64[ndarray, " n"], max_work: int, is_serial: bool = False
) -> int:
    """Put components on the devices where the step is shortest, each in turn; return the work.

    Args:
        t: What stays as it is.
        s: The plan, filled; left filled.
        component: Of each op.
        max_work: Ops whose times may be computed; the last move may exceed it.
        is_serial: Whether a link carries one message at a time.
    """
    number = int(component.max()) + 1
    seconds = np.bincount(component, weights=t.seconds[0], minlength=number)
    ptr, member = transposed(np.arange(len(component) + 1), component, number)
    largest = np.argsort(-seconds, kind="stable")[:MOST_TRIED]
    return refine_kernel(t, s, ptr, member, largest, max_work, is_serial)


@helper
def _simulated(
    t: Task,
    s: State,
    is_serial: bool,
    arrived: Float64[ndarray, "n k"],
    free: Float64[ndarray, "k k"],
    rest: Float64[ndarray, " n"],
    limit: float,
) -> float:
    """Return the makespan along the order, or any time from a limit on.

    It ends once what is left of a device's ops, or of a path (`rest`), is sure to exceed the limit.

    The results of an op leave for each device as one message of its largest tensor; if links are
    serial, one after the other as ops end.
    """
    s.last[:] = -1
    free[:] = 0.0
    s.ready[:] = -1.0
    end = 0.0
    for d in range(len(s.follow)):
        s.follow[d] = t.after[d]
    for op in s.order:
        s.follow[s.place[op]] += t.seconds[t.device_class[s.place[op]], op]
    most = limit * (1 + ROUNDING)
    for op in s.order:
        d = s.place[op]
        begin = s.finish[s.last[d]] if s.last[d] >= 0 else t.begin[d]
        for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
            near = t.in_op[edge]
            begin = max(begin, s.finish[near] if s.place[near] == d else arrived[near, d])
        s.last[d] = op
        if begin + s.follow[d] >= most:
            return most
        s.follow[d] -= t.seconds[t.device_class[d], op]
        s.finish[op] = begin + t.seconds[t.device_class[d], op]
        end = max(end, s.finish[op] + t.after[d])
        if end >= limit or s.finish[op] + rest[op] >= most:
            return max(end, most)
        for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
            q = s.place[t.out_op[edge]]
            s.ready[q] = max(s.ready[q], t.out_bytes[edge])
        for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
            q = s.place[t.out_op[edge]]
            if q != d and s.ready[q] >= 0:
                leaves = max(s.finish[op], free[d, q]) if is_serial else s.finish[op]
                free[d, q] = leaves + t.latency[d, q] + s.ready[q] / t.bandwidth[d, q]
                arrived[op, q] = free[d, q]
            s.ready[q] = -1.0
    return end


@kernel
def refine_kernel(
    t: Task,
    s: State,
    ptr: Int64[ndarray, " p"],
    member: Int64[ndarray, " n"],
    tried: Int64[ndarray, " m"],
    max_work: int,
    is_serial: bool,
) -> int:
    """Run `refine`.

    Args:
        t: What stays as it is.
        s: The plan, filled; left filled.
        ptr: Ops of component c are `member[ptr[c]:ptr[c + 1]]`.
        member: The ops.
        tried: Components, in the order in which they are tried.
        max_work: As there.
        is_serial: As there.
    """
    n, k, work = len(s.order), len(s.last), 0
    arrived, free, old = np.empty((n, k)), np.empty((k, k)), np.empty(n, dtype=np.int64)
    rest = np.zeros(n)
    for turn in range(n - 1, -1, -1):
        op = s.order[turn]
        least = rest[op] + t.seconds[:, op].min()
        for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
            rest[t.in_op[edge]] = max(rest[t.in_op[edge]], least)
    best = _simulated(t, s, is_serial, arrived, free, rest, np.inf)
    for _ in range(PASSES):
        before = best
        for c in tried:
            size = ptr[c + 1] - ptr[c]
            for i in range(size):
                s.block[i] = member[ptr[c] + i]
                old[i] = s.place[s.block[i]]
            more, where = residual(t, s, np.int64(0), size), -1
            for d in range(k):
                there, stay = 0, 0
                for i in range(size):
                    if old[i] == d:
                        there, stay = there + t.residual[s.block[i]], stay + 1
                if stay == size or work > max_work or not may_go(t, s, np.int64(0), size, d):
                    continue
                if more > there and s.resident[d] + more - there > t.room[d]:
                    continue
                for i in range(size):
                    s.place[s.block[i]] = d
                now = _simulated(t, s, is_serial, arrived, free, rest, best * (1 - 1e-9))
                work += n
                if now < best * (1 - 1e-9):
                    best, where = now, d
            for i in range(size):
                op, d = s.block[i], old[i] if where < 0 else where
                s.place[op] = d
                s.resident[old[i]] -= t.residual[op]
                s.resident[d] += t.residual[op]
        if best == before:
            break
    fill_kernel(t, s)
    return work
