"""Estimates: whether a step fits, and what takes the memory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from pardnn.cluster import Cluster, more_like
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.graph.storage_kinds import storage_kinds
from pardnn.plan.memory import device_storages, memory_profiles, peak_bytes
from pardnn.plan.plan import PlanArrays, order_rows
from pardnn.planner.algorithms import BEST, BEST_WHOLE, SHARDED
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide_best
from pardnn.planner.sharded.decide import fitting_plans
from pardnn.planner.steering.constrained import constrained
from pardnn.planner.warm_up import warm_up
from pardnn.report.results import EstimateResult, LargestOp, MemoryByKind
from pardnn.sim.peak import least_bytes, op_needs

#: The smallest limit is searched until it is known to this fraction.
PRECISION = 0.005

#: Algorithms that tell whether a step fits.
ALGORITHMS_TRIED = ("single", "pardnn")

#: Limits that are tried where looking for the least would take too long.
LIMITS_TRIED = 3
#: An advised limit is at most so much above one that was tried and does not fit.
LOWERED_TO = 1 / 64
#: After which an advised limit is not lowered any more: large graphs are planned for longer.
LOWERED_SECONDS = 5.0


def estimate(problem: Problem) -> EstimateResult:
    """Return whether a step fits a cluster, and what takes the memory.

    Args:
        problem: The step and the cluster with its limits; of the options, only reserve and seed are
            used.
    """
    warm_up(ALGORITHMS_TRIED)
    graph = problem.graph
    plan = _fitting_plan(problem)
    minimum, smallest = minimum_limit(problem)
    fits = plan is not None
    plan = smallest if plan is None else plan
    return EstimateResult(
        fits=fits,
        peak_bytes=tuple(peak_bytes(graph, plan)),
        capacity_bytes=tuple(problem.capacities),
        by_kind=memory_by_kind(graph, plan),
        minimum_bytes=minimum,
        largest_op=largest_op(graph),
    )


def _fitting_plan(problem: Problem, names: Sequence[str] = ()) -> PlanArrays | None:
    """Return a plan that fits; None if none was found.

    Args:
        problem: What to plan.
        names: Of algorithms; `ALGORITHMS_TRIED` if there are none.
    """
    try:
        return _best_plan(problem, names)
    except InfeasibleError:
        return None


def _best_plan(problem: Problem, names: Sequence[str]) -> PlanArrays:
    if not names:
        names = ALGORITHMS_TRIED if problem.cluster.num_devices > 1 else ALGORITHMS_TRIED[:1]
    timed = problem.with_options(objective="seconds", time_limit=None)
    return decide_best(constrained(timed), names).plan


def with_limit(problem: Problem, limit: int | None) -> Problem:
    """Return the problem with this limit in bytes for each device."""
    devices = (dataclasses.replace(each, memory=limit) for each in problem.cluster.devices)
    cluster = dataclasses.replace(problem.cluster, devices=tuple(devices))
    return dataclasses.replace(problem, cluster=cluster)


def _limited(problem: Problem, limit: int | None) -> Problem:
    """Return the problem with this limit in bytes for each device, all of it usable."""
    return with_limit(problem, limit).with_options(reserve=0.0)


def minimum_limit(problem: Problem, names: Sequence[str] = ()) -> tuple[int, PlanArrays]:
    """Return the smallest equal limit in bytes per device found to fit, and a plan for it.

    Bisection over the limit; each one is tried by planning, so this is an upper bound of the true
    minimum. It starts between what no plan can avoid and the largest peak without limits.

    Args:
        problem: What to plan.
        names: Of the algorithms that plan, which place whole ops; see `_fitting_plan`.

    Raises:
        InfeasibleError: E301, if no limit helps, as where a link or a type of device is missing.
    """
    graph, reserve = problem.graph, problem.options.reserve
    plan = _best_plan(_limited(problem, None), names)
    high = max(peak_bytes(graph, plan))
    low = least_bytes(graph.arrays, problem.cluster.num_devices) - 1
    while high - low > max(1, PRECISION * high):
        middle = (low + high) // 2
        tried = _fitting_plan(_limited(problem, middle), names)
        if tried is None:
            low = middle
        else:
            plan, high = tried, max(peak_bytes(graph, tried))
    return with_reserve(high, reserve), plan


def with_reserve(num_bytes: int, reserve: float) -> int:
    """Return the limit that leaves this much usable."""
    limit = math.ceil(num_bytes / (1 - reserve))
    while int(limit * (1 - reserve)) < num_bytes:  # the product is rounded down
        limit += 1
    return limit


def largest_op(graph: Graph) -> LargestOp:
    """Return the op whose inputs, outputs and workspace are largest together."""
    needs = op_needs(graph.arrays)
    number = int(needs.argmax())
    op = graph.ops[number]
    return LargestOp(name=op.name, bytes=int(needs[number]), source=op.source)


def memory_by_kind(graph: Graph, plan: PlanArrays) -> MemoryByKind:
    """Return what the device with the largest peak holds at that moment."""
    devices = memory_by_device(graph, plan)
    return max(devices, key=lambda kinds: sum(dataclasses.astuple(kinds)))


def memory_by_device(graph: Graph, plan: PlanArrays) -> list[MemoryByKind]:
    """Return what each device holds at its own peak."""
    return [
        kinds_at(graph, plan, device, profile.index(max(profile)))
        if profile
        else MemoryByKind(**{field.name: 0 for field in dataclasses.fields(MemoryByKind)})
        for device, profile in enumerate(memory_profiles(graph, plan))
    ]


def kinds_at(graph: Graph, plan: PlanArrays, device: int, at: int) -> MemoryByKind:
    """Return what a device holds while one of its ops runs.

    Args:
        graph: The graph.
        plan: A valid plan for it.
        device: Its number.
        at: Position of the op in the device's order.
    """
    kinds = storage_kinds(graph)
    held: dict[str, int] = {field.name: 0 for field in dataclasses.fields(MemoryByKind)}
    for storage in device_storages(graph, plan)[device]:
        gone = storage.released >= 0 and storage.released < at
        if storage.allocated > at or gone:
            continue
        held["transfers" if storage.message >= 0 else kinds[storage.tensor]] += storage.bytes
    held["workspace"] = int(graph.arrays.workspace[order_rows(plan)[device][at]])
    return MemoryByKind(**held)


def suggestions(problem: Problem, peak: int | None = None) -> Iterator[str]:
    """Yield options that were tried and fit: a larger limit, or more devices of this kind.

    They are tried with the requested algorithm and objective; `auto` uses `ALGORITHMS_TRIED`.

    Args:
        problem: What no plan was found for.
        peak: Bytes of the plan that came closest, if ops are cut.
    """
    cluster, algorithm = problem.cluster, problem.options.algorithm
    names = () if algorithm in (BEST, BEST_WHOLE) else (algorithm,)
    try:
        if algorithm in SHARDED:  # planning a cut takes seconds: the least is not looked for
            limit = limit_tried(problem, peak, _cut_peak)
        else:
            limit, _ = minimum_limit(problem, names)
    except InfeasibleError:  # memory is not what is missing
        limit = None
    if limit is not None:
        yield f"--max-memory {rounded_up(limit)}"
    for more in larger_clusters(cluster):
        if _fits(dataclasses.replace(problem, cluster=more), algorithm, names):
            yield f"--devices {more.num_devices}"
            return


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield twice and four times as many devices of a cluster; none where they are not alike."""
    device = cluster.devices[0]
    alike = all(d.memory == device.memory and d.type == device.type for d in cluster.devices)
    if alike and cluster.default_link is not None and not cluster.links:
        for count in (cluster.num_devices * 2, cluster.num_devices * 4):
            yield dataclasses.replace(cluster, devices=tuple(more_like(device, count)))


