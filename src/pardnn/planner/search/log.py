"""What a search has tried, and its best so far: for progress, interrupts and the plan's notes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, final

from pardnn.plan.plan import Tried


class Complete(Protocol):
    """A complete plan of the problem, as `planner.search.portfolio.Outcome` is."""

    @property
    def makespan_s(self) -> float:
        """Simulated, in seconds."""
        ...


#: Told what is tried now, how many plans were tried before, and the seconds of the best one.
Watch = Callable[[str, int, float | None], None]


@final
class SearchLog:
    """What was tried so far.

    Attributes:
        watch: Called when something new is tried; None if nobody watches.
        tried: In this order; a part of a search puts its name before the algorithm.
        best: The best complete plan of the problem; None before there is one.
        score: Of the best plan; see `outcome.score`.
        partitioned_ops: Local ops of the cuts that were tried.
        without_room: Names of cuts of the problem's own graph that do not fit any device.
        check: Called with each complete plan of the problem, which it may refuse by raising.
        least_ratio: Of the cuts so far, the least of simulated to estimated seconds; None: none.
    """

    def __init__(
        self,
        watch: Watch | None = None,
        *,
        within: SearchLog | None = None,
        beside: SearchLog | None = None,
        part: str = "",
    ) -> None:
        """Start a log.

        Args:
            watch: See the attributes.
            within: Of the search that this one is a part of, whose plans are not plans of the
                problem.
            beside: Of another search for the same problem; both spend the same time measuring.
            part: Name of the part.
        """
        self.watch = watch if within is None else within.watch
        self.tried: list[Tried] = [] if within is None else within.tried
        self.best: Complete | None = None if within is None else within.best
        self.score = (math.inf, math.inf) if within is None else within.score
        self.partitioned_ops = 0
        self.without_room: set[str] = set()
        self.check: Callable[[Complete], None] | None = None
        self.least_ratio: float | None = None
        self._part = part if within is None else within._part + part
        other = within or beside
        self._measured_s: list[float] = [] if other is None else other._measured_s

    @property
    def seconds(self) -> float:
        """Of the best complete plan of the problem; infinite before there is one."""
        return math.inf if self.best is None else self.best.makespan_s

    @property
    def measuring_s(self) -> float:
        """Seconds that the whole search has spent timing ops of cuts and pieces."""
        return sum(self._measured_s)

    def timing(self, what: str) -> Callable[[int, int], None]:
        """Return a function to call, from now on, with the number of ops timed and of all.

        Args:
            what: The algorithm that made the plan whose ops are timed.
        """
        begin, spent, at = time.perf_counter(), self._measured_s, len(self._measured_s)
        spent.append(0.0)

        def told(done: int, number: int) -> None:
            spent[at] = time.perf_counter() - begin
            self.trying(f"timing the ops of {what}, {done} of {number}")

        return told

    def trying(self, what: str) -> None:
        """Report what is tried now."""
        if self.watch is not None:
            best_s = None if self.best is None else self.best.makespan_s
            self.watch(self._part + what, len(self.tried), best_s)

    def keep(self, found: Complete, score: tuple[float, float]) -> None:
        """Keep a plan of the problem if it is the best so far, from any part of the search."""
        if self.check is not None:
            self.check(found)
        if self.best is None or score < self.score:
            self.best, self.score = found, score

    def take(self, other: SearchLog) -> None:
        """Take over what another search for the same problem has tried."""
        self.tried[:] = other.tried
        self.partitioned_ops += other.partitioned_ops

    def note_ratio(self, ratio: float) -> None:
        """Note how many times as long as estimated a cut takes, simulated."""
        self.least_ratio = min(ratio, self.least_ratio or ratio)

    def note(self, algorithm: str, makespan_s: float | None, why: str | None = None) -> None:
        """Record how an algorithm did.

        Args:
            algorithm: Its name.
            makespan_s: Of its plan, simulated; None if it made none.
            why: Why it made none.
        """
        self.tried.append(Tried(algorithm=self._part + algorithm, makespan_s=makespan_s, why=why))
