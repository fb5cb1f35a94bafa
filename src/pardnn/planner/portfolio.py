"""Run one algorithm or several on a graph, and keep the best outcome."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.plan.plan import PlanArrays
from pardnn.planner.algorithms import ALGORITHMS, SHARDED
from pardnn.planner.sharded import Spread, decide_sharded

Objective = Literal["seconds", "bytes"]
#: A plan so near to the lower bound is optimal, up to rounding: no rival can be faster.
AT_BOUND = 1e-9
#: A plan so near to the lower bound is not polished: it takes seconds, and can gain no more.
NEAR_BOUND = 1e-4


class Outcome(NamedTuple):
    """One algorithm's decision, judged; `plan` is of the partitioned graph if ops are cut."""

    algorithm: str
    plan: PlanArrays
    moved_ops: int
    makespan_s: float
    transfer_bytes: int
    planning_s: float
    spread: Spread | None = None
    notes: tuple[str, ...] = ()


def decide(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    algorithm: str,
    reserve: float,
    seed: int,
    objective: Objective = "seconds",
    best: Outcome | None = None,
) -> Outcome:
    """Run one algorithm and judge its plan under the plan's own order.

    With `best`, a plan that cuts ops is given up where a quick estimate is worse than that.

    Raises:
        InfeasibleError: E301, if it finds no plan that fits.
    """
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of

    if algorithm in SHARDED:
        found = decide_sharded(
            graph,
            cluster,
            costs,
            algorithm=algorithm,
            objective=objective,
            reserve=reserve,
            unless_above=best.makespan_s if best and objective == "seconds" else None,
        )
        judged = (found.makespan_s, found.transfer_bytes, found.planning_s)
        return Outcome(algorithm, found.arrays, 0, *judged, spread=found)
    module, function = ALGORITHMS[algorithm]
    place: Callable = getattr(importlib.import_module(module), function)
    machine = machine_of(costs, cluster)
    started = time.perf_counter()
    decision = place(graph, machine, capacities(cluster, reserve), seed=seed)
    planning = time.perf_counter() - started
    timeline = simulate(graph, machine, decision.plan)
    return Outcome(
        algorithm=algorithm,
        plan=decision.plan,
        moved_ops=decision.moved_ops,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(graph),
        planning_s=planning,
    )


def decide_best(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    names: Iterable[str],
    objective: Objective,
    reserve: float,
    seed: int,
    time_limit: float | None = None,
    improve: bool = False,
    rivals: Iterable[str] = (),
) -> Outcome:
    """Run several algorithms and return the best outcome; its planning time is that of all.

    With `improve` the best two placements are polished, if the time limit has not passed and the
    lower bound leaves room. Then `rivals` are asked, if they may still be faster; they are not
    polished.

    Raises:
        InfeasibleError: E301, of the first algorithm, if none finds a plan that fits.
    """
    best: Outcome | None = None
    placed: list[Outcome] = []
    failure: InfeasibleError | None = None
    notes: list[str] = []
    started = time.perf_counter()
    names = tuple(names)
    for name in names:
        spent = time.perf_counter() - started
        if best is not None and time_limit is not None and spent > time_limit:
            break
        options = {"reserve": reserve, "seed": seed, "objective": objective, "best": best}
        try:
            found = decide(graph, cluster, costs, algorithm=name, **options)
        except InfeasibleError as error:
            failure = failure or error
            continue
        except PardnnError as error:
            if best is None or name not in SHARDED:
                raise
            notes.append(f"{name} was not considered: {error.message}")
            continue
        if found.spread is None:
            placed.append(found)
        if best is None or _score(found, objective) < _score(best, objective):
            best = found
    left = None if time_limit is None else time_limit - (time.perf_counter() - started)
    bound = _bound(graph, cluster, costs) if improve or rivals else 0.0
    is_near = best is not None and best.makespan_s <= bound * (1 + NEAR_BOUND)
    if improve and placed and not is_near and (left is None or left > 0):
        polished = _polished(graph, cluster, costs, placed, reserve, seed, left)
        best = min(best or polished, polished, key=lambda outcome: _score(outcome, objective))
    late = time_limit is not None and time.perf_counter() - started > time_limit
    for rival in () if late else rivals:
        if best is None or best.makespan_s > bound * (1 + AT_BOUND):
            best = _better_of(best, rival, graph, cluster, costs, reserve=reserve, seed=seed)
    if best is None:
        assert failure is not None
        raise failure
    return best._replace(planning_s=time.perf_counter() - started, notes=tuple(notes))


def _bound(graph: Graph, cluster: Cluster, costs: Costs) -> float:
    from pardnn.sim.bounds import lower_bound_seconds
    from pardnn.sim.machine import machine_of

    return lower_bound_seconds(graph.arrays, machine_of(costs, cluster))


def _better_of(
    best: Outcome | None,
    rival: str,
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    reserve: float,
    seed: int,
) -> Outcome | None:
    """Return the faster of a plan and a rival's."""
    try:
        found = decide(graph, cluster, costs, algorithm=rival, reserve=reserve, seed=seed)
    except PardnnError:
        # It is not installed, or finds nothing that fits: no rival.
        return best
    return found if best is None or found.makespan_s < best.makespan_s else best


def _polished(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    placed: list[Outcome],
    reserve: float,
    seed: int,
    time_limit: float | None,
) -> Outcome:
    from pardnn.place.polish.polish import polish_best
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of

    machine = machine_of(costs, cluster)
    # Equal makespans are mostly equal plans: the second start is the next slower one.
    best = {outcome.makespan_s: outcome for outcome in reversed(placed)}
    starts = [best[makespan] for makespan in sorted(best)[:2]]
    plan, origin = polish_best(
        graph,
        machine,
        [outcome.plan for outcome in starts],
        capacities(cluster, reserve),
        seed=seed,
        time_limit=time_limit,
    )
    timeline = simulate(graph, machine, plan)
    return starts[origin]._replace(
        plan=plan,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(graph),
    )


def _score(outcome: Outcome, objective: Objective) -> tuple[float, float]:
    seconds, sent = outcome.makespan_s, float(outcome.transfer_bytes)
    return (seconds, sent) if objective == "seconds" else (sent, seconds)
