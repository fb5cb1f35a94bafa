"""Third-party solvers, each behind a child process: a crash there is an error here, no more.

Each module of this folder is one problem: `solve` takes one JSON object and returns another. It
imports its solver and nothing of the planner. `ask` runs it in a child process (`__main__`), and
the caller checks the answer. The child is killed when its time is over and when the parent ends,
however it ends, so no solver is left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pardnn.errors import PardnnError, StuckError, UsageError


def ask(solver: str, problem: dict[str, Any], *, seconds: float, extra: str) -> dict[str, Any]:
    """Return the answer of a solver module of this folder.

    Args:
        solver: Name of the module, such as "lp".
        problem: JSON types.
        seconds: Time limit of the child process.
        extra: The optional dependencies that bring the solver.

    Raises:
        UsageError: E219, if the solver is not installed.
        StuckError: E709, if it does not answer in time.
        PardnnError: E109, if it fails or its answer is no JSON object.
    """
    command = [sys.executable, "-P", "-m", __name__, solver, str(os.getpid())]
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(problem),
            text=True,
            capture_output=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        raise StuckError(
            f"the solver {solver!r} did not answer within {seconds:.3g} s; the graph is too large "
            "for it. Choose another algorithm.",
            code="E709",
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode != 0 or not isinstance(answer, dict):
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise PardnnError(
            f"the solver {solver!r} failed with exit status {done.returncode}: {last:.200}",
            code="E109",
        )
    if "missing" in answer:
        raise UsageError(
            f"this algorithm needs {answer['missing']}, which is not installed.\n"
            f"Install it with: pip install 'pardnn[{extra}]'",
            code="E219",
        )
    return answer


def wrong_answer(solver: str, what: str) -> PardnnError:
    """Return the error for an answer that did not pass its check."""
    return PardnnError(f"the solver {solver!r} gave a wrong answer: {what}", code="E109")
