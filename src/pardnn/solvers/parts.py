"""K parts of an undirected graph by METIS: little weight cut, parts in given proportions.

Reads {"start", "index", "edge_weight", "vertex_weight", "share"}; writes {"part"}.
"""

# The solver is an optional extra.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pymetis


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return {"part": part of each vertex}."""
    share = problem["share"]
    _, part = pymetis.part_graph(
        len(share),
        xadj=problem["start"],
        adjncy=problem["index"],
        vweights=problem["vertex_weight"],
        eweights=problem["edge_weight"],
        tpwgts=share,
        options=pymetis.Options(seed=problem["seed"]),
    )
    return {"part": [int(p) for p in part]}
