"""What a step would take without a plan of pardnn's: ideal, small batch, swapping.

Problem: a plan's seconds say little without alternatives on the same devices.
Idea: three estimates from the costs of the ops; nothing is run. *Ideal*: all devices compute
all the time, hold everything and send nothing. *Small batch*: each device trains with the batch
that it has memory for, and sends nothing; the seconds are those that as many samples take.
*Swapping*: one or all devices share the batch, and move storages to the host and back, all over one
link. What is used again last goes, what the host has is only dropped, and transfers are hidden
behind computation as far as that lasts: no running system does better.
Complexity: O(ops log ops) per batch size.
Reference: Tofu (EuroSys 2019), section 7.1.
Deviations: gradients that replicas would exchange are left out, as there.
"""

from __future__ import annotations

from collections.abc import Callable

from pardnn.graph.ir import Graph
from pardnn.planner.costs import costs_for
from pardnn.planner.problem import Problem
from pardnn.planner.without_plan.paging import page_bytes
from pardnn.report.results import CompareRow
from pardnn.sim.peak import one_device_peak
from pardnn.units import size_texts

#: Bytes/s between all devices and their host, together: PCI Express 3, as in the paper.
HOST_BANDWIDTH = 10e9

#: Seconds that a step takes at least, so that rates are finite.
TINY = 1e-12

UNKNOWN_BATCH = "the step at other batch sizes is needed: FILE.py:FUNCTION that takes `batch_size`"

AtBatch = Callable[[int], Graph]
"""The graph of the step with a batch of so many samples."""


def estimated_baselines(
    problem: Problem, batch_size: int | None = None, at: AtBatch | None = None
) -> tuple[CompareRow, ...]:
    """Return the rows of ideal, small batch and swapping, for the samples of the problem's step.

    Args:
        problem: A graph, and what it would run on.
        batch_size: Samples of that graph; None if that is not known.
        at: Captures the step at another batch size; None if that cannot be done.
    """
    return (
        _row("ideal", _ideal(problem), "no communication, no memory limit"),
        _small_batch(problem, batch_size, at),
        _swapping(problem, batch_size, at),
    )


def _row(name: str, seconds: float, note: str, peak: int | None = None) -> CompareRow:
    return CompareRow(
        algorithm=name,
        makespan_s=seconds,
        peak_bytes=None if peak is None else (peak,),
        planning_s=None,
        fits=True,
        error=None,
        estimated=True,
        note=note,
    )


def _no_row(name: str, error: str) -> CompareRow:
    return CompareRow(
        algorithm=name, makespan_s=None, peak_bytes=None, planning_s=None, fits=False,
        error=error, estimated=True,
    )  # fmt: skip


def _step_seconds(problem: Problem, graph: Graph) -> list[float]:
    """Seconds of all ops of a step on each device; infinite where one cannot run there."""
    options, costs = problem.options, problem.costs
    if graph is not problem.graph:
        costs = costs_for(graph, problem.cluster, options.costs, threads=options.threads)
    rows = [costs.on(d.type, d.speed) for d in problem.cluster.devices]
    return [max(float(row.sum()), TINY) for row in rows]


def _ideal(problem: Problem) -> float:
    """Seconds of a step that all devices share by their speeds."""
    return 1 / sum(1 / seconds for seconds in _step_seconds(problem, problem.graph))


def _small_batch(problem: Problem, batch_size: int | None, at: AtBatch | None) -> CompareRow:
    """Return the row of replicas, each with the largest of halved batches that fits all devices."""
    if batch_size is None or at is None:
        return _no_row("small-batch", UNKNOWN_BATCH)
    limits = [size for size in problem.capacities if size is not None]
    batch = max(1, batch_size // problem.cluster.num_devices)
    while True:
        graph = at(batch)
        peak = one_device_peak(graph.arrays)
        if all(peak <= limit for limit in limits):
            break
        if batch == 1:
            needed, usable = size_texts(peak, min(limits))
            least = f"one sample needs {needed} on one device, usable: {usable}"
            return _no_row("small-batch", least)
        batch //= 2
    rate = sum(batch / seconds for seconds in _step_seconds(problem, graph))
    return _row("small-batch", batch_size / rate, f"{batch} samples on each device", peak)


def _swapping(problem: Problem, batch_size: int | None, at: AtBatch | None) -> CompareRow:
    """Return the row of the faster: one device that swaps, or all of them, with equal batches."""
    found: list[tuple[float, int]] = []
    k = problem.cluster.num_devices
    for count in dict.fromkeys((1, k)):
        graph = problem.graph
        if count > 1 and (batch_size is None or at is None or batch_size < count):
            continue
        if count > 1 and batch_size is not None and at is not None:
            graph = at(batch_size // count)
        # Of the fastest devices, the one that is slowest, and the one that has to swap most.
        each = zip(_step_seconds(problem, graph), problem.capacities, strict=True)
        chosen = sorted(each, key=lambda row: row[0])[:count]
        limits = {limit for _, limit in chosen if limit is not None}
        moved = max((page_bytes(graph, limit, "belady") for limit in limits), default=0)
        found.append((max(chosen[-1][0], moved * count / HOST_BANDWIDTH), count))
    step, count = min(found)
    return _row("swapping", step, f"{count} device{'s' * (count > 1)} over one link to the host")
