"""From a problem to a plan: what is tried, in which parts, and under which limits."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

from pardnn.errors import InfeasibleError, Terminated, UsageError
from pardnn.kernels.compilations import COMPILATIONS
from pardnn.plan.constraints import cutting, hard, placing
from pardnn.plan.plan import Plan
from pardnn.planner.algorithms import AUTO, SHARDED, is_polished, solvers_to_try
from pardnn.planner.finished import finished
from pardnn.planner.kept_state import check_state, with_state
from pardnn.planner.microbatches.cut_pieces import (
    NO_BATCH,
    better_cut_pieces,
    decide_cut_pieces,
)
from pardnn.planner.microbatches.decide import decide_microbatched
from pardnn.planner.offload.placed import decide_offloaded, lies_on_host
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import decide_recomputed
from pardnn.planner.search.log import SearchLog, Watch
from pardnn.planner.search.portfolio import decide_best
from pardnn.planner.search.unlimited import decide_fitting, reused
from pardnn.planner.steering.conflicts import steered, with_constraints
from pardnn.planner.steering.constrained import constrained, refused
from pardnn.planner.steering.preferences import decide_preferred
from pardnn.planner.submesh.decide import (
    better_mixed,
    decide_mixed,
    demanded_parts,
    like_state,
    may_mix,
)
from pardnn.planner.submesh.near import decide_mixed_near, starts_mixed
from pardnn.planner.to_run import algorithms_of
from pardnn.planner.warm_up import warm_up
from pardnn.report.results import PlanResult
from pardnn.time_limit import OutOfTimeError, no_time_limit, time_limit


def make_plan(
    problem: Problem, watch: Watch | None = None, *, keep_best: bool = False
) -> tuple[Plan, PlanResult]:
    """Decide, complete, check.

    Args:
        problem: What to plan.
        watch: Called with the progress of the search.
        keep_best: Whether an interrupt ends the search, and the best plan so far is returned, if
            there is one.

    Raises:
        InfeasibleError: E301, if nothing fits; E303, if constraints cannot hold together.
        InvalidPlanError: E410, if an algorithm broke a rule (a bug in pardnn).
        UsageError: E225, if no such plan can leave state where it is.
        MismatchError: E503, if a tensor in place differs from the graph's.
    """
    cluster, options, num_ops = problem.cluster, problem.options, len(problem.graph.ops)
    if problem.state is not None:
        check_state(problem.graph, cluster, options.reserve, problem.state)
    problem = dataclasses.replace(like_state(problem), log=SearchLog(watch))
    names = algorithms_of(steered(problem))
    polish = _is_polished(problem, num_ops)
    limited = any(device.memory is not None for device in cluster.devices)
    begun, started = COMPILATIONS.begun, time.perf_counter()
    warm_up(names, limited=limited, polished=polish)
    compile_s, compiled = time.perf_counter() - started, COMPILATIONS.begun > begun
    try:
        best = _searched(problem, keep_best)
    except InfeasibleError as error:
        if options.constraints and error.code == "E301":
            raise with_constraints(error, problem) from None
        if problem.state is None or "usable_bytes" not in error.details:
            raise
        raise with_state(error, problem.graph, problem.state) from None
    plan, result = finished(problem, best)
    return plan, dataclasses.replace(result, compile_s=compile_s, compiled=compiled)


def _searched(problem: Problem, keep_best: bool) -> Outcome:
    """Return the best outcome of a search, or of what was done before an interrupt."""
    begin, log, limit = time.perf_counter(), problem.log, problem.options.time_limit
    try:
        with time_limit(limit):
            return decide_preferred(problem, functools.partial(decide_fitting, decide=_decided))
    except OutOfTimeError:
        note = f"{problem.options.algorithm} was cut off by the time limit"
        best = log.best if isinstance(log.best, Outcome) else _in_no_time(problem)
        if best is None:
            raise _no_plan_in_time(problem) from None
        return best._replace(
            planning_s=time.perf_counter() - begin, notes=(*best.notes, f"{note} of {limit:g} s")
        )
    except KeyboardInterrupt as error:
        best = log.best
        if not keep_best or isinstance(error, Terminated) or not isinstance(best, Outcome):
            raise
        spent = time.perf_counter() - begin
        note = f"interrupted after {spent:.3g} s: the best of the plans found until then"
        return best._replace(planning_s=spent, notes=(*best.notes, note))


def _decided(problem: Problem) -> Outcome:
    """Return the best outcome of a problem whose constraints all have to be met.

    Raises:
        InfeasibleError: E301, if nothing fits; E303, if constraints cannot hold together.
    """
    problem = steered(problem)
    pair, pieces = demanded_parts(problem.options), problem.options.microbatches
    try:
        if starts_mixed(problem):
            return decide_mixed_near(problem, best_once, _decided)
        if pair is not None:
            return _inside_submeshes(problem, *pair)
        names = algorithms_of(problem)
        if pieces in (None, 1):
            return _best_of(problem, names)
        if all(name in SHARDED for name in names):
            return decide_cut_pieces(problem, names, _best_of)
        return _microbatched(problem, names)
    except UsageError as error:
        demanded = [each for each in problem.options.constraints if each.kind == "pieces"]
        if error.code != NO_BATCH or not demanded:
            raise
        raise refused(demanded[:1], "cannot hold together", f"\n{error.message}") from None


def _inside_submeshes(problem: Problem, cut: str, placement: str) -> Outcome:
    """Return the best plan of a cut inside submeshes; what is demanded is of its columns."""
    demanded = problem.options.constraints

    def decide(each: Problem, _: Sequence[str]) -> Outcome:
        each = each.with_options(constraints=demanded) if demanded else each
        return decide_mixed(each, cut, placement, best_once)

    free = problem.with_options(constraints=()) if demanded else problem
    return _best_of(free, (f"{cut}*{placement}",), decide)


def _microbatched(problem: Problem, names: Sequence[str]) -> Outcome:
    """Return the best plan of a batch in pieces, of placements and cuts."""
    failure: InfeasibleError | None = None
    best: Outcome | None = None
    try:
        best = decide_microbatched(problem, names, _best_of)
    except InfeasibleError as error:
        failure = error
    if may_mix(problem):
        if not placing(problem.options.constraints):
            best = better_cut_pieces(problem, best, _best_of)
        best = best and better_mixed(problem, best, best_once)
    if best is None:
        assert failure is not None
        raise failure
    return best


def _in_no_time(problem: Problem) -> Outcome | None:
    """Return the best plan of what is quick, where the limit passed without any; None if none."""
    pieces = problem.options.microbatches
    demanded = problem.options.constraints
    if problem.state is not None or (pieces is not None and pieces not in (1, "auto")):
        return None
    if cutting(demanded) or any(each.kind == "pieces" for each in hard(demanded)):
        return None
    with no_time_limit():
        try:
            return decide_best(constrained(problem), AUTO)
        except InfeasibleError:
            return None


def _no_plan_in_time(problem: Problem) -> OutOfTimeError:
    options = problem.options
    tried = (
        "; ".join(dict.fromkeys(each.algorithm for each in problem.log.tried)) or "none completed"
    )
    return OutOfTimeError(
        f"{options.algorithm} found no plan that fits within {options.time_limit:g} s; tried: "
        f"{tried}.\n"
        "Allow more time (--time-limit), or give the devices more memory.",
        details={"time_limit": options.time_limit},
    )


def _is_polished(problem: Problem, num_ops: int) -> bool:
    """Whether local search improves the best plans; it does not see memory under a policy."""
    options = problem.options
    is_timed = options.is_timed and options.policy == "order"
    return is_timed and is_polished(options.algorithm, num_ops)


def _best_of(problem: Problem, names: Sequence[str], decide: Decide | None = None) -> Outcome:
    """Run algorithms on a problem; state may be on the host if the options say so."""
    if problem.options.offload or lies_on_host(problem):
        within = functools.partial(_on_devices, decide=decide)
        return decide_offloaded(problem, names, within)
    return _on_devices(problem, names, decide)


def _on_devices(problem: Problem, names: Sequence[str], decide: Decide | None = None) -> Outcome:
    """Run algorithms on a problem; ops may be called a second time if the options say so."""
    problem, decide = constrained(problem), decide or best_once
    if problem.options.recompute:
        return decide_recomputed(problem, names, decide)
    return decide(problem, names)


def best_once(problem: Problem, names: Sequence[str]) -> Outcome:
    """Run algorithms on a problem, improve and complete what they find."""
    return reused(problem, names, _best_anew)


def _best_anew(problem: Problem, names: Sequence[str]) -> Outcome:
    num_ops = len(problem.graph.ops)
    polish = _is_polished(problem, num_ops)
    is_placing = any(name not in SHARDED for name in names)
    may_solve = polish and is_placing and problem.start is None
    devices = problem.cluster.num_devices
    solvers = solvers_to_try(problem.options.algorithm, num_ops, devices) if may_solve else ()
    return decide_best(problem, names, polish=polish, solvers=solvers)
