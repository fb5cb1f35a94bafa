"""What each step of the algorithm gives, and what the graphs allow: Figs. 6.2, 6.6, 6.7.

Memory is left out, as in the thesis. Every placement is timed by one emulator: ready ops by
bottom level, "EST first".
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy import ndarray

from bench.thesis.batch import model
from bench.thesis.search import cluster_of, timed_plan
from pardnn.graph.ir import Graph
from pardnn.place.baselines.linear_clustering import place_linear_clustering
from pardnn.place.colocation import closed_arrays, legal_placement
from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.problem import Problem, problem_of
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.place.thesis.steps import place_thesis
from pardnn.planner.costs import communication_ratio
from pardnn.sim.bounds import degree_of_parallelism, lower_bound_seconds
from pardnn.sim.machine import Machine, machine_of


def shape_row(name: str, batch_size: int) -> dict[str, Any]:
    """Return degree of parallelism and CCR of a graph at a batch size."""
    graph, costs = model(name, batch_size)
    cluster = cluster_of(4)
    machine = machine_of(costs, cluster)
    return {
        "graph": name,
        "batch": batch_size,
        "ops": len(graph.ops),
        "dop": degree_of_parallelism(graph.arrays, machine),
        "ccr": communication_ratio(graph.arrays, costs, cluster),
    }


def _round_robin(graph: Graph, problem: Problem) -> ndarray:
    target = np.empty(len(graph.ops), dtype=np.int64)
    turns = np.arange(len(target)) % problem.machine.num_devices
    target[problem.arrays.topological] = turns
    return legal_placement(problem.arrays, problem.runs, target)


def _mapped_and_refined(problem: Problem) -> tuple[float, float]:
    """Return the makespans of slicing and mapping, and with the thesis's refinement."""
    clusters = slice_graph(problem, problem.machine.num_devices)
    device, cluster_graph = map_clusters(problem, clusters)
    mapped = emulated(problem, placement(problem, clusters, device))
    swapped = swap_clusters(problem, clusters, cluster_graph, device)
    other = emulated(problem, placement(problem, clusters, swapped))
    best = min(mapped, other, key=lambda candidate: candidate.makespan)
    place = best.place
    for _ in range(problem.machine.num_devices):
        place, switched = switch_critical_path(problem, place)
        if switched == 0:
            break
        best = min(best, emulated(problem, place), key=lambda candidate: candidate.makespan)
    return mapped.makespan, best.makespan


def steps_row(name: str, batch_size: int, num_devices: int) -> dict[str, Any]:
    """Return the simulated seconds after each step, round robin's and linear clustering's.

    Args:
        name: Of the captured graph.
        batch_size: Of the step.
        num_devices: Number of V100s.
    """
    graph, costs = model(name, batch_size)
    machine: Machine = machine_of(costs, cluster_of(num_devices))
    problem = problem_of(closed_arrays(graph), machine)
    begin = time.process_time()
    mapped, refined = _mapped_and_refined(problem)
    thesis_cpu = time.process_time() - begin
    nowhere: list[int | None] = [None] * num_devices
    ours = timed_plan(graph, machine, nowhere)
    thesis = timed_plan(graph, machine, nowhere, place_thesis)
    theirs = timed_plan(graph, machine, nowhere, place_linear_clustering)
    return {
        "graph": name,
        "batch": batch_size,
        "devices": num_devices,
        "ops": len(graph.ops),
        "bound_s": lower_bound_seconds(graph.arrays, machine),
        "serial_s": float(costs.on("accelerator").sum()),
        "round_robin_s": emulated(problem, _round_robin(graph, problem)).makespan,
        "mapped_s": mapped,
        "refined_s": refined,
        "refined_cpu_s": thesis_cpu,
        "pardnn_s": ours.makespan,
        "pardnn_cpu_s": ours.cpu_s,
        "thesis_s": thesis.makespan,
        "thesis_cpu_s": thesis.cpu_s,
        "clustering_s": theirs.makespan,
        "clustering_cpu_s": theirs.cpu_s,
    }
