"""An estimate of a sharding's seconds, before anything is partitioned.

Problem: a cut over many devices takes many times longer to partition and simulate than to find.
Idea: evaluate the objective `seconds` for one sharding. Equal calls are counted once, and a region
that several ops need is fetched once.
Complexity: O(distinct ops x devices^2), and O(ops) look-ups.
Reference: none. Deviations from the simulator: devices are equal, a device's messages follow those
of the previous op, none overlaps computation, and waits between ops are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.cost.presets import PRESET_NAMES, device_model
from pardnn.cost.roofline import least_share, op_seconds
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import PARTIAL
from pardnn.shard.partition.call import call_of, fingerprint
from pardnn.shard.partition.interning import intern_call
from pardnn.shard.partition.mesh_strategies import MeshStrategies, mesh_strategy_of, owned_array
from pardnn.shard.search.box_volumes import same_boxes
from pardnn.shard.search.communication_bytes import (
    element_bytes,
    is_call,
    needed,
    produced,
    slots_of,
)
from pardnn.shard.search.objective_seconds import (
    exchange_seconds,
    local_op,
    traffic_of_fetch,
    traffic_of_result,
)
from pardnn.shard.sharding import Sharding


class StepSeconds(NamedTuple):
    """What the slowest device does in a step.

    Attributes:
        computing: Seconds of its local ops.
        sending: Seconds of the messages that it waits for, if none runs beside computation.
    """

    computing: float
    sending: float


class _OpSeconds(NamedTuple):
    """Of one op: computing, results, and what it fetches, by position among its tensors."""

    computing: float
    results: float
    fetches: tuple[tuple[int, bytes, float], ...]


def sharding_seconds(
    graph: Graph, sharding: Sharding, cluster: Cluster, costs: Costs
) -> StepSeconds:
    """Return how long a step takes, by an estimate.

    Adding up sums whose terms are on devices (`PARTIAL`) is counted as free.

    Args:
        graph: The graph.
        sharding: Of all its tensors and calls, on a mesh of equal parts; see `legalize`.
        cluster: Has the links of the mesh.
        costs: Of the graph's ops.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    slowest = np.max([costs.on(each.type, each.speed) for each in cluster.devices], axis=0)
    model = device_model(costs.roofline)
    kept: dict[Any, _OpSeconds] = {}
    fetched = set[tuple[str, bytes]]()
    computing = sending = 0.0
    for op, whole in zip(graph.ops, slowest.tolist(), strict=True):
        if not is_call(op):
            computing += whole
            continue
        call = call_of(op, tensors)
        names = list(dict.fromkeys([*call.shapes, *(t.name for t in op.outputs)]))
        key = (
            fingerprint(call), whole,
            tuple(names.index(n) for n in op.inputs),
            tuple((sharding.layouts[n], element_bytes(tensors[n])) for n in names),
            sharding.axes[op.name],
        )  # fmt: skip
        if key not in kept:
            strategies = mesh_strategy_of(call, sharding.axes[op.name], sharding.mesh)
            assert strategies is not None, "legal shardings cut what can be cut"
            moved = _moved(op, call, strategies, names, tensors, sharding, cluster)
            numbers = intern_call(call), *set(strategies.calls[0])
            base, *local = [op_seconds(*local_op(op, number), model) for number in numbers]
            share = max(local) / base if base else 0.0
            kept[key] = moved._replace(computing=share * whole)
        found = kept[key]
        computing, sending = computing + found.computing, sending + found.results
        for number, regions, seconds in found.fetches:
            if (names[number], regions) not in fetched:
                fetched.add((names[number], regions))
                sending += seconds
    return StepSeconds(computing, sending)


def least_computing(graph: Graph, cluster: Cluster, costs: Costs) -> float:
    """Return seconds for which each device computes at least, however all ops are cut over all.

    0 where that is not known: unlike devices may have unlike shares, and costs that are not those
    of one device model do not say what a part of an op takes.

    Args:
        graph: The graph.
        cluster: All of its devices share each op.
        costs: Of the graph's ops.
    """
    if (
        costs.source not in PRESET_NAMES
        or len({(each.type, each.speed) for each in cluster.devices}) > 1
    ):
        return 0.0
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    model, devices, first = device_model(costs.roofline), cluster.num_devices, cluster.devices[0]
    seconds = costs.on(first.type, first.speed).tolist()
    return sum(
        whole * (least_share(op, tensors, model, devices) if is_call(op) else 1.0)
        for op, whole in zip(graph.ops, seconds, strict=True)
    )


def _moved(
    op: Op,
    call: Any,
    strategies: MeshStrategies,
    names: list[str],
    tensors: Mapping[str, Tensor],
    sharding: Sharding,
    cluster: Cluster,
) -> _OpSeconds:
    """Return the seconds of an op's messages."""
    sizes, links, is_serial = sharding.mesh.shape, cluster.arrays, cluster.link_model == "serial"

    def seconds(name: str, sent: np.ndarray) -> float:
        sent = (sent * element_bytes(tensors[name]))[None]
        taken = exchange_seconds(sent, links.latency.T, links.bandwidth.T, is_serial=is_serial)
        return float(taken[0])

    def fetching(name: str, regions: np.ndarray) -> float:
        mine = owned(name)
        return seconds(name, traffic_of_fetch(regions, mine, same_boxes(mine)))

    def owned(name: str) -> np.ndarray:
        layout = tuple(None if dim == PARTIAL else dim for dim in sharding.layouts[name])
        found = owned_array(tensors[name].shape or (), layout, sizes)
        assert found is not None, "legal shardings leave each device a part"
        return found

    def reduced(name: str, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        return tuple(
            flag and dim != PARTIAL for flag, dim in zip(flags, sharding.layouts[name], strict=True)
        )

    fetches = tuple(
        (names.index(name), regions.tobytes(), fetching(name, regions))
        for name, rows in needed(strategies, slots_of(call)).items()
        for regions in rows
    )
    results = sum(
        seconds(name, traffic_of_result(result, reduced(name, flags), sizes, owned(name)))
        for name, result, flags in produced(op, strategies)
        if tensors[name].shape
    )
    return _OpSeconds(0.0, results, fetches)
