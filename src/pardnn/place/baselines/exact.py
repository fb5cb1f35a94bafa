"""The optimum by CP-SAT, for graphs of up to about 20 ops: heuristics are measured against it.

Each op starts after its inputs have arrived, ops of a device do not overlap, an op that overwrites
a tensor waits until it has been sent, and the last op ends as early as possible. The live bytes on
a device at any time are bounded from below: tensors made or received there count until the last op
there has read them, and tensors that sends hold longer are left out. If a placement nevertheless
fits in none of the orders that are tried, it is forbidden and the model is solved again. The bound
of the first answer holds for every plan that fits, so the decision says how far above it the best
plan is, at most.

Times are rounded to ticks; the horizon has `TICKS` of them. The solver runs in a child process; its
schedule is simulated like any other.

Deviation from the simulator: transfers do not contend, so with serial links the optimum is that of
independent ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError, StuckError, UsageError
from pardnn.graph.csr import RESIDUAL, GraphArrays, op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.baselines.m_sct import edge_seconds
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.all_plans import all_placements, searched_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes
from pardnn.sim.timeline import static_timeline
from pardnn.solvers import ask, numbers, wrong_answer

MAX_OPS = 30
SOLVER_SECONDS = 60.0
#: Optimal placements that do not fit are forbidden, one after the other, at most so many.
MAX_FORBIDDEN = 10
TICKS = 2**40
#: Up to which a makespan that exceeds the bound, relative to it, equals it: of ticks, and of sums.
ROUNDING = 1e-9
#: Seconds for an answer that counts what is alive over time.
MEMORY_SECONDS = 10.0
#: Seconds that a solver gets to answer when its time is over; then it is killed.
GRACE_S = 2.0
#: Bytes are counted in units, so many of which make the largest limit: products with ticks fit.
BYTE_UNITS = 2**14


class Optimum(NamedTuple):
    """The solver's answer, before memory over time is checked.

    Attributes:
        place: Device of each op.
        start: Seconds, rounded to ticks.
        lower_bound_s: No plan is faster if transfers do not contend; allows for rounding.
        is_proven: Whether this schedule is optimal for the model, up to rounding.
    """

    place: Int64[ndarray, " n"]
    start: Float64[ndarray, " n"]
    lower_bound_s: float
    is_proven: bool


def place_exact(
    graph: Graph,
    machine: Machine,
    capacities: list[int | None],
    *,
    seed: int = 0,
    time_limit: float | None = None,
) -> Decision:
    """Place and order a small graph optimally, or as well as the time allows.

    Args:
        graph: The graph, of at most `MAX_OPS` ops.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Of the solver.
        time_limit: Seconds in all, including starting the solver and building its model; None:
            `SOLVER_SECONDS`.

    Raises:
        UsageError: E218, if the graph is too large; E219, if OR-Tools is not installed.
        InfeasibleError: E301, if no plan that fits was found; E302, if an op can run nowhere.
        StuckError: E709, if the solver finds nothing in time.
    """
    if len(graph.ops) > MAX_OPS:
        raise UsageError(
            f"exact proves optima up to about 20 ops and refuses more than {MAX_OPS}; the graph "
            f"has {len(graph.ops)}.\n"
            "Use auto.",
            code="E218",
        )
    seconds = SOLVER_SECONDS if time_limit is None else time_limit
    arrays, overwrites = closed_arrays(graph), first_overwrites(graph)
    best: Decision | None = None
    shortest, bound = np.inf, 0.0
    for found, bound in _answers(arrays, machine, capacities, overwrites, seed, seconds):
        if found.lower_bound_s >= shortest:
            break
        try:
            decision = ordered(graph, machine, found, capacities)
        except InfeasibleError:
            continue
        makespan = run_lists(arrays, machine, decision.plan).makespan
        if makespan < shortest:
            best, shortest = decision, makespan
        if is_proven(shortest, bound):
            break
    if best is None:
        placements = all_placements(arrays, machine, capacities, runnable(arrays, machine))
        plan = searched_plan(arrays, capacities, overwrites, placements).plan
        if plan is None:
            raise InfeasibleError("the solver's placements do not fit in any order that was tried.")
        best, shortest = Decision(plan), run_lists(arrays, machine, plan).makespan
    return best._replace(notes=(proof(shortest, bound),), lower_bound_s=min(bound, shortest))


def _answers(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
    seed: int,
    seconds: float,
) -> Iterator[tuple[Optimum, float]]:
    """Yield the solver's answers, each with a bound that holds for every plan.

    First without memory over time, as most answers fit anyway; then with it, for up to
    `MEMORY_SECONDS` or half of the time; then without it and with placements forbidden.
    """
    until = time.monotonic() + seconds
    groups, first = np.unique(arrays.group, return_index=True)
    head = first[np.argsort(groups)]
    forbidden: list[list[int]] = []
    bound, with_memory, memory_until = 0.0, False, None
    is_limited = any(limit is not None for limit in capacities)
    while len(forbidden) < MAX_FORBIDDEN:
        left = (memory_until if with_memory and memory_until else until) - time.monotonic()
        try:
            found = optimum(
                arrays, machine, capacities, overwrites, seed=seed, forbidden=forbidden,
                seconds=left, with_memory=with_memory,
            )  # fmt: skip
        except StuckError:
            if with_memory:
                with_memory = False
                continue
            if memory_until is None and not forbidden:
                raise
            return
        if found is None:
            return
        bound = bound if forbidden else max(bound, found.lower_bound_s)
        yield found, bound
        if is_limited and memory_until is None:  # the same placement may fit in another order
            now = time.monotonic()
            with_memory, memory_until = True, now + min(MEMORY_SECONDS, (until - now) / 2)
        else:
            forbidden.append(found.place[head].tolist())


def is_proven(makespan: float, bound: float) -> bool:
    """Return whether a plan is as fast as a bound, up to rounding."""
    return makespan <= bound * (1 + ROUNDING)


def proof(makespan: float, bound: float) -> str:
    """Return what is proven of a plan, for people.

    Args:
        makespan: Of the plan, simulated.
        bound: No plan that fits is faster.
    """
    if is_proven(makespan, bound):
        return "exact: proven optimal"
    if bound <= 0:
        return "exact: not proven optimal"
    above = f"at most {100 * (makespan / bound - 1):.3g} % above the optimum"
    return f"exact: {above}, which takes {bound:.6g} s or more; not proven optimal"


def is_optimal(arrays: GraphArrays, machine: Machine, found: Decision) -> bool:
    """Return whether a decision is proven optimal by its own lower bound."""
    return is_proven(run_lists(arrays, machine, found.plan).makespan, found.lower_bound_s)


def faster(arrays: GraphArrays, machine: Machine, found: Decision, other: PlanArrays) -> Decision:
    """Return the solver's decision, or another plan with the solver's bound if that is faster.

    Args:
        arrays: The graph.
        machine: Durations and links.
        found: From `place_exact`.
        other: A plan that fits.
    """
    makespan = run_lists(arrays, machine, other).makespan
    if makespan >= run_lists(arrays, machine, found.plan).makespan:
        return found
    by_others = "exact: the solver's best plan is slower; this is the best of the other algorithms"
    notes = (by_others, proof(makespan, found.lower_bound_s))
    return Decision(other, notes=notes, lower_bound_s=min(found.lower_bound_s, makespan))


def ordered(
    graph: Graph, machine: Machine, found: Optimum, capacities: list[int | None]
) -> Decision:
    """Return the decision that runs each device's ops in the order of the solver's starts.

    Args:
        graph: The graph.
        machine: Durations and links.
        found: The solver's schedule.
        capacities: Usable bytes of each device; None is unlimited.

    Raises:
        InfeasibleError: E301, if no order of this placement that was tried fits.
    """
    a = graph.arrays
    position = inverse_permutation(a.topological)
    seconds = machine.seconds[machine.device_class[found.place], np.arange(a.num_ops)]
    finish = found.start + seconds
    # An op of no time may start together with one that takes some: it comes first.
    dispatch = inverse_permutation(np.lexsort((position, finish, found.start)))
    timeline = static_timeline(a, machine, found.place, found.start, finish, dispatch)
    return fitted(graph, machine, found.place, capacities, timeline)


def optimum(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    seed: int = 0,
    seconds: float = SOLVER_SECONDS,
    forbidden: list[list[int]] | None = None,
    with_memory: bool = False,
) -> Optimum | None:
    """Return the optimal schedule with bounded residual bytes; None if there is none.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        overwrites: From `first_overwrites`.
        seed: Of the solver.
        seconds: Time limit of the solver.
        forbidden: Placements of groups that are not wanted.
        with_memory: Whether live bytes at any time are bounded, too.

    Raises:
        UsageError: E219, if OR-Tools is not installed.
        StuckError: E709, if the solver finds nothing in time.
        PardnnError: E109, if the solver fails or its answer is wrong.
    """
    usable = np.where(np.isfinite(machine.seconds), machine.seconds, 0.0)
    comm = edge_seconds(arrays, op_edges(arrays), slowest_link(machine))
    horizon = float(usable.max(axis=0).sum() + comm.sum())
    # A power of two: times that are multiples of one stay exact.
    tick = 2.0 ** np.ceil(np.log2(max(horizon, 1e-300) / TICKS))
    problem = _problem(arrays, machine, capacities, overwrites, tick)
    problem |= {"until": time.monotonic() + seconds, "seed": seed % 2**31}
    problem["forbidden"] = forbidden or []
    problem["with_memory"] = with_memory
    limit = max(seconds, 0.0) + GRACE_S
    answer = ask("cp", problem, seconds=limit, extra="exact", grace=GRACE_S)
    n, status = arrays.num_ops, answer.get("status")
    if status == "INFEASIBLE":
        return None
    if "place" not in answer:
        raise StuckError(f"CP-SAT found nothing in {seconds:.3g} s: {status!r:.40}", code="E709")
    place = np.array(numbers("cp", answer, "place", n, machine.num_devices), dtype=np.int64)
    start = np.array(numbers("cp", answer, "start", n), dtype=np.float64) * tick
    [proven] = numbers("cp", {"bound": [answer.get("bound")]}, "bound", 1)
    if not runnable(arrays, machine)[arrays.group, place].all():
        raise wrong_answer("cp", "an op on a device that cannot run it")
    # Every op and edge of the longest chain may be off by half a tick.
    bound = proven * tick - tick * 2 * n
    return Optimum(place, start, bound, status == "OPTIMAL")


def _problem(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
    tick: float,
) -> dict[str, Any]:
    n, k = arrays.num_ops, machine.num_devices
    pairs = op_edges(arrays)
    size = np.rint(edge_seconds(arrays, pairs, (0.0, 1.0))).astype(np.int64)
    edges = [(i, j, j, b) for (i, j), b in zip(pairs.tolist(), size.tolist(), strict=True)]
    edges += overwritten(arrays, overwrites, pairs)
    sizes = sorted({num_bytes for *_, num_bytes in edges})
    durations = machine.seconds[machine.device_class]
    return {
        "device": [
            [[d, _ticks(durations[d, op], tick)] for d in range(k) if np.isfinite(durations[d, op])]
            for op in range(n)
        ],
        "group": arrays.group.tolist(),
        "edges": [[i, j, w, sizes.index(num_bytes)] for i, j, w, num_bytes in edges],
        "comm": [
            [
                [
                    _ticks(machine.latency[p, q] + num_bytes / machine.bandwidth[p, q], tick)
                    if np.isfinite(machine.latency[p, q])
                    else None
                    for q in range(k)
                ]
                for p in range(k)
            ]
            for num_bytes in sizes
        ],
        "horizon": TICKS,
        **_memory(arrays, capacities),
    }


def _memory(arrays: GraphArrays, capacities: list[int | None]) -> dict[str, Any]:
    """Return what is alive when: bytes in a unit that they are multiples of, or rounded down."""
    residual = residual_bytes(arrays).tolist()
    size: list[int] = arrays.tensor_bytes.tolist()
    workspace: list[int] = arrays.workspace.tolist()
    maker: list[int] = arrays.tensor_op.tolist()
    readers = [row.tolist() for row in np.split(arrays.consumer_op, arrays.consumer_ptr[1:-1])]
    rows: dict[int, list[list[int]]] = {}
    for t, owner in enumerate(arrays.tensor_owner.tolist()):
        above, views = t, [maker[owner]]
        while above != owner:
            views.append(maker[above])
            above = int(arrays.tensor_alias[above])
        rows.setdefault(owner, []).extend([*views, op] for op in (maker[t], *readers[t]))
    stays = arrays.memory[arrays.tensor_op] == RESIDUAL
    limits = [limit for limit in capacities if limit is not None]
    unit = math.gcd(*residual, *size, *workspace) or 1
    unit = max(unit, -(-max(limits, default=0) // BYTE_UNITS))
    return {
        "residual": [number // unit for number in residual],
        "storages": [[maker[t], size[t] // unit, row] for t, row in rows.items() if not stays[t]],
        "copies": [[maker[t], size[t] // unit, readers[t]] for t in range(len(size)) if readers[t]],
        "workspace": [number // unit for number in workspace],
        "capacity": [None if limit is None else limit // unit for limit in capacities],
    }


def overwritten(
    arrays: GraphArrays, overwrites: Int64[ndarray, "w 2"], pairs: Int64[ndarray, "e 2"]
) -> list[tuple[int, int, int, int]]:
    """Return (i, j, w, bytes) where j reads what i makes, and w, after i, overwrites it.

    Args:
        arrays: The graph, a small one: O(ops ** 2).
        overwrites: From `first_overwrites`.
        pairs: From `op_edges`.
    """
    successor = [{op} for op in range(arrays.num_ops)]
    for op in arrays.topological[::-1].tolist():
        for j in pairs[pairs[:, 0] == op, 1].tolist():
            successor[op] |= successor[j]
    found: list[tuple[int, int, int, int]] = []
    for t in range(arrays.num_tensors):
        owner, i = int(arrays.tensor_owner[t]), int(arrays.tensor_op[t])
        writers = [w for w in overwrites[overwrites[:, 0] == owner, 1].tolist() if w != i]
        consumers = arrays.consumer_op[arrays.consumer_ptr[t] : arrays.consumer_ptr[t + 1]].tolist()
        found += [
            (i, j, w, int(arrays.tensor_bytes[t]))
            for w in writers
            if w in successor[i]
            for j in consumers
            if j != w
        ]
    return found


def _ticks(seconds: float, tick: float) -> int:
    return round(float(seconds) / tick)
