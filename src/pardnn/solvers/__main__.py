"""The child process: `python -m pardnn.solvers lp` reads a problem on stdin, answers on stdout.

One JSON object each way; {"missing": package} if the solver's package cannot be imported.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

#: The package that each module of this folder needs, as `pip` names it.
PACKAGES = {"cp": "ortools", "lp": "highspy", "milp": "highspy", "parts": "pymetis"}
_PR_SET_PDEATHSIG = 1


def main(solver: str, parent: int) -> None:
    """Answer one problem.

    Args:
        solver: Name of the module, such as "lp".
        parent: Number of the process that asks: this one ends with it, however that ends.
    """
    _end_with(parent)
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


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent is gone (Linux).

    A solver reads nothing while it solves, so a closed pipe would not tell it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be followed
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
