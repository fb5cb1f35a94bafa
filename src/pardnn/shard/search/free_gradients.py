"""The last pass of the search: gradients may have other layouts than their tensors.

Problem: coarsening gives a tensor and its gradient one layout, where the paper tries all
combinations inside a group. Recurrent steps, and ops whose backward pass has other loops
(cumulative sums, sorts, scatters), pay for it.
Idea: take the same coarse graph without the ties between gradients and other tensors. The pass
starts from the result of the tied search, which costs the same there, and chooses mesh axis by mesh
axis once more, or all axes together if that is little work. Under `seconds`, steps of up to 320
calls are not coarsened, so the pass is for larger ones; its result must fit if the tied one does.
Complexity: one or two dynamic programs per mesh axis.
Reference: Tofu (EuroSys 2019), section 5.1: "we use brute-force search" inside a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Mesh
from pardnn.shard.search.coarsening import NEEDED, OpCall
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, solve
from pardnn.shard.search.objective import Objective
from pardnn.shard.search.problem import Problem, make_problem
from pardnn.shard.search.recursion import MANY_FACTORS, POLISHES, best_state, is_tractable, polished
from pardnn.shard.sharding import Sharding

#: By objective, distinct ops without ties above which gradients keep their layouts: seconds of
#: planning for a per cent (under `seconds` GPT-2, 261 of them, takes two and gains nothing).
MOST_FACTORS = {"bytes": 400, "seconds": 200}
#: Times the cost with ties that it must come below: a plan shares fetches that are counted twice
#: here, which eats gains of a per cent (GPT-2 on 16 devices: 1 % less counted, 0.5 % more sent).
#: Seconds that are counted are saved: Word-RNN on 4 K80s, 0.9 % less counted, 1.4 % simulated.
WORTH = {"bytes": 0.98, "seconds": 0.995}


def free_gradients(
    graph: Graph,
    calls: Sequence[OpCall],
    level: int,
    sharding: Sharding,
    objective: str,
    of: Callable[[Problem], Objective],
) -> tuple[Problem, Solution] | None:
    """Return the coarse graph without ties of gradients, and a choice for it that costs less.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        level: Of coarsening.
        sharding: Found with ties.
        objective: "bytes" or "seconds".
        of: The objective of a coarse graph.

    Returns:
        None if nothing is tied, or too little was gained.
    """
    if level == NEEDED or sharding.mesh.size == 1:
        return None
    problem = make_problem(graph, level, calls, tied=False)
    start = _start(problem, sharding) if len(problem.factors) <= MOST_FACTORS[objective] else None
    if start is None:
        return None
    mesh: Mesh = sharding.mesh
    tables = CostTables(problem, of(problem), mesh.shape)
    before = solve(tables, start, ())
    is_many = len(problem.factors) > MANY_FACTORS
    if is_tractable(tables, len(mesh.shape)):
        found = best_state(tables)
    elif len(mesh.shape) == 1:
        found = solve(tables, start, [0])
    else:
        found = polished(tables, before, 1 if is_many else POLISHES)
    return (problem, found) if found.cost < WORTH[objective] * before.cost else None


def _start(problem: Problem, sharding: Sharding) -> State | None:
    """Return the state that stands for a sharding; None if the coarse graph has none."""
    layouts = tuple(
        sharding.layouts.get(variable.root, (None,) * len(sharding.mesh.shape))
        for variable in problem.variables
    )
    for root, members in problem.classes.members.items():
        if problem.classes.shapes[root]:
            for name in members:
                if problem.layout(name, layouts) != sharding.layouts[name]:
                    return None
    axes = tuple(sharding.axes[factor.ops[0].op.name] for factor in problem.factors)
    for factor, chosen in zip(problem.factors, axes, strict=True):
        if any(sharding.axes[c.op.name] != chosen for c in factor.ops):
            return None
    return State(layouts, axes)
