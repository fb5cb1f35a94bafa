"""The algorithm portfolio: run one algorithm or several, and keep the best outcome.

Every plan is simulated in its own order, whichever algorithm made it; the best of the placements
may be improved by local search (`place.polish`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence

from pardnn.errors import InfeasibleError, PardnnError, UsageError
from pardnn.place.baselines.exact import faster, is_optimal, place_exact
from pardnn.place.decision import Decision
from pardnn.place.infeasible import named_op
from pardnn.place.ordering.low_memory_orders import frugal_alone
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.pardnn import place_pardnn
from pardnn.place.recipes.pipeline import place_pipeline
from pardnn.place.thesis.policy_memory import fit_scheduler, scheduled
from pardnn.plan.constraints import cutting
from pardnn.planner.algorithms import (
    ALGORITHMS,
    BEFORE,
    BEST,
    CUTS,
    RECIPES,
    RULES,
    SHARDED,
    SOLVER_BASED,
    SOLVER_FAILED,
    SOLVER_SHARE,
    algorithms_to_try,
    is_polished,
)
from pardnn.planner.microbatches.suitable import needs_a_near_one, suitable_for
from pardnn.planner.outcome import Outcome, makespan_s, score, with_plan
from pardnn.planner.problem import Problem
from pardnn.planner.search.polished import polished
from pardnn.planner.sharded.decide import beaten_at, decide_sharded
from pardnn.planner.start.near import itself, kept_near
from pardnn.planner.steering.constrained import obeyed
from pardnn.sim.bounds import lower_bound_seconds, work_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.policy_peak import policy_peaks
from pardnn.time_limit import OutOfTimeError, seconds_left

#: A plan so near to the lower bound is optimal, up to rounding: no solver can be faster.
AT_BOUND = 1e-9
#: A plan so near to the lower bound is not polished: it takes seconds, and can gain no more.
NEAR_BOUND = 1e-4
#: Why `Plan.tried` has no plan of an algorithm.
CUT_OFF, NOT_TRIED = "cut off by the time limit", "not tried: the time limit had passed"
FAR_OFF = "not tried: those before it came to far more than a known plan"


def decide(problem: Problem, algorithm: str, *, best: Outcome | None = None) -> Outcome:
    """Run one algorithm and simulate its plan in the plan's own order.

    Args:
        problem: What to plan; the algorithm among its options does not count.
        algorithm: Of `ALGORITHMS`, `SHARDED` or `RECIPES`, or `BEFORE`.
        best: What was found before; a sharded plan is given up if a quick estimate is worse.

    Raises:
        InfeasibleError: E301, if it finds no plan that fits; E302, if an op can run nowhere.
        UsageError: E201, if it cuts ops but an engine with its own scheduler will run them.
    """
    options = problem.options
    if algorithm in SHARDED:
        if options.policy != "order":
            raise UsageError(
                f"{algorithm} cuts ops; an engine under {options.policy} runs whole ones"
            )
        if problem.start is not None:
            return _cut_near(problem, algorithm)
        seconds, cut = (best.makespan_s, best.sharded) if best else (problem.below, None)
        if problem.below < seconds:
            seconds, cut = problem.below, None
        if algorithm == "tofu" and best is None and _is_uneven(problem):
            return _cut_or_alone(problem)
        return _cut(problem, algorithm, beaten_at(problem, seconds, cut))
    started = time.perf_counter()
    try:
        decision = _scheduled(problem, obeyed(problem, _placed(problem, algorithm)))
    except InfeasibleError as error:
        raise named_op(error, problem.graph) from None
    planning = time.perf_counter() - started
    timeline = simulate(problem.graph, problem.machine, decision.plan)
    return Outcome(
        algorithm=algorithm,
        plan=decision.plan,
        moved_ops=decision.moved_ops,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(problem.graph),
        planning_s=planning,
        notes=decision.notes,
        lower_bound_s=decision.lower_bound_s,
    )


def _solved(problem: Problem, algorithm: str) -> Decision:
    """Run a solver-based algorithm, or the best of the others if it fails or proves nothing.

    Raises:
        InfeasibleError: E301, if nothing fits.
        UsageError: E218, if the graph is too large; E219, if the solver is not installed.
    """
    given = (problem.graph, problem.machine, problem.capacities)
    arrays, options, found, why = problem.graph.arrays, problem.options, None, ""
    try:
        if algorithm != "exact":
            return ALGORITHMS[algorithm](*given, seed=options.seed)
        limit = options.time_limit and options.time_limit * SOLVER_SHARE
        found = place_exact(*given, seed=options.seed, time_limit=limit)
        if is_optimal(arrays, problem.machine, found):
            return found
    except PardnnError as error:
        if error.code not in SOLVER_FAILED:
            raise
        why = error.message.splitlines()[0].rstrip(".")
    polish = is_polished(BEST, arrays.num_ops) and options.is_timed
    best = decide_best(problem, algorithms_to_try(BEST, arrays.num_ops), polish=polish)
    if found is not None:
        return faster(arrays, problem.machine, found, best.plan)
    why = f"{algorithm}: {why}; this is the best plan of the other algorithms"
    return Decision(best.plan, best.moved_ops, notes=(why,))


def _cut(problem: Problem, algorithm: str, unless_above: float | None = None) -> Outcome:
    """Run an algorithm that cuts every op."""
    found = decide_sharded(problem, algorithm, unless_above=unless_above)
    simulated = (found.makespan_s, found.transfer_bytes, found.planning_s)
    return Outcome(algorithm, found.arrays, 0, *simulated, sharded=found)


def _cut_near(problem: Problem, algorithm: str) -> Outcome:
    """Return a cut that leaves state as in the start plan, or a new one."""
    anew = dataclasses.replace(problem, start=None)
    fixed = problem.fixed
    if fixed is None:
        why = (
            "planned from scratch, since the start plan does not cut this state over these devices"
        )
        return _cut(anew, algorithm)._replace(notes=(why,))
    number = len(fixed.layouts)
    try:
        note = f"started from a plan: {number} state tensors keep their cut"
        return _cut(problem, algorithm)._replace(notes=(note,))
    except InfeasibleError as error:
        why = f"planned from scratch, since near the start plan {error.message.splitlines()[0]}"
        return _cut(anew, algorithm)._replace(notes=(why,))


def _is_uneven(problem: Problem) -> bool:
    """Whether devices differ and seconds count: equal shares would wait for the slowest."""
    devices = problem.cluster.devices
    if cutting(problem.options.constraints):
        return False
    unlike = len({(device.type, device.memory, device.speed) for device in devices}) > 1
    return unlike and problem.options.is_timed and problem.state is None


def _cut_or_alone(problem: Problem) -> Outcome:
    """Return `tofu`'s plan, or a single device's if it is faster or the only one that fits.

    Raises:
        InfeasibleError: E301, if neither fits.
    """
    try:
        alone = decide(problem, "single")
    except InfeasibleError:
        return _cut(problem, "tofu")
    try:
        cut = _cut(problem, "tofu")
    except InfeasibleError as error:
        why = error.message.splitlines()[0]
    else:
        if cut.makespan_s <= alone.makespan_s:
            return cut
        why = f"with equal shares on all devices, a step takes {cut.makespan_s:.4g} s"
    return alone._replace(
        notes=(f"tofu keeps everything on the fastest device that can hold it: {why}",)
    )


def _placed(problem: Problem, algorithm: str) -> Decision:
    """Run an algorithm that gives each op one device."""
    graph, machine, usable = problem.graph, problem.machine, problem.capacities
    if algorithm == BEFORE:
        return Decision(itself(problem))
    if algorithm == "pardnn":
        known = problem.known if problem.before else None
        return place_pardnn(graph, machine, usable, known=known, below=problem.below)
    if algorithm in RECIPES:
        # Who asks for a recipe means all devices; of steps in a row each works on another one.
        few = problem.options.algorithm != algorithm and problem.options.objective != "period"
        return place_pipeline(
            problem.step, machine, usable, algorithm, few=few, below=problem.below
        )
    if algorithm in SOLVER_BASED and problem.options.algorithm == algorithm:
        return _solved(problem, algorithm)
    return ALGORITHMS[algorithm](graph, machine, usable, seed=problem.options.seed)


def _scheduled(problem: Problem, decision: Decision) -> Decision:
    """Return a decision that also fits under the scheduler that will run it.

    Raises:
        InfeasibleError: E301, if none was found near it.
    """
    policy, place = problem.options.policy, decision.plan.place
    if policy == "order":
        return decision
    a, machine, usable = problem.graph.arrays, problem.machine, problem.capacities
    peaks = policy_peaks(a, place, len(usable), scheduled(a, machine, place, policy))
    if bool((peaks <= limits(usable)).all()):
        return decision
    pins = problem.known.pins
    found = fit_scheduler(problem.graph, machine, place, usable, policy, pins=pins)
    if found is None:
        raise InfeasibleError(
            f"no placement was found that fits under {policy}: in the one that fits in its own "
            f"order, devices hold up to {max(peaks.tolist())} bytes under {policy}.\n"
            "Give devices more memory, or run the plan in its own order."
        )
    return found._replace(moved_ops=decision.moved_ops + found.moved_ops)


def decide_best(
    problem: Problem,
    names: Iterable[str],
    *,
    polish: bool = False,
    solvers: Iterable[str] = (),
) -> Outcome:
    """Run several algorithms and return the best outcome; its planning time is that of all.

    Args:
        problem: What to plan; the algorithm among its options does not count.
        names: Algorithms to run, most promising first. After the time limit the rest is skipped if
            there is a plan; if there is none yet, the quick ones still run.
        polish: Improve the best two placements by local search, if the time limit has not passed
            and the lower bound leaves room.
        solvers: Algorithms to run after that, if they may still be faster; not polished.

    Raises:
        InfeasibleError: E301, of the first algorithm, if none finds a plan that fits.
        OutOfTimeError: E710, if none did and some were cut off by the time limit.
    """
    started = time.perf_counter()
    names = suitable_for(problem, tuple(names))
    best, placed, notes, failure = _tried(problem, names)
    bound = _bound(problem) if polish or solvers else 0.0
    is_near = best is not None and score(problem, best)[0] <= bound * (1 + NEAR_BOUND)
    if polish and placed and not is_near and seconds_left() > 0:
        problem.log.trying("local search")
        found = [polished(problem, placed)]
        if problem.options.objective == "period":
            found.append(polished(problem, [*placed, *found], by_period=True))
        best = min([best or found[0], *found], key=functools.partial(score, problem))
        problem.log.keep(best, score(problem, best))
    for solver in solvers:
        if best is None or score(problem, best)[0] > bound * (1 + AT_BOUND):
            best = _better_of(best, problem, solver)
    if best is None:
        assert failure is not None
        raise failure
    best = _near_start(problem, _frugal(problem, best))
    return best._replace(planning_s=time.perf_counter() - started, notes=(*best.notes, *notes))


def _bound(problem: Problem) -> float:
    """Return a lower bound on the seconds of any placement, for one step or per step of many."""
    if problem.options.objective == "period":  # steps overlap, so no path counts
        return work_seconds(problem.machine)
    return lower_bound_seconds(problem.graph.arrays, problem.machine)


def _frugal(problem: Problem, best: Outcome) -> Outcome:
    """Return a one-device plan in the order that needs less memory; others are unchanged."""
    is_cut, is_own = best.sharded is not None, problem.options.policy == "order"
    plan = best.plan if is_cut or not is_own else frugal_alone(problem.graph.arrays, best.plan)
    return best if plan is best.plan else with_plan(problem, best, plan)


def _near_start(problem: Problem, best: Outcome) -> Outcome:
    """Return an outcome that is as fast but closer to the start plan; itself if there is none."""
    if problem.start is None or problem.start.partition is not None or best.sharded is not None:
        return best
    plan, note = kept_near(problem, best.plan)
    return with_plan(problem, best, plan)._replace(notes=(*best.notes, note))


def _tried(
    problem: Problem, names: Sequence[str]
) -> tuple[Outcome | None, list[Outcome], list[str], PardnnError | None]:
    """Return the best outcome, placements to polish, what was not considered, a failure."""
    best: Outcome | None = None
    placed, notes = list[Outcome](), list[str]()
    failure: PardnnError | None = None
    for name in names:
        if best is not None and seconds_left() <= 0:
            problem.log.note(name, None, NOT_TRIED)
            continue
        if not placed and name != names[0] and needs_a_near_one(problem, name):
            problem.log.note(name, None, FAR_OFF)
            continue
        try:
            problem.log.trying(name)
            found = decide(problem, name, best=best)
        except OutOfTimeError as error:
            problem.log.note(name, None, CUT_OFF)
            failure = error
            continue
        except InfeasibleError as error:
            problem.log.note(name, None, error.message.splitlines()[0])
            failure = error if failure is None or names[0] == BEFORE else failure
            continue
        except PardnnError as error:
            if name not in SHARDED or (best is None and failure is None):
                raise
            problem.log.note(name, None, error.message.splitlines()[0])
            if name not in (*CUTS, *RULES):  # one of them says nothing of the step
                notes.append(f"{name} was not considered: {error.message}")
            continue
        if found.sharded is None and found.makespan_s < problem.below:
            placed.append(found)
        problem.log.note(name, makespan_s(problem, found))
        if best is None or score(problem, found) < score(problem, best):
            best = found
            problem.log.keep(found, score(problem, found))
    return best, placed, notes, failure


def _better_of(best: Outcome | None, problem: Problem, solver: str) -> Outcome | None:
    """Return the faster of an outcome and what a solver-based algorithm finds."""
    if seconds_left() <= 0:
        problem.log.note(solver, None, NOT_TRIED)
        return best
    try:
        problem.log.trying(solver)
        found = decide(problem, solver)
    except OutOfTimeError:
        problem.log.note(solver, None, CUT_OFF)
        return best
    except PardnnError as error:
        # The solver is not installed, or finds nothing that fits; a crash is worth a word.
        if best is None or error.code not in SOLVER_FAILED:
            return best
        note = f"{solver} was not considered: {error.message.splitlines()[0]}"
        return best._replace(notes=(*best.notes, note))
    is_better = best is None or score(problem, found) < score(problem, best)
    return found if is_better else best
