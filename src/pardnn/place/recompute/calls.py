"""From retention intervals to the second calls of a plan, and the order of all calls."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.recompute.problem import WITH, Nodes
from pardnn.place.recompute.retention import Schedule
from pardnn.plan.rewritten.recompute import SecondCall, call_of


def second_calls(
    graph: Graph,
    order: Int64[ndarray, " n"],
    nodes: Nodes,
    kept: Int64[ndarray, " n"],
    schedule: Schedule,
) -> tuple[tuple[SecondCall, ...], list[str]]:
    """Return the second calls of a schedule, and all calls in their order, by name.

    Args:
        graph: The graph.
        order: Its ops as they run.
        nodes: Of them.
        kept: The last op up to which the first result of each op is kept.
        schedule: As `cost_of` has filled it in.
    """
    n = nodes.num_ops
    names = [graph.ops[i].name for i in order.tolist()]
    names += [call_of(name, 2) for name in names]
    calls: list[SecondCall] = []
    for i in np.flatnonzero(schedule.stage < n).tolist():
        readers: dict[int, None] = {}
        last = max(kept[i], nodes.held[i])
        for t in range(nodes.output_ptr[i], nodes.output_ptr[i + 1]):
            for op in nodes.use_op[nodes.use_ptr[t] : nodes.use_ptr[t + 1]].tolist():
                for call, at in ((op, op), (op + n, int(schedule.stage[op]))):
                    is_late = call >= n if nodes.again[i] == WITH else at > last
                    if at < n and is_late:
                        readers[call] = None
        calls.append(SecondCall(op=names[i], readers=tuple(names[call] for call in readers)))
    position = schedule.position
    placed = np.flatnonzero(position >= 0)
    return tuple(calls), [names[i] for i in placed[np.argsort(position[placed])].tolist()]
