"""K parts of an undirected graph by METIS: little weight cut, parts in given proportions.

Reads {"start", "index", "edge_weight", "vertex_weight", "share"}; writes {"part"}.
"""

# The solver is an optional extra.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from typing import Any


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return {"part": part of each vertex}."""
    try:
        import pymetis
    except ImportError:
        return {"missing": "pymetis"}
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


if __name__ == "__main__":
    # METIS complains on standard output, for example of parts that are empty: not in the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    answer = solve(json.load(sys.stdin))
    with os.fdopen(answer_to, "w", encoding="utf-8") as file:
        json.dump(answer, file)
