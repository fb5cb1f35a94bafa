"""The batch of a step: which dims of its tensors run over the samples.

Idea: dim 0 of the inputs is the batch; ops pass it on through the loops that cut it.
Complexity: O(size of the arguments).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pardnn.graph.ir import Graph
from pardnn.shard.partition.interning import strategies_of
from pardnn.shard.partition.strategy import Cut, Strategy
from pardnn.shard.search.coarsening import OpCall, op_calls
from pardnn.shard.search.problem import Problem


def batch_dims(
    graph: Graph, calls: Sequence[OpCall] | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the dim of each tensor, and the loop of each op, that runs over the batch.

    Dim 0 of every input with dims is one; an op passes it on through the loop that cuts it.

    Args:
        graph: A captured graph.
        calls: From `op_calls`, if they are known.
    """
    dims: dict[str, int] = {
        tensor.name: 0
        for op in graph.ops
        if op.kind == "input"
        for tensor in op.outputs
        if tensor.shape
    }
    loops: dict[str, str] = {}
    known: dict[int, Sequence[Strategy]] = {}
    for op_call in op_calls(graph) if calls is None else calls:
        marked = {p: dims[n] for p, n in op_call.places.items() if isinstance(p, str) and n in dims}
        if not marked:
            continue
        if op_call.number not in known:
            known[op_call.number] = tuple(strategies_of(op_call.number).values())
        for strategy in known[op_call.number]:
            cuts = {p: strategy.inputs.get(str(p)) for p in marked}
            if all(isinstance(c, Cut) and c.dim == marked[p] for p, c in cuts.items()):
                loops[op_call.op.name] = strategy.loop
                for place, name in op_call.places.items():
                    layout = strategy.outputs[place] if isinstance(place, int) else None
                    if isinstance(layout, Cut):
                        dims[name] = layout.dim
                break
    return dims, loops


def batch_variables(problem: Problem, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the dim of each variable that runs over the batch, by root.

    Args:
        problem: The coarse graph.
        dims: The dim of each tensor that does, from `batch_dims`.
    """
    batch: dict[str, int] = {}
    for variable in problem.variables[1:]:
        for name in problem.classes.members[variable.root]:
            own = problem.classes.dims[name]
            if name in dims and dims[name] in own:
                batch[variable.root] = own.index(dims[name])
                break
    return batch
