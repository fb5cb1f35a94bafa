"""Search of shardings: seconds and bytes, beside the baselines, as one dated page.

`python -m bench tofu-search [GRAPH.json.gz ...] [--devices 8]` plans the graphs (those of
`testbed/graphs` if none is named) and writes `bench/results/<date>_tofu_search.md`. Search seconds
are CPU seconds of one core: the first time, when nothing about the graph's calls is known, and
again with that kept. `--loss N` adds the loss against joint search on N random chains;
`--parts` chooses among the sections below them.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import RESULTS
from bench.tofu import layouts, optimum
from pardnn.errors import PardnnError
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.shard.cache import forget
from pardnn.shard.mesh_of_cluster import prime_factors
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state, polished, recursive_search
from pardnn.shard.search.tofu import find_sharding
from testbed import GRAPHS

PARTS = {
    "optimum": optimum.optimum,
    "layers": layouts.growth,
    "transformers": layouts.transformers,
    "gaps": layouts.gaps,
}


def measure(graph: Graph, shape: tuple[int, ...], names: list[str]) -> dict[str, Any]:
    """Search one graph, then let the baselines choose.

    Args:
        graph: What is sharded.
        shape: Of the mesh.
        names: Of the baselines.
    """
    mesh = make_mesh(shape)
    seconds: list[float] = []
    forget()
    for _ in range(3):
        gc.collect()
        started = time.process_time()
        found = find_sharding(graph, mesh)
        seconds.append(time.process_time() - started)
    row: dict[str, Any] = {
        "graph": graph.name,
        "ops": len(graph.ops),
        "factors": found.num_factors,
        "mesh": "x".join(map(str, shape)),
        "first_s": seconds[0],
        "again_s": min(seconds[1:]),
        "bytes": total_bytes(graph, found.sharding),
    }
    assert row["bytes"] == found.cost
    for name in names:
        try:
            row[name] = total_bytes(graph, BASELINES[name](graph, mesh))
        except PardnnError as error:
            row[name] = str(error)
    return row


def loss(count: int, shape: tuple[int, ...], sizes: list[int], seed: int = 0) -> dict[str, Any]:
    """Plain recursion, and recursion with beam and polish, against all mesh axes jointly.

    Args:
        count: Number of chains.
        shape: Of the mesh.
        sizes: Widths that are drawn from.
        seed: Of the draws.
    """
    from testbed.hand_graphs import chain

    rng = np.random.default_rng(seed)
    plain, ours = [], []
    for _ in range(count):
        graph = chain(*rng.choice(sizes, size=int(rng.integers(3, 6))).tolist())
        tables = CostTables(make_problem(graph, NEEDED), BytesObjective(), shape)
        best = best_state(tables)
        assert best.is_exact
        plain.append(recursive_search(tables).cost / best.cost - 1)
        ours.append(polished(tables, recursive_search(tables, 2, (0.0, 0.02))).cost / best.cost - 1)
    return {"mesh": "x".join(map(str, shape)), "plain": plain, "ours": ours}


def page(
    rows: list[dict[str, Any]], losses: list[tuple[str, dict[str, Any]]], more: list[str]
) -> str:
    """Return the results as Markdown.

    Args:
        rows: From `measure`.
        losses: Titles, and what `loss` returned.
        more: Lines of the sections that follow.
    """
    names = list(BASELINES)
    lines = [
        f"# Search of shardings, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, Python {platform.python_version()}, one core. Bytes in GB; a",
        "baseline's as a multiple of what search found.",
        "",
        "| graph | ops | factors | mesh | first, s | again, s | GB | " + " | ".join(names) + " |",
        "| --- " * (7 + len(names)) + "|",
    ]
    for row in rows:
        cells = [
            f"{row[n] / row['bytes']:.3f}" if isinstance(row.get(n), int) and row["bytes"] else ""
            for n in names
        ]
        lines.append(
            f"| {row['graph']} | {row['ops']} | {row['factors']} | {row['mesh']} | "
            f"{row['first_s']:.2f} | {row['again_s']:.2f} | {row['bytes'] / 1e9:.3f} | "
            + " | ".join(cells)
            + " |"
        )
    if losses:
        lines += ["", "## Loss of recursion", "", "Random chains of 2 to 4 products, against all"]
        lines += [
            "mesh axes chosen together. *Plain*: axis by axis, as in the paper; *ours*: with a"
        ]
        lines += ["beam and polish. Search itself takes the axes together where tables are small."]
    for title, found in losses:
        lines += ["", f"{title}, mesh {found['mesh']}:", ""]
        for name in ("plain", "ours"):
            values = np.array(found[name])
            shares = ", ".join(f"{np.quantile(values, q):.1%}" for q in (0.5, 0.9, 0.99, 1.0))
            lines.append(
                f"- {name}: {np.mean(values > 1e-12):.1%} of {len(values)} sub-optimal, mean "
                f"{values.mean():.2%}; median, 90th, 99th percentile and worst: {shares}"
            )
    return "\n".join([*lines, *more]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mesh", help="such as 2x4, instead of prime factors")
    parser.add_argument("--baselines", default=",".join(BASELINES))
    parser.add_argument("--loss", type=int, default=0, help="random chains")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    options = parser.parse_args(arguments)
    shape = prime_factors(options.devices)
    if options.mesh:
        shape = tuple(map(int, options.mesh.split("x")))
    rows: list[dict[str, Any]] = []
    for path in options.graphs or sorted(GRAPHS.glob("*.json.gz")):
        row = measure(read_graph(path), shape, list(filter(None, options.baselines.split(","))))
        rows.append(row)
        print(row, file=sys.stderr)
    losses: list[tuple[str, dict[str, Any]]] = []
    if options.loss:
        powers, others = [4, 8, 16, 32, 64], list(range(8, 65))
        for axes in ((2, 2), (2, 2, 2)):
            losses.append(("powers of two", loss(options.loss, axes, powers)))
            losses.append(("other dims", loss(options.loss, axes, others)))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.date.today().isoformat()}_tofu_search.md"
    more: list[str] = []
    for part in ("", *filter(None, options.parts.split(","))):
        more += ["", *PARTS[part]()] if part else []
        path.write_text(page(rows, losses, more), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
