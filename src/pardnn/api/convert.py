"""Conversion of graphs, plans and placements from and to third-party formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pardnn import files
from pardnn.cluster import MAX_DEVICES, Cluster, Device, Link, Rate, write_cluster
from pardnn.errors import FileError, InvalidPlanError, MismatchError, UsageError, shown
from pardnn.graph import interchange
from pardnn.graph.file import graph_from_json, read_graph, write_graph
from pardnn.graph.ir import Graph
from pardnn.place.decision import fitted
from pardnn.plan.file import (
    check_fingerprint,
    placement_from_text,
    placement_to_text,
    plan_from_json,
    write_plan,
)
from pardnn.plan.plan import Plan
from pardnn.planner.costs import costs_for
from pardnn.planner.finished import finished
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.report.results import ConvertResult
from pardnn.sim.engine import simulate

GRAPH, PLAN, PLACEMENT = "pardnn.graph/1", "pardnn.plan/1", "placement"
MSR_INPUT, MSR_SPLIT = "msr-fiddle-input", "msr-fiddle-split"
#: What a file of each format can become; the first is the default.
CONVERSIONS: Mapping[str, tuple[str, ...]] = {
    MSR_INPUT: (GRAPH,),
    GRAPH: (MSR_INPUT,),
    PLAN: (PLACEMENT, MSR_SPLIT),
    PLACEMENT: (PLAN, MSR_SPLIT),
    MSR_SPLIT: (PLAN, PLACEMENT),
}
#: Between two CPUs that format has no cost: bytes per second that cost nothing to speak of.
_FREE = 1e18


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What a conversion may need besides its source.

    Attributes:
        to: The format to write, a value of `CONVERSIONS`; None: its first.
        graph_file: The graph that a plan, placement or split is for.
        cluster: What a plan is made for; whose devices a split numbers.
        cluster_file: Where to write the cluster of an msr-fiddle input.
        planning: Reserve and costs of a plan that is made.
    """

    to: str | None = None
    graph_file: Path | None = None
    cluster: Cluster | None = None
    cluster_file: Path | None = None
    planning: PlanOptions = field(default_factory=PlanOptions)


def convert(source: Path, output: Path, options: ConvertOptions) -> ConvertResult:
    """Write what `source` holds in another format; formats are recognised by content.

    Args:
        source: The file to read.
        output: The file to write.
        options: The format, and what it may need.

    Raises:
        UsageError: E214, if there is no such conversion; E215, if it lacks a graph or a cluster.
        FileError: E4xx, if a file is not valid.
        MismatchError: E503 or E504, if graph, cluster and source do not belong together.
        InfeasibleError: E301, if a placement fits in no order that was tried.
    """
    content = files.read_bytes(source)
    found = format_of(content, f"file {str(source)!r}")
    to = options.to or CONVERSIONS[found][0]
    if to not in CONVERSIONS[found]:
        raise UsageError(
            f"{str(source)!r} is of format {found}; it can become "
            f"{' or '.join(CONVERSIONS[found])}, not {to!r:.40}",
            code="E214",
        )
    writer = _WRITERS.get(found, _placed)
    return ConvertResult(
        format_in=found,
        format_out=to,
        ops=writer(content, source, to, output, options),
        output=str(output),
    )


def format_of(content: bytes, what: str) -> str:
    """Return which of the formats in `CONVERSIONS` a file's content has.

    Raises:
        FileError: E406 (broken JSON), E407 (another object).
    """
    if not content.lstrip().startswith(b"{"):
        return PLACEMENT
    data = files.parse_json(content, what)
    stated = str(data.get("format", ""))
    for own in (GRAPH, PLAN):
        if stated.split("/")[0] == own.split("/")[0]:
            return own  # another version is refused, by name, when it is read
    if {"nodes", "edges"} <= data.keys():
        return MSR_INPUT
    if {"fpgas", "cpus"} <= data.keys():
        return MSR_SPLIT
    raise FileError(
        f"{what}: unknown format. A graph or plan states its `format`, an msr-fiddle input has "
        "`nodes` and `edges`, a split `fpgas` and `cpus`.",
        code="E407",
        details={"path": "$.format"},
    )


def msr_cluster(machine: interchange.MsrMachine) -> Cluster:
    """Return the cluster of an msr-fiddle input.

    Between accelerators data goes through host memory, which takes twice the time of one way; CPUs
    share that memory.
    """
    names = [f"gpu:{i}" for i in range(machine.accelerators)]
    limit = machine.accelerator_bytes
    devices = [Device(name=name, memory=limit) for name in names]
    cpus = [f"cpu:{i}" for i in range(machine.cpus)]
    devices += [Device(name=name, type="cpu") for name in cpus]
    rate = interchange.HOST_BANDWIDTH
    links = [Link(source=a, target=c, bandwidth=rate) for a in names for c in cpus]
    links += [Link(source=a, target=b, bandwidth=_FREE) for a in cpus for b in cpus if a < b]
    return Cluster(
        devices=tuple(devices), links=tuple(links), default_link=Rate(bandwidth=rate / 2)
    )


def placement_to_plan(
    graph: Graph, placement: Mapping[str, int], cluster: Cluster, options: PlanOptions
) -> Plan:
    """Complete a placement to a checked plan.

    Args:
        graph: The graph.
        placement: Device of each op.
        cluster: What the plan is made for.
        options: Of these, reserve and costs.

    Raises:
        InfeasibleError: E301, if it fits in no order that was tried.
    """
    problem = Problem(graph, cluster, costs_for(graph, cluster, options.costs), options)
    place = np.array([placement[op.name] for op in graph.ops], dtype=np.int64)
    decision = fitted(graph, problem.machine, place, problem.capacities)
    timeline = simulate(graph, problem.machine, decision.plan)
    outcome = Outcome(
        algorithm="placement-file",
        plan=decision.plan,
        moved_ops=0,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(graph),
        planning_s=0.0,
    )
    return finished(problem, outcome)[0]


