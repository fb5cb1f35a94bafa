"""Families of graphs for placement benchmarks, the same for the same arguments everywhere.

Those of networks (`recurrent`, `transformer`, `branches`, `fork-join`) are steps: a forward pass
and its mirror, in which the backward op of i reads what i read, i's output and the gradients of its
readers, and takes twice as long. Bytes are scaled until total communication / total computation on
the given link is the ratio asked for (CCR).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

#: Seconds of an average op, so that latencies of some 10 us leave room for a CCR of 0.1.
MEAN_SECONDS = 1e-3

Reads = list[tuple[int, ...]]


def fork_join(
    num_ops: int,
    rng: np.random.Generator,
    chains: tuple[int, int] = (4, 12),
    ops: tuple[int, int] = (4, 16),
) -> Reads:
    """Forks of so many chains of so many ops, each fork after the join before it."""
    reads: Reads = [()]
    while len(reads) < num_ops:
        fork, ends = len(reads) - 1, []
        for _ in range(int(rng.integers(*chains, endpoint=True))):
            last = fork
            for _ in range(int(rng.integers(*ops, endpoint=True))):
                reads.append((last,))
                last = len(reads) - 1
            ends.append(last)
        reads.append(tuple(ends))
    return reads


def recurrent(num_ops: int, rng: np.random.Generator) -> Reads:
    """A grid of 8 layers and as many time steps as it takes; a cell is 4 gates and a join."""
    del rng
    layers, reads = 8, []
    below = [-1] * layers
    while len(reads) < num_ops:
        under = -1
        for layer in range(layers):
            inputs = tuple(op for op in (under, below[layer]) if op >= 0)
            gates = []
            for _ in range(4):
                reads.append(inputs)
                gates.append(len(reads) - 1)
            reads.append(tuple(gates))
            under = below[layer] = len(reads) - 1
    return reads


def transformer(num_ops: int, rng: np.random.Generator) -> Reads:
    """Layers of 8 heads (query, key, value, scores, mix) and a feed-forward part, with skips."""
    del rng
    reads: Reads = [()]
    while len(reads) < num_ops:
        stream, heads = len(reads) - 1, []
        for _ in range(8):
            q = len(reads)
            reads += [(stream,)] * 3 + [(q, q + 1), (q + 3, q + 2)]
            heads.append(q + 4)
        reads.append(tuple(heads))
        reads.append((len(reads) - 1, stream))
        middle = len(reads) - 1
        reads += [(middle,), (middle + 1,), (middle + 2,), (middle + 3, middle)]
    return reads


def branches(num_ops: int, rng: np.random.Generator) -> Reads:
    """Few stages of about 40 uneven chains, as in wide or ensemble networks."""
    reads: Reads = [()]
    stages = 5
    for _ in range(stages):
        stem, ends = len(reads) - 1, []
        target = len(reads) + num_ops / stages
        while len(reads) < target:
            last = stem
            for _ in range(int(rng.integers(1, max(2, num_ops // stages // 20)))):
                reads.append((last,))
                last = len(reads) - 1
            ends.append(last)
        reads.append(tuple(ends))
    return reads


def layered(num_ops: int, rng: np.random.Generator) -> Reads:
    """Layers of sqrt(n) / 2 ops; each reads one to three of the layer before."""
    width = max(2, round(num_ops**0.5 / 2))
    return [
        tuple({int(j) for j in rng.integers(i - i % width - width, i - i % width, 1 + i % 3)})
        if i >= width
        else ()
        for i in range(num_ops)
    ]


def in_tree(num_ops: int, rng: np.random.Generator) -> Reads:
    """Every op but the last is read by one op among the next 64 layers of ids."""
    reads: list[list[int]] = [[] for _ in range(num_ops)]
    for i in range(num_ops - 1):
        reads[int(rng.integers(i + 1, min(num_ops, i + 65)))].append(i)
    return [tuple(row) for row in reads]


def out_tree(num_ops: int, rng: np.random.Generator) -> Reads:
    """Every op but the first reads one of the 64 before it."""
    return [(int(rng.integers(max(0, i - 64), i)),) if i else () for i in range(num_ops)]


FAMILIES: dict[str, tuple[Callable[[int, np.random.Generator], Reads], bool]] = {
    "fork-join": (fork_join, True),
    "recurrent": (recurrent, True),
    "transformer": (transformer, True),
    "branches": (branches, True),
    "layered": (layered, False),
    "in-tree": (in_tree, False),
    "out-tree": (out_tree, False),
}


def family_graph(
    family: str, num_ops: int, *, ccr: float, seed: int = 0, cluster: Cluster | None = None
) -> Graph:
    """Return a graph of a family.

    Args:
        family: A key of `FAMILIES`.
        num_ops: About so many.
        ccr: Total communication / total computation.
        seed: Of durations, sizes and shape.
        cluster: Its first link counts; the default link if None.
    """
    rng = np.random.default_rng(seed)
    shape, is_step = FAMILIES[family]
    reads = shape(num_ops // 2 if is_step else num_ops, rng)
    name = f"{family}-{num_ops}-ccr{ccr:g}-{seed}"
    return graph_of(name, reads, rng, is_step=is_step, ccr=ccr, cluster=cluster)


def graph_of(
    name: str,
    reads: Reads,
    rng: np.random.Generator,
    *,
    is_step: bool,
    ccr: float,
    cluster: Cluster | None = None,
) -> Graph:
    """Return the graph of a shape.

    Args:
        name: Of the graph.
        reads: Ops that each op reads, all before it.
        rng: Of durations and sizes.
        is_step: Whether the mirror of all ops follows.
        ccr: Total communication / total computation.
        cluster: Its first link counts; the default link if None.
    """
    count = len(reads)
    seconds = rng.gamma(2.0, MEAN_SECONDS / 2, count)
    if is_step:
        reads = reads + _backward(reads)
        seconds = np.concatenate([seconds, 2 * seconds[::-1]])
    sizes = rng.uniform(0.2, 1.8, len(reads))
    cluster = cluster or Cluster.uniform(2)
    latency, rate = cluster.seconds(0, 1, 0), cluster.arrays.bandwidth[0, 1]
    edges = np.zeros(len(reads))
    for row in reads:
        edges[list(set(row))] += 1
    room = max(0.0, ccr * seconds.sum() - latency * edges.sum())
    scale = room * rate / max(float((edges * sizes).sum()), 1e-300)
    return _graph(name, reads, seconds, sizes * scale, count)


def training_step(num_ops: int, *, seed: int = 0) -> Graph:
    """Return a step with memory: parameters, activations for the backward pass, in-place updates.

    A layer reads its parameter and one or two activations; its backward op makes the gradients of
    both, and the update writes the parameter, with which it shares a group.
    """
    rng = np.random.default_rng(seed)
    layers = max(1, num_ops // 4)
    weight, kept = rng.integers(1, 2**24, layers), rng.integers(1, 2**23, layers)
    seconds = rng.gamma(2.0, MEAN_SECONDS / 2, layers)
    reads = [sorted({max(-1, i - 1), int(rng.integers(-1, i)) if i else -1}) for i in range(layers)]
    ops = [_op("x", "input", (), 2**22, 0.0)]
    for i in range(layers):
        inputs = tuple("x" if j < 0 else f"h{j}" for j in reads[i])
        ops.append(_op(f"w{i}", "parameter", (), int(weight[i]), 0.0, "residual", f"g{i}"))
        ops.append(_op(f"h{i}", "bench.op", (f"w{i}", *inputs), int(kept[i]), float(seconds[i])))
    readers: list[list[int]] = [[] for _ in range(layers)]
    for i, row in enumerate(reads):
        for j in filter(lambda j: j >= 0, row):
            readers[j].append(i)
    for i in range(layers - 1, -1, -1):
        inputs = tuple("x" if j < 0 else f"h{j}" for j in reads[i])
        later = tuple(f"b{j}" for j in readers[i])
        ops.append(_op(f"b{i}", "bench.op", (f"w{i}", f"h{i}", *inputs, *later), int(kept[i]),
                       2 * float(seconds[i]), gradient=int(weight[i])))  # fmt: skip
        update = _op(f"u{i}", "aten.add_.Tensor", (f"w{i}", f"b{i}.w"), int(weight[i]),
                     float(seconds[i]) / 10, "reference", f"g{i}")  # fmt: skip
        tensor = dataclasses.replace(update.outputs[0], alias_of=f"w{i}")
        ops.append(dataclasses.replace(update, outputs=(tensor,), after=(f"b{i}",)))
    return build_graph(f"training-{num_ops}-{seed}", ops)


def _op(
    name: str,
    kind: str,
    inputs: tuple[str, ...],
    num_bytes: int,
    seconds: float,
    memory: Literal["normal", "residual", "reference"] = "normal",
    group: str | None = None,
    *,
    gradient: int | None = None,
) -> Op:
    outputs = [Tensor(name=name, bytes=num_bytes)]
    if gradient is not None:
        outputs.append(Tensor(name=f"{name}.w", bytes=gradient))
    return Op(
        name=name,
        kind=kind,
        inputs=tuple(dict.fromkeys(inputs)),
        outputs=tuple(outputs),
        memory=memory,
        seconds={"accelerator": seconds},
        group=group,
    )


def _backward(reads: Reads) -> Reads:
    """Return what the backward ops read; the one of op i is number 2 n - 1 - i."""
    n = len(reads)
    readers: list[list[int]] = [[] for _ in reads]
    for i, row in enumerate(reads):
        for j in set(row):
            readers[j].append(i)
    return [(i, *reads[i], *(2 * n - 1 - j for j in readers[i])) for i in range(n - 1, -1, -1)]


def _graph(
    name: str, reads: Reads, seconds: np.ndarray, sizes: np.ndarray, num_forward: int
) -> Graph:
    return build_graph(
        name,
        [
            Op(
                name=f"op{i}",
                kind="bench.op",
                inputs=tuple(f"t{j}" for j in dict.fromkeys(row)),
                outputs=(Tensor(name=f"t{i}", bytes=int(sizes[i])),),
                seconds={"accelerator": float(seconds[i])},
                backward_of=f"op{2 * num_forward - 1 - i}" if i >= num_forward else None,
            )
            for i, row in enumerate(reads)
        ],
    )
