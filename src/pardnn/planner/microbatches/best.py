"""The best of several plans with different numbers of pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from pardnn.errors import InfeasibleError
from pardnn.planner.outcome import Outcome, missing_bytes, score
from pardnn.planner.problem import Problem
from pardnn.time_limit import check_time

#: Numbers of pieces without a better plan after which `auto` tries no more.
PATIENCE = 2
#: Ops of the graph, times pieces, up to which `auto` tries so many pieces.
MOST_OPS_IN_PIECES = 60_000


class TooManyPiecesError(InfeasibleError):
    """No plan with this many pieces is faster than a known one."""


@final
class Best:
    """The best of several outcomes.

    Args:
        problem: What is planned.
        found: A known outcome.

    Attributes:
        found: The best; None before there is one.
        failure: Of the plan that came closest to fitting; the first where none says how many bytes
            it needs.
        worse: How many outcomes since then were no better.
        spent: Planning time of all, seconds.
        failed: Why what was tried last gave no plan; None if it gave one.
    """

    def __init__(self, problem: Problem, found: Outcome | None = None) -> None:
        self.problem, self.found = problem, found
        self.failure: InfeasibleError | None = None
        self.failed: InfeasibleError | None = None
        self.worse = 0
        self.spent = 0.0 if found is None else found.planning_s

    def try_(self, plan: Callable[[], Outcome]) -> bool:
        """Return whether a plan is found and better than those before."""
        check_time()
        self.failed = None
        try:
            outcome = plan()
        except InfeasibleError as error:
            self._note(error)
            self.failed = error
            return False
        self.spent += outcome.planning_s
        is_better = self._is_better(outcome)
        self.found, self.worse = (outcome, 0) if is_better else (self.found, self.worse + 1)
        self.problem.log.keep(outcome, score(self.problem, outcome))
        return is_better

    def _note(self, failure: InfeasibleError) -> None:
        """Keep the failure of the plan that came closest."""
        known = self.failure
        if known is None or missing_bytes(failure) < missing_bytes(known):
            self.failure = failure

    def _is_better(self, outcome: Outcome) -> bool:
        best = self.found
        return best is None or score(self.problem, outcome) < score(self.problem, best)

    @property
    def had_too_many(self) -> bool:
        """Whether what was tried last had too many pieces to be faster."""
        return isinstance(self.failed, TooManyPiecesError)

    @property
    def had_no_room(self) -> bool:
        """Whether what was tried last did not fit: more pieces may."""
        return self.failed is not None and not self.had_too_many

    @property
    def seconds(self) -> float:
        """Of the best outcome; infinite before there is one."""
        return math.inf if self.found is None else self.found.makespan_s

    def take(self, other: Best) -> None:
        """Take over another search's best, if it is better, and its planning time, once."""
        self.spent, other.spent = self.spent + other.spent, 0.0
        if other.failure is not None:
            self._note(other.failure)
        if other.found is not None and self._is_better(other.found):
            self.found = other.found

    def is_done(self, number: int) -> bool:
        """Whether to stop adding pieces: more cost more launches, and planning time."""
        is_many = 2 * number * len(self.problem.graph.ops) > MOST_OPS_IN_PIECES
        return self.had_too_many or self.worse >= PATIENCE or is_many

    def best(self) -> Outcome:
        """Return the best outcome; its planning time is that of all.

        Raises:
            InfeasibleError: E301, of the closest, if there is none.
        """
        if self.found is None:
            assert self.failure is not None
            raise self.failure
        return self.found._replace(planning_s=self.spent)
