"""Search beside the least bytes there are, on random chains and training steps on four devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import chain, mlp
from testbed.least_by_counting import least_bytes_counted

COUNT, SHAPE = 500, (2, 2)
SIZES = [4, 8, 16, 32, 64, 128]


def optimum(seed: int = 0) -> list[str]:
    """Return how often search finds the least bytes."""
    rng = np.random.default_rng(seed)
    lines = [
        "## Beside the optimum",
        "",
        "Random graphs of powers of two on four devices, objective `bytes`: chains of 2 to 4",
        "products, and training steps of a two-layer MLP; tensors share a layout only where they",
        "must. The optimum is counted element by element by `testbed/least_by_counting.py`, which",
        "shares no code with the search.",
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
    least = least_bytes_counted(graph, len(SHAPE))
    return find_sharding(graph, make_mesh(SHAPE)).cost / least - 1.0 if least else 0.0
