"""The parts of the placement page beside the quality table: steps, gaps, memory, topologies.

Each function returns rows of JSON types; `bench.placement.page` lays them out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import time
from typing import Any

import numpy as np

from pardnn.cluster import Cluster, Device, Link, Rate
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError, PardnnError
from pardnn.graph.ir import Graph
from pardnn.place.baselines.exact import optimum
from pardnn.place.baselines.linear_clustering import balanced
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.problem import problem_of
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.machine import machine_of
from testbed.families import family_graph, training_step
from testbed.small_graphs import small_case

#: Of the CP-SAT solver, per graph.
SOLVER_SECONDS = 4.0

#: Whole algorithms beside the steps.
WHOLE = (
    ("linear clustering + GLB", "linear-clustering"),
    ("HEFT", "heft"),
    ("+ list scheduling (pardnn)", "pardnn"),
    ("auto", "auto"),
)
#: The solver rounds times, so that its optimum may lie below ours by this fraction.
ROUNDING = 1e-9

Rows = list[dict[str, Any]]


def ablation(graphs: list[Graph], devices: list[int], seed: int) -> Rows:
    """Return makespans after each step, timed by the emulator ("EST first") until the last two.

    Args:
        graphs: What is planned.
        devices: Numbers of devices.
        seed: Of the algorithms that draw.
    """
    rows = []
    for graph in graphs:
        for k in devices:
            cluster, costs = Cluster.uniform(k), graph_costs(graph)
            machine = machine_of(costs, cluster)
            problem = problem_of(closed_arrays(graph), machine)
            clusters = slice_graph(problem, k)
            device, cluster_graph = map_clusters(problem, clusters)
            glb = balanced(problem.arrays, machine, runnable(problem.arrays, machine), clusters.of)
            swapped = swap_clusters(problem, clusters, cluster_graph, device)
            steps = {"slicing + GLB": emulated(problem, glb).makespan}
            steps["slicing + LALB"] = emulated(
                problem, placement(problem, clusters, device)
            ).makespan
            place = placement(problem, clusters, swapped)
            steps["+ swaps"] = min(steps["slicing + LALB"], emulated(problem, place).makespan)
            steps["+ switches"] = steps["+ swaps"]
            for _ in range(k):
                place, switched = switch_critical_path(problem, place)
                if switched == 0:
                    break
                steps["+ switches"] = min(steps["+ switches"], emulated(problem, place).makespan)
            for label, name in WHOLE:
                given = Problem(
                    graph, cluster, costs, PlanOptions(algorithm=name, reserve=0.0, seed=seed)
                )
                _, result = make_plan(given)
                steps[label] = result.makespan_s
            bound = lower_bound_seconds(graph.arrays, machine)
            rows.append({"graph": graph.name, "devices": k, "bound_s": bound, "steps": steps})
    return rows


def gaps(count: int, seed: int) -> Rows | None:
    """Return auto against the proven optimum on graphs of 8 to 20 ops; None without OR-Tools."""
    if importlib.util.find_spec("ortools") is None:
        return None
    rows: Rows = []
    for number in range(count):
        graph, cluster = small_case(number, seed)
        costs, arrays = graph_costs(graph), closed_arrays(graph)
        machine, k = machine_of(costs, cluster), cluster.num_devices
        best = optimum(arrays, machine, [None] * k, first_overwrites(graph), seconds=SOLVER_SECONDS)
        given = Problem(graph, cluster, costs, PlanOptions(algorithm="auto", reserve=0.0))
        _, result = make_plan(given)
        if best is None or not best.is_proven:
            rows.append({"graph": graph.name, "devices": k, "proven": False})
            continue
        if best.lower_bound_s < result.lower_bound_s * (1 - ROUNDING):
            raise AssertionError(f"{graph.name}: the bound is above a proven optimum")
        if result.makespan_s < best.lower_bound_s * (1 - ROUNDING):
            raise AssertionError(f"{graph.name}: the plan is faster than a proven optimum")
        rows.append({
            "graph": graph.name, "ops": len(graph.ops), "devices": k, "proven": True,
            "unlike": len(machine.seconds) > 1, "gap": result.makespan_s / best.lower_bound_s - 1,
            "optimum_over_bound": best.lower_bound_s / result.lower_bound_s - 1,
        })  # fmt: skip
    return rows


def memory_sweep(graphs: int, num_ops: int, steps: int, seed: int) -> Rows:
    """Return makespans and peaks of auto under rising limits, from what hardly fits to plenty.

    Args:
        graphs: Number of graphs.
        num_ops: Of each.
        steps: Number of limits.
        seed: Of the graphs.
    """
    rows: Rows = []
    for number in range(graphs):
        graph = training_step(num_ops, seed=seed * 1009 + number)
        k, costs = 2 + number % 3, graph_costs(graph)
        given = Problem(graph, Cluster.uniform(1), costs, PlanOptions(reserve=0.0))
        alone = decide(given, "single")
        given = Problem(
            graph, Cluster.uniform(1), costs, PlanOptions(algorithm=alone.algorithm, reserve=0.0)
        )
        _, single = make_plan(given)
        peak = single.peak_bytes[0]
        row: dict[str, Any] = {"graph": graph.name, "devices": k, "peak_of_one": peak, "tried": []}
        for limit in np.geomspace(0.9 * peak / k, 1.1 * peak, steps).astype(int).tolist():
            cluster = Cluster.uniform(k, memory=limit)
            try:
                given = Problem(graph, cluster, costs, PlanOptions(algorithm="auto", reserve=0.0))
                _, result = make_plan(given)
            except InfeasibleError:
                row["tried"].append({"limit": limit, "makespan_s": None})
                continue
            row["tried"].append({
                "limit": limit, "makespan_s": result.makespan_s,
                "peak": max(result.peak_bytes), "planning_s": result.planning_s,
            })  # fmt: skip
        rows.append(row)
    return rows


def memory_summary(rows: Rows) -> dict[str, float]:
    """Return how often more memory was slower, by how much at most, and what exceeded a limit."""
    steps = worse = over = feasible = 0
    most = 0.0
    for row in rows:
        found = [tried for tried in row["tried"] if tried["makespan_s"] is not None]
        feasible += len(found)
        over += sum(tried["peak"] > tried["limit"] for tried in found)
        for less, more in itertools.pairwise(found):
            ratio = more["makespan_s"] / less["makespan_s"]
            steps, worse = steps + 1, worse + (ratio > 1 + 1e-9)
            most = max(most, ratio - 1)
    return {"plans": feasible, "over_limit": over, "steps": steps, "slower": worse, "most": most}


def islands(num: int, size: int, *, slow: Rate, with_cpu: bool = False) -> Cluster:
    """Return islands of devices at 300 GB/s and 10 us, joined by slower links.

    Args:
        num: Number of islands.
        size: Devices of an island.
        slow: Link between islands.
        with_cpu: Whether a cpu is added.
    """
    names = [[f"gpu:{i * size + j}" for j in range(size)] for i in range(num)]
    links = tuple(
        Link(source=row[i], target=row[j], bandwidth=300e9, latency=10e-6)
        for row in names
        for i in range(size)
        for j in range(i + 1, size)
    )
    devices = tuple(Device(name=name) for row in names for name in row)
    if with_cpu:
        devices += (Device(name="cpu", type="cpu"),)
    return Cluster(devices=devices, links=links, default_link=slow)


def with_host_ops(graph: Graph, every: int) -> Graph:
    """Return the graph with every so-manieth op runnable by a cpu alone, at half the speed."""
    ops = [
        dataclasses.replace(op, seconds={"cpu": 2 * (op.seconds or {})["accelerator"]})
        if i % every == every - 1
        else op
        for i, op in enumerate(graph.ops)
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


def topologies(num_ops: int, names: list[str], seed: int) -> Rows:
    """Return makespan / bound on clusters whose links and devices are not alike.

    Args:
        num_ops: Of each graph.
        names: Of the algorithms.
        seed: Of the graphs.
    """
    slow = Rate(bandwidth=25e9, latency=50e-6)
    uneven = tuple(Device(name=f"d{i}", speed=(1.0, 2.0, 4.0, 1.0)[i % 4]) for i in range(8))
    clusters = {
        "2 islands of 4": islands(2, 4, slow=slow),
        "8 islands of 8": islands(8, 8, slow=slow),
        "2 islands of 4 and a cpu": islands(2, 4, slow=slow, with_cpu=True),
        "8 devices of 3 speeds": Cluster(
            devices=uneven, default_link=Rate(bandwidth=300e9, latency=25e-6)
        ),
        "8 devices, serial links": Cluster.uniform(8, links="serial"),
    }
    rows: Rows = []
    for label, cluster in clusters.items():
        for family in ("transformer", "branches", "layered"):
            graph = family_graph(family, num_ops, ccr=1.0, seed=seed)
            if any(device.type == "cpu" for device in cluster.devices):
                graph = with_host_ops(graph, 50)
            costs = graph_costs(graph)
            row: dict[str, Any] = {"cluster": label, "graph": graph.name, "by": {}}
            for name in names:
                begin = time.perf_counter()
                try:
                    given = Problem(graph, cluster, costs, PlanOptions(algorithm=name, reserve=0.0))
                    _, result = make_plan(given)
                except PardnnError as error:
                    row["by"][name] = {"error": str(error)}
                    continue
                row["by"][name] = {
                    "over_bound": result.makespan_s / result.lower_bound_s,
                    "seconds": time.perf_counter() - begin,
                }
            rows.append(row)
    return rows
