"""Memory of the placement page: plans found and limits kept, on many graphs, tight to loose.

A plan must be found whenever the residual groups, packed largest first, leave on every device the
transient bytes that one device needs at its peak. Where none is found, the error must name the
device, the op and what no plan can do without.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs, graph_costs, preset_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.colocation import closed_arrays
from pardnn.plan.check import plan_problems
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.peak import residual_bytes
from testbed.families import training_step

#: Captured steps that are planned beside the random graphs.
CAPTURED = ("gpt2", "word_rnn")
#: Limits from 0.9 / K to 1.1 of the peak of one device; a graph has two of them, one tight.
LIMITS = 6
#: What the error of an infeasible case must hold.
WITNESS = ("device", "op", "bytes", "usable_bytes", "lower_bound_bytes", "alive")

Rows = list[dict[str, Any]]


class Case(NamedTuple):
    """A graph, its costs and how many devices share its memory."""

    kind: str
    graph: Graph
    costs: Costs
    devices: int


def mixed_step(num_ops: int, rng: np.random.Generator, name: str) -> Graph:
    """Return ops of every memory type at random: parameters, views, in-place writes, workspace.

    A tenth of the ops share a group with an earlier one. Only the newest value of a storage is
    read, and the op that overwrites it comes after all that read it.

    Args:
        num_ops: Number of ops.
        rng: Draws all of it.
        name: Of the graph.
    """
    ops: list[Op] = []
    newest: list[str] = []  # readable tensors
    storage: dict[str, str] = {}
    consumers: dict[str, list[str]] = {}
    for i in range(num_ops):
        kind = str(rng.choice(["compute", "parameter", "view", "write"], p=[0.6, 0.2, 0.1, 0.1]))
        reads = list(rng.choice(newest, min(len(newest), int(rng.integers(1, 4))), replace=False))
        if not reads and kind != "parameter":
            kind = "parameter"
        op, size, made = f"op{i}", int(rng.integers(1, 2**22)), f"t{i}"
        alias, after, group = None, (), None
        if kind in ("view", "write"):
            reads = [str(reads[0])]
            alias, owner = reads[0], storage[reads[0]]
            if kind == "write":
                after = tuple(sorted(set(consumers[owner])))
                newest = [t for t in newest if storage[t] != owner]
                consumers[owner] = []
        if kind == "compute" and rng.random() < 0.1:
            group = f"g{int(rng.integers(0, 4))}"
        storage[made] = made if alias is None else storage[alias]
        names = () if kind == "parameter" else tuple(map(str, reads))
        for read in names:
            consumers.setdefault(storage[read], []).append(op)
        consumers.setdefault(storage[made], [])
        newest.append(made)
        ops.append(
            Op(
                name=op,
                kind={"parameter": "parameter", "view": "aten.view.default"}.get(
                    kind, "aten.add_.Tensor" if kind == "write" else "bench.op"
                ),
                inputs=names,
                outputs=(Tensor(name=made, bytes=size, alias_of=alias),),
                after=after,
                memory="residual"
                if kind == "parameter"
                else ("reference" if alias is not None else "normal"),
                seconds={"accelerator": 0.0 if kind == "parameter" else float(rng.gamma(2, 5e-4))},
                workspace=int(rng.integers(0, 2**20)) if kind == "compute" else 0,
                group=group,
            )
        )
    return build_graph(name, ops)


def memory_case(number: int, seed: int) -> Case:
    """Return a random case: training steps and mixed graphs in turn, 20 to 100 ops, K 2 to 4."""
    rng = np.random.default_rng([seed, number])
    size, devices = int(rng.integers(20, 101)), int(rng.integers(2, 5))
    if number % 2:
        graph = training_step(size, seed=seed * 1009 + number)
        return Case("training step", graph, graph_costs(graph), devices)
    graph = mixed_step(size, rng, f"mixed-{size}-{number}")
    return Case("mixed", graph, graph_costs(graph), devices)


def captured_cases(folder: Path) -> list[Case]:
    """Return the captured steps that are kept, on four devices."""
    cases = []
    for name in CAPTURED:
        path = folder / f"{name}.json.gz"
        if path.exists():
            graph = read_graph(path)
            cases.append(Case("captured", graph, preset_costs(graph, "v100", ["accelerator"]), 4))
    return cases


def packs(sizes: np.ndarray, capacity: int, devices: int) -> bool:
    """Return whether sizes, the largest first where most is left, fit on equal devices.

    Args:
        sizes: Bytes of each item.
        capacity: Bytes of each device.
        devices: Number of devices.
    """
    left = [capacity] * devices
    for size in sorted(sizes.tolist(), reverse=True):
        at = left.index(max(left))
        left[at] -= size
    return min(left) >= 0


def feasibility(case: Case, turn: int, algorithm: str = "pardnn") -> dict[str, Any]:
    """Plan one graph under two of `LIMITS` limits, in turn; return what was and had to be found.

    Args:
        case: The graph and its devices.
        turn: Number of the case: chooses which two of the limits.
        algorithm: What plans.
    """
    graph, costs, k = case.graph, case.costs, case.devices
    problem = Problem(
        graph, Cluster.uniform(1), costs, PlanOptions(algorithm="single", reserve=0.0)
    )
    alone, single = make_plan(problem)
    del alone
    peak = single.peak_bytes[0]
    groups = residual_bytes(closed_arrays(graph))
    transient = peak - int(groups.sum())
    row: dict[str, Any] = {"graph": graph.name, "kind": case.kind, "devices": k}
    row |= dict.fromkeys(("plans", "over", "missed", "infeasible", "no_witness"), 0)
    limits = np.geomspace(0.9 * peak / k, 1.1 * peak, LIMITS).astype(int)
    for limit in limits[turn % (LIMITS // 2) :: LIMITS // 2].tolist():
        cluster = Cluster.uniform(k, memory=limit)
        must = packs(groups, limit - transient, k)
        try:
            problem = Problem(graph, cluster, costs, PlanOptions(algorithm=algorithm, reserve=0.0))
            plan, result = make_plan(problem)
        except InfeasibleError as error:
            row["infeasible"] += 1
            row["missed"] += must
            row["no_witness"] += not set(WITNESS) <= error.details.keys()
            continue
        row["plans"] += 1
        plan = dataclasses.replace(plan, cluster=None)
        row["over"] += bool(plan_problems(graph, plan, cluster)) or max(result.peak_bytes) > limit
    return row


def feasibility_summary(rows: Rows) -> Rows:
    """Return sums by kind of graph, and over all."""
    kinds = [*dict.fromkeys(row["kind"] for row in rows), "all"]
    found = []
    for kind in kinds:
        chosen = [row for row in rows if kind in ("all", row["kind"])]
        sums = {
            key: sum(row[key] for row in chosen)
            for key in ("plans", "over", "missed", "infeasible", "no_witness")
        }
        found.append({"kind": kind, "graphs": len(chosen), **sums})
    return found
