"""Plans from and to placement files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pardnn import files
from pardnn.api.costing import costs_for
from pardnn.api.planning import Outcome, check_reserve, finished
from pardnn.cluster import Cluster
from pardnn.errors import FileError, MismatchError
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.plan.file import (
    check_fingerprint,
    placement_from_text,
    placement_to_text,
    read_plan,
    write_plan,
)
from pardnn.report.results import ConvertResult


def plan_to_placement(source: Path, graph: Graph, output: Path) -> ConvertResult:
    """Write the placement of a plan, one `op device` line per op."""
    plan = read_plan(source)
    check_fingerprint(plan, graph)
    files.write_bytes(output, placement_to_text(plan.placement).encode())
    return ConvertResult(ops=len(plan.placement), output=str(output))


def placement_to_plan(
    source: Path,
    graph: Graph,
    cluster: Cluster,
    output: Path,
    *,
    reserve: float = 0.1,
    costs: str | None = None,
) -> ConvertResult:
    """Complete a placement to a checked plan and write it.

    Raises:
        MismatchError: E503, if it does not place the graph's ops.
        FileError: E409 or E410, if a line or a placement makes no sense.
        InfeasibleError: E301, if it fits in no order that was tried.
    """
    check_reserve(reserve)
    try:
        text = files.read_bytes(source).decode()
    except UnicodeDecodeError:
        raise FileError(f"placement file {str(source)!r} is not text", code="E409") from None
    placement = placement_from_text(text, f"placement file {str(source)!r}")
    names = [op.name for op in graph.ops]
    odd = sorted(placement.keys() ^ set(names))
    if odd:
        raise MismatchError(
            f"the placement and the graph do not belong together: {odd[0]!r:.80} is not in both "
            f"({len(odd)} such ops).",
            code="E503",
        )
    beyond = next((name for name in names if placement[name] >= cluster.num_devices), None)
    if beyond is not None:
        raise FileError(
            f"op {beyond!r:.80} is placed on device {placement[beyond]}, but there are "
            f"{cluster.num_devices}",
            code="E409",
        )
    from pardnn.place.decision import fitted
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of

    chosen = costs_for(graph, cluster, costs)
    machine = machine_of(chosen, cluster)
    place = np.array([placement[name] for name in names], dtype=np.int64)
    decision = fitted(graph, machine, place, capacities(cluster, reserve))
    timeline = simulate(graph, machine, decision.plan)
    outcome = Outcome(
        algorithm="placement-file",
        plan=decision.plan,
        moved_ops=0,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(graph),
        planning_s=0.0,
    )
    write_plan(finished(graph, cluster, chosen, outcome, reserve=reserve)[0], output)
    return ConvertResult(ops=len(placement), output=str(output))
