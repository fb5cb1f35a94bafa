"""Search for retention intervals: the fewest seconds of second calls for each limit.

1. *Seeds.* Checkpoints: until the step's peak, only results that cross some chosen ops are kept,
   for several numbers of such ops: evenly spaced, and where few bytes cross, as at the ends of
   layers (what `torch.utils.checkpoint` on every block keeps). Knapsack: at the peak, the result
   that frees most bytes per second is dropped, repeatedly (the greedy of ParDNN's memory step,
   section 4.4).
2. *Local search* (`annealing`) at limits from the largest to the smallest that seems reachable, and
   back: drop a result where the limit is exceeded, keep one that is made twice, or move the end of
   an interval to another reader. Bytes above the limit are penalised in seconds, more the longer
   the search stays above it.
3. *Restoring*, at each of these limits: every result made twice is kept if that fits, the most
   expensive first.

All answers visited are entered in one front of seconds over peaks, which does not depend on the
requested limit. So the result is read off, and a larger limit never gets a slower one.
`retention.evaluate` computes all costs. A limit far below what a search with a small part of the
work reaches is given up, which does not change that order. Deterministic for a seed and a budget of
work.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.place.by_content import ByContent
from pardnn.place.recompute.annealing import HOT, Front, annealed, knapsack, record, restored
from pardnn.place.recompute.families import Families, families_of
from pardnn.place.recompute.problem import FREELY, Nodes
from pardnn.place.recompute.retention import Cost, Schedule, cost_of, empty_schedule
from pardnn.time_limit import check_time

#: Ops and reads of all schedules tried, few of which change in each: 7 CPU seconds for 1,000 random
#: ops. A third of this missed 0.8 of their peak, which is reached; twice as much found no better.
WORK = 4_800_000_000
#: The part of the work that is spent first, to see whether a limit is out of reach: if bytes beside
#: residual ones stay more than `HOPELESS` times above it.
GLANCE, HOPELESS = 60, 1.25
#: Schedules evaluated at most, per family, and at least.
MOST_ROUNDS, LEAST_ROUNDS = 2_000, 2_000
#: Ranges of peaks of which the best is kept; every `STRIDE`th is a limit to search at.
RANGES, STRIDE = 400, 8
#: Ops that what is kept must cross, tried as seeds.
CHECKPOINTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Parts of all ops among which those that fewest bytes cross are looked for.
NARROW = (0.05, 0.1, 0.2, 0.4)
#: Limits one after the other that are not reached, after which smaller ones are not tried.
MISSES = 3
#: Temperature on the way back to larger limits, where there are good answers already.
WARM = 0.1

Kept = Int64[ndarray, " n"]


def retention(nodes: Nodes, limit: int, *, seed: int = 0, work: int = WORK) -> tuple[Kept, Cost]:
    """Return how long first results are kept so that a step fits, and what it costs.

    If nothing fits, it is the answer that needs the fewest bytes.

    Args:
        nodes: The ops.
        limit: Bytes.
        seed: Of the search.
        work: Ops and reads to evaluate in all.
    """
    n, schedule = nodes.num_ops, empty_schedule(nodes)
    everything = np.full(n, n, dtype=np.int64)
    cost = cost_of(nodes, everything, limit, schedule)
    if cost.peak <= limit:
        return everything, cost
    key, room = ByContent(nodes), limit - nodes.base
    front = _known_front(key, seed, work // GLANCE)
    if limit >= least_peak(nodes) and _least(front) <= HOPELESS * room:
        front = _known_front(key, seed, work)
    row = _best(front, room)
    if row < 0:
        row = _best(front, _least(front))
    kept = _kept(front, row)
    return kept, cost_of(nodes, kept, limit, schedule)


def _least(front: Front) -> int:
    """Return the smallest peak of a front."""
    return int(front.peak[np.isfinite(front.seconds)].min())


def least_peak(nodes: Nodes) -> int:
    """Return a lower bound on the peak: what some op reads, makes and works with, plus `base`.

    Views count nothing.
    """
    held = nodes.workspace.copy()
    makers = np.repeat(np.arange(nodes.num_ops), np.diff(nodes.output_ptr))
    np.add.at(held, makers, nodes.num_bytes)
    used = np.repeat(np.arange(len(nodes.num_bytes)), np.diff(nodes.use_ptr))
    reads = np.unique(np.stack([nodes.use_op, used]), axis=1)
    np.add.at(held, reads[0], nodes.num_bytes[reads[1]])
    return int(held.max(initial=0)) + nodes.base


@functools.lru_cache(maxsize=8)
def _known_front(key: ByContent[Nodes], seed: int, work: int) -> Front:
    return front_of(key.arrays, seed=seed, work=work)


def front_of(nodes: Nodes, *, seed: int = 0, work: int = WORK) -> Front:
    """Return the fewest seconds found for each range of peaks.

    Args:
        nodes: The ops.
        seed: Of the search.
        work: Ops and reads to evaluate in all.
    """
    families, s = families_of(nodes), empty_schedule(nodes)
    everything = np.full(nodes.num_ops, nodes.num_ops, dtype=np.int64)
    front = _empty(nodes, everything, s)
    if families.num_families == 0:
        return front
    fullest = int(np.flatnonzero(s.position[: nodes.num_ops] == int(np.argmax(s.live)))[0])
    made, last, crossing = _crossing(nodes, fullest + 1)
    for count in CHECKPOINTS:
        even = np.linspace(0, fullest, count + 2)[1:-1].astype(np.int64)
        for cuts in (even, *(_narrow(made, crossing, part, count) for part in NARROW)):
            record(nodes, _checkpoints(nodes, fullest, last, cuts), s, front)
    knapsack(nodes, families, everything.copy(), s, front)
    _searched(nodes, families, front, s, seed, work)
    return front


def _searched(nodes: Nodes, f: Families, front: Front, s: Schedule, seed: int, work: int) -> None:
    """Search at limits from the largest to the smallest that is reached, and back, some times."""
    rows = list(range(STRIDE, RANGES, STRIDE))
    most = max(MOST_ROUNDS * f.num_families, LEAST_ROUNDS)
    rounds = int(np.clip(work // _size(nodes), LEAST_ROUNDS, most))
    share = -(-rounds // (2 * len(rows)))
    state = np.array([1 + (seed * 7919 + 12345) % 2147483645])
    while rounds > 0:
        reached = missed = 0
        for row in rows:
            missed = 0 if _searched_at(nodes, f, front, s, row, share, HOT, state) else missed + 1
            reached += 1
            if missed == MISSES:
                break
        for row in reversed(rows[:reached]):
            _searched_at(nodes, f, front, s, row, share, WARM, state)
        rounds -= 2 * reached * share


def _searched_at(
    nodes: Nodes, f: Families, front: Front, s: Schedule, row: int, share: int, hot: float,
    state: Int64[ndarray, " 1"],
) -> bool:  # fmt: skip
    """Search at the limit of a row; return whether it is reached."""
    check_time()
    limit = front.top - row * front.top // RANGES
    known = _best(front, limit)
    start = known if known >= 0 else int(np.flatnonzero(np.isfinite(front.seconds))[-1])
    annealed(nodes, f, _kept(front, start), limit, share, hot, state, s, front)
    known = _best(front, limit)
    if known >= 0:
        restored(nodes, f, _kept(front, known), limit, s, front)
    return known >= 0


def _kept(front: Front, row: int) -> Kept:
    return front.kept[row].astype(np.int64)


def _empty(nodes: Nodes, everything: Kept, s: Schedule) -> Front:
    """Return a front of what calls nothing again."""
    n, rows = nodes.num_ops, RANGES + 1
    top = max(cost_of(nodes, everything, 0, s).peak - nodes.base, 1)
    front = Front(
        top, np.full(rows, np.inf), np.zeros(rows, np.int64), np.zeros((rows, n), np.int32),
        np.full(rows, np.inf),
    )  # fmt: skip
    record(nodes, everything, s, front)
    return front


def _best(front: Front, limit: int) -> int:
    """Return the row of the fastest answer within a limit; -1 if there is none."""
    seconds = np.where(front.peak <= limit, front.seconds, np.inf)
    best = int(np.argmin(seconds))
    return best if np.isfinite(seconds[best]) else -1


def _size(nodes: Nodes) -> int:
    return 4 * nodes.num_ops + 2 * len(nodes.use_op) + len(nodes.views)


def _crossing(
    nodes: Nodes, num_first: int
) -> tuple[Int64[ndarray, " f"], Int64[ndarray, " f"], Int64[ndarray, " f"]]:
    """Return bytes, last readers, and bytes that cross each op, among so many first ops.

    Of what may be made again; who reads a view reads what it is of.
    """
    made, last = np.zeros(num_first, dtype=np.int64), np.arange(num_first)
    read_last = np.zeros(len(nodes.num_bytes), dtype=np.int64)  # by tensor
    crossing = np.zeros(num_first, dtype=np.int64)
    for op in range(num_first - 1, -1, -1):
        for t in range(nodes.output_ptr[op], nodes.output_ptr[op + 1]):
            uses = slice(nodes.use_ptr[t], nodes.use_ptr[t + 1])
            readers = nodes.use_op[uses]
            views = nodes.views[nodes.view_ptr[uses.start] : nodes.view_ptr[uses.stop]]
            seen = (*readers[readers < num_first], *read_last[views])
            read_last[t] = max(seen, default=op)
            last[op] = max(last[op], read_last[t])
        if nodes.again[op] == FREELY:
            made[op] = nodes.num_bytes[nodes.output_ptr[op] : nodes.output_ptr[op + 1]].sum()
            crossing[op] += made[op]
            crossing[last[op]] -= made[op]
    return made, last, np.cumsum(crossing)


def _narrow(
    made: Int64[ndarray, " f"], crossing: Int64[ndarray, " f"], part: float, count: int
) -> Int64[ndarray, " c"]:
    """Return ops that few bytes cross, as the ends of layers, at most `count`.

    Args:
        made: Bytes that each op makes.
        crossing: Bytes that cross it.
        part: Of all ops, those that fewest bytes cross are taken.
        count: So many of them with equal bytes between, from the last op back, for what is made
            after the last of them is not made again.
    """
    crossed = crossing[crossing > 0]
    if len(crossed) == 0:
        return crossed
    few = np.flatnonzero((crossing > 0) & (crossing <= np.quantile(crossed, part)))
    since = np.cumsum(made[::-1])[::-1]  # bytes that an op and all later ones make
    cuts, end, least = [], 0, made.sum() / (count + 1)
    for op in few[::-1].tolist():
        if since[op] - made[op] - end >= least:
            cuts.append(op)
            end = since[op] - made[op]
    return np.array(cuts, dtype=np.int64)


def _checkpoints(
    nodes: Nodes, fullest: int, last: Int64[ndarray, " f"], cuts: Int64[ndarray, " c"]
) -> Kept:
    """Return what keeps, until the fullest moment, only what crosses some ops before it."""
    kept = np.full(nodes.num_ops, nodes.num_ops, dtype=np.int64)
    end = max(cuts, default=fullest)
    for op in np.flatnonzero(nodes.again[:end] == FREELY).tolist():
        if not ((cuts >= op) & (cuts < last[op])).any():
            kept[op] = fullest
    return kept
