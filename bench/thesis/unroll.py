"""Several training steps in a row as one graph: the same network at the thesis's number of ops.

ATen makes several times fewer ops of a network than TensorFlow 1.14, so planning times are also
compared at equal size. Parameters and state are those of one step; every step reads what the step
before wrote in place, and writes it after all that read the old values.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from bench.thesis.batch import model
from bench.thesis.search import RESERVE, cluster_of, timed_plan
from pardnn.cost.costs import Costs, graph_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, storage_owners, writes
from pardnn.place.baselines.linear_clustering import place_linear_clustering
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.check import capacities
from pardnn.sim.machine import machine_of


def unrolled(graph: Graph, costs: Costs, num_steps: int) -> Graph:
    """Return the graph of `num_steps` steps; its ops state their seconds.

    Args:
        graph: Of one step.
        costs: Of its ops, on accelerators.
        num_steps: At least 1.
    """
    seconds = costs.on("accelerator").tolist()
    owners = storage_owners(graph.ops)
    lasting = {
        tensor.name
        for op in graph.ops
        if op.is_source and op.kind != "input"
        for tensor in op.outputs
    }
    version = {name: name for name in lasting}
    consumers: dict[str, list[str]] = {}
    ops: list[Op] = []
    for number in range(num_steps):
        now, found = _Names(version, number, lasting), dict[str, list[str]]()
        for i, op in enumerate(graph.ops):
            kept = op.is_source and op.kind != "input"
            if kept and number > 0:
                continue
            ops.append(_copy(op, now, seconds[i], owners, consumers))
            _read(op, now, owners, lasting, found)
        version = _versions(graph, now, owners, lasting)
        consumers = found
    return build_graph(f"{graph.name} x {num_steps}", ops)


class _Names:
    """Names of the tensors and ops of one of the steps."""

    def __init__(self, version: Mapping[str, str], number: int, lasting: set[str]) -> None:
        self.version, self.number, self.lasting = version, number, lasting

    def op(self, name: str) -> str:
        return name if self.number == 0 else f"{name}~{self.number}"

    def tensor(self, name: str) -> str:
        return self.version[name] if name in self.lasting else self.op(name)


def _copy(
    op: Op,
    now: _Names,
    seconds: float,
    owners: Mapping[str, str | None],
    consumers: Mapping[str, list[str]],
) -> Op:
    first = now.number == 0
    written = {owners[name] for name in writes(op)}
    late = [name for owner in written if owner for name in consumers.get(owner, ())]
    after = [*map(now.op, op.after), *late]
    outputs = tuple(
        dataclasses.replace(
            tensor,
            name=tensor.name if first else now.op(tensor.name),
            alias_of=None if tensor.alias_of is None else now.tensor(tensor.alias_of),
        )
        for tensor in op.outputs
    )
    mutates = [now.tensor(name) for name in writes(op)]
    return dataclasses.replace(
        op,
        name=op.name if first else now.op(op.name),
        inputs=tuple(map(now.tensor, op.inputs)),
        after=tuple(dict.fromkeys(after)),
        outputs=outputs,
        seconds=None if op.is_source else {"accelerator": seconds},
        arguments={"mutates": mutates} if mutates else None,
        backward_of=None,
    )


def _read(
    op: Op,
    now: _Names,
    owners: Mapping[str, str | None],
    lasting: set[str],
    found: dict[str, list[str]],
) -> None:
    for owner in {owners[name] for name in op.inputs}:
        if owner in lasting:
            found.setdefault(owner, []).append(now.op(op.name))


def _versions(
    graph: Graph, now: _Names, owners: Mapping[str, str | None], lasting: set[str]
) -> dict[str, str]:
    """Return what stands for each lasting tensor after the step: the result of its last write."""
    version = dict(now.version)
    for op in graph.ops:
        for tensor in op.outputs:
            name = tensor.alias_of
            owner = None if name is None else owners[name]
            if owner in lasting and name in writes(op):
                version[owner] = now.op(tensor.name)
    return version


def unrolled_row(name: str, batch_size: int, num_devices: int, num_ops: int) -> dict[str, Any]:
    """Plan enough steps of a model in a row to have at least `num_ops` ops, under memory limits.

    The result has CPU seconds with and without limits, and linear clustering's without.

    Args:
        name: Of the captured graph.
        batch_size: Of each step.
        num_devices: Number of V100s.
        num_ops: Ops of the unrolled graph, at least.
    """
    graph, costs = model(name, batch_size)
    more = sum(1 for op in graph.ops if not op.is_source)
    num_steps = 1 + max(0, math.ceil((num_ops - len(graph.ops)) / more))
    long = unrolled(graph, costs, num_steps)
    cluster = cluster_of(num_devices)
    machine = machine_of(graph_costs(long), cluster)
    nowhere: list[int | None] = [None] * num_devices
    row: dict[str, Any] = {
        "graph": name, "batch": batch_size, "devices": num_devices, "steps": num_steps,
        "ops": len(long.ops), "thesis_ops": num_ops,
    }  # fmt: skip
    plans = {
        "free": lambda: timed_plan(long, machine, nowhere),
        "limited": lambda: timed_plan(long, machine, capacities(cluster, RESERVE)),
        "thesis": lambda: timed_plan(long, machine, capacities(cluster, RESERVE), place_thesis),
        "clustering": lambda: timed_plan(long, machine, nowhere, place_linear_clustering),
    }
    for kind, plan in plans.items():
        begin = time.process_time()
        try:
            made = plan()
        except InfeasibleError as error:
            row[kind] = {"cpu_s": time.process_time() - begin, "error": error.message[:200]}
            continue
        row[kind] = {
            "cpu_s": made.cpu_s,
            "makespan_s": made.makespan,
            "moved": made.decision.moved_ops,
            "seconds_by_step": dict(made.decision.seconds_by_step),
        }
    return row
