"""Blocks of connected ops on one device, and the device where they run best together.

Where communication is expensive, moving a single op adds messages between it and its neighbours;
moving a block adds them at its boundary only. Every device that the boundary communicates with is
evaluated like a slot of a single op: each op of the block keeps its position in the global order,
so the paths through the block follow from the times when the ops around it end, and from how long
the step continues after their start. Paths that enter the block twice are ignored, so the best move
is simulated, and undone if its estimate was too low.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np

from pardnn.kernels.jit import helper, kernel
from pardnn.place.polish.neighbourhood import LOOK, State, Task, changed, makespan

#: Ops of a block that is evaluated, at most. Measured: 8, 16 and 32 are within 0.2 % of each other.
MAX_EVALUATED = 16
#: Groups may make a block larger; above this many ops it stays where it is.
MAX_ORDERED = 64
#: Devices evaluated for a block, at most.
MAX_DEVICES = 8


@helper
def _queued_after(s: State, op: int, d: int) -> int:
    """Return the op on device d after which an op stands in the global order; -1 for none."""
    if s.last[d] < 0 or s.position[s.last[d]] < s.position[op]:
        return s.last[d]
    for at in range(s.position[op] - 1, -1, -1):
        if s.place[s.order[at]] == d:
            return s.order[at]
    return -1


@helper
def gather(t: Task, s: State, op: int, size: int, seed: int, begin: int) -> tuple[int, int]:
    """List a group and connected groups on its device, until there are `size` ops.

    They are written to `block` from `begin` on. Returns where they end and the generator's state.

    Args:
        t: What stays as it is.
        s: The plan under change.
        op: The first op of the block.
        size: Ops of the block.
        seed: State of the random generator.
        begin: Position in `State.block`.
    """
    end, d = _append_group(t, s, op, begin), s.place[op]
    at = begin
    while at < end and end - begin < size:
        now = s.block[at]
        seed = seed * 48271 % 2147483647
        # 0: what it reads, 1: what reads it, 2: both; most blocks grow one way.
        if seed % 3 != 1:
            for edge in range(t.in_ptr[now], t.in_ptr[now + 1]):
                near = t.in_op[edge]
                if end - begin < size and s.place[near] == d and not s.dirty[near]:
                    end = _append_group(t, s, near, end)
        if seed % 3 != 0:
            for edge in range(t.out_ptr[now], t.out_ptr[now + 1]):
                near = t.out_op[edge]
                if end - begin < size and s.place[near] == d and not s.dirty[near]:
                    end = _append_group(t, s, near, end)
        at += 1
    for i in range(begin, end):
        s.dirty[s.block[i]] = False
    return end, seed


@helper
def _append_group(t: Task, s: State, op: int, end: int) -> int:
    """Append the group of an op to `block`, and mark it; return the new end."""
    group = t.group[op]
    for i in range(t.member_ptr[group], t.member_ptr[group + 1]):
        s.block[end] = t.member[i]
        s.dirty[t.member[i]] = True
        end += 1
    return end


@helper
def may_go(t: Task, s: State, begin: int, end: int, d: int) -> bool:
    """Return whether listed ops can run on a device.

    Args:
        t: What stays as it is.
        s: The plan under change.
        begin: First position in `State.block`.
        end: The position after the last.
        d: The device.
    """
    able = True
    for i in range(begin, end):
        able = able and t.runs[t.group[s.block[i]], d]
    return able


@helper
def residual(t: Task, s: State, begin: int, end: int) -> int:
    """Return the residual bytes of listed ops.

    Args:
        t: What stays as it is.
        s: The plan under change.
        begin: First position in `State.block`.
        end: The position after the last.
    """
    size = 0
    for i in range(begin, end):
        size += t.residual[s.block[i]]
    return size


@kernel
def give(t: Task, s: State, begin: int, end: int, d: int) -> int:
    """Put listed ops on a device, every op at its position; return the work.

    Args:
        t: What stays as it is.
        s: The plan under change.
        begin: First position in `State.block`.
        end: The position after the last.
        d: The device.
    """
    work = 0
    for i in range(begin, end):
        op = s.block[i]
        if s.place[op] != d:
            work += changed(t, s, op, d, _queued_after(s, op, d), s.position[op])
    return work


@helper
def _put_in_order(s: State, end: int) -> None:
    """Sort the listed ops by position, by insertion: there are few."""
    for i in range(1, end):
        op, at = s.block[i], i - 1
        while at >= 0 and s.position[s.block[at]] > s.position[op]:
            s.block[at + 1] = s.block[at]
            at -= 1
        s.block[at + 1] = op


@helper
def _near_before(s: State, op: int, d: int) -> int:
    """Return the op on device d before an op; -1 for none, -2 if there is none nearby."""
    if s.last[d] < 0 or s.position[s.last[d]] < s.position[op]:
        return s.last[d]
    if s.position[s.first[d]] > s.position[op]:
        return -1
    for at in range(s.position[op] - 1, max(-1, s.position[op] - 1 - LOOK * len(s.near)), -1):
        if s.place[s.order[at]] == d:
            return s.order[at]
    return -2


@kernel
def path_through_block(t: Task, s: State, end: int, d: int) -> float:
    """Return the longest path through the first `end` ops of `block` if all ran on device d.

    They are in order and marked in `dirty`. Seconds; infinite if the neighbours in d's queue are
    far.

    Args:
        t: What stays as it is.
        s: The plan under change.
        end: Number of ops.
        d: The device.
    """
    done = t.begin[d]
    for i in range(end):
        op = s.block[i]
        x = _near_before(s, op, d)
        if x == -2:
            return np.inf
        if x >= 0:
            done = max(done, s.finish[x])
        for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
            predecessor = t.in_op[edge]
            if s.dirty[predecessor]:
                continue
            at, p = s.finish[predecessor], s.place[predecessor]
            if p != d:
                at += t.latency[p, d] + t.in_bytes[edge] / t.bandwidth[p, d]
            done = max(done, at)
        done += t.seconds[t.device_class[d], op]
        s.end[i], s.queued[i] = done, x
    rest, longest = t.after[d], 0.0
    for i in range(end - 1, -1, -1):
        op, x = s.block[i], s.queued[i]
        y = s.behind[x] if x >= 0 else s.first[d]
        if y >= 0:
            rest = max(rest, s.tail[y])
        for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
            successor = t.out_op[edge]
            if s.dirty[successor]:
                continue
            tail, q = s.tail[successor], s.place[successor]
            if q != d:
                tail += t.latency[d, q] + t.out_bytes[edge] / t.bandwidth[d, q]
            rest = max(rest, tail)
        longest = max(longest, s.end[i] + rest)
        rest += t.seconds[t.device_class[d], op]
    return longest


@helper
def _name_devices(t: Task, s: State, end: int, seed: int) -> int:
    """Mark in `near` the neighbour devices of a block, and one at random, by 1, others by 0."""
    s.near[:] = 0
    for i in range(end):
        op = s.block[i]
        for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
            s.near[s.place[t.in_op[edge]]] = 1
        for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
            s.near[s.place[t.out_op[edge]]] = 1
    seed = seed * 48271 % 2147483647
    s.near[seed % len(s.near)] = 1
    return seed


@helper
def _best_device(t: Task, s: State, end: int, begin: int) -> tuple[float, int, int]:
    """Return the longest path at the best other device, the device (-1: none), and the work.

    Of the marked devices the first `MAX_DEVICES` are evaluated, from `begin` on, in a circle.
    """
    k, old, tried = len(s.near), s.place[s.block[0]], 0
    start = np.int64(0)  # a literal would compile what takes it twice
    more = residual(t, s, start, end)
    path, where = np.inf, -1
    for step in range(k):
        d = (begin + step) % k
        if s.near[d] == 0 or d == old or tried == MAX_DEVICES or not may_go(t, s, start, end, d):
            continue
        if more > 0 and s.resident[d] + more > t.room[d]:
            continue
        tried += 1
        now = path_through_block(t, s, end, d)
        if now < path:
            path, where = now, d
    return path, where, (1 + tried) * end


@kernel
def move_block(t: Task, s: State, op: int, limit: float, seed: int) -> tuple[int, int]:
    """Move the block of an op to its best device, unless the step would exceed a limit.

    Returns the work and the state of the generator.

    Args:
        t: What stays as it is.
        s: The plan under change.
        op: An op of the block.
        limit: Seconds that the step may take.
        seed: State of the random generator.
    """
    seed, begin = seed * 48271 % 2147483647, np.int64(0)
    end, seed = gather(t, s, op, 2 + seed // 8 % (MAX_EVALUATED - 1), seed, begin)
    if end > MAX_ORDERED:
        return end, seed
    _put_in_order(s, end)
    seed = _name_devices(t, s, end, seed)
    for i in range(end):
        s.dirty[s.block[i]] = True
    path, d, work = _best_device(t, s, end, seed // 64 % len(s.near))
    for i in range(end):
        s.dirty[s.block[i]] = False
    if d < 0 or path > limit:
        return work, seed
    # A loop, for the compiler's sake: it would copy what is called into each call.
    old = s.place[op]
    for target in (d, old):
        work += give(t, s, begin, end, target)
        if makespan(s.last, s.finish, t.after) <= limit:
            break
    return work, seed
