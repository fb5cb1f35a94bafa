"""Plans with optimizer state on the host, for steps that do not fit with all of it on devices."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import span_bytes
from pardnn.plan.plan import plan_from_arrays
from pardnn.plan.rewritten.offload import graph_with_host, may_offload
from pardnn.planner.algorithms import cuts_ops
from pardnn.planner.costs import partitioned_costs
from pardnn.planner.offload.cut import decide_cut_offloaded
from pardnn.planner.offload.fewest import fewest
from pardnn.planner.portfolio import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search_log import SearchLog
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.time_limit import check_time


def decide_offloaded(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return a plan with as little state on the host as was found to fit.

    The largest states go first, for they need the fewest copies; how many is found by bisection.
    So on one device a larger limit copies no more. What lies on the host already stays there.

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

    def tried(count: int) -> Outcome | None:
        check_time()
        chosen = {*stays, *movable[:count]}
        try:
            found = on_host(problem, chosen, placing if chosen else names, decide)
        except InfeasibleError:
            if count == len(movable):
                raise
            return None
        problem.log.keep(found, problem.options.objective)
        return found

    best = fewest(tried, len(movable))
    return best._replace(planning_s=time.perf_counter() - started)


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
    return lies_on_host(problem), [op.name for op in free]


def lies_on_host(problem: Problem) -> list[str]:
    """Return the states of the graph that lie on the host because a plan ran that had them there.

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
    step = None if problem.cut is None else dataclasses.replace(problem.cut, cut=graph)
    inner = dataclasses.replace(problem, graph=graph, costs=costs, cut=step, log=log)
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