def _from_input(
    content: bytes, source: Path, to: str, output: Path, options: ConvertOptions
) -> int:
    name = source.name.removesuffix(".gz").removesuffix(".json")
    what = f"msr-fiddle input {str(source)!r}"
    graph, machine = interchange.graph_from_msr(content, what, name)
    write_graph(graph, output)
    if options.cluster_file is not None:
        write_cluster(msr_cluster(machine), options.cluster_file)
    return len(graph.ops)


def _from_graph(
    content: bytes, source: Path, to: str, output: Path, options: ConvertOptions
) -> int:
    graph = graph_from_json(content, f"graph file {str(source)!r}")
    devices = _cluster(options, "its devices are part of that format").devices
    limits = {d.memory for d in devices if d.type != "cpu"}
    if len(limits) != 1 or None in limits:
        raise UsageError(
            "an msr-fiddle input has one memory limit for all accelerators; give one, as in "
            "--devices 4 --max-memory 16GiB",
            code="E215",
        )
    machine = interchange.MsrMachine(
        accelerators=sum(d.type != "cpu" for d in devices),
        accelerator_bytes=next(limit for limit in limits if limit is not None),
        cpus=sum(d.type == "cpu" for d in devices),
    )
    files.write_bytes(output, interchange.graph_to_msr(graph, machine))
    return len(graph.ops)


def _placed(content: bytes, source: Path, to: str, output: Path, options: ConvertOptions) -> int:
    """Convert a plan, a placement or a split."""
    if options.graph_file is None:
        raise UsageError(
            f"{str(source)!r} needs the graph whose ops it places: add --graph g.json",
            code="E215",
        )
    graph = read_graph(options.graph_file)
    placement, cluster = _placement(content, source, graph, options)
    if to == PLACEMENT:
        files.write_bytes(output, placement_to_text(placement).encode())
    elif to == MSR_SPLIT:
        count = max(placement.values(), default=-1) + 1
        types = ["accelerator"] * count if cluster is None else [d.type for d in cluster.devices]
        files.write_bytes(output, interchange.split_to_json(graph, placement, types))
    else:
        machine = _cluster(options, "a plan is made for a cluster")
        write_plan(placement_to_plan(graph, placement, machine, options.planning), output)
    return len(placement)


def _placement(
    content: bytes, source: Path, graph: Graph, options: ConvertOptions
) -> tuple[Mapping[str, int], Cluster | None]:
    """Return the device of each op, and the cluster that the devices are of, if it is known."""
    what = f"file {str(source)!r}"
    kind = format_of(content, what)
    if kind == PLAN:
        plan = plan_from_json(content, f"plan {what}")
        check_fingerprint(plan, graph)
        if plan.pieces is not None:
            raise UsageError(
                f"plan {what} by {plan.algorithm} has its batch in pieces, so an op has no single "
                "device.\nPlan without --microbatches.",
                code="E214",
            )
        if plan.partition is not None:
            raise UsageError(
                f"plan {what} by {plan.algorithm} cuts every op over all devices, so no op has a "
                "single device.\nIts layouts: pardnn layout PLAN.",
                code="E214",
            )
        if plan.cluster is not None and plan.cluster.num_devices != plan.num_devices:
            raise InvalidPlanError(
                f"plan {what}: order has {plan.num_devices} devices, the cluster "
                f"{plan.cluster.num_devices}"
            )
        _check_placement(plan.placement, graph, plan.num_devices)
        return {op.name: plan.placement[op.name] for op in graph.ops}, plan.cluster
    if kind == MSR_SPLIT:
        machine = _cluster(options, "a split counts accelerators and CPUs")
        types = [device.type for device in machine.devices]
        return interchange.split_from_json(content, graph, types, f"split {what}"), machine
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise FileError(f"placement {what} is not text", code="E409") from None
    placement = placement_from_text(text, f"placement {what}")
    num_devices = MAX_DEVICES if options.cluster is None else options.cluster.num_devices
    _check_placement(placement, graph, num_devices)
    return placement, options.cluster


def _check_placement(placement: Mapping[str, int], graph: Graph, num_devices: int) -> None:
    names = [op.name for op in graph.ops]
    odd = sorted(placement.keys() ^ set(names))
    if odd:
        raise MismatchError(
            f"the placement and the graph do not belong together: {shown(odd[0])} is not in both "
            f"({len(odd)} such ops).",
            code="E503",
        )
    beyond = next((name for name in names if not 0 <= placement[name] < num_devices), None)
    if beyond is not None:
        raise FileError(
            f"op {shown(beyond)} is placed on device {placement[beyond]}, but there are "
            f"{num_devices}",
            code="E409",
        )


def _cluster(options: ConvertOptions, why: str) -> Cluster:
    if options.cluster is None:
        raise UsageError(
            f"{why}: name it, with --devices K [--max-memory SIZE] or --cluster FILE|PRESET[:K]",
            code="E215",
        )
    return options.cluster


_WRITERS: dict[str, Callable[[bytes, Path, str, Path, ConvertOptions], int]] = {
    MSR_INPUT: _from_input,
    GRAPH: _from_graph,
}
