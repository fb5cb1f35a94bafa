"""A 0-1 program for HiGHS: pick one option of each row, pay for options and for pairs of them.

Reads {"unary": [[cost]], "pairs": [[row, row, [[cost]]]], "scale", "seconds"}, costs divided by
"scale" for the solver; writes {"choice", "bound"} or {"status"}. The linearisation is the local
polytope: one variable for each pair of options, which sum to the variables of the options.
"""

# The solver is an optional extra.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import highspy


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return {"choice": option of each row, "bound": proven}, or {"status": why there is none}."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 1e-9)
    solver.setOptionValue("time_limit", float(problem["seconds"]))
    scale = problem["scale"]
    chosen: list[list[Any]] = []
    for costs in problem["unary"]:
        row = [solver.addVariable(0, 1, c / scale) for c in costs]
        for variable in row:
            solver.setInteger(variable.index)
        solver.addConstr(sum(row[1:], row[0]) == 1)
        chosen.append(row)
    for i, j, costs in problem["pairs"]:
        pair = [[solver.addVariable(0, 1, c / scale) for c in row] for row in costs]
        for option, row in zip(chosen[i], pair, strict=True):
            solver.addConstr(sum(row[1:], row[0]) == option)
        for option, column in zip(chosen[j], zip(*pair, strict=True), strict=True):
            solver.addConstr(sum(column[1:], column[0]) == option)
    solver.minimize()
    found = [solver.variableValue(v) for row in chosen for v in row]
    info = solver.getInfo()
    if info.primal_solution_status != 2:
        return {"status": solver.modelStatusToString(solver.getModelStatus())}
    choice: list[int] = []
    for row in chosen:
        values, found = found[: len(row)], found[len(row) :]
        choice.append(max(range(len(row)), key=values.__getitem__))
    return {"choice": choice, "bound": info.mip_dual_bound * scale}
