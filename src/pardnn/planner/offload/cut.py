"""Plans that cut ops, with the devices' shards of optimizer state on the host.

Problem: with state on the host the graph has copies of it, and a cut of that graph would have to
know what a copy is.
Idea: a cut plan is a placement of its local ops, in which each shard of a state is a separate
source. So the plan is made first, for more memory than there is, once with as much more as its
state takes: a plan with second calls uses all the memory it gets, and would not fit otherwise. Then
the shards of as few states as needed go to the host, and each device's order gets the copies right
before the first op that reads the shard and right after the last that writes it.
Complexity: a plan for each of a few limits, and for each a simulation for each step of a bisection.
Deviations: a shard that is sent as it is stays on its device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import FROM_HOST, TO_HOST, Graph, span_bytes
from pardnn.place.colocation import closed_arrays
from pardnn.place.infeasible import infeasible
from pardnn.place.ordering.fit import fits
from pardnn.plan.plan import Plan, on_devices, plan_arrays, planned_graph
from pardnn.plan.rewritten.offload import may_offload
from pardnn.planner.offload.fewest import fewest
from pardnn.planner.outcome import Decide, Outcome, missing_bytes, score
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import LARGER, rewritten_costs
from pardnn.planner.search.log import SearchLog
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.time_limit import check_time

#: Of an equal share of the state on each device: stages hold unequal shares of it.
PART = 0.9


def decide_cut_offloaded(
    problem: Problem, names: Sequence[str], decide: Decide, stays: Iterable[str] = ()
) -> Outcome:
    """Return the fastest plan found, with as little state on the host as makes each fit.

    Args:
        problem: What to plan.
        names: Algorithms that cut ops.
        decide: Runs them on a problem, and returns the best outcome.
        stays: States that are on the host.

    Raises:
        InfeasibleError: E301, of the plan that came nearest, if none fits either way.
    """
    started, kept = time.perf_counter(), set(stays)
    best: Outcome | None = None
    failures: list[InfeasibleError] = []
    try:
        best = None if kept else decide(problem, names)
    except InfeasibleError as error:
        failures.append(error)
    for base in _larger(problem, names, decide) if best is None else ():
        try:
            found = _least(problem, base, kept)
        except InfeasibleError as error:
            failures.append(error)
            continue
        if best is None or found.makespan_s < best.makespan_s:
            best = found
            problem.log.keep(found, score(problem, found))
    if best is None:
        none = InfeasibleError("no cut for more memory leaves the state where it is")
        raise min(failures, key=missing_bytes, default=none)
    return best._replace(planning_s=time.perf_counter() - started)


def _larger(problem: Problem, names: Sequence[str], decide: Decide) -> Iterator[Outcome]:
    """Yield plans for more memory than there is, to be made to fit by moving state to the host."""
    seen: list[Plan] = []
    for memories in _larger_limits(problem):
        check_time()
        devices = (
            dataclasses.replace(device, memory=memory)
            for device, memory in zip(problem.cluster.devices, memories, strict=True)
        )
        larger = dataclasses.replace(problem.cluster, devices=tuple(devices))
        log = SearchLog(within=problem.log, part="cut for a larger limit, ")
        try:
            found = decide(dataclasses.replace(problem, cluster=larger, log=log), names)
        except InfeasibleError:
            continue
        assert found.sharded is not None
        plan = dataclasses.replace(found.sharded.plan, cluster=None)
        if plan not in seen:
            seen.append(plan)
            yield found


def _larger_limits(problem: Problem) -> list[list[int | None]]:
    """Return limits of each device: with as much more as its state takes, and multiples."""
    memories = [device.memory for device in problem.cluster.devices]
    state = sum(span_bytes(op.outputs[0]) for op in may_offload(problem.graph))
    more = int(PART * state / problem.cluster.num_devices)
    multiples: list[list[int | None]] = [
        [None if m is None or factor is None else int(m * factor) for m in memories]
        for factor in LARGER
    ]
    return [[None if m is None else m + more for m in memories], *multiples]


def _least(problem: Problem, base: Outcome, kept: set[str]) -> Outcome:
    """Return a plan with as few states on the host as it needs to fit, largest first.

    Raises:
        InfeasibleError: E301, if it does not fit with all of them there.
    """
    assert base.sharded is not None
    shards = _shards(problem, base.sharded.plan)
    size = {op.name: span_bytes(op.outputs[0]) for op in problem.graph.ops if op.name in shards}
    stays = set[str]() if problem.state is None else problem.state.held.keys()
    free = sorted(shards.keys() - stays, key=lambda name: (-size[name], name))

    def tried(count: int) -> Outcome | None:
        check_time()
        chosen = {each for name in (*kept, *free[:count]) for each in shards.get(name, ())}
        found = _with_copies(problem, base, chosen)
        assert found.sharded is not None
        is_fitting = fits(found.sharded.graph.arrays, found.plan, problem.capacities)
        if not is_fitting and count == len(free):
            local = found.sharded.graph
            how = ", with optimizer state on the host,"
            group = closed_arrays(local).group
            raise infeasible(local, found.plan, problem.capacities, group, how=how)
        return found if is_fitting else None

    return fewest(tried, len(free))


def _shards(problem: Problem, plan: Plan) -> dict[str, list[str]]:
    """Return the local sources of each state that may be on the host, by the state's name."""
    sent = {message.tensor for message in plan.messages}
    whole = problem.cut.whole if problem.cut else problem.graph
    movable = {op.name for op in may_offload(whole)}  # the whole graph tells what a step returns
    found: dict[str, list[str]] = {}
    for op in may_offload(on_devices(problem.graph, plan)):
        name = op.name.rpartition("@")[0]
        if op.outputs[0].name in sent:
            movable.discard(name)
        found.setdefault(name, []).append(op.name)
    return {name: ops for name, ops in found.items() if name in movable}


