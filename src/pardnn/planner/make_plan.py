"""From a problem to a complete, checked plan and its figures."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import numpy as np

from pardnn.errors import InfeasibleError, Terminated, UsageError, shown
from pardnn.gc_pause import collector_paused
from pardnn.kernels.compilations import COMPILATIONS
from pardnn.plan.check import check_plan
from pardnn.plan.constraints import cutting, hard, placing
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, Predicted, plan_from_arrays
from pardnn.plan.state_in_place import check_state_kept
from pardnn.planner.algorithms import (
    AUTO,
    BEFORE,
    BEST,
    BEST_WHOLE,
    CUTS,
    OF_PERIOD,
    RULES,
    SHARDED,
    SMALL_OPS,
    STAGED,
    algorithms_to_try,
    is_polished,
    mixed_parts,
    solvers_to_try,
)
from pardnn.planner.costs import communication_ratio
from pardnn.planner.kept_state import check_state, kept, kind_of_plan, with_state
from pardnn.planner.microbatches.cut_pieces import (
    NO_BATCH,
    better_cut_pieces,
    decide_cut_pieces,
)
from pardnn.planner.microbatches.decide import decide_microbatched
from pardnn.planner.offload.placed import decide_offloaded, lies_on_host
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.portfolio import decide_best
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import decide_recomputed
from pardnn.planner.search_log import SearchLog, Watch
from pardnn.planner.sharded.decide import can_shard, may_shard
from pardnn.planner.steering.conflicts import steered, with_constraints
from pardnn.planner.steering.constrained import constrained, refused
from pardnn.planner.steering.preferences import decide_preferred
from pardnn.planner.submesh.decide import better_mixed, decide_mixed, may_mix
from pardnn.planner.warm_up import warm_up
from pardnn.report.results import PlanResult
from pardnn.sim.bounds import degree_of_parallelism, lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of, serial_seconds
from pardnn.sim.peak import peaks
from pardnn.sim.period import period
from pardnn.sim.policy_peak import policy_peaks
from pardnn.time_limit import OutOfTimeError, no_time_limit, time_limit
from pardnn.version import __version__


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
    problem = dataclasses.replace(problem, log=SearchLog(watch))
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
            return decide_preferred(problem, _decided)
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
    algorithm, pieces = problem.options.algorithm, problem.options.microbatches
    pair = mixed_parts(algorithm)
    try:
        if pair is not None:
            return _best_of(
                problem, (algorithm,), lambda each, _: decide_mixed(each, *pair, best_once)
            )
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


def _microbatched(problem: Problem, names: Sequence[str]) -> Outcome:
    """Return the best plan of a batch in pieces, of placements and cuts."""
    failure: InfeasibleError | None = None
    best: Outcome | None = None
    try:
        best = decide_microbatched(problem, names, _best_of)
    except InfeasibleError as error:
        failure = error
    if may_mix(problem):
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
    num_ops = len(problem.graph.ops)
    polish = _is_polished(problem, num_ops)
    is_placing = any(name not in SHARDED for name in names)
    may_solve = polish and is_placing and problem.start is None
    devices = problem.cluster.num_devices
    solvers = solvers_to_try(problem.options.algorithm, num_ops, devices) if may_solve else ()
    return decide_best(problem, names, polish=polish, solvers=solvers)


def _may_cut(problem: Problem) -> bool:
    """Whether a plan may cut ops; an engine with its own scheduler runs whole ones."""
    return problem.options.policy == "order" and may_shard(problem.graph, problem.cluster)


def _pipelines(problem: Problem) -> tuple[str, ...]:
    """Return the pipelines of the whole batch that `auto` tries."""
    options, graph = problem.options, problem.graph
    is_best = options.algorithm in (BEST, BEST_WHOLE) and problem.cluster.num_devices > 1
    is_plain = not (options.recompute or options.offload) and options.policy == "order"
    if not (is_best and is_plain and len(graph.ops) <= SMALL_OPS):
        return ()
    in_a_row = OF_PERIOD if options.objective == "period" else ()
    return (*(STAGED if can_shard(graph) else ()), *in_a_row)


def _near_start(problem: Problem) -> tuple[str, ...]:
    """Return the algorithms to run near a plan to start from."""
    algorithm, start = problem.options.algorithm, problem.start
    if problem.options.objective == "period":
        raise UsageError(
            "plans that start from another plan are compared by makespan only, not yet by "
            "period; use the objective seconds."
        )
    cuts = ("tofu",) if algorithm not in SHARDED else (algorithm,)
    return cuts if start is not None and start.partition is not None else (BEFORE, "pardnn")


def algorithms_of(problem: Problem) -> tuple[str, ...]:
    """Return the algorithms to run: those whose plans can leave state where it is.

    Raises:
        UsageError: E225, if the requested algorithm makes no such plans.
    """
    graph, state, algorithm = problem.graph, problem.state, problem.options.algorithm
    if problem.start is not None:
        return _near_start(problem)
    demanded = problem.options.constraints
    names, constraints = algorithms_to_try(algorithm, len(graph.ops)), placing(demanded)
    laid_out = [each for each in hard(demanded) if each.kind == "layout"]
    if state is not None and laid_out:
        raise UsageError(
            f"state stays where it is, and constraint {shown(str(laid_out[0]))} sets a layout: "
            "leave out one of them.",
            code="E225",
        )
    if cutting(demanded):
        return (algorithm,) if algorithm in SHARDED else ("tofu",)
    kind = None if state is None else kind_of_plan(graph, state)
    if kind == "cut" and constraints:
        raise UsageError(
            f"the state is cut over all devices, and constraint {str(constraints[0])!r:.120} "
            "places whole ops, which moves the state.\nPlan without constraints.",
            code="E225",
        )
    if kind == "cut":
        names = names if algorithm in SHARDED else ("tofu",)
    elif algorithm == BEST and kind is None and not constraints and _may_cut(problem):
        names = (*names, "tofu", *CUTS, *RULES)
    if kind is None and not constraints:
        names = (*names, *_pipelines(problem))
    is_free = algorithm == BEST or mixed_parts(algorithm)  # these tell for themselves
    if kind is not None and not is_free and (algorithm in SHARDED) != (kind == "cut"):
        cuts, other = ("cuts", "auto-whole") if kind == "whole" else ("places", "tofu")
        lies = "whole on single devices" if kind == "whole" else "cut over all devices"
        raise UsageError(
            f"{algorithm} {cuts} ops, but the state is {lies}: no such plan leaves it where it "
            "is.\n"
            f"Use {other}, or auto.",
            code="E225",
        )
    if state is not None and algorithm in (BEST, BEST_WHOLE) and kind != "cut":
        return (names[0], BEFORE, *names[1:])
    return names


@collector_paused()
def finished(problem: Problem, outcome: Outcome) -> tuple[Plan, PlanResult]:
    """Return the checked plan of an outcome, with its metadata, and its figures.

    Args:
        problem: What was planned.
        outcome: What an algorithm decided.

    Raises:
        InvalidPlanError: E410, if it breaks a rule.
    """
    result = _measure(problem, outcome)
    graph, options, sharded = problem.graph, problem.options, outcome.sharded
    plan = dataclasses.replace(
        plan_from_arrays(graph, outcome.plan) if sharded is None else sharded.plan,
        versions={"pardnn": __version__},
        cluster=problem.cluster,
        algorithm=outcome.algorithm,
        constraints=options.constraints or None,
        objective=options.objective,
        seed=options.seed,
        reserve=options.reserve,
        predicted=Predicted(
            makespan_s=result.makespan_s,
            peak_bytes=result.peak_bytes,
            transfer_bytes=result.transfer_bytes,
            costs=result.costs,
        ),
        notes=result.notes,
        tried=tuple(problem.log.tried) if len(problem.log.tried) > 1 else (),
    )
    check_plan(graph, plan, problem.cluster)
    if problem.state is not None:
        check_state_kept(graph, plan, problem.state, problem.cluster)
    # After the check, which would compute every op's digest once more to compare the fingerprint.
    return stamped(plan, graph), result


def _measure(problem: Problem, outcome: Outcome) -> PlanResult:
    """Return the figures of an outcome: of the partitioned graph, where ops are sharded."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    machine, sharded = problem.machine, outcome.sharded
    serial = serial_seconds(machine_of(costs, cluster))
    if sharded is None:
        bound = lower_bound_seconds(graph.arrays, machine, problem.capacities)
        bound = max(bound, outcome.lower_bound_s)
    else:  # a sharded op may take a k-th part of its time
        bound = serial / cluster.num_devices
        graph, costs = sharded.graph, sharded.costs
        machine = machine_of(costs, cluster)
    timeline = simulate(graph, machine, outcome.plan)
    rows = zip(cluster.devices, np.diff(outcome.plan.order_ptr).tolist(), strict=True)
    idle = [device.name for device, ops in rows if not ops]
    notes = [*outcome.notes, *(sharded.plan.notes if sharded else ())]
    notes += [f"without ops: {', '.join(idle)}"] if idle else []
    stays = 0 if problem.state is None else len(kept(problem.graph, problem.state))
    notes += _policy_notes(problem, outcome)
    notes += [f"state tensors that stay where they are: {stays}"] if stays else []
    return PlanResult(
        algorithm=outcome.algorithm,
        num_devices=cluster.num_devices,
        makespan_s=outcome.makespan_s,
        period_s=period(graph.arrays, machine, outcome.plan).seconds,
        lower_bound_s=bound,
        gap=max(0.0, outcome.makespan_s / bound - 1) if bound > 0 else 0.0,  # both are rounded
        serial_s=serial if np.isfinite(serial) else None,
        peak_bytes=tuple(peaks(graph.arrays, outcome.plan).tolist()),
        capacity_bytes=tuple(problem.capacities),
        busy_s=tuple(timeline.busy(outcome.plan.place, cluster.num_devices).tolist()),
        transfer_bytes=outcome.transfer_bytes,
        planning_s=outcome.planning_s,
        moved_ops=outcome.moved_ops,
        dop=degree_of_parallelism(graph.arrays, machine),
        ccr=communication_ratio(graph.arrays, costs, cluster),
        costs=costs.source,
        notes=tuple(notes),
    )


def _policy_notes(problem: Problem, outcome: Outcome) -> list[str]:
    """Return what the plan does under the engine's own scheduler."""
    policy, place = problem.options.policy, outcome.plan.place
    if policy == "order":
        return []
    a, k = problem.graph.arrays, problem.cluster.num_devices
    timeline = simulate(problem.graph, problem.machine, outcome.plan, policy)
    peaks = ", ".join(map(str, policy_peaks(a, place, k, timeline).tolist()))
    return [f"under {policy}: {timeline.makespan:.6g} s, simulated peaks {peaks} bytes"]
