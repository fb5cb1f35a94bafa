"""Plans with optimizer state on the host, for steps that do not fit with all of it on devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import span_bytes
from pardnn.place.recompute.search import WORK
from pardnn.plan.plan import plan_from_arrays
from pardnn.plan.rewritten.offload import graph_with_host, may_offload
from pardnn.planner.algorithms import cuts_ops
from pardnn.planner.costs import partitioned_costs
from pardnn.planner.microbatches.best import Best
from pardnn.planner.offload.cut import decide_cut_offloaded
from pardnn.planner.offload.fewest import fewest
from pardnn.planner.outcome import Decide, Outcome, score
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import first_recomputed
from pardnn.planner.search.log import SearchLog
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.time_limit import check_time

#: The part of its work that a search for second calls has beside state on the host.
SHORT_SEARCH = 20


def decide_offloaded(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return a plan with as little state on the host as was found to fit.

    The largest states go first, as they need the fewest copies; bisection finds how many. So on one
    device, a larger limit never copies more. What is on the host already stays there. Where
    ops may be called a second time, too, see `_beside_second_calls`.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if nothing fits either way.
    """
    placing = [name for name in names if not cuts_ops(name)]
    started = time.perf_counter()
    stays, movable = _movable(problem)
    if not placing:
        return decide_cut_offloaded(problem, names, decide, stays)
    if problem.options.recompute and movable:
        return _beside_second_calls(problem, names, decide, stays, movable)

    def tried(count: int) -> Outcome | None:
        check_time()
        chosen = {*stays, *movable[:count]}
        try:
            found = on_host(problem, chosen, placing if chosen else names, decide)
        except InfeasibleError:
            if count == len(movable):
                raise
            return None
        problem.log.keep(found, score(problem, found))
        return found

    best = fewest(tried, len(movable))
    return best._replace(planning_s=time.perf_counter() - started)


def _beside_second_calls(
    problem: Problem, names: Sequence[str], decide: Decide, stays: list[str], movable: list[str]
) -> Outcome:
    """Return the faster of state on the host and second calls, or both combined if neither fits.

    Combined, the smallest number of eighths of the state's bytes goes to the host for which a short
    search for second calls succeeds. For a GPT-2 in half of its memory, a full search found nothing
    faster.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.
        stays: States that are on the host.
        movable: States that may be there, the largest first.

    Raises:
        InfeasibleError: E301, if nothing fits either way.
    """
    placing = [name for name in names if not cuts_ops(name)]
    best = Best(problem)
    best.try_(lambda: decide_offloaded(problem.with_options(recompute=False), names, decide))
    best.try_(lambda: on_host(problem, {*stays}, placing if stays else names, decide))
    if best.found is not None:
        return best.best()
    counts = _eighths(problem, movable)

    def once(inner: Problem, algorithms: Sequence[str]) -> Outcome:
        return decide(inner.with_options(recompute=False), algorithms)

    def short(inner: Problem, algorithms: Sequence[str]) -> Outcome:
        found = first_recomputed(
            inner, algorithms, once, seconds=math.inf, work=WORK // SHORT_SEARCH
        )
        if found is None:
            raise InfeasibleError("no second calls were found")
        return found

    def tried(part: int) -> Outcome | None:
        check_time()
        if part == 0:
            return None
        with contextlib.suppress(InfeasibleError):
            return on_host(problem, {*stays, *movable[: counts[part]]}, placing, short)
        if part < len(counts) - 1:
            return None
        return on_host(problem, {*stays, *movable}, placing, decide)

    found = fewest(tried, len(counts) - 1)
    return found._replace(planning_s=found.planning_s + best.spent)


def _eighths(problem: Problem, movable: Sequence[str]) -> list[int]:
    """Return 0, and how many states make up one eighth of their bytes, two eighths and so on."""
    sizes = {op.name: span_bytes(op.outputs[0]) for op in problem.graph.ops if op.outputs}
    sums = np.cumsum([sizes[name] for name in movable])
    bounds = np.arange(1, 9) / 8 * (sums[-1] if len(sums) else 0)
    return sorted({0, *(np.searchsorted(sums, bounds) + 1).clip(max=len(movable)).tolist()})


def all_on_host(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan with all state on the host that may be there.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits.
    """
    stays, movable = _movable(problem)
    placing = [name for name in names if not cuts_ops(name)]
    if not placing:
        return decide_cut_offloaded(problem, names, decide, stays)
    return on_host(problem, {*stays, *movable}, placing, decide)


def _movable(problem: Problem) -> tuple[list[str], list[str]]:
    """Return the states that lie on the host, and those that may be put there, largest first."""
    held = {} if problem.state is None else problem.state.held
    whole = problem.cut.whole if problem.cut else problem.graph
    known = {op.name for op in may_offload(whole)}  # it tells what the step returns
    free = [op for op in may_offload(problem.graph) if op.name not in held and op.name in known]
    free.sort(key=lambda op: -span_bytes(op.outputs[0]))
    stays = lies_on_host(problem)
    if any(name not in known for name in stays):
        raise InfeasibleError("a state that is on the host has to be on its device")
    return stays, [op.name for op in free]


def lies_on_host(problem: Problem) -> list[str]:
    """Return the states of the graph that are on the host because an earlier plan put them there.

    Args:
        problem: With the state that stays where it is.
    """
    held = {} if problem.state is None else problem.state.held
    there = {name for name, each in held.items() if any(shard.on_host for shard in each.shards)}
    return [op.name for op in problem.graph.ops if op.name in there]


def on_host(problem: Problem, chosen: set[str], names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan with these states on the host.

    Args:
        problem: What to plan.
        chosen: Names of states.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.
    """
    if not chosen:
        return decide(problem, names)
    whole, cluster = problem.graph, problem.cluster
    offload = tuple(op.name for op in whole.ops if op.name in chosen)
    graph = graph_with_host(whole, offload)
    costs = partitioned_costs(whole, graph, cluster, problem.costs)
    moved = sum(op.outputs[0].bytes for op in whole.ops if op.name in chosen)
    note = f"optimizer state on the host: {moved / (1 << 20):.4g} MiB in {len(offload)} tensors"
    log = SearchLog(within=problem.log, part="state on the host, ")
    step = dataclasses.replace(problem.step, cut=graph)
    # Devices that constraints allow are by numbers of ops: `decide` finds those of this graph.
    inner = dataclasses.replace(problem, graph=graph, costs=costs, cut=step, log=log, allowed=None)
    found = decide(inner, names)
    sharded = found.sharded
    plan = plan_from_arrays(graph, found.plan) if sharded is None else sharded.plan
    return found._replace(
        sharded=ShardedPlan(
            plan=dataclasses.replace(plan, offload=offload),
            graph=graph if sharded is None else sharded.graph,
            costs=costs if sharded is None else sharded.costs,
            arrays=found.plan, makespan_s=found.makespan_s, transfer_bytes=found.transfer_bytes,
            planning_s=found.planning_s,
        ),
        notes=(*found.notes, note),
    )  # fmt: skip
