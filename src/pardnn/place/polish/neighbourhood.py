"""The plan that `polish` changes, with times along all paths kept up to date.

A plan is a device per op and one global order; the ops of a device run in it. For each op it has
the finish (its head plus its own seconds) and the `tail`, the seconds from its start to the end of
the step, both along the longest path of inputs, messages and queues. Only times that a change
affects are simulated again.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.errors import InvalidPlanError
from pardnn.graph.csr import GraphArrays, op_edges, transposed
from pardnn.kernels.jit import helper, kernel
from pardnn.place.colocation import runnable
from pardnn.place.ordering.memory_bounded import UNLIMITED
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes

#: Positions of the order looked at for the op before on each device, per device.
LOOK = 12


class Task(NamedTuple):
    """What does not change during a search.

    Attributes:
        in_ptr: Edges into op i are at `in_ptr[i]:in_ptr[i + 1]`.
        in_op: The predecessor of each edge.
        in_bytes: Bytes of each edge; 0 for an order edge.
        out_ptr: Edges out of op i are at `out_ptr[i]:out_ptr[i + 1]`.
        out_op: The successor of each edge.
        out_bytes: Bytes of each edge; 0 for an order edge.
        seconds: As in `Machine`.
        device_class: As in `Machine`.
        latency: As in `Machine`.
        bandwidth: As in `Machine`.
        group: Co-location group of each op.
        runs: Whether a device can run a group.
        member_ptr: Ops of group g are `member[member_ptr[g]:member_ptr[g + 1]]`.
        member: The ops.
        residual: Bytes of each op that outlive the step.
        room: Residual bytes that each device may hold.
        begin: Seconds at which each device begins.
        after: Seconds that count after each device's last op.
    """

    in_ptr: Int64[ndarray, " n+1"]
    in_op: Int64[ndarray, " e"]
    in_bytes: Float64[ndarray, " e"]
    out_ptr: Int64[ndarray, " n+1"]
    out_op: Int64[ndarray, " e"]
    out_bytes: Float64[ndarray, " e"]
    seconds: Float64[ndarray, "f n"]
    device_class: Int64[ndarray, " k"]
    latency: Float64[ndarray, "k k"]
    bandwidth: Float64[ndarray, "k k"]
    group: Int64[ndarray, " n"]
    runs: Bool[ndarray, "g k"]
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]
    residual: Int64[ndarray, " n"]
    room: Int64[ndarray, " k"]
    begin: Float64[ndarray, " k"]
    after: Float64[ndarray, " k"]


class State(NamedTuple):
    """A plan under change. The queues of the devices are linked lists; -1 is no op.

    Attributes:
        place: Device of each op.
        order: Ops in the global order.
        position: Of each op in the global order.
        before: The op before each on its device.
        behind: The op behind each on its device.
        first: First op of each device.
        last: Last op of each device.
        finish: Seconds at which each op ends.
        tail: Seconds from the start of each op to the end of the step.
        dirty: Whether an op's times are to be computed again.
        resident: Residual bytes on each device.
        near: Scratch of one evaluation, per device.
        ready: Scratch: seconds at which an op's inputs have arrived on each device.
        follow: Scratch: seconds that the step continues after the op, on each device.
        block: Scratch: ops that move together, and those they change places with.
        end: Scratch: when they would end on another device.
        queued: Scratch: behind which op they would run there.
    """

    place: Int64[ndarray, " n"]
    order: Int64[ndarray, " n"]
    position: Int64[ndarray, " n"]
    before: Int64[ndarray, " n"]
    behind: Int64[ndarray, " n"]
    first: Int64[ndarray, " k"]
    last: Int64[ndarray, " k"]
    finish: Float64[ndarray, " n"]
    tail: Float64[ndarray, " n"]
    dirty: Bool[ndarray, " n"]
    resident: Int64[ndarray, " k"]
    near: Int64[ndarray, " k"]
    ready: Float64[ndarray, " k"]
    follow: Float64[ndarray, " k"]
    block: Int64[ndarray, " n"]
    end: Float64[ndarray, " n"]
    queued: Int64[ndarray, " n"]


def task_of(
    arrays: GraphArrays,
    machine: Machine,
    room: Int64[ndarray, " k"] | None = None,
    begin: Float64[ndarray, " k"] | None = None,
) -> Task:
    """Return what the search needs to know.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        room: Residual bytes that each device may hold; None for no limit.
        begin: When each device begins, seconds: the objective counts how long after that it ends,
            and the latest begin. None: all at 0.
    """
    n, begin = arrays.num_ops, np.zeros(machine.num_devices) if begin is None else begin
    successor = np.repeat(np.arange(n), np.diff(arrays.after_ptr))
    consumer = np.repeat(np.arange(n), np.diff(arrays.input_ptr))
    source = np.concatenate([arrays.tensor_op[arrays.input_tensor], arrays.after_op])
    target = np.concatenate([consumer, successor])
    sent = arrays.tensor_bytes[arrays.input_tensor].astype(np.float64)
    size = np.concatenate([sent, np.zeros(len(successor))])

    def rows(
        key: Int64[ndarray, " e"], other: Int64[ndarray, " e"]
    ) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " e"], Float64[ndarray, " e"]]:
        by_key = np.lexsort((other, key))
        ends = np.cumsum(np.bincount(key, minlength=n))
        ptr = np.concatenate([[0], ends]).astype(np.int64)
        return ptr, other[by_key].astype(np.int64), size[by_key]

    return Task(
        *rows(target, source),
        *rows(source, target),
        machine.seconds,
        machine.device_class,
        machine.latency,
        machine.bandwidth,
        arrays.group.copy(),
        runnable(arrays, machine),
        *transposed(np.arange(n + 1), arrays.group, int(arrays.group.max()) + 1),
        residual_bytes(arrays, np.arange(n)),
        np.full(machine.num_devices, UNLIMITED) if room is None else room,
        begin,
        begin.max() - begin,
    )


def state_of(place: Int64[ndarray, " n"], order: Int64[ndarray, " n"], num_devices: int) -> State:
    """Return a state in which only `place` and `order` are filled.

    Args:
        place: Device of each op.
        order: All ops, in the order in which they start.
        num_devices: Number of devices.
    """
    n, k = len(place), num_devices
    return State(
        place=np.array(place, dtype=np.int64),
        order=np.array(order, dtype=np.int64),
        position=np.zeros(n, dtype=np.int64),
        before=np.zeros(n, dtype=np.int64),
        behind=np.zeros(n, dtype=np.int64),
        first=np.zeros(k, dtype=np.int64),
        last=np.zeros(k, dtype=np.int64),
        finish=np.zeros(n),
        tail=np.zeros(n),
        dirty=np.zeros(n, dtype=np.bool_),
        resident=np.zeros(k, dtype=np.int64),
        near=np.zeros(k, dtype=np.int64),
        ready=np.zeros(k),
        follow=np.zeros(k),
        block=np.empty(n, dtype=np.int64),
        end=np.zeros(n),
        queued=np.zeros(n, dtype=np.int64),
    )


def global_order(arrays: GraphArrays, dispatch: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return the ops of a plan in the order in which they are dispatched.

    Args:
        arrays: The graph.
        dispatch: Of each op, from a run of the plan's lists.

    Raises:
        InvalidPlanError: E410, if an op runs before one that it has to follow: kernels would then
            read beyond the ends of their arrays.
    """
    first, then = op_edges(arrays).T
    early = np.flatnonzero(dispatch[first] > dispatch[then])
    if len(early):
        raise InvalidPlanError(
            f"the plan to improve runs op {then[early[0]]} before op {first[early[0]]}, which it "
            f"must follow ({len(early)} such pairs).\n"
            "This is a bug in pardnn: please report it."
        )
    return np.argsort(dispatch, kind="stable")


