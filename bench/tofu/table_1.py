"""Tofu's Table 1: seconds of the search with recursion, and without it as far as a limit allows.

*Without recursion* is one dynamic program over the coarse graph whose variables are layouts and
loops over all mesh axes at once. It runs in a process of its own, which the system ends at a limit
of CPU seconds and of memory: the paper's took 8 hours on WResNet-152 and more than a day on RNN-10.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

from pardnn.cluster import Cluster
from pardnn.shard.cache import forget
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.search.coarsening import op_calls
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import solve
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.recursion import FEW_FACTORS, coarse_problem, recursive_search
from pardnn.shard.search.tofu import find_sharding
from testbed.kept_graphs import load

#: Address space of the search without recursion.
LIMIT_BYTES = 6 << 30


def search_row(name: str, cluster: Cluster, limit_s: int) -> dict[str, Any]:
    """Return the seconds of the search of one graph.

    Args:
        name: Of a kept graph.
        cluster: Its devices.
        limit_s: CPU seconds of the search without recursion.
    """
    graph = load(name)
    forget()
    taken = []
    for _ in range(3):
        gc.collect()
        started = time.process_time()
        found = find_sharding(graph, cluster, "bytes")
        taken.append(time.process_time() - started)
    return {
        "graph": name, "ops": len(graph.ops), "first_s": taken[0], "best_s": min(taken),
        "GB": found.cost / 1e9, "factors": found.num_factors,
        "recursion": limited_search(name, cluster, limit_s, together=False),
        "together": limited_search(name, cluster, limit_s, together=True), "limit_s": limit_s,
    }  # fmt: skip


def limited_search(name: str, cluster: Cluster, limit_s: int, *, together: bool) -> dict[str, Any]:
    """Search in a process with limits: all mesh axes together, or by the paper's recursion.

    Args:
        name: Of a kept graph.
        cluster: Its devices.
        limit_s: CPU seconds; memory is limited to `LIMIT_BYTES`.
        together: Whether all mesh axes are chosen at once.

    Returns:
        Seconds, GB moved and whether that is proven least, or an "error".
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_search, args=(name, cluster, limit_s, together, theirs))
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {"error": f"more than {limit_s} s"}
    child.join()
    return found


def _search(
    name: str, cluster: Cluster, limit_s: int, together: bool, result: Connection
) -> None:  # fmt: skip
    forget()
    graph, shape = load(name), mesh_of(cluster).shape
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + limit_s, spent + limit_s))
    begin = time.process_time()
    _, problem = coarse_problem(graph, op_calls(graph), FEW_FACTORS)
    tables = CostTables(problem, BytesObjective(), shape)
    try:
        if together:
            none = (None,) * len(shape)
            start = State((none,) * len(problem.variables), (none,) * len(problem.factors))
            found = solve(tables, start, range(len(shape)))
        else:
            found = recursive_search(tables)
    except MemoryError:
        result.send({"error": f"more than {LIMIT_BYTES / 2**30:.0f} GiB"})
        return
    seconds = time.process_time() - begin
    result.send({"s": seconds, "GB": found.cost / 1e9, "is_exact": found.is_exact})
