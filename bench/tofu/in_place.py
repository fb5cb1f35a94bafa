"""Tofu's in-place gradient aggregation (section 7.2) on its RNNs: what it brings.

`python -m bench tofu-in-place rnn_6_4k:128 ...` cuts kept steps over 8 K80s with and without sums
in place (`shard.spmd.sums_in_place`), looks for the largest batch that fits either way, and writes
`bench/results/<date>_tofu-in-place.md`. With `--whole` ops stay whole, the captured graph is
rewritten, and `pardnn` places it: `<date>_in-place-sums.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest import mock

from bench.common import RESULTS
from bench.thesis.batch import model
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor, alias_of
from pardnn.plan.memory import peak_bytes
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE
from pardnn.plan.plan import plan_arrays, planned_graph
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.planner.sharded import complete
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.planner.sharded.decide import decide_sharded
from pardnn.shard.search.tofu import search
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.sim.peak import live_bytes, peaks
from testbed.kept_graphs import load

#: Samples to which the largest batch is looked for.
GRAIN = 32

COLUMNS = (
    "step", "batch", "kept for", "sums in place", "peak, GiB", "in place", "peak at", "in place",
    "step, s", "in place", "sent, GiB", "in place", "largest batch", "in place",
)  # fmt: skip

HEAD = (
    "# Gradients of time steps added up in place",
    "",
    "Tofu's section 7.2 adds the gradients that a weight gets from each time step up in one",
    "buffer. Steps are cut over 8 K80s (`bytes`) with new tensors for sums, and with sums in their",
    "first terms. A step as captured frees the old sum at once, so one shard of a gradient is what",
    "there is to gain. *Kept for*: ops for which a fetched region is kept for another reader. The",
    "largest batch, to " + str(GRAIN) + " samples, is that of these cuts whose slices are received",
    "one after the other, which takes least memory, in 12 GiB of each device.",
)

WHOLE_COLUMNS = (
    "step", "batch", "sums of weights", "all sums", "peak, GiB", "weights in place",
    "all in place", "step, s", "weights, s", "all, s",
)  # fmt: skip

WHOLE_HEAD = (
    "# Sums in place where ops stay whole",
    "",
    "`x + y` whose first term nothing else reads, written into that term: in the graph, before",
    "ops are placed by `pardnn` on 8 K80s without a limit. *Weights*: sums of a weight's shape",
    "alone. *Peak*: the most on any device. An op that writes a storage shares a device with",
    "what made it, so a chain of sums is one group.",
)


class Measured(NamedTuple):
    """A cut step.

    Attributes:
        reuse: Ops for which a fetched region is kept.
        sums: Sums on all devices that are in place and are none in the graph.
        peak: Most bytes on any device.
        at: Kind of the op at the peak.
        step_s: Simulated.
        sent: Bytes.
    """

    reuse: int
    sums: int
    peak: int
    at: str
    step_s: float
    sent: int


def accumulated(graph: Graph, *, everywhere: bool = False) -> tuple[Graph, list[str]]:
    """Return a step whose sums of weights' gradients are made in place, and those ops' names.

    A sum is made in the first of its terms that is laid out as the sum is and fills a storage that
    nothing else reads: its own, or that of what it is the only view of.

    Args:
        graph: As captured.
        everywhere: Whether all sums are made so, not only those of a weight's shape.
    """
    readers = Counter(name for op in graph.ops for name in op.inputs)
    made = {tensor.name: (op, tensor) for op in graph.ops for tensor in op.outputs}
    weights = {op.outputs[0].shape for op in graph.ops if op.kind == "parameter"}

    def may_take(name: str, result: Tensor) -> bool:
        tensor = made[name][1]
        if (tensor.shape, tensor.dtype, tensor.strides) != (
            result.shape, result.dtype, result.strides,
        ):  # fmt: skip
            return False
        base: str | None = name
        while base is not None:
            op, tensor = made[base]
            if op.is_source or readers[base] != 1 or tensor.bytes != result.bytes:
                return False
            base = alias_of(op, tensor)
        return True

    ops: list[Op] = []
    changed: list[str] = []
    for op in graph.ops:
        is_sum = op.kind == ADD and len(op.inputs) == 2 and not (op.arguments or {}).get("kwargs")
        target = None
        if is_sum and (everywhere or op.outputs[0].shape in weights):
            target = next((name for name in op.inputs if may_take(name, op.outputs[0])), None)
        if target is not None:
            changed.append(op.name)
            op = _in_place(op, target)
        ops.append(op)
    return build_graph(graph.name, ops), changed


def _in_place(op: Op, target: str) -> Op:
    other = next(name for name in op.inputs if name != target)
    return dataclasses.replace(
        op,
        kind=ADD_IN_PLACE,
        inputs=(target, other),
        memory="reference",
        outputs=(dataclasses.replace(op.outputs[0], alias_of=target),),
        arguments={"args": [{"tensor": target}, {"tensor": other}]},
    )


def cut(graph: Graph, cluster: Cluster, *, in_place: bool) -> ShardedPlan:
    """Cut a step by `tofu` under `bytes`, with sums in place or without."""
    options = PlanOptions(objective="bytes", reserve=0.0)
    problem = Problem(graph, cluster, preset_costs(graph, "k80"), options)
    made = functools.partial(spmd_partition, sums_in_place=in_place)
    with mock.patch.object(complete, "spmd_partition", made):
        return decide_sharded(problem, "tofu")


def measure(graph: Graph, *, in_place: bool) -> Measured:
    """Cut a step over 8 K80s without a limit of memory."""
    found = cut(graph, without_limits(Cluster.preset("p2-k80")), in_place=in_place)
    held = live_bytes(found.graph.arrays, found.arrays)
    at = found.graph.ops[int(found.arrays.order_op[held.argmax()])].kind
    kinds = {op.name: op.kind for op in graph.ops}
    sums = sum(
        op.kind == ADD_IN_PLACE and kinds.get(op.name.rpartition("@")[0]) == ADD
        for op in found.graph.ops
    )
    assert found.plan.partition is not None
    reuse = found.plan.partition.reuse
    return Measured(reuse, sums, int(held.max()), at, found.makespan_s, found.transfer_bytes)


def largest_batch(name: str, known: int, *, in_place: bool) -> int:
    """Return the largest batch whose plan of least memory fits 8 K80s, to `GRAIN` samples.

    Args:
        name: Of the model.
        known: A batch that fits, a multiple of `GRAIN`.
        in_place: Whether sums are made in place.
    """
    cluster = Cluster.preset("p2-k80")
    limit = cluster.devices[0].memory or 0

    def over(count: int) -> int:
        graph = model(name, count * GRAIN, preset="k80")[0]
        sharding = legalize(graph, search(graph, without_limits(cluster), "bytes"))
        plan = spmd_partition(graph, sharding, in_turn=True, sums_in_place=in_place)
        local = planned_graph(graph, plan)
        return int(peaks(local.arrays, plan_arrays(local, plan)).max()) - limit

    return GRAIN * last_below(over, known // GRAIN)


def last_below(over: Callable[[int], int], low: int) -> int:
    """Return the last number for which something that grows nearly in line is not above 0.

    Args:
        over: What grows.
        low: A number for which it is not.
    """
    below = over(low)
    high = 2 * low
    while (above := over(high)) <= 0:
        low, below, high = high, above, 2 * high
    while high - low > 1:
        middle = low + round((high - low) * -below / (above - below))
        middle = min(max(middle, low + 1), high - 1)
        value = over(middle)
        if value <= 0:
            low, below = middle, value
        else:
            high, above = middle, value
    return low


def without_limits(cluster: Cluster) -> Cluster:
    """Return a cluster whose devices hold anything."""
    devices = tuple(dataclasses.replace(device, memory=None) for device in cluster.devices)
    return dataclasses.replace(cluster, devices=devices)


def whole_row(step: str) -> str:
    """Return the row of a step whose ops are placed whole, a write with the storage it changes.

    Args:
        step: NAME, or NAME:BATCH.
    """
    name, _, batch = step.partition(":")
    graph = model(name, int(batch), preset="k80")[0] if batch else load(name)
    (of_weights, few), (of_all, many) = accumulated(graph), accumulated(graph, everywhere=True)
    cells: list[object] = [name, batch or "-", len(few), len(many)]
    found = [placed(each) for each in (graph, of_weights, of_all)]
    cells += [f"{peak / 2**30:.2f}" for peak, _ in found]
    cells += [f"{seconds:.3f}" for _, seconds in found]
    return f"| {' | '.join(map(str, cells))} |"


def placed(graph: Graph) -> tuple[int, float]:
    """Return most bytes on any device and the simulated seconds of `pardnn` on 8 K80s."""
    cluster = without_limits(Cluster.preset("p2-k80"))
    options = PlanOptions(reserve=0.0)
    found = decide(Problem(graph, cluster, preset_costs(graph, "k80"), options), "pardnn")
    return max(peak_bytes(graph, found.plan)), found.makespan_s


def row(step: str) -> str:
    """Return the row of a step NAME:BATCH: without sums in place and with them."""
    name, _, batch = step.partition(":")
    graph = model(name, int(batch), preset="k80")[0]
    new, old = measure(graph, in_place=False), measure(graph, in_place=True)
    cells: list[object] = [name, batch, new.reuse if new.reuse == old.reuse else "not the same"]
    cells += [old.sums, *(f"{each.peak / 2**30:.3f}" for each in (new, old))]
    cells += [f"`{each.at}`" for each in (new, old)]
    cells += [f"{each.step_s:.3f}" for each in (new, old)]
    cells += [f"{each.sent / 2**30:.2f}" for each in (new, old)]
    most = largest_batch(name, int(batch), in_place=False)
    cells += [most, largest_batch(name, most, in_place=True)]
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str]) -> None:
    """Measure the steps that are named, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench tofu-in-place", description=__doc__)
    parser.add_argument("steps", nargs="+", help="NAME:BATCH")
    parser.add_argument("--whole", action="store_true", help="place ops whole; :BATCH may be left")
    options = parser.parse_args(arguments)
    today = datetime.date.today().isoformat()
    columns, head = (WHOLE_COLUMNS, WHOLE_HEAD) if options.whole else (COLUMNS, HEAD)
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(whole_row if options.whole else row, options.steps))
    command = f"tofu-in-place {'--whole ' * options.whole}{' '.join(options.steps)}"
    text = "\n".join(
        [
            head[0], "", f"`python -m bench {command}`, {today}. Simulated.", *head[1:], "",
            f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *rows, "",
        ]
    )  # fmt: skip
    topic = "in-place-sums" if options.whole else "tofu-in-place"
    (RESULTS / f"{today}_{topic}.md").write_text(text)
