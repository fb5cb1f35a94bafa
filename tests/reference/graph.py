"""Naive twins of `pardnn.graph`: written from the definitions, quadratic or worse."""

from collections.abc import Sequence

from pardnn.graph.ir import Graph, Op


def predecessors(ops: Sequence[Op]) -> list[set[int]]:
    """Ops that each op must follow."""
    return [
        {
            j
            for j, other in enumerate(ops)
            if other.name in op.after or any(t.name in op.inputs for t in other.outputs)
        }
        for op in ops
    ]


def op_pairs(graph: Graph) -> list[tuple[int, int]]:
    return sorted((j, i) for i, earlier in enumerate(predecessors(graph.ops)) for j in earlier)


def topological_order(earlier: Sequence[set[int]]) -> list[int]:
    """The next op is the one whose last predecessor came first; then the one with least number."""
    order: list[int] = []
    while True:
        ready = [
            (max((order.index(j) for j in before), default=-1), i)
            for i, before in enumerate(earlier)
            if i not in order and before <= set(order)
        ]
        if not ready:
            return order
        order.append(min(ready)[1])


def transposed(rows: Sequence[Sequence[int]], num_columns: int) -> list[list[int]]:
    return [
        [i for i, row in enumerate(rows) for j in row if j == column]
        for column in range(num_columns)
    ]


def owner_of(ops: Sequence[Op], name: str) -> str:
    """Follow aliases of a valid graph, one by one."""
    by_tensor = {tensor.name: (op, tensor) for op in ops for tensor in op.outputs}
    while True:
        op, tensor = by_tensor[name]
        if tensor.alias_of is not None:
            name = tensor.alias_of
        elif op.memory == "reference" and op.inputs:
            name = op.inputs[0]
        else:
            return name
