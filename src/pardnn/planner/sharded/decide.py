"""Plans that shard every op over all devices: search, partition, check, simulate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, UsageError, shown
from pardnn.graph.ir import Graph
from pardnn.plan.partitioned_graph import check_batch_is_read_only
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.check_descriptions import check_descriptions
from pardnn.planner.costs import known_costs
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import (
    MANY_LOCAL_OPS,
    ShardedPlan,
    measured,
    plan_of_sharding,
)
from pardnn.planner.sharded.memory import PEAK
from pardnn.planner.sharded.shares import SLACKS, shared_shardings
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.recipes.accumulation import ACCUMULATING, accumulating
from pardnn.shard.recipes.in_pieces import in_pieces
from pardnn.shard.search.tofu import TimedSearch
from pardnn.shard.sharding import Sharding

#: Ops of the graph x devices up to which `auto` considers cuts.
AUTO_LOCAL_OPS = 200_000
#: Likewise, times pieces: up to which `auto`, with a plan in hand, tries cuts in pieces and inside
#: of submeshes. Some 4,000 take a second.
MORE_LOCAL_OPS = 30_000

#: Bytes of traffic per device that a byte of memory is worth, tried one after the other where
#: nothing fits.
MEMORY_PRICES = (1.0, 8.0, 64.0)

#: Times the estimate of the best plan up to which a cut's local ops are measured: of three cuts of
#: a GPT-2 on two CPU ranks estimates were 0.97 to 1.02 times what was measured.
UNMEASURED = 1.1

#: Seconds of measuring after which a search measures no further cut: each takes some ten seconds,
#: once on a machine.
MEASURING_S = 60.0


def can_shard(graph: Graph) -> bool:
    """Whether a graph has shapes and arguments of its calls, as captured graphs do."""
    return any(
        op.arguments is not None and "args" in op.arguments and not op.is_source for op in graph.ops
    )


def may_shard(graph: Graph, cluster: Cluster) -> bool:
    """Whether `auto` also considers sharding the ops of a graph."""
    local_ops = len(graph.ops) * cluster.num_devices
    return cluster.num_devices > 1 and local_ops <= AUTO_LOCAL_OPS and can_shard(graph)


def beaten_at(problem: Problem, makespan_s: float, cut: ShardedPlan | None) -> float | None:
    """Return the estimated seconds from which a cut is skipped; None for no limit.

    If costs are measured, a cut only has estimates until its local ops are measured, so it is
    compared with the best plan's estimate, with room for estimation errors.

    Args:
        problem: What is planned.
        makespan_s: Of the best plan so far; infinite without one.
        cut: That plan, if it is a cut.
    """
    if not problem.options.is_timed or not math.isfinite(makespan_s):
        return None
    if not problem.costs.is_measured:
        return makespan_s
    estimated = None if cut is None else cut.estimated_s
    return UNMEASURED * (makespan_s if estimated is None else estimated)


def decide_sharded(
    problem: Problem, algorithm: str, *, unless_above: float | None = None
) -> ShardedPlan:
    """Search a sharding, partition the graph, and simulate the plan in its own order.

    Args:
        problem: A captured graph, and what it runs on.
        algorithm: A key of `SHARDED`.
        unless_above: Give up if the makespan cannot be below this, because computing alone takes as
            long, or is not below it by an estimate: measuring the local ops takes longer than
            planning.

    Raises:
        UsageError: E213, if the graph does not say what its calls are.
        InfeasibleError: E301, if the plan does not fit, or was given up.
        DescriptionError: E220, if a user's description does not match its operator.
        UnsupportedError: E822 or E823, if an op draws or writes what cannot be cut.
    """
    if not can_shard(problem.graph):
        raise UsageError(
            f"{algorithm} cuts ops, but the graph {shown(problem.graph.name)} does not say what "
            "they call: its ops have no `arguments`.\n"
            "Capture it: pardnn capture FILE.py:FUNCTION -o g.json.",
            code="E213",
        )
    check_batch_is_read_only(problem.graph)  # before an estimate gives the cut up for its seconds
    started = time.perf_counter()
    unchecked = check_descriptions(problem.graph)
    if unless_above is not None and problem.least_cut_s >= unless_above:
        why = f"in any cut each device computes for {problem.least_cut_s:.4g} s"
        raise InfeasibleError(why, details={"estimated_s": problem.least_cut_s})
    found = fitting_plans(problem, algorithm, unless_above=unless_above)
    is_timed = problem.options.is_timed
    best = min(found, key=lambda s: s.makespan_s if is_timed else s.transfer_bytes)
    is_measured = problem.costs.is_measured
    if is_measured and unless_above is not None and best.makespan_s >= unless_above:
        raise InfeasibleError(f"it takes an estimated {best.makespan_s:.4g} s")
    planning = time.perf_counter() - started
    if is_measured:
        best = _measured(problem, algorithm, best, may_give_up=unless_above is not None)
    plan = replace(best.plan, notes=(*best.plan.notes, *unchecked))
    return best._replace(plan=plan, planning_s=planning)


def _measured(
    problem: Problem, algorithm: str, found: ShardedPlan, *, may_give_up: bool
) -> ShardedPlan:
    """Measure a cut's local ops.

    Raises:
        InfeasibleError: E301, if there is another plan, and the search has measured for long.
    """
    log, threads = problem.log, problem.options.threads
    is_late = may_give_up and log.measuring_s >= MEASURING_S
    if is_late and not known_costs(found.graph, problem.cluster, problem.graph, threads=threads):
        raise InfeasibleError(
            f"not measured: other cuts took {log.measuring_s:.0f} s; it takes an estimated "
            f"{found.makespan_s:.4g} s"
        )
    return measured(problem, found, log.timing(algorithm))


def fitting_plans(
    problem: Problem, algorithm: str, *, unless_above: float | None = None
) -> list[ShardedPlan]:
    """Return the plans of an algorithm that fit; `tofu` saves memory before it finds none.

    Args:
        problem: A captured graph, and what it runs on.
        algorithm: A key of `SHARDED`.
        unless_above: Seconds; plans are given up whose devices compute for as long.

    Raises:
        InfeasibleError: E301, for the plan that needs the least, if none fits.
    """
    found: list[ShardedPlan] = []
    failures: list[InfeasibleError] = []
    is_timed = problem.options.is_timed

    def tried(sharding: Sharding) -> bool:
        """Complete a sharding; return whether it is given up for its seconds, in equal parts."""
        seconds = [plan.makespan_s for plan in found if is_timed]
        seconds += [] if unless_above is None else [unless_above]
        try:
            plan = plan_of_sharding(problem, sharding, unless_above=min(seconds, default=None))
            found.append(plan)
        except InfeasibleError as error:
            failures.append(error)
        return is_timed and bool(failures) and _is_slow(failures[-1]) and not sharding.mesh.shares

    is_slow = False  # then the next ones, searched for less memory or fewer bytes, are, too
    for sharding in _shardings(problem, algorithm):
        is_slow = tried(sharding)
        if found and algorithm == "tofu" and found[0].graph.arrays.num_ops > MANY_LOCAL_OPS:
            break
        if is_slow:
            break
    if not found and algorithm == "tofu" and any(map(_exceeded, failures)):
        shared = (each for slack in SLACKS for each in _shared(problem, slack))
        for sharding in itertools.chain(shared, () if is_slow else _priced(problem)):
            if tried(sharding) or found:
                break
    if not found:
        nearest = min(failures, key=lambda error: _exceeded(error) or math.inf)
        problem.log.without_room.update((algorithm,) if PEAK in nearest.details else ())
        raise nearest
    return found


def _exceeded(error: InfeasibleError) -> int | None:
    """Return the peak in bytes of a plan that does not fit; None if that is not the reason."""
    return error.details.get(PEAK)


def _is_slow(error: InfeasibleError) -> bool:
    """Whether a sharding was given up for its estimated seconds."""
    return "estimated_s" in error.details


def _shared(problem: Problem, slack: float) -> Iterator[Sharding]:
    """Yield shardings by shares, of the fewest bytes; none where state stays where it is."""
    if problem.fixed is None:
        yield from shared_shardings(problem, slack, "bytes")


def _priced(problem: Problem) -> Iterator[Sharding]:
    """Yield shardings at a rising price of memory, which take less and less of it.

    The prices do not depend on the limit, so a sharding that fits some limit is also found under
    that limit.
    """
    size = problem.cluster.num_devices
    for price in MEMORY_PRICES:
        yield SHARDED["tofu"](
            problem.graph, problem.cluster, "bytes", memory_price=price * size, fixed=problem.fixed
        )


def _shardings(problem: Problem, algorithm: str) -> Iterator[Sharding]:
    """Yield what an algorithm finds, the most promising first; the simulator decides."""
    search, graph, cluster = SHARDED[algorithm], problem.graph, problem.cluster
    fixed, cut = problem.fixed, problem.cut
    if algorithm != "tofu":
        target = fixed or cluster
        if cut is None and fixed is None:
            yield problem.kept((algorithm, mesh_of(cluster)), lambda: search(graph, cluster))
        elif cut is None:
            yield search(graph, target)
        elif algorithm in ACCUMULATING:
            yield accumulating(algorithm, cut.whole, graph, target)
        else:  # a rule looks at the step, and its pieces follow
            whole = replace(problem, graph=cut.whole, cut=None)
            yield in_pieces(cut.whole, graph, search(cut.whole, whole.fixed or cluster))
        return
    if fixed is None:
        objective = "seconds" if problem.options.is_timed else "bytes"
        yield from shared_shardings(problem, SLACKS[0], objective)
    if problem.options.is_timed:
        limits = [size for size in problem.capacities if size is not None]
        capacity = min(limits, default=None)
        timed = TimedSearch(graph, cluster, problem.costs, fixed=fixed)
        yield timed.within(capacity).sharding
        if capacity is not None:  # the search estimates peaks
            yield timed.within(0.8 * capacity).sharding
    if fixed is None:
        yield problem.kept((algorithm, mesh_of(cluster)), lambda: search(graph, cluster, "bytes"))
    else:
        yield search(graph, cluster, "bytes", fixed=fixed)
