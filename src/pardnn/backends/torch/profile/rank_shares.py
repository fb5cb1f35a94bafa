"""The ops of a partitioned graph that are timed: one rank's share, as that rank will run it.

The local ops of all ranks mostly make the same calls. So all ops of the first rank are timed, and
of the other ranks only calls that no earlier rank makes, as with uneven shards, each after the ops
that compute its inputs. That divides the time by about the number of ranks, and is more accurate: a
rank does not find other ranks' tensors in its caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op
from pardnn.plan.partitioned_graph import is_partitioned
from pardnn.plan.pieces import piece_number


def rank_shares(graph: Graph, missing: Sequence[Op]) -> Iterator[Graph]:
    """Yield graphs that together make the calls of some ops.

    Args:
        graph: A captured graph, which is yielded as it is, or a partitioned one.
        missing: The first op of the graph for each call that is to be made.
    """
    if not is_partitioned(graph):
        yield graph
        return
    first = min(map(_rank, graph.ops))
    others = [op for op in missing if _rank(op) != first]
    if len(others) < len(missing):
        yield _share(graph, {op.name for op in graph.ops if _rank(op) == first})
    if others:
        read = {name for op in others for name in op.inputs}
        makers = {op.name for op in graph.ops if any(t.name in read for t in op.outputs)}
        yield _share(graph, makers.union(op.name for op in others))


def _rank(op: Op) -> int:
    return piece_number(op.name)


def _share(graph: Graph, names: Collection[str]) -> Graph:
    """Return the graph of the named ops; what others compute for them is an input."""
    ops = [op for op in graph.ops if op.name in names]
    made = {tensor.name for op in ops for tensor in op.outputs}
    read = {name for op in ops for name in op.inputs if name not in made}
    given: list[Op] = []
    for op in graph.ops:
        received = [tensor for tensor in op.outputs if tensor.name in read]
        if received and op.is_source:
            given.append(op)  # a weight stays one, so that its values are small
            continue
        for tensor in received:
            own = replace(tensor, alias_of=None)
            given.append(Op(name=f"{tensor.name} received", kind="input", outputs=(own,)))
    kept = (replace(op, after=tuple(x for x in op.after if x in names)) for op in ops)
    return build_graph(graph.name, [*given, *kept])
