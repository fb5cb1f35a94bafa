"""The search of `polish`: ops of longest paths go where the longest path through them is shorter.

Single ops go to their best slot, which `polish_kernel` finds without a simulation. Groups, and
blocks of ops that read each other on one device, go to another device as one, alone or in exchange
for others: where messages are dear or memory is full, no op can go alone.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numba

from pardnn.place.polish_kernel import (
    State,
    Task,
    best_slot,
    changed,
    critical,
    fill_kernel,
    makespan,
)

#: What judging an op's slots costs, in ops computed again, plus half an op per device (measured).
EVALUATION = 20
#: Ops of a block, at most.
MOST_BLOCK = 8
#: Of so many steps two try to exchange groups or blocks, which are simulated, up to `MANY_OPS` ops
#: and above; up to five times as many where residual bytes do not fit on one device, and ops have
#: to make room for each other.
MANY_TRIES, MANY_OPS, FEW_TRIES = 8, 500, 32


@numba.njit(cache=True)
def _queued_after(s: State, op: int, d: int) -> int:
    """Return the op on device d after which an op stands in the global order; -1 for none."""
    if s.last[d] < 0 or s.position[s.last[d]] < s.position[op]:
        return s.last[d]
    for at in range(s.position[op] - 1, -1, -1):
        if s.place[s.order[at]] == d:
            return s.order[at]
    return -1


@numba.njit(cache=True)
def _gather(t: Task, s: State, op: int, size: int, seed: int, begin: int) -> tuple[int, int]:
    """List a group, and groups of its device that it reads or that read it, until there are `size`.

    They are written to `block` from `begin` on. Returns where they end and the generator's state.
    """
    end, d = _listed(t, s, op, begin), s.place[op]
    at = begin
    while at < end and end - begin < size:
        now = s.block[at]
        seed = seed * 48271 % 2147483647
        # 0: what it reads, 1: what reads it, 2: both; most blocks grow one way.
        if seed % 3 != 1:
            for edge in range(t.in_ptr[now], t.in_ptr[now + 1]):
                near = t.in_op[edge]
                if end - begin < size and s.place[near] == d and not s.dirty[near]:
                    end = _listed(t, s, near, end)
        if seed % 3 != 0:
            for edge in range(t.out_ptr[now], t.out_ptr[now + 1]):
                near = t.out_op[edge]
                if end - begin < size and s.place[near] == d and not s.dirty[near]:
                    end = _listed(t, s, near, end)
        at += 1
    for i in range(begin, end):
        s.dirty[s.block[i]] = False
    return end, seed


@numba.njit(cache=True)
def _listed(t: Task, s: State, op: int, end: int) -> int:
    """Append the group of an op to `block`, and mark it; return the new end."""
    group = t.group[op]
    for i in range(t.member_ptr[group], t.member_ptr[group + 1]):
        s.block[end] = t.member[i]
        s.dirty[t.member[i]] = True
        end += 1
    return end


@numba.njit(cache=True)
def _may_go(t: Task, s: State, begin: int, end: int, d: int) -> bool:
    able = True
    for i in range(begin, end):
        able = able and t.runs[t.group[s.block[i]], d]
    return able


@numba.njit(cache=True)
def _residual(t: Task, s: State, begin: int, end: int) -> int:
    size = 0
    for i in range(begin, end):
        size += t.residual[s.block[i]]
    return size


@numba.njit(cache=True)
def _give(t: Task, s: State, begin: int, end: int, d: int) -> int:
    """Put listed ops on a device, every op at its position; return the work."""
    work = 0
    for i in range(begin, end):
        op = s.block[i]
        if s.place[op] != d:
            work += changed(t, s, op, d, _queued_after(s, op, d), s.position[op])
    return work


@numba.njit(cache=True)
def _tried(
    t: Task, s: State, op: int, d: int, other: int, size: int, limit: float, seed: int
) -> tuple[int, int]:
    """Give a block another device, and another block (-1: none) its own; undo it above a limit.

    Returns the work and the state of the generator.
    """
    old = s.place[op]
    if d == old or (other >= 0 and s.place[other] != d):
        return 1, seed
    end, seed = _gather(t, s, op, size, seed, 0)
    last = end
    if other >= 0:
        last, seed = _gather(t, s, other, size, seed, end)
    if not _may_go(t, s, 0, end, d) or not _may_go(t, s, end, last, old):
        return 1 + last, seed
    more = _residual(t, s, 0, end) - _residual(t, s, end, last)
    if more > 0 and s.held[d] + more > t.room[d]:
        return 1 + last, seed
    if more < 0 and s.held[old] - more > t.room[old]:
        return 1 + last, seed
    work = _give(t, s, 0, end, d) + _give(t, s, end, last, old)
    if makespan(s) > limit:
        work += _give(t, s, 0, end, old) + _give(t, s, end, last, d)
    return work + last, seed


@numba.njit(cache=True)
def _some_neighbour_device(t: Task, s: State, op: int, seed: int) -> int:
    """Return the device of an op that this one reads or that reads it; its own without any."""
    ins, outs = t.in_ptr[op + 1] - t.in_ptr[op], t.out_ptr[op + 1] - t.out_ptr[op]
    if ins + outs == 0:
        return s.place[op]
    i = seed % (ins + outs)
    near = t.in_op[t.in_ptr[op] + i] if i < ins else t.out_op[t.out_ptr[op] + i - ins]
    return s.place[near]


@numba.njit(cache=True)
def _exchange(t: Task, s: State, op: int, blocks: bool, limit: float, seed: int) -> tuple[int, int]:
    """Try another device for the group or block of an op, maybe in exchange for another."""
    n, k, size = len(s.order), len(s.near), 1
    seed = seed * 48271 % 2147483647
    other = s.order[min(max(s.position[op] + seed % 33 - 16, 0), n - 1)]
    seed = seed * 48271 % 2147483647
    way = seed // 64 % 4
    d = seed % k if way == 0 else s.place[other]
    if blocks:
        size = 2 + seed // 256 % (MOST_BLOCK - 1)
        if way == 1:
            d = _some_neighbour_device(t, s, op, seed // 4096)
    return _tried(t, s, op, d, other if way == 3 else -1, size, limit, seed)


@numba.njit(cache=True)
def search_kernel(t: Task, s: State, most_work: int, tolerance: float, seed: int) -> int:
    """Leave the best plan found in `place` and `order`; return the state of the generator.

    `most_work` counts ops whose times are computed again.
    """
    n, k = len(s.order), len(s.near)
    fill_kernel(t, s)
    now = best = makespan(s)
    best_place, best_order = s.place.copy(), s.order.copy()
    is_full = t.residual.sum() > t.room.min()
    work, spread = 0, MANY_TRIES if n <= MANY_OPS or (is_full and n <= 5 * MANY_OPS) else FEW_TRIES
    while work < most_work:
        limit = max(best * (1 + tolerance * (1 - work / most_work)), now * (1 - 1e-9))
        seed = seed * 48271 % 2147483647
        op, steps = critical(t, s, seed % n, now * (1 - 1e-9))
        seed = seed * 48271 % 2147483647
        kind, group = seed % spread, t.group[op]
        work += EVALUATION + k // 2 + steps // 8
        # Groups change device by exchanges alone.
        grouped = t.member_ptr[group + 1] - t.member_ptr[group] > 1
        if kind > (spread // 2 if grouped else 1):
            noise = tolerance * now / 2147483647 * (kind % 2)
            path, d, x, to, seed = best_slot(t, s, op, noise, seed)
            if d >= 0 and path <= limit:
                work += changed(t, s, op, d, x, to)
        else:
            spent, seed = _exchange(t, s, op, kind % 2 == 1, limit, seed)
            work += spent
        now = makespan(s)
        if now < best * (1 - 1e-12):
            best = now
            best_place[:] = s.place
            best_order[:] = s.order
    s.place[:] = best_place
    s.order[:] = best_order
    return seed
