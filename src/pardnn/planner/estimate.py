"""Will it fit, and where does the memory go?"""

from __future__ import annotations

import dataclasses
import math

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import Graph, writes
from pardnn.plan.check import capacities
from pardnn.plan.memory import device_storages, memory_curves, peak_bytes
from pardnn.plan.plan import PlanArrays, order_rows
from pardnn.planner.make_plan import decide_best, warm_up
from pardnn.report.results import EstimateResult, LargestOp, MemoryByKind

#: The smallest limit is searched until it is known to this fraction.
PRECISION = 0.005

_KINDS = ("single", "pardnn")


def estimate(
    graph: Graph, cluster: Cluster, costs: Costs, *, reserve: float = 0.1, seed: int = 0
) -> EstimateResult:
    """Tell whether a step fits a cluster, and what takes the memory.

    Args:
        graph: The graph.
        cluster: With its limits.
        costs: Durations of the graph's ops.
        reserve: Fraction of each device's memory to leave unused.
        seed: Of the planner.
    """
    warm_up(_KINDS)
    plan = _plan(graph, cluster, costs, reserve, seed)
    fits = plan is not None
    minimum, smallest = minimum_limit(graph, cluster, costs, reserve=reserve, seed=seed)
    plan = smallest if plan is None else plan
    return EstimateResult(
        fits=fits,
        peak_bytes=tuple(peak_bytes(graph, plan)),
        capacity_bytes=tuple(capacities(cluster, reserve)),
        by_kind=memory_by_kind(graph, plan),
        minimum_bytes=minimum,
        largest_op=largest_op(graph),
    )


def _plan(
    graph: Graph, cluster: Cluster, costs: Costs, reserve: float, seed: int
) -> PlanArrays | None:
    try:
        return decide_best(
            graph,
            cluster,
            costs,
            names=_KINDS if cluster.num_devices > 1 else _KINDS[:1],
            objective="seconds",
            reserve=reserve,
            seed=seed,
        ).plan
    except InfeasibleError:
        return None


def _limited(cluster: Cluster, limit: int | None) -> Cluster:
    return dataclasses.replace(
        cluster,
        devices=tuple(dataclasses.replace(device, memory=limit) for device in cluster.devices),
    )


def minimum_limit(
    graph: Graph, cluster: Cluster, costs: Costs, *, reserve: float = 0.1, seed: int = 0
) -> tuple[int, PlanArrays]:
    """Return the smallest equal limit in bytes per device found to fit, and a plan for it.

    Bisection over the limit, each one tried by planning: an upper bound of the true minimum. It
    starts below from what no plan can avoid and above from the largest peak without limits.
    """
    plan = _plan(graph, _limited(cluster, None), costs, reserve, seed)
    assert plan is not None  # without limits everything fits
    high, low = max(peak_bytes(graph, plan)), least_bytes(graph, cluster.num_devices) - 1
    while high - low > max(1, PRECISION * high):
        middle = (low + high) // 2
        tried = _plan(graph, _limited(cluster, middle), costs, 0.0, seed)
        if tried is None:
            low = middle
        else:
            plan, high = tried, max(peak_bytes(graph, tried))
    limit = math.ceil(high / (1 - reserve))
    while int(limit * (1 - reserve)) < high:  # the product is rounded down
        limit += 1
    return limit, plan


