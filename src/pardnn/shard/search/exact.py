"""The best sharding as a 0-1 program, to state how far the search is from it.

Every decision and every op is a row of options over all mesh axes together, and what an op moves
of a tensor is a cost of a pair of options. No tensors are tied but those that must be, so the
answer also says what coarsening loses. For models of some dozen ops.
Complexity: NP-hard; HiGHS in a child process, within a time limit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pardnn.errors import StuckError
from pardnn.shard.search.cost_tables import NEVER, State, Tables
from pardnn.shard.search.dynamic_program import opened_problem
from pardnn.shard.search.problem import Problem
from pardnn.solvers import ask, wrong_answer


class Exact(NamedTuple):
    """An answer of the solver.

    Attributes:
        state: The choice.
        cost: Of it, in the objective's unit.
        bound: Proven: no choice costs less.
    """

    state: State
    cost: float
    bound: float


def exact_state(tables: Tables, *, seconds: float = 60.0) -> Exact:
    """Return the best choice of all mesh axes, as a 0-1 program.

    Args:
        tables: Of a problem coarsened to `NEEDED`.
        seconds: Time limit.

    Raises:
        UsageError: E219, if the solver is not installed.
        StuckError: E709, if nothing was found in time.
        PardnnError: E109, if the solver fails.
    """
    problem, count = tables.problem, len(tables.parts)
    empty = _empty(problem, count)
    opened = opened_problem(tables, empty, tuple(range(count)))
    unary = [held.tolist() for held in opened.held]
    pairs: list[Any] = []
    for number, (term, parcel) in enumerate(zip(problem.terms, opened.parcels, strict=True)):
        weight = len(term.ops)
        unary.append((parcel.computed * weight).tolist())
        for decision, values in parcel.by_decision.items():
            row = len(opened.held) + number
            pairs.append([row, decision, (values * weight).clip(max=NEVER).tolist()])
    finite = [c for _, _, rows in pairs for row in rows for c in row if c < NEVER / 10]
    scale = max(max(finite, default=1.0), 1e-9)
    most = 1e4 * scale  # of what must not be: larger numbers spoil the solver's arithmetic
    unary = [[min(c, most) for c in row] for row in unary]
    pairs = [[i, j, [[min(c, most) for c in row] for row in rows]] for i, j, rows in pairs]
    program = {"unary": unary, "pairs": pairs, "seconds": seconds, "scale": scale}
    answer = ask("milp", program, seconds=2 * seconds + 30, extra="exact")
    if "status" in answer:
        raise StuckError(f"no sharding within {seconds:g} s: {answer['status']}", code="E709")
    if "choice" not in answer:
        raise wrong_answer("milp", "no choice of options")
    choice = answer["choice"]
    layouts = tuple(o[c] for o, c in zip(opened.options, choice, strict=False))
    ways = choice[len(layouts) :]
    axes = tuple(p.ways.axes[w] for p, w in zip(opened.parcels, ways, strict=True))
    cost = sum(row[c] for row, c in zip(unary, choice, strict=True))
    cost += sum(costs[choice[i]][choice[j]] for i, j, costs in pairs)
    return Exact(State(layouts, axes), cost, float(answer["bound"]))


def _empty(problem: Problem, count: int) -> State:
    nothing = (None,) * count
    return State((nothing,) * len(problem.decisions), (nothing,) * len(problem.terms))
