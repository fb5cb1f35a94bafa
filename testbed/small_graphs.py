"""Graphs of 8 to 20 ops of every family: as small as an optimum can be proven.

The shapes of `testbed.families` come in blocks of tens of ops; these are their smallest relatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pardnn.cluster import Cluster, Device, Link, Rate
from pardnn.graph.ir import Graph
from testbed import families
from testbed.families import Reads, graph_of, in_tree, layered, out_tree

MOST_OPS = 20


def fork_join(num_ops: int, rng: np.random.Generator) -> Reads:
    """Forks of 2 to 4 chains of 1 to 3 ops, each fork after the join before it."""
    return families.fork_join(num_ops, rng, (2, 4), (1, 3))[:num_ops]


def recurrent(num_ops: int, rng: np.random.Generator) -> Reads:
    """A grid of 2 or 3 layers; a cell reads the one below and the one before."""
    layers, reads = int(rng.integers(2, 4)), []
    for i in range(num_ops):
        below = (i - 1,) if i % layers else ()
        before = (i - layers,) if i >= layers else ()
        reads.append((*below, *before))
    return reads


def transformer(num_ops: int, rng: np.random.Generator) -> Reads:
    """Two or three heads of query-key and value, a join with a skip, a feed-forward op."""
    reads: Reads = [()]
    while len(reads) < num_ops:
        stream, heads = len(reads) - 1, []
        for _ in range(int(rng.integers(2, 4))):
            reads += [(stream,), (stream,)]
            reads.append((len(reads) - 2, len(reads) - 1))
            heads.append(len(reads) - 1)
        reads.append((*heads, stream))
        reads.append((len(reads) - 1,))
    return reads[:num_ops]


def branches(num_ops: int, rng: np.random.Generator) -> Reads:
    """One stage of uneven chains."""
    reads: Reads = [()]
    ends = []
    while len(reads) < num_ops - 1:
        last = 0
        for _ in range(min(int(rng.integers(1, 6)), num_ops - 1 - len(reads))):
            reads.append((last,))
            last = len(reads) - 1
        ends.append(last)
    reads.append(tuple(ends))
    return reads


def random_dag(num_ops: int, rng: np.random.Generator) -> Reads:
    """Every op reads up to three of the ops before it."""
    return [
        tuple({int(j) for j in rng.integers(0, i, int(rng.integers(0, 4)))}) if i else ()
        for i in range(num_ops)
    ]


#: Shape, and whether its mirror follows as the backward pass.
FAMILIES: dict[str, tuple[Callable[[int, np.random.Generator], Reads], bool]] = {
    "fork-join": (fork_join, True),
    "recurrent": (recurrent, True),
    "transformer": (transformer, True),
    "branches": (branches, True),
    "layered": (layered, False),
    "in-tree": (in_tree, False),
    "out-tree": (out_tree, False),
    "random": (random_dag, False),
}


class Case(NamedTuple):
    """A small graph, and what it runs on."""

    graph: Graph
    cluster: Cluster


def small_case(number: int, seed: int) -> Case:
    """Return a case: families in turn; 8 to 20 ops, 2 to 4 devices, CCR 0.1 to 10 at random.

    Of five cases two have devices of two or three speeds, and one has a slow link besides.
    """
    rng = np.random.default_rng([seed, number])
    family = list(FAMILIES)[number % len(FAMILIES)]
    num_ops, k = int(rng.integers(8, MOST_OPS + 1)), int(rng.integers(2, 5))
    ccr = float(rng.choice([0.1, 0.3, 1.0, 3.0, 10.0]))
    kind = int(rng.integers(5))
    speeds = ((1.0,), (1.0,), (1.0,), (1.0, 2.0), (1.0, 4.0, 2.0))[kind]
    devices = tuple(Device(name=f"d{i}", speed=speeds[i % len(speeds)]) for i in range(k))
    slow = (Link(source="d0", target="d1", bandwidth=30e9, latency=50e-6),) if kind == 4 else ()
    cluster = Cluster(
        devices=devices, links=slow, default_link=Rate(bandwidth=300e9, latency=25e-6)
    )
    shape, is_step = FAMILIES[family]
    reads = shape(num_ops // 2 if is_step else num_ops, rng)
    name = f"small-{family}-{num_ops}-ccr{ccr:g}-{number}"
    return Case(graph_of(name, reads, rng, is_step=is_step, ccr=ccr), cluster)
