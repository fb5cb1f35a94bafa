"""Search for retention intervals that fit a limit and take the fewest seconds.

1. *Seeds.* Checkpoints: until the step's fullest moment only what crosses some ops is kept, for
   several numbers of such ops. Knapsack: where the step is fullest, what frees most bytes per
   second is dropped, again and again (the greedy of ParDNN's memory step, section 4.4).
2. *Local search* (`annealing`) from the best seed: drop a result where the limit is exceeded, keep
   one that is made twice, or move the end of an interval to another reader. What exceeds the limit
   costs seconds, more the longer the search stays above it.
3. *Restoring*: every result made twice is kept if that fits, the dearest first.

Everything is judged by `retention.evaluate`. Deterministic for a seed and a budget of work.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.place.recompute.annealing import annealed, knapsack
from pardnn.place.recompute.families import families_of
from pardnn.place.recompute.problem import FREELY, Nodes
from pardnn.place.recompute.retention import Cost, cost_of, empty_schedule

#: Ops and reads evaluated in all: some ten seconds at most.
WORK = 1_000_000_000
#: Schedules evaluated at most, per family, and at least.
MOST_ROUNDS, LEAST_ROUNDS = 2_000, 2_000
#: Ops that what is kept must cross, tried as seeds.
CHECKPOINTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Kept = Int64[ndarray, " n"]


def retention(
    nodes: Nodes, limit: int, *, seed: int = 0, starts: tuple[Kept, ...] = (), work: int = WORK
) -> tuple[Kept, Cost] | None:
    """Return how long first results are kept so that a step fits, and what it costs; None if never.

    Args:
        nodes: The ops.
        limit: Bytes.
        seed: Of the search.
        starts: Known answers, of a smaller limit for example; the answer is never worse.
        work: Ops and reads to evaluate in all.
    """
    n, schedule = nodes.num_ops, empty_schedule(nodes)
    everything = np.full(n, n, dtype=np.int64)
    cost = cost_of(nodes, everything, limit, schedule)
    if cost.peak <= limit:
        return everything, cost
    families = families_of(nodes)
    if families.num_families == 0:
        return None
    fullest = int(np.flatnonzero(schedule.position[:n] == int(np.argmax(schedule.live)))[0])
    greedy = everything.copy()
    knapsack(nodes, families, greedy, limit - nodes.base, schedule)
    seeds = [greedy, *starts, *(_checkpoints(nodes, fullest, c) for c in CHECKPOINTS)]
    ranked = sorted(
        ((cost_of(nodes, kept, limit, schedule), i) for i, kept in enumerate(seeds)),
        key=lambda each: (each[0].late, each[0].excess, each[0].seconds),
    )
    rounds = int(np.clip(work // _size(nodes), LEAST_ROUNDS, MOST_ROUNDS * families.num_families))
    found: list[tuple[Cost, Kept]] = [
        (cost, seeds[i]) for cost, i in ranked if cost.excess == 0 and cost.late == 0
    ]
    first = [seeds[i] for _, i in ranked[:2]]
    for number, start in enumerate(first):
        kept = start.copy()
        share = rounds // len(first)
        annealed(nodes, families, kept, limit - nodes.base, share, seed * 7 + number, schedule)
        cost = cost_of(nodes, kept, limit, schedule)
        if cost.excess == 0 and cost.late == 0:
            found.append((cost, kept))
    if not found:
        return None
    cost, kept = min(found, key=lambda each: each[0].seconds)
    return kept, cost


def _size(nodes: Nodes) -> int:
    return 4 * nodes.num_ops + 2 * len(nodes.use_op) + len(nodes.views)


def _checkpoints(nodes: Nodes, fullest: int, count: int) -> Kept:
    """Return what keeps, until the fullest moment, only what crosses some ops before it."""
    n = nodes.num_ops
    kept = np.full(n, n, dtype=np.int64)
    cuts = np.linspace(0, fullest, count + 2)[1:-1].astype(np.int64)
    for op in np.flatnonzero(nodes.again[:fullest] == FREELY).tolist():
        span = nodes.use_ptr[nodes.output_ptr[op]], nodes.use_ptr[nodes.output_ptr[op + 1]]
        uses = nodes.use_op[span[0] : span[1]]
        last = int(max(uses[uses <= fullest], default=op))
        if not ((cuts >= op) & (cuts < last)).any():
            kept[op] = fullest
    return kept
