"""The child process: `python -m pardnn.solvers lp` reads a problem on stdin, answers on stdout.

One JSON object each way; {"missing": package} if the solver's package cannot be imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

#: The package that each module of this folder needs, as `pip` names it.
PACKAGES = {"cp": "ortools", "lp": "highspy", "milp": "highspy", "parts": "pymetis"}


def main(solver: str) -> None:
    """Answer one problem.

    Args:
        solver: Name of the module, such as "lp".
    """
    # METIS complains on standard output, for example of parts that are empty: not in the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    problem = json.load(sys.stdin)
    try:
        module = importlib.import_module(f"{__package__}.{solver}")
    except ImportError:
        answer = {"missing": PACKAGES[solver]}
    else:
        answer = module.solve(problem)
    with os.fdopen(answer_to, "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main(sys.argv[1])