def least_bytes(graph: Graph, num_devices: int) -> int:
    """Return a lower bound in bytes on the largest peak of any plan.

    The op that needs most at once fits nowhere smaller, and the residual storages are somewhere.
    """
    a = graph.arrays
    residual = int(a.tensor_bytes[(a.memory[a.tensor_op] == RESIDUAL) & (a.tensor_alias < 0)].sum())
    return max(largest_op(graph).bytes, -(-residual // num_devices))


def largest_op(graph: Graph) -> LargestOp:
    """Return the op whose inputs, outputs and workspace are largest together."""
    a = graph.arrays
    owners, sizes = a.tensor_owner.tolist(), a.tensor_bytes.tolist()

    def needs(number: int) -> int:
        storages: dict[int, int] = {}
        inputs = a.input_tensor[a.input_ptr[number] : a.input_ptr[number + 1]].tolist()
        for tensor in (*inputs, *range(a.output_ptr[number], a.output_ptr[number + 1])):
            owner = owners[tensor]
            # A view may have been received as its own bytes, so the smaller of the two counts.
            storages[owner] = max(storages.get(owner, 0), min(sizes[tensor], sizes[owner]))
        return sum(storages.values()) + int(a.workspace[number])

    number = max(range(a.num_ops), key=needs)
    op = graph.ops[number]
    return LargestOp(name=op.name, bytes=needs(number), source=op.source)


def _gradients(graph: Graph) -> set[str]:
    """Tensors of the backward pass that an in-place update of a residual storage reads."""
    residual = {t.name for op in graph.ops if op.memory == "residual" for t in op.outputs}
    parent = {t.name: t.alias_of for op in graph.ops for t in op.outputs if t.alias_of}
    producer = {t.name: op for op in graph.ops for t in op.outputs}

    def owner(name: str) -> str:
        while name in parent:
            name = parent[name]
        return name

    found: set[str] = set()
    for op in graph.ops:
        if any(owner(name) in residual for name in writes(op)):
            read = {owner(name) for name in op.inputs} - residual
            found |= {name for name in read if producer[name].backward_of is not None}
    return found


def memory_by_kind(graph: Graph, plan: PlanArrays) -> MemoryByKind:
    """Return what the device with the largest peak holds at that moment."""
    devices = memory_by_device(graph, plan)
    return max(devices, key=lambda kinds: sum(dataclasses.astuple(kinds)))


def memory_by_device(graph: Graph, plan: PlanArrays) -> list[MemoryByKind]:
    """Return what each device holds at its own peak."""
    return [
        kinds_at(graph, plan, device, curve.index(max(curve)))
        if curve
        else MemoryByKind(**{field.name: 0 for field in dataclasses.fields(MemoryByKind)})
        for device, curve in enumerate(memory_curves(graph, plan))
    ]


def kinds_at(graph: Graph, plan: PlanArrays, device: int, at: int) -> MemoryByKind:
    """Return what a device holds while the op at position `at` of its order runs."""
    kinds = {"parameter": "parameters", "buffer": "parameters", "constant": "parameters"}
    kinds["state"] = "optimizer"
    gradients = _gradients(graph)
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    producer = graph.arrays.tensor_op.tolist()
    held: dict[str, int] = {field.name: 0 for field in dataclasses.fields(MemoryByKind)}
    for storage in device_storages(graph, plan)[device]:
        gone = storage.released >= 0 and storage.released < at
        if storage.allocated > at or gone:
            continue
        kind = kinds.get(graph.ops[producer[storage.tensor]].kind, "activations")
        if storage.message >= 0:
            kind = "transfers"
        elif kind == "activations" and names[storage.tensor] in gradients:
            kind = "gradients"
        held[kind] += storage.bytes
    held["workspace"] = int(graph.arrays.workspace[order_rows(plan)[device][at]])
    return MemoryByKind(**held)


def suggestions(
    graph: Graph, cluster: Cluster, costs: Costs, *, reserve: float, seed: int
) -> list[str]:
    """Return options that were tried and fit: a larger limit, or more devices of this kind."""
    limit, _ = minimum_limit(graph, cluster, costs, reserve=reserve, seed=seed)
    tried = [f"--max-memory {_rounded_up(limit)}"]
    device = cluster.devices[0]
    alike = all(d.memory == device.memory and d.type == device.type for d in cluster.devices)
    if alike and cluster.default_link is not None and not cluster.links:
        for count in (cluster.num_devices * 2, cluster.num_devices * 4):
            more = dataclasses.replace(
                cluster,
                devices=tuple(dataclasses.replace(device, name=f"gpu:{i}") for i in range(count)),
            )
            if _plan(graph, more, costs, reserve, seed) is not None:
                tried.append(f"--devices {count}")
                break
    return tried


def _rounded_up(num_bytes: int) -> str:
    """Return a size of at least `num_bytes` as people write it, at most 1 % larger."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 100 * scale or (num_bytes >= scale and unit == "KiB"):
            return f"{-(-num_bytes // scale)}{unit}"
    return f"{num_bytes}B"
