"""How much local search a start is worth: work, and when it is given up beside a known plan."""

from __future__ import annotations

from typing import NamedTuple

from pardnn.place.polish.search import search_kernel

#: Ops whose times are computed again, if no budget is given, at most.
WORK = 200_000_000
#: So many per op, and from some 220 ops on at least so many.
WORK_PER_OP, USUAL_WORK = 10_000, 20_000_000
#: Small graphs need less: this times n (n + 20), but at least so much, 0.4 s. Published problems of
#: 100 to 600 ops under a tight limit: with a twentieth of this plans were up to 20 % slower.
WORK_PER_PAIR, LEAST_WORK = 400, 4_000_000
#: Without the JIT, for those who look for a fault in a kernel, as many times less.
PLAIN_PYTHON = 200
#: A round gets no more work than fits in the time left at so many seconds each, ten times what a
#: busy machine takes (0.15 us measured for 1,000 to 50,000 ops).
SECONDS_OF_WORK = 1e-6
#: Times the best plan known, above which the second half of the work is not spent (on zoo models in
#: up to 16 pieces it made plans at most 6 % faster), and none on a second start in large graphs.
NEAR = 1.1
#: How many times as much as the first start the second one of a large graph may gain, as a power of
#: a factor: of BERT, GPT-2 and Llama, 12 layers on 8 and 16 devices, 1.2 to 3.8 times as much. If
#: the first gains next to nothing the second may gain this factor: BERT on 4 devices, 1.02 times.
REACH, LEAST_REACH = 4, 1.05
#: What a later round may gain where memory delayed those before: the second half of the work made
#: the same BERT 1.016 times as fast, in 8 rounds of twice the work, after rounds without any gain.
ROUND = 1.004


def work_for(num_ops: int) -> int:
    """Return the default amount of work, in ops whose times are computed again."""
    pairs = min(USUAL_WORK, WORK_PER_PAIR * num_ops * (num_ops + 20))
    work = min(WORK, max(LEAST_WORK, pairs, WORK_PER_OP * num_ops))
    return work if hasattr(search_kernel, "py_func") else work // PLAIN_PYTHON


class Gains(NamedTuple):
    """What rounds of a search have gained: of each, the seconds before by those after it."""

    rounds: int
    gains: tuple[float, ...] = ()

    def may_reach(self, seconds: float, target: float, more: float) -> bool:
        """Whether so many rounds more, each as good as the better of the last two, get there."""
        known = len(self.gains) >= 2
        return not known or seconds <= target * max(ROUND, *self.gains[-2:]) ** more


def is_far(seconds: float, first: float, then: float, below: float) -> bool:
    """Whether a start is left as it is: far above a polished one, or above what that could gain.

    Args:
        seconds: Of the start.
        first: Of the first start.
        then: Of the first start, polished.
        below: Of the best plan known.
    """
    reach = max(LEAST_REACH, (first / then) ** REACH)
    return seconds > NEAR * then or seconds > reach * below