@helper
def _finish(t: Task, s: State, op: int) -> float:
    """When an op ends: its device is free and its inputs have arrived."""
    d = s.place[op]
    begin = t.begin[
        d
    ]  # no conditional expression: with two arrays it is not inlined, 6 times slower
    if s.before[op] >= 0:
        begin = s.finish[s.before[op]]
    for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
        predecessor = t.in_op[edge]
        at, p = s.finish[predecessor], s.place[predecessor]
        if p != d:
            at += t.latency[p, d] + t.in_bytes[edge] / t.bandwidth[p, d]
        begin = max(begin, at)
    return begin + t.seconds[t.device_class[d], op]


@helper
def _tail(t: Task, s: State, op: int) -> float:
    """Seconds from the start of an op to the end of the step, by the longest path."""
    d = s.place[op]
    rest = t.after[d]
    if s.behind[op] >= 0:
        rest = s.tail[s.behind[op]]
    for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
        successor = t.out_op[edge]
        tail, q = s.tail[successor], s.place[successor]
        if q != d:
            tail += t.latency[d, q] + t.out_bytes[edge] / t.bandwidth[d, q]
        rest = max(rest, tail)
    return rest + t.seconds[t.device_class[d], op]


@kernel
def fill_kernel(t: Task, s: State) -> None:
    """Fill everything but `place` and `order`, from these two."""
    s.first[:] = -1
    s.last[:] = -1
    s.resident[:] = 0
    for p in range(len(s.order)):
        op = s.order[p]
        d = s.place[op]
        s.position[op] = p
        s.before[op], s.behind[op] = s.last[d], -1
        if s.last[d] >= 0:
            s.behind[s.last[d]] = op
        else:
            s.first[d] = op
        s.last[d] = op
        s.resident[d] += t.residual[op]
        s.finish[op] = _finish(t, s, op)
    for p in range(len(s.order) - 1, -1, -1):
        s.tail[s.order[p]] = _tail(t, s, s.order[p])
    s.dirty[:] = False


