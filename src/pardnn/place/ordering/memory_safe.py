"""Memory-safe list scheduling: an op starts only if all remaining ops can still run to the end.

A list scheduler that only considers current free memory gets stuck: devices fill up with pieces of
work none of which can be finished. Here a *reference order* of all ops, which fits, serves as the
banker's proof: an op may start out of turn if, after it, the rest of the reference order still fits
on every device. A segment tree has the bytes that each device will hold at each op of that order;
starting an op early adds what it makes and receives until its turn, and removes what is thereby
used for the last time. The first remaining op of the reference order may always start, so no
schedule gets stuck; if the reference order is one piece of the batch after the other, this is a
reserve for the oldest unfinished piece.

Among ops that may start, a device takes the one with the smallest key. Messages are assumed to take
their latest slots (`memory_bounded`): a sender holds a tensor until its receiver reads it. So a
plan in the order found fits if the reference order does. Contention is ignored.

Reference: Dijkstra, "Een algorithme ter voorkoming van de dodelijke omarming" (EWD 108), 1965, the
banker's algorithm; with one fixed safe sequence each request is decided in O(uses log ops).
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.segment_tree import RangeMax, add_range, max_range
from pardnn.place.ordering.edges import Edges
from pardnn.place.ordering.storages import Reserve, Storages

#: Ops of a device that are asked, at one time, whether they may start: the rest is mostly alike.
TRIALS = 6


class _Held(NamedTuple):
    """What is held, and would be if the rest kept to the reference order.

    Attributes:
        done: Ops that have started.
        began: Storages that are held now.
        last: Position of each storage's last use among what is left.
        delivered: Messages whose first reader has started.
        bytes: On each device now.
        front: Position of the first op of the reference order that is left, by device.
        tree: Bytes held at each position of the reference order.
    """

    done: Bool[ndarray, " n"]
    began: Bool[ndarray, " s"]
    last: Int64[ndarray, " s"]
    delivered: Bool[ndarray, " m"]
    bytes: Int64[ndarray, " k"]
    front: Int64[ndarray, " k"]
    tree: RangeMax


class _Queues(NamedTuple):
    """What happens when. `x[ptr[d]:ptr[d + 1]]` of the ready and listed ops is device d's.

    Attributes:
        missing: Edges of each op that it still waits for.
        ready_at: When what an op waits for is there, in seconds.
        waits: Whether all is there.
        idle: Devices.
        event_time: A heap: ends of ops, and times from which an op (its number plus n) is ready.
        event: The same.
        ready_key: A heap for each device.
        ready_op: The same.
        size: Of the devices' heaps, and of that of events.
        listed: Each device's ops by key.
        head: Position of the first that has not started.
        back: Ops that may not start now.
        changed: Devices on which something is ready or was freed since none of its ops could start.
    """

    missing: Int64[ndarray, " n"]
    ready_at: Float64[ndarray, " n"]
    waits: Bool[ndarray, " n"]
    idle: Bool[ndarray, " k"]
    event_time: Float64[ndarray, " 2n"]
    event: Int64[ndarray, " 2n"]
    ready_key: Float64[ndarray, " n"]
    ready_op: Int64[ndarray, " n"]
    size: Int64[ndarray, " k+1"]
    listed: Int64[ndarray, " n"]
    head: Int64[ndarray, " k"]
    back: Int64[ndarray, " b"]
    changed: Bool[ndarray, " k"]


@kernel
def safe_schedule(
    e: Edges,
    s: Storages,
    r: Reserve,
    workspace: Int64[ndarray, " n"],
    key: Float64[ndarray, " n"],
    slack: float,
    tail: Float64[ndarray, " n"],
    limit: float,
    start: Float64[ndarray, " n"],
    order: Int64[ndarray, " n"],
) -> float:
    """Fill when each op starts, and all ops in that order; return the makespan in seconds.

    It is infinite if no op can start any more, or if the makespan would exceed the limit.

    Args:
        e: The edges.
        s: The storages.
        r: The reserve.
        workspace: Bytes of each op.
        key: Of ready ops of a device, the one with the smallest starts.
        slack: By how much the key of an op may exceed the smallest key of those not started on its
            device: 0 follows the keys strictly; with infinity, no device waits that could start
            something.
        tail: Least seconds from each op's start to the end of the step.
        limit: Seconds.
        start: Filled in seconds.
        order: Filled.
    """
    n, k = len(e.place), len(r.limit)
    run = _Held(
        np.zeros(n, dtype=np.bool_), np.zeros(len(s.bytes), dtype=np.bool_), r.last.copy(),
        np.zeros(len(s.sent), dtype=np.bool_), s.resident.copy(), r.ptr[:-1].copy(),
        RangeMax(r.top.copy(), r.add.copy()),
    )  # fmt: skip
    q = _begin(e, r, key)
    now, count, makespan, stalled = 0.0, 0, 0.0, False
    while count < n and (q.size[k] > 0 or not stalled):
        # Nothing is left to wait for: devices that keep to the keys wait for each other's memory.
        stalled = q.size[k] == 0
        if not stalled:
            now = q.event_time[0]
            _advance(q, e, r, key, now)
        moved = True
        while moved:
            moved = False
            for d in range(k):
                if not q.idle[d] or not (q.changed[d] or stalled):
                    continue
                q.changed[d] = False
                op = _choice(q, e, s, r, run, workspace, key, np.inf if stalled else slack, d)
                if op < 0:
                    continue
                _start(e, s, r, run, q.changed, workspace[op], op)
                q.idle[d], moved, stalled = False, True, False
                start[op], order[count] = now, op
                count += 1
                if now + tail[op] > limit:
                    return np.inf
                end = now + e.seconds[op]
                makespan = max(makespan, end)
                q.size[k] = heap_push(q.event_time, q.event, q.size[k], end, op)
    return makespan if count == n else np.inf


@helper
def _begin(e: Edges, r: Reserve, key: Float64[ndarray, " n"]) -> _Queues:
    n, k = len(e.place), len(r.limit)
    q = _Queues(
        e.missing.copy(), np.zeros(n), np.zeros(n, dtype=np.bool_), np.ones(k, dtype=np.bool_),
        np.empty(2 * n), np.empty(2 * n, dtype=np.int64), np.empty(n), np.empty(n, dtype=np.int64),
        np.zeros(k + 1, dtype=np.int64), np.empty(n, dtype=np.int64), r.ptr[:-1].copy(),
        np.empty(TRIALS, dtype=np.int64), np.ones(k, dtype=np.bool_),
    )  # fmt: skip
    by_key = np.argsort(key)
    for i in range(n):
        op = by_key[i]
        q.listed[q.head[e.place[op]]] = op
        q.head[e.place[op]] += 1
    for d in range(k):
        q.head[d] = r.ptr[d]
    for op in range(n):
        if q.missing[op] == 0:
            q.size[k] = heap_push(q.event_time, q.event, q.size[k], 0.0, n + op)
    return q


@helper
def _advance(q: _Queues, e: Edges, r: Reserve, key: Float64[ndarray, " n"], now: float) -> None:
    """Let all happen that happens now: devices get idle, ops ready."""
    n, k = len(e.place), len(r.limit)
    while q.size[k] > 0 and q.event_time[0] <= now:
        op = q.event[0]
        q.size[k] = heap_pop(q.event_time, q.event, q.size[k])
        if op >= n:
            op -= n
            d = e.place[op]
            begin, end = r.ptr[d], r.ptr[d + 1]
            q.waits[op], q.changed[d] = True, True
            q.size[d] = heap_push(
                q.ready_key[begin:end], q.ready_op[begin:end], q.size[d], key[op], op
            )
            continue
        q.idle[e.place[op]], q.changed[e.place[op]] = True, True
        for i in range(e.ptr[op], e.ptr[op + 1]):
            after = e.successor[i]
            q.missing[after] -= 1
            q.ready_at[after] = max(q.ready_at[after], now + e.delay[i])
            if q.missing[after] == 0:
                q.size[k] = heap_push(
                    q.event_time, q.event, q.size[k], q.ready_at[after], n + after
                )


@helper
def _choice(
    q: _Queues,
    e: Edges,
    s: Storages,
    r: Reserve,
    run: _Held,
    workspace: Int64[ndarray, " n"],
    key: Float64[ndarray, " n"],
    slack: float,
    d: int,
) -> int:
    """Return the ready op of a device with the smallest key that may start; -1 without any."""
    begin, end = r.ptr[d], r.ptr[d + 1]
    while q.head[d] < end and run.done[q.listed[q.head[d]]]:
        q.head[d] += 1
    if q.head[d] == end:
        return -1
    most = key[q.listed[q.head[d]]] + slack
    keys, ops = q.ready_key[begin:end], q.ready_op[begin:end]
    chosen, tried = np.int64(-1), 0
    while chosen < 0 and tried <= TRIALS:
        op = np.int64(-1)
        if tried < TRIALS and q.size[d] > 0 and keys[0] <= most:
            op = ops[0]
            q.size[d] = heap_pop(keys, ops, q.size[d])
            if run.done[op]:
                continue
            q.back[tried] = op
            tried += 1
        else:
            # The next of the reference order may always start, if it is ready.
            for i in range(tried):
                q.size[d] = heap_push(keys, ops, q.size[d], key[q.back[i]], q.back[i])
            tried = TRIALS + 1
            if slack == np.inf and run.front[d] < end:
                op = r.op[run.front[d]]
        if op >= 0 and q.waits[op] and _may_start(e, s, r, run, workspace[op], op):
            chosen = op
    if chosen >= 0 and tried <= TRIALS:
        for i in range(tried - 1):
            q.size[d] = heap_push(keys, ops, q.size[d], key[q.back[i]], q.back[i])
    return chosen


@helper
def _last_use(
    users: Int64[ndarray, " u"],
    sends: Int64[ndarray, " x"],
    position: Int64[ndarray, " n"],
    bound: Int64[ndarray, " m"],
    done: Bool[ndarray, " n"],
    delivered: Bool[ndarray, " m"],
) -> int:
    """Return the position of a storage's last use among what is left; -1 without any.

    Few arrays, which costs less than whole tuples: this is called for each use.
    """
    last = np.int64(-1)
    for op in users:
        if not done[op]:
            last = max(last, position[op])
    for message in sends:
        if not delivered[message]:
            last = max(last, bound[message])
    return last


@helper
def _last(s: Storages, r: Reserve, run: _Held, x: int) -> int:
    return _last_use(
        s.user[s.user_ptr[x] : s.user_ptr[x + 1]], s.send[s.send_ptr[x] : s.send_ptr[x + 1]],
        r.position, r.bound, run.done, run.delivered,
    )  # fmt: skip


@helper
def _may_start(e: Edges, s: Storages, r: Reserve, run: _Held, workspace: int, op: int) -> bool:
    """Whether the rest of the reference order still fits after the op; the run stays as it is."""
    d = e.place[op]
    begin, end = run.front[d], r.ptr[d + 1]
    takes = np.int64(0)
    for i in range(s.use_ptr[op], s.use_ptr[op + 1]):
        if not run.began[s.use[i]]:
            takes += s.bytes[s.use[i]]
    if run.bytes[d] + takes + workspace > r.limit[d]:
        return False
    if takes == 0 or max_range(run.tree, begin, end) + takes <= r.limit[d]:
        return True
    fits = True
    run.done[op] = True
    for sign in (1, -1):
        for i in range(s.use_ptr[op], s.use_ptr[op + 1]):
            x = s.use[i]
            if not run.began[x]:
                add_range(run.tree, begin, r.first[x], sign * s.bytes[x])
            last = _last(s, r, run, x)
            if last < run.last[x]:
                add_range(run.tree, max(last + 1, begin), run.last[x] + 1, -sign * s.bytes[x])
        if sign > 0:
            fits = max_range(run.tree, begin, end) <= r.limit[d]
    run.done[op] = False
    return fits


@helper
def _start(
    e: Edges,
    s: Storages,
    r: Reserve,
    run: _Held,
    changed: Bool[ndarray, " k"],
    workspace: int,
    op: int,
) -> None:
    """Start an op: what it makes is held, what it uses for the last time leaves."""
    d, p = e.place[op], r.position[op]
    run.done[op] = True
    add_range(run.tree, p, p + 1, -workspace)
    uses, reads = s.use_ptr[op + 1] - s.use_ptr[op], s.read_ptr[op + 1] - s.read_ptr[op]
    for i in range(uses + reads):
        if i < uses:
            x = s.use[s.use_ptr[op] + i]
            if not run.began[x]:
                run.began[x] = True
                run.bytes[d] += s.bytes[x]
                add_range(run.tree, r.ptr[d], r.first[x], s.bytes[x])
        else:
            m = s.read[s.read_ptr[op] + i - uses]
            x = s.sent[m]
            if x < 0 or run.delivered[m]:
                continue
            run.delivered[m] = True
            changed[s.device[x]] = True
        home, last = s.device[x], _last(s, r, run, x)
        if last < run.last[x]:
            begin = max(last + 1, r.ptr[home])
            add_range(run.tree, begin, run.last[x] + 1, -s.bytes[x])
            run.last[x] = last
            if last < 0:
                run.bytes[home] -= s.bytes[x]
    while run.front[d] < r.ptr[d + 1] and run.done[r.op[run.front[d]]]:
        run.front[d] += 1
