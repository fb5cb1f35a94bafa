"""The baselines of the thesis: Figs. 6.3, 6.4 and 6.5, at the batch sizes of Table 6.1.

All run on the same simulated V100s. What is not modelled is left out in the baseline's favour.

- *Tensor parallelism by hand* (6.3): what a user of Mesh-TensorFlow or Megatron-LM writes for a
  transformer (Shazeer et al., 2018; Shoeybi et al., 2019). Heads and the inner width are split over
  the devices, the first product by columns and the second by rows, the vocabulary by pieces; layer
  norms, residual sums and their activations are on every device. Sums over the devices are
  all-reduces by the faster of ring and tree; none of them overlaps computation. Heads that are put
  together count as a sum too, twice what gathering them takes: under 1 % of a step.
- *Data parallelism*: every device has all parameters and its share of the batch; the all-reduce of
  the gradients is hidden behind the backward pass as far as that lasts.
- *Gradient checkpointing* (6.4): data parallelism whose replicas compute units or layers twice, by
  `torch.utils.checkpoint` in the captured step (`bench/thesis/checkpoint.py`).
- *Unified memory* (6.5): one device runs the whole batch; storages are pages, the least recently
  used go to the host, at 12 GB/s for both directions (PCI Express 3.0 x16 less protocol, assumed).
  A step starts as the step before left the memory; faults themselves cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.thesis.batch import again_paths, model
from bench.thesis.collectives import all_reduce_seconds
from bench.thesis.search import RESERVE, cluster_of, timed_plan
from bench.thesis.split import split_of, split_step
from pardnn.api.batch_scaling import resized
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.decision import Decision
from pardnn.place.pardnn import place_pardnn
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.check import capacities
from pardnn.planner.without_plan.paging import page_bytes
from pardnn.sim.machine import machine_of

#: Bytes/s between a device and the host.
HOST_BANDWIDTH = 12e9


def baselines_row(name: str, batch_size: int, num_devices: int) -> dict[str, Any]:
    """Return samples/s of ParDNN and of each baseline; an "error" where one does not fit.

    Args:
        name: Of the captured graph.
        batch_size: Of all devices together.
        num_devices: Number of V100s.
    """
    graph, costs = model(name, batch_size)
    row: dict[str, Any] = {"graph": name, "batch": batch_size, "devices": num_devices}
    row["pardnn"] = _planned(graph, costs, num_devices, batch_size)
    row["pardnn-thesis"] = _planned(graph, costs, num_devices, batch_size, place_thesis)
    row["data-parallel"] = data_parallel(name, batch_size, num_devices)
    if all(path.is_file() for path in again_paths(name)):
        row["checkpointing"] = data_parallel(name, batch_size, num_devices, again=True)
    row["unified-memory"] = unified_memory(graph, costs, batch_size)
    if name.startswith("trn"):
        row["tensor-parallel"] = largest_tensor_parallel(name, batch_size, num_devices)
    return row


def state_row(name: str) -> dict[str, Any]:
    """Return what each replica holds between steps, and what a device has for it, in bytes.

    Args:
        name: Of the captured graph.
    """
    graph, _ = model(name, 1)
    held = (t for op in graph.ops if op.memory == "residual" and op.kind != "input"
            for t in op.outputs if t.alias_of is None)  # fmt: skip
    (usable,) = capacities(cluster_of(1), RESERVE)
    return {"graph": name, "bytes": sum(t.bytes for t in held), "usable_bytes": usable}


def largest_tensor_parallel(name: str, batch_size: int, num_devices: int) -> dict[str, Any]:
    """Simulate the hand-written plan at the largest batch it fits, at most this one.

    As the thesis does with Mesh-TensorFlow; ParDNN's samples/s at that batch stand beside it.

    Args:
        name: Of the captured graph.
        batch_size: Tried first; it is halved until one fits.
        num_devices: Number of V100s.
    """
    found: dict[str, Any] = {"error": "does not fit"}
    while batch_size >= 1 and "error" in found:
        graph, costs = model(name, batch_size)
        found = tensor_parallel(graph, num_devices, batch_size)
        if "error" not in found:
            found["batch"] = batch_size
            found["pardnn"] = _planned(graph, costs, num_devices, batch_size)
        batch_size //= 2
    return found


def _planned(
    graph: Graph,
    costs: Costs,
    num_devices: int,
    batch_size: int,
    place: Callable[..., Decision] = place_pardnn,
) -> dict[str, Any]:
    cluster = cluster_of(num_devices)
    try:
        made = timed_plan(graph, machine_of(costs, cluster), capacities(cluster, RESERVE), place)
    except InfeasibleError as error:
        return {"error": error.message.splitlines()[0]}
    return {
        "step_s": made.makespan,
        "samples_per_s": batch_size / made.makespan,
        "peak_bytes": max(made.peak),
    }


def data_parallel(
    name: str, batch_size: int, num_devices: int, *, again: bool = False
) -> dict[str, Any]:
    """Simulate replicas that share a batch; with `again`, the checkpointed form of the step.

    Args:
        name: Of the captured graph.
        batch_size: Of all replicas together.
        num_devices: Number of replicas.
        again: Whether parts are computed twice, by checkpointing.
    """
    graph, costs = model(name, math.ceil(batch_size / num_devices), again=again)
    found = _planned(graph, costs, 1, batch_size)
    if "error" in found:
        return found
    gradients = sum(t.bytes for op in graph.ops if op.kind == "parameter" for t in op.outputs)
    reduction = all_reduce_seconds(gradients, num_devices, **_link(num_devices))
    seconds = max(found["step_s"], reduction)
    return found | {"step_s": seconds, "samples_per_s": batch_size / seconds}


def _link(num_devices: int) -> dict[str, float]:
    rate = cluster_of(num_devices).default_link
    assert rate is not None
    return {"bandwidth": rate.bandwidth, "latency": rate.latency}


def tensor_parallel(graph: Graph, num_devices: int, batch_size: int) -> dict[str, Any]:
    """Simulate the hand-written plan of a transformer: every device does the same.

    Args:
        graph: Of the step at this batch.
        num_devices: Over which tensors are split.
        batch_size: Of the step.
    """
    split = split_of(graph)
    ops, seconds, reduced = split_step(graph, split, num_devices)
    one = resized(graph, ops)
    costs = Costs(seconds={"accelerator": np.array(seconds)}, source="v100")
    found = _planned(one, costs, 1, batch_size)
    if "error" in found:
        return found
    link = _link(num_devices)
    messages = sum(all_reduce_seconds(size, num_devices, **link) for size in reduced)
    total = found["step_s"] + messages
    return found | {
        "step_s": total, "samples_per_s": batch_size / total,
        "all_reduces": len(reduced), "all_reduce_s": messages,
    }  # fmt: skip


def unified_memory(graph: Graph, costs: Costs, batch_size: int) -> dict[str, Any]:
    """Simulate one device whose memory pages to the host.

    Args:
        graph: Of the step at this batch.
        costs: Of its ops.
        batch_size: Of the step.
    """
    memory = cluster_of(1).devices[0].memory or 0
    paged = page_bytes(graph, memory)
    seconds = float(costs.on("accelerator").sum()) + paged / HOST_BANDWIDTH
    return {"step_s": seconds, "samples_per_s": batch_size / seconds, "paged_bytes": paged}