@helper
def makespan(
    last: Int64[ndarray, " k"], finish: Float64[ndarray, " n"], after: Float64[ndarray, " k"]
) -> float:
    """Return when the last op ends, in seconds, plus what counts after it.

    It takes few arrays, since whole tuples cost more: this is called for each change.
    """
    end = 0.0
    for d in range(len(last)):
        if last[d] >= 0:
            end = max(end, finish[last[d]] + after[d])
    return end


@helper
def _move(s: State, op: int, d: int, x: int, to: int) -> None:
    """Put an op behind op x in the queue of device d (x = -1: first), at a position `to`."""
    at, p, n = s.before[op], s.place[op], s.behind[op]
    if at >= 0:
        s.behind[at] = n
    else:
        s.first[p] = n
    if n >= 0:
        s.before[n] = at
    else:
        s.last[p] = at
    s.place[op], s.before[op] = d, x
    if x >= 0:
        s.behind[op] = s.behind[x]
        s.behind[x] = op
    else:
        s.behind[op] = s.first[d]
        s.first[d] = op
    if s.behind[op] >= 0:
        s.before[s.behind[op]] = op
    else:
        s.last[d] = op
    at = s.position[op]
    step = 1 if to > at else -1
    while at != to:
        s.order[at] = s.order[at + step]
        s.position[s.order[at]] = at
        at += step
    s.order[to] = op
    s.position[op] = to


@helper
def _mark(s: State, op: int, count: int) -> int:
    if op < 0 or s.dirty[op]:
        return count
    s.dirty[op] = True
    return count + 1


@helper
def _update(t: Task, s: State, op: int, was: int, then: int) -> int:
    """Compute again what a move of `op` changed; return how many ops were looked at.

    `was` and `then` are the ops that were before and behind it.
    """
    work, none = 0, np.int64(0)  # a literal would compile `_mark` twice
    count = _mark(s, then, _mark(s, s.behind[op], _mark(s, op, none)))
    at = s.position[op] if then < 0 else min(s.position[op], s.position[then])
    while count > 0:
        now = s.order[at]
        at += 1
        if not s.dirty[now]:
            continue
        s.dirty[now] = False
        count, work = count - 1, work + 1
        end = _finish(t, s, now)
        if end == s.finish[now] and now != op:
            continue
        s.finish[now] = end
        count = _mark(s, s.behind[now], count)
        for edge in range(t.out_ptr[now], t.out_ptr[now + 1]):
            count = _mark(s, t.out_op[edge], count)
    count = _mark(s, was, _mark(s, s.before[op], _mark(s, op, none)))
    at = s.position[op] if was < 0 else max(s.position[op], s.position[was])
    while count > 0:
        now = s.order[at]
        at -= 1
        if not s.dirty[now]:
            continue
        s.dirty[now] = False
        count, work = count - 1, work + 1
        tail = _tail(t, s, now)
        if tail == s.tail[now] and now != op:
            continue
        s.tail[now] = tail
        count = _mark(s, s.before[now], count)
        for edge in range(t.in_ptr[now], t.in_ptr[now + 1]):
            count = _mark(s, t.in_op[edge], count)
    return work


@kernel
def changed(t: Task, s: State, op: int, d: int, x: int, to: int) -> int:
    """Move an op, as `_move` does, and update the times that change; return the work.

    Args:
        t: What stays as it is.
        s: The plan under change.
        op: The op.
        d: Its new device.
        x: The op after which it is queued there; -1: it is the first.
        to: Its new position in the global order.
    """
    was, then = s.before[op], s.behind[op]
    s.resident[s.place[op]] -= t.residual[op]
    s.resident[d] += t.residual[op]
    _move(s, op, d, x, to)
    return _update(t, s, op, was, then)
