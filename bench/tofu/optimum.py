"""Search beside the least bytes there are, on random chains and training steps on four devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import chain, mlp
from testbed.naive_bytes import least_bytes

COUNT, SHAPE = 500, (2, 2)
SIZES = [4, 8, 16, 32, 64, 128]
#: Products of a chain up to which all layouts are tried one by one.
TRIED = 3


def optimum(seed: int = 0) -> list[str]:
    """Return how often search finds the least bytes."""
    rng = np.random.default_rng(seed)
    lines = [
        "## Beside the optimum",
        "",
        "Random graphs of powers of two on four devices, objective `bytes`: chains of 2 to 4",
        "products, and training steps of a two-layer MLP; tensors share a layout only where they",
        f"must. Of chains of up to {TRIED} products all layouts are tried; of the others the",
        "optimum is that of all axes together, by exact elimination.",
        "",
        "| graphs | number | search finds the optimum | worst |",
        "| --- | --- | --- | --- |",
    ]
    cases: dict[str, Callable[[], Graph]] = {
        "chains": lambda: chain(*rng.choice(SIZES, size=int(rng.integers(3, 6))).tolist()),
        "MLP steps": lambda: mlp(*rng.choice(SIZES, size=4).tolist()),
    }
    for name, make in cases.items():
        over = [_over(make()) for _ in range(COUNT)]
        lines.append(f"| {name} | {COUNT} | {over.count(0.0)} | {max(over):.2%} |")
    return lines


def _over(graph: Graph) -> float:
    """Return by which share search moves more than the least."""
    mesh = make_mesh(SHAPE)
    together = best_state(CostTables(make_problem(graph, NEEDED), BytesObjective(), SHAPE))
    assert together.is_exact
    if len(graph.ops) <= 2 * TRIED + 1:  # a chain: each product has a weight
        assert together.cost == least_bytes(graph, mesh)
    return find_sharding(graph, mesh).cost / together.cost - 1.0 if together.cost else 0.0
