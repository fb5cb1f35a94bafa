"""The search of `polish`: ops of longest paths go where the longest path through them is shortest.

Single ops go to their best slot, which `slots` finds without a simulation. In every second step a
block of connected ops on one device goes to its best device, which `blocks` finds likewise: in some
graphs, moving one op costs more messages than it saves. Groups and blocks are also exchanged with
others, mainly where memory is full; these changes are simulated.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.polish.blocks import gather, give, may_go, move_block, residual
from pardnn.place.polish.neighbourhood import (
    State,
    Task,
    changed,
    fill_kernel,
    makespan,
)
from pardnn.place.polish.slots import best_slot

#: Cost of evaluating an op's slots, in ops computed again, plus half an op per device (measured).
EVALUATION = 20
#: Ops of a block that is exchanged, at most.
MAX_BLOCK = 8
#: Of so many steps two try to exchange groups or blocks, which are simulated, up to `MANY_OPS` ops
#: and above; up to five times as many where residual bytes do not fit on one device, and ops have
#: to make room for each other. On 5,000 ops without limits, one in 16 took 0.5 to 0.95 of the work
#: and made a hundredth of the gain.
MANY_TRIES, MANY_OPS, FEW_TRIES, MIN_TRIES = 8, 500, 32, 1024
#: One of so many steps evaluates a block; a quarter as many on so few ops, where exchanges cost
#: little.
BLOCK_TURNS, TINY_OPS = 2, 50


@helper
def _running_at(s: State, seconds: float) -> int:
    """Return about the position of what runs at a time: long ops are found as often as short ones.

    Ops end about in the order in which they start.
    """
    low, high = 0, len(s.order) - 1
    while low < high:
        middle = (low + high) // 2
        if s.finish[s.order[middle]] < seconds:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def _critical(t: Task, s: State, begin: int, length: float) -> tuple[int, int]:
    """Return the first op from a position on that is on a path of a length, and the steps to it.

    Args:
        t: What stays as it is.
        s: The plan under change.
        begin: Position of the global order.
        length: Seconds.
    """
    n = len(s.order)
    for step in range(n):
        op = s.order[(begin + step) % n]
        if s.finish[op] + s.tail[op] - t.seconds[t.device_class[s.place[op]], op] >= length:
            return op, step
    return s.order[begin], n


@helper
def _tried(
    t: Task, s: State, op: int, d: int, other: int, size: int, limit: float, seed: int
) -> tuple[int, int]:
    """Give a block another device, and another block (-1: none) its own; undo it above a limit.

    Returns the work and the state of the generator.
    """
    old = s.place[op]
    if d == old or (other >= 0 and s.place[other] != d):
        return 1, seed
    begin = np.int64(0)  # a literal would compile what takes it twice
    end, seed = gather(t, s, op, size, seed, begin)
    last = end
    if other >= 0:
        last, seed = gather(t, s, other, size, seed, end)
    if not may_go(t, s, begin, end, d) or not may_go(t, s, end, last, old):
        return 1 + last, seed
    more = residual(t, s, begin, end) - residual(t, s, end, last)
    if more > 0 and s.resident[d] + more > t.room[d]:
        return 1 + last, seed
    if more < 0 and s.resident[old] - more > t.room[old]:
        return 1 + last, seed
    # A loop, for the compiler's sake: it would copy what is called into each call.
    work = last
    for target, home in ((d, old), (old, d)):
        for start, stop, where in ((begin, end, target), (end, last, home)):
            work += give(t, s, start, stop, where)
        if makespan(s.last, s.finish, t.after) <= limit:
            break
    return work, seed


@helper
def _some_neighbour_device(t: Task, s: State, op: int, seed: int) -> int:
    """Return the device of an op that this one reads or that reads it; its own without any."""
    ins, outs = t.in_ptr[op + 1] - t.in_ptr[op], t.out_ptr[op + 1] - t.out_ptr[op]
    if ins + outs == 0:
        return s.place[op]
    i = seed % (ins + outs)
    near = t.in_op[t.in_ptr[op] + i] if i < ins else t.out_op[t.out_ptr[op] + i - ins]
    return s.place[near]


@helper
def _exchange(t: Task, s: State, op: int, blocks: bool, limit: float, seed: int) -> tuple[int, int]:
    """Try another device for the group or block of an op, maybe in exchange for another."""
    n, k, size = len(s.order), len(s.near), 1
    seed = seed * 48271 % 2147483647
    other = s.order[min(max(s.position[op] + seed % 33 - 16, 0), n - 1)]
    seed = seed * 48271 % 2147483647
    choice = seed // 64 % 4
    d = seed % k if choice == 0 else s.place[other]
    if blocks:
        size = 2 + seed // 256 % (MAX_BLOCK - 1)
        if choice == 1:
            d = _some_neighbour_device(t, s, op, seed // 4096)
    return _tried(t, s, op, d, other if choice == 3 else -1, size, limit, seed)


@kernel
def search_kernel(t: Task, s: State, max_work: int, tolerance: float, seed: int) -> int:
    """Leave the best plan found in `place` and `order`; return the state of the generator.

    `max_work` counts ops whose times are computed again.

    Args:
        t: What stays as it is.
        s: The plan under change.
        max_work: Ops whose times may be computed again.
        tolerance: Fraction of the makespan by which a change may be worse, at first.
        seed: State of the random generator.
    """
    n, k = len(s.order), len(s.near)
    fill_kernel(t, s)
    now = best = makespan(s.last, s.finish, t.after)
    best_place, best_order = s.place.copy(), s.order.copy()
    is_full = t.residual.sum() > t.room.min()
    work, spread = 0, FEW_TRIES if is_full else MIN_TRIES
    turns = BLOCK_TURNS if n > TINY_OPS else 4 * BLOCK_TURNS
    if n <= MANY_OPS or (is_full and n <= 5 * MANY_OPS):
        spread = MANY_TRIES
    while work < max_work:
        limit = max(best * (1 + tolerance * (1 - work / max_work)), now * (1 - 1e-9))
        seed = seed * 48271 % 2147483647
        begin = seed % n
        if seed // 64 % 2 == 0:
            begin = _running_at(s, now * (seed / 2147483647))
        op, steps = _critical(t, s, begin, now * (1 - 1e-9))
        seed = seed * 48271 % 2147483647
        kind, group = seed % spread, t.group[op]
        work += EVALUATION + k // 2 + steps // 8
        seed = seed * 48271 % 2147483647
        # Groups change device as blocks and by exchanges alone.
        grouped = t.member_ptr[group + 1] - t.member_ptr[group] > 1
        if seed // 64 % turns == 0:
            spent, seed = move_block(t, s, op, limit, seed)
            work += spent
        elif kind > (spread // 2 if grouped else 1):
            noise = tolerance * now / 2147483647 * (kind % 2)
            path, d, x, to, seed = best_slot(t, s, op, noise, seed)
            if d >= 0 and path <= limit:
                work += changed(t, s, op, d, x, to)
        else:
            spent, seed = _exchange(t, s, op, kind % 2 == 1, limit, seed)
            work += spent
        now = makespan(s.last, s.finish, t.after)
        if now < best * (1 - 1e-12):
            best = now
            _copy(s.place, s.order, best_place, best_order)
    _copy(best_place, best_order, s.place, s.order)
    return seed


@helper
def _copy(
    place: Int64[ndarray, " n"],
    order: Int64[ndarray, " n"],
    to_place: Int64[ndarray, " n"],
    to_order: Int64[ndarray, " n"],
) -> None:
    """Copy element by element: assigning to slices compiles the text of its errors, 3 s."""
    for i in range(len(place)):
        to_place[i], to_order[i] = place[i], order[i]
