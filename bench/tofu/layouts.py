"""How search grows with layers, what it chooses for transformers, and how far it is from optimal.

Sections of the page of `python -m bench tofu-search`; they capture small models, so they need
torch, and the last one needs the extra `[exact]`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import pardnn
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh, placements
from pardnn.shard.cache import forget
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.exact import exact_state
from pardnn.shard.search.objective_seconds import seconds_objective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import Sharding
from testbed.zoo import blocks

MESH = (2, 2, 2)
FAST = {"bandwidth": 450e9, "latency": 3e-6}
SLOW = {"bandwidth": 10e9, "latency": 20e-6}
#: Capturing takes longest: 0.5 CPU s a layer.
LAYERS = (6, 12, 24)


def _captured(batch: int, **given: object) -> Graph:
    step, args = blocks.step(batch, **given)  # type: ignore[arg-type]
    return pardnn.capture(step, *args)


def growth() -> list[str]:
    """Return the table of search seconds by layers: equal ones, and ones that all differ."""
    lines = [
        "## Layers",
        "",
        "GPT-2 blocks of width 64 on 8 devices, CPU seconds of a first search; *equal*: all blocks",
        "alike; *distinct*: each has a feed-forward network of another width.",
        "",
        "| layers | ops | equal: factors | equal, s | distinct: factors | distinct, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for count in LAYERS:
        cells = [str(count)]
        for inner in ([256] * count, [256 + 16 * n for n in range(count)]):
            graph = _captured(2, width=64, inner=inner)
            taken: list[float] = []
            for _ in range(2):
                forget()
                gc.collect()
                started = time.process_time()
                found = find_sharding(graph, make_mesh(MESH))
                taken.append(time.process_time() - started)
            if len(cells) == 1:
                cells.append(str(len(graph.ops)))
            cells += [str(found.num_factors), f"{min(taken):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def transformers() -> list[str]:
    """Return what is found for transformer blocks, with layouts by name."""
    lines = [
        "## Transformers",
        "",
        f"Blocks of width 1024, {blocks.HEADS} heads, {blocks.LENGTH} positions, on 2 devices,",
        "objective `seconds`, H100 costs; links fast (450 GB/s, 3 us) or slow (10 GB/s, 20 us).",
        "Weights are [out, in]: `Shard(0)` cuts columns of the product, `Shard(1)` rows. What",
        "attention returns is [batch, heads, positions, width of a head].",
        "",
        "| blocks | batch | links | q or qkv | attention | out | up | down | what it is |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, given in (
        ("GPT-2, q k v", {}),
        ("GPT-2, fused qkv", {"fused": True}),
        ("Llama, q k v", {"llama": True}),
        ("Llama, fused qkv", {"fused": True, "llama": True}),
    ):
        for batch, links, label in ((2, FAST, "fast"), (256, FAST, "fast"), (256, SLOW, "slow")):
            graph = _captured(batch, **given)
            cluster = Cluster.uniform(2, **links)  # type: ignore[arg-type]
            found = find_sharding(graph, cluster, "seconds", costs=preset_costs(graph, "h100"))
            cells = _cells(graph, found.sharding)
            lines.append(f"| {name} | {batch} | {label} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Where q, k and v come of one product, a contiguous cut of its columns is no cut of the",
        "heads: half of [q, k, v] is q and half of k. Blocks here are contiguous, so the product",
        "is then followed by an exchange.",
    ]
    return lines


def _cells(graph: Graph, sharding: Sharding) -> list[str]:
    ops = {op.name: op for op in graph.ops}

    def weight(*suffixes: str) -> str:
        names = [n for n in sharding.layouts if n.startswith("model.0.") and n.endswith(suffixes)]
        names = [n for n in names if ops[n].kind == "parameter"]
        return ", ".join(placements(sharding.layouts[names[0]]))

    attention = next(op for op in graph.ops if "attention" in op.kind)
    heads = sharding.layouts[attention.outputs[0].name]
    down = sharding.axes[_product(graph, "model.0.down")]
    up = sharding.axes[_product(graph, "model.0.up")]
    kinds: list[str] = []
    if up == ("j",) and down == ("k",):
        kinds.append("column then row")
    if heads == (1,):
        kinds.append("by heads")
    if up == down == ("i",) and heads == (0,):
        whole = weight("up.weight") == "Replicate()"
        kinds.append("data parallel" if whole else "fully sharded data parallel")
    parts = [weight(".q.weight", ".qkv.weight"), ", ".join(placements(heads))]
    parts += [weight(".out.weight"), weight(".up.weight"), weight(".down.weight")]
    return [*parts, ", ".join(kinds) or "mixed"]


def _product(graph: Graph, module: str) -> str:
    return next(
        op.name
        for op in graph.ops
        if op.module == module and op.kind.split(".")[1] in ("mm", "addmm") and not op.backward_of
    )


def gaps(limit: float = 10.0) -> list[str]:
    """Return the table of the objective `seconds` beside the integer program."""
    from testbed.hand_graphs import chain, conv1d, mlp

    lines = [
        "## Seconds beside the integer program",
        "",
        "In the 0-1 program tensors share a layout only where they must. Cost of what search",
        f"finds over the program's; *unsolved*: not proven within {limit:g} s.",
        "",
        "| step | devices | links | search, us | program, us | gap |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    graphs = [
        ("MLP 32-256-512-128", mlp(32, 256, 512, 128)),
        ("MLP 4096-1024-1024-1024", mlp(4096, 1024, 1024, 1024)),
        ("MLP 64-128-512-510", mlp(64, 128, 512, 510)),
        ("chain 512-2048-512-2048", chain(512, 2048, 512, 2048)),
        ("conv1d", conv1d(8, 64, 128, 4096, 3)),
        ("GPT-2 block, width 64, batch 2", _captured(2, width=64, inner=(256,))),
        ("GPT-2 block, width 1024, batch 2", _captured(2, width=1024, inner=(4096,))),
        ("GPT-2 block, width 2048, batch 8", _captured(8, width=2048, inner=(8192,))),
    ]
    for name, graph in graphs:
        for devices in (2, 3, 4):
            for label, links in (("fast", FAST), ("slow", SLOW)):
                cells = _gap(graph, Cluster.uniform(devices, **links), limit)  # type: ignore[arg-type]
                lines.append(f"| {name} | {devices} | {label} | " + " | ".join(cells) + " |")
    return lines


def _gap(graph: Graph, cluster: Cluster, limit: float) -> Sequence[str]:
    costs = preset_costs(graph, "h100")
    found = find_sharding(graph, cluster, "seconds", costs=costs)
    problem = make_problem(graph, NEEDED)
    objective = seconds_objective(graph, problem, cluster, costs)
    try:
        best = exact_state(CostTables(problem, objective, mesh_of(cluster).shape), seconds=limit)
    except PardnnError:
        return [f"{1e6 * found.cost:.1f}", "", "unsolved"]
    text = f"{found.cost / best.cost - 1:.2%}"
    if best.bound < best.cost * (1 - 1e-6):
        text = f"unsolved; {found.cost / best.bound - 1:.2%} over the bound"
    return [f"{1e6 * found.cost:.1f}", f"{1e6 * best.cost:.1f}", text]
