"""Which costs a plan is made with."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import numpy as np

from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.cost.call import tensors_by_name
from pardnn.cost.costs import MEASURED_BEFORE, Costs, graph_costs, measured_costs, preset_costs
from pardnn.cost.presets import PRESET_NAMES, device_model
from pardnn.cost.roofline import op_seconds
from pardnn.errors import UsageError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.shard.aten.lookup import description_of
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import fastest_seconds, machine_of
from pardnn.sim.peak import one_device_peak, residual_bytes

Progress = Callable[[int, int], None]

#: Bytes that a step makes at once, times which a limit has room for a heap that keeps all freed
#: blocks: of four steps of ours it took 1.3 to 2.8 times those bytes, and a rank leaves 2 free.
HEAP_ROOM = 4

#: Costs of a graph that states none and was not captured here: nothing of it is run.
FILE_PRESET = "a100"


def states_costs(graph: Graph) -> bool:
    """Return whether every call of the graph states its own seconds."""
    return all(op.seconds is not None or op.is_source for op in graph.ops)


def stated_costs(plan: Plan) -> str | None:
    """Return the preset that a plan was made with, for `costs_for`; None for other costs.

    If there are several, take one that is not measured on this CPU.
    """
    names = ((plan.predicted and plan.predicted.costs) or "").split(", ")
    presets = [name for name in names if name in PRESET_NAMES]
    return next((name for name in presets if name != "cpu"), presets[0] if presets else None)


def choice_of(plan: Plan, choice: str | None, graph: Graph, planned: Graph) -> str | None:
    """Return the user's choice of costs, for `costs_for`; else the costs that a plan was made with.

    Measured costs are those of CPU ranks, if this machine still has them.

    Args:
        plan: A plan.
        choice: The user's; None for none.
        graph: That it is for.
        planned: From `planned_graph`.
    """
    stated = stated_costs(plan)
    if choice is not None or stated is not None:
        return stated if choice is None else choice
    made_with = (plan.predicted and plan.predicted.costs) or ""
    devices = plan.cluster.devices if plan.cluster else ()
    is_here = made_with in ("measured", MEASURED_BEFORE) and all(
        device.name.startswith("cpu:") for device in devices
    )
    if not is_here or importlib.util.find_spec("torch") is None:
        return None
    is_known = known_costs(planned, plan.cluster, graph) and (
        planned is graph or known_costs(graph, plan.cluster)
    )
    return MEASURED_BEFORE if is_known and backends.this_device() == "cpu" else None


def costs_for(
    graph: Graph,
    cluster: Cluster,
    choice: str | None = None,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    whole: Graph | None = None,
) -> Costs:
    """Return the costs of a graph on the device types of a cluster.

    Args:
        graph: The graph.
        cluster: Has the device types.
        choice: None: the graph's own `seconds` if every call states them, else "measured" of a
            graph captured in this process and `FILE_PRESET` of any other, which may be a file of
            somebody else's; "measured": timed on this machine's device and cached, which runs the
            graph's calls; or a preset's name.
        threads: That an op may use on a CPU.
        progress: Called with the number of calls timed and in all.
        whole: Of a partitioned graph, the graph of the step; None: that is the graph.

    Raises:
        UsageError: E231 for an unknown preset.
    """
    if choice is None and states_costs(graph):
        return graph_costs(graph)
    types = list(dict.fromkeys(device.type for device in cluster.devices))
    if choice is None:
        choice = "measured" if graph.is_captured else FILE_PRESET
    if choice == MEASURED_BEFORE:
        keeps = keeps_freed(whole or graph, cluster)
        return dataclasses.replace(_of_this_cpu(graph, threads, keeps), source=choice)
    if choice == "measured":
        here = backends.this_device()
        devices = {kind: "cpu" if kind == "cpu" else here for kind in types}
        # No device of the cluster holds more than its limit, nor does the one that times its ops.
        limits = [device.memory for device in cluster.devices if device.memory is not None]
        memory = max(limits, default=None)
        keeps = keeps_freed(whole or graph, cluster)
        if graph.is_captured:
            profile = functools.partial(backends.profile_graph, progress=progress)
        else:
            profile = functools.partial(backends.profile_file, allowed=described_kinds(graph))
        tables = {
            kind: profile(graph, device, threads=threads, memory=memory, keeps_freed=keeps)[0]
            for kind, device in devices.items()
        }
        return measured_costs(graph, tables)
    return preset_costs(graph, choice, types, threads=threads)


def keeps_freed(graph: Graph, cluster: Cluster | None) -> bool:
    """Return whether freed tensors of CPU ranks will stay in the heap: their costs depend on it.

    Args:
        graph: Of the step; its partitioned graphs have the same costs.
        cluster: With the limits of the ranks, each of which would have room for it alone. A cluster
            of this machine as a whole (`parallelize`) counts as one with limits. None: no limits.
    """
    limits = [device.memory for device in cluster.devices] if cluster else []
    if all(limit is None for limit in limits):
        return True
    there = int(residual_bytes(graph.arrays).sum())
    made = one_device_peak(graph.arrays) - there
    return all(limit is None or there + HEAP_ROOM * made <= limit for limit in limits)


def described_kinds(graph: Graph) -> set[str]:
    """Return the kinds of a graph's calls that have a description, ours or the user's."""
    return {op.kind for op in graph.ops if not op.is_source and description_of(op.kind)}


def known_costs(
    graph: Graph, cluster: Cluster | None, whole: Graph | None = None, *, threads: int = 1
) -> Costs | None:
    """Return what was measured of a graph's calls on this machine's CPU; None if any was not.

    Args:
        graph: The graph.
        cluster: With the limits of its ranks; None: there are none.
        whole: See `costs_for`.
        threads: That an op may use.
    """
    try:
        return _of_this_cpu(graph, threads, keeps_freed(whole or graph, cluster))
    except UsageError:
        return None


def _of_this_cpu(graph: Graph, threads: int, keeps: bool) -> Costs:
    """Return what was measured of a graph's calls on this machine's CPU.

    Raises:
        UsageError: E230, naming an op that was not measured.
    """
    table = backends.cached_table("cpu", threads=threads, keeps_freed=keeps)
    return measured_costs(graph, {"accelerator": table})


def partitioned_costs(
    graph: Graph,
    partitioned: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> Costs:
    """Return the costs of a partitioned graph, from the same source as those of the graph.

    Args:
        graph: The graph.
        partitioned: Its partitioned graph.
        cluster: Has the device types.
        costs: Of the graph.
        threads: That an op may use on a CPU.
        progress: See `costs_for`.
    """
    if costs.source == "graph":
        return graph_costs(partitioned)
    partitioned = dataclasses.replace(partitioned, is_captured=graph.is_captured)
    names = [name for name in costs.source.split(", ") if name != "cpu"]
    choice = names[0] if names else "cpu"
    return costs_for(partitioned, cluster, choice, threads=threads, progress=progress, whole=graph)


def scaled_costs(graph: Graph, costs: Costs, partitioned: Graph) -> Costs:
    """Return an estimate of the costs of a partitioned graph, without measuring.

    A local op takes the share of its op's time that a roofline gives it, at most all of it.

    Args:
        graph: The graph.
        costs: Of its ops.
        partitioned: Its partitioned graph; "h@0" is the local op of "h" on device 0.
    """
    model = device_model(costs.roofline)
    tensors, local = tensors_by_name(graph), tensors_by_name(partitioned)
    number = {op.name: i for i, op in enumerate(graph.ops)}
    whole = [op_seconds(op, tensors, model) for op in graph.ops]
    seconds = {kind: np.zeros(len(partitioned.ops)) for kind in costs.seconds}
    for i, op in enumerate(partitioned.ops):
        of = number.get(op.name.rpartition("@")[0])
        own = op_seconds(op, local, model)
        for kind, values in costs.seconds.items():
            if of is None:
                seconds[kind][i] = own
            else:
                seconds[kind][i] = values[of] * min(1.0, own / whole[of] if whole[of] else 1.0)
    return Costs(seconds=seconds, source=costs.source)


def communication_ratio(arrays: GraphArrays, costs: Costs, cluster: Cluster) -> float:
    """Return total communication / total computation: every data edge over the slowest link.

    Args:
        arrays: Of the graph.
        costs: Of its ops, each counted on its fastest device.
        cluster: Its slowest link is taken.
    """
    machine = machine_of(costs, cluster)
    latency, per_byte = slowest_link(machine)
    work = float(fastest_seconds(machine).sum())
    edges = np.diff(arrays.consumer_ptr)
    communication = float((edges * (latency + arrays.tensor_bytes * per_byte)).sum())
    return communication / work if work > 0 else 0.0
