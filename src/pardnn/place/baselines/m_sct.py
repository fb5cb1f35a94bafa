"""m-SCT: m-ETF in which each op may have one child that its device waits for.

A linear program chooses these favourite children: x is 0 on an edge within a device and 1 on one
between devices, an op has at most one successor and one predecessor with x = 0, and the step is to
end as soon as possible. x below 0.1 in the optimum of the relaxation marks a favourite child.

Reference: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after
Hanen, Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small
communication delays", ETFA 1995.

Deviations: edges between the same two ops are one; order edges cost the latency. The program is
solved by HiGHS in a child process, and its answer checked; above `MAX_OPS` ops it takes too long
(measured elsewhere: 4 s at 5,000 ops, 60 s at 20,000).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.errors import UsageError
from pardnn.graph.csr import GraphArrays, op_edges
from pardnn.graph.ir import Graph
from pardnn.place.baselines.m_etf import etf_timeline
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import Machine, fastest_seconds
from pardnn.solvers import ask, numbers, wrong_answer

MAX_OPS = 5_000
THRESHOLD = 0.1
LP_SECONDS = 120.0


def place_m_sct(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place and order by m-SCT.

    Args:
        graph: The graph, of at most `MAX_OPS` ops.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        UsageError: E218, if the graph is too large; E219, if HiGHS is not installed.
        InfeasibleError: E301, if this placement does not fit; E302, if an op can run nowhere.
        StuckError: E709, if HiGHS does not answer in time.
    """
    del seed
    if len(graph.ops) > MAX_OPS:
        raise UsageError(
            f"m-sct solves a linear program, which takes too long above {MAX_OPS} ops; the graph "
            f"has {len(graph.ops)}.\nUse m-etf, the same without the program.",
            code="E218",
        )
    arrays = closed_arrays(graph)
    runnable(arrays, machine)
    favourite = favourite_children(arrays, machine)
    place, timeline = etf_timeline(arrays, machine, capacities, favourite)
    return fitted(graph, machine, place, capacities, timeline)


def favourite_children(arrays: GraphArrays, machine: Machine) -> Int64[ndarray, " n"]:
    """Return the favourite child of each op by the linear program, -1 for none."""
    favourite = np.full(arrays.num_ops, -1, dtype=np.int64)
    pairs = op_edges(arrays)
    if len(pairs) == 0:
        return favourite
    cost = edge_seconds(arrays, pairs, slowest_link(machine))
    seconds = fastest_seconds(machine)
    scale = 1e3 / max(float(seconds.sum() + cost.sum()), 1e-300)
    problem = linear_program(pairs, seconds * scale, cost * scale)
    answer = ask("lp", problem, seconds=LP_SECONDS, extra="exact")
    x = _checked(problem, answer)[: len(pairs)]
    # The nearest to 0 of each op; the program allows one, rounding might not.
    for edge in np.argsort(-x, kind="stable").tolist():
        if x[edge] < THRESHOLD:
            favourite[pairs[edge, 0]] = pairs[edge, 1]
    return favourite


def edge_seconds(
    arrays: GraphArrays, pairs: Int64[ndarray, "e 2"], link: tuple[float, float]
) -> Float64[ndarray, " e"]:
    """Return the seconds of each edge between ops: its largest tensor's, an order edge's latency.

    Args:
        arrays: The graph.
        pairs: From `op_edges`.
        link: Latency in seconds, seconds per byte.
    """
    n = arrays.num_ops
    keys = pairs[:, 0] * n + pairs[:, 1]
    consumer = np.repeat(np.arange(n), np.diff(arrays.input_ptr))
    at = np.searchsorted(keys, arrays.tensor_op[arrays.input_tensor] * n + consumer)
    size = np.zeros(len(pairs), dtype=np.int64)
    np.maximum.at(size, at, arrays.tensor_bytes[arrays.input_tensor])
    return link[0] + size * link[1]


def linear_program(
    pairs: Int64[ndarray, "e 2"], seconds: Float64[ndarray, " n"], cost: Float64[ndarray, " e"]
) -> dict[str, Any]:
    """Return the program over [x of edges, starts of ops, step] as `solvers.lp` reads it.

    Args:
        pairs: Edges between ops.
        seconds: Of each op.
        cost: Seconds of communication of each edge.
    """
    n, e = len(seconds), len(pairs)
    rows: list[list[tuple[int, float]]] = []
    low: list[float] = []
    for edge, (i, j) in enumerate(pairs.tolist()):
        rows.append([(e + j, 1.0), (e + i, -1.0), (edge, -float(cost[edge]))])
        low.append(float(seconds[i]))
    for side in (0, 1):
        of: list[list[int]] = [[] for _ in range(n)]
        for edge, op in enumerate(pairs[:, side].tolist()):
            of[op].append(edge)
        many = [edges for edges in of if len(edges) > 1]
        rows += [[(edge, 1.0) for edge in edges] for edges in many]
        low += [len(edges) - 1.0 for edges in many]
    for op in range(n):
        rows.append([(e + n, 1.0), (e + op, -1.0)])
        low.append(float(seconds[op]))
    return {
        "cost": [0.0] * (e + n) + [1.0],
        "lower": [0.0] * (e + n + 1),
        "upper": [1.0] * e + [None] * (n + 1),
        "row_lower": low,
        "row_upper": [None] * len(low),
        "start": np.cumsum([0, *(len(row) for row in rows)]).tolist(),
        "index": [column for row in rows for column, _ in row],
        "value": [value for row in rows for _, value in row],
    }


def _checked(problem: dict[str, Any], answer: dict[str, Any]) -> Float64[ndarray, " v"]:
    """Return the solution, if it satisfies the program."""
    if "x" not in answer:
        raise wrong_answer("lp", f"no optimum: {answer.get('status')!r:.80}")
    x = np.array(numbers("lp", answer, "x", len(problem["cost"])), dtype=np.float64)
    upper = np.array([np.inf if u is None else u for u in problem["upper"]])
    terms = np.array(problem["value"]) * x[problem["index"]]
    sums = np.add.reduceat(terms, problem["start"][:-1])
    slack = sums - np.array(problem["row_lower"])
    # The sums are of up to 1,000 scaled seconds, and HiGHS keeps each row to 1e-7.
    if slack.min() < -1e-4 or x.min() < -1e-4 or (x - upper).max() > 1e-4:
        raise wrong_answer("lp", "it breaks a row of the program")
    return x
