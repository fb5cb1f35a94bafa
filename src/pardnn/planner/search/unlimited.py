"""A search without memory limits first: if its plan obeys them, it is the one to take.

Problem: under a limit each placement is made to fit before local search, which then begins from
slower plans, although local search balances memory, too: of BERT's 12 layers on 16 devices the best
start holds 741 MiB on one device, and what becomes of it 486.

Idea: search as if there were no limit. A plan found so that fits is taken. Of 6 models on 3
clusters under 2 limits, no search under a limit found a faster one; of random graphs of 400 ops,
some were 0.5 % faster. If it does not fit, it is ordered so that it does, and improved from there
by local search under the limits. Only if it is slower than without limits by then is a search under
the limits begun, which takes over those parts of the other that fit. A search that begins far above
the limits is given up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pardnn.errors import InfeasibleError
from pardnn.place.ordering.fit import fit_candidate
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.polish.polish import polish
from pardnn.planner.algorithms import BEST, BEST_WHOLE
from pardnn.planner.microbatches.in_pieces import other_placement
from pardnn.planner.outcome import Decide, Outcome, score, with_plan
from pardnn.planner.problem import Problem
from pardnn.planner.search.log import Complete
from pardnn.sim.engine import run_lists
from pardnn.sim.peak import peaks
from pardnn.time_limit import OutOfTimeError, seconds_left, time_limit

#: Times the limit, up to which the first plan may exceed it: of five models of 12 layers on 16
#: devices it holds 0.9 to 1.5 times twice the least limit, where half of the searches end below it,
#: and 1.6 to 2.7 times the least limit and a tenth, where none does.
FAR = 1.5
#: Times the limit, up to which a plan is ordered so that it fits: Qwen2's 1.004 took no longer,
#: ViT's 1.024 a quarter longer, and local search from there gained nothing in some 8 s.
NEARLY = 1.02
#: Times the seconds without limits, up to which a plan under them needs no search of its own.
CLOSE = 1.02
#: Of the time that is left.
SHARE = 0.4


class _TooLargeError(Exception):
    """The search begins far above the limits."""


def decide_fitting(problem: Problem, decide: Callable[[Problem], Outcome]) -> Outcome:
    """Return the best outcome of a search without limits, if it fits, else of one under them.

    Args:
        problem: What to plan.
        decide: Plans a problem.

    Raises:
        InfeasibleError: As `decide`.
    """
    if not _may_exceed(problem):
        return decide(problem)
    problem = dataclasses.replace(problem, free={})
    free = problem.without_limits()
    free.log.check = functools.partial(_check, problem)
    try:
        with time_limit(SHARE * seconds_left()):
            found = decide(free)
        part = _part(problem, found)
        fitting = found if part <= 1 else _fitted(problem, found, part)
        problem.log.keep(fitting, score(problem, fitting))
        kept = problem.log.best
        if isinstance(kept, Outcome) and kept.makespan_s <= CLOSE * found.makespan_s:
            problem.log.take(free.log)
            return kept
    except (_TooLargeError, OutOfTimeError, InfeasibleError):
        pass
    best, kept = decide(problem), problem.log.best
    if isinstance(kept, Outcome) and score(problem, kept) < score(problem, best):
        return kept._replace(planning_s=best.planning_s)
    return best


def reused(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return what a search of this graph without limits has found, if it fits; or a new outcome.

    Args:
        problem: What to plan, as a whole or in pieces.
        names: Algorithms.
        decide: Runs them.
    """
    if problem.free is None:
        return decide(problem, names)
    key = id(problem.graph), tuple(names)
    _, known = problem.free.get(key, (None, None))
    if known is not None and _part(problem, known) <= 1:
        return known._replace(planning_s=0.0)
    found = decide(problem, names)
    if all(size is None for size in problem.capacities):
        problem.free[key] = problem.graph, found  # the graph stays, so its id is its own
    return found


def _fitted(problem: Problem, found: Outcome, part: float) -> Outcome:
    """Return a placement that nearly fits in an order in which it does, improved from there.

    Args:
        problem: What is planned.
        found: The placement.
        part: How many times its limit the fullest device holds.

    Raises:
        InfeasibleError: E301, if that was not found; of cuts, or far above, it is not looked for.
    """
    made = found.sharded
    is_cut = made is not None and made.plan.partition is not None
    if part > NEARLY or problem.options.objective != "seconds" or is_cut:
        raise InfeasibleError("only placements that nearly fit are ordered so that they do")
    if made is None:
        return _ordered(problem, found)
    return other_placement(problem, found, "local search under the limits", _ordered)


def _ordered(problem: Problem, found: Outcome) -> Outcome:
    graph, machine, usable = problem.graph, problem.machine, problem.capacities
    a, timeline = graph.arrays, run_lists(graph.arrays, machine, found.plan)
    plan = fit_candidate(a, machine, found.plan.place, timeline, usable, first_overwrites(graph))
    if plan is None:
        raise InfeasibleError("no order was found in which this placement fits")
    plan = polish(graph, machine, plan, usable, seed=problem.options.seed, near=True)
    return with_plan(problem, found, plan)


def _may_exceed(problem: Problem) -> bool:
    """Whether there are limits that a search could leave aside at first."""
    options = problem.options
    is_best = options.algorithm in (BEST, BEST_WHOLE) and options.policy == "order"
    is_plain = not (options.recompute or options.offload or options.constraints)
    is_new = problem.start is None and problem.state is None
    is_limited = any(size is not None for size in problem.capacities)
    return is_best and is_plain and is_new and is_limited


def _check(problem: Problem, found: Complete) -> None:
    """Keep a plan that fits; give the search up after one that is far too large."""
    assert isinstance(found, Outcome)
    part = _part(problem, found)
    if part <= 1:
        problem.log.keep(found, score(problem, found))
    if part > FAR:
        raise _TooLargeError


def _part(problem: Problem, found: Outcome) -> float:
    """Return how many times its limit the fullest device holds."""
    graph = problem.graph if found.sharded is None else found.sharded.graph
    return float((peaks(graph.arrays, found.plan) / limits(problem.capacities)).max())
