"""A linear program for HiGHS: minimise cost @ x, row_lower <= A x <= row_upper, in a box.

Reads {"cost", "lower", "upper", "row_lower", "row_upper", "start", "index", "value"}, the matrix by
rows and null for infinity; writes {"x"} or {"status"}.
"""

# The solver is an optional extra.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import highspy
import numpy as np


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return {"x": values} of an optimal solution, or {"status": why there is none}."""

    def row(name: str, none: float = 0.0) -> Any:
        return np.array([none if v is None else v for v in problem[name]], dtype=np.float64)

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(problem["cost"]), len(problem["row_lower"])
    lp.col_cost_ = row("cost")
    lp.col_lower_, lp.col_upper_ = row("lower", -highspy.kHighsInf), row("upper", highspy.kHighsInf)
    lp.row_lower_ = row("row_lower", -highspy.kHighsInf)
    lp.row_upper_ = row("row_upper", highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(problem["start"], dtype=np.int32)
    lp.a_matrix_.index_ = np.array(problem["index"], dtype=np.int32)
    lp.a_matrix_.value_ = row("value")
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return {"status": solver.modelStatusToString(solver.getModelStatus())}
    return {"x": [float(v) for v in solver.getSolution().col_value]}