def _fits(problem: Problem, algorithm: str, names: Sequence[str]) -> bool:
    if algorithm not in SHARDED:
        return _fitting_plan(problem, names) is not None
    return _cut_peak(problem)[0]


def _cut_peak(problem: Problem) -> tuple[bool, int | None]:
    """Return whether a plan that cuts every op fits, or else what the closest one needs.

    For either objective, the cut that moves the fewest bytes is tried too.
    """
    try:
        fitting_plans(problem.with_options(objective="bytes"), problem.options.algorithm)
    except InfeasibleError as error:
        return False, error.details.get("peak_bytes")
    return True, None


def limit_tried(
    problem: Problem, peak: int | None, tried: Callable[[Problem], tuple[bool, int | None]]
) -> int | None:
    """Return an equal limit per device for which a plan was found; None after a few failures.

    Each limit is what the closest plan for the previous limit needs. The first that fits may be far
    above the minimum, so it is lowered by bisection to within `LOWERED_TO` of one that does not
    fit, as long as time is left.

    Args:
        problem: What no plan was found for.
        peak: Bytes of the plan that came nearest; None if that is not known.
        tried: Whether a plan of a problem fits, and else the bytes of the one that came nearest.
    """
    begin = time.monotonic()
    below = min((each.memory or 0 for each in problem.cluster.devices), default=0)
    for _ in range(LIMITS_TRIED):
        if peak is None:
            return None
        limit = with_reserve(peak, problem.options.reserve)
        fits, peak = tried(with_limit(problem, limit))
        if fits:
            break
        below = limit
    else:
        return None
    while limit - below > LOWERED_TO * limit and time.monotonic() - begin < LOWERED_SECONDS:
        middle = (limit + below) // 2
        fits, _ = tried(with_limit(problem, middle))
        limit, below = (middle, below) if fits else (limit, middle)
    return limit


def rounded_up(num_bytes: int) -> str:
    """Return a size of at least `num_bytes` as people write it, at most 1 % larger."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 100 * scale or (num_bytes >= scale and unit == "KiB"):
            return f"{-(-num_bytes // scale)}{unit}"
    return f"{num_bytes}B"
