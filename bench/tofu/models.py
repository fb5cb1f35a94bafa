"""Tofu's figures 8 and 9: throughput on 8 K80s relative to ideal, for every size of its models.

All simulated with roofline costs on K80s of 12 GiB, none of it in reserve. Batches are powers of
two, and a step trains on at most 128 images or 512 sentences in all, the paper's global batch.

- *Ideal*: one device of unlimited memory with that whole batch, times eight.
- *Small batch*: each device has an eighth of the batch, or what fits; no communication.
- *Swapping*: 1, 2, 4 or 8 devices, whichever is best, share the batch and swap storages with the
  host, all over 10 GB/s for both directions. What is used again last goes; what the host has is
  only dropped; transfers are hidden behind computation as far as that lasts. The RNNs may run layer
  by layer, which uses a weight for all time steps in a row. The papers' swapping is less clever.
- *Operator placement*, of the RNNs: whole layers dealt out, at the largest batch that fits.
- *Tofu*: every op over all devices (objective `bytes`), at the largest batch that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from bench.thesis.batch import model
from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph
from pardnn.place.baselines.layer_round_robin import whole_layers
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.planner.sharded.decide import decide_sharded
from pardnn.planner.without_plan.paging import page_bytes
from pardnn.sim.peak import one_device_peak

PRESET, DEVICES = "p2-k80", 8
#: Bytes/s between all devices and the host.
HOST_BANDWIDTH = 10e9

Found = dict[str, Any]


def measure(name: str) -> Found:
    """Return samples/s of each system, and an "error" where one fits at no batch."""
    largest = 512 if name.startswith("rnn") else 128
    ideal = largest / _seconds(*_at(name, largest)) * DEVICES
    row: Found = {"graph": name, "ops": len(_at(name, largest)[0].ops)}
    row["ideal"] = {"batch": largest, "samples_per_s": ideal}
    row["small batch"] = _largest(name, largest // DEVICES, 1, _small)
    row["swapping"] = _swapping(name, largest)
    if name.startswith("rnn"):
        row["operator placement"] = _largest(name, largest, DEVICES, _placed)
    begin = time.process_time()
    row["tofu"] = _largest(name, largest, DEVICES, _tofu)
    row["tofu"]["cpu_s"] = time.process_time() - begin
    _at.cache_clear()
    return row


@cache
def _at(name: str, batch_size: int) -> tuple[Graph, Costs]:
    return model(name, batch_size, preset="k80")


def _seconds(graph: Graph, costs: Costs) -> float:
    del graph
    return float(costs.on("accelerator").sum())


def _largest(
    name: str, largest: int, num_devices: int, step: Callable[[Graph, Costs], float]
) -> Found:
    """Return the throughput at the largest batch that fits, or an "error".

    Tried are batches whose peak on one device, in the order as written, would fit if it were
    divided evenly.

    Args:
        name: Of the model.
        largest: Batch to try first; it is halved until one fits.
        num_devices: That share one batch; the others are replicas.
        step: Seconds of a step; raises InfeasibleError if the batch does not fit.
    """
    memory = (Cluster.preset(PRESET).devices[0].memory or 0) * num_devices
    batch = largest
    while batch >= 1:
        graph, costs = _at(name, batch)
        if one_device_peak(graph.arrays) <= memory or batch == 1:
            try:
                seconds = step(graph, costs)
            except InfeasibleError:
                pass
            else:
                each = DEVICES // num_devices  # replicas
                return {"batch": batch * each, "samples_per_s": batch * each / seconds}
        batch //= 2
    return {"error": "out of memory"}


def _small(graph: Graph, costs: Costs) -> float:
    cluster = Cluster.preset(PRESET, 1)
    decide(Problem(graph, cluster, costs, PlanOptions(reserve=0.0)), "single")
    return _seconds(graph, costs)


def _placed(graph: Graph, costs: Costs) -> float:
    cluster = Cluster.preset(PRESET)
    found = decide(Problem(graph, cluster, costs, PlanOptions(reserve=0.0)), "layer-round-robin")
    return found.makespan_s


def _tofu(graph: Graph, costs: Costs) -> float:
    problem = Problem(
        graph, Cluster.preset(PRESET), costs, PlanOptions(objective="bytes", reserve=0.0)
    )
    found = decide_sharded(problem, "tofu")
    return found.makespan_s


def _swapping(name: str, largest: int) -> Found:
    """Return the best of 1 to 8 devices that share the batch and the link to the host."""
    memory, best = Cluster.preset(PRESET).devices[0].memory or 0, Found()
    for count in (1, 2, 4, DEVICES):
        batch = largest // count
        graph, costs = _at(name, batch)
        orders = (None, layer_order(graph)) if name.startswith("rnn") else (None,)
        moved = min(page_bytes(graph, memory, "belady", order) for order in orders)
        step = max(_seconds(graph, costs), moved * count / HOST_BANDWIDTH)
        found = {"batch": largest, "devices": count, "samples_per_s": largest / step}
        if found["samples_per_s"] > best.get("samples_per_s", 0.0):
            best = found | {"swapped_bytes": moved}
    return best


def layer_order(graph: Graph) -> list[int]:
    """Return the ops in an order that stays in a layer of the model for as long as it can.

    A recurrent net then uses a weight for all time steps in a row. Among layers the one whose first
    ready op was written earliest is next. O(ops log ops).
    """
    a, layers = graph.arrays, whole_layers(graph)
    edges = op_edges(a)
    waiting = np.bincount(edges[:, 1], minlength=a.num_ops).tolist()
    successors: list[list[int]] = [[] for _ in range(a.num_ops)]
    for before, after in edges.tolist():
        successors[before].append(after)
    ready: dict[str, list[int]] = {}
    for op in (op for op in a.topological.tolist() if waiting[op] == 0):
        ready.setdefault(layers[op], []).append(op)
    order: list[int] = []
    while ready:
        layer = min(ready, key=lambda name: ready[name][0])
        while layer in ready:
            op = heappop(ready[layer])
            if not ready[layer]:
                del ready[layer]
            order.append(op)
            for after in successors[op]:
                waiting[after] -= 1
                if waiting[after] == 0:
                    heappush(ready.setdefault(layers[after], []), after)
    return order