def _with_copies(problem: Problem, base: Outcome, chosen: set[str]) -> Outcome:
    """Return a cut plan with these local sources on the host, simulated."""
    sharded = base.sharded
    assert sharded is not None
    if not chosen:
        return base
    there = on_devices(problem.graph, sharded.plan)
    offload = tuple(op.name for op in there.ops if op.name in chosen)
    plan = dataclasses.replace(sharded.plan, offload=offload)
    local = planned_graph(problem.graph, plan)
    plan = ordered(plan, local)
    known = rewritten_costs(
        there, _of(sharded.costs, sharded.graph, there), plan, problem.cluster, local
    )
    arrays = plan_arrays(local, plan)
    timeline = simulate(local, machine_of(known, problem.cluster), arrays)
    sent, seconds = timeline.transfer_bytes(local), timeline.makespan
    moved = sum(op.outputs[0].bytes for op in there.ops if op.name in chosen)
    note = f"optimizer state on the host: {moved / (1 << 20):.4g} MiB in {len(offload)} shards"
    return base._replace(
        plan=arrays, makespan_s=seconds, transfer_bytes=sent, notes=(*base.notes, note),
        sharded=sharded._replace(
            plan=plan, graph=local, costs=known, arrays=arrays, makespan_s=seconds,
            transfer_bytes=sent,
        ),
    )  # fmt: skip


def _of(costs: Costs, graph: Graph, there: Graph) -> Costs:
    """Return the costs of the ops of a graph without second calls."""
    number = {op.name: i for i, op in enumerate(graph.ops)}
    rows = [number[op.name] for op in there.ops]
    seconds = {kind: values[rows] for kind, values in costs.seconds.items()}
    return dataclasses.replace(costs, seconds=seconds)


def ordered(plan: Plan, local: Graph) -> Plan:
    """Return a plan with the copies beside the ops that use them, on their devices.

    Args:
        plan: Says which states are on the host, and has no copies yet.
        local: The graph that it places, with copies.
    """
    ops, placement = {op.name: op for op in local.ops}, dict(plan.placement)
    loads = {op.outputs[0].name: op.name for op in local.ops if op.kind == FROM_HOST}
    stores = [op for op in local.ops if op.kind == TO_HOST]
    rows: list[tuple[str, ...]] = []
    for device, row in enumerate(plan.order):
        at = {name: i for i, name in enumerate(row)}
        ends: dict[str, list[str]] = {}
        for store in stores:
            if store.after[0] in at:
                ends.setdefault(max(store.after, key=lambda name: at[name]), []).append(store.name)
        found: list[str] = []
        for name in row:
            found += [loads.pop(copy) for copy in ops[name].inputs if copy in loads]
            found += [name, *ends.get(name, ())]
        placement |= dict.fromkeys(found, device)
        rows.append(tuple(found))
    return dataclasses.replace(plan, placement=placement, order=tuple(rows))
