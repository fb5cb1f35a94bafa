"""The best slot of an op: the device and the place in its queue where its paths are shortest.

Taking an op out of its queue makes no path longer; inserting it between two other ops only adds
paths through itself, whose length follows at once from finish and tail (`neighbourhood`). So every
device and many places are evaluated without a simulation. In its own queue these times include the
op itself, so they are computed again along the queue as if it were not there (Mastrolilli,
Gambardella, J. Scheduling 2000): without that, an op was seldom put before a long one.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np

from pardnn.kernels.jit import helper, kernel
from pardnn.place.polish.neighbourhood import LOOK, State, Task

#: Places tried in a queue, before and after where the op runs now.
REACH = 12


@helper
def _window(t: Task, s: State, op: int) -> tuple[int, int]:
    """First and last position where an op may stand, the other ops as they are."""
    first, last = 0, len(s.order) - 1
    for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
        first = max(first, s.position[t.in_op[edge]] + 1)
    for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
        last = min(last, s.position[t.out_op[edge]] - 1)
    return first, last


@helper
def _neighbours(s: State, op: int) -> None:
    """Fill `near` with the op before on each device: -1 none, -2 not found nearby."""
    k = len(s.near)
    s.near[:] = -2
    s.near[s.place[op]] = s.before[op]
    found, at = 1, s.position[op] - 1
    least = max(-1, at - LOOK * k)
    while found < k and at > least:
        d = s.place[s.order[at]]
        if s.near[d] == -2:
            s.near[d] = s.order[at]
            found += 1
        at -= 1
    for d in range(k):
        if s.near[d] == -2 and (at < 0 or s.first[d] < 0):
            s.near[d] = -1


@helper
def _paths(t: Task, s: State, op: int) -> None:
    """Fill, per device, when the inputs have arrived and how long the step goes on after."""
    k = len(s.near)
    for d in range(k):
        s.ready[d] = t.begin[d]
        s.follow[d] = t.after[d]
    for edge in range(t.in_ptr[op], t.in_ptr[op + 1]):
        predecessor = t.in_op[edge]
        p, at, size = s.place[predecessor], s.finish[predecessor], t.in_bytes[edge]
        for d in range(k):
            comm = 0.0 if d == p else t.latency[p, d] + size / t.bandwidth[p, d]
            s.ready[d] = max(s.ready[d], at + comm)
    for edge in range(t.out_ptr[op], t.out_ptr[op + 1]):
        successor = t.out_op[edge]
        q, tail, size = s.place[successor], s.tail[successor], t.out_bytes[edge]
        for d in range(k):
            comm = 0.0 if d == q else t.latency[d, q] + size / t.bandwidth[d, q]
            s.follow[d] = max(s.follow[d], tail + comm)


@kernel
def best_slot(
    t: Task, s: State, op: int, noise: float, seed: int
) -> tuple[float, int, int, int, int]:
    """Return the longest path through the op at the best other slot, and the slot.

    That is: seconds, device, the op before it, its position, and the state of the generator.

    Args:
        t: What stays as it is.
        s: The plan under change.
        op: The op.
        noise: Seconds per unit of a random number, added to the length of each path.
        seed: State of the random generator.
    """
    low, high = _window(t, s, op)
    _neighbours(s, op)
    _paths(t, s, op)
    here, group = s.place[op], t.group[op]
    best, path, behind, to, seed = _slot_earlier(t, s, op, low, noise, seed)
    later, its_path, x, at, seed = _slot_later(t, s, op, high, noise, seed)
    if later < best:
        best, path, behind, to = later, its_path, x, at
    where = here if best < np.inf else -1
    # Groups stay together: their ops change places in their queue alone.
    alone = t.member_ptr[group + 1] - t.member_ptr[group] == 1
    for d in range(len(s.near) if alone else 0):
        if d == here or not t.runs[group, d] or s.near[d] == -2:
            continue
        if s.resident[d] + t.residual[op] > t.room[d]:
            continue
        base = t.seconds[t.device_class[d], op]
        for direction in range(2):
            x, at = s.near[d], s.position[op]
            y = s.behind[x] if x >= 0 else s.first[d]
            for step in range(REACH):
                if step > 0 or direction == 0:
                    start = s.ready[d] if x < 0 else max(s.ready[d], s.finish[x])
                    now = start + base + (s.follow[d] if y < 0 else max(s.follow[d], s.tail[y]))
                    seed = seed * 48271 % 2147483647
                    if now + noise * seed < best:
                        best, path = now + noise * seed, now
                        where, behind, to = d, x, at
                # Only while an earlier start, or a shorter queue after it, is to be had.
                if direction == 0:
                    if x < 0 or s.finish[x] <= s.ready[d] or s.position[x] < low:
                        break
                    x, y, at = s.before[x], x, s.position[x]
                else:
                    if y < 0 or s.tail[y] <= s.follow[d] or s.position[y] > high:
                        break
                    x, y, at = y, s.behind[y], s.position[y]
    return path, where, behind, to, seed


@helper
def _slot_earlier(
    t: Task, s: State, op: int, low: int, noise: float, seed: int
) -> tuple[float, float, int, int, int]:
    """Return the best slot before an op in its own queue: with noise, and as `best_slot` does.

    Infinite if there is none. In one loop: a call per place took three times as long.
    """
    d, x = s.place[op], s.before[op]
    rest = t.after[d]
    if s.behind[op] >= 0:
        rest = s.tail[s.behind[op]]
    best, path, behind, to = np.inf, np.inf, -1, -1
    for _ in range(REACH - 1):
        if x < 0 or s.finish[x] <= s.ready[d] or s.position[x] < low:
            break
        y, at = x, s.position[x]
        for edge in range(t.out_ptr[y], t.out_ptr[y + 1]):
            q = s.place[t.out_op[edge]]
            if q != d:  # the queue has its own
                comm = t.latency[d, q] + t.out_bytes[edge] / t.bandwidth[d, q]
                rest = max(rest, s.tail[t.out_op[edge]] + comm)
        rest += t.seconds[t.device_class[d], y]
        x = s.before[y]
        start = s.ready[d] if x < 0 else max(s.ready[d], s.finish[x])
        now = start + t.seconds[t.device_class[d], op] + max(s.follow[d], rest)
        seed = seed * 48271 % 2147483647
        if now + noise * seed < best:
            best, path, behind, to = now + noise * seed, now, x, at
    return best, path, behind, to, seed


@helper
def _slot_later(
    t: Task, s: State, op: int, high: int, noise: float, seed: int
) -> tuple[float, float, int, int, int]:
    """Return the best slot after an op in its own queue, as `_slot_earlier` does."""
    d, y = s.place[op], s.behind[op]
    done = t.begin[d]
    if s.before[op] >= 0:
        done = s.finish[s.before[op]]
    best, path, behind, to = np.inf, np.inf, -1, -1
    for _ in range(REACH - 1):
        if y < 0 or s.tail[y] <= s.follow[d] or s.position[y] > high:
            break
        x, at = y, s.position[y]
        for edge in range(t.in_ptr[x], t.in_ptr[x + 1]):
            p = s.place[t.in_op[edge]]
            if p != d:
                comm = t.latency[p, d] + t.in_bytes[edge] / t.bandwidth[p, d]
                done = max(done, s.finish[t.in_op[edge]] + comm)
        done += t.seconds[t.device_class[d], x]
        y = s.behind[x]
        rest = s.follow[d] if y < 0 else max(s.follow[d], s.tail[y])
        now = max(s.ready[d], done) + t.seconds[t.device_class[d], op] + rest
        seed = seed * 48271 % 2147483647
        if now + noise * seed < best:
            best, path, behind, to = now + noise * seed, now, x, at
    return best, path, behind, to, seed
