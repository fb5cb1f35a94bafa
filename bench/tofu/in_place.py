"""Tofu's in-place gradient aggregation (section 7.2) on its RNNs: what it would bring.

`python -m bench tofu-in-place rnn_6_4k:512 ...` rewrites kept steps so that a weight's gradients of
all time steps are added up in one buffer, cuts the step as captured and the rewritten one over 8
K80s without a limit, and writes `bench/results/<date>_tofu-in-place.md`. x.add_(y) gives the bits
of x + y. With `--whole` ops stay whole and are placed by `pardnn`: `<date>_in-place-sums.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from bench.common import RESULTS
from bench.thesis.batch import model
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor, alias_of
from pardnn.plan.memory import peak_bytes
from pardnn.planner.options import PlanOptions
from pardnn.planner.portfolio import decide
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import decide_sharded
from pardnn.sim.peak import live_bytes
from testbed.kept_graphs import load

ADD, ADD_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"

COLUMNS = (
    "step", "batch", "sums in place", "peak, GiB", "in place", "adding, GiB", "in place",
    "peak at", "step, s", "in place",
)  # fmt: skip

HEAD = (
    "# Gradients of time steps added up in place",
    "",
    "Tofu's section 7.2 adds the gradients that a weight gets from each time step up in one",
    "buffer. Here captured steps were rewritten so, and both cut over 8 K80s (`bytes`, no",
    "limit). *Adding* is the most that a device holds while it adds gradients up: the peak is",
    "lowered only where that is the peak. A step as captured frees the old sum at once.",
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
        peak: Most bytes on any device.
        adding: Most bytes on any device while gradients are added up.
        at: Kind of the op at the peak.
        step_s: Simulated.
    """

    peak: int
    adding: int
    at: str
    step_s: float


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


def measure(graph: Graph, sums: list[str]) -> Measured:
    """Cut a step over 8 K80s under `bytes`, without a limit of memory."""
    problem = Problem(
        graph,
        without_limits(Cluster.preset("p2-k80")),
        preset_costs(graph, "k80"),
        PlanOptions(objective="bytes", reserve=0.0),
    )
    found = decide_sharded(problem, "tofu")
    held = live_bytes(found.graph.arrays, found.arrays)
    ops = [found.graph.ops[n] for n in found.arrays.order_op.tolist()]
    wanted = set(sums)
    is_sum = np.array([op.name.rpartition("@")[0] in wanted for op in ops])
    at = ops[int(held.argmax())].kind
    return Measured(int(held.max()), int(held[is_sum].max()), at, found.makespan_s)


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
    """Return the row of a step NAME:BATCH: peaks as captured and with gradients added in place."""
    name, _, batch = step.partition(":")
    graph = model(name, int(batch), preset="k80")[0]
    changed, sums = accumulated(graph)
    before, after = measure(graph, sums), measure(changed, sums)
    cells = [name, batch, len(sums), *(f"{n / 2**30:.3f}" for n in (before.peak, after.peak))]
    cells += [f"{n / 2**30:.3f}" for n in (before.adding, after.adding)]
    cells += [f"`{before.at}`", f"{before.step_s:.3f}", f"{after.step_s:.3f}"]
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
