"""The kernels of the search for retention intervals: knapsack, simulated annealing, restoring."""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.recompute.families import Families
from pardnn.place.recompute.problem import Nodes
from pardnn.place.recompute.retention import Schedule, evaluate

#: First and last temperature, in seconds of a usual family; how soon what exceeds costs more.
HOT, COLD, PATIENCE = 0.5, 0.005, 100


@helper
def _random(state: Int64[ndarray, " 1"]) -> float:
    """Return a number in [0, 1) (Park and Miller's generator, which is the same everywhere)."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] / 2147483648.0


@helper
def _set(f: Families, kept: Int64[ndarray, " n"], family: int, last: int) -> None:
    """Keep the first results of a family up to an op."""
    for m in range(f.member_ptr[family], f.member_ptr[family + 1]):
        kept[f.member[m]] = last


@helper
def _fullest(s: Schedule, num_calls: int) -> int:
    best = 0
    for p in range(num_calls):
        if s.live[p] > s.live[best]:
            best = p
    return best


@helper
def _stage(s: Schedule, n: int, place: int) -> int:
    """Return the op that runs at a place among all calls, or before which the call there stands."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        if s.position[middle] < place:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def _held(f: Families, s: Schedule, r: int, place: int) -> bool:
    """Whether the first result of a tensor is only waiting at a place."""
    return s.position[f.maker[r]] < place < s.position[s.end[0, f.tensor[r]]]


@kernel
def knapsack(
    nodes: Nodes, f: Families, kept: Int64[ndarray, " n"], limit: int, s: Schedule
) -> None:
    """Drop what frees most bytes per second where the step is fullest, until it fits."""
    n = len(nodes.seconds)
    was_dropped = np.zeros(len(f.seconds), dtype=np.bool_)
    freed = np.zeros(len(f.seconds), dtype=np.int64)
    for _ in range(len(f.seconds)):
        _, peak, _, _ = evaluate(nodes, kept, limit, s)
        if peak <= limit:
            return
        place = _fullest(s, 2 * n)
        freed[:] = 0
        for r in range(len(f.tensor)):
            if not was_dropped[f.family[r]] and _held(f, s, r, place):
                freed[f.family[r]] += nodes.num_bytes[f.tensor[r]]
        best, ratio = -1, -1.0
        for family in range(len(f.seconds)):
            if freed[family] > 0 and freed[family] / (f.seconds[family] + 1e-12) > ratio:
                best, ratio = family, freed[family] / (f.seconds[family] + 1e-12)
        if best < 0:
            return
        was_dropped[best] = True
        _set(f, kept, best, _stage(s, n, place))


@helper
def _pick(nodes: Nodes, f: Families, s: Schedule, place: int, state: Int64[ndarray, " 1"]) -> int:
    """Return a tensor that waits at a place: the better one of two, mostly; -1 if none does."""
    one, other, count = -1, -1, 0
    for r in range(len(f.tensor)):
        if _held(f, s, r, place):
            count += 1
            if _random(state) * count < 1.0:
                one = r
            if _random(state) * count < 1.0:
                other = r
    if count == 0 or _random(state) < 0.25:
        return one
    gain = nodes.num_bytes[f.tensor[one]] * f.seconds[f.family[other]]
    return one if gain >= nodes.num_bytes[f.tensor[other]] * f.seconds[f.family[one]] else other


