"""The kernels of the search for retention intervals: knapsack, simulated annealing, restoring.

Each records every answer it visits in a front: for each of some hundred ranges of peak bytes, the
fewest seconds found. So answers visited on the way to one limit count for all limits.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.random import random_number
from pardnn.place.recompute.families import Families
from pardnn.place.recompute.problem import Nodes
from pardnn.place.recompute.retention import Schedule, evaluate, evaluate_stale, settle

#: First and last temperature, in seconds of a usual family; how soon what exceeds costs more.
HOT, COLD, PATIENCE = 0.5, 0.005, 100


class Front(NamedTuple):
    """The fewest seconds of second calls found, by peak: answers of row r free r parts of `top`.

    Attributes:
        top: Peak bytes without second calls, less residual ones; at least 1.
        seconds: Fewest found with a peak of the row; infinite where none was found.
        peak: Bytes of that answer.
        kept: That answer: the last op up to which the first result of each op is kept.
        least: Fewest seconds of the row and of all rows of smaller peaks.
    """

    top: int
    seconds: Float64[ndarray, " p"]
    peak: Int64[ndarray, " p"]
    kept: Int32[ndarray, "p n"]
    least: Float64[ndarray, " p"]


@helper
def _record(front: Front, kept: Int64[ndarray, " n"], seconds: float, peak: int) -> None:
    """Enter an answer, if none with a peak of its row or a smaller one is as fast."""
    if peak > front.top:
        return
    rows = len(front.seconds)
    row = (front.top - peak) * (rows - 1) // front.top
    is_smaller = seconds == front.seconds[row] and peak < front.peak[row]
    if seconds >= front.least[row] and not is_smaller:
        return
    front.seconds[row], front.peak[row] = seconds, peak
    front.kept[row] = kept
    for r in range(row, -1, -1):
        if front.least[r] <= seconds:
            break
        front.least[r] = seconds


@kernel
def record(nodes: Nodes, kept: Int64[ndarray, " n"], s: Schedule, front: Front) -> None:
    """Enter an answer in a front, if it is valid and better."""
    seconds, peak, _, late = evaluate(nodes, kept, 0, s)
    if late == 0:
        _record(front, kept, seconds, peak)


@helper
def _set(f: Families, kept: Int64[ndarray, " n"], family: int, last: int, s: Schedule) -> None:
    """Keep the first results of a family up to an op."""
    for m in range(f.member_ptr[family], f.member_ptr[family + 1]):
        kept[f.member[m]] = last
        s.is_stale[f.member[m]] = True


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
    nodes: Nodes, f: Families, kept: Int64[ndarray, " n"], s: Schedule, front: Front
) -> None:
    """Drop the result that frees most bytes per second at the peak, while there is one."""
    n = len(nodes.seconds)
    was_dropped = np.zeros(len(f.seconds), dtype=np.bool_)
    freed = np.zeros(len(f.seconds), dtype=np.int64)
    seconds, peak, _, late = evaluate(nodes, kept, 0, s)
    for _ in range(len(f.seconds)):
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
        _set(f, kept, best, _stage(s, n, place), s)
        seconds, peak, _, late = evaluate_stale(nodes, kept, 0, s)
        if late == 0:
            _record(front, kept, seconds, peak)


@helper
def _pick(nodes: Nodes, f: Families, s: Schedule, place: int, state: Int64[ndarray, " 1"]) -> int:
    """Return a tensor that waits at a place: the better one of two, mostly; -1 if none does."""
    count = 0
    for r in range(len(f.tensor)):
        count += _held(f, s, r, place)
    if count == 0:
        return -1
    first, second = int(random_number(state) * count), int(random_number(state) * count)
    one, other = -1, -1
    for r in range(len(f.tensor)):
        if _held(f, s, r, place):
            one = r if first == 0 else one
            other = r if second == 0 else other
            first, second = first - 1, second - 1
    if random_number(state) < 0.25:
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
    n, draw = len(nodes.seconds), random_number(state)
    num_calls = s.position[n - 1] + 1
    place = _fullest(s, num_calls)
    if s.live[place] > limit or draw < 0.15:
        if random_number(state) < 0.5 or s.live[place] <= limit:
            place = int(random_number(state) * num_calls)
            for _ in range(num_calls):  # the next place over the limit
                if s.live[place] > limit:
                    break
                place = place + 1 if place + 1 < num_calls else 0
        if draw < 0.55:
            r = _pick(nodes, f, s, place, state)
            if r < 0:
                return -1, n
            return f.family[r], max(_stage(s, n, place) - int(random_number(state) * 2), f.maker[r])
    if draw < 0.8:
        family = int(random_number(state) * len(f.seconds))
        for _ in range(len(f.seconds)):  # the next one that is made twice
            if kept[f.member[f.member_ptr[family]]] < n:
                return family, n
            family = family + 1 if family + 1 < len(f.seconds) else 0
        return -1, n
    r = int(random_number(state) * len(f.tensor))
    t = f.tensor[r]
    uses = nodes.use_ptr[t + 1] - nodes.use_ptr[t]
    if uses == 0:
        return -1, n
    reader = nodes.use_op[nodes.use_ptr[t] + int(random_number(state) * uses)]
    at = reader if s.stage[reader] == n or random_number(state) < 0.5 else s.stage[reader]
    return f.family[r], max(at - 1, f.maker[r])


@kernel
def annealed(
    nodes: Nodes,
    f: Families,
    kept: Int64[ndarray, " n"],
    limit: int,
    rounds: int,
    hot: float,
    state: Int64[ndarray, " 1"],
    s: Schedule,
    front: Front,
) -> None:
    """Improve retention intervals by simulated annealing; see the docstring of `search`.

    Args:
        nodes: The ops.
        f: Their families.
        kept: Where to start; overwritten.
        limit: Bytes, less residual ones.
        rounds: Schedules to try.
        hot: First temperature, in seconds of a usual family.
        state: Of the random numbers.
        s: Scratch.
        front: Where answers are entered.
    """
    n = len(nodes.seconds)
    usual = max(f.seconds.sum() / len(f.seconds), 1e-300)
    price = usual * 20.0 / max(limit, 1)  # seconds per byte over the limit
    changed, before = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    seconds, peak, excess, late = evaluate(nodes, kept, limit, s)
    live, position = s.live.copy(), s.position.copy()
    over = (max(0, peak - limit) + excess / (10 + n / 10)) * price + late * usual * 100
    for number in range(rounds):
        heat = usual * hot * (COLD / hot) ** (number / rounds)
        count = 0
        for _ in range(3 if random_number(state) < 0.15 else 1):
            family, last = _move(nodes, f, kept, limit, s, state)
            if family >= 0:
                changed[count] = family
                before[count] = kept[f.member[f.member_ptr[family]]]
                count += 1
                _set(f, kept, family, last, s)
        was = seconds + over
        one, peak, excess, late = evaluate_stale(nodes, kept, limit, s)
        now_over = (max(0, peak - limit) + excess / (10 + n / 10)) * price + late * usual * 100
        if late == 0:
            _record(front, kept, one, peak)
        if one + now_over <= was or random_number(state) < np.exp((was - one - now_over) / heat):
            seconds, over = one, now_over
            live[:], position[:] = s.live, s.position
        else:
            for c in range(count - 1, -1, -1):
                _set(f, kept, changed[c], before[c], s)
            settle(nodes, kept, s)
            s.live[:], s.position[:] = live, position
        if number % PATIENCE == 0:
            factor = 1.15 if over > 0 else 1 / 1.1
            price, over = price * factor, over * factor


@kernel
def restored(
    nodes: Nodes, f: Families, kept: Int64[ndarray, " n"], limit: int, s: Schedule, front: Front
) -> None:
    """Keep results that are made twice if that fits, the most expensive first."""
    n = len(nodes.seconds)
    seconds, peak, excess, late = evaluate(nodes, kept, limit, s)
    for family in np.argsort(-f.seconds):
        was = kept[f.member[f.member_ptr[family]]]
        if was == n:
            continue
        _set(f, kept, family, n, s)
        one, peak, now, other = evaluate_stale(nodes, kept, limit, s)
        if now > excess or other > late or one > seconds:
            _set(f, kept, family, was, s)
            settle(nodes, kept, s)
        else:
            seconds, excess, late = one, now, other
            if late == 0:
                _record(front, kept, one, peak)
