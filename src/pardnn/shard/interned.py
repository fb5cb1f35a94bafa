"""Calls as numbers, and what is known of each: equal calls of a graph are looked at once.

Idea: a call's key is its skeleton and the shapes, so a layer that is repeated costs one look-up per
op. What is kept lives as long as the process, up to a bound.
Complexity: O(size of the arguments) to find a number.
"""

from __future__ import annotations

from typing import Any

from pardnn.errors import PardnnError
from pardnn.shard.analysis import Analysis, analyse
from pardnn.shard.call import Bound, Call, Skeleton, skeleton_of
from pardnn.shard.partition import Piece
from pardnn.shard.registry import Description, description_of
from pardnn.shard.strategy import Reduce, Strategy, cut_in_two

#: Reducers whose partial results are exchanged; loops of others are not cut.
EXCHANGED = frozenset({"sum", "mean", "max", "min", "prod"})

Halves = dict[str, tuple[Strategy, tuple[Piece, ...]]]


class Kept:
    """Interned calls and what is known of them, by number.

    Attributes:
        numbers: By key of `Skeleton.key`.
        calls: The first call of each number.
        skeletons: Of those.
        loops: See `loops_of`.
        analysed: See `analysed`.
        halves: See `halves_of`.
        others: What `cutting` knows.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.numbers: dict[Any, int] = {}
        self.calls: list[Call] = []
        self.skeletons: list[Skeleton] = []
        self.loops: dict[int, tuple[str, ...]] = {}
        self.analysed: dict[int, tuple[Description, Analysis, Bound] | None] = {}
        self.halves: dict[int, Halves] = {}
        self.others: dict[Any, Any] = {}


KEPT = Kept()

#: Entries from which on everything kept is thrown away: a process may plan many graphs.
_MOST = 200_000


def forget() -> None:
    """Throw away all that was kept, as a cold start would find it."""
    vars(KEPT).update(vars(Kept()))


def forget_if_large() -> None:
    """Throw away what was kept if it has grown large. Numbers of calls are not valid after it."""
    if len(KEPT.others) + len(KEPT.calls) > _MOST:
        forget()


def intern_call(call: Call) -> int:
    """Return the number of a call: equal calls have equal numbers, names aside."""
    return intern_skeleton(call, skeleton_of(call.kind, call.args, call.kwargs))


def intern_skeleton(call: Call, skeleton: Skeleton) -> int:
    """Return the number of a call whose skeleton is known."""
    key = skeleton.key(call.shapes, call.dtypes, call.outputs)
    number = KEPT.numbers.get(key)
    return added(key, call, skeleton) if number is None else number


def known_number(key: Any) -> int | None:
    """Return the number of the call with a key of `Skeleton.key`, None if it has none."""
    return KEPT.numbers.get(key)


def added(key: Any, call: Call, skeleton: Skeleton) -> int:
    """Give a call that has none a number."""
    number = KEPT.numbers[key] = len(KEPT.calls)
    KEPT.calls.append(call)
    KEPT.skeletons.append(skeleton)
    return number


def interned(number: int) -> Call:
    """Return the call of a number, with the names of whoever came first."""
    return KEPT.calls[number]


def loops_of(number: int) -> tuple[str, ...]:
    """Return the loops of a call that can be cut, those of reducers nobody exchanges left out.

    A description that does not fit the call counts as none: the op runs whole.
    """
    found = KEPT.loops.get(number)
    if found is None:
        found = KEPT.loops[number] = tuple(
            axis
            for axis, strategy in strategies_of(number).items()
            if all(
                not isinstance(layout, Reduce) or layout.reducer in EXCHANGED
                for layout in strategy.outputs
            )
        )
    return found


def strategies_of(number: int) -> dict[str, Strategy]:
    """Return the basic strategies of a call by loop; a wrong description counts as none."""
    return {axis: strategy for axis, (strategy, _) in halves_of(number).items()}


def halves_of(number: int) -> Halves:
    """Return the strategies of a call by loop, with the pieces of two workers."""
    found = KEPT.halves.get(number)
    if found is None:
        known = analysed(number)
        try:
            found = cut_in_two(*known) if known is not None else {}
        except PardnnError:
            found = {}
        KEPT.halves[number] = found
    return found


def analysed(number: int) -> tuple[Description, Analysis, Bound] | None:
    """Return the analysis of a call, once for all its loops; None if it has none."""
    if number not in KEPT.analysed:
        call = interned(number)
        description = description_of(call.kind)
        try:
            KEPT.analysed[number] = description and (description, *analyse(description, call))
        except PardnnError:
            KEPT.analysed[number] = None
    return KEPT.analysed[number]
