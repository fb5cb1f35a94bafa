"""The forward ops of a step as one chain, layer by layer, so that blocks of it can be stages.

Problem: a stage is a contiguous block of layers; a step is a list of ops in the order of its code.
Idea: that order follows the layers already, unless a layer runs many times, as in recurrent
networks. Then ops that share a parameter are one layer, together with everything between them,
unless that would be more than a stage (tied embeddings are at both ends of a network). Ops that
depend on no input, such as a transposed weight or a mask, go where their result is first read.
Complexity: O(shared parameters x edges).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import FORWARD, Phases, depends_on_input

#: A layer that runs many times may be so much more than a stage's share of the work.
MOST_SHARED = 1.1


def forward_chain(
    graph: Graph, p: Phases, work: Float64[ndarray, " n"], num_stages: int
) -> Int64[ndarray, " n"]:
    """Return the position of each forward op in the chain of layers; -1 for other ops.

    No op comes before an op that it reads from.

    Args:
        graph: A captured step.
        p: Its phases.
        work: Of each forward op and all that belongs to it, in seconds.
        num_stages: How many blocks are wanted.
    """
    of_input = depends_on_input(graph, p)
    order = [op for op in graph.arrays.topological.tolist() if p.phase[op] == FORWARD]
    chained = [op for op in order if of_input[op]] or order
    is_chained = np.zeros(len(graph.ops), dtype=bool)
    is_chained[chained] = True
    layers = _layers(graph, p, chained, is_chained, work, work[chained].sum() / num_stages)
    position = np.full(len(graph.ops), -1, dtype=np.int64)
    position[_by_layers(p, chained, is_chained, layers)] = np.arange(len(chained))
    for op in reversed(order):
        if not is_chained[op]:
            read = [position[i] for i in p.readers[op] if p.phase[i] == FORWARD]
            position[op] = min((at for at in read if at >= 0), default=0)
    return position


def _layers(
    graph: Graph,
    p: Phases,
    chained: Sequence[int],
    is_chained: ndarray,
    work: ndarray,
    share: float,
) -> list[set[int]]:
    """Return disjoint sets of ops that belong together because they share parameters."""
    found: list[set[int]] = []
    for users in dict.fromkeys(_shared(graph, p, is_chained)):
        new = set(users)
        while True:
            new = _between(p, chained, is_chained, new)
            touched = [layer for layer in found if layer & new]
            if (
                all(layer <= new for layer in touched)
                or work[list(new)].sum() > MOST_SHARED * share
            ):
                break
            new = new.union(*touched)
        if work[list(new)].sum() <= MOST_SHARED * share:
            found = [layer for layer in found if not layer & new] + [new]
    return found


def _shared(graph: Graph, p: Phases, is_chained: ndarray) -> Iterable[tuple[int, ...]]:
    """Yield the chain's ops that read each parameter, through whatever depends on it alone."""
    for parameter, op in enumerate(graph.ops):
        if op.kind != "parameter":
            continue
        stack, seen, users = [parameter], {parameter}, list[int]()
        while stack:
            for reader in p.readers[stack.pop()]:
                if reader in seen or p.phase[reader] != FORWARD:
                    continue
                seen.add(reader)
                (users if is_chained[reader] else stack).append(reader)
        if len(users) > 1:
            yield tuple(sorted(users))


def _between(p: Phases, chained: Sequence[int], is_chained: ndarray, ops: set[int]) -> set[int]:
    """Return ops with all of the chain that lie on a path from one to another."""
    after, before = set(ops), set(ops)
    for op in chained:
        if any(i in after for i in p.reads[op]):
            after.add(op)
    for op in reversed(chained):
        if any(i in before for i in p.readers[op] if is_chained[i]):
            before.add(op)
    return after & before


def _by_layers(
    p: Phases, chained: Sequence[int], is_chained: ndarray, layers: Sequence[set[int]]
) -> list[int]:
    """Return the chain with layers together; as it was if they wait for each other."""
    if not layers:
        return list(chained)
    turn = {op: i for i, op in enumerate(chained)}
    lead = dict(turn)
    for layer in layers:
        first = min(turn[op] for op in layer)
        lead.update(dict.fromkeys(layer, first))
    members: dict[int, list[int]] = {}
    for op in chained:
        members.setdefault(lead[op], []).append(op)
    edges = {
        (lead[i], lead[op])
        for op in chained
        for i in p.reads[op]
        if is_chained[i] and lead[i] != lead[op]
    }
    missing, after = dict.fromkeys(members, 0), dict[int, list[int]]()
    for one, other in edges:
        missing[other] += 1
        after.setdefault(one, []).append(other)
    ready = [layer for layer, count in missing.items() if count == 0]
    heapq.heapify(ready)
    row: list[int] = []
    while ready:
        layer = heapq.heappop(ready)
        row += members[layer]
        for other in after.get(layer, ()):
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready, other)
    return row if len(row) == len(chained) else list(chained)