@helper
def _move(
    nodes: Nodes,
    f: Families,
    kept: Int64[ndarray, " n"],
    limit: int,
    s: Schedule,
    state: Int64[ndarray, " 1"],
) -> tuple[int, int]:
    """Return a family and up to which op to keep it, near a schedule; -1 for no change."""
    n, draw = len(nodes.seconds), _random(state)
    num_calls = s.position[n - 1] + 1
    place = _fullest(s, num_calls)
    if s.live[place] > limit or draw < 0.15:
        if _random(state) < 0.5 or s.live[place] <= limit:
            place = int(_random(state) * num_calls)
            for _ in range(num_calls):  # the next place over the limit
                if s.live[place] > limit:
                    break
                place = place + 1 if place + 1 < num_calls else 0
        if draw < 0.55:
            r = _pick(nodes, f, s, place, state)
            if r < 0:
                return -1, n
            return f.family[r], max(_stage(s, n, place) - int(_random(state) * 2), f.maker[r])
    if draw < 0.8:
        family = int(_random(state) * len(f.seconds))
        for _ in range(len(f.seconds)):  # the next one that is made twice
            if kept[f.member[f.member_ptr[family]]] < n:
                return family, n
            family = family + 1 if family + 1 < len(f.seconds) else 0
        return -1, n
    r = int(_random(state) * len(f.tensor))
    t = f.tensor[r]
    uses = nodes.use_ptr[t + 1] - nodes.use_ptr[t]
    if uses == 0:
        return -1, n
    reader = nodes.use_op[nodes.use_ptr[t] + int(_random(state) * uses)]
    at = reader if s.stage[reader] == n or _random(state) < 0.5 else s.stage[reader]
    return f.family[r], max(at - 1, f.maker[r])


@kernel
def annealed(
    nodes: Nodes,
    f: Families,
    kept: Int64[ndarray, " n"],
    limit: int,
    rounds: int,
    seed: int,
    s: Schedule,
) -> None:
    """Improve retention intervals in place; see the docstring of `search`.

    Args:
        nodes: The ops.
        f: Their families.
        kept: Where to start; the best found that fits, if any does, else the nearest.
        limit: Bytes, less residual ones.
        rounds: Schedules to try.
        seed: Of the random moves.
        s: Scratch.
    """
    n, state = len(nodes.seconds), np.array([1 + (seed * 7919 + 12345) % 2147483645])
    usual = max(f.seconds.sum() / len(f.seconds), 1e-300)
    price = usual * 20.0 / max(limit, 1)  # seconds per byte over the limit
    changed, before = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    best = kept.copy()
    seconds, peak, excess, late = evaluate(nodes, kept, limit, s)
    best_over, best_seconds = excess + late * 1e30, seconds
    over = (max(0, peak - limit) + excess / (10 + n / 10)) * price + late * usual * 100
    for number in range(rounds):
        heat = usual * HOT * (COLD / HOT) ** (number / rounds)
        count = 0
        for _ in range(3 if _random(state) < 0.15 else 1):
            family, last = _move(nodes, f, kept, limit, s, state)
            if family >= 0:
                changed[count] = family
                before[count] = kept[f.member[f.member_ptr[family]]]
                count += 1
                _set(f, kept, family, last)
        was = seconds + over
        one, peak, excess, late = evaluate(nodes, kept, limit, s)
        now_over = (max(0, peak - limit) + excess / (10 + n / 10)) * price + late * usual * 100
        if one + now_over <= was or _random(state) < np.exp((was - one - now_over) / heat):
            seconds, over = one, now_over
            total = excess + late * 1e30
            if total < best_over or (total == best_over and one < best_seconds):
                best_over, best_seconds = total, one
                best[:] = kept
        else:
            for c in range(count - 1, -1, -1):
                _set(f, kept, changed[c], before[c])
            evaluate(nodes, kept, limit, s)
        if number % PATIENCE == 0:
            factor = 1.15 if over > 0 else 1 / 1.1
            price, over = price * factor, over * factor
    kept[:] = best
    _restored(nodes, f, kept, limit, s)


@helper
def _restored(
    nodes: Nodes, f: Families, kept: Int64[ndarray, " n"], limit: int, s: Schedule
) -> None:
    """Keep what is made twice where that fits, the dearest first."""
    n = len(nodes.seconds)
    seconds, _, excess, late = evaluate(nodes, kept, limit, s)
    for family in np.argsort(-f.seconds):
        was = kept[f.member[f.member_ptr[family]]]
        if was == n:
            continue
        _set(f, kept, family, n)
        one, _, now, other = evaluate(nodes, kept, limit, s)
        if now > excess or other > late or one > seconds:
            _set(f, kept, family, was)
        else:
            seconds, excess, late = one, now, other
