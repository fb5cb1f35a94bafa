"""The best sharding as a 0-1 program, to state how far the search is from it.

Problem: find the optimum of a problem for which the dynamic program has to choose mesh axes one by
one.
Idea: every variable and every factor picks one of its options over all mesh axes together, and the
cost of moving a tensor for an op belongs to a pair of options. Only tensors that must share a class
do, so the answer also shows the loss by coarsening.
Complexity: NP-hard; HiGHS in a child process, within a time limit. For models of some dozen ops.
Reference: the linearisation is the local polytope of graphical models; in the field: AutoParallel,
Alpa (Zheng et al., OSDI 2022), section 4.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pardnn.errors import StuckError
from pardnn.shard.search.cost_tables import NEVER, CostTables, State
from pardnn.shard.search.dynamic_program import subproblem
from pardnn.solvers import ask, numbers, wrong_answer


class ExactSolution(NamedTuple):
    """An answer of the solver.

    Attributes:
        state: The choice.
        cost: Of the choice, in the objective's unit.
        bound: Proven: no choice costs less.
    """

    state: State
    cost: float
    bound: float


def exact_state(tables: CostTables, *, seconds: float = 60.0) -> ExactSolution:
    """Return the best choice of all mesh axes, as a 0-1 program.

    Args:
        tables: Of a problem coarsened to `NEEDED`.
        seconds: Time limit.

    Raises:
        UsageError: E219, if the solver is not installed.
        StuckError: E709, if nothing was found in time.
        PardnnError: E109, if the solver fails.
    """
    problem, count = tables.problem, len(tables.axis_sizes)
    undecided = (None,) * count
    empty = State((undecided,) * len(problem.variables), (undecided,) * len(problem.factors))
    sub = subproblem(tables, empty, tuple(range(count)))
    unary = [costs.tolist() for costs in sub.layout_costs]
    pairs: list[Any] = []
    for number, (factor, costs) in enumerate(zip(problem.factors, sub.factor_costs, strict=True)):
        weight = len(factor.ops)
        unary.append((costs.computation * weight).tolist())
        for variable, values in costs.by_variable.items():
            row = len(sub.layout_costs) + number
            pairs.append([row, variable, (values * weight).clip(max=NEVER).tolist()])
    finite = [c for _, _, rows in pairs for row in rows for c in row if c < NEVER / 10]
    scale = max(max(finite, default=1.0), 1e-9)
    most = 1e4 * scale  # of what must not be: larger numbers spoil the solver's arithmetic
    unary = [[min(c, most) for c in row] for row in unary]
    pairs = [[i, j, [[min(c, most) for c in row] for row in rows]] for i, j, rows in pairs]
    program = {"unary": unary, "pairs": pairs, "seconds": seconds, "scale": scale}
    answer = ask("milp", program, seconds=2 * seconds + 30, extra="exact")
    if "status" in answer:
        raise StuckError(f"no sharding within {seconds:g} s: {answer['status']}", code="E709")
    choice = [int(option) for option in numbers("milp", answer, "choice", len(unary))]
    if not all(0 <= c < len(row) for c, row in zip(choice, unary, strict=True)):
        raise wrong_answer("milp", "an option that does not exist")
    [bound] = numbers("milp", {"bound": [answer.get("bound")]}, "bound", 1)
    layouts = tuple(o[c] for o, c in zip(sub.options, choice, strict=False))
    chosen = zip(sub.factor_costs, choice[len(layouts) :], strict=True)
    axes = tuple(costs.strategies.axes[strategy] for costs, strategy in chosen)
    cost = sum(row[c] for row, c in zip(unary, choice, strict=True))
    cost += sum(values[choice[i]][choice[j]] for i, j, values in pairs)
    return ExactSolution(State(layouts, axes), cost, bound)
