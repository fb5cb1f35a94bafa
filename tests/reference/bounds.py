"""Lower bounds from their definitions: all subsets of inputs, all ancestors of each op."""

from collections.abc import Sequence
from itertools import combinations

from pardnn.graph.ir import Graph
from tests.reference.pardnn import op_successors


def heads(
    graph: Graph, seconds: Sequence[float], link: tuple[float, float], *, backwards: bool = False
) -> list[float]:
    """Seconds before each op, at least; backwards those after it.

    What an op reads arrives, or is made on its device, one op after the other: the least over all
    subsets of what could be made there.
    """
    edges = [
        (j, i, None if size < 0 else link[0] + size * link[1])
        for j, row in enumerate(op_successors(graph))
        for i, size in row.items()
    ]
    if backwards:
        edges = [(i, j, comm) for j, i, comm in edges]
    found: dict[int, float] = {}

    def local(ops: Sequence[int]) -> float:
        at = 0.0
        for op in sorted(ops, key=head):
            at = max(at, head(op)) + seconds[op]
        return at

    def head(op: int) -> float:
        if op not in found:
            before = [(j, comm) for j, i, comm in edges if i == op]
            inputs = {j: head(j) + seconds[j] + comm for j, comm in before if comm is not None}
            splits = [
                max([local(made), *(inputs[j] for j in inputs if j not in made)])
                for size in range(len(inputs) + 1)
                for made in combinations(inputs, size)
            ]
            found[op] = max([min(splits), *(head(j) + seconds[j] for j, _ in before)])
        return found[op]

    return [head(op) for op in range(len(seconds))]


def cut_seconds(graph: Graph, seconds: Sequence[float], share: Sequence[float]) -> float:
    """The parts between ops that are ordered with all others: each its longest path or its work."""
    n, successors = len(seconds), op_successors(graph)
    after = {i: _reached(successors, i) for i in range(n)}
    before = {i: {j for j in range(n) if i in after[j]} for i in range(n)}
    cuts = {i for i in range(n) if len(after[i]) + len(before[i]) == n - 1}
    parts: dict[int, list[int]] = {}
    for op in set(range(n)) - cuts:
        parts.setdefault(len(before[op] & cuts), []).append(op)

    def path(op: int, part: list[int]) -> float:
        return seconds[op] + max((path(j, part) for j in successors[op] if j in part), default=0.0)

    if not cuts:
        return 0.0
    return sum(seconds[op] for op in cuts) + sum(
        max(max(path(op, part) for op in part), sum(share[op] for op in part))
        for part in parts.values()
    )


def _reached(successors: Sequence[dict[int, int]], op: int) -> set[int]:
    found, left = set[int](), list(successors[op])
    while left:
        other = left.pop()
        if other not in found:
            found.add(other)
            left += successors[other]
    return found
